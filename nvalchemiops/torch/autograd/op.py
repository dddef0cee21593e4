"""`warp_custom_op`: a torch op from a Python body that launches Warp kernels.

One registration serves eager mode, ``torch.compile``, ``torch.export`` and function transforms. Two ways to
differentiate (docs/custom_ops.md): a tape that the body records, or another op given as ``backward``.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import warp as wp

from nvalchemiops.launch import NotDifferentiableError, active_tape, loading
from nvalchemiops.torch.autograd import tapes
from nvalchemiops.torch.autograd.arrays import is_lazy, warp_stream_from_torch
from nvalchemiops.torch.autograd.formula import Formula
from nvalchemiops.torch.autograd.functorch import transformable
from nvalchemiops.torch.autograd.naming import fingerprint, library_for
from nvalchemiops.torch.autograd.specs import OutputSpec, fill_sizes, read_parameters, split_grad_arrays
from nvalchemiops.torch.autograd.tapes import Recording
from nvalchemiops.torch.runtime._torch_internals import transforms_active
from nvalchemiops.torch.runtime.context import derivative_asked

_C = torch._C
_is_batched = _C._functorch.is_legacy_batchedtensor
_BACKENDS = (_C.DispatchKey.CPU, _C.DispatchKey.CUDA)
_AUTOGRAD_KEYS = (
    _C.DispatchKey.AutogradCPU,
    _C.DispatchKey.AutogradCUDA,
    _C.DispatchKey.AutogradOther,
    _C.DispatchKey.ADInplaceOrView,
)
_AUTOCAST_KEYS = (_C.DispatchKey.AutocastCPU, _C.DispatchKey.AutocastCUDA)

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_plain_keys: set[int] = set()
_CPU, _READY = torch.device("cpu"), object()
_profiling: Callable[[], bool] = _C._autograd._profiler_enabled

MAX_ARGUMENTS = 64
"""What torch's schemas allow; the derivative of an op takes its inputs, outputs and their gradients."""

Backward = Callable[..., Any] | Literal["tape", "none"]


def warp_custom_op(
    name: str,
    outputs: Sequence[OutputSpec],
    grad_arrays: Sequence[str] | None = None,
    mutates_args: Sequence[str] = (),
    *,
    backward: Backward = "tape",
    vmap: Callable[..., Any] | None = None,
    trusted: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Turn a function that launches Warp kernels into a torch custom op.

    The function's annotated signature becomes the op's: tensors, optional tensors, int, float, bool, str and
    sequences of int, with defaults. The result has that signature and works eagerly, in ``torch.compile`` with
    ``fullgraph=True``, in ``torch.export`` and, eagerly, under ``torch.func``. Warp's current stream is torch's
    current one while the body runs.

    Parameters
    ----------
    name : str
        ``"namespace::name"``.
    outputs : sequence of OutputSpec
        What the body returns, in order. One output is returned as a tensor, several as a tuple, none as None.
    grad_arrays : sequence of str, optional
        Names of the differentiable outputs, then of the differentiable inputs. By default all outputs and all
        tensor inputs except index-like names (``neighbor_list``, ``batch_idx``, ...), mutated ones and, at run
        time, integer and bool tensors. An empty sequence: nothing is differentiable, and outputs carry no graph.
        Only outputs: an op without gradients, as by ``backward="none"``.
    mutates_args : sequence of str, optional
        Inputs that the body writes in place. They are never differentiable.
    backward : "tape", "none" or callable, optional
        How to differentiate. ``"tape"`` (default): the body records a ``wp.Tape`` when ``needs_grad`` says so and
        hands it over with `attach_for_backward`; one order. A callable: another op, or a function composed of ops
        and torch operations. Its parameters are bound by name: any input's name, any output's name,
        ``grad_<output>`` for incoming gradients (zeros when none arrives, or None if annotated ``Tensor | None``),
        ``wanted`` for the names of the inputs whose gradients will be read (those of others may be left out), and
        ``inputs`` and ``gradients`` for all inputs and all incoming gradients (or None) by name.
        An op's outputs must be called ``grad_<input>``; a function returns a tuple in the order of the
        differentiable inputs, or a dict by input name. Such ops keep no state and differentiate as often as the
        backward does. ``"none"``: asking for a derivative raises; for the last op of such a chain.
    vmap : callable, optional
        Rule for ``torch.func.vmap`` of an op with explicit backward, ``vmap(info, in_dims, *args) -> (outputs,
        out_dims)`` as in ``torch.autograd.Function.vmap``, all inputs given. By default slices run one by one.
    trusted : bool, optional
        Do not compare what the body of an op without a tape returns with ``outputs`` in each call. For an op whose
        tests do so (``torch.library.opcheck``) and for which ten microseconds matter.

    Returns
    -------
    callable
        A decorator. The decorated function has an attribute ``op``, the `WarpOp`.

    Raises
    ------
    TypeError
        Unannotated or unsupported parameters, names of inputs that are no tensors.
    ValueError
        Unknown or duplicate names, an output called like an input, a name that is taken.

    Notes
    -----
    Tensor inputs reach the body contiguous (a copy is made of others, except of mutated ones), on one device,
    with ``requires_grad`` set exactly where a gradient will be wanted. Outputs are checked against ``outputs``.
    Changing a saved input in place before the backward pass is an error, as everywhere in torch.

    Examples
    --------
    >>> @warp_custom_op("demo::square", outputs=[OutputSpec("y", wp.float64, lambda x: x.shape)])
    ... def square(x: torch.Tensor) -> torch.Tensor:
    ...     y = torch.empty_like(x)
    ...     track = needs_grad(x)
    ...     x_array = warp_from_torch(x, wp.float64)
    ...     y_array = warp_from_torch(y, wp.float64, requires_grad=track)
    ...     with WarpAutogradContextManager(track) as tape:
    ...         wp.launch(square_kernel, dim=x.shape[0], inputs=[x_array], outputs=[y_array])
    ...     if track:
    ...         attach_for_backward(y, tape, x=x_array, y=y_array)
    ...     return y
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., Any]:
        op = WarpOp(body, name, outputs, grad_arrays, mutates_args, backward, vmap)
        op.trusted = trusted and not op.recorded
        return op.public

    return decorate


class WarpOp:
    """One registered op: its schema, its implementations for each dispatch key, and its public function.

    Attributes
    ----------
    name, registered : str
        As given, and as registered: with a number, if the same definition ran before.
    parameters, outputs : tuple
        As declared.
    public : callable
        The function that users call.
    overload : torch._ops.OpOverload
        The registered op, with hidden trailing arguments and, for a tape op, the token as a last output.
    """

    def __init__(
        self,
        body: Callable[..., Any],
        name: str,
        outputs: Sequence[OutputSpec],
        grad_arrays: Sequence[str] | None = None,
        mutates_args: Sequence[str] = (),
        backward: Backward = "tape",
        vmap: Callable[..., Any] | None = None,
        identity: str = "",
    ) -> None:
        namespace, separator, short = name.partition("::") if isinstance(name, str) else ("", "", "")
        if not (separator and namespace.isidentifier() and short.isidentifier()):
            raise ValueError(f"`name` must be 'namespace::name' with two identifiers, got {name!r}")
        self.name = name
        self.body = body
        self.parameters = read_parameters(body, name)
        self.outputs = tuple(outputs)
        self._check_names(mutates_args)
        if len(self.parameters) + 2 * len(self.outputs) + 4 > MAX_ARGUMENTS:
            raise ValueError(
                f"{name}: {len(self.parameters)} parameters and {len(self.outputs)} outputs are more than a torch op "
                f"and its derivative can have ({MAX_ARGUMENTS} arguments); stack some of them"
            )
        self.mutated = tuple(i for i, p in enumerate(self.parameters) if p.name in mutates_args)
        self.tensors = tuple(i for i, p in enumerate(self.parameters) if p.is_tensor)
        self.diff_outputs, self.diff_inputs = split_grad_arrays(
            grad_arrays, self.parameters, self.outputs, tuple(mutates_args), name
        )
        if self.diff_outputs and not self.diff_inputs:
            if callable(backward):
                raise ValueError(f"{name}: `backward` has nothing to give: `grad_arrays` names outputs only")
            # an op without gradients: whoever asks for one is told so
            backward = "none"
            self.diff_inputs = split_grad_arrays(None, self.parameters, self.outputs, tuple(mutates_args), name)[1]
            self.diff_outputs = self.diff_outputs if self.diff_inputs else ()
        self._diff_names = [self.outputs[i].name for i in self.diff_outputs]
        self._bits = {i: bit for bit, i in enumerate(self.diff_inputs)}
        if backward not in ("tape", "none") and not callable(backward):
            raise TypeError(f"{name}: `backward` must be 'tape', 'none' or a callable, got {backward!r}")
        self.backward = backward
        self.differentiable = bool(self.diff_outputs)
        self.recorded = backward == "tape" and self.differentiable
        self._formula = Formula(self, backward) if callable(backward) else None
        self.identity = fingerprint(body, backward, self.outputs, identity)
        self._loaded: set[tuple[torch.device, bool]] = set()
        self.trusted = False
        self._register()
        self.public = self._make_public(vmap)

    def _check_names(self, mutates_args: Sequence[str]) -> None:
        names = [p.name for p in self.parameters]
        seen: set[str] = set()
        for spec in self.outputs:
            if not isinstance(spec, OutputSpec):
                raise TypeError(f"{self.name}: `outputs` must hold OutputSpec, got {spec!r}")
            if spec.name in names:
                raise ValueError(f"{self.name}: output '{spec.name}' has the name of an input")
            if spec.name in seen:
                raise ValueError(f"{self.name}: two outputs are called '{spec.name}'")
            seen.add(spec.name)
        if isinstance(mutates_args, str):
            raise TypeError(f"{self.name}: `mutates_args` must be a sequence of names, got a string")
        for name in mutates_args:
            if name not in names:
                raise ValueError(f"{self.name}: `mutates_args` names '{name}', which is no input")
            if not self.parameters[names.index(name)].is_tensor:
                raise TypeError(f"{self.name}: `mutates_args` names '{name}', which is no tensor")

    # -- registration -----------------------------------------------------------------------------

    def _register(self) -> None:
        library, short = library_for(self.name, self.body)
        self.registered = f"{library.ns}::{short}"
        count = len(self.parameters)
        # in a schema, as in Python, nothing without a default follows a default
        without = max((i for i, p in enumerate(self.parameters) if not p.has_literal), default=-1)
        declared = [
            p.declaration(i in self.mutated, f"a{i}", with_default=i > without) for i, p in enumerate(self.parameters)
        ]
        hidden = ["int _record=0"] if self.recorded else []
        # the identity makes compile caches tell two releases of an op apart
        hidden.append("int _identity=0")
        returns = ["Tensor"] * (len(self.outputs) + self.recorded)
        library.define(f"{short}({', '.join([*declared, *hidden])}) -> {_returns(returns)}")
        self.overload = getattr(getattr(torch.ops, library.ns), short).default
        # the dispatcher drops trailing arguments that equal their defaults
        self._defaults = tuple(None if p.required else p.default for p in self.parameters) + (0,) * len(hidden)
        self._count = count
        library.impl(short, self._run, "CompositeExplicitAutograd")
        library._register_fake(short, self._fake)
        library.impl(short, self._autograd, "Autograd", with_keyset=True)
        if self.mutated:
            library.impl(short, self._bump_versions, "ADInplaceOrView", with_keyset=True)
        for device in ("CPU", "CUDA"):
            library.impl(short, functools.partial(self._autocast, device), f"Autocast{device}")
        if self.recorded:
            self._register_backward(library, short)
        self._function = self._make_function()

    def _register_backward(self, library: Any, short: str) -> None:
        short = f"{short}__tape_backward"  # a name that nobody gives to an op of their own
        declared = ["Tensor _token"]
        for i, p in enumerate(self.parameters):
            kind = "Tensor?" if i in self.mutated else p.schema_type
            declared.append(f"{kind} {p.name}")
        declared += [f"Tensor? _output_{o.name}" for o in self.outputs]
        declared += [f"Tensor? _grad_{self.outputs[i].name}" for i in self.diff_outputs]
        declared += ["int _record", "int _identity"]
        library.define(f"{short}({', '.join(declared)}) -> {_returns(['Tensor'] * len(self.diff_inputs))}")
        self.backward_overload = getattr(getattr(torch.ops, library.ns), short).default
        library.impl(short, self._run_backward, "CompositeExplicitAutograd")
        library._register_fake(short, self._fake_backward)
        library.impl(short, self._autograd_backward, "Autograd", with_keyset=True)
        self._call_backward = transformable(
            short,
            self.backward_overload,
            lambda inputs, outputs, cotangents, needed: self._refuse_second_order(),
            range(len(self.diff_inputs)),
            orders=0,
        )

    @property
    def orders(self) -> float:
        """How many derivatives the op has, as far as is known: a backward that is a function may have any number."""
        if self.recorded:
            return 1
        if self._formula is None:
            return 0
        backward = getattr(self.backward, "op", None)
        return 1 + backward.orders if isinstance(backward, WarpOp) else math.inf

    def _make_public(self, vmap: Callable[..., Any] | None) -> Callable[..., Any]:
        count = len(self.outputs)
        hidden = (0, self.identity) if self.recorded else (self.identity,)
        self._transformed: Callable[..., Any] = self._refuse_transforms
        if not self.mutated:
            self._transformed = transformable(
                self.name.replace("::", "_"),
                self._call_with_identity,
                self._pullback,
                self.diff_outputs,
                vmap,
                self.orders,
            )
        names = [p.name for p in self.parameters]
        signature = [p.name if p.required else f"{p.name}=_default_{p.name}" for p in self.parameters]
        values = {f"_default_{p.name}": p.default for p in self.parameters if not p.required}
        values |= {
            "_compiling": torch.compiler.is_compiling,
            "_derivative_asked": derivative_asked,
            "_transformed": self._transformed,
            "_op": self.overload,
            "_eager": self.overload if self.mutated else self._call_eagerly,
        }
        if self.recorded:
            result = "_result[0]" if count == 1 else f"_result[:{count}]"
        else:
            result = "_result"
        function = self.body.__name__ if self.body.__name__.isidentifier() else "op"
        source = f"""
def _make({", ".join(values)}):
    def {function}({", ".join(signature)}):
        if _compiling():
            _result = _op({", ".join([*names, *map(str, hidden)])})
        elif _derivative_asked():
            _result = _transformed({", ".join(names)})
        else:
            _result = _eager({", ".join([*names, *map(str, hidden)])})
        return {result}
    return {function}
"""
        scope: dict[str, Any] = {}
        exec(compile(source, f"<op {self.name}>", "exec"), scope)
        public = functools.wraps(self.body)(scope["_make"](**values))
        public.op = self  # type: ignore[attr-defined]
        return public

    def _refuse_transforms(self, *args: Any) -> Any:
        raise RuntimeError(
            f"{self.name} writes into its arguments, which torch.func transforms and forward mode cannot follow: call "
            "it outside of them"
        )

    def _call_with_identity(self, *args: Any) -> Any:
        if self.recorded:
            # under a transform every differentiable input may be wanted, at whatever level
            return self.overload(*args, self._record_everything(args), self.identity)
        return self.overload(*args, self.identity)

    def _call_eagerly(self, *args: Any) -> Any:
        """What the dispatcher would do for plain tensors, if nobody watches: at half its cost for many arguments."""
        if _C._len_torch_dispatch_stack() or _C._is_any_autocast_enabled() or _profiling() or _C._get_tracing_state():
            return self.overload(*args)
        record, device, ready = 0, None, True
        for i in self.tensors:
            tensor = args[i]
            if tensor is None:
                continue
            if type(tensor) not in _PLAIN_TYPES or _C._dispatch_keys(tensor).raw_repr() not in _plain_keys:
                return self._call_unusual(*args)
            if tensor.requires_grad and i in self._bits:
                record |= 1 << self._bits[i]
            if not tensor.is_contiguous():
                ready = False
            if device is None:
                device = tensor.device
            elif tensor.device != device:
                ready = False
        ready = ready and self.trusted and device == _CPU and active_tape() is None
        if record and torch.is_grad_enabled():
            return self._function.apply(_READY if ready else None, record, *args)
        with _C._AutoDispatchBelowAutograd():
            return self._run_ready(*args) if ready else self._run(*args)

    def _run_ready(self, *args: Any) -> Any:
        """What `_run` does for a trusted op on the CPU if nothing is left to prepare."""
        return self._run_body(args[: self._count], _CPU, False)

    def _call_unusual(self, *args: Any) -> Any:
        if not _plain_keys or (torch.cuda.is_initialized() and len(_plain_keys) == 1):
            # what tensors without any peculiarity look like to the dispatcher
            devices = ["cpu"] + ["cuda"] * torch.cuda.is_initialized()
            with torch.inference_mode(False):  # whose tensors are not plain
                _plain_keys.update(_C._dispatch_keys(torch.empty(0, device=device)).raw_repr() for device in devices)
        return self.overload(*args)

    # -- running the body -------------------------------------------------------------------------

    def _complete(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return args if len(args) == len(self._defaults) else args + self._defaults[len(args) :]

    def _device(self, inputs: Sequence[Any]) -> torch.device:
        first = None
        for i in self.tensors:
            tensor = inputs[i]
            if tensor is None:
                continue
            if tensor.layout is not torch.strided:
                raise TypeError(
                    f"{self.name}: `{self.parameters[i].name}` has layout {tensor.layout}; kernels need torch.strided: "
                    "call .to_dense() first"
                )
            device = tensor.device
            if first is None:
                first, at = device, i
            elif device != first:
                raise ValueError(
                    f"{self.name}: `{self.parameters[i].name}` is on {device}, but `{self.parameters[at].name}` is "
                    f"on {first}; move one of them"
                )
        return torch.device("cpu") if first is None else first

    def _run(self, *args: Any) -> Any:
        args = self._complete(args)
        inputs = args[: self._count]
        device = self._device(inputs)
        if self.mutated:
            self._refuse_overlap(inputs)
        if self.differentiable and active_tape() is not None:
            raise NotDifferentiableError(
                f"{self.name} was called inside a recording, whose gradient would miss it: launch its kernels there, "
                "or call it outside"
            )
        if self.recorded:
            record = args[self._count]
            if record:
                results, recording = self._record(inputs, record, device)
                return (*results, tapes.keep(recording))
            results, _, _ = self._call_body(inputs, self._prepare(inputs, 0), device, False)
            return (*results, tapes.new_token())
        results, _, _ = self._call_body(inputs, self._prepare(inputs, 0), device, False)
        return _unpack(results)

    def _refuse_overlap(self, inputs: Sequence[Any]) -> None:
        """A body that writes into memory which it reads as another input depends on the order of its threads."""
        for i in self.mutated:
            if inputs[i] is None or not inputs[i].numel():
                continue
            low, high = _memory_range(inputs[i])
            for k in self.tensors:
                other = inputs[k]
                if k == i or other is None or not other.numel():
                    continue
                other_low, other_high = _memory_range(other)
                if low < other_high and other_low < high:
                    raise ValueError(
                        f"{self.name}: `{self.parameters[i].name}` is written in place and overlaps "
                        f"`{self.parameters[k].name}` in memory: pass a tensor of its own"
                    )

    def _prepare(self, inputs: Sequence[Any], record: int) -> list[Any]:
        prepared = list(inputs)
        for i in self.tensors:
            tensor = prepared[i]
            if tensor is None:
                continue
            if tensor.requires_grad:
                tensor = tensor.detach()
            if i not in self.mutated and not tensor.is_contiguous():
                tensor = tensor.contiguous()
            track = record and i in self._bits and record >> self._bits[i] & 1
            prepared[i] = tensor.requires_grad_() if track else tensor
        return prepared

    def _record(self, inputs: Sequence[Any], record: int, device: torch.device) -> tuple[list[torch.Tensor], Recording]:
        # Aliases, because one tensor passed in two places needs two gradients; or copies, for a body that mutates its
        # arguments and may overwrite what its own tape reads.
        own = bool(self.mutated)
        worked = list(inputs)
        for i in self.tensors:
            if inputs[i] is not None:
                worked[i] = inputs[i].clone() if own else inputs[i].detach()
        with _autograd_inside(), torch.enable_grad():
            results, found, arrays = self._call_body(worked, self._prepare(worked, record), device, True)
        for i in self.mutated:
            if inputs[i] is not None:
                inputs[i].copy_(worked[i])
        recording = Recording(found, arrays, [worked[i] for i in self.tensors], results, own)
        # The recording keeps the body's own tensors. Returned themselves, they would get a graph that keeps the
        # recording: a cycle through C++ that Python never collects.
        return [r.detach() for r in results], recording

    def _run_body(self, prepared: Sequence[Any], device: torch.device, tracked: bool) -> Any:
        # bodies launch as they like, so the first call of each kind (with gradients the kernels may be others) is alone
        kind = (device, tracked)
        if kind in self._loaded:
            return self.body(*prepared)
        with loading():
            result = self.body(*prepared)
        self._loaded.add(kind)
        return result

    def _call_body(
        self, inputs: Sequence[Any], prepared: Sequence[Any], device: torch.device, tracked: bool
    ) -> tuple[list[torch.Tensor], list[wp.Tape], dict[str, wp.array]]:
        if device.type == "cuda":
            with torch.cuda.device(device), warp_stream_from_torch(device):
                result = self._run_body(prepared, device, tracked)
        else:
            result = self._run_body(prepared, device, tracked)
        if self.trusted:
            return list(result) if isinstance(result, tuple) else [result], [], {}
        return self._check_outputs(result, inputs, prepared, device)

    def _check_outputs(
        self, result: Any, inputs: Sequence[Any], prepared: Sequence[Any], device: torch.device
    ) -> tuple[list[torch.Tensor], list[wp.Tape], dict[str, wp.array]]:
        specs = self.outputs
        if not specs:
            if result is not None:
                raise ValueError(f"{self.name}: the body returned {type(result).__name__}, but no output is declared")
            return [], [], {}
        if isinstance(result, torch.Tensor):
            result = (result,)
        if not isinstance(result, (tuple, list)) or len(result) != len(specs):
            got = len(result) if isinstance(result, (tuple, list)) else repr(type(result).__name__)
            names = ", ".join(f"'{s.name}'" for s in specs)
            raise ValueError(f"{self.name}: the body returned {got} outputs, but {len(specs)} are declared: {names}")
        owners: dict[int, Any] = {}
        for i in self.tensors:
            if inputs[i] is not None and inputs[i].numel():
                owners[inputs[i].untyped_storage().data_ptr()] = self.parameters[i]
                if prepared[i] is not inputs[i]:
                    owners[prepared[i].untyped_storage().data_ptr()] = self.parameters[i]
        found: list[wp.Tape] = []
        arrays: dict[str, wp.array] = {}
        results = []
        sizes: dict[str, int] = {}
        for spec, output in zip(specs, result, strict=True):
            if not isinstance(output, torch.Tensor):
                raise TypeError(f"{self.name}: output '{spec.name}' is {type(output).__name__}, not a tensor")
            shape, dtype = spec.resolve(inputs)
            if output.shape != shape and len(shape) == output.ndim:
                shape = fill_sizes(shape, sizes, output.size)
            if output.shape != shape or output.dtype is not dtype or output.device != device:
                raise ValueError(
                    f"{self.name}: output '{spec.name}' has shape {tuple(output.shape)}, {output.dtype}, on "
                    f"{output.device}; its OutputSpec says {shape}, {dtype}, on {device}"
                )
            if output.numel():
                address = output.untyped_storage().data_ptr()
                if address in owners:
                    raise ValueError(
                        f"{self.name}: output '{spec.name}' shares memory with '{owners[address].name}': return a copy"
                    )
                owners[address] = spec
            if output.__dict__:
                tape, attached = tapes.detach_all(output)
                if tape is not None and not any(tape is t for t in found):
                    found.append(tape)
                arrays |= attached
            if output.requires_grad:
                output = output.detach()
            results.append(output if output.is_contiguous() else output.contiguous())
        return results, found, arrays

    def _run_backward(self, *args: Any) -> Any:
        token, rest = args[0], args[1:]
        inputs = list(rest[: self._count])
        cotangents = rest[self._count + len(self.outputs) : -2]
        record = args[-2]
        recording = tapes.find(token)
        device = self._device(inputs)
        outputs = rest[self._count : self._count + len(self.outputs)]
        if recording is None or not recording.is_fresh([inputs[i] for i in self.tensors], outputs):
            if self.mutated:
                raise RuntimeError(
                    f"{self.name}: the recorded execution is gone, and an op that mutates its arguments cannot be "
                    "run again for its backward pass"
                )
            _, recording = self._record(inputs, record, device)
        wanted = [(self.parameters[i].name, inputs[i]) for bit, i in enumerate(self.diff_inputs) if record >> bit & 1]
        found = tapes.gradients_of(recording, dict(zip(self._diff_names, cotangents)), wanted, self.name)
        given = iter(found)
        return _unpack(
            [
                next(given) if record >> bit & 1 else torch.empty(0, device=device)
                for bit in range(len(self.diff_inputs))
            ]
        )

    # -- fakes ------------------------------------------------------------------------------------

    def _fake(self, *args: Any) -> Any:
        args = self._complete(args)
        inputs = args[: self._count]
        device = self._device(inputs)
        results = []
        sizes: dict[str, Any] = {}
        for spec in self.outputs:
            shape, dtype = spec.resolve(inputs)
            shape = fill_sizes(shape, sizes, lambda _: torch.library.get_ctx().new_dynamic_size())
            results.append(torch.empty(shape, dtype=dtype, device=device))
        if self.recorded:
            return (*results, torch.empty(1, dtype=torch.int64, device="cpu"))
        return _unpack(results)

    def _fake_backward(self, *args: Any) -> Any:
        inputs, record = args[1:], args[-2]
        device = self._device(inputs)
        return _unpack(
            [
                torch.empty(inputs[i].shape, dtype=inputs[i].dtype, device=device)
                if record >> bit & 1
                else torch.empty(0, device=device)
                for bit, i in enumerate(self.diff_inputs)
            ]
        )

    # -- autograd ---------------------------------------------------------------------------------

    def _wanted(self, inputs: Sequence[Any]) -> int:
        record = 0
        for bit, i in enumerate(self.diff_inputs):
            tensor = inputs[i]
            if tensor is not None and tensor.requires_grad:
                record |= 1 << bit
        return record

    def _record_everything(self, inputs: Sequence[Any]) -> int:
        record = 0
        for bit, i in enumerate(self.diff_inputs):
            if inputs[i] is not None and inputs[i].is_floating_point():
                record |= 1 << bit
        return record

    def _autograd(self, keyset: Any, *args: Any) -> Any:
        if transforms_active():
            raise RuntimeError(
                f"{self.name}: torch.func transforms of this op work in eager mode only. Inside torch.compile use "
                "torch.autograd.grad (docs/custom_ops.md), or leave the transform outside of the compiled function"
            )
        args = self._complete(args)
        if torch.is_grad_enabled():
            for i in self.mutated:
                if args[i] is not None and args[i].requires_grad:
                    raise ValueError(
                        f"{self.name}: `{self.parameters[i].name}` is written in place, so it cannot require a "
                        "gradient: pass a detached tensor"
                    )
            record = self._wanted(args)
            if record:
                return self._function.apply(keyset, record, *args)
        return _below_autograd(self.overload, self._run, keyset, args)

    def _make_function(self) -> Any:
        op = self

        def forward(ctx: Any, keyset: Any, record: int, *args: Any) -> Any:
            inputs = args[: op._count]
            if op.recorded:
                args = (*inputs, record, args[-1])
            if keyset is _READY:
                with _C._AutoDispatchBelowAutograd():
                    result = op._run_ready(*args)
            else:
                result = _below_autograd(op.overload, op._run, keyset, args)
            result = tuple(map(_no_view, result)) if isinstance(result, tuple) else _no_view(result)
            outputs = result if isinstance(result, tuple) else (result,)
            ctx.set_materialize_grads(False)
            fixed = [o for i, o in enumerate(outputs) if i not in op.diff_outputs or not o.is_floating_point()]
            if fixed:
                ctx.mark_non_differentiable(*fixed)
            ctx.record, ctx.identity = record, args[-1]
            if op.recorded:
                op._save_for_tape(ctx, inputs, outputs)
            elif op._formula is not None:
                op._formula.save(ctx, inputs, outputs)
            return result

        def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[Any, ...]:
            if all(c is None for c in cotangents):
                return (None,) * (2 + len(op._defaults))
            if op.recorded:
                token, inputs, outputs = op._saved_for_tape(ctx)
                gradients = op._tape_pullback(token, inputs, outputs, cotangents, ctx.record, ctx.identity)
            elif op._formula is not None:
                inputs, outputs, shapes = op._formula.restore(ctx)
                gradients = op._formula(inputs, outputs, cotangents, shapes, ctx.record)
            else:
                raise op._no_derivative()
            return (None, None, *gradients, *(None,) * (len(op._defaults) - op._count))

        name = self.name.replace("::", "_")
        return type(
            name,
            (torch.autograd.Function,),
            {"forward": staticmethod(forward), "backward": staticmethod(backward)},
        )

    def _save_for_tape(self, ctx: Any, inputs: Sequence[Any], outputs: Sequence[torch.Tensor]) -> None:
        # Eagerly, torch guards the saved inputs against changes, and the recording itself notices a changed
        # output. A compiled graph overwrites any buffer that nobody needs any more, without a trace: there the
        # outputs, which the tape reads, must be inputs of the backward op too.
        traced = type(outputs[0]) is not torch.Tensor
        tensors = [None if i in self.mutated else inputs[i] for i in self.tensors]
        ctx.save_for_backward(outputs[-1], *tensors, *(outputs[:-1] if traced else ()))
        ctx.plain = [a for i, a in enumerate(inputs) if i not in self.tensors]

    def _saved_for_tape(self, ctx: Any) -> tuple[torch.Tensor, list[Any], list[Any]]:
        token, *saved = ctx.saved_tensors
        tensors, plain = iter(saved[: len(self.tensors)]), iter(ctx.plain)
        inputs = [next(tensors) if i in self.tensors else next(plain) for i in range(self._count)]
        outputs = saved[len(self.tensors) :] or [None] * len(self.outputs)
        return token, inputs, outputs

    def _tape_pullback(
        self,
        token: torch.Tensor,
        inputs: Sequence[Any],
        outputs: Sequence[torch.Tensor | None],
        cotangents: Sequence[torch.Tensor | None],
        record: int,
        identity: int,
    ) -> list[torch.Tensor | None]:
        given = [cotangents[i] for i in self.diff_outputs]
        call: Callable[..., Any]
        if torch.compiler.is_compiling():
            call = self.backward_overload
        elif (
            type(token) is not torch.Tensor
            or torch.is_grad_enabled()
            or transforms_active()
            or _C._len_torch_dispatch_stack()
            # autograd.grad(..., is_grads_batched=True) brings batched tensors without a transform
            or any(g is not None and _is_batched(g) for g in given)
            # tensors that torch resolves on the way through its dispatcher
            or any(isinstance(t, torch.Tensor) and (is_lazy(t) or t.is_meta) for t in inputs)
        ):
            call = self._call_backward
        else:
            call = self._run_backward  # plain tensors, and nobody watches
        found = call(token, *inputs, *outputs, *given, record, identity)
        found = found if isinstance(found, tuple) else (found,)
        gradients: list[torch.Tensor | None] = [None] * self._count
        for bit, i in enumerate(self.diff_inputs):
            if record >> bit & 1:
                gradients[i] = found[bit]
        return gradients

    def _pullback(
        self,
        inputs: Sequence[Any],
        outputs: Sequence[torch.Tensor],
        cotangents: Sequence[torch.Tensor | None],
        needed: Sequence[bool],
    ) -> tuple[Any, ...]:
        """The vector-Jacobian product under function transforms."""
        record = self._record_everything(inputs)
        if self.recorded:
            nothing = [None] * len(self.outputs)
            return tuple(self._tape_pullback(outputs[-1], inputs, nothing, cotangents, record, self.identity))
        if self._formula is not None:
            shapes = [(o.shape, o.dtype, o.device) for o in outputs]
            record &= sum(1 << bit for bit, i in enumerate(self.diff_inputs) if needed[i])
            return tuple(self._formula(inputs, outputs, cotangents, shapes, record))
        raise self._no_derivative()

    def _no_derivative(self) -> NotDifferentiableError:
        return NotDifferentiableError(
            f"{self.name} has no derivative: it was declared with backward='none', as the last of a chain of "
            "derivatives. Give it a backward, or ask for one order less"
        )

    def _refuse_second_order(self) -> Any:
        raise NotDifferentiableError(
            f"{self.name}: a second derivative was asked for, but this op differentiates through a Warp tape, which "
            "gives one order. Ways out: return the first derivative (forces, dE/dq) as an output of the op and "
            "differentiate that, or give the op an explicit backward: warp_custom_op(..., backward=...)"
        )

    def _autograd_backward(self, keyset: Any, *args: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            return self._second_order.apply(keyset, *args)
        return _below_autograd(self.backward_overload, self._run_backward, keyset, args)

    @functools.cached_property
    def _second_order(self) -> Any:
        op = self

        class SecondOrder(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, keyset: Any, *args: Any) -> Any:
                return _below_autograd(op.backward_overload, op._run_backward, keyset, args)

            @staticmethod
            def backward(ctx: Any, *cotangents: Any) -> Any:
                return op._refuse_second_order()

        SecondOrder.__name__ = self.name.replace("::", "_") + "_backward"
        return SecondOrder

    # -- other dispatch keys ----------------------------------------------------------------------

    def _bump_versions(self, keyset: Any, *args: Any) -> Any:
        complete = self._complete(args)
        for i in self.mutated:
            if complete[i] is not None:
                torch.autograd.graph.increment_version(complete[i])
        with _C._AutoDispatchBelowADInplaceOrView():
            return self.overload.redispatch(keyset & _C._after_ADInplaceOrView_keyset, *complete)

    def _autocast(self, device: str, *args: Any) -> Any:
        """Under autocast the op computes as without: half precision inputs widen, the rest stays."""
        half = (torch.float16, torch.bfloat16)
        widened = [
            a.to(torch.float32) if isinstance(a, torch.Tensor) and a.dtype in half and i not in self.mutated else a
            for i, a in enumerate(self._complete(args))
        ]
        key = _AUTOCAST_KEYS[device != "CPU"]
        with _C._ExcludeDispatchKeyGuard(_C.DispatchKeySet(key)):
            return self.overload(*widened)


def _autograd_inside() -> Any:
    """Switch autograd back on in the implementation of an op, and autocast off.

    Then torch itself knows, for the body's arguments and for whatever is derived from them, what requires grad.
    """
    exclude = _C._dispatch_tls_local_exclude_set()
    bits = exclude.raw_repr()
    if bits not in _without_autograd:
        for key in _AUTOGRAD_KEYS:
            exclude = exclude.remove(key)
        for key in _AUTOCAST_KEYS:
            exclude = exclude.add(key)
        _without_autograd[bits] = exclude
    return _C._ForceDispatchKeyGuard(_C._dispatch_tls_local_include_set(), _without_autograd[bits])


_without_autograd: dict[int, Any] = {}


def _below_autograd(overload: Any, implementation: Callable[..., Any], keyset: Any, args: tuple[Any, ...]) -> Any:
    """Continue a dispatch below autograd; straight to the implementation if no mode or tracer wants to see the call."""
    with _C._AutoDispatchBelowAutograd():
        if keyset is None:  # called past the dispatcher
            return implementation(*args)
        keyset = keyset & _C._after_autograd_keyset
        if keyset.highestPriorityTypeId() in _BACKENDS:
            return implementation(*args)
        return overload.redispatch(keyset, *args)


def _no_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that is no view: autograd forbids to change an output in place that is one."""
    if not tensor._is_view():
        return tensor
    with _C._AutoDispatchBelowADInplaceOrView():
        return tensor.detach()


def _memory_range(tensor: torch.Tensor) -> tuple[int, int]:
    low = tensor.data_ptr()
    reach = sum(step * (length - 1) for step, length in zip(tensor.stride(), tensor.shape))
    return low, low + (reach + 1) * tensor.element_size()


def _unpack(results: Sequence[torch.Tensor]) -> Any:
    if not results:
        return None
    return results[0] if len(results) == 1 else tuple(results)


def _returns(kinds: Sequence[str]) -> str:
    return kinds[0] if len(kinds) == 1 else f"({', '.join(kinds)})"
