"""What users of neighbor lists reported: which pairs there are, nothing to find, padding, one build for two uses.

What they reported of buffers is in test_buffers.py, of calls and compilers in test_callers.py, of perfect crystals and
repeated results in test_exactness.py, of lists that outlive a step in test_rebuild.py and test_verlet.py.
"""

import numpy as np
import pytest
import torch

from nvalchemiops import threads as core_threads
from nvalchemiops.torch import neighbors
from nvalchemiops.torch.interactions.electrostatics import ewald_summation
from nvalchemiops.torch.neighbors import neighbor_list
from tests.neighbors.searches import F64, SEARCHES, every_search, points, rows_of, rows_of_matrix
from tests.reference.neighbors import assert_pairs, every_image, in_order
from tests.systems import SYSTEMS

# -- which pairs ---------------------------------------------------------------------------------------------


@every_search
def test_capacities_by_hand_change_nothing(search):
    """128 atoms that ask and 128 that answer, in a unit cell, with every sufficient capacity."""
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
    """Cutoffs of 0.5 to 4 cell lengths, in cells of several shapes; no entry twice, symmetric, half is half."""
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
    """Water in a cell of 1 angstrom that nobody means, pbc off: the same as without a cell."""
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
    """Atoms above and below the cell along the open axis are not folded."""
    cell = np.array([[5.0, 0, 0], [1, 6, 0], [0, 0, 4.0]])
    x = points(40, 2, -12.0, 12.0)
    pbc = (True, True, False)
    pairs, _, shifts = search(x, 4.0, torch.as_tensor(cell), torch.tensor(pbc), return_neighbor_list=True)
    assert_pairs(rows_of(pairs, shifts), every_image(x, 4.0, cell, pbc))
    assert not shifts[:, 2].any() and shifts[:, :2].any()


@every_search
def test_unwrapped_positions_give_the_same_vectors_and_energies(search):
    """Every atom moved by a lattice vector of its own; shifts refer to the coordinates as given."""
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
    """Two rows of the cell swapped, atoms kept: the same displacements, energies, forces and virial."""
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
            **{"neighbor_list": pairs, "neighbor_ptr": ptr, "neighbor_shifts": shifts},
            **{"compute_forces": True, "compute_virial": True},
        )
        results.append((found[place], vectors[place], *sums))
    for found, *others in results[1:]:
        assert np.array_equal(found, results[0][0])
        for a, b in zip(others, results[0][1:], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("as_ptr", [False, True])
@pytest.mark.parametrize("method", ["naive", "cell_list", "naive_dual_cutoff"])
def test_methods_for_one_system_keep_those_of_a_batch_apart(method, as_ptr):
    """A method for one system with batch information is taken as that for batches."""
    x = points(4).repeat(2, 1)
    described = {"batch_ptr": torch.tensor([0, 4, 8])} if as_ptr else {"batch_idx": torch.arange(8).int() // 4}
    second = {"cutoff2": 0.5} if "dual" in method else {}
    found, expected = (neighbor_list(x, 0.9, method=m, **second, **described) for m in (method, f"batch_{method}"))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)) and found[1].any()
    system = torch.arange(8) // 4
    assert all((system[row[:n].long()] == system[i]).all() for i, (row, n) in enumerate(zip(*found[:2], strict=True)))


def test_identical_systems_never_see_each_other():
    """Two identical systems at the same place, by every method for batches."""
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
    """A zero vector along an open axis counts for nothing, an all-zero cell is no cell, on any device."""
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


# -- nothing, and padding ------------------------------------------------------------------------------------

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
    """Empty outputs of the right rank, zero energy, and a backward pass that works."""
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
            # without a width there is room to spare, if there are rows at all
            width = (4 if n_atoms else 0) if room is None else room
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
    """Padded slots, and pairs at zero distance: all gradients finite, those of the unpadded list."""
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


# -- one build, all threads ----------------------------------------------------------------------------------


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("order", [(3.0, 6.0), (6.0, 3.0)])
def test_one_build_for_two_cutoffs(half, order):
    """One call serves a model and a dispersion term: each list as if built alone, whichever is longer."""
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


def test_a_large_search_uses_all_threads(threads, not_crowded, monkeypatch):
    """The documented number of threads, torch's, is what a search of 10,000 atoms uses; the list is the same."""
    asked = []
    run = core_threads.run
    monkeypatch.setattr(core_threads, "run", lambda task, count: (asked.append(count), run(task, count))[1])
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
