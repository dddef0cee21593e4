"""Torch functions as functions of JAX: derivatives, memory, and errors. Many calls are in `test_bridge_calls`."""

import gc
import traceback
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.interpreters import partial_eval

from nvalchemiops.jax import primitive
from nvalchemiops.jax.bridge import SCALAR, Bridge, from_torch
from nvalchemiops.jax.dtypes import torch_dtype
from nvalchemiops.torch import System
from nvalchemiops.torch.interactions.electrostatics import Electrostatics
from tests.jax.precision import QUICKLY, double_precision  # noqa: F401

X, V, T = np.array([[0.3, 0.7, 1.1], [0.1, -0.5, 0.3], [1.0, 0.5, -0.3]])
W = np.array([1.2, 0.4, 0.9])
ROWS = np.array([2, 0, 2])


# -- derivatives ----------------------------------------------------------------------------------


class Energy:
    """One number."""

    @staticmethod
    def of_torch(x, w, rows):
        return (torch.sin(x) * w).prod() + (x**3 * w)[rows].sum()

    @staticmethod
    def of_jax(x, w, rows):
        return (jnp.sin(x) * w).prod() + (x**3 * w)[rows].sum()

    @staticmethod
    def total(energy):
        return energy


class Field:
    """A vector."""

    @staticmethod
    def of_torch(x, w, rows):
        return torch.sin(x) * w[rows] * x.sum()

    @staticmethod
    def of_jax(x, w, rows):
        return jnp.sin(x) * w[rows] * x.sum()

    @staticmethod
    def total(field):
        return (field**2).sum()


class Several:
    """Outputs of several shapes, one of them integers, one that does not depend on x."""

    @staticmethod
    def of_torch(x, w, rows):
        y = torch.sin(x * w)
        return {"sum": y.sum(), "outer": y[:, None] * x[rows], "rows": 2 * rows, "w": (w**2,)}

    @staticmethod
    def of_jax(x, w, rows):
        y = jnp.sin(x * w)
        return {"sum": y.sum(), "outer": y[:, None] * x[rows], "rows": 2 * rows, "w": (w**2,)}

    @staticmethod
    def total(several):
        return several["sum"] * (several["outer"] ** 2).sum() + several["w"][0].prod()


FUNCTIONS = {
    "energy": (Energy, True),
    "energy, general rule": (Energy, False),
    "field": (Field, False),
    "several": (Several, False),
}


def floats(tree):
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]


def gradient_along(f, *vectors):
    """A derivative of order one more than there are vectors, by reverse mode alone."""
    if not vectors:
        return jax.grad(f)
    return gradient_along(lambda x: (jax.grad(f)(x) * vectors[0]).sum(), *vectors[1:])


TRANSFORMATIONS = {
    "value": lambda f, s: f(X, W),
    "grad": lambda f, s: jax.grad(s)(X, W),
    "grad by both": lambda f, s: jax.grad(s, (0, 1))(X, W),
    "jvp": lambda f, s: floats(jax.jvp(lambda *a: floats(f(*a)), (X, W), (V, T))),
    "jvp of jvp": lambda f, s: jax.jvp(lambda x: jax.jvp(lambda x: floats(f(x, W)), (x,), (V,))[1], (X,), (T,)),
    "vjp of jvp": lambda f, s: jax.grad(lambda x: jax.jvp(lambda x: s(x, W), (x,), (V,))[1])(X),
    "jvp of jvp along what moves": lambda f, s: jax.jvp(
        lambda x: jax.jvp(lambda x: s(x, W), (x,), (jnp.cos(x),))[1], (X,), (T,)
    ),
    "grad of jvp along what moves": lambda f, s: jax.grad(lambda x: jax.jvp(lambda x: s(x, W), (x,), (x**2,))[1])(X),
    "Hessian-vector product": lambda f, s: jax.jvp(lambda x: jax.grad(s)(x, W), (X,), (V,)),
    "second order": lambda f, s: gradient_along(lambda x: s(x, W), V)(X),
    "third order": lambda f, s: gradient_along(lambda x: s(x, W), V, T)(X),
    "fourth order": lambda f, s: gradient_along(lambda x: s(x, W), V, T, W)(X),
    "hessian": lambda f, s: jax.hessian(s, (0, 1))(X, W),
    "jacfwd of jacfwd": lambda f, s: jax.jacfwd(jax.jacfwd(lambda x: floats(f(x, W))))(X),
    "jacfwd of jacrev": lambda f, s: jax.jacfwd(jax.jacrev(lambda x: floats(f(x, W))))(X),
    "jacrev of jacfwd": lambda f, s: jax.jacrev(jax.jacfwd(lambda x: floats(f(x, W))))(X),
    "jacrev of jacrev": lambda f, s: jax.jacrev(jax.jacrev(lambda x: floats(f(x, W))))(X),
    "vmap of grad": lambda f, s: jax.vmap(jax.grad(s), (0, None))(jnp.stack([X, V]), W),
    "grad of vmap": lambda f, s: jax.grad(lambda x, w: jax.vmap(s, (0, None))(x, w).prod(), (0, 1))(
        np.stack([X, V]), W
    ),
    "vmap of vmap": lambda f, s: jax.vmap(jax.vmap(jax.grad(s, (0, 1)), (0, None), 1), (None, 1))(
        np.stack([X, V]), np.stack([W, T], 1)
    ),
    "hessian of vmap": lambda f, s: jax.hessian(lambda x, w: (jax.vmap(s, (0, None))(x, w) ** 2).sum(), (0, 1))(
        np.stack([X, V]), W
    ),
    "checkpoint": lambda f, s: jax.grad(lambda x: jax.checkpoint(lambda x: s(x, W) ** 2)(x))(X),
    "scan": lambda f, s: jax.grad(
        lambda x: jax.lax.scan(lambda x, _: (x - 0.1 * jax.grad(s)(x, W), s(x, W)), x, None, length=3)[1].sum()
    )(X),
}

EAGER = {
    "energy": ["value", "grad by both", "jvp", "vjp of jvp", "hessian", "vmap of grad", "checkpoint", "scan"],
    "several": ["value", "grad by both", "vmap of grad"],
}


def assert_same(found, expected, rtol=1e-14):
    """Relative to the largest number of each array."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * max(1.0, np.max(np.abs(b), initial=0)))


@pytest.mark.later_cases("several")
@pytest.mark.filterwarnings("ignore:.*do not depend on its inputs")  # of "several", an output on its own
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_transformations(kind):
    """Each of them, jitted and eager, as of the same function in JAX."""
    case, scalar = FUNCTIONS[kind]
    bridged = from_torch(case.of_torch, scalar=scalar)

    def evaluated(function, name):
        def f(x, w):
            return function(x, w, ROWS)

        return TRANSFORMATIONS[name](f, lambda x, w: case.total(f(x, w)))

    def jitted(function):
        evaluate = jax.jit(
            lambda: {name: evaluated(function, name) for name in TRANSFORMATIONS}, compiler_options=QUICKLY
        )
        return evaluate()

    found, expected = jitted(bridged), jitted(case.of_jax)
    for name in TRANSFORMATIONS:
        try:
            assert_same(found[name], expected[name])
            if name in EAGER.get(kind, ()):
                assert_same(evaluated(bridged, name), expected[name])
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def cosines(x):
    return torch.cos(x).sum()


class Counter:
    """A torch function that counts its evaluations and notes the memory of its arguments."""

    def __init__(self, function):
        self.function, self.calls, self.pointers = function, 0, []

    def __call__(self, *tensors):
        if type(tensors[0]) is torch.Tensor:  # otherwise it is asked for shapes
            self.calls += 1
            self.pointers.append([x.data_ptr() for x in tensors])
        return self.function(*tensors)


CALLS = {
    "value": (1, lambda f: f),
    "grad": (1, jax.grad),
    "value_and_grad": (1, jax.value_and_grad),
    "Hessian-vector product": (1, lambda f: lambda x: jax.jvp(jax.grad(f), (x,), (V,))[1]),
    "vmap": (4, lambda f: lambda x: jax.vmap(jax.value_and_grad(f))(jnp.stack([x, x, x, x]))),
}


@pytest.mark.parametrize("name", CALLS)
def test_one_call_for_an_energy_and_its_gradient(name):
    """And one for a Hessian-vector product; `vmap` calls from JAX once, and torch for each slice."""
    calls, transform = CALLS[name]
    counter = Counter(cosines)
    compiled = jax.jit(transform(from_torch(counter, scalar=True))).lower(X).compile()
    jax.block_until_ready(compiled(X))
    assert counter.calls == calls
    assert compiled.as_text().count("custom-call(") == 1


def test_forward_mode_of_a_number_takes_no_further_order_and_as_many_passes_as_rows():
    """Of a function whose derivative has no derivative, and of one that counts its backward passes."""

    class Passes(torch.autograd.Function):
        calls = 0

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, slope):
            Passes.calls += 1
            return slope

    class Once(Passes):
        backward = staticmethod(torch.autograd.function.once_differentiable(Passes.backward))

    cube = from_torch(lambda x: (Once.apply(x) ** 3).sum())
    assert_same(jax.jvp(cube, (X,), (V,))[1], jnp.sum(3 * X**2 * V))
    cubes = from_torch(lambda x: (Passes.apply(x) ** 3).sum())
    Passes.calls = 0
    assert_same(jax.jit(jax.jacfwd(jax.jacfwd(cubes)))(X), jnp.diag(6 * X))
    assert Passes.calls == 1 + len(X)  # not one for each entry


@pytest.mark.parametrize("between", [(), ([True],)], ids=["JAX 0.11", "JAX 0.12"])
def test_unused_results_are_not_computed(between):
    """JAX 0.12 gives the rule one more argument: which inputs are read afterwards."""
    (equation,) = jax.make_jaxpr(from_torch(lambda x: (x.sum(), x.cos())))(X).eqns
    drop = partial_eval.dce_rules[primitive.torch_call_p]
    inputs, left = drop([False, True], *between, equation)
    assert inputs == [True] and left.outvars == equation.outvars[1:] and left.params["request"].values == (1,)
    assert drop([False, False], *between, equation) == ([False], None)


def test_python_numbers_are_static():
    power = from_torch(lambda x, n, *, sign=None: x**n if sign is None else x**n / sign)
    assert_same(power(X, 3), X**3)
    assert_same(power(X, 2, sign=None), X**2)
    assert [float(power(np.ones(()), 1, sign=sign)) for sign in (0.0, -0.0)] == [np.inf, -np.inf]
    with pytest.raises(TypeError, match="of type set is neither an array nor hashable"):
        power(X, {1})


def test_integers_have_no_tangents():
    """Nor have they derivatives, also of a gradient; and a function may have no arrays at all."""
    energy = from_torch(lambda x, i: (x[i] ** 2).sum(), scalar=True)
    tangent = np.zeros(ROWS.shape, jax.dtypes.float0)
    for f in (lambda i: energy(X, i), lambda i: jax.grad(energy)(X, i)):
        value, derivative = jax.jvp(f, (ROWS,), (tangent,))
        assert_same((value, derivative), (f(ROWS), jnp.zeros_like(value)))
    number = from_torch(lambda n: torch.full((), n, dtype=torch.float64), scalar=True)
    assert_same(jax.jit(jax.grad(lambda x: number(3.0) * x))(1.0), jnp.ones(()) * 3.0)


def test_linear_transpose():
    """Also with a Python number as the cotangent."""
    energy = from_torch(cosines, scalar=True)
    (found,) = jax.linear_transpose(lambda v: jax.jvp(energy, (X,), (v,))[1], X)(2.0)
    assert_same(found, -2 * jnp.sin(X))
    with pytest.raises(NotImplementedError, match="`cosines` is not linear in its inputs"):
        jax.linear_transpose(energy, X)(2.0)


def test_complex_values_have_no_derivative_here():
    square = from_torch(lambda z: z * z)
    assert_same(jax.jit(square)(X + 1j * V), (X + 1j * V) ** 2)
    with pytest.raises(TypeError, match="no derivative by input 0, which is complex"):
        jax.jvp(square, (X + 1j * V,), (X + 1j * V,))
    with pytest.raises(TypeError, match="no derivative of output 0, which is complex"):
        jax.grad(lambda x: jnp.abs(from_torch(torch.complex)(x, x)).sum())(X)


# -- memory ---------------------------------------------------------------------------------------


def test_operators_get_the_memory_of_jax():
    """Of functions that are known to change nothing and to keep nothing, inputs are not copied."""
    counter = Counter(lambda x, w: (x * w).sum())
    x, w = jnp.asarray(X), jnp.asarray(W)
    evaluate = jax.jit(jax.value_and_grad(Bridge(counter, None, contract=SCALAR, only_reads=True)))
    for _ in range(2):
        jax.block_until_ready(evaluate(x, w))
    assert counter.pointers == [[x.unsafe_buffer_pointer(), w.unsafe_buffer_pointer()]] * 2


def in_place(x):
    x *= 2
    return x


def by_data(x):
    x.data.mul_(2)
    return x


def by_numpy(x):
    if type(x) is torch.Tensor:  # without data there are no shapes to be found
        x.detach().numpy()[...] *= 2
    return x


def by_dlpack(x):
    if type(x) is torch.Tensor:
        torch.from_dlpack(x.detach()).mul_(2)
    return x


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("change", [in_place, by_data, by_numpy, by_dlpack])
def test_inputs_are_never_changed(change, declared):
    """By whatever way a function writes into its argument; also one of each slice, and from the second call on."""
    is_on = [True]

    def changing(x, w):
        return ((change(x) if is_on[0] else 2 * x) ** 2 * w).sum()

    types = jax.ShapeDtypeStruct((), "float64") if declared else None
    energy = from_torch(changing, types, scalar=True)
    x, w = jnp.asarray(X), jnp.asarray(W)
    expected = (4 * X**2 * W).sum()
    evaluate = jax.jit(energy)
    for is_on[0] in (False, True, True):
        assert_same(evaluate(x, w), expected)
        assert_same(jax.jit(jax.vmap(energy, (None, 0)))(x, jnp.stack([w, w])), jnp.full(2, expected))
        assert_same(energy(x, w), expected)
        assert_same(jax.jit(jax.grad(energy, 1))(x, w), 4 * X**2)
        assert np.array_equal(x, X) and np.array_equal(w, W)
    if change is in_place:  # which torch differentiates
        assert_same(jax.jit(jax.grad(energy))(x, w), 8 * X * W)
        assert np.array_equal(x, X)


def test_tensors_may_be_kept():
    """They are no memory of JAX, which takes it back."""
    kept = []

    def keeps(x):
        kept.append(x)
        return x.sum()

    step = jax.jit(from_torch(keeps, jax.ShapeDtypeStruct((), "float64")))
    for number in range(20):
        jax.block_until_ready(step(jnp.full(1000, float(number))))
    assert [float(x.max()) for x in kept] == [float(x.min()) for x in kept] == list(range(20))


def test_donated_arguments():
    step = jax.jit(from_torch(lambda x, w: x + w), donate_argnums=0)
    x = jnp.array(X)
    for _ in range(3):
        x = step(x, W)
    assert_same(x, X + W + W + W)


LAYOUTS = {
    "transposed inside jit": (lambda x: x.T, np.arange(6.0).reshape(2, 3)),
    "reversed": (lambda x: x[::-1, ::2], np.arange(12.0).reshape(3, 4)),
    "broadcast": (lambda x: jnp.broadcast_to(x, (4, 3)), np.arange(3.0)),
    "slices of numpy, unaligned": (lambda x: x, np.arange(13.0)[1:].reshape(4, 3)),
    "strides of numpy": (lambda x: x, np.arange(24.0).reshape(4, 6)[::-2, 1::2]),
    "order of Fortran": (lambda x: x, np.asfortranarray(np.arange(6.0).reshape(2, 3))),
    "no elements": (lambda x: x, np.zeros((0, 3))),
    "no dimensions": (lambda x: x, np.float64(3.0)),
    "bytes in between": (lambda x: x, np.frombuffer(b"x" + np.arange(4.0).tobytes(), np.uint8)[1:].view("f8")),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name):
    change, x = LAYOUTS[name]
    double = from_torch(lambda x: (2 * x, x.sum(), x.T if x.ndim == 2 else x))
    y = np.asarray(change(x))
    for evaluate in (lambda x: double(change(x)), jax.jit(lambda x: double(change(x)))):
        assert_same(evaluate(x), (2 * y, np.asarray(y.sum()), y.T))


DTYPES = [
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
]


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes(name):
    for array in (jnp.array([0, 1, 3]).astype(name), jnp.ones((), name), jnp.zeros((0, 2), name)):
        seen = set()

        def twice(x, seen=seen):
            seen.add(x.dtype)
            return x, x[:2] if x.ndim else x

        found = jax.jit(from_torch(twice))(array)
        assert_same(found, (array, array[:2] if array.ndim else array), rtol=0)
        assert seen == {getattr(torch, name)} == {torch_dtype(array.dtype)}
    if jnp.issubdtype(name, jnp.floating):
        x = jnp.array([0.5, 1.0, 2.0], name)
        gradient = jax.jit(jax.grad(from_torch(lambda x: (x * x).sum(), scalar=True)))(x)
        assert gradient.dtype == name and np.array_equal(gradient, 2 * x)


def twice(x):
    return 2 * x


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int4"])
def test_dtypes_that_are_not_exchanged(dtype):
    with pytest.raises(TypeError, match=f"`twice` has dtype {dtype}, which torch does not have"):
        jax.jit(from_torch(twice))(jnp.ones(3, dtype))
    with pytest.raises(TypeError, match=r"has dtype torch\.complex32, which JAX does not have"):
        from_torch(lambda x: x.to(torch.complex32))(X)


def test_without_x64():
    """One rule: results of 64 bits are rounded to 32. The function gets what JAX has: 32 bits."""
    seen = set()

    def widens(x, i):
        seen.update([x.dtype, i.dtype])
        return x.double() / 3, i.long() + 1, x.sum().to(torch.complex128)

    bridged = from_torch(widens)
    for is_on in (False, True):  # the same function under both settings
        with jax.enable_x64(is_on):
            found = jax.jit(bridged)(np.float32([1, 2]), np.int32([3]))
            wide = jax.dtypes.canonicalize_dtype("float64")
        assert wide == ("float64" if is_on else "float32")
        assert [x.dtype for x in found] == [wide, f"int{wide.itemsize * 8}", f"complex{wide.itemsize * 16}"]
        assert np.array_equal(found[0], (np.array([1.0, 2.0]) / 3).astype(wide)) and found[1] == 4
    with jax.enable_x64(False):
        gradient = jax.grad(from_torch(lambda x: (x.double() ** 2).sum(), scalar=True))(np.arange(3.0))
    assert gradient.dtype == np.float32 and np.array_equal(gradient, [0, 2, 4])
    assert seen == {torch.float32, torch.int32}


# -- errors ---------------------------------------------------------------------------------------

DECLARED = jax.ShapeDtypeStruct((3,), "float64")
WRONG = {
    "shape": (lambda x: x[:1], r"output 0 has shape \(1,\), but \(3,\) was declared"),
    "dtype": (lambda x: x.float(), "output 0 has dtype torch.float32, but torch.float64 was declared"),
    "wider than declared": (lambda x: x.to(torch.complex128), "output 0 has dtype torch.complex128"),
    "number": (lambda x: (x, x), "returned 2 tensors, but 1 were declared"),
    "no tensor": (lambda x: 3, "output 0 must be a tensor, got int"),
    "its own error": (lambda x: torch.linalg.cholesky(-torch.eye(3, dtype=x.dtype)), "not positive-definite"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_in_a_call(name):
    """With their text, and the next call works."""
    function, text = WRONG[name]
    switch = [True]
    evaluate = jax.jit(from_torch(lambda x: function(x) if switch[0] else 2 * x, DECLARED))
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match=text):
            jax.block_until_ready(evaluate(X))
    switch[0] = False
    assert_same(evaluate(X), 2 * X)


def test_the_text_of_an_error_comes_before_where_it_was_raised():
    """After two lines of JAX."""

    def deep(x):
        raise ValueError(f"`x` must be longer than {len(x)}")

    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(jax.jit(from_torch(deep, DECLARED))(X))
    lines = str(caught.value).splitlines()
    assert lines[2] == "ValueError: `x` must be longer than 3"
    assert any("test_bridge.py" in line and line.endswith("in deep") for line in lines[3:])


def test_sizes_inside_of_a_function_may_depend_on_data():
    """Only the shapes of outputs must be known."""
    energy = from_torch(lambda x: (x[x > 0.0] ** 3).sum(), scalar=True)
    value, gradient = jax.jit(jax.value_and_grad(energy))(V)
    above, below = np.maximum(V, 0.0), np.minimum(V, 0.0)
    assert_same((value, gradient), ((above**3).sum(), 3.0 * above**2))
    assert_same(jax.jit(jax.vmap(energy))(np.stack([V, -V])), np.array([value, -(below**3).sum()]))


NEED_DATA = {
    "sizes of outputs": lambda x: x[x > 0.0],
    "numbers as outputs": lambda x: x[0].item(),
    "decisions": lambda x: x if x.sum() > 0.0 else 2.0 * x,
    "parameters": lambda x: Electrostatics()(System(x.reshape(1, 3), x[:1], cell=x.diag())).energies,
    "arrays": lambda x: torch.tensor(x.numpy()),
}


@pytest.mark.parametrize("name", NEED_DATA)
def test_functions_that_need_data_are_told_to_declare(name):
    """In the message, or in a note at an error of torch's; with the line that needs them."""
    with pytest.raises((ValueError, RuntimeError)) as caught:
        jax.jit(from_torch(NEED_DATA[name]))(np.ones(3))
    assert "`out_shapes` of from_torch" in "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    lines = traceback.extract_tb((caught.value.__cause__ or caught.value).__traceback__)
    assert any(line.name == "<lambda>" and line.filename == __file__ for line in lines)


def test_errors_when_traced():
    with pytest.raises(ValueError, match="scalar=True needs one real number as output"):
        jax.jit(from_torch(lambda x: x, scalar=True))(X)
    with pytest.raises(TypeError, match=r"output 0 must be a torch\.Tensor, got float"):
        jax.jit(from_torch(lambda x: 1.0))(X)
    with pytest.raises(TypeError, match=r"`out_shapes` of .* must have a jax\.ShapeDtypeStruct for each .* int"):
        jax.jit(from_torch(lambda x: x, out_shapes=(3,)))(X)
    with pytest.raises(RuntimeError, match="broadcast a dimension of length 2"):
        jax.jit(from_torch(lambda x, y: x + y))(X, W[:2])


def test_export_is_an_error():
    from jax import export

    with pytest.raises(NotImplementedError, match=r"`cosines` calls torch in this process, which jax.export cannot"):
        export.export(jax.jit(from_torch(cosines)))(X)


def test_outside_of_jit_a_bounded_number_of_calls_stays_compiled(monkeypatch):
    """Each static argument takes a compilation, and each of these a megabyte."""
    monkeypatch.setattr(primitive, "KEPT_REQUESTS", 3)
    scaled = [from_torch(lambda x, factor: factor * x) for _ in range(2)]
    for number in range(8):
        assert_same(scaled[number % 2](X, float(number)), number * X)
    assert len(primitive._kept) == 3
    kept = [reference() for reference in primitive._kept]
    assert sum(request.function.jitted[request]._cache_size() for request in kept) == 3
    assert_same(scaled[0](X, 0.0), 0 * X)


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_debug_nans_names_the_function(jit):
    """`jax_debug_nans`: JAX looks for the operation without `jit`, which is the call of torch."""

    def root(x):
        return torch.sqrt(x)

    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"nan.*root"):
        jit(from_torch(root))(-jnp.ones(2))


def test_without_jit_by_disable_jit():
    energy = from_torch(cosines, scalar=True)
    with jax.disable_jit():
        found = jax.grad(energy)(X)
    assert_same(found, jax.grad(energy)(X))


def test_arrays_of_64_bits_where_x64_is_off_now():
    wide = jnp.arange(3.0)
    assert wide.dtype == jnp.float64
    with jax.enable_x64(False):
        found = from_torch(lambda x, y: x + y)(wide, jnp.ones(3))
        assert found.dtype == jnp.float32
    assert_same(found, jnp.arange(1.0, 4.0, dtype=jnp.float32))


def test_a_function_is_freed():
    counter = Counter(cosines)
    reference, energy = weakref.ref(counter), from_torch(counter, scalar=True)
    jax.block_until_ready(jax.jit(jax.grad(energy))(X)), jax.block_until_ready(energy(X))
    del counter, energy
    jax.clear_caches()
    gc.collect()
    assert reference() is None
