"""Neighbor lists in either public format, as the rows that kernels read (`nvalchemiops.neighbors.rows`)."""

from typing import Any, NamedTuple

import torch
import warp as wp

from nvalchemiops.arguments import ValuesError
from nvalchemiops.neighbors import rows as core
from nvalchemiops.neighbors.search import NOT_FINITE
from nvalchemiops.notices import NeighborListWarning, notify
from nvalchemiops.torch import checks
from nvalchemiops.torch.autograd import OutputSpec, warp_custom_op
from nvalchemiops.torch.launch import launch
from nvalchemiops.torch.neighbors.formats import check_full_list, direction_of, half_to_full, order_of_pairs, repeats
from nvalchemiops.torch.neighbors.pairs import Pairs, distances_and_vectors
from nvalchemiops.torch.neighbors.search import Search, found_pairs, neighbor_matrix
from nvalchemiops.torch.operators.segments import row_pointers
from nvalchemiops.torch.runtime.calls import int32_of
from nvalchemiops.torch.runtime.context import (
    all_values_of,
    hides_values,
    may_read,
    refuse_in_capture,
    slices_of,
    values_of,
)
from nvalchemiops.torch.runtime.recorder import differ_in_replays, read_flag, read_number
from nvalchemiops.torch.types import Pbc

NO_PADDING = core.NO_PADDING

EDGE = 1e-5
"""Pairs this close to the cutoff, relative to it, may be missing: rounding in float32 puts them on either side."""


class GivenNeighbors(NamedTuple):
    """Neighbors as arguments of a public function: a list of pairs, a matrix, or neither.

    Public functions call its constructor, not ``_replace``: torch 2.11 loses the result of the latter at graph breaks.
    """

    neighbor_list: torch.Tensor | None = None
    neighbor_ptr: torch.Tensor | None = None
    shifts: torch.Tensor | None = None
    neighbor_matrix: torch.Tensor | None = None
    matrix_shifts: torch.Tensor | None = None
    fill_value: int | None = None
    half_list: bool = False  # each pair is there only once, in either direction
    shifts_name: str = "neighbor_shifts"  # names of arguments, for messages
    fill_name: str = "fill_value"
    fits_cell: bool = False  # the cell is known to be regular and periodic along all axes: its values need not be read


def is_listed(neighbors: GivenNeighbors) -> bool:
    """Whether a list of neighbors or a matrix is given."""
    return neighbors.neighbor_list is not None or neighbors.neighbor_matrix is not None


class Rows(NamedTuple):
    """Neighbors of all atoms as flat rows, a full list, in int32."""

    pointers: torch.Tensor | None  # (n_atoms + 1,): first slot of each row, then n_slots; None for rows of equal width
    neighbors: torch.Tensor  # (n_slots,)
    shifts: torch.Tensor | None  # (n_slots, 3); None for systems that are not periodic
    width: int  # of the rows of a matrix
    padding: int  # neighbors with this value are skipped, even if it is the index of an atom
    first: torch.Tensor | None  # (n_slots,): first atom of each pair, as given; kernels check it against ``pointers``


def rows_of(given: GivenNeighbors, positions: torch.Tensor, periodic: bool, check: bool = False) -> Rows | None:
    """The rows of a list or matrix; None if neither is given. A half list is expanded to a full one.

    A matrix without rows, or a list without pairs whose pointers are a single 0, means no pairs for any number of
    atoms. If ``periodic``, there is a cell, which requires shifts. Without a cell shifts must be zero, and are dropped;
    if they cannot be read, they are kept for use with `cell_without_images`. Raises for both formats, parts of one, bad
    shapes, dtypes or devices; with ``check`` also for a list that is not full, which sorts all pairs and reads values.
    """
    has_list, has_matrix = given.neighbor_list is not None, given.neighbor_matrix is not None
    if has_list and has_matrix:
        raise ValueError("`neighbor_list` and `neighbor_matrix` are both given; give one of them")
    for name, value, is_there in (
        ("neighbor_ptr", given.neighbor_ptr, has_list),
        (given.shifts_name, given.shifts, has_list),
        ("neighbor_matrix_shifts", given.matrix_shifts, has_matrix),
        (given.fill_name, given.fill_value, has_list or has_matrix),
    ):
        if value is not None and not is_there:
            raise ValueError(f"`{name}` is given without the list that it belongs to")
    half_list = checks.check_flag("half_list", given.half_list)
    if not (has_list or has_matrix):
        if half_list:
            raise ValueError("`half_list` describes a list, but none is given")
        return None
    shifts = given.shifts if has_list else given.matrix_shifts
    name = given.shifts_name if has_list else "neighbor_matrix_shifts"
    if periodic and shifts is None:
        raise ValueError(f"`{name}` is needed with `cell`: together they say where the images are")
    n_atoms, width, entries = positions.shape[0], 0, given.neighbor_matrix
    pointers, first = given.neighbor_ptr, None
    if has_list:
        pairs: Any = given.neighbor_list
        checks.check_index("neighbor_list", pairs, positions, (2, None))
        first, entries = _int32(pairs[0]), pairs[1]
        if isinstance(pointers, torch.Tensor) and pointers.shape == (1,) and pairs.shape[1] == 0:
            checks.check_index("neighbor_ptr", pointers, positions, (1,))
            pointers = pointers.new_zeros(n_atoms + 1)
        if pointers is None:
            pointers = row_pointers(first, n_atoms)
        else:
            checks.check_index("neighbor_ptr", pointers, positions, (n_atoms + 1,))
            pointers = _int32(pointers)
    else:
        n_rows = 0 if isinstance(entries, torch.Tensor) and entries.shape[:1] == (0,) else n_atoms
        checks.check_index("neighbor_matrix", entries, positions, (n_rows, None))
        width = entries.shape[1] if n_rows else 0  # type: ignore[union-attr]  # it was checked
    assert entries is not None
    if shifts is not None:
        checks.check_index(name, shifts, positions, (*entries.shape, 3))
        shifts = _int32(shifts)
    padding = NO_PADDING if has_list else n_atoms
    if given.fill_value is not None:
        padding = checks.check_int(given.fill_name, given.fill_value)
        if padding == NO_PADDING:
            raise ValueError(f"`{given.fill_name}` must be larger than {NO_PADDING}, which means no padding")
    neighbors = _int32(entries)
    if not has_list:
        neighbors, shifts = neighbors.flatten(), None if shifts is None else shifts.flatten(0, 1)
    rows = Rows(pointers, neighbors, shifts, width, padding, first)
    if not periodic and shifts is not None and may_read(*rows):
        if read_number(shifts.any()) and read_number(shifts[listed_slots(rows)].any()):
            raise ValueError(f"`cell` is needed with `{name}`: together they say where the images are")
        rows = rows._replace(shifts=None)
    return _expanded(rows, n_atoms, half_list, check) if half_list or check else rows


def parts_of(rows: Rows, given: GivenNeighbors) -> bool:
    """Whether the rows are parts of the given list or matrix, without copies."""
    whole, parts = (
        {all_values_of(t).untyped_storage().data_ptr() for t in values if isinstance(t, torch.Tensor)}
        for values in (given, rows)
    )
    return parts <= whole


def cell_without_images(rows: Rows, positions: torch.Tensor, n_systems: int) -> torch.Tensor | None:
    """Cells of zeros for rows whose shifts could not be read (neighbors in other images then give NaN); else None."""
    return None if rows.shifts is None else positions.new_zeros((n_systems, 3, 3))


def build_rows(
    positions: torch.Tensor,
    cutoff: float,
    cell: torch.Tensor | None,
    batch_idx: torch.Tensor | None,
    pbc: Pbc | None = None,
) -> Rows:
    """Rows of all neighbors closer than ``cutoff``, for arguments that are checked except for ``pbc``.

    The entries of ``batch_idx`` may be in any order.
    """
    if pbc is not None:
        _, pbc, _ = checks.check_systems(positions, cell, pbc, batch_idx, None)
    order = None
    # the order is read only if that needs no wait
    if batch_idx is not None and not (may_read(batch_idx) and read_number((batch_idx[1:] >= batch_idx[:-1]).all())):
        batch_idx, order = torch.sort(batch_idx, stable=True)
        positions = positions.index_select(0, order)
    lattice = None if cell is None else cell.detach()
    search = Search(positions.detach(), cutoff, lattice, pbc, batch_idx)
    try:
        pairs, ptr, images = found_pairs(search)
    except ValuesError:
        if not hides_values() or cell is None or pbc is not None:  # an image gives NaN along periodic axes alone
            raise
        pairs, ptr, images = _pairs_of_valid_systems(search)
    shifts = None if cell is None else images
    if order is not None:
        # rows in the order of the atoms as given
        room = pairs == NO_PADDING  # lists of slices may have it at their ends
        pairs = torch.where(room, NO_PADDING, order.to(torch.int32)[pairs.clamp(min=0).long()])
        first, place = torch.sort(torch.where(room[0], positions.shape[0], pairs[0]), stable=True)
        pairs = torch.stack([first, pairs[1].index_select(0, place)])
        shifts = None if shifts is None else shifts.index_select(0, place)
        ptr = row_pointers(first, positions.shape[0])
    return Rows(ptr, pairs[1].contiguous(), shifts, 0, NO_PADDING, None)


FARTHEST = 1e15
"""A cutoff beyond all distances, in any unit, whose square is a number of float32."""


def reach_of_all_pairs(positions: torch.Tensor) -> float:
    """A cutoff beyond all distances between atoms: a short one if positions can be read, which is faster on a GPU.

    Under vmap it is beyond those of all slices, whose pairs are found together.
    """
    if not may_read() or not may_read(x := slices_of(positions).detach(), wait=True):
        return FARTHEST
    extent = (x.amax(1) - x.amin(1)).norm(dim=1).amax(0, keepdim=True).tolist()[0] if x.numel() else 0.0
    return 1.001 * extent + 1.0


def _pairs_of_valid_systems(search: Search) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`found_pairs` in spite of bad values: atoms of their systems have only themselves in an image that gives NaN."""
    count, batch_idx = neighbor_matrix(*search, NO_PADDING, 0)[1], search.batch_idx
    bad = count == NOT_FINITE
    bad = bad.any().expand(bad.shape) if batch_idx is None else torch.isin(batch_idx, batch_idx[bad])
    width = max(1, int(count[~bad].amax())) if not bad.all() else 1
    matrix, _, shifts, _ = neighbor_matrix(*search, NO_PADDING, width)
    matrix[bad], shifts[bad, 0] = NO_PADDING, NOT_FINITE
    atoms = torch.arange(len(matrix), dtype=torch.int32, device=matrix.device)
    matrix[bad, 0] = atoms[bad]
    listed = matrix != NO_PADDING
    first = atoms.unsqueeze(1).expand(matrix.shape)[listed]
    return torch.stack([first, matrix[listed]]), row_pointers(first, len(matrix)), shifts[listed]


def _expanded(rows: Rows, n_atoms: int, half_list: bool, check: bool) -> Rows:
    """A full list of the pairs in ``rows``, without padding if values are read."""
    pointers, neighbors, shifts, width, padding, first = rows
    if first is None:
        first = torch.arange(n_atoms, dtype=torch.int32, device=neighbors.device).repeat_interleave(width)
    if check:
        refuse_in_capture(neighbors, "leave out `check`")
    readable = may_read(*rows)
    if not check and (not readable or differ_in_replays(first, neighbors)):
        full = _both_directions(rows._replace(first=first), n_atoms)
        # a replay looks for pairs that are listed twice, and then leaves the call, which raises
        if not readable or not read_flag((full.neighbors == n_atoms).any()):
            return full
    is_full = pointers is not None and read_number(pointers[-1]) >= len(neighbors)
    places = (neighbors != padding if is_full else listed_slots(rows)).nonzero().squeeze(1)
    pairs = torch.stack([first, neighbors]).index_select(1, places)
    shifts = None if shifts is None else shifts.index_select(0, places)
    ptr = row_pointers(pairs[0], n_atoms)
    if half_list:
        pairs, ptr, *images = half_to_full(pairs, ptr, shifts)
        shifts = images[0] if images else None
    if check:
        check_full_list(pairs, ptr, shifts)
    return Rows(ptr, pairs[1].contiguous(), shifts, 0, NO_PADDING, pairs[0].contiguous())


def _both_directions(rows: Rows, n_atoms: int) -> Rows:
    """A full list of the pairs in a half list, including its padding, so that nothing is read.

    A pair that is listed twice or in both directions gets an invalid neighbor, for which kernels give NaN.
    """
    pointers, neighbors, shifts, _, padding, first = rows
    assert first is not None
    absent = NO_PADDING + 1
    is_pair, unused = neighbors != padding, unused_slots(pointers, first)
    if unused is not None:  # also at the end of the sorted list
        unused = unused.squeeze(0)
        is_pair, first = is_pair & ~unused, torch.where(unused, n_atoms + 1, first)
    is_proper = direction_of(torch.stack([first, neighbors]), shifts) != 0
    has_reverse = is_pair & (neighbors >= 0) & (neighbors < n_atoms)
    there = torch.where(is_pair, torch.where(is_proper, neighbors, n_atoms), absent)
    # padding stays in the row of its atom; otherwise one row would collect all padding
    row = torch.cat([first, torch.where(has_reverse, neighbors, first)])
    column = torch.cat([there, torch.where(has_reverse, first, absent)])
    images = None if shifts is None else torch.cat([shifts, -shifts])
    last = torch.where(column < 0, n_atoms + 1, column.clamp(max=n_atoms)).to(torch.int64)
    order = order_of_pairs(row.to(torch.int64).clamp(max=n_atoms + 1), last, images, n_atoms + 2)
    row, column = row.index_select(0, order), column.index_select(0, order)
    images = None if images is None else images.index_select(0, order)
    is_repeated = repeats(torch.stack([row, column]), images) & (column != absent)
    column = torch.where(is_repeated, n_atoms, column)
    pointers = row_pointers(row, n_atoms)
    if unused is not None:
        row = torch.where(unused.repeat(2).index_select(0, order), NO_PADDING, row)
    return Rows(pointers, column, images, 0, absent, row)


def listed_slots(rows: Rows) -> torch.Tensor:
    """Which slots (n_slots,) hold pairs, and are neither padding nor room at the end of a list."""
    unused = unused_slots(rows.pointers, rows.neighbors if rows.first is None else rows.first)
    is_pair = rows.neighbors != rows.padding
    return is_pair if unused is None else is_pair & ~unused.squeeze(0)


def unused_slots(pointers: torch.Tensor | None, entries: torch.Tensor) -> torch.Tensor | None:
    """Slots (1 or n_slices, n_slots) of lists that have room for more pairs; None for a matrix, and without slots.

    ``entries`` are the first atoms of pairs, or the neighbors if these are not known. The one after the last pair is
    `NO_PADDING`, others may have any values.
    """
    n_slots = entries.shape[-1]
    if pointers is None or n_slots == 0:
        return None
    end = pointers[..., -1].flatten().unsqueeze(1).to(torch.int64)
    entries = entries.unsqueeze(0).flatten(0, -2)
    entries = entries.expand(max(len(end), len(entries)), n_slots)
    after = entries.gather(1, end.clamp(0, n_slots - 1).expand(len(entries), 1))
    return (torch.arange(n_slots, device=end.device) >= end) & (after == NO_PADDING)


def check_reach(
    name: str,
    rows: Rows,
    positions: torch.Tensor,
    cutoff: float,
    cell: torch.Tensor | None,
    batch_idx: torch.Tensor | None,
    pbc: torch.Tensor | None,
) -> None:
    """Raise unless a list without padding, called ``name``, has as many pairs within ``cutoff`` as a search finds."""
    # in float64, as in the search
    positions = values_of(positions).double()
    cell = None if cell is None else values_of(cell).double()
    near = cutoff * (1.0 - EDGE)

    _, listed = pair_distances(rows, positions, cell, batch_idx)
    _, found = pair_distances(build_rows(positions, cutoff, cell, batch_idx, pbc), positions, cell, batch_idx)
    n_listed, n_found = read_number((listed < near).sum()), read_number((found < near).sum())
    if n_listed == n_found:
        return
    reach = f"its farthest pair is at {float(listed.max()):g}" if listed.numel() else "it is empty"
    advice = f"{reach}, and it must reach to the cutoff" if n_listed < n_found else "some pairs are not neighbors"
    if pbc is None and cell is not None:
        advice += "; give `pbc` as well if an axis is open"
    raise ValueError(f"`{name}` has {n_listed} pairs within `cutoff` = {cutoff:g}, but there are {n_found}: {advice}")


def pair_distances(
    rows: Rows, positions: torch.Tensor, cell: torch.Tensor | None, batch_idx: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """First atom and distance (n_pairs,) of each pair of a list without padding."""
    first = row_indices(rows, positions.shape[0]).to(torch.int32)
    system = None if cell is None or cell.shape[0] == 1 else batch_idx
    pairs = Pairs(cell, system, None, first, rows.neighbors, None if cell is None else rows.shifts)
    return first, distances_and_vectors(positions, pairs)[0]


def row_indices(rows: Rows, n_atoms: int) -> torch.Tensor:
    """Row index (n_slots,), int64, of each slot: the number of its atom; room at the end belongs to the last row."""
    atoms = torch.arange(n_atoms, device=rows.neighbors.device)
    if rows.pointers is None:
        return atoms.repeat_interleave(rows.width)
    n_slots = rows.neighbors.shape[0]
    # of pointers as they should be: from 0, in any case
    begins = torch.cat([rows.pointers.new_zeros(1), rows.pointers[1:]])[:n_atoms]
    lengths = torch.diff(begins, append=rows.pointers.new_full((1,), n_slots))
    return atoms.repeat_interleave(lengths, output_size=n_slots)


def _int32(tensor: torch.Tensor) -> torch.Tensor:
    return int32_of(tensor).contiguous()


@warp_custom_op(
    "nvalchemiops::inspect_rows",
    outputs=[
        OutputSpec("fault", wp.int32, lambda positions, *_: (positions.shape[0],)),
        OutputSpec("balance", wp.int32, lambda positions, *_: (positions.shape[0],)),
        OutputSpec("reach", wp.float64, lambda positions, *_: (positions.shape[0],)),
    ],
    grad_arrays=(),
    backward="none",
)
def _inspect(
    positions: torch.Tensor,
    cell: torch.Tensor,
    batch_idx: torch.Tensor,
    row_begin: torch.Tensor | None,
    neighbors: torch.Tensor,
    shifts: torch.Tensor,
    width: int,
    padding: int,
    first: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n_atoms = positions.shape[0]
    report = (batch_idx.new_empty(n_atoms), batch_idx.new_empty(n_atoms), positions.new_empty(n_atoms))
    inputs = [positions, cell, batch_idx, row_begin, neighbors, shifts, width, padding, first]
    launch(core.inspect_rows(), n_atoms, inputs, report)
    return report


def inspect_rows(rows: Rows, positions: torch.Tensor, cell: torch.Tensor, batch_idx: torch.Tensor) -> torch.Tensor:
    """Largest distance (n_slices, n_atoms) in each row of a periodic list. Reads values on the host.

    Under vmap there are several slices. Warns if the list does not hold both directions of each pair, and raises if an
    index is out of range or in another system, or pairs are not sorted by atom.
    """
    wide = positions.detach().double(), cell.detach().double()
    assert rows.shifts is not None
    fault, balance, reach = _inspect(*wide, batch_idx, *rows)
    fault, balance, reach = (slices_of(report) for report in (fault, balance, reach))
    worst = read_number(fault.max()) if fault.numel() else 0
    if worst == core.OUT_OF_RANGE:
        raise ValuesError(
            f"`neighbor_list` or `neighbor_matrix`: indices must be in 0 .. {batch_idx.shape[0] - 1}, or for padding "
            "of a matrix equal to `mask_value`"
        )
    if worst == core.OTHER_SYSTEM:
        raise ValuesError("`batch_idx`: the neighbor list joins atoms of different systems")
    if worst == core.UNSORTED:
        raise ValuesError(
            "`neighbor_list` must be sorted by its first row, and `neighbor_ptr` must fit that row" + core.HOW_TO_SORT
        )
    if read_number((balance.sum(1) != 0).any()):
        notify(
            "`neighbor_list` or `neighbor_matrix` is not full: a sum needs both (i, j, S) and (j, i, -S) of each pair "
            "(half_fill=False, and enough columns). The pairs in it are summed as they are; if it holds each pair "
            "once, give half_list=True",
            NeighborListWarning,
        )
    return reach
