"""The Fourier transform of a mesh that is divided among ranks, as two torch ops, each the derivative of the other.

Each rank has a *window* of the mesh, a box of its points. Windows overlap, and the mesh is their sum. It is transformed
in pencils, axis by axis (`nvalchemiops.torch.distributed.pencils`).

A whole transform is one op. It needs only the memory of the parts that are sent, and saves nothing for the backward
pass.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from nvalchemiops.torch.autograd import OutputSpec, warp_custom_op
from nvalchemiops.torch.autograd.specs import real_of
from nvalchemiops.torch.distributed.collectives import group_of, refuse_slices
from nvalchemiops.torch.distributed.communication import swap_rows
from nvalchemiops.torch.distributed.pencils import Cut, Division, Overlap, Turn, division_of
from nvalchemiops.torch.operators.mesh_transform import weights_of_planes
from nvalchemiops.torch.runtime.memory import new_empty


def _swapped(values: torch.Tensor, send: dict[int, int], receive: dict[int, int], group: Any) -> torch.Tensor:
    """Send rows to other ranks, in ascending order, and return the rows from others; the numbers of rows by rank."""
    partners = sorted({*send, *receive})
    to, come = ([rows.get(rank, 0) for rank in partners] for rows in (send, receive))
    return swap_rows(values, to, come, group, partners)


# -- windows and pencils --------------------------------------------------------------------------


def _sizes(overlaps: dict[int, Overlap], n_meshes: int) -> dict[int, int]:
    return {rank: n_meshes * math.prod(overlap.shape) for rank, overlap in overlaps.items()}


def _boxes(
    memory: torch.Tensor, values: torch.Tensor, overlaps: dict[int, Overlap], place: str
) -> Iterator[Sequence[torch.Tensor]]:
    """Pairs of boxes with the same points: in the memory that is sent or received, and in a window or a pencil."""
    parts = memory.split(list(_sizes(overlaps, len(values)).values()))
    for part, overlap in zip(parts, overlaps.values()):
        yield from overlap.boxes(part.view(-1, *overlap.shape), "in_message", values, place)


def _exchanged(
    values: torch.Tensor, place: str, to: dict[int, Overlap], source: dict[int, Overlap], group: Any
) -> torch.Tensor:
    """Send the parts of values (n_meshes, ...) in these overlaps to other ranks; return the messages from others."""
    send, receive = (_sizes(overlaps, values.shape[0]) for overlaps in (to, source))
    sent = new_empty((sum(send.values()),), values.dtype, values.device)
    for message, part in _boxes(sent, values, to, place):
        message.copy_(part)
    return _swapped(sent, send, receive, group)


def _to_pencil(window: torch.Tensor, division: Division, group: Any) -> torch.Tensor:
    """The pencil (n_meshes, *pencil) of this rank, to which all ranks add their windows."""
    n_meshes, here = window.shape[0], division.here
    received = _exchanged(window, "in_window", division.of_window, division.of_pencil, group)
    pencil = new_empty((n_meshes, *division.pencil), window.dtype, window.device)
    if here.shape != division.pencil:  # the window does not cover the pencil
        pencil.zero_()
    for values, points in here.boxes(window, "in_window", pencil, "in_pencil"):
        points.copy_(values)
    for message, points in _boxes(received, pencil, division.of_pencil, "in_pencil"):
        points.add_(message)
    return pencil


def _to_window(pencil: torch.Tensor, division: Division, group: Any) -> torch.Tensor:
    """Values (n_meshes, *window) on the window of this rank, from the pencils of all ranks."""
    received = _exchanged(pencil, "in_pencil", division.of_pencil, division.of_window, group)
    window = new_empty((pencil.shape[0], *division.window), pencil.dtype, pencil.device)
    for values, points in division.here.boxes(window, "in_window", pencil, "in_pencil"):
        values.copy_(points)
    for message, values in _boxes(received, window, division.of_window, "in_window"):
        values.copy_(message)
    return window


# -- from one axis to the next --------------------------------------------------------------------


def _turned(values: torch.Tensor, turn: Turn | None, group: Any) -> torch.Tensor:
    """Complex values (n_meshes, n_x, n_y, n_z) after an exchange in a row, or in a column, of the grid of ranks."""
    if turn is None:
        return values
    joins, cuts = turn.joins, turn.cuts
    whole, cut = list(values.shape), list(values.shape)
    whole[joins.axis] = cut[joins.axis] = joins.n
    cut[cuts.axis] = cuts.ours[1] - cuts.ours[0]

    def shapes(shape: Sequence[int], along: Cut) -> list[list[int]]:
        return [[*shape[: along.axis], end - first, *shape[along.axis + 1 :]] for first, end in along.parts]

    def in_order(shape: Sequence[int], along: Cut) -> bool:
        """Whether pieces along this axis, in the order of ranks, are contiguous: together they are the values."""
        return math.prod(shape[: along.axis]) == 1 and list(along.parts) == sorted(along.parts)

    pieces, received = shapes(values.shape, cuts), shapes(cut, joins)
    send, receive = (dict(zip(turn.ranks, map(math.prod, of_ranks))) for of_ranks in (pieces, received))
    if in_order(values.shape, cuts) and values.is_contiguous():
        sent = values.view(-1)
    else:
        sent = new_empty((values.numel(),), values.dtype, values.device)
        for part, shape, (first, end) in zip(sent.split(list(send.values())), pieces, cuts.parts):
            part.view(shape).copy_(values.narrow(cuts.axis, first, end - first))
    found = torch.view_as_complex(_swapped(torch.view_as_real(sent), send, receive, group))
    if in_order(cut, joins):
        return found.view(cut)
    result = new_empty(cut, values.dtype, values.device)
    for part, shape, (first, end) in zip(found.split(list(receive.values())), received, joins.parts):
        result.narrow(joins.axis, first, end - first).copy_(part.view(shape))
    return result


# -- the transform --------------------------------------------------------------------------------


def _of_spectrum(values: torch.Tensor, mesh: Sequence[int], numbers: Sequence[int], n_ranks: int, _: int) -> Any:
    planes = (end - first for first, end in division_of(mesh, numbers, n_ranks).planes)
    return (*values.shape[:2], mesh[0], *planes, 2)


def _of_values(spectrum: torch.Tensor, mesh: Sequence[int], numbers: Sequence[int], n_ranks: int, _: int) -> Any:
    return (*spectrum.shape[:2], *division_of(mesh, numbers, n_ranks).window)


def _weights(mesh: Sequence[int], numbers: Sequence[int], n_ranks: int, like: torch.Tensor) -> torch.Tensor:
    """Multiplicities of the planes of this rank in a sum over the whole mesh."""
    return weights_of_planes(mesh[2], like)[slice(*division_of(mesh, numbers, n_ranks).planes[1])]


def _spectrum_pullback(
    mesh: Sequence[int], numbers: Sequence[int], n_ranks: int, group: int, grad_spectrum: torch.Tensor
) -> torch.Tensor:
    return window_values(grad_spectrum / _weights(mesh, numbers, n_ranks, grad_spectrum), mesh, numbers, n_ranks, group)


def _values_pullback(
    mesh: Sequence[int], numbers: Sequence[int], n_ranks: int, group: int, grad_values: torch.Tensor
) -> torch.Tensor:
    spectrum = window_spectrum(grad_values, mesh, numbers, n_ranks, group)
    return spectrum * _weights(mesh, numbers, n_ranks, grad_values)


@warp_custom_op(
    "nvalchemiops::window_spectrum",
    outputs=[OutputSpec("spectrum", real_of, _of_spectrum)],
    backward=_spectrum_pullback,
    vmap=refuse_slices,
    trusted=True,
)
def window_spectrum(
    values: torch.Tensor, mesh: Sequence[int], numbers: Sequence[int], n_ranks: int, group: int
) -> torch.Tensor:
    """Half of the Fourier transform of the sum of the windows of all ranks, for the planes of this rank.

    Values are (n_systems, n_channels, *window), the result is (n_systems, n_channels, n_x, n_y_planes, n_z_planes, 2).
    ``numbers`` are what this rank knows of the others (`nvalchemiops.torch.distributed.pencils.numbers_for`), and
    ``group`` is the number of the group (`nvalchemiops.torch.distributed.collectives.number_of`).
    """
    division, ranks = division_of(mesh, numbers, n_ranks), group_of(group)
    pencil = _to_pencil(values.flatten(0, 1), division, ranks)
    first, *others = division.axes
    if pencil.numel():
        spectrum = torch.fft.rfftn(pencil, dim=first)
    else:  # libraries refuse empty transforms
        spectrum = pencil.new_empty((*pencil.shape[:3], mesh[2] // 2 + 1), dtype=pencil.dtype.to_complex())
    for turn, axes in zip(division.turns, others):
        spectrum = _turned(spectrum, turn, ranks)
        spectrum = torch.fft.fftn(spectrum, dim=axes) if axes and spectrum.numel() else spectrum
    return torch.view_as_real(spectrum).unflatten(0, values.shape[:2]).contiguous()


@warp_custom_op(
    "nvalchemiops::window_values",
    outputs=[OutputSpec("values", real_of, _of_values)],
    backward=_values_pullback,
    vmap=refuse_slices,
    trusted=True,
)
def window_values(
    spectrum: torch.Tensor, mesh: Sequence[int], numbers: Sequence[int], n_ranks: int, group: int
) -> torch.Tensor:
    """Real values (n_systems, n_channels, *window) from the planes of all ranks, not divided by the number of points.

    Arguments are those of `window_spectrum`.
    """
    division, ranks = division_of(mesh, numbers, n_ranks), group_of(group)
    parts = torch.view_as_complex(spectrum.flatten(0, 1))
    last, *others = division.axes
    for turn, axes in zip(reversed(division.turns), reversed(others)):
        parts = torch.fft.ifftn(parts, dim=axes, norm="forward") if axes and parts.numel() else parts
        parts = _turned(parts, None if turn is None else turn.back, ranks)
    if parts.numel():
        pencil = torch.fft.irfftn(parts, s=[mesh[axis - 1] for axis in last], dim=last, norm="forward")
    else:
        pencil = spectrum.new_empty((len(parts), *division.pencil))
    return _to_window(pencil, division, ranks).unflatten(0, spectrum.shape[:2])
