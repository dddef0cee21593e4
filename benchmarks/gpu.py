"""Half an hour, or ten minutes, on a GPU machine: one command, a table, and a JSON file that is whole after each row.

Five items, the most telling first:

- *limits*: what the device can do: copies, matrix products, launches;
- *checks*: operators beside float64 on the CPU (`gpu_checks.py`), by several processes at once. Meanwhile two others
  compile what comes next;
- *beside*: calls of this library beside those of nvalchemi-toolkit-ops 0.5.0 (`gpu_calls.py`): times of a call, of its
  kernels and of a captured graph; the measured error; and a floor, the bytes or operations that cannot be avoided;
- *tests*: ``pytest -m gpu``;
- *profile*: the five longest kernels of *beside*, in Nsight Compute where it works.

Each question is asked in another process with a time limit. One that fails, hangs or dies is a row that says so, and
the rest goes on with a new process; what they print is kept beside the JSON file, with the end ``.log``. Times are by
CUDA events, medians after warm-up, with inputs that take turns.

- ``--peer FOLDER``: has 0.5.0 (``pip install --no-deps --target FOLDER nvalchemi-toolkit-ops==0.5.0``);
- ``--copies FOLDER ...``: other versions of this library, such as checkouts with another kernel, which *beside* times
  after ours, with the same parameters, first where kernels take longest;
- ``--stand-in``: a rehearsal on a CPU, with small systems; without ``--peer`` this library is its own peer;
- ``--references FOLDER``: results of the CPU, which a rehearsal with the same option has made
  (``--stand-in --only checks``), so that the GPU machine need not compile for its CPU;
- ``--only WORD ...``: items, checks and cases whose name contains one of these.

Run: ``python benchmarks/gpu.py [--peer FOLDER] [--copies FOLDER ...] [--minutes 8] [--json FILE] [--references FOLDER]
[--only WORD ...]``.
"""

import argparse
import collections
import contextlib
import csv
import datetime
import functools
import importlib.util
import json
import os
import platform
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
UNTIL = {"limits": 0.1, "checks": 0.4, "beside": 0.75, "tests": 0.95, "profile": 1.0}
"""Which part of all the time has passed when an item must end; what one leaves the next may use."""

PATIENCE = {
    "limits": 60.0,
    "check": 120.0,
    "warm": 120.0,
    "time": 90.0,
    "profile": 40.0,
    "interrupted": 10.0,
}  # seconds for a question
LARGEST = 5  # kernels to look at
TO_BE = " to be"  # at the end of the name of a process that only compiles
METRICS = (
    *("Duration", "DRAM Throughput", "Compute (SM) Throughput", "Achieved Occupancy", "Theoretical Occupancy"),
    *("Registers Per Thread", "L2 Hit Rate", "L1/TEX Hit Rate"),
)


# -- processes ----------------------------------------------------------------------------------------------


class Worker:
    """A process that answers questions (`gpu_worker.py`)."""

    def __init__(self, stand_in: bool, paths: Sequence[str], environment: dict[str, str], log: Path) -> None:
        python_path = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH", "")])])
        self.log = log
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "gpu_worker.py"), *["--stand-in"] * stand_in],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env={**os.environ, **environment, "PYTHONPATH": python_path},
                start_new_session=True,
            )
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.lock = threading.Lock()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    @property
    def is_there(self) -> bool:
        return self.process.poll() is None

    def ask(self, question: Sequence[Any], seconds: float, take: Callable[[Row], None]) -> Row:
        """Give the rows of an answer to ``take``, as they come, and return what failed; the process is ended then."""
        with self.lock:
            return self._ask(question, seconds, take)

    def _ask(self, question: Sequence[Any], seconds: float, take: Callable[[Row], None]) -> Row:
        assert self.process.stdin is not None
        deadline = time.monotonic() + seconds
        try:
            print(json.dumps(question), file=self.process.stdin, flush=True)
            while line := self.lines.get(timeout=max(0.0, deadline - time.monotonic())):
                kind, _, text = line.partition(" ")
                if kind == "end":
                    end = json.loads(text)
                    if end.pop("broken", False):
                        self.end()
                    return end
                take(json.loads(text))
        except queue.Empty:
            self.end()
            return {"failed": f"no answer in {seconds:.0f} s"}
        except OSError:
            pass
        self.end()
        last = self.log.read_text(errors="replace").splitlines()[-1:]
        return {"failed": f"the process ended ({self.process.returncode}): {' '.join(last)[:200]}"}

    def end(self) -> None:
        if self.is_there:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Session:
    """What was asked for, the processes, and the rows so far."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder, self.path = options, folder, Path(options.json)
        self.rows: list[Row] = []
        self.state, self.item = "running", ""
        self.start, self.workers, self.lock = time.monotonic(), dict[str, Worker](), threading.RLock()
        self.about: Row = {"host": platform.machine(), "python": platform.python_version(), "cores": os.cpu_count()}
        self.about |= {"began": datetime.datetime.now().isoformat(timespec="seconds"), "options": vars(options)}

    # -- rows

    def save(self) -> None:
        """Write all rows to another file first: an interruption leaves the last whole one."""
        with self.lock:
            kept = {"state": self.state, "about": self.about, "rows": self.rows}
            part = self.path.with_name(self.path.name + ".part")
            part.write_text(json.dumps(kept, indent=1) + "\n")
            os.replace(part, self.path)

    def save_logs(self) -> None:
        """What the processes and pytest have printed, in one file beside the rows."""
        with self.path.with_suffix(".log").open("w") as file:
            for log in sorted(self.folder.glob("*.log")):
                file.write(f"== {log.name}\n{log.read_text(errors='replace')}\n")

    def row(self, item: str, name: str, **values: Any) -> Row:
        with self.lock:
            self.rows.append({"item": item, "name": name, **values})
            self.save()
            return self.rows[-1]

    def update(self, row: Row, values: Row) -> None:
        with self.lock:
            row.update(values)
            self.save()

    def of(self, item: str) -> list[Row]:
        return [row for row in self.rows if row["item"] == item]

    # -- questions

    @property
    def left(self) -> float:
        """Seconds for the item that runs."""
        return self.start + 60.0 * self.options.minutes * UNTIL[self.item] - time.monotonic()

    def wanted(self, item: str, name: str) -> bool:
        return not self.options.only or any(word in f"{item} {name}" for word in self.options.only)

    def ask(self, who: str, question: Sequence[Any], take: Callable[[Row], None], seconds: float | None = None) -> Row:
        """Ask a process, which is started if it is not there. Its name says which library it has."""
        limit = min(seconds or PATIENCE.get(question[0], 60.0), self.left)
        if limit <= 0.0:
            return {"failed": "not run: no time left"}
        with self.lock:
            worker = self.workers.get(who)
            if worker is None or not worker.is_there:
                name = who.removesuffix(TO_BE)
                package = copies(self).get(name) or (name == "peer" and self.options.peer) or str(ROOT)
                environment = {"GPU_BENCH_D3": str(self.folder / "d3.npz")}
                worker = Worker(self.options.stand_in, [package], environment, self.folder / f"{who}.log")
                self.workers[who] = worker
        return worker.ask(question, limit, take)

    def collect(self, who: str, question: Sequence[Any], item: str, name: str) -> None:
        """Rows of an answer, as they are."""
        end = self.ask(who, question, lambda row: (self.row(item, **{"name": name, **row}), None)[1])
        if end:
            self.row(item, name, **end, ok=False)

    def end(self, *names: str) -> None:
        for name in names or list(self.workers):
            if name in self.workers:
                self.workers.pop(name).end()


def in_parallel(tasks: Iterable[Callable[[], None]]) -> None:
    """Each in a thread, which waits for its process."""
    threads = [threading.Thread(target=task, daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(0.2)  # so that an interruption gets through


# -- items --------------------------------------------------------------------------------------------------


def limits(session: Session) -> None:
    session.collect("ours", ["limits"], "limits", "limits")


def checks(session: Session) -> None:
    cases = selected_cases(session)
    asked: queue.Queue[tuple[str, str]] = queue.Queue()
    for name in known(session, "checks"):
        for dtype in ("float64", "float32"):
            if session.wanted("checks", f"{name}, {dtype}"):
                asked.put((name, dtype))

    def check(who: str) -> None:
        while True:
            try:
                name, dtype = asked.get_nowait()
            except queue.Empty:
                return
            question = ["check", name, dtype, session.options.references]
            session.collect(who, question, "checks", f"{name}, {dtype}")

    def warm(who: str) -> None:
        """Kernels end up in Warp's cache, where the processes of the next item find them."""
        for case in cases:
            end = session.ask(who + TO_BE, ["warm", side_of(who), case], lambda row: None)
            if end:
                session.row("checks", f"warm-up of {who}, {' '.join(case)}", note=end["failed"])

    count = max(1, min(6, (os.cpu_count() or 1) // 2))
    names = ["ours", *(f"ours {k}" for k in range(1, count))]
    tasks: list[Callable[[], None]] = [functools.partial(check, name) for name in names]
    if not session.options.stand_in:
        tasks += [functools.partial(warm, who) for who in everyone(session)]
    in_parallel(tasks)
    session.end(*names[1:], *(who + TO_BE for who in everyone(session)))


def beside(session: Session) -> None:
    cases = selected_cases(session)
    if not cases:
        return
    session.ask("ours", ["d3 table", str(session.folder / "d3.npz")], lambda row: None)
    for who in everyone(session):
        session.collect(who, ["version"], "beside", who)
    chosen: dict[tuple[str, ...], Row] = {}

    def time_case(who: str, case: list[str]) -> float:
        """Seconds in kernels."""
        subject, _, precision, _ = case
        row = session.row("beside", " ".join(case), side=who, case=case)
        key = (side_of(who), subject, precision)
        question = ["time", side_of(who), case, str(session.folder), chosen.get(key)]
        end = session.ask(who, question, functools.partial(session.update, row))
        session.update(row, end)
        if "parameters" in row:
            chosen.setdefault(key, row["parameters"])
        return float(row.get("kernels", 0.0))

    # copies come last, those cases first in which they matter most: there may be no time left for all
    found, (ours, *peer) = [], [who for who in everyone(session) if who not in copies(session)]
    for case in cases:
        found.append((time_case(ours, case), case))
        for who in peer:
            time_case(who, case)
    for _, case in sorted(found, reverse=True):
        for who in copies(session):
            time_case(who, case)


def everyone(session: Session) -> list[str]:
    """Names of the processes that are timed; in a rehearsal without 0.5.0 our own package stands in for it."""
    peer = ["peer"] if session.options.peer or session.options.stand_in else []
    return ["ours", *peer, *copies(session)]


def side_of(who: str) -> str:
    """How a process is called: as ours, or as 0.5.0."""
    return "peer" if who == "peer" else "ours"


def copies(session: Session) -> dict[str, str]:
    """Folders of other versions of this library, by the names of their processes."""
    return {f"copy {Path(folder).name}": folder for folder in session.options.copies}


def known(session: Session, what: str) -> list[Any]:
    """Names of checks, or cases, from a process: this one imports no torch."""
    found: list[Any] = []
    end = session.ask("ours", ["known", what], lambda row: found.append(row["known"]))
    if end:
        session.row(session.item, what, **end, ok=False)
    return found


def selected_cases(session: Session) -> list[list[str]]:
    return [case for case in known(session, "cases") if session.wanted("beside", " ".join(case))]


def tests(session: Session) -> None:
    """The last lines of pytest; where it is stopped, of what it had printed."""
    if not session.wanted("tests", ""):
        return
    where = ["tests/routes/test_custom_ops_on_gpu.py"] if session.options.stand_in else []
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--color=no", *where]
    command.append("--continue-on-collection-errors")  # of files that need a package which is not there
    # other releases of Python, NumPy and torch deprecate other things, which are no faults on a GPU
    command += [
        part for kind in ("Deprecation", "PendingDeprecation", "Future") for part in ("-W", f"default::{kind}Warning")
    ]
    if importlib.util.find_spec("xdist") and not session.options.stand_in:
        command += ["-n", str(max(1, min(6, (os.cpu_count() or 1) // 2))), "--dist", "worksteal"]
    session.end()  # whose processes hold memory of the device
    row = session.row("tests", "pytest -m gpu", ok=False)
    code, printed = output_within(command, session.left, session.folder / "tests.log")
    lines = [line for line in printed.splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith(("FAILED", "ERROR"))][:40]
    session.update(row, {"code": code, "last": lines[-5:], "failing": telling, "ok": code == 0})


def output_within(command: Sequence[str], seconds: float, log: Path) -> tuple[int | str, str]:
    """Exit code and what was printed; of a command that takes longer what it had printed by then."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, start_new_session=True
        )
        code: int | str
        try:
            code = process.wait(max(1.0, seconds))
        except subprocess.TimeoutExpired:
            code = f"stopped after {seconds:.0f} s"
            os.killpg(process.pid, signal.SIGINT)  # pytest says then what has failed so far
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE["interrupted"])
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return code, log.read_text(errors="replace")


def profile(session: Session) -> None:
    longest: dict[str, Row] = {}
    for row in session.of("beside"):
        for kernel in row.get("longest", []) if row.get("side") == "ours" else []:
            if kernel["kernel"].startswith("Mem"):  # a copy or a fill by the driver, which Nsight Compute does not see
                continue
            if kernel["us"] > longest.get(kernel["kernel"], {"us": 0.0})["us"]:
                longest[kernel["kernel"]] = {**kernel, "case": row["case"], "parameters": row.get("parameters")}
    for kernel in sorted(longest.values(), key=lambda k: -k["us"])[:LARGEST]:
        name = kernel.pop("kernel")
        if session.wanted("profile", name):
            row = session.row("profile", name, **kernel)
            session.update(row, {"metrics": in_nsight(session, name, kernel)})


def in_nsight(session: Session, name: str, kernel: Row) -> Row | str:
    """Some metrics of one launch of the kernel, or why there are none."""
    program = shutil.which("ncu")
    if not program or session.options.stand_in:
        return "no Nsight Compute"
    if session.left <= 5.0:
        return "not run: no time left"
    log = session.folder / "ncu.csv"
    log.unlink(missing_ok=True)
    identifiers = sorted(re.findall(r"\w{6,}", name), key=len)  # of a template the longest name in it
    question = ["profile", "ours", kernel["case"], str(session.folder), kernel["parameters"]]
    command = [program, "--clock-control", "none", "--kernel-name", f"regex:{identifiers[-1] if identifiers else name}"]
    command += ["--launch-skip", "1", "--launch-count", "1", "--set", "detailed", "--csv", "--page", "details"]
    command += ["--log-file", str(log), sys.executable, str(HERE / "gpu_worker.py"), "--once", json.dumps(question)]
    seconds = min(PATIENCE["profile"], session.left)
    code, printed = output_within(command, seconds, session.folder / "ncu.log")
    return metrics_in(log.read_text(errors="replace") if log.exists() else "") or f"{code}: {printed[-300:]}"


def metrics_in(text: str) -> Row:
    """`METRICS` in a table of Nsight Compute."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    found = {r["Metric Name"]: f"{r['Metric Value']} {r['Metric Unit']}".strip() for r in csv.DictReader(lines)}
    return {name: found[name] for name in METRICS if name in found}


ITEMS = {"limits": limits, "checks": checks, "beside": beside, "tests": tests, "profile": profile}


# -- what is shown ------------------------------------------------------------------------------------------


def table(session: Session) -> list[str]:
    lines = [f"{session.state}, {time.monotonic() - session.start:.0f} s; all rows are in {session.path}"]
    for item in filter(session.of, UNTIL):
        lines.append(f"\n-- {item}")
        lines += compared(session) if item == "beside" else [line_of(row) for row in session.of(item)]
    failed = [row["name"] for row in session.rows if row.get("ok") is False or "failed" in row]
    return [*lines, f"\nnot as expected: {', '.join(failed) if failed else 'nothing'}"]


def line_of(row: Row) -> str:
    kept = {key: value for key, value in row.items() if key not in ("item", "name", "tolerances", "case", "parameters")}
    if kept.get("ok") is True:
        shortly = ("error", "error 2", "pairs", "last")
        kept = {key: v for key, v in kept.items() if key in shortly or v == "to rounding"}
    shown = ", ".join(f"{key} {v:.3g}" if isinstance(v, float) else f"{key} {v}" for key, v in kept.items())
    return f"{row['name']:42s} {shown}"


def floor_of(row: Row, rates: dict[str, float]) -> float:
    """Seconds for the bytes or the operations of a case, whichever are longer; 0 where neither is known."""
    by_bytes = row.get("bytes", 0.0) / rates.get("copy", float("inf"))
    return max(by_bytes, row.get("flops", 0.0) / rates.get(f"product, {row['case'][2]}", float("inf")))


def compared(session: Session) -> list[str]:
    """Each case in a line: milliseconds of a call, its graph and its kernels; and those of 0.5.0 in units of ours."""
    rates = {row["name"]: row["value"] for row in session.of("limits") if "value" in row}
    found: dict[str, dict[str, Row]] = collections.defaultdict(dict)
    for row in session.of("beside"):
        if "case" in row:
            found[row["name"]][row["side"]] = row
    lines = [line_of(row) for row in session.of("beside") if "case" not in row]
    lines.append(
        f"{'ms: call, graph, kernels; launches':42s}{'ours':>30s}{'/ floor':>9s}  {'peer / ours':>24s}   errors"
    )
    kinds = ("call", "graph", "kernels")
    for name, of_sides in found.items():
        ours, peer = of_sides.get("ours", {}), of_sides.get("peer", {})
        floor = floor_of(ours, rates) if ours else 0.0
        line = f"{name:42s}" + "".join(f"{1e3 * ours[k]:9.3f}" if k in ours else f"{'-':>9s}" for k in kinds)
        line += f"{ours.get('launches', 0):5.0f}"
        line += f"{ours['kernels'] / floor:7.1f} x" if floor and "kernels" in ours else f"{'-':>9s}"
        both = [k for k in kinds if k in ours and k in peer]
        line += "".join(f"{peer[k] / ours[k]:6.1f} x" if k in both else f"{'-':>8s}" for k in kinds)
        errors = [f"{side['error']:.0e}" if "error" in side else "-" for side in (ours, peer)]
        lines.append(f"{line}   {', '.join(errors)}")
        lines += [f"    {side}: {row['failed']}" for side, row in of_sides.items() if "failed" in row]
        lines += [f"    {who}: {beside_ours(of_sides[who], ours)}" for who in copies(session) if who in of_sides]
    return lines


def beside_ours(other: Row, ours: Row) -> str:
    """Times of a copy in units of ours: of all, and of each kernel that both name among their longest."""

    def of_kernels(row: Row) -> dict[str, float]:
        """By the names of kernels without the hashes of their modules."""
        return {re.sub(r"_[0-9a-f]{7,}(?=_|$)", "", found["kernel"]): found["us"] for found in row.get("longest", [])}

    pairs = [(kind, other[kind], ours[kind]) for kind in ("call", "graph", "kernels") if kind in other and kind in ours]
    theirs = of_kernels(ours)
    pairs += [(name, us, theirs[name]) for name, us in of_kernels(other).items() if name in theirs]
    return ", ".join(f"{name} {a / b:.3f} x" for name, a, b in pairs if b)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", metavar="FOLDER", default="", help="with nvalchemi-toolkit-ops 0.5.0")
    parser.add_argument("--copies", metavar="FOLDER", nargs="+", default=[], help="with other versions of this library")
    parser.add_argument("--minutes", type=float, default=8.0, help="for all (8)")
    parser.add_argument("--json", metavar="FILE", default="gpu.json")
    parser.add_argument("--references", metavar="FOLDER", default="", help="results of CPUs, read and written")
    parser.add_argument("--only", metavar="WORD", nargs="+", default=[])
    parser.add_argument("--stand-in", action="store_true", help="on a CPU, with small systems")
    options = parser.parse_args(arguments)
    options.peer, options.references = (os.path.abspath(p) if p else "" for p in (options.peer, options.references))
    options.copies = list(map(os.path.abspath, options.copies))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:
        session = Session(options, Path(folder))
        session.save()
        try:
            for session.item, run in ITEMS.items():
                if session.wanted(session.item, "") or session.item in ("checks", "beside", "profile"):
                    try:
                        run(session)
                    except Exception as error:
                        session.row(session.item, session.item, failed=f"{type(error).__name__}: {error}"[:500])
            session.state = "complete"
        except KeyboardInterrupt:
            session.state = "interrupted"
        finally:
            session.end()
            session.save()
            session.save_logs()
        print("\n".join(table(session)), flush=True)
    return 0 if session.state == "complete" else 130


if __name__ == "__main__":
    sys.exit(main())
