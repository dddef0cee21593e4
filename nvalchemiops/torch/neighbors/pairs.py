"""Distances and displacements of the pairs of a list or a matrix, differentiable to any order.

One kernel computes them; its derivative, a sum over pairs, consists of torch operations. Under compilers and function
transforms, which fuse or decompose operations, the values are also computed by torch operations. Both forms give the
same bits. To this end torch computes the square root, which Warp rounds differently.
"""

from typing import Any, NamedTuple

import torch

from nvalchemiops.layout import layout
from nvalchemiops.neighbors import pairs as core
from nvalchemiops.neighbors.rows import NO_PADDING, NOWHERE
from nvalchemiops.neighbors.search import NOT_FINITE
from nvalchemiops.torch import checks
from nvalchemiops.torch.autograd import OutputSpec, warp_custom_op
from nvalchemiops.torch.autograd.declaration import with_fields
from nvalchemiops.torch.autograd.specs import precision_of, real_of
from nvalchemiops.torch.launch import launch
from nvalchemiops.torch.operators.lattice import one_or_nan
from nvalchemiops.torch.runtime.context import is_eager
from nvalchemiops.torch.runtime.memory import new_empty

__all__ = ["list_geometry", "matrix_geometry"]


class Pairs(NamedTuple):
    """The slots of a list or a matrix, as indices of atoms, systems and images."""

    cell: torch.Tensor | None  # (1, 3, 3) or (n_systems, 3, 3)
    system: torch.Tensor | None  # (n_atoms,): system of each atom; None for one cell
    target: torch.Tensor | None  # (n_rows,): atom of each row; None if rows are atoms
    first: torch.Tensor | None  # (n_pairs,): row of each slot; None for a matrix
    second: torch.Tensor  # (n_pairs,) or (n_rows, width)
    shifts: torch.Tensor | None  # (n_pairs, 3) or (n_rows, width, 3)
    counts: torch.Tensor | None = None  # (n_rows,): number of slots of each row of a matrix before its padding
    width: int = 0  # of a matrix; 0 for a list
    padding: int = NO_PADDING  # entries of ``second`` with this value are padding, at any place in a row

    def as_int32(self) -> "Pairs":
        """The pairs in the form that kernels take: all indices in int32, and slots in one dimension."""
        indices = [None if t is None else checks.int32_of(t) for t in self[1:7]]
        system, target, first, second, shifts, counts = indices
        assert second is not None
        shifts = None if shifts is None else shifts.reshape(-1, 3)
        return Pairs(self.cell, system, target, first, second.reshape(-1), shifts, counts, self.width, self.padding)

    def occupied(self, n_rows: int) -> torch.Tensor:
        """Mask (n_rows, width) of the slots of a matrix that are not padding."""
        mask = self.second.reshape(n_rows, self.width) != self.padding
        if self.counts is None:
            return mask
        # a row without known neighbors holds the mark of its atom, or nothing
        known = (self.counts != NOT_FINITE).unsqueeze(1)
        if self.shifts is not None:
            known = known | (self.shifts.reshape(n_rows, self.width, 3)[..., 0].abs() == NOWHERE)
        return mask & known & slot_mask(self.counts, self.width)


def list_geometry(
    positions: torch.Tensor,
    neighbor_list: torch.Tensor,
    shifts: torch.Tensor | None = None,
    cell: torch.Tensor | None = None,
    batch_idx: torch.Tensor | None = None,
    target_indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Distances and displacements ``r_ij = x_j - x_i + S @ cell`` of the pairs of a list.

    Differentiable in ``positions`` and ``cell`` to any order. A distance of zero (atoms on top of each other) has zero
    derivatives. On a GPU torch sums gradients in no fixed order unless ``torch.use_deterministic_algorithms`` is on.

    Parameters
    ----------
    positions : (n_atoms, 3) tensor, float32 or float64, length
    neighbor_list : (2, n_pairs) int32 tensor
        i and j of each pair, in any order.
    shifts : (n_pairs, 3) int32 tensor, optional
        S of each pair; together with ``cell``.
    cell : (3, 3), (1, 3, 3) or (n_systems, 3, 3) tensor, length, optional
        Rows are lattice vectors. A single cell holds for all systems. Rows along which no pair is shifted may hold any
        values, even NaN.
    batch_idx : (n_atoms,) int32 tensor, optional
        System of each atom, in any order; needed with more than one cell.
    target_indices : (n_rows,) int32 tensor, optional
        For a list whose first row holds indices of rows, converted from a matrix with ``target_indices``: row r belongs
        to atom ``target_indices[r]``. Not needed for a list from `neighbor_list`, which holds indices of atoms.

    Returns
    -------
    distances : (n_pairs,) tensor, length
    vectors : (n_pairs, 3) tensor, length

    Raises
    ------
    ValueError, TypeError
        A bad shape, dtype or combination of arguments, named in the message.
    IndexError
        An index without an atom (on a GPU the result is NaN, and a derivative a device-side assertion).
    """
    checks.check_positions(positions, finite=False)
    checks.check_index("neighbor_list", neighbor_list, positions, (2, None))
    if shifts is not None:
        checks.check_index("shifts", shifts, positions, (neighbor_list.shape[1], 3))
    if target_indices is not None:
        checks.check_index("target_indices", target_indices, positions, (None,))
        if target_indices.shape[0] == 0 and neighbor_list.shape[1] > 0:  # to kernels, which read rows, none is no list
            raise IndexError("`neighbor_list` has rows of atoms, but `target_indices` has none")
    lattice, system = _lattice(positions, shifts, cell, batch_idx)
    pairs = Pairs(lattice, system, target_indices, neighbor_list[0], neighbor_list[1], shifts)
    return distances_and_vectors(positions, pairs)


def matrix_geometry(
    positions: torch.Tensor,
    neighbor_matrix: torch.Tensor,
    num_neighbors: torch.Tensor | None = None,
    shifts: torch.Tensor | None = None,
    cell: torch.Tensor | None = None,
    batch_idx: torch.Tensor | None = None,
    target_indices: torch.Tensor | None = None,
    *,
    fill_value: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Distances and displacements ``r_ij = x_j - x_i + S @ cell`` of the slots of a neighbor matrix.

    Like `list_geometry`, but with static shapes. In padding, distances, displacements and all derivatives are exactly
    zero, for any index and shift there.

    Parameters
    ----------
    positions, cell, batch_idx
        As for `list_geometry`.
    neighbor_matrix : (n_rows, width) int32 tensor
        A matrix without rows has no pairs, for any number of atoms.
    num_neighbors : (n_rows,) int32 tensor, optional
        Number of slots of each row before its padding. If not given, only ``fill_value`` marks padding. The row of an
        atom without known neighbors (2**31 - 1, see ``check`` of `neighbor_list`) has the slot that says so, or none.
    shifts : (n_rows, width, 3) int32 tensor, optional
        S of each neighbor; together with ``cell``.
    target_indices : (n_rows,) int32 tensor, optional
        Row r belongs to atom ``target_indices[r]``. If not given, n_rows is n_atoms.
    fill_value : int, optional
        Slots with this value are also padding, even if it is the index of an atom. By default n_atoms if
        ``num_neighbors`` is not given, and otherwise no value.

    Returns
    -------
    distances : (n_rows, width) tensor, length
    vectors : (n_rows, width, 3) tensor, length

    Raises
    ------
    ValueError, TypeError
        A bad shape, dtype or combination of arguments, named in the message.
    IndexError
        An index without an atom, not in padding (on a GPU the result is NaN, and a derivative a device-side assertion).
    """
    checks.check_positions(positions, finite=False)
    n_atoms = positions.shape[0]
    checks.check_index("neighbor_matrix", neighbor_matrix, positions, (None, None))
    n_rows, width = neighbor_matrix.shape
    if target_indices is not None:
        checks.check_index("target_indices", target_indices, positions, (n_rows,))
    elif n_rows not in (0, n_atoms):
        raise ValueError(f"`neighbor_matrix` must have {n_atoms} rows, one for each atom, got {n_rows}")
    if num_neighbors is not None:
        checks.check_index("num_neighbors", num_neighbors, positions, (n_rows,))
    if fill_value is not None:
        padding = checks.check_int("fill_value", fill_value)
    else:
        padding = n_atoms if num_neighbors is None else NO_PADDING
    if shifts is not None:
        checks.check_index("shifts", shifts, positions, (n_rows, width, 3))
    lattice, system = _lattice(positions, shifts, cell, batch_idx)
    pairs = Pairs(lattice, system, target_indices, None, neighbor_matrix, shifts, num_neighbors, width, padding)
    return distances_and_vectors(positions, pairs)


def _lattice(
    positions: torch.Tensor, shifts: torch.Tensor | None, cell: Any, batch_idx: Any
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Cells (n_systems, 3, 3), and the system of each atom if there are several; checked together with the shifts."""
    if batch_idx is not None:
        checks.check_index("batch_idx", batch_idx, positions, (positions.shape[0],))
    if cell is None:
        if shifts is not None:
            raise ValueError("`cell` is needed with `shifts`, which count its lattice vectors")
        return None, None
    cell = checks.check_lattice(cell, positions)
    if shifts is None:
        raise ValueError("`shifts` are needed with `cell`: without them neighbors in other images are misplaced")
    cell = cell.reshape(-1, 3, 3)
    if batch_idx is None and cell.shape[0] != 1:
        raise ValueError(f"`batch_idx` is needed with {cell.shape[0]} cells")
    return cell, batch_idx if cell.shape[0] != 1 else None


def slot_mask(counts: torch.Tensor, width: int) -> torch.Tensor:
    """Mask (n_rows, width) of the slots before the count of their row."""
    return torch.arange(width, dtype=counts.dtype, device=counts.device) < counts.unsqueeze(1)


def distances_and_vectors(positions: torch.Tensor, pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
    """Distances, in the shape of ``pairs.second``, and vectors; for checked arguments."""
    if is_eager():
        distances, vectors = measure_pairs(positions, *pairs.as_int32())
        # NaN for an index without an atom, for which torch raises an error; not checked on a GPU
        if not layout(distances.device.type).reads or not bool(distances.detach().sum().isnan()):
            if pairs.first is not None:
                return distances, vectors
            shape = pairs.second.shape
            return distances.reshape(shape), vectors.reshape(*shape, 3)
    return _in_torch(positions, pairs)


# -- as one kernel --------------------------------------------------------------------------------


def _pull_back(
    inputs: dict[str, Any],
    distances: torch.Tensor,
    vectors: torch.Tensor,
    grad_distances: torch.Tensor | None,
    grad_vectors: torch.Tensor | None,
    wanted: frozenset[str],
) -> dict[str, torch.Tensor]:
    positions = inputs["positions"]
    pairs = Pairs(*(inputs[name] for name in Pairs._fields))
    gradient = grad_vectors  # with respect to the vectors
    if grad_distances is not None:
        is_zero = distances == 0.0
        rate = torch.where(is_zero, 0.0, grad_distances / torch.where(is_zero, 1.0, distances))
        radial = vectors * rate.unsqueeze(-1)
        gradient = radial if gradient is None else gradient + radial
    assert gradient is not None
    # torch sums gradients ten times faster on the CPU if indices are int64
    j = pairs.second.to(torch.int64)
    if pairs.first is not None:
        i = pairs.first.to(torch.int64)
    else:
        n_rows = j.shape[0] // max(pairs.width, 1) if pairs.counts is None else pairs.counts.shape[0]
        i = torch.arange(n_rows, device=j.device).repeat_interleave(pairs.width)
    if pairs.target is not None:
        i = pairs.target.to(torch.int64).index_select(0, i)
    if pairs.first is None:
        # padding points to the row's own atom: a valid index, near in memory
        occupied = pairs.occupied(n_rows).reshape(-1)
        j = torch.where(occupied, j, i)
        gradient = gradient.masked_fill(~occupied.unsqueeze(-1), 0.0)
    gradients = {}
    if "positions" in wanted:
        zeros = torch.zeros_like(positions)
        gradients["positions"] = zeros.index_add(0, j, gradient) - zeros.index_add(0, i, gradient)
    if "cell" in wanted:
        gradients["cell"] = _cell_gradient(pairs, gradient, i)
    return gradients


def _cell_gradient(pairs: Pairs, gradient: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    """``Σ S^T gradient`` over the pairs of each system; zero for axes along which a pair is not shifted."""
    assert pairs.cell is not None and pairs.shifts is not None
    system = None if pairs.system is None else pairs.system.to(torch.int64).index_select(0, i)
    rows = []
    for count in pairs.shifts.unsqueeze(-1).unbind(-2):
        part = torch.where(count != 0, count.to(gradient.dtype) * gradient, 0.0)
        if system is None:
            rows.append(part.sum(0, keepdim=True))
        else:
            rows.append(gradient.new_zeros(pairs.cell.shape[0], 3).index_add(0, system, part))
    return torch.stack(rows, 1)


@warp_custom_op(
    "nvalchemiops::measure_pairs",
    outputs=[
        OutputSpec("distances", real_of, lambda *inputs: inputs[5].shape),
        OutputSpec("vectors", real_of, lambda *inputs: (*inputs[5].shape, 3)),
    ],
    grad_arrays=("distances", "vectors", "positions", "cell"),
    backward=_pull_back,
    trusted=True,
)
@with_fields
def measure_pairs(positions: torch.Tensor, pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
    """Distances (n_slots,) and vectors (n_slots, 3) of `Pairs`; NaN for an index out of range."""
    n_slots = pairs.second.shape[0]
    distances = new_empty((n_slots,), positions.dtype, positions.device)
    vectors = new_empty((n_slots, 3), positions.dtype, positions.device)
    kernel = core.measure_pairs(precision_of(positions))
    each = layout(positions.device.type).rows_per_thread(core.SLOTS_PER_THREAD)
    launch(kernel, -(-n_slots // each), [positions, *pairs, each], [distances, vectors])
    return distances.sqrt_(), vectors


# -- in torch -------------------------------------------------------------------------------------


def _in_torch(positions: torch.Tensor, pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
    # gradients are summed with these indices, which torch does ten times faster on the CPU if they are int64
    j = pairs.second.to(torch.int64)
    occupied = None
    if pairs.first is not None:
        i = pairs.first.to(torch.int64)
        if pairs.target is not None:
            i = pairs.target.to(torch.int64).index_select(0, i)
        x_i = positions.index_select(0, i)
    else:
        n_rows = j.shape[0]
        if pairs.target is None:
            i = torch.arange(n_rows, device=positions.device)
            x_i = positions[:n_rows].unsqueeze(1)
        else:
            i = pairs.target.to(torch.int64)
            x_i = positions.index_select(0, i).unsqueeze(1)
        # padding points to the row's own atom: a valid index, near in memory
        occupied = pairs.occupied(n_rows)
        j = torch.where(occupied, j, i.unsqueeze(1))
    vectors = positions.index_select(0, j.flatten()).reshape(*j.shape, 3) - x_i
    if pairs.shifts is not None and pairs.cell is not None:
        cell = pairs.cell
        if pairs.system is not None:
            cell = cell.index_select(0, pairs.system.to(torch.int64).index_select(0, i))
        vectors = _displaced(vectors, pairs.shifts, cell if occupied is None else cell.unsqueeze(1))
    if occupied is not None:
        # even if the position of the atom is NaN, or old shifts follow the count
        vectors = vectors.masked_fill(~occupied.unsqueeze(-1), 0.0)
    return _length(vectors), vectors


def _displaced(vectors: torch.Tensor, shifts: torch.Tensor, cell: torch.Tensor) -> torch.Tensor:
    """``vectors + S @ cell``; pairs that are not shifted do not read the cell, which may be NaN there.

    Written out, since a matrix product might be rounded to TF32, and the rounding of ``addcmul`` varies.
    """
    for axis in range(3):
        count = shifts[..., axis, None]
        known = one_or_nan((count != NOWHERE) & (count != -NOWHERE)).to(cell.dtype)
        vectors = vectors + torch.where(count != 0, count.to(cell.dtype) * known * cell[..., axis, :], 0.0)
    return vectors


def _length(vectors: torch.Tensor) -> torch.Tensor:
    """Euclidean length, whose derivatives are zero where it is zero."""
    x, y, z = vectors.unbind(-1)
    square = x * x + y * y + z * z
    is_zero = square == 0.0
    # the inner choice keeps the infinite derivative of the root out of the gradient, the outer one restores the value
    return torch.where(is_zero, 0.0, torch.where(is_zero, 1.0, square).sqrt())
