"""Neighbors of the atoms that a rank owns, and the same pairs as rows of its ghosts.

Sums over the neighbors of owned atoms, and derivatives of sums over pairs, need only the rows of owned atoms.
Derivatives of sums of moments need each pair in both directions, also pairs of an owned atom and a ghost. For these
pairs there are rows of ghosts, which contain owned atoms. Making these rows takes a third of the time of the search, so
they are made when they are first needed.
"""

import torch

from nvalchemiops.torch.neighbors.rows import NO_PADDING, Rows
from nvalchemiops.torch.neighbors.search import Search, neighbor_rows
from nvalchemiops.torch.operators.sorting import sort_rows
from nvalchemiops.torch.runtime._torch_internals import outside_of_transforms
from nvalchemiops.torch.runtime.acts import unrecorded


class OwnedRows:
    """The neighbors of owned atoms among owned atoms and ghosts.

    The search is among these, with owned atoms as targets. ``order`` has the numbers of its atoms, unless these are
    owned atoms, then ghosts, and ``seen`` the owned atoms that other ranks see, in any order: only these have ghosts as
    neighbors. ``alone`` has rows of owned atoms, then empty rows of ghosts.
    """

    def __init__(self, search: Search, order: torch.Tensor | None, seen: torch.Tensor) -> None:
        self._n_owned, self._n_atoms = search.n_rows, search.positions.shape[0]
        is_seen = seen.new_zeros(self._n_owned, dtype=torch.bool).index_fill_(0, seen, True)

        def spare(count: torch.Tensor) -> int:
            return int(count[is_seen].sum())

        # with spare memory at the end for the rows of ghosts: memory costs nothing until it is written
        self._neighbors, self._pointers, shifts = neighbor_rows(search, spare)
        self._shifts = None if search.cell is None else shifts
        size = int(self._pointers[-1])
        if order is not None:
            self._neighbors[:size] = order.int().index_select(0, self._neighbors[:size])
        self.alone = self._rows(size, self._pointers[-1:].expand(self._n_atoms - self._n_owned))
        self._of_both: Rows | None = None

    def _rows(self, size: int, of_ghosts: torch.Tensor) -> Rows:
        """Rows of the first ``size`` pairs. ``of_ghosts`` are the pointers of the rows of ghosts."""
        shifts = None if self._shifts is None else self._shifts[:size]
        return Rows(torch.cat([self._pointers, of_ghosts]), self._neighbors[:size], shifts, 0, NO_PADDING, None)

    @property
    def counts(self) -> torch.Tensor:
        """The number of neighbors (n_owned,) of each owned atom."""
        return self._pointers.diff()

    def of_both(self) -> Rows:
        """Rows of owned atoms, then rows of ghosts, which contain owned atoms only."""
        if self._of_both is None:
            with torch.inference_mode(False), outside_of_transforms(), unrecorded():  # it is kept
                self._of_both = self._rows(*self._write_rows_of_ghosts())
        return self._of_both

    def _write_rows_of_ghosts(self) -> tuple[int, torch.Tensor]:
        """Write the rows of ghosts after those of owned atoms. Return the number of all pairs, and their pointers."""
        n, size = self._n_owned, int(self._pointers[-1])
        border = (self._neighbors[:size] >= n).nonzero().squeeze(1)  # places of ghosts
        counts = torch.searchsorted(border, self._pointers.long()).diff()
        first = torch.arange(n, device=border.device, dtype=torch.int32)
        first = first.repeat_interleave(counts, output_size=len(border))
        order, of_ghosts = sort_rows(self._neighbors.index_select(0, border) - n, self._n_atoms - n)
        end = size + len(border)
        assert end <= len(self._neighbors), "room for the pairs of all atoms that other ranks see"
        torch.index_select(first, 0, order, out=self._neighbors[size:end])
        if self._shifts is not None:
            places = border.index_select(0, order)
            torch.neg(self._shifts.index_select(0, places), out=self._shifts[size:end])
        return end, of_ghosts[1:-1] + size
