"""Errors of one rank that end the others, too, instead of leaving them to wait."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist


class OtherRankError(RuntimeError):
    """Another rank could not do its part."""


@contextlib.contextmanager
def together(group: Any, device: torch.device) -> Iterator[None]:
    """A part of a collective call in which a rank may raise; then all do. No collective operations inside.

    The rank with the error raises it, the others an `OtherRankError` with its number and message.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    failed = torch.tensor([error is not None], dtype=torch.int32, device=device)
    dist.all_reduce(failed, group=group)
    if not int(failed):
        return
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, None if error is None else f"{type(error).__name__}: {error}", group=group)
    if error is not None:
        raise error
    rank, text = next((rank, text) for rank, text in enumerate(told) if text is not None)
    raise OtherRankError(f"rank {dist.get_global_rank(group, rank)} could not go on: {text}")
