"""CPU threads that share the pieces of a launch: a pool, or the threads of OpenMP that torch has."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

from nvalchemiops.crowding import Crowding
from nvalchemiops.locks import after_fork, fork_safe, set_within

Task = Callable[[], None]
"""A share of a launch; several threads run the same task, which deals out pieces."""

crowding = Crowding()
"""Whether threads gain anything at present."""


class _OfThread(threading.local):
    """What is known of this thread."""

    is_worker = False
    shares = False
    has_openmp = False


_thread = _OfThread()


def is_worker() -> bool:
    """Whether this thread runs pieces of a launch of another thread."""
    return _thread.is_worker


def may_share() -> bool:
    """Whether a launch of this thread may be shared: not in the midst of another one that is."""
    return not is_worker() and not _thread.shares


def enter_as_worker() -> None:
    """Make this thread a worker, as long as Python knows it."""
    _thread.is_worker = True


_commands: dict[int, dict[Any, Any]] = {}


def commands() -> dict[Any, Any]:
    """Launches that this thread has prepared.

    By its identifier: of a thread of OpenMP or of XLA, Python forgets everything else between two calls. One that ended
    leaves them to the next with its identifier.
    """
    number = threading.get_ident()
    found = _commands.get(number)
    return _commands.setdefault(number, {}) if found is None else found


def is_crowded() -> bool:
    """Whether other work keeps interrupting this thread, so that threads which wait for each other gain nothing."""
    return crowding.is_crowded()


# -- how many -------------------------------------------------------------------------------------


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_count: Callable[[], int] = available_cores


def set_thread_count(source: Callable[[], int]) -> None:
    """Ask ``source`` for the number of CPU threads at each launch; the torch layer passes torch's setting."""
    global _count
    _count = source


def thread_count() -> int:
    """CPU threads that a gather-only launch may use now."""
    return max(1, _count())


# -- running a task -------------------------------------------------------------------------------

_openmp: Callable[[Task, int], None] | None = None


def set_openmp(run: Callable[[Task, int], None] | None) -> None:
    """Let ``run(task, threads)`` run the tasks of some threads, instead of the pool; see `as_main_thread`.

    Threads of another library that wait for work in a loop keep cores busy that a pool would need: better to use them.
    """
    global _openmp
    _openmp = run


def as_main_thread() -> AbstractContextManager[None]:
    """Inside, tasks of this thread run on the threads of OpenMP that torch's operations in it have, too.

    As those of the main thread do. For threads of a runtime that call one at a time; others share the pool.
    """
    return set_within(_thread, "has_openmp", True)


def _has_openmp() -> bool:
    return _thread.has_openmp or threading.get_ident() == threading.main_thread().ident


def run(task: Task, threads: int) -> None:
    """Run ``task`` in as many threads, this one among them; only where `may_share`."""
    _thread.shares = True
    try:
        if _openmp is not None and _has_openmp():
            _openmp(task, threads)
        else:
            _run_in_pool(task, threads)
    finally:
        _thread.shares = False


_pool: ThreadPoolExecutor | None = None
_pool_size = 0
_pool_lock = fork_safe(threading.Lock())


def pool(count: int) -> ThreadPoolExecutor:
    """The pool, with as many threads at least."""
    global _pool, _pool_size
    with _pool_lock:
        if _pool is None or _pool_size < count:
            # an outgrown pool ends by itself once its queue is empty and no launch holds it
            _pool, _pool_size = ThreadPoolExecutor(count, "nvalchemiops"), count
        return _pool


def _run_in_pool(task: Task, threads: int) -> None:
    waiting: list[Future[None]] = []
    try:
        workers = pool(threads - 1)
        for _ in range(threads - 1):
            waiting.append(workers.submit(_work, task))
        task()
        waiting = [worker for worker in waiting if not worker.cancel()]  # the pieces are all taken
    finally:
        _wait_for_all(waiting)
    for worker in waiting:
        worker.result()


def _work(task: Task) -> None:
    _thread.is_worker = True
    task()


def _wait_for_all(workers: Sequence[Future[Any]]) -> None:
    """Wait even through Ctrl-C, which is raised afterwards: the arrays must outlive every piece that writes to them."""
    interrupt = None
    for worker in workers:
        while not worker.done():
            try:
                worker.exception()
            except BaseException as error:
                interrupt = error
    if interrupt is not None:
        raise interrupt


@after_fork
def _forget_threads() -> None:
    """A forked child has only the thread that forked."""
    global _pool, _pool_size, _openmp
    _pool, _pool_size, _openmp = None, 0, None
