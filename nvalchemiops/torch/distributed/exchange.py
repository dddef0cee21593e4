"""Exchange of rows of tensors between ranks by a fixed plan: a linear map, differentiable to any order."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from nvalchemiops.torch.distributed.collectives import all_to_all_rows, number_of
from nvalchemiops.torch.distributed.communication import swap_rows


class Exchange(NamedTuple):
    """The rows that this rank sends to each rank, and the order of the rows that it receives.

    Attributes
    ----------
    group : int
        From `number_of`.
    rows : (n_sent,) int64 tensor
        Rows of the input to send, those for rank 0 first.
    send, receive : tuple of int
        How many rows go to each rank, and come from each rank.
    order, places : (n_received,) int64 tensors, optional
        The order into which received rows are put, and its inverse.
    """

    group: int
    rows: torch.Tensor
    send: tuple[int, ...]
    receive: tuple[int, ...]
    order: torch.Tensor | None = None
    places: torch.Tensor | None = None

    @classmethod
    def plan(cls, group: Any, rows: torch.Tensor, counts: torch.Tensor) -> "Exchange":
        """The exchange that sends these rows; ``counts`` (n_ranks,) says how many each rank gets. A collective call."""
        ones, counts = [1] * len(counts), counts.long()
        received = swap_rows(counts, ones, ones, group)
        return cls(number_of(group), rows, tuple(counts.tolist()), tuple(received.tolist()))

    @property
    def n_received(self) -> int:
        """The number of rows that this rank receives."""
        return sum(self.receive)

    def in_order(self, order: torch.Tensor) -> "Exchange":
        """The same exchange, with received rows put into this order."""
        return self._replace(order=order, places=inverse(order))

    def apply(self, values: torch.Tensor) -> torch.Tensor:
        """The received rows (n_received, ...), in ``order``, or else rows of rank 0 first, in the order sent."""
        rows = all_to_all_rows(values.index_select(0, self.rows), self.send, self.receive, self.group)
        return rows if self.order is None else rows.index_select(0, self.order)

    def transpose(self, values: torch.Tensor, n_rows: int) -> torch.Tensor:
        """The transpose of `apply`: rows go back to the ranks that sent them, and are summed there (n_rows, ...)."""
        values = values if self.places is None else values.index_select(0, self.places)
        rows = all_to_all_rows(values, self.receive, self.send, self.group)
        return values.new_zeros((n_rows, *values.shape[1:])).index_add(0, self.rows, rows)


def inverse(order: torch.Tensor) -> torch.Tensor:
    """The inverse of a permutation."""
    return torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))


CARRIED = (torch.float32, torch.float64, torch.int32, torch.int64)
"""Dtypes of messages. Values of other dtypes are sent in a wider dtype of these, complex numbers as pairs of reals."""


def carried(move: Callable[[torch.Tensor], torch.Tensor], values: torch.Tensor) -> torch.Tensor:
    """Return ``move(values)``, a linear map of rows by messages, for values of any dtype."""
    if values.dtype in CARRIED:
        return move(values)
    if values.is_complex():
        return torch.view_as_complex(carried(move, torch.view_as_real(values.resolve_conj())))
    return move(values.to(torch.float32 if values.is_floating_point() else torch.int64)).to(values.dtype)


def check_rows(values: Any, n_rows: int | None) -> None:
    """Raise unless ``values`` is a tensor with ``n_rows`` rows, or for None a tensor that can be summed."""
    if not isinstance(values, torch.Tensor):
        raise TypeError(f"`values` must be a tensor, got {type(values).__name__}")
    if n_rows is None and values.dtype is torch.bool:
        raise TypeError("`values` are bools, which cannot be summed: use `values.int()`")
    if n_rows is not None and values.shape[:1] != (n_rows,):
        raise ValueError(f"`values` must have shape ({n_rows}, ...), a row for each atom, got {tuple(values.shape)}")
