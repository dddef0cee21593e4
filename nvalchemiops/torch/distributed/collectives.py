"""Collective operations of torch.distributed as torch ops, differentiable to any order.

Each rank computes a share of a result, and the gradient of the sum of all shares. So there are two kinds of tensors:
*own* ones, whose values differ between ranks, and *replicated* ones, which are the same on all. An op that turns one
kind into the other has a derivative that turns it back:

- `sum_of_shares`: own values to their replicated sum. Its derivative is `replicated`.
- `replicated`: a replicated tensor enters what each rank computes for itself. Its derivative is `sum_of_shares`, so
  that the gradient of a replicated tensor is complete on each rank.
- `sum_on_all_ranks`: own values to their sum, from which each rank goes on with its own share. Its derivative is
  itself.
- `all_to_all_rows`: rows from each rank to each other. Its derivative sends them back.

All ranks must call the same ones in the same order, backward passes included.
"""

import atexit
import functools
import gc
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from nvalchemiops.torch.autograd import OutputSpec, warp_custom_op
from nvalchemiops.torch.autograd.specs import TORCH_DTYPES
from nvalchemiops.torch.distributed.communication import add, swap_rows

_groups: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Groups of ranks by the numbers that ops know them by. They end with ``destroy_process_group``, with their threads."""

LAST = 0.05
"""Seconds at the end of a process in which threads of groups give back their last tensors."""


SUMMED = ("nvalchemiops_replicatedBackward", "nvalchemiops_sum_on_all_ranksBackward")
"""Names in a graph of the ops below by which gradients are added up over the ranks."""


def number_of(group: Any) -> int:
    """The number by which ops know a group of ranks, which is the same in each call."""
    if group is dist.GroupMember.NON_GROUP_MEMBER:  # what new_group gives to ranks that are not in it
        raise ValueError("`group`: this rank is not in it")
    _end_in_order()
    number = id(group)
    _groups[number] = group
    return number


def group_of(number: int) -> Any:
    """The group of ranks with this number."""
    group = _groups.get(number)
    if group is None:
        raise RuntimeError("the ranks of this `domain` are no group any more: destroy_process_group was called")
    return group


@functools.cache
def _end_in_order() -> None:
    """At the end of the process let threads of gloo finish while there is an interpreter.

    They release a tensor of Python some time after the call that sent it has returned. Where the interpreter ends
    meanwhile, the process aborts ("terminate called without an active exception").
    """

    def finish() -> None:
        _groups.clear()
        gc.collect()  # of domains, which refer to themselves: the threads of their groups end with them
        time.sleep(LAST)

    atexit.register(finish)


def refuse_slices(*_: Any) -> Any:
    """The rule for ``torch.func.vmap`` of an op that all ranks call.

    Slices of ranks belong together where all have the same directions, but not where each has those of its own atoms,
    as in ``jacfwd`` and ``hessian``: results would be sums of columns. The op cannot tell them apart.
    """
    raise NotImplementedError(
        "torch.func.vmap over a call with a `domain`, as in jacfwd, jacrev of vectors and hessian: each rank has "
        "directions of its own atoms, which do not belong together. Take one direction of the atoms of all ranks after "
        "the other, by torch.func.jvp, torch.autograd.grad or torch.autograd.functional.hvp"
    )


def _dtype(values: torch.Tensor, *_: Any) -> Any:
    return next(kind for kind, dtype in TORCH_DTYPES.items() if dtype is values.dtype)


@warp_custom_op(
    "nvalchemiops::all_to_all_rows",
    outputs=[OutputSpec("rows", _dtype, lambda v, _, receive, __: (sum(receive), *v.shape[1:]))],
    backward=lambda send, receive, group, grad_rows: all_to_all_rows(grad_rows, receive, send, group),
    vmap=refuse_slices,
)
def all_to_all_rows(values: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: int) -> torch.Tensor:
    """Rows from all ranks, in their order.

    Parameters
    ----------
    values : (n, ...) tensor
        Rows for rank 0, then for rank 1, and so on.
    send, receive : sequence of int
        How many rows go to each rank, and come from each.
    group : int
        From `number_of`.
    """
    return swap_rows(values, send, receive, group_of(group))


def _like_values(name: str, result: str, backward: Callable[..., torch.Tensor]) -> Any:
    """The decorator of an op whose result has the shape and the dtype of the values."""
    outputs = [OutputSpec(result, _dtype, lambda values, _: tuple(values.shape))]
    return warp_custom_op(f"nvalchemiops::{name}", outputs=outputs, backward=backward, vmap=refuse_slices)


def _add(values: torch.Tensor, group: int) -> torch.Tensor:
    total = values.clone(memory_format=torch.contiguous_format)
    return add(total, group_of(group)) if values.numel() else total  # shapes are the same on all ranks


@_like_values("sum_on_all_ranks", "total", lambda group, grad_total: sum_on_all_ranks(grad_total, group))
def sum_on_all_ranks(values: torch.Tensor, group: int) -> torch.Tensor:
    """The sum over all ranks, with which each goes on to compute its own share."""
    return _add(values, group)


@_like_values("sum_of_shares", "total", lambda group, grad_total: replicated(grad_total, group))
def sum_of_shares(values: torch.Tensor, group: int) -> torch.Tensor:
    """The sum over all ranks as a result that all have, of which there is one loss."""
    return _add(values, group)


@_like_values("replicated", "value", lambda group, grad_value: sum_of_shares(grad_value, group))
def replicated(values: torch.Tensor, group: int) -> torch.Tensor:
    """The same values, whose gradients are summed over all ranks."""
    return values.clone()


def has_shares_of_gradients(value: torch.Tensor) -> bool:
    """Whether a value that meets own ones depends on tensors by which a rank has its share of the gradient alone.

    These are all that require a gradient and are not marked as `replicated`, nor part of a sum that ranks go on with.
    """
    if value.grad_fn is None:
        return value.requires_grad
    left: list[Any] = [value.grad_fn]
    seen = set()
    while left:
        node = left.pop()
        if node is None or node in seen or node.name() in SUMMED:
            continue
        if hasattr(node, "variable"):  # a tensor that gradients are accumulated in
            return True
        seen.add(node)
        left += [before for before, _ in node.next_functions]
    return False
