"""Launch Warp kernels on torch tensors, which are viewed as the kernel's argument types, on torch's current stream."""

import functools
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
import warp as wp

from nvalchemiops import launch as core
from nvalchemiops._warp import ensure_warp
from nvalchemiops._warp_internals import descriptor, descriptor_type, parameters
from nvalchemiops.torch.autograd.arrays import current_stream, outer_layout, refuse_lazy, warp_device, warp_from_torch
from nvalchemiops.torch.autograd.specs import TORCH_DTYPES
from nvalchemiops.torch.runtime._torch_internals import is_zero_tensor
from nvalchemiops.torch.runtime.recorder import current_recorder
from nvalchemiops.types import inner_shape, scalar_type


def launch(
    kernel: wp.Kernel,
    dim: int | Sequence[int],
    inputs: Sequence[Any],
    outputs: Sequence[Any] = (),
    *,
    lanes: int = 0,
    kind: Hashable = None,
) -> None:
    """Launch ``kernel`` on tensors, on the device of the first one and on torch's current stream.

    For the bodies of ops without a tape: launches are not recorded. See `nvalchemiops.launch.launch` for ``lanes`` and
    ``kind``, and for kernels that are split over CPU threads.

    Parameters
    ----------
    kernel : wp.Kernel
    dim : int or sequence of int
    inputs, outputs : sequence of torch.Tensor, number or None
        In the order of the kernel's parameters, without the ``offset`` of a gather-only kernel. None means an array
        without elements.

    Raises
    ------
    TypeError
        A tensor's dtype does not fit the kernel's parameter.
    ValueError
        A tensor's shape or strides do not fit, or the tensors are on different devices.
    NotDifferentiableError
        If a tape is recording, since it would miss this launch.
    """
    arguments = [*inputs, *outputs]
    recording = core.active_tape() is not None
    if recording and any(isinstance(a, torch.Tensor) and a.is_floating_point() for a in arguments):
        raise core.NotDifferentiableError(
            f"kernel '{kernel.key}' is launched on tensors inside a recording, which would miss it: pass Warp arrays "
            "to nvalchemiops.launch.launch there, or launch outside of the recording"
        )
    device, descriptors = describe(kernel, arguments)
    place, stream = _place(device)
    if (recorder := current_recorder()) is not None:
        recorder.launch(kernel, dim, inputs, outputs, descriptors, place, lanes, kind)
    core.launch(kernel, dim, descriptors, device=place, stream=stream, lanes=lanes, record_tape=False, kind=kind)


def launch_adjoint(
    kernel: wp.Kernel,
    dim: int | Sequence[int],
    arguments: Sequence[Any],
    gradients: Sequence[torch.Tensor | None],
) -> None:
    """Run the adjoint that Warp derives for ``kernel``. It adds to ``gradients``, one for each argument (or None)."""
    if (recorder := current_recorder()) is not None:
        recorder.end(f"the adjoint of kernel '{kernel.key}'")
    device, descriptors = describe(kernel, arguments)
    _, adjoints = describe(kernel, gradients)
    for position, gradient in enumerate(gradients):
        if gradient is not None and type(array := descriptors[position]) is bytes:
            descriptors[position] = array[:8] + adjoints[position][:8] + array[16:]
        elif gradient is not None:
            array.grad = adjoints[position]
    place, stream = _place(device)
    core.launch_adjoint(kernel, dim, descriptors, adjoints, device=place, stream=stream)


def _place(device: torch.device) -> tuple[wp.Device, wp.Stream | None]:
    """Warp's device, and on a GPU torch's current stream."""
    return warp_device(device), current_stream(device) if device.type == "cuda" else None


def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU; 0 for a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


class RepeatedLaunch:
    """A launch on a CPU that is repeated with the same inputs, whose memory stays, and with other outputs.

    It takes half of the time of `launch`, whose arguments these are. No recorder and no tape may follow it.
    """

    def __init__(self, kernel: wp.Kernel, dim: int, inputs: Sequence[Any], *, lanes: int = 0) -> None:
        self.kernel, self.tensors = kernel, inputs
        parameters = _parameters(kernel)
        self.parameters = parameters[len(inputs) :]
        device, self.inputs = _described(kernel, parameters[: len(inputs)], inputs)
        self.run = core.prepared(kernel, dim, device=warp_device(device), lanes=lanes, kind=None)

    def __call__(self, outputs: Sequence[Any]) -> None:
        """Launch the kernel for these outputs."""
        self.run([*self.inputs, *_described(self.kernel, self.parameters, outputs)[1]])


def describe(kernel: wp.Kernel, arguments: Sequence[Any]) -> tuple[torch.device, list[Any]]:
    """The device of the tensors, and the arguments with descriptors, as bytes, in place of tensors and None."""
    parameters = _parameters(kernel)
    if len(arguments) != len(parameters):
        raise TypeError(f"kernel '{kernel.key}' takes {len(parameters)} arguments, got {len(arguments)}")
    return _described(kernel, parameters, arguments)


def _described(
    kernel: wp.Kernel, parameters: Sequence["_Expected"], arguments: Sequence[Any]
) -> tuple[torch.device, list[Any]]:
    """`describe` for some of the parameters."""
    device = None
    descriptors: list[Any] = []
    # inlined as far as possible: this loop is most of the time of a small launch
    for value, expected in zip(arguments, parameters):
        if type(value) is not torch.Tensor and not isinstance(value, torch.Tensor):
            descriptors.append(expected.absent if value is None and expected.absent is not None else value)
            continue
        place = value.device
        if device is None:
            device = place
        elif device != place:
            raise ValueError(f"`{expected.name}` is on {place}, but other arguments are on {device}")
        is_usual = value.dtype is expected.dtype and not value.is_neg()
        address = value.data_ptr() if is_usual else 0
        if address == 0 and (not is_usual or is_zero_tensor(value)):
            descriptors.append(_unusual(value, kernel, expected))
            continue
        layout = expected.layouts.get((value.shape, value.stride()))
        if layout is None:
            layout = _layout(value, kernel, expected)
        descriptors.append(address.to_bytes(16, "little") + layout)
    if device is None:
        raise TypeError(f"kernel '{kernel.key}' got no tensor, so its device is unknown")
    return device, descriptors


class _Expected(NamedTuple):
    """The properties that a tensor must have for a kernel parameter."""

    name: str
    element: Any  # Warp dtype of the array; None: a plain value; Any: a generic kernel
    dtype: torch.dtype | None  # of tensors that are passed as descriptors
    inner: tuple[int, ...]
    ndim: int
    layouts: dict[tuple[torch.Size, tuple[int, ...]], bytes]  # the part of a descriptor for shape and strides
    absent: Any  # descriptor of an array without elements; None for a plain value or a generic kernel


@functools.cache
def _parameters(kernel: wp.Kernel) -> tuple[_Expected, ...]:
    ensure_warp()
    expected = []
    as_bytes = descriptor_type() is not None
    for argument in parameters(kernel)[core.is_gather_only(kernel) :]:
        kind: Any = argument.type
        element = getattr(kind, "dtype", None)
        if element is None or element is Any:
            expected.append(_Expected(argument.label, element, None, (), 0, {}, None))
        else:
            empty = (0,) * kind.ndim
            absent = descriptor(empty, empty) if as_bytes else None
            dtype = TORCH_DTYPES[scalar_type(element)] if as_bytes else None
            expected.append(_Expected(argument.label, element, dtype, inner_shape(element), kind.ndim, {}, absent))
    return tuple(expected)


def _unusual(tensor: torch.Tensor, kernel: wp.Kernel, expected: _Expected) -> Any:
    """The array for a tensor that cannot be passed as a descriptor, such as one for a generic kernel; or an error."""
    if expected.element is None:
        raise TypeError(f"{_label(kernel, expected)}: the kernel expects a plain value here, not a tensor")
    refuse_lazy(tensor)
    if expected.element is not Any and expected.dtype is None:
        array: Any = warp_from_torch(tensor.detach(), expected.element)
        if array.ndim != expected.ndim:
            _layout(tensor, kernel, expected)  # raises with the reason
        return array
    if expected.element is not Any:
        raise TypeError(f"{_label(kernel, expected)}: expected dtype {expected.dtype}, got {tensor.dtype}")
    # a generic kernel picks its overload by the type of the array, which a descriptor does not have
    try:
        scalar = wp.dtype_from_torch(tensor.dtype)
    except TypeError:
        raise TypeError(f"{_label(kernel, expected)}: dtype {tensor.dtype} has no Warp scalar type") from None
    return wp.from_torch(tensor.detach(), dtype=scalar)


MOST_ELEMENTS = 2**31 - 1
"""Largest number of elements along an axis of an array."""

KEPT_LAYOUTS = 64
"""Number of layouts that are kept for each parameter of a kernel: most launches use the same few."""


def _layout(tensor: torch.Tensor, kernel: wp.Kernel, expected: _Expected) -> bytes:
    """A descriptor of ``tensor`` without the two addresses, of 8 bytes each, at its start."""
    try:
        shape, strides = outer_layout(tensor, expected.inner, expected.element)
    except ValueError as error:
        raise ValueError(f"{_label(kernel, expected)}: {error}") from None
    if max(shape, default=0) > MOST_ELEMENTS:
        raise ValueError(
            f"{_label(kernel, expected)}: shape {tuple(tensor.shape)} has more than {MOST_ELEMENTS} elements along an "
            "axis, which kernels count with 32 bits"
        )
    if len(shape) != expected.ndim:
        raise ValueError(
            f"{_label(kernel, expected)}: expected {expected.ndim} array dimensions, got shape {tuple(tensor.shape)}"
        )
    if len(expected.layouts) >= KEPT_LAYOUTS:
        expected.layouts.clear()
    layout = expected.layouts[tensor.shape, tensor.stride()] = descriptor(shape, strides)[16:]
    return layout


def _label(kernel: wp.Kernel, expected: _Expected) -> str:
    return f"kernel '{kernel.key}', argument `{expected.name}`"
