"""Dipoles, quadrupoles and Gaussians in the calculator: derivatives, torques, moments that turn, parameters."""

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import molecule
from ase.calculators.calculator import PropertyNotImplementedError
from scipy.spatial.transform import Rotation

from nvalchemiops.ase import Calculator, Electrostatics
from nvalchemiops.constants import COULOMB_EV_ANGSTROM
from nvalchemiops.torch.interactions.electrostatics import ewald_summation
from tests.support.calculators import NACL, salt
from tests.values.test_ase_calculator import check_derivatives, slab

TIGHT = {"accuracy": 1e-10}  # stress is the derivative at constant parameters


def moments(n, seed=0):
    """Dipoles and traceless quadrupoles."""
    rng = np.random.default_rng(seed)
    second = 0.3 * rng.normal(size=(n, 3, 3))
    second = second + second.transpose(0, 2, 1)
    second -= np.trace(second, axis1=1, axis2=2)[:, None, None] * np.eye(3) / 3.0
    return {"dipoles": 0.3 * rng.normal(size=(n, 3)), "quadrupoles": second}


WIDTHS = {"Na": 0.3, "Cl": 0.5}
CASES = {
    "ewald": lambda: (salt(), Electrostatics("ewald", NACL, **moments(8), widths=WIDTHS, **TIGHT)),
    "pme": lambda: (salt(), Electrostatics("pme", {"Na": 1.0, "Cl": -0.5}, **moments(8), **TIGHT)),
    "slab": lambda: (slab(), Electrostatics("ewald", NACL, **moments(8), widths=0.4, slab_correction=True, **TIGHT)),
    "molecule": lambda: (molecule("H2O"), Electrostatics("coulomb", {"O": -0.8, "H": 0.4}, **moments(3))),
    "within a cutoff": lambda: (salt(), Electrostatics("coulomb", NACL, **moments(8), cutoff=7.0)),
}


@pytest.mark.parametrize("name", CASES)
def test_forces_and_stress_are_derivatives(name):
    atoms, term = CASES[name]()
    atoms.calc = Calculator(term)
    check_derivatives(atoms)


@pytest.mark.parametrize("name", CASES)
def test_torques_are_derivatives_by_rotations_of_an_atom(name):
    atoms, term = CASES[name]()
    atoms.calc = Calculator(term)
    torque, given = atoms.calc.get_torques(atoms)[1], moments(len(atoms))

    def energy(turn):
        here = {key: values.copy() for key, values in given.items()}
        here["dipoles"][1] = turn @ here["dipoles"][1]
        here["quadrupoles"][1] = turn @ here["quadrupoles"][1] @ turn.T
        options = term._arguments | here
        atoms.calc = Calculator(Electrostatics(term.method, term.charges, **options))
        return atoms.get_potential_energy()

    for axis in range(3):
        by_angle = [energy(Rotation.from_rotvec(angle * np.eye(3)[axis]).as_matrix()) for angle in (1e-3, -1e-3)]
        assert torque[axis] == pytest.approx(-(by_angle[0] - by_angle[1]) / 2e-3, abs=1e-5 * abs(torque).max())


def test_a_sum_in_ev_with_the_dipole_of_the_atoms():
    """By `ewald_summation`; moments by element are those of all its atoms."""
    atoms, along = salt(), {"Na": [0.1, 0.0, 0.2], "Cl": [0.0, -0.3, 0.0]}
    second = {"Na": np.diag([0.2, 0.1, -0.3]), "*": np.zeros((3, 3))}
    atoms.calc = Calculator(Electrostatics("ewald", NACL, dipoles=along, quadrupoles=second, widths=0.4))
    is_sodium = atoms.symbols == "Na"
    charges = np.where(is_sodium, 1.0, -1.0)
    dipoles = np.where(is_sodium[:, None], along["Na"], along["Cl"])
    quadrupoles = np.where(is_sodium[:, None, None], second["Na"], 0.0)
    arrays = (torch.tensor(a) for a in (atoms.positions, charges, atoms.cell.array, dipoles, quadrupoles))
    x, q, cell, mu, tensors = arrays
    energies, forces = ewald_summation(
        x, q, cell, dipoles=mu, quadrupoles=tensors, widths=0.4, accuracy=1e-10, compute_forces=True
    )
    np.testing.assert_allclose(atoms.get_potential_energies(), COULOMB_EV_ANGSTROM * energies, rtol=1e-6)
    exact = COULOMB_EV_ANGSTROM * forces.numpy()
    assert np.linalg.norm(atoms.get_forces() - exact) < 3e-6 * np.linalg.norm(exact)
    np.testing.assert_allclose(atoms.get_dipole_moment(), charges @ atoms.positions + dipoles.sum(0))


def test_dipoles_that_turn_with_a_molecule():
    """A function of the geometry: torques become forces."""

    def along_the_axis(system):
        oxygen, *hydrogens = system.positions.unflatten(0, (-1, 3)).unbind(1)
        direction = sum(hydrogens) - 2.0 * oxygen
        direction = 0.4 * direction / direction.norm(dim=1, keepdim=True)
        return torch.stack([direction, 0.2 * direction, torch.zeros_like(direction)], 1).flatten(0, 1)

    water = molecule("H2O")
    pair = Atoms(water) + Atoms(water.symbols, water.positions @ Rotation.from_rotvec([0.3, 0.9, 0.2]).as_matrix())
    pair.positions[3:] += [2.8, 0.4, -0.3]
    for periodic in (False, True):
        atoms = pair.copy()
        method = {"method": "coulomb"}
        if periodic:
            atoms.set_cell([[7.0, 0.5, 0.0], [0.0, 6.5, 0.3], [-0.4, 0.0, 7.3]])
            atoms.pbc, method = True, {"method": "ewald", **TIGHT}
        atoms.calc = Calculator(Electrostatics(charges={"O": -0.6, "H": 0.3}, dipoles=along_the_axis, **method))
        check_derivatives(atoms)
        # nothing changes when everything turns together
        if not periodic:
            forces = atoms.get_forces()
            assert abs(np.cross(atoms.positions, forces).sum(0)).max() < 1e-10


BAD = {
    "shape": ({"dipoles": np.zeros((3, 3))}, ValueError, r"`dipoles` must have shape \(n_atoms, 3\)"),
    "element": ({"dipoles": {"Na": [0.0, 0.0, 0.0]}}, ValueError, "`dipoles` has no value for Cl"),
    "tensor": ({"quadrupoles": {"*": [1.0, 2.0]}}, ValueError, r"`quadrupoles` must hold finite numbers of shape"),
    "returned": ({"dipoles": lambda system: system.positions[:2]}, ValueError, "`dipoles` must return shape"),
    "negative": ({"widths": -1.0}, ValueError, "`widths` must be finite and non-negative"),
    "function": ({"widths": lambda system: 1.0}, TypeError, "`widths` must be a number"),
    "method": ({"method": "dsf", "dipoles": {"*": [0.0] * 3}, "cutoff": 5.0}, TypeError, "`dipoles` does not belong"),
    "shifted": (
        {"method": "coulomb", "dipoles": {"*": [0.0] * 3}, "cutoff": 5.0, "shifted": True},
        TypeError,
        "`shifted` does not belong",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    changed, error, message = BAD[name]
    atoms = salt()
    with pytest.raises(error, match=message):
        atoms.calc = Calculator(Electrostatics(**{"method": "ewald", "charges": NACL, **changed}))
        atoms.get_potential_energy()


def test_charges_have_no_torques():
    atoms = salt()
    atoms.calc = Calculator(Electrostatics("ewald", NACL))
    with pytest.raises(PropertyNotImplementedError, match="torques"):
        atoms.calc.get_torques(atoms)


@pytest.mark.parametrize("method", ["ewald", "pme"])
def test_parameters_follow_the_charges_of_the_atoms(method):
    """With dipoles they depend on magnitudes: results are a function of the atoms, whatever was computed before."""
    dipoles = {"Na": [0.1, 0.0, 0.2], "Cl": [0.0, 0.1, 0.0]}
    used, fresh = (Calculator(Electrostatics(method, dipoles=dipoles, accuracy=1e-3)) for _ in range(2))
    atoms = salt()
    for scale in (1.0, 0.01):
        atoms.set_initial_charges(scale * np.where(atoms.numbers == 11, 1.0, -1.0))
        found = used.get_property("forces", atoms)
    assert np.array_equal(found, fresh.get_property("forces", atoms))


@pytest.mark.parametrize("name", ["charges", "dipoles"])
def test_the_reach_of_functions_is_not_known(name):
    """Which several processes need, whatever other sources there are."""
    sources = {"charges": NACL, **moments(8), "widths": 0.3} | {name: lambda system: system.positions}
    with pytest.raises(ValueError, match=f"`{name}`: a function of the geometry is for one process"):
        Electrostatics("ewald", **sources).reach(salt())


@pytest.mark.parametrize("method", ["ewald", "pme"])
def test_a_call_that_fails_leaves_no_parameters(method):
    term = Electrostatics(method, lambda system: torch.cos(system.positions[:, 0]), dipoles={"*": [0.1, 0.0, 0.2]})
    used, atoms = Calculator(term), salt()
    lost = atoms.copy()
    lost.positions[0] = np.nan
    with pytest.raises(ValueError, match="`positions` has entries that are NaN"):
        used.get_property("forces", lost)
    fresh = Calculator(Electrostatics(method, term.charges, dipoles={"*": [0.1, 0.0, 0.2]}))
    assert np.array_equal(used.get_property("forces", atoms), fresh.get_property("forces", atoms))
