"""Systems and models that the tests of dynamics share."""

from functools import partial

import ase.build
import torch

from nvalchemiops.torch.dynamics import Evaluation, FromEnergies, SumOfTerms
from nvalchemiops.torch.interactions.pair import PairPotential
from nvalchemiops.torch.systems import System

float64 = torch.float64

# smooth up to the cutoff, so that energies are conserved
SOFT = PairPotential(
    "4*epsilon*((sigma/r)^12 - (sigma/r)^6)", global_parameters=("sigma", "epsilon"), cutoff=5.5, r_switch=4.5
)


def argon(*, skin=0.5):
    """A Lennard-Jones model in eV and angstrom."""
    return SumOfTerms(partial(SOFT, sigma=3.4, epsilon=0.0104), skin=skin)


def crystal(repeat=2, a=5.5, rattle=0.15, seed=1, sheared=True):
    """Argon atoms (ase.Atoms), displaced, in a sheared cell."""
    atoms = ase.build.bulk("Ar", "fcc", a=a, cubic=True) * ((repeat,) * 3 if isinstance(repeat, int) else repeat)
    if sheared:
        strain = [[1.02, 0.03, 0.0], [0.01, 0.98, -0.02], [0.04, 0.0, 1.01]]
        atoms.set_cell(atoms.cell[:] @ strain, scale_atoms=True)
    atoms.rattle(rattle, seed=seed)
    return atoms


def springs(stiffness):
    """Independent harmonic oscillators about the origin; ``stiffness`` is a number or (n_atoms, 1)."""

    def model(system: System) -> Evaluation:
        n = 1 if system.batch_idx is None else len(system.cell if system.cell is not None else system.pbc)
        energies = (0.5 * stiffness * system.positions**2).sum(1)
        total = energies.new_zeros(n)
        index = torch.zeros(len(energies), dtype=torch.int64) if system.batch_idx is None else system.batch_idx.long()
        return Evaluation(total.index_add(0, index, energies), -stiffness * system.positions, None)

    return model


def ideal_gas(system: System) -> Evaluation:
    """No interaction."""
    n = 1 if system.batch_idx is None else len(system.cell)
    zeros = system.positions.new_zeros
    return Evaluation(zeros(n), torch.zeros_like(system.positions), zeros(n, 3, 3))


def wells():
    """A smooth periodic potential with all derivatives: it depends on fractional coordinates and on the cell."""

    def energies(system: System) -> torch.Tensor:
        cell = system.cell.reshape(-1, 3, 3)
        frames = torch.linalg.inv(cell)
        n = len(cell)
        index = torch.zeros(len(system.positions), dtype=torch.int64)
        index = index if system.batch_idx is None else system.batch_idx.long()
        fractional = (system.positions.unsqueeze(1) @ frames[index]).squeeze(1)
        depths = torch.cos(2.0 * torch.pi * fractional) * torch.tensor([0.02, 0.03, 0.04], dtype=float64)
        coupled = 0.02 * torch.cos(2.0 * torch.pi * (fractional[:, 0] - fractional[:, 1] + 2.0 * fractional[:, 2]))
        per_atom = depths.sum(1) + coupled
        elastic = 0.05 * (cell @ cell.mT / 9.0 - torch.eye(3, dtype=float64)).square().sum((1, 2))
        return torch.zeros(n, dtype=float64).index_add(0, index, per_atom) + elastic

    return FromEnergies(energies)


def few_atoms(n=4, seed=0, edge=3.2):
    """A few atoms in a sheared cell, for `wells`, with masses and velocities."""
    generator = torch.Generator().manual_seed(seed)
    cell = edge * torch.eye(3, dtype=float64) + 0.2 * torch.randn(3, 3, generator=generator, dtype=float64)
    positions = torch.rand(n, 3, generator=generator, dtype=float64) @ cell
    masses = 1.0 + torch.rand(n, generator=generator, dtype=float64)
    velocities = 0.2 * torch.randn(n, 3, generator=generator, dtype=float64)
    return System(positions, cell=cell), masses, velocities


def joined(systems):
    """A batch of systems."""
    sizes = torch.tensor([len(s.positions) for s in systems])
    batch_idx = torch.arange(len(systems), dtype=torch.int32).repeat_interleave(sizes)
    return System(
        torch.cat([s.positions for s in systems]),
        cell=torch.stack([s.cell for s in systems]),
        batch_idx=batch_idx,
        pbc=None if systems[0].pbc is None else torch.stack([s.pbc for s in systems]),
    )


def run(integrator, state, model, n):
    for _ in range(n):
        state = integrator.step(state, model)
    return state
