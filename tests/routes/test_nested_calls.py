"""A call in the midst of another one of the same thread, from a signal handler or a finalizer: both are right.

The inner call ends before the outer one goes on, so it must not wait for it, nor use memory, packed arguments or plans
that the outer one is using. Each call is compared with what it gives alone, to the last bit.
"""

import contextlib
import dis
import gc
import itertools
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

from nvalchemiops.torch import record
from nvalchemiops.torch.interactions.dispersion import D3Parameters, RationalDamping, d3_dispersion
from nvalchemiops.torch.interactions.electrostatics import (
    ewald_summation,
    particle_mesh_ewald,
)
from nvalchemiops.torch.interactions.lj import lj_energy_forces_virial
from nvalchemiops.torch.neighbors import VerletList, neighbor_list
from nvalchemiops.torch.runtime import recorded
from nvalchemiops.torch.runtime.plans import Plan
from nvalchemiops.torch.spline import spline_gather, spline_spread
from tests.support import plans
from tests.support.interrupting import Interrupted
from tests.support.ops import leaf, square_and_cube
from tests.support.systems import System, batch, crystal, triclinic

CUTOFF = 4.5
STATES = D3Parameters.load().states([6, 8])
PATIENCE = 120
"""Seconds after which a call is taken to wait for ever."""


class Given(NamedTuple):
    """A system and its neighbors."""

    system: System
    near: dict[str, torch.Tensor]


def given(seed: int, in_batch: bool = False) -> Given:
    """For any seed the same shapes, but for the number of pairs."""
    system = crystal("rocksalt", 5.6, 2, 0.1, seed=0)
    system = batch(system, triclinic(6, seed=3)) if in_batch else system
    generator = torch.Generator().manual_seed(seed)
    moved = 0.2 * torch.rand(system.positions.shape, generator=generator, dtype=torch.float64)
    system = system._replace(positions=system.positions + moved)
    pairs, pointers, shifts = pairs_of(system)
    near = {"neighbor_list": pairs, "neighbor_ptr": pointers, "neighbor_shifts": shifts, "batch_idx": system.batch_idx}
    return Given(system, near)


def pairs_of(system: System) -> tuple[torch.Tensor, ...]:
    x, _, cell, batch_idx = system
    return neighbor_list(x, CUTOFF, cell, batch_idx=batch_idx, return_neighbor_list=True)


def with_gradient(g: Given) -> tuple[torch.Tensor, ...]:
    """Energies whose weights differ, so that the sum is differentiated as a graph."""
    x = g.system.positions.clone().requires_grad_()
    energies = particle_mesh_ewald(x, *g.system[1:3], 0.6, mesh_dimensions=(10, 9, 12), **g.near)
    return energies.detach(), *torch.autograd.grad(energies.square().sum(), x)


def with_forces(g: Given) -> tuple[torch.Tensor, ...]:
    """The forces are taken along with the energies."""
    x = g.system.positions.clone().requires_grad_()
    energies = ewald_summation(x, *g.system[1:3], 0.6, k_cutoff=2.5, **g.near)
    return energies.detach(), *torch.autograd.grad(energies.sum(), x)


def splines(g: Given) -> tuple[torch.Tensor, ...]:
    x, q, cell, batch_idx = g.system
    mesh = spline_spread(x, q, cell, (8, 9, 10), 5, batch_idx)
    return mesh, spline_gather(x, mesh, cell, 5, batch_idx)


Call = Callable[[Given], tuple[torch.Tensor, ...]]
ALL = {"compute_forces": True, "compute_virial": True}
CALLS: dict[str, Call] = {
    "list": lambda g: pairs_of(g.system),
    "matrix with distances": lambda g: neighbor_list(
        g.system.positions, CUTOFF, g.system.cell, batch_idx=g.system.batch_idx, return_distances=True
    ),
    "Ewald": lambda g: ewald_summation(*g.system[:3], 0.6, k_cutoff=2.5, **g.near, **ALL),
    "PME": lambda g: particle_mesh_ewald(*g.system[:3], 0.6, mesh_dimensions=(10, 9, 12), **g.near, **ALL),
    "PME, parameters chosen": lambda g: particle_mesh_ewald(
        *g.system[:3], accuracy=1e-4, batch_idx=g.system.batch_idx, **ALL
    ),
    "dipoles": lambda g: ewald_summation(
        *g.system[:3], 0.6, k_cutoff=2.5, dipoles=g.system.positions.sin(), **g.near, **ALL
    ),
    "Lennard-Jones": lambda g: lj_energy_forces_virial(
        g.system.positions, 1.0 + 0.1 * g.system.charges, 0.3, CUTOFF, g.system.cell, **g.near
    ),
    "D3": lambda g: d3_dispersion(
        *(g.system.positions, torch.where(g.system.charges > 0, 6, 8).int(), RationalDamping(0.43, 4.4, 0.79, 0.9)),
        *(STATES, g.system.cell),
        **{"cutoff": CUTOFF, "coordination_cutoff": CUTOFF, **g.near, **ALL},
    ),
    "splines": splines,
}
# torch records no graph for a call in the midst of an operation, which has switched that off: these are outer calls
DIFFERENTIATED: dict[str, Call] = {"energies and forces": with_forces, "a graph": with_gradient}
INNER = {"energies and forces": "Ewald", "a graph": "PME"}


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    """Waiting for ever is an error."""

    def late(*_: Any) -> None:
        raise TimeoutError("a call waits for ever")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(PATIENCE)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def same(found: Any, expected: Any) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def check(
    outer: Callable[[], Any],
    inner: Callable[[], Any],
    places: int,
    within: str = "",
    by_instruction: bool = False,
    fresh: bool = False,
) -> None:
    """Interrupt ``outer`` at so many places, one each time; both calls must give what they give alone."""
    if fresh:
        plans.forget()
    expected, expected_inside = outer(), inner()
    if fresh:
        plans.forget()
    alone = Interrupted(outer, inner, lambda number: False, within, by_instruction)
    assert same(alone(), expected) and alone.count > 20
    step = max(1, alone.count // places)
    for place in range(step // 2 if step > 1 else 0, alone.count, step):
        if fresh:
            plans.forget()
        run = Interrupted(outer, inner, place.__eq__, within, by_instruction)
        found = run()
        assert same(found, expected), f"interrupted at {run.places}"
        for inside in run.found:
            if isinstance(inside, BaseException):
                raise AssertionError(f"in the midst of {run.places}") from inside
            assert same(inside, expected_inside), f"in the midst of {run.places}"


def repeated_call(name: str, in_batch: bool = False) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A call and another one with other values, both of which have been there."""
    call, inside = (CALLS | DIFFERENTIATED)[name], CALLS[INNER.get(name, name)]
    first, second = given(0, in_batch), given(1, in_batch)
    plans.forget()
    for _ in range(4):
        call(first), inside(second)
    return lambda: call(first), lambda: inside(second)


@pytest.mark.parametrize("in_batch", [False, True], ids=["one system", "batch"])
@pytest.mark.parametrize("name", CALLS | DIFFERENTIATED)
def test_a_call_like_this_one(name, in_batch):
    check(*repeated_call(name, in_batch), places=15)


@pytest.mark.parametrize("name", ["list", "Ewald", "PME, parameters chosen", "a graph"])
def test_all_calls(name):
    outer, _ = repeated_call(name)
    others = [repeated_call(other)[1] for other in CALLS]
    outer()
    check(outer, lambda: [result for other in others for result in other()], places=10)


@pytest.mark.parametrize(
    ("name", "within"),
    [
        ("list", "search.py"),
        ("Ewald", "engine.py"),
        ("PME", "plans.py"),
        ("energies and forces", "engine.py"),
        ("a graph", "cache.py"),
    ],
)
def test_searches_and_plans_that_are_being_made(name, within):
    """What a call does in the midst of a recording is no part of the plan that counts."""
    call, inside = (CALLS | DIFFERENTIATED)[name], CALLS[INNER.get(name, name)]
    first, second, third = given(0), given(1), given(2)

    def outer() -> list[torch.Tensor]:
        return [t for g in (first, first, first, third, first) for t in call(g)]

    check(outer, lambda: inside(second), places=12, within=within, fresh=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS | DIFFERENTIATED)
def test_each_line(name):
    check(*repeated_call(name), places=10**6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["list", "Ewald", "PME", "energies and forces"])
def test_many_lines_of_searches_and_plans_that_are_being_made(name):
    call, inside = (CALLS | DIFFERENTIATED)[name], CALLS[INNER.get(name, name)]
    first, second = given(0), given(1)
    check(lambda: [t for _ in range(4) for t in call(first)], lambda: inside(second), places=400, fresh=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["list", "Ewald", "PME"])
def test_each_instruction(name):
    check(*repeated_call(name), places=3000, by_instruction=True)


def test_an_interrupt_leaves_nothing_in_use(monkeypatch):
    """Ctrl-C comes after any call of a function: the plan is free then, and so are further recordings."""
    monkeypatch.setattr(recorded, "compiled_as_eager", contextlib.nullcontext)  # which an interrupt may leave as it is
    here = {Plan.__call__.__code__, recorded.Recorded._record.__code__}
    left: list[int] = []

    def enter(frame, event, argument):
        frame.f_trace_opcodes = frame.f_code in here
        last = 0

        def at(frame, event, argument):
            nonlocal last
            before, last = frame.f_code.co_code[last], frame.f_lasti
            if event == "opcode" and dis.opname[before].startswith("CALL"):
                left[0] -= 1
                if left[0] == 0:
                    raise KeyboardInterrupt
            return at

        return at if frame.f_code in here else None

    def call(number):
        """Whether the call went on to its end, with an interrupt after this number of calls."""
        left[:] = [number]
        before = sys.gettrace()
        sys.settrace(enter)
        with contextlib.suppress(KeyboardInterrupt):
            step(torch.ones(2))
        sys.settrace(before)
        return left[0] > 0

    step = record(torch.sin)
    for say, forget in (("recorded", step.clear), ("replayed", lambda: None)):
        for k in range(2):
            step(torch.ones(2) + k)
        for number in itertools.count(1):
            forget()
            is_whole = call(number)
            forget()
            step(torch.ones(2))
            assert f"last call: {say}" in step.explain()
            if is_whole:
                break
        assert number > 10


def test_launches_that_are_shared_among_threads(always_split):
    """The threads of the outer launch must not take pieces of the inner one, which nobody would wait for."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        for name in ("list", "PME", "Lennard-Jones"):
            check(*repeated_call(name), places=40)
    finally:
        torch.set_num_threads(before)


def test_a_verlet_list_that_both_calls_use():
    """Of two systems, one of which is searched again; the inner call has more neighbors."""
    g = given(0, in_batch=True)
    x, _, cell, batch_idx = g.system
    some, all_of_them = x + 0.4 * (batch_idx == 1).unsqueeze(1), 0.8 * x
    kept = VerletList(4.0, 0.5)

    def outer() -> tuple[torch.Tensor, ...]:
        kept.reset()
        kept(x, cell, batch_idx=batch_idx)
        matrix, counts, *_ = kept(some, cell, batch_idx=batch_idx)
        return counts, (matrix < len(x)).sum(1)

    def inner() -> tuple[torch.Tensor, ...]:
        return (kept(all_of_them, 0.8 * cell, batch_idx=batch_idx)[1],)

    check(outer, inner, places=60)


def test_backward_passes_through_one_recording():
    """The gradients of all arrays belong to one replay at a time."""
    x, w = leaf(5), leaf(5, seed=1)
    results = square_and_cube(x, w)

    def gradients(*weights: float) -> tuple[torch.Tensor, ...]:
        given = [torch.full_like(t, weight) for t, weight in zip(results, weights)]
        return torch.autograd.grad(results, (x, w), given, retain_graph=True)

    check(lambda: gradients(1.0, 1.0), lambda: gradients(1.0, -2.0), places=100)


# -- as Python makes them -------------------------------------------------------------------------


@pytest.mark.later_cases("list")
@pytest.mark.parametrize("name", ["list", "Ewald", "PME, parameters chosen"])
def test_a_handler_of_a_timer(name):
    outer, inner = repeated_call(name)
    expected, expected_inside = outer(), inner()
    found: list[Any] = []
    before = signal.signal(signal.SIGVTALRM, lambda *_: found.append(inner()))
    try:
        for number in range(1, 21):
            # set once, since a slow machine would do nothing else if the timer went on, and until it ends, since many
            # outer calls may fit into one tick of the clock of processes
            signal.setitimer(signal.ITIMER_VIRTUAL, 1e-3)
            while len(found) < number:
                assert same(outer(), expected)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)
    assert all(same(results, expected_inside) for results in found)


class Node:
    """An object that only the garbage collector finds."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize("in_thread", [False, True], ids=["main thread", "another thread"])
def test_finalizers(in_thread):
    outer, inner = repeated_call("PME")
    expected, expected_inside = outer(), inner()
    found: list[Any] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(4):  # what is kept is kept for each thread
                outer(), inner()
            for _, nodes in itertools.product(range(60), range(1, 4)):
                for _ in range(nodes):
                    weakref.finalize(Node(), lambda: found.append(inner()))
                assert same(outer(), expected)
        except BaseException as error:
            errors.append(error)

    limits = gc.get_threshold()
    gc.set_threshold(40, 2, 2)
    try:
        if in_thread:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        else:
            work()
    finally:
        gc.set_threshold(*limits)
    gc.collect()
    assert not errors
    assert len(found) > 10 and all(same(results, expected_inside) for results in found)
