"""Cached results, for arguments that rarely change between calls, such as cells and atomic numbers.

On a CPU keys contain values, not tensors: a cell that was changed in any way has another key. On a GPU, where reading
values would wait, a tensor is recognized by its identity, as long as torch has counted no change of it.
"""

import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from nvalchemiops.locks import Kept
from nvalchemiops.torch.runtime._torch_internals import stream_handle, version_of
from nvalchemiops.torch.runtime.context import is_capturing, may_keep, may_recognize
from nvalchemiops.torch.runtime.recorder import current_recorder, differ_in_replays

MOST_BYTES = 2**27
"""Largest total memory of cached results. A larger result is not cached."""

MOST_ENTRIES = 16

Result = TypeVar("Result", bound=tuple)

Value = TypeVar("Value")


class KeptTensors(Kept[Value]):
    """A cache of tensors. A plan of a call that uses some keeps them, since the cache may drop them."""

    def find(self, key: Hashable) -> Value | None:
        """As for `Kept`."""
        found = super().find(key)
        if found is not None:
            _keep_for_plan(found)
        return found

    def keep(self, key: Hashable, value: Value) -> list[Value]:
        """As for `Kept`."""
        _keep_for_plan(value)
        return super().keep(key, value)


def _keep_for_plan(value: Any) -> None:
    if (recorder := current_recorder()) is not None:
        recorder.cached.append(value)


_kept: KeptTensors[tuple[int, Any]] = KeptTensors(MOST_ENTRIES)
_captured: dict[Hashable, Any] = {}  # memory that captured graphs read: it must not be reused

_recognized: Kept[tuple[Any, Hashable, Any]] = Kept(MOST_ENTRIES)
"""By name, tensor, other arguments and stream: a weak reference to the tensor, its state, and the result."""


def cached_by_value(
    name: str, values: tuple[torch.Tensor, ...], others: Hashable, compute: Callable[[], Result]
) -> Result:
    """The result of ``compute()``, a tuple of tensors that depend on ``values`` and ``others`` alone, cached by value.

    Cached only on a CPU, where values can be read at no cost, and only if no gradient is tracked. With None for
    ``others`` the result is always computed, as it is in a recording in which ``values`` differ between replays.
    """
    if others is None or not may_keep(*values) or differ_in_replays(*values):
        return compute()
    read = [v.detach().resolve_neg().numpy().tobytes() for v in values]
    key = (name, others, *((v.dtype, v.shape, content) for v, content in zip(values, read)))
    return _found_or_kept(key, compute, values, sum(map(len, read)))


def cached_on_device(name: str, device: torch.device, others: Hashable, compute: Callable[[], Result]) -> Result:
    """The result of ``compute()``, a tuple of tensors on this device that depend on ``others`` alone, cached.

    On a GPU each stream has its own cached results: on another stream a result might not be computed yet, and torch
    reuses freed memory in the order of the stream on which it was allocated.

    While a CUDA graph is captured, the cached result that was used last is taken, of whatever stream, and then kept for
    good, since the graph reads it in each replay. A result that is not in the cache becomes a part of the graph.
    """
    if not may_keep():
        return compute()
    key = (name, others, device)
    if is_capturing():
        of_any_stream: list[tuple[Any, Any]] = list(_kept.items())[::-1]  # that of a call before first: it is there
        found = _captured.get(key) or next((kept[1] for k, kept in of_any_stream if k[:3] == key), None)
        if found is None:
            return compute()
        _captured[key] = found
        return found
    return _found_or_kept((*key, stream_of(device)), compute)


def stream_of(device: torch.device) -> int:
    """The number of torch's current stream on this device, 0 on a CPU. It is part of each cache key."""
    return stream_handle(device) if device.type == "cuda" else 0


def _found_or_kept(
    key: Hashable, compute: Callable[[], Result], values: tuple[torch.Tensor, ...] = (), n_bytes: int = 0
) -> Result:
    """The cached result for this key, or else of ``compute()``, which is cached without sharing memory with ``values``.

    ``n_bytes`` is the size of the key; the size of the result is added.
    """
    if (kept := _kept.find(key)) is not None:
        return kept[1]
    with torch.inference_mode(False), torch.no_grad():
        # tensors made in inference mode could not be used outside of it
        result = _independent(compute(), values)
    n_bytes += sum(t.numel() * t.element_size() for t in result if t is not None)
    if n_bytes <= MOST_BYTES:
        _kept.keep(key, (n_bytes, result))
        while sum(size for size, _ in list(_kept.values())) > MOST_BYTES:
            _kept.drop(1)
    return result


def cached_by_identity(
    name: str, tensor: torch.Tensor, others: Hashable, compute: Callable[[], Result], on_host: bool = False
) -> Result:
    """The result of ``compute()``, tensors that depend on ``tensor`` and ``others`` alone, cached by identity.

    No values are read: the tensor must be the same object at the same version, on the same stream. A change that torch
    does not count, such as a write by a kernel of another library or in the replay of a CUDA graph, is not noticed.
    Results ``on_host``, tensors of a CPU for which ``compute()`` has waited, are the same on all streams and while a
    graph is captured.
    """
    if not may_recognize(tensor, on_host):
        return compute()
    key = (name, id(tensor), others, 0 if on_host else stream_of(tensor.device))
    state = (version_of(tensor), tensor.data_ptr(), tensor.shape, tensor.stride())
    found = _recognized.get(key)
    if found is not None and found[0]() is tensor and found[1] == state:
        return found[2]
    with torch.inference_mode(False), torch.no_grad():
        result = _independent(compute(), (tensor,))
    if sum(t.numel() * t.element_size() for t in result if t is not None) <= MOST_BYTES:

        def forget(reference: Any) -> None:
            # another tensor may have got the same id since
            if (entry := _recognized.get(key)) is not None and entry[0] is reference:
                _recognized.pop(key, None)

        _recognized.keep(key, (weakref.ref(tensor, forget), state, result))
    return result


def _independent(result: Result, values: tuple[torch.Tensor, ...]) -> Result:
    """``result``, in which tensors that share memory with ``values`` are copied: the caller may change ``values``."""
    taken = {value.untyped_storage().data_ptr() for value in values if value.numel()}
    copied = [t.clone() if t is not None and t.untyped_storage().data_ptr() in taken else t for t in result]
    return type(result)(*copied) if hasattr(result, "_fields") else type(result)(copied)
