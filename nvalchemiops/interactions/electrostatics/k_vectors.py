"""The k-vectors of an Ewald sum, as numpy arrays.

Only one of k and -k is needed, and the four vectors (n_x, ±n_y, ±n_z) form one *point* of
`nvalchemiops.kernels.fourier`. The weights of a point say how often each of its vectors counts in a sum over all
k-vectors: twice if n_x > 0, since there is no point for -k; not at all if the vector is too long, or equal to another
one of the point.
"""

from typing import NamedTuple

import numpy as np

from nvalchemiops.arguments import ValuesError
from nvalchemiops.interactions.electrostatics import error_models
from nvalchemiops.kernels.lattice import shortest_on_host

MOST_VECTORS = 1e8
"""Largest number of k-vectors. More indicate wrong arguments; the sum would take hours."""

MOST_AT_ONCE = 2**13
"""Number of candidate points, of several systems, that are tested together: as many as fit into a cache."""

MOST_INDEX = 2**20
"""Largest Miller index; sums have tables of as many phases."""

_SIGNS = np.array([[1, 1, 1], [1, 1, -1], [1, -1, 1], [1, -1, -1]])


def bounds(cell: np.ndarray, k_cutoff: np.ndarray) -> np.ndarray:
    """Largest Miller indices (n_systems, 3) of k-vectors up to ``k_cutoff``: ``k . cell[a]`` is 2π n_a."""
    reach = np.asarray(k_cutoff)[:, None] * np.linalg.norm(cell, axis=2) / (2.0 * np.pi)
    return np.floor(reach * (1.0 + 1e-12)).astype(np.int64)


MOST_STRAIN = 1.5 / error_models.STEPS
"""Largest difference of a rounded cell from the given one, as a strain. It changes the lengths of k-vectors by as
much."""


def in_steps(cell: np.ndarray) -> np.ndarray:
    """Cells (n_systems, 3, 3) rounded in steps, so that cells that differ little usually become equal.

    Each cell is rotated into a lower triangular matrix. Its diagonal entries are rounded to steps
    (`error_models.in_steps`), and its shears to multiples of 1/`error_models.STEPS` of the diagonal entry of the same
    column, so that no length changes by more than about a step. In cells that are thin and oblique such shears would
    still be a large strain: there steps of shears are halved until it is at most `MOST_STRAIN`. Singular cells are not
    changed.
    """
    triangle = np.asarray(np.linalg.qr(cell.transpose(0, 2, 1), mode="r")).transpose(0, 2, 1)
    lengths = np.diagonal(triangle, axis1=1, axis2=2)[:, None, :]
    with np.errstate(all="ignore"):  # what is not finite is larger than any bound
        shears = triangle / lengths
        usable = (np.abs(shears) < MOST_SHEAR).all((1, 2), keepdims=True)
        shears, lengths = np.where(usable, shears, np.eye(3)), np.where(usable, lengths, 1.0)
        diagonal = np.sign(lengths) * error_models.in_steps(np.abs(lengths))
        scale = diagonal / lengths.transpose(0, 2, 1)
        steps = np.full((len(cell), 1, 1), float(error_models.STEPS))
        for _ in range(MOST_HALVINGS):
            found = (shears * steps).round() / steps
            # of triangles S D and S' D' with unit triangles S and diagonal matrices D: D⁻¹ S⁻¹ S' D' - 1
            strain = np.abs(np.linalg.solve(shears, found) * scale - np.eye(3)).max((1, 2), keepdims=True)
            if (strain <= MOST_STRAIN).all():
                break
            steps = np.where(strain > MOST_STRAIN, 2.0 * steps, steps)
    return np.where(usable & (strain <= MOST_STRAIN), found * diagonal, cell)


MOST_SHEAR = 1e15
"""Larger shears, in units of the diagonal entry of the same column, are those of cells that are singular in float64."""

MOST_HALVINGS = 30
"""Number of times that steps of shears are halved before a cell is left as it is."""


def half_box(bound: tuple[int, int, int]) -> np.ndarray:
    """Miller indices (n, 3) of all vectors with indices up to ``bound``, one of each k and -k, without the origin."""
    x = np.arange(bound[0] + 1)
    y, z = (np.concatenate([np.arange(b + 1), np.arange(-b, 0)]) for b in bound[1:])
    grid = np.stack(np.meshgrid(x, y, z, indexing="ij"), axis=-1).reshape(-1, 3)
    leading = np.where(grid[:, 0] != 0, grid[:, 0], np.where(grid[:, 1] != 0, grid[:, 1], grid[:, 2]))
    return grid[leading > 0]


class Points(NamedTuple):
    """Points of several systems.

    Attributes
    ----------
    points : (n, 3) int32 array
        The origin of each system comes first.
    weights : (n, 4) array
    begin : (n_systems + 1,) int array
        First point of each system; the last value is n.
    longest : (n_systems,) array
        Length of the longest vector.
    next_one : (n_systems,) array
        At most the length of any vector that is left out.
    """

    points: np.ndarray
    weights: np.ndarray
    begin: np.ndarray
    longest: np.ndarray
    next_one: np.ndarray


def points_within(cell: np.ndarray, k_cutoff: np.ndarray) -> Points:
    """Points of all k-vectors of cells (n_systems, 3, 3) up to the lengths ``k_cutoff`` (n_systems,).

    Raises
    ------
    ValueError
        There are more than `MOST_VECTORS` k-vectors.
    """
    expected = np.max(np.abs(np.linalg.det(cell)) * k_cutoff**3, initial=0.0) / (12.0 * np.pi**2)
    if not expected <= MOST_VECTORS:
        raise ValueError(
            f"about {expected:.1e} k-vectors would be needed: give a neighbor list with a longer cutoff, a longer "
            "`cutoff`, a smaller `alpha` or `k_cutoff`, or a lower `accuracy`"
        )
    inverse = np.linalg.inv(cell)
    metric = (2.0 * np.pi) ** 2 * inverse.transpose(0, 2, 1) @ inverse
    sizes = bounds(cell, k_cutoff) + 1
    # vectors of one length are all inside, or none: in skewed cells their squares are differences of large products
    products = (np.sqrt(metric.diagonal(axis1=1, axis2=2)) * sizes).sum(1) ** 2
    squared = k_cutoff**2 * (1.0 + 1e-12) + 4.0 * np.finfo(np.float64).eps * products
    # the vectors beyond a box, as in `bounds`
    beyond = 2.0 * np.pi * (sizes / np.linalg.norm(cell, axis=2)).min(1, initial=np.inf)
    in_spheres = np.abs(np.linalg.det(cell)) * k_cutoff**3 / (48.0 * np.pi**2)
    in_boxes = sizes.astype(np.float64).prod(1)
    skewed, ends = in_boxes > MOST_IN_BOX * in_spheres + MOST_AT_ONCE, in_boxes.cumsum()
    parts = [(np.zeros((0, 3), np.int32), np.zeros((0, 4)), np.zeros(0, np.int64), np.zeros(0), np.zeros(0))]
    first = 0
    while first < len(sizes):
        before = ends[first - 1] if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + MOST_AT_ONCE, side="right")))
        given = metric[first:last], squared[first:last]
        short = _from_short_vectors(cell[first], k_cutoff[first]) if skewed[first] else None
        if short is None:
            parts.append(_points_in_boxes(sizes[first:last], *given))
        else:
            parts.append(_used(short[0], np.array([short[0].shape[1]]), *given))
            beyond[first] = short[1]
        first = last
    points, weights, counts, longest, next_one = (np.concatenate(each) for each in zip(*parts))
    begin = np.concatenate([[0], counts.cumsum()])
    return Points(points, weights, begin, np.sqrt(longest), np.minimum(np.sqrt(next_one), beyond))


MOST_IN_BOX = 8.0
"""A box of more points, for each point in the sphere of its vectors, is that of a skewed cell; of a cube it is about 2,
beside one layer."""


def _from_short_vectors(cell: np.ndarray, k_cutoff: float) -> tuple[np.ndarray, float] | None:
    """Points (3, n) of a skewed cell (3, 3) that hold all vectors up to ``k_cutoff``, in the order of its box.

    They are those of the box of its shortest lattice vectors, which holds far fewer; with the length up to which none
    is missing. None if these vectors, or Miller indices, are too large for integers.
    """
    basis = shortest_on_host(cell[None])[0].astype(np.float64)
    with np.errstate(all="ignore"):
        inverse = np.linalg.inv(basis).round() if np.linalg.det(basis) != 0.0 else 0.0 * basis
    if not np.array_equal(inverse @ basis, np.eye(3)):
        return None
    short = basis @ cell
    bound = bounds(short[None], np.array([k_cutoff * (1.0 + 1e-6)]))[0]
    indices = half_box(tuple(bound)) @ inverse.astype(np.int64).T
    indices = np.concatenate([np.zeros((1, 3), np.int64), indices, -indices])
    points = np.unique(np.abs(indices[indices[:, 0] >= 0]), axis=0).T
    if points.max() > MOST_INDEX:
        return None
    return points.astype(np.int32), float(2.0 * np.pi * ((bound + 1) / np.linalg.norm(short, axis=1)).min())


def _points_in_boxes(sizes: np.ndarray, metric: np.ndarray, squared: np.ndarray) -> tuple[np.ndarray, ...]:
    """Points of vectors with Miller indices below ``sizes`` (n_systems, 3) and squared lengths up to ``squared``.

    The results are the points (n, 3), their weights (n, 4), and for each system the number of points, the largest
    squared length, and the smallest one of the vectors that are left out.
    """
    in_box = sizes.prod(1)
    if len(sizes) == 1:
        points = np.indices(sizes[0], dtype=np.int32).reshape(3, -1)
    else:
        first, n_y, n_z = (np.repeat(v.astype(np.int32), in_box) for v in (in_box.cumsum() - in_box, *sizes.T[1:]))
        line, z = np.divmod(np.arange(in_box.sum(), dtype=np.int32) - first, n_z)
        points = np.stack([*np.divmod(line, n_y), z])
    return _used(points, in_box, metric, squared)


def _used(points: np.ndarray, counts: np.ndarray, metric: np.ndarray, squared: np.ndarray) -> tuple[np.ndarray, ...]:
    """The results of `_points_in_boxes` for points (3, n), of which each system has so many."""

    def of_point(values: np.ndarray) -> np.ndarray:
        """For each point the value of its system."""
        return values if len(values) == 1 else np.repeat(values, counts)

    x, y, z = points.astype(np.float64)
    xx, yy, zz, xy, xz, yz = (of_point(metric[:, a, b]) for a, b in ((0, 0), (1, 1), (2, 2), (0, 1), (0, 2), (1, 2)))
    same = xx * (x * x) + yy * (y * y) + zz * (z * z)
    xy, xz, yz, squared = xy * (x * y), xz * (x * z), yz * (y * z), of_point(squared)
    squares = np.stack([same + 2.0 * (s[1] * xy + s[2] * xz + s[1] * s[2] * yz) for s in _SIGNS])
    inside = squares <= squared
    weights = _multiplicity(points.T) * inside.T
    used = weights.any(axis=1)
    first = counts.cumsum() - counts
    found = np.add.reduceat(used, first, dtype=np.int64)
    longest = np.maximum.reduceat(np.where(inside, squares, 0.0).max(0), first)
    next_one = np.minimum.reduceat(np.where(inside, np.inf, squares).min(0), first)
    return np.ascontiguousarray(points.T[used]), weights[used], found, longest, next_one


def points_of_indices(indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Points and weights of the vectors with these Miller indices, of their opposites, each once, and of the origin."""
    both = np.concatenate([np.zeros((1, 3), dtype=np.int64), indices, -indices])
    both = both[both[:, 0] >= 0]
    points, place = np.unique(np.abs(both), axis=0, return_inverse=True)
    inside = np.zeros((points.shape[0], 4), dtype=bool)
    inside[place.reshape(-1), 2 * (both[:, 1] < 0) + (both[:, 2] < 0)] = True
    if points.size and points.max() > MOST_INDEX:
        raise ValuesError("`miller_indices` or `k_vectors`: the indices are too large")
    return points.astype(np.int32), _multiplicity(points) * inside


def _multiplicity(points: np.ndarray) -> np.ndarray:
    count = np.where(points[:, 0] > 0, 2.0, 1.0)[:, None] * np.ones(4)
    count[points[:, 1] == 0, 2:] = 0.0
    count[points[:, 2] == 0, 1::2] = 0.0
    return count
