"""Shared fixtures. Kernels compile into Warp's usual cache (or WARP_CACHE_PATH), which all workers share."""

import faulthandler
import gc
import os
import sys
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

# One compile process per test worker is plenty on the machines that run this.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# A cached joint graph does not know that the formula of one of our operators was edited.
os.environ.setdefault("TORCHINDUCTOR_AUTOGRAD_CACHE", "0")
# The threads of NumPy's and SciPy's BLAS spin: with two workers on two cores they take ten times as long for matrices
# of 3 x 3, as in ASE's cell filters. Read when NumPy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Those of OpenMP spin as well, between the parts that they share. Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# JAX takes most of a GPU's memory in each process, so that nothing is left for torch and the other workers.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Parameters are chosen alike on all machines, whatever `nvalchemiops tune` found there.
os.environ.setdefault("NVALCHEMIOPS_COSTS", "")

import hypothesis
import pytest
import torch

# Containers often switch bytecode off. Then each worker rewrites the asserts of all tests again, for ten seconds, and
# each process that a test starts compiles the library.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, max_examples=25, database=None)
hypothesis.settings.register_profile("long", deadline=None, max_examples=500, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

NO_GPU = "no GPU: torch.cuda.is_available() is False"
TORCH = tuple(int(number) for number in torch.__version__.split(".")[:2])


def pytest_configure(config: pytest.Config) -> None:
    # Two workers share two cores. Tests about threads set their own number and put this one back.
    torch.set_num_threads(1)


def mark_later(items: list[pytest.Item]) -> list[str]:
    """By what `later_cases` and `everyday_cases` say; returns the ids that no case has."""
    found: dict[tuple[Path, str, str], bool] = {}
    for item in items:
        for name in ("later_cases", "everyday_cases"):
            for marker in item.iter_markers(name):
                fits = {wanted: fnmatchcase(item.callspec.id, wanted) for wanted in marker.args}
                for wanted, does in fits.items():
                    key = (item.path, item.originalname, wanted)
                    found[key] = does or found.get(key, False)
                if any(fits.values()) == (name == "later_cases"):
                    item.add_marker(pytest.mark.later)
    return [f"{path.name}, {test}: {wanted}" for (path, test, wanted), is_there in found.items() if not is_there]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    unknown = mark_later(items)
    if unknown and not config.getoption("lf", False) and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"no such cases: {unknown}")
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason=NO_GPU))
    for item in items:
        for marker in item.iter_markers("since_torch"):
            needed, reason = marker.args
            if TORCH < tuple(map(int, needed.split("."))):
                item.add_marker(pytest.mark.skip(reason=f"torch {needed} is needed: {reason}"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    # Most of what is made here stays. Looking for garbage takes each worker a third of the time of this phase.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    # Modules and tests stay to the end. A test that collects garbage would look through all of them, for half a second.
    gc.collect()
    gc.freeze()
    # A compiler makes many objects, most of which stay.
    gc.set_threshold(10_000)


@pytest.fixture(autouse=True)
def _no_plans_of_other_tests() -> None:
    """Tests count plans, and a plan of an earlier test would not call the parts of the library that a test replaces."""
    tables = sys.modules.get("nvalchemiops.torch.runtime.tables")
    if tables is not None:
        tables.everywhere.clear()
        tables.everywhere.recorded = tables.everywhere.replayed = 0


@pytest.fixture(params=["cpu", "lanes", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Each device; "lanes" is the CPU with the layout of a GPU."""
    from tests.lanes.fibers import gpu_layout  # imports the library

    if request.param == "lanes":
        with gpu_layout():
            yield torch.device("cpu")
    else:
        yield torch.device(request.param)


@pytest.fixture(params=["lanes", pytest.param("cuda", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest) -> Any:
    """`tests.support.gpu.OnGpu`: a GPU, or the CPU with the layout of one."""
    from tests.support.gpu import OnGpu

    return OnGpu(request.param)


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """Keyword arguments for ``torch.testing.assert_close`` and ``numpy.testing.assert_allclose``."""
    return {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.float64: {"rtol": 1e-10, "atol": 1e-10}}[dtype]


@pytest.fixture
def not_crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use threads however busy the machine is."""
    monkeypatch.setattr("nvalchemiops.crowding.Crowding.is_crowded", lambda _: False)
    monkeypatch.setattr("nvalchemiops.crowding.Crowding.threads_gain", lambda _: True)


@pytest.fixture
def always_split(not_crowded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Split from the second launch on, however short it was, and however busy the machine is."""
    monkeypatch.setattr("nvalchemiops.launch.MINIMUM_CHUNK", 1e-15)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Set the number of CPU threads; the old one comes back afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def no_hanging() -> Iterator[None]:
    """An example that hangs in a kernel cannot be interrupted; the whole process can."""
    from tests.support.campaigns import LONG, PATIENCE  # imports the library

    faulthandler.dump_traceback_later(PATIENCE * (30.0 if LONG else 1.0), exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def _forget_compiled_graphs() -> Iterator[None]:
    """Leave no compiled graph and no recompile count to the next test.

    Costs nothing until something is compiled: torch imports its compiler with the first use.
    """
    yield
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
        # For a log, torch times the guards of each graph, and before that empties the processor's caches, in 20 ms.
        sys.modules["torch._dynamo.guards"].__dict__["profile_guard_manager"] = lambda *_: 0.0
