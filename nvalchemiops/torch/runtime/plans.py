"""Calls of the same shapes again and again: what they do to memory is recorded once and done again for other values.

Most of the time of a small sum is spent in Python: arguments are checked, memory is found, launches are described. A
`Plan` has the launches of one call with their arguments packed, and the torch operations between them with their
memory; it is run with one call. So there is no second implementation: the steps are those of the ordinary way, and so
are the bits. What the recorder does not know, or what reads values that may differ next time, makes no plan.

In plain eager mode on a CPU only. Values of tensors that a call may read are part of the key of its plan.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from nvalchemiops import launch as core
from nvalchemiops import notices
from nvalchemiops._warp_internals import descriptor

Step = Callable[[], Any]

MOST_BYTES = 2**24
"""Memory of a plan, at most."""

_METADATA = {"shape", "dtype", "device", "layout", "ndim", "requires_grad"}
_METADATA |= {"stride", "numel", "element_size", "data_ptr", "untyped_storage", "is_contiguous"}
_METADATA |= {"is_neg", "_is_zerotensor"}
"""What is read of tensors without their values."""

_COPIES = {"to", "contiguous", "reshape", "flatten", "clone"}
"""Operations that return the memory that they are given, or copy it."""

_VIEWS = _COPIES | {
    "detach",
    "view",
    "unsqueeze",
    "squeeze",
    "select",
    "split",
    "__getitem__",
    "expand",
    "mT",
    "unflatten",
}
_VIEWS |= {"resolve_neg", "resolve_conj", "view_as_real", "view_as_complex"}
"""Operations that may return the memory that they are given."""

_UNINITIALISED = {"empty", "empty_like", "new_empty"}

_INTO: dict[str, Callable[..., torch.Tensor]] = {
    "mul": torch.mul,
    "__mul__": torch.mul,
    "__rmul__": torch.mul,
    "add": torch.add,
    "__add__": torch.add,
    "__radd__": torch.add,
    "sub": torch.sub,
    "__sub__": torch.sub,
    "neg": torch.neg,
    "__neg__": torch.neg,
    "matmul": torch.matmul,
    "__matmul__": torch.matmul,
    "index_select": torch.index_select,
    "square": torch.square,
    "sum": torch.sum,
    "stack": torch.stack,
    "cat": torch.cat,
    "gather": torch.gather,
}
"""Operations that write into memory that is there."""

_OVERWRITE = {"zero_", "fill_", "copy_"}
_IN_PLACE = _OVERWRITE | {"mul_", "add_", "sub_"}


class _NoPlan(Exception):
    """The call cannot be recorded. Only a recorder sees it: the call goes on, and has its results."""


class Plan:
    """The steps of a call, in memory of its own.

    Parameters
    ----------
    steps : sequence of callable
    copied : sequence of torch.Tensor
        Memory of the plan for arguments that are copied.
    addresses : list of int
        Of the other arguments; steps read them. The last number is the length of lists.
    results : tuple of torch.Tensor
    faults : sequence of torch.Tensor
        Numbers of faults that kernels write: not zero where the ordinary call would raise.
    kept : sequence of torch.Tensor
        All other memory of the steps.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        copied: Sequence[torch.Tensor],
        addresses: list[int],
        results: tuple[torch.Tensor, ...],
        faults: Sequence[torch.Tensor],
        kept: Sequence[torch.Tensor],
    ) -> None:
        self.steps, self.copied, self.addresses, self.results, self.faults = steps, copied, addresses, results, faults
        self.kept = kept
        self._lock = threading.Lock()  # held in a forked child, it is held for ever: then calls are ordinary ones

    def __call__(
        self, copied: Sequence[torch.Tensor], used: Sequence[torch.Tensor], length: int = 0
    ) -> tuple[torch.Tensor, ...] | None:
        """The results for these arguments, or None if the ordinary call is needed: it raises, or the plan is in use.

        ``length`` is that of lists among ``used``, if the plan is for any length.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            self.addresses[:] = [*(tensor.data_ptr() for tensor in used), length]
            with torch.no_grad():
                for memory, value in zip(self.copied, copied):
                    memory.copy_(value)
                for step in self.steps:
                    step()
            if any(map(int, self.faults)):
                return None
            return tuple(result.clone() for result in self.results)
        finally:
            self._lock.release()


class _Recorder(TorchFunctionMode):
    """Follows a call.

    It sees what is called of torch in Python, and launches of tensors. Storages are *constant*, if their values are the
    same each time, or else *varying*; those of arguments that are not copied are *foreign*: only kernels may use them,
    since their addresses differ each time. Constant arguments are *borrowed*: kernels get a copy, since the memory may
    be changed or freed.

    Lists of any ``length``: arrays that kernels get of foreign arguments are then rows of that length, and nothing else
    may depend on it.

    What cannot be recorded ends the recording, not the call: in the midst of it, a signal handler may call anything. If
    that can be recorded it becomes a part of the plan, which has no influence on its results.
    """

    def __init__(
        self,
        copied: Sequence[torch.Tensor],
        used: Sequence[torch.Tensor],
        borrowed: Sequence[torch.Tensor],
        length: int,
    ) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.faults: list[torch.Tensor] = []
        self.length = length
        self.addresses = [*(tensor.data_ptr() for tensor in used), length]
        self.foreign = {_storage(tensor): number for number, tensor in enumerate(used) if tensor.numel()}
        self.varying = {_storage(tensor) for tensor in copied}
        self.borrowed = {_storage(tensor): tensor for tensor in borrowed if tensor.numel()}
        self.copies: dict[int, torch.Tensor] = {}
        self.uninitialised: set[int] = set()
        self.kept: dict[int, torch.Tensor] = {}  # by storage, so that no address is used twice
        self.paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # an interrupt at the end of `record` may leave this mode on, which then does nothing
        if not self.paused and active() is self:
            with self.pause():
                self._follow(_name(func), func, args, kwargs, result)
        return result

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Inside, operations are not followed, and what cannot be recorded ends the recording."""
        before, self.paused = self.paused, True
        try:
            yield
        except _NoPlan:
            self.end()
        finally:
            self.paused = before

    def end(self) -> None:
        """Record nothing more."""
        if active() is self:
            _thread.recorder = None

    def _follow(self, name: str, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        given = {_storage(t): t for t in _tensors((args, tuple(kwargs.values())))}
        made = [t for t in _tensors((result,)) if t.numel()]
        fresh = [t for t in made if _storage(t) not in given]
        for tensor in fresh:
            self.kept[_storage(tensor)] = tensor
        if name in _UNINITIALISED:
            self.uninitialised.update(map(_storage, fresh))
            return
        is_foreign, varies = not self.foreign.keys().isdisjoint(given), not self.varying.isdisjoint(given)
        if name in _METADATA or not (is_foreign or varies):
            return
        if made and not fresh and name in _VIEWS:
            return
        if is_foreign or not self.borrowed.keys().isdisjoint(given):
            raise _NoPlan(f"{name} of an argument")
        if name in _IN_PLACE and (name in _OVERWRITE or _storage(args[0]) in self.varying):
            self.steps.append(lambda: func(*args, **kwargs))
            self.varying.add(_storage(args[0]))
            return
        if len(fresh) != 1 or len(made) != 1 or name not in _COPIES | _INTO.keys():
            raise _NoPlan(name)
        (out,) = fresh
        if name in _COPIES:
            self.steps.append(lambda: out.copy_(func(*args, **kwargs)))
        else:
            into = _INTO[name]
            if not into(*args, **kwargs, out=torch.empty_like(out)).equal(out):
                raise _NoPlan(name)
            self.steps.append(lambda: into(*args, **kwargs, out=out))
        self.varying.add(_storage(out))

    def compute(self, function: Callable[[], torch.Tensor], given: torch.Tensor) -> torch.Tensor:
        """``function()``, which depends on nothing but the values of ``given``."""
        with self.pause():
            out = function()
        with self.pause():
            self.kept[_storage(out)] = out
            if _storage(given) in self.foreign:
                raise _NoPlan("an operation on an argument")
            if _storage(given) in self.varying:
                self.steps.append(lambda: out.copy_(function()))
                self.varying.add(_storage(out))
        return out

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of the memory that a borrowed tensor is in."""
        storage = _storage(tensor)
        if storage not in self.copies:
            self.copies[storage] = _whole(tensor).clone()
            self.kept[_storage(self.copies[storage])] = self.copies[storage]
        return self.copies[storage]

    def launch(
        self,
        kernel: Any,
        dim: Any,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        descriptors: list[Any],
        place: Any,
        lanes: int,
        kind: Any,
    ) -> None:
        """Before a launch."""
        with self.pause():
            self._launch(kernel, dim, inputs, outputs, descriptors, place, lanes, kind)

    def _launch(
        self,
        kernel: Any,
        dim: Any,
        inputs: Any,
        outputs: Any,
        descriptors: list[Any],
        place: Any,
        lanes: int,
        kind: Any,
    ) -> None:
        found = {_storage(t): t for t in _tensors((tuple(inputs),)) if t.numel()}
        written = {_storage(t): t for t in _tensors((tuple(outputs),)) if t.numel()}
        if not self.foreign.keys().isdisjoint(written) or not self.borrowed.keys().isdisjoint(written):
            raise _NoPlan("a kernel writes into an argument")
        reads = not self.varying.isdisjoint(found) or not self.foreign.keys().isdisjoint(found)
        if not reads and self.varying.isdisjoint(written):
            self.uninitialised -= written.keys()
            return
        for storage, tensor in written.items():
            if storage not in self.varying and storage not in self.uninitialised:
                whole = _whole(tensor)
                self.steps.append(_restoring(whole, whole.clone()))
            self.varying.add(storage)
            self.kept[storage] = tensor
        self.kept.update((s, t) for s, t in found.items() if s not in self.foreign and s not in self.borrowed)
        if self.length and self.length in (dim, *(value for value in inputs if type(value) is int)):
            raise _NoPlan("a number that is the length of a list")
        packed, patched, stretched = list(descriptors), [], []
        for number, value in enumerate((*inputs, *outputs)):
            if isinstance(value, torch.Tensor) and value.numel():
                if type(packed[number]) is not bytes:
                    raise _NoPlan("an array that is no descriptor")
                if _storage(value) in self.borrowed:
                    place_in_copy = self._copy(value).data_ptr() + value.data_ptr() - _storage(value)
                    packed[number] = place_in_copy.to_bytes(8, "little") + packed[number][8:]
                if (argument := self.foreign.get(_storage(value))) is not None:
                    offset = value.data_ptr() - self.addresses[argument]
                    if self.length and self.length in value.shape:
                        stretched.append((number, argument, *self._row(value, offset, packed[number])))
                    elif self.length and offset:
                        raise _NoPlan("a part of a list")
                    else:
                        patched.append((number, argument, offset, packed[number][8:]))
        addresses = self.addresses
        run = core.prepared(kernel, dim, device=place, lanes=lanes, kind=kind)

        def step() -> None:
            for number, argument, offset, rest in patched:
                packed[number] = (addresses[argument] + offset).to_bytes(8, "little") + rest
            for number, argument, before, shape, strides in stretched:
                address = addresses[argument] + before * addresses[-1]
                packed[number] = address.to_bytes(8, "little") + _layout(addresses[-1], shape, strides)
            run(packed)

        self.steps.append(step if patched or stretched else functools.partial(run, packed))

    def _row(self, value: torch.Tensor, offset: int, packed: bytes) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Of a list of any length, or one of its rows: bytes before it and shape and strides of it, for one entry."""
        strides = tuple(stride * value.element_size() for stride in value.stride())
        if value.shape[0] == self.length and not offset % self.length:
            for ndim in (1, value.ndim):  # an array of vectors, or of numbers
                form = tuple(value.shape[1:ndim]), strides[:ndim]
                if packed[8:] == _layout(self.length, *form):
                    return offset // self.length, *form
        raise _NoPlan("an array of another form than a list")


@functools.lru_cache(maxsize=64)
def _layout(length: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    """The descriptor, after its address, of an array of so many entries of a shape."""
    return descriptor((length, *shape), strides)[8:]


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of the memory that a tensor is in."""
    return tensor.new_empty(0).set_(tensor.untyped_storage())


def _restoring(memory: torch.Tensor, values: torch.Tensor) -> Step:
    if not bool(values.any()):
        return memory.zero_
    return lambda: memory.copy_(values)


def _name(func: Any) -> str:
    name = getattr(func, "__name__", "")
    # of an attribute: the getter of a descriptor
    return getattr(getattr(func, "__self__", None), "__name__", name) if name == "__get__" else name


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def share_memory(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether any of ``some`` is in the same memory as one of ``others``, at other places of it perhaps."""
    return not {_storage(t) for t in some if t.numel()}.isdisjoint(_storage(t) for t in others if t.numel())


def _tensors(values: Any) -> list[torch.Tensor]:
    """All tensors in nested sequences."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += _tensors(value)
    return found


_thread = threading.local()


def active() -> _Recorder | None:
    """What records the calls of this thread."""
    return getattr(_thread, "recorder", None)


def read_fault(fault: torch.Tensor) -> int:
    """The number of a fault that kernels wrote, zero if there is none."""
    recorder = active()
    if recorder is not None:
        recorder.faults.append(fault)
        with recorder.pause():
            return int(fault)
    return int(fault)


def record(
    function: Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]],
    copied: Sequence[torch.Tensor],
    used: Sequence[torch.Tensor],
    borrowed: Sequence[torch.Tensor],
    length: int = 0,
) -> tuple[Plan | None, tuple[torch.Tensor, ...] | None]:
    """The plan of ``function(copied)``, or None if there is none; and its results, or None if it was not called.

    Parameters
    ----------
    function : callable
        Depends on the values of these, and otherwise on what is always the same.
    copied : sequence of torch.Tensor
        Arguments that any operations may use; a plan copies their values.
    used : sequence of torch.Tensor
        Arguments whose values kernels alone use.
    borrowed : sequence of torch.Tensor
        Arguments whose values are always the same, but not their memory.
    length : int, optional
        Of lists among ``used``, which may have any other length when the plan runs: no axis of an argument that is
        not so long by its meaning may be so long. By default shapes are always the same.
    """
    if active() is not None:
        return None, None  # in the midst of another call
    notes = notices.count()
    with torch.inference_mode(False), torch.no_grad():
        # tensors made in inference mode could not be changed outside of it
        memory = [tensor.clone() for tensor in copied]
        recorder = _Recorder(memory, used, borrowed, length)
        if len(recorder.foreign) < sum(tensor.numel() > 0 for tensor in used):
            return None, None  # some share memory, which others may not
        try:
            _thread.recorder = recorder
            with recorder:
                results = function(memory)
            is_recorded = active() is recorder
        finally:
            recorder.end()
    n_bytes = sum(tensor.untyped_storage().nbytes() for tensor in recorder.kept.values())
    varies = all(_storage(result) in recorder.varying for result in results)
    if length and any(length in tensor.shape for tensor in recorder.kept.values()):
        is_recorded = False
    if not is_recorded or n_bytes > MOST_BYTES or not varies or notices.count() != notes:
        return None, results
    kept = list(recorder.kept.values())
    plan = Plan(recorder.steps, memory, recorder.addresses, results, recorder.faults, kept)
    return plan, tuple(result.clone() for result in results)
