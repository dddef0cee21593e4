"""Steps of users that are captured as graphs: what a graph sees, whose its results are, and what is refused.

Each runs on a CPU with the layout of a GPU and a stand-in for its graphs, too.
"""

import pytest
import torch

from nvalchemiops.torch import RecordingError, plans, record
from nvalchemiops.torch.runtime.recorder import current_recorder
from tests.support.captures import pointers
from tests.support.comparing import close, random_like
from tests.support.gpu import captured
from tests.support.plans import CountedGraph, StandInGraph, n_replays


def test_results_that_are_arguments_are_the_callers(made, gpu):
    """Those of the first call, too, which has run with the memory of the graph."""
    step = record(lambda x: (x, x[1:], 2.0 * x))
    for number in (1.0, 2.0, 3.0):
        x = torch.full((3,), number, device=gpu.device)
        found = step(x)
        for other in (4.0, 5.0):
            step(torch.full_like(x, other))
        assert all(map(torch.equal, found, (x, x[1:], 2.0 * x)))
    assert n_replays(made)


def test_numbers_of_the_host_are_those_of_the_capture(made, gpu):
    """Also of a stand-in: a replay runs no Python code."""
    factors, x = [2.0], torch.ones(3, dtype=torch.float64, device=gpu.device)
    step = record(lambda x: x * factors[0])
    for number in (1.0, 2.0, 3.0):
        step(number * x)
    factors[0] = 5.0
    torch.testing.assert_close(step(4.0 * x), 8.0 * x)
    assert n_replays(made)


def test_shapes_that_change_in_place_are_those_of_the_capture(made, gpu):
    def step(x):
        y = 2.0 * x
        y.add_(x)
        before = y.sum(1)
        y.t_()
        return (y @ x) * before.unsqueeze_(1)[:2]

    again = record(step)
    for seed in range(5):
        x = random_like([torch.empty(3, 2, dtype=torch.float64)], seed)[0].to(gpu.device)
        torch.testing.assert_close(again(x), step(x))
    assert n_replays(made)


def step_of(calls, near, weights):
    """Energies and forces of a pair potential and a small network; the derivative is taken inside."""

    def step(positions):
        x = positions.detach().requires_grad_()
        energies = calls.potential(x, **calls.fixed, **near) + (x @ weights).sin()
        (gradient,) = torch.autograd.grad(energies.sum(), x)
        return {"energies": energies.detach(), "forces": -gradient, "name": "both"}

    return step


def test_a_step_is_one_graph(made, calls, gpu):
    """For any positions, and for weights as they are at that time, whether they are named or not."""
    weights, near = torch.ones(3, dtype=torch.float64, device=gpu.device), pointers(gpu.device)
    for changing in ((), (weights,)):
        step = step_of(calls, near, weights)
        recorded = record(step, changing=changing)
        before = len(made)
        for count in range(5):
            weights.mul_(1.1)
            x = calls.positions()
            found = recorded(x)
            with plans.off():
                expected = step(x)
            close([found["energies"], found["forces"]], [expected["energies"], expected["forces"]], 1e-12)
            assert found["name"] == "both" and recorded._counts["recorded"] == 1
            assert made[-1].n_replays == count
        assert len(made) == before + 1


class OnlyBackward(torch.autograd.Function):
    """The identity, whose derivative is a tensor that nothing else uses."""

    weights: torch.Tensor

    @staticmethod
    def forward(ctx, x):
        may_be_followed = current_recorder() is None or not torch._C._is_multithreading_enabled()
        assert may_be_followed, "the backward pass may run in another thread"
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * OnlyBackward.weights


def test_tensors_that_only_a_backward_pass_uses(made, gpu, monkeypatch):
    """Autograd has a thread for the passes of a GPU; they are followed as well."""
    weights = torch.ones(3, dtype=torch.float64, device=gpu.device)
    monkeypatch.setattr(OnlyBackward, "weights", weights, raising=False)

    def slope(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(OnlyBackward.apply(x * x).sum(), x)[0]

    recorded = record(slope)
    for count in range(1, 6):
        if count == 4:  # other memory
            weights.data = weights.clone()
        weights.mul_(1.1)
        x = count * torch.ones(3, dtype=torch.float64, device=gpu.device)
        torch.testing.assert_close(recorded(x), 2.0 * x * weights)
    assert recorded._counts["recorded"] == 2 and n_replays(made)


def test_steps_in_a_graph_of_the_caller_are_part_of_it(made, gpu):
    """A graph of their own would end the capture."""
    x, step = torch.ones(3, device=gpu.device), record(lambda x: x.sin())
    if gpu.is_real:
        graph, found = captured(lambda: step(x))
        graph.replay()
    else:
        with StandInGraph.loads.capturing():
            found = step(x)
    assert torch.equal(found, x.sin()) and "it is part of a graph" in step.explain()
    assert len(made) == gpu.is_real  # before the capture


def test_steps_beside_a_default_device(made, gpu):
    """A graph has the tensors that are made there; and what cannot be captured is called."""
    step, outside = record(lambda x: torch.ones(3) + x.sin()), torch.zeros(3, device=gpu.device)
    refused = record(lambda x: (outside.add_(1.0), x + outside)[1])
    with gpu.device:
        for number in range(5):
            x = torch.full((3,), float(number))
            assert torch.equal(step(x), x.sin() + 1.0) and torch.equal(refused(x), x + number + 1.0)
        large = record(of_much_memory)
        assert torch.equal(large(x), 2.0 * x) and "not enough memory" in large.explain()
    assert len(made) == 1 and n_replays(made) == 3


def of_much_memory(x):
    """Twice the argument, if no recorder keeps all that is made."""
    if current_recorder() is not None:
        raise torch.OutOfMemoryError("none left")
    return 2.0 * x


def test_steps_that_cannot_be_captured(made, calls, gpu, monkeypatch):
    """What reads values is refused by name; a capture that fails leaves the results."""
    near, x = pointers(gpu.device), calls.positions()
    with pytest.raises(RecordingError, match="reads values"):
        record(lambda x: x * float(x.sum()))(x)
    weights = torch.ones(3, dtype=torch.float64, device=gpu.device)
    with pytest.raises(RecordingError, match="reads values"):
        record(lambda x: x * float(weights.sum()))(x)
    large = record(of_much_memory)
    for _ in range(2):
        assert torch.equal(large(x), 2.0 * x) and "since there is not enough memory" in large.explain()
    assert large._counts["ordinary"] == 2
    weights.requires_grad_()
    total = torch.zeros_like(weights)

    def adds(x):
        total.add_(1.0)
        raise torch.OutOfMemoryError("none left")

    def adds_gradients(x):
        (x @ weights).sum().backward()
        raise torch.OutOfMemoryError("none left")

    for function in (adds, adds_gradients):
        with pytest.raises(torch.OutOfMemoryError):
            record(function)(x)
    close([total, weights.grad], [torch.ones_like(total), x.sum(0)], 1e-12)  # not called again

    def trained(x):
        weights.grad = None
        (x @ weights).sum().backward()
        return 2.0 * x

    with pytest.raises(RecordingError, match="a backward pass writes gradients"):
        record(trained)(x)
    weights.requires_grad_(False)
    step = record(step_of(calls, near, weights))

    def fails(graph, function, memory, may_repeat):
        graph.reason = "it failed"

    for kind in (CountedGraph, StandInGraph):
        monkeypatch.setattr(kind, "captured", fails)
    expected = step_of(calls, near, weights)(x)
    for reason in ("it failed", "ordinary, since it failed"):
        found = step(x)
        close([found["energies"], found["forces"]], [expected["energies"], expected["forces"]], 1e-12)
        assert reason in step.explain()


@torch.library.custom_op("tests::not_in_a_capture", mutates_args=())
def not_in_a_capture(x: torch.Tensor) -> torch.Tensor:
    """Twice the argument."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("not permitted")
    return 2.0 * x


def test_errors_of_a_capture_are_told(made, gpu, monkeypatch):
    """They are no errors for some values: such calls are not captured again."""
    captured = StandInGraph.captured

    def fails(graph, function, memory, may_repeat=False):
        with pytest.raises(RuntimeError, match="not permitted"):
            captured(graph, function, memory)
        graph.reason = "its capture has failed: RuntimeError: not permitted"

    monkeypatch.setattr(StandInGraph, "captured", fails)  # as a graph on a GPU does
    step, x = record(not_in_a_capture), torch.ones(3, device=gpu.device)
    for _ in range(2):
        assert torch.equal(step(x), 2.0 * x)
        assert step.explain().startswith("last call: ordinary, since its capture has failed: RuntimeError: not permit")
    assert len(made) == 1
