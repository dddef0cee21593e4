"""`batch_naive_neighbor_list`, under the path that clients import."""

from nvalchemiops.jax.neighbors.lists import batch_naive_neighbor_list

__all__ = ["batch_naive_neighbor_list"]
