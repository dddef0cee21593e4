"""Searches for lists of pairs of small systems, again and again for as many atoms: memory and launches are kept.

The kernels are those of `nvalchemiops.torch.neighbors.search`, and so are the bits: what differs is that bins are made
in the same memory each time, and that the arguments of the launches are packed once. On a CPU, for one system or a
batch in which atoms stay in their systems. Each thread has searches of its own, and one call at a time has one of them.
"""

import math
import threading
from collections.abc import Hashable
from typing import Any

import numpy as np
import torch
import warp as wp

from nvalchemiops import launch as core
from nvalchemiops.kernels.simd import LANES
from nvalchemiops.layout import CPU, layout
from nvalchemiops.locks import Kept, Lent
from nvalchemiops.neighbors import grid
from nvalchemiops.neighbors import search as kernels
from nvalchemiops.torch import checks
from nvalchemiops.torch.launch import describe, launch
from nvalchemiops.torch.runtime.memory import new_empty
from nvalchemiops.torch.runtime.recorder import current_recorder
from nvalchemiops.types import inner_shape

MOST_ATOMS = 1024
"""Larger searches take far longer than the Python around them."""

MOST_ATOMS_OF_BATCH = kernels.SCRATCH_ROWS
"""The same for a batch, where a search for each system finds less and Python does more."""

MOST_SEARCHES = 4
"""Kinds of searches that each thread keeps, of some hundred kilobytes each, and as many of batches."""

MOST_SLOTS = 2**16
"""Bins of all systems, at most."""

Scratch = tuple[torch.Tensor, torch.Tensor]
Pairs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class _Search:
    """The memory and the launches of a search that has been there before."""

    def __init__(
        self,
        positions: torch.Tensor,
        cell: Any,
        pbc: Any,
        systems: tuple[torch.Tensor | None, torch.Tensor],
        cutoff: float,
        half: bool,
        method: int,
        lanes: int,
    ) -> None:
        system, first_atom = systems
        n_atoms, n_systems, cpu = positions.shape[0], first_atom.shape[0] - 1, wp.get_device("cpu")
        self.is_periodic = cell is not None
        self.index: torch.Tensor | None = None
        self.shifts: torch.Tensor | None = None
        self.fault = torch.zeros(grid.N_FAULTS, dtype=torch.int32, device="cpu")
        self.begin = torch.zeros(grid.ring_slots(n_atoms, n_systems, method) + 2, dtype=torch.int32, device="cpu")
        self.count = torch.empty(n_atoms, dtype=torch.int32, device="cpu")
        self.faults, self.counts = self.fault.numpy(), self.count.numpy()
        grids = torch.empty(n_systems, *inner_shape(grid.Grid), dtype=torch.uint8, device="cpu")
        coordinates = torch.empty(3, n_atoms + LANES, dtype=torch.float64, device="cpu")
        slot, order = torch.empty(2, n_atoms, dtype=torch.int32, device="cpu")
        entry = torch.empty(n_atoms, 4, dtype=torch.int32, device="cpu")
        self.width = width = kernels.scratch_width(n_atoms)
        rows = torch.arange(0, (n_atoms + 1) * width, width, dtype=torch.int32, device="cpu")
        self.per_thread = CPU.rows_per_thread(kernels.ROWS_PER_THREAD)
        self.n_threads = -(-n_atoms // self.per_thread)
        described = [positions, cell, pbc, system, first_atom, cutoff, method]
        self.prepare = core.prepared(grid.prepare_search(), 1, device=cpu, lanes=0, kind=None)
        made = [grids, slot, self.begin, order, coordinates, entry, self.fault]
        self.of_bins = describe(grid.prepare_search(), [*described, *made])[1]
        binned = [coordinates, entry, self.begin, system, grids, cutoff, int(half), None, None]
        self.searched = [*binned, rows, -1, 0, self.count]
        self.search = core.prepared(kernels.search_neighbors(), self.n_threads, device=cpu, lanes=lanes, kind="fill")
        self.memory = [*made, rows, system, first_atom]  # as long as the launches
        # cutoff from which on rows are longer than the memory, as far as that is known
        self.too_long = math.inf if all(type(value) is bytes for value in self.of_bins[:3]) else 0.0

    def __call__(self, positions: torch.Tensor, cell: Any, pbc: Any, cutoff: float, scratch: Scratch) -> Pairs | None:
        """The list; None if the ordinary search is needed, since it raises, or rows are long."""
        if scratch[0] is not self.index:
            self.index, self.shifts = scratch[0], scratch[1] if self.is_periodic else None
            searched = [*self.searched, self.index, None, self.shifts, self.per_thread]
            self.of_search = describe(kernels.search_neighbors(), searched)[1]
        self.begin.zero_()
        self.fault.zero_()
        for number, value in enumerate((positions, cell, pbc)):
            if value is not None:
                self.of_bins[number] = value.data_ptr().to_bytes(8, "little") + self.of_bins[number][8:]
        self.of_bins[5] = self.of_search[5] = cutoff
        self.prepare(self.of_bins)
        self.search(self.of_search)
        if self.faults.any():
            return None
        if self.counts.max() > self.width:
            self.too_long = cutoff
            return None
        ptr = torch.empty(self.counts.shape[0] + 1, dtype=torch.int32, device="cpu")
        ends = ptr.numpy()
        ends[0] = 0
        np.cumsum(self.counts, dtype=np.int32, out=ends[1:])
        size, device = int(ends[-1]), ptr.device
        pairs = new_empty((2, size), torch.int32, device)
        shifts = new_empty((0 if self.shifts is None else size, 3), torch.int32, device)
        inputs = [self.count, self.index, self.shifts, self.width, None, ptr, -1, 0]
        launch(kernels.compact_neighbors(), self.n_threads, inputs, [pairs[1], pairs[0], shifts, self.per_thread])
        return pairs, ptr, shifts


def _systems(
    n_atoms: int, cell: Any, pbc: Any, numbers: np.ndarray | None, method: int
) -> tuple[torch.Tensor | None, torch.Tensor] | None:
    """System of each atom (None: there is one), and the first atom of each; None for the ordinary search.

    ``numbers`` are those of the systems of the atoms.
    """
    if numbers is None:
        return None, torch.arange(2, dtype=torch.int32, device="cpu").mul_(n_atoms)
    n_systems = checks.systems_in_shapes((cell, 3), (pbc, 2)) or int(numbers.max()) + 1
    is_sorted = 0 <= numbers[0] and (numbers[1:] >= numbers[:-1]).all() and numbers[-1] < n_systems
    if not is_sorted or grid.ring_slots(n_atoms, n_systems, method) > MOST_SLOTS:
        return None
    first_atom = np.searchsorted(numbers, np.arange(n_systems + 1)).astype(np.int32)
    return torch.from_numpy(numbers.astype(np.int32)), torch.from_numpy(first_atom)


_thread = threading.local()

ONCE = "once"
"""In the place of a search that was there once."""


def repeated_pairs(
    positions: torch.Tensor,
    cutoff: float,
    cell: torch.Tensor | None,
    pbc: torch.Tensor | None,
    batch_idx: torch.Tensor | None,
    half: bool,
    method: int,
    lanes: int,
    scratch: Lent[Scratch],
) -> Pairs | None:
    """The list of pairs, its pointers and shifts, or None if the ordinary search is to make them.

    Parameters
    ----------
    positions, cutoff, cell, pbc, batch_idx, half, method
        As of `search.neighbor_pairs`.
    lanes : int
        Of the search.
    scratch : Lent
        Memory of this thread for rows.
    """
    n_atoms = positions.shape[0]
    given = [t for t in (positions, cell, pbc, batch_idx) if t is not None]
    most = MOST_ATOMS if batch_idx is None else MOST_ATOMS_OF_BATCH
    if not 0 < n_atoms <= most or not all([layout(t.device.type) is CPU for t in given]):
        return None
    is_double = positions.dtype is torch.float64 and (cell is None or cell.dtype is torch.float64)
    if not is_double or not all([t.is_contiguous() and not t.is_neg() for t in given]):
        return None
    if current_recorder() is not None or core.active_tape() is not None:
        return None
    cell = None if cell is None else cell.detach().reshape(-1, 3, 3)
    pbc = None if pbc is None else pbc.reshape(-1, 3)
    numbers = None if batch_idx is None else batch_idx.numpy()
    of_systems = None if numbers is None else (numbers.dtype, numbers.tobytes())
    shapes = [None if t is None else t.shape[0] for t in (cell, pbc)]
    key: Hashable = (n_atoms, *shapes, of_systems, half, method)
    kind = "searches" if batch_idx is None else "searches_of_batches"
    searches: Kept[_Search | str] | None = getattr(_thread, kind, None)
    if searches is None:
        searches = Kept(MOST_SEARCHES)
        setattr(_thread, kind, searches)
    search = searches.pop(key, None)  # a call in the midst of this one finds none
    if search is None:
        searches.keep(key, ONCE)
        return None
    if isinstance(search, str):
        with torch.inference_mode(False):  # memory that can be changed outside of it, too
            systems = _systems(n_atoms, cell, pbc, numbers, method)
            if systems is None:
                searches.keep(key, ONCE)
                return None
            search = _Search(positions, cell, pbc, systems, cutoff, half, method, lanes)
    pairs = None
    if cutoff < search.too_long:
        rows = scratch.take()
        pairs = search(positions, cell, pbc, cutoff, rows)
        scratch.give(rows)
    searches.keep(key, search)
    return pairs
