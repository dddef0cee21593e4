"""Two parts of a call at the same time on a GPU: what waits for what."""

import tempfile
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from nvalchemiops.torch.distributed import Domain
from nvalchemiops.torch.distributed.communication import begin_maximum
from nvalchemiops.torch.interactions.electrostatics import particle_mesh_ewald
from nvalchemiops.torch.runtime import streams
from nvalchemiops.torch.runtime.recorder import Recorder, recording
from tests.support.on_device import on_gpu


class Stream:
    """A stream that notes what is done on it."""

    current: "Stream"

    def __init__(self, name, notes):
        self.name, self.notes = name, notes

    def record_event(self):
        self.notes.append(f"{self.name} has begun")
        return f"event of {self.name}"

    def wait_event(self, event):
        self.notes.append(f"{self.name} waits for {event}")

    def wait_stream(self, other):
        self.notes.append(f"{self.name} waits for {other.name}")

    def __enter__(self):
        self.before, Stream.current = Stream.current, self

    def __exit__(self, *_):
        Stream.current = self.before


class Result:
    def __init__(self, notes):
        self.notes = notes

    def record_stream(self, stream):
        self.notes.append(f"kept for {stream.name}")


def test_the_second_part_waits_for_what_was_before_the_first(monkeypatch):
    notes: list[str] = []
    main, side = Stream("main", notes), Stream("side", notes)
    monkeypatch.setattr(Stream, "current", main, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream.current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(streams, "_side", lambda device: side)
    result = Result(notes)

    def part(name, found):
        notes.append(f"{name} on {Stream.current.name}")
        return found

    parts = (lambda: part("pairs", 1), lambda: part("mesh", (result, None)))
    assert streams.beside(*parts, torch.device("cuda")) == (1, (result, None))
    assert notes == [
        "main has begun",
        "pairs on main",
        "side waits for event of main",
        "mesh on side",
        "main waits for side",
        "kept for main",
    ]
    notes.clear()
    assert streams.beside(*parts, torch.device("cpu")) == (1, (result, None))
    assert notes == ["pairs on main", "mesh on main"]
    # the backward pass of the second part may be the last to use what both are given
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _, stream: notes.append(f"given to {stream.name}"))
    given = (on_gpu(torch.ones(1)), (on_gpu(torch.ones(1)), None, 2.0), torch.ones(1))
    recorded = recording(Recorder((), (), (), 0, (), makes_steps=False))
    for with_graph, within, expected in ((True, nullcontext(), 2), (False, nullcontext(), 0), (True, recorded, 0)):
        notes.clear()
        with torch.set_grad_enabled(with_graph), within:
            streams.beside(*parts, torch.device("cuda"), given)
        assert notes.count("given to side") == expected


def test_what_is_read_later_is_there_on_the_device_of_the_message(monkeypatch):
    """Which need not be the current one: an event of another device would tell nothing of it."""
    recorded = []

    class Event:
        def record(self, stream=None):
            recorded.append(stream)

        def query(self):
            return True

    second = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: device)
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: SimpleNamespace(wait=lambda: None))
    tensor = SimpleNamespace(device=second, to=lambda *_, **__: torch.tensor([7]))
    assert begin_maximum(tensor, Stream("in the place of a group", []))() == [7]
    assert recorded == [second]


@pytest.mark.gpu
def test_a_mesh_beside_pairs_on_a_gpu():
    """A group of one rank: results and gradients are those without a domain, in calls that follow each other."""
    generator = torch.Generator().manual_seed(1)
    x = 20.0 * torch.rand(500, 3, generator=generator, dtype=torch.float64)
    q, cell = torch.randn(500, generator=generator, dtype=torch.float64), 20.0 * torch.eye(3, dtype=torch.float64)
    x, q, cell = (t.cuda().requires_grad_() for t in (x, q, cell))
    options = {"cutoff": 6.0, "mesh_dimensions": (32, 32, 32), "compute_forces": True}

    def results(x, q, cell, **where):
        found = particle_mesh_ewald(x, q, cell, 0.5, **options, **where)
        return found, found[0].sin().sum() + found[1].square().sum()

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        try:
            domain = Domain(x, cell, cutoff=6.0)
            for _ in range(3):
                found, loss = results(domain.distribute(x), domain.distribute(q), cell, domain=domain)
                gradients = torch.autograd.grad(domain.sum(loss), (x, q, cell))
                expected, loss = results(x, q, cell)
                for ours, theirs in zip(found, expected):
                    torch.testing.assert_close(domain.gather(ours), theirs, rtol=0.0, atol=1e-10)
                for ours, theirs in zip(gradients, torch.autograd.grad(loss, (x, q, cell))):
                    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
                with torch.no_grad():
                    q.mul_(1.1)
        finally:
            dist.destroy_process_group()
