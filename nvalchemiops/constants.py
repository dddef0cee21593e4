"""Physical constants and unit conversions.

The operators of this library have no units. With charges in e and lengths in angstrom, a Coulomb energy is in
e²/angstrom: multiply by `COULOMB_EV_ANGSTROM` to get eV. In atomic units the factor is `COULOMB_HARTREE_BOHR`, which
is 1.

A name ``X_IN_Y`` is the value of one X in units of Y: multiply by it to convert from X to Y.

Source: CODATA recommended values of the fundamental constants, 2022 adjustment (Mohr, Newell, Taylor and Tiesinga,
Rev. Mod. Phys. 97, 025002 (2025), doi:10.1103/RevModPhys.97.025002; NIST SP 961, May 2024). Numbers fixed by the SI are
exact. For measured constants, a comment has the standard uncertainty of the last digits in parentheses. All other
numbers are derived from these.

Note for users of ASE: ``ase.units`` uses CODATA 2014 by default, which predates the SI of 2019. Relative to it, the
hartree, the Coulomb constant, the calorie, the pascal and the debye differ by 8e-9, ASE's time unit by 5e-9, the bohr
by 4e-11 and the Boltzmann constant by 3.4e-7. This is far below the accuracy of any model, but visible in a float64
comparison: use one set throughout. ``ase.units.create_units("2022")`` agrees with this module.
"""

from math import sqrt
from typing import Final

# -- fixed by the SI ------------------------------------------------------------------------------

ELEMENTARY_CHARGE_IN_COULOMB: Final = 1.602176634e-19  # exact
"""Elementary charge e, in C."""

BOLTZMANN_IN_JOULE_PER_KELVIN: Final = 1.380649e-23  # exact
"""Boltzmann constant, in J/K."""

AVOGADRO_PER_MOL: Final = 6.02214076e23  # exact
"""Avogadro constant, in 1/mol."""

SPEED_OF_LIGHT_IN_METRE_PER_SECOND: Final = 299_792_458.0  # exact
"""Speed of light in vacuum, in m/s."""

# -- measured -------------------------------------------------------------------------------------

HARTREE_IN_EV: Final = 27.211386245981  # (30)
"""Hartree energy, in eV."""

BOHR_IN_ANGSTROM: Final = 0.529177210544  # (82)
"""Bohr radius, in angstrom."""

ATOMIC_MASS_UNIT_IN_KG: Final = 1.66053906892e-27  # (52)
"""Unified atomic mass unit (dalton), in kg."""

ELECTRON_MASS_IN_KG: Final = 9.1093837139e-31  # (28)
"""Electron mass, the atomic unit of mass, in kg."""

# -- the Coulomb constant 1 / (4 π ε0) ------------------------------------------------------------

COULOMB_EV_ANGSTROM: Final = HARTREE_IN_EV * BOHR_IN_ANGSTROM  # by definition of the two; 14.399645...
"""Coulomb constant in eV angstrom / e²: the energy of two unit charges one angstrom apart."""

COULOMB_HARTREE_BOHR: Final = 1.0  # exact, by definition of atomic units
"""Coulomb constant in hartree bohr / e²."""

# -- energy, temperature, force, pressure ---------------------------------------------------------

BOLTZMANN_EV_PER_KELVIN: Final = BOLTZMANN_IN_JOULE_PER_KELVIN / ELEMENTARY_CHARGE_IN_COULOMB
"""Boltzmann constant, in eV/K."""

JOULE_IN_EV: Final = 1.0 / ELEMENTARY_CHARGE_IN_COULOMB
"""Joule, in eV."""

KJ_PER_MOL_IN_EV: Final = 1e3 * JOULE_IN_EV / AVOGADRO_PER_MOL
"""Kilojoule per mole, in eV per particle."""

KCAL_PER_MOL_IN_EV: Final = 4.184 * KJ_PER_MOL_IN_EV
"""Kilocalorie (thermochemical, 4.184 kJ) per mole, in eV per particle."""

HARTREE_PER_BOHR_IN_EV_PER_ANGSTROM: Final = HARTREE_IN_EV / BOHR_IN_ANGSTROM
"""Atomic unit of force, in eV/angstrom."""

EV_PER_ANGSTROM3_IN_GPA: Final = ELEMENTARY_CHARGE_IN_COULOMB * 1e30 / 1e9
"""Stress unit of eV/angstrom³, in GPa."""

# -- mass, time, dipole ---------------------------------------------------------------------------

ATOMIC_MASS_UNIT_IN_ELECTRON_MASS: Final = ATOMIC_MASS_UNIT_IN_KG / ELECTRON_MASS_IN_KG
"""Unified atomic mass unit, in electron masses (atomic units)."""

ASE_TIME_IN_FEMTOSECOND: Final = 1e15 * 1e-10 * sqrt(ATOMIC_MASS_UNIT_IN_KG / ELEMENTARY_CHARGE_IN_COULOMB)
"""Time unit of ASE, angstrom sqrt(u/eV), in fs."""

FEMTOSECOND_IN_ASE_TIME: Final = 1.0 / ASE_TIME_IN_FEMTOSECOND
"""Femtosecond, in units of angstrom sqrt(u/eV): the same quantity as ``ase.units.fs``."""

DEBYE_IN_E_ANGSTROM: Final = (
    1e-21 / SPEED_OF_LIGHT_IN_METRE_PER_SECOND / ELEMENTARY_CHARGE_IN_COULOMB * 1e10
)  # 1 D = 1e-18 statC cm
"""Debye, in e angstrom."""

# -- units of dynamics in eV, angstrom and u ------------------------------------------------------

FEMTOSECOND: Final = FEMTOSECOND_IN_ASE_TIME
"""Femtosecond, in units of angstrom sqrt(u/eV): ``dt=1.0 * FEMTOSECOND``."""

KELVIN: Final = BOLTZMANN_EV_PER_KELVIN
"""The energy kT of one kelvin, in eV: ``temperature=300.0 * KELVIN``."""

GIGAPASCAL: Final = 1.0 / EV_PER_ANGSTROM3_IN_GPA
"""Gigapascal, in eV/angstrom³: ``pressure=0.1 * GIGAPASCAL``."""
