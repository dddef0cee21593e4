"""Forked processes: each has only the thread that forked, and another one may have held a lock."""

import os
from collections.abc import Callable
from typing import Any


def after_fork(action: Callable[[], None]) -> Callable[[], None]:
    """Call ``action`` in every forked child, where there is ``fork``; in the order of these calls. A decorator."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=action)
    return action


def fork_safe(lock: Any) -> Any:
    """``lock``, a ``threading.Lock`` or ``RLock``, which is free in every forked child. It is never forgotten.

    The state that it protects must be valid wherever another thread was stopped, and no thread may fork that holds it.
    """
    after_fork(lock._at_fork_reinit)
    return lock
