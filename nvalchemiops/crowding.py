"""Whether threads gain anything at present: on a machine that others use as well, they may wait for each other.

A thread that the system does not run keeps all others of its launch waiting, for milliseconds, while the work takes
fractions of one. Two signs tell:

- The launches that were shared among threads took no less time than their work takes on one thread. If too many of the
  last ones did not, launches stay whole for a while; then a few are shared again, and decide for how long.
- The system takes the processor away from this thread, as it does only for the sake of another one. It counts how
  often, which is looked at some times a second.

Results do not depend on it, to the last bit.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

GAIN = 0.9
"""Time of a shared launch, in units of the work of all its threads, that counts as a gain. Two threads reach 0.55."""

REMEMBERED, MOST_IN_VAIN = 8, 2
"""Launches that are looked back on, and how many of them without a gain are too many. Two in a row happen when another
process wakes up; on a quiet machine far less than one in a hundred is in vain."""

SHORTEST_PAUSE, LONGEST_PAUSE = 0.02, 1.0
"""Seconds in which launches stay whole. Each pause that was followed by another launch in vain is doubled."""


WINDOW = 0.05
"""Seconds of processor time of a thread over which interruptions are counted, at least."""

CROWDED, QUIET = 100.0, 50.0
"""Interruptions for each second of processor time from which on a machine is crowded, and below which it no longer is.
Beside other processes there are hundreds, on a quiet machine about ten."""

LOOK = 0.01
"""Seconds after which the count is looked at again; that takes a microsecond."""


class Usage(NamedTuple):
    """Processor time of a thread, and how often the system took the processor away from it."""

    seconds: float
    interruptions: int


def usage_of_thread() -> Usage | None:
    """That of the calling thread, if the system tells."""
    if resource is None or not hasattr(resource, "RUSAGE_THREAD"):
        return None
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return Usage(usage.ru_utime + usage.ru_stime, usage.ru_nivcsw)


class Crowding:
    """Looks back on launches that were shared among threads, and on interruptions.

    Parameters
    ----------
    clock : callable
        Seconds from any origin.
    usage : callable
        `usage_of_thread`.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        usage: Callable[[], Usage | None] = usage_of_thread,
    ) -> None:
        self.clock, self.usage = clock, usage
        self.in_vain: deque[bool] = deque(maxlen=REMEMBERED)
        self.pause = SHORTEST_PAUSE
        self.until = 0.0
        self.interrupted = False
        self.next_look = 0.0
        # by the identifier of the thread: of one of XLA, Python forgets everything else between two callbacks
        self.seen: dict[int, Usage] = {}

    def is_crowded(self) -> bool:
        """Whether the system keeps interrupting the threads that ask."""
        now = self.clock()
        if now >= self.next_look:
            self.next_look = now + LOOK
            thread, usage = threading.get_ident(), self.usage()
            before = self.seen.get(thread)
            # a thread that has used less than before is another one with the same identifier
            if usage is not None and (before is None or usage.seconds < before.seconds):
                self.seen[thread] = usage
            elif usage is not None and before is not None and (spent := usage.seconds - before.seconds) >= WINDOW:
                self.seen[thread] = usage
                rate = (usage.interruptions - before.interruptions) / spent
                self.interrupted = rate >= (QUIET if self.interrupted else CROWDED)
        return self.interrupted

    def threads_gain(self) -> bool:
        """Whether the next launch should be shared."""
        return not self.is_crowded() and (self.until == 0.0 or self.clock() >= self.until)

    def note(self, wall: float, work: float) -> None:
        """Take account of a shared launch: its time, and the processor time of all threads on its pieces."""
        self.in_vain.append(wall > GAIN * work)
        if sum(self.in_vain) >= MOST_IN_VAIN:
            # one stays on record: the next one in vain is enough
            self.in_vain = deque([True], maxlen=REMEMBERED)
            self.until, self.pause = self.clock() + self.pause, min(2.0 * self.pause, LONGEST_PAUSE)
        elif len(self.in_vain) == REMEMBERED and not any(self.in_vain):
            self.pause, self.until = SHORTEST_PAUSE, 0.0
