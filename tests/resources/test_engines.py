"""The benchmark beside molecular dynamics engines: what it does where they are absent, and how it talks to one."""

import csv
import itertools
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.processes import output_of, python_says, run_python

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.later
def test_without_engines(tmp_path):
    """Our own rows alone, each with its measured error, and one that meets each target."""
    code = """
        import os, sys
        if hasattr(os, "sched_setaffinity"):  # else the script would start itself again, without these settings
            os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
        sys.path.insert(0, sys.argv.pop(1))
        import engines
        engines.SMALL, engines.CUTOFFS = "64", (5.0, 5.6, 7.1, 8.0)
        engines.main()
    """
    table = tmp_path / "table.csv"
    arguments = ("--quick", "--csv", table, "--lammps", "", "--openmm", tmp_path / "absent", "--gromacs", "")
    printed = output_of(run_python(code, BENCHMARKS, *arguments))
    assert not any(name in printed for name in ("LAMMPS", "OpenMM", "GROMACS"))
    assert "not reached" not in printed, printed
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["contender"] for row in rows} == {"ours", "ours, kept", "ours, float32", "ours, tuned"}
    assert all(float(row["seconds"]) > 0.0 for row in rows)
    for contender, target in itertools.product(
        ("ours", "ours, kept", "ours, float32", "ours, tuned"), (1e-3, 1e-4, 1e-5)
    ):
        assert any(float(row["error"]) <= target for row in rows if row["contender"] == contender), (contender, target)


def test_an_engine_elsewhere(tmp_path):
    """Its answers pass through pipes; an engine that cannot do something says why; one that ends is noticed."""
    server = tmp_path / "server.py"
    server.write_text(f"""
import sys, time
sys.path.insert(0, {str(BENCHMARKS)!r})
import json
import numpy as np
from engine_servers import Server, questions

class Engine:
    version = "7"
    def load(self, system):
        self.charges = system["charges"]
    def make(self, p):
        if p["mesh"] < 8:
            raise ValueError("too coarse")
        return self.charges * p["mesh"], lambda steps: time.sleep(0.1 + 0.01 * steps)

server = Server(Engine())
for question in questions(None):
    if question == ["end"]:
        break
    print("answer", json.dumps(server.ask(*question)), flush=True)
""")
    code = """
        import json, sys
        sys.path.insert(0, sys.argv[1])
        import numpy as np
        from common import Peer
        np.savez(sys.argv[3], charges=np.arange(3.0))
        peer = Peer(sys.executable, sys.argv[2], "anything")
        peer.ask("system", sys.argv[3])
        said = [peer.version, peer.ask("prepare", "a", sys.argv[4], {"mesh": 4})]
        said += [peer.ask("prepare", "a", sys.argv[4], {"mesh": 10}), np.load(sys.argv[4]).tolist()]
        said += [peer.ask("time", "a", 5)]
        try:
            peer.ask("end")
        except RuntimeError as error:
            said.append(str(error))
        print(json.dumps(said))
    """
    version, failed, made, forces, seconds, ended = python_says(
        code, BENCHMARKS, server, tmp_path / "system.npz", tmp_path / "forces.npy"
    )
    assert version == "7" and failed == {"failed": "ValueError: too coarse"}
    assert made == {} and forces == [0.0, 10.0, 20.0]
    assert seconds == pytest.approx(0.01, abs=0.006)  # without what a run costs once
    assert ended.startswith(sys.executable) and ended.endswith("ended without an answer")


@pytest.mark.skipif(shutil.which("gmx") is None, reason="needs GROMACS")
def test_gromacs_has_our_forces():
    """In our units and the order of our ions, to its single precision; and it times itself."""
    code = """
        import json, sys
        sys.path.insert(0, sys.argv[1])
        from charges import atoms
        from engine_servers import Gromacs
        from engines import error_of
        engine = Gromacs(1, "gmx")
        engine.load(atoms("512"))
        forces, run = engine.make({"cutoff": 8.0, "alpha": 0.45, "mesh": 50, "order": 8})
        print(json.dumps([error_of(forces, "512"), run(1)]))
    """
    error, seconds = python_says(code, BENCHMARKS)
    assert error < 1e-4 and 0.0 < seconds < 1.0
