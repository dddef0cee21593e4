"""The torch side of a call from JAX: buffers become tensors, derivatives use reverse mode, results are written back."""

import contextlib
import itertools
import math
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import torch

from nvalchemiops import threads
from nvalchemiops.jax.dtypes import WIDER, torch_dtype
from nvalchemiops.layout import layout
from nvalchemiops.torch.runtime import engine
from nvalchemiops.torch.runtime.openmp import at_fixed_threads
from nvalchemiops.torch.runtime.recorded import is_close

Flags = tuple[bool, ...]
"""Whether an operand or a result has an axis at each level of ``vmap``, outermost first."""


@dataclass(eq=False)
class TorchFunction:
    """A torch function of tensors that the primitive calls. Compared by identity.

    The functions among the fields take a tensor for each input. Those of a `Bridge` take the caller's arguments
    instead, which may be nested in containers.
    """

    evaluate: Callable[..., Any]  # returns a sequence of tensors
    name: str  # in messages
    # `Energies`, whose gradient comes with their values. For a bridge this may be a function of the arguments, with an
    # `Operand` for each array, that returns an `Energies` or None
    contract: Any = None
    # torch records operations even if no derivative is requested: for functions that call `torch.autograd.grad`
    with_gradients: bool = False
    # outputs may have twice the declared bits: without x64, JAX declares 32 bits where torch computes in 64
    rounds: bool = True
    differentiable: bool = True
    first_order: Callable[..., Any] | None = None  # an equivalent of ``evaluate`` for values and first derivatives
    # returns a context for the call of the function and for its derivatives
    around: Callable[..., contextlib.AbstractContextManager[Any]] | None = None
    # ``fill(results, *inputs)`` writes the values of all outputs into the tensors ``results``, or returns False
    fill: Callable[..., bool] | None = None
    # ``takes_all(sizes, types)``: one call takes all slices of ``vmap``, along leading axes; types are of one slice
    takes_all: Callable[[tuple[int, ...], tuple[jax.ShapeDtypeStruct, ...]], bool] | None = None
    # indices and names of inputs whose derivative is a NotImplementedError; for a bridge, the names of arguments
    constants: Any = frozenset()
    # the function neither changes nor keeps its inputs, and gets JAX's memory. Other functions get copies, since writes
    # by NumPy or `torch.Tensor.data` cannot be detected
    only_reads: bool = False
    # a call with all slices is known to return the results of each. If not, calls whose slices differ test this
    folds: bool = False
    # rows of a Jacobian come from one backward pass, by `torch.vmap`. Switched off if that fails
    batches_gradients: bool = False
    verdicts: dict[Hashable, bool] = field(default_factory=dict, init=False, repr=False)
    """Whether calls have shown that slices of a stack are computed independently, by their number and shapes."""
    jitted: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)


@dataclass(frozen=True)
class Request:
    """The task of one call of the primitive; see `nvalchemiops.jax.primitive`.

    Operands are the inputs, then the weights, then the components of each direction. Results are the values, then the
    gradients.
    """

    function: TorchFunction
    outputs: tuple[jax.ShapeDtypeStruct, ...]  # of the function for one slice
    inputs: int  # number of inputs
    values: tuple[int, ...] = ()  # outputs whose value, or directional derivative, is a result
    gradient: tuple[int, ...] = ()  # inputs whose gradient is a result
    weights: tuple[int, ...] = ()  # outputs that have a weight; without any, the sum of all outputs is differentiated
    directions: tuple[tuple[int, ...], ...] = ()  # for each one, the inputs along which it has components
    sizes: tuple[int, ...] = ()  # of the levels of ``vmap``
    operand_flags: tuple[Flags, ...] = ()
    result_flags: tuple[Flags, ...] = ()

    @property
    def of_calls(self) -> Flags:
        """Whether the slices of each level need separate calls of the function, unless one call takes all slices.

        A level on which only weights and directions differ does not need separate calls: its slices share one call.
        """
        inputs = self.operand_flags[: self.inputs]
        return tuple(self.function.folds or any(flags[i] for flags in inputs) for i in range(len(self.sizes)))

    @property
    def vectors_of_pass(self) -> int:
        """The number of weights or directions from which the last backward pass starts. They are the last operands."""
        return len(self.directions[-1]) if self.directions else len(self.weights)

    def only(self, used: Sequence[bool]) -> "Request":
        """The same request with some of the results."""
        count = len(self.values)
        return replace(
            self,
            values=tuple(itertools.compress(self.values, used)),
            gradient=tuple(itertools.compress(self.gradient, used[count:])),
            result_flags=tuple(itertools.compress(self.result_flags, used)),
        )

    def mapped(self, size: int, operands: Sequence[bool]) -> "Request":
        """The same request for ``size`` slices of the mapped ``operands``."""
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
    """Evaluate ``request`` on JAX's buffers, and write into the buffers of the results.

    With ``at_once``, all slices of ``vmap`` whose inputs differ go into one call of the function. Raises if the
    function returns tensors that differ from the declared outputs.
    """
    with plain_state(), threads.as_main_thread():
        tensors = [_tensor(buffer) for buffer in operands]
        targets = [_tensor(buffer) for buffer in results]
        with _stream_of([*targets, *tensors], context):
            if request.sizes:
                _evaluate_slices(request, targets, tensors, at_once and _is_batch_of_slices(request, tensors))
            elif not _fill(request, targets, tensors):
                with contextlib.closing(_Point(request, tensors[: request.inputs])) as point:
                    for target, result in zip(targets, point.results(tensors[request.inputs :])):
                        _copy(target, result)


def _fill(request: Request, targets: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> bool:
    """Let the function write its outputs into ``targets``. Return False if it cannot, or if more is requested."""
    fill = request.function.fill
    if fill is None or request.gradient or request.directions or len(request.values) != len(request.outputs):
        return False
    with torch.no_grad():
        return fill(targets, *tensors)


SPLIT_COPIES = 2**15
"""Number of elements from which on torch copies on several threads."""


def _copy(target: torch.Tensor, result: torch.Tensor) -> None:
    """Copy a result, on one thread if other work keeps the cores busy."""
    if result.numel() >= SPLIT_COPIES and threads.is_crowded():
        at_fixed_threads(lambda: target.copy_(result), alone=True)
    else:
        target.copy_(result)


def _evaluate_slices(
    request: Request, targets: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], at_once: bool
) -> None:
    """Call the function slice by slice, or once for all slices of the inputs.

    Slices of weights and directions at the same inputs, such as the rows of a Jacobian, share a call. So there are four
    kinds of levels of ``vmap``. Their slices are evaluated (0) by separate calls, (1) by separate backward passes of
    one call, (2) by one backward pass, (3) inside one call.
    """
    function = request.function
    kinds = _kinds(request, at_once)
    # within a kind, levels of earlier operands are outer loops: what depends on these alone is then computed once
    order = sorted(
        range(len(kinds)), key=lambda level: (kinds[level], [not flags[level] for flags in request.operand_flags])
    )
    of_calls, of_passes, together, inside = (
        tuple(request.sizes[level] for level in order if kinds[level] == kind) for kind in range(4)
    )
    n_calls, n_passes, n_looped = len(of_calls), len(of_passes), len(of_calls) + len(of_passes)
    declared = tuple(jax.ShapeDtypeStruct((*inside, *output.shape), output.dtype) for output in request.outputs)
    operands = [_ordered(x, flags, order) for x, flags in zip(tensors, request.operand_flags)]
    results = [_ordered(x, flags, order) for x, flags in zip(targets, request.result_flags)]
    for target, flags in results:
        if not all(flags[:n_looped]):
            target.zero_()
    first_of_pass = len(operands) - request.vectors_of_pass

    def part(number: int, x: torch.Tensor, flags: Flags) -> torch.Tensor:
        """An operand for one pass. ``flags`` belong to the levels without a loop."""
        if number < first_of_pass or not together:
            return _along_all(inside, x, flags[len(together) :])
        return _along_all(together + inside, x, flags).flatten(0, len(together) - 1)

    for call in itertools.product(*map(range, of_calls)):
        parts = [(i, _at(call, x, flags), flags[n_calls:]) for i, (x, flags) in enumerate(operands)]
        inputs = [part(i, x, flags[n_passes:]) for i, x, flags in parts[: request.inputs]]
        vectors = parts[request.inputs :]
        known: dict[int, tuple[tuple[int, ...], torch.Tensor]] = {}  # the last slice of each, and its place
        shared = bool(of_passes or together)
        with contextlib.closing(_Point(replace(request, outputs=declared), inputs, is_shared=shared)) as point:
            for place in itertools.product(*map(range, of_passes)):
                for i, x, flags in vectors:
                    own = tuple(itertools.compress(place, flags))
                    if i not in known or known[i][0] != own:
                        known[i] = own, part(i, x[own], flags[n_passes:])
                given = [known[i][1] for i, _, _ in vectors]
                try:
                    found = point.results(given, math.prod(together) if together else None)
                except Exception:  # out of memory, or an operation that torch.vmap does not support
                    if not together:
                        raise
                    function.batches_gradients = False
                    point.close()  # another context follows
                    return _evaluate_slices(request, targets, tensors, at_once)
                for (target, flags), result in zip(results, found):
                    result = result.unflatten(0, together) if together else result
                    axes = [axis for axis, flag in enumerate(flags[n_looped:]) if not flag]
                    total, there = result.sum(axes) if axes else result, _at((*call, *place), target, flags)
                    there.copy_(total) if all(flags[:n_looped]) else there.add_(total)


def _kinds(request: Request, at_once: bool) -> list[int]:
    """The kind of each level, 0 to 3, as numbered in `_evaluate_slices`."""
    early = request.operand_flags[request.inputs : len(request.operand_flags) - request.vectors_of_pass]
    batches = request.function.batches_gradients and 0 not in request.sizes

    def kind(level: int, is_of_calls: bool) -> int:
        if is_of_calls:
            return 3 if at_once else 0
        return 2 if batches and not any(flags[level] for flags in early) else 1

    return [kind(level, is_of_calls) for level, is_of_calls in enumerate(request.of_calls)]


def _ordered(tensor: torch.Tensor, flags: Flags, order: Sequence[int]) -> tuple[torch.Tensor, Flags]:
    """``tensor`` and its flags, with the levels in another order."""
    own = [level for level, flag in enumerate(flags) if flag]
    axes = [own.index(level) for level in order if flags[level]]
    return tensor.permute([*axes, *range(len(own), tensor.ndim)]), tuple(flags[level] for level in order)


def _along_all(sizes: tuple[int, ...], tensor: torch.Tensor, flags: Flags) -> torch.Tensor:
    """``tensor`` with an axis for each of ``sizes``. It is repeated along axes that it did not have."""
    if not sizes:
        return tensor
    shape = tensor.shape[sum(flags) :]
    aligned = tensor.reshape([*(size if flag else 1 for size, flag in zip(sizes, flags)), *shape])
    return aligned.expand(*sizes, *shape).contiguous()


def _is_batch_of_slices(request: Request, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the function returns the same for the first and last slice of a stack as for each of them alone."""
    function, levels = request.function, request.of_calls
    if function.folds:
        return True
    lead = tuple(itertools.compress(request.sizes, levels))
    inputs = [(x, tuple(itertools.compress(flags, levels))) for x, flags in zip(tensors, request.operand_flags)]
    inputs = inputs[: request.inputs]
    key = (lead, *((x.shape, flags) for x, flags in inputs))
    found = function.verdicts.get(key)
    if found is not None:
        return found
    stacks = [_along_all(lead, x, flags) for x, flags in inputs]
    declared = tuple(jax.ShapeDtypeStruct((*lead, *output.shape), output.dtype) for output in request.outputs)

    def values(request: Request, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        with contextlib.ExitStack() as around:
            return _outputs(request, inputs, around)

    with torch.set_grad_enabled(function.with_gradients):
        try:
            of_all = values(replace(request, outputs=declared), stacks)
        except Exception:  # it may still take single slices; their errors are raised there
            of_all = []
        found = bool(of_all)
        for place in ((0,) * len(lead), (-1,) * len(lead)):
            of_one = values(request, [x[place] for x in stacks]) if found else []
            found = found and all(is_close(x[place], y, to_half=True) for x, y in zip(of_all, of_one))
    if not found:
        warnings.warn(
            f"`{function.name}` does not treat leading axes as a batch: vmap calls it slice by slice, as with "
            'vmap_method="sequential"',
            UserWarning,
            stacklevel=2,
        )
    if not found or any(bool((x != x.flatten()[0]).any()) for x in of_all if x.numel()):
        function.verdicts[key] = found  # a result with all numbers equal, such as zeros, would prove nothing
    return found


def _tensor(buffer: Any) -> torch.Tensor:
    """A tensor that shares the memory of ``buffer``."""
    return torch.utils.dlpack.from_dlpack(buffer.__dlpack__())


def _at(place: Sequence[int], tensor: torch.Tensor, flags: Flags) -> torch.Tensor:
    return tensor[tuple(itertools.compress(place, flags))]


def plain_state() -> contextlib.AbstractContextManager[Any]:
    """A context without inference mode and autocast, which the caller may have set in this thread."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    if not kinds and not torch.is_inference_mode_enabled():
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    stack.enter_context(torch.inference_mode(False))
    for kind in kinds:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


def _stream_of(tensors: Sequence[torch.Tensor], context: Any) -> contextlib.AbstractContextManager[Any]:
    """A context in which XLA's stream is torch's current stream. On a CPU it does nothing."""
    if not tensors or tensors[0].device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(context.stream, tensors[0].device))


_Root = tuple[torch.Tensor, torch.Tensor]
"""A tensor and its weight."""


class _Point:
    """The function at one set of inputs. One call gives values and derivatives.

    Its graph is kept if shared, by several sets of weights and directions.
    """

    def __init__(self, request: Request, inputs: list[torch.Tensor], is_shared: bool = False):
        self.request, self._inputs, self._is_shared = request, inputs, is_shared
        self._known: Sequence[torch.Tensor] | None = None
        self._ones: dict[int, torch.Tensor] = {}
        self._slopes: dict[int, tuple[list[_Root], list[torch.Tensor]]] = {}
        self._around = contextlib.ExitStack()

    def close(self) -> None:
        """Leave the context of the function."""
        self._around.close()

    def results(self, vectors: Sequence[torch.Tensor], count: int | None = None) -> list[torch.Tensor]:
        """Values and gradients for the weights and directions ``vectors``.

        With ``count``, the vectors from which the last backward pass starts have a leading axis of this size.
        """
        request, inputs = self.request, self._inputs
        given = iter(vectors)
        weights = {j: next(given) for j in request.weights}
        directions = [{i: next(given) for i in direction} for direction in request.directions]
        moving = bool(request.gradient or request.directions)
        with torch.set_grad_enabled(moving or request.function.with_gradients):
            outputs = self._outputs()
            results = [] if request.directions else [outputs[j].detach() for j in request.values]
            if count is not None:
                results = [x.expand(count, *x.shape) for x in results]
            if not moving:
                return results
            if not directions and count is None and (along := self._along_with(outputs, weights)) is not None:
                return [*results, *along]
            by_weight = bool(request.directions and request.values)
            weights = self._default_weights(outputs) if by_weight or not weights else weights
            roots = [(outputs[j], weight) for j, weight in weights.items()]
            # the derivative of one number along a direction is a product: none with respect to its weight is needed
            is_product = by_weight and not request.gradient and [outputs[j].numel() for j in weights] == [1]
            for number, direction in enumerate(directions, 1):
                is_last = is_product and number == len(directions)
                slopes = self._along(number, roots, list(direction), create_graph=not is_last)
                roots = list(zip(slopes, direction.values()))
            if is_product:
                return [_sum_of_products(roots, outputs[j], count) for j in weights]
            last = list(weights.values()) if by_weight else []
            name = None if request.directions else request.function.name
            wanted = [*last, *(inputs[i] for i in request.gradient)]
            return results + _gradients(roots, wanted, retain_graph=self._is_shared, count=count, warn=name)

    # no functools.cached_property: that of Python 3.11 holds a lock for all points while the function runs
    def _outputs(self) -> Sequence[torch.Tensor]:
        if self._known is None:
            for i in {*self.request.gradient, *itertools.chain(*self.request.directions)}:
                self._inputs[i].requires_grad_()
            self._known = _outputs(self.request, self._inputs, self._around)
        return self._known

    def _default_weights(self, outputs: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Ones: for the values, to differentiate with respect to them, or for all outputs."""
        if not self._ones:
            values = self.request.values if self.request.directions else ()
            of = values or [j for j, y in enumerate(outputs) if y.is_floating_point()]
            self._ones = {j: torch.ones_like(outputs[j], requires_grad=bool(values)) for j in of}
        return self._ones

    def _along_with(
        self, outputs: Sequence[torch.Tensor], weights: Mapping[int, torch.Tensor]
    ) -> Sequence[torch.Tensor] | None:
        """Gradients that were computed together with an energy, if all its entries have one weight; otherwise None."""
        if len(outputs) != 1:
            return None
        found = engine.first_derivatives(outputs[0], [self._inputs[i] for i in self.request.gradient])
        if found is None or not weights:
            return found
        weight = weights[0]
        if not layout(weight.device.type).reads or not weight.numel():
            return None
        scale = weight.reshape(-1)[0]
        return [gradient * scale for gradient in found] if bool((weight == scale).all()) else None

    def _along(self, number: int, roots: list[_Root], wanted: Sequence[int], create_graph: bool) -> list[torch.Tensor]:
        """The gradients that are multiplied by direction ``number``, reused if ``roots`` are as in the last call."""
        known, slopes = self._slopes.get(number, ([], []))
        if not known or any(a is not b for a, b in zip(itertools.chain(*known), itertools.chain(*roots))):
            name = self.request.function.name if number == 1 else None
            of = [self._inputs[i] for i in wanted]
            slopes = _gradients(roots, of, create_graph=create_graph, retain_graph=self._is_shared, warn=name)
            self._slopes[number] = roots, slopes
        return slopes


def _sum_of_products(roots: Sequence[_Root], like: torch.Tensor, count: int | None) -> torch.Tensor:
    """The sum of products of the pairs in ``roots``, one number like ``like``; with ``count`` along a leading axis."""
    lead = () if count is None else (count,)
    terms = [(y * weight).unsqueeze(-1).flatten(len(lead)).sum(-1, dtype=like.dtype) for y, weight in roots]
    return sum(terms[1:], terms[0]).detach().reshape((*lead, *like.shape))


def _gradients(
    roots: Sequence[_Root],
    inputs: Sequence[torch.Tensor],
    create_graph: bool = False,
    retain_graph: bool = False,
    count: int | None = None,
    warn: str | None = None,
) -> list[torch.Tensor]:
    """Gradients of the sum of products of the pairs in ``roots``; zeros for inputs on which it does not depend.

    With ``count``, weights and gradients have a leading axis of this size. If the sum depends on no input, a warning
    names the function ``warn``.
    """
    roots = [(y, weight) for y, weight in roots if y.requires_grad]
    found: Sequence[torch.Tensor | None] = [None] * len(inputs)
    if roots:
        outputs, weights = zip(*roots)
        found = torch.autograd.grad(
            outputs,
            inputs,
            weights,
            retain_graph=retain_graph or create_graph,
            create_graph=create_graph,
            allow_unused=True,
            is_grads_batched=count is not None,
        )
    if warn is not None and all(gradient is None for gradient in found):
        warnings.warn(
            f"`{warn}`: in torch's autograd graph the outputs do not depend on the inputs, so the gradients are zero",
            UserWarning,
            stacklevel=2,
        )
    lead = () if count is None else (count,)
    return [x.new_zeros((*lead, *x.shape)) if gradient is None else gradient for x, gradient in zip(inputs, found)]


def _outputs(request: Request, inputs: Sequence[torch.Tensor], around: contextlib.ExitStack) -> Sequence[torch.Tensor]:
    """The outputs of the function, after a check. Its context is entered on ``around``."""
    function = request.function
    evaluate = function.evaluate if request.directions or function.first_order is None else function.first_order
    given = inputs if function.only_reads else [x.clone() for x in inputs]
    if function.around is not None:
        around.enter_context(function.around(*given))
    outputs = evaluate(*given)
    if len(outputs) != len(request.outputs):
        raise ValueError(f"`{function.name}` returned {len(outputs)} tensors, but {len(request.outputs)} were declared")
    for number, (output, declared) in enumerate(zip(outputs, request.outputs)):
        where = f"`{function.name}`: output {number}"
        if not isinstance(output, torch.Tensor):
            raise TypeError(f"{where} must be a tensor, got {type(output).__name__}")
        if tuple(output.shape) != tuple(declared.shape):
            raise ValueError(f"{where} has shape {tuple(output.shape)}, but {tuple(declared.shape)} was declared")
        expected = torch_dtype(declared.dtype)
        if output.dtype != expected and not (function.rounds and output.dtype == WIDER.get(expected)):
            raise TypeError(f"{where} has dtype {output.dtype}, but {expected} was declared")
    return outputs
