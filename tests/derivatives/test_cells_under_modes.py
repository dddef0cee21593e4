"""Second derivatives by cells whose singular values are equal, where a mode or a transform sees the operations.

Torch differentiates determinants by singular values there, and gets the second derivative of a cubic cell wrong.
"""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from nvalchemiops.torch import System
from nvalchemiops.torch.interactions.electrostatics import ewald_reciprocal_space, pme_reciprocal_space
from nvalchemiops.torch.operators.lattice import lattice_of
from tests.lanes.fibers import gpu_layout
from tests.support.systems import crystal

SALT = crystal("rocksalt", 5.6, 1, 0.1)
SUMS = {
    "ewald": lambda cell: ewald_reciprocal_space(*SALT[:2], cell, None, 0.6, k_cutoff=2.5),
    "mesh": lambda cell: pme_reciprocal_space(*SALT[:2], cell, 0.6, mesh_dimensions=(8, 8, 8)),
    "volume": lambda cell: System(SALT.positions, cell=cell).volume,
}


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def second(function, cell):
    cell = cell.clone().requires_grad_()
    weights = torch.arange(cell.numel(), dtype=cell.dtype).sin().reshape(cell.shape)
    (first,) = torch.autograd.grad(function(cell).sum(), cell, create_graph=True)
    return torch.autograd.grad((weights * first).sum(), cell)[0]


@pytest.mark.parametrize("name", SUMS)
def test_of_a_cubic_cell(name):
    """By differences of first derivatives; watched, traced; and by transforms."""
    function, cell = SUMS[name], SALT.cell.reshape(3, 3)
    expected, h = torch.zeros_like(cell), 1e-4
    weights = torch.arange(9, dtype=cell.dtype).sin().reshape(3, 3)

    def slope(cell):
        cell = cell.clone().requires_grad_()
        return (weights * torch.autograd.grad(function(cell).sum(), cell)[0]).sum()

    for k in range(9):
        step = torch.zeros(9, dtype=cell.dtype)
        step[k] = h
        step = step.reshape(3, 3)
        expected.view(-1)[k] = (slope(cell + step) - slope(cell - step)) / (2.0 * h)
    scale = expected.abs().max().item()
    found = [second(function, cell)]
    with Watching():
        found.append(second(function, cell))
    traced = make_fx(function)(cell)  # without gradients
    found.append(second(traced, cell))
    found.append((torch.func.hessian(lambda c: function(c).sum())(cell) * weights).sum((2, 3)))
    for f in found:
        torch.testing.assert_close(f, expected, rtol=0.0, atol=1e-6 * scale)


def test_what_is_traced_with_the_layout_of_a_gpu_can_be_differentiated():
    """Kernels without derivatives take the place of operations only where nobody sees these."""

    def function(cell):
        lattice = lattice_of(cell.unsqueeze(0), None, len(SALT.positions))
        return lattice.volume * (lattice.metric.sum() + lattice.fractional(SALT.positions).sin().sum())

    cell = SALT.cell.reshape(3, 3)
    with gpu_layout():
        traced = make_fx(function)(cell)  # without gradients
        found = second(traced, cell)
    torch.testing.assert_close(found, second(function, cell), rtol=1e-9, atol=1e-9)
