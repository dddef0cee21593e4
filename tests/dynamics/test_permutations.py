"""Batches whose atoms and systems come in another order move as before, in that order.

Noise belongs to places: the n-th row of a system has the n-th numbers of the system's key. So an order of the batch
that keeps the order of atoms in each system changes no bit. Atoms that change places inside of a system exchange their
noise.
"""

import pytest
import torch

from nvalchemiops.torch.dynamics import langevin, maxwell_boltzmann, relax
from nvalchemiops.torch.operators.noise import normal_noise
from nvalchemiops.torch.systems import System

from .systems import argon, crystal, float64, ideal_gas, run
from .test_integrators import NAMES, every

KEYS = torch.tensor([7, 3, 5])


def batch():
    """Three crystals of different sizes, one of them a single atom and its images, with masses."""
    structures = [crystal((2, 2, 2), seed=1), crystal((2, 1, 1), seed=2), crystal((3, 3, 3), seed=3)]
    del structures[1][1:]
    system = System.from_ase(structures)._replace(numbers=None)
    generator = torch.Generator().manual_seed(0)
    return system, 30.0 + 20.0 * torch.rand(len(system.positions), generator=generator, dtype=float64)


def order_of(system, inside):
    """An order of atoms and one of systems; with ``inside`` atoms of one system change places."""
    generator = torch.Generator().manual_seed(4)
    atoms = torch.randperm(len(system.positions), generator=generator)
    if not inside:
        slots = system.batch_idx[atoms]
        atoms[torch.sort(slots, stable=True).indices] = torch.arange(len(atoms))
    return atoms, torch.tensor([2, 0, 1])


def permuted(system, atoms, systems):
    """The same batch in another order."""
    number = torch.argsort(systems).int()
    return System(
        system.positions[atoms],
        cell=system.cell[systems],
        pbc=system.pbc[systems],
        batch_idx=number[system.batch_idx[atoms].long()],
    )


TIMES = {"thermostat_time": 8.0, "barostat_time": 40.0}


@pytest.mark.everyday_cases("nve-*", "langevin-*", "npt-*", "npt full-*", "stochastic cell-inside")
@pytest.mark.parametrize(
    ("name", "inside"),
    [
        pytest.param(n, i, id=f"{n}-{'inside' if i else 'between'}")
        for n in NAMES
        for i in (0, 1)
        if n != "langevin" or not i
    ],
)
def test_integrators(name, inside):
    """Bit for bit if systems keep the order of their atoms, else to the rounding of sums."""
    system, masses = batch()
    atoms, systems = order_of(system, inside)
    integrator = every(0.3, 0.006, 1e-4, **TIMES)[name]
    velocities = maxwell_boltzmann(masses, 0.006, system.batch_idx, 3, seed=5)
    options = {"seed": 4, "removed": 0}
    model = argon(skin=1.0)
    start = integrator.start(system, model, masses=masses, velocities=velocities, keys=KEYS, **options)
    state, other_model = run(integrator, start, model, 8), argon(skin=1.0)
    options |= {"masses": masses[atoms], "velocities": velocities[atoms], "keys": KEYS[systems]}
    other = integrator.start(permuted(system, atoms, systems), other_model, **options)
    other = run(integrator, other, other_model, 8)
    assert (state.velocities - start.velocities).abs().max() > 1e-4

    found = [other.system.positions, other.velocities, other.evaluation.forces, other.system.cell]
    expected = [state.system.positions[atoms], state.velocities[atoms], state.evaluation.forces[atoms]]
    expected += [state.system.cell[systems]]
    found.append(integrator.conserved(other))
    expected.append(integrator.conserved(state)[systems])
    for one, two in zip(found, expected):
        assert torch.allclose(one, two, rtol=0.0, atol=1e-12 * two.abs().max()) if inside else torch.equal(one, two)


def test_atoms_that_change_places_exchange_their_noise():
    """With a friction so large that velocities are drawn anew in each step."""
    system, masses = batch()
    masses = torch.full_like(masses, 2.0)
    integrator = langevin(0.5, 0.3, friction=1e6)
    atoms, systems = order_of(system, inside=True)
    for here, keys in ((system, KEYS), (permuted(system, atoms, systems), KEYS[systems])):
        state = integrator.start(here, ideal_gas, masses=masses, velocities=torch.zeros_like(here.positions), keys=keys)
        after = integrator.step(state, ideal_gas)
        for n, key in enumerate(keys):
            of = here.batch_idx == n
            # the numbers 0, 1, 2 ... of its key, from the first row of the system to the last one
            noise = normal_noise(state.extra["seed"][:1], key[None], state.step, None, None, 0, int(of.sum()), 3)
            assert torch.allclose(after.velocities[of], (0.3 / 2.0) ** 0.5 * noise, rtol=1e-13)


@pytest.mark.filterwarnings("ignore::nvalchemiops.torch.dynamics.ConvergenceWarning")
@pytest.mark.parametrize("inside", [False, True], ids=["between systems", "inside of systems"])
@pytest.mark.parametrize("cell", [False, True], ids=["positions", "cell"])
@pytest.mark.parametrize("optimizer", ["fire", "fire2", "lbfgs"])
def test_relaxation(optimizer, cell, inside):
    """The same number of steps to the same minima: bit for bit, or to the rounding of sums."""
    system, _ = batch()
    atoms, systems = order_of(system, inside)
    # without a skin the order of pairs depends on nothing but the present positions
    options = {"fmax": 2e-3, "cell": cell, "max_steps": 25, "compact_every": 3}
    found = relax(permuted(system, atoms, systems), argon(skin=0.0), optimizer, **options)
    expected = relax(system, argon(skin=0.0), optimizer, **options)
    assert (expected.system.positions - system.positions).abs().max() > 0.05
    assert torch.equal(found.steps, expected.steps[systems])
    assert torch.equal(found.converged, expected.converged[systems])
    pairs = [(found.system.positions, expected.system.positions[atoms]), (found.fmax, expected.fmax[systems])]
    pairs += [(found.system.cell, expected.system.cell[systems])]
    pairs += [(found.evaluation.forces, expected.evaluation.forces[atoms])]
    for one, two in pairs:
        if inside:
            assert torch.allclose(one, two, rtol=0.0, atol=1e-9 * two.abs().max())
        else:
            assert torch.equal(one, two)
