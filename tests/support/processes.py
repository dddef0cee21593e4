"""Python code in an interpreter that has imported nothing yet, and in several threads at once."""

import json
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_interpreter(*arguments, cwd=ROOT, timeout=300, preexec_fn=None, **environment):
    """A finished process; ``environment`` changes that of this one, None takes a variable away."""
    variables = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={name: str(value) for name, value in variables.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
        preexec_fn=preexec_fn,
    )


def run_python(code, *arguments, **options):
    return run_interpreter("-c", textwrap.dedent(code), *arguments, **options)


def output_of(finished):
    """What a process has printed; it must have ended well."""
    assert finished.returncode == 0, finished.stderr[-3000:]
    return finished.stdout


def python_says(code, *arguments, **options):
    """What it prints last, as JSON; it must end well."""
    return json.loads(output_of(run_python(code, *arguments, **options)).splitlines()[-1])


def said_by_mypy(program, text):
    """What mypy says about a program, line by line, without the last one; settings are those of the library."""
    program.write_text(text)
    options = ["--config-file", ROOT / "pyproject.toml", "--cache-dir", ROOT / ".mypy_cache"]
    return run_interpreter("-m", "mypy", *options, program).stdout.splitlines()[:-1]


def in_threads(work, arguments):
    """Results of ``work(argument)``, one thread each, all of them at once; an error in one of them is raised."""
    with ThreadPoolExecutor(len(arguments)) as pool:
        return list(pool.map(work, arguments))


def command(*arguments, **environment):
    """``python -m nvalchemiops`` in a process of its own, as the command silences Warp there."""
    return run_interpreter("-m", "nvalchemiops", *arguments, timeout=600, **environment)
