"""Energies of charges as clients call for them (../shared/clients.md), in the shape of their own calls."""

from typing import Any

import pytest
import torch

from nvalchemiops.torch import spline
from nvalchemiops.torch.interactions import electrostatics
from nvalchemiops.torch.interactions.lj import lj_energy
from nvalchemiops.torch.interactions.pair import lennard_jones
from nvalchemiops.torch.neighbors import neighbor_list
from tests.systems import batch, crystal, triclinic

MESH = (6, 7, 8)


# -- AIMNet: charges that depend on positions -----------------------------------------------------


def charges_of(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Charges of a model: smooth functions of the distances to the other atoms of a molecule, neutral in all."""
    d = (x.unsqueeze(1) - x.unsqueeze(0)).square().sum(-1)
    q = scale * torch.exp(-0.1 * d).sum(1).sin()
    return q - q.mean()


SUMS: dict[str, tuple[Any, Any]] = {
    "PME": (electrostatics.particle_mesh_ewald, electrostatics.estimate_pme_parameters),
    "Ewald": (electrostatics.ewald_summation, electrostatics.estimate_ewald_parameters),
}


@pytest.fixture(params=SUMS)
def energy_of_model(request):
    """A system, and its energy with all of positions, charges and cell in the graph, as AIMNet's long-range module."""
    function, estimate = SUMS[request.param]
    system, accuracy = crystal("rocksalt", 5.6, 1, 0.15), 1e-5
    x, cell, n = system.positions, system.cell.reshape(1, 3, 3), len(system.charges)
    batch_idx = torch.zeros(n, dtype=torch.int32)
    cutoff = float(estimate(x, cell, batch_idx, accuracy).real_space_cutoff.max())
    # atoms move by less than a hundredth: the reach of the list is that of the estimate throughout
    matrix, _, shifts = neighbor_list(x, cutoff + 0.05, cell, batch_idx=batch_idx)
    given = {"neighbor_matrix": matrix, "neighbor_matrix_shifts": shifts, "mask_value": n, "batch_idx": batch_idx}
    scale = 1.0 + 0.1 * torch.arange(n, dtype=torch.float64)

    def energy(x: torch.Tensor, cell: torch.Tensor = cell) -> torch.Tensor:
        return function(x, charges_of(x, scale), cell, accuracy=accuracy, **given).sum()

    return x, cell, energy


def test_forces_and_hessians_with_charges_that_depend_on_positions(energy_of_model):
    """Through ``create_graph``: the whole force, the charges' share counted once, and its derivative.

    Without alpha the sums look at the forces when they choose it, so differences hold as far as the accuracy does.
    """
    x, cell, energy = energy_of_model
    direction = torch.sin(torch.arange(x.numel(), dtype=torch.float64)).view_as(x)

    def force(x: torch.Tensor, cell: torch.Tensor = cell) -> torch.Tensor:
        leaf = x.detach().requires_grad_()
        return -torch.autograd.grad(energy(leaf, cell), leaf, create_graph=True)[0]

    leaf = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(energy(leaf), leaf, create_graph=True)
    (curvature,) = torch.autograd.grad((slope * direction).sum(), leaf)
    step = 1e-4
    ahead, behind = x + step * direction, x - step * direction
    expected = (energy(ahead) - energy(behind)) / (2 * step)
    torch.testing.assert_close((slope * direction).sum(), expected, rtol=1e-4, atol=1e-5)
    expected = (force(behind) - force(ahead)).detach() / (2 * step)
    torch.testing.assert_close(curvature, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))

    strained = cell.clone().requires_grad_()
    (by_cell,) = torch.autograd.grad(energy(x, strained), strained, create_graph=True)
    change = torch.cos(torch.arange(9, dtype=torch.float64)).view_as(cell)
    expected = (energy(x, cell + step * change) - energy(x, cell - step * change)) / (2 * step)
    torch.testing.assert_close((by_cell * change).sum(), expected, rtol=1e-4, atol=1e-5)


# -- AIMNet: damped shifted forces ----------------------------------------------------------------


# -- shifts without a cell ------------------------------------------------------------------------

OPEN = crystal("rocksalt", 5.6, 1, 0.15)
OPEN_PAIRS, OPEN_PTR = neighbor_list(OPEN.positions, 4.0, return_neighbor_list=True)
OPEN_MATRIX, _ = neighbor_list(OPEN.positions, 4.0)


def without_cell(op: str, form: str, shift: int, place: int = 0) -> Any:
    """A call without a cell, with zeros for shifts but for one number."""
    x, q = OPEN.positions, OPEN.charges
    if form == "list":
        shifts = torch.zeros(OPEN_PAIRS.shape[1], 3, dtype=torch.int32)
        shifts[place, 1] = shift
        name = "unit_shifts" if op == "DSF" else "neighbor_shifts"
        given = {"neighbor_list": OPEN_PAIRS, "neighbor_ptr": OPEN_PTR, name: shifts}
    else:
        shifts = torch.zeros(*OPEN_MATRIX.shape, 3, dtype=torch.int32)
        shifts[0, place, 1] = shift
        given = {"neighbor_matrix": OPEN_MATRIX, "neighbor_matrix_shifts": shifts}
    if op == "DSF":
        return electrostatics.dsf_coulomb(x, q, 4.0, **given)[0]
    if op == "Coulomb":
        return electrostatics.coulomb_energy(x, q, None, 4.0, **given)
    return lennard_jones(4.0)(x, sigma=2.0, epsilon=0.1, **given)


EXPECTED = {
    "DSF": lambda: electrostatics.dsf_coulomb(OPEN.positions, OPEN.charges, 4.0)[0],
    "Coulomb": lambda: electrostatics.coulomb_energy(OPEN.positions, OPEN.charges, None, 4.0),
    "Lennard-Jones": lambda: lj_energy(OPEN.positions, 2.0, 0.1, 4.0),
}


@pytest.mark.parametrize("form", ["list", "matrix"])
@pytest.mark.parametrize("op", EXPECTED)
def test_shifts_without_a_cell_are_zeros(op, form):
    """As fairchem and torch-sim pass them. Others say that a cell is missing; where nobody reads them they give NaN."""
    torch.testing.assert_close(without_cell(op, form, 0), EXPECTED[op](), rtol=1e-13, atol=1e-13)
    with pytest.raises(ValueError, match=r"`cell` is needed with `\w+_shifts`"):
        without_cell(op, form, 1)
    compiled = torch.compile(without_cell, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(op, form, 0), EXPECTED[op](), rtol=1e-13, atol=1e-13)
    found = compiled(op, form, 1)
    assert found.isnan().all() if op == "DSF" else found[0].isnan() and found[1:].isfinite().all()


# -- one cell, one periodicity for all systems of a batch -----------------------------------------

SAME = batch(triclinic(5, charged=True), triclinic(4, seed=3), triclinic(3, seed=5))
CELL = SAME.cell[0]


def test_one_cell_for_all_systems_of_a_batch_in_splines():
    x, q, _, idx = SAME
    each = CELL.expand(3, 3, 3)
    channels = torch.stack([q, q.cos()], 1)
    mesh = torch.sin(torch.arange(3 * 6 * 7 * 8, dtype=torch.float64)).view(3, *MESH)
    vectors = torch.stack([mesh, mesh.cos(), mesh.exp()], -1)
    calls = [
        lambda c: spline.spline_spread(x, q, c, MESH, batch_idx=idx),
        lambda c: spline.spline_spread_channels(x, channels, c, MESH, batch_idx=idx),
        lambda c: spline.spline_gather(x, mesh, c, batch_idx=idx),
        lambda c: spline.spline_gather_channels(x, mesh.unsqueeze(1), c, batch_idx=idx),
        lambda c: spline.spline_gather_vec3(x, q, vectors, c, batch_idx=idx),
        lambda c: spline.spline_gather_gradient(x, q, mesh, c, batch_idx=idx),
        lambda c: spline.spline_gather_with_force(x, q, mesh, c, batch_idx=idx),
    ]
    for call in calls:
        for cell in (CELL, CELL[None]):
            torch.testing.assert_close(call(cell), call(each), rtol=0, atol=0)
    leaf = CELL.clone().requires_grad_()
    (found,) = torch.autograd.grad(calls[2](leaf).sum(), leaf)
    leaf_of_each = each.clone().requires_grad_()
    (expected,) = torch.autograd.grad(calls[2](leaf_of_each).sum(), leaf_of_each)
    torch.testing.assert_close(found, expected.sum(0))


def test_the_number_of_systems_for_one_cell_inside_a_graph():
    """Where ``batch_idx`` cannot be read it must be said."""

    def spread(**options):
        return spline.spline_spread(SAME.positions, SAME.charges, CELL, MESH, batch_idx=SAME.batch_idx, **options)

    compiled = torch.compile(spread, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(num_systems=3), spread(), rtol=0, atol=0)
    with pytest.raises(Exception, match="`num_systems` is needed"):
        compiled()


@pytest.mark.parametrize(
    "function",
    [electrostatics.ewald_summation, electrostatics.particle_mesh_ewald, electrostatics.compute_slab_correction],
)
def test_one_pbc_for_all_systems_with_the_slab_correction(function):
    slab = torch.tensor([True, True, False])
    options: dict[str, Any] = (
        {} if function is electrostatics.compute_slab_correction else {"alpha": 0.8, "slab_correction": True}
    )
    if function is electrostatics.ewald_summation:
        options["k_cutoff"] = 3.0
    if function is electrostatics.particle_mesh_ewald:
        options["mesh_dimensions"] = (8, 8, 8)
    call = [
        function(*SAME[:3], pbc=p, batch_idx=SAME.batch_idx, **options) for p in (slab, slab[None], slab.repeat(3, 1))
    ]
    torch.testing.assert_close(call[0], call[2], rtol=0, atol=0)
    torch.testing.assert_close(call[1], call[2], rtol=0, atol=0)
