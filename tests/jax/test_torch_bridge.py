"""Modules of users as functions of JAX."""

import copy
import dataclasses
import gc
import pickle
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from nvalchemiops.jax import torch_bridge
from nvalchemiops.jax.torch_bridge import ScalarSpec, TorchDtypeSpec, TorchModuleWrapper, from_module
from tests.jax.precision import QUICKLY, double_precision  # noqa: F401


class Springs(torch.nn.Module):
    """Bonded atoms, with a parameter and a buffer; energies of systems along leading axes."""

    def __init__(self):
        super().__init__()
        self.stiffness = torch.nn.Parameter(torch.tensor([1.3, 0.7], dtype=torch.float64))
        self.register_buffer("length", torch.tensor(0.8, dtype=torch.float64))
        self.register_buffer("pairs", torch.tensor([[0, 1], [1, 2]]))

    def forward(self, positions, pairs=None):
        pairs = self.pairs if pairs is None else pairs
        bonds = positions[..., pairs[0], :] - positions[..., pairs[1], :]
        return (self.stiffness * (bonds.norm(dim=-1) - self.length) ** 4).sum(-1)


PAIRS = np.array([[0, 1], [1, 2]])
POSITIONS = np.array([[0.0, 0.1, 0.2], [1.1, -0.3, 0.4], [0.5, 1.2, -0.7]])


def springs_of_jax(positions, pairs=PAIRS):
    bonds = positions[..., pairs[0], :] - positions[..., pairs[1], :]
    return (jnp.array([1.3, 0.7]) * (jnp.linalg.norm(bonds, axis=-1) - 0.8) ** 4).sum(-1)


def module_of(forward):
    module = torch.nn.Module()
    module.forward = forward
    return module


def wrap(forward, **options):
    return TorchModuleWrapper(module_of(forward), **options)


def assert_same(found, expected, rtol=1e-13):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-13), found, expected)


# -- values and derivatives -----------------------------------------------------------------------

DERIVATIVES = {
    "value": lambda f, x: f(x),
    "value_and_grad": lambda f, x: jax.value_and_grad(f)(x),
    "jvp": lambda f, x: jax.jvp(f, (x,), (x**2,)),
    "grad of grad": lambda f, x: jax.grad(lambda x: (jax.grad(f)(x) ** 2).sum())(x),
    "hessian": lambda f, x: jax.hessian(f)(x),
    "vmap of grad": lambda f, x: jax.vmap(jax.grad(f))(jnp.stack([x, 2 * x])),
    "grad of vmap": lambda f, x: jax.grad(lambda x: jax.vmap(lambda s: f(s * x))(jnp.array([1.0, 2.0])).prod())(x),
    "scan": lambda f, x: jax.lax.scan(lambda x, _: (x - 0.1 * jax.grad(f)(x), f(x)), x, None, length=3),
}


@pytest.mark.parametrize("vmap_method", ["broadcast_all", "sequential"])
@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives(name, vmap_method):
    """Of every order, in both modes, as those of JAX; parameters keep their gradients."""
    module = Springs()
    wrapper = TorchModuleWrapper(module, enable_vjp=True, vmap_method=vmap_method)
    found = jax.jit(lambda x: DERIVATIVES[name](wrapper, x))(POSITIONS)
    assert_same(found, jax.jit(lambda x: DERIVATIVES[name](springs_of_jax, x))(POSITIONS))
    assert module.stiffness.grad is None and module.stiffness.requires_grad


def attention(x, w):
    """Of atoms, along the first axis: leading axes of a batch are no batch to it, though all shapes fit."""
    return torch.softmax(x[:, 0] * w[:, 0], 0)[:, None] * torch.sin(x)


def attention_of_jax(x, w):
    return jax.nn.softmax(x[:, 0] * w[:, 0], 0)[:, None] * jnp.sin(x)


def message(x, w):
    """The same for any leading axes."""
    distances = ((x[..., None, :, :] - x[..., :, None, :]) ** 2).sum(-1)
    return torch.softmax(-w[..., None, :, 0] * distances, -1) @ x**2


def message_of_jax(x, w):
    distances = ((x[..., None, :, :] - x[..., :, None, :]) ** 2).sum(-1)
    return jax.nn.softmax(-w[..., None, :, 0] * distances, -1) @ x**2


def batched(x):
    """Four slices, as many as there are atoms."""
    return jnp.stack([x, 0.5 * x, x[::-1], x**2])


def vjp(f, x, w, u):
    return jax.vjp(f, x, w)[1](u)


def jvp(f, x, w, t):
    return jax.jvp(lambda x: f(x, w), (x,), (t,))


def energy_of(f):
    return lambda x, w: (f(x, w) ** 3).sum()


JACOBIANS = {
    "jacrev": lambda f, x, w: jax.jacrev(f, (0, 1))(x, w),
    "jacfwd": lambda f, x, w: jax.jacfwd(f, (0, 1))(x, w),
    "hessian": lambda f, x, w: jax.hessian(energy_of(f), (0, 1))(x, w),
    "hessian of a field": lambda f, x, w: jax.hessian(f)(x, w),
    "jacrev of jacrev": lambda f, x, w: jax.jacrev(jax.jacrev(f), 1)(x, w),
    "jacrev of jacfwd": lambda f, x, w: jax.jacrev(jax.jacfwd(f, 1))(x, w),
    "third order": lambda f, x, w: jax.jacfwd(jax.jacfwd(jax.grad(energy_of(f), 1)))(x, w),
    "linearize": lambda f, x, w: jax.vmap(jax.linearize(lambda x: f(x, w), x)[1])(batched(x)),
    "vmap of cotangents": lambda f, x, w: jax.vmap(lambda u: vjp(f, x, w, u))(batched(x)),
    "vmap of tangents": lambda f, x, w: jax.vmap(lambda t: jvp(f, x, w, t))(batched(x)),
    "vmap": lambda f, x, w: jax.vmap(f, (0, None))(batched(x), w),
    "vmap of another input": lambda f, x, w: jax.vmap(f, (None, 0))(x, jnp.stack([w, 2 * w, -w, w**2])),
    "vmap of inputs and cotangents": lambda f, x, w: jax.vmap(lambda x, u: vjp(f, x, w, u))(batched(x), batched(x**2)),
    "vmap of inputs, then cotangents": lambda f, x, w: jax.vmap(
        lambda x: jax.vmap(lambda u: vjp(f, x, w, u), out_axes=1)(batched(x)[:3])
    )(batched(x)),
    "vmap of tangents, then inputs": lambda f, x, w: jax.vmap(
        lambda t: jax.vmap(lambda x: jvp(f, x, w, t))(batched(x))
    )(batched(x)[:3]),
    "vmap of vmap": lambda f, x, w: jax.vmap(jax.vmap(f, (0, None), 1), (None, 0))(batched(x), jnp.stack([w, 3 * w])),
    "vmap of hessian": lambda f, x, w: jax.vmap(jax.hessian(energy_of(f)), (0, None))(batched(x), w),
    "vmap of jacrev of another input": lambda f, x, w: jax.vmap(jax.jacrev(f), (None, 0))(x, jnp.stack([w, 2 * w])),
    "jacrev of vmap": lambda f, x, w: jax.jacrev(lambda x, w: jax.vmap(f, (0, None))(batched(x), w), (0, 1))(x, w),
    "jacfwd of vmap": lambda f, x, w: jax.jacfwd(lambda x, w: jax.vmap(f, (0, None))(batched(x), w), (0, 1))(x, w),
    "gradient summed over slices": lambda f, x, w: jax.grad(
        lambda w: (jax.vmap(jax.jacrev(f), (0, None))(batched(x), w) ** 2).sum()
    )(w),
}


@pytest.mark.everyday_cases("attention-attention_of_jax-broadcast_all")
@pytest.mark.filterwarnings("ignore:.*does not treat leading axes as a batch")
@pytest.mark.parametrize(
    ("forward", "of_jax", "vmap_method"),
    [
        (attention, attention_of_jax, "broadcast_all"),
        (attention, attention_of_jax, "sequential"),
        (message, message_of_jax, "broadcast_all"),
    ],
)
def test_modules_that_couple_atoms(forward, of_jax, vmap_method):
    """Slices of weights and directions are no batch of inputs; nor are those of inputs to a module without a batch."""
    wrapper = wrap(forward, enable_vjp=True, vmap_method=vmap_method)
    x, w = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 3)))

    def evaluated(f):
        return jax.jit(
            lambda: {name: transform(f, x, w) for name, transform in JACOBIANS.items()}, compiler_options=QUICKLY
        )()

    of_torch, expected = evaluated(wrapper), evaluated(of_jax)
    for name in JACOBIANS:
        assert_same(of_torch[name], expected[name], 1e-11)


def test_rows_of_a_jacobian_share_a_call():
    """One forward pass for all; where one backward pass for all fails, there are several."""
    calls = []

    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x**3

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, gradient):
            calls.append("backward")
            return torch.from_numpy(gradient.numpy() * 3 * ctx.saved_tensors[0].numpy() ** 2)

    def cubes(x):
        calls.append("forward")
        return Cube.apply(x) * x.sum()

    wrapper, x = wrap(cubes, enable_vjp=True), jnp.arange(1.0, 5.0)
    evaluate = jax.jit(jax.jacrev(wrapper))
    expected = jax.jacrev(lambda x: x**3 * x.sum())(x)
    assert_same(evaluate(x), expected)
    calls.clear()
    assert_same(evaluate(x), expected)
    assert calls == ["forward"] + 4 * ["backward"]


def test_a_module_that_does_not_batch_says_so_once():
    wrapper = wrap(lambda x: torch.softmax(x, 0) * x, enable_vjp=True)
    evaluate = jax.jit(jax.vmap(wrapper))
    zeros, x = np.zeros((3, 3)), np.arange(9.0).reshape(3, 3) / 9
    assert not evaluate(zeros).any()  # which tells nothing
    with pytest.warns(UserWarning, match="`Module` does not treat leading axes as a batch"):
        found = jax.block_until_ready(evaluate(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(jax.block_until_ready(evaluate(x)), found)
    assert_same(found, jax.vmap(lambda x: jax.nn.softmax(x) * x)(x))


def test_eager_and_by_name():
    wrapper = TorchModuleWrapper(Springs(), enable_vjp=True)
    found = jax.grad(lambda x: wrapper(x, pairs=PAIRS))(jnp.asarray(POSITIONS))
    assert_same(found, jax.grad(springs_of_jax)(POSITIONS))


@pytest.mark.parametrize(("vmap_method", "calls"), [("broadcast_all", 1), ("sequential", 5)])
def test_vmap_calls_a_module_that_batches_once(vmap_method, calls):
    module, shapes = Springs(), []
    wrapper = TorchModuleWrapper(module, enable_vjp=True, vmap_method=vmap_method)
    x = POSITIONS * np.linspace(0.9, 1.1, 5)[:, None, None]
    evaluate = jax.jit(jax.vmap(jax.value_and_grad(wrapper)))
    jax.block_until_ready(evaluate(x))
    handle = module.register_forward_hook(lambda _, inputs, output: shapes.append(tuple(output.shape)))
    found = jax.block_until_ready(evaluate(x))
    handle.remove()
    assert len(shapes) == calls and shapes[0] == ((5,) if calls == 1 else ())
    assert_same(found, jax.vmap(jax.value_and_grad(springs_of_jax))(x))


def test_a_module_that_does_not_batch():
    """Its sum goes over all systems; slice by slice it is right."""
    wrapper = wrap(lambda x: (x**3).sum(), enable_vjp=True)
    x = np.arange(6.0).reshape(3, 2)
    energies, gradients = jax.jit(jax.vmap(jax.value_and_grad(wrapper)))(x)
    assert_same((energies, gradients), ((x**3).sum(1), 3 * x**2))


def test_nested_vmap_over_some_arguments():
    wrapper = wrap(lambda x, w: (torch.sin(x) * w).sum(-1), enable_vjp=True)

    def evaluated(f):
        inner = jax.vmap(jax.grad(f, (0, 1)), in_axes=(1, None))
        return jax.jit(jax.vmap(inner, in_axes=(None, 0), out_axes=1))(x, w)

    x, w = np.arange(6.0).reshape(2, 3), np.arange(8.0).reshape(4, 2)
    assert_same(evaluated(wrapper), evaluated(lambda x, w: (jnp.sin(x) * w).sum(-1)))


def test_forces_that_the_module_computes():
    class Forces(Springs):
        def forward(self, positions, pairs):
            positions = positions.detach().requires_grad_(True)
            energy = super().forward(positions, pairs)
            return {"energy": energy.detach(), "forces": -torch.autograd.grad(energy.sum(), positions)[0]}

    wrapper = TorchModuleWrapper(Forces(), requires_grad=True)
    found = jax.jit(wrapper)(POSITIONS, PAIRS)
    energy, gradient = jax.value_and_grad(springs_of_jax)(POSITIONS)
    assert_same(found, {"energy": energy, "forces": -gradient})
    x = jnp.stack([POSITIONS, 1.5 * POSITIONS])
    assert_same(jax.vmap(lambda x: wrapper(x, PAIRS))(x)["forces"], -jax.vmap(jax.grad(springs_of_jax))(x))


def test_derivatives_of_forces_that_the_module_computes():
    def forward(x):
        x = x if x.requires_grad else x.requires_grad_()
        energy = (x**4).sum()
        return energy, torch.autograd.grad(energy, x, create_graph=True)[0]

    wrapper = wrap(forward, requires_grad=True, enable_vjp=True)
    x = jnp.arange(3.0)
    assert_same(jax.jacrev(lambda x: wrapper(x)[1])(x), jnp.diag(12 * x**2))


def test_no_derivative_without_enable_vjp():
    with pytest.raises(ValueError, match="`Springs` is not differentiable: enable_vjp=True"):
        jax.grad(lambda x: TorchModuleWrapper(Springs())(x, PAIRS))(POSITIONS)


@pytest.mark.parametrize("cut", ["no_grad", "detach"])
def test_outputs_without_a_graph(cut):
    """Also where parameters of the module require gradients."""

    class Cut(Springs):
        def forward(self, positions, pairs):
            if cut == "detach":
                return super().forward(positions.detach(), pairs)
            with torch.no_grad():
                return super().forward(positions, pairs)

    wrapper = TorchModuleWrapper(Cut(), enable_vjp=True)
    evaluate = jax.jit(jax.grad(lambda x: wrapper(x, PAIRS)))
    with pytest.warns(UserWarning, match="`Cut`: in torch's autograd graph the outputs do not depend on the inputs"):
        gradient = jax.block_until_ready(evaluate(POSITIONS))
    assert not gradient.any()


# -- arguments and outputs ------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Graph:
    positions: object
    species: object
    cell: object = None


def test_pytrees_in_and_out():
    """Dicts, tuples, dataclasses and None, by position and name; Python numbers as they are."""
    seen = []

    def forward(graph, *weights, scale, options):
        seen.append([type(scale), options["shift"], type(options["flag"]), graph.cell])
        energy = (graph.positions.sum(-1) * weights[0] * scale + options["shift"]) * graph.species
        return Graph(positions=(energy, -graph.positions), species=graph.species * 2, cell=None)

    graph = Graph(positions=jnp.arange(6.0).reshape(2, 3), species=jnp.array([1, 2], dtype=jnp.int32))
    wrapper, weight = wrap(forward), jnp.array([0.5, 2.0])
    found = jax.jit(lambda graph, w: wrapper(graph, w, scale=2, options={"shift": 0.5, "flag": True}))(graph, weight)
    energy = (graph.positions.sum(-1) * weight * 2 + 0.5) * graph.species
    assert_same(found, Graph(positions=(energy, -graph.positions), species=graph.species * 2))
    assert found.species.dtype == jnp.int32 and all(each == [int, 0.5, bool, None] for each in seen)


def test_numbers_are_static():
    wrapper = wrap(lambda x, n: x.repeat(n))
    assert [wrapper(jnp.ones(2), n).shape for n in (2, 3)] == [(4,), (6,)]
    inverse = wrap(lambda x, sign: x / sign)
    assert [float(inverse(1.0 * jnp.ones(()), sign)) for sign in (0.0, -0.0, 1, True)] == [np.inf, -np.inf, 1.0, 1.0]


def test_casts_are_differentiated():
    seen = []

    def forward(x, n):
        seen.append(x.dtype)
        return (x**2).sum(-1) * n

    wrapper = wrap(
        forward, input_spec=[TorchDtypeSpec(shape=(-1, 2), dtype=torch.float32), ScalarSpec(int)], enable_vjp=True
    )
    x = jnp.array([[1.0, 2.0], [0.1, 0.2]])
    _, gradient = jax.jit(jax.value_and_grad(lambda x: wrapper(x, 3).sum()))(x)
    assert set(seen) == {torch.float32} and gradient.dtype == jnp.float64
    np.testing.assert_allclose(gradient, 6 * x, rtol=1e-6)
    assert wrapper(x, 3).dtype == jnp.float32


def test_integers_have_no_gradient():
    wrapper = wrap(lambda x, i: (x[i] ** 2).sum(), enable_vjp=True)
    x, i = jnp.arange(4.0), jnp.array([1, 3])
    _, backward = jax.vjp(wrapper, x, i)
    gradient, of_indices = backward(1.0)
    assert_same(gradient, jnp.array([0.0, 2.0, 0.0, 6.0]))
    assert of_indices.dtype == jax.dtypes.float0


ERRORS = {
    "no array": (TypeError, "`x` must be array-like or a Python number, got str", None, ("text", {"a": 1})),
    "deep inside": (TypeError, r"`y\['a'\]` must be array-like", None, (np.ones(2), {"a": torch.ones(2)})),
    "too few": (ValueError, "input_spec has 1 entries, got 2 arguments", [None], (np.ones(2), {"a": 1})),
    "another number": (TypeError, r"`y\['a'\]`: expected int", [None, ScalarSpec(int)], (np.ones(2), {"a": 1.5})),
    "an array": (TypeError, "`x`: expected int", [ScalarSpec(int), None], (np.ones(2), {"a": np.ones(2)})),
    "a number": (TypeError, r"`y\['a'\]`: expected an array", [None, None], (np.ones(2), {"a": 1})),
    "a shape": (
        ValueError,
        r"`x` must have shape \(-1, 3\) by its TorchDtypeSpec, got \(2,\)",
        [TorchDtypeSpec((-1, 3), torch.float32), None],
        (np.ones(2), {"a": np.ones(2)}),
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_wrong_arguments(name):
    """Found when JAX traces, and named."""
    error, text, spec, (x, y) = ERRORS[name]
    wrapper = wrap(lambda x, y: x * y["a"], input_spec=spec)
    with pytest.raises(error, match=text):
        wrapper(x, y)


def test_wrong_declarations():
    with pytest.raises(TypeError, match=r"`input_spec\[1\]` must be TorchDtypeSpec, ScalarSpec or None, got type"):
        wrap(lambda x: x, input_spec=[None, int])
    with pytest.raises(ValueError, match='`vmap_method` must be "broadcast_all" or "sequential"'):
        wrap(lambda x: x, vmap_method="parallel")


def test_a_shape_may_be_a_list():
    model = wrap(lambda x: x, input_spec=[TorchDtypeSpec([-1, 3], torch.float64)])
    assert jax.jit(model)(np.ones((2, 3))).shape == (2, 3)


def test_an_output_that_is_no_tensor():
    with pytest.raises(TypeError, match=r"output 1 must be a torch.Tensor, got int"):
        jax.jit(wrap(lambda x: (x, 42)))(np.ones(3))


# -- wrappers as values ---------------------------------------------------------------------------


def test_equal_wrappers_are_traced_once():
    module, traces = Springs(), []

    @jax.jit
    def evaluate(wrapper, x):
        traces.append(wrapper)
        return wrapper(x, PAIRS)

    spec = [TorchDtypeSpec((-1, 3), torch.float64), None]
    first = evaluate(TorchModuleWrapper(module, input_spec=spec), POSITIONS)
    assert_same(evaluate(TorchModuleWrapper(module, input_spec=list(spec)), POSITIONS), first)
    assert len(traces) == 1
    evaluate(TorchModuleWrapper(module, input_spec=spec, vmap_method="sequential"), POSITIONS)
    evaluate(TorchModuleWrapper(copy.deepcopy(module), input_spec=spec), POSITIONS)
    assert len(traces) == 3


def test_wrappers_are_static_frozen_and_pickled():
    spec = [None, None]
    wrapper = TorchModuleWrapper(Springs(), input_spec=spec, enable_vjp=True)
    leaves, tree = jax.tree.flatten(wrapper)
    assert leaves == [] and jax.tree.unflatten(tree, leaves) == wrapper and wrapper.input_spec is spec
    with pytest.raises(dataclasses.FrozenInstanceError):
        wrapper.enable_vjp = False
    assert dataclasses.replace(wrapper, enable_vjp=False) != wrapper
    value = wrapper(POSITIONS, PAIRS)
    other = pickle.loads(pickle.dumps(wrapper))
    assert other.enable_vjp and other != wrapper and float(other(POSITIONS, PAIRS)) == float(value)


def test_changed_parameters_count():
    """The module is called each time, so that it may be trained in between."""
    module = Springs()
    evaluate = jax.jit(TorchModuleWrapper(module))
    before = evaluate(POSITIONS, PAIRS)
    with torch.no_grad():
        module.stiffness *= 2
    assert_same(evaluate(POSITIONS, PAIRS), 2 * before)


def test_a_module_that_keeps_tensors_from_a_call():
    """A run without data, for shapes, leaves nothing in it."""

    class Keeps(torch.nn.Module):
        def forward(self, x):
            if not hasattr(self, "grid"):
                self.grid = torch.arange(x.shape[-1], dtype=x.dtype)
            return x * self.grid

    module = Keeps()
    assert_same(jax.jit(TorchModuleWrapper(module))(np.ones(3)), jnp.arange(3.0))
    assert type(module.grid) is torch.Tensor


def test_copies_on_other_devices_go_with_their_module():
    module, meta = Springs(), torch.device("meta")
    wrapper = TorchModuleWrapper(module)
    assert wrapper.get_for_device(torch.device("cpu")) is wrapper.get_for_device("cpu") is module
    there = wrapper.get_for_device(meta)
    assert there.stiffness.device == meta and TorchModuleWrapper(module).get_for_device(meta) is there
    assert len(torch_bridge._copies) == 1
    module.to(meta)  # moved by its owner
    assert wrapper.get_for_device(meta) is module
    reference = weakref.ref(there)
    del wrapper, module, there
    gc.collect()
    assert reference() is None and not torch_bridge._copies


def test_a_dead_module_is_freed():
    module = Springs()
    reference = weakref.ref(module)
    wrapper = TorchModuleWrapper(module, enable_vjp=True)
    jax.block_until_ready(jax.jit(jax.grad(wrapper))(POSITIONS))
    del wrapper, module
    jax.clear_caches()  # compiled programs call it
    gc.collect()
    assert reference() is None


@pytest.mark.gpu
def test_on_a_gpu():
    module = Springs()  # on the CPU
    wrapper = TorchModuleWrapper(module, enable_vjp=True)
    found = jax.jit(jax.value_and_grad(lambda x: wrapper(x, PAIRS)))(jnp.asarray(POSITIONS))
    assert_same(found, jax.value_and_grad(springs_of_jax)(POSITIONS), rtol=1e-12)
    assert wrapper.get_for_device("cuda").stiffness.is_cuda and not module.stiffness.is_cuda


# -- torch.compile --------------------------------------------------------------------------------


@pytest.fixture
def compiled_graphs(monkeypatch):
    """Modules are compiled on a CPU, too; the graphs."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch_bridge, "COMPILED_DEVICES", {"cpu"})
    compile_module = torch.compile
    monkeypatch.setattr(torch, "compile", lambda module: compile_module(module, backend=backend))
    return graphs


def test_values_and_first_derivatives_are_compiled(compiled_graphs):
    wrapper = TorchModuleWrapper(Springs(), enable_vjp=True)
    found = jax.jit(jax.value_and_grad(wrapper))(POSITIONS)
    assert len(compiled_graphs) == 1
    assert_same(found, jax.value_and_grad(springs_of_jax)(POSITIONS))
    assert_same(jax.jit(jax.hessian(wrapper))(POSITIONS), jax.hessian(springs_of_jax)(POSITIONS), 1e-12)
    assert len(compiled_graphs) == 1
    switched_off = TorchModuleWrapper(Springs(), _compile=False)
    assert_same(jax.jit(switched_off)(POSITIONS, PAIRS), springs_of_jax(POSITIONS))
    assert len(compiled_graphs) == 1


def test_a_failure_to_compile_is_a_warning(compiled_graphs, monkeypatch):
    wrapper = TorchModuleWrapper(Springs())

    def failing(module):
        def run(*args):
            raise RuntimeError("no compiler here")

        return run

    monkeypatch.setattr(torch, "compile", failing)
    evaluate = jax.jit(wrapper)
    with pytest.warns(UserWarning, match="`Springs` runs without torch.compile, which failed: no compiler here"):
        assert_same(jax.block_until_ready(evaluate(POSITIONS, PAIRS)), springs_of_jax(POSITIONS))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.block_until_ready(evaluate(POSITIONS, PAIRS))


# -- parameters -----------------------------------------------------------------------------------


class Scaled(torch.nn.Module):
    """A network with a buffer, tied weights, and a keyword."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("shift", torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64))

    def forward(self, x, scale=1.0):
        return (scale * self.second(torch.tanh(self.first(x))) + self.shift).square().sum()


def test_derivatives_by_parameters_are_those_of_torch():
    module = Scaled().double()
    apply, parameters = from_module(module)
    assert set(parameters) == {"first.weight", "first.bias", "second.bias"}
    x = torch.linspace(-1.0, 1.0, 12, dtype=torch.float64).reshape(4, 3)
    value = module(x, scale=2.0)
    expected = torch.autograd.grad(value, list(module.parameters()), create_graph=True)
    curvature = torch.autograd.grad(sum(g.sum() for g in expected), list(module.parameters()))

    def loss(parameters):
        return apply(parameters, jnp.asarray(x.numpy()), scale=2.0)

    found, slopes = jax.jit(jax.value_and_grad(loss))(parameters)
    np.testing.assert_allclose(found, value.item(), rtol=1e-14)
    ones = jax.tree.map(jnp.ones_like, parameters)
    second = jax.jit(lambda p: jax.jvp(jax.grad(loss), (p,), (ones,))[1])(parameters)
    for name, slope, curved in zip(dict(module.named_parameters()), expected, curvature):
        np.testing.assert_allclose(slopes[name], slope.detach(), rtol=1e-12)
        np.testing.assert_allclose(second[name], curved, rtol=1e-12)
    assert all(parameter.grad is None for parameter in module.parameters())


def test_modules_of_forces_and_declared_outputs():
    """Forces need ``requires_grad``; a module that reads its values cannot be traced, and needs ``out_shapes``."""

    class Forces(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.stiffness = torch.nn.Parameter(torch.tensor(3.0, dtype=torch.float64))

        def forward(self, x):
            x = x.detach().requires_grad_()
            energy = self.stiffness * x.square().sum() if float(x.detach().sum()) > 0.0 else x.sum()
            return -torch.autograd.grad(energy, x, create_graph=True)[0]

    def shapes(parameters, x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    x, parameters = jnp.arange(3.0), {"stiffness": jnp.asarray(2.0)}
    for declared in (shapes, jax.ShapeDtypeStruct(x.shape, x.dtype)):
        apply, _ = from_module(Forces(), declared, requires_grad=True)
        assert_same(jax.jit(apply)(parameters, x), -4.0 * x)
        slope = jax.jit(jax.grad(lambda p, apply=apply: apply(p, x).sum()))(parameters)["stiffness"]
        assert_same(slope, -2.0 * x.sum())
    for options in ({"requires_grad": True}, {"out_shapes": shapes}):
        with pytest.raises((RuntimeError, ValueError)):
            jax.block_until_ready(from_module(Forces(), **options)[0](parameters, x))


def test_modules_with_several_names_keep_their_parameters():
    """One block that is applied twice: torch's functional call would leave the tensors of the last call in it."""
    block = torch.nn.Linear(3, 3).double()
    module = torch.nn.Sequential(block, torch.nn.Tanh(), block)
    before = list(module.parameters())
    apply, parameters = from_module(module)
    doubled = jax.tree.map(lambda p: 2.0 * p, parameters)
    x = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)
    slopes = jax.grad(lambda p: apply(p, x).sum())(doubled)

    def expected(p):
        weight, bias = p["0.weight"].T, p["0.bias"]
        return (jnp.tanh(x @ weight + bias) @ weight + bias).sum()

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-13), slopes, jax.grad(expected)(doubled))
    assert [id(p) for p in module.parameters()] == [id(p) for p in before]
    np.testing.assert_allclose(apply({}, x).sum(), expected(parameters), rtol=1e-14)


class Checkpointed(Scaled):
    """`Scaled`, whose layers torch computes again in the backward pass."""

    def forward(self, x, scale=1.0):
        return torch.utils.checkpoint.checkpoint(super().forward, x, scale, use_reentrant=False)


def test_checkpoints_in_modules_are_computed_again_with_the_given_parameters():
    """Gradients and their derivatives, alone and under vmap, are those without checkpoints; the module is restored."""
    plain, module = Scaled().double(), Checkpointed().double()
    before = list(module.parameters())
    x = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)
    (apply, parameters), (found_of, _) = from_module(plain), from_module(module)
    several = jax.tree.map(lambda p: jnp.stack([2.0 * p, -0.5 * p]), parameters)

    def derivatives(apply, p):
        return jax.jvp(jax.grad(lambda p: apply(p, x)), (p,), (parameters,))

    found, expected = (jax.vmap(lambda p, f=f: derivatives(f, p))(several) for f in (found_of, apply))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), found, expected)
    assert all(a is b for a, b in zip(module.parameters(), before, strict=True))


def test_modules_keep_their_parameters_in_calls_from_several_threads():
    """Calls with different parameters, each of which is interrupted while it computes derivatives."""
    weight = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64))

    class Slow(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = weight

        def forward(self, x):
            product = self.weight * x
            if product.requires_grad:
                product.register_hook(lambda gradient: time.sleep(2e-3))
            time.sleep(2e-3)
            return (product * self.weight).sum()

    module = Slow()
    slopes = jax.jit(jax.value_and_grad(from_module(module)[0]))
    x = jnp.arange(1.0, 4.0)

    def found(number):
        value, slope = slopes({"weight": jnp.array([float(number)])}, x)
        return float(value), float(slope["weight"][0])

    with ThreadPoolExecutor(4) as pool:
        for number, values in zip([*range(1, 5)] * 5, pool.map(found, [*range(1, 5)] * 5)):
            assert values == (6.0 * number**2, 12.0 * number)
    assert module.weight is weight


def test_parameters_are_arguments():
    module = Scaled().double()
    apply, parameters = from_module(module)
    x = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)
    before = module(torch.tensor(np.array(x))).item()
    several = jax.tree.map(lambda p: jnp.stack([p, 0.5 * p]), parameters)
    ensemble = jax.jit(jax.vmap(apply, in_axes=(0, None)))(several, x)
    halved = jax.jit(apply)(jax.tree.map(lambda p: 0.5 * p, parameters), x)
    np.testing.assert_allclose(ensemble, [before, halved], rtol=1e-12)
    np.testing.assert_allclose(jax.jit(apply)({"first.bias": parameters["first.bias"]}, x), before, rtol=1e-14)
    with torch.no_grad():
        module.first.bias.add_(1.0)
    np.testing.assert_allclose(apply(parameters, x), before, rtol=1e-14)  # copies
    assert module(torch.tensor(np.array(x))).item() != before
    with pytest.raises(ValueError, match=r"`Scaled` has no parameter 'frist\.bias'"):
        apply({"frist.bias": parameters["first.bias"]}, x)
    with pytest.raises(ValueError, match=r"`first\.bias` must have shape \(3,\), got \(1,\)"):
        apply({"first.bias": jnp.ones(1)}, x)
