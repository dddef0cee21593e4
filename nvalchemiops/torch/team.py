"""Kernels on the threads that torch's own operations run on.

After an operation, the threads of GNU OpenMP wait for the next one in a loop, for some milliseconds. That is cheap for
torch, but any other thread has to share a core with them meanwhile. So pieces of a launch are given to these threads.
"""

import ctypes
import threading
from typing import Any

from nvalchemiops import launch as core

LIBRARY = "libgomp"
"""The one OpenMP whose entry points are known here."""


class Team:
    """Runs a task in the calling thread and in threads of OpenMP; for one calling thread."""

    def __init__(self, library: ctypes.CDLL) -> None:
        kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        self.parallel = library.GOMP_parallel
        self.parallel.argtypes = [kind, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        self.parallel.restype = None
        self.entry = kind(self.enter)
        self.commands: dict[int, dict[Any, Any]] = {}
        self.task: core.Task | None = None
        self.caller = 0
        self.errors: list[BaseException] = []

    def __call__(self, task: core.Task, threads: int) -> None:
        """Run ``task`` in as many threads, this one among them."""
        self.task, self.caller, self.errors = task, threading.get_ident(), []
        try:
            self.parallel(self.entry, None, threads, 0)
        finally:
            self.task = None
        if self.errors:
            raise self.errors[0]

    def enter(self, _: Any) -> None:
        """What each thread of the team does. Python knows threads of OpenMP only while they are here."""
        task, number = self.task, threading.get_ident()
        try:
            if task is None:
                return
            if number != self.caller:
                core.enter_as_worker(self.commands.setdefault(number, {}))
            task()
        except BaseException as error:
            self.errors.append(error)


def torch_team() -> Team | None:
    """The team of the OpenMP library that torch has loaded, if it is GNU's and can be found."""
    try:
        with open("/proc/self/maps") as maps:
            loaded = {line.split()[-1] for line in maps if LIBRARY in line}
        # other packages may bring a copy of their own
        mine = [path for path in loaded if "torch" in path] or list(loaded)
        return Team(ctypes.CDLL(mine[0])) if len(mine) == 1 else None
    except (OSError, AttributeError):
        return None
