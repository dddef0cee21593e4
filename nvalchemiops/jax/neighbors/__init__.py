"""Neighbor lists for JAX arrays: exact for every cell, in matrix or list format, for one system or a batch."""

# submodules with the name of a function are imported first, so that the functions replace them
import nvalchemiops.jax.neighbors.batch_cell_list
import nvalchemiops.jax.neighbors.cell_list  # noqa: F401
from nvalchemiops.jax.neighbors.lists import (
    batch_cell_list,
    batch_naive_neighbor_list,
    batch_naive_neighbor_list_dual_cutoff,
    cell_list,
    naive_neighbor_list,
    naive_neighbor_list_dual_cutoff,
    neighbor_list,
)
from nvalchemiops.jax.neighbors.planning import (
    check_neighbor_list_rebuild_needed,
    estimate_batch_cell_list_sizes,
    estimate_cell_list_sizes,
    get_neighbor_list_from_neighbor_matrix,
    neighbor_list_needs_rebuild,
    suggest_neighbor_list_method,
)
from nvalchemiops.jax.neighbors.states import NeighborListState, check_neighbor_list_state, prepare_neighbor_list
from nvalchemiops.neighbors import NeighborOverflowError
from nvalchemiops.neighbors.neighbor_utils import estimate_max_neighbors

__all__ = [
    "NeighborListState",
    "NeighborOverflowError",
    "batch_cell_list",
    "batch_naive_neighbor_list",
    "batch_naive_neighbor_list_dual_cutoff",
    "cell_list",
    "check_neighbor_list_rebuild_needed",
    "check_neighbor_list_state",
    "estimate_batch_cell_list_sizes",
    "estimate_cell_list_sizes",
    "estimate_max_neighbors",
    "get_neighbor_list_from_neighbor_matrix",
    "naive_neighbor_list",
    "naive_neighbor_list_dual_cutoff",
    "neighbor_list",
    "neighbor_list_needs_rebuild",
    "prepare_neighbor_list",
    "suggest_neighbor_list_method",
]
