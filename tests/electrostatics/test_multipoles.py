"""Dipoles, quadrupoles and Gaussian widths in Ewald sums: against dense sums in plain torch."""

import functools
import math

import pytest
import torch

from nvalchemiops.torch.interactions.electrostatics import (
    compute_slab_correction,
    ewald_reciprocal_space,
    pme_reciprocal_space,
)
from nvalchemiops.torch.interactions.electrostatics.results import Derivatives
from nvalchemiops.torch.interactions.electrostatics.system import check_system
from nvalchemiops.torch.interactions.electrostatics.terms.slab import SlabTerm
from nvalchemiops.torch.systems import System
from tests.electrostatics import multipole_references as dense
from tests.electrostatics.multipole_references import Field, added, everything, random_sources, scaled, traceless
from tests.systems import triclinic

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
    system = triclinic(n)
    return system.positions, system.cell[0]


def long_range(positions, given, cell, own=False, alpha=ALPHA):
    """What the reciprocal functions return, as a field: of points, and the background of Gaussians."""
    field = dense.wave_field(positions, given, cell, K_CUTOFF, alpha)
    if not own:
        alphas = torch.full((len(positions),) * 2, alpha, dtype=torch.float64)
        field = added(field, scaled(-1.0, dense._own_field(alphas, given)))
    squares = given.widths**2
    integrals = 2.0 * math.pi * (squares[:, None] + squares[None, :]) - math.pi / alpha**2
    return added(field, Field(integrals @ given.charges / torch.linalg.det(cell).abs(), 0.0, 0.0))


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


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("widths", [False, True])
def test_the_long_range_part_is_that_of_a_dense_sum(method, widths):
    positions, cell = geometry()
    values = random_sources(5, seed=3, width=0.4 if widths else None, neutral=False)
    expected = everything(long_range, positions, dense.sources(positions, **values), cell)
    found = METHODS[method](positions, cell=cell, alpha=ALPHA, **values, **ALL)
    assert_same(found, without_channel(expected), 1e-11 if method == "ewald" else 3e-7)


@pytest.mark.parametrize("method", METHODS)
def test_dipoles_alone_with_channels_in_a_batch_of_mixed_systems(method):
    (positions, cell), (others, _) = geometry(), geometry(4)
    values = random_sources(9, channels=2, seed=5, neutral=False)
    charges, dipoles = values["charges"], values["dipoles"].clone()
    dipoles[5:] = 0.0
    batch_idx = torch.tensor([0] * 5 + [1] * 4, dtype=torch.int32)
    order = torch.tensor([3, 8, 0, 5, 1, 7, 2, 6, 4])
    x, cells = torch.cat([positions, others])[order], torch.stack([cell, 1.2 * cell])
    options = {name: value for name, value in ALL.items() if "quadrupole" not in name}
    arguments = {"charges": charges[order], "dipoles": dipoles[order], "batch_idx": batch_idx[order]}
    found = METHODS[method](x, cell=cells, alpha=ALPHA, **arguments, **options)
    for n, (here, h) in enumerate(((positions, cell), (others, 1.2 * cell))):
        atoms = (batch_idx == n).nonzero().flatten()
        given = dense.sources(here, charges[atoms], dipoles[atoms])
        expected = list(everything(long_range, here, given, h))
        del expected[4]
        place = torch.argsort(order)[atoms]
        single = [*(value[place] for value in found[:-1]), found[-1][n]]
        for value, exact in zip(single, expected, strict=True):
            assert (value - exact).abs().max() < (1e-11 if method == "ewald" else 3e-7) * exact.abs().max()


def test_own_gaussians_are_kept_on_request():
    positions, cell = geometry()
    values = random_sources(5, seed=3, neutral=False)
    expected = everything(functools.partial(long_range, own=True), positions, dense.sources(positions, **values), cell)
    found = METHODS["ewald"](positions, cell=cell, alpha=ALPHA, **values, **ALL, self_interaction=True)
    assert_same(found, without_channel(expected), 1e-11)
    # of charges alone, as latent Ewald sums have it
    kept, taken = (
        METHODS["ewald"](positions, values["charges"], cell, alpha=ALPHA, self_interaction=own) for own in (True, False)
    )
    torch.testing.assert_close(kept - taken, ALPHA / math.sqrt(math.pi) * values["charges"] ** 2)


@pytest.mark.parametrize("method", METHODS)
def test_derivatives_of_any_order_by_autograd(method):
    positions, cell = geometry(3)
    values = random_sources(3, seed=2, width=0.4, neutral=False)
    names = ("charges", "dipoles", "quadrupoles", "widths")
    alpha = torch.tensor([ALPHA], dtype=torch.float64)
    function = functools.partial(ewald_reciprocal_space, k_vectors=None, k_cutoff=2.5)
    if method == "pme":
        function = functools.partial(pme_reciprocal_space, mesh_dimensions=(8, 8, 8), spline_order=8)

    def results(positions, cell, alpha, *sources):
        found = function(positions, cell=cell, alpha=alpha, **dict(zip(names, sources)), **ALL)
        return sum((torch.sin(torch.arange(v.numel(), dtype=v.dtype) + 1.0) * v.flatten()).sum() for v in found)

    inputs = [positions, cell, alpha, *(values[name] for name in names)]
    inputs = [v.clone().requires_grad_() for v in inputs]
    assert torch.autograd.gradcheck(results, inputs, fast_mode=True, rtol=1e-5)
    if method == "ewald":
        assert torch.autograd.gradgradcheck(results, inputs, fast_mode=True, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("reduction", ["atom", "system"])
def test_a_backward_pass_by_first_derivatives_is_that_of_the_graph(reduction):
    positions, cell = geometry()
    values = random_sources(5, seed=4, neutral=False)

    def gradients(weights):
        inputs = [v.clone().requires_grad_() for v in (positions, cell, *values.values())]
        x, h, *sources = inputs
        energies = METHODS["ewald"](x, cell=h, alpha=ALPHA, **dict(zip(values, sources)), energy_reduction=reduction)
        return torch.autograd.grad((weights * energies).sum(), inputs)

    # weights that differ, but for rounding not, make it evaluate the graph
    one = torch.ones(5 if reduction == "atom" else 1, dtype=torch.float64)
    by_products, by_graph = gradients(one), gradients(one.clone().index_fill_(0, torch.tensor([0]), 1.0 + 1e-13))
    for value, exact in zip(by_products, by_graph, strict=True):
        torch.testing.assert_close(value, exact, rtol=1e-10, atol=1e-10)


def test_in_float32_it_is_the_same_rounded():
    positions, cell = geometry()
    values = random_sources(5, seed=3, width=0.4, neutral=False)
    for method, function in METHODS.items():
        exact = function(positions, cell=cell, alpha=ALPHA, **values, **ALL)
        rounded = {name: value.float() for name, value in values.items()}
        found = function(positions.float(), cell=cell.float(), alpha=ALPHA, **rounded, **ALL)
        for value, expected in zip(found, exact, strict=True):
            assert value.dtype is torch.float32
            # differences of splines on a mesh this fine cancel
            tolerance = 2e-5 if method == "ewald" else 2e-4
            assert (value - expected).abs().max() < tolerance * expected.abs().max(), method


# -- surfaces ---------------------------------------------------------------------------------------


def strained(function, positions, cell):
    """Minus the derivative by strain."""
    strain = torch.zeros(3, 3, dtype=torch.float64, requires_grad=True)
    deform = torch.eye(3, dtype=torch.float64) + strain
    return -torch.autograd.grad(function(positions @ deform, cell @ deform).sum(), strain)[0]


def test_the_slab_correction_is_that_of_charges_close_together():
    positions, cell = geometry()
    values = random_sources(5, seed=3, neutral=False)
    pbc, step = torch.tensor([True, False, True]), 0.1
    charges, places = dense._stencil(positions, dense.sources(positions, **values), step)
    x = (positions[:, None] + places).reshape(-1, 3)
    exact = compute_slab_correction(x, charges.reshape(-1), cell, pbc).sum()

    def energies(x, h, widths=None):
        atoms = System(x, values["charges"], h, None, pbc, None, None, values["dipoles"], values["quadrupoles"], widths)
        return SlabTerm().evaluate(check_system(atoms, slab_correction=True), Derivatives(True, True, True))

    # a second moment along the normal is a polynomial: differences are exact
    found = energies(positions, cell)
    torch.testing.assert_close(found.energies.sum(), exact)
    x = positions.clone().requires_grad_()
    torch.testing.assert_close(found.forces, -torch.autograd.grad(energies(x, cell).energies.sum(), x)[0])
    widths = torch.linspace(0.3, 0.6, 5, dtype=torch.float64)
    for given in (None, widths):
        expected = strained(lambda x, h, given=given: energies(x, h, given).energies, positions, cell)
        torch.testing.assert_close(energies(positions, cell, given).virial[0], expected)
