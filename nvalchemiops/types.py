"""Warp types: the scalar, vector and matrix of each floating-point precision; properties of Warp types."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import warp as wp

from nvalchemiops._warp_internals import component_shape, component_type, struct_size

HostPbc = bool | np.bool_ | Sequence[int | Sequence[int]] | np.ndarray
"""Periodicity that is no tensor: one bool for all axes, or (3,) or (n_systems, 3) bools, or integers 0 and 1."""


class Real(NamedTuple):
    """The Warp types of one floating-point precision."""

    scalar: Any
    vec3: Any
    mat33: Any


REAL: dict[str, Real] = {
    "float32": Real(wp.float32, wp.vec3f, wp.mat33f),
    "float64": Real(wp.float64, wp.vec3d, wp.mat33d),
}

_INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
SCALARS = frozenset(getattr(wp, name) for name in ("bool", *_INTEGERS, "float16", "float32", "float64"))


def is_warp_dtype(dtype: Any) -> bool:
    """True for a Warp scalar, vector, matrix or quaternion type (a class), False for anything else."""
    return isinstance(dtype, type) and (dtype in SCALARS or component_type(dtype) is not None)


def is_struct(dtype: Any) -> bool:
    """True for a ``wp.struct``. A tensor of bytes holds an array of them."""
    return struct_size(dtype) is not None


def scalar_type(dtype: Any) -> Any:
    """The scalar type of the components of a Warp scalar, vector or matrix type; bytes for a struct."""
    if is_struct(dtype):
        return wp.uint8
    return component_type(dtype) or dtype


def inner_shape(dtype: Any) -> tuple[int, ...]:
    """The trailing dimensions of a tensor that hold a Warp vector, matrix or struct; empty for a scalar."""
    size = struct_size(dtype)
    return component_shape(dtype) if size is None else (size,)
