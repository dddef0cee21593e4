"""Plans of repeated calls: the steps of a call are recorded once and replayed for other values.

A small sum spends most of its time in Python: checking arguments, allocating memory, describing launches. A `Plan`
holds the launches of one call with packed arguments, and the torch operations between them with their memory. It is not
a second implementation: it has the steps of the normal call, and its results have the same bits. A call that `recorder`
cannot follow gets no plan.

Plans run only in plain eager mode. On a CPU the values of fixed tensors are part of the key of a plan. On a GPU, where
values are not read, a CUDA graph is captured, and all tensors that differ between calls are copied into its memory.
"""

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from nvalchemiops import notices
from nvalchemiops.layout import layout
from nvalchemiops.locks import hold_if_free
from nvalchemiops.neighbors.rows import NO_PADDING
from nvalchemiops.torch.runtime import graphs
from nvalchemiops.torch.runtime._torch_internals import copy_all, is_zero_tensor
from nvalchemiops.torch.runtime.operations import UntaggedOp
from nvalchemiops.torch.runtime.recorder import OF_LENGTH, Recorder, Step, recording, refuse
from nvalchemiops.torch.runtime.storage import storage_of

MOST_BYTES = 2**27
"""Largest memory of a plan of an operation on a CPU, in bytes."""


NO_MEMORY = "there is not enough memory for a plan"
"""Why a call on a GPU has not been made: it has to be made again without a plan."""


def _comes_again(error: Exception, step: Step | None) -> bool:
    """Whether a step raises this error for its values, unlike a signal handler, which has come between two steps."""
    if step is None or type(error) is UntaggedOp:
        return False
    try:
        with torch.no_grad():
            step()
    except Exception as another:
        return type(another) is type(error)
    return False


class Plan:
    """The steps of a call, with their own memory.

    Made from the recorder that has followed the call, the memory of arguments that are ``copied``, and the results.
    ``raises`` says whether to look for faults for which the normal call raises: False if another call has checked the
    same values. Values that only this plan cannot serve are looked for in any case. If it ``acts`` on other ranks, it
    raises if the normal call would raise for these values.
    """

    place: torch.device | None = None
    """The GPU of a graph."""

    def __init__(
        self, recorder: Recorder, copied: Sequence[torch.Tensor], results: Sequence[torch.Tensor], raises: bool
    ) -> None:
        # numbers that steps write: nonzero if the normal call raises, and if this plan cannot serve the values
        self.faults, self.limits = recorder.faults if raises else [], recorder.limits
        self.is_exceeded = False  # a limit, at the last call
        self.steps = self._steps(recorder, results)
        self.copied, self.results = copied, results
        self.addresses = recorder.addresses  # of arguments used in place, then their length; the steps read them
        self.external = [part for parts in recorder.external.values() for part in parts]  # on which results depend
        self.cached = recorder.cached  # which caches may drop: a tensor that nothing keeps counts as replaced
        self.acts, self._conditions, self._open = recorder.acts, recorder.conditions, recorder.open
        kept = {storage_of(t): t for t in copied if t.numel()} | self._memory(recorder, results)
        self.kept = [tensor.untyped_storage() for tensor in kept.values()]  # tensors would keep the graphs of the call
        self.n_bytes = sum(storage.nbytes() for storage in self.kept)
        self._lock = threading.Lock()  # if held at a fork it stays held in the child, where calls then run without it

    def _steps(self, recorder: Recorder, results: Sequence[torch.Tensor]) -> list[Step]:
        return recorder.needed((*results, *self.faults, *self.limits))

    def _memory(self, recorder: Recorder, results: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        return recorder.kept

    def takes(self, length: int) -> bool:
        """Whether lists may have this length."""
        return True

    def __call__(
        self,
        copied: Sequence[torch.Tensor],
        used: Sequence[torch.Tensor] = (),
        length: int = 0,
        end: Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]] | None = None,
    ) -> tuple[torch.Tensor, ...] | None:
        """Return the results for these arguments, or None if the normal call must run.

        The normal call must run if the plan is in use in another thread, if it is too small for these values, if the
        normal call raises for them, or if ranks must agree after an error.
        ``length`` is the length of lists among ``used``, if the plan takes any length (see `takes`). Results are
        copies. If ``end`` is given, its return value is the result: it gets the plan's memory, and must not keep
        references to it.
        """
        held: list[Any] = []
        try:
            if not all([holds() for holds in self._conditions]) or not hold_if_free(self._lock, held):
                return None
            self.is_exceeded = False
            step = None
            try:
                with torch.no_grad():
                    self._take(copied, used, length)
                    for step in self.steps:
                        step()
            except Exception as error:
                if self.acts or self.place is not None or not _comes_again(error, step):
                    raise
                return None  # the normal call raises it, too, or goes on after it
            self.is_exceeded = any(map(int, self.limits))
            if self.is_exceeded or any(map(int, self.faults)):
                if self.acts:
                    refuse([*self.faults, *self.limits])
                return None
            return tuple([t.clone() for t in self.results]) if end is None else end(self.results)
        except BaseException as error:
            while held and self._open:
                self._open.pop()(error)
            raise
        finally:
            for lock in held:
                lock.release()

    def _take(self, copied: Sequence[torch.Tensor], used: Sequence[torch.Tensor], length: int) -> None:
        """Pass these arguments to the steps."""
        self.addresses[:] = [*(tensor.data_ptr() for tensor in used), length]
        copy_all(self.copied, copied)


class GraphPlan(Plan):
    """The captured work of a call on a GPU, with memory for copies of all tensors that differ between calls.

    ``memory`` is for copies of arguments, then of ``n_lists`` lists. ``length`` and ``room`` are the present and the
    largest length of the lists; 0 if their length is fixed.
    """

    def __init__(
        self,
        graph: graphs.Graph,
        recorder: Recorder,
        memory: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        n_lists: int,
        length: int,
        room: int,
    ) -> None:
        self._graph, self._length, self._room = graph, length, room
        self.place = graph.device
        super().__init__(recorder, memory, results, False)
        self._lists = memory[len(memory) - n_lists :] if room > length else ()
        self.n_bytes += graph.n_bytes

    def _steps(self, recorder: Recorder, results: Sequence[torch.Tensor]) -> list[Step]:
        return [*recorder.notes, self._graph.replay]

    def _memory(self, recorder: Recorder, results: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        return {storage_of(t): t for t in results if t.numel()}  # the graph holds all other memory

    def takes(self, length: int) -> bool:
        """Whether there is memory for lists of this length."""
        return length == self._length or (length <= self._room and bool(self._lists))

    def _take(self, copied: Sequence[torch.Tensor], used: Sequence[torch.Tensor], length: int) -> None:
        values = (*copied, *used)
        copy_all([_part_like(memory, value) for memory, value in zip(self.copied, values)], values)
        if length != self._length:
            for memory in self._lists:  # the entry after the last one marks the end of the list
                if length < self._room in memory.shape:
                    memory.select(memory.shape.index(self._room), length).fill_(NO_PADDING)
            self._length = length


def share_memory(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether any of ``some`` shares a storage with one of ``others``."""
    return not {storage_of(t) for t in some if t.numel()}.isdisjoint(storage_of(t) for t in others if t.numel())


class Followed(NamedTuple):
    """A recorded call: its plan, or None, the reason and its line; and its results, or None if it was not made."""

    plan: Plan | None
    results: tuple[torch.Tensor, ...] | None
    reason: str = ""
    place: str = ""


def follow(
    function: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    copied: Sequence[torch.Tensor],
    used: Sequence[torch.Tensor] = (),
    borrowed: Sequence[torch.Tensor] = (),
    length: int = 0,
    changing: Sequence[torch.Tensor] = (),
    raises: bool = True,
    *,
    most_bytes: float = math.inf,
    graph: graphs.Graph | None = None,
) -> Followed:
    """Call ``function(copied)``, and make a plan of the call.

    Results of the function depend on the values of the arguments below, and otherwise only on constants:

    - ``copied``, which any operation may use. The plan copies their values.
    - ``used``, whose values only kernels use. ``length`` is that of the lists among them, which may have any other
      length when the plan runs. No other axis of an argument may have this length by chance. By default shapes never
      change.
    - ``borrowed``, whose values never change, though their memory may; with ``graph`` their values may change, but
      their memory may not.
    - ``changing``, other tensors whose values change in place.

    ``raises`` is as for `Plan`, ``most_bytes`` the largest memory of a plan on a CPU. ``graph`` captures the call on a
    GPU. The function then gets copies of ``used`` after those of ``copied``.
    """
    if graph is not None:
        return _captured(function, copied, used, borrowed, length, graph)
    grad = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        # tensors made in inference mode could not be changed outside of it
        memory = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in copied]
        recorder = Recorder(memory, used, borrowed, length, changing, most_bytes=most_bytes)
        if len(recorder.foreign) < sum(tensor.numel() > 0 for tensor in used):
            return Followed(None, None, "arguments share memory")
        with recording(recorder):
            results = tuple(map(_in_memory, function(memory)))
    reason = recorder.reason or _fault_of(recorder, results, (*memory, *changing))
    if reason:
        return Followed(None, results, reason, recorder.place)
    plan = Plan(recorder, [t.detach() for t in memory], [t.detach() for t in results], raises)
    return Followed(plan, tuple([t.clone() for t in plan.results]))


def why_not(
    function: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    arguments: Sequence[torch.Tensor],
    changing: Sequence[torch.Tensor],
) -> str:
    """Call ``function(arguments)``, and say why `follow` cannot make a plan of the call; an empty string if it can.

    With the reason `NO_MEMORY` the call has not been made. All others have been, with the arguments themselves.
    """
    tensors = (*arguments, *changing)
    in_graph = bool(tensors) and not layout(tensors[0].device.type).reads
    recorder = Recorder(arguments, (), (), 0, changing, makes_steps=not in_graph)
    try:
        with recording(recorder):
            results = function(arguments)
    except torch.OutOfMemoryError:
        if recorder.acts or recorder.reason or _writes_gradients(recorder, tensors):
            raise
        return NO_MEMORY
    if any([t.requires_grad for t in results]):
        return "a result has a graph"
    if in_graph:
        return recorder.reason or _writes_gradients(recorder, tensors)
    return recorder.reason or _fault_of(recorder, results, tensors)


def _captured(
    function: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    copied: Sequence[torch.Tensor],
    used: Sequence[torch.Tensor],
    borrowed: Sequence[torch.Tensor],
    length: int,
    graph: graphs.Graph,
) -> Followed:
    """`follow` on a GPU.

    The call runs once before it is captured. This loads the kernels, and finds operations that cannot be replayed.
    Lists get memory with room for more entries, if only kernels read them.
    """
    with torch.inference_mode(False):
        memory = [t.detach().clone().requires_grad_(t.requires_grad) for t in (*copied, *used)]
        seen = Recorder(memory, (), borrowed, length, (), memory[len(copied) :] if length else (), makes_steps=False)
        try:
            with recording(seen):
                results = tuple([_in_memory(t).detach() for t in function(memory)])
        except torch.OutOfMemoryError:  # there may be enough without all that the recorder keeps
            if seen.acts or seen.reason or _writes_gradients(seen, memory):
                raise  # messages would be sent twice, or values that exist added to twice
            return Followed(None, None, NO_MEMORY)
        # the memory will have the values of other calls
        results = tuple([t.clone() if share_memory([t], memory) else t for t in results])
        if reason := seen.reason or _writes_gradients(seen, memory):
            return Followed(None, results, reason, seen.place)
        room = length
        if length and not seen.needs_length and not any(length in t.shape for t in seen.kept.values()):
            room = (length + length // 4) // 64 * 64 + 64
            memory[len(copied) :] = [_with_room(t, length, room) for t in memory[len(copied) :]]
        seen.kept.clear()  # there may be no memory for both
        recorder = seen

        def call(memory: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            nonlocal recorder
            recorder = Recorder(memory, (), borrowed, 0, (), makes_steps=False)  # notes other tensors, which are kept
            recorder.captures = True
            try:
                with recording(recorder):
                    return [_in_memory(t).detach() for t in function(memory)]
            except BaseException:
                recorder.kept.clear()
                raise

        captured = graph.captured(call, memory, may_repeat=not seen.acts)
        if captured is None or recorder.reason:
            return Followed(None, results, recorder.reason or graph.reason or graphs.obstacle(graph.device))
        return Followed(GraphPlan(graph, recorder, memory, captured, len(used), length, room), results)


def _in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or zeros in memory in place of a tensor that has none, such as the derivative of a sign."""
    return tensor.new_zeros(tensor.shape) if is_zero_tensor(tensor) else tensor


def _with_room(tensor: torch.Tensor, length: int, room: int) -> torch.Tensor:
    """A copy in which axes of this length are longer. The additional entries are marked as padding."""
    shape = [room if size == length else size for size in tensor.shape]
    memory = torch.full(shape, NO_PADDING, dtype=tensor.dtype, device=tensor.device)
    _part_like(memory, tensor).copy_(tensor)
    return memory


def _part_like(memory: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The part of ``memory`` for ``value``, from the beginning of each axis."""
    return memory if memory.shape == value.shape else memory[tuple([slice(size) for size in value.shape])]


def _fault_of(recorder: Recorder, results: Sequence[torch.Tensor], arguments: Sequence[torch.Tensor]) -> str:
    """Why a call that was followed to its end gets no plan; an empty string if it gets one."""
    if reason := _writes_gradients(recorder, arguments):
        return reason
    external = [part for parts in recorder.external.values() for part in parts]
    length = recorder.length
    if length and any(length in t.shape for t in (*recorder.kept.values(), *external)):
        return OF_LENGTH + "another axis has the same length"
    known = recorder.varying | recorder.kept.keys()
    return "" if all([storage_of(t) in known for t in results if t.numel()]) else "a result existed before the call"


def _writes_gradients(recorder: Recorder, arguments: Sequence[torch.Tensor]) -> str:
    """Why there is no plan of a call with a backward pass like ``loss.backward()``; an empty string if it has none."""
    external = [part for parts in recorder.external.values() for part in parts]
    for tensor in (*arguments, *external):
        if tensor.is_leaf and tensor.grad is not None and storage_of(tensor.grad) in recorder.kept:
            return "a backward pass writes gradients into `.grad` of a tensor: use torch.autograd.grad"
    return ""


def record(*arguments: Any, **options: Any) -> Followed:
    """Make the plan of a call of an operation, without gradients. Arguments are those of `follow`.

    A call that warns gets no plan, since a replay would not repeat the warning.
    """
    notes = notices.count()
    try:
        with torch.no_grad():
            plan, results, reason, _ = follow(*arguments, most_bytes=MOST_BYTES, **options)
    except torch.OutOfMemoryError:  # there may be enough for the call without copies of its lists
        return Followed(None, None, NO_MEMORY)
    graph = options.get("graph")
    if plan is not None and graph is not None and plan.n_bytes > (most := graphs.most_bytes(graph.device)):
        plan, reason = None, f"its memory is more than {most} bytes"
    if notices.count() != notes:
        plan, reason = None, "the call has warned"
    return Followed(plan, results, reason)
