"""What the benchmark of Ewald sums measures of ours alone, or beside plain torch: floors, memory, first calls."""

import functools
import math
import os
import statistics
import tempfile
from typing import Any

import numpy as np
import torch
from charges import Parameters, neighbors, tensors
from common import SEPARATE_PAGES, in_new_process, in_turns, seconds

# -- floors ---------------------------------------------------------------------------------------------------


def octant_points(cell: np.ndarray, k_cutoff: float) -> int:
    """Points (|n_x|, |n_y|, |n_z|) of which some sign has a k-vector within the cutoff."""
    most = np.floor(k_cutoff * np.linalg.norm(cell, axis=1) / (2.0 * np.pi)).astype(int)
    n = np.stack(np.meshgrid(*[np.arange(m + 1) for m in most], indexing="ij"), -1).reshape(-1, 1, 3)
    k = 2.0 * np.pi * (n * np.array([[1, 1, 1], [1, 1, -1], [1, -1, 1], [1, -1, -1]])) @ np.linalg.inv(cell).T
    return int(((k**2).sum(-1) <= k_cutoff**2).any(1).sum())


@functools.lru_cache(maxsize=1)
def multiply_adds() -> float:
    """For a second of a matrix product in float64."""
    m = torch.randn(1500, 1500, dtype=torch.float64)
    return 1500**3 / min(seconds(lambda: m @ m) for _ in range(5))


def floors(method: str, what: str, system: str, p: Parameters) -> dict[str, float]:
    from nvalchemiops.torch.interactions.electrostatics import ewald_real_space

    given = tensors(system)
    alpha = torch.full((len(given["cell"]),), p["alpha"], dtype=torch.float64)
    near = neighbors(system, p["cutoff"], False)

    def pairs() -> Any:
        return ewald_real_space(**given, alpha=alpha, compute_forces=what != "energy", **near)

    found = {"pairs (ours, alone)": statistics.median(seconds(pairs) for _ in range(7))}
    if method == "pme":
        mesh = torch.randn(len(given["cell"]), *p["mesh"], dtype=torch.float64)
        found["floor: transforms"] = statistics.median(
            seconds(lambda: torch.fft.irfftn(torch.fft.rfftn(mesh, dim=(1, 2, 3)), s=mesh.shape[1:], dim=(1, 2, 3)))
            for _ in range(7)
        )
    else:
        count = np.bincount(given["batch_idx"]) if system == "batch" else [len(given["positions"])]
        products = sum(n * octant_points(c, p["k_cutoff"]) for n, c in zip(count, given["cell"].numpy()))
        found["floor: multiply-adds"] = 16.0 * float(products) / multiply_adds()
    neighbors.cache_clear()
    return found


# -- other figures --------------------------------------------------------------------------------------------


def broadcast(
    x: torch.Tensor, q: torch.Tensor, cell: torch.Tensor, alpha: float, k: torch.Tensor, near: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Energies of atoms in plain torch: k-vectors are half of those there are."""
    i, j = near["neighbor_list"]
    r = (x[j] - x[i] + near["neighbor_shifts"].to(x.dtype) @ cell[0]).norm(dim=1)
    potential = torch.zeros_like(q).index_add_(0, i, q[j] * torch.erfc(alpha * r) / r)
    k2 = k.square().sum(1)
    share = 8.0 * np.pi / torch.linalg.det(cell[0]).abs() * torch.exp(-k2 / (4.0 * alpha * alpha)) / k2
    for part, factor in zip(k.split(max(1, 2**23 // len(x))), share.split(max(1, 2**23 // len(x)))):
        phase = x @ part.T
        c, s = torch.cos(phase), torch.sin(phase)
        potential = potential + c @ (factor * (q @ c)) + s @ (factor * (q @ s))
    return 0.5 * q * (potential - 2.0 * alpha / math.sqrt(np.pi) * q)


def compare_with_broadcast(sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """Both precisions at equal parameters."""
    from nvalchemiops.torch.interactions.electrostatics import estimate_ewald_parameters, ewald_summation

    print(
        "\newald energy beside plain torch, estimated parameters for 1e-5: ours, broadcast, ratio (asked at most 1.2)"
    )
    rows = []
    for n_atoms in sizes:
        given = tensors(str(n_atoms))
        alpha, cutoff, k_cutoff = (
            float(v) for v in estimate_ewald_parameters(given["positions"], given["cell"], accuracy=1e-5)
        )
        near = neighbors(str(n_atoms), cutoff, False)
        lattice = 2.0 * np.pi * torch.linalg.inv(given["cell"][0]).T
        most = (k_cutoff * given["cell"][0].norm(dim=1) / (2.0 * np.pi)).floor().long()
        n = torch.cartesian_prod(*[torch.arange(-int(m), int(m) + 1, dtype=torch.float64) for m in most])
        # the half in which the first index that is not zero is positive
        n = n[(n @ torch.tensor([1e6, 1e3, 1.0], dtype=torch.float64)) > 0]
        k = n @ lattice
        k = k[k.norm(dim=1) <= k_cutoff]
        exact = broadcast(given["positions"], given["charges"], given["cell"], alpha, k, near)
        for dtype in (torch.float64, torch.float32):
            x, q, cell = (given[name].to(dtype) for name in ("positions", "charges", "cell"))
            vectors = k.to(dtype)

            def ours(x: Any = x, q: Any = q, cell: Any = cell, alpha: Any = alpha, near: Any = near, k: Any = k_cutoff):
                return ewald_summation(x, q, cell, alpha=alpha, k_cutoff=k, **near)

            plain = functools.partial(broadcast, x, q, cell, alpha, vectors, near)
            errors = [float((f().double() - exact).norm() / exact.norm()) for f in (ours, plain)]
            a, b = in_turns({f: functools.partial(seconds, f) for f in (ours, plain)}, 5).values()
            name = str(dtype).removeprefix("torch.")
            print(
                f"{n_atoms:8,} {name}{1e3 * a:10.3f} ms{1e3 * b:10.3f} ms{a / b:8.2f}   {len(k):,} k-vectors, "
                f"{near['neighbor_list'].shape[1] / n_atoms:.0f} neighbors; apart from float64: {errors[0]:.0e}, "
                f"{errors[1]:.0e}",
                flush=True,
            )
            rows += [
                {"case": f"ewald energy {name}", "system": str(n_atoms), "contender": c, "seconds": t}
                | {"parameters": f"cutoff {cutoff:.2f}, alpha {alpha:.4f}, k up to {k_cutoff:.3f}", "note": ""}
                for c, t in (("ours", a), ("broadcast", b))
            ]
    neighbors.cache_clear()
    return rows


FIRST = """
import time, torch
from nvalchemiops._warp import quiet_warp
quiet_warp()
from nvalchemiops.torch.interactions.electrostatics import {name}
from nvalchemiops.torch.neighbors import neighbor_list
import sys
sys.path.insert(0, {folder!r})
import charges
torch.set_num_threads(charges.THREADS)
given = charges.tensors("64")
near = charges.neighbors("64", 6.0, False)
start = time.perf_counter()
{name}(**given, alpha=0.5, {parameters}, compute_forces=True, **near)
print(time.perf_counter() - start)
"""

MEMORY = """
import sys, torch
sys.path.insert(0, {folder!r})
from nvalchemiops._warp import quiet_warp
quiet_warp()
import charges, common
from nvalchemiops.torch.interactions import electrostatics as library
torch.set_num_threads(charges.THREADS)
for system in ("512", "{n_atoms}"):
    given = charges.tensors(system)
    p = library.{estimate}(given["positions"], given["cell"], accuracy={accuracy})
    near = charges.neighbors(system, float(p.real_space_cutoff), False)
    options = {{"alpha": p.alpha, **near}}
    if {name!r} == "ewald_summation":
        options["k_cutoff"] = p.reciprocal_space_cutoff
    else:
        options["mesh_dimensions"] = p.mesh_dimensions
    for backward in (False, True):
        def call():
            leaves = {{name: t.clone().requires_grad_(backward) for name, t in given.items()}}
            result = library.{name}(**leaves, **options)
            return torch.autograd.grad(result.sum(), list(leaves.values())) if backward else result
        extra = common.peak_of(call)[0]
        if system != "512":
            print(extra)
print(near["neighbor_list"].shape[1] / {n_atoms})
"""


def peak_memory(quick: bool) -> None:
    folder = os.path.dirname(os.path.abspath(__file__))
    print("\nmemory at the peak of a call, beyond what was there")
    for name, estimate, n_atoms, accuracy in (
        ("ewald_summation", "estimate_ewald_parameters", 4_096 if quick else 20_000, 1e-6),
        ("particle_mesh_ewald", "estimate_pme_parameters", 32_768 if quick else 262_144, 1e-5),
    ):
        code = MEMORY.format(folder=folder, name=name, estimate=estimate, n_atoms=n_atoms, accuracy=accuracy)
        found = in_new_process(code, **SEPARATE_PAGES)
        line = f"{name:>22s}, {n_atoms:,} atoms, accuracy {accuracy:g}, {found[2]:.0f} neighbors: "
        line += ", ".join(
            f"{what} {found[n] / n_atoms:.0f} bytes per atom ({found[n] / 2**20:.0f} MiB)"
            for n, what in enumerate(("energy", "and gradients"))
        )
        print(line + (" (asked: below 1024 MiB)" if name == "ewald_summation" else ""), flush=True)


def first_calls() -> None:
    folder = os.path.dirname(os.path.abspath(__file__))
    print("\nfirst call with its compilation, energy and forces (asked: below 8 s)")
    for name, parameters in (
        ("ewald_summation", "k_cutoff=3.0"),
        ("particle_mesh_ewald", "mesh_dimensions=(24, 24, 24), spline_order=5"),
    ):
        with tempfile.TemporaryDirectory() as cache:
            taken = in_new_process(FIRST.format(name=name, parameters=parameters, folder=folder), WARP_CACHE_PATH=cache)
        print(f"{name:>22s}   {taken[0]:.1f} s", flush=True)
