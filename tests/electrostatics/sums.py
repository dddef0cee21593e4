"""Both sums, called alike, and how far they are from each other: what tests of them share."""

import functools

import pytest
import torch

from nvalchemiops.torch.interactions.electrostatics import ewald_summation, particle_mesh_ewald
from nvalchemiops.torch.neighbors import neighbor_list
from tests.systems import disordered

ALL = {"compute_forces": True, "compute_charge_gradients": True, "compute_virial": True}
SUMS = {"ewald": ewald_summation, "pme": functools.partial(particle_mesh_ewald, spline_order=8)}
METHODS = pytest.mark.parametrize("method", SUMS)
# splines have an end: errors of the mesh are about this large, relative to forces
FINE = {"ewald": 1e-12, "pme": 1e-9}


def summed(method, system, **options):
    options = {"accuracy": FINE[method], **options}
    return SUMS[method](system.positions, system.charges, system.cell, batch_idx=system.batch_idx, **options)


def csr(system, cutoff):
    pairs, ptr, shifts = neighbor_list(
        system.positions.detach(), cutoff, system.cell.detach(), batch_idx=system.batch_idx, return_neighbor_list=True
    )
    return {"neighbor_list": pairs, "neighbor_ptr": ptr, "neighbor_shifts": shifts}


def close(found, expected, tolerance=1e-10):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def relative_error(found, exact):
    return ((found - exact).norm() / exact.norm()).item()


@functools.cache
def exact_forces(name):
    return summed("ewald", disordered(name), accuracy=1e-13, compute_forces=True)[1]
