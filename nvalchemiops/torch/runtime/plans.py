"""Calls of the same shapes again and again: what they do to memory is recorded once and done again for other values.

Most of the time of a small sum is spent in Python: arguments are checked, memory is found, launches are described. A
`Plan` has the launches of one call with their arguments packed, and the torch operations between them with their
memory; it is run with one call. So there is no second implementation: the steps are those of the ordinary way, and so
are the bits. What `recorder` cannot follow makes no plan.

In plain eager mode on a CPU only. Values of tensors that a call may read are part of the key of its plan.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from nvalchemiops import notices
from nvalchemiops.torch.runtime.recorder import OF_LENGTH, Recorder, Step, recording, storage_of

MOST_BYTES = 2**24
"""Memory of a plan of an operation, at most."""


class Plan:
    """The steps of a call, in memory of its own.

    Parameters
    ----------
    recorder : Recorder
        What has followed the call.
    copied : sequence of torch.Tensor
        Memory of the plan for arguments that are copied.
    results : sequence of torch.Tensor
    raises : bool
        Whether it looks for what the ordinary call raises; otherwise another call has done so for the same values.

    Attributes
    ----------
    steps : list of callable
    external : list of torch.Tensor
        On which results depend, beside arguments.
    n_bytes : int
        Memory of its own.
    """

    def __init__(
        self, recorder: Recorder, copied: Sequence[torch.Tensor], results: Sequence[torch.Tensor], raises: bool
    ) -> None:
        # numbers that kernels write: not zero where the ordinary call would raise
        self.faults = recorder.faults if raises else []
        self.steps: list[Step] = recorder.needed((*results, *self.faults))
        self.copied, self.results = copied, results
        self.addresses = recorder.addresses  # of the other arguments; steps read them. The last number is a length
        self.external = list(recorder.external.values())
        self.kept = {**{storage_of(t): t for t in copied if t.numel()}, **recorder.kept}
        self.n_bytes = sum(tensor.untyped_storage().nbytes() for tensor in self.kept.values())
        self._lock = threading.Lock()  # held in a forked child, it is held for ever: then calls are ordinary ones

    def __call__(
        self, copied: Sequence[torch.Tensor], used: Sequence[torch.Tensor] = (), length: int = 0
    ) -> tuple[torch.Tensor, ...] | None:
        """The results for these arguments, or None if the ordinary call is needed: it raises, or the plan is in use.

        ``length`` is that of lists among ``used``, if the plan is for any length.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            self.addresses[:] = [*(tensor.data_ptr() for tensor in used), length]
            with torch.no_grad():
                for memory, value in zip(self.copied, copied):
                    memory.copy_(value)
                for step in self.steps:
                    step()
            if any(map(int, self.faults)):
                return None
            return tuple(result.clone() for result in self.results)
        finally:
            self._lock.release()


def share_memory(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether any of ``some`` is in the same memory as one of ``others``, at other places of it perhaps."""
    return not {storage_of(t) for t in some if t.numel()}.isdisjoint(storage_of(t) for t in others if t.numel())


class Followed(NamedTuple):
    """A call that was followed: its plan, or why there is none, and its results, if it was made."""

    plan: Plan | None
    results: tuple[torch.Tensor, ...] | None
    reason: str = ""


def follow(
    function: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    copied: Sequence[torch.Tensor],
    used: Sequence[torch.Tensor] = (),
    borrowed: Sequence[torch.Tensor] = (),
    length: int = 0,
    changing: Sequence[torch.Tensor] = (),
    raises: bool = True,
) -> Followed:
    """Call ``function(copied)``, and make a plan of it.

    Parameters
    ----------
    function : callable
        Depends on the values of these, and otherwise on what is always the same.
    copied : sequence of torch.Tensor
        Arguments that any operations may use; a plan copies their values.
    used : sequence of torch.Tensor
        Arguments whose values kernels alone use.
    borrowed : sequence of torch.Tensor
        Arguments whose values are always the same, but not their memory.
    length : int, optional
        Of lists among ``used``, which may have any other length when the plan runs: no axis of an argument that is
        not so long by its meaning may be so long. By default shapes are always the same.
    changing : sequence of torch.Tensor, optional
        Other tensors whose values change in the same memory.
    raises : bool, optional
        As for `Plan`.
    """
    grad = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        # tensors made in inference mode could not be changed outside of it
        memory = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in copied]
        recorder = Recorder(memory, used, borrowed, length, changing)
        if len(recorder.foreign) < sum(tensor.numel() > 0 for tensor in used):
            return Followed(None, None, "arguments share memory, which others may not")
        with recording(recorder):
            results = tuple(function(memory))
    reason = recorder.reason or _fault_of(recorder, results, (*memory, *changing))
    if reason:
        return Followed(None, results, reason)
    plan = Plan(recorder, [t.detach() for t in memory], [t.detach() for t in results], raises)
    return Followed(plan, tuple([t.clone() for t in plan.results]))


def _fault_of(recorder: Recorder, results: Sequence[torch.Tensor], arguments: Sequence[torch.Tensor]) -> str:
    """Why there is no plan of a call that was followed to its end; an empty string if there is one."""
    for tensor in (*arguments, *recorder.external.values()):
        if tensor.is_leaf and tensor.grad is not None and storage_of(tensor.grad) in recorder.kept:
            return "a backward pass puts gradients into `.grad` of a tensor: use torch.autograd.grad"
    length = recorder.length
    if length and any(length in t.shape for t in (*recorder.kept.values(), *recorder.external.values())):
        return OF_LENGTH + "an axis is as long"
    known = recorder.varying | recorder.kept.keys()
    return "" if all([storage_of(t) in known for t in results if t.numel()]) else "a result was there before the call"


def record(*arguments: Any, **options: Any) -> Followed:
    """The plan of a call of an operation, without gradients. Arguments are those of `follow`.

    A call with a warning has no plan, which would not repeat it.
    """
    notes = notices.count()
    with torch.no_grad():
        plan, results, reason = follow(*arguments, **options)
    if plan is not None and plan.n_bytes > MOST_BYTES:
        plan, reason = None, f"its memory is more than {MOST_BYTES} bytes"
    if notices.count() != notes:
        plan, reason = None, "there was a warning"
    return Followed(plan, results, reason)
