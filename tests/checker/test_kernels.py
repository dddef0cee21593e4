"""All kernels that GPUs are given run without a fault: with all lanes, in three orders, on rows of many lengths."""

import json

import pytest

from tests.checker.build import IS_POSSIBLE, NOT_HERE
from tests.checker.programs import PROGRAMS
from tests.support.processes import output_of, run_interpreter

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not IS_POSSIBLE, reason=NOT_HERE)]


@pytest.mark.parametrize("program", PROGRAMS)
def test_nothing_is_found(program):
    """That problems of all kernels are among them, `tests/lanes/test_kernels.py` tests."""
    done = run_interpreter("-m", "tests.checker.programs", program, timeout=900)
    report = json.loads(output_of(done).splitlines()[-1])
    assert report["fault"] is None, report["fault"]
    assert report["launches"] > 0
