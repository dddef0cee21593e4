"""Launch a Warp kernel on torch tensors: views by the kernel's own argument types, torch's current stream."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import warp as wp

from nvalchemiops import launch as core
from nvalchemiops._warp import ensure_warp
from nvalchemiops.torch.autograd.arrays import current_stream, outer_layout, warp_device
from nvalchemiops.torch.autograd.specs import TORCH_DTYPES
from nvalchemiops.types import inner_shape, scalar_type

_KERNEL_SCALARS: dict[torch.dtype, Any] = {
    torch.float32: wp.float32,
    torch.float64: wp.float64,
    torch.int32: wp.int32,
    torch.int64: wp.int64,
    torch.bool: wp.bool,
}


def launch(
    kernel: wp.Kernel,
    dim: int | Sequence[int],
    inputs: Sequence[Any],
    outputs: Sequence[Any] = (),
    *,
    lanes: int = 0,
) -> None:
    """Launch ``kernel`` on tensors, on the device of the first one and on torch's current stream.

    For the bodies of ops that need no tape: launches are not recorded. See `nvalchemiops.launch.launch` for
    ``lanes``, and for what is split over CPU threads.

    Parameters
    ----------
    kernel : wp.Kernel
    dim : int or sequence of int
    inputs, outputs : sequence of torch.Tensor or number
        In the order of the kernel's parameters, without the ``offset`` of a gather-only kernel.

    Raises
    ------
    TypeError
        A tensor's dtype does not fit the kernel's parameter.
    ValueError
        A tensor's shape or strides do not fit, or the tensors lie on different devices.
    """
    arguments = [*inputs, *outputs]
    device, descriptors = describe(kernel, arguments)
    core.launch(
        kernel,
        dim,
        descriptors,
        device=warp_device(device),
        stream=current_stream(device) if device.type == "cuda" else None,
        lanes=lanes,
        record_tape=False,
    )


def launch_adjoint(
    kernel: wp.Kernel,
    dim: int | Sequence[int],
    arguments: Sequence[Any],
    gradients: Sequence[torch.Tensor | None],
) -> None:
    """Run the adjoint that Warp derives for ``kernel``, adding to ``gradients``, one for each argument or None."""
    device, descriptors = describe(kernel, arguments, gradients)
    _, adjoints = describe(kernel, gradients)
    core.launch_adjoint(
        kernel,
        dim,
        descriptors,
        adjoints,
        device=warp_device(device),
        stream=current_stream(device) if device.type == "cuda" else None,
    )


def describe(
    kernel: wp.Kernel, arguments: Sequence[Any], gradients: Sequence[torch.Tensor | None] | None = None
) -> tuple[torch.device, list[Any]]:
    """Array descriptors for tensors, other arguments as they are; and the device of the tensors."""
    ensure_warp()
    declared = kernel.adj.args[1:] if core.is_gather_only(kernel) else kernel.adj.args
    if len(arguments) != len(declared):
        raise TypeError(f"kernel '{kernel.key}' takes {len(declared)} arguments, got {len(arguments)}")
    device = None
    descriptors = []
    for position, (argument, value) in enumerate(zip(declared, arguments, strict=True)):
        if not isinstance(value, torch.Tensor):
            descriptors.append(value)
            continue
        if device is None:
            device = value.device
        elif value.device != device:
            raise ValueError(f"`{argument.label}` is on {value.device}, but other arguments are on {device}")
        gradient = gradients[position] if gradients is not None else None
        try:
            descriptors.append(_descriptor(value, argument.type, gradient))
        except (TypeError, ValueError) as error:
            raise type(error)(f"kernel '{kernel.key}', argument `{argument.label}`: {error}") from None
    if device is None:
        raise TypeError(f"kernel '{kernel.key}' got no tensor, so its device is unknown")
    return device, descriptors


def _descriptor(tensor: torch.Tensor, array_type: Any, gradient: torch.Tensor | None) -> Any:
    element = getattr(array_type, "dtype", None)
    if element is None:
        raise TypeError("the kernel expects a plain value here, not a tensor")
    if element is Any:
        # a generic kernel picks its overload from the array's type, which a bare descriptor does not carry
        if tensor.dtype not in _KERNEL_SCALARS:
            raise TypeError(f"tensor dtype {tensor.dtype} has no Warp scalar type")
        return wp.from_torch(tensor.detach(), dtype=_KERNEL_SCALARS[tensor.dtype])
    expected, inner = _element(element)
    if tensor.dtype is not expected:
        raise TypeError(f"expected dtype {expected}, got {tensor.dtype}")
    shape, strides = outer_layout(tensor, inner, element)
    if len(shape) != array_type.ndim:
        raise ValueError(f"expected {array_type.ndim} array dimensions, got shape {tuple(tensor.shape)}")
    address = 0 if gradient is None else gradient.data_ptr()
    return core.descriptor_type()(tensor.data_ptr(), address, len(shape), shape, strides)


@functools.cache
def _element(dtype: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    return TORCH_DTYPES[scalar_type(dtype)], inner_shape(dtype)
