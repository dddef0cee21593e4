"""When launches are shared among threads, and when they stay whole because threads gain nothing."""

import time

import pytest
import torch

from nvalchemiops import launch as core
from nvalchemiops.crowding import LONGEST_PAUSE, REMEMBERED, SHORTEST_PAUSE, Crowding
from tests.test_launch import run_row_sum


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def simulated(seconds, is_busy, work=1e-3):
    """A loop of launches for this time; how often they were shared, by whether the machine was busy."""
    clock = Clock()
    crowding, end = Crowding(clock), clock.now + seconds
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
    crowding = Crowding(clock)
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
    monkeypatch.setattr(core, "_crowding", Crowding(clock))
    original = core._run

    def waits(task, n_threads):
        original(task, n_threads)
        time.sleep(0.01)

    monkeypatch.setattr(core, "_run", waits)
    threads(2)
    x = torch.rand(1_000, 3)
    run_row_sum(x)
    results = [run_row_sum(x) for _ in range(4)]
    pieces = [len(offsets.unique()) for _, offsets in results]
    assert pieces[0] > 1 and pieces[-1] == 1
    assert all(torch.equal(sums, results[0][0]) for sums, _ in results)
    monkeypatch.setattr(core, "_run", original)
    clock.now += 2.0 * LONGEST_PAUSE
    assert len(run_row_sum(x)[1].unique()) > 1
