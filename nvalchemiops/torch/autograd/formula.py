"""Explicit derivatives of ops: another op, or a function of ops, whose parameters are bound by name."""

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from nvalchemiops.torch.autograd.op import WarpOp


WANTED, INPUTS, GRADIENTS = "wanted", "inputs", "gradients"
"""Special parameters of a backward: the names of the inputs whose gradients will be read; a dict of all inputs; and a
dict of all incoming gradients, None where none arrives."""


class Formula:
    """An explicit backward, with its parameters bound by name to inputs, outputs and incoming gradients."""

    def __init__(self, op: "WarpOp", backward: Callable[..., Any]) -> None:
        self.op = op
        self.backward = backward
        inputs, outputs = [p.name for p in op.parameters], [s.name for s in op.outputs]
        gradients = {f"grad_{op.outputs[i].name}": i for i in op.diff_outputs}
        self.first_gradient = len(inputs) + len(outputs)
        # the place of each value in the sequence of inputs, outputs and incoming gradients
        place_of: dict[str, int | str] = {name: self.first_gradient + i for name, i in gradients.items()}
        place_of |= {name: len(inputs) + i for i, name in enumerate(outputs)}
        place_of |= {name: name for name in (WANTED, INPUTS, GRADIENTS)}
        place_of |= {name: i for i, name in enumerate(inputs)}
        self.places: list[int | str] = []
        self.filled: list[int] = []
        for name, parameter in inspect.signature(backward).parameters.items():
            if name not in place_of:
                raise ValueError(
                    f"{op.name}: `backward` has a parameter '{name}', which is neither an input {inputs}, nor an "
                    f"output {outputs}, nor an incoming gradient {list(gradients)}, nor '{WANTED}', '{INPUTS}' "
                    f"or '{GRADIENTS}'"
                )
            place = place_of[name]
            self.places.append(place)
            annotation = parameter.annotation
            text = annotation if isinstance(annotation, str) else repr(annotation)
            if isinstance(place, int) and place >= self.first_gradient and not ("None" in text or "Optional" in text):
                self.filled.append(place)
        self.order: list[int] | None = None
        wanted = getattr(backward, "op", None)  # a WarpOp, if the backward is one
        if wanted is not None:
            produced = [s.name for s in wanted.outputs]
            names = [f"grad_{op.parameters[i].name}" for i in op.diff_inputs]
            if sorted(produced) != sorted(names):
                raise ValueError(f"{op.name}: the backward op must have the outputs {names}, it has {produced}")
            self.order = [produced.index(n) for n in names]
        asked = {*self.places, *(op.tensors if INPUTS in self.places else ())}
        self.spared = {*op.tensors, *range(len(inputs), self.first_gradient)} - asked
        """Places of the tensors that need not be saved."""

    def __call__(
        self,
        kept: Sequence[Any],
        cotangents: Sequence[torch.Tensor | None],
        shapes: Sequence[tuple[Any, torch.dtype, torch.device]],
        record: int = -1,
    ) -> list[torch.Tensor | None]:
        """Call the backward. Return a gradient or None for each declared input.

        ``kept`` are all inputs, then all outputs; values at places in ``spared`` may be None. ``shapes``, dtypes and
        devices of the outputs are only needed if ``filled`` is not empty. ``record`` has a bit for each differentiable
        input: whether its gradient will be read.
        """
        values = [*kept, *cotangents]
        for k in self.filled:
            if values[k] is None:
                shape, dtype, device = shapes[k - self.first_gradient]
                values[k] = torch.zeros(shape, dtype=dtype, device=device)
        arguments: list[Any] = []
        for place in self.places:
            if isinstance(place, int):
                arguments.append(values[place])
            elif place == INPUTS:
                arguments.append({p.name: value for p, value in zip(self.op.parameters, kept)})
            elif place == GRADIENTS:
                arguments.append({self.op.outputs[k].name: cotangents[k] for k in self.op.diff_outputs})
            else:
                read = (self.op.parameters[k].name for bit, k in enumerate(self.op.diff_inputs) if record >> bit & 1)
                arguments.append(frozenset(read))
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
