"""Published damping parameters of DFT-D3 for density functionals.

``damping.csv`` holds one row for each functional and damping function, with the paper if it is known. The values are
those collected in the program s-dftd3 (S. Ehlert, J. Open Source Softw. 9, 7169 (2024), doi:10.21105/joss.07169).
"""

import csv
import difflib
import functools
import importlib.resources
from typing import Any, NamedTuple

from nvalchemiops.arguments import as_choice, plain

KINDS = ("bj", "zero", "bjm", "zerom")
"""Damping functions: Becke-Johnson (rational) and zero damping, and the modified forms of both."""


class RationalDamping(NamedTuple):
    """Parameters of Becke-Johnson (rational) damping: numbers, or tensors that may require gradients.

    Attributes
    ----------
    a1, a2 : float or tensor
        The damping length is ``a1 sqrt(C8/C6) + a2``; a2 is in bohr.
    s8, s6 : float or tensor
        Factors of the terms with C8 and C6.
    """

    a1: Any
    a2: Any
    s8: Any
    s6: Any = 1.0


class ZeroDamping(NamedTuple):
    """Parameters of zero damping: numbers, or tensors that may require gradients.

    Attributes
    ----------
    rs6, rs8 : float or tensor
        Factors that scale the pair radii in the terms with C6 and C8.
    s8, s6 : float or tensor
        Factors of the terms with C8 and C6.
    beta : float or tensor, 1/bohr
        Parameter of the modified form; zero otherwise.
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
        Name such as "pbe", "b3lyp" or "r2scan"; case, hyphens and other punctuation are ignored. It may end with that
        of the damping, as "PBE-D3(BJ)" does.
    damping : {"bj", "zero", "bjm", "zerom"}, optional
        Becke-Johnson or zero damping, or the modified form of either; names such as "D3(BJ)" are known, too.

    Raises
    ------
    ValueError
        There are no parameters for this functional and damping; the message names alternatives.
    TypeError
        ``functional`` is not a string.

    Examples
    --------
    >>> damping_parameters("PBE")
    RationalDamping(a1=0.4289, a2=4.4407, s8=0.7875, s6=1.0)
    """
    if isinstance(damping, str):
        letters = plain(damping).removeprefix("d3")
        damping = _SPELLINGS.get(letters, letters if letters in KINDS else damping)
    damping = as_choice("damping", damping, KINDS)
    if not isinstance(functional, str):
        raise TypeError(f"`functional` must be a string, got {type(functional).__name__}")
    table = _table()
    name = plain(functional)
    name = _without_damping(functional, _ALIASES.get(name, name), damping)
    if (name, damping) not in table:
        known = sorted({f for f, kind in table if kind == damping})
        if any(f == name for f, _ in table):
            others = " and ".join(f"'{kind}'" for kind in KINDS if (name, kind) in table)
            raise ValueError(f"`damping`: {functional!r} has no parameters for '{damping}', but has some for {others}")
        close = difflib.get_close_matches(name, known, 3)
        hint = f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(known)}"
        raise ValueError(f"`functional`: there are no damping parameters for {functional!r}; {hint}")
    return table[name, damping]


def _without_damping(functional: str, name: str, damping: str) -> str:
    """The name without an ending such as "d3bj"; raise if that is not the damping, or "d3" alone beside the default."""
    kinds: dict[str, list[str]] = {}
    for known, kind in _table():
        kinds.setdefault(known, []).append(kind)
    before, _, letters = name.rpartition("d3")
    before = _ALIASES.get(before, before)
    before += "d" * (before not in kinds)  # B97-D3 is B97-D with another dispersion energy
    kind = _SPELLINGS.get(letters, letters)
    if before not in kinds or kind not in ("", *KINDS):
        return name
    those = " or ".join(map(repr, [kind] if kind else kinds[before]))
    if those != repr(damping) and (kind or damping == "bj"):  # which may be the default
        named = f"is for {those}, but `damping` is '{damping}'" if kind else "does not say which damping"
        raise ValueError(f"`functional`: {functional!r} {named}; give '{before}' and, as `damping`, {those}")
    return before


_SPELLINGS = {"0": "zero", "mbj": "bjm", "m0": "zerom", "mzero": "zerom"}
"""Other names of damping functions, as in D3(0) or D3M(BJ)."""

_ALIASES = {"bp86": "bp", "bhandhlyp": "bhlyp"}


@functools.cache
def _table() -> dict[tuple[str, str], RationalDamping | ZeroDamping]:
    text = importlib.resources.files(__package__).joinpath("damping.csv").read_text()
    table: dict[tuple[str, str], RationalDamping | ZeroDamping] = {}
    for row in csv.DictReader(text.splitlines()):
        kind = ZeroDamping if row["damping"].startswith("zero") else RationalDamping
        values = {name: float(row[name]) for name in kind._fields if row[name]}
        table[plain(row["functional"]), row["damping"]] = kind(**values)
    return table
