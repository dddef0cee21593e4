"""The driver of public neighbor lists: it checks arguments once, searches, and brings results into the requested form.

Callers with checked arguments, such as `rows.build_rows`, call the ops of `search` directly.
"""

from typing import Any, NamedTuple

import torch

from nvalchemiops.compat.method_names import search_method
from nvalchemiops.neighbors.grid import AUTOMATIC, BINNED, NAIVE
from nvalchemiops.neighbors.neighbor_utils import grown_width
from nvalchemiops.notices import NeighborListWarning, notify
from nvalchemiops.torch import checks
from nvalchemiops.torch.neighbors import faults
from nvalchemiops.torch.neighbors import search as ops
from nvalchemiops.torch.neighbors.formats import pairs_of_matrix
from nvalchemiops.torch.neighbors.pairs import Pairs, distances_and_vectors
from nvalchemiops.torch.neighbors.search import Search
from nvalchemiops.torch.operators.segments import batch_idx_of
from nvalchemiops.torch.runtime.context import all_values_of, is_mapped, may_read, refuse_in_capture
from nvalchemiops.torch.runtime.memory import is_out_of_memory, new_empty

Tensors = tuple[torch.Tensor, ...]


class Systems(NamedTuple):
    """Atoms, the data of their systems, and the atoms that have rows, as in `neighbor_list`."""

    positions: torch.Tensor
    cell: torch.Tensor | None = None
    pbc: Any = None  # as given, in a checked system a tensor or None
    batch_idx: torch.Tensor | None = None
    batch_ptr: torch.Tensor | None = None
    target_indices: torch.Tensor | None = None
    rebuild_flags: torch.Tensor | None = None


class Form(NamedTuple):
    """Form of the results, and the choice of neighbors, as in `neighbor_list`."""

    half_fill: bool = False
    fill_value: int | None = None
    return_neighbor_list: bool = False
    return_vectors: bool = False
    return_distances: bool = False
    check: bool = True
    nearest: int | None = None
    ties: str = "keep"
    tie_tolerance: float | None = None
    symmetric: bool = False


class Room(NamedTuple):
    """Width of the results, or memory for them, if the caller gives any; as in `neighbor_list`."""

    max_neighbors: int | None = None
    neighbor_matrix: torch.Tensor | None = None
    neighbor_matrix_shifts: torch.Tensor | None = None
    num_neighbors: torch.Tensor | None = None
    neighbor_vectors: torch.Tensor | None = None
    neighbor_distances: torch.Tensor | None = None


ZERO_CUTOFF = 1e-200
"""Replaces a cutoff of zero in a search: its square is zero, so that even equal positions are not a pair."""


TIE_TOLERANCE = 0.01
"""Neighbors whose squared distance exceeds that of the last nearest neighbor by this much are tied with it. The value
is fairchem's "degeneracy tolerance", there in squared angstrom, here in the squared unit of the positions."""


def method_number(method: str | None) -> int:
    """The method of the search kernels; raise if `neighbor_list` does not know this name."""
    if method is None:
        return AUTOMATIC
    return NAIVE if search_method(method) == "naive" else BINNED


def build_two(
    systems: Systems, cutoffs: dict[str, float], form: Form, room1: Room, room2: Room, method: int
) -> Tensors:
    """The results of `build` for each of two cutoffs in turn; the names of the cutoffs are for messages.

    The second matrix has at least the width asked for the first unless its own width or memory is given, as in
    nvalchemi-toolkit-ops.
    """
    results: Tensors = ()
    for suffix, room, (name, cutoff) in zip("12", (room1, room2), cutoffs.items()):
        least = room1.max_neighbors if suffix == "2" else None
        results += build(systems, cutoff, form, room, method, suffix, name, least=least or 0)
    return results


def build(
    systems: Systems,
    cutoff: float,
    form: Form,
    room: Room,
    method: int,
    suffix: str = "",
    cutoff_name: str = "cutoff",
    silent: bool = False,
    least: int = 0,
) -> Tensors:
    """One list, as `neighbor_list` describes it, after all checks.

    ``suffix`` ends the names of the arguments for ``room`` in messages. With ``silent`` the width is a first guess: no
    warning is issued if it is too small. ``least`` is a lower bound of a width that is not given, where values can be
    read.
    """
    for name in ("half_fill", "return_neighbor_list", "return_vectors", "return_distances", "check"):
        checks.check_flag(name, getattr(form, name))
    positions, cell, pbc, batch_idx, batch_ptr, target_indices, rebuild_flags = systems
    checks.check_positions(positions, finite=False)
    cutoff = checks.check_not_negative(cutoff_name, cutoff) or ZERO_CUTOFF
    cell, pbc, n_systems = checks.check_systems(positions, cell, pbc, batch_idx, batch_ptr)
    if target_indices is not None:
        checks.check_index("target_indices", target_indices, positions, (None,))
    n_rows = (positions if target_indices is None else target_indices).shape[0]
    width, in_memory = _width(n_rows, form, room, suffix, positions, cell is not None)
    is_default = form.nearest is None and form.ties == "keep" and form.tie_tolerance is None and form.symmetric is False
    chosen = (0, 0.0, False) if is_default else _check_selection(form)
    if chosen[0] and width is None and form.ties == "index" and not (chosen[2] or form.return_neighbor_list):
        width = chosen[0]
        faults.check_size(n_rows * width, "nearest")
    if rebuild_flags is not None:
        rebuild_flags = checks.check_flags(rebuild_flags, positions, n_systems)
        for name in ("neighbor_matrix", "num_neighbors", *(["neighbor_matrix_shifts"] if cell is not None else [])):
            if getattr(room, name) is None:
                raise ValueError(f"`rebuild_flags` needs `{name}{suffix}`, whose rows it keeps")
    fill_value = positions.shape[0] if form.fill_value is None else checks.check_int("fill_value", form.fill_value)
    lattice = None if cell is None else cell.detach()
    search = Search(
        positions.detach(), cutoff, lattice, pbc, batch_idx, batch_ptr, target_indices, form.half_fill, method, *chosen
    )

    wanted = {
        "neighbor_distances": form.return_distances or room.neighbor_distances is not None,
        "neighbor_vectors": form.return_vectors or room.neighbor_vectors is not None,
    }
    as_list = form.return_neighbor_list
    shifts: torch.Tensor | None
    most: int | None = None  # the largest count, if it is read
    if as_list and room.neighbor_matrix is None and room.neighbor_matrix_shifts is None:
        pairs, ptr, shifts = ops.found_pairs(search)
        if may_read() and is_mapped(ptr) and bool((all_values_of(ptr)[..., -1] < pairs.shape[1]).any()):
            raise ValueError(
                "neighbor lists under vmap differ in size between slices: give `max_neighbors`, for a matrix, or "
                "search outside of vmap"
            )
        if width is not None and form.check and may_read():
            most = faults.largest_count(ptr.diff())
        if room.num_neighbors is not None:
            room.num_neighbors.copy_(ptr.diff())
    else:
        # a list waits for the device in any case
        readable = (form.check or as_list) and may_read()
        matrix, count, shifts, most = _search_matrix(search, width, room, rebuild_flags, fill_value, readable)
        if width is None and readable and not as_list and (further := least - matrix.shape[1]) > 0:
            matrix = torch.nn.functional.pad(matrix, (0, further), value=fill_value)
            shifts = None if cell is None or shifts is None else torch.nn.functional.pad(shifts, (0, 0, 0, further))
        if as_list:
            pairs, ptr, *rest = pairs_of_matrix(matrix, count, None if cell is None else shifts)
            shifts = rest[0] if rest else None
            if target_indices is not None:
                pairs = torch.stack([target_indices.to(torch.int32)[pairs[0].long()], pairs[1]])
    results: Tensors = (pairs, ptr) if as_list else (matrix, count)
    if most is not None and width is not None and most > width and not silent:
        _say_how_wide(width, most, in_memory, suffix, None if as_list else matrix.shape[1])
    if cell is None:
        shifts = None  # the ops return an empty one
        if (memory := room.neighbor_matrix_shifts) is not None and method == BINNED:
            j = pairs[1] if as_list else matrix
            fits = not as_list and memory.shape[1] == matrix.shape[1]
            results += (memory if fits else j.new_zeros(*j.shape, 3),)
    else:
        assert shifts is not None
        results += (shifts,)

    if any(wanted.values()):
        system, lattice = None, cell.unsqueeze(0) if cell is not None and cell.ndim == 2 else cell
        if lattice is not None and lattice.shape[0] != 1:
            system = batch_idx
            if batch_idx is None and batch_ptr is not None:
                system = batch_idx_of(batch_ptr, positions.shape[0])
        if as_list:
            slots = Pairs(lattice, system, None, pairs[0], pairs[1], shifts)
        else:
            slots = Pairs(lattice, system, target_indices, None, matrix, shifts, count, matrix.shape[1])
        for (name, is_wanted), tensor in zip(wanted.items(), distances_and_vectors(positions, slots)):
            if is_wanted:
                results += (_in_memory(name, getattr(room, name), tensor, None if as_list else width),)
    return results


def _check_selection(form: Form) -> tuple[int, float, bool]:
    """The last fields of a `Search`; raise for a bad argument."""
    nearest, ties, tolerance, symmetric = form[6:]
    checks.check_choice("ties", ties, ("keep", "index"))
    symmetric = checks.check_flag("symmetric", symmetric)
    if nearest is None:
        for name in ("ties", "tie_tolerance", "symmetric"):
            if getattr(form, name) != Form._field_defaults[name]:
                raise ValueError(f"`{name}` says which neighbors are the nearest: give `nearest` as well")
        return 0, 0.0, False
    checks.check_count("nearest", nearest, 1)
    if form.half_fill and not symmetric:
        raise ValueError(
            "`half_fill` with `nearest` needs `symmetric`: without it an atom need not be among the nearest neighbors "
            "of its own nearest neighbors, and the list has no half"
        )
    if ties == "index":
        if tolerance is not None:
            raise ValueError("`tie_tolerance` is only for `ties` = 'keep'")
        return nearest, -1.0, symmetric
    tolerance = TIE_TOLERANCE if tolerance is None else checks.check_not_negative("tie_tolerance", tolerance)
    return nearest, tolerance, symmetric


def _say_how_wide(width: int, most: int, in_memory: bool, suffix: str, columns: int | None) -> None:
    """Warn that an atom has more neighbors than the caller has room for; ``columns`` is None for a list."""
    given = f"the memory given for neighbors has {width} columns" if in_memory else f"`max_neighbors{suffix}` = {width}"
    returned = "the list has them all" if columns is None else f"the matrix returned has {columns} columns"
    filled = "; the memory was filled to the end of its rows" if in_memory else ""
    notify(
        f"{given}, but an atom has {most} neighbors: {returned}{filled}, and `num_neighbors{suffix}` counts all. "
        "Continue with the returned tensors, or give more columns",
        NeighborListWarning,
        kind=f"narrow rows{suffix}",
    )


def _in_memory(name: str, memory: torch.Tensor | None, values: torch.Tensor, width: int | None) -> torch.Tensor:
    """The values, in ``memory`` if it is given; if they are wider than ``width``, it gets only the first columns.

    ``width`` is the width of the memory. It is None for values of a list, whose memory may have any length.
    """
    if memory is None:
        return values
    part = values
    if may_read() and width is not None and values.shape[1] > width:
        part = values[:, :width]
    elif may_read() and width is None and isinstance(memory, torch.Tensor) and memory.shape[1:] == values.shape[1:]:
        given, needed = memory.shape[0], values.shape[0]
        memory = memory[:needed]
        if given < needed:
            part = values[:given]
            notify(
                f"`{name}` has room for {given} of {needed} pairs: all pairs are returned in new memory",
                NeighborListWarning,
                kind=f"short memory, {name}",
            )
    checks.check_like(name, memory, part)
    memory.copy_(part)
    return memory if part is values else values


def _search_matrix(
    search: Search,
    width: int | None,
    room: Room,
    rebuild_flags: torch.Tensor | None,
    fill_value: int,
    readable: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int | None]:
    """Matrix, counts, shifts, and the largest count.

    If values are ``readable``, the largest count is read, and a matrix too narrow for a row is replaced by a wider one.
    """

    def new(*shape: int) -> torch.Tensor:
        return new_empty((search.n_rows, *shape), torch.int32, search.positions.device)

    if readable:
        refuse_in_capture(search.positions, ops.IN_CAPTURE)
    _, matrix, shifts, count, *_ = room
    images: torch.Tensor | None
    if width is None:
        found, counted, images, _ = ops.found_matrix(search, fill_value)
        counted = counted if count is None else count.copy_(counted)
        return found, counted, images, None
    if search.cell is None and shifts is not None:
        shifts.zero_()
        shifts = None
    if matrix is None and shifts is None and count is None:
        matrix, count, shifts, fault = ops.neighbor_matrix(*search, fill_value, width)
    else:
        matrix = new(width) if matrix is None else matrix
        shifts = new(width, 3) if shifts is None and search.cell is not None else shifts
        count = new() if count is None else count
        fault = ops.filled_in_place(search, rebuild_flags, fill_value, matrix, count, shifts)
    if not readable:
        # if faults are not read, an atom without a valid position or cell has a special count and an empty row
        return matrix, count, shifts, None
    faults.raise_faults(fault, search, rebuild_flags)
    most, again = faults.largest_count(count), search
    if most > width and rebuild_flags is not None:
        # also search systems whose rows were cut in an earlier call and kept since: their counts are old
        rebuild_flags, again = faults.systems_beyond(count, width, search, rebuild_flags)
        ops.fill_neighbor_matrix(*again, rebuild_flags, fill_value, matrix, count, shifts)
        most = faults.largest_count(count)
    if most <= width:
        return matrix, count, shifts, most
    # search again, with room for all neighbors; rows of systems without flags fit, and are copied
    columns = grown_width(most)
    if search.n_rows * columns > faults.MAX_SLOTS:
        columns = most
    try:
        if search.n_rows * columns > faults.MAX_SLOTS:
            raise MemoryError("more entries than int32 can address")
        if rebuild_flags is None:
            wide, _, images, _ = ops.neighbor_matrix(*search, fill_value, columns)
            return wide, count, images, most
        wide, images = new(columns), None if shifts is None else new(columns, 3)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise faults.overflow(count, width, search) from error
    wide[:, :width], wide[:, width:] = matrix, fill_value
    if images is not None and shifts is not None:
        images[:, :width], images[:, width:] = shifts, 0
    ops.fill_neighbor_matrix(*again, rebuild_flags, fill_value, wide, count, images)
    return wide, count, images, most


def _width(
    n_rows: int, form: Form, room: Room, suffix: str, positions: torch.Tensor, periodic: bool
) -> tuple[int | None, bool]:
    """Number of columns of the matrix (None if not given), and whether it is the width of the caller's memory."""
    asked = room.max_neighbors
    if asked is not None:
        asked = checks.check_count(f"max_neighbors{suffix}", asked)
    width, name = None, ""
    for label, tensor, trailing in (
        (f"neighbor_matrix{suffix}", room.neighbor_matrix, ()),
        (f"neighbor_matrix_shifts{suffix}", room.neighbor_matrix_shifts, (3,)),
    ):
        if tensor is None:
            continue
        checks.check_index(label, tensor, positions, (n_rows, None, *trailing), writable=True)
        if width is None:
            width, name = tensor.shape[1], label
        elif tensor.shape[1] != width and periodic:  # without a cell all given shifts are set to zero
            raise ValueError(f"`{label}` has {tensor.shape[1]} columns, but `{name}` has {width}")
    if room.num_neighbors is not None:
        checks.check_index(f"num_neighbors{suffix}", room.num_neighbors, positions, (n_rows,), writable=True)
    in_memory = width is not None
    if width is None:
        width = asked
    if width is None and not form.return_neighbor_list:
        # if only these are given, their full shape is checked later, when results are copied to them
        for tensor, ndim in ((room.neighbor_distances, 2), (room.neighbor_vectors, 3)):
            if isinstance(tensor, torch.Tensor) and tensor.ndim == ndim:
                width, in_memory = tensor.shape[1], True
    if width is not None and (in_memory or not form.return_neighbor_list):  # a list is made without a matrix
        faults.check_size(n_rows * width, name or f"max_neighbors{suffix}")
    return width, in_memory
