"""Neighbor lists in JAX with a skin, which are searched again when pairs could be missing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nvalchemiops.jax import neighbors
from nvalchemiops.jax.interactions.pair import lennard_jones
from nvalchemiops.notices import NeighborListWarning
from tests.jax.precision import QUICKLY, double_precision  # noqa: F401
from tests.jax.test_neighbors import CELL, PBC, X
from tests.support.systems import triclinic


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
    cutoffs = {"cutoff": 4.5} if moved else {"cutoff": 2.0, "cutoff2": 4.5}  # the longer one counts
    state = neighbors.prepare_neighbor_list(start, cell=cell, pbc=pbc, skin=0.5, max_neighbors=400, **cutoffs)
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


def test_a_search_of_one_system_forgets_no_strain_of_another():
    """Atoms near the origin hardly move with their cell, but their images do."""
    systems, x = jnp.repeat(jnp.arange(2, dtype=jnp.int32), 2), jnp.array([[0.0, 0.0, 0.1 * n] for n in range(4)])
    cells = jnp.tile(4.0 * jnp.eye(3), (2, 1, 1))
    state = neighbors.prepare_neighbor_list(x, 4.5, cells, None, systems, skin=0.5, max_neighbors=30)
    call = jax.jit(lambda x, cells, state: neighbors.neighbor_list(x, cell=cells, state=state)[1])
    state = call(x, cells, state)
    for strain, moved, expected in ((0.06, 0.3, [False, True]), (0.12, 0.3, [True, False])):
        state = call(x.at[3, 0].add(moved), cells.at[0, 0, 0].multiply(1.0 + strain), state)
        np.testing.assert_array_equal(state.rebuilt, expected)


def test_systems_by_pointers_have_searches_and_room_of_their_own():
    """Open ones, the second without atoms; ``batch_idx`` alone says how many there are outside of `jit`."""
    pointers, of = jnp.array([0, 8, 8, 20]), np.repeat([0, 2], [8, 12])
    x = 0.5 * X.at[8:].mul(0.5)
    counts = np.asarray(neighbors.neighbor_list(x, 3.5, batch_idx=of)[1])
    most = [counts[of == k].max(initial=0) for k in range(3)]
    assert most[2] > most[0] > 0
    call = jax.jit(lambda x, state: neighbors.neighbor_list(x, state=state), compiler_options=QUICKLY)
    options = {"skin": 0.5, "max_neighbors": int(most[0])}
    found, state = call(x, neighbors.prepare_neighbor_list(x, 3.0, batch_ptr=pointers, **options))
    assert state.is_batched and state.num_systems == 3
    np.testing.assert_array_equal(found[1], counts)
    np.testing.assert_array_equal(state.largest, most)
    np.testing.assert_array_equal(state.valid, [True, True, False])
    with pytest.raises(neighbors.NeighborOverflowError, match="in system 2 has"):
        neighbors.check_neighbor_list_state(state)
    for atom, expected in ((7, [True, False, False]), (8, [False, False, True])):
        np.testing.assert_array_equal(call(x.at[atom, 1].add(0.3), state)[1].rebuilt, expected)
    assert neighbors.prepare_neighbor_list(x, 3.0, batch_idx=of, **options).num_systems == 3
    prepare = jax.jit(lambda of: neighbors.prepare_neighbor_list(x, 3.0, batch_idx=of, max_neighbors=9).valid)
    with pytest.raises(ValueError, match="`batch_ptr` is needed under jit"):
        prepare(of)


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


def test_thresholds_of_stale_lists_may_be_traced():
    moved, asks = X.at[3].add(jnp.array([0.25, 0.5, 0.5], X.dtype)), neighbors.neighbor_list_needs_rebuild  # by 0.75
    for threshold in (0.74, 0.76):
        for asked in (asks, jax.jit(asks), neighbors.check_neighbor_list_rebuild_needed):
            assert asked(X, moved, threshold).tolist() == [threshold < 0.75]
            assert asked(X, moved, threshold, jnp.eye(3, dtype=X.dtype)).tolist() == [threshold < 0.75]  # no effect
    every = jax.vmap(asks, (None, None, 0))(X, moved, jnp.array([0.74, 0.76]))
    assert every.tolist() == [[True], [False]]


def test_a_skin_refuses_what_it_cannot_keep():
    for options in ({"return_distances": True}, {"return_vectors": True}, {"selective": True}):
        with pytest.raises(ValueError, match="`skin` goes with none of"):
            neighbors.prepare_neighbor_list(X, 3.0, CELL, skin=0.5, max_neighbors=9, **options)
    with pytest.raises(ValueError, match="`skin`"):
        neighbors.prepare_neighbor_list(X, 3.0, CELL, skin=-0.5, max_neighbors=9)
    state = neighbors.prepare_neighbor_list(X, 3.0, CELL, skin=0.5, max_neighbors=9)
    with pytest.raises(TypeError, match="dtype float64, but `state` was prepared for float32"):
        neighbors.neighbor_list(X.astype(float), state=state)


def test_a_state_prints_what_it_says_but_not_the_lists():
    """Also traced, and under `vmap`."""
    state = neighbors.prepare_neighbor_list(X, 3.0, CELL, PBC, skin=0.5, max_neighbors=4)
    _, state = jax.jit(lambda x, state: neighbors.neighbor_list(x, state=state))(X, state)
    largest = int(state.largest[0])
    text = repr(state)
    assert "\n" not in text and text.startswith("NeighborListState(cutoff=3.0, ") and "skin=0.5, sizes=(4,)" in text
    assert f"largest=[{largest}], initialized=[ True], valid=[False], rebuilt=[ True])" in text and largest > 4
    printed = []
    jax.make_jaxpr(lambda state: printed.append(repr(state)))(state)
    assert "valid=" in printed[0]
    assert "num_atoms=0" in repr(neighbors.prepare_neighbor_list(X[:0], 3.0, CELL, PBC, max_neighbors=4))
