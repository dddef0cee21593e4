"""Particle-mesh Ewald and what holds for `ewald_summation` as well: results, their order, bad input, cost of a call."""

import functools
import math

import numpy as np
import pytest
import torch

from nvalchemiops.torch import launch as torch_launch
from nvalchemiops.torch.interactions.electrostatics import (
    compute_bspline_moduli_1d,
    estimate_pme_parameters,
    ewald_summation,
    generate_k_vectors_ewald_summation,
    generate_k_vectors_pme,
    particle_mesh_ewald,
    pme_reciprocal_space,
)
from nvalchemiops.torch.interactions.electrostatics.terms import mesh as mesh_terms
from nvalchemiops.torch.neighbors import neighbor_list
from tests.support.comparing import close, same_bits
from tests.support.systems import ALL, System, batch, triclinic

MESH = (8, 9, 10)
SUMS = {"Ewald": ewald_summation, "PME": particle_mesh_ewald}
EACH_SUM = pytest.mark.parametrize("name", SUMS)
FIXED = {
    "Ewald": functools.partial(ewald_summation, alpha=0.8, k_cutoff=3.5),
    "PME": functools.partial(particle_mesh_ewald, alpha=0.8, mesh_dimensions=MESH),
}


def near(system, cutoff=4.0, form="list", **options):
    first, second, shifts = neighbor_list(
        system.positions.detach(), cutoff, system.cell.detach(), batch_idx=system.batch_idx,
        return_neighbor_list=form == "list", **options,
    )  # fmt: skip
    if form == "list":
        return {"neighbor_list": first, "neighbor_ptr": second, "neighbor_shifts": shifts}
    return {"neighbor_matrix": first, "neighbor_matrix_shifts": shifts}


SYSTEM = triclinic(5, charged=True)
X, Q, CELL = SYSTEM[:3]
NEAR = near(SYSTEM)
TWO = batch(triclinic(5, charged=True), triclinic(3, seed=3))

# -- results --------------------------------------------------------------------------------------


@EACH_SUM
@pytest.mark.parametrize("asked", range(8))
def test_results_come_in_one_order(name, asked, dtype):
    """Energies, forces, charge gradients, virial, as far as they are asked for; energies are float64."""
    system = TWO.to(dtype)
    names = [option for bit, option in enumerate(ALL) if asked >> bit & 1]
    found = FIXED[name](*system[:3], batch_idx=TWO.batch_idx, **near(system), **dict.fromkeys(names, True))
    shapes = {"compute_forces": (8, 3), "compute_charge_gradients": (8,), "compute_virial": (2, 3, 3)}
    if not names:
        assert isinstance(found, torch.Tensor)
        found = (found,)
    assert [tuple(t.shape) for t in found] == [(8,), *(shapes[option] for option in names)]
    assert [t.dtype for t in found] == [torch.float64, *[dtype] * len(names)]
    everything = dict(zip(ALL, FIXED[name](*system[:3], batch_idx=TWO.batch_idx, **near(system), **ALL)[1:]))
    tolerance = 1e-12 if dtype == torch.float64 else 1e-4
    close(found[1:], [everything[option] for option in names], tolerance)


@pytest.mark.parametrize("signs", [(1.0, 1.0, 1.0), (-1.0, 1.0, -1.0)])
@pytest.mark.parametrize("order", [(1, 2, 0), (0, 2, 1)])
def test_the_order_and_the_sense_of_the_lattice_vectors_have_no_effect(order, signs):
    """A mesh of an even number n of points does not tell the frequencies n / 2 and -n / 2 apart."""
    cell, mesh = torch.tensor(signs)[:, None] * CELL[:, order], [MESH[axis] for axis in order]
    asked = {"alpha": 0.8, **NEAR, **ALL}
    expected = particle_mesh_ewald(X, Q, CELL, mesh_dimensions=MESH, **asked)
    asked["neighbor_shifts"] = torch.tensor(signs).int() * NEAR["neighbor_shifts"][:, order]
    close(particle_mesh_ewald(X, Q, cell, mesh_dimensions=mesh, **asked), expected, 1e-12)


@EACH_SUM
def test_mixed_options_say_the_same(name):
    """Alpha as number or tensor, mesh as tuple, list, tensor or spacing."""
    expected = FIXED[name](X, Q, CELL, **NEAR)
    for alpha in (torch.tensor(0.8, dtype=torch.float64), torch.tensor([0.8], dtype=torch.float64), np.float64(0.8)):
        close([FIXED[name](X, Q, CELL, **NEAR, alpha=alpha)], [expected], 0)
    if name == "PME":
        spacing = CELL[0].norm(dim=1) / torch.tensor(MESH)
        for mesh in (list(MESH), torch.tensor(MESH)):
            found = FIXED[name](X, Q, CELL, **NEAR, mesh_dimensions=mesh)
            close([found], [expected], 0)
        found = FIXED[name](X, Q, CELL, **NEAR, mesh_dimensions=None, mesh_spacing=spacing[None])
        assert found.shape == expected.shape  # a finer mesh, if the FFT likes it better
        close([found], [expected], 1e-3)


# -- prepared arguments ---------------------------------------------------------------------------


def prepared(cell):
    vectors, squares = generate_k_vectors_pme(cell, MESH)
    axes = [torch.fft.fftfreq(n, 1.0 / n).double() for n in MESH[:2]] + [torch.arange(MESH[2] // 2 + 1).double()]
    moduli = [compute_bspline_moduli_1d(m, n, 5) for m, n in zip(axes, MESH)]
    return {
        "k_vectors": vectors,
        "k_squared": squares,
        "cell_inv_t": torch.linalg.inv(cell).mT,
        "volume": torch.linalg.det(cell).abs(),
    } | dict(zip(("moduli_x", "moduli_y", "moduli_z"), moduli))


@pytest.mark.parametrize(
    "names", [[name] for name in prepared(CELL)] + [list(prepared(CELL))], ids=lambda n: "+".join(n)
)
def test_prepared_arguments_cost_no_gradient(names):
    """Neither values nor gradients by the cell depend on them, detached or not."""
    results = []
    for source in (None, CELL, CELL * 1.1):
        cell = CELL.clone().requires_grad_()
        options = {} if source is None else {key: prepared(source)[key] for key in names}
        outputs = FIXED["PME"](X, Q, cell, **NEAR, **options, **ALL)
        slope = torch.autograd.grad(sum(t.square().sum() for t in outputs), cell)[0]
        results.append([*outputs, slope])
    close(results[1], results[0], 0)
    close(results[2], results[0], 0)


def test_prepared_arguments_of_the_part_on_the_mesh():
    cell = CELL.clone().requires_grad_()
    results = [pme_reciprocal_space(X, Q, cell, 0.8, MESH, **options, **ALL) for options in ({}, prepared(CELL))]
    same_bits(*results)
    same_bits(*(torch.autograd.grad(r[0].sum(), cell) for r in results))


def test_wave_vectors_of_ewald_cost_no_gradient():
    """The virial by autograd is that of finite differences of the energy, wave vectors kept."""
    k_vectors = generate_k_vectors_ewald_summation(CELL, 3.5)
    strain = torch.zeros(3, 3, dtype=torch.float64, requires_grad=True)

    def energy(strain, k_vectors):
        deform = torch.eye(3).double() + strain
        return ewald_summation(X @ deform, Q, CELL @ deform, 0.8, k_vectors, **NEAR).sum()

    (slope,) = torch.autograd.grad(energy(strain, k_vectors), strain)
    direction = torch.sin(torch.arange(9.0)).view(3, 3).double()
    up, down = (
        energy(h * direction, generate_k_vectors_ewald_summation(CELL @ (torch.eye(3).double() + h * direction), 3.5))
        for h in (1e-5, -1e-5)
    )
    torch.testing.assert_close((slope * direction).sum(), (up - down) / 2e-5, rtol=1e-7, atol=1e-8)
    virial = ewald_summation(X, Q, CELL, 0.8, k_vectors, compute_virial=True, **NEAR)[1]
    close([-virial[0]], [slope], 1e-10)


@pytest.mark.parametrize("name", list(prepared(CELL)))
def test_prepared_arguments_have_their_shapes(name):
    value = prepared(CELL)[name]
    for wrong, error in ((value[None, None], ValueError), (value.tolist(), TypeError)):
        with pytest.raises(error, match=name):
            FIXED["PME"](X, Q, CELL, **NEAR, **{name: wrong})


# -- bad input ------------------------------------------------------------------------------------

MATRIX = near(SYSTEM, 4.0, "matrix")
OPEN = torch.tensor([True, True, False])


@EACH_SUM
@pytest.mark.parametrize(
    ("error", "argument", "options"),
    [
        (ValueError, "cell", {"cell": None}),
        *((ValueError, "alpha", {"alpha": value}) for value in (0.0, -0.5, math.inf, math.nan, torch.ones(2))),
        (TypeError, "alpha", {"alpha": "wide"}),
        *((ValueError, "accuracy", {"accuracy": value}) for value in (0.0, 1.0, -1e-6, 10.0)),
        (TypeError, "accuracy", {"accuracy": None}),
        (ValueError, "pbc", {"pbc": OPEN}),
        (ValueError, "pbc", {"pbc": torch.ones(2, 3, dtype=torch.bool)}),
        (TypeError, "pbc", {"pbc": torch.ones(3)}),
        (TypeError, "num_systems", {"num_systems": 1}),
    ],
)
def test_bad_input_is_an_error_that_names_the_argument(name, error, argument, options):
    """Beside what tests/arguments/test_all_calls.py tells of all sums."""
    with pytest.raises(error, match=argument):
        SUMS[name](**{"positions": X, "charges": Q, "cell": CELL, **options})


@pytest.mark.parametrize(
    ("error", "argument", "options"),
    [
        (ValueError, "spline_order", {"spline_order": 1}),
        (ValueError, "spline_order", {"spline_order": 11}),
        (TypeError, "spline_order", {"spline_order": 5.0}),
        (TypeError, "spline_order", {"spline_order": True}),
        (ValueError, "mesh_dimensions", {"mesh_dimensions": (1, 8, 8)}),
        (ValueError, "mesh_dimensions", {"mesh_dimensions": (8, 8, 0)}),
        (ValueError, "mesh_dimensions", {"mesh_dimensions": (8, 8, -8)}),
        (ValueError, "mesh_dimensions", {"mesh_dimensions": (8, 8)}),
        (TypeError, "mesh_dimensions", {"mesh_dimensions": 8}),
        (TypeError, "mesh_dimensions", {"mesh_dimensions": (8.5, 8, 8)}),
        (ValueError, "mesh_spacing", {"mesh_dimensions": MESH, "mesh_spacing": 0.5}),
        (ValueError, "mesh_spacing", {"mesh_spacing": 0.0}),
        (ValueError, "mesh_spacing", {"mesh_spacing": torch.tensor([[0.5, 0.5, -0.5]])}),
        (ValueError, "mesh_spacing", {"mesh_spacing": torch.ones(2, 3)}),
        (TypeError, "mesh_spacing", {"mesh_spacing": "fine"}),
    ],
)
@pytest.mark.parametrize("part", [False, True])
def test_bad_mesh_is_an_error_that_names_the_argument(error, argument, options, part):
    with pytest.raises(error, match=argument):
        if part:
            pme_reciprocal_space(X, Q, CELL, 0.8, **options)
        else:
            particle_mesh_ewald(X, Q, CELL, **options)


def test_the_part_on_the_mesh_asks_for_a_mesh():
    with pytest.raises(ValueError, match="mesh_dimensions"):
        pme_reciprocal_space(X, Q, CELL, 0.8)
    with pytest.raises(ValueError, match="alpha"):
        pme_reciprocal_space(X, Q, CELL, None, MESH)


# -- cost of a call -------------------------------------------------------------------------------


def launches_of(name, system, given, gradients):
    """Kernels that a call launches, by name."""
    seen, launch = [], torch_launch.core.launch

    def counted(kernel, *args, **options):
        seen.append(kernel.key)
        return launch(kernel, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_launch.core, "launch", counted)
        leaves = [t.detach().clone().requires_grad_(gradients) for t in system[:3]]
        options = {"alpha": 0.8, "compute_forces": True, "compute_charge_gradients": True}
        options |= {"mesh_dimensions": MESH} if name == "PME" else {"miller_bounds": (3, 3, 3)}
        results = SUMS[name](*leaves, batch_idx=system.batch_idx, **given, **options)
        if gradients:
            torch.autograd.grad(sum(r.square().sum() for r in results), leaves)
    return seen


@EACH_SUM
@pytest.mark.parametrize("gradients", [False, True])
def test_launches_do_not_depend_on_the_number_of_systems(name, gradients):
    """Energy, forces and charge gradients of one call; and their derivatives."""
    counts = []
    for n in (1, 64):
        system = batch(*(triclinic(3, charged=True, seed=seed) for seed in range(n)))
        counts.append(launches_of(name, system, near(system), gradients))
    assert counts[0]
    assert len(counts[0]) == len(counts[1]), counts
    assert len(counts[0]) <= (12 if not gradients else 40)


# -- batches whose mesh is chosen -------------------------------------------------------------------


def test_boxes_that_are_turned_have_a_mesh_in_common(monkeypatch):
    """A slab turned to three directions: one mesh along its longest axes, and the same results, turned."""
    chosen = []
    original = mesh_terms.mesh_for
    monkeypatch.setattr(mesh_terms, "mesh_for", lambda *given, **o: chosen.append(original(*given, **o)) or chosen[-1])
    rng = np.random.default_rng(3)
    one = rng.random((12, 3)) * [6.0, 9.0, 20.0]
    charges, turns = np.tile([1.0, -1.0], 6), ([0, 1, 2], [2, 0, 1], [1, 2, 0])
    shape = np.diag([6.0, 9.0, 20.0]) + np.array([[0.0, 0.0, 0.0], [1.5, 0.0, 0.0], [2.0, -1.0, 0.0]])
    together = batch(*(System.of(one[:, turn], charges, shape[np.ix_(turn, turn)]) for turn in turns))
    x, q, cell, batch_idx = together
    x, cell = x.requires_grad_(True), cell.requires_grad_(True)
    energies, forces, virial = particle_mesh_ewald(
        x, q, cell, batch_idx=batch_idx, accuracy=1e-5, compute_forces=True, compute_virial=True
    )
    assert chosen[0][0] > 1.5 * chosen[0][1] > 1.5 * chosen[0][2]
    weights = torch.as_tensor(rng.normal(size=(12, 3)))
    weights = torch.cat([weights[:, turn] for turn in turns])
    by_x, by_cell = torch.autograd.grad((weights * forces).sum(), (x, cell))
    exact = ewald_summation(x, q, cell, batch_idx=batch_idx, accuracy=1e-10, compute_forces=True)[1]
    assert (forces - exact).norm() < 3e-5 * exact.norm()
    for n, turn in enumerate(turns):
        back, mine = np.argsort(turn), batch_idx == n
        close(energies[mine], energies[:12], 1e-10)
        for vectors in (forces, by_x):
            close(vectors[mine][:, back], vectors[:12], 1e-9)
        for tensors in (virial, by_cell):
            close(tensors[n][back][:, back], tensors[0], 1e-9)


def test_a_batch_has_the_cutoff_that_suits_all():
    """Of equal systems that of one, but for what small cells cost; beside a large one, whose mesh all have, longer."""
    system = triclinic(6)
    large = system._replace(cell=5.0 * system.cell)
    alone, equal, mixed = (
        estimate_pme_parameters(x, cell, batch_idx, 1e-4).real_space_cutoff.tolist()
        for x, _, cell, batch_idx in (system, batch(system, system), batch(system, system, large))
    )
    assert len(set(equal)) == 1 and 0.5 * alone[0] < equal[0] < alone[0]
    assert len(set(mixed)) == 1 and mixed[0] > 1.5 * equal[0]
    # no atoms count as one
    nothing = torch.zeros((0, 3), dtype=torch.float64), torch.zeros(0, dtype=torch.int32)
    found = estimate_pme_parameters(nothing[0], batch(system, large).cell, nothing[1], 1e-4)
    assert all(torch.isfinite(value).all() for value in (found.alpha, found.real_space_cutoff))
    assert particle_mesh_ewald(
        nothing[0], nothing[0][:, 0], batch(system, large).cell, batch_idx=nothing[1], accuracy=1e-4
    ).shape == (0,)
