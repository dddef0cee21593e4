"""Pair potentials: ours beside torch, eager and compiled, and nvalchemi-toolkit-ops 0.5.0, in one run, beside a floor.

A liquid of 100,000 atoms with about 60 neighbors each, float64, 2 threads; all are given the same list. Contenders
take turns; figures are medians. Errors are those of the forces on some atoms, against extended precision.

- *step*: energies, forces and virial, for Lennard-Jones (mixed by Lorentz and Berthelot) and DSF.
- *training*: the gradient of a force-matching loss by the parameters of all atoms, which takes a double backward.
- *torch*: the formula in plain torch over the edges, forces and virial by ``autograd.grad``; over all edges of the full
  list as given, and over half of them, which a caller who knew that forces are symmetric would use. *compiled*: the
  same under ``torch.compile``.
- *0.5.0*: its ``dsf_coulomb``, in its own interpreter (``--peer`` or ``NVALCHEMIOPS_PEER_PYTHON``).
- *floor*: reading the list once at the speed of a copy, or the arithmetic of a pair at the speed of a matrix product,
  whichever is longer.

Run: ``python benchmarks/pair.py [--quick] [--csv FILE]``.
"""

import functools
import math
import os
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import (
    SEPARATE_PAGES,
    Peer,
    benchmark,
    described,
    in_new_process,
    in_turns,
    parser_for,
    seconds,
    start,
    write_csv,
)

THREADS, ATOMS, QUICK, DENSITY, NEIGHBORS, ALPHA = 2, 100_000, 10_000, 0.1, 60, 0.25
CUTOFF = (NEIGHBORS / (4.0 / 3.0 * np.pi * DENSITY)) ** (1 / 3)
# how many times faster than whom the issue asks for
ASKED = {
    ("lj step", "torch"): 5,
    ("lj step", "torch compiled"): 1,
    ("dsf step", "torch"): 3,
    ("dsf step", "0.5.0"): 2.5,
    ("lj training", "torch"): 5,
    ("dsf training", "torch"): 3,
}
Step = Callable[[], tuple[torch.Tensor, ...]]


def liquid(n_atoms: int) -> dict[str, np.ndarray]:
    """Atoms on a grid, displaced by up to a third of its spacing, in the order of the grid; and their parameters."""
    rng = np.random.default_rng(5)
    edge = (n_atoms / DENSITY) ** (1 / 3)
    n = int(np.ceil(n_atoms ** (1 / 3)))
    points = np.stack(np.meshgrid(*[np.arange(n)] * 3, indexing="ij"), -1).reshape(-1, 3)
    points = points[np.sort(rng.permutation(n**3)[:n_atoms])]
    return {
        "positions": (points + rng.uniform(-0.33, 0.33, points.shape)) * (edge / n),
        "cell": edge * np.eye(3)[None],
        "charges": rng.normal(size=n_atoms),
        "sigma": rng.uniform(1.6, 1.9, n_atoms),
        "epsilon": rng.uniform(0.5, 1.5, n_atoms),
    }


class Given:
    """The system as tensors, with its full list."""

    def __init__(self, n_atoms: int, pairs: torch.Tensor, ptr: torch.Tensor, shifts: torch.Tensor) -> None:
        system = {name: torch.as_tensor(value) for name, value in liquid(n_atoms).items()}
        self.x, self.cell, self.q = system["positions"], system["cell"], system["charges"]
        self.sigma, self.epsilon = system["sigma"], system["epsilon"]
        self.pairs, self.ptr, self.shifts = pairs, ptr, shifts

    def half(self) -> "Given":
        i, j = self.pairs
        keep = i < j
        return type(self)(len(self.x), self.pairs[:, keep], self.ptr, self.shifts[keep])


def build(n_atoms: int) -> Given:
    from nvalchemiops.torch.neighbors import neighbor_list

    system = {name: torch.as_tensor(value) for name, value in liquid(n_atoms).items()}
    lists = neighbor_list(system["positions"], CUTOFF, system["cell"], return_neighbor_list=True)
    return Given(n_atoms, *lists)


# -- contenders ---------------------------------------------------------------------------------------------


def ours(given: Given) -> dict[str, Step]:
    from nvalchemiops.torch.interactions.pair import damped_shifted_force, lennard_jones

    near = {"neighbor_list": given.pairs, "neighbor_ptr": given.ptr, "neighbor_shifts": given.shifts}
    lj, dsf = lennard_jones(CUTOFF), damped_shifted_force(CUTOFF)
    everything = {"compute_forces": True, "compute_virial": True}
    return {
        "lj step": lambda: lj(given.x, given.cell, sigma=given.sigma, epsilon=given.epsilon, **near, **everything),
        "dsf step": lambda: dsf(given.x, given.cell, q=given.q, alpha=ALPHA, **near, **everything),
        "lj training": training(
            given,
            lambda x, sigma, epsilon: lj(x, given.cell, sigma=sigma, epsilon=epsilon, **near).sum(),
            given.sigma,
            given.epsilon,
        ),
        "dsf training": training(given, lambda x, q: dsf(x, given.cell, q=q, alpha=ALPHA, **near).sum(), given.q),
    }


def training(given: Given, energy: Callable[..., torch.Tensor], *parameters: torch.Tensor) -> Step:
    """The gradient of a loss of energy and forces by the parameters, through two backward passes."""

    def step() -> tuple[torch.Tensor, ...]:
        leaves = [p.clone().requires_grad_() for p in parameters]
        x = given.x.clone().requires_grad_()
        value = energy(x, *leaves)
        (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum() + value, leaves)

    return step


def lj_pairs(r2: torch.Tensor, sigma: torch.Tensor, epsilon: torch.Tensor, i: Any, j: Any) -> torch.Tensor:
    x6 = ((sigma[i] + sigma[j]) / 2).square().div(r2) ** 3
    return 4 * (epsilon[i] * epsilon[j]).sqrt() * (x6 * x6 - x6)


def dsf_pairs(r2: torch.Tensor, q: torch.Tensor, i: Any, j: Any) -> torch.Tensor:
    r, at = r2.sqrt(), torch.tensor(ALPHA * CUTOFF, dtype=r2.dtype)
    end = torch.erfc(at) / CUTOFF
    derivative = end / CUTOFF + 2 * ALPHA / np.pi**0.5 * torch.exp(-at * at) / CUTOFF
    return q[i] * q[j] * (torch.erfc(ALPHA * r) / r - end + derivative * (r - CUTOFF))


def dsf_self(q: torch.Tensor) -> torch.Tensor:
    return -(math.erfc(ALPHA * CUTOFF) / (2 * CUTOFF) + ALPHA / math.pi**0.5) * q.square().sum()


def plain_torch(given: Given, share: float, compiled: bool) -> dict[str, Step]:
    """Over these edges, each of which has ``share`` of its pair's energy."""
    i, j = given.pairs.long()
    images = given.shifts.double()

    def energy_of(pairs: Callable[..., torch.Tensor], x: torch.Tensor, strain: Any, *parameters: Any) -> torch.Tensor:
        lattice = given.cell[0]
        if strain is not None:
            x, lattice = x + x @ strain, lattice + lattice @ strain
        d = x[j] - x[i] + images @ lattice
        r2 = d.square().sum(1)
        # the list ends at the cutoff; code that cannot know must check
        u = torch.where(r2 < CUTOFF**2, pairs(r2, *parameters, i, j), 0.0)
        return share * u.sum() + (dsf_self(*parameters) if pairs is dsf_pairs else 0.0)

    def step(pairs: Callable[..., torch.Tensor], *parameters: torch.Tensor) -> Step:
        function = torch.compile(energy_of) if compiled else energy_of

        def call() -> tuple[torch.Tensor, ...]:
            x = given.x.clone().requires_grad_()
            strain = torch.zeros(3, 3, dtype=x.dtype, requires_grad=True)
            energy = function(pairs, x, strain, *parameters)
            gradient, virial = torch.autograd.grad(energy, (x, strain))
            return energy, -gradient, -virial

        return call

    calls = {"lj step": step(lj_pairs, given.sigma, given.epsilon), "dsf step": step(dsf_pairs, given.q)}
    if not compiled:
        calls["lj training"] = training(
            given, lambda x, *p: energy_of(lj_pairs, x, None, *p), given.sigma, given.epsilon
        )
        calls["dsf training"] = training(given, lambda x, q: energy_of(dsf_pairs, x, None, q), given.q)
    return calls


class Server:
    """The peer's side of the pipe."""

    def __init__(self, device: str) -> None:
        self.device = device

    def ask(self, *question: Any) -> Any:
        match question:
            case ["prepare", n_atoms, path]:
                from nvalchemiops.torch.interactions.electrostatics import dsf_coulomb

                lists = np.load(path)
                given = Given(n_atoms, *(torch.as_tensor(lists[k]) for k in ("pairs", "ptr", "shifts")))
                near = {"neighbor_list": given.pairs, "neighbor_ptr": given.ptr, "unit_shifts": given.shifts}
                options = {"cell": given.cell, "compute_forces": True, "compute_virial": True, **near}
                self.call = functools.partial(dsf_coulomb, given.x, given.q, CUTOFF, ALPHA, **options)
                energy, forces, virial = self.call()
                np.savez(path + ".answer.npz", energy=energy, forces=forces, virial=virial)
                return path + ".answer.npz"
            case ["time"]:
                return seconds(self.call, self.device)


# -- what is true -------------------------------------------------------------------------------------------


def exact_forces(given: Given, case: str, atoms: np.ndarray) -> np.ndarray:
    """Forces on some atoms, pair by pair with 40 digits."""
    import mpmath

    mpmath.mp.dps = 40
    x, cell, ptr = given.x.numpy(), given.cell[0].numpy(), given.ptr.numpy()
    rows = []
    for i in atoms:
        force = [mpmath.mpf(0)] * 3
        for slot in range(ptr[i], ptr[i + 1]):
            j, image = int(given.pairs[1, slot]), given.shifts[slot].numpy()
            d = [
                mpmath.mpf(float(x[j, a]))
                - mpmath.mpf(float(x[i, a]))
                + sum(int(image[c]) * mpmath.mpf(float(cell[c, a])) for c in range(3))
                for a in range(3)
            ]
            r = mpmath.sqrt(sum(c * c for c in d))
            if r >= CUTOFF:
                continue
            if case.startswith("lj"):
                sigma = (mpmath.mpf(float(given.sigma[i])) + mpmath.mpf(float(given.sigma[j]))) / 2
                epsilon = mpmath.sqrt(mpmath.mpf(float(given.epsilon[i])) * mpmath.mpf(float(given.epsilon[j])))
                derivative = 4 * epsilon * (-12 * (sigma / r) ** 12 + 6 * (sigma / r) ** 6) / r
            else:
                a, rc = mpmath.mpf(ALPHA), mpmath.mpf(float(CUTOFF))

                def fall(r: Any, a: Any = a) -> Any:
                    return mpmath.erfc(a * r) / r**2 + 2 * a / mpmath.sqrt(mpmath.pi) * mpmath.exp(-((a * r) ** 2)) / r

                charges = mpmath.mpf(float(given.q[i])) * mpmath.mpf(float(given.q[j]))
                derivative = charges * (fall(rc) - fall(r))
            force = [f + derivative * c / r for f, c in zip(force, d)]
        rows.append([float(f) for f in force])
    return np.array(rows)


def force_error(forces: Any, exact: np.ndarray, atoms: np.ndarray) -> float:
    """Root mean square of the error over that of the forces."""
    difference = np.asarray(forces)[atoms] - exact
    return float(np.sqrt((difference**2).mean() / (exact**2).mean()))


# -- floors -------------------------------------------------------------------------------------------------


def floors(given: Given) -> dict[str, float]:
    """Seconds for reading the list once, and for the arithmetic of the pairs, at the speeds of torch."""
    from nvalchemiops.interactions.pair import potentials
    from nvalchemiops.interactions.pair.derivatives import Request, program

    a, b = torch.ones(2**25), torch.ones(2**25)
    read = 2 * a.numel() * 4 / min(seconds(lambda: b.copy_(a)) for _ in range(5))
    m = torch.randn(1500, 1500, dtype=torch.float64)
    flops = 2 * 1500**3 / min(seconds(lambda: m @ m) for _ in range(5))
    n_pairs = given.pairs.shape[1]
    found = {"list": n_pairs * 16 / read}
    for case, formula in (("lj step", potentials.lennard_jones()), ("dsf step", potentials.DSF)):
        text = " ".join(program(Request(formula, (), "wrv")).of_pair)
        operations = sum(text.count(f" {c} ") for c in "+-*/") + text.count("sqrt") * 4
        operations += 40 * text.count("exp_lanes") + 60 * text.count("erfc_from_lanes") + 45  # geometry and sums
        # products and sums one by one: half the speed of a matrix product, which does both at once
        found[case] = n_pairs * operations / (flops / 2)
    return found


# -- other figures ------------------------------------------------------------------------------------------

FIRST = """
import sys, time, torch
from nvalchemiops._warp import quiet_warp
quiet_warp()
from nvalchemiops.torch.interactions.pair import {name}
from nvalchemiops.torch.neighbors import neighbor_list
torch.manual_seed(0)
x = torch.rand(50, 3, dtype=torch.float64) * 8 + 4 * torch.arange(50, dtype=torch.float64)[:, None]
near = dict(zip(("neighbor_list", "neighbor_ptr"), neighbor_list(x, 5.0, return_neighbor_list=True)))
start = time.perf_counter()
potential = {name}(5.0)
potential(x, **near, **{parameters}, compute_forces=True)
first = time.perf_counter() - start
x.requires_grad_()
(gradient,) = torch.autograd.grad(potential(x, **near, **{parameters}).sum(), x, create_graph=True)
torch.autograd.grad(gradient.square().sum(), x)
print(first, time.perf_counter() - start)
"""

MEMORY = """
import sys, torch
sys.path.insert(0, {folder!r})
import common, pair
torch.set_num_threads(pair.THREADS)
given = pair.build({n_atoms})
step = pair.ours(pair.build(500))["lj step"]
step()
from nvalchemiops.torch.neighbors import neighbor_list
for reach in (1.0, 1.6):
    given.pairs, given.ptr, given.shifts = neighbor_list(given.x, pair.CUTOFF * reach, given.cell,
        return_neighbor_list=True)
    step = pair.ours(given)["lj step"]
    extra, results = common.peak_of(step)
    print(extra / {n_atoms}, given.pairs.shape[1] / {n_atoms})
"""


def overhead() -> dict[str, float]:
    """Seconds of a call for 64 atoms: the bare launch, the op, and the public call."""
    from nvalchemiops.torch.interactions.pair import lennard_jones
    from nvalchemiops.torch.interactions.pair.op import _kernel, pair_sum
    from nvalchemiops.torch.launch import launch
    from nvalchemiops.torch.neighbors import neighbor_list

    torch.set_num_threads(1)
    system = {name: torch.as_tensor(value) for name, value in liquid(64).items()}
    x, cell = system["positions"], system["cell"]
    matrix, _, shifts = neighbor_list(x, CUTOFF, cell)
    potential, width = lennard_jones(CUTOFF), matrix.shape[1]
    parameters = torch.stack([system["sigma"], system["epsilon"]], 1)
    kernel = _kernel(potential.formula.text, "", "wr", "float64", True, 0, False, False).kernel
    inputs = [x, cell, parameters, None, None, None, matrix.view(-1), shifts.view(-1, 3), width, 64, CUTOFF, 0.0]
    outputs = [torch.empty(64, dtype=x.dtype), torch.empty_like(x), torch.zeros(1, dtype=torch.int32)]
    rest = (None, 1, None, matrix.view(-1), shifts.view(-1, 3), width, 64, *(None,) * 2, 0, *(None,) * 3, CUTOFF, 0.0)
    leaf = x.clone().requires_grad_()
    near = {"neighbor_matrix": matrix, "neighbor_matrix_shifts": shifts}
    near |= {"sigma": system["sigma"], "epsilon": system["epsilon"]}

    def op(x: torch.Tensor) -> Any:
        return pair_sum(potential.formula.text, "wr", "", x, cell, parameters, *(None,) * 7, *rest)

    calls = {
        "launch": lambda: launch(kernel, 64, inputs, outputs, lanes=32),
        "op": lambda: op(x),
        "op, with a graph": lambda: op(leaf),
        "call": lambda: potential(x, cell, compute_forces=True, **near),
        "call, with a graph": lambda: potential(leaf, cell, compute_forces=True, **near),
        "energy and backward": lambda: torch.autograd.grad(potential(leaf, cell, **near).sum(), leaf),
    }
    found = in_turns({name: functools.partial(seconds, call) for name, call in calls.items()}, 25)
    torch.set_num_threads(THREADS)
    return found


# -- the run ------------------------------------------------------------------------------------------------


def measure(n_atoms: int, peer: Peer | None, rounds: int) -> dict[tuple[str, str], float]:
    given = build(n_atoms)
    half = given.half()
    contenders = {
        "ours": ours(given),
        "torch": plain_torch(given, 0.5, compiled=False),
        "torch half": plain_torch(half, 1.0, compiled=False),
        "torch compiled": plain_torch(given, 0.5, compiled=True),
    }
    calls = {(case, name): step for name, cases in contenders.items() for case, step in cases.items()}
    results = {key: call() for key, call in calls.items()}
    timed: dict[tuple[str, str], Callable[[], float]] = {
        key: lambda call=call: seconds(call) for key, call in calls.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        if peer is not None:
            path = os.path.join(folder, "lists.npz")
            np.savez(path, pairs=given.pairs, ptr=given.ptr, shifts=given.shifts)
            answer = np.load(peer.ask("prepare", n_atoms, path))
            results["dsf step", "0.5.0"] = tuple(answer[k] for k in ("energy", "forces", "virial"))
            timed["dsf step", "0.5.0"] = lambda: peer.ask("time")
        n_pairs = given.pairs.shape[1]
        print(f"{n_atoms:,} atoms, {n_pairs / n_atoms:.1f} neighbors each, cutoff {CUTOFF:.3f}")
        atoms = np.random.default_rng(0).permutation(n_atoms)[:40]
        print("\nerror of forces, relative to their root mean square")
        for case in ("lj step", "dsf step"):
            exact = exact_forces(given, case, atoms)
            row = {name: force_error(r[1], exact, atoms) for (c, name), r in results.items() if c == case}
            print(f"{case:>14s}" + "".join(f"   {name} {error:.1e}" for name, error in row.items()))
        for case in ("lj training", "dsf training"):
            apart = [(a - b).abs().max() / b.abs().max() for a, b in zip(results[case, "ours"], results[case, "torch"])]
            print(f"{case:>14s}   largest difference to torch {max(apart):.1e}")
        medians = in_turns(timed, rounds)
    floor = floors(given)
    print("\nmilliseconds, and how many times ours")
    for case in ("lj step", "dsf step", "lj training", "dsf training"):
        mine = medians[case, "ours"]
        per_pair = mine * THREADS / n_pairs * 1e9
        line = f"{case:>14s}   ours {1e3 * mine:.1f} ({per_pair:.1f} ns per pair and thread)"
        for (other, name), value in medians.items():
            if other == case and name != "ours":
                asked = ASKED.get((case, name))
                line += f"   {name} {1e3 * value:.0f}: {value / mine:.1f} x" + (f" (asked {asked})" if asked else "")
        print(line)
        if case in floor:
            longer = max(floor["list"], floor[case])
            print(
                f"{'':14s}   floor {1e3 * longer:.1f}: reading the list {1e3 * floor['list']:.1f}, arithmetic "
                f"{1e3 * floor[case]:.1f}; ours {mine / longer:.1f} x"
            )
    return medians


def main() -> None:
    options = parser_for(__doc__, f"{QUICK:,} atoms and few rounds").parse_args()
    peer = Peer(options.peer, __file__, "cpu") if os.access(options.peer, os.X_OK) else None
    start(THREADS, "cpu", described(peer))
    medians = measure(QUICK if options.quick else ATOMS, peer, 3 if options.quick else 7)
    write_csv(options.csv, ("case", "contender", "seconds"), [(*names, value) for names, value in medians.items()])
    print("\nmicroseconds of a call for 64 atoms")
    small = overhead()
    print("   ".join(f"{name} {1e6 * value:.1f}" for name, value in small.items()))
    print("first call, seconds: energy and forces, then second order as well (asked 4, 8)")
    for name, parameters in (
        ("lennard_jones", {"sigma": 1.0, "epsilon": 1.0}),
        ("damped_shifted_force", {"q": 1.0, "alpha": 0.2}),
    ):
        with tempfile.TemporaryDirectory() as cache:
            both = in_new_process(FIRST.format(name=name, parameters=parameters), WARP_CACHE_PATH=cache)
        print(f"   {name}: {both[0]:.1f}, {both[1]:.1f}")
    folder = os.path.dirname(os.path.abspath(__file__))
    n_atoms = QUICK if options.quick else ATOMS
    found = in_new_process(MEMORY.format(folder=folder, n_atoms=n_atoms), **SEPARATE_PAGES)
    print(
        f"extra memory at the peak, bytes per atom: {found[0]:.0f} with {found[1]:.0f} neighbors, {found[2]:.0f} with "
        f"{found[3]:.0f}"
    )


if __name__ == "__main__":
    benchmark(main, Server, THREADS)
