"""Neighbors by trying every image in a box that is certainly large enough."""

import itertools

import numpy as np


def all_pairs(positions, cutoff, cell=None, pbc=(False, False, False), half=False):
    """Sorted tuples (i, j, S_0, S_1, S_2) of all pairs closer than ``cutoff``."""
    positions = np.asarray(positions, dtype=np.float64)
    cell = np.zeros((3, 3)) if cell is None else np.where(np.asarray(pbc)[:, None], cell, 0.0)
    # an image along a moves a point by at least the height of the cell, counted from the largest separation
    spread = np.linalg.norm(np.ptp(positions, axis=0)) if len(positions) else 0.0
    reach = cutoff + spread
    ranges = []
    for a in range(3):
        others = [cell[b] for b in range(3) if b != a and pbc[b]]
        height = cell[a].copy()
        if others:
            basis = np.linalg.qr(np.array(others).T)[0]
            height -= basis @ (basis.T @ height)
        bound = int(np.ceil(reach / np.linalg.norm(height))) if pbc[a] else 0
        ranges.append(range(-bound, bound + 1))
    shifts = np.array(list(itertools.product(*ranges)))
    pairs = []
    for i, j in itertools.product(range(len(positions)), repeat=2):
        distance = np.linalg.norm(positions[j] - positions[i] + shifts @ cell, axis=1)
        for shift in shifts[distance < cutoff]:
            if i == j and not shift.any():
                continue
            if half and not (i < j or (i == j and tuple(shift) > (0, 0, 0))):
                continue
            pairs.append((i, j, *(int(s) for s in shift)))
    return sorted(pairs)
