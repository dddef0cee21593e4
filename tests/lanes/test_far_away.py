"""Addresses near the end of what 32 bits can count are right, with the lanes of a GPU and on a CPU."""

import json
from collections.abc import Callable

import pytest
import torch

from nvalchemiops.interactions.pair.derivatives import Request
from nvalchemiops.interactions.pair.potentials import DSF
from nvalchemiops.interactions.pair.sum import Variant
from nvalchemiops.kernels.noise import chi_square_numbers
from nvalchemiops.torch.launch import launch
from nvalchemiops.torch.operators.fourier import fourier_gather, fourier_spread
from tests.lanes import problems as lanes
from tests.lanes.far_away import MOVED, SPLINE_ORDER
from tests.routes.test_pair_on_gpu import VARIANTS
from tests.support.processes import output_of, run_interpreter


def few_in_fourier_space(op) -> lanes.Problem:
    """One system and one channel, and too few atoms and points to be divided among threads."""
    n, ends = 12, lanes.pointers((12,))
    points = torch.stack([torch.full((n,), 2), torch.ones(n), torch.arange(n)], 1).int()
    order = torch.arange(n).flip(0).int()
    moments, field = lanes.random(n, 1, 4), lanes.random(1, n, 4, 2)
    plan = (3.0 * lanes.random(n, 3), order, ends, points, ends, 1)
    return lambda: [op(moments if op is fourier_spread else field, *plan)]


DIRECTION = Variant(Request(DSF, ("rcpgw",), "wrcpg", True, True), "float64", True, 0)
PROBLEMS: dict[str, Callable[[], lanes.Problem]] = {
    "pairs with a direction": lambda: lanes.pair_sums(DIRECTION),
    "pairs with tables": lambda: lanes.pair_sums(VARIANTS["tables, open"]),
    "moments": lambda: lanes.moment_sums(lanes.MOMENTS),
    "triples": lambda: lanes.triples("float64"),
    "coefficients": lambda: lanes.coefficients(1),
    "distances": lambda: lanes.distances("float64"),
    "inspections": lanes.inspections,
    "bins": lanes.searches,
    "searches": lanes.searches,
    "lattices": lanes.lattices,
    "chains": lanes.chains,
    "noise": lanes.noise,
    "spread at k-vectors": lambda: few_in_fourier_space(fourier_spread),
    "gather at k-vectors": lambda: few_in_fourier_space(fourier_gather),
    "splines": lambda: lanes.splines(SPLINE_ORDER, 1),
    "sums": lambda: lanes.system_totals("float64"),
}
"""What is launched, by name."""

GPU_ONLY = ("bins", "spread at k-vectors", "gather at k-vectors")
"""What a CPU does with other kernels, which only read in order."""

LEFT = {"bins": ("neighbor_search",)}
"""Kernels that are launched as they are."""


@pytest.fixture(scope="module")
def found():
    return json.loads(output_of(run_interpreter("-m", "tests.lanes.far_away", timeout=900)).splitlines()[-1])


RUNS = [f"{name} gpu" for name in PROBLEMS] + [f"{name} cpu" for name in PROBLEMS if name not in GPU_ONLY]


@pytest.mark.parametrize("name", RUNS)
def test_kernels_reach_what_is_far_away(found, name):
    """Each in a process of its own, which a wrong address ends."""
    assert found[name]["same"], found[name].get("error", "other results")
    assert found[name]["kernels"]


def test_each_kernel_is_launched_far_away(found):
    for way, missing in (("gpu", set()), ("cpu", {"place_atoms", "locate_atoms", "fourier_spread", "fourier_gather"})):
        launched = {kernel for name, said in found.items() if name.endswith(way) for kernel in said["kernels"]}
        assert launched | {"neighbor_search"} == set(MOVED) - missing


def test_an_axis_that_is_too_long_is_refused_by_name():
    """Its length would be another number in 32 bits."""
    seeds = torch.zeros(1, dtype=torch.int64)
    many = torch.zeros(1, dtype=torch.float64).expand(2**31)
    with pytest.raises(
        ValueError, match=r"`degrees_of_freedom`: shape \(2147483648,\) has more than 2147483647 elements"
    ):
        launch(chi_square_numbers(), 1, [seeds, seeds, seeds, many, 0], [torch.zeros(1, dtype=torch.float64)])
