"""Systems of charges, and their sums by this library, or by another one in a separate interpreter."""

import functools
import itertools
import math
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import Peer, seconds, serve

THREADS, SPACING = 2, 2.82
CRYSTALS = 64
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


@functools.cache
def exact_forces(system: str) -> np.ndarray:
    from nvalchemiops.torch.interactions.electrostatics import ewald_summation, particle_mesh_ewald

    given = tensors(system)
    if len(given["positions"]) <= 4_096:
        return ewald_summation(**given, accuracy=1e-12, compute_forces=True)[1].numpy()
    return particle_mesh_ewald(**given, spline_order=8, accuracy=1e-9, compute_forces=True)[1].numpy()


def error_of(forces: Any, system: str) -> float:
    """Root mean square of the error over that of the forces."""
    exact = exact_forces(system)
    return float(np.sqrt(((np.asarray(forces) - exact) ** 2).mean() / (exact**2).mean()))


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
        # the calculator's own box: n k-vectors along an axis, of which half are positive
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
        (gradient,) = torch.autograd.grad(energy.sum(), leaf)
        return energy.detach(), -gradient

    def backward() -> tuple[torch.Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in (q, cell, x)]
        return torch.autograd.grad(function(leaves[2], leaves[0], leaves[1]).sum(), leaves)

    def charge_gradients() -> tuple[torch.Tensor, ...]:
        energy, force, potential = function(x, q, cell, compute_forces=True, compute_charge_gradients=True)
        return energy, potential, force

    def matching() -> tuple[torch.Tensor, ...]:
        leaf, charge = x.clone().requires_grad_(), q.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(function(leaf, charge, cell).sum(), leaf, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), charge)

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


def elsewhere(python: str, library: str) -> Peer:
    """A library in a separate interpreter, which is served by this script."""
    return Peer(python, __file__, library)  # what the peer calls a device


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    serve(Server, THREADS)
