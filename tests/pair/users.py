"""Potentials, systems and comparisons that the tests of users' reports share.

Lennard-Jones stands for potentials of atoms' parameters, damped shifted forces for those with a global parameter and a
self energy. The cell is skewed, the batch has systems of unequal sizes in no order, and cotangents are random.
"""

from typing import NamedTuple

import pytest
import torch

from nvalchemiops.torch.interactions.pair import damped_shifted_force, lennard_jones
from tests.systems import System, batch, neighbors_of, triclinic

CUTOFF = 3.0


class Inputs(NamedTuple):
    """All that a potential depends on: positions, cell, a parameter of atoms, and another one."""

    x: torch.Tensor
    cell: torch.Tensor | None
    a: torch.Tensor  # of atoms: sigma or charges
    b: torch.Tensor  # epsilon of atoms, or alpha of systems

    def leaves(self):
        return Inputs(*(None if t is None else t.detach().clone().requires_grad_() for t in self))

    def grad(self, value, **options):
        there = [t for t in self if t is not None]
        return torch.autograd.grad(value, there, **options)


LENNARD_JONES = lennard_jones(CUTOFF, r_switch=2.2)
DSF = damped_shifted_force(CUTOFF)


def lennard(x, cell, a, b, energy_reduction="atom", **near):
    return LENNARD_JONES(
        x, cell, sigma=a, epsilon=b, compute_forces=True, compute_virial=True, energy_reduction=energy_reduction, **near
    )


def dsf(x, cell, a, b, energy_reduction="atom", **near):
    return DSF(
        x, cell, q=a, alpha=b, compute_forces=True, compute_virial=True, energy_reduction=energy_reduction, **near
    )


POTENTIALS = {"LJ": lennard, "DSF": dsf}
EACH = pytest.mark.parametrize("name", POTENTIALS)


def relaxed(system, seed=0):
    """Positions in the cell on a jittered grid, so that no two atoms are close."""
    n = len(system.charges)
    generator = torch.Generator().manual_seed(seed)
    grid = torch.cartesian_prod(*(torch.arange(2),) * 3)[:n].double() / 2
    jitter = 0.1 * torch.rand(n, 3, generator=generator, dtype=torch.float64)
    return system._replace(positions=(grid + jitter) @ system.cell[0])


def inputs_of(name, system, seed=5):
    n = len(system.charges)
    generator = torch.Generator().manual_seed(seed)
    a = torch.rand(n, generator=generator, dtype=torch.float64)
    if name == "LJ":
        a, b = 1.6 + 0.3 * a, 0.2 + torch.rand(n, generator=generator, dtype=torch.float64)
    else:
        a, b = a - 0.4, 0.25 + 0.05 * torch.arange(system.cell.shape[0], dtype=torch.float64)
    return Inputs(system.positions, system.cell, a, b)


def near(system, cutoff=CUTOFF):
    """A list for a batch in any order."""
    return neighbors_of(system, cutoff)


ONE = relaxed(triclinic(7))
MIXED = batch(relaxed(triclinic(7)), relaxed(triclinic(3, seed=2), 1), relaxed(triclinic(5, seed=3), 2))
SHUFFLE = torch.randperm(15, generator=torch.Generator().manual_seed(8))
MIXED = System(MIXED.positions[SHUFFLE], MIXED.charges[SHUFFLE], MIXED.cell, MIXED.batch_idx[SHUFFLE])
NEAR = near(MIXED) | {"batch_idx": MIXED.batch_idx, "num_systems": 3}
