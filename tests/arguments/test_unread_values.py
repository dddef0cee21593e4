"""What only values can tell: refused by name where they are read, and NaN in one system's results where they are not.

A compiled graph stands for all places where values are not read: the kernels are those of a GPU, and nothing raises.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nvalchemiops.torch.interactions import electrostatics
from nvalchemiops.torch.interactions.dispersion import (
    D3Parameters,
    ReferenceStates,
    d3_dispersion,
    damping_parameters,
)
from nvalchemiops.torch.interactions.lj import lj_energy_forces
from nvalchemiops.torch.interactions.pair import lennard_jones
from nvalchemiops.torch.neighbors import neighbor_list
from nvalchemiops.torch.neighbors.rows import NO_PADDING
from nvalchemiops.torch.operators.lattice import check_vectors, usable_cells
from nvalchemiops.torch.runtime.context import hidden_values
from nvalchemiops.torch.spline import spline_gather_with_force, spline_spread
from nvalchemiops.torch.systems import System
from tests.lanes.fibers import gpu_layout
from tests.support.comparing import as_tuple
from tests.support.systems import batch, triclinic

CUTOFF, ALPHA, MESH = 4.0, 0.8, (8, 8, 8)
FIRST = 5
"""Atoms of the first system, which is well; the other three are those of the second, which is not."""

TWO = batch(triclinic(FIRST, charged=True), triclinic(3, seed=3))
POSITIONS, CHARGES, CELL, BATCH = TWO
PAIRS, PTR, SHIFTS = neighbor_list(POSITIONS, CUTOFF, CELL, batch_idx=BATCH, return_neighbor_list=True)
MATRIX, _, MATRIX_SHIFTS = neighbor_list(POSITIONS, CUTOFF, CELL, batch_idx=BATCH)
NEAR: dict[str, Any] = {
    "neighbor_list": PAIRS,
    "neighbor_ptr": PTR,
    "neighbor_shifts": SHIFTS,
    "batch_idx": BATCH,
}
IN_ROWS: dict[str, Any] = {"neighbor_matrix": MATRIX, "neighbor_matrix_shifts": MATRIX_SHIFTS, "batch_idx": BATCH}
IN_UNITS: dict[str, Any] = {**NEAR, "unit_shifts": SHIFTS}
del IN_UNITS["neighbor_shifts"]
ALL = {"compute_forces": True, "compute_virial": True}
LJ = {"sigma": 2.2, "epsilon": 0.05}
SLAB = torch.tensor([True, True, False])


def ewald(x: torch.Tensor, cell: torch.Tensor, **options: Any) -> Any:
    return electrostatics.ewald_summation(x, CHARGES, cell, **{"alpha": ALPHA, **NEAR, **ALL, **options})


PAIR_OPS: dict[str, Callable[..., Any]] = {
    "potential": lambda x, cell: lennard_jones(CUTOFF)(x, cell, **LJ, **IN_ROWS, **ALL),
    "Lennard-Jones": lambda x, cell: lj_energy_forces(x, 2.2, 0.05, CUTOFF, cell, **NEAR),
    "Coulomb": lambda x, cell: electrostatics.coulomb_energy_forces(x, CHARGES, cell, CUTOFF, **IN_ROWS),
    "damped": lambda x, cell: electrostatics.coulomb_energy_forces(x, CHARGES, cell, CUTOFF, ALPHA, **NEAR),
    "DSF": lambda x, cell: electrostatics.dsf_coulomb(x, CHARGES, CUTOFF, cell=cell, compute_virial=True, **IN_UNITS),
    "real space": lambda x, cell: electrostatics.ewald_real_space(x, CHARGES, cell, ALPHA, **NEAR, **ALL),
}
SUMS: dict[str, Callable[..., Any]] = {
    "Ewald": lambda x, cell: ewald(x, cell, k_cutoff=3.0),
    "Ewald in a box": lambda x, cell: ewald(x, cell, miller_bounds=(2, 2, 2)),
    "Ewald estimated": lambda x, cell: ewald(x, cell, alpha=None, cutoff=CUTOFF, accuracy=1e-3),
    "Ewald with exclusions": lambda x, cell: ewald(x, cell, k_cutoff=3.0, exclusions=torch.tensor([[0, 5], [1, 7]])),
    "reciprocal space": lambda x, cell: electrostatics.ewald_reciprocal_space(
        x, CHARGES, cell, None, ALPHA, BATCH, k_cutoff=3.0, **ALL
    ),
    "PME": lambda x, cell: electrostatics.particle_mesh_ewald(
        x, CHARGES, cell, ALPHA, mesh_dimensions=MESH, **NEAR, **ALL
    ),
    "mesh": lambda x, cell: electrostatics.pme_reciprocal_space(x, CHARGES, cell, ALPHA, MESH, batch_idx=BATCH, **ALL),
    "slab": lambda x, cell: electrostatics.compute_slab_correction(x, CHARGES, cell, SLAB, BATCH, **ALL),
}
SPLINES: dict[str, Callable[..., Any]] = {
    "spread": lambda x, cell: spline_spread(x, CHARGES, cell, MESH, batch_idx=BATCH),
    "gather": lambda x, cell: spline_gather_with_force(
        x, CHARGES, torch.ones(2, *MESH, dtype=x.dtype), cell, batch_idx=BATCH
    ),
}
OPS = {**PAIR_OPS, **SUMS, **SPLINES}


def unusable(how: str) -> torch.Tensor:
    """The cells of the batch, the second one broken."""
    cell = CELL.clone()
    if how == "one NaN":
        cell[1, 2, 1] = torch.nan
    elif how == "infinite":
        cell[1] = torch.inf
    elif how == "zero":
        cell[1] = 0.0
    elif how == "zero vector":
        cell[1, 2] = 0.0
    else:
        # dependent, but for rounding
        cell[1, 2] = 0.3 * cell[1, 0] + 0.6 * cell[1, 1]
    return cell


HOWS = ["one NaN", "infinite", "zero", "zero vector", "dependent"]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def split_in_two(result: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What belongs to the first system, and to the second."""
    at = FIRST if result.shape[0] == len(POSITIONS) else 1
    return result[:at], result[at:]


def assert_nan_in_the_second_only(found: Any, expected: Any) -> None:
    for result, right in zip(as_tuple(found), as_tuple(expected), strict=True):
        (well, broken), (as_ever, _) = split_in_two(result), split_in_two(right)
        torch.testing.assert_close(well, as_ever, rtol=1e-12, atol=1e-12)
        assert broken.isnan().all()


@pytest.mark.later_cases("mesh", "reciprocal space")
@pytest.mark.parametrize("op", OPS)
def test_an_unusable_cell_that_is_not_read_gives_nan_in_its_system_only(op):
    """Not the sum of pairs without images. One graph: neither the graph nor the kernels know which cell is broken."""
    call, right = compiled(OPS[op]), OPS[op](POSITIONS, CELL)
    for how in HOWS:
        assert_nan_in_the_second_only(call(POSITIONS, unusable(how)), right)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("op", OPS)
def test_an_unusable_cell_that_is_read_is_named(op, how):
    with pytest.raises(ValueError, match="`cell`"):
        OPS[op](POSITIONS, unusable(how))


SCALES = ([1.0] * 3, [1e-3, 1.0, 1e6], [1e-150] * 3, [1e102] * 3, [1.0, 1.0, 0.0], [1.0, 0.0, 1.0], [0.0, 0.0, 1.0])


def doubtful_cells() -> list[torch.Tensor]:
    """Flat and left-handed ones, in any unit, with vectors of zeros, and with entries that are not finite."""
    cells = []
    for turn in range(3):
        for angle in (1.0, -1.0, 1e-7, 1e-9, 1e-11, 0.0):
            vectors = torch.tensor([[2.0, 0.0, 0.0], [1.0, angle, 0.0], [0.5, 0.25, 3.0]], dtype=torch.float64)
            for scales in SCALES:
                scale = torch.tensor(scales, dtype=torch.float64).unsqueeze(1)
                cells.append((scale * vectors).roll((turn, turn), (0, 1)))
        for value in (torch.nan, torch.inf, -torch.inf):
            cells.append(CELL[0].clone())
            cells[-1][turn, 1] = value
    return [*cells, torch.zeros_like(CELL[0])]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("may_be_open", [False, True])
def test_cells_that_are_not_read_are_judged_as_those_that_are(may_be_open, dtype):
    cells = torch.stack(doubtful_cells()).to(dtype)
    usable = torch.full((len(cells),), torch.nan, dtype=dtype)
    for number, cell in enumerate(cells):
        with contextlib.suppress(ValueError):
            check_vectors(cell[None], may_be_open)
            usable[number] = 1.0
    torch.testing.assert_close(usable_cells(cells, may_be_open), usable, rtol=0.0, atol=0.0, equal_nan=True)
    assert 10 < int(usable.nansum()) < len(cells) - 10


NOT_EXCLUDABLE = {
    "with itself": [[1, 5], [2, 5]],
    "twice": [[1, 5, 6], [2, 6, 5]],
    "other system": [[5], [1]],
    "beyond": [[5], [8]],
    "below": [[5], [-1]],
}


@pytest.mark.parametrize("how", NOT_EXCLUDABLE)
def test_wrong_exclusions_that_are_not_read_give_nan(how):
    """In rows of their atoms: in sums over pairs, and where long-range parts are subtracted. On a CPU they raise."""
    pairs = torch.tensor(NOT_EXCLUDABLE[how])

    def potential(x, pairs):
        return lennard_jones(CUTOFF)(x, CELL, **LJ, **IN_ROWS, **ALL, exclusions=pairs)

    def ewald_sum(x, pairs):
        return ewald(x, CELL, miller_bounds=(2, 2, 2), exclusions=pairs)

    def in_lanes(x, pairs):
        with gpu_layout():
            return ewald_sum(x, pairs)

    def in_second_slice(x, pairs):
        slices = torch.vmap(potential, (None, 0))(x, torch.stack([pairs, pairs]))
        return [result[1] for result in slices]

    for function, unread in ((potential, compiled(potential)), (potential, in_second_slice), (ewald_sum, in_lanes)):
        right = function(POSITIONS, torch.tensor([[1], [2]]))
        for result, expected in zip(unread(POSITIONS, pairs), right, strict=True):
            (well, broken), (as_ever, _) = split_in_two(result), split_in_two(expected)
            assert broken.isnan().any()
            if how in ("with itself", "twice"):
                torch.testing.assert_close(well, as_ever, rtol=1e-12, atol=1e-12)
        with pytest.raises(ValueError, match="`exclusions`"):
            function(POSITIONS, pairs)


def test_a_full_list_that_is_not_read_is_not_taken_for_a_half_one():
    """Its pairs would count twice. The kernels find them, which on a CPU is an error."""
    call = compiled(lambda x, near: lennard_jones(CUTOFF)(x, CELL, **LJ, **near, half_list=True))
    half = neighbor_list(POSITIONS, CUTOFF, CELL, batch_idx=BATCH, return_neighbor_list=True, half_fill=True)
    right = lennard_jones(CUTOFF)(POSITIONS, CELL, **LJ, **NEAR)
    names = ("neighbor_list", "neighbor_ptr", "neighbor_shifts")
    torch.testing.assert_close(call(POSITIONS, NEAR | dict(zip(names, half))), right, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="with `half_list` a pair twice"):
        call(POSITIONS, NEAR)
    half = with_room(*half)
    torch.testing.assert_close(call(POSITIONS, NEAR | dict(zip(names, half))), right, rtol=1e-12, atol=1e-12)


def with_room(pairs: torch.Tensor, pointers: torch.Tensor, shifts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A list in memory with room for three more pairs, where only the entry after the last one is known."""
    room = torch.tensor([NO_PADDING, 1, 0], dtype=torch.int32)
    return torch.cat([pairs, room.expand(2, 3)], 1), pointers, torch.cat([shifts, shifts.new_ones(3, 3)])


def dispersion(x: torch.Tensor, cell: torch.Tensor, near: dict[str, Any], tables: ReferenceStates) -> Any:
    numbers = 6 + torch.arange(len(x)) % 3
    return d3_dispersion(x, numbers, DAMPING, tables, cell, BATCH, cutoff=CUTOFF, **near, **ALL)[0]


def tables(factorise: bool) -> ReferenceStates:
    """Of random tables, which factorise or not."""
    n, generator = 9, torch.Generator().manual_seed(0)
    counts, c6 = torch.rand(2, n, n, 5, 5, generator=generator, dtype=torch.float64)
    counts = 3.0 * counts[:, :1, :, :1].expand(n, n, 5, 5)
    c6 = c6[:, :1, :, :1] * c6[:, :1, :, :1].permute(1, 0, 3, 2) if factorise else c6 + c6.permute(1, 0, 3, 2)
    return D3Parameters(torch.full((n,), 1.5), torch.full((n,), 3.0), 9.0 * c6, counts).states([6, 7, 8])


DAMPING, FACTORISED, BY_PAIR = damping_parameters("pbe", "bj"), tables(True), tables(False)


@pytest.mark.parametrize("kind", ["half", "filled", "slab", "no cell", "D3", "D3 by pairs"])
def test_room_for_more_pairs_is_read_as_such(kind):
    """Where values are read as well: half lists, images along open axes or without a cell, pairs of padding atoms."""
    cell = None if kind == "no cell" else CELL.clone()
    if kind == "slab":
        cell[:, 2] = 0.0
    pbc = None if cell is None else (cell != 0.0).any(-1)
    found = neighbor_list(POSITIONS, CUTOFF, cell, pbc, BATCH, return_neighbor_list=True, half_fill=kind == "half")
    pairs, pointers, shifts = found if cell is not None else (*found, found[0].new_zeros(found[0].shape[1], 3))

    def call(*near):
        options = {"batch_idx": BATCH, "cutoff": CUTOFF, **dict(zip(NEAR, near))}
        if "D3" in kind:
            numbers = (torch.arange(len(POSITIONS)) % 4).clamp(min=1) + 5
            numbers[[1, -1]] = 0
            return d3_dispersion(POSITIONS, numbers, DAMPING, BY_PAIR if "by" in kind else FACTORISED, cell, **options)
        filled = {"half_list": True, "fill_value": -1} if kind == "filled" else {"half_list": kind == "half"}
        return lennard_jones(options.pop("cutoff"))(POSITIONS, cell, **LJ, **options, **filled, num_systems=2, **ALL)

    if kind == "filled":
        pairs[1, pairs[0] > pairs[1]] = -1
        pairs[1, (pairs[0] == pairs[1]) & (shifts @ torch.tensor([10**4, 100, 1], dtype=torch.int32) < 0)] = -1
    right = call(pairs, pointers, shifts)
    for dtype in (torch.int32, torch.int64):
        found = call(*(part.to(dtype) for part in with_room(pairs, pointers, shifts)))
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("read", [True, False])
def test_room_of_a_list_without_atoms(read):
    x, slab = POSITIONS[:0], torch.diag(torch.tensor([9.0, 9.0, 0.0], dtype=torch.float64))
    near = with_room(torch.zeros(2, 0).int(), torch.zeros(1).int(), torch.zeros(0, 3).int())
    listed = dict(zip(NEAR, near))
    with contextlib.nullcontext() if read else hidden_values():
        assert lennard_jones(CUTOFF)(x, slab, **LJ, **listed).shape == (0,)
        energy, _ = d3_dispersion(x, x[:, 0].long(), DAMPING, FACTORISED, CELL[0], cutoff=CUTOFF, **listed)
    assert not energy.any()


def test_slices_of_one_part_of_a_list():
    """Shifts of a half list, or neighbors in a list without a cell, whose other tensors are those of all slices."""
    half = neighbor_list(POSITIONS, CUTOFF, CELL, batch_idx=BATCH, return_neighbor_list=True, half_fill=True)
    pairs, pointers = neighbor_list(POSITIONS, CUTOFF, batch_idx=BATCH, return_neighbor_list=True)
    lone = with_room(pairs, pointers, pairs.new_zeros(pairs.shape[1], 3))
    for cell, near, part in ((CELL, half, "neighbor_shifts"), (None, lone, "neighbor_list")):
        given = {"batch_idx": BATCH, "half_list": near is half, "num_systems": 2, **dict(zip(NEAR, near))}

        def energies(t, cell=cell, given=given, part=part):
            return lennard_jones(CUTOFF)(POSITIONS, cell, **LJ, **{**given, part: t})

        found = torch.vmap(energies)(torch.stack([given[part]] * 2))
        torch.testing.assert_close(found, energies(given[part]).expand(2, -1), rtol=1e-12, atol=1e-12)


BY_MATRIX: dict[str, Callable[..., Any]] = {
    "potential": lambda x, cell, near: lennard_jones(CUTOFF)(x, cell, **LJ, **near, batch_idx=BATCH, **ALL),
    "Coulomb": lambda x, cell, near: electrostatics.coulomb_energy(x, CHARGES, cell, CUTOFF, **near, batch_idx=BATCH),
    "DSF": lambda x, cell, near: electrostatics.dsf_coulomb(
        x, CHARGES, CUTOFF, 0.2, cell, BATCH, **near, compute_virial=True
    ),
    "D3": lambda x, cell, near: dispersion(x, cell, near, FACTORISED),
    "D3 by pairs": lambda x, cell, near: dispersion(x, cell, near, BY_PAIR),
    "real space": lambda x, cell, near: electrostatics.ewald_real_space(
        x, CHARGES, cell, ALPHA, **near, batch_idx=BATCH, **ALL
    ),
    "dipoles": lambda x, cell, near: electrostatics.ewald_real_space(
        x, CHARGES, cell, ALPHA, **near, batch_idx=BATCH, dipoles=torch.sin(x), **ALL
    ),
}


@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize("op", BY_MATRIX)
def test_what_a_search_could_not_know_is_no_sum_without_neighbors(op, read):
    """A list of a cell that was not looked at: it is not that of a system whose axes are open.

    So for one with more images than a list can hold, and an atom too far away to tell its image, which no sum can see.
    """
    call = BY_MATRIX[op] if read else compiled(BY_MATRIX[op])

    def listed(x, cell):
        matrix, _, shifts = neighbor_list(x, CUTOFF, cell, batch_idx=BATCH, max_neighbors=100, check=False)
        return {"neighbor_matrix": matrix, "neighbor_matrix_shifts": shifts}

    right = call(POSITIONS, CELL, listed(POSITIONS, CELL))
    assert all(result.isfinite().all() for result in as_tuple(right))
    for how in HOWS:
        cell = unusable(how)
        near = listed(POSITIONS, cell)
        if read:
            with pytest.raises(ValueError, match="`cell`"):
                call(POSITIONS, cell, near)
        else:
            assert_nan_in_the_second_only(call(POSITIONS, cell, near), right)
    cell = torch.stack([CELL[0], 1e-9 * CELL[1]])
    assert_nan_in_the_second_only(call(POSITIONS, cell, listed(POSITIONS, cell)), right)
    x = POSITIONS.clone()
    x[-1, 0] = 1e200
    well, broken = split_in_two(as_tuple(call(x, CELL, listed(x, CELL)))[0])
    torch.testing.assert_close(well, split_in_two(as_tuple(right)[0])[0], rtol=1e-12, atol=1e-12)
    assert broken[-1].isnan()


@pytest.mark.parametrize("read", [True, False])
def test_an_axis_that_is_said_to_be_periodic_has_a_lattice_vector(read):
    """Without a word a vector of zeros is an open axis, and a list may have no images along it."""
    pairs, ptr = neighbor_list(POSITIONS, CUTOFF, batch_idx=BATCH, return_neighbor_list=True)
    near = {"neighbor_list": pairs, "neighbor_ptr": ptr, "neighbor_shifts": pairs.new_zeros(pairs.shape[1], 3)}

    def energies(cell, **options):
        return lennard_jones(CUTOFF)(POSITIONS, cell, **LJ, **near, batch_idx=BATCH, **options)

    call = energies if read else compiled(energies)
    cell, pbc = unusable("zero vector"), torch.ones(2, 3, dtype=torch.bool)
    right = call(cell)
    assert right.isfinite().all()
    if read:
        with pytest.raises(ValueError, match="`cell`"):
            call(cell, pbc=pbc)
    else:
        assert_nan_in_the_second_only(call(cell, pbc=pbc), right)
    pbc[1, 2] = False
    torch.testing.assert_close(call(cell, pbc=pbc), right, rtol=0, atol=0)


@pytest.mark.parametrize("read", [True, False])
def test_open_axes_need_no_lattice_vector(read):
    """A zero vector along an open axis, or all of them; and anything at all where ``pbc`` says that it is open."""
    cell = CELL.clone()
    cell[:, 2] = 0.0
    pbc = torch.tensor([True, True, False])
    pairs, ptr, shifts = neighbor_list(POSITIONS, CUTOFF, cell, pbc, BATCH, return_neighbor_list=True)
    flat = {"neighbor_list": pairs, "neighbor_ptr": ptr, "neighbor_shifts": shifts, "batch_idx": BATCH}

    def energies(cell, given, **options):
        return lennard_jones(CUTOFF)(POSITIONS, cell, **LJ, **given, **options, **ALL)

    call = energies if read else compiled(energies)
    right = energies(cell + torch.tensor([[0.0], [0.0], [9.0]]) * torch.eye(3), flat)
    torch.testing.assert_close(call(cell, flat), right, rtol=0, atol=0)
    torch.testing.assert_close(call(cell, {"batch_idx": BATCH}), right, rtol=0, atol=0)
    energies(cell, flat, check=True)
    with pytest.raises(ValueError, match="`neighbor_ptr` must fit"):
        energies(cell, {**flat, "neighbor_ptr": ptr + 1})
    mapped = torch.vmap(lambda b: energies(cell, {**flat, "batch_idx": b}))(torch.stack([BATCH, BATCH]))
    torch.testing.assert_close([result[1] for result in mapped], list(right), rtol=1e-12, atol=1e-12)
    for anything in (torch.nan, cell[:, 1]):
        cell[:, 2] = anything
        torch.testing.assert_close(call(cell, flat, pbc=pbc), right, rtol=0, atol=0)

    pairs, ptr = neighbor_list(POSITIONS, CUTOFF, batch_idx=BATCH, return_neighbor_list=True)
    alone = {"neighbor_list": pairs, "neighbor_ptr": ptr, "batch_idx": BATCH}
    with_zeros = {**alone, "neighbor_shifts": torch.zeros(pairs.shape[1], 3, dtype=torch.int32)}
    found = call(torch.zeros_like(CELL), with_zeros)
    torch.testing.assert_close(found, energies(None, alone, num_systems=2), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("op", "dtype"), [("potential", torch.float32), *((op, torch.float64) for op in (*PAIR_OPS, *SUMS))]
)
@pytest.mark.parametrize("infinite", [torch.inf, -torch.inf])
def test_infinite_positions_are_no_more_hidden_by_a_cutoff_than_nan(op, infinite, dtype):
    """An atom of the second system: what becomes NaN is the same."""

    def call(value):
        x = POSITIONS.to(dtype, copy=True)
        x[-1, 1] = value
        return as_tuple(OPS[op](x, CELL.to(dtype)))

    for found, right in zip(call(infinite), call(torch.nan), strict=True):
        assert torch.equal(found.isnan(), right.isnan())
        assert split_in_two(found)[1].isnan().any() and split_in_two(found)[0].isfinite().all()


@pytest.mark.parametrize("format_of_list", [NEAR, IN_ROWS])
@pytest.mark.parametrize("what", [torch.inf, torch.nan])
def test_an_infinite_position_without_a_cell(format_of_list, what):
    """In rows long enough for vectors, and where the atom has no neighbor at all."""
    n = 40
    x = torch.rand(n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3.0
    every = (torch.arange(n).unsqueeze(0) + torch.arange(1, n).unsqueeze(1)).T % n
    x[7, 2] = what
    given = {"neighbor_matrix": every.to(torch.int32)}
    if "neighbor_list" in format_of_list:
        first = torch.arange(n).repeat_interleave(n - 1)
        given = {"neighbor_list": torch.stack([first, every.flatten()]).to(torch.int32)}
    charges = torch.ones(n, dtype=torch.float64)
    assert electrostatics.coulomb_energy(x, charges, None, 4.0, **given).isnan().all()
    nobody = torch.full((n, 1), n, dtype=torch.int32)
    alone = electrostatics.dsf_coulomb(x, charges, 4.0, neighbor_matrix=nobody)
    assert alone[0].isnan().all() and torch.equal(alone[1].isnan().all(1), torch.arange(n) == 7)


# -- the splitting parameter ----------------------------------------------------------------------

WITH_ALPHA: dict[str, Callable[[Any], Any]] = {
    "Coulomb": lambda alpha: electrostatics.coulomb_energy(POSITIONS, CHARGES, CELL, CUTOFF, alpha, **NEAR),
    "DSF": lambda alpha: electrostatics.dsf_coulomb(POSITIONS, CHARGES, CUTOFF, alpha, CELL, **IN_UNITS)[0],
    "real space": lambda alpha: electrostatics.ewald_real_space(POSITIONS, CHARGES, CELL, alpha, **NEAR),
    "Ewald": lambda alpha: electrostatics.ewald_summation(POSITIONS, CHARGES, CELL, alpha, k_cutoff=3.0, **NEAR),
    "Ewald without waves": lambda alpha: electrostatics.ewald_summation(POSITIONS, CHARGES, CELL, alpha, **NEAR),
    "reciprocal space": lambda alpha: electrostatics.ewald_reciprocal_space(
        POSITIONS, CHARGES, CELL, None, alpha, BATCH, k_cutoff=3.0
    ),
    "PME": lambda alpha: electrostatics.particle_mesh_ewald(
        POSITIONS, CHARGES, CELL, alpha, mesh_dimensions=MESH, **NEAR
    ),
    "mesh": lambda alpha: electrostatics.pme_reciprocal_space(POSITIONS, CHARGES, CELL, alpha, MESH, batch_idx=BATCH),
}
MAY_BE_ZERO = ("Coulomb", "DSF")
BAD_NUMBERS = [float("nan"), float("inf"), -0.3, 0.0]


@pytest.mark.parametrize("alpha", BAD_NUMBERS)
@pytest.mark.parametrize("op", [*WITH_ALPHA, "estimate"])
def test_an_alpha_that_is_none_is_named(op, alpha):
    """As a number and as a tensor; inside a graph as a number, which is compared there as it is outside."""
    if alpha == 0.0 and op in MAY_BE_ZERO:
        assert WITH_ALPHA[op](alpha).isfinite().all()
        return
    call = WITH_ALPHA.get(op, lambda alpha: electrostatics.estimate_pme_mesh_dimensions(CELL, alpha))
    for given in (alpha, torch.tensor([0.5, alpha], dtype=torch.float64)):
        with pytest.raises(ValueError, match="`alpha`"):
            call(given)
    if op != "estimate" and alpha not in (0.0, float("inf")):
        with pytest.raises(Exception, match="`alpha`"):
            compiled(lambda: call(alpha))()


@pytest.mark.later_cases("mesh", "reciprocal space")
@pytest.mark.parametrize("op", WITH_ALPHA)
def test_an_alpha_that_is_not_read_gives_nan_in_its_system_only(op):
    call = compiled(WITH_ALPHA[op])
    right = WITH_ALPHA[op](torch.tensor([0.5, 0.5], dtype=torch.float64))
    for alpha in BAD_NUMBERS[: 3 if op in MAY_BE_ZERO else 4]:
        found = call(torch.tensor([0.5, alpha], dtype=torch.float64))
        assert_nan_in_the_second_only(found, right)


# -- other numbers ----------------------------------------------------------------------------------


def test_a_cutoff_of_k_vectors_that_is_not_read_gives_nan_in_its_system_only():
    """Not the sum without any, which looks like energies. So in prepared ones."""

    def call(lengths):
        return electrostatics.ewald_summation(POSITIONS, CHARGES, CELL, ALPHA, k_cutoff=lengths, **NEAR, **ALL)

    right = call(torch.tensor([3.0, 3.0], dtype=torch.float64))
    unread = compiled(call)
    for length in (-3.0, 0.0, torch.nan):
        lengths = torch.tensor([3.0, length], dtype=torch.float64)
        assert_nan_in_the_second_only(unread(lengths), right)
        with hidden_values():
            prepared = electrostatics.prepare_wave_vectors(CELL, lengths)
        found = electrostatics.ewald_summation(POSITIONS, CHARGES, CELL, ALPHA, miller_indices=prepared, **NEAR, **ALL)
        assert_nan_in_the_second_only(found, right)


@pytest.mark.parametrize("width", [-0.3, torch.inf, torch.nan])
def test_widths_that_are_not_read_give_nan(width):
    """Of sources and of receivers. A Gaussian that is infinitely wide has no energy and sees nothing."""
    widths = torch.full_like(CHARGES, 0.3)
    widths[-1] = width

    def energies(widths):
        return electrostatics.coulomb_energy(POSITIONS, CHARGES, CELL, CUTOFF, **NEAR, widths=widths)

    def seen(widths):
        return electrostatics.electrostatic_potential(
            POSITIONS, CHARGES, widths=0.3, receiver_widths=widths[-2:], batch_idx=BATCH
        ).potential

    assert_nan_in_the_second_only(compiled(energies)(widths), energies(torch.full_like(widths, 0.3)))
    with pytest.raises(ValueError, match="`receiver_widths`"):
        seen(widths)
    with hidden_values():
        found = seen(widths)
    torch.testing.assert_close(found[:, 0], seen(torch.full_like(widths, 0.3))[:, 0], rtol=0, atol=0)
    assert found[:, 1].isnan().all()


@pytest.mark.parametrize("number", [-0.5, torch.nan])
def test_numbers_that_are_read_in_any_case_are_checked(number):
    """Also where that waits for a GPU: a spacing below zero made the coarsest mesh that there is."""
    given = torch.tensor(number, dtype=torch.float64)
    alone = POSITIONS[:FIRST], CHARGES[:FIRST], CELL[0]
    calls = {
        "mesh_spacing": lambda: electrostatics.pme_reciprocal_space(*alone, ALPHA, mesh_spacing=given),
        "alpha": lambda: electrostatics.estimate_pme_mesh_dimensions(CELL, given),
        "real_space_cutoff": lambda: electrostatics.estimate_pme_parameters(
            POSITIONS, CELL, BATCH, real_space_cutoff=given
        ),
        "k_cutoff": lambda: electrostatics.generate_ewald_miller_indices(CELL, given),
    }
    for name, call in calls.items():
        with hidden_values(), pytest.raises(ValueError, match=f"`{name}` must be positive and finite"):
            call()


@pytest.mark.parametrize(
    "call",
    [
        lambda x, q, cell: electrostatics.ParticleMeshEwald.estimate(System(x, q, cell)),
        lambda x, q, cell: electrostatics.estimate_ewald_parameters(x, cell),
        lambda x, q, cell: electrostatics.generate_ewald_miller_indices(cell, 3.0),
    ],
    ids=["module", "parameters", "indices"],
)
def test_what_is_chosen_by_values_is_not_chosen_for_fake_tensors(call):
    with FakeTensorMode() as mode, pytest.raises(ValueError, match="values of a fake tensor would be read"):
        call(*[mode.from_tensor(t) for t in triclinic(FIRST)[:3]])
