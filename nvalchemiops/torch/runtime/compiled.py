"""Calls in compiled graphs on a CPU: a whole call is one op, which runs the call as in eager mode.

Eager mode replays plans and caches results that depend only on the cell. A compiled graph that calls the operators one
by one has neither, and is slower. So a function marked with `whole` becomes one op in a compiled graph. The op takes
the tensors among the arguments, and a string from which the other arguments are rebuilt, so a graph cached on disk
works in another process. Derivatives of any order are the same op with incoming gradients; first derivatives may come
with the results.

Arguments whose values do not fit together give NaN, as elsewhere in compiled graphs: in the results of their system
where it is known, otherwise in all results.
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
from nvalchemiops.torch.runtime.recorder import not_repeatable
from nvalchemiops.torch.runtime.storage import storage_of


class Leaves(NamedTuple):
    """The tensors and numbers among the arguments. Everything else becomes part of the string."""

    tensors: Any
    integers: Any
    floats: Any


Shapes = Sequence[tuple[Sequence[Any], torch.dtype]]
"""Shape and dtype of each result."""


class _Whole(NamedTuple):
    """A function that becomes one op, and a function of the same arguments for the shapes and dtypes of its results."""

    function: Callable[..., Tensors]
    shapes: Callable[..., Shapes | None]


_functions: dict[str, _Whole] = {}


def whole(
    shapes: Callable[..., Shapes | None], along: Callable[..., Sequence[Any]] = lambda *_: ()
) -> Callable[[Callable[..., Tensors]], Callable[..., Tensors]]:
    """Make a function one op in compiled graphs on a CPU. A decorator.

    Arguments are tensors, numbers, strings, None, classes, and tuples of these, plain or named. A call with any other
    argument is traced, and so are all calls on a GPU or under export.

    Functions of the same arguments: ``shapes`` returns the shapes and dtypes of the results, or None if the call is to
    be traced, and raises for invalid arguments. ``along`` returns tensors: the op computes the gradients of the sum of
    the first result with respect to those of them that require gradients, together with the results.
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
    """A string for ``value`` without its tensors and numbers, which are appended to ``leaves``; None if not possible.

    The compiler traces this function: strings become constants of the graph, numbers may stay symbols.
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
    """The value that a parsed string describes: a constant, or a function that builds it from the next leaves."""
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
"""The letters for tensors, integers and floats in such a string."""


@functools.lru_cache(maxsize=256)
def _function_of(text: str) -> _Whole:
    """For the string of a call: the function and its shapes, both as functions of the leaves."""
    release, path, arguments = json.loads(text)
    if release != __version__:
        raise RuntimeError(f"a graph was compiled with nvalchemiops {release}: compile it again with {__version__}")
    pkgutil.resolve_name(path)  # imports the module, which registers the function
    _, make = _part(arguments)
    assert make is not None, "there is no op without tensors"

    def applied(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *leaves: function(*make(Leaves(*map(iter, leaves))))

    return _Whole(*map(applied, _functions[path]))


# -- the op ---------------------------------------------------------------------------------------

SCHEMA = (
    "(Tensor[] tensors, SymInt[] integers, float[] floats, Tensor[] incoming, Tensor[] first, str text, int[] along, "
    "int[] levels) -> Tensor[]"
)
"""The op returns the results of a call, or a derivative of it.

``levels`` says which derivative, encoded as `_levels_of` reads it, and ``incoming`` holds its incoming gradients.
``along`` holds indices of tensors: the gradients of the sum of the first result with respect to these tensors follow
the results. In the derivative with respect to these tensors, ``first`` holds these gradients: if all entries of the
incoming gradient are equal, the derivative is the product of this entry and ``first``.
"""


@functools.lru_cache(maxsize=256)
def _levels_of(numbers: tuple[int, ...]) -> Levels:
    """Decode levels from one list: for each level the numbers of results and tensors, then the indices of both."""
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
            try:  # without reading values, bad values of one system do not affect the others
                with engine.off(), hidden_values(), np.errstate(invalid="ignore"):
                    found = evaluate()
            except ValuesError:
                with internals.without_data():
                    without = [list(map(torch.empty_like, some)) for some in (tensors, incoming)]
                    shapes = _shapes(Leaves(without[0], integers, floats), without[1], text, along, levels)
                return [points[0].new_full(shape, torch.nan, dtype=dtype) for shape, dtype in shapes]
    return _separate(found, (*points, *first))


def _separate(results: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results, copied where they share memory with each other or with ``given``."""
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
) -> Shapes:
    tensors = leaves.tensors
    if levels:
        points = (*tensors, *incoming)
        return [(points[k].shape, points[k].dtype) for k in _levels_of(tuple(levels))[-1][1]]
    return [*(_function_of(text).shapes(*leaves) or ()), *[(tensors[k].shape, tensors[k].dtype) for k in along]]


def _fake(tensors: Any, integers: Any, floats: Any, incoming: Any, first: Any, *others: Any) -> list[torch.Tensor]:
    shapes = _shapes(Leaves(tensors, integers, floats), incoming, *others)
    return [tensors[0].new_empty(shape, dtype=dtype) for shape, dtype in shapes]


class _Derivative(torch.autograd.Function):
    """The op with its derivative, which calls the op again."""

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
