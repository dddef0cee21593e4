"""The work of the longest lane, a measure of kernels that needs no GPU: ``python -m tests.checker.work``.

A launch takes at least as long as its longest lane, counted here in accesses to arrays. Where that is many times the
mean over all lanes of its warps, most of them wait. Prints a table for the performance page.
"""

import re
import sys
import time
from collections.abc import Iterable
from unittest import mock

import numpy as np
import torch
import warp as wp

from nvalchemiops.torch import neighbors
from nvalchemiops.torch.interactions import electrostatics
from nvalchemiops.torch.interactions.dispersion import D3Parameters, RationalDamping, d3_dispersion
from nvalchemiops.torch.interactions.pair import lennard_jones
from nvalchemiops.torch.neighbors import rows
from nvalchemiops.torch.neighbors.pairs import list_geometry
from tests.checker.launches import Work
from tests.checker.session import checked
from tests.support.systems import ALL, System, batch

SIZES_OF_BATCH = (300, 200, 150, 120, 90, 60, 40, 20, 15, 5)
"""Atoms of the systems of a batch of 1,000; a batch of 16,000 has 16 of each."""

SPACING = 2.15
"""Å, of atoms at the density of those of water."""

CUTOFF = 6.0
TRIPLES_CUTOFF = 4.5
MULTIPROCESSORS = 132
"""Of an H100: only large searches have several rows for each warp."""

NEAREST = 12


def liquid(n_atoms: int, seed: int = 0) -> System:
    """Atoms on a cubic grid, some places of which are free, each moved at random, with charges ±1."""
    rng = np.random.default_rng(seed)
    side = int(np.ceil(n_atoms ** (1 / 3) - 1e-9))
    places = np.stack(np.meshgrid(*[np.arange(side)] * 3, indexing="ij"), -1).reshape(-1, 3)
    places = rng.permutation(places)[:n_atoms] + rng.uniform(-0.3, 0.3, (n_atoms, 3))
    length = n_atoms ** (1 / 3) * SPACING
    charges = np.where(np.arange(n_atoms) % 2, 1.0, -1.0)
    return System.of(places * (length / side), charges - charges.mean(), np.eye(3) * length)


def liquids(n_atoms: int) -> System:
    """A batch of systems of unequal sizes."""
    sizes = np.random.default_rng(1).permutation(np.repeat(SIZES_OF_BATCH, n_atoms // 1000))
    return batch(*(liquid(int(n), seed) for seed, n in enumerate(sizes)))


def work_of(system: System, derivatives: bool) -> list[Work]:
    """Launches of a step of each interaction; ``derivatives``: also of the gradient of a gradient."""
    x, q, cell, system_of = system
    n_systems = len(cell)
    of = {"batch_idx": system_of} if n_systems > 1 else {}
    numbers = torch.where(q > 0, 8, 1).int()
    states = D3Parameters.load().states([1, 8])
    damping = RationalDamping(0.43, 4.4, 0.79, 0.9)
    gpu = mock.patch("nvalchemiops.torch.neighbors.search.multiprocessors", lambda device: MULTIPROCESSORS)
    with gpu, checked(checks=False) as done:
        pairs, ptr, shifts = neighbors.neighbor_list(x, CUTOFF, cell, return_neighbor_list=True, **of)
        neighbors.neighbor_list(x, CUTOFF, cell, **of)
        neighbors.neighbor_list(x, CUTOFF, cell, nearest=NEAREST, ties="index", **of)
        near = {"neighbor_list": pairs, "neighbor_ptr": ptr, "neighbor_shifts": shifts}
        list_geometry(x, pairs, shifts, cell, **of)
        found = rows.rows_of(rows.GivenNeighbors(pairs, ptr, shifts), x, periodic=True)
        rows._inspect(x, cell, system_of, found.pointers, found.neighbors, found.shifts, 0, found.padding, found.first)
        lennard_jones(CUTOFF)(x, cell, sigma=1.9, epsilon=0.5, **near, **of, compute_forces=True, compute_virial=True)
        electrostatics.ewald_summation(x, q, cell, accuracy=1e-3, **of, **ALL)
        electrostatics.particle_mesh_ewald(x, q, cell, accuracy=1e-4, **of, **ALL)
        cutoffs = {"cutoff": CUTOFF, "coordination_cutoff": CUTOFF, "three_body_cutoff": TRIPLES_CUTOFF}
        options = {"compute_forces": True, "compute_virial": True, "s9": 1.0}
        d3_dispersion(x, numbers, damping, states, cell, **near, **of, **cutoffs, **options)
        if derivatives:
            for call in (electrostatics.ewald_summation, electrostatics.particle_mesh_ewald):
                leaves = [t.clone().requires_grad_() for t in (x, q, cell)]
                energies = call(*leaves, accuracy=1e-3, **of)
                first = torch.autograd.grad(energies.square().sum(), leaves, create_graph=True)
                sum(t.square().sum() for t in first).backward()
    return done


def kernel_of(work: Work) -> str:
    """The name of a kernel without what it was specialised for."""
    name = work.kernel.split("__locals__")[0]
    return re.sub(r"(_float\d\d|_\d+)+$", "", re.sub(r"^(pair_sum|pair_moments)_\w+", r"\1", name))


def ratio(work: Work) -> float:
    """Work of the longest lane over the mean of all lanes, those of half empty warps included."""
    warps = -(-work.threads // 32) if work.block % 32 == 0 else work.threads
    return work.longest * 32 * warps / max(work.total, 1)


def longest(launches: Iterable[Work]) -> dict[str, Work]:
    """Of each kernel, the launch with the longest lane."""
    result: dict[str, Work] = {}
    for work in launches:
        name = kernel_of(work)
        if work.total and (name not in result or work.longest > result[name].longest):
            result[name] = work
    return result


SYSTEMS = {
    "1,000 atoms": lambda: liquid(1000),
    "10 systems of 1,000": lambda: liquids(1000),
    "16,000 atoms": lambda: liquid(16000),
    "160 systems of 16,000": lambda: liquids(16000),
}


def main() -> None:
    """Print the table, of the systems whose names begin with an argument, or of all."""
    wp.config.quiet = True
    chosen = {name: make for name, make in SYSTEMS.items() if any(map(name.startswith, sys.argv[1:] or [""]))}
    columns = {}
    for name, make in chosen.items():
        start = time.process_time()
        system = make()
        columns[name] = longest(work_of(system, derivatives=len(system.charges) < 2000))
        print(f"{name}: {time.process_time() - start:.0f} s", file=sys.stderr, flush=True)
    print("| kernel |" + "".join(f" {name} |" for name in columns))
    print("|---|" + "---|" * len(columns))
    for kernel in sorted(set().union(*columns.values())):
        cells = []
        for found in columns.values():
            work = found.get(kernel)
            cells.append(f"{work.longest:,} ({ratio(work):.1f})" if work else "")
        print(f"| `{kernel}` | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
