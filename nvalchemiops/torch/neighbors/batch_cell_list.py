"""Neighbor lists of a batch, from bins, under the path that clients import."""

from nvalchemiops.torch.neighbors.lists_by_method import batch_cell_list
from nvalchemiops.torch.neighbors.planning import batch_build_cell_list, estimate_batch_cell_list_sizes

__all__ = ["batch_build_cell_list", "batch_cell_list", "estimate_batch_cell_list_sizes"]
