"""Run the checks of each client, and print a table: its version, what it requires, what ran.

A client runs in a process of its own, with the stand-in for nvalchemi-toolkit-ops of a release that it requires.
"""

import ast
import importlib.metadata
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from pathlib import Path

from packaging.requirements import Requirement

from nvalchemiops.compat.stand_in import RELEASE, write_stand_in

HERE = Path(__file__).resolve().parent
CHECKS = {
    "aimnet": "aimnet_checks.py",
    "curdf": "curdf_checks.py",
    "deepmd-kit": "deepmd_checks.py",
    "fairchem-core": "fairchem_checks.py",
    "gpuma": "gpuma_checks.py",
    "matgl": "matgl_checks.py",
    "nequip": "nequip_checks.py",
    "nvalchemi-toolkit": "toolkit_checks.py",
    "orb-models": "orb_checks.py",
    "torch-sim-atomistic": "torch_sim_checks.py",
}
EXTRAS = ("", "ops", "torch")
"""Extras of clients that add the requirement; the first is none."""


def required(client: str) -> Requirement | None:
    """What it requires of nvalchemi-toolkit-ops, by its own metadata."""
    for text in importlib.metadata.requires(client) or []:
        asked = Requirement(text)
        holds = asked.marker is None or any(asked.marker.evaluate({"extra": extra}) for extra in EXTRAS)
        if holds and asked.name == "nvalchemi-toolkit-ops":
            return asked
    return None


def release_for(asked: Requirement) -> str:
    """The stand-in's own release if that will do, otherwise the oldest one that the client takes."""
    named = [s.version for s in asked.specifier if s.operator in (">=", "==", "~=")]
    return next(release for release in (RELEASE, *named) if asked.specifier.contains(release))


def install_stand_in(release: str, folder: Path) -> None:
    """In this environment, in place of the one of another release."""
    wheel = write_stand_in(folder, release)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-qq", "--no-index", "--no-deps"]
    subprocess.run([*pip, str(wheel)], check=True)


def count(report: Path) -> dict[str, int]:
    """Numbers of checks by what became of them; a file that was skipped whole is no check."""
    suite = next(xml.etree.ElementTree.parse(report).iter("testsuite"))
    numbers = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = numbers["failures"] + numbers["errors"]
    return {"passed": numbers["tests"] - failed - numbers["skipped"], "failed": failed, "skipped": numbers["skipped"]}


def main() -> int:
    rows, failed = [], False
    with tempfile.TemporaryDirectory() as folder:
        for client, file in CHECKS.items():
            version, asked = importlib.metadata.version(client), required(client)
            release = release_for(asked) if asked else RELEASE
            install_stand_in(release, Path(folder))
            print(f"== {client} {version}", flush=True)
            report = Path(folder) / f"{file}.xml"
            command = [sys.executable, "-m", "pytest", "-q", "-c", "checks.ini", f"--junitxml={report}", file]
            status = subprocess.run([*command, *sys.argv[1:]], cwd=HERE).returncode
            numbers = count(report) if report.exists() else {"passed": 0, "failed": 1, "skipped": 0}
            failed |= bool(numbers["failed"]) or status not in (0, 5)
            about = ast.get_docstring(ast.parse((HERE / file).read_text())) or ""
            ran = numbers["passed"] or numbers["failed"]
            what = about.partition("\n")[0].partition(": ")[2] if ran else "nothing: it cannot be imported here"
            wants = re.sub(r"^nvalchemi-toolkit-ops|\s", "", str(asked).partition(";")[0]) if asked else ""
            outcome = ", ".join(f"{number} {name}" for name, number in numbers.items() if number or name == "passed")
            rows.append((client, version, wants or "any", release, outcome, what))
    head = ("client", "version", "requires", "stand-in", "checks", "what ran")
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    for row in (head, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
