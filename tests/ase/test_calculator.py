"""The calculator against ASE's and matscipy's, against finite differences, and under everything that ASE does."""

import copy
import json
import pickle
import subprocess
import sys

import ase
import ase.io
import numpy as np
import pytest
import torch
from ase.build import bulk, fcc100, molecule
from ase.calculators.calculator import PropertyNotImplementedError
from ase.calculators.fd import calculate_numerical_forces, calculate_numerical_stress
from ase.calculators.lj import LennardJones
from ase.calculators.morse import MorsePotential
from ase.cluster import Octahedron
from ase.constraints import FixAtoms
from matscipy.calculators.pair_potential import LennardJonesCut
from matscipy.calculators.pair_potential import PairPotential as MatscipyPotential

import nvalchemiops.torch.interactions.pair as ready
from nvalchemiops.ase import Calculator, Contribution, Electrostatics, Pair
from nvalchemiops.constants import COULOMB_EV_ANGSTROM
from nvalchemiops.torch.interactions.pair import PairPotential
from tests.systems import MADELUNG

NACL = {"Na": 1.0, "Cl": -1.0}
REPULSION = {"A": {"Na-Cl": 1256.3, "Na-Na": 487.0, ("Cl", "Cl"): 3485.0}, "rho": {"Na-Cl": 0.317, "*": 0.29}, "C": 0.0}
PROPERTIES = ("energy", "free_energy", "energies", "forces", "stress")


def argon(pbc=True, seed=1, symbols=None):
    """32 atoms in a skewed cell, off their sites, some of them outside of it."""
    rng = np.random.default_rng(seed)
    atoms = bulk("Ar", "fcc", a=5.3, cubic=True).repeat(2)
    atoms.set_cell(atoms.cell.array @ (np.eye(3) + rng.normal(scale=0.03, size=(3, 3))), scale_atoms=True)
    atoms.positions += rng.normal(scale=0.15, size=atoms.positions.shape)
    atoms.positions += rng.integers(-1, 2, (len(atoms), 3)) * atoms.pbc @ atoms.cell.array
    atoms.pbc = pbc
    if symbols is not None:
        atoms.symbols = rng.choice(symbols, len(atoms))
    return atoms


def salt(seed=1, displacement=0.15):
    atoms = bulk("NaCl", "rocksalt", a=5.64, cubic=True)
    rng = np.random.default_rng(seed)
    atoms.set_cell(atoms.cell.array @ (np.eye(3) + rng.normal(scale=0.03, size=(3, 3))), scale_atoms=True)
    atoms.positions += rng.normal(scale=displacement, size=atoms.positions.shape)
    return atoms


def rigid_ions(method="ewald", skin=0.5, **options):
    return Calculator(Pair("buckingham", cutoff=7.0, **REPULSION), Electrostatics(method, NACL, **options), skin=skin)


def slab():
    """Polar and narrow, with less vacuum than the real-space part of the sum reaches."""
    atoms = salt(3)
    atoms.set_cell(atoms.cell.array + np.array([[0, 0, 0], [0, 0, 0], [0.5, 0.0, 4.0]]))
    atoms.positions[:, 2] += 0.3 * (atoms.symbols == "Na")
    atoms.pbc = (True, True, False)
    return atoms


def assert_same(found, expected, properties=PROPERTIES, tolerance=1e-10):
    """Results of two calculators for their atoms."""
    for name in properties:
        values = [np.asarray(a.calc.get_property(name, a)) for a in (found, expected)]
        assert values[0].shape == values[1].shape, name
        scale = max(1.0, abs(values[1]).max())
        np.testing.assert_allclose(*values, rtol=tolerance, atol=tolerance * scale, err_msg=name)


def compare(atoms, calculator, reference, **options):
    found, expected = atoms.copy(), atoms.copy()
    found.calc, expected.calc = calculator, reference
    assert_same(found, expected, **options)


def check_derivatives(atoms, forces_tolerance=1e-6, stress_tolerance=1e-8):
    forces = atoms.get_forces()
    assert abs(forces).max() > 0.01
    np.testing.assert_allclose(forces, calculate_numerical_forces(atoms, eps=1e-4), atol=forces_tolerance)
    if atoms.cell.rank == 3:
        stress = atoms.get_stress()
        assert (abs(stress) > 1e-5).all()
        np.testing.assert_allclose(stress, calculate_numerical_stress(atoms, eps=1e-5), atol=stress_tolerance)


# -- against other codes --------------------------------------------------------------------------


@pytest.mark.parametrize("pbc", [True, (True, True, False), (False, True, False), False])
def test_lennard_jones_of_ase(pbc):
    """ASE shifts the energy to zero at the cutoff, which is `shifted` here."""
    ours = Calculator(Pair("lennard_jones", cutoff=6.0, shifted=True, sigma=3.4, epsilon=0.0104))
    compare(argon(pbc), ours, LennardJones(sigma=3.4, epsilon=0.0104, rc=6.0, smooth=False))


def test_smoothed_lennard_jones_of_ase():
    """ASE smooths with a cubic in r²; `r_switch` is a quintic in r, so this takes an expression."""
    potential = PairPotential(
        "4*epsilon*((sigma/r)^12 - (sigma/r)^6) * select(step(r^2 - b), (c - r^2)^2*(c + 2*r^2 - 3*b)/(c - b)^3, 1); "
        "b = onset^2; c = cutoff^2",
        global_parameters=("epsilon", "sigma", "onset"),
        cutoff=6.5,
    )
    reference = LennardJones(sigma=3.4, epsilon=0.0104, rc=6.5, ro=5.0, smooth=True)
    compare(argon(), Calculator(Pair(potential, epsilon=0.0104, sigma=3.4, onset=5.0)), reference)


def test_morse_of_ase():
    """ASE's exponent is relative to r0, and its smoothing is that of `r_switch`."""
    atoms = bulk("Cu", cubic=True).repeat(2)
    atoms.rattle(0.1, seed=2)
    ours = Pair("morse", cutoff=2.1 * 2.87, r_switch=1.6 * 2.87, depth=0.34, steepness=3.9 / 2.87, r0=2.87)
    reference = MorsePotential(epsilon=0.34, r0=2.87, rho0=3.9, rcut1=1.6, rcut2=2.1)
    compare(atoms, Calculator(ours), reference)


def test_a_cluster_without_a_cell():
    cluster = Octahedron("Ar", 4, latticeconstant=5.2)
    cluster.rattle(0.2, seed=3)
    cluster.cell, cluster.pbc = None, False
    reference = LennardJones(sigma=3.4, epsilon=0.0104, rc=1000.0, smooth=False)
    parameters = {"sigma": 3.4, "epsilon": 0.0104}
    far = Calculator(Pair("lennard_jones", cutoff=1000.0, shifted=True, **parameters))
    compare(cluster, far, reference, properties=("energy", "energies", "forces"))
    everything = Calculator(Pair("lennard_jones", **parameters))
    compare(cluster, everything, reference, properties=("energy", "energies", "forces"), tolerance=1e-12)


def test_tables_by_pair_as_in_matscipy():
    atoms = argon(symbols=["Ar", "Kr"])
    sigma, epsilon = {"Ar-Ar": 3.4, "Ar-Kr": 3.55, "Kr-Kr": 3.65}, {"Ar-Ar": 0.0104, "Kr-Ar": 0.0119, "Kr-Kr": 0.014}
    reference = MatscipyPotential(
        {
            (18, 18): LennardJonesCut(0.0104, 3.4, 6.0),
            (18, 36): LennardJonesCut(0.0119, 3.55, 6.0),
            (36, 36): LennardJonesCut(0.014, 3.65, 6.0),
        }
    )
    ours = Calculator(Pair("lennard_jones", cutoff=6.0, shifted=True, sigma=sigma, epsilon=epsilon))
    compare(atoms, ours, reference, properties=("energy", "forces", "stress"))


@pytest.mark.parametrize("structure", MADELUNG)
@pytest.mark.parametrize("method", ["ewald", "pme"])
def test_madelung_energies(structure, method):
    distance, constant = MADELUNG[structure]
    a = 5.0
    atoms = bulk("NaCl", structure, a=a).repeat(2)
    atoms.calc = Calculator(Electrostatics(method, NACL, accuracy=1e-8))
    energy = -constant * COULOMB_EV_ANGSTROM / (distance * a) * len(atoms) / 2
    assert atoms.get_potential_energy() == pytest.approx(energy, rel=1e-8)
    np.testing.assert_allclose(atoms.get_potential_energies(), energy / len(atoms), rtol=1e-7)
    # a homogeneous function of degree -1: the trace of the virial is the energy
    assert atoms.get_stress()[:3].sum() * atoms.get_volume() == pytest.approx(-energy, rel=1e-6)


def test_coulomb_energy_of_a_molecule():
    atoms = molecule("CH3CH2OH")
    charges = np.random.default_rng(0).normal(size=len(atoms))
    atoms.calc = Calculator(Electrostatics("coulomb", charges))
    distances = atoms.get_all_distances()
    i, j = np.triu_indices(len(atoms), 1)
    expected = COULOMB_EV_ANGSTROM * (charges[i] * charges[j] / distances[i, j]).sum()
    assert atoms.get_potential_energy() == pytest.approx(expected, rel=1e-12)
    check_derivatives(atoms)


def test_a_slab_does_not_depend_on_its_vacuum():
    def energy(height, **options):
        atoms = slab()
        atoms.cell[2, 2] += height
        atoms.calc = Calculator(Electrostatics("ewald", NACL, accuracy=1e-8, **options))
        return atoms.get_potential_energy()

    energies = [energy(height, slab_correction=True) for height in (10.0, 16.0, 30.0)]
    assert max(energies) - min(energies) < 1e-5
    with pytest.raises(ValueError, match="slab_correction=True"):
        energy(10.0)


def test_methods_for_one_system_agree():
    """A molecule in a growing box: the periodic sum goes to the sum over pairs with the third power of its length."""
    atoms = molecule("H2O")
    charges = {"O": -0.8, "H": 0.4}
    atoms.calc = Calculator(Electrostatics("coulomb", charges))
    alone = atoms.get_potential_energy()
    differences = []
    for length in (15.0, 30.0):
        atoms.set_cell([length] * 3)
        atoms.pbc = True
        atoms.calc = Calculator(Electrostatics("pme", charges, accuracy=1e-8))
        differences.append(atoms.get_potential_energy() - alone)
    dipole = np.linalg.norm((np.array([-0.8, 0.4, 0.4])[:, None] * atoms.positions).sum(0))
    # the leading term, for conducting boundary: -2π/3V of the square of the dipole
    expected = -2 * np.pi / 3 * dipole**2 * COULOMB_EV_ANGSTROM / np.array([15.0, 30.0]) ** 3
    np.testing.assert_allclose(differences, expected, rtol=0.03)


# -- derivatives ----------------------------------------------------------------------------------

TIGHT = {"accuracy": 1e-8}  # a stress at constant parameters is the derivative but for the error of the sum
DERIVATIVES = {
    "ewald": lambda: (salt(), Electrostatics("ewald", NACL, **TIGHT)),
    "pme": lambda: (salt(), Electrostatics("pme", NACL, **TIGHT)),
    "charged": lambda: (salt(), Electrostatics("ewald", {"Na": 1.0, "Cl": -0.5}, **TIGHT)),
    "slab": lambda: (slab(), Electrostatics("ewald", NACL, slab_correction=True, **TIGHT)),
    "slab by pme": lambda: (slab(), Electrostatics("pme", NACL, slab_correction=True, **TIGHT)),
    "dsf": lambda: (salt(), Electrostatics("dsf", NACL, cutoff=7.0, alpha=0.2)),
    "reaction field": lambda: (salt(), Electrostatics("reaction_field", NACL, cutoff=7.0, dielectric=78.0)),
    "yukawa": lambda: (salt(), Electrostatics("yukawa", NACL, cutoff=9.0, r_switch=7.0, kappa=0.3)),
    "buckingham": lambda: (salt(), Pair("buckingham", cutoff=7.0, r_switch=5.0, **REPULSION)),
    "lennard-jones": lambda: (
        argon((True, False, True), symbols=["Ar", "Kr"]),
        Pair("lennard_jones", cutoff=7.0, r_switch=6.0, sigma={"Ar": 3.4, "Kr": 3.6}, epsilon=0.05),
    ),
    "zbl": lambda: (salt(), Pair("ziegler_biersack_littmark", cutoff=4.0, r_switch=3.0)),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_forces_and_stress_are_derivatives(name):
    atoms, term = DERIVATIVES[name]()
    atoms = atoms[:12] if len(atoms) > 12 else atoms
    atoms.calc = Calculator(term)
    check_derivatives(atoms)


@pytest.mark.parametrize("method", ["ewald", "pme"])
def test_forces_are_derivatives_also_at_low_accuracy(method):
    atoms = salt()
    atoms.calc = Calculator(Electrostatics(method, NACL, accuracy=1e-3))
    np.testing.assert_allclose(atoms.get_forces(), calculate_numerical_forces(atoms, eps=1e-4), atol=1e-6)
    stress = atoms.get_stress()
    np.testing.assert_allclose(stress, calculate_numerical_stress(atoms, eps=1e-4), atol=1e-2 * abs(stress).max())


def test_charges_that_depend_on_the_geometry():
    """The response of charges is part of forces and stress, and is missing where a function returns plain numbers."""

    def charges(system):
        i, _, vectors = system.pairs(4.0)
        closeness = torch.exp(-vectors.norm(dim=1)) * (1 - vectors.square().sum(1) / 16.0) ** 3
        around = torch.zeros_like(system.positions[:, 0]).index_add(0, i, closeness)
        return system.tensor(np.where(system.atoms.symbols == "Na", 1.0, -1.0)) + 3.0 * (around - around.mean())

    for options in ({"method": "ewald", **TIGHT}, {"method": "dsf", "cutoff": 7.0, "alpha": 0.2}):
        atoms = salt()
        atoms.calc = Calculator(Electrostatics(charges=charges, **options))
        check_derivatives(atoms, stress_tolerance=2e-8)
        found = atoms.get_charges()
        assert np.ptp(found[atoms.symbols == "Na"]) > 0.01
        fixed = atoms.copy()
        fixed.calc = Calculator(Electrostatics(charges=lambda system, c=charges: c(system).detach().numpy(), **options))
        assert fixed.get_potential_energy() == pytest.approx(atoms.get_potential_energy(), rel=1e-12)
        assert abs(fixed.get_forces() - atoms.get_forces()).max() > 0.01
        np.testing.assert_allclose(fixed.get_charges(), found, rtol=1e-12)


def test_charges_of_a_molecule_that_depend_on_the_geometry():
    def charges(system):
        i, j, vectors = system.pairs(None)
        weights = torch.exp(-vectors.norm(dim=1)) * (i - j)
        return torch.zeros_like(system.positions[:, 0]).index_add(0, i, weights)

    atoms = molecule("H2O")
    atoms.calc = Calculator(Electrostatics("coulomb", charges))
    check_derivatives(atoms)


# -- parameters in any form -----------------------------------------------------------------------


def test_forms_of_parameters():
    atoms = argon(symbols=["Ar", "Kr"])
    sigma = {"Ar": 3.4, "Kr": 3.6}
    by_pair = {"Ar-Ar": 3.4, "Ar-Kr": 3.5, ("Kr", "Kr"): 3.6}
    array = np.where(atoms.symbols == "Ar", 3.4, 3.6)
    forms = [sigma, {"Ar": 3.4, "*": 3.6}, array, list(array), by_pair, {"Ar-Kr": 3.5, "Kr-Kr": 3.6, "*": 3.4}]
    energies = []
    for form in forms:
        atoms.calc = Calculator(Pair("lennard_jones", cutoff=6.0, sigma=form, epsilon=0.0104))
        energies.append(atoms.get_potential_energy())
    np.testing.assert_allclose(energies, energies[0], rtol=1e-13)
    atoms.calc = Calculator(Pair("lennard_jones", cutoff=6.0, sigma=3.4, epsilon=0.0104))
    assert atoms.get_potential_energy() != pytest.approx(energies[0])


def test_forms_of_charges():
    atoms = salt()
    array = np.where(atoms.symbols == "Na", 1.0, -1.0)
    atoms.set_initial_charges(array)
    found = []
    for charges in (NACL, array, None, lambda system: array, lambda system: system.tensor(array), torch.tensor(array)):
        atoms.calc = Calculator(Electrostatics("ewald", charges))
        found.append([atoms.get_potential_energy(), *atoms.get_charges()])
    np.testing.assert_array_equal(found, [found[0]] * len(found))


def test_numbers_of_nuclei_are_known():
    atoms = molecule("H2O")
    formula = ready.ziegler_biersack_littmark(5.0)
    energies, forces = formula(
        torch.tensor(atoms.positions), z=torch.tensor([8.0, 1.0, 1.0], dtype=torch.float64), compute_forces=True
    )
    atoms.calc = Calculator(Pair("ziegler_biersack_littmark", cutoff=5.0))
    np.testing.assert_allclose(atoms.get_potential_energies(), energies, rtol=1e-13)
    np.testing.assert_allclose(atoms.get_forces(), forces, rtol=1e-12)


def test_terms_add_up():
    atoms = salt()
    repulsion, coulomb = Pair("buckingham", cutoff=7.0, **REPULSION), Electrostatics("pme", NACL)
    results = []
    for terms in ((repulsion,), (coulomb,), (repulsion, coulomb)):
        atoms.calc = Calculator(*terms)
        results.append([atoms.calc.get_property(name, atoms) for name in PROPERTIES])
    for one, other, both in zip(*results):
        np.testing.assert_allclose(one + other, both, rtol=1e-12, atol=1e-12)


def test_a_term_of_your_own():
    class Field:
        """Charges in a uniform field along x."""

        def __init__(self, strength):
            self.strength = strength

        def evaluate(self, system):
            charges = system.tensor(np.where(system.atoms.symbols == "Na", 1.0, -1.0))
            forces = torch.zeros_like(system.positions)
            forces[:, 0] = self.strength * charges
            return Contribution(-self.strength * charges * system.positions[:, 0], forces, None)

    atoms = salt()
    atoms.calc = Calculator(Electrostatics("ewald", NACL), Field(0.3))
    check = atoms.copy()
    check.calc = Calculator(Electrostatics("ewald", NACL))
    charges = np.where(atoms.symbols == "Na", 1.0, -1.0)
    expected = check.get_potential_energy() - 0.3 * (charges * atoms.positions[:, 0]).sum()
    assert atoms.get_potential_energy() == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(atoms.get_forces()[:, 0], check.get_forces()[:, 0] + 0.3 * charges, rtol=1e-12)
    with pytest.raises(ValueError, match="no virial"):
        atoms.get_stress()


def test_a_term_may_keep_what_it_returns():
    class Springs:
        def __init__(self):
            self.energies = torch.zeros(8, dtype=torch.float64, requires_grad=True)
            self.forces = torch.zeros(8, 3, dtype=torch.float64)

        def evaluate(self, system):
            self.energies.data += 1.0
            return Contribution(self.energies, self.forces.fill_(len(system.atoms)), None, self.energies)

    atoms = salt()
    atoms.calc = Calculator(Springs())
    first = atoms.get_potential_energies(), atoms.get_forces()
    kept = dict(atoms.calc.results)
    atoms.positions += 0.1
    assert atoms.get_potential_energy() == 16.0
    np.testing.assert_array_equal(kept["energies"], np.ones(8))
    np.testing.assert_array_equal(first[0], np.ones(8))


# -- one calculator under everything that ASE does ------------------------------------------------


def changed_positions(atoms):
    atoms.positions[3] += 0.2


def changed_by_little(atoms):
    atoms.positions[3, 1] += 1e-9


def changed_cell(atoms):
    atoms.set_cell(atoms.cell.array * 1.02, scale_atoms=True)


def cell_without_its_atoms(atoms):
    atoms.cell[1] += [0.3, 0.1, 0.0]


def changed_numbers(atoms):
    atoms.numbers[:2] = atoms.numbers[1::-1]


def changed_initial_charges(atoms):
    atoms.set_initial_charges(0.9 * atoms.get_initial_charges())


def fewer_atoms(atoms):
    del atoms[[0, 1]]


def more_atoms(atoms):
    atoms *= (1, 1, 2)


def wrapped(atoms):
    atoms.positions += 30.0
    atoms.wrap()


def left_handed(atoms):
    atoms.set_cell(atoms.cell.array[[1, 0, 2]])


CHANGES = [
    changed_positions,
    changed_by_little,
    changed_cell,
    cell_without_its_atoms,
    changed_numbers,
    changed_initial_charges,
    fewer_atoms,
    more_atoms,
    wrapped,
    left_handed,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("method", ["ewald", "pme", "dsf"])
def test_results_follow_every_change(change, method):
    """As a new calculator has them: they are a function of the atoms, not of what was computed before."""

    def calculator():
        options = {"cutoff": 7.0, "alpha": 0.2} if method == "dsf" else {}
        return Calculator(Pair("buckingham", cutoff=7.0, **REPULSION), Electrostatics(method, **options))

    atoms = salt()
    atoms.set_initial_charges(np.where(atoms.symbols == "Na", 1.0, -1.0))
    atoms.calc = calculator()
    before = atoms.get_potential_energy(), atoms.get_forces(), atoms.get_stress()
    change(atoms)
    for name in ("energy", "forces", "stress", "charges"):
        assert atoms.calc.get_property(name, atoms, allow_calculation=False) is None
    fresh = atoms.copy()
    fresh.calc = calculator()
    assert_same(atoms, fresh, (*PROPERTIES, "charges"), 1e-12)
    if change not in (wrapped, left_handed, changed_by_little):
        assert abs(atoms.get_potential_energy() - before[0]) > 1e-3


def test_changed_periodicity():
    atoms = argon()
    atoms.calc = Calculator(Pair("lennard_jones", cutoff=6.0, sigma=3.4, epsilon=0.0104))
    for pbc in (True, (False, True, True), False, True):
        atoms.pbc = pbc
        fresh = atoms.copy()
        fresh.calc = Calculator(*atoms.calc.terms)
        assert_same(atoms, fresh)


def test_nothing_is_computed_twice():
    atoms = salt()
    atoms.calc = rigid_ions()
    seen = []
    term = atoms.calc.terms[0]
    evaluate, term.evaluate = term.evaluate, lambda system: seen.append(system.wants_virial) or evaluate(system)
    for _ in range(2):
        atoms.get_potential_energy(), atoms.get_forces(), atoms.get_potential_energies(), atoms.get_charges()
    assert seen == [False]
    atoms.get_stress(), atoms.get_stress()
    assert seen == [False, True]
    atoms.rattle(0.01, seed=5)
    atoms.get_forces(), atoms.get_stress()
    assert seen == [False, True, True], "stress comes along, once it was asked for"


def test_several_atoms_in_turn():
    calculator = rigid_ions()
    several = [salt(seed) for seed in (1, 2)] + [salt(3).repeat((1, 1, 2))]
    for _ in range(2):
        for atoms in several:
            atoms.calc = calculator
            fresh = atoms.copy()
            fresh.calc = rigid_ions()
            assert_same(atoms, fresh, tolerance=1e-12)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda atoms: pickle.loads(pickle.dumps(atoms))])
def test_copies_of_atoms_with_their_calculator(duplicate):
    atoms = salt()
    atoms.calc = rigid_ions("pme")
    energy = atoms.get_potential_energy()
    other = duplicate(atoms)
    assert other.calc is not atoms.calc
    other.rattle(0.1, seed=8)
    assert other.get_potential_energy() != energy
    assert atoms.calc.get_property("energy", atoms, allow_calculation=False) == energy
    atoms.positions = other.positions
    np.testing.assert_array_equal(atoms.get_forces(), other.get_forces())


def test_results_belong_to_the_caller():
    atoms = salt()
    atoms.calc = rigid_ions()
    forces = atoms.get_forces()
    forces[:] = 0.0
    assert abs(atoms.get_forces()).max() > 0.1


def test_constraints_are_left_to_ase():
    atoms = salt()
    atoms.calc = rigid_ions()
    free = atoms.get_forces()
    atoms.set_constraint(FixAtoms([0, 3]))
    assert (atoms.get_forces()[[0, 3]] == 0.0).all()
    np.testing.assert_array_equal(atoms.get_forces(apply_constraint=False), free)


def test_results_in_files(tmp_path):
    atoms = salt()
    atoms.calc = rigid_ions()
    atoms.get_stress()
    for name in ("a.traj", "a.extxyz", "a.json"):
        atoms.write(tmp_path / name)
        read = ase.io.read(tmp_path / name)
        assert read.get_potential_energy() == pytest.approx(atoms.get_potential_energy(), rel=1e-7)
        np.testing.assert_allclose(read.get_forces(), atoms.get_forces(), atol=1e-6)
        np.testing.assert_allclose(read.get_stress(), atoms.get_stress(), atol=1e-7)
    assert atoms.calc.name == "nvalchemiops"
    described = json.loads(json.dumps(atoms.calc.todict()))
    assert described["terms"] == [repr(term) for term in atoms.calc.terms]
    assert described["terms"][1] == "Electrostatics('ewald', charges={'Na': 1.0, 'Cl': -1.0})"


def test_stress_needs_a_volume():
    atoms = molecule("H2O")
    atoms.calc = Calculator(Electrostatics("coulomb", {"O": -0.8, "H": 0.4}))
    assert atoms.get_forces().any()
    with pytest.raises(PropertyNotImplementedError):
        atoms.get_stress()
    with pytest.raises(PropertyNotImplementedError):
        atoms.get_dipole_moment()
    atoms.calc = Calculator(Pair("lennard_jones", sigma=1.0, epsilon=0.1))
    with pytest.raises(PropertyNotImplementedError):
        atoms.get_charges()


def test_the_sign_of_stress():
    """A crystal under tension, whose energy falls when it shrinks, has positive stress."""
    atoms = bulk("Ar", "fcc", a=5.6)
    atoms.calc = Calculator(Pair("lennard_jones", cutoff=8.0, sigma=3.4, epsilon=0.0104))
    assert (atoms.get_stress()[:3] > 0.0).all()


def test_atoms_that_are_few():
    terms = Pair("buckingham", cutoff=4.0, A=1.0, rho=1.0, C=0.0), Electrostatics("coulomb", NACL, cutoff=4.0)
    for atoms in (ase.Atoms(), ase.Atoms(cell=[5, 5, 5], pbc=True), ase.Atoms("Na"), ase.Atoms("Na", cell=[5, 5, 5])):
        atoms.calc = Calculator(*terms)
        assert atoms.get_potential_energy() == 0.0
        np.testing.assert_array_equal(atoms.get_forces(), np.zeros((len(atoms), 3)))
    single = ase.Atoms("Na", cell=[5, 5, 5], pbc=True)
    single.calc = Calculator(Electrostatics("ewald", NACL))
    # a charge in its background: Madelung constant of the simple cubic lattice, by length of the cell
    assert single.get_potential_energy() == pytest.approx(-2.837297479 / 2 / 5 * COULOMB_EV_ANGSTROM, rel=1e-6)


# -- neighbors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ewald", "pme"])
def test_results_do_not_depend_on_the_list(method):
    """Nor on the skin, nor on where atoms were when it was built."""
    fresh = [salt() for _ in range(3)]
    for atoms, skin in zip(fresh, (0.0, 0.5, 3.0)):
        atoms.calc = rigid_ions(method, skin=skin)
    kept = salt()
    kept.calc = rigid_ions(method, skin=3.0)
    kept.get_stress()
    searches = kept.calc.searches
    for atoms in (kept, *fresh):
        atoms.positions += 0.4 * np.sin(np.arange(24).reshape(8, 3))
        atoms.get_stress()
    assert kept.calc.searches == searches, "these positions were not searched"
    for atoms in fresh:
        assert_same(kept, atoms, tolerance=1e-12)


def test_one_list_for_all_terms():
    atoms = salt().repeat(2)
    terms = [
        Pair("buckingham", cutoff=5.0, **REPULSION),
        Pair("lennard_jones", cutoff=7.0, sigma=2.0, epsilon=0.01),
        Electrostatics("dsf", NACL, cutoff=6.0, alpha=0.2),
    ]
    atoms.calc = Calculator(*terms)
    atoms.get_potential_energy()
    first = atoms.calc.searches
    for n in range(5):
        atoms.set_cell(atoms.cell.array * 1.001, scale_atoms=True)
        atoms.get_potential_energy()
        assert atoms.calc.searches == first + n + 1
    alone = 0.0
    for term in terms:
        atoms.calc = Calculator(term)
        alone += atoms.get_potential_energy()
    atoms.calc = Calculator(*terms)
    assert atoms.get_potential_energy() == pytest.approx(alone, rel=1e-12)


def test_a_slab_and_a_pair_potential_see_different_images():
    """Images across the vacuum belong to the Ewald sum, and to no pair potential."""
    atoms = fcc100("Ar", (3, 3, 2), a=5.3)
    atoms.cell[2] = [0.0, 0.0, 6.0]
    atoms.pbc = (True, True, False)
    charges = np.where(np.arange(len(atoms)) % 2, 0.1, -0.1)
    pair, sum_over_lattice = (
        Pair("lennard_jones", cutoff=8.0, sigma=3.4, epsilon=0.01),
        Electrostatics("ewald", charges, slab_correction=True),
    )
    energies = []
    for terms in ((pair,), (sum_over_lattice,), (pair, sum_over_lattice), (sum_over_lattice, pair)):
        atoms.calc = Calculator(*terms)
        energies.append(atoms.get_potential_energy())
    assert energies[2] == pytest.approx(energies[0] + energies[1], rel=1e-12)
    assert energies[3] == pytest.approx(energies[2], rel=1e-12)
    atoms.cell[2] = 0.0
    atoms.calc = Calculator(pair)
    assert atoms.get_potential_energy() == pytest.approx(energies[0], rel=1e-12)


@pytest.mark.parametrize("method", ["ewald", "pme"])
def test_energies_are_smooth_in_the_size_of_the_cell(method):
    """Far below the accuracy that is asked for: all parameters scale with the cell."""
    atoms = salt()
    cell = atoms.cell.array.copy()
    atoms.calc = Calculator(Electrostatics(method, NACL, accuracy=1e-3))
    energies = []
    for scale in np.linspace(0.9, 1.1, 21):
        atoms.set_cell(cell * scale, scale_atoms=True)
        energies.append(scale * atoms.get_potential_energy())
    np.testing.assert_allclose(energies, energies[0], rtol=1e-12)


# -- mistakes -------------------------------------------------------------------------------------

MISTAKES = {
    "no terms": (lambda: Calculator(), ValueError, "`terms` are missing"),
    "no term": (lambda: Calculator("lennard_jones"), TypeError, "'lennard_jones' is no term"),
    "class": (lambda: Calculator(Pair), TypeError, "is no term"),
    "charges twice": (
        lambda: Calculator(Electrostatics("ewald"), Electrostatics("pme")),
        ValueError,
        "at most one may have charges",
    ),
    "skin": (lambda: rigid_ions(skin=-1.0), ValueError, "`skin` must not be negative"),
    "device": (lambda: Calculator(Electrostatics("ewald"), device="abacus"), ValueError, "`device` = 'abacus'"),
    "set": (lambda: rigid_ions().set(skin=1.0), TypeError, "`skin` cannot be set"),
    "potential": (lambda: Pair("lennard", cutoff=3.0), ValueError, "one of 'lennard_jones'"),
    "charged": (lambda: Pair("yukawa", cutoff=3.0), ValueError, "Electrostatics"),
    "two cutoffs": (
        lambda: Pair(PairPotential("k/r", global_parameters=["k"], cutoff=3.0), cutoff=4.0, k=1.0),
        ValueError,
        "`cutoff` is part of the potential",
    ),
    "missing": (lambda: Pair("morse", cutoff=3.0, depth=1.0, r0=1.0), ValueError, "`steepness` is missing"),
    "unknown": (lambda: Pair("lennard_jones", cutoff=3.0, sigma=1, epsilon=1, size=2), TypeError, "`size` is no param"),
    "text": (lambda: Pair("lennard_jones", cutoff=3.0, sigma="1", epsilon=1), TypeError, "`sigma` must be a number"),
    "nan": (lambda: Pair("lennard_jones", cutoff=3.0, sigma=np.nan, epsilon=1), ValueError, "`sigma` must be finite"),
    "symbol": (lambda: Pair("lennard_jones", cutoff=3.0, sigma={"Axx": 1}, epsilon=1), ValueError, "'Axx'"),
    "triple": (lambda: Pair("morse", cutoff=3.0, depth={"A-B-C": 1}, steepness=1, r0=1), ValueError, "no pair of elem"),
    "contradiction": (
        lambda: Pair("morse", cutoff=3.0, depth={"Na-Cl": 1.0, "Cl-Na": 2.0}, steepness=1, r0=1),
        ValueError,
        "`depth` has two different values for Na-Cl",
    ),
    "element for pair": (
        lambda: Pair("morse", cutoff=3.0, depth={"Na": 1.0}, steepness=1, r0=1),
        TypeError,
        "`depth` must be a number",
    ),
    "method": (lambda: Electrostatics("p3m"), ValueError, "`method` must be one of 'ewald', 'pme', 'coulomb'"),
    "cutoff of ewald": (lambda: Electrostatics("ewald", cutoff=8.0), TypeError, "`cutoff` does not belong"),
    "alpha of pme": (lambda: Electrostatics("pme", alpha=0.3), TypeError, "`alpha` does not belong"),
    "accuracy of dsf": (lambda: Electrostatics("dsf", cutoff=8, alpha=0.2, accuracy=1e-4), TypeError, "`accuracy`"),
    "accuracy": (lambda: Electrostatics("ewald", accuracy=0.0), ValueError, "`accuracy` must be positive"),
    "no cutoff": (lambda: Electrostatics("dsf", alpha=0.2), ValueError, "`cutoff` is needed for 'dsf'"),
    "no alpha": (lambda: Electrostatics("dsf", cutoff=8.0), ValueError, "`alpha` is missing"),
    "charge": (lambda: Electrostatics("ewald", {"Na": "plus"}), TypeError, "`charges:Na` must be a number"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_told_at_once(name):
    make, kind, message = MISTAKES[name]
    with pytest.raises(kind, match=message):
        make()


def periodic_along(*pbc):
    atoms = salt()
    atoms.pbc = pbc
    return atoms


NOT_DEFINED = {
    "molecule": (lambda: molecule("NaCl"), {}, "use 'coulomb' without a cutoff"),
    "wire": (lambda: periodic_along(False, True, False), {"slab_correction": True}, "not along one"),
    "slab": (lambda: periodic_along(True, True, False), {}, "`slab_correction=True` is needed"),
    "no vacuum": (lambda: flat(True, True, False), {"slab_correction": True}, "needs three vectors"),
    "no volume": (lambda: flat(True, True, True), {}, "needs three vectors"),
}


def flat(*pbc):
    atoms = periodic_along(*pbc)
    atoms.cell[2] = 0.0
    return atoms


@pytest.mark.parametrize("name", NOT_DEFINED)
@pytest.mark.parametrize("method", ["ewald", "pme"])
def test_periodicity_that_a_sum_is_not_for(name, method):
    make, options, message = NOT_DEFINED[name]
    atoms = make()
    atoms.calc = Calculator(Electrostatics(method, NACL, **options))
    with pytest.raises(ValueError, match=message):
        atoms.get_potential_energy()


def test_atoms_without_values():
    atoms = salt()
    for term, message in (
        (Electrostatics("ewald", {"Na": 1.0}), "`charges` has no value for Cl"),
        (Electrostatics("ewald"), "the atoms have no initial charges"),
        (Electrostatics("ewald", [1.0, -1.0]), r"`charges` must have shape \(n_atoms,\) = \(8,\)"),
        (Electrostatics("ewald", lambda system: [1.0]), "`charges` must have shape"),
        (Electrostatics("ewald", lambda system: system.positions), "must return shape"),
        (Electrostatics("ewald", np.full(8, np.nan)), "NaN"),
        (Electrostatics("coulomb", NACL), "`cutoff` is needed for periodic atoms"),
        (Pair("lennard_jones", sigma=1.0, epsilon=1.0), "`cutoff` is needed for periodic atoms"),
        (Pair("lennard_jones", cutoff=5.0, sigma={"Ar": 1.0}, epsilon=1.0), "`sigma` has no value for Cl, Na"),
        (
            Pair("buckingham", cutoff=5.0, A={"Na-Cl": 1.0}, rho=0.3, C=0.0),
            "`A` has no value for Na-Na, Cl-Cl",
        ),
    ):
        atoms.calc = Calculator(term)
        with pytest.raises(ValueError, match=message):
            atoms.get_potential_energy()


def test_a_failed_call_leaves_no_results():
    atoms = salt()
    atoms.calc = rigid_ions()
    atoms.get_potential_energy()
    atoms.positions[0] = np.nan
    for _ in range(2):
        with pytest.raises(ValueError, match="positions"):
            atoms.get_potential_energy()
    atoms.positions[0] = 0.0
    fresh = atoms.copy()
    fresh.calc = rigid_ions()
    assert atoms.get_potential_energy() == pytest.approx(fresh.get_potential_energy(), rel=1e-12)


def test_ase_is_optional():
    code = """
    import sys
    import nvalchemiops, nvalchemiops.torch.interactions.pair, nvalchemiops.cli
    assert "ase" not in sys.modules
    sys.modules["ase"] = None
    try:
        import nvalchemiops.ase
    except ImportError as error:
        print(error, error.name, nvalchemiops.cli.main(["energy", "file.xyz"]))
    """
    lines = "\n".join(line.removeprefix("    ") for line in code.splitlines())
    finished = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, timeout=300)
    assert "pip install 'nvalchemiops[ase]'" in finished.stdout
    assert finished.stdout.endswith(" ase 2\n")
    assert finished.stderr.startswith("nvalchemiops energy: nvalchemiops.ase needs ASE")
