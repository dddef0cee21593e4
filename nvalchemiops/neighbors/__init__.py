"""Neighbor lists: kernels that build them, and what goes wrong with them."""

from nvalchemiops.neighbors.neighbor_utils import NeighborOverflowError, estimate_max_neighbors

__all__ = ["NeighborOverflowError", "estimate_max_neighbors"]
