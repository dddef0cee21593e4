"""Neighbor lists in JAX: exact outside of jit; of a declared size inside, where overflow stays visible."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemiops.jax import callback, neighbors
from nvalchemiops.jax.interactions.electrostatics import dsf_coulomb, ewald_summation
from nvalchemiops.jax.interactions.pair import lennard_jones
from nvalchemiops.notices import NeighborListWarning
from nvalchemiops.torch import neighbors as in_torch
from tests.jax.precision import double_precision  # noqa: F401
from tests.support.systems import batch, triclinic

SYSTEM = triclinic(20, seed=4)
X, CELL = (jnp.asarray(t.numpy(), jnp.float32) for t in (SYSTEM.positions, SYSTEM.cell))
PBC = jnp.array([True, False, True])
TORCH = [torch.as_tensor(np.array(a)) for a in (X, CELL, PBC)]


def same(found, expected):
    for f, e in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(f), e.numpy())


FORMS = {
    "matrix": {},
    "list": {"return_neighbor_list": True},
    "half": {"half_fill": True, "fill_value": -1},
    "distances": {"return_distances": True, "return_vectors": True},
    "list with distances": {"return_neighbor_list": True, "return_distances": True},
    "rows": {"target_indices": torch.tensor([3, 7, 1], dtype=torch.int32)},
    "two": {"cutoff2": 4.0},
    "naive": {"method": "naive"},
}


def for_jax(options):
    return {k: jnp.asarray(v.numpy()) if isinstance(v, torch.Tensor) else v for k, v in options.items()}


@pytest.mark.parametrize("form", FORMS)
def test_lists_are_those_of_torch(form):
    options = FORMS[form]
    same(
        neighbors.neighbor_list(X, 3.0, CELL, PBC, **for_jax(options)),
        in_torch.neighbor_list(TORCH[0], 3.0, *TORCH[1:], **options),
    )


@pytest.mark.parametrize("form", [name for name in FORMS if "list" not in name])
def test_matrices_of_a_declared_width_are_those_of_torch_under_jit(form):
    options = {**FORMS[form], "max_neighbors": 90}
    options |= {"max_neighbors2": 90} if form == "two" else {}
    found = jax.jit(lambda x, cell: neighbors.neighbor_list(x, 3.0, cell, PBC, **for_jax(options)))(X, CELL)
    same(found, in_torch.neighbor_list(TORCH[0], 3.0, *TORCH[1:], **options))


def test_axes_that_are_not_periodic_need_no_cell_under_jit():
    """Which of them are is known only when the program runs."""
    search = jax.jit(lambda pbc: neighbors.neighbor_list(X, 3.0, pbc=pbc, max_neighbors=8))
    expected = neighbors.neighbor_list(X, 3.0, max_neighbors=8)
    assert all(map(np.array_equal, search(jnp.zeros(3, bool)), expected))


def test_matrices_are_written_into_memory_of_jax(monkeypatch):
    """They may be most of the memory of a step, so a copy of them is not free."""
    copied = []
    monkeypatch.setattr(callback, "_copy", lambda target, result: copied.append(tuple(target.shape)))
    search = jax.jit(lambda x, width: neighbors.neighbor_list(x, 3.0, CELL, PBC, max_neighbors=width), static_argnums=1)
    for width in (90, 4):
        found = search(X, width)
        same(found, in_torch.neighbor_list(TORCH[0], 3.0, *TORCH[1:], max_neighbors=width, check=False))
    assert not copied


def test_lists_of_a_declared_capacity_begin_with_those_of_torch():
    options = {"return_neighbor_list": True, "return_vectors": True}
    exact = in_torch.neighbor_list(TORCH[0], 3.0, *TORCH[1:], **options)
    n_pairs = exact[0].shape[1]
    for room in (n_pairs + 7, n_pairs, n_pairs - 5):
        pairs, pointers, shifts, vectors, counts, too_many = jax.jit(
            lambda x, room=room: neighbors.neighbor_list(x, 3.0, CELL, PBC, coo_capacity=room, **options)
        )(X)
        n = min(room, n_pairs)
        assert pairs.shape == (2, room) and bool(too_many) == (room < n_pairs)
        same([pairs[:, :n], shifts[:n], vectors[:n]], [exact[0][:, :n], exact[2][:n], exact[3][:n]])
        np.testing.assert_array_equal(counts, exact[1].diff().numpy())
        assert (pairs[:, n:] == len(X)).all() and int(pointers[-1]) == n


def test_a_capacity_is_that_of_a_list_of_pairs():
    with pytest.raises(ValueError, match="return_neighbor_list=True"):
        neighbors.neighbor_list(X, 3.0, CELL, coo_capacity=9, max_neighbors=9)
    with pytest.raises(ValueError, match="must not be negative"):
        jax.make_jaxpr(lambda x: neighbors.neighbor_list(x, 3.0, return_neighbor_list=True, coo_capacity=-1))(X)
    for capacity, others in (((9, 9), {}), ((9,), {"cutoff2": 4.0}), ((), {})):
        for function in (neighbors.neighbor_list, neighbors.prepare_neighbor_list):
            with pytest.raises(ValueError, match="`coo_capacity` must be one int, or one for each cutoff"):
                function(X, 3.0, CELL, return_neighbor_list=True, coo_capacity=capacity, **others)


def test_a_width_that_is_given_for_one_of_two_lists_is_kept():
    state = neighbors.prepare_neighbor_list(X, 3.0, CELL, cutoff2=2.0, max_neighbors1=250)
    assert state.sizes[0] == 250 > state.sizes[1] > 0


def test_operators_take_lists_of_a_declared_capacity():
    """These end with slots of no atom, which no operator may count."""
    near = {"cutoff": 3.0, "cell": CELL.astype(float), "return_neighbor_list": True}
    x, cell, q = X.astype(float), near["cell"], jnp.cos(jnp.arange(20.0))

    def energies(x, with_pointers=True, **room):
        pairs, pointers, shifts = neighbors.neighbor_list(x, **near, **room)[:3]
        pointers = pointers if with_pointers else None
        given = {"neighbor_list": pairs, "neighbor_ptr": pointers, "neighbor_shifts": shifts}
        return (
            ewald_summation(x, q, cell, 0.5, k_cutoff=2.0, energy_reduction="system", **given)[0],
            lennard_jones(3.0)(x, cell, sigma=1.0, epsilon=1.0, energy_reduction="system", **given)[0],
            dsf_coulomb(x, q, 3.0, 0.2, cell, neighbor_list=pairs, neighbor_ptr=pointers, unit_shifts=shifts)[0][0],
        )

    n_pairs = neighbors.neighbor_list(x, **near)[0].shape[1]
    for room, more in ((n_pairs + 9, {}), (n_pairs, {}), (n_pairs + 9, {"fill_value": 0})):  # or of an atom
        found = jax.jit(lambda x, room=room, more=more: energies(x, coo_capacity=room, **more))(x)
        np.testing.assert_array_equal(found, energies(x))
        found = jax.jit(lambda x, room=room: energies(x, False, coo_capacity=room))(x)
        np.testing.assert_array_equal(found, energies(x))
    gradient = jax.jit(jax.grad(lambda x: sum(energies(x, coo_capacity=n_pairs + 9))))(x)
    assert jnp.isfinite(gradient).all() and jnp.abs(gradient).max() > 0.1
    pairs, pointers, shifts = neighbors.neighbor_list(x, **near)
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="`neighbor_ptr` must fit"):
        ewald_summation(
            x, q, cell, 0.5, k_cutoff=2.0, neighbor_list=pairs, neighbor_ptr=pointers.clip(0, 3), neighbor_shifts=shifts
        )


def test_lists_of_systems_in_a_batch():
    system = batch(triclinic(5, seed=1), triclinic(9, seed=2))
    x, cell, systems = (jnp.asarray(t.numpy()) for t in (system.positions, system.cell, system.batch_idx))
    order = jnp.argsort(systems, stable=True)
    x, systems = x[order], systems[order]
    given = [torch.as_tensor(np.array(a)) for a in (x, cell, systems)]
    expected = in_torch.neighbor_list(given[0], 3.0, given[1], batch_idx=given[2])
    same(neighbors.neighbor_list(x, 3.0, cell, batch_idx=systems), expected)
    pbc = jnp.ones((2, 3), bool)
    found = neighbors.batch_naive_neighbor_list(x, 3.0, systems, None, pbc, cell)
    same(found, in_torch.batch_naive_neighbor_list(given[0], 3.0, given[2], None, torch.ones(2, 3).bool(), given[1]))
    expected = in_torch.batch_cell_list(given[0], 3.0, given[1], torch.ones(2, 3).bool(), given[2])
    same(neighbors.batch_cell_list(x, 3.0, cell, pbc, systems), expected)


def test_systems_in_any_order_and_systems_that_do_not_exist():
    """In `jit` an atom of no system has no neighbors, and a count that says so; elsewhere it is an error."""
    x = jnp.array([[0.0, 0, 0], [0.5, 0, 0], [0.6, 0, 0], [0.8, 0, 0]])
    cell = jnp.stack([3 * jnp.eye(3)] * 2)

    def count(idx, cell):
        return neighbors.neighbor_list(x, 1.0, cell, batch_idx=idx, max_neighbors=4)[1]

    lost = 2**31 - 1
    for idx, counts in (([0, 0, 1, 1], [1] * 4), ([1, 0, 0, 0], [0, 2, 2, 2]), ([1, 0, 1, 0], [1] * 4)):
        for cells in (cell, None):
            assert count(jnp.array(idx), cells).tolist() == counts
            assert jax.jit(count)(jnp.array(idx), cells).tolist() == counts
    for idx, counts in (([0, 0, 2, 2], [1, 1, lost, lost]), ([0, 0, -1, 0], [2, 2, lost, 2])):
        with pytest.raises(ValueError, match="`batch_idx` must hold numbers of systems"):
            count(jnp.array(idx), cell)
        assert jax.jit(count)(jnp.array(idx), cell).tolist() == counts
        state = neighbors.prepare_neighbor_list(x, 1.0, cell, batch_idx=jnp.array([0, 0, 1, 1]), max_neighbors=4)
        state = jax.jit(lambda i, s: neighbors.neighbor_list(x, batch_idx=i, state=s)[1])(jnp.array(idx), state)
        with pytest.raises(ValueError, match="`batch_idx` named a system that does not exist"):
            neighbors.check_neighbor_list_state(state)


@pytest.mark.filterwarnings("error")
def test_a_cutoff_may_be_traced_and_has_no_part_in_derivatives():
    """Distances are those of a list that stays: a small change of the cutoff lets them be."""

    def total(cutoff, x):
        return neighbors.neighbor_list(x, cutoff, CELL, max_neighbors=60, return_distances=True)[3].sum()

    by_cutoff, by_x = jax.jit(jax.grad(total, (0, 1)))(jnp.float32(3.0), X)
    assert by_cutoff == 0 and jnp.abs(by_x).max() > 0.1
    assert jax.jit(jax.grad(total))(jnp.float32(3.0), X) == 0


@pytest.mark.parametrize("search", [neighbors.neighbor_list, neighbors.cell_list, neighbors.naive_neighbor_list])
def test_room_grows_outside_of_jit_and_inside_counts_tell(search):
    exact = [torch.as_tensor(np.array(a)) for a in search(X, 3.0, CELL, PBC)]
    most = int(exact[1].max())
    with pytest.warns(NeighborListWarning, match=f"`max_neighbors` = 2, but an atom has {most} neighbors") as said:
        matrix, counts, shifts = search(X, 3.0, CELL, PBC, max_neighbors=2)
    assert len(said) == 1
    same([matrix[:, :most], counts, shifts[:, :most]], [exact[0][:, :most], exact[1], exact[2][:, :most]])
    matrix, counts, _ = jax.jit(lambda x: search(x, 3.0, CELL, PBC, max_neighbors=2))(X)
    assert matrix.shape == (20, 2)
    np.testing.assert_array_equal(counts, exact[1].numpy())


@pytest.mark.parametrize("options", [{}, {"cutoff2": 4.0}, {"return_vectors": True}])
def test_capacity_grows_outside_of_jit(options):
    options |= {"return_neighbor_list": True}
    exact = in_torch.neighbor_list(TORCH[0], 3.0, *TORCH[1:], **options)
    n_lists = 2 if "cutoff2" in options else 1
    with pytest.warns(NeighborListWarning, match="`coo_capacity` = 5, but there are") as said:
        found = neighbors.neighbor_list(X, 3.0, CELL, PBC, coo_capacity=5, **options)
    assert len(said) == n_lists
    for number in range(n_lists):
        of_torch = exact[number * len(exact) // n_lists : (number + 1) * len(exact) // n_lists]
        pairs, *others, counts, missing = found[number * len(found) // n_lists : (number + 1) * len(found) // n_lists]
        n = of_torch[0].shape[1]
        same([pairs[:, :n], others[0], *(a[:n] for a in others[1:])], of_torch)
        assert not missing and (pairs[:, n:] == 20).all() and int(others[0][-1]) == n == int(counts.sum())
    wide = neighbors.neighbor_list(X, 3.0, CELL, PBC, coo_capacity=900, **options)
    assert wide[0].shape == (2, 900)  # as asked for: all fits


def test_rows_that_are_kept_are_whole_in_a_wider_matrix():
    x, systems = jnp.concatenate([X, X]), jnp.repeat(jnp.arange(2, dtype=jnp.int32), 20)
    cells = jnp.concatenate([CELL, CELL])
    before = neighbors.neighbor_list(x, 3.0, cells, batch_idx=systems)
    names = ("neighbor_matrix", "num_neighbors", "neighbor_matrix_shifts")
    x, cells = x.at[20:].mul(0.6), cells.at[1].mul(0.6)
    with pytest.warns(NeighborListWarning):
        found = neighbors.neighbor_list(
            0.9 * x, 3.0, cells, batch_idx=systems, rebuild_flags=jnp.array([False, True]), **dict(zip(names, before))
        )
    fresh = neighbors.neighbor_list(0.9 * x, 3.0, cells, batch_idx=systems)
    n, most = before[0].shape[1], int(fresh[1][20:].max())
    assert most > n and found[0].shape[1] >= most
    for kept, new, old in zip(found, fresh, before, strict=True):
        columns = (slice(None), slice(0, most)) if kept.ndim > 1 else (slice(None),)
        np.testing.assert_array_equal(kept[20:][columns], new[20:][columns])
        np.testing.assert_array_equal(kept[:20, :n] if kept.ndim > 1 else kept[:20], old[:20])


def test_an_atom_that_is_nowhere_has_a_count_that_is_no_number_of_neighbors():
    x = X.at[4, 1].set(jnp.nan)
    counts = jax.jit(lambda x: neighbors.neighbor_list(x, 3.0, CELL, PBC, max_neighbors=90))(x)[1]
    assert counts[4] == 2**31 - 1
    with pytest.raises(ValueError, match="positions"):
        neighbors.neighbor_list(x, 3.0, CELL, PBC)


@pytest.mark.parametrize(("options", "name"), [({}, "max_neighbors"), ({"return_neighbor_list": True}, "coo_capacity")])
def test_sizes_are_asked_for_when_a_function_is_traced(options, name):
    with pytest.raises(ValueError, match=f"`{name}` is needed under jit"):
        jax.make_jaxpr(lambda x: neighbors.neighbor_list(x, 3.0, CELL, PBC, **options))(X)


def test_distances_differentiate_like_those_of_torch():
    def energy(x, cell):
        distances = neighbors.neighbor_list(x, 3.0, cell, PBC, max_neighbors=90, return_distances=True)[3]
        return jnp.sum(distances**3)

    with jax.enable_x64(True):
        arrays = [jnp.asarray(t.numpy()) for t in (SYSTEM.positions, SYSTEM.cell)]
        found = jax.jit(jax.grad(energy, (0, 1)))(*arrays)
    leaves = [t.clone().requires_grad_() for t in (SYSTEM.positions, SYSTEM.cell)]
    distances = in_torch.neighbor_list(leaves[0], 3.0, leaves[1], TORCH[2], return_distances=True)[3]
    for f, e in zip(found, torch.autograd.grad((distances**3).sum(), leaves), strict=True):
        np.testing.assert_allclose(f, e.numpy(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cutoff", [0.0, 0.25, 3.0])
def test_estimates_of_bins_fit_each_other(cutoff):
    """The numbers along axes have the total as product, and the radius is the smallest that reaches the cutoff."""
    cells, pbc = np.stack([CELL[0], 20.0 * CELL[0], np.diag([4.0, 5.0, 0.0])]), np.array([[1, 1, 1]] * 2 + [[1, 1, 0]])
    options = {"cutoff": cutoff, "pbc": pbc.astype(bool), "buffer_factor": 1.0}
    total, bins, radius = neighbors.estimate_batch_cell_list_sizes(X, cell=cells, **options)
    assert int(jnp.prod(bins, axis=1).sum()) == total
    heights = 1.0 / np.linalg.norm(np.linalg.inv(cells + np.diag([0.0, 0.0, 1e-30])), axis=1)
    widths = (heights / bins)[pbc == 1]
    reach = np.asarray(radius)[pbc == 1]
    assert (reach * widths >= cutoff * (1 - 1e-6)).all() and ((reach - 1) * widths < cutoff).all()
    alone = neighbors.estimate_cell_list_sizes(X, cells[1], cutoff, pbc[1].astype(bool))
    assert alone[0] == int(1.5 * jnp.prod(bins[1]))
    for one, of_batch in zip(alone[1:], (bins, radius), strict=True):
        np.testing.assert_array_equal(one, of_batch[1])
    with pytest.raises(ValueError, match="`cell` is needed"):
        neighbors.estimate_batch_cell_list_sizes(X)


class TestState:
    def test_a_call_with_a_state_gives_the_list_and_the_next_state(self):
        state = neighbors.prepare_neighbor_list(X, 3.0, CELL, PBC)
        assert not state.initialized.any() and state.valid.all() and state.format == "matrix" and state.cutoff == 3.0
        found, after = jax.jit(lambda x, s: neighbors.neighbor_list(x, state=s))(X, state)
        width = state.neighbor_matrix.shape[1]
        same(found, in_torch.neighbor_list(TORCH[0], 3.0, *TORCH[1:], max_neighbors=width))
        assert after.initialized.all() and after.valid.all()
        np.testing.assert_array_equal(after.neighbor_matrix_shifts, found[2])
        neighbors.check_neighbor_list_state(after)

    def test_overflow_stays_in_it(self):
        state = neighbors.prepare_neighbor_list(X, 3.0, CELL, PBC, max_neighbors=2)
        step = jax.jit(lambda x, s, cell: neighbors.neighbor_list(x, cell=cell, state=s)[1])
        state = step(X * 20, step(X, state, CELL), CELL * 20)
        assert state.num_neighbors.max() <= 2 and not state.valid.any()
        most = int(in_torch.neighbor_list(TORCH[0], 3.0, *TORCH[1:])[1].max())
        with pytest.raises(neighbors.NeighborOverflowError, match=f"system 0 has {most} neighbors"):
            neighbors.check_neighbor_list_state(state)

    @pytest.mark.parametrize("options", [{"cutoff2": 4.0}, {"format": "coo"}, {"return_distances": True}])
    def test_other_forms(self, options):
        state = neighbors.prepare_neighbor_list(X, 3.0, CELL, PBC, **options)
        found, after = jax.jit(lambda x, s: neighbors.neighbor_list(x, state=s))(X, state)
        names = {
            "cutoff2": ["neighbor_matrix1", "num_neighbors1", "neighbor_matrix_shifts1", "neighbor_matrix2"],
            "format": ["neighbor_list", "neighbor_ptr", "neighbor_list_shifts", "num_neighbors"],
            "return_distances": ["neighbor_matrix", "num_neighbors", "neighbor_matrix_shifts", "neighbor_distances"],
        }[next(iter(options))]
        for name, array in zip(names, found, strict=False):
            np.testing.assert_array_equal(getattr(after, name), array)
        assert jax.tree.structure(state) == jax.tree.structure(after) and after.valid.all()

    def test_systems_that_are_not_flagged_keep_their_rows(self):
        x, systems = jnp.concatenate([X, X]), jnp.repeat(jnp.arange(2, dtype=jnp.int32), 20)
        cells = jnp.concatenate([CELL, CELL * 1.1])
        state = neighbors.prepare_neighbor_list(x, 3.0, cells, batch_idx=systems, selective=True, max_neighbors=120)
        step = jax.jit(lambda x, s, flags: neighbors.neighbor_list(x, state=s, rebuild_flags=flags))
        before, state = step(x, state, jnp.array([True, True]))
        after, state = step(x * 1.05, state, jnp.array([False, True]))
        np.testing.assert_array_equal(before[0][:20], after[0][:20])
        assert (before[1][20:] != after[1][20:]).any()
        with pytest.raises(ValueError, match="selective"):
            neighbors.neighbor_list(x, state=state)

    def test_a_system_without_rows_is_searched_whether_flagged_or_not(self):
        state = neighbors.prepare_neighbor_list(X, 3.0, CELL, PBC, selective=True)
        found, after = neighbors.neighbor_list(X, state=state, rebuild_flags=jnp.array([False]))
        same([found[1]], in_torch.neighbor_list(TORCH[0], 3.0, *TORCH[1:])[1:2])
        assert after.initialized.all()

    @pytest.mark.parametrize("options", [{"max_neighbors": 2}, {"format": "coo", "coo_capacity": 5}])
    def test_it_grows_outside_of_jit(self, options):
        """The next state declares what was needed, inside of jit as well."""
        state = neighbors.prepare_neighbor_list(X, 3.0, CELL, PBC, **options)
        with pytest.warns(NeighborListWarning):
            found, state = neighbors.neighbor_list(X, state=state)
        exact = neighbors.neighbor_list(X, 3.0, CELL, PBC, return_neighbor_list="format" in options)
        n = exact[0].shape[1] if "format" in options else int(exact[1].max())
        np.testing.assert_array_equal(found[0][:, :n], exact[0][:, :n])
        assert state.valid.all() and state.sizes[0] == found[0].shape[1] >= n
        again, state = jax.jit(lambda x, s: neighbors.neighbor_list(x, state=s))(X, state)
        for a, b in zip(again, found, strict=True):
            np.testing.assert_array_equal(a, b)
        neighbors.check_neighbor_list_state(state)

    def test_a_position_that_is_no_number_is_no_overflow(self):
        state = neighbors.prepare_neighbor_list(X, 3.0, CELL, PBC)
        state = jax.jit(lambda x, s: neighbors.neighbor_list(x, state=s)[1])(X.at[4, 1].set(jnp.nan), state)
        with pytest.raises(ValueError, match="not finite"):
            neighbors.check_neighbor_list_state(state)

    def test_overflow_is_found_among_states_of_vmap_and_of_pairs(self):
        x, cells = jnp.stack([X, 0.5 * X]), jnp.stack([CELL, 0.5 * CELL])
        width = neighbors.neighbor_list(X, 3.0, CELL, PBC)[0].shape[1]
        prepare = functools.partial(neighbors.prepare_neighbor_list, cutoff=3.0, pbc=PBC)
        states = jax.vmap(lambda x, cell: prepare(x, cell=cell, max_neighbors=width))(x, cells)
        states = jax.vmap(lambda x, s: neighbors.neighbor_list(x, state=s)[1])(x, states)
        with pytest.raises(neighbors.NeighborOverflowError, match="in system 1 has"):
            neighbors.check_neighbor_list_state(states)
        state = prepare(X, cell=CELL, format="coo", coo_capacity=5)
        state = jax.jit(lambda x, s: neighbors.neighbor_list(x, state=s)[1])(X, state)
        with pytest.raises(neighbors.NeighborOverflowError, match="`coo_capacity` = 5 is too small"):
            neighbors.check_neighbor_list_state(state)

    @pytest.mark.parametrize("name", ["max_neighbors", "coo_capacity", "target_indices", "nonsense"])
    def test_an_argument_without_effect_is_an_error(self, name):
        state = neighbors.prepare_neighbor_list(X, 3.0, CELL, PBC)
        with pytest.raises(TypeError, match=f"`{name}`"):
            neighbors.neighbor_list(X, state=state, **{name: 3})

    @pytest.mark.parametrize(
        ("options", "error", "text"),
        [
            ({"max_neighbors": -1}, ValueError, "`max_neighbors` must not be negative"),
            ({"max_neighbors": 4.5}, TypeError, "`max_neighbors` must be an int"),
            ({"nonsense": 1}, TypeError, "nonsense"),
            ({"selective": True, "format": "coo"}, ValueError, "`selective` keeps rows of a matrix"),
        ],
    )
    def test_bad_sizes(self, options, error, text):
        with pytest.raises(error, match=text):
            neighbors.prepare_neighbor_list(X, 3.0, CELL, PBC, **options)

    def test_a_cutoff_that_is_traced_is_named(self):
        with pytest.raises(TypeError, match="`cutoff` must be known"):
            jax.jit(lambda r: neighbors.prepare_neighbor_list(X, r, CELL, max_neighbors=9))(3.0)

    def test_in_a_scan_inside_of_shard_map(self):
        mesh = jax.sharding.Mesh(jax.devices()[:1], "part")

        @functools.partial(jax.shard_map, mesh=mesh, in_specs=jax.P("part"), out_specs=jax.P("part"))
        def most(x):
            def step(carry, _):
                return (0.9 * carry[0], neighbors.neighbor_list(carry[0], state=carry[1])[1]), None

            state = neighbors.prepare_neighbor_list(x, 3.0, CELL, PBC, max_neighbors=90)
            return jax.lax.scan(step, (x, state), None, length=2)[0][1].largest

        counts = [in_torch.neighbor_list(factor * TORCH[0], 3.0, *TORCH[1:])[1].max() for factor in (1.0, 0.9)]
        assert int(jax.jit(most)(X)[0]) == max(counts)

    def test_lists_of_python_are_arrays(self):
        state = neighbors.prepare_neighbor_list(np.asarray(X).tolist(), 3.0, np.asarray(CELL).tolist(), PBC)
        found, _ = neighbors.neighbor_list(np.asarray(X).tolist(), state=state)
        same([found[1]], in_torch.neighbor_list(TORCH[0], 3.0, *TORCH[1:])[1:2])

    @pytest.mark.parametrize(
        ("change", "text"),
        [({"positions": X[:5]}, "positions"), ({"cutoff": 5.0}, "cutoff"), ({"half_fill": True}, "half_fill")],
    )
    def test_what_it_was_not_prepared_for_is_an_error(self, change, text):
        state = neighbors.prepare_neighbor_list(X, 3.0, CELL, PBC)
        with pytest.raises(ValueError, match=f"`{text}`"):
            neighbors.neighbor_list(**{"positions": X, "state": state, **change})
        with pytest.raises(TypeError, match="NeighborListState"):
            neighbors.neighbor_list(X, state=1)


def test_list_sum_and_forces_inside_a_scan_conserve_energy():
    with jax.enable_x64(True):
        n = 3
        ions = jnp.stack(jnp.meshgrid(*[jnp.arange(n + 1.0)] * 3, indexing="ij"), -1).reshape(-1, 3)[: (n + 1) ** 3]
        x = 2.8 * ions + 0.05 * jnp.sin(jnp.arange(ions.size).reshape(ions.shape))
        q = jnp.where(ions.sum(1) % 2 == 0, 1.0, -1.0)
        cell = 2.8 * (n + 1) * jnp.eye(3)[None]
        state = neighbors.prepare_neighbor_list(x, 5.0, cell)

        def energy(x, state):
            (matrix, _, shifts), state = neighbors.neighbor_list(x, state=state)
            options = {"neighbor_matrix": matrix, "neighbor_matrix_shifts": shifts, "alpha": 0.6, "k_cutoff": 4.0}
            coulomb = ewald_summation(x, q, cell, energy_reduction="system", **options)[0]
            r = neighbors.neighbor_list(x, 5.0, cell, max_neighbors=matrix.shape[1], return_distances=True)[3]
            repulsion = jnp.where(r > 0, 300.0 / jnp.where(r > 0, r, 1.0) ** 8 - 300.0 / 5.0**8, 0.0)
            return coulomb + repulsion.sum() / 2, state

        def step(carry, _):
            x, v, f, state = carry
            v = v + 0.01 * f
            x = x + 0.02 * v
            (e, state), g = jax.value_and_grad(energy, has_aux=True)(x, state)
            v = v - 0.01 * g
            return (x, v, -g, state), e + (v**2).sum() / 2

        (_, state), g = jax.value_and_grad(energy, has_aux=True)(x, state)
        carry = (x, jnp.zeros_like(x), -g, state)
        (_, v, _, state), total = jax.jit(lambda c: jax.lax.scan(step, c, None, length=50))(carry)
        neighbors.check_neighbor_list_state(state)
        kinetic = (v**2).sum() / 2
        assert kinetic > 1e-3 and jnp.ptp(total) < 0.02 * kinetic


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 12), st.integers(0, 2**32 - 1))
def test_random_systems(n, seed):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.random((n, 3)), jnp.float32) * 4
    cell = jnp.asarray(np.eye(3) * 3 + rng.normal(scale=0.3, size=(3, 3)), jnp.float32)
    given = [torch.as_tensor(np.array(a)) for a in (x, cell)]
    same(neighbors.neighbor_list(x, 2.0, cell), in_torch.neighbor_list(given[0], 2.0, given[1]))
    found = jax.jit(lambda x, cell: neighbors.neighbor_list(x, 2.0, cell, max_neighbors=60))(x, cell)
    same(found, in_torch.neighbor_list(given[0], 2.0, given[1], max_neighbors=60))


# -- lists with a skin ----------------------------------------------------------------------------


def near_pairs(found, x, cells, systems, cutoff):
    """The pairs (i, j, shift) of a matrix that are closer than the cutoff."""
    matrix, _, shifts = (np.asarray(a) for a in found[:3])
    i, slot = np.nonzero(matrix < len(x))
    j, shift = matrix[i, slot], shifts[i, slot]
    vectors = x[j] - x[i] + np.einsum("pi,pij->pj", shift, cells[systems[i]])
    close = np.linalg.norm(vectors, axis=1) < cutoff
    return {(a, b, *c) for a, b, c in zip(i[close], j[close], shift[close].tolist())}


def test_lists_with_a_skin_have_all_pairs_while_atoms_and_cells_move():
    """Open axes, two systems with their own searches, in one compiled loop; few calls search."""
    systems = triclinic(30, seed=4), triclinic(24, seed=9)
    x = np.concatenate([np.asarray(s.positions) for s in systems])
    cells = np.concatenate([np.asarray(s.cell) for s in systems])
    of = np.repeat(np.arange(2), (30, 24))
    pbc = jnp.array([[True, True, True], [True, False, True]])
    state = neighbors.prepare_neighbor_list(x, 2.5, cells, pbc, jnp.asarray(of, jnp.int32), skin=0.5, max_neighbors=100)
    call = jax.jit(lambda x, cell, state: neighbors.neighbor_list(x, cell=cell, state=state))
    generator = np.random.default_rng(3)
    velocities = generator.normal(0.0, 0.012, x.shape) * np.where(of == 0, 1.0, 0.3)[:, None]
    strain = np.eye(3) + np.array([generator.normal(0.0, 0.002, (3, 3)), 0.0005 * np.eye(3)])
    rebuilt = []
    for _ in range(25):
        x = (x + velocities)[:, None] @ strain[of]
        x, cells = x[:, 0], cells @ strain
        found, state = call(x, cells, state)
        exact = neighbors.neighbor_list(x, 2.5, cells, pbc, jnp.asarray(of, jnp.int32))
        assert near_pairs(found, x, cells, of, 2.5) == near_pairs(exact, x, cells, of, 2.5)
        rebuilt.append(np.asarray(state.rebuilt))
    counts = np.sum(rebuilt, axis=0)
    assert 2 <= counts[1] < counts[0] < 20
    assert state.valid.all() and rebuilt[0].all()


@pytest.mark.parametrize(
    ("moved", "strain", "is_stale"),
    [
        (0.249, 0.0, False),
        (0.251, 0.0, True),
        (0.0, 0.095, False),  # 0.5 / (4.5 + 0.5), for a strain along one axis
        (0.0, 0.105, True),
        (0.2, 0.015, False),
        (0.2, 0.025, True),
        (np.nan, 0.0, True),
    ],
)
def test_a_search_is_made_when_pairs_could_be_missing(moved, strain, is_stale):
    start, cell = X.astype(float), CELL.astype(float)
    pbc = PBC if strain == 0.0 else None  # along an open axis a strain of the cell says nothing of the atoms
    state = neighbors.prepare_neighbor_list(start, 4.5, cell, pbc, skin=0.5, max_neighbors=400)
    call = jax.jit(lambda x, cell, state: neighbors.neighbor_list(x, cell=cell, state=state))
    first, state = call(start, cell, state)
    assert state.rebuilt.all()
    stretch = jnp.eye(3).at[0, 0].add(strain)
    x, cell = start @ stretch, cell @ stretch
    if pbc is not None:
        cell = cell.at[0, 1].add(7.0)  # of the open axis
    again, state = call(x.at[5, 1].add(moved), cell, state)
    assert bool(state.rebuilt[0]) == is_stale
    if not is_stale:
        for a, b in zip(first, again, strict=True):
            np.testing.assert_array_equal(a, b)
        _, state = call(x, cell, state)
        np.testing.assert_array_equal(state.reference.positions, start)
    assert bool(state.valid[0]) != np.isnan(moved)  # counts say that a position is not finite


def test_another_pbc_or_batch_makes_a_list_stale():
    systems = jnp.repeat(jnp.arange(2, dtype=jnp.int32), 10)
    cells = jnp.concatenate([CELL, CELL])
    state = neighbors.prepare_neighbor_list(X, 3.0, cells, PBC, systems, skin=0.5, max_neighbors=300)
    call = jax.jit(lambda pbc, systems, state: neighbors.neighbor_list(X, pbc=pbc, batch_idx=systems, state=state)[1])
    pbc = jnp.stack([PBC, PBC])
    state = call(pbc, systems, state)
    assert not call(pbc, systems, state).rebuilt.any()
    np.testing.assert_array_equal(call(pbc.at[1, 1].set(True), systems, state).rebuilt, [False, True])
    assert call(pbc, systems[::-1], state).rebuilt.all()


def test_pbc_tells_how_many_systems_there_are():
    """The last one has no atoms, and all share a cell."""
    pbc, systems = jnp.stack([PBC, ~PBC, PBC]), jnp.repeat(jnp.arange(2, dtype=jnp.int32), 10)

    def search(x, systems):
        state = neighbors.prepare_neighbor_list(x, 3.0, CELL[0], pbc, systems, skin=0.5, max_neighbors=300)
        return neighbors.neighbor_list(x, state=state)

    expected = neighbors.neighbor_list(X, 3.5, CELL[0], pbc, systems, max_neighbors=300)
    for found, state in (search(X, systems), jax.jit(search)(X, systems)):
        assert state.valid.shape == (3,)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match="`batch_idx` or `batch_ptr` is needed"):
        search(X, None)


@pytest.mark.parametrize("form", ["matrix", "list", "two"])
def test_a_list_with_a_skin_that_is_too_small_says_so_and_grows_outside_of_jit(form):
    options = {"list": {"return_neighbor_list": True}, "two": {"cutoff2": 3.5}}.get(form, {})
    rooms = {"coo_capacity": 40} if form == "list" else {"max_neighbors": 6}
    state = neighbors.prepare_neighbor_list(X, 3.0, CELL, PBC, skin=0.4, **rooms, **options)
    call = jax.jit(lambda x, state: neighbors.neighbor_list(x, state=state))
    _, inside = call(X, state)
    _, inside = call(X + 0.05, inside)
    assert not inside.valid.any() and not inside.rebuilt.any()
    with pytest.raises(neighbors.NeighborOverflowError, match=str(int(inside.largest[0]))):
        neighbors.check_neighbor_list_state(inside)
    with pytest.warns(NeighborListWarning):
        found, outside = neighbors.neighbor_list(X, state=state)
    assert outside.valid.all()
    np.testing.assert_array_equal(outside.largest, inside.largest)
    with pytest.warns(NeighborListWarning):  # what was cut is not kept
        whole, _ = neighbors.neighbor_list(X, state=inside)
    for a, b in zip(whole, found, strict=True):
        np.testing.assert_array_equal(a, b)
    expected = neighbors.neighbor_list(X, 3.4, CELL, PBC, **{k: v + 0.4 for k, v in options.items() if k == "cutoff2"})
    if form != "list":
        np.testing.assert_array_equal(found[1], expected[1])
    again, outside = call(X + 0.05, outside)
    assert outside.valid.all() and not outside.rebuilt.any()
    same_kept, kept = neighbors.neighbor_list(X - 0.05, state=outside)
    assert not kept.rebuilt.any()
    for a, b in zip(again, same_kept, strict=True):
        np.testing.assert_array_equal(a, b)


def test_derivatives_pass_by_a_list_with_a_skin():
    """A cube has a singular decomposition without a derivative; neither it nor the search is differentiated."""
    x, cell = 0.4 * X, 4.0 * jnp.eye(3, dtype=jnp.float32)
    argon = lennard_jones(1.9, shifted=True)

    def energy(x, cell, state):
        (matrix, _, shifts), state = neighbors.neighbor_list(x, cell=cell, state=state)
        (matrix, _, shifts), state = neighbors.neighbor_list(x + 1e-4, cell=cell, state=state)
        near = {"neighbor_matrix": matrix, "neighbor_matrix_shifts": shifts, "energy_reduction": "system"}
        return argon(x, cell, sigma=0.5, epsilon=1.0, **near)[0]

    state = neighbors.prepare_neighbor_list(x, 1.9, cell, skin=0.3, max_neighbors=120)
    found = jax.jit(jax.grad(energy, argnums=(0, 1)))(x, cell, state)
    expected = jax.grad(lambda x, cell: argon(x, cell, sigma=0.5, epsilon=1.0).sum(), argnums=(0, 1))(x, cell)
    for f, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(f, e, rtol=1e-4, atol=1e-3 * float(jnp.abs(e).max()))


@pytest.mark.parametrize("options", [{}, {"skin": 0.3}])
def test_a_program_may_take_the_memory_of_a_state(options):
    """It takes none of the caller's arrays, whether they were given to `prepare_neighbor_list` or to a call."""
    x, cell, pbc = jnp.array(X), jnp.array(CELL), jnp.ones(3, bool)
    state = neighbors.prepare_neighbor_list(x, 3.0, cell, pbc, max_neighbors=300, **options)
    search = jax.jit(
        lambda x, state, **others: neighbors.neighbor_list(x, state=state, **others)[1], donate_argnames="state"
    )
    for others in ({}, {"cell": cell, "pbc": pbc}):
        state = search(x, state=search(x, state=state, **others), **others)
    _, state = neighbors.neighbor_list(x + 1.0, cell=cell, pbc=pbc, state=state)
    _, moved = jax.jit(lambda x, state: (neighbors.neighbor_list(x, state=state)[1], x + 1.0), donate_argnums=(0, 1))(
        x, state
    )
    np.testing.assert_array_equal(moved, X + 1.0)
    np.testing.assert_array_equal(cell, CELL)
    assert pbc.all()


@pytest.mark.parametrize("jitted", [False, True])
def test_a_state_with_a_skin_takes_cells_and_pbc_as_python_lists(jitted):
    x, cell = (jnp.asarray(t, jnp.float64) for t in (X, CELL))
    state = neighbors.prepare_neighbor_list(x, 3.0, cell, PBC, skin=0.5, max_neighbors=300)
    given = {"cell": np.asarray(cell).tolist(), "pbc": [True, False, True]}

    def call(x, state):
        return neighbors.neighbor_list(x, state=state, **given)[0]

    for found, expected in zip(
        (jax.jit(call) if jitted else call)(x, state), neighbors.neighbor_list(x, state=state)[0]
    ):
        np.testing.assert_array_equal(found, expected)
    assert neighbors.prepare_neighbor_list(x, 3.0, cell, True, skin=0.5, max_neighbors=300).reference.pbc.all()


@pytest.mark.parametrize("options", [{}, {"skin": 0.5}])
def test_a_function_that_is_traced_closes_over_positions_and_a_state(options):
    """Both have values there, so the list is exact, and a state with a skin tells whether it is to be searched."""
    state = neighbors.prepare_neighbor_list(X, 3.0, CELL, PBC, **options)
    expected = neighbors.neighbor_list(X, state=state)[0]
    for found, array in zip(jax.jit(lambda: neighbors.neighbor_list(X, state=state)[0])(), expected, strict=True):
        np.testing.assert_array_equal(found, array)


def test_a_skin_refuses_what_it_cannot_keep():
    for options in ({"return_distances": True}, {"return_vectors": True}, {"selective": True}):
        with pytest.raises(ValueError, match="`skin` goes with none of"):
            neighbors.prepare_neighbor_list(X, 3.0, CELL, skin=0.5, max_neighbors=9, **options)
    with pytest.raises(ValueError, match="`skin`"):
        neighbors.prepare_neighbor_list(X, 3.0, CELL, skin=-0.5, max_neighbors=9)
    state = neighbors.prepare_neighbor_list(X, 3.0, CELL, skin=0.5, max_neighbors=9)
    with pytest.raises(TypeError, match="dtype float64, but `state` was prepared for float32"):
        neighbors.neighbor_list(X.astype(float), state=state)
