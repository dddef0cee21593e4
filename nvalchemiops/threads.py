"""CPU threads that share the pieces of a launch: a pool, or torch's OpenMP threads."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

from nvalchemiops.crowding import Crowding
from nvalchemiops.locks import after_fork, fork_safe, set_within

Task = Callable[[], None]
"""The work of a launch. Several threads run the same task, which hands out pieces."""

crowding = Crowding()
"""Statistics from which `Crowding` decides whether threads save time at present."""


class _OfThread(threading.local):
    """State of this thread: whether it works for another thread, shares a launch, or may use OpenMP."""

    is_worker = False
    shares = False
    has_openmp = False


_thread = _OfThread()


def is_worker() -> bool:
    """Whether this thread runs pieces of a launch of another thread."""
    return _thread.is_worker


def may_share() -> bool:
    """Whether a launch of this thread may be shared: not while another launch of this thread is shared."""
    return not is_worker() and not _thread.shares


def enter_as_worker() -> None:
    """Mark this thread as a worker. For OpenMP threads this lasts as long as Python knows the thread."""
    _thread.is_worker = True


_commands: dict[int, dict[Any, Any]] = {}


def commands() -> dict[Any, Any]:
    """Launches that this thread has prepared, in a dictionary by kernel, device and block.

    They are stored by thread identifier: Python forgets all thread-local data of OpenMP's and XLA's threads between two
    calls. A new thread with the identifier of an ended one inherits its launches.
    """
    number = threading.get_ident()
    found = _commands.get(number)
    return _commands.setdefault(number, {}) if found is None else found


def is_crowded() -> bool:
    """Whether other work keeps interrupting this thread, so that threads would only wait for each other."""
    return crowding.is_crowded()


# -- how many -------------------------------------------------------------------------------------


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_count: Callable[[], int] = available_cores


def set_thread_count(source: Callable[[], int]) -> None:
    """Call ``source`` for the number of CPU threads at each launch. The torch layer passes torch's setting."""
    global _count
    _count = source


def thread_count() -> int:
    """CPU threads that a gather-only launch may use now."""
    return max(1, _count())


# -- running a task -------------------------------------------------------------------------------

_openmp: Callable[[Task, int], None] | None = None


def set_openmp(run: Callable[[Task, int], None] | None) -> None:
    """Run tasks by ``run(task, threads)`` instead of the pool, for some calling threads; see `as_main_thread`.

    Threads of another library that wait for work in a busy loop occupy cores that a pool would need, so they should do
    the work.
    """
    global _openmp
    _openmp = run


def as_main_thread() -> AbstractContextManager[None]:
    """A context in which tasks of this thread run on its OpenMP threads, as tasks of the main thread do.

    For threads of a runtime, such as XLA's, of which only one calls at a time. All other threads share the pool.
    """
    return set_within(_thread, "has_openmp", True)


def _has_openmp() -> bool:
    return _thread.has_openmp or threading.get_ident() == threading.main_thread().ident


def run(task: Task, threads: int) -> None:
    """Run ``task`` in this many threads, including the calling one. Only if `may_share` is True."""
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
    """The pool, with at least this many threads."""
    global _pool, _pool_size
    with _pool_lock:
        if _pool is None or _pool_size < count:
            # a pool that is too small ends by itself once its queue is empty and no launch holds it
            _pool, _pool_size = ThreadPoolExecutor(count, "nvalchemiops"), count
        return _pool


def _run_in_pool(task: Task, threads: int) -> None:
    waiting: list[Future[None]] = []
    try:
        workers = pool(threads - 1)
        try:
            for _ in range(threads - 1):
                waiting.append(workers.submit(_work, task))
        except RuntimeError:  # the main thread has ended, or the system has no more threads: fewer threads do the work
            _end_pool(workers)
        task()
        waiting = [worker for worker in waiting if not worker.cancel()]  # the pieces are all taken
    finally:
        _wait_for_all(waiting)
    for worker in waiting:
        worker.result()


def _end_pool(workers: ThreadPoolExecutor) -> None:
    """Let no worker of this pool begin a piece later: what failed to start may still be in its queue."""
    global _pool, _pool_size
    with _pool_lock:
        if _pool is workers:
            _pool, _pool_size = None, 0
    workers.shutdown(cancel_futures=True)


def _work(task: Task) -> None:
    _thread.is_worker = True
    task()


def _wait_for_all(workers: Sequence[Future[Any]]) -> None:
    """Wait for all workers. Ctrl-C is raised only afterwards: arrays must outlive all pieces that write to them."""
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
