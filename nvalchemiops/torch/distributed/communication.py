"""Communication between ranks with torch.distributed.

If one rank fails, the others must not wait for it forever. There are four cases:

- A rank raises: `nvalchemiops.torch.distributed.agreement` passes the error on to the others.
- A rank is gone, or does not answer within the timeout of the group (an argument of ``init_process_group``): the error
  of the others names it.
- Ranks wait in different places, because one of them was interrupted or has left out a call: they detect this through
  the store of the group.
- A rank raises between two messages, and others wait for it: see `nvalchemiops.torch.distributed.faults`.
"""

import contextlib
import ctypes
import functools
import json
import os
import pickle
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from nvalchemiops.threads import available_cores
from nvalchemiops.torch.distributed.works import Works
from nvalchemiops.torch.runtime.acts import act
from nvalchemiops.torch.runtime.context import eager, refuse_in_capture
from nvalchemiops.torch.runtime.memory import new_empty

PATIENCE = 2.0
"""Seconds in which ranks must report after a failure that they are still running."""


AWAKE = 0.005
"""Seconds for which a rank polls for a message before it sleeps until the message has arrived."""

LOOK = timedelta(seconds=1.0)
"""Interval at which a waiting rank compares its message with those of other ranks."""

RECENT = 16
"""How many of its last messages a rank shows to others. It may be ahead of them by messages for which it does not
wait."""

LARGEST_TAG = 2**31 - 1
"""Tags of messages are 32-bit integers."""

_AT, _APART, _LEFT = "nvalchemiops/at", "nvalchemiops/out of step", "nvalchemiops/left"
"""Keys in the store of a group: recent messages of a rank (its number follows), why ranks are out of step, and the last
scope that a rank has left by an error."""


class OtherRankError(RuntimeError):
    """Another rank failed, or the ranks are out of step."""


# -- the messages of a group ----------------------------------------------------------------------


class Messages:
    """The messages of a group that this rank has counted.

    All ranks must take part in the same messages in the same order. ``calls`` are those that this rank has begun, the
    last one at a ``place``, and ``count`` the messages in which it has taken part. ``out_of_step`` is why the group can
    exchange no more, empty while it can; ``scope`` the number of the last outermost block in which ranks fail together;
    ``left`` why this rank has left it, if by an error, until all ranks have agreed again; ``places`` pairs of different
    places from which ranks have made the same call, and about which they were warned; ``answers`` how often each rank
    had answered by the end of the last failure.
    """

    def __init__(self) -> None:
        self.calls, self.count, self.place, self.out_of_step = 0, 0, "", ""
        self.places: set[tuple[float, float]] = set()
        self.answers: list[int] = []
        # how often atoms were divided: plans of a domain are recorded again after that, for they may use the new one
        with torch.inference_mode(False):
            self.domains = torch.zeros(1, dtype=torch.int64, device="cpu")
        self.scope, self.left, self._depth, self._found = 0, "", 0, 0.0
        self._recent: deque[tuple[int, str, int, str]] = deque(maxlen=RECENT)

    def begin_call(self, place: str) -> None:
        """Note that this rank begins a call, made at this place."""
        self.calls, self.place = self.calls + 1, place

    def begin(self, kind: str) -> None:
        """Note that this rank takes part in a message."""
        if self.out_of_step:
            raise OtherRankError(self.out_of_step)
        self.count += 1
        self._recent.append((self.count, kind, self.calls, self.place))

    def level(self, count: int) -> None:
        """Set the message count, after ranks have told each other their counts."""
        self.count = count
        self._recent.clear()

    def leave(self, group: Any, why: str) -> None:
        """End the messages of the group. Other ranks learn this at their next `look`."""
        text = f"ranks are out of step: {why}. Go on with a new group (torch.distributed.new_group) and a Domain of it"
        with contextlib.suppress(RuntimeError, AttributeError):  # the process with the store is gone
            group.get_group_store().set(_APART, text)
        self._end(group, text)

    def enter(self) -> None:
        """Enter a block in which ranks fail together."""
        if self._depth == 0:
            self.scope, self._found = self.scope + 1, 0.0
        self._depth += 1

    def exit(self, there: "weakref.ref[Any]", error: BaseException | None) -> None:
        """Leave such a block. Ranks that wait in the outermost one learn of an ``error`` at their next `look`."""
        self._depth -= 1
        if self._depth or error is None or self.out_of_step or (group := there()) is None:
            return
        where = f"call {self.calls} ({self.place}) after {self.count} messages"
        self.left = f"rank {dist.get_rank()} failed in {where}: {type(error).__name__}: {error}"
        with contextlib.suppress(RuntimeError, AttributeError):  # the process with the store is gone
            group.get_group_store().set(_LEFT, json.dumps([dist.get_rank(group), self.scope, self.count, self.left]))

    def _who_left(self, group: Any, store: Any) -> str:
        """Why another rank has left this scope, so that it takes no part in this message; empty if none has."""
        if not self._depth or not store.check([_LEFT]):
            return ""
        rank, scope, count, why = json.loads(store.get(_LEFT))
        if scope != self.scope or count >= self.count or rank == dist.get_rank(group):
            return ""
        self._found = self._found or time.monotonic()
        return str(why)

    def _end(self, group: Any, why: str) -> None:
        if not self.out_of_step:
            # threads of the group wait until its timeout for messages that never come, and destroying the group waits
            # for these threads. So it is never destroyed: otherwise the end of the process would wait
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        self.out_of_step = why

    def show(self, group: Any) -> None:
        """Let others see the recent messages of this rank."""
        group.get_group_store().set(f"{_AT}/{dist.get_rank(group)}", json.dumps(list(self._recent)))

    def look(self, group: Any) -> None:
        """Compare messages with other waiting ranks; raise if a message of theirs differs from this rank's message."""
        try:
            store, rank, n_ranks = group.get_group_store(), dist.get_rank(group), dist.get_world_size(group)
            left = ""
            if store.check([_APART]):
                self._end(group, store.get(_APART).decode())
            else:
                self.show(group)
                left = self._who_left(group, store)
            # it may come back in the next call, with which ranks are in step again
            if left and time.monotonic() - self._found >= PATIENCE:
                self.leave(group, left)
            # if any two ranks differ, so do two adjacent ranks
            for other in {(rank + 1) % n_ranks, (rank - 1) % n_ranks} - {rank}:
                if not self.out_of_step and store.check([f"{_AT}/{other}"]):
                    self._compare(group, other, json.loads(store.get(f"{_AT}/{other}")), left)
        except (RuntimeError, AttributeError):  # the process with the store is gone
            return
        if self.out_of_step:
            raise OtherRankError(self.out_of_step)

    def _compare(self, group: Any, other: int, theirs: list[tuple[int, str, int, str]], left: str) -> None:
        """End the messages if a message of another rank differs; because a rank has ``left``, if one has."""
        ours = {number: what for number, *what in self._recent}
        for number, *what in theirs:
            if number in ours and ours[number][:2] != what[:2]:
                ranks = sorted([(dist.get_rank(group), ours[number]), (other, what)])
                told = " and ".join(
                    f"{kind} in call {call} ({place}) on rank {dist.get_global_rank(group, rank)}"
                    for rank, (kind, call, place) in ranks
                )
                told = f"the same message is {told}. One of them was interrupted, or has left out a call"
                self.leave(group, left or self.left or told)
                return


_messages: weakref.WeakKeyDictionary[Any, Messages] = weakref.WeakKeyDictionary()


def messages_of(group: Any) -> Messages:
    """The messages of a group."""
    found = _messages.get(group)
    return _messages.setdefault(group, Messages()) if found is None else found


def _backends(group: Any) -> dict[str, str]:
    """The backend of a group for each type of device; empty for a group that torch did not make."""
    try:
        return dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    except (TypeError, ValueError):
        return {}


def _goes_through_host(group: Any, device: torch.device) -> bool:
    """Whether messages between two ranks can only have tensors of a CPU, as with gloo, which reads others as such."""
    return device.type != "cpu" and _backends(group).get(device.type) == "gloo"


def check_backend(group: Any, device: torch.device) -> None:
    """Raise unless the group can send tensors of the atoms' device, if it is known for which devices it is."""
    known = _backends(group)
    if known and device.type not in known:
        raise ValueError(
            f"`positions` is on {device}, but `group` has a backend for {' and '.join(known)} only: move the atoms, or "
            'choose a backend for each device (init_process_group("cpu:gloo,cuda:nccl"))'
        )


# -- failures -------------------------------------------------------------------------------------


def _gone(group: Any) -> list[int]:
    """Global numbers of the ranks that no longer answer."""
    try:
        store, n_ranks = group.get_group_store(), dist.get_world_size(group)
        names = [f"nvalchemiops/here/{rank}" for rank in range(n_ranks)]
        store.add(names[dist.get_rank(group)], 1)
        time.sleep(PATIENCE)
        messages, answers = messages_of(group), [store.add(name, 0) for name in names]
        before = messages.answers or [0] * n_ranks
        messages.answers = answers
        return [dist.get_global_rank(group, rank) for rank in range(n_ranks) if answers[rank] == before[rank]]
    except (RuntimeError, AttributeError):  # the process with the store is gone
        return []


@functools.cache
def _has_cores(n_ranks: int) -> bool:
    """Whether each rank on this machine has a core, so that a polling rank takes no core from another."""
    on_this_machine = int(os.environ.get("LOCAL_WORLD_SIZE", n_ranks))
    return hasattr(os, "sched_yield") and on_this_machine <= available_cores()


def _wait(work: Any, tensor: torch.Tensor, group: Any, messages: Messages) -> None:
    """Wait for a message with this tensor.

    A sleeping core wakes up late, above all on virtual machines. So a rank first polls for a while, as MPI libraries
    do, and yields to threads with work.
    """
    if work is None:  # this rank is outside of the group
        return
    if tensor.device.type != "cpu":
        work.wait()
        return
    if _has_cores(dist.get_world_size(group)):
        end = time.perf_counter() + AWAKE
        while not work.is_completed() and time.perf_counter() < end:
            os.sched_yield()
    while True:
        was_completed = work.is_completed()  # asked before: a message may arrive after a wait that ends by its timeout
        try:
            work.wait(LOOK)
            return
        except RuntimeError:
            if was_completed:
                raise
        if not work.is_completed():
            messages.look(group)


@eager
def _take_part(
    kind: str,
    operation: Callable[..., Any],
    tensor: torch.Tensor,
    group: Any,
    writes: torch.Tensor | None = None,
    **options: Any,
) -> None:
    """Take part in a message of all ranks: run an operation of torch.distributed with this tensor, and wait for it.

    It ``writes`` into another tensor, or else into this one. If the message fails, the error names the ranks that are
    gone.
    """
    messages, there = messages_of(group), weakref.ref(group)  # a plan must not keep a group that is destroyed

    def send() -> None:
        group = present(there)
        with _named_failures(kind, group, messages):
            _wait(operation(tensor, group=group, async_op=True, **options), tensor, group, messages)

    act(functools.partial(messages.begin, kind), send, (tensor,), (tensor if writes is None else writes,))


def present(group: Callable[[], Any]) -> Any:
    """The group of a weak reference."""
    found = group()
    if found is None:
        raise RuntimeError("the process group of this `domain` no longer exists: destroy_process_group was called")
    return found


@contextlib.contextmanager
def _named_failures(kind: str, group: Any, messages: Messages) -> Iterator[None]:
    """Errors of a message name the ranks that are gone; other ranks learn of an interrupt."""
    try:
        yield
    except OtherRankError:
        raise
    except RuntimeError as error:
        gone = _gone(group)
        who = f"rank {', '.join(map(str, gone))} is gone or late" if gone else "communication with other ranks failed"
        raise OtherRankError(f"{who}: {error}") from error
    except BaseException as error:
        where = f"call {messages.calls} ({messages.place}) on rank {dist.get_rank()}"
        messages.leave(group, f"{type(error).__name__} ended {kind} in {where}")
        raise


# -- messages -------------------------------------------------------------------------------------


def add(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """Replace the tensor in place with the sum of the tensors of all ranks, and return it."""
    _take_part(f"a sum of {tensor.numel()} numbers", dist.all_reduce, tensor, group)
    return tensor


def maximum(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """Replace the tensor in place with the elementwise maximum of the tensors of all ranks, and return it."""
    _take_part(f"a maximum of {tensor.numel()} numbers", dist.all_reduce, tensor, group, op=dist.ReduceOp.MAX)
    return tensor


@eager
def begin_maximum(tensor: torch.Tensor, group: Any) -> Callable[[], list[Any]]:
    """Begin a maximum over all ranks without waiting for it; return a function that reads it on the host later.

    On a GPU the result is copied to the host behind the message. Who reads it waits for this copy only, and looks for
    failures of others meanwhile.
    """
    kind, messages = "a maximum to be read later", messages_of(group)
    messages.begin(kind)
    with _named_failures(kind, group, messages):
        work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group, async_op=True)
    copy, done = tensor, None
    if tensor.device.type != "cpu":
        work.wait()  # the stream waits, not the host
        copy, done = tensor.to("cpu", non_blocking=True), torch.cuda.Event()
        done.record(torch.cuda.current_stream(tensor.device))  # another device may be the current one

    @eager
    def read() -> list[Any]:
        with _named_failures(kind, group, messages):
            if done is None:
                _wait(work, tensor, group, messages)
            else:
                _wait_for(done, group, messages)
        return copy.tolist()

    return read


def _wait_for(done: torch.cuda.Event, group: Any, messages: Messages) -> None:
    """Wait for an event of a GPU."""
    looked = time.monotonic()
    while not done.query():
        time.sleep(0.0)
        if time.monotonic() - looked > LOOK.total_seconds():
            messages.look(group)
            looked = time.monotonic()


def on_device(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """Integers as an int64 tensor on a device, for which the host does not wait."""
    here = torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    return here.to(device, non_blocking=True)


def extremes(numbers: Sequence[float], group: Any, device: torch.device) -> tuple[list[float], list[float]]:
    """The maximum and the minimum of each number over all ranks.

    On a CPU the numbers are gathered, which no other message does. Gloo matches messages by kind and order, whatever
    their size: so a rank that is out of step waits here, instead of taking other numbers for these.
    """
    here = torch.tensor(numbers, dtype=torch.float64, device=device)
    if device.type == "cpu":
        found = _gathered("what ranks agree on", here, group).numpy()
        return found.max(0).tolist(), found.min(0).tolist()
    ends = maximum(torch.stack([here, -here]), group)
    return ends[0].tolist(), (-ends[1]).tolist()


def _gathered(kind: str, values: torch.Tensor, group: Any) -> torch.Tensor:
    """The values (n,) of all ranks, as (n_ranks, n)."""
    found = values.new_empty((dist.get_world_size(group), len(values)))
    _take_part(kind, functools.partial(dist.all_gather, list(found.unbind())), values, group, found)
    return found


def _in_bytes(what: Any, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(what)), dtype=torch.uint8).to(device)


def tell(what: Any, group: Any, device: torch.device) -> list[Any]:
    """Send an object to all ranks, and return the objects of all ranks."""
    said = _in_bytes(what, device)
    sizes = _gathered("what ranks tell", torch.tensor([len(said)], device=device), group).flatten().tolist()
    padded = said.new_zeros(max(sizes))
    padded[: len(said)] = said
    told = _gathered("what ranks tell", padded, group).cpu().numpy()
    return [pickle.loads(row[:size].tobytes()) for row, size in zip(told, sizes)]


def tell_from(rank: int, what: Any, group: Any, device: Any) -> Any:
    """Broadcast an object from one rank, given by its global number, to all ranks of the group."""
    is_here = dist.get_rank() == rank
    said = _in_bytes(what, device)
    size = torch.tensor([len(said)], device=device)
    _take_part("what a rank tells", dist.broadcast, size, group, src=rank)
    if not is_here:
        said = said.new_empty(int(size))
    _take_part("what a rank tells", dist.broadcast, said, group, src=rank)
    return what if is_here else pickle.loads(said.cpu().numpy().tobytes())


def swap_rows(
    values: torch.Tensor,
    send: Sequence[int],
    receive: Sequence[int],
    group: Any,
    partners: Sequence[int],
) -> torch.Tensor:
    """Send rows to some ranks and return rows from them; see `collectives.rows_from_partners`.

    Only ranks that get rows get a message, but all ranks of the group take part, also those without partners.
    """
    rows = new_empty((sum(receive), *values.shape[1:]), values.dtype, values.device)
    values = values.contiguous()
    parts = list(zip(partners, values.split(list(send)), rows.split(list(receive)), strict=True))
    _take_part("rows", functools.partial(_swap, parts), values, group, rows)
    return rows


def _swap(
    parts: Sequence[tuple[int, torch.Tensor, torch.Tensor]], values: torch.Tensor, group: Any, async_op: bool
) -> Works:
    """Begin to send and to receive; ``parts`` are partners with what they get and what comes from them."""
    here, operations = dist.get_rank(group), []
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    if through_host := _goes_through_host(group, values.device):
        refuse_in_capture(values, "ranks need the backend nccl for this device")
    # gloo takes messages with different tags not for each other: ranks that are out of step wait, and find it out
    tag = messages_of(group).count % LARGEST_TAG
    for partner, sent, received in parts:
        if partner == here:
            received.copy_(sent)
            continue
        if through_host:
            copies.append((received, torch.empty_like(received, device="cpu")))
            received, sent = copies[-1][1], sent.cpu()
        for operation, part in ((dist.irecv, received), (dist.isend, sent)):
            if part.numel():
                operations.append(dist.P2POp(operation, part, group=group, tag=tag, group_peer=partner))
    on_host = through_host or values.device.type == "cpu"
    return Works(dist.batch_isend_irecv(operations) if operations else (), on_host, copies)
