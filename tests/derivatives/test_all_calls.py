"""Derivatives of every output by every input, in each way that torch has for them."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from nvalchemiops.torch.interactions import electrostatics
from nvalchemiops.torch.neighbors import neighbor_list
from nvalchemiops.torch.neighbors.rows import NO_PADDING
from tests.support.cases import (
    CUTOFF,
    D3,
    EACH,
    EACH_OF_ATOMS,
    EACH_WHOLE,
    MIXED,
    ONE,
    PAIRS,
    PARTS,
    SMALL,
    SUMS,
    Inputs,
    each,
    member,
)
from tests.support.comparing import (
    assert_second_gradient,
    close,
    compiled,
    derivative_along,
    random_like,
    same_bits,
    weighted,
)
from tests.support.systems import System, triclinic


def each_output(*cases):
    """Cases with one of their outputs. Kernels of third derivatives of D3 take minutes to compile."""
    pairs = [(case, output) for case in cases for output in ("energies", *case.outputs)]
    pairs = [(case, output) for case, output in pairs if case is not D3 or output == "energies"]
    return pytest.mark.parametrize(("case", "output"), pairs, ids=lambda v: v if isinstance(v, str) else v.name)


def output_of(case, output, *arguments):
    return case.call(*arguments, **({} if output == "energies" else {f"compute_{output}": True}))[-1]


def along(gradients, direction):
    return sum((g * d).sum() for g, d in zip(gradients, direction, strict=True))


# -- finite differences ---------------------------------------------------------------------------


@EACH
def test_first_derivatives_of_every_output(case):
    """By all inputs, entry by entry."""
    near = case.near(SMALL)
    # steps of 1e-5 leave 1e-10 third derivatives, and rounding of 1e-16 values / 1e-5
    assert torch.autograd.gradcheck(
        lambda *i: case.results(*i, near), tuple(case.inputs(SMALL).leaves()), eps=1e-5, atol=1e-6, rtol=1e-6
    )


@each_output(*SUMS, *PARTS, *PAIRS, D3)
def test_second_derivatives_of_every_output(case, output):
    """On a mesh with splines of order 6, which have them for forces as well."""
    near = case.near(SMALL)
    assert_second_gradient(lambda *inputs: output_of(case, output, *inputs, near), case.inputs(SMALL))


# -- what is returned, and what autograd gives ----------------------------------------------------


@EACH
@pytest.mark.parametrize("system", [ONE, MIXED], ids=["one", "batch"])
def test_returned_derivatives_are_those_of_autograd(case, system):
    """Of the energies of atoms and of those of systems."""
    leaves, near = case.inputs(system).leaves(), case.near(system)
    strain = torch.zeros(len(system.cell), 3, 3, dtype=torch.float64, requires_grad=True)
    deform = torch.eye(3, dtype=torch.float64) + strain
    x = torch.einsum("ia,iab->ib", leaves.x, deform[system.batch_idx.long()])
    inputs = leaves._replace(x=x, cell=leaves.cell @ deform)
    energies, *found = case.results(*inputs, near)
    assert all(t.requires_grad for t in (energies, *found))
    by = {"forces": leaves.x, "charge_gradients": leaves.a, "virial": strain}
    expected = torch.autograd.grad(energies.sum(), [by[name] for name in case.outputs], retain_graph=True)
    signs = [1.0 if name == "charge_gradients" else -1.0 for name in case.outputs]
    close([sign * t for sign, t in zip(signs, found)], expected, 1e-10)
    of_systems = case.energies(*inputs, near, energy_reduction="system")
    assert of_systems.shape == (len(system.cell),)
    close(torch.autograd.grad(of_systems.sum(), [by[name] for name in case.outputs]), expected, 1e-10)


# -- weights --------------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("reduction", ["atom", "system"])
def test_gradients_follow_random_weights_of_energies(case, reduction):
    """The weighted sum of single gradients, by everything; against finite differences too."""
    inputs, near = case.inputs(MIXED), case.near(MIXED)
    leaves = inputs.leaves()

    def energies_of(inputs):
        return case.energies(*inputs, near, energy_reduction=reduction)

    energies = energies_of(leaves)
    (weights,) = random_like([energies])
    found = leaves.grad(energies, grad_outputs=weights, retain_graph=True)
    singles = [leaves.grad(energy, retain_graph=True) for energy in energies]
    close(found, [sum(w * g for w, g in zip(weights, gs)) for gs in zip(*singles)], 1e-11)
    direction = random_like(inputs, 1)
    expected = derivative_along(lambda s: (weights * energies_of(inputs.moved(direction, s))).sum(), 0.0, 1.0)
    torch.testing.assert_close(along(found, direction), expected, rtol=1e-6, atol=1e-6)


@each_output(*SUMS, *PAIRS, D3)
def test_gradients_follow_random_weights_of_every_output(case, output):
    """Of outputs that are derivatives themselves."""
    leaves = case.inputs(SMALL).leaves()
    result = output_of(case, output, *leaves, case.near(SMALL))
    (weights,) = random_like([result])
    found = leaves.grad(result, grad_outputs=weights, retain_graph=True)
    singles = [leaves.grad(value, retain_graph=True) for value in result.flatten()]
    close(found, [sum(w * g for w, g in zip(weights.flatten(), gs)) for gs in zip(*singles)], 1e-11)


@EACH_WHOLE
def test_batched_cotangents_equal_a_loop(case):
    """As of a Jacobian that is computed all at once, of all outputs."""
    leaves = case.inputs(SMALL).leaves()
    results = case.results(*leaves, case.near(SMALL))
    several = [random_like(results, seed) for seed in range(3)]
    weights = [torch.stack(parts) for parts in zip(*several)]
    found = leaves.grad(results, grad_outputs=weights, is_grads_batched=True, retain_graph=True)
    singles = [leaves.grad(results, grad_outputs=one, retain_graph=True) for one in several]
    close(found, [torch.stack(parts) for parts in zip(*singles)], 1e-11)


# -- graphs ---------------------------------------------------------------------------------------


@EACH_WHOLE
@pytest.mark.parametrize("field", Inputs._fields)
def test_one_input_alone_gets_what_it_gets_among_all(case, field):
    """The first and the second derivative."""
    inputs, near, found = case.inputs(SMALL), case.near(SMALL), []
    for given in (inputs.leaves(), inputs._replace(**{field: getattr(inputs.leaves(), field)})):
        leaf = getattr(given, field)
        (first,) = torch.autograd.grad(weighted([case.energies(*given, near)]), leaf, create_graph=True)
        second = torch.autograd.grad(first.sin().sum(), leaf, materialize_grads=True, allow_unused=True)
        found.append([first.detach(), *second])
    close(found[1], found[0])


@EACH
def test_backward_twice_gives_the_same_and_leaves_cotangents_alone(case):
    """Also for three calls with one and the same `grad_outputs`."""
    weights = None
    for _ in range(3):
        leaves = case.inputs(MIXED).leaves()
        results = case.results(*leaves, case.near(MIXED))
        if weights is None:
            weights = random_like(results)
            before = [w.clone() for w in weights]
            expected = leaves.grad(results, grad_outputs=weights, retain_graph=True)
            assert any(e.any() for e in expected)
        for _ in range(2):
            same_bits(leaves.grad(results, grad_outputs=weights, retain_graph=True), expected)
        same_bits(weights, before)


@EACH_WHOLE
def test_accumulated_gradients_add_up(case):
    """`backward` twice through one graph; and a fresh graph on top."""
    leaves, near = case.inputs(ONE).leaves(), case.near(ONE)
    loss = weighted(case.results(*leaves, near))
    loss.backward(retain_graph=True)
    once = [t.grad.clone() for t in leaves]
    loss.backward()
    weighted(case.results(*leaves, near)).backward()
    close([t.grad for t in leaves], [3.0 * g for g in once])


CHANGED = [*Inputs._fields, "neighbor_list", "neighbor_shifts", "batch_idx"]


@pytest.mark.everyday_cases(
    "eager-*",
    "compiled-x-PME",
    "compiled-cell-Ewald",
    "compiled-neighbor_list-DSF",
    "compiled-a-LJ",
    "compiled-batch_idx-LJ",
)
@EACH_OF_ATOMS
@pytest.mark.parametrize("changed", CHANGED)
@pytest.mark.parametrize("wrap", [lambda f: f, compiled], ids=["eager", "compiled"])
def test_inputs_changed_in_place_before_the_backward(case, changed, wrap):
    """An error, or the gradients of the original values."""
    near = case.near(MIXED)
    buffers = {k: v.clone() for k, v in near.items()}
    leaves = case.inputs(MIXED).leaves()
    inputs = Inputs(*(1.0 * t for t in leaves))

    def loss(x, a, cell, b, near):
        return weighted(case.results(x, a, cell, b, near))

    expected = leaves.grad(loss(*leaves, near))
    value = wrap(loss)(*inputs, buffers)
    target = buffers[changed] if changed in buffers else getattr(inputs, changed)
    with torch.no_grad():
        target.add_(1) if changed == "neighbor_shifts" else target.zero_()
    try:
        found = leaves.grad(value)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        close(found, expected)


@EACH_WHOLE
@pytest.mark.parametrize("way", ["returned forces", "autograd", "returned virial"])
def test_a_force_loss_gives_the_gradients_of_parameters(case, way):
    """By finite differences of the loss."""
    inputs, near = case.inputs(MIXED), case.near(MIXED)
    targets = random_like([inputs.x, inputs.cell])

    def loss(factor):
        leaf = inputs.x.clone().requires_grad_()
        energies, forces, *_, virial = case.results(leaf, inputs.a * factor, inputs.cell, inputs.b, near)
        if way == "autograd":
            forces = -torch.autograd.grad(energies.sum(), leaf, create_graph=True)[0]
        return (virial - targets[1]).sin().sum() if way == "returned virial" else (forces - targets[0]).sin().sum()

    at = torch.linspace(0.9, 1.1, len(inputs.a), dtype=torch.float64)
    factor, (direction,) = at.clone().requires_grad_(), random_like([at], 3)
    (found,) = torch.autograd.grad(loss(factor), factor)
    expected = derivative_along(lambda f: loss(f).detach(), at, direction)
    torch.testing.assert_close(found @ direction, expected, rtol=1e-6, atol=1e-6)


@EACH_WHOLE
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(case, use_reentrant):
    """Recomputed in the backward pass, the same bits."""
    near, found = case.near(MIXED), []

    def loss(*inputs):
        return weighted(case.results(*inputs, near))

    for function in (loss, lambda *i: checkpoint(loss, *i, use_reentrant=use_reentrant)):
        inputs = case.inputs(MIXED).leaves()
        function(*inputs).backward()
        found.append([t.grad for t in inputs])
    same_bits(*found)


# -- function transforms --------------------------------------------------------------------------


def vmap_of_vjp(energy, forces, x):
    _, pull = torch.func.vjp(torch.func.grad(energy), x)
    return torch.vmap(lambda v: pull(v)[0])(torch.eye(x.numel(), dtype=x.dtype).view(-1, *x.shape))


def batched_autograd(energy, forces, x):
    leaf = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(energy(leaf), leaf, create_graph=True)
    units = torch.eye(x.numel(), dtype=x.dtype)
    return torch.autograd.grad(slope.flatten(), leaf, units, is_grads_batched=True)[0]


def row_by_row(energy, x):
    leaf = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(energy(leaf), leaf, create_graph=True)
    return torch.stack([torch.autograd.grad(s, leaf, retain_graph=True)[0].flatten() for s in slope.flatten()])


HESSIANS = {
    "vmap of vjp": vmap_of_vjp,
    "batched autograd": batched_autograd,
    "jacrev of grad": lambda energy, forces, x: torch.func.jacrev(torch.func.grad(energy))(x),
    "jacrev of jacrev": lambda energy, forces, x: torch.func.jacrev(torch.func.jacrev(energy))(x),
    "jacrev of forces": lambda energy, forces, x: -torch.func.jacrev(forces)(x),
    "hessian": lambda energy, forces, x: torch.func.hessian(energy)(x),
    "jacfwd of grad": lambda energy, forces, x: torch.func.jacfwd(torch.func.grad(energy))(x),
}


@EACH_WHOLE
@pytest.mark.parametrize("way", HESSIANS.values(), ids=HESSIANS)
def test_hessians(case, way):
    """Equal to the loop over rows, and symmetric; the rows themselves to finite differences."""
    inputs, near = case.inputs(SMALL), case.near(SMALL)

    def energy(x):
        return case.energies(x, *inputs[1:], near).sum()

    def forces(x):
        return case.call(x, *inputs[1:], near, compute_forces=True)[1]

    n = inputs.x.numel()
    found, rows = way(energy, forces, inputs.x).reshape(n, n), row_by_row(energy, inputs.x)
    close([found, rows], [rows, rows.T], 1e-10)
    (direction,) = random_like([inputs.x])
    expected = -derivative_along(forces, inputs.x, direction).flatten()
    torch.testing.assert_close(rows @ direction.flatten(), expected, rtol=1e-6, atol=1e-6)


@EACH
def test_torch_func_grad_equals_autograd(case):
    inputs, near = case.inputs(MIXED), case.near(MIXED)

    def loss(*inputs):
        return weighted(case.results(*inputs, near))

    leaves = inputs.leaves()
    close(torch.func.grad(loss, argnums=(0, 1, 2, 3))(*inputs), leaves.grad(loss(*leaves)))


@EACH_WHOLE
def test_vjp_and_jvp(case):
    """Products with the Jacobian and its transpose, of all outputs."""
    inputs, near = case.inputs(SMALL), case.near(SMALL)

    def function(*inputs):
        return case.results(*inputs, near)

    leaves = inputs.leaves()
    results = function(*leaves)
    weights, direction = random_like(results), random_like(inputs, 1)
    pulled = leaves.grad(results, grad_outputs=weights)
    close(torch.func.vjp(function, *inputs)[1](tuple(weights)), pulled)
    values, pushed = torch.func.jvp(function, tuple(inputs), tuple(direction))
    close(values, results)
    torch.testing.assert_close(along(pushed, weights), along(pulled, direction), rtol=1e-10, atol=1e-10)


MAPPED = [("a",), ("x",), ("x", "a"), ("cell",), ("b",), ("x", "a", "cell", "b")]


@EACH_WHOLE
@pytest.mark.parametrize("mapped", MAPPED, ids=" ".join)
@pytest.mark.parametrize("what", ["results", "gradients"])
def test_vmap_over_slices_equals_a_loop(case, mapped, what):
    """Several sets of parameters, or geometries, over one list."""
    inputs, near = case.inputs(ONE), case.near(ONE)
    slices = [
        torch.stack([t + 0.02 * k * d for k in range(3)]) if field in mapped else t
        for field, t, d in zip(Inputs._fields, inputs, random_like(inputs))
    ]
    in_dims = tuple(0 if field in mapped else None for field in Inputs._fields)
    places = tuple(Inputs._fields.index(field) for field in mapped)

    def results(*inputs):
        return case.results(*inputs, near)

    function = results if what == "results" else torch.func.grad(lambda *i: weighted(results(*i)), argnums=places)
    found = torch.func.vmap(function, in_dims)(*slices)
    singles = [function(*(t[k] if d == 0 else t for t, d in zip(slices, in_dims))) for k in range(3)]
    close(found, [torch.stack(parts) for parts in zip(*singles)], 1e-11)


@EACH_WHOLE
@pytest.mark.parametrize("form", ["given", "half", "built inside"])
def test_vmap_over_lists_equals_a_loop(case, form):
    """Systems of as many atoms, each with its own matrix, which is as wide as all others."""
    inside, half = form == "built inside", form == "half"
    slices = [case.inputs(ONE).moved(random_like(case.inputs(ONE), k), 0.02) for k in range(3)]

    def neighbors(x, cell):
        matrix, _, shifts = neighbor_list(x, CUTOFF, cell, max_neighbors=60, half_fill=half)
        return matrix, shifts

    given = [() if inside else neighbors(part.x, part.cell) for part in slices]

    def energy(x, a, cell, b, *near):
        matrix, shifts = near or neighbors(x.detach(), cell.detach())
        near = case.near(ONE, neighbor_matrix=matrix, neighbor_matrix_shifts=shifts, half_list=half)
        return weighted(case.results(x, a, cell, b, near))

    for function in (energy, torch.func.grad(energy, argnums=(0, 1, 2))):
        arguments = [torch.stack(parts) for parts in zip(*[(*part, *near) for part, near in zip(slices, given)])]
        found = torch.func.vmap(function)(*arguments)
        singles = [function(*part, *near) for part, near in zip(slices, given)]
        if function is energy:
            found, singles = (found,), [(single,) for single in singles]
        close(found, [torch.stack(parts) for parts in zip(*singles)], 1e-11)


@EACH_WHOLE
@pytest.mark.parametrize("half", [False, True])
def test_vmap_over_lists_with_room_equals_a_loop(case, half):
    """Lists in memory that is larger than the longest of them."""
    slices = [case.inputs(ONE).moved(random_like(case.inputs(ONE), k), 0.02) for k in range(3)]
    lists = [neighbor_list(p.x, CUTOFF, p.cell, return_neighbor_list=True, half_fill=half) for p in slices]
    size = max(pairs.shape[1] for pairs, *_ in lists) + 3

    def with_room(pairs, pointers, shifts):
        room = torch.full((2, size - pairs.shape[1]), NO_PADDING, dtype=torch.int32)
        return torch.cat([pairs, room], 1), pointers, torch.cat([shifts, room.new_zeros(room.shape[1], 3)])

    def energy(part, pairs, pointers, shifts):
        near = case.near(ONE, neighbor_list=pairs, neighbor_ptr=pointers, neighbor_shifts=shifts, half_list=half)
        return weighted(case.results(*part, near))

    for given in ([with_room(*one) for one in lists], [with_room(*lists[0])]):
        near = [torch.stack(parts) for parts in zip(*given)] if len(given) > 1 else given[0]
        mapped = (0, *[0 if len(given) > 1 else None] * 3)
        parts = [torch.stack(values) for values in zip(*slices)]
        found = torch.func.vmap(lambda part, *near: energy(part, *near), in_dims=mapped)(tuple(parts), *near)
        singles = [energy(part, *one) for part, one in zip(slices, given if len(given) > 1 else given * 3)]
        close((found,), [torch.stack(singles)], 1e-11)


@pytest.mark.parametrize("name", ["dsf_coulomb", "ewald_summation"])
def test_vmap_over_lists_that_are_found_equals_a_loop(name):
    """Each slice finds as many pairs as it has, in systems whose atoms are in any order."""
    generator = torch.Generator().manual_seed(4)
    fractional = torch.rand(10, 3, generator=generator, dtype=torch.float64)
    cells = triclinic().cell * torch.tensor([1.0, 1.2], dtype=torch.float64).view(2, 1, 1)
    batch_idx = torch.tensor([1, 0, 0, 1, 0, 1, 1, 0, 0, 1], dtype=torch.int32)
    charges = torch.randn(10, generator=generator, dtype=torch.float64)
    options = {"cutoff": CUTOFF} if name == "dsf_coulomb" else {"alpha": 1.1, "k_cutoff": 6.0}

    def energy(stretch):
        x = stretch * (fractional.unsqueeze(1) @ cells[batch_idx.long()]).squeeze(1)
        sums = getattr(electrostatics, name)(x, charges, cell=cells, batch_idx=batch_idx, **options)
        return (sums[0] if isinstance(sums, tuple) else sums).square().sum()

    stretches = torch.tensor([1.0, 1.1, 1.25], dtype=torch.float64)
    for function in (energy, torch.func.grad(energy)):
        close((torch.vmap(function)(stretches),), [torch.stack([function(stretch) for stretch in stretches])], 1e-11)


# -- batches, and nothing to do -------------------------------------------------------------------


def all_gradients(case, inputs, near):
    """Results, first gradients, and gradients of those; weights are functions of results."""
    leaves = inputs.leaves()
    results = case.results(*leaves, near)
    first = leaves.grad(sum(r.square().sum() + r.sin().sum() for r in results), create_graph=True)
    second = leaves.grad(sum(f.sin().sum() for f in first))
    return [t.detach() for t in (*results, *first, *second)]


@each(*SUMS, *PARTS, *PAIRS)
def test_gradients_in_a_ragged_batch_equal_those_of_systems_alone(case):
    """Two orders, of atoms in any order."""
    inputs = case.inputs(MIXED)
    together = all_gradients(case, inputs, case.near(MIXED))
    for number in range(3):
        alone, its_inputs, mine = member(MIXED, inputs, case, number)
        singly = all_gradients(case, its_inputs, case.near(alone))
        parts = [t[mine] if len(t) == len(MIXED.charges) else t[number : number + 1] for t in together]
        # sines of large numbers cost digits
        close(parts, singly, 1e-8)


@each(*SUMS, *PARTS, *PAIRS)
@pytest.mark.parametrize("form", ["list", "matrix"])
@pytest.mark.parametrize("n_atoms", [0, 1, 2])
def test_gradients_without_pairs(case, n_atoms, form):
    system = System(ONE.positions[:n_atoms], ONE.charges[:n_atoms], ONE.cell, ONE.batch_idx[:n_atoms])
    shape, name = ((2, 0), "neighbor_shifts") if form == "list" else ((n_atoms, 0), "neighbor_matrix_shifts")
    near = {f"neighbor_{form}": torch.zeros(shape).int(), name: torch.zeros(*shape[form == "list" :], 3).int()}
    found = all_gradients(case, case.inputs(system), case.near(system, **near))
    assert all(t.isfinite().all() for t in found)
    assert found[0].shape == (n_atoms,) and found[1].shape == (n_atoms, 3)
    # a mesh acts on a single charge with a force that is its error
    least = 1e-5 if case.name in ("PME", "mesh") else 1e-12
    assert n_atoms == 0 or (n_atoms == 2 and case not in PAIRS) or found[1].abs().max().item() < least


@EACH
def test_hessians_without_atoms(case):
    """As of operations of torch: by ``vmap`` over no slice."""
    nobody = ONE._replace(positions=ONE.positions[:0], charges=ONE.charges[:0], batch_idx=ONE.batch_idx[:0])
    inputs, near = case.inputs(nobody), case.near(nobody)
    for transform in (torch.func.hessian, lambda f: torch.func.jacrev(torch.func.jacrev(f))):
        found = transform(lambda x: case.energies(*inputs._replace(x=x), near).sum())(inputs.x)
        assert found.shape == (0, 3, 0, 3)
