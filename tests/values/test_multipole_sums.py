"""Whole sums over dipoles, quadrupoles and Gaussians, and slabs of them: against dense sums in plain torch."""

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
    ewald_real_space,
    ewald_reciprocal_space,
    ewald_summation,
    particle_mesh_ewald,
)
from nvalchemiops.torch.interactions.electrostatics.results import Derivatives
from nvalchemiops.torch.interactions.electrostatics.system import check_system
from nvalchemiops.torch.interactions.electrostatics.terms.slab import SlabTerm
from nvalchemiops.torch.systems import System
from tests.reference import multipoles as dense
from tests.reference.multipoles import everything, random_sources
from tests.support.multipoles import ALL, assert_same, geometry, without_channel
from tests.support.systems import crystal, csr, disordered


def own_energies(given):
    widths = torch.diag(dense.screening(given.widths, given.widths))
    return dense.energies(dense._own_field(widths, given), given)


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
