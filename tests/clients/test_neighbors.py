"""Calls of neighbor lists that clients of 0.5.0 make, row by row of ../shared/clients.md, in their own words."""

import warnings

import numpy as np
import pytest
import torch

from nvalchemiops.compat.ignored_arguments import WITHOUT_EFFECT
from nvalchemiops.neighbors.neighbor_utils import estimate_max_neighbors, matrix_width
from nvalchemiops.notices import NeighborListWarning
from nvalchemiops.torch import neighbors
from nvalchemiops.torch.interactions.electrostatics import coulomb_energy, ewald_real_space
from nvalchemiops.torch.interactions.lj import lj_energy
from nvalchemiops.torch.neighbors import formats, neighbor_list, neighbor_utils, rebuild_detection
from nvalchemiops.torch.neighbors.planning import bins_of_cells
from tests.reference.neighbors import all_pairs, every_image
from tests.support.systems import SYSTEMS, batch, crystal, triclinic

F64 = torch.float64
UNKNOWN = 2**31 - 1
"""Count of an atom whose neighbors cannot be told."""


def buffers(n: int, width: int, cell: bool = True) -> dict[str, torch.Tensor]:
    made = {
        "neighbor_matrix": torch.full((n, width), n, dtype=torch.int32),
        "neighbor_matrix_shifts": torch.zeros((n, width, 3), dtype=torch.int32),
        "num_neighbors": torch.zeros(n, dtype=torch.int32),
    }
    return made if cell else {name: t for name, t in made.items() if "shifts" not in name}


def molecules() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.rand(37, 3, dtype=F64, generator=generator) * 4.0
    return x, torch.tensor([0] * 12 + [1] * 25, dtype=torch.int32)


def in_pairs(matrix: torch.Tensor, count: torch.Tensor) -> list[tuple[int, ...]]:
    """Pairs without images, sorted."""
    return sorted((i, j) for i, row in enumerate(matrix.tolist()) for j in row[: int(count[i])])


# -- fairchem -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["batch_cell_list", "batch_naive"])
@pytest.mark.parametrize("pbc", [None, torch.zeros(2, 3, dtype=torch.bool)])
def test_fairchem_graphs_without_periodicity(method, pbc):
    x, idx = molecules()
    n, w = len(x), 60
    memory = buffers(n, w)
    memory["neighbor_matrix_shifts"] += 7
    results = neighbor_list(
        positions=x, cutoff=2.5, cell=None, pbc=pbc, batch_idx=idx, method=method, half_fill=False, **memory
    )
    assert len(results) == (3 if method == "batch_cell_list" else 2)
    names = ("neighbor_matrix", "num_neighbors", "neighbor_matrix_shifts")
    assert all(found is memory[name] for found, name in zip(results, names, strict=False))
    assert not memory["neighbor_matrix_shifts"].any()
    expected = []
    for first, number in ((0, 0), (12, 1)):
        expected += [(i + first, j + first) for i, j, *_ in all_pairs(x[idx == number].numpy(), 2.5)]
    assert in_pairs(*results[:2]) == sorted(expected)


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("name", ["cell_list", "naive_neighbor_list", "batch_cell_list", "batch_naive_neighbor_list"])
def test_shifts_without_a_cell_in_the_functions_themselves(name, as_list):
    x, idx = molecules()
    memory = buffers(len(x), 60)
    memory["neighbor_matrix_shifts"] += 7
    where = {"cell": None, "pbc": None, **({"batch_idx": idx} if "batch" in name else {})}
    results = getattr(neighbors, name)(x, 2.5, return_neighbor_list=as_list, **where, **memory)
    method = "cell_list" if "cell" in name else "naive"
    expected = neighbor_list(x, 2.5, return_neighbor_list=as_list, method=method, **where)
    assert len(results) == (3 if "cell" in name else 2) and not memory["neighbor_matrix_shifts"].any()
    width = expected[0].shape[1]
    assert torch.equal(results[0] if as_list else results[0][:, :width], expected[0])
    assert torch.equal(results[1], expected[1])
    if len(results) == 3:
        assert results[2].shape == ((expected[0].shape[1], 3) if as_list else (len(x), 60, 3)) and not results[2].any()


def test_the_automatic_choice_without_a_cell_returns_no_shifts():
    x, idx = molecules()
    memory = buffers(len(x), 60)
    memory["neighbor_matrix_shifts"] += 7
    assert len(neighbor_list(x, 2.5, batch_idx=idx, **memory)) == 2 and not memory["neighbor_matrix_shifts"].any()


@pytest.mark.parametrize("method", ["batch_cell_list", "batch_naive"])
@pytest.mark.parametrize("width", [60, 3])
def test_fairchem_graphs_compiled(method, width):
    """The same without a graph break, and without a warning where rows are cut: counts tell."""
    x, idx = molecules()

    def graph(x, idx, matrix, shifts, count, scratch):
        given = {"neighbor_matrix": matrix, "neighbor_matrix_shifts": shifts, "num_neighbors": count}
        knobs = {"strategy": "auto", "atom_to_cell_mapping": scratch}
        return neighbor_list(x, 2.5, batch_idx=idx, method=method, **given, **knobs)

    memory = buffers(len(x), width)
    memory["neighbor_matrix_shifts"] += 7
    with warnings.catch_warnings():
        warnings.simplefilter("error", NeighborListWarning)
        run = torch.compile(graph, backend="aot_eager", fullgraph=True)
        found = run(x, idx, *memory.values(), torch.zeros(3))
    expected = neighbor_list(x, 2.5, batch_idx=idx, method=method, max_neighbors=60)
    assert torch.equal(found[0], expected[0][:, :width]) and torch.equal(found[1], expected[1])
    assert torch.equal(memory["neighbor_matrix"], found[0]) and not memory["neighbor_matrix_shifts"].any()
    assert len(found) == (3 if "cell" in method else 2)


def crowded() -> dict[str, torch.Tensor]:
    system = batch(SYSTEMS["rocksalt"](), triclinic(6))
    return {"positions": system.positions, "cell": system.cell, "batch_idx": system.batch_idx}


def test_one_warning_for_a_line_of_the_caller():
    near = {**crowded(), "cutoff": 5.0}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for _ in range(3):
            neighbor_list(**near, **buffers(len(near["positions"]), 8))
    assert [w.category for w in said] == [NeighborListWarning] and said[0].filename == __file__


def test_room_that_is_a_tensor_or_that_no_matrix_could_have():
    """``counts.max()`` as it is; metatomic asks for cutoff³ columns, and a list is made without the matrix."""
    x, idx = molecules()
    counts = neighbor_list(x, 2.5, batch_idx=idx)[1]
    most = counts.max()
    matrix, again = neighbor_list(x, 2.5, batch_idx=idx, max_neighbors=most)
    assert matrix.shape == (len(x), int(most)) and torch.equal(again, counts)
    expected = neighbor_list(x, 2.5, batch_idx=idx, return_neighbor_list=True)
    found = neighbor_list(x, 2.5, batch_idx=idx, return_neighbor_list=True, max_neighbors=2**30)
    assert all(map(torch.equal, found, expected))
    for wrong in (counts, most.double()):
        with pytest.raises(TypeError, match="`max_neighbors` must be an int"):
            neighbor_list(x, 2.5, batch_idx=idx, max_neighbors=wrong)


def test_the_width_of_memory_decides_whatever_max_neighbors_says():
    """As long as all neighbors fit; what has no room is never left out."""
    near = {**crowded(), "cutoff": 5.0}
    n = len(near["positions"])
    matrix, count, _ = neighbor_list(**near, max_neighbors=2, **buffers(n, 200))
    most = int(count.max())
    assert matrix.shape == (n, 200) and 8 < most < 200
    exact = neighbor_list(**near, max_neighbors=most)[0]
    assert exact.shape == (n, most)  # the width that was asked for: all fits
    with pytest.warns(NeighborListWarning, match="memory given for neighbors has 8"):
        matrix, _, _ = neighbor_list(**near, max_neighbors=500, **buffers(n, 8))
    assert most <= matrix.shape[1] < 200 and torch.equal(matrix[:, :most], exact)
    # memory for the counts alone has no width
    counts = torch.zeros(n, dtype=torch.int32)
    with pytest.warns(NeighborListWarning, match="`max_neighbors` = 8"):
        matrix, found, _ = neighbor_list(**near, max_neighbors=8, num_neighbors=counts)
    assert torch.equal(matrix[:, :most], exact) and found is counts and torch.equal(counts, count)


def test_shifts_without_a_cell_may_have_another_width():
    """fairchem goes on with the matrix of the last call, wider than the shifts, which that did not return."""
    x, idx = molecules()
    memory = buffers(len(x), 60)
    memory["neighbor_matrix_shifts"] = torch.full((len(x), 3, 3), 7, dtype=torch.int32)
    for method in ("batch_naive", "batch_cell_list"):
        found = neighbor_list(x, 2.5, batch_idx=idx, method=method, **memory)
        assert found[0] is memory["neighbor_matrix"] and not memory["neighbor_matrix_shifts"].any()
        assert method == "batch_naive" or (found[2].shape == (len(x), 60, 3) and not found[2].any())
    with pytest.raises(ValueError, match="`neighbor_matrix_shifts` has 3 columns, but `neighbor_matrix` has 60"):
        neighbor_list(x, 2.5, torch.eye(3, dtype=F64), False, batch_idx=idx, **memory)


def test_memory_for_distances_alone_has_a_width_too():
    near = {**crowded(), "cutoff": 5.0}
    memory = torch.zeros(len(near["positions"]), 200, dtype=F64)
    matrix, _, _, distances = neighbor_list(**near, neighbor_distances=memory)
    assert matrix.shape == memory.shape and distances is memory and memory.any()


def test_cut_rows_beside_flags_and_targets():
    """Rows of other systems stay; rows for some atoms are those of these atoms. What is returned is not cut."""
    near = {**crowded(), "cutoff": 5.0}
    n = len(near["positions"])
    full, count, _ = neighbor_list(**near)
    memory = buffers(n, 8)
    memory["neighbor_matrix"] -= 50
    with pytest.warns(NeighborListWarning):
        matrix, counts, _ = neighbor_list(**near, **memory, rebuild_flags=torch.tensor([True, False]))
    first = near["batch_idx"] == 0
    most = int(count[first].max())
    assert torch.equal(matrix[first][:, :most], full[first][:, :most]) and counts is memory["num_neighbors"]
    assert (matrix[~first][:, :8] == n - 50).all() and (matrix[~first][:, 8:] == n).all()
    assert torch.equal(memory["neighbor_matrix"][first], full[first][:, :8])
    assert (memory["neighbor_matrix"][~first] == n - 50).all() and not memory["num_neighbors"][~first].any()
    assert torch.equal(memory["num_neighbors"][first], count[first])
    targets = torch.tensor([n - 1, 3, 3], dtype=torch.int32)
    with pytest.warns(NeighborListWarning):
        matrix, counts, _ = neighbor_list(**near, **buffers(3, 8), target_indices=targets)
    assert torch.equal(counts, count[targets.long()])
    for row, exact, number in zip(matrix.tolist(), full[targets.long()].tolist(), counts.tolist(), strict=True):
        assert sorted(row[:number]) == sorted(exact[:number])


@pytest.mark.parametrize("cutoff", [1e-3, 3.0, 6.0, 1e10, 1e200])
def test_room_to_spare(cutoff):
    """At least a quarter more, or the estimate if that is less, but never less than is needed."""
    for most in (0, 1, 15, 16, 100, 1000, 2**31 - 1):
        width = matrix_width(cutoff, most)
        assert width >= most
        if cutoff < 1e6:
            assert width >= min(estimate_max_neighbors(cutoff), 1.25 * most)
            assert width <= max(most, estimate_max_neighbors(cutoff))
        assert width <= 1.25 * most + 5
    assert matrix_width(3.0, 0) == 4 and matrix_width(3.0, 40) == 40 and matrix_width(6.0, 100) == 125


def test_padding_of_a_matrix_with_room_is_empty():
    system = triclinic(6)
    for fill_value in (None, -1, 2):
        matrix, count, shifts, distances, vectors = neighbor_list(
            system.positions, 4.0, system.cell, fill_value=fill_value, return_distances=True, return_vectors=True
        )
        assert matrix.shape[1] == matrix_width(4.0, int(count.max()))
        beyond = torch.arange(matrix.shape[1]) >= count[:, None]
        assert beyond.any(1).all() and (matrix[beyond] == (6 if fill_value is None else fill_value)).all()
        assert not shifts[beyond].any() and not distances[beyond].any() and not vectors[beyond].any()
    pairs, ptr, _ = neighbor_list(system.positions, 4.0, system.cell, return_neighbor_list=True)
    assert pairs.shape[1] == int(ptr[-1]) == int(count.sum())


def test_no_room_to_spare_where_indices_would_not_reach(monkeypatch):
    from nvalchemiops.torch.neighbors import faults

    system = triclinic(6)
    count = neighbor_list(system.positions, 4.0, system.cell)[1]
    monkeypatch.setattr(faults, "MAX_SLOTS", 6 * int(count.max()))
    assert neighbor_list(system.positions, 4.0, system.cell)[0].shape == (6, int(count.max()))


# -- methods and knobs ----------------------------------------------------------------------------


METHODS = ["naive", "cell_list", "naive_scalar", "naive_tile", "cell_list_atom_centric", "cell_list_pair_centric"]


@pytest.mark.parametrize("prefix", ["", "batch_"])
@pytest.mark.parametrize("method", [*METHODS, "cluster_tile"])
def test_any_method_with_and_without_a_batch(method, prefix):
    near = {**crowded(), "cutoff": 4.0}
    expected = neighbor_list(**near)
    ptr = torch.tensor([0, len(near["positions"]) - 6, len(near["positions"])], dtype=torch.int32)
    as_ptr = {name: value for name, value in near.items() if name != "batch_idx"} | {"batch_ptr": ptr}
    for described in (near, as_ptr):
        found = neighbor_list(**described, method=prefix + method)
        assert torch.equal(found[1], expected[1])
        assert in_pairs(*found[:2]) == in_pairs(*expected[:2])
    one = triclinic(6)
    found = neighbor_list(one.positions, 4.0, one.cell, method=prefix + method)
    assert in_pairs(*found[:2]) == in_pairs(*neighbor_list(one.positions, 4.0, one.cell)[:2])


def test_knobs_without_effect():
    near = {**crowded(), "cutoff": 4.0, "pbc": None}
    scratch = {name: torch.zeros(3, dtype=torch.int32) for name in WITHOUT_EFFECT}
    knobs = {**scratch, "strategy": "auto", "grid_policy": "configured", "max_atoms_per_system": 64}
    expected = neighbor_list(**near)
    assert all(torch.equal(a, b) for a, b in zip(neighbor_list(**near, **knobs), expected, strict=True))
    one = {"positions": near["positions"][-6:], "cell": near["cell"][1], "pbc": None}
    two = {"cutoff1": 4.0, "cutoff2": 3.0}
    neighbors.cell_list(cutoff=4.0, **one, **knobs)
    neighbors.naive_neighbor_list(cutoff=4.0, **one, **knobs)
    neighbors.naive_neighbor_list_dual_cutoff(**two, **one, **knobs)
    neighbors.batch_cell_list(**near, **knobs)
    neighbors.batch_naive_neighbor_list(**near, **knobs)
    del near["cutoff"]
    neighbors.batch_naive_neighbor_list_dual_cutoff(**near, **two, **knobs)
    where = {"current_positions": one["positions"], "cell": one["cell"], "pbc": torch.ones(3, dtype=torch.bool)}
    bins = {"atom_to_cell_mapping": torch.zeros(6, 3).int(), "cells_per_dimension": torch.ones(3).int()}
    assert rebuild_detection.cell_list_needs_rebuild(**where, **bins).all()
    assert rebuild_detection.check_cell_list_rebuild_needed(**where, **bins)
    assert rebuild_detection.batch_cell_list_needs_rebuild(**where, **bins, batch_idx=torch.zeros(6).int()).all()
    with pytest.raises(TypeError, match="strategie"):
        neighbors.cell_list(cutoff=4.0, **one, strategie="auto")
    with pytest.raises(TypeError, match="atoms_to_cell"):
        rebuild_detection.cell_list_needs_rebuild(**where, atoms_to_cell=None)


def test_suggested_methods_work():
    near = {**crowded(), "cutoff": 4.0}
    ptr = torch.tensor([0, len(near["positions"]) - 6, len(near["positions"])], dtype=torch.int32)
    pbc = torch.ones(2, 3, dtype=torch.bool)
    suggest = neighbors.suggest_neighbor_list_method
    assert suggest(ptr, near["cell"], pbc, 4.0) == "batch_naive"
    options = {"half_fill": True, "return_neighbor_list": False, "positions_dtype": F64, "max_nbins": 100}
    method = suggest(ptr, near["cell"], pbc, cutoff=4.0, positions=near["positions"], **options)
    assert torch.equal(neighbor_list(**near, pbc=pbc, method=method)[1], neighbor_list(**near)[1])
    assert suggest(torch.tensor([0, 5000]), None, None, 4.0) == "cell_list"
    assert suggest(torch.tensor([0, 50]), cutoff=4.0, cutoff2=3.0) == "naive_dual_cutoff"
    with pytest.raises(TypeError, match="half_fil"):
        suggest(ptr, half_fil=True)


def test_numbers_of_images():
    """What a test of all pairs of wrapped atoms needs: counted by hand, and enough for every pair that there is."""
    cell = torch.tensor([[[4.0, 0, 0], [1.0, 5.0, 0], [-2.0, 1.0, 3.0]], np.diag([9.0, 2.0, 7.0]).tolist()], dtype=F64)
    pbc = torch.tensor([[True, True, True], [True, True, False]])
    ranges, numbers, most = neighbor_utils.compute_naive_num_shifts(cell, 5.0, pbc)
    assert ranges.dtype == numbers.dtype == torch.int32 and ranges.shape == (2, 3) and numbers.shape == (2,)
    assert ranges[1].tolist() == [1, 3, 0] and int(numbers[1]) == 1 + (3 * 7 * 1 - 1) // 2
    assert most == int(numbers.max())
    for n in range(2):
        x = torch.rand(9, 3, dtype=F64, generator=torch.Generator().manual_seed(n)) @ cell[n]
        shifts = every_image(x, 5.0, cell[n], pbc[n].tolist(), 0.0).inside[:, 2:]
        assert (np.abs(shifts).max(0) <= ranges[n].numpy()).all()
    for axes in (pbc[0], pbc[:1], torch.tensor(True), True, None):  # as a search takes them
        assert torch.equal(neighbor_utils.compute_naive_num_shifts(cell, 5.0, axes)[0][0], ranges[0])
    none = neighbor_utils.compute_naive_num_shifts(cell[:1], 5.0, torch.zeros(1, 3, dtype=torch.bool))
    assert none[0].tolist() == [[0, 0, 0]] and none[1].tolist() == [1] and none[2] == 1
    assert neighbor_utils.compute_naive_num_shifts(cell[:0], 5.0, pbc[:0])[2] == 0
    for bad in (0.0 * cell, torch.nan * cell, 1e-12 * cell):
        with pytest.raises(ValueError, match=r"cell|cutoff"):
            neighbor_utils.compute_naive_num_shifts(bad, 5.0, pbc)


# -- two cutoffs, and none ------------------------------------------------------------------------


def test_two_cutoffs_with_a_width_each():
    near = {**crowded()}
    short, long = (neighbor_list(**near, cutoff=c) for c in (3.0, 4.5))
    for widths in ({"max_neighbors1": 90, "max_neighbors2": 300}, {"max_neighbors": 90, "max_neighbors2": 300}):
        found = neighbor_list(**near, cutoff=3.0, cutoff2=4.5, **widths)
        assert (found[0].shape[1], found[3].shape[1]) == (90, 300)
        assert torch.equal(found[1], short[1]) and torch.equal(found[4], long[1])
    first, second = buffers(len(short[0]), 90), buffers(len(short[0]), 7)
    memory = {name + "1": t for name, t in first.items()} | {name + "2": t for name, t in second.items()}
    with pytest.warns(NeighborListWarning, match="`num_neighbors2`"):
        found = neighbor_list(**near, cutoff=3.0, cutoff2=4.5, **memory)
    with pytest.warns(NeighborListWarning, match="`num_neighbors1`"):
        neighbor_list(
            **near, cutoff=4.5, cutoff2=3.0, **{f"{name}1": t for name, t in buffers(len(short[0]), 7).items()}
        )
    assert found[0] is first["neighbor_matrix"] and found[4] is second["num_neighbors"]
    assert torch.equal(found[1], short[1]) and torch.equal(found[4], long[1])
    most = int(long[1].max())
    assert torch.equal(found[3][:, :most], long[0][:, :most]) and torch.equal(found[5][:, :most], long[2][:, :most])
    assert torch.equal(second["neighbor_matrix"], long[0][:, :7])
    dual = neighbors.batch_naive_neighbor_list_dual_cutoff(**near, cutoff1=3.0, cutoff2=4.5, max_neighbors1=90)
    assert dual[0].shape[1] == 90 and torch.equal(dual[1], short[1]) and torch.equal(dual[4], long[1])
    # without a width of its own the second matrix has that of the first, or is wider
    assert dual[3].shape[1] >= most and dual[5].shape[:2] == dual[3].shape
    wide = neighbor_list(**near, cutoff=3.0, cutoff2=4.5, max_neighbors=most + 90)
    assert wide[3].shape == wide[5].shape[:2] == (len(long[0]), most + 90)
    assert torch.equal(wide[3][:, :most], long[0][:, :most]) and (wide[3][:, most:] == len(long[0])).all()
    assert torch.equal(wide[5][:, :most], long[2][:, :most]) and not wide[5][:, most:].any()
    one = {"positions": near["positions"][-6:], "cell": near["cell"][1]}
    assert (
        neighbors.naive_neighbor_list_dual_cutoff(**one, cutoff1=1.0, cutoff2=4.0, max_neighbors1=10)[0].shape[1] == 10
    )
    with pytest.raises(ValueError, match="max_neighbors1"):
        neighbor_list(**near, cutoff=3.0, max_neighbors1=10)
    with pytest.raises(ValueError, match="neighbor_matrix"):
        neighbor_list(**near, cutoff=3.0, cutoff2=4.0, neighbor_matrix=first["neighbor_matrix"])


@pytest.mark.parametrize("method", [None, "batch_naive", "batch_cell_list"])
def test_a_cutoff_of_zero_finds_no_pairs(method):
    """Not even of atoms in the same place, nor of an atom on a lattice that is thin."""
    near = {**crowded(), "method": method}
    near["positions"] = torch.cat([near["positions"], near["positions"][-1:]])
    near["batch_idx"] = torch.cat([near["batch_idx"], near["batch_idx"][-1:]])
    bare = {name: value for name, value in near.items() if name != "cell"}
    for where in (near, bare):
        assert not neighbor_list(**where, cutoff=0.0)[1].any()
        assert neighbor_list(**where, cutoff=0.0, return_neighbor_list=True)[0].shape == (2, 0)
        assert not neighbor_list(**where, cutoff=0.0, **buffers(len(near["positions"]), 5))[1].any()
    first = neighbor_list(**near, cutoff=0.0, cutoff2=3.0)
    assert not first[1].any() and first[-2].any()
    spread = torch.linspace(-1e6, 1e6, 3000, dtype=F64)[:, None] * torch.ones(3, dtype=F64)
    assert not neighbor_list(spread, 0.0, method="cell_list")[1].any()


# -- nothing --------------------------------------------------------------------------------------


def test_an_empty_list_with_one_pointer_and_a_matrix_without_rows():
    """No pairs, for sums over pairs and for the converters."""
    system = crystal("rocksalt", 5.6, 1, 0.1)
    x, q, cell = system.positions, system.charges, system.cell
    pairs, ptr = torch.zeros(2, 0, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    rows = torch.zeros(0, 12, dtype=torch.int32)
    images, of_rows = torch.zeros(0, 3, dtype=torch.int32), torch.zeros(0, 12, 3, dtype=torch.int32)
    for half in (False, True):
        for given in ({"neighbor_list": pairs, "neighbor_ptr": ptr}, {"neighbor_matrix": rows}):
            assert not lj_energy(x, 3.0, 1.0, 4.0, half_list=half, **given).any()
    listed = {"neighbor_list": pairs, "neighbor_ptr": ptr, "neighbor_shifts": images}
    for given in (listed, {"neighbor_matrix": rows, "neighbor_matrix_shifts": of_rows}):
        leaf = x.clone().requires_grad_()
        energies = coulomb_energy(leaf, q, cell, 4.0, **given)
        (slope,) = torch.autograd.grad(energies.sum(), leaf)
        assert not energies.any() and not slope.any()
        assert ewald_real_space(x, q, cell, 0.8, **given).shape == (len(x),)
    found = formats.get_neighbor_matrix_from_neighbor_list(pairs, ptr, images)
    assert [t.shape for t in found] == [(0, 0), (0,), (0, 0, 3)]
    none = torch.zeros(0, dtype=torch.int32)
    found = formats.get_neighbor_list_from_neighbor_matrix(rows, none, of_rows)
    assert [t.shape for t in found] == [(2, 0), (1,), (0, 3)]
    formats.check_full_list(pairs, ptr, images)
    assert formats.half_to_full(pairs, ptr)[0].shape == formats.full_to_half(pairs, ptr)[0].shape == (2, 0)
    assert formats.matrix_geometry(x, rows, none, of_rows, cell)[0].shape == (0, 12)
    # pointers that do not fit stay an error
    with pytest.raises(ValueError, match="neighbor_ptr"):
        lj_energy(x, 3.0, 1.0, 4.0, neighbor_list=torch.zeros(2, 1, dtype=torch.int32), neighbor_ptr=ptr)


@pytest.mark.parametrize("update", [False, True])
def test_another_number_of_atoms_is_a_reason_to_rebuild(update):
    old, new = torch.rand(7, 3), torch.rand(9, 3)
    idx = torch.arange(9, dtype=torch.int32) // 5
    before = old.clone()
    single = (rebuild_detection.neighbor_list_needs_rebuild, rebuild_detection.check_neighbor_list_rebuild_needed)
    for function in single:
        assert function(old, new, 0.5, update).tolist() == [True]
    assert rebuild_detection.batch_neighbor_list_needs_rebuild(old, new, idx, 0.5, update).tolist() == [True, True]
    assert torch.equal(old, before)
    assert rebuild_detection.neighbor_list_needs_rebuild(new, new.clone(), 0.5, update).tolist() == [False]


def test_bins_of_an_empty_batch():
    cell, pbc = torch.zeros(0, 3, 3), torch.zeros(0, 3, dtype=torch.bool)
    total, radius = neighbors.estimate_cell_list_sizes(cell, pbc, 5.0)
    assert total == 0 and radius.shape == (3,)
    total, radius = neighbors.estimate_batch_cell_list_sizes(cell, pbc, 5.0)
    assert total == 0 and radius.shape == (0, 3) and radius.dtype == torch.int32
    total, radius = neighbors.estimate_cell_list_sizes(10.0 * torch.eye(3), torch.ones(3, dtype=torch.bool), 0.0)
    assert 0 < total <= 524288 and not radius.any()


def test_too_many_bins_become_fewer_along_all_axes():
    """All axes of a cube keep about as many; a long axis loses what is too much at once."""
    cells, pbc = torch.diag_embed(torch.tensor([[500.0] * 3, [5000.0, 50.0, 50.0]])), torch.tensor([True] * 3)
    total, bins, _ = bins_of_cells(cells[:1], pbc, 5.0, 1000)
    assert 500 < total <= 1000 and bins.amin() >= 7 and bins.amax() <= 14
    assert bins_of_cells(cells[1:], pbc, 5.0, 10_000)[1].tolist() == [[100, 10, 10]]


# -- cells that cannot be used, where nobody looks ------------------------------------------------

UNUSABLE = {
    "NaN": torch.full((3, 3), torch.nan, dtype=F64),
    "one NaN": torch.diag(torch.tensor([5.0, torch.nan, 5.0], dtype=F64)),
    "infinite": torch.diag(torch.tensor([5.0, torch.inf, 5.0], dtype=F64)),
    "singular": torch.ones(3, 3, dtype=F64),
    "zero": torch.zeros(3, 3, dtype=F64),
    "more images than a list can hold": 1e-4 * torch.eye(3, dtype=F64),
}


@pytest.mark.everyday_cases("*-False-*", "singular-True-*", "one NaN-True-False")
@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("cell", UNUSABLE.values(), ids=UNUSABLE)
def test_counts_of_an_unusable_cell_are_poisoned(cell, compiled, memory):
    """Every atom of that system has the count of what cannot be told, and only itself; the others keep their rows."""
    systems = [triclinic(6), triclinic(40), triclinic(6)]
    good = batch(*systems)
    cells = good.cell.clone()
    cells[1] = cell
    rows = good.batch_idx == 1

    def search(x, cells, matrix, shifts, count, method):
        given = {"neighbor_matrix": matrix, "neighbor_matrix_shifts": shifts, "num_neighbors": count}
        room = given if memory else {"max_neighbors": 400}
        options = {"check": False, "method": method, "return_distances": True, **room}
        return neighbor_list(x, 4.0, cells, batch_idx=good.batch_idx, **options)

    run = torch.compile(search, backend="aot_eager", fullgraph=True) if compiled else search
    for method in (None, "batch_naive", "batch_cell_list"):
        matrix, count, shifts, distances = run(good.positions, cells, *buffers(52, 400).values(), method)
        expected = neighbor_list(
            good.positions, 4.0, good.cell, batch_idx=good.batch_idx, max_neighbors=400, method=method
        )
        assert (count[rows] == UNKNOWN).all()
        assert distances[rows, 0].isnan().all() and not distances[rows, 1:].any()
        assert torch.equal(matrix[rows, 0], rows.nonzero().squeeze(1).int()) and (shifts[rows, 0] == UNKNOWN).all()
        assert (matrix[rows, 1:] == 52).all() and not shifts[rows, 1:].any()
        for found, wanted in zip((matrix, count, shifts), expected, strict=True):
            assert torch.equal(found[~rows], wanted[~rows])
    # along an open axis the cell never matters, whatever it holds
    open_axes = torch.zeros(3, dtype=torch.bool)
    found = neighbor_list(good.positions, 4.0, cells, open_axes, good.batch_idx, max_neighbors=400, check=False)
    assert torch.equal(found[1], neighbor_list(good.positions, 4.0, batch_idx=good.batch_idx)[1])


def test_both_of_two_cut_lists_are_told():
    x = triclinic(11).positions
    n = len(x)

    def call():
        memory = {f"neighbor_matrix{k}": torch.zeros((n, 1), dtype=torch.int32) for k in (1, 2)}
        neighbor_list(x, 8.0, cutoff2=9.0, **memory)

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        call()
    messages = [str(w.message) for w in found]
    assert len(messages) == 2 and "`num_neighbors2`" in messages[1]


@pytest.mark.parametrize("at", [2, 12])
def test_positions_are_looked_at_also_where_nothing_is_rebuilt(at):
    positions = 4.0 * torch.rand(20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batch_idx = torch.tensor([0] * 10 + [1] * 10, dtype=torch.int32)
    matrix, counts = neighbor_list(positions, 1.5, batch_idx=batch_idx, max_neighbors=16)
    memory = {"neighbor_matrix": matrix, "num_neighbors": counts, "rebuild_flags": torch.tensor([True, False])}
    positions[at, 1] = torch.nan
    with pytest.raises(ValueError, match="`positions`"):
        neighbor_list(positions, 1.5, batch_idx=batch_idx, **memory)


@pytest.mark.parametrize("flag", [True, False])
def test_one_flag_is_for_all_systems_also_where_nobody_knows_how_many_there_are(flag, device):
    positions = 4.0 * torch.rand(20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(device)
    given = {"batch_idx": torch.tensor([0] * 8 + [1] * 12, dtype=torch.int32, device=device)}
    names = ("neighbor_matrix", "num_neighbors", "neighbor_matrix_shifts")
    for lattice in ({}, {"cell": 4.0 * torch.eye(3, dtype=F64, device=device).expand(2, 3, 3)}):
        before, now = (
            neighbor_list(x, 1.5, **given, **lattice, max_neighbors=32) for x in (positions, 0.9 * positions)
        )
        assert not torch.equal(now[1], before[1])
        for flags in (torch.tensor([flag], device=device), torch.tensor(flag, device=device)):
            memory = dict(zip(names, (t.clone() for t in before)))
            found = neighbor_list(0.9 * positions, 1.5, **given, **lattice, **memory, rebuild_flags=flags)
            assert all(torch.equal(a, b) for a, b in zip(found, now if flag else before))
