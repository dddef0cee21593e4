"""Functions of arrays: membership, exact sums, random keys, and a `vmap` that runs slices one by one."""

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from nvalchemiops.jax.utils.trees import flatten, tree_map, tree_structure

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")


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
        All with the same structure. The sum has the shape to which they broadcast and the dtype to which they promote.
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
    The error of each addition is computed exactly, whichever summand is larger (D. E. Knuth, The Art of Computer
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
        For example with ``next(chain)``.
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
        A function of pytrees of arrays that returns one. All differentiated values must be arguments: JAX raises an
        error for a derivative with respect to a value that the function closes over.

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
        leaves, structure = flatten(call)
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
    leaves, structure = flatten(call)
    inexact = [i for i, leaf in enumerate(leaves) if _is_inexact(leaf)]

    def of_inexact(values: list[Array]) -> Any:
        merged = list(leaves)
        for i, value in zip(inexact, values):
            merged[i] = value
        args, kwargs = structure.unflatten(merged)
        return func(*args, **kwargs)

    result, pull = jax.vjp(of_inexact, [leaves[i] for i in inexact])
    outputs, shape_of_result = flatten(result)
    given = iter(cotangents)
    whole = [next(given) if _is_inexact(x) else np.zeros(jnp.shape(x), jax.dtypes.float0) for x in outputs]
    return cast(list[Array], pull(shape_of_result.unflatten(whole))[0])
