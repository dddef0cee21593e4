"""Ewald sums: ours beside nvalchemi-toolkit-ops 0.5.0 and torch-pme 0.5.0, in one run, and beside floors.

Rock salt (neighbors at 2.82, displaced by normal deviates of a tenth of that, charges 1 and -1), float64, 2 threads.
Everybody runs at the parameters that are fastest for it with a measured RMS error of the forces of 1e-5 of their RMS.
These are found first: the splitting parameter for each cutoff from the error of the pairs beyond it, which is the same
for all; the wave vectors or the mesh by trying; then cutoff and order of splines by time. What was chosen is printed
with each figure and kept in a file (``--parameters``), so that a second run need not search: make it on an idle
machine. Meshes for the large systems are those of 4,096 atoms, with the same spacing. The reference is our Ewald sum at
an accuracy of 1e-12, for large systems our mesh of order 8 at 1e-9. Lists of neighbors are made beforehand. Contenders
take turns; figures are medians.

- *0.5.0*: the peer of the same import name, as it comes, with wave vectors up to ``k_cutoff``, which are a box of them;
  *0.5.0 sphere*: its caller left out those in the corners (``miller_indices``). Lists or matrices, explicit forces or
  autograd: whichever is faster. In its own interpreter (``--peer`` or ``NVALCHEMIOPS_PEER_PYTHON``).
- *torch-pme*: its Ewald, P3M and PME calculators with a half list by vesin (``--torch-pme`` or
  ``NVALCHEMIOPS_TORCH_PME_PYTHON``). Wave vectors are a sphere made beforehand, but where the cell needs a gradient.
- *matching*: the gradient by charges of the sum of squared forces, by two backward passes; *explicit*: by one through
  the forces that the call returns.
- *broadcast*: plain torch over all atoms and half of the wave vectors, at the parameters that we estimate.
- *floor*: for a mesh, its two Fourier transforms; for Ewald, 16 multiply-adds for each atom and octant point
  (|n_x|, |n_y|, |n_z|) at the speed of a matrix product. No floor is known for the pairs: the time of our op for them
  stands beside (*pairs*), measured alone.

Run: ``python benchmarks/electrostatics.py [--quick] [--csv FILE] [--parameters FILE] [--plot FILE]``.
"""

import argparse
import csv
import functools
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import Peer, seconds

THREADS, SPACING, ERROR = 2, 2.82, 1e-5
REAL_SHARE = 0.7  # of the error, for the pairs
PATIENCE, BUDGET = 4.0, 12.0  # seconds: longer calls are timed once; of one row of the table
PLOTTED = ("512", "4096", "32768", "262144", "1000000")
CRYSTALS = 64
CUTOFFS = [5.0, 5.6, 6.3, 7.1, 8.0, 9.0, 10.0, 11.2, 12.5, 14.0, 16.0, 18.0, 20.0, 22.4]
MESHES = [6, 8, 9, 10, 12, 15, 16, 18, 20, 24, 25, 27, 30, 32, 36, 40, 45, 48, 50, 54, 60, 64, 72, 75, 80, 90, 96, 100]
MESHES += [108, 120, 125, 128, 144, 150, 160, 180, 192, 200, 216, 225, 240, 250, 256, 270, 288, 300, 320, 324, 360]
MESHES += [375, 384, 400, 432, 450, 480, 500, 512]
# splines to try, and about which α h each of them needs for 1e-5
SPLINES: dict[str, dict[str, float]] = {
    "ours": {"5": 0.16, "6": 0.23, "7": 0.29, "8": 0.35},
    "0.5.0": {"4": 0.06, "5": 0.14, "6": 0.2},
    "torch-pme": {"p3m 4": 0.12, "p3m 5": 0.2, "pme 5": 0.12, "pme 7": 0.2},
}
# how many times faster than whom the issue asks for
ASKED = {
    ("ewald energy", "512"): {"0.5.0": 40, "0.5.0 sphere": 40, "torch-pme": 2},
    ("ewald energy", "4096"): {"0.5.0": 200, "0.5.0 sphere": 200, "torch-pme": 10},
    ("pme forces", "4096"): {"0.5.0": 5},
    ("pme forces", "32768"): {"0.5.0": 5},
    ("pme matching", "4096"): {"0.5.0": 10},
    ("pme backward", "64"): {"0.5.0": 4},
    ("ewald backward", "64"): {"0.5.0": 4, "0.5.0 sphere": 4},
    ("pme forces", "batch"): {"0.5.0": 5},
    ("ewald forces", "batch"): {"0.5.0": 5},
}
Parameters = dict[str, Any]
Call = Callable[[], tuple[torch.Tensor, ...]]


# -- systems ------------------------------------------------------------------------------------------------


def rock_salt(repeats: tuple[int, int, int], primitive: bool, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Positions, charges and cell: of ``repeats`` sites along the axes, or of primitive cells of two atoms each."""
    sites = np.stack(np.meshgrid(*map(np.arange, repeats), indexing="ij"), -1).reshape(-1, 3)
    if primitive:
        lattice = SPACING * np.array([[0.0, 1.0, 1.0], [1.0, 0.0, 1.0], [1.0, 1.0, 0.0]])
        x = (sites @ lattice)[:, None] + SPACING * np.array([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
        x, q = x.reshape(-1, 3), np.tile([1.0, -1.0], len(sites))
    else:
        lattice, x, q = SPACING * np.eye(3), SPACING * sites, 1.0 - 2.0 * (sites.sum(1) % 2)
    return x + rng.normal(scale=0.1 * SPACING, size=x.shape), q, lattice * np.array(repeats)[:, None]


@functools.lru_cache(maxsize=2)
def atoms(system: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(11)
    if system == "batch":
        sizes = [n for n in itertools.product((2, 3, 4), repeat=3)]
        chosen = [sizes[n] for n in rng.integers(0, len(sizes), CRYSTALS)]
        chosen[:2] = (2, 2, 2), (4, 4, 4)
        parts = [rock_salt(n, True, rng) for n in chosen]
        strains = np.eye(3) + rng.normal(scale=0.02, size=(CRYSTALS, 3, 3))
        return {
            "positions": np.concatenate([x @ s for (x, _, _), s in zip(parts, strains)]),
            "charges": np.concatenate([q for _, q, _ in parts]),
            "cell": np.stack([c @ s for (_, _, c), s in zip(parts, strains)]),
            "batch_idx": np.repeat(np.arange(CRYSTALS, dtype=np.int32), [len(q) for _, q, _ in parts]),
        }
    n_atoms = int(system)
    edge = round(n_atoms ** (1 / 3))
    cells = {54: (3, 3, 3), 250: (5, 5, 5), 2_000: (10, 10, 10), 6_750: (15, 15, 15), 20_000: (20, 20, 25)}
    x, q, cell = rock_salt(cells.get(n_atoms, (edge,) * 3), n_atoms in cells, rng)
    assert len(x) == n_atoms
    return {"positions": x, "charges": q, "cell": cell[None]}


def tensors(system: str) -> dict[str, torch.Tensor]:
    return {name: torch.as_tensor(value) for name, value in atoms(system).items()}


# -- contenders: a library and its interpreter ----------------------------------------------------------------


@functools.lru_cache(maxsize=2)
def neighbors(system: str, cutoff: float, as_matrix: bool) -> dict[str, torch.Tensor]:
    from nvalchemiops.torch.neighbors import neighbor_list

    given = tensors(system)
    given.pop("charges")
    given["pbc"] = torch.ones((len(given["cell"]), 3), dtype=torch.bool)
    found = neighbor_list(cutoff=cutoff, return_neighbor_list=not as_matrix, **given)
    if as_matrix:
        return {"neighbor_matrix": found[0], "neighbor_matrix_shifts": found[2], "mask_value": len(given["positions"])}
    return dict(zip(("neighbor_list", "neighbor_ptr", "neighbor_shifts"), found))


@functools.lru_cache(maxsize=2)
def half_list(system: str, cutoff: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs (n, 2) and shifts, for torch-pme."""
    import vesin

    given = atoms(system)
    i, j, shifts = vesin.NeighborList(cutoff=cutoff, full_list=False).compute(
        given["positions"], given["cell"][0], True, "ijS"
    )
    pairs = torch.as_tensor(np.stack([i, j], 1).astype(np.int64))
    return pairs, torch.as_tensor(shifts.astype(np.float64))


def of_nvalchemi(method: str, system: str, p: Parameters) -> Callable[..., Any]:
    """The function of positions, charges and cell. In the peer's interpreter the same names are the peer."""
    from nvalchemiops.torch.interactions import electrostatics as library

    given = tensors(system)
    alpha = torch.full((len(given["cell"]),), p["alpha"], dtype=torch.float64)
    options: dict[str, Any] = {"alpha": alpha, **neighbors(system, p["cutoff"], p.get("neighbors") == "matrix")}
    options["batch_idx"] = given.get("batch_idx")
    if method == "pme":
        options |= {"mesh_dimensions": tuple(p["mesh"]), "spline_order": int(p["splines"])}
        return functools.partial(library.particle_mesh_ewald, **options)
    if p.get("vectors") == "sphere":
        k = library.generate_k_vectors_ewald_summation(given["cell"], p["k_cutoff"]).reshape(-1, 3)
        k = k[k.norm(dim=1) <= p["k_cutoff"]]
        options["miller_indices"] = (k @ given["cell"][0].T / (2.0 * np.pi)).round().to(torch.int32)
    else:
        options["k_cutoff"] = p["k_cutoff"]
    return functools.partial(library.ewald_summation, **options)


def of_torch_pme(method: str, system: str, p: Parameters, what: str) -> Callable[..., Any]:
    import torchpme

    given = tensors(system)
    pairs, shifts = half_list(system, p["cutoff"])
    potential = torchpme.CoulombPotential(smearing=1.0 / (math.sqrt(2.0) * p["alpha"]))
    options: dict[str, Any] = {}
    if method == "ewald":
        # the calculator's own box: n wave vectors along an axis, of which half are positive
        n = math.ceil(p["k_cutoff"] * float(given["cell"][0].norm(dim=1).max()) / (2.0 * np.pi))
        wavelength = float(given["cell"][0].norm(dim=1).max()) / (2 * n + 0.5)
        calculator = torchpme.EwaldCalculator(potential, lr_wavelength=wavelength)
        if what != "backward":
            axis = torch.arange(-n, n + 1, dtype=torch.float64)
            k = 2.0 * np.pi * torch.cartesian_prod(axis, axis, axis) @ torch.linalg.inv(given["cell"][0]).T
            options["kvectors"] = k[k.norm(dim=1) <= p["k_cutoff"]]
    else:
        kind, nodes = p["splines"].split()
        # n points where 2 L / h + 1 is between n / 2 and n
        spacing = 2.0 * float(given["cell"][0, 0, 0]) / (p["mesh"][0] - 1.5)
        maker = {"p3m": torchpme.P3MCalculator, "pme": torchpme.PMECalculator}[kind]
        calculator = maker(potential, mesh_spacing=spacing, interpolation_nodes=int(nodes))
    calculator = calculator.to(torch.float64)

    def distances(x: torch.Tensor, lattice: torch.Tensor) -> torch.Tensor:
        return (x[pairs[:, 1]] - x[pairs[:, 0]] + shifts @ lattice).norm(dim=1)

    kept = distances(given["positions"], given["cell"][0])

    def energy(x: torch.Tensor, q: torch.Tensor, cell: torch.Tensor) -> torch.Tensor:
        d = distances(x, cell[0]) if x.requires_grad or cell.requires_grad else kept
        column = q.unsqueeze(1)
        return (column * calculator(column, cell[0], x, pairs, d, **options)).squeeze(1)

    return energy


def call_of(library: str, method: str, what: str, how: str, system: str, p: Parameters) -> Call:
    """What is timed. The last of its results can be compared with those of others."""
    given = tensors(system)
    x, q, cell = given["positions"], given["charges"], given["cell"]
    if library == "torch-pme":
        function = of_torch_pme(method, system, p, what)
    else:
        function = of_nvalchemi(method, system, p)

    def forces() -> tuple[torch.Tensor, ...]:
        leaf = x.clone().requires_grad_()
        energy = function(leaf, q, cell)
        (slope,) = torch.autograd.grad(energy.sum(), leaf)
        return energy.detach(), -slope

    def backward() -> tuple[torch.Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in (q, cell, x)]
        return torch.autograd.grad(function(leaves[2], leaves[0], leaves[1]).sum(), leaves)

    def charge_gradients() -> tuple[torch.Tensor, ...]:
        energy, force, slope = function(x, q, cell, compute_forces=True, compute_charge_gradients=True)
        return energy, slope, force

    def matching() -> tuple[torch.Tensor, ...]:
        leaf, charge = x.clone().requires_grad_(), q.clone().requires_grad_()
        (slope,) = torch.autograd.grad(function(leaf, charge, cell).sum(), leaf, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), charge)

    def matching_explicit() -> tuple[torch.Tensor, ...]:
        charge = q.clone().requires_grad_()
        _, force = function(x, charge, cell, compute_forces=True)
        return torch.autograd.grad(force.square().sum(), charge)

    return {
        ("energy", ""): lambda: (function(x, q, cell),),
        ("forces", "explicit"): lambda: function(x, q, cell, compute_forces=True),
        ("forces", "autograd"): forces,
        ("charge gradients", "explicit"): charge_gradients,
        ("backward", ""): backward,
        ("matching", "autograd"): matching,
        ("matching", "explicit"): matching_explicit,
    }[what, how]


class Server:
    """One side of the pipe. Ours is asked in this process."""

    def __init__(self, library: str) -> None:
        self.library, self.call = library, dict[str, Call]()
        if library == "torch-pme":
            from importlib.metadata import version

            self.version = version("torch-pme")
        else:
            import nvalchemiops

            self.version = nvalchemiops.__version__

    def ask(self, *question: Any) -> Any:
        match question:
            case ("prepare", name, path, *work):
                try:
                    call = call_of(self.library, *work)
                    start = time.perf_counter()
                    result = call()
                    first = time.perf_counter() - start
                    np.save(path, result[-1].detach().numpy())
                except Exception as error:
                    return {"failed": f"{type(error).__name__}: {error}"[:300]}
                self.call[name] = call
                return {"seconds": first}
            case ("time", name):
                return seconds(self.call[name])
            case ("forget",):
                self.call.clear()
                neighbors.cache_clear()
                half_list.cache_clear()
                return None
            case _:
                return self.version


class Elsewhere(Peer):
    """A library in an interpreter of its own, which is served by this script."""

    def __init__(self, python: str, library: str) -> None:
        super().__init__(python, __file__, library)  # what the parent calls a device


def serve(library: str) -> None:
    torch.set_num_threads(THREADS)
    warnings.simplefilter("ignore")
    server = Server(library)
    for line in sys.stdin:
        print("answer", json.dumps(server.ask(*json.loads(line))), flush=True)


# -- what is true, and parameters for it ----------------------------------------------------------------------


class Bench:
    """The contenders, the references, and the parameters found so far."""

    def __init__(self, sides: dict[str, Any], path: str, folder: str, quick: bool) -> None:
        self.sides, self.path, self.folder, self.quick = sides, path, folder, quick
        self.kept: dict[str, Any] = {}
        if path and os.path.exists(path):
            with open(path) as file:
                self.kept = json.load(file)
        self.reference: dict[str, np.ndarray] = {}
        self.rows: list[dict[str, Any]] = []

    def keep(self, key: str, value: Any) -> Any:
        self.kept[key] = value
        if self.path:
            with open(self.path, "w") as file:
                json.dump(self.kept, file, indent=1)
        return value

    def run(self, contender: str, *work: Any, name: str = "trial") -> tuple[float, np.ndarray | str]:
        """Seconds of the first call, and its result, or why there is none."""
        path = os.path.join(self.folder, "result.npy")
        side = self.sides[contender.removesuffix(" sphere")]
        answer = side.ask("prepare", name, path, *work)
        return (0.0, answer["failed"]) if "failed" in answer else (answer["seconds"], np.load(path))

    def seconds(self, contender: str, name: str = "trial") -> float:
        return self.sides[contender.removesuffix(" sphere")].ask("time", name)

    def forces(self, system: str) -> np.ndarray:
        """Of the reference."""
        from nvalchemiops.torch.interactions.electrostatics import ewald_summation, particle_mesh_ewald

        if system not in self.reference:
            given = tensors(system)
            if len(given["positions"]) <= 4_096:
                forces = ewald_summation(**given, accuracy=1e-12, compute_forces=True)[1]
            else:
                forces = particle_mesh_ewald(**given, spline_order=8, accuracy=1e-9, compute_forces=True)[1]
            self.reference[system] = forces.numpy()
        return self.reference[system]

    def error(self, system: str, forces: np.ndarray) -> float:
        """Root mean square of the error over that of the forces."""
        exact = self.forces(system)
        return float(np.sqrt(((forces - exact) ** 2).mean() / (exact**2).mean()))

    def measured(self, contender: str, method: str, system: str, p: Parameters) -> float:
        how = "autograd" if contender == "torch-pme" else "explicit"
        _, forces = self.run(contender, method, "forces", how, system, p)
        if isinstance(forces, str):
            raise RuntimeError(f"{contender}, {method}, {system} atoms, {p}: {forces}")
        return self.error(system, forces)

    def splitting(self, system: str, cutoff: float) -> float:
        """Alpha at which the pairs beyond the cutoff are missed by their share of the error."""
        key = f"alpha {system} {cutoff:.3f}"
        if key in self.kept:
            return self.kept[key]
        if len(atoms(system)["positions"]) > 4_096:
            return self.splitting("4096", cutoff)
        alpha = 3.2 / cutoff
        for _ in range(3):
            error = self.measured("ours", "ewald", system, {"cutoff": cutoff, "alpha": alpha, "k_cutoff": 9.0 * alpha})
            alpha *= math.sqrt(1.0 + math.log(error / (REAL_SHARE * ERROR)) / (alpha * cutoff) ** 2)
        return self.keep(key, alpha)

    def with_waves(self, contender: str, system: str, p: Parameters) -> Parameters | None:
        """The shortest wave vectors that will do: the same for all who take a sphere of them."""
        key = f"waves {system} {p['cutoff']:.3f}"
        if contender != "0.5.0" and key in self.kept:
            return p | self.kept[key]
        y2, found = (p["alpha"] * p["cutoff"]) ** 2 + 0.5, dict[str, float]()
        fails: float | None = None
        works: float | None = None
        asked = contender if contender == "0.5.0" else "ours"
        for _ in range(7):
            trial = p | {"k_cutoff": 2.0 * p["alpha"] * math.sqrt(y2)}
            error = self.measured(asked, "ewald", system, trial)
            if error <= ERROR:
                works, found = y2, {"k_cutoff": trial["k_cutoff"], "error": error}
            else:
                fails = y2
            if 0.93 * ERROR < error <= ERROR:
                break
            rest = math.sqrt(max(error**2 - (REAL_SHARE * ERROR) ** 2, (0.1 * ERROR) ** 2))
            y2 += min(max(math.log(rest / (0.67 * ERROR)), -1.5), 1.5)
            if fails is not None and works is not None:
                # wave vectors come in shells, so the error goes in steps
                quarter = 0.25 * (works - fails)
                if quarter < 0.03:
                    break
                y2 = min(max(y2, fails + quarter), works - quarter)
        if not found:
            return None
        return p | (found if contender == "0.5.0" else self.keep(key, found))

    def with_mesh(self, contender: str, system: str, p: Parameters, alpha_h: float) -> Parameters | None:
        """The coarsest mesh that will do."""
        lengths = np.linalg.norm(atoms(system)["cell"], axis=2).max(0)
        sizes = [8, 16, 32, 64, 128, 256] if contender == "torch-pme" else MESHES
        sizes = [n for n in sizes if n >= 8 or n >= int(p["splines"].split()[-1])]
        at = int(np.searchsorted(sizes, lengths.max() * p["alpha"] / alpha_h))
        best, seen = None, set[int]()
        while 0 <= at < len(sizes) and at not in seen and sizes[at] <= 4.0 * lengths.max():
            seen.add(at)
            trial = p | {"mesh": [sizes[at]] * 3}
            error = self.measured(contender, "pme", system, trial)
            if error <= ERROR and (best is None or trial["mesh"] < best["mesh"]):
                best = trial | {"error": error}
            at += -1 if error <= ERROR else 1
        return best

    def parameters(self, contender: str, method: str, system: str) -> Parameters:
        """The fastest ones with the wanted error: for Ewald's energies, for the forces of a mesh."""
        key = f"{contender} {method} {system}"
        if key not in self.kept and self.quick:
            key += " quick"  # a coarser search, which is not for the other runs
        if key in self.kept:
            return self.kept[key]
        start = time.perf_counter()
        small = {"64", "512", "batch", "4096"}
        if method == "pme" and system not in small:
            return self.keep(key, self.scaled_mesh(contender, system))
        if method == "ewald" and system == "4096" and contender.startswith("0.5.0"):
            return self.keep(key, self.scaled_waves(contender, system))
        best: Parameters | None = None
        n_atoms = len(atoms(system)["positions"])
        if method == "ewald" and system != "batch":
            # pairs and waves take equal times near here, whatever the constants
            middle = {64: 6.0, 512: 8.5}.get(n_atoms, 12.0)
            low, high = (0.6, 1.4) if contender == "ours" else (0.9, 2.4 if n_atoms <= 512 else 1.7)
            cutoffs = [r for r in CUTOFFS if low * middle < r < high * middle]
        else:
            cutoffs = [r for r in CUTOFFS if r <= 12.5]
        cutoffs = cutoffs[1::2] if self.quick or system == "batch" else cutoffs
        for splines, alpha_h in SPLINES[contender].items() if method == "pme" else (("", 0.0),):
            fastest = math.inf
            for cutoff in cutoffs:
                p: Parameters = {"cutoff": cutoff, "alpha": self.splitting(system, cutoff)}
                if method == "ewald":
                    p |= {"vectors": "sphere"} if contender.endswith("sphere") else {}
                    found = self.with_waves(contender, system, p)
                else:
                    found = self.with_mesh(contender, system, p | {"splines": splines}, alpha_h)
                if found is None:
                    continue
                taken = self.timed(contender, method, system, found)
                if best is None or taken < best["seconds"]:
                    best = found | {"seconds": taken}
                fastest = min(fastest, taken)
                if taken > 1.4 * fastest:
                    break
        if best is None:
            raise RuntimeError(f"{key}: no parameters found")
        if contender == "0.5.0":
            other = best | {"neighbors": "matrix"}
            taken = self.timed(contender, method, system, other)
            best = other | {"seconds": taken} if taken < best["seconds"] else best
        print(f"  searched {time.perf_counter() - start:5.1f} s: {key}: {text(best)}", flush=True)
        if method == "ewald" and contender in ("0.5.0 sphere", "torch-pme"):
            best["error"] = self.measured(contender, method, system, best)
        return self.keep(key, best)

    def timed(self, contender: str, method: str, system: str, p: Parameters) -> float:
        what = ("forces", "autograd" if contender == "torch-pme" else "explicit")
        if system == "64":
            what = ("backward", "")
        elif method == "ewald" and system != "batch":
            what = ("energy", "")
        first, _ = self.run(contender, method, *what, system, p)
        return statistics.median(self.seconds(contender) for _ in range(1 if first > 0.3 else 3))

    def scaled_mesh(self, contender: str, system: str) -> Parameters:
        """Those of 4,096 atoms at the same spacing."""
        p = self.parameters(contender, "pme", "4096")
        edges = [float(atoms(s)["cell"][0, 0, 0]) for s in ("4096", system)]
        wanted = p["mesh"][0] * edges[1] / edges[0]
        if contender == "torch-pme":
            size = 2 ** math.ceil(math.log2(wanted) - 1e-6)
        else:
            size = next(n for n in MESHES if n >= wanted - 1e-6)
        p = {k: v for k, v in p.items() if k not in ("seconds", "error")} | {"mesh": [size] * 3}
        if int(system) <= 300_000:
            p["error"] = self.measured(contender, "pme", system, p)
        return p

    def scaled_waves(self, contender: str, system: str) -> Parameters:
        """Those of 512 atoms, with a cutoff that grows with the sixth root of the number of atoms."""
        p = self.parameters(contender, "ewald", "512")
        cutoff = p["cutoff"] * (int(system) / 512) ** (1 / 6)
        alpha = self.splitting(system, cutoff)
        p = p | {"cutoff": cutoff, "alpha": alpha, "k_cutoff": p["k_cutoff"] * alpha / p["alpha"]}
        error = self.measured(contender, "ewald", system, p)
        return {k: v for k, v in p.items() if k != "seconds"} | {"error": error}

    # -- measuring ------------------------------------------------------------------------------------------

    def measure(self, method: str, what: str, system: str, *contenders: str, floor: bool = False) -> None:
        """One row of the table: all contenders at one work."""
        ways: dict[str, tuple[str, str, str]] = {}  # name: contender, work and how
        for contender in contenders:
            if contender.removesuffix(" sphere") not in self.sides:
                continue
            if what in ("forces", "matching"):
                for how in ("autograd",) if contender == "torch-pme" else ("explicit", "autograd"):
                    if (contender, what, how) != ("ours", "forces", "autograd"):
                        ways[f"{contender}, {how}"] = contender, what, how
            elif what == "charge gradients":
                ways[contender] = contender, what, "explicit"
                ways["forces alone"] = contender, "forces", "explicit"
            else:
                ways[contender] = contender, what, ""
        times: dict[str, list[float]] = {}
        chosen: dict[str, Parameters] = {}
        notes: dict[str, str] = {}
        expected: np.ndarray | None = None
        for name, (contender, work, how) in ways.items():
            try:
                chosen[name] = self.parameters(contender, method, system)
            except RuntimeError as error:
                print(f"  {name}: left out, {error}")
                continue
            first, result = self.run(contender, method, work, how, system, chosen[name], name=name)
            if isinstance(result, str):
                notes[name] = result
            else:
                expected = result if expected is None else expected
                apart = float(np.sqrt(((result - expected) ** 2).sum() / (expected**2).sum()))
                if apart > 1e-3:
                    notes[name] = f"a different result, by {apart:.1e}"
                times[name] = [first] if first > PATIENCE else []
        turns = [name for name in times if not times[name]]
        once = {name: self.seconds(ways[name][0], name) for name in turns}
        total = 2.0 * sum(max(t, 0.01) for t in once.values())
        for _ in range(max(3, min(15, int((BUDGET / (4 if self.quick else 1)) / max(total, 1e-9))))):
            for name in turns:
                times[name].append(self.seconds(ways[name][0], name))
        for side in self.sides.values():
            side.ask("forget")
        medians = {name: statistics.median(t) for name, t in times.items()}
        self.show(method, what, system, medians, ways, chosen, notes, floor)

    def show(
        self,
        method: str,
        what: str,
        system: str,
        medians: dict[str, float],
        ways: dict[str, tuple[str, str, str]],
        chosen: dict[str, Parameters],
        notes: dict[str, str],
        floor: bool,
    ) -> None:
        n_atoms = len(atoms(system)["positions"])
        print(f"\n{method} {what}, {n_atoms:,} atoms{' in 64 crystals' if system == 'batch' else ''}")
        right = {name: t for name, t in medians.items() if name not in notes}
        mine = min((t for name, t in right.items() if ways[name][0] == "ours"), default=math.nan)
        by_autograd = right.get("ours, autograd", mine) if what == "matching" else mine
        for name, t in medians.items():
            contender = ways[name][0]
            rivals = [u for other, u in right.items() if ways[other][0] == contender]
            fastest = t == min(rivals, default=None)
            line = f"{name:>22s}{1e3 * t:11.3f} ms{1e6 * t / n_atoms:9.3f} µs/atom{t / by_autograd:8.2f} x"
            asked = ASKED.get((f"{method} {what}", system), {}).get(contender)
            line += f" (asked {asked})" if asked and fastest else ""
            line += f" ({t / mine:.2f} x explicit)" if mine != by_autograd and contender != "ours" else ""
            print(f"{line}   {text(chosen[name])}" + (f"   WRONG: {notes[name]}" if name in notes else ""))
            self.rows.append(
                {"case": f"{method} {what}", "system": system, "contender": name, "seconds": t}
                | {"parameters": text(chosen[name]), "note": notes.get(name, "")}
            )
        for name, note in notes.items():
            if name not in medians:
                print(f"{name:>22s}   cannot: {note}")
        if floor and not math.isnan(mine):
            p = chosen[next(name for name in chosen if ways[name][0] == "ours")]
            for name, t in floors(method, what, system, p).items():
                print(f"{name:>22s}{1e3 * t:11.3f} ms{'':17s}{mine / t:8.2f} x in ours")
                self.rows.append(
                    {"case": f"{method} {what}", "system": system, "contender": name, "seconds": t}
                    | {"parameters": "", "note": ""}
                )
        sys.stdout.flush()

    def taken(self, case: str, system: str, name: str = "ours") -> float:
        return next(
            (
                row["seconds"]
                for row in self.rows
                if (row["case"], row["system"]) == (case, system) and row["contender"].split(",")[0] == name
            ),
            math.nan,
        )


def text(p: Parameters) -> str:
    found = f"cutoff {p['cutoff']:.2f}, alpha {p['alpha']:.4f}"
    found += f", k up to {p['k_cutoff']:.3f}" if "k_cutoff" in p else ""
    found += f", mesh {p['mesh'][0]}, splines {p['splines']}" if "mesh" in p else ""
    found += ", matrix" if p.get("neighbors") == "matrix" else ""
    return found + (f", error {p['error']:.1e}" if "error" in p else "")


# -- floors ---------------------------------------------------------------------------------------------------


def octant_points(cell: np.ndarray, k_cutoff: float) -> int:
    """Points (|n_x|, |n_y|, |n_z|) of which some sign has a wave vector within the cutoff."""
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
    """Energies of atoms in plain torch: wave vectors k are half of those there are."""
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
    """E10: both precisions at equal parameters."""
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
            waves = k.to(dtype)

            def ours(x: Any = x, q: Any = q, cell: Any = cell, alpha: Any = alpha, near: Any = near, k: Any = k_cutoff):
                return ewald_summation(x, q, cell, alpha=alpha, k_cutoff=k, **near)

            plain = functools.partial(broadcast, x, q, cell, alpha, waves, near)
            errors = [float((f().double() - exact).norm() / exact.norm()) for f in (ours, plain)]
            times = [(seconds(ours), seconds(plain)) for _ in range(5)]
            a, b = (statistics.median(column) for column in zip(*times))
            name = str(dtype).removeprefix("torch.")
            print(
                f"{n_atoms:8,} {name}{1e3 * a:10.3f} ms{1e3 * b:10.3f} ms{a / b:8.2f}   {len(k):,} wave vectors, "
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
import electrostatics
torch.set_num_threads(electrostatics.THREADS)
given = electrostatics.tensors("64")
near = electrostatics.neighbors("64", 6.0, False)
start = time.perf_counter()
{name}(**given, alpha=0.5, {parameters}, compute_forces=True, **near)
print(time.perf_counter() - start)
"""

MEMORY = """
import sys, torch
sys.path.insert(0, {folder!r})
from nvalchemiops._warp import quiet_warp
quiet_warp()
import electrostatics
from nvalchemiops.torch.interactions import electrostatics as library
torch.set_num_threads(electrostatics.THREADS)
def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))
for system in ("512", "{n_atoms}"):
    given = electrostatics.tensors(system)
    p = library.{estimate}(given["positions"], given["cell"], accuracy={accuracy})
    near = electrostatics.neighbors(system, float(p.real_space_cutoff), False)
    options = {{"alpha": p.alpha, **near}}
    if {name!r} == "ewald_summation":
        options["k_cutoff"] = p.reciprocal_space_cutoff
    else:
        options["mesh_dimensions"] = p.mesh_dimensions
    for backward in (False, True):
        open("/proc/self/clear_refs", "w").write("5")  # forget the old peak
        before = status("VmRSS")
        leaves = {{name: t.clone().requires_grad_(backward) for name, t in given.items()}}
        result = library.{name}(**leaves, **options)
        grads = torch.autograd.grad(result.sum(), list(leaves.values())) if backward else None
        extra = status("VmHWM") - before
        del result, grads, leaves
        if system != "512":
            print(extra)
print(near["neighbor_list"].shape[1] / {n_atoms})
"""


def in_new_process(code: str, **environment: str) -> list[float]:
    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True
    )
    if run.returncode:
        raise RuntimeError(run.stderr[-2000:])
    return [float(number) for line in run.stdout.splitlines() for number in line.split() if line[0].isdigit()]


def peak_memory(quick: bool) -> None:
    folder = os.path.dirname(os.path.abspath(__file__))
    print("\nmemory at the peak of a call, beyond what was there")
    for name, estimate, n_atoms, accuracy in (
        ("ewald_summation", "estimate_ewald_parameters", 4_096 if quick else 20_000, 1e-6),
        ("particle_mesh_ewald", "estimate_pme_parameters", 32_768 if quick else 262_144, 1e-5),
    ):
        code = MEMORY.format(folder=folder, name=name, estimate=estimate, n_atoms=n_atoms, accuracy=accuracy)
        # larger buffers get pages of their own, so that none hides in memory left behind by an earlier call
        found = in_new_process(code, MALLOC_MMAP_THRESHOLD_="65536", MALLOC_TRIM_THRESHOLD_="65536")
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


# -- the run ----------------------------------------------------------------------------------------------------


def growth(bench: Bench, sizes: list[str]) -> None:
    print("\npme forces: how an atom's time grows, and how N log N would let it (asked: no more)")
    for a, b in zip(sizes, sizes[1:]):
        ratio = bench.taken("pme forces", b) / int(b) / (bench.taken("pme forces", a) / int(a))
        print(f"{int(a):>11,} to {int(b):>9,} atoms: {ratio:.2f}, log N {math.log(int(b)) / math.log(int(a)):.2f}")


def charge_gradients(bench: Bench) -> None:
    print("\ncharge gradients beside energy and forces: times as long (asked: at most 1.5)")
    for method in ("ewald", "pme"):
        ratio = bench.taken(f"{method} charge gradients", "4096") / bench.taken(
            f"{method} charge gradients", "4096", "forces alone"
        )
        print(f"{method:>11s}   {ratio:.2f}")


def plot(bench: Bench, path: str) -> None:
    """What energies and forces cost by the number of atoms."""
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(figsize=(7, 5), layout="constrained")
    for name, label, style in (
        ("ours", "particle_mesh_ewald", "o-"),
        ("0.5.0", "nvalchemi-toolkit-ops 0.5.0", "D-"),
        ("torch-pme", "torch-pme", "s-"),
        ("floor: transforms", "floor: two Fourier transforms of our mesh", "k:"),
    ):
        taken = {int(n): bench.taken("pme forces", n, name) for n in PLOTTED}
        points = [(n, 1e3 * t) for n, t in taken.items() if not math.isnan(t)]
        if points:
            axes.loglog(*zip(*points), style, label=label)
    axes.set(xlabel="atoms", ylabel="milliseconds", title=f"PME energy and forces, error {ERROR:g}, {THREADS} threads")
    axes.grid(alpha=0.3)
    axes.legend()
    axes.figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="no large systems, coarser search, few rounds")
    parser.add_argument("--peer", metavar="PYTHON", default=os.environ.get("NVALCHEMIOPS_PEER_PYTHON", ""))
    parser.add_argument("--torch-pme", metavar="PYTHON", default=os.environ.get("NVALCHEMIOPS_TORCH_PME_PYTHON", ""))
    parser.add_argument("--parameters", metavar="FILE", default="", help="JSON: read if there, written to")
    parser.add_argument("--csv", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE", help="not with --quick")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="", help=argparse.SUPPRESS)  # with --serve: which library
    options = parser.parse_args()
    if options.serve:
        return serve(options.device)
    from nvalchemiops._warp import quiet_warp

    quiet_warp()
    torch.set_num_threads(THREADS)
    sides: dict[str, Any] = {"ours": Server("ours")}
    for name, python in (("0.5.0", options.peer), ("torch-pme", options.torch_pme)):
        if os.access(python, os.X_OK):
            sides[name] = Elsewhere(python, name)
    print(f"torch {torch.__version__}, {platform.machine()}, {THREADS} threads, ", end="")
    print(", ".join(f"{name} {side.version}" for name, side in sides.items()))
    print("milliseconds, microseconds for an atom, how many times ours; matching: how many times ours by autograd")
    quick = options.quick
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(sides, options.parameters, folder, quick)
        everybody = ("ours", "0.5.0", "0.5.0 sphere", "torch-pme")
        bench.measure("ewald", "energy", "512", *everybody, floor=True)
        bench.measure("ewald", "energy", "4096", *(("ours", "torch-pme") if quick else everybody), floor=True)
        bench.measure("pme", "forces", "4096", "ours", "0.5.0", "torch-pme", floor=True)
        bench.measure("pme", "matching", "4096", "ours", "0.5.0", "torch-pme")
        bench.measure("ewald", "backward", "64", *everybody)
        bench.measure("pme", "backward", "64", "ours", "0.5.0", "torch-pme")
        bench.measure("pme", "forces", "batch", "ours", "0.5.0", floor=True)
        bench.measure("ewald", "forces", "batch", "ours", "0.5.0", floor=True)
        for method in ("ewald", "pme"):
            bench.measure(method, "charge gradients", "4096", "ours")
        charge_gradients(bench)
        if not quick:
            bench.measure("pme", "forces", "512", "ours", "0.5.0", "torch-pme", floor=True)
            bench.measure("pme", "forces", "32768", "ours", "0.5.0", "torch-pme", floor=True)
            bench.measure("pme", "forces", "262144", "ours", "0.5.0", floor=True)
            bench.measure("pme", "forces", "1000000", "ours", floor=True)
            growth(bench, ["4096", "32768", "262144", "1000000"])
            if options.plot:
                plot(bench, options.plot)
    bench.rows += compare_with_broadcast((54, 250, 2_000) if quick else (54, 250, 2_000, 6_750))
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            table = csv.DictWriter(file, ["case", "system", "contender", "seconds", "parameters", "note"])
            table.writeheader()
            table.writerows(bench.rows)
    peak_memory(quick)
    first_calls()


if __name__ == "__main__":
    main()
