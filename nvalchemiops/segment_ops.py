"""Sums over segments of Warp arrays, under the path that clients import; of tensors: `nvalchemiops.torch.segment_ops`."""

from nvalchemiops.compat.paths import forwarded

__all__ = ["segmented_max", "segmented_mean", "segmented_min", "segmented_sum"]
__getattr__ = forwarded(__name__, "nvalchemiops.torch.clients.sums", __all__)
