"""Spreading to periodic meshes by B-splines, and gathering from them, as torch ops (`nvalchemiops.kernels.mesh`)."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import warp as wp

from nvalchemiops.kernels.mesh import bins, gather, spread, stencils
from nvalchemiops.kernels.moments import count
from nvalchemiops.kernels.simd import LANES, WARP
from nvalchemiops.launch import NotDifferentiableError
from nvalchemiops.layout import layout
from nvalchemiops.torch.autograd import OutputSpec, warp_custom_op
from nvalchemiops.torch.autograd.declaration import with_fields
from nvalchemiops.torch.autograd.specs import precision_of, real_of
from nvalchemiops.torch.launch import launch
from nvalchemiops.torch.operators.lattice import mesh_frequencies
from nvalchemiops.torch.operators.moments import Arguments, fold, gather_pullback, spread_pullback
from nvalchemiops.torch.operators.sorting import sort_rows
from nvalchemiops.torch.runtime.memory import new_empty


def _n_bins(device: torch.device, n_systems: int, mesh: Sequence[int]) -> int:
    n_x, n_y, n_z = mesh
    return bins.bins_of_mesh(n_systems, n_x, n_y, n_z, layout(device.type).warps)


@warp_custom_op(
    "nvalchemiops::mesh_columns",
    outputs=[
        OutputSpec("order", wp.int32, lambda u, *_: (u.shape[0],)),
        OutputSpec("column_begin", wp.int32, lambda u, _, n, mesh, __: (_n_bins(u.device, n, mesh) + 2,)),
    ],
    backward="none",
    trusted=True,
)
def mesh_columns(
    coordinates: torch.Tensor,
    batch_idx: torch.Tensor | None,
    n_systems: int,
    mesh_dimensions: Sequence[int],
    spline_order: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Atoms sorted by the column of mesh cells, on a GPU by the tile, that holds the first point of their stencil.

    Parameters
    ----------
    coordinates : (n_atoms, 3) float64 tensor
        Coordinates in units of mesh spacings.
    batch_idx : (n_atoms,) int32 tensor, optional
        System of each atom, in any order.
    n_systems : int
    mesh_dimensions : (int, int, int)
    spline_order : int

    Returns
    -------
    order : (n_atoms,) int32 tensor
    column_begin : (n_systems * n_x * n_y + 2,) int32 tensor
        Row pointers of the columns in this order; the last entry is repeated. On a GPU, those of the tiles
        (`nvalchemiops.kernels.mesh.bins.bins_of_mesh`).
    """
    n_x, n_y, n_z = mesh_dimensions
    n_atoms, device = coordinates.shape[0], coordinates.device
    column = torch.empty(n_atoms, dtype=torch.int32, device=device)
    launch(bins.find_columns(spline_order), n_atoms, [coordinates, batch_idx, n_systems, n_x, n_y, n_z], [column])
    return sort_rows(column, _n_bins(device, n_systems, mesh_dimensions))


class AtomsOnMesh(NamedTuple):
    """Atoms in the order of `mesh_columns`, with its arguments."""

    coordinates: torch.Tensor
    batch_idx: torch.Tensor | None
    n_systems: int
    order: torch.Tensor
    column_begin: torch.Tensor
    mesh_dimensions: Sequence[int]
    spline_order: int


def _copies(inputs: Arguments, n_copies: int) -> Arguments:
    """Arguments for this many copies of all systems."""
    n_atoms, batch_idx = inputs["coordinates"].shape[0] // n_copies, inputs["batch_idx"]
    if batch_idx is None:
        batch_idx = torch.zeros(n_atoms, dtype=torch.int32, device=inputs["coordinates"].device)
    copies = torch.arange(n_copies, dtype=torch.int32, device=batch_idx.device).unsqueeze(1)
    inputs["batch_idx"] = (batch_idx + inputs["n_systems"] * copies).flatten()
    inputs["n_systems"] *= n_copies
    sorted_by = ("coordinates", "batch_idx", "n_systems", "mesh_dimensions", "spline_order")
    inputs["order"], inputs["column_begin"] = mesh_columns(*(inputs[name] for name in sorted_by))
    return inputs


def _check(spline_order: int, derivatives: int) -> None:
    if derivatives >= spline_order:
        raise NotDifferentiableError(
            f"a spline of order {spline_order} has {spline_order - 2} continuous derivatives and a last one in pieces; "
            f"derivative {derivatives} was asked for: use a higher `spline_order`"
        )


@warp_custom_op(
    "nvalchemiops::mesh_spread",
    outputs=[OutputSpec("field", real_of, lambda m, *rest: (rest[2], m.shape[1], *rest[5]))],
    grad_arrays=["field", "moments", "coordinates"],
    backward=spread_pullback(lambda: mesh_gather),
    vmap=fold(lambda: mesh_spread, (1, 1), _copies, ("order", "column_begin")),
    trusted=True,
)
@with_fields
def mesh_spread(moments: torch.Tensor, atoms: AtomsOnMesh, derivatives: int) -> torch.Tensor:
    """Spread values of atoms to a mesh.

    Parameters
    ----------
    moments : (n_atoms, n_channels, n_moments) tensor
        Numbered as in `nvalchemiops.kernels.moments.components`; a single moment if ``derivatives`` is 0.
    coordinates, batch_idx, n_systems, order, column_begin, mesh_dimensions, spline_order
        The fields of `AtomsOnMesh`.
    derivatives : int
        Highest order of derivative among the moments.

    Returns
    -------
    (n_systems, n_channels, n_x, n_y, n_z) tensor
    """
    coordinates, _, n_systems, order, column_begin, (n_x, n_y, n_z), spline_order = atoms
    _check(spline_order, derivatives)
    n_atoms, n_channels = moments.shape[:2]
    field = new_empty((n_systems, n_channels, n_x, n_y, n_z), moments.dtype, moments.device)
    if field.numel() == 0:
        return field
    warps = layout(moments.device.type).warps
    precision = precision_of(moments)
    length = stencils.length_of_table(spline_order, derivatives, n_channels, warps, precision)
    weights = new_empty((n_atoms, length), torch.float64, moments.device)
    sorted_moments = moments.index_select(0, order)
    first_y, first_z = (None, None) if warps else (torch.empty_like(order), torch.empty_like(order))
    in_tile = torch.empty_like(order) if warps else None
    inputs = [sorted_moments if warps else None, coordinates, order, n_x, n_y, n_z]
    tabulate = stencils.spline_stencils(spline_order, derivatives, precision)
    launch(tabulate, _rows(moments, WARP), inputs, [first_y, first_z, in_tile, weights], lanes=WARP)
    kernel = spread.spline_spread(spline_order, derivatives, precision)
    threads = spread.threads_of_mesh(n_systems, n_x, n_y, n_z, warps)
    inputs = [sorted_moments, column_begin, first_y, first_z, in_tile, weights]
    kind = (16 * n_atoms * n_channels // threads).bit_length()
    launch(kernel, threads, inputs, [field.view(-1, n_x, n_y, n_z)], lanes=WARP, kind=kind)
    return field


@warp_custom_op(
    "nvalchemiops::mesh_gather",
    outputs=[OutputSpec("moments", real_of, lambda f, u, *rest: (u.shape[0], f.shape[1], count(rest[-1])))],
    grad_arrays=["moments", "field", "coordinates"],
    backward=gather_pullback(lambda: mesh_spread, lambda: mesh_gather),
    vmap=fold(lambda: mesh_gather, (1, 1), _copies, ("order", "column_begin")),
    trusted=True,
)
@with_fields
def mesh_gather(field: torch.Tensor, atoms: AtomsOnMesh, derivatives: int) -> torch.Tensor:
    """Gather the values of a mesh, and their derivatives with respect to coordinates, at atoms.

    Parameters
    ----------
    field : (n_systems, n_channels, n_x, n_y, n_z) tensor
    coordinates, batch_idx, n_systems, order, column_begin, mesh_dimensions, spline_order
        The fields of `AtomsOnMesh`.
    derivatives : int
        Highest order of derivative in the result.

    Returns
    -------
    (n_atoms, n_channels, n_moments) tensor
        Numbered by `nvalchemiops.kernels.moments.components`.
    """
    coordinates, batch_idx, _, order, *_, spline_order = atoms
    _check(spline_order, derivatives)
    n_channels = field.shape[1]
    moments = new_empty((coordinates.shape[0], n_channels, count(derivatives)), field.dtype, field.device)
    if moments.numel() == 0:
        return moments
    kernel = gather.spline_gather(spline_order, derivatives, precision_of(field))
    inputs = [field.flatten(0, 1), coordinates, batch_idx, order]
    rows = _rows(moments, WARP // gather.lanes_of_atom(spline_order))
    launch(kernel, rows, inputs, [moments], lanes=WARP, kind=n_channels)
    return moments


def _rows(of_atoms: torch.Tensor, of_warp: int) -> int:
    """Threads of a CPU, which have `LANES` atoms each, or warps of a GPU, which have ``of_warp``."""
    return -(-of_atoms.shape[0] // (of_warp if layout(of_atoms.device.type).warps else LANES))


def spline_transform(n: int, order: int, half: bool, device: torch.device) -> torch.Tensor:
    """The transform b(m) of a spline at the frequencies m of an axis with n points, in float64."""
    # M_p(j) of the centred spline for j = 0, 1, ... while it is non-zero, by the recurrence in terms of x = j + p/2,
    # exact except for the last division
    values = []
    for j in range((order + 1) // 2):
        x = j + order / 2
        terms = ((-1) ** k * math.comb(order, k) * (x - k) ** (order - 1) for k in range(order + 1) if x > k)
        values.append(sum(terms) / math.factorial(order - 1))
    angle = mesh_frequencies(n, half, device) * (2.0 * math.pi / n)
    value, *others = values
    result = torch.full_like(angle, value)
    for j, other in enumerate(others, 1):
        result = result + 2.0 * other * torch.cos(j * angle)
    return result
