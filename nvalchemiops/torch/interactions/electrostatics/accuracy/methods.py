"""K-vectors or a mesh: the expected times and errors of both, and the faster one."""

import functools
from typing import NamedTuple

import numpy as np

from nvalchemiops.interactions.electrostatics import error_models as core
from nvalchemiops.locks import Kept
from nvalchemiops.torch.interactions.electrostatics.accuracy.sizes import Sizes
from nvalchemiops.torch.interactions.electrostatics.terms.mesh import MeshSum
from nvalchemiops.torch.interactions.electrostatics.terms.reciprocal import KVectorSum

METHODS = ("ewald", "pme")
"""Names of the methods: a sum over k-vectors, and a mesh."""


class Way(NamedTuple):
    """A method with its parameters, and what is expected of it. Arrays are (n_systems,)."""

    method: str  # one of `METHODS`
    order: int  # of splines; 0 for k-vectors
    cutoff: np.ndarray
    alpha: np.ndarray
    k_cutoff: np.ndarray  # 0 for a mesh
    mesh: tuple[int, int, int]  # zeros for k-vectors
    times: dict[str, float]  # expected, of the parts, in seconds
    error: float  # expected relative error of the forces; the largest of all systems

    @property
    def time(self) -> float:
        """The expected time of a call."""
        return sum(self.times.values())


def ways(
    sizes: Sizes, accuracy: float, costs: core.Costs, finds_neighbors: bool, reach: float | None = None
) -> list[Way]:
    """Both methods with the parameters that they choose, the faster one first.

    Only ratios of the lengths of ``sizes`` matter for the times. ``finds_neighbors``: each call searches for neighbors.
    ``reach`` is the cutoff of the neighbors, which by default each method chooses.
    """
    # a search whose reach is given takes the same time for all parameters
    of_call = costs.of_call(finds_neighbors and reach is None)
    found = [_by_k_vectors(sizes, accuracy, of_call, reach), _by_mesh(sizes, accuracy, of_call, reach)]
    if finds_neighbors:
        for way in found:
            n_pairs = way.times["pairs"] / of_call.pair
            way.times.update(pairs=costs.pair * n_pairs, neighbors=costs.search * n_pairs)
    # a mesh that cannot reach the accuracy is no choice
    return sorted(found, key=lambda way: (way.error > core.OUT_OF_REACH * accuracy, way.time))


def _by_k_vectors(sizes: Sizes, accuracy: float, costs: core.Costs, reach: float | None) -> Way:
    target, spacing, n_atoms = core.Target(accuracy), sizes.spacing, sizes.n_atoms
    alpha = KVectorSum().optimal_alpha(n_atoms, sizes.volume, target, costs, np)
    cutoff, alpha = _for_reach(reach, alpha, spacing, target)
    k_cutoff = core.reciprocal_cutoff(alpha, spacing, target)
    groups = sizes.volume * k_cutoff**3 / (48.0 * np.pi**2)
    times = {
        # one list for all systems, up to the longest of their cutoffs
        "pairs": 1e-9 * costs.pair * _pairs(sizes, np.full_like(cutoff, cutoff.max())),
        "k-vectors": 1e-9 * costs.k_vectors * float((n_atoms * groups).sum()),
        "call": 1e-9 * costs.call_of_k_vectors,
    }
    errors = core.expected_errors(alpha, cutoff, spacing, core.Sphere(k_cutoff), target)
    return Way("ewald", 0, cutoff, alpha, k_cutoff, (0, 0, 0), times, float(np.hypot(*errors).max()))


def _by_mesh(sizes: Sizes, accuracy: float, costs: core.Costs, reach: float | None) -> Way:
    target, spacing, n_atoms = core.Target(accuracy), sizes.spacing, sizes.n_atoms
    order, one = core.order_of_least_cost(accuracy, costs), len(sizes.n_atoms) == 1
    sizes, _ = sizes.for_mesh()
    lengths = None if one else sizes.lengths
    alpha = MeshSum(order, None).optimal_alpha(n_atoms, sizes.volume, target, costs, np, lengths)
    cutoff, alpha = _for_reach(reach, alpha, spacing, target)
    of_derivatives = target._replace(force=target.force / sizes.skewness)
    h = core.mesh_spacing(alpha, spacing, of_derivatives, order).clip(core.FINEST / alpha, None)
    least = (sizes.lengths / h[:, None]).max(0)
    x, y, z = (core.mesh_size(float(n), order, 0.25) for n in least)
    times = {
        "pairs": 1e-9 * costs.pair * _pairs(sizes, cutoff),
        "mesh": 1e-9 * costs.mesh * len(n_atoms) * x * y * z,
        "splines": 1e-9 * costs.columns(order) * float(n_atoms.sum()),
        "call": 1e-9 * costs.call_of_mesh,
    }
    errors = core.expected_errors(alpha, cutoff, spacing, sizes.mesh_model((x, y, z), order), target)
    return Way("pme", order, cutoff, alpha, 0.0 * alpha, (x, y, z), times, float(np.hypot(*errors).max()))


def _for_reach(
    reach: float | None, alpha: np.ndarray, spacing: np.ndarray, target: core.Target
) -> tuple[np.ndarray, np.ndarray]:
    """Cutoff and alpha for neighbors up to ``reach``: all are summed, and alpha is never below that of least cost."""
    cutoff = core.real_cutoff(alpha, spacing, target)
    if reach is None:
        return cutoff, alpha
    return np.full_like(cutoff, reach), core.alpha_for_cutoff(cutoff.clip(None, reach), spacing, target)


def _pairs(sizes: Sizes, cutoff: np.ndarray) -> float:
    """Number of pairs, each counted twice."""
    return float((4.0 / 3.0 * np.pi * sizes.n_atoms * (cutoff / sizes.spacing) ** 3).sum())


@functools.lru_cache(maxsize=256)
def method_of_one(n_atoms: int, accuracy: float, costs: core.Costs, finds_neighbors: bool) -> str:
    """The faster method for a system of this many atoms, whatever its density: the times depend on nothing else."""
    length = float(max(n_atoms, 1)) ** (1.0 / 3.0)
    sizes = Sizes(length * np.eye(3)[None], np.array([float(n_atoms)]), np.ones(1))
    return ways(sizes, accuracy, costs, finds_neighbors)[0].method


def method_of_several(sizes: Sizes, accuracy: float, costs: core.Costs, finds_neighbors: bool) -> str:
    """The faster method for a batch. Cells that change a little leave it alone, except at a boundary."""
    lengths = core.in_steps(sizes.with_shorter_vectors()[0].lengths, "nearest", STEPS_OF_LENGTHS)
    key = (lengths.tobytes(), sizes.n_atoms.tobytes(), accuracy, costs, finds_neighbors)
    found = _methods.find(key)
    if found is None:
        cell = lengths[:, :, None] * np.eye(3)
        rounded = Sizes(cell, sizes.n_atoms, core.average_distance(sizes.n_atoms, lengths.prod(1)))
        found = ways(rounded, accuracy, costs, finds_neighbors)[0].method
        _methods.keep(key, found)
    return found


_methods: Kept[str] = Kept(16)
"""The method for recent batches: choosing one takes a millisecond for 64 systems."""

STEPS_OF_LENGTHS = 4
"""Steps per factor of two to which lengths of cells are rounded for the choice of a method."""
