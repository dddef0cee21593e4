"""Kernels for several types, under the path that clients import."""

from collections.abc import Callable, Iterable
from typing import Any

import warp as wp

__all__ = ["register_overloads"]


def register_overloads(
    kernel: wp.Kernel,
    signature_builder: Callable[..., list[Any]],
    dtype_pairs: Iterable[tuple[Any, ...]] = ((wp.vec3f, wp.float32), (wp.vec3d, wp.float64)),
    *,
    key_fn: Callable[..., Any] | None = None,
    dtypes: Iterable[Any] | None = None,
) -> dict[Any, wp.Kernel]:
    """The overloads of a generic kernel, by type; nothing is compiled.

    Parameters
    ----------
    kernel : wp.Kernel
        With arguments of type Any.
    signature_builder : callable
        The types of the kernel's arguments, from those of one pair, or from one type.
    dtype_pairs : iterable of tuple, optional
        Types of vectors and of numbers. Keys are the types of vectors.
    key_fn : callable, optional
        The key, from what ``signature_builder`` is given.
    dtypes : iterable, optional
        Single types in place of pairs. Keys are these types.
    """
    each = [tuple(pair) for pair in dtype_pairs] if dtypes is None else [(dtype,) for dtype in dtypes]
    return {
        types[0] if key_fn is None else key_fn(*types): wp.overload(kernel, signature_builder(*types)) for types in each
    }
