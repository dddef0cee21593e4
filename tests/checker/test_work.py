"""No lane of a GPU has many times the work of the others."""

import pytest

from tests.checker.build import IS_POSSIBLE, NOT_HERE
from tests.support.processes import python_says

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not IS_POSSIBLE, reason=NOT_HERE)]

SYSTEMS_OF_1000 = ("1,000 atoms", "10 systems of 1,000")

MOST = 8.0
"""Times the mean over the lanes of a launch that the longest of them may have to do."""

MOST_ACCESSES = 4096
"""Accesses to arrays of one lane, at most: a launch of few lanes may be even, and slow."""

OF_SYSTEM = "a thread for each system, with at most 28 accesses: one of them alone is a warp of one lane"
UNEVEN = {"describe_systems": OF_SYSTEM, "usable_cells": OF_SYSTEM, "lattice_geometry": OF_SYSTEM}
"""Kernels that may have more, and why."""


@pytest.mark.parametrize("name", SYSTEMS_OF_1000)
def test_no_lane_has_many_times_the_work_of_the_others(name):
    code = f"""
        import json, sys
        import warp
        warp.config.quiet = True
        from tests.checker.work import SYSTEMS, kernel_of, ratio, work_of
        done = work_of(SYSTEMS[{name!r}](), derivatives=True)
        print(json.dumps([(kernel_of(w), w.longest, ratio(w)) for w in done]))
    """
    done = python_says(code, timeout=900)
    kernels = {kernel for kernel, _, _ in done}
    assert {"neighbor_search", "pair_sum", "sum_rows", "spline_gather", "fourier_spread", "three_body"} <= kernels
    assert [launch for launch in done if launch[2] > MOST and launch[0] not in UNEVEN] == []
    assert [launch for launch in done if launch[1] > MOST_ACCESSES] == []
