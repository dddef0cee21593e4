"""Sizes and formats of neighbor lists, under the path of an older release."""

from nvalchemiops.compat.deprecation import moved

_HOMES = {
    "NeighborOverflowError": "nvalchemiops.neighbors",
    "estimate_max_neighbors": "nvalchemiops.neighbors",
    "get_neighbor_list_from_neighbor_matrix": "nvalchemiops.torch.neighbors.neighbor_utils",
}

__all__ = list(_HOMES)
__getattr__ = moved(__name__, _HOMES)
