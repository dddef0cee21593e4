"""What benchmarks share: timing, and a peer in a separate interpreter."""

import argparse
import csv
import importlib
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

Name = TypeVar("Name")

BURST = 0.01  # seconds of calls in a row: a short call alone would mostly find the caches of the others
PAUSE = 0.005  # before them: threads of the contender before still spin for milliseconds, and hold a core


class Peer:
    """The 0.5.0 release in a separate interpreter, which runs ``script --serve``, started by ``launcher`` if given."""

    def __init__(self, python: str, script: str, device: str, *launcher: str) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        self.process: Any = subprocess.Popen(
            [*launcher, python, os.path.abspath(script), "--serve", "--device", device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd="/",
            env=environment,
        )
        self.version = self.ask("")

    def ask(self, *question: Any) -> Any:
        print(json.dumps(question), file=self.process.stdin, flush=True)
        answer = next((line for line in self.process.stdout if line.startswith("answer ")), None)
        if answer is None:
            raise RuntimeError(f"{' '.join(self.process.args)} ended without an answer")
        return json.loads(answer.removeprefix("answer "))


def serve(make: Callable[[str], Any], threads: int) -> None:
    """Answer a `Peer` by ``make(device).ask``; its first question is empty, and is for the version."""
    torch.set_num_threads(threads)
    server = make(sys.argv[-1])
    for line in sys.stdin:
        question = json.loads(line)
        if question != [""]:
            answer = server.ask(*question)
        elif hasattr(server, "version"):
            answer = server.version
        else:
            answer = importlib.import_module("nvalchemiops").__version__
        print("answer", json.dumps(answer), flush=True)


def benchmark(main: Callable[[], None], make: Callable[[str], Any], threads: int) -> None:
    """What a script does: its benchmark, or `serve` if a `Peer` has started it."""
    if "--serve" in sys.argv:
        serve(make, threads)
    else:
        main()


def seconds(call: Callable[[], Any], device: str = "cpu") -> float:
    """Wall time of a call, the mean of a short burst; on a GPU until the last kernel has ended."""
    total, calls = 0.0, 0
    time.sleep(PAUSE)
    call()  # the first call after another contender pays for the caches that this one left
    while total < BURST:
        if device == "cpu":
            start = time.perf_counter()
            result = call()
            total += time.perf_counter() - start
        else:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            result = call()
            end.record()
            end.synchronize()
            total += 1e-3 * start.elapsed_time(end)
        del result  # freed outside of the time
        calls += 1
    return total / calls


def processor_seconds(call: Callable[[], Any], calls: int) -> float:
    """Processor time of a call, the least of so many."""
    call()
    best = math.inf
    for _ in range(calls):
        begin = time.process_time()
        call()
        best = min(best, time.process_time() - begin)
    return best


def in_turns(
    times: Mapping[Name, Callable[[], float]], rounds: int, of: Callable[[list[float]], float] = statistics.median
) -> dict[Name, float]:
    """The median of the times of each contender, or another function of them; contenders take turns."""
    taken = [{name: time() for name, time in times.items()} for _ in range(rounds)]
    return {name: of([one[name] for one in taken]) for name in times}


def in_new_process(code: str, **environment: str) -> list[float]:
    """The numbers that a program prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return [float(number) for line in done.stdout.splitlines() for number in line.split() if line[0].isdigit()]


SEPARATE_PAGES = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""For `in_new_process`: larger buffers get pages of their own, and none hides in memory that an earlier call left."""


def resident(peak: bool = False) -> int:
    """Bytes of this process in memory, now or at most."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmHWM" if peak else "VmRSS"))
    return int(line.split()[1]) * 1024


def peak_of(call: Callable[[], Any]) -> tuple[int, Any]:
    """Bytes of memory at the peak of a call beyond what was there before, and its result."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # forget the old peak
    before = resident()
    result = call()
    return resident(peak=True) - before, result


def parser_for(description: str | None, quick: str, *others: str) -> argparse.ArgumentParser:
    """What all benchmarks can be asked for: ``--quick``, ``--csv``, ``--peer``, and interpreters with other libraries.

    An interpreter that is not given is looked for in the environment: that of ``torch-pme`` in
    ``NVALCHEMIOPS_TORCH_PME_PYTHON``.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    for name in ("peer", *others):
        variable = f"NVALCHEMIOPS_{name.upper().replace('-', '_')}_PYTHON"
        parser.add_argument(f"--{name}", metavar="PYTHON", default=os.environ.get(variable, ""))
    parser.add_argument("--csv", metavar="FILE")
    return parser


def start(threads: int, device: str, contenders: str) -> None:
    """Make Warp quiet, set the threads of torch, and print what is compared where."""
    from nvalchemiops._warp import quiet_warp  # which the interpreter of a peer does not have

    quiet_warp()
    torch.set_num_threads(threads)
    print(f"torch {torch.__version__}, {platform.machine()}, {device}, {threads} threads, {contenders}")


def described(peer: Peer | None) -> str:
    """The peer for `start`."""
    return f"peer {peer.version}" if peer else "no peer (--peer or NVALCHEMIOPS_PEER_PYTHON)"


def contenders(ours: Any, elsewhere: Callable[[str, str], Any], pythons: Mapping[str, str]) -> dict[str, Any]:
    """Our side, and ``elsewhere(python, name)`` for each interpreter that is there."""
    others = {name: elsewhere(python, name) for name, python in pythons.items() if os.access(python, os.X_OK)}
    return {"ours": ours, **others}


def versions(sides: Mapping[str, Any]) -> str:
    """The contenders for `start`."""
    return ", ".join(f"{name} {side.version}" for name, side in sides.items())


def plot_times(path: str, curves: Iterable[tuple[str, str, Sequence[Any]]], unit: str, title: str) -> None:
    """Save a picture of times by the number of atoms; of each curve its label, its style and its points (x, y)."""
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(figsize=(7, 5), layout="constrained")
    for label, style, points in curves:
        if points:
            axes.loglog(*zip(*points), style, label=label)
    axes.set(xlabel="atoms", ylabel=unit, title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    axes.figure.savefig(path, dpi=150)


def write_csv(path: str | None, columns: Sequence[str], rows: Iterable[Mapping[str, Any] | Sequence[Any]]) -> None:
    """Write a table, if a file was asked for; a row is a mapping by column, or the values in order."""
    if path:
        with open(path, "w", newline="") as file:
            table = csv.writer(file)
            table.writerow(columns)
            table.writerows([row[c] for c in columns] if isinstance(row, Mapping) else row for row in rows)
