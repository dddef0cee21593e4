"""Energies of charges as clients call for them (../shared/clients.md), in the shape of their own calls."""

import contextlib
from typing import Any

import pytest
import torch

from nvalchemiops.torch import spline
from nvalchemiops.torch.interactions import electrostatics
from nvalchemiops.torch.interactions.dispersion import D3Parameters, dftd3
from nvalchemiops.torch.interactions.lj import lj_energy
from nvalchemiops.torch.interactions.pair import lennard_jones
from nvalchemiops.torch.neighbors import naive_neighbor_list, neighbor_list
from nvalchemiops.torch.runtime.context import hidden_values
from tests.lanes.fibers import gpu_layout
from tests.support.plans import way_of
from tests.support.systems import batch, crystal, csr, triclinic

MESH = (6, 7, 8)


# -- precision ------------------------------------------------------------------------------------

ACCURATE = {"alpha": 0.5, "k_cutoff": 4.0, "compute_charge_gradients": True, "compute_virial": True}
MIXED = {
    "list": lambda x, q, c: naive_neighbor_list(x, 4.0, c, return_distances=True)[-1:],
    "Coulomb": lambda x, q, c: electrostatics.coulomb_energy_forces(x, q, c, 4.0, 0.3),
    "dipoles": lambda x, q, c: [electrostatics.coulomb_energy(x, q, c, 4.0, 0.3, dipoles=0.1 * x)],
    "DSF": lambda x, q, c: electrostatics.dsf_coulomb(x, q, 4.0, cell=c, compute_virial=True),
    "Ewald": lambda x, q, c: electrostatics.ewald_summation(x, q, c, **ACCURATE),
    "mesh": lambda x, q, c: [spline.spline_gather_gradient(x, q, x.new_ones(MESH).cumsum(0), c)],
    "molecule": lambda x, q, c: electrostatics.ewald_summation(x, q, None, pbc=False, compute_forces=True),
}


@pytest.mark.parametrize("single", [0, 1, 2])
@pytest.mark.parametrize("name", MIXED)
def test_cells_and_charges_of_another_precision_are_taken_in_that_of_the_positions(name, single):
    """0.5.0 takes both in Coulomb sums, and cells in naive lists; each gradient has the dtype of its input."""
    system = [value.float().double() for value in triclinic(6)[:3]]
    given = [value.float() if n == single else value.clone() for n, value in enumerate(system)]
    alike = [value.to(given[0].dtype) for value in system]
    expected = MIXED[name](*alike)
    for _ in range(3):  # of which the last repeats a plan
        torch.testing.assert_close(MIXED[name](*given), expected, rtol=0, atol=0)
    energies = MIXED[name](*(value.requires_grad_() for value in given))[0]
    gradients = torch.autograd.grad(energies.sum(), given, allow_unused=True)
    for value, gradient in zip(given, gradients):
        assert gradient is None or gradient.dtype == value.dtype


def test_lattice_sums_of_two_precisions_have_a_plan():
    x, q, cell = (system := triclinic(6))[:3]
    near = {"alpha": 0.5, "miller_bounds": (3, 3, 3), **csr(system, 4.0)}
    expected = electrostatics.ewald_summation(x, q.float().double(), cell.float().double(), **near)
    for _ in range(3):
        assert torch.equal(electrostatics.ewald_summation(x, q.float(), cell.float(), **near), expected)
    assert way_of("sum") == "plan (replayed)"


# -- shifts without a cell ------------------------------------------------------------------------

OPEN = crystal("rocksalt", 5.6, 1, 0.15)
OPEN_PAIRS, OPEN_PTR = neighbor_list(OPEN.positions, 4.0, return_neighbor_list=True)
OPEN_MATRIX, _ = neighbor_list(OPEN.positions, 4.0)
NUMBERS, STATES = torch.where(OPEN.charges > 0, 6, 8), D3Parameters.load().states([6, 8])


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
    if op == "D3":
        given = {name.replace("neighbor_shifts", "unit_shifts"): value for name, value in given.items()}
        return dftd3(x, NUMBERS, 0.4, 4.4, 0.8, d3_params=STATES, **given, compute_virial=True)[0]
    if op == "DSF":
        return electrostatics.dsf_coulomb(x, q, 4.0, **given)[0]
    if op == "Coulomb":
        return electrostatics.coulomb_energy(x, q, None, 4.0, **given)
    return lennard_jones(4.0)(x, sigma=2.0, epsilon=0.1, **given)


EXPECTED = {
    "D3": lambda: dftd3(OPEN.positions, NUMBERS, 0.4, 4.4, 0.8, d3_params=STATES, neighbor_list=OPEN_PAIRS)[0],
    "DSF": lambda: electrostatics.dsf_coulomb(OPEN.positions, OPEN.charges, 4.0)[0],
    "Coulomb": lambda: electrostatics.coulomb_energy(OPEN.positions, OPEN.charges, None, 4.0),
    "Lennard-Jones": lambda: lj_energy(OPEN.positions, 2.0, 0.1, 4.0),
}


@pytest.mark.everyday_cases("D3-matrix", "Coulomb-list", "DSF-matrix", "Lennard-Jones-list")
@pytest.mark.parametrize("form", ["list", "matrix"])
@pytest.mark.parametrize("op", EXPECTED)
def test_shifts_without_a_cell_are_zeros(op, form):
    """As fairchem and torch-sim pass them. Others say that a cell is missing; where nobody reads them they give NaN."""
    torch.testing.assert_close(without_cell(op, form, 0), EXPECTED[op](), rtol=1e-13, atol=1e-13)
    with pytest.raises(ValueError, match=r"`cell` is needed with `\w+_shifts`"):
        without_cell(op, form, 1)
    if form == "matrix":  # in the padding
        assert OPEN_MATRIX[0, -1] == len(OPEN.charges)
        torch.testing.assert_close(without_cell(op, form, 5, -1), EXPECTED[op](), rtol=1e-13, atol=1e-13)
    compiled = torch.compile(without_cell, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(op, form, 0), EXPECTED[op](), rtol=1e-13, atol=1e-13)
    found = compiled(op, form, 1)
    assert found.isnan().all() if op in ("DSF", "D3") else found[0].isnan() and found[1:].isfinite().all()


# -- energies of float32 positions ----------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("method", ["ewald_summation", "particle_mesh_ewald"])
def test_energies_of_float32_positions_add_up_in_float64(method, compiled):
    """As torch-sim adds them up into the energies of systems, which takes one dtype; the forces keep theirs."""
    x, q, cell, idx = batch(triclinic(5, charged=True), triclinic(4, seed=3))
    function: Any = getattr(electrostatics, method)
    call = torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function
    options = {"k_cutoff": 3.0} if method == "ewald_summation" else {"mesh_dimensions": (12, 12, 12)}
    options |= {"alpha": 0.8, "cutoff": 4.0, "batch_idx": idx}
    exact = function(x, q, cell, **options, energy_reduction="system")
    leaf = x.float().requires_grad_()
    energies, forces = call(leaf, q.float(), cell.float(), **options, compute_forces=True)
    found = torch.zeros(2, dtype=torch.float64).scatter_add_(0, idx.long(), energies)
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)
    (slope,) = torch.autograd.grad(found.sum(), leaf)
    assert forces.dtype == slope.dtype == torch.float32
    torch.testing.assert_close(-slope, forces.detach(), rtol=1e-4, atol=1e-4)


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
            with hidden_values():  # as on a GPU, where numbers of systems were those of the cells
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
        options |= {"k_cutoff": 3.0, "max_atoms_per_system": 64}  # the latter is without effect
    if function is electrostatics.particle_mesh_ewald:
        options["mesh_dimensions"] = (8, 8, 8)
    call = [
        function(*SAME[:3], pbc=p, batch_idx=SAME.batch_idx, **options) for p in (slab, slab[None], slab.repeat(3, 1))
    ]
    torch.testing.assert_close(call[0], call[2], rtol=0, atol=0)
    torch.testing.assert_close(call[1], call[2], rtol=0, atol=0)


def test_systems_without_atoms_at_the_end_of_a_batch_need_no_cell():
    """A fixed number of systems, of which the last have no atoms; D3 takes the same path."""
    x, q, cell, idx = SAME
    pairs, ptr, shifts = neighbor_list(x, 3.0, cell, batch_idx=idx, return_neighbor_list=True)
    near = {"neighbor_list": pairs, "neighbor_ptr": ptr, "unit_shifts": shifts, "batch_idx": idx}

    def results(n_systems: int) -> list[torch.Tensor]:
        strained = cell.clone().requires_grad_()
        energy, forces, virial = electrostatics.dsf_coulomb(
            x, q, 3.0, cell=strained, compute_virial=True, num_systems=n_systems, **near
        )
        loss = energy.sum() + virial.square().sum()
        return [energy, virial, forces, *torch.autograd.grad(loss, strained)]

    expected, found = results(3), results(5)
    for of_systems, more in zip(expected[:2], found, strict=False):
        torch.testing.assert_close(more, torch.cat([of_systems, torch.zeros_like(of_systems[:2])]), rtol=0, atol=0)
    torch.testing.assert_close(found[2:], expected[2:], rtol=0, atol=0)
    for layout in (contextlib.nullcontext, gpu_layout):
        with layout():
            searched = electrostatics.dsf_coulomb(x, q, 3.0, cell=cell, batch_idx=idx, num_systems=5)[0]
            no_atoms = electrostatics.dsf_coulomb(x[:0], q[:0], 3.0, cell=cell, batch_idx=idx[:0], num_systems=5)[0]
        torch.testing.assert_close(searched, found[0], rtol=1e-12, atol=0)
        assert torch.equal(no_atoms, torch.zeros(5, dtype=torch.float64))
    beyond = {**near, "batch_idx": idx.clamp(min=1) * 2}
    for n_systems, mistaken in ((5, beyond), (2, near)):
        with pytest.raises(ValueError, match=r"batch_idx|`cell` is for 3 systems"):
            electrostatics.dsf_coulomb(x, q, 3.0, cell=cell, num_systems=n_systems, **mistaken)
    compiled = torch.compile(electrostatics.dsf_coulomb, backend="aot_eager", fullgraph=True)
    with pytest.raises(ValueError, match="a system that does not exist"):
        compiled(x, q, 3.0, cell=cell, num_systems=5, **beyond)
