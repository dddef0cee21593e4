"""Library of pair potentials: for each, the expression and its source.

Energies are those of a pair. Charges are in units in which the Coulomb energy is ``q1*q2/r``. For parameters that
belong to pairs of species, the same expression is used with tables; see `with_tables`.
"""

import math

from nvalchemiops.arguments import as_choice, as_int
from nvalchemiops.interactions.pair.expression import MAX_EXPONENT, Formula

MIXING = {
    # C. Kong, J. Chem. Phys. 59, 2464 (1973), doi:10.1063/1.1680358, compares these rules
    "lorentz-berthelot": "sigma = (sigma1 + sigma2)/2; epsilon = sqrt(epsilon1*epsilon2)",
    "geometric": "sigma = sqrt(sigma1*sigma2); epsilon = sqrt(epsilon1*epsilon2)",
    # M. Waldman and A. T. Hagler, J. Comput. Chem. 14, 1077 (1993), doi:10.1002/jcc.540140909
    "waldman-hagler": (
        "sigma = ((sigma1^6 + sigma2^6)/2)^(1/6); epsilon = sqrt(epsilon1*epsilon2)*sigma1^3*sigma2^3/sigma^6"
    ),
}
"""Mixing rules: sigma and epsilon of a pair from those of its atoms."""


def lennard_jones(mixing: str | None = "lorentz-berthelot", repulsive: int = 12, attractive: int = 6) -> Formula:
    """``C epsilon ((sigma/r)^n - (sigma/r)^m)``, with depth epsilon, zero at r = sigma.

    C = n/(n - m) (n/m)^(m/(n - m)) is 4 for n = 12 and m = 6. Without mixing, sigma and epsilon are tables. Sources:
    J. E. Lennard-Jones, Proc. R. Soc. A 106, 463 (1924), doi:10.1098/rspa.1924.0082; for any exponents: G. Mie, Ann.
    Phys. 316, 657 (1903), doi:10.1002/andp.19033160802.
    """
    n, m = as_int("repulsive", repulsive), as_int("attractive", attractive)
    for name, exponent in (("repulsive", n), ("attractive", m)):
        if not 1 <= exponent <= MAX_EXPONENT:
            raise ValueError(f"`{name}` must be in 1 .. {MAX_EXPONENT}, got {exponent}")
    if n <= m:
        raise ValueError(f"`repulsive` = {n} must be larger than `attractive` = {m}")
    # each power beside epsilon, from which sigma^6 cancels by one of the rules: two atoms may have sigma = 0
    powers = f"(epsilon*(sigma/r)^{n} - epsilon*(sigma/r)^{m})"
    if mixing == "waldman-hagler" and m < 6:
        powers = f"select(sigma1 + sigma2, {powers}, 0)"  # a power of sigma is left below: such a pair has no energy
    energy = f"({n}/({n} - {m})) * ({n}/{m})^({m}/({n} - {m})) * {powers}"
    return _mixed(energy, mixing)


def soft_core_lennard_jones(mixing: str | None = "lorentz-berthelot") -> Formula:
    """Lennard-Jones potential with a finite core, which ``scale`` switches on and off in free-energy calculations.

    ``4 epsilon scale (y^2 - y)`` with ``1/y = softness (1 - scale) + (r/sigma)^6``. Source: T. C. Beutler et al.,
    Chem. Phys. Lett. 222, 529 (1994), doi:10.1016/0009-2614(94)00397-1.
    """
    # defined for sigma = 0, too, as hydrogen often has it
    energy = "4*epsilon*y*scale*(y - 1); y = sigma^6/(softness*(1 - scale)*sigma^6 + r^6)"
    return _mixed(energy, mixing, ("scale", "softness"))


def _mixed(energy: str, mixing: str | None, global_parameters: tuple[str, ...] = ()) -> Formula:
    if mixing is None:
        return Formula(energy, (), global_parameters, ("sigma", "epsilon"))
    if not isinstance(mixing, str):
        raise TypeError(f"`mixing` must be the name of a rule or None, got {type(mixing).__name__}")
    rule = MIXING[as_choice("mixing", mixing, MIXING)]
    return Formula(f"{energy}; {rule}", ("sigma", "epsilon"), global_parameters)


COULOMB = Formula("q1*q2/r", ("q",))

EWALD_REAL_SPACE = Formula("q1*q2*erfc(alpha*r)/r", ("q",), ("alpha",))
"""The short-range part of the Ewald sum; alpha is the splitting parameter.

Source: P. P. Ewald, Ann. Phys. 369, 253 (1921), doi:10.1002/andp.19213690304.
"""


def ewald_short_range(exponent: int, n_charges: int = 1) -> Formula:
    """Short-range part of an Ewald sum of ``1/r^p`` with its self energy, for p = 1 or an even p.

    ``q1 q2 Γ(p/2, x) / (Γ(p/2) r^p)`` with ``x = (alpha r)^2``: for p = 1 this is ``q1 q2 erfc(alpha r) / r``, for even
    p a sum of p/2 terms. The self energy follows from the long-range part of ``1/r^p``, which is
    ``alpha^p / Γ(p/2 + 1)`` at r = 0. With several charges per atom, their energies add up. Sources: as for
    `EWALD_REAL_SPACE`; D. E. Williams, Acta Cryst. A 27, 452 (1971), doi:10.1107/S0567739471000998.
    """
    names, product, square = _charges(n_charges)
    if exponent == 1:
        return Formula(f"{product}*erfc(alpha*r)/r", names, ("alpha",), self_energy=f"-alpha/sqrt(pi)*{square}")
    terms = " + ".join(f"x^{n}/{math.factorial(n)}" for n in range(exponent // 2))
    self_energy = f"-alpha^{exponent}/{2 * math.factorial(exponent // 2)}*{square}"
    expression = f"{product}*exp(-x)*({terms})/r^{exponent}; x = alpha^2*r^2"
    return Formula(expression, names, ("alpha",), self_energy=self_energy)


def ewald_excluded(exponent: int, n_charges: int = 1) -> Formula:
    """The correction for an excluded pair: minus the long-range part of ``1/r^p``, which is finite at r = 0.

    ``-q1 q2 alpha^p g(p/2, x) / Γ(p/2)`` with ``x = (alpha r)^2`` and ``g(a, x) = x^-a γ(a, x)``, where γ is the lower
    incomplete gamma function; for p = 1 this is ``-q1 q2 erf(alpha r) / r``.
    """
    names, product, _ = _charges(n_charges)
    half = f"{exponent}/2"
    scale = "1/sqrt(pi)" if exponent == 1 else f"1/{math.factorial(exponent // 2 - 1)}"
    return Formula(f"-{product}*alpha^{exponent}*{scale}*lower_gamma({half}, alpha^2*r^2)", names, ("alpha",))


def moment_interaction(gaussians: bool) -> Formula:
    """``1/r`` for point moments; ``erf(a r)/r`` with ``a = 1/sqrt(2 (s1^2 + s2^2))`` for Gaussian moments.

    A radial function without charges, for `nvalchemiops.interactions.pair.moments`. The widths s may be zero. Beyond
    27/a Gaussians are treated as points, because the difference underflows. Sources: for point moments, A. Y. Toukmaji
    et al., J. Chem. Phys. 113, 10913 (2000), doi:10.1063/1.1324708; for Gaussians, P. T. Kiss et al., J. Chem. Theory
    Comput. 10, 5513 (2014), doi:10.1021/ct5009069.
    """
    return Formula(f"1/r - {_OUTSIDE}", ("s",)) if gaussians else Formula("1/r")


def moment_short_range(gaussians: bool) -> Formula:
    """Short-range part of `moment_interaction`: ``erfc(alpha r)/r``, minus ``erfc(a r)/r`` for Gaussians."""
    outside = f" - {_OUTSIDE}" if gaussians else ""
    return Formula(f"erfc(alpha*r)/r{outside}", ("s",) * gaussians, ("alpha",))


def moment_excluded(gaussians: bool = False) -> Formula:
    """Minus the long-range part ``erf(alpha r)/r``, which is finite at r = 0 and the same for points and Gaussians."""
    return Formula("-alpha/sqrt(pi)*lower_gamma(1/2, alpha^2*r^2)", (), ("alpha",))


_OUTSIDE = "near*erfc(a*r)/r; a = 1/sqrt(select(near, 2*w, 1)); near = step(1458*w - r^2); w = s1^2 + s2^2"
"""The interaction of points minus that of Gaussians, for r < 27/a; 1458 = 2 27^2."""


def coulomb_nearby(n_charges: int = 1) -> Formula:
    """Coulomb forces times a window ``(1 - r²/R²)²`` with R = ``reach``, for an estimate of the size of forces."""
    names, product, _ = _charges(n_charges)
    return Formula(f"{product}*(1/x + 2*x/reach^2 - x^3/(3*reach^4)); x = min(r, reach)", names, ("reach",))


def _charges(n_charges: int) -> tuple[tuple[str, ...], str, str]:
    """Names of the charges, the sum of their products for a pair, and the sum of their squares for an atom."""
    names = ("q",) if n_charges == 1 else tuple(f"q{n}_" for n in range(n_charges))
    product, square = (" + ".join(term.format(n) for n in names) for term in ("{0}1*{0}2", "{0}^2"))
    return names, f"({product})", f"({square})"


WOLF = Formula(
    "q1*q2*(erfc(alpha*r)/r - erfc(alpha*cutoff)/cutoff)",
    ("q",),
    ("alpha",),
    self_energy="-(erfc(alpha*cutoff)/(2*cutoff) + alpha/sqrt(pi))*q^2",
)
"""Wolf sum, a damped and shifted Coulomb energy: the charge within the cutoff is neutralised on the cutoff sphere.

Source: D. Wolf, P. Keblinski, S. R. Phillpot and J. Eggebrecht, J. Chem. Phys. 110, 8254 (1999),
doi:10.1063/1.478738, eq. (5.13).
"""

DSF = Formula(
    "q1*q2*(erfc(alpha*r)/r - at_cutoff + force*(r - cutoff)); at_cutoff = erfc(alpha*cutoff)/cutoff; "
    "force = at_cutoff/cutoff + 2*alpha/sqrt(pi)*exp(-alpha^2*cutoff^2)/cutoff",
    ("q",),
    ("alpha",),
    self_energy=WOLF.self_energy,
)
"""Damped shifted force: like `WOLF`, but forces go to zero at the cutoff as well.

Source: C. J. Fennell and J. D. Gezelter, J. Chem. Phys. 124, 234104 (2006), doi:10.1063/1.2206581, eq. (19), with the
self energy of the Wolf sum.
"""

REACTION_FIELD = Formula(
    "q1*q2*(1/r + k*r^2 - (1/cutoff + k*cutoff^2)); k = (0.5 - 1.5/(2*dielectric + 1))/cutoff^3",
    ("q",),
    ("dielectric",),
)
"""Coulomb energy with a dielectric continuum beyond the cutoff, shifted to zero at the cutoff.

Source: I. G. Tironi, R. Sperb, P. E. Smith and W. F. van Gunsteren, J. Chem. Phys. 102, 5451 (1995),
doi:10.1063/1.469273, without ions in the continuum.
"""

YUKAWA = Formula("q1*q2*exp(-kappa*r)/r", ("q",), ("kappa",))
"""Screened Coulomb energy; 1/kappa is the screening length.

Source: H. Yukawa, Proc. Phys.-Math. Soc. Japan 17, 48 (1935), doi:10.11429/ppmsj1919.17.0_48.
"""

MORSE = Formula("depth*x*(x - 2); x = exp(-steepness*(r - r0))", (), ("depth", "steepness", "r0"))
"""Morse potential ``depth (exp(-2 a (r - r0)) - 2 exp(-a (r - r0)))`` with a = steepness; the minimum is -depth at r0.

Source: P. M. Morse, Phys. Rev. 34, 57 (1929), doi:10.1103/PhysRev.34.57.
"""

BUCKINGHAM = Formula("A*select(rho, exp(-r/rho), 0) - C/r^6", (), ("A", "rho", "C"))
"""Exponential repulsion and dispersion. The energy goes to minus infinity at r = 0, so atoms must stay apart.

There is no repulsion for rho = 0, as tables have it for pairs that do not interact; derivatives would be NaN.

Source: R. A. Buckingham, Proc. R. Soc. A 168, 264 (1938), doi:10.1098/rspa.1938.0173.
"""

BORN_MAYER_HUGGINS = Formula(
    "A*select(rho, exp((sigma - r)/rho), 0) - C/r^6 - D/r^8", (), ("A", "sigma", "rho", "C", "D")
)
"""Repulsion and dispersion between ions, without their Coulomb energy; for rho = 0 as `BUCKINGHAM`.

Sources: M. Born and J. E. Mayer, Z. Phys. 75, 1 (1932), doi:10.1007/BF01340511; M. L. Huggins and J. E. Mayer,
J. Chem. Phys. 1, 643 (1933), doi:10.1063/1.1749344.
"""


def ziegler_biersack_littmark(coulomb_constant: float, bohr_radius: float) -> Formula:
    """Screened repulsion between nuclei at short distances; ``z`` is the atomic number.

    Source: J. F. Ziegler, J. P. Biersack and U. Littmark, The Stopping and Range of Ions in Matter, vol. 1 (Pergamon,
    1985); the universal screening function.
    """
    terms = ((0.18175, 3.19980), (0.50986, 0.94229), (0.28022, 0.40290), (0.02817, 0.20162))
    screening = " + ".join(f"{weight}*exp(-{rate}*x)" for weight, rate in terms)
    length = f"{0.8854 * bohr_radius!r}/(z1^0.23 + z2^0.23)"
    return Formula(f"{coulomb_constant!r}*z1*z2/r*({screening}); x = r/length; length = {length}", ("z",))


def with_tables(formula: Formula) -> Formula:
    """The same potential, with tables over pairs of species instead of global parameters."""
    return formula._replace(global_parameters=(), per_pair=formula.global_parameters)
