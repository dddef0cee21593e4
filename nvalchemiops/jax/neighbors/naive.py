"""`naive_neighbor_list`, under the path that clients import."""

from nvalchemiops.jax.neighbors.lists import naive_neighbor_list

__all__ = ["naive_neighbor_list"]
