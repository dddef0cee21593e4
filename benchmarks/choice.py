"""Are the parameters that Ewald sums choose the best ones? Chosen beside a scan of all methods, orders and cutoffs.

For each system and accuracy, energies and forces with a list that is kept, float64. The scan has k-vectors, and meshes
with splines of orders 5 to 8 and 10, each with cutoffs of 0.7 to 1.45 times the one that the library would choose for
it; alpha, and k-vectors or mesh, follow from the cutoff and the accuracy. Times in ms, the shortest of several calls:
*predicted*, by the costs of this machine (`nvalchemiops tune`) or the built-in ones; *fixed*, the module that
`Electrostatics.estimate` returns; *default*, a call of `Electrostatics`, which chooses each time; *best* of the scan.
*ratio* is fixed to best. The error is that of the default call, beside a sum at a thousandth of its accuracy.

Systems: *salt*, rock salt with displacements of a tenth of the spacing; *water*, molecules of three charges at random
places of a lattice; *slab*, a salt with as much vacuum; *vapor*, pairs of ions at random; *molecules*, a batch of 64
cells with a molecule of 24 atoms each.

Run: ``python benchmarks/choice.py [--quick] [--full] [--threads N] [--csv FILE]``.
"""

import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import common
import numpy as np
import torch
from charges import SPACING, rock_salt

from nvalchemiops.interactions.electrostatics import error_models as core
from nvalchemiops.torch import System
from nvalchemiops.torch.interactions.electrostatics import (
    Electrostatics,
    EwaldSummation,
    ParticleMeshEwald,
    ewald_summation,
)
from nvalchemiops.torch.interactions.electrostatics.accuracy import methods
from nvalchemiops.torch.interactions.electrostatics.automatic import periodic_sizes

FACTORS = (0.7, 0.85, 1.0, 1.2, 1.45)
ORDERS = (5, 6, 7, 8, 10)
COLUMNS = ("system", "atoms", "accuracy", "error", "chosen", "predicted", "fixed", "default", "best", "which", "ratio")

Call = Callable[[], Any]


def salt(n_atoms: int, stretch: float = 1.0) -> System:
    edge = round(n_atoms ** (1.0 / 3.0))
    x, q, cell = rock_salt((edge,) * 3, False, np.random.default_rng(1))
    return System(*map(torch.as_tensor, (x, q, cell * np.array([1.0, 1.0, stretch])[:, None])))


def water(n_atoms: int) -> System:
    """Molecules on a simple cubic lattice, turned at random."""
    rng = np.random.default_rng(2)
    edge = round((n_atoms / 3) ** (1.0 / 3.0))
    sites = 3.1 * np.stack(np.meshgrid(*[np.arange(edge)] * 3, indexing="ij"), -1).reshape(-1, 1, 3)
    turned = np.linalg.qr(rng.normal(size=(len(sites), 3, 3)))[0]
    molecule = np.array([[0.0, 0.0, 0.0], [0.76, 0.59, 0.0], [-0.76, 0.59, 0.0]])
    x = (sites + 0.2 * rng.normal(size=sites.shape) + molecule @ turned).reshape(-1, 3)
    q = np.tile([-0.84, 0.42, 0.42], len(sites))
    return System(*map(torch.as_tensor, (x, q, 3.1 * edge * np.eye(3))))


def vapor(n_atoms: int) -> System:
    """Ion pairs, 2.4 apart, 1 % of the density of a salt."""
    rng = np.random.default_rng(3)
    length = SPACING * (100.0 * n_atoms) ** (1.0 / 3.0)
    edge = round((n_atoms / 2) ** (1.0 / 3.0))
    sites = length / edge * np.stack(np.meshgrid(*[np.arange(edge)] * 3, indexing="ij"), -1).reshape(-1, 1, 3)
    bonds = rng.normal(size=sites.shape)
    bonds *= 2.4 / np.linalg.norm(bonds, axis=-1, keepdims=True)
    sites = sites + rng.normal(size=sites.shape)
    x = np.concatenate([sites, sites + bonds], 1).reshape(-1, 3)
    return System(*map(torch.as_tensor, (x, np.tile([1.0, -1.0], len(sites)), length * np.eye(3))))


def molecules(n_atoms: int) -> System:
    rng = np.random.default_rng(4)
    n_systems = n_atoms // 24
    sites = 1.6 * np.stack(np.meshgrid(range(2), range(3), range(4), indexing="ij"), -1).reshape(-1, 3)
    x = (sites + 0.2 * rng.normal(size=(n_systems, 24, 3))).reshape(-1, 3)
    q = rng.normal(size=(n_systems, 24))
    q -= q.mean(1, keepdims=True)
    cell = np.tile(np.diag([8.0, 9.0, 10.0]), (n_systems, 1, 1)) * rng.uniform(0.9, 1.1, (n_systems, 1, 1))
    numbers = torch.arange(n_systems, dtype=torch.int32).repeat_interleave(24)
    return System(*map(torch.as_tensor, (x, q.ravel(), cell)), numbers)


SYSTEMS: dict[str, Callable[[int], System]] = {
    "salt": salt,
    "water": water,
    "slab": lambda n: salt(n, 2.0),
    "vapor": vapor,
    "molecules": molecules,
}


def contenders(system: System, accuracy: float) -> Iterator[tuple[str, Any]]:
    """Name and module of all combinations."""
    for factor in FACTORS:
        yield f"k-vectors, cutoff x {factor:g}", by_k_vectors(system, accuracy, factor)
    for order, factor in itertools.product(ORDERS, FACTORS):
        cutoff = ParticleMeshEwald.estimate(system, accuracy=accuracy, spline_order=order).cutoff
        assert cutoff is not None
        reach = {"real_space_cutoff": factor * cutoff, "spline_order": order}
        yield f"order {order}, cutoff x {factor:g}", ParticleMeshEwald.estimate(system, accuracy=accuracy, **reach)


def by_k_vectors(system: System, accuracy: float, factor: float) -> EwaldSummation:
    """A sum over k-vectors whose cutoff differs by a factor from the one that would be chosen."""
    chosen, sizes = EwaldSummation.estimate(system, accuracy=accuracy), periodic_sizes(system)
    assert sizes is not None and chosen.cutoff is not None
    # the cutoffs of systems of a batch differ
    cutoff = factor * core.real_cutoff(chosen.alpha.numpy(), sizes.spacing, core.Target(accuracy))
    alpha = core.alpha_for_cutoff(cutoff, sizes.spacing, core.Target(accuracy))
    k_cutoff = core.reciprocal_cutoff(alpha, sizes.spacing, core.Target(accuracy))
    return EwaldSummation(*map(torch.as_tensor, (alpha, k_cutoff)), float(cutoff.max()))


def call_of(module: Any, system: System, cutoff: float) -> Call:
    near = system.neighbors(cutoff)
    return lambda: module(system, near, compute_forces=True)


def shortest(call: Call, seconds: float) -> float:
    call()
    best, end = float("inf"), time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        call()
        now = time.perf_counter()
        best = min(best, now - start)
        if now > end:
            return best


def row(name: str, n_atoms: int, accuracy: float, seconds: float) -> dict[str, Any]:
    """The chosen sum beside the best of the scan."""
    system = SYSTEMS[name](n_atoms)
    way = methods.ways(periodic_sizes(system), accuracy, core.COSTS["cpu"], False)[0]
    fixed, cutoff = Electrostatics.estimate(system, accuracy), float(way.cutoff.max())
    assert fixed.cutoff is not None
    chosen = call_of(fixed, system, fixed.cutoff)
    default = call_of(Electrostatics(accuracy), system, cutoff)
    modules = dict(contenders(system, accuracy))
    longest = 3.0 * cutoff
    times = {
        label: shortest(call_of(m, system, m.cutoff), 0.1 * seconds)
        for label, m in modules.items()
        if m.cutoff < longest
    }
    calls = {
        label: call_of(modules[label], system, modules[label].cutoff)
        for label in sorted(times, key=times.__getitem__)[:3]
    }
    best = min(calls, key=lambda label: shortest(calls[label], seconds))
    turns = [[shortest(call, seconds) for call in (chosen, default, calls[best])] for _ in range(2)]
    of_chosen, of_default, of_best = map(min, zip(*turns))
    exact = ewald_summation(*system[:3], batch_idx=system.batch_idx, accuracy=1e-3 * accuracy, compute_forces=True)[1]
    error = float((default().forces - exact).norm() / exact.norm())
    label = "k-vectors" if way.method == "ewald" else f"order {way.order}"
    times_in_ms = [f"{1e3 * t:.3g}" for t in (way.time, of_chosen, of_default, of_best)]
    values = (name, len(system.positions), f"{accuracy:g}", f"{error:.1e}", label, *times_in_ms, best)
    return dict(zip(COLUMNS, (*values, f"{of_chosen / of_best:.2f}")))


def main() -> None:
    parser = common.parser_for(__doc__, "few systems")
    parser.add_argument("--full", action="store_true", help="up to 262,144 atoms, accuracies of 1e-2 to 1e-9")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    common.start(arguments.threads, "cpu", "shortest of several calls")
    warnings.simplefilter("ignore")
    sizes: dict[str, tuple[int, ...]] = {
        "salt": (64, 512, 4096),
        "water": (648,),
        "slab": (1000,),
        "molecules": (1536,),
    }
    accuracies: tuple[float, ...] = (1e-3, 1e-6)
    if arguments.quick:
        sizes = {"salt": (64, 1000)}
    if arguments.full:
        sizes = {
            "salt": (8, 64, 216, 512, 1000, 1728, 4096, 32768, 262144),
            "water": (81, 648, 3000),
            "slab": (216, 1000, 8000),
            "vapor": (250, 2000),
            "molecules": (1536,),
        }
        accuracies = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9)
    rows = []
    with torch.no_grad():
        for (name, counts), accuracy in itertools.product(sizes.items(), accuracies):
            for n_atoms in counts:
                rows.append(row(name, n_atoms, accuracy, 0.05 if arguments.quick else 0.3))
                print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    ratios = np.array([float(found["ratio"]) for found in rows])
    print(f"chosen / best: median {np.median(ratios):.2f}, largest {ratios.max():.2f}")
    common.write_csv(arguments.csv, list(rows[0]), rows)


if __name__ == "__main__":
    main()
