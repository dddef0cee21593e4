"""Private names of torch, all of them in this file, and what stands in for one that a release does not have.

A shortcut that needs a missing name is switched off, with one line in the log; what it does is done the public way.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad

Function = TypeVar("Function", bound=Callable[..., Any])

_log = logging.getLogger("nvalchemiops")
_functorch = torch._C._functorch

transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether a transform of ``torch.func`` is on."""

count_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""How many ``TorchDispatchMode`` see each operation."""

without_transforms: Callable[[], AbstractContextManager[Any]] = torch._C._DisableFuncTorch
"""Inside of it, wrapped tensors are read as plain ones."""


def forward_mode_active() -> bool:
    """Whether ``torch.autograd.forward_ad`` differentiates."""
    return forward_ad._current_level >= 0


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether a transform has wrapped the tensor."""
    return _functorch.is_functorch_wrapped_tensor(tensor)


def is_wrapped_for_gradients(tensor: torch.Tensor) -> bool:
    """Whether ``torch.func.grad`` or its like has wrapped the tensor last."""
    return _functorch.is_gradtrackingtensor(tensor)


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether ``vmap``, or ``is_grads_batched`` of ``torch.autograd.grad``, has wrapped the tensor last."""
    return _functorch.is_batchedtensor(tensor) or _functorch.is_legacy_batchedtensor(tensor)


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without the wrapper of the last transform."""
    return _functorch.get_unwrapped(tensor)


@contextmanager
def outside_of_transforms() -> Iterator[None]:
    """As if no ``torch.func`` transform and no forward mode were on: ops that write in place refuse to run in them."""
    level = forward_ad._current_level
    forward_ad._current_level = -1
    try:
        with temporarily_clear_interpreter_stack():
            yield
    finally:
        forward_ad._current_level = level


def only_inlined(function: Function) -> Function:
    """The same function, which ``torch.compile`` follows inside of what it compiles, but never compiles by itself.

    Behind a graph break, Python calls functions one by one, and the compiler looks at each. One that asks whether it is
    being compiled would become the constant True there, for a caller that is not compiled.
    """
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

        set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))
    except (ImportError, AttributeError, TypeError) as error:
        _log.info("behind graph breaks of torch.compile values are not read: %s", error)
    return function
