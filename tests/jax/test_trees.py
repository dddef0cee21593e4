"""Functions of pytrees for JAX: maps, stacks, choices and writes, and what nodes of one's own may add."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from nvalchemiops.jax import utils
from nvalchemiops.jax.utils import (
    HasScatterArgs,
    PyTreeDef,
    SupportsTreeMatch,
    dataclass,
    tree_concat,
    tree_map,
    tree_scatter_set,
    tree_stack,
    tree_structure,
    tree_where_broadcast_last,
    tree_zeros_like,
)
from tests.jax.trees import Molecule, molecules, same


@jax.tree_util.register_pytree_node_class
class Labels:
    """Indices into a list of names, which are the same for two of them once they are matched."""

    def __init__(self, names, indices):
        self.names, self.indices = names, indices

    def tree_flatten(self):
        return (self.indices,), self.names

    @classmethod
    def tree_unflatten(cls, names, children):
        return cls(names, *children)

    def __tree_match__(self, *others):
        names = tuple(sorted({name for x in (self, *others) for name in x.names}))
        return tuple(Labels(names, jnp.array([names.index(n) for n in x.names])[x.indices]) for x in (self, *others))


@dataclass
class Rows:
    """Writes outside are dropped; the inner node clips."""

    x: Array
    inner: Any = None

    @property
    def scatter_args(self) -> utils.ScatterArgs:
        return {"mode": "drop"}


@dataclass
class Clipped(Rows):
    @property
    def scatter_args(self) -> utils.ScatterArgs:
        return {"mode": "clip", "fill_value": 0.0}


def test_maps_align_nodes_and_are_plain_maps_otherwise():
    a = {"m": molecules()[0], "l": [Labels(("H", "O"), jnp.array([0, 1, 0]))], "n": None}
    b = {"m": molecules()[1], "l": [Labels(("C", "O"), jnp.array([0, 1, 1]))], "n": None}
    assert isinstance(a["l"][0], SupportsTreeMatch) and not isinstance(a["m"], SupportsTreeMatch)
    matched = tree_map(lambda x, y: jnp.stack([x, y]), a, b)
    assert matched["l"][0].names == ("C", "H", "O") and matched["n"] is None
    np.testing.assert_array_equal(matched["l"][0].indices, [[1, 2, 1], [0, 2, 2]])
    np.testing.assert_array_equal(matched["m"].positions, [a["m"].positions, b["m"].positions])
    kept = tree_map(lambda x, y: (x, y), a["l"], b["l"], is_leaf=lambda x: isinstance(x, Labels))
    assert kept == [(a["l"][0], b["l"][0])], "a leaf of the caller is not aligned"
    plain = tree_map(jnp.negative, a)
    assert plain["l"][0].names == ("H", "O") and same(plain["m"], jax.tree.map(jnp.negative, a["m"]))
    with pytest.raises(ValueError):
        tree_map(jnp.add, a, {"m": a["m"]})
    assert jax.jit(lambda a, b: tree_map(jnp.add, a, b))(a["l"], b["l"])[0].names == ("C", "H", "O")


def test_a_node_must_align_all():
    class Half:
        def __tree_match__(self, *others):
            return (self,)

    with pytest.raises(ValueError, match=r"`Half.__tree_match__` must return 2 nodes.*got 1"):
        tree_map(lambda x, y: x, Half(), Half())


def test_concatenation_and_stacks():
    a, b = ({"x": jnp.arange(3) + i, "l": Labels((name,), jnp.zeros(2, int))} for i, name in enumerate("AB"))
    joined = tree_concat(a, b)
    assert joined["x"].tolist() == [0, 1, 2, 1, 2, 3] and joined["x"].dtype == a["x"].dtype
    assert (joined["l"].names, joined["l"].indices.tolist()) == (("A", "B"), [0, 0, 1, 1])
    assert same(tree_stack(*molecules(3)).positions, jnp.stack([m.positions for m in molecules(3)]))
    assert tree_stack(*molecules(), axis=-1).positions.shape == (2, 3, 2)
    assert tree_concat(jnp.ones((2, 3)), jnp.ones((2, 1)), axis=1).shape == (2, 4)
    assert same(tree_stack(a), {"x": a["x"][None], "l": Labels(("A",), jnp.zeros((1, 2), int))})
    keys = jax.random.split(jax.random.key(0), 4)
    assert (tree_concat(keys[:1], keys[1:]) == keys).all()
    for function in (tree_concat, tree_stack):
        with pytest.raises(TypeError, match=f"`{function.__name__}` needs at least one tree"):
            function()


def test_structures_and_zeros():
    m = molecules()[0]
    structure = tree_structure(m)
    assert structure == jax.tree.structure(m) and hash(structure) == hash(tree_structure(molecules()[1]))
    assert isinstance(structure, PyTreeDef) and not isinstance(m, PyTreeDef)
    assert same(structure.unflatten(jax.tree.leaves(m)), m)
    assert tree_structure([m, m], lambda x: isinstance(x, Molecule)).num_leaves == 2
    tree = {"i": jnp.array([5], jnp.int8), "nan": jnp.array([np.nan]), "c": 1j, "b": jnp.array(True)}
    zeros = tree_zeros_like(tree)
    assert same(zeros, {"i": jnp.zeros(1, jnp.int8), "nan": jnp.zeros(1), "c": jnp.array(0j), "b": jnp.array(False)})
    assert same(tree_zeros_like(jax.eval_shape(lambda: tree)), zeros)


def test_choice_by_a_mask_of_the_first_axes():
    accept = jnp.array([True, False])
    a, b = (
        {"energy": jnp.full(2, v), "forces": jnp.full((2, 3, 3), v), "steps": jnp.full(2, v).astype(jnp.int16)}
        for v in (1.0, np.nan)
    )
    chosen = jax.jit(tree_where_broadcast_last)(accept, a, b)
    assert chosen["steps"].dtype == jnp.int16
    np.testing.assert_array_equal(chosen["forces"], np.stack([np.ones((3, 3)), np.full((3, 3), np.nan)]))
    assert same(tree_where_broadcast_last(True, a, b), a)
    slope = jax.grad(lambda x: tree_where_broadcast_last(accept, x, b["forces"])[0].sum())(a["forces"])
    np.testing.assert_array_equal(slope, np.stack([np.ones((3, 3)), np.zeros((3, 3))]))
    keys = jax.random.split(jax.random.key(0), 2)
    assert (tree_where_broadcast_last(accept, keys, keys[::-1]) == keys[jnp.array([0, 0])]).all()
    with pytest.raises(ValueError, match=r"`accept` has shape \(2,\), so leaves must have at least 1 axes"):
        tree_where_broadcast_last(accept, jnp.float32(1.0), jnp.float32(2.0))


def test_writes_into_trees():
    idxs = jnp.array([1, 7])

    def plain(x):
        return {"x": jnp.full(3, x, jnp.int16), "y": jnp.full((3, 2), x, jnp.float32)}

    new = {"x": jnp.array([5, 6], jnp.int16), "y": jnp.array([[5.0, 6.0], [7.0, 8.0]])}
    written = tree_scatter_set(plain(0), new, idxs)
    assert written["x"].tolist() == [0, 5, 0] and written["x"].dtype == jnp.int16
    clipped = jax.jit(lambda a, b: tree_scatter_set(a, b, idxs, {"mode": "clip", "fill_value": 3}))(plain(0), new)
    assert clipped["x"].tolist() == [0, 5, 6]
    assert tree_scatter_set(np.zeros(3), 1.0, slice(0, 2), {}).tolist() == [1.0, 1.0, 0.0]
    np.testing.assert_array_equal(tree_scatter_set(plain(0)["y"], 9.0, (idxs[:1], 0))[1], [9.0, 0.0])


def test_nodes_add_their_options_of_writing():
    idxs, zeros, new = jnp.array([1, 7]), jnp.zeros(3), jnp.array([5.0, 6.0])
    tree = {"rows": Rows(zeros, Clipped(zeros, [zeros]))}
    values = {"rows": Rows(new, Clipped(new, [new]))}
    assert isinstance(tree["rows"], HasScatterArgs)
    rows = tree_scatter_set(tree, values, idxs, {})["rows"]
    assert isinstance(rows.inner, Clipped)
    assert [x.tolist() for x in jax.tree.leaves(rows)] == [[0.0, 5.0, 0.0], [0.0, 5.0, 6.0], [0.0, 5.0, 6.0]]
    rows = tree_scatter_set(tree, values, idxs, {"mode": "clip"})["rows"]
    assert {tuple(x.tolist()) for x in jax.tree.leaves(rows)} == {(0.0, 5.0, 6.0)}

    class Alone:
        scatter_args: ClassVar = {}

    with pytest.raises(TypeError, match="`Alone` has `scatter_args`, but is not registered as a pytree"):
        tree_scatter_set(Alone(), Alone(), 0)
