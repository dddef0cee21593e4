"""Functions of pytrees: structure, map, concatenate, select and scatter, leaf by leaf."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Protocol, TypedDict, TypeVar, cast, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

T = TypeVar("T")
Tree_co = TypeVar("Tree_co", covariant=True)


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


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], PyTreeDef[Any]]:
    """The leaves of a tree, and its structure."""
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
    """The structure of one node, and its children with the children of the others."""
    own, structure = flatten(node, lambda x: x is not node)
    return structure, list(zip(own, *(structure.flatten_up_to(other) for other in others)))


def tree_map(function: Callable[..., Any], tree: T, /, *rest: Any, is_leaf: Callable[[Any], bool] | None = None) -> T:
    """`jax.tree.map` for trees whose nodes may align themselves.

    Parameters
    ----------
    function : callable
        Takes a leaf of each tree.
    tree, *rest : pytrees
        Trees with the same structure. If a node of ``tree`` has a method ``__tree_match__`` (`SupportsTreeMatch`), it
        is called with the counterparts of the node. The returned nodes replace these, and their children are mapped.
    is_leaf : callable, optional
        Whether a node of ``tree`` counts as a leaf. Leaves are not aligned.

    Returns
    -------
    pytree
        The results, with the structure of ``tree`` after it was aligned.
    """
    if not rest:
        return cast(T, jax.tree.map(function, tree, is_leaf=is_leaf))
    leaves, structure = flatten(tree, _aligns if is_leaf is None else lambda x: is_leaf(x) or _aligns(x))
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
        With the same structure. They are aligned as in `tree_map`. Leaves have at least as many axes as ``accept``.

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
        An index, a slice, an array of indices, or a tuple of these.
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
