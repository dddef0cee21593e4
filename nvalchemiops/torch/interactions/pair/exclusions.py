"""Exclusions: pairs of atoms that do not interact, or whose interaction is scaled by a factor."""

from typing import Any, NamedTuple

import torch

from nvalchemiops.arguments import ValuesError
from nvalchemiops.interactions.pair.loop import NO_ATOM, OPEN_AXIS
from nvalchemiops.torch import checks
from nvalchemiops.torch.operators.segments import row_pointers
from nvalchemiops.torch.runtime.cache import cached_by_value
from nvalchemiops.torch.runtime.context import may_read
from nvalchemiops.torch.runtime.recorder import read_flag


class ExclusionRows(NamedTuple):
    """Checked excluded or scaled pairs, sorted into one row per atom; each pair is in the rows of both of its atoms."""

    pointers: torch.Tensor  # (n_atoms + 1,) int32, first entry of the row of each atom, then 2 n_pairs
    # (2 n_pairs,) int32, the other atom of the pair; in slabs with the sign bit, and the open axis from `OPEN_AXIS` on;
    # `NO_ATOM` where the pair is invalid and values cannot be read: the rows of both atoms are NaN then
    atoms: torch.Tensor
    factors: torch.Tensor  # (2 n_pairs,) float64, of the energies
    first: torch.Tensor  # (2 n_pairs,) int64, the atom to which the row belongs
    # (2 n_pairs,) int64, index of each entry in the given pairs followed by the same pairs with their atoms exchanged
    order: torch.Tensor
    pairs: torch.Tensor  # (2, n_pairs) int64, as given; those that are out of range have other atoms in their place
    given_factors: torch.Tensor | None  # (n_pairs,), as given; None if all are zero

    def with_open_axes(self, periodic: torch.Tensor) -> "ExclusionRows":
        """The same pairs in slabs: ``periodic`` (2 n_pairs, 3) are the axes of each, of which one may be open."""
        if may_read() and self.pointers.shape[0] > 2**OPEN_AXIS:
            raise ValueError(f"`exclusions` of slabs are for less than {2**OPEN_AXIS} atoms")
        numbers = torch.arange(3, dtype=torch.int32, device=periodic.device)
        open_axis = (~periodic * numbers).sum(1, dtype=torch.int32) * 2**OPEN_AXIS + (-(2**31))
        is_marked = (self.atoms != NO_ATOM) & ~periodic.all(1)
        return self._replace(atoms=torch.where(is_marked, self.atoms + open_axis, self.atoms))

    def plain_atoms(self) -> torch.Tensor:
        """``atoms`` without open axes."""
        return torch.where(self.atoms < NO_ATOM, self.atoms & (2**OPEN_AXIS - 1), self.atoms)

    def remainder(self) -> "ExclusionRows | None":
        """The same pairs with 1 minus the factors; None if no factors were given."""
        if self.given_factors is None:
            return None
        return self._replace(factors=_of_both(1.0 - self.given_factors, self.order))


def exclusion_rows(
    exclusions: Any, given_factors: Any, positions: torch.Tensor, batch_idx: torch.Tensor | None = None
) -> ExclusionRows | None:
    """Rows of the exclusions (2, n_pairs) with factors (n_pairs,) of `PairPotential.__call__`; None without exclusions.

    Raises if factors are given without pairs or have a gradient; and if values can be read, if an atom does not exist,
    or a pair joins an atom with itself or one of another system, or is listed twice. Otherwise such a pair is marked
    with `NO_ATOM`.
    """
    if exclusions is None:
        if given_factors is not None:
            raise ValueError("`exclusion_factors` is given without `exclusions`")
        return None
    n_atoms = positions.shape[0]
    checks.check_index("exclusions", exclusions, positions, (2, None))
    if given_factors is not None:
        checks.check_factors("exclusion_factors", given_factors, exclusions.shape[1], positions)
    pointers, atoms, first, order, pairs = cached_by_value(
        "exclusions", (exclusions,), n_atoms, lambda: _sorted_by_atom(exclusions, n_atoms)
    )
    if given_factors is None:
        factors = torch.zeros_like(atoms, dtype=torch.float64)
    else:
        factors = _of_both(given_factors, order)
    if batch_idx is not None and not may_read(batch_idx, pairs):
        one, other = (batch_idx.index_select(0, numbers) for numbers in pairs)
        atoms = _marked(atoms, one != other, order)
    elif batch_idx is not None:
        one, other = batch_idx[pairs]
        if read_flag((one != other).any()):
            raise ValuesError("`exclusions` joins atoms of different systems")
    return ExclusionRows(pointers, atoms, factors, first, order, pairs, given_factors)


def _marked(atoms: torch.Tensor, is_invalid: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return atoms.masked_fill(torch.cat([is_invalid, is_invalid]).index_select(0, order), NO_ATOM)


def _are_invalid(given: torch.Tensor, pairs: torch.Tensor, n_atoms: int) -> torch.Tensor:
    """Which of the ``given`` pairs, in range as ``pairs``, `checks.check_pairs` would refuse: flags (n_pairs,)."""
    keys, order = torch.sort(pairs.amin(0) * n_atoms + pairs.amax(0))
    again = torch.diff(keys, prepend=keys.new_full((1,), -1)) == 0
    again = torch.zeros_like(again).index_copy(0, order, again)
    return again | (pairs[0] == pairs[1]) | (given != pairs).any(0)


def _of_both(factors: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return torch.cat([factors, factors]).to(torch.float64).index_select(0, order)


def _sorted_by_atom(exclusions: torch.Tensor, n_atoms: int) -> tuple[torch.Tensor, ...]:
    """``pointers``, ``atoms``, ``first``, ``order`` and ``pairs`` of `ExclusionRows`."""
    checks.check_pairs("exclusions", exclusions, n_atoms, exclusions)
    given = exclusions.to(torch.int64)
    # what is out of range has raised, or is marked below
    pairs = given if may_read(given) else given.clamp(0, max(n_atoms - 1, 0))
    i, j = pairs
    first, order = torch.sort(torch.cat([i, j]), stable=True)
    atoms = torch.cat([j, i]).index_select(0, order).to(torch.int32)
    if not may_read(given):
        atoms = _marked(atoms, _are_invalid(given, pairs, n_atoms), order)
    return row_pointers(first, n_atoms), atoms, first, order, pairs
