"""Ewald sums: ours beside nvalchemi-toolkit-ops 0.5.0 and torch-pme 0.5.0, in one run, and beside floors.

Rock salt (neighbors at 2.82, displaced by normal deviates of a tenth of that, charges 1 and -1), float64, 2 threads.
Each library runs at the parameters that are fastest for it with a measured RMS error of the forces of 1e-5 of their
RMS. These are found first: the splitting parameter for each cutoff from the error of the pairs beyond it, which is the
same for all; the k-vectors or the mesh by trying; then cutoff and order of splines by time. What was chosen is printed
with each figure and kept in a file (``--parameters``), so that a second run need not search: make it on an idle
machine. Meshes for the large systems are those of 4,096 atoms, with the same spacing. The reference is our Ewald sum at
an accuracy of 1e-12, for large systems our mesh of order 8 at 1e-9. Lists of neighbors are made beforehand. Contenders
take turns; figures are medians.

- *0.5.0*: the peer of the same import name, as it comes, with k-vectors up to ``k_cutoff``, which are a box of them;
  *0.5.0 sphere*: its caller left out those in the corners (``miller_indices``). Lists or matrices, explicit forces or
  autograd: whichever is faster. In its own interpreter (``--peer`` or ``NVALCHEMIOPS_PEER_PYTHON``).
- *torch-pme*: its Ewald, P3M and PME calculators with a half list by vesin (``--torch-pme`` or
  ``NVALCHEMIOPS_TORCH_PME_PYTHON``). K-vectors are a sphere made beforehand, but where the cell needs a gradient.
- *matching*: the gradient by charges of the sum of squared forces, by two backward passes; *explicit*: by one through
  the forces that the call returns.
- *broadcast*: plain torch over all atoms and half of the k-vectors, at the parameters that we estimate.
- *floor*: for a mesh, its two Fourier transforms; for Ewald, 16 multiply-adds for each atom and octant point
  (|n_x|, |n_y|, |n_z|) at the speed of a matrix product. No floor is known for the pairs: the time of our op for them
  stands beside (*pairs*), measured alone.

Run: ``python benchmarks/electrostatics.py [--quick] [--csv FILE] [--parameters FILE] [--plot FILE]``.
"""

import json
import math
import os
import statistics
import sys
import tempfile
import time
from typing import Any

import numpy as np
from charges import THREADS, Parameters, Server, atoms, elsewhere, error_of
from charges_alone import compare_with_broadcast, first_calls, floors, peak_memory
from common import contenders, parser_for, plot_times, start, versions, write_csv

ERROR = 1e-5
REAL_SHARE = 0.7  # of the error, for the pairs
PATIENCE, BUDGET = 4.0, 12.0  # seconds: longer calls are timed once; of one row of the table
PLOTTED = ("512", "4096", "32768", "262144", "1000000")
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

# -- what is true, and parameters for it ----------------------------------------------------------------------


class Bench:
    """The contenders, the references, and the parameters found so far."""

    def __init__(self, sides: dict[str, Any], path: str, folder: str, quick: bool) -> None:
        self.sides, self.path, self.folder, self.quick = sides, path, folder, quick
        self.kept: dict[str, Any] = {}
        if path and os.path.exists(path):
            with open(path) as file:
                self.kept = json.load(file)
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

    def measured(self, contender: str, method: str, system: str, p: Parameters) -> float:
        how = "autograd" if contender == "torch-pme" else "explicit"
        _, forces = self.run(contender, method, "forces", how, system, p)
        if isinstance(forces, str):
            raise RuntimeError(f"{contender}, {method}, {system} atoms, {p}: {forces}")
        return error_of(forces, system)

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
        """The shortest k-vectors that suffice: the same for all libraries that take a sphere of them."""
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
                # k-vectors come in shells, so the error goes in steps
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
        """The fastest ones with the error asked for: for Ewald's energies, for the forces of a mesh."""
        key = f"{contender} {method} {system}"
        if key not in self.kept and self.quick:
            key += " quick"  # a coarser search, which is not for the other runs
        if key in self.kept:
            return self.kept[key]
        began = time.perf_counter()
        small = {"64", "512", "batch", "4096"}
        if method == "pme" and system not in small:
            return self.keep(key, self.scaled_mesh(contender, system))
        if method == "ewald" and system == "4096" and contender.startswith("0.5.0"):
            return self.keep(key, self.scaled_waves(contender, system))
        best: Parameters | None = None
        n_atoms = len(atoms(system)["positions"])
        if method == "ewald" and system != "batch":
            # pairs and k-vectors take equal times near here for any constants
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
        print(f"  searched {time.perf_counter() - began:5.1f} s: {key}: {text(best)}", flush=True)
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
        for _ in range(max(3, min(15, int((BUDGET / (8 if self.quick else 1)) / max(total, 1e-9))))):
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
    curves = []
    for name, label, style in (
        ("ours", "particle_mesh_ewald", "o-"),
        ("0.5.0", "nvalchemi-toolkit-ops 0.5.0", "D-"),
        ("torch-pme", "torch-pme", "s-"),
        ("floor: transforms", "floor: two Fourier transforms of our mesh", "k:"),
    ):
        taken = {int(n): bench.taken("pme forces", n, name) for n in PLOTTED}
        points = [(n, 1e3 * t) for n, t in taken.items() if not math.isnan(t)]
        curves.append((label, style, points))
    plot_times(path, curves, "milliseconds", f"PME energy and forces, error {ERROR:g}, {THREADS} threads")


def main() -> None:
    parser = parser_for(__doc__, "no large systems, coarser search, few rounds", "torch-pme")
    parser.add_argument("--parameters", metavar="FILE", default="", help="JSON: read if there, written to")
    parser.add_argument("--plot", metavar="FILE", help="not with --quick")
    options = parser.parse_args()
    sides = contenders(Server("ours"), elsewhere, {"0.5.0": options.peer, "torch-pme": options.torch_pme})
    start(THREADS, "cpu", versions(sides))
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
        if not quick:  # parameters of the peer take half a minute to find
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
    write_csv(options.csv, ["case", "system", "contender", "seconds", "parameters", "note"], bench.rows)
    peak_memory(quick)
    first_calls()


if __name__ == "__main__":
    main()
