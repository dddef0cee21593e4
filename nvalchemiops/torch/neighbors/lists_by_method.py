"""Public functions that each build neighbor lists by one method, for clients. `neighbor_list` covers all of them."""

from typing import Any

import torch

from nvalchemiops.compat.ignored_arguments import ignore
from nvalchemiops.neighbors.grid import BINNED, NAIVE
from nvalchemiops.torch.neighbors.driver import Form, Room, Systems, Tensors, build, build_two
from nvalchemiops.torch.types import Pbc


def cell_list(
    positions: torch.Tensor,
    cutoff: float,
    cell: torch.Tensor | None,
    pbc: Pbc | None,
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
    *,
    check: bool = True,
    **without_effect: Any,
) -> Tensors:
    """Neighbor list of one system, its atoms sorted into bins. Arguments and results as in `neighbor_list`."""
    ignore("cell_list", without_effect)
    systems = Systems(positions, cell, pbc, None, None, target_indices, rebuild_flags)
    form = Form(half_fill, fill_value, return_neighbor_list, return_vectors, return_distances, check=check)
    memory = neighbor_matrix, neighbor_matrix_shifts, num_neighbors, neighbor_vectors, neighbor_distances
    return build(systems, cutoff, form, Room(max_neighbors, *memory), BINNED)


def batch_cell_list(
    positions: torch.Tensor,
    cutoff: float,
    cell: torch.Tensor | None,
    pbc: Pbc | None,
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
    *,
    check: bool = True,
    **without_effect: Any,
) -> Tensors:
    """Neighbor lists of a batch, atoms sorted into bins. Arguments and results as in `neighbor_list`."""
    ignore("batch_cell_list", without_effect)
    systems = Systems(positions, cell, pbc, batch_idx, batch_ptr, target_indices, rebuild_flags)
    form = Form(half_fill, fill_value, return_neighbor_list, return_vectors, return_distances, check=check)
    memory = neighbor_matrix, neighbor_matrix_shifts, num_neighbors, neighbor_vectors, neighbor_distances
    return build(systems, cutoff, form, Room(max_neighbors, *memory), BINNED)


def naive_neighbor_list(
    positions: torch.Tensor,
    cutoff: float,
    cell: torch.Tensor | None = None,
    pbc: Pbc | None = None,
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
    check: bool = True,
    **without_effect: Any,
) -> Tensors:
    """Neighbor list of one system by tests of all pairs. Arguments and results as in `neighbor_list`."""
    ignore("naive_neighbor_list", without_effect)
    systems = Systems(positions, cell, pbc, None, None, target_indices, rebuild_flags)
    form = Form(half_fill, fill_value, return_neighbor_list, return_vectors, return_distances, check=check)
    memory = neighbor_matrix, neighbor_matrix_shifts, num_neighbors, neighbor_vectors, neighbor_distances
    return build(systems, cutoff, form, Room(max_neighbors, *memory), NAIVE)


def batch_naive_neighbor_list(
    positions: torch.Tensor,
    cutoff: float,
    batch_idx: torch.Tensor | None = None,
    batch_ptr: torch.Tensor | None = None,
    pbc: Pbc | None = None,
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
    check: bool = True,
    **without_effect: Any,
) -> Tensors:
    """Neighbor lists of a batch by tests of all pairs. Arguments and results as in `neighbor_list`."""
    ignore("batch_naive_neighbor_list", without_effect)
    systems = Systems(positions, cell, pbc, batch_idx, batch_ptr, target_indices, rebuild_flags)
    form = Form(half_fill, fill_value, return_neighbor_list, return_vectors, return_distances, check=check)
    memory = neighbor_matrix, neighbor_matrix_shifts, num_neighbors, neighbor_vectors, neighbor_distances
    return build(systems, cutoff, form, Room(max_neighbors, *memory), NAIVE)


def naive_neighbor_list_dual_cutoff(
    positions: torch.Tensor,
    cutoff1: float,
    cutoff2: float,
    pbc: Pbc | None = None,
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
    *,
    check: bool = True,
    **without_effect: Any,
) -> Tensors:
    """Two neighbor lists of one system by tests of all pairs: the results of `neighbor_list` for each cutoff."""
    ignore("naive_neighbor_list_dual_cutoff", without_effect)
    systems = Systems(positions, cell, pbc, rebuild_flags=rebuild_flags)
    form = Form(half_fill, fill_value, return_neighbor_list, check=check)
    out1 = Room(max_neighbors1, neighbor_matrix1, neighbor_matrix_shifts1, num_neighbors1)
    out2 = Room(max_neighbors2, neighbor_matrix2, neighbor_matrix_shifts2, num_neighbors2)
    cutoffs = {"cutoff1": cutoff1, "cutoff2": cutoff2}
    return build_two(systems, cutoffs, form, out1, out2, NAIVE)


def batch_naive_neighbor_list_dual_cutoff(
    positions: torch.Tensor,
    cutoff1: float,
    cutoff2: float,
    batch_idx: torch.Tensor | None = None,
    batch_ptr: torch.Tensor | None = None,
    pbc: Pbc | None = None,
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
    *,
    check: bool = True,
    **without_effect: Any,
) -> Tensors:
    """Two neighbor lists of a batch by tests of all pairs: the results of `neighbor_list` for each cutoff in turn."""
    ignore("batch_naive_neighbor_list_dual_cutoff", without_effect)
    systems = Systems(positions, cell, pbc, batch_idx, batch_ptr, None, rebuild_flags)
    form = Form(half_fill, fill_value, return_neighbor_list, check=check)
    out1 = Room(max_neighbors1, neighbor_matrix1, neighbor_matrix_shifts1, num_neighbors1)
    out2 = Room(max_neighbors2, neighbor_matrix2, neighbor_matrix_shifts2, num_neighbors2)
    cutoffs = {"cutoff1": cutoff1, "cutoff2": cutoff2}
    return build_two(systems, cutoffs, form, out1, out2, NAIVE)
