"""Neighbor lists, under the path of an older release: see `nvalchemiops.torch.neighbors`."""

from nvalchemiops.compat.deprecation import moved, warn_of_path

_LISTS = "nvalchemiops.torch.neighbors"
_SIZES = "nvalchemiops.neighbors"

_HOMES = {
    "NeighborOverflowError": _SIZES,
    "batch_cell_list": _LISTS,
    "batch_naive_neighbor_list": _LISTS,
    "batch_naive_neighbor_list_dual_cutoff": _LISTS,
    "cell_list": _LISTS,
    "estimate_batch_cell_list_sizes": _LISTS,
    "estimate_cell_list_sizes": _LISTS,
    "estimate_max_neighbors": _SIZES,
    "naive_neighbor_list": _LISTS,
    "naive_neighbor_list_dual_cutoff": _LISTS,
    "neighbor_list": _LISTS,
}

warn_of_path(__name__, _LISTS)

__all__ = list(_HOMES)
__getattr__ = moved(__name__, _HOMES)
