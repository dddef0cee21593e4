"""Calls in compiled graphs on a CPU: one op for a whole call, which runs it as eager mode does.

Called one by one from a compiled graph, the operators of a call take longer than the same call in eager mode, which
runs a plan where it repeats, and keeps what depends on the cell alone. So a function of data (`whole`) is one op there.
The op has the tensors among the arguments, and a text that says how they make up the arguments, so that a graph that is
kept on disk has all that it needs in another process. Its derivatives, of any order, are the same op with incoming
gradients; those of first order may come with the results.

Values that do not fit together are NaN in results, as elsewhere in compiled graphs, in those of their system where
that is known.
"""

import functools
import json
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from nvalchemiops import __version__, notices
from nvalchemiops.arguments import ValuesError
from nvalchemiops.layout import layout
from nvalchemiops.torch.autograd.naming import library_for
from nvalchemiops.torch.autograd.op import refuse_transforms, widened
from nvalchemiops.torch.runtime import _torch_internals as internals
from nvalchemiops.torch.runtime import engine
from nvalchemiops.torch.runtime.context import hidden_values
from nvalchemiops.torch.runtime.engine import Levels, Tensors
from nvalchemiops.torch.runtime.recorder import not_repeatable, storage_of


class Leaves(NamedTuple):
    """What arguments are made of beside words."""

    tensors: Any
    integers: Any
    floats: Any


class _Whole(NamedTuple):
    """A function that is one op, and the shapes of its results, from the same arguments."""

    function: Callable[..., Tensors]
    shapes: Callable[..., Sequence[Sequence[Any]] | None]


_functions: dict[str, _Whole] = {}


def whole(
    shapes: Callable[..., Sequence[Sequence[Any]] | None], along: Callable[..., Sequence[Any]] = lambda *_: ()
) -> Callable[[Callable[..., Tensors]], Callable[..., Tensors]]:
    """Make a function of data one op in compiled graphs on a CPU. A decorator.

    Data are tensors, numbers, words, None, classes, and tuples of these, which may have names. A call with anything
    else is traced, as is any on a GPU, and any that is exported. Results have the dtype of the first tensor.

    Parameters
    ----------
    shapes : callable
        Of the same arguments: the shapes of the results. Raises where arguments cannot be right;
        None for a call that is traced.
    along : callable, optional
        Of the same arguments: tensors by which gradients of the sum of the first result come with the results, if
        these tensors require gradients.
    """

    def decorate(function: Callable[..., Tensors]) -> Callable[..., Tensors]:
        path = f"{function.__module__}:{function.__qualname__}"
        _functions[path] = _Whole(function, shapes)

        def call(*args: Any) -> Tensors:
            if torch.compiler.is_compiling() and not internals.is_exporting():
                leaves = Leaves([], [], [])
                text, found = _text(args, leaves), shapes(*args)
                if text is not None and found is not None:
                    first = [t for t in along(*args) if isinstance(t, torch.Tensor) and t.requires_grad]
                    is_tracked = torch.is_grad_enabled()
                    by = [k for k, t in enumerate(leaves[0]) if is_tracked and any([t is other for other in first])]
                    results = one_op(*leaves, [], [], f'["{__version__}","{path}",{text}]', by, [])
                    return tuple(results[: len(found)])
            return function(*args)

        return internals.only_inlined(functools.wraps(function)(call), with_calls=True)

    return decorate


# -- arguments as text ----------------------------------------------------------------------------


def _text(value: Any, leaves: Leaves) -> str | None:
    """A text for ``value`` without its tensors and numbers, which are added to ``leaves``; None if there is none.

    For a compiler, which follows it: words become constants of the graph, numbers may stay symbols.
    """
    if value is None:
        return "null"
    if isinstance(value, torch.Tensor):
        if type(value) not in internals.PLAIN_TYPES or not layout(value.device.type).reads:
            return None
        leaves.tensors.append(value)
        return '["t"]'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        leaves.integers.append(value)
        return '["i"]'
    if isinstance(value, float):
        leaves.floats.append(value)
        return '["f"]'
    if isinstance(value, str):
        return None if '"' in value or "\\" in value else f'"{value}"'
    if isinstance(value, type):
        return f'["p","{value.__module__}:{value.__qualname__}"]'
    if not isinstance(value, tuple):
        return None
    path, values = getattr(value, "as_call", (f"{type(value).__module__}:{type(value).__qualname__}", value))
    parts = [f'"{path}"']
    for entry in values:
        part = _text(entry, leaves)
        if part is None:
            return None
        parts.append(part)
    return "[" + ",".join(parts) + "]"


Make = Callable[[Leaves], Any]


def _part(value: Any) -> tuple[Any, Make | None]:
    """What a text describes: a constant, or how to make it of the next leaves."""
    if not isinstance(value, list):
        return value, None
    head, *rest = value
    if head in _LEAVES:
        number = _LEAVES.index(head)
        return None, lambda leaves: next(leaves[number])
    if head == "p":
        return pkgutil.resolve_name(rest[0]), None
    kind = pkgutil.resolve_name(head)
    gather: Callable[[Any], Any] = tuple if kind is tuple else getattr(kind, "_make", lambda entries: kind(*entries))
    parts = [_part(entry) for entry in rest]
    if all([make is None for _, make in parts]):
        return gather([constant for constant, _ in parts]), None
    return None, lambda leaves: gather([constant if make is None else make(leaves) for constant, make in parts])


_LEAVES = "tif"
"""Of tensors, integers, floats: their letters in a text."""


@functools.lru_cache(maxsize=256)
def _function_of(text: str) -> _Whole:
    """A function and its shapes, both of leaves, for the text of a call."""
    release, path, arguments = json.loads(text)
    if release != __version__:
        raise RuntimeError(f"a graph was compiled with nvalchemiops {release}: compile it again with {__version__}")
    pkgutil.resolve_name(path)  # which imports the module
    constant, make = _part(arguments)

    def applied(function: Callable[..., Any]) -> Callable[..., Any]:
        if make is None:
            return lambda *leaves: function(*constant)
        return lambda *leaves: function(*make(Leaves(*map(iter, leaves))))

    return _Whole(*map(applied, _functions[path]))


# -- the op ---------------------------------------------------------------------------------------

SCHEMA = (
    "(Tensor[] tensors, SymInt[] integers, float[] floats, Tensor[] incoming, Tensor[] first, str text, int[] along, "
    "int[] levels) -> Tensor[]"
)
"""Of results of a call, or of a derivative.

``incoming`` are gradients; ``levels`` says of which derivative, as `_levels_of` reads it. ``along`` are numbers of
tensors by which gradients of the sum of the first result follow the results. ``first`` are those, for a derivative by
these tensors: if the incoming gradient has one value the derivative is a product.
"""


@functools.lru_cache(maxsize=256)
def _levels_of(numbers: tuple[int, ...]) -> Levels:
    """Levels from one list: for each, how many results and tensors, then the numbers of both."""
    found, waiting = [], list(numbers)
    while waiting:
        n_given, n_wanted, *waiting = waiting
        found.append((tuple(waiting[:n_given]), tuple(waiting[n_given : n_given + n_wanted])))
        del waiting[: n_given + n_wanted]
    return tuple(found)


def _run(
    tensors: list[torch.Tensor],
    integers: list[int],
    floats: list[float],
    incoming: list[torch.Tensor],
    first: list[torch.Tensor],
    text: str,
    along: list[int],
    levels: list[int],
) -> list[torch.Tensor]:
    function = _function_of(text).function
    if first:
        weights = engine.weights_of_systems(incoming[0], False, None, 1)
        if weights is not None:
            return [t * weights.to(t.dtype) for t in first]

    def body(at: Any, _: Sequence[bool]) -> Tensors:
        results = function(at, integers, floats)
        if not along:
            return results
        by = [at[k] for k in along]
        first: Any = engine.first_derivatives(results[0], by)
        if first is None:
            ones = torch.ones_like(results[0])
            first = torch.autograd.grad(results[0], by, ones, allow_unused=True, materialize_grads=True)
        return (*results, *first)

    def evaluate() -> Tensors:
        here = [t.detach() for t in tensors]
        for k in along:
            here[k].requires_grad_()
        return engine.full(body, _levels_of(tuple(levels)), (), [*here, *incoming])

    points = [*tensors, *incoming]
    with internals.autograd_inside(), torch.set_grad_enabled(bool(along)), notices.unsaid():
        try:
            found = evaluate()
        except ValuesError:
            try:  # where values are not read, those of one system are no matter of others
                with engine.off(), hidden_values(), np.errstate(invalid="ignore"):
                    found = evaluate()
            except ValuesError:
                with internals.without_data():
                    without = [list(map(torch.empty_like, some)) for some in (tensors, incoming)]
                    shapes = _shapes(Leaves(without[0], integers, floats), without[1], text, along, levels)
                return [points[0].new_full(shape, torch.nan, dtype=dtype) for shape, dtype in shapes]
    return _separate(found, (*points, *first))


def _separate(results: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Results in memory that no two of them share, nor with what is given."""
    known, found = {storage_of(t) for t in given}, []
    for result in results:
        own = result.detach().contiguous()
        if own.numel() and storage_of(own) in known:
            own = own.clone()
        known.add(storage_of(own))
        found.append(own)
    return found


def _shapes(
    leaves: Leaves, incoming: Sequence[torch.Tensor], text: str, along: Sequence[int], levels: Sequence[int]
) -> list[tuple[Sequence[Any], torch.dtype]]:
    tensors = leaves.tensors
    if levels:
        points = (*tensors, *incoming)
        return [(points[k].shape, points[k].dtype) for k in _levels_of(tuple(levels))[-1][1]]
    results = [(shape, tensors[0].dtype) for shape in _function_of(text).shapes(*leaves) or ()]
    return [*results, *[(tensors[k].shape, tensors[k].dtype) for k in along]]


def _fake(tensors: Any, integers: Any, floats: Any, incoming: Any, first: Any, *others: Any) -> list[torch.Tensor]:
    shapes = _shapes(Leaves(tensors, integers, floats), incoming, *others)
    return [tensors[0].new_empty(shape, dtype=dtype) for shape, dtype in shapes]


class _Derivative(torch.autograd.Function):
    """The op with its derivative, which is the op again."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, counts: Any, numbers: Any, others: Any, *flat: Any) -> tuple[torch.Tensor, ...]:
        n_tensors, count = counts
        along = others[1]
        args = (list(flat[:n_tensors]), *numbers, list(flat[n_tensors:count]), list(flat[count:]), *others)
        found = internals.below_autograd(one_op, _run, keyset, args)
        first = found[len(found) - len(along) :]
        ctx.counts, ctx.numbers, ctx.others = counts, numbers, others
        ctx.save_for_backward(*flat[:count], *first)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*first)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor | None) -> Any:
        (n_tensors, count), (text, along, levels) = ctx.counts, ctx.others
        points, first = ctx.saved_tensors[:count], dict(zip(along, ctx.saved_tensors[count:]))
        given = [k for k, g in enumerate(incoming[: len(incoming) - len(first)]) if g is not None]
        wanted = [k for k in range(count) if ctx.needs_input_grad[4 + k]]
        by: dict[int, torch.Tensor] = {}
        if given and wanted:
            came = [*points[n_tensors:], *[incoming[k] for k in given]]
            products = [first[k] for k in wanted] if given == [0] and first.keys() >= set(wanted) else []
            further = [*levels, len(given), len(wanted), *given, *wanted]
            found = one_op(list(points[:n_tensors]), *ctx.numbers, came, products, text, [], further)
            by = dict(zip(wanted, found))
        return (None,) * 4 + tuple([by.get(k) for k in range(len(ctx.needs_input_grad) - 4)])


def _autograd(keyset: Any, *args: Any) -> list[torch.Tensor]:
    refuse_transforms("a compiled call")
    tensors, integers, floats, incoming, first, *others = args
    flat = (*tensors, *incoming, *first)
    if not torch.is_grad_enabled() or not any([t.requires_grad for t in flat]):
        found: list[torch.Tensor] = internals.below_autograd(one_op, _run, keyset, args)
        return found
    counts = len(tensors), len(tensors) + len(incoming)
    return list(_Derivative.apply(keyset, counts, (integers, floats), others, *flat))


def _autocast(device: str, *args: Any) -> Any:
    with torch.autocast(device, enabled=False):
        return one_op(*map(widened, args))


def _register() -> Any:
    library, short = library_for("nvalchemiops::call", _run)
    overload = internals.define(library, short, SCHEMA, _run, _fake)
    library.impl(short, _autograd, "Autograd", with_keyset=True)
    for device in ("CPU", "CUDA"):
        library.impl(short, functools.partial(_autocast, device.lower()), f"Autocast{device}")
    not_repeatable.add(overload)
    return overload


one_op = _register()
"""The op, with arguments as in `SCHEMA`."""
