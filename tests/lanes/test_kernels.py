"""Each registered kernel with the 32 lanes of a GPU: the results of a CPU, and the same bits in each order of lanes.

Kernels without lanes run in the blocks that they have on a GPU.
"""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import nvalchemiops.torch.ops  # noqa: F401  # all operators, and with them all kernels
from nvalchemiops.cli import all_kernels
from nvalchemiops.interactions.pair import moments as moment_kernels
from nvalchemiops.interactions.pair import sum as pair_kernels
from nvalchemiops.launch import registered_kernels
from nvalchemiops.loading import is_cpu_only
from nvalchemiops.neighbors import nearest
from nvalchemiops.torch.operators.fourier import fourier_gather, fourier_spread
from tests.lanes.fibers import ORDERS, gpu_layout
from tests.lanes.problems import (
    MOMENTS,
    Problem,
    chains,
    coefficients,
    coordinates,
    distances,
    fourier,
    influences,
    inspections,
    inverted_cells,
    judged_cells,
    lattices,
    moment_sums,
    nearest_searches,
    noise,
    pair_sums,
    row_counts,
    searches,
    searches_near_the_cutoff,
    sorted_rows,
    splines,
    system_totals,
    triples,
    uncounted_systems,
)
from tests.routes.test_pair_on_gpu import VARIANTS

CPU_ONLY = {"prepare_search", "sort_atoms", "end_rows", "compact_neighbors", "program_kernel", "stale_kernel"}
"""Kernels for the layout of a CPU, which on a GPU nothing launches."""

ACCURACY = {"float64": 1e-13, "float32": 1e-5}

RUNS: dict[str, Callable[..., Problem]] = {
    "pair_kernel": pair_sums,
    "moment_kernel": moment_sums,
    "three_body": triples,
    "coefficients": coefficients,
    "measure_pairs": distances,
    "inspect_rows": inspections,
    "search_neighbors": searches,
    "search_nearest": nearest_searches,
    "describe_systems": searches,
    "locate_atoms": searches,
    "place_atoms": searches,
    "number_systems": uncounted_systems,
    "shortest_vectors": lattices,
    "usable_cells": judged_cells,
    "lattice_geometry": inverted_cells,
    "transform_vectors": coordinates,
    "tabulate_influence": influences,
    "phase_tables": lambda: fourier(fourier_spread, 1),
    "fourier_coefficients": lambda: fourier(fourier_gather, 1),
    "fourier_spread": lambda derivatives: fourier(fourier_spread, derivatives),
    "fourier_gather": lambda derivatives: fourier(fourier_gather, derivatives),
    "find_columns": splines,
    "spline_stencils": splines,
    "spline_spread": splines,
    "spline_gather": splines,
    "begin_rows": sorted_rows,
    "add_counts": row_counts,
    "sum_rows": system_totals,
    "chain_kernel": chains,
    "normal_numbers": noise,
    "chi_square_numbers": noise,
}
"""What runs the variants of each kernel."""


def is_for_a_cpu(name):
    return name.partition("(")[0] in CPU_ONLY


FOR_A_CPU = [build for name, build in registered_kernels() if is_for_a_cpu(name)]
KERNELS = {
    name: build for name, build in registered_kernels() if name.partition("(")[0] in RUNS and not is_for_a_cpu(name)
}


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


def kernels_by_problem() -> dict[tuple[Any, ...], list[str]]:
    """Which kernels the same problem runs."""
    found: dict[tuple[Any, ...], list[str]] = {}
    for name, build in KERNELS.items():
        problem = RUNS[name.partition("(")[0]]
        arguments = inspect.signature(problem).bind(*build.args)
        arguments.apply_defaults()
        found.setdefault((problem, *arguments.args), []).append(name)
    return found


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
