"""The recorder, which records the torch operations and kernel launches of a call below autograd.

`nvalchemiops.torch.runtime.plans` makes a plan of them. An operation that cannot be replayed for other values, such as
one whose shapes depend on values, ends the recording with a reason.
"""

import functools
import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from nvalchemiops import launch as core
from nvalchemiops._warp_internals import descriptor
from nvalchemiops.layout import layout
from nvalchemiops.notices import NvalchemiopsWarning, line_of_caller, notify
from nvalchemiops.torch.runtime._torch_internals import CHECK_OF_LINALG, followed_by, places_written
from nvalchemiops.torch.runtime.context import is_mapped, on_host
from nvalchemiops.torch.runtime.operations import (
    COLLECTIVES,
    OF_SHAPES,
    UNINITIALISED,
    WITH_STATISTICS,
    NoPlan,
    Step,
    by_storage,
    fails_for_all_values,
    has_unknown_shape,
    restoring,
    result_and_draw,
    step_into,
    tensors_in,
)
from nvalchemiops.torch.runtime.storage import holds, storage_of, whole_of

OF_LENGTH = "a list of this length: "
"""Prefix of reasons that may not hold for a list of another length."""

FOR_NOW = "for now: "
"""Prefix of reasons that will not hold for the next call."""

ORDER = -1
"""In the place of a storage that all acts write, so that a plan has all of them, in their order."""


_TEXTS = ("__repr__", "__format__")

_WATCHED = {
    getattr(torch.Tensor, name)
    for name in (
        *("numpy", "tolist", "__array__", "__dlpack__", "storage", "data_ptr"),
        *_TEXTS,
        *("apply_", "map_", "map2_"),
        *("__float__", "__int__", "__index__", "__complex__", "__bool__"),  # unseen below autograd by `torch.Tensor`
    )
}
"""Methods that give values or memory of a tensor to code that is not recorded. Launches use ``data_ptr``, too."""

not_repeatable: set[Any] = set()
"""Operators that cannot be replayed: they keep state between calls, or the recorder follows their bodies instead."""


class Recorder:
    """Follows a call and records its steps.

    A storage is *constant* if it has the same values in each call, otherwise *varying*. Storages of arguments that are
    used in place are *foreign*: only kernels may use them, since their addresses differ between calls. Constant
    arguments are *borrowed*: steps get a copy, since their memory may be changed or freed. *External* storages existed
    before the call and belong to no argument.

    If lists may have any ``length``, the arrays that kernels take from foreign arguments must be rows of that length,
    and nothing else may depend on the length.

    An operation that cannot be recorded ends the recording, but not the call. A signal handler may run any code in the
    middle of a call; if its operations can be recorded, they become part of the plan, but do not change its results.

    ``copied``, ``used``, ``borrowed``, ``length`` and ``changing`` are those of `plans.follow`; ``lists`` are the
    tensors among ``copied`` that are lists. If ``makes_steps`` is False, the recorder only refuses operations that
    cannot be captured, such as reads of values, even of constants. With ``most_bytes`` of memory made during the call
    the recording ends.
    """

    def __init__(
        self,
        copied: Sequence[torch.Tensor],
        used: Sequence[torch.Tensor],
        borrowed: Sequence[torch.Tensor],
        length: int,
        changing: Sequence[torch.Tensor],
        lists: Sequence[torch.Tensor] = (),
        makes_steps: bool = True,
        most_bytes: float = math.inf,
    ) -> None:
        self.makes_steps = makes_steps
        self.needs_length = False  # whether anything other than kernels depends on the length of lists
        self.n_bytes, self.most_bytes = 0, most_bytes
        self.acts = False  # whether the call acts on other ranks
        self.captures = False  # whether a graph is being captured; set after the recorder is made
        self.notes: list[Step] = []  # what the host notes for the acts of a captured call, in each replay
        self.conditions: list[Callable[[], bool]] = []  # of a replay: else the normal call runs
        # ends of the blocks that a replay has entered; see `nvalchemiops.torch.runtime.acts.enter_block`
        self.open: list[Callable[[BaseException | None], None]] = []
        self.device = copied[0].device if copied else None
        self._lists = {storage_of(tensor) for tensor in lists if tensor.numel()}
        self.before: list[tuple[Step, set[int]]] = []  # with the storages that each writes
        self.steps: list[tuple[Step, set[int], set[int]]] = []  # with the storages that each reads and writes
        self.faults: list[torch.Tensor] = []  # numbers of a replay, nonzero if the normal call raises or warns
        self.limits: list[torch.Tensor] = []  # likewise, if only a replay cannot serve these values
        # by tensors of points and their versions: points within the bounds of tables, and the bounds
        self.bounded: dict[Any, tuple[torch.Tensor, list[int]]] = {}
        self.length = length
        self.addresses = [*(tensor.data_ptr() for tensor in used), length]
        self.foreign = {storage_of(tensor): number for number, tensor in enumerate(used) if tensor.numel()}
        self.arguments = {storage_of(tensor) for tensor in (*copied, *changing) if tensor.numel()}
        self.varying = set(self.arguments)
        self.borrowed = {storage_of(tensor): tensor for tensor in borrowed if tensor.numel()}
        self.copies: dict[int, torch.Tensor] = {}
        self.external: dict[int, list[torch.Tensor]] = {}  # by storage: the parts of it that are used
        self.cached: list[Any] = []  # what caches hold, with some of the external tensors
        self.uninitialised: set[int] = set()
        self.read: set[int] = set()  # by steps
        self.kept: dict[int, torch.Tensor] = {}  # made during the call, by storage; kept so that no address is reused
        self.paused = False
        self.reason = ""  # why the recording has ended
        self.place = ""  # the line of the caller that has ended it

    @contextmanager
    def pause(self) -> Iterator[None]:
        """A context in which nothing is recorded. A `NoPlan` that is raised inside ends the recording."""
        before, self.paused = self.paused, True
        try:
            yield
        except NoPlan as reason:
            self.end(str(reason))
        finally:
            self.paused = before

    def end(self, reason: str) -> None:
        """Record nothing more, and free what is kept."""
        if not self.reason:
            file, line, _ = line_of_caller("contextlib", "warp", "")  # "": generated functions of ops
            self.reason, self.place = reason, f"{file}:{line}"
        for found in (self.kept, self.steps, self.before, self.cached):
            found.clear()

    def _keep(self, made: Iterable[torch.Tensor]) -> None:
        for tensor in made:
            self.kept[storage_of(tensor)] = tensor
            self.n_bytes += tensor.untyped_storage().nbytes()
        if self.n_bytes > self.most_bytes:
            raise NoPlan(f"its memory is more than {self.most_bytes} bytes")

    def is_on(self) -> bool:
        """Whether this recorder follows the calls of this thread. An interrupt may leave it on the stack of modes."""
        return current_recorder() is self

    # -- operations of torch ----------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.is_on():
            return func(*args, **kwargs)
        with self.pause():
            given, written = self._before(func, args, kwargs)
        if self.reason:
            return func(*args, **kwargs)
        before, self.paused = self.paused, True
        try:
            result, drew = result_and_draw(func, args, kwargs)
        except (NotImplementedError, torch.OutOfMemoryError):  # whatever the values are
            raise
        except Exception as error:  # the call may go on, but not so for other values
            if self.captures:  # no values are read, so this is why the capture fails
                raise
            if written or (self._varies(given) and not fails_for_all_values(error, func, args, kwargs)):
                self.end(f"{FOR_NOW}{func} raises an error for these values")
            raise
        finally:
            self.paused = before
        with self.pause():
            if drew:
                raise NoPlan(f"{func} draws random numbers")
            if not written:
                self._make(func, args, kwargs, given, result)
            elif func.overloadpacket.__name__.startswith("resize") and storage_of(result) not in given:
                raise NoPlan(f"{func} moves a tensor")
        return result

    def _before(self, func: Any, args: Any, kwargs: Any) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        """Check an operation before it runs. Return the tensors that it takes, and those that it writes into."""
        if func in not_repeatable or func.namespace in COLLECTIVES:
            raise NoPlan(f"{func} cannot be replayed")
        if func.overloadpacket.__name__ in WITH_STATISTICS and args[3] is not None and args[5]:
            raise NoPlan(f"{func} writes running statistics")
        every = tensors_in((args, tuple(kwargs.values())))
        given = {storage_of(t): t for t in every}
        places = places_written(func)
        written = by_storage([args[k] if k < len(args) else kwargs.get(label) for k, label in places])
        self._note_external(every)
        if torch.Tag.inplace_view in func.tags:  # it changes the shape of an object, or its graph: steps have others
            if func.overloadpacket.__name__ != "detach_":
                self._refuse_outside(func, written)
        elif written:
            self._write(func, args, kwargs, given, written)
        return given, written

    def varies(self, tensor: torch.Tensor) -> bool:
        """Whether the values of a tensor differ in each call."""
        return self._varies(by_storage([tensor]))

    def _varies(self, given: dict[int, torch.Tensor]) -> bool:
        return not (self.varying.isdisjoint(given) and self.foreign.keys().isdisjoint(given))

    def _is_captured(self, given: dict[int, torch.Tensor]) -> bool:
        """Whether an operation on these tensors will be captured, so that even constants cannot be read."""
        return not self.makes_steps and any([t.device == self.device for t in given.values()])

    def _note_external(self, given: Iterable[torch.Tensor]) -> None:
        known = (self.kept, self.varying, self.foreign, self.borrowed)
        for tensor in given:
            storage = storage_of(tensor)
            if any(storage in some for some in known):
                continue
            parts = self.external.setdefault(storage, [])
            if not any([holds(part, tensor) for part in parts]):
                parts.append(tensor)

    def _refuse_unwritten(self, what: Any, given: Iterable[int]) -> None:
        """Raise if one of these storages, which are about to be read, was not written by a recorded operation."""
        if not self.uninitialised.isdisjoint(given):
            raise NoPlan(f"{what} reads memory that no recorded operation has written")

    def _refuse_lists(self, what: str, given: Iterable[int]) -> None:
        """Raise, or note, that an operation other than a kernel uses a list."""
        if not self.foreign.keys().isdisjoint(given):
            raise NoPlan(f"{what} of a list")
        self.needs_length = self.needs_length or not self._lists.isdisjoint(given)

    def _write(self, func: Any, args: Any, kwargs: Any, given: Any, written: Any) -> None:
        """Record an operation that writes into its arguments, before it runs."""
        self._refuse_outside(func, written)
        self._refuse_unwritten(func, given.keys() - written.keys())
        if not self._varies(given) and self.read.isdisjoint(written):
            self.uninitialised -= written.keys()
            return
        self._refuse_lists(f"{func}", given)
        self._will_vary(written)
        self.read |= given.keys()
        if not self.makes_steps:
            return
        self._add(functools.partial(func, *self._lasting(args), **self._lasting(kwargs)), given, written)

    def _refuse_outside(self, what: Any, written: dict[int, torch.Tensor]) -> None:
        if not written.keys() <= self.kept.keys():
            raise NoPlan(f"{what} writes into a tensor that existed before the call")

    def _will_vary(self, written: dict[int, torch.Tensor]) -> None:
        """Mark storages that a step is about to write as varying. A replay first restores constant values in them."""
        for storage, tensor in written.items():
            if self.makes_steps and storage not in self.varying and storage not in self.uninitialised:
                whole = whole_of(tensor)
                self.before.append((restoring(whole, whole.clone()), {storage}))
            self.varying.add(storage)
            self.uninitialised.discard(storage)

    def _make(self, func: Any, args: Any, kwargs: Any, given: Any, result: Any) -> None:
        """Record an operation that allocates its results, after it has run."""
        made = tensors_in((result,))
        fresh = [t for t in made if storage_of(t) not in given]
        self._keep(fresh)
        if func.overloadpacket.__name__ in UNINITIALISED:
            self.uninitialised.update(map(storage_of, fresh))
            return
        if func.overloadpacket.__name__ in OF_SHAPES:
            return
        if fresh:
            self._refuse_unwritten(func, given)
        varies = self._varies(given)
        if not (varies or self._is_captured(given)):
            return
        if func.overloadpacket.__name__ == CHECK_OF_LINALG and self.makes_steps:
            self.look_at(self.compute(lambda: args[0].any().to(torch.int32), args[0]))
            return
        if not made and not isinstance(result, torch.Tensor):
            raise NoPlan(f"{func} reads values")
        if has_unknown_shape(func, args, kwargs):
            raise NoPlan(f"{func} has results whose shapes depend on values")
        if len({t.device for t in (*given.values(), *made) if t.ndim}) > 1:
            raise NoPlan(f"{func} copies from one device to another")
        if not self.makes_steps and any([t.device != self.device for t in made]):
            raise NoPlan(f"{func} copies a number to the host")
        if not (varies and fresh):
            return
        self._refuse_lists(f"{func}", given)
        if len(fresh) != len(made):
            raise NoPlan(f"{func} returns views and copies")
        self.read |= given.keys()
        if self.makes_steps:
            step = step_into(func, self._lasting(args), self._lasting(kwargs), self._lasting(fresh))
            self._add(step, given, map(storage_of, fresh))
        self.varying.update(map(storage_of, fresh))

    def compute(self, function: Callable[[], torch.Tensor], given: torch.Tensor) -> torch.Tensor:
        """Run and record ``function``, which depends only on the values of ``given``."""
        with self.pause():
            out = function()
        with self.pause():
            self._keep([out])
            memory = self._lasting(out)
            self._refuse_lists("an operation", [storage_of(given)])
            self._note_external([given])
            if storage_of(given) in self.varying:
                self._add(lambda: memory.copy_(function()), [storage_of(given)], [storage_of(out)])
                self.varying.add(storage_of(out))
        return out

    def look_at(self, fault: torch.Tensor, only_in_replays: bool = False) -> None:
        """Look at this number in each replay; for ``only_in_replays`` see `read_fault`."""
        (self.limits if only_in_replays else self.faults).append(fault)
        if self.acts:
            self.always(functools.partial(refuse, (fault,)), (fault,))

    def always(self, step: Step, reads: Sequence[Any] = (), writes: Sequence[torch.Tensor] = ()) -> None:
        """Record a step of every replay, before it runs. What it writes is new in each call."""
        with self.pause():
            found, written = by_storage(reads), by_storage(writes)
            self._note_external(tensors_in(reads))
            self._refuse_unwritten("a message", found)
            self._refuse_lists("a message", found)
            self._will_vary(written)
            self.read |= found.keys()
            self._add(step, found, (*written, ORDER))

    def _add(self, step: Step, reads: Iterable[int], writes: Iterable[int]) -> None:
        self.steps.append((step, set(reads), set(writes)))

    def needed(self, results: Iterable[torch.Tensor]) -> list[Step]:
        """The steps on which these results depend."""
        live = {ORDER, *map(storage_of, results)}
        found: list[Step] = []
        for step, reads, writes in reversed(self.steps):
            if not live.isdisjoint(writes):
                live |= reads | writes
                found.append(step)
        found += [step for step, writes in self.before if not live.isdisjoint(writes)]
        return found[::-1]

    def _lasting(self, values: Any) -> Any:
        """Other tensor objects for the arguments, whose shapes nobody changes, with copies of borrowed memory."""
        if isinstance(values, torch.Tensor):
            if not tensors_in((values,)):
                return values
            is_borrowed = storage_of(values) in self.borrowed
            if not is_borrowed and (not values.is_inference() or values.is_conj() or values.is_neg()):
                return values.detach()
            memory = (self._copy(values) if is_borrowed else values).untyped_storage()
            with torch.inference_mode(False):  # outside of it, steps could not write into tensors made in it
                return values.new_empty(0).set_(memory, values.storage_offset(), values.shape, values.stride())
        if isinstance(values, dict):
            return {name: self._lasting(value) for name, value in values.items()}
        return type(values)(map(self._lasting, values)) if isinstance(values, (tuple, list)) else values

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of the whole storage of a borrowed tensor."""
        storage = storage_of(tensor)
        if storage not in self.copies:
            self.copies[storage] = whole_of(tensor).clone()
            self._keep([self.copies[storage]])
        return self.copies[storage]

    # -- launches ---------------------------------------------------------------------------------

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
        """Record a kernel launch, before it runs."""
        with self.pause():
            found, written = by_storage(inputs), by_storage(outputs)
            what = f"kernel '{kernel.key}'"
            self._note_external(tensors_in(inputs))
            self._refuse_unwritten(what, found)
            self._refuse_outside(what, written)
            if not self._varies(found) and self.varying.isdisjoint(written) and self.read.isdisjoint(written):
                self.uninitialised -= written.keys()
                return
            self._will_vary(written)
            self.read |= found.keys()
            if self.length and self.length in (dim, *(value for value in inputs if type(value) is int)):
                if not self._lists:
                    raise NoPlan(OF_LENGTH + "a number has the same value")
                self.needs_length = True
            if not self.makes_steps:
                return
            if not all([layout(t.device.type).reads for t in found.values()]):  # steps know no streams
                raise NoPlan(f"{what} runs on a GPU, where no argument is")
            packed, patched, stretched = list(descriptors), [], []
            for number, value in enumerate((*inputs, *outputs)):
                if isinstance(value, torch.Tensor) and value.numel():
                    if type(packed[number]) is not bytes:
                        raise NoPlan("an array without a descriptor")
                    if storage_of(value) in self.borrowed:
                        place_in_copy = self._copy(value).data_ptr() + value.data_ptr() - storage_of(value)
                        packed[number] = place_in_copy.to_bytes(8, "little") + packed[number][8:]
                    if (argument := self.foreign.get(storage_of(value))) is not None:
                        offset = value.data_ptr() - self.addresses[argument]
                        if self.length and self.length in value.shape:
                            stretched.append((number, argument, *self._row(value, offset, packed[number])))
                        elif self.length and offset:
                            raise NoPlan("a part of a list")
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

            self._add(step if patched or stretched else functools.partial(run, packed), found, written)

    def _row(self, value: torch.Tensor, offset: int, packed: bytes) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Describe an array that is a list, or one of its rows, for any length: offset per entry, shape and strides."""
        strides = tuple(stride * value.element_size() for stride in value.stride())
        if value.shape[0] == self.length and not offset % self.length:
            for ndim in (1, value.ndim):  # an array of vectors, or of numbers
                form = tuple(value.shape[1:ndim]), strides[:ndim]
                if packed[8:] == _layout(self.length, *form):
                    return offset // self.length, *form
        raise NoPlan("a kernel takes a list in another shape")


class refuse_reads(TorchFunctionMode):  # used as a context manager, named like a function
    """A context in which tensor methods that give values to code that is not recorded end the recording."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As in torch."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)  # may end the recording below autograd, with a better reason
        if func in _WATCHED and self.recorder.is_on() and not (func is _ADDRESS and _called_here()):
            with self.recorder.pause():
                self._read(func.__name__, tensors_in(args))
        if func in _OF_NUMBERS and self.recorder.is_on():
            with self.recorder.pause():
                place, named = _OF_NUMBERS[func], kwargs.get("obj", kwargs.get("data"))
                self._made(func, args[place] if len(args) > place else named, result)
        return result

    def _made(self, func: Any, data: Any, result: torch.Tensor) -> None:
        """Note a new tensor, whose numbers torch has read and written unseen."""
        if isinstance(data, torch.Tensor):  # operations that are seen copy it
            return
        self._read(func.__name__, tensors_in((_in_lists(data),)))
        if self.recorder.makes_steps and (func in _COPYING or isinstance(data, _NUMBERS)):
            made = tensors_in((result,))
            for tensor in made:
                self.recorder.external.pop(storage_of(tensor), None)
            self.recorder._keep(made)

    def _read(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        recorder, given = self.recorder, by_storage(tensors)
        recorder._note_external(tensors)
        is_read = name != _ADDRESS.__name__ and recorder._is_captured(given)
        if is_read or recorder._varies(given) or not recorder.uninitialised.isdisjoint(given):
            if name in _TEXTS:  # to be printed, in most functions
                return notify("a recorded function makes text of a tensor, which replays do not", NvalchemiopsWarning)
            raise NoPlan(f"`{name}` gives values of a tensor to code that is not followed")


_ADDRESS = torch.Tensor.data_ptr

_COPYING = {torch.tensor: 0, torch.Tensor.new_tensor: 1}

_OF_NUMBERS = _COPYING | {torch.as_tensor: 0, torch.asarray: 0, torch.Tensor.new: 1}
"""Functions that make a tensor of numbers, and the position of these."""

_NUMBERS = (list, tuple, int, float, complex)
"""Numbers that are copied by functions that do not copy arrays."""


def _in_lists(data: Any) -> Any:
    """Numbers in nested sequences of any kind, as in lists."""
    is_nested = isinstance(data, Sequence) and not isinstance(data, (str, memoryview))
    return [*map(_in_lists, data)] if is_nested else data


def _called_here() -> bool:
    """Whether a function of this package has called the torch function."""
    return sys._getframe(2).f_globals.get("__name__", "").startswith("nvalchemiops")


@functools.lru_cache(maxsize=64)
def _layout(length: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    """The descriptor, without its address, of an array of ``length`` entries of a shape."""
    return descriptor((length, *shape), strides)[8:]


# -- the recorder of a thread ---------------------------------------------------------------------


class _OfThread(threading.local):
    """The recorder of this thread."""

    recorder: Recorder | None = None


_thread = _OfThread()


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """A context in which ``recorder`` follows the calls of this thread.

    Backward passes run in it, too: those of a GPU have a thread of autograd otherwise, whose calls nobody follows.
    """
    try:
        _thread.recorder = recorder
        with torch.autograd.set_multithreading_enabled(False), refuse_reads(recorder), followed_by(recorder):
            yield
    finally:
        _thread.recorder = None


def current_recorder() -> Recorder | None:
    """The recorder that follows the calls of this thread; None if it is paused or has ended."""
    recorder = _thread.recorder
    return None if recorder is None or recorder.paused or recorder.reason else recorder


def differ_in_replays(*tensors: Any) -> bool:
    """Whether a recorder follows this call, and replays will have other values of these; only tensors have others."""
    recorder = current_recorder()
    return recorder is not None and any(map(recorder.varies, tensors))


class FaultInReplay(ValueError):
    """A replay, which acts on other ranks, has reached a fault."""


def refuse(faults: Sequence[torch.Tensor]) -> None:
    """Raise if kernels have found faults."""
    if any(map(int, faults)):
        raise FaultInReplay(
            "the call raises or warns for these values. Messages of its plan have been sent, so it cannot be called in "
            "place of the plan: call it without `record`"
        )


def read_number(value: torch.Tensor) -> Any:
    """The number in a tensor of one entry, also where torch traces with values, which refuses ``int`` and ``bool``."""
    if current_recorder() is not None or is_mapped(value):  # which see what reads values, and refuse it
        return value.item()
    return value.reshape(1).tolist()[0]


def read_flag(flag: torch.Tensor) -> bool:
    """Whether a flag is set, for which the call raises, warns or goes another way. A replay then leaves the call."""
    return bool(read_fault(flag.to(torch.int32)) if differ_in_replays(flag) else read_number(flag))


def are_all(is_right: Callable[[Any], Any], values: torch.Tensor) -> bool:
    """Whether all values are right. A replay with others looks again; numbers on the host take less time than flags."""
    if differ_in_replays(values):
        return not read_flag(~is_right(values).all())
    return all(map(is_right, on_host(values).ravel().tolist()))


def read_fault(fault: torch.Tensor, only_in_replays: bool = False) -> int:
    """The number of the fault that kernels have written; zero means no fault.

    ``only_in_replays``: the normal call does not raise or warn, and plans of derivatives have to look for it, too.
    """
    recorder = current_recorder()
    if recorder is None:
        return int(read_number(fault))
    recorder.look_at(fault, only_in_replays)
    with recorder.pause():
        number = int(fault)
    if number and not only_in_replays:  # callers may catch the error, and go on as for no other values
        recorder.end(f"{FOR_NOW}the call raises, warns or goes another way for these values")
    return number
