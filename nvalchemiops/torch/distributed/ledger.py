"""What ranks have to agree on, kept on the device, and read by the host later or on demand.

With ``check="each"`` a domain compares what ranks have found in each call, before the call goes on
(`nvalchemiops.torch.distributed.agreement`): the host waits for one message, and reads how far atoms have moved. With
the other choices a call only adds to a ledger, a few integers on the device: how many calls there were, in how many of
them atoms had moved too far, in which one first, by how much at most, and a checksum of values that must be the same on
all ranks. The host keeps a checksum of all that it knows by itself. A message compares both after some calls, and is
read one call later; or it is sent when somebody asks.
"""

import collections
import functools
import math
import struct
import zlib
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch

from nvalchemiops.torch import checks
from nvalchemiops.torch.distributed.agreement import Agreement, kind_of, untransformed
from nvalchemiops.torch.distributed.communication import (
    RECENT,
    OtherRankError,
    begin_maximum,
    messages_of,
    on_device,
)
from nvalchemiops.torch.distributed.movement import Reference
from nvalchemiops.torch.runtime.acts import act
from nvalchemiops.torch.runtime.context import is_capturing, values_of
from nvalchemiops.torch.runtime.recorder import current_recorder

NEVER = 0
"""The number of calls after which ranks compare, if they never do."""

BEYOND = 2**40
"""Larger than any number of calls: of ``BEYOND - call`` the maximum over ranks is that of the first call."""

TINY = 1e-300
"""In place of a skin of zero, in ratios."""

MASK = 2**62 - 1
"""Checksums are non-negative, so that their negatives are numbers, too."""

FACTOR = 0x9E3779B97F4A7C15 - 2**64
"""Factor in checksums: odd, so that no bit is lost."""


class Found(NamedTuple):
    """What the calls of a ledger have found, on all ranks.

    Attributes
    ----------
    calls, wrong, first : int
        The number of calls, of those in which atoms had moved too far (of the rank with the most of them), and the
        first of these, from one; zero if there is none.
    largest : float
        How far an atom had moved at most, with the part of a strained cell.
    """

    calls: int
    wrong: int
    first: int
    largest: float


class _Call(NamedTuple):
    """What the host knows of a call: its number and place, what it compared, and whether it is counted."""

    number: int
    place: str
    same: dict[str, str]
    counts: bool


class _Sent(NamedTuple):
    """A message that has not been read yet, the last calls that it covers, and how many the host has counted."""

    read: Callable[[], list[Any]]
    calls: tuple[_Call, ...]
    n_calls: int


def interval_of(check: Any) -> int | None:
    """After how many calls ranks compare; None for "each", where they compare before the call goes on."""
    if isinstance(check, str):
        checks.check_choice("check", check, ("each", "later", "never"))
        return {"each": None, "later": 1, "never": NEVER}[check]
    if checks.check_count("check", check) < 1:
        raise ValueError(f"`check` must be 'each', 'later', 'never', or a positive number of calls, got {check}")
    return int(check)


class Ledger:
    """What the calls of a domain have found on this rank since ranks last compared.

    They compare again after ``every`` calls (`interval_of`). Atoms have moved too far if it is by more than half of the
    skin.
    """

    def __init__(self, group: Any, device: torch.device, skin: float, every: int) -> None:
        self.group, self.device, self.skin, self.every = group, device, skin, every
        with torch.inference_mode(False):
            # calls; wrong ones; `BEYOND` less the first of these, or zero; the largest displacement in halves of the
            # skin, by its bits; the checksum
            self._state = torch.zeros(5, dtype=torch.int64, device=device)
        self._host_sum = 0
        self._calls: collections.deque[_Call] = collections.deque(maxlen=RECENT)
        self._n_calls = 0
        self._sent: collections.deque[_Sent] = collections.deque()
        self._before = self.growth = math.nan
        self._follow: Callable[[], list[Any]] | None = None

    # -- what calls find --------------------------------------------------------------------------

    def note(self, same: dict[str, str], text: bytes, counts: bool) -> None:
        """Note descriptions of values that must be the same on all ranks, and these as one text."""
        here = messages_of(self.group)
        self._host_sum = zlib.crc32(text, self._host_sum)
        self._calls.append(_Call(here.calls, here.place, same, counts))

    def compare(self, checksums: Sequence[torch.Tensor]) -> None:
        """Note tensors that must be the same on all ranks, by checksums. Sends nothing, reads nothing."""
        for checksum in checksums:
            self._state[4].mul_(FACTOR).add_(checksum).bitwise_and_(MASK)

    def add(self, moved: torch.Tensor | None, skin: float) -> None:
        """Count a call, with the displacement () that it has found, and the skin in its unit."""
        calls, wrong, first, largest, _ = self._state.unbind()
        calls.add_(1)
        if moved is not None:
            part = 2.0 * moved / max(skin, TINY)
            is_wrong = part > 1.0
            wrong.add_(is_wrong)
            first.copy_(torch.where(is_wrong & (first == 0), BEYOND - calls, first))
            # bits of numbers that are not negative have the order of the numbers
            torch.maximum(largest, part.view(torch.int64), out=largest)
        self._n_calls += 1
        if self.every == NEVER:
            return
        if is_capturing():
            raise ValueError('`check` of the `domain` must be "never" for a call that is captured, since others read')
        if self._n_calls >= self.every:
            self.send()
        while len(self._sent) > 1:
            self.read()

    # -- messages ---------------------------------------------------------------------------------

    def send(self) -> None:
        """Send what has been found since the last message, and clear it. A collective call that does not wait."""
        here = messages_of(self.group)
        known = on_device([here.calls, here.count, self._host_sum], self.device)
        both = torch.cat([known, self._state])
        self._state.zero_()
        read = begin_maximum(torch.cat([both, -both]), self.group)
        self._sent.append(_Sent(read, tuple(self._calls), self._n_calls))
        self._n_calls, self._host_sum = 0, 0
        self._calls.clear()

    def read(self, raises: bool = True) -> Found:
        """Read the oldest message; with ``raises``, raise on all ranks if a call was wrong."""
        sent = self._sent.popleft()
        numbers = sent.read()
        highest, lowest = numbers[:8], [-number for number in numbers[8:]]
        if highest[:2] != lowest[:2]:
            counts = " and ".join(f"call {calls} after {count} messages" for calls, count in (lowest[:2], highest[:2]))
            why = f"ranks have compared what is {counts}"
            messages_of(self.group).leave(self.group, why)
            raise OtherRankError(messages_of(self.group).out_of_step)
        if highest[2] != lowest[2] or highest[7] != lowest[7]:
            self._raise_difference(sent)
        calls, wrong, first = highest[3], highest[4], BEYOND - highest[5] if highest[5] else 0
        largest = 0.5 * max(self.skin, TINY) * struct.unpack("d", struct.pack("q", highest[6]))[0]
        if wrong and raises:
            where = f"{wrong} of {calls} calls or more, first in number {first} of them"
            counted = [call for call in sent.calls if call.counts]
            # the host has forgotten older calls, and does not see replays of a graph of the user
            if sent.n_calls == calls and calls - first < len(counted):
                call = counted[first - calls - 1]
                where = f"call {call.number} ({call.place})" + (f", and in {wrong - 1} later ones" if wrong > 1 else "")
            raise ValueError(
                f"atoms had moved by {largest:g}, with the part of a strained cell, more than half of the skin of the "
                f"`domain`, {self.skin}, in {where}, whose results are wrong: go on from a state before, with a larger "
                'skin, more frequent `Domain.follow`, or check="each"'
            )
        return Found(calls, wrong, first, largest)

    def _raise_difference(self, sent: _Sent) -> None:
        agreement = Agreement(self.group, self.device)
        for call in sent.calls:
            agreement.same |= {
                f"{name} in call {call.number} ({call.place})": value for name, value in call.same.items()
            }
        agreement.raise_difference("values of a tensor on the device, such as `cell`,")

    def settle(self, raises: bool = True) -> Found:
        """Read all that has been found, as `read`. A collective call."""
        found = []
        self.send()
        while self._sent:
            found.append(self.read(raises))
        calls, wrong, largest = sum(f.calls for f in found), sum(f.wrong for f in found), max(f.largest for f in found)
        first, before = 0, 0
        for part in found:
            first, before = first or (before + part.first if part.first else 0), before + part.calls
        return Found(calls, wrong, first, largest)

    # -- following --------------------------------------------------------------------------------

    def must_divide(self, moved: torch.Tensor) -> bool:
        """Whether atoms must be divided again, by how far they were in the last `follow` and how fast they move.

        A collective call that reads the message of that `follow`, whatever `every` is: otherwise atoms would be divided
        too late. Atoms that have moved farther than was expected are found by the calls that use them.
        """
        if is_capturing() or current_recorder() is not None:
            raise ValueError(
                "`Domain.follow` reads how far atoms were, so it cannot be recorded: call it between replays"
            )
        sent = begin_maximum(moved.reshape(1).clone(), self.group)
        if math.isnan(self._before):  # for the first time
            (self._before,) = (self.growth,) = sent()
            return 2.0 * self._before > self.skin
        if self._follow is not None:
            (now,) = self._follow()
            self.growth, self._before = max(now - self._before, 0.0), now
        self._follow = sent
        return 2.0 * (self._before + 2.0 * self.growth) > self.skin

    def goes_on(self, old: "Ledger") -> None:
        """Expect atoms to move as fast as they did with the ledger of the domain before."""
        self._before, self.growth = 0.0, old.growth


class Entry(Agreement):
    """In the place of an `Agreement`, a part of a call that adds to a ledger.

    It counts as a call unless ``counts`` is False. If a rank raises inside, the others learn it when they wait for its
    next message.
    """

    is_deferred = True

    def __init__(self, ledger: Ledger, skin: float, counts: bool = True) -> None:
        super().__init__(ledger.group, ledger.device, skin)
        self._ledger, self._counts = ledger, counts
        self._compared: list[torch.Tensor] = []
        self._moved: torch.Tensor | None = None

    def note_cell(self, reference: Reference, cell: torch.Tensor | None) -> None:
        """Note a cell that must be the same on all ranks, without a look at its values."""
        self.same["`cell`"] = "None" if cell is None else kind_of(cell)
        if cell is not None and reference.cell is not None:
            reference.expanded(cell)  # raises for other shapes
            self._compared.append(cell)

    def note_moved(self, reference: Reference, positions: torch.Tensor, cell: torch.Tensor | None) -> None:
        """Note how far atoms have moved, without a look at it."""
        if self._moved is None:
            self._moved = reference.moved_on_device(positions, cell)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_over = True
        if error is None:
            with untransformed(), torch.no_grad():
                # not in the act, so that a recording has no steps for a cell that stays
                compared = [_checksum(value) for value in self._compared]
                moved = None if self._moved is None else values_of(self._moved)
                text = repr(sorted(self.same.items())).encode()
                act(
                    functools.partial(self._ledger.note, self.same, text, self._counts),
                    functools.partial(self._note, compared, moved),
                    (*compared, *(() if moved is None else (moved,)), messages_of(self._group).domains),
                )

    def _note(self, compared: Sequence[torch.Tensor], moved: torch.Tensor | None) -> None:
        with torch.no_grad():
            self._ledger.compare(compared)
            if self._counts:
                self._ledger.add(moved, self._skin)


def _checksum(values: torch.Tensor) -> torch.Tensor:
    """A checksum () of the values of a real tensor, in int64."""
    plain = values_of(values).resolve_neg()
    bits = plain.double().view(torch.int64) if plain.is_floating_point() else plain.long()
    odd = 2 * torch.arange(bits.numel(), device=bits.device) + 1
    return ((bits.flatten() ^ (bits.flatten() >> 31)) * (odd * FACTOR)).sum()
