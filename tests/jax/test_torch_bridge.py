"""Modules of users as functions of JAX: arguments, outputs, copies, and the compiler of torch."""

import copy
import dataclasses
import gc
import pickle
import threading
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from nvalchemiops.jax import torch_bridge
from nvalchemiops.jax.torch_bridge import ScalarSpec, TorchDtypeSpec, TorchModuleWrapper
from tests.jax.modules import PAIRS, POSITIONS, Springs, assert_same, springs_of_jax, wrap
from tests.jax.precision import double_precision  # noqa: F401

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
    for names in ((), ("y",), ("x", "y")):
        given = (x, y)[: 2 - len(names)]
        with pytest.raises(error, match=text):
            wrapper(*given, **{name: {"x": x, "y": y}[name] for name in names})


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


def test_a_module_that_cannot_be_copied():
    """It is asked for shapes itself."""
    module = Springs()
    module.lock = threading.Lock()
    assert_same(jax.jit(TorchModuleWrapper(module))(POSITIONS, PAIRS), springs_of_jax(POSITIONS))


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
