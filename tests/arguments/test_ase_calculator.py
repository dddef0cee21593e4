"""What a calculator refuses, and how it says so."""

import warnings

import numpy as np
import pytest
from ase.build import molecule

from nvalchemiops import NvalchemiopsWarning
from nvalchemiops.ase import Calculator, Electrostatics, FromASE, Pair
from nvalchemiops.torch import System
from nvalchemiops.torch.dynamics import CellFilter
from nvalchemiops.torch.interactions.pair import PairPotential
from tests.support.calculators import NACL, rigid_ions, salt
from tests.support.processes import run_python

# -- mistakes -------------------------------------------------------------------------------------

MISTAKES = {
    "no terms": (lambda: Calculator(), ValueError, "`terms` are missing"),
    "no term": (lambda: Calculator("lennard_jones"), TypeError, "'lennard_jones' is not a term"),
    "class": (lambda: Calculator(Pair), TypeError, "is not a term"),
    "charges twice": (
        lambda: Calculator(Electrostatics("ewald"), Electrostatics("pme")),
        ValueError,
        "at most one may have charges",
    ),
    "no atoms": (lambda: rigid_ions().get_potential_energy(), ValueError, "`atoms` are needed"),
    "skin": (lambda: rigid_ions(skin=-1.0), ValueError, "`skin` must be non-negative"),
    "device": (lambda: Calculator(Electrostatics("ewald"), device="abacus"), ValueError, "`device` = 'abacus'"),
    "device without kernels": (
        lambda: Calculator(Electrostatics("pme", NACL), device="meta"),
        ValueError,
        "is on meta, but kernels run on cpu and cuda only",
    ),
    "set": (lambda: rigid_ions().set(skin=1.0), TypeError, "`skin` cannot be set"),
    "potential": (lambda: Pair("lennard", cutoff=3.0), ValueError, "one of 'lennard_jones'"),
    "list": (lambda: Pair(["lennard_jones"], cutoff=3.0), ValueError, "`potential` must be one of .*PairPotential"),
    "charged": (lambda: Pair("yukawa", cutoff=3.0), ValueError, "Electrostatics"),
    "two cutoffs": (
        lambda: Pair(PairPotential("k/r", global_parameters=["k"], cutoff=3.0), cutoff=4.0, k=1.0),
        ValueError,
        "`cutoff` is part of the potential",
    ),
    "missing": (lambda: Pair("morse", cutoff=3.0, depth=1.0, r0=1.0), ValueError, "`steepness` is missing"),
    "unknown": (
        lambda: Pair("lennard_jones", cutoff=3.0, sigma=1, epsilon=1, size=2),
        TypeError,
        "`size` is not a param",
    ),
    "text": (lambda: Pair("lennard_jones", cutoff=3.0, sigma="1", epsilon=1), TypeError, "`sigma` must be a number"),
    "nan": (lambda: Pair("lennard_jones", cutoff=3.0, sigma=np.nan, epsilon=1), ValueError, "`sigma` must be finite"),
    "symbol": (lambda: Pair("lennard_jones", cutoff=3.0, sigma={"Axx": 1}, epsilon=1), ValueError, "'Axx'"),
    "triple": (
        lambda: Pair("morse", cutoff=3.0, depth={"A-B-C": 1}, steepness=1, r0=1),
        ValueError,
        "not a pair of elem",
    ),
    "contradiction": (
        lambda: Pair("morse", cutoff=3.0, depth={"Na-Cl": 1.0, "Cl-Na": 2.0}, steepness=1, r0=1),
        ValueError,
        "`depth` has two different values for Na-Cl",
    ),
    "one pair beside elements": (
        lambda: Pair("lennard_jones", cutoff=3.0, sigma={"Na": 2.0, "Cl": 3.0, "Na-Cl": 2.4}, epsilon=1),
        ValueError,
        "`sigma`: 'Na' is not a pair of elements: rules of mixing are for values that all belong to elements",
    ),
    "element for pair": (
        lambda: Pair("morse", cutoff=3.0, depth={"Na": 1.0}, steepness=1, r0=1),
        ValueError,
        "`depth`: 'Na' is not a pair of elements",
    ),
    "method": (lambda: Electrostatics("p3m"), ValueError, "`method` must be one of 'auto', 'ewald', 'pme', 'coulomb'"),
    "accuracy for method": (lambda: Electrostatics(1e-4), TypeError, "`method` comes first: give accuracy=0.0001"),
    "list of methods": (lambda: Electrostatics(["ewald"]), ValueError, "`method` must be one of"),
    "finest accuracy": (lambda: Electrostatics("ewald", accuracy=1e-30), ValueError, "`accuracy`.*beyond float64"),
    "cutoff of ewald": (lambda: Electrostatics("ewald", cutoff=8.0), TypeError, "`cutoff` does not belong"),
    "exclusions": (lambda: Electrostatics("auto", exclusions=[[0], [1]]), TypeError, "`exclusions` belong to the sums"),
    "exclusions of pairs": (lambda: Pair("morse", exclusions=[[0], [1]]), TypeError, "`exclusions` belong to the sums"),
    "alpha of pme": (lambda: Electrostatics("pme", alpha=0.3), TypeError, "`alpha` does not belong"),
    "accuracy of dsf": (lambda: Electrostatics("dsf", cutoff=8, alpha=0.2, accuracy=1e-4), TypeError, "`accuracy`"),
    "accuracy": (lambda: Electrostatics("ewald", accuracy=0.0), ValueError, "`accuracy` must be positive"),
    "no cutoff": (lambda: Electrostatics("dsf", alpha=0.2), ValueError, "`cutoff` is needed for 'dsf'"),
    "no alpha": (lambda: Electrostatics("dsf", cutoff=8.0), ValueError, "`alpha` is missing"),
    "array of texts": (
        lambda: Calculator(Electrostatics("ewald", np.array(["+", "-"] * 4))).get_potential_energy(salt()),
        TypeError,
        "`charges` must hold numbers",
    ),
    "charge": (lambda: Electrostatics("ewald", {"Na": "plus"}), TypeError, "`charges:Na` must be a number"),
    "dipole": (
        lambda: Electrostatics("ewald", NACL, dipoles={"Na": [0.0, np.inf, 0.0]}),
        ValueError,
        "`dipoles:Na` must hold finite numbers",
    ),
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
    "wire": (lambda: periodic_along(False, True, False), {}, "not along one"),
    "slab": (lambda: periodic_along(True, True, False), {"slab_correction": False}, "`slab_correction` is False"),
    "no vacuum": (lambda: flat(True, True, False), {}, "needs three vectors"),
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
    sum_of_batch = FromASE(Calculator(Electrostatics("coulomb", NACL)))
    with pytest.raises(ValueError, match=r"`cutoff`.* is needed: .*'ewald' and 'pme'"):
        sum_of_batch(System.from_ase([salt(), salt()]))


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
    finished = run_python(code)
    assert "pip install 'nvalchemiops[ase]' (in a checkout '.[ase]')" in finished.stdout
    assert finished.stdout.endswith(" ase 2\n")
    assert finished.stderr.startswith("nvalchemiops energy: nvalchemiops.ase needs ASE")


def test_case_and_punctuation_of_names_do_not_matter():
    """Each name is then the one that the documentation has, so that no later comparison sees another."""
    assert Electrostatics("PME").method == "pme" and Electrostatics("Coulomb").method == "coulomb"
    values = {"cutoff": 3.0, "sigma": 1.0, "epsilon": 1.0}
    named = Pair("lennard_jones", mixing="geometric", **values)
    spelled = Pair("Lennard-Jones", mixing="Geometric", **values)
    assert named.name == spelled.name and repr(named.potential) == repr(spelled.potential)
    assert CellFilter.of("Isotropic") == CellFilter.of("isotropic") != CellFilter.of("Axes")


def test_initial_charges_that_are_all_zero_are_told():
    """As those that ASE reads from data of LAMMPS; dipoles may have no charges, and an atom by itself is neutral."""
    atoms = salt()
    atoms.set_initial_charges(np.zeros(len(atoms)))
    for widths in (None, 0.3):
        atoms.calc = Calculator(Electrostatics("ewald", widths=widths))
        with pytest.warns(NvalchemiopsWarning, match="the initial charges of all atoms are zero") as told:
            assert atoms.get_potential_energy() == 0.0
        assert told[0].filename == __file__, "not a line of ASE, which calculators of other atoms share"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for term in (Electrostatics("ewald", 0.0), Electrostatics("ewald", dipoles=np.ones((len(atoms), 3)))):
            Calculator(term).get_potential_energy(atoms)
        assert Calculator(Electrostatics("ewald")).get_potential_energy(atoms[:1]) == 0.0
