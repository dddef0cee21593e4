"""Derivatives of Ewald sums, their parts and the slab correction: of every output, by everything, in every way.

The cell is skewed, systems carry net charge, weights are random.
"""

import pytest
import torch

from nvalchemiops.launch import NotDifferentiableError
from nvalchemiops.torch.interactions.electrostatics import (
    compute_slab_correction,
    ewald_reciprocal_space,
    ewald_summation,
    particle_mesh_ewald,
    pme_reciprocal_space,
)
from nvalchemiops.torch.interactions.electrostatics.k_vectors import (
    k_vectors_from_miller_indices,
    points_within,
)
from tests.reference import ewald as reference
from tests.support.cases import PARTS, SUMS, Inputs, charged, each, mesh, reciprocal_space, shuffled
from tests.support.comparing import close, derivative_along, random_like, weighted
from tests.support.systems import ALL, batch, neighbors_of, triclinic

CUTOFF = 4.0
ALPHA = 0.7
OUTPUTS = ("energies", "forces", "charge_gradients", "virial")


EACH = each(*SUMS, *PARTS)


def inputs_of(system, channels=None):
    inputs = charged(ALPHA)(system)
    if channels is None:
        return inputs
    return inputs._replace(a=inputs.a.unsqueeze(1) + random_like([inputs.a.new_empty(len(inputs.a), channels)])[0])


def near(system, cutoff=CUTOFF):
    """A list for a batch in any order, with what tells its systems apart."""
    return neighbors_of(system, cutoff) | ({"batch_idx": system.batch_idx} if len(system.cell) > 1 else {})


ONE = triclinic(5, charged=True)
SMALL = triclinic(3, charged=True)
MIXED = shuffled(batch(triclinic(5, charged=True), triclinic(2, seed=3), triclinic(4, charged=True, seed=4)))
NEAR = near(ONE)


# -- finite differences ---------------------------------------------------------------------------


@pytest.mark.parametrize("order", [4, 5])
def test_second_derivatives_on_a_mesh_of_low_order(order):
    """Energies have two continuous derivatives from order 4 on; forces, derivatives themselves, from order 5 on."""
    inputs = tuple(inputs_of(SMALL).leaves())
    options = {"eps": 1e-5, "atol": 1e-6, "rtol": 1e-5, "fast_mode": True}
    assert torch.autograd.gradgradcheck(lambda *i: mesh(*i, {}, spline_order=order), inputs, **options)
    if order > 4:
        outputs = {"compute_forces": True, "compute_virial": True}
        assert torch.autograd.gradgradcheck(
            lambda *i: mesh(*i, {}, spline_order=order, **outputs)[1:], inputs, **options
        )


def chain(value, inputs, directions):
    """Derivatives of a scalar along directions, one after the other."""
    found = [value]
    for direction in directions:
        slopes = inputs.grad(found[-1], create_graph=True)
        found.append(sum((s * d).sum() for s, d in zip(slopes, direction, strict=True)))
    return found[1:]


@pytest.mark.later_cases("5")
@pytest.mark.parametrize("order", [3, 4, 5, 6])
def test_a_mesh_is_differentiable_as_often_as_its_splines_and_then_says_so(order):
    """p - 2 continuous derivatives, one more in pieces; the next one is an error, not zero."""
    # away from mesh points and from the middle between them, where splines are glued together
    inputs = inputs_of(ONE._replace(positions=ONE.positions + 0.05))
    directions = [random_like(inputs, seed) for seed in range(order)]

    def energy(inputs):
        return weighted([mesh(*inputs, {}, spline_order=order)])

    leaves = inputs.leaves()
    found = chain(energy(leaves), leaves, directions[:-1])
    assert len(found) == order - 1
    for k, value in enumerate(found):

        def lower(step, k=k):
            moved = Inputs(*(t + step * d for t, d in zip(inputs, directions[k], strict=True))).leaves()
            return (chain(energy(moved), moved, directions[:k]) or [energy(moved)])[-1].detach()

        step = 1e-6
        expected = (lower(step) - lower(-step)) / (2 * step)
        torch.testing.assert_close(value.detach(), expected, rtol=1e-6, atol=1e-6)
    with pytest.raises(NotDifferentiableError, match="spline_order"):
        leaves.grad(found[-1], create_graph=True)


@pytest.mark.parametrize("order", [3, 4])
@pytest.mark.parametrize("output", OUTPUTS[1:])
def test_forces_on_a_mesh_have_one_order_less_to_go(order, output):
    """They are derivatives of splines already; charge gradients and the virial are not."""
    leaves = inputs_of(SMALL).leaves()
    value = weighted(mesh(*leaves, {}, spline_order=order, **{f"compute_{output}": True})[1:])
    left = order - 2 if output == "forces" else order - 1
    directions = [random_like(leaves, seed) for seed in range(left)]
    found = chain(value, leaves, directions)
    assert found[-1].isfinite()
    with pytest.raises(NotDifferentiableError, match="spline_order"):
        leaves.grad(found[-1])


def test_a_force_loss_on_splines_of_order_3():
    """The lowest order there is trains on forces, as piecewise derivatives; the gradient is that of the loss."""

    def loss(q):
        return mesh(ONE.positions, q, ONE.cell, ALPHA, {}, spline_order=3, compute_forces=True)[1].square().sum()

    q = ONE.charges.clone().requires_grad_()
    (direction,) = random_like([q])
    (found,) = torch.autograd.grad(loss(q), q)
    torch.testing.assert_close(
        (found * direction).sum(), derivative_along(loss, ONE.charges, direction), rtol=1e-8, atol=1e-8
    )


# -- against the reference ------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", ["energies", "all"])
def test_three_orders_equal_the_slow_reference(outputs):
    """Directional derivatives by all inputs at once, the third too; of all outputs, which are derivatives, two."""
    system, k_cutoff = triclinic(4, charged=True), 3.3
    inputs, given = inputs_of(system), near(system)
    orders = 3 if outputs == "energies" else 2
    directions = [random_like(inputs, seed) for seed in range(orders)]

    def found(x, q, cell, alpha):
        options = ALL if outputs == "all" else {}
        results = ewald_summation(x, q, cell, alpha, k_cutoff=k_cutoff, **given, **options)
        return results if outputs == "all" else (results,)

    def expected(x, q, cell, alpha):
        if outputs == "all":
            results = reference.everything(x, q, cell[0], alpha, CUTOFF, k_cutoff, create_graph=True)
            return *results[:3], results[3].unsqueeze(0)
        return (0.5 * q * reference.ewald(x, q, cell[0], alpha, CUTOFF, k_cutoff),)

    values = []
    for function in (found, expected):
        leaves = inputs.leaves()
        values.append([v.detach() for v in chain(weighted(function(*leaves)), leaves, directions)])
    # each order loses a digit or so to sums of terms that are larger than their sum
    close(*values, 1e-10, atol=1e-9)


def test_four_orders_of_the_reciprocal_sum():
    """Sums of sines go on; each order against finite differences of the one before."""
    inputs, directions = inputs_of(SMALL), [random_like(inputs_of(SMALL), seed) for seed in range(4)]

    def derivatives(step, direction):
        moved = Inputs(*(t + step * d for t, d in zip(inputs, direction, strict=True))).leaves()
        value = weighted([reciprocal_space(*moved, {})])
        return [value.detach(), *(v.detach() for v in chain(value, moved, directions))]

    at = derivatives(0.0, directions[0])[1:]
    for k, value in enumerate(at):
        lower = derivative_along(lambda s, k=k: derivatives(s, directions[k])[k], 0.0, 1.0, step=1e-3)
        torch.testing.assert_close(value, lower, rtol=1e-7, atol=1e-7 * float(at[-1].abs().clamp(min=1.0)))


# -- function transforms --------------------------------------------------------------------------


@pytest.mark.parametrize("function", [ewald_summation, particle_mesh_ewald])
def test_transforms_of_sums_that_choose_their_parameters_for_a_list(function):
    """In a transform the rows of a list may be wrapped tensors."""

    def energy(x):
        return function(x, ONE.charges, ONE.cell, accuracy=1e-4, **NEAR).sum()

    x, direction = ONE.positions.clone().requires_grad_(), random_like([ONE.positions])[0]
    (slope,) = torch.autograd.grad(energy(x), x)
    close([torch.func.grad(energy)(ONE.positions)], [slope])
    close([torch.func.jvp(energy, (ONE.positions,), (direction,))[1]], [(slope * direction).sum()])


@each(*SUMS)
def test_second_derivatives_by_charges_are_the_matrix_of_the_quadratic_form(case):
    """E = q·A q / 2, so the Hessian is A whatever the charges."""

    def energy(q):
        return case.energies(ONE.positions, q, ONE.cell, ALPHA, NEAR).sum()

    matrix = torch.func.jacrev(torch.func.grad(energy))(ONE.charges)
    units = torch.eye(5, dtype=torch.float64)
    columns = [torch.func.grad(energy)(unit) for unit in units]
    close([matrix, 0.5 * ONE.charges @ matrix @ ONE.charges], [torch.stack(columns), energy(ONE.charges)])


@pytest.mark.parametrize("first", [0, 1], ids=["reverse mode", "forward mode"])
def test_the_first_use_of_a_mesh_may_be_inside_a_transform(first):
    """What is kept for the next call with this mesh must not belong to the transform."""
    mesh = (8, 9, 13 + first)

    def energy(x):
        return pme_reciprocal_space(x, ONE.charges, ONE.cell, ALPHA, mesh).sum()

    ways = [torch.func.jacrev(torch.func.grad(energy)), torch.func.hessian(energy)]
    ways[first](ONE.positions)
    expected = torch.autograd.functional.hessian(energy, ONE.positions)
    close([way(ONE.positions) for way in ways], [expected, expected], 1e-10)


# -- batches and channels -------------------------------------------------------------------------


@pytest.mark.parametrize("system", [ONE, MIXED], ids=["one", "batch"])
def test_vmap_over_cells_chooses_k_vectors_for_each(system):
    """As in a loop, although each size has another number of k-vectors."""
    inputs, batch_idx = inputs_of(system), system.batch_idx if len(system.cell) > 1 else None
    sizes = torch.tensor([1.0, 0.7, 1.4], dtype=torch.float64)

    def energy(x, cell):
        return weighted(
            ewald_reciprocal_space(
                x, inputs.a, cell, None, inputs.b, batch_idx, compute_forces=True, compute_virial=True, k_cutoff=5.0
            )
        )

    slices = [(size * inputs.x, size * inputs.cell) for size in sizes]
    assert len({len(points_within(cell, torch.full((len(cell),), 5.0))[0]) for _, cell in slices}) == 3
    for function in (lambda *i: (energy(*i),), torch.func.grad(energy, argnums=(0, 1))):
        found = torch.func.vmap(function)(*map(torch.stack, zip(*slices)))
        close(found, [torch.stack(parts) for parts in zip(*[function(*part) for part in slices])], 1e-11)


def test_vmap_over_given_k_vectors():
    """Lists of the same length, of which each names another number of points in an octant."""
    inputs = inputs_of(ONE)
    axis, plane = [[n, 0, 0] for n in range(1, 9)], [[x, y, 0] for x in (1, 2) for y in (-2, -1, 1, 2)]
    given = torch.stack([k_vectors_from_miller_indices(inputs.cell, torch.tensor(n)) for n in (axis, plane)])

    def energy(x, k_vectors):
        return weighted(ewald_reciprocal_space(x, inputs.a, inputs.cell, k_vectors, inputs.b, compute_forces=True))

    for function in (lambda *i: (energy(*i),), torch.func.grad(energy, argnums=(0,))):
        found = torch.func.vmap(function, in_dims=(None, 0))(inputs.x, given)
        close(found, [torch.stack(parts) for parts in zip(*[function(inputs.x, k) for k in given])], 1e-11)


@EACH
@pytest.mark.parametrize("channels", [1, 3])
def test_gradients_of_channels_equal_a_loop_over_channels(case, channels):
    """Two orders; energies and charge gradients by channel, the others summed."""
    inputs = inputs_of(ONE, channels)
    leaves = inputs.leaves()
    results = case.results(*leaves, NEAR)
    columns = [case.results(leaves.x, q, leaves.cell, leaves.b, NEAR) for q in leaves.a.unbind(1)]
    energies, forces, slopes, virial = zip(*columns)
    expected = [torch.stack(energies, 1), sum(forces), torch.stack(slopes, 1), sum(virial)]
    found = []
    for outcome in (results, expected):
        first = leaves.grad(sum(r.square().sum() + r.sin().sum() for r in outcome), create_graph=True)
        second = leaves.grad(sum(f.sin().sum() for f in first), retain_graph=True)
        found.append([t.detach() for t in (*outcome, *first, *second)])
    # sines of large numbers cost digits
    close(*found, 1e-9)


@pytest.mark.parametrize("reduction", ["atom", "system"])
def test_weights_that_the_atoms_of_a_channel_share(reduction):
    """The gradient of energies is then a product, but not if channels have different weights."""
    system, weights = inputs_of(ONE, 3), torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    leaves = system.leaves()
    options = {"k_cutoff": 5.0, "energy_reduction": reduction, **near(ONE)}

    def energies(charges):
        return ewald_summation(leaves.x, charges, leaves.cell, ALPHA, **options)

    found = torch.autograd.grad((energies(leaves.a) * weights).sum(), (leaves.x, leaves.cell))
    columns = [w * energies(q).sum() for w, q in zip(weights, leaves.a.unbind(1))]
    close(found, torch.autograd.grad(sum(columns), (leaves.x, leaves.cell)))


@pytest.mark.parametrize("reduction", ["atom", "system"])
@pytest.mark.parametrize("shared", [True, False], ids=["of systems", "of atoms"])
def test_weights_in_a_batch(shared, reduction):
    """The gradient of each system is that of the system alone: a product only if its atoms have the same weight."""
    x, charges, cells, batch_idx = (t.detach() for t in MIXED)
    options = {"alpha": ALPHA, "k_cutoff": 5.0, "cutoff": 5.0}
    weights = torch.linspace(-1.0, 2.0, len(x), dtype=torch.float64)

    def gradients(rows, cell, weights, **others):
        leaves = x[rows].requires_grad_(), charges[rows].requires_grad_(), cell.clone().requires_grad_()
        return torch.autograd.grad((ewald_summation(*leaves, **options, **others) * weights).sum(), leaves)

    given = weights[batch_idx.long()] if shared else weights
    if reduction == "system":
        given = weights[: len(cells)] if shared else weights[:1].expand(len(cells))
    every = torch.arange(len(x))
    by_x, by_charges, by_cells = gradients(every, cells, given, batch_idx=batch_idx, energy_reduction=reduction)
    for number, cell in enumerate(cells):
        rows = every[batch_idx == number]
        alone = gradients(rows, cell, given[rows] if reduction == "atom" else given[number])
        close([by_x[rows], by_charges[rows], by_cells[number]], alone)


# -- where numbers are awkward --------------------------------------------------------------------


def by_cell(system, cell, create_graph=False):
    energies = ewald_summation(*system[:2], cell, ALPHA, k_cutoff=5.0, batch_idx=system.batch_idx, cutoff=5.0)
    return torch.autograd.grad(energies.sum(), cell, create_graph=create_graph)[0].detach()


@pytest.mark.parametrize("one", [True, False])
def test_gradients_by_a_float32_cell_far_from_the_origin(one):
    """Forces of pairs come rounded, and are not multiplied by where the origin happens to be."""
    system, offsets = ONE.to(torch.float32), 1e4
    if not one:
        system = MIXED._replace(cell=torch.cat([MIXED.cell, MIXED.cell[:1]])).to(torch.float32)  # one has no atoms
        offsets = 1e4 * (1.0 + system.batch_idx.unsqueeze(1))
    system = system._replace(positions=system.positions + offsets)
    exact = by_cell(system.to(torch.float64), system.cell.double().requires_grad_())
    for create_graph in (False, True):
        found = by_cell(system, system.cell.clone().requires_grad_(), create_graph)
        assert float((found - exact).norm() / exact.norm()) < 3e-7


def test_a_cell_with_the_negative_bit():
    """A view as of the imaginary part of a conjugate, whose determinant torch 2.13 differentiates wrongly."""
    cell = torch.complex(torch.zeros_like(MIXED.cell), -MIXED.cell).conj().imag.requires_grad_()
    assert cell.is_neg()
    for create_graph in (False, True):
        expected = by_cell(MIXED, MIXED.cell.clone().requires_grad_())
        torch.testing.assert_close(by_cell(MIXED, cell, create_graph), expected, rtol=1e-11, atol=1e-11)
    results = [
        torch.autograd.grad(compute_slab_correction(*MIXED[:2], c, (True, True, False), MIXED.batch_idx).sum(), c)[0]
        for c in (cell, MIXED.cell.clone().requires_grad_())
    ]
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-11)
