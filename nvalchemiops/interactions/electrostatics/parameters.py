"""Splitting parameter and cutoffs of an Ewald sum from a wanted accuracy.

``accuracy`` is the RMS error of the forces, relative to the force between two average ions at the average
distance between atoms: ``(Σq²/N) / d²`` with ``d = (V/N)^(1/3)``. With Kolafa and Perram's estimates of the errors
in real and reciprocal space,

    δF_r = 2 Σq² / √(N r_c V) exp(-α² r_c²)
    δF_k = 4 α Σq² / √(π N k_c V) exp(-k_c²/4α²)      (their equation for a cube, in terms of k_c and V)

both relative errors depend on lengths only:

    ε_r = 2 √(d / r_c) exp(-x²),   x = α r_c
    ε_k = 4 α √(d / (π k_c)) exp(-y²) √d,   y = k_c / 2α

Sources: J. Kolafa and J. W. Perram, Mol. Simul. 9, 351 (1992), doi:10.1080/08927029208049126 (errors); D. Fincham,
Mol. Simul. 13, 1 (1994), doi:10.1080/08927029408022180 (α that balances the work of the two sums).
"""

import numpy as np

COST_RATIO = 5.5
"""Time for a pair in real space over time for an atom and a k vector in reciprocal space (Fincham)."""

SAFETY = 4.0
"""The estimates take the ions as uncorrelated. In crystals the error has been seen up to this factor larger,
relative to the forces of small displacements."""


def optimal_alpha(n_atoms: np.ndarray, volume: np.ndarray) -> np.ndarray:
    """Splitting parameter for which real and reciprocal space take the same time: √π (5.5 N / V²)^(1/6)."""
    return np.sqrt(np.pi) * (COST_RATIO * np.maximum(n_atoms, 1) / volume**2) ** (1.0 / 6.0)


def real_cutoff(alpha: np.ndarray, spacing: np.ndarray, accuracy: float) -> np.ndarray:
    """Distance r_c at which the real-space error falls to ``accuracy``; ``spacing`` is (V/N)^(1/3)."""
    return _solve(lambda x: 2.0 * np.sqrt(spacing * alpha / x), accuracy) / alpha


def reciprocal_cutoff(alpha: np.ndarray, spacing: np.ndarray, accuracy: float) -> np.ndarray:
    """Length k_c of wave vectors at which the reciprocal-space error falls to ``accuracy``."""
    return 2.0 * alpha * _solve(lambda y: 4.0 * np.sqrt(alpha * spacing / (2.0 * np.pi * y)), accuracy)


def alpha_for_cutoff(cutoff: np.ndarray, spacing: np.ndarray, accuracy: float) -> np.ndarray:
    """Splitting parameter for which the real-space error at ``cutoff`` is ``accuracy``."""
    return _solve(lambda x: 2.0 * np.sqrt(spacing / cutoff) + 0.0 * x, accuracy) / cutoff


def _solve(prefactor, accuracy: float) -> np.ndarray:
    """The x >= 1 with ``prefactor(x) exp(-x²) = accuracy / SAFETY``, for a prefactor that does not grow with x."""
    x = np.ones(1)
    for _ in range(40):  # a contraction: the prefactor enters through a logarithm
        x = np.sqrt(np.maximum(np.log(SAFETY * prefactor(x) / accuracy), 1.0))
    return x


def miller_indices(cell: np.ndarray, k_cutoff: float) -> np.ndarray:
    """One of each pair of wave vectors k, -k with |k| <= k_cutoff, and first the origin, as Miller indices.

    Parameters
    ----------
    cell : (3, 3) array
    k_cutoff : float
        1/length.

    Returns
    -------
    (n_k, 3) int32 array, in a fixed order
    """
    # k . cell[a] = 2 pi n_a bounds the indices
    bound = np.floor(k_cutoff * np.linalg.norm(cell, axis=1) / (2.0 * np.pi) + 1e-9).astype(int)
    n_0 = np.arange(0, bound[0] + 1)
    n_1, n_2 = (np.arange(-b, b + 1) for b in bound[1:])
    grid = np.stack(np.meshgrid(n_0, n_1, n_2, indexing="ij"), axis=-1).reshape(-1, 3)
    first_positive = np.where(grid[:, 0] != 0, grid[:, 0], np.where(grid[:, 1] != 0, grid[:, 1], grid[:, 2])) > 0
    half = grid[first_positive]
    k = 2.0 * np.pi * half @ np.linalg.inv(cell).T
    inside = half[np.einsum("kx,kx->k", k, k) <= k_cutoff**2 * (1.0 + 1e-12)]
    return np.concatenate([np.zeros((1, 3), dtype=np.int32), inside.astype(np.int32)])
