"""Ops that differentiate by a tape: the body records its Warp launches, the backward pass replays them backwards.

A second registered op takes the backward pass, so that compilers see it as one node. The recording of
an execution is found by a hidden output, the token, whose memory exists as long as the graph.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nvalchemiops.launch import NotDifferentiableError
from nvalchemiops.torch.autograd import tapes
from nvalchemiops.torch.autograd.declaration import returns
from nvalchemiops.torch.autograd.functorch import transformable
from nvalchemiops.torch.autograd.op import Gradients, WarpOp, unpack
from nvalchemiops.torch.autograd.saved import restore, save
from nvalchemiops.torch.runtime import _torch_internals as internals
from nvalchemiops.torch.runtime.context import is_eager


class TapeOp(WarpOp):
    """An op with one derivative, by a ``wp.Tape`` that its body hands over with `attach_for_backward`.

    Attributes
    ----------
    backward_overload : torch.ops overload
        The registered op of the backward pass.

    Notes
    -----
    The hidden argument ``_record`` has a bit for each differentiable input: whether its gradient is needed. A compiled
    graph drops ``requires_grad`` from intermediate tensors, so it is decided outside of the op.
    """

    hidden = ("_record", "_identity")
    n_hidden_outputs = 1

    def _register(self) -> tuple[torch.library.Library, str]:
        library, short = super()._register()
        self._diff_names = [self.outputs[i].name for i in self.diff_outputs]
        declared = ["Tensor _token"]
        for i, p in enumerate(self.parameters):
            kind = "Tensor?" if i in self.mutated else p.schema_type
            declared.append(f"{kind} {p.name}")
        declared += [f"Tensor? _output_{o.name}" for o in self.outputs]
        declared += [f"Tensor? _grad_{name}" for name in self._diff_names]
        declared += ["int _record", "int _identity"]
        schema = f"({', '.join(declared)}) -> {returns(len(self.diff_inputs))}"
        short = f"{short}__tape_backward"  # two underscores, so that it is no other op's name
        self.backward_overload = internals.define(
            library, short, schema, self._backward_implementation, self._fake_backward
        )
        library.impl(short, self._autograd_backward, "Autograd", with_keyset=True)
        pullback = self._refuse_second_order
        gradients = range(len(self.diff_inputs))
        self._call_backward = transformable(short, self.backward_overload, pullback, gradients, orders=0)
        return library, short

    @property
    def orders(self) -> float:
        """How many derivatives the op has."""
        return 1

    def _hidden_values(self) -> tuple[int, ...]:
        return 0, self.identity

    def _visible(self, result: str) -> str:
        count = len(self.outputs)
        return f"{result}[0]" if count == 1 else f"{result}[:{count}]"

    def _call_for_transforms(self, *args: Any) -> Any:
        # under a transform the gradient of every differentiable input may be needed, at some level
        return self.overload(*args, self._record_everything(args), self.identity)

    # -- forward ----------------------------------------------------------------------------------

    def _continue_below_autograd(self, keyset: Any, record: int, args: tuple[Any, ...]) -> Any:
        return super()._continue_below_autograd(keyset, record, (*args[: self._count], record, args[-1]))

    def _execute(self, inputs: Sequence[Any], hidden: Sequence[int], device: torch.device) -> Any:
        record = hidden[0]
        if not record:
            return (*self._results(inputs, device), tapes.new_token())
        results, recording = self._record(inputs, record, device)
        return (*results, tapes.keep(recording))

    def _record(
        self, inputs: Sequence[Any], record: int, device: torch.device
    ) -> tuple[list[torch.Tensor], tapes.Recording]:
        # Aliases, because one tensor passed in two places needs two gradients; or copies, for a body that mutates its
        # arguments and may overwrite what its own tape reads.
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
        # The recording keeps the body's own tensors. Returned themselves, they would get a graph that keeps the
        # recording: a cycle through C++ that Python never collects.
        return [r.detach() for r in results], recording

    def _fake(self, *args: Any) -> Any:
        return (*self._fake_outputs(args), torch.empty(1, dtype=torch.int64, device="cpu"))

    # -- backward ---------------------------------------------------------------------------------

    def _save(self, ctx: Any, args: tuple[Any, ...], outputs: Sequence[torch.Tensor]) -> None:
        # Eagerly, torch guards the saved inputs against changes, and the recording itself notices a changed output. A
        # compiled graph overwrites any buffer that it does not need any more, without a trace: there the outputs, which
        # the tape reads, must be inputs of the backward op too.
        traced = type(outputs[0]) is not torch.Tensor
        inputs = (None if i in self.mutated else a for i, a in enumerate(args[: self._count]))
        save(ctx, [outputs[-1], *inputs, *(o if traced else None for o in outputs[:-1])])
        ctx.identity = args[-1]

    def _saved_pullback(self, ctx: Any, cotangents: Gradients) -> Gradients:
        token, *values = restore(ctx)
        inputs, outputs = values[: self._count], values[self._count :]
        return self._replayed(token, inputs, outputs, cotangents, ctx.record, ctx.identity)

    def _pullback(
        self, inputs: Sequence[Any], outputs: Sequence[torch.Tensor], cotangents: Gradients, needed: Sequence[bool]
    ) -> tuple[Any, ...]:
        unsaved = [None] * len(self.outputs)
        record = self._record_everything(inputs)
        return tuple(self._replayed(outputs[-1], inputs, unsaved, cotangents, record, self.identity))

    def _replayed(
        self,
        token: torch.Tensor,
        inputs: Sequence[Any],
        outputs: Sequence[torch.Tensor | None],
        cotangents: Gradients,
        record: int,
        identity: int,
    ) -> list[torch.Tensor | None]:
        given = [cotangents[i] for i in self.diff_outputs]
        seen = (token, *given, *(inputs[i] for i in self.tensors))
        call: Callable[..., Any] = self._call_backward
        if torch.compiler.is_compiling():
            call = self.backward_overload
        elif is_eager() and not torch.is_grad_enabled() and internals.is_unobserved(*seen):
            call = self._backward_implementation
        found = call(token, *inputs, *outputs, *given, record, identity)
        found = found if isinstance(found, tuple) else (found,)
        gradients: list[torch.Tensor | None] = [None] * self._count
        for bit, i in enumerate(self.diff_inputs):
            if record >> bit & 1:
                gradients[i] = found[bit]
        return gradients

    def _backward_implementation(self, *args: Any) -> Any:
        token, rest, record = args[0], args[1:], args[-2]
        inputs, outputs = list(rest[: self._count]), rest[self._count : self._count + len(self.outputs)]
        cotangents = rest[self._count + len(self.outputs) : -2]
        recording = tapes.find(token)
        device = self.declared.device_of(inputs)
        is_there = recording is not None and not recording.is_in_use()
        if recording is None or not is_there or not recording.is_fresh([inputs[i] for i in self.tensors], outputs):
            if self.mutated:
                raise RuntimeError(
                    f"{self.name}: the recorded execution is gone or in use, and an op that mutates its arguments "
                    "cannot be run again for its backward pass"
                )
            _, recording = self._record(inputs, record, device)
        wanted = [(self.parameters[i].name, inputs[i]) for bit, i in enumerate(self.diff_inputs) if record >> bit & 1]
        found = iter(tapes.gradients_of(recording, dict(zip(self._diff_names, cotangents)), wanted, self.name))
        bits = range(len(self.diff_inputs))
        return unpack([next(found) if record >> bit & 1 else torch.empty(0, device=device) for bit in bits])

    def _fake_backward(self, *args: Any) -> Any:
        inputs, record = args[1:], args[-2]
        device = self.declared.device_of(inputs)
        results = []
        for bit, i in enumerate(self.diff_inputs):
            shape, dtype = (inputs[i].shape, inputs[i].dtype) if record >> bit & 1 else ((0,), None)
            results.append(torch.empty(shape, dtype=dtype, device=device))
        return unpack(results)

    def _autograd_backward(self, keyset: Any, *args: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            return self._second_order.apply(keyset, *args)
        return internals.below_autograd(self.backward_overload, self._backward_implementation, keyset, args)

    # -- a second order is an error ---------------------------------------------------------------

    @functools.cached_property
    def _second_order(self) -> Any:
        op = self

        class SecondOrder(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, keyset: Any, *args: Any) -> Any:
                return internals.below_autograd(op.backward_overload, op._backward_implementation, keyset, args)

            @staticmethod
            def backward(ctx: Any, *cotangents: Any) -> Any:
                return op._refuse_second_order()

        SecondOrder.__name__ = self.name.replace("::", "_") + "_backward"
        return SecondOrder

    def _refuse_second_order(self, *_: Any) -> Any:
        raise NotDifferentiableError(
            f"{self.name}: a second derivative was asked for, but this op differentiates through a Warp tape, which "
            "gives one order. Ways out: return the first derivative (forces, dE/dq) as an output of the op and "
            "differentiate that, or give the op an explicit backward: warp_custom_op(..., backward=...)"
        )
