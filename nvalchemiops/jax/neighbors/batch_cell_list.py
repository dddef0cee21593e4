"""`batch_cell_list`, under the path that clients import."""

from nvalchemiops.jax.neighbors.lists import batch_cell_list
from nvalchemiops.jax.neighbors.planning import estimate_batch_cell_list_sizes

__all__ = ["batch_cell_list", "estimate_batch_cell_list_sizes"]
