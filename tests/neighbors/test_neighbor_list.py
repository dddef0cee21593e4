"""Neighbor lists hold every pair once, whatever the cell."""

import pickle

import numpy as np
import pytest
import torch
from ase.neighborlist import primitive_neighbor_list
from hypothesis import given
from hypothesis import strategies as st

from nvalchemiops.neighbors import NeighborOverflowError, grid
from nvalchemiops.torch.neighbors import neighbor_list
from tests.reference.neighbors import all_pairs
from tests.systems import SYSTEMS, batch, triclinic

FULLY = (True, True, True)


def pairs_of(positions, cutoff, cell=None, pbc=FULLY, **options):
    """Our list as sorted tuples (i, j, S_0, S_1, S_2)."""
    tensors = {} if cell is None else {"cell": torch.as_tensor(cell), "pbc": torch.tensor(pbc)}
    results = neighbor_list(torch.as_tensor(positions), cutoff, return_neighbor_list=True, **tensors, **options)
    pairs = results[0].T.numpy()
    shifts = results[2].numpy() if len(results) == 3 else np.zeros((len(pairs), 3), dtype=int)
    return sorted(tuple(int(n) for n in row) for row in np.hstack([pairs, shifts]))


@st.composite
def crystals(draw):
    """Positions, cell, pbc and cutoff: skewed, left-handed, thin and mixed cells, atoms anywhere."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    lengths = rng.uniform(0.8, 6.0, size=3)
    while True:
        directions = rng.normal(size=(3, 3))
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        if abs(np.linalg.det(directions)) > 0.15:
            break
    cell = directions * lengths[:, None]
    n_atoms = draw(st.integers(1, 6))
    positions = rng.uniform(-1.5, 2.5, size=(n_atoms, 3)) @ cell
    pbc = draw(st.tuples(st.booleans(), st.booleans(), st.booleans()))
    return positions, cell, pbc, rng.uniform(0.5, 4.0)


@given(crystals())
def test_every_pair_is_found_once_in_random_cells(system):
    positions, cell, pbc, cutoff = system
    assert pairs_of(positions, cutoff, cell, pbc) == all_pairs(positions, cutoff, cell, pbc)
    assert pairs_of(positions, cutoff, cell, pbc, half_fill=True) == all_pairs(positions, cutoff, cell, pbc, half=True)


@given(crystals())
def test_random_cells_agree_with_ase(system):
    positions, cell, pbc, cutoff = system
    i, j, shift = primitive_neighbor_list("ijS", pbc, cell, positions, cutoff)
    assert pairs_of(positions, cutoff, cell, pbc) == sorted(tuple(int(n) for n in r) for r in np.c_[i, j, shift])


@pytest.mark.parametrize("thin", [(0.3, 9.0, 9.0), (0.5, 0.4, 9.0), (0.6, 0.6, 0.6)])
def test_cells_thinner_than_the_cutoff_show_every_image(thin):
    cell = np.diag(thin) + np.array([[0, 0, 0], [0.1, 0, 0], [0.05, -0.1, 0]])
    positions = np.array([[0.0, 0.0, 0.0], [0.1, 0.2, 0.3]])
    found = pairs_of(positions, 2.5, cell)
    assert found == all_pairs(positions, 2.5, cell, FULLY)
    assert max(abs(s) for pair in found for s in pair[2:]) >= 4


def test_cell_skewed_to_ten_degrees():
    angle = np.radians(10.0)
    cell = np.array([[3.0, 0, 0], [4 * np.cos(angle), 4 * np.sin(angle), 0], [1.0, 0.2, 3.0]])
    positions = np.random.default_rng(0).uniform(-9, 9, (5, 3))
    assert pairs_of(positions, 3.0, cell) == all_pairs(positions, 3.0, cell, FULLY)


def test_a_left_handed_cell_has_the_same_neighbors():
    system = SYSTEMS["triclinic"]()
    swapped = system.cell[0][[1, 0, 2]]
    right = pairs_of(system.positions, 4.0, system.cell[0])
    left = pairs_of(system.positions, 4.0, swapped)
    assert sorted((i, j, b, a, c) for i, j, a, b, c in left) == right


def test_distances_do_not_depend_on_wrapping():
    system = SYSTEMS["triclinic"]()
    moved = system.positions + torch.tensor([[7, -3, 2]], dtype=torch.float64) @ system.cell[0]
    moved[0] += 5 * system.cell[0][1]
    before, after = (pairs_of(x, 4.0, system.cell[0]) for x in (system.positions, moved))
    image = {0: np.array([0, 5, 0])}
    zero = np.zeros(3, dtype=int)
    expected = [(i, j, *(np.array(s) + image.get(i, zero) - image.get(j, zero)).tolist()) for i, j, *s in before]
    assert sorted(expected) == after


def test_the_cell_along_an_open_axis_never_matters():
    positions = np.random.default_rng(3).uniform(-5, 5, (6, 3))
    cell = np.array([[4.0, 0.5, 0.0], [0.0, 5.0, 0.3], [0.0, 0.0, 0.0]])
    expected = pairs_of(positions, 3.0, cell, (True, True, False))
    for third in ([1.0, 1.0, 1e-9], [np.nan] * 3, [4.0, 0.5, 0.0]):
        cell[2] = third
        assert pairs_of(positions, 3.0, cell, (True, True, False)) == expected
    assert expected == all_pairs(positions, 3.0, np.nan_to_num(cell), (True, True, False))


def test_without_a_cell_shifts_are_left_out():
    positions = torch.as_tensor(np.random.default_rng(4).uniform(0, 5, (8, 3)))
    matrix, count = neighbor_list(positions, 2.5)
    pairs, ptr = neighbor_list(positions, 2.5, return_neighbor_list=True)
    assert len(matrix) == 8 and matrix.shape[1] >= int(count.max()) and pairs.shape == (2, int(ptr[-1]))
    assert pairs_of(positions, 2.5) == all_pairs(positions, 2.5)
    zeros = torch.zeros(3, 3, dtype=torch.float64)
    assert len(neighbor_list(positions, 2.5, zeros, torch.zeros(3, dtype=torch.bool))) == 3


def test_a_huge_empty_cell_costs_nothing():
    positions = np.array([[0.0, 0.0, 0.0], [999999.5, 0.0, 0.0]])
    assert pairs_of(positions, 1.0, np.eye(3) * 1e6) == [(0, 1, -1, 0, 0), (1, 0, 1, 0, 0)]


def test_atoms_on_top_of_each_other_are_neighbors():
    assert pairs_of(np.zeros((2, 3)), 1.0) == [(0, 1, 0, 0, 0), (1, 0, 0, 0, 0)]


def test_a_pair_at_the_cutoff_does_not_belong():
    positions = np.array([[0.0, 0.0, 0.0], [2.0, 0.0, 0.0]])
    assert pairs_of(positions, 2.0) == []
    assert len(pairs_of(positions, np.nextafter(2.0, 3.0))) == 2


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("half_fill", [False, True])
def test_matrix_equals_list(name, half_fill, dtype):
    system = SYSTEMS[name]().to(dtype)
    n_atoms = len(system.charges)
    options = {"cell": system.cell, "half_fill": half_fill}
    pairs, ptr, shifts = neighbor_list(system.positions, 4.5, return_neighbor_list=True, **options)
    matrix, count, matrix_shifts = neighbor_list(system.positions, 4.5, fill_value=-7, **options)
    kept = matrix != -7
    assert all(t.dtype == torch.int32 for t in (pairs, ptr, shifts, matrix, count, matrix_shifts))
    assert torch.equal(count, ptr.diff()) and torch.equal(kept.sum(1).int(), count)
    assert torch.equal(matrix[kept], pairs[1]) and torch.equal(matrix_shifts[kept], shifts)
    assert torch.equal(pairs[0], torch.repeat_interleave(torch.arange(n_atoms, dtype=torch.int32), count))
    assert not matrix_shifts[~kept].any()


def test_padding_is_the_number_of_atoms_unless_given():
    system = SYSTEMS["triclinic"]()
    matrix, count, _ = neighbor_list(system.positions, 3.0, system.cell, max_neighbors=60)
    assert matrix.shape == (6, 60) and (matrix[:, -1] == 6).all() and int(count.max()) < 60
    matrix, _, _ = neighbor_list(system.positions, 3.0, system.cell, max_neighbors=60, fill_value=0)
    assert (matrix[:, -1] == 0).all()


@pytest.mark.parametrize("by", ["batch_idx", "batch_ptr", "both"])
def test_batch_equals_singles(by, device):
    systems = [make() for make in SYSTEMS.values()]
    together = batch(*systems)
    sizes = torch.tensor([len(s.charges) for s in systems])
    ptr = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).int()
    described = {"batch_idx": together.batch_idx, "batch_ptr": ptr}
    described = {name: t.to(device) for name, t in described.items() if by in (name, "both")}
    pbc = torch.tensor([[True, True, n % 2 == 0] for n in range(len(systems))])
    pairs, _, shifts = neighbor_list(
        together.positions.to(device),
        4.0,
        together.cell.to(device),
        pbc.to(device),
        return_neighbor_list=True,
        **described,
    )
    expected, expected_shifts = [], []
    for n, system in enumerate(systems):
        alone = neighbor_list(system.positions, 4.0, system.cell, pbc[n], return_neighbor_list=True)
        expected.append(alone[0] + ptr[n])
        expected_shifts.append(alone[2])
    assert torch.equal(pairs.cpu(), torch.cat(expected, dim=1))
    assert torch.equal(shifts.cpu(), torch.cat(expected_shifts))


def test_any_number_of_threads_gives_the_same_list(threads, always_split):
    rng = np.random.default_rng(5)
    positions, cell = torch.as_tensor(rng.uniform(0, 12, (300, 3))), 12.0 * torch.eye(3, dtype=torch.float64)
    results = []
    for count in (1, 2, 3):
        threads(count)
        results.append(neighbor_list(positions, 3.0, cell))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_float32_finds_the_pairs_of_its_own_positions():
    system = SYSTEMS["rocksalt"]().to(torch.float32)
    narrow = neighbor_list(system.positions, 4.0, system.cell)
    wide = neighbor_list(system.positions.double(), 4.0, system.cell.double())
    assert all(torch.equal(a, b) for a, b in zip(narrow, wide))


def test_positions_that_need_gradients_are_welcome():
    system = SYSTEMS["triclinic"]()
    results = neighbor_list(system.positions.requires_grad_(), 3.0, system.cell.requires_grad_())
    assert not any(t.requires_grad for t in results)


def test_overflow_says_how_much_room_is_needed():
    together = batch(SYSTEMS["one atom"](), SYSTEMS["rocksalt"]())
    _, count, _ = neighbor_list(together.positions, 5.0, together.cell, batch_idx=together.batch_idx)
    for as_list in (False, True):
        with pytest.raises(NeighborOverflowError, match="max_neighbors") as caught:
            neighbor_list(
                together.positions,
                5.0,
                together.cell,
                batch_idx=together.batch_idx,
                max_neighbors=2,
                return_neighbor_list=as_list,
            )
        error = caught.value
        assert (error.max_neighbors, error.num_neighbors) == (2, int(count.max()))
        assert error.system_index == int(together.batch_idx[count.argmax()])
        assert pickle.loads(pickle.dumps(error)).num_neighbors == error.num_neighbors


X = torch.zeros(2, 3, dtype=torch.float64)
CELL = torch.eye(3, dtype=torch.float64)
BATCH = torch.tensor([0, 1], dtype=torch.int32)


@pytest.mark.parametrize(
    ("error", "argument", "options"),
    [
        (TypeError, "positions", {"positions": X.int()}),
        (TypeError, "positions", {"positions": [[0.0, 0.0, 0.0]]}),
        (ValueError, "positions", {"positions": X[:, :2]}),
        (ValueError, "positions", {"positions": X * torch.nan}),
        (ValueError, "positions", {"positions": X + torch.tensor([[0.0], [1e12]]), "cell": CELL}),
        (ValueError, "cutoff", {"cutoff": -1.0}),
        (ValueError, "cutoff", {"cutoff": float("nan")}),
        (ValueError, "cutoff", {"cutoff": float("inf")}),
        (ValueError, "cutoff", {"cutoff": None}),
        (TypeError, "cutoff", {"cutoff": "long"}),
        (TypeError, "cell", {"cell": CELL.float()}),
        (TypeError, "cell", {"cell": CELL.numpy()}),
        (ValueError, "cell", {"cell": CELL[:2]}),
        (ValueError, "cell", {"cell": torch.ones_like(CELL)}),
        (ValueError, "cell", {"cell": torch.zeros_like(CELL)}),
        (ValueError, "cell", {"cell": CELL * torch.inf}),
        (ValueError, "cell", {"cell": CELL.expand(3, 3, 3), "batch_ptr": torch.tensor([0, 1, 2])}),
        (ValueError, "pbc", {"pbc": torch.tensor([True, False, False])}),
        (TypeError, "pbc", {"cell": CELL, "pbc": torch.ones(3)}),
        (ValueError, "pbc", {"cell": CELL, "pbc": torch.ones(2, dtype=torch.bool)}),
        (ValueError, "batch_idx", {"batch_idx": BATCH.flip(0)}),
        (ValueError, "batch_idx", {"batch_idx": -BATCH}),
        (ValueError, "batch_idx", {"batch_idx": BATCH[:1]}),
        (TypeError, "batch_idx", {"batch_idx": BATCH.double()}),
        (ValueError, "batch_idx", {"batch_idx": BATCH + 1, "cell": CELL.expand(2, 3, 3)}),
        (ValueError, "batch_idx", {"batch_idx": BATCH, "batch_ptr": torch.tensor([0, 2])}),
        (ValueError, "batch_ptr", {"batch_ptr": torch.tensor([0, 1])}),
        (ValueError, "batch_ptr", {"batch_ptr": torch.tensor([0, 3, 2])}),
        (TypeError, "batch_ptr", {"batch_ptr": torch.tensor([0.0, 2.0])}),
        (ValueError, "method", {"method": "naively"}),
        (ValueError, "method", {"method": "batch_"}),
        (ValueError, "method", {"method": "tree"}),
        (ValueError, "max_neighbors", {"max_neighbors": -1}),
        (TypeError, "unknown", {"unknown": 1}),
    ],
)
def test_bad_input_is_an_error_that_names_the_argument(error, argument, options):
    with pytest.raises(error, match=argument):
        neighbor_list(**{"positions": X, "cutoff": 1.0, **options})


@pytest.mark.parametrize("form", ["matrix", "memory", "numbered anew"])
def test_a_given_capacity_reads_no_value(form, monkeypatch):
    """What CUDA graphs and a busy GPU need; every way from a tensor to a number is shut."""
    system = batch(triclinic(5), SYSTEMS["rocksalt"]())
    options = {"batch_idx": system.batch_idx, "max_neighbors": 150}
    if form != "numbered anew":
        options["cell"] = system.cell
    if form == "memory":
        n = len(system.charges)
        shapes = {"neighbor_matrix": (n, 150), "neighbor_matrix_shifts": (n, 150, 3), "num_neighbors": (n,)}
        options |= {name: torch.empty(shape, dtype=torch.int32) for name, shape in shapes.items()}
        options["rebuild_flags"] = torch.ones(2, dtype=torch.bool)
    expected = [t.clone() for t in neighbor_list(system.positions, 4.0, **options)]

    def shut(*_, **__):
        raise AssertionError("a value was read")

    for way in ("item", "tolist", "__int__", "__float__", "__bool__", "__index__", "nonzero", "numpy"):
        monkeypatch.setattr(torch.Tensor, way, shut)
    found = neighbor_list(system.positions, 4.0, **options, check=False)
    monkeypatch.undo()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_bins_that_share_a_slot_are_never_searched_together():
    """Or a pair would be listed twice: no two bins of a box of `SEARCHED_BINS` meet, on a ring of any size."""
    apart = np.arange(1 - grid.SEARCHED_BINS, grid.SEARCHED_BINS)
    x, y, z = np.meshgrid(apart, apart, apart, indexing="ij")
    for power in range(grid.SMALLEST_SHARED_RING.bit_length() - 1, 31):
        size = 1 << power
        skip_y, skip_z = (int(skip) for skip in grid.shared_skips(size))
        assert ((x + skip_y * y + skip_z * z) % size == 0).sum() == 1, f"a ring of {size} slots"
