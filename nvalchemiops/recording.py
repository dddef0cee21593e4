"""Recording launches on Warp tapes. Each thread has its own tape, while Warp has one tape per process."""

import threading
from collections.abc import Sequence
from typing import Any

import warp as wp

from nvalchemiops._warp_internals import TapeRouter
from nvalchemiops.locks import after_fork, fork_safe


class NotDifferentiableError(RuntimeError):
    """A requested derivative does not exist, or would silently be incomplete."""


class _OfThread(threading.local):
    """The tape of this thread."""

    tape: wp.Tape | None = None


_thread = _OfThread()
_lock = fork_safe(threading.RLock())
_recorders = 0
"""Number of threads that record at present."""


def active_tape() -> wp.Tape | None:
    """The tape that records this thread's launches, or None."""
    return _thread.tape


def refuse_tracked(kernel: wp.Kernel, arguments: Sequence[Any]) -> None:
    """Raise if a launch that a tape cannot differentiate has arrays with gradients among its arguments."""
    if any(isinstance(a, wp.array) and a.requires_grad for a in arguments):
        raise NotDifferentiableError(
            f"kernel '{kernel.key}' is launched inside a recording, on arrays with gradients, but it has no adjoint "
            "(enable_backward=False) or this launch is not recorded, so its part of the gradient would be missing"
        )


_router = TapeRouter(active_tape, refuse_tracked)
"""The object that is Warp's current tape while any thread records."""


class record:  # used as a context manager, named like a function
    """Record the launches of this thread only, on a new tape: ``with record() as tape``.

    Raises
    ------
    RuntimeError
        If this thread already records, or a plain ``with wp.Tape()`` is active: Warp supports one tape per process.
    """

    def __enter__(self) -> wp.Tape:
        global _recorders
        if active_tape() is not None:
            raise RuntimeError("this thread already records on a tape, which would miss the launches inside")
        with _lock:  # counted first, so that a call that interrupts this one leaves the router active
            _recorders += 1
            if not _router.is_on():
                try:
                    _router.__enter__()
                except RuntimeError as error:
                    _recorders -= 1
                    raise RuntimeError(
                        "a wp.Tape is active around this torch operation; leave it first: torch's autograd "
                        "differentiates the operation, and Warp supports one tape per process"
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
    """In a forked child, only the thread that forked may still record."""
    global _recorders
    mine = active_tape() is not None
    if _recorders and not mine:
        _router.__exit__(None, None, None)
    _recorders = int(mine)
