"""Python code in other processes, and in several threads at once."""

import functools
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def variables(environment):
    """Those of this process with changes; None takes one away."""
    every = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return {name: str(value) for name, value in every.items() if value is not None}


def run_interpreter(*arguments, cwd=ROOT, timeout=300, preexec_fn=None, **environment):
    """A finished process that has imported nothing at its start."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=variables(environment),
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
        preexec_fn=preexec_fn,
    )


# The copy leaves the loop, so that it ends as any interpreter does.
TEMPLATE = """
import json, os, signal, sys

import torch, warp

for line in sys.stdin:
    code, sys.argv[1:], environment, folder, timeout, *files = json.loads(line)
    if (child := os.fork()) == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    os._exit(0)
signal.alarm(timeout)
os.environ.clear()
os.environ.update(environment)
os.chdir(folder)
for number, name in enumerate((os.devnull, *files)):
    os.dup2(os.open(name, os.O_RDWR), number)
exec(code, {"__name__": "__main__"})
"""


@functools.cache
def template():
    """A process that has imported torch and Warp and waits: to import them takes longer than most that tests do."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", TEMPLATE], env=variables({}), cwd=ROOT, **pipes)


def run_python(code, *arguments, fresh=False, cwd=ROOT, timeout=300, **options):
    """Code in a copy of `template`; in a ``fresh`` interpreter where imports, or what it reads at its start, matter."""
    code, arguments = textwrap.dedent(code), [*map(str, arguments)]
    if fresh:
        return run_interpreter("-c", code, *arguments, cwd=cwd, timeout=timeout, **options)
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as error:
        asked = code, arguments, variables(options), str(cwd), timeout, out.name, error.name
        print(json.dumps(asked), file=template().stdin, flush=True)
        return subprocess.CompletedProcess(code, int(template().stdout.readline()), out.read(), error.read())


def run_script(path, *arguments, **options):
    """A file, by `run_python`."""
    code = f"import runpy, sys; sys.argv[0] = {str(path)!r}; runpy.run_path(sys.argv[0], run_name='__main__')"
    return run_python(code, *arguments, **options)


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
    """``python -m nvalchemiops`` in another process, as the command silences Warp there."""
    code = "import runpy; runpy.run_module('nvalchemiops', run_name='__main__', alter_sys=True)"
    return run_python(code, *arguments, timeout=600, **environment)
