"""Checks whether a list must be rebuilt, under the path that clients import."""

from nvalchemiops.jax.neighbors.planning import check_neighbor_list_rebuild_needed, neighbor_list_needs_rebuild

__all__ = ["check_neighbor_list_rebuild_needed", "neighbor_list_needs_rebuild"]
