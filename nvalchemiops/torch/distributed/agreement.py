"""Agreement of ranks in one message, which shares errors, reduces numbers, and compares arguments.

A collective call begins with a part without communication, in which each rank checks its arguments. At its end the
ranks exchange a few numbers: whether a rank failed, how many calls and messages it has counted, the numbers that it has
noted, and a checksum of all values that must be the same on all ranks. If these differ, a second message tells the
reason.
"""

import contextlib
import functools
import math
import os
import sys
import warnings
import zlib
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nvalchemiops.torch.distributed.communication import OtherRankError, extremes, messages_of, tell
from nvalchemiops.torch.distributed.movement import Reference
from nvalchemiops.torch.runtime import _torch_internals as internals
from nvalchemiops.torch.runtime.acts import act, end_recording
from nvalchemiops.torch.runtime.context import eager, may_read, values_of
from nvalchemiops.torch.runtime.recorder import FOR_NOW

N_NUMBERS = 4
"""How many numbers are reduced to their maximum over the ranks. The message has the same size in all calls."""

SMALL = 64
"""Largest number of elements of a tensor whose values are compared. For larger tensors a checksum is compared."""

_NOT_CALLERS = (
    *(os.path.join(os.path.dirname(path), "") for path in (torch.__file__, os.path.dirname(__file__))),
    contextlib.__file__,
)
"""Prefixes of paths that do not count as the caller: torch, this package and contextlib."""


class Agreement:
    """An error barrier around a part of a collective call: if one rank raises there, all ranks raise together.

    A context manager; the part inside has no communication. The rank with the error raises it, even if it is an
    interrupt. The other ranks raise an `OtherRankError` with its rank and message. If a value that must be the same on
    all ranks differs, by its description in ``same``, all raise a ValueError that names the value. If an interrupted
    rank has begun more calls than the others, the others raise an `OtherRankError`, and the interrupted rank waits for
    their next call. Numbers that a rank notes in ``largest`` (integers below 2^53) are their maximum over all ranks
    after the part. The first is how far atoms have moved: all raise if that is more than half of the ``skin``. If
    ``is_deferred``, ranks compare later (`nvalchemiops.torch.distributed.ledger`).
    """

    is_deferred = False

    def __init__(self, group: Any, device: torch.device, skin: float = math.inf) -> None:
        self.largest = [-float("inf")] * N_NUMBERS
        self.same: dict[str, str] = {}
        self.is_over = False
        self._group, self._device, self._skin = group, device, skin

    def __enter__(self) -> "Agreement":
        self._messages = messages_of(self._group)
        if self._messages.left:
            end_recording(FOR_NOW + "ranks agree after an error")
        elif not self.is_deferred:
            end_recording(
                'ranks compare arguments before the call goes on: make the `domain` with check="later", outside of the '
                "function, as new domains, pairs that are distributed, and `displacement`"
            )
        act(functools.partial(self._messages.begin_call, _place()))
        return self

    def must_be_same(self, **values: Any) -> None:
        """Note values that must be the same on all ranks, by argument name; their `described` texts are compared."""
        for name, value in values.items():
            self.same[f"`{name}`"] = described(value)

    def note_cell(self, reference: Reference, cell: torch.Tensor | None) -> None:
        """Note a cell that must be the same on all ranks; its values if they are not those known to be the same."""
        told = "None" if cell is None else kind_of(cell)
        if cell is not None and (changed := reference.changed(cell)) is not None:
            told += f", now {described(changed.cpu())}"
        self.same["`cell`"] = told

    def note_moved(self, reference: Reference, positions: torch.Tensor, cell: torch.Tensor | None) -> None:
        """Note how far atoms have moved. At the end all ranks raise if that is too far."""
        if self.largest[0] < 0.0:  # not noted yet
            self.largest[0] = reference.moved(positions, cell)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_over = True
        # an interrupt must reach its rank, whatever other ranks report
        quiet = () if error is None or isinstance(error, Exception) else (OtherRankError,)
        with contextlib.suppress(*quiet), untransformed():
            self._conclude(error)

    @eager
    def _conclude(self, error: BaseException | None) -> None:
        """Tell the other ranks, and raise on all ranks if one has an error or values differ. A collective call."""
        here = self._messages
        check, place = (zlib.crc32(text.encode()) for text in (repr(sorted(self.same.items())), here.place))
        while True:
            numbers = (error is not None, here.calls, here.count, check, place, here.scope, *self.largest)
            highest, lowest = extremes(numbers, self._group, self._device)
            if highest[1] == lowest[1]:
                break
            # a rank that is ahead waits here for the others, which raise
            calls = self._tell_counts()
            if here.calls < highest[1]:
                raise OtherRankError(
                    f"ranks are out of step: this is {calls}. The rank that is ahead was interrupted and waits"
                )
        here.scope = int(highest[5])  # different calls may have had different numbers of blocks
        if highest[2] != lowest[2]:
            raise OtherRankError(
                f"ranks are out of step: this is {self._tell_counts()}. One of them was interrupted, or has left out a "
                "backward pass: results since the call before may be wrong. From here on they are in step"
            )
        self.largest, here.left = highest[6:], ""
        if highest[0]:
            texts = self._tell(None if error is None else f"{type(error).__name__}: {error}")
            if error is not None:
                return  # raised by the caller of `__exit__`
            rank = next(rank for rank, text in enumerate(texts) if text is not None)
            raise OtherRankError(f"{self._rank(rank)} failed: {texts[rank]}")
        if highest[3] != lowest[3]:
            self.raise_difference("a value")
        if highest[4] != lowest[4] and (highest[4], lowest[4]) not in here.places:
            here.places.add((highest[4], lowest[4]))
            places = ", ".join(f"{place} on {self._rank(rank)}" for rank, place in enumerate(self._tell(here.place)))
            warnings.warn(
                f"ranks make a call together from different places: {places}. If one of them has left out a call, "
                "results are made of different ones",
                stacklevel=4,
            )
        if not 2.0 * self.largest[0] <= self._skin:
            raise ValueError(
                f"atoms have moved by {self.largest[0]:g}, with the part of a strained cell, more than half of the "
                f"skin of the `domain`, {self._skin}: make a new domain, as `Domain.follow` does"
            )

    def _tell_counts(self) -> str:
        """A text with the call and the message count of each rank. It makes all ranks continue with the same count."""
        here = self._messages
        told = self._tell((here.calls, here.count, here.place))
        here.level(max(count for _, count, _ in told))
        return ", ".join(
            f"call {calls} ({place}) after {count} messages on {self._rank(rank)}"
            for rank, (calls, count, place) in enumerate(told)
        )

    def raise_difference(self, otherwise: str) -> None:
        """Raise with the first difference of ``same``, on all ranks; if there is none, with other words for it."""
        told: list[dict[str, str]] = self._tell(self.same)
        rank = next((rank for rank, same in enumerate(told) if same != told[0]), 0)
        if rank == 0:
            raise ValueError(f"{otherwise} must be the same on all ranks, but differs")
        first, other = (f"on {self._rank(r)}" for r in (0, rank))
        if told[0].keys() != told[rank].keys():
            one, another = (", ".join(told[r]) or "nothing" for r in (0, rank))
            raise ValueError(f"ranks make different calls: one with {one} {first}, and one with {another} {other}")
        name = next(name for name in told[0] if told[0][name] != told[rank][name])
        raise ValueError(
            f"{name} must be the same on all ranks, but is {told[0][name]} {first}, and {told[rank][name]} {other}"
        )

    def _tell(self, what: Any) -> list[Any]:
        return tell(what, self._group, self._device)

    def _rank(self, rank: int) -> str:
        return f"rank {dist.get_global_rank(self._group, rank)}"


def untransformed() -> contextlib.AbstractContextManager[Any]:
    """A context that keeps messages between ranks out of ``torch.func`` transforms."""
    return internals.without_transforms() if internals.transforms_active() else contextlib.nullcontext()


def _place() -> str:
    """The file and line of the caller of this library."""
    frame: Any = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_CALLERS):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def described(value: Any) -> str:
    """The properties of a value that must be the same on all ranks, as text.

    For None, bools, numbers, strings and dtypes this is the value. For tensors it is the dtype, whether a gradient is
    required, and the values: a checksum if there are many, only the shape if they are on a GPU. Arrays are described by
    their values or a checksum, tuples and lists by their items, other objects by a name.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return repr(value)
    if isinstance(value, torch.Tensor):
        if not may_read(value):
            return f"{kind_of(value)} of shape {tuple(value.shape)}"
        if value.numel() > SMALL:
            return f"{kind_of(value)} of shape {tuple(value.shape)} with checksum {check_sum(value)}"
        return f"{kind_of(value)} {values_of(value).tolist()}"
    if isinstance(value, np.ndarray):
        return repr(value.tolist()) if value.size <= SMALL else f"{value.shape} {zlib.crc32(value.tobytes())}"
    if isinstance(value, tuple | list):
        names = (f"{name}=" for name in value._fields) if hasattr(value, "_fields") else [""] * len(value)
        return f"{type(value).__name__}({', '.join(n + described(v) for n, v in zip(names, value))})"
    return getattr(value, "__name__", type(value).__name__)


def check_sum(tensor: torch.Tensor) -> int:
    """A checksum of the values of a tensor on the host."""
    with untransformed():
        plain = values_of(tensor).resolve_conj().resolve_neg().contiguous()
        return zlib.crc32(plain.flatten().view(torch.uint8).numpy().data)


def of_atoms(value: Any) -> str:
    """`described` for values of atoms, which differ between ranks: dtype, axes after the first, and gradients."""
    if isinstance(value, torch.Tensor) and value.ndim:
        return f"{kind_of(value)} of shape (n_owned{''.join(f', {n}' for n in value.shape[1:])})"
    return described(value)


def kind_of(tensor: torch.Tensor) -> str:
    """The dtype of a tensor, and whether it requires a gradient, in words."""
    tracked = tensor.requires_grad and torch.is_grad_enabled()
    return f"a {str(tensor.dtype).removeprefix('torch.')} tensor {'with' if tracked else 'without'} gradient"
