"""Tests of neighbor lists on Warp arrays, under the path that clients import."""

from nvalchemiops.compat.paths import forwarded

_NAMES = ["check_batch_neighbor_list_rebuild"]
__all__ = list(_NAMES)
__getattr__ = forwarded(__name__, "nvalchemiops.torch.clients.sums", _NAMES)
