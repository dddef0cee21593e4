"""Pair potentials on a GPU, or on a CPU with the layout of one."""

import pytest
import torch
import warp as wp

from nvalchemiops.interactions.pair import sum as source
from nvalchemiops.interactions.pair.derivatives import Request
from nvalchemiops.interactions.pair.expression import Formula
from nvalchemiops.interactions.pair.potentials import DSF
from nvalchemiops.torch.interactions.pair import PairPotential, damped_shifted_force, lennard_jones
from nvalchemiops.torch.neighbors import neighbor_list
from tests.support.gpu import assert_equal, assert_replays, waiting_is_an_error, with_derivatives
from tests.support.systems import batch, crystal, triclinic

TWO = batch(triclinic(6, charged=True), crystal("rocksalt", 5.6, 2, 0.2))
EVERYTHING = {"compute_forces": True, "compute_virial": True}

TABLES = PairPotential("c*exp(-a*r) + q1*q2*erf(r)/r", ("q",), (), ("c", "a"), cutoff=5.0, r_switch=4.0)
TABLE = torch.tensor([[1.0, 2.0], [2.0, 0.5]], dtype=torch.float64)
EXCLUDED = {
    "exclusions": torch.tensor([[0, 1], [2, 4]]),
    "exclusion_factors": torch.tensor([0.0, 0.5], dtype=torch.float64),
}


def results(device, dtype=torch.float64):
    """Energies and first and second derivatives of potentials that between them use all parts of the kernel."""
    system = TWO.to(dtype).to(device)
    x, q, cell = (t.clone().requires_grad_() for t in system[:3])
    matrix, _, shifts = neighbor_list(x.detach(), 6.0, cell.detach(), batch_idx=system.batch_idx)
    near = {"neighbor_matrix": matrix, "neighbor_matrix_shifts": shifts, "batch_idx": system.batch_idx}
    table = TABLE.to(dtype).to(device)
    species = (torch.arange(len(q), device=device) % 2).int()
    excluded = {name: value.to(device) for name, value in EXCLUDED.items()}
    calls = [
        damped_shifted_force(5.0)(x, cell, q=q, alpha=0.3, **near, **EVERYTHING, compute_gradients=["q", "alpha"]),
        lennard_jones(5.0, r_switch=4.0)(x, cell, sigma=1.7, epsilon=0.1, **near, **EVERYTHING, **excluded),
        TABLES(x, cell, q=q, c=table, a=table, species=species, **near, **EVERYTHING, compute_gradients=["c"]),
    ]
    found = [r for call in calls for r in call]
    return with_derivatives(found, (x, q, cell))


def test_gpu_equals_cpu(dtype, gpu):
    expected = results(torch.device("cpu"))
    found = gpu(lambda device: results(device, dtype))
    # second derivatives in single precision lose digits to the steepness of the potentials
    assert_equal(found, expected, 1e-11 if dtype is torch.float64 else 2e-3)


def test_bits_repeat_on_a_gpu(gpu):
    gpu.assert_bits_repeat(results)


@pytest.mark.gpu
def test_nothing_waits_and_a_graph_replays():
    system = TWO.to(torch.device("cuda"))
    matrix, _, shifts = neighbor_list(system.positions, 6.0, system.cell, batch_idx=system.batch_idx)
    near = {"neighbor_matrix": matrix, "neighbor_matrix_shifts": shifts, "batch_idx": system.batch_idx}
    potential = damped_shifted_force(5.0)
    x = system.positions.clone().requires_grad_()

    def step():
        energies, forces = potential(x, system.cell, q=system.charges, alpha=0.3, **near, compute_forces=True)
        # detached: a graph that is kept would tie the gradient of x to the stream of its first use
        return (*torch.autograd.grad(energies.sum() + forces.square().sum(), x), forces.detach())

    expected = step()
    with waiting_is_an_error():
        found = step()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert_replays(step, x)


WRONG = {0: 63, 3: 0, 7: 9, 8: 31, 11: 32}


def test_a_wrong_index_on_a_gpu_is_nan_not_a_crash(gpu):
    def energies(device):
        system = TWO.to(device)
        matrix, number, shifts = neighbor_list(system.positions, 6.0, system.cell, batch_idx=system.batch_idx)
        for atom, slot in WRONG.items():  # seen by another lane each
            assert slot < number[atom]
            matrix[atom, slot] = 10**6
        potential = damped_shifted_force(5.0)
        near = {"neighbor_matrix": matrix, "neighbor_matrix_shifts": shifts, "batch_idx": system.batch_idx}
        return [potential(system.positions, system.cell, q=system.charges, alpha=0.3, **near)]

    assert gpu(energies)[0].isnan().nonzero().flatten().tolist() == list(WRONG)


# -- without a GPU --------------------------------------------------------------------------------

VARIANTS = {
    "all directions, float32": source.Variant(Request(DSF, ("rcpgw", "rw"), "wrcpg", True, True), "float32", True, 0),
    "tables, open": source.Variant(Request(TABLES.formula, (), "wrp"), "float64", False, 3),
    "every function": source.Variant(
        Request(
            Formula(
                "log(r) + sin(r) + cos(r) + tan(r) + asin(r/9) + acos(r/9) + atan(r) + sinh(r) + cosh(r) + tanh(r) "
                "+ sqrt(r) + exp(-r) + erf(r) + erfc(r) + erfcx(r) + r^a + abs(r - 1) + min(r, 2) + max(r, 3) "
                "+ select(step(r), r, 1)",
                (),
                ("a",),
            ),
            ("r",),
            "wrg",
        ),
        "float32",
        True,
        0,
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_kernels_compile_for_a_gpu(name, tmp_path):
    wp.compile_aot_module(source.pair_kernel(VARIANTS[name]).module, arch=90, module_dir=tmp_path)
    assert list(tmp_path.glob("*.cubin"))
