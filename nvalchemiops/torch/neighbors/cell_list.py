"""Neighbor lists of one system, from bins, under the path that clients import."""

from nvalchemiops.torch.neighbors.lists import cell_list, estimate_cell_list_sizes

__all__ = ["cell_list", "estimate_cell_list_sizes"]
