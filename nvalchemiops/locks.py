"""State shared between threads, forked processes, and calls that interrupt other calls.

A signal handler, or a finalizer that the garbage collector runs, may call this library between any two instructions of
a call in the same thread. The inner call ends before the outer one continues. So it must never wait for the outer call,
nor change data that the outer call is using:

- Memory and packed arguments that are kept for the next call belong to one call at a time. A call takes them out of
  their place (`Lent`), or marks them as in use. A call that finds them taken makes its own, or works without them.
- Cached results (`Kept`) are in dictionaries, without a lock: each access is a single operation.
- The remaining locks protect work for which other threads must wait. They are reentrant, and the state that they
  protect is valid at each step.

A forked process has only the thread that forked, while another thread may have held a lock.
"""

import operator
import os
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class Lent(Generic[Value]):
    """A value that each thread keeps for its next call, such as memory, and that only one call at a time uses.

    A value that is not given back, for example after an error, is dropped.

    Parameters
    ----------
    make : callable
        Makes a new value, for the first call of a thread, or for a call that interrupts another one.
    """

    def __init__(self, make: Callable[[], Value]) -> None:
        self.make = make
        self.kept = threading.local()

    def take(self) -> Value:
        """Take the value of this thread out of its place, or make a new one."""
        found: Value | None = self.kept.__dict__.pop("value", None)
        return self.make() if found is None else found

    def give(self, value: Value) -> None:
        """Keep ``value`` for the next call of this thread."""
        self.kept.value = value


class Kept(dict[Hashable, Value]):
    """A cache that keeps the most recently used values.

    Parameters
    ----------
    most : int
        How many values are kept.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def find(self, key: Hashable) -> Value | None:
        """The value for this key; None if it is not kept."""
        found = self.get(key)
        if found is not None:
            self.pop(key, None)
            self[key] = found  # the last one now
        return found

    def keep(self, key: Hashable, value: Value) -> list[Value]:
        """Keep ``value``. Return the values that are dropped for it, oldest first."""
        self[key] = value
        return self.drop(len(self) - self.most)

    def drop(self, count: int) -> list[Value]:
        """Drop this many of the oldest values, and return them."""
        oldest = [self.pop(key, None) for key in list(self)[:count]] if count > 0 else []
        return [value for value in oldest if value is not None]


@contextmanager
def set_within(thread: threading.local, name: str, value: Any) -> Iterator[None]:
    """A context in which an attribute of thread-local storage has this value."""
    before = getattr(thread, name, None)
    setattr(thread, name, value)
    try:
        yield
    finally:
        setattr(thread, name, before)


def hold_if_free(lock: Any, held: list[Any]) -> bool:
    """Whether this lock is free, which is then acquired and appended to ``held``, from which the caller releases it.

    Both are one call of C: an interrupt comes before it, or after it, when the caller finds the lock in ``held``.
    """
    held.extend(filter(_acquired, (lock,)))
    return bool(held)


_acquired = operator.methodcaller("acquire", blocking=False)


def after_fork(action: Callable[[], None]) -> Callable[[], None]:
    """Call ``action`` in every forked child, in the order of registration. A decorator."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=action)
    return action


def fork_safe(lock: Any) -> Any:
    """Make a ``threading.Lock`` or ``RLock`` free in every forked child, and return it. It is never garbage collected.

    The state that it protects must be valid at any instruction of another thread, and no thread may fork while it holds
    the lock.
    """
    after_fork(lock._at_fork_reinit)
    return lock
