"""Launches of the library on the runner: what a GPU would be given, on tensors of the CPU."""

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
import warp as wp

from nvalchemiops import launch as core
from nvalchemiops.layout import GPU, Layout, replaced_layout
from tests.checker.launches import Work, check
from tests.checker.memory import POISON


def poisoned(tensor: torch.Tensor) -> torch.Tensor:
    """A new tensor, filled with what nothing was written to."""
    if type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.layout is torch.strided:
        size, place = tensor.untyped_storage().nbytes(), tensor.untyped_storage().data_ptr()
        if size >= 4:
            np.ctypeslib.as_array((ctypes.c_uint32 * (size // 4)).from_address(place))[:] = POISON
    return tensor


@contextmanager
def checked(checks: bool = True, layout: Layout = GPU) -> Iterator[list[Work]]:
    """Gather-only kernels run with all lanes, and are checked; gives the work of each launch.

    Parameters
    ----------
    checks : bool, optional
        As for `check`.
    layout : Layout, optional
    """
    done: list[Work] = []

    def launch(
        kernel: wp.Kernel, device: Any, stream: Any, block: int | None, grid: tuple[int, ...], arguments: list[Any]
    ) -> None:
        if 0 not in grid:
            done.append(check(kernel, grid, arguments, block, checks))

    def filling(owner: Any, name: str) -> Any:
        original = getattr(owner, name)
        return mock.patch.object(owner, name, lambda *args, **options: poisoned(original(*args, **options)))

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ExitStack() as stack:
            stack.enter_context(replaced_layout("cpu", layout))
            stack.enter_context(mock.patch.object(core, "_launch_recorded", launch))
            stack.enter_context(mock.patch.object(core, "thread_count", lambda: 1))
            for name in ("empty", "empty_like", "empty_strided"):
                stack.enter_context(filling(torch, name))
            stack.enter_context(filling(torch.Tensor, "new_empty"))
            yield done
    finally:
        torch.set_num_threads(threads)
