"""Each way in which a call may run gives what the ordinary way gives, and is the way that ran.

What holds for the ordinary way (values, derivatives, symmetries, errors: files of this name in the other folders) then
holds for all. The ordinary way: plans off, operators one by one. Compiled graphs are in `test_all_calls_compiled.py`, a
domain of one rank is among the groups of tests/distributed, and JAX has tests/jax/test_operators.py.
"""

from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._pytree import tree_map_only

from nvalchemiops.torch import record
from nvalchemiops.torch.runtime import engine, plans
from tests.lanes.fibers import gpu_layout
from tests.support.cases import D3, DAMPED_SHIFTED_FORCE, EACH, LENNARD_JONES, MIXED, ONE, PAIRS, PARTS, SUMS
from tests.support.comparing import close, random_like
from tests.support.plans import counted_graphs, forget, n_replays
from tests.support.systems import in_form

SYSTEMS = pytest.mark.parametrize("system", [ONE, MIXED], ids=["one", "batch"])
HAS_PLAN = {case.name for case in (*SUMS, *PARTS, *PAIRS, D3) if case.name != "slab"}


class Ways(NamedTuple):
    """How often plans ran, and how often derivatives were taken along."""

    plans: list[Any]
    along: list[Any]


@pytest.fixture
def ways(monkeypatch):
    """Counts which ways are taken; nothing is kept from other tests."""
    forget(LENNARD_JONES, DAMPED_SHIFTED_FORCE)
    found = Ways([], [])
    run, along = plans.Plan.__call__, engine._Differentiable.apply

    def counted(plan, *arguments):
        results = run(plan, *arguments)
        if results is not None:
            found.plans.append(plan)
        return results

    def counted_along(*arguments):
        found.along.append(arguments[1])
        return along(*arguments)

    monkeypatch.setattr(plans.Plan, "__call__", counted)
    monkeypatch.setattr(engine._Differentiable, "apply", counted_along)
    return found


@pytest.fixture
def ordinary(monkeypatch):
    """A function that takes the ordinary way: no plans, and no derivatives along."""

    def one_by_one(call):
        return engine._here(call, call.prepare(call.inputs, call.near))

    def call(function, *arguments):
        with monkeypatch.context() as patch:
            patch.setattr(engine, "run", one_by_one)
            return function(*arguments)

    return call


def others(inputs, seed):
    """Atoms somewhat elsewhere, with other parameters; the same cells and neighbors."""
    x, a = (t + 0.02 * d for t, d in zip(inputs[:2], random_like(inputs[:2], seed)))
    return x, a


def results_of(case, inputs, near):
    """All results, of positions and parameters of atoms."""
    return lambda x, a: case.results(x, a, *inputs[2:], near)


def gradients_of(case, inputs, near):
    """First derivatives, with the same weight for all atoms and with different ones; second ones."""

    def gradients(x, a):
        x, a = (t.detach().requires_grad_() for t in (x, a))
        energies = case.energies(x, a, *inputs[2:], near)
        (weights,) = random_like([energies])
        found = torch.autograd.grad(energies.sum(), (x, a), create_graph=True)
        found += torch.autograd.grad((weights * energies).sum(), (x, a), retain_graph=True)
        return tuple(t.detach() for t in (*found, *torch.autograd.grad(found[0].sin().sum(), (x, a))))

    return gradients


def first_of(case, inputs, near):
    """First derivatives alone, which a backward pass without a graph has; each system has its weight."""

    def gradients(x, a):
        x, a = (t.detach().requires_grad_() for t in (x, a))
        weights = 1.7 - 0.4 * near.get("batch_idx", torch.zeros(len(x), dtype=torch.int32, device=x.device))
        return torch.autograd.grad((weights * case.energies(x, a, *inputs[2:], near)).sum(), (x, a))

    return gradients


FUNCTIONS = pytest.mark.parametrize("of", [results_of, first_of, gradients_of], ids=["results", "first", "gradients"])


@EACH
@SYSTEMS
@FUNCTIONS
def test_by_a_plan(case, system, of, ways, ordinary):
    """Of calls that repeat, with other values and lists in other memory."""
    inputs = case.inputs(system)
    for seed in range(4):
        near = case.near(system, **in_form(case.near(system), len(system.charges), "pointers"))
        before, function = len(ways.plans), of(case, inputs, near)
        given = others(inputs, seed)
        found, expected = function(*given), ordinary(function, *given)
        # derivatives that are taken along round in another order than those of a graph
        close(found, expected, 0.0 if of is results_of else 1e-11)
    assert (len(ways.plans) > before) == (case.name in HAS_PLAN), engine.explain()


@EACH
@SYSTEMS
@FUNCTIONS
def test_recorded(case, system, of, ways, ordinary):
    """As a step of a user: derivatives are taken inside."""
    inputs, near = case.inputs(system), case.near(system)
    function = of(case, inputs, near)
    again = record(function)
    for seed in range(3):
        given = others(inputs, seed)
        before = len(ways.plans)
        close(again(*given), ordinary(function, *given), 0.0 if of is results_of else 1e-11)
    assert len(ways.plans) == before + 1 and "replayed" in again.explain()


@EACH
@SYSTEMS
def test_derivatives_of_requested_derivatives(case, system, ways, ordinary):
    """By a graph of operators, and by plans of functions of a backward pass."""
    inputs, near = case.inputs(system), case.near(system)

    def gradients(x, a):
        x, a = (t.detach().requires_grad_() for t in (x, a))
        results = case.results(x, a, *inputs[2:], near)
        loss = sum((t * w).sum() for t, w in zip(results, random_like(results)))
        return torch.autograd.grad(loss, (x, a), allow_unused=True, materialize_grads=True)

    for seed in range(4):
        before, given = len(ways.plans), others(inputs, seed)
        close(gradients(*given), ordinary(gradients, *given), 1e-11)
        assert not any(ways.along), "first derivatives along with derivatives"
    assert (len(ways.plans) > before) == (case.name in HAS_PLAN), engine.explain()


@EACH
@SYSTEMS
@FUNCTIONS
def test_in_lanes(case, system, of, ways, ordinary):
    """In the layout of a GPU, where graphs cannot be captured: operators one by one each time."""
    inputs, near = case.inputs(system), case.near(system)
    function = of(case, inputs, near)
    for seed in range(2):
        given = others(inputs, seed)
        with gpu_layout():
            found = function(*given)
            assert "cannot be captured" in engine.explain() or case.name not in HAS_PLAN
        assert not ways.plans and not ways.along
        close(found, ordinary(function, *given), 1e-10)
        ways.along.clear()


@pytest.mark.later_cases("*-first-one-*", "*-gradients-one-*")
@EACH
@SYSTEMS
@FUNCTIONS
def test_captured(case, system, of, ways, ordinary, monkeypatch, gpu):
    """On a GPU: all values are others in each call, and lists have other lengths.

    Those of D3 have one length, since operations of torch read them, too.
    """
    inputs = case.inputs(system)
    n_lists = 1 if case.name == "D3" else 3
    near_of = list(lists(case, system))
    every = [of(case, inputs, near) for near in near_of]
    there = [of(case, inputs, near) for inputs, near in on(gpu.device, [(inputs, near) for near in near_of])]
    with counted_graphs(monkeypatch, gpu) as made:
        for seed in range(5):
            before, given = n_replays(made), others(inputs, seed)
            found = there[seed % n_lists](*on(gpu.device, given))
            close(on(torch.device("cpu"), found), ordinary(every[seed % n_lists], *given), 1e-10)
    assert (n_replays(made) > before) == (case.name in HAS_PLAN), engine.explain()
    if of is results_of:
        assert len(made) <= 1, "one graph for all lengths"


def on(device, values):
    """The same on another device: one tensor for each, since a GPU recognizes what is fixed by identity."""
    moved = {}
    return tree_map_only(torch.Tensor, lambda t: moved.setdefault(id(t), (t, t.to(device)))[1], values)


def lists(case, system):
    """Lists with pointers: of all pairs, and without the last ones."""
    near = case.near(system)
    n_pairs = near["neighbor_list"].shape[1]
    for n in (n_pairs - 3, n_pairs, n_pairs - 7):
        some = {"neighbor_list": near["neighbor_list"][:, :n], "neighbor_shifts": near["neighbor_shifts"][:n]}
        yield case.near(system, **in_form(some, len(system.charges), "pointers"))


@EACH
@SYSTEMS
def test_mapped(case, system, ways, ordinary):
    """By vmap, over positions and parameters of atoms."""
    inputs, near = case.inputs(system), case.near(system)
    function = results_of(case, inputs, near)
    slices = [others(inputs, seed) for seed in range(2)]
    found = torch.func.vmap(function)(*(torch.stack(parts) for parts in zip(*slices)))
    assert not ways.plans
    for number, given in enumerate(slices):
        close([t[number] for t in found], ordinary(function, *given), 1e-11)
