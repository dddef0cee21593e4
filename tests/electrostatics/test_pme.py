"""Particle-mesh Ewald and what holds for `ewald_summation` as well: results, their order, bad input, cost of a call."""

import functools
import math

import numpy as np
import pytest
import torch

from nvalchemiops.torch import launch as torch_launch
from nvalchemiops.torch.interactions.electrostatics import (
    compute_bspline_moduli_1d,
    estimate_ewald_parameters,
    estimate_pme_parameters,
    ewald_summation,
    generate_k_vectors_ewald_summation,
    generate_k_vectors_pme,
    particle_mesh_ewald,
    pme_reciprocal_space,
)
from nvalchemiops.torch.neighbors import batch_naive_neighbor_list, neighbor_list
from tests.comparing import close, same_bits
from tests.systems import ALL, System, batch, crystal, disordered, one_atom, triclinic

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
    """Energies, forces, charge gradients, virial, as far as they are asked for; the dtype is that of the positions."""
    system = TWO.to(dtype)
    names = [option for bit, option in enumerate(ALL) if asked >> bit & 1]
    found = FIXED[name](*system[:3], batch_idx=TWO.batch_idx, **near(system), **dict.fromkeys(names, True))
    shapes = {"compute_forces": (8, 3), "compute_charge_gradients": (8,), "compute_virial": (2, 3, 3)}
    if not names:
        assert isinstance(found, torch.Tensor)
        found = (found,)
    assert [tuple(t.shape) for t in found] == [(8,), *(shapes[option] for option in names)]
    assert {t.dtype for t in found} == {dtype}
    everything = dict(zip(ALL, FIXED[name](*system[:3], batch_idx=TWO.batch_idx, **near(system), **ALL)[1:]))
    tolerance = 1e-12 if dtype == torch.float64 else 1e-4
    close(found[1:], [everything[option] for option in names], tolerance)


@EACH_SUM
def test_energies_of_systems_are_sums_of_those_of_atoms(name):
    options = {"batch_idx": TWO.batch_idx, **near(TWO)}
    atoms = FIXED[name](*TWO[:3], **options)
    systems = FIXED[name](*TWO[:3], energy_reduction="system", **options)
    assert systems.shape == (2,)
    close([systems], [torch.zeros(2).double().index_add(0, TWO.batch_idx, atoms)])
    channels = torch.stack([TWO.charges, 2.0 * TWO.charges], 1)
    several = FIXED[name](TWO.positions, channels, TWO.cell, energy_reduction="system", **options)
    assert several.shape == (2, 2)
    close([several], [systems[:, None] * torch.tensor([1.0, 4.0])])


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


@EACH_SUM
def test_no_atoms_and_one(name):
    nobody = System(X[:0], Q[:0], CELL, SYSTEM.batch_idx[:0])
    energies, forces, slopes, virial = FIXED[name](*nobody[:3], cutoff=4.0, **ALL)
    assert energies.shape == slopes.shape == (0,) and forces.shape == (0, 3) and not virial.any()
    assert SUMS[name](*nobody[:3], **ALL)[3].shape == (1, 3, 3)
    alone = one_atom()
    energies, forces, slopes, virial = SUMS[name](*alone[:3], accuracy=1e-6, **ALL)
    # of one atom E = q²/2 times a constant of the lattice, and no force
    assert energies.item() == pytest.approx(0.5 * slopes.item() * alone.charges.item(), rel=1e-12)
    assert energies.item() == pytest.approx(ewald_summation(*alone[:3], accuracy=1e-12).item(), rel=1e-5)
    assert forces.abs().max() < 1e-5
    # E is of degree -1 in lengths, so the trace of the virial is E, as far as alpha does not matter
    assert virial[0].trace().item() == pytest.approx(energies.item(), rel=1e-4)


@pytest.mark.parametrize("name", ["water", "ionic liquid", "triclinic"])
def test_float32_reaches_a_relative_force_error_of_1e_5(name):
    """Measured: 6e-7 to 1e-6 with accuracy 1e-6, against a converged sum in float64."""
    system = disordered(name)
    exact = particle_mesh_ewald(*system[:3], accuracy=1e-8, spline_order=8, compute_forces=True)[1]
    found = particle_mesh_ewald(*system.to(torch.float32)[:3], accuracy=1e-6, compute_forces=True)[1]
    error = (found.double() - exact).norm() / exact.norm()
    print(f"float32 PME, {name}: {error:.2e}")
    assert error < 1e-5


# -- clients --------------------------------------------------------------------------------------

# displaced so far that forces are those of a liquid, to which errors are relative
CLIENTS = batch(crystal("rocksalt", 5.64, 3, 0.3), triclinic(6))


@EACH_SUM
@pytest.mark.parametrize("accuracy", [1e-4, 1e-6])
def test_torch_sim(name, accuracy):
    """No alpha, a list with a cutoff of the client's own, energies scattered into float64, stress = -virial/volume."""
    n_systems = 2
    cutoff, batch_idx = 8.0 if accuracy == 1e-4 else 6.0, CLIENTS.batch_idx
    found = batch_naive_neighbor_list(
        positions=CLIENTS.positions, cutoff=cutoff, batch_idx=batch_idx, cell=CLIENTS.cell,
        pbc=torch.ones(2, 3, dtype=torch.bool), return_neighbor_list=True,
    )  # fmt: skip
    options = {"spline_order": 6} if name == "PME" else {}
    energies, forces, virial = SUMS[name](
        positions=CLIENTS.positions, charges=CLIENTS.charges, cell=CLIENTS.cell, neighbor_list=found[0],
        neighbor_ptr=found[1], neighbor_shifts=found[2], batch_idx=batch_idx, compute_forces=True,
        compute_virial=True, accuracy=accuracy, **options,
    )  # fmt: skip
    total = torch.zeros(n_systems, dtype=torch.float64).scatter_add_(0, batch_idx.long(), energies)
    stress = -virial / torch.linalg.det(CLIENTS.cell).abs()[:, None, None]
    assert energies.dtype == torch.float64 and forces.shape == CLIENTS.positions.shape
    exact = ewald_summation(*CLIENTS[:3], batch_idx=batch_idx, accuracy=1e-11, energy_reduction="system", **ALL)
    close([total], [exact[0]], accuracy, atol=0)
    error = (forces - exact[1])[batch_idx == 0].norm() / exact[1][batch_idx == 0].norm()
    assert error < 3.0 * accuracy
    close([stress], [-exact[3] / torch.linalg.det(CLIENTS.cell).abs()[:, None, None]], 0, atol=10 * accuracy)


def test_torch_sim_single_system_with_a_mesh_of_its_own():
    """``batch_idx=None``, and either way to choose the mesh."""
    system = crystal("rocksalt", 5.64, 3, 0.2)
    given = near(system, 6.0)
    exact = ewald_summation(*system[:3], accuracy=1e-10, compute_forces=True)
    for options in ({"mesh_spacing": 0.3}, {"mesh_dimensions": (54, 54, 54)}):
        energies, forces = particle_mesh_ewald(
            positions=system.positions, charges=system.charges, cell=system.cell, batch_idx=None, accuracy=1e-5,
            spline_order=5, compute_forces=True, **given, **options,
        )  # fmt: skip
        assert (forces - exact[1]).norm() / exact[1].norm() < 1e-4
        torch.testing.assert_close(energies.sum(), exact[0].sum(), rtol=1e-5, atol=0)


@EACH_SUM
def test_aimnet(name):
    """A matrix padded with N, no alpha, the cutoff of the estimate; the graph is differentiated twice."""
    accuracy, n = 1e-5, len(CLIENTS.charges)
    if name == "PME":
        cutoff = estimate_pme_parameters(CLIENTS.positions, CLIENTS.cell, CLIENTS.batch_idx, accuracy)[3]
    else:
        cutoff = estimate_ewald_parameters(CLIENTS.positions, CLIENTS.cell, CLIENTS.batch_idx, accuracy)[1]
    matrix, _, shifts = neighbor_list(
        positions=CLIENTS.positions, cutoff=float(cutoff.max()), cell=CLIENTS.cell, batch_idx=CLIENTS.batch_idx,
        pbc=torch.ones(2, 3, dtype=torch.bool), half_fill=False, fill_value=n,
    )  # fmt: skip
    given = {"neighbor_matrix": matrix, "neighbor_matrix_shifts": shifts, "mask_value": n, "accuracy": accuracy}
    x, q, cell = (t.clone().requires_grad_() for t in CLIENTS[:3])
    energies = SUMS[name](positions=x, charges=q, cell=cell, batch_idx=CLIENTS.batch_idx, **given)
    (slope,) = torch.autograd.grad(energies.sum(), x, create_graph=True)
    exact = ewald_summation(*CLIENTS[:3], batch_idx=CLIENTS.batch_idx, accuracy=1e-10, compute_forces=True)[1]
    mine = CLIENTS.batch_idx == 0
    assert (slope + exact)[mine].norm() / exact[mine].norm() < 3.0 * accuracy
    # a product of the Hessian with a vector, against the difference of two gradients
    direction = torch.sin(torch.arange(float(x.numel()))).view(x.shape).double()
    (product,) = torch.autograd.grad(slope, x, direction)
    (upper, lower) = (
        SUMS[name](CLIENTS.positions + h * direction, q.detach(), cell.detach(), batch_idx=CLIENTS.batch_idx,
                   compute_forces=True, **given)[1]
        for h in (1e-4, -1e-4)
    )  # fmt: skip
    # alpha stays, as it depends on the reach of the list: on positions, by no more than the steps
    torch.testing.assert_close(product, -(upper - lower) / 2e-4, rtol=1e-3, atol=1e-3)
    outputs = SUMS[name](x, q, cell, batch_idx=CLIENTS.batch_idx, hybrid_forces=True, **given, **ALL)
    assert [t.shape for t in outputs] == [(n,), (n, 3), (n,), (2, 3, 3)]
    close([outputs[0], outputs[1]], [energies, -slope], 1e-9)


@EACH_SUM
def test_aimnet_hessian(name):
    """By batched products of one graph."""
    x = X.clone().requires_grad_()
    given = near(SYSTEM, 4.0, "matrix", fill_value=5) | {"mask_value": 5}
    (slope,) = torch.autograd.grad(FIXED[name](x, Q, CELL, **given).sum(), x, create_graph=True)
    units = torch.eye(15, dtype=torch.float64).reshape(15, 5, 3)
    (rows,) = torch.autograd.grad(slope, x, units, is_grads_batched=True, retain_graph=True)
    singles = [torch.autograd.grad(slope, x, unit, retain_graph=True)[0] for unit in units]
    close([rows, rows.reshape(15, 15)], [torch.stack(singles), rows.reshape(15, 15).T], 1e-10)


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
        (TypeError, "positions", {"positions": X.half()}),
        (TypeError, "positions", {"positions": X.tolist()}),
        (ValueError, "positions", {"positions": X[:, :2]}),
        (ValueError, "charges", {"charges": Q[:3]}),
        (ValueError, "charges", {"charges": Q[:, None, None]}),
        (TypeError, "charges", {"charges": Q.float()}),
        (TypeError, "charges", {"charges": Q.long()}),
        (TypeError, "charges", {"charges": None}),
        (ValueError, "cell", {"cell": None}),
        (ValueError, "cell", {"cell": CELL * 0.0}),
        (ValueError, "cell", {"cell": torch.tensor([[1.0, 0, 0], [2.0, 0, 0], [0, 0, 1]]).double()}),
        (ValueError, "cell", {"cell": CELL[0][:2]}),
        (ValueError, "cell", {"cell": CELL * math.nan}),
        (TypeError, "cell", {"cell": CELL.float()}),
        (ValueError, "batch_idx", {"cell": CELL.expand(2, 3, 3)}),
        (ValueError, "batch_idx", {"batch_idx": torch.tensor([0, 0, 0, 0, 1])}),
        (ValueError, "batch_idx", {"batch_idx": torch.tensor([0, 0])}),
        (TypeError, "batch_idx", {"batch_idx": torch.zeros(5)}),
        (ValueError, "alpha", {"alpha": 0.0}),
        (ValueError, "alpha", {"alpha": -0.5}),
        (ValueError, "alpha", {"alpha": math.inf}),
        (ValueError, "alpha", {"alpha": torch.tensor([0.5, 0.5])}),
        (TypeError, "alpha", {"alpha": "wide"}),
        (ValueError, "accuracy", {"accuracy": 0.0}),
        (ValueError, "accuracy", {"accuracy": 1.0}),
        (ValueError, "accuracy", {"accuracy": -1e-6}),
        (TypeError, "accuracy", {"accuracy": None}),
        (TypeError, "charges", {"charges": Q.tolist()}),
        (ValueError, "alpha", {"alpha": math.nan}),
        (ValueError, "accuracy", {"accuracy": 10.0}),
        (ValueError, "cutoff", {"cutoff": -2.0}),
        (ValueError, "cutoff", {"cutoff": 0.0}),
        (ValueError, "energy_reduction", {"energy_reduction": "sum"}),
        (ValueError, "neighbor_matrix", {**NEAR, **MATRIX}),
        (ValueError, "neighbor_ptr", {"neighbor_ptr": NEAR["neighbor_ptr"]}),
        (ValueError, "neighbor_shifts", {"neighbor_shifts": NEAR["neighbor_shifts"]}),
        (ValueError, "neighbor_shifts", {**NEAR, "neighbor_shifts": None}),
        (ValueError, "neighbor_shifts", {**NEAR, "neighbor_shifts": NEAR["neighbor_shifts"][1:]}),
        (ValueError, "neighbor_matrix_shifts", {**MATRIX, "neighbor_matrix_shifts": None}),
        (ValueError, "neighbor_matrix_shifts", {**NEAR, "neighbor_matrix_shifts": MATRIX["neighbor_matrix_shifts"]}),
        (ValueError, "neighbor_ptr", {**NEAR, "neighbor_ptr": NEAR["neighbor_ptr"][1:]}),
        (TypeError, "neighbor_list", {**NEAR, "neighbor_list": NEAR["neighbor_list"].double()}),
        (ValueError, "mask_value", {"mask_value": 5}),
        (TypeError, "mask_value", {**MATRIX, "mask_value": 5.0}),
        (ValueError, "pbc", {"pbc": OPEN}),
        (ValueError, "pbc", {"slab_correction": True}),
        (ValueError, "pbc", {"pbc": torch.tensor([True, False, False]), "slab_correction": True}),
        (ValueError, "pbc", {"pbc": torch.ones(2, 3, dtype=torch.bool)}),
        (TypeError, "pbc", {"pbc": torch.ones(3)}),
        (TypeError, "unknown", {"unknown": 1}),
        (TypeError, "num_systems", {"num_systems": 1}),
    ],
)  # fmt: skip
def test_bad_input_is_an_error_that_names_the_argument(name, error, argument, options):
    with pytest.raises(error, match=argument):
        SUMS[name](**{"positions": X, "charges": Q, "cell": CELL, **options})


@pytest.mark.parametrize(
    ("error", "argument", "options"),
    [
        (ValueError, "spline_order", {"spline_order": 1}),
        (ValueError, "spline_order", {"spline_order": 9}),
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
