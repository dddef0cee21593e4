"""What calls share: with other threads, with forked processes, and with calls in the midst of which they are.

A signal handler, or a finalizer that the garbage collector runs, may call this library while a call of the same thread
is between any two of its instructions. The inner call ends before the outer one goes on, so it must never wait for it,
nor change what the outer one is using:

- Memory and packed arguments that are kept for the next call belong to one call at a time. It takes them from where
  they are kept (`Lent`), or marks them as in use; a call that finds none makes its own, or takes the ordinary way.
- Results that are kept (`Kept`) are in dictionaries, of which each step is one operation, without a lock.
- What is left of locks is for work that another thread must wait for. They let in a thread that holds them already, and
  what they protect is valid at each step.

A forked process has only the thread that forked, and another one may have held a lock.
"""

import os
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class Lent(Generic[Value]):
    """What each thread keeps for its next call, such as memory, and one call at a time has.

    What is not given back, after an error say, is forgotten.

    Parameters
    ----------
    make : callable
        Makes another one, for the first call of a thread, or one in the midst of another.
    """

    def __init__(self, make: Callable[[], Value]) -> None:
        self.make = make
        self.kept = threading.local()

    def take(self) -> Value:
        """What this thread keeps, which it no longer keeps."""
        found: Value | None = self.kept.__dict__.pop("value", None)
        return self.make() if found is None else found

    def give(self, value: Value) -> None:
        """Keep ``value`` for the next call of this thread."""
        self.kept.value = value


class Kept(dict[Hashable, Value]):
    """Values by their keys, of which those are kept that were asked for last.

    Parameters
    ----------
    most : int
        How many are kept.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def find(self, key: Hashable) -> Value | None:
        """The value, if it is kept."""
        found = self.get(key)
        if found is not None:
            self.pop(key, None)
            self[key] = found  # the last one now
        return found

    def keep(self, key: Hashable, value: Value) -> list[Value]:
        """Keep ``value``; those that are no longer kept, oldest first."""
        self[key] = value
        return self.drop(len(self) - self.most)

    def drop(self, count: int) -> list[Value]:
        """Keep so many of the oldest values no longer; these values."""
        oldest = [self.pop(key, None) for key in list(self)[:count]] if count > 0 else []
        return [value for value in oldest if value is not None]


@contextmanager
def set_within(thread: threading.local, name: str, value: Any) -> Iterator[None]:
    """Inside, what this thread keeps by this name is ``value``."""
    before = getattr(thread, name, None)
    setattr(thread, name, value)
    try:
        yield
    finally:
        setattr(thread, name, before)


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
