"""Utilities for JAX programs: dataclasses that are pytrees, functions of pytrees, and guards against transformations.

Where JAX has such a function, these wrap it. Their types let decorated functions and classes keep their signatures in a
type checker.
"""

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import (
    Any,
    Literal,
    ParamSpec,
    Protocol,
    TypedDict,
    TypeVar,
    TypeVarTuple,
    Unpack,
    cast,
    dataclass_transform,
    overload,
    runtime_checkable,
)

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

T = TypeVar("T")
R = TypeVar("R")
Aux = TypeVar("Aux")
Function = TypeVar("Function", bound=Callable[..., Any])
P = ParamSpec("P")
Ts = TypeVarTuple("Ts")
Tree_co = TypeVar("Tree_co", covariant=True)

__all__ = [
    "HasScatterArgs",
    "NotJaxCompatibleError",
    "PyTreeDef",
    "ScatterArgs",
    "SupportsTreeMatch",
    "dataclass",
    "field",
    "is_traced",
    "isin",
    "jit",
    "kahan_summation",
    "key_chain",
    "lens_field",
    "linearize",
    "no_jax_tracing",
    "no_post_init",
    "non_differentiable",
    "sequential_vmap_with_vjp",
    "shard_map",
    "skip_post_init_if_disabled",
    "tree_concat",
    "tree_map",
    "tree_scatter_set",
    "tree_stack",
    "tree_structure",
    "tree_where_broadcast_last",
    "tree_zeros_like",
    "vectorize",
]


# -- dataclasses that are pytrees -----------------------------------------------------------------

_post_init_is_off = contextvars.ContextVar("nvalchemiops.jax.utils: __post_init__ is off", default=False)


@contextlib.contextmanager
def no_post_init() -> Iterator[None]:
    """A context in which no ``__post_init__`` runs that is decorated by `skip_post_init_if_disabled`.

    For objects that temporarily hold something other than arrays: names of data sets, shardings, placeholders. It
    affects the current thread (and the current asyncio task), and may be nested.
    """
    token = _post_init_is_off.set(True)
    try:
        yield
    finally:
        _post_init_is_off.reset(token)


def skip_post_init_if_disabled(post_init: Callable[P, None]) -> Callable[P, None]:
    """Decorate a ``__post_init__`` (or any method without a result) that must not run inside `no_post_init`.

    JAX flattens pytrees and rebuilds them, sometimes with placeholders for leaves. A `dataclass` is rebuilt inside
    `no_post_init`, so a decorated check of shapes sees only objects that programs make, and never placeholders.
    """

    @functools.wraps(post_init)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        if not _post_init_is_off.get():
            post_init(*args, **kwargs)

    return run


class _Options(TypedDict, total=False):
    init: bool
    repr: bool
    hash: bool | None
    compare: bool
    metadata: Mapping[Any, Any] | None
    kw_only: bool
    static: bool


class _AllOptions(_Options, total=False):
    default: Any
    default_factory: Any


@overload
def field(*, default: T, **options: Unpack[_Options]) -> T: ...


@overload
def field(*, default_factory: Callable[[], T], **options: Unpack[_Options]) -> T: ...


@overload
def field(**options: Unpack[_Options]) -> Any: ...


def field(
    *,
    default: Any = dataclasses.MISSING,
    default_factory: Any = dataclasses.MISSING,
    init: bool = True,
    repr: bool = True,
    hash: bool | None = None,
    compare: bool = True,
    metadata: Mapping[Any, Any] | None = None,
    kw_only: Any = dataclasses.MISSING,
    static: bool = False,
) -> Any:
    """Describe a field of a `dataclass`, as `dataclasses.field` does.

    Parameters
    ----------
    default, default_factory, init, repr, hash, compare, metadata, kw_only
        Those of `dataclasses.field`.
    static : bool
        Whether the field belongs to the structure of the pytree instead of being a leaf. Transformations do not see a
        static field, and each value has its own compilation. The value must be hashable and comparable by ``==``, so
        it cannot be an array.

    Returns
    -------
    dataclasses.Field
        For a type checker it has the annotated type of the field.
    """
    options = {
        "default": default,
        "default_factory": default_factory,
        "kw_only": kw_only,
        "init": init,
        "repr": repr,
        "hash": hash,
        "compare": compare,
        "metadata": {**(metadata or {}), "static": static},
    }
    return dataclasses.field(**options)


def lens_field(**options: Unpack[_AllOptions]) -> Any:
    """Describe a field of a `dataclass` whose type is a lens, or another generic protocol of functions.

    The same as `field`, but a type checker accepts any default, since it cannot infer the parameters of a generic lens
    from one. A lens that holds arrays, such as indices, is a pytree and remains a leaf. For a lens that is a plain
    function set ``static=True``.
    """
    of_anything: Callable[..., Any] = field
    return of_anything(**options)


lens_field.__signature__ = inspect.signature(field)  # type: ignore[attr-defined]  # `inspect` reads it


def _rebuild(cls: type[T], names: tuple[str, ...], values: Iterable[Any]) -> T:
    with no_post_init():
        return cls(**dict(zip(names, values)))


def _register(cls: type[T]) -> type[T]:
    """Register a dataclass as a pytree whose children are its non-static fields, in order."""
    parameters = [f for f in dataclasses.fields(cls) if f.init]  # type: ignore[arg-type]
    data = tuple(f.name for f in parameters if not f.metadata.get("static", False))
    static = tuple(f.name for f in parameters if f.metadata.get("static", False))
    required = [
        name
        for name, p in inspect.signature(cls).parameters.items()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and name not in data + static
    ]
    if required:
        raise TypeError(
            f"`{cls.__name__}` cannot be rebuilt from its fields alone: its constructor also needs "
            f"{', '.join(f'`{name}`' for name in required)}. Give them defaults, or make them fields"
        )
    if not hasattr(cls, "__post_init__"):
        return jax.tree_util.register_dataclass(cls, data, static)
    keys = [jax.tree_util.GetAttrKey(name) for name in data]
    jax.tree_util.register_pytree_with_keys(
        cls,
        lambda x: (tuple((key, getattr(x, key.name)) for key in keys), tuple(getattr(x, name) for name in static)),
        lambda values, children: _rebuild(cls, static + data, (*values, *children)),
        lambda x: (tuple(getattr(x, name) for name in data), tuple(getattr(x, name) for name in static)),
    )
    return cls


@overload
def dataclass(cls: type[T], /) -> type[T]: ...


@overload
def dataclass(
    *,
    init: bool = True,
    repr: bool = True,
    eq: bool = True,
    order: bool = False,
    unsafe_hash: bool = False,
    frozen: bool = True,
    match_args: bool = True,
    kw_only: bool = False,
    slots: bool = False,
    weakref_slot: bool = False,
) -> Callable[[type[T]], type[T]]: ...


@dataclass_transform(frozen_default=True, field_specifiers=(field, lens_field, dataclasses.field))
def dataclass(cls: type[T] | None = None, /, *, frozen: bool = True, **options: bool) -> Any:
    """Make a frozen dataclass that is a pytree: jit, grad, vmap and scan take it and return it.

    Parameters
    ----------
    cls : type
        A class with annotated fields. Fields with `field(static=True)` belong to the structure, all others are
        children.
    frozen : bool
        Whether attributes cannot be assigned. Use `dataclasses.replace` to make a changed copy.
    **options : bool
        Options of `dataclasses.dataclass`: ``init``, ``repr``, ``eq``, ``order``, ``unsafe_hash``, ``match_args``,
        ``kw_only``, ``slots``, ``weakref_slot``. The generated methods compare and hash fields, so ``==`` and ``hash``
        work for fields that are numbers and strings, but not for arrays.

    Returns
    -------
    type
        The class; or a decorator, if only options are given. A subclass must be decorated itself. A class that is
        decorated already, whose own attribute ``_jax_dataclass`` is True, is returned unchanged.

    Raises
    ------
    TypeError
        The constructor needs an argument that is not a field, such as a `dataclasses.InitVar` without a default.

    Notes
    -----
    JAX flattens objects and rebuilds them by their constructor, including `__post_init__`, sometimes with placeholders
    for leaves. Decorate a ``__post_init__`` that checks values by `skip_post_init_if_disabled`: it then runs for
    objects that a program makes, and not for those that JAX rebuilds. A field with ``init=False`` is not a leaf: an
    undecorated ``__post_init__`` computes it from the others.

    Examples
    --------
    >>> import jax
    >>> from nvalchemiops.jax.utils import dataclass, field
    >>> @dataclass
    ... class Oscillator:
    ...     stiffness: jax.Array
    ...     name: str = field(default="harmonic", static=True)
    >>> jax.grad(lambda o: o.stiffness**2)(Oscillator(3.0))
    Oscillator(stiffness=Array(6., dtype=float..., weak_type=True), name='harmonic')
    """

    def decorate(plain: type[T]) -> type[T]:
        if "_jax_dataclass" in vars(plain):
            return plain
        made = _register(dataclasses.dataclass(frozen=frozen, **options)(plain))
        made._jax_dataclass = True  # type: ignore[attr-defined]  # a mark that other libraries look for
        return made

    return decorate if cls is None else decorate(cls)


# -- functions of pytrees -------------------------------------------------------------------------


@runtime_checkable
class PyTreeDef(Protocol[Tree_co]):
    """The structure of a pytree from `tree_structure`: `jax.tree_util.PyTreeDef`, with the type of the tree."""

    @property
    def num_leaves(self) -> int:
        """Number of leaves."""

    @property
    def num_nodes(self) -> int:
        """Number of nodes, including leaves."""

    def unflatten(self, leaves: Iterable[Any], /) -> Tree_co:
        """Build the tree with these leaves."""

    def flatten_up_to(self, tree: Any, /) -> list[Any]:
        """List the subtrees of a tree at the places where this structure has leaves."""

    def __hash__(self) -> int: ...


@runtime_checkable
class SupportsTreeMatch(Protocol):
    """A node of a pytree that aligns itself with its counterparts in other trees before they are mapped together.

    An example is an array of labels with the list that they index: two such nodes can be added once their lists agree.
    """

    def __tree_match__(self: T, *others: T) -> tuple[T, ...]:
        """Return this node and the others, in order, with one structure."""


class ScatterArgs(TypedDict, total=False):
    """Keyword arguments of ``array.at[indices].set`` and ``.get``."""

    mode: Literal["promise_in_bounds", "clip", "drop", "fill"] | None
    fill_value: Any
    indices_are_sorted: bool
    unique_indices: bool
    wrap_negative_indices: bool


@runtime_checkable
class HasScatterArgs(Protocol):
    """A node of a pytree that specifies how its arrays are written to; see `tree_scatter_set`."""

    @property
    def scatter_args(self) -> ScatterArgs:
        """Keyword arguments of ``array.at[indices].set``."""


def tree_structure(tree: T, is_leaf: Callable[[Any], bool] | None = None) -> PyTreeDef[T]:
    """`jax.tree.structure`: the structure of a pytree without its leaves.

    Parameters
    ----------
    tree : pytree
        The tree.
    is_leaf : callable, optional
        Whether a node counts as a leaf.

    Returns
    -------
    PyTreeDef
        Hashable and comparable by ``==``.
    """
    return cast(PyTreeDef[T], jax.tree.structure(tree, is_leaf=is_leaf))


def _flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], PyTreeDef[Any]]:
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_leaf)
    return leaves, cast(PyTreeDef[Any], structure)


def _aligns(node: Any) -> bool:
    return hasattr(type(node), "__tree_match__")


def _aligned(node: Any, others: Sequence[Any]) -> tuple[Any, ...]:
    nodes = tuple(node.__tree_match__(*others))
    if len(nodes) != 1 + len(others):
        raise ValueError(
            f"`{type(node).__name__}.__tree_match__` must return {1 + len(others)} nodes, itself and the others, "
            f"got {len(nodes)}"
        )
    return nodes


def _children(node: Any, others: Sequence[Any]) -> tuple[Any, list[tuple[Any, ...]]]:
    """The structure of one node, and its children with those of the others."""
    own, structure = _flatten(node, lambda x: x is not node)
    return structure, list(zip(own, *(structure.flatten_up_to(other) for other in others)))


def tree_map(function: Callable[..., Any], tree: T, /, *rest: Any, is_leaf: Callable[[Any], bool] | None = None) -> T:
    """`jax.tree.map` for trees whose nodes may align themselves.

    Parameters
    ----------
    function : callable
        Takes a leaf of each tree.
    tree, *rest : pytrees
        Trees with one structure. If a node of ``tree`` has a method ``__tree_match__`` (`SupportsTreeMatch`), it is
        called with the counterparts of the node. The returned nodes replace these, and their children are mapped.
    is_leaf : callable, optional
        Whether a node of ``tree`` counts as a leaf. Leaves are not aligned.

    Returns
    -------
    pytree
        The results, with the structure of ``tree`` after it was aligned.
    """
    if not rest:
        return cast(T, jax.tree.map(function, tree, is_leaf=is_leaf))
    leaves, structure = _flatten(tree, _aligns if is_leaf is None else lambda x: is_leaf(x) or _aligns(x))
    results = []
    for leaf, *others in zip(leaves, *(structure.flatten_up_to(other) for other in rest)):
        if not _aligns(leaf) or (is_leaf is not None and is_leaf(leaf)):
            results.append(function(leaf, *others))
            continue
        node, *others = _aligned(leaf, others)
        inside, children = _children(node, others)
        if inside == tree_structure(0):  # the node aligns, but is not a pytree itself
            results.append(function(node, *others))
        else:
            results.append(inside.unflatten([tree_map(function, *child, is_leaf=is_leaf) for child in children]))
    return cast(T, structure.unflatten(results))


def tree_concat(*trees: T, axis: int = 0) -> T:
    """Concatenate the arrays of several pytrees, leaf by leaf.

    Parameters
    ----------
    *trees : pytrees of arrays
        One or more, with one structure. They are aligned as in `tree_map`.
    axis : int
        The axis to concatenate along.

    Returns
    -------
    pytree of arrays
    """
    return _of_several("tree_concat", trees, lambda *leaves: jnp.concatenate(leaves, axis=axis))


def tree_stack(*trees: T, axis: int = 0) -> T:
    """Stack the arrays of several pytrees along a new axis, leaf by leaf.

    Parameters
    ----------
    *trees : pytrees of arrays
        One or more, with one structure. They are aligned as in `tree_map`.
    axis : int
        The position of the new axis.

    Returns
    -------
    pytree of arrays
    """
    return _of_several("tree_stack", trees, lambda *leaves: jnp.stack(leaves, axis=axis))


def _of_several(name: str, trees: tuple[T, ...], function: Callable[..., Array]) -> T:
    if not trees:
        raise TypeError(f"`{name}` needs at least one tree")
    return tree_map(function, *trees)


def tree_zeros_like(tree: T) -> T:
    """Zeros with the shapes and dtypes of the leaves of a pytree.

    Parameters
    ----------
    tree : pytree of arrays
        Or of `jax.ShapeDtypeStruct`.

    Returns
    -------
    pytree of arrays
    """
    return cast(T, jax.tree.map(jnp.zeros_like, tree))


def tree_where_broadcast_last(accept: ArrayLike, a: T, b: T) -> T:
    """Choose between the leaves of two pytrees by a mask over their first axes.

    Parameters
    ----------
    accept : Array of bool, shape (n, ...) or ()
        True where to take ``a``. The mask is broadcast over the further axes of leaves, for example a mask of systems
        over their positions.
    a, b : pytrees of arrays
        With one structure. They are aligned as in `tree_map`. Leaves have at least as many axes as ``accept``.

    Returns
    -------
    pytree of arrays
        Derivatives flow to the chosen leaf. The derivative of the other one is multiplied by zero, so a NaN in it
        remains NaN.

    Raises
    ------
    ValueError
        A leaf has fewer axes than ``accept``.
    """
    mask = jnp.asarray(accept)

    def choose(x: ArrayLike, y: ArrayLike) -> Array:
        missing = max(jnp.ndim(x), jnp.ndim(y)) - mask.ndim
        if missing < 0:
            raise ValueError(
                f"`accept` has shape {mask.shape}, so leaves must have at least {mask.ndim} axes, "
                f"got shapes {jnp.shape(x)} and {jnp.shape(y)}"
            )
        return jnp.where(mask.reshape(mask.shape + (1,) * missing), x, y)

    return tree_map(choose, a, b)


def tree_scatter_set(item: T, value: T, idxs: Any, args: ScatterArgs | None = None) -> T:
    """Write into the arrays of a pytree: ``array.at[idxs].set(value)``, leaf by leaf.

    Parameters
    ----------
    item : pytree of arrays
        The arrays to write into.
    value : pytree of arrays
        The values to write, with the same structure. They are aligned as in `tree_map`.
    idxs
        An index, a slice, an array of indices, or a tuple of those.
    args : ScatterArgs, optional
        Keyword arguments of ``set``, such as ``{"mode": "drop"}``. A node of ``item`` with ``scatter_args``
        (`HasScatterArgs`) adds its own for the arrays below it. Those of the caller take precedence, then those of
        inner nodes. ``fill_value`` is for reading and has no effect here.

    Returns
    -------
    pytree of arrays
        With the dtypes of ``item``.
    """
    return cast(T, _scatter_set(item, value, idxs, {}, {**(args or {})}))


def _has_scatter_args(node: Any) -> bool:
    return hasattr(node, "scatter_args")


def _scatter_set(item: Any, value: Any, idxs: Any, of_nodes: dict[str, Any], of_caller: dict[str, Any]) -> Any:
    def put(old: Any, new: Any) -> Any:
        if not _has_scatter_args(old):
            options = {name: x for name, x in {**of_nodes, **of_caller}.items() if name != "fill_value"}
            return jnp.asarray(old).at[idxs].set(new, **options)
        merged = {**of_nodes, **old.scatter_args}
        old, new = _aligned(old, [new]) if _aligns(old) else (old, new)
        structure, children = _children(old, [new])
        if structure == tree_structure(0):
            raise TypeError(f"`{type(old).__name__}` has `scatter_args`, but is not registered as a pytree")
        return structure.unflatten([_scatter_set(x, y, idxs, merged, of_caller) for x, y in children])

    return tree_map(put, item, value, is_leaf=_has_scatter_args)


# -- functions of arrays --------------------------------------------------------------------------


def isin(a: Array, b: Array, max_item: int) -> Array:
    """Whether items occur in a set of integers, by a table look-up.

    The time is proportional to the sizes of ``a``, ``b`` and the table, while `jax.numpy.isin` compares or sorts.

    Parameters
    ----------
    a : Array of integers, any shape
        The items to look up.
    b : Array of integers, any shape
        The set.
    max_item : int
        Size of the table: items are 0 to ``max_item - 1``. All other numbers, also negative ones, are never in the set.

    Returns
    -------
    Array of bool, shape of ``a``

    Raises
    ------
    TypeError
        Items are not integers, or ``max_item`` is not an int.
    ValueError
        ``max_item`` is negative.
    """
    size = operator.index(max_item)
    if size < 0:
        raise ValueError(f"`max_item` must be non-negative, got {size}")
    table = jnp.zeros(size + 1, bool).at[_slots("b", b, size)].set(True)
    return table.at[size].set(False)[_slots("a", a, size)]


def _slots(name: str, items: ArrayLike, size: int) -> Array:
    """The places of items in a table. Items out of range share an extra slot at its end."""
    array = jnp.asarray(items)
    if not array.size:
        array = array.astype(int)  # an empty list has a float dtype
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"`{name}` must hold integers, got {array.dtype}")
    inside = array >= 0
    if size <= jnp.iinfo(array.dtype).max:
        inside &= array < size
    return jnp.where(inside, array.astype(int), size)


def kahan_summation(*summands: T, compensate: T | None = None) -> tuple[T, T]:
    """Sum and return the accumulated rounding error as well, so that long sums lose no digits.

    Parameters
    ----------
    *summands : pytrees of arrays
        All with one structure. The sum has the shape to which they broadcast and the dtype to which they promote.
    compensate : pytree of arrays, optional
        The compensation of the first summand, if that is itself a sum of this function.

    Returns
    -------
    total : pytree of arrays
        The sum, rounded.
    compensation : pytree of arrays
        The amount by which ``total`` is too large: in higher precision ``total - compensation`` would be the better
        value. Zero for integers, and where ``total`` is infinite or NaN.

    Raises
    ------
    TypeError
        There are no summands.

    Notes
    -----
    The error of each addition is computed exactly, whichever summand is the larger (D. E. Knuth, The Art of Computer
    Programming 2, section 4.2.2, theorem B). So the sum of n numbers has an error of one rounding, plus about n² ε²
    times the sum of their absolute values [1]_. The compiler is prevented from cancelling the error terms. Derivatives
    are those of the plain sum.

    .. [1] T. Ogita, S. M. Rump, S. Oishi, SIAM J. Sci. Comput. 26, 1955 (2005), proposition 4.5.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from nvalchemiops.jax.utils import kahan_summation
    >>> one, small = jnp.float32(1.0), jnp.float32(2.0**-26)
    >>> total, compensation = kahan_summation(one, small)
    >>> for _ in range(3):
    ...     total, compensation = kahan_summation(total, small, compensate=compensation)
    >>> float(total) - float(compensation) == 1.0 + 4.0 * 2.0**-26
    True
    """
    if not summands:
        raise TypeError("`kahan_summation` needs at least one summand")
    compensations = []

    def add(first: ArrayLike, *others: ArrayLike) -> Array:
        compensation, others = (None, others) if compensate is None else (others[0], others[1:])
        total, compensation = _sum_leaves([first, *others], compensation)
        compensations.append(compensation)
        return total

    first, *others = summands
    total = tree_map(add, first, *([] if compensate is None else [compensate]), *others)
    return total, tree_structure(total).unflatten(compensations)


def _sum_leaves(summands: Sequence[ArrayLike], compensation: ArrayLike | None) -> tuple[Array, Array]:
    shape = jnp.broadcast_shapes(*(jnp.shape(x) for x in summands))
    dtype = jnp.result_type(*summands)
    arrays = [jnp.broadcast_to(jnp.asarray(x, dtype), shape) for x in summands]
    if not jnp.issubdtype(dtype, jnp.inexact):
        return functools.reduce(jnp.add, arrays), jnp.zeros(shape, dtype)
    arrays = [_rounded(x) for x in arrays]
    total = arrays[0]
    error = jnp.broadcast_to(jnp.asarray(0.0 if compensation is None else compensation, dtype), shape)
    error = -error
    for x in arrays[1:]:
        total, rounding = _exact_sum(total, x)
        error = error + rounding
    total, error = _exact_sum(total, error)
    return total, -error


def _exact_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """The rounded sum and its error. The error is zero where the sum overflows."""
    total = _as_computed(a + b)
    b_of_total = _as_computed(total - a)
    a_of_total = _as_computed(total - b_of_total)
    error = (a - a_of_total) + (b - b_of_total)
    return total, jnp.where(jnp.isfinite(total), error, jnp.zeros_like(error))


def _rounded(x: Array) -> Array:
    """A rounded summand: a product would otherwise enter a fused multiply-add without rounding.

    Optimization barriers are removed before LLVM fuses operations, but a select remains.
    """
    return jnp.where(x == x, x, jnp.full_like(x, jnp.nan))


def _as_computed(x: Array) -> Array:
    """A value that the compiler does not cancel against other values."""
    return cast(Array, jax.lax.optimization_barrier(x))


def key_chain(key: Array, shape: int | Sequence[int] = ()) -> Iterator[Array]:
    """Generate an endless sequence of different random keys, the same sequence for the same key.

    Parameters
    ----------
    key : Array
        A key from `jax.random.key` or `jax.random.PRNGKey`. Do not use it for anything else.
    shape : int or sequence of int
        Shape of the array of keys in each step; () for a single key.

    Yields
    ------
    Array of keys, shape ``shape``
        For example by ``next(chain)``.
    """
    count = (shape,) if isinstance(shape, int) else tuple(shape)
    jax.random.split(key)  # raises for an invalid key now rather than in the first `next`

    def keys(key: Array) -> Iterator[Array]:
        while True:
            key, here = jax.random.split(key)
            yield jax.random.split(here, count) if count else here

    return keys(key)


def sequential_vmap_with_vjp(func: Callable[P, R]) -> Callable[P, R]:
    """Make a function that `jax.vmap` maps slice by slice, in a loop, and that has gradients.

    For functions that cannot be batched, or whose slices together would not fit into memory. `jax.grad`, `jax.vjp` and
    `jax.jacrev` work inside and outside of vmap, and repeatedly. Their loops run slice by slice, too. Nothing is kept
    from the forward pass: a gradient evaluates the function again.

    Parameters
    ----------
    func : callable
        A function of pytrees of arrays that returns one. All differentiated values must be arguments: JAX raises for a
        derivative by a value that the function closes over.

    Returns
    -------
    callable
        The same function, with the same signature. In forward mode (`jax.jvp`, `jax.jacfwd`) JAX raises a TypeError.

    Notes
    -----
    `jax.custom_batching.sequential_vmap` alone cannot be differentiated in reverse mode.
    """
    in_turn = jax.custom_batching.sequential_vmap(lambda args, kwargs: func(*args, **kwargs))
    run = jax.custom_vjp(lambda args, kwargs: in_turn(args, kwargs))

    @functools.cache
    def pullback() -> Callable[..., Any]:  # made when it is needed, since it has a pullback itself
        return sequential_vmap_with_vjp(functools.partial(_cotangents, func))

    def forward(args: Any, kwargs: Any) -> tuple[Any, Any]:
        return run(args, kwargs), (args, kwargs)

    def backward(call: Any, cotangents: Any) -> Any:
        leaves, structure = _flatten(call)
        given = pullback()(call, [c for c in jax.tree.leaves(cotangents) if _is_inexact(c)])
        of_leaves = iter(given)
        return structure.unflatten([next(of_leaves) if _is_inexact(leaf) else None for leaf in leaves])

    run.defvjp(forward, backward)

    @functools.wraps(func)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return cast(R, run(args, kwargs))

    return call


def _is_inexact(x: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.inexact))


def _cotangents(func: Callable[..., Any], call: tuple[Any, Any], cotangents: list[Array]) -> list[Array]:
    """Cotangents of the inexact leaves of a call, given those of the inexact leaves of its result."""
    leaves, structure = _flatten(call)
    inexact = [i for i, leaf in enumerate(leaves) if _is_inexact(leaf)]

    def of_inexact(values: list[Array]) -> Any:
        merged = list(leaves)
        for i, value in zip(inexact, values):
            merged[i] = value
        args, kwargs = structure.unflatten(merged)
        return func(*args, **kwargs)

    result, pull = jax.vjp(of_inexact, [leaves[i] for i in inexact])
    outputs, shape_of_result = _flatten(result)
    given = iter(cotangents)
    whole = [next(given) if _is_inexact(x) else np.zeros(jnp.shape(x), jax.dtypes.float0) for x in outputs]
    return cast(list[Array], pull(shape_of_result.unflatten(whole))[0])


# -- transformations, and guards against them -----------------------------------------------------


@overload
def jit(function: Function, /, **options: Any) -> Function: ...


@overload
def jit(**options: Any) -> Callable[[Function], Function]: ...


def jit(function: Any = None, /, **options: Any) -> Any:
    """`jax.jit`, as a function or as a decorator with options. Functions keep their signature and name.

    Parameters
    ----------
    function : callable
        The function to compile.
    **options
        Options of `jax.jit`.

    Returns
    -------
    callable
        The result of `jax.jit`, with ``lower`` and its other methods; or a decorator, if only options are given.
    """
    if function is None:
        return functools.partial(jit, **options)
    return jax.jit(function, **options)


@overload
def vectorize(function: Function, /, *, excluded: Any = ..., signature: str | None = ...) -> Function: ...


@overload
def vectorize(*, excluded: Any = ..., signature: str | None = ...) -> Callable[[Function], Function]: ...


def vectorize(function: Any = None, /, *, excluded: Any = frozenset(), signature: str | None = None) -> Any:
    """`jax.numpy.vectorize`, as a function or as a decorator with options. Functions keep their signature and name.

    Parameters
    ----------
    function : callable
        A function of single items.
    excluded : set of int or str
        Arguments that are not mapped.
    signature : str, optional
        Shapes of an item and its result, such as ``"(n),(n)->()"``.

    Returns
    -------
    callable
        A function of arrays that broadcast against each other.
    """
    if function is None:
        return functools.partial(vectorize, excluded=excluded, signature=signature)
    return functools.update_wrapper(jnp.vectorize(function, excluded=excluded, signature=signature), function)


@overload
def linearize(function: Callable[[*Ts], R], /, *primals: *Ts) -> tuple[R, Callable[[*Ts], R]]: ...


@overload
def linearize(
    function: Callable[[*Ts], tuple[R, Aux]], /, *primals: *Ts, has_aux: Literal[True]
) -> tuple[R, Callable[[*Ts], R], Aux]: ...


def linearize(function: Callable[[*Ts], Any], /, *primals: *Ts, has_aux: bool = False) -> Any:
    """`jax.linearize`: a function's value, and its derivative as a function of tangents.

    Parameters
    ----------
    function : callable
        A function of positional arguments.
    *primals
        The point at which it is evaluated.
    has_aux : bool
        Whether the function returns a pair of its value and auxiliary data, which are passed through.

    Returns
    -------
    value
        The value of the function.
    derivative : callable
        Takes tangents with the structure of ``primals``, returns a tangent with the structure of ``value``. It may be
        called many times without evaluating the function again.
    aux
        The auxiliary data, if ``has_aux`` is set.
    """
    of_jax: Callable[..., Any] = jax.linearize
    return of_jax(function, *primals, has_aux=has_aux)


@overload
def shard_map(function: Function, /, **options: Any) -> Function: ...


@overload
def shard_map(**options: Any) -> Callable[[Function], Function]: ...


def shard_map(function: Any = None, /, **options: Any) -> Any:
    """`jax.shard_map`, as a function or as a decorator with options. Functions keep their signature and name.

    Parameters
    ----------
    function : callable
        The function that each device runs on its part.
    **options
        Options of `jax.shard_map`: ``out_specs``, ``in_specs``, ``mesh``, ``axis_names``, ``check_vma``.

    Returns
    -------
    callable
        The function of whole arrays; or a decorator, if only options are given.
    """
    if function is None:
        return functools.partial(shard_map, **options)
    return functools.update_wrapper(jax.shard_map(function, **options), function)


class NotJaxCompatibleError(TypeError):
    """A function that needs values was called with tracers, inside a transformation of JAX."""


def is_traced(x: Any) -> bool:
    """Whether a value, or a leaf of a pytree, is a tracer, which has a shape and a dtype but no value."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(x))


def no_jax_tracing(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that needs concrete values: with traced arguments it raises an error that names them.

    If no argument is traced, the function computes with concrete values, also in a program that jit is tracing. Arrays
    that are made inside such a program are traced.

    Raises
    ------
    NotJaxCompatibleError
        In calls under jit, vmap, grad and so on, if a leaf of an argument is traced.
    """

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if is_traced((args, kwargs)):
            name = getattr(function, "__qualname__", repr(function))
            raise NotJaxCompatibleError(
                f"`{name}` needs values and cannot run inside a transformation of JAX (jit, vmap, grad, ...): "
                f"{', '.join(_names_of_traced(function, args, kwargs))} traced. Call it outside, and pass its result in"
            )
        with jax.ensure_compile_time_eval():
            return function(*args, **kwargs)

    return checked


def _names_of_traced(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    try:
        arguments: dict[str, Any] = dict(inspect.signature(function).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):  # the call is invalid, or the function has no signature
        arguments = {f"argument {i}": value for i, value in enumerate(args)} | kwargs
    names = [f"`{name}`" for name, value in arguments.items() if is_traced(value)]
    return [*names[:-1], f"{names[-1]} {'is' if len(names) == 1 else 'are'}"]


@jax.custom_jvp
def _not_differentiable(x: Any) -> Any:
    return x


@_not_differentiable.defjvp
def _raise_when_differentiated(primals: tuple[Any], tangents: tuple[Any]) -> Any:
    shapes = ", ".join(f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}" for leaf in jax.tree.leaves(primals))
    raise NotImplementedError(
        f"`non_differentiable`: a value ({shapes}) that is not differentiable was differentiated. If its derivative is "
        "meant to be zero, apply `jax.lax.stop_gradient` to the inputs of its computation"
    )


def non_differentiable(x: T) -> T:
    """Return arrays unchanged, and raise if a derivative is taken through them.

    Parameters
    ----------
    x : pytree of arrays
        Values without a derivative, such as the result of a search. `jax.lax.stop_gradient` would silently make the
        derivative zero.

    Returns
    -------
    pytree of arrays
        ``x``.

    Raises
    ------
    NotImplementedError
        In forward or reverse mode, while JAX traces the derivative, if ``x`` depends on a differentiated value.
    """
    return cast(T, _not_differentiable(x))
