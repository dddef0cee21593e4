"""A list is called stale exactly when an atom's coordinates moved further than the threshold."""

import pytest
import torch

from nvalchemiops.torch.neighbors import rebuild_detection
from nvalchemiops.torch.neighbors.rebuild_detection import (
    batch_cell_list_needs_rebuild,
    batch_neighbor_list_needs_rebuild,
    cell_list_needs_rebuild,
    check_cell_list_rebuild_needed,
    check_neighbor_list_rebuild_needed,
    neighbor_list_needs_rebuild,
)

CELL = torch.eye(3, dtype=torch.float64) * 6.0
ALL = torch.ones(3, dtype=torch.bool)
BATCH = torch.tensor([0, 2, 0, 2, 3, 2, 0, 3], dtype=torch.int32)  # in any order, and system 1 is empty


def coordinates(dtype=torch.float64, device="cpu"):
    return torch.rand(8, 3, generator=torch.Generator().manual_seed(0), dtype=dtype).to(device) * 6.0


def moved(x, atom, by):
    result = x.clone()
    result[atom] += torch.as_tensor(by, dtype=x.dtype, device=x.device)
    return result


def test_the_threshold_is_a_distance_and_belongs_to_what_is_allowed(dtype, device):
    x = torch.zeros(2, 3, dtype=dtype, device=device)
    step = (0.25, 0.5, 0.5)  # of length 0.75, without rounding
    for threshold in (0.75, torch.tensor(0.75)):
        assert neighbor_list_needs_rebuild(x, moved(x, 1, step), threshold).tolist() == [False]
    assert neighbor_list_needs_rebuild(x, moved(x, 1, step), 0.7499).tolist() == [True]
    # neither the sum over atoms nor the largest component counts
    assert neighbor_list_needs_rebuild(x, x + torch.tensor(step, dtype=dtype, device=device), 0.75).tolist() == [False]
    assert neighbor_list_needs_rebuild(x, moved(x, 0, (0.5, 0.5, 0.5)), 0.75).tolist() == [True]


def test_with_a_threshold_of_zero_every_change_counts(dtype):
    x = coordinates(dtype)
    assert not neighbor_list_needs_rebuild(x, x.clone(), 0.0)
    least = x.clone()
    least[3, 1] = torch.nextafter(x[3, 1], torch.tensor(10.0, dtype=dtype))
    assert neighbor_list_needs_rebuild(x, least, 0.0)
    tiny = torch.zeros(1, 3, dtype=dtype)
    assert neighbor_list_needs_rebuild(tiny, tiny + torch.finfo(dtype).tiny, 0.0)


@pytest.mark.parametrize("threshold", [0.0, 0.5, 1e300])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_positions_that_are_no_numbers_ask_for_the_build_that_reports_them(value, threshold):
    x = coordinates()
    lost = moved(x, 4, value)
    for reference in (x, lost):
        assert neighbor_list_needs_rebuild(reference, lost, threshold).tolist() == [True]
        flags = batch_neighbor_list_needs_rebuild(reference, lost, BATCH, threshold, num_systems=4)
        assert flags.tolist() == [False, False, False, True]


@pytest.mark.parametrize("lattice", [{}, {"cell": CELL, "cell_inv": CELL.inverse(), "pbc": ALL}])
def test_an_atom_put_back_on_the_other_side_makes_the_list_stale(lattice):
    # its shifts refer to the old coordinates, although the smallest displacement over all images is zero
    x = coordinates()
    folded = moved(x, 5, -CELL[2])
    assert neighbor_list_needs_rebuild(x, folded, 0.5, **lattice).tolist() == [True]
    assert check_neighbor_list_rebuild_needed(x, folded, 0.5, False, *lattice.values()).tolist() == [True]
    batched = {name: t.expand(4, *t.shape) for name, t in lattice.items()}
    flags = batch_neighbor_list_needs_rebuild(x, folded, BATCH, 0.5, num_systems=4, **batched)
    assert flags.tolist() == [False, False, True, False]


def test_only_the_system_that_moved_is_flagged(device):
    x = coordinates(device=device)
    batch_idx = BATCH.to(device)
    for atom in range(8):
        flags = batch_neighbor_list_needs_rebuild(x, moved(x, atom, 0.4), batch_idx, 0.5, num_systems=4)
        assert flags.device.type == device.type and flags.dtype == torch.bool
        assert flags.tolist() == [s == int(BATCH[atom]) for s in range(4)]
    everywhere = batch_neighbor_list_needs_rebuild(x, x + 0.4, batch_idx, 0.5, num_systems=4)
    assert everywhere.tolist() == [True, False, True, True], "a system without atoms is never stale"


def test_the_number_of_systems_comes_from_whatever_tells_it():
    x = coordinates()
    there = moved(x, 0, 1.0)

    def flags(**options):
        return batch_neighbor_list_needs_rebuild(x, there, BATCH, 0.5, **options).tolist()

    for options in ({}, {"cell": CELL}, {"cell": CELL.expand(1, 3, 3), "pbc": ALL}):  # one cell for all
        assert flags(**options) == [True, False, False, False]
    for options in (
        {"num_systems": 6},
        {"cell": CELL.expand(6, 3, 3)},
        {"cell_inv": CELL.expand(6, 3, 3)},
        {"pbc": ALL.expand(6, 3)},
        {"pbc": ALL, "cell": CELL.expand(6, 3, 3), "num_systems": 6},
        {"pbc": ALL.expand(6, 3), "cell": CELL.expand(1, 3, 3)},
    ):
        assert flags(**options) == [True, False, False, False, False, False]
    none = torch.zeros(0, 3, dtype=torch.float64)
    assert batch_neighbor_list_needs_rebuild(none, none, BATCH[:0], 0.5).shape == (0,)
    assert batch_neighbor_list_needs_rebuild(none, none, BATCH[:0], 0.5, num_systems=2).tolist() == [False, False]
    assert neighbor_list_needs_rebuild(none, none, 0.5).tolist() == [False]


def test_the_reference_follows_in_place_where_it_is_stale():
    x = coordinates()
    near, far = moved(x, 0, 0.1), moved(moved(x, 0, 0.1), 4, 2.0)
    reference = x.clone()
    kept = reference
    assert not neighbor_list_needs_rebuild(reference, near, 0.5, True) and torch.equal(reference, x)
    assert neighbor_list_needs_rebuild(reference, far, 0.5, update_reference_positions=True)
    assert kept is reference and torch.equal(reference, far)
    reference = x.clone()
    assert batch_neighbor_list_needs_rebuild(reference, far, BATCH, 0.5, True).tolist() == [False, False, False, True]
    third = BATCH == 3
    assert torch.equal(reference[third], far[third]) and torch.equal(reference[~third], x[~third])
    # a drift in small steps adds up, since the reference stays
    reference, answers = x.clone(), []
    for step in range(1, 7):
        answers.append(bool(neighbor_list_needs_rebuild(reference, x + 0.1 * step, 0.5, True)))
    assert answers == [False, False, True, False, False, True]


def test_positions_with_gradients_are_welcome():
    x = coordinates().requires_grad_()
    there = x * 1.5
    assert not neighbor_list_needs_rebuild(x, there, 0.5).requires_grad
    assert neighbor_list_needs_rebuild(x, there, 0.5, update_reference_positions=True)
    assert x.requires_grad and x.is_leaf and torch.equal(x, there), "a leaf can be a reference too"


def test_no_bins_are_kept_so_a_cell_list_is_always_built(device):
    x, cell, pbc = coordinates(device=device), CELL.to(device), ALL.to(device)
    answer = cell_list_needs_rebuild(x, cell, pbc)
    assert answer.tolist() == [True] and answer.dtype == torch.bool and answer.device.type == device.type
    assert check_cell_list_rebuild_needed(x, cell.unsqueeze(0), pbc) is True
    flags = batch_cell_list_needs_rebuild(x, BATCH.to(device), cell.expand(4, 3, 3), pbc.expand(4, 3))
    assert flags.tolist() == [True] * 4


def test_compiled_equals_eager():
    def flags(reference, current, batch_idx, cell):
        one = neighbor_list_needs_rebuild(reference, current, 0.5)
        each = batch_neighbor_list_needs_rebuild(reference, current, batch_idx, 0.5, True, cell=cell)
        return one, each, batch_cell_list_needs_rebuild(current, batch_idx, cell, ALL)

    compiled = torch.compile(flags, backend="aot_eager", fullgraph=True)
    x, cells = coordinates(), CELL.expand(4, 3, 3)
    for atom in (0, 4):
        there = moved(x, atom, 1.0)
        references = x.clone(), x.clone()
        expected = flags(references[0], there, BATCH, cells)
        assert all(torch.equal(a, b) for a, b in zip(compiled(references[1], there, BATCH, cells), expected))
        assert torch.equal(*references) and not torch.equal(references[0], x)
    with pytest.raises(Exception, match="num_systems"):
        torch.compile(batch_neighbor_list_needs_rebuild, backend="eager", fullgraph=True)(x, x, BATCH, 0.5)


X = torch.zeros(2, 3, dtype=torch.float64)
TWO = torch.tensor([0, 1], dtype=torch.int32)


@pytest.mark.parametrize(
    ("error", "argument", "options"),
    [
        (TypeError, "current_positions", {"current_positions": X.int()}),
        (TypeError, "reference_positions", {"reference_positions": X.tolist()}),
        (TypeError, "reference_positions", {"reference_positions": X.float()}),
        (ValueError, "current_positions", {"current_positions": X[:, :2]}),
        (ValueError, "`reference_positions` is on meta", {"reference_positions": X.to("meta")}),
        (ValueError, "skin_distance_threshold", {"skin_distance_threshold": -0.1}),
        (ValueError, "skin_distance_threshold", {"skin_distance_threshold": float("nan")}),
        (ValueError, "skin_distance_threshold", {"skin_distance_threshold": float("inf")}),
        (TypeError, "skin_distance_threshold", {"skin_distance_threshold": "far"}),
        (TypeError, "batch_idx", {"batch_idx": TWO.double()}),
        (ValueError, "batch_idx", {"batch_idx": TWO[:1]}),
        (ValueError, "batch_idx", {"batch_idx": -TWO}),
        (ValueError, "batch_idx", {"num_systems": 1}),
        (ValueError, "num_systems", {"num_systems": -1}),
        (ValueError, "cell", {"cell": CELL.expand(3, 3, 3), "num_systems": 2}),
        (TypeError, "cell", {"cell": CELL.int()}),
        (ValueError, "cell_inv", {"cell_inv": CELL[:2]}),
        (TypeError, "pbc", {"pbc": torch.ones(3)}),
        (ValueError, "pbc", {"pbc": ALL.expand(3, 3), "num_systems": 2}),
        (TypeError, "unknown", {"unknown": 1}),
    ],
)
def test_bad_arguments_are_named(error, argument, options):
    given = {"reference_positions": X, "current_positions": X, "batch_idx": TWO, "skin_distance_threshold": 0.5}
    with pytest.raises(error, match=argument):
        batch_neighbor_list_needs_rebuild(**{**given, **options})
    if not {"batch_idx", "num_systems"} & options.keys() and argument != "unknown":
        del given["batch_idx"]
        with pytest.raises(error, match=argument):
            neighbor_list_needs_rebuild(**{**given, **options})


@pytest.mark.parametrize(
    ("error", "argument", "call"),
    [
        (TypeError, "cell", lambda: cell_list_needs_rebuild(X, None, ALL)),
        (TypeError, "pbc", lambda: cell_list_needs_rebuild(X, CELL, None)),
        (ValueError, "cell", lambda: check_cell_list_rebuild_needed(X, CELL.expand(2, 3, 3), ALL)),
        (ValueError, "cell", lambda: batch_cell_list_needs_rebuild(X, TWO, CELL[:2], ALL)),
        (TypeError, "batch_idx", lambda: batch_cell_list_needs_rebuild(X, None, CELL, ALL)),
        (TypeError, "neighbour", lambda: cell_list_needs_rebuild(X, CELL, ALL, neighbour=1)),
        (TypeError, "neighbour", lambda: check_cell_list_rebuild_needed(X, CELL, ALL, neighbour=1)),
        (TypeError, "neighbour", lambda: batch_cell_list_needs_rebuild(X, TWO, CELL, ALL, neighbour=1)),
    ],
)
def test_bad_arguments_about_cells_are_named(error, argument, call):
    with pytest.raises(error, match=argument):
        call()


def test_all_names_that_clients_call_are_there():
    assert len(rebuild_detection.__all__) == 6 and all(hasattr(rebuild_detection, n) for n in rebuild_detection.__all__)
