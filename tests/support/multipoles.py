"""Systems of dipoles and quadrupoles, the sums over their waves, and comparisons with dense sums."""

import functools

import torch

from nvalchemiops.torch.interactions.electrostatics import (
    ewald_reciprocal_space,
    pme_reciprocal_space,
)
from tests.reference import multipoles as dense
from tests.reference.multipoles import traceless
from tests.support.systems import triclinic

ALPHA, K_CUTOFF = 0.55, 7.0
ALL = {
    "compute_forces": True,
    "compute_charge_gradients": True,
    "compute_dipole_gradients": True,
    "compute_quadrupole_gradients": True,
    "compute_virial": True,
}
METHODS = {
    "ewald": functools.partial(ewald_reciprocal_space, k_vectors=None, k_cutoff=K_CUTOFF),
    "pme": functools.partial(pme_reciprocal_space, mesh_dimensions=(48, 48, 48), spline_order=8),
}


def geometry(n=5):
    """A skewed cell; one atom is outside of it."""
    system = triclinic(n)
    cell = system.cell[0]
    x = (system.positions @ torch.linalg.inv(cell)) % 1.0 @ cell
    return torch.cat([x[:1] + cell[0] - cell[2], x[1:]]), cell


def without_channel(found):
    energies, forces, *gradients, virial = found
    return (energies.squeeze(1), forces, *(g.squeeze(1) for g in gradients), virial)


def assert_same(found, expected, tolerance):
    for name, value, exact in zip(dense.Derivatives._fields, found, expected, strict=True):
        if name == "quadrupole_gradients":
            exact = traceless(exact)
        value = value.reshape(exact.shape) if name == "virial" else value
        assert value.shape == exact.shape, name
        error = (value - exact).abs().max() / exact.abs().max().clamp_min(1e-3)
        assert error < tolerance, (name, float(error))
