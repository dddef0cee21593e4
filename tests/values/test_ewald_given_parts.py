"""Sums whose mesh, wave vectors or list are given, but not alpha: the best one for them, and a warning if need be."""

import functools
import itertools
import re
import warnings

import pytest
import torch

from nvalchemiops import AccuracyWarning, NeighborListWarning
from nvalchemiops.torch import plans, record
from nvalchemiops.torch.autograd import NotDifferentiableError
from nvalchemiops.torch.interactions import electrostatics
from nvalchemiops.torch.neighbors import neighbor_list
from tests.support.comparing import close
from tests.support.sums import METHODS, exact_forces, relative_error, summed
from tests.support.systems import System, batch, crystal, csr, disordered

NAMES = pytest.mark.parametrize("name", ["ionic liquid", "triclinic", "water"])
SUMS = {"ewald": electrostatics.ewald_summation, "pme": electrostatics.particle_mesh_ewald}


def spacing(system):
    return (torch.linalg.det(system.cell[0]).abs() / len(system.positions)).item() ** (1 / 3)


def forces_and_warnings(method, system, **options):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        result = SUMS[method](
            system.positions, system.charges, system.cell, batch_idx=system.batch_idx, compute_forces=True, **options
        )
    return result[1], [w for w in found if issubclass(w.category, AccuracyWarning)]


def expected(warning):
    return float(re.search(r"of about ([\d.e-]+)", str(warning.message))[1])


# cutoffs in units of the average distance
COARSE = {
    "sphere": ("ewald", 2.0, lambda system: {"k_cutoff": 3.0 / spacing(system)}),
    "long vectors": ("ewald", 2.0, lambda system: {"k_cutoff": torch.tensor([7.0 / spacing(system)])}),
    "box": ("ewald", 2.0, lambda _: {"miller_bounds": (2, 2, 2)}),
    "longer box": ("ewald", 1.8, lambda _: {"miller_bounds": (8, 5, 6)}),
    "indices": (
        "ewald",
        2.0,
        lambda system: {"miller_indices": electrostatics.prepare_wave_vectors(system.cell, 3.0 / spacing(system))},
    ),
    "vectors": (
        "ewald",
        2.0,
        lambda system: {
            "k_vectors": electrostatics.generate_k_vectors_ewald_summation(system.cell, 3.0 / spacing(system))
        },
    ),
    "mesh": ("pme", 2.0, lambda _: {"mesh_dimensions": (24, 24, 24)}),
    "uneven mesh": ("pme", 3.0, lambda _: {"mesh_dimensions": (24, 18, 30)}),
    "coarse mesh": ("pme", 3.0, lambda _: {"mesh_dimensions": (8, 8, 8), "spline_order": 6}),
    "spacing": ("pme", 2.5, lambda system: {"mesh_spacing": 0.5 * spacing(system)}),
    "order 2": ("pme", 2.5, lambda _: {"mesh_dimensions": (24, 24, 24), "spline_order": 2}),
    "order 8": ("pme", 2.0, lambda _: {"mesh_dimensions": (20, 20, 20), "spline_order": 8}),
}
FINE = {"fine mesh": ("pme", 3.0, lambda _: {"mesh_dimensions": (48, 48, 48)})}


@NAMES
@pytest.mark.parametrize("case", COARSE)
def test_what_misses_the_accuracy_is_said_and_how_far(name, case):
    method, reach, parts = COARSE[case]
    system = disordered(name)
    given = {"cutoff": reach * spacing(system), **parts(system)}
    forces, (warning,) = forces_and_warnings(method, system, **given)
    error = relative_error(forces, exact_forces(name))
    assert error / 2.0 < expected(warning) < 3.5 * error
    # the list itself tells its reach
    del given["cutoff"]
    by_list, (warning,) = forces_and_warnings(method, system, **given, **csr(system, reach * spacing(system)))
    assert relative_error(by_list, exact_forces(name)) < 1.5 * error


def test_a_mesh_that_is_too_coarse_for_dipoles_is_told_with_their_error():
    """It is larger than that of charges, relative to the forces."""
    system = disordered("ionic liquid")
    d, alone = spacing(system), system._replace(charges=0.0 * system.charges)
    sources = {"dipoles": 0.3 * d * torch.sin(7.0 * system.positions)}
    exact, _ = forces_and_warnings("ewald", alone, accuracy=1e-8, **sources)
    for points, order in ((16, 6), (24, 8)):
        mesh = {"mesh_dimensions": (points,) * 3, "spline_order": order}
        forces, (warning,) = forces_and_warnings("pme", alone, cutoff=2.2 * d, **mesh, **sources)
        error = relative_error(forces, exact)
        assert error / 2.0 < expected(warning) < 3.5 * error


@NAMES
@pytest.mark.parametrize("case", ["sphere", "box", "mesh", "order 8"])
def test_no_other_alpha_is_much_better(name, case):
    method, reach, parts = COARSE[case]
    system = disordered(name)
    given = {"cutoff": reach * spacing(system), **parts(system)}

    def error(**options):
        return relative_error(forces_and_warnings(method, system, **given, **options)[0], exact_forces(name))

    scale = torch.linspace(0.4, 2.6, 23).tolist()
    # models of errors of some percent are rough
    assert error() < 2.0 * min(error(alpha=s / spacing(system)) for s in scale)


@METHODS
def test_parts_that_suffice_change_nothing(method):
    """Neither alpha nor anything else, but for k-vectors, which are chosen for the cell in steps."""
    system = disordered("ionic liquid")
    x, q, cell = system[:3]
    if method == "ewald":
        found = electrostatics.estimate_ewald_parameters(x, cell, accuracy=1e-5, charges=q)
        given = {"k_cutoff": found.reciprocal_space_cutoff}
    else:
        found = electrostatics.estimate_pme_parameters(x, cell, accuracy=1e-5, charges=q)
        given = {"mesh_dimensions": found.mesh_dimensions}
    order = {"spline_order": 5} if method == "pme" else {}
    neighbors = csr(system, found.real_space_cutoff.item())
    plain, none = forces_and_warnings(method, system, accuracy=1e-5, **neighbors, **order)
    forces, also_none = forces_and_warnings(method, system, accuracy=1e-5, **neighbors, **given)
    assert not none and not also_none
    tolerance = 1e-12 if method == "pme" else 1e-5
    torch.testing.assert_close(forces, plain, rtol=0.0, atol=tolerance * plain.abs().max().item())


@NAMES
@pytest.mark.parametrize(
    ("method", "given"),
    [("ewald", {"k_cutoff": 1.0}), ("ewald", {"miller_bounds": (3, 3, 3)}), ("pme", {"mesh_dimensions": (27, 27, 27)})],
)
def test_an_open_cutoff_grows_until_the_accuracy_is_met(name, method, given):
    forces, none = forces_and_warnings(method, disordered(name), accuracy=1e-5, **given)
    assert relative_error(forces, exact_forces(name)) < 2e-5 and not none


@pytest.mark.later
def test_a_cutoff_does_not_grow_without_end():
    """The list for this mesh would have to be as long as a hundred cells."""
    forces, (warning,) = forces_and_warnings("pme", disordered("water"), mesh_dimensions=(5, 5, 5), spline_order=4)
    error = relative_error(forces, exact_forces("water"))
    # said with one digit; the model of a mesh is for random charges, and molecules have a third of its error here
    assert error / 3.0 < expected(warning) < 5.0 * error


@pytest.mark.parametrize("case", ["sphere", "box", "mesh", "indices"])
def test_compiled_sums_choose_the_same_and_say_nothing(case):
    method, reach, parts = COARSE[case]
    system = disordered("water")
    given = {"cutoff": reach * spacing(system), "compute_forces": True, **parts(system)}

    def forces(positions, charges, cell):
        return SUMS[method](positions, charges, cell, **given)[1]

    with warnings.catch_warnings():
        warnings.simplefilter("error", AccuracyWarning)
        compiled = torch.compile(forces, fullgraph=True, backend="aot_eager")(*system[:3])
    eager = forces_and_warnings(method, system, **{k: v for k, v in given.items() if k != "compute_forces"})[0]
    torch.testing.assert_close(compiled, eager, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("method", SUMS)
def test_lists_that_are_too_short_for_a_given_alpha_are_noticed(method):
    """Where an accuracy is asked for, since no mesh or k-vectors are given."""
    system, short = disordered("water"), 2.5 * spacing(disordered("water"))
    reference = exact_forces("water")
    found = csr(system, short)
    for near, cutoff in ((found, short), ({}, short), (found, None)):  # that is given, found, or measured
        forces, (warning,) = forces_and_warnings(method, system, alpha=1.5 / short, cutoff=cutoff, **near)
        error = relative_error(forces, reference)
        assert error / 3.0 < expected(warning) < 3.0 * error
    longer = csr(system, 2.6 * short)
    assert not forces_and_warnings(method, system, alpha=1.5 / short, cutoff=short, **longer)[1]
    unknown = system._replace(charges=torch.nan * system.charges)
    assert not forces_and_warnings(method, unknown, alpha=1.5 / short, cutoff=short, **found)[1]
    sums = functools.partial(SUMS[method], alpha=1.5 / short, cutoff=short)
    # says nothing, since replays have other positions, charges or images
    assert record(lambda x: sums(x, *system[1:3], **found))(system.positions).isfinite().all()
    assert record(lambda q: sums(system.positions, q, system.cell, **found))(system.charges).isfinite().all()
    moved = record(lambda shifts: sums(*system[:3], **{**found, "neighbor_shifts": shifts}))
    assert moved(found["neighbor_shifts"]).isfinite().all()
    for enough in ({"accuracy": 0.05}, {"k_cutoff": 1.0} if method == "ewald" else {"mesh_dimensions": (12, 12, 12)}):
        assert not forces_and_warnings(method, system, alpha=1.5 / short, cutoff=short, **found, **enough)[1]


@pytest.mark.parametrize("method", SUMS)
def test_a_list_of_all_pairs_of_a_molecule_is_long_enough_for_a_given_alpha(method):
    """Although the cell is large, and the cutoff short for atoms at the same density everywhere; in a batch, too."""
    torch.manual_seed(3)
    grid = torch.cartesian_prod(*[torch.arange(2.0, dtype=torch.float64)] * 3) + 0.1 * torch.rand(8, 3).double()
    charges = torch.tensor([1.0, -1.0, 0.5, -0.7, 0.7, -0.5, 0.3, -0.2], dtype=torch.float64)
    cell = 30.0 * torch.eye(3, dtype=torch.float64).unsqueeze(0)
    molecule, wider = (System(a * grid, charges, cell, torch.zeros(8, dtype=torch.int32)) for a in (2.0, 4.0))
    exact = forces_and_warnings("ewald", molecule, accuracy=1e-10)[0]
    forces, none = forces_and_warnings(method, molecule, alpha=0.3, cutoff=5.0)
    assert not none and relative_error(forces, exact) < 1e-6
    for short in (wider, batch(molecule, wider)):
        for near in ({"cutoff": 5.0}, csr(short, 5.0)):
            (warning,) = forces_and_warnings(method, short, alpha=0.3, **near)[1]
            assert expected(warning) > 0.01
    with plans.off():  # whose recorded calls say nothing
        assert not forces_and_warnings(method, molecule, alpha=0.3, **csr(molecule, 5.0))[1]
    assert not forces_and_warnings(method, batch(*[molecule] * 300), alpha=0.3, cutoff=5.0)[1]
    # more pairs than are looked at: images are 7 apart, which this alpha does not need, and the list does not hold
    many = batch(*[molecule._replace(cell=cell / 3.0)] * 1500)
    with plans.off():
        assert not forces_and_warnings(method, many, alpha=0.5, accuracy=1e-5, **csr(many, 7.0))[1]
    sums = torch.vmap(lambda x: SUMS[method](x, charges, cell, alpha=0.3, cutoff=5.0).sum())
    with warnings.catch_warnings():
        warnings.simplefilter("error", AccuracyWarning)
        assert sums(torch.stack([molecule.positions] * 2)).isfinite().all()
        lost, found = torch.full_like(molecule.positions, torch.nan), csr(molecule, 5.0)
        assert SUMS[method](lost, charges, cell, alpha=0.3, cutoff=5.0, **found).isnan().all()
    with pytest.warns(AccuracyWarning, match="reach"):
        sums(torch.stack([molecule.positions, wider.positions]))


def test_each_system_of_a_batch_gets_its_own():
    first, second = disordered("ionic liquid"), disordered("triclinic")
    together, given = batch(first, second), {"cutoff": 7.0, "k_cutoff": 1.4, "accuracy": 1e-6}
    forces, (warning,) = forces_and_warnings("ewald", together, **given)
    singles = [forces_and_warnings("ewald", system, **given) for system in (first, second)]
    torch.testing.assert_close(forces, torch.cat([f for f, _ in singles]), rtol=1e-9, atol=1e-11)
    assert expected(warning) == max(expected(w) for _, (w,) in singles)


@METHODS
@pytest.mark.parametrize("accuracy", [1e-3, 1e-6])
def test_estimated_parameters_have_the_errors_that_were_asked_for(method, accuracy):
    system = batch(disordered("ionic liquid"), disordered("triclinic"))
    estimate = {"ewald": electrostatics.estimate_ewald_parameters, "pme": electrostatics.estimate_pme_parameters}[
        method
    ]
    where = (system.positions, system.cell, system.batch_idx)
    found = estimate(*where, accuracy=accuracy, charges=system.charges)
    errors = electrostatics.estimate_errors(*where, **found._asdict(), charges=system.charges)
    assert (errors.total <= 1.01 * accuracy).all() and (errors.total > 0.3 * accuracy).all()
    torch.testing.assert_close(errors.total, torch.hypot(errors.real_space, errors.reciprocal_space))
    # without charges forces are taken for smaller than they are here
    assert (electrostatics.estimate_errors(*where, **found._asdict()).total > 1.5 * errors.total).all()


@pytest.mark.parametrize(
    ("name", "case"),
    [
        *itertools.product(NAMES.args[1], ("sphere", "longer box", "uneven mesh", "order 8")),
        ("skewed basis", "fine mesh"),
    ],
)
def test_estimated_errors_are_those_that_are_measured(name, case):
    """Those of a mesh grow with the lengths of lattice vectors, here up to ten times the heights."""
    method, reach, parts = (COARSE | FINE)[case]
    system = disordered(name)
    given, alpha, cutoff = parts(system), 1.3 / spacing(system), reach * spacing(system)
    forces, _ = forces_and_warnings(method, system, alpha=alpha, cutoff=cutoff, **given)
    names = {"k_cutoff": "reciprocal_space_cutoff"}
    errors = electrostatics.estimate_errors(
        system.positions,
        system.cell,
        alpha=alpha,
        real_space_cutoff=cutoff,
        charges=system.charges,
        **{names.get(k, k): v for k, v in given.items()},
    )
    measured = relative_error(forces, exact_forces(name))
    assert measured / 2.0 < errors.total.item() < 3.5 * measured


def test_errors_need_parameters():
    system = disordered("water")
    where = {"positions": system.positions, "cell": system.cell, "alpha": 0.5, "real_space_cutoff": 6.0}
    with pytest.raises(ValueError, match="one of `reciprocal_space_cutoff`"):
        electrostatics.estimate_errors(**where)
    with pytest.raises(ValueError, match="one of `reciprocal_space_cutoff`"):
        electrostatics.estimate_errors(**where, reciprocal_space_cutoff=3.0, mesh_dimensions=(8, 8, 8))
    with pytest.raises(ValueError, match="`charges` has entries"):
        electrostatics.estimate_errors(**where, reciprocal_space_cutoff=3.0, charges=system.charges * torch.nan)
    with pytest.raises(ValueError, match="`alpha` must be positive"):
        electrostatics.estimate_errors(**{**where, "alpha": float("nan")}, reciprocal_space_cutoff=3.0)


@pytest.mark.parametrize("accuracy", [1e-5, 1e-6])
def test_a_sphere_of_few_waves_is_not_taken_for_a_larger_one(accuracy):
    """In a small cell the next wave vectors along an axis are much longer than the sphere."""
    system, length = crystal("rocksalt", 5.64, 1, 0.4), 2.233
    exact = summed("ewald", system, accuracy=1e-13, compute_forces=True)[1]
    k_vectors = electrostatics.generate_k_vectors_ewald_summation(system.cell, length)
    k_vectors = k_vectors[k_vectors.norm(dim=1) <= length]
    for given in (
        {"k_cutoff": length},
        {"miller_indices": electrostatics.prepare_wave_vectors(system.cell, length)},
        {"k_vectors": k_vectors},
    ):
        forces, said = forces_and_warnings("ewald", system, accuracy=accuracy, **given)
        assert relative_error(forces, exact) < 3.0 * max([accuracy, *map(expected, said)])


def test_prepared_waves_of_a_stretched_cell_reach_less_far():
    system = disordered("water")
    waves = electrostatics.prepare_wave_vectors(0.8 * system.cell, 2.0)
    same = waves.complete_up_to(0.8 * system.cell)
    torch.testing.assert_close(same, torch.tensor([2.0], dtype=torch.float64))
    torch.testing.assert_close(waves.complete_up_to(system.cell), torch.tensor([1.6], dtype=torch.float64))


# -- accuracies and meshes beyond the splines ----------------------------------------------------------------


@pytest.mark.parametrize(("order", "accuracy"), [(3, 5e-6), (4, 1e-8), (5, 1e-9)])
def test_an_accuracy_out_of_reach_of_the_splines_is_said(order, accuracy):
    system = disordered("water")
    forces, (warning,) = forces_and_warnings("pme", system, accuracy=accuracy, spline_order=order, **csr(system, 7.0))
    error = relative_error(forces, exact_forces("water"))
    assert error / 2.0 < expected(warning) < 3.0 * error and error > accuracy
    assert "a higher `spline_order`, up to 10, goes further" in str(warning.message)


@pytest.mark.parametrize(("order", "accuracy"), [(4, 1e-6), (5, 1e-8)])
def test_torch_sim_asks_small_cells_for_about_all_that_the_splines_have(order, accuracy):
    """Its defaults: a list of its own reach, no alpha. It gets that, nearly, and a warning at most."""
    system = crystal("rocksalt", 5.64, 1, 0.4)  # perfect ones have no forces to compare errors with
    exact = summed("ewald", system, accuracy=1e-13, compute_forces=True)[1]
    forces, said = forces_and_warnings("pme", system, accuracy=accuracy, spline_order=order, **csr(system, 6.0))
    error = relative_error(forces, exact)
    assert error < 3.0 * max([accuracy, *map(expected, said)]) < 30.0 * accuracy


def test_an_accuracy_far_out_of_reach_takes_no_gigabytes():
    system = disordered("ionic liquid")
    options = {"accuracy": 1e-12, "spline_order": 4}
    with pytest.warns(AccuracyWarning, match="out of reach of splines of order 4"):
        found = electrostatics.estimate_pme_parameters(system.positions, system.cell, **options)
    assert torch.tensor(found.mesh_dimensions).prod() < 2**26
    with pytest.warns(AccuracyWarning, match="out of reach of splines of order 4"):
        electrostatics.estimate_pme_mesh_dimensions(system.cell, found.alpha, **options)


@pytest.mark.parametrize("points", [2, 4, 6])
def test_a_mesh_smaller_than_the_order_takes_the_order_that_fits(points):
    system = disordered("water")
    given = {"alpha": 0.4, "cutoff": 8.0, "mesh_dimensions": (points, points, points)}
    forces, (warning,) = forces_and_warnings("pme", system, spline_order=8, **given)
    assert f"order {points}" in str(warning.message)
    expected, none = forces_and_warnings("pme", system, spline_order=points, **given)
    assert not none and torch.equal(forces, expected)
    with pytest.warns(AccuracyWarning, match=f"order {points} is used"):
        module = electrostatics.ParticleMeshEwald(0.4, (points, points, points), 8, 8.0)
    close(module(*system[:3], compute_forces=True)[1:], (forces,), 0.0)


def test_a_mesh_of_one_point_is_refused():
    with pytest.raises(ValueError, match="`mesh_dimensions`"):
        electrostatics.particle_mesh_ewald(*disordered("water")[:3], 0.4, mesh_dimensions=(1, 8, 8))


def test_splines_of_order_2():
    """Energies and forces; a second derivative has steps everywhere, and none of them is the answer."""
    system = disordered("water")
    x, q, cell = system[:3]
    x = x.clone().requires_grad_()
    given = {"alpha": 0.35, "mesh_dimensions": (20, 20, 20), "cutoff": 6.0, "spline_order": 2}
    energy = electrostatics.particle_mesh_ewald(x, q, cell, **given, energy_reduction="system")
    (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
    torch.testing.assert_close(slope, -electrostatics.particle_mesh_ewald(x, q, cell, **given, compute_forces=True)[1])
    step = torch.zeros_like(x)
    step[3] = torch.tensor([1e-6, -2e-6, 1.5e-6])
    ahead, behind = (
        electrostatics.particle_mesh_ewald(x.detach() + s * step, q, cell, **given).sum() for s in (1.0, -1.0)
    )
    torch.testing.assert_close((ahead - behind) / 2.0, (slope * step).sum(), rtol=1e-6, atol=0.0)
    exact = electrostatics.ewald_summation(*system[:3], energy_reduction="system")
    torch.testing.assert_close(energy.detach(), exact, rtol=0.02, atol=0.0)
    with pytest.raises(NotDifferentiableError, match="order"):
        torch.autograd.grad(slope.square().sum(), x)


# -- lists that are not what they should be ------------------------------------------------------------------


@METHODS
def test_aimnet_rows_cut_at_a_width_give_a_warning_and_the_sum_of_what_is_there(method):
    """Each row cut at 50 of its neighbors, shifts all zero."""
    system = disordered("water")
    n_atoms = len(system.positions)
    matrix, count, _ = neighbor_list(system.positions, 7.0, system.cell)
    assert count.min() > 50
    # what stands in a row after the cut is the nearest image's, as the client has it for large cells
    cut = {
        "neighbor_matrix": matrix[:, :50].contiguous(),
        "neighbor_matrix_shifts": torch.zeros((n_atoms, 50, 3), dtype=torch.int32),
        "mask_value": n_atoms,
    }
    options = {"alpha": None, "accuracy": 1e-4}
    with pytest.warns(NeighborListWarning, match="not full"):
        energies = SUMS[method](*system[:3], **cut, **options)
    i = torch.arange(n_atoms).repeat_interleave(50)
    reach = (system.positions[cut["neighbor_matrix"].flatten().long()] - system.positions[i]).norm(dim=1).max()
    same = SUMS[method](*system[:3], **cut, **options, cutoff=reach.item())
    torch.testing.assert_close(energies, same, rtol=1e-12, atol=1e-12)
    # the sum over the pairs that are there, beside the smooth part that does not know of pairs
    alpha = 0.4
    rest = {"k_cutoff": 3.0} if method == "ewald" else {"mesh_dimensions": (32, 32, 32)}
    found = SUMS[method](*system[:3], alpha, **rest, **cut) - SUMS[method](*system[:3], alpha, **rest, cutoff=1e-3)
    j = cut["neighbor_matrix"].flatten().long()
    r = (system.positions[j] - system.positions[i]).norm(dim=1)
    pairs = 0.5 * system.charges[i] * system.charges[j] * torch.erfc(alpha * r) / r
    torch.testing.assert_close(found, torch.zeros(n_atoms, dtype=r.dtype).index_add(0, i, pairs), rtol=1e-8, atol=1e-9)


@METHODS
def test_a_list_without_pairs_needs_no_alpha(method):
    """Nothing is nearer than the shortest distance, which is as far as such a list reaches."""
    cell = 12.0 * torch.eye(3, dtype=torch.float64)
    positions = torch.tensor([[1.0, 2.0, 3.0], [7.5, 8.0, 9.0]], dtype=torch.float64)
    system = System.of(positions.numpy(), [1.0, -1.0], cell.numpy())
    empty = csr(system, 4.0)
    assert empty["neighbor_list"].shape == (2, 0)
    energies = summed(method, system, accuracy=1e-6, **empty)
    close((energies,), (summed("ewald", system, accuracy=1e-12),), 1e-6)
    nothing = {
        "neighbor_matrix": torch.zeros((2, 0), dtype=torch.int32),
        "neighbor_matrix_shifts": torch.zeros((2, 0, 3), dtype=torch.int32),
    }
    close((summed(method, system, accuracy=1e-6, **nothing),), (energies,), 1e-12)


@METHODS
def test_a_list_without_pairs_needs_no_alpha_in_any_slice(method):
    """Of `vmap`: the shortest distance of all slices counts, also beside slices that have pairs."""
    cell, q = 12.0 * torch.eye(3, dtype=torch.float64), torch.tensor([1.0, -1.0], dtype=torch.float64)
    slices = (
        torch.tensor([[1.0, 2.0, 3.0], [7.5, 8.0, 9.0]], dtype=torch.float64) * torch.tensor([1.0, 0.5])[:, None, None]
    )

    def energies(x, entries, shifts):
        near = {"neighbor_matrix": entries, "neighbor_matrix_shifts": shifts}
        return SUMS[method](x, q, cell, accuracy=1e-6, **near)

    exact = torch.stack([SUMS["ewald"](x, q, cell, accuracy=1e-12) for x in slices])
    matrices, _, shifts = map(torch.stack, zip(*[neighbor_list(x, 5.5, cell, max_neighbors=1) for x in slices]))
    assert (matrices != 2).sum((1, 2)).tolist() == [0, 2]
    for axis, near in ((0, (matrices, shifts)), (None, (matrices[0], shifts[0]))):
        close((torch.func.vmap(energies, (0, axis, axis))(slices, *near),), (exact,), 1e-6)


def test_modules_with_given_parameters_do_not_warn():
    """Whoever gives all of them knows what they want."""
    system = disordered("water")
    with warnings.catch_warnings():
        warnings.simplefilter("error", AccuracyWarning)
        electrostatics.EwaldSummation(0.3, 1.0, 6.0)(*system[:3])
        electrostatics.ParticleMeshEwald(0.3, (8, 8, 8), 5, 6.0)(*system[:3])


@METHODS
@pytest.mark.parametrize("kind", ["dipoles", "widths"])
def test_cells_of_slices_need_no_choice_if_all_is_given(method, kind):
    """Neither with a cutoff nor with a list are strengths of sources asked for, or how far Gaussians reach."""
    system = disordered("triclinic")
    x, q, cell = system[:3]
    sources = {"dipoles": 0.1 * torch.cos(x)} if kind == "dipoles" else {"widths": torch.full_like(q, 1.0)}
    rest = {"miller_bounds": (4, 4, 4)} if method == "ewald" else {"mesh_dimensions": (16, 16, 16)}
    cells = torch.cat([cell, 1.01 * cell])
    for near in ({"cutoff": 4.0}, csr(system, 4.0)):

        def energies(h, near=near):
            return SUMS[method](x, q, h, 0.6, **sources, **rest, **near)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AccuracyWarning)
            close((torch.func.vmap(energies)(cells),), (torch.stack([energies(h) for h in cells]),))
