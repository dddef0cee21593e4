"""Sizes and formats of neighbor lists, under the names that clients import."""

from nvalchemiops.neighbors.neighbor_utils import estimate_max_neighbors
from nvalchemiops.torch.neighbors.formats import get_neighbor_list_from_neighbor_matrix

__all__ = ["estimate_max_neighbors", "get_neighbor_list_from_neighbor_matrix"]
