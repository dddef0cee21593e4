"""Plans that are kept: those of functions, and those of an object for its methods."""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch

from nvalchemiops.layout import layout
from nvalchemiops.locks import Kept, set_within
from nvalchemiops.torch.runtime import plans

MOST_BYTES, MOST_BYTES_ON_GPU = 2**28, 2**31
"""Memory of all plans of a table, on a CPU and on a GPU; those that ran longest ago go first."""

MOST_KINDS = 256
"""Kinds of calls that a table counts."""

PAID = 16
"""Calls after which a plan has saved the time that its recording took, which is that of several calls."""

Method = TypeVar("Method", bound=Callable[..., Any])


class Entry:
    """The plan of a kind of calls, or why there is none."""

    def __init__(self, plan: plans.Plan | None, reason: str, prepared: Sequence[torch.Tensor], body: Any) -> None:
        self.plan, self.reason = plan, reason
        self.body = body  # which the end of the call uses
        self.prepared = prepared  # kept, so that no other tensor gets their identity
        # a graph uses them where they are, with the values that they have then
        self.compared = [t for t in prepared if layout(t.device.type).reads]
        self.values = [t.detach().clone() for t in self.compared]
        self.n_bytes = 0
        self.is_graph = plan is not None and plan.is_graph
        if plan is not None:
            beside = [t.untyped_storage().nbytes() for t in (*prepared, *self.values, *plan.external)]
            self.n_bytes = plan.n_bytes + sum(beside)

    def is_as_recorded(self) -> bool:
        """Whether prepared data have the values that they had when the plan was made."""
        return all(map(torch.equal, self.compared, self.values))


class Plans:
    """Plans of calls, up to a limit of memory.

    Recordings are bought with credit, which replays earn: where plans are soon given up, as when each cell is there for
    a few calls, only a call that is repeated often is recorded, and time is never lost for long.

    Parameters
    ----------
    most_bytes, most_bytes_on_gpu : int, optional
    """

    def __init__(self, most_bytes: int = MOST_BYTES, most_bytes_on_gpu: int = MOST_BYTES_ON_GPU) -> None:
        self.most_bytes, self.most_bytes_on_gpu = most_bytes, most_bytes_on_gpu
        self.entries: Kept[Entry] = Kept(MOST_KINDS)
        self.counts: dict[Hashable, int] = {}
        self.tracked: Kept[tuple[bool, ...]] = Kept(MOST_KINDS)
        """By kinds of calls and inputs that require gradients: which results do."""
        self.credit = 8 * PAID
        self.recorded = self.replayed = 0

    def obstacle(self, key: Hashable) -> str:
        """Why a call of this kind, which has no plan, is not recorded; an empty string if it is. Counts the call."""
        count = self.counts.pop(key, 0) + 1
        if count == 1 or (count < PAID and self.credit < PAID):
            if len(self.counts) >= MOST_KINDS:
                self.counts.clear()
            self.counts[key] = count
            if count == 1:
                return "calls are recorded when they come again"
            return f"recordings have not paid off lately: calls are recorded when they come for the {PAID}th time"
        self.credit = max(self.credit - PAID, 0)
        return ""

    def earn(self) -> None:
        """Count a plan that was replayed."""
        self.replayed += 1
        self.credit = min(self.credit + 1, 8 * PAID)

    def keep(self, key: Hashable, entry: Entry) -> None:
        """Keep the plan of a call."""
        self.entries.keep(key, entry)
        self.recorded += entry.plan is not None
        self.fit()

    def fit(self) -> None:
        """Forget plans until they have no more memory than they may."""
        most = {False: self.most_bytes, True: self.most_bytes_on_gpu}
        while len(self.entries) > 1 and any([self.n_bytes(on_gpu) > limit for on_gpu, limit in most.items()]):
            self.entries.drop(1)

    def n_bytes(self, on_gpu: bool) -> int:
        """Memory of all plans, on a GPU or elsewhere."""
        return sum([entry.n_bytes for entry in list(self.entries.values()) if entry.is_graph is on_gpu])

    def clear(self) -> None:
        """Forget all plans."""
        self.entries.clear()
        self.counts.clear()
        self.tracked.clear()
        self.credit = 8 * PAID

    def __reduce__(self) -> Any:
        return Plans, (self.most_bytes, self.most_bytes_on_gpu)


everywhere = Plans()
"""Of functions; modules have their own."""

enabled = os.environ.get("NVALCHEMIOPS_PLANS", "1") != "0"
"""Whether there are plans, in all threads."""


class _OfThread(threading.local):
    """Plans of calls of this thread."""

    table: Plans | None = None
    is_off = False


_thread = _OfThread()


def are_off() -> bool:
    """Whether calls of this thread have no plans."""
    return not enabled or _thread.is_off


def current() -> Plans:
    """Where plans of calls of this thread are kept."""
    return _thread.table or everywhere


def with_own_plans(method: Method) -> Method:
    """A method that is called by users, of an object whose plans go with it. A decorator."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return method(self, *args, **kwargs)
        table = self.__dict__.get(OWN)
        if table is None:
            table = self.__dict__[OWN] = Plans()
        before, _thread.table = _thread.table, table
        try:
            return method(self, *args, **kwargs)
        finally:
            _thread.table = before

    return call  # type: ignore[return-value]  # it is called like the method


OWN = "_plans"
"""The attribute of an object with its plans."""


def off() -> contextlib.AbstractContextManager[None]:
    """Inside, calls of this thread have no plans."""
    return set_within(_thread, "is_off", True)
