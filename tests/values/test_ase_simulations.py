"""Dynamics, relaxation, equations of state and phonons by ASE: the calculator is good for what it is there for."""

import numpy as np
import pytest
from ase import units
from ase.build import bulk
from ase.calculators.lj import LennardJones
from ase.filters import ExpCellFilter, FrechetCellFilter
from ase.md.velocitydistribution import Stationary, thermalize_momenta
from ase.md.verlet import VelocityVerlet
from ase.optimize import BFGS
from ase.phonons import Phonons
from scipy.optimize import minimize_scalar

from nvalchemiops.ase import Calculator, Electrostatics, Pair
from nvalchemiops.constants import COULOMB_EV_ANGSTROM
from tests.support.systems import MADELUNG

REPULSION = {"A": {"Mg-O": 1280.0, "*": 0.0}, "rho": 0.3, "C": {"O-O": 25.0, "*": 0.0}}
CUTOFF = 9.0


def magnesia(method="ewald", **options):
    """Rigid ions; the attraction is switched off smoothly, so that energies are smooth in the cell."""
    return Calculator(
        Pair("buckingham", cutoff=CUTOFF, r_switch=7.0, **REPULSION),
        Electrostatics(method, {"Mg": 2.0, "O": -2.0}, accuracy=1e-7, **options),
    )


def argon(**options):
    return Calculator(Pair("lennard_jones", cutoff=8.0, r_switch=7.0, sigma=3.4, epsilon=0.0104), **options)


# -- dynamics -------------------------------------------------------------------------------------


def energies_of_dynamics(atoms, time_step, n_steps, temperature):
    thermalize_momenta(atoms, temperature_K=temperature, rng=np.random.default_rng(1))
    Stationary(atoms)
    run = VelocityVerlet(atoms, time_step * units.fs)
    energies = []
    run.attach(lambda: energies.append(atoms.get_total_energy()))
    run.run(n_steps)
    return np.array(energies)


@pytest.mark.parametrize("method", ["ewald", "pme"])
def test_energy_is_conserved_to_second_order(method):
    """The fluctuation falls with the square of the time step, so there is nothing beside that of the integrator."""
    spreads = []
    for time_step in (2.0, 1.0):
        atoms = bulk("MgO", "rocksalt", a=4.25, cubic=True)
        atoms.calc = magnesia(method)
        energies = energies_of_dynamics(atoms, time_step, int(200 / time_step), 1500)
        spreads.append(energies.std())
    kinetic = 1.5 * units.kB * 750 * len(atoms)
    assert spreads[1] < 1e-3 * kinetic
    assert spreads[0] / spreads[1] == pytest.approx(4.0, rel=0.3)
    assert atoms.calc.searches < 60


def test_dynamics_search_seldom_and_are_those_without_a_skin():
    paths, searches = [], []
    for skin in (0.0, 1.0):
        atoms = bulk("Ar", "fcc", a=5.4, cubic=True).repeat(2)
        atoms.calc = argon(skin=skin)
        energies = energies_of_dynamics(atoms, 5.0, 60, 60)
        paths.append(atoms.positions)
        searches.append(atoms.calc.searches)
        assert np.ptp(energies) < 1e-3 * len(atoms) * units.kB * 60
    np.testing.assert_allclose(*paths, atol=1e-8)
    assert searches[0] > 50
    assert searches[1] <= 5


# -- relaxation -----------------------------------------------------------------------------------


def energy_of_magnesia(a):
    """Energy of a formula unit by shells of neighbors and the Madelung constant."""

    def switch(r):
        x = np.clip((r - 7.0) / (CUTOFF - 7.0), 0.0, 1.0)
        return 1 - 10 * x**3 + 15 * x**4 - 6 * x**5

    grid = np.stack(np.meshgrid(*[np.arange(-6, 7)] * 3, indexing="ij"), -1).reshape(-1, 3)
    grid = grid[np.any(grid != 0, axis=1)]
    r = a / 2 * np.linalg.norm(grid, axis=1)
    unlike = grid.sum(axis=1) % 2 == 1
    near = np.exp(-r[unlike] / 0.3) * switch(r[unlike])
    attraction = switch(r[~unlike]) / r[~unlike] ** 6
    _, madelung = MADELUNG["rocksalt"]
    return -4 * madelung * COULOMB_EV_ANGSTROM / (a / 2) + 1280.0 * near.sum() - 0.5 * 25.0 * attraction.sum()


def lattice_constant():
    return minimize_scalar(energy_of_magnesia, bracket=(3.9, 4.3), tol=1e-10).x


def test_the_reference_is_what_the_calculator_computes():
    for a in (4.0, 4.3):
        atoms = bulk("MgO", "rocksalt", a=a)
        atoms.calc = magnesia()
        assert atoms.get_potential_energy() == pytest.approx(energy_of_magnesia(a), rel=1e-7)


@pytest.mark.everyday_cases("ExpCellFilter")
@pytest.mark.parametrize("cell_filter", [FrechetCellFilter, pytest.param(ExpCellFilter, id="ExpCellFilter")])
@pytest.mark.filterwarnings("ignore:Use FrechetCellFilter:DeprecationWarning")
def test_a_cell_relaxes_to_the_lattice_constant(cell_filter):
    atoms = bulk("MgO", "rocksalt", a=4.3, cubic=True)
    atoms.calc = magnesia()
    strain = np.random.default_rng(0).normal(scale=0.02, size=(3, 3))
    atoms.set_cell(atoms.cell.array @ (np.eye(3) + strain + strain.T), scale_atoms=True)
    atoms.rattle(0.05, seed=1)
    optimizer = BFGS(cell_filter(atoms), logfile=None)
    assert optimizer.run(fmax=1e-4, steps=200)
    lengths, angles = np.split(atoms.cell.cellpar(), 2)
    np.testing.assert_allclose(lengths, lattice_constant(), rtol=1e-5)
    np.testing.assert_allclose(angles, 90.0, atol=1e-3)
    assert atoms.get_potential_energy() == pytest.approx(4 * energy_of_magnesia(lattice_constant()), rel=1e-7)


# -- phonons --------------------------------------------------------------------------------------


def frequencies(calculator, path, supercell=(3, 3, 3)):
    """Of solid argon along a path of wave vectors, in meV."""
    atoms = bulk("Ar", "fcc", a=5.3)
    phonons = Phonons(atoms, calculator, supercell=supercell, delta=0.02, name=str(path))
    phonons.run()
    phonons.read(acoustic=True)
    points = np.array([[0.0, 0.0, 0.0], [0.5, 0.0, 0.5], [0.5, 0.5, 0.5], [0.375, 0.375, 0.75]])
    return 1e3 * phonons.band_structure(points)


def test_phonons_of_argon_are_those_of_ase(tmp_path):
    ours = Calculator(Pair("lennard_jones", cutoff=6.5, shifted=True, sigma=3.4, epsilon=0.0104), skin=0.3)
    found = frequencies(ours, tmp_path / "ours")
    expected = frequencies(LennardJones(sigma=3.4, epsilon=0.0104, rc=6.5, smooth=False), tmp_path / "ase")
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-3)
    np.testing.assert_allclose(found[0], 0.0, atol=1e-3)
    assert 5.0 < found.max() < 12.0, "the Debye temperature of argon, 92 K, is 8 meV"
    assert ours.searches == 1, "displacements of a phonon calculation stay within the skin"
