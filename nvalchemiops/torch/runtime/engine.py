"""How a call runs: as a graph of operators, by a plan, or once; decided here for all operations.

An operation describes its call (`Call`): how to evaluate it, and what its results depend on. Then `run` takes one of
these ways:

- *graph*: operator by operator, differentiated by torch. Under compilers and transforms, on a GPU where there is no
  plan, and for tensors whose derivatives the engine does not know.
- *plan*: what an earlier call of the same kind did to memory, done again (`nvalchemiops.torch.runtime.plans`). For
  small systems, from the second call of a kind on; on a GPU it is a captured graph.
- *once*: the ordinary evaluation, with first derivatives along where energies will be differentiated.

Derivatives of any order are functions of the inputs and of incoming gradients, so each has plans, too. First
derivatives share most of their work with the energies: an operation that can give both at once does (`Call.along`), and
the backward pass of a plain sum of energies is a product.

`explain` says which way the last calls went, and why not by a plan.
"""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Hashable, Sequence
from types import MethodType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from nvalchemiops import notices
from nvalchemiops.layout import layout
from nvalchemiops.locks import Kept, set_within
from nvalchemiops.torch.runtime import graphs, plans
from nvalchemiops.torch.runtime._torch_internals import (
    has_function_modes,
    has_other_modes,
    has_saved_tensor_hooks,
    is_unobserved,
    no_view,
    version_of,
)
from nvalchemiops.torch.runtime.context import is_capturing, is_eager, is_mapped
from nvalchemiops.torch.runtime.openmp import fairly
from nvalchemiops.torch.runtime.recorder import OF_LENGTH, current_recorder

MOST_ATOMS = 2048
"""Atoms up to which calls become plans; larger ones take far longer than the Python around them."""

MOST_ATOMS_ON_GPU = 2**17
"""The same on a GPU, where a launch takes as long for many atoms as for few."""

MOST_BYTES, MOST_BYTES_ON_GPU = 2**28, 2**31
"""Memory of all plans of a table, on a CPU and on a GPU; those that ran longest ago go first."""

MOST_KINDS = 256
"""Kinds of calls that a table counts."""

PAID = 16
"""Calls after which a plan has saved the time that its recording took, which is that of several calls."""

SMALL = 256
"""Elements up to which the values of tensors are part of a key. Larger ones, of prepared data, are recognized by
themselves and then compared with the values that they had: NumPy and ``.data`` change them without a new version."""

Tensors = tuple[torch.Tensor, ...]

Method = TypeVar("Method", bound=Callable[..., Any])

Body = Callable[[Sequence[torch.Tensor] | None, Sequence[bool]], Tensors]
"""``body(inputs, needed)``: the results at ``inputs`` (None: at those that were checked), a graph of operators if
gradients are enabled; then the gradients of the sum of the first result by the inputs that are ``needed``."""


UNKNOWN = "it depends on what cannot be compared"


class Call(NamedTuple):
    """A call of an operation.

    Attributes
    ----------
    name : str
    prepare : callable
        ``prepare(inputs, near)`` checks the arguments and returns a `Body`.
    inputs : tuple of torch.Tensor
        By which results may be differentiated. The first ones are *moving*: their values differ in each call.
    n_moving : int
    near : named tuple or ()
        *Listed*: neighbors, of any length and at any address.
    systems : tuple
        *Fixed*: cells and systems of atoms, by value; callers make them anew.
    options : tuple or str
        *Fixed*: all else on which results depend; or why there is no plan.
    along : bool
        Whether the body gives gradients by all inputs.
    others : tuple
        What else holds tensors, which follow from those above.
    batch_idx : tensor, optional
        System of each atom, for weights of energies.
    n_systems : int
    by_system : bool
        Whether energies are those of systems.
    domain : Domain, optional
    end : callable, optional
        ``end(results, body)`` is what the call returns, in memory of its own: for what is outside of plans, since it
        reads results. Only for calls without derivatives.
    """

    name: str
    prepare: Callable[[Sequence[torch.Tensor], Any], Body]
    inputs: Tensors
    n_moving: int
    near: Any = ()
    systems: tuple[Any, ...] = ()
    options: tuple[Any, ...] | str = UNKNOWN
    along: bool = False
    others: tuple[Any, ...] = ()
    batch_idx: torch.Tensor | None = None
    n_systems: int = 1
    by_system: bool = False
    domain: Any = None
    end: Callable[[Tensors, Body], Tensors] | None = None


def run_function(
    name: str,
    function: Callable[..., Tensors],
    moving: dict[str, Any],
    listed: Any,
    fixed: dict[str, Any],
    options: tuple[Any, ...] | str,
) -> Tensors:
    """``function(listed, **moving, **fixed)``, by a plan where it repeats.

    Parameters
    ----------
    name : str
    function : callable
    moving : dict
        Tensors whose values differ in each call, ``positions`` first; numbers and None among them are fixed.
    listed : named tuple
        Neighbors.
    fixed : dict
        Cells, systems of atoms and their like, by value.
    options : tuple or str
        All else on which results depend; or why there is no plan.
    """
    if torch.compiler.is_compiling() or not isinstance(moving["positions"], torch.Tensor):
        return function(listed, **moving, **fixed)  # which raises without positions
    names = [key for key, value in moving.items() if isinstance(value, torch.Tensor)]
    n_moving = len(names)
    names += [key for key, value in fixed.items() if isinstance(value, torch.Tensor) and value.is_floating_point()]
    both = {**moving, **fixed}
    inputs = tuple([both[key] for key in names])

    def prepare(inputs: Sequence[torch.Tensor], near: Any) -> Body:
        def body(at: Sequence[torch.Tensor] | None, _: Sequence[bool]) -> Tensors:
            return function(near, **{**both, **dict(zip(names, inputs if at is None else at))})

        return body

    others = (" ".join(names), " ".join(both), *[value for key, value in both.items() if key not in names])
    return run(Call(name, prepare, inputs, n_moving, listed, others, options))


def run(call: Call) -> Tensors:
    """The results of a call."""
    if torch.compiler.is_compiling():
        return _graph(call)
    inputs = call.inputs
    if not is_eager(*inputs, under_modes=True):
        return _noted(call, "graph", "compilers, transforms or subclasses of tensors see the operations", _graph(call))
    reads = layout(inputs[0].device.type).reads
    with_gradients = torch.is_grad_enabled()
    tracked = with_gradients and any([t.requires_grad for t in inputs])
    kind = _kind_of(call, tracked)
    others: list[torch.Tensor] = []
    if with_gradients:
        if isinstance(kind, str):
            others = _tensors_in((call.near, call.systems, call.options, call.others))
        else:
            others = [*kind.used, *kind.copied, *kind.small[len(inputs) - kind.n_copied :], *kind.large]
            others += _tensors_in(call.others)
        if any([t.requires_grad for t in others]):
            return _noted(
                call, "graph", "gradients are asked for by what is fixed", _here(call, call.prepare(inputs, call.near))
            )
    if not tracked:
        found = _planned(call, kind, (), (), inputs)
        return _here(call, call.prepare(inputs, call.near)) if found is None else found
    by = tuple([t.requires_grad for t in inputs])
    needed, body = by if call.along else (), None
    results_by: tuple[bool, ...] | None = None  # which results these inputs have gradients of
    if not call.along and not isinstance(kind, str):
        results_by = kind.table.tracked.get((kind.key, by))
    found = None if results_by is None and not call.along else _planned(call, kind, (), needed, inputs)
    if found is None:
        body = call.prepare(inputs, call.near)
        if not call.along or not reads:
            results = _here(call, body)
            if not isinstance(kind, str) and not call.along:
                kind.table.tracked.keep((kind.key, by), tuple([t.requires_grad for t in results]))
            return results
        with torch.no_grad():
            found = tuple(map(no_view, fairly(lambda *at: body(at, needed), *inputs)))
    n_results = len(found) - sum(needed)
    first = dict(zip([k for k, is_needed in enumerate(needed) if is_needed], found[n_results:]))
    state = _State(call, kind, (), body, results_by or (True,) * n_results)
    tracked_results: Tensors = _Differentiable.apply(state, first, found[:n_results], *inputs, *others)
    return tracked_results


def _graph(call: Call) -> Tensors:
    return _ended(call, call.prepare(call.inputs, call.near), None)


def _here(call: Call, body: Body) -> Tensors:
    results: Tensors = fairly(lambda *at: _ended(call, body, at), *call.inputs)
    return results


def _ended(call: Call, body: Body, at: Sequence[torch.Tensor] | None) -> Tensors:
    results = body(at, ())
    return results if call.end is None else call.end(results, body)


def _tensors_in(values: Sequence[Any]) -> list[torch.Tensor]:
    """All tensors in nested tuples."""
    waiting, found = list(values), []
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, tuple):
            waiting.extend(value)
    return found


# -- derivatives ----------------------------------------------------------------------------------

Levels = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""A derivative: for each order, of which results gradients come in, and by which tensors gradients are wanted.

The tensors of an order are the inputs and the incoming gradients of all lower orders."""


def _value(body: Body, levels: Levels, needed: Sequence[bool], tensors: Sequence[torch.Tensor]) -> Any:
    """A derivative of an operation, from its inputs and incoming gradients; a graph if gradients are enabled."""
    if not levels:
        return body(tensors, needed)
    *lower, (given, wanted) = levels
    count = len(tensors) - len(given)
    higher = torch.is_grad_enabled()
    with torch.enable_grad():
        # views, so that the derivative by one input does not go on to another that it depends on
        points = [t.view_as(t) if higher else t.detach() for t in tensors[:count]]
        for k in wanted:
            if not points[k].requires_grad:
                points[k].requires_grad_()
        results = _value(body, tuple(lower), (), points)
        both = [(results[k], g) for k, g in zip(given, tensors[count:]) if results[k].requires_grad]
        if not both:
            return tuple([None] * len(wanted))
        outputs, weights = zip(*both)
        asked = [points[k] for k in wanted]
        return torch.autograd.grad(outputs, asked, weights, create_graph=higher, allow_unused=True)


def full(body: Body, levels: Levels, needed: Sequence[bool], tensors: Sequence[torch.Tensor]) -> Tensors:
    """`_value` with zeros in the place of None."""
    found = _value(body, levels, needed, tensors)
    if levels:
        return tuple([torch.zeros_like(tensors[k]) if g is None else g for k, g in zip(levels[-1][1], found)])
    return found


class _State(NamedTuple):
    """What a backward pass needs beside tensors: ``body`` if it was made, and which results are ``tracked``."""

    call: Call
    kind: "_Kind | str"
    levels: Levels
    body: Body | None
    tracked: tuple[bool, ...]

    def made(self) -> Body:
        return self.call.prepare(self.call.inputs, self.call.near) if self.body is None else self.body


class _Differentiable(torch.autograd.Function):
    """Results whose derivatives are those of a call; for eager mode, never seen by compilers or transforms."""

    @staticmethod
    def forward(ctx: Any, state: _State, first: Any, results: Tensors, *tensors: torch.Tensor) -> Any:
        ctx.state, ctx.first = state, first
        # all tensors on which the call depends, so that torch notices if they change before the backward pass
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[t for t, is_tracked in zip(results, state.tracked) if not is_tracked])
        return results

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor | None) -> Any:
        call, kind, levels, *_ = state = ctx.state
        count = len(call.inputs) + sum([len(given) for given, _ in levels])
        saved = ctx.saved_tensors
        tensors, rest = saved[:count], (None,) * (len(saved) - count)
        needed = ctx.needs_input_grad[3 : 3 + count]
        given = tuple([k for k, g in enumerate(incoming) if g is not None])
        if not given:
            return (None,) * (3 + count) + rest
        higher = torch.is_grad_enabled()
        if ctx.first and given == (0,) and not higher:
            weights = weights_of_systems(incoming[0], call.by_system, call.batch_idx, call.n_systems)
            if call.domain is not None:
                weights = call.domain._agreed(weights, call.batch_idx)
            if weights is not None:
                return (None,) * 3 + _products(ctx.first, weights, tensors, needed, call) + rest
        wanted = tuple([k for k, is_needed in enumerate(needed) if is_needed])
        next_levels: Levels = (*levels, (given, wanted))
        points = (*tensors, *[g for g in incoming if g is not None])
        found: Any = _planned(call, _kind_here(kind, points[count:]), next_levels, (), points)
        if found is None:
            found = _value(state.made(), next_levels, (), points)
        elif higher:
            state = state._replace(levels=next_levels, tracked=(True,) * len(wanted))
            found = _Differentiable.apply(state, None, found, *points, *saved[count:])
        by = dict(zip(wanted, found))
        return (None,) * 3 + tuple([by.get(k) for k in range(count)]) + rest


def weights_of_systems(
    gradient: torch.Tensor | None, by_system: bool, batch_idx: torch.Tensor | None, n_systems: int
) -> torch.Tensor | None:
    """The weight (n_systems,) of each system, if all its atoms and channels have the same; otherwise None.

    Of a gradient by energies (n_atoms, ...), or ``by_system`` (n_systems, ...).
    """
    if gradient is None or gradient.numel() == 0 or is_mapped(gradient):
        return None
    first = gradient.reshape(-1)[0]
    is_one = all([step == 0 or size == 1 for step, size in zip(gradient.stride(), gradient.shape)])
    if is_one or not layout(gradient.device.type).reads:
        return first.to(torch.float64).expand(n_systems) if is_one else None
    if (recorder := current_recorder()) is not None and recorder.varies(gradient):
        return None
    one_channel = gradient if gradient.ndim == 1 else gradient[:, 0]
    if gradient.ndim > 1 and not bool((gradient == one_channel.unsqueeze(1)).all()):
        return None
    if by_system:
        return one_channel.to(torch.float64)
    if batch_idx is None:
        return first.to(torch.float64).expand(n_systems) if bool((one_channel == first).all()) else None
    of_system = one_channel.new_zeros(n_systems).scatter(0, batch_idx.long(), one_channel)
    same = bool((of_system.index_select(0, batch_idx) == one_channel).all())
    return of_system.to(torch.float64) if same else None


def _products(
    first: dict[int, torch.Tensor],
    weights: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    needed: Sequence[bool],
    call: Call,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients by inputs, from those of the sum of energies and the weights of systems."""
    of_atoms = weights if call.batch_idx is None else weights.index_select(0, call.batch_idx)
    found: list[torch.Tensor | None] = []
    for k, is_needed in enumerate(needed):
        if not is_needed:
            found.append(None)
        elif k < call.n_moving:
            gradient = first[k]
            factor = of_atoms.to(gradient.dtype)
            found.append(gradient * factor.reshape(-1, *(1,) * (gradient.ndim - 1)))
        else:  # of cells
            found.append((first[k] * weights[:, None, None]).reshape(inputs[k].shape).to(inputs[k].dtype))
    return tuple(found)


def first_derivatives(result: torch.Tensor, by: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """Gradients of the sum of ``result``, the first of a call, by these inputs, where they came with it."""
    first = getattr(result.grad_fn, "first", None)
    if not first:
        return None
    inputs = result.grad_fn.state.call.inputs  # type: ignore[union-attr]  # of `_Differentiable`
    numbers = [[k for k in first if inputs[k] is t] for t in by]
    return [first[k].reshape(t.shape).to(t.dtype) for t, (k,) in zip(by, numbers)] if all(numbers) else None


# -- plans ----------------------------------------------------------------------------------------


class _Kind(NamedTuple):
    """What tells calls apart whose results differ by the values of moving tensors and lists alone.

    Lists are ``used`` by kernels, or ``copied``, if other operations read them. On a GPU, ``place``, all of the inputs
    are copied, as many as ``n_copied``; on a CPU those that are moving, since values of the others are read.
    """

    key: Hashable
    place: tuple[torch.device, int] | None
    n_copied: int
    used: list[torch.Tensor]
    copied: list[torch.Tensor]
    length: int
    small: list[torch.Tensor]
    large: list[torch.Tensor]
    contents: list[bytes]  # of the small ones
    table: "Plans"


class _Entry:
    """The plan of a kind of calls, or why there is none."""

    def __init__(
        self, plan: plans.Plan | None, reason: str, prepared: Sequence[torch.Tensor], body: Body | None
    ) -> None:
        self.plan, self.reason = plan, reason
        self.body: Any = body  # which the end of the call uses
        self.prepared = prepared  # kept, so that no other tensor gets their identity
        # a graph uses them where they are, with the values that they have then
        self.compared = [t for t in prepared if layout(t.device.type).reads]
        self.values = [t.detach().clone() for t in self.compared]
        self.n_bytes = 0
        self.is_graph = plan is not None and plan.is_graph
        if plan is not None:
            beside = [t.untyped_storage().nbytes() for t in (*prepared, *self.values, *plan.external)]
            self.n_bytes = plan.n_bytes + sum(beside)

    def is_as_recorded(self) -> bool:
        """Whether prepared data have the values that they had when the plan was made."""
        return all(map(torch.equal, self.compared, self.values))


class Plans:
    """Plans of calls, up to a limit of memory.

    Recordings are bought with credit, which replays earn: where plans are soon given up, as when each cell is there for
    a few calls, only a call that is repeated often is recorded, and time is never lost for long.

    Parameters
    ----------
    most_bytes, most_bytes_on_gpu : int, optional
    """

    def __init__(self, most_bytes: int = MOST_BYTES, most_bytes_on_gpu: int = MOST_BYTES_ON_GPU) -> None:
        self.most_bytes, self.most_bytes_on_gpu = most_bytes, most_bytes_on_gpu
        self.entries: Kept[_Entry] = Kept(MOST_KINDS)
        self.counts: dict[Hashable, int] = {}
        self.tracked: Kept[tuple[bool, ...]] = Kept(MOST_KINDS)
        """By kinds of calls and inputs that require gradients: which results do."""
        self.credit = 8 * PAID
        self.recorded = self.replayed = 0

    def is_due(self, key: Hashable) -> bool:
        """Whether a call of this kind, which has no plan, is to be recorded; counts it."""
        count = self.counts.pop(key, 0) + 1
        if count == 1 or (count < PAID and self.credit < PAID):
            if len(self.counts) >= MOST_KINDS:
                self.counts.clear()
            self.counts[key] = count
            return False
        self.credit = max(self.credit - PAID, 0)
        return True

    def keep(self, key: Hashable, entry: _Entry) -> None:
        """Keep the plan of a call."""
        self.entries.keep(key, entry)
        self.recorded += entry.plan is not None
        self.fit()

    def fit(self) -> None:
        """Forget plans until they have no more memory than they may."""
        most = {False: self.most_bytes, True: self.most_bytes_on_gpu}
        while len(self.entries) > 1 and any([self.n_bytes(on_gpu) > limit for on_gpu, limit in most.items()]):
            self.entries.drop(1)

    def n_bytes(self, on_gpu: bool) -> int:
        """Memory of all plans, on a GPU or elsewhere."""
        return sum([entry.n_bytes for entry in list(self.entries.values()) if entry.is_graph is on_gpu])

    def clear(self) -> None:
        """Forget all plans."""
        self.entries.clear()
        self.counts.clear()
        self.tracked.clear()
        self.credit = 8 * PAID

    def __reduce__(self) -> Any:
        return Plans, (self.most_bytes, self.most_bytes_on_gpu)


everywhere = Plans()
"""Of functions; modules have their own."""

enabled = os.environ.get("NVALCHEMIOPS_PLANS", "1") != "0"
"""Whether there are plans, in all threads."""


class _OfThread(threading.local):
    """Plans of calls of this thread."""

    table: Plans | None = None
    is_off = False


_thread = _OfThread()


def kept_in(table: Plans) -> contextlib.AbstractContextManager[None]:
    """Inside, plans of calls of this thread are those of ``table``, and of derivatives of these calls."""
    return set_within(_thread, "table", table)


def with_own_plans(method: Method) -> Method:
    """A method that is called by users, of an object whose plans go with it. A decorator."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return method(self, *args, **kwargs)
        table = self.__dict__.get(OWN)
        if table is None:
            table = self.__dict__[OWN] = Plans()
        with kept_in(table):
            return method(self, *args, **kwargs)

    return call  # type: ignore[return-value]  # it is called like the method


OWN = "_plans"
"""The attribute of an object with its plans."""


def off() -> contextlib.AbstractContextManager[None]:
    """Inside, calls of this thread have no plans."""
    return set_within(_thread, "is_off", True)


def _kind_of(call: Call, tracked: bool) -> _Kind | str:
    """The kind of a call, or why it has no plan."""
    inputs, near = call.inputs, call.near
    n_atoms = inputs[0].shape[0] if inputs[0].ndim else 0
    if not enabled or _thread.is_off:
        return "plans are switched off"
    if isinstance(call.options, str):
        return call.options
    device = inputs[0].device
    how = layout(device.type)
    place = None if how.reads else graphs.place_of(device)
    most = MOST_ATOMS if place is None else MOST_ATOMS_ON_GPU
    if not 0 < n_atoms <= most:
        return f"there are more than {most} atoms" if n_atoms else "there are no atoms"
    if current_recorder() is not None or is_capturing():
        return "it is part of a recording"
    if has_function_modes() or has_other_modes():
        return "a mode, such as a default device, sees the operations"
    listed = [value for value in near if isinstance(value, torch.Tensor)]
    tensors = (*inputs, *listed)
    if not is_unobserved(*tensors):
        return "autocast, a profiler or a tensor of another kind sees the operations"
    if any([t.device != device for t in tensors]):
        return "tensors are on several devices"
    if place is not None and (obstacle := graphs.obstacle(device)):
        return obstacle
    if tracked and has_saved_tensor_hooks():  # checkpoints count what is saved, which is not the same with a plan
        return "hooks see the tensors that are saved for the backward pass"
    length, is_used = _length(near, listed, n_atoms, how.reads)
    n_copied = call.n_moving if place is None else len(inputs)
    key: list[Hashable] = [call.name, how, place]
    small: list[torch.Tensor] = []
    large: list[torch.Tensor] = []
    contents: list[bytes] = []
    for t in inputs[:n_copied]:
        key += (t.shape, t.dtype, t.stride())
    for t in listed:
        if length and length in (shape := t.shape):  # types and strides are known then
            key.append(tuple([-1 if size == length else size for size in shape]))
        else:
            key += (t.shape, t.dtype, t.stride())
    others = tuple([None if isinstance(value, torch.Tensor) else value for value in near])
    try:
        _add_fixed((*inputs[n_copied:], *call.systems), key, small, large, contents, 9 * MOST_ATOMS)
        _add_fixed((*others, *call.options), key, small, large, contents, SMALL)
    except _Unknown as reason:
        return str(reason)
    if len(small) + len(large) > len(inputs) - n_copied and not is_unobserved(*small, *large):
        return "a tensor of another kind is part of what is fixed"
    used, copied = (listed, []) if is_used or place is not None else ([], listed)
    table = _thread.table or everywhere
    return _Kind(tuple(key), place, n_copied, used, copied, length, small, large, contents, table)


def _kind_here(kind: _Kind | str, incoming: Sequence[torch.Tensor]) -> _Kind | str:
    """The kind of a call for a derivative of it, with these incoming gradients; or why that has no plan."""
    if isinstance(kind, str):
        return kind
    if current_recorder() is not None:
        return "it is part of a recording"
    if has_function_modes() or not is_eager(*incoming) or not is_unobserved(*incoming) or has_saved_tensor_hooks():
        return "transforms, modes or hooks see the backward pass"
    here = None if kind.place is None else kind.place[0]
    for t in incoming:
        if t.layout is not torch.strided or (t.device != here if here else not layout(t.device.type).reads):
            return "an incoming gradient is of another layout or elsewhere"
    if here and (graphs.place_of(here) != kind.place or is_capturing()):
        return "the backward pass is on another stream, or part of a recording"
    if kind.contents != [_bytes_of(t) for t in kind.small]:
        return "what is fixed has changed since the call"
    return kind


def _planned(
    call: Call, kind: _Kind | str, levels: Levels, needed: Sequence[bool], tensors: Sequence[torch.Tensor]
) -> Tensors | None:
    """`full` by a plan, which is recorded if it is due; None if there is none. ``tensors`` as for `_value`."""
    if isinstance(kind, str):
        return _noted(call, "once", kind, None)
    n_moving, n_inputs = kind.n_copied, len(call.inputs)
    moving = (*tensors[:n_moving], *tensors[n_inputs:], *kind.copied)
    table = kind.table
    key = (kind.key, levels, needed, *map(_form, tensors[n_inputs:]))
    entry = table.entries.find(key)
    if entry is not None and entry.plan is not None and not entry.plan.takes(kind.length):
        table.entries.pop(key, None)
        entry = None
    if entry is not None:
        plan = entry.plan
        if plan is None:
            return _noted(call, "once", entry.reason, None)
        if entry.is_as_recorded():
            end = call.end and functools.partial(call.end, body=entry.body)
            found = fairly(lambda *moving: plan(moving, kind.used, kind.length, end) or (), *moving)
            if not found:
                return _noted(call, "once", "the plan is in use, or the ordinary call raises", None)
            table.replayed += 1
            table.credit = min(table.credit + 1, 8 * PAID)
            return _noted(call, "plan", "replayed", found)
        table.entries.pop(key, None)
    if not table.is_due(key):
        return _noted(call, "once", "calls are recorded when they come again", None)
    graph = None if kind.place is None else graphs.Graph(kind.place[0])
    lists = kind.copied if graph is None else kind.used  # in memory of the plan
    body: Any = None

    def function(memory: Sequence[torch.Tensor]) -> Tensors:
        nonlocal body
        constants = [t.detach().clone() for t in tensors[n_moving:n_inputs]]
        here = [*memory[:n_moving], *constants, *memory[n_moving : len(memory) - len(lists)]]
        near, waiting = call.near, iter(memory[len(memory) - len(lists) :])
        if lists:
            near = type(near)(*[next(waiting) if isinstance(value, torch.Tensor) else value for value in near])
        body = call.prepare(here[:n_inputs], near)
        return full(body, levels, needed, here)

    if graph is None and plans.share_memory(kind.used, [*kind.small, *kind.large]):
        return _noted(call, "once", "lists and prepared data share memory", None)
    detached = [t.detach() for t in moving]
    with notices.unsaid() if levels else contextlib.nullcontext():  # the call has warned
        made, found, reason = plans.record(
            function, detached, kind.used, kind.small, kind.length, raises=not levels, graph=graph
        )
    if found is not None and call.end is not None:
        found = call.end(found, body)  # before others may use the plan, and its memory
    if found is not None and not reason.startswith(OF_LENGTH):  # otherwise it is a matter of this call
        table.keep(key, _Entry(made, reason, kind.large if made else [], body if made and call.end else None))
    return _noted(call, "plan" if made else "once", "recorded" if made else reason, found)


def _length(near: Any, listed: Sequence[torch.Tensor], n_atoms: int, reads: bool) -> tuple[int, bool]:
    """Pairs of a list with pointers, of which a plan may have any number; 0 for a matrix, or where shapes are fixed.

    And whether kernels alone read the lists.
    """
    if not near:
        return 0, True
    of_pairs, of_pointers, of_half = _places(type(near))
    if of_half is not None and near[of_half] is not False:
        return 0, False
    pairs, pointers = near[of_pairs], near[of_pointers]
    is_list = isinstance(pairs, torch.Tensor) and isinstance(pointers, torch.Tensor) and pairs.ndim in (1, 2)
    length = pairs.shape[-1] if is_list else 0
    # an axis of another meaning is never so long; and where lists are used as they are, they must be contiguous
    if length > max(n_atoms + 1, 3) and all(
        [t.dtype is torch.int32 and (not reads or t.is_contiguous()) for t in listed]
    ):
        return length, True
    return 0, of_half is None or pairs is None


@functools.cache
def _places(kind: Any) -> tuple[int, int, int | None]:
    """Of pairs, pointers, and whether the list is half of one, among the entries of this kind of neighbors."""
    names = kind._fields
    if "half_list" in names:
        return names.index("neighbor_list"), names.index("neighbor_ptr"), names.index("half_list")
    return names.index("neighbors"), names.index("pointers"), None


def _form(t: torch.Tensor) -> Hashable:
    """What tells two calls apart whose results differ by the values of this tensor alone."""
    return t.shape, t.dtype, t.stride()


class _Unknown(Exception):
    """A value that cannot be compared."""


def _add_fixed(
    values: tuple[Any, ...],
    key: list[Hashable],
    small: list[torch.Tensor],
    large: list[torch.Tensor],
    contents: list[bytes],
    most: int,
) -> None:
    """Add what tells ``values`` apart to ``key``.

    Tensors among them are added to ``small`` if their values are part of it, which have up to ``most`` elements, with
    their ``contents``, and to ``large`` if they are recognized by themselves.
    """
    for value in values:
        kind = type(value)
        if kind in _IMMUTABLE:  # most are
            key += (kind, value if value or kind is not float else str(value))  # zero and minus zero are equal
        elif isinstance(value, torch.Tensor):
            if value.layout is not torch.strided:
                raise _Unknown(f"a tensor has the layout {value.layout}")
            if not layout(value.device.type).reads:
                large.append(value)
                key += (id(value), value.data_ptr(), value.dtype, value.shape, value.stride())
            elif value.numel() <= most:
                small.append(value)
                contents.append(_bytes_of(value))
                key += (value.dtype, value.shape, contents[-1])
            else:
                large.append(value)
                place = (id(value), version_of(value), value.data_ptr())
                key += (*place, value.dtype, value.shape, value.stride())
        elif isinstance(value, tuple):
            key += (kind, len(value))
            _add_fixed(value, key, small, large, contents, most)
        elif isinstance(value, np.generic):
            key += (kind, value.tobytes())
        else:
            raise _Unknown(f"an argument is a {kind.__name__}, which may change")


def _bytes_of(tensor: torch.Tensor) -> bytes:
    try:
        return (tensor.detach() if tensor.requires_grad else tensor).numpy().tobytes()
    except (TypeError, RuntimeError) as error:
        raise _Unknown(f"values of a tensor cannot be read: {error}") from None


_IMMUTABLE = {type(None), bool, int, float, str, torch.dtype, MethodType}
"""Types whose objects do not change. Others may convert to another number in each call."""


def immutable(kind: type) -> type:
    """A type whose objects do not change, hold no tensors, and are equal if they mean the same. A decorator."""
    _IMMUTABLE.add(kind)
    return kind


# -- which way was taken --------------------------------------------------------------------------

_last: dict[str, tuple[str, str]] = {}


def _noted(call: Call, way: str, reason: str, results: Any) -> Any:
    _last[call.name] = way, reason
    return results


def explain(owner: Any = None) -> str:
    """Which way the last call of each operation went and why, and what is kept.

    Parameters
    ----------
    owner : object, optional
        A module or potential, whose plans are counted; by default those of functions.
    """
    table: Plans = everywhere if owner is None else vars(owner).get(OWN, Plans())
    lines = [f"{name}: {way} ({reason})" for name, (way, reason) in list(_last.items())]
    refused = {entry.reason for entry in list(table.entries.values()) if entry.plan is None}
    lines += [f"not recorded: {reason}" for reason in sorted(refused)]
    counts = f"recorded {table.recorded} times, replayed {table.replayed} times"
    n_bytes = table.n_bytes(False) + table.n_bytes(True)
    return "\n".join([*lines, f"plans: {len(table.entries)}, {n_bytes / 2**20:.1f} MiB, {counts}"])
