"""Dipoles, quadrupoles and Gaussian widths in sums over waves and meshes: against dense sums in plain torch."""

import functools
import math

import pytest
import torch

from nvalchemiops.torch.interactions.electrostatics import (
    coulomb_energy,
    coulomb_energy_forces,
    electrostatic_potential,
    ewald_reciprocal_space,
    ewald_summation,
    particle_mesh_ewald,
    pme_reciprocal_space,
)
from tests.reference import multipoles as dense
from tests.reference.multipoles import Field, added, everything, random_sources, scaled
from tests.support.multipoles import ALL, ALPHA, K_CUTOFF, METHODS, assert_same, geometry, without_channel


def long_range(positions, given, cell, own=False, alpha=ALPHA):
    """What the reciprocal functions return, as a field: of points, and the background of Gaussians."""
    field = dense.wave_field(positions, given, cell, K_CUTOFF, alpha)
    if not own:
        alphas = torch.full((len(positions),) * 2, alpha, dtype=torch.float64)
        field = added(field, scaled(-1.0, dense._own_field(alphas, given)))
    squares = given.widths**2
    integrals = 2.0 * math.pi * (squares[:, None] + squares[None, :]) - math.pi / alpha**2
    return added(field, Field(integrals @ given.charges / torch.linalg.det(cell).abs(), 0.0, 0.0))


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


@pytest.mark.parametrize("method", METHODS)
def test_slices_and_hessians(method):
    positions, cell = geometry()
    values = random_sources(5, seed=3, neutral=False)
    dipoles = values.pop("dipoles")

    def energy(dipoles):
        return METHODS[method](positions, cell=cell, alpha=ALPHA, dipoles=dipoles, **values).sum()

    several = torch.stack([dipoles, 2.0 * dipoles])
    torch.testing.assert_close(torch.func.vmap(energy)(several), torch.stack([energy(d) for d in several]))
    hessian = torch.func.hessian(energy)(dipoles)
    torch.testing.assert_close(hessian, torch.autograd.functional.hessian(energy, dipoles))
    # quadratic in the dipoles
    change = torch.linspace(-1.0, 1.0, 15, dtype=torch.float64).view(5, 3)
    second = energy(dipoles + change) + energy(dipoles - change) - 2.0 * energy(dipoles)
    assert float(second) == pytest.approx(float((change * torch.tensordot(hessian, change)).sum()))


@pytest.mark.parametrize(("name", "dim"), [("charges", 1), ("dipoles", 0), ("widths", 0)])
@pytest.mark.parametrize("method", ["ewald", "pme", "potential"])
def test_parameters_are_chosen_for_all_slices(method, name, dim):
    """Of vmap, which hides values: wide Gaussians need a small alpha, and dipoles more k-vectors."""
    positions, cell = geometry()
    values = random_sources(5, seed=3, neutral=False) | {"widths": torch.full((5,), 1.5, dtype=torch.float64)}
    del values["quadrupoles"]
    slices = torch.stack([0.5 * values[name], values[name]], dim)

    def call(part):
        given = {**values, name: part}
        if method == "potential":
            return electrostatic_potential(positions, cell=cell, **given).gradient
        if method == "pme":
            return particle_mesh_ewald(positions, cell=cell, spline_order=8, **given)
        return ewald_summation(positions, cell=cell, **given)

    found = torch.func.vmap(call, in_dims=dim)(slices)
    exact = torch.stack([call(part) for part in slices.unbind(dim)])
    assert (found - exact).abs().max() < 3e-6 * exact.abs().max()


@pytest.mark.parametrize("channels", [(), (2,)])
def test_no_atoms(channels):
    _, cell = geometry()
    x = torch.zeros(0, 3, dtype=torch.float64)
    values = {name: x.new_zeros(0, *channels, *shape) for name, shape in (("charges", ()), ("dipoles", (3,)))}
    values["quadrupoles"] = x.new_zeros(0, *channels, 3, 3)
    for method in (ewald_summation, functools.partial(particle_mesh_ewald, spline_order=6)):
        found = method(x, cell=cell, widths=0.3, **values, **ALL)
        assert [tuple(value.shape) for value in found] == [
            (0, *channels), (0, 3), (0, *channels), (0, *channels, 3), (0, *channels, 3, 3), (1, 3, 3)
        ]  # fmt: skip
    # a batch of no systems, with derivatives by autograd and without
    x.requires_grad_()
    cells, batch_idx = x.new_zeros(0, 3, 3).requires_grad_(), torch.zeros(0, dtype=torch.int32)
    for method in (ewald_summation, particle_mesh_ewald):
        *_, virial = method(x, cell=cells, batch_idx=batch_idx, widths=0.3, **values, **ALL)
        energies = method(x, values["charges"], cells, batch_idx=batch_idx, energy_reduction="system")
        gradients = torch.autograd.grad(energies.sum(), (x, cells))
        shapes = [tuple(value.shape) for value in (virial, energies, *gradients)]
        assert shapes == [(0, 3, 3), (0, *channels), (0, 3), (0, 3, 3)]
    x = x.detach()
    for lattice in (cell, None):

        def second(x, lattice=lattice, **options):
            return electrostatic_potential(x, cell=lattice, derivatives=2, **values, **options).second

        assert second(x).shape == (0, 1, *channels, 3, 3)
        slices = torch.func.vmap(functools.partial(second, alpha=0.8, receiver_widths=[0.4]))(torch.stack([x, x]))
        assert slices.shape == (2, 0, 1, *channels, 3, 3)
    assert coulomb_energy(x, cell=None, cutoff=5.0, **values).shape == (0, *channels)


def test_no_slices():
    """Of vmap, as for a batch of data that is empty."""
    positions, cell = geometry()
    values = random_sources(5, seed=3) | {"cell": cell, "alpha": 0.8, "accuracy": 1e-4}
    none = torch.zeros(3, 6, dtype=torch.int32)

    def potential(x):
        return electrostatic_potential(x, receiver_widths=[0.4], **values).gradient

    for method in (ewald_summation, functools.partial(particle_mesh_ewald, spline_order=6)):
        of_slice = functools.partial(method, **values, **ALL)
        found = torch.func.vmap(of_slice)(positions[None][:0])
        assert [x.shape for x in found] == [(0, *x.shape) for x in of_slice(positions)]
        sizes = {"k_cutoff": 4.0} if method is ewald_summation else {"mesh_dimensions": (8, 8, 8)}
        near = {"neighbor_list": none[:2, :0], "neighbor_ptr": none[0], "neighbor_shifts": none.mT[:0]}
        of_cell = functools.partial(of_slice, positions, **near, **sizes)
        found = torch.func.vmap(lambda cell, call=of_cell: call(cell=cell))(cell[None][:0])
        assert [x.shape for x in found] == [(0, *x.shape) for x in of_slice(positions)]
    assert torch.func.vmap(potential)(positions[None][:0]).shape == (0, 5, 1, 3)


def test_coulomb_energies_with_channels():
    """Each channel is a sum of its own; of charges alone, with sources, damped."""
    positions, _ = geometry()
    values = random_sources(5, channels=2, seed=3, width=0.4, neutral=False)
    widths = values.pop("widths")
    for given in ({"charges": values["charges"]}, {**values, "widths": widths}):
        for alpha in (0.0, 0.3):
            options = {"cell": None, "cutoff": 30.0, "alpha": alpha}
            energies, forces = coulomb_energy_forces(positions, **given, **options)
            single = []
            for channel in (0, 1):
                here = {name: v if name == "widths" else v[:, channel] for name, v in given.items()}
                single.append(coulomb_energy_forces(positions, **here, **options))
            torch.testing.assert_close(energies, torch.stack([s[0] for s in single], 1))
            torch.testing.assert_close(forces, single[0][1] + single[1][1])


def test_in_float32_it_is_the_same_rounded():
    positions, cell = geometry()
    values = random_sources(5, seed=3, width=0.4, neutral=False)
    for method, function in METHODS.items():
        exact = function(positions, cell=cell, alpha=ALPHA, **values, **ALL)
        rounded = {name: value.float() for name, value in values.items()}
        found = function(positions.float(), cell=cell.float(), alpha=ALPHA, **rounded, **ALL)
        assert [value.dtype for value in found] == [torch.float64, *[torch.float32] * (len(exact) - 1)]
        for value, expected in zip(found, exact, strict=True):
            # differences of splines on a mesh this fine cancel
            tolerance = 2e-5 if method == "ewald" else 2e-4
            assert (value - expected).abs().max() < tolerance * expected.abs().max(), method


@pytest.mark.parametrize("method", METHODS)
def test_autocast_does_not_round_moments(method):
    positions, cell = (t.float() for t in geometry())
    values = {name: value.float() for name, value in random_sources(5, width=0.4).items()}

    def results():
        leaves = {name: value.clone().requires_grad_() for name, value in values.items() if name != "widths"}
        found = METHODS[method](positions, cell=cell, alpha=ALPHA, **{**values, **leaves}, **ALL)
        return [*found, *torch.autograd.grad(sum(f.square().sum() for f in found), list(leaves.values()))]

    expected = results()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = results()
    assert all(map(torch.equal, found, expected))
