"""Conversions between formats of neighbor lists, and checks of lists.

Everything here is plain torch: it compiles and runs on any device. A *matrix* has one row of ``width`` slots per atom,
and the first ``num_neighbors[i]`` slots of row i hold its neighbors. A *list* has one column (i, j) per pair, sorted by
i, and ``neighbor_ptr[i]`` is the first pair of atom i. ``shifts`` hold the image S of each neighbor, which is at
``r_ij = x_j - x_i + S @ cell``.

In eager mode bad *values* of arguments raise, at the cost of one wait for a GPU. Inside ``torch.compile`` and during
the capture of a CUDA graph no values can be read, and these checks are left out.
"""

from collections.abc import Sequence
from typing import Any

import torch

from nvalchemiops.arguments import ValuesError
from nvalchemiops.neighbors import NeighborOverflowError
from nvalchemiops.neighbors.rows import HOW_TO_SORT
from nvalchemiops.neighbors.search import NOT_FINITE
from nvalchemiops.notices import NeighborListWarning, notify
from nvalchemiops.torch import checks
from nvalchemiops.torch.neighbors.pairs import Pairs, list_geometry, matrix_geometry, slot_mask
from nvalchemiops.torch.operators.segments import row_pointers
from nvalchemiops.torch.runtime.context import ValuesNeededError, may_read, refuse_in_capture
from nvalchemiops.torch.runtime.recorder import read_number

__all__ = [
    "check_full_list",
    "full_to_half",
    "get_neighbor_list_from_neighbor_matrix",
    "get_neighbor_matrix_from_neighbor_list",
    "half_to_full",
    "list_geometry",
    "matrix_geometry",
    "transpose_order",
]

NO_NEIGHBOR = -1
"""A padding that is never the index of an atom."""


# -- matrix and list ------------------------------------------------------------------------------


def get_neighbor_list_from_neighbor_matrix(
    neighbor_matrix: torch.Tensor,
    num_neighbors: torch.Tensor,
    neighbor_shift_matrix: torch.Tensor | None = None,
    fill_value: int = NO_NEIGHBOR,
) -> tuple[torch.Tensor, ...]:
    """The pairs of a neighbor matrix as a list, in the order of the rows.

    A slot is a pair if it is before the count of its row *and* differs from ``fill_value``. Entries after the count,
    left over from an earlier build, are never pairs. A slot before the count that equals ``fill_value`` is padding, as
    everywhere in this library, even if it is the index of an atom. ``neighbor_ptr`` counts the returned pairs.

    Parameters
    ----------
    neighbor_matrix : (n_atoms, width) int32 tensor
    num_neighbors : (n_atoms,) int32 tensor
    neighbor_shift_matrix : (n_atoms, width, 3) int32 tensor, optional
    fill_value : int, optional
        The padding of ``neighbor_matrix``. By default only the counts mark padding.

    Returns
    -------
    neighbor_list : (2, n_pairs) int32 tensor
        i and j of each pair, sorted by i.
    neighbor_ptr : (n_atoms + 1,) int32 tensor
        First pair of each atom, then n_pairs.
    shifts : (n_pairs, 3) int32 tensor
        Returned only with ``neighbor_shift_matrix``.

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message.
    NeighborOverflowError
        A count is larger than the width: pairs are missing in the matrix. Compiled code does not raise, and returns the
        pairs in the matrix.

        An atom without known neighbors (2**31 - 1, see ``check`` of `neighbor_list`) is a ValueError. In compiled code
        its row has the slot that says so, or none.

    Notes
    -----
    The number of pairs depends on the values, so the function waits for a GPU. To compile it with ``fullgraph=True``,
    set ``torch._dynamo.config.capture_dynamic_output_shape_ops``.
    """
    checks.check_index("neighbor_matrix", neighbor_matrix, None, (None, None))
    fill_value = checks.check_int("fill_value", fill_value)
    n_atoms, width = neighbor_matrix.shape
    checks.check_index("num_neighbors", num_neighbors, neighbor_matrix, (n_atoms,))
    if neighbor_shift_matrix is not None:
        checks.check_index("neighbor_shift_matrix", neighbor_shift_matrix, neighbor_matrix, (n_atoms, width, 3))
    if n_atoms and may_read(num_neighbors, wait=True):
        fewest, most = torch.stack(torch.aminmax(num_neighbors)).tolist()
        if most == NOT_FINITE:
            raise ValuesError(
                "`num_neighbors` has the entry 2**31 - 1, of an atom whose neighbors are not known: its position is "
                "not finite, its cell is unusable, or its system does not exist"
            )
        if most > width:
            raise NeighborOverflowError(width, most)
        if fewest < 0:
            raise ValueError(f"`num_neighbors` has the negative entry {fewest}")
    return pairs_of_matrix(neighbor_matrix, num_neighbors, neighbor_shift_matrix, fill_value)


def pairs_of_matrix(
    neighbor_matrix: torch.Tensor,
    num_neighbors: torch.Tensor,
    neighbor_shift_matrix: torch.Tensor | None = None,
    fill_value: int = NO_NEIGHBOR,
) -> tuple[torch.Tensor, ...]:
    """`get_neighbor_list_from_neighbor_matrix` of checked arguments, with marks of atoms without known neighbors."""
    n_atoms, width = neighbor_matrix.shape
    refuse_in_capture(neighbor_matrix, "give the matrix itself, or make the list before")
    slots = Pairs(None, None, None, None, neighbor_matrix, neighbor_shift_matrix, num_neighbors, width, fill_value)
    place = slots.occupied(n_atoms).reshape(-1).nonzero().squeeze(1)
    i = torch.div(place, max(width, 1), rounding_mode="floor").to(torch.int32)
    j = neighbor_matrix.reshape(-1).index_select(0, place).to(torch.int32)
    pairs, ptr = torch.stack([i, j]), row_pointers(i, n_atoms)
    if neighbor_shift_matrix is None:
        return pairs, ptr
    return pairs, ptr, neighbor_shift_matrix.reshape(-1, 3).index_select(0, place).to(torch.int32)


def get_neighbor_matrix_from_neighbor_list(
    neighbor_list: torch.Tensor,
    neighbor_ptr: torch.Tensor,
    shifts: torch.Tensor | None = None,
    max_neighbors: int | None = None,
    fill_value: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """The pairs of a list as a neighbor matrix, in the order of the list.

    Parameters
    ----------
    neighbor_list, neighbor_ptr, shifts
        As for `half_to_full`.
    max_neighbors : int, optional
        Width of the matrix; by default the length of the longest row, which waits for a GPU. If a row is longer than a
        given width, the matrix is as wide as this row, and a `NeighborListWarning` is issued.
    fill_value : int, optional
        Padding value; n_atoms by default.

    Returns
    -------
    neighbor_matrix : (n_atoms, width) int32 tensor
    num_neighbors : (n_atoms,) int32 tensor
    shifts : (n_atoms, width, 3) int32 tensor
        Zero in padding. Returned only with ``shifts``.

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message. Compiled code also requires ``max_neighbors``; it cuts longer rows, but
        not their counts.
    """
    n_atoms, n_pairs = _check_list(neighbor_list, neighbor_ptr, shifts)
    counts = neighbor_ptr.diff().to(torch.int32)
    if max_neighbors is not None:
        max_neighbors = checks.check_count("max_neighbors", max_neighbors)
    if may_read(neighbor_list, neighbor_ptr, wait=True):
        _check_rows(neighbor_list, neighbor_ptr)
        longest = read_number(counts.max()) if n_atoms else 0
        width = longest if max_neighbors is None else max(longest, max_neighbors)
        if max_neighbors is not None and longest > max_neighbors:
            notify(
                f"`max_neighbors` = {max_neighbors}, but an atom has {longest} neighbors: the matrix returned has "
                f"{width} columns",
                NeighborListWarning,
                kind="narrow matrix of a list",
            )
    elif max_neighbors is None:
        raise ValuesNeededError("`max_neighbors` is needed where values cannot be read: it is the width of the matrix")
    else:
        width = max_neighbors

    # gather form: each slot reads its pair, and padding reads one entry past the end of the list
    column = torch.arange(width, dtype=neighbor_ptr.dtype, device=neighbor_ptr.device)
    place = torch.where(slot_mask(counts, width), neighbor_ptr[:-1].unsqueeze(1) + column, n_pairs).reshape(-1)
    padding = n_atoms if fill_value is None else checks.check_int("fill_value", fill_value)
    j = neighbor_list[1].to(torch.int32)
    matrix = torch.cat([j, j.new_full((1,), padding)]).index_select(0, place).reshape(n_atoms, width)
    if shifts is None:
        return matrix, counts
    images = torch.cat([shifts, shifts.new_zeros(1, 3)]).to(torch.int32)
    return matrix, counts, images.index_select(0, place).reshape(n_atoms, width, 3)


# -- half and full --------------------------------------------------------------------------------


def half_to_full(
    neighbor_list: torch.Tensor, neighbor_ptr: torch.Tensor, shifts: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """Both directions of each pair of a half list.

    A half list holds each pair once, as (i, j, S) or (j, i, -S). The full list holds both. Its rows are sorted by j for
    any order of the half list, and then by S if its entries are small.

    Parameters
    ----------
    neighbor_list : (2, n_pairs) int32 tensor
        i and j of each pair, sorted by i.
    neighbor_ptr : (n_atoms + 1,) int32 tensor
        First pair of each atom, then n_pairs.
    shifts : (n_pairs, 3) int32 tensor, optional

    Returns
    -------
    neighbor_list : (2, 2 n_pairs) int32 tensor
    neighbor_ptr : (n_atoms + 1,) int32 tensor
    shifts : (2 n_pairs, 3) int32 tensor
        Left out if not given.

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message; a pair that is listed twice, or in both directions as in a full list, or
        that joins an atom with itself.
    """
    n_atoms, _ = _check_list(neighbor_list, neighbor_ptr, shifts)
    reads = may_read(neighbor_list, neighbor_ptr, shifts, wait=True)
    fault = " is not a half list: the pair (i, j, S) = {} "
    if reads:
        _check_entries(neighbor_list, neighbor_ptr)
        _raise_at(direction_of(neighbor_list, shifts) == 0, neighbor_list, shifts, fault + "joins an atom with itself")

    i, j = neighbor_list.to(torch.int64).unbind(0)
    row, column = torch.cat([i, j]), torch.cat([j, i])
    images = None if shifts is None else torch.cat([shifts, -shifts]).to(torch.int32)
    order = order_of_pairs(row, column, images, n_atoms)
    pairs = torch.stack([row, column]).to(torch.int32).index_select(1, order)
    images = None if images is None else images.index_select(0, order)
    if reads:
        advice = "is listed twice or in both directions. A full list needs no expanding"
        _raise_at(repeats(pairs, images), pairs, images, fault + advice)
    ptr = row_pointers(pairs[0], n_atoms)
    return (pairs, ptr) if images is None else (pairs, ptr, images)


def full_to_half(
    neighbor_list: torch.Tensor, neighbor_ptr: torch.Tensor, shifts: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """One direction of each pair of a full list: the one with i < j, or i = j and the first non-zero of S positive.

    Parameters
    ----------
    neighbor_list, neighbor_ptr, shifts
        As for `half_to_full`.

    Returns
    -------
    neighbor_list : (2, n_pairs / 2) int32 tensor
    neighbor_ptr : (n_atoms + 1,) int32 tensor
    shifts : (n_pairs / 2, 3) int32 tensor
        Left out if not given.

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message; or a list that is not full, since it has different numbers of pairs in the
        two directions. Whether these are the same pairs is checked by `check_full_list`, at more cost.
    """
    n_atoms, n_pairs = _check_list(neighbor_list, neighbor_ptr, shifts)
    direction = direction_of(neighbor_list, shifts)
    if may_read(neighbor_list, neighbor_ptr, shifts, wait=True):
        _check_entries(neighbor_list, neighbor_ptr)
        there, back = torch.stack([(direction > 0).sum(), (direction < 0).sum()]).tolist()
        if there != back or there + back != n_pairs:
            raise ValueError(
                f"`neighbor_list` is not a full list: {there} pairs have the direction that a half list keeps, {back} "
                f"the other one, and {n_pairs - there - back} join an atom with itself. Build it with half_fill=False"
            )
    # half of a full list has a static size, unlike the result of `nonzero`
    kept = (direction > 0).nonzero_static(size=n_pairs // 2).squeeze(1)
    pairs = neighbor_list.index_select(1, kept).to(torch.int32)
    ptr = row_pointers(pairs[0], n_atoms)
    if shifts is None:
        return pairs, ptr
    return pairs, ptr, shifts.index_select(0, kept).to(torch.int32)


def transpose_order(neighbor_list: torch.Tensor, n_atoms: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The order in which the pairs of a list are sorted by their second atom.

    Use it to sum values of pairs at their second atoms without atomic additions:
    ``torch.segment_reduce(values[order], "sum", offsets=ptr)`` gives the same sums for each j as ``index_add``.

    Parameters
    ----------
    neighbor_list : (2, n_pairs) int32 tensor
        i and j of each pair, in any order.
    n_atoms : int

    Returns
    -------
    order : (n_pairs,) int64 tensor
        ``neighbor_list[:, order]`` is sorted by j, pairs with the same j in the order of the list.
    ptr : (n_atoms + 1,) int32 tensor
        First of these pairs for each j, then n_pairs.

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message; a j that is not the index of an atom.
    """
    checks.check_index("neighbor_list", neighbor_list, None, (2, None))
    n_atoms = checks.check_count("n_atoms", n_atoms)
    j, order = torch.sort(neighbor_list[1], stable=True)
    if may_read(j, wait=True) and j.shape[0] and (read_number(j[0]) < 0 or read_number(j[-1]) >= n_atoms):
        raise ValueError(f"`neighbor_list`: j must be in 0 .. {n_atoms - 1}, got {int(j[0])} .. {int(j[-1])}")
    return order, row_pointers(j.to(torch.int32), n_atoms)


def check_full_list(
    neighbor_list: torch.Tensor | None = None,
    neighbor_ptr: torch.Tensor | None = None,
    shifts: torch.Tensor | None = None,
    *,
    neighbor_matrix: torch.Tensor | None = None,
    num_neighbors: torch.Tensor | None = None,
    neighbor_matrix_shifts: torch.Tensor | None = None,
    fill_value: int = NO_NEIGHBOR,
) -> None:
    """Raise unless a list or matrix is full: it holds each (i, j, S) once, and (j, i, -S) once.

    A gather-form kernel, in which an atom reads its own row and writes its own result, is silently wrong on any other
    list. This check is for debugging: it sorts all pairs and waits for a GPU. It does not use positions, so it cannot
    detect pairs that are missing in *both* directions.

    Parameters
    ----------
    neighbor_list, neighbor_ptr, shifts
        As for `half_to_full`.
    neighbor_matrix, num_neighbors, neighbor_matrix_shifts, fill_value : optional
        A matrix instead of a list, as for `get_neighbor_list_from_neighbor_matrix`.

    Raises
    ------
    ValueError
        An index out of range, pairs not sorted by i, inconsistent pointers, an atom that is its own neighbor at shift
        zero, a pair listed twice, or a pair without its reverse. The message names the first bad pair.
    TypeError
        A bad dtype.
    NeighborOverflowError
        A count is larger than the width of the matrix.
    """
    if neighbor_matrix is not None:
        if neighbor_list is not None or neighbor_ptr is not None or shifts is not None:
            raise ValueError("`neighbor_matrix` and `neighbor_list` are both given; give one of them")
        if num_neighbors is None:
            raise ValueError("`num_neighbors` is needed with `neighbor_matrix`")
        neighbor_list, neighbor_ptr, *images = get_neighbor_list_from_neighbor_matrix(
            neighbor_matrix, num_neighbors, neighbor_matrix_shifts, fill_value
        )
        shifts = images[0] if images else None
    if neighbor_list is None or neighbor_ptr is None:
        raise ValueError("`neighbor_list` and `neighbor_ptr`, or `neighbor_matrix` and `num_neighbors`, are needed")
    _, n_pairs = _check_list(neighbor_list, neighbor_ptr, shifts)
    refuse_in_capture(neighbor_list, "check lists before")
    _check_entries(neighbor_list, neighbor_ptr)
    if n_pairs == 0:
        return
    direction = direction_of(neighbor_list, shifts)
    pair = ": the pair (i, j, S) = {} "
    _raise_at(direction == 0, neighbor_list, shifts, pair + "joins an atom with itself, without an image: leave it out")

    i, j = neighbor_list.to(torch.int64)
    images_of = torch.zeros(n_pairs, 3, dtype=torch.int64, device=i.device) if shifts is None else shifts.long()
    there = (i, j, *images_of.unbind(1))
    back = (j, i, *(-images_of).unbind(1))
    number = _number_of_each([torch.cat(both) for both in zip(there, back)])
    times_there, times_back = number[:n_pairs].bincount(minlength=2 * n_pairs).index_select(0, number).chunk(2)
    advice = "is listed more than once: do not append images or rows to a full list"
    _raise_at(times_there > 1, neighbor_list, shifts, pair + advice)
    advice = "has no (j, i, -S), so the list is not full: build it with half_fill=False, or use `half_to_full`"
    _raise_at(times_back == 0, neighbor_list, shifts, pair + advice)


# -- helpers --------------------------------------------------------------------------------------


def direction_of(neighbor_list: torch.Tensor, shifts: torch.Tensor | None) -> torch.Tensor:
    """+1 for the direction of a pair that a half list keeps, -1 for the other one, 0 for an atom paired with itself."""
    i, j = neighbor_list.unbind(0)
    sign = (j > i).to(torch.int8) - (j < i).to(torch.int8)
    if shifts is not None:
        for component in shifts.unbind(1):
            sign = torch.where(sign == 0, component.sign().to(torch.int8), sign)
    return sign


def order_of_pairs(row: torch.Tensor, column: torch.Tensor, images: torch.Tensor | None, n: int) -> torch.Tensor:
    """The order of pairs by row, then column, then image, so that equal pairs follow each other.

    Rows and columns are int64 numbers below ``n``. Images share what is left of 64 bits: those at the ends of the range
    are not told apart. Without room for the nearest images they are sorted on their own, but for compiled graphs, which
    would be compiled for these numbers of atoms.
    """
    place = row * n + column
    if images is not None:
        left = (2**63 - 1) // ((n + 1) * n + 1)
        x, y, z = images.to(torch.int64).unbind(1)
        image = ((x * 257) + y) * 257 + z
        if may_read() and left < 3 * 257**2:
            order = torch.sort(image, stable=True).indices
            return order.index_select(0, torch.sort(place.index_select(0, order), stable=True).indices)
        place = place * left + (image + left // 2).clamp(0, left - 1)
    return torch.sort(place, stable=True).indices


def repeats(pairs: torch.Tensor, images: torch.Tensor | None) -> torch.Tensor:
    """Whether each of some sorted pairs equals the one before."""
    same = (pairs[:, 1:] == pairs[:, :-1]).all(0)
    if images is not None:
        same = same & (images[1:] == images[:-1]).all(1)
    return torch.cat([same.new_zeros(min(pairs.shape[1], 1)), same])


def _number_of_each(keys: Sequence[torch.Tensor]) -> torch.Tensor:
    """A number for each tuple of ``keys``, equal where the tuples are equal."""
    order = torch.arange(keys[0].shape[0], device=keys[0].device)
    for key in reversed(keys):
        order = order.index_select(0, torch.sort(key.index_select(0, order), stable=True).indices)
    table = torch.stack([key.index_select(0, order) for key in keys])
    new = (table[:, 1:] != table[:, :-1]).any(0)
    number = torch.zeros_like(order)
    number[order[1:]] = new.cumsum(0)
    return number


def _raise_at(wrong: torch.Tensor, neighbor_list: torch.Tensor, shifts: torch.Tensor | None, fault: str) -> None:
    """Raise if a pair is wrong; the first one, (i, j, S), is formatted into ``fault``."""
    if wrong.numel() and read_number(wrong.any()):
        place = int(wrong.to(torch.uint8).argmax())
        image = (0, 0, 0) if shifts is None else tuple(shifts[place].tolist())
        raise ValueError("`neighbor_list`" + fault.format((*neighbor_list[:, place].tolist(), image)))


# -- checks ---------------------------------------------------------------------------------------


def _check_list(neighbor_list: Any, neighbor_ptr: Any, shifts: Any) -> tuple[int, int]:
    """Numbers of atoms and pairs; raise unless the shapes fit."""
    checks.check_index("neighbor_list", neighbor_list, None, (2, None))
    checks.check_index("neighbor_ptr", neighbor_ptr, neighbor_list, (None,))
    n_pairs = neighbor_list.shape[1]
    if neighbor_ptr.shape[0] < 1:
        raise ValueError("`neighbor_ptr` must have shape (n_atoms + 1,), got (0,)")
    if shifts is not None:
        checks.check_index("shifts", shifts, neighbor_list, (n_pairs, 3))
    return neighbor_ptr.shape[0] - 1, n_pairs


def _check_rows(neighbor_list: torch.Tensor, neighbor_ptr: torch.Tensor) -> None:
    """Raise unless the pointers rise from 0 to n_pairs and agree with the first atoms of the pairs."""
    n_pairs = neighbor_list.shape[1]
    edges = (neighbor_ptr[0] == 0) & (neighbor_ptr[-1] == n_pairs) & (neighbor_ptr.diff() >= 0).all()
    place = torch.arange(n_pairs, dtype=neighbor_ptr.dtype, device=neighbor_ptr.device)
    row = torch.searchsorted(neighbor_ptr[1:].contiguous(), place, right=True)
    fits, sorted_by_i = torch.stack([edges, (row == neighbor_list[0]).all()]).tolist()
    if not fits:
        raise ValueError(f"`neighbor_ptr` must rise from 0 to n_pairs = {n_pairs}, got {neighbor_ptr.tolist()[:20]}")
    if not sorted_by_i:
        first = int((row != neighbor_list[0]).to(torch.uint8).argmax())
        i, j = neighbor_list[:, first].tolist()
        raise ValueError(
            f"`neighbor_list` must be sorted by its first row, as `neighbor_ptr` says: pair {first}, (i, j) = "
            f"({i}, {j}), is in the row of atom {int(row[first])}" + HOW_TO_SORT
        )


def _check_entries(neighbor_list: torch.Tensor, neighbor_ptr: torch.Tensor) -> None:
    """Raise like `_check_rows`, and also for indices out of range."""
    _check_rows(neighbor_list, neighbor_ptr)
    n_atoms = neighbor_ptr.shape[0] - 1
    wrong = (neighbor_list < 0) | (neighbor_list >= n_atoms)
    if wrong.numel() and read_number(wrong.any()):
        first = int(wrong.any(0).to(torch.uint8).argmax())
        i, j = neighbor_list[:, first].tolist()
        raise ValueError(
            f"`neighbor_list`: pair {first}, (i, j) = ({i}, {j}), names an atom outside of 0 .. {n_atoms - 1}"
        )
