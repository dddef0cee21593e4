"""Neighbors by trying every image that could be near, written apart from the library.

Two searches that share nothing but the definition: every pair in every image (any cell, small systems), and a k-d tree
over explicit copies of the atoms (large systems). A list is a pair of arrays: rows (i, j, S_0, S_1, S_2), in lexical
order, and the distances ``|x_j - x_i + S @ cell|``.
"""

import itertools
from typing import NamedTuple

import numpy as np
from scipy.spatial import cKDTree

CHUNK = 400_000
"""Displacements that are worked on at once."""


class Reference(NamedTuple):
    """All pairs up to a little more than the cutoff, so that rounding at the cutoff can be told from a mistake."""

    rows: np.ndarray  # (n_pairs, 5)
    distance: np.ndarray  # (n_pairs,)
    cutoff: float
    slack: float  # a distance this close to the cutoff may be rounded to either side

    @property
    def certain(self):
        return self.rows[self.distance < self.cutoff - self.slack]

    @property
    def possible(self):
        return self.rows[self.distance < self.cutoff + self.slack]

    @property
    def inside(self):
        return self.rows[self.distance < self.cutoff]


def lattice(cell, pbc):
    """Lattice vectors along the periodic axes (zero along the others), their duals, and the heights of the cell."""
    pbc = np.asarray(pbc, dtype=bool)
    vectors = np.zeros((3, 3))
    dual = np.zeros((3, 3))
    if pbc.any():
        vectors[pbc] = np.asarray(cell, dtype=np.float64)[pbc]
        dual[:, pbc] = np.linalg.pinv(vectors[pbc])
    height = np.full(3, np.inf)
    height[pbc] = 1.0 / np.linalg.norm(dual[:, pbc], axis=0)
    return vectors, dual, height


def every_image(positions, cutoff, cell=None, pbc=(False, False, False), relative_slack=1e-12):
    """Every pair in every image: the displacement is reduced to at most half a cell, then all images are tried."""
    x = np.asarray(positions, dtype=np.float64).reshape(-1, 3)
    vectors, dual, height = lattice(np.zeros((3, 3)) if cell is None else cell, pbc)
    slack = _slack(x, vectors, cutoff, relative_slack)
    i, j = (a.ravel() for a in np.indices((len(x), len(x))))
    offset = -np.rint((x[j] - x[i]) @ dual)
    d = x[j] - x[i] + offset @ vectors
    # one more than half a cell and the cutoff can reach
    bounds = [int(cutoff / h + 0.5) + 1 if np.isfinite(h) else 0 for h in height]
    images = np.array(list(itertools.product(*(range(-b, b + 1) for b in bounds))), dtype=np.float64)
    far = np.linalg.norm(images @ vectors, axis=1) - np.linalg.norm(d, axis=1).max(initial=0.0)
    images = images[far <= cutoff + 2 * slack]
    rows = [np.zeros((0, 5), dtype=np.int64)]
    step = max(1, CHUNK // max(len(images), 1))
    for begin in range(0, len(d), step):
        part = slice(begin, begin + step)
        squared = sum((d[part, a, None] + (images @ vectors)[None, :, a]) ** 2 for a in range(3))
        pair, image = np.nonzero(squared < (cutoff + 2 * slack) ** 2)
        rows.append(np.c_[i[part][pair], j[part][pair], offset[part][pair] + images[image]].astype(np.int64))
    return _finish(np.concatenate(rows), x, vectors, cutoff, slack)


def tree(positions, cutoff, cell=None, pbc=(False, False, False), relative_slack=1e-12):
    """The same by a k-d tree over all copies of the atoms that the cutoff can reach from the cell."""
    x = np.asarray(positions, dtype=np.float64).reshape(-1, 3)
    vectors, dual, height = lattice(np.zeros((3, 3)) if cell is None else cell, pbc)
    slack = _slack(x, vectors, cutoff, relative_slack)
    home = -np.floor(x @ dual)
    wrapped = x + home @ vectors
    bounds = [int(cutoff / h) + 2 if np.isfinite(h) else 0 for h in height]
    images = np.array(list(itertools.product(*(range(-b, b + 1) for b in bounds))))
    copies = (wrapped[None] + (images @ vectors)[:, None]).reshape(-1, 3)
    # copies outside of a box around the atoms, widened by the cutoff, have no neighbors
    margin = cutoff + 2 * slack
    near = np.flatnonzero(((copies > wrapped.min(0) - margin) & (copies < wrapped.max(0) + margin)).all(1))
    found = cKDTree(copies[near]).query_ball_point(wrapped, margin, return_sorted=False)
    i = np.repeat(np.arange(len(x)), [len(f) for f in found])
    which = near[np.concatenate(found).astype(np.int64)]
    j = which % len(x)
    shift = images[which // len(x)] + home[j] - home[i]
    return _finish(np.c_[i, j, shift].astype(np.int64), x, vectors, cutoff, slack)


def all_pairs(positions, cutoff, cell=None, pbc=(False, False, False), half=False):
    """Sorted tuples (i, j, S_0, S_1, S_2) of all pairs closer than ``cutoff``."""
    rows = every_image(positions, cutoff, cell, pbc).inside
    return [tuple(row) for row in (half_of(rows) if half else rows).tolist()]


def half_of(rows):
    """Each pair once: i < j, or i = j and the first non-zero entry of S positive."""
    i, j, a, b, c = rows.T
    forward = (a > 0) | ((a == 0) & ((b > 0) | ((b == 0) & (c > 0))))
    return rows[(i < j) | ((i == j) & forward)]


def in_order(rows):
    """Rows in lexical order."""
    (keys,) = _keys(rows)
    return rows[np.argsort(keys)]


def assert_pairs(found, reference, half=False):
    """``found`` (n, 5) holds every certain pair, nothing impossible, nothing twice, and is symmetric unless half."""
    found = in_order(np.asarray(found, dtype=np.int64).reshape(-1, 5))
    certain, possible = (half_of(r) if half else r for r in (reference.certain, reference.possible))
    if len(certain) == len(possible) and np.array_equal(found, certain):
        return  # no pair is so near to the cutoff that both answers are right: the reference is symmetric, too
    twice = found[1:][(found[1:] == found[:-1]).all(1)]
    assert not len(twice), f"{len(twice)} pairs twice, {twice[:3].tolist()}"
    missing, surplus = _without(certain, found), _without(found, possible)
    assert not len(missing), f"{len(missing)} of {len(certain)} pairs missing, {missing[:3].tolist()}"
    assert not len(surplus), f"{len(surplus)} pairs that are none, {surplus[:3].tolist()}"
    if not half:
        back = in_order(np.c_[found[:, 1], found[:, 0], -found[:, 2:]])
        assert np.array_equal(found, back), "not symmetric"


def _slack(x, vectors, cutoff, relative_slack):
    # rounding of the coordinates and of S @ cell, whose entries are about as large as the extent and the cell
    scale = np.abs(x).max(initial=0.0) + np.abs(vectors).max() + cutoff
    return relative_slack * cutoff + 16 * np.finfo(np.float64).eps * scale


def _finish(rows, x, vectors, cutoff, slack):
    rows = in_order(rows[(rows[:, 0] != rows[:, 1]) | rows[:, 2:].any(axis=1)])
    distance = np.linalg.norm(x[rows[:, 1]] - x[rows[:, 0]] + rows[:, 2:] @ vectors, axis=1)
    return Reference(rows, distance, float(cutoff), slack)


def _without(rows, others):
    """The rows that are not among the others."""
    return rows[np.isin(*_keys(rows, others), invert=True)]


def _keys(*lists):
    """For each list an integer for each of its rows, in the lexical order of all rows."""
    low = np.min([rows.min(axis=0, initial=0) for rows in lists], axis=0)
    size = np.max([rows.max(axis=0, initial=0) for rows in lists], axis=0) - low + 1
    assert np.prod(size.astype(float)) < 2**62, "rows do not fit into one integer"
    weight = np.cumprod(np.r_[1, size[:0:-1]])[::-1]
    return [(rows - low) @ weight for rows in lists]


def nearest_of(found, k, tie_tolerance=None, symmetric=False):
    """Rows (i, j, S_0, S_1, S_2) of the k nearest of each atom, of all pairs up to a cutoff, in lexical order.

    With a tolerance all whose squared distance is within it from the k-th; without one the first k by distance,
    rounded so that crystals have ties, then j, then S. Raises `ArithmeticError` where rounding may decide.
    """
    rows, squared = found.rows[found.distance < found.cutoff], found.distance[found.distance < found.cutoff] ** 2
    chosen = [np.zeros((0, 5), dtype=np.int64)]
    for i in np.unique(rows[:, 0]):
        mine, d2 = rows[rows[:, 0] == i], squared[rows[:, 0] == i]
        if tie_tolerance is None:
            steps = d2 / found.cutoff**2 * 2.0**30
            order = np.lexsort((*mine.T[::-1], np.floor(steps + 0.5)))
            chosen.append(mine[order[:k]])
        else:
            bound = np.sort(d2)[k - 1] + tie_tolerance if len(d2) >= k else np.inf
            chosen.append(mine[d2 <= bound + 1e-12])
            if (np.abs(d2 - bound) < 1e-9).any() and tie_tolerance > 0.0:
                raise ArithmeticError("a distance at the bound")
    if (np.abs(found.distance - found.cutoff) < 1e-9).any():
        raise ArithmeticError("a distance at the cutoff")
    selected = np.concatenate(chosen)
    if symmetric:
        selected = np.unique(
            np.concatenate([selected, np.c_[selected[:, 1], selected[:, 0], -selected[:, 2:]]]), axis=0
        )
    return in_order(selected)
