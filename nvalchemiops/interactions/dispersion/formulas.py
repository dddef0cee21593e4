"""Formulas of DFT-D3, as pair potentials.

The D3 energy is a sum over pairs whose coefficient ``C6_ij`` depends on the coordination numbers CN of the two atoms.
It is an average over the reference molecules a and b of the two elements, whose weights ``w_ia`` fall off with the
difference of coordination numbers:

    CN_i = Σ_j 1 / (1 + exp(-k1 ((R_i + R_j)/r_ij - 1))),    w_ia ∝ exp(k3 (CN_i - CN_a)²),
    C6_ij = Σ_ab w_ia w_jb C6(a, b),    C8_ij = 3 C6_ij z_i² z_j².

So both the coordination number and the energy are sums over pairs. To write the energy as a pair potential, ``C6_ij``
must follow from parameters of the two atoms. The table ``C6(a, b)`` over all reference states of the elements present
is a symmetric matrix, so its eigenvectors give exactly ``C6(a, b) = Σ_q ± v_aq v_bq``. With the parameters
``c_iq = Σ_a w_ia v_aq`` of each atom, ``C6_ij = Σ_q ± c_iq c_jq``.

Sources: S. Grimme, J. Antony, S. Ehrlich and H. Krieg, J. Chem. Phys. 132, 154104 (2010), doi:10.1063/1.3382344;
Becke-Johnson (rational) damping: S. Grimme, S. Ehrlich and L. Goerigk, J. Comput. Chem. 32, 1456 (2011),
doi:10.1002/jcc.21759; modified damping: D. G. A. Smith et al., J. Phys. Chem. Lett. 7, 2197 (2016),
doi:10.1021/acs.jpclett.6b00780.
"""

from nvalchemiops.interactions.pair.expression import Formula

COORDINATION = Formula("2/(1 + exp(-k1*((radius1 + radius2)/r - 1)))", ("radius",), ("k1",))
"""Pair potential whose energy per atom is the coordination number.

An atom gets half of the energy of each of its pairs, hence the factor 2. ``radius`` is R, 4/3 of the covalent radius;
``k1`` is the steepness, 16 in D3.
"""

COORDINATION_SWITCHED = COORDINATION._replace(switched=True)
"""The same, switched off smoothly."""


def rational(n_positive: int, n_negative: int, switched: bool) -> Formula:
    """D3 with Becke-Johnson damping: ``r^n + f^n`` instead of ``r^n``, with ``f = a1 sqrt(C8/C6) + a2``.

    Parameters of an atom are ``c_iq`` and ``z``, the square root of the tabulated r4r2.
    """
    names, c6 = _coefficient(n_positive, n_negative)
    expression = (
        f"-c6*(s6/(r^6 + f^6) + s8*ratio/(r^8 + f^8)); f = a1*sqrt(3)*z1*z2 + a2; ratio = 3*(z1*z2)^2; c6 = {c6}"
    )
    return Formula(expression, (*names, "z"), ("s6", "s8", "a1", "a2"), switched=switched)


def zero(n_positive: int, n_negative: int, switched: bool) -> Formula:
    """D3 with zero damping: the energy goes to zero at distances below a radius ``r0`` of each pair of elements.

    ``beta`` is zero in the original form of 2010, and a parameter of the functional in the modified form of 2016.
    """
    names, c6 = _coefficient(n_positive, n_negative)
    expression = (
        "-c6*(s6/(r^6*(1 + 6*x6^(-14))) + s8*ratio/(r^8*(1 + 6*x8^(-16)))); "
        f"x6 = r/(rs6*r0) + beta*r0; x8 = r/(rs8*r0) + beta*r0; ratio = 3*(z1*z2)^2; c6 = {c6}"
    )
    return Formula(expression, (*names, "z"), ("s6", "s8", "rs6", "rs8", "beta"), ("r0",), switched=switched)


def _coefficient(n_positive: int, n_negative: int) -> tuple[tuple[str, ...], str]:
    """Names of the parameters ``c_iq``, those with a positive eigenvalue first, and C6 as an expression of them."""
    names = tuple(f"c{q}_" for q in range(n_positive + n_negative))
    terms = [f"{'+' if q < n_positive else '-'} {name}1*{name}2" for q, name in enumerate(names)]
    return names, " ".join(terms).removeprefix("+ ")
