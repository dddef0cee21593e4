"""Calls that repeat on a GPU are captured as graphs: what a graph sees, what is captured anew, and what is refused.

Each runs on a CPU with the layout of a GPU and a stand-in for its graphs, too; `tests/routes/test_all_calls.py` has the
same calls of all operations.
"""

import contextlib
from unittest import mock

import pytest
import torch

from nvalchemiops.torch import plans, record
from nvalchemiops.torch.interactions.electrostatics import driver, ewald_summation, particle_mesh_ewald
from nvalchemiops.torch.neighbors import neighbor_list
from nvalchemiops.torch.runtime import engine, graphs, tables
from nvalchemiops.torch.runtime import plans as plans_in_runtime
from nvalchemiops.torch.runtime.storage import storage_of
from tests.support.captures import CUTOFF, Calls, on, pointers
from tests.support.cases import BOUNDS, MIXED, ONE
from tests.support.comparing import close, random_like
from tests.support.plans import CountedGraph, StandInGraph, n_replays, plans_of_calls
from tests.support.systems import in_form, neighbors_of


def test_results_are_the_callers(made, calls, gpu):
    """What a graph has written before is not changed by its next replay."""
    calls.check(pointers(gpu.device), 5)
    assert len(made) == 1 and n_replays(made) == 3


def test_systems_of_atoms_that_change_in_place(made, gpu):
    """A graph uses tensors that stay where they are, with the values that they have then."""
    calls = Calls(gpu.device, MIXED)
    near = pointers(gpu.device, MIXED)
    before = calls.check(near, 3)
    calls.fixed["batch_idx"].copy_(calls.fixed["batch_idx"].flip(0))
    calls.count -= 1
    assert (before - calls.check(near)).abs().max() > 1e-3
    assert len(made) == 1


def test_a_number_of_systems_that_changes_in_place(made, gpu):
    """Where only `batch_idx` says how many systems share a cell, there is a row for each of them."""
    calls, near = Calls(gpu.device), pointers(gpu.device)
    batch_idx = torch.zeros(len(ONE.charges), dtype=torch.int32, device=gpu.device)
    for largest in (0, 0, 0, 2):
        batch_idx[-1] = largest
        found = calls.potential(calls.positions(), **calls.fixed, **near, batch_idx=batch_idx, compute_virial=True)
        assert len(found[1]) == largest + 1
    assert not n_replays(made) and "give `num_systems`" in plans.explain()


def test_a_list_beyond_the_room(made, calls, gpu):
    """Lists that outgrow the memory of a graph are captured anew; none is cut."""
    calls.check(pointers(gpu.device), 3)
    assert len(made) == n_replays(made) == 1
    longer = pointers(gpu.device, cutoff=2.0 * CUTOFF)
    assert longer["neighbor_list"].shape[1] > 128
    calls.check(longer, 3)
    assert len(made) == n_replays(made) == 2


def test_a_list_that_gets_shorter(made, calls, gpu):
    """What a longer list has left in the memory of a graph are no pairs."""
    for n_fewer in (0, 7, 3, 11):
        assert calls.check(pointers(gpu.device, n_fewer=n_fewer), 3).isfinite().all()
    assert len(made) == 1


def test_lists_of_int64_that_change_their_length(made, calls, gpu):
    """They share the graph of int32, and what does not fit into int32 is no atom there either."""
    for n_fewer, dtype in ((0, torch.int64), (7, torch.int64), (3, torch.int32), (5, torch.int64)):
        near = pointers(gpu.device, n_fewer=n_fewer)
        calls.check({name: t.to(dtype) for name, t in near.items()}, 2)
    assert len(made) == 1
    near = {name: t.long() for name, t in pointers(gpu.device, n_fewer=5).items()}
    near["neighbor_list"][1, 0] += 2**32
    assert calls.check(near).isnan().any()
    assert len(made) == 1 and n_replays(made) == 7


@pytest.fixture
def long_lists(monkeypatch):
    """All lists are long ones, which graphs read in place if they stay where they are."""
    monkeypatch.setattr(engine, "LONG_LISTS", 1)


@pytest.mark.parametrize("form", ["pointers", "matrix"])
def test_long_lists_in_place(made, calls, gpu, long_lists, form):
    """A graph reads them where they are, with the values that they have then, and holds no reference to them."""
    near = on(gpu.device, in_form(neighbors_of(ONE, CUTOFF), len(ONE.charges), form, "fill_value"))
    before = calls.check(near, 4)
    assert len(made) == 1 and n_replays(made) == 2
    lists = [t for t in near.values() if isinstance(t, torch.Tensor)]
    (plan,) = plans_of_calls(calls.potential)
    assert {storage_of(t) for t in (*plan.external, *plan.copied)}.isdisjoint(map(storage_of, lists))
    near[next(name for name in near if name.endswith("shifts"))] += 50  # beyond the cutoff
    calls.count -= 1
    assert (before - calls.check(near)).abs().max() > 1e-3
    assert n_replays(made) == 3


def test_long_lists_of_int32_where_int64_has_been(made, calls, gpu, long_lists):
    """Memory that is given again, with the same shapes, is another list."""
    near = pointers(gpu.device)
    wide = {name: t.long() for name, t in near.items()}
    calls.check(wide, 3)
    assert len(made) == n_replays(made) == 1
    calls.check({k: t.view(torch.int32).flatten()[: t.numel()].view(t.shape).copy_(near[k]) for k, t in wide.items()})


def test_long_lists_elsewhere(made, calls, gpu, long_lists):
    """Lists at other addresses, or of other lengths there, are copied; those that come back are read in place."""
    several = [pointers(gpu.device, n_fewer=n) for n in (0, 7)]
    for near in several:
        calls.check(near)
    assert len(made) == 1  # which copies
    calls.check(several[0], 3)
    assert len(made) == 2 and [graph.n_replays for graph in made] == [0, 2]
    ptr = several[0]["neighbor_ptr"]
    shorter = several[0] | {"neighbor_list": several[0]["neighbor_list"][:, :-2]}
    shorter["neighbor_shifts"] = several[0]["neighbor_shifts"][:-2]
    ptr[-1] -= 2
    calls.check(shorter)
    assert [graph.n_replays for graph in made] == [1, 2]
    ptr[-1] += 2
    shifts = several[0]["neighbor_shifts"]
    calls.check(several[0] | {"neighbor_shifts": shifts.as_strided(shifts.shape, (1, 3))})
    assert [graph.n_replays for graph in made] == [2, 2]


def test_a_long_list_as_long_as_an_axis_of_the_mesh(made, gpu, long_lists):
    """A graph that reads the list in place does not depend on which of the two a number is."""
    x, q, cell = (t.to(gpu.device) for t in (ONE.positions, ONE.charges, ONE.cell))
    near = pointers(gpu.device, n_fewer=26)
    mesh = (near["neighbor_list"].shape[1],) * 3
    for step in range(4):
        particle_mesh_ewald(x + 0.1 * step, q, cell, 0.6, mesh_dimensions=mesh, **near)
    assert len(made) == 1 and n_replays(made) == 2


def test_derivatives_of_sums_over_long_lists(made, gpu, long_lists):
    """Those of any order have graphs that read the list in place, too, and notice its changes before they run."""
    x, q, cell = (t.to(gpu.device) for t in (ONE.positions, ONE.charges, ONE.cell))
    near = pointers(gpu.device)

    def second(x):
        energies = ewald_summation(x, q, cell, 0.6, miller_bounds=BOUNDS, **near)
        (first,) = torch.autograd.grad(energies.sin().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)

    for step in range(5):
        at = (x + 0.01 * step).requires_grad_()
        found = second(at)
        with plans.off():
            close(found, second(at), 1e-10)
    assert len(made) == 3 and n_replays(made) >= 6
    energies = ewald_summation(at, q, cell, 0.6, miller_bounds=BOUNDS, **near)
    near["neighbor_list"].add_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        energies.sum().backward()


POINTERS = {
    "too early": lambda p: p - 1,
    "too late": lambda p: p + 1,
    "negative": lambda p: torch.cat([p[:2], -p[2:3], p[3:]]),
    "beyond the memory": lambda p: torch.cat([p[:-1], p[-1:] + 1000]),
}


@pytest.mark.parametrize("fault", POINTERS.values(), ids=POINTERS)
def test_pointers_that_do_not_fit(made, calls, gpu, fault):
    """Energies of a replay are NaN where those of an ordinary call are."""
    near = pointers(gpu.device, n_fewer=7)
    calls.check(near, 3)
    near["neighbor_ptr"] = fault(near["neighbor_ptr"])
    assert calls.check(near).isnan().any()
    assert n_replays(made) == 2


def test_another_stream_has_another_graph(made, calls, gpu, monkeypatch):
    """Replays of one graph share memory, so they must be in order."""
    near = pointers(gpu.device)
    calls.check(near, 3)
    with contextlib.ExitStack() as stack:
        if gpu.is_real:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            stack.enter_context(torch.cuda.stream(side))
        else:
            monkeypatch.setattr(graphs, "place_of", lambda device: (device, 7))
        calls.check(near, 3)
    assert len(made) == n_replays(made) == 2


def test_a_backward_pass_on_another_stream_is_an_ordinary_one(made, calls, gpu, monkeypatch):
    """Its graph might run beside the one that it follows."""
    if gpu.is_real:
        pytest.skip("torch runs a backward pass on the stream of the forward one")
    near = pointers(gpu.device)
    for place in (0, 0, 0, 0, 7):
        x = calls.positions().requires_grad_()
        loss = calls.potential(x, **calls.fixed, **near).sin().sum()
        before = n_replays(made)
        monkeypatch.setattr(graphs, "place_of", lambda device, place=place: (device, place))
        (found,) = torch.autograd.grad(loss, x)
        with plans.off():
            (expected,) = torch.autograd.grad(calls.potential(x, **calls.fixed, **near).sin().sum(), x)
        close([found], [expected], 1e-12)
    assert before == n_replays(made) and "another stream" in plans.explain()


@pytest.mark.parametrize("lasting", [False, True])
def test_a_capture_that_fails(lasting, made, calls, gpu, monkeypatch):
    """The call has its results, and calls of its kind are not captured again; or, if it lasts, none."""
    failed = {}
    monkeypatch.setattr(graphs, "_failed", failed)
    if not gpu.is_real:
        monkeypatch.setattr(graphs, "obstacle", lambda device: failed.get(device, ""))

    def fails(graph, function, memory, may_repeat):
        graph.reason = "its capture has failed"
        if lasting:
            failed[graph.device] = "a capture has failed"

    for kind in (CountedGraph, StandInGraph):
        monkeypatch.setattr(kind, "captured", fails)
    near = pointers(gpu.device)
    calls.check(near, 4)
    calls.potential(calls.positions(), **calls.fixed, **near)
    assert len(made) == 1 and not n_replays(made)
    assert ("a capture has failed" if lasting else "its capture has failed") in plans.explain()


def test_a_capture_that_is_repeated(made, calls, gpu, monkeypatch):
    """Since there was no memory at first: the graph reads what the second call takes."""
    weights = torch.ones(3, dtype=torch.float64, device=gpu.device)
    kind = CountedGraph if gpu.is_real else StandInGraph
    captured_once = kind.captured

    def captured_twice(graph, function, memory, may_repeat):
        assert may_repeat
        function(memory)
        return captured_once(graph, function, memory)

    monkeypatch.setattr(kind, "captured", captured_twice)
    near, step = pointers(gpu.device), record(lambda x: torch.sin(x * weights))
    calls.check(near, 4)
    for factor in (1.0, 2.0, 3.0):
        x = factor * calls.positions()
        close([step(x)], [torch.sin(x * weights)], 1e-15)
        weights.mul_(2.0)
    assert len(made) == 2 and n_replays(made)


def test_graphs_that_need_too_much_memory(made, gpu, monkeypatch):
    """Those that ran longest ago go first."""
    x, q, cell = (t.to(gpu.device) for t in (ONE.positions, ONE.charges, ONE.cell))
    near, table = pointers(gpu.device), tables.everywhere

    def twice(alpha):
        for _ in range(2):
            ewald_summation(x, q, cell, alpha, miller_bounds=BOUNDS, **near)

    twice(0.6)
    assert len(made) == 1 and table.n_bytes(True) > 0 and table.n_bytes(False) == 0
    of_one = table.n_bytes(True)
    monkeypatch.setattr(graphs, "most_bytes", lambda device: 3 * of_one // 2)
    twice(0.5)
    assert len(made) == len(table.entries) == 2
    monkeypatch.setattr(table, "most_bytes_on_gpu", table.most_bytes_on_gpu)  # which puts it back
    plans.limit(of_one, "cuda")
    twice(0.7)
    assert len(made) == 3 and len(table.entries) == 1


def test_no_plan_where_memory_is_short(made, calls, gpu, monkeypatch):
    """Lists that are too large are not copied; and the ordinary call follows where copies do not fit."""
    near = pointers(gpu.device)
    with monkeypatch.context() as few:
        few.setattr(engine, "LONG_LISTS", 1)
        few.setattr(graphs, "most_bytes", lambda device: 7 * sum(t.numel() for t in near.values()))
        for others in [{k: v.clone() for k, v in near.items()} for _ in range(3)]:
            calls.potential(calls.positions(), **calls.fixed, **others)
        assert not made and "had other neighbors" in plans.explain()
        calls.check(near, 3)
        assert n_replays(made) == 1
        few.setattr(graphs, "most_bytes", lambda device: 1)
        calls.check(pointers(gpu.device, n_fewer=7), 3)
        assert n_replays(made) == 1 and "its memory is more than 1 bytes" in plans.explain(calls.potential)
    without_memory = mock.Mock(side_effect=torch.OutOfMemoryError("none left"))
    monkeypatch.setattr(plans_in_runtime, "follow", without_memory)
    near = pointers(gpu.device, n_fewer=3)
    calls.check(near, 5)
    calls.potential(calls.positions(), **calls.fixed, **near)
    assert "not enough memory" in plans.explain() and n_replays(made) == 1
    assert without_memory.call_count == 1


def test_no_more_graphs_than_streams_for_their_captures(made, calls, gpu, monkeypatch):
    """A plan that was not used lately makes room; calls whose table has none are ordinary for now."""
    of_one, of_others = (
        pointers(gpu.device),
        on(gpu.device, in_form(neighbors_of(ONE, CUTOFF), len(ONE.charges), "matrix")),
    )
    x, step = calls.positions(), record(torch.sin)
    for is_full, n_made in ((True, 0), (False, 2), (True, 3)):
        monkeypatch.setattr(graphs, "are_all_used", lambda device, is_full=is_full: is_full)
        near = of_others if n_made == 3 else of_one
        calls.check(near, 3)
        calls.potential(calls.positions(), **calls.fixed, **near)
        assert torch.equal(step(x), x.sin()) and len(made) == n_made
        for told in (plans.explain(calls.potential), step.explain()):
            assert (graphs.NO_STREAM in told) == (n_made == 0)
    assert [plan._graph for plan in plans_of_calls(calls.potential)] == [made[2]] and n_replays(made) == 5


# -- searches -------------------------------------------------------------------------------------


SEARCHES = [{}, {"half_fill": True}, {"nearest": 4}, {"nearest": 4, "ties": "index"}]


# a matrix of exactly four neighbors has a known width, so nothing is read, and the engine has no part in it
@pytest.mark.parametrize("options", [{"return_neighbor_list": True, **o} for o in SEARCHES] + SEARCHES[:3], ids=str)
def test_searches(made, gpu, options):
    """A list has as many pairs as there are, read after the graph; positions and cells differ each time."""
    for step in range(5):
        x = (ONE.positions + 0.1 * random_like([ONE.positions], step)[0]).to(gpu.device)
        cell = ((1.0 + 0.01 * step) * ONE.cell).to(gpu.device)

        def call(x=x, cell=cell):
            return neighbor_list(x, CUTOFF, cell, **options)

        found = call()
        with plans.off():
            expected = call()
        assert all(map(torch.equal, found, expected))
    assert len(made) == 1 and n_replays(made) == 3


def test_a_matrix_in_place_is_filled_beside_its_graph(made, gpu):
    """The graph sorts atoms; rows are written to the memory of each call."""
    batch_idx, kept = MIXED.batch_idx.sort().values.to(gpu.device), []
    cell, n = MIXED.cell.to(gpu.device), len(batch_idx)
    for step in range(4):
        x = MIXED.positions.to(gpu.device) + 0.1 * step

        def call(x=x):
            shapes = {"neighbor_matrix": (n, 90), "num_neighbors": (n,), "neighbor_matrix_shifts": (n, 90, 3)}
            memory = {k: torch.full(s, -7, dtype=torch.int32, device=gpu.device) for k, s in shapes.items()}
            return neighbor_list(x, CUTOFF, cell, batch_idx=batch_idx, check=False, **memory)

        found = call()
        with plans.off():
            kept.append((found, call()))
    assert all(torch.equal(a, b) for found, expected in kept for a, b in zip(found, expected, strict=True))
    assert len(made) == 1 and n_replays(made) == 2


def test_neighbors_that_are_found(made, gpu):
    """A list of a search has no first atoms; beyond its end, its memory in a graph has no pairs either."""
    calls, lengths = Calls(gpu.device), set()
    for step in range(6):
        x = (ONE.positions + 0.3 * random_like([ONE.positions], step)[0]).to(gpu.device)

        def call(x=x):
            return calls.potential(x, **calls.fixed)

        found = call()
        way = plans.explain()
        with plans.off():
            torch.testing.assert_close(found, call(), rtol=1e-12, atol=1e-12)
            lengths.add(neighbor_list(x, CUTOFF, calls.fixed["cell"], return_neighbor_list=True)[0].shape[1])
    assert len(lengths) > 1 and "pair potential: plan (replayed" in way


# -- chosen parameters ------------------------------------------------------------------------------


CHOSEN = {
    "nothing given": {},
    "a list": {"neighbors": "pointers"},
    "wide numbers": {"neighbors": "int64"},
    "a matrix": {"neighbors": "matrix"},
    "k-vectors": {"function": ewald_summation},
    "k-vectors up to a length": {"function": ewald_summation, "k_cutoff": 8.0},
    "dipoles": {"dipoles": True},
    "a batch": {"system": MIXED},
    "exclusions": {"exclusions": True},
}


@pytest.mark.parametrize("name", CHOSEN)
def test_sums_with_chosen_parameters(name, made, gpu, monkeypatch):
    """One graph for any positions, charges and cells of a mesh, with the list and alpha of each call."""
    how = dict(CHOSEN[name])
    system, function = how.get("system", ONE), how.get("function", particle_mesh_ewald)
    fixed = {"accuracy": 1e-3, "compute_forces": True, "compute_virial": True}
    n_atoms = len(system.charges)
    if system is MIXED:
        fixed["batch_idx"] = system.batch_idx.to(gpu.device)
    if "k_cutoff" in how:
        fixed["k_cutoff"] = how["k_cutoff"]
    if name == "dipoles":
        fixed["dipoles"] = 0.1 * random_like([system.positions], 9)[0].to(gpu.device)
    if name == "exclusions":
        fixed["exclusions"] = torch.tensor([[0], [1]], dtype=torch.int32, device=gpu.device)
    alphas, ways, choose = set(), [], driver.choose_splitting

    def noted(*arguments):
        found = choose(*arguments)
        alphas.add(tuple(found.alpha.tolist()))
        return found

    monkeypatch.setattr(driver, "choose_splitting", noted)
    for step in range(6):
        scale = 1.0 + 0.01 * (step == 4)
        x = scale * (system.positions + 0.05 * random_like([system.positions], step)[0])
        q, cell = system.charges * (3.0 if step == 5 else 1.0), scale * system.cell
        if step == 3:
            x[1] = x[0] + 0.2  # large forces, so another alpha
        near = {}
        if "neighbors" in how:
            with plans.off():
                pairs = neighbors_of(system._replace(positions=x, cell=cell), CUTOFF)
            near = on(gpu.device, in_form(pairs, n_atoms, how["neighbors"], "fill_value")) | {"cutoff": CUTOFF}
        if name == "exclusions" and step == 2:
            fixed["exclusions"][1] = 2
        inputs = [t.to(gpu.device) for t in (x, q, cell)]

        def call(inputs=inputs, near=near):
            return function(*inputs, **near, **fixed)

        found = call()
        ways.append(plans.explain())
        with plans.off():
            expected = call()
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12 * float(b.abs().max()))
    assert len(alphas) > 1
    assert ("\nsum: plan (replayed" in f"\n{ways[-1]}") == (name != "exclusions")


@pytest.mark.parametrize("function", [ewald_summation, particle_mesh_ewald])
def test_gradients_of_batches_with_chosen_parameters(function, made, gpu):
    """Of plain sums of energies, in which cells have the weights of systems and all else those of atoms."""
    inputs = [t.to(gpu.device, copy=True).requires_grad_() for t in (MIXED.positions, MIXED.charges, MIXED.cell)]
    numbers = MIXED.batch_idx.to(gpu.device)
    weights = 1.0 + numbers

    def gradients():
        energies = function(*inputs, batch_idx=numbers, accuracy=1e-3)
        sums = energies.sum(), (weights * energies).sum()
        return [g for each in sums for g in torch.autograd.grad(each, inputs, retain_graph=True)]

    with plans.off():
        expected = gradients()
    for _ in range(4):
        close(gradients(), expected, 1e-12)
    assert n_replays(made)
