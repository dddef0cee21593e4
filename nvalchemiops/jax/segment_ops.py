"""Sums over segments for JAX arrays; see `nvalchemiops.torch.segment_ops`."""

from typing import Any

from nvalchemiops.jax.operators import operator
from nvalchemiops.torch import segment_ops

segmented_dot: Any = operator(segment_ops.segmented_dot)
segmented_matvec: Any = operator(segment_ops.segmented_matvec)
segmented_max: Any = operator(segment_ops.segmented_max)
segmented_mean: Any = operator(segment_ops.segmented_mean)
segmented_min: Any = operator(segment_ops.segmented_min)
segmented_mul: Any = operator(segment_ops.segmented_mul)
segmented_rms_norm: Any = operator(segment_ops.segmented_rms_norm)
segmented_sum: Any = operator(segment_ops.segmented_sum)

__all__ = list(segment_ops.__all__)  # the same names
