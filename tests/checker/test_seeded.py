"""The checker finds each fault that is put into a kernel, says where, and outlives it."""

import subprocess

import pytest

from tests.checker.build import IS_POSSIBLE, NOT_HERE
from tests.checker.seeded import CRASHES, LIBRARY, SEEDED
from tests.support.processes import python_says, run_interpreter

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not IS_POSSIBLE, reason=NOT_HERE)]


@pytest.fixture(scope="module")
def found():
    return python_says("from tests.checker.seeded import main; main()")


@pytest.mark.parametrize("name", SEEDED)
def test_a_seeded_fault_is_found(found, name):
    fault, expected = found[name], SEEDED[name][2]
    if expected is None:
        assert fault is None
        return
    kind, text, lane, part = expected
    assert fault is not None and fault["kind"] == kind, fault
    assert text in fault["text"] and fault["line"] > 0, fault
    assert part in fault["message"], fault
    assert fault["lane"] == lane if lane is not None else 0 <= fault["lane"] < 32, fault


@pytest.mark.parametrize("name", LIBRARY)
def test_a_fault_in_a_kernel_of_the_library_is_found(found, name):
    fault, (kind, text, lane) = found[name], LIBRARY[name][1]
    assert fault is not None and fault["kind"] == kind, fault
    assert text in fault["text"] and fault["line"] > 0, fault
    assert fault["lane"] == lane if lane is not None else 0 <= fault["lane"] < 32, fault


def test_a_crash_ends_only_the_process_that_is_checked():
    done = run_interpreter("-m", "tests.checker.seeded", "a trap")
    assert done.returncode < 0 and "a trap" in CRASHES


def test_a_launch_without_an_end_is_ended():
    with pytest.raises(subprocess.TimeoutExpired):
        run_interpreter("-m", "tests.checker.seeded", "no end", timeout=30)


def test_a_function_that_is_not_known_is_not_compiled():
    done = run_interpreter("-m", "tests.checker.seeded", "an unknown function")
    assert done.returncode == 1 and "the checker cannot compile" in done.stderr and "__nanosleep" in done.stderr
