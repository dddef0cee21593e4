"""The Warp types for torch's floating-point dtypes, and types in signatures."""

from typing import Any

import torch
import warp as wp
from typing_extensions import TypeAliasType  # torch depends on it

from nvalchemiops.types import REAL, HostPbc, Real

Pbc = TypeAliasType("Pbc", HostPbc | torch.Tensor)
"""Periodicity as callers give it. Signatures print this name, where a union without a name would be long."""

Tensors = torch.Tensor | Any
"""A tensor, or a tuple of those that a call requests. In a union with ``tuple`` a type checker would take neither."""

_TYPES = {
    # for arrays only: the kernels of this package do not use half precision
    torch.float16: Real(wp.float16, wp.vec3h, wp.mat33h),
    torch.float32: REAL["float32"],
    torch.float64: REAL["float64"],
}


def get_wp_dtype(dtype: torch.dtype) -> Any:
    """The Warp scalar type for this dtype.

    Parameters
    ----------
    dtype : torch.dtype
        float16, float32 or float64.

    Returns
    -------
    type
        ``wp.float16``, ``wp.float32`` or ``wp.float64``.

    Raises
    ------
    ValueError
        Another dtype.
    """
    return _types(dtype).scalar


def get_wp_vec_dtype(dtype: torch.dtype) -> Any:
    """The Warp type for vectors of this dtype: ``wp.vec3h``, ``wp.vec3f`` or ``wp.vec3d``; see `get_wp_dtype`."""
    return _types(dtype).vec3


def get_wp_mat_dtype(dtype: torch.dtype) -> Any:
    """The Warp type for 3 x 3 matrices of this dtype: ``wp.mat33h``, ``wp.mat33f`` or ``wp.mat33d``."""
    return _types(dtype).mat33


def _types(dtype: torch.dtype) -> Real:
    if dtype not in _TYPES:
        raise ValueError(f"`dtype` must be float16, float32 or float64, got {dtype}")
    return _TYPES[dtype]


__all__ = ["get_wp_dtype", "get_wp_mat_dtype", "get_wp_vec_dtype"]
