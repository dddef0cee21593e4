"""What ranks agree on in one message: that none of them raises, numbers, and what must be the same on all of them.

A collective call begins with a part without communication, in which each rank checks its arguments. At the end of it
they all exchange a few numbers: whether a rank could not go on, largest values of numbers that it noted, and a check
sum of all that must be the same. Only where they disagree a second message tells the reason.
"""

import contextlib
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nvalchemiops.torch.distributed.communication import OtherRankError, maximum, tell
from nvalchemiops.torch.runtime.context import may_read, values_of

N_NUMBERS = 4
"""Numbers of which a rank learns the largest. The message has always the same size, whatever is called."""

SMALL = 64
"""Numbers in a tensor up to which their values are compared; of larger ones the shape is."""


class Agreement:
    """What a rank says to the others at the end of a part of a call that they make `together`.

    Attributes
    ----------
    largest : list of float
        Numbers that this rank notes (each below 2^53 if it is an integer); after the part the largest of those of all
        ranks.
    same : dict of str to str
        What must be the same on all ranks, by name.
    """

    def __init__(self) -> None:
        self.largest = [-float("inf")] * N_NUMBERS
        self.same: dict[str, str] = {}

    def must_be_same(self, **values: Any) -> None:
        """Note values that must be the same on all ranks, by names of arguments; `described` says what is compared."""
        for name, value in values.items():
            self.same[f"`{name}`"] = described(value)

    def conclude(self, error: Exception | None, group: Any, device: torch.device) -> None:
        """Tell the others, and raise on all ranks if one has an error or they differ. A collective call."""
        check = float(zlib.crc32(repr(sorted(self.same.items())).encode()))
        found = torch.tensor([error is not None, check, -check, *self.largest], dtype=torch.float64, device=device)
        any_error, highest, lowest, *self.largest = maximum(found, group).tolist()
        if any_error:
            texts = tell(None if error is None else f"{type(error).__name__}: {error}", group)
            if error is not None:
                raise error
            rank = next(rank for rank, text in enumerate(texts) if text is not None)
            raise OtherRankError(f"rank {dist.get_global_rank(group, rank)} could not go on: {texts[rank]}")
        if highest == -lowest:
            return
        told: list[dict[str, str]] = tell(self.same, group)
        rank = next(rank for rank, same in enumerate(told) if same != told[0])
        first, other = (f"on rank {dist.get_global_rank(group, r)}" for r in (0, rank))
        if told[0].keys() != told[rank].keys():
            one, another = (", ".join(told[r]) or "nothing" for r in (0, rank))
            raise ValueError(f"ranks make different calls: one with {one} {first}, and one with {another} {other}")
        name = next(name for name in told[0] if told[0][name] != told[rank][name])
        raise ValueError(
            f"{name} must be the same on all ranks, but is {told[0][name]} {first}, and {told[rank][name]} {other}"
        )


@contextlib.contextmanager
def together(group: Any, device: torch.device) -> Iterator[Agreement]:
    """A part of a collective call in which a rank may raise; then all do. No communication inside.

    The rank with the error raises it, the others an `OtherRankError` with its number and message. Where ranks differ in
    what must be the same, all raise a ValueError that names it.
    """
    agreement, error = Agreement(), None
    try:
        yield agreement
    except Exception as raised:
        error = raised
    agreement.conclude(error, group, device)


def described(value: Any) -> str:
    """What a value must have in common with that of other ranks, as text.

    Numbers, truth values and strings are themselves. Tensors and arrays with few entries on the host are their values,
    others their shapes; and whether gradients are required. Tuples are what they hold, other objects have a name.
    """
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return repr(value)
    if isinstance(value, torch.Tensor):
        if value.numel() > SMALL or not may_read(value):
            return f"{kind_of(value)} of shape {tuple(value.shape)}"
        return f"{kind_of(value)} {values_of(value).tolist()}"
    if isinstance(value, np.ndarray):
        return repr(value.tolist()) if value.size <= SMALL else f"{value.shape} {zlib.crc32(value.tobytes())}"
    if isinstance(value, tuple | list):
        names = (f"{name}=" for name in value._fields) if hasattr(value, "_fields") else [""] * len(value)
        return f"{type(value).__name__}({', '.join(n + described(v) for n, v in zip(names, value))})"
    return getattr(value, "__name__", type(value).__name__)


def of_atoms(value: Any) -> str:
    """The same of values of atoms, which differ between ranks: the dtype, the axes after the first, and gradients."""
    if isinstance(value, torch.Tensor) and value.ndim:
        return f"{kind_of(value)} of shape (n_owned{''.join(f', {n}' for n in value.shape[1:])})"
    return described(value)


def kind_of(tensor: torch.Tensor) -> str:
    """The dtype of a tensor, and whether it requires a gradient, in words."""
    tracked = tensor.requires_grad and torch.is_grad_enabled()
    return f"a {str(tensor.dtype).removeprefix('torch.')} tensor {'with' if tracked else 'without'} gradient"
