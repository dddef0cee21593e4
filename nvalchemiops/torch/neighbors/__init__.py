"""Neighbor lists of torch tensors: exact for every cell, in matrix or list format, for one system or a batch."""

from nvalchemiops.torch.neighbors.lists import (
    batch_cell_list,
    batch_naive_neighbor_list,
    batch_naive_neighbor_list_dual_cutoff,
    cell_list,
    estimate_batch_cell_list_sizes,
    estimate_cell_list_sizes,
    naive_neighbor_list,
    naive_neighbor_list_dual_cutoff,
    neighbor_list,
    suggest_neighbor_list_method,
)
from nvalchemiops.torch.neighbors.verlet import VerletList

__all__ = [
    "VerletList",
    "batch_cell_list",
    "batch_naive_neighbor_list",
    "batch_naive_neighbor_list_dual_cutoff",
    "cell_list",
    "estimate_batch_cell_list_sizes",
    "estimate_cell_list_sizes",
    "naive_neighbor_list",
    "naive_neighbor_list_dual_cutoff",
    "neighbor_list",
    "suggest_neighbor_list_method",
]
