"""Splitting parameter, cutoffs and mesh of an Ewald sum from a wanted accuracy, by models of the errors.

``accuracy`` is the RMS error of the forces relative to their own RMS. Forces are not known beforehand; those of near
neighbors stand for them (`force_of`), in units of ``(Σq²/N) / d²`` with the average distance d = (V/N)^(1/3). In that
unit, for charges without correlation,

    ε_r = 2 √(d / r_c) exp(-x²),         x = α r_c          real space, beyond the cutoff r_c
    ε_k = 4 α d / √(π k_c) exp(-y²),     y = k_c / 2α       wave vectors longer than k_c
    ε_m = √(α d) c_p(α h)                                   a mesh of spacing h and splines of order p

The first two are those of Kolafa and Perram (the second one for a cube). The last one has their form; the function c_p
was measured for a cube (`MESH_ERROR`). Each part of a sum gets its share of the error, the mesh a smaller one: its size
comes in steps, so that its error is often smaller still, and halving it costs little.

The best splitting parameter balances the work in real space, `COSTS.pair` for each pair, with that for each point of
the mesh or for each atom and point of the reciprocal lattice.

Sources: J. Kolafa and J. W. Perram, Mol. Simul. 9, 351 (1992), doi:10.1080/08927029208049126 (errors); D. Fincham,
Mol. Simul. 13, 1 (1994), doi:10.1080/08927029408022180 (balance of the work).
"""

import math
from typing import Any, NamedTuple

import numpy as np

TYPICAL_FORCE = 0.8
"""RMS of the forces in units of (Σq²/N)/d² where charges are unknown: that of rock salt with displacements of a tenth
of the distance of neighbors along each axis, and about that between molecules of water."""

NEARBY = 3.0
"""Reach of `nvalchemiops.interactions.pair.potentials.coulomb_nearby` in units of d, if neighbors are known as far."""

FORCE_PER_NEARBY = 1.08
"""RMS of all forces in units of those that `NEARBY` leaves. Measured: 1.02 to 1.15 in rock salt with displacements from
5 to 20 %, films and clusters of ionic crystals, water, slabs of it, and a gas of ions."""

FORCE_PER_ROOT = 0.7
"""Largest force, but for `TYPICAL_FORCE`, divided by √N. Errors of virials grow with those of forces and with √N, and
virials themselves with N, whatever the forces. So forces of a few atoms that happen to be close to each other would let
errors of virials pass that are far larger, relative to them."""

LEAST_FORCE, LARGEST_FORCE = 0.25, 128.0**0.5
"""What forces are taken for at least, as in rock salt with displacements of 3 % of the distance of neighbors, and at
most. Perfect crystals have no forces to compare errors with; where atoms nearly touch, forces say little of others."""


FLOAT32_FLOOR = 5e-7
"""Relative error of forces that rounding leaves with float32 positions, measured at 4e-7."""


class Costs(NamedTuple):
    """Times in nanoseconds, for energies and forces in float64."""

    pair: float  # of an atom and a neighbor, with a share of the search for neighbors
    wave: float  # of an atom and a point of the reciprocal lattice, which stands for eight wave vectors
    mesh: float  # of a point of the mesh


COSTS = {"cpu": Costs(8.0, 1.3, 15.0), "cuda": Costs(0.05, 0.03, 0.05)}
"""By type of device. Measured on two cores of a CPU; for a GPU ratios are guessed, from operations and bytes."""

MESH_SPACINGS = (0.06, 0.089, 0.13, 0.184, 0.241, 0.348, 0.522, 0.783, 1.044)
MESH_ERROR = {
    3: (0.000496, 0.00108, 0.00238, 0.00505, 0.00807, 0.0178, 0.0441, 0.137, 0.308),
    4: (1e-05, 3.35e-05, 0.000107, 0.000316, 0.000727, 0.00258, 0.0117, 0.0576),
    5: (1.94e-07, 9.8e-07, 4.61e-06, 2.02e-05, 6.21e-05, 0.000346, 0.00295),
    6: (5.37e-09, 3.89e-08, 2.84e-07, 1.86e-06, 8e-06, 7.73e-05, 0.00129),
    7: (1.41e-10, 1.66e-09, 1.8e-08, 1.87e-07, 1.17e-06, 1.89e-05),
    8: (5.99e-12, 9.86e-11, 1.66e-09, 2.48e-08, 2.13e-07, 5.52e-06),
}
"""c_p at α h = `MESH_SPACINGS`, measured for random charges at α d = 0.8; for small α h it goes as (α h)^(p-1)."""

FINEST = 0.027
"""Least α h: finer meshes are a matter of higher orders."""


REAL_SHARE, RECIPROCAL_SHARE, MESH_SHARE = 0.87, 0.25, 0.5
"""Of the error. That of missing wave vectors is small for the sake of energies and virials, in which the interaction of
each atom with itself adds up."""


class Target(NamedTuple):
    """What is asked for.

    Attributes
    ----------
    accuracy : float
        Error of the forces, relative to them.
    force : float or array (n_systems,)
        RMS of the forces in units of (Σq²/N)/d².
    """

    accuracy: float
    force: Any = TYPICAL_FORCE

    @property
    def error(self) -> Any:
        """RMS error of the forces in units of (Σq²/N)/d²."""
        return self.accuracy * self.force


def force_of(nearby: Any, n_atoms: Any, xp: Any = np) -> Any:
    """RMS of the forces from those of near neighbors, both in units of (Σq²/N)/d².

    In steps of √2, so that parameters stay the same when atoms move a little, and energies are continuous. What is no
    number, as without any charge, is taken for typical.
    """
    force = FORCE_PER_NEARBY * nearby
    force = xp.where(xp.isfinite(force), force, TYPICAL_FORCE)
    largest = (FORCE_PER_ROOT * n_atoms**0.5).clip(TYPICAL_FORCE, LARGEST_FORCE)
    return xp.exp2((2.0 * xp.log2(xp.minimum(force, largest).clip(LEAST_FORCE, None))).round() / 2.0)


def average_distance(n_atoms: Any, volume: Any) -> Any:
    """``(V/N)^(1/3)``, the spacing of what follows; by numpy or torch. No atom counts as one."""
    return (volume / n_atoms.clip(1.0, None)) ** (1.0 / 3.0)


def _solve(prefactor: Any, error: Any, xp: Any = np) -> Any:
    """The x >= 1 with ``prefactor(x) exp(-x²)`` equal to ``error``, for a prefactor that falls slowly."""
    x: Any = 3.0
    for _ in range(8):  # a contraction: the prefactor enters through a logarithm
        x = xp.sqrt((xp.log(prefactor(x) * (1.0 / error))).clip(1.0, None))
    return x


def real_cutoff(alpha: Any, spacing: Any, target: Target, xp: Any = np) -> Any:
    """Distance r_c at which the real-space error falls to its share; ``spacing`` is (V/N)^(1/3)."""
    error = REAL_SHARE * target.error
    return _solve(lambda x: 2.0 * xp.sqrt(spacing * alpha / x), error, xp) / alpha


def reciprocal_cutoff(alpha: Any, spacing: Any, target: Target, xp: Any = np) -> Any:
    """Length k_c of wave vectors at which the reciprocal-space error falls to its share."""
    error = RECIPROCAL_SHARE * target.error
    return 2.0 * alpha * _solve(lambda y: 4.0 * xp.sqrt(alpha * spacing / (2.0 * np.pi * y)), error, xp)


def alpha_for_cutoff(cutoff: Any, spacing: Any, target: Target, xp: Any = np) -> Any:
    """Splitting parameter for which the real-space error at ``cutoff`` is its share."""
    error = REAL_SHARE * target.error
    return _solve(lambda x: 2.0 * xp.sqrt(spacing / cutoff), error, xp) / cutoff


def mesh_spacing(alpha: Any, spacing: Any, target: Target, order: int, xp: Any = np) -> Any:
    """Mesh spacing at which the error of splines of this order is its share."""
    errors = [math.log(error) for error in MESH_ERROR[order]]
    known = [math.log(h) for h in MESH_SPACINGS[: len(errors)]]
    wanted = xp.log(MESH_SHARE * target.error / (alpha * spacing) ** 0.5)
    # linear between what was measured, in logarithms, and a power below
    x = known[0] + (wanted - errors[0]).clip(None, 0.0) * (1.0 / (order - 1))
    for n in range(len(errors) - 1):
        rise = errors[n + 1] - errors[n]
        x = x + (known[n + 1] - known[n]) / rise * (wanted - errors[n]).clip(0.0, rise)
    return xp.exp(x) / alpha


def check_mesh_spacing(spacing: np.ndarray, alpha: np.ndarray, target: Target, order: int) -> None:
    """Raise if the accuracy is out of reach of splines of this order."""
    if (spacing * alpha < FINEST).any():
        better = [p for p in MESH_ERROR if p > order]
        advice = f"use a higher `spline_order`, up to {max(better)}" if better else "use an Ewald sum without a mesh"
        raise ValueError(f"`accuracy` = {target.accuracy:g} is out of reach of splines of order {order}: {advice}")


def ewald_alpha(n_atoms: Any, volume: Any, target: Target, costs: Costs, xp: Any = np) -> Any:
    """Splitting parameter for which real and reciprocal space take the same time."""
    spacing = average_distance(n_atoms, volume)
    alpha = 3.0 / spacing / n_atoms.clip(1.0, None) ** (1.0 / 6.0)
    for _ in range(3):
        x = real_cutoff(alpha, spacing, target, xp) * alpha
        y = reciprocal_cutoff(alpha, spacing, target, xp) / (2.0 * alpha)
        # 4/3 π r_c³ / d³ pairs and V k_c³ / 48 π² points for an atom
        pairs = costs.pair * 4.0 / 3.0 * np.pi * (x / spacing) ** 3
        waves = costs.wave * volume * (2.0 * y) ** 3 / (48.0 * np.pi**2)
        alpha = (pairs / waves) ** (1.0 / 6.0)
    return alpha


def mesh_alpha(n_atoms: Any, volume: Any, target: Target, order: int, costs: Costs, xp: Any = np) -> Any:
    """Splitting parameter for which pairs and the mesh take the same time."""
    spacing = average_distance(n_atoms, volume)
    alpha = 0.8 / spacing
    for _ in range(3):
        x = real_cutoff(alpha, spacing, target, xp) * alpha
        h = mesh_spacing(alpha, spacing, target, order, xp) * alpha
        if xp is np:
            check_mesh_spacing(h / alpha, alpha, target, order)
        pairs = costs.pair * 4.0 / 3.0 * np.pi * (x / spacing) ** 3
        points = costs.mesh * (spacing / h) ** 3
        alpha = (pairs / points) ** (1.0 / 6.0)
    return alpha


def mesh_size(length: float, spacing: float, order: int, padding: float) -> int:
    """Points along an axis: at least ``length / spacing``, a product of 2, 3, 5 and 7 that transforms like."""
    least = max(order, int(np.ceil(length / spacing * (1.0 - 1e-9))))
    size = least
    while not _is_smooth(size):
        size += 1
    sizes = [n for n in range(size, int(size * (1.0 + padding)) + 1) if _is_smooth(n)]
    return min(sizes, key=_work, default=size)


_WORK = {2: 1.0, 3: 1.9, 5: 3.4, 7: 5.2}
"""Operations of a Fourier transform by prime factors of its size, for each point, about."""


def _is_smooth(n: int) -> bool:
    for prime in _WORK:
        while n % prime == 0:
            n //= prime
    return n == 1


def _work(n: int) -> float:
    size, work = n, 0.0
    for prime, each in _WORK.items():
        while n % prime == 0:
            n //= prime
            work += each
    return size**3 * work  # the other axes grow with this one
