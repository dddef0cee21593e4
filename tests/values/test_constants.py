"""Constants against two independent tables: scipy's CODATA and ASE's."""

import math

import pytest
import scipy.constants

from nvalchemiops import constants as c

CODATA = scipy.constants.physical_constants
ROUNDING = 1e-15  # a conversion here is a few float64 operations


def value(name: str) -> float:
    return CODATA[name][0]


def test_scipy_has_the_2022_adjustment():
    assert value("Bohr radius") == 5.29177210544e-11, "update the constants, or compare with another table"


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (c.ELEMENTARY_CHARGE_IN_COULOMB, value("elementary charge")),
        (c.BOLTZMANN_IN_JOULE_PER_KELVIN, value("Boltzmann constant")),
        (c.AVOGADRO_PER_MOL, value("Avogadro constant")),
        (c.SPEED_OF_LIGHT_IN_METRE_PER_SECOND, value("speed of light in vacuum")),
        (c.HARTREE_IN_EV, value("Hartree energy in eV")),
        (c.ATOMIC_MASS_UNIT_IN_KG, value("atomic mass constant")),
        (c.ELECTRON_MASS_IN_KG, value("electron mass")),
    ],
)
def test_base_constants_are_those_of_codata_2022(ours, theirs):
    assert ours == theirs


# Derived here from rounded numbers, so the last digits that CODATA prints are what must agree.
@pytest.mark.parametrize(
    ("ours", "theirs", "digits"),
    [
        (c.BOHR_IN_ANGSTROM, value("Bohr radius") * 1e10, ROUNDING),
        (c.BOLTZMANN_EV_PER_KELVIN, value("Boltzmann constant in eV/K"), ROUNDING),
        (c.JOULE_IN_EV, value("joule-electron volt relationship"), ROUNDING),
        (c.ATOMIC_MASS_UNIT_IN_ELECTRON_MASS, 1 / value("electron mass in u"), 1e-10),
        (c.HARTREE_PER_BOHR_IN_EV_PER_ANGSTROM, value("atomic unit of force") * c.JOULE_IN_EV * 1e-10, 1e-10),
        (
            c.COULOMB_EV_ANGSTROM,
            c.ELEMENTARY_CHARGE_IN_COULOMB / (4 * math.pi * value("vacuum electric permittivity")) * 1e10,
            1e-10,
        ),
    ],
)
def test_derived_constants_agree_with_codata_2022(ours, theirs, digits):
    assert ours == pytest.approx(theirs, rel=digits, abs=0)


def test_digits_of_the_coulomb_constant():
    assert f"{c.COULOMB_EV_ANGSTROM:.8f}" == "14.39964547"
    assert c.COULOMB_HARTREE_BOHR == 1.0


def test_calorie_and_pressure():
    assert c.KCAL_PER_MOL_IN_EV / c.KJ_PER_MOL_IN_EV == pytest.approx(4.184, rel=ROUNDING)
    assert c.EV_PER_ANGSTROM3_IN_GPA == pytest.approx(160.2176634, rel=ROUNDING)
    assert c.ASE_TIME_IN_FEMTOSECOND * c.FEMTOSECOND_IN_ASE_TIME == pytest.approx(1.0, rel=ROUNDING)


# ASE's default table is CODATA 2014; the tolerances are those the module's documentation states.
@pytest.mark.parametrize(
    ("edition", "tolerance", "boltzmann_tolerance"), [("2014", 1e-8, 4e-7), ("2022", 1e-10, 1e-10)]
)
def test_constants_agree_with_ase(edition, tolerance, boltzmann_tolerance):
    units = pytest.importorskip("ase.units").create_units(edition)
    expected = {
        "HARTREE_IN_EV": units.Hartree,
        "BOHR_IN_ANGSTROM": units.Bohr,
        "COULOMB_EV_ANGSTROM": units.Hartree * units.Bohr,
        "KCAL_PER_MOL_IN_EV": units.kcal / units.mol,
        "KJ_PER_MOL_IN_EV": units.kJ / units.mol,
        "EV_PER_ANGSTROM3_IN_GPA": 1 / units.GPa,
        "DEBYE_IN_E_ANGSTROM": units.Debye,
        "FEMTOSECOND_IN_ASE_TIME": units.fs,
    }
    for name, theirs in expected.items():
        assert getattr(c, name) == pytest.approx(theirs, rel=tolerance, abs=0), name
    assert pytest.approx(units.kB, rel=boltzmann_tolerance, abs=0) == c.BOLTZMANN_EV_PER_KELVIN
