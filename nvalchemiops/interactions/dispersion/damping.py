"""Damping parameters of DFT-D3 for density functionals, as published.

``damping.csv`` holds one row for each functional and kind of damping, with the paper where it is known. The values are
those that the program s-dftd3 collects (S. Ehlert, J. Open Source Softw. 9, 7169 (2024), doi:10.21105/joss.07169).
"""

import csv
import difflib
import functools
import importlib.resources
import re
from typing import Any, NamedTuple

KINDS = ("bj", "zero", "bjm", "zerom")
"""Becke and Johnson's damping, damping to zero, and the modified forms of both."""


class RationalDamping(NamedTuple):
    """Damping of Becke and Johnson; lengths in bohr. Numbers, or tensors with gradients to fit them.

    Attributes
    ----------
    a1, a2 : float or tensor
        The damping length is ``a1 sqrt(C8/C6) + a2``.
    s8, s6 : float or tensor
        Factors of the two terms.
    """

    a1: Any
    a2: Any
    s8: Any
    s6: Any = 1.0


class ZeroDamping(NamedTuple):
    """Damping to zero; lengths in bohr. Numbers, or tensors with gradients to fit them.

    Attributes
    ----------
    rs6, rs8 : float or tensor
        Factors of the radii of pairs in the two terms.
    s8, s6 : float or tensor
        Factors of the two terms.
    beta : float or tensor, 1/bohr
        Of the modified form.
    """

    rs6: Any
    s8: Any
    s6: Any = 1.0
    rs8: Any = 1.0
    beta: Any = 0.0


def damping_parameters(functional: str, damping: str = "bj") -> RationalDamping | ZeroDamping:
    """The published damping parameters of a density functional.

    Parameters
    ----------
    functional : str
        Such as "pbe", "b3lyp" or "r2scan"; case, hyphens and other signs do not matter.
    damping : {"bj", "zero", "bjm", "zerom"}, optional
        Becke and Johnson's, to zero, or the modified form of either.

    Raises
    ------
    ValueError
        Nothing is known for it; the message names what is.

    Examples
    --------
    >>> damping_parameters("PBE")
    RationalDamping(a1=0.4289, a2=4.4407, s8=0.7875, s6=1.0)
    """
    if damping not in KINDS:
        raise ValueError(f"`damping` must be one of {', '.join(KINDS)}, got {damping!r}")
    if not isinstance(functional, str):
        raise TypeError(f"`functional` must be a string, got {type(functional).__name__}")
    table = _table()
    name = _plain(functional)
    name = _ALIASES.get(name, name)
    if (name, damping) not in table:
        known = sorted({f for f, kind in table if kind == damping})
        if any(f == name for f, _ in table):
            others = " and ".join(f"'{kind}'" for kind in KINDS if (name, kind) in table)
            raise ValueError(f"`damping`: for {functional!r} there is nothing for '{damping}', but for {others}")
        close = difflib.get_close_matches(name, known, 3)
        hint = f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(known)}"
        raise ValueError(f"`functional`: nothing is known for {functional!r}; {hint}")
    return table[name, damping]


_ALIASES = {"bp86": "bp", "bhandhlyp": "bhlyp"}


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


@functools.cache
def _table() -> dict[tuple[str, str], RationalDamping | ZeroDamping]:
    text = importlib.resources.files(__package__).joinpath("damping.csv").read_text()
    table: dict[tuple[str, str], RationalDamping | ZeroDamping] = {}
    for row in csv.DictReader(text.splitlines()):
        kind = ZeroDamping if row["damping"].startswith("zero") else RationalDamping
        values = {name: float(row[name]) for name in kind._fields if row[name]}
        table[_plain(row["functional"]), row["damping"]] = kind(**values)
    return table
