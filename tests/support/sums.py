"""Both sums, called alike, and how far they are from each other: what tests of them share."""

import functools

import pytest

from nvalchemiops.torch.interactions.electrostatics import ewald_summation, particle_mesh_ewald
from tests.support.systems import disordered

SUMS = {"ewald": ewald_summation, "pme": functools.partial(particle_mesh_ewald, spline_order=8)}
METHODS = pytest.mark.parametrize("method", SUMS)
# splines have an end: errors of the mesh are about this large, relative to forces
FINE = {"ewald": 1e-12, "pme": 1e-9}


def summed(method, system, **options):
    options = {"accuracy": FINE[method], **options}
    return SUMS[method](system.positions, system.charges, system.cell, batch_idx=system.batch_idx, **options)


def relative_error(found, exact):
    return ((found - exact).norm() / exact.norm()).item()


@functools.cache
def exact_forces(name):
    return summed("ewald", disordered(name), accuracy=1e-13, compute_forces=True)[1]
