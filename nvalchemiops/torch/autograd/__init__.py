"""Torch custom ops from Warp kernels: registration, gradients, and the helpers that bodies use.

See `warp_custom_op` for the two ways to differentiate.
"""

from nvalchemiops.launch import NotDifferentiableError
from nvalchemiops.torch.autograd.arrays import needs_grad, warp_from_torch, warp_stream_from_torch
from nvalchemiops.torch.autograd.custom_op import warp_custom_op
from nvalchemiops.torch.autograd.op import WarpOp
from nvalchemiops.torch.autograd.specs import DynamicSize, OutputSpec
from nvalchemiops.torch.autograd.tapes import (
    WarpAutogradContextManager,
    attach_for_backward,
    extract_gradients,
    live_recordings,
    retrieve_for_backward,
    standard_backward,
)

__all__ = [
    "DynamicSize",
    "NotDifferentiableError",
    "OutputSpec",
    "WarpAutogradContextManager",
    "WarpOp",
    "attach_for_backward",
    "extract_gradients",
    "live_recordings",
    "needs_grad",
    "retrieve_for_backward",
    "standard_backward",
    "warp_custom_op",
    "warp_from_torch",
    "warp_stream_from_torch",
]
