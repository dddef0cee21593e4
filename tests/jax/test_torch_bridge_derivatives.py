"""Modules of users as functions of JAX: their derivatives, of every order, and what maps them."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from nvalchemiops.jax.torch_bridge import TorchModuleWrapper
from tests.jax.modules import PAIRS, POSITIONS, Springs, assert_same, springs_of_jax, wrap
from tests.jax.precision import QUICKLY, double_precision  # noqa: F401

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


@pytest.mark.parametrize("traced", [True, False])
def test_a_module_that_takes_no_batch(traced):
    """It raises when it is asked for shapes, or only when it is called with values."""

    def forward(x):
        if x.ndim > 1 and (traced or type(x) is torch.Tensor):
            raise ValueError("one system")
        return x**2 * x.sum(-1, keepdim=True)

    x = np.arange(6.0).reshape(3, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error" if traced else "ignore")
        found = jax.block_until_ready(jax.jit(jax.vmap(wrap(forward)))(x))
    assert_same(found, x**2 * x.sum(1, keepdims=True))


@pytest.mark.parametrize("batches", [True, False])
def test_integers_tell_whether_a_module_batches(batches):
    def forward(x):
        x = (3.0 * x).long()
        return x - (x[..., :1] if batches else x.flatten()[0])

    evaluate, x = jax.jit(jax.vmap(wrap(forward))), np.array([[0.0, 1.0], [2.0, 5.0], [7.0, 1.0]])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = jax.block_until_ready(evaluate(x))
    assert found.dtype == jnp.int64 and (found == 3 * (x - x[:, :1])).all()
    assert len([warning for warning in said if "batch" in str(warning.message)]) == (not batches)


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
