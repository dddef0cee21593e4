"""Gradients in eager mode: right, independent of each other, and kept exactly as long as their graph."""

import gc
import threading

import pytest
import torch
import warp as wp

from nvalchemiops.launch import active_tape
from nvalchemiops.torch.autograd import (
    NotDifferentiableError,
    OutputSpec,
    WarpAutogradContextManager,
    attach_for_backward,
    live_recordings,
    needs_grad,
    warp_custom_op,
    warp_from_torch,
)
from tests.support.ops import (
    OPS,
    cube,
    cube_reference,
    fill,
    gradients,
    leaf,
    like,
    square_and_cube,
    square_and_cube_reference,
    weighted_square,
    weighted_square_kernel,
    weighted_square_reference,
    with_scratch,
)
from tests.support.processes import in_threads


@pytest.fixture(autouse=True, scope="module")
def what_is_there_stays():
    """So that the collections below look at what a test has made."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_recording_is_left(what_is_there_stays):
    gc.collect()
    before = live_recordings()
    yield
    gc.collect()
    assert live_recordings() == before


@OPS
def test_random_cotangents(op, reference):
    x, w, c = leaf(7), leaf(7, seed=1), leaf(7, seed=2).detach()
    found = torch.autograd.grad(op(x, w), (x, w), c)
    torch.testing.assert_close(found, torch.autograd.grad(reference(x, w), (x, w), c))


@OPS
def test_gradcheck(op, reference):
    assert torch.autograd.gradcheck(op, (leaf(5), leaf(5, seed=1)))


def test_second_order_of_an_explicit_chain():
    assert torch.autograd.gradgradcheck(cube, (leaf(4), leaf(4, seed=1)))


@OPS
def test_each_input_alone(op, reference):
    x, w = leaf(5), leaf(5, seed=1)
    for a, b in ((x, w.detach()), (x.detach(), w)):
        wanted = a if a.requires_grad else b
        found = torch.autograd.grad(op(a, b).sum(), wanted)
        torch.testing.assert_close(found, torch.autograd.grad(reference(a, b).sum(), wanted))


@OPS
def test_one_tensor_in_two_places(op, reference):
    x = leaf(5)
    torch.testing.assert_close(gradients(lambda x: op(x, x).sum(), x), gradients(lambda x: reference(x, x).sum(), x))


@OPS
def test_chain(op, reference):
    def chain(f):
        return lambda x, w: f(f(torch.sin(x), w), f(w, x)).sum()

    x, w = leaf(6), leaf(6, seed=1)
    torch.testing.assert_close(gradients(chain(op), x, w), gradients(chain(reference), x, w))


def test_outputs_have_gradients_of_their_own():
    x, w = leaf(6), leaf(6, seed=1)
    for pick in ((1.0, 0.0), (0.0, 1.0), (0.3, -2.0)):

        def combined(f, pick=pick):
            def scalar(x, w):
                y, z = f(x, w)
                return (pick[0] * y).sum() + (pick[1] * z * z).sum()

            return scalar

        torch.testing.assert_close(
            gradients(combined(square_and_cube), x, w), gradients(combined(square_and_cube_reference), x, w)
        )
    y, _ = square_and_cube(x, w)  # the other output unused
    torch.testing.assert_close(
        torch.autograd.grad(y.sum(), (x, w)), torch.autograd.grad(square_and_cube_reference(x, w)[0].sum(), (x, w))
    )


@OPS
def test_retained_graph_gives_equal_gradients_and_leaves_the_old_ones_alone(op, reference):
    x, w = leaf(5), leaf(5, seed=1)
    y = op(x, w)
    ones, twos = torch.ones(5, dtype=torch.float64), torch.full((5,), 2.0, dtype=torch.float64)
    first = torch.autograd.grad(y, (x, w), ones, retain_graph=True)
    kept = [g.clone() for g in first]
    second = torch.autograd.grad(y, (x, w), twos, retain_graph=True)
    third = torch.autograd.grad(y, (x, w), ones)
    torch.testing.assert_close(list(first), kept, rtol=0, atol=0)
    torch.testing.assert_close(third, first, rtol=0, atol=0)
    torch.testing.assert_close(list(second), [2 * g for g in first])
    assert torch.equal(ones, torch.ones_like(ones)) and torch.equal(twos, torch.full_like(twos, 2.0))


@OPS
@pytest.mark.parametrize("vectorize", [False, True])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_jacobian(op, reference, vectorize):
    x, w = leaf(4), leaf(4, seed=1)
    found = torch.autograd.functional.jacobian(op, (x, w), vectorize=vectorize)
    torch.testing.assert_close(found, torch.autograd.functional.jacobian(reference, (x, w)))


@OPS
def test_accumulation_over_backward_passes(op, reference):
    x, w = leaf(5), leaf(5, seed=1)
    (op(x, w).sum() + op(w, x).sum()).backward()
    op(x, w).sum().backward()
    expected = gradients(lambda x, w: (2 * reference(x, w) + reference(w, x)).sum(), x, w)
    torch.testing.assert_close((x.grad, w.grad), expected)


def test_two_executions_in_flight_keep_apart():
    x, w = leaf(5), leaf(5, seed=1)
    a, b = weighted_square(x, w), weighted_square(x * 2, w)
    torch.testing.assert_close(torch.autograd.grad(b.sum(), x)[0], 8 * x * w)
    torch.testing.assert_close(torch.autograd.grad(a.sum(), x)[0], 2 * x * w)


def test_tensor_grad_is_left_alone_by_the_body():
    x, w = leaf(5), leaf(5, seed=1)
    x.grad = torch.ones_like(x)
    torch.testing.assert_close(torch.autograd.grad(weighted_square(x, w).sum(), x)[0], 2 * x * w)
    torch.testing.assert_close(x.grad, torch.ones_like(x))


# -- life time of recordings ----------------------------------------------------------------------


def test_recordings_live_as_long_as_their_graph():
    x, w = leaf(5), leaf(5, seed=1)
    start = live_recordings()
    kept = [weighted_square(x, w) for _ in range(10)]
    assert live_recordings() == start + 10
    kept[0].sum().backward()
    assert live_recordings() == start + 9, "freed by the backward pass"
    kept[1].sum().backward(retain_graph=True)
    assert live_recordings() == start + 9, "retained"
    del kept
    assert live_recordings() == start, "freed with the abandoned graph, without a garbage collection"


def test_abandoned_graphs_leave_nothing():
    x, w = leaf(5), leaf(5, seed=1)
    start = live_recordings()
    for _ in range(2_000):
        square_and_cube(x, w)
    assert live_recordings() == start


def test_no_recording_without_need():
    x, w = leaf(5), leaf(5, seed=1)
    start = live_recordings()
    with torch.no_grad():
        results = [weighted_square(x, w)]
    with torch.inference_mode():
        results.append(weighted_square(x, w))
    results.append(weighted_square(x.detach(), w.detach()))
    assert live_recordings() == start
    assert not any(r.requires_grad for r in results)


def test_aborted_backward_leaves_nothing():
    x, w = leaf(5), leaf(5, seed=1)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, cotangent):
            raise ArithmeticError("on purpose")

    start = live_recordings()
    for _ in range(20):
        y = weighted_square(Fails.apply(weighted_square(x, w)), w)
        with pytest.raises(ArithmeticError):
            y.sum().backward()
        del y
    gc.collect()
    assert live_recordings() == start


@warp_custom_op("tests::fails", outputs=[like("y")])
def fails(x: torch.Tensor, after_launch: bool) -> torch.Tensor:
    y = torch.empty_like(x)
    x_array = warp_from_torch(x, wp.float64)
    y_array = warp_from_torch(y, wp.float64, requires_grad=x.requires_grad)
    with WarpAutogradContextManager(needs_grad(x)) as tape:
        if not after_launch:
            raise ArithmeticError("on purpose")
        wp.launch(weighted_square_kernel, x.shape[0], [x_array, x_array, 1.0], [y_array], device="cpu")
        attach_for_backward(y, tape, x=x_array, y=y_array)
        raise ArithmeticError("on purpose")


@pytest.mark.parametrize("after_launch", [False, True])
def test_failing_body_leaves_nothing(after_launch):
    x = leaf(5)
    start = live_recordings()
    with pytest.raises(ArithmeticError):
        fails(x, after_launch)
    assert live_recordings() == start
    assert active_tape() is None
    with wp.Tape():  # Warp's own tape is free again
        pass


# -- in-place changes -----------------------------------------------------------------------------


@OPS
@pytest.mark.parametrize("which", [0, 1])
def test_changing_a_saved_input_in_place_is_an_error(op, reference, which):
    inputs = [leaf(5), leaf(5, seed=1)]
    copies = [i * 1.0 for i in inputs]
    y = op(*copies)
    copies[which].detach().mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y.sum(), inputs)


def test_changing_an_integer_input_in_place_is_an_error():
    x, index = leaf(5), torch.arange(5)

    @wp.kernel
    def take(x: wp.array(dtype=wp.float64), index: wp.array(dtype=wp.int64), y: wp.array(dtype=wp.float64)):
        i = wp.tid()
        y[i] = x[int(index[i])]

    @warp_custom_op("tests::take", outputs=[like("y")])
    def take_op(x: torch.Tensor, idx_i: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        x_array, y_array = warp_from_torch(x, wp.float64), warp_from_torch(y, wp.float64, requires_grad=True)
        with WarpAutogradContextManager(needs_grad(x)) as tape:
            wp.launch(take, 5, [x_array, warp_from_torch(idx_i, wp.int64)], [y_array], device="cpu")
        attach_for_backward(y, tape, x=x_array, y=y_array)
        return y

    y = take_op(x, index)
    index += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_changing_an_output_in_place_keeps_the_gradient_right():
    x, w = leaf(5), leaf(5, seed=1)
    y, z = square_and_cube(x, w)
    y *= 3.0  # the tape reads y for the gradient of z
    expected = square_and_cube_reference(x, w)
    torch.testing.assert_close(
        torch.autograd.grad(y.sum() + z.sum(), (x, w)),
        torch.autograd.grad(3.0 * expected[0].sum() + expected[1].sum(), (x, w)),
    )


@pytest.mark.parametrize(
    "move", [lambda t: t.detach().clone(), lambda t: t.detach().clone() if t.numel() > 1 else t], ids=["all", "large"]
)
def test_saved_tensor_hooks_may_move_what_they_save(move):
    """All of it, or what is large."""
    x, w = leaf(5), leaf(5, seed=1)
    here = x.clone()
    with torch.autograd.graph.saved_tensors_hooks(move, lambda t: t):
        y, z = square_and_cube(here, w)
    with torch.no_grad():
        here.zero_()  # which only the tape would read
    expected = square_and_cube_reference(x, w)
    torch.testing.assert_close(
        torch.autograd.grad((y * z).sum(), (x, w)),
        torch.autograd.grad((expected[0] * expected[1]).sum(), (x, w)),
    )


# -- layouts --------------------------------------------------------------------------------------


@OPS
def test_strided_expanded_and_offset_inputs(op, reference):
    base, scalar = leaf(12), leaf(1, seed=3)

    def views(f):
        return lambda b, s: (
            f(b[::2], b[6:]) + f(b.flip(0)[:6], s.expand(6)) + f(b.reshape(2, 6).T[:, 1], b[1::2])
        ).sum()

    torch.testing.assert_close(views(op)(base, scalar), views(reference)(base, scalar))
    torch.testing.assert_close(gradients(views(op), base, scalar), gradients(views(reference), base, scalar))


@OPS
def test_empty_inputs(op, reference):
    x, w = leaf(0), leaf(0)
    y = op(x, w)
    assert y.shape == (0,)
    assert [g.shape for g in torch.autograd.grad(y.sum(), (x, w))] == [(0,), (0,)]


def test_expanded_incoming_gradient():
    x, w = leaf(5), leaf(5, seed=1)
    one = torch.ones((), dtype=torch.float64)
    torch.testing.assert_close(torch.autograd.grad(weighted_square(x, w), x, one.expand(5))[0], 2 * x * w)


def test_derived_tensors_answer_needs_grad():
    answers = []

    @warp_custom_op("tests::asks", outputs=[like("y")])
    def asks(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        derived = x.reshape(2, 3).T.contiguous()
        answers.append([needs_grad(x), needs_grad(w), needs_grad(derived), needs_grad(w[1:].clone()), needs_grad(3)])
        assert warp_from_torch(derived.reshape(-1), wp.float64).requires_grad == needs_grad(x)
        return x.detach().clone()

    x, w = leaf(6), leaf(6, seed=1)
    asks(x, w.detach())
    asks(x.detach(), w)
    with torch.no_grad():
        asks(x, w)
    assert answers == [[True, False, True, False, False], [False, True, False, True, False], [False] * 5]
    answers.clear()
    torch.compile(lambda x, w: asks(x * 2, w + 1), fullgraph=True, backend="aot_eager")(x, w.detach())
    assert answers == [[True, False, True, False, False]]


# -- what cannot be had is an error ---------------------------------------------------------------


def test_second_order_through_a_tape_names_the_op_and_the_way_out():
    x, w = leaf(5), leaf(5, seed=1)
    (first,) = torch.autograd.grad(weighted_square(x, w).sum(), x, create_graph=True)
    with pytest.raises(NotDifferentiableError, match=r"tests::weighted_square.*backward="):
        first.sum().backward()


def test_third_order_of_a_chain_of_two_names_its_last_op():
    x, w = leaf(5), leaf(5, seed=1)
    first = torch.autograd.grad(cube(x, w).sum(), x, create_graph=True)[0]
    second = torch.autograd.grad(first.sum(), x, create_graph=True)[0]
    torch.testing.assert_close(second, 6 * x * w)
    with pytest.raises(NotDifferentiableError, match="tests::cube_second"):
        second.sum().backward()


def test_body_without_a_tape_raises_when_a_gradient_is_wanted():
    @warp_custom_op("tests::no_tape", outputs=[like("y")])
    def no_tape(x: torch.Tensor) -> torch.Tensor:
        return x.detach().clone()

    x = leaf(3)
    torch.testing.assert_close(no_tape(x.detach()), x.detach())
    with pytest.raises(NotDifferentiableError, match=r"tests::no_tape.*attach_for_backward"):
        no_tape(x).sum().backward()


def test_output_that_was_not_attached_raises_when_a_gradient_arrives():
    @warp_custom_op("tests::half_attached", outputs=[like("y"), like("z")])
    def half_attached(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, z = torch.empty_like(x), torch.empty_like(x)
        x_array, y_array = warp_from_torch(x, wp.float64), warp_from_torch(y, wp.float64, requires_grad=True)
        with WarpAutogradContextManager(needs_grad(x)) as tape:
            wp.launch(weighted_square_kernel, 3, [x_array, x_array, 1.0], [y_array], device="cpu")
        attach_for_backward(y, tape, x=x_array, y=y_array)
        return y, z.zero_()

    x = leaf(3)
    torch.testing.assert_close(torch.autograd.grad(half_attached(x)[0].sum(), x)[0], 3 * x * x)
    with pytest.raises(NotDifferentiableError, match=r"tests::half_attached.*output 'z'"):
        half_attached(x)[1].sum().backward()


def test_missing_input_array_is_a_zero_gradient():
    @warp_custom_op("tests::ignores_w", outputs=[like("y")])
    def ignores_w(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        x_array, y_array = warp_from_torch(x, wp.float64), warp_from_torch(y, wp.float64, requires_grad=True)
        with WarpAutogradContextManager(needs_grad(x)) as tape:
            wp.launch(weighted_square_kernel, 3, [x_array, x_array, 1.0], [y_array], device="cpu")
        attach_for_backward(y, tape, x=x_array, y=y_array)
        return y

    x, w = leaf(3), leaf(4)
    assert torch.equal(torch.autograd.grad(ignores_w(x, w).sum(), w)[0], torch.zeros(4, dtype=torch.float64))


def test_outputs_of_a_non_differentiable_op_carry_no_graph():
    @warp_custom_op("tests::counts", outputs=[OutputSpec("n", wp.int32, lambda x: (1,))], grad_arrays=())
    def counts(x: torch.Tensor) -> torch.Tensor:
        return torch.full((1,), x.numel(), dtype=torch.int32)

    assert not counts(leaf(3)).requires_grad
    assert counts(leaf(3)).item() == 3


def test_outputs_left_out_of_grad_arrays_are_not_differentiable():
    @warp_custom_op(
        "tests::only_first", [like("y"), like("z")], grad_arrays=["y", "x"], backward=lambda x, grad_y: 2 * x * grad_y
    )
    def only_first(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * x, x + 1

    x = leaf(3)
    y, z = only_first(x)
    assert y.requires_grad and not z.requires_grad
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], 2 * x)


# -- mutation -------------------------------------------------------------------------------------


def test_mutated_arguments():
    buffer = torch.zeros(4, dtype=torch.float64)
    version = buffer._version
    assert fill(buffer, 2.5) is None
    assert torch.equal(buffer, torch.full((4,), 2.5, dtype=torch.float64))
    assert buffer._version > version
    strided = torch.zeros(8, dtype=torch.float64)
    fill(strided[::2], 1.0)
    assert strided.sum() == 4.0


def test_gradients_past_a_mutated_buffer():
    x, w, scratch = leaf(5), leaf(5, seed=1), torch.zeros(5, dtype=torch.float64)
    y = with_scratch(x, w, scratch)
    torch.testing.assert_close(scratch, (x * w).detach())
    scratch.zero_()  # the recording has its own
    torch.testing.assert_close(torch.autograd.grad(y.sum(), (x, w)), (2 * x * w, x * x))
    torch.testing.assert_close(torch.autograd.grad(with_scratch(x, w).sum(), (x, w)), (2 * x * w, x * x))
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):  # as if the graph were elsewhere
        y = with_scratch(x, w, scratch)
    with pytest.raises(RuntimeError, match="cannot run again"):
        y.sum().backward()


def test_mutated_argument_must_not_require_a_gradient():
    x, w = leaf(5), leaf(5, seed=1)
    with pytest.raises(ValueError, match="`scratch` is written in place"):
        with_scratch(x, w, leaf(5))


def test_changing_a_tensor_that_an_op_will_mutate_is_seen_by_torch():
    a = leaf(4)
    buffer = torch.ones(4, dtype=torch.float64)
    y = a * buffer
    fill(buffer, 5.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# -- threads --------------------------------------------------------------------------------------


def test_many_threads_record_and_replay_at_once():
    def work(seed):
        for round in range(30):
            x, w = leaf(50, seed=seed), leaf(50, seed=seed + 100)
            f = (weighted_square, cube)[round % 2]
            r = (weighted_square_reference, cube_reference)[round % 2]
            found = torch.autograd.grad(f(f(x, w), w).sum(), (x, w))
            torch.testing.assert_close(found, torch.autograd.grad(r(r(x, w), w).sum(), (x, w)))
            with torch.no_grad():
                torch.testing.assert_close(f(x, w), r(x, w))

    in_threads(work, range(8))
    assert active_tape() is None


def test_launches_of_other_threads_stay_off_the_tape():
    x = warp_from_torch(torch.ones(4, dtype=torch.float64), wp.float64)
    y = warp_from_torch(torch.ones(4, dtype=torch.float64), wp.float64)

    def launch_once():
        wp.launch(weighted_square_kernel, 4, [x, x, 1.0], [y], device="cpu")

    with WarpAutogradContextManager(True) as tape:
        launch_once()
        other = threading.Thread(target=launch_once)
        other.start()
        other.join()
        launch_once()
    assert len(tape.launches) == 2


def test_one_graph_replayed_by_many_threads():
    x, w = leaf(200), leaf(200, seed=1)
    y = weighted_square(x, w)
    expected = 2 * (x * w).detach()

    def work(factor):
        for _ in range(20):
            found = torch.autograd.grad(y, x, torch.full_like(y, factor), retain_graph=True)[0]
            torch.testing.assert_close(found, factor * expected)

    in_threads(work, [float(k + 1) for k in range(6)])


def test_one_graph_replayed_during_its_replay(monkeypatch):
    """As by a signal handler, between the gradients that arrive and the launches that read them."""
    x, w = leaf(5), leaf(5, seed=1)
    y, inner, backward = weighted_square(x, w), [], wp.Tape.backward

    def interrupted(tape):
        if not inner:
            inner.append(None)
            inner.extend(torch.autograd.grad(y, (x, w), torch.ones_like(y), retain_graph=True))
        backward(tape)

    monkeypatch.setattr(wp.Tape, "backward", interrupted)
    outer = torch.autograd.grad(3.0 * y.sum(), (x, w))
    expected = 2.0 * x * w, x**2
    torch.testing.assert_close(inner[1:], [g.detach() for g in expected])
    torch.testing.assert_close(outer, tuple(3.0 * g.detach() for g in expected))


def test_an_active_warp_tape_is_refused_with_a_reason():
    x, w = leaf(3), leaf(3, seed=1)
    with wp.Tape(), pytest.raises(RuntimeError, match="Tape is active"):
        weighted_square(x, w)
