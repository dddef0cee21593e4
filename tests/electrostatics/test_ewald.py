"""The Ewald sum: right energies, and every derivative of them."""

import numpy as np
import pytest
import torch

from nvalchemiops.torch.interactions.electrostatics import EwaldParameters, estimate_ewald_parameters, ewald_summation
from nvalchemiops.torch.neighbors import neighbor_list
from tests.comparing import close
from tests.reference.ewald import everything
from tests.systems import ALL, MADELUNG, SYSTEMS, System, batch, crystal, csr, triclinic

WITH_ATOMS = [name for name in SYSTEMS if name != "no atoms"]


def summed(system, **options):
    return ewald_summation(system.positions, system.charges, system.cell, batch_idx=system.batch_idx, **options)


def matrix(system, cutoff, **options):
    found, _, shifts = neighbor_list(
        system.positions.detach(), cutoff, system.cell.detach(), batch_idx=system.batch_idx, **options
    )
    return {"neighbor_matrix": found, "neighbor_matrix_shifts": shifts, "mask_value": options.get("fill_value")}


# -- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", MADELUNG)
@pytest.mark.parametrize("repeat", [1, 2])
def test_madelung_constants(structure, repeat):
    nearest, constant = MADELUNG[structure]
    energies = summed(crystal(structure, repeat=repeat), accuracy=1e-13)
    torch.testing.assert_close(-2.0 * nearest * energies, torch.full_like(energies, constant), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", WITH_ATOMS)
def test_everything_equals_the_slow_reference(name, device):
    system = SYSTEMS[name]()
    alpha, cutoff, k_cutoff = 0.7, 6.0, 6.0
    moved = system.to(device)
    found = [t.cpu() for t in summed(moved, alpha=alpha, k_cutoff=k_cutoff, **csr(moved, cutoff), **ALL)]
    energies, forces, slopes, virial = everything(
        system.positions, system.charges, system.cell[0], alpha, cutoff, k_cutoff
    )
    close(found, (energies.detach(), forces, slopes, virial[None]), 1e-10)


@pytest.mark.parametrize("name", ["triclinic", "charged", "one atom"])
def test_energy_does_not_depend_on_alpha(name):
    system = SYSTEMS[name]()
    results = [summed(system, alpha=alpha, accuracy=1e-13, **ALL) for alpha in (0.5, 0.8, 1.2)]
    for other in results[1:]:
        close(other, results[0], 0, atol=1e-10)


def test_a_lone_ion_in_its_background():
    """Wigner lattice, simple cubic: E = -1.418648739749 q² / L."""
    system = System.of([[0.1, 0.2, 0.3]], [2.0], np.eye(3) * 3.0)
    energy = summed(system, accuracy=1e-13).item()
    assert energy == pytest.approx(-1.4186487397403098 * 4.0 / 3.0, abs=1e-9)


@pytest.mark.parametrize("change", ["wrapping", "left-handed", "skewed basis", "origin", "supercell"])
def test_energy_depends_on_the_crystal_only(change):
    system = triclinic(5, charged=True)
    x, q, cell = system.positions, system.charges, system.cell[0]
    expected = summed(system, accuracy=1e-12, compute_forces=True)
    copies = 1
    if change == "wrapping":
        x = x + torch.randint(-4, 5, x.shape, generator=torch.Generator().manual_seed(0)).double() @ cell
    elif change == "left-handed":
        cell = cell[[1, 0, 2]]
    elif change == "skewed basis":
        cell = torch.tensor([[1.0, 0, 0], [2, 1, 0], [-1, 1, 1]], dtype=torch.float64) @ cell
    elif change == "origin":
        x = x + 0.37
    else:
        x, q, copies = torch.cat([x, x + cell[1]]), torch.cat([q, q]), 2
        cell = cell * torch.tensor([[1.0], [2.0], [1.0]])
    found = ewald_summation(x, q, cell, accuracy=1e-12, compute_forces=True)
    close(found, [torch.cat([t] * copies) for t in expected], 0, atol=1e-9)


def test_nothing_at_all():
    energies, forces, slopes, virial = summed(SYSTEMS["no atoms"](), **ALL)
    assert energies.shape == slopes.shape == (0,) and forces.shape == (0, 3)
    assert virial.shape == (1, 3, 3) and not virial.any()
    system = SYSTEMS["rocksalt"]()
    for result in summed(system._replace(charges=torch.zeros_like(system.charges)), **ALL):
        assert not result.any()


# -- formats and batches --------------------------------------------------------------------------


def test_matrix_equals_list_equals_built_neighbors():
    system = SYSTEMS["triclinic"]()
    options = {"alpha": 0.8, "cutoff": 5.0, **ALL}
    expected = summed(system, **options, **csr(system, 5.0))
    without_ptr = {k: v for k, v in csr(system, 5.0).items() if k != "neighbor_ptr"}
    for neighbors in ({}, without_ptr, matrix(system, 5.0), matrix(system, 5.0, fill_value=-1, max_neighbors=300)):
        close(summed(system, **options, **neighbors), expected, 0)


def test_padding_may_equal_a_valid_index():
    # as clients do: the last atom belongs to nobody, and padding points at it
    system = SYSTEMS["triclinic"]()
    x = torch.cat([system.positions, torch.zeros(1, 3, dtype=torch.float64)])
    q = torch.cat([system.charges, torch.zeros(1, dtype=torch.float64)])
    near = matrix(system, 5.0, fill_value=6)
    near["neighbor_matrix"] = torch.cat([near["neighbor_matrix"], torch.full_like(near["neighbor_matrix"][:1], 6)])
    near["neighbor_matrix_shifts"] = torch.nn.functional.pad(near["neighbor_matrix_shifts"], (0, 0, 0, 0, 0, 1))
    found = ewald_summation(x, q, system.cell, alpha=0.8, cutoff=5.0, k_cutoff=5.0, compute_forces=True, **near)
    expected = summed(system, alpha=0.8, cutoff=5.0, k_cutoff=5.0, compute_forces=True)
    close([t[:6] for t in found], expected, 1e-10)


@pytest.mark.parametrize("given", [False, True])
def test_batch_equals_singles(given):
    systems = [make() for make in SYSTEMS.values()]
    together = batch(*systems)
    options = {"alpha": 0.9, "cutoff": 4.5, **ALL}
    found = summed(together, **options, **(csr(together, 4.5) if given else {}))
    singles = [summed(s, **options) for s in systems]
    close(found, [torch.cat(parts) for parts in zip(*singles)], 1e-13)
    per_system = summed(together, **options, energy_reduction="system")[0]
    torch.testing.assert_close(per_system, torch.stack([s[0].sum() for s in singles]))


def test_atoms_of_a_batch_come_in_any_order():
    together = batch(triclinic(5, seed=3), triclinic(7, seed=4))
    order = torch.tensor([11, 3, 0, 7, 5, 1, 9, 2, 8, 4, 10, 6])
    mixed = together._replace(
        positions=together.positions[order], charges=together.charges[order], batch_idx=together.batch_idx[order]
    )
    expected = summed(together, **ALL)
    found = summed(mixed, **ALL)
    close(found, [t[order] if len(t) == 12 else t for t in expected], 1e-12)


def test_results_come_in_their_order_and_dtype(dtype):
    system = SYSTEMS["triclinic"]().to(dtype)
    assert isinstance(summed(system), torch.Tensor)
    energies, virial = summed(system, compute_virial=True)
    energies_too, slopes = summed(system, compute_charge_gradients=True, energy_reduction="system")
    assert energies.shape == slopes.shape == (6,) and virial.shape == (1, 3, 3) and energies_too.shape == (1,)
    assert {t.dtype for t in (energies, virial, slopes, energies_too)} == {dtype}


def test_float32_agrees_with_float64():
    system = SYSTEMS["rocksalt"]()
    close(summed(system.to(torch.float32), **ALL), [t.float() for t in summed(system, **ALL)], 1e-4, atol=2e-5)


# -- derivatives ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WITH_ATOMS)
def test_autograd_of_the_energy_gives_what_is_returned(name):
    system = SYSTEMS[name]()
    inputs = [t.requires_grad_() for t in system[:3]]
    energies, forces, slopes, virial = summed(system, accuracy=1e-8, **ALL)
    by_x, by_q, by_cell = torch.autograd.grad(energies.sum(), inputs)
    by_strain = inputs[0].T @ by_x + inputs[2][0].T @ by_cell[0]
    close((-by_x, by_q, -by_strain[None]), (forces, slopes, virial), 1e-10)


@pytest.mark.parametrize("name", ["triclinic", "charged", "cesiumchloride"])
def test_gradients_of_every_output_equal_the_slow_reference(name, device):
    """Second derivatives of the energy, with random weights for each output and atom."""
    system = SYSTEMS[name]()
    alpha, cutoff, k_cutoff = 0.7, 5.0, 5.0
    inputs = [t.requires_grad_() for t in system[:3]]
    moved = system.to(device)
    found = summed(moved, alpha=alpha, k_cutoff=k_cutoff, **csr(moved, cutoff), **ALL)
    expected = everything(*inputs[:2], inputs[2][0], alpha, cutoff, k_cutoff, create_graph=True)
    generator = torch.Generator().manual_seed(0)
    for ours, theirs in zip(found, expected, strict=True):
        weight = torch.randn(theirs.shape, generator=generator, dtype=torch.float64)
        ours = torch.autograd.grad((weight * ours.cpu()).sum(), inputs, retain_graph=True)
        theirs = torch.autograd.grad((weight * theirs).sum(), inputs, retain_graph=True)
        close(ours, theirs, 1e-9, atol=1e-10)


def test_gradcheck_of_every_output():
    system = triclinic(4, charged=True)
    neighbors = csr(system, 3.5)

    def function(positions, charges, cell, alpha):
        return ewald_summation(positions, charges, cell, alpha, k_cutoff=3.0, **neighbors, **ALL)

    alpha = torch.tensor([0.6], dtype=torch.float64)
    inputs = [t.detach().requires_grad_() for t in (*system[:3], alpha)]
    assert torch.autograd.gradcheck(function, inputs, eps=1e-5, atol=1e-7, rtol=1e-6)


def test_charges_that_follow_the_geometry():
    """F = F_fixed - Σ dE/dq dq/dR is the whole force, and a loss on it trains with one backward."""
    system = triclinic(5)
    weight = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)

    def charges(x):
        q = torch.sin(weight * x.sum(1))
        return q - q.mean()

    def force(x):
        x = x.detach().requires_grad_()
        q = charges(x)
        _, fixed, slope = ewald_summation(
            x.detach(), q, system.cell, alpha=0.8, compute_forces=True, compute_charge_gradients=True
        )
        return fixed - torch.autograd.grad(q, x, grad_outputs=slope, create_graph=True)[0]

    x = system.positions.clone().requires_grad_()
    energy = ewald_summation(x, charges(x), system.cell, alpha=0.8).sum()
    torch.testing.assert_close(force(x), -torch.autograd.grad(energy, x)[0], rtol=1e-10, atol=1e-10)

    def loss():
        return force(system.positions).square().sum()

    (slope,) = torch.autograd.grad(loss(), weight)
    step = 1e-5
    with torch.no_grad():
        weight += step
    up = loss().item()
    with torch.no_grad():
        weight -= 2 * step
    down = loss().item()
    assert slope.item() == pytest.approx((up - down) / (2 * step), rel=1e-6)


# -- accuracy -------------------------------------------------------------------------------------


@pytest.mark.parametrize("accuracy", [1e-4, 1e-6, 1e-9])
@pytest.mark.parametrize("cutoff", [None, 5.0, 9.5])
def test_measured_force_error_meets_the_accuracy(accuracy, cutoff):
    # forces of the order of those in a liquid, to which errors are relative
    system = crystal("rocksalt", 5.64, 3, 0.3)
    exact = summed(system, accuracy=1e-13, compute_forces=True)
    options = {"accuracy": accuracy, "compute_forces": True}
    cutoff = cutoff or float(estimate_ewald_parameters(system.positions, system.cell, accuracy=accuracy)[1])
    # the reach is not said here: the sum has to find out that the list is short
    for neighbors in (csr(system, cutoff), {"cutoff": cutoff}):
        energies, forces = summed(system, **options, **neighbors)
        error = (forces - exact[1]).norm() / exact[1].norm()
        # with a list that is longer than needed, missing wave vectors are the only error
        assert accuracy / (3.0 if cutoff < 9.0 else 6.0) < error < 3.0 * accuracy
        assert abs(energies.sum() / exact[0].sum() - 1.0) < accuracy


def test_estimate_is_for_each_system():
    systems = [SYSTEMS["rocksalt"](), SYSTEMS["triclinic"](), SYSTEMS["one atom"]()]
    together = batch(*systems)
    found = estimate_ewald_parameters(together.positions, together.cell, together.batch_idx, accuracy=1e-5)
    assert isinstance(found, EwaldParameters)
    for n, system in enumerate(systems):
        alone = estimate_ewald_parameters(system.positions, system.cell[0], accuracy=1e-5)
        close([t[n : n + 1] for t in found], alone, 1e-10)
    finer = estimate_ewald_parameters(together.positions, together.cell, together.batch_idx, accuracy=1e-8)
    assert (finer.real_space_cutoff > found.real_space_cutoff).all()
    assert (finer.reciprocal_space_cutoff > found.reciprocal_space_cutoff).all()


# -- torch.compile --------------------------------------------------------------------------------


def test_what_cannot_be_measured_inside_a_compiled_function_is_asked_for():
    system = triclinic(5)

    def loss(x):
        return ewald_summation(2.0 * x, system.charges, system.cell, compute_forces=True)[1].square().sum()

    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="`alpha` or `cutoff` is needed"):
        torch.compile(loss, backend="aot_eager", fullgraph=True)(system.positions)


def test_torch_func_grad_equals_autograd():
    system = triclinic(5, charged=True)

    def energy(x, q, cell, alpha):
        return ewald_summation(x, q, cell, alpha).sum()

    inputs = [*system[:3], torch.tensor(0.6, dtype=torch.float64)]
    found = torch.func.grad(energy, argnums=(0, 1, 2, 3))(*inputs)
    inputs = [t.clone().requires_grad_() for t in inputs]
    close(found, torch.autograd.grad(energy(*inputs), inputs), 1e-10)


def test_compiled_equals_eager():
    system = triclinic(5, charged=True)
    neighbors = csr(system, 4.0)

    def loss(x, q, cell):
        return sum(t.square().sum() for t in ewald_summation(x, q, cell, 0.7, k_cutoff=4.0, **neighbors, **ALL))

    results = []
    for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        inputs = [t.clone().requires_grad_() for t in system[:3]]
        value = function(*inputs)
        value.backward()
        results.append([value.detach(), *(t.grad for t in inputs)])
    close(*results, 1e-12)


def test_any_number_of_threads_gives_the_same_bits(threads, always_split):
    system = crystal("rocksalt", 5.64, 3, 0.1)
    results = []
    for count in (1, 2, 3):
        threads(count)
        results.append(summed(system, accuracy=1e-3, **ALL))
    for other in results[1:]:
        close(results[0], other, 0)


# -- bad input ------------------------------------------------------------------------------------

SYSTEM = triclinic(4)
X, Q, CELL = SYSTEM[:3]
NEAR = csr(SYSTEM, 3.0)
MATRIX = matrix(SYSTEM, 3.0)
TWO = {"cell": CELL.expand(2, 3, 3), "batch_idx": torch.tensor([0, 1, 0, 1])}


@pytest.mark.parametrize(
    ("error", "argument", "options"),
    [
        (TypeError, "positions", {"positions": X.half()}),
        (ValueError, "positions", {"positions": X[:, :2]}),
        (ValueError, "positions", {"positions": X / 0.0}),
        (ValueError, "charges", {"charges": Q[:3]}),
        (TypeError, "charges", {"charges": Q.float()}),
        (TypeError, "charges", {"charges": [1.0, -1.0, 1.0, -1.0]}),
        (ValueError, "charges", {"charges": Q[:, None, None]}),
        (ValueError, "charges", {"charges": Q[:, None][:, :0]}),
        (ValueError, "cell", {"cell": None}),
        (ValueError, "cell", {"cell": CELL[0][:2]}),
        (ValueError, "cell", {"cell": CELL * 0.0}),
        (TypeError, "cell", {"cell": CELL.float()}),
        (ValueError, "alpha", {"alpha": 0.0}),
        (ValueError, "alpha", {"alpha": torch.tensor([0.5, 0.5])}),
        (ValueError, "alpha", {"alpha": float("nan")}),
        (TypeError, "alpha", {"alpha": "wide"}),
        (ValueError, "k_cutoff", {"k_cutoff": -1.0}),
        (ValueError, "alpha", {"alpha": 1e4}),
        (ValueError, "accuracy", {"accuracy": 0.0}),
        (ValueError, "accuracy", {"accuracy": 10.0}),
        (ValueError, "cutoff", {"cutoff": -2.0}),
        (ValueError, r"batch_idx.*one `cell`.*\(n_systems, 3, 3\)", {"batch_idx": torch.tensor([0, 1, 0, 1])}),
        (ValueError, "batch_idx", {**TWO, **NEAR}),
        (ValueError, "energy_reduction", {"energy_reduction": "total"}),
        (ValueError, "neighbor_matrix", {**NEAR, **MATRIX}),
        (ValueError, "neighbor_ptr", {"neighbor_ptr": NEAR["neighbor_ptr"]}),
        (ValueError, "neighbor_ptr", {**NEAR, "neighbor_ptr": NEAR["neighbor_ptr"][:-1]}),
        (ValueError, "neighbor_ptr", {**NEAR, "neighbor_ptr": NEAR["neighbor_ptr"] * 2}),
        (ValueError, "neighbor_ptr", {**NEAR, "neighbor_ptr": NEAR["neighbor_ptr"] * torch.tensor([1, 0, 1, 1, 1])}),
        (ValueError, "neighbor_shifts", {**NEAR, "neighbor_shifts": None}),
        (ValueError, "neighbor_list", {**NEAR, "neighbor_list": NEAR["neighbor_list"].flip(1)}),
        (ValueError, "neighbor_list", {**NEAR, "neighbor_list": NEAR["neighbor_list"] + torch.tensor([[0], [4]])}),
        (TypeError, "neighbor_list", {**NEAR, "neighbor_list": NEAR["neighbor_list"].double()}),
        (ValueError, "pbc", {"slab_correction": True}),
        (ValueError, "k_vectors", {"k_vectors": X}),
        (TypeError, "k_vectors", {"k_vectors": [[1.0, 0.0, 0.0]]}),
        (ValueError, "k_vectors", {"k_vectors": X, "miller_bounds": (1, 1, 1)}),
        (TypeError, "miller_indices", {"miller_indices": X}),
        (ValueError, "miller_bounds", {"miller_bounds": (1, 1)}),
        (TypeError, "miller_bounds", {"miller_bounds": (1.5, 1, 1)}),
        (ValueError, "slab_correction", {"pbc": torch.tensor([True, True, False])}),
        (ValueError, "pbc", {"pbc": torch.tensor([True, False, False]), "slab_correction": True}),
        (TypeError, "pbc", {"pbc": torch.tensor([1, 1, 0]), "slab_correction": True}),
        (TypeError, "unknown", {"unknown": 1}),
    ],
)
def test_bad_input_is_an_error_that_names_the_argument(error, argument, options):
    with pytest.raises(error, match=argument):
        ewald_summation(**{"positions": X, "charges": Q, "cell": CELL, **options})


def test_a_list_without_pairs_reaches_as_far_as_there_is_none():
    system = System.of([[0.0, 0.0, 0.0]], [1.0], np.eye(3) * 10.0)
    empty, exact = csr(system, 3.0), summed(system, accuracy=1e-10)
    for given in (empty, {"cutoff": 3.0, **empty}):
        torch.testing.assert_close(summed(system, **given), exact, rtol=1e-6, atol=0)
