"""Derivatives of Ewald sums, their parts and the slab correction: of every output, by everything, in every way.

The cell is skewed, systems carry net charge, weights are random.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from nvalchemiops.launch import NotDifferentiableError
from nvalchemiops.torch.interactions.electrostatics import (
    compute_slab_correction,
    ewald_real_space,
    ewald_reciprocal_space,
    ewald_summation,
    particle_mesh_ewald,
    pme_reciprocal_space,
)
from tests.comparing import close, derivative_along, random_like, same_bits, weighted
from tests.reference import ewald as reference
from tests.systems import ALL, System, batch, neighbors_of, triclinic

CUTOFF = 4.0
ALPHA = 0.7
# a set of wave vectors that does not change with the cell, or finite differences would see vectors come and go
BOUNDS = (2, 3, 2)
MESH = (8, 9, 10)
OUTPUTS = ("energies", "forces", "charge_gradients", "virial")


# -- what is differentiated -----------------------------------------------------------------------


class Inputs(NamedTuple):
    x: torch.Tensor
    q: torch.Tensor
    cell: torch.Tensor
    alpha: torch.Tensor  # (n_systems,)

    @classmethod
    def of(cls, system, channels=None):
        alpha = ALPHA + 0.1 * torch.arange(len(system.cell), dtype=torch.float64)
        q = system.charges
        if channels is not None:
            q = q.unsqueeze(1) + random_like([q.new_empty(len(q), channels)])[0]
        return cls(system.positions, q, system.cell, alpha)

    def leaves(self):
        return Inputs(*(t.detach().clone().requires_grad_() for t in self))

    def grad(self, value, **options):
        options = {"materialize_grads": True, "allow_unused": True} | options
        return torch.autograd.grad(value, tuple(self), **options)


def real(x, q, cell, alpha, near, **options):
    return ewald_real_space(x, q, cell, alpha, **near, **options)


def reciprocal(x, q, cell, alpha, near, **options):
    return ewald_reciprocal_space(x, q, cell, None, alpha, near.get("batch_idx"), miller_bounds=BOUNDS, **options)


def on_mesh(x, q, cell, alpha, near, spline_order=6, **options):
    return pme_reciprocal_space(x, q, cell, alpha, MESH, None, spline_order, near.get("batch_idx"), **options)


def slab(x, q, cell, alpha, near, **options):
    return compute_slab_correction(x, q, cell, torch.tensor([True, False, True]), near.get("batch_idx"), **options)


def ewald(x, q, cell, alpha, near, **options):
    return ewald_summation(x, q, cell, alpha, miller_bounds=BOUNDS, **near, **options)


def mesh_ewald(x, q, cell, alpha, near, spline_order=6, **options):
    return particle_mesh_ewald(x, q, cell, alpha, None, MESH, spline_order, **near, **options)


SUMS: dict[str, Callable] = {"Ewald": ewald, "PME": mesh_ewald}
PARTS: dict[str, Callable] = {"real space": real, "reciprocal space": reciprocal, "mesh": on_mesh, "slab": slab}
EVERY = SUMS | PARTS
EACH_SUM = pytest.mark.parametrize("name", SUMS)
EACH = pytest.mark.parametrize("name", EVERY)


def near(system, cutoff=CUTOFF):
    """A list for a batch in any order, with what tells its systems apart."""
    return neighbors_of(system, cutoff) | ({"batch_idx": system.batch_idx} if len(system.cell) > 1 else {})


ONE = triclinic(5, charged=True)
SMALL = triclinic(3, charged=True)
MIXED = batch(triclinic(5, charged=True), triclinic(2, seed=3), triclinic(4, charged=True, seed=4))
SHUFFLE = torch.randperm(11, generator=torch.Generator().manual_seed(8))
MIXED = System(MIXED.positions[SHUFFLE], MIXED.charges[SHUFFLE], MIXED.cell, MIXED.batch_idx[SHUFFLE])
NEAR, NEAR_SMALL, NEAR_MIXED = near(ONE), near(SMALL), near(MIXED)


# -- finite differences ---------------------------------------------------------------------------


@EACH
def test_first_derivatives_of_every_output(name):
    """By positions, charges, cell and alpha, entry by entry."""
    inputs = Inputs.of(SMALL).leaves()
    # steps of 1e-5 leave 1e-10 third derivatives, and rounding of 1e-16 values / 1e-5
    assert torch.autograd.gradcheck(
        lambda *i: EVERY[name](*i, NEAR_SMALL, **ALL), tuple(inputs), eps=1e-5, atol=1e-7, rtol=1e-6
    )


@EACH
@pytest.mark.parametrize("output", OUTPUTS)
def test_second_derivatives_of_every_output(name, output):
    """Of a mesh with splines of order 6, which have them for forces as well."""
    inputs = Inputs.of(SMALL).leaves()
    options = {} if output == "energies" else {f"compute_{output}": True}

    def function(*inputs):
        results = EVERY[name](*inputs, NEAR_SMALL, **options)
        return results if output == "energies" else results[1]

    cotangents = tuple(w.requires_grad_() for w in random_like([function(*inputs)]))
    assert torch.autograd.gradgradcheck(
        function, tuple(inputs), cotangents, eps=1e-5, atol=1e-6, rtol=1e-5, fast_mode=output != "energies"
    )


@pytest.mark.parametrize("order", [4, 5])
def test_second_derivatives_on_a_mesh_of_low_order(order):
    """Energies have two continuous derivatives from order 4 on; forces, derivatives themselves, from order 5 on."""
    inputs = tuple(Inputs.of(SMALL).leaves())
    options = {"eps": 1e-5, "atol": 1e-6, "rtol": 1e-5, "fast_mode": True}
    assert torch.autograd.gradgradcheck(lambda *i: on_mesh(*i, {}, spline_order=order), inputs, **options)
    if order > 4:
        outputs = {"compute_forces": True, "compute_virial": True}
        assert torch.autograd.gradgradcheck(
            lambda *i: on_mesh(*i, {}, spline_order=order, **outputs)[1:], inputs, **options
        )


def chain(value, inputs, directions):
    """Derivatives of a scalar along directions, one after the other."""
    found = [value]
    for direction in directions:
        slopes = inputs.grad(found[-1], create_graph=True)
        found.append(sum((s * d).sum() for s, d in zip(slopes, direction, strict=True)))
    return found[1:]


@pytest.mark.parametrize("order", [3, 4, 5, 6])
def test_a_mesh_is_differentiable_as_often_as_its_splines_and_then_says_so(order):
    """p - 2 continuous derivatives, one more in pieces; the next one is an error, not zero."""
    # away from mesh points and from the middle between them, where splines are glued together
    inputs = Inputs.of(ONE._replace(positions=ONE.positions + 0.05))
    directions = [random_like(inputs, seed) for seed in range(order)]

    def energy(inputs):
        return weighted([on_mesh(*inputs, {}, spline_order=order)])

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
    leaves = Inputs.of(SMALL).leaves()
    value = weighted(on_mesh(*leaves, {}, spline_order=order, **{f"compute_{output}": True})[1:])
    left = order - 2 if output == "forces" else order - 1
    directions = [random_like(leaves, seed) for seed in range(left)]
    found = chain(value, leaves, directions)
    assert found[-1].isfinite()
    with pytest.raises(NotDifferentiableError, match="spline_order"):
        leaves.grad(found[-1])


def test_a_force_loss_on_splines_of_order_3():
    """The lowest order there is trains on forces, as piecewise derivatives; the gradient is that of the loss."""

    def loss(q):
        return on_mesh(ONE.positions, q, ONE.cell, ALPHA, {}, spline_order=3, compute_forces=True)[1].square().sum()

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
    inputs, given = Inputs.of(system), near(system)
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
    inputs, directions = Inputs.of(SMALL), [random_like(Inputs.of(SMALL), seed) for seed in range(4)]

    def derivatives(step, direction):
        moved = Inputs(*(t + step * d for t, d in zip(inputs, direction, strict=True))).leaves()
        value = weighted([reciprocal(*moved, {})])
        return [value.detach(), *(v.detach() for v in chain(value, moved, directions))]

    at = derivatives(0.0, directions[0])[1:]
    for k, value in enumerate(at):
        lower = derivative_along(lambda s, k=k: derivatives(s, directions[k])[k], 0.0, 1.0, step=1e-3)
        torch.testing.assert_close(value, lower, rtol=1e-7, atol=1e-7 * float(at[-1].abs().clamp(min=1.0)))


# -- what is returned, and what autograd gives ----------------------------------------------------


@EACH
@pytest.mark.parametrize("system", ["one", "batch", "channels"])
def test_returned_derivatives_are_those_of_autograd(name, system):
    """Forces, charge gradients and virial, to 1e-10."""
    given = NEAR_MIXED if system == "batch" else NEAR
    of = MIXED if system == "batch" else ONE
    leaves = Inputs.of(of, 3 if system == "channels" else None).leaves()
    strain = torch.zeros(len(of.cell), 3, 3, dtype=torch.float64, requires_grad=True)
    deform = torch.eye(3, dtype=torch.float64) + strain
    x = torch.einsum("ia,iab->ib", leaves.x, deform[of.batch_idx.long()])
    energies, forces, slopes, virial = EVERY[name](x, leaves.q, leaves.cell @ deform, leaves.alpha, given, **ALL)
    expected = torch.autograd.grad(energies.sum(), (leaves.x, leaves.q, strain), retain_graph=True)
    close((-forces, slopes, -virial), expected, 1e-10)
    per_system = EVERY[name](x, leaves.q, leaves.cell @ deform, leaves.alpha, given, energy_reduction="system")
    close(torch.autograd.grad(per_system.sum(), (leaves.x, leaves.q, strain)), expected, 1e-10)


# -- weights --------------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("reduction", ["atom", "system"])
def test_gradients_follow_random_weights_of_energies(name, reduction):
    """The weighted sum of single gradients, in everything; against finite differences too."""
    inputs = Inputs.of(MIXED)
    leaves = inputs.leaves()

    def energies_of(*inputs):
        return EVERY[name](*inputs, NEAR_MIXED, energy_reduction=reduction)

    energies = energies_of(*leaves)
    (weights,) = random_like([energies])
    found = leaves.grad(energies, grad_outputs=weights, retain_graph=True)
    singles = [leaves.grad(energy, retain_graph=True) for energy in energies]
    close(found, [sum(w * g for w, g in zip(weights, gs)) for gs in zip(*singles)], 1e-11)
    direction = random_like(inputs, 1)
    expected = derivative_along(
        lambda s: (weights * energies_of(*(t + s * d for t, d in zip(inputs, direction)))).sum(), 0.0, 1.0, step=1e-3
    )
    slope = sum((f * d).sum() for f, d in zip(found, direction))
    # of fourth order: errors are those of fifth derivatives times 1e-12
    torch.testing.assert_close(slope, expected, rtol=1e-6, atol=1e-7)


@EACH_SUM
@pytest.mark.parametrize("output", OUTPUTS[1:])
def test_gradients_follow_random_weights_of_every_output(name, output):
    """Of outputs that are derivatives themselves."""
    leaves = Inputs.of(SMALL).leaves()
    result = SUMS[name](*leaves, NEAR_SMALL, **{f"compute_{output}": True})[1]
    (weights,) = random_like([result])
    found = leaves.grad(result, grad_outputs=weights, retain_graph=True)
    singles = [leaves.grad(value, retain_graph=True) for value in result.flatten()]
    expected = [sum(w * g for w, g in zip(weights.flatten(), gs)) for gs in zip(*singles)]
    close(found, expected, 1e-11)


# -- graphs ---------------------------------------------------------------------------------------


@EACH
def test_backward_twice_gives_the_same_and_leaves_cotangents_alone(name):
    """Also for three calls with one and the same `grad_outputs`."""
    weights = None
    for _ in range(3):
        leaves = Inputs.of(MIXED).leaves()
        results = EVERY[name](*leaves, NEAR_MIXED, **ALL)
        if weights is None:
            weights = random_like(results)
            before = [w.clone() for w in weights]
            expected = leaves.grad(results, grad_outputs=weights, retain_graph=True)
            assert any(e.any() for e in expected)
        for _ in range(2):
            same_bits(leaves.grad(results, grad_outputs=weights, retain_graph=True), expected)
        same_bits(weights, before)


@EACH_SUM
def test_accumulated_gradients_add_up(name):
    """`backward` twice through one graph; and a fresh graph on top."""
    leaves = Inputs.of(ONE).leaves()
    loss = weighted(SUMS[name](*leaves, NEAR, **ALL))
    loss.backward(retain_graph=True)
    once = [t.grad.clone() for t in leaves]
    loss.backward()
    weighted(SUMS[name](*leaves, NEAR, **ALL)).backward()
    close([t.grad for t in leaves], [3.0 * g for g in once])


CHANGED = ["x", "q", "cell", "alpha", "neighbor_list", "neighbor_shifts", "batch_idx"]


@EACH_SUM
@pytest.mark.parametrize("changed", CHANGED)
def test_inputs_changed_in_place_before_the_backward(name, changed):
    """An error, or the gradients of the original values."""
    buffers = {k: v.clone() for k, v in NEAR_MIXED.items()}
    leaves = Inputs.of(MIXED).leaves()
    inputs = Inputs(*(1.0 * t for t in leaves))
    expected = leaves.grad(weighted(SUMS[name](*leaves, NEAR_MIXED, **ALL)))
    value = weighted(SUMS[name](*inputs, buffers, **ALL))
    target = buffers[changed] if changed in buffers else getattr(inputs, changed)
    with torch.no_grad():
        target.add_(1) if changed == "neighbor_shifts" else target.zero_()
    try:
        found = leaves.grad(value)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        close(found, expected)


@EACH_SUM
@pytest.mark.parametrize("way", ["returned forces", "autograd", "returned virial"])
def test_a_force_loss_gives_the_gradients_of_parameters(name, way):
    """Charges that a parameter predicts; by finite differences of the loss."""
    weights, target = random_like([ONE.positions, ONE.positions.new_empty(1, 3, 3)])

    def loss(parameter):
        x = ONE.positions.clone().requires_grad_()
        q = torch.tanh(ONE.charges * parameter)
        energies, forces, virial = SUMS[name](x, q, ONE.cell, ALPHA, NEAR, compute_forces=True, compute_virial=True)
        if way == "autograd":
            forces = -torch.autograd.grad(energies.sum(), x, create_graph=True)[0]
        return (virial - target).square().sum() if way == "returned virial" else (forces - weights).square().sum()

    at = torch.linspace(0.5, 1.5, 5, dtype=torch.float64)
    parameter = at.clone().requires_grad_()
    (found,) = torch.autograd.grad(loss(parameter), parameter)
    (direction,) = random_like([at], 3)
    expected = derivative_along(lambda p: loss(p).detach(), at, direction)
    torch.testing.assert_close((found * direction).sum(), expected, rtol=1e-8, atol=1e-8)


# -- function transforms --------------------------------------------------------------------------

HESSIANS = [
    "vmap of vjp",
    "batched autograd",
    "jacrev of grad",
    "jacrev of jacrev",
    "jacrev of forces",
    "hessian",
    "jacfwd of grad",
]


def hessian(energy, forces, x, way):
    n = x.numel()
    units = torch.eye(n, dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    if way == "rows":
        (slope,) = torch.autograd.grad(energy(leaf), leaf, create_graph=True)
        found = torch.stack([torch.autograd.grad(s, leaf, retain_graph=True)[0] for s in slope.flatten()])
    elif way == "vmap of vjp":
        _, pull = torch.func.vjp(torch.func.grad(energy), x)
        found = torch.vmap(lambda v: pull(v)[0])(units.reshape(n, *x.shape))
    elif way == "batched autograd":
        (slope,) = torch.autograd.grad(energy(leaf), leaf, create_graph=True)
        (found,) = torch.autograd.grad(slope.flatten(), leaf, units, is_grads_batched=True)
    elif way == "jacrev of grad":
        found = torch.func.jacrev(torch.func.grad(energy))(x)
    elif way == "jacrev of jacrev":
        found = torch.func.jacrev(torch.func.jacrev(energy))(x)
    elif way == "jacrev of forces":
        found = -torch.func.jacrev(forces)(x)
    elif way == "jacfwd of grad":
        found = torch.func.jacfwd(torch.func.grad(energy))(x)
    else:
        found = torch.func.hessian(energy)(x)
    return found.reshape(n, n)


@EACH_SUM
@pytest.mark.parametrize("way", HESSIANS)
def test_hessians(name, way):
    """Equal to the loop over rows, and symmetric; the rows themselves to finite differences."""

    def energy(x):
        return SUMS[name](x, ONE.charges, ONE.cell, ALPHA, NEAR).sum()

    def forces(x):
        return SUMS[name](x, ONE.charges, ONE.cell, ALPHA, NEAR, compute_forces=True)[1]

    found = hessian(energy, forces, ONE.positions, way)
    rows = hessian(energy, forces, ONE.positions, "rows")
    close([found, rows], [rows, rows.T], 1e-10)
    (direction,) = random_like([ONE.positions])
    expected = -derivative_along(forces, ONE.positions, direction).flatten()
    torch.testing.assert_close(rows @ direction.flatten(), expected, rtol=1e-7, atol=1e-7)


@EACH_SUM
def test_second_derivatives_by_charges_are_the_matrix_of_the_quadratic_form(name):
    """E = q·A q / 2, so the Hessian is A whatever the charges."""

    def energy(q):
        return SUMS[name](ONE.positions, q, ONE.cell, ALPHA, NEAR).sum()

    matrix = torch.func.jacrev(torch.func.grad(energy))(ONE.charges)
    units = torch.eye(5, dtype=torch.float64)
    columns = [torch.func.grad(energy)(unit) for unit in units]
    close([matrix, 0.5 * ONE.charges @ matrix @ ONE.charges], [torch.stack(columns), energy(ONE.charges)])


@EACH
def test_torch_func_grad_equals_autograd(name):
    inputs = Inputs.of(MIXED)

    def loss(*inputs):
        return weighted(EVERY[name](*inputs, NEAR_MIXED, **ALL))

    found = torch.func.grad(loss, argnums=(0, 1, 2, 3))(*inputs)
    leaves = inputs.leaves()
    close(found, leaves.grad(loss(*leaves)))


@EACH_SUM
@pytest.mark.parametrize("forward", [False, True], ids=["reverse mode", "forward mode"])
def test_vjp_and_jvp(name, forward):
    """Products with the Jacobian and its transpose, of all outputs."""
    inputs = Inputs.of(SMALL)

    def function(*inputs):
        return SUMS[name](*inputs, NEAR_SMALL, **ALL)

    leaves = inputs.leaves()
    results = function(*leaves)
    weights, direction = random_like(results), random_like(inputs, 1)
    pulled = leaves.grad(results, grad_outputs=weights)
    if forward:
        values, pushed = torch.func.jvp(function, tuple(inputs), tuple(direction))
        close(values, results)
        found = sum((p * w).sum() for p, w in zip(pushed, weights))
        expected = sum((p * d).sum() for p, d in zip(pulled, direction))
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    else:
        close(torch.func.vjp(function, *inputs)[1](tuple(weights)), pulled)


@pytest.mark.parametrize(("first", "mesh"), [("jacrev of grad", (8, 9, 13)), ("hessian", (8, 9, 14))])
def test_the_first_use_of_a_mesh_may_be_inside_a_transform(first, mesh):
    """What is kept for the next call with this mesh must not belong to the transform."""

    def energy(x):
        return pme_reciprocal_space(x, ONE.charges, ONE.cell, ALPHA, mesh).sum()

    hessian(energy, None, ONE.positions, first)
    found = hessian(energy, None, ONE.positions, "jacrev of grad")
    close([found], [hessian(energy, None, ONE.positions, "rows")], 1e-10)


MAPPED = [("q",), ("x",), ("x", "q"), ("cell",), ("alpha",), ("x", "q", "cell", "alpha")]


@EACH_SUM
@pytest.mark.parametrize("mapped", MAPPED, ids=" ".join)
@pytest.mark.parametrize("what", ["results", "gradients"])
def test_vmap_over_slices_equals_a_loop(name, mapped, what):
    """Several sets of charges, or geometries, over one list."""
    inputs = Inputs.of(ONE)
    slices = [
        torch.stack([t + 0.02 * k * d for k in range(3)]) if field in mapped else t
        for field, t, d in zip(Inputs._fields, inputs, random_like(inputs))
    ]
    in_dims = tuple(0 if field in mapped else None for field in Inputs._fields)

    def function(*inputs):
        if what == "gradients":
            places = tuple(Inputs._fields.index(field) for field in mapped)
            return torch.func.grad(lambda *i: weighted(SUMS[name](*i, NEAR, **ALL)), argnums=places)(*inputs)
        return SUMS[name](*inputs, NEAR, **ALL)

    found = torch.func.vmap(function, in_dims)(*slices)
    singles = [function(*(t[k] if d == 0 else t for t, d in zip(slices, in_dims))) for k in range(3)]
    close(found, [torch.stack(parts) for parts in zip(*singles)], 1e-11)


# -- batches and channels -------------------------------------------------------------------------


def all_gradients(name, system, inputs, given):
    """Results, first gradients, and gradients of those, all per atom and per system; weights as functions of inputs."""
    leaves = inputs.leaves()
    results = EVERY[name](*leaves, given, **ALL)
    loss = sum(r.square().sum() + r.sin().sum() for r in results)
    first = leaves.grad(loss, create_graph=True)
    second = leaves.grad(sum(f.sin().sum() for f in first))
    return [t.detach() for t in (*results, *first, *second)]


@EACH
def test_gradients_in_a_ragged_batch_equal_those_of_systems_alone(name):
    """Two orders, of atoms in any order."""
    together = all_gradients(name, MIXED, Inputs.of(MIXED), NEAR_MIXED)
    for number in range(3):
        mine = (MIXED.batch_idx == number).nonzero().squeeze(1)
        alone = System(
            MIXED.positions[mine], MIXED.charges[mine], MIXED.cell[number : number + 1], torch.zeros(len(mine)).int()
        )
        inputs = Inputs.of(alone)._replace(alpha=Inputs.of(MIXED).alpha[number : number + 1])
        singly = all_gradients(name, alone, inputs, near(alone))
        parts = [t[mine] if len(t) == 11 else t[number : number + 1] for t in together]
        # sines of large numbers cost digits
        close(parts, singly, 1e-9)


@EACH
@pytest.mark.parametrize("channels", [1, 3])
def test_gradients_of_channels_equal_a_loop_over_channels(name, channels):
    """Two orders; energies and charge gradients by channel, the others summed."""
    inputs = Inputs.of(ONE, channels)
    leaves = inputs.leaves()
    results = EVERY[name](*leaves, NEAR, **ALL)
    columns = [EVERY[name](leaves.x, q, leaves.cell, leaves.alpha, NEAR, **ALL) for q in leaves.q.unbind(1)]
    energies, forces, slopes, virial = zip(*columns)
    expected = [torch.stack(energies, 1), sum(forces), torch.stack(slopes, 1), sum(virial)]
    found = []
    for outcome in (results, expected):
        first = leaves.grad(sum(r.square().sum() + r.sin().sum() for r in outcome), create_graph=True)
        second = leaves.grad(sum(f.sin().sum() for f in first), retain_graph=True)
        found.append([t.detach() for t in (*outcome, *first, *second)])
    # sines of large numbers cost digits
    close(*found, 1e-9)


# -- nothing to do --------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("n_atoms", [0, 1])
def test_gradients_without_pairs(name, n_atoms):
    system = System(ONE.positions[:n_atoms], ONE.charges[:n_atoms], ONE.cell, ONE.batch_idx[:n_atoms])
    given = {"neighbor_list": torch.zeros(2, 0).int(), "neighbor_shifts": torch.zeros(0, 3).int()}
    found = all_gradients(name, system, Inputs.of(system), given)
    assert all(t.isfinite().all() for t in found)
    assert found[1].abs().max().item() < 1e-12 if n_atoms else found[1].numel() == 0


# -- where numbers are awkward --------------------------------------------------------------------


def by_cell(system, cell, create_graph=False):
    energies = ewald_summation(*system[:2], cell, ALPHA, k_cutoff=5.0, batch_idx=system.batch_idx, cutoff=5.0)
    return torch.autograd.grad(energies.sum(), cell, create_graph=create_graph)[0].detach()


@pytest.mark.parametrize("one", [True, False])
def test_gradients_by_a_float32_cell_far_from_the_origin(one):
    """Forces of pairs come rounded, and are not multiplied by where the origin happens to be."""
    system = (ONE if one else MIXED).to(torch.float32)
    system = system._replace(positions=system.positions + 1e4)
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
