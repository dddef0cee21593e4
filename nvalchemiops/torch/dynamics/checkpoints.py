"""Segments of runs that keep no graph: the backward pass computes their steps again.

``torch.utils.checkpoint`` would do, but for models that differentiate energies: each of their inner derivatives would
compute the segment again, from its start, during the forward pass already.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from nvalchemiops.torch.dynamics.model import Evaluation, Model
from nvalchemiops.torch.dynamics.state import State
from nvalchemiops.torch.systems import System

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
    evaluation = Evaluation(*found)
    own = {name[len("extra.") :]: value for name, value in tensors.items() if name.startswith("extra.")}
    return State(
        state.system._replace(**places),
        tensors["velocities"],
        tensors["masses"],
        evaluation,
        state.step,
        {**state.extra, **own},
    )


def parameters_of(model: Model, system: System) -> list[torch.Tensor]:
    """Leaves that require gradients and on which a model depends: those in the graph of one evaluation."""
    positions = system.positions.detach().requires_grad_()
    with torch.enable_grad():
        found = model(system._replace(positions=positions))
    nodes = [value.grad_fn for value in found if value is not None and value.grad_fn is not None]
    seen, leaves = set(nodes), []
    while nodes:
        node = nodes.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None and leaf is not positions:
            leaves.append(leaf)
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        nodes += new
    return leaves


def run_segment(run: Run, state: State, parameters: Sequence[torch.Tensor]) -> tuple[State, Records]:
    """``run(state)`` without a graph inside; ``parameters`` are all other tensors that it depends on."""
    given = tensors_of(state)
    kept: dict[str, Any] = {}

    def outputs(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        last, records = run(with_tensors(state, dict(zip(given, tensors))))
        kept.setdefault("state", last)
        kept.setdefault("names", [list(tensors_of(last)), [list(record) for record in records]])
        return (*tensors_of(last).values(), *(value for record in records for value in record.values()))

    results: Iterator[torch.Tensor] = iter(_Segment.apply(outputs, len(given), *given.values(), *parameters))
    names, columns = kept["names"]
    last = with_tensors(kept["state"], {name: next(results) for name in names})
    return last, [{name: next(results) for name in column} for column in columns]


class _Segment(torch.autograd.Function):
    """A function of tensors that is computed again for its derivatives, which are of first order."""

    @staticmethod
    def forward(
        ctx: Any,
        function: Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]],
        count: int,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """The values, without a graph."""
        ctx.function, ctx.count = function, count
        ctx.save_for_backward(*tensors)
        # a value that is passed through must not be the input itself
        return tuple(value.detach().clone() for value in function([tensor.detach() for tensor in tensors[:count]]))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        """Derivatives by the tensors and the parameters, of which the function uses the latter by itself."""
        tensors, count = ctx.saved_tensors, ctx.count
        inputs = [tensor.detach().requires_grad_() for tensor in tensors[:count]]
        with torch.enable_grad():
            values = ctx.function(inputs)
        leaves = [*inputs, *tensors[count:]]
        wanted = [n for n in range(len(leaves)) if ctx.needs_input_grad[n + 2]]
        pairs = [(value, gradient) for value, gradient in zip(values, gradients) if value.requires_grad]
        found: list[Any] = [None] * len(leaves)
        if pairs and wanted:
            outputs, incoming = zip(*pairs)
            # the part of the graph that is older than the run, from which values of the model may come, is needed again
            slopes = torch.autograd.grad(
                outputs, [leaves[n] for n in wanted], incoming, retain_graph=True, allow_unused=True
            )
            for n, slope in zip(wanted, slopes):
                found[n] = slope
        return (None, None, *found)
