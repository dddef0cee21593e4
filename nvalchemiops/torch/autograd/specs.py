"""Specifications of an op's outputs: shapes and dtypes that are known without running the op."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import warp as wp

from nvalchemiops.types import inner_shape, is_warp_dtype, scalar_type

_SAME_NAMES = ("bool", "int8", "uint8", "int16", "int32", "int64", "float16", "float32", "float64")

TORCH_DTYPES: dict[Any, torch.dtype] = {getattr(wp, name): getattr(torch, name) for name in _SAME_NAMES}
# torch has few operations on wide unsigned integers, so their bits are stored in signed tensors
TORCH_DTYPES |= {wp.uint16: torch.int16, wp.uint32: torch.int32, wp.uint64: torch.int64}

PRECISIONS = {torch.float32: wp.float32, torch.float64: wp.float64}
"""Warp scalar types of kernels, by the dtype of their tensors."""


def real_of(values: torch.Tensor, *_: Any) -> Any:
    """The Warp scalar type of the first input: for ``dtype`` of an `OutputSpec`."""
    return PRECISIONS[values.dtype]


def precision_of(values: torch.Tensor) -> str:
    """The name of the Warp scalar type of a tensor: "float32" or "float64"."""
    return PRECISIONS[values.dtype].__name__


@dataclasses.dataclass(frozen=True)
class DynamicSize:
    """A size in the shape of an `OutputSpec` that is known only after the op has run. Equal names mean equal sizes.

    Under ``torch.compile`` it becomes an unbacked size. To learn the size, the op waits for its device.
    """

    name: str


@dataclasses.dataclass(frozen=True)
class OutputSpec:
    """The name, shape and dtype of an output of an op.

    Parameters
    ----------
    name : str
        Name by which the body attaches the output's Warp array and ``grad_arrays`` refers to it.
    dtype : Warp type or callable
        Warp scalar, vector or matrix type (``wp.float64``, ``wp.vec3d``), or a function of the op's inputs that returns
        one.
    shape : tuple or callable
        The torch shape, including trailing vector dimensions: ``(n, 3)`` for n ``wp.vec3d``. Or a function of the op's
        inputs that returns a shape; it must work under symbolic shapes, so use ``tensor.shape``. A size that depends on
        the data is a `DynamicSize`.
    torch_dtype : torch.dtype, optional
        Overrides the torch dtype that follows from ``dtype``.

    Notes
    -----
    The functions get all declared inputs of the op as positional arguments, with defaults filled in.
    """

    name: str
    dtype: Any
    shape: tuple[int, ...] | Callable[..., Any]
    torch_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise ValueError(f"OutputSpec: `name` must be an identifier, got {self.name!r}")
        if not is_warp_dtype(self.dtype) and not callable(self.dtype):
            raise TypeError(f"OutputSpec '{self.name}': `dtype` must be a Warp type or a callable, got {self.dtype!r}")
        if not callable(self.shape):
            object.__setattr__(self, "shape", tuple(self.shape))
            inner = inner_shape(self.dtype) if is_warp_dtype(self.dtype) else ()
            if inner and self.shape[-len(inner) :] != inner:
                raise ValueError(
                    f"OutputSpec '{self.name}': `shape` {self.shape} must end in {inner}, the components of its dtype"
                )

    @property
    def may_be_float(self) -> bool:
        """False if the output is known to hold integers or bools, which have no gradient."""
        known = self._known_dtype
        return known is None or known.is_floating_point

    def resolve(self, inputs: Sequence[Any]) -> tuple[tuple[Any, ...], torch.dtype]:
        """Shape and torch dtype of this output for the given inputs (real, fake or symbolic)."""
        shape = tuple(self.shape(*inputs)) if callable(self.shape) else self.shape
        known = self._known_dtype
        if known is not None:
            return shape, known
        dtype = _torch_dtype(self.dtype(*inputs))
        if dtype is None:
            raise TypeError(
                f"OutputSpec '{self.name}': `dtype` returned {self.dtype(*inputs)!r}, which is not a Warp type"
            )
        return shape, dtype

    @functools.cached_property
    def _known_dtype(self) -> torch.dtype | None:
        """The torch dtype, if it does not depend on inputs."""
        return self.torch_dtype or (_torch_dtype(self.dtype) if is_warp_dtype(self.dtype) else None)


def like(name: str, i: int) -> OutputSpec:
    """An output with the shape and the dtype of the input at position ``i``."""
    return OutputSpec(name, lambda *inputs: wp.dtype_from_torch(inputs[i].dtype), lambda *inputs: inputs[i].shape)


@functools.cache
def _torch_dtype(dtype: Any) -> torch.dtype | None:
    """The torch dtype for a Warp type; None for anything else."""
    return TORCH_DTYPES[scalar_type(dtype)] if is_warp_dtype(dtype) else None


def fill_sizes(shape: tuple[Any, ...], sizes: dict[str, Any], new_size: Callable[[int], Any]) -> tuple[Any, ...]:
    """``shape`` with a number for each `DynamicSize`: from ``sizes``, or a new one, ``new_size(dimension)``."""
    filled = list(shape)
    for dimension, size in enumerate(shape):
        if isinstance(size, DynamicSize):
            if size.name not in sizes:
                sizes[size.name] = new_size(dimension)
            filled[dimension] = sizes[size.name]
    return tuple(filled)
