"""CUDA graphs of calls: what a call enqueues on a GPU, captured once, with memory of its own."""

from collections.abc import Callable, Sequence

import torch

from nvalchemiops.torch.runtime.cache import stream_of

Tensors = Sequence[torch.Tensor]

_failed: dict[torch.device, str] = {}
"""Why captures have failed. After one, torch and the driver may be in a state in which others fail, too."""


class Graph:
    """What a call enqueues.

    Parameters
    ----------
    device : torch.device

    Attributes
    ----------
    n_bytes : int
        Memory that the device has for it alone.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.n_bytes = device, 0
        self._graph = torch.cuda.CUDAGraph()

    def captured(self, function: Callable[[Tensors], Tensors], memory: Tensors) -> Tensors | None:
        """The results of ``function(memory)``, which is not run but captured; None if that has failed.

        Not by ``torch.cuda.graph``, which waits for the device, collects garbage and empties torch's memory first.
        """
        try:
            with torch.cuda.device(self.device):
                reserved = torch.cuda.memory_reserved(self.device)
                current, aside = torch.cuda.current_stream(), torch.cuda.Stream()
                aside.wait_stream(current)
                with torch.cuda.stream(aside):
                    self._graph.capture_begin(capture_error_mode="thread_local")
                    try:
                        results = function(memory)
                    finally:
                        self._graph.capture_end()
                current.wait_stream(aside)
                self.n_bytes = max(torch.cuda.memory_reserved(self.device) - reserved, 0)
        except Exception as error:  # what it does was seen before, so this is of torch, the driver or other threads
            _failed[self.device] = f"{type(error).__name__}: {error}"
            return None
        return results

    def replay(self) -> None:
        """Enqueue what was captured, on torch's current stream of the device."""
        with torch.cuda.device(self.device):
            self._graph.replay()


def place_of(device: torch.device) -> tuple[torch.device, int]:
    """Where a graph may be replayed: on this device, and on torch's current stream there.

    Replays of one graph share memory, so they must be in order; on one stream they are.
    """
    return device, stream_of(device)


def obstacle(device: torch.device) -> str:
    """Why calls on this device cannot be captured; an empty string if they can."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"graphs cannot be captured on {device}"
    return f"a capture has failed: {_failed[device]}" if device in _failed else ""
