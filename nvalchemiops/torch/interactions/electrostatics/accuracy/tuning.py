"""Measure the costs of the parts of an Ewald sum on a machine (`nvalchemiops.interactions.electrostatics.costs`)."""

import math
import time
from collections.abc import Callable, Iterator

import torch

from nvalchemiops.interactions.electrostatics.costs import Costs
from nvalchemiops.torch.interactions.electrostatics.ewald import ewald_real_space, ewald_reciprocal_space
from nvalchemiops.torch.interactions.electrostatics.pme import pme_reciprocal_space
from nvalchemiops.torch.neighbors.lists import neighbor_list

SIDE, POINTS = {"cpu": 16, "cuda": 46}, {"cpu": 64, "cuda": 192}
"""Numbers of atoms and of mesh points along an edge, so large that launches take a small part of the time."""

CUTOFF, BOUND = 3.0, 9
"""Cutoff in units of the distance between neighbors, with 113 pairs per atom; largest Miller index, with 1000 groups of
eight k-vectors."""


def measure(device: torch.device, seconds: float = 20.0, side: int | None = None, points: int | None = None) -> Costs:
    """Costs of the device, from sums over a cubic crystal with its atoms displaced.

    Parameters
    ----------
    device : torch.device
    seconds : float, optional
        Total time for which the three parts are repeated. The shortest time of each part is used.
    side, points : int, optional
        Number of atoms, and of mesh points, along an edge.
    """
    side, points = side or SIDE[device.type], points or POINTS[device.type]
    each = seconds / len(Costs._fields)
    return Costs(*[1e9 * _shortest(call, device, each) / units for call, units in _calls(device, side, points)])


def _calls(device: torch.device, side: int, points: int) -> Iterator[tuple[Callable[[], object], float]]:
    """The three parts, and how many units of work each does."""
    axis = torch.arange(side, dtype=torch.float64, device=device)
    grid = torch.cartesian_prod(axis, axis, axis)
    x = grid + 0.1 * torch.sin(7.0 * torch.arange(3 * side**3, dtype=torch.float64, device=device)).view(-1, 3)
    q = 1.0 - 2.0 * (grid.sum(1) % 2.0)
    cell = torch.eye(3, dtype=torch.float64, device=device) * float(side)
    alpha = 1.0

    def pairs() -> int:
        found, ptr, shifts = neighbor_list(x, CUTOFF, cell, return_neighbor_list=True)
        ewald_real_space(
            x, q, cell, alpha, neighbor_list=found, neighbor_ptr=ptr, neighbor_shifts=shifts, compute_forces=True
        )
        return found.shape[1]

    bounds, mesh = (BOUND,) * 3, (points,) * 3
    yield pairs, pairs()
    yield (
        lambda: ewald_reciprocal_space(x, q, cell, None, alpha, miller_bounds=bounds, compute_forces=True),
        side**3 * (BOUND + 1) ** 3,
    )
    yield lambda: pme_reciprocal_space(x, q, cell, alpha, mesh, None, 5, compute_forces=True), points**3


def _shortest(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """The shortest time of a call that is repeated for this many seconds, after kernels are loaded."""
    shortest, end = math.inf, None
    with torch.no_grad():
        while True:
            start = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            now = time.perf_counter()
            if end is None:
                end = now + seconds
                continue
            shortest = min(shortest, now - start)
            if now >= end:
                return shortest
