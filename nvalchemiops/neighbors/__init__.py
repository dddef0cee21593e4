"""Neighbor lists: kernels that build and check them, sizes, and errors."""

from nvalchemiops.neighbors.neighbor_utils import NeighborOverflowError, estimate_max_neighbors

__all__ = ["NeighborOverflowError", "estimate_max_neighbors"]
