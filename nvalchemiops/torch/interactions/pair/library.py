"""Library of pair potentials; see `nvalchemiops.interactions.pair.potentials` for formulas and sources."""

from nvalchemiops.constants import BOHR_IN_ANGSTROM, COULOMB_EV_ANGSTROM
from nvalchemiops.interactions.pair import potentials
from nvalchemiops.interactions.pair.expression import Formula
from nvalchemiops.torch import checks
from nvalchemiops.torch.interactions.pair.potential import PairPotential


def lennard_jones(
    cutoff: float | None = None,
    *,
    mixing: str | None = "lorentz-berthelot",
    repulsive: int = 12,
    attractive: int = 6,
    shifted: bool = False,
    r_switch: float | None = None,
) -> PairPotential:
    """Lennard-Jones (12-6) or Mie (n-m) potential with well depth ``epsilon``, zero at the distance ``sigma``.

    Parameters
    ----------
    cutoff : float, length, optional
    mixing : {"lorentz-berthelot", "geometric", "waldman-hagler"} or None, optional
        Mixing rule for ``sigma`` and ``epsilon`` of a pair. With None, both are tables over pairs of species.
    repulsive, attractive : int, optional
        The exponents n > m. The prefactor is chosen so that the depth is epsilon.
    shifted, r_switch
        As for `PairPotential`.
    """
    formula = potentials.lennard_jones(mixing, repulsive, attractive)
    return PairPotential.of(formula, cutoff=cutoff, shifted=shifted, r_switch=r_switch)


def soft_core_lennard_jones(
    cutoff: float | None = None,
    *,
    mixing: str | None = "lorentz-berthelot",
    shifted: bool = False,
    r_switch: float | None = None,
) -> PairPotential:
    """Lennard-Jones potential with a finite core, for free-energy calculations (Beutler et al. 1994).

    ``4 epsilon scale (1/x² - 1/x)`` with ``x = softness (1 - scale) + (r/sigma)⁶``. ``sigma`` and ``epsilon`` are as
    for `lennard_jones`; ``scale`` (the coupling parameter, 0 to 1) and ``softness`` (usually 0.5) are global. The
    gradient with respect to ``scale`` is the integrand of thermodynamic integration.
    """
    formula = potentials.soft_core_lennard_jones(mixing)
    return PairPotential.of(formula, cutoff=cutoff, shifted=shifted, r_switch=r_switch)


def coulomb(cutoff: float | None = None, *, shifted: bool = False, r_switch: float | None = None) -> PairPotential:
    """Coulomb energy ``q1 q2 / r`` of charges ``q``, in units in which the Coulomb constant is one."""
    return PairPotential.of(potentials.COULOMB, cutoff=cutoff, shifted=shifted, r_switch=r_switch)


def ewald_real_space(cutoff: float | None = None) -> PairPotential:
    """Short-range part ``q1 q2 erfc(alpha r) / r`` of the Ewald sum; ``alpha`` (1/length) is a global parameter."""
    return PairPotential.of(potentials.EWALD_REAL_SPACE, cutoff=cutoff)


def wolf(cutoff: float) -> PairPotential:
    """Wolf sum of charges ``q`` with damping ``alpha`` (1/length, global), self energy included (Wolf et al. 1999)."""
    return PairPotential.of(potentials.WOLF, cutoff=cutoff)


def damped_shifted_force(cutoff: float) -> PairPotential:
    """Damped shifted force of charges ``q`` (Fennell and Gezelter 2006), with damping ``alpha`` (1/length, global).

    Energies and forces go to zero at the cutoff. The self energy is that of the Wolf sum.
    """
    return PairPotential.of(potentials.DSF, cutoff=cutoff)


def reaction_field(cutoff: float) -> PairPotential:
    """Coulomb energy of charges ``q`` with a reaction field (Tironi et al. 1995).

    Beyond the cutoff is a continuum with the dielectric constant ``dielectric`` (global), infinite for a conductor.
    """
    return PairPotential.of(potentials.REACTION_FIELD, cutoff=cutoff)


def yukawa(cutoff: float | None = None, *, shifted: bool = False, r_switch: float | None = None) -> PairPotential:
    """Screened Coulomb energy ``q1 q2 exp(-kappa r) / r`` of charges ``q``; ``kappa`` (1/length) is global."""
    return PairPotential.of(potentials.YUKAWA, cutoff=cutoff, shifted=shifted, r_switch=r_switch)


def morse(
    cutoff: float | None = None, *, tables: bool = False, shifted: bool = False, r_switch: float | None = None
) -> PairPotential:
    """Morse potential ``depth (exp(-2 steepness (r - r0)) - 2 exp(-steepness (r - r0)))``, with its minimum at ``r0``.

    With ``tables``, the three parameters are numbers or tables over pairs of species; otherwise they are global.
    """
    return _by_pair(potentials.MORSE, tables, cutoff, shifted, r_switch)


def buckingham(
    cutoff: float | None = None, *, tables: bool = False, shifted: bool = False, r_switch: float | None = None
) -> PairPotential:
    """Buckingham potential ``A exp(-r/rho) - C/r⁶``; it has no lower bound as r goes to 0.

    With ``tables``, the parameters are numbers or tables over pairs of species; otherwise they are global.
    """
    return _by_pair(potentials.BUCKINGHAM, tables, cutoff, shifted, r_switch)


def born_mayer_huggins(
    cutoff: float | None = None, *, tables: bool = False, shifted: bool = False, r_switch: float | None = None
) -> PairPotential:
    """Born-Mayer-Huggins potential ``A exp((sigma - r)/rho) - C/r⁶ - D/r⁸``, without the Coulomb energy.

    With ``tables``, the parameters are numbers or tables over pairs of species; otherwise they are global.
    """
    return _by_pair(potentials.BORN_MAYER_HUGGINS, tables, cutoff, shifted, r_switch)


def ziegler_biersack_littmark(
    cutoff: float | None = None,
    *,
    coulomb_constant: float = COULOMB_EV_ANGSTROM,
    bohr_radius: float = BOHR_IN_ANGSTROM,
    shifted: bool = False,
    r_switch: float | None = None,
) -> PairPotential:
    """Universal screened repulsion (ZBL) between nuclei with atomic numbers ``z``, by default in eV and angstrom."""
    formula = potentials.ziegler_biersack_littmark(
        checks.check_positive("coulomb_constant", coulomb_constant), checks.check_positive("bohr_radius", bohr_radius)
    )
    return PairPotential.of(formula, cutoff=cutoff, shifted=shifted, r_switch=r_switch)


def _by_pair(
    formula: Formula, tables: bool, cutoff: float | None, shifted: bool, r_switch: float | None
) -> PairPotential:
    formula = potentials.with_tables(formula) if tables else formula
    return PairPotential.of(formula, cutoff=cutoff, shifted=shifted, r_switch=r_switch)
