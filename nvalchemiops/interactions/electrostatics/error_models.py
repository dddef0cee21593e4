"""Splitting parameter, cutoffs and mesh of an Ewald sum from the accuracy asked for, by models of the errors.

``accuracy`` is the RMS error of the forces relative to their own RMS. Forces are not known beforehand; those of near
neighbors are used instead (`force_of`), in units of ``(Σq²/N) / d²`` with the average distance d = (V/N)^(1/3). In that
unit, for charges without correlation,

    ε_r = 2 √(d / r_c) exp(-x²),         x = α r_c          real space, beyond the cutoff r_c
    ε_k = 4 α √(d / π k_c) exp(-y²),     y = k_c / 2α       k-vectors longer than k_c
    ε_b = ε_k / √(2 (2 y² + 1))                             k-vectors beyond two opposite faces of a box, at k_c
    ε_m = √(α d) c_p(α h)                                   a mesh of spacing h and splines of order p

The first two are those of Kolafa and Perram (the second one for a cube). The third one is their integral over
``k⁻² exp(-k² / 2α²)`` beyond two planes instead of a sphere, ``e^u E₁(u) / 2 ≈ 1 / 2(u + 1)`` of it with u = 2 y². The
last one has their form; the function c_p was measured for a cube (`MESH_ERROR`). Each part of a sum gets its share of
the error, the mesh a smaller one: its size comes in steps, so that its error is often smaller still, and halving it
costs little. Where mesh or k-vectors are given, and too coarse for their share, the splitting parameter shrinks
until both parts exceed their shares by the same factor (`balanced_alpha`).

What is chosen moves in steps (`in_steps`), so that it stays the same while a cell changes a little: energies are then
continuous but for jumps of the size of the error, and virials are their derivatives.

The best splitting parameter balances the work in real space, `COSTS.pair` for each pair, with that for each point of
the mesh, or for each atom and group of eight k-vectors.

Sources: J. Kolafa and J. W. Perram, Mol. Simul. 9, 351 (1992), doi:10.1080/08927029208049126 (errors); D. Fincham,
Mol. Simul. 13, 1 (1994), doi:10.1080/08927029408022180 (balance of the work).
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
"""RMS of the forces in units of (Σq²/N)/d² where charges are unknown: that of rock salt with displacements of a tenth
of the distance of neighbors along each axis, and about that between molecules of water."""

NEARBY = 3.0
"""Reach of `nvalchemiops.interactions.pair.potentials.coulomb_nearby` in units of d, if neighbors are known as far."""

FORCE_PER_NEARBY = 1.08
"""RMS of all forces in units of those that `NEARBY` leaves. Measured: 1.02 to 1.15 in rock salt with displacements from
5 to 20 %, films and clusters of ionic crystals, water, slabs of it, and a gas of ions."""

FORCE_PER_ROOT = 0.7
"""Largest force, but for `TYPICAL_FORCE`, divided by √N. Errors of virials grow with those of forces and with √N, and
virials themselves with N, independent of the forces. Without this bound, large forces between a few close atoms would
allow large relative errors of the virial."""

LEAST_FORCE, LARGEST_FORCE = 0.25, 128.0**0.5
"""What forces are taken for at least, as in rock salt with displacements of 3 % of the distance of neighbors, and at
most. Perfect crystals have no forces to compare errors with; where atoms nearly touch, forces say little of others."""


FLOAT32_FLOOR = 5e-7
"""Relative error of forces that rounding leaves with float32 positions, measured at 4e-7."""

MESH_SPACINGS = (0.06, 0.089, 0.13, 0.184, 0.241, 0.348, 0.522, 0.783, 1.044)
MESH_ERROR = {
    2: (0.062, 0.092, 0.135, 0.188, 0.245, 0.355, 0.538, 0.839, 1.08),
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

MOST_POINTS, MOST_POINTS_PER_ATOM = 2**24, 2048
"""Points of a mesh that is as fine as that, at most: one that misses its accuracy anyway should not take gigabytes."""

WIDEST = 4.0
"""Cutoff, in units of the one that costs least, up to which a list is built if the given reciprocal part is coarse."""

ATOMS_OF_IMAGE = 40.0
"""As many atoms in a cell cost as much as a look at one more image of it. Measured for batches of cells of 20 and of 64
atoms, for which pairs with images take about 3 and 1.5 times as long as those in one large cell."""

OUT_OF_REACH = 2.0
"""Expected error, in units of the accuracy, from which on callers are warned."""


REAL_SHARE, RECIPROCAL_SHARE, MESH_SHARE = 0.87, 0.25, 0.5
"""Of the error. That of missing k-vectors is small for the sake of energies and virials, in which the interaction of
each atom with itself adds up."""


class Target(NamedTuple):
    """The accuracy asked for.

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


MOST_REMEMBERED = 512
"""Results that each of the functions below keeps for one system: each takes ten to a hundred microseconds."""


def _remembered(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which keeps its results for arrays of NumPy with one number."""
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
    """What tells this argument from others: a number, if there is one, or some; None if it is not known."""
    if isinstance(value, np.ndarray):
        return value.tobytes() if value.shape == (1,) and value.dtype == np.float64 else None
    if isinstance(value, tuple):
        parts = tuple(map(_number, value))
        return None if None in parts else parts
    return value if value is np or isinstance(value, (float, int)) else None


# -- steps ----------------------------------------------------------------------------------------

STEPS = 2**6
"""Steps of lengths and their inverses in a factor of two: of 1.1 %."""

STEPS_OUT_OF_REACH = 2**4
"""The same of alpha where the accuracy is out of reach, so that it changes energies: wider, which fewer strains meet.
The error of the forces is at most a third larger than at the best alpha."""

STEPS_OF_FORCES = 2
"""The same of forces, of which the logarithm counts."""


def in_steps(value: Any, kind: str = "nearest", steps: int = STEPS, xp: Any = np) -> Any:
    """A positive value as one of ``steps`` powers of two in each factor of two, by numpy or torch.

    ``kind`` says which: the "nearest", that "down" or that "up"; what is a step but for rounding stays.
    """
    number = steps * xp.log2(value.clip(1e-290, 1e290))
    if kind == "nearest":
        number = number.round()
    else:
        number = xp.floor(number + 1e-6) if kind == "down" else xp.ceil(number - 1e-6)
    return xp.exp2(number * (1.0 / steps))


def force_of(nearby: Any, n_atoms: Any, xp: Any = np) -> Any:
    """RMS of the forces from those of near neighbors, both in units of (Σq²/N)/d², in steps.

    What is no number, as without any charge, is taken for typical.
    """
    force = FORCE_PER_NEARBY * nearby
    force = xp.where(xp.isfinite(force), force, TYPICAL_FORCE)
    largest = (FORCE_PER_ROOT * n_atoms**0.5).clip(TYPICAL_FORCE, LARGEST_FORCE)
    return in_steps(xp.minimum(force, largest).clip(LEAST_FORCE, None), "nearest", STEPS_OF_FORCES, xp)


@_remembered
def average_distance(n_atoms: Any, volume: Any, xp: Any = np) -> Any:
    """``d = (V/N)^(1/3)``, in steps; by numpy or torch. No atom counts as one.

    Less than it is, rather than more: for the higher density, errors are larger.
    """
    return in_steps((volume / n_atoms.clip(1.0, None)) ** (1.0 / 3.0), "down", STEPS, xp)


# -- errors ---------------------------------------------------------------------------------------


def _solve(prefactor: Any, error: Any, xp: Any = np) -> Any:
    """The x >= 1 with ``prefactor(x) exp(-x²)`` equal to ``error``, for a prefactor that falls slowly."""
    x: Any = 3.0
    for _ in range(8):  # a contraction: the prefactor enters through a logarithm
        x = xp.sqrt((xp.log(prefactor(x) * (1.0 / error))).clip(1.0, None))
    return x


@_remembered
def real_cutoff(alpha: Any, spacing: Any, target: Target, xp: Any = np) -> Any:
    """Distance r_c at which the real-space error falls to its share; ``spacing`` is (V/N)^(1/3)."""
    error = REAL_SHARE * target.error
    return _solve(lambda x: 2.0 * xp.sqrt(spacing * alpha / x), error, xp) / alpha


@_remembered
def reciprocal_cutoff(alpha: Any, spacing: Any, target: Target, xp: Any = np) -> Any:
    """Length k_c of k-vectors at which the reciprocal-space error falls to its share."""
    error = RECIPROCAL_SHARE * target.error
    return 2.0 * alpha * _solve(lambda y: 4.0 * xp.sqrt(alpha * spacing / (2.0 * np.pi * y)), error, xp)


@_remembered
def alpha_for_cutoff(cutoff: Any, spacing: Any, target: Target, xp: Any = np) -> Any:
    """Splitting parameter for which the real-space error at ``cutoff`` is its share."""
    error = REAL_SHARE * target.error
    return _solve(lambda x: 2.0 * xp.sqrt(spacing / cutoff), error, xp) / cutoff


@_remembered
def mesh_spacing(alpha: Any, spacing: Any, target: Target, order: int, xp: Any = np) -> Any:
    """Mesh spacing at which the error of splines of this order is its share."""
    known, errors = _mesh_knots(order)
    wanted = xp.log(MESH_SHARE * target.error / (alpha * spacing) ** 0.5)
    # linear between what was measured, in logarithms, and a power below
    x = known[0] + (wanted - errors[0]).clip(None, 0.0) * (1.0 / (order - 1))
    for n in range(len(errors) - 1):
        rise = errors[n + 1] - errors[n]
        x = x + (known[n + 1] - known[n]) / rise * (wanted - errors[n]).clip(0.0, rise)
    return xp.exp(x) / alpha


@dataclass(frozen=True)
class Sphere:
    """All k-vectors up to lengths ``k_cutoff`` (n_systems,)."""

    k_cutoff: Any

    share: ClassVar[float] = RECIPROCAL_SHARE

    def log_error(self, alpha: Any, spacing: Any, xp: Any = np) -> Any:
        """Logarithm of the error (n_systems,) in units of (Σq²/N)/d²; ``spacing`` is d."""
        y = 0.5 * self.k_cutoff / alpha
        return 0.5 * xp.log(8.0 / np.pi * alpha * spacing / y) - y * y

    def steepness(self, alpha: Any) -> Any:
        """About how fast `log_error` grows with the logarithm of alpha."""
        return 0.5 * (self.k_cutoff / alpha) ** 2 + 1.0


@dataclass(frozen=True)
class Box:
    """All k-vectors up to Miller indices: ``faces`` (n_systems, 3) are distances of the planes that bound them."""

    faces: Any

    share: ClassVar[float] = RECIPROCAL_SHARE

    def log_error(self, alpha: Any, spacing: Any, xp: Any = np) -> Any:
        """As of `Sphere`."""
        y = 0.5 * self.faces / alpha[:, None]
        of_face = 2.0 * Sphere(self.faces).log_error(alpha[:, None], spacing[:, None], xp) - xp.log(4.0 * y * y + 2.0)
        largest = xp.amax(of_face, 1)
        return 0.5 * (largest + xp.log(xp.exp(of_face - largest[:, None]).sum(1)))

    def steepness(self, alpha: Any) -> Any:
        """As of `Sphere`."""
        return 0.5 * ((self.faces / alpha[:, None]) ** 2).mean(1) + 1.0


@dataclass(frozen=True)
class Mesh:
    """A mesh with ``spacings`` (n_systems, 3) along lattice vectors, for splines of an order.

    ``skewness`` (n_systems,) is the factor by which errors of derivatives along lattice vectors grow when they become
    forces.
    """

    spacings: Any
    skewness: Any
    order: int

    share: ClassVar[float] = MESH_SHARE

    def log_error(self, alpha: Any, spacing: Any, xp: Any = np) -> Any:
        """As of `Sphere`."""
        errors = xp.exp(2.0 * _log_mesh_error(xp.log(alpha[:, None] * self.spacings), self.order)).mean(1)
        return 0.5 * xp.log(alpha * spacing * errors) + xp.log(self.skewness)

    def steepness(self, alpha: Any) -> Any:
        """As of `Sphere`."""
        return float(self.order)


def mesh_model(cell: Any, inverse: Any, mesh: Sequence[int], order: int, xp: Any = np) -> Mesh:
    """A mesh in cells (n_systems, 3, 3) with these inverses."""
    lengths = (cell**2).sum(2) ** 0.5
    spacings = xp.stack([lengths[:, axis] / n for axis, n in enumerate(mesh)], 1)
    return Mesh(spacings, skewness(cell, inverse), order)


def skewness(cell: Any, inverse: Any) -> Any:
    """Root of the mean square of lengths over heights (n_systems,) of cells (n_systems, 3, 3) with these inverses."""
    return ((cell**2).sum(2) * (inverse**2).sum(1)).mean(1) ** 0.5


def faces(indices: Any, lengths: Any) -> Any:
    """Distances (n_systems, 3) from the origin of planes of k-vectors with these Miller indices, or between two."""
    return 2.0 * np.pi * indices / lengths


Reciprocal = Sphere | Box | Mesh
"""Models of the reciprocal part."""


def _log_mesh_error(x: Any, order: int) -> Any:
    """Logarithm of c_p where the logarithm of α h is x: linear between what was measured, and a power outside."""
    known, errors = _mesh_knots(order)
    y = errors[0] + (order - 1) * (x - known[0]).clip(None, 0.0)
    for n in range(len(errors) - 1):
        step = known[n + 1] - known[n] if n < len(errors) - 2 else None
        y = y + (errors[n + 1] - errors[n]) / (known[n + 1] - known[n]) * (x - known[n]).clip(0.0, step)
    return y


def _mesh_knots(order: int) -> tuple[list[float], list[float]]:
    """Logarithms of α h and of c_p, as far as they were measured for this order."""
    errors = [math.log(error) for error in MESH_ERROR[order]]
    return [math.log(h) for h in MESH_SPACINGS[: len(errors)]], errors


def log_real_error(alpha: Any, cutoff: Any, spacing: Any, xp: Any = np) -> Any:
    """Logarithm of the error (n_systems,) of leaving out pairs beyond a cutoff, in units of (Σq²/N)/d²."""
    return xp.log(2.0 * xp.sqrt(spacing / cutoff)) - (alpha * cutoff) ** 2


def expected_errors(alpha: Any, cutoff: Any, spacing: Any, model: Reciprocal, target: Target) -> tuple[Any, Any]:
    """RMS errors of the forces (n_systems,) relative to their RMS, of pairs and of the reciprocal part; by numpy."""
    logs = log_real_error(alpha, cutoff, spacing), model.log_error(alpha, spacing)
    of_pairs, of_reciprocal = (np.exp(log) / target.force for log in logs)
    return of_pairs, of_reciprocal


def balanced_alpha(alpha: Any, cutoff: Any, spacing: Any, model: Reciprocal, target: Target, xp: Any = np) -> Any:
    """The splitting parameter ``alpha`` (n_systems,), or a smaller one if the given reciprocal part needs it.

    Then that for which the reciprocal part and the pairs up to ``cutoff`` exceed their shares of the error by the same
    factor, or stay below by the same: of the steps on both sides of it the one that exceeds less.
    """
    # estimated parameters meet their share but for rounding
    suffices = model.log_error(alpha, spacing, xp) <= xp.log(model.share * target.error) + 0.01
    if xp is np and suffices.all():
        return alpha

    def excess(low: Any, high: Any) -> Any:
        """Logarithm of the excess of pairs at one alpha, relative to that of the reciprocal part at another."""
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
    """The splitting parameter for which the error of the reciprocal part is its share, or ``alpha`` if that is less."""
    share = np.log(model.share * target.error)
    return np.minimum(alpha, _root(alpha, lambda trial: share - model.log_error(trial, spacing), model.steepness, np))


def _root(alpha: Any, excess: Callable[[Any], Any], derivative: Callable[[Any], Any], xp: Any) -> Any:
    """Where ``excess`` vanishes, by Newton's method for its logarithm, with an approximate derivative."""
    for _ in range(8):
        alpha = alpha * xp.exp((excess(alpha) / derivative(alpha)).clip(-1.0, 1.0))
    return alpha


@_remembered
def ewald_alpha(n_atoms: Any, volume: Any, target: Target, costs: Costs, xp: Any = np) -> Any:
    """Splitting parameter for which real and reciprocal space take the same time."""
    spacing = average_distance(n_atoms, volume, xp)
    n_atoms = n_atoms.clip(1.0, None)
    volume = n_atoms * spacing**3  # in steps
    alpha = 3.0 / spacing / n_atoms ** (1.0 / 6.0)
    for _ in range(3):
        x = real_cutoff(alpha, spacing, target, xp) * alpha
        y = reciprocal_cutoff(alpha, spacing, target, xp) / (2.0 * alpha)
        # for an atom 4/3 π r_c³ / d³ pairs and V k_c³ / 48 π² groups of eight k-vectors
        pairs = costs.pair * 4.0 / 3.0 * np.pi * (x / spacing) ** 3
        k_vectors = costs.k_vectors * volume * (2.0 * y) ** 3 / (48.0 * np.pi**2)
        alpha = (pairs / k_vectors) ** (1.0 / 6.0)
    return alpha


@_remembered
def mesh_alpha(n_atoms: Any, volume: Any, target: Target, order: int, costs: Costs, xp: Any = np) -> Any:
    """Splitting parameter for which pairs and the mesh take the same time."""
    spacing = average_distance(n_atoms, volume, xp)
    alpha = 0.8 / spacing
    for _ in range(3):
        x = real_cutoff(alpha, spacing, target, xp) * alpha
        h = (mesh_spacing(alpha, spacing, target, order, xp) * alpha).clip(FINEST, None)
        pairs = costs.pair * 4.0 / 3.0 * np.pi * (x / spacing) ** 3
        points = costs.mesh * (spacing / h) ** 3
        alpha = (pairs / points) ** (1.0 / 6.0)
    return alpha


def mesh_order(
    n_atoms: np.ndarray,
    volume: np.ndarray,
    target: Target,
    costs: Costs,
    *,
    lowest: int = 4,
    alpha: np.ndarray | None = None,
    cutoff: float | None = None,
) -> int:
    """The order of splines for which all systems (n_systems,) together take the least time.

    It is for alpha, or for the alpha that the cutoff needs, if one of them is given, else for the best alpha of each
    order.
    """
    spacing, count = average_distance(n_atoms, volume), n_atoms.clip(1.0, None)
    times = {}
    for order in MESH_ERROR:
        if order < lowest:
            continue
        if alpha is not None:
            splitting = alpha
        elif cutoff is not None:
            splitting = alpha_for_cutoff(np.full_like(spacing, cutoff), spacing, target)
        else:
            splitting = mesh_alpha(n_atoms, volume, target, order, costs)
        scaled = mesh_spacing(splitting, spacing, target, order) * splitting
        reach = real_cutoff(splitting, spacing, target)
        pairs = costs.pair * 4.0 / 3.0 * np.pi * (reach / spacing) ** 3
        points = costs.mesh * (spacing * splitting / scaled.clip(FINEST, None)) ** 3
        # a mesh that is as fine as that, and still not accurate: the order that is closest
        missed = (FINEST / scaled).clip(1.0, None) ** (order - 1)
        times[order] = float(missed.max()), float((count * (pairs + points + costs.spline * order**3)).sum())
    return min(times, key=times.__getitem__)


SEARCH = 2.0
"""Time of a pair that is searched and summed, in units of `Costs.pair`. Measured 2.2 with the estimate of forces; 64
molecules in boxes take the same time within a tenth from 2 to 4, and an eighth more at 1."""


def batch_mesh_cutoff(
    n_atoms: np.ndarray, volume: np.ndarray, lengths: np.ndarray, target: Target, order: int, costs: Costs
) -> np.ndarray:
    """Cutoff (1,) of the pairs of all systems of a batch, for which these and the mesh of all take the same time.

    Every system has a mesh of as many points, enough for the longest ones of its axes ``lengths`` (n_systems, 3), and a
    list has one cutoff; so it is not the sum of what is best for each of them. A pair costs its search, too, since a
    list of a batch is seldom used twice.
    """
    n_atoms = n_atoms.clip(1.0, None)
    spacing = np.exp(np.log(average_distance(n_atoms, volume)).mean(keepdims=True))
    target = target._replace(force=np.exp(np.log(target.force).mean(keepdims=True)))
    cutoff = 4.0 * spacing
    for _ in range(3):
        alpha = alpha_for_cutoff(cutoff, spacing, target)
        h = mesh_spacing(alpha, spacing, target, order).clip(FINEST / alpha, None)
        within = 4.0 / 3.0 * np.pi * cutoff**3 * (n_atoms * (n_atoms + ATOMS_OF_IMAGE) / volume).sum()
        pairs = SEARCH * costs.pair * within
        points = costs.mesh * len(n_atoms) * (lengths.max(0) / h).prod()
        cutoff = cutoff * (points / pairs) ** (1.0 / 6.0)
    return in_steps(cutoff)


@functools.lru_cache(maxsize=MOST_REMEMBERED)
def mesh_size(length: float, spacing: float, order: int, padding: float) -> int:
    """Points along an axis: at least ``length / spacing``, a product of 2, 3, 5 and 7 that transforms like."""
    least = max(order, int(np.ceil(length / spacing * (1.0 - 1e-9))))
    size = least
    while not _has_small_factors(size):
        size += 1
    sizes = [n for n in range(size, int(size * (1.0 + padding)) + 1) if _has_small_factors(n)]
    return min(sizes, key=_work, default=size)


_WORK = {2: 1.0, 3: 1.9, 5: 3.4, 7: 5.2}
"""Operations of a Fourier transform by prime factors of its size, for each point, about."""


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
    return size**3 * work  # the other axes grow with this one
