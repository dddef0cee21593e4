"""Dipoles, quadrupoles and Gaussian widths in Ewald sums: against dense sums in plain torch."""

import functools
import math
import warnings

import pytest
import torch

from nvalchemiops.notices import AccuracyWarning
from nvalchemiops.torch.interactions.electrostatics import (
    EwaldSummation,
    ParticleMeshEwald,
    compute_slab_correction,
    coulomb_energy,
    coulomb_energy_forces,
    electrostatic_potential,
    ewald_real_space,
    ewald_reciprocal_space,
    ewald_summation,
    particle_mesh_ewald,
    pme_reciprocal_space,
    power_law,
)
from nvalchemiops.torch.interactions.electrostatics.results import Derivatives
from nvalchemiops.torch.interactions.electrostatics.system import check_system
from nvalchemiops.torch.interactions.electrostatics.terms.slab import SlabTerm
from nvalchemiops.torch.systems import System
from tests.reference import multipoles as dense
from tests.reference.multipoles import Field, added, everything, random_sources, scaled, traceless
from tests.support.systems import crystal, csr, disordered, triclinic

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


def long_range(positions, given, cell, own=False, alpha=ALPHA):
    """What the reciprocal functions return, as a field: of points, and the background of Gaussians."""
    field = dense.wave_field(positions, given, cell, K_CUTOFF, alpha)
    if not own:
        alphas = torch.full((len(positions),) * 2, alpha, dtype=torch.float64)
        field = added(field, scaled(-1.0, dense._own_field(alphas, given)))
    squares = given.widths**2
    integrals = 2.0 * math.pi * (squares[:, None] + squares[None, :]) - math.pi / alpha**2
    return added(field, Field(integrals @ given.charges / torch.linalg.det(cell).abs(), 0.0, 0.0))


def own_energies(given):
    widths = torch.diag(dense.screening(given.widths, given.widths))
    return dense.energies(dense._own_field(widths, given), given)


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
    for lattice in (cell, None):
        found = electrostatic_potential(x, cell=lattice, derivatives=2, **values)
        assert found.second.shape == (0, 1, *channels, 3, 3)
    assert coulomb_energy(x, cell=None, cutoff=5.0, **values).shape == (0, *channels)


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


# -- whole sums -------------------------------------------------------------------------------------

SUMS = {
    "ewald": functools.partial(ewald_summation, alpha=0.7, k_cutoff=9.0, cutoff=8.5),
    "pme": functools.partial(particle_mesh_ewald, alpha=0.7, mesh_dimensions=(50, 50, 50), spline_order=8, cutoff=8.5),
}
CASES = {"points": None, "Gaussians": 0.4}


def whole(positions, given, cell, alpha=0.9, **options):
    return dense.ewald_field(positions, given, cell, alpha, 6.3, 10.5, **options)


@pytest.mark.parametrize("method", SUMS)
@pytest.mark.parametrize("case", CASES)
def test_a_sum_is_the_dense_one_at_another_alpha(method, case):
    positions, cell = geometry()
    values = random_sources(5, seed=3, width=CASES[case], neutral=False)
    if case == "Gaussians":  # and a point among them
        values["widths"][2] = 0.0
    pairs, factors = torch.tensor([[0, 2], [3, 4]]), torch.tensor([0.0, 0.3], dtype=torch.float64)
    exclusions = [(0, 3, 0.0), (2, 4, 0.3)]
    field = functools.partial(whole, exclusions=exclusions)
    expected = everything(field, positions, dense.sources(positions, **values), cell)
    options = {"exclusions": pairs, "exclusion_factors": factors, **ALL}
    found = SUMS[method](positions, cell=cell, **values, **options)
    assert_same(found, without_channel(expected), 1e-11 if method == "ewald" else 1e-6)


def test_real_and_reciprocal_parts_add_up():
    positions, cell = geometry()
    values = random_sources(5, channels=2, seed=3, width=0.4, neutral=False)
    alpha, cutoff = 0.7, 8.5
    near = ewald_real_space(positions, cell=cell, alpha=alpha, cutoff=cutoff, **values, **ALL)
    for own in (False, True):
        options = {**values, **ALL, "self_interaction": own}
        far = ewald_reciprocal_space(positions, cell=cell, k_vectors=None, alpha=alpha, k_cutoff=9.0, **options)
        together = SUMS["ewald"](positions, cell=cell, **options)
        field = functools.partial(whole, own=own)
        expected = everything(field, positions, dense.sources(positions, **values), cell)
        assert_same(together, expected, 1e-11)
        for total, part, other in zip(together, near, far, strict=True):
            torch.testing.assert_close(part + other, total)


@pytest.mark.filterwarnings("ignore:`accuracy`")
@pytest.mark.parametrize("spline_order", [None, 5, 8])
def test_the_accuracy_is_met_with_moments_of_molecular_size(spline_order):
    system = crystal("rocksalt", 4.2, 3, 0.2)
    n = len(system.charges)
    values = {name: 0.4 * value for name, value in random_sources(n, seed=1).items()}
    exact = ewald_summation(system.positions, cell=system.cell, **values, accuracy=1e-12, compute_forces=True)[1]
    function = ewald_summation
    if spline_order is not None:
        function = functools.partial(particle_mesh_ewald, spline_order=spline_order)
    for names in (("charges", "dipoles"), ("charges", "dipoles", "quadrupoles")):
        sources = {name: values[name] for name in names}
        exact = ewald_summation(system.positions, cell=system.cell, **sources, accuracy=1e-12, compute_forces=True)[1]
        for accuracy in (1e-3, 1e-5):
            found = function(system.positions, cell=system.cell, **sources, accuracy=accuracy, compute_forces=True)[1]
            error = (found - exact).norm() / exact.norm()
            assert 0.05 * accuracy < error < 2.0 * accuracy, (names, accuracy, float(error))


@pytest.mark.parametrize("method", SUMS)
def test_whole_sums_in_float32(method):
    positions, cell = geometry()
    values = random_sources(5, seed=3, width=0.4, neutral=False)
    rounded = {name: value.float() for name, value in values.items()}
    options = {} if method == "ewald" else {"mesh_dimensions": (24, 24, 24), "alpha": 0.5}
    exact = SUMS[method](positions, cell=cell, **values, **ALL, **options)
    found = SUMS[method](positions.float(), cell=cell.float(), **rounded, **ALL, **options)
    assert [value.dtype for value in found] == [torch.float64, *[torch.float32] * (len(exact) - 1)]
    for value, expected in zip(found, exact, strict=True):
        assert (value - expected).abs().max() < 1e-4 * expected.abs().max()


def test_wide_gaussians_limit_alpha():
    positions, cell = geometry()
    values = random_sources(5, seed=3, width=1.2, neutral=False)
    given = dense.sources(positions, **values)
    exact = dense.energies(dense.wave_field(positions, given, cell, 8.0), given) - own_energies(given)
    found = ewald_summation(positions, cell=cell, **values, accuracy=1e-8)
    torch.testing.assert_close(found, exact.squeeze(1), rtol=1e-6, atol=1e-6)
    with pytest.warns(AccuracyWarning, match="widths"):
        ewald_summation(positions, cell=cell, **values, cutoff=5.0, alpha=1.0)


def test_a_wide_gaussian_without_neighbors_needs_no_longer_list(recwarn):
    """A list of its cell does not end at the farthest pair that it happens to hold: there is none."""
    x, charges = torch.zeros(1, 3, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    cell = 60.0 * torch.eye(3, dtype=torch.float64)
    near = System(x, charges, cell).neighbors(30.0).given()
    listed = {"neighbor_list": near.neighbor_list, "neighbor_ptr": near.neighbor_ptr, "neighbor_shifts": near.shifts}
    options = {"alpha": 0.8, "k_cutoff": 3.0, "widths": 1.0}
    found = ewald_summation(x, charges, cell, **options, **listed)
    torch.testing.assert_close(found, ewald_summation(x, charges, cell, **options, cutoff=30.0))
    assert not [w for w in recwarn if "reach of the neighbor list" in str(w.message)]
    with pytest.warns(AccuracyWarning, match="reach of the neighbor list"):  # not found by a search as far as that
        ewald_summation(x, charges, cell, **{**options, "widths": 1e6}, **listed)


def test_a_system_without_atoms_beside_wide_gaussians_is_no_warning(recwarn):
    """Its list reaches to infinity; the warning about the other system is all that there is to say."""
    atoms = disordered("water")
    batch_idx = torch.zeros(atoms.positions.shape[0], dtype=torch.int32)
    near = System(atoms.positions, None, atoms.cell).neighbors(4.0).given()
    ewald_summation(
        atoms.positions,
        atoms.charges,
        atoms.cell.expand(2, 3, 3),
        1.2,
        k_cutoff=3.0,
        batch_idx=batch_idx,
        neighbor_list=near.neighbor_list,
        neighbor_shifts=near.shifts,
        widths=0.6,
    )
    assert {warning.category for warning in recwarn} == {AccuracyWarning}


@pytest.mark.parametrize(
    "call",
    [
        ewald_summation,
        functools.partial(ewald_summation, cutoff=9.0),
        functools.partial(ewald_summation, alpha=0.5),
        functools.partial(particle_mesh_ewald, alpha=0.5, cutoff=9.0),
    ],
    ids=["free", "cutoff", "alpha", "mesh"],
)
def test_gaussians_that_overlap_are_told(call):
    """Forces of wide ones are far smaller than those between neighbors, by which the accuracy is understood."""
    atoms = disordered("water")
    given = {"positions": atoms.positions, "charges": atoms.charges, "cell": atoms.cell, "accuracy": 1e-6}
    with pytest.warns(AccuracyWarning, match="`widths`.*overlap"):
        wide = call(**given, widths=4.0, compute_forces=True)[1]
    # alone over k-vectors: the pairs of equal Gaussians have no short-range part at this alpha
    exact = ewald_reciprocal_space(
        atoms.positions, atoms.charges, atoms.cell, None, 0.125, k_cutoff=3.0, compute_forces=True, widths=4.0
    )[1]
    assert (wide - exact).norm() > 2e-6 * exact.norm()  # the warning is right
    with warnings.catch_warnings():
        warnings.simplefilter("error", AccuracyWarning)
        call(**given, widths=0.3)


@pytest.mark.parametrize("name", ["charges", "dipoles", "quadrupoles"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_sources_that_are_no_numbers_give_nan(name, value):
    """Whatever is chosen for them; the cell has nothing to do with it."""
    positions, cell = geometry()
    values = random_sources(5, seed=3, neutral=False)
    values[name].view(-1)[7 % values[name].numel()] = value
    near = {"cutoff": 4.0, "accuracy": 1e-3}
    for options in ({}, near, {"alpha": 0.6, **near}):
        for method in (ewald_summation, functools.partial(particle_mesh_ewald, spline_order=6)):
            for result in method(positions, cell=cell, **values, **ALL, **options):
                assert result.isnan().all() or not result.isfinite().all()
            assert method(positions, cell=cell, **values, **options).isnan().all()


@pytest.mark.parametrize("with_dipoles", [False, True])
def test_vmap_over_positions_with_a_list(with_dipoles):
    """It has the reach of the slice in which it is shortest; widths are limits in each of them."""
    atoms = disordered("water")
    n = len(atoms.positions)
    near = csr(atoms, 6.0)
    sources = {"dipoles": 0.1 * torch.sin(atoms.positions)} if with_dipoles else {}
    widths = torch.linspace(0.2, 0.4, n, dtype=torch.float64)

    def energy(x, **options):
        given = {"accuracy": 1e-4, "widths": widths, **sources, **near, **options}
        return ewald_summation(x, atoms.charges, atoms.cell, **given, energy_reduction="system")

    x = torch.stack([atoms.positions, atoms.positions + 0.02 * torch.cos(atoms.positions), 0.999 * atoms.positions])
    for options in ({}, {"alpha": 1.5}, {"cutoff": 6.0}):
        found = torch.func.vmap(functools.partial(energy, **options))(x)
        exact = torch.stack([energy(one, alpha=0.6, k_cutoff=5.0) for one in x])
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("method", SUMS)
def test_hessians_by_batched_backward_passes(method):
    """Torch has rules for fewer operations there than in ``torch.func.vmap``."""
    positions, cell = geometry(3)
    coarse = {"cutoff": 4.0, **({"k_cutoff": 3.0} if method == "ewald" else {"mesh_dimensions": (10, 10, 10)})}
    values = {"positions": positions, **random_sources(3, seed=3, neutral=False)}
    for names in (*[[name] for name in values], list(values)):
        inputs = {name: value.clone().requires_grad_(name in names) for name, value in values.items()}
        leaves = [inputs[name] for name in names]
        energy = SUMS[method](cell=cell, **inputs, **coarse).sum()
        for slope in torch.autograd.grad(energy, leaves, create_graph=True):
            units = torch.eye(slope.numel(), dtype=torch.float64).view(-1, *slope.shape)
            at_once = torch.autograd.grad(slope, leaves, units, is_grads_batched=True, retain_graph=True)
            rows = [torch.autograd.grad(slope, leaves, unit, retain_graph=True) for unit in units]
            for block, *values_of_rows in zip(at_once, *rows, strict=True):
                torch.testing.assert_close(block, torch.stack(values_of_rows), rtol=1e-9, atol=1e-9)


def test_hybrid_forces_pass_gradients_through_all_sources():
    positions, cell = geometry()
    values = random_sources(5, seed=3, neutral=False)
    inputs = {name: value.clone().requires_grad_() for name, value in values.items()}
    x = positions.clone().requires_grad_()
    found = SUMS["ewald"](x, cell=cell, **inputs, **ALL, hybrid_forces=True)
    gradients = torch.autograd.grad(found[0].sum(), (x, *inputs.values()), allow_unused=True)
    assert gradients[0] is None
    for value, explicit in zip(gradients[1:], found[2:5], strict=True):
        torch.testing.assert_close(value, explicit)


@pytest.mark.parametrize("neutral", [True, False])
def test_slabs_and_surfaces(neutral):
    positions, cell = geometry()
    values = random_sources(5, seed=3, width=0.4, neutral=neutral)
    sources = dense.sources(positions, **values)
    pbc = torch.tensor([True, True, False])
    plain = SUMS["ewald"](positions, cell=cell, **values, **ALL)
    for options in ({"pbc": pbc, "slab_correction": True}, {"surface_dielectric": 1.0}):
        found = SUMS["ewald"](positions, cell=cell, **values, **ALL, **options)
        added_energy = float((found[0] - plain[0]).sum())
        if "pbc" not in options:
            moment = (sources.charges * positions + sources.dipoles.squeeze(1)).sum(0)
            exact = 2.0 * math.pi / 3.0 / torch.linalg.det(cell).abs() * moment.square().sum()
            assert added_energy == pytest.approx(float(exact))
        leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
        del leaves["widths"]
        x = positions.clone().requires_grad_()
        strain = torch.zeros(3, 3, dtype=torch.float64, requires_grad=True)
        deform = torch.eye(3, dtype=torch.float64) + strain
        arguments = {**leaves, "widths": values["widths"], **options}
        energies = SUMS["ewald"](x @ deform, cell=cell @ deform, **arguments)
        slopes = torch.autograd.grad(energies.sum(), (x, *leaves.values(), strain))
        expected = (-slopes[0], *slopes[1:4], -slopes[4])
        for value, exact in zip(found[1:], expected, strict=True):
            torch.testing.assert_close(value.reshape(exact.shape), exact, rtol=1e-8, atol=1e-8)


def test_a_charged_slab_does_not_see_the_widths_of_its_gaussians():
    x = torch.tensor([[0.0, 0.0, 0.0], [2.0, 2.0, 0.4]], dtype=torch.float64)
    charges, cell = torch.tensor([1.0, 0.5], dtype=torch.float64), torch.diag(torch.tensor([4.0, 4.0, 60.0])).double()
    options = {"pbc": torch.tensor([True, True, False]), "slab_correction": True, "accuracy": 1e-9}
    of_points = ewald_summation(x, charges, cell, **options).sum()
    of_gaussians = ewald_summation(x, charges, cell, **options, widths=0.15).sum()
    # neighbors are far beyond the Gaussians
    assert float(of_gaussians) == pytest.approx(float(of_points), abs=1e-7)


@pytest.mark.parametrize("function", [ewald_summation, particle_mesh_ewald])
def test_compiled_it_is_the_same(function):
    positions, cell = geometry()
    values = random_sources(5, seed=3, width=0.4, neutral=False)
    options = {"miller_bounds": (4, 4, 4)} if function is ewald_summation else {"mesh_dimensions": (20, 20, 20)}
    call = functools.partial(function, cell=cell, alpha=0.5, cutoff=6.0, **options, **ALL)
    found = torch.compile(call, backend="aot_eager", fullgraph=True)(positions, **values)
    for value, expected in zip(found, call(positions, **values), strict=True):
        torch.testing.assert_close(value, expected)


def test_modules_take_systems_with_sources():
    positions, cell = geometry()
    values = random_sources(5, seed=3, width=0.4, neutral=False)
    charges = values.pop("charges")
    module = EwaldSummation(accuracy=1e-5)
    found = module(System(positions, charges, cell, **values), compute_forces=True, compute_quadrupole_gradients=True)
    assert found._fields == ("energies", "forces", "quadrupole_gradients")
    for value, exact in zip(found, module(positions, charges, cell, **values, compute_forces=True)):
        torch.testing.assert_close(value, exact)


@pytest.mark.parametrize("module", [EwaldSummation, ParticleMeshEwald])
@pytest.mark.parametrize("case", ["dipoles", "quadrupoles", "wide"])
def test_estimated_parameters_are_those_for_the_sources_of_the_system(module, case):
    """Few charges, and dipoles or quadrupoles as strong as they: parameters for charges miss this by far."""
    atoms = crystal("rocksalt", 5.6, 2, 0.2)
    values = random_sources(16, seed=1)
    sources = {
        "dipoles": {"charges": 0.0 * atoms.charges, "dipoles": values["dipoles"]},
        "quadrupoles": {"charges": atoms.charges, "quadrupoles": values["quadrupoles"]},
        "wide": {"charges": atoms.charges, "widths": torch.full_like(atoms.charges, 0.9)},
    }[case]
    system = System(atoms.positions, cell=atoms.cell)._replace(**sources)
    exact = EwaldSummation(accuracy=1e-11)(system, compute_forces=True).forces
    with warnings.catch_warnings():
        warnings.simplefilter("error", AccuracyWarning)
        found = module.estimate(system, accuracy=1e-6)(system, compute_forces=True).forces
    assert (found - exact).norm() < 2e-6 * exact.norm()


# -- arguments --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dipoles": torch.zeros(5, 2).double()}, "`dipoles` must have shape"),
        ({"dipoles": torch.zeros(5, 1, 3).double()}, "`dipoles` must have shape"),
        ({"quadrupoles": torch.zeros(5, 3).double()}, "`quadrupoles` must have shape"),
        ({"widths": torch.zeros(4).double()}, "`widths` must be a number or have shape"),
        ({"widths": -0.1}, "`widths` must be finite and non-negative"),
        ({"widths": torch.full((5,), torch.nan).double()}, "`widths` must be finite and non-negative"),
        ({"dipoles": None, "compute_dipole_gradients": True}, "`compute_dipole_gradients` needs `dipoles`"),
        ({"self_interaction": True}, r"`self_interaction` is infinite for points.* add q²/\(2 sqrt\(pi\) width\)"),
        ({"potential": power_law(6)}, "are for the Coulomb potential"),
        ({"surface_dielectric": -1.0}, "`surface_dielectric`"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    positions, cell = geometry()
    charges = torch.ones(5, dtype=torch.float64)
    arguments = {"dipoles": torch.zeros(5, 3, dtype=torch.float64), "alpha": 0.5, "k_cutoff": 3.0} | changes
    with pytest.raises((ValueError, TypeError), match=message):
        ewald_summation(positions, charges, cell, cutoff=5.0, **arguments)


def test_splines_of_too_low_an_order_are_refused():
    positions, cell = geometry()
    values = random_sources(5, seed=3)
    for names, order in ((("charges", "dipoles"), 3), (("charges", "quadrupoles"), 4)):
        sources = {name: values[name] for name in names}
        with pytest.raises(ValueError, match=f"`spline_order` must be at least {order + 1} with `{names[1]}`"):
            pme_reciprocal_space(
                positions, cell=cell, alpha=0.5, mesh_dimensions=(9, 9, 9), spline_order=order, **sources
            )
    with pytest.raises(TypeError, match="`dipoles` has dtype"):
        float32 = values["dipoles"].float()
        ewald_reciprocal_space(positions, values["charges"], cell, None, 0.5, k_cutoff=3.0, dipoles=float32)


@pytest.mark.parametrize("what", ["have a trace", "are not symmetric"])
def test_a_part_of_quadrupoles_is_dropped_with_a_warning(what, recwarn):
    positions, cell = geometry()
    values = random_sources(5, seed=3)
    more = torch.eye(3) if what == "have a trace" else torch.tensor([[0.0, 1.0, 0.0], [-1.0, 0.0, 0.0], [0.0] * 3])
    found, known = (
        METHODS["ewald"](positions, cell=cell, alpha=ALPHA, **(values | {"quadrupoles": values["quadrupoles"] + part}))
        for part in (more, 0.0)
    )
    torch.testing.assert_close(found, known)
    (said,) = recwarn  # of this part alone, and none without it
    assert said.category is AccuracyWarning and what in str(said.message)


@pytest.mark.parametrize("function", [ewald_summation, particle_mesh_ewald])
def test_sources_that_are_all_zero_have_no_energy_and_no_warning(function, recwarn):
    positions, cell = 5.0 * torch.rand(8, 3, dtype=torch.float64), 8.0 * torch.eye(3, dtype=torch.float64)
    zero = torch.zeros(8, 3, dtype=torch.float64)
    assert torch.equal(function(positions, zero[:, 0], cell, dipoles=zero), zero[:, 0])
    assert not recwarn.list
