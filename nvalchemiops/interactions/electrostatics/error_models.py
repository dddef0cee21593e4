"""Error models of an Ewald sum, from which its splitting parameter, cutoffs and mesh follow for a requested accuracy.

``accuracy`` is the RMS error of the forces relative to the RMS force. The RMS force is not known beforehand; it is
estimated from the forces of near neighbors (`force_of`). Forces and errors are in units of ``(Σq²/N) / d²`` with the
average distance d = (V/N)^(1/3). For uncorrelated charges, the RMS errors in this unit are

    ε_r = 2 √(d / r_c) exp(-x²),         x = α r_c          real space: pairs beyond the cutoff r_c
    ε_k = 4 α √(d / π k_c) exp(-y²),     y = k_c / 2α       k-vectors longer than k_c
    ε_b = ε_k / √(2 (2 y² + 1))                             k-vectors beyond two opposite faces of a box, at k_c
    ε_m = √(α d) c_p(α h)                                   mesh of spacing h with splines of order p

The first two are those of Kolafa and Perram (the second for a cube). The third follows from the second: ε_k² is an
integral over ``k⁻² exp(-k² / 2α²)`` outside of a sphere; beyond two planes, the integral is smaller by the factor
``e^u E₁(u) / 2 ≈ 1 / 2(u + 1)`` with u = 2 y². The last has the same form; the function c_p was measured for a cube
(`MESH_ERROR`).

Each part of a sum has a share of the error. The share of the mesh is larger than that of real space, because halving
the error of the mesh costs more: with splines of order 8 a quarter of its points, beside a tenth of the pairs.
Moreover, mesh sizes come in steps, so that the actual error of the mesh is often smaller than its share.
If the mesh or the k-vectors are given, and are too coarse for their share, a smaller splitting parameter is chosen, for
which both parts exceed their shares by the same factor (`balanced_alpha`).

All chosen parameters are rounded to steps (`in_steps`), so that they stay the same while a cell changes a little. Then
energies are continuous, except for jumps of the size of the error, and virials are their derivatives.

The best splitting parameter balances the cost of real space, `Costs.pair` for each pair, with the cost of the points of
the mesh, or of the k-vectors (for each atom and group of eight).

Sources: J. Kolafa and J. W. Perram, Mol. Simul. 9, 351 (1992), doi:10.1080/08927029208049126 (errors); D. Fincham,
Mol. Simul. 13, 1 (1994), doi:10.1080/08927029408022180 (balance of the costs).
"""

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from nvalchemiops.interactions.electrostatics.costs import COSTS as COSTS
from nvalchemiops.interactions.electrostatics.costs import Costs
from nvalchemiops.locks import Kept

TYPICAL_FORCE = 0.8
"""RMS force in units of (Σq²/N)/d² that is assumed if charges are unknown.

This is the RMS force in rock salt with displacements of a tenth of the neighbor distance along each axis, and about
that between water molecules.
"""

NEARBY = 3.0
"""Reach of `nvalchemiops.interactions.pair.potentials.coulomb_nearby` in units of d, if the list reaches that far."""

FORCE_PER_NEARBY = 1.08
"""RMS force divided by the RMS of the forces within `NEARBY`.

Measured values are 1.02 to 1.15, in rock salt with displacements of 5 to 20 %, films and clusters of ionic crystals,
water, slabs of water, and an ionic gas.
"""

FORCE_PER_ROOT = 0.7
"""Upper bound of the assumed RMS force divided by √N; the bound is at least `TYPICAL_FORCE`.

The error of a virial grows with the error of the forces and with √N; the virial itself grows with N, independent of the
forces. Without this bound, large forces between a few close atoms would allow large relative errors of the virial.
"""

LEAST_FORCE, LARGEST_FORCE = 0.25, 128.0**0.5
"""Smallest and largest RMS force that is assumed.

The smallest is that of rock salt with displacements of 3 % of the neighbor distance. In perfect crystals forces vanish,
so errors cannot be relative to them; if a few atoms nearly touch, their forces say little about those of other atoms.
"""


FLOAT32_FLOOR = 5e-7
"""Relative error of forces from rounding with float32 positions; measured as 4e-7."""

MESH_SPACINGS = (0.06, 0.089, 0.13, 0.184, 0.241, 0.348, 0.522, 0.783, 1.044)
MESH_ERROR = {
    2: (0.062, 0.092, 0.135, 0.188, 0.245, 0.355, 0.538, 0.839, 1.08),
    3: (0.000496, 0.00108, 0.00238, 0.00505, 0.00807, 0.0178, 0.0441, 0.137, 0.308),
    4: (1e-05, 3.35e-05, 0.000107, 0.000316, 0.000727, 0.00258, 0.0117, 0.0576),
    5: (1.94e-07, 9.8e-07, 4.61e-06, 2.02e-05, 6.21e-05, 0.000346, 0.00295, 0.031),
    6: (5.37e-09, 3.89e-08, 2.84e-07, 1.86e-06, 8e-06, 7.73e-05, 0.00129, 0.022),
    7: (1.41e-10, 1.66e-09, 1.8e-08, 1.87e-07, 1.17e-06, 1.89e-05, 0.00063, 0.0171),
    8: (5.99e-12, 9.86e-11, 1.66e-09, 2.48e-08, 2.13e-07, 5.52e-06, 0.000363, 0.0145),
    9: (1.88e-13, 4.95e-12, 1.27e-10, 2.88e-09, 3.83e-08, 1.77e-06, 0.00026, 0.0161),
    10: (9.39e-15, 3.27e-13, 1.26e-11, 4.3e-10, 8e-09, 6.4e-07, 0.000185, 0.0148),
}
"""c_p at α h = `MESH_SPACINGS`, by order p, measured for random charges at α d = 0.8; ∝ (α h)^(p-1) for small α h."""

FINEST = 0.027
"""Smallest α h of a mesh: beyond this, use splines of a higher order instead of a finer mesh."""

MOST_POINTS, MOST_POINTS_PER_ATOM = 2**24, 2048
"""Largest number of points, in total and per atom, of a mesh with the spacing `FINEST`, or for few moments.

The former misses the accuracy anyway, and the latter is needed only since moments are far from each other: neither
should take gigabytes.
"""

WIDEST = 4.0
"""Largest cutoff, in units of the cheapest one, of a list that is built because the given reciprocal part is coarse."""

ATOMS_OF_IMAGE = 40.0
"""Number of atoms in a cell that cost as much as the search of one more image of the cell.

Measured for batches of cells of 20 and 64 atoms, in which pairs cost about 3 and 1.5 times as much as in one large
cell.
"""

DEFAULT_ORDER = 5
"""Order of splines on a mesh that is given without an order."""


OUT_OF_REACH = 2.0
"""Ratio of the expected error to the accuracy from which callers are warned."""


REAL_SHARE, RECIPROCAL_SHARE, MESH_SHARE = 0.66, 0.25, 0.75
"""Shares of the error of pairs beyond the cutoff, of missing k-vectors, and of the mesh.

The share of missing k-vectors is small for the sake of energies and virials, to which each atom contributes an error of
the same sign (its interaction with itself).
"""


class Target(NamedTuple):
    """The requested accuracy.

    Attributes
    ----------
    accuracy : float
        RMS error of the forces relative to the RMS force.
    force : float or array (n_systems,)
        RMS force in units of (Σq²/N)/d².
    """

    accuracy: float
    force: Any = TYPICAL_FORCE

    @property
    def error(self) -> Any:
        """RMS error of the forces in units of (Σq²/N)/d²."""
        return self.accuracy * self.force


MOST_REMEMBERED = 512
"""Number of results that each of the functions below keeps: computing one takes ten to a hundred microseconds."""


def _remembered(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that keeps the results of ``function`` for NumPy arrays with one entry, that is, for one system."""
    kept: Kept[np.ndarray] = Kept(MOST_REMEMBERED)

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        if not isinstance(arguments[0], np.ndarray):
            return function(*arguments)
        key = tuple(map(_number, arguments))
        if None in key:
            return function(*arguments)
        found = kept.get(key)
        if found is None:
            found = function(*arguments)
            kept.keep(key, found)
        return found.copy()

    return call


def _number(value: Any) -> Hashable:
    """The part of the cache key for an argument; None if the result cannot be kept."""
    if isinstance(value, np.ndarray):
        return value.tobytes() if value.shape == (1,) and value.dtype == np.float64 else None
    if isinstance(value, tuple):
        parts = tuple(map(_number, value))
        return None if None in parts else parts
    return value if value is np or isinstance(value, (float, int)) else None


# -- steps ----------------------------------------------------------------------------------------

STEPS = 2**6
"""Number of steps per factor of two for lengths and inverse lengths: each step is 1.1 %."""

STEPS_OUT_OF_REACH = 2**4
"""The same for alpha if the accuracy is out of reach.

Then alpha affects energies noticeably, so steps are wider, and a strained cell changes alpha less often. The error of
the forces is at most a third larger than at the best alpha.
"""

STEPS_OF_FORCES = 2
"""The same for forces, which matter only through their logarithm."""


def in_steps(value: Any, kind: str = "nearest", steps: int = STEPS, xp: Any = np) -> Any:
    """Round positive values to powers of two with ``steps`` steps per factor of two.

    Parameters
    ----------
    value : array or tensor
    kind : {"nearest", "down", "up"}, optional
        Direction of rounding. Values that are a step apart from rounding errors stay at this step.
    steps : int, optional
    xp : module, optional
        numpy or torch.
    """
    number = steps * xp.log2(value.clip(1e-290, 1e290))
    if kind == "nearest":
        number = number.round()
    else:
        number = xp.floor(number + 1e-6) if kind == "down" else xp.ceil(number - 1e-6)
    return xp.exp2(number * (1.0 / steps))


ATOMS_PER_SOURCE = 4.0
"""Number of atoms for each of the (Σq²)²/Σq⁴ sources beyond which errors of a mesh are larger than ε_m.

One part of these errors is the force of a charge on itself, which does not depend on how far other charges are. In the
unit above it grows with the root of this number, and errors of up to 7 times the accuracy were measured with 60 atoms
per source. If all atoms are charged, the number is 1 to 3, as for the charges from which `MESH_ERROR` was measured.
"""


def force_of(nearby: Any, n_atoms: Any, xp: Any = np, per_source: Any = None) -> Any:
    """Estimate of the RMS force from that of near neighbors, both in units of (Σq²/N)/d², rounded to steps.

    A value that is not finite, as for a system without charges, is replaced by `TYPICAL_FORCE`. For a mesh the force is
    reduced by as much as errors are larger than modeled with this many atoms ``per_source``.
    """
    force = FORCE_PER_NEARBY * nearby
    force = xp.where(xp.isfinite(force), force, TYPICAL_FORCE)
    largest = (FORCE_PER_ROOT * n_atoms**0.5).clip(TYPICAL_FORCE, LARGEST_FORCE)
    least: Any = LEAST_FORCE
    if per_source is not None:
        larger = larger_on_mesh(per_source, xp)
        force, least = force / larger, least / larger**0.5  # measured, for two ions that are far apart
    return in_steps(xp.minimum(force, largest).clip(least, None), "nearest", STEPS_OF_FORCES, xp)


def larger_on_mesh(per_source: Any, xp: Any = np) -> Any:
    """Factor by which errors of a mesh are larger than ε_m with this many atoms for each source."""
    return (xp.where(per_source > ATOMS_PER_SOURCE, per_source, ATOMS_PER_SOURCE) / ATOMS_PER_SOURCE) ** 0.5


@_remembered
def average_distance(n_atoms: Any, volume: Any, xp: Any = np) -> Any:
    """Average distance ``d = (V/N)^(1/3)``, rounded down to a step; a system without atoms counts as one atom.

    Rounding down is safe, because errors grow with the density. ``xp`` is numpy or torch.
    """
    return in_steps((volume / n_atoms.clip(1.0, None)) ** (1.0 / 3.0), "down", STEPS, xp)


# -- errors ---------------------------------------------------------------------------------------


def _solve(prefactor: Any, error: Any, xp: Any = np) -> Any:
    """The x >= 1 at which ``prefactor(x) exp(-x²)`` equals ``error``, for a slowly decreasing prefactor."""
    x: Any = 3.0
    for _ in range(8):  # a contraction: the prefactor enters through a logarithm
        x = xp.sqrt((xp.log(prefactor(x) * (1.0 / error))).clip(1.0, None))
    return x


@_remembered
def real_cutoff(alpha: Any, spacing: Any, target: Target, xp: Any = np) -> Any:
    """Cutoff r_c at which the real-space error falls to its share; ``spacing`` is d = (V/N)^(1/3)."""
    error = REAL_SHARE * target.error
    return _solve(lambda x: 2.0 * xp.sqrt(spacing * alpha / x), error, xp) / alpha


@_remembered
def reciprocal_cutoff(alpha: Any, spacing: Any, target: Target, xp: Any = np) -> Any:
    """Cutoff k_c of the lengths of k-vectors at which the reciprocal-space error falls to its share."""
    error = RECIPROCAL_SHARE * target.error
    return 2.0 * alpha * _solve(lambda y: 4.0 * xp.sqrt(alpha * spacing / (2.0 * np.pi * y)), error, xp)


@_remembered
def alpha_for_cutoff(cutoff: Any, spacing: Any, target: Target, xp: Any = np) -> Any:
    """Splitting parameter for which the real-space error with this cutoff equals its share."""
    error = REAL_SHARE * target.error
    return _solve(lambda x: 2.0 * xp.sqrt(spacing / cutoff), error, xp) / cutoff


@_remembered
def mesh_spacing(alpha: Any, spacing: Any, target: Target, order: int, xp: Any = np) -> Any:
    """Mesh spacing at which the error of splines of this order equals its share."""
    known, errors = _mesh_knots(order)
    wanted = xp.log(MESH_SHARE * target.error / (alpha * spacing) ** 0.5)
    # linear interpolation of logarithms between the measured points, and a power law below them
    x = known[0] + (wanted - errors[0]).clip(None, 0.0) * (1.0 / (order - 1))
    for n in range(len(errors) - 1):
        rise = errors[n + 1] - errors[n]
        x = x + (known[n + 1] - known[n]) / rise * (wanted - errors[n]).clip(0.0, rise)
    return xp.exp(x) / alpha


@dataclass(frozen=True)
class Sphere:
    """Error model for all k-vectors up to the lengths ``k_cutoff`` (n_systems,)."""

    k_cutoff: Any

    share: ClassVar[float] = RECIPROCAL_SHARE

    def log_error(self, alpha: Any, spacing: Any, xp: Any = np) -> Any:
        """Logarithm of the error (n_systems,) in units of (Σq²/N)/d²; ``spacing`` is d."""
        y = 0.5 * self.k_cutoff / alpha
        return 0.5 * xp.log(8.0 / np.pi * alpha * spacing / y) - y * y

    def steepness(self, alpha: Any) -> Any:
        """Approximate derivative of `log_error` with respect to the logarithm of alpha."""
        return 0.5 * (self.k_cutoff / alpha) ** 2 + 1.0


@dataclass(frozen=True)
class Box:
    """Error model for all k-vectors up to given Miller indices.

    ``faces`` (n_systems, 3) are the distances from the origin of the planes that bound the k-vectors.
    """

    faces: Any

    share: ClassVar[float] = RECIPROCAL_SHARE

    def log_error(self, alpha: Any, spacing: Any, xp: Any = np) -> Any:
        """See `Sphere.log_error`."""
        y = 0.5 * self.faces / alpha[:, None]
        of_face = 2.0 * Sphere(self.faces).log_error(alpha[:, None], spacing[:, None], xp) - xp.log(4.0 * y * y + 2.0)
        largest = xp.amax(of_face, 1)
        return 0.5 * (largest + xp.log(xp.exp(of_face - largest[:, None]).sum(1)))

    def steepness(self, alpha: Any) -> Any:
        """See `Sphere.steepness`."""
        return 0.5 * ((self.faces / alpha[:, None]) ** 2).mean(1) + 1.0


@dataclass(frozen=True)
class Mesh:
    """Error model for a mesh with ``spacings`` (n_systems, 3) along lattice vectors and splines of order ``order``.

    ``skewness`` (n_systems,) is the factor by which errors of derivatives along lattice vectors grow when these are
    converted to Cartesian forces.
    """

    spacings: Any
    skewness: Any
    order: int

    share: ClassVar[float] = MESH_SHARE

    def log_error(self, alpha: Any, spacing: Any, xp: Any = np) -> Any:
        """See `Sphere.log_error`."""
        errors = xp.exp(2.0 * _log_mesh_error(xp.log(alpha[:, None] * self.spacings), self.order)).mean(1)
        return 0.5 * xp.log(alpha * spacing * errors) + xp.log(self.skewness)

    def steepness(self, alpha: Any) -> Any:
        """See `Sphere.steepness`."""
        return float(self.order)


def mesh_model(cell: Any, inverse: Any, mesh: Sequence[int], order: int, xp: Any = np) -> Mesh:
    """The error model of a mesh in cells (n_systems, 3, 3), given with their inverses."""
    lengths = (cell**2).sum(2) ** 0.5
    spacings = xp.stack([lengths[:, axis] / n for axis, n in enumerate(mesh)], 1)
    return Mesh(spacings, skewness(cell, inverse), order)


def skewness(cell: Any, inverse: Any) -> Any:
    """RMS ratio of length to height of the lattice vectors (n_systems,), for cells (n_systems, 3, 3) and inverses.

    The height of a lattice vector is its component perpendicular to the other two.
    """
    return ((cell**2).sum(2) * (inverse**2).sum(1)).mean(1) ** 0.5


def faces(indices: Any, lengths: Any) -> Any:
    """Distances (n_systems, 3) from the origin of the planes of k-vectors with these Miller indices.

    ``lengths`` (n_systems, 3) are those of the lattice vectors. With differences of indices, the distances between
    planes.
    """
    return 2.0 * np.pi * indices / lengths


Reciprocal = Sphere | Box | Mesh
"""Error models of the reciprocal part."""


def _log_mesh_error(x: Any, order: int) -> Any:
    """Logarithm of c_p at x = log(α h): linear between the measured points, and a power law outside of them."""
    known, errors = _mesh_knots(order)
    y = errors[0] + (order - 1) * (x - known[0]).clip(None, 0.0)
    for n in range(len(errors) - 1):
        step = known[n + 1] - known[n] if n < len(errors) - 2 else None
        y = y + (errors[n + 1] - errors[n]) / (known[n + 1] - known[n]) * (x - known[n]).clip(0.0, step)
    return y


def _mesh_knots(order: int) -> tuple[list[float], list[float]]:
    """Logarithms of the measured α h and c_p for this order."""
    errors = [math.log(error) for error in MESH_ERROR[order]]
    return [math.log(h) for h in MESH_SPACINGS[: len(errors)]], errors


def log_real_error(alpha: Any, cutoff: Any, spacing: Any, xp: Any = np) -> Any:
    """Logarithm of the error (n_systems,) from pairs beyond the cutoff, in units of (Σq²/N)/d²."""
    return xp.log(2.0 * xp.sqrt(spacing / cutoff)) - (alpha * cutoff) ** 2


def expected_errors(alpha: Any, cutoff: Any, spacing: Any, model: Reciprocal, target: Target) -> tuple[Any, Any]:
    """RMS errors (n_systems,) relative to the RMS force, of the pairs and of the reciprocal part; with numpy only."""
    logs = log_real_error(alpha, cutoff, spacing), model.log_error(alpha, spacing)
    of_pairs, of_reciprocal = (np.exp(log) / target.force for log in logs)
    return of_pairs, of_reciprocal


def balanced_alpha(alpha: Any, cutoff: Any, spacing: Any, model: Reciprocal, target: Target, xp: Any = np) -> Any:
    """The splitting parameter ``alpha`` (n_systems,), or a smaller one if the given reciprocal part needs it.

    The smaller one is that for which the errors of the reciprocal part and of the pairs up to ``cutoff`` differ from
    their shares by the same factor. It is rounded to the neighboring step at which the larger of the two is smaller.
    """
    # estimated parameters meet their share except for rounding
    suffices = model.log_error(alpha, spacing, xp) <= xp.log(model.share * target.error) + 0.01
    if xp is np and suffices.all():
        return alpha

    def excess(low: Any, high: Any) -> Any:
        """Logarithm of the ratio of the excess of pairs at ``low`` to that of the reciprocal part at ``high``."""
        both = log_real_error(low, cutoff, spacing, xp) - model.log_error(high, spacing, xp)
        return both - math.log(REAL_SHARE / model.share)

    def steepness(trial: Any) -> Any:
        return 2.0 * (trial * cutoff) ** 2 + model.steepness(trial)

    steps = STEPS_OUT_OF_REACH
    low = in_steps(_root(alpha, lambda trial: excess(trial, trial), steepness, xp), "down", steps, xp)
    high = in_steps(low * 2.0 ** (1.0 / steps), "nearest", steps, xp)
    balanced = xp.where(excess(low, high) <= 0.0, low, high)
    return xp.where(suffices, alpha, xp.minimum(alpha, balanced))


def alpha_for_reciprocal(alpha: np.ndarray, spacing: np.ndarray, model: Reciprocal, target: Target) -> np.ndarray:
    """The splitting parameter for which the reciprocal part's error equals its share, or ``alpha`` if that is less."""
    share = np.log(model.share * target.error)
    return np.minimum(alpha, _root(alpha, lambda trial: share - model.log_error(trial, spacing), model.steepness, np))


def _root(alpha: Any, excess: Callable[[Any], Any], derivative: Callable[[Any], Any], xp: Any) -> Any:
    """The alpha at which ``excess`` vanishes, by Newton's method in log(alpha) with an approximate derivative."""
    for _ in range(8):
        alpha = alpha * xp.exp((excess(alpha) / derivative(alpha)).clip(-1.0, 1.0))
    return alpha


@_remembered
def ewald_alpha(n_atoms: Any, volume: Any, target: Target, costs: Costs, xp: Any = np) -> Any:
    """Splitting parameter for which real space and k-vectors cost the same."""
    spacing = average_distance(n_atoms, volume, xp)
    n_atoms = n_atoms.clip(1.0, None)
    volume = n_atoms * spacing**3  # the volume for the rounded distance
    alpha = 3.0 / spacing / n_atoms ** (1.0 / 6.0)
    for _ in range(3):
        x = real_cutoff(alpha, spacing, target, xp) * alpha
        y = reciprocal_cutoff(alpha, spacing, target, xp) / (2.0 * alpha)
        # each atom has 4/3 π r_c³ / d³ pairs, and V k_c³ / 48 π² groups of eight k-vectors
        pairs = costs.pair * 4.0 / 3.0 * np.pi * (x / spacing) ** 3
        k_vectors = costs.k_vectors * volume * (2.0 * y) ** 3 / (48.0 * np.pi**2)
        alpha = (pairs / k_vectors) ** (1.0 / 6.0)
    return alpha


@_remembered
def mesh_alpha(n_atoms: Any, volume: Any, target: Target, order: int, costs: Costs, xp: Any = np) -> Any:
    """Splitting parameter for which pairs and the mesh cost the same."""
    spacing = average_distance(n_atoms, volume, xp)
    alpha = 0.8 / spacing
    for _ in range(3):
        x = real_cutoff(alpha, spacing, target, xp) * alpha
        h = (mesh_spacing(alpha, spacing, target, order, xp) * alpha).clip(FINEST, None)
        pairs = costs.pair * 4.0 / 3.0 * np.pi * (x / spacing) ** 3
        points = costs.mesh * (spacing / h) ** 3
        alpha = (pairs / points) ** (1.0 / 6.0)
    return alpha


@functools.lru_cache(maxsize=MOST_REMEMBERED)
def order_of_least_cost(accuracy: float, costs: Costs) -> int:
    """The order of splines, 5 to 10, with which a sum takes the least time, whatever the size of the system.

    Each order at its best alpha. Measured for 216 to 32,768 ions on a CPU with kept lists, in float64 and float32: the
    order of least time rises from 5 at 1e-2 to 8 at 1e-4; between these accuracies neighboring orders differ by a few
    percent. Order 10 takes less time than order 8 from 1e-6 on. The costs of a CPU give these orders.
    """
    target, one = Target(accuracy), np.ones(1)

    def time(order: int) -> float:
        alpha = mesh_alpha(one, one, target, order, costs)
        pairs = costs.pair * 4.0 / 3.0 * np.pi * real_cutoff(alpha, one, target) ** 3
        # also meshes beyond `FINEST`, where the highest order is to be taken
        points = costs.mesh / mesh_spacing(alpha, one, target, order) ** 3
        return (pairs + points).item() + costs.columns(order)

    return min((order for order in MESH_ERROR if order >= DEFAULT_ORDER), key=time)


def batch_mesh_cutoff(
    n_atoms: np.ndarray, volume: np.ndarray, lengths: np.ndarray, target: Target, order: int, costs: Costs
) -> np.ndarray:
    """The common cutoff (1,) of the systems of a batch for which all pairs and all meshes cost the same.

    All systems have the same cutoff and the same number of mesh points, enough for the longest axes among ``lengths``
    (n_systems, 3); so the best choice for the batch is not that for each system. The cost of a pair always includes its
    search, because the neighbor list of a batch is seldom used twice. For 64 molecules in boxes on a CPU, two to four
    times the cost of a pair gave the same time within a tenth, and the pair alone an eighth more.
    """
    costs = costs.of_call(True)
    n_atoms = n_atoms.clip(1.0, None)
    spacing = np.exp(np.log(average_distance(n_atoms, volume)).mean(keepdims=True))
    target = target._replace(force=np.exp(np.log(target.force).mean(keepdims=True)))
    cutoff = 4.0 * spacing
    for _ in range(3):
        alpha = alpha_for_cutoff(cutoff, spacing, target)
        h = mesh_spacing(alpha, spacing, target, order).clip(FINEST / alpha, None)
        within = 4.0 / 3.0 * np.pi * cutoff**3 * (n_atoms * (n_atoms + ATOMS_OF_IMAGE) / volume).sum()
        pairs = costs.pair * within
        points = costs.mesh * len(n_atoms) * (lengths.max(0) / h).prod()
        cutoff = cutoff * (points / pairs) ** (1.0 / 6.0)
    return in_steps(cutoff)


@functools.lru_cache(maxsize=MOST_REMEMBERED)
def mesh_size(points: float, order: int, padding: float) -> int:
    """Number of points along an axis: at least this many, a product of 2, 3, 5 and 7 that FFTs prefer.

    Among the sizes that are larger by up to the fraction ``padding``, the one with the fewest operations.
    """
    least = max(order, int(np.ceil(points * (1.0 - 1e-9))))
    size = least
    while not _has_small_factors(size):
        size += 1
    sizes = [n for n in range(size, int(size * (1.0 + padding)) + 1) if _has_small_factors(n)]
    return min(sizes, key=_work, default=size)


_WORK = {2: 1.0, 3: 1.9, 5: 3.4, 7: 5.2}
"""Approximate operations of a Fourier transform per point, for each prime factor of its size."""


def _has_small_factors(n: int) -> bool:
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
    return size**3 * work  # the other two axes are assumed to grow with this one
