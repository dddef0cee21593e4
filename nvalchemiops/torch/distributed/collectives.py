"""Collective operations of torch.distributed as torch ops, differentiable to any order.

Each rank computes a share of a result, and the gradient of the sum of all shares. So there are two kinds of tensors:
*own* tensors, whose values differ between ranks, and *replicated* tensors, which are the same on all ranks. An op that
turns one kind into the other has a derivative that turns it back:

- `sum_of_shares`: sums own values; the sum is replicated. Its derivative is `replicated`.
- `replicated`: marks a replicated tensor that each rank combines with own values. Its derivative is `sum_of_shares`, so
  the gradient of a replicated tensor is complete on each rank.
- `sum_on_all_ranks`: sums own values, and each rank uses the sum for its own share. Its derivative is the op itself.
- `rows_from_partners`: sends rows from each rank to some other ranks. Its derivative sends them back.

All ranks must call the same ops in the same order, backward passes included.
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
from nvalchemiops.torch.autograd.functorch import also_of_no_slice
from nvalchemiops.torch.autograd.specs import TORCH_DTYPES
from nvalchemiops.torch.distributed.communication import add, present, swap_rows
from nvalchemiops.torch.runtime.history import is_of_leaf, nodes_behind

_groups: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Groups of ranks by number; ops take numbers. References are weak: ``destroy_process_group`` ends the groups."""

LAST = 0.05
"""Seconds at the end of a process in which the threads of groups release their last tensors."""


SUMMED = ("nvalchemiops_replicatedBackward", "nvalchemiops_sum_on_all_ranksBackward")
"""Names of the autograd nodes whose backward pass sums gradients over the ranks."""


def number_of(group: Any) -> int:
    """The number by which ops refer to a group of ranks."""
    if group is dist.GroupMember.NON_GROUP_MEMBER:  # `new_group` returns it to ranks outside of the group
        raise ValueError("`group`: this rank is not in it")
    _end_in_order()
    number = id(group)
    _groups[number] = group
    return number


def group_of(number: int) -> Any:
    """The group of ranks with this number."""
    return present(lambda: _groups.get(number))


@functools.cache
def _end_in_order() -> None:
    """At the end of the process, let the threads of gloo finish before the interpreter ends.

    They release a Python tensor some time after the call that sent it has returned. If the interpreter ends first, the
    process aborts ("terminate called without an active exception").
    """

    def finish() -> None:
        _groups.clear()
        gc.collect()  # frees domains, which are in reference cycles; the threads of their groups end with them
        time.sleep(LAST)

    atexit.register(finish)


@also_of_no_slice  # a rank without atoms has no direction, and the others would wait for it
def refuse_slices(*_: Any) -> Any:
    """The rule for ``torch.func.vmap`` of a collective op: it raises an error.

    A vmap over the same directions on all ranks would be right. In ``jacfwd`` and ``hessian`` each rank maps over
    directions for the atoms that it owns, and results would be sums of unrelated columns. The op cannot tell the two
    cases apart.
    """
    raise NotImplementedError(
        "torch.func.vmap (used by jacfwd, hessian and jacrev of vectors) cannot map over a call with a `domain`: each "
        "rank would map over directions of the atoms that it owns, and unrelated directions would be combined. Use one "
        "direction of the atoms of all ranks at a time, by torch.func.jvp, torch.autograd.grad or "
        "torch.autograd.functional.hvp"
    )


def _dtype(values: torch.Tensor, *_: Any) -> Any:
    return next(kind for kind, dtype in TORCH_DTYPES.items() if dtype is values.dtype)


@warp_custom_op(
    "nvalchemiops::rows_from_partners",
    outputs=[OutputSpec("rows", _dtype, lambda v, _, __, receive, ___: (sum(receive), *v.shape[1:]))],
    backward=lambda partners, send, receive, group, grad_rows: rows_from_partners(
        grad_rows, partners, receive, send, group
    ),
    vmap=refuse_slices,
    trusted=True,
)
def rows_from_partners(
    values: torch.Tensor, partners: Sequence[int], send: Sequence[int], receive: Sequence[int], group: int
) -> torch.Tensor:
    """Send rows (n, ...) to other ranks, those for the first partner first, and return the rows that come from them.

    Partners are in ascending order, and this rank may be one of them; ``send`` and ``receive`` are how many rows go to
    each, and come from each. ``group`` is from `number_of`.
    """
    return swap_rows(values, send, receive, group_of(group), partners)


def _like_values(name: str, result: str, backward: Callable[..., torch.Tensor]) -> Any:
    """The decorator of an op whose result has the shape and the dtype of the values."""
    outputs = [OutputSpec(result, _dtype, lambda values, _: tuple(values.shape))]
    name = f"nvalchemiops::{name}"
    return warp_custom_op(name, outputs=outputs, backward=backward, vmap=refuse_slices, trusted=True)


def _add(values: torch.Tensor, group: int) -> torch.Tensor:
    total = values.clone(memory_format=torch.contiguous_format)
    return add(total, group_of(group)) if values.numel() else total  # shapes are the same on all ranks


@_like_values("sum_on_all_ranks", "total", lambda group, grad_total: sum_on_all_ranks(grad_total, group))
def sum_on_all_ranks(values: torch.Tensor, group: int) -> torch.Tensor:
    """The sum over all ranks, from which each rank computes its own share of a result."""
    return _add(values, group)


@_like_values("sum_of_shares", "total", lambda group, grad_total: replicated(grad_total, group))
def sum_of_shares(values: torch.Tensor, group: int) -> torch.Tensor:
    """The sum over all ranks, a replicated result. The loss is computed from it once, not summed over the ranks."""
    return _add(values, group)


@_like_values("replicated", "value", lambda group, grad_value: sum_of_shares(grad_value, group))
def replicated(values: torch.Tensor, group: int) -> torch.Tensor:
    """The same values. Their gradients are summed over all ranks."""
    return values.clone()


def has_shares_of_gradients(value: torch.Tensor) -> bool:
    """Whether the gradient of some tensor on which ``value`` depends would be only this rank's share.

    This holds for each tensor that requires a gradient, unless it enters through `replicated` or `sum_on_all_ranks`.
    """
    if value.grad_fn is None:
        return value.requires_grad
    return any(map(is_of_leaf, nodes_behind([value], lambda node: node.name() in SUMMED)))
