"""What users build with the library. Models are those of the examples, which are imported from their files."""

import functools
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from tests.support.processes import run_interpreter

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@functools.cache
def example(name: str) -> ModuleType:
    """The example ``name``.py as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def said_by(name: str, *options: str) -> str:
    """What the example prints when it runs as users run it; it must end well and say nothing else."""
    # torch's warning of Python 3.13.0
    run = run_interpreter(EXAMPLES / f"{name}.py", *options, PYTHONWARNINGS="ignore:Guards may run slower")
    assert run.returncode == 0 and not run.stderr.strip(), run.stdout + run.stderr
    return run.stdout
