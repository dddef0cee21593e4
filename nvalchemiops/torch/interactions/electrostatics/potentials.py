"""Interactions that an Ewald sum splits into a short-range and a long-range part: Coulomb's, and other powers."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from nvalchemiops.arguments import as_int
from nvalchemiops.interactions.pair import potentials
from nvalchemiops.interactions.pair.expression import Formula
from nvalchemiops.torch.runtime import engine

Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@engine.immutable
class LongRangePotential(NamedTuple):
    """An interaction ``q_i q_j v(r)``, split at the inverse length alpha.

    The long-range part is smooth and has the Fourier transform g(k²); the short-range part is v(r) without it.

    Attributes
    ----------
    short_range : callable
        Maps the number of charges of an atom to the short-range part, a pair potential with the global parameter
        ``alpha``. Its self energy subtracts the long-range part at r = 0. Energies of several charges add up.
    excluded : callable
        Likewise for the negative long-range part, which corrects pairs that do not interact.
    reciprocal : callable
        Maps k² and alpha, which broadcast, to g for non-zero k. Consists of torch operations.
    at_zero : callable
        Maps alpha to the finite part of g at k = 0: minus the integral of the short-range part over all space. For the
        Coulomb potential this is -π/alpha²; times Q²/2V it is the energy of the neutralising background, which makes
        the total independent of alpha.
    slope : callable, optional
        Maps k² and alpha to ``dg/d(k²)``. By default automatic differentiation is used.
    is_constant : bool, optional
        Whether the functions depend on nothing but their arguments, so that they hold no trained tensors. Values
        computed from them are then kept from call to call.
    exponent : int, optional
        The p of `power_law`; None for other potentials.
    """

    short_range: Callable[[int], Formula]
    excluded: Callable[[int], Formula]
    reciprocal: Function
    at_zero: Callable[[torch.Tensor], torch.Tensor]
    slope: Function | None = None
    is_constant: bool = False
    exponent: int | None = None

    def reciprocal_derivative(self, k2: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
        """The derivative ``dg/d(k²)``."""
        if self.slope is not None:
            return self.slope(k2, alpha)
        return torch.func.jvp(lambda k2: self.reciprocal(k2, alpha), (k2,), (torch.ones_like(k2),))[1]

    def reciprocal_and_derivative(self, k2: torch.Tensor, alpha: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`reciprocal` and `reciprocal_derivative`."""
        return self.reciprocal(k2, alpha), self.reciprocal_derivative(k2, alpha)


@engine.immutable
class _PowerLaw(LongRangePotential):
    """A potential made by `power_law`; copying and unpickling return the same object.

    Prepared data compare it with the potential of a call, in a moment if both are this object.
    """

    __slots__ = ()

    def __repr__(self) -> str:  # short in signatures, whose default it is
        return f"power_law({self.exponent})"

    def __reduce__(self) -> tuple[Any, ...]:
        return power_law, (self.exponent,)

    def reciprocal_and_derivative(self, k2: torch.Tensor, alpha: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As for `LongRangePotential`; the exponential of the Coulomb potential is computed once."""
        if self.exponent != 1:
            return super().reciprocal_and_derivative(k2, alpha)
        value = _coulomb(k2, alpha)
        return value, _coulomb_derivative(k2, alpha, value)

    @property
    def as_call(self) -> tuple[str, tuple[Any, ...]]:
        """The name of the function that makes this potential, and its arguments."""
        return f"{__name__}:power_law", (self.exponent,)

    def _replace(self, **changes: Any) -> LongRangePotential:  # type: ignore[override]
        """Another potential, which is no longer known as a power law."""
        return LongRangePotential(**self._asdict() | {"is_constant": False, "exponent": None} | changes)


def _coulomb(k2: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    # the factor 4π is in the exponent, which saves an operation
    return torch.add(k2 * (-0.25 / alpha.square()), math.log(4.0 * math.pi)).exp() / k2


def _coulomb_derivative(k2: torch.Tensor, alpha: torch.Tensor, value: torch.Tensor | None = None) -> torch.Tensor:
    """The derivative, from the ``value`` of `_coulomb` if it is known."""
    return -(_coulomb(k2, alpha) if value is None else value) * (0.25 / alpha.square() + k2.reciprocal())


COULOMB = _PowerLaw(
    functools.partial(potentials.ewald_short_range, 1),
    functools.partial(potentials.ewald_excluded, 1),
    _coulomb,
    lambda alpha: -math.pi / alpha.square(),
    _coulomb_derivative,
    is_constant=True,
    exponent=1,
)
"""``1/r``, with a uniform background that neutralises charged cells.

Source: P. P. Ewald, Ann. Phys. 369, 253 (1921), doi:10.1002/andp.19213690304.
"""


@functools.cache
def power_law(exponent: int) -> LongRangePotential:
    """``1/r^p`` for p = 1 or an even p from 4 on; ``1/r^6`` is dispersion.

    With x = (k / 2 alpha)² the long-range part has the transform ``π^(3/2) alpha^(p-3) h_p(x) / Γ(p/2)`` where
    ``h_p = x^((p-3)/2) Γ((3-p)/2, x)``, an incomplete gamma function. Its recurrence gives h_p from
    ``h_2 = sqrt(π/x) erfc(sqrt x)``, and the derivative of h_p is -h_(p-2).

    Sources: D. E. Williams, Acta Cryst. A 27, 452 (1971), doi:10.1107/S0567739471000998; for p = 6 on a mesh U. Essmann
    et al., J. Chem. Phys. 103, 8577 (1995), doi:10.1063/1.470117.
    """
    exponent = as_int("exponent", exponent)
    if exponent != 1 and (exponent < 4 or exponent % 2):
        raise ValueError(f"`exponent` must be 1 or an even number from 4 on, got {exponent}")
    if exponent == 1:
        return COULOMB
    scale = math.pi**1.5 / math.gamma(exponent / 2)

    def transform(k2: torch.Tensor, alpha: torch.Tensor, power: int) -> torch.Tensor:
        """The function h of this power."""
        x = k2 * (0.25 / alpha.square())
        root = x.sqrt()
        # h_2 without its pole: times x
        decay, value = (-x).exp(), math.sqrt(math.pi) * root * torch.erfc(root)
        if power == 2:
            return value / x
        value = 2.0 * (decay - value)
        for p in range(6, power + 1, 2):
            value = (x * value - decay) * (2.0 / (3 - p))
        return value

    def reciprocal(k2: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
        return scale * alpha.pow(exponent - 3) * transform(k2, alpha, exponent)

    def derivative(k2: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
        return -0.25 * scale * alpha.pow(exponent - 5) * transform(k2, alpha, exponent - 2)

    return _PowerLaw(
        functools.partial(potentials.ewald_short_range, exponent),
        functools.partial(potentials.ewald_excluded, exponent),
        reciprocal,
        lambda alpha: alpha.pow(exponent - 3) * (scale * 2.0 / (exponent - 3)),
        derivative,
        is_constant=True,
        exponent=exponent,
    )


def check_potential(potential: Any) -> None:
    """Raise unless this is a `LongRangePotential`."""
    if not isinstance(potential, LongRangePotential):
        raise TypeError(f"`potential` must be a LongRangePotential, got {type(potential).__name__}")


def is_coulomb(potential: LongRangePotential) -> bool:
    """Whether this is `COULOMB`, or a copy of it: torch.export leaves copies of tuples in a module."""
    return isinstance(potential, _PowerLaw) and potential.exponent == 1
