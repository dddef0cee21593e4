"""Sums over segments of Warp arrays; for tensors see `nvalchemiops.torch.segment_ops`."""

from nvalchemiops.compat.paths import forwarded

_NAMES = ["segmented_max", "segmented_mean", "segmented_min", "segmented_sum"]
__all__ = list(_NAMES)
__getattr__ = forwarded(__name__, "nvalchemiops.torch.clients.sums", _NAMES)
