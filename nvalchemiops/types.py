"""Precision in one place: which Warp scalar, vector and matrix belong to a floating-point width."""

import ctypes
from typing import Any, NamedTuple

import warp as wp


class Real(NamedTuple):
    """The Warp types of one floating-point precision."""

    scalar: Any
    vec3: Any
    mat33: Any


REAL: dict[str, Real] = {
    "float32": Real(wp.float32, wp.vec3f, wp.mat33f),
    "float64": Real(wp.float64, wp.vec3d, wp.mat33d),
}

SCALARS = frozenset(
    getattr(wp, name)
    for name in [
        "bool",
        "int8",
        "uint8",
        "int16",
        "uint16",
        "int32",
        "uint32",
        "int64",
        "uint64",
        "float16",
        "float32",
        "float64",
    ]
)


def is_warp_dtype(dtype: Any) -> bool:
    """True for a Warp scalar, vector, matrix or quaternion type (a class), False for anything else."""
    return isinstance(dtype, type) and (dtype in SCALARS or hasattr(dtype, "_wp_scalar_type_"))


def is_struct(dtype: Any) -> bool:
    """True for a ``wp.struct``, an array of which is a tensor of bytes."""
    return hasattr(dtype, "instance_type") and hasattr(dtype, "ctype")


def scalar_type(dtype: Any) -> Any:
    """The Warp scalar type that a Warp scalar, vector or matrix type is made of; a struct is made of bytes."""
    if is_struct(dtype):
        return wp.uint8
    return getattr(dtype, "_wp_scalar_type_", dtype)


def inner_shape(dtype: Any) -> tuple[int, ...]:
    """The trailing dimensions that a Warp vector, matrix or struct takes from a tensor; empty for a scalar."""
    if is_struct(dtype):
        return (ctypes.sizeof(dtype.ctype),)
    return tuple(getattr(dtype, "_shape_", ()))
