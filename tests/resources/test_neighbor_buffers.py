"""What users of neighbor lists reported of memory: buffers that are given, rows that are too short, bytes in all."""

import os
import pickle
import warnings

import numpy as np
import pytest
import torch

from nvalchemiops.neighbors import NeighborOverflowError
from nvalchemiops.neighbors.neighbor_utils import grown_width
from nvalchemiops.notices import NeighborListWarning
from nvalchemiops.torch import neighbors
from nvalchemiops.torch.neighbors import driver, faults, neighbor_list
from nvalchemiops.torch.neighbors import search as search_ops
from nvalchemiops.torch.neighbors.neighbor_utils import get_neighbor_list_from_neighbor_matrix
from tests.reference.neighbors import assert_pairs, every_image
from tests.support.comparing import compiled
from tests.support.processes import python_says
from tests.support.searches import (
    F64,
    every_search,
    points,
    rows_of,
    two_systems,
)


def buffers(n_rows, width, value=77):
    return {
        "neighbor_matrix": torch.full((n_rows, width), value, dtype=torch.int32),
        "neighbor_matrix_shifts": torch.full((n_rows, width, 3), value, dtype=torch.int32),
        "num_neighbors": torch.full((n_rows,), value, dtype=torch.int32),
    }


@pytest.mark.parametrize("method", ["batch_naive", "batch_cell_list", None])
@pytest.mark.parametrize("fill_value", [None, -1, 0])
def test_rows_that_shrink_leave_nothing_behind(method, fill_value):
    """Atoms move apart, so counts drop; rebuilt into the same buffers, for all systems and for one of two."""
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


def begins_with(wide, narrow):
    """Whether the columns of ``narrow`` are the first of ``wide``."""
    return torch.equal(wide[:, : narrow.shape[1]], narrow)


@every_search
def test_rows_that_do_not_fit_are_returned_whole(search):
    """Rows one too short, by `max_neighbors` and by memory: wider matrices, exact lists, one warning, true counts."""
    x, cell, pbc = points(60, 5) * 5.0, 5.0 * torch.eye(3, dtype=F64), torch.ones(3, dtype=torch.bool)
    geometry = {"return_distances": True, "return_vectors": True}
    exact, count, *others = search(x, 2.5, cell, pbc, **geometry)
    pairs = search(x, 2.5, cell, pbc, return_neighbor_list=True, **geometry)
    needed = int(count.max())
    assert_pairs(rows_of(pairs[0], pairs[2]), every_image(x.numpy(), 2.5, cell.numpy(), pbc.numpy()))
    for room in (0, 1, needed - 1):
        floats = {"neighbor_distances": x.new_zeros(60, room), "neighbor_vectors": x.new_zeros(60, room, 3)}
        for options in ({"max_neighbors": room}, buffers(60, room), buffers(60, room) | floats):
            with pytest.warns(NeighborListWarning, match=f"{room}.* an atom has {needed} neighbors") as said:
                found, counted, *rest = search(x, 2.5, cell, pbc, **geometry, **options)
            assert len(said) == 1 and found.shape == (60, grown_width(needed)) and torch.equal(counted, count)
            assert all(begins_with(a, b[:, :needed]) for a, b in zip((found, *rest), (exact, *others), strict=True))
            assert (found[torch.arange(found.shape[1]) >= count[:, None]] == 60).all()
            names = ("neighbor_matrix", "neighbor_matrix_shifts", *floats)
            for name, whole in zip(names, (found, *rest), strict=True):
                assert name not in options or (options[name].shape[1] == room and begins_with(whole, options[name]))
            assert options.get("num_neighbors", counted) is counted
            options = {name: value for name, value in options.items() if name not in floats}
            with pytest.warns(NeighborListWarning, match=f"{room}.* an atom has {needed} neighbors") as said:
                in_list = search(x, 2.5, cell, pbc, return_neighbor_list=True, **geometry, **options)
            assert len(said) == 1 and all(torch.equal(a, b) for a, b in zip(in_list, pairs, strict=True))
            assert torch.equal(options.get("num_neighbors", count), count)
            assert begins_with(exact, options.get("neighbor_matrix", exact))


def test_one_search_where_all_neighbors_fit(monkeypatch):
    x, idx = two_systems()
    _, count = neighbor_list(x, 3.0, batch_idx=idx)
    most, searches = int(count.max()), []
    search = search_ops._CellList.run
    monkeypatch.setattr(search_ops._CellList, "run", lambda *a: (searches.append(0), search(*a))[1])
    memory = buffers(60, most)
    flags = {"rebuild_flags": torch.tensor([True, False])}
    for options in ({"max_neighbors": most}, memory, memory | flags):
        searches.clear()
        matrix, counts = neighbor_list(x, 3.0, batch_idx=idx, **options)
        assert len(searches) == 1 and matrix.shape[1] == most and torch.equal(counts, count)


def test_memory_for_distances_of_a_list_may_have_any_length():
    x = points(30, 3) * 4.0
    options = {"return_neighbor_list": True, "return_distances": True}
    pairs, ptr, exact = neighbor_list(x, 2.0, **options)
    n = len(exact)
    for length in (0, n - 1, n, n + 7):
        memory = x.new_full((length,), -1.0)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            *same, found = neighbor_list(x, 2.0, neighbor_distances=memory, **options)
        assert len(said) == (length < n) and all(torch.equal(a, b) for a, b in zip(same, (pairs, ptr), strict=True))
        assert torch.equal(found, exact) and torch.equal(memory[:n], exact[:length]) and (memory[n:] == -1.0).all()
        assert length < n or found.data_ptr() == memory.data_ptr()


def test_gradients_flow_through_what_is_returned():
    x, cell = (points(20, 1) * 4.0).requires_grad_(), 4.0 * torch.eye(3, dtype=F64)
    *_, exact = neighbor_list(x, 2.5, cell, return_neighbor_list=True, return_distances=True)
    expected = torch.autograd.grad(exact.cos().sum(), x, retain_graph=True)
    for options in ({"max_neighbors": 3}, {"neighbor_distances": torch.zeros(20, 2, dtype=F64)}):
        with pytest.warns(NeighborListWarning):
            _, count, _, found = neighbor_list(x, 2.5, cell, return_distances=True, **options)
        near = torch.arange(found.shape[1]) < count[:, None]
        torch.testing.assert_close(torch.autograd.grad(found[near].cos().sum(), x), expected)
    energy = torch.func.grad(
        lambda x: neighbor_list(x, 2.5, cell, max_neighbors=3, return_distances=True)[3].square().sum()
    )
    with pytest.warns(NeighborListWarning):
        slope = energy(x.detach())
    torch.testing.assert_close(slope, *torch.autograd.grad(exact.square().sum(), x))


def test_memory_that_cannot_be_had_is_the_error(monkeypatch):
    """More entries than int32 can address, or than there is memory for: the error says what is needed, and where."""
    x, idx = two_systems(spread=(1.0, 0.5))
    _, count = neighbor_list(x, 3.0, batch_idx=idx)
    most = int(count.max())
    monkeypatch.setattr(faults, "MAX_SLOTS", 60 * most)  # there is no room to spare
    with pytest.warns(NeighborListWarning):
        assert neighbor_list(x, 3.0, batch_idx=idx, max_neighbors=5)[0].shape[1] == most
    monkeypatch.setattr(faults, "MAX_SLOTS", 60 * most - 1)
    with pytest.raises(NeighborOverflowError) as caught:
        neighbor_list(x, 3.0, batch_idx=idx, max_neighbors=5)
    error = caught.value
    assert (error.max_neighbors, error.num_neighbors, error.system_index) == (5, most, 1)
    assert pickle.loads(pickle.dumps(error)).num_neighbors == most
    with pytest.raises(NeighborOverflowError) as caught:  # slices are systems without numbers
        torch.func.vmap(lambda x: neighbor_list(x, 3.0, batch_idx=idx, max_neighbors=5))(x.expand(2, -1, -1))
    assert (caught.value.num_neighbors, caught.value.system_index) == (most, None)
    monkeypatch.setattr(driver, "grown_width", lambda most: 2**45)
    monkeypatch.setattr(faults, "MAX_SLOTS", 2**60)
    memory = buffers(60, 5) | {"rebuild_flags": torch.ones(2, dtype=torch.bool)}
    for options in ({"max_neighbors": 5}, memory):
        with pytest.raises(NeighborOverflowError, match=f"an atom in system 1 has {most} neighbors") as caught:
            neighbor_list(x, 3.0, 9.0 * torch.eye(3, dtype=F64), False, idx, **options)
        assert "allocate memory" in str(caught.value.__cause__)
    assert torch.equal(memory["num_neighbors"], count)


@pytest.mark.parametrize("method", ["batch_naive", "batch_cell_list", None])
@pytest.mark.parametrize("rows", [range(60), (7, 40, 3, 3, 59, 31)], ids=["all", "targets"])
def test_rows_that_stay_are_whole_in_a_wider_matrix(method, rows):
    """One of two systems condenses: the other keeps its rows, of older positions, unless they were cut before."""
    x, idx = two_systems()
    cell = 12.0 * torch.eye(3, dtype=F64).expand(2, 3, 3)
    same = {"batch_idx": idx, "method": method, "target_indices": torch.tensor(rows, dtype=torch.int32)}
    first = idx[list(rows)] == 0
    before = neighbor_list(x, 3.0, cell, **same)
    width = int(before[1].max())
    memory = buffers(len(rows), width)
    neighbor_list(x, 3.0, cell, **same, **memory)
    dense = torch.cat([x[:30] * 0.6, x[30:] + 0.3 * points(30, 9)])  # the second moves, too
    after = neighbor_list(dense, 3.0, cell, **same)
    most = int(after[1].max())
    # not even the first is flagged in the second call, but its rows in the memory are not whole
    for flags in ([True, False], [False, False]):
        with pytest.warns(NeighborListWarning, match=f"{width} columns, but an atom has {most} neighbors"):
            found = neighbor_list(dense, 3.0, cell, **same, **memory, rebuild_flags=torch.tensor(flags))
        for whole, new, old in zip(found[::2], after[::2], before[::2], strict=True):
            assert begins_with(whole[first], new[first][:, :most])
            assert begins_with(whole[~first], old[~first][:, :width])
        assert torch.equal(found[1], torch.where(first, after[1], before[1]))
        beyond = torch.arange(found[0].shape[1]) >= found[1][:, None]
        assert found[0].shape[1] > width and (found[0][beyond] == 60).all() and not found[2][beyond].any()
        assert begins_with(found[0], memory["neighbor_matrix"])
        assert begins_with(found[2], memory["neighbor_matrix_shifts"])
    # the first is thin again: its old counts are no reason for a wide matrix
    with warnings.catch_warnings():
        warnings.simplefilter("error", NeighborListWarning)
        found = neighbor_list(x, 3.0, cell, **same, **memory, rebuild_flags=torch.tensor([False, False]))
    assert found[0] is memory["neighbor_matrix"] and torch.equal(found[1], before[1])
    assert begins_with(before[0], found[0]) and begins_with(before[2], found[2])


@pytest.mark.parametrize("batched", [0, 1, 2**31 - 1])
def test_one_flag_for_all_systems_leaves_no_row_cut(batched):
    """Open systems, so that there are no images to copy; numbers of systems may be large, which takes no memory."""
    x, idx = two_systems()
    same = {"batch_idx": batched * idx} if batched else {}
    width = int(neighbor_list(x, 3.0, **same)[1].max())
    memory = {name: tensor for name, tensor in buffers(60, width).items() if name != "neighbor_matrix_shifts"}
    dense = torch.cat([x[:30] * 0.6, x[30:]])
    for flag, moved in ((True, dense), (False, dense * 1.05)):
        if flag or not batched:
            expected = neighbor_list(moved, 3.0, **same)
        else:  # the second system has whole rows, and keeps them
            expected = neighbor_list(torch.cat([moved[:30], dense[30:]]), 3.0, **same)
        with pytest.warns(NeighborListWarning):
            matrix, count = neighbor_list(moved, 3.0, **same, **memory, rebuild_flags=torch.tensor([flag]))
        most = int(expected[1].max())
        assert matrix.shape[1] > width and torch.equal(count, expected[1])
        assert begins_with(matrix, expected[0][:, :most]) and begins_with(matrix, memory["neighbor_matrix"])


@pytest.mark.parametrize("shared", ["cell", "pbc", "neither"])
def test_one_flag_for_systems_with_cells_of_their_own(shared):
    """The second of three systems has no atoms, and its cell and axes are not those of the third."""
    x, idx = two_systems()
    cell = torch.stack([torch.eye(3, dtype=F64) * length for length in (8.0, 6.0, 7.0)])
    pbc = torch.tensor([[True, True, True], [False, False, False], [True, False, True]])
    cell, pbc = (cell[0] if shared == "cell" else cell), (pbc[2] if shared == "pbc" else pbc)
    given = {"cell": cell, "pbc": pbc, "batch_idx": 2 * idx}
    expected = neighbor_list(x, 3.0, **given)
    with pytest.warns(NeighborListWarning):
        found = neighbor_list(x, 3.0, **given, **buffers(60, 3), rebuild_flags=torch.tensor([True]))
    most = int(expected[1].max())
    assert torch.equal(found[1], expected[1])
    assert begins_with(found[0], expected[0][:, :most]) and begins_with(found[2], expected[2][:, :most])


def test_rows_that_are_kept_unknown_have_no_length():
    x, idx = two_systems()
    memory = buffers(60, 60)
    cell = 9.0 * torch.eye(3, dtype=F64)
    for lost in (slice(3, 4), slice(None)):
        unknown = x.clone()
        unknown[lost] = torch.nan
        neighbor_list(unknown, 3.0, cell, batch_idx=idx, check=False, **memory)
        before = [tensor.clone() for tensor in memory.values()]
        found = neighbor_list(x, 3.0, cell, batch_idx=idx, rebuild_flags=torch.tensor([False, False]), **memory)
        assert all(map(torch.equal, (found[0], found[2], found[1]), before))


def canary(shape, border=512, value=-12345):
    """Memory for a result in the middle of a larger piece, and a function that says whether the rest is untouched."""
    whole = torch.full((2 * border + int(np.prod(shape)),), value, dtype=torch.int32)
    inner = whole[border : len(whole) - border].view(shape)
    return inner, lambda: bool((whole[:border] == value).all() and (whole[len(whole) - border :] == value).all())


@pytest.mark.parametrize("mode", ["unchecked", "compiled"])
@pytest.mark.parametrize("method", ["batch_naive", "batch_cell_list", None])
def test_overfull_rows_without_checks_are_visible_and_stay_in_bounds(method, mode):
    """The counts are those of the whole list, so count > width shows, and nothing is written beyond the rows."""
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


@pytest.mark.parametrize("name", ["naive", "batch_naive"])
def test_dual_cutoffs_say_which_list_is_wider(name):
    """The two widths are told apart, and the other one stays as it is."""
    x = torch.as_tensor(np.random.default_rng(8).normal(size=(100, 3)))
    function = getattr(neighbors, f"{name}_neighbor_list_dual_cutoff")
    described = {"batch_idx": torch.zeros(100, dtype=torch.int32)} if name == "batch_naive" else {}
    _, first, _, second = function(x, 1.0, 2.0, **described)
    needed = [int(first.max()), int(second.max())]
    for which in (0, 1):
        room = {f"max_neighbors{n + 1}": most - (n == which) for n, most in enumerate(needed)}
        said = f"`max_neighbors{which + 1}` = {needed[which] - 1}, .*{needed[which]} neighbors"
        with pytest.warns(NeighborListWarning, match=said):
            found = function(x, 1.0, 2.0, **described, **room)
        widths = [grown_width(most) if n == which else most for n, most in enumerate(needed)]
        assert [found[0].shape[1], found[2].shape[1]] == widths
        assert torch.equal(found[1], first) and torch.equal(found[3], second)


# -- memory --------------------------------------------------------------------------------------------------

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


# Lists named ``out``, one for each test. One process measures them all: to start one takes longer.
MEASURED = {
    "dummy cell": """
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
            del found
""",
    "vacuum": """
x = uniform(60000, 200, 200, 15)
out = []
for periodic in (True, False):
    for height in (30.0, 300.0):
        cell = torch.diag(torch.tensor([200.0, 200.0, height], dtype=torch.float64))
        memory, found = extra(x, 4.0, cell, torch.tensor([True, True, periodic]), return_neighbor_list=True)
        out.append((memory, found[0].shape[1]))
        del found
""",
    "100,000 atoms": """
out = []
for n_atoms in (100_000, 200_000):
    edge = (n_atoms / 0.1) ** (1 / 3)
    cell = edge * torch.eye(3, dtype=torch.float64)
    memory, found = extra(uniform(n_atoms, edge, edge, edge), 6.0, cell, return_neighbor_list=True)
    out.append((memory, sum(t.numel() * t.element_size() for t in (found[0], found[2]))))
    del found
""",
}


@pytest.fixture(scope="module")
def measured():
    """What the process says of each of these, by name."""
    parts = (f"{code}measured[{name!r}] = out\n" for name, code in MEASURED.items())
    code = MEASURE + "measured = {}\n" + "".join(parts) + "print(json.dumps(measured))"
    return python_says(code, fresh=True, **OWN_PAGES)


@measures
def test_a_huge_dummy_cell_costs_no_memory(measured):
    """3,000 atoms in 100 angstrom, cells of 1e4 to 1e7 with pbc off (and on): below 64 MiB, the same pairs."""
    found = measured["dummy cell"]
    assert len(found) == 12 and all(same for _, same in found)
    assert max(memory for memory, _ in found) < 64 * 2**20


@measures
def test_vacuum_costs_no_memory(measured):
    """A slab of 60,000 atoms with ten times the vacuum needs at most 1.2 times the memory."""
    found = measured["vacuum"]
    assert len({n_pairs for _, n_pairs in found}) == 1
    for thin, thick in (found[:2], found[2:]):
        assert thick[0] <= 1.2 * thin[0]


@measures
def test_memory_of_100_000_atoms(measured):
    """The list form, at the density of water, within 3 times the bytes of its pairs, and linear."""
    found = measured["100,000 atoms"]
    for memory, size in found:
        assert memory <= 3.0 * size
    assert found[1][0] <= 2.2 * found[0][0]


def test_torch_counts_changes_of_given_memory():
    """So autograd refuses a backward pass that needs values from before; inside of an inference mode nothing counts."""
    x = torch.rand(6, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
    memory = buffers(6, 5)
    for flags in (None, None, torch.tensor([True]), torch.tensor([True])):  # with and without an operator, twice each
        before = [m._version for m in memory.values()]
        neighbor_list(x, 0.5, torch.eye(3, dtype=F64), **memory, rebuild_flags=flags, check=False)
        assert all(m._version > v for m, v in zip(memory.values(), before))
    with torch.inference_mode():
        same = buffers(6, 5)
        neighbor_list(x, 0.5, torch.eye(3, dtype=F64), **same, check=False)
    assert all(torch.equal(a, b) for a, b in zip(memory.values(), same.values()))
    one = torch.zeros(6 * 5 * 3 + 6, dtype=torch.int32)
    with pytest.raises(ValueError, match="overlaps"):
        neighbor_list(x, 0.5, torch.eye(3, dtype=F64), neighbor_matrix=one[:30].view(6, 5), num_neighbors=one[29:35])
