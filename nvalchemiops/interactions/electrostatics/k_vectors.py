"""Which k-vectors an Ewald sum uses, as numpy arrays.

Of k and -k one is enough, and the four vectors (n_x, ±n_y, ±n_z) are one *point* of `nvalchemiops.kernels.fourier`. The
weights of a point say how often each of its vectors counts in a sum over all k-vectors: twice if n_x > 0, where
there is no point for -k; not at all where two signs are the same vector.
"""

import numpy as np

MOST_VECTORS = 1e8
"""More than this is a mistake in the arguments rather than a system; the sum would take hours."""

_SIGNS = np.array([[1, 1, 1], [1, 1, -1], [1, -1, 1], [1, -1, -1]])


def bounds(cell: np.ndarray, k_cutoff: np.ndarray) -> np.ndarray:
    """Largest Miller indices (n_systems, 3) of k-vectors up to ``k_cutoff``: ``k . cell[a]`` is 2π n_a."""
    reach = np.asarray(k_cutoff)[:, None] * np.linalg.norm(cell, axis=2) / (2.0 * np.pi)
    return np.floor(reach * (1.0 + 1e-12)).astype(np.int64)


def half_box(bound: tuple[int, int, int]) -> np.ndarray:
    """Miller indices (n, 3) of all vectors up to these numbers, but for the origin, one of each k and -k."""
    x = np.arange(bound[0] + 1)
    y, z = (np.concatenate([np.arange(b + 1), np.arange(-b, 0)]) for b in bound[1:])
    grid = np.stack(np.meshgrid(x, y, z, indexing="ij"), axis=-1).reshape(-1, 3)
    leading = np.where(grid[:, 0] != 0, grid[:, 0], np.where(grid[:, 1] != 0, grid[:, 1], grid[:, 2]))
    return grid[leading > 0]


def points_within(cell: np.ndarray, k_cutoff: float) -> tuple[np.ndarray, np.ndarray]:
    """Points (n, 3) of k-vectors with |k| <= k_cutoff, the origin first, and their weights (n, 4)."""
    expected = abs(np.linalg.det(cell)) * k_cutoff**3 / (12.0 * np.pi**2)
    if not expected <= MOST_VECTORS:
        raise ValueError(
            f"about {expected:.1e} k-vectors would be needed: give a longer neighbor list or its `cutoff`, a "
            "smaller `alpha` or `k_cutoff`, or a lower `accuracy`"
        )
    n_x, n_y, n_z = bounds(cell[None], np.array([k_cutoff]))[0]
    grid = np.stack(np.meshgrid(np.arange(n_x + 1), np.arange(n_y + 1), np.arange(n_z + 1), indexing="ij"), axis=-1)
    points = grid.reshape(-1, 3)
    inverse = np.linalg.inv(cell)
    metric = (2.0 * np.pi) ** 2 * inverse.T @ inverse
    xx, yy, zz = np.moveaxis(points.astype(np.float64) ** 2, 1, 0)
    xy, xz, yz = (points[:, a].astype(np.float64) * points[:, b] for a, b in ((0, 1), (0, 2), (1, 2)))
    same = metric[0, 0] * xx + metric[1, 1] * yy + metric[2, 2] * zz
    mixed = [s[1] * metric[0, 1] * xy + s[2] * metric[0, 2] * xz + s[1] * s[2] * metric[1, 2] * yz for s in _SIGNS]
    inside = same[:, None] + 2.0 * np.stack(mixed, axis=1) <= k_cutoff**2 * (1.0 + 1e-12)
    weights = _multiplicity(points) * inside
    used = weights.any(axis=1)
    return points[used].astype(np.int32), weights[used]


def points_of_indices(indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Points of the vectors with these Miller indices and of their opposites, each once, and of the origin."""
    both = np.concatenate([np.zeros((1, 3), dtype=np.int64), indices, -indices])
    both = both[both[:, 0] >= 0]
    points, place = np.unique(np.abs(both), axis=0, return_inverse=True)
    inside = np.zeros((points.shape[0], 4), dtype=bool)
    inside[place.reshape(-1), 2 * (both[:, 1] < 0) + (both[:, 2] < 0)] = True
    if points.size and points.max() > 2**20:
        raise ValueError("`miller_indices` or `k_vectors`: the indices are too large")
    return points.astype(np.int32), _multiplicity(points) * inside


def _multiplicity(points: np.ndarray) -> np.ndarray:
    count = np.where(points[:, 0] > 0, 2.0, 1.0)[:, None] * np.ones(4)
    count[points[:, 1] == 0, 2:] = 0.0
    count[points[:, 2] == 0, 1::2] = 0.0
    return count
