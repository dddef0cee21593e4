"""The public functions that build neighbor lists: checks of their arguments, and one call of the search."""

import inspect
import re
from typing import Any, NamedTuple

import numpy as np
import torch

from nvalchemiops.compat.ignored_arguments import ignore
from nvalchemiops.kernels.lattice import dual_vectors
from nvalchemiops.neighbors.grid import AUTOMATIC, BAD_CELL, BAD_CUTOFF, BINNED, NAIVE, ONE_BIN_OPEN
from nvalchemiops.neighbors.search import NOT_FINITE
from nvalchemiops.notices import NeighborListWarning, notify
from nvalchemiops.torch import checks
from nvalchemiops.torch.neighbors.formats import (
    get_neighbor_list_from_neighbor_matrix,
    list_geometry,
    matrix_geometry,
)
from nvalchemiops.torch.neighbors.search import (
    FAULTS,
    MAX_SLOTS,
    Query,
    check_size,
    fill_neighbor_matrix,
    largest_count,
    neighbor_matrix_of,
    neighbor_matrix_of_width,
    neighbor_pairs,
    raise_faults,
    raise_overflow,
    systems_of,
)
from nvalchemiops.torch.runtime.context import may_read, on_host
from nvalchemiops.torch.runtime.memory import new_empty

Tensors = tuple[torch.Tensor, ...]


class Systems(NamedTuple):
    """What divides the atoms into systems, as in `neighbor_list`."""

    cell: torch.Tensor | None
    pbc: torch.Tensor | None
    batch_idx: torch.Tensor | None
    batch_ptr: torch.Tensor | None


class Form(NamedTuple):
    """What the results look like, as in `neighbor_list`."""

    half_fill: bool
    fill_value: int | None
    as_list: bool
    return_vectors: bool = False
    return_distances: bool = False
    check: bool = True


class Memory(NamedTuple):
    """Tensors that the caller gives for the results, as in `neighbor_list`."""

    neighbor_matrix: torch.Tensor | None = None
    neighbor_matrix_shifts: torch.Tensor | None = None
    num_neighbors: torch.Tensor | None = None
    neighbor_vectors: torch.Tensor | None = None
    neighbor_distances: torch.Tensor | None = None


NO_REACH = 1e-200
"""The cutoff to search with where it is zero: its square is zero, and nothing is closer, not even in the same place."""

IDEAS = {"naive": NAIVE, "cell_list": BINNED, "cluster_tile": BINNED}
"""What names of methods begin with, after ``batch_``; what follows are variants, which change nothing here."""

_METHOD = re.compile(rf"(?:batch_)?({'|'.join(IDEAS)})(?:_\w+)?")


def method_number(method: Any) -> int:
    """How to search, of which `neighbor_list` says what ``method`` may be."""
    if method is None:
        return AUTOMATIC
    known = _METHOD.fullmatch(method) if isinstance(method, str) else None
    if known is None:
        raise ValueError(
            "`method` must be None, for the automatic choice, or begin with 'naive', 'cell_list' or 'cluster_tile', "
            f"perhaps after 'batch_'; got {method!r}"
        )
    return IDEAS[known[1]]


def neighbor_list(
    positions: torch.Tensor,
    cutoff: float | None = None,
    cell: torch.Tensor | None = None,
    pbc: torch.Tensor | None = None,
    batch_idx: torch.Tensor | None = None,
    batch_ptr: torch.Tensor | None = None,
    cutoff2: float | None = None,
    half_fill: bool = False,
    fill_value: int | None = None,
    return_neighbor_list: bool = False,
    method: str | None = None,
    wrap_positions: bool = True,
    *,
    max_neighbors: int | None = None,
    max_neighbors1: int | None = None,
    max_neighbors2: int | None = None,
    return_vectors: bool = False,
    return_distances: bool = False,
    neighbor_matrix: torch.Tensor | None = None,
    neighbor_matrix_shifts: torch.Tensor | None = None,
    num_neighbors: torch.Tensor | None = None,
    neighbor_matrix1: torch.Tensor | None = None,
    neighbor_matrix_shifts1: torch.Tensor | None = None,
    num_neighbors1: torch.Tensor | None = None,
    neighbor_matrix2: torch.Tensor | None = None,
    neighbor_matrix_shifts2: torch.Tensor | None = None,
    num_neighbors2: torch.Tensor | None = None,
    neighbor_vectors: torch.Tensor | None = None,
    neighbor_distances: torch.Tensor | None = None,
    rebuild_flags: torch.Tensor | None = None,
    target_indices: torch.Tensor | None = None,
    check: bool = True,
    **without_effect: Any,
) -> Tensors:
    """Find all pairs of atoms closer than ``cutoff``, each with the image of the cell that the neighbor is in.

    Neighbor j of atom i in image S is at ``r_ij = x_j - x_i + S @ cell``; a pair belongs to the list if
    ``|r_ij| < cutoff``, computed in float64. The list is exact for cells of any shape and handedness, also thinner
    than the cutoff (then one pair appears in several images, and an atom may neighbor its own images), and for
    positions anywhere. The order of neighbors within a row depends on nothing but the atom's own system, and is the
    same each time.

    Parameters
    ----------
    positions : (n_atoms, 3) tensor, float32 or float64, length
        Inside the cell or not.
    cutoff : float, length, not negative
        With zero there are no pairs.
    cell : (3, 3) or (n_systems, 3, 3) tensor, length, optional
        Rows are lattice vectors; dtype as the positions. A single one holds for all systems. Without it nothing is
        periodic, and no shifts are returned, with one exception below.
    pbc : (3,) or (n_systems, 3) bool tensor, optional
        Periodicity along each lattice vector; along a False axis the cell never matters. With a cell the default is
        True along all axes.
    batch_idx : (n_atoms,) int32 tensor, optional
        System of each atom, non-decreasing. Atoms of different systems are never neighbors.
    batch_ptr : (n_systems + 1,) int32 tensor, optional
        First atom of each system, then n_atoms. Either or both of the two may be given.
    cutoff2 : float, length, optional
        Build a second list, for this cutoff, in the same call.
    half_fill : bool, optional
        List each pair once: the direction with i < j, or i = j and the first non-zero entry of S positive.
    fill_value : int, optional
        Padding of the matrix; n_atoms by default.
    return_neighbor_list : bool, optional
        Return a list of pairs instead of a matrix.
    method : str, optional
        ``"naive"`` tests all pairs of a system, ``"cell_list"`` sorts atoms into bins first. All names are taken that
        begin with one of these, or with ``"cluster_tile"``, which is a cell list here, after ``"batch_"`` or not, and
        go on with ``"_"``: ``"naive_scalar"``, ``"batch_cell_list_atom_centric"``. The rest of the name changes
        nothing, and so does ``"batch_"``; but those that end with ``"_dual_cutoff"`` need ``cutoff2``. All find the
        same pairs. By default each system gets what is faster for it.
    wrap_positions : bool, optional
        False promises positions inside the cell. Wrapping costs next to nothing here, so the result is the same.
    max_neighbors : int, optional
        Width of the matrix, and the most neighbors an atom may have. By default the matrix has room to spare, so that
        it still fits when it is given as memory in the next step of a simulation: the width is a quarter more than the
        longest row, at least 4 slots more, but no more than `estimate_max_neighbors` of the cutoff unless the longest
        row needs that; exactly the longest row if int32 could not address more. Without atoms it is 0.
    max_neighbors1, max_neighbors2 : int, optional
        The same for each of two lists; ``max_neighbors`` is another name of the first.
    return_vectors, return_distances : bool, optional
        Also return the displacement vectors r_ij and their lengths, with gradients of any order to positions and
        cell. Padding is zero, with zero gradients.
    neighbor_matrix, neighbor_matrix_shifts, num_neighbors, neighbor_vectors, neighbor_distances : tensors, optional
        Memory for the results, of the shapes given below, contiguous, which is filled in place and returned. The width
        of the matrices decides, whatever ``max_neighbors`` says. Where an atom has more neighbors, its row is filled to
        the end, with those that come first in the row of a wider matrix (an order that has nothing to do with
        distances), ``num_neighbors`` still counts all, and a `NeighborListWarning` says so.
        Shifts given without a cell are filled with zeros; of the methods only the cell lists return them then.
    neighbor_matrix1, neighbor_matrix_shifts1, num_neighbors1, neighbor_matrix2, ... : tensors, optional
        The same for each of two lists.
    rebuild_flags : (n_systems,) or (1,) bool tensor, optional
        Search only the systems with True; rows of the others stay as they are in the memory given for all results.
    target_indices : (n_rows,) int32 tensor, optional
        Rows for these atoms only, in this order, with neighbors among all atoms.
    check : bool, optional
        False: with ``max_neighbors`` or given memory, do not look at the values on the host, so that nothing waits
        for a GPU. Then an atom with more than ``max_neighbors`` neighbors shows by ``num_neighbors``, which still
        counts all of them. An atom whose position is not finite, or whose cell is unusable, has a count of 2**31 - 1
        and an empty row; other faulty values go unnoticed. The same holds inside ``torch.compile``.
    **without_effect
        Names of `nvalchemiops.compat.ignored_arguments.WITHOUT_EFFECT`: scratch memory and choices of another
        implementation, such as ``strategy`` and ``atom_to_cell_mapping``. They are not looked at.

    Returns
    -------
    neighbor_matrix : (n_atoms, width) int32 tensor
        Neighbors of each atom, then padding. With ``return_neighbor_list`` instead ``neighbor_list`` (2, n_pairs):
        i and j of each pair, sorted by i.
    num_neighbors : (n_atoms,) int32 tensor
        Or ``neighbor_ptr`` (n_atoms + 1,): where the pairs of each atom begin, then n_pairs.
    shifts : (n_atoms, width, 3) or (n_pairs, 3) int32 tensor
        S of each neighbor. Left out without a cell.
    distances : (n_atoms, width) or (n_pairs,) tensor
        If asked for. Dtype as the positions.
    vectors : (n_atoms, width, 3) or (n_pairs, 3) tensor
        If asked for.

    With ``cutoff2`` all of these for the first list, then for the second. With ``target_indices`` n_rows takes the
    place of n_atoms, and row r of the matrix belongs to atom ``target_indices[r]``; i of a pair is the atom, and the
    pairs are sorted by row.

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message: shapes, dtypes, devices, a negative cutoff, positions that are not
        finite, a singular cell along a periodic axis, ``pbc`` without a cell, a decreasing ``batch_idx``. An unknown
        argument.
    NeighborOverflowError
        An atom has more than ``max_neighbors`` neighbors, or more than a list of pairs that is made in given memory has
        room for. Nothing is ever truncated without saying so.

    Notes
    -----
    Without ``max_neighbors`` the sizes of the results depend on the positions, so the search waits for a GPU once;
    under ``torch.compile`` they are unbacked sizes. With ``max_neighbors`` and ``check=False`` nothing waits.
    """
    ignore("neighbor_list", without_effect)
    number = method_number(method)
    if cutoff is None:
        raise ValueError("`cutoff` is required")
    systems = Systems(cell, pbc, batch_idx, batch_ptr)
    form = Form(half_fill, fill_value, return_neighbor_list, return_vectors, return_distances, check)
    memory = Memory(neighbor_matrix, neighbor_matrix_shifts, num_neighbors, neighbor_vectors, neighbor_distances)
    first = Memory(neighbor_matrix1, neighbor_matrix_shifts1, num_neighbors1)
    second = Memory(neighbor_matrix2, neighbor_matrix_shifts2, num_neighbors2)
    rows = target_indices
    if cutoff2 is None:
        if method is not None and method.endswith("_dual_cutoff"):
            raise ValueError(f"`cutoff2` is required by the method '{method}'")
        for suffix, numbered in (("1", (*first[:3], max_neighbors1)), ("2", (*second[:3], max_neighbors2))):
            for name, value in zip((*Memory._fields[:3], "max_neighbors"), numbered):
                if value is not None:
                    raise ValueError(f"`{name}{suffix}` is for one of two lists: give `cutoff2`")
        return build(number, positions, cutoff, systems, form, max_neighbors, memory, rebuild_flags, rows)
    for name, tensor in memory._asdict().items():
        if tensor is not None:
            raise ValueError(
                f"`{name}` is for one list: with cutoff2 there are `neighbor_matrix1`, `neighbor_matrix2` ..."
            )
    if max_neighbors is not None and max_neighbors1 is not None:
        raise ValueError("`max_neighbors` and `max_neighbors1` are two names of one number: give one of them")
    room = max_neighbors if max_neighbors1 is None else max_neighbors1
    return _two_lists(
        number,
        positions,
        (cutoff, cutoff2),
        systems,
        form,
        (room, max_neighbors2),
        (first, second),
        rebuild_flags,
        rows,
    )


def cell_list(
    positions: torch.Tensor,
    cutoff: float,
    cell: torch.Tensor | None,
    pbc: torch.Tensor | None,
    max_neighbors: int | None = None,
    half_fill: bool = False,
    fill_value: int | None = None,
    return_neighbor_list: bool = False,
    neighbor_matrix: torch.Tensor | None = None,
    neighbor_matrix_shifts: torch.Tensor | None = None,
    num_neighbors: torch.Tensor | None = None,
    rebuild_flags: torch.Tensor | None = None,
    target_indices: torch.Tensor | None = None,
    return_vectors: bool = False,
    return_distances: bool = False,
    neighbor_vectors: torch.Tensor | None = None,
    neighbor_distances: torch.Tensor | None = None,
    **without_effect: Any,
) -> Tensors:
    """Neighbor list of one system, its atoms sorted into bins. Arguments and results as in `neighbor_list`."""
    ignore("cell_list", without_effect)
    return batch_cell_list(
        positions,
        cutoff,
        cell,
        pbc,
        None,
        max_neighbors,
        half_fill,
        fill_value,
        return_neighbor_list,
        neighbor_matrix,
        neighbor_matrix_shifts,
        num_neighbors,
        rebuild_flags,
        target_indices,
        return_vectors,
        return_distances,
        neighbor_vectors,
        neighbor_distances,
    )


def batch_cell_list(
    positions: torch.Tensor,
    cutoff: float,
    cell: torch.Tensor | None,
    pbc: torch.Tensor | None,
    batch_idx: torch.Tensor | None,
    max_neighbors: int | None = None,
    half_fill: bool = False,
    fill_value: int | None = None,
    return_neighbor_list: bool = False,
    neighbor_matrix: torch.Tensor | None = None,
    neighbor_matrix_shifts: torch.Tensor | None = None,
    num_neighbors: torch.Tensor | None = None,
    rebuild_flags: torch.Tensor | None = None,
    target_indices: torch.Tensor | None = None,
    return_vectors: bool = False,
    return_distances: bool = False,
    neighbor_vectors: torch.Tensor | None = None,
    neighbor_distances: torch.Tensor | None = None,
    batch_ptr: torch.Tensor | None = None,
    **without_effect: Any,
) -> Tensors:
    """Neighbor lists of a batch, atoms sorted into bins. Arguments and results as in `neighbor_list`."""
    ignore("batch_cell_list", without_effect)
    systems = Systems(cell, pbc, batch_idx, batch_ptr)
    form = Form(half_fill, fill_value, return_neighbor_list, return_vectors, return_distances)
    memory = Memory(neighbor_matrix, neighbor_matrix_shifts, num_neighbors, neighbor_vectors, neighbor_distances)
    return build(BINNED, positions, cutoff, systems, form, max_neighbors, memory, rebuild_flags, target_indices)


def batch_naive_neighbor_list(
    positions: torch.Tensor,
    cutoff: float,
    batch_idx: torch.Tensor | None = None,
    batch_ptr: torch.Tensor | None = None,
    pbc: torch.Tensor | None = None,
    cell: torch.Tensor | None = None,
    max_neighbors: int | None = None,
    half_fill: bool = False,
    fill_value: int | None = None,
    return_neighbor_list: bool = False,
    neighbor_matrix: torch.Tensor | None = None,
    neighbor_matrix_shifts: torch.Tensor | None = None,
    num_neighbors: torch.Tensor | None = None,
    rebuild_flags: torch.Tensor | None = None,
    wrap_positions: bool = True,
    *,
    return_distances: bool = False,
    return_vectors: bool = False,
    neighbor_vectors: torch.Tensor | None = None,
    neighbor_distances: torch.Tensor | None = None,
    target_indices: torch.Tensor | None = None,
    **without_effect: Any,
) -> Tensors:
    """Neighbor lists of a batch by tests of all pairs. Arguments and results as in `neighbor_list`."""
    ignore("batch_naive_neighbor_list", without_effect)
    systems = Systems(cell, pbc, batch_idx, batch_ptr)
    form = Form(half_fill, fill_value, return_neighbor_list, return_vectors, return_distances)
    memory = Memory(neighbor_matrix, neighbor_matrix_shifts, num_neighbors, neighbor_vectors, neighbor_distances)
    return build(NAIVE, positions, cutoff, systems, form, max_neighbors, memory, rebuild_flags, target_indices)


def naive_neighbor_list(
    positions: torch.Tensor,
    cutoff: float,
    cell: torch.Tensor | None = None,
    pbc: torch.Tensor | None = None,
    max_neighbors: int | None = None,
    half_fill: bool = False,
    fill_value: int | None = None,
    return_neighbor_list: bool = False,
    neighbor_matrix: torch.Tensor | None = None,
    neighbor_matrix_shifts: torch.Tensor | None = None,
    num_neighbors: torch.Tensor | None = None,
    rebuild_flags: torch.Tensor | None = None,
    wrap_positions: bool = True,
    *,
    return_distances: bool = False,
    return_vectors: bool = False,
    neighbor_vectors: torch.Tensor | None = None,
    neighbor_distances: torch.Tensor | None = None,
    target_indices: torch.Tensor | None = None,
    **without_effect: Any,
) -> Tensors:
    """Neighbor list of one system by tests of all pairs. Arguments and results as in `neighbor_list`."""
    ignore("naive_neighbor_list", without_effect)
    return batch_naive_neighbor_list(
        positions,
        cutoff,
        None,
        None,
        pbc,
        cell,
        max_neighbors,
        half_fill,
        fill_value,
        return_neighbor_list,
        neighbor_matrix,
        neighbor_matrix_shifts,
        num_neighbors,
        rebuild_flags,
        return_distances=return_distances,
        return_vectors=return_vectors,
        neighbor_vectors=neighbor_vectors,
        neighbor_distances=neighbor_distances,
        target_indices=target_indices,
    )


def batch_naive_neighbor_list_dual_cutoff(
    positions: torch.Tensor,
    cutoff1: float,
    cutoff2: float,
    batch_idx: torch.Tensor | None = None,
    batch_ptr: torch.Tensor | None = None,
    pbc: torch.Tensor | None = None,
    cell: torch.Tensor | None = None,
    max_neighbors1: int | None = None,
    max_neighbors2: int | None = None,
    half_fill: bool = False,
    fill_value: int | None = None,
    return_neighbor_list: bool = False,
    neighbor_matrix1: torch.Tensor | None = None,
    neighbor_matrix2: torch.Tensor | None = None,
    neighbor_matrix_shifts1: torch.Tensor | None = None,
    neighbor_matrix_shifts2: torch.Tensor | None = None,
    num_neighbors1: torch.Tensor | None = None,
    num_neighbors2: torch.Tensor | None = None,
    rebuild_flags: torch.Tensor | None = None,
    wrap_positions: bool = True,
    **without_effect: Any,
) -> Tensors:
    """Two neighbor lists of a batch by tests of all pairs: the results of `neighbor_list` for each cutoff in turn."""
    ignore("batch_naive_neighbor_list_dual_cutoff", without_effect)
    systems = Systems(cell, pbc, batch_idx, batch_ptr)
    form = Form(half_fill, fill_value, return_neighbor_list)
    memory = (
        Memory(neighbor_matrix1, neighbor_matrix_shifts1, num_neighbors1),
        Memory(neighbor_matrix2, neighbor_matrix_shifts2, num_neighbors2),
    )
    room = (max_neighbors1, max_neighbors2)
    return _two_lists(NAIVE, positions, (cutoff1, cutoff2), systems, form, room, memory, rebuild_flags, None, "1")


def naive_neighbor_list_dual_cutoff(
    positions: torch.Tensor,
    cutoff1: float,
    cutoff2: float,
    pbc: torch.Tensor | None = None,
    cell: torch.Tensor | None = None,
    max_neighbors1: int | None = None,
    max_neighbors2: int | None = None,
    half_fill: bool = False,
    fill_value: int | None = None,
    return_neighbor_list: bool = False,
    neighbor_matrix1: torch.Tensor | None = None,
    neighbor_matrix2: torch.Tensor | None = None,
    neighbor_matrix_shifts1: torch.Tensor | None = None,
    neighbor_matrix_shifts2: torch.Tensor | None = None,
    num_neighbors1: torch.Tensor | None = None,
    num_neighbors2: torch.Tensor | None = None,
    rebuild_flags: torch.Tensor | None = None,
    wrap_positions: bool = True,
    **without_effect: Any,
) -> Tensors:
    """Two neighbor lists of one system by tests of all pairs: the results of `neighbor_list` for each cutoff."""
    ignore("naive_neighbor_list_dual_cutoff", without_effect)
    return batch_naive_neighbor_list_dual_cutoff(
        positions,
        cutoff1,
        cutoff2,
        None,
        None,
        pbc,
        cell,
        max_neighbors1,
        max_neighbors2,
        half_fill,
        fill_value,
        return_neighbor_list,
        neighbor_matrix1,
        neighbor_matrix2,
        neighbor_matrix_shifts1,
        neighbor_matrix_shifts2,
        num_neighbors1,
        num_neighbors2,
        rebuild_flags,
    )


def suggest_neighbor_list_method(
    batch_ptr: torch.Tensor,
    cell: torch.Tensor | None = None,
    pbc: torch.Tensor | None = None,
    cutoff: float = 0.0,
    *,
    positions: torch.Tensor | None = None,
    batch_idx: torch.Tensor | None = None,
    cutoff2: float | None = None,
    **options: Any,
) -> str:
    """A method of `neighbor_list` that suits these systems; None, the default, suits each system by itself.

    Parameters
    ----------
    batch_ptr : (n_systems + 1,) int32 tensor
        First atom of each system, then n_atoms, which is read unless there are ``positions``.
    cell, pbc, cutoff, positions, batch_idx, cutoff2
        As in `neighbor_list`. Without ``positions`` they change nothing but the name: one for two cutoffs.
    **options
        Other arguments of `neighbor_list`, and ``positions_dtype``, ``optional_outputs``, ``use_pair_fn`` and those
        without effect there. They are not looked at.

    Returns
    -------
    str
        Begins with ``"batch_"`` if there are several systems.
    """
    known = inspect.signature(neighbor_list).parameters
    others = {"positions_dtype", "optional_outputs", "use_pair_fn"}
    ignore("suggest_neighbor_list_method", {k: v for k, v in options.items() if k not in known and k not in others})
    if positions is not None:
        checks.check_positions(positions, finite=False)
    checks.check_index("batch_ptr", batch_ptr, positions, (None,))
    if batch_ptr.shape[0] < 1:
        raise ValueError("`batch_ptr` must have shape (n_systems + 1,), got (0,)")
    checks.check_not_negative("cutoff", cutoff)
    if positions is not None:
        checks.check_systems(positions, cell, pbc, batch_idx, batch_ptr)
    n_systems = batch_ptr.shape[0] - 1
    n_atoms = int(batch_ptr[-1]) if positions is None else positions.shape[0]
    small = n_atoms <= ONE_BIN_OPEN * max(n_systems, 1)
    name = "batch_" if n_systems > 1 else ""
    if small and cutoff2 is not None:
        return name + "naive_dual_cutoff"
    return name + ("naive" if small else "cell_list")


def estimate_cell_list_sizes(
    cell: torch.Tensor,
    pbc: torch.Tensor,
    cutoff: float,
    max_nbins: int = 524288,
    min_cells_per_dimension: int = 4,
) -> tuple[int, torch.Tensor]:
    """How many bins a cell list over the whole cell has, and how many bins a search goes in each direction.

    For callers that plan memory: the lists of this library need no such numbers, since their bins follow the atoms.

    Parameters
    ----------
    cell : (3, 3), (1, 3, 3) or, for a batch without systems, (0, 3, 3) tensor, length
    pbc : (3,), (1, 3) or (0, 3) bool tensor
    cutoff : float, length, not negative
    max_nbins : int, optional
        Bins in all, at most.
    min_cells_per_dimension : int, optional
        Bins along each axis, at least, as long as ``max_nbins`` allows.

    Returns
    -------
    max_total_cells : int
    neighbor_search_radius : (3,) int32 tensor
    """
    if isinstance(cell, torch.Tensor) and cell.ndim == 3 and cell.shape[0] > 1:
        raise ValueError("`cell` must be one cell; use estimate_batch_cell_list_sizes for several")
    total, radius = estimate_batch_cell_list_sizes(cell, pbc, cutoff, max_nbins, min_cells_per_dimension)
    return total, radius[0] if len(radius) else radius.new_zeros(3)


def estimate_batch_cell_list_sizes(
    cell: torch.Tensor,
    pbc: torch.Tensor,
    cutoff: float,
    max_nbins: int = 8192,
    min_cells_per_dimension: int = 4,
) -> tuple[int, torch.Tensor]:
    """The same as `estimate_cell_list_sizes` for cells (n_systems, 3, 3): bins of all systems, radii (n_systems, 3)."""
    cutoff = checks.check_not_negative("cutoff", cutoff)
    for name, value in (("max_nbins", max_nbins), ("min_cells_per_dimension", min_cells_per_dimension)):
        if checks.check_int(name, value) < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}")
    cells, periodic, steepness = _lattices(cell, pbc)
    lengths = np.linalg.norm(cells, axis=2)
    heights = np.where(periodic, 1.0 / np.where(periodic, steepness, 1.0), np.where(np.isfinite(lengths), lengths, 0.0))
    fit = np.minimum(np.floor(heights / max(cutoff, NO_REACH)), max_nbins)
    bins = np.maximum(fit, min_cells_per_dimension)
    # thin out the most divided axes first
    while (over := bins.prod(axis=1) > max_nbins).any():
        rows = np.nonzero(over)[0]
        axes = bins[rows].argmax(axis=1)
        others = bins[rows].prod(axis=1) / bins[rows, axes]
        bins[rows, axes] = np.maximum(np.minimum(np.floor(max_nbins / others), np.ceil(bins[rows, axes] / 2)), 1)
    radius = np.ceil(cutoff * bins / np.maximum(heights, max(cutoff, NO_REACH) * 1e-6)).astype(np.int64)
    radius = np.where(periodic, radius, np.minimum(radius, bins.astype(np.int64)))
    return int(bins.prod(axis=1).sum()), torch.as_tensor(radius, dtype=torch.int32, device=cell.device)


def compute_naive_num_shifts(
    cell: torch.Tensor, cutoff: float, pbc: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """How many images of the cell a test of all pairs of wrapped atoms goes through.

    For callers that count them once: the lists of this library take the numbers, and do not need them.

    Parameters
    ----------
    cell : (3, 3) or (n_systems, 3, 3) tensor, length
    cutoff : float, length, not negative
    pbc : (3,) or (n_systems, 3) bool tensor

    Returns
    -------
    shift_range_per_dimension : (n_systems, 3) int32 tensor
        Images in each direction of each axis, 0 along open ones.
    num_shifts_per_system : (n_systems,) int32 tensor
        Images when each is taken in one of its two directions, with that of the cell itself.
    max_shifts_per_system : int
        The largest of these; 0 without systems.

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message; a singular cell, or more images than int32 can count.
    """
    cutoff = checks.check_not_negative("cutoff", cutoff)
    _, periodic, steepness = _lattices(cell, pbc)
    if not np.isfinite(steepness).all():
        raise ValueError(FAULTS[BAD_CELL])
    reach = np.where(periodic, np.ceil(cutoff * steepness), 0.0)
    images = ((2.0 * reach + 1.0).prod(axis=1) + 1.0) / 2.0
    if images.size and images.max() > MAX_SLOTS:
        raise ValueError(FAULTS[BAD_CUTOFF])
    most = int(images.max()) if images.size else 0
    ranges, numbers = (torch.as_tensor(t, device=cell.device).to(torch.int32) for t in (reach, images))
    return ranges, numbers, most


def _lattices(cell: Any, pbc: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cells (n_systems, 3, 3), periodicity, and along periodic axes one over the distance of lattice planes."""
    checks.check_tensor("cell", cell)
    checks.check_place("cell", cell)
    if not cell.is_floating_point() or cell.shape[-2:] != (3, 3):
        raise ValueError("`cell` must be a floating-point tensor of shape (3, 3) or (n_systems, 3, 3)")
    cells = on_host(cell.reshape(-1, 3, 3)).astype(np.float64)
    periodic = checks.check_pbc(pbc, cell, len(cells))
    return cells, periodic, np.linalg.norm(dual_vectors(cells, periodic), axis=2)


def _two_lists(
    method: int,
    positions: torch.Tensor,
    cutoffs: tuple[float, float],
    systems: Systems,
    form: Form,
    room: tuple[int | None, int | None],
    memory: tuple[Memory, Memory],
    rebuild_flags: torch.Tensor | None,
    rows: torch.Tensor | None,
    first_suffix: str = "",
) -> Tensors:
    """The results of `build` for each cutoff in turn."""
    results: Tensors = ()
    for n, suffix in enumerate((first_suffix, "2")):
        results += build(method, positions, cutoffs[n], systems, form, room[n], memory[n], rebuild_flags, rows, suffix)
    return results


def build(
    method: int,
    positions: torch.Tensor,
    cutoff: float,
    systems: Systems,
    form: Form,
    max_neighbors: int | None,
    memory: Memory = Memory(),  # noqa: B008 (immutable)
    rebuild_flags: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    suffix: str = "",
    may_cut: bool = True,
) -> Tensors:
    """One list, as `neighbor_list` describes it; ``rows`` are its target_indices, ``suffix`` ends names in messages.

    ``may_cut`` is False for a caller who must know if rows do not fit into memory of theirs: then an error says so.
    """
    for name in ("half_fill", "return_vectors", "return_distances", "check"):
        checks.check_flag(name, getattr(form, name))
    checks.check_flag("return_neighbor_list", form.as_list)
    checks.check_positions(positions, finite=False)
    cutoff = checks.check_not_negative(f"cutoff{suffix}", cutoff) or NO_REACH
    _, _, batch_idx, batch_ptr = systems
    cell, pbc, n_systems = checks.check_systems(positions, *systems)
    if rows is not None:
        checks.check_index("target_indices", rows, positions, (None,))
    width, in_memory = _width(positions, rows, form, max_neighbors, memory, suffix)
    if rebuild_flags is not None:
        rebuild_flags = checks.check_flags(rebuild_flags, positions, n_systems, batch_idx)
        for name in ("neighbor_matrix", "num_neighbors", *(["neighbor_matrix_shifts"] if cell is not None else [])):
            if getattr(memory, name) is None:
                raise ValueError(f"`rebuild_flags` needs `{name}{suffix}`, whose rows it keeps")
    fill_value = positions.shape[0] if form.fill_value is None else checks.check_int("fill_value", form.fill_value)
    lattice = None if cell is None else cell.detach()
    query = Query(positions.detach(), cutoff, lattice, pbc, batch_idx, batch_ptr, rows, form.half_fill, method)
    # a list is waited for anyway
    readable = (form.check or form.as_list) and may_read()

    shifts: torch.Tensor | None
    if form.as_list and memory.neighbor_matrix is None and memory.neighbor_matrix_shifts is None:
        pairs, ptr, shifts = neighbor_pairs(*query)
        if width is not None and form.check and readable:
            raise_overflow(ptr.diff(), width, query)
        if memory.num_neighbors is not None:
            memory.num_neighbors.copy_(ptr.diff())
        results: Tensors = (pairs, ptr)
    else:
        if width is None:
            matrix, count, shifts = neighbor_matrix_of(*query, fill_value)
            if memory.num_neighbors is not None:
                count = memory.num_neighbors.copy_(count)
            present = count
        else:
            if cell is None and memory.neighbor_matrix_shifts is not None:
                memory.neighbor_matrix_shifts.zero_()
            if all(tensor is None for tensor in memory[:3]):
                matrix, count, shifts, fault = neighbor_matrix_of_width(*query, fill_value, width)
            else:
                matrix, shifts, count = _rows_of(positions, rows, cell, width, memory)
                fault = fill_neighbor_matrix(*query, rebuild_flags, fill_value, matrix, count, shifts)
            if readable:
                raise_faults(fault, query)
                if in_memory and may_cut and not form.as_list:
                    _notice_cut(count, width, suffix)
                else:
                    raise_overflow(count, width, query)
            # unread, the count of an atom without a position or a cell says so, and its row is empty
            fresh = readable and rebuild_flags is None
            present = count if fresh else torch.where(count == NOT_FINITE, 0, count)
        results = (matrix, count)
        if form.as_list:
            images = None if cell is None else shifts
            pairs, ptr, *rest = get_neighbor_list_from_neighbor_matrix(matrix, present, images)
            shifts = rest[0] if rest else None
            if rows is not None:
                pairs = torch.stack([rows.to(torch.int32)[pairs[0].long()], pairs[1]])
            results = (pairs, ptr)
    if cell is not None:
        results += (shifts,)  # type: ignore[operator]
    else:
        shifts = None  # the ops return an empty one
        if method == BINNED and memory.neighbor_matrix_shifts is not None:
            results += (pairs.new_zeros(pairs.shape[1], 3) if form.as_list else memory.neighbor_matrix_shifts,)

    want_distances = form.return_distances or memory.neighbor_distances is not None
    want_vectors = form.return_vectors or memory.neighbor_vectors is not None
    if want_distances or want_vectors:
        if batch_ptr is not None and batch_idx is None:
            batch_idx = systems_of(batch_ptr, positions.shape[0])
        if form.as_list:
            distances, vectors = list_geometry(positions, pairs, shifts, cell, batch_idx)
        else:
            distances, vectors = matrix_geometry(positions, matrix, present, shifts, cell, batch_idx, rows)
        for name, wanted, tensor, given in (
            ("neighbor_distances", want_distances, distances, memory.neighbor_distances),
            ("neighbor_vectors", want_vectors, vectors, memory.neighbor_vectors),
        ):
            if wanted:
                if given is not None:
                    checks.check_like(name, given, tensor)
                    tensor = given.copy_(tensor)
                results += (tensor,)
    return results


def _rows_of(
    positions: torch.Tensor, rows: torch.Tensor | None, cell: torch.Tensor | None, width: int, memory: Memory
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Matrix, shifts (with a cell) and counts to write to: those given, or new ones."""
    n_rows = positions.shape[0] if rows is None else rows.shape[0]
    matrix, shifts, count = memory[:3]
    if matrix is None:
        matrix = new_empty((n_rows, width), torch.int32, positions.device)
    if shifts is None and cell is not None:
        shifts = new_empty((n_rows, width, 3), torch.int32, positions.device)
    if count is None:
        count = new_empty((n_rows,), torch.int32, positions.device)
    return matrix, shifts, count


def _width(
    positions: torch.Tensor,
    rows: torch.Tensor | None,
    form: Form,
    max_neighbors: int | None,
    memory: Memory,
    suffix: str,
) -> tuple[int | None, bool]:
    """Columns of the matrix, None if nothing tells them; and whether it is memory of the caller that does."""
    n_rows = positions.shape[0] if rows is None else rows.shape[0]
    if max_neighbors is not None and checks.check_int(f"max_neighbors{suffix}", max_neighbors) < 0:
        raise ValueError(f"`max_neighbors{suffix}` must not be negative, got {max_neighbors}")
    width = None
    name = ""
    for label, tensor, trailing in (
        (f"neighbor_matrix{suffix}", memory.neighbor_matrix, ()),
        (f"neighbor_matrix_shifts{suffix}", memory.neighbor_matrix_shifts, (3,)),
    ):
        if tensor is None:
            continue
        checks.check_index(label, tensor, positions, (n_rows, None, *trailing), writable=True)
        if width is not None and tensor.shape[1] != width:
            raise ValueError(f"`{label}` has {tensor.shape[1]} columns, but `{name}` has {width}")
        width, name = tensor.shape[1], label
    if memory.num_neighbors is not None:
        checks.check_index(f"num_neighbors{suffix}", memory.num_neighbors, positions, (n_rows,), writable=True)
    in_memory = width is not None
    if width is None:
        width = max_neighbors
    if width is None and not form.as_list:
        # memory for these alone: its shape is looked at when there is something to copy to it
        for tensor, ndim in ((memory.neighbor_distances, 2), (memory.neighbor_vectors, 3)):
            if isinstance(tensor, torch.Tensor) and tensor.ndim == ndim:
                width, in_memory = tensor.shape[1], True
    if width is not None:
        check_size(n_rows * width)
    return width, in_memory


def _notice_cut(count: torch.Tensor, width: int, suffix: str) -> None:
    """Say so if some rows do not fit into memory that the caller gave. Waits for the device."""
    most = largest_count(count)
    if most > width:
        notify(
            f"the memory given for neighbors has {width} columns, but an atom has {most} neighbors: rows were filled "
            f"to their end, and `num_neighbors{suffix}` counts all. Give wider memory to have all of them, or leave it "
            "out",
            NeighborListWarning,
            kind=f"cut rows{suffix}",
        )
