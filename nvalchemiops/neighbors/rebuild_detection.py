"""Tests of neighbor lists on Warp arrays, under the path that clients import."""

from nvalchemiops.compat.paths import forwarded

__all__ = ["check_batch_neighbor_list_rebuild"]
__getattr__ = forwarded(__name__, "nvalchemiops.torch.clients.sums", __all__)
