"""Two neighbor lists of one system, from all pairs, under the path that clients import."""

from nvalchemiops.torch.neighbors.lists_by_method import naive_neighbor_list_dual_cutoff

__all__ = ["naive_neighbor_list_dual_cutoff"]
