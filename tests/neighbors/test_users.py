"""What users of neighbor lists reported, row by row (numbers as in ../shared/user-pains.md).

row  | test
-----|-------------------------------------------------------------------------------------------------------
N01  | test_exactness.py: test_random_systems, test_random_batches, test_two_cutoffs_at_once, test_named_systems
N02  | test_capacities_by_hand_change_nothing
N03  | test_tiny_cells_list_each_image_once
N04  | test_a_dummy_cell_without_periodicity, test_a_slab_with_atoms_beyond_its_cell
N05  | test_unwrapped_positions_give_the_same_vectors_and_energies
N06  | test_left_handed_cells
N07  | test_methods_for_one_system_refuse_a_batch, test_identical_systems_never_see_each_other
N08  | test_zero_lattice_vectors
N09  | test_rows_that_shrink_leave_nothing_behind
N10  | test_rebuild.py: test_an_atom_put_back_on_the_other_side_makes_the_list_stale;
     | test_verlet.py: test_energy_is_conserved_with_a_skin_and_wrapping_as_without
N11  | test_a_shrinking_box_is_exact_or_overflows; test_verlet.py: test_a_changed_cell_alone_is_a_reason
N12  | test_overfull_rows_raise, test_overfull_rows_without_checks_are_visible_and_stay_in_bounds,
     | test_crowded_bins_lose_nothing
N13  | test_clustered_points_with_default_arguments, test_the_error_carries_the_size_that_works,
     | test_dual_cutoffs_say_which_list_overflows
N14  | test_one_collapsed_structure_leaves_the_others_alone
N15  | test_a_huge_dummy_cell_costs_no_memory, test_vacuum_costs_no_memory
N16  | test_memory_of_100_000_atoms
N17  | test_exactness.py: test_coordination_of_perfect_crystals, test_bonds_of_perfect_crystals
N18  | test_layouts_of_the_input_do_not_matter
N19  | test_eager_calls_need_no_compiler
N20  | test_compiled_dynamics_with_changing_counts, test_compiled_gradients_with_changing_counts,
     | test_fixed_capacity_traces_whole
N21  | test_no_pairs_no_atoms_no_trouble
N22  | test_padding_has_no_gradient
N23  | test_exactness.py: test_alone_equals_member_of_a_batch_bitwise, test_ten_repeats_are_bitwise_equal,
     | test_threads_share_a_batch
D05  | test_one_build_for_two_cutoffs (the list side; dispersion itself comes later)
R05  | test_a_large_search_uses_all_threads (speed: benchmarks/neighbors.py)
"""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from nvalchemiops import launch as core
from nvalchemiops.neighbors import NeighborOverflowError
from nvalchemiops.torch import neighbors
from nvalchemiops.torch.interactions.electrostatics import ewald_summation
from nvalchemiops.torch.neighbors import neighbor_list
from nvalchemiops.torch.neighbors.neighbor_utils import get_neighbor_list_from_neighbor_matrix
from tests.reference.neighbors import all_pairs, assert_pairs, every_image, in_order, tree
from tests.systems import SYSTEMS, crystal

F64 = torch.float64


def named(method, batched):
    def search(positions, cutoff, cell=None, pbc=None, **options):
        described = {"batch_idx": torch.zeros(len(positions), dtype=torch.int32)} if batched else {}
        return neighbor_list(positions, cutoff, cell, pbc, method=method, **described, **options)

    return search


def single(function):
    return lambda positions, cutoff, cell=None, pbc=None, **options: function(
        positions, cutoff, cell=cell, pbc=pbc, **options
    )


def batched(function):
    def search(positions, cutoff, cell=None, pbc=None, **options):
        idx = torch.zeros(len(positions), dtype=torch.int32)
        return function(positions, cutoff, batch_idx=idx, cell=cell, pbc=pbc, **options)

    return search


# every way to ask for one list of one system
SEARCHES = {
    "automatic": named(None, False),
    "naive": named("naive", False),
    "cell_list": named("cell_list", False),
    "automatic, batch": named(None, True),
    "batch_naive": named("batch_naive", True),
    "batch_cell_list": named("batch_cell_list", True),
    "cell_list()": single(neighbors.cell_list),
    "naive_neighbor_list()": single(neighbors.naive_neighbor_list),
    "batch_cell_list()": batched(neighbors.batch_cell_list),
    "batch_naive_neighbor_list()": batched(neighbors.batch_naive_neighbor_list),
}
every_search = pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)


def rows_of(pairs, shifts=None):
    shifts = torch.zeros(pairs.shape[1], 3, dtype=torch.int32) if shifts is None else shifts
    return torch.cat([pairs.T, shifts], dim=1).numpy().astype(np.int64)


def rows_of_matrix(matrix, count, shifts=None):
    i, slot = (torch.arange(matrix.shape[1])[None] < count[:, None]).nonzero().T
    chosen = torch.zeros(len(i), 3) if shifts is None else shifts[i, slot]
    return torch.cat([i[:, None], matrix[i, slot][:, None], chosen], dim=1).numpy().astype(np.int64)


def points(n, seed=0, low=0.0, high=1.0):
    return torch.as_tensor(np.random.default_rng(seed).uniform(low, high, (n, 3)))


def compiled(function):
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def python_says(code, **environment):
    """What a fresh interpreter prints last, as JSON."""
    finished = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    return json.loads(finished.stdout.splitlines()[-1])


# -- N02 to N08: which pairs --------------------------------------------------------------------------------


@every_search
def test_capacities_by_hand_change_nothing(search):
    """N02: 128 atoms that ask and 128 that answer, in a unit cell, with every sufficient capacity."""
    x, cell, pbc = points(256), torch.eye(3, dtype=F64), torch.ones(3, dtype=torch.bool)
    asking = torch.as_tensor(np.random.default_rng(1).permutation(256)[:128]).int()
    expected = every_image(x, 0.3, np.eye(3), (True,) * 3).inside
    expected = expected[np.isin(expected[:, 0], asking)]
    place = torch.empty(256, dtype=torch.long)
    place[asking.long()] = torch.arange(128)
    needed = np.bincount(expected[:, 0]).max()
    results = [search(x, 0.3, cell, pbc, target_indices=asking)]
    for width in (needed, needed + 1, 2 * needed, 1000):
        results.append(search(x, 0.3, cell, pbc, target_indices=asking, max_neighbors=int(width)))
        memory = {
            "neighbor_matrix": torch.full((128, width), 99, dtype=torch.int32),
            "neighbor_matrix_shifts": torch.full((128, width, 3), 99, dtype=torch.int32),
            "num_neighbors": torch.full((128,), 99, dtype=torch.int32),
        }
        results.append(search(x, 0.3, cell, pbc, target_indices=asking, **memory))
        assert all(a is b or a.data_ptr() == b.data_ptr() for a, b in zip(results[-1], (memory["neighbor_matrix"],)))
    for matrix, count, shifts in results:
        found = rows_of_matrix(matrix, count, shifts)
        found[:, 0] = asking.numpy()[found[:, 0]]
        assert np.array_equal(in_order(found), expected)
        assert torch.equal(matrix[:, :needed], results[0][0]) and torch.equal(shifts[:, :needed], results[0][2])
    for options in ({}, {"max_neighbors": int(needed)}, {"max_neighbors": 500}):
        options |= {"target_indices": asking, "return_neighbor_list": True}
        pairs, ptr, shifts = search(x, 0.3, cell, pbc, **options)
        assert np.array_equal(in_order(rows_of(pairs, shifts)), expected) and torch.equal(ptr.diff(), results[0][1])


@every_search
@pytest.mark.parametrize("n_atoms", [1, 2])
def test_tiny_cells_list_each_image_once(search, n_atoms, dtype):
    """N03: cutoffs of 0.5 to 4 cell lengths, in cells of several shapes; no entry twice, symmetric, half is half."""
    rng = np.random.default_rng(n_atoms)
    for shape in (np.eye(3), np.array([[1.0, 0, 0], [0.5, 0.9, 0], [0.3, -0.2, 1.1]])):
        for ratio in (0.5, 1.0 + 1e-3, 1.7, 4.0):
            cell = torch.as_tensor(1.3 * shape).to(dtype)
            x = torch.as_tensor(rng.uniform(-1, 2, (n_atoms, 3))).to(dtype)
            expected = every_image(x.double(), 1.3 * ratio, cell.double(), (True,) * 3, 1e-5 if dtype != F64 else 1e-12)
            for half in (False, True):
                options = {"half_fill": half, "return_neighbor_list": True}
                pairs, _, shifts = search(x, 1.3 * ratio, cell, torch.ones(3, dtype=torch.bool), **options)
                assert_pairs(rows_of(pairs, shifts), expected, half)


@every_search
def test_a_dummy_cell_without_periodicity(search, dtype):
    """N04: water in a cell of 1 angstrom that nobody means, pbc off: the same as without a cell."""
    x = torch.tensor([[0.0, 0.0, 0.12], [0.0, 0.76, -0.48], [0.0, -0.76, -0.48]], dtype=dtype) + 7.3
    off = torch.zeros(3, dtype=torch.bool)
    for half in (False, True):
        matrix, count, shifts = search(x, 1.2, torch.eye(3, dtype=dtype), off, half_fill=half)
        bare = search(x, 1.2, half_fill=half)
        assert torch.equal(matrix, bare[0]) and torch.equal(count, bare[1]) and not shifts.any()
        pairs, ptr, shifts = search(x, 1.2, torch.eye(3, dtype=dtype), off, half_fill=half, return_neighbor_list=True)
        bare = search(x, 1.2, half_fill=half, return_neighbor_list=True)
        assert torch.equal(pairs, bare[0]) and torch.equal(ptr, bare[1]) and not shifts.any()
        assert pairs.shape[1] == (2 if half else 4)


@every_search
def test_a_slab_with_atoms_beyond_its_cell(search):
    """N04: atoms above and below the cell along the open axis are not folded."""
    cell = np.array([[5.0, 0, 0], [1, 6, 0], [0, 0, 4.0]])
    x = points(40, 2, -12.0, 12.0)
    pbc = (True, True, False)
    pairs, _, shifts = search(x, 4.0, torch.as_tensor(cell), torch.tensor(pbc), return_neighbor_list=True)
    assert_pairs(rows_of(pairs, shifts), every_image(x, 4.0, cell, pbc))
    assert not shifts[:, 2].any() and shifts[:, :2].any()


@every_search
def test_unwrapped_positions_give_the_same_vectors_and_energies(search):
    """N05: every atom moved by a lattice vector of its own; shifts refer to the coordinates as given."""
    system = SYSTEMS["rocksalt"]()
    x, cell, pbc = system.positions, system.cell[0], torch.ones(3, dtype=torch.bool)
    moves = torch.as_tensor(np.random.default_rng(3).integers(-5, 6, (len(x), 3)))
    lists = []
    for positions in (x, x + moves.double() @ cell):
        pairs, ptr, shifts, vectors = search(positions, 5.0, cell, pbc, return_neighbor_list=True, return_vectors=True)
        energy = ewald_summation(
            positions,
            system.charges,
            system.cell,
            alpha=0.7,
            k_cutoff=4.0,
            neighbor_list=pairs,
            neighbor_ptr=ptr,
            neighbor_shifts=shifts,
        )
        r = positions[pairs[1].long()] - positions[pairs[0].long()] + shifts.double() @ cell
        torch.testing.assert_close(vectors, r, rtol=0, atol=1e-10)
        lists.append((pairs.long(), shifts.long(), vectors, energy.sum()))
    (pairs, shifts, before, energy), (moved_pairs, moved_shifts, after, moved_energy) = lists
    assert torch.equal(pairs, moved_pairs)
    back = moved_shifts + moves[pairs[1]] - moves[pairs[0]]
    orders = [np.lexsort(np.c_[pairs.T, s].T[::-1]) for s in (shifts, back)]
    assert torch.equal(shifts[orders[0]], back[orders[1]])
    torch.testing.assert_close(before[orders[0]], after[orders[1]], rtol=0, atol=1e-10)
    torch.testing.assert_close(energy, moved_energy, rtol=1e-10, atol=0)


@every_search
def test_left_handed_cells(search):
    """N06: two rows of the cell swapped, atoms kept: the same displacements, energies, forces and virial."""
    system = SYSTEMS["triclinic"]()
    results = []
    for order in ([0, 1, 2], [1, 0, 2], [0, 2, 1], [1, 2, 0]):
        cell = system.cell[0][order]
        pbc = torch.ones(3, dtype=torch.bool)
        options = {"return_neighbor_list": True, "return_vectors": True}
        pairs, ptr, shifts, vectors = search(system.positions, 6.0, cell, pbc, **options)
        rows = torch.empty_like(shifts)
        rows[:, order] = shifts
        found = np.c_[pairs.T.numpy(), rows.numpy()]
        place = np.lexsort(found.T[::-1])
        sums = ewald_summation(
            system.positions,
            system.charges,
            cell[None],
            alpha=0.6,
            k_cutoff=4.0,
            neighbor_list=pairs,
            neighbor_ptr=ptr,
            neighbor_shifts=shifts,
            compute_forces=True,
            compute_virial=True,
        )
        results.append((found[place], vectors[place], *sums))
    for found, *others in results[1:]:
        assert np.array_equal(found, results[0][0])
        for a, b in zip(others, results[0][1:], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("as_ptr", [False, True])
@pytest.mark.parametrize("method", ["naive", "cell_list", "naive_dual_cutoff"])
def test_methods_for_one_system_refuse_a_batch(method, as_ptr):
    """N07: asking for a method for one system with batch information is an error that names the conflict."""
    x = points(4).repeat(2, 1)
    described = {"batch_ptr": torch.tensor([0, 4, 8])} if as_ptr else {"batch_idx": torch.arange(8).int() // 4}
    second = {"cutoff2": 0.5} if "dual" in method else {}
    with pytest.raises(ValueError, match=r"method.*batch"):
        neighbor_list(x, 0.9, method=method, **second, **described)


def test_identical_systems_never_see_each_other():
    """N07: two identical systems at the same place, by every method for batches."""
    x = points(10).repeat(2, 1)
    idx = torch.arange(20).int() // 10
    cell, pbc = torch.eye(3, dtype=F64).expand(2, 3, 3), torch.ones(2, 3, dtype=torch.bool)
    calls = {method: {} for method in ("batch_naive", "batch_cell_list", None)}
    calls["batch_naive_dual_cutoff"] = {"cutoff2": 0.5}
    for method, second in calls.items():
        results = neighbor_list(x, 0.9, cell, pbc, idx, return_neighbor_list=True, method=method, **second)
        for pairs, ptr, _ in (results[:3], results[3:])[: len(results) // 3]:
            assert torch.equal(idx[pairs[0].long()], idx[pairs[1].long()]) and len(pairs[0]) == int(ptr[-1]) > 0
            assert torch.equal(ptr[10:] - ptr[10], ptr[:11])


@pytest.mark.parametrize("name", SEARCHES)
def test_zero_lattice_vectors(name, device):
    """N08: a zero vector along an open axis counts for nothing, an all-zero cell is no cell, on any device."""
    if device.type == "cuda" and "batch" in name:
        pytest.skip("the batch number of this helper is on the CPU; the same kernel runs for one system")
    search = SEARCHES[name]
    x = torch.tensor([[1.0, 2.0, -3.0], [7.5, 8.5, 4.0]], dtype=F64, device=device)
    cell, pbc = np.diag([8.0, 9.0, 0.0]), (True, True, False)
    on = {"device": device}
    found = search(x, 15.0, torch.as_tensor(cell, **on), torch.tensor(pbc, **on), return_neighbor_list=True)
    assert_pairs(rows_of(found[0].cpu(), found[2].cpu()), every_image(x.cpu(), 15.0, cell, pbc))
    zero = torch.zeros(3, 3, dtype=F64, **on)
    matrix, count, shifts = search(x, 15.0, zero, torch.zeros(3, dtype=torch.bool, **on))
    bare = search(x, 15.0)
    assert torch.equal(matrix, bare[0]) and torch.equal(count, bare[1]) and not shifts.any()
    with pytest.raises(ValueError, match="cell"):
        search(x, 15.0, torch.as_tensor(cell, **on), torch.ones(3, dtype=torch.bool, **on))


# -- N09 to N14: buffers ------------------------------------------------------------------------------------


def two_systems(seed=4, spread=(1.0, 1.0)):
    x = [points(30, seed + n) * 6.0 * s for n, s in enumerate(spread)]
    return torch.cat(x), torch.arange(60).int() // 30


def buffers(n_rows, width, value=77):
    return {
        "neighbor_matrix": torch.full((n_rows, width), value, dtype=torch.int32),
        "neighbor_matrix_shifts": torch.full((n_rows, width, 3), value, dtype=torch.int32),
        "num_neighbors": torch.full((n_rows,), value, dtype=torch.int32),
    }


@pytest.mark.parametrize("method", ["batch_naive", "batch_cell_list", None])
@pytest.mark.parametrize("fill_value", [None, -1, 0])
def test_rows_that_shrink_leave_nothing_behind(method, fill_value):
    """N09: atoms move apart, so counts drop; rebuilt into the same buffers, for all systems and for one of two."""
    x, idx = two_systems()
    cell, pbc = 12.0 * torch.eye(3, dtype=F64).expand(2, 3, 3), torch.ones(2, 3, dtype=torch.bool)
    memory = buffers(60, 40)
    same = {"batch_idx": idx, "fill_value": fill_value, "method": method}
    _, before, _ = neighbor_list(x, 3.0, cell, pbc, **memory, **same)
    before = before.clone()
    apart, _ = two_systems(spread=(1.9, 1.9))
    # the first system moves and is rebuilt, then the second one, then all is built again
    for flags in (torch.tensor([True, False]), torch.tensor([False, True]), None):
        x = torch.cat([apart[:30], x[30:]]) if flags is not None and flags[0] else apart
        rebuilt = {} if flags is None else {"rebuild_flags": flags}
        neighbor_list(x, 3.0, cell, pbc, **memory, **same, **rebuilt)
        matrix, shifts, count = memory.values()
        fresh = neighbor_list(x, 3.0, cell, pbc, max_neighbors=40, **same)
        assert all(torch.equal(a, b) for a, b in zip((matrix, count, shifts), fresh, strict=True))
        beyond = torch.arange(40)[None] >= count[:, None]
        assert (matrix[beyond] == (60 if fill_value is None else fill_value)).all()
        pairs, ptr, coo_shifts = neighbor_list(x, 3.0, cell, pbc, return_neighbor_list=True, **same)
        # -1 is no atom: the counts alone must do
        from_matrix = get_neighbor_list_from_neighbor_matrix(matrix, count, shifts, fill_value=-1)
        assert all(torch.equal(a, b) for a, b in zip(from_matrix, (pairs, ptr, coo_shifts), strict=True))
    assert (count < before).any()
    # a system without a flag keeps its rows, wherever its atoms are now
    kept = [t.clone() for t in memory.values()]
    neighbor_list(x.flip(0), 3.0, cell, pbc, **memory, **same, rebuild_flags=torch.zeros(2, dtype=torch.bool))
    assert all(torch.equal(a, b) for a, b in zip(kept, memory.values(), strict=True))


@every_search
def test_a_shrinking_box_is_exact_or_overflows(search):
    """N11: capacities from a first build, the box scaled down to 0.6: the exact pairs, or an overflow."""
    system = crystal("rocksalt", 5.6, 2, 0.1)
    pbc = torch.ones(3, dtype=torch.bool)
    width = int(search(system.positions, 5.0, system.cell[0], pbc)[1].max())
    outcomes = set()
    for capacity in (width, 12 * width):
        for factor in (1.0, 0.95, 0.8, 0.6):
            x, cell = system.positions * factor, system.cell[0] * factor
            expected = all_pairs(x, 5.0, cell, (True,) * 3)
            memory = buffers(len(x), capacity)
            try:
                matrix, count, shifts = search(x, 5.0, cell, pbc, **memory)
                assert [tuple(r) for r in in_order(rows_of_matrix(matrix, count, shifts)).tolist()] == expected
                outcomes.add("exact")
            except NeighborOverflowError as error:
                assert error.max_neighbors == capacity
                assert error.num_neighbors == np.bincount([p[0] for p in expected]).max() > capacity
                outcomes.add("overflow")
    assert outcomes == {"exact", "overflow"}


@every_search
@pytest.mark.parametrize("as_list", [False, True])
def test_overfull_rows_raise(search, as_list):
    """N12: rows one too short, by `max_neighbors` or by given memory."""
    x, cell, pbc = points(60, 5) * 5.0, 5.0 * torch.eye(3, dtype=F64), torch.ones(3, dtype=torch.bool)
    needed = int(search(x, 2.5, cell, pbc)[1].max())
    for room in (0, 1, needed - 1):
        for options in ({"max_neighbors": room}, buffers(60, room)):
            with pytest.raises(NeighborOverflowError) as caught:
                search(x, 2.5, cell, pbc, return_neighbor_list=as_list, **options)
            assert (caught.value.max_neighbors, caught.value.num_neighbors) == (room, needed)


def canary(shape, border=512, value=-12345):
    """Memory for a result in the middle of a larger piece, and a function that says whether the rest is untouched."""
    whole = torch.full((2 * border + int(np.prod(shape)),), value, dtype=torch.int32)
    inner = whole[border : len(whole) - border].view(shape)
    return inner, lambda: bool((whole[:border] == value).all() and (whole[len(whole) - border :] == value).all())


@pytest.mark.parametrize("mode", ["unchecked", "compiled"])
@pytest.mark.parametrize("method", ["batch_naive", "batch_cell_list", None])
def test_overfull_rows_without_checks_are_visible_and_stay_in_bounds(method, mode):
    """N12: the counts are those of the whole list, so count > width shows, and nothing is written beyond the rows."""
    x, idx = two_systems()
    cell, pbc = 6.0 * torch.eye(3, dtype=F64).expand(2, 3, 3), torch.ones(2, 3, dtype=torch.bool)
    _, true_count, _ = neighbor_list(x, 3.0, cell, pbc, batch_idx=idx)

    def build(x, matrix, shifts, count):
        memory = {"neighbor_matrix": matrix, "neighbor_matrix_shifts": shifts, "num_neighbors": count}
        return neighbor_list(x, 3.0, cell, pbc, idx, method=method, check=mode == "compiled", **memory)

    def allocate(x, width):
        return neighbor_list(x, 3.0, cell, pbc, idx, method=method, check=mode == "compiled", max_neighbors=width)

    if mode == "compiled":
        build, allocate = compiled(build), compiled(allocate)
    full = neighbor_list(x, 3.0, cell, pbc, batch_idx=idx, method=method)[0]
    for width in (0, 1, 5, int(true_count.max()) - 1, int(true_count.max())):
        (matrix, safe1), (shifts, safe2), (count, safe3) = canary((60, width)), canary((60, width, 3)), canary((60,))
        for results in (build(x, matrix, shifts, count), allocate(x, width)):
            assert torch.equal(results[1], true_count)
            assert torch.equal(results[0], full[:, :width])
        assert safe1() and safe2() and safe3()
        assert torch.equal(matrix, full[:, :width]) and torch.equal(count, true_count)


@every_search
def test_crowded_bins_lose_nothing(search):
    """N12: most atoms in one bin, others alone in theirs; bins have no capacity of their own."""
    rng = np.random.default_rng(6)
    x = np.r_[rng.normal(scale=0.3, size=(300, 3)), rng.uniform(-20, 20, (300, 3))]
    cell, pbc = 40.0 * np.eye(3), (True, True, False)
    pairs, _, shifts = search(
        torch.as_tensor(x), 1.5, torch.as_tensor(cell), torch.tensor(pbc), return_neighbor_list=True
    )
    assert_pairs(rows_of(pairs, shifts), tree(x, 1.5, cell, pbc))


@every_search
def test_clustered_points_with_default_arguments(search):
    """N13: 1,000 normally distributed points in a cell of 10."""
    x = np.random.default_rng(7).normal(size=(1000, 3))
    cell, pbc = 10.0 * np.eye(3), (True,) * 3
    matrix, count, shifts = search(torch.as_tensor(x), 2.5, torch.as_tensor(cell), torch.tensor(pbc))
    assert_pairs(rows_of_matrix(matrix, count, shifts), tree(x, 2.5, cell, pbc))
    assert int(count.max()) > 400


@every_search
@pytest.mark.parametrize("as_list", [False, True])
def test_the_error_carries_the_size_that_works(search, as_list):
    """N13: name, needed and given size; a second call with the needed size succeeds."""
    x = torch.as_tensor(np.random.default_rng(7).normal(size=(300, 3)))
    cell, pbc = 10.0 * torch.eye(3, dtype=F64), torch.ones(3, dtype=torch.bool)
    expected = search(x, 2.5, cell, pbc, return_neighbor_list=as_list)
    with pytest.raises(NeighborOverflowError, match=r"max_neighbors.* 16 .*\d\d\d") as caught:
        search(x, 2.5, cell, pbc, return_neighbor_list=as_list, max_neighbors=16)
    again = search(x, 2.5, cell, pbc, return_neighbor_list=as_list, max_neighbors=caught.value.num_neighbors)
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))


@pytest.mark.parametrize("name", ["naive", "batch_naive"])
def test_dual_cutoffs_say_which_list_overflows(name):
    """N13: the two widths are told apart, and the needed one works."""
    x = torch.as_tensor(np.random.default_rng(8).normal(size=(100, 3)))
    function = getattr(neighbors, f"{name}_neighbor_list_dual_cutoff")
    described = {"batch_idx": torch.zeros(100, dtype=torch.int32)} if name == "batch_naive" else {}
    _, first, _, second = function(x, 1.0, 2.0, **described)
    needed = [int(first.max()), int(second.max())]
    for which in (0, 1):
        room = {f"max_neighbors{n + 1}": most - (n == which) for n, most in enumerate(needed)}
        with pytest.raises(NeighborOverflowError) as caught:
            function(x, 1.0, 2.0, **described, **room)
        assert caught.value.max_neighbors == needed[which] - 1 and caught.value.num_neighbors == needed[which]
        room[f"max_neighbors{which + 1}"] = caught.value.num_neighbors
        assert torch.equal(function(x, 1.0, 2.0, **described, **room)[1], first)


@pytest.mark.parametrize("method", ["batch_naive", "batch_cell_list", None])
@pytest.mark.parametrize("collapsed", ["one place", "not finite"])
def test_one_collapsed_structure_leaves_the_others_alone(method, collapsed):
    """N14: batch of 8, one of them broken. The counts are a status per atom; the others equal their single results."""
    systems = [points(25, 10 + n) * 6.0 for n in range(8)]
    systems[3] = torch.zeros(25, 3, dtype=F64) if collapsed == "one place" else systems[3] / 0.0
    one = {"max_neighbors": 20, "method": method and method.removeprefix("batch_")}
    alone = [neighbor_list(x, 2.5, 6.0 * torch.eye(3, dtype=F64), **one) for n, x in enumerate(systems) if n != 3]
    x, idx = torch.cat(systems), torch.arange(200).int() // 25
    cell = 6.0 * torch.eye(3, dtype=F64).expand(8, 3, 3)
    same = {"batch_idx": idx, "method": method}
    if collapsed == "one place":
        with pytest.raises(NeighborOverflowError) as caught:
            neighbor_list(x, 2.5, cell, max_neighbors=20, **same)
        assert caught.value.system_index == 3
        matrix, count, _ = neighbor_list(x, 2.5, cell, **same)  # enough room: all is well
        assert (count[75:100] == 24).all()
    else:
        with pytest.raises(ValueError, match="positions"):
            neighbor_list(x, 2.5, cell, **same)
    matrix, count, shifts = neighbor_list(x, 2.5, cell, max_neighbors=20, check=False, **same)
    status = torch.stack([part.max() > 20 for part in count.split(25)])
    assert status.tolist() == [n == 3 for n in range(8)]
    good = [n for n in range(8) if n != 3]
    for n, (its_matrix, its_count, its_shifts) in zip(good, alone, strict=True):
        rows = slice(25 * n, 25 * (n + 1))
        filled = torch.arange(20)[None] < its_count[:, None]
        assert torch.equal(count[rows], its_count) and torch.equal(shifts[rows], its_shifts)
        assert torch.equal(matrix[rows][filled], its_matrix[filled] + 25 * n)


# -- N15 and N16: memory ------------------------------------------------------------------------------------

# Peak resident memory of one call beyond what was there before, its result included. The kernel keeps the mark for
# each process and resets it on demand. Every larger buffer gets pages of its own (the threshold below), so nothing
# hides in memory that an earlier call left behind. Memory that is reserved but never touched does not count.
MEASURE = """
import json, numpy as np, torch
from nvalchemiops.torch.neighbors import neighbor_list

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

def extra(*arguments, **options):
    open("/proc/self/clear_refs", "w").write("5")
    before = status("VmRSS")
    result = neighbor_list(*arguments, **options)
    return status("VmHWM") - before, result

def uniform(n_atoms, *edges, seed=0):
    return torch.as_tensor(np.random.default_rng(seed).uniform(0, edges, (n_atoms, 3)))

extra(uniform(50, 5, 5, 5), 2.0, torch.eye(3, dtype=torch.float64) * 5, return_neighbor_list=True)
extra(uniform(5000, 50, 50, 50), 2.0, torch.eye(3, dtype=torch.float64) * 50, return_neighbor_list=True)
"""
OWN_PAGES = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
measures = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="peak memory is read from Linux's /proc"
)


@measures
def test_a_huge_dummy_cell_costs_no_memory():
    """N15: 3,000 atoms in 100 angstrom, cells of 1e4 to 1e7 with pbc off (and on): below 64 MiB, the same pairs."""
    found = python_says(
        MEASURE
        + """
x = uniform(3000, 100, 100, 100)
bare = neighbor_list(x, 8.0, return_neighbor_list=True)[0]
out = []
for extent in (1e4, 1e5, 1e7):
    for periodic in (False, True):
        cell, pbc = extent * torch.eye(3, dtype=torch.float64), torch.full((3,), periodic)
        for method in ("cell_list", None):
            memory, found = extra(x, 8.0, cell, pbc, return_neighbor_list=True, method=method)
            same = found[0].shape == bare.shape and not found[2].any()
            ours, theirs = (p[:, (p[0].long() * 3000 + p[1]).argsort()] for p in (found[0], bare))
            out.append((memory, bool(same and torch.equal(ours, theirs))))
print(json.dumps(out))
""",
        **OWN_PAGES,
    )
    assert len(found) == 12 and all(same for _, same in found)
    assert max(memory for memory, _ in found) < 64 * 2**20


@measures
def test_vacuum_costs_no_memory():
    """N15: a slab of 60,000 atoms with ten times the vacuum needs at most 1.2 times the memory."""
    found = python_says(
        MEASURE
        + """
x = uniform(60000, 200, 200, 15)
out = []
for periodic in (True, False):
    for height in (30.0, 300.0):
        cell = torch.diag(torch.tensor([200.0, 200.0, height], dtype=torch.float64))
        memory, found = extra(x, 4.0, cell, torch.tensor([True, True, periodic]), return_neighbor_list=True)
        out.append((memory, found[0].shape[1]))
        del found
print(json.dumps(out))
""",
        **OWN_PAGES,
    )
    assert len({n_pairs for _, n_pairs in found}) == 1
    for thin, thick in (found[:2], found[2:]):
        assert thick[0] <= 1.2 * thin[0]


@measures
def test_memory_of_100_000_atoms():
    """N16: the list form, at the density of water, within 3 times the bytes of its pairs, and linear."""
    found = python_says(
        MEASURE
        + """
out = []
for n_atoms in (100_000, 200_000):
    edge = (n_atoms / 0.1) ** (1 / 3)
    cell = edge * torch.eye(3, dtype=torch.float64)
    memory, found = extra(uniform(n_atoms, edge, edge, edge), 6.0, cell, return_neighbor_list=True)
    out.append((memory, sum(t.numel() * t.element_size() for t in (found[0], found[2]))))
    del found
print(json.dumps(out))
""",
        **OWN_PAGES,
    )
    for memory, size in found:
        assert memory <= 3.0 * size
    assert found[1][0] <= 2.2 * found[0][0]


# -- N18 to N20: callers ------------------------------------------------------------------------------------


def layouts(x, cell, idx, pbc):
    """The same values, laid out in other ways."""
    n = len(x)
    strided = torch.zeros(2 * n, 3, dtype=x.dtype)
    strided[::2] = x
    offset = torch.cat([x.new_full((5, 3), torch.nan), x])[5:]
    wide = torch.cat([x, x], dim=1)[:, 3:]
    yield "every other row", strided[::2], cell, idx, pbc
    yield "column-major", x.T.contiguous().T, cell.mT.contiguous().mT, idx, pbc
    yield "storage offset", offset, torch.cat([cell, cell])[len(cell) :], torch.cat([idx, idx])[n:], pbc
    yield "columns of a wider tensor", wide, cell, torch.stack([idx, idx], 1)[:, 1], pbc
    yield "expanded", x, cell[:1].expand(len(cell), 3, 3), idx, pbc[:1, :1].expand(len(cell), 3)


@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("method", ["batch_naive", "batch_cell_list"])
def test_layouts_of_the_input_do_not_matter(method, mode):
    """N18: slices, transposes, offsets and expanded tensors give the same as contiguous copies."""
    x, idx = two_systems()
    cell = torch.as_tensor(np.array([[6.0, 0, 0], [1.5, 5.5, 0], [-1, 2, 6]])).expand(2, 3, 3).contiguous()
    pbc = torch.ones(2, 3, dtype=torch.bool)

    def matrix(x, cell, idx, pbc):
        options = {"max_neighbors": 64, "return_vectors": True, "return_distances": True}
        return neighbor_list(x, 3.0, cell, pbc, idx, method=method, **options)

    def pairs(x, cell, idx, pbc):
        options = {"return_neighbor_list": True, "return_vectors": True, "return_distances": True}
        return neighbor_list(x, 3.0, cell, pbc, idx, method=method, **options)

    expected = [f(x, cell, idx, pbc) for f in (matrix, pairs)]
    for name, *arguments in layouts(x, cell, idx, pbc):
        assert all(torch.equal(a, b) for a, b in zip(arguments, (x, cell, idx, pbc)))
        if mode == "compiled":
            torch.compiler.reset()
        for function, wanted in zip((matrix, pairs), expected):
            function = compiled(function) if mode == "compiled" else function
            found = function(*arguments)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), name


def test_eager_calls_need_no_compiler(tmp_path):
    """N19: no C compiler on the PATH and compilation off: every eager op of torch.neighbors runs, nothing compiles."""
    found = python_says(
        """
        import json, sys, torch
        from torch._dynamo.utils import counters
        from nvalchemiops.torch import neighbors
        from nvalchemiops.torch.neighbors import formats, neighbor_utils, rebuild_detection, verlet

        x = torch.rand(20, 3, dtype=torch.float64).requires_grad_()
        cell, pbc = torch.eye(3, dtype=torch.float64), torch.ones(3, dtype=torch.bool)
        idx = torch.arange(20).int() // 10
        cells, pbcs = cell.expand(2, 3, 3), pbc.expand(2, 3)
        geometry = {"return_vectors": True, "return_distances": True}
        called = set()

        def call(name, *arguments, **options):
            called.add(name)
            found = neighbors
            for part in name.split("."):
                found = getattr(found, part)
            return found(*arguments, **options)

        for as_list in (False, True):
            for half in (False, True):
                form = {"return_neighbor_list": as_list, "half_fill": half}
                for method in ("naive", "cell_list", None):
                    results = call("neighbor_list", x, 0.7, cell, pbc, method=method, **form, **geometry)
                    results[-1].square().sum().backward()
                for method in ("batch_naive", "batch_cell_list", None):
                    call("neighbor_list", x, 0.7, cells, pbcs, idx, method=method, **form, **geometry)
                call("neighbor_list", x, 0.7, cell, pbc, cutoff2=0.5, **form)
                call("neighbor_list", x, 0.7, cell, pbc, max_neighbors=300, check=False, **form)
                call("cell_list", x, 0.7, cell, pbc, **form, **geometry)
                call("naive_neighbor_list", x, 0.7, cell, pbc, **form, **geometry)
                call("naive_neighbor_list_dual_cutoff", x, 0.7, 0.5, pbc, cell, **form)
                call("batch_cell_list", x, 0.7, cells, pbcs, idx, **form, **geometry)
                call("batch_naive_neighbor_list", x, 0.7, idx, None, pbcs, cells, **form, **geometry)
                call("batch_naive_neighbor_list_dual_cutoff", x, 0.7, 0.5, idx, None, pbcs, cells, **form)
        call("estimate_cell_list_sizes", cell, pbc, 0.3)
        call("estimate_batch_cell_list_sizes", cells, pbcs, 0.3)
        call("suggest_neighbor_list_method", x, 0.7, cell, pbc)
        matrix, count, shifts = neighbors.neighbor_list(x, 0.7, cell, pbc)
        call("neighbor_utils.estimate_max_neighbors", 0.7)
        call("neighbor_utils.get_neighbor_list_from_neighbor_matrix", matrix, count, shifts)
        y = x.detach()
        for name in rebuild_detection.__all__:
            several = "batch" in name
            system = {"cell": cells if several else cell, "pbc": pbcs if several else pbc}
            system |= {"batch_idx": idx} if several else {}
            if "cell_list" not in name:
                system |= {"reference_positions": y, "skin_distance_threshold": 0.1}
            call(f"rebuild_detection.{name}", current_positions=y, **system)
        pairs, ptr, shift = neighbors.neighbor_list(x, 0.7, cell, pbc, return_neighbor_list=True)
        halves = call("formats.full_to_half", pairs, ptr, shift)
        call("formats.half_to_full", *halves)
        call("formats.get_neighbor_list_from_neighbor_matrix", matrix, count, shifts)
        call("formats.get_neighbor_matrix_from_neighbor_list", pairs, ptr, shift)
        call("formats.check_full_list", pairs, ptr, shift)
        call("formats.list_geometry", x, pairs, shift, cell)
        call("formats.matrix_geometry", x, matrix, count, shifts, cell)
        verlet_list = verlet.VerletList(0.5, 0.2)
        verlet_list(x, cell)
        verlet_list(x + 0.3, cell)
        heavy = sorted(name for name in sys.modules if name in ("torch._inductor.compile_fx", "triton"))
        counted = {name: dict(c) for name, c in counters.items() if c}
        functions = {name: f"formats.{name}" for name in formats.__all__} | {"VerletList": None}
        missing = [name for name in neighbors.__all__ if functions.get(name, name) not in called | {None}]
        missing += [name for name in formats.__all__ if functions[name] not in called]
        print(json.dumps([counted, heavy, missing]))
        """,
        PATH=str(tmp_path),
        CC="",
        CXX="",
        TORCH_COMPILE_DISABLE="1",
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "inductor"),
    )
    counted, heavy, missing = found
    assert counted == {} and heavy == [] and not list(tmp_path.rglob("*.*"))
    assert missing == [], "public functions that this test does not call"


def energy_and_forces(x, cell):
    """A pair energy on a list of unknown length, and forces by gathering over its rows."""
    pairs, _, _, distances, vectors = neighbor_list(
        x, 2.0, cell, return_neighbor_list=True, return_distances=True, return_vectors=True
    )
    energy = 0.5 * (2.0 - distances).square().sum()
    slope = -2.0 * (2.0 - distances) / distances
    return energy, torch.zeros_like(x).index_add(0, pairs[0].long(), slope.unsqueeze(-1) * vectors)


def crowd(n_atoms, seed):
    return points(n_atoms, seed) * 5.0


def test_compiled_dynamics_with_changing_counts():
    """N20: 50 steps with other numbers of atoms and pairs, also none at all: at most 2 compilations."""
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(energy_and_forces, backend=counter, fullgraph=True)
    cell = 5.0 * torch.eye(3, dtype=F64)
    rng = np.random.default_rng(9)
    sizes = [37, *rng.integers(2, 120, 47).tolist(), 2, 64]
    for step, n_atoms in enumerate(sizes):
        x = crowd(n_atoms, step) * (1e-3 if step == 20 else 1.0)
        x = x + torch.arange(n_atoms)[:, None] * (2.0 if step == 20 else 0.0)
        box = cell * (1000.0 if step == 20 else 1.0)
        torch._dynamo.mark_dynamic(x, 0)
        found = function(x, box)
        expected = energy_and_forces(x, box)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert counter.frame_count <= 2
    assert float(energy_and_forces(crowd(37, 0), cell)[0]) > 0.0


def test_compiled_gradients_with_changing_counts():
    """N20: the same with the forces by autograd, through a list of unknown length."""
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(lambda x, cell: energy_and_forces(x, cell)[0], backend=counter, fullgraph=True)
    cell = 5.0 * torch.eye(3, dtype=F64)
    for step in range(12):
        x = crowd(20 + 7 * step, step).requires_grad_()
        torch._dynamo.mark_dynamic(x, 0)
        (gradient,) = torch.autograd.grad(function(x, cell), x)
        torch.testing.assert_close(-gradient, energy_and_forces(x.detach(), cell)[1], rtol=1e-10, atol=1e-10)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("method", ["naive", "cell_list", None])
def test_fixed_capacity_traces_whole(method):
    """N20: the matrix with a given width is one static graph with gradients; it says if it is too narrow."""

    def energy(x, cell):
        options = {"max_neighbors": 48, "return_distances": True, "method": method}
        _, count, _, distances = neighbor_list(x, 2.0, cell, **options)
        filled = torch.arange(48) < count.unsqueeze(-1)
        return torch.where(filled, (2.0 - distances).square(), 0.0).sum(), count

    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(energy, backend=counter, fullgraph=True)
    cell = 5.0 * torch.eye(3, dtype=F64)
    for step in range(5):
        x = crowd(60, step).requires_grad_()
        found, count = function(x, cell)
        expected, _ = energy(x, cell)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        gradients = [torch.autograd.grad(e, x)[0] for e in (found, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)
        assert int(count.max()) <= 48
    assert counter.frame_count == 1
    packed = crowd(60, 0) * 0.2
    assert int(function(packed, cell)[1].max()) > 48


# -- N21 and N22: nothing, and padding ----------------------------------------------------------------------

EMPTY = {
    "no atoms": (torch.zeros(0, 3, dtype=F64), None),
    "one atom": (torch.ones(1, 3, dtype=F64), None),
    "two far atoms": (torch.tensor([[0.0, 0, 0], [9.0, 0, 0]], dtype=F64), None),
    "empty members": (torch.tensor([[0.0, 0, 0], [9.0, 0, 0]], dtype=F64), torch.tensor([0, 0, 1, 1, 2, 2])),
    "no atoms in three systems": (torch.zeros(0, 3, dtype=F64), torch.tensor([0, 0, 0, 0])),
}


@pytest.mark.parametrize("periodic", [False, True])
@pytest.mark.parametrize("name", EMPTY)
def test_no_pairs_no_atoms_no_trouble(name, periodic):
    """N21: empty outputs of the right rank, zero energy, and a backward pass that works."""
    x, ptr = EMPTY[name]
    n_atoms = len(x)
    described = {} if ptr is None else {"batch_ptr": ptr.int()}
    if periodic:
        described["cell"] = (
            20.0 * torch.eye(3, dtype=F64) if ptr is None else 20.0 * torch.eye(3, dtype=F64).expand(len(ptr) - 1, 3, 3)
        )
    methods = ("batch_naive", "batch_cell_list", None) if ptr is not None else ("naive", "cell_list", None)
    for method in methods:
        for room in (None, 0, 3):
            leaf = x.clone().requires_grad_()
            options = {"max_neighbors": room, "method": method, "return_distances": True, "return_vectors": True}
            matrix, count, *shifts, distances, vectors = neighbor_list(leaf, 2.0, **options, **described)
            width = room or 0
            assert matrix.shape == (n_atoms, width) and (matrix == n_atoms).all() and not count.any()
            assert [s.shape for s in shifts] == [(n_atoms, width, 3)] * periodic
            assert distances.shape == (n_atoms, width) and vectors.shape == (n_atoms, width, 3)
            (gradient,) = torch.autograd.grad(distances.sum() + vectors.sum(), leaf)
            assert gradient.shape == x.shape and not gradient.any()
            pairs, rows, *shifts, distances, vectors = neighbor_list(
                leaf, 2.0, return_neighbor_list=True, **options, **described
            )
            assert pairs.shape == (2, 0) and rows.tolist() == [0] * (n_atoms + 1)
            assert [s.shape for s in shifts] == [(0, 3)] * periodic
            assert distances.shape == (0,) and vectors.shape == (0, 3)
            (gradient,) = torch.autograd.grad(distances.sum() + vectors.sum(), leaf)
            assert gradient.shape == x.shape and not gradient.any()


def test_padding_has_no_gradient():
    """N22: padded slots, and pairs at zero distance: all gradients finite, those of the unpadded list."""
    base = points(12, 11) * 4.0
    base[3] = base[2]  # one on top of the other
    cell = 4.0 * torch.eye(3, dtype=F64)

    def gradients(**options):
        x, c = base.clone().requires_grad_(), cell.clone().requires_grad_()
        results = neighbor_list(x, 2.5, c, return_distances=True, return_vectors=True, **options)
        distances, vectors = results[-2:]
        energy = (torch.exp(-distances) * (vectors @ vectors.new_tensor([1.0, 0.5, 2.0])).square()).sum()
        first = torch.autograd.grad(energy, (x, c), create_graph=True)
        second = torch.autograd.grad(first[0].square().sum(), (x, c))
        return distances, vectors, *first, *second

    exact = gradients(return_neighbor_list=True)[2:]
    for fill_value in (None, 0, 3, -1):
        distances, vectors, *padded = gradients(max_neighbors=90, fill_value=fill_value)
        count = neighbor_list(base, 2.5, cell)[1]
        beyond = torch.arange(90)[None] >= count[:, None]
        assert not distances[beyond].any() and not vectors[beyond].any()
        for a, b in zip(padded, exact, strict=True):
            assert a.isfinite().all()
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    # weights on the padding alone: exactly zero
    x = base.clone().requires_grad_()
    distances, vectors = neighbor_list(x, 2.5, cell, max_neighbors=90, return_distances=True, return_vectors=True)[-2:]
    (gradient,) = torch.autograd.grad(distances[beyond].sum() + vectors[beyond].exp().sum(), x)
    assert not gradient.any()


# -- D05 and R05 --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("order", [(3.0, 6.0), (6.0, 3.0)])
def test_one_build_for_two_cutoffs(half, order):
    """D05: one call serves a model and a dispersion term: each list as if built alone, whichever is longer."""
    system = SYSTEMS["rocksalt"]()
    x, cell, pbc = system.positions, system.cell[0], torch.ones(3, dtype=torch.bool)
    idx = torch.zeros(len(x), dtype=torch.int32)
    for as_list in (False, True):
        form = {"half_fill": half, "return_neighbor_list": as_list}
        alone = [t for cutoff in order for t in neighbor_list(x, cutoff, cell, pbc, **form)]
        a, b = order
        calls = [
            neighbor_list(x, a, cell, pbc, cutoff2=b, **form),
            neighbor_list(x, a, cell, pbc, cutoff2=b, method="naive_dual_cutoff", **form),
            neighbors.naive_neighbor_list_dual_cutoff(x, a, b, pbc, cell, **form),
            neighbors.batch_naive_neighbor_list_dual_cutoff(x, a, b, idx, None, pbc[None], cell[None], **form),
        ]
        for results in calls:
            assert all(torch.equal(t, u) for t, u in zip(results, alone, strict=True))
    # the surplus of the longer list is what the distance tells
    long = neighbor_list(x, 6.0, cell, pbc, half_fill=half, return_neighbor_list=True, return_distances=True)
    short = neighbor_list(x, 3.0, cell, pbc, half_fill=half, return_neighbor_list=True)
    near = long[3] < 3.0
    kept = in_order(rows_of(long[0][:, near], long[2][near]))
    assert np.array_equal(kept, in_order(rows_of(short[0], short[2])))


def test_a_large_search_uses_all_threads(threads, monkeypatch):
    """R05: the documented number of threads, torch's, is what a search of 10,000 atoms uses; the list is the same."""
    asked = []
    run = core._run
    monkeypatch.setattr(core, "_run", lambda task, count: (asked.append(count), run(task, count))[1])
    edge = (10_000 / 0.1) ** (1 / 3)
    x, cell = points(10_000, 12) * edge, edge * torch.eye(3, dtype=F64)
    results, used = [], []
    for count in (1, 2, 3):
        threads(count)
        neighbor_list(x, 5.0, cell)  # how long the first launch of a kernel took decides how the second is split
        asked.clear()
        results.append(neighbor_list(x, 5.0, cell))
        used.append(max(asked, default=1))
    assert used == [1, 2, 3]
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


# -- what a review found: crashes at the ends of numbers ------------------------------------------


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_atoms_at_opposite_ends_of_the_bins(axis):
    """Bins end at some distance: atoms beyond share the last ones, and search no more than these."""
    x = torch.zeros(2, 3, dtype=torch.float64)
    x[:, axis] = torch.tensor([-1e12, 1e12])
    assert not neighbor_list(x, 1.0, method="cell_list")[1].any()
    x = torch.rand(300, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 10.0
    x[:, axis] += torch.tensor([-1e10] * 150 + [1e10] * 150)
    _, count = neighbor_list(x, 5.0)
    assert torch.equal(count, neighbor_list(x, 5.0, method="naive")[1]) and count.sum() > 0


def test_a_batch_of_no_system_has_no_atoms():
    x, idx = torch.rand(6, 3), torch.zeros(6, dtype=torch.int32)
    rows = {"neighbor_matrix": torch.zeros(6, 9).int(), "num_neighbors": torch.zeros(6).int()}
    for options in (
        {"batch_ptr": torch.tensor([0])},
        {"batch_ptr": torch.tensor([0]), "check": False},
        {"cell": torch.zeros(0, 3, 3), "batch_idx": idx},
        {"cell": torch.eye(3), "pbc": torch.zeros(0, 3, dtype=torch.bool), "batch_idx": idx},
        {"batch_idx": idx, "rebuild_flags": torch.zeros(0, dtype=torch.bool), **rows},
    ):
        with pytest.raises(ValueError, match=r"batch_ptr|rebuild_flags"):
            neighbor_list(x, 1.0, **options)
    pairs, ptr, shifts = neighbor_list(x[:0], 1.0, torch.zeros(0, 3, 3), batch_idx=idx[:0], return_neighbor_list=True)
    assert pairs.shape == (2, 0) and ptr.tolist() == [0] and shifts.shape == (0, 3)


def test_more_neighbors_than_int32_counts_are_refused():
    x, cell, along = torch.zeros(17, 3, dtype=torch.float64), torch.eye(3, dtype=torch.float64), [True, False, False]
    with pytest.raises(ValueError, match="cutoff"):
        neighbor_list(x, 2.0**26 - 1, cell, torch.tensor(along), target_indices=torch.tensor([0]), max_neighbors=4)


@pytest.mark.parametrize("options", [{}, {"max_neighbors": 4}, {"return_neighbor_list": True}])
def test_coordinates_that_overflow_are_named(options):
    for large in (1e308, -1.7e308):
        with pytest.raises(ValueError, match="positions"):
            neighbor_list(torch.tensor([[large, 0.0, 0.0]]).double(), 0.05, 0.1 * torch.eye(3).double(), **options)


def test_lists_under_vmap_are_checked():
    x, cell = torch.rand(2, 20, 3), 2.0 * torch.eye(3)

    def matrix(x, room):
        return neighbor_list(x, 1.0, cell, max_neighbors=room)[0]

    found = torch.vmap(lambda x: matrix(x, 60))(x)
    assert torch.equal(found, torch.stack([matrix(part, 60) for part in x]))
    with pytest.raises(NeighborOverflowError, match="max_neighbors"):
        torch.vmap(lambda x: matrix(x, 2))(x)
    x[1, 3] = torch.nan
    with pytest.raises(ValueError, match="positions"):
        torch.vmap(lambda x: matrix(x, 60))(x)


def test_bins_for_more_systems_than_memory_has():
    """Systems that are only numbers take no bins of their own."""
    n = 40_000
    x = torch.rand(n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 100.0
    idx = torch.arange(n, dtype=torch.int32) // 50
    options = {"batch_idx": idx, "max_neighbors": 60}
    tracked = neighbor_list(x, 2.0, method="batch_cell_list", check=False, **options)
    assert all(torch.equal(a, b) for a, b in zip(tracked, neighbor_list(x, 2.0, **options), strict=True))
