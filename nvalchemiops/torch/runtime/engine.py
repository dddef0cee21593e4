"""The engine decides for all operations how a call runs: as a graph of operators, with a plan, or once.

An operation describes its call (`Call`): how to evaluate it, and what its results depend on. `run` then takes one of
three ways:

- *graph*: operator by operator, differentiated by torch. Used under compilers and transforms, on a GPU without a plan,
  and for gradients with respect to tensors other than the inputs.
- *plan*: the recorded steps of an earlier call of the same kind are replayed (`nvalchemiops.torch.runtime.plans`). Used
  for up to `calls.MOST_ATOMS` atoms, from the second call of a kind on. On a GPU a plan is a captured graph.
- *once*: the normal evaluation. If energies will be differentiated, first derivatives are computed together with them.

Derivatives of any order are functions of the inputs and of incoming gradients, so they have plans, too. First
derivatives share most of their work with the energies, so operations that can compute both at once do so
(`Call.along`). The backward pass of a plain sum of energies is then a product.

`explain` says how the last calls ran, and why they had no plan.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from nvalchemiops import notices
from nvalchemiops.layout import layout
from nvalchemiops.torch.runtime import graphs, plans, tables
from nvalchemiops.torch.runtime._torch_internals import no_view
from nvalchemiops.torch.runtime.calls import LONG_LISTS, PARTS, Body, Call, Kind, Tensors, form_of, kind_here, kind_of
from nvalchemiops.torch.runtime.calls import UNKNOWN as UNKNOWN
from nvalchemiops.torch.runtime.calls import immutable as immutable
from nvalchemiops.torch.runtime.context import is_eager, is_mapped
from nvalchemiops.torch.runtime.openmp import fairly
from nvalchemiops.torch.runtime.recorder import OF_LENGTH, differ_in_replays
from nvalchemiops.torch.runtime.tables import off as off
from nvalchemiops.torch.runtime.tables import with_own_plans as with_own_plans


def run_function(
    name: str,
    function: Callable[..., Tensors],
    moving: dict[str, Any],
    listed: Any,
    fixed: dict[str, Any],
    options: tuple[Any, ...] | str,
) -> Tensors:
    """Return ``function(listed, **moving, **fixed)``, with a plan if the call repeats.

    ``moving`` are tensors whose values differ in each call, ``positions`` first; numbers and None among them are fixed.
    ``listed`` are neighbors, a named tuple. ``fixed`` are cells, system indices and similar arguments, which are
    compared by value. ``options`` are all other values on which results depend; or the reason why the call has no plan.
    """
    if torch.compiler.is_compiling() or not isinstance(moving["positions"], torch.Tensor):
        return function(listed, **moving, **fixed)  # it raises without positions
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
    """Run a call in the way that suits it, and return its results."""
    if torch.compiler.is_compiling():
        return _graph(call)
    inputs = call.inputs
    if not is_eager(*inputs, under_modes=True):
        return _noted(call, "graph", "compilers, transforms or subclasses of tensors see the operations", _graph(call))
    with_gradients = torch.is_grad_enabled()
    tracked = with_gradients and any([t.requires_grad for t in inputs])
    kind = kind_of(call, tracked)
    if call.op is not None and (isinstance(kind, str) or (kind.place is not None and call.waits)):
        return call.op()
    others: list[torch.Tensor] = []
    if with_gradients:
        if isinstance(kind, str):
            others = _tensors_in((call.near, call.systems, call.options, call.others))
        else:
            others = [*kind.used, *kind.copied, *kind.small[kind.n_small :], *kind.large]
            others += _tensors_in(call.others)
        if any([t.requires_grad for t in others]):
            return _noted(
                call, "graph", "a fixed argument requires a gradient", _here(call, call.prepare(inputs, call.near))
            )
    if tracked:
        return _tracked(call, kind, others)
    found = _planned(call, kind, (), (), inputs)
    return _here(call, call.prepare(inputs, call.near)) if found is None else found


def _tracked(call: Call, kind: Kind | str, others: Sequence[torch.Tensor]) -> Tensors:
    """The results of a call whose inputs require gradients; ``others`` are further tensors on which it depends."""
    inputs = call.inputs
    by = tuple([t.requires_grad for t in inputs])
    needed, body = by if call.along else (), None
    results_by: tuple[bool, ...] | None = None  # which results depend on inputs that require gradients
    if not call.along and not isinstance(kind, str):
        results_by = kind.table.tracked.get((kind.key, by))
    found = None if results_by is None and not call.along else _planned(call, kind, (), needed, inputs)
    if found is None:
        body = call.prepare(inputs, call.near)
        if not call.along or not layout(inputs[0].device.type).reads:
            results = _here(call, body)
            if not isinstance(kind, str) and not call.along:
                kind.table.tracked.keep((kind.key, by), tuple([t.requires_grad for t in results]))
            return results
        with torch.no_grad():
            found = tuple(map(no_view, fairly(lambda *at: body(at, needed), *inputs)))
    n_results = len(found) - sum(needed)
    first = dict(zip([k for k, is_needed in enumerate(needed) if is_needed], found[n_results:]))
    state = _State(call, kind, (), body, results_by or (True,) * n_results)
    results = _Differentiable.apply(state, first, found[:n_results], *inputs, *others)
    return results


def _graph(call: Call) -> Tensors:
    if call.op is not None:
        return call.op()
    body = call.prepare(call.inputs, call.near)
    return _finished(call, body, body(None, ()))


def _here(call: Call, body: Body) -> Tensors:
    results: Tensors = fairly(lambda *at: _finished(call, body, body(at, ())), *call.inputs)
    return results


def _finished(call: Call, body: Body, results: Tensors) -> Tensors:
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
"""A derivative: for each order, the results with incoming gradients, and the tensors whose gradients are requested.

The tensors of an order are the inputs and the incoming gradients of all lower orders."""


def _value(body: Body, levels: Levels, needed: Sequence[bool], tensors: Sequence[torch.Tensor]) -> Any:
    """A derivative of an operation, from its inputs and incoming gradients; with a graph if gradients are enabled."""
    if not levels:
        return body(tensors, needed)
    *lower, (given, wanted) = levels
    count = len(tensors) - len(given)
    higher = torch.is_grad_enabled()
    with torch.enable_grad():
        # views, so that the gradient of one input does not flow into another input on which it depends
        points = [t.view_as(t) if higher else t.detach() for t in tensors[:count]]
        for k in wanted:
            if not points[k].requires_grad:
                points[k].requires_grad_()
        results = _value(body, tuple(lower), (), points)
        # a derivative of lower order is None where it is zero for all values
        some = [(results[k], g) for k, g in zip(given, tensors[count:]) if results[k] is not None]
        both = [(result, g) for result, g in some if result.requires_grad]
        if not both:
            return tuple([None] * len(wanted))
        outputs, weights = zip(*both)
        asked = [points[k] for k in wanted]
        return torch.autograd.grad(outputs, asked, weights, create_graph=higher, allow_unused=True)


def full(body: Body, levels: Levels, needed: Sequence[bool], tensors: Sequence[torch.Tensor]) -> Tensors:
    """`_value` with zeros in place of None."""
    found = _value(body, levels, needed, tensors)
    if levels:
        return tuple([torch.zeros_like(tensors[k]) if g is None else g for k, g in zip(levels[-1][1], found)])
    return found


class _State(NamedTuple):
    """What a backward pass needs besides tensors.

    ``body`` is None if it has not been made yet; ``tracked`` says which results are differentiable.
    """

    call: Call
    kind: Kind | str
    levels: Levels
    body: Body | None
    tracked: tuple[bool, ...]

    def made(self) -> Body:
        return self.call.prepare(self.call.inputs, self.call.near) if self.body is None else self.body


class _Differentiable(torch.autograd.Function):
    """Connects results to the derivatives of their call. Eager mode only: compilers and transforms never see it."""

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
        found: Any = _planned(call, kind_here(kind, points[count:]), next_levels, (), points)
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
    """The weight (n_systems,) of each system, if all its atoms and channels have the same weight; otherwise None.

    ``gradient`` is the incoming gradient of the energies of atoms (n_atoms, ...), or with ``by_system`` of the energies
    of systems (n_systems, ...).
    """
    if gradient is None or gradient.numel() == 0 or is_mapped(gradient):
        return None
    first = gradient.reshape(-1)[0]
    is_one = all([step == 0 or size == 1 for step, size in zip(gradient.stride(), gradient.shape)])
    if is_one or not layout(gradient.device.type).reads:
        return first.to(torch.float64).expand(n_systems) if is_one else None
    if differ_in_replays(gradient) or (batch_idx is not None and not by_system and differ_in_replays(batch_idx)):
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
    """Gradients of the inputs: the gradients of the sum of energies, multiplied by the weights of systems."""
    of_atoms = weights if call.batch_idx is None else weights.index_select(0, call.batch_idx)
    found: list[torch.Tensor | None] = []
    for k, is_needed in enumerate(needed):
        if not is_needed:
            found.append(None)
        elif k < len(call.inputs) - 1:
            gradient = first[k]
            factor = of_atoms.to(gradient.dtype)
            found.append(gradient * factor.reshape(-1, *(1,) * (gradient.ndim - 1)))
        else:  # of the cells
            found.append((first[k] * weights[:, None, None]).reshape(inputs[k].shape).to(inputs[k].dtype))
    return tuple(found)


def first_derivatives(result: torch.Tensor, by: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """Gradients (with respect to ``by``) of the sum of a call's first result; None if not computed together with it."""
    first = getattr(result.grad_fn, "first", None)
    if not first:
        return None
    inputs = result.grad_fn.state.call.inputs  # type: ignore[union-attr]  # of `_Differentiable`
    numbers = [[k for k in first if inputs[k] is t] for t in by]
    if not all(numbers):
        return None
    found = [(first[k], t) for t, (k,) in zip(by, numbers)]
    return [g if g.shape == t.shape and g.dtype is t.dtype else g.reshape(t.shape).to(t.dtype) for g, t in found]


# -- plans ----------------------------------------------------------------------------------------


def _planned(
    call: Call, kind: Kind | str, levels: Levels, needed: Sequence[bool], tensors: Sequence[torch.Tensor]
) -> Tensors | None:
    """Run `full` with a plan, which may be recorded first; None if there is no plan. For ``tensors`` see `_value`.

    A value of the cells, or chosen parameters, that have no plan of their own share one with other values. Such a plan
    computes in each replay what depends on the cells, or on the parameters alone. In the same way, long lists on a GPU
    that have not been at their addresses before share a plan with others, which copies them.
    """
    if isinstance(kind, str):
        return _noted(call, "once", kind, None)
    if kind.place is not None and (n_bytes := sum([t.nbytes for t in kind.used])) >= LONG_LISTS:
        found = _planned(call, kind.with_lists_in_place(), levels, needed, tensors)
        if found is not None or 2 * n_bytes > graphs.most_bytes(kind.place[0]):
            return found
    n_moving, n_inputs = kind.n_copied, len(call.inputs)
    moving = (*tensors[:n_moving], *tensors[n_inputs:], *kind.copied)
    table = kind.table
    key = (kind.key, levels, needed, *map(form_of, tensors[n_inputs:]))
    last = call.name, bool(kind.in_place)
    before = _keys.get(last, kind.key)
    _keys[last] = kind.key
    entry = table.entries.find(key)
    if entry is not None and entry.plan is not None and not entry.plan.takes(kind.length):
        table.entries.pop(key, None)
        entry = None
    if entry is not None:
        plan = entry.plan
        if plan is None:
            return _noted(call, "once", entry.reason, None)
        if entry.is_as_recorded():
            end = None if call.end is None else functools.partial(_finished, call, entry.body)
            _noted(call, "plan", "replayed", None)
            here = kind.with_lists_of_any_length()
            found = fairly(lambda *moving: plan(moving, here.used, here.length, end) or (), *moving)
            if not found:
                if plan.is_exceeded:  # the next one will be for larger values
                    table.entries.pop(key, None)
                return _noted(call, "once", "the plan is in use or too small, or the normal call raises", None)
            table.earn(call.name)
            return found
        table.entries.pop(key, None)
    if why := table.obstacle(call.name, key):
        if call.in_general is not None and kind.place is None and (general := call.in_general(call)) is not None:
            # with its own name, since its replays do not pay for recordings of single cells
            of_any = "for any cell" if general.n_moving == n_inputs else "for any parameters"
            name = f"{call.name} {of_any}"
            general = general._replace(name=name, in_general=None)
            of_all = kind_of(general, False)
            of_all = of_all if isinstance(of_all, str) else of_all._replace(table=table)
            found = _planned(general, of_all, levels, needed, tensors)
            way, reason = _last.pop(name, ("plan", "replayed"))
            if found is not None:
                return _noted(call, way, f"{reason}, {of_any}", found)
        differing = [part for part, now, then in zip(PARTS, kind.key, before) if now != then]
        beside = f"; the call before had other {', other '.join(differing)}" if differing else ""
        return _noted(call, "once", why + beside, None)
    if kind.place is not None and graphs.are_all_used(kind.place[0]) and not table.drop_graph(kind.place[0]):
        return _noted(call, "once", graphs.NO_STREAM, None)
    kind = kind.with_lists_of_any_length()
    graph = None if kind.place is None else graphs.Graph(kind.place[0])
    # in memory of the plan; a graph has its lists behind the prepared tensors
    lists = kind.copied if graph is None else [*kind.copied, *kind.used]
    n_before = 0 if graph is None else len(kind.copied)
    bodies: list[Body] = []

    def function(memory: Sequence[torch.Tensor]) -> Tensors:
        constants = [t.detach().clone() for t in tensors[n_moving:n_inputs]]
        here = [*memory[:n_moving], *constants, *memory[n_moving : len(memory) - len(lists)]]
        listed = memory[len(memory) - len(lists) :]
        near, waiting = call.near, iter([*listed[n_before:], *listed[:n_before]])
        if len(lists) > len(call.prepared):
            near = type(near)(*[next(waiting) if isinstance(value, torch.Tensor) else value for value in near])
        bodies.append(call.prepare(here[:n_inputs], near, *waiting))
        return full(bodies[-1], levels, needed, here)

    if graph is None and plans.share_memory(kind.used, [*kind.small, *kind.large]):
        return _noted(call, "once", "lists and prepared data share memory", None)
    detached = [t.detach() for t in moving]
    with notices.unsaid() if levels else contextlib.nullcontext():  # the call has warned
        made, found, reason, _ = plans.record(
            function, detached, kind.used, kind.in_place or kind.small, kind.length, raises=not levels, graph=graph
        )
    try:
        if found is not None:
            # before another thread may use the plan's memory; on a GPU the first body has run, not the captured one
            found = _finished(call, bodies[0], found)
    finally:
        # a length is a reason for this call only; without memory the trial has taken it from all that torch keeps
        is_lasting = reason != graphs.NO_STREAM and not reason.startswith(OF_LENGTH)
        if (found is not None and is_lasting) or reason == plans.NO_MEMORY:
            kept = bodies[-1] if made and call.end else None
            table.keep(key, tables.Entry(made, reason, kind.large if made else [], kept))
    return _noted(call, "plan" if made else "once", "recorded" if made else reason, found)


# -- the way that was taken -----------------------------------------------------------------------

_last: dict[str, tuple[str, str]] = {}

_keys: dict[tuple[str, bool], tuple[Any, ...]] = {}
"""For each operation, with lists in place or not, the key of the last call for which a plan was looked up."""


def _noted(call: Call, way: str, reason: str, results: Any) -> Any:
    _last[call.name] = way, reason
    return results


def explain(owner: Any = None) -> str:
    """Say how the last call of each operation ran and why, and which plans are kept.

    Parameters
    ----------
    owner : object, optional
        A module or potential whose plans are counted. By default the plans of functions are counted.
    """
    table: tables.Plans = tables.everywhere if owner is None else vars(owner).get(tables.OWN, tables.Plans())
    lines = [f"{name}: {way} ({reason})" for name, (way, reason) in list(_last.items())]
    refused = {entry.reason for entry in list(table.entries.values()) if entry.plan is None}
    lines += [f"not recorded: {reason}" for reason in sorted(refused)]
    counts = f"recorded {table.recorded} times, replayed {table.replayed} times"
    n_bytes = table.n_bytes(False) + table.n_bytes(True)
    return "\n".join([*lines, f"plans: {len(table.entries)}, {n_bytes / 2**20:.1f} MiB, {counts}"])
