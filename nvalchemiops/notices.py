"""Warnings about results that are probably not those that the caller meant.

Each is shown once for a line of the caller's code. One line silences them all::

    warnings.simplefilter("ignore", nvalchemiops.NvalchemiopsWarning)
"""

import itertools
import sys
import threading
import warnings
from contextlib import AbstractContextManager

from nvalchemiops.locks import set_within

_NOT_CALLERS = ("nvalchemiops", "torch")
"""Packages whose code is not the caller's; torch calls modules."""


class NvalchemiopsWarning(UserWarning):
    """The result is correct for the arguments, which are probably not those that were meant."""


class AccuracyWarning(NvalchemiopsWarning):
    """Parameters, precision or a neighbor list do not reach the accuracy that was asked for."""


class NeighborListWarning(NvalchemiopsWarning):
    """A neighbor list is not what was asked for: rows need more room than was given, or one direction is missing."""


_shown: set[tuple[object, ...]] = set()
"""Python keeps such a record itself, but forgets it after ``warnings.catch_warnings``."""


_count = itertools.count()
_counted = 0


def count() -> int:
    """How often `notify` was called in this process: whether a call might warn when it is made again."""
    return _counted


class _OfThread(threading.local):
    """Whether notices of this thread are said."""

    is_unsaid = False


_thread = _OfThread()


def unsaid() -> AbstractContextManager[None]:
    """Inside, this thread warns of nothing: a call before has done so."""
    return set_within(_thread, "is_unsaid", True)


def notify(message: str, category: type[NvalchemiopsWarning], kind: str | None = None) -> None:
    """Warn the caller of this package, once for a line of their code, or as often as their filters say.

    Torch code must not come here while it is compiled.

    Parameters
    ----------
    message : str
    category : type
    kind : str, optional
        A common key for messages that differ in numbers; the message itself by default.
    """
    global _counted
    _counted = next(_count) + 1
    if _thread.is_unsaid:
        return
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _NOT_CALLERS:
        frame = frame.f_back
    place = (frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__", "<unknown>"))
    key = (category, kind or message, *place)
    action = _action(message, category, place[2], place[1])
    if action == "ignore" or (key in _shown and action not in ("always", "all", "error")):
        return
    _shown.add(key)
    warnings.warn_explicit(message, category, *place, registry={})


def _action(message: str, category: type[Warning], module: str, line: int) -> str:
    """What the filters say of this warning."""
    for action, of_message, of_category, of_module, of_line in warnings.filters:
        if (
            issubclass(category, of_category)
            and (of_message is None or of_message.match(message))
            and (of_module is None or of_module.match(module))
            and of_line in (0, line)
        ):
            return action
    return "default"
