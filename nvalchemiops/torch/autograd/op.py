"""The registration of an op: its schema, its implementations for each dispatch key, and its public function.

Ops of this module have an explicit derivative (`Formula`) or none. The subclass
`nvalchemiops.torch.autograd.tape_op.TapeOp` differentiates by a recorded tape.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nvalchemiops.launch import NotDifferentiableError, active_tape, loading
from nvalchemiops.torch.autograd.arrays import warp_stream_from_torch
from nvalchemiops.torch.autograd.declaration import Declaration
from nvalchemiops.torch.autograd.formula import Formula
from nvalchemiops.torch.autograd.functorch import transformable
from nvalchemiops.torch.autograd.naming import fingerprint, library_for
from nvalchemiops.torch.autograd.saved import restore, save
from nvalchemiops.torch.autograd.specs import fill_sizes
from nvalchemiops.torch.runtime import _torch_internals as internals
from nvalchemiops.torch.runtime.context import is_eager
from nvalchemiops.torch.runtime.recorder import current_recorder, not_repeatable

Gradients = Sequence[torch.Tensor | None]

_CPU, _READY = torch.device("cpu"), object()


class WarpOp:
    """One registered op, made from a `Declaration`.

    Attributes
    ----------
    name, registered : str
        The given name, and the registered name, which has a number if the same definition was registered before.
    parameters, outputs : tuple
        As in the declaration.
    public : callable
        The function that users call.
    overload : torch.ops overload
        The registered op, with hidden arguments at its end.
    """

    hidden: tuple[str, ...] = ("_identity",)
    """Names of the hidden arguments. The identity lets compile caches distinguish two versions of an op."""

    n_hidden_outputs = 0

    def __init__(
        self,
        declared: Declaration,
        vmap: Callable[..., Any] | None = None,
        trusted: bool = False,
        identity: str = "",
    ) -> None:
        self.declared = declared
        self.name, self.body, self.backward = declared.name, declared.body, declared.backward
        self.parameters, self.outputs, self.mutated = declared.parameters, declared.outputs, declared.mutated
        self.tensors = declared.tensors
        self.diff_outputs, self.diff_inputs = declared.diff_outputs, declared.diff_inputs
        self.trusted = trusted
        self._count = len(self.parameters)
        self._bits = {i: bit for bit, i in enumerate(self.diff_inputs)}
        self._formula = Formula(self, self.backward) if callable(self.backward) else None
        self.identity = fingerprint(declared, identity)
        self._loaded: set[tuple[torch.device, bool]] = set()
        # the dispatcher drops trailing arguments that equal their defaults
        defaults = tuple(None if p.required else p.default for p in self.parameters)
        self._defaults = defaults + (0,) * len(self.hidden)
        self._register()
        self.public = self._make_public(vmap)

    # -- registration -----------------------------------------------------------------------------

    def _register(self) -> None:
        library, short = library_for(self.name, self.body)
        self.registered = f"{library.ns}::{short}"
        schema = self.declared.schema(self.hidden, len(self.outputs) + self.n_hidden_outputs)
        self.overload = internals.define(library, short, schema, self._implementation, self._fake)
        if self.trusted or self.n_hidden_outputs:
            not_repeatable.add(self.overload)
        library.impl(short, self._autograd, "Autograd", with_keyset=True)
        if self.mutated and internals.CAN_REDISPATCH:
            library.impl(short, self._bump_versions, "ADInplaceOrView", with_keyset=True)
        for device in ("CPU", "CUDA"):
            library.impl(short, functools.partial(self._autocast, device.lower()), f"Autocast{device}")
        self._function = self._make_function()

    @property
    def orders(self) -> float:
        """How often the op can be differentiated. A backward that is a plain function counts as infinitely often."""
        backward = getattr(self.backward, "op", None)
        if isinstance(backward, WarpOp):
            return 1 + backward.orders
        return math.inf if callable(self.backward) else 0

    def _hidden_values(self, record: int = 0) -> tuple[int, ...]:
        """Hidden arguments of a call that needs gradients of the inputs in ``record`` (a bit for each input)."""
        return (self.identity,)

    def _make_public(self, vmap: Callable[..., Any] | None) -> Callable[..., Any]:
        transformed: Callable[..., Any]
        if not self.mutated:
            transformed = transformable(self, vmap)
        elif internals.DERIVATIVES_KNOWN:
            transformed = self._refuse_transforms
        else:
            transformed = self.call_for_transforms
        names = [p.name for p in self.parameters]
        signature = [p.name if p.required else f"{p.name}=_default_{p.name}" for p in self.parameters]
        values = {f"_default_{p.name}": p.default for p in self.parameters if not p.required}
        values |= {
            "_is_eager": is_eager,
            "_compiling": torch.compiler.is_compiling,
            "_derivative_asked": internals.derivative_asked,
            "_transformed": transformed,
            "_op": self.overload,
            "_eager": self._call_eagerly,
        }
        function = self.body.__name__ if self.body.__name__.isidentifier() else "op"
        # without hidden outputs
        visible = "" if not self.n_hidden_outputs else "[0]" if len(self.outputs) == 1 else f"[:{len(self.outputs)}]"
        arguments = ", ".join([*names, *map(str, self._hidden_values())])
        source = f"""
def _make({", ".join(values)}):
    def {function}({", ".join(signature)}):
        if _is_eager():
            _result = _eager({arguments})
        elif _compiling() or not _derivative_asked():
            _result = _op({arguments})
        else:
            _result = _transformed({", ".join(names)})
        return _result{visible}
    return {function}
"""
        scope: dict[str, Any] = {}
        exec(compile(source, f"<op {self.name}>", "exec"), scope)
        public = functools.wraps(self.body)(scope["_make"](**values))
        public.op = self  # type: ignore[attr-defined]
        return public

    # -- ways into the op -------------------------------------------------------------------------

    def _refuse_transforms(self, *args: Any) -> Any:
        raise RuntimeError(
            f"{self.name} writes into its arguments, which torch.func transforms and forward mode cannot follow: call "
            "it outside of them"
        )

    def call_for_transforms(self, *args: Any) -> Any:
        """Call the op under a transform, which may request any derivative."""
        # the gradient of every differentiable input may be needed, at some level
        return self.overload(*args, *self._hidden_values(self._record_everything(args)))

    @functools.partial(internals.only_inlined, with_calls=True)
    def _call_eagerly(self, *args: Any) -> Any:
        """Run the op as the dispatcher would for plain tensors in eager mode, in half the time for many arguments."""
        if internals.autocast_enabled() or internals.profiling() or internals.tracing_state():
            return self.overload(*args)
        if not self.trusted and current_recorder() is not None:  # the recorder records the whole body as one operation
            return self.overload(*args)
        types, keys_of, plain = internals.PLAIN_TYPES, internals.dispatch_keys, internals.keys_with_inference
        if self.mutated and not torch.is_inference_mode_enabled():  # outside, torch writes into no tensor made in it
            plain = internals.plain_keys
        record, device, ready = 0, None, True
        for i in self.tensors:
            tensor = args[i]
            if tensor is None:
                continue
            if type(tensor) not in types or keys_of(tensor).raw_repr() not in plain:
                internals.learn_plain_keys()
                return self.overload(*args)
            if tensor.requires_grad and i in self._bits:
                record |= 1 << self._bits[i]
            if not tensor.is_contiguous():
                ready = False
            if device is None:
                device = tensor.device
            elif tensor.device != device:
                ready = False
        ready = ready and self.trusted and device == _CPU and active_tape() is None
        if self.mutated:
            # tensors that the body writes must not require gradients, and their changes are counted
            written = [args[i] for i in self.mutated if args[i] is not None]
            if not ready or (torch.is_grad_enabled() and (record or any(t.requires_grad for t in written))):
                return self.overload(*args)
            self.declared.refuse_overlap(args)
            self._count_changes(args)
        elif record and torch.is_grad_enabled():
            return self._function.apply(_READY if ready else None, record, *args)
        with internals.autograd_excluded():
            return self._short_way(*args) if ready else self._implementation(*args)

    def _short_way(self, *args: Any) -> Any:
        """The implementation for a trusted op on the CPU whose arguments need no preparation."""
        return self._call_body(args[: self._count], _CPU, False)

    def _complete(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return args if len(args) == len(self._defaults) else args + self._defaults[len(args) :]

    # -- running the body -------------------------------------------------------------------------

    @functools.partial(internals.only_inlined, with_calls=True)
    def _implementation(self, *args: Any) -> Any:
        """The implementation on every device, below autograd."""
        args = self._complete(args)
        inputs = args[: self._count]
        device = self.declared.device_of(inputs)
        if self.mutated:
            self.declared.refuse_overlap(inputs)
            if not internals.CAN_REDISPATCH:
                self._count_changes(inputs)
        if self.diff_outputs and active_tape() is not None:
            raise NotDifferentiableError(
                f"{self.name} was called inside a recording, and the gradient of the tape would miss it: launch its "
                "kernels there, or call it outside"
            )
        return self._execute(inputs, args[self._count :], device)

    def _execute(self, inputs: Sequence[Any], hidden: Sequence[int], device: torch.device) -> Any:
        return unpack(self._results(inputs, device))

    def _results(self, inputs: Sequence[Any], device: torch.device) -> list[torch.Tensor]:
        prepared = self._prepare(inputs)
        result = self._body_on_stream(device, prepared, False)
        if self.trusted:
            return list(result) if isinstance(result, tuple) else [result]
        return self.declared.check_results(result, inputs, prepared, device)

    def _prepare(self, inputs: Sequence[Any]) -> list[Any]:
        """The arguments for the body: without a graph, and contiguous unless the body writes into them."""
        prepared = list(inputs)
        for i in self.tensors:
            tensor = prepared[i]
            if tensor is None:
                continue
            if tensor.requires_grad:
                tensor = tensor.detach()
            prepared[i] = tensor if i in self.mutated or tensor.is_contiguous() else tensor.contiguous()
        return prepared

    def _body_on_stream(self, device: torch.device, prepared: Sequence[Any], tracked: bool) -> Any:
        if device.type != "cuda":
            return self._call_body(prepared, device, tracked)
        with torch.cuda.device(device), warp_stream_from_torch(device):
            if not tracked:
                return self._call_body(prepared, device, tracked)
            # in a backward pass inside of the body, a thread of autograd would wait for the locks that this one holds
            with torch.autograd.set_multithreading_enabled(False):
                return self._call_body(prepared, device, tracked)

    def _call_body(self, prepared: Sequence[Any], device: torch.device, tracked: bool) -> Any:
        # the first call may load kernels, so it runs alone; a call with gradients may load other kernels
        kind = (device, tracked)
        if kind in self._loaded:
            return self.body(*prepared)
        with loading():
            result = self.body(*prepared)
        self._loaded.add(kind)
        return result

    def _fake(self, *args: Any) -> Any:
        return unpack(self.empty_outputs(args))

    def empty_outputs(self, args: tuple[Any, ...], size: int | None = None) -> list[torch.Tensor]:
        """Tensors in the declared shapes; what depends on data has this ``size``, or a new one in a compiler."""
        inputs = self._complete(args)[: self._count]
        device = self.declared.device_of(inputs)
        sizes: dict[str, Any] = {}
        results = []
        for spec in self.outputs:
            shape, dtype = spec.resolve(inputs)
            shape = fill_sizes(
                shape, sizes, lambda _: torch.library.get_ctx().new_dynamic_size() if size is None else size
            )
            results.append(torch.empty(shape, dtype=dtype, device=device))
        return results

    # -- autograd ---------------------------------------------------------------------------------

    def _record_everything(self, inputs: Sequence[Any]) -> int:
        """A bit for each differentiable input that can have a gradient."""
        return sum(1 << bit for i, bit in self._bits.items() if inputs[i] is not None and inputs[i].is_floating_point())

    @functools.partial(internals.only_inlined, with_calls=True)
    def _autograd(self, keyset: Any, *args: Any) -> Any:
        refuse_transforms(self.name)
        args = self._complete(args)
        if torch.is_grad_enabled():
            for i in self.mutated:
                if args[i] is not None and args[i].requires_grad:
                    raise ValueError(
                        f"{self.name}: `{self.parameters[i].name}` is written in place, so it cannot require a "
                        "gradient: pass a detached tensor"
                    )
            record = sum(1 << bit for i, bit in self._bits.items() if args[i] is not None and args[i].requires_grad)
            if record:
                return self._function.apply(keyset, record, *args)
        return internals.below_autograd(self.overload, self._implementation, keyset, args)

    def _make_function(self) -> Any:
        op = self

        def forward(ctx: Any, keyset: Any, record: int, *args: Any) -> Any:
            result = op._continue_below_autograd(keyset, record, args)
            result = tuple(map(internals.no_view, result)) if isinstance(result, tuple) else internals.no_view(result)
            outputs = result if isinstance(result, tuple) else (result,)
            op.mark_differentiable(ctx, outputs)
            ctx.record = record
            op._save(ctx, args, outputs)
            return result

        def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[Any, ...]:
            if all(c is None for c in cotangents):
                return (None,) * (2 + len(op._defaults))
            gradients = op._gradients(restore(ctx), cotangents, ctx.shapes, ctx.record)
            return (None, None, *gradients, *(None,) * len(op.hidden))

        name = self.name.replace("::", "_")
        return type(
            name,
            (torch.autograd.Function,),
            {"forward": staticmethod(forward), "backward": staticmethod(backward)},
        )

    def mark_differentiable(self, ctx: Any, outputs: Sequence[torch.Tensor]) -> list[int]:
        """Tell an ``autograd.Function`` which outputs are differentiable. Return their positions."""
        differentiable = [i for i in self.diff_outputs if outputs[i].is_floating_point()]
        if len(differentiable) < len(outputs):
            ctx.mark_non_differentiable(*(o for i, o in enumerate(outputs) if i not in differentiable))
        ctx.set_materialize_grads(False)
        return differentiable

    def _continue_below_autograd(self, keyset: Any, record: int, args: tuple[Any, ...]) -> Any:
        """Continue below autograd, in a call that needs gradients of the inputs in ``record`` (a bit for each)."""
        if keyset is _READY:
            with internals.autograd_excluded():
                return self._short_way(*args)
        return internals.below_autograd(self.overload, self._implementation, keyset, args)

    def _save(self, ctx: Any, args: tuple[Any, ...], outputs: Sequence[torch.Tensor]) -> None:
        """Save the values that `_gradients` takes."""
        formula = self._formula
        values = () if formula is None else (*args[: self._count], *outputs)
        save(ctx, [None if formula and place in formula.spared else value for place, value in enumerate(values)])
        ctx.shapes = [(o.shape, o.dtype, o.device) for o in outputs] if formula and formula.filled else []

    def pullback(self, values: Sequence[Any], cotangents: Gradients, needed: Sequence[bool]) -> tuple[Any, ...]:
        """The vector-Jacobian product under function transforms, from all inputs and outputs."""
        shapes = [(o.shape, o.dtype, o.device) for o in values[self._count :]]
        record = self._record_everything(values) & sum(1 << bit for i, bit in self._bits.items() if needed[i])
        return tuple(self._gradients(values, cotangents, shapes, record))

    def _gradients(self, kept: Sequence[Any], cotangents: Gradients, shapes: Sequence[Any], record: int) -> Gradients:
        """The vector-Jacobian product: a gradient or None for each input. Arguments are those of a `Formula`."""
        if self._formula is None:
            raise self._no_derivative()
        return self._formula(kept, cotangents, shapes, record)

    def _no_derivative(self) -> NotDifferentiableError:
        advice = "" if self.trusted else ", or give it a backward"
        return NotDifferentiableError(
            f"{self.name} has no derivative: it was declared with backward='none', as the last op of a chain of "
            f"derivatives. Differentiate once less{advice}"
        )

    # -- other dispatch keys ----------------------------------------------------------------------

    def _bump_versions(self, keyset: Any, *args: Any) -> Any:
        args = self._complete(args)
        self._count_changes(args)
        return internals.below_inplace(self.overload, keyset, args)

    def _count_changes(self, inputs: Sequence[Any]) -> None:
        for i in self.mutated:
            if inputs[i] is not None and not inputs[i].is_inference():
                torch.autograd.graph.increment_version(inputs[i])

    def _autocast(self, device: str, *args: Any) -> Any:
        """Autocast does not change how the op computes. Inputs of half precision become float32."""
        args = self._complete(args)
        with torch.autocast(device, enabled=False):
            return self.overload(*[a if i in self.mutated else widened(a) for i, a in enumerate(args)])


def refuse_transforms(name: str) -> None:
    """Raise if an autograd implementation is called under transforms of torch.func."""
    if internals.DERIVATIVES_KNOWN and internals.transforms_active():
        raise RuntimeError(
            f"{name}: with this release of torch, torch.func transforms of the op work in eager mode only. Inside "
            "torch.compile use torch.autograd.grad (docs/custom_ops.md), or leave the transform outside of the "
            "compiled function"
        )


def widened(value: Any) -> Any:
    """The value, in which tensors of half precision are converted to float32, also inside lists."""
    if isinstance(value, (list, tuple)):
        return [widened(entry) for entry in value]
    is_half = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.to(torch.float32) if is_half else value


def unpack(results: Sequence[torch.Tensor]) -> Any:
    """The return value of an op for these results: None, a tensor or a tuple."""
    if not results:
        return None
    return results[0] if len(results) == 1 else tuple(results)
