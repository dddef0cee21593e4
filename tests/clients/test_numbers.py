"""The calls of existing clients (../shared/clients.md) against references that are not the library's.

`test_signatures.py` replays what the clients do with the results; here each number is compared: neighbors with those of
ASE and matscipy, Ewald sums and damped charges with slow sums in torch. D3 has its own tests.
"""

import importlib
from typing import Any

import ase.neighborlist
import matscipy.neighbours
import numpy as np
import pytest
import torch
from packaging.version import Version

import nvalchemiops
from nvalchemiops.neighbors import NeighborOverflowError
from nvalchemiops.torch.interactions import electrostatics
from nvalchemiops.torch.neighbors import batch_cell_list, batch_naive_neighbor_list, neighbor_list
from tests.clients.test_signatures import AdaptiveList, dsf_reference, lattices
from tests.reference.ewald import everything
from tests.reference.neighbors import in_order
from tests.support.comparing import close_to_largest
from tests.support.systems import ALL, SYSTEMS, System, batch, crystal, triclinic


def converged(system: System) -> tuple[torch.Tensor, ...]:
    """Energies of systems; forces and charge gradients of atoms; virials: by the slow sum, at an alpha of its own."""
    parts = []
    for number in range(len(system.cell)):
        mine, cell = system.batch_idx == number, system.cell[number]
        alpha = 1.9 / float(torch.linalg.det(cell).abs()) ** (1 / 3)
        found = everything(system.positions[mine], system.charges[mine], cell, alpha, 6.0 / alpha, 12.0 * alpha)
        parts.append((found[0].sum().reshape(1), *found[1:3], found[3][None]))
    return tuple(torch.cat(part).detach() for part in zip(*parts, strict=True))


# -- what is imported -----------------------------------------------------------------------------


def test_what_clients_import_is_there():
    assert Version(nvalchemiops.__version__) >= Version("0.4.1")
    assert importlib.import_module("nvalchemiops.torch.interactions.dispersion").dftd3
    assert importlib.import_module("nvalchemiops.neighbors").NeighborOverflowError is NeighborOverflowError
    assert electrostatics.EwaldParameters._fields == ("alpha", "real_space_cutoff", "reciprocal_space_cutoff")
    assert electrostatics.PMEParameters._fields == ("alpha", "mesh_dimensions", "mesh_spacing", "real_space_cutoff")


# -- torch-sim: neighbors -------------------------------------------------------------------------


def by_ase(x: np.ndarray, cell: np.ndarray, pbc: tuple[bool, ...], cutoff: float) -> np.ndarray:
    # along open axes ASE wants a cell that is none of zeros
    i, j, shift = ase.neighborlist.primitive_neighbor_list("ijS", pbc, cell, x, cutoff)
    return in_order(np.c_[i, j, shift].astype(np.int64))


def by_matscipy(x: np.ndarray, cell: np.ndarray, pbc: tuple[bool, ...], cutoff: float) -> np.ndarray:
    i, j, shift = matscipy.neighbours.neighbour_list("ijS", positions=x, cell=cell, pbc=pbc, cutoff=cutoff)
    return in_order(np.c_[i, j, shift].astype(np.int64))


def own_cell(x: np.ndarray, cell: np.ndarray, pbc: tuple[bool, ...]) -> np.ndarray:
    """A cell for codes that need one: around the atoms of a system that has none."""
    return cell if any(pbc) or np.linalg.det(cell) > 1.5 else np.eye(3) * (np.ptp(x) + 30.0)


@pytest.mark.parametrize("reference", [by_ase, by_matscipy])
@pytest.mark.parametrize("search", [batch_naive_neighbor_list, batch_cell_list])
@pytest.mark.parametrize("cutoff", [3.0, 6.0])
def test_torch_sim_neighbors_are_those_of_other_codes(search, cutoff, reference):
    """Lattices of every kind in one batch, with and without periodicity."""
    systems, pbc = lattices()
    together = batch(*systems)
    res = search(
        positions=together.positions,
        cutoff=cutoff,
        batch_idx=together.batch_idx.to(torch.int32),
        cell=together.cell.mT.contiguous().mT,  # stored by columns
        pbc=pbc,
        return_neighbor_list=True,
    )
    pairs, shifts = res[0], res[2]
    assert pairs.dtype == shifts.dtype == torch.int32 and shifts.shape == (pairs.shape[1], 3)
    first = 0
    for number, system in enumerate(systems):
        mine = together.batch_idx[pairs[0].long()] == number
        found = in_order(torch.cat([pairs.T[mine] - first, shifts[mine]], 1).numpy().astype(np.int64))
        x, periodic = system.positions.numpy(), tuple(pbc[number].tolist())
        expected = reference(x, own_cell(x, system.cell[0].numpy(), periodic), periodic, cutoff)
        # a code without periodicity may count cells of its own; then pairs are what can be compared
        columns = slice(None) if any(periodic) else slice(0, 2)
        assert np.array_equal(found[:, columns], expected[:, columns])
        first += len(x)


# -- torch-sim: electrostatics --------------------------------------------------------------------

# displaced so far that forces are those of a liquid, to which accuracies refer
CRYSTALS = [crystal("rocksalt", 5.64, 2, 0.35), triclinic(6), crystal("zincblende", 5.4, 2, 0.35, seed=3)]
ONE, SEVERAL = CRYSTALS[0], batch(*CRYSTALS)


def torch_sim_list(system: System, cutoff: float = 8.0) -> dict[str, torch.Tensor]:
    res = batch_naive_neighbor_list(
        positions=system.positions,
        cutoff=cutoff,
        batch_idx=system.batch_idx,
        cell=system.cell,
        pbc=torch.ones(len(system.cell), 3, dtype=torch.bool),
        return_neighbor_list=True,
    )
    return {"neighbor_list": res[0], "neighbor_ptr": res[1], "neighbor_shifts": res[2]}


@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
@pytest.mark.parametrize(
    ("function", "mesh"),
    [
        (electrostatics.ewald_summation, {}),
        (electrostatics.particle_mesh_ewald, {"spline_order": 6}),
        (electrostatics.particle_mesh_ewald, {"spline_order": 6, "mesh_spacing": 0.25}),
        (electrostatics.particle_mesh_ewald, {"spline_order": 5, "mesh_dimensions": (50, 50, 50)}),
    ],
    ids=["Ewald", "PME", "PME, spacing", "PME, dimensions"],
)
def test_torch_sim_charges(function, mesh, several):
    """No alpha, a list of 8 angstrom; energies scattered into float64; stress = -virial / volume."""
    system = SEVERAL if several else ONE
    energy, forces, virial = function(
        positions=system.positions,
        charges=system.charges,
        cell=system.cell,
        **torch_sim_list(system),
        batch_idx=system.batch_idx if several else None,
        compute_forces=True,
        compute_virial=True,
        accuracy=1e-5,
        **mesh,
    )
    total = torch.zeros(len(system.cell), dtype=torch.float64)
    total.scatter_add_(0, system.batch_idx.long(), energy)
    volume = torch.linalg.det(system.cell).abs().reshape(-1, 1, 1)
    exact = converged(system)
    # the accuracy is that of forces; the stress of these 16 atoms is four times worse, relative to itself
    results = ((total, exact[0], 1e-5), (forces, exact[1], 2e-5), (-virial / volume, -exact[3] / volume, 6e-5))
    for found, expected, error in results:
        assert found.dtype == torch.float64
        close_to_largest([found], [expected], error)


# -- AIMNet ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("periodic", [False, True])
def test_aimnet_neighbors_are_those_of_matscipy(periodic):
    """Guess a width, which is too small; two results without a cell, three with one."""
    system = batch(SYSTEMS["rocksalt"](), SYSTEMS["triclinic"](), SYSTEMS["one atom"]())
    n_atoms, cutoff = len(system.charges), 5.0
    where = {"cell": system.cell, "pbc": torch.ones(3, 3, dtype=torch.bool)} if periodic else {}
    matrix, count, *shifts = AdaptiveList(cutoff)(
        system.positions, batch_idx=system.batch_idx, fill_value=n_atoms, **where
    )
    assert len(shifts) == int(periodic)
    for number in range(3):
        atoms = (system.batch_idx == number).nonzero().squeeze(1)
        x, cell = system.positions[atoms].numpy(), system.cell[number].numpy()
        pbc = (periodic,) * 3
        expected = by_matscipy(x, cell if periodic else np.eye(3) * (np.ptp(x) + 30.0), pbc, cutoff)
        slots = torch.arange(matrix.shape[1]) < count[atoms, None]
        row, slot = slots.nonzero(as_tuple=True)
        found = torch.stack([row, matrix[atoms][row, slot] - atoms[0]], 1)
        images = shifts[0][atoms][row, slot] if periodic else torch.zeros(len(row), 3)
        found = in_order(torch.cat([found, images], 1).numpy().astype(np.int64))
        assert np.array_equal(found[:, : 5 if periodic else 2], expected[:, : 5 if periodic else 2])
        assert (matrix[atoms][~slots] == n_atoms).all()


def aimnet_matrix(system: System, cutoff: float) -> dict[str, Any]:
    n_atoms = len(system.charges)
    pbc = torch.ones(len(system.cell), 3, dtype=torch.bool)
    matrix, _, shifts = AdaptiveList(cutoff)(system.positions, system.cell, pbc, system.batch_idx, n_atoms)
    return {"neighbor_matrix": matrix, "neighbor_matrix_shifts": shifts, "mask_value": n_atoms}


AIMNET = {
    "Ewald": (electrostatics.ewald_summation, electrostatics.estimate_ewald_parameters),
    "PME": (electrostatics.particle_mesh_ewald, electrostatics.estimate_pme_parameters),
}


@pytest.mark.parametrize("hybrid", [False, True], ids=["", "hybrid"])
@pytest.mark.parametrize("name", AIMNET)
def test_aimnet_charges(name, hybrid):
    """No alpha; the list is as long as the estimate for this accuracy says; everything is asked for at once."""
    function, estimate = AIMNET[name]
    cutoff = float(estimate(SEVERAL.positions, SEVERAL.cell, SEVERAL.batch_idx, accuracy=1e-5).real_space_cutoff.max())
    x, q, cell = (t.clone().requires_grad_() for t in SEVERAL[:3])
    energies, forces, charge_gradients, virial = function(
        x, q, cell, **aimnet_matrix(SEVERAL, cutoff), batch_idx=SEVERAL.batch_idx, accuracy=1e-5,
        hybrid_forces=hybrid, **ALL,
    )  # fmt: skip
    exact = converged(SEVERAL)
    total = torch.zeros(3, dtype=torch.float64).index_add(0, SEVERAL.batch_idx, energies)
    for found, expected in zip((total, forces, charge_gradients, virial), exact, strict=True):
        close_to_largest([found], [expected], 3e-5)
    (slope,) = torch.autograd.grad(energies.sum(), q, retain_graph=True)
    close_to_largest([slope], [exact[2]], 3e-5)
    slopes = torch.autograd.grad(energies.sum(), (x, cell), allow_unused=hybrid)
    if hybrid:  # the geometry is a constant there
        assert all(s is None or not s.any() for s in slopes)
    else:
        close_to_largest([-slopes[0]], [exact[1]], 3e-5)


@pytest.mark.parametrize("name", AIMNET)
def test_aimnet_hessians(name):
    """Rows of the Hessian, and its product with a vector, by graphs of graphs: those of the slow sum."""
    function, estimate = AIMNET[name]
    system = triclinic(4)
    cutoff = float(estimate(system.positions, system.cell, accuracy=1e-5).real_space_cutoff.max())
    given = aimnet_matrix(system, cutoff) | {"batch_idx": system.batch_idx, "accuracy": 1e-5}
    x = system.positions.clone().requires_grad_()
    (slope,) = torch.autograd.grad(function(x, *system[1:3], **given).sum(), x, create_graph=True)
    units = torch.eye(12, dtype=torch.float64).reshape(12, 4, 3)
    (rows,) = torch.autograd.grad(slope, x, units, is_grads_batched=True, retain_graph=True)
    direction = torch.sin(torch.arange(12.0, dtype=torch.float64)).view(4, 3)
    (product,) = torch.autograd.grad(slope, x, direction)

    y = system.positions.clone().requires_grad_()
    q = system.charges.clone().requires_grad_()
    _, forces, *_ = everything(y, q, system.cell[0], 0.45, 14.0, 5.0, create_graph=True)
    expected = torch.stack([torch.autograd.grad(-f, y, retain_graph=True)[0] for f in forces.reshape(-1)])
    # errors that an accuracy of 1e-5 of the forces leaves in their derivatives
    close_to_largest([rows], [expected], 1e-3)
    close_to_largest([product], [torch.einsum("ia,iabc->bc", direction, expected.view(4, 3, 4, 3))], 1e-3)


def test_aimnet_periodic_damped_charges_with_a_padding_atom():
    """The last atom is padding and counts to system 0, so `batch_idx` is not sorted; its number fills the slots."""
    members = [SYSTEMS["rocksalt"](), SYSTEMS["triclinic"](), SYSTEMS["charged"]()]
    system, cutoff, alpha = batch(*members), 5.0, 0.2
    padding = len(system.charges)
    matrix, _, shifts = neighbor_list(
        system.positions, cutoff, system.cell, batch_idx=system.batch_idx, fill_value=padding, max_neighbors=150
    )
    x = torch.cat([system.positions, system.positions[:1]]).requires_grad_()
    q = torch.cat([system.charges, torch.zeros(1, dtype=torch.float64)])
    energy, forces, virial = electrostatics.dsf_coulomb(
        x,
        q,
        cutoff,
        alpha,
        cell=system.cell,
        batch_idx=torch.cat([system.batch_idx, system.batch_idx[:1]]),
        neighbor_matrix=torch.cat([matrix, torch.full_like(matrix[:1], padding)]),
        neighbor_matrix_shifts=torch.cat([shifts, torch.zeros_like(shifts[:1])]),
        fill_value=padding,
        compute_forces=True,
        compute_virial=True,
        num_systems=3,
        device="cpu",
    )
    assert energy.shape == (3,) and virial.shape == (3, 3, 3) and not forces[-1].any()
    close_to_largest(torch.autograd.grad(energy.sum(), x), [-forces.detach()], 1e-12)
    for number, member in enumerate(members):
        y = member.positions.clone().requires_grad_()
        strain = torch.zeros(3, 3, dtype=torch.float64, requires_grad=True)
        strained = member.cell[0] + member.cell[0] @ strain
        alone = dsf_reference(y + y @ strain, member.charges, strained, cutoff, alpha)
        slope, by_strain = torch.autograd.grad(alone, (y, strain))
        torch.testing.assert_close(energy[number], alone.detach(), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(forces[:-1][system.batch_idx == number], -slope, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(virial[number], -by_strain, rtol=1e-9, atol=1e-9)
