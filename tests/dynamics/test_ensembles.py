"""Distributions that integrators sample, in batches of many small systems. Tolerances are five standard errors."""

import math

import pytest
import scipy.stats
import torch

from nvalchemiops.torch.dynamics import csvr, langevin, nose_hoover, npt, stochastic_cell
from nvalchemiops.torch.systems import System

from .systems import float64, ideal_gas, run, springs


def batch(n_systems, n_atoms, volume=None, seed=0):
    """Atoms without velocities in cubic cells, or at random places in cells of these volumes."""
    generator = torch.Generator().manual_seed(seed)
    edges = torch.ones(n_systems, dtype=float64) if volume is None else volume ** (1 / 3)
    cell = edges[:, None, None] * torch.eye(3, dtype=float64)
    batch_idx = torch.arange(n_systems, dtype=torch.int32).repeat_interleave(n_atoms)
    places = torch.rand(n_systems * n_atoms, 3, generator=generator, dtype=float64)
    return System(places * edges[batch_idx.long(), None], cell=cell, batch_idx=batch_idx)


def five_errors(found, mean, variance, independent):
    """Whether mean and variance of normal numbers are right, for so many independent ones."""
    assert abs(found.mean() - mean) < 5.0 * math.sqrt(variance / independent)
    assert abs(found.var() / variance - 1.0) < 5.0 * math.sqrt(2.0 / independent)


# -- Langevin -------------------------------------------------------------------------------------


@pytest.mark.later_cases("0.3")
@pytest.mark.parametrize("h", (0.3, 1.5))
def test_baoab_samples_positions_of_oscillators_exactly_at_any_step(h):
    """``<x²> = kT / k`` for h of up to 2; and ``<v²> = kT/m (1 - k h²/4m)``. At 1.5 Verlet is off by 2.3 times."""
    n, kt, stiffness = 6000, 0.7, 1.0
    integrator, model = langevin(h, kt, friction=0.8), springs(stiffness)
    state = integrator.start(
        System(torch.zeros(n, 3, dtype=float64)), model, masses=torch.ones(n, dtype=float64), seed=1
    )
    state = run(integrator, state, model, round(60 / h))
    positions, velocities = [], []
    for _ in range(4):
        state = run(integrator, state, model, round(15 / h))  # e^-6 of the correlation is left
        positions.append(state.system.positions)
        velocities.append(state.velocities)
    five_errors(torch.stack(positions), 0.0, kt / stiffness, 12 * n)
    five_errors(torch.stack(velocities), 0.0, kt * (1.0 - stiffness * h * h / 4.0), 12 * n)


def test_free_particles_are_an_ornstein_uhlenbeck_process_at_any_step():
    """``<v(0) v(t)> = kT/m exp(-γ t)`` after 1, 2 and 3 steps of 1 / γ, with a mass, a kT and a γ for each system."""
    n, h = 3000, 1.5
    friction, kt, mass = (torch.tensor(v, dtype=float64) for v in ([0.2, 0.7], [0.5, 2.0], [1.0, 3.0]))
    integrator = langevin(h, kt, friction=friction)
    state = integrator.start(batch(2, n), ideal_gas, masses=mass.repeat_interleave(n), seed=2)
    first = state.velocities
    for k in range(1, 4):
        state = integrator.step(state, ideal_gas)
        for system, rows in enumerate((slice(0, n), slice(n, 2 * n))):
            variance = (kt / mass)[system].item()
            products = first[rows] * state.velocities[rows]
            # the variance of a product of normal numbers with correlation c is 1 + c²
            c = math.exp(-friction[system].item() * h * k)
            assert abs(products.mean() - c * variance) < 5.0 * variance * math.sqrt((1.0 + c * c) / (3 * n))
            five_errors(state.velocities[rows], 0.0, variance, 3 * n)


def test_rescaling_of_one_degree_of_freedom_is_such_a_process():
    """``α v`` is normal, of either sign, with mean ``v exp(-t/2τ)`` and variance ``(1 - exp(-t/τ)) kT/m``."""
    n, h, kt, first = 3000, 1.5, 0.7, torch.tensor([0.3, 0.0, 0.0], dtype=float64)
    integrator, masses = csvr(h, kt, thermostat_time=2.0), torch.ones(n, dtype=float64)
    state = integrator.start(batch(n, 1), ideal_gas, masses=masses, velocities=first.repeat(n, 1), seed=5, removed=2)
    found, c = run(integrator, state, ideal_gas, 2).velocities[:, 0], math.exp(-2.0 * h / 2.0)
    five_errors(found, 0.3 * math.sqrt(c), (1.0 - c) * kt, n)


# -- kinetic energies -----------------------------------------------------------------------------

THERMOSTATS = {
    "langevin": lambda kt: langevin(0.5, kt, friction=0.3),
    "csvr": lambda kt: csvr(0.5, kt, thermostat_time=2.0),
    "nose_hoover": lambda kt: nose_hoover(0.5, kt, thermostat_time=2.0),
}


@pytest.mark.parametrize("frozen", (0, 2))
@pytest.mark.parametrize("name", THERMOSTATS)
def test_kinetic_energies_have_the_right_degrees_of_freedom(name, frozen):
    """``2 K / kT`` is a chi-square number: 3 for each free atom, less 3 where the centre of mass is at rest.

    The stochastic thermostats start cold; a chain of a gas would not be ergodic, so there the distribution stays.
    """
    n_systems, n_atoms, kt = 1500, 4, 0.4
    integrator = THERMOSTATS[name](kt)
    masses = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=float64)
    masses[:frozen] = torch.inf
    masses = masses.repeat(n_systems)
    state = integrator.start(batch(n_systems, n_atoms), ideal_gas, masses=masses, seed=3)
    expected = 3 * (n_atoms - frozen) - (0 if frozen or name == "langevin" else 3)
    assert set(state.extra["degrees_of_freedom"].flatten().tolist()) == {float(expected)}
    if name == "nose_hoover":
        state = state.having(chain_velocities=with_chain(state, "chain", expected, 2.0))
    else:
        state = state._replace(velocities=0.1 * state.velocities)
    state = run(integrator, state, ideal_gas, 40)
    found = 2.0 * state.kinetic_energies / kt
    assert scipy.stats.kstest(found.numpy(), "chi2", args=(expected,)).pvalue > 1e-3


def with_chain(state, name, count, time):
    """Velocities of the chains from their distribution, of variance kT / Q."""
    shape = state.extra[f"{name}_velocities"].shape
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(len(name)), dtype=float64) / time
    noise[:, 0] /= math.sqrt(count)
    return noise


# -- volumes --------------------------------------------------------------------------------------

CELLS = {
    "isotropic": ("isotropic", (True, True, True), 1),
    "axes": ("axes", (True, True, True), 3),
    "full": ("full", (True, True, True), 6),
    "slab": ("isotropic", (True, True, False), 1),
    "axes of a slab": ("axes", (True, True, False), 2),
    "full slab": ("full", (True, True, False), 3),
    "one axis": ("axes", (False, False, True), 1),
}


@pytest.mark.everyday_cases("isotropic-False", "axes of a slab-True", "full-True", "isotropic-one atom")
@pytest.mark.parametrize("at_rest", (False, True, "one atom"))
@pytest.mark.parametrize("name", CELLS)
def test_npt_leaves_the_distribution_of_an_ideal_gas_as_it_is(name, at_rest):
    """Volumes are Gamma-distributed, ``p(V) ~ V^n exp(-P V / kT)``, and strain rates and kinetic energies normal.

    With ``dr = V^n ds`` for n free atoms, so ``<V> = (n + 1) kT / P``; n is one less if the centre of mass is at rest.
    All variables start in their distribution. Any other invariant measure (a wrong coupling, dilution or chain) moves
    the volume within the time of the barostat, 20 steps here. In a slab the area changes.
    """
    cell, mask, dimension = CELLS[name]
    n_systems, kt, pressure = 2500, 0.5, 0.1
    n_atoms = 1 if at_rest == "one atom" else 3
    n = n_atoms - bool(at_rest)
    times = {"thermostat_time": 1.0, "barostat_time": 2.0}
    integrator = npt(0.1, kt, pressure, cell=cell, mask=mask, **times)
    generator = torch.Generator().manual_seed(7)
    volumes = kt / pressure * torch._standard_gamma(torch.full((n_systems,), n + 1.0, dtype=float64), generator)
    system = batch(n_systems, n_atoms, volumes)
    masses = torch.tensor([1.0, 2.0, 3.0], dtype=float64)[:n_atoms].repeat(n_systems)
    removed = 3 if at_rest else 0
    velocities = None
    if not at_rest:
        velocities = torch.randn(len(masses), 3, generator=generator, dtype=float64) * (kt / masses).sqrt()[:, None]
    state = integrator.start(system, ideal_gas, masses=masses, velocities=velocities, seed=4, removed=removed)
    flow = integrator.flows[2][0]
    rate = torch.randn(state.extra["strain_rate"].shape, generator=generator, dtype=float64)
    # a projection of normal numbers is normal in the subspace
    state = state.having(
        strain_rate=flow._project(state, rate) * (kt / flow.mass(state)).sqrt().reshape(-1, *[1] * (rate.ndim - 1)),
        chain_velocities=with_chain(state, "chain", max(3 * n, 1), 1.0),
        cell_chain_velocities=with_chain(state, "cell_chain", dimension, 2.0),
    )
    energy = flow.mass(state) * flow._square(state.extra["strain_rate"]) / kt
    assert abs(energy.mean() / dimension - 1.0) < 5.0 * math.sqrt(2.0 / (dimension * n_systems))
    before = integrator.conserved(state)
    state = run(integrator, state, ideal_gas, 100)
    assert ((integrator.conserved(state) - before).abs() / kt).median() < 0.05
    reduced = (state.volumes * pressure / kt).numpy()
    assert (torch.log(state.volumes / volumes).abs() > 0.2).double().mean() > 0.5  # they have moved
    check_gamma(reduced, n + 1)
    if n:
        assert scipy.stats.kstest((2.0 * state.kinetic_energies / kt).numpy(), "chi2", args=(3 * n,)).pvalue > 1e-3
    energy = flow.mass(state) * flow._square(state.extra["strain_rate"]) / kt
    assert scipy.stats.kstest(energy.squeeze(1).numpy(), "chi2", args=(dimension,)).pvalue > 1e-3
    if "slab" in name:
        assert (state.system.cell[:, 2, 2] - system.cell[:, 2, 2]).abs().max() < 1e-13


def test_npt_finds_the_volumes_of_an_ideal_gas():
    """From volumes 20 % too small and too large, each half of the systems.

    All systems of a half start alike, and would oscillate together: times of thermostats and barostats differ, so that
    after 400 steps each has another phase. With other random numbers the test would fail by chance in 0.2 % of runs
    (two tests of a distribution at 1e-3 each; five standard errors are 1e-6).
    """
    n_systems, n_atoms, kt, pressure = 2000, 5, 0.5, 0.1
    n = n_atoms - 1  # the centre of mass is at rest
    generator = torch.Generator().manual_seed(9)
    thermostat, barostat = 1.0 + 2.0 * torch.rand(2, n_systems, generator=generator, dtype=float64)
    integrator = npt(0.15, kt, pressure, thermostat_time=0.7 * thermostat, barostat_time=1.5 * barostat)
    volumes = torch.tensor([0.8, 1.2], dtype=float64).repeat(n_systems // 2) * (n + 1) * kt / pressure
    masses = torch.ones(n_systems * n_atoms, dtype=float64)
    state = integrator.start(batch(n_systems, n_atoms, volumes), ideal_gas, masses=masses, seed=4)
    state = run(integrator, state, ideal_gas, 400)
    check_gamma((state.volumes * pressure / kt).numpy(), n + 1)
    assert scipy.stats.kstest((2.0 * state.kinetic_energies / kt).numpy(), "chi2", args=(3 * n,)).pvalue > 1e-3


def check_gamma(values, shape):
    """Mean, variance and distribution of numbers with the density ``x^(shape - 1) exp(-x)``."""
    count = len(values)
    assert abs(values.mean() - shape) < 5.0 * math.sqrt(shape / count)
    # the fourth central moment is 3 shape² + 6 shape
    assert abs(values.var() - shape) < 5.0 * math.sqrt((2.0 * shape**2 + 6.0 * shape) / count)
    assert scipy.stats.kstest(values, "gamma", args=(shape,)).pvalue > 1e-3


@pytest.mark.everyday_cases("mask0-True", "mask1-False")
@pytest.mark.parametrize("frozen", (False, True))
@pytest.mark.parametrize("mask", ((True, True, True), (True, True, False)))
def test_stochastic_cells_find_the_volumes_of_an_ideal_gas(mask, frozen):
    """From volumes that are too small. Frozen atoms move with the cell, and do not count.

    A slab of a gas is not ergodic, since nothing exchanges energy between its axes, so it starts in its distribution.
    """
    n_systems, n_atoms, kt, pressure = 2500, 4, 0.5, 0.1
    masses = torch.ones(n_atoms, dtype=float64)
    masses[0] = torch.inf if frozen else 1.0
    n = n_atoms - 1  # the first one is frozen, or the centre of mass is at rest
    volumes = torch.full((n_systems,), 0.5 * (n + 1), dtype=float64)
    if not all(mask):
        shape = torch.full((n_systems,), n + 1.0, dtype=float64)
        volumes = torch._standard_gamma(shape, torch.Generator().manual_seed(8))
    system = batch(n_systems, n_atoms, volumes * kt / pressure)
    integrator = stochastic_cell(0.1, kt, pressure, 1.0 / pressure, thermostat_time=1.0, barostat_time=4.0, mask=mask)
    state = integrator.start(system, ideal_gas, masses=masses.repeat(n_systems), seed=6)
    assert state.extra["degrees_of_freedom"][0].item() == 3.0 * n
    state = run(integrator, state, ideal_gas, 200)
    check_gamma((state.volumes * pressure / kt).numpy(), n + 1)
    assert scipy.stats.kstest((2.0 * state.kinetic_energies / kt).numpy(), "chi2", args=(3 * n,)).pvalue > 1e-3


@pytest.mark.parametrize("n_atoms, mask", [(1, (True,) * 3), (2, (True,) * 3), (2, (True, False, False))])
def test_stochastic_cells_of_a_few_atoms_may_become_small(n_atoms, mask):
    """Volumes near zero are as frequent as they should be, and the steps from there are not too large.

    If one axis changes, pressures of fast atoms are largest.
    """
    n_systems, kt, pressure = 2500, 0.5, 0.1
    shape = torch.full((n_systems,), float(n_atoms), dtype=float64)
    volumes = kt / pressure * torch._standard_gamma(shape, torch.Generator().manual_seed(8))
    integrator = stochastic_cell(0.1, kt, pressure, 1.0 / pressure, thermostat_time=1.0, barostat_time=4.0, mask=mask)
    masses = torch.ones(n_systems * n_atoms, dtype=float64)
    state = integrator.start(batch(n_systems, n_atoms, volumes), ideal_gas, masses=masses, seed=6)
    state = run(integrator, state, ideal_gas, 60)
    check_gamma((state.volumes * pressure / kt).numpy(), n_atoms)


def test_noise_leads_out_of_no_volume_as_in_a_plane():
    """There a step is noise alone: the square of a distance from the origin, which is exponentially distributed."""
    n_systems, kt, h = 2500, 0.5, 0.1
    integrator = stochastic_cell(h, kt, 0.1, 10.0, thermostat_time=1.0, barostat_time=4.0)
    system, masses = batch(n_systems, 1, torch.full((n_systems,), 1e-9, dtype=float64)), torch.ones(n_systems)
    state = integrator.start(system, ideal_gas, masses=masses, velocities=torch.zeros(n_systems, 3), seed=6)
    found = integrator.step(state, ideal_gas).volumes / (kt * 10.0 / 4.0 * h)
    assert scipy.stats.kstest(found.numpy(), "expon").pvalue > 1e-3
