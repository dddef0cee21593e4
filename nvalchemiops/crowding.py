"""Whether threads gain anything at present: on a machine that others use as well, they may wait for each other.

A thread that the system does not run keeps all others of its launch waiting, for milliseconds, while the work takes
fractions of one. So the launches that were shared among threads tell whether they took less time than their work takes
on one thread. If too many of the last ones did not, launches stay whole for a while; then a few are shared again, and
decide for how long. Results do not depend on it, to the last bit.
"""

import time
from collections import deque
from collections.abc import Callable

GAIN = 0.9
"""Time of a shared launch, in units of the work of all its threads, that counts as a gain. Two threads reach 0.55."""

REMEMBERED, MOST_IN_VAIN = 8, 2
"""Launches that are looked back on, and how many of them without a gain are too many. Two in a row happen when another
process wakes up; on a quiet machine far less than one in a hundred is in vain."""

SHORTEST_PAUSE, LONGEST_PAUSE = 0.02, 1.0
"""Seconds in which launches stay whole. Each pause that was followed by another launch in vain is doubled."""


class Crowding:
    """Looks back on launches that were shared among threads.

    Parameters
    ----------
    clock : callable
        Seconds from any origin.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.in_vain: deque[bool] = deque(maxlen=REMEMBERED)
        self.pause = SHORTEST_PAUSE
        self.until = 0.0

    def threads_gain(self) -> bool:
        """Whether the next launch should be shared."""
        return self.until == 0.0 or self.clock() >= self.until

    def note(self, wall: float, work: float) -> None:
        """Take account of a shared launch: its time, and the processor time of all threads on its pieces."""
        self.in_vain.append(wall > GAIN * work)
        if sum(self.in_vain) >= MOST_IN_VAIN:
            # one stays on record: the next one in vain is enough
            self.in_vain = deque([True], maxlen=REMEMBERED)
            self.until, self.pause = self.clock() + self.pause, min(2.0 * self.pause, LONGEST_PAUSE)
        elif len(self.in_vain) == REMEMBERED and not any(self.in_vain):
            self.pause, self.until = SHORTEST_PAUSE, 0.0
