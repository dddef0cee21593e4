"""Segments of runs that keep no graph: the backward pass computes their steps again.

``torch.utils.checkpoint`` would do, but for models that differentiate energies: each of their inner derivatives would
compute the segment again, from its start, during the forward pass already.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from nvalchemiops.torch.dynamics.model import Evaluation
from nvalchemiops.torch.dynamics.state import State
from nvalchemiops.torch.runtime.history import leaves_of

Records = list[dict[str, torch.Tensor]]
Run = Callable[[State], tuple[State, Records]]


def tensors_of(state: State) -> dict[str, torch.Tensor]:
    """The tensors of a state that derivatives flow through, by name."""
    found = {"positions": state.system.positions, "cell": state.system.cell, "velocities": state.velocities}
    found |= {"masses": state.masses, **state.evaluation._asdict()}
    found |= {f"extra.{name}": value for name, value in state.extra.items()}
    return {name: value for name, value in found.items() if value is not None and value.is_floating_point()}


def with_tensors(state: State, tensors: dict[str, torch.Tensor]) -> State:
    """The state with these tensors, which `tensors_of` gave."""
    places: Any = {name: tensors[name] for name in ("positions", "cell") if name in tensors}
    found: Any = (tensors.get(name) for name in Evaluation._fields)
    own = {name[len("extra.") :]: value for name, value in tensors.items() if name.startswith("extra.")}
    system, extra = state.system._replace(**places), {**state.extra, **own}
    return State(system, tensors["velocities"], tensors["masses"], Evaluation(*found), state.step, extra)


class Parameters:
    """Tensors that a run depends on beside its state: those of the model, of flows, of hooks and of records.

    They are held weakly: models, hooks and records make tensors that require gradients for themselves, and drop them.
    """

    def __init__(self) -> None:
        self._known = WeakTensorKeyDictionary()

    @property
    def found(self) -> list[torch.Tensor]:
        """Those that are known now."""
        return list(self._known)

    def look(self, step: Callable[[State], State], state: State) -> None:
        """Find those of a step, from positions that require gradients, by which a model may decide to keep a graph."""
        tensors = {name: value.detach() for name, value in tensors_of(state).items()}
        tensors["positions"].requires_grad_()
        with torch.enable_grad():
            after = step(with_tensors(state, tensors))
        self._add(tensors_of(after).values())

    def watched(self, function: Callable[[State], Any]) -> Callable[[State], Any]:
        """The function of a state, which returns a state or tensors by name: where no graph is kept, its own are found.

        What it returns then has no graph.
        """

        def call(state: State) -> Any:
            if torch.is_grad_enabled():
                return function(state)
            with torch.enable_grad():
                found = function(state)
            tensors = tensors_of(found) if isinstance(found, State) else found
            if not isinstance(tensors, dict) or not all(isinstance(value, torch.Tensor) for value in tensors.values()):
                return found  # None, or a mistake, which the caller names
            self._add(tensors.values())
            tensors = {name: value.detach() for name, value in tensors.items()}
            return with_tensors(found, tensors) if isinstance(found, State) else tensors

        return call

    def _add(self, values: Iterable[torch.Tensor]) -> None:
        for leaf in leaves_of(values):
            self._known[leaf] = None


def run_segment(run: Run, state: State, parameters: Parameters) -> tuple[State, Records]:
    """``run(state)`` without a graph inside; ``parameters`` are all other tensors that it depends on."""
    given = tensors_of(state)

    def outputs(tensors: Sequence[torch.Tensor]) -> tuple[State, Records, list[torch.Tensor]]:
        last, records = run(with_tensors(state, dict(zip(given, tensors))))
        values = [value for record in records for value in record.values()]
        return last, records, [*tensors_of(last).values(), *values]

    with torch.no_grad():  # before, since parameters may be found in it
        last, records, values = outputs([value.detach() for value in given.values()])
    arguments = values, lambda tensors: outputs(tensors)[2], len(given)
    results: Iterator[torch.Tensor] = iter(_Segment.apply(*arguments, *given.values(), *parameters.found))
    last = with_tensors(last, {name: next(results) for name in tensors_of(last)})
    return last, [{name: next(results) for name in record} for record in records]


class _Segment(torch.autograd.Function):
    """A function of tensors that is computed again for its derivatives, which are of first order."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Sequence[torch.Tensor],
        function: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
        count: int,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """The values, which were computed without a graph."""
        ctx.function, ctx.count = function, count
        ctx.save_for_backward(*tensors)
        # a value that is passed through must not be the input itself
        return tuple(value.clone() for value in values)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        """Derivatives by the tensors and the parameters, of which the function uses the latter by itself."""
        tensors, count = ctx.saved_tensors, ctx.count
        inputs = [tensor.detach().requires_grad_() for tensor in tensors[:count]]
        with torch.enable_grad():
            values = ctx.function(inputs)
        leaves = [*inputs, *tensors[count:]]
        wanted = [n for n in range(len(leaves)) if ctx.needs_input_grad[n + 3]]
        pairs = [(value, gradient) for value, gradient in zip(values, gradients) if value.requires_grad]
        found: list[Any] = [None] * len(leaves)
        if pairs:
            outputs, incoming = zip(*pairs)
            # the part of the graph that is older than the run, from which values of the model may come, is needed again
            slopes = torch.autograd.grad(
                outputs, [leaves[n] for n in wanted], incoming, retain_graph=True, allow_unused=True
            )
            for n, slope in zip(wanted, slopes):
                found[n] = slope
        return (None, None, None, *found)
