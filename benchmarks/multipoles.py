"""Charges, dipoles and quadrupoles in Ewald sums at a measured error, and latent Ewald sums beside the dense formula.

Two tables:

- energies and forces of charges alone, with dipoles, with quadrupoles (the traceless part of second moments), by
  Ewald's sum and on a mesh. Each has the largest ``accuracy`` of a few whose measured RMS error of the forces is below
  1e-5, with lists built before; times are given relative to charges alone;
- the energy and its gradients by positions and sources of a latent Ewald sum (sigma = 1, dl = 2, four channels) beside
  the formula in plain torch, dense sines and cosines of atoms and k-vectors, differentiated by torch.

Contenders run in turns in one process. Times are the least of a few, in processor time with ``--processor``, which
other programs on the machine disturb less.
"""

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from common import BURST, parser_for, start, write_csv

from nvalchemiops.torch.interactions.electrostatics import (
    ewald_reciprocal_space,
    ewald_summation,
    particle_mesh_ewald,
)
from nvalchemiops.torch.interactions.electrostatics.choice import choose_splitting
from nvalchemiops.torch.interactions.electrostatics.system import check_system, given_alpha
from nvalchemiops.torch.interactions.electrostatics.terms.mesh import MeshSum
from nvalchemiops.torch.interactions.electrostatics.terms.reciprocal import KVectorSum
from nvalchemiops.torch.neighbors import neighbor_list
from nvalchemiops.torch.systems import System

ERROR = 1e-5
ACCURACIES = (8e-5, 4e-5, 2e-5, 1e-5, 5e-6, 2.5e-6, 1e-6)
DENSITY = 0.1  # atoms in a cubic angstrom, about that of water
SPLINE_ORDERS = {"charges": 5, "dipoles": 6, "quadrupoles": 7}

Sources = dict[str, torch.Tensor]


def system(n_atoms: int, n_channels: int | None = None) -> tuple[torch.Tensor, torch.Tensor, Sources]:
    """Atoms on a distorted lattice, with sources of molecular size."""
    generator = torch.Generator().manual_seed(n_atoms)
    edge = (n_atoms / DENSITY) ** (1.0 / 3.0)
    per_side = round(n_atoms ** (1.0 / 3.0))
    axis = torch.arange(per_side, dtype=torch.float64) / per_side
    positions = torch.cartesian_prod(axis, axis, axis) * edge
    positions = positions + 0.2 * torch.randn(positions.shape, generator=generator, dtype=torch.float64)
    shape = (len(positions),) if n_channels is None else (len(positions), n_channels)

    def random(scale: float, *components: int) -> torch.Tensor:
        return scale * torch.randn(*shape, *components, generator=generator, dtype=torch.float64)

    charges, quadrupoles = random(0.5), random(0.15, 3, 3)
    quadrupoles = quadrupoles + quadrupoles.mT
    trace = quadrupoles.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    quadrupoles = quadrupoles - trace * torch.eye(3, dtype=torch.float64)
    sources = {"charges": charges - charges.mean(0), "dipoles": random(0.2, 3), "quadrupoles": quadrupoles}
    return positions, torch.eye(3, dtype=torch.float64) * edge, sources


def in_turns(calls: dict[str, Callable[[], Any]], repeats: int, clock: Callable[[], float]) -> dict[str, float]:
    """The least time of each call in milliseconds, of short bursts: a call alone finds the caches of the others."""
    least = dict.fromkeys(calls, math.inf)
    for _ in range(repeats):
        for name, call in calls.items():
            call()
            begin, count = clock(), 0
            while count == 0 or clock() - begin < BURST:
                call()
                count += 1
            least[name] = min(least[name], (clock() - begin) / count)
    return {name: 1e3 * value for name, value in least.items()}


def chosen(method: str, x: torch.Tensor, cell: torch.Tensor, sources: Sources, accuracy: float, order: int) -> Any:
    """A call with the parameters that the library chooses, and a list built before."""
    atoms = check_system(System(x, cell=cell, **sources))
    empty: Any = KVectorSum() if method == "ewald" else MeshSum(order, None)
    splitting = choose_splitting(atoms, empty, None, None, None, accuracy)
    alpha = given_alpha(splitting.alpha, atoms)
    found = empty.chosen(atoms, alpha, splitting.target)
    assert splitting.cutoff is not None
    pairs, pointers, shifts = neighbor_list(x, splitting.cutoff, cell, return_neighbor_list=True)
    options: dict[str, Any] = {
        "alpha": alpha,
        "neighbor_list": pairs,
        "neighbor_ptr": pointers,
        "neighbor_shifts": shifts,
        "compute_forces": True,
    }
    if method == "ewald":
        options["miller_indices"] = found.k_vectors
        function: Any = ewald_summation
    else:
        options |= {"mesh_dimensions": found.mesh, "spline_order": order}
        function = particle_mesh_ewald
    parameters = f"alpha {float(alpha):.3f}, cutoff {splitting.cutoff:.2f}"
    parameters += f", {len(found.k_vectors.points)} points" if method == "ewald" else f", mesh {found.mesh[0]}"
    return (lambda: function(x, cell=cell, **sources, **options)), parameters


def moments(sizes: tuple[int, ...], repeats: int, clock: Callable[[], float]) -> list[dict[str, Any]]:
    """Sums with more and more sources."""
    rows = []
    for n_atoms in sizes:
        x, cell, values = system(n_atoms)
        names = list(values)
        for method in ("ewald", "pme"):
            calls: dict[str, Any] = {}
            notes: dict[str, str] = {}
            for n, name in enumerate(names):
                sources = {key: values[key] for key in names[: n + 1]}
                exact = ewald_summation(x, cell=cell, **sources, accuracy=1e-11, compute_forces=True)[1]
                order = SPLINE_ORDERS[name]
                for accuracy in ACCURACIES:
                    call, parameters = chosen(method, x, cell, sources, accuracy, order)
                    error = float((call()[1] - exact).norm() / exact.norm())
                    if error <= ERROR:
                        break
                calls[name] = call
                notes[name] = f"error {error:.1e}, {parameters}"
            times = in_turns(calls, repeats, clock)
            for name, value in times.items():
                ratio = value / times["charges"]
                print(
                    f"{n_atoms:6d} {method:6s} {name:12s} {value:9.2f} ms  x {ratio:5.2f}   {notes[name]}", flush=True
                )
                rows.append({"atoms": n_atoms, "what": f"{method}, {name}", "ms": value, "ratio": ratio})
    return rows


def dense(x: torch.Tensor, cell: torch.Tensor, sources: Sources, sigma: float, dl: float) -> torch.Tensor:
    """The latent Ewald sum in plain torch: structure factors by dense sines and cosines, all k-vectors up to 2π/dl."""
    k_cutoff = 2.0 * math.pi / dl
    bounds = (k_cutoff * cell.norm(dim=1) / (2.0 * math.pi)).floor().int().tolist()
    axes = [torch.arange(0, bounds[0] + 1), *(torch.arange(-b, b + 1) for b in bounds[1:])]
    n = torch.cartesian_prod(*axes).to(x.dtype)
    k = 2.0 * math.pi * n @ torch.linalg.inv(cell).mT
    k2 = k.square().sum(1)
    used = (k2 <= k_cutoff**2) & (k2 > 0.0)
    k, k2 = k[used], k2[used]
    twice = torch.where(n[used, 0] == 0.0, 1.0, 2.0)
    phase = x @ k.mT
    cosine, sine = torch.cos(phase), torch.sin(phase)
    real, imaginary = sources["charges"].mT @ cosine, sources["charges"].mT @ sine
    for name, sign, first, factors in (
        ("dipoles", -1.0, sine, k.mT),
        ("quadrupoles", -0.5, cosine, (k.unsqueeze(2) * k.unsqueeze(1)).flatten(1).mT),
    ):
        if name in sources:
            second = cosine if first is sine else sine
            values = sources[name].flatten(1).mT  # no tensor of atoms, channels and k-vectors
            along = ((values @ wave).unflatten(0, (-1, len(factors))) * factors for wave in (first, second))
            of_first, of_second = (part.sum(1) for part in along)
            real = real + sign * of_first
            imaginary = imaginary + (of_second if name == "dipoles" else sign * of_second)
    weight = twice * torch.exp(-0.5 * sigma**2 * k2) / k2
    return 2.0 * math.pi / torch.linalg.det(cell).abs() * (weight * (real.square() + imaginary.square())).sum()


def projected(gradients: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Gradients by quadrupoles without their trace, which the library leaves out."""
    identity = torch.eye(3, dtype=torch.float64)

    def traceless(t: torch.Tensor) -> torch.Tensor:
        return t - t.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None] * identity

    return [traceless(t) if t.ndim == 4 else t for t in gradients]


def latent(sizes: tuple[int, ...], repeats: int, clock: Callable[[], float]) -> list[dict[str, Any]]:
    """Latent Ewald sums, energy and backward."""
    rows, sigma, dl = [], 1.0, 2.0
    for n_atoms in sizes:
        x, cell, values = system(n_atoms, 4)
        names = list(values)
        for n, name in enumerate(names):
            sources = {key: values[key].clone().requires_grad_() for key in names[: n + 1]}
            leaves = (x.clone().requires_grad_(), *sources.values())

            def ours(leaves: Any = leaves, sources: Sources = sources, cell: torch.Tensor = cell) -> Any:
                energies = ewald_reciprocal_space(
                    leaves[0],
                    cell=cell,
                    **sources,
                    k_vectors=None,
                    alpha=1.0 / (math.sqrt(2.0) * sigma),
                    k_cutoff=2.0 * math.pi / dl,
                    energy_reduction="system",
                    self_interaction=True,
                )
                return torch.autograd.grad(energies.sum(), leaves)

            def plain(leaves: Any = leaves, sources: Sources = sources, cell: torch.Tensor = cell) -> Any:
                return torch.autograd.grad(dense(leaves[0], cell, sources, sigma, dl), leaves)

            worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours(), projected(plain())))
            few = max(2, repeats * 512 // n_atoms)
            times = in_turns({"ours": ours, "dense": plain}, few, clock)
            ratio = times["dense"] / times["ours"]
            print(
                f"{n_atoms:6d} latent {name:12s} {times['ours']:9.2f} ms, dense {times['dense']:9.2f} ms: "
                f"{ratio:5.1f} times   differences {worst:.0e}",
                flush=True,
            )
            rows.append({"atoms": n_atoms, "what": f"latent, {name}", "ms": times["ours"], "ratio": ratio})
    return rows


def main() -> None:
    parser = parser_for(__doc__, "512 atoms only")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--processor", action="store_true", help="processor time in the place of wall time")
    parser.add_argument("--only", choices=("moments", "latent"))
    options = parser.parse_args()
    start(options.threads, "cpu", "plain torch")
    clock = time.process_time if options.processor else time.perf_counter
    sizes = (512,) if options.quick else (512, 4096)
    rows = []
    if options.only != "latent":
        rows += moments(sizes, options.repeats, clock)
    if options.only != "moments":
        rows += latent(sizes, options.repeats, clock)
    write_csv(options.csv, ("atoms", "what", "ms", "ratio"), rows)


if __name__ == "__main__":
    main()
