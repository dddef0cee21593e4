"""Tables of kept plans: one for all functions, and one for each object with planned methods."""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch

from nvalchemiops.layout import layout
from nvalchemiops.locks import Kept, set_within
from nvalchemiops.torch.runtime import graphs, plans
from nvalchemiops.torch.runtime.storage import storage_of

MOST_BYTES = 2**28
"""Largest memory of all plans of a table on a CPU; on GPUs it is twice that of one plan (`graphs.most_bytes`).

The least recently used plans are dropped first."""

MOST_KINDS = 256
"""Largest number of kinds of calls that a table counts."""

PAID = 16
"""Number of replays that save as much time as a recording takes."""

MOST_CREDIT = 8 * PAID
"""Recordings of an operation that need not pay off, in replays."""

Method = TypeVar("Method", bound=Callable[..., Any])


class Entry:
    """The plan of a kind of calls, or the reason why it has none."""

    def __init__(self, plan: plans.Plan | None, reason: str, prepared: Sequence[torch.Tensor], body: Any) -> None:
        self.plan, self.reason = plan, reason
        self.body = body  # for `Call.end`
        self.prepared = prepared  # kept, so that no other tensor gets the same id
        # on a GPU a graph uses them in place, with their present values
        self.compared = [t for t in prepared if layout(t.device.type).reads]
        self.values = [t.detach().clone() for t in self.compared]
        self.n_bytes = 0
        self.place = None if plan is None else plan.place
        if plan is not None:
            beside = {storage_of(t): t.untyped_storage().nbytes() for t in (*prepared, *self.values, *plan.external)}
            self.n_bytes = plan.n_bytes + sum(beside.values())

    def is_as_recorded(self) -> bool:
        """Whether prepared data have the values that they had when the plan was made."""
        return all(map(torch.equal, self.compared, self.values))


class Plans:
    """Plans of calls, up to a limit of memory.

    A recording costs credit, and each replay earns some. If plans of an operation are soon of no use, for example
    because the cell changes after a few calls, its credit runs out, and only calls that repeat often are recorded.

    Parameters
    ----------
    most_bytes, most_bytes_on_gpu : int, optional
    """

    def __init__(self, most_bytes: int = MOST_BYTES, most_bytes_on_gpu: int | None = None) -> None:
        self.most_bytes, self.most_bytes_on_gpu = most_bytes, most_bytes_on_gpu
        self.entries: Kept[Entry] = Kept(MOST_KINDS)
        self.counts: dict[Hashable, int] = {}
        self.tracked: Kept[tuple[bool, ...]] = Kept(MOST_KINDS)
        """For a kind of calls and the inputs that require gradients: which results require gradients."""
        self.credit: dict[str, int] = {}
        """By operation; at first `MOST_CREDIT`."""
        self.recorded = self.replayed = 0

    def obstacle(self, name: str, key: Hashable) -> str:
        """Count a call of this kind. Return why it is not recorded, or an empty string if it is to be recorded.

        ``name`` is that of the operation.
        """
        count, credit = self.counts.pop(key, 0) + 1, self.credit.get(name, MOST_CREDIT)
        if count == 1 or (count < PAID and credit < PAID):
            if len(self.counts) >= MOST_KINDS:
                self.counts.clear()
            self.counts[key] = count
            if count == 1:
                return "calls are recorded when they repeat"
            return f"recordings have not paid off lately: calls are recorded when they repeat for the {PAID}th time"
        self.credit[name] = max(credit - PAID, 0)
        return ""

    def earn(self, name: str) -> None:
        """Count a replay of this operation."""
        self.replayed += 1
        self.credit[name] = min(self.credit.get(name, MOST_CREDIT) + 1, MOST_CREDIT)

    def keep(self, key: Hashable, entry: Entry) -> None:
        """Keep the plan of a call."""
        self.entries.keep(key, entry)
        self.recorded += entry.plan is not None
        self.fit()

    def fit(self) -> None:
        """Delete plans until their memory is within the limits."""
        on_gpu = self.most_bytes_on_gpu
        if on_gpu is None:
            places = {entry.place for entry in list(self.entries.values())}
            on_gpu = 2 * max([graphs.most_bytes(place) for place in places if place], default=0)
        most = {False: self.most_bytes, True: on_gpu}
        while len(self.entries) > 1 and any([self.n_bytes(of_gpu) > limit for of_gpu, limit in most.items()]):
            self.entries.drop(1)

    def drop_graph(self, device: torch.device) -> bool:
        """Delete the least recently used plan on this GPU; False if there is none."""
        for key, entry in list(self.entries.items()):
            if entry.place == device:
                self.entries.pop(key, None)
                return True
        return False

    def n_bytes(self, on_gpu: bool) -> int:
        """Memory of all plans on a GPU, or of all plans on a CPU."""
        return sum([entry.n_bytes for entry in list(self.entries.values()) if bool(entry.place) is on_gpu])

    def clear(self) -> None:
        """Delete all plans."""
        self.entries.clear()
        self.counts.clear()
        self.tracked.clear()
        self.credit.clear()

    def __reduce__(self) -> Any:
        return Plans, (self.most_bytes, self.most_bytes_on_gpu)


everywhere = Plans()
"""The table of plans of functions. Modules have their own."""

enabled = os.environ.get("NVALCHEMIOPS_PLANS", "1") != "0"
"""Whether plans are used at all, in all threads."""


class _OfThread(threading.local):
    """The table that this thread uses at present, and whether its plans are switched off."""

    table: Plans | None = None
    is_off = False


_thread = _OfThread()


def are_off() -> bool:
    """Whether plans are switched off in this thread."""
    return not enabled or _thread.is_off


def current() -> Plans:
    """The table that keeps the plans of this thread's calls."""
    return _thread.table or everywhere


def with_own_plans(method: Method) -> Method:
    """Keep the plans of a public method with its object, so that they are freed together. A decorator."""

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

    return call  # type: ignore[return-value]  # it has the signature of the method


OWN = "_plans"
"""The attribute of an object that holds its plans."""


def off() -> contextlib.AbstractContextManager[None]:
    """A context in which calls of this thread have no plans."""
    return set_within(_thread, "is_off", True)
