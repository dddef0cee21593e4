"""Exchange of rows of tensors between ranks by a fixed plan: a linear map, differentiable to any order."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from nvalchemiops.torch.distributed.collectives import number_of, rows_from_partners
from nvalchemiops.torch.distributed.communication import swap_rows
from nvalchemiops.torch.operators.sorting import sort_rows


class Exchange(NamedTuple):
    """The rows that this rank sends to other ranks, and the order of the rows that it receives."""

    group: int  # from `number_of`
    rows: torch.Tensor  # (n_sent,) int64: rows of the input to send, those for the first partner first
    partners: tuple[int, ...]  # ranks that get rows from this rank or send rows to it, in ascending order
    send: tuple[int, ...]  # how many rows go to each partner
    receive: tuple[int, ...]  # and how many come from each
    order: torch.Tensor | None = None  # (n_received,) int64, into which received rows are put
    places: torch.Tensor | None = None  # its inverse

    @classmethod
    def plan(cls, group: Any, rows: torch.Tensor, counts: torch.Tensor) -> "Exchange":
        """The exchange that sends these rows; ``counts`` (n_ranks,) says how many each rank gets. A collective call."""
        both = torch.stack([counts.int(), counts_for_this_rank(counts.int(), group)])
        partners = both.any(0).nonzero().squeeze(1)
        ranks, send, receive = torch.cat([partners.unsqueeze(0), both.index_select(1, partners)]).tolist()
        return cls(number_of(group), rows, tuple(ranks), tuple(send), tuple(receive))

    @classmethod
    def to_ranks(cls, group: Any, to: torch.Tensor, n_ranks: int) -> "Exchange":
        """The exchange that sends each row to the rank (n,) in ``to``. A collective call."""
        order, ends = sort_rows(to.int(), n_ranks)
        return cls.plan(group, order.long(), ends[:-1].diff())

    @property
    def n_received(self) -> int:
        """The number of rows that this rank receives."""
        return sum(self.receive)

    def back(self, rows: torch.Tensor) -> "Exchange":
        """The exchange that sends as many rows back as arrived; ``rows`` are those to send."""
        return Exchange(self.group, rows, self.partners, self.receive, self.send)

    def in_order(self, order: torch.Tensor) -> "Exchange":
        """The same exchange, with received rows put into this order."""
        return self._replace(order=order, places=inverse(order))

    def apply(self, values: torch.Tensor) -> torch.Tensor:
        """The received rows (n_received, ...), in ``order``, or else those of the first partner first, as sent."""
        rows = rows_from_partners(values.index_select(0, self.rows), self.partners, self.send, self.receive, self.group)
        return rows if self.order is None else rows.index_select(0, self.order)

    def transpose(self, values: torch.Tensor, n_rows: int) -> torch.Tensor:
        """The transpose of `apply`: rows go back to the ranks that sent them, and are summed there (n_rows, ...)."""
        values = values if self.places is None else values.index_select(0, self.places)
        rows = rows_from_partners(values, self.partners, self.receive, self.send, self.group)
        return values.new_zeros((n_rows, *values.shape[1:])).index_add(0, self.rows, rows)


def counts_for_this_rank(counts: torch.Tensor, group: Any) -> torch.Tensor:
    """From each rank the number that it has for this rank; ``counts`` (n_ranks,) has one for each rank.

    A collective call in about log2(n_ranks) messages, each to one rank, with half of the numbers.

    Source of the method: J. Bruck et al., IEEE Trans. Parallel Distrib. Syst. 8, 1143 (1997), doi:10.1109/71.642949.
    """
    rank, n_ranks = dist.get_rank(group), len(counts)
    numbers = torch.arange(n_ranks, device=counts.device)
    # number k is on its way to the rank k ranks further, by steps of powers of two
    travelling = counts.roll(-rank)
    step = 1
    while step < n_ranks:
        moved = ((numbers & step) > 0).nonzero().squeeze(1)
        to, source = (rank + step) % n_ranks, (rank - step) % n_ranks
        partners = sorted({to, source})
        send, receive = ([len(moved) * (partner == end) for partner in partners] for end in (to, source))
        travelling[moved] = swap_rows(travelling[moved], send, receive, group, partners)
        step *= 2
    return travelling.flip(0).roll(rank + 1)


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
