"""Dipoles, quadrupoles, Gaussians, potentials at atoms and induced dipoles on a GPU give what they give on a CPU."""

import pytest
import torch

from nvalchemiops.torch.interactions.electrostatics import (
    coulomb_energy,
    electrostatic_potential,
    ewald_summation,
    induced_moments,
    particle_mesh_ewald,
)
from nvalchemiops.torch.neighbors import neighbor_list
from tests.support.gpu import assert_equal, with_derivatives
from tests.support.systems import batch, triclinic

pytestmark = pytest.mark.gpu
SYSTEM = batch(triclinic(12, seed=3), triclinic(20, seed=4))
EVERYTHING = {
    "compute_forces": True,
    "compute_charge_gradients": True,
    "compute_dipole_gradients": True,
    "compute_quadrupole_gradients": True,
    "compute_virial": True,
}


def sources(device, widths):
    generator = torch.Generator().manual_seed(5)
    n = len(SYSTEM.charges)
    dipoles = 0.2 * torch.randn((n, 3), generator=generator, dtype=torch.float64)
    quadrupoles = 0.1 * torch.randn((n, 3, 3), generator=generator, dtype=torch.float64)
    quadrupoles = quadrupoles + quadrupoles.mT
    quadrupoles = quadrupoles - quadrupoles.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * torch.eye(3).double()
    found = {"dipoles": dipoles.to(device).requires_grad_(), "quadrupoles": quadrupoles.to(device).requires_grad_()}
    if widths:
        found["widths"] = torch.linspace(0.0, 0.4, n, dtype=torch.float64, device=device)
    return found


CALLS = {
    "Ewald": (ewald_summation, {"alpha": 0.6, "cutoff": 5.0, "k_cutoff": 4.0, **EVERYTHING}),
    "PME": (
        particle_mesh_ewald,
        {"alpha": 0.6, "cutoff": 5.0, "mesh_dimensions": (16, 16, 16), "spline_order": 8, **EVERYTHING},
    ),
    "Coulomb": (coulomb_energy, {"cutoff": 5.0, "alpha": 0.3}),
}


@pytest.mark.parametrize("widths", [False, True], ids=["points", "Gaussians"])
@pytest.mark.parametrize("name", CALLS)
def test_sums_and_two_derivatives(name, widths):
    function, options = CALLS[name]

    def results(device):
        x, q, cell, batch_idx = (t.to(device) for t in SYSTEM)
        given = sources(device, widths)
        x.requires_grad_(), cell.requires_grad_()
        found = function(x, q, cell, batch_idx=batch_idx, **given, **options)
        found = found if isinstance(found, tuple) else (found,)
        return with_derivatives(found, (x, cell, given["dipoles"], given["quadrupoles"]))

    expected = results(torch.device("cpu"))
    assert_equal([r.cpu() for r in results(torch.device("cuda"))], expected, 1e-10)


def test_potentials_at_atoms_and_induced_dipoles():
    def results(device):
        x, q, cell, _ = (t.to(device) for t in triclinic(12, seed=3))
        seen = electrostatic_potential(x, q, cell, receiver_widths=[0.3, 0.8], alpha=0.5, cutoff=6.0, k_cutoff=4.0)
        options = {"alpha": 0.6, "cutoff": 5.0, "k_cutoff": 4.0, "energy_reduction": "system"}

        def energy(dipoles, positions):
            return ewald_summation(positions, q, cell, dipoles=dipoles, **options)

        polarizabilities = torch.full((len(x),), 0.3, dtype=torch.float64, device=device)
        response = induced_moments(energy, (x,), polarizabilities=polarizabilities)
        return [*(t for t in seen if t is not None), response.dipoles]

    expected = results(torch.device("cpu"))
    assert_equal([r.cpu() for r in results(torch.device("cuda"))], expected, 1e-9)


@pytest.mark.parametrize("ties", ["keep", "index"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_nearest_neighbors(ties, symmetric):
    def pairs(device):
        x, _, cell, batch_idx = (t.to(device) for t in SYSTEM)
        options = {"nearest": 5, "ties": ties, "symmetric": symmetric, "return_neighbor_list": True}
        found, _, shifts = neighbor_list(x, 5.0, cell, batch_idx=batch_idx, **options)
        return torch.unique(torch.cat([found.mT, shifts], 1).cpu(), dim=0)

    assert torch.equal(pairs(torch.device("cuda")), pairs(torch.device("cpu")))
