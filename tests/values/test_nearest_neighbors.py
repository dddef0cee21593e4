"""The k nearest of the neighbors within a cutoff: the same pairs as those of a full list that is sorted afterwards."""

import ase.build
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nvalchemiops.notices import NeighborListWarning
from nvalchemiops.torch.neighbors import neighbor_list
from nvalchemiops.torch.neighbors.formats import check_full_list, transpose_order
from tests.reference.neighbors import every_image, half_of, in_order, nearest_of, tree
from tests.support.searches import rows_of, rows_of_matrix

F64 = torch.float64
CRYSTALS = {
    "fcc": ase.build.bulk("Cu", "fcc", a=3.6, cubic=True),
    "hcp, primitive": ase.build.bulk("Ti", "hcp", a=2.95, c=4.68),
    "diamond, primitive": ase.build.bulk("Si", "diamond", a=5.43),
    "rocksalt": ase.build.bulk("NaCl", "rocksalt", a=5.6, cubic=True),
    "simple cubic, one atom": ase.build.bulk("Po", "sc", a=2.3),
}


def system(kind, n_atoms, seed):
    """Positions, cell and pbc: a crystal, whole or moved, or random atoms in a skewed cell that may be thin."""
    rng = np.random.default_rng(seed)
    if kind in CRYSTALS:
        atoms = CRYSTALS[kind]
        moved = rng.normal(size=3) + rng.integers(-2, 3, (len(atoms), 3)) @ atoms.cell.array
        return atoms.positions + moved, atoms.cell.array, np.array([True] * 3)
    cell = np.diag(rng.uniform(1.8, 6.0, 3)) + rng.uniform(-1.0, 1.0, (3, 3))
    return rng.uniform(-1.0, 2.0, (n_atoms, 3)) @ cell, cell, rng.random(3) < 0.7


def expected(systems, cutoff, k, tie_tolerance, symmetric):
    begin, rows = 0, [np.zeros((0, 5), dtype=np.int64)]
    for x, cell, pbc in systems:
        mine = nearest_of(every_image(x, cutoff, cell, pbc), k, tie_tolerance, symmetric)
        rows.append(mine + np.array([begin, begin, 0, 0, 0]))
        begin += len(x)
    return np.concatenate(rows)


def tensors(systems, dtype=F64):
    """Arguments of a batch."""
    numbers = np.repeat(np.arange(len(systems)), [len(x) for x, *_ in systems])
    return {
        "positions": torch.as_tensor(np.concatenate([x for x, *_ in systems])).to(dtype),
        "cell": torch.as_tensor(np.stack([cell for _, cell, _ in systems])).to(dtype),
        "pbc": torch.as_tensor(np.stack([pbc for *_, pbc in systems])),
        "batch_idx": torch.as_tensor(numbers, dtype=torch.int32),
    }


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([*CRYSTALS, "random", "random"]), st.integers(0, 9), st.integers(0, 10**6)),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([1.9, 3.13, 4.71]),
    st.integers(1, 40),
    st.sampled_from([None, 0.01, 0.5]),
    st.booleans(),
    st.sampled_from(["naive", "cell_list", None]),
)
def test_any_cells_and_batches(described, cutoff, k, tie_tolerance, symmetric, method):
    systems = [system(*each) for each in described]
    assume(any(len(x) for x, *_ in systems))
    try:
        rows = expected(systems, cutoff, k, tie_tolerance, symmetric)
    except ArithmeticError:
        assume(False)
    ties = {"ties": "index"} if tie_tolerance is None else {"tie_tolerance": tie_tolerance}
    options = {**tensors(systems), "cutoff": cutoff, "nearest": k, "symmetric": symmetric, "method": method, **ties}
    pairs, ptr, shifts = neighbor_list(**options, return_neighbor_list=True)
    assert np.array_equal(in_order(rows_of(pairs, shifts)), rows)
    assert torch.equal(ptr.diff(), torch.bincount(pairs[0], minlength=len(options["positions"])).int())
    matrix, count, shifts = neighbor_list(**options)
    assert np.array_equal(in_order(rows_of_matrix(matrix, count, shifts)), rows)
    if ties == {"ties": "index"} and not symmetric:
        assert matrix.shape[1] == k
    if symmetric:
        check_full_list(pairs, ptr, neighbor_list(**options, return_neighbor_list=True)[2])
        halved, _, shifts = neighbor_list(**options, return_neighbor_list=True, half_fill=True)
        assert np.array_equal(in_order(rows_of(halved, shifts)), half_of(rows))


@pytest.mark.parametrize("ties", ["keep", "index"])
def test_many_atoms(ties):
    """More than one block of candidates, and of tasks; without a cell, and in one."""
    rng = np.random.default_rng(3)
    x, cell = rng.uniform(0.0, 17.0, (1500, 3)), np.diag([17.0, 17.0, 17.0]) + np.eye(3, k=1)
    tolerance = 0.01 if ties == "keep" else None
    for box, pbc in ((cell, [True, True, False]), (None, [False] * 3)):
        inside = tree(x, 3.4, box, pbc)
        options = {} if box is None else {"cell": torch.as_tensor(box), "pbc": torch.tensor(pbc)}
        found = neighbor_list(torch.as_tensor(x), 3.4, nearest=20, ties=ties, return_neighbor_list=True, **options)
        assert np.array_equal(in_order(rows_of(found[0], *found[2:])), nearest_of(inside, 20, tolerance))


def test_shells_of_crystals_stay_whole_or_are_cut_by_index():
    """12 neighbors in the first shell of fcc, 6 in the second one: 13 nearest are 18 with ties."""
    copper = CRYSTALS["fcc"].repeat(3)
    x, cell = torch.tensor(copper.positions), torch.tensor(copper.cell.array)
    moved = x + torch.tensor([0.1, 7.3, -2.2])
    for noise in (0.0, 1e-13):
        y = moved + noise * torch.randn(x.shape, dtype=F64, generator=torch.Generator().manual_seed(0))
        assert (neighbor_list(y, 5.0, cell, nearest=12)[1] == 12).all()
        assert (neighbor_list(y, 5.0, cell, nearest=13)[1] == 18).all()
        matrix, count, _ = neighbor_list(y, 5.0, cell, nearest=13, ties="index")
        assert (count == 13).all() and matrix.shape == (len(x), 13)
        exact = neighbor_list(x, 5.0, cell, nearest=13, ties="index", return_neighbor_list=True)
        noisy = neighbor_list(y, 5.0, cell, nearest=13, ties="index", return_neighbor_list=True)
        assert np.array_equal(in_order(rows_of(exact[0], exact[2])), in_order(rows_of(noisy[0], noisy[2])))


def test_chosen_rows_memory_and_rebuilt_systems():
    systems = [system("random", 9, 1), system("rocksalt", 0, 2), system("random", 30, 3)]
    given_systems = tensors(systems)
    n_atoms = len(given_systems["positions"])
    options = {**given_systems, "cutoff": 4.71, "nearest": 6}
    for symmetric in (False, True):
        rows = expected(systems, 4.71, 6, 0.01, symmetric)
        atoms = torch.tensor([11, 2, 2, n_atoms - 1], dtype=torch.int32)
        matrix, count, shifts = neighbor_list(**options, symmetric=symmetric, target_indices=atoms)
        found = rows_of_matrix(matrix, count, shifts)
        for row, atom in enumerate(atoms.tolist()):
            assert np.array_equal(in_order(found[found[:, 0] == row])[:, 1:], rows[rows[:, 0] == atom][:, 1:])
    whole = neighbor_list(**options, max_neighbors=30)
    memory = [torch.full_like(t, -9) for t in whole]
    names = ("neighbor_matrix", "num_neighbors", "neighbor_matrix_shifts")
    flags = torch.tensor([True, False, True])
    neighbor_list(**options, **dict(zip(names, memory)), rebuild_flags=flags)
    searched = flags[given_systems["batch_idx"].long()]
    for filled, expected_rows in zip(memory, whole):
        assert torch.equal(filled[searched], expected_rows[searched]) and (filled[~searched] == -9).all()


def test_float32_selects_by_the_numbers_as_given():
    systems = [system("random", 25, 5), system("hcp, primitive", 0, 6)]
    given_systems = tensors(systems, torch.float32)
    rounded = [(x.astype(np.float32), cell.astype(np.float32), pbc) for x, cell, pbc in systems]
    rounded = [(x.astype(float), cell.astype(float), pbc) for x, cell, pbc in rounded]
    pairs, _, shifts = neighbor_list(**given_systems, cutoff=4.71, nearest=9, return_neighbor_list=True)
    assert np.array_equal(in_order(rows_of(pairs, shifts)), expected(rounded, 4.71, 9, 0.01, False))


@pytest.mark.parametrize("as_list", [True, False])
def test_distances_and_vectors_with_gradients_of_two_orders(as_list):
    x, cell, pbc = system("random", 12, 8)
    options = {"pbc": torch.as_tensor(pbc), "nearest": 5, "return_neighbor_list": as_list}

    def energy(positions, lattice):
        *_, distances, vectors = neighbor_list(
            positions, 4.0, lattice, return_distances=True, return_vectors=True, **options
        )
        weights = torch.arange(1.0, vectors.shape[-2] + 1, dtype=F64).unsqueeze(-1).expand(vectors.shape).sin()
        return (torch.exp(-distances) - torch.exp(-torch.zeros_like(distances))).sum() + (weights * vectors**3).sum()

    arguments = tuple(torch.as_tensor(a).clone().requires_grad_() for a in (x, cell))
    assert torch.autograd.gradcheck(energy, arguments, fast_mode=True)
    assert torch.autograd.gradgradcheck(energy, arguments, fast_mode=True)


@pytest.mark.parametrize("ties", ["keep", "index"])
def test_compiled_with_static_and_with_unbacked_sizes(ties):
    x, cell, _ = system("random", 20, 9)
    x, cell = torch.as_tensor(x), torch.as_tensor(cell)

    def matrix(positions):
        width = {} if ties == "index" else {"max_neighbors": 16}
        return neighbor_list(positions, 4.0, cell, nearest=8, ties=ties, return_distances=True, **width)

    def pairs(positions):
        found = neighbor_list(positions, 4.0, cell, nearest=8, ties=ties, return_neighbor_list=True, symmetric=True)
        return *found, *transpose_order(found[0], len(positions))

    for function in (matrix, pairs):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        for positions in (x, x + 0.3 * x.sin()):
            for a, b in zip(compiled(positions), function(positions), strict=True):
                assert torch.equal(a, b)


@pytest.mark.later
def test_compiled_with_graph_breaks():
    """Without capture of dynamic sizes, for any number of atoms."""
    torch._dynamo.reset()
    x, cell, _ = system("random", 20, 10)
    x, cell = torch.as_tensor(x), torch.as_tensor(cell)
    options = {"nearest": 5, "ties": "index", "symmetric": True, "return_neighbor_list": True}
    compiled = torch.compile(neighbor_list, backend="aot_eager", dynamic=True)
    for n in (12, 20):
        found, expected = (function(x[:n], 4.0, cell, **options) for function in (compiled, neighbor_list))
        assert all(map(torch.equal, found, expected))


def test_an_atom_without_a_position_has_no_neighbors_and_is_none():
    """Unread faults, as with ``check=False``: the count is the mark, and rows of others have k neighbors without it."""
    x, cell, _ = system("random", 12, 10)
    x, cell = torch.as_tensor(x), torch.as_tensor(cell)
    x[4] = torch.nan
    for symmetric in (False, True):
        options = {"nearest": 3, "symmetric": symmetric, "check": False, "max_neighbors": 12}
        matrix, count, _ = neighbor_list(x, 6.0, cell, **options)
        assert count[4] == 2**31 - 1 and matrix[4].tolist() == [4] + 11 * [12] and int((matrix == 4).sum()) == 1
        assert (count[torch.arange(12) != 4] >= 3).all()


def test_the_nearest_may_be_at_the_same_place():
    """Rows are full, too, if the distance of the last neighbor in them is zero."""
    x = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.5, 0.0, 0.0]], dtype=F64)
    pairs = neighbor_list(x, 1.0, nearest=1, tie_tolerance=0.0, return_neighbor_list=True)[0]
    assert pairs.T.tolist() == [[0, 1], [1, 0], [2, 0], [2, 1]]


def test_no_atoms_and_no_neighbors():
    for n_atoms in (0, 1, 2):
        x = 9.0 * torch.arange(n_atoms, dtype=F64).unsqueeze(1).expand(n_atoms, 3).contiguous()
        for ties in ("keep", "index"):
            pairs, ptr = neighbor_list(x, 3.0, nearest=4, ties=ties, return_neighbor_list=True)
            assert pairs.shape == (2, 0) and (ptr == 0).all()
            assert (neighbor_list(x, 0.0, nearest=4, ties=ties)[1] == 0).all()


@pytest.mark.parametrize("options", [{}, {"ties": "index"}, {"symmetric": True}, {"symmetric": True, "ties": "index"}])
def test_too_little_room_is_widened(options):
    x, cell, _ = system("random", 30, 11)
    x, cell = torch.as_tensor(x), torch.as_tensor(cell)
    exact, count, images = neighbor_list(x, 5.0, cell, nearest=8, **options)
    most = int(count.max())
    memory = torch.zeros(30, 5, dtype=torch.int32)
    for room in ({"max_neighbors": 7}, {"neighbor_matrix": memory}):
        with pytest.warns(NeighborListWarning, match=f"an atom has {most} neighbors"):
            matrix, counts, shifts = neighbor_list(x, 5.0, cell, nearest=8, **options, **room)
        assert torch.equal(matrix[:, :most], exact[:, :most]) and torch.equal(counts, count)
        assert torch.equal(shifts[:, :most], images[:, :most])
    assert torch.equal(memory, exact[:, :5])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"nearest": 3, "cutoff2": 4.0}, "`nearest` is for one list"),
        ({"nearest": 3, "half_fill": True}, "`half_fill` with `nearest`"),
        ({"nearest": 0}, "`nearest` must be at least 1"),
        ({"nearest": -2}, "`nearest` must be at least 1"),
        ({"nearest": 3, "ties": "first"}, "`ties` must be 'keep' or 'index'"),
        ({"ties": "index"}, "`ties` says which neighbors are the nearest"),
        ({"symmetric": True}, "`symmetric` says which neighbors are the nearest"),
        ({"nearest": 3, "ties": "index", "tie_tolerance": 0.1}, "`tie_tolerance` is only for"),
        ({"nearest": 3, "tie_tolerance": -0.1}, "`tie_tolerance` must be finite and non-negative"),
        ({"nearest": 10**9, "ties": "index"}, "`nearest`: the list would have"),
        ({"nearest": 3, "max_neighbors": 10**9}, "`max_neighbors`: the list would have"),
    ],
)
def test_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        neighbor_list(torch.rand(5, 3), 3.0, **options)
