"""Sizes and conversion of neighbor lists, under the path that clients import."""

from nvalchemiops.jax.neighbors.planning import get_neighbor_list_from_neighbor_matrix
from nvalchemiops.neighbors import NeighborOverflowError
from nvalchemiops.neighbors.neighbor_utils import estimate_max_neighbors

__all__ = ["NeighborOverflowError", "estimate_max_neighbors", "get_neighbor_list_from_neighbor_matrix"]
