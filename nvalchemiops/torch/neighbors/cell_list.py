"""Neighbor lists of one system, from bins, under the path that clients import."""

from nvalchemiops.torch.neighbors.lists_by_method import cell_list
from nvalchemiops.torch.neighbors.planning import estimate_cell_list_sizes

__all__ = ["cell_list", "estimate_cell_list_sizes"]
