"""Errors of one rank between messages: the ranks that wait for its next message learn them.

Errors in the checks of arguments are told by `nvalchemiops.torch.distributed.agreement`. All others, such as a lack of
memory in the middle of a call, an interrupt, or an error in code of the user, end a *scope* on one rank only, while
other ranks wait inside of it. The rank then notes in the store of the group which scope it has left. A rank that waits
in the same scope for a message that the first one has not begun finds this note, and raises, too.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from nvalchemiops.torch.distributed.communication import messages_of
from nvalchemiops.torch.runtime.acts import enter_block, leave_block

P = ParamSpec("P")
R = TypeVar("R")


class fail_together(contextlib.ContextDecorator):  # it reads as a statement
    """If one rank leaves this block by an error, ranks that wait in it raise `OtherRankError` within seconds.

    A context manager or decorator, which all ranks enter the same number of times. It sends no message. `Domain`,
    `divide` and the functions of this library that take a ``domain`` contain such a block, `simulate` and `relax`
    around all of their steps. Put one around a loop of your own: then an error in your code, or an interrupt between
    two calls, reaches all ranks.

    Ranks that have raised while they waited must go on with a new group (`torch.distributed.new_group`). If all ranks
    raise by themselves, and none has waited, they may go on with the same group. Blocks may be nested: only the
    outermost one counts.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, optional
        The ranks. All by default.

    Notes
    -----
    On CPUs (gloo) only. With NCCL, ranks wait on the device, where they cannot look for notes of others: there the
    timeout of the group ends the wait.
    """

    def __init__(self, group: Any = None) -> None:
        self._given = group

    def __enter__(self) -> None:
        # without groups this is the only process
        is_default = self._given is None and dist.is_initialized()
        self._group = dist.group.WORLD if is_default else self._given
        if self._group is not None:
            messages, there = messages_of(self._group), weakref.ref(self._group)
            self._end = functools.partial(messages.exit, there)
            enter_block(messages.enter, self._end, lambda: not messages.left)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._group is not None and error is None:
            leave_block(self._end)
        elif self._group is not None:
            self._end(error)


def in_call(group: Any) -> contextlib.AbstractContextManager[None]:
    """The block in a function of this library; in compiled code, and outside of the group, there is none."""
    has_none = torch.compiler.is_compiling() or group is dist.GroupMember.NON_GROUP_MEMBER
    return contextlib.nullcontext() if has_none else fail_together(group)


def as_call(function: Callable[P, R]) -> Callable[P, R]:
    """The decorator of a function that takes a ``group`` by name: all of it is the block."""

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        with in_call(options.get("group")):
            return function(*args, **options)

    return call
