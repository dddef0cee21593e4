"""Sums, means, extremes and products over segments, such as the atoms of a system or the neighbors of an atom.

Row i of ``x`` belongs to segment ``idx[i]``. Segments may be in any order, and may be empty. All functions are
differentiable to any order in all floating-point tensors, and work in ``torch.compile`` and ``torch.func``. Sums are
computed in float64 and in a fixed order, so they are the same to the last bit for any number of threads. In eager mode
on a CPU an index out of range raises an error; elsewhere indices are not checked.
"""

import torch

from nvalchemiops.torch import checks
from nvalchemiops.torch.operators.segments import spread_systems, system_sums
from nvalchemiops.torch.runtime.context import may_read, values_of


def segmented_sum(x: torch.Tensor, idx: torch.Tensor, num_segments: int) -> torch.Tensor:
    """Sum of each segment: ``sum(x[i] for i where idx[i] == s)``.

    Parameters
    ----------
    x : (n, ...) tensor, float32 or float64
        Numbers, vectors or other arrays of any shape.
    idx : (n,) int32 or int64 tensor
        Segment of each row, 0 .. ``num_segments`` - 1, in any order.
    num_segments : int

    Returns
    -------
    (num_segments, ...) tensor
        Zero where a segment is empty.

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message.
    """
    _check(num_segments, idx, x=x)
    return system_sums(x, idx, num_segments)


def segmented_mean(x: torch.Tensor, idx: torch.Tensor, num_segments: int) -> torch.Tensor:
    """Mean (num_segments, ...) of each segment, zero for an empty one. Arguments as for `segmented_sum`."""
    _check(num_segments, idx, x=x)
    counts = _counts(idx, num_segments, x)
    return system_sums(x, idx, num_segments) / _with_axes(counts.clamp(min=1.0), x.ndim)


def segmented_max(x: torch.Tensor, idx: torch.Tensor, num_segments: int) -> torch.Tensor:
    """Largest value of each segment, and of each component of vectors.

    Arguments as for `segmented_sum`. If several values are largest, they share the gradient evenly, as for
    ``torch.amax``. Second derivatives are zero. A segment with a NaN gives NaN.

    Returns
    -------
    (num_segments, ...) tensor
        -inf where a segment is empty.
    """
    return _extreme(x, idx, num_segments, "amax", -torch.inf)


def segmented_min(x: torch.Tensor, idx: torch.Tensor, num_segments: int) -> torch.Tensor:
    """Smallest value (num_segments, ...) of each segment, inf for an empty one; otherwise like `segmented_max`."""
    return _extreme(x, idx, num_segments, "amin", torch.inf)


def segmented_dot(x: torch.Tensor, y: torch.Tensor, idx: torch.Tensor, num_segments: int) -> torch.Tensor:
    """Scalar product of each segment: the sum of ``x[i] · y[i]``.

    Parameters
    ----------
    x, y : (n, ...) tensors, float32 or float64
        Of the same shape. The products are summed over all axes.
    idx : (n,) int32 or int64 tensor
    num_segments : int
        As for `segmented_sum`.

    Returns
    -------
    (num_segments,) tensor
    """
    _check(num_segments, idx, x=x, y=y)
    if x.shape != y.shape:
        raise ValueError(f"`y` must have the shape of `x`, {tuple(x.shape)}, got {tuple(y.shape)}")
    products = x * y
    if x.ndim == 1:
        return system_sums(products, idx, num_segments)
    # sums over rows alone would be those of torch, whose order depends on the number of threads
    of_columns = system_sums(products.to(torch.float64).flatten(1), idx, num_segments)
    return system_sums(of_columns.mT.contiguous(), None, 1).squeeze(0).to(products.dtype)


def segmented_mul(x: torch.Tensor, y: torch.Tensor, idx: torch.Tensor, num_segments: int) -> torch.Tensor:
    """Each row times the factor of its segment: ``x[i] * y[idx[i]]``.

    Parameters
    ----------
    x : (n,) or (n, ...) tensor, float32 or float64
    y : (num_segments,) or (num_segments, ...) tensor
        One number for each segment, or one for each component of a row.
    idx : (n,) int32 or int64 tensor
    num_segments : int
        As for `segmented_sum`.

    Returns
    -------
    (n, ...) tensor
    """
    _check(num_segments, idx, x=x)
    _check_segments("y", y, num_segments)
    if 1 not in (x.ndim, y.ndim) and x.shape[1:] != y.shape[1:]:
        raise ValueError(f"`y` must have one number for each segment, or rows as `x`, got {tuple(y.shape)}")
    factor = spread_systems(y, idx, x.shape[0])
    ndim = max(x.ndim, y.ndim)
    return _with_axes(x, ndim) * _with_axes(factor, ndim)


def segmented_matvec(v: torch.Tensor, m: torch.Tensor, idx: torch.Tensor, num_segments: int) -> torch.Tensor:
    """Each row vector times the matrix of its segment: ``v[i] @ m[idx[i]]``.

    The vector is on the left, as with lattice vectors in rows: ``shifts @ cell``.

    Parameters
    ----------
    v : (n, 3) tensor, float32 or float64
        Or (n, k) for matrices (k, l).
    m : (num_segments, 3, 3) tensor
    idx : (n,) int32 or int64 tensor
    num_segments : int
        As for `segmented_sum`.

    Returns
    -------
    (n, 3) tensor
    """
    _check(num_segments, idx, v=v)
    _check_segments("m", m, num_segments)
    if v.ndim != 2 or m.ndim != 3 or m.shape[1] != v.shape[1]:
        raise ValueError(f"`v` and `m` must have shapes (n, k) and (..., k, l), got {tuple(v.shape)}, {tuple(m.shape)}")
    return (v.unsqueeze(2) * spread_systems(m, idx, v.shape[0])).sum(1)


def segmented_rms_norm(x: torch.Tensor, idx: torch.Tensor, num_segments: int) -> torch.Tensor:
    """Root of the mean of ``|x[i]|²`` of each segment (num_segments,), zero for an empty one.

    Arguments as for `segmented_sum`. The norm is over all axes except the first. If all rows of a segment are zero, so
    is its gradient.
    """
    _check(num_segments, idx, x=x)
    counts = _counts(idx, num_segments, x)
    mean = segmented_dot(x, x, idx, num_segments) / counts.clamp(min=1.0)
    return torch.where(mean == 0, 0.0, torch.where(mean == 0, 1.0, mean).sqrt())


def _extreme(x: torch.Tensor, idx: torch.Tensor, num_segments: int, reduce: str, of_none: float) -> torch.Tensor:
    _check(num_segments, idx, x=x)
    # start from NaN: a start value that equals the result would receive a share of its gradient
    start = x.new_full((num_segments, *x.shape[1:]), torch.nan)
    places = _with_axes(idx.to(torch.int64), x.ndim).expand(x.shape)
    found = start.scatter_reduce(0, places, x, reduce, include_self=False)
    is_empty = _counts(idx, num_segments, x) == 0.0
    return torch.where(_with_axes(is_empty, x.ndim), of_none, found)


def _counts(idx: torch.Tensor, num_segments: int, x: torch.Tensor) -> torch.Tensor:
    """The number of rows of each segment, in the dtype of ``x``. Sums of integers are exact in any order."""
    counts = torch.zeros(num_segments, dtype=torch.float64, device=x.device)
    return counts.index_add(0, idx, counts.new_ones(idx.shape)).to(x.dtype)


def _with_axes(values: torch.Tensor, ndim: int) -> torch.Tensor:
    """The values with trailing axes of size one, up to this number of axes."""
    return values.reshape(*values.shape, *[1] * (ndim - values.ndim))


def _check(num_segments: int, idx: torch.Tensor, **rows: torch.Tensor) -> None:
    """Raise unless each of ``rows`` is a tensor of floats, with one row for each entry of ``idx``."""
    checks.check_count("num_segments", num_segments)
    for name, values in rows.items():
        _check_floats(name, values)
        checks.check_index("idx", idx, values, (None,))
        if values.shape[0] != idx.shape[0]:
            raise ValueError(f"`{name}` has {values.shape[0]} rows, but `idx` has {idx.shape[0]}")
    if may_read(idx) and idx.numel():
        low, high = (int(end) for end in torch.aminmax(values_of(idx)))
        if not 0 <= low <= high < num_segments:
            raise ValueError(f"`idx` must hold numbers in 0 .. {num_segments - 1}, got {low} .. {high}")


def _check_segments(name: str, values: torch.Tensor, num_segments: int) -> None:
    """Raise unless ``values`` is a tensor of floats, with one row for each segment."""
    _check_floats(name, values)
    if values.shape[0] != num_segments:
        raise ValueError(f"`{name}` has {values.shape[0]} rows, but `num_segments` is {num_segments}")


def _check_floats(name: str, values: torch.Tensor) -> None:
    checks.check_tensor(name, values)
    checks.check_place(name, values)
    if values.dtype not in checks.FLOATS:
        raise TypeError(f"`{name}` must be float32 or float64, got {values.dtype}")
    if values.ndim == 0:
        raise ValueError(f"`{name}` must have one row for each entry, got a single number")


__all__ = [
    "segmented_dot",
    "segmented_matvec",
    "segmented_max",
    "segmented_mean",
    "segmented_min",
    "segmented_mul",
    "segmented_rms_norm",
    "segmented_sum",
]
