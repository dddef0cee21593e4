"""When launches are shared among threads, and when they stay whole because threads gain nothing."""

import time

import pytest
import torch

from nvalchemiops import launch as core
from nvalchemiops import threads as shared
from nvalchemiops.crowding import LONGEST_PAUSE, REMEMBERED, SHORTEST_PAUSE, Crowding, Usage, usage_of_thread
from nvalchemiops.torch import adapt_threads
from nvalchemiops.torch.operators.mesh_transform import mesh_spectrum, mesh_values
from nvalchemiops.torch.runtime import openmp
from tests.routes.test_launch import run_row_sum
from tests.support.sums import SUMS
from tests.support.systems import crystal


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def simulated(seconds, is_busy, work=1e-3):
    """A loop of launches for this time; how often they were shared, by whether the machine was busy."""
    clock = Clock()
    crowding, end = Crowding(clock, lambda: None), clock.now + seconds
    wasted, shared = 0.0, {True: [], False: []}
    while clock.now < end:
        busy = is_busy(clock.now - 100.0, len(shared[True]) + len(shared[False]))
        if crowding.threads_gain():
            wall = 6e-3 if busy else 0.55 * work
            clock.now += wall
            crowding.note(wall, work)
            wasted += max(0.0, wall - work)
        else:
            wall = work
            clock.now += wall
        shared[busy].append(wall != work)
    return wasted / seconds, shared


def test_a_quiet_machine_shares_all_launches():
    assert all(simulated(2.0, lambda *_: False)[1][False])


def test_one_launch_in_a_hundred_that_waits_changes_nothing():
    _, shared = simulated(2.0, lambda _, n: n % 100 == 50)
    assert all(shared[False])


@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_busy_machine_wastes_little_time(every):
    """Whether every launch waits, or every second one."""
    wasted, _ = simulated(20.0, lambda _, n: n % every == 0)
    assert wasted < 0.1


def test_threads_come_back_when_the_machine_is_quiet_again():
    _, shared = simulated(5.0, lambda now, _: now < 3.0)
    assert sum(shared[False]) > 0.6 * len(shared[False])
    # within the longest pause
    whole = [n for n, was_shared in enumerate(shared[False]) if not was_shared]
    assert len(whole) * 1e-3 <= LONGEST_PAUSE + 1e-3 and whole == list(range(len(whole)))


def test_pauses_are_forgotten_after_a_quiet_time():
    clock = Clock()
    crowding = Crowding(clock, lambda: None)
    for _ in range(20):
        crowding.note(2.0, 1.0)
    assert not crowding.threads_gain()
    clock.now += 2.0 * LONGEST_PAUSE
    assert crowding.threads_gain()
    for _ in range(REMEMBERED + 1):
        crowding.note(0.5, 1.0)
    assert crowding.pause == SHORTEST_PAUSE
    crowding.note(2.0, 1.0)
    assert crowding.threads_gain()


def test_launches_stay_whole_where_threads_wait_and_give_the_same_bits(threads, monkeypatch):
    monkeypatch.setattr(core, "MINIMUM_CHUNK", 1e-15)
    clock = Clock()
    monkeypatch.setattr(shared, "crowding", Crowding(clock, lambda: None))
    original = shared.run

    def waits(task, n_threads):
        original(task, n_threads)
        time.sleep(0.01)

    monkeypatch.setattr(shared, "run", waits)
    threads(2)
    x = torch.rand(1_000, 3)
    run_row_sum(x)
    results = [run_row_sum(x) for _ in range(4)]
    pieces = [len(offsets.unique()) for _, offsets in results]
    assert pieces[0] > 1 and pieces[-1] == 1
    assert all(torch.equal(sums, results[0][0]) for sums, _ in results)
    monkeypatch.setattr(shared, "run", original)
    clock.now += 2.0 * LONGEST_PAUSE
    assert len(run_row_sum(x)[1].unique()) > 1


# -- interruptions by the system, and torch's own operations ---------------------------------------------------


class Interrupted:
    """What a thread sees that runs for ``share`` of the time and is interrupted so often a second of its own."""

    def __init__(self, clock):
        self.clock, self.seconds, self.count, self.rate, self.last = clock, 0.0, 0.0, 0.0, clock.now

    def __call__(self):
        spent = self.clock.now - self.last
        self.seconds, self.count, self.last = self.seconds + spent, self.count + spent * self.rate, self.clock.now
        return Usage(self.seconds, int(self.count))


def test_interruptions_tell_that_others_want_the_cores():
    clock = Clock()
    usage = Interrupted(clock)
    crowding = Crowding(clock, usage)

    def answers(seconds, rate):
        usage()
        usage.rate, found = rate, []
        for _ in range(int(seconds / 1e-3)):
            clock.now += 1e-3
            found.append(crowding.is_crowded())
        return found

    assert not any(answers(1.0, 10.0))
    assert all(answers(1.0, 300.0)[100:]) and not crowding.threads_gain()
    # no back and forth in between
    assert all(answers(1.0, 70.0))
    assert not any(answers(1.0, 10.0)[100:]) and crowding.threads_gain()


def test_a_system_that_does_not_tell_is_quiet():
    assert not Crowding(Clock(), lambda: None).is_crowded()


def test_a_thread_with_the_identifier_of_one_that_ended_begins_anew(monkeypatch):
    """Identifiers are used again, with less processor time than before."""
    clock, given = Clock(), []
    crowding = Crowding(clock, lambda: given[-1])

    def crowded(seconds, interruptions):
        given.append(Usage(seconds, interruptions))
        clock.now += 1.0
        return crowding.is_crowded()

    assert not crowded(10.0, 100_000)
    assert not crowded(0.0, 0) and not crowded(0.1, 1)
    assert crowded(0.2, 1_000) and not crowded(0.3, 1_000)


def test_usage_of_this_thread():
    usage = usage_of_thread()
    assert usage is None or (usage.seconds > 0.0 and usage.interruptions >= 0)


needs_openmp = pytest.mark.skipif(openmp._limit() is None, reason="torch has loaded no OpenMP of GNU here")


@needs_openmp
@pytest.mark.parametrize("method", ["ewald", "pme"])
@pytest.mark.parametrize("matching", [False, True])
def test_crowded_sums_have_the_same_bits_and_give_the_threads_back(method, matching, threads, monkeypatch):
    """Forward and backward, in plain sums and through forces, with meshes and waves that torch would divide."""
    threads(2)
    system = crystal("rocksalt", 5.64, 4, 0.3)
    given = {"alpha": 0.45, "cutoff": 7.0}
    given |= {"mesh_dimensions": (45, 45, 45)} if method == "pme" else {"k_cutoff": 2.5}
    during = []

    def run(crowded):
        monkeypatch.setattr(core, "is_crowded", lambda: crowded)
        x, q, cell = (t.clone().requires_grad_() for t in system[:3])
        x.register_hook(lambda _: during.append(torch.get_num_threads()))
        energies, forces = SUMS[method](x, q, cell, compute_forces=True, **given)
        assert torch.get_num_threads() == 2
        loss = forces.square().sum() if matching else energies.sum()
        gradients = torch.autograd.grad(loss, (x, q, cell))
        assert torch.get_num_threads() == 2
        return energies.detach(), forces.detach(), *gradients

    for quiet, crowded in zip(run(False), run(True)):
        assert torch.equal(quiet, crowded)


@needs_openmp
def test_torch_has_one_thread_inside_and_the_rest_of_a_backward_pass_has_all(threads, monkeypatch):
    threads(2)
    monkeypatch.setattr(core, "is_crowded", lambda: True)
    seen = {}

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, name):
            seen[f"{name} forward"], ctx.name = torch.get_num_threads(), name
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen[f"{ctx.name} backward"] = torch.get_num_threads()
            return gradient, None

    x = torch.rand(3, requires_grad=True)
    before = Probe.apply(x, "before")
    inside = openmp.fairly(lambda y: 2.0 * Probe.apply(3.0 * y, "inside"), before)
    Probe.apply(inside, "after").sum().backward()
    assert seen == {
        "before forward": 2,
        "inside forward": 1,
        "after forward": 2,
        "after backward": 2,
        "inside backward": 1,
        "before backward": 2,
    }
    torch.testing.assert_close(x.grad, torch.full((3,), 6.0))


@needs_openmp
def test_threads_come_back_after_errors(threads, monkeypatch):
    threads(2)
    monkeypatch.setattr(core, "is_crowded", lambda: True)

    def raises(*_):
        raise ArithmeticError("on purpose")

    with pytest.raises(ArithmeticError):
        openmp.fairly(raises, torch.ones(3))
    assert torch.get_num_threads() == 2
    x = torch.ones(3, requires_grad=True)
    inner = 2.0 * x
    inner.register_hook(raises)
    result = openmp.fairly(lambda y: 3.0 * y, inner)
    with pytest.raises(ArithmeticError):
        result.sum().backward()
    # also if the machine is quiet meanwhile
    monkeypatch.setattr(core, "is_crowded", lambda: False)
    openmp.fairly(lambda y: y, x)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("mesh", [(14, 14, 14), (9, 12, 15), (64, 64, 64)])
@pytest.mark.parametrize("lead", [(), (2, 3)])
def test_transforms_of_meshes(mesh, lead):
    """Values, derivatives of all orders, slices of vmap: what torch's own transforms give."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(*lead, *mesh, dtype=torch.float64, generator=generator)
    half = torch.view_as_real(torch.fft.rfftn(values, dim=(-3, -2, -1)))
    torch.testing.assert_close(mesh_spectrum(values), half)
    back = torch.fft.irfftn(torch.view_as_complex(half), s=mesh, dim=(-3, -2, -1), norm="forward")
    torch.testing.assert_close(mesh_values(half, mesh[2]), back)
    if values.numel() > 1e5:
        return
    by_torch = {
        mesh_spectrum: lambda v: torch.view_as_real(torch.fft.rfftn(v, dim=(-3, -2, -1))),
        mesh_values: lambda s: torch.fft.irfftn(torch.view_as_complex(s), s=mesh, dim=(-3, -2, -1), norm="forward"),
    }
    for ours, start, rest in ((mesh_spectrum, values, ()), (mesh_values, half, (mesh[2],))):
        start = start.clone().requires_grad_()
        found = []
        for function in (lambda t, ours=ours, rest=rest: ours(t, *rest), by_torch[ours]):
            result = function(start)
            (slope,) = torch.autograd.grad(result.pow(3).sum(), start, create_graph=True)
            found.append((slope, *torch.autograd.grad(slope.square().sum(), start)))
        torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-9 * float(found[1][1].abs().max()))
        several = torch.stack([start.detach(), 2.0 * start.detach()], 1)
        mapped = torch.func.vmap(lambda t, ours=ours, rest=rest: ours(t, *rest), in_dims=1)(several)
        expected = ours(start.detach(), *rest)
        torch.testing.assert_close(mapped, torch.stack([expected, 2.0 * expected]))


@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
def test_a_single_mesh_has_the_same_bits_on_any_number_of_threads(precision, threads):
    """Or a busy machine would change bits; tiny ones would have others if they did not take one thread."""
    generator = torch.Generator().manual_seed(0)
    for mesh in (
        (10,) * 3,
        (12, 10, 12),
        (14,) * 3,
        (15,) * 3,
        (16,) * 3,
        (25,) * 3,
        (48,) * 3,
        (63, 49, 35),
        (90,) * 3,
    ):
        values = torch.randn(1, 1, *mesh, dtype=precision, generator=generator)
        found = []
        for n in (1, 2, 3, 8):
            threads(n)
            spectrum = mesh_spectrum(values)
            found.append((spectrum, mesh_values(spectrum, mesh[2])))
        assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other)), mesh


@needs_openmp
def test_several_meshes_have_the_same_bits_however_busy_the_machine_is(threads):
    """Their transforms differ between numbers of threads for some shapes, so they take those of the caller."""
    threads(2)
    values = torch.randn(4, 1, 64, 64, 64, generator=torch.Generator().manual_seed(0))
    quiet = mesh_spectrum(values)
    expected = mesh_values(quiet, 64)
    limit = openmp._limit()
    assert limit.enter() and torch.get_num_threads() == 1
    try:
        assert torch.equal(mesh_spectrum(values), quiet) and torch.equal(mesh_values(quiet, 64), expected)
        assert torch.get_num_threads() == 1
    finally:
        limit.leave()


@needs_openmp
def test_threads_of_a_loop_adapt(threads, monkeypatch):
    threads(2)
    for crowded, expected in ((False, 2), (True, 1), (True, 1), (False, 2)):
        monkeypatch.setattr(core, "is_crowded", lambda crowded=crowded: crowded)
        assert adapt_threads() == expected == torch.get_num_threads()
        # operators inside do not give them back
        x = torch.ones(3, requires_grad=True)
        openmp.fairly(lambda x: 2.0 * x, x).sum().backward()
        mesh_spectrum(torch.ones(1, 1, 4, 4, 4))
        mesh_spectrum(torch.ones(1, 1, 64, 64, 64))
        assert torch.get_num_threads() == expected
    # what a caller sets in between stays
    monkeypatch.setattr(core, "is_crowded", lambda: True)
    adapt_threads()
    torch.set_num_threads(3)
    monkeypatch.setattr(core, "is_crowded", lambda: False)
    assert adapt_threads() == 3
