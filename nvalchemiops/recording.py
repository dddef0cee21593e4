"""Recording launches on Warp tapes: one tape for each thread, where Warp has one for the process."""

import threading
from collections.abc import Sequence
from typing import Any

import warp as wp

from nvalchemiops._warp_internals import TapeRouter
from nvalchemiops.locks import after_fork, fork_safe


class NotDifferentiableError(RuntimeError):
    """A derivative was asked for that does not exist, or would silently be incomplete."""


class _OfThread(threading.local):
    """What this thread records."""

    tape: wp.Tape | None = None


_thread = _OfThread()
_lock = fork_safe(threading.RLock())
_recorders = 0
"""Threads that record at present."""


def active_tape() -> wp.Tape | None:
    """The tape that records this thread's launches, or None."""
    return _thread.tape


def refuse_tracked(kernel: wp.Kernel, arguments: Sequence[Any]) -> None:
    """Raise if a launch that a tape cannot differentiate gets arrays with gradients."""
    if any(isinstance(a, wp.array) and a.requires_grad for a in arguments):
        raise NotDifferentiableError(
            f"kernel '{kernel.key}' is launched inside a recording, on arrays with gradients, but it has no adjoint "
            "(enable_backward=False), or this launch is not recorded: its part of the gradient would be missing"
        )


_router = TapeRouter(active_tape, refuse_tracked)
"""Warp's tape while any thread records."""


class record:  # used as a context manager, named like a function
    """Record the launches of this thread, and of no other, on a new tape: ``with record() as tape``.

    Raises
    ------
    RuntimeError
        If this thread records already, or a plain ``with wp.Tape()`` is active: Warp has room for one tape per process.
    """

    def __enter__(self) -> wp.Tape:
        global _recorders
        if active_tape() is not None:
            raise RuntimeError("this thread records on a tape already; launches inside would be lost to it")
        with _lock:  # counted first: a call in the midst of this one leaves the router as it should be
            _recorders += 1
            if not _router.is_on():
                try:
                    _router.__enter__()
                except RuntimeError as error:
                    _recorders -= 1
                    raise RuntimeError(
                        "a wp.Tape is active around this torch operation; leave it first: torch's autograd "
                        "differentiates the operation, and Warp has room for one tape per process"
                    ) from error
        tape = _thread.tape = wp.Tape()
        return tape

    def __exit__(self, *error: object) -> None:
        global _recorders
        _thread.tape = None
        with _lock:
            _recorders -= 1
            if _recorders == 0 and _router.is_on():
                _router.__exit__(None, None, None)


@after_fork
def _forget_recorders() -> None:
    """No other thread than this one records in a forked child."""
    global _recorders
    mine = active_tape() is not None
    if _recorders and not mine:
        _router.__exit__(None, None, None)
    _recorders = int(mine)
