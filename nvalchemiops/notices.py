"""Warnings about arguments that are valid but probably not intended.

Each is shown once for each line of the caller's code. One line silences all of them::

    warnings.simplefilter("ignore", nvalchemiops.NvalchemiopsWarning)
"""

import itertools
import sys
import threading
import warnings
from contextlib import AbstractContextManager

from nvalchemiops.locks import set_within

_NOT_CALLERS = ("nvalchemiops", "torch", "ase")
"""Packages whose code does not count as the caller's. Torch calls modules, and ASE calls calculators."""


class NvalchemiopsWarning(UserWarning):
    """The result is correct for the arguments, but the arguments are probably not intended."""


class AccuracyWarning(NvalchemiopsWarning):
    """Parameters, precision or a neighbor list do not reach the requested accuracy."""


class NeighborListWarning(NvalchemiopsWarning):
    """A neighbor list is not as requested: rows are wider than the given size, or one direction is missing."""


_shown: set[tuple[object, ...]] = set()
"""Warnings that were shown, and checks. Python's own record of them is lost after ``warnings.catch_warnings``."""


_count = itertools.count()
_counted = 0


def count() -> int:
    """How often `notify` was called in this process, from which a caller can tell whether a call has warned."""
    return _counted


class _OfThread(threading.local):
    """Whether warnings of this thread are suppressed."""

    is_unsaid = False


_thread = _OfThread()


def unsaid() -> AbstractContextManager[None]:
    """A context in which this thread does not warn, since an earlier call has done so."""
    return set_within(_thread, "is_unsaid", True)


def notify(message: str, category: type[NvalchemiopsWarning], kind: str | None = None) -> None:
    """Warn the caller of this package, once for each line of their code, or as often as their filters say.

    Must not be called in code that ``torch.compile`` traces.

    Parameters
    ----------
    message : str
    category : type
    kind : str, optional
        A common key for messages that differ only in numbers; by default the message itself.
    """
    global _counted
    _counted = next(_count) + 1
    if _thread.is_unsaid:
        return
    place = line_of_caller()
    key = (category, kind or message, *place)
    if _is_due(key, _action(message, category, place[2], place[1])):
        warnings.warn_explicit(message, category, *place, registry={})


def is_first(category: type[NvalchemiopsWarning], *kind: object) -> bool:
    """Whether an expensive check is due, which may lead to a warning: as often as a warning of this kind would be."""
    place = line_of_caller()
    return not _thread.is_unsaid and _is_due((category, kind, *place), _action("", category, place[2], place[1]))


def _is_due(key: tuple[object, ...], action: str) -> bool:
    """Whether a warning or a check with this key is new, or repeated if the filters say ``action``."""
    if action == "ignore" or (key in _shown and action not in ("always", "all", "error")):
        return False
    _shown.add(key)
    return True


def line_of_caller(*besides: str) -> tuple[str, int, str]:
    """File, line and module of the code that has called this package; ``besides`` are packages that it goes through."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in (*_NOT_CALLERS, *besides):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__", "<unknown>")


def _action(message: str, category: type[Warning], module: str, line: int) -> str:
    """The action that the filters specify for this warning."""
    for action, of_message, of_category, of_module, of_line in warnings.filters:
        if (
            issubclass(category, of_category)
            and (of_message is None or of_message.match(message))
            and (of_module is None or of_module.match(module))
            and of_line in (0, line)
        ):
            return action
    return "default"
