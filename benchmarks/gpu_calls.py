"""Calls of this library, or of 0.5.0 under the same names, that `gpu.py` times side by side.

A case is a subject, a size, a precision and what is asked for (`cases`). Where there is an accuracy, each side is timed
at the fastest of a few parameters whose measured RMS error of the forces is below `ERRORS`. They are found for the
smallest system (rock salt with displaced ions) and taken over, at the same spacing of the mesh, for larger ones, whose
error is stated. Lists of neighbors are made before; inputs take turns.
"""

import functools
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from charges import atoms as ions
from dispersion import tables_for_peer
from gpu_worker import Call, Gpu, Row

from nvalchemiops.torch.interactions import electrostatics
from nvalchemiops.torch.neighbors import neighbor_list

ERRORS = {"float64": 1e-5, "float32": 1e-4}  # what single precision is used for
N_INPUTS, MOVE = 3, 1e-3  # sets of positions, and how far they are apart: no pair changes sides
DENSITY, CUTOFF, DSF_CUTOFF, D3_CUTOFF = 0.1, 5.0, 5.23, 40.0  # D3 in bohr
SIZES = {  # of the full run, and of a rehearsal
    "pme": (["4096", "32768", "262144", "1000000", "batch"], ["64"]),
    "list": (["1000", "10000", "100000", "1000000", "molecules"], ["200", "molecules"]),
    "dsf": (["100000"], ["216"]),
    "ewald": (["4096", "batch"], ["64"]),
    "d3": (["4096"], ["64"]),
    "multipoles": (["4096"], ["64"]),
}
PRECISIONS = ("float32", "float64")
SEARCH = {"cutoffs": (6.0, 8.0, 10.0, 12.0), "ours": (4, 5, 6, 8), "peer": (4, 5, 6)}
TINY_SEARCH = {"cutoffs": (6.0,), "ours": (5,), "peer": (5,)}
ALPHA_H = {4: 0.06, 5: 0.15, 6: 0.23, 8: 0.35}  # about what splines of an order need for an error of 1e-5
FFT_SIZES = sorted(2**a * 3**b * 5**c for a in range(10) for b in range(4) for c in range(3) if c * b < 3)
LARGEST = "1000000"  # in single precision alone
BASES = ("4096", "64")  # for which parameters are searched
FLOPS_OF_A_PAIR = 30
SIGMA, MULTIPOLE_ACCURACY = 0.5, 1e-6


class Work(NamedTuple):
    """A call, what it must do at least, and its forces where they can be compared."""

    call: Call
    bytes: float = 0.0
    flops: float = 0.0
    forces: Callable[[Any], torch.Tensor] | None = None
    note: str = ""
    captured: bool = True  # whether it is tried; a call that waits for sizes would spoil the process


def cases(tiny: bool) -> list[list[str]]:
    """Subject, size, precision, what: the most telling ones first."""
    found = []
    for subject, size in ((s, n) for s in SIZES for n in SIZES[s][tiny]):
        match subject:
            case "list":
                found += [[subject, size, "float32", form] for form in ("list", "matrix", "in place")]
            case "dsf":
                found += [[subject, size, p, "forces"] for p in PRECISIONS]
            case "ewald" | "pme":
                few = size not in BASES
                whats: tuple[str, ...] = ("forces",) if few else ("forces", "backward", "matching", "list and forces")
                whats = ("forces", "list and forces") if size == LARGEST else whats
                precisions = PRECISIONS[:1] if size == LARGEST else PRECISIONS
                found += [[subject, size, p, what] for p in precisions for what in whats]
            case "d3":
                found += [[subject, size, "float32", "forces"]]
            case _:
                # quadrupoles of 0.5.0 are compiled for a minute
                whats = ("dipoles",) if tiny else ("dipoles", "quadrupoles")
                found += [[subject, size, "float64", what] for what in whats]
    return sorted(found, key=lambda c: (c[0] == "multipoles", c[3] in ("backward", "matching")))


def in_turns(x: torch.Tensor) -> list[torch.Tensor]:
    """Inputs that differ a little from call to call."""
    generator = torch.Generator().manual_seed(9)
    moves = [MOVE * torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for _ in range(N_INPUTS - 1)]
    return [x, *(x + move for move in moves)]


def csr(x: torch.Tensor, cutoff: float, cell: torch.Tensor, idx: torch.Tensor | None, shifts: str) -> dict[str, Any]:
    """A list as arguments; ``shifts`` is what they are called. In both libraries pbc is given."""
    pbc = torch.ones((len(cell), 3), dtype=torch.bool, device=x.device)
    batch = {} if idx is None else {"batch_idx": idx}
    found = neighbor_list(x, cutoff, cell, pbc, return_neighbor_list=True, **batch)
    return dict(zip(("neighbor_list", "neighbor_ptr", shifts), found))


def bytes_of(near: dict[str, Any]) -> float:
    return float(sum(t.numel() * t.element_size() for t in near.values()) - near["neighbor_list"][0].numel() * 4)


# -- lists, pairs, D3 ---------------------------------------------------------------------------------------


def liquid(n_atoms: int, density: float = DENSITY) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    edge, n = (n_atoms / density) ** (1 / 3), math.ceil(n_atoms ** (1 / 3))
    points = np.stack(np.meshgrid(*[np.arange(n)] * 3, indexing="ij"), -1).reshape(-1, 3)
    points = points[np.sort(rng.permutation(n**3)[:n_atoms])]
    x = (points + rng.uniform(-0.33, 0.33, points.shape)) * (edge / n)
    return {"positions": x, "cell": edge * np.eye(3)[None], "charges": rng.normal(size=n_atoms)}


def lists(gpu: Gpu, tiny: bool, side: str, size: str, dtype: torch.dtype, what: str) -> Work:
    rng = np.random.default_rng(7)
    options: dict[str, Any] = {"return_neighbor_list": what == "list"}
    if size == "molecules":
        sizes = rng.integers(20, 61, 8 if tiny else 256)
        edges = np.repeat((sizes / DENSITY) ** (1 / 3), sizes)[:, None]
        x = torch.as_tensor(rng.uniform(0, 1, (len(edges), 3)) * edges).to(gpu.kind, dtype)
        idx = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        options["batch_idx"] = torch.as_tensor(idx, device=gpu.kind)
    else:
        edge = (int(size) / DENSITY) ** (1 / 3)
        x = torch.as_tensor(rng.uniform(0, edge, (int(size), 3))).to(gpu.kind, dtype)
        options["cell"] = edge * torch.eye(3, dtype=dtype, device=gpu.kind)[None]
        options["pbc"] = torch.ones(1, 3, dtype=torch.bool, device=gpu.kind)
    inputs = in_turns(x)

    def call(n: int) -> Any:
        return neighbor_list(inputs[n % N_INPUTS], CUTOFF, **options)

    found = call(0)
    pairs = found[0].shape[1] if what == "list" else int(found[1].sum())
    if what == "in place":
        # memory for ten more neighbors, since inputs differ; only ours can leave out the check for which it must wait
        matrix, count, *shifts = found
        wide = torch.nn.functional.pad(matrix, (0, 10))
        options |= {"neighbor_matrix": wide, "num_neighbors": count} | ({"check": False} if side == "ours" else {})
        if shifts:
            options["neighbor_matrix_shifts"] = torch.nn.functional.pad(shifts[0], (0, 0, 0, 10))
    # i, j and S in a list; in a matrix no i, but the padding
    written = sum(t.numel() * t.element_size() for t in found)
    bytes_moved = float(written + x.numel() * x.element_size())
    # 0.5.0 waits for the device in place, too
    return Work(call, bytes_moved, note=f"{pairs} pairs", captured=what == "in place" and side == "ours")


def dsf(gpu: Gpu, tiny: bool, side: str, size: str, dtype: torch.dtype, what: str) -> Work:
    given = {name: torch.as_tensor(t).to(gpu.kind, dtype) for name, t in liquid(int(size)).items()}
    x, q, cell = given["positions"], given["charges"], given["cell"]
    near = csr(x, DSF_CUTOFF, cell, None, "unit_shifts")
    inputs = in_turns(x)

    def call(n: int) -> Any:
        return electrostatics.dsf_coulomb(inputs[n % N_INPUTS], q, DSF_CUTOFF, 0.25, cell, compute_virial=True, **near)

    pairs = near["neighbor_list"].shape[1]
    return Work(call, bytes_of(near), FLOPS_OF_A_PAIR * pairs, lambda r: r[1], f"{pairs} pairs")


def d3(gpu: Gpu, tiny: bool, side: str, size: str, dtype: torch.dtype, what: str) -> Work:
    """Energy, forces and virial with the tables of our package, which it has written for 0.5.0."""
    from nvalchemiops.torch.interactions.dispersion import D3Parameters, dftd3

    given = {name: torch.as_tensor(t) for name, t in liquid(int(size), DENSITY * 0.529**3).items()}
    x, cell = (given[name].to(gpu.kind, dtype) for name in ("positions", "cell"))
    near = csr(x, D3_CUTOFF, cell, None, "unit_shifts")
    numbers = torch.tensor([6, 1, 8], device=gpu.kind).repeat(len(x) // 3 + 1)[: len(x)].int()
    if side == "ours":  # prepared, since elements would be read from the device in each call
        parameters: Any = D3Parameters.load().states([1, 6, 8], gpu.kind)
    else:
        table = {k: torch.as_tensor(v).to(gpu.kind, dtype) for k, v in np.load(os.environ["GPU_BENCH_D3"]).items()}
        parameters = D3Parameters(**table)
    inputs = in_turns(x)
    options: dict[str, Any] = {"a1": 0.4289, "a2": 4.4407, "s8": 0.7875, "d3_params": parameters, "cell": cell}

    def call(n: int) -> Any:
        return dftd3(inputs[n % N_INPUTS], numbers, compute_virial=True, **options, **near)

    pairs = near["neighbor_list"].shape[1]
    return Work(call, 3 * bytes_of(near), 2 * FLOPS_OF_A_PAIR * pairs, lambda r: r[1], f"{pairs} pairs")


# -- Ewald sums ---------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=2)
def charged(size: str, kind: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    given = {name: torch.as_tensor(value).to(kind) for name, value in ions(size).items()}
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in given.items()}


def splitting(given: dict[str, Any], cutoff: float, error: float) -> float:
    """Alpha at which pairs beyond the cutoff are missed by about this share of a force of 0.1.

    Source: Kolafa and Perram, Mol. Simul. 9, 351 (1992), doi:10.1080/08927029208049126.
    """
    q2 = float(given["charges"].double().square().sum())
    volume = float(given["cell"].double().det().abs().sum())
    low, high = 0.5 / cutoff, 6.0 / cutoff
    for _ in range(40):
        alpha = 0.5 * (low + high)
        missed = 2.0 * math.sqrt(q2 / len(given["charges"])) * math.sqrt(q2 / (cutoff * volume))
        missed *= math.exp(-((alpha * cutoff) ** 2))
        low, high = (alpha, high) if missed > 0.1 * error else (low, alpha)
    return high


def charges_work(gpu: Gpu, method: str, size: str, dtype: torch.dtype, what: str, p: Row) -> Work:
    given = charged(size, gpu.kind, dtype)
    x, q, cell, idx = given["positions"], given["charges"], given["cell"], given.get("batch_idx")
    near = csr(x, p["cutoff"], cell, idx, "neighbor_shifts")
    alpha = torch.full((len(cell),), p["alpha"], dtype=dtype, device=gpu.kind)
    options: dict[str, Any] = {"alpha": alpha, **near} | ({} if idx is None else {"batch_idx": idx})
    edge = float(cell.norm(dim=2).max())
    moved, flops = bytes_of(near), float(FLOPS_OF_A_PAIR * near["neighbor_list"].shape[1])
    if method == "pme":
        points = next((n for n in FFT_SIZES if n >= edge / p["spacing"] - 0.01), FFT_SIZES[-1])
        options |= {"mesh_dimensions": (points,) * 3, "spline_order": p["order"]}
        # spread, two transforms of three passes that read and write, a product: so many visits of a point at least
        moved += 16.0 * points**3 * len(cell) * x.element_size()
        flops += len(x) * p["order"] ** 3 * 10.0
    else:
        # made before, as far as each library takes them: otherwise their number is read from the device in each call
        if p["side"] == "ours":
            options["miller_indices"] = electrostatics.prepare_wave_vectors(cell, p["k_cutoff"])
        elif len(cell) == 1:  # those in a sphere, as a caller who knows would do
            k = electrostatics.generate_k_vectors_ewald_summation(cell, p["k_cutoff"]).reshape(-1, 3)
            k = k[k.norm(dim=1) <= p["k_cutoff"]]
            options["miller_indices"] = (k @ cell[0].T / (2.0 * np.pi)).round().to(torch.int32)
        else:
            options["k_cutoff"] = p["k_cutoff"]
        octant = p["k_cutoff"] ** 3 * float(cell.double().det().abs().mean()) / (48.0 * math.pi**2)
        flops += 2.0 * 16.0 * len(x) * octant  # (n_x, n_y, n_z) ≥ 0: 16 multiply-adds for each and each atom
    function = electrostatics.particle_mesh_ewald if method == "pme" else electrostatics.ewald_summation
    inputs = in_turns(x)

    def forces(n: int) -> Any:
        return function(inputs[n % N_INPUTS], q, cell, compute_forces=True, **options)

    def backward(n: int) -> Any:
        leaves = [t.detach().clone().requires_grad_() for t in (inputs[n % N_INPUTS], q, cell)]
        return torch.autograd.grad(function(*leaves, **options).sum(), leaves)

    def matching(n: int) -> Any:
        leaf, charge = (t.detach().clone().requires_grad_() for t in (inputs[n % N_INPUTS], q))
        (gradient,) = torch.autograd.grad(function(leaf, charge, cell, **options).sum(), leaf, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), charge)

    def list_and_forces(n: int) -> Any:
        options.update(csr(inputs[n % N_INPUTS], p["cutoff"], cell, idx, "neighbor_shifts"))
        return forces(n)

    if what == "forces":
        return Work(forces, moved, flops, lambda r: r[1])
    if what == "list and forces":
        return Work(list_and_forces, moved + bytes_of(near), flops, captured=False)
    return Work({"backward": backward, "matching": matching}[what])


class Missed(Exception):
    """No parameters reach the error."""


def searched(gpu: Gpu, side: str, method: str, size: str, dtype: torch.dtype, exact: torch.Tensor, tiny: bool) -> Row:
    """The fastest parameters of a few that reach the error."""
    given, wanted = charged(size, gpu.kind, dtype), ERRORS[str(dtype).removeprefix("torch.")]
    choices = TINY_SEARCH if tiny else SEARCH
    edge, found = float(given["cell"].norm(dim=2).max()), list[Row]()
    for cutoff in choices["cutoffs"]:
        for order in choices[side] if method == "pme" else (0,):
            alpha, best = splitting(given, cutoff, 0.5 * wanted), math.inf
            p: Row = {"side": side, "cutoff": cutoff, "alpha": alpha}
            for k in range(12):
                if method == "pme":
                    expected = edge * alpha / (ALPHA_H[order] * (wanted / 1e-5) ** (1 / order))
                    n = [n for n in FFT_SIZES if n >= 0.8 * expected][k]
                    p |= {"order": order, "spacing": edge / n}
                else:
                    p["k_cutoff"] = 2.0 * alpha * math.sqrt(-math.log(wanted)) * (0.9 + 0.07 * k)
                work = charges_work(gpu, method, size, dtype, "forces", p)
                p["error"] = error_of(work, exact)
                if p["error"] <= wanted:
                    found.append(p | {"seconds": gpu.median(work.call)})
                    break
                if p["error"] > 0.9 * best and k > 1:  # a finer sum does not help, so it is the pairs
                    p["alpha"] *= 1.05
                best = min(best, p["error"])
    if not found:
        raise Missed(f"no error below {wanted:g}: {p}")
    return min(found, key=lambda p: p["seconds"])


def error_of(work: Work, exact: torch.Tensor) -> float:
    assert work.forces is not None
    found = work.forces(work.call(0)).double()
    return float((found - exact.to(found)).norm() / exact.norm())


def multipoles(gpu: Gpu, tiny: bool, side: str, size: str, dtype: torch.dtype, what: str) -> Work:
    """Energy and gradients by positions and moments of Gaussians, with the parameters that each library chooses."""
    given = {name: torch.as_tensor(t).to(gpu.kind, dtype) for name, t in liquid(int(size)).items()}
    x, cell = given["positions"], given["cell"][0]
    generator = torch.Generator().manual_seed(2)

    def random(scale: float, *components: int) -> torch.Tensor:
        values = scale * torch.randn(len(x), *components, generator=generator, dtype=torch.float64)
        return values.to(gpu.kind, dtype)

    moments = [random(0.5), random(0.2, 3)]
    if what == "quadrupoles":
        products = random(0.15, 3, 3)
        products = products + products.mT
        identity = torch.eye(3, dtype=dtype, device=gpu.kind)
        moments.append(products - products.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * identity)
    packed = electrostatics.pack_multipole_moments(*moments)
    found = electrostatics.estimate_multipole_ewald_parameters(x, cell, SIGMA, accuracy=MULTIPOLE_ACCURACY)
    near = csr(x, float(found.real_space_cutoff), cell[None], None, "shifts")
    listed = (near["neighbor_list"][1].contiguous(), near["neighbor_ptr"], near["shifts"])
    options = {"sigma": SIGMA, "alpha": float(found.alpha), "k_cutoff": float(found.reciprocal_space_cutoff)}
    inputs = in_turns(x)

    def call(n: int) -> Any:
        leaves = [t.detach().clone().requires_grad_() for t in (inputs[n % N_INPUTS], packed)]
        energy = electrostatics.multipole_ewald_summation(*leaves, cell, *listed, **options)
        return torch.autograd.grad(energy.sum(), leaves)

    note = f"accuracy {MULTIPOLE_ACCURACY:g} asked for"
    return Work(call, forces=lambda r: r[0], note=note, captured=False)


# -- answers ------------------------------------------------------------------------------------------------


def prepared(gpu: Gpu, tiny: bool, side: str, case: list[str], folder: str, chosen: Row | None) -> tuple[Work, Row]:
    """The call of a case, and what to say of it; ``folder`` has the reference, which our side writes."""
    subject, size, precision, what = case
    dtype = getattr(torch, precision)
    simple = {"list": lists, "dsf": dsf, "d3": d3, "multipoles": multipoles}
    if subject in simple:
        work, row = simple[subject](gpu, tiny, side, size, dtype, what), Row()
        file = f"{folder}/{subject} {size} {what}.pt"
        if work.forces is not None and side == "ours" and not os.path.exists(file):
            reference = simple[subject](gpu, tiny, side, size, torch.float64, what)
            assert reference.forces is not None
            torch.save(reference.forces(reference.call(0)).double().cpu(), file)
        if work.forces is not None and os.path.exists(file):
            row["error"] = error_of(work, torch.load(file).to(gpu.kind))
        return work, row
    file = f"{folder}/charges {size}.pt"
    if not os.path.exists(file):
        if side != "ours":
            raise Missed("our side has made no reference")
        torch.save(exact_forces(gpu, size), file)
    exact = torch.load(file).to(gpu.kind)
    if not chosen and size not in BASES:
        raise Missed("no parameters, for want of those of the smaller system")
    p = dict(chosen) if chosen else searched(gpu, side, subject, size, dtype, exact, tiny)
    work = charges_work(gpu, subject, size, dtype, what, p)
    row = {"parameters": p}
    if what == "forces":
        row["error"] = error_of(work, exact)
    return work, row


def exact_forces(gpu: Gpu, size: str) -> torch.Tensor:
    given = charged(size, gpu.kind, torch.float64)
    if len(given["positions"]) <= 5_000:
        return electrostatics.ewald_summation(**given, accuracy=1e-11, compute_forces=True)[1].cpu()
    found = electrostatics.particle_mesh_ewald(**given, spline_order=8, accuracy=1e-8, compute_forces=True)
    return found[1].cpu()


def answer(gpu: Gpu, tiny: bool, work: list[Any]) -> Iterator[Row]:
    match work:
        case ["known", "cases"]:
            yield from ({"known": case} for case in cases(tiny))
        case ["d3 table", path]:
            np.savez(path, **tables_for_peer())  # by our package, which has the data; 0.5.0 has none
        case ["warm", side, case]:
            warm(gpu, side, case)
            yield {"name": " ".join(case)}
        case ["time", side, case, folder, chosen]:
            prepared_work, row = prepared(gpu, tiny, side, case, folder, chosen)
            yield from times(gpu, prepared_work, row)
        case ["profile", side, case, folder, chosen]:  # for a profiler around this process
            call = prepared(gpu, tiny, side, case, folder, chosen)[0].call
            for n in range(3):
                call(n)
            gpu.synchronize()
        case _:
            raise ValueError(f"no such question: {work}")


def warm(gpu: Gpu, side: str, case: list[str]) -> None:
    """Compile the kernels of a case with a small system."""
    subject, size, precision, what = case
    small = size if size in ("molecules", "batch") else SIZES[subject][1][0]
    with tempfile.TemporaryDirectory() as folder:
        for order in {"ours": SEARCH["ours"], "peer": SEARCH["peer"]}[side] if subject == "pme" else (0,):
            p = {"side": side, "cutoff": 5.0, "alpha": 0.5, "k_cutoff": 2.0, "spacing": 1.0, "order": order}
            if subject in ("ewald", "pme"):
                work = charges_work(gpu, subject, small, getattr(torch, precision), what, p)
            else:
                work = prepared(gpu, True, side, [subject, small, precision, what], folder, None)[0]
            work.call(0)
    gpu.synchronize()


def times(gpu: Gpu, work: Work, row: Row) -> Iterator[Row]:
    """Of a call; of its kernels; of a captured graph, last, since a failed capture can spoil a process."""
    row |= {"bytes": work.bytes, "flops": work.flops}
    row |= {"note": work.note} if work.note else {}
    yield row | {"call": gpu.median(work.call), "peak": gpu.peak(lambda: work.call(0))}
    kernels = gpu.kernels(work.call)
    yield {"kernels": 1e-6 * sum(k["us"] for k in kernels), "launches": sum(k["launches"] for k in kernels)} | {
        "longest": kernels[:8]
    }
    if not work.captured:
        return

    def step() -> list[torch.Tensor]:
        found = work.call(0)
        return [found] if isinstance(found, torch.Tensor) else list(found)

    replay, _ = gpu.capture(step)
    yield {"graph": gpu.median(lambda n: replay())}
