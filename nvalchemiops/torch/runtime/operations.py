"""Operations of torch as a recorder sees them: their tensors, and how to write their results into given memory."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nvalchemiops.torch.runtime._torch_internals import is_zero_tensor, out_variant
from nvalchemiops.torch.runtime.storage import storage_of

Step = Callable[[], Any]


class NoPlan(Exception):
    """The reason why a call cannot be recorded. Only the recorder catches it; the call itself continues."""


class UntaggedOp(RuntimeError):
    """The shapes of an op depend on values, but it has no tag that says so."""


UNINITIALISED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
"""Operations that allocate memory without writing values."""

OF_SHAPES = {
    *("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"),
    *("is_same_size", "_has_same_storage_numel"),  # forward mode asks for these
}
"""Operations whose results do not depend on the values of their argument."""

WITH_STATISTICS = {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"}
"""Operations that write running statistics in training, which their schemas do not say."""

_COPIES = {"_to_copy", "to", "contiguous", "reshape", "flatten"}
"""Operations that copy the elements of their first argument in order, and that have no ``out=`` overload."""

COLLECTIVES = {"c10d", "_c10d_functional", "_dtensor"}
"""Messages between ranks that are not sent as acts of the library (`nvalchemiops.torch.runtime.acts`)."""


def tensors_in(values: Any) -> list[torch.Tensor]:
    """All tensors with elements in memory among nested sequences."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided:
                raise NoPlan(f"a tensor with the layout {value.layout}")
            # derivatives of torch make tensors without values, on the device "meta", to find out shapes
            if value.numel() and value.device.type != "meta" and not is_zero_tensor(value):
                found.append(value)
        elif isinstance(value, (tuple, list)):
            found += tensors_in(value)
    return found


def by_storage(values: Any) -> dict[int, torch.Tensor]:
    """The same tensors, one of each storage, by the addresses of these."""
    return {storage_of(t): t for t in tensors_in(values)}


def result_and_draw(func: Any, args: Any, kwargs: Any) -> tuple[Any, bool]:
    """The result of an operation, and whether it has drawn random numbers."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return func(*args, **kwargs), False
    generators = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Generator)]
    if not generators:
        generators = [torch.default_generator]
        if torch.cuda.is_initialized():  # not in a forked process
            generators += torch.cuda.default_generators
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        generators = [g for g in generators if g.device.type == "cpu"]  # those of a GPU cannot be asked
    before = [g.get_state() for g in generators]
    result = func(*args, **kwargs)
    return result, not all(map(torch.equal, before, [g.get_state() for g in generators]))


def fails_for_all_values(error: Exception, func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation raises this error without looking at values, such as ``view`` of memory with gaps."""
    try:
        func(*_without_values(args), **_without_values(kwargs))
    except Exception as again:
        return type(again) is type(error) and str(again) == str(error)
    return False


def _without_values(values: Any) -> Any:
    if isinstance(values, torch.Tensor):
        return values.to("meta")
    if isinstance(values, dict):
        return {name: _without_values(value) for name, value in values.items()}
    return type(values)(map(_without_values, values)) if isinstance(values, (tuple, list)) else values


def has_unknown_shape(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the shapes of results depend on values."""
    if torch.Tag.dynamic_output_shape not in func.tags or kwargs.get("output_size") is not None:
        return False
    masks = (torch.bool, torch.uint8)
    return func.overloadpacket.__name__ != "index" or any(t.dtype in masks for t in tensors_in(args[1:]))


def step_into(func: Any, args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Step:
    """A step that writes what ``func(*args, **kwargs)`` returns into ``results``."""
    found = out_variant(func)
    if found is not None and len(found[1]) == len(results):
        overload, names = found
        kind = (func, *((t.dtype, t.is_contiguous()) for t in results), *map(type, args), *kwargs)
        if kind not in _agree:
            _agree[kind] = None
            # Python functions of torch take half the time of overloads
            for into in (getattr(torch, func.overloadpacket.__name__, None), overload):
                memory = [torch.empty_like(t) for t in results]
                out = _out(into is overload, names, memory)
                if into is not None and _gives(results, memory, into, args, kwargs | out):
                    _agree[kind] = into
                    break
        if (into := _agree[kind]) is not None:
            return functools.partial(into, *args, **kwargs, **_out(into is overload, names, results))
    if func.overloadpacket.__name__ in _COPIES and args[0].shape == results[0].shape:
        return functools.partial(results[0].copy_, args[0])

    tracked = torch.is_grad_enabled()  # on which results for a backward pass depend, such as those of an LSTM

    def step() -> None:
        with torch.set_grad_enabled(tracked):
            found = tensors_in((func(*args, **kwargs),))
        for memory, value in zip(results, found, strict=True):
            if value.shape != memory.shape:
                raise UntaggedOp(
                    f"{func} has results of shape {tuple(value.shape)}, not {tuple(memory.shape)}: an op whose shapes "
                    "depend on values needs the tag torch.Tag.dynamic_output_shape, so that it is not replayed"
                )
            memory.copy_(value)

    return step


_agree: dict[Any, Step | None] = {}
"""For an operation and a kind of results: the function with ``out=`` that gives the same bits, found at first use."""


def _out(by_name: bool, names: Sequence[str], memory: Sequence[torch.Tensor]) -> dict[str, Any]:
    """The keyword arguments that say where results are written."""
    return dict(zip(names, memory)) if by_name else {"out": memory[0] if len(memory) == 1 else tuple(memory)}


def _gives(results: Any, memory: Sequence[torch.Tensor], into: Step, args: Any, kwargs: Any) -> bool:
    """Whether ``into`` writes exactly these results into ``memory``."""
    before = [t.data_ptr() for t in memory]
    try:
        into(*args, **kwargs)
    except Exception:  # another signature
        return False
    return before == [t.data_ptr() for t in memory] and all(map(_same_bits, memory, results))


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = (one == other) | ((one != one) & (other != other))
    return one.stride() == other.stride() and bool(same.all())


def restoring(memory: torch.Tensor, values: torch.Tensor) -> Step:
    """A step that writes these values, those of a whole storage."""
    if not bool(values.view(torch.uint8).any()):  # minus zero is not zero
        return memory.zero_
    return lambda: memory.copy_(values)
