"""`cell_list`, under the path that clients import."""

from nvalchemiops.jax.neighbors.lists import cell_list
from nvalchemiops.jax.neighbors.planning import estimate_cell_list_sizes

__all__ = ["cell_list", "estimate_cell_list_sizes"]
