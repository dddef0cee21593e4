"""Sizes and formats of neighbor lists, under the names that clients import."""

from nvalchemiops.neighbors import NeighborOverflowError
from nvalchemiops.neighbors.neighbor_utils import estimate_max_neighbors
from nvalchemiops.torch.neighbors.formats import get_neighbor_list_from_neighbor_matrix
from nvalchemiops.torch.neighbors.planning import compute_naive_num_shifts

__all__ = [
    "NeighborOverflowError",
    "compute_naive_num_shifts",
    "estimate_max_neighbors",
    "get_neighbor_list_from_neighbor_matrix",
]
