"""Modules of torch, and the same function in JAX, that the tests of the bridge share."""

import jax
import jax.numpy as jnp
import numpy as np
import torch

from nvalchemiops.jax.torch_bridge import TorchModuleWrapper


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
