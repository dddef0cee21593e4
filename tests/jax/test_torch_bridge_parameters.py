"""Modules of users as functions of JAX whose parameters are arguments."""

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from nvalchemiops.jax.interactions.electrostatics import ewald_summation
from nvalchemiops.jax.torch_bridge import TorchModuleWrapper, from_module
from nvalchemiops.torch.interactions.electrostatics import ewald_summation as torch_ewald_summation
from tests.jax.modules import assert_same
from tests.jax.precision import double_precision  # noqa: F401


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


class Charged(torch.nn.Module):
    """Charges that depend on the positions, in an Ewald sum. The number of its k-vectors depends on the cell."""

    def __init__(self):
        super().__init__()
        self.hardness = torch.nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, x, cell):
        charges = (self.hardness * x).sin().sum(dim=1)
        charges = charges - charges.mean()
        return torch_ewald_summation(x, charges, cell, 0.5, k_cutoff=3.0, cutoff=4.0, energy_reduction="system").sum()


def test_energies_of_this_library_in_a_module():
    """The shapes of its outputs are found, although shapes inside of it depend on values; also by the wrapper."""
    rng = np.random.default_rng(0)
    x, cell = rng.uniform(0.0, 5.0, (6, 3)), np.diag([5.0, 6.0, 7.0])
    apply, parameters = from_module(Charged())

    def expected(parameters, x):
        charges = jnp.sin(parameters["hardness"] * x).sum(axis=1)
        charges = charges - charges.mean()
        options = {"k_cutoff": 3.0, "cutoff": 4.0, "energy_reduction": "system"}
        return ewald_summation(x, charges, cell, 0.5, **options).sum()

    found = jax.jit(jax.value_and_grad(apply, (0, 1)))(parameters, x, cell)
    close = partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12)
    jax.tree.map(close, found, jax.jit(jax.value_and_grad(expected, (0, 1)))(parameters, x))
    close(jax.jit(TorchModuleWrapper(Charged()))(x, cell), found[0])


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
