"""Dtypes of JAX and of torch, and the type of a periodicity."""

import functools
from typing import Any

import jax
import numpy as np
import torch
from typing_extensions import TypeAliasType  # torch depends on it

from nvalchemiops.types import HostPbc

Pbc = TypeAliasType("Pbc", HostPbc | jax.Array)
"""Periodicity as callers give it, as in `nvalchemiops.torch.types`."""

_NAMES = [
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
]

_TORCH = {jax.numpy.dtype(name): getattr(torch, name) for name in _NAMES}
_JAX = {value: key for key, value in _TORCH.items()}

WIDER = {
    torch.float32: torch.float64,
    torch.int32: torch.int64,
    torch.uint32: torch.uint64,
    torch.complex64: torch.complex128,
}
"""The dtypes in which torch may compute, where JAX without x64 has half as many bits."""


@functools.lru_cache(maxsize=64)
def torch_dtype(dtype: Any, name: str = "array") -> torch.dtype:
    """The torch dtype for a JAX dtype; a TypeError if torch does not have it, or JAX and torch cannot exchange it."""
    found = _TORCH.get(np.dtype(dtype)) if not jax.dtypes.issubdtype(dtype, jax.dtypes.extended) else None
    if found is None:
        raise TypeError(f"`{name}` has dtype {dtype}, which torch does not have")
    return found


def jax_dtype(dtype: torch.dtype) -> Any:
    """The JAX dtype for a torch dtype, narrowed unless ``jax_enable_x64`` is set."""
    if dtype not in _JAX:
        raise TypeError(f"`tensor` has dtype {dtype}, which JAX does not have")
    return jax.dtypes.canonicalize_dtype(_JAX[dtype])
