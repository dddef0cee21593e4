"""What `record` refuses by name, or notices when values change; and what kernels and ops may do in a recorded step."""

import collections
import contextlib
import re
import threading
import types

import numpy as np
import pytest
import torch
import warp as wp

from nvalchemiops.layout import GPU, replaced_layout
from nvalchemiops.notices import NvalchemiopsWarning
from nvalchemiops.torch import RecordingError, record
from nvalchemiops.torch.autograd import OutputSpec, warp_custom_op
from nvalchemiops.torch.interactions.pair import lennard_jones
from nvalchemiops.torch.launch import launch
from nvalchemiops.torch.runtime import _torch_internals as internals
from nvalchemiops.torch.runtime.plans import follow, why_not
from nvalchemiops.torch.runtime.recorded import _Fixed
from nvalchemiops.torch.runtime.recorder import current_recorder
from tests.support.ops import weighted_square

OUTSIDE = torch.zeros(3)
WEIGHT = torch.ones(3, requires_grad=True)
OTHER = torch.ones(3, requires_grad=True)
ALIAS = OTHER.detach()


@wp.kernel(module="unique")
def doubled(x: wp.array(dtype=wp.float32), y: wp.array(dtype=wp.float32)):
    i = wp.tid()
    y[i] = wp.float32(2.0) * x[i]


def launched_by_warp(x):
    wp.init()  # if no kernel has been loaded before
    y = torch.empty(3)
    wp.launch(doubled, 3, inputs=[wp.from_torch(x)], outputs=[wp.from_torch(y)], device="cpu")
    return y


def test_constants_that_a_kernel_writes_over_what_is_there():
    """Over values that differ in each call, and over constants that a step has read. What it reads is written, too."""

    def step(x):
        threes, values, zeros = torch.full((3,), 3.0), 2.0 * x, torch.zeros(3)
        before = x + zeros
        launch(doubled, 3, [threes], [values])
        launch(doubled, 3, [threes], [zeros])
        threes.zero_()
        return before, values, zeros

    again = record(step)
    for k in range(4):
        x = torch.ones(3) + k
        assert all(map(torch.equal, again(x), step(x)))


def test_tensors_of_a_gpu_where_all_arguments_are_on_a_cpu():
    """Their values are compared, since there is no graph that would use the present ones; no kernel is a step.

    What cannot be done again is refused where a graph would be captured, too.
    """
    weights = torch.ones(3)
    with replaced_layout("cpu", GPU):
        fixed = [_Fixed(weights, in_graph) for in_graph in (False, True)]
        weights.add_(1.0)
        assert [each.is_same() for each in fixed] == [False, True]

    def step(memory):
        result = torch.zeros(3)
        with replaced_layout("cpu", GPU):
            current_recorder().launch(doubled, 3, memory, [result], [b""] * 2, None, 0, None)
        return [result]

    assert "runs on a GPU, where no argument is" in follow(step, [torch.ones(3)]).reason
    with replaced_layout("cpu", GPU):
        assert "nonzero" in why_not(lambda memory: [memory[0].nonzero()], [torch.ones(3)], ())


REFUSED = {
    "reads values": lambda x: x * float(x.sum()),
    "_local_scalar_dense": lambda x: x if bool(x.sum() > 0) else -x,
    "`numpy`": lambda x: torch.from_numpy(np.sin(x.numpy())),
    "`tolist`": lambda x: torch.tensor(x.tolist()),
    "`tensor`": lambda x: torch.tensor([x[0], 1.0, 2.0]),
    "`as_tensor`": lambda x: 2.0 * torch.as_tensor(((x[0], 1.0), (0.0, 1.0))),
    "`new_tensor`": lambda x: x.new_tensor([1.0, x[0] * 2.0]) + 1.0,
    "`tensor` gives": lambda x: torch.tensor(collections.deque([x[0], 1.0])),
    "`asarray`": lambda x: torch.asarray(obj=[x[0], 1.0]),
    "`new`": lambda x: x.new([x[0], 1.0]),
    "`__float__`": lambda x: torch.Tensor([x[0], 1.0]),
    "`__index__`": lambda x: torch.LongTensor([x[0].long(), 1]),
    "`apply_`": lambda x: x.sin().apply_(abs),
    "`map_`": lambda x: torch.ones(3).map_(x, max),
    "shapes depend on values": lambda x: x[x > 0.5],
    "nonzero": lambda x: x.nonzero(),
    "rand.default draws random numbers": lambda x: x + torch.rand(3),
    "normal_.default draws random numbers": lambda x: x + torch.empty(3).normal_(),
    "rand.generator draws random numbers": lambda x: x + torch.rand(3, generator=torch.Generator()),
    "layout": lambda x: (x[:, None] * x).to_sparse().to_dense(),
    "`.grad`": lambda x: (x * WEIGHT).sum().backward(),
    "a backward pass writes gradients": lambda x: (x * ALIAS * OTHER).sum().backward(),
    "writes into a tensor that existed": lambda x: x.mul_(2.0),
    "existed before the call": lambda x: OUTSIDE.add_(x),
    "running statistics": lambda x: torch.batch_norm(
        x.expand(2, 3), None, None, OUTSIDE, OUTSIDE, True, 0.1, 1e-5, False
    ),
    "a result existed": lambda x: OUTSIDE,
    "`data_ptr`": launched_by_warp,
    "a SimpleNamespace with tensors": lambda x: types.SimpleNamespace(found=[x.sin()]),
    "a set with tensors": lambda x: (1.0, {x.sin()}),
    "moves a tensor": lambda x: (2.0 * x).resize_(30) + 1.0,
    "has written": lambda x: torch.empty(3) * 2.0 + x,
    "add_.Tensor reads memory": lambda x: (2.0 * x).add_(torch.empty(3)),
    "weighted_square.default cannot be replayed": lambda x: weighted_square(x.double(), x.double()),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_done_again_is_refused_by_name(reason):
    calls = []
    again = record(lambda x: (calls.append(None), REFUSED[reason](x))[1])
    with pytest.raises(RecordingError, match=reason):
        again(torch.rand(3))
    assert len(calls) == 1
    OUTSIDE.zero_()
    WEIGHT.grad = OTHER.grad = None  # adding to a gradient that is there is refused for another reason


@pytest.mark.parametrize("text", [str, repr, "{}".format])
def test_texts_of_tensors_are_made_with_a_warning(text):
    step = record(lambda x: (text(2.0 * x), 3.0 * x)[1])
    with pytest.warns(NvalchemiopsWarning, match="makes text of a tensor"):
        step(torch.rand(3))
    for _ in range(3):
        x = torch.rand(3)
        assert torch.equal(step(x), 3.0 * x)
    assert "last call: replayed" in step.explain()


@pytest.mark.parametrize("reason", ["reads values", "`numpy`", "layout", "weighted_square.default cannot be replayed"])
def test_what_is_refused_is_found_by_its_line(reason):
    """Of the caller, below functions of torch, of the library and of ops."""
    line = REFUSED[reason].__code__.co_firstlineno
    step = record(lambda x: REFUSED[reason](x))
    with pytest.raises(RecordingError, match=re.escape(f"({__file__}:{line})")):
        step(torch.rand(3))
    assert f":{line})" in step.explain()


@torch.library.custom_op("tests::noise_of_another", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def noise_of_another(x: torch.Tensor) -> torch.Tensor:
    """In the place of an operation on a GPU, whose numbers are not those of a CPU."""
    return x + torch.rand(x.shape, generator=torch.cuda.default_generators[-1])


def test_random_numbers_of_a_gpu_are_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "default_generators", (torch.Generator(), torch.Generator()))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    step, x = record(noise_of_another), torch.ones(3)
    step(x)  # as in a forked process, where a GPU cannot be asked
    step.clear()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(internals, "learn_plain_keys", lambda: None)
    with pytest.raises(RecordingError, match=r"noise_of_another.default draws random numbers"):
        step(x)


@warp_custom_op("tests::doubled_by_warp", [OutputSpec("y", wp.float32, lambda x: x.shape)], backward="none")
def doubled_by_warp(x: torch.Tensor) -> torch.Tensor:
    return launched_by_warp(x)


def test_an_op_is_followed_as_a_whole():
    """Whatever its body does, as long as it is the same in each call."""
    again = record(lambda x: doubled_by_warp(x.sin()) + x)
    for k in range(3):
        x = torch.ones(3) + k
        assert torch.equal(again(x), 2.0 * x.sin() + x)
    assert "1 replayed" in again.explain()


def test_results_with_a_graph_are_refused():
    weight = torch.ones(3, requires_grad=True)
    with pytest.raises(RecordingError, match="with a graph"):
        record(lambda x: x * weight)(torch.rand(3))


def of_factors(x):
    try:
        return torch.linalg.cholesky(x).sum()
    except torch.linalg.LinAlgError:
        return -x.sum()


def of_rows(x):
    total = torch.zeros_like(x)
    with contextlib.suppress(IndexError, RuntimeError):
        total.index_add_(0, x[0].long(), x)
    return total + x


@torch.library.custom_op("tests::positive_trace", mutates_args=())
def positive_trace(x: torch.Tensor) -> torch.Tensor:
    if x.trace() < 0.0:
        raise ValueError("the trace is negative")
    return x.trace()


def of_ones_own(x):
    with contextlib.suppress(ValueError):
        return positive_trace(x)
    return -x.sum()


@pytest.mark.parametrize("step", [of_factors, of_rows, of_ones_own])
def test_what_follows_an_error_is_no_step(step):
    """For other values there may be none."""
    again = record(step)
    for factor in (-1.0, -2.0, 1.0, 2.0, 3.0, -3.0):
        x = factor * torch.eye(2)
        assert torch.equal(again(x), step(x))
    with pytest.raises(RecordingError, match="with a graph"):
        record(lambda x: step(x) + x)((-torch.eye(2)).requires_grad_())


def test_an_error_of_a_signal_handler_in_a_replay_is_raised():
    """It is none of the function, which could catch it."""

    late = [RuntimeError("it is late")]

    def handler():
        if late:
            raise late.pop()

    again, x = record(torch.sin), torch.ones(3)
    for k in range(2):
        again(x + k)
    (kind,) = again._kinds.values()
    kind.recording.plan.steps.append(handler)  # in the place of one that comes between two steps
    with pytest.raises(RuntimeError, match="it is late"):
        again(x)


def test_what_follows_an_error_of_a_list_is_no_step():
    potential = lennard_jones(3.0)

    def step(x, pairs):
        with contextlib.suppress(ValueError):
            return potential(x, neighbor_list=pairs, sigma=1.0, epsilon=1.0)
        return -x

    again = record(step)
    for k, last in enumerate((7, 7, 0, 0, 7)):
        x = torch.eye(2, 3) + 0.1 * k
        pairs = torch.tensor([[0, 1], [1, last]], dtype=torch.int32)
        assert torch.equal(again(x, pairs), step(x, pairs))


def test_what_follows_an_error_of_a_cell_is_no_step():
    potential = lennard_jones(3.0)
    pairs, shifts = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int32)

    def step(x, cell):
        with contextlib.suppress(ValueError):
            return potential(x, cell, neighbor_list=pairs, neighbor_shifts=shifts, sigma=1.0, epsilon=1.0)
        return -x

    again, singular = record(step), torch.ones(3, 3)
    for k, cell in enumerate((singular, 9.0 * torch.eye(3), 8.0 * torch.eye(3), singular, 9.0 * torch.eye(3))):
        x = torch.eye(2, 3) + 0.1 * k
        assert torch.equal(again(x, cell), step(x, cell))


def test_open_axes_in_an_argument_are_no_error():
    """A plan is for cells that are periodic along all axes: these calls are ordinary ones, and that is said."""
    given = {"cell": 9.0 * torch.eye(3), "sigma": 1.0, "epsilon": 1.0}
    given["neighbor_list"] = torch.tensor([[0, 1], [1, 0]])
    given["neighbor_shifts"] = torch.zeros(2, 3, dtype=torch.int32)
    potential = lennard_jones(5.0)
    again = record(lambda x, pbc: potential(x, pbc=pbc, **given))
    x, slab = torch.eye(2, 3), torch.tensor([True, True, False])
    assert torch.equal(again(x, slab), potential(x, pbc=slab, **given))
    assert "goes another way for these values" in again.explain()


def test_calls_that_often_end_a_recording_are_not_recorded_each_time():
    again, found = record(of_factors), []
    for factor in (*[-1.0] * 8, *[1.0] * 9):
        x = factor * torch.eye(2)
        assert torch.equal(again(x), of_factors(x))
        found.append(again.explain())
    attempts = [number for number, text in enumerate(found) if "since for now" in text]
    assert attempts == [0, 1, 3, 7]
    assert "recorded again only later" in found[14]
    assert "last call: recorded" in found[15]


def test_an_error_of_shapes_comes_for_all_values():
    def step(x):
        try:
            return x.T.view(-1)
        except RuntimeError:
            return x.T.reshape(-1) + 1.0

    again = record(step)
    for k in range(3):
        x = torch.arange(6.0).reshape(2, 3) + k
        assert torch.equal(again(x), step(x))
    assert "last call: replayed" in again.explain()


def in_another_thread(x):
    found = []
    worker = threading.Thread(target=lambda: found.append(x.sin()))
    worker.start()
    worker.join()
    return found[0] + x


def by_a_counter(x):
    by_a_counter.calls += 1
    return by_a_counter.calls * x


by_a_counter.calls = 0


def as_long_as_a_counter(x):
    by_a_counter.calls += 1
    return x.sum() * torch.ones(by_a_counter.calls)


@pytest.mark.parametrize("step", [in_another_thread, by_a_counter, as_long_as_a_counter])
def test_what_is_not_followed_is_noticed_when_values_change(step):
    again, x = record(step), torch.rand(4)
    again(x), again(x)
    with pytest.raises(RecordingError, match="and its plan have different results"):
        again(2.0 * x)


def test_a_plan_is_compared_after_an_error_of_the_function():
    calls = []

    def step(x):
        calls.append(x)
        if len(calls) == 2:
            raise KeyError
        return len(calls) * x

    again = record(step)
    again(torch.ones(2))
    with pytest.raises(KeyError):
        again(torch.full((2,), 2.0))
    with pytest.raises(RecordingError, match="and its plan have different results"):
        again(torch.full((2,), 3.0))


def test_a_plan_is_compared_after_values_that_it_leaves_to_the_function():
    calls = []

    def step(x):
        calls.append(x)
        with contextlib.suppress(torch.linalg.LinAlgError):
            return len(calls) * torch.linalg.inv(x)
        return x

    again = record(step)
    for factor in (1.0, 0.0):
        again(factor * torch.eye(2))
    with pytest.raises(RecordingError, match="and its plan have different results"):
        again(2.0 * torch.eye(2))


def test_a_function_without_tensors_in_its_results_is_left_to_raise():
    def check(x):
        torch.linalg.inv(x)

    again = record(check)
    for factor in (1.0, 2.0):
        again(factor * torch.eye(2))
    with pytest.raises(torch.linalg.LinAlgError):
        again(torch.zeros(2, 2))
    again(torch.eye(2))
    assert "last call: replayed. Calls: 1 recorded, 1 replayed" in again.explain()
