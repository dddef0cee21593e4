"""Deterministic properties of integrators: energies, order, reversal, phase-space volume, batches, derivatives."""

import math
from functools import partial

import ase.build
import numpy as np
import pytest
import torch

from nvalchemiops.constants import FEMTOSECOND, KELVIN
from nvalchemiops.torch.dynamics import (
    FORCES,
    Constraints,
    Evaluation,
    Integrator,
    SumOfTerms,
    csvr,
    langevin,
    maxwell_boltzmann,
    nose_hoover,
    nph,
    npt,
    nve,
    remove_momentum,
    simulate,
    stochastic_cell,
)
from nvalchemiops.torch.dynamics.cell_flows import of_matrices, of_numbers
from nvalchemiops.torch.dynamics.flows import Drift, Kick
from nvalchemiops.torch.interactions.electrostatics import ParticleMeshEwald
from nvalchemiops.torch.interactions.pair import born_mayer_huggins
from nvalchemiops.torch.operators.noise import normal_noise
from nvalchemiops.torch.systems import System
from tests.support.comparing import assert_gradient

from .systems import argon, crystal, few_atoms, float64, ideal_gas, joined, run, springs, wells

KT, PRESSURE = 0.05, 0.004
TIMES = {"thermostat_time": 0.9, "barostat_time": 2.0}


def barostats(dt, kt=KT, pressure=PRESSURE, **times):
    times = times or TIMES
    barostat = {"barostat_time": times["barostat_time"]}
    slab = {"mask": (True, True, False)}
    return {
        "nph": nph(dt, pressure, temperature=kt, **barostat),
        "nph full": nph(dt, pressure, temperature=kt, cell="full", **barostat),
        "npt": npt(dt, kt, pressure, **times),
        "npt axes": npt(dt, kt, pressure, cell="axes", **times),
        "npt full": npt(dt, kt, pressure, cell="full", chain_length=2, cell_chain_length=1, **times),
        "npt slab": npt(dt, kt, pressure, **slab, **times),
        "npt axes slab": npt(dt, kt, pressure, cell="axes", **slab, **times),
        "npt full slab": npt(dt, kt, pressure, cell="full", **slab, **times),
    }


def deterministic(dt, kt=KT, pressure=PRESSURE, **times):
    thermostat = {"thermostat_time": (times or TIMES)["thermostat_time"]}
    chains = {f"chain of {n}": nose_hoover(dt, kt, chain_length=n, **thermostat) for n in range(1, 6)}
    return {"nve": nve(dt), **chains, **barostats(dt, kt, pressure, **times)}


def random(dt, kt=KT, pressure=PRESSURE, compressibility=20.0, **times):
    times = times or TIMES
    return {
        "langevin": langevin(dt, kt, friction=0.3),
        "csvr": csvr(dt, kt, thermostat_time=times["thermostat_time"]),
        "stochastic cell": stochastic_cell(dt, kt, pressure, compressibility, **times),
        "stochastic slab": stochastic_cell(dt, kt, pressure, compressibility, mask=(True, True, False), **times),
    }


def every(dt, *args, **times):
    return deterministic(dt, *args, **times) | random(dt, *args, **times)


NAMES = list(every(0.1))
DETERMINISTIC = list(deterministic(0.1))


def started(integrator, model, n=4, **options):
    system, masses, velocities = few_atoms(n)
    return integrator.start(system, model, masses=masses, velocities=velocities, removed=0, **options)


@pytest.mark.parametrize("dtype", [torch.float32, float64])
def test_masses_in_any_form(dtype):
    """As ASE has them, as a list, and one number for all atoms."""
    positions = torch.zeros(3, 3, dtype=dtype)

    def masses(given):
        return nve(1.0).start(System(positions), springs(1.0), masses=given, velocities=positions).masses

    for given in (40.0, torch.tensor(40.0), [40.0] * 3, np.full(3, 40.0), torch.full((3,), 40.0)):
        found = masses(given)
        assert torch.equal(found, torch.full((3,), 40.0, dtype=dtype)) and found.is_contiguous()
    for given in ([40.0] * 2, 0.0, math.nan):
        with pytest.raises(ValueError, match="`masses`"):
            masses(given)


def test_velocities_in_any_form():
    """As ASE has them, in memory that is only read, and as a list."""
    given = np.linspace(-1.0, 1.0, 9).reshape(3, 3)
    given.flags.writeable = False
    for form in (given, given.tolist(), given.astype(np.float32)):
        state = nve(1.0).start(System(torch.zeros(3, 3, dtype=float64)), springs(1.0), masses=1.0, velocities=form)
        assert state.velocities.dtype == float64 and np.abs(state.velocities.numpy() - given).max() < 1e-7


# -- energies -------------------------------------------------------------------------------------


def test_verlet_conserves_the_shadow_energy_of_an_oscillator():
    """``m v²/2 + k x²/2 (1 - k h²/4m)`` exactly, at any stable step."""
    h, stiffness = 1.3, 1.0
    masses = torch.tensor([1.0, 0.9, 2.5], dtype=float64)
    model, integrator = springs(stiffness), nve(h)
    positions, velocities = torch.randn(2, 3, 3, dtype=float64, generator=torch.Generator().manual_seed(0))

    def shadow(state):
        m = masses.unsqueeze(1)
        squares = m * state.velocities**2 + stiffness * state.system.positions**2 * (1 - stiffness * h * h / (4 * m))
        return squares.sum(1)

    state = integrator.start(System(positions), model, masses=masses, velocities=velocities)
    before = shadow(state)
    assert (shadow(run(integrator, state, model, 500)) - before).abs().max() < 1e-12 * before.max()


@pytest.mark.everyday_cases("nve", "chain of 3", "npt axes", "npt full slab", "langevin", "csvr", "stochastic cell")
@pytest.mark.parametrize("name", NAMES)
def test_conserved_quantities_are_of_second_order(name):
    """Half the step, a quarter of the error, over the same time.

    With noise on average over 64 systems, since it is another noise for another step. The energy that a cell takes up
    by noise is known to first order: its steps are as sqrt(h), and the stress before and after misses their cube.
    """
    errors, model = [], wells()
    for dt in (0.04, 0.02):
        integrator = every(dt)[name]
        system, masses, velocities = few_atoms()
        n = 1 if integrator.is_reversible else 64
        options = {"masses": masses.repeat(n), "velocities": velocities.repeat(n, 1)}
        removed = 10 if "axes" in name else 0  # two degrees of freedom are left, or all
        state = integrator.start(joined([system] * n), model, removed=removed, **options)
        first, values = integrator.conserved(state), []
        for _ in range(round(2.0 / dt)):
            state = integrator.step(state, model)
            values.append(integrator.conserved(state) - first)
        errors.append(torch.stack(values).square().mean().sqrt().item())
    assert errors[0] > 1e-7  # not zero because nothing moves
    low, high = (3.8, 4.2) if integrator.is_reversible else (1.7, 4.6) if "stochastic" in name else (3.4, 4.6)
    assert low < errors[0] / errors[1] < high


@pytest.mark.later
def test_rock_salt_does_not_drift():
    """Born, Mayer and Huggins with PME at 1 fs: below 1e-6 eV per atom and picosecond."""
    atoms = ase.build.bulk("NaCl", "rocksalt", a=5.64, cubic=True) * (2, 2, 2)
    atoms.set_initial_charges([1.0, -1.0] * 32)
    repulsion = born_mayer_huggins(7.0, r_switch=6.0, tables=True)
    tables = {  # F. G. Fumi and M. P. Tosi, J. Phys. Chem. Solids 25, 31 (1964): 0.21 and 0.338 eV, 0.317 angstrom
        "A": [[0.2637, 0.2110], [0.2110, 0.1582]],
        "sigma": [[2.340, 2.755], [2.755, 3.170]],
        "C": [[1.05, 6.99], [6.99, 72.4]],
        "D": [[0.499, 8.676], [8.676, 145.4]],
    }
    parameters = {name: torch.tensor(values, dtype=float64) for name, values in tables.items()}
    species = torch.tensor([0, 1] * 32)
    short = partial(repulsion, species=species, rho=torch.full((2, 2), 0.317, dtype=float64), **parameters)
    model = SumOfTerms(short, ParticleMeshEwald(accuracy=1e-6, cutoff=7.0), skin=1.0)
    dt, kt = 1.0 * FEMTOSECOND, 300.0 * KELVIN
    masses = torch.tensor(atoms.get_masses())
    velocities = remove_momentum(maxwell_boltzmann(masses, kt), masses)
    record = ("conserved", "kinetic_energy")
    found = simulate(System.from_ase(atoms), model, nve(dt), 500, record=record, velocities=velocities)
    values = found.records["conserved"][:, 0]
    picoseconds = torch.arange(501, dtype=float64) / 1000.0
    line = torch.stack([picoseconds, torch.ones_like(picoseconds)], 1)
    slope = torch.linalg.lstsq(line, values.unsqueeze(1)).solution[0]
    assert found.records["kinetic_energy"].std() > 0.05  # while this is what moves
    assert slope.abs() / 64 < 1e-6


# -- reversal, volume -----------------------------------------------------------------------------


@pytest.mark.later_cases("chain of 2", "chain of 3", "npt", "npt axes", "npt slab", "npt full")
@pytest.mark.parametrize("name", DETERMINISTIC)
def test_steps_back_lead_to_the_start(name):
    integrator, model = deterministic(0.1)[name], wells()
    state = started(integrator, model)
    far = run(integrator, state, model, 60)
    assert (far.system.positions - state.system.positions).abs().max() > 0.1
    back = integrator.reversed(run(integrator, integrator.reversed(far), model, 60))
    assert (back.system.positions - state.system.positions).abs().max() < 1e-12
    assert (back.velocities - state.velocities).abs().max() < 1e-12
    assert (back.system.cell - state.system.cell).abs().max() < 1e-12
    for key, value in state.extra.items():
        assert (back.extra[key] - value).abs().max() < 1e-11, key


def test_noise_cannot_be_reversed():
    integrator = langevin(0.1, KT)
    with pytest.raises(ValueError, match="random numbers cannot be reversed"):
        integrator.reversed(started(integrator, wells()))


def smooth(system: System) -> Evaluation:
    """Forces and a stress that are functions of positions and cell, without derivatives inside."""
    x = system.positions
    forces = torch.sin(1.3 * x + 0.4 * x.roll(1, 0)) - 0.2 * x
    stress = 2e-4 * (system.cell @ system.cell.mT) + 1e-3 * torch.cos(x).sum() * torch.eye(3, dtype=x.dtype)
    return Evaluation(torch.cos(x).sum().reshape(1), forces, stress)


LOWER = torch.tril_indices(3, 3)


def packed(state):
    """All variables as a vector. The cell is 9 numbers; a symmetric strain rate is 6."""
    extra = state.extra
    parts = [state.system.positions, state.velocities]
    if "strain_rate" in extra:
        rate = extra["strain_rate"]
        full = rate.ndim == 3
        parts += [state.system.cell if full else state.system.cell[0, 0, 0].log()]
        parts += [rate[0, LOWER[0], LOWER[1]] if full else rate[0, :1]]
    parts += [extra[key] for key in sorted(extra) if key.startswith(("chain_", "cell_chain_"))]
    return torch.cat([part.reshape(-1) for part in parts])


def unpacked(vector, like):
    parts = list(vector.split([t.numel() for t in _parts(like)]))
    extra, n = dict(like.extra), like.system.positions.shape
    positions, velocities, cell = parts.pop(0).reshape(n), parts.pop(0).reshape(n), like.system.cell
    if "strain_rate" in extra:
        if extra["strain_rate"].ndim == 3:
            cell, lower = parts.pop(0).reshape(1, 3, 3), parts.pop(0)
            matrix = torch.zeros(3, 3, dtype=lower.dtype).index_put((LOWER[0], LOWER[1]), lower)
            extra["strain_rate"] = (matrix + matrix.mT - torch.diag(matrix.diagonal())).unsqueeze(0)
        else:
            cell = cell * (parts.pop(0).exp() / cell[0, 0, 0])
            extra["strain_rate"] = parts.pop(0).reshape(1, 1).expand(1, 3)
    for key in sorted(extra):
        if key.startswith(("chain_", "cell_chain_")):
            extra[key] = parts.pop(0).reshape(extra[key].shape)
    state = like._replace(velocities=velocities, extra=extra)
    return state.at(positions, cell)._replace(evaluation=smooth(state.at(positions, cell).system))


def _parts(like):
    extra = like.extra
    found = [like.system.positions, like.velocities]
    if "strain_rate" in extra:
        full = extra["strain_rate"].ndim == 3
        found += [like.system.cell if full else torch.zeros(1), torch.zeros(6 if full else 1)]
    return found + [extra[key] for key in sorted(extra) if key.startswith(("chain_", "cell_chain_"))]


@pytest.mark.parametrize("name", ("nve", "chain of 1", "chain of 4", "nph", "npt", "nph full", "npt full"))
def test_phase_space_volume_changes_as_the_equations_say(name):
    """The determinant of the Jacobian of a step, against the compressibility of Martyna, Tobias and Klein.

    ``log det = -f Δη_1 - Δη_2 - ... - g Δξ_1 - Δξ_2 ... - Δ log V``, and for the nine components of a cell, of which
    each row is multiplied by the strain, 3 Δ log V more.
    """
    integrator = deterministic(0.3)[name]
    state = started(integrator, smooth, n=2)
    state = run(integrator, state, smooth, 3)
    jacobian = torch.func.jacrev(lambda vector: packed(integrator.step(unpacked(vector, state), smooth)))
    _, found = torch.linalg.slogdet(jacobian(packed(state)))
    after, extra = integrator.step(state, smooth), state.extra
    expected = torch.zeros((), dtype=float64)
    dimension = 6.0 if "full" in name else 1.0
    for chain, count in (("chain", extra["degrees_of_freedom"].item()), ("cell_chain", dimension)):
        if f"{chain}_positions" in extra:
            moved = (after.extra[f"{chain}_positions"] - extra[f"{chain}_positions"])[0]
            expected = expected - count * moved[0] - moved[1:].sum()
    growth = torch.log(after.volumes / state.volumes)[0]
    expected = expected + growth * (2.0 if "full" in name else -1.0 if name.startswith("np") else 0.0)
    assert abs(found - expected) < 1e-11
    assert name == "nve" or abs(found) > 1e-4


# -- parts ----------------------------------------------------------------------------------------


def test_without_friction_langevin_is_verlet_bit_for_bit():
    model = wells()
    states = [run(i, started(i, model), model, 30) for i in (langevin(0.1, KT, friction=0.0), nve(0.1))]
    assert torch.equal(states[0].system.positions, states[1].system.positions)
    assert torch.equal(states[0].velocities, states[1].velocities)


def test_a_step_of_langevin_is_the_exact_solution_for_its_noise():
    """``v' = c v + sqrt((1 - c²) kT / m) ξ`` with ``c = exp(-γ h)``, and ``r' = r + h/2 (v + v')``."""
    h, friction, kt = 0.7, 0.4, 0.3
    integrator, model = langevin(h, kt, friction=friction), springs(0.0)
    system, masses, velocities = few_atoms()
    state = integrator.start(system, model, masses=masses, velocities=velocities, seed=5)
    after = integrator.step(state, model)
    noise = normal_noise(state.extra["seed"], state.extra["key"], state.step, None, None, 0, 4, 3)
    c = math.exp(-friction * h)
    expected = c * velocities + (kt * (1.0 - c * c) / masses.unsqueeze(1)).sqrt() * noise
    assert (after.velocities - expected).abs().max() < 1e-14
    assert (after.system.positions - system.positions - 0.5 * h * (velocities + expected)).abs().max() < 1e-14
    heat = 0.5 * (masses.unsqueeze(1) * (expected**2 - velocities**2)).sum()
    assert abs(integrator.conserved(after) - integrator.conserved(state)) < 1e-14
    assert abs(after.extra["heat0"].item() - heat) < 1e-14


def test_integrators_of_ones_own_flows():
    """A kick after the drift, as in leapfrog, has the same positions as Verlet half a step later."""
    drifts = Integrator([(Drift(), 0.5), FORCES, (Kick(), 1.0), (Drift(), 0.5)], {"dt": 0.1})
    model = springs(1.0)
    system, masses, velocities = few_atoms()
    state = drifts.start(system, model, masses=masses, velocities=velocities)
    x, v, m = system.positions, velocities, masses.unsqueeze(1)
    for _ in range(20):
        state = drifts.step(state, model)
        x = x + 0.05 * v
        v = v - 0.1 * x / m
        x = x + 0.05 * v
    assert (state.system.positions - x).abs().max() < 1e-13
    with pytest.raises(ValueError, match="FORCES once"):
        Integrator([(Drift(), 1.0)], {"dt": 0.1})
    with pytest.raises(ValueError, match="'dt' is missing"):
        Integrator([(Drift(), 1.0), FORCES], {})


@pytest.mark.parametrize("scale", (0.0, 1e-9, 2e-3, 4e-3, 0.3, 3.0))
def test_exponentials_of_strains(scale):
    generator = torch.Generator().manual_seed(3)
    matrices = torch.randn(5, 3, 3, dtype=float64, generator=generator)
    matrices = scale * (matrices + matrices.mT) / 4.0
    values, axes = torch.linalg.eigh(matrices)
    quotient = torch.where(values == 0.0, 1.0, torch.expm1(values) / values)
    expected = [(axes * f.unsqueeze(-2)) @ axes.mT for f in (values.exp(), quotient)]
    for found, reference in zip(of_matrices(matrices), expected):
        assert (found - reference).abs().max() < 4e-15 * math.exp(2 * scale)
    for found, reference in zip(of_numbers(values), (values.exp(), quotient)):
        assert (found / reference - 1.0).abs().max() < 1e-15
    if 0.0 < scale < 0.01:  # (e^x - 1) / x is sum x^k / (k + 1)!, whose derivative is
        (slopes,) = torch.autograd.grad(of_numbers(values.requires_grad_())[1].sum(), values)
        series = sum(k * values.detach() ** (k - 1) / math.factorial(k + 1) for k in range(1, 9))
        assert (slopes - series).abs().max() < 3e-13  # rounding divided by x beyond the series
    assert torch.autograd.gradcheck(of_matrices, matrices.requires_grad_(), atol=1e-7, fast_mode=True)
    assert torch.autograd.gradgradcheck(of_numbers, values.requires_grad_(), atol=1e-6, fast_mode=True)


# -- batches --------------------------------------------------------------------------------------


@pytest.mark.later_cases("chain of 2", "chain of 4", "chain of 5", "npt slab", "npt full slab", "npt axes slab")
@pytest.mark.parametrize("name", NAMES)
def test_a_system_in_a_batch_does_what_it_does_alone_bit_for_bit(name):
    """With its own step, temperature, pressure and times; sizes differ, one system is empty."""
    model = argon(skin=1.0)
    structures = [crystal((2, 2, 2), seed=1), crystal((3, 2, 2), seed=2), crystal((2, 2, 2), seed=3)[:1]]
    systems = [System.from_ase(atoms) for atoms in structures]
    empty = systems[0]._replace(positions=systems[0].positions[:0], numbers=None, pbc=systems[0].pbc)
    systems.insert(1, empty)
    masses = [torch.full((len(s.positions),), 39.9 + n, dtype=float64) for n, s in enumerate(systems)]
    masses[2][3] = torch.inf
    parameters = [
        [0.2, 0.3, 0.4, 0.25],  # dt
        [0.005, 0.006, 0.008, 0.004],  # kT
        [1e-4, 2e-4, 0.0, 1e-4],  # pressure
        [20.0, 30.0, 10.0, 25.0],  # compressibility
        [8.0, 9.0, 10.0, 11.0],  # times
        [30.0, 40.0, 25.0, 50.0],
    ]

    def integrator_of(values):
        dt, kt, pressure, compressibility, thermostat, barostat = values
        times = {"thermostat_time": thermostat, "barostat_time": barostat}
        return (deterministic(dt, kt, pressure, **times) | random(dt, kt, pressure, compressibility, **times))[name]

    keys = torch.tensor([7, 3, 5, 2])
    integrator = integrator_of([torch.tensor(values, dtype=float64) for values in parameters])
    batch = integrator.start(joined(systems), model, masses=torch.cat(masses), seed=4, keys=keys)
    batch = run(integrator, batch, model, 12)
    for n, (system, own) in enumerate(zip(systems, masses)):
        one = integrator_of([values[n] for values in parameters])
        alone_model = argon(skin=1.0)
        state = one.start(system._replace(numbers=None), alone_model, masses=own, seed=4, keys=keys[n : n + 1])
        start = state
        state = run(one, state, alone_model, 12)
        of = batch.system.batch_idx == n
        assert torch.equal(batch.system.positions[of], state.system.positions), n
        assert torch.equal(batch.velocities[of], state.velocities), n
        assert torch.equal(batch.system.cell[n], state.system.cell[0]), n
        for key, value in state.extra.items():
            if value.shape[:1] == (1,) and key not in ("inertia", "inverse_masses"):
                assert torch.equal(batch.extra[key][n], value[0]), (n, key)
        assert torch.equal(integrator.conserved(batch)[n], one.conserved(state)[0])
        assert state.system.positions.isfinite().all() and one.conserved(state).isfinite().all()
        if n in (0, 2):
            assert (start.velocities - state.velocities).abs().max() > 1e-4


@pytest.mark.later_cases("chain of 2", "chain of 4", "chain of 5", "npt slab", "npt full slab", "npt axes slab")
@pytest.mark.parametrize("name", NAMES)
def test_no_atoms_at_all(name):
    system = System(torch.zeros(0, 3, dtype=float64), cell=4.0 * torch.eye(3, dtype=float64))
    integrator, model = every(0.1)[name], argon()
    state = integrator.start(system, model, masses=torch.zeros(0, dtype=float64))
    state = run(integrator, state, model, 3)
    assert state.system.positions.shape == (0, 3) and integrator.conserved(state).isfinite().all()


@pytest.mark.parametrize("pbc", [True, torch.tensor(True), torch.ones(1, 3, dtype=torch.bool), [True, True, True]])
def test_periodicity_in_any_form_that_a_search_takes(pbc):
    system, integrator, model = System.from_ase(crystal()), nve(0.1), argon()
    expected = integrator.start(system, model, seed=1)
    state = integrator.start(system._replace(pbc=pbc), model, seed=1)
    assert torch.equal(integrator.step(state, model).velocities, integrator.step(expected, model).velocities)


# -- frozen atoms, momentum -----------------------------------------------------------------------


@pytest.mark.later_cases("chain of 2", "chain of 4", "chain of 5", "npt slab", "npt full slab", "npt axes slab")
@pytest.mark.parametrize("name", NAMES)
def test_frozen_atoms_stay_or_move_with_the_cell(name):
    """Whatever their forces are: those of two at the same place may be infinite."""
    integrator, forces_and_more = every(0.1)[name], wells()

    def model(system):
        found = forces_and_more(system)
        found.forces[1] = torch.inf
        return found

    system, masses, _ = few_atoms()
    masses[1] = torch.inf
    state = integrator.start(system, model, masses=masses, seed=3)
    places = system.positions @ torch.linalg.inv(system.cell)
    assert state.extra["degrees_of_freedom"].item() == 9.0
    momentum = (state.extra["inertia"] * state.velocities).sum(0)  # the frozen atom could take it up
    assert momentum.abs().min() > 1e-3 or not state.velocities.any()
    state = run(integrator, state, model, 20)
    after = state.system.positions @ torch.linalg.inv(state.system.cell[0])
    assert (after - places)[1].abs().max() < 1e-14
    assert (after - places)[[0, 2, 3]].abs().min() > 1e-5
    assert not state.velocities[1].any()
    if "cell" not in name and not name.startswith(("np", "stochastic")):
        assert torch.equal(state.system.positions[1], system.positions[1])


@pytest.mark.parametrize("name", NAMES)
def test_the_centre_of_mass_stays_at_rest(name):
    integrator, model = every(0.1, 0.006, 1e-4, thermostat_time=5.0, barostat_time=30.0)[name], argon()
    state = integrator.start(System.from_ase(crystal()), model, seed=8)
    momentum = (state.masses.unsqueeze(1) * state.velocities).sum(0)
    if name == "langevin":
        assert state.extra["degrees_of_freedom"].item() == 96.0 and momentum.abs().max() > 0.1
        return
    assert state.extra["degrees_of_freedom"].item() == 93.0 and momentum.abs().max() < 1e-12
    state = run(integrator, state, model, 20)
    assert (state.masses.unsqueeze(1) * state.velocities).sum(0).abs().max() < 1e-11


@pytest.mark.parametrize("name", ["csvr", "stochastic cell", "chain of 3"])
def test_rounding_without_degrees_of_freedom_is_not_heated(name):
    """One atom and its images: forces, zero but for rounding, move a centre of mass that counts as fixed.

    One degree of freedom is enough.
    """
    integrator, springless = every(0.1)[name], springs(0.0)

    def model(system):
        return springless(system)._replace(stress=system.cell * 0.0)

    system = System(torch.zeros(1, 3, dtype=float64), cell=4.0 * torch.eye(3, dtype=float64))
    state = integrator.start(system, model, masses=torch.ones(1))
    assert state.extra["degrees_of_freedom"].item() == 0.0 and not state.velocities.any()
    state = state._replace(velocities=torch.full_like(state.velocities, 1e-17))
    assert run(integrator, state, model, 5).velocities.abs().max() < 1e-16
    state = integrator.start(system, model, masses=torch.ones(1), velocities=torch.ones(1, 3), removed=2)
    assert (run(integrator, state, model, 5).kinetic_energies - 1.5).abs().max() > 0.05


@pytest.mark.parametrize("mass", [1e-6, 1e6])
def test_a_moving_centre_of_mass_counts_as_degrees_of_freedom(mass):
    """But not one that rounding moves, whatever the units are."""
    system = System.from_ase(crystal())
    velocities = torch.randn(32, 3, generator=torch.Generator().manual_seed(1), dtype=float64)
    velocities -= velocities.mean(0)
    for drift, degrees in ((1e-4, 96.0), (1e-5, 93.0)):
        state = nve(0.1).start(system, ideal_gas, masses=mass, velocities=velocities + drift)
        assert state.extra["degrees_of_freedom"].item() == degrees


@pytest.mark.parametrize("bonds", [None, [[0, 1], [3, 4]]])
def test_langevin_moves_a_centre_of_mass_that_was_at_rest(bonds):
    """A run that goes on has then as many degrees of freedom as one that starts: else it would seem too hot."""
    batch_idx = torch.tensor([0, 0, 0, 2, 2], dtype=torch.int32)  # system 1 has no atoms
    cell = 9.0 * torch.eye(3, dtype=float64).expand(3, 3, 3)
    system = System(3.0 * torch.rand(5, 3, dtype=float64), cell=cell, batch_idx=batch_idx)
    options = {"masses": torch.tensor([1.0, 2.0, 3.0, torch.inf, 1.0], dtype=float64)}
    at_rest, moving = nose_hoover(0.1, 0.01), langevin(0.1, 0.01)
    if bonds is not None:
        at_rest, moving = (integrator.constrained(Constraints(torch.tensor(bonds))) for integrator in (at_rest, moving))
    counts = [integrator.start(system, ideal_gas, **options).extra for integrator in (at_rest, moving)]
    names = [name for name in counts[0] if "degrees_of_freedom" in name or "centre" in name]
    state = at_rest.start(system, ideal_gas, **options)
    assert (counts[1]["degrees_of_freedom"] - counts[0]["degrees_of_freedom"])[:, 0].tolist() == [3.0, 0.0, 0.0]
    state = moving.resume(state, ideal_gas)
    for resumed in (state, moving.resume(state, ideal_gas)):
        assert all(torch.equal(resumed.extra[name], counts[1][name]) for name in names)
    state = moving.resume(at_rest.start(system, ideal_gas, removed=1, **options), ideal_gas)
    assert (counts[1]["degrees_of_freedom"] - state.extra["degrees_of_freedom"])[:, 0].tolist() == [1.0, 0.0, 1.0]


# -- derivatives ----------------------------------------------------------------------------------


@pytest.mark.everyday_cases("nve", "chain of 2", "nph full", "langevin", "csvr", "stochastic slab")
@pytest.mark.parametrize("name", NAMES)
def test_gradients_through_five_steps(name):
    """With respect to positions, velocities, cell and temperature, against finite differences."""
    model = wells()
    system, masses, velocities = few_atoms(2)

    def after(positions, velocities, cell, kt):
        integrator = every(0.2, kt)[name]
        state = integrator.start(
            System(positions, cell=cell), model, masses=masses, velocities=velocities, removed=0, seed=2
        )
        state = run(integrator, state, model, 5)
        return state.system.positions, state.velocities, state.system.cell, integrator.conserved(state)

    assert_gradient(after, (system.positions, velocities, system.cell, torch.tensor(KT, dtype=float64)))
