"""Interactions that an Ewald sum splits into a short-ranged part and a smooth one: Coulomb's, and other powers."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from nvalchemiops.interactions.pair import potentials
from nvalchemiops.interactions.pair.expression import Formula

Reciprocal = Callable[[torch.Tensor, torch.Tensor, bool], tuple[torch.Tensor, torch.Tensor | None]]


class LongRangePotential(NamedTuple):
    """An interaction ``q_i q_j v(r)``, split at the inverse length alpha.

    The smooth part has the Fourier transform g(k²); what is left, v(r) minus the smooth part, is of short range.

    Attributes
    ----------
    short_range : callable
        Gives for a number of charges the short-ranged part as a pair potential with the global parameter ``alpha``. Its
        self energy takes the smooth part at r = 0 off again. With several charges the energies add up.
    excluded : callable
        The same for minus the smooth part: what a pair has to lose that does not interact.
    reciprocal : callable
        ``reciprocal(k2, alpha, with_slope)`` gives g, for k other than zero, and its derivative by k² or None. The two
        tensors broadcast.
    at_zero : callable
        Maps alpha to g at k = 0; in a Coulomb system this is the energy of the neutralising background.
    """

    short_range: Callable[[int], Formula]
    excluded: Callable[[int], Formula]
    reciprocal: Reciprocal
    at_zero: Callable[[torch.Tensor], torch.Tensor]


def _coulomb(k2: torch.Tensor, alpha: torch.Tensor, with_slope: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    rate = -0.25 / alpha.square()
    # 4π in the exponent costs nothing
    value = torch.add(k2 * rate, math.log(4.0 * math.pi)).exp() / k2
    return value, value * (rate - k2.reciprocal()) if with_slope else None


COULOMB = LongRangePotential(
    functools.partial(potentials.ewald_short_range, 1),
    functools.partial(potentials.ewald_excluded, 1),
    _coulomb,
    lambda alpha: -math.pi / alpha.square(),
)
"""``1/r``, with a uniform background that neutralises charged cells.

Source: P. P. Ewald, Ann. Phys. 369, 253 (1921), doi:10.1002/andp.19213690304.
"""


@functools.cache
def power_law(exponent: int) -> LongRangePotential:
    """``1/r^p`` for p = 1 or an even p from 4 on; ``1/r^6`` is dispersion.

    With x = (k / 2 alpha)² the smooth part has the transform ``π^(3/2) alpha^(p-3) h_p(x) / Γ(p/2)`` where
    ``h_p = x^((p-3)/2) Γ((3-p)/2, x)``, an incomplete gamma function. Its recurrence gives h_p from
    ``h_2 = sqrt(π/x) erfc(sqrt x)``, and the derivative of h_p is -h_(p-2).

    Sources: D. E. Williams, Acta Cryst. A 27, 452 (1971), doi:10.1107/S0567739471000998; for p = 6 on a mesh U. Essmann
    et al., J. Chem. Phys. 103, 8577 (1995), doi:10.1063/1.470117.
    """
    if isinstance(exponent, bool) or not isinstance(exponent, int) or exponent < 1:
        raise ValueError(f"`exponent` must be 1 or an even number from 4 on, got {exponent!r}")
    if exponent == 1:
        return COULOMB
    if exponent < 4 or exponent % 2:
        raise ValueError(f"`exponent` must be 1 or an even number from 4 on, got {exponent}")
    scale = math.pi**1.5 / math.gamma(exponent / 2)

    def reciprocal(k2: torch.Tensor, alpha: torch.Tensor, with_slope: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        rate = 0.25 / alpha.square()
        x = k2 * rate
        root = x.sqrt()
        # h_2 without its pole: times x
        decay, lower = (-x).exp(), math.sqrt(math.pi) * root * torch.erfc(root)
        slope = -lower / x
        value = 2.0 * (decay - lower)
        for p in range(6, exponent + 1, 2):
            slope = -value
            value = (x * value - decay) * (2.0 / (3 - p))
        prefactor = scale * alpha.pow(exponent - 3)
        return prefactor * value, prefactor * rate * slope if with_slope else None

    return LongRangePotential(
        functools.partial(potentials.ewald_short_range, exponent),
        functools.partial(potentials.ewald_excluded, exponent),
        reciprocal,
        lambda alpha: alpha.pow(exponent - 3) * (scale * 2.0 / (exponent - 3)),
    )
