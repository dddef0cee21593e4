"""What users of neighbor lists reported: which pairs there are, nothing to find, padding, one build for two uses.

What they reported of buffers is in tests/resources/test_neighbor_buffers.py, of calls and compilers in
tests/routes/test_neighbor_calls.py, of perfect crystals and repeated results in test_neighbors_exact.py, of lists that
outlive a step in test_stale_lists.py and test_verlet.py.
"""

import numpy as np
import pytest
import torch

from nvalchemiops import threads as core_threads
from nvalchemiops.torch.neighbors import neighbor_list
from tests.reference.neighbors import assert_pairs, every_image, in_order
from tests.support.searches import F64, SEARCHES, every_search, points, rows_of, rows_of_matrix

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


# -- one build, all threads ----------------------------------------------------------------------------------


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
