"""The Fourier transform of a mesh that is divided among ranks, as two torch ops, each the derivative of the other.

Each rank has a *window* of the mesh, a box of its points. Windows overlap, and the mesh is their sum. For the transform
the mesh is cut into slabs of planes along the first axis, one for each rank. After two of the three transforms it is
cut into slabs along the second axis instead, as is usual for distributed transforms. The real transform comes first, so
that half as many complex numbers are sent.

A whole transform is one op. It needs only the memory of the parts that are sent, and saves nothing for the backward
pass.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from nvalchemiops.torch.autograd import OutputSpec, warp_custom_op
from nvalchemiops.torch.autograd.specs import real_of
from nvalchemiops.torch.distributed.collectives import group_of, refuse_slices
from nvalchemiops.torch.distributed.communication import swap_rows
from nvalchemiops.torch.operators.mesh_transform import weights_of_planes
from nvalchemiops.torch.runtime.memory import new_empty

Numbers = tuple[int, ...]
Ends = tuple[int, int]

# -- geometry -------------------------------------------------------------------------------------


class Run(NamedTuple):
    """Consecutive points along an axis: where they begin in a window and in a slab, and how many there are."""

    in_window: int
    in_slab: int
    size: int


def _runs(start: int, size: int, n: int, first: int, end: int) -> tuple[Run, ...]:
    """Runs of points of a window, on a periodic axis of n points, that lie between ``first`` and ``end``."""
    found = []
    for turn in range(start // n, (start + size - 1) // n + 1):
        low, high = max(start, turn * n + first), min(start + size, turn * n + end)
        if low < high:
            found.append(Run(low - start, low - turn * n - first, high - low))
    return tuple(found)


class Overlap(NamedTuple):
    """The overlap of a window and a slab, by runs along each axis. Whole planes of the window are sent."""

    x: tuple[Run, ...]
    y: tuple[Run, ...]
    z: tuple[Run, ...]
    shape: Numbers

    @property
    def planes(self) -> list[int]:
        """The number of planes of each run."""
        return [run.size for run in self.x]

    def in_window(self, window: torch.Tensor) -> list[torch.Tensor]:
        """The planes of a window, run by run."""
        return [window.narrow(1, run.in_window, run.size) for run in self.x]

    def boxes(self, planes: Sequence[torch.Tensor], slab: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of boxes with the same points: in the planes of a window, run by run, and in a slab."""
        for part, x in zip(planes, self.x):
            of_planes = slab.narrow(1, x.in_slab, x.size)
            for y, z in itertools.product(self.y, self.z):
                here = part.narrow(2, y.in_window, y.size).narrow(3, z.in_window, z.size)
                yield here, of_planes.narrow(2, y.in_slab, y.size).narrow(3, z.in_slab, z.size)


class Division(NamedTuple):
    """The division of a mesh, as seen by one rank.

    Attributes
    ----------
    mesh : (int, int, int)
    rank : int
    slabs, columns : tuple of (int, int)
        First and end of the planes of each rank, along the first and along the second axis.
    window : (int, int, int)
        Points of the window of this rank.
    of_window, of_slab : dict of int to Overlap
        For each other rank where it is not empty, in ascending order: the overlap of its slab with this rank's window,
        and of its window with this rank's slab.
    here : Overlap
        That of the window and the slab of this rank.
    """

    mesh: Numbers
    rank: int
    slabs: tuple[Ends, ...]
    columns: tuple[Ends, ...]
    window: Numbers
    of_window: dict[int, Overlap]
    of_slab: dict[int, Overlap]
    here: Overlap

    def sizes(self, n_meshes: int) -> Iterator[list[int]]:
        """Points of overlaps with all ranks: first for the window, then for the slab of this rank."""
        for overlaps in (self.of_window, self.of_slab):
            sizes = [0] * len(self.slabs)
            for rank, overlap in overlaps.items():
                sizes[rank] = n_meshes * math.prod(overlap.shape)
            yield sizes


@functools.lru_cache(maxsize=16)
def _division(mesh: Numbers, windows: Numbers, n_ranks: int) -> Division:
    listed = [windows[at : at + 7] for at in range(0, len(windows), 7)]
    boxes = {rank: (start, size) for rank, *numbers in listed for start, size in [(numbers[:3], numbers[3:])]}
    rank, (start, size) = windows[0], boxes[windows[0]]
    slabs, columns = (tuple(itertools.pairwise(n * part // n_ranks for part in range(n_ranks + 1))) for n in mesh[:2])

    def overlap(of: int, owner: int) -> Overlap:
        start, size = boxes[of]
        ends = (slabs[owner], (0, mesh[1]), (0, mesh[2]))
        x, y, z = (_runs(start[a], size[a], mesh[a], *ends[a]) for a in range(3))
        return Overlap(x, y, z, (sum(run.size for run in x), *size[1:]))

    # the rank of a plane is the last one whose slab begins at it, or before
    n_x = mesh[0]
    owners = {((plane % n_x + 1) * n_ranks - 1) // n_x for plane in range(start[0], start[0] + size[0])}
    of_window = {owner: overlap(rank, owner) for owner in sorted(owners - {rank})}
    of_slab = {other: overlap(other, rank) for other in sorted(boxes) if other != rank}
    return Division(mesh, rank, slabs, columns, tuple(size), of_window, of_slab, overlap(rank, rank))


def division_of(mesh: Sequence[int], windows: Sequence[int], n_ranks: int) -> Division:
    """The division of a mesh; see `window_spectrum`."""
    return _division(tuple(mesh), tuple(windows), n_ranks)


def partners_of(rank: int, mesh: Sequence[int], starts: np.ndarray, sizes: np.ndarray) -> list[int]:
    """The windows on which the division of a mesh depends, as seen by one rank, in the form for `window_spectrum`.

    Parameters
    ----------
    starts, sizes : (n_ranks, 3) int arrays
        The first point and the size of each window.
    """
    n, n_ranks = mesh[0], len(starts)
    first, end = n * rank // n_ranks, n * (rank + 1) // n_ranks
    meets = ((first - starts[:, 0]) % n < sizes[:, 0]) | ((starts[:, 0] - first) % n < end - first)
    meets &= end > first
    meets[rank] = False
    listed = [rank, *meets.nonzero()[0].tolist()]
    return [number for other in listed for number in (other, *starts[other].tolist(), *sizes[other].tolist())]


# -- windows and slabs ----------------------------------------------------------------------------


def _blocks(
    memory: torch.Tensor, overlaps: dict[int, Overlap], sizes: Sequence[int]
) -> Iterator[tuple[Overlap, list[torch.Tensor]]]:
    """Each overlap with another rank, and its planes in the memory that is sent or received, run by run."""
    parts = memory.split([sizes[rank] for rank in overlaps])
    for part, overlap in zip(parts, overlaps.values()):
        yield overlap, list(part.view(-1, *overlap.shape).split(overlap.planes, 1))


def _to_slab(window: torch.Tensor, division: Division, group: Any) -> torch.Tensor:
    """The slab (n_meshes, n_planes, n_y, n_z) of this rank, to which all ranks add their windows."""
    sizes, received = division.sizes(window.shape[0])
    sent = new_empty((sum(sizes),), window.dtype, window.device)
    for overlap, block in _blocks(sent, division.of_window, sizes):
        for part, planes in zip(block, overlap.in_window(window)):
            part.copy_(planes)
    memory = swap_rows(sent, sizes, received, group)
    first, end = division.slabs[division.rank]
    slab = new_empty((window.shape[0], end - first, *division.mesh[1:]), window.dtype, window.device)
    here = division.here
    if here.shape != slab.shape[1:] or len(here.y) * len(here.z) > 1:  # the window does not cover the slab
        slab.zero_()
    for planes, points in here.boxes(here.in_window(window), slab):
        points.copy_(planes)
    for overlap, block in _blocks(memory, division.of_slab, received):
        for planes, points in overlap.boxes(block, slab):
            points.add_(planes)
    return slab


def _to_window(slab: torch.Tensor, division: Division, group: Any) -> torch.Tensor:
    """Values (n_meshes, *window) on the window of this rank, from the slabs of all ranks."""
    received, sizes = division.sizes(slab.shape[0])
    sent = new_empty((sum(sizes),), slab.dtype, slab.device)
    for overlap, block in _blocks(sent, division.of_slab, sizes):
        for planes, points in overlap.boxes(block, slab):
            planes.copy_(points)
    memory = swap_rows(sent, sizes, received, group)
    window = new_empty((slab.shape[0], *division.window), slab.dtype, slab.device)
    here = division.here
    for planes, points in here.boxes(here.in_window(window), slab):
        planes.copy_(points)
    for overlap, block in _blocks(memory, division.of_window, received):
        for part, planes in zip(block, overlap.in_window(window)):
            planes.copy_(part)
    return window


# -- slabs along the first axis, and along the second ---------------------------------------------


def _swap(values: torch.Tensor, division: Division, group: Any, to_columns: bool) -> torch.Tensor:
    """Turn complex slabs (n_meshes, n_x, n_y, n_z) along the first axis into slabs along the second, or back."""
    rank, (n_meshes, _, _, n_z) = division.rank, values.shape
    ours, theirs = (division.slabs, division.columns) if to_columns else (division.columns, division.slabs)
    n_ours, n_theirs = (cut[rank][1] - cut[rank][0] for cut in (ours, theirs))
    # the axis along which values are cut to be sent, and the axis along which received pieces are joined
    axis, other = (2, 1) if to_columns else (1, 2)

    def pieces(memory: torch.Tensor, cut: Sequence[Ends], along: int, across: int) -> list[torch.Tensor]:
        sizes = [n_meshes * (end - first) * across * n_z for first, end in cut]
        shapes = [(end - first, across) if along == 1 else (across, end - first) for first, end in cut]
        return [part.view(n_meshes, *shape, n_z) for part, shape in zip(memory.split(sizes), shapes)]

    def in_order(along: int) -> bool:
        """Whether the pieces along this axis are contiguous, so that together they are the values."""
        return n_meshes == 1 and along == 1

    if in_order(axis) and values.is_contiguous():
        sent = values.view(-1)
    else:
        sent = new_empty((values.numel(),), values.dtype, values.device)
        for piece, (first, end) in zip(pieces(sent, theirs, axis, n_ours), theirs):
            piece.copy_(values.narrow(axis, first, end - first))
    send = [n_meshes * n_ours * (end - first) * n_z for first, end in theirs]
    receive = [n_meshes * n_theirs * (end - first) * n_z for first, end in ours]
    found = torch.view_as_complex(swap_rows(torch.view_as_real(sent), send, receive, group))
    shape = [n_meshes, 0, 0, n_z]
    shape[other], shape[axis] = ours[-1][1], n_theirs
    if in_order(other):
        return found.view(shape)
    result = new_empty(shape, values.dtype, values.device)
    return torch.cat(pieces(found, ours, other, n_theirs), other, out=result)


# -- the transform --------------------------------------------------------------------------------


def _of_spectrum(values: torch.Tensor, mesh: Sequence[int], windows: Sequence[int], n_ranks: int, _: int) -> Any:
    first, end = division_of(mesh, windows, n_ranks).columns[windows[0]]
    return (*values.shape[:2], mesh[0], end - first, mesh[2] // 2 + 1, 2)


def _of_values(spectrum: torch.Tensor, mesh: Sequence[int], windows: Sequence[int], n_ranks: int, _: int) -> Any:
    return (*spectrum.shape[:2], *division_of(mesh, windows, n_ranks).window)


def _spectrum_pullback(
    mesh: Sequence[int], windows: Sequence[int], n_ranks: int, group: int, grad_spectrum: torch.Tensor
) -> torch.Tensor:
    return window_values(grad_spectrum / weights_of_planes(mesh[2], grad_spectrum), mesh, windows, n_ranks, group)


def _values_pullback(
    mesh: Sequence[int], windows: Sequence[int], n_ranks: int, group: int, grad_values: torch.Tensor
) -> torch.Tensor:
    return window_spectrum(grad_values, mesh, windows, n_ranks, group) * weights_of_planes(mesh[2], grad_values)


@warp_custom_op(
    "nvalchemiops::window_spectrum",
    outputs=[OutputSpec("spectrum", real_of, _of_spectrum)],
    backward=_spectrum_pullback,
    vmap=refuse_slices,
)
def window_spectrum(
    values: torch.Tensor, mesh: Sequence[int], windows: Sequence[int], n_ranks: int, group: int
) -> torch.Tensor:
    """Half of the Fourier transform of the sum of the windows of all ranks, for the columns of this rank.

    Parameters
    ----------
    values : (n_systems, n_channels, *window) tensor
    mesh : (int, int, int)
    windows : sequence of int
        Seven numbers for this rank, then for each other rank whose window overlaps this rank's slab: the number of the
        rank, the first point and the size of its window. From `partners_of`.
    n_ranks : int
    group : int
        The number of the group (`nvalchemiops.torch.distributed.collectives.number_of`).

    Returns
    -------
    (n_systems, n_channels, n_x, n_columns, n_z // 2 + 1, 2) tensor
    """
    division, ranks = division_of(mesh, windows, n_ranks), group_of(group)
    slab = _to_slab(values.flatten(0, 1), division, ranks)
    if slab.numel():
        halves = torch.fft.rfft2(slab)
    else:  # with more ranks than planes some ranks have none, and libraries refuse empty transforms
        halves = slab.new_empty((*slab.shape[:3], mesh[2] // 2 + 1), dtype=slab.dtype.to_complex())
    columns = _swap(halves, division, ranks, True)
    columns = torch.fft.fft(columns, dim=1) if columns.numel() else columns
    return torch.view_as_real(columns).unflatten(0, values.shape[:2])


@warp_custom_op(
    "nvalchemiops::window_values",
    outputs=[OutputSpec("values", real_of, _of_values)],
    backward=_values_pullback,
    vmap=refuse_slices,
)
def window_values(
    spectrum: torch.Tensor, mesh: Sequence[int], windows: Sequence[int], n_ranks: int, group: int
) -> torch.Tensor:
    """Real values (n_systems, n_channels, *window) from the columns of all ranks, not divided by the number of points.

    Arguments are those of `window_spectrum`.
    """
    division, ranks = division_of(mesh, windows, n_ranks), group_of(group)
    columns = torch.view_as_complex(spectrum.flatten(0, 1))
    columns = torch.fft.ifft(columns, dim=1, norm="forward") if columns.numel() else columns
    halves = _swap(columns, division, ranks, False)
    if halves.numel():
        slab = torch.fft.irfft2(halves, s=tuple(mesh[1:]), norm="forward")
    else:
        slab = spectrum.new_empty((*halves.shape[:2], *mesh[1:]))
    return _to_window(slab, division, ranks).unflatten(0, spectrum.shape[:2])
