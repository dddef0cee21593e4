"""Pieces of launches on the threads of torch's OpenMP."""

import os
import threading

import pytest
import torch

from nvalchemiops import threads as core
from nvalchemiops.torch.runtime.openmp import openmp_of_torch

pytestmark = pytest.mark.skipif(openmp_of_torch() is None, reason="torch has loaded no OpenMP of GNU here, or several")


def dealt(n_pieces, done, fail_at=None):
    """A task for several threads, as launches make them: takes pieces until none is left."""
    pieces = iter(range(n_pieces))

    def task():
        for piece in pieces:
            if piece == fail_at:
                raise RuntimeError(f"piece {piece}")
            done.append((piece, threading.get_ident()))
            torch.ones(1000).sum()  # gives others their turn

    return task


def test_every_piece_is_done_once():
    openmp = openmp_of_torch()
    for threads in (1, 2, 3):
        done = []
        openmp(dealt(200, done), threads)
        assert sorted(piece for piece, _ in done) == list(range(200))
        assert len({thread for _, thread in done}) <= threads


@pytest.mark.parametrize("fail_at", [0, 17, 199])
def test_an_error_reaches_the_caller(fail_at):
    """In whichever thread it happened; and it goes on working."""
    openmp, done = openmp_of_torch(), []
    with pytest.raises(RuntimeError, match=f"piece {fail_at}"):
        openmp(dealt(200, done, fail_at), 2)
    openmp(dealt(50, done := []), 2)
    assert len(done) == 50


def test_threads_of_openmp_for_several_callers_at_once():
    """Each has threads of its own, and its own task and errors."""
    openmp, found = openmp_of_torch(), {}

    def call(number, fail_at):
        for _ in range(20):
            done = []
            try:
                openmp(dealt(50, done, fail_at), 2)
                found.setdefault(number, []).append(sorted(piece for piece, _ in done) == list(range(50)))
            except RuntimeError as error:
                found.setdefault(number, []).append(str(error))

    callers = [threading.Thread(target=call, args=(n, None if n else 7)) for n in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert found == {0: ["piece 7"] * 20, 1: [True] * 20, 2: [True] * 20}
    assert not openmp.running


def test_only_the_main_thread_takes_openmp(monkeypatch):
    """Threads of OpenMP belong to one calling thread; others have a pool, unless they call for a runtime."""
    asked = []

    def openmp(task, threads):
        asked.append(threads)
        task()

    monkeypatch.setattr(core, "_openmp", openmp)
    done = []
    core.run(dealt(10, done), 2)
    assert asked == [2] and len(done) == 10
    other = threading.Thread(target=lambda: core.run(dealt(10, done), 2))
    other.start()
    other.join()
    assert asked == [2] and len(done) == 20

    def as_main():
        with core.as_main_thread():
            core.run(dealt(10, done), 2)
        core.run(dealt(10, done), 2)

    other = threading.Thread(target=as_main)
    other.start()
    other.join()
    assert asked == [2, 2] and len(done) == 40


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python 3.12 warns of what is tested
def test_a_forked_child_has_no_openmp():
    """Its threads of OpenMP did not come along."""
    child = os.fork()
    if child == 0:
        os._exit(0 if core._openmp is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_threads_that_python_forgets_keep_their_launches():
    """Python forgets threads of OpenMP, as those of XLA, between two calls, with all of `threading.local`."""
    openmp, known, seen = openmp_of_torch(), threading.local(), {}

    def task():
        forgotten = not hasattr(known, "number")
        known.number = 1
        seen.setdefault(threading.get_ident(), []).append((forgotten, core.commands()))
        both.wait()

    for _ in range(3):
        both = threading.Barrier(2, timeout=30)
        openmp(task, 2)
    others = [calls for number, calls in seen.items() if number != threading.get_ident()]
    assert others and all(forgotten for calls in others for forgotten, _ in calls)
    assert all(commands is calls[0][1] for calls in seen.values() for _, commands in calls)
