"""Detects whether threads save time at present. On a busy machine they may only wait for each other.

If the operating system suspends one of the threads of a launch, all others wait for it for milliseconds, while their
work takes a fraction of a millisecond. There are two signs of that:

- Launches that are shared among threads take as long as their work would take on one thread. If this was so for too
  many of the last launches, launches are not shared for a while. Then a few are shared again. Their times decide how
  long the next pause is.
- The operating system takes the processor away from this thread to run another one. It counts these interruptions, and
  the count is read at most a hundred times a second.

Results do not depend on the number of threads, to the last bit.
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
"""Time of a shared launch, relative to the work of its threads, up to which it is a gain. Two threads reach 0.55."""

REMEMBERED, MOST_IN_VAIN = 8, 2
"""If ``MOST_IN_VAIN`` of the last ``REMEMBERED`` shared launches had no gain, sharing stops for a while. Two in a row
happen when another process wakes up; on a quiet machine far less than one in a hundred has no gain."""

SHORTEST_PAUSE, LONGEST_PAUSE = 0.02, 1.0
"""Seconds for which launches are not shared. If another launch without a gain follows a pause, the next pause is twice
as long."""


WINDOW = 0.05
"""Shortest processor time of a thread, in seconds, over which interruptions are counted."""

CROWDED, QUIET = 100.0, 50.0
"""Interruptions per second of processor time above which a machine becomes crowded, and below which it no longer is.
Next to other busy processes there are hundreds, on a quiet machine about ten."""

LOOK = 0.01
"""Seconds between readings of the count. A reading takes a microsecond."""


class Usage(NamedTuple):
    """Processor time of a thread, and how often the system took the processor away from it."""

    seconds: float
    interruptions: int


def usage_of_thread() -> Usage | None:
    """The usage of the calling thread; None if the system does not report it."""
    if resource is None or not hasattr(resource, "RUSAGE_THREAD"):
        return None
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return Usage(usage.ru_utime + usage.ru_stime, usage.ru_nivcsw)


class Crowding:
    """Statistics of launches that were shared among threads, and of interruptions.

    Parameters
    ----------
    clock : callable
        Returns seconds since any origin.
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
        # by thread identifier: Python forgets all thread-local data of XLA's threads between two callbacks
        self.seen: dict[int, Usage] = {}

    def is_crowded(self) -> bool:
        """Whether the system keeps interrupting the calling threads."""
        now = self.clock()
        if now >= self.next_look:
            self.next_look = now + LOOK
            thread, usage = threading.get_ident(), self.usage()
            before = self.seen.get(thread)
            # a thread that has used less time than before is a new thread with the same identifier
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
            # one launch without a gain is kept, so that one more is enough for the next pause
            self.in_vain = deque([True], maxlen=REMEMBERED)
            self.until, self.pause = self.clock() + self.pause, min(2.0 * self.pause, LONGEST_PAUSE)
        elif len(self.in_vain) == REMEMBERED and not any(self.in_vain):
            self.pause, self.until = SHORTEST_PAUSE, 0.0
