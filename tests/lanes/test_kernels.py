"""Each registered kernel with the 32 lanes of a GPU: the results of a CPU, and the same bits in each order of lanes.

Kernels without lanes run in the blocks that they have on a GPU.
"""

import pytest
import torch

from nvalchemiops.cli import all_kernels
from nvalchemiops.interactions.pair import moments as moment_kernels
from nvalchemiops.interactions.pair import sum as pair_kernels
from nvalchemiops.launch import registered_kernels
from nvalchemiops.loading import is_cpu_only
from nvalchemiops.neighbors import nearest
from tests.lanes.fibers import ORDERS, gpu_layout
from tests.lanes.problems import (
    CPU_ONLY,
    KERNELS,
    MOMENTS,
    RUNS,
    is_for_a_cpu,
    kernels_by_problem,
    moment_sums,
    nearest_searches,
    pair_sums,
    searches_near_the_cutoff,
)
from tests.routes.test_pair_on_gpu import VARIANTS

ACCURACY = {"float64": 1e-13, "float32": 1e-5}

FOR_A_CPU = [build for name, build in registered_kernels() if is_for_a_cpu(name)]


def test_each_registered_kernel_is_run():
    """A new kernel needs a line in `RUNS`."""
    # those of the library: tests register kernels, too
    names = [name for name, build in all_kernels() if build.func.__module__.startswith("nvalchemiops.")]
    assert {name.partition("(")[0] for name in names} == CPU_ONLY | set(RUNS)
    assert all(is_cpu_only(build()) == is_for_a_cpu(name) for name, build in registered_kernels() if name in names)
    assert set(KERNELS) == {name for name in names if not is_for_a_cpu(name)}


def assert_same(found, expected, accuracy):
    """Up to so much of the largest number, and NaN where that is."""
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan())
        a, b = (t.double().nan_to_num(nan=0.0) for t in (a, b))
        assert (a - b).abs().max() <= accuracy * b.abs().max() if a.numel() else True


@pytest.mark.parametrize(
    ("problem", "names"), kernels_by_problem().items(), ids=map(", ".join, kernels_by_problem().values())
)
def test_lanes_compute_what_a_cpu_does(problem, names):
    make, *arguments = problem
    check(
        make(*arguments),
        [KERNELS[name]() for name in names],
        "float32" if "float32" in names[0] else "float64",
        has_nan=names[0].startswith(("measure_pairs", "usable_cells")),
    )


def test_a_warp_selects_the_nearest_neighbors_of_several_rows(monkeypatch):
    problem = nearest_searches()
    expected = problem()
    monkeypatch.setattr(nearest, "tasks_at_once", lambda multiprocessors: 7)
    with gpu_layout():
        assert_same(problem(), expected, 0.0)


def test_a_warp_tells_neighbors_as_exactly_as_a_cpu():
    problem = searches_near_the_cutoff()
    expected = problem()
    with gpu_layout():
        assert_same(problem(), expected, 0.0)


@pytest.mark.parametrize("name", VARIANTS)
def test_generated_kernels_compute_what_a_cpu_does(name):
    """Kernels that are not registered: other formulas, directions, tables and exclusions."""
    variant = VARIANTS[name]._replace(precision="float64")  # one has a pole, near which float32 has no digits
    check(pair_sums(variant), [pair_kernels.pair_kernel(variant)], "float64")


def test_generated_kernels_of_moments_compute_what_a_cpu_does():
    check(moment_sums(MOMENTS), [moment_kernels.moment_kernel(MOMENTS)], "float64")


def check(problem, kernels, precision, has_nan=False):
    expected = problem()
    assert has_nan or all(result.isfinite().all() for result in expected)
    bits = None
    for order in ORDERS:
        with gpu_layout(order) as launched:
            found = problem()
        assert set(kernels) <= launched and not {build() for build in FOR_A_CPU} & launched
        if bits is None:
            assert_same(found, expected, ACCURACY[precision])
            bits = found
        assert_same(found, bits, 0.0)
