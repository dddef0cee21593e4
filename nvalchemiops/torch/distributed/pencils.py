"""The division of a mesh among ranks for its Fourier transform: pencils on a grid of ranks.

The ranks form a grid of rows and columns. A rank has a *pencil* of the mesh: the points of its row along the first
axis, of its column along the second, and all points along the third axis. After the transform along the third axis the
ranks of a row exchange values, so that each of them has the second axis whole, and a part of the third. After the
transform along the second axis the ranks of a column do so for the first axis. With one column pencils are slabs, and
only the second exchange is left. The real transform comes first, so half as many complex numbers are sent. It is along
the third axis also because the frequency of its last plane is n/2 there, but -n/2 on the other axes.

Each rank has a *window* of the mesh, the points around its brick, and sends it to the pencils. The grid is chosen by
a model of messages, and ranks have places on it close to their bricks, so that they keep most of their windows if
bricks are not cut along the third axis.

Source of the method: D. Pekurovsky, SIAM J. Sci. Comput. 34, C192 (2012), doi:10.1137/11082748X.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

Numbers = tuple[int, ...]
Ends = tuple[int, int]
"""The first point of a part of an axis, and the end of the part."""
Grid = tuple[int, int]
"""Numbers of rows and of columns."""

BANDWIDTH, START, PARTNER = 50e9, 5e-6, 1e-6
"""The model of messages: bytes a second in and out of each rank, seconds for a collective call to start, and seconds
for each rank with which another one exchanges values."""

POINT = 3e-11
"""Seconds for a point of the mesh in a transform along three axes, on the same device: its eight bytes are read and
written three times, at half of the bandwidth of the memory of an H100."""

COMPARED = 8
"""Grids, the best if windows were where the pencils are, for which it is counted where they are."""

# -- the grid of ranks ----------------------------------------------------------------------------


def parts_of(n: int, n_parts: int) -> tuple[Ends, ...]:
    """An axis of n points in parts of about equal size, some of them empty if there are more parts than points."""
    return tuple(itertools.pairwise(n * part // n_parts for part in range(n_parts + 1)))


class Load(NamedTuple):
    """What the rank with the largest parts has to do for one transform, there or back; arrays of one or many grids."""

    sent: np.ndarray  # bytes, of numbers of eight bytes
    calls: np.ndarray  # collective calls
    partners: np.ndarray  # ranks with which it exchanges values, in all these calls
    points: np.ndarray  # points of the mesh that it transforms, in the mean of three axes

    @property
    def of_messages(self) -> np.ndarray:
        """Seconds in messages."""
        return self.sent / BANDWIDTH + START * self.calls + PARTNER * self.partners


def load_of(
    mesh: Sequence[int],
    window: Sequence[float],
    n_ranks: int,
    rows: np.ndarray,
    columns: np.ndarray,
    kept: np.ndarray | None = None,
) -> Load:
    """The load on grids of ``rows`` (n,) and ``columns`` (n,), by a model in which all windows have one size.

    ``mesh`` and ``window`` are points along the axes, of a window on average. ``kept`` (n,) are the points of a window
    that a rank keeps, by default as if windows were where the pencils are.
    """
    (n_x, n_y, n_z), half = mesh, mesh[2] // 2 + 1
    x, y, z = (np.ceil(n / parts) for n, parts in ((n_x, rows), (n_y, columns), (half, columns)))
    pencil, turned, twice_turned = x * y * n_z, x * n_y * z, n_x * np.ceil(n_y / rows) * z
    # pencils that overlap a window, and windows that overlap a pencil
    of_window = np.minimum(window[0] / x + 1.0, rows) * np.minimum(window[1] / y + 1.0, columns)
    of_pencil = n_ranks * np.minimum((window[0] + x) / n_x, 1.0) * np.minimum((window[1] + y) / n_y, 1.0)
    of_windows = math.prod(window) * np.maximum(n_ranks / (rows * columns), 1.0)
    if kept is None:
        kept = np.minimum(x, window[0]) * np.minimum(y, window[1]) * window[2]
    in_rows = np.maximum(x * y * half, turned) * (1.0 - 1.0 / columns)
    in_columns = np.maximum(turned, twice_turned) * (1.0 - 1.0 / rows)
    return Load(
        8.0 * (np.maximum(of_windows, pencil) - kept) + 16.0 * (in_rows + in_columns),
        1.0 + (columns > 1) + (rows > 1),
        np.maximum(of_window, of_pencil) + rows + columns - 3.0,
        (pencil + 2.0 * turned + 2.0 * twice_turned) / 3.0,
    )


def ranks_on(grid: Grid, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The rank (n_rows, n_columns) at each place of a grid: by the order of windows along the axes.

    Windows have first points ``starts`` and ``sizes`` (n_ranks, 3). Those that are at the same place along the first
    two axes, one behind the other, are next to each other in a row and in a column.
    """
    x, y, z = (2 * starts + sizes).T
    n_rows, n_columns = grid
    by_rows = np.lexsort((y, z, x))
    first = len(x) * np.arange(n_rows) // n_rows
    rows = by_rows[first[:, None] + np.arange(n_columns)]
    return np.take_along_axis(rows, np.lexsort((z[rows], y[rows]), axis=1), 1)


def kept_on(grid: Grid, mesh: Sequence[int], starts: np.ndarray, sizes: np.ndarray) -> float:
    """The points of a window that are in the pencil of the same rank, in the mean of all ranks on a grid."""
    ranks = ranks_on(grid, starts, sizes)
    kept = sizes[ranks, 2].astype(float)
    for axis, n_parts in enumerate(grid):
        n, part = mesh[axis], np.arange(n_parts + 1) * mesh[axis] // n_parts
        first, end = (np.expand_dims(ends, 1 - axis) for ends in (part[:-1], part[1:]))
        start = starts[ranks, axis] % n
        last = start + sizes[ranks, axis]
        ends_of_turns = [(np.maximum(start, first + turn), np.minimum(last, end + turn)) for turn in (0, n)]
        kept *= sum(np.maximum(high - low, 0) for low, high in ends_of_turns)
    return float(kept.mean())


def grid_for(mesh: Sequence[int], starts: np.ndarray, sizes: np.ndarray) -> Grid:
    """The grid that takes the shortest time; it may leave ranks out, as for a large prime number of them.

    Arguments are those of `numbers_for`.
    """
    n_ranks, window = len(starts), sizes.mean(0).tolist()
    rows = np.arange(1, n_ranks + 1)

    def seconds(rows: np.ndarray, kept: np.ndarray | None = None) -> np.ndarray:
        load = load_of(mesh, window, n_ranks, rows, n_ranks // rows, kept)
        return load.of_messages + POINT * load.points

    few = np.sort(seconds(rows).argsort(kind="stable")[:COMPARED]) + 1
    kept = np.array([kept_on((n, n_ranks // n), mesh, starts, sizes) for n in few.tolist()])
    best = int(few[seconds(few, kept).argmin()])
    return best, n_ranks // best


# -- windows and pencils --------------------------------------------------------------------------


class Run(NamedTuple):
    """Consecutive points along an axis: where they begin in a window, in its message and in a pencil; their number."""

    in_window: int
    in_message: int
    in_pencil: int
    size: int


def _runs(start: int, size: int, n: int, ends: Ends) -> tuple[Run, ...]:
    """Runs of points of a window, on a periodic axis of n points, that are between the ends."""
    found, so_far = [], 0
    for turn in range(start // n, (start + size - 1) // n + 1):
        low, high = max(start, turn * n + ends[0]), min(start + size, turn * n + ends[1])
        if low < high:
            found.append(Run(low - start, so_far, low - turn * n - ends[0], high - low))
            so_far += high - low
    return tuple(found)


class Overlap(NamedTuple):
    """The overlap of a window and a pencil, by runs along each axis."""

    x: tuple[Run, ...]
    y: tuple[Run, ...]
    z: tuple[Run, ...]

    @property
    def shape(self) -> Numbers:
        """Its points along each axis."""
        return tuple(sum(run.size for run in runs) for runs in self)

    def boxes(self, a: torch.Tensor, in_a: str, b: torch.Tensor, in_b: str) -> Iterator[Sequence[torch.Tensor]]:
        """Pairs of boxes with the same points in two tensors (n_meshes, n_x, n_y, n_z).

        Each tensor is said to be a window, a message or a pencil by the name of a place in `Run`.
        """
        for runs in itertools.product(*self):
            pair = [a, b]
            for k, place in enumerate((in_a, in_b)):
                for axis, run in enumerate(runs, 1):
                    pair[k] = pair[k].narrow(axis, getattr(run, place), run.size)
            yield pair


class Cut(NamedTuple):
    """An axis that is cut among the ranks of a row or a column: the part of each of them, and that of this rank."""

    axis: int
    n: int
    parts: tuple[Ends, ...]
    ours: Ends


class Turn(NamedTuple):
    """An exchange among ranks, in ascending order, after which one axis is whole, and another is cut."""

    ranks: Numbers
    joins: Cut
    cuts: Cut

    @property
    def back(self) -> "Turn":
        """The exchange in the other direction."""
        return self._replace(joins=self.cuts, cuts=self.joins)


class Division(NamedTuple):
    """The division of a mesh, as seen by one rank."""

    mesh: Numbers  # points along three axes; then those of the window and of the pencil of this rank
    window: Numbers
    pencil: Numbers
    n_ranks: int
    of_window: dict[int, Overlap]  # of the pencil of each other rank with this window, in ascending order, unless empty
    of_pencil: dict[int, Overlap]  # likewise of the window of each other rank with this pencil
    here: Overlap  # of the window and the pencil of this rank
    turns: tuple[Turn | None, Turn | None]  # in the row and in the column of this rank; None where these have one rank
    axes: tuple[Numbers, Numbers, Numbers]  # of (n_meshes, x, y, z), before, between and after the turns
    planes: tuple[Ends, Ends]  # the part of this rank in Fourier space, along the second and the third axis


NOWHERE = -1
"""The place of a rank that is not on the grid."""


def numbers_for(
    rank: int, mesh: Sequence[int], starts: np.ndarray, sizes: np.ndarray, grid: Grid | None = None
) -> list[int]:
    """What one rank must know of others, in the form for `division_of`: numbers of the order of its partners.

    These are the rows, the columns and the place of this rank; the ranks in its row, and those in its column; the
    number of pencils of others that overlap its window, and for each of them the place and the rank; then seven numbers
    for this rank, and for each other one whose window overlaps its pencil: the rank, the first point and the size of
    its window. ``starts`` and ``sizes`` are as for `ranks_on`, the grid is by default that of `grid_for`.
    """
    n_rows, n_columns = grid = grid or grid_for(mesh, starts, sizes)
    ranks = ranks_on(grid, starts, sizes)
    parts = [parts_of(n, n_parts) for n, n_parts in zip(mesh, grid)]
    found = np.argwhere(ranks == rank)
    place, members, windows = NOWHERE, [], [rank]
    if len(found):
        row, column = found[0].tolist()
        place, members = row * n_columns + column, [*ranks[row].tolist(), *ranks[:, column].tolist()]
        meets = np.ones(len(starts), dtype=bool)
        for axis, (first, end) in enumerate((parts[0][row], parts[1][column])):
            n, start, size = mesh[axis], starts[:, axis], sizes[:, axis]
            meets &= (((first - start) % n < size) | ((start - first) % n < end - first)) & (end > first)
        meets[rank] = False
        windows += meets.nonzero()[0].tolist()
    own = [(int(starts[rank, axis]), int(sizes[rank, axis]), mesh[axis]) for axis in range(2)]
    met = [[k for k, ends in enumerate(of_axis) if _runs(*here, ends)] for here, of_axis in zip(own, parts)]
    owners = [(r * n_columns + c, int(ranks[r, c])) for r, c in itertools.product(*met) if ranks[r, c] != rank]
    of_windows = [(other, *starts[other].tolist(), *sizes[other].tolist()) for other in windows]
    return [n_rows, n_columns, place, *members, len(owners), *itertools.chain(*owners, *of_windows)]


def division_of(mesh: Sequence[int], numbers: Sequence[int], n_ranks: int) -> Division:
    """The division of a mesh as seen by the rank with these numbers from `numbers_for`."""
    return _division(tuple(mesh), tuple(numbers), n_ranks)


@functools.lru_cache(maxsize=16)
def _division(mesh: Numbers, numbers: Numbers, n_ranks: int) -> Division:
    left = iter(numbers)

    def some(n: int) -> Numbers:
        return tuple(itertools.islice(left, n))

    n_rows, n_columns, place = some(3)
    is_there = place != NOWHERE
    in_row, in_column = (some(n if is_there else 0) for n in (n_columns, n_rows))
    owners = {rank: at for at, rank in (some(2) for _ in range(some(1)[0]))}
    windows = {}
    while listed := some(7):
        windows[listed[0]] = (listed[1:4], listed[4:])
    rank = next(iter(windows))  # this one is the first
    row, column = divmod(place, n_columns) if is_there else (NOWHERE, NOWHERE)

    def ends_of(at: int) -> tuple[Ends, ...]:
        if at == NOWHERE:
            return ((0, mesh[0]), (0, 0), (0, mesh[2]))
        row, column = divmod(at, n_columns)
        return (parts_of(mesh[0], n_rows)[row], parts_of(mesh[1], n_columns)[column], (0, mesh[2]))

    def overlap(of: int, at: int) -> Overlap:
        start, size = windows[of]
        return Overlap(*(_runs(*of_axis) for of_axis in zip(start, size, mesh, ends_of(at))))

    def cut(axis: int, n: int, n_parts: int, members: Numbers, ours: int) -> Cut:
        parts = parts_of(n, n_parts)
        here = (0, 0) if ours == NOWHERE else parts[ours]
        return Cut(axis, n, tuple(part for _, part in sorted(zip(members, parts))), here)

    half = mesh[2] // 2 + 1
    of_row = Turn(
        tuple(sorted(in_row)), *(cut(axis, n, n_columns, in_row, column) for axis, n in ((2, mesh[1]), (3, half)))
    )
    of_column = Turn(
        tuple(sorted(in_column)), *(cut(axis, n, n_rows, in_column, row) for axis, n in ((1, mesh[0]), (2, mesh[1])))
    )
    turns = (of_row if n_columns > 1 else None, of_column if n_rows > 1 else None)
    ends = [*ends_of(place)[:2], (0, half)]
    for turn in filter(None, turns):
        ends[turn.joins.axis - 1], ends[turn.cuts.axis - 1] = (0, turn.joins.n), turn.cuts.ours
    # as early as possible: with one column the second axis is whole from the beginning
    x, y = 0 if n_rows == 1 else 2, 0 if n_columns == 1 else 1
    before, between, after = (tuple(axis for axis, at in ((1, x), (2, y), (3, 0)) if at == k) for k in range(3))
    return Division(
        mesh,
        windows[rank][1],
        tuple(end - first for first, end in ends_of(place)),
        n_ranks,
        {owner: overlap(rank, owners[owner]) for owner in sorted(owners)},
        {other: overlap(other, place) for other in sorted(set(windows) - {rank})},
        overlap(rank, place),
        turns,
        (before, between, after),
        (ends[1], ends[2]),
    )
