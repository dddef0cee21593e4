"""JAX functions of operators: the same values, derivatives and errors as those of torch, in every transformation."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from nvalchemiops.jax import callback, neighbors, primitive, segment_ops, spline
from nvalchemiops.jax.interactions import dispersion, electrostatics, pair
from nvalchemiops.jax.interactions.electrostatics._shapes import sum_operator
from nvalchemiops.torch import neighbors as torch_neighbors
from nvalchemiops.torch import segment_ops as torch_segment_ops
from nvalchemiops.torch import spline as torch_spline
from nvalchemiops.torch.interactions import dispersion as torch_dispersion
from nvalchemiops.torch.interactions import electrostatics as torch_electrostatics
from nvalchemiops.torch.interactions import pair as torch_pair
from nvalchemiops.torch.runtime import engine
from tests.jax.precision import double_precision  # noqa: F401
from tests.jax.problem import JAX_TABLES, NEAR, NUMBERS, SYSTEM, TABLES, to_jax
from tests.support.plans import plan_of
from tests.support.systems import batch, triclinic

RANDOM = np.random.default_rng(0)
DIRECTIONS = [torch.as_tensor(RANDOM.normal(size=SYSTEM.positions.shape)) for _ in range(3)]
WEIGHTS = torch.as_tensor(RANDOM.normal(size=6))


class Operator(NamedTuple):
    """An energy of positions, charges and a cell, of the functions in one of two modules."""

    call: Callable
    torch_module: object
    jax_module: object
    order: int = 3  # the highest derivative of the table: each takes a kernel of its own

    def in_torch(self, *arguments):
        return self.call(self.torch_module, NEAR, NUMBERS, *arguments)

    def in_jax(self, *arguments):
        near = to_jax(NEAR)
        return self.call(self.jax_module, near, to_jax(NUMBERS), *arguments)


def of_sum(name, alone=True, **options):
    def call(module, near, numbers, x, q, cell):
        given = near if "space" not in name or "real" in name else {}
        return getattr(module, name)(x, q, cell, **given, energy_reduction="system", **options)[0]

    return Operator(call, torch_electrostatics, electrostatics)


def of_slab(module, near, numbers, x, q, cell):
    pbc = np.array([True, True, False])
    pbc = torch.as_tensor(pbc) if isinstance(x, torch.Tensor) else pbc
    return module.compute_slab_correction(x, q, cell, pbc, energy_reduction="system")[0]


def of_coulomb(module, near, numbers, x, q, cell):
    return (module.coulomb_energy(x, q, cell, 3.5, 0.3, **near) * 1.5).sum()


def of_dsf(module, near, numbers, x, q, cell):
    near = {("unit_shifts" if "shifts" in name else name): value for name, value in near.items()}
    return module.dsf_coulomb(x, q, 3.5, 0.2, cell, compute_forces=False, **near)[0][0]


def of_potential(module, near, numbers, x, q, cell):
    return module.lennard_jones(3.5, r_switch=2.5)(
        x, cell, sigma=1.2 + 0.1 * q, epsilon=0.5, energy_reduction="system", **near
    )[0]


def of_dispersion(module, near, numbers, x, q, cell):
    near = {("unit_shifts" if "shifts" in name else name): value for name, value in near.items()}
    tables = TABLES if isinstance(x, torch.Tensor) else JAX_TABLES
    found = module.dftd3(x, numbers, 0.4, 4.0, 1.9, d3_params=tables, cell=cell, **near)
    return 1e3 * found[0][0] + 0.0 * q.sum()


def of_splines(module, near, numbers, x, q, cell):
    mesh = module.spline_spread(x, q, cell, (6, 5, 7), 5)
    return (module.spline_gather(x, mesh * mesh, cell, 5) * q).sum()


def of_segments(module, near, numbers, x, q, cell):
    scaled = module.segmented_matvec(module.segmented_mul(x, q, numbers * 0 + 1, len(q)), cell, numbers * 0, 1)
    norms = module.segmented_rms_norm(scaled, numbers, 99) * module.segmented_mean(q, numbers, 99)
    extremes = module.segmented_max(q, numbers * 0, 1) + 2.0 * module.segmented_min(q, numbers * 0, 1)
    sums = norms * module.segmented_sum(q, numbers, 99) + module.segmented_dot(x, x, numbers, 99) ** 2
    return sums.sum() + (extremes**2).sum()


K = {"alpha": 0.6, "miller_bounds": (2, 2, 2)}
OPERATORS = {
    "ewald_summation": of_sum("ewald_summation", **K)._replace(order=4),
    "ewald_real_space": of_sum("ewald_real_space", alpha=0.6),
    "ewald_reciprocal_space": of_sum("ewald_reciprocal_space", k_vectors=None, **K),
    "particle_mesh_ewald": of_sum("particle_mesh_ewald", alpha=0.6, mesh_dimensions=(8, 8, 8), spline_order=6),
    "pme_reciprocal_space": of_sum("pme_reciprocal_space", alpha=0.6, mesh_dimensions=(8, 8, 8), spline_order=6),
    "compute_slab_correction": Operator(of_slab, torch_electrostatics, electrostatics),
    "coulomb_energy": Operator(of_coulomb, torch_electrostatics, electrostatics),
    "dsf_coulomb": Operator(of_dsf, torch_electrostatics, electrostatics),
    "PairPotential": Operator(of_potential, torch_pair, pair),
    "dftd3": Operator(of_dispersion, torch_dispersion, dispersion),
    "splines": Operator(of_splines, torch_spline, spline),
    "segments": Operator(of_segments, torch_segment_ops, segment_ops),
}


def torch_derivatives(energy, x, order):
    """Value, gradient, Hessian, and derivatives along directions, by torch."""
    x = x.clone().requires_grad_()
    value = energy(x)
    (gradient,) = torch.autograd.grad(value, x, create_graph=True)
    rows = [torch.autograd.grad(g, x, retain_graph=True)[0] for g in gradient.reshape(-1)]
    found = {"value": value.detach(), "gradient": gradient.detach(), "hessian": torch.stack(rows).reshape(2 * x.shape)}
    along = (gradient * DIRECTIONS[0]).sum()
    for number, direction in enumerate([DIRECTIONS[1], DIRECTIONS[2]][: order - 2], start=2):
        (along,) = torch.autograd.grad(along, x, create_graph=True)
        along = (along * direction).sum()
        found[f"gradient along {number}"] = torch.autograd.grad(along, x, retain_graph=True)[0]
    return {name: t.numpy() for name, t in found.items()}


def transformations(energy, x, order):
    """The table: what each transformation gives, and the same from torch's derivatives."""
    v, w, u = to_jax(DIRECTIONS)
    gradient, stack = jax.grad(energy), jnp.stack([x, x + 0.1 * v])

    def along(f, direction):
        return lambda x: jax.jvp(f, (x,), (direction,))[1]

    def times(f, direction):
        return lambda x: jnp.sum(f(x) * direction)

    def descend(x):
        def step(y, _):
            return y - 1e-3 * gradient(y), energy(y)

        return jnp.sum(jax.lax.scan(step, x, None, length=2)[1])

    def by_hand(d, x):
        # energies at x and after one step, whose derivative has the Hessian at x
        after = d(x - 1e-3 * d(x)["gradient"])
        g, hessian = after["gradient"], d(x)["hessian"]
        return d(x)["gradient"] + g - 1e-3 * np.einsum("abcd,cd->ab", hessian, g)

    V, W = (t.numpy() for t in DIRECTIONS[:2])
    table = {
        "value": (energy, lambda d, x: d(x)["value"]),
        "grad": (gradient, lambda d, x: d(x)["gradient"]),
        "value_and_grad": (jax.value_and_grad(energy), lambda d, x: (d(x)["value"], d(x)["gradient"])),
        "jvp": (along(energy, v), lambda d, x: (d(x)["gradient"] * V).sum()),
        "jvp of jvp": (along(along(energy, v), w), lambda d, x: np.einsum("ab,abcd,cd", V, d(x)["hessian"], W)),
        "vjp of jvp": (jax.grad(along(energy, v)), lambda d, x: np.einsum("ab,abcd->cd", V, d(x)["hessian"])),
        "jvp of vjp": (along(gradient, v), lambda d, x: np.einsum("abcd,cd->ab", d(x)["hessian"], V)),
        "grad of grad": (jax.grad(times(gradient, v)), lambda d, x: np.einsum("ab,abcd->cd", V, d(x)["hessian"])),
        "hessian": (jax.hessian(energy), lambda d, x: d(x)["hessian"]),
        "jacfwd of jacfwd": (jax.jacfwd(jax.jacfwd(energy)), lambda d, x: d(x)["hessian"]),
        "jacrev of jacfwd": (jax.jacrev(jax.jacfwd(energy)), lambda d, x: d(x)["hessian"]),
        "jacrev of jacrev": (jax.jacrev(jax.jacrev(energy)), lambda d, x: d(x)["hessian"]),
        "third order": (jax.grad(times(jax.grad(times(gradient, v)), w)), lambda d, x: d(x)["gradient along 2"]),
        "third order, forward": (along(along(gradient, v), w), lambda d, x: d(x)["gradient along 2"]),
        "linearize": (
            lambda x: jax.linearize(gradient, x)[1](v),
            lambda d, x: np.einsum("abcd,cd", d(x)["hessian"], V),
        ),
        "vmap of grad": (lambda x: jax.vmap(gradient)(stack), lambda d, x: np.stack([d(y)["gradient"] for y in stack])),
        "grad of vmap": (
            lambda x: jax.grad(lambda y: jnp.sum(jax.vmap(energy)(y)))(stack),
            lambda d, x: np.stack([d(y)["gradient"] for y in stack]),
        ),
        "vmap of hvp": (
            lambda x: jax.vmap(lambda t: jax.jvp(gradient, (x,), (t,))[1])(jnp.stack([v, w])),
            lambda d, x: np.stack([np.einsum("abcd,cd->ab", d(x)["hessian"], t) for t in (V, W)]),
        ),
        "checkpoint": (jax.grad(jax.checkpoint(energy)), lambda d, x: d(x)["gradient"]),
        "scan": (lambda x: jax.lax.map(gradient, stack), lambda d, x: np.stack([d(y)["gradient"] for y in stack])),
        "grad of scan": (jax.grad(descend), by_hand),
    }
    if order > 3:
        fourth = jax.grad(times(jax.grad(times(jax.grad(times(gradient, v)), w)), u))
        table["fourth order"] = (fourth, lambda d, x: d(x)["gradient along 3"])
    return table


MODES = [True, pytest.param(False, marks=pytest.mark.slow)]


@pytest.mark.later_cases("jit-dftd3", "jit-splines", "jit-segments")
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("jitted", MODES, ids=["jit", "eager"])
def test_every_transformation_equals_torch(name, jitted):
    operator = OPERATORS[name]
    q, cell = to_jax(SYSTEM.charges), to_jax(SYSTEM.cell)
    known = {}

    def derivatives(x):
        x = torch.as_tensor(np.array(x))
        key = x.numpy().tobytes()
        if key not in known:
            known[key] = torch_derivatives(
                lambda y: operator.in_torch(y, SYSTEM.charges, SYSTEM.cell), x, operator.order
            )
        return known[key]

    x = to_jax(SYSTEM.positions)
    for label, (function, expected) in transformations(
        lambda y: operator.in_jax(y, q, cell), x, operator.order
    ).items():
        found = (jax.jit(function) if jitted else function)(x)
        wanted = expected(derivatives, x)
        largest = max(np.abs(np.asarray(w)).max() for w in jax.tree.leaves(wanted))
        for f, w in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(f, w, rtol=1e-12, atol=1e-12 * max(1.0, largest), err_msg=f"{name}: {label}")


@pytest.mark.parametrize("name", OPERATORS)
def test_gradients_by_all_arrays_are_torchs(name):
    operator = OPERATORS[name]
    leaves = [t.clone().requires_grad_() for t in (SYSTEM.positions, SYSTEM.charges, SYSTEM.cell)]
    expected = torch.autograd.grad(operator.in_torch(*leaves), leaves)
    found = jax.jit(jax.grad(operator.in_jax, (0, 1, 2)))(*to_jax([t.detach() for t in leaves]))
    for f, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(f, e.numpy(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["ewald_summation", "particle_mesh_ewald"])
def test_energies_and_gradients_of_ewald_sums_have_torchs_bits(name):
    operator = OPERATORS[name]
    x = SYSTEM.positions.clone().requires_grad_()
    energy = operator.in_torch(x, SYSTEM.charges, SYSTEM.cell)
    (gradient,) = torch.autograd.grad(energy, x)
    arguments = to_jax([SYSTEM.positions, SYSTEM.charges, SYSTEM.cell])
    value, by_x = jax.jit(jax.value_and_grad(operator.in_jax))(*arguments)
    assert float(value) == energy.item() and np.array_equal(by_x, gradient.numpy())


@pytest.mark.parametrize("wrt", [0, 1, (0, 1)])
@pytest.mark.parametrize("name", ["ewald_summation", "particle_mesh_ewald"])
def test_gradients_of_plain_sums_take_no_backward_pass(monkeypatch, name, wrt):
    """Forces and charge gradients come by value, of energies of atoms with one weight for all, too: the same bits."""
    function, options = getattr(electrostatics, name), {"alpha": 0.5, "cutoff": 4.0, **FOLDED[name], **to_jax(NEAR)}
    theirs = getattr(torch_electrostatics, name)
    numbers = wrt if isinstance(wrt, tuple) else (wrt,)
    leaves = [t.clone().requires_grad_(n in numbers) for n, t in enumerate((SYSTEM.positions, SYSTEM.charges))]

    def in_torch(weights):
        energies = theirs(*leaves, SYSTEM.cell, **options | NEAR)
        return [g.numpy() for g in torch.autograd.grad((weights * energies).sum(), [leaves[n] for n in numbers])]

    x, q, cell = to_jax([SYSTEM.positions, SYSTEM.charges, SYSTEM.cell])

    def gradient(scale):
        of_atoms = jax.jit(jax.grad(lambda x, q: jnp.sum(scale * function(x, q, cell, **options)), wrt))(x, q)
        return [np.asarray(g) for g in (of_atoms if isinstance(of_atoms, tuple) else (of_atoms,))]

    with monkeypatch.context() as patch:
        patch.setattr(callback, "_gradients", None)
        found = gradient(-2.5)
    assert all(np.array_equal(f, e) for f, e in zip(found, in_torch(-2.5), strict=True))
    weights = np.linspace(0.5, 1.5, 6)
    for f, e in zip(gradient(weights), in_torch(torch.as_tensor(weights)), strict=True):
        np.testing.assert_allclose(f, e, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", ["ewald_summation", "particle_mesh_ewald"])
def test_repeated_calls_have_torchs_bits(name):
    """Plans of torch's sums run in buffers of JAX, which come and go: another cell now and then, other positions."""
    operator, x = OPERATORS[name], SYSTEM.positions
    evaluate = jax.jit(jax.value_and_grad(operator.in_jax))
    for step in range(10):
        cell = SYSTEM.cell * (1.0 + 0.1 * (step // 5))
        y = x + 0.01 * step
        value, by_x = evaluate(*to_jax([y, SYSTEM.charges, cell]))
        y = y.clone().requires_grad_()
        with engine.off():
            energy = operator.in_torch(y, SYSTEM.charges, cell)
            (gradient,) = torch.autograd.grad(energy, y)
        assert float(value) == energy.item() and np.array_equal(by_x, gradient.numpy())
    plan_of(count=3)  # of two cells, and of any cell


def calls_from_jax(function, *arguments):
    """How often a compiled program calls torch."""
    return jax.jit(function).lower(*arguments).compile().as_text().count("xla_buffer_python_cpu_callback")


def test_an_energy_its_gradient_and_its_hessian_vector_product_take_one_call_each():
    x, q, cell = to_jax([SYSTEM.positions, SYSTEM.charges, SYSTEM.cell])
    v = jnp.ones_like(x)

    def energy(x):
        return OPERATORS["ewald_summation"].in_jax(x, q, cell)

    assert calls_from_jax(energy, x) == 1
    assert calls_from_jax(jax.grad(energy), x) == 1
    assert calls_from_jax(jax.value_and_grad(energy), x) == 1
    assert calls_from_jax(lambda x: jax.jvp(jax.grad(energy), (x,), (v,))[1], x) == 1
    assert calls_from_jax(jax.vmap(jax.value_and_grad(energy)), jnp.stack([x, x])) == 1


@pytest.mark.parametrize("name", ["ewald_summation", "particle_mesh_ewald"])
def test_energies_of_a_batch_and_their_gradients_take_one_call(name):
    system = batch(triclinic(4, seed=2), triclinic(6, seed=3))
    function, theirs = getattr(electrostatics, name), getattr(torch_electrostatics, name)
    x, q, cell, systems = to_jax(list(system))
    w = jnp.array([1.0, -2.0])
    options = {"energy_reduction": "system", "alpha": 0.5, "cutoff": 4.0}
    options |= {"mesh_dimensions": (9, 9, 9)} if "mesh" in name else {"miller_bounds": (2, 2, 2)}

    def energies(x, q, cell):
        return function(x, q, cell, batch_idx=systems, **options)

    leaves = [t.clone().requires_grad_() for t in system[:3]]
    found = jax.jit(jax.grad(lambda *a: energies(*a) @ w, (0, 1, 2)))(x, q, cell)
    expected = torch.autograd.grad(
        (theirs(*leaves, batch_idx=system.batch_idx, **options) * torch.tensor([1.0, -2.0])).sum(), leaves
    )
    for f, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(f, e.numpy(), rtol=1e-11, atol=1e-12)
    assert calls_from_jax(jax.value_and_grad(lambda x: energies(x, q, cell) @ w), x) == 1
    tangent = jax.jvp(lambda x: energies(x, q, cell), (x,), (jnp.cos(x),))[1]
    e = theirs(*leaves, batch_idx=system.batch_idx, **options)
    by_x = [torch.autograd.grad(one, leaves[0], retain_graph=True)[0] for one in e]
    expected = [(g * torch.cos(system.positions)).sum().item() for g in by_x]
    np.testing.assert_allclose(tangent, expected, rtol=1e-11)


def test_tangents_may_be_numbers_of_python():
    def energy(sigma):
        return pair.lennard_jones(3.0)(to_jax(SYSTEM.positions), sigma=sigma, epsilon=1.0).sum()

    for function in (energy, jax.grad(energy)):
        assert jax.jvp(function, (1.5,), (2.0,))[1] == jax.jvp(function, (jnp.array(1.5),), (jnp.array(2.0),))[1]


def test_gradients_by_the_cell_of_what_is_divided_by_squares_of_wave_vectors():
    cell = SYSTEM.cell[0].clone().requires_grad_()
    squares = torch_electrostatics.generate_k_squared_pme(cell, (3, 4, 5))
    (expected,) = torch.autograd.grad((1.0 / squares).sum(), cell)
    found = jax.jit(jax.grad(lambda c: (1.0 / electrostatics.generate_k_squared_pme(c, (3, 4, 5))).sum()))
    np.testing.assert_allclose(found(to_jax(SYSTEM.cell[0])), expected.numpy(), rtol=1e-12)
    assert torch.isfinite(expected).all()


FOLDED = {
    "ewald_summation": {"alpha": 0.5, "miller_bounds": (2, 3, 2)},
    "particle_mesh_ewald": {"alpha": 0.5, "mesh_dimensions": (8, 8, 9)},
    "ewald_real_space": {"alpha": 0.5},
    "ewald_reciprocal_space": {"alpha": 0.5, "k_vectors": None, "miller_bounds": (2, 3, 2)},
}


@pytest.mark.parametrize("given", ["matrix", "cutoff"])
@pytest.mark.parametrize("name", FOLDED)
def test_slices_of_vmap_become_systems_of_one_batch(name, given):
    if "reciprocal" in name and given == "matrix":
        pytest.skip("it takes no neighbors")
    options = dict(FOLDED[name])
    systems = [triclinic(6, charged=True, seed=seed) for seed in (1, 2, 3)]
    x, q, cell = (jnp.stack([jnp.asarray(getattr(s, part).numpy()) for s in systems]) for part in SYSTEM._fields[:3])
    alone, batches = getattr(torch_electrostatics, name), []

    @functools.wraps(alone)
    def spied(*args, **kwargs):
        batches.append(kwargs.get("batch_idx"))
        return alone(*args, **kwargs)

    part = {"ewald_real_space": "real", "ewald_reciprocal_space": "waves"}.get(name, "both")
    ours = sum_operator(spied, part)

    def results(x, q, cell):
        near = {}
        if given == "matrix":
            matrix, _, shifts = neighbors.neighbor_list(x, 3.0, cell, max_neighbors=70)
            near = {"neighbor_matrix": matrix, "neighbor_matrix_shifts": shifts}
        elif "reciprocal" not in name:
            near = {"cutoff": 3.0}
        energy = ours(x, q, cell, **near, **options, energy_reduction="system")
        parts = ours(x, q, cell, **near, **options, compute_forces=True, compute_virial=True)
        return energy[0], parts

    def gradient(x, q, cell):
        return jax.grad(lambda *a: results(*a)[0], (0, 1, 2))(x, q, cell)

    batches.clear()
    found = jax.jit(jax.vmap(lambda *a: (*results(*a), gradient(*a))))(x, q, cell)
    per_slice = [jax.jit(lambda *a: (*results(*a), gradient(*a)))(x[i], q[i], cell[i]) for i in range(3)]
    for f, e in zip(
        jax.tree.leaves(found), jax.tree.leaves(jax.tree.map(lambda *s: jnp.stack(s), *per_slice)), strict=True
    ):
        np.testing.assert_allclose(f, e, rtol=1e-13, atol=1e-13)
    of_batches = [b for b in batches if isinstance(b, torch.Tensor) and len(b) == 18]
    assert 2 <= len(of_batches) <= 3, "each of the three results takes one call, two of them may be one"


@pytest.mark.parametrize("name", ["lennard_jones", "dsf_coulomb"])
def test_energies_of_three_systems_with_one_cell(name):
    """The cell then has as many rows as there are systems, but they are not theirs."""
    cell = SYSTEM.cell
    systems = torch.tensor([0, 0, 1, 1, 2, 2], dtype=torch.int32)
    x = SYSTEM.positions[[0, 1, 0, 1, 0, 1]] * torch.tensor([1.0, 1.0, 0.9, 0.9, 0.8, 0.8]).double()[:, None]
    matrix, _, shifts = torch_neighbors.neighbor_list(x, 3.5, cell.expand(3, 3, 3), batch_idx=systems)
    given = {"neighbor_matrix": matrix, "neighbor_matrix_shifts": shifts, "batch_idx": systems, "num_systems": 3}
    w = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)

    def energy(in_pair, in_electrostatics, given, w, x, cell):
        if name == "dsf_coulomb":
            q = 0.0 * x[:, 0] + 1.0
            found = in_electrostatics.dsf_coulomb(x, q, 3.5, 0.2, cell, compute_forces=False, **given)[0]
        else:
            potential = in_pair.lennard_jones(3.5)
            found = potential(x, cell, sigma=1.0, epsilon=1.0, energy_reduction="system", **given)
        return (found * w).sum()

    leaves = [x.clone().requires_grad_(), cell.clone().requires_grad_()]
    expected = torch.autograd.grad(energy(torch_pair, torch_electrostatics, given, w, *leaves), leaves)
    ours = functools.partial(energy, pair, electrostatics, to_jax(given), to_jax(w))
    found = jax.jit(jax.grad(ours, (0, 1)))(*to_jax([x, cell]))
    for f, e in zip(found, expected, strict=True):
        assert e.abs().max() > 1e-3
        np.testing.assert_allclose(f, e.numpy(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", ["PairPotential", "dsf_coulomb", "dftd3"])
def test_a_batch_of_one_system_has_one_cell(name):
    """Its cell says how many systems there are. If the values of ``batch_idx`` tell of more, that is an error."""
    x, q, cells = to_jax((SYSTEM.positions, SYSTEM.charges, SYSTEM.cell))
    cell = cells[0]
    matrix, _, shifts = neighbors.neighbor_list(x, 3.5, cell)
    near = {"neighbor_matrix": matrix, "neighbor_matrix_shifts": shifts}
    calls = {
        "PairPotential": lambda x, cell, **given: pair.lennard_jones(3.5)(
            x, cell, sigma=1.2, epsilon=0.5, energy_reduction="system", **near, **given
        ),
        "dsf_coulomb": lambda x, cell, **given: electrostatics.dsf_coulomb(x, q, 3.5, 0.2, cell, **near, **given)[0],
        "dftd3": lambda x, cell, **given: dispersion.dftd3(
            x, to_jax(NUMBERS), 0.4, 4.0, 1.9, d3_params=JAX_TABLES, cell=cell, **near, **given
        )[0],
    }
    call = jax.jit(calls[name])
    np.testing.assert_array_equal(call(x, cells, batch_idx=jnp.zeros(6, jnp.int32)), call(x, cell))
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=r"\(2,\), but \(1,\) was declared"):
        jax.block_until_ready(call(x, cells, batch_idx=jnp.arange(6, dtype=jnp.int32) // 3))


def test_one_parameter_of_all_atoms_of_a_batch_differentiates():
    systems = to_jax(torch.tensor([0, 0, 0, 1, 1, 1], dtype=torch.int32))
    x, cell = to_jax([SYSTEM.positions, SYSTEM.cell.expand(2, 3, 3).contiguous()])
    matrix, _, shifts = neighbors.neighbor_list(x, 3.5, cell, batch_idx=systems)
    given = {"neighbor_matrix": matrix, "neighbor_matrix_shifts": shifts, "batch_idx": systems}

    def energy(sigma):
        energies = pair.lennard_jones(3.5)(x, cell, sigma=sigma, epsilon=1.0, energy_reduction="system", **given)
        return energies @ jnp.array([1.0, -2.0])

    one, of_each = jax.jit(jax.grad(energy))(1.2), jax.jit(jax.grad(energy))(jnp.full(6, 1.2))
    np.testing.assert_allclose(one, of_each.sum(), rtol=1e-12)


def test_a_batch_without_atoms_has_gradients():
    cells, systems = jnp.stack([jnp.eye(3), 2.0 * jnp.eye(3)]), jnp.zeros(0, jnp.int32)

    def energies(x, q, cells):
        options = {"k_cutoff": 3.0, "cutoff": 2.0, "energy_reduction": "system"}
        return electrostatics.ewald_summation(x, q, cells, 0.5, batch_idx=systems, **options)

    found = jax.jit(jax.jacrev(energies, (0, 1, 2)))(jnp.zeros((0, 3)), jnp.zeros(0), cells)
    assert [slope.shape for slope in found] == [(2, 0, 3), (2, 0), (2, 2, 3, 3)]
    assert not found[2].any()


def test_vmap_over_nothing_gives_nothing():
    x, q, cell = (jnp.zeros((0, *t.shape)) for t in SYSTEM[:3])
    options = {"alpha": 0.5, "miller_bounds": (2, 2, 2), "cutoff": 3.0}
    found = jax.jit(jax.vmap(lambda *a: electrostatics.ewald_summation(*a, **options, compute_forces=True)))(x, q, cell)
    assert [f.shape for f in found] == [(0, 6), (0, 6, 3)]
    charges, lattice = to_jax([SYSTEM.charges, SYSTEM.cell])
    total = jax.jit(lambda q: jnp.sum(jax.vmap(lambda x: electrostatics.ewald_summation(x, q, lattice, **options))(x)))
    np.testing.assert_array_equal(jax.grad(total)(charges), np.zeros(6))


def test_slices_without_atoms_and_with_atoms_that_do_not_exist():
    options = {"alpha": 0.5, "miller_bounds": (2, 2, 2), "energy_reduction": "system"}

    def energy(x, q, cell):
        matrix, _, shifts = neighbors.neighbor_list(x, 3.0, cell, max_neighbors=5, fill_value=-1)
        near = {"neighbor_matrix": matrix, "neighbor_matrix_shifts": shifts}
        return electrostatics.ewald_summation(x, q, cell, **near, **options)[0]

    cell = to_jax(SYSTEM.cell)
    assert (jax.vmap(lambda x: energy(x, jnp.zeros(0), cell))(jnp.zeros((2, 0, 3))) == 0.0).all()
    # what pads the matrix is not said, so it names an atom before the first one, not one of another slice
    x, q = to_jax([SYSTEM.positions, SYSTEM.charges])
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="holds an atom that does not exist"):
        jax.block_until_ready(jax.vmap(lambda x: energy(x, q, 9.0 * cell))(jnp.stack([9.0 * x, 9.0 * x])))


@pytest.mark.parametrize("name", ["ewald_summation", "particle_mesh_ewald"])
def test_channels_of_charges_differentiate(name):
    q = torch.stack([SYSTEM.charges, SYSTEM.charges.flip(0) ** 2], 1)
    options = {"energy_reduction": "system", "alpha": 0.6, "cutoff": 3.5}
    options |= {"mesh_dimensions": (8, 8, 8)} if "mesh" in name else {"miller_bounds": (2, 2, 2)}
    weights = torch.tensor([1.0, -2.0], dtype=torch.float64)
    leaves = [t.clone().requires_grad_() for t in (SYSTEM.positions, q, SYSTEM.cell)]
    energies = getattr(torch_electrostatics, name)(*leaves, **options)
    expected = torch.autograd.grad((energies * weights).sum(), leaves)
    ours = functools.partial(getattr(electrostatics, name), **options)
    arrays = to_jax([SYSTEM.positions, q, SYSTEM.cell])
    found = jax.jit(jax.grad(lambda *a: jnp.sum(ours(*a) * to_jax(weights)), (0, 1, 2)))(*arrays)
    for f, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(f, e.numpy(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["ewald_reciprocal_space", "pme_reciprocal_space"])
def test_dipoles_and_quadrupoles_differentiate(name):
    n, rng = len(SYSTEM.charges), np.random.default_rng(3)
    quadrupoles = rng.normal(size=(n, 3, 3))
    quadrupoles = quadrupoles + quadrupoles.swapaxes(1, 2)
    quadrupoles -= np.trace(quadrupoles, axis1=1, axis2=2)[:, None, None] * np.eye(3) / 3.0
    sources = [torch.as_tensor(rng.normal(size=(n, 3))), torch.as_tensor(quadrupoles)]
    options = {"energy_reduction": "system", "alpha": 0.6, "widths": 0.3}
    options |= {"mesh_dimensions": (8, 8, 8)} if "pme" in name else {"k_vectors": None, "miller_bounds": (2, 2, 2)}
    asked = {"compute_dipole_gradients": True, "compute_quadrupole_gradients": True, "compute_virial": True}
    arrays = [SYSTEM.positions, SYSTEM.charges, SYSTEM.cell, *sources]

    def call(function, x, q, cell, dipoles, quadrupoles, **others):
        return function(x, q, cell=cell, dipoles=dipoles, quadrupoles=quadrupoles, **options, **others)

    theirs, ours = (getattr(module, name) for module in (torch_electrostatics, electrostatics))
    leaves = [t.clone().requires_grad_() for t in arrays]
    expected = torch.autograd.grad(call(theirs, *leaves).sum(), leaves)
    found = jax.jit(jax.grad(lambda *a: jnp.sum(call(ours, *a)), tuple(range(5))))(*to_jax(arrays))
    for f, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(f, e.numpy(), rtol=1e-12, atol=1e-12)
    expected = call(theirs, *arrays, **asked)
    for f, e in zip(jax.jit(functools.partial(call, ours, **asked))(*to_jax(arrays)), expected, strict=True):
        np.testing.assert_array_equal(f, e.numpy())


def test_a_choice_by_values_is_made_for_each_slice():
    x, q, cell = to_jax([SYSTEM.positions, SYSTEM.charges, SYSTEM.cell])
    cells = jnp.stack([cell, 1.7 * cell])

    def energy(cell):
        return electrostatics.ewald_summation(x, q, cell, energy_reduction="system")[0]

    np.testing.assert_array_equal(jax.jit(jax.vmap(energy))(cells), [jax.jit(energy)(c) for c in cells])


@pytest.mark.parametrize("name", ["ewald_summation", "particle_mesh_ewald", "ewald_real_space"])
@pytest.mark.parametrize(
    "parts", [{"compute_forces": True}, {"compute_charge_gradients": True, "compute_virial": True}], ids=["F", "qV"]
)
def test_further_results_come_in_torchs_order(name, parts):
    options = {"alpha": 0.5, **parts, **({"accuracy": 1e-4} if "real" not in name else {})}
    expected = getattr(torch_electrostatics, name)(*SYSTEM[:3], **NEAR, **options)
    ours = functools.partial(getattr(electrostatics, name), **options)
    found = jax.jit(ours)(*to_jax(list(SYSTEM[:3])), **to_jax(NEAR))
    for f, e in zip(found, expected, strict=True):
        np.testing.assert_array_equal(f, e.numpy())


def test_pair_potentials_give_gradients_by_parameters_and_virial():
    options = {"compute_forces": True, "compute_gradients": ("sigma", "k"), "compute_virial": True}
    text = "k*(sigma1+sigma2)*exp(-r)"
    theirs = torch_pair.PairPotential(text, ("sigma",), ("k",), cutoff=3.5)
    ours = pair.PairPotential(text, ("sigma",), ("k",), cutoff=3.5)
    given = {**NEAR, "sigma": SYSTEM.charges, "k": torch.tensor(0.7, dtype=torch.float64)}
    expected = theirs(SYSTEM.positions, SYSTEM.cell, **given, **options)
    found = jax.jit(lambda x, cell, given: ours(x, cell, **given, **options))(
        *to_jax([SYSTEM.positions, SYSTEM.cell]), to_jax(given)
    )
    assert len(found) == len(expected) == 5
    for f, e in zip(found, expected, strict=True):
        np.testing.assert_array_equal(f, e.numpy())


def test_a_pair_potential_without_a_cutoff_sums_all_pairs_of_molecules():
    energies = jax.jit(lambda x, q, *cell: pair.coulomb()(x, *cell, q=q))
    for scale in (1.0, 9.0):
        x, q = scale * SYSTEM.positions, SYSTEM.charges
        for cell in ([], [torch.zeros(3, 3, dtype=torch.float64)]):
            np.testing.assert_array_equal(energies(*to_jax([x, q, *cell])), torch_pair.coulomb()(x, q=q).numpy())


def test_equal_pair_potentials_are_compiled_once_outside_of_jit(monkeypatch):
    """A potential may be made in each call. What it is made of, also what is changed later, decides."""
    compiled = []
    original = primitive._compiled
    monkeypatch.setattr(primitive, "_compiled", lambda request: compiled.append(request) or original(request))
    x, cell, near = to_jax((SYSTEM.positions, SYSTEM.cell, NEAR))

    def energies(potential):
        return potential(x, cell, **near, sigma=1.0, epsilon=1.0)

    first = energies(pair.lennard_jones(3.3))
    np.testing.assert_array_equal(energies(pair.lennard_jones(3.3)), first)
    assert len(compiled) == 1
    changed = pair.lennard_jones(3.3)
    changed.potential.cutoff = 2.9
    for other in (pair.lennard_jones(3.3, r_switch=2.5), changed):
        assert not np.array_equal(energies(other), first)
    assert len(compiled) == 3


def test_a_number_among_tables_of_species_has_gradients_by_table():
    potential = pair.buckingham(4.0, tables=True)
    x, species = to_jax(SYSTEM.positions), jnp.arange(len(SYSTEM.positions)) % 2
    call = functools.partial(potential, x, A=10.0 * jnp.ones((2, 2)), C=0.0, species=species, compute_gradients="rho")
    full = call(rho=0.5 * jnp.ones((2, 2)))
    for found, expected in zip(jax.jit(lambda rho: call(rho=rho))(0.5), full, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-13)


@pytest.mark.parametrize("derivatives", [0, 2])
def test_potentials_at_atoms_are_those_of_torch(derivatives):
    rng = np.random.default_rng(0)
    positions, charges, cell = 5.0 * rng.random((6, 3)), rng.normal(size=(6, 2)), 6.0 * np.eye(3)
    options = {"alpha": 1.0, "k_cutoff": 8.0, "cutoff": 2.9, "derivatives": derivatives, "receiver_widths": [0.0, 0.1]}

    def of_jax(x):
        return electrostatics.electrostatic_potential(x, charges, cell, **options)

    x = torch.tensor(positions, requires_grad=True)
    expected = torch_electrostatics.electrostatic_potential(x, torch.tensor(charges), torch.tensor(cell), **options)
    found = jax.jit(of_jax)(positions)
    assert [value is None for value in found] == [value is None for value in expected]
    for a, b in zip(found[: derivatives + 1], expected):
        np.testing.assert_allclose(a, b.detach(), rtol=1e-12)
    slope = jax.grad(lambda x: (of_jax(x)[derivatives] ** 2).sum())(positions)
    (of_torch,) = torch.autograd.grad(expected[derivatives].square().sum(), x)
    np.testing.assert_allclose(slope, of_torch, rtol=1e-11, atol=1e-13)
