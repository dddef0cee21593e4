"""Measure the costs of the parts of an Ewald sum on a machine (`nvalchemiops.interactions.electrostatics.costs`)."""

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
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

ORDERS, WIDE = (5, 8), 10
"""Orders of splines on a fine mesh, where its points take most of the time, and on a coarse one, where columns do; and
there of the splines with wide columns."""

Call = Callable[[], object]


def measure(device: torch.device, seconds: float = 20.0, side: int | None = None, points: int | None = None) -> Costs:
    """Costs of the device, from sums over a cubic crystal with its atoms displaced.

    The parts are repeated for so many ``seconds`` in total, and the shortest time of each is used. ``side`` and
    ``points`` are the numbers of atoms, and of mesh points of the fine mesh, along an edge.
    """
    side, points = side or SIDE[device.type], points or POINTS[device.type]
    large, small = _Crystal(device, side), _Crystal(device, 2)
    fine, coarse = points, max(points // 4, WIDE)
    calls: dict[str, Call] = {
        "search": large.search,
        "pairs": large.pairs,
        "k-vectors": large.k_vectors,
        "fine": lambda: large.mesh(fine, ORDERS[0]),
        "coarse": lambda: large.mesh(coarse, ORDERS[1]),
        "wide": lambda: large.mesh(coarse, WIDE),
        "few k-vectors": small.k_vectors,
        "small mesh": lambda: small.mesh(ORDERS[1], ORDERS[1]),
    }
    times = {name: 1e9 * _shortest(call, device, seconds / len(calls)) for name, call in calls.items()}
    calls_alone = times["few k-vectors"], times["small mesh"]
    # points and columns of both meshes
    work = np.array([[n**3, side**3 * order**2] for n, order in zip((fine, coarse), ORDERS)], float)
    mesh, column = np.linalg.solve(work, [times[name] - calls_alone[1] for name in ("fine", "coarse")])
    wide = (times["wide"] - calls_alone[1] - mesh * coarse**3) / (side**3 * WIDE**2)
    k_vectors = (times["k-vectors"] - calls_alone[0]) / (side**3 * (BOUND + 1) ** 3)
    pair, search = times["pairs"] / large.n_pairs, times["search"] / large.n_pairs
    return Costs(*(max(float(part), LEAST) for part in (pair, search, k_vectors, mesh, column, wide, *calls_alone)))


LEAST = 1e-3
"""Nanoseconds for a part, where the difference of two times is less."""


class _Crystal:
    """A cubic crystal with its atoms displaced, and parts of its Ewald sums."""

    def __init__(self, device: torch.device, side: int) -> None:
        axis = torch.arange(side, dtype=torch.float64, device=device)
        grid = torch.cartesian_prod(axis, axis, axis)
        x = grid + 0.1 * torch.sin(7.0 * torch.arange(3 * side**3, dtype=torch.float64, device=device)).view(-1, 3)
        q = 1.0 - 2.0 * (grid.sum(1) % 2.0)
        self.atoms, self.alpha = (x, q, torch.eye(3, dtype=torch.float64, device=device) * float(side)), 1.0
        self.found = self.search()
        self.n_pairs = self.found[0].shape[1]

    def search(self) -> tuple[torch.Tensor, ...]:
        x, _, cell = self.atoms
        return neighbor_list(x, CUTOFF, cell, return_neighbor_list=True)

    def pairs(self) -> object:
        found, ptr, shifts = self.found
        near: Any = {"neighbor_list": found, "neighbor_ptr": ptr, "neighbor_shifts": shifts}
        return ewald_real_space(*self.atoms, self.alpha, **near, compute_forces=True)

    def k_vectors(self) -> object:
        bounds = (BOUND,) * 3
        return ewald_reciprocal_space(*self.atoms, None, self.alpha, miller_bounds=bounds, compute_forces=True)

    def mesh(self, points: int, order: int) -> object:
        return pme_reciprocal_space(*self.atoms, self.alpha, (points,) * 3, None, order, compute_forces=True)


def _shortest(call: Call, device: torch.device, seconds: float) -> float:
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
