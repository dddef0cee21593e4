"""Lattices of periodic systems: fractional coordinates, volumes, and meshes, in float64 and differentiable."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import warp as wp

from nvalchemiops.arguments import ValuesError
from nvalchemiops.kernels import lattice as kernels
from nvalchemiops.layout import layout
from nvalchemiops.notices import AccuracyWarning, notify
from nvalchemiops.torch import checks
from nvalchemiops.torch.autograd import OutputSpec, warp_custom_op
from nvalchemiops.torch.autograd.functorch import is_differentiated
from nvalchemiops.torch.autograd.specs import precision_of, real_of
from nvalchemiops.torch.launch import launch
from nvalchemiops.torch.operators.segments import spread_systems
from nvalchemiops.torch.runtime.cache import cached_by_value
from nvalchemiops.torch.runtime.context import eager, is_eager, may_read, on_host
from nvalchemiops.torch.runtime.recorder import differ_in_replays, read_fault


class Lattice(NamedTuple):
    """Inverse, volume and metric of the cells of an Ewald sum, in float64 and differentiable."""

    inverse: torch.Tensor  # (n_systems, 3, 3), fractional coordinates are `positions @ inverse`
    volume: torch.Tensor  # (n_systems,)
    metric: torch.Tensor  # (n_systems, 3, 3), a k-vector with Miller indices n has the square `n @ metric @ n`
    frame: torch.Tensor  # (3, 3) or (n_atoms, 3, 3), the inverse for the only system, or for the system of each atom

    def fractional(self, positions: torch.Tensor) -> torch.Tensor:
        """Fractional coordinates (n_atoms, 3), in float64."""
        return _product(positions, self.frame, False)

    def cartesian(self, derivatives: torch.Tensor) -> torch.Tensor:
        """Derivatives with respect to positions, from derivatives with respect to fractional coordinates."""
        return _product(derivatives, self.frame, True)

    def dyadic(self, sums: torch.Tensor) -> torch.Tensor:
        """``Σ k k^T`` (n_systems, 3, 3) from sums over Miller indices ``Σ n n^T``."""
        return (2.0 * math.pi) ** 2 * (self.inverse @ sums @ self.inverse.mT)


def _product(vectors: torch.Tensor, frame: torch.Tensor, transposed: bool) -> torch.Tensor:
    """``vectors @ matrix`` (n, 3), in float64, for one matrix (3, 3) or one for each vector."""
    if _has_kernel(vectors, frame):
        return transform_vectors(vectors.contiguous(), frame.reshape(-1, 3, 3).contiguous(), transposed)
    vectors, matrix = vectors.to(torch.float64), frame.mT if transposed else frame
    if layout(vectors.device.type).reads:
        # torch takes up to eight times as long for products that it then sums over a short axis
        return vectors @ matrix if frame.ndim == 2 else torch.bmm(vectors.unsqueeze(1), matrix).squeeze(1)
    # a product of matrices takes several times as long on a GPU
    if frame.ndim == 3:
        return (vectors.unsqueeze(-1) * matrix).sum(-2)
    x, y, z = (vectors[:, a : a + 1] for a in range(3))
    return torch.addcmul(torch.addcmul(x * matrix[0], y, matrix[1]), z, matrix[2])


def _has_kernel(*tensors: torch.Tensor) -> bool:
    """Whether a kernel without derivatives takes the place of operations of torch, each of which is a launch.

    It does so on a GPU, in eager mode, if none of these tensors takes part in a derivative.
    """
    if layout(tensors[0].device.type).reads or not is_eager(*tensors):
        return False
    return not any(map(is_differentiated, tensors))


def lattice_of(cell: torch.Tensor, batch_idx: torch.Tensor | None, n_atoms: int) -> Lattice:
    """The lattice of cells (n_systems, 3, 3)."""
    inverse, volume, metric = cached_by_value("lattice", (cell,), (), lambda: _geometry(cell.to(torch.float64)))
    # [:1], since there may be no systems
    frame = inverse[:1].flatten(0, 1) if batch_idx is None else spread_systems(inverse, batch_idx, n_atoms)
    return Lattice(inverse, volume, metric, frame)


def _geometry(cell: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if _has_kernel(cell):
        return lattice_geometry(cell.contiguous())
    # torch rounds determinants of several cells depending on their strides, which are not part of the keys of results
    cell = cell.contiguous()
    # without a wait for a GPU: for a singular cell results are infinite or NaN
    volume = _determinants(cell)
    if layout(cell.device.type).reads:
        inverse = torch.linalg.inv_ex(cell).inverse
    else:
        inverse = (torch.linalg.cross(cell.roll(-1, -2), cell.roll(-2, -2)) / volume[:, None, None]).mT
    return inverse, volume.abs(), (inverse.mT @ inverse) * (2.0 * math.pi) ** 2


def volumes_of(cell: torch.Tensor) -> torch.Tensor:
    """Volumes (...) of cells (..., 3, 3)."""
    return _determinants(cell).abs()


def _determinants(cell: torch.Tensor) -> torch.Tensor:
    """Determinants (...) of matrices (..., 3, 3), whose derivatives are computed from products.

    Under a mode or a transform, torch computes second derivatives of a determinant from singular values, which is wrong
    if two of them are equal, as for a cubic cell. Otherwise it reads values to choose a method.
    """
    # a graph traced here may be differentiated later
    values = torch.linalg.det(cell.detach()) if layout(cell.device.type).reads and is_eager(cell) else None
    if values is not None and not is_differentiated(cell):
        return values
    products = (cell[..., 0, :] * torch.linalg.cross(cell[..., 1, :], cell[..., 2, :])).sum(-1)
    return products if values is None else values + (products - products.detach())


@warp_custom_op(
    "nvalchemiops::shortest_vectors",
    outputs=[OutputSpec("basis", wp.int32, lambda cell: tuple(cell.shape))],
    backward="none",
    trusted=True,
)
def shortest_vectors(cell: torch.Tensor) -> torch.Tensor:
    """The shortest lattice vectors that form a basis of each lattice, as integer combinations of the given vectors.

    Parameters
    ----------
    cell : (n_systems, 3, 3) float64 tensor

    Returns
    -------
    (n_systems, 3, 3) int32 tensor
        ``basis @ cell`` is reduced in the sense of Minkowski.
    """
    basis = torch.empty(cell.shape, dtype=torch.int32, device=cell.device)
    launch(kernels.shortest_vectors(), cell.shape[0], [cell], [basis])
    return basis


@warp_custom_op(
    "nvalchemiops::usable_cells",
    outputs=[OutputSpec("usable", real_of, lambda cell, _: (cell.shape[0],))],
    grad_arrays=(),
    backward="none",
    trusted=True,
)
def usable_cells(cell: torch.Tensor, may_be_open: bool) -> torch.Tensor:
    """Whether each cell is regular.

    Parameters
    ----------
    cell : (n_systems, 3, 3) tensor, float32 or float64
    may_be_open : bool
        Whether vectors of zeros are open axes. The others must be finite and independent.

    Returns
    -------
    (n_systems,) tensor of the same dtype
        One, or NaN if the cell is singular.
    """
    usable = torch.empty(cell.shape[0], dtype=cell.dtype, device=cell.device)
    launch(kernels.usable_cells(precision_of(cell)), cell.shape[0], [cell, int(may_be_open)], [usable])
    return usable


@warp_custom_op(
    "nvalchemiops::lattice_geometry",
    outputs=[
        OutputSpec("inverse", wp.float64, lambda cell: tuple(cell.shape)),
        OutputSpec("volume", wp.float64, lambda cell: (cell.shape[0],)),
        OutputSpec("metric", wp.float64, lambda cell: tuple(cell.shape)),
    ],
    grad_arrays=(),
    backward="none",
    trusted=True,
)
def lattice_geometry(cell: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inverse, volume and metric of cells (n_systems, 3, 3), in float64; see `Lattice`."""
    inverse, volume, metric = torch.empty_like(cell), cell.new_empty(cell.shape[0]), torch.empty_like(cell)
    launch(kernels.lattice_geometry(), cell.shape[0], [cell], [inverse, volume, metric])
    return inverse, volume, metric


@warp_custom_op(
    "nvalchemiops::transform_vectors",
    outputs=[OutputSpec("products", wp.float64, lambda vectors, *_: tuple(vectors.shape))],
    grad_arrays=(),
    backward="none",
    trusted=True,
)
def transform_vectors(vectors: torch.Tensor, matrices: torch.Tensor, transposed: bool) -> torch.Tensor:
    """Vectors times matrices.

    Parameters
    ----------
    vectors : (n, 3) tensor, float32 or float64
    matrices : (n, 3, 3) or (1, 3, 3) float64 tensor
    transposed : bool
        Whether to multiply by the transposed matrices.

    Returns
    -------
    (n, 3) float64 tensor
    """
    products = torch.empty(vectors.shape, dtype=torch.float64, device=vectors.device)
    kernel = kernels.transform_vectors(precision_of(vectors))
    launch(kernel, vectors.shape[0], [vectors, matrices, int(transposed)], [products])
    return products


def check_cells(cell: torch.Tensor) -> None:
    """Raise for a singular cell, if its values can be read."""
    if may_read(cell):
        check_vectors(cell, False)


def check_vectors(cell: torch.Tensor, may_be_open: bool = True) -> bool:
    """Whether a lattice vector is zero, as along an open axis.

    Raises if the others are not finite and independent. Its values must be readable.
    """
    # a replay looks for cells that have one, or are singular, and then leaves the call
    if differ_in_replays(cell) and not read_fault(usable_cells(cell.detach(), False).isnan().any().to(torch.int32)):
        return False
    lattice = on_host(cell[:1] if cell.stride(0) == 0 else cell)  # systems may share one cell
    if lattice.shape[0] == 1 and kernels.is_clearly_regular(lattice[0].tolist()):
        return False
    return _check_values(lattice.tobytes(), lattice.dtype, lattice.shape[0], may_be_open)


@functools.lru_cache(maxsize=64)
@eager
def _check_values(cell: bytes, dtype: np.dtype, n_systems: int, may_be_open: bool) -> bool:
    lattice = np.frombuffer(cell, dtype).astype(np.float64).reshape(n_systems, 3, 3)
    with np.errstate(over="ignore", invalid="ignore"):
        if kernels.is_clearly_regular(lattice.transpose(1, 2, 0)):
            return False
    pbc = np.ones((n_systems, 3), dtype=bool)
    if may_be_open:
        pbc = np.asarray(lattice.any(2))
    elif not lattice.any(2).all():
        raise ValuesError("`cell` has a zero lattice vector: a slab needs one along its open axis, too, with vacuum")
    kernels.unit_vectors(lattice, pbc)  # raises for invalid lattices
    return not pbc.all()


def nan_if_singular(cell: torch.Tensor, may_be_open: bool = False) -> torch.Tensor:
    """The cells (n_systems, 3, 3), with NaN for cells that `check_cells` would reject if it could read them.

    With ``may_be_open``, NaN for cells that `check_vectors` would reject: vectors of zeros are open axes.
    """
    if may_read(cell):
        return cell
    return cell * usable_cells(cell.detach(), may_be_open)[:, None, None]


def one_or_nan(usable: torch.Tensor) -> torch.Tensor:
    """One where True, NaN where False; without a NaN constant in the graph, which exported programs cannot hold."""
    number = usable.to(torch.float64)
    return number / number


def mesh_frequencies(n: int, half: bool, device: torch.device) -> torch.Tensor:
    """Miller indices (n,) or (n // 2 + 1,) in the order of a discrete Fourier transform, in float64."""
    if half:
        return torch.arange(n // 2 + 1, dtype=torch.float64, device=device)
    index = torch.arange(n, dtype=torch.float64, device=device)
    return torch.where(index < (n + 1) // 2, index, index - n)


def check_mesh(mesh_dimensions: Any, spline_order: int = 1, name: str = "mesh_dimensions") -> tuple[int, int, int]:
    """Points of the mesh along each axis as three ints, from a sequence, a tensor or an array of integers."""
    if isinstance(mesh_dimensions, (torch.Tensor, np.ndarray)):
        mesh_dimensions = _three_numbers(mesh_dimensions, name)
    if isinstance(mesh_dimensions, (int, str)) or not isinstance(mesh_dimensions, Sequence):
        raise TypeError(f"`{name}` must be three ints, got {mesh_dimensions!r}")
    dimensions = tuple(checks.check_int(name, n) for n in mesh_dimensions)
    if len(dimensions) != 3:
        raise ValueError(f"`{name}` must be three ints, got {dimensions}")
    if min(dimensions) < spline_order:
        limit = f"not be smaller than the spline order, {spline_order}" if spline_order > 1 else "be positive"
        raise ValueError(f"`{name}` = {dimensions} must {limit}")
    return dimensions


def _three_numbers(values: torch.Tensor | np.ndarray, name: str) -> list[Any]:
    if isinstance(values, torch.Tensor):
        checks.check_tensor(name, values)
    if tuple(values.shape) not in ((3,), (1, 3)):
        raise ValueError(f"`{name}` must be three ints, got shape {tuple(values.shape)}")
    return values.flatten().tolist()


def mesh_and_order(mesh_dimensions: Any, order: int) -> tuple[tuple[int, int, int], int]:
    """The mesh as three ints, and the order; if the mesh has too few points, a lower order and a warning."""
    mesh = check_mesh(mesh_dimensions, LOWEST_ORDER)
    fitting = min(order, *mesh)
    if fitting < order and may_read():
        notify(
            f"`mesh_dimensions` = {mesh} has fewer points than splines of order {order} need: order {fitting} is used",
            AccuracyWarning,
        )
    return mesh, fitting


LOWEST_ORDER, HIGHEST_ORDER = 2, 10
"""Lowest order of splines that have a derivative, and the highest one that kernels have."""


def check_spline_order(spline_order: Any, lowest: int = LOWEST_ORDER) -> int:
    """The order of a spline as an int."""
    order = checks.check_int("spline_order", spline_order)
    if not lowest <= order <= HIGHEST_ORDER:
        raise ValueError(f"`spline_order` must be in {lowest} .. {HIGHEST_ORDER}, got {order}")
    return order
