"""Whether the tests notice mistakes: a fixed list of plausible ones, made one at a time in a copy of the tree.

    python -m tests.mutations [--only PATTERN] [--marks "not slow"] [--whole] [--record] [--list]

`mutations.txt` has the list. An entry begins with a title, a room and what is wrong then; it goes on with the file, the
tests that are tried first, the function that has failed before (`killer`), and the text that `-` lines become, `+`
lines. The test of that name is run first, then all tests to try first, up to the first failure.

The old text must be in its file exactly once, and the tests must exist: a list that has gone stale is an error (one
that `tests/package/test_mutations.py` finds every day). At the end, the tests that have failed are run without any
mutation, where they must pass: otherwise they have shown nothing.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_suffix(".txt")
NOT_COPIED = (".git", ".venv*", ".gpu", ".hypothesis", ".*_cache", "__pycache__", "_build", "results", "output")
NOT_COPIED += ("test_mutations.py", "gpu_variants")  # tests of texts would notice a mistake that has no effect
NOTHING_CHOSEN = 5
"""What pytest returns if no test fits the options."""


class Mutation(NamedTuple):
    """A mistake: ``old`` becomes ``new`` in ``file``."""

    title: str
    file: str
    tests: tuple[str, ...]
    killer: str
    old: str
    new: str


class Outcome(NamedTuple):
    """What a run of tests has shown; ``failed`` is the first test that has failed, or what else went wrong."""

    code: int
    failed: str
    seconds: float


def mutations() -> list[Mutation]:
    """The entries of the list."""
    found = []
    for entry in re.split(r"^== ", LIST.read_text(), flags=re.MULTILINE)[1:]:
        title, *lines = entry.rstrip("\n").split("\n")
        fields = {"file": "", "tests": "", "killer": ""}
        old, new = [], []
        for line in lines:
            key, _, value = line.partition(" ")
            if key in fields:
                fields[key] = value
            elif key in ("-", "+"):
                (old if key == "-" else new).append(value)
            elif line:
                raise SystemExit(f"{LIST.name}: in '{title}' there is a line of no kind: {line!r}")
        tests = tuple(fields["tests"].split())
        found.append(Mutation(title, fields["file"], tests, fields["killer"], "\n".join(old), "\n".join(new)))
    return found


def stale_entries() -> list[str]:
    """What is stale about the list, a line for each fault."""
    every = mutations()
    counts = Counter(mutation.title for mutation in every)
    stale = [f"{mutation.title}: {fault}" for mutation in every for fault in faults_of(mutation)]
    return stale + [f"{title}: {count} entries have this title" for title, count in counts.items() if count > 1]


def faults_of(mutation: Mutation) -> list[str]:
    """What is stale about an entry."""
    path = ROOT / mutation.file
    count = path.read_text().count(mutation.old) if path.is_file() and mutation.old else -1
    faults = [] if count == 1 else [f"the old text is {max(count, 0)} times in {mutation.file or 'no file'}"]
    faults += [f"there is no {name}" for name in mutation.tests if not (ROOT / name).exists()]
    faults += [] if mutation.tests else ["it names no tests"]
    if mutation.killer and not faults:
        paths = [path for name in mutation.tests for path in [ROOT / name, *(ROOT / name).rglob("*.py")]]
        texts = (path.read_text() for path in paths if path.is_file())
        defined = any(re.search(rf"\bdef {mutation.killer}\b", text) for text in texts)
        faults += [] if defined else [f"its tests have no {mutation.killer}"]
    return faults + (["it changes nothing"] if mutation.old == mutation.new else [])


def run_tests(tree: Path, arguments: Sequence[str], marks: str, limit: float) -> Outcome:
    """Run tests in this tree up to the first failure. More than ``limit`` seconds are a failure, too."""
    # bytecode is found by the second and the size of a file; a run takes longer, so that no two mutations are alike
    environment = os.environ | {"PYTHONPATH": str(tree)}
    command = [sys.executable, "-m", "pytest", "-q", "-m", marks, "-p", "no:cacheprovider", *arguments]
    begin = time.monotonic()
    with subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit)
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as error:
            os.killpg(process.pid, signal.SIGKILL)  # also processes that tests have started
            process.communicate()
            if isinstance(error, KeyboardInterrupt):
                raise
            return Outcome(-1, f"a test that took longer than {limit:.0f} s", time.monotonic() - begin)
    failed = re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", output, flags=re.MULTILINE)
    if not failed and process.returncode not in (0, NOTHING_CHOSEN):
        failed = [f"pytest itself, which returned {process.returncode}: {output[-500:]}"]
    return Outcome(process.returncode, failed[0] if failed else "", time.monotonic() - begin)


def outcome_of(mutation: Mutation, tree: Path, marks: str, whole: bool, limit: float) -> Outcome:
    """What the tests show with this mutation in the tree; they are tried in order of how likely they fail."""
    path = tree / mutation.file
    before = path.read_text()
    tries = [[*mutation.tests, "-k", mutation.killer]] if mutation.killer else []
    tries += [list(mutation.tests)] + [["tests"]] * whole
    seconds, outcome = 0.0, Outcome(0, "", 0.0)
    path.write_text(before.replace(mutation.old, mutation.new))
    try:
        for arguments in tries:
            outcome = run_tests(tree, ["-x", *arguments], marks, limit)
            seconds += outcome.seconds
            if outcome.failed:
                break
    finally:
        path.write_text(before)
    return outcome._replace(seconds=seconds)


def function_of(test: str) -> str:
    """The function of a test, without its file and parameters; empty for another failure."""
    found = re.search(r"::(\w+)(?:\[|$)", test)
    return found[1] if found else ""


def record(killers: dict[str, str]) -> None:
    """Write the names of the functions that have failed into the list, by title."""
    parts = re.split(r"^(== .*\n)", LIST.read_text(), flags=re.MULTILINE)
    for place in range(1, len(parts), 2):
        name = killers.get(parts[place].removeprefix("== ").strip())
        if name:
            rest = re.sub(r"^killer .*\n", "", parts[place + 1], count=1, flags=re.MULTILINE)
            parts[place + 1] = re.sub(r"^(tests .*\n)", rf"\1killer {name}\n", rest, count=1, flags=re.MULTILINE)
    LIST.write_text("".join(parts))


def main() -> int:
    """Try the mutations, and print a table. Returns 1 if one has survived or a test fails without it."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", help="a regular expression that titles must contain")
    parser.add_argument("--marks", default="not slow", help="the tests to run, as for pytest -m")
    parser.add_argument("--whole", action="store_true", help="run all tests for what survives the tests tried first")
    parser.add_argument("--record", action="store_true", help="write the functions that failed into the list")
    parser.add_argument("--list", action="store_true", help="print the list, check that it is not stale, and end")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds of a run of tests, at most")
    options = parser.parse_args()
    if stale := stale_entries():
        print(f"{LIST.name} is stale:", *stale, sep="\n  ")
        return 2
    chosen = [mutation for mutation in mutations() if re.search(options.only, mutation.title)]
    if options.list:
        print(*(f"{mutation.title} ({mutation.file})" for mutation in chosen), sep="\n")
        return 0
    killers: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*NOT_COPIED))
        for number, mutation in enumerate(chosen, 1):
            found = outcome_of(mutation, tree, options.marks, options.whole, options.limit)
            said = found.failed or f"survived {'all tests' if options.whole else 'the files tried first'}"
            print(f"{number:2} {mutation.title}\n     {said}, {found.seconds:.0f} s", flush=True)
            if found.failed:
                killers[mutation.title] = found.failed
        ids = sorted({test for test in killers.values() if function_of(test)})
        alone = run_tests(tree, ids, options.marks, options.limit) if ids else Outcome(0, "", 0.0)
    if options.record:
        record({title: function_of(test) for title, test in killers.items()})
    if alone.failed:
        print(f"fails without a mutation as well: {alone.failed}")
    print(f"{len(killers)} of {len(chosen)} killed")
    return int(bool(alone.failed) or len(killers) < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
