"""Plans of repeated calls in tests: none from other tests, calls without them, and which there are."""

import contextlib

import torch

from nvalchemiops import launch as core
from nvalchemiops.layout import CPU, replaced_layout
from nvalchemiops.torch.runtime import engine, graphs, tables
from tests.lanes.fibers import gpu_layout
from tests.support.loads import Loads, forget_kept


def forget(*owners):
    """Nothing is kept from earlier calls, those of these modules or potentials included."""
    for owner in owners:
        vars(owner).pop(tables.OWN, None)
    tables.everywhere.clear()
    tables.everywhere.recorded = tables.everywhere.replayed = 0


def ordinary(call):
    """The results of ``call()`` without a plan."""
    with engine.off():
        return call()


def plans_of_calls(owner=None, *, of_derivatives=False):
    """Plans of calls beside searches, or of backward passes; those of a module, a potential or a calculator."""
    table = tables.everywhere if owner is None else vars(owner)[tables.OWN]
    entries = [(*key[:2], entry.plan) for key, entry in table.entries.items() if entry.plan is not None]
    return [plan for (name, *_), levels, plan in entries if name != "search" and bool(levels) == of_derivatives]


def plan_of(*, count=1):
    """The plan of the last call, if there are so many."""
    found = plans_of_calls()
    assert len(found) == count, engine.explain()
    return found[-1] if found else None


class CountedGraph(graphs.Graph):
    """A graph that counts its replays."""

    n_replays = 0

    def replay(self):
        super().replay()
        self.n_replays += 1


class StandInGraph:
    """In the place of a CUDA graph: a replay calls the function once more, with the same memory.

    While a graph is captured no kernel may be launched for the first time.
    """

    n_bytes, reason, loads = 0, "", Loads()

    def __init__(self, device):
        self.device, self.n_replays = device, 0

    def captured(self, function, memory):
        self.call, self.grad = lambda: function(memory), torch.is_grad_enabled()
        with self.loads.capturing():
            self.results = self.call()
        return self.results

    def replay(self):
        self.n_replays += 1
        with torch.set_grad_enabled(self.grad):
            values = self.call()
        with torch.no_grad():
            for result, value in zip(self.results, values):
                result.copy_(value)


def _note_loads(monkeypatch):
    """No kernels are loaded yet, and the library knows when a `StandInGraph` is captured."""
    loads = Loads()

    def noted(launch):
        def launch_noted(kernel, *arguments, **options):
            loads.note(kernel)
            launch(kernel, *arguments, **options)

        return launch_noted

    is_initialized = torch.cuda.is_initialized
    monkeypatch.setattr(StandInGraph, "loads", loads)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: loads.captures or is_initialized())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: loads.captures)
    for name in ("launch", "launch_adjoint"):
        monkeypatch.setattr(core, name, noted(getattr(core, name)))
    forget_kept(monkeypatch)


@contextlib.contextmanager
def counted_graphs(monkeypatch, on_gpu=None):
    """Inside, calls that repeat are captured; the graphs, which count their replays.

    Without a GPU (``on_gpu`` is a `tests.support.gpu.OnGpu`), a CPU is taken for one: values are not read, and with
    ``on_gpu`` its branches of kernels run.
    """
    made = []
    kind = CountedGraph if on_gpu is not None and on_gpu.is_real else StandInGraph

    def graph(device):
        made.append(kind(device))
        return made[-1]

    # undone at the end of the test, after what the test itself replaces in the same places
    monkeypatch.setattr(graphs, "Graph", graph)
    with contextlib.ExitStack() as stack:
        if kind is StandInGraph:
            _note_loads(monkeypatch)
            monkeypatch.setattr(graphs, "obstacle", lambda device: "")
            stack.enter_context(replaced_layout("cpu", CPU._replace(reads=False)) if on_gpu is None else gpu_layout())
        yield made


def n_replays(made):
    """How often these graphs were replayed."""
    return sum(graph.n_replays for graph in made)
