"""Operators on a GPU beside float64 on the CPU, for `gpu.py`.

Each check is one row: the largest error of results and first derivatives (`error`) and of second ones (`error 2`), each
relative to the largest number of its tensor, over all systems; and in other words whether results are the same, to
the last bit, in the fourth call (which the library may replay from a graph of its own), on another stream, and from a
captured graph whose positions have moved; and whether a call waits for the device. Memory is filled with NaN before.
The CPU's values are those that the tests prove. With ``references``, a folder, they are read from there, and written
where they are missing: made elsewhere, they save the GPU machine the compilation of CPU kernels.
"""

import functools
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gpu_worker import Gpu, Row

from nvalchemiops.torch import segment_ops, spline
from nvalchemiops.torch.dynamics import SumOfTerms, langevin
from nvalchemiops.torch.interactions import electrostatics
from nvalchemiops.torch.interactions.dispersion import D3Parameters, d3_dispersion, damping_parameters
from nvalchemiops.torch.interactions.pair import PairPotential, damped_shifted_force, lennard_jones
from nvalchemiops.torch.neighbors import neighbor_list
from nvalchemiops.torch.neighbors.formats import list_geometry
from nvalchemiops.torch.systems import System

CUTOFF, ALPHA, MESH = 6.0, 0.5, (16, 18, 20)
# relative, of results with first derivatives and of second ones; in float32 these lose digits to steep potentials
TOLERANCES = {"float64": (1e-10, 1e-9), "float32": (1e-4, 2e-3)}
# torch adds up the parts of a gradient in an order that may change between a call and its replay, and by atomics where
# pairs are gathered: of some 50 pairs of an atom, relative to the largest sum
ROUNDING = {torch.float64: 1e-14, torch.float32: 1e-5}
LEAST = 1e-3  # numbers are of order one; where all of a tensor are smaller they are compared with this
EVERYTHING: dict[str, Any] = {"compute_forces": True, "compute_virial": True, "compute_charge_gradients": True}
FORCES: dict[str, Any] = {"compute_forces": True, "compute_virial": True}
PAIRS_AT_THE_CUTOFF = 2e-6  # relative distance to it, within which single precision may count a pair or not


class Given(NamedTuple):
    """Atoms with their pairs, as a matrix."""

    x: torch.Tensor  # (n_atoms, 3)
    q: torch.Tensor  # (n_atoms,)
    cell: torch.Tensor  # (n_systems, 3, 3)
    idx: torch.Tensor  # (n_atoms,)
    near: dict[str, Any]
    numbers: torch.Tensor  # (n_atoms,)

    def on(self, device: str, dtype: torch.dtype) -> "Given":
        x, q, cell = (t.to(device, dtype) for t in (self.x, self.q, self.cell))
        near = {name: t.to(device) for name, t in self.near.items()}
        return Given(x, q, cell, self.idx.to(device), near, self.numbers.to(device))


# -- systems ------------------------------------------------------------------------------------------------

CELLS = {
    "skewed": ((9.0, 0.0, 0.0), (6.0, 8.0, 0.0), (-5.0, 3.5, 7.5)),
    "left-handed": ((0.5, 8.0, 0.0), (9.0, 0.0, 1.0), (0.0, -2.0, 8.0)),
    "thin": ((18.0, 0.0, 0.0), (1.0, 3.2, 0.0), (0.0, 2.0, 12.0)),  # than the cutoff: images of images
}


def scattered(n_atoms: int, cell: Any, rng: np.random.Generator, nearest: float = 1.7) -> np.ndarray:
    """Positions in any image of the cell, none closer than ``nearest`` to another one or its images."""
    cell = np.asarray(cell)
    images = np.stack(np.meshgrid(*[[-1.0, 0.0, 1.0]] * 3, indexing="ij"), -1).reshape(-1, 3) @ cell
    found = np.zeros((0, 3))
    while len(found) < n_atoms:
        new = rng.random(3) @ cell
        if not (np.square(found[:, None] - new + images).sum(-1) < nearest**2).any():
            found = np.concatenate([found, new[None]])
    return found + rng.integers(-2, 3, (n_atoms, 3)) @ cell


def grid(n_side: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Many atoms, in a random order: a displaced cubic lattice, and its cell."""
    places = np.stack(np.meshgrid(*[np.arange(n_side)] * 3, indexing="ij"), -1).reshape(-1, 3)
    x = 2.4 * places + rng.uniform(-0.35, 0.35, places.shape)
    return x[rng.permutation(len(x))], 2.4 * n_side * np.eye(3)


def given(name: str, tiny: bool) -> Given:
    rng = np.random.default_rng(3)
    single = torch.float32  # all numbers exist in single precision, so that both see the same atoms
    parts: list[tuple[np.ndarray, Any]]
    match name:
        case "batch":  # of several sizes, one of them a single atom
            sizes = {"skewed": 41, "thin": 1, "left-handed": 33}
            parts = [(scattered(n, CELLS[kind], rng), CELLS[kind]) for kind, n in sizes.items()]
            parts.append((scattered(20, CELLS["thin"], rng), CELLS["thin"]))
        case "many":
            parts = [grid(6 if tiny else 16, rng)]
        case _:
            parts = [(scattered(28, CELLS[name], rng), CELLS[name])]
    sizes_of_parts = [len(x) for x, _ in parts]
    x = torch.as_tensor(np.concatenate([x for x, _ in parts])).to(single).double()
    cell = torch.as_tensor(np.stack([np.asarray(h) for _, h in parts])).to(single).double()
    idx = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor(sizes_of_parts)).int()
    q = torch.as_tensor(rng.normal(size=len(x))).to(single).double()
    matrix, _, shifts = neighbor_list(x, CUTOFF, cell, batch_idx=idx)
    near = {"neighbor_matrix": matrix, "neighbor_matrix_shifts": shifts}
    return Given(x, q, cell, idx, near, torch.where(q > 0, 6, 8).int())


NASTY = ("batch", *CELLS)

# -- operators ----------------------------------------------------------------------------------------------

TABLES = PairPotential("c*exp(-a*r) + q1*q2*erf(r)/r", ("q",), (), ("c", "a"), cutoff=5.5, r_switch=4.5)
LENNARD_JONES, DSF = lennard_jones(CUTOFF, r_switch=5.0), damped_shifted_force(CUTOFF)
PBE = damping_parameters("pbe")
D3_RANGES: dict[str, Any] = {"cutoff": CUTOFF, "coordination_cutoff": CUTOFF, "smoothing": 2.0}
KEPT: dict[str, Any] = {}


def batched(g: Given) -> dict[str, Any]:
    return {**g.near, "batch_idx": g.idx}


def dsf(g: Given) -> Any:
    return DSF(g.x, g.cell, q=g.q, alpha=0.25, **batched(g), **FORCES)


def pme(order: int, mesh: tuple[int, int, int] = MESH) -> Callable[[Given], Any]:
    return lambda g: electrostatics.particle_mesh_ewald(
        g.x, g.q, g.cell, ALPHA, mesh_dimensions=mesh, spline_order=order, **batched(g), **EVERYTHING
    )


def tables(g: Given) -> Any:
    axis = torch.arange(1.0, 3.0, dtype=g.x.dtype, device=g.x.device)  # made there: a copy from the host would wait
    table = axis[:, None] * axis / 2.0
    return TABLES(g.x, g.cell, q=g.q, c=table, a=table, species=(g.numbers == 6).int(), **batched(g), **FORCES)


def sources(g: Given) -> dict[str, Any]:
    """Moments that follow from charges, so that derivatives by charges go through them."""
    directions = torch.stack([g.q.sin(), g.q.cos(), 0.3 * g.q], 1)
    products = directions[:, :, None] * directions[:, None]
    traces = products.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    identity = torch.eye(3, dtype=g.x.dtype, device=g.x.device)
    return {"dipoles": 0.2 * directions, "quadrupoles": 0.1 * (products - traces * identity)}


def d3(g: Given, s9: float = 0.0) -> list[torch.Tensor]:
    place = str(g.x.device)
    if place not in KEPT:
        KEPT[place] = D3Parameters.load().states([6, 8], place)
    triples: dict[str, Any] = {"s9": s9, "three_body_cutoff": 5.0} if s9 else {}
    # in units of a thousandth of an hartree they are of order one; lengths here are in bohr
    found = d3_dispersion(g.x, g.numbers, PBE, KEPT[place], g.cell, **batched(g), **D3_RANGES, **triples, **FORCES)
    return [1e3 * t for t in found]


def potentials(g: Given) -> list[torch.Tensor]:
    options: dict[str, Any] = {"receiver_widths": [0.3, 0.8], "alpha": ALPHA, "cutoff": CUTOFF, "k_cutoff": 3.0}
    seen = electrostatics.electrostatic_potential(g.x, g.q, g.cell, g.idx, **options, **g.near)
    return [t for t in seen if t is not None]


def splines(g: Given) -> list[torch.Tensor]:
    mesh = spline.spline_spread(g.x, g.q, g.cell, MESH, 6, g.idx)
    return [mesh, *spline.spline_gather_with_force(g.x, g.q, mesh.sin(), g.cell, 6, g.idx)]


def segments(g: Given) -> list[torch.Tensor]:
    n = len(g.cell)
    sums = segment_ops.segmented_sum(g.x, g.idx, n), segment_ops.segmented_dot(g.x, g.x.sin(), g.idx, n)
    return [*sums, segment_ops.segmented_matvec(g.x, g.cell, g.idx, n), segment_ops.segmented_max(g.x, g.idx, n)]


def geometry(g: Given) -> Any:
    matrix, shifts = g.near["neighbor_matrix"], g.near["neighbor_matrix_shifts"]
    i, slot = (matrix < len(g.x)).nonzero(as_tuple=True)
    return list_geometry(g.x, torch.stack([i.int(), matrix[i, slot]]), shifts[i, slot], g.cell, g.idx)


def dynamics(g: Given) -> list[torch.Tensor]:
    """Three steps with noise, the same on each device."""
    model = SumOfTerms(functools.partial(LENNARD_JONES, sigma=1.7, epsilon=0.05), skin=1.0)
    integrator = langevin(dt=0.01, temperature=0.1)
    system = System(g.x.detach(), cell=g.cell.detach(), batch_idx=g.idx, numbers=g.numbers)
    state = integrator.start(system, model, seed=1)
    for _ in range(3):
        state = integrator.step(state, model)
    return [state.system.positions, state.temperatures]


def automatic(g: Given) -> Any:
    return electrostatics.particle_mesh_ewald(g.x, g.q, g.cell, batch_idx=g.idx, accuracy=1e-7, **EVERYTHING)


class Operator(NamedTuple):
    function: Callable[[Given], Any]
    orders: int = 2  # of derivatives
    waits: bool = False  # its documentation says so
    systems: tuple[str, ...] = NASTY
    accuracy: float = 0.0  # where each device chooses parameters of its own


OPERATORS = {
    "Lennard-Jones": Operator(
        lambda g: LENNARD_JONES(g.x, g.cell, sigma=1.7, epsilon=g.q.abs(), **batched(g), **FORCES)
    ),
    "DSF": Operator(dsf),
    "DSF, many": Operator(dsf, 1, False, ("many",)),
    "tables, switched": Operator(tables),
    "Coulomb": Operator(
        lambda g: electrostatics.coulomb_energy_forces(g.x, g.q, g.cell, CUTOFF, ALPHA, **batched(g)), 1
    ),
    "Ewald": Operator(
        lambda g: electrostatics.ewald_summation(g.x, g.q, g.cell, ALPHA, k_cutoff=3.0, **batched(g), **EVERYTHING),
        waits=True,
    ),
    "Ewald, k-vectors bounded": Operator(
        lambda g: electrostatics.ewald_summation(
            g.x, g.q, g.cell, ALPHA, miller_bounds=(4, 3, 4), **batched(g), **EVERYTHING
        )
    ),
    "PME": Operator(pme(6)),
    "PME, order 5": Operator(pme(5)),
    "PME, many": Operator(pme(6, (48, 45, 50)), 1, False, ("many",)),
    "PME, nothing given": Operator(automatic, 0, True, accuracy=1e-6),
    "slab": Operator(
        lambda g: electrostatics.compute_slab_correction(
            g.x, g.q, g.cell, torch.arange(3, device=g.x.device) < 2, g.idx, **EVERYTHING
        )
    ),
    "multipoles, Ewald": Operator(
        lambda g: electrostatics.ewald_summation(
            g.x, g.q, g.cell, ALPHA, miller_bounds=(4, 3, 4), **sources(g), widths=0.3, **batched(g), **FORCES
        )
    ),
    "multipoles, PME": Operator(
        lambda g: electrostatics.particle_mesh_ewald(
            g.x, g.q, g.cell, ALPHA, mesh_dimensions=MESH, spline_order=8, **sources(g), **batched(g), **FORCES
        )
    ),
    "potentials at atoms": Operator(potentials, waits=True),
    "D3": Operator(d3),
    "D3, triples": Operator(lambda g: d3(g, 1.0), 0),  # derivatives are among its results, and there are no others
    "splines": Operator(splines),
    "segments": Operator(segments),
    "geometry": Operator(geometry, waits=True),
    "dynamics": Operator(dynamics, 0, True),
}

# -- lists --------------------------------------------------------------------------------------------------

LISTS: dict[str, dict[str, Any]] = {
    "list, full": {},
    "list, half": {"half_fill": True},
    "list, naive": {"method": "naive"},
    "list, nearest": {"nearest": 7},
    "list, nearest of either": {"nearest": 5, "symmetric": True, "ties": "index"},
}


def pairs_of(g: Given, form: str, **options: Any) -> np.ndarray:
    """Rows (i, j, S), sorted."""
    if form == "matrix":
        matrix, count, shifts = neighbor_list(g.x, CUTOFF, g.cell, batch_idx=g.idx, **options)
        i, slot = (torch.arange(matrix.shape[1], device=matrix.device) < count[:, None]).nonzero(as_tuple=True)
        rows = torch.cat([i[:, None], matrix[i, slot][:, None], shifts[i, slot]], 1)
    else:
        pairs, _, shifts = neighbor_list(g.x, CUTOFF, g.cell, batch_idx=g.idx, return_neighbor_list=True, **options)
        rows = torch.cat([pairs.mT, shifts], 1)
    found = rows.cpu().numpy()
    return found[np.lexsort(found.T)]


def check_lists(gpu: Gpu, tiny: bool, kind: str, dtype: str) -> Iterator[Row]:
    """Pairs that only one of the two has; those at the cutoff itself are no mistake of single precision."""
    wrong, total, at_the_cutoff, only = 0, 0, 0, []
    for name in (*NASTY, "many"):
        exact = given(name, tiny)
        expected = {tuple(row) for row in pairs_of(exact, "list", **LISTS[kind]).tolist()}
        for form in ("list", "matrix"):
            here = exact.on(gpu.kind, getattr(torch, dtype))
            gpu.poison()
            rows = [tuple(row) for row in pairs_of(here, form, **LISTS[kind]).tolist()]
            differ = np.array(sorted(expected.symmetric_difference(rows)), dtype=np.int64).reshape(-1, 5)
            i, j, shifts = differ[:, 0], differ[:, 1], torch.as_tensor(differ[:, 2:]).double()
            d = exact.x[j] - exact.x[i] + (shifts[:, None] @ exact.cell[exact.idx[i].long()]).squeeze(1)
            close = (d.norm(dim=1) / CUTOFF - 1.0).abs() < (PAIRS_AT_THE_CUTOFF if dtype == "float32" else 0.0)
            missing = len(differ) - int(close.sum()) + (len(rows) - len(set(rows)))
            wrong, total, at_the_cutoff = wrong + missing, total + len(rows), at_the_cutoff + int(close.sum())
            only += [f"{name}, {form}"] * (missing > 0)
    yield {
        "name": f"{kind}, {dtype}", "pairs": total, "wrong": wrong, "at the cutoff": at_the_cutoff,
        "where": only, "ok": wrong == 0,
    }  # fmt: skip


# -- the checks ---------------------------------------------------------------------------------------------


def listed(results: Any) -> list[torch.Tensor]:
    return [results] if isinstance(results, torch.Tensor) else list(results)


def leaves_of(g: Given) -> Given:
    return g._replace(**{name: getattr(g, name).detach().clone().requires_grad_() for name in ("x", "q", "cell")})


def with_derivatives(operator: Operator, g: Given) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Results with the gradients of a bounded loss of them; and second derivatives."""
    if operator.orders == 0:
        return listed(operator.function(g)), []
    g = leaves_of(g)
    results = listed(operator.function(g))
    loss: Any = sum(
        ((r / (1.0 + r.detach().abs())).square().sum() for r in results), torch.zeros((), device=g.x.device)
    )
    options: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
    first = torch.autograd.grad(loss, (g.x, g.q, g.cell), create_graph=operator.orders > 1, **options)
    second: Any = ()
    if operator.orders > 1:
        second = torch.autograd.grad(sum(t.tanh().sum() for t in first), (g.x, g.q, g.cell), **options)
    return [t.detach() for t in (*results, *first)], [t.detach() for t in second]


def error_of(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest difference, relative to the largest number of each tensor; infinite where one is no number."""
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        if a.numel():
            difference = (a.cpu().double() - b.double()).abs().max() / b.double().abs().max().clamp(min=LEAST)
            worst = max(worst, float(difference) if difference.isfinite() else np.inf)
    return worst


def reference(folder: str, name: str, system: str, exact: Given) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """`with_derivatives` on the CPU in float64; from a file if there is one for the same atoms and the same checks."""
    inputs = [t.numpy().tobytes() for t in exact[:4]]
    key = hashlib.sha256(b"".join([Path(__file__).read_bytes(), *inputs])).hexdigest()
    path = os.path.join(folder, "".join(c if c.isalnum() else "_" for c in f"{name} {system}") + ".pt")
    if folder and os.path.exists(path):
        kept = torch.load(path)
        if kept["key"] == key:
            return kept["first"], kept["second"]
    first, second = with_derivatives(OPERATORS[name], exact)
    if folder:
        os.makedirs(folder, exist_ok=True)
        torch.save({"key": key, "first": first, "second": second}, f"{path}.{os.getpid()}")
        os.replace(f"{path}.{os.getpid()}", path)
    return first, second


def tried(what: Callable[[], str]) -> str:
    try:
        return what()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> str:
    if all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
        return "same"
    apart = error_of(found, [t.cpu() for t in expected])
    return "to rounding" if apart < ROUNDING[expected[0].dtype] else f"apart by {apart:.0e}"


def check(gpu: Gpu, tiny: bool, name: str, dtype: str, references: str = "") -> Iterator[Row]:
    """One row, for a kind of list or an operator."""
    if name in LISTS:
        yield from check_lists(gpu, tiny, name, dtype)
        return
    operator, real = OPERATORS[name], getattr(torch, dtype)
    errors, worst = [0.0, 0.0], ""
    for system in operator.systems:
        exact = given(system, tiny and not references)  # what is kept is for a full run, too
        expected = reference(references, name, system, exact)
        gpu.poison()
        found = with_derivatives(operator, exact.on(gpu.kind, real))
        each = [error_of(a, b) for a, b in zip(found, expected)]
        if each[0] >= errors[0]:
            worst = system
        errors = [max(pair) for pair in zip(errors, each)]
    row: Row = {"name": f"{name}, {dtype}", "error": errors[0], "error 2": errors[1], "worst": worst}
    row["tolerances"] = [most + operator.accuracy for most in TOLERANCES[dtype]]
    row |= {what: tried(how) for what, how in routes(gpu, operator, given(operator.systems[0], tiny), real).items()}
    within = all(error <= most for error, most in zip(errors, row["tolerances"]))
    row["ok"] = within and all(row.get(what, good[0]) in good for what, good in GOOD.items())
    yield row


SAME = ("same", "to rounding")
GOOD = {"repeated": SAME, "stream": SAME, "graph": SAME, "wait": ("none",)}


def routes(gpu: Gpu, operator: Operator, exact: Given, real: torch.dtype) -> dict[str, Callable[[], str]]:
    """Other ways to the same results, with first derivatives by positions."""
    here = exact.on(gpu.kind, real)
    x = here.x.clone().requires_grad_(operator.orders > 0)
    generator = torch.Generator().manual_seed(4)
    moves = [1e-2 * torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for _ in range(3)]

    def step() -> list[torch.Tensor]:
        results = listed(operator.function(here._replace(x=x)))
        if operator.orders == 0:
            return results
        total = sum((r.sum() for r in results if r.requires_grad), torch.zeros((), device=gpu.kind))
        # detached: a graph that is kept would tie the gradient of x to the stream of its first use
        return [*torch.autograd.grad(total, x), *(r.detach() for r in results)]

    def moved(k: int) -> None:
        with torch.no_grad():
            x.copy_(here.x + moves[k])

    def repeated() -> str:
        moved(0)

        def at(k: int) -> list[torch.Tensor]:
            moved(k)
            return [t.clone() for t in step()]

        first, *others, last = map(at, (0, 1, 2, 0))
        if any(same(other, first) == "same" for other in others):
            return "does not follow the atoms"
        return same(last, first)

    def stream() -> str:
        first = step()
        with gpu.aside():
            gpu.poison()
            second = step()
        gpu.synchronize()
        return same(second, first)

    def graph() -> str:
        moved(0)
        replay, results = gpu.capture(step)
        moved(1)
        replay()
        gpu.synchronize()
        return same(results, step())

    def wait() -> str:
        step()
        moved(2)
        with gpu.waiting_is_an_error():
            step()
        return "none"

    found = {"repeated": repeated, "stream": stream}
    return found if operator.waits else found | {"wait": wait, "graph": graph}


def names() -> list[str]:
    """Of all checks, lists first."""
    return [*LISTS, *OPERATORS]
