"""`batch_naive_neighbor_list_dual_cutoff`, under the path that clients import."""

from nvalchemiops.jax.neighbors.lists import batch_naive_neighbor_list_dual_cutoff

__all__ = ["batch_naive_neighbor_list_dual_cutoff"]
