"""CUDA graphs of calls: the work that a call enqueues on a GPU, captured once, with separate memory."""

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch

from nvalchemiops.torch.runtime._torch_internals import leave_pool
from nvalchemiops.torch.runtime.cache import stream_of
from nvalchemiops.torch.runtime.memory import is_out_of_memory

Tensors = Sequence[torch.Tensor]

LEAST_LIMIT = 2**30
"""Largest memory of a plan on a small GPU, in bytes. On a larger one it is a 32nd of its memory."""

_failed: dict[torch.device, str] = {}
"""Why a capture has failed, for each device on which even an addition could not be captured afterwards."""


class Graph:
    """The captured work of a call, with the device memory that was reserved for it, or why the capture has failed."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.n_bytes, self.reason = device, 0, ""
        self._graph = torch.cuda.CUDAGraph()

    def captured(
        self, function: Callable[[Tensors], Tensors], memory: Tensors, may_repeat: bool = False
    ) -> Tensors | None:
        """Capture ``function(memory)`` without running it, and return its results; None if the capture fails.

        While a graph is captured, torch frees none of the memory that it keeps for others. If there is no other
        memory, all that it keeps is freed, and ``function`` is called once more if it ``may_repeat``.

        ``torch.cuda.graph`` is not used: it first waits for the device, collects garbage and empties torch's cache.
        Here garbage is not collected until the capture has ended: what it frees, such as a module of kernels, may need
        a call of the driver that a capture does not survive.
        """
        try:
            try:
                return self._captured(function, memory)
            except RuntimeError as error:
                if not (may_repeat and is_out_of_memory(error)):
                    raise
            torch.cuda.empty_cache()
            self._graph = torch.cuda.CUDAGraph()
            return self._captured(function, memory)
        except Exception as error:  # the function has run before, so the cause is torch, the driver or another thread
            self.reason = f"its capture has failed: {type(error).__name__}: {error}"
            _find_out_whether_captures_work(self)
            return None

    def _captured(self, function: Callable[[Tensors], Tensors], memory: Tensors) -> Tensors | None:
        with torch.cuda.device(self.device):
            reserved = torch.cuda.memory_reserved(self.device)
            current, aside = torch.cuda.current_stream(), _own_stream(self)
            if aside is None:
                self.reason = NO_STREAM
                return None
            aside.wait_stream(current)
            with torch.cuda.stream(aside):
                results = _capture(self._graph, function, memory, self.device)
            current.wait_stream(aside)
            self.n_bytes = max(torch.cuda.memory_reserved(self.device) - reserved, 0)
        return results

    def replay(self) -> None:
        """Enqueue the captured work on torch's current stream of the device."""
        with torch.cuda.device(self.device):
            self._graph.replay()


_captured_on: weakref.WeakValueDictionary[tuple[torch.device, int], Graph] = weakref.WeakValueDictionary()
"""Graphs by the stream on which they were captured."""

_PRIORITIES = (-2, -3, -1)
"""Of streams of torch, where the GPU has them, or else the highest. Others take those of 0, and some of -1 and -3.

Torch keeps them with the kernels of a graph, on whatever stream it is replayed."""

_MOST_STREAMS = 32  # of a priority: `torch.cuda.Stream` gives the same ones again, in turn

NO_STREAM = "there are as many graphs as streams for captures"
"""Why a graph is not captured for now."""


def are_all_used(device: torch.device) -> bool:
    """Whether another graph can only be captured on this GPU once one of those that are there is deleted."""
    there = [graph() for graph in _captured_on.valuerefs()]  # a copy, since another thread may add one meanwhile
    n_used = sum([graph is not None and graph.device == device for graph in there])
    if n_used < _MOST_STREAMS:
        return False
    with torch.cuda.device(device):
        _, highest = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]  # a static method
    return n_used >= _MOST_STREAMS * len({max(priority, highest) for priority in _PRIORITIES})


def _own_stream(graph: Graph) -> torch.cuda.Stream | None:
    """A stream on which no other graph was captured that is still there; None if there are no more.

    Torch keeps memory for matrix products for each stream, and a graph uses that of the stream of its capture. The
    first graph of a stream that is deleted takes this memory with it (since torch 2.12), from others of the stream too;
    and two of them must not be replayed at the same time. So a stream is not shared, and not one of those that
    `torch.cuda.graph` and communication between ranks take by default.
    """
    for priority in _PRIORITIES:
        for _ in range(_MOST_STREAMS):
            stream = torch.cuda.Stream(priority=priority)
            if _captured_on.setdefault((graph.device, stream.cuda_stream), graph) is graph:
                return stream
    return None


def _capture(
    graph: torch.cuda.CUDAGraph, function: Callable[[Tensors], Tensors], memory: Tensors, device: torch.device
) -> Tensors:
    pool = torch.cuda.graph_pool_handle()
    with _garbage_waits():
        try:
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                results = function(memory)
            except BaseException:
                with contextlib.suppress(Exception):  # which says no more than that there was an error before
                    graph.capture_end()
                raise
            graph.capture_end()
        except BaseException:
            graph.reset()  # since torch 2.14 it leaves the pool, unless it knows that it has done so
            leave_pool(device, pool)
            raise
    return results


@contextlib.contextmanager
def _garbage_waits() -> Iterator[None]:
    """A context in which Python collects no garbage by itself. In several threads, it does so after the first ends."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _find_out_whether_captures_work(failed: Graph) -> None:
    """After a failure, such as a lack of memory, others may succeed; or torch or the driver make all of them fail."""
    device = failed.device
    try:
        with torch.cuda.device(device):
            number, current = torch.zeros(1, device=device), torch.cuda.current_stream()
            current.synchronize()  # not the device: that is an error while another thread captures, and for its capture
            with torch.cuda.stream(_own_stream(failed)):  # deleting the trial must not take memory of other graphs
                _capture(torch.cuda.CUDAGraph(), lambda memory: (memory[0] + 1,), (number,), device)
            current.synchronize()
    except Exception as error:
        if not is_out_of_memory(error):  # as may be: torch frees none of the memory that it keeps for a capture
            _failed[device] = failed.reason


def place_of(device: torch.device) -> tuple[torch.device, int]:
    """Where a graph may be replayed: on this device, on torch's current stream.

    Replays of a graph share memory, so they must run in order, as they do on one stream.
    """
    return device, stream_of(device)


@functools.cache
def most_bytes(device: torch.device) -> int:
    """Largest memory of a plan on this GPU."""
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    return max(LEAST_LIMIT, total // 32)


def obstacle(device: torch.device) -> str:
    """Why calls on this device cannot be captured; an empty string if they can."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"graphs cannot be captured on {device}"
    return f"captures fail on this device: {_failed[device]}" if device in _failed else ""
