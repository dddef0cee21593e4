"""Neighbor lists in JAX: exact outside of jit; of a declared size inside, where overflow stays visible.

Those with a skin are in `test_neighbor_skins`.
"""

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
        with torch.device("meta"):  # the default of new tensors
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
    with pytest.warns(NeighborListWarning, match="this state has a matrix: give return_neighbor_list=True"):
        assert neighbors.prepare_neighbor_list(X, 3.0, CELL, coo_capacity=9, max_neighbors=8).sizes == (8,)
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
    found = neighbors.batch_naive_neighbor_list_dual_cutoff(x, 3.0, 4.0, systems, None, pbc, cell)
    more = (given[2], None, torch.ones(2, 3).bool(), given[1])
    same(found, in_torch.batch_naive_neighbor_list_dual_cutoff(given[0], 3.0, 4.0, *more))
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


def test_two_cutoffs_and_one_that_are_traced():
    expected = in_torch.naive_neighbor_list_dual_cutoff(TORCH[0], 3.0, 4.0, *TORCH[:0:-1])
    search = neighbors.naive_neighbor_list_dual_cutoff
    same(search(X, 3.0, 4.0, PBC, CELL), expected)
    widths = {"max_neighbors1": expected[0].shape[1], "max_neighbors2": expected[3].shape[1]}
    same(jax.jit(lambda r: search(X, r, r + 1.0, PBC, CELL, **widths))(3.0), expected)
    same(
        jax.jit(lambda r: neighbors.neighbor_list(X, r, CELL, PBC, max_neighbors=widths["max_neighbors1"]))(3.0),
        expected[:3],
    )
    with pytest.raises(ValueError, match="`cutoff` is needed"):
        neighbors.neighbor_list(X)
    with pytest.raises(NotImplementedError, match="`pair_fn` is not supported"):
        neighbors.neighbor_list(X, 3.0, pair_fn=len)


@pytest.mark.filterwarnings("error")
def test_a_cutoff_may_be_traced_and_has_no_part_in_derivatives():
    """Distances are those of a list that stays: a small change of the cutoff lets them be."""

    def total(cutoff, x):
        return neighbors.neighbor_list(x, cutoff, CELL, max_neighbors=60, return_distances=True)[3].sum()

    by_cutoff, by_x = jax.jit(jax.grad(total, (0, 1)))(jnp.float32(3.0), X)
    assert by_cutoff == 0 and jnp.abs(by_x).max() > 0.1
    assert jax.jit(jax.grad(total))(jnp.float32(3.0), X) == 0


MEMORY = {"neighbor_matrix_shifts": torch.int32, "neighbor_distances": torch.float32, "neighbor_vectors": torch.float32}


@pytest.mark.parametrize("name", MEMORY)
def test_memory_for_one_result_alone_says_what_it_says_in_torch(name):
    memory = torch.zeros(20, 70, *(() if name == "neighbor_distances" else (3,)), dtype=MEMORY[name])
    expected = in_torch.neighbor_list(TORCH[0], 3.0, *TORCH[1:], **{name: memory.clone()})
    memory = jnp.asarray(memory.numpy())
    same(neighbors.neighbor_list(X, 3.0, CELL, PBC, **{name: memory}), expected)
    same(jax.jit(lambda memory: neighbors.neighbor_list(X, 3.0, CELL, PBC, **{name: memory}))(memory), expected)
    with pytest.raises(ValueError, match=f"`{name}`"):
        neighbors.neighbor_list(X, 3.0, CELL, PBC, **{name: memory.ravel()})


@pytest.mark.parametrize("options", [{}, {"cutoff2": 2.0}])
def test_the_width_of_memory_has_precedence_over_one_that_is_asked_for(options):
    name = "neighbor_matrix1" if options else "neighbor_matrix"
    options |= {"max_neighbors": 80}
    memory = torch.zeros(20, 70, dtype=torch.int32)
    expected = in_torch.neighbor_list(TORCH[0], 3.0, *TORCH[1:], **{name: memory.clone()}, **options)
    search = functools.partial(neighbors.neighbor_list, X, 3.0, CELL, PBC, **options)
    memory = jnp.asarray(memory.numpy())
    same(search(**{name: memory}), expected)
    same(jax.jit(lambda memory: search(**{name: memory}))(memory), expected)


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


@pytest.mark.parametrize(
    ("options", "name"), [({"nearest": 2}, "max_neighbors"), ({"return_neighbor_list": True}, "coo_capacity")]
)
def test_sizes_are_asked_for_when_a_function_is_traced(options, name):
    with pytest.raises(ValueError, match=f"`{name}` is needed under jit"):
        jax.make_jaxpr(lambda x: neighbors.neighbor_list(x, 3.0, CELL, PBC, **options))(X)
    with pytest.raises(ValueError, match="`max_neighbors` is needed under jit"):
        jax.make_jaxpr(lambda cutoff: neighbors.neighbor_list(X, cutoff, CELL, PBC))(3.0)


def test_widths_that_are_not_given_are_estimated_when_a_function_is_traced():
    """The width of 0.5.0; counts tell whether it is enough."""
    expected = neighbors.neighbor_list(X, 3.0, CELL, PBC)
    with pytest.warns(NeighborListWarning, match="`max_neighbors` not given under jit"):
        matrix, counts, shifts = jax.jit(lambda x: neighbors.neighbor_list(x, 3.0, CELL, PBC))(X)
    width = neighbors.estimate_max_neighbors(3.0)
    assert matrix.shape == shifts.shape[:2] == (len(X), width)
    np.testing.assert_array_equal(counts, expected[1])
    n = min(width, expected[0].shape[1])
    np.testing.assert_array_equal(matrix[:, :n], expected[0][:, :n])
    with pytest.warns(NeighborListWarning, match="`max_neighbors2` not given"):
        two = jax.make_jaxpr(lambda x: neighbors.naive_neighbor_list_dual_cutoff(x, 2.0, 5.0, max_neighbors1=7))(X)
    assert [a.shape for a in two.out_avals[::2]] == [(len(X), 7), (len(X), neighbors.estimate_max_neighbors(5.0))]


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
    with jax.enable_x64(True):
        total, *none = neighbors.estimate_cell_list_sizes(X[:0], cells[:0], cutoff)
    assert total == 0 and all(one.dtype == jnp.int32 and one.tolist() == [0, 0, 0] for one in none)
    with pytest.raises(ValueError, match="`cell` must be one cell"):
        neighbors.estimate_cell_list_sizes(X, cells[:2], cutoff)
    with pytest.raises(ValueError, match="`cell` is needed"):
        neighbors.estimate_batch_cell_list_sizes(X)
    with pytest.raises(TypeError, match="estimate_batch_cell_list_sizes needs values"):
        jax.jit(lambda cells: neighbors.estimate_cell_list_sizes(X, cells, 3.0))(CELL)


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

    @pytest.mark.parametrize(
        "options", [{"max_neighbors": 2}, {"max_neighbors1": 2, "cutoff2": 4.0, "max_neighbors2": 300}]
    )
    def test_overflow_stays_in_it(self, options):
        state = neighbors.prepare_neighbor_list(X, 3.0, CELL, PBC, **options)
        step = jax.jit(lambda x, s, cell: neighbors.neighbor_list(x, cell=cell, state=s)[1])
        state = step(X * 20, step(X, state, CELL), CELL * 20)
        assert state.num_neighbors.max() <= 2 and not state.valid.any()
        most = int(in_torch.neighbor_list(TORCH[0], options.get("cutoff2", 3.0), *TORCH[1:])[1].max())
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

    @pytest.mark.parametrize("bad", ["3", None, (3.0,), -1.0, float("nan")])
    def test_bad_cutoffs_are_named(self, bad):
        with pytest.raises((TypeError, ValueError), match="`cutoff` must be"):
            neighbors.prepare_neighbor_list(X, bad, CELL, PBC, max_neighbors=9)
        if bad is not None:
            with pytest.raises((TypeError, ValueError), match="`cutoff2` must be"):
                neighbors.prepare_neighbor_list(X, 3.0, CELL, PBC, cutoff2=bad)

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
        [
            ({"positions": X[:5]}, "positions"),
            ({"cutoff": 5.0}, "cutoff"),
            ({"half_fill": True}, "half_fill"),
            ({"cell": CELL}, "cell"),
        ],
    )
    def test_what_it_was_not_prepared_for_is_an_error(self, change, text):
        state = neighbors.prepare_neighbor_list(X, 3.0, None if "cell" in change else CELL)
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
