"""Runs with constraints of distances: ensembles, batches, runs that go on, molecules that a boundary cuts."""

import math
from unittest.mock import Mock

import numpy as np
import pytest
import scipy.stats
import torch

from nvalchemiops.torch.dynamics import (
    Constraints,
    Evaluation,
    csvr,
    langevin,
    nose_hoover,
    npt,
    nve,
    simulate,
    stochastic_cell,
)
from nvalchemiops.torch.systems import System

from .molecules import (
    KT,
    MIXED,
    deterministic,
    every,
    molecules,
    started,
    tensor,
)
from .systems import float64, ideal_gas, joined, run, wells
from .test_ensembles import check_gamma, with_chain

# -- ensembles ------------------------------------------------------------------------------------


def gas(n_systems, *kinds, edge=5.0):
    """Equal systems, and pairs of all."""
    system, masses, _, pairs = molecules(*kinds, edge=edge)
    offsets = len(masses) * torch.arange(n_systems).reshape(-1, 1, 1)
    return joined([system] * n_systems), masses.repeat(n_systems), (pairs + offsets).reshape(-1, 2)


THERMOSTATS = {
    "langevin": (lambda: langevin(0.1, 0.4, friction=1.5), 10, 14),
    "csvr": (lambda: csvr(0.1, 0.4, thermostat_time=0.4), 7, 11),
    "nose_hoover": (lambda: nose_hoover(0.1, 0.4, thermostat_time=0.4), 7, 11),
}


@pytest.mark.everyday_cases("langevin-kinds1", "csvr-kinds0", "nose_hoover-kinds1")
@pytest.mark.parametrize("kinds", (("two", "two"), ("water", "two", "atom")))
@pytest.mark.parametrize("name", THERMOSTATS)
def test_kinetic_energies_have_the_right_degrees_of_freedom(name, kinds):
    """5 for each rigid pair of atoms, 6 for each water, less 3 where the centre of mass is at rest.

    Stochastic thermostats start cold; a chain is not ergodic for a gas, so there the distribution stays.
    """
    make, *expected = THERMOSTATS[name]
    degrees, n_systems = expected[len(kinds) - 2], 1200
    system, masses, pairs = gas(n_systems, *kinds)
    integrator = make().constrained(Constraints(pairs))
    state = integrator.start(system, ideal_gas, masses=masses, seed=3)
    assert set(state.extra["degrees_of_freedom"].flatten().tolist()) == {float(degrees)}
    drawn = 2.0 * state.kinetic_energies / 0.4
    assert scipy.stats.kstest(drawn.numpy(), "chi2", args=(degrees,)).pvalue > 1e-3
    if name == "nose_hoover":
        state = state.having(chain_velocities=with_chain(state, "chain", degrees, 0.4))
    else:
        state = state._replace(velocities=0.1 * state.velocities)
    state = run(integrator, state, ideal_gas, 30)
    found = 2.0 * state.kinetic_energies / 0.4
    assert abs(state.temperatures.mean() / 0.4 - 1.0) < 5.0 * math.sqrt(2.0 / (degrees * n_systems))
    assert scipy.stats.kstest(found.numpy(), "chi2", args=(degrees,)).pvalue > 1e-3


def test_dipoles_in_a_field_have_the_right_directions():
    """``p(cos θ) ~ exp(x cos θ)`` for rigid pairs, of which some have a frozen atom (g-BAOAB, h ω is about 0.3)."""
    n, kt, field = 3000, 0.5, 1.5
    positions = torch.randn(n, 2, 3, dtype=float64, generator=torch.Generator().manual_seed(1))
    positions[:, 1] = positions[:, 0] + torch.nn.functional.normalize(positions[:, 1], dim=-1)
    masses = tensor([2.0, 1.0]).repeat(n)
    masses[: n // 2 * 2 : 2] = torch.inf
    forces = tensor([[0.0, 0.0, -0.5 * field], [0.0, 0.0, 0.5 * field]]).repeat(n, 1)

    def model(system):
        return Evaluation(-(forces * system.positions).sum().reshape(1), forces)

    integrator = langevin(0.3, kt, friction=1.0).constrained(Constraints(torch.arange(2 * n).reshape(n, 2), 1.0))
    state = integrator.start(System(positions.reshape(-1, 3)), model, masses=masses, seed=2)
    state = run(integrator, state, model, 60)
    bonds = state.system.positions.reshape(n, 2, 3).diff(dim=1)[:, 0]
    x = 0.5 * field / kt  # the forces ± field / 2 act a length of 1 apart

    def cumulative(c: np.ndarray) -> np.ndarray:
        return (np.exp(x * c) - np.exp(-x)) / (np.exp(x) - np.exp(-x))

    for part in (bonds[: n // 2, 2], bonds[n // 2 :, 2]):
        assert scipy.stats.kstest(part.numpy(), cumulative).pvalue > 1e-3
        assert abs(part.mean() - (1.0 / math.tanh(x) - 1.0 / x)) < 5.0 * part.std() / math.sqrt(n / 2)


@pytest.mark.everyday_cases("npt full", "stochastic_cell")
@pytest.mark.parametrize("name", ("npt", "npt full", "stochastic_cell"))
def test_volumes_of_a_gas_of_rigid_molecules(name):
    """``p(V) ~ V^n exp(-P V / kT)`` for n molecules, not atoms.

    All variables start in their distribution, since nothing exchanges energy between the rotations and the centres of
    a gas.
    """
    n_systems, kt, pressure = 1000, 0.5, 1e-4  # cells are larger than molecules
    system, masses, pairs = gas(n_systems, "two", "water", "atom")
    n = 2  # the centre of mass of three is at rest
    generator = torch.Generator().manual_seed(7)
    volumes = kt / pressure * torch._standard_gamma(torch.full((n_systems,), n + 1.0, dtype=float64), generator)
    system = system._replace(cell=volumes.pow(1 / 3)[:, None, None] * torch.eye(3, dtype=float64))
    times = {"thermostat_time": 1.0, "barostat_time": 2.0}
    if name == "stochastic_cell":
        integrator = stochastic_cell(0.1, kt, pressure, 1.0 / pressure, thermostat_time=1.0, barostat_time=4.0)
    else:
        integrator = npt(0.1, kt, pressure, cell="full" if "full" in name else "isotropic", **times)
    integrator = integrator.constrained(Constraints(pairs))
    state = integrator.start(system, ideal_gas, masses=masses, seed=4)
    degrees = state.extra["degrees_of_freedom"][0].item()
    assert degrees == 11.0
    if name != "stochastic_cell":
        dimension = 6 if "full" in name else 1
        press = integrator.flows[2][0]
        rate = torch.randn(state.extra["strain_rate"].shape, generator=generator, dtype=float64)
        scale = (kt / press.mass(state)).sqrt().reshape(-1, *[1] * (rate.ndim - 1))
        state = state.having(
            strain_rate=press._project(state, rate) * scale,
            chain_velocities=with_chain(state, "chain", degrees, 1.0),
            cell_chain_velocities=with_chain(state, "cell_chain", dimension, 2.0),
        )
    state = run(integrator, state, ideal_gas, 60)
    assert (torch.log(state.volumes / volumes).abs() > 0.2).double().mean() > 0.5
    check_gamma((state.volumes * pressure / kt).numpy(), n + 1)
    assert scipy.stats.kstest((2.0 * state.kinetic_energies / kt).numpy(), "chi2", args=(degrees,)).pvalue > 1e-3


@pytest.mark.parametrize("name", ("nve", "npt full"))
def test_the_pressure_of_rigid_molecules_is_that_of_their_centres(name):
    """Constraint forces are in it: ``3 P V = Σ M V² + Σ F R``, since moments of inertia of molecules do not change."""
    kinds = ["water", "two", "water"]
    integrator, state = started(deterministic(0.1)[name], kinds=kinds)
    state = run(integrator, state, wells(), 20)
    m = state.masses.unsqueeze(1)
    virial = -state.evaluation.stress[0].trace() * state.volumes
    motion = torch.zeros(1, dtype=float64)
    for rows in (slice(0, 3), slice(3, 5), slice(5, 8)):
        mass = m[rows].sum()
        centre = (m * state.system.positions)[rows].sum(0) / mass
        motion += (m * state.velocities)[rows].sum(0).square().sum() / mass
        virial -= (state.evaluation.forces * (state.system.positions - centre))[rows].sum()
    expected = (motion + virial) / (3.0 * state.volumes)
    assert (state.pressures - expected).abs() < 1e-13
    without = state._replace(extra={k: v for k, v in state.extra.items() if k != "constraint stress"})
    assert (without.pressures - expected).abs() > 1e-3 * expected.abs()


# -- batches, runs, periodic boundaries -----------------------------------------------------------


def separate(system):
    """Forces and a stress by operations that give a system the same bits in every batch."""
    x, cell = system.positions, system.cell
    return Evaluation(cell[:, 0, 0], 0.3 * torch.sin(1.3 * x), 1e-3 * (cell + cell.mT))


@pytest.mark.everyday_cases("nve", "langevin", "npt full")
@pytest.mark.parametrize("name", every(0.1))
def test_a_system_in_a_batch_does_what_it_does_alone_bit_for_bit(name):
    parts = [molecules(*kinds, seed=n) for n, kinds in enumerate((MIXED, ("atom",), ("chain", "two"), ("water",) * 9))]
    parts[0][1][6] = torch.inf
    offsets = np.cumsum([0] + [len(masses) for _, masses, _, _ in parts])
    pairs = torch.cat([pairs + int(offset) for (_, _, _, pairs), offset in zip(parts, offsets)])
    integrator = every(0.1)[name].constrained(Constraints(pairs))
    masses, velocities = (torch.cat([part[n] for part in parts]) for n in (1, 2))
    keys = torch.tensor([7, 3, 5, 2])
    options = {"masses": masses, "velocities": velocities, "keys": keys}
    batch = run(integrator, integrator.start(joined([p[0] for p in parts]), separate, **options), separate, 10)
    for n, (system, own, speeds, bonds) in enumerate(parts):
        one = every(0.1)[name].constrained(Constraints(bonds))
        state = one.start(system, separate, masses=own, velocities=speeds, keys=keys[n : n + 1])
        state = run(one, state, separate, 10)
        of = batch.system.batch_idx == n
        assert state.system.positions.isfinite().all()
        assert torch.equal(batch.system.positions[of], state.system.positions), n
        assert torch.equal(batch.velocities[of], state.velocities), n
        assert torch.equal(batch.extra["degrees_of_freedom"][n], state.extra["degrees_of_freedom"][0])
        assert torch.equal(batch.extra["constraint stress"][n], state.extra["constraint stress"][0])


def test_a_run_goes_on_and_constraints_can_be_removed():
    integrator, state = started(langevin(0.1, KT, friction=0.3), lengths=0.9, kinds=("two", "two", "atom"))
    once = simulate(state, wells(), integrator, 10).state
    twice = simulate(simulate(state, wells(), integrator, 5).state, wells(), integrator, 5).state
    assert torch.equal(once.system.positions, twice.system.positions)
    assert torch.equal(once.velocities, twice.velocities)
    free = nve(0.1).resume(once, wells())
    assert free.extra["degrees_of_freedom"].item() == 15.0 == once.extra["degrees_of_freedom"].item() + 2.0
    assert not any(name.startswith("constraint") for name in free.extra)
    fewer = nve(0.1).constrained(Constraints(torch.tensor([[0, 1]]))).resume(once, wells())
    assert fewer.extra["degrees_of_freedom"].item() == 14.0


def test_states_without_what_an_integrator_needs_are_refused_with_advice():
    """A hook may return the state of another integrator after `resume`."""
    integrator, state = started(nve(0.1), kinds=("two",))
    other = nve(0.1).resume(state, wells())
    with pytest.raises(ValueError, match=r"`hooks`: .* without 'constraint \w+'.*integrator.resume"):
        simulate(state, wells(), integrator, 2, hooks=lambda state: other)
    simulate(state, wells(), integrator, 2, hooks=lambda state: integrator.resume(other, wells()))
    with pytest.raises(KeyError, match="own"):  # that of a hook is its own
        simulate(state, wells(), integrator, 2, hooks=Mock(side_effect=KeyError(["own"])))


def test_molecules_that_the_boundary_cuts_are_made_whole():
    system, masses, velocities, pairs = molecules(*MIXED)
    images = torch.randint(-2, 3, system.positions.shape, generator=torch.Generator().manual_seed(2)).to(float64)
    states = []
    for positions in (system.positions, system.positions + images @ system.cell):
        integrator = nve(0.1).constrained(Constraints(pairs))
        cut = System(positions, cell=system.cell)
        state = integrator.start(cut, wells(), masses=masses, velocities=velocities)
        states.append(run(integrator, state, wells(), 20))
    shifts = (states[1].system.positions - states[0].system.positions) @ torch.linalg.inv(system.cell)
    assert (shifts - shifts.round()).abs().max() < 1e-11
    assert (states[0].velocities - states[1].velocities).abs().max() < 1e-11


def test_whole_molecules_of_cells_under_vmap():
    system, masses, velocities, pairs = molecules(*MIXED)

    def last(cell):
        integrator = nve(0.1).constrained(Constraints(pairs))
        cut = system._replace(cell=cell)
        state = integrator.start(cut, ideal_gas_of_one, masses=masses, velocities=velocities)
        return integrator.step(state, ideal_gas_of_one).system.positions

    cells = torch.stack([system.cell, 1.1 * system.cell])
    assert torch.equal(torch.func.vmap(last)(cells), torch.stack([last(cell) for cell in cells]))


def ideal_gas_of_one(system):
    return Evaluation(system.positions.new_zeros(1), torch.zeros_like(system.positions))


@pytest.mark.parametrize(
    ("open_vector", "pbc"),
    [
        ([6.0, 0.0, 1.0], torch.tensor([True, True, False])),
        ([0.0, 0.0, 0.0], torch.tensor([True, True, False])),
        ([math.nan, 1.0, 0.0], torch.tensor([True, True, False])),
        ([0.0, 0.0, 0.0], None),
    ],
)
def test_vectors_along_open_axes_do_not_matter_for_whole_molecules(open_vector, pbc):
    cell = tensor([[10.0, 0.0, 0.0], [0.0, 10.0, 0.0], open_vector])
    cut = System(tensor([[0.1, 1.0, 1.0], [9.9, 1.0, 2.0]]), cell=cell, pbc=pbc)
    integrator = nve(0.1).constrained(Constraints(torch.tensor([[0, 1]])))
    state = integrator.start(cut, ideal_gas, masses=tensor([1.0, 1.0]))
    assert (state.system.positions - tensor([[0.1, 1.0, 1.0], [-0.1, 1.0, 2.0]])).abs().max() < 1e-12
