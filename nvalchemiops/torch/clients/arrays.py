"""Functions of Warp arrays from functions of tensors that share their memory."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import warp as wp

from nvalchemiops._warp import ensure_warp


def on_arrays(result: str | None = None) -> Callable[[Callable[..., None]], Callable[..., Any]]:
    """Let a function of tensors, which writes into some of them, take Warp arrays as well.

    Vectors and matrices become trailing axes. Operations go to torch's current stream, and no gradients are recorded.
    Two more keyword arguments are taken: ``atom_ptr`` (n_systems + 1,) int32, the first atom of each system, in place
    of ``batch_idx``, and ``device``, which is where the arrays are.

    Parameters
    ----------
    result : str, optional
        The argument that is returned, as it was given; by default the first one.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., Any]:
        parameters = inspect.signature(function)
        returned = result or next(iter(parameters.parameters))

        @functools.wraps(function)
        def view(*args: Any, atom_ptr: Any = None, device: Any = None, **kwargs: Any) -> Any:
            ensure_warp()
            if atom_ptr is not None:
                first = _tensor(atom_ptr)
                systems = torch.arange(first.shape[0] - 1, dtype=torch.int32, device=first.device)
                kwargs["batch_idx"] = systems.repeat_interleave(first[1:] - first[:-1])
            given = parameters.bind(*args, **kwargs).arguments
            with torch.no_grad():
                function(**{name: _tensor(value) for name, value in given.items()})
            return given[returned]

        return view

    return decorate


def _tensor(value: Any) -> Any:
    return wp.to_torch(value, requires_grad=False) if isinstance(value, wp.array) else value
