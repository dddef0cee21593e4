"""Results that are kept, for arguments that rarely change between calls, such as cells and atomic numbers.

On a CPU keys are values, not tensors: a cell that was changed in any way is another one. Where reading values would
wait for a GPU, a tensor is recognized by itself, as long as torch has counted no change of it.
"""

import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from nvalchemiops.locks import Kept
from nvalchemiops.torch.runtime._torch_internals import version_of
from nvalchemiops.torch.runtime.context import is_capturing, may_keep, may_recognize

MOST_BYTES = 2**26
"""Memory that is kept, at most; a larger result is not."""

MOST_ENTRIES = 16

Result = TypeVar("Result", bound=tuple)

_kept: Kept[tuple[int, Any]] = Kept(MOST_ENTRIES)
_captured: dict[Hashable, Any] = {}  # memory that captured graphs read, which must not be used for anything else

_recognized: dict[Hashable, tuple[Any, Hashable, Any]] = {}
"""For name, tensor, other arguments and stream: weak reference to the tensor, its state, and what followed from it."""


def cached_by_value(
    name: str, values: tuple[torch.Tensor, ...], others: Hashable, compute: Callable[[], Result]
) -> Result:
    """``compute()``, a tuple of tensors that follow from ``values`` and ``others``, or the same from before.

    Only on a CPU, where values can be read at no cost, and only without a graph. With None for ``others``
    always computed.

    What follows from no values may be kept on a GPU as well. What is found while a CUDA graph is captured is kept for
    good, since the graph reads it whenever it replays; what is not found then becomes a part of the graph.
    """
    if others is None or not may_keep(*values):
        return compute()
    if not values and is_capturing():
        found = _captured.get((name, others)) or _kept.get((name, others), (0, None))[1]
        if found is None:
            return compute()
        _captured[name, others] = found
        return found
    read = [v.detach().resolve_neg().numpy().tobytes() for v in values]
    key = (name, others, *((v.dtype, v.shape, content) for v, content in zip(values, read)))
    if (kept := _kept.find(key)) is not None:
        return kept[1]
    with torch.inference_mode(False), torch.no_grad():
        # tensors made in inference mode could not be used outside of it
        result = _independent(compute(), values)
    n_bytes = sum(map(len, read)) + sum(t.numel() * t.element_size() for t in result if t is not None)
    if n_bytes <= MOST_BYTES:
        _kept.keep(key, (n_bytes, result))
        while sum(size for size, _ in list(_kept.values())) > MOST_BYTES:
            _kept.drop(1)
    return result


def cached_by_identity(name: str, tensor: torch.Tensor, others: Hashable, compute: Callable[[], Result]) -> Result:
    """``compute()``, a tuple of tensors that follow from ``tensor`` and ``others``, or the same from before.

    Reads no values: the tensor must be the same object at the same version, on the same stream. What has changed its
    memory unnoticed by torch, as a kernel of another library can, is not noticed here.
    """
    if not may_recognize(tensor):
        return compute()
    stream = torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0
    key = (name, id(tensor), others, stream)
    state = (version_of(tensor), tensor.data_ptr(), tensor.shape, tensor.stride())
    found = _recognized.get(key)
    if found is not None and found[0]() is tensor and found[1] == state:
        return found[2]
    with torch.inference_mode(False), torch.no_grad():
        result = _independent(compute(), (tensor,))
    if sum(t.numel() * t.element_size() for t in result if t is not None) <= MOST_BYTES:

        def forget(reference: Any) -> None:
            # another tensor may have got the same number since
            if (entry := _recognized.get(key)) is not None and entry[0] is reference:
                _recognized.pop(key, None)

        # without a lock: each step is one operation of a dictionary, and tensors may end at any place
        _recognized[key] = weakref.ref(tensor, forget), state, result
        for oldest in list(_recognized)[:-MOST_ENTRIES]:
            _recognized.pop(oldest, None)
    return result


def _independent(result: Result, values: tuple[torch.Tensor, ...]) -> Result:
    """``result`` with copies of what shares memory with ``values``: the caller may change it, or use it again."""
    taken = {value.untyped_storage().data_ptr() for value in values if value.numel()}
    copied = [t.clone() if t is not None and t.untyped_storage().data_ptr() in taken else t for t in result]
    return type(result)(*copied) if hasattr(result, "_fields") else type(result)(copied)
