"""Turn faults that neighbor searches have noted or counted into errors that name arguments."""

from typing import TYPE_CHECKING

import torch

from nvalchemiops.arguments import ValuesError
from nvalchemiops.neighbors import NeighborOverflowError, grid
from nvalchemiops.neighbors.search import NOT_FINITE
from nvalchemiops.torch import checks
from nvalchemiops.torch.operators.segments import batch_idx_of
from nvalchemiops.torch.runtime.context import all_values_of
from nvalchemiops.torch.runtime.recorder import read_number

if TYPE_CHECKING:
    from nvalchemiops.torch.neighbors.search import Search

MAX_SLOTS = 2**31 - 1
"""Largest number of entries of a list: rows are addressed with int32."""

FAULTS = {
    grid.BAD_POSITIONS: "`positions` has entries that are NaN or infinite",
    grid.BAD_SYSTEM: (
        "`batch_idx` and `batch_ptr` must describe the same contiguous systems: `batch_idx` must be non-negative, "
        "ascending and below the number of systems, and `batch_ptr` must rise from 0 to the number of atoms"
    ),
    grid.BAD_CELL: (
        "`cell` is singular: its lattice vectors along periodic axes must be finite, non-zero and linearly independent"
    ),
    grid.BAD_CUTOFF: "`cutoff` is too large for `cell`: more images of an atom than a list can hold",
    grid.FAR_AWAY: "`positions`: an atom is more cells away than image numbers can hold; wrap positions first",
    grid.BAD_TARGET: "`target_indices` has entries that are not indices of atoms",
}

BAD_NUMBERS = "`batch_idx` must hold numbers of systems, from 0 to the number of systems minus 1"
BAD_POINTERS = "`batch_ptr` must rise from 0 to the number of atoms"
"""Messages for a bad argument; for ``batch_idx`` only if ``batch_ptr`` is not given."""


def raise_faults(fault: torch.Tensor, search: "Search", rebuild_flags: torch.Tensor | None = None) -> None:
    """Raise ValueError for the first fault that kernels noticed, if any. Waits for the device.

    Systems whose atoms are not contiguous are a fault only if ``batch_ptr`` is given.
    """
    found = all_values_of(fault).reshape(-1, grid.N_FAULTS).any(0).tolist()
    if not any(found):
        return
    for number in [number for number in FAULTS if found[number]]:
        if number != grid.BAD_SYSTEM or (search.batch_ptr is not None and search.batch_idx is not None):
            raise ValuesError(FAULTS[number])
        if search.batch_ptr is not None:
            raise ValueError(BAD_POINTERS)
        assert search.batch_idx is not None
        numbers = all_values_of(search.batch_idx)
        n_systems = checks.systems_in_shapes((search.cell, 3), (search.pbc, 2), (rebuild_flags, 1))
        if bool((numbers < 0).any()) or (n_systems is not None and bool((numbers >= n_systems).any())):
            raise ValueError(BAD_NUMBERS)


def overflow(count: torch.Tensor, width: int, search: "Search") -> NeighborOverflowError:
    """The error for rows that need more than ``width`` entries without memory for them. Waits for the device."""
    system = None
    if all_values_of(count) is count:  # otherwise the fault is in an unknown slice of a vmap
        systems = _systems_of_rows(search)
        system = None if systems is None else int(systems[count.argmax()])
    return NeighborOverflowError(width, largest_count(count), system)


def systems_beyond(
    count: torch.Tensor, width: int, search: "Search", rebuild_flags: torch.Tensor
) -> tuple[torch.Tensor, "Search"]:
    """Flags for the systems with rows of more than ``width`` known entries, and a search with their numbers.

    Waits for the device if one flag is for all: then systems are numbered anew, since their numbers may be large,
    unless each has its cell or periodic axes.
    """
    beyond = (count > width) & (count < NOT_FINITE)
    n_systems = rebuild_flags.shape[0]
    if n_systems == 1:
        n_systems = checks.systems_in_shapes((search.cell, 3), (search.pbc, 2)) or 1
    if n_systems == 1 and search.batch_idx is not None and search.batch_ptr is None:
        found, numbers = torch.unique(search.batch_idx, return_inverse=True)
        search, n_systems = search._replace(batch_idx=numbers.to(search.batch_idx.dtype)), found.shape[0]
    systems = _systems_of_rows(search)
    if systems is None:
        return beyond.any().expand(rebuild_flags.shape).contiguous(), search
    if search.batch_ptr is not None and n_systems == 1:
        n_systems += int(systems.max()) if systems.numel() else 0
    beyond_in = beyond.new_zeros(n_systems, dtype=torch.int32).index_add(0, systems.long(), beyond.int())
    return beyond_in > 0, search


def _systems_of_rows(search: "Search") -> torch.Tensor | None:
    """System of the atom of each row; None for a single system."""
    systems = search.batch_idx
    if systems is None and search.batch_ptr is not None:
        systems = batch_idx_of(search.batch_ptr, search.positions.shape[0])
    if systems is None or search.target_indices is None:
        return systems
    return systems.index_select(0, search.target_indices)


def largest_count(count: torch.Tensor) -> int:
    """Largest valid count of neighbors. Waits for the device."""
    values = all_values_of(count)
    most = read_number(values.max()) if values.numel() else 0
    if most < NOT_FINITE:
        return most
    known = values[values < NOT_FINITE]  # rows that were kept from a search whose faults were not read
    return read_number(known.max()) if known.numel() else 0


def check_size(size: int, name: str = "cutoff") -> None:
    """Raise unless a list of ``size`` entries can be addressed; ``name`` is the argument that determines the size."""
    if size > MAX_SLOTS:
        raise ValueError(
            f"`{name}`: the list would have {size} entries, more than int32 can address; split the atoms by "
            "`target_indices`"
        )
