"""The utilities for JAX: what pytrees, transformations and type checkers make of them."""

import copy
import dataclasses
import inspect
import math
import pickle
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from nvalchemiops.jax import utils
from nvalchemiops.jax.utils import (
    NotJaxCompatibleError,
    dataclass,
    field,
    is_traced,
    isin,
    jit,
    kahan_summation,
    key_chain,
    lens_field,
    linearize,
    no_jax_tracing,
    no_post_init,
    non_differentiable,
    sequential_vmap_with_vjp,
    shard_map,
    skip_post_init_if_disabled,
    tree_stack,
    tree_structure,
    tree_zeros_like,
    vectorize,
)
from tests.jax.trees import Molecule, molecules, same
from tests.support.processes import in_threads, said_by_mypy

# -- dataclasses ----------------------------------------------------------------------------------


def test_a_dataclass_goes_through_transformations_and_comes_back():
    m = molecules()[0]

    def energy(m):
        return (m.positions**2).sum() * m.charge

    slope = jax.jit(jax.grad(energy))(dataclasses.replace(m, charge=jnp.float32(3.0)))
    assert isinstance(slope, Molecule) and slope.name == "molecule"
    np.testing.assert_allclose(slope.positions, 6.0 * m.positions)
    stacked = jax.vmap(lambda m: m)(tree_stack(*molecules(3)))
    assert stacked.positions.shape == (3, 2, 3)
    moved, _ = jax.lax.scan(lambda m, _: (dataclasses.replace(m, positions=m.positions + 1.0), None), m, length=4)
    np.testing.assert_array_equal(moved.positions, m.positions + 4.0)
    keys = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(m)]
    assert keys == [".positions", ".charge"]


def test_static_fields_choose_the_program():
    traced = []

    @jax.jit
    def double(m):
        traced.append(m.name)
        return m.charge * (2.0 if m.name == "a" else 3.0)

    results = [float(double(Molecule(jnp.ones(3), 1.0, name))) for name in ("a", "b", "a", "b")]
    assert results == [2.0, 3.0, 2.0, 3.0]
    assert traced == ["a", "b"]
    assert tree_structure(Molecule(1.0, name="a")) != tree_structure(Molecule(1.0, name="b"))


def test_a_dataclass_is_marked_and_decorated_once():
    """By an attribute of its own, which its subclasses do not have before they are decorated."""

    class Ion(Molecule):
        pass

    assert vars(Molecule)["_jax_dataclass"] is True and "_jax_dataclass" not in vars(Ion)
    assert dataclass(Molecule) is Molecule and dataclass(kw_only=True)(Molecule) is Molecule
    assert vars(dataclass(Ion))["_jax_dataclass"] is True and len(jax.tree.leaves(Ion(1.0, 2.0))) == 2

    @dataclass(slots=True)
    class Slotted:
        x: Any

    assert Slotted._jax_dataclass is True


def test_options_are_those_of_the_standard_dataclass():
    @dataclass(order=True, kw_only=True, slots=True, weakref_slot=True, repr=False)
    class Level:
        energy: float
        tags: tuple = field(default=(), static=True, compare=False)

    low, high = Level(energy=1.0, tags=("x",)), Level(energy=2.0)
    assert low < high and low == Level(energy=1.0) and len({low, high, Level(energy=1.0)}) == 2
    assert not hasattr(low, "__dict__") and "Level(" not in repr(low)
    with pytest.raises(TypeError, match="positional"):
        Level(1.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        low.energy = 3.0
    doubled = jax.tree.map(lambda x: 2 * x, low)
    assert (doubled.energy, doubled.tags) == (2.0, ("x",))

    @dataclass(frozen=False, eq=False)
    class Counter:
        count: int

    counter = Counter(1)
    counter.count += 1
    assert jax.tree.leaves(counter) == [2] and counter != Counter(2)


def test_copies_pickles_and_subclasses():
    @dataclass
    class Ion(Molecule):
        element: int = field(default=11, static=True)
        spin: Any = 0.0

    ion = Ion(jnp.ones(3), 1.0, spin=jnp.arange(2.0))
    assert [x.name for x in dataclasses.fields(ion)] == ["positions", "charge", "name", "element", "spin"]
    assert len(jax.tree.leaves(ion)) == 3 and isinstance(jax.jit(lambda x: x)(ion), Ion)
    for other in (copy.deepcopy(molecules()[0]), pickle.loads(pickle.dumps(molecules()[0]))):
        assert same(other, molecules()[0])


def test_fields_that_are_computed_and_arguments_that_are_no_fields():
    @dataclass
    class Box:
        lengths: Array
        volume: Any = field(init=False)

        def __post_init__(self):
            object.__setattr__(self, "volume", self.lengths.prod())

    box = Box(jnp.array([2.0, 3.0]))
    assert len(jax.tree.leaves(box)) == 1
    assert float(jax.jit(lambda b: b.volume)(box)) == 6.0
    np.testing.assert_allclose(jax.grad(lambda b: b.volume)(box).lengths, [3.0, 2.0])

    with pytest.raises(TypeError, match=r"`Scaled` cannot be rebuilt from its fields alone.*`factor`"):

        @dataclass
        class Scaled:
            x: float
            factor: dataclasses.InitVar[float]


def test_field_options_and_metadata_are_kept():
    @dataclass
    class Parameters:
        table: Array = field(default_factory=lambda: jnp.zeros(2), metadata={"unit": "eV"}, repr=False, compare=False)
        lens: Any = lens_field(default=len, static=True)
        inner: Any = lens_field(default=None)

    assert {f.name: dict(f.metadata) for f in dataclasses.fields(Parameters)} == {
        "table": {"unit": "eV", "static": False},
        "lens": {"static": True},
        "inner": {"static": False},
    }
    assert "table" not in repr(Parameters())
    assert Parameters() == Parameters(jnp.ones(3))
    assert len(jax.tree.leaves(Parameters(inner=lambda x: x))) == 2


@dataclass
class Checked:
    x: Any
    name: str = field(default="", static=True)

    @skip_post_init_if_disabled
    def __post_init__(self):
        if not jnp.shape(self.x) == (3,):
            raise ValueError("`x` must have shape (3,)")


def test_checks_run_for_programs_and_not_for_jax():
    with pytest.raises(ValueError, match="shape"):
        Checked(1.0)
    with no_post_init(), no_post_init():
        assert Checked("a data set").x == "a data set"
    with pytest.raises(ValueError, match="shape"):
        Checked(1.0)
    good = Checked(jnp.ones(3), "good")
    # JAX builds it again with other shapes, objects and axis numbers in the place of arrays
    axes = jax.tree.map(lambda _: 0, good)
    assert jax.vmap(lambda c: c.x.sum(), in_axes=(axes,))(jax.tree.map(lambda x: jnp.stack([x, x]), good)).shape == (2,)
    assert jax.tree.map(lambda x: None, good).name == "good"
    with pytest.raises(ValueError, match="shape"):
        jax.jit(lambda x: Checked(x).x)(jnp.ones(4))


def test_checks_are_off_for_one_thread_alone():
    inside, outside = threading.Event(), threading.Event()

    def turn_off(_):
        with no_post_init():
            inside.set()
            assert outside.wait(20)
            return Checked(0.0).x

    def stay_on(_):
        assert inside.wait(20)
        try:
            with pytest.raises(ValueError, match="shape"):
                Checked(0.0)
        finally:
            outside.set()

    assert in_threads(lambda work: work(None), [turn_off, stay_on]) == [0.0, None]
    with pytest.raises(RuntimeError, match="inside"), no_post_init():
        raise RuntimeError("inside")
    with pytest.raises(ValueError, match="shape"):
        Checked(0.0)


# -- transformations ------------------------------------------------------------------------------


def stretch(x: Array, factor: float = 2.0, *, shift: float = 0.0) -> Array:
    """Stretch."""
    return factor * x + shift


@pytest.mark.parametrize("wrap", [jit, vectorize, no_jax_tracing, sequential_vmap_with_vjp])
def test_wrapped_functions_keep_name_documentation_and_signature(wrap):
    wrapped = wrap(stretch)
    assert (wrapped.__name__, wrapped.__doc__) == ("stretch", "Stretch.")
    assert inspect.signature(wrapped) == inspect.signature(stretch)
    np.testing.assert_array_equal(wrapped(jnp.arange(3.0), 3.0), 3.0 * np.arange(3.0))


def test_decorators_with_options():
    compiled = jit(static_argnames="factor")(stretch)
    assert float(compiled(jnp.float32(1.0), factor=4, shift=1.0)) == 5.0
    assert "stretch" in compiled.lower(jnp.float32(1.0)).as_text()

    @vectorize(signature="(n),(n)->()")
    def dot(a, b):
        return (a * b).sum()

    assert dot(jnp.ones((4, 1, 3)), jnp.ones((2, 3))).shape == (4, 2)

    class Model:
        @jit(static_argnums=0)
        def energy(self, x):
            return x**2

    assert float(Model().energy(3.0)) == 9.0


def test_linearize_evaluates_once():
    calls = []

    def f(x, y):
        calls.append(1)
        return x * y, {"x": x}

    value, derivative, aux = linearize(f, 2.0, 3.0, has_aux=True)
    assert (float(value), float(aux["x"])) == (6.0, 2.0)
    assert [float(derivative(1.0, 0.0)), float(derivative(0.0, 1.0))] == [3.0, 2.0]
    assert len(calls) == 1
    value, derivative = linearize(jnp.sin, 0.0)
    assert float(derivative(2.0)) == 2.0


def test_shard_map():
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("i")

    @shard_map(mesh=mesh, in_specs=spec, out_specs=spec)
    def halve(x: Array) -> Array:
        """Halve."""
        return x / 2.0

    assert (halve.__name__, halve.__doc__, list(inspect.signature(halve).parameters)) == ("halve", "Halve.", ["x"])
    np.testing.assert_array_equal(halve(jnp.arange(4.0)), np.arange(4.0) / 2.0)


# -- guards ---------------------------------------------------------------------------------------


def test_traced_values_are_seen_inside_pytrees_and_functions_that_need_numbers_refuse_them():
    @no_jax_tracing
    def count(molecule, *others, scale=1.0):
        return int(jnp.sum(molecule.positions) * scale) + len(others)

    m = molecules()[0]
    assert count(m) == 15 and count(m, "text", None, scale=2.0) == 32
    assert not is_traced((m, "text", None, 1.0, object()))
    seen = []
    jax.jit(lambda m: seen.append(is_traced([{"a": m}])))(m)
    assert seen == [True]
    for transformed in (
        lambda: jax.jit(count)(m),
        lambda: jax.vmap(count)(tree_stack(*molecules())),
        lambda: jax.grad(lambda x: count(Molecule(x)))(m.positions),
        lambda: jax.jvp(lambda x: count(Molecule(x)), (m.positions,), (m.positions,)),
        lambda: jax.eval_shape(count, m),
    ):
        with pytest.raises(NotJaxCompatibleError, match=r"`.*count` needs values .*: `molecule` is traced"):
            transformed()
    with pytest.raises(NotJaxCompatibleError, match="`others`, `scale` are traced"):
        jax.jit(lambda s: count(m, s, scale=s))(2.0)
    assert jax.jit(lambda x: x + count(m))(1) == 16, "numbers inside a program"
    with pytest.raises(TypeError, match="missing"):
        count()
    assert not is_traced(m), "nothing leaks"


def test_what_has_no_derivative_raises_in_both_modes():
    x = {"a": jnp.arange(3.0), "b": jnp.arange(2)}
    assert same(non_differentiable(x), x) and same(jax.jit(jax.vmap(non_differentiable))(x["a"]), x["a"])

    def f(x):
        return (non_differentiable({"p": x})["p"] ** 2).sum()

    a = x["a"]
    for differentiate in (
        lambda: jax.grad(f)(a),
        lambda: jax.jit(jax.grad(f))(a),
        lambda: jax.grad(jax.jit(f))(a),
        lambda: jax.vjp(f, a),
        lambda: jax.jvp(f, (a,), (a,)),
        lambda: jax.hessian(f)(a),
        lambda: jax.grad(lambda a: jax.lax.scan(lambda c, _: (non_differentiable(c), 0), a, length=2)[0].sum())(a),
    ):
        with pytest.raises(NotImplementedError, match=r"float32\[3\].*not differentiable.*stop_gradient"):
            differentiate()
    # what does not depend on the differentiated variable does not mind
    np.testing.assert_array_equal(jax.grad(lambda y: (y * non_differentiable(a)).sum())(a), a)
    np.testing.assert_array_equal(jax.grad(lambda y: (y * non_differentiable(jax.lax.stop_gradient(y))).sum())(a), a)


# -- functions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint32])
@pytest.mark.parametrize("size", [0, 100, 300])
def test_look_up_agrees_with_comparison_for_items_of_the_table(dtype, size):
    rng = np.random.default_rng(0)
    info = np.iinfo(dtype)
    a, b = (rng.integers(max(info.min, -400), min(info.max, 400) + 1, n) for n in ((6, 50), 60))
    a[0, :3] = info.min, info.max, 0
    expected = np.isin(a, b[(b >= 0) & (b < size)])
    call = isin if size == 100 else jax.jit(isin, static_argnums=2)
    np.testing.assert_array_equal(call(jnp.asarray(a, dtype), jnp.asarray(b, dtype), size), expected)


def test_look_up_of_nothing_and_of_mistakes():
    assert not isin(jnp.arange(3), jnp.array([]), 5).any()
    assert isin(jnp.array([], int), jnp.arange(3), 5).shape == (0,)
    with pytest.raises(TypeError, match="`a` must hold integers, got float32"):
        isin(jnp.ones(2), jnp.arange(3), 5)
    with pytest.raises(ValueError, match="`max_item` must be non-negative, got -1"):
        isin(jnp.arange(2), jnp.arange(3), -1)


def ill_conditioned(n: int, dtype) -> np.ndarray:
    """Numbers of very different sizes that cancel to a small rest."""
    rng = np.random.default_rng(n)
    x = (10.0 ** rng.uniform(-3, 6, n)).astype(dtype)
    return np.concatenate([x, rng.normal(size=3).astype(dtype), -rng.permutation(x)])


@pytest.mark.parametrize(
    ("transform", "dtype"),
    [("eager", np.float64), ("jit", np.float32), ("jit", np.float64), ("scan", np.float32), ("vmap", np.float32)],
)
def test_compensated_sums_lose_nothing(transform, dtype):
    """Against exact sums; the bound is that of Ogita, Rump and Oishi."""
    with jax.enable_x64(dtype == np.float64):
        x = ill_conditioned(5 if transform == "eager" else 12, dtype)

        def at_once(x):
            return kahan_summation(*x)

        if transform == "scan":
            zero = jnp.zeros((), dtype)

            def step(s, x):
                return (kahan_summation(s[0], x, compensate=s[1]), None)

            total, compensation = jax.jit(lambda x: jax.lax.scan(step, (zero, zero), x)[0])(x)
        elif transform == "vmap":
            total, compensation = (y[1] for y in jax.jit(jax.vmap(at_once))(np.stack([x + 1, x])))
        else:
            total, compensation = (jax.jit(at_once) if transform == "jit" else at_once)(jnp.asarray(x))
        assert total.dtype == compensation.dtype == dtype
        exact, eps = math.fsum(x.tolist()), float(np.finfo(dtype).eps)
        bound = (len(x) * eps) ** 2 * np.abs(x.astype(float)).sum()
        assert abs(float(total) - exact) <= eps * abs(exact) + bound
        better = math.fsum([float(total), -float(compensation), -exact])
        assert abs(better) <= bound + 1e-16 * abs(exact)
        assert abs(float(compensation)) <= eps * abs(float(total))
        assert abs(np.cumsum(x)[-1] - exact) > 10 * (eps * abs(exact) + bound), "a plain sum fails here"


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_compensated_sums_are_the_same_to_the_last_bit_in_compiled_programs(dtype):
    """Fused multiply-adds and excess precision would change them: compilers may use both."""
    x = jnp.linspace(1.0, 1e6, 7, dtype=dtype)

    def differences(x):
        return kahan_summation(x * 1.1, -x * 1.1, x * 1e-3)

    assert same(jax.jit(differences)(x), differences(x))


def test_compensated_sums_of_trees_kinds_and_limits():
    a, b = molecules()
    total, compensation = kahan_summation(a, b, b)
    np.testing.assert_array_equal(total.positions, a.positions + 2 * b.positions)
    assert same(tree_zeros_like(total), compensation) and total.name == "molecule"
    ints, rest = kahan_summation(jnp.array([2**30, 1]), 3)
    assert ints.dtype == rest.dtype == jnp.int32 and ints.tolist() == [2**30 + 3, 4] and not rest.any()
    waves, rest = jax.jit(kahan_summation)(jnp.complex64(1 + 1j), jnp.complex64(2.0**-26 * (1 - 1j)))
    assert complex(waves) - complex(rest) == 1 + 2.0**-26 + (1 - 2.0**-26) * 1j
    for limit, other in ((np.inf, 1.0), (-np.inf, 1.0), (3e38, 3e38)):
        total, rest = kahan_summation(jnp.float32(limit), jnp.float32(other), jnp.float32(1.0))
        assert float(total) == float(jnp.float32(limit) + jnp.float32(other)) and float(rest) == 0.0
    assert np.isnan(kahan_summation(jnp.float32(np.inf), -jnp.float32(np.inf))[0])
    assert kahan_summation(jnp.float32(1.0), jnp.ones((2, 1)), jnp.ones(3))[1].shape == (2, 3)
    with pytest.raises(TypeError, match="needs at least one summand"):
        kahan_summation()
    with pytest.raises(ValueError, match=r"[Ee]xpected"):
        kahan_summation([jnp.ones(2)], (jnp.ones(2),))


def test_compensated_sums_have_the_derivatives_of_plain_ones():
    x = jnp.array([1e8, 1.0, -1e8], jnp.float32)

    def total(x):
        return kahan_summation(*(x**2))[0]

    np.testing.assert_array_equal(jax.grad(total)(x), 2 * x)
    _, slope = jax.jvp(total, (x,), (jnp.ones(3),))
    assert float(slope) == 2.0, "2e8 + 2 - 2e8: tangents are compensated, too"
    np.testing.assert_array_equal(jax.grad(lambda x: kahan_summation(*x)[1])(x), jnp.zeros(3))
    assert np.isfinite(jax.grad(lambda x: kahan_summation(x, jnp.float32(np.inf))[0])(jnp.float32(1.0)))


@pytest.mark.parametrize(
    ("make", "shape"),
    [(jax.random.key, ()), (jax.random.key, (2, 3)), (jax.random.PRNGKey, ()), (jax.random.PRNGKey, 3)],
)
def test_key_chains_never_repeat_and_can_be_repeated(make, shape):
    def draw(key):
        return np.stack([jax.random.key_data(k) for _, k in zip(range(20), key_chain(key, shape))])

    first, second, other = draw(make(0)), draw(make(0)), draw(make(1))
    np.testing.assert_array_equal(first, second)
    assert first[0].shape == ((3,) if shape == 3 else tuple(shape)) + (2,)
    keys = np.concatenate([np.reshape(x, (-1, 2)) for x in (first, other, jax.random.key_data(make(0)))])
    assert len(np.unique(keys, axis=0)) == len(keys)
    inside = jax.jit(lambda key: jax.random.key_data(next(key_chain(key, shape))))(make(0))
    np.testing.assert_array_equal(inside, first[0])


def test_a_wrong_key_is_an_error_at_once():
    with pytest.raises((TypeError, ValueError)):
        key_chain(jnp.ones(3))


def pair_energy(x: Array, species: Array, *, scale: Array) -> dict[str, Array]:
    r = jnp.sqrt(((x[:, None] - x) ** 2).sum(-1) + jnp.eye(len(x)))
    return {"energy": (scale * jnp.exp(-r) * (species[:, None] + species)).sum(), "count": (r < 2.0).sum()}


def test_slices_in_turn_are_what_they_are_together():
    """Values, gradients by all arguments, gradients of gradients; mapped, partly mapped and twice mapped."""
    rng = np.random.default_rng(0)
    x, scale = jnp.asarray(rng.normal(size=(3, 4, 3)), jnp.float32), jnp.float32(0.7)
    species = jnp.asarray(rng.integers(1, 5, (3, 4)))
    in_turn = sequential_vmap_with_vjp(pair_energy)

    def checks(f):
        def energy(x, s, scale):
            return f(x, s, scale=scale)["energy"]

        mapped = jax.vmap(energy, (0, 0, None))

        def slope(x):
            return jax.grad(lambda x, c: mapped(x, species, c).sum(), (0, 1))(x, scale)

        return {
            "result": lambda: jax.vmap(lambda x, s: f(x, s, scale=scale))(x, species),
            "one": lambda: f(x[0], species[0], scale=scale),
            "gradient of map": lambda: slope(x),
            "map of gradient": lambda: jax.vmap(jax.value_and_grad(energy, (0, 2)), (0, 0, None))(x, species, scale),
            "second": lambda: jax.grad(lambda x: (slope(x)[0] ** 2).sum())(x),
            "rows": lambda: jax.jacrev(jax.jacrev(energy))(x[0, :2], species[0, :2], scale),
            "twice": lambda: jax.vmap(jax.vmap(energy, (None, 0, None)), (0, None, None))(x, species, scale),
        }

    expected = jax.jit(lambda: {name: call() for name, call in checks(pair_energy).items()})()
    found = jax.jit(lambda: {name: call() for name, call in checks(in_turn).items()})()
    found |= {f"eager {name}": checks(in_turn)[name]() for name in ("one", "result")}
    for name, values in found.items():

        def close(a, b):
            return np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)

        jax.tree.map(close, values, expected[name.removeprefix("eager ")])


def test_slices_are_evaluated_one_by_one():
    shapes, seen = [], []

    @sequential_vmap_with_vjp
    def f(x):
        shapes.append(x.shape)
        jax.debug.callback(lambda x: seen.append(float(x[0])), x, ordered=False)
        return (x**2).sum()

    x = jnp.arange(8.0).reshape(4, 2)
    gradient = jax.jit(jax.grad(lambda x: jax.vmap(f)(x).sum()))(x)
    jax.effects_barrier()
    np.testing.assert_array_equal(gradient, 2 * x)
    assert set(shapes) == {(2,)} and set(seen) == {0.0, 2.0, 4.0, 6.0}
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(f, (x[0],), (x[0],))


# -- the module -----------------------------------------------------------------------------------

TYPED = """
from jax import Array
from nvalchemiops.jax.utils import dataclass, field, jit, linearize, no_jax_tracing, sequential_vmap_with_vjp
from nvalchemiops.jax.utils import tree_structure, vectorize

@dataclass(order=True)
class Point:
    x: Array
    name: str = field(default="p", static=True)

@jit(static_argnames="b")
def f(a: Array, *, b: str = "x") -> Point:
    return Point(a, b)

class Model:
    @jit
    def energy(self, x: Array) -> Array:
        return x

@sequential_vmap_with_vjp
def s(a: Array, b: Array) -> Array:
    return a + b

def checks(x: Array, p: Point) -> None:
    reveal_type(Point)
    reveal_type(f)
    reveal_type(Model().energy)
    reveal_type(no_jax_tracing(vectorize(s)))
    reveal_type(linearize(s, x, x))
    reveal_type(tree_structure(p).unflatten([x]))
    p.x = x
    f(x, b=1)
"""
REVEALED = """
"def (x: Array, name: str =) -> typed.Point"
"def (a: Array, *, b: str =) -> typed.Point"
"def (x: Array) -> Array"
"def (a: Array, b: Array) -> Array"
"tuple[Array, def (Array, Array) -> Array]"
"typed.Point"
Property "x" defined in "Point" is read-only
Argument "b" to "f" has incompatible type "int"; expected "str"
"""


@pytest.mark.later
def test_decorated_functions_and_classes_keep_their_signatures_in_a_type_checker(tmp_path):
    pytest.importorskip("mypy", reason="no mypy")
    said = [line.replace("jax._src.basearray.", "") for line in said_by_mypy(tmp_path / "typed.py", TYPED)]
    found = [line.split(": ", 2)[2].removeprefix("Revealed type is ") for line in said]
    assert [line.split("  [")[0] for line in found] == REVEALED.split("\n")[1:-1], said


def test_all_names_are_there_and_documented():
    for name in utils.__all__:
        assert inspect.getdoc(getattr(utils, name)), name
