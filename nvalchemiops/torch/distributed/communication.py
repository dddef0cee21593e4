"""Communication between ranks by torch.distributed.

A rank that cannot go on must not leave the others to wait. What it raises they learn by
`nvalchemiops.torch.distributed.agreement`. A rank that is gone, or does not come within the timeout of the group (an
argument of ``init_process_group``), is named.
"""

import contextlib
import functools
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from nvalchemiops.threads import available_cores
from nvalchemiops.torch.runtime.memory import new_empty

PATIENCE = 2.0
"""Seconds in which ranks that are still there say so after a failure."""


AWAKE = 0.005
"""Seconds in which a rank looks for its messages before it sleeps until they have come."""


class OtherRankError(RuntimeError):
    """Another rank could not do its part."""


@contextlib.contextmanager
def _named(group: Any) -> Iterator[None]:
    """Name the ranks that are gone when communication fails."""
    try:
        yield
    except RuntimeError as error:
        gone = _gone(group)
        who = f"rank {', '.join(map(str, gone))} is gone or late" if gone else "communication with other ranks failed"
        raise OtherRankError(f"{who}: {error}") from error


def _gone(group: Any) -> list[int]:
    """Ranks that do not answer any more, by their numbers among all."""
    try:
        store = group.get_group_store()
        names = [f"nvalchemiops/here/{rank}" for rank in range(dist.get_world_size(group))]
        store.set(names[dist.get_rank(group)], "yes")
        time.sleep(PATIENCE)
        return [dist.get_global_rank(group, rank) for rank, name in enumerate(names) if not store.check([name])]
    except (RuntimeError, AttributeError):  # the process with the store is gone
        return []


@functools.cache
def _has_cores(n_ranks: int) -> bool:
    """Whether each rank on this machine has a core, so that one that waits takes none from another."""
    on_this_machine = int(os.environ.get("LOCAL_WORLD_SIZE", n_ranks))
    return hasattr(os, "sched_yield") and on_this_machine <= available_cores()


def _wait(work: Any, tensor: torch.Tensor, group: Any) -> None:
    """Wait for a message with this tensor.

    A core that sleeps wakes up late, on virtual machines above all. So a rank stays awake for a while, as in other
    libraries for messages, and gives way to threads with work.
    """
    if work is None:  # of a rank outside of the group
        return
    if tensor.device.type == "cpu" and _has_cores(dist.get_world_size(group)):
        end = time.perf_counter() + AWAKE
        while not work.is_completed() and time.perf_counter() < end:
            os.sched_yield()
    work.wait()


def add(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """The tensor, in place the sum of those of all ranks."""
    with _named(group):
        _wait(dist.all_reduce(tensor, group=group, async_op=True), tensor, group)
    return tensor


def maximum(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """The tensor, in place the entrywise maximum of those of all ranks."""
    with _named(group):
        _wait(dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group, async_op=True), tensor, group)
    return tensor


def tell_from(rank: int, what: Any, group: Any, device: Any) -> Any:
    """What one rank has to say, by its number among all, on all ranks of the group."""
    said = [what]
    with _named(group):
        dist.broadcast_object_list(said, src=rank, group=group, device=device)
    return said[0]


def swap_rows(values: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: Any) -> torch.Tensor:
    """Rows from all ranks; see `nvalchemiops.torch.distributed.collectives.all_to_all_rows`."""
    rows = new_empty((sum(receive), *values.shape[1:]), values.dtype, values.device)
    with _named(group):
        work = dist.all_to_all_single(rows, values, list(receive), list(send), group=group, async_op=True)
        _wait(work, values, group)
    return rows


def tell(what: Any, group: Any) -> list[Any]:
    """What each rank has to say, on all ranks."""
    told: list[Any] = [None] * dist.get_world_size(group)
    with _named(group):
        dist.all_gather_object(told, what, group=group)
    return told
