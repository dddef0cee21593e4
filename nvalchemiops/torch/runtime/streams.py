"""Work beside other work of the same call, on a GPU."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from nvalchemiops.torch.runtime.context import is_eager
from nvalchemiops.torch.runtime.operations import tensors_in
from nvalchemiops.torch.runtime.recorder import current_recorder

First = TypeVar("First")


@functools.cache
def _side(device: torch.device) -> Any:
    """The second stream of the library on a device."""
    return torch.cuda.Stream(device)


def beside(
    first: Callable[[], First],
    second: Callable[[], tuple[torch.Tensor | None, ...]],
    device: torch.device,
    given: Sequence[Any] = (),
) -> tuple[First, Any]:
    """The results of two functions that do not depend on each other; in eager mode on a GPU they run at the same time.

    The host calls them in this order on all ranks, so messages have one order. The second one runs on another
    stream, from what was computed before this call: while its messages travel, the first one computes. Messages of the
    first are sent before all messages of the second, which would hold them up.

    The backward pass of the second one runs on the other stream, too, and may be the last to use a tensor ``given`` to
    it, in nested tuples. The memory of these is not reused before that. A recorder keeps all tensors; for it this would
    be a change of tensors that existed before the call.

    Returns
    -------
    (results of the first, tensors of the second)
        Ready for the current stream.
    """
    if device.type != "cuda" or not is_eager():
        return first(), second()
    here, side = torch.cuda.current_stream(device), _side(device)
    begun = here.record_event()
    for used in tensors_in(given) if torch.is_grad_enabled() and current_recorder() is None else ():
        if used.device.type == device.type:
            used.record_stream(side)
    found = first()
    side.wait_event(begun)
    with torch.cuda.stream(side):
        others = second()
    here.wait_stream(side)
    for tensor in others:
        if tensor is not None:
            tensor.record_stream(here)  # its memory is not reused before this stream is done with it
    return found, others
