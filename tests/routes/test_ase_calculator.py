"""One calculator under everything that ASE does, and its lists of neighbors."""

import copy
import json
import pickle

import ase
import ase.io
import numpy as np
import pytest
from ase.build import bulk, fcc100, molecule
from ase.calculators.calculator import PropertyNotImplementedError
from ase.constraints import FixAtoms

from nvalchemiops.ase import Calculator, Electrostatics, Pair
from nvalchemiops.constants import COULOMB_EV_ANGSTROM
from tests.support.calculators import NACL, PROPERTIES, REPULSION, argon, assert_same, rigid_ions, salt
from tests.support.plans import ordinary, plans_of_calls

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
    assert repr(atoms.calc) == f"Calculator({', '.join(described['terms'])}, skin=0.5, device='cpu')"
    assert described["terms"][1] == "Electrostatics('ewald', charges={'Na': 1.0, 'Cl': -1.0})"


def test_stress_needs_a_volume():
    atoms = molecule("H2O")
    atoms.calc = Calculator(Electrostatics("coulomb", {"O": -0.8, "H": 0.4}))
    assert atoms.get_forces().any()
    with pytest.raises(PropertyNotImplementedError):
        atoms.get_stress()
    np.testing.assert_allclose(atoms.get_dipole_moment(), atoms.get_charges() @ atoms.positions)
    atoms.calc = Calculator(Pair("lennard_jones", sigma=1.0, epsilon=0.1))
    for no_charges in (atoms.get_charges, atoms.get_dipole_moment):
        with pytest.raises(PropertyNotImplementedError):
            no_charges()


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
    none = ase.Atoms()  # which has no initial charges, either
    none.calc = Calculator(Electrostatics("auto"))
    assert none.get_potential_energy() == 0.0
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
        atoms.set_cell(atoms.cell.array * 1.1, scale_atoms=True)  # more than the skin allows
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


@pytest.mark.parametrize(("method", "error"), [("ewald", 1e-5), ("pme", 1e-4)])
def test_energies_are_smooth_in_the_size_of_the_cell(method, error):
    """Far below the accuracy asked for: parameters follow the cell in steps, which change a sum by its error."""
    atoms = salt()
    cell = atoms.cell.array.copy()
    atoms.calc = Calculator(Electrostatics(method, NACL, accuracy=1e-3))
    energies = []
    for scale in np.linspace(0.9, 1.1, 21):
        atoms.set_cell(cell * scale, scale_atoms=True)
        energies.append(scale * atoms.get_potential_energy())
    np.testing.assert_allclose(energies, energies[0], rtol=error)


@pytest.mark.parametrize("with_stress", [False, True])
@pytest.mark.parametrize("method", ["ewald", "pme"])
def test_steps_by_a_plan_have_the_same_bits(method, with_stress):
    """Also after a search, with other charges and in another cell."""
    quick, slow = salt(), salt()
    for atoms in (quick, slow):
        atoms.calc = Calculator(Electrostatics(method, accuracy=1e-5), skin=0.3)
        atoms.set_initial_charges(np.where(atoms.numbers == 11, 1.0, -1.0))
    rng, plans = np.random.default_rng(2), 0
    for step in range(12):
        move = rng.normal(scale=0.02, size=quick.positions.shape)
        for atoms in (quick, slow):
            atoms.positions += move
            if step == 6:
                atoms.set_initial_charges(0.9 * atoms.get_initial_charges())
            if step == 8:
                atoms.set_cell(1.01 * atoms.cell.array)
        asked = ("forces", "energies", *(["stress"] if with_stress else []))
        found = [quick.calc.get_property(name, quick) for name in asked]
        plans = max(plans, len(plans_of_calls(quick.calc)))
        expected = ordinary(lambda asked=asked: [slow.calc.get_property(name, slow) for name in asked])
        assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
    assert plans and quick.calc.searches == slow.calc.searches > 1
