"""The calls of `tests.support.cases` with 32 lanes: results, and first and second derivatives, are those of a CPU."""

import pytest
import torch

from tests.lanes.fibers import gpu_layout
from tests.support.cases import EACH, MIXED, ONE, Inputs
from tests.support.gpu import assert_equal, with_derivatives
from tests.support.systems import no_atoms, one_atom

ACCURACY = {torch.float64: 1e-12, torch.float32: 2e-3}
"""Of second derivatives, in which sums of large numbers cancel, and inverses of cells come from another formula."""


def results(case, system, dtype=torch.float64):
    inputs = Inputs(*(t.to(dtype) for t in case.inputs(system))).leaves()
    near = case.near(system)
    found = case.results(*inputs, near)
    if case.name.startswith("D3"):  # deriving the expressions of the second derivatives takes a minute
        return [r.detach() for r in (*found, *torch.autograd.grad(found[0].square().sum(), (inputs.x, inputs.cell)))]
    return with_derivatives(found, inputs[:3] if case.name == "slab" else inputs)


@pytest.mark.parametrize("system", [ONE, MIXED], ids=["one", "batch"])
@EACH
def test_results_and_derivatives_are_those_of_a_cpu(case, system, dtype):
    expected = results(case, system)
    with gpu_layout() as launched:
        found = results(case, system, dtype)
    assert launched and all(r.isfinite().all() for r in expected)
    assert_equal(found, expected, ACCURACY[dtype], least=1e-3)


@pytest.mark.parametrize("make", [no_atoms, one_atom])
@EACH
def test_systems_without_pairs(case, make):
    system = make()
    inputs, near = case.inputs(system), case.near(system)
    expected = case.results(*inputs, near)
    with gpu_layout():
        found = case.results(*inputs, near)
    assert_equal([f for f in found if f.numel()], [e for e in expected if e.numel()], 1e-13)
