"""Two neighbor lists of a batch, from all pairs, under the path that clients import."""

from nvalchemiops.torch.neighbors.lists_by_method import batch_naive_neighbor_list_dual_cutoff

__all__ = ["batch_naive_neighbor_list_dual_cutoff"]
