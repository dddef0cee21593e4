"""A call in the midst of another in the same thread, as a signal handler or a finalizer makes it.

Python runs handlers of signals, and finalizers of objects that the garbage collector finds, between any two of its
instructions. Tracing does the same at places that are chosen, and again and again the same ones.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import nvalchemiops

PACKAGE = str(Path(nvalchemiops.__file__).parent)


class Interrupted:
    """Calls ``inner`` at some of the lines of the package that ``outer`` comes to, counted from zero.

    Parameters
    ----------
    outer, inner : callable
    chosen : callable
        Whether the line with this number is one of these places.
    within : str
        Only lines of files whose path ends so.
    by_instruction : bool
        Instructions of Python in the place of lines.
    """

    def __init__(
        self,
        outer: Callable[[], Any],
        inner: Callable[[], Any],
        chosen: Callable[[int], bool],
        within: str = "",
        by_instruction: bool = False,
    ) -> None:
        self.outer, self.inner, self.chosen, self.within = outer, inner, chosen, within
        self.event = "opcode" if by_instruction else "line"
        self.count = 0
        self.found: list[Any] = []
        """What ``inner`` returned each time, or the exception that it raised."""
        self.places: list[str] = []

    def __call__(self) -> Any:
        """The result of ``outer``."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            return self.outer()
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not (frame.f_code.co_filename.startswith(PACKAGE) and frame.f_code.co_filename.endswith(self.within)):
            return None
        frame.f_trace_opcodes = self.event == "opcode"
        return self._at

    def _at(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == self.event:
            number, self.count = self.count, self.count + 1
            if self.chosen(number):
                self.places.append(f"{frame.f_code.co_filename[len(PACKAGE) + 1 :]}:{frame.f_lineno}")
                try:
                    self.found.append(self.inner())
                except BaseException as error:
                    self.found.append(error)
        return self._at
