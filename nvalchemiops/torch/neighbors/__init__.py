"""Neighbor lists of torch tensors: exact for every cell, in matrix or list format, for one system or a batch."""

# A submodule becomes an attribute of this package when it is first imported. Submodules with the name of a function are
# imported first, so that the functions replace them.
import nvalchemiops.torch.neighbors.batch_cell_list
import nvalchemiops.torch.neighbors.cell_list  # noqa: F401
from nvalchemiops.neighbors import NeighborOverflowError
from nvalchemiops.torch.neighbors.lists import neighbor_list
from nvalchemiops.torch.neighbors.lists_by_method import (
    batch_cell_list,
    batch_naive_neighbor_list,
    batch_naive_neighbor_list_dual_cutoff,
    cell_list,
    naive_neighbor_list,
    naive_neighbor_list_dual_cutoff,
)
from nvalchemiops.torch.neighbors.planning import (
    estimate_batch_cell_list_sizes,
    estimate_cell_list_sizes,
    suggest_neighbor_list_method,
)
from nvalchemiops.torch.neighbors.verlet import VerletList

__all__ = [
    "NeighborOverflowError",
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
