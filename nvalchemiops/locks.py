"""Locks that a forked process can take: it has only the thread that forked, and another one may have held them."""

import os
from typing import Any


def fork_safe(lock: Any) -> Any:
    """``lock``, a ``threading.Lock`` or ``RLock``, which is free in every forked child. It is never forgotten.

    What it protects must be of use wherever another thread was stopped, and no thread may fork that holds it.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lock._at_fork_reinit)
    return lock
