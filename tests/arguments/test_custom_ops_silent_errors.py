"""Mistakes that would give wrong numbers without a word: each is an error, or made right."""

import functools
import math
import signal
import textwrap

import numpy as np
import pytest
import torch
import warp as wp

from nvalchemiops import launch as core
from nvalchemiops.torch import autograd
from nvalchemiops.torch.kernel import (
    call_kernel,
    call_kernel_via_torch,
    differentiable_kernel,
    get_or_register_torch_op,
)
from nvalchemiops.torch.launch import launch
from nvalchemiops.torch.neighbors import neighbor_list
from tests.support.ops import (
    cube,
    leaf,
    like,
    product_kernel,
    real,
    times_kernel,
    weighted_square,
    weighted_square_kernel,
    with_scratch,
)
from tests.support.processes import output_of, run_interpreter, run_python

SPEC = [like("y")]


# -- two things under one name --------------------------------------------------------------------


def scaling(factor):
    constant = wp.constant(wp.float64(factor))

    @wp.kernel
    def scale_kernel(x: wp.array(dtype=real), y: wp.array(dtype=real)):
        i = wp.tid()
        y[i] = constant * x[i]

    return scale_kernel


def test_kernels_of_one_factory_are_different_ops():
    double, triple, x = scaling(2.0), scaling(3.0), leaf(3)
    ops = [get_or_register_torch_op(k, SPEC, differentiable=True) for k in (double, triple)]
    for factor, kernel, op in ((2.0, double, ops[0]), (3.0, triple, ops[1])):
        torch.testing.assert_close(op(x), factor * x)
        torch.testing.assert_close(call_kernel_via_torch(kernel, x, outputs=SPEC), factor * x)
        torch.testing.assert_close(torch.autograd.grad(op(x).sum(), x)[0], torch.full_like(x, factor))
    assert ops[0].op.registered != ops[1].op.registered


def test_equal_kernels_keep_ops_of_their_own():
    first, second = scaling(2.0), scaling(2.0)
    ops = [get_or_register_torch_op(k, SPEC) for k in (first, second)]
    assert ops[0].op.registered != ops[1].op.registered
    for op in ops:
        torch.testing.assert_close(op(leaf(3).detach()), 2.0 * leaf(3).detach())


def test_ops_of_one_factory_answer_each_for_itself():
    def define(factor):
        @autograd.warp_custom_op("tests::from_a_factory", SPEC, backward=lambda grad_y: factor * grad_y)
        def scaled(x: torch.Tensor) -> torch.Tensor:
            return factor * x

        return scaled

    x = leaf(3)
    ops = {factor: define(factor) for factor in (2.0, 3.0, 2.0, 5.0)}
    for factor, op in ops.items():
        for function in (op, torch.compile(op, fullgraph=True, backend="aot_eager")):
            torch.testing.assert_close(function(x), factor * x)
            torch.testing.assert_close(torch.autograd.grad(function(x).sum(), x)[0], torch.full_like(x, factor))
    assert len({op.op.registered for op in ops.values()}) == len(ops)


# -- tensors that are not what their memory says --------------------------------------------------


def negated_by_a_flag():
    return torch.complex(torch.ones(3).double(), torch.full((3,), 5.0).double()).conj().imag


def test_lazily_negated_tensors():
    x, w = negated_by_a_flag(), leaf(3).detach()
    assert x.is_neg()
    torch.testing.assert_close(cube(x, w), x.resolve_neg() ** 3 * w)
    torch.testing.assert_close(weighted_square(w, x), w * w * x.resolve_neg())
    for refuse in (
        lambda: autograd.warp_from_torch(x, wp.float64),
        lambda: call_kernel(product_kernel, x, w, outputs=[autograd.OutputSpec("y", wp.float64, (3,))]),
        lambda: launch(product_kernel, 3, [x, w], [torch.empty(3, dtype=torch.float64)]),
    ):
        with pytest.raises(ValueError, match="resolve_neg"):
            refuse()


@pytest.mark.parametrize("op", [weighted_square, cube], ids=["tape", "explicit"])
def test_gradients_of_lazily_negated_tensors(op):
    base, w = leaf(3), torch.ones(3, dtype=torch.float64)
    found = torch.autograd.grad(op(torch._neg_view(base), w).sum(), base)[0]
    expected = torch.autograd.grad(op(-base, w).sum(), base)[0]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("op", [weighted_square, cube], ids=["tape", "explicit"])
def test_zero_tensors_without_memory(op):
    x, zero = leaf(3), torch._efficientzerotensor(3, dtype=torch.float64)
    assert torch.equal(torch.autograd.grad(op(x, zero).sum(), x)[0], torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("layout", [lambda t: t.to_sparse(), lambda t: t.reshape(1, 3).to_sparse_csr()])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_other_layouts_are_refused_by_name(layout):
    x = torch.ones(3, dtype=torch.float64)
    with pytest.raises(TypeError, match="`w` has layout"):
        weighted_square(x, layout(x))


def test_overlapping_elements_have_no_gradients_of_their_own():
    windows = torch.ones(5, dtype=torch.float64).unfold(0, 3, 1)
    assert autograd.warp_from_torch(windows, wp.float64).shape == (3, 3)
    with pytest.raises(ValueError, match="share memory"):
        autograd.warp_from_torch(windows, wp.float64, requires_grad=True)


# -- launches that a tape would miss --------------------------------------------------------------


def body_with(what):
    @autograd.warp_custom_op("tests::incomplete", SPEC)
    def incomplete(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        track = autograd.needs_grad(x, w)
        arrays = {"x": autograd.warp_from_torch(x, wp.float64), "w": autograd.warp_from_torch(w, wp.float64)}
        arrays["y"] = autograd.warp_from_torch(y, wp.float64, requires_grad=track)
        with autograd.WarpAutogradContextManager(track) as tape:
            what(x, w, y, arrays)
        if track:
            autograd.attach_for_backward(y, tape, **arrays)
        return y

    return incomplete


def calls_an_op(x, w, y, arrays):
    middle = autograd.warp_from_torch(weighted_square(x, w), wp.float64)
    wp.launch(times_kernel, x.shape[0], [middle, arrays["x"]], [arrays["y"]], device="cpu")


def launches_on_tensors(x, w, y, arrays):
    launch(weighted_square_kernel, x.shape[0], [x, w, 1.0], [y])


def records_inside(x, w, y, arrays):
    with autograd.WarpAutogradContextManager(True):
        wp.launch(weighted_square_kernel, x.shape[0], [arrays["x"], arrays["w"], 1.0], [arrays["y"]], device="cpu")


@wp.kernel(enable_backward=False)
def no_adjoint_kernel(x: wp.array(dtype=real), y: wp.array(dtype=real)):
    i = wp.tid()
    y[i] = x[i]


def launches_without_adjoint(x, w, y, arrays):
    wp.launch(no_adjoint_kernel, x.shape[0], [arrays["x"]], [arrays["y"]], device="cpu")


def launches_unrecorded(x, w, y, arrays):
    arguments = [arrays["x"], arrays["w"], 1.0], [arrays["y"]]
    core.launch(weighted_square_kernel, x.shape[0], *arguments, device="cpu", record_tape=False)


def launches_nothing(x, w, y, arrays):
    y.fill_(1.0)


@pytest.mark.parametrize(
    "what, error, match",
    [
        (calls_an_op, autograd.NotDifferentiableError, "tests::weighted_square was called inside a recording"),
        (launches_on_tensors, autograd.NotDifferentiableError, "on tensors inside a recording"),
        (records_inside, RuntimeError, "already records on a tape"),
        (launches_without_adjoint, autograd.NotDifferentiableError, "no_adjoint_kernel"),
        (launches_unrecorded, autograd.NotDifferentiableError, "weighted_square_kernel"),
        (launches_nothing, autograd.NotDifferentiableError, "recorded no launch"),
    ],
)
def test_launches_that_the_tape_would_miss(what, error, match):
    x, w = leaf(3), leaf(3, seed=1)
    op = body_with(what)
    with pytest.raises(error, match=match):
        op(x, w).sum().backward()
    with torch.no_grad():
        assert core.active_tape() is None


def test_a_second_tape_on_one_output_is_refused():
    output = torch.ones(3)
    first = wp.Tape()
    autograd.attach_for_backward(output, first)
    autograd.attach_for_backward(output, first, x=autograd.warp_from_torch(output, wp.float32))
    with pytest.raises(ValueError, match="another tape"):
        autograd.attach_for_backward(output, wp.Tape())


# -- mutation -------------------------------------------------------------------------------------


def test_mutating_ops_are_refused_under_transforms():
    x, w, scratch = leaf(4).detach(), leaf(4, seed=1).detach(), torch.zeros(4, dtype=torch.float64)
    for transform in (
        lambda: torch.func.grad(lambda x: with_scratch(x, w, scratch).sum())(x),
        lambda: torch.func.jvp(lambda x: with_scratch(x, w, scratch), (x,), (w,)),
        lambda: torch.func.vmap(with_scratch, (0, None, None))(torch.stack([x, x]), w, scratch),
    ):
        with pytest.raises(RuntimeError, match="writes into its arguments"):
            transform()
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="writes into its arguments"):
        with_scratch(torch.autograd.forward_ad.make_dual(x, w), w, scratch)


def test_written_arguments_must_not_overlap_others():
    buffer = torch.arange(1.0, 6.0, dtype=torch.float64)
    for x in (leaf(3), leaf(3).detach()):
        with pytest.raises(ValueError, match="`scratch` is written in place and overlaps `w`"):
            with_scratch(x, buffer[0:3], buffer[1:4])
    with_scratch(leaf(2), buffer[:2], buffer[2:4])


# -- outputs of several kinds ---------------------------------------------------------------------


@wp.kernel
def count_and_scale_kernel(x: wp.array(dtype=real), n: wp.array(dtype=wp.int32), y: wp.array(dtype=wp.float32)):
    i = wp.tid()
    n[i] = i
    y[i] = wp.float32(x[i] * x[i])


@wp.kernel(enable_backward=False)
def count_and_scale_backward_kernel(x: wp.array(dtype=real), c: wp.array(dtype=wp.float32), g: wp.array(dtype=real)):
    i = wp.tid()
    g[i] = real(2.0) * x[i] * real(c[i])


MIXED = [autograd.OutputSpec("n", wp.int32, lambda x: x.shape), autograd.OutputSpec("y", wp.float32, lambda x: x.shape)]


@pytest.mark.parametrize("kernels", [(), (count_and_scale_backward_kernel,)], ids=["own adjoint", "pair"])
def test_integer_outputs_and_mixed_precision(kernels):
    op = differentiable_kernel(count_and_scale_kernel, *kernels).op(MIXED)
    x = leaf(4)
    n, y = op(x)
    assert not n.requires_grad and y.dtype == torch.float32
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], 2 * x.detach(), rtol=1e-6, atol=1e-6)
    tangent = torch.func.jvp(lambda x: op(x)[1], (x.detach(),), (torch.ones_like(x),))[1]
    torch.testing.assert_close(tangent, 2 * x.detach().float())


def test_an_integer_output_cannot_be_differentiable():
    with pytest.raises(TypeError, match="'n', which holds no floating-point"):

        @autograd.warp_custom_op("tests::integer_gradient", MIXED, grad_arrays=["n", "y", "x"])
        def op(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            raise AssertionError


def test_slices_of_different_size_cannot_be_stacked():
    x = torch.stack([torch.zeros(2, 3), torch.tensor([[0.0, 0, 0], [9.0, 0, 0]])])
    for search in (neighbor_list, functools.partial(neighbor_list, return_neighbor_list=True)):
        with pytest.raises(ValueError, match=r"differ in size between slices.*`max_neighbors`"):
            torch.func.vmap(search, (0, None))(x, 2.0)
    found = torch.func.vmap(lambda p: neighbor_list(p, 2.0, max_neighbors=1)[0])(x)
    assert found.tolist() == [[[1], [0]], [[2], [2]]]


# -- ways around the dispatcher -------------------------------------------------------------------


def test_a_first_call_in_inference_mode_does_not_spoil_the_short_way():
    """Whether tensors are ordinary is learnt from one, which must be ordinary itself. In a process of its own."""
    script = """
        import torch
        from nvalchemiops.torch.autograd import op
        from nvalchemiops.torch.operators.segments import system_sums
        x, taken = torch.ones(3, 2, dtype=torch.float64), []
        with torch.inference_mode():
            system_sums(x + 1.0, None, 1)
        system_sums(x, None, 1)
        run = op.WarpOp._short_way
        op.WarpOp._short_way = lambda self, *args: taken.append(self.name) or run(self, *args)
        system_sums(x, None, 1)
        assert taken == ["nvalchemiops::system_sums"], taken
    """
    output_of(run_python(script))


# -- declarations and launches at their limits ----------------------------------------------------


def test_defaults_before_one_that_a_schema_cannot_express():
    @autograd.warp_custom_op("tests::late_infinity", SPEC, grad_arrays=())
    def op(x: torch.Tensor, w: torch.Tensor | None = None, top: float = math.inf, n: int = 2) -> torch.Tensor:
        return x.clamp(max=top) * n

    x = torch.ones(2, dtype=torch.float64)
    assert op(x).tolist() == [2.0, 2.0] and op(x, n=3).tolist() == [3.0, 3.0]


def test_too_many_outputs_are_counted_up_front():
    with pytest.raises(ValueError, match="40 outputs are more than"):
        autograd.warp_custom_op("tests::forty", [like(f"y{i}") for i in range(40)])(_unused)


def _unused(x: torch.Tensor) -> torch.Tensor:
    raise AssertionError


def test_numbers_that_do_not_fit_the_kernel():
    x, y = torch.ones(4, dtype=torch.float64), torch.empty(4, dtype=torch.float64)

    @wp.kernel(enable_backward=False)
    def shifted(x: wp.array(dtype=real), by: wp.int32, y: wp.array(dtype=real)):
        i = wp.tid()
        y[i] = x[i] + real(by)

    launch(shifted, np.int64(4), [x, 1], [y])
    assert y.tolist() == [2.0] * 4
    with pytest.raises(ValueError, match="`by` = 1099511627776"):
        launch(shifted, 4, [x, 2**40], [y])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="float"):
            core.launch(
                shifted,
                4,
                [wp.zeros(4, dtype=wp.float32, device="cpu"), 1],
                [wp.from_torch(y)],
                device="cpu",
                record_tape=False,
            )


@pytest.mark.skipif(not hasattr(signal, "SIGPROF"), reason="needs alarms")
def test_an_interrupt_waits_for_every_chunk(tmp_path):
    """Ctrl-C during a split launch: no worker may still write when the memory goes back."""
    script = textwrap.dedent(
        """
        import signal, time
        import torch, warp as wp
        from nvalchemiops import launch as core
        from nvalchemiops.torch.launch import launch

        core.MINIMUM_CHUNK = 1e-15

        @core.gather_only
        @wp.kernel(enable_backward=False)
        def slow(offset: wp.int32, steps: wp.int32, y: wp.array(dtype=wp.float64)):
            i = offset + wp.tid()
            total = wp.float64(0.0)
            n = steps
            if i < 2:
                n = 1
            for k in range(n):
                total += wp.sin(wp.float64(k) + total)
            y[i] = total + wp.float64(1e6)

        torch.set_num_threads(2)
        y = torch.zeros(4, dtype=torch.float64)
        launch(slow, 4, [10], [y])
        y.zero_()

        def interrupt(*_):
            raise KeyboardInterrupt

        signal.signal(signal.SIGPROF, interrupt)
        signal.setitimer(signal.ITIMER_PROF, 0.05)  # of work, so that it is in the launch on a busy machine, too
        try:
            launch(slow, 4, [8_000_000], [y])
            print("finished")
        except KeyboardInterrupt:
            seen = y.clone()
            time.sleep(0.5)
            print("interrupted", bool((seen == y).all()), bool((y != 0).all()))
        """
    )
    path = tmp_path / "interrupted.py"  # Warp reads a kernel's source from its file
    path.write_text(script)
    run = run_interpreter(path)
    assert run.stdout.splitlines()[-1] in ("interrupted True True", "finished"), run.stdout + run.stderr
