"""Single Warp kernels as torch functions, which allocate the outputs, launch the kernel, and may be differentiable.

For an op that launches several kernels use `nvalchemiops.torch.autograd.warp_custom_op`.
"""

import hashlib
import inspect
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import warp as wp

from nvalchemiops._warp_internals import parameters as parameters_of
from nvalchemiops.launch import has_adjoint, is_gather_only
from nvalchemiops.locks import fork_safe
from nvalchemiops.torch.autograd import OutputSpec, WarpOp
from nvalchemiops.torch.autograd.declaration import Backward, declare
from nvalchemiops.torch.autograd.naming import value_identity
from nvalchemiops.torch.autograd.op import unpack
from nvalchemiops.torch.autograd.specs import like
from nvalchemiops.torch.launch import launch, launch_adjoint
from nvalchemiops.torch.runtime._torch_internals import assume_constant
from nvalchemiops.torch.runtime.releases import CONSTANTS_FROM_OBJECTS
from nvalchemiops.torch.types import Tensors
from nvalchemiops.types import SCALARS, inner_shape, is_warp_dtype, scalar_type

Dim = int | Sequence[int] | Callable[..., Any] | None

NAMESPACE = "nvalchemiops_kernels"

__all__ = [
    "any_torch_tensors",
    "call_kernel",
    "call_kernel_via_torch",
    "call_kernel_via_torch_compile",
    "differentiable_kernel",
    "extract_input_shapes",
    "get_or_register_torch_op",
    "is_torch_tensor",
]


def is_torch_tensor(value: Any) -> bool:
    """True for a torch tensor."""
    return isinstance(value, torch.Tensor)


def any_torch_tensors(*values: Any) -> bool:
    """True if any value is a torch tensor, or a list or tuple that holds one."""
    return any(any_torch_tensors(*v) if isinstance(v, (list, tuple)) else is_torch_tensor(v) for v in values)


def extract_input_shapes(*inputs: Any) -> tuple[tuple[int, ...] | None, ...]:
    """The shape of each tensor or Warp array among the inputs, None for anything else."""
    return tuple(tuple(v.shape) if isinstance(v, (torch.Tensor, wp.array)) else None for v in inputs)


def call_kernel(kernel: wp.Kernel, *inputs: Any, outputs: Sequence[OutputSpec], dim: Dim = None) -> Tensors:
    """Allocate the outputs (zero-filled), launch ``kernel`` on torch's current stream, return the outputs.

    Parameters
    ----------
    kernel : wp.Kernel
        Its parameters are the inputs, then the outputs.
    *inputs
        Tensors and numbers in the kernel's order. Tensors may be strided if they can be viewed as the array's elements.
    outputs : sequence of OutputSpec
    dim : int, sequence of int or callable of the inputs, optional
        Launch grid. By default one thread for each element of the first output.

    Raises
    ------
    ValueError
        If an input requires a gradient while gradients are enabled: this function is not differentiable. Use
        `differentiable_kernel`, or detach the input. Also if an output has the name of another one's parameter.
    """
    if torch.is_grad_enabled():
        for position, value in enumerate(inputs):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                raise ValueError(
                    f"call_kernel: input {position} of kernel '{kernel.key}' requires a gradient, but call_kernel "
                    "gives none: use differentiable_kernel(kernel), or pass tensor.detach()"
                )
    call = _Call(kernel, tuple(outputs), dim)
    call.check_names(call.last)
    return call.run(inputs)


def get_or_register_torch_op(
    kernel: wp.Kernel, outputs: Sequence[OutputSpec], *, dim: Dim = None, differentiable: bool = False
) -> Callable[..., Any]:
    """The torch op of a kernel and its output specs. The first call registers it, later calls return the same op.

    Parameters
    ----------
    kernel, outputs, dim
        As for `call_kernel`. Functions count as equal if their code and closures are equal.
    differentiable : bool, optional
        False: a request for a derivative raises. True: the backward pass launches the kernel's Warp adjoint, which
        gives first derivatives.

    Returns
    -------
    callable
        Takes the kernel's inputs under their own names, in eager mode and inside ``torch.compile``. Get it once,
        outside of the compiled function.
    """
    return _single_op(_Call(kernel, tuple(outputs), dim), differentiable).public


def call_kernel_via_torch(kernel: wp.Kernel, *inputs: Any, outputs: Sequence[OutputSpec], dim: Dim = None) -> Tensors:
    """Launch ``kernel`` in eager mode, differentiable by its Warp adjoint. Arguments as for `call_kernel`."""
    result: Tensors = get_or_register_torch_op(kernel, outputs, dim=dim, differentiable=has_adjoint(kernel))(*inputs)
    return result


def call_kernel_via_torch_compile(
    kernel: wp.Kernel, *inputs: Any, outputs: Sequence[OutputSpec], dim: Dim = None
) -> Tensors:
    """Launch ``kernel`` from inside ``torch.compile(fullgraph=True)``, differentiable by its Warp adjoint.

    Arguments are those of `call_kernel`. ``outputs`` and a callable ``dim`` must be defined outside of the compiled
    function, for example at module level, because the op is looked up while tracing. This needs torch 2.12 or newer.
    """
    if torch.compiler.is_compiling() and not CONSTANTS_FROM_OBJECTS:
        raise RuntimeError(
            "call_kernel_via_torch_compile needs torch 2.12 or newer inside of torch.compile: call the op that "
            "get_or_register_torch_op returns outside of it"
        )
    name, identity = _op_while_tracing(kernel, dim, *outputs).split()
    op = getattr(torch.ops.nvalchemiops_kernels, name).default
    result: Tensors = op(*inputs, int(identity))
    return result


@assume_constant
def _op_while_tracing(kernel: wp.Kernel, dim: Dim, *outputs: OutputSpec) -> str:
    # returns a string, one of few types of constants that the compiler accepts; specs are passed one by one, since the
    # compiler looks into lists
    op = _single_op(_Call(kernel, outputs, dim), has_adjoint(kernel))
    return f"{op.registered.partition('::')[2]} {op.identity}"


class DifferentiableKernel(Protocol):
    """What `differentiable_kernel` returns: a function, and the registered ops of its kernel."""

    op: Callable[..., Any]

    def __call__(self, *inputs: Any, outputs: Sequence[OutputSpec], dim: Dim = None) -> Any: ...


def differentiable_kernel(
    forward_kernel: wp.Kernel,
    backward_kernel: wp.Kernel | None = None,
    save_for_backward: Sequence[int] | None = None,
    num_grad_inputs: int | None = None,
) -> DifferentiableKernel:
    """Pair a kernel with its derivative.

    Parameters
    ----------
    forward_kernel : wp.Kernel
        Its parameters are the inputs, then the outputs.
    backward_kernel : wp.Kernel, optional
        Its parameters are the saved inputs, then the gradient of each floating-point output, then the gradients to
        write, one for each of the first ``num_grad_inputs`` inputs (zero-filled, shaped like the input). It is launched
        over the same grid. By default the adjoint that Warp derives for ``forward_kernel`` is launched, without a tape.
    save_for_backward : sequence of int, optional
        Positions of the inputs that the backward kernel takes. All by default.
    num_grad_inputs : int, optional
        Number of inputs that have gradients. All by default.

    Returns
    -------
    callable
        ``function(*inputs, outputs=[OutputSpec, ...], dim=None)``, which can be differentiated once; a second
        derivative raises. ``function.op(outputs, dim)`` is the registered op for use inside ``torch.compile``.

    Raises
    ------
    ValueError
        If the kernels' parameters do not match this description, or an output has the name of another parameter. The
        message names the parameter.
    """
    if not isinstance(forward_kernel, wp.Kernel):
        raise TypeError(f"`forward_kernel` must be a Warp kernel, got {type(forward_kernel).__name__}")
    if backward_kernel is None:
        if save_for_backward is not None or num_grad_inputs is not None:
            raise ValueError(
                "`save_for_backward` and `num_grad_inputs` describe a `backward_kernel`, which is not given"
            )
        if not has_adjoint(forward_kernel):
            raise ValueError(f"`forward_kernel`: '{forward_kernel.key}' was built with enable_backward=False")

    def op(outputs: Sequence[OutputSpec], dim: Dim = None) -> Callable[..., Any]:
        outputs = tuple(outputs)
        if backward_kernel is None:
            return get_or_register_torch_op(forward_kernel, outputs, dim=dim, differentiable=True)
        saved = None if save_for_backward is None else tuple(save_for_backward)
        call = _Call(forward_kernel, outputs, dim)
        key = ("pair", *call.key, backward_kernel, saved, num_grad_inputs)
        return _registered(key, lambda: _op_by_pair(call, backward_kernel, saved, num_grad_inputs)).public

    def function(*inputs: Any, outputs: Sequence[OutputSpec], dim: Dim = None) -> Any:
        return op(outputs, dim)(*inputs)

    found: Any = function
    found.op = op
    return found


# -- building ops ---------------------------------------------------------------------------------

_ops: dict[Any, WarpOp] = {}
_ops_lock = fork_safe(threading.RLock())


def _registered(key: Any, build: Callable[[], WarpOp]) -> WarpOp:
    with _ops_lock:
        if key not in _ops:
            _ops[key] = build()
        return _ops[key]


def _zeros(spec: OutputSpec, inputs: Sequence[Any]) -> torch.Tensor:
    device = next((v.device for v in inputs if isinstance(v, torch.Tensor)), None)
    shape, dtype = spec.resolve(inputs)
    return torch.zeros(shape, dtype=dtype, device=device)


class _Call(NamedTuple):
    """A kernel, the specs of its outputs, and its launch grid, as for `call_kernel`."""

    kernel: wp.Kernel
    outputs: tuple[OutputSpec, ...]
    dim: Dim

    @property
    def key(self) -> tuple[Any, ...]:
        """The key of the op. Functions count as equal if their code and closures are equal."""
        specs = tuple(value_identity(v) for o in self.outputs for v in (o.name, o.dtype, o.shape, o.torch_dtype))
        return self.kernel, specs, value_identity(list(self.dim) if isinstance(self.dim, Sequence) else self.dim)

    def grid(self, inputs: Sequence[Any]) -> tuple[int, ...]:
        """The launch grid for these inputs."""
        grid: Any = self.dim(*inputs) if callable(self.dim) else self.dim
        if grid is None:
            first = self.outputs[0]
            shape, _ = first.resolve(inputs)
            dtype = first.dtype if is_warp_dtype(first.dtype) else first.dtype(*inputs)
            grid = shape[: len(shape) - len(inner_shape(dtype))] or (1,)
        return (grid,) if isinstance(grid, int) else tuple(grid)

    def run(self, inputs: Sequence[Any]) -> Any:
        """The outputs of a launch."""
        results = [_zeros(spec, inputs) for spec in self.outputs]
        launch(self.kernel, self.grid(inputs), inputs, results)
        return unpack(results)

    @property
    def floats(self) -> list[OutputSpec]:
        """The outputs that may have gradients."""
        return [o for o in self.outputs if o.may_be_float]

    @property
    def inputs(self) -> list[tuple[str, Any]]:
        """Names and annotations of the inputs; raises if an output has the name of another parameter or output."""
        kernel, arguments = self.kernel, _arguments(self.kernel)
        count = len(arguments) - len(self.outputs)
        if count < 1:
            raise ValueError(
                f"kernel '{kernel.key}' has too few parameters for {len(self.outputs)} `outputs` and an input"
            )
        names = [o.name for o in self.outputs]
        self.check_names({*(a.label for a in arguments), *(name for name in names if names.count(name) > 1)})
        return [(a.label, _annotation(a, kernel)) for a in arguments[:count]]

    @property
    def last(self) -> list[str]:
        """Names of the parameters for the outputs."""
        return [a.label for a in _arguments(self.kernel)[-len(self.outputs) :]]

    def check_names(self, taken: Collection[str]) -> None:
        """Raise if an output has one of these names, unless it is that of its parameter.

        An output may have another name than its parameter. But if it has the name of a different parameter, the order
        of outputs is probably wrong.
        """
        last = self.last
        for output, label in zip(self.outputs, last):
            if output.name != label and output.name in taken:
                raise ValueError(
                    f"`outputs`: '{output.name}' is in the place of parameter `{label}` of kernel '{self.kernel.key}'; "
                    f"its last parameters are {', '.join(last)}"
                )

    def identity(self, extra: str) -> str:
        """A hash of the call, the same in every process. It is part of the op's name, also in exported programs."""
        types_ = [
            value_identity(getattr(a.type, "dtype", a.type)) + str(getattr(a.type, "ndim", ""))
            for a in parameters_of(self.kernel)
        ]
        _, specs, grid = self.key
        text = repr((value_identity(self.kernel), types_, specs, grid, extra))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def _arguments(kernel: wp.Kernel) -> list[Any]:
    """The kernel's parameters without the offset that `launch` supplies."""
    return parameters_of(kernel)[is_gather_only(kernel) :]


def _annotation(argument: Any, kernel: wp.Kernel) -> Any:
    kind = argument.type
    if hasattr(kind, "ndim") and hasattr(kind, "dtype"):
        return torch.Tensor
    scalar = {bool: wp.bool, int: wp.int32, float: wp.float64}.get(kind, kind)
    if scalar in SCALARS:
        return bool if scalar is wp.bool else float if _is_float(scalar) else int
    raise TypeError(
        f"kernel '{kernel.key}': parameter `{argument.label}` of type {kind} is neither an array nor a number; "
        "pass vectors and matrices as arrays of one element"
    )


def _body(function: Callable[..., Any], parameters: Sequence[tuple[str, Any]], name: str) -> Callable[..., Any]:
    """A function with the given annotated signature that passes its arguments on as a tuple."""

    def body(*arguments: Any) -> Any:
        return function(arguments)

    body.__name__ = body.__qualname__ = name
    body.__annotations__ = dict(parameters)
    body.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=a) for n, a in parameters]
    )
    return body


def _single_op(call: _Call, differentiable: bool) -> WarpOp:
    key = ("kernel", *call.key, differentiable)
    return _registered(key, lambda: _op_by_adjoint(call) if differentiable else _new_op(call, "none"))


def _new_op(
    call: _Call,
    extra: str,
    read: Sequence[OutputSpec] = (),
    gradients: Sequence[OutputSpec] = (),
    derivative: Callable[[Sequence[Any]], Any] | None = None,
) -> WarpOp:
    """Register an op.

    Its ``derivative``, if given, computes the ``gradients`` of inputs. Its arguments are all inputs, the outputs in
    ``read``, and the incoming gradients of floating-point outputs.
    """
    identity = call.identity(extra)
    name, key, floats = f"{NAMESPACE}::{call.kernel.key}_{identity}", call.kernel.key, call.floats
    backward: Backward = "none"
    named = None
    if derivative is not None:
        tensors = [*(o.name for o in read), *(f"grad_{o.name}" for o in floats)]
        body = _body(derivative, [*call.inputs, *((name, torch.Tensor) for name in tensors)], f"{key}_backward")
        backward = WarpOp(declare(body, f"{name}_backward", gradients, backward="none")).public
        named = [*(o.name for o in floats), *(o.name.removeprefix("grad_") for o in gradients)]
    body = _body(lambda values: call.run(values), call.inputs, key)
    return WarpOp(declare(body, name, call.outputs, named, backward=backward), identity=identity)


def _op_by_adjoint(call: _Call) -> WarpOp:
    """An op that can be differentiated once, by a launch of Warp's adjoint of the kernel."""
    outputs, count = call.outputs, len(call.inputs)
    arrays = enumerate(zip(_arguments(call.kernel), call.inputs))
    tracked = [i for i, (a, (_, kind)) in arrays if kind is torch.Tensor and _is_float(a.type.dtype)]

    def run(values: Sequence[Any]) -> Any:
        inputs, results = values[:count], values[count : count + len(outputs)]
        # the adjoint consumes the incoming gradients
        given = (c.clone(memory_format=torch.contiguous_format) for c in values[count + len(outputs) :])
        cotangents = [next(given) if o.may_be_float else None for o in outputs]
        gradients: list[torch.Tensor | None] = [None] * count
        for i in tracked:
            gradients[i] = torch.zeros_like(inputs[i], memory_format=torch.contiguous_format)
        launch_adjoint(call.kernel, call.grid(inputs), [*inputs, *results], [*gradients, *cotangents])
        return tuple(gradients[i] for i in tracked)

    return _new_op(call, "adjoint", outputs, [like(f"grad_{call.inputs[i][0]}", i) for i in tracked], run)


def _op_by_pair(
    call: _Call, backward_kernel: wp.Kernel, saved: tuple[int, ...] | None, num_grad_inputs: int | None
) -> WarpOp:
    """An op that can be differentiated once, by a launch of another kernel."""
    kernel, parameters = call.kernel, call.inputs
    count = len(parameters)
    saved = tuple(range(count)) if saved is None else saved
    n_grads = count if num_grad_inputs is None else num_grad_inputs
    if not all(0 <= i < count for i in saved):
        raise ValueError(f"`save_for_backward` {saved} names inputs that '{kernel.key}' does not have ({count})")
    if not 1 <= n_grads <= count:
        raise ValueError(f"`num_grad_inputs` is {n_grads}, but '{kernel.key}' has {count} inputs")
    for (label, annotation), argument in zip(parameters[:n_grads], _arguments(kernel)):
        if annotation is not torch.Tensor or not _is_float(argument.type.dtype):
            raise ValueError(
                f"`num_grad_inputs` covers `{label}`, which is not a floating-point array: put it after the others"
            )
    expected = len(saved) + len(call.floats) + n_grads
    given = _arguments(backward_kernel)
    if len(given) != expected:
        raise ValueError(
            f"`backward_kernel`: '{backward_kernel.key}' has {len(given)} parameters, but {len(saved)} saved inputs, "
            f"{len(call.floats)} output gradients and {n_grads} input gradients make {expected}"
        )
    elements = [a.type.dtype for a in given[-n_grads:]]
    specs = [
        OutputSpec(
            f"grad_{parameters[i][0]}",
            (lambda *values: wp.dtype_from_torch(values[count].dtype)) if elements[i] is Any else elements[i],
            lambda *values, i=i: values[i].shape,
        )
        for i in range(n_grads)
    ]

    def run(values: Sequence[Any]) -> Any:
        gradients = [_zeros(spec, values) for spec in specs]
        launch(backward_kernel, call.grid(values[:count]), [*(values[i] for i in saved), *values[count:]], gradients)
        return tuple(gradients)

    extra = _Call(backward_kernel, (), saved).identity(str(n_grads))
    return _new_op(call, extra, (), specs, run)


def _is_float(dtype: Any) -> bool:
    return dtype is Any or scalar_type(dtype) in (wp.float16, wp.float32, wp.float64)
