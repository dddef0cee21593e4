"""Neighbor lists of torch tensors."""

import numpy as np
import torch
import warp as wp

from nvalchemiops.geometry import dual_vectors
from nvalchemiops.neighbors import NeighborOverflowError
from nvalchemiops.neighbors.naive import MAX_CELLS_APART, naive_search
from nvalchemiops.torch.autograd import OutputSpec, warp_custom_op
from nvalchemiops.torch.launch import launch
from nvalchemiops.torch.neighbors import checks
from nvalchemiops.torch.neighbors.eager import eager

__all__ = ["neighbor_list"]

MAX_SLOTS = 2**31 - 1
"""Entries that a list may have: rows are addressed with int32."""


@warp_custom_op(
    "nvalchemiops::naive_count",
    outputs=[OutputSpec("counts", wp.int32, lambda positions, *_: (positions.shape[0],))],
    grad_arrays=(),
    backward="none",
)
def _naive_count(
    positions: torch.Tensor,
    cell: torch.Tensor,
    dual: torch.Tensor,
    batch_idx: torch.Tensor,
    batch_ptr: torch.Tensor,
    cutoff: float,
    half: bool,
) -> torch.Tensor:
    counts = batch_idx.new_empty(positions.shape[0])
    nothing = batch_idx.new_empty(0)
    launch(
        naive_search(),
        positions.shape[0],
        [positions, cell, dual, batch_idx, batch_ptr, cutoff, int(half), 0, nothing],
        [counts, nothing, nothing.reshape(0, 3)],
    )
    return counts


@warp_custom_op(
    "nvalchemiops::naive_fill",
    outputs=[
        OutputSpec("index", wp.int32, lambda *inputs: (inputs[-2],)),
        OutputSpec("shifts", wp.vec3i, lambda *inputs: (inputs[-2], 3)),
    ],
    grad_arrays=(),
    backward="none",
)
def _naive_fill(
    positions: torch.Tensor,
    cell: torch.Tensor,
    dual: torch.Tensor,
    batch_idx: torch.Tensor,
    batch_ptr: torch.Tensor,
    cutoff: float,
    half: bool,
    row_begin: torch.Tensor,
    size: int,
    fill_value: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    index = batch_idx.new_full((size,), fill_value)
    shifts = batch_idx.new_zeros((size, 3))
    launch(
        naive_search(),
        positions.shape[0],
        [positions, cell, dual, batch_idx, batch_ptr, cutoff, int(half), 1, row_begin],
        [batch_idx.new_empty(0), index, shifts],
    )
    return index, shifts


@eager
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
) -> tuple[torch.Tensor, ...]:
    """Find all pairs of atoms closer than ``cutoff``, each with the image of the cell that the neighbor is in.

    Neighbor j of atom i in image S is at ``r_ij = x_j - x_i + S @ cell``; a pair belongs to the list if
    ``|r_ij| < cutoff``, computed in float64. The list is exact for cells of any shape and handedness, also thinner
    than the cutoff (then one pair appears in several images, and an atom may neighbor its own images), and for
    positions anywhere. Rows are ordered by j, then S.

    Parameters
    ----------
    positions : (n_atoms, 3) tensor, float32 or float64, length
        Inside the cell or not.
    cutoff : float, length, positive
    cell : (3, 3) or (n_systems, 3, 3) tensor, length, optional
        Rows are lattice vectors. Without it nothing is periodic, and no shifts are returned.
    pbc : (3,) or (n_systems, 3) bool tensor, optional
        Periodicity along each lattice vector; along a False axis the cell never matters. With a cell the default is
        True along all axes.
    batch_idx : (n_atoms,) int32 tensor, optional
        System of each atom, non-decreasing. Atoms of different systems are never neighbors.
    batch_ptr : (n_systems + 1,) int32 tensor, optional
        First atom of each system, then n_atoms. Either or both of the two may be given.
    half_fill : bool, optional
        List each pair once: the direction with i < j, or i = j and the first non-zero entry of S positive.
    fill_value : int, optional
        Padding of the matrix; n_atoms by default.
    return_neighbor_list : bool, optional
        Return a list of pairs instead of a matrix.
    method : {"naive", "batch_naive"}, optional
        The search over all pairs is the only one so far. ``"naive"`` is for one system.
    wrap_positions : bool, optional
        False promises positions inside the cell. This search needs no wrapping, so the result is the same.
    max_neighbors : int, optional
        Width of the matrix, and the most neighbors an atom may have; by default what is needed.

    Returns
    -------
    neighbor_matrix : (n_atoms, width) int32 tensor
        Neighbors of each atom, then padding. With ``return_neighbor_list`` instead ``neighbor_list`` (2, n_pairs):
        i and j of each pair, sorted by i.
    num_neighbors : (n_atoms,) int32 tensor
        Or ``neighbor_ptr`` (n_atoms + 1,): where the pairs of each atom begin, then n_pairs.
    shifts : (n_atoms, width, 3) or (n_pairs, 3) int32 tensor
        S of each neighbor. Left out without a cell.

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message: shapes, dtypes, devices, a cutoff that is not positive, positions that
        are not finite, a singular cell along a periodic axis, ``pbc`` without a cell, a decreasing ``batch_idx``.
    NeighborOverflowError
        An atom has more than ``max_neighbors`` neighbors. Nothing is ever truncated.
    NotImplementedError
        ``cutoff2`` or another ``method``.

    Notes
    -----
    The sizes of the results depend on the positions, so this function reads values on the host and waits for a GPU.
    The work is quadratic in the atoms per system. The list has no gradient.
    """
    if cutoff2 is not None:
        raise NotImplementedError("`cutoff2`: lists for two cutoffs are not available yet; call twice")
    if method not in (None, "naive", "batch_naive"):
        raise NotImplementedError(f"`method`: {method!r} is not available yet; use 'naive', 'batch_naive' or None")
    checks.check_positions(positions)
    if cutoff is None:
        raise ValueError("`cutoff` is required")
    cutoff = checks.check_positive("cutoff", cutoff)
    n_atoms = positions.shape[0]
    batched = batch_idx is not None or batch_ptr is not None
    if method == "naive" and batched:
        raise ValueError("`method`: 'naive' is for one system; use 'batch_naive' or None with batch_idx or batch_ptr")
    batch_idx, batch_ptr = _systems(positions, cell, batch_idx, batch_ptr)
    n_systems = batch_ptr.shape[0] - 1
    fill_value = n_atoms if fill_value is None else int(fill_value)
    if max_neighbors is not None and int(max_neighbors) < 0:
        raise ValueError(f"`max_neighbors` must not be negative, got {max_neighbors}")

    has_cell = cell is not None
    if not has_cell:
        if pbc is not None and checks.check_pbc(pbc, positions, n_systems).any():
            raise ValueError("`pbc` is True along an axis, but there is no `cell`")
        cell = positions.new_zeros((n_systems, 3, 3))
        periodic = np.zeros((n_systems, 3), dtype=bool)
    else:
        cell = checks.check_cell(cell, positions, n_systems)
        periodic = checks.check_pbc(pbc, positions, n_systems)

    wide = positions.detach().to(torch.float64)
    wide_cell = cell.detach().to(torch.float64)
    planes = dual_vectors(checks.on_host(wide_cell), periodic)
    _check_extent(wide, planes, cutoff)
    # along an open axis the shift is always zero, so the cell may hold anything there; NaN times zero is not zero
    wide_cell = torch.where(torch.as_tensor(periodic, device=wide.device).unsqueeze(-1), wide_cell, 0.0)
    search = (wide, wide_cell, torch.as_tensor(planes, device=wide.device), batch_idx, batch_ptr, cutoff, half_fill)

    counts = _naive_count(*search)
    widest = int(counts.max()) if n_atoms else 0
    if max_neighbors is not None and widest > max_neighbors:
        raise NeighborOverflowError(max_neighbors, widest, int(batch_idx[counts.argmax()]))
    if return_neighbor_list:
        ends = counts.cumsum(0)
        size = int(ends[-1]) if n_atoms else 0
        _check_size(size)
        ptr = torch.cat([counts.new_zeros(1), ends.to(torch.int32)])
        j, shifts = _naive_fill(*search, ptr[:-1], size, fill_value)
        i = torch.repeat_interleave(torch.arange(n_atoms, dtype=torch.int32, device=counts.device), counts)
        pairs = torch.stack([i, j])
        return (pairs, ptr, shifts) if has_cell else (pairs, ptr)
    width = widest if max_neighbors is None else int(max_neighbors)
    _check_size(n_atoms * width)
    begin = torch.arange(n_atoms, dtype=torch.int32, device=counts.device) * width
    index, shifts = _naive_fill(*search, begin, n_atoms * width, fill_value)
    matrix = index.reshape(n_atoms, width)
    return (matrix, counts, shifts.reshape(n_atoms, width, 3)) if has_cell else (matrix, counts)


def _systems(
    positions: torch.Tensor,
    cell: torch.Tensor | None,
    batch_idx: torch.Tensor | None,
    batch_ptr: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both descriptions of the systems from any of them, as int32."""
    n_atoms = positions.shape[0]
    device = positions.device
    # systems without atoms at the end of a batch show only in the cell
    declared = cell.shape[0] if isinstance(cell, torch.Tensor) and cell.ndim == 3 else None
    if batch_ptr is not None:
        if not isinstance(batch_ptr, torch.Tensor) or batch_ptr.dtype not in (torch.int32, torch.int64):
            raise TypeError("`batch_ptr` must be an int32 tensor")
        if batch_ptr.ndim != 1 or batch_ptr.shape[0] < 2:
            raise ValueError(f"`batch_ptr` must have shape (n_systems + 1,), got {tuple(batch_ptr.shape)}")
        if batch_ptr.device != device:
            raise ValueError(f"`batch_ptr` is on {batch_ptr.device}, but `positions` is on {device}")
        sizes = batch_ptr.diff()
        if int(batch_ptr[0]) != 0 or int(batch_ptr[-1]) != n_atoms or bool((sizes < 0).any()):
            raise ValueError(f"`batch_ptr` must rise from 0 to n_atoms = {n_atoms}, got {batch_ptr.tolist()[:20]}")
        numbers = torch.arange(sizes.shape[0], dtype=torch.int32, device=device)
        from_ptr = torch.repeat_interleave(numbers, sizes)
        if batch_idx is not None:
            given, _ = checks.check_batch_idx(batch_idx, positions, sizes.shape[0])
            if not torch.equal(given, from_ptr):
                raise ValueError("`batch_idx` and `batch_ptr` describe different systems")
        return from_ptr, batch_ptr.to(torch.int32).contiguous()
    if batch_idx is None:
        return (
            torch.zeros(n_atoms, dtype=torch.int32, device=device),
            torch.tensor([0, n_atoms], dtype=torch.int32, device=device),
        )
    batch_idx, n_systems = checks.check_batch_idx(batch_idx, positions, declared)
    if n_atoms > 1 and bool((batch_idx.diff() < 0).any()):
        raise ValueError("`batch_idx` must not decrease: atoms of one system stand together")
    sizes = torch.bincount(batch_idx, minlength=max(n_systems, 1))
    return batch_idx, torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).to(torch.int32)


def _check_extent(positions: torch.Tensor, planes: np.ndarray, cutoff: float) -> None:
    if positions.shape[0] == 0:
        return
    extent = float((positions.amax(0) - positions.amin(0)).norm()) + cutoff
    steepest = float(np.linalg.norm(planes, axis=2).max(initial=0.0))
    if extent * steepest > MAX_CELLS_APART:
        raise ValueError("`positions`: atoms are more cells apart than image numbers can hold; wrap them first")


def _check_size(size: int) -> None:
    if size > MAX_SLOTS:
        raise ValueError(f"`cutoff`: the list would have {size} entries, more than int32 can address")
