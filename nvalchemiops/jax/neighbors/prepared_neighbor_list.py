"""Lists of a fixed size, under the path that clients import."""

from nvalchemiops.jax.neighbors.states import NeighborListState, check_neighbor_list_state, prepare_neighbor_list

__all__ = ["NeighborListState", "check_neighbor_list_state", "prepare_neighbor_list"]
