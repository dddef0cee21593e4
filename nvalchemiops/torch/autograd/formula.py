"""The explicit way to differentiate an op: another op, or a function of ops, bound by parameter names."""

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from nvalchemiops.torch.autograd.saved import restore, save

if TYPE_CHECKING:
    from nvalchemiops.torch.autograd.op import WarpOp


WANTED, INPUTS, GRADIENTS = "wanted", "inputs", "gradients"
"""Parameters of a backward for the names of the inputs whose gradients will be read, for all inputs,
and for all incoming gradients (None when none arrives), both by name."""


class Formula:
    """An explicit backward, its parameters bound by name to inputs, outputs and incoming gradients."""

    def __init__(self, op: "WarpOp", backward: Callable[..., Any]) -> None:
        self.op = op
        self.backward = backward
        inputs = {p.name: i for i, p in enumerate(op.parameters)}
        outputs = {s.name: i for i, s in enumerate(op.outputs)}
        gradients = {f"grad_{op.outputs[i].name}": i for i in op.diff_outputs}
        wanted = getattr(backward, "op", None)  # a WarpOp, if the backward is one
        self.sources: list[tuple[str, int, bool]] = []
        for name, parameter in inspect.signature(backward).parameters.items():
            if name in (WANTED, INPUTS, GRADIENTS) and name not in inputs:
                self.sources.append((name, 0, True))
            elif name in inputs:
                self.sources.append(("input", inputs[name], False))
            elif name in outputs:
                self.sources.append(("output", outputs[name], False))
            elif name in gradients:
                annotation = parameter.annotation
                text = annotation if isinstance(annotation, str) else repr(annotation)
                self.sources.append(("gradient", gradients[name], "None" in text or "Optional" in text))
            else:
                raise ValueError(
                    f"{op.name}: `backward` has a parameter '{name}', which is neither an input {list(inputs)}, nor an "
                    f"output {list(outputs)}, nor an incoming gradient {list(gradients)}, nor '{WANTED}', '{INPUTS}' "
                    f"or '{GRADIENTS}'"
                )
        self.order: list[int] | None = None
        if wanted is not None:
            produced = [s.name for s in wanted.outputs]
            names = [f"grad_{op.parameters[i].name}" for i in op.diff_inputs]
            if sorted(produced) != sorted(names):
                raise ValueError(f"{op.name}: the backward op must have the outputs {names}, it has {produced}")
            self.order = [produced.index(n) for n in names]
        asked = {i for kind, i, _ in self.sources if kind == "input"}
        asked |= set(op.tensors if INPUTS in (kind for kind, _, _ in self.sources) else ())
        self.saved_inputs = asked.intersection(op.tensors)
        self.fills_gradients = any(kind == "gradient" and not optional for kind, _, optional in self.sources)
        self.saved_outputs = {i for kind, i, _ in self.sources if kind == "output"}

    def save(self, ctx: Any, inputs: Sequence[Any], outputs: Sequence[torch.Tensor]) -> None:
        """Save on ``ctx`` the inputs and outputs that the backward takes."""
        kept = (a if i in self.saved_inputs or i not in self.op.tensors else None for i, a in enumerate(inputs))
        save(ctx, [*kept, *(o if i in self.saved_outputs else None for i, o in enumerate(outputs))])
        ctx.shapes = [(o.shape, o.dtype, o.device) for o in outputs] if self.fills_gradients else []

    def restore(self, ctx: Any) -> tuple[list[Any], list[Any], list[Any]]:
        """Inputs and outputs as `save` kept them, None for the rest; and shapes, dtypes and devices of the outputs."""
        values = restore(ctx)
        return values[: self.op._count], values[self.op._count :], ctx.shapes

    def __call__(
        self,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        cotangents: Sequence[torch.Tensor | None],
        shapes: Sequence[tuple[Any, torch.dtype, torch.device]],
        record: int = -1,
    ) -> list[torch.Tensor | None]:
        """One gradient or None per declared input; ``record`` has a bit for each differentiable one."""
        arguments = []
        for kind, i, optional in self.sources:
            if kind == "input":
                arguments.append(inputs[i])
            elif kind == "output":
                arguments.append(outputs[i])
            elif kind == INPUTS:
                arguments.append({p.name: value for p, value in zip(self.op.parameters, inputs)})
            elif kind == GRADIENTS:
                arguments.append({self.op.outputs[k].name: cotangents[k] for k in self.op.diff_outputs})
            elif kind == WANTED:
                read = (self.op.parameters[k].name for bit, k in enumerate(self.op.diff_inputs) if record >> bit & 1)
                arguments.append(frozenset(read))
            else:
                cotangent = cotangents[i]
                if cotangent is None and not optional:
                    shape, dtype, device = shapes[i]
                    cotangent = torch.zeros(shape, dtype=dtype, device=device)
                arguments.append(cotangent)
        result = self.backward(*arguments)
        gradients: list[torch.Tensor | None] = [None] * self.op._count
        positions = self.op.diff_inputs
        if isinstance(result, dict):
            names = {self.op.parameters[i].name: i for i in positions}
            for name, gradient in result.items():
                if name not in names:
                    raise ValueError(
                        f"{self.op.name}: `backward` returned a gradient for '{name}', not one of {list(names)}"
                    )
                gradients[names[name]] = gradient
            return gradients
        if not isinstance(result, (tuple, list)):
            result = (result,)
        if len(result) != len(positions):
            raise ValueError(f"{self.op.name}: `backward` returned {len(result)} gradients for {len(positions)} inputs")
        for slot, i in enumerate(positions):
            gradients[i] = result[self.order[slot] if self.order else slot]
        return gradients
