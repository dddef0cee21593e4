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
from nvalchemiops.locks import fork_safe
from nvalchemiops.torch.runtime._torch_internals import DispatchMode, draw_free, following, is_own_operator

Step = Callable[[], Any]

MOST_BYTES = 2**24
"""Memory of a plan, at most."""

_UNINITIALISED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
"""Operations that make memory without values."""

_READS = {"numpy", "tolist", "__array__", "__dlpack__", "to_dlpack", "tobytes"}
"""Methods of tensors that read values, unseen below autograd."""


class _NoPlan(BaseException):
    """The call cannot be recorded. No `Exception`, which code on the way might handle."""


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


class _Recorder(DispatchMode):
    """Follows a call.

    It sees torch's operations below autograd, and launches of tensors. Storages are *constant*, if their values are the
    same each time, or else *varying*; those of arguments that are not copied are *foreign*: only kernels may use them,
    since their addresses differ each time. Constant arguments are *borrowed*: steps get a copy, since the memory may
    be changed or freed.

    Lists of any ``length``: arrays that kernels get of foreign arguments are then rows of that length, and nothing else
    may depend on it.
    """

    def __init__(
        self,
        copied: Sequence[torch.Tensor],
        used: Sequence[torch.Tensor],
        borrowed: Sequence[torch.Tensor],
        length: int,
    ) -> None:
        super().__init__()
        self.before: list[Step] = []
        self.steps: list[Step] = []
        self.faults: list[torch.Tensor] = []
        self.length = length
        self.addresses = [*(tensor.data_ptr() for tensor in used), length]
        self.foreign = {_storage(tensor): number for number, tensor in enumerate(used) if tensor.numel()}
        self.varying = {_storage(tensor) for tensor in copied if tensor.numel()}
        self.borrowed = {_storage(tensor): tensor for tensor in borrowed if tensor.numel()}
        self.copies: dict[int, torch.Tensor] = {}
        self.uninitialised: set[int] = set()
        self.read: set[int] = set()  # constant storages that steps read
        self.kept: dict[int, torch.Tensor] = {_storage(t): t for t in copied if t.numel()}  # no address is used twice
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # an interrupt at the end of `record` may leave this mode on, which then does nothing
        if self.paused or active() is not self:
            return func(*args, **kwargs)
        given = {_storage(t): t for t in _tensors((args, tuple(kwargs.values())))}
        if is_own_operator(func) or func.namespace in _COLLECTIVES:
            raise _NoPlan(f"{func} through the dispatcher")
        written = [] if func.overloadpacket.__name__ == "detach_" else _written_by(func, args, kwargs)
        if written:
            return self._follow_write(func, args, kwargs, given, {_storage(t): t for t in written})
        result = draw_free(func, args, kwargs)
        if result is None:
            raise _NoPlan(f"{func} draws random numbers")
        self._follow(func, args, kwargs, given, result[0])
        return result[0]

    def _follow_write(self, func: Any, args: Any, kwargs: Any, given: Any, written: Any) -> Any:
        """Before and after an operation that writes into its arguments."""
        varies = not self.varying.isdisjoint(given) or not self.foreign.keys().isdisjoint(given)
        if not written.keys() <= self.kept.keys():
            raise _NoPlan(f"{func} writes into a tensor that was there before")
        if not varies and self.read.isdisjoint(written):
            self.uninitialised -= written.keys()
            return func(*args, **kwargs)
        if not self.foreign.keys().isdisjoint(given):
            raise _NoPlan(f"{func} of an argument")
        self._will_vary(written)
        self.read |= given.keys()
        self.steps.append(functools.partial(func, *self._lasting(args), **self._lasting(kwargs)))
        return func(*args, **kwargs)

    def _will_vary(self, written: dict[int, torch.Tensor]) -> None:
        """Before a step writes into these storages: what was constant in them is restored before all steps."""
        for storage, tensor in written.items():
            if storage not in self.varying and storage not in self.uninitialised:
                whole = _whole(tensor)
                self.before.append(_restoring(whole, whole.clone()))
            self.varying.add(storage)
            self.kept.setdefault(storage, tensor)

    def _follow(self, func: Any, args: Any, kwargs: Any, given: Any, result: Any) -> None:
        """After an operation that makes its results."""
        made = [t for t in _tensors((result,)) if t.numel()]
        fresh = [t for t in made if _storage(t) not in given]
        for tensor in fresh:
            self.kept[_storage(tensor)] = tensor
        if func.overloadpacket.__name__ in _UNINITIALISED:
            self.uninitialised.update(map(_storage, fresh))
            return
        is_foreign = not self.foreign.keys().isdisjoint(given)
        if not is_foreign and self.varying.isdisjoint(given):
            return
        if not isinstance(result, torch.Tensor) and not _tensors((result,)):
            raise _NoPlan(f"{func} reads values")
        if _has_unknown_shape(func, args):
            raise _NoPlan(f"{func} has a shape that depends on values")
        if not fresh:
            return
        if is_foreign:
            raise _NoPlan(f"{func} of an argument")
        if len(fresh) != len(made):
            raise _NoPlan(f"{func} returns views and copies")
        self.read |= given.keys()
        self.steps.append(_into(func, self._lasting(args), self._lasting(kwargs), fresh))
        self.varying.update(map(_storage, fresh))

    def _lasting(self, values: Any) -> Any:
        """Arguments with copies in the place of borrowed memory."""
        if isinstance(values, torch.Tensor):
            if not values.numel() or _storage(values) not in self.borrowed:
                return values
            whole = self._copy(values).untyped_storage()
            return values.new_empty(0).set_(whole, values.storage_offset(), values.shape, values.stride())
        if isinstance(values, dict):
            return {name: self._lasting(value) for name, value in values.items()}
        return type(values)(map(self._lasting, values)) if isinstance(values, (tuple, list)) else values

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Inside, operations are not followed."""
        self.paused = True
        try:
            yield
        finally:
            self.paused = False

    def compute(self, function: Callable[[], torch.Tensor], given: torch.Tensor) -> torch.Tensor:
        """``function()``, which depends on nothing but the values of ``given``."""
        with self.pause():
            out = function()
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

    def refuse(self, reason: str) -> None:
        """There is no plan of this call."""
        raise _NoPlan(reason)

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
        if not reads and self.varying.isdisjoint(written) and self.read.isdisjoint(written):
            self.uninitialised -= written.keys()
            return
        self._will_vary(written)
        self.read |= found.keys()
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


_COLLECTIVES = {"c10d", "_c10d_functional", "_dtensor"}


@functools.cache
def _places_written(func: Any) -> tuple[tuple[int, str], ...]:
    """Positions and names of the arguments that an operation writes into."""
    arguments = enumerate(func._schema.arguments)
    return tuple((k, a.name) for k, a in arguments if a.alias_info is not None and a.alias_info.is_write)


def _written_by(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    places = _places_written(func)
    return _tensors([args[k] if k < len(args) else kwargs.get(name) for k, name in places]) if places else []


def _has_unknown_shape(func: Any, args: Any) -> bool:
    """Whether shapes of results depend on values."""
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    masks = (torch.bool, torch.uint8)
    return func.overloadpacket.__name__ != "index" or any(t.dtype in masks for t in _tensors(args[1:]))


@functools.cache
def _out_variant(func: Any) -> tuple[Any, tuple[str, ...]] | None:
    """The operation with the same arguments that writes into given memory, and the names of this memory."""

    def signature(arguments: Any) -> list[tuple[str, str, bool]]:
        return [(a.name, str(a.type), a.kwarg_only) for a in arguments]

    packet, wanted = func.overloadpacket, signature(func._schema.arguments)
    for name in packet.overloads():
        other = getattr(packet, name)
        out = tuple(a.name for a in other._schema.arguments if a.is_out)
        if len(out) == len(func._schema.returns) and out:
            if signature(a for a in other._schema.arguments if not a.is_out) == wanted:
                return other, out
    return None


def _into(func: Any, args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Step:
    """A step that writes what ``func(*args, **kwargs)`` returns into ``results``."""
    found = _out_variant(func)
    if found is not None and len(found[1]) == len(results):
        into, names = found
        scratch = [torch.empty_like(t) for t in results]
        into(*args, **kwargs, **dict(zip(names, scratch)))
        if all(map(_same_bits, scratch, results)):
            return functools.partial(into._op, *args, **kwargs, **dict(zip(names, results)))
    if func.overloadpacket.__name__ in _COPIES:
        return functools.partial(results[0].copy_, args[0])

    def step() -> None:
        for memory, value in zip(results, _tensors((func(*args, **kwargs),)), strict=True):
            if value.shape != memory.shape:
                raise RuntimeError(f"{func} has results of another shape than before")
            memory.copy_(value)

    return step


_COPIES = {"_to_copy", "clone", "contiguous", "to", "reshape", "flatten", "lift_fresh_copy"}
"""Operations whose result has the elements of their first argument, in their order."""


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = (one == other) | ((one != one) & (other != other))
    return one.stride() == other.stride() and bool(same.all())


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def share_memory(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether any of ``some`` is in the same memory as one of ``others``, at other places of it perhaps."""
    return not {_storage(t) for t in some if t.numel()}.isdisjoint(_storage(t) for t in others if t.numel())


class _refusing_reads(TorchFunctionMode):
    """What reads values in Python without an operation ends a recording."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recorder = self.recorder
        if getattr(func, "__name__", "") in _READS and not recorder.paused and active() is recorder:
            if any(_storage(t) in recorder.varying or _storage(t) in recorder.foreign for t in _tensors(args)):
                raise _NoPlan(f"{func.__name__} reads values")
        return func(*args, **(kwargs or {}))


def _tensors(values: Any) -> list[torch.Tensor]:
    """All tensors with elements in nested sequences."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.numel():
                found.append(value)
        elif isinstance(value, (tuple, list)):
            found += _tensors(value)
    return found


last_reason = ""
_thread = threading.local()
_recording = 0
_lock = fork_safe(threading.Lock())


def active() -> _Recorder | None:
    """What records the calls of this thread."""
    return getattr(_thread, "recorder", None) if _recording else None


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
    """The plan of ``function(copied)``, and its results; or None for both.

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
    global _recording
    notes = notices.count()
    with torch.inference_mode(False), torch.no_grad():
        # tensors made in inference mode could not be changed outside of it
        memory = [tensor.clone() for tensor in copied]
        recorder = _Recorder(memory, used, borrowed, length)
        if len(recorder.foreign) < sum(tensor.numel() > 0 for tensor in used):
            return None, None  # some share memory, which others may not
        with _lock:
            _recording += 1
        try:  # an interrupt before it leaves a count that is too high, which costs time alone
            _thread.recorder = recorder
            with _refusing_reads(recorder), following(recorder):
                results = function(memory)
        except _NoPlan as reason:
            global last_reason
            last_reason = str(reason)
            return None, None
        finally:
            _thread.recorder = None
            with _lock:
                _recording -= 1
    n_bytes = sum(tensor.untyped_storage().nbytes() for tensor in recorder.kept.values())
    varies = all(_storage(result) in recorder.varying for result in results)
    if length and any(length in tensor.shape for tensor in recorder.kept.values()):
        return None, None
    if n_bytes > MOST_BYTES or not varies or notices.count() != notes:
        return None, None
    kept = list(recorder.kept.values())
    plan = Plan([*recorder.before, *recorder.steps], memory, recorder.addresses, results, recorder.faults, kept)
    return plan, tuple(result.clone() for result in results)
