"""Thousands of calls in one process: memory stays what it was, and nothing is kept that nobody will ask for again.

Every step has other atoms, another number of them and another cell, as in training on a dataset: caches by shape or by
cell get no hit, and would grow if they had no end. Plans of calls that repeat are kept up to a limit of memory, here a
small one that is soon reached. The process is one of its own, so that its memory is the library's.
"""

import json
import textwrap
from pathlib import Path

import pytest

from nvalchemiops.torch.runtime.cache import MOST_ENTRIES
from tests.support.processes import output_of, run_interpreter

CALLS_OF_A_STEP = 5
MEBIBYTE = 2**20
BYTES_OF_PLANS = MEBIBYTE

SCRIPT = """
import gc, json, sys
import numpy as np
import torch

from nvalchemiops import launch, threads
from nvalchemiops.torch.runtime import cache, tables
from nvalchemiops.torch.autograd import OutputSpec, live_recordings
from nvalchemiops.torch.autograd.naming import _definitions
from nvalchemiops.torch.interactions.electrostatics import ewald_summation, particle_mesh_ewald
from nvalchemiops.torch.interactions.lj import lj_energy_forces
from nvalchemiops.torch.kernel import differentiable_kernel
from nvalchemiops.torch.neighbors import VerletList, neighbor_list
import warp as wp

bytes_of_plans, *counts = map(int, sys.argv[1:])
tables.everywhere.most_bytes = bytes_of_plans
rng = np.random.default_rng(0)
everything = {"compute_forces": True, "compute_virial": True}


@wp.kernel
def square(x: wp.array(dtype=wp.float64), y: wp.array(dtype=wp.float64)):
    y[wp.tid()] = x[wp.tid()] * x[wp.tid()]


on_a_tape = differentiable_kernel(square).op([OutputSpec("y", wp.float64, lambda x: x.shape)])


def step(number):
    n, edge = int(rng.integers(2, 40)), float(rng.uniform(5.0, 9.0))
    cell = torch.as_tensor(edge * (np.eye(3) + rng.uniform(-0.1, 0.1, (3, 3)))).requires_grad_(number % 2 == 0)
    x = (torch.as_tensor(rng.random((n, 3))) @ cell.detach()).requires_grad_()
    q = torch.as_tensor(rng.normal(size=n)).requires_grad_()
    pairs, ptr, shifts = neighbor_list(x, 4.0, cell, return_neighbor_list=True)
    near = {"neighbor_list": pairs, "neighbor_ptr": ptr, "neighbor_shifts": shifts}
    energies, forces = lj_energy_forces(x, 0.2 + q.abs(), 0.1, 4.0, cell, **near)
    ewald = ewald_summation(x, q, cell, cutoff=4.0, accuracy=1e-4, **near, **everything)
    mesh = [int(size) for size in rng.integers(8, 14, 3)]
    pme = particle_mesh_ewald(x, q, cell, 0.8, mesh_dimensions=mesh, **near, **everything)
    torch.autograd.grad(on_a_tape(q).sum(), q)
    results = [energies, forces, *ewald, *pme]
    loss = sum((r / (1.0 + r.detach().abs())).sum() for r in results)
    leaves = [t for t in (x, q, cell) if t.requires_grad]
    slopes = torch.autograd.grad(loss, leaves, create_graph=number % 4 == 0)
    if number % 4 == 0:
        sum(s.tanh().sum() for s in slopes).backward()
    if number % 7 == 0:
        VerletList(3.0, 0.5)(x, cell)
    if number % 11 == 0:  # a graph that nobody differentiates, and a call that fails
        try:
            ewald_summation(x, q, cell, alpha=-1.0)
        except ValueError:
            pass


def resident():
    gc.collect()
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * 4096


def kept():
    return {
        "recordings": live_recordings(),
        "results by cell": len(cache._kept),
        "bytes of plans": tables.everywhere.n_bytes(on_gpu=False),
        "names of ops": len(_definitions),
        "kinds of launches": len(launch._row_cost),
        "commands of this thread": len(threads.commands()),
    }


sizes = []
for count in counts:
    for number in range(count):
        step(number)
    sizes.append({"resident": resident(), "objects": len(gc.get_objects()), **kept()})
print(json.dumps(sizes))
"""


def soak(folder: Path, *steps: int) -> list[dict[str, int]]:
    """What the process holds after each of these numbers of steps more."""
    script = folder / "soak.py"  # Warp reads the source of kernels, so they need a file
    script.write_text(textwrap.dedent(SCRIPT))
    # one arena, so that memory that was freed does not hide in another one
    run = run_interpreter(script, BYTES_OF_PLANS, *steps, timeout=1200, MALLOC_ARENA_MAX="1")
    return json.loads(output_of(run).splitlines()[-1])


@pytest.mark.later
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from Linux's /proc")
@pytest.mark.parametrize(
    "calls", [pytest.param(1_500, id="1500 calls"), pytest.param(20_000, id="20000 calls", marks=pytest.mark.slow)]
)
def test_memory_stays_what_it_was(calls, tmp_path):
    steps = calls // CALLS_OF_A_STEP
    warm, middle, end = soak(tmp_path, max(150, steps // 10), steps // 2, steps // 2)
    print(f"{calls} calls: {(end['resident'] - warm['resident']) / MEBIBYTE:.1f} MiB more than after the warm-up")
    assert end["resident"] - warm["resident"] < 8 * MEBIBYTE
    assert end["resident"] - middle["resident"] < 4 * MEBIBYTE
    assert end["objects"] - middle["objects"] < 0.02 * middle["objects"]
    assert end["recordings"] == 0
    assert 0 < end["results by cell"] <= MOST_ENTRIES
    assert 0 < end["bytes of plans"] <= BYTES_OF_PLANS
    for unchanged in ("names of ops", "commands of this thread"):
        assert end[unchanged] == warm[unchanged]
    # launches are told apart by the power of two of their work
    assert end["kinds of launches"] - warm["kinds of launches"] < 10
