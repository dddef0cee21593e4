"""Formats of neighbor lists tell of the same pairs, and the geometry of pairs differentiates."""

import itertools

import numpy as np
import pytest
import torch
import torch._dynamo

from nvalchemiops.neighbors import NeighborOverflowError
from nvalchemiops.neighbors.neighbor_utils import estimate_max_neighbors
from nvalchemiops.notices import NeighborListWarning
from nvalchemiops.torch.neighbors import formats, neighbor_utils
from nvalchemiops.torch.neighbors.formats import (
    check_full_list,
    full_to_half,
    get_neighbor_list_from_neighbor_matrix,
    get_neighbor_matrix_from_neighbor_list,
    half_to_full,
    list_geometry,
    matrix_geometry,
    order_of_pairs,
    repeats,
    transpose_order,
)
from nvalchemiops.torch.runtime.context import ValuesNeededError
from tests.reference.neighbors import all_pairs
from tests.support.systems import triclinic

CUTOFF = 5.5


def as_list(pairs, n_atoms, with_shifts=True):
    """Sorted tuples (i, j, S_0, S_1, S_2) as the tensors of a list."""
    table = torch.tensor(pairs, dtype=torch.int32).reshape(-1, 5)
    counts = torch.bincount(table[:, 0], minlength=n_atoms)
    ptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)
    result = (table[:, :2].T.contiguous(), ptr, table[:, 2:].contiguous())
    return result if with_shifts else result[:2]


def as_matrix(pairs, n_atoms, padding, spare=2):
    """The same as a matrix, written slot by slot."""
    rows = [[p[1:] for p in pairs if p[0] == i] for i in range(n_atoms)]
    width = max(map(len, rows), default=0) + spare
    matrix = torch.full((n_atoms, width), padding, dtype=torch.int32)
    shifts = torch.zeros(n_atoms, width, 3, dtype=torch.int32)
    for i, row in enumerate(rows):
        for slot, (j, *shift) in enumerate(row):
            matrix[i, slot] = j
            shifts[i, slot] = torch.tensor(shift)
    return matrix, torch.tensor([len(row) for row in rows], dtype=torch.int32), shifts


def same(a, b):
    return len(a) == len(b) and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b))


@pytest.fixture(scope="module")
def crystal():
    """A skewed cell with atoms outside of it and images of one atom among its own neighbors."""
    system = triclinic(5)
    x, cell = system.positions.numpy(), system.cell[0].numpy()
    full, half = (all_pairs(x, CUTOFF, cell, (True, True, True), half=h) for h in (False, True))
    assert any(i == j for i, j, *_ in half) and max(max(map(abs, p[2:])) for p in full) > 1
    return system, full, half


# -- matrix and list ------------------------------------------------------------------------------


def test_matrix_and_list_hold_the_same_pairs(crystal, device):
    system, full, _ = crystal
    n_atoms = len(system.positions)
    pairs = [t.to(device) for t in as_list(full, n_atoms)]
    matrix = [t.to(device) for t in as_matrix(full, n_atoms, n_atoms, spare=0)]
    assert same(get_neighbor_matrix_from_neighbor_list(*pairs), matrix)
    assert same(get_neighbor_list_from_neighbor_matrix(*matrix, fill_value=n_atoms), pairs)
    assert same(get_neighbor_list_from_neighbor_matrix(*matrix), pairs)
    assert same(get_neighbor_list_from_neighbor_matrix(*matrix[:2]), pairs[:2])
    wider = [t.to(device) for t in as_matrix(full, n_atoms, -7, spare=3)]
    width = wider[0].shape[1]
    assert same(get_neighbor_matrix_from_neighbor_list(*pairs, max_neighbors=width, fill_value=-7), wider)
    assert same(get_neighbor_matrix_from_neighbor_list(*pairs[:2], max_neighbors=width, fill_value=-7), wider[:2])


def test_int64_goes_in_and_int32_comes_out(crystal):
    _, full, _ = crystal
    pairs, matrix = as_list(full, 5), as_matrix(full, 5, 5, spare=0)
    assert same(get_neighbor_list_from_neighbor_matrix(*(t.long() for t in matrix)), pairs)
    assert same(get_neighbor_matrix_from_neighbor_list(*(t.long() for t in pairs)), matrix)
    assert same(full_to_half(*(t.long() for t in pairs)), full_to_half(*pairs))
    assert same(half_to_full(*(t.long() for t in full_to_half(*pairs))), pairs)


def test_what_stands_behind_a_count_is_never_a_pair():
    matrix = torch.tensor([[1, 2, 7], [0, 0, 9], [5, -3, 1]], dtype=torch.int32)
    counts = torch.tensor([2, 1, 0], dtype=torch.int32)
    shifts = torch.arange(27, dtype=torch.int32).reshape(3, 3, 3)
    pairs, ptr, images = get_neighbor_list_from_neighbor_matrix(matrix, counts, shifts, fill_value=3)
    assert pairs.tolist() == [[0, 0, 1], [1, 2, 0]] and ptr.tolist() == [0, 2, 3, 3]
    assert torch.equal(images, torch.stack([shifts[0, 0], shifts[0, 1], shifts[1, 0]]))


def test_padding_before_a_count_is_skipped_and_the_pointers_agree():
    # atom 1 is the padding atom of the batch: its number is valid, but a slot that holds it is no neighbor
    matrix = torch.tensor([[1, 2, 1], [0, 1, 2], [1, 1, 1]], dtype=torch.int32)
    counts = torch.tensor([3, 3, 2], dtype=torch.int32)
    pairs, ptr = get_neighbor_list_from_neighbor_matrix(matrix, counts, fill_value=1)
    assert pairs.tolist() == [[0, 1, 1], [2, 0, 2]] and ptr.tolist() == [0, 1, 3, 3]


def test_too_little_room_is_widened_and_a_cut_matrix_is_an_error(crystal):
    _, full, _ = crystal
    pairs, matrix = as_list(full, 5), as_matrix(full, 5, 5, spare=0)
    most = int(matrix[1].max())
    for width in (0, most - 1):
        with pytest.warns(NeighborListWarning, match=f"`max_neighbors` = {width}, but an atom has {most} neighbors"):
            assert same(get_neighbor_matrix_from_neighbor_list(*pairs, max_neighbors=width), matrix)
    with pytest.raises(NeighborOverflowError) as caught:
        get_neighbor_list_from_neighbor_matrix(matrix[0][:, :-1], matrix[1], matrix[2][:, :-1])
    assert (caught.value.max_neighbors, caught.value.num_neighbors) == (most - 1, most)


@pytest.mark.parametrize("n_atoms", [0, 1, 3])
def test_lists_without_pairs(n_atoms):
    pairs = as_list([], n_atoms)
    matrix = as_matrix([], n_atoms, n_atoms, spare=0)
    assert matrix[0].shape == (n_atoms, 0)
    assert same(get_neighbor_list_from_neighbor_matrix(*matrix), pairs)
    assert same(get_neighbor_matrix_from_neighbor_list(*pairs), matrix)
    wide = get_neighbor_matrix_from_neighbor_list(*pairs, max_neighbors=2)
    assert same(wide, as_matrix([], n_atoms, n_atoms, spare=2))
    assert same(get_neighbor_list_from_neighbor_matrix(*wide), pairs)
    assert same(half_to_full(*pairs), pairs) and same(full_to_half(*pairs), pairs)
    check_full_list(*pairs)
    x = torch.rand(n_atoms, 3, dtype=torch.float64, requires_grad=True)
    for distances, vectors in (
        list_geometry(x, pairs[0], pairs[2], torch.eye(3, dtype=torch.float64)),
        matrix_geometry(x, wide[0], wide[1], wide[2], torch.eye(3, dtype=torch.float64)),
    ):
        assert vectors.shape == (*distances.shape, 3) and not distances.any()
        (gradient,) = torch.autograd.grad(distances.sum() + vectors.sum(), x)
        assert torch.equal(gradient, torch.zeros_like(x))


# -- half and full --------------------------------------------------------------------------------


def test_half_and_full_lists_turn_into_each_other_exactly(crystal, device):
    _, full, half = crystal
    full_list, half_list = ([t.to(device) for t in as_list(pairs, 5)] for pairs in (full, half))
    assert same(half_to_full(*half_list), full_list)
    assert same(full_to_half(*full_list), half_list)
    molecule = all_pairs(np.random.default_rng(0).uniform(0, 4, (6, 3)), 2.5)
    whole = as_list(molecule, 6, with_shifts=False)
    assert same(half_to_full(*full_to_half(*whole)), whole)


def test_any_order_within_the_rows_is_allowed(crystal):
    _, full, half = crystal
    rng = np.random.default_rng(1)
    shuffled = [half[k] for k in sorted(range(len(half)), key=lambda k: (half[k][0], rng.random()))]
    assert shuffled != half
    pairs, _, shifts = expanded = half_to_full(*as_list(shuffled, 5))
    assert sorted(map(tuple, torch.cat([pairs.T, shifts], 1).tolist())) == full
    assert bool((pairs[0].diff() >= 0).all())
    assert same(half_to_full(*as_list(shuffled, 5)), expanded)
    check_full_list(*expanded)


def test_a_half_list_may_hold_each_pair_in_either_direction(crystal):
    _, full, half = crystal
    rng = np.random.default_rng(2)
    reverse = [(j, i, -a, -b, -c) for i, j, a, b, c in half]
    mixed = [pair if rng.random() < 0.5 else back for pair, back in zip(half, reverse)]
    for pairs in (reverse, mixed):
        assert same(half_to_full(*as_list(sorted(pairs), 5)), as_list(full, 5))


def test_a_list_of_the_other_kind_is_refused(crystal):
    _, full, half = crystal
    with pytest.raises(ValueError, match="not a half list") as caught:
        half_to_full(*as_list(full, 5))
    assert str((*full[0][:2], full[0][2:])) in str(caught.value)
    with pytest.raises(ValueError, match="not a full list"):
        full_to_half(*as_list(half, 5))
    back = next((j, i, -a, -b, -c) for i, j, a, b, c in reversed(half) if i != j)
    for twice in (back, half[-1]):
        with pytest.raises(ValueError, match="not a half list"):
            half_to_full(*as_list(sorted([*half, twice]), 5))
    with pytest.raises(ValueError, match="joins an atom with itself"):
        half_to_full(*as_list([(0, 0, 0, 0, 0), (0, 1, 0, 0, 0)], 2))
    with pytest.raises(ValueError, match="itself"):
        full_to_half(*as_list([(0, 0, 0, 0, 0), (0, 1, 0, 0, 0), (1, 0, 0, 0, 0)], 2))


def broken(full, how):
    """A full list with one fault, and the pair that a message should name."""
    victim = full[7]
    reverse = (victim[1], victim[0], *(-s for s in victim[2:]))
    if how == "one direction is missing":
        return [p for p in full if p != reverse], victim
    if how == "twice":
        return sorted([*full, victim]), victim
    if how == "both directions twice":
        return sorted([*full, victim, reverse]), min(victim, reverse)
    if how == "wrong image":
        moved = (*victim[:4], victim[4] + 9)
        return [moved if p == victim else p for p in full], None
    assert how == "an atom with itself"
    return sorted([*full, (2, 2, 0, 0, 0)]), (2, 2, 0, 0, 0)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("one direction is missing", "half_fill=False"),
        ("twice", "more than once"),
        ("both directions twice", "more than once"),
        ("wrong image", "not full"),
        ("an atom with itself", "itself"),
    ],
)
def test_the_check_names_the_first_pair_that_a_gather_kernel_would_get_wrong(crystal, how, message):
    _, full, _ = crystal
    check_full_list(*as_list(full, 5))
    faulty, culprit = broken(full, how)
    matrix, count, shifts = as_matrix(faulty, 5, 5)
    for check in (
        lambda: check_full_list(*as_list(faulty, 5)),
        lambda: check_full_list(neighbor_matrix=matrix, num_neighbors=count, neighbor_matrix_shifts=shifts),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            check()
        if culprit is not None:
            assert str((culprit[0], culprit[1], culprit[2:])) in str(caught.value)


def test_the_check_wants_sorted_pairs_and_fitting_pointers(crystal):
    _, full, half = crystal
    pairs, ptr, shifts = as_list(full, 5)
    with pytest.raises(ValueError, match="half_to_full"):
        check_full_list(*as_list(half, 5))
    with pytest.raises(ValueError, match="sorted"):
        check_full_list(pairs.flip(1), ptr, shifts.flip(0))
    for wrong in (ptr + 1, ptr[:-1], ptr.flip(0)):
        with pytest.raises(ValueError, match="neighbor_ptr"):
            check_full_list(pairs, wrong, shifts)
    with pytest.raises(ValueError, match="outside of 0"):
        check_full_list(torch.stack([pairs[0], pairs[1] + 1]), ptr, shifts)
    with pytest.raises(ValueError, match="needed"):
        check_full_list()
    with pytest.raises(ValueError, match="one of them"):
        check_full_list(pairs, ptr, neighbor_matrix=pairs)


# -- geometry -------------------------------------------------------------------------------------


def two_systems(crystal):
    """A batch of two skewed crystals, its pairs in both formats, padded with indices that no atom has."""
    first, second = crystal[0], triclinic(3, seed=5)
    x = torch.cat([first.positions, second.positions])
    cell = torch.cat([first.cell, second.cell])
    batch_idx = torch.tensor([0] * 5 + [1] * 3, dtype=torch.int32)
    other = all_pairs(second.positions.numpy(), CUTOFF, second.cell[0].numpy(), (True, True, True))
    pairs = [*crystal[1], *((i + 5, j + 5, *shift) for i, j, *shift in other)]
    return x, cell, batch_idx, as_list(pairs, 8), as_matrix(pairs, 8, 8), pairs


def expected_vectors(x, cell, batch_idx, pairs):
    return torch.stack([x[j] - x[i] + torch.tensor(s, dtype=x.dtype) @ cell[int(batch_idx[i])] for i, j, *s in pairs])


def test_both_formats_give_the_vectors_of_the_definition(crystal, device, dtype, tolerance):
    x, cell, batch_idx, (pairs, _, shifts), (matrix, count, matrix_shifts), tuples = two_systems(crystal)
    expected = expected_vectors(x, cell, batch_idx, tuples).to(dtype)
    on = {"device": device}
    x, cell = x.to(device, dtype), cell.to(device, dtype)
    d, v = list_geometry(x, pairs.to(**on), shifts.to(**on), cell, batch_idx.to(**on))
    assert d.dtype == v.dtype == dtype
    torch.testing.assert_close(v.cpu(), expected, **tolerance)
    torch.testing.assert_close(d.cpu(), expected.norm(dim=1), **tolerance)
    inputs = [t.to(**on) for t in (matrix, count, matrix_shifts)]
    d_matrix, v_matrix = matrix_geometry(x, *inputs, cell, batch_idx.to(**on))
    occupied = (matrix != 8).to(**on)
    assert torch.equal(d_matrix[occupied], d) and torch.equal(v_matrix[occupied], v)
    assert not d_matrix[~occupied].any() and not v_matrix[~occupied].any()
    without_counts = matrix_geometry(x, inputs[0], None, inputs[2], cell, batch_idx.to(**on))
    assert same(without_counts, (d_matrix, v_matrix))


def test_a_fill_value_that_is_an_atom_is_padding(crystal):
    x, cell, batch_idx, _, (matrix, count, shifts), _ = two_systems(crystal)
    d, v = matrix_geometry(x, matrix, count, shifts, cell, batch_idx, fill_value=2)
    assert not d[matrix == 2].any() and not v[matrix == 2].any()
    real = (matrix != 2) & (matrix != 8)
    assert torch.equal(d[real], matrix_geometry(x, matrix, count, shifts, cell, batch_idx)[0][real])


def test_one_cell_in_any_form_and_no_cell(crystal):
    system, full, _ = crystal
    pairs, _, shifts = as_list(full, 5)
    expected = list_geometry(system.positions, pairs, shifts, system.cell[0])
    assert same(list_geometry(system.positions, pairs, shifts, system.cell), expected)
    assert same(list_geometry(system.positions, pairs, shifts, system.cell, system.batch_idx), expected)
    _, v = list_geometry(system.positions, pairs)
    assert torch.equal(v, system.positions[pairs[1].long()] - system.positions[pairs[0].long()])


def test_rows_for_chosen_atoms(crystal):
    x, cell, batch_idx, (pairs, ptr, shifts), (matrix, count, matrix_shifts), _ = two_systems(crystal)
    chosen = torch.tensor([6, 0, 6], dtype=torch.int32)
    whole = matrix_geometry(x, matrix, count, matrix_shifts, cell, batch_idx)
    rows = (t[chosen.long()] for t in (matrix, count, matrix_shifts))
    part = matrix_geometry(x, *rows, cell, batch_idx, target_indices=chosen)
    assert same(part, [t[chosen.long()] for t in whole])
    picked = torch.cat([torch.arange(int(ptr[i]), int(ptr[i + 1])) for i in chosen.tolist()])
    row = torch.repeat_interleave(torch.arange(3, dtype=torch.int32), ptr.diff()[chosen.long()])
    some = torch.stack([row, pairs[1, picked]])
    result = list_geometry(x, some, shifts[picked], cell, batch_idx, target_indices=chosen)
    assert same(result, [t[picked] for t in list_geometry(x, pairs, shifts, cell, batch_idx)])


def test_padding_and_coincident_atoms_have_finite_zero_derivatives():
    x = torch.tensor([[0.0, 0, 0], [0, 0, 0], [1, 2, 2]], dtype=torch.float64, requires_grad=True)
    cell = torch.eye(3, dtype=torch.float64).mul(9).requires_grad_()
    for junk in (3, -1, 2**31 - 1, 0):
        matrix = torch.tensor([[1, 2, junk], [0, junk, junk], [junk] * 3], dtype=torch.int32)
        count = torch.tensor([2, 1, 0], dtype=torch.int32)
        shifts = torch.full((3, 3, 3), 2**30, dtype=torch.int32)
        shifts[0, :2] = shifts[1, 0] = 0
        d, v = matrix_geometry(x, matrix, count, shifts, cell)
        assert d.tolist() == [[0, 3, 0], [0, 0, 0], [0, 0, 0]] and not v[d == 0].any()
        gradients = torch.autograd.grad((d + d.square()).sum(), (x, cell), create_graph=True)
        direction = torch.tensor([1, 2, 2], dtype=torch.float64) / 3 * (1 + 2 * 3)
        torch.testing.assert_close(gradients[0], torch.stack([-direction, 0 * direction, direction]))
        assert not gradients[1].any()
        second = torch.autograd.grad(sum(g.square().sum() for g in gradients), (x, cell))
        assert all(bool(torch.isfinite(g).all()) for g in second)
        assert bool(second[0][[0, 2]].any()) and not second[0][1].any() and not second[1].any()
        # padding may not even look at an atom whose position is not known
        lost = torch.cat([x.detach()[:2], torch.full((1, 3), torch.nan, dtype=torch.float64)]).requires_grad_()
        count = torch.tensor([1, 1, 0], dtype=torch.int32)
        d, _ = matrix_geometry(lost, matrix, count, shifts, cell)
        assert not d.any() and not torch.autograd.grad(d.sum(), lost)[0].any()
    d, _ = list_geometry(x, torch.tensor([[0, 1], [1, 0]]))
    (first,) = torch.autograd.grad(d.sum(), x, create_graph=True)
    assert not d.any() and not first.any() and not torch.autograd.grad(first.sum(), x)[0].any()


def test_a_lattice_vector_of_nan_along_an_open_axis_leaks_nowhere():
    rows = [[4.0, 0.5, 0.0], [0.0, 5.0, 0.3], [torch.nan] * 3]
    cell = torch.tensor([rows, rows], dtype=torch.float64, requires_grad=True)
    x = torch.rand(4, 3, dtype=torch.float64, requires_grad=True)
    pairs = torch.tensor([[0, 1, 2, 3], [1, 0, 2, 2]])
    shifts = torch.tensor([[1, 0, 0], [-1, 0, 0], [0, -2, 0], [0, 0, 0]])
    matrix, images = pairs[1].unsqueeze(1), shifts.unsqueeze(1)
    batch_idx = torch.tensor([0, 0, 1, 1])
    for c, b in ((cell, batch_idx), (cell[0], None)):
        for d, v in (
            list_geometry(x, pairs, shifts, c, b),
            matrix_geometry(x, matrix, torch.ones(4, dtype=torch.int32), images, c, b),
        ):
            assert bool(torch.isfinite(v).all())
            first = torch.autograd.grad((d * d.detach() + v.sum(-1)).sum(), (x, cell), create_graph=True)
            second = torch.autograd.grad(sum(g.square().sum() for g in first), (x, cell))
            assert all(bool(torch.isfinite(g).all()) for g in (*first, *second))
            assert bool(first[1][0, 0].any()) and not first[1][:, 2].any()
    # the companion in a batch changes no bit
    whole = torch.nan_to_num(cell.detach(), nan=3.0)
    mixed = torch.stack([whole[0], cell.detach()[1]])
    alone = list_geometry(x, pairs[:, :2], shifts[:2], whole[0])
    assert all(torch.equal(a[:2], b) for a, b in zip(list_geometry(x, pairs, shifts, mixed, batch_idx), alone))
    # a shift along that axis is a mistake, and stays visible
    assert bool(list_geometry(x, pairs[:, :1], torch.tensor([[0, 0, 1]]), cell[0])[0].isnan())


def test_strided_and_expanded_tensors_give_the_same(crystal):
    x, cell, batch_idx, (pairs, ptr, shifts), matrix, _ = two_systems(crystal)
    strided = torch.stack([x, x], 1)[:, 0]
    turned = cell.mT.contiguous().mT
    assert not strided.is_contiguous() and not turned.is_contiguous()
    columns = pairs.T.contiguous().T
    images = shifts.T.contiguous().T
    expected = list_geometry(x, pairs, shifts, cell, batch_idx)
    assert same(list_geometry(strided, columns, images, turned, batch_idx), expected)
    assert same(full_to_half(columns, ptr, images), full_to_half(pairs, ptr, shifts))
    wide = get_neighbor_matrix_from_neighbor_list(columns, ptr, images)
    assert same(wide, get_neighbor_matrix_from_neighbor_list(pairs, ptr, shifts))
    transposed = [t.transpose(0, 1).contiguous().transpose(0, 1) if t.ndim > 1 else t for t in matrix]
    assert same(get_neighbor_list_from_neighbor_matrix(*transposed), (pairs, ptr, shifts))


# -- compiled -------------------------------------------------------------------------------------


def energy_of(x, cell, batch_idx, matrix, count, matrix_shifts, pairs, shifts):
    d, _ = matrix_geometry(x, matrix, count, matrix_shifts, cell, batch_idx)
    r, v = list_geometry(x, pairs, shifts, cell, batch_idx)
    return torch.where(d > 0, torch.exp(-d), 0.0).sum() + (r * v.sum(1)).sum()


def around(pairs, ptr, shifts):
    """From full to half and back, and into a matrix: all that has a static shape."""
    half = full_to_half(pairs, ptr, shifts)
    full = half_to_full(*half)
    return half, full, get_neighbor_matrix_from_neighbor_list(*full, max_neighbors=pairs.shape[1])


@pytest.mark.everyday_cases("aot_eager")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_compiled_geometry_equals_eager(crystal, backend):
    x, cell, batch_idx, (pairs, _, shifts), matrix, _ = two_systems(crystal)
    x.requires_grad_(), cell.requires_grad_()
    inputs = (x, cell, batch_idx, *matrix, pairs, shifts)
    expected = energy_of(*inputs)
    value = torch.compile(energy_of, backend=backend, fullgraph=True)(*inputs)
    torch.testing.assert_close(value, expected)
    gradients = torch.autograd.grad(expected, (x, cell))
    torch.testing.assert_close(torch.autograd.grad(value, (x, cell)), gradients)


def test_compiled_formats_equal_eager(crystal):
    _, _, _, pairs, _, _ = two_systems(crystal)
    half, full, matrix = torch.compile(around, backend="aot_eager", fullgraph=True)(*pairs)
    assert all(same(a, b) for a, b in zip((half, full, matrix), around(*pairs)))
    assert same(full, pairs) and len(half[0][0]) == len(pairs[0][0]) // 2


@pytest.mark.parametrize("mapped", [(0, 0, 0), (None, None, 0), (None, 0, None)])
def test_formats_under_vmap_equal_those_of_each_list(mapped, crystal):
    """Two lists of a crystal and its mirror image, which differ in their shifts."""
    _, _, _, (pairs, ptr, shifts), _, _ = two_systems(crystal)
    lists = [(pairs, ptr, sign * shifts) if mapped[2] == 0 else (pairs, ptr, shifts) for sign in (1, -1)]
    together = [torch.stack(both) if dim == 0 else both[0] for both, dim in zip(zip(*lists), mapped)]
    found = torch.func.vmap(around, in_dims=mapped)(*together)
    for number, each in enumerate(lists):
        assert all(same([t[number] for t in a], b) for a, b in zip(found, around(*each)))
    if mapped[:2] != (None, None):
        with pytest.raises(ValuesNeededError, match="max_neighbors"):
            torch.func.vmap(get_neighbor_matrix_from_neighbor_list, in_dims=mapped)(*together)


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_compiled_lists_of_unknown_length(crystal):
    x, cell, batch_idx, pairs, matrix, _ = two_systems(crystal)

    def chain(matrix, count, shifts):
        full = get_neighbor_list_from_neighbor_matrix(matrix, count, shifts)
        again = half_to_full(*full_to_half(*full))
        return full, again, list_geometry(x, again[0], again[2], cell, batch_idx)

    full, again, geometry = torch.compile(chain, backend="aot_eager", fullgraph=True)(*matrix)
    assert same(full, pairs) and same(again, pairs)
    torch.testing.assert_close(geometry, list_geometry(x, pairs[0], pairs[2], cell, batch_idx))
    # values are not checked here: what is there is returned, consistently, and the count tells
    convert = torch.compile(get_neighbor_list_from_neighbor_matrix, backend="aot_eager", fullgraph=True)
    short = [t[:, :2] if t.ndim > 1 else t for t in matrix]
    cut, ptr, shifts = convert(*short)
    assert cut.shape[1] == int(ptr[-1]) == len(shifts) == 16 and int(short[1].max()) > 2


def test_compiled_matrices_that_are_too_narrow_show_it_in_the_counts(crystal):
    _, _, _, pairs, (matrix, count, shifts), _ = two_systems(crystal)

    def narrow(*given):
        return get_neighbor_matrix_from_neighbor_list(*given, max_neighbors=3)

    result = torch.compile(narrow, backend="aot_eager", fullgraph=True)(*pairs)
    assert same(result, (matrix[:, :3], count, shifts[:, :3]))


# -- arguments ------------------------------------------------------------------------------------

X = torch.zeros(3, 3, dtype=torch.float64)
CELL = torch.eye(3, dtype=torch.float64)
MATRIX = torch.tensor([[1], [0], [3]])
COUNT = torch.tensor([1, 1, 0])
PAIRS = torch.tensor([[0, 1], [1, 0]])
PTR = torch.tensor([0, 1, 2, 2])
SHIFTS = torch.zeros(2, 3, dtype=torch.int32)


@pytest.mark.parametrize(
    ("error", "argument", "call"),
    [
        (TypeError, "neighbor_matrix", lambda: get_neighbor_list_from_neighbor_matrix(MATRIX.double(), COUNT)),
        (ValueError, "neighbor_matrix", lambda: get_neighbor_list_from_neighbor_matrix(COUNT, COUNT)),
        (ValueError, "num_neighbors", lambda: get_neighbor_list_from_neighbor_matrix(MATRIX, COUNT[:2])),
        (ValueError, "num_neighbors", lambda: get_neighbor_list_from_neighbor_matrix(MATRIX, -COUNT)),
        (ValueError, "num_neighbors", lambda: get_neighbor_list_from_neighbor_matrix(MATRIX, COUNT | (2**31 - 1))),
        (ValueError, "shift", lambda: get_neighbor_list_from_neighbor_matrix(MATRIX, COUNT, SHIFTS)),
        (ValueError, "neighbor_list", lambda: get_neighbor_matrix_from_neighbor_list(PAIRS[0], PTR)),
        (ValueError, "sorted", lambda: get_neighbor_matrix_from_neighbor_list(PAIRS.flip(1), PTR)),
        (ValueError, "neighbor_ptr", lambda: get_neighbor_matrix_from_neighbor_list(PAIRS, PTR[:2])),
        (ValueError, "neighbor_ptr", lambda: get_neighbor_matrix_from_neighbor_list(PAIRS, PTR[:0])),
        (ValueError, "neighbor_ptr", lambda: half_to_full(PAIRS, torch.tensor([0, 2, 1, 2]))),
        (ValueError, "max_neighbors", lambda: get_neighbor_matrix_from_neighbor_list(PAIRS, PTR, max_neighbors=-1)),
        (TypeError, "max_neighbors", lambda: get_neighbor_matrix_from_neighbor_list(PAIRS, PTR, max_neighbors=40.7)),
        (TypeError, "max_neighbors", lambda: get_neighbor_matrix_from_neighbor_list(PAIRS, PTR, max_neighbors="a")),
        (TypeError, "fill_value", lambda: get_neighbor_matrix_from_neighbor_list(PAIRS, PTR, fill_value="a")),
        (TypeError, "fill_value", lambda: get_neighbor_matrix_from_neighbor_list(PAIRS, PTR, fill_value=-1.5)),
        (TypeError, "fill_value", lambda: get_neighbor_list_from_neighbor_matrix(MATRIX, COUNT, fill_value="a")),
        (TypeError, "fill_value", lambda: get_neighbor_list_from_neighbor_matrix(MATRIX, COUNT, fill_value=3.0)),
        (TypeError, "fill_value", lambda: matrix_geometry(X, MATRIX, COUNT, fill_value="a")),
        (ValueError, "shifts", lambda: half_to_full(PAIRS[:, :1], PTR[:2], SHIFTS)),
        (TypeError, "shifts", lambda: full_to_half(PAIRS, PTR, SHIFTS.double())),
        (TypeError, "positions", lambda: list_geometry(X.half(), PAIRS)),
        (TypeError, "positions", lambda: list_geometry(X.numpy(), PAIRS)),
        (ValueError, "positions", lambda: list_geometry(X[0], PAIRS)),
        (ValueError, "cell", lambda: list_geometry(X, PAIRS, SHIFTS)),
        (ValueError, "shifts", lambda: list_geometry(X, PAIRS, cell=CELL)),
        (TypeError, "cell", lambda: list_geometry(X, PAIRS, SHIFTS, CELL.bfloat16())),
        (TypeError, "cell", lambda: list_geometry(X, PAIRS, SHIFTS, CELL.numpy())),
        (ValueError, "cell", lambda: list_geometry(X, PAIRS, SHIFTS, CELL[:2])),
        (ValueError, "batch_idx", lambda: list_geometry(X, PAIRS, SHIFTS, CELL.expand(2, 3, 3))),
        (ValueError, "batch_idx", lambda: list_geometry(X, PAIRS, SHIFTS, CELL, COUNT[:2])),
        (IndexError, "index", lambda: list_geometry(X, PAIRS + 2)),
        (ValueError, "neighbor_matrix", lambda: matrix_geometry(X, MATRIX[:2], COUNT[:2])),
        (ValueError, "num_neighbors", lambda: matrix_geometry(X, MATRIX, COUNT[:2])),
        (ValueError, "target_indices", lambda: matrix_geometry(X, MATRIX, COUNT, target_indices=COUNT[:2])),
        (ValueError, "num_neighbors", lambda: check_full_list(neighbor_matrix=MATRIX)),
    ],
)
def test_bad_arguments_are_named(error, argument, call):
    with pytest.raises(error, match=argument):
        call()


def test_a_compiled_matrix_needs_its_width():
    convert = torch.compile(get_neighbor_matrix_from_neighbor_list, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="max_neighbors"):
        convert(PAIRS, PTR)


# -- how much room ----------------------------------------------------------------------------------


def test_estimated_rows_hold_a_sphere_of_atoms():
    assert [estimate_max_neighbors(r) for r in (3.0, 5.0, 10.0)] == [32, 112, 848]
    assert [estimate_max_neighbors(r, 0.1) for r in (3.0, 5.0, 10.0)] == [16, 64, 432]
    for cutoff, density, factor in itertools.product((2.0, 6.5), (0.05, 0.3), (0.5, 3.0)):
        assert estimate_max_neighbors(cutoff, density, factor) == estimate_max_neighbors(cutoff, density * factor)
    assert (
        estimate_max_neighbors(0.1) == estimate_max_neighbors(0.0) == 16
        and estimate_max_neighbors(0.1, max_neighbors_lower_bound=40) == 48
    )
    assert estimate_max_neighbors(0.1, max_neighbors_lower_bound=0) == 16


def test_bad_estimates_are_named():
    """Beside those of tests/arguments/test_checks.py."""
    for argument, value in (("cutoff", -1.0), ("cutoff", 1e200), ("atomic_density", -0.1), ("safety_factor", 0.0)):
        with pytest.raises(ValueError, match=argument):
            estimate_max_neighbors(**{"cutoff": 5.0, argument: value})
    with pytest.raises(ValueError, match="max_neighbors_lower_bound"):
        estimate_max_neighbors(5.0, max_neighbors_lower_bound=-1)


def test_clients_find_the_names_where_they_look():
    assert neighbor_utils.estimate_max_neighbors is estimate_max_neighbors
    assert neighbor_utils.get_neighbor_list_from_neighbor_matrix is formats.get_neighbor_list_from_neighbor_matrix


# -- the other way round --------------------------------------------------------------------------


def test_the_transpose_of_a_list_is_sorted_by_j_and_sums_as_index_add_does(crystal):
    *_, full, _ = crystal
    pairs, _, _ = as_list(full, 5)
    pairs = pairs[:, torch.randperm(pairs.shape[1], generator=torch.Generator().manual_seed(1))]
    order, ptr = transpose_order(pairs, 7)  # two atoms without pairs
    j = pairs[1, order]
    assert (j.diff() >= 0).all() and torch.equal(order.sort()[0], torch.arange(len(j)))
    assert torch.equal(ptr.diff(), torch.bincount(pairs[1], minlength=7).int()) and ptr[0] == 0
    assert (order.diff()[j.diff() == 0] > 0).all()  # stable
    values = torch.arange(len(j), dtype=torch.float64).cos()
    sums = torch.segment_reduce(values[order], "sum", offsets=ptr)
    assert torch.allclose(sums, torch.zeros(7, dtype=torch.float64).index_add(0, pairs[1], values))
    assert transpose_order(pairs[:, :0], 3)[1].tolist() == [0, 0, 0, 0]
    with pytest.raises(ValueError, match="j must be in"):
        transpose_order(pairs, 4)
    compiled = torch.compile(transpose_order, fullgraph=True, backend="aot_eager")
    assert same(compiled(pairs, 7), (order, ptr))


@pytest.mark.parametrize("n_atoms", [100, 10**7])
def test_pairs_that_are_listed_twice_follow_each_other(n_atoms):
    """Also with another image between them, where keys of many atoms leave no room for images."""
    pairs = torch.tensor([[5, 5, 3, 5, 5], [7, 7, 9, 7, 2]])
    images = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 0, 0], [1, 0, 1], [0, 0, 0]])
    order = order_of_pairs(*pairs, images, n_atoms)
    assert order.tolist() == [2, 4, 0, 3, 1]
    assert repeats(pairs[:, order], images[order]).tolist() == [False, False, False, True, False]
