"""Torch tensors as Warp arrays, and torch's current stream as Warp's current stream."""

import functools
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import warp as wp

from nvalchemiops._warp import ensure_warp
from nvalchemiops.torch.autograd.specs import TORCH_DTYPES
from nvalchemiops.torch.runtime._torch_internals import is_zero_tensor, stream_handle
from nvalchemiops.types import inner_shape, is_warp_dtype, scalar_type

_TENSOR = "_nvalchemiops_tensor"


def needs_grad(*tensors: Any) -> bool:
    """True if any of the tensors needs gradients; anything else is ignored.

    Inside the body of a `warp_custom_op` this answers for the op's arguments and for tensors derived from
    them (``positions.contiguous()``), eagerly and in compiled graphs alike.
    """
    return any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors)


def warp_from_torch(tensor: torch.Tensor, warp_dtype: Any, requires_grad: bool | None = None) -> wp.array:
    """View a tensor as a Warp array, without a copy.

    Parameters
    ----------
    tensor : torch.Tensor
        On the CPU or a CUDA device. The array keeps it alive.
    warp_dtype : Warp type
        Scalar, vector or matrix type; vectors and matrices take the trailing dimensions, so ``(n, 3)`` viewed
        as ``wp.vec3d`` is an array of n vectors.
    requires_grad : bool, optional
        Whether the array gets a new gradient buffer. ``tensor.grad`` is neither read nor written. By default the array
        gets one if the tensor requires a gradient.

    Returns
    -------
    wp.array

    Raises
    ------
    TypeError
        If the dtypes do not match, or a gradient is requested for an integer or bool tensor.
    ValueError
        If the trailing dimensions do not match ``warp_dtype`` or are not contiguous, so that no view exists:
        call ``.contiguous()`` first.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"`tensor` must be a torch.Tensor, got {type(tensor).__name__}")
    track = tensor.requires_grad if requires_grad is None else bool(requires_grad)
    array = _view(tensor, warp_dtype)
    if track:
        if not tensor.dtype.is_floating_point:
            raise TypeError(f"`requires_grad`: a tensor of dtype {tensor.dtype} has no gradient")
        array.grad = _view(_zeros_laid_out_like(tensor), warp_dtype)
    return array


def _zeros_laid_out_like(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros with the strides of ``tensor``, which Warp requires of a gradient."""
    if tensor.is_contiguous():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    reached = 0
    for step, length in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape) if n > 1):
        if step <= reached:
            raise ValueError(
                "`tensor` has elements that share memory (expand, unfold), so they cannot have separate gradients: "
                "call .contiguous() first"
            )
        reached += step * (length - 1)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).zero_()


def gradient_tensor(array: wp.array) -> torch.Tensor:
    """The gradient buffer of a Warp array as a tensor (a view)."""
    tensor = getattr(array.grad, _TENSOR, None)
    return wp.to_torch(array.grad, requires_grad=False) if tensor is None else tensor


@functools.cache
def _layout(warp_dtype: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    if not is_warp_dtype(warp_dtype):
        raise TypeError(f"`warp_dtype` must be a Warp scalar, vector or matrix type, got {warp_dtype!r}")
    return TORCH_DTYPES[scalar_type(warp_dtype)], inner_shape(warp_dtype)


def _view(tensor: torch.Tensor, warp_dtype: Any) -> wp.array:
    """The tensor as an array without a gradient. The array keeps the tensor alive."""
    dtype, inner = _layout(warp_dtype)
    if tensor.dtype is not dtype:
        raise TypeError(f"`tensor` has dtype {tensor.dtype}, but {warp_dtype.__name__} needs {dtype}")
    refuse_lazy(tensor)
    shape, strides = outer_layout(tensor, inner, warp_dtype)
    place = warp_device(tensor.device)
    address = tensor.data_ptr()
    array: Any = wp.array(ptr=address, copy=False, dtype=warp_dtype, shape=shape, strides=strides, device=place)
    setattr(array, _TENSOR, tensor)
    return array


def refuse_lazy(tensor: torch.Tensor) -> None:
    """Raise for a tensor that is negated, conjugated or zero by a flag, so that its memory holds other values."""
    if tensor.is_neg() or tensor.is_conj() or is_zero_tensor(tensor):
        raise ValueError(
            "`tensor` is negated, conjugated or zero only by a flag (as after .conj().imag), which kernels do not see: "
            "pass tensor.resolve_neg().clone()"
        )


def outer_layout(
    tensor: torch.Tensor, inner: tuple[int, ...], warp_dtype: Any
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and byte strides of the array that views a tensor, without the trailing ``inner`` shape."""
    size = tensor.element_size()
    shape, steps = tuple(tensor.shape), tensor.stride()
    if (1 in shape or 0 in shape) and tensor.is_contiguous():
        # torch leaves the stride of axes with one element or none undefined; Warp compares it
        steps = tuple(math.prod(shape[k + 1 :]) for k in range(len(shape)))
    if inner:
        outer = len(shape) - len(inner)
        if outer < 0 or shape[outer:] != inner:
            raise ValueError(f"`tensor` has shape {shape}, but an array of {warp_dtype.__name__} must end in {inner}")
        expected = 1
        for length, step in zip(reversed(inner), reversed(steps), strict=False):
            if step != expected and tensor.numel():
                raise ValueError(
                    f"`tensor` of shape {shape} has strides {steps}, so it cannot be viewed as {warp_dtype.__name__} "
                    "without a copy: call .contiguous() first"
                )
            expected *= length
        # a single vector or matrix becomes an array of one element
        shape, steps = (shape[:outer], steps[:outer]) if outer else ((1,), (expected,))
    elif not shape:
        shape, steps = (1,), (1,)
    return shape, tuple(step * size for step in steps)


@functools.cache
def warp_device(device: torch.device) -> wp.Device:
    """The Warp device of a torch device; raises if Warp cannot use it."""
    ensure_warp()
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"a tensor is on '{device}', but Warp supports only the CPU and CUDA devices")
    try:
        return wp.device_from_torch(device)
    except IndexError:  # with ROCm, whose devices have this name in torch, or a driver that is too old
        found = ", ".join(map(str, wp.get_cuda_devices())) or "none"
        raise ValueError(
            f"a tensor is on '{device}', but Warp finds no such GPU of NVIDIA with a driver that is new enough "
            f"(found: {found})"
        ) from None


# -- streams --------------------------------------------------------------------------------------

# Warp's current stream belongs to the device, not to the thread: only one body at a time may bind it
_bind_locks: dict[int, threading.RLock] = {}


@functools.lru_cache(maxsize=64)
def _warp_stream(device_index: int, handle: int) -> wp.Stream:
    return wp.Stream(f"cuda:{device_index}", cuda_stream=handle)


def current_stream(device: torch.device) -> wp.Stream:
    """Torch's current CUDA stream on ``device`` as a Warp stream."""
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    warp_device(device)
    return _warp_stream(device.index, stream_handle(device))


@contextmanager
def warp_stream_from_torch(*values: Any) -> Iterator[wp.Stream | None]:
    """Bind Warp's current stream to torch's current stream for all launches inside. On the CPU it does nothing.

    Parameters
    ----------
    *values
        Tensors, devices or streams. The first one on CUDA selects the device, all others are ignored.

    Yields
    ------
    wp.Stream or None
        The bound stream, or None on the CPU. Warp does not synchronize with its default stream: all memory comes from
        torch's allocator, which follows the order of torch's stream.
    """
    device = _first_cuda_device(values)
    if device is None:
        yield None
        return
    stream = current_stream(device)
    lock = _bind_locks.setdefault(stream.device.ordinal, threading.RLock())
    with lock, wp.ScopedStream(stream, sync_enter=False, sync_exit=False):
        yield stream


def _first_cuda_device(values: tuple[Any, ...]) -> torch.device | None:
    for value in values:
        if isinstance(value, torch.Tensor) or type(value).__name__ == "Stream":
            value = value.device
        elif isinstance(value, str):
            value = torch.device(value)
        if isinstance(value, torch.device) and value.type == "cuda":
            return value if value.index is not None else torch.device("cuda", torch.cuda.current_device())
    return None
