"""Sizes and formats of neighbor lists, under the names that clients import."""

from nvalchemiops.neighbors import NeighborOverflowError
from nvalchemiops.neighbors.neighbor_utils import estimate_max_neighbors
from nvalchemiops.torch.neighbors.formats import get_neighbor_list_from_neighbor_matrix
from nvalchemiops.torch.neighbors.planning import allocate_cell_list, compute_naive_num_shifts

__all__ = [
    "NeighborOverflowError",
    "allocate_cell_list",
    "compute_naive_num_shifts",
    "estimate_max_neighbors",
    "get_neighbor_list_from_neighbor_matrix",
]
