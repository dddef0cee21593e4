"""The torch side of a call from JAX: buffers as tensors, derivatives by reverse mode, results into JAX's buffers."""

import contextlib
import itertools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import torch

from nvalchemiops import threads
from nvalchemiops.jax.dtypes import WIDER, torch_dtype
from nvalchemiops.layout import layout
from nvalchemiops.torch.runtime._torch_internals import version_of
from nvalchemiops.torch.runtime.openmp import at_fixed_threads

Flags = tuple[bool, ...]
"""Whether an operand or a result has an axis at each level of ``vmap``, outermost first."""


Arrays = Mapping[int, jax.Array]
"""Arrays by the number of their input."""

Shapes = Sequence[jax.ShapeDtypeStruct]


class Contraction(ABC):
    """How the tangents of energies follow from the gradients of their sum, in JAX."""

    inputs: tuple[int, ...] = ()
    """Numbers of the inputs that it needs beside gradients and tangents."""

    def covers(self, shapes: Mapping[int, tuple[int, ...]], outputs: Shapes) -> bool:
        """Whether it can, for inputs of these shapes that move."""
        return True

    @abstractmethod
    def __call__(self, gradients: Arrays, tangents: Arrays, inputs: Arrays, outputs: Shapes) -> Sequence[jax.Array]:
        """Tangents of the outputs."""


@dataclass(eq=False)
class TorchFunction:
    """A torch function of tensors, as the primitive calls it. Compared by identity.

    Parameters
    ----------
    evaluate : callable
        Takes a tensor for each input, returns a sequence of tensors.
    name : str
        For messages.
    contract : Contraction, optional
        For energies, whose gradient then comes with their values.
    with_gradients : bool
        Torch records operations also where no derivative is requested: for functions that call `torch.autograd.grad`.
    rounds : bool
        Outputs may have twice the declared bits: without x64, JAX has 32 for what torch computes in 64.
    differentiable : bool
    first_order : callable, optional
        The same as ``evaluate``, for values and first derivatives.
    gradients : callable, optional
        ``gradients(wanted, *inputs)``: the outputs, and the gradients of their sum by the inputs with these numbers; or
        None. Cheaper than torch's reverse mode.
    fill : callable, optional
        ``fill(results, *inputs)``: write the values of all outputs into the tensors ``results``; False if it cannot.
    takes_all : callable, optional
        ``takes_all(sizes, types)``: whether one call takes all slices of ``vmap``, along leading axes; the types are
        those of the inputs of one slice.
    """

    evaluate: Callable[..., Sequence[torch.Tensor]]
    name: str
    contract: Contraction | None = None
    with_gradients: bool = False
    rounds: bool = True
    differentiable: bool = True
    first_order: Callable[..., Sequence[torch.Tensor]] | None = None
    gradients: Callable[..., tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]] | None] | None = None
    fill: Callable[..., bool] | None = None
    takes_all: Callable[[tuple[int, ...], tuple[jax.ShapeDtypeStruct, ...]], bool] | None = None
    writes: frozenset[int] | None = None  # inputs that it changes in place; None: not known yet
    jitted: dict[Any, Callable[..., Any]] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Request:
    """What one call of the primitive evaluates; see `nvalchemiops.jax.primitive`.

    Operands are the inputs, the weights, then the components of each direction; results are the values, then the
    gradients.

    Parameters
    ----------
    function : TorchFunction
    outputs : tuple of jax.ShapeDtypeStruct
        Of the function, for one slice.
    inputs : int
    values : tuple of int
        Outputs whose value, or directional derivative, is a result.
    gradient : tuple of int
        Inputs by which the gradient is a result.
    weights : tuple of int
        Outputs that have a weight; without any, the sum of all outputs is differentiated.
    directions : tuple of tuple of int
        The inputs along which each direction has components.
    sizes : tuple of int
        Of the levels of ``vmap``.
    operand_flags, result_flags : tuple of Flags
    """

    function: TorchFunction
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    inputs: int
    values: tuple[int, ...]
    gradient: tuple[int, ...]
    weights: tuple[int, ...]
    directions: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    operand_flags: tuple[Flags, ...]
    result_flags: tuple[Flags, ...]

    @property
    def value_flags(self) -> dict[int, Flags]:
        """Flags of the results that are values."""
        return dict(zip(self.values, self.result_flags))

    @property
    def gradient_flags(self) -> dict[int, Flags]:
        """Flags of the results that are gradients."""
        return dict(zip(self.gradient, self.result_flags[len(self.values) :]))

    def only(self, used: Sequence[bool]) -> "Request":
        """The same with some of the results."""
        count = len(self.values)
        return replace(
            self,
            values=tuple(itertools.compress(self.values, used)),
            gradient=tuple(itertools.compress(self.gradient, used[count:])),
            result_flags=tuple(itertools.compress(self.result_flags, used)),
        )

    def mapped(self, size: int, operands: Sequence[bool]) -> "Request":
        """The same for ``size`` slices of the ``operands`` that are mapped."""
        return replace(
            self,
            sizes=(size, *self.sizes),
            operand_flags=tuple((is_mapped, *flags) for is_mapped, flags in zip(operands, self.operand_flags)),
            result_flags=tuple((True, *flags) for flags in self.result_flags),
        )

    def result_types(self, operands: Sequence[Any]) -> list[tuple[tuple[int, ...], Any]]:
        """Shape and dtype of each result."""
        slices = [(tuple(self.outputs[j].shape), self.outputs[j].dtype) for j in self.values]
        slices += [(operands[i].shape[sum(self.operand_flags[i]) :], operands[i].dtype) for i in self.gradient]
        return [
            (tuple(size for size, flag in zip(self.sizes, flags) if flag) + shape, dtype)
            for (shape, dtype), flags in zip(slices, self.result_flags)
        ]


def evaluate(
    request: Request, context: Any, results: Sequence[Any], operands: Sequence[Any], at_once: bool = False
) -> None:
    """Evaluate ``request`` on JAX's buffers, writing into those of the results.

    All slices of ``vmap`` go into one call of the function if ``at_once``.

    Raises
    ------
    TypeError, ValueError
        The function returns other tensors than it declared.
    RuntimeError
        It changed an input in place that it left alone at its first call.
    """
    with _plain_state(), threads.as_main_thread():
        tensors = [_tensor(buffer) for buffer in operands]
        targets = [_tensor(buffer) for buffer in results]
        with _stream_of([*targets, *tensors], context):
            if not request.sizes:
                if _fill(request, targets, tensors):
                    return
                for target, result in zip(targets, _results(request, tensors)):
                    _copy(target, result)
            elif at_once:
                _evaluate_at_once(request, targets, tensors)
            else:
                _evaluate_slices(request, targets, tensors)


def _fill(request: Request, targets: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> bool:
    """Let the function write its outputs into ``targets``, if these are all it is asked for, and it can."""
    fill = request.function.fill
    if fill is None or request.gradient or request.directions or len(request.values) != len(request.outputs):
        return False
    with torch.no_grad():
        return fill(targets, *tensors)


SPLIT_COPIES = 2**15
"""Elements from which on torch copies on several threads."""


def _copy(target: torch.Tensor, result: torch.Tensor) -> None:
    """Copy; on one thread where threads would wait for others to leave the cores."""
    if result.numel() >= SPLIT_COPIES and threads.is_crowded():
        at_fixed_threads(lambda: target.copy_(result), alone=True)
    else:
        target.copy_(result)


def _evaluate_slices(request: Request, targets: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Evaluate one slice after the other."""
    sums = [not all(flags) for flags in request.result_flags]
    for target in itertools.compress(targets, sums):
        target.zero_()
    for place in itertools.product(*(range(size) for size in request.sizes)):
        slices = [_at(place, tensor, flags) for tensor, flags in zip(tensors, request.operand_flags)]
        places = [_at(place, target, flags) for target, flags in zip(targets, request.result_flags)]
        for target, result, is_sum in zip(places, _results(request, slices), sums):
            target.add_(result) if is_sum else target.copy_(result)


def _evaluate_at_once(request: Request, targets: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Evaluate a function that takes slices along leading axes."""
    sizes = request.sizes
    stacked = tuple(jax.ShapeDtypeStruct((*sizes, *output.shape), output.dtype) for output in request.outputs)
    operands = [_along_all(sizes, tensor, flags) for tensor, flags in zip(tensors, request.operand_flags)]
    results = _results(replace(request, outputs=stacked), operands)
    for target, result, flags in zip(targets, results, request.result_flags):
        summed = [axis for axis, flag in enumerate(flags) if not flag]
        target.copy_(result.sum(summed) if summed else result)


def _along_all(sizes: tuple[int, ...], tensor: torch.Tensor, flags: Flags) -> torch.Tensor:
    """``tensor`` with an axis for each level, repeated along those that it lacked."""
    shape = tensor.shape[sum(flags) :]
    aligned = tensor.reshape([*(size if flag else 1 for size, flag in zip(sizes, flags)), *shape])
    return aligned.expand(*sizes, *shape).contiguous()


def _tensor(buffer: Any) -> torch.Tensor:
    """The memory of ``buffer`` as a tensor."""
    return torch.utils.dlpack.from_dlpack(buffer.__dlpack__())


def _at(place: Sequence[int], tensor: torch.Tensor, flags: Flags) -> torch.Tensor:
    return tensor[tuple(itertools.compress(place, flags))]


def _plain_state() -> contextlib.AbstractContextManager[Any]:
    """Torch's state of this thread as a new thread has it: the caller may have set inference mode or autocast."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    if not kinds and not torch.is_inference_mode_enabled():
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    stack.enter_context(torch.inference_mode(False))
    for kind in kinds:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


def _stream_of(tensors: Sequence[torch.Tensor], context: Any) -> contextlib.AbstractContextManager[Any]:
    """XLA's stream as torch's current stream; nothing on a CPU, where ``context`` has none."""
    if not tensors or tensors[0].device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(context.stream, tensors[0].device))


def _results(request: Request, operands: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Values and gradients for one slice."""
    given = iter(operands)
    inputs = [next(given) for _ in range(request.inputs)]
    weights = {j: next(given) for j in request.weights}
    directions = [{i: next(given) for i in direction} for direction in request.directions]
    if (by_value := _by_value(request, inputs, list(weights.values()))) is not None:
        return by_value
    moving = {*request.gradient, *itertools.chain(*request.directions)}
    with torch.set_grad_enabled(bool(moving) or request.function.with_gradients):
        for i in moving:
            inputs[i].requires_grad_()
        outputs = _outputs(request, inputs)
        results = [] if request.directions else [outputs[j].detach() for j in request.values]
        if not moving:
            return results
        if request.directions and request.values:
            weights = {j: torch.ones_like(outputs[j], requires_grad=True) for j in request.values}
        elif not weights:
            weights = {j: torch.ones_like(y) for j, y in enumerate(outputs) if y.is_floating_point()}
        roots = [(outputs[j], weight) for j, weight in weights.items()]
        first: str | None = request.function.name
        for direction in directions:
            slopes = _gradients(roots, [inputs[i] for i in direction], create_graph=True, warn=first)
            roots, first = list(zip(slopes, direction.values())), None
        last = list(weights.values()) if request.directions and request.values else []
        return results + _gradients(roots, [*last, *(inputs[i] for i in request.gradient)], warn=first)


def _by_value(
    request: Request, inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
) -> list[torch.Tensor] | None:
    """Values and gradients where the function has them by value, for outputs of equal weights; otherwise None."""
    gradients = request.function.gradients
    if gradients is None or not request.gradient or request.directions or len(weights) > 1:
        return None
    scale = None
    if weights:
        (weight,) = weights
        if not layout(weight.device.type).reads or not weight.numel():
            return None
        scale = weight.reshape(-1)[0]
        if not bool((weight == scale).all()):
            return None
    with torch.no_grad():
        both = gradients(request.gradient, *inputs)
        if both is None:
            return None
        outputs, found = both
        _check_outputs(request, outputs)
        return [*(outputs[j] for j in request.values), *(g if scale is None else g * scale for g in found)]


def _gradients(
    roots: Sequence[tuple[torch.Tensor, torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    create_graph: bool = False,
    warn: str | None = None,
) -> list[torch.Tensor]:
    """Gradients of the sum of products of the pairs in ``roots``, zeros where there is no dependence.

    Without any dependence, there is a warning about the function ``warn``.
    """
    roots = [(y, weight) for y, weight in roots if y.requires_grad]
    found: Sequence[torch.Tensor | None] = [None] * len(inputs)
    if roots:
        outputs, weights = zip(*roots)
        found = torch.autograd.grad(outputs, inputs, weights, create_graph=create_graph, allow_unused=True)
    if warn is not None and all(gradient is None for gradient in found):
        warnings.warn(
            f"`{warn}`: its outputs do not depend on its inputs by torch's graph of operations, so the gradients are "
            "zero",
            UserWarning,
            stacklevel=2,
        )
    return [torch.zeros_like(x) if gradient is None else gradient for x, gradient in zip(inputs, found)]


def _outputs(request: Request, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Outputs of the function, checked; its inputs are JAX's memory, which it must not change."""
    function = request.function
    arguments = [x.clone() if function.writes is None or i in function.writes else x for i, x in enumerate(inputs)]
    versions = [version_of(x) for x in arguments]
    evaluate = function.evaluate if request.directions or function.first_order is None else function.first_order
    outputs = evaluate(*arguments)
    written = frozenset(i for i, (x, version) in enumerate(zip(arguments, versions)) if version_of(x) != version)
    if function.writes is None:
        function.writes = written
    elif not written <= function.writes:
        function.writes |= written
        raise RuntimeError(
            f"`{function.name}` changed inputs {sorted(written)} in place, which it did not do at its first call; "
            "JAX's arrays are immutable: work on a copy"
        )
    _check_outputs(request, outputs)
    return outputs


def _check_outputs(request: Request, outputs: Sequence[torch.Tensor]) -> None:
    function = request.function
    if len(outputs) != len(request.outputs):
        raise ValueError(f"`{function.name}` returned {len(outputs)} tensors, {len(request.outputs)} were declared")
    for number, (output, declared) in enumerate(zip(outputs, request.outputs)):
        _check_output(function, number, output, declared)


def _check_output(function: TorchFunction, number: int, output: Any, declared: jax.ShapeDtypeStruct) -> None:
    if not isinstance(output, torch.Tensor):
        raise TypeError(f"`{function.name}`: output {number} is no tensor but {type(output).__name__}")
    if tuple(output.shape) != tuple(declared.shape):
        raise ValueError(
            f"`{function.name}`: output {number} has shape {tuple(output.shape)}, declared was {tuple(declared.shape)}"
        )
    expected = torch_dtype(declared.dtype)
    if output.dtype != expected and not (function.rounds and output.dtype == WIDER.get(expected)):
        raise TypeError(f"`{function.name}`: output {number} has dtype {output.dtype}, declared was {expected}")
