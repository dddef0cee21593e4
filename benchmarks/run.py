"""All benchmarks, one after the other: what they print, tables, pictures, and a check against an earlier run.

Everything goes to ``benchmarks/results`` (``--output``): for each script what it printed, its table in both formats and
a picture of the times; and ``summary.json`` with versions, hardware, and each of our times as a ratio to a matrix
product of 1,000 x 1,000 that is timed before and after the script. Seconds differ between machines, and between days on
one machine; these ratios less so. ``--against SUMMARY`` compares them with those of another run, and fails if one has
grown by more than ``--tolerance``.

Run: ``python benchmarks/run.py [--full] [--output FOLDER] [--against FILE] [--tolerance 1.5] [NAME ...]``.
"""

import argparse
import csv
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from common import seconds

HERE = Path(__file__).resolve().parent
WITH_TABLES = ("neighbors", "pair", "electrostatics", "engines", "dispersion", "in_jax")
WITH_PICTURES = ("engines",)  # which they draw themselves
ALL = ("overhead", "launch_scaling", "import_time", "graphs", "batches", *WITH_TABLES)
OURS = {
    "neighbors": ("list", "matrix", "in place"),
    "pair": ("ours",),
    "in_jax": ("jax", "energies by system", "energies by atom"),
}
"""What our own times are called in a table; elsewhere they begin with "ours"."""

Row = dict[str, str]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ALL)}; by default all")
    parser.add_argument("--full", action="store_true", help="large systems, too: half an hour")
    parser.add_argument("--output", type=Path, default=HERE / "results")
    parser.add_argument("--against", type=Path, metavar="FILE", help="summary.json of another run")
    parser.add_argument("--tolerance", type=float, default=1.5, help="growth of a ratio that fails (1.5)")
    options = parser.parse_args()
    if unknown := set(options.names) - set(ALL):
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}; there are {', '.join(ALL)}")
    options.output.mkdir(parents=True, exist_ok=True)
    ratios: dict[str, float] = {}
    for name in options.names or ALL:
        ratios |= run(name, options.output, options.full)
    summary = {"about": about(), "ratios": ratios}
    (options.output / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(f"written to {options.output}")
    return compare(ratios, json.loads(options.against.read_text()), options.tolerance) if options.against else 0


def run(name: str, folder: Path, full: bool) -> dict[str, float]:
    """Run a script; our times as ratios to the reference operation."""
    command = [sys.executable, str(HERE / f"{name}.py")]
    table = folder / f"{name}.csv"
    if name in WITH_TABLES:
        command += ["--csv", str(table)] + ["--quick"] * (not full)
    if name in WITH_PICTURES:
        command += ["--plot", str(folder / f"{name}.png")]
    before = reference()
    print(f"{name} ...", flush=True)
    done = subprocess.run(command, capture_output=True, text=True)
    (folder / f"{name}.txt").write_text(done.stdout)
    print(done.stdout)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
    if name not in WITH_TABLES:
        return {}
    unit = statistics.mean((before, reference()))
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    (folder / f"{name}.md").write_text(as_markdown(rows))
    times = {key: t for row in rows for key, t in [time_of(row)] if t > 0.0}
    if name not in WITH_PICTURES:
        draw(name, times, folder / f"{name}.png")
    return {f"{name}/{'/'.join(key)}": t / unit for key, t in times.items() if is_ours(name, key[-1])}


def reference() -> float:
    """Seconds of a matrix product in float64, to which times are compared."""
    a = torch.rand(1000, 1000, dtype=torch.float64)
    return statistics.median(seconds(lambda: a @ a) for _ in range(5))


def time_of(row: Row) -> tuple[tuple[str, ...], float]:
    """The case and contender of a row, and its seconds; 0 if it holds something else."""
    column = next(name for name in row if name.startswith("seconds"))
    key = tuple(value for name, value in list(row.items())[: list(row).index(column)] if value)
    return key, 0.0 if key[-1] == "pairs" else float(row[column])


def is_ours(name: str, contender: str) -> bool:
    return contender in OURS.get(name, ()) or contender.startswith("ours")


def as_markdown(rows: list[Row]) -> str:
    lines = [" | ".join(rows[0]), " | ".join("---" for _ in rows[0])]
    lines += [" | ".join(value.replace("|", "/") for value in row.values()) for row in rows]
    return "\n".join(f"| {line} |" for line in lines) + "\n"


def draw(name: str, times: dict[tuple[str, ...], float], path: Path) -> None:
    """Bars of all times, ours in another colour."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    labels = [", ".join(key) for key in times]
    colours = ["tab:blue" if is_ours(name, key[-1]) else "lightgrey" for key in times]
    _, axes = plt.subplots(figsize=(8, 0.22 * len(times) + 1), layout="constrained")
    axes.barh(labels, [1e3 * t for t in times.values()], color=colours)
    axes.set(xscale="log", xlabel="milliseconds", title=name)
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=7)
    axes.figure.savefig(path, dpi=130)
    plt.close(axes.figure)


def about() -> dict[str, Any]:
    """Versions and hardware."""
    names = ("nvalchemiops", "torch", "warp-lang", "numpy")
    return {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in names},
        "machine": platform.machine(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def compare(ratios: dict[str, float], stored: dict[str, Any], tolerance: float) -> int:
    """Print what has become slower, and return how the process should end."""
    both = {name: ratio / stored["ratios"][name] for name, ratio in ratios.items() if name in stored["ratios"]}
    worse = {name: growth for name, growth in both.items() if growth > tolerance}
    print(f"compared {len(both)} times with those of {stored['about']['date']}: ", end="")
    print(f"median {statistics.median(both.values()):.2f} of what they were" if both else "none in common")
    for name, growth in sorted(worse.items(), key=lambda item: -item[1]):
        print(f"  SLOWER {growth:.2f} x  {name}")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
