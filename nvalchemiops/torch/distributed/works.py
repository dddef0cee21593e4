"""Messages with several ranks as one piece of work, for which the host can wait with a timeout.

Gloo does not tell whether a message between two ranks has arrived, and a wait that ends by a timeout closes all of its
connections. So on a CPU a thread waits for such messages, as a thread of gloo does for the messages of all ranks.
"""

import atexit
import contextlib
import queue
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from nvalchemiops.locks import after_fork


class Works:
    """Several works of torch.distributed, which begin at once, as one.

    The host waits for those of tensors on a CPU; for others the stream of a GPU does, and not the host. ``copies`` are
    pairs of tensors: where to copy what has come to the host, at the end of the first wait.
    """

    def __init__(
        self, works: Sequence[Any], on_host: bool, copies: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    ) -> None:
        self._works, self._on_host, self._copies = works, on_host, copies
        self._error: BaseException | None = None
        self._done = threading.Event()
        if on_host and works:
            _busy.add(self)
            (_idle.pop() if _idle else _new_thread()).put(self)
        elif on_host:
            self._done.set()

    def is_completed(self) -> bool:
        """Whether all are done, or one has failed; of tensors on a CPU."""
        return self._done.is_set()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait for all. Raises a RuntimeError if one has failed, or on a CPU after the timeout."""
        if not self._on_host:
            for work in self._works:
                work.wait()
        elif not self._done.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError(f"no messages in {timeout}")
        elif self._error is not None:
            raise RuntimeError(str(self._error)) from self._error
        copies, self._copies = self._copies, ()
        for received, here in copies:
            received.copy_(here)

    def finish(self, tasks: "Tasks") -> None:
        """Wait in a thread, which has these tasks and is then free for others."""
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            self._error = error
        self._works = ()  # frees what was sent
        _idle.append(tasks)
        _busy.discard(self)
        self._done.set()


PATIENCE_AT_EXIT = 5.0
"""Seconds to wait for messages when the process ends."""

Tasks = queue.SimpleQueue[Works]

_idle: list[Tasks] = []
"""The tasks of threads that have none. A thread whose messages never come waits until the timeout of their group."""


_busy: set[Works] = set()
"""Works for which threads wait."""


@atexit.register
def _end_waiting() -> None:
    """Let threads whose messages never come return from torch, before Python is finalized.

    Python ends a daemon thread that comes back to it too late. That would end the process by an abort, in a function of
    C++ that must not be left in this way.
    """
    for waiting in list(_busy):
        for work in waiting._works:  # a wait that ends by a timeout closes the connections, which ends the others
            with contextlib.suppress(RuntimeError):
                work.wait(timedelta(milliseconds=1))
    end = time.monotonic() + PATIENCE_AT_EXIT
    while _busy and time.monotonic() < end:
        time.sleep(0.01)


def _new_thread() -> Tasks:
    tasks: Tasks = queue.SimpleQueue()
    threading.Thread(target=_serve, args=(tasks,), name="nvalchemiops messages", daemon=True).start()
    return tasks


def _serve(tasks: Tasks) -> None:
    while True:
        tasks.get().finish(tasks)


after_fork(_idle.clear)  # a child process has no threads
after_fork(_busy.clear)
