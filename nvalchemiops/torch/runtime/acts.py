"""Acts on what is outside of a call, such as other ranks: a plan contains all acts of its call, in their order.

So a rank that replays a plan sends the same messages as a rank that makes the normal call. Results of other ranks are
values that differ in each replay, whatever this rank has sent.
"""

import functools
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import local

import torch

from nvalchemiops.locks import set_within
from nvalchemiops.torch.runtime.recorder import Step, current_recorder
from nvalchemiops.torch.runtime.storage import storage_of

End = Callable[[BaseException | None], None]
"""The end of a block, which is told the error that has ended it."""

Written = deque[list[torch.Tensor]]
"""What acts have written, in their order."""


class _OfThread(local):
    """How the acts of this thread are compared with those of a plan."""

    heard: Written | None = None
    told: Written | None = None


_thread = _OfThread()


def nothing() -> None:
    """The step of an act that only notes something."""


def act(
    note: Step, step: Step = nothing, reads: Sequence[torch.Tensor] = (), writes: Sequence[torch.Tensor] = ()
) -> None:
    """Act on what is outside of the call: ``note`` is what the host notes, then ``step`` is the act.

    A captured graph contains only ``step``, and the host notes the rest in each replay. ``reads`` and ``writes`` are
    memory that ``step`` uses, which a plan keeps; ``writes`` were made in this call.
    """
    recorder = current_recorder()
    if recorder is None:
        _take(note, step, writes)
        return
    recorder.acts = True
    recorder.always(functools.partial(_take, note, step, writes), reads, writes)
    with recorder.pause():
        if recorder.captures and not recorder.reason:
            recorder.notes.append(note)
            step()
        else:
            _take(note, step, writes)


def _take(note: Step, step: Step, writes: Sequence[torch.Tensor]) -> None:
    if (told := _thread.told) is not None:
        for memory, value in zip(writes, told.popleft(), strict=True):
            memory.copy_(value)
        return
    note()
    step()
    if (heard := _thread.heard) is not None:
        heard.append([tensor.clone() for tensor in writes])


def hearing(heard: Written) -> AbstractContextManager[None]:
    """A context in which what acts write is appended to ``heard``."""
    return set_within(_thread, "heard", heard)


def telling(told: Written) -> AbstractContextManager[None]:
    """A context in which nothing is done for acts: they write what they are ``told``."""
    return set_within(_thread, "told", told)


# -- blocks ---------------------------------------------------------------------------------------


def enter_block(begin: Step, end: End, condition: Callable[[], bool]) -> None:
    """Enter a block that must learn of an error inside of it, also in a replay.

    Without the ``condition``, there is no replay: the normal call is made.
    """
    recorder = current_recorder()
    if recorder is None:
        act(begin)
        return

    def enter() -> None:
        begin()
        recorder.open.append(end)

    recorder.conditions.append(condition)
    act(enter)


def leave_block(end: End) -> None:
    """Leave a block without an error."""
    recorder = current_recorder()
    if recorder is None:
        act(functools.partial(end, None))
        return

    def leave() -> None:
        recorder.open.pop()(None)

    act(leave)


def decided(flag: torch.Tensor) -> bool:
    """Read a decision on which the rest of the call depends. A replay with another decision raises an error."""
    recorder = current_recorder()
    if recorder is None:
        return bool(flag)
    with recorder.pause():
        found = bool(flag)

    def check() -> None:
        if bool(flag) != found:
            raise ValueError("weights of energies differ between ranks, unlike in the call that was recorded, or not")

    recorder.always(check, (flag,))
    return found


# -- the recorder, if there is one ----------------------------------------------------------------


def end_recording(reason: str) -> None:
    """Let this call have no plan."""
    if (recorder := current_recorder()) is not None:
        recorder.end(reason)


def unrecorded() -> AbstractContextManager[None]:
    """A context for making something that is kept for all calls, and so is no part of a plan."""
    recorder = current_recorder()
    return nullcontext() if recorder is None else recorder.pause()


def never_change(*tensors: torch.Tensor | None) -> None:
    """Let a plan use these tensors without comparing them with their values before."""
    if (recorder := current_recorder()) is not None:
        recorder.kept.update({storage_of(t): t for t in tensors if t is not None and t.numel()})
