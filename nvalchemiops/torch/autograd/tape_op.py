"""Ops with a tape: the body records its Warp launches, and the backward pass replays them in reverse.

A second op runs the backward pass, so that compilers see it as one node. The recording of an execution is looked up by
a hidden output, the token, whose memory lives as long as the graph.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from nvalchemiops.launch import NotDifferentiableError
from nvalchemiops.torch.autograd import tapes
from nvalchemiops.torch.autograd.declaration import Declaration, Parameter
from nvalchemiops.torch.autograd.op import Gradients, WarpOp, unpack
from nvalchemiops.torch.autograd.saved import save
from nvalchemiops.torch.autograd.specs import like
from nvalchemiops.torch.runtime import _torch_internals as internals


class TapeOp(WarpOp):
    """An op with first derivatives, from a ``wp.Tape`` that its body attaches with `attach_for_backward`.

    Its ``backward`` is another op, which replays the tape. The hidden argument ``_record`` has a bit for each
    differentiable input: whether its gradient is needed. The caller sets it, since intermediate tensors of a compiled
    graph have lost ``requires_grad``.
    """

    hidden = ("_record", "_identity")
    n_hidden_outputs = 1

    def _register(self) -> None:
        super()._register()
        replay = _Replay(self)
        self.backward = self._replay = replay.public

    def _hidden_values(self, record: int = 0) -> tuple[int, ...]:
        return record, self.identity

    # -- forward ----------------------------------------------------------------------------------

    def _continue_below_autograd(self, keyset: Any, record: int, args: tuple[Any, ...]) -> Any:
        return super()._continue_below_autograd(keyset, record, (*args[: self._count], record, args[-1]))

    def _execute(self, inputs: Sequence[Any], hidden: Sequence[int], device: torch.device) -> Any:
        token = torch.zeros(1, dtype=torch.int64, device="cpu")  # so that looking it up never waits for a GPU
        if not hidden[0]:
            return (*self._results(inputs, device), token)
        results, tapes.recordings[token.untyped_storage()] = self.record(inputs, hidden[0], device)
        return (*results, token)

    def record(
        self, inputs: Sequence[Any], record: int, device: torch.device
    ) -> tuple[list[torch.Tensor], tapes.Recording]:
        """Run the body and keep its recording, for gradients of the inputs in ``record`` (a bit for each)."""
        # Aliases, because one tensor passed in two places needs two gradients; or copies, if the body mutates its
        # arguments, since it may overwrite values that its own tape reads.
        own = bool(self.mutated)
        worked = list(inputs)
        for i in self.tensors:
            if inputs[i] is not None:
                worked[i] = inputs[i].clone() if own else inputs[i].detach()
        with internals.autograd_inside(), torch.enable_grad():
            prepared = self._prepare(worked)
            for i, bit in self._bits.items():
                if record >> bit & 1:
                    prepared[i].requires_grad_()
            result = self._body_on_stream(device, prepared, True)
            found, arrays = tapes.detach_all(result)
            results = self.declared.check_results(result, worked, prepared, device)
        for i in self.mutated:
            if inputs[i] is not None:
                inputs[i].copy_(worked[i])
        recording = tapes.Recording(found, arrays, [worked[i] for i in self.tensors], results, own)
        # The recording keeps the body's own tensors. If they were returned, they would get a graph that keeps the
        # recording: a cycle through C++ that Python never collects.
        return [r.detach() for r in results], recording

    def _fake(self, *args: Any) -> Any:
        return (*self.empty_outputs(args), torch.empty(1, dtype=torch.int64, device="cpu"))

    # -- backward ---------------------------------------------------------------------------------

    def _save(self, ctx: Any, args: tuple[Any, ...], outputs: Sequence[torch.Tensor]) -> None:
        # In eager mode, torch notices changes of saved inputs, and the recording notices changes of outputs. A compiled
        # graph silently reuses buffers that it no longer needs. There the outputs, which the tape reads, must be inputs
        # of the backward op, too.
        traced = type(outputs[0]) is not torch.Tensor
        inputs = (None if i in self.mutated else a for i, a in enumerate(args[: self._count]))
        save(ctx, [*inputs, *(o if traced else None for o in outputs[:-1]), outputs[-1]])
        ctx.shapes = []

    def _gradients(self, kept: Sequence[Any], cotangents: Gradients, shapes: Sequence[Any], record: int) -> Gradients:
        *values, token = kept
        found = self._replay(token, *values, *(cotangents[i] for i in self.diff_outputs), record)
        found = found if isinstance(found, tuple) else (found,)
        gradients: list[torch.Tensor | None] = [None] * self._count
        for i, bit in self._bits.items():
            if record >> bit & 1:
                gradients[i] = found[bit]
        return gradients


class _Replay(WarpOp):
    """The op that runs the backward pass of a tape op. It has no derivative.

    Its arguments are the token, the inputs, the outputs, the incoming gradients, and ``_record``.
    """

    def __init__(self, op: TapeOp) -> None:
        self.op = op
        self.named = [op.outputs[i].name for i in op.diff_outputs]
        inputs = enumerate(op.parameters)
        given = (Parameter(p.name, "Tensor?" if i in op.mutated else p.schema_type) for i, p in inputs)
        optional = [f"_output_{o.name}" for o in op.outputs] + [f"_grad_{name}" for name in self.named]
        maybe = (Parameter(name, "Tensor?") for name in optional)
        parameters = (Parameter("_token", "Tensor"), *given, *maybe, Parameter("_record", "int"))
        outputs = tuple(like(f"grad_{op.parameters[i].name}", 1 + i) for i in op.diff_inputs)
        declared = Declaration(
            name=f"{op.registered}__tape_backward",  # two underscores, so that no other op has this name
            body=op.body,
            parameters=parameters,
            outputs=outputs,
            mutated=(),
            diff_outputs=tuple(range(len(outputs))),
            diff_inputs=tuple(i for i, p in enumerate(parameters) if i and p.is_tensor),
            backward="none",
        )
        super().__init__(declared, identity=str(op.identity))

    def _implementation(self, *args: Any) -> Any:
        op = self.op
        token, *rest = args[: self._count]
        inputs, outputs = rest[: op._count], rest[op._count : op._count + len(op.outputs)]
        cotangents, record = rest[op._count + len(op.outputs) : -1], rest[-1]
        recording = tapes.recordings.get(token.untyped_storage())
        device = op.declared.device_of(inputs)
        if recording is None or not recording.is_usable([inputs[i] for i in op.tensors], outputs):
            if op.mutated:
                raise RuntimeError(
                    f"{op.name}: the recorded execution is gone or in use, and an op that mutates its arguments "
                    "cannot run again for its backward pass"
                )
            _, recording = op.record(inputs, record, device)
        wanted = [(op.parameters[i].name, inputs[i]) for i, bit in op._bits.items() if record >> bit & 1]
        found = iter(recording.gradients(dict(zip(self.named, cotangents)), wanted, op.name))
        return self._one_each(record, device, lambda _: next(found))

    def _fake(self, *args: Any) -> Any:
        inputs = args[1 : 1 + self.op._count]
        device = self.op.declared.device_of(inputs)
        return self._one_each(args[self._count - 1], device, lambda i: inputs[i].new_empty(inputs[i].shape))

    def _one_each(self, record: int, device: torch.device, make: Callable[[int], torch.Tensor]) -> Any:
        """``make(i)`` for each differentiable input i that is in ``record``, an empty tensor for each of the others."""
        bits = self.op._bits.items()
        return unpack([make(i) if record >> bit & 1 else torch.empty(0, device=device) for i, bit in bits])

    def _no_derivative(self) -> NotDifferentiableError:
        return NotDifferentiableError(
            f"{self.op.name}: a second derivative was requested, but this op differentiates through a Warp tape, which "
            "gives first derivatives only. Return the first derivative (forces, dE/dq) as an output of the op and "
            "differentiate that, or give the op an explicit backward: warp_custom_op(..., backward=...)"
        )
