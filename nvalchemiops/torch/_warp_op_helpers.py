"""Custom operators of clients that launch Warp kernels, under the path that clients import.

New ones are written with `nvalchemiops.torch.autograd.warp_custom_op`, which differentiates.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nvalchemiops.torch.autograd import warp_stream_from_torch

__all__ = ["register_noop_fake", "scoped_warp_stream", "torch_custom_op"]


def torch_custom_op(name: str, *, mutates_args: tuple[str, ...]) -> Callable[[Callable[..., Any]], Any]:
    """Make an annotated function a torch operator ``name``, with a namespace, which writes into ``mutates_args``."""
    return torch.library.custom_op(name, mutates_args=mutates_args)


def register_noop_fake(op: Any) -> None:
    """State that the operator returns nothing, so that a compiler need not run it."""
    op.register_fake(lambda *args, **kwargs: None)


@contextmanager
def scoped_warp_stream(device: torch.device | str, *, torch_stream: "torch.cuda.Stream | None" = None) -> Iterator[Any]:
    """Launch on ``torch_stream``, by default torch's current stream of the device; on the CPU it does nothing."""
    on_cuda = torch.device(device).type == "cuda"
    with torch.cuda.stream(torch_stream if on_cuda else None), warp_stream_from_torch(device) as stream:
        yield stream
