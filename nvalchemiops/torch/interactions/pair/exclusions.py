"""Pairs of atoms that do not interact, or with a factor."""

from typing import Any, NamedTuple

import torch

from nvalchemiops.torch import checks
from nvalchemiops.torch.operators.segments import row_pointers
from nvalchemiops.torch.runtime.cache import cached_by_value
from nvalchemiops.torch.runtime.context import may_read


class Exclusions(NamedTuple):
    """Checked pairs, each in the rows of both of its atoms.

    Attributes
    ----------
    begin : (n_atoms + 1,) int32 tensor
        Where the row of each atom begins.
    first, other : (2 n_pairs,) int32 tensor
        The atom to which the row belongs, and the other one.
    order : (2 n_pairs,) int64 tensor
        Where each entry is among the pairs as given, followed by the same pairs exchanged.
    factors : (2 n_pairs,) tensor of floats, or None
        Factors of the energies. None: zero.
    """

    begin: torch.Tensor
    first: torch.Tensor
    other: torch.Tensor
    order: torch.Tensor
    factors: torch.Tensor | None

    @property
    def arrays(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What kernels read: where rows begin, the other atoms, and factors in float64."""
        if self.factors is None:
            return self.begin, self.other, torch.zeros_like(self.other, dtype=torch.float64)
        return self.begin, self.other, self.factors.to(torch.float64)


def prepare_exclusions(exclusions: Any, factors: Any, positions: torch.Tensor) -> Exclusions | None:
    """The pairs (2, n_pairs) with their factors (n_pairs,), sorted by atom; None without pairs.

    Raises
    ------
    ValueError, TypeError
        Factors without pairs; a wrong shape, dtype or device; factors with a gradient. If values can be read: an atom
        that does not exist, an atom with itself, a pair that is there twice.
    """
    if exclusions is None:
        if factors is not None:
            raise ValueError("`exclusion_factors` is given without `exclusions`")
        return None
    n_atoms = positions.shape[0]
    checks.check_index("exclusions", exclusions, positions, (2, None))
    if factors is not None:
        _check_factors(factors, exclusions.shape[1], positions)
    begin, first, other, order = cached_by_value(
        "exclusions", (exclusions,), n_atoms, lambda: _sorted_by_atom(exclusions, n_atoms)
    )
    if factors is not None:
        factors = torch.cat([factors, factors]).index_select(0, order)
    return Exclusions(begin, first, other, order, factors)


def _check_factors(factors: Any, n_pairs: int, positions: torch.Tensor) -> None:
    checks.check_tensor("exclusion_factors", factors)
    if not factors.is_floating_point():
        raise TypeError("`exclusion_factors` must be a tensor of floats")
    if factors.requires_grad:
        raise ValueError("`exclusion_factors` cannot be trained: pass a detached tensor")
    if tuple(factors.shape) != (n_pairs,) or factors.device != positions.device:
        raise ValueError(
            f"`exclusion_factors` must have shape ({n_pairs},) on {positions.device}, got {tuple(factors.shape)} on "
            f"{factors.device}"
        )


def _sorted_by_atom(pairs: torch.Tensor, n_atoms: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``begin``, ``first``, ``other`` and ``order`` of `Exclusions`."""
    i, j = pairs.to(torch.int64)
    n_pairs = pairs.shape[1]
    if n_pairs and may_read(pairs):
        if int(pairs.min()) < 0 or int(pairs.max()) >= n_atoms:
            raise ValueError(f"`exclusions` must hold atoms in 0 .. {n_atoms - 1}")
        if bool((i == j).any()):
            raise ValueError("`exclusions` joins an atom with itself")
        keys = torch.minimum(i, j) * n_atoms + torch.maximum(i, j)
        if torch.unique(keys).shape[0] != n_pairs:
            raise ValueError("`exclusions` holds a pair twice")
    first, order = torch.sort(torch.cat([i, j]), stable=True)
    other = torch.cat([j, i]).index_select(0, order)
    return row_pointers(first, n_atoms), first.to(torch.int32), other.to(torch.int32), order
