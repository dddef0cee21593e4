"""Plans of repeated calls in tests: none from other tests, calls without them, and which there are."""

import contextlib
import functools

import torch
from torch.utils._pytree import tree_map_only

from nvalchemiops import launch as core
from nvalchemiops.layout import CPU, replaced_layout
from nvalchemiops.torch.runtime import cache, engine, graphs, tables
from nvalchemiops.torch.runtime._torch_internals import followed_by, places_written
from nvalchemiops.torch.runtime.operations import tensors_in
from nvalchemiops.torch.runtime.storage import storage_of
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


def way_of(name):
    """Which way the last call of an operation went, as users are told."""
    (line,) = [line for line in engine.explain().splitlines() if line.startswith(f"{name}: ")]
    return line.removeprefix(f"{name}: ")


class CountedGraph(graphs.Graph):
    """A graph that counts its replays."""

    n_replays = 0

    def replay(self):
        super().replay()
        self.n_replays += 1


class _Work:
    """Operations and launches below autograd, in their order, with their memory: what a CUDA graph keeps."""

    def __init__(self):
        self.steps, self.made, self.is_inside = [], [], False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.is_inside:
            return func(*args, **kwargs)
        with self.inside():
            # other tensor objects, whose shapes nobody changes in place
            lasting = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
            result = func(*args, **kwargs)
        given = {storage_of(t) for t in tensors_in((args, tuple(kwargs.values())))}
        fresh = [t for t in tensors_in((result,)) if storage_of(t) not in given]
        with self.inside():
            fresh = [t.detach() for t in fresh]
        self.made += fresh
        if torch.Tag.inplace_view in func.tags:
            pass
        elif places_written(func):
            self.steps.append(functools.partial(func, *lasting[0], **lasting[1]))
        elif fresh and not func.overloadpacket.__name__.startswith(("empty", "new_empty")):
            self.steps.append(functools.partial(_rewrite, func, *lasting, fresh))
        return result

    @contextlib.contextmanager
    def inside(self):
        """Inside, operations are parts of one that is kept as a whole."""
        self.is_inside = True
        try:
            yield
        finally:
            self.is_inside = False

    def launched(self, launch, kernel, *rest):
        if not self.is_inside:
            *arguments, options = [list(value) if isinstance(value, list) else value for value in rest]
            self.steps.append(lambda: launch(kernel, *arguments, **options))


def _rewrite(func, args, kwargs, memory):
    with torch._C._AutoDispatchBelowAutograd():
        values = tensors_in((func(*args, **kwargs),))
        for into, value in zip(memory, values, strict=True):
            assert into.shape == value.shape, f"{func} had results of another shape when it was captured"
            into.copy_(value)


class StandInGraph:
    """In the place of a CUDA graph: a replay repeats the operations and launches of the capture, with the same memory.

    So numbers of the host are those of the capture. What is captured has not run: its memory holds anything until the
    first replay. While a graph is captured no kernel may be launched for the first time.
    """

    n_bytes, reason, loads = 0, "", Loads()
    current = None

    def __init__(self, device):
        self.device, self.n_replays, self.work = device, 0, _Work()

    def captured(self, function, memory, may_repeat=False):
        StandInGraph.current = self.work
        try:
            with self.loads.capturing(), followed_by(self.work):
                results = function(memory)
        finally:
            StandInGraph.current = None
        with torch.no_grad():
            for t in self.work.made:
                t.fill_(torch.nan if t.is_floating_point() or t.is_complex() else 7)
        return results

    def replay(self):
        self.n_replays += 1
        with torch.no_grad():
            for step in self.work.steps:
                step()


def _note_loads(monkeypatch):
    """No kernels are loaded yet, and the library knows when a `StandInGraph` is captured."""
    loads = Loads()

    def noted(launch):
        def launch_noted(kernel, *arguments, **options):
            loads.note(kernel)
            if StandInGraph.current is not None:
                StandInGraph.current.launched(launch, kernel, *arguments, options)
            launch(kernel, *arguments, **options)

        return launch_noted

    is_initialized = torch.cuda.is_initialized
    monkeypatch.setattr(StandInGraph, "loads", loads)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: loads.captures or is_initialized())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: loads.captures)
    for name in ("launch", "launch_adjoint"):
        monkeypatch.setattr(core, name, noted(getattr(core, name)))
    may_recognize = cache.may_recognize

    def recognizes(tensor, on_host=False):
        return may_recognize(tensor, on_host) and (on_host or not loads.captures)

    monkeypatch.setattr(cache, "may_recognize", recognizes)
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
