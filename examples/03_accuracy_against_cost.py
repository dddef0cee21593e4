"""How accurate Ewald sums are, and what that costs: the measured error of the forces beside the one asked for.

Forces on the ions of a disordered salt, by `ewald_summation` and by `particle_mesh_ewald` with splines of several
orders, for a range of asked accuracies. Errors are relative to the RMS of the forces, against a converged Ewald sum.
The neighbor list is built beforehand and left out of the times. Times of the mesh fall by an order of magnitude from
order 5 to order 8 for high accuracies: the error of a spline of order p is that of the mesh spacing to the power p - 1.
"""

import argparse
import sys
import time
import warnings

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch

from nvalchemiops import AccuracyWarning
from nvalchemiops._warp import quiet_warp
from nvalchemiops.torch.interactions.electrostatics import (
    EwaldSummation,
    ParticleMeshEwald,
    ewald_summation,
)
from nvalchemiops.torch.neighbors import neighbor_list

ORDERS = (4, 5, 6, 8)


def salt(n, rng):
    """n³ ions of alternating charge, displaced so far that little is left of the crystal; 2.8 angstrom apart."""
    grid = np.stack(np.meshgrid(*[np.arange(n)] * 3, indexing="ij"), -1).reshape(-1, 3)
    positions = 2.8 * (grid + rng.normal(scale=0.15, size=grid.shape))
    charges = 1.0 - 2.0 * (grid.sum(1) % 2)
    return torch.as_tensor(positions), torch.as_tensor(charges), 2.8 * n * torch.eye(3, dtype=torch.float64)


def measure(sum_up, positions, charges, cell, exact, calls):
    """Relative RMS error of the forces, and the shortest time of a few calls."""
    pairs, ptr, shifts = neighbor_list(positions, sum_up.cutoff, cell, return_neighbor_list=True)
    near = {"neighbor_list": pairs, "neighbor_ptr": ptr, "neighbor_shifts": shifts}
    times = []
    for _ in range(calls + 1):  # the first one compiles
        start = time.perf_counter()
        _, forces = sum_up(positions, charges, cell, compute_forces=True, **near)
        times.append(time.perf_counter() - start)
    return ((forces - exact).norm() / exact.norm()).item(), min(times[1:])


def estimated(system, accuracy, order):
    """A sum of this accuracy. What is only a warning, an accuracy out of reach of this order, is raised here."""
    positions, charges, cell = system
    wanted = {"accuracy": accuracy, "charges": charges}
    with warnings.catch_warnings():
        warnings.simplefilter("error", AccuracyWarning)
        if order is None:
            return EwaldSummation.estimate(positions, cell, **wanted)
        return ParticleMeshEwald.estimate(positions, cell, **wanted, spline_order=order)


def draw(path, results):
    figure, (against, cost) = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained")
    figure.suptitle("Ewald sums: the accuracy asked for, the accuracy delivered, and its price")
    low, high = 1e-10, 1e-2
    against.fill_between([low, high], [low / 3, high / 3], [low * 3, high * 3], color="#e6e6e6", lw=0)
    against.plot([low, high], [low, high], color="black", lw=0.8)
    for name, rows in results.items():
        asked, errors, times = zip(*rows)
        style = {"marker": "o", "ms": 4, "lw": 1.4, "color": "black" if name == "Ewald" else None}
        against.loglog(asked, errors, label=name, **style)
        cost.loglog(errors, [1e3 * t for t in times], label=name, **style)
    against.set(xlabel="accuracy asked for", ylabel="measured force error", title="Grey: within a factor of three")
    cost.set(xlabel="measured force error", ylabel="time (ms)", title="Energies and forces")
    cost.invert_xaxis()
    for axes in (against, cost):
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="accuracy.png", help="picture to write (accuracy.png)")
    parser.add_argument("--quick", action="store_true", help="a small system, for tests")
    options = parser.parse_args(arguments)
    quiet_warp()
    system = salt(8 if options.quick else 16, np.random.default_rng(0))
    _, exact = ewald_summation(*system, compute_forces=True, accuracy=1e-13)
    accuracies = 10.0 ** -np.arange(2, 9 if options.quick else 10)
    calls = 1 if options.quick else 3

    results = {}
    print(f"{len(system[1])} ions\n{'':16s}{'asked':>10s}{'measured':>10s}{'time (ms)':>11s}")
    for name, order in (("Ewald", None), *((f"PME, order {p}", p) for p in ORDERS)):
        rows = results[name] = []
        for accuracy in accuracies:
            try:
                sum_up = estimated(system, accuracy, order)
            except AccuracyWarning:
                break
            error, seconds = measure(sum_up, *system, exact, calls)
            rows.append((accuracy, error, seconds))
            print(f"{name:16s}{accuracy:10.0e}{error:10.1e}{1e3 * seconds:11.1f}")
    draw(options.output, results)
    print(f"picture: {options.output}")
    worst = max(error / asked for rows in results.values() for asked, error, _ in rows)
    if worst > 3.0:
        print(f"FAILED: an error is {worst:.1f} times what was asked for", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
