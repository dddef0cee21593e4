"""The same numbers from compiled graphs: aot_eager for everything, inductor once for each kind of op."""

import textwrap

import pytest
import torch
import warp as wp
from torch.utils.checkpoint import checkpoint

from nvalchemiops.torch import autograd
from tests.support import ops
from tests.support.comparing import BACKENDS
from tests.support.processes import output_of, run_interpreter

SLOW_INDUCTOR = pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.inductor, pytest.mark.slow])]
)


def chain(f, pair):
    """Ops fed by ops and by torch, one tensor twice, an unused output, non-contiguous intermediates."""

    def loss(x, w):
        a = f(torch.sin(x), w)
        b = f(a * 1.5, a)
        y, z = pair(b, torch.cos(w))
        u, _ = pair(torch.stack([x, w])[:, ::2].T[:, 1], w[: (w.shape[0] + 1) // 2])
        return (y * z).sum() + f(z, w).tanh().sum() + u.sum()

    return loss


@pytest.mark.everyday_cases("aot_eager-*", "inductor-explicit")
@ops.OPS
@BACKENDS
def test_chain_equals_eager_and_reference(op, reference, backend):
    x, w = ops.leaf(6), ops.leaf(6, seed=1)
    compiled = torch.compile(chain(op, ops.square_and_cube), fullgraph=True, backend=backend)
    expected = chain(reference, ops.square_and_cube_reference)
    start = autograd.live_recordings()
    torch.testing.assert_close(compiled(x, w), expected(x, w))
    torch.testing.assert_close(ops.gradients(compiled, x, w), ops.gradients(expected, x, w))
    first, second = compiled(x, w), compiled(w, x)  # two executions before any backward pass
    torch.testing.assert_close(torch.autograd.grad(first, (x, w)), ops.gradients(expected, x, w))
    torch.testing.assert_close(torch.autograd.grad(second, (x, w)), ops.gradients(lambda x, w: expected(w, x), x, w))
    compiled(x, w)  # abandoned
    with torch.no_grad():
        assert not compiled(x, w).requires_grad
    del first, second
    assert autograd.live_recordings() == start


@SLOW_INDUCTOR
def test_inputs_whose_buffers_the_compiler_takes_back(backend):
    """The op's input is a cheap intermediate: recomputed in the backward graph, its first copy overwritten."""

    def loss(f):
        def inner(x, w):
            y = f(x * 2.0 + 1.0, w * 0.5)
            for _ in range(4):
                y = torch.sin(y) * 1.01 + 0.1
            return (y * f(torch.cos(y), y)).sum()

        return inner

    x, w = ops.leaf(2_000), ops.leaf(2_000, seed=1)
    for budget in (1.0, 0.5, 0.0):
        torch.compiler.reset()
        with torch._functorch.config.patch(activation_memory_budget=budget):
            compiled = torch.compile(loss(ops.weighted_square), fullgraph=True, backend=backend)
            found = ops.gradients(compiled, x, w)
        torch.testing.assert_close(found, ops.gradients(loss(ops.weighted_square_reference), x, w))


@ops.OPS
@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
def test_traced_forward_and_backward(op, reference, tracing_mode):
    from torch.fx.experimental.proxy_tensor import make_fx

    def both(x, w):
        return ops.gradients(lambda x, w: op(torch.sin(x), w).pow(2).sum(), x, w)

    graph = make_fx(both, tracing_mode=tracing_mode)(ops.leaf(6), ops.leaf(6, seed=1))
    x, w = ops.leaf(6, seed=2), ops.leaf(6, seed=3)
    expected = ops.gradients(lambda x, w: reference(torch.sin(x), w).pow(2).sum(), x, w)
    torch.testing.assert_close([g.detach() for g in graph(x, w)], list(expected))


@ops.OPS
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_eager(op, reference, use_reentrant):
    x, w = ops.leaf(6), ops.leaf(6, seed=1)
    plain = ops.gradients(lambda x, w: chain(op, ops.square_and_cube)(x, w), x, w)
    found = gradients_by_backward(
        lambda x, w: checkpoint(chain(op, ops.square_and_cube), x, w, use_reentrant=use_reentrant), x, w
    )
    torch.testing.assert_close(found, plain, rtol=0, atol=0)


def gradients_by_backward(function, *inputs):
    inputs = [i.detach().clone().requires_grad_() for i in inputs]
    function(*inputs).backward()
    return tuple(i.grad for i in inputs)


@ops.OPS
@SLOW_INDUCTOR
def test_checkpoint_compiled(op, reference, backend):
    x, w = ops.leaf(6), ops.leaf(6, seed=1)
    inner = chain(op, ops.square_and_cube)
    compiled = torch.compile(
        lambda x, w: checkpoint(inner, x, w, use_reentrant=False) * 2, fullgraph=True, backend=backend
    )
    start = autograd.live_recordings()
    torch.testing.assert_close(ops.gradients(compiled, x, w), tuple(2 * g for g in ops.gradients(inner, x, w)))
    assert autograd.live_recordings() == start


@ops.OPS
@SLOW_INDUCTOR
def test_compiled_backward_of_an_eager_forward(op, reference, backend):
    """Torch's compiled autograd traces the backward pass by itself."""
    x, w = ops.leaf(6), ops.leaf(6, seed=1)
    compiler = torch.compile(backend=backend, fullgraph=True)
    with torch._dynamo.compiled_autograd._enable(compiler):
        found = gradients_by_backward(lambda x, w: op(torch.sin(x), w).pow(2).sum(), x, w)
    torch.testing.assert_close(found, ops.gradients(lambda x, w: reference(torch.sin(x), w).pow(2).sum(), x, w))


@ops.OPS
@SLOW_INDUCTOR
def test_dynamic_shapes_compile_at_most_twice(op, reference, backend):
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(lambda x, w: op(x * 2, w).sum(), fullgraph=True, backend=counter)
    for n in (5, 9, 4, 12, 7, 33):
        x, w = ops.leaf(n), ops.leaf(n, seed=1)
        torch.testing.assert_close(
            ops.gradients(compiled, x, w), ops.gradients(lambda x, w: reference(x * 2, w).sum(), x, w)
        )
    assert counter.frame_count <= 2


@autograd.warp_custom_op("tests::with_optional", outputs=[ops.like("y")])
def with_optional(
    x: torch.Tensor, w: torch.Tensor | None = None, s: float = 2.0, shift: torch.Tensor | None = None
) -> torch.Tensor:
    y = torch.empty_like(x)
    track = autograd.needs_grad(x, w)
    arrays = {
        "x": autograd.warp_from_torch(x, wp.float64),
        "y": autograd.warp_from_torch(y, wp.float64, requires_grad=track),
    }
    if w is not None:
        arrays["w"] = autograd.warp_from_torch(w, wp.float64)
    with autograd.WarpAutogradContextManager(track) as tape:
        inputs = [arrays["x"], arrays.get("w", arrays["x"]), s]
        wp.launch(ops.weighted_square_kernel, x.shape[0], inputs, [arrays["y"]], device="cpu")
    if track:
        autograd.attach_for_backward(y, tape, **arrays)
    return y


@pytest.mark.everyday_cases("aot_eager")
@BACKENDS
def test_optional_inputs_present_and_absent(backend):
    x, w = ops.leaf(5), ops.leaf(5, seed=1)

    def both(x, w):
        return with_optional(torch.sin(x), w).sum() + with_optional(x * 2).sum() + with_optional(w, s=3.0).sum()

    def expected(x, w):
        return (2 * torch.sin(x) ** 2 * w).sum() + (2 * (2 * x) ** 3).sum() + (3 * w**3).sum()

    torch.testing.assert_close(ops.gradients(both, x, w), ops.gradients(expected, x, w))
    compiled = torch.compile(both, fullgraph=True, backend=backend)
    torch.testing.assert_close(ops.gradients(compiled, x, w), ops.gradients(expected, x, w))
    torch.library.opcheck(with_optional.op.overload, (x,))
    torch.library.opcheck(with_optional.op.overload, (x, w, 2.0, None))


@pytest.mark.parametrize(
    "call",
    [
        (ops.weighted_square, (ops.leaf(5), ops.leaf(5, seed=1), 2.0)),
        (ops.weighted_square, (ops.leaf(5), ops.leaf(5, seed=1).detach())),
        (ops.weighted_square, (ops.leaf(10)[::2], ops.leaf(1).expand(5))),
        (ops.weighted_square, (ops.leaf(0), ops.leaf(0))),
        (ops.square_and_cube, (ops.leaf(5), ops.leaf(5, seed=1))),
        (ops.cube, (ops.leaf(5), ops.leaf(5, seed=1))),
        (ops.cube.op.backward, (ops.leaf(5), ops.leaf(5, seed=1), ops.leaf(5, seed=2))),
        (ops.with_scratch, (ops.leaf(5), ops.leaf(5, seed=1), torch.zeros(5, dtype=torch.float64))),
        (ops.fill, (torch.zeros(5, dtype=torch.float64), 2.0)),
    ],
    ids=lambda call: call[0].op.name,
)
def test_opcheck(call):
    op, arguments = call
    torch.library.opcheck(op.op.overload, arguments)


def test_opcheck_of_the_backward_of_a_tape_op():
    op = ops.weighted_square.op
    x, w = ops.leaf(5).detach(), ops.leaf(5, seed=1).detach()
    y, token = op.overload(x, w, 1.0, 0b11, 1)
    torch.library.opcheck(op.backward.op.overload, (token, x, w, 1.0, y, torch.ones_like(y), 0b11, 1))


@pytest.mark.everyday_cases("aot_eager")
@BACKENDS
def test_mutated_buffers(backend):
    def loss(x, w, scratch):
        y = ops.with_scratch(torch.sin(x), w, scratch)
        return (y * 2).sum() + (scratch * x).sum()

    def expected(x, w):
        s = torch.sin(x)
        return (s * w * s * 2).sum() + ((s * w).detach() * x).sum()

    x, w, scratch = ops.leaf(6), ops.leaf(6, seed=1), torch.zeros(6, dtype=torch.float64)
    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    value = compiled(x, w, scratch)
    torch.testing.assert_close(value, expected(x, w))
    torch.testing.assert_close(scratch, (torch.sin(x) * w).detach())
    torch.testing.assert_close(torch.autograd.grad(value, (x, w)), ops.gradients(expected, x, w))


@ops.OPS
@pytest.mark.parametrize("strict", [False, True])
def test_export(op, reference, strict):
    class Model(torch.nn.Module):
        def forward(self, x, w):
            y = op(x * 2, w)
            return y.sum(), y

    x, w = ops.leaf(6).detach(), ops.leaf(6, seed=1).detach()
    n = torch.export.Dim("n", min=2, max=100)
    program = torch.export.export(Model(), (x, w), dynamic_shapes=({0: n}, {0: n}), strict=strict)
    for size in (6, 11):
        x, w = ops.leaf(size).detach(), ops.leaf(size, seed=1).detach()
        torch.testing.assert_close(program.module()(x, w)[1], reference(x * 2, w))


def force_loss(f):
    def loss(x, w):
        energy = torch.sin(f(x * w, w)).sum()
        (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy + slope.pow(2).sum()

    return loss


@pytest.mark.everyday_cases("aot_eager")
@BACKENDS
def test_parameter_gradient_of_a_force_loss(backend):
    """The known trap: a wrong factor in the gradient, with the right loss."""
    x, w = ops.leaf(6), ops.leaf(6, seed=1)
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        compiled = torch.compile(force_loss(ops.cube), fullgraph=True, backend=backend)
        value = compiled(x, w)
        found = torch.autograd.grad(value, (x, w))
    torch.testing.assert_close(value, force_loss(ops.cube_reference)(x, w))
    torch.testing.assert_close(found, ops.gradients(force_loss(ops.cube), x, w))
    torch.testing.assert_close(found, ops.gradients(force_loss(ops.cube_reference), x, w))


@pytest.mark.parametrize("op", [ops.weighted_square, ops.cube], ids=["tape", "explicit"])
def test_function_transforms_inside_a_graph_raise_or_are_right(op):
    """Torch 2.13 raises; torch 2.14 breaks the graph and computes them."""
    x, w = ops.leaf(5).detach(), ops.leaf(5, seed=1).detach()
    compiled = torch.compile(lambda x: torch.func.grad(lambda x: op(x, w).sum())(x), backend="aot_eager")
    try:
        found = compiled(x)
    except RuntimeError as error:
        assert "eager mode only" in str(error)
    else:
        torch.testing.assert_close(found, ops.gradients(op, x.requires_grad_(), w.requires_grad_())[0])


@ops.OPS
def test_autocast_changes_nothing(op, reference):
    x, w = ops.leaf(6), ops.leaf(6, seed=1)
    for function in (op, torch.compile(op, fullgraph=True, backend="aot_eager")):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = function(x, w)
        torch.testing.assert_close(y, reference(x, w))
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x), torch.autograd.grad(reference(x, w).sum(), x))


def test_half_precision_from_an_autocast_layer_is_widened():
    @autograd.warp_custom_op(
        "tests::dtype_seen",
        [autograd.OutputSpec("y", wp.float32, lambda x: x.shape)],
        backward=lambda grad_y: 2 * grad_y,
    )
    def dtype_seen(x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.float32
        product = (x[:, None] @ x[None, :]).diagonal()
        assert product.dtype == torch.float32, "torch operations in the body are not autocast either"
        return 2 * x

    x = torch.rand(4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = torch.nn.functional.linear(x[None], torch.eye(4))[0]
        assert half.dtype == torch.bfloat16
        y = dtype_seen(half)
    assert y.dtype == torch.float32
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.full((4,), 2.0))


def test_integers_for_float_arguments():
    x, w = ops.leaf(4), ops.leaf(4, seed=1)
    torch.testing.assert_close(ops.weighted_square(x, w, 3), ops.weighted_square(x, w, s=3.0))
    torch.testing.assert_close(
        torch.compile(ops.weighted_square, fullgraph=True, backend="aot_eager")(x, w, 3), ops.weighted_square(x, w, 3.0)
    )


@pytest.mark.slow
@pytest.mark.inductor
def test_changed_backward_is_seen_past_a_shared_compile_cache(tmp_path):
    """A release changes a derivative; the compile cache of the old release is still there."""
    script = tmp_path / "release.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys
            import torch
            import warp as wp
            from nvalchemiops.torch.autograd import OutputSpec, warp_custom_op

            factor = float(sys.argv[1])
            scope = {}
            body = f"def backward(grad_y):\\n    return grad_y * {factor}\\n"
            exec(body, scope)

            spec = OutputSpec("y", wp.float64, lambda x: x.shape)

            @warp_custom_op("tests::changed", [spec], backward=scope["backward"])
            def changed(x: torch.Tensor) -> torch.Tensor:
                return x * 2

            x = torch.ones(3, dtype=torch.float64, requires_grad=True)
            torch.compile(lambda x: changed(torch.sin(x)).sum(), fullgraph=True)(x).backward()
            print(round((x.grad[0] / torch.cos(torch.tensor(1.0, dtype=torch.float64))).item(), 12))
            """
        )
    )
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "TORCHINDUCTOR_AUTOGRAD_CACHE": "1"}
    factors = ("2.0", "2.0", "7.0")
    found = [output_of(run_interpreter(script, factor, **environment)).split()[-1] for factor in factors]
    assert found == ["2.0", "2.0", "7.0"]


def test_identity_changes_with_the_backward():
    def make(name, factor):
        return autograd.warp_custom_op(name, [ops.like("y")], backward=factor)(_double)

    one = make("tests::identity_one", lambda grad_y: 2 * grad_y)
    two = make("tests::identity_two", lambda grad_y: 3 * grad_y)
    same = make("tests::identity_same", lambda grad_y: 2 * grad_y)
    assert one.op.identity == same.op.identity != two.op.identity


def _double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


IDENTITIES = """
import functools, gc, sys
import torch
import warp as wp
import nvalchemiops.torch.ops
from nvalchemiops.torch.autograd import OutputSpec
from nvalchemiops.torch.autograd.naming import value_identity
from nvalchemiops.torch.autograd.op import WarpOp

n_rows = int(sys.argv[1])
options = {"one": {"a", "b", "c", "d"}, "two": [torch.empty, functools.cache(lambda x: (x, n_rows))]}
print(value_identity([OutputSpec("y", wp.float64, lambda x: (n_rows, x.shape[0])), lambda x: x in {"a", "b", options}]))
ops = {op.registered: op.identity for op in gc.get_objects() if isinstance(op, WarpOp)}
print(len(ops), value_identity(sorted(ops.items())))
"""


@pytest.mark.later
def test_ops_have_the_same_identity_in_every_process(tmp_path):
    """By which caches of compiled graphs find them, those of the library too; another shape has another one."""
    (tmp_path / "identities.py").write_text(IDENTITIES)
    outputs = [output_of(run_interpreter(str(tmp_path / "identities.py"), n)) for n in "225"]
    one, same, other = (output.split()[-3:] for output in outputs)
    assert one == same and one[0] != other[0] and one[1:] == other[1:] and int(one[1]) > 30
