"""What ranks agree on in one message: that none of them raises, numbers, and what must be the same on all of them.

A collective call begins with a part without communication, in which each rank checks its arguments. At the end of it
they all exchange a few numbers: whether a rank could not go on, how many calls and messages there were, largest values
of numbers that it noted, and a check sum of all that must be the same. Only where they disagree a second message tells
the reason.
"""

import contextlib
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
from nvalchemiops.torch.runtime import _torch_internals as internals
from nvalchemiops.torch.runtime.context import may_read, values_of

N_NUMBERS = 4
"""Numbers of which a rank learns the largest. The message has always the same size, whatever is called."""

SMALL = 64
"""Numbers in a tensor up to which their values are compared; of larger ones a check sum is."""

_NOT_CALLERS = (
    *(os.path.join(os.path.dirname(path), "") for path in (torch.__file__, os.path.dirname(__file__))),
    contextlib.__file__,
)
"""Beginnings of paths of code that calls on behalf of others: torch, and this library for torch."""


class Agreement:
    """What a rank says to the others at the end of a part of a collective call, in which a rank may raise; then all do.

    A context manager, without communication inside. The rank with the error raises it, also if it was interrupted, the
    others an `OtherRankError` with its number and message. Where ranks differ in what must be the same, all raise a
    ValueError that names it. Where one has begun more calls than others, because it was interrupted, those raise an
    `OtherRankError`, and it waits for their next one.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
    device : torch.device
    skin : float, optional
        All raise if the first of the largest numbers, how far atoms have moved, is more than half of it.

    Attributes
    ----------
    largest : list of float
        Numbers that this rank notes (each below 2^53 if it is an integer); after the part the largest of those of all
        ranks.
    same : dict of str to str
        What must be the same on all ranks, by name.
    is_over : bool
    """

    def __init__(self, group: Any, device: torch.device, skin: float = math.inf) -> None:
        self.largest = [-float("inf")] * N_NUMBERS
        self.same: dict[str, str] = {}
        self.is_over = False
        self._group, self._device, self._skin = group, device, skin

    def __enter__(self) -> "Agreement":
        self._messages = messages_of(self._group)
        self._messages.calls += 1
        self._messages.place = _place()
        return self

    def must_be_same(self, **values: Any) -> None:
        """Note values that must be the same on all ranks, by names of arguments; `described` says what is compared."""
        for name, value in values.items():
            self.same[f"`{name}`"] = described(value)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_over = True
        # who interrupts a rank learns that, whatever others say
        quiet = () if error is None or isinstance(error, Exception) else (OtherRankError,)
        with contextlib.suppress(*quiet), _untransformed():
            self._conclude(error)

    def _conclude(self, error: BaseException | None) -> None:
        """Tell the others, and raise on all ranks if one has an error or they differ. A collective call."""
        here = self._messages
        check, place = (zlib.crc32(text.encode()) for text in (repr(sorted(self.same.items())), here.place))
        while True:
            numbers = (error is not None, here.calls, here.count, check, place, *self.largest)
            highest, lowest = extremes(numbers, self._group, self._device)
            if highest[1] == lowest[1]:
                break
            # who is ahead waits for the others, which learn that there is no such call on all ranks
            calls = self._tell_counts()
            if here.calls < highest[1]:
                raise OtherRankError(
                    f"ranks are out of step: this is {calls}. Who is ahead was interrupted, and waits for the others"
                )
        if highest[2] != lowest[2]:
            raise OtherRankError(
                f"ranks are out of step: this is {self._tell_counts()}. One of them was interrupted, or has left out a "
                "backward pass: results since the call before may be wrong. From here on they are in step"
            )
        self.largest = highest[5:]
        if highest[0]:
            texts = self._tell(None if error is None else f"{type(error).__name__}: {error}")
            if error is not None:
                return  # raised by the caller of `__exit__`
            rank = next(rank for rank, text in enumerate(texts) if text is not None)
            raise OtherRankError(f"{self._rank(rank)} could not go on: {texts[rank]}")
        if highest[3] != lowest[3]:
            self._raise_difference()
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
                f"atoms have moved by {self.largest[0]:g}, more than half of the skin of the `domain`, {self._skin}: "
                "make it anew"
            )

    def _tell_counts(self) -> str:
        """In which call each rank is, after how many messages; from here on they count messages alike."""
        here = self._messages
        told = self._tell((here.calls, here.count, here.place))
        here.level(max(count for _, count, _ in told))
        return ", ".join(
            f"call {calls} ({place}) after {count} messages on {self._rank(rank)}"
            for rank, (calls, count, place) in enumerate(told)
        )

    def _raise_difference(self) -> None:
        told: list[dict[str, str]] = self._tell(self.same)
        rank = next(rank for rank, same in enumerate(told) if same != told[0])
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


def _untransformed() -> contextlib.AbstractContextManager[Any]:
    """What ranks say is no part of a function that ``torch.func`` transforms."""
    return internals.without_transforms() if internals.transforms_active() else contextlib.nullcontext()


def _place() -> str:
    """The file and line of the caller of this library."""
    frame: Any = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_CALLERS):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def described(value: Any) -> str:
    """What a value must have in common with that of other ranks, as text.

    Numbers, truth values and strings are themselves. Tensors and arrays on the host are their values, of many a check
    sum, others their shapes; and whether gradients are required. Tuples are what they hold, other objects have a name.
    """
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return repr(value)
    if isinstance(value, torch.Tensor):
        if not may_read(value):
            return f"{kind_of(value)} of shape {tuple(value.shape)}"
        if value.numel() > SMALL:
            return f"{kind_of(value)} of shape {tuple(value.shape)} with check sum {check_sum(value)}"
        return f"{kind_of(value)} {values_of(value).tolist()}"
    if isinstance(value, np.ndarray):
        return repr(value.tolist()) if value.size <= SMALL else f"{value.shape} {zlib.crc32(value.tobytes())}"
    if isinstance(value, tuple | list):
        names = (f"{name}=" for name in value._fields) if hasattr(value, "_fields") else [""] * len(value)
        return f"{type(value).__name__}({', '.join(n + described(v) for n, v in zip(names, value))})"
    return getattr(value, "__name__", type(value).__name__)


def check_sum(tensor: torch.Tensor) -> int:
    """A number that follows from the values of a tensor on the host."""
    with _untransformed():
        plain = values_of(tensor).resolve_conj().resolve_neg().contiguous()
        return zlib.crc32(plain.flatten().view(torch.uint8).numpy().data)


def of_atoms(value: Any) -> str:
    """The same of values of atoms, which differ between ranks: the dtype, the axes after the first, and gradients."""
    if isinstance(value, torch.Tensor) and value.ndim:
        return f"{kind_of(value)} of shape (n_owned{''.join(f', {n}' for n in value.shape[1:])})"
    return described(value)


def kind_of(tensor: torch.Tensor) -> str:
    """The dtype of a tensor, and whether it requires a gradient, in words."""
    tracked = tensor.requires_grad and torch.is_grad_enabled()
    return f"a {str(tensor.dtype).removeprefix('torch.')} tensor {'with' if tracked else 'without'} gradient"
