"""Fourier sums over atoms as torch ops (`nvalchemiops.kernels.fourier`), differentiable to any order."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import warp as wp

from nvalchemiops.kernels.fourier import gather as gather_kernels
from nvalchemiops.kernels.fourier import phases
from nvalchemiops.kernels.fourier import spread as spread_kernels
from nvalchemiops.kernels.moments import count
from nvalchemiops.kernels.simd import LANES
from nvalchemiops.layout import layout
from nvalchemiops.torch.autograd import OutputSpec, warp_custom_op
from nvalchemiops.torch.autograd.declaration import with_fields
from nvalchemiops.torch.launch import launch
from nvalchemiops.torch.operators.moments import Arguments, fold, gather_pullback, spread_pullback
from nvalchemiops.torch.runtime._torch_internals import version_of
from nvalchemiops.torch.runtime.memory import new_empty
from nvalchemiops.torch.runtime.recorder import current_recorder, differ_in_replays, read_fault


def _grouped(begin: torch.Tensor, size: int, n: int) -> tuple[torch.Tensor, int]:
    """Row pointers of the systems among groups of up to ``size`` of their ``n`` members, and the number of groups."""
    if begin.shape[0] == 2:
        count = -(-n // size)
        return torch.tensor([0, count], dtype=torch.int32, device=begin.device), count
    groups = torch.zeros_like(begin)
    torch.cumsum((begin.diff() + (size - 1)).div(size, rounding_mode="floor"), 0, out=groups[1:])
    recorder = current_recorder()
    with nullcontext() if recorder is None else recorder.pause():
        number = int(groups[-1])
    if differ_in_replays(groups):  # by another number it is not replayed
        read_fault((groups[-1] != number).to(torch.int32), only_in_replays=True)
    return groups, number


MOST_THREADS = 2**16
"""Threads of a GPU among which a sum is divided: some 16 warps for each of the largest number of multiprocessors."""

LEAST_TERMS = 16
"""Least number of atoms or k-vectors that a thread of a GPU sums up."""

MOST_COLUMNS, COLUMNS_IN_STEPS = 512, 16
"""Multiples of a phase in a table on a GPU, at most and in steps."""

MOST_TABLE = 2**28
"""Largest size of a table of phases on a GPU, in bytes."""

MOST_NUMBERED = 2**31 - 1
"""Largest number of threads that kernels can number."""


def _slices(n_threads: int, n_terms: int, n_systems: int) -> int:
    """Into how many parts a GPU divides the sums, each over all terms of a system, of as many threads."""
    return max(1, min(MOST_THREADS // n_threads, n_terms // (n_systems * LEAST_TERMS)))


def _tables_of_atoms(
    coordinates: torch.Tensor, order: torch.Tensor | None, n_points: int, n_systems: int
) -> torch.Tensor:
    """Cosines and sines (n_atoms, 6 * columns) for a GPU, of as many multiples as k-vectors have in an oblong cell.

    The k-vectors of a cube, up to a length, have indices up to 1.24 times the cubic root of the number of points. The
    few beyond the table, in needles, and those of systems of millions of atoms, are computed where they are needed.
    """
    n_atoms = coordinates.shape[0]
    wanted = 2.0 * math.cbrt(n_points / n_systems)
    columns = COLUMNS_IN_STEPS * math.ceil(min(wanted, MOST_COLUMNS, MOST_TABLE / (48 * n_atoms)) / COLUMNS_IN_STEPS)
    if 3 * columns * n_atoms > MOST_NUMBERED:
        columns = 0  # all are computed where they are needed
    tables = new_empty((n_atoms, 6 * columns), torch.float64, coordinates.device)
    launch(phases.phase_tables(), 3 * columns * n_atoms, [coordinates, order, None, None, None, 0, 0], [tables])
    return tables


ROOM = 2
"""By how much indices in a replay may exceed those of the recording."""


def _within_bounds(points: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """Points and their bounds. Points of a replay beyond the bounds of the recording are a fault, and are not used."""
    recorder = current_recorder()
    if recorder is None or not recorder.varies(points):
        return points, points.amax(0).tolist()
    key = (points.data_ptr(), points.shape, points.stride(), version_of(points))
    if (found := recorder.bounded.get(key)) is not None:  # in another sum over these points
        return found
    with recorder.pause():
        bounds = [n + ROOM for n in points.amax(0).tolist()]
    within = points.minimum(torch.tensor(bounds, dtype=points.dtype, device=points.device))
    # a comparison with three numbers takes torch ten times as long
    read_fault((points - within).amax().to(torch.int32), only_in_replays=True)
    recorder.bounded[key] = within, bounds
    return within, bounds


def _tables(
    coordinates: torch.Tensor,
    order: torch.Tensor | None,
    atom_begin: torch.Tensor,
    bounds: Sequence[int],
    moments: torch.Tensor | None = None,
) -> tuple[int, torch.Tensor, torch.Tensor, int, int]:
    """Number of vectors, first one of each system; cosines, sines of all multiples, moments; first rows of y and z."""
    vector_begin, n_vectors = _grouped(atom_begin, LANES, coordinates.shape[0])
    n_x, n_y, n_z = (2 * (n + 1) for n in bounds)
    values = None if moments is None else moments.flatten(1)
    n_rows = n_x + n_y + n_z + (0 if values is None else values.shape[1])
    # an odd number of vectors in a row: rows at a distance of a power of two would evict each other from the caches
    tables = new_empty((n_rows, LANES * (n_vectors | 1)), torch.float64, coordinates.device)
    inputs = [coordinates, order, atom_begin, vector_begin, values, n_x, n_x + n_y]
    launch(phases.phase_tables(), n_vectors, inputs, [tables])
    return n_vectors, vector_begin, tables, n_x, n_x + n_y


class AtomsAndPoints(NamedTuple):
    """The atoms and the k-vectors of all systems."""

    coordinates: torch.Tensor  # (n_atoms, 3) float64, fractional
    order: torch.Tensor | None  # (n_atoms,) int32, atoms sorted by system; None if they are already sorted
    atom_begin: torch.Tensor  # (n_systems + 1,) int32, row pointers of the systems in this order
    # (n_points, 3) int32, non-negative Miller indices, sorted by system. Points with equal first two indices should be
    # contiguous
    points: torch.Tensor
    point_begin: torch.Tensor  # (n_systems + 1,) int32, row pointers of the systems among the points


def _copies(inputs: Arguments, n_copies: int) -> Arguments:
    """The arguments of an op for this many copies of all systems, which may each have its own k-vectors."""
    n_atoms, points = inputs["coordinates"].shape[0] // n_copies, inputs["points"]

    def numbered(values: torch.Tensor, step: int) -> torch.Tensor:
        return values + step * torch.arange(n_copies, dtype=values.dtype, device=values.device).unsqueeze(1)

    if inputs["order"] is not None:
        inputs["order"] = numbered(inputs["order"], n_atoms).flatten()
    for name, entries in (("atom_begin", n_atoms), ("point_begin", points.shape[-2])):
        pointers = numbered(inputs[name], entries)
        inputs[name] = torch.cat([pointers[:, :-1].flatten(), pointers[-1, -1:]])
    inputs["points"] = points.flatten(0, 1) if points.ndim == 3 else points.repeat(n_copies, 1)
    return inputs


_OF_SLICES = ("points", "point_begin")
"""Arguments that may differ between the slices of ``vmap``."""


@warp_custom_op(
    "nvalchemiops::fourier_spread",
    outputs=[OutputSpec("field", wp.float64, lambda m, _, __, ___, points, *____: (m.shape[1], points.shape[0], 4, 2))],
    grad_arrays=["field", "moments", "coordinates"],
    backward=spread_pullback(lambda: fourier_gather),
    vmap=fold(lambda: fourier_spread, (1, 0), _copies, _OF_SLICES),
    trusted=True,
)
@with_fields
def fourier_spread(moments: torch.Tensor, sums: AtomsAndPoints, derivatives: int) -> torch.Tensor:
    """Structure factors ``Σ_i m_i exp(2πi n.s_i)``.

    Parameters
    ----------
    moments : (n_atoms, n_channels, n_moments) float64 tensor
        Numbered as in `nvalchemiops.kernels.moments.components`; a single moment if ``derivatives`` is 0.
    coordinates, order, atom_begin, points, point_begin
        The fields of `AtomsAndPoints`.
    derivatives : int
        Highest order of derivative among the moments.

    Returns
    -------
    (n_channels, n_points, 4, 2) float64 tensor
        Real and imaginary part at (n_x, ±n_y, ±n_z), in the order ++, +-, -+, --.
    """
    coordinates, order, atom_begin, points, point_begin = sums
    n_points, n_channels = points.shape[0], moments.shape[1]
    field = new_empty((n_channels, n_points, 4, 2), torch.float64, moments.device)
    if moments.shape[0] == 0 or field.numel() == 0:
        return field.zero_()
    plan: list[Any]
    slices, partial = 1, field
    if layout(moments.device.type).groups:
        points, bounds = _within_bounds(points)
        _, *plan = _tables(coordinates, order, atom_begin, bounds, moments)
        rows = -(-n_points // spread_kernels.POINTS)
    else:
        n_systems = atom_begin.shape[0] - 1
        plan = [None, _tables_of_atoms(coordinates, order, n_points, n_systems), 0, 0]
        rows = n_channels * n_points
        slices = _slices(rows, moments.shape[0], n_systems)
        partial = _parts(field, slices)
    inputs = [moments, coordinates, order, atom_begin, *plan, points, point_begin, slices]
    kind = _size(moments.shape[0] * n_channels, atom_begin)
    launch(spread_kernels.fourier_spread(derivatives), slices * rows, inputs, [partial], kind=kind)
    return _total(partial, field)


@warp_custom_op(
    "nvalchemiops::fourier_gather",
    outputs=[OutputSpec("moments", wp.float64, lambda f, s, *rest: (s.shape[0], f.shape[0], count(rest[-1])))],
    grad_arrays=["moments", "field", "coordinates"],
    backward=gather_pullback(lambda: fourier_spread, lambda: fourier_gather),
    vmap=fold(lambda: fourier_gather, (0, 1), _copies, _OF_SLICES),
    trusted=True,
)
@with_fields
def fourier_gather(field: torch.Tensor, sums: AtomsAndPoints, derivatives: int) -> torch.Tensor:
    """Sums ``Σ_n Re F(n) cos(2π n.s_i) + Im F(n) sin(2π n.s_i)`` and their derivatives along coordinates.

    Parameters
    ----------
    field : (n_channels, n_points, 4, 2) float64 tensor
        As from `fourier_spread`.
    coordinates, order, atom_begin, points, point_begin
        The fields of `AtomsAndPoints`.
    derivatives : int
        Highest order of derivative in the result.

    Returns
    -------
    (n_atoms, n_channels, n_moments) float64 tensor
        Numbered by `nvalchemiops.kernels.moments.components`.
    """
    coordinates, order, atom_begin, points, point_begin = sums
    n_atoms, n_channels, n_points = coordinates.shape[0], field.shape[0], points.shape[0]
    moments = new_empty((n_atoms, n_channels, count(derivatives)), torch.float64, field.device)
    if n_points == 0 or moments.numel() == 0:
        return moments.zero_()
    coefficients = new_empty((field.numel(),), torch.float64, field.device)
    launch(gather_kernels.fourier_coefficients(), field.numel() // 8, [field.reshape(-1)], [coefficients])
    plan: tuple[Any, ...]
    slices, partial = 1, moments
    if layout(field.device.type).groups:
        points, bounds = _within_bounds(points)
        n_vectors, vector_begin, tables, *rest = _tables(coordinates, order, atom_begin, bounds)
        block_begin, rows = _grouped(vector_begin, gather_kernels.vectors_at_once(derivatives), n_vectors)
        plan = (vector_begin, block_begin, tables, *rest)
    else:
        plan = (None, None, None, 0, 0)
        rows = n_channels * n_atoms
        slices = _slices(rows, n_points, atom_begin.shape[0] - 1)
        partial = _parts(moments, slices)
    inputs = [field, coefficients, coordinates, order, atom_begin, *plan, points, point_begin, slices]
    kind = _size(n_points * n_channels, atom_begin)
    launch(gather_kernels.fourier_gather(derivatives), slices * rows, inputs, [partial], kind=kind)
    return _total(partial, moments)


def _parts(result: torch.Tensor, slices: int) -> torch.Tensor:
    """Memory for the parts of a result: that of the result, if there is one part."""
    shape = (slices * result.shape[0], *result.shape[1:])
    return result if slices == 1 else new_empty(shape, result.dtype, result.device)


def _total(partial: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """The sum of parts, in ``result``."""
    return result if partial is result else torch.sum(partial.view(-1, *result.shape), 0, out=result)


def _size(work: int, begin: torch.Tensor) -> int:
    """Average work per system, in powers of two: the ``kind`` of a launch, since rows differ in the time they take."""
    return int(work // max(begin.shape[0] - 1, 1)).bit_length()
