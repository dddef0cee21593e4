"""Whether a call may read values of tensors, cache results that depend on them, and use shortcuts of eager mode.

The answers depend on compilers, function transforms, dispatch modes and devices. The module also has helpers that
unwrap values, and a decorator for functions that a compiler must not trace.
"""

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from nvalchemiops.layout import layout
from nvalchemiops.locks import set_within
from nvalchemiops.torch.runtime import _torch_internals as internals
from nvalchemiops.torch.runtime._torch_internals import PLAIN_TYPES, derivative_asked, has_other_modes


class ValuesNeededError(ValueError):
    """An argument was left out, but values of tensors may not be read here to choose it."""


@internals.only_inlined
def may_read(*tensors: Any, wait: bool = False) -> bool:
    """Whether values of these tensors may be read on the host, to check them or to choose shapes.

    They may not be read inside a compiler, or where operations make fake tensors, as under ``make_fx``; from fake
    tensors, which have no values; under vmap, where values differ between slices; and on a GPU or inside
    `hidden_values`, unless ``wait`` is set and no graph is being captured. Without tensors, the answer is whether the
    code is running outside of a compiler and makes values. Arguments that are not tensors may always be read.
    """
    if torch.compiler.is_compiling() or internals.results_have_no_data():
        return False
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            continue
        waits = _thread.hides_values or not layout(tensor.device.type).reads
        if waits and (not wait or (tensor.is_cuda and is_capturing())):
            return False
        if is_mapped(tensor) or (type(tensor) not in PLAIN_TYPES and internals.has_no_data(tensor)):
            return False
    return True


class _OfThread(threading.local):
    """Whether this thread leaves values unread."""

    hides_values = False


_thread = _OfThread()


def hidden_values() -> AbstractContextManager[None]:
    """A context in which `may_read` allows this thread to read values only if called with ``wait=True``."""
    return set_within(_thread, "hides_values", True)


def hides_values() -> bool:
    """Whether this thread is inside `hidden_values`."""
    return _thread.hides_values


@internals.only_inlined
def is_capturing() -> bool:
    """Whether a CUDA graph is being captured, on torch's current stream. False inside a compiler, which cannot ask."""
    if torch.compiler.is_compiling():
        return False
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


IN_CAPTURE = "give neighbors and parameters, and choose them before the capture"
"""What to do where values of a GPU would be read to choose them."""


def refuse_in_capture(tensor: torch.Tensor, advice: str) -> None:
    """Raise if the host would wait for this tensor while a graph is captured, which the driver would end by an error.

    Torch does not recover from that: it goes on as if the graph were captured.
    """
    if tensor.is_cuda and is_capturing():
        raise ValuesNeededError(f"values on a GPU would be read while a CUDA graph is captured: {advice}")


@internals.only_inlined
def is_eager(*tensors: torch.Tensor | None, under_modes: bool = False) -> bool:
    """Whether this is plain eager mode: only reverse-mode autograd sees the operations.

    Nothing is compiled; no function transform, forward-mode derivative or dispatch mode (tracers are such modes) is
    active; and the tensors have torch's own types, not subclasses. With ``under_modes`` dispatch modes may be active:
    for code that calls other operations in eager mode, but hides no operation from a mode.
    """
    if torch.compiler.is_compiling() or derivative_asked() or (has_other_modes() and not under_modes):
        return False
    for tensor in tensors:  # a plain loop: operators call this each time
        if tensor is not None and type(tensor) not in PLAIN_TYPES:
            return False
    return True


@internals.only_inlined
def may_keep(*tensors: torch.Tensor) -> bool:
    """Whether results that depend on the values of these tensors may be cached for later calls.

    They may in plain eager mode on a CPU, where reading values costs nothing, if no gradient flows through the tensors.
    """
    if not is_eager(*tensors):
        return False
    tracked = torch.is_grad_enabled()
    return all(layout(t.device.type).reads and not (tracked and t.requires_grad) for t in tensors)


@internals.only_inlined
def may_recognize(tensor: torch.Tensor, on_host: bool = False) -> bool:
    """Whether results that depend on this tensor may be cached for later calls with the same tensor, on any device.

    They may in plain eager mode, if torch counts changes of the tensor and no gradient flows through it; but not while
    a graph is captured, since the graph would hold addresses of results that the cache may drop, nor while compiled
    code warms up for one, since it takes back the memory: unless these are numbers ``on_host``.
    """
    if not is_eager(tensor) or tensor.requires_grad or tensor.is_inference():
        return False
    if on_host or not tensor.is_cuda:
        return True
    return not (torch.cuda.is_current_stream_capturing() or internals.belongs_to_compiled_graph(tensor.device))


# -- values ---------------------------------------------------------------------------------------


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its graph, also under ``torch.func.grad`` and similar transforms."""
    values = tensor.detach()
    while internals.is_wrapped_for_gradients(values):
        values = internals.unwrapped(values)
    return values


def ordinary(value: Any) -> Any:
    """The value, or a copy of a tensor that was made in inference mode, which cannot be saved for gradients."""
    return value.clone() if isinstance(value, torch.Tensor) and value.is_inference() else value


def is_mapped(tensor: torch.Tensor) -> bool:
    """Whether ``torch.func.vmap`` maps over this tensor, so that it has values for many slices."""
    while internals.is_wrapped_for_gradients(tensor):
        tensor = internals.unwrapped(tensor)
    return internals.is_batched(tensor)


def all_values_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without wrappers of ``torch.func``; under vmap with the values of all slices."""
    while internals.is_wrapped(tensor):
        tensor = internals.unwrapped(tensor)
    return tensor


def slices_of(tensor: torch.Tensor) -> torch.Tensor:
    """The values (n_slices, ...) of a tensor: all slices under vmap, otherwise a single one."""
    if not is_mapped(tensor):
        return values_of(tensor).unsqueeze(0)
    # a stack of one has the dimensions of slices in front
    return all_values_of(torch.stack([tensor])).flatten(0, -1 - tensor.ndim)


def on_host(tensor: torch.Tensor) -> np.ndarray:
    """The values of a tensor as a NumPy array, also under ``torch.func.grad`` and similar transforms.

    Raises
    ------
    ValuesNeededError
        ``vmap`` maps over the tensor, so that it has other values in each slice; or it is fake, and has none; or it is
        on a GPU, and a graph is being captured.
    """
    plain = type(tensor) is torch.Tensor and tensor.device.type == "cpu"
    if plain and not internals.transforms_active() and not internals.has_no_data(tensor):
        return tensor.detach().resolve_neg().numpy()
    if is_mapped(tensor):
        raise ValuesNeededError(
            "values that differ between the slices of `vmap` would be read, to find neighbors or to choose parameters: "
            "give neighbors and parameters, or do not map over what they depend on"
        )
    if internals.has_no_data(tensor):
        raise ValuesNeededError(
            "values of a fake tensor would be read, to find neighbors or to choose parameters: give them, or "
            "choose them outside of FakeTensorMode and export"
        )
    refuse_in_capture(tensor, IN_CAPTURE)
    values = values_of(tensor.cpu())
    with internals.without_transforms():
        return values.resolve_neg().numpy()


# -- functions that are not traced ----------------------------------------------------------------


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run ``function`` eagerly also inside ``torch.compile``: a graph break, or an error with ``fullgraph=True``.

    It does the same as ``torch.compiler.disable``, but that imports the whole compiler when it decorates.
    """
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if not internals.compiler_loaded():
            return function(*args, **options)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **options)

    return call
