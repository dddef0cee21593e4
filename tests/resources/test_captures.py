"""Captures of graphs, without a GPU: what happens around them, and what is left where they fail."""

import contextlib
import functools
import gc
import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from nvalchemiops.torch.runtime import _torch_internals, graphs

SECOND = torch.device("cuda", 1)


class Capture:
    """In the place of a graph of torch."""

    is_open, ends = False, True

    def capture_begin(self, **_):
        self.is_open = True

    def capture_end(self):
        self.is_open = False
        if not self.ends:
            raise RuntimeError("the driver has ended it")

    def reset(self):
        pass


@pytest.fixture
def capture(monkeypatch):
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "its pool")
    return Capture()


def test_garbage_waits_for_the_end_of_a_capture(capture):
    """What it frees may need a call of the driver that ends the capture with an error."""
    seen = []

    class Circle:
        def __init__(self):
            self.itself = self

    thresholds = gc.get_threshold()

    def function(memory):
        weakref.finalize(Circle(), lambda: seen.append(capture.is_open))
        return [[number] for number in range(1000)][:1]

    gc.set_threshold(10)
    try:
        for _ in range(3):
            graphs._capture(capture, function, (), SECOND)
        assert gc.isenabled()
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert seen == [False] * 3


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_memory_is_that_of_all_again_after_a_capture(ends, fails, capture, monkeypatch):
    """Torch forgets it where the driver has ended a capture: then no memory that it keeps would be freed for others."""
    underway = [(1, "its pool")]

    def end(*place):
        if ends:
            raise RuntimeError("it has ended")
        underway.remove(place)

    released = []
    monkeypatch.setattr(_torch_internals, "_pools", (end, lambda *place: released.append(place)))
    capture.ends = ends

    def function(memory):
        if fails:
            raise ZeroDivisionError
        return ()

    expected = ZeroDivisionError if fails else RuntimeError
    with contextlib.nullcontext() if ends and not fails else pytest.raises(expected):
        graphs._capture(capture, function, (), SECOND)
    assert not capture.is_open
    assert released == ([] if ends else [(1, "its pool")])


@pytest.mark.parametrize("begins", [True, False])
def test_a_pool_is_left_once(begins, monkeypatch):
    """Since torch 2.14 a graph does so when it is deleted, too. There an error would end the process."""
    counts = {"its pool": 0}

    def end(_, pool):
        if pool not in counts:
            raise RuntimeError("it has ended")
        counts[pool] -= 1

    class Newer(Capture):
        in_pool = False

        def capture_begin(self, **_):
            counts["its pool"], self.in_pool = 1, True
            if not begins:
                raise RuntimeError("the driver cannot begin")

        def reset(self):
            if self.in_pool:
                end(1, "its pool")
                del counts["its pool"]
                self.in_pool = False

    def fails(memory):
        raise ZeroDivisionError

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "its pool")
    monkeypatch.setattr(_torch_internals, "_pools", (end, lambda _, pool: counts.pop(pool)))
    graph = Newer()
    with pytest.raises(ZeroDivisionError if begins else RuntimeError):
        graphs._capture(graph, fails, (), SECOND)
    assert not counts
    graph.reset()  # as when it is deleted


class Cuda:
    """In the place of the streams of a GPU, on which another thread is capturing a graph."""

    def __init__(self, monkeypatch):
        self.made, self.used = 0, []
        of_torch = functools.partial(self.stream)
        of_torch.priority_range = lambda: (0, -2)
        self.current = SimpleNamespace(cuda_stream=0, wait_stream=id, synchronize=lambda: None)
        for name, value in {
            "current_stream": lambda device=None: self.current,
            "Stream": of_torch,
            "stream": lambda stream: contextlib.nullcontext(self.used.append(stream.cuda_stream)),
            "device": lambda device: contextlib.nullcontext(),
            "memory_reserved": lambda device: 0,
            "graph_pool_handle": lambda: "a pool",
            "CUDAGraph": Capture,
            "synchronize": mock.Mock(side_effect=RuntimeError("a thread captures on this device")),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(graphs, "place_of", lambda device: (device, self.current.cuda_stream))
        monkeypatch.setattr(graphs, "_captured_on", weakref.WeakValueDictionary())
        monkeypatch.setattr(graphs, "_failed", {})
        monkeypatch.setattr(_torch_internals, "_pools", None)
        monkeypatch.setattr(torch, "zeros", lambda *_, **__: 0)

    def stream(self, priority=0):
        """Two of each priority, in turn, but of the last two the same ones."""
        self.made += 1
        return SimpleNamespace(wait_stream=id, cuda_stream=10 * min(-priority, 2) + self.made % 2)


def captured_graph():
    graph = graphs.Graph(SECOND)
    assert (graph.captured(lambda memory: memory, ()) == ()) == (graph.reason == "")
    return graph


def streams():
    return {graph: handle for (_, handle), graph in graphs._captured_on.items()}


def test_graphs_do_not_share_the_stream_of_their_capture(monkeypatch):
    """With one of them torch deletes the memory of the stream for matrix products, which others would still use."""
    Cuda(monkeypatch)
    monkeypatch.setattr(graphs, "_MOST_STREAMS", 2)
    first, second, *others = (captured_graph() for _ in range(3))
    assert not graphs.are_all_used(SECOND)
    others.append(captured_graph())
    assert set(streams().values()) == {10, 11, 20, 21}  # those of priority 0 are what others take
    assert graphs.are_all_used(SECOND) and not graphs.are_all_used(torch.device("cuda", 0))
    assert captured_graph().reason == graphs.NO_STREAM
    free = streams()[second]
    del second
    last = captured_graph()
    assert streams()[last] == free and set(streams()) == {first, last, *others}


def test_what_is_tried_after_a_failure_has_a_stream_of_its_own(monkeypatch):
    """With the trial, too, torch deletes the memory of its stream."""
    cuda = Cuda(monkeypatch)
    kept = [captured_graph() for _ in range(3)]
    failed = graphs.Graph(SECOND)
    assert failed.captured(fails, ()) is None
    assert len(cuda.used) == 5 and set(cuda.used[3:]).isdisjoint(streams()[graph] for graph in kept)


def fails(memory):
    raise torch.OutOfMemoryError("none left")


def test_a_failure_beside_the_capture_of_another_thread_is_no_lasting_one(monkeypatch):
    """The device as a whole cannot be waited for then."""
    Cuda(monkeypatch)
    graph = graphs.Graph(SECOND)
    assert graph.captured(fails, ()) is None and "none left" in graph.reason
    assert not graphs._failed


@pytest.mark.parametrize("freed", [True, False])
def test_memory_that_torch_keeps_is_freed_once_for_a_capture(freed, monkeypatch):
    """While it captures, torch does not do so. What acts on other ranks is not called again."""
    Cuda(monkeypatch)
    calls, emptied, alive = [], [], []

    class Large:
        """A tensor of the call."""

    def function(memory):
        large = Large()
        alive.append(weakref.ref(large))
        calls.append(len(emptied))
        if not (freed and emptied):
            fails(memory)
        return memory

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(alive[-1]() is None))
    graph = graphs.Graph(SECOND)
    assert graph.captured(function, ()) is None and "none left" in graph.reason and not emptied
    graph = graphs.Graph(SECOND)
    assert (graph.captured(function, (), may_repeat=True) == ()) == freed == (not graph.reason)
    assert calls == [0, 0, 1] and emptied == [True]


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError, torch.AcceleratorError("CUDA error: out of memory"), RuntimeError]
)
def test_a_lack_of_memory_does_not_last(error, monkeypatch):
    """Torch frees nothing for a capture. Any other failure of an addition means that captures do not work."""
    Cuda(monkeypatch)
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))

    class Fails(Capture):
        def capture_begin(self, **_):
            raise error

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Fails)
    assert graphs.Graph(SECOND).captured(fails, (), may_repeat=True) is None
    assert bool(graphs._failed) == (error is RuntimeError) == (not emptied)


@pytest.mark.gpu
def test_memory_is_freed_for_others_after_a_capture_that_failed(monkeypatch):
    """For a block that is larger than one that torch has kept."""
    monkeypatch.setattr(graphs, "_failed", {})
    device = torch.device("cuda", torch.cuda.current_device())
    number, graph = torch.ones(3, device=device), graphs.Graph(device)
    assert graph.captured(lambda memory: (memory[0].cpu(),), (number,)) is None and "captur" in graph.reason
    assert graphs.Graph(device).captured(lambda memory: (memory[0] + 1.0,), (number,)) is not None
    assert not graphs._failed
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    for part in (0.6, 0.7):
        torch.empty(int(part * free), dtype=torch.uint8, device=device)
    torch.cuda.empty_cache()


@pytest.mark.gpu
def test_a_capture_has_the_memory_that_torch_keeps_for_others():
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    torch.empty(int(0.8 * free), dtype=torch.uint8, device=device)  # kept by torch
    number, graph = torch.ones(3, device=device), graphs.Graph(device)

    def function(memory):
        return (torch.zeros(int(0.4 * free), dtype=torch.uint8, device=device)[:3] + memory[0],)

    (found,) = graph.captured(function, (number,), may_repeat=True) or pytest.fail(graph.reason)
    graph.replay()
    assert torch.equal(found, number)


@pytest.mark.gpu
def test_a_graph_outlives_others_with_matrix_products():
    """Torch frees the memory of a stream for such products with the first graph of the stream that is deleted."""
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.randn(512, 512, device=device)
    torch.mm(x, x)  # loads the kernels
    made = [graphs.Graph(device) for _ in range(2)]
    found = [graph.captured(lambda memory: (memory[0] @ memory[0],), (x,))[0] for graph in made]
    del made[0], found[0]
    torch.cuda.empty_cache()
    x.mul_(0.5)
    made[0].replay()
    torch.testing.assert_close(found[0], x @ x)
