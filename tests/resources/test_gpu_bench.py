"""The benchmark for a GPU, rehearsed on a CPU: each item gives a row, what is broken is one, and nothing is lost."""

import difflib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from nvalchemiops.kernels.mesh import splines

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
SMALL = ("limits", "list, nearest, float64", "list 200 float32 matrix", "tests", "profile")


@pytest.fixture
def bench(monkeypatch):
    """The script as a module, with the peer replaced by this library."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu

    monkeypatch.setattr(gpu.signal, "signal", lambda *_: None)
    return gpu


def rows_of(path):
    kept = json.loads(path.read_text())
    return kept["state"], kept["rows"]


def test_each_item_gives_rows_and_a_broken_one_does_not_stop_the_rest(bench, tmp_path, capsys, monkeypatch):
    def broken(session):
        session.row("limits", "the last row before")
        raise ZeroDivisionError("on purpose")

    monkeypatch.setitem(bench.ITEMS, "limits", broken)
    path, copy = tmp_path / "gpu.json", tmp_path / "other"
    copy.mkdir()
    (copy / "nvalchemiops").symlink_to(ROOT / "nvalchemiops")
    assert bench.main(["--stand-in", "--json", str(path), "--copies", str(copy), "--only", *SMALL]) == 0
    state, rows = rows_of(path)
    assert state == "complete"
    found = {item: [row for row in rows if row["item"] == item] for item in bench.ITEMS}
    assert [row["name"] for row in found["limits"]] == ["the last row before", "limits"]
    assert found["limits"][1]["failed"] == "ZeroDivisionError: on purpose"
    assert [(row["name"], row["ok"], row["wrong"]) for row in found["checks"]] == [("list, nearest, float64", True, 0)]
    times = [row for row in found["beside"] if "case" in row]
    assert [row["side"] for row in times] == ["ours", "peer", "copy other"]
    for row in times:
        assert row["call"] > 0.0 and row["kernels"] > 0.0 and row["bytes"] > 0.0 and row["longest"]
    files = [Path(row["file"]) for row in found["beside"] if "file" in row]
    assert [file.is_relative_to(copy) for file in files] == [False, False, True]
    (tests,) = found["tests"]
    assert tests["ok"] and "skipped" in tests["last"][-1]
    assert 1 <= len(found["profile"]) <= 5 and all(row["metrics"] == "no Nsight Compute" for row in found["profile"])
    printed = capsys.readouterr().out
    assert re.search(r"copy other: call [\d.]+ x, kernels [\d.]+ x, [\w:]+ [\d.]+ x", printed)
    assert "list 200 float32 matrix" in printed and "not as expected: limits" in printed


def test_copies_are_timed_last_and_first_where_kernels_take_longest(bench, tmp_path, monkeypatch):
    """Time is short: what is compared with 0.5.0 must not wait for them."""
    options = bench.argparse.Namespace(stand_in=True, minutes=9.0, json=str(tmp_path / "gpu.json"), peer="")
    options.copies = ["x"]
    seconds, asked = {"short": 1.0, "long": 2.0}, []

    def ask(who, question, take):
        if question[0] == "time":
            asked.append((who, question[2][1]))
            take({"kernels": seconds[question[2][1]]})
        return {}

    session = bench.Session(options, tmp_path)
    monkeypatch.setattr(session, "ask", ask)
    monkeypatch.setattr(bench, "selected_cases", lambda _: [["list", size, "float32", "list"] for size in seconds])
    bench.beside(session)
    firsts = [(who, size) for size in ("short", "long") for who in ("ours", "peer")]
    assert asked == [*firsts, ("copy x", "long"), ("copy x", "short")]


def test_a_file_of_tests_that_needs_a_missing_package_does_not_stop_the_others(bench, tmp_path, monkeypatch):
    options = bench.argparse.Namespace(stand_in=True, minutes=9.0, json=str(tmp_path / "gpu.json"), only=[])
    commands = []
    monkeypatch.setattr(bench, "output_within", lambda command, *_: (commands.append(command), (0, ""))[1])
    session = bench.Session(options, tmp_path)
    session.item = "tests"
    bench.tests(session)
    (tmp_path / "test_broken.py").write_text("import a_package_that_is_missing\n")
    (tmp_path / "test_whole.py").write_text("import pytest\n\n@pytest.mark.gpu\ndef test():\n    pass\n")
    command = [str(tmp_path) if part.endswith(".py") else part for part in commands[0]]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    assert "1 passed" in said and "1 error" in said


def test_a_process_that_is_late_or_dies_is_a_row(bench, tmp_path):
    options = bench.argparse.Namespace(stand_in=True, peer="", minutes=9.0, json=str(tmp_path / "gpu.json"), only=[])
    options.copies = []
    session = bench.Session(options, tmp_path)
    session.item = "limits"

    def kill(row):
        os.kill(session.workers["ours"].process.pid, signal.SIGKILL)

    late = session.ask("late", ["version"], lambda row: None, 0.01)
    assert late == {"failed": "no answer in 0 s"} and not session.workers["late"].is_there
    session.collect("ours", ["no", "such", "question"], "limits", "what")
    assert session.rows[-1]["failed"].startswith("ValueError: no such question") and not session.rows[-1]["ok"]
    process = session.workers["ours"].process
    died = session.ask("ours", ["limits"], kill)
    assert died["failed"].startswith("the process ended (-9)"), died
    found = []
    assert session.ask("ours", ["version"], found.append) == {}  # by another process
    assert found and session.workers["ours"].process is not process
    options.minutes = 0.0
    assert session.ask("ours", ["version"], found.append)["failed"] == "not run: no time left"
    session.end()
    assert process.poll() is not None and not session.workers


def test_kernels_of_a_copy_are_compiled_with_its_changes(bench, tmp_path):
    """Also those of meshes of each order that is tried."""
    import gpu_calls

    head = "import os\n\nfrom nvalchemiops.kernels.mesh.splines import COMMON\n\n\ndef main(arguments):\n"
    told = "    os.makedirs(os.environ['WARP_CACHE_PATH'])\n    print('{}', *[f'{{p}}{{r}}' for p, r in COMMON])\n"
    ours, changed = (head + told.format(name) for name in ("ours", "changed"))
    texts = {"__init__.py": "", "cli.py": ours, "kernels/mesh/splines.py": f"COMMON = {splines.COMMON}\n"}
    for name, text in texts.items():
        path = tmp_path / "nvalchemiops" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    patch = tmp_path / "other.patch"
    lines = [text.splitlines(keepends=True) for text in (ours, changed)]
    patch.write_text("".join(difflib.unified_diff(*lines, "a/nvalchemiops/cli.py", "b/nvalchemiops/cli.py")))
    (tmp_path / "benchmarks").mkdir()
    script = shutil.copy(BENCHMARKS / "gpu_session.sh", tmp_path / "benchmarks")
    command, environment = ["bash", str(script), "copy", str(patch)], {**os.environ, "PYTHON": sys.executable}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
    assert said[0] == "changed"
    kept = [path.name for path in (tmp_path / ".gpu" / "copies").rglob("*.*")]
    assert kept == ["cli.py"]  # the others are the same there
    assert {f"{p}{r}" for p in gpu_calls.SEARCH["ours"] for r in gpu_calls.PRECISIONS} <= set(said[1:])


def test_rows_survive_an_interruption(tmp_path):
    """The file can be read at any time, and says how far it got."""
    path = tmp_path / "gpu.json"
    command = [
        sys.executable,
        str(BENCHMARKS / "gpu.py"),
        "--stand-in",
        "--json",
        str(path),
        "--only",
        "limits",
        "checks",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT)})
    deadline = time.monotonic() + 120.0
    while not path.exists() or rows_of(path)[0] != "running" or len(rows_of(path)[1]) < 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.terminate()
    assert process.wait(60.0) == 130
    state, rows = rows_of(path)
    assert state == "interrupted" and len(rows) >= 2 and rows[0]["name"] == "device"


# -- what would be reported on a GPU that is wrong ----------------------------------------------------------


@pytest.fixture
def checks(bench):
    import gpu_checks

    return gpu_checks


def checked(checks, monkeypatch, function, gpu=None, **options):
    from gpu_worker import StandIn

    monkeypatch.setitem(checks.OPERATORS, "wrong", checks.Operator(function, systems=("thin",), **options))
    (row,) = checks.check(gpu or StandIn(), True, "wrong", "float32")
    return row


def cubes(g):
    return [g.x**3 / 100.0]


def test_a_check_tells_wrong_values_and_derivatives_apart(checks, monkeypatch):
    assert checked(checks, monkeypatch, cubes)["ok"]

    def wrong_here(g):
        return [g.x**3 / 100.0 * (1.0 + 3e-4 * (g.x.dtype is torch.float32))]

    row = checked(checks, monkeypatch, wrong_here)
    assert not row["ok"] and 1e-4 < row["error"] < 1e-3 and row["worst"] == "thin"

    def unwritten(g):
        return [torch.where(g.x > 1.0, g.x, torch.nan if g.x.dtype is torch.float32 else 0.0)]

    assert not checked(checks, monkeypatch, unwritten, orders=0)["ok"]

    def second_order(g):  # the first derivative is right, the second is not
        x = g.x
        return [x**2 / 2.0 if x.dtype is torch.float64 else x.detach() * x - x.detach() ** 2 / 2.0]

    row = checked(checks, monkeypatch, second_order)
    assert row["error"] < 1e-6 and row["error 2"] > 0.1 and not row["ok"]


def test_a_check_sees_stale_results_and_waiting(checks, monkeypatch):
    from gpu_worker import StandIn

    kept = {}

    def stale(g):
        return [kept.setdefault(g.x.dtype, g.x.detach().clone()).sin()]

    row = checked(checks, monkeypatch, stale, orders=0)
    assert not row["ok"] and row["error"] < 1e-6 and row["repeated"] == "does not follow the atoms"

    class Still(StandIn):
        def capture(self, step):
            return (lambda: None), step()

    row = checked(checks, monkeypatch, cubes, Still())
    assert not row["ok"] and row["graph"].startswith("apart by") and row["repeated"] == "same"

    class Waits(StandIn):
        def waiting_is_an_error(self):
            raise RuntimeError("called a synchronizing CUDA operation")

    row = checked(checks, monkeypatch, cubes, Waits())
    assert not row["ok"] and row["wait"].startswith("RuntimeError: called") and row["graph"] == "same"
    assert checked(checks, monkeypatch, cubes, Waits(), waits=True)["ok"]  # its documentation says so


FAULTS = {
    "missing": lambda pairs, shifts: (pairs[:, 1:], shifts[1:]),
    "twice": lambda pairs, shifts: (torch.cat([pairs, pairs[:, :1]], 1), torch.cat([shifts, shifts[:1]])),
    "too far": lambda pairs, shifts: (torch.cat([pairs, pairs[:, :1]], 1), torch.cat([shifts, shifts[:1] + 2])),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_wrong_pair_is_counted(checks, monkeypatch, fault):
    from gpu_worker import StandIn

    true = checks.neighbor_list

    def wrong(x, *arguments, **options):
        pairs, ptr, *rest = true(x, *arguments, **options)
        if x.dtype is torch.float32 and options.get("return_neighbor_list"):
            pairs, rest[0] = fault(pairs, rest[0])
        return pairs, ptr, *rest

    monkeypatch.setattr(checks, "neighbor_list", wrong)
    (row,) = checks.check_lists(StandIn(), True, "list, nearest", "float32")
    assert not row["ok"] and row["wrong"] == len(row["where"]) == 5  # one for each system


def test_references_are_kept_for_the_same_atoms_only(checks, monkeypatch, tmp_path):
    monkeypatch.setitem(checks.OPERATORS, "cubes", checks.Operator(cubes))
    exact = checks.given("thin", True)
    found = checks.reference(str(tmp_path), "cubes", "thin", exact)
    monkeypatch.setitem(checks.OPERATORS, "cubes", checks.Operator(lambda g: [g.x]))
    kept = checks.reference(str(tmp_path), "cubes", "thin", exact)
    assert all(torch.equal(a, b) for a, b in zip(found[0] + found[1], kept[0] + kept[1], strict=True))
    moved = checks.reference(str(tmp_path), "cubes", "thin", exact._replace(x=exact.x + 1.0))
    assert torch.equal(moved[0][0], exact.x + 1.0)


# -- what is compared ---------------------------------------------------------------------------------------


def test_parameters_reach_the_error_and_no_more(bench):
    import gpu_calls
    from gpu_worker import StandIn

    gpu, real = StandIn(), torch.float32
    exact = gpu_calls.exact_forces(gpu, "64")
    p = gpu_calls.searched(gpu, "ours", "ewald", "64", real, exact, True)

    def error(k_cutoff):
        work = gpu_calls.charges_work(gpu, "ewald", "64", real, "forces", p | {"k_cutoff": k_cutoff})
        return gpu_calls.error_of(work, exact)

    assert error(p["k_cutoff"]) == p["error"] <= 1e-4 < error(0.7 * p["k_cutoff"])
    with pytest.raises(gpu_calls.Missed, match="no error below"):
        gpu_calls.searched(gpu, "ours", "ewald", "64", real, 2.0 * exact, True)


def test_the_table_compares(bench, tmp_path):
    options = bench.argparse.Namespace(minutes=1.0, json=str(tmp_path / "gpu.json"), copies=[])
    session = bench.Session(options, tmp_path)
    session.row("limits", "copy", value=1e9)
    case = ["dsf", "10", "float32", "forces"]
    shared = {"case": case, "bytes": 1e6}
    session.row("beside", "dsf", side="ours", **shared, call=4e-3, graph=3e-3, kernels=2e-3, launches=7.0, error=1e-6)
    session.row("beside", "dsf", side="peer", **shared, call=8e-3, kernels=5e-3, failed="it cannot be captured")
    _, line, reason = bench.compared(session)
    columns = "dsf 4.000 3.000 2.000 7 2.0 x 2.0 x - 2.5 x 1e-06, -"
    assert line.split() == columns.split()
    assert reason.split() == ["peer:", "it", "cannot", "be", "captured"]
    assert bench.table(session)[-1].endswith("not as expected: dsf")


# -- what profilers write -----------------------------------------------------------------------------------


def test_kernels_of_a_trace(bench):
    from gpu_worker import KERNELS, kernels_of

    launch = {"grid": [9, 1, 1], "block": [256, 1, 1], "registers per thread": 40, "est. achieved occupancy %": 61}
    events = [
        {"cat": "kernel", "name": "sum", "dur": 3.0, "args": launch},
        {"cat": "kernel", "name": "sum", "dur": 5.0, "args": launch | {"grid": [11, 1, 1], "stream": 7}},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoD", "dur": 10.0, "args": {"bytes": 4}},
        {"cat": "cpu_op", "name": "aten::add", "dur": 99.0},
        {"name": "process_name", "ph": "M"},
    ]
    copy, total = kernels_of({"traceEvents": events}, KERNELS, 2)
    assert copy == {"kernel": "Memcpy DtoD", "us": 5.0, "launches": 0.5}
    assert total == {"kernel": "sum", "us": 4.0, "launches": 1.0} | launch | {"grid": [11, 1, 1]}


def test_metrics_and_floors(bench):
    text = """==PROF== Connected
"ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"
"0","sum","GPU Speed Of Light Throughput","Duration","us","12.4"
"0","sum","GPU Speed Of Light Throughput","DRAM Throughput","%","71.0"
"0","sum","Launch Statistics","Registers Per Thread","register/thread","40"
"""
    found = {"Duration": "12.4 us", "DRAM Throughput": "71.0 %", "Registers Per Thread": "40 register/thread"}
    assert bench.metrics_in(text) == found
    rates = {"copy": 100.0, "product, float32": 10.0, "product, float64": 5.0}
    row = {"case": ["dsf", "1", "float32", "forces"], "bytes": 300.0, "flops": 20.0}
    assert bench.floor_of(row, rates) == 3.0
    assert bench.floor_of(row | {"flops": 80.0}, rates) == 8.0
    assert bench.floor_of(row | {"bytes": 0.0, "flops": 0.0}, rates) == bench.floor_of(row, {}) == 0.0
