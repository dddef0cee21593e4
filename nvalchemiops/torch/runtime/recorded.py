"""`record`: plans of a user's own functions, with any torch operations in them."""

import functools
import pkgutil
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nvalchemiops.arguments import as_int
from nvalchemiops.layout import layout
from nvalchemiops.locks import fork_safe, hold_if_free
from nvalchemiops.torch.runtime import acts, graphs, tables
from nvalchemiops.torch.runtime._torch_internals import compiled_as_eager, has_function_modes, is_unobserved
from nvalchemiops.torch.runtime.context import is_capturing, is_eager
from nvalchemiops.torch.runtime.forms import (
    has_hashable,
    is_hashable,
    mode_of,
    put_together,
    refuse_hidden,
    taken_apart,
)
from nvalchemiops.torch.runtime.history import leaves_of
from nvalchemiops.torch.runtime.openmp import fairly
from nvalchemiops.torch.runtime.plans import NO_MEMORY, Plan, follow, why_not
from nvalchemiops.torch.runtime.recorder import FOR_NOW, FaultInReplay

_records = fork_safe(threading.Lock())
"""Held while a function is recorded, since compiled functions then run eagerly in all threads."""

MOST_PLANS = 4
"""Default number of plans that a function keeps, one for each combination of shapes."""


class RecordingError(RuntimeError):
    """A function cannot be recorded, or a tensor that it was recorded with has changed."""


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    # without flags that say that values are those in memory negated or conjugated
    shape, strides = tensor.shape, tensor.stride()
    values = tensor.new_empty(0).set_(tensor.untyped_storage(), tensor.storage_offset(), shape, strides)
    values = torch.view_as_real(values) if values.is_complex() else values
    return values.view(_INTEGERS[values.element_size()])


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types for comparing values bit by bit, so that a NaN equals itself."""


def _place(tensor: torch.Tensor) -> Hashable:
    return tensor.data_ptr(), tensor.shape, tensor.dtype, tensor.stride()


class _Fixed:
    """A tensor that a recorded function uses in addition to its arguments, with its values when it was recorded."""

    def __init__(self, tensor: torch.Tensor, in_graph: bool) -> None:
        self._tensor = weakref.ref(tensor)
        self._was_kept = False
        self._place = _place(tensor)
        self._bits = _bits(tensor)  # a view of its memory
        # a graph uses the present values, but has numbers of a CPU as constants
        is_present = in_graph and not layout(tensor.device.type).reads
        self._before = None if is_present else self._bits.clone()

    def note_end(self) -> None:
        """Note after a call whether anybody keeps the tensor. A call that makes it lets go of the one before."""
        self._was_kept = self._tensor() is not None

    def is_gone(self) -> bool:
        """Whether nobody keeps the tensor any more, so that the function would use another one."""
        return self._was_kept and self._tensor() is None

    def is_same(self) -> bool:
        """Whether the values are the same. They are compared: NumPy and ``.data`` change them without a new version."""
        tensor = self._tensor()
        is_there = not self._was_kept if tensor is None else self._place == _place(tensor)
        return is_there and (self._before is None or torch.equal(self._bits, self._before))


class _Recording:
    """A plan, the tensors on which it depends, and the structure of the results with placeholders for tensors."""

    def __init__(
        self, plan: Plan, changing: Sequence[torch.Tensor], moving: Sequence[torch.Tensor], form: Any, takes_apart: bool
    ) -> None:
        self.plan, self.form, self.takes_apart = plan, form, takes_apart
        self._fixed = [_Fixed(tensor, plan.place is not None) for tensor in plan.external]
        self._changing = changing
        self._places = [_place(tensor) for tensor in changing]
        others = (*plan.external, *changing)
        self._untracked = [weakref.ref(t) for t in others if not t.requires_grad]
        self._leaves = _leaves_of(others)
        plan.external = [fixed._bits for fixed in self._fixed]  # a detached tensor would keep the other one
        del others
        for fixed in self._fixed:
            fixed.note_end()
        self._first: list[torch.Tensor] | None = [_bits(tensor).clone() for tensor in moving]

    def is_current(self) -> bool:
        """Whether no tensor on which the plan depends has moved or changed."""
        places = [_place(tensor) for tensor in self._changing]
        return places == self._places and all([fixed.is_same() for fixed in self._fixed])

    def is_gone(self) -> bool:
        """Whether a tensor on which the plan depends is not there any more."""
        return any([fixed.is_gone() for fixed in self._fixed])

    def may_have_graph(self) -> bool:
        """Whether results of the function may have a graph, since a tensor that required no gradient requires one."""
        there = [tensor for reference in self._untracked if (tensor := reference()) is not None]
        return torch.is_grad_enabled() and any([tensor.requires_grad for tensor in there])

    def shares_leaves(self, moving: Sequence[torch.Tensor]) -> bool:
        """Whether arguments have gradients by tensors by which other tensors of the function have gradients, too."""
        return bool(self._leaves) and not self._leaves.isdisjoint(_leaves_of(moving))

    def is_new(self, moving: Sequence[torch.Tensor]) -> bool:
        """Whether the plan is unchecked, and these arguments differ from those with which it was recorded."""
        first = self._first  # another thread may set it
        return first is not None and not all(map(torch.equal, map(_bits, moving), first))

    def note_check(self) -> None:
        """Note that results of the plan have been compared with those of the function, after a call of the function."""
        self._first = None
        for fixed in self._fixed:
            fixed.note_end()


@dataclass(eq=False)
class _Kind:
    """What is known of calls of one kind, such as those with arguments of the same shapes."""

    key: Hashable
    recording: _Recording | None = None
    refused: str = ""  # why there is none
    is_tried: bool = False  # beside a default device: they can be recorded
    waits: int = 0  # ordinary calls to come
    next_waits: int = 0

    def is_waiting(self) -> bool:
        """Whether this call is not recorded since others, one after the other, could not be for now."""
        self.waits -= (is_waiting := self.waits > 0)
        return is_waiting

    def note(self, reason: str) -> None:
        """Note why a call got no plan: no other gets one, or, for now, none of the next 0, 1, 3, 7 ... ones."""
        if reason.startswith(FOR_NOW):
            self.waits, self.next_waits = self.next_waits, min(2 * self.next_waits + 1, _MOST_WAITING)
        elif not reason.startswith(graphs.NO_STREAM):
            self.refused = reason


class Recorded:
    """A function whose calls are recorded and replayed; made by `record`."""

    def __init__(
        self,
        function: Callable[..., Any],
        changing: Sequence[torch.Tensor],
        if_changed: str,
        most_plans: int,
    ) -> None:
        functools.update_wrapper(self, function, updated=())  # see `__getattr__`
        self._function, self._changing, self._if_changed = function, tuple(changing), if_changed
        self._most = most_plans
        self._takes_apart = True  # all dataclasses; if False hashable ones are constants
        self._kinds: dict[Hashable, _Kind] = {}  # without a lock: each access is a single operation
        self._counts = {"recorded": 0, "replayed": 0, "ordinary": 0}
        self._way = "not called yet"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The results of the function, from a plan if one is kept for these arguments."""
        return self._called(args, kwargs, self._takes_apart)

    def _called(self, args: Any, kwargs: Any, takes_apart: bool) -> Any:
        form, moving = taken_apart((args, kwargs), takes_apart)
        reason = self._obstacle(moving)
        if reason is _DEPENDENT and has_hashable(form):  # a model, whose tensors are listed in `changing`
            constants, others = taken_apart((args, kwargs), False)
            if is_hashable(constants):
                form, moving, reason = constants, others, self._obstacle(others)
        if reason is not None:
            return self._ordinary(reason, args, kwargs)
        grad = torch.is_grad_enabled()
        device = self._device(moving)
        how = layout(device.type)
        place = None if how.reads else graphs.place_of(device)
        # a mode of torch says where the function makes tensors
        elsewhere = torch.get_default_device() if has_function_modes() else None
        beside = elsewhere is not None
        forms = [(t.shape, t.dtype, t.stride(), t.requires_grad) for t in moving]
        mode = mode_of(self._function)
        key: Hashable = (form, mode, grad, torch.get_default_dtype(), elsewhere, how, place, *forms)
        try:
            kind = self._kinds.get(key) or _Kind(key)
        except TypeError as error:
            if beside:
                return self._ordinary(f"arguments other than tensors are not hashable: {error}", args, kwargs)
            text = f"`{self._name}`: arguments other than tensors must be hashable: {error}"
            return self._with_constants(TypeError(text), (args, kwargs), takes_apart, form)
        found = kind.recording
        if found is not None and not found.is_current():
            if self._if_changed == "raise" and not found.is_gone():
                raise RecordingError(
                    f"`{self._name}` was recorded with tensors that have changed since: pass them as arguments, or "
                    "list them in `changing`"
                )
            found = None
        if found is not None and found.may_have_graph():
            found = None
        if found is None:
            if kind.refused or kind.is_waiting():
                return self._ordinary(kind.refused or _LATER, args, kwargs)
            if beside and not kind.is_tried:
                return self._try(kind, moving, (args, kwargs), takes_apart)
            return self._record(kind, form, moving, (args, kwargs), takes_apart, beside)
        if found.shares_leaves(moving):
            return self._ordinary(_DEPENDENT, args, kwargs)
        if not (found.plan.acts and found.plan.place) and found.is_new(moving):
            return self._checked(found, moving, args, kwargs, kind if beside else None)
        results = _replayed(found.plan, moving)
        if results is None:
            return self._ordinary(_TOO_SMALL if found.plan.is_exceeded else _NOT_NOW, args, kwargs)
        self._note("replayed")
        return put_together(found.form, results)

    def __getattr__(self, name: str) -> Any:
        """What is set on the function, as it is now: copies would keep tensors of a module that others replace."""
        own = getattr(self.__dict__.get("_function"), "__dict__", {})
        if name not in own:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        return own[name]

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """As a method: the instance is the first argument."""
        if instance is None:
            return self
        if torch.compiler.is_compiling():  # torch.compile does not follow methods that are no functions
            return functools.partial(self, instance)
        return types.MethodType(self, instance)

    def __reduce__(self) -> Any:
        function = self._function
        whole = Recorded, (function, self._changing, self._if_changed, self._most)
        # no pickler says which it is: pickle needs a function by name, where this object is; cloudpickle takes it along
        if "cloudpickle" in sys._getframe(1).f_globals.get("__name__", ""):
            return whole
        try:  # by name, if this object has it in place of the function
            if pkgutil.resolve_name(f"{function.__module__}:{function.__qualname__}") is self:
                return function.__qualname__
        except (AttributeError, ImportError, ValueError):
            pass
        return whole

    def _checked(
        self, recording: _Recording, moving: Sequence[torch.Tensor], args: Any, kwargs: Any, kind: _Kind | None
    ) -> Any:
        """Return the results of the function; raise a RecordingError if its plan has other results.

        The function sends messages to other ranks, not the plan, which is told what has come back. Beside a default
        device, with the ``kind`` of the call, there is no error, but no plan either.
        """
        plan = recording.plan
        heard: acts.Written = deque()
        with acts.hearing(heard), tables.off():  # operation by operation, as the plan, so that rounding is the same
            returned = self._ordinary("the plan is compared with the function, once", args, kwargs)
        expected = taken_apart(returned, recording.takes_apart)[1]
        try:
            with acts.telling(heard):
                results = _replayed(plan, moving)
            is_same = results is None or (not heard and len(results) == len(expected))
        except FaultInReplay:  # the function has warned
            results, is_same = None, True
        except (IndexError, ValueError):  # other messages
            if not plan.acts:
                raise
            results, is_same = None, False
        if results is not None:  # errors, and values that the plan leaves to the function, say nothing about it
            recording.note_check()
        if not is_same or not all(map(is_close, results or expected, expected)):
            self.clear()
            reason = (
                f"`{self._name}` and its plan have different results: the function does something that is not "
                "recorded, such as starting threads, letting other libraries change tensors, or running Python code "
                "that differs in each call"
            )
            if kind is None:
                raise RecordingError(reason)
            self._keep(_Kind(kind.key, refused=reason))
            self._way = f"ordinary, since {reason}"
        return returned

    @property
    def _name(self) -> str:
        return getattr(self._function, "__name__", "the function")

    def explain(self) -> str:
        """Say how the last call ran and why, and which plans are kept."""
        plans = [kind.recording.plan for kind in list(self._kinds.values()) if kind.recording]
        counts = ", ".join(f"{number} {what}" for what, number in self._counts.items())
        kept = "; ".join(f"{len(plan.steps)} steps, {plan.n_bytes / 2**20:.2f} MiB" for plan in plans)
        return f"last call: {self._way}. Calls: {counts}. Plans: {kept or 'none'}"

    def clear(self) -> None:
        """Delete all plans and free their memory."""
        self._kinds.clear()

    def _keep(self, kind: _Kind) -> None:
        """Keep what is known of this kind, as the last one."""
        self._kinds.pop(kind.key, None)
        self._kinds[kind.key] = kind
        for has_plan, most in ((True, self._most), (False, tables.MOST_KINDS)):
            some = [kept.key for kept in list(self._kinds.values()) if bool(kept.recording) is has_plan]
            for oldest in some[:-most]:
                self._kinds.pop(oldest, None)

    def _obstacle(self, moving: Sequence[torch.Tensor]) -> str | None:
        """Why a call with these tensors runs without a plan; None if it may have one."""
        if is_capturing():  # a step without arguments may use tensors of a GPU
            return "it is part of a graph that is being captured"
        if not is_eager(*moving) or has_function_modes(but_default_device=True):
            return "compilers, transforms and modes see the operations"
        if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():  # it reads gradients
            return "anomaly detection looks for NaN in the backward passes"
        tracked = [t for t in moving if t.requires_grad]
        if len(tracked) > 1 and not all([t.is_leaf for t in tracked]):
            return "arguments with gradients may depend on each other"
        if tracked and (leaves := _leaves_of(self._changing)) and not leaves.isdisjoint(_leaves_of(tracked)):
            return _DEPENDENT
        if not is_unobserved(*moving, *self._changing):
            return "autocast, a profiler or a tensor of another kind sees the operations"
        device = self._device(moving)
        if any([t.device != device for t in (*moving, *self._changing)]):
            return "tensors are on several devices"
        return None if layout(device.type).reads else graphs.obstacle(device) or None

    def _device(self, moving: Sequence[torch.Tensor]) -> torch.device:
        tensors = (*moving, *self._changing)
        return tensors[0].device if tensors else torch.device("cpu")

    def _ordinary(self, reason: str, args: Any, kwargs: Any) -> Any:
        self._note("ordinary", reason)
        return self._function(*args, **kwargs)

    def _note(self, way: str, reason: str = "") -> None:
        self._way = f"{way}, since {reason}" if reason else way
        self._counts[way] += 1

    def _with_constants(self, error: Exception, given: tuple[Any, Any], took_apart: bool, *forms: Any) -> Any:
        """The results where hashable dataclasses are constants, since a call that takes them apart raises ``error``.

        So objects with tensors may be those of a model, whose values its methods read.
        """
        if not took_apart or not any(map(has_hashable, forms)):
            raise error from None
        if not is_hashable(taken_apart(given, False)[0]):
            raise error from None
        try:
            results = self._called(*given, False)
        except Exception as another:
            is_refused = isinstance(error, RecordingError) and isinstance(another, RecordingError)
            raise (error if is_refused else another) from None
        self._takes_apart = False
        return results

    def _try(self, kind: _Kind, moving: list[torch.Tensor], given: tuple[Any, Any], takes_apart: bool) -> Any:
        """The results of an ordinary call, of which it is noted whether further ones can be recorded.

        Beside a default device, functions that cannot be recorded are called.
        """
        returned: list[Any] = []

        def call(memory: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            returned.append(self._function(*given[0], **given[1]))
            form, found = taken_apart(returned[-1], takes_apart)
            refuse_hidden(form)
            return found

        held: list[Any] = []
        try:
            if not hold_if_free(_records, held):
                return self._ordinary("another thread is recording", *given)
            with compiled_as_eager():
                reason = why_not(call, moving, self._changing)
        finally:
            for lock in held:
                lock.release()
        kind.is_tried = not reason
        kind.note(reason)
        self._keep(kind)
        if not returned:
            return self._ordinary(reason, *given)
        self._note("ordinary", reason or "calls beside a default device are recorded when they repeat")
        return returned[-1]

    def _record(
        self,
        kind: _Kind,
        form: Any,
        moving: list[torch.Tensor],
        given: tuple[Any, Any],
        takes_apart: bool,
        beside: bool,
    ) -> Any:
        """The results of a call that is recorded; ``beside`` a default device also if it cannot be."""
        returned: list[Any] = []

        def call(memory: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            values, options = put_together(form, memory)
            returned.append(taken_apart(self._function(*values, **options), takes_apart))
            refuse_hidden(returned[-1][0])
            return returned[-1][1]

        device = self._device(moving)
        if graphs.are_all_used(device):
            return self._ordinary(graphs.NO_STREAM, *given)
        held: list[Any] = []
        try:
            if not hold_if_free(_records, held):
                return self._ordinary("another thread is recording", *given)
            graph = None if layout(device.type).reads else graphs.Graph(device)
            with compiled_as_eager():
                plan, results, reason, place = follow(call, moving, changing=self._changing, graph=graph)
        finally:
            for lock in held:
                lock.release()
        if reason == NO_MEMORY:
            kind.note(reason)
            self._keep(kind)
            return self._ordinary(reason, *given)
        form_of_results, found = returned[0]
        # the capture failed, not the function; or ranks come back from an error
        failed = "" if graph is None else graph.reason
        is_for_now = bool(failed) or reason.startswith(FOR_NOW)
        if (plan is not None or is_for_now) and any([t.requires_grad for t in found]):
            if beside:
                return self._ordinary("a result has a graph", *given)
            raise RecordingError(
                f"`{self._name}` returns tensors with a graph, but a plan has no graph: take derivatives inside of the "
                "function, and return detached tensors"
            )
        if plan is None and (is_for_now or beside):
            kind.note(failed or reason)
            self._keep(kind)
            self._note("ordinary", reason)
            return put_together(form_of_results, found)
        if plan is None:
            reason += f" ({place})" if place else ""
            self._way = f"not recorded: {reason}"
            error = RecordingError(f"`{self._name}` cannot be recorded: {reason}")
            return self._with_constants(error, given, takes_apart, form, form_of_results)
        for other in list(self._kinds.values()):
            if other.recording and not other.recording.is_current():  # it may hold the lists of a domain that was left
                self._kinds.pop(other.key, None)
        recording = _Recording(plan, self._changing, moving, form_of_results, takes_apart)
        self._keep(_Kind(kind.key, recording, is_tried=kind.is_tried))
        if recording.shares_leaves(moving):  # the function got copies of the arguments
            return self._ordinary(_DEPENDENT, *given)
        self._note("recorded")
        return put_together(form_of_results, results or ())


def record(
    function: Callable[..., Any] | None = None,
    *,
    changing: Iterable[torch.Tensor] = (),
    if_changed: str = "record",
    most_plans: int = MOST_PLANS,
) -> Any:
    """Record the operations of a call of ``function``, and replay them for other values.

    A step of a simulation or of a training loop consists of hundreds of operations, and for small systems most of its
    time is spent in Python. The first call with arguments of given shapes records the operations and launches of the
    function below autograd, including those of gradients taken inside of it. Later calls replay them in the same
    memory, without the Python between them. Results have the same bits. On a CPU this does what a CUDA graph does on a
    GPU; on a GPU the plan is a CUDA graph.

    Use it as a decorator, or call it with the function::

        @record
        def step(positions):
            positions = positions.detach().requires_grad_()
            energy = ewald_summation(positions, charges, cell, alpha, **near).sum() + network(positions).sum()
            (gradient,) = torch.autograd.grad(energy, positions)
            return energy.detach(), -gradient

    Parameters
    ----------
    function : callable
        Its tensor arguments (also inside tuples, lists, dictionaries and dataclasses) may have other values in each
        call. All other arguments must be hashable, and each combination of them gets its own recording. The function
        may depend on other tensors (see below), but on nothing else that changes. It returns detached tensors, also
        inside such containers, and constants.
    changing : iterable of torch.Tensor, optional
        Tensors that ``function`` uses in addition to its arguments and whose values change in place between calls, such
        as weights that are trained.
    if_changed : {"record", "raise"}, optional
        What to do if any other tensor that the function uses has changed: record again, or raise a `RecordingError`.
    most_plans : int, optional
        How many recordings are kept, each with all of its memory.

    Returns
    -------
    callable
        The function, with two methods: ``explain()`` says how the last call ran and why, ``clear()`` deletes all
        recordings.

    Raises
    ------
    RecordingError
        In a call: the function reads values of tensors, has results whose shapes depend on values (such as a neighbor
        list that is built inside), draws random numbers, writes into tensors that existed before the call, sends
        messages to other processes that are not those of a `Domain` with ``check="later"`` or "never", or returns
        tensors with a graph.
    ValueError, TypeError
        A bad argument, named in the message.

    Notes
    -----
    The first replay with other values is checked against the function, once.

    Plans run only in plain eager mode: under compilers, function transforms, modes, autocast and anomaly detection the
    function is called directly. Beside a default device of torch so is what cannot be recorded, without an error, and
    the first call of each kind. On a GPU a graph is captured for each stream; tensors that are not arguments are used
    in place, with the values that they have at the replay. Kernels launched by ``wp.launch`` raise an error; kernels of
    this library and of operators are recorded. Python code runs only while the function is recorded, so numbers that it
    computes are constants. If energies are differentiated with weights that vary, gradients have the same values up to
    rounding, and so have results of ``torch.linalg.eigvalsh`` and ``svdvals``.
    """
    if function is not None and not callable(function):
        raise TypeError(f"`function` must be callable, got {type(function).__name__}")
    if if_changed not in ("record", "raise"):
        raise ValueError(f"`if_changed` must be 'record' or 'raise', got {if_changed!r}")
    if (most_plans := as_int("most_plans", most_plans)) < 1:
        raise ValueError(f"`most_plans` must be positive, got {most_plans}")
    if isinstance(changing, torch.Tensor):
        changing = (changing,)
    elif not isinstance(changing, Iterable):
        raise TypeError(f"`changing` must be tensors, got {type(changing).__name__}")
    tensors = tuple(changing)  # once: what `parameters()` of a module returns is used up then
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"`changing` must hold tensors, got {type(tensor).__name__}")
    if function is None:
        return functools.partial(record, changing=tensors, if_changed=if_changed, most_plans=most_plans)
    return Recorded(function, tensors, if_changed, most_plans)


_DEPENDENT = "arguments and other tensors of the function have gradients by the same tensors"

_LATER = "such calls could not be recorded before, which is why they are recorded again only later"

_MOST_WAITING = 1023
"""Ordinary calls before the next one is recorded: an ordinary call takes much less time than one that is recorded."""

_TOO_SMALL = "the plan has no room for these values, such as those of larger systems"

_NOT_NOW = "the plan is in use, or ranks agree after an error, or the call raises or goes another way for these values"
"""Why a plan is not replayed."""


def _replayed(plan: Plan, moving: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...] | None:
    """The results of a plan; None if the ordinary call must run."""
    if not moving or not plan.results:
        return plan(moving)
    return fairly(lambda *values: plan(values) or (), *moving) or None


def is_close(one: torch.Tensor, other: torch.Tensor, to_half: bool = False) -> bool:
    """Whether results are the same, up to the rounding of sums in another order; or to half of their digits.

    Differences are relative to the largest entry.
    """
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    if one.is_complex():
        one, other = torch.view_as_real(one.resolve_conj()), torch.view_as_real(other.resolve_conj())
    if not one.is_floating_point() or not one.numel():
        return torch.equal(one, other)
    scale = float(other.detach().abs().nan_to_num(0.0, 0.0, 0.0).max())
    eps = torch.finfo(one.dtype).eps
    return torch.allclose(one, other, rtol=0.0, atol=(eps**0.5 if to_half else 64 * eps) * scale, equal_nan=True)


def _leaves_of(tensors: Sequence[torch.Tensor]) -> set[int]:
    """Identities of the leaves by which these tensors have gradients."""
    return set(map(id, leaves_of(tensors)))
