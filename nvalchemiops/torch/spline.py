"""B-splines on periodic meshes: spread values of atoms to a mesh, and gather values of a mesh at atoms.

Mesh point (j_x, j_y, j_z) is at the fractional coordinates (j_x/n_x, j_y/n_y, j_z/n_z). An atom at the fractional
coordinate s has the weight ``M_p(n s - j + p/2)`` at point j along each axis: its stencil of p points is centred on it,
and the weights sum to one. Meshes are periodic, and atoms may be in any image. Spreading and gathering are transposes
of each other.

All functions are differentiable in positions, cell, and values or mesh, as often as splines of order p are: p - 2 times
continuously, and once more piecewise. Higher derivatives raise `NotDifferentiableError`. Results are the same to the
last bit for any number of threads. For kernels and sources see `nvalchemiops.kernels.mesh`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from nvalchemiops.torch import checks
from nvalchemiops.torch.operators.lattice import (
    HIGHEST_ORDER,
    Lattice,
    check_cells,
    check_mesh,
    check_spline_order,
    lattice_of,
    nan_if_singular,
)
from nvalchemiops.torch.operators.mesh import AtomsOnMesh, mesh_columns, mesh_gather, mesh_spread, spline_transform
from nvalchemiops.torch.operators.segments import largest_system
from nvalchemiops.torch.runtime.context import is_capturing, may_read
from nvalchemiops.torch.runtime.recorder import current_recorder

Mesh = tuple[int, int, int]


def bspline_weight(u: torch.Tensor, order: int) -> torch.Tensor:
    """The cardinal B-spline ``M_order(u)``, which is nonzero for 0 < u < order.

    Parameters
    ----------
    u : tensor, float32 or float64
        Of any shape.
    order : int
        1 to 10; the degree is ``order - 1``.

    Returns
    -------
    tensor like ``u``
        Differentiable.

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message.
    """
    checks.check_tensor("u", u)
    if not u.is_floating_point():
        raise TypeError("`u` must be a tensor of floats")
    if not 1 <= checks.check_int("order", order) <= HIGHEST_ORDER:
        raise ValueError(f"`order` must be in 1 .. {HIGHEST_ORDER}, got {order}")
    values = [((u >= k) & (u < k + 1)).to(u.dtype) for k in range(order)]
    for m in range(2, order + 1):
        pairs = zip(values[:-1], values[1:])
        values = [((u - k) * here + (m - (u - k)) * there) / (m - 1) for k, (here, there) in enumerate(pairs)]
    # NaN in the input gives NaN
    return torch.where(torch.isnan(u), u, values[0])


class _Atoms(NamedTuple):
    """Arguments that all functions have in common; see `spline_spread`."""

    positions: torch.Tensor
    cell: Any
    spline_order: int
    batch_idx: Any
    cell_inv_t: Any = None


class _Plan(NamedTuple):
    """Arguments of the ops, the lattice, and the numbers of mesh points."""

    atoms: AtomsOnMesh
    lattice: Lattice
    mesh: torch.Tensor


def _plan(atoms: _Atoms, mesh_dims: Any, mesh_name: str = "mesh_dims", n_systems: int | None = None) -> _Plan:
    positions, cell, spline_order, batch_idx, cell_inv_t = atoms
    given = checks.check_lattice(cell, positions)
    cell = given.reshape(-1, 3, 3)
    check_cells(cell)
    cell = nan_if_singular(cell)
    if cell_inv_t is not None:
        checks.check_tensor("cell_inv_t", cell_inv_t)
        shapes = [tuple(cell.shape)] + [(3, 3)] * (cell.shape[0] == 1)
        if tuple(cell_inv_t.shape) not in shapes:
            expected = " or ".join(map(str, shapes))
            raise ValueError(f"`cell_inv_t` must have shape {expected}, got {tuple(cell_inv_t.shape)}")
    order = check_spline_order(spline_order, 1)
    dimensions = check_mesh(mesh_dims, order, mesh_name)
    n_atoms = positions.shape[0]
    if batch_idx is not None:
        checks.check_index("batch_idx", batch_idx, positions, (n_atoms,))
    if n_systems is None:
        n_systems = _number_of_systems(given, batch_idx, n_atoms)
    if cell.shape[0] == 1:
        cell = cell.expand(n_systems, 3, 3)
    elif cell.shape[0] != n_systems:
        raise ValueError(f"`cell` is for {cell.shape[0]} systems, but there are {n_systems}")
    batch_idx, _ = checks.check_batch(batch_idx, positions, n_systems)
    lattice = lattice_of(cell, batch_idx, n_atoms)
    # made on the device: copying a constant from the host would wait for a GPU
    mesh = torch.cat([torch.full((1,), float(n), dtype=torch.float64, device=positions.device) for n in dimensions])
    coordinates = lattice.fractional(positions) * mesh
    in_order, begin = mesh_columns(coordinates, batch_idx, n_systems, dimensions, order)
    return _Plan(AtomsOnMesh(coordinates, batch_idx, n_systems, in_order, begin, dimensions, order), lattice, mesh)


def _number_of_systems(cell: torch.Tensor, batch_idx: Any, n_atoms: int) -> int:
    """The number of systems. ``batch_idx`` is read if a single cell may hold for all systems."""
    if cell.ndim == 3 and (cell.shape[0] != 1 or batch_idx is None or not _may_count(batch_idx)):
        return cell.shape[0]
    if batch_idx is None or n_atoms == 0:
        return 1
    return largest_system(batch_idx) + 1


def _may_count(batch_idx: torch.Tensor) -> bool:
    """Whether the number of systems may be read, for which a GPU is waited for once, before a graph is captured."""
    if may_read(batch_idx):
        return True
    if not may_read() or current_recorder() is not None:
        return False
    return may_read(batch_idx, wait=True) or is_capturing()


def _check_values(name: str, values: Any, positions: torch.Tensor, shape: tuple[int | None, ...]) -> None:
    checks.check_real(name, values, positions)
    if values.ndim != len(shape) or any(n is not None and n != m for n, m in zip(shape, values.shape)):
        expected = ", ".join("any" if n is None else str(n) for n in shape)
        raise ValueError(f"`{name}` must have shape ({expected}), got {tuple(values.shape)}")


def _mesh_shape(mesh: Any, cell: Any, batched: bool, before: int, after: int) -> tuple[Mesh, tuple[int | None, ...]]:
    """Points along the axes, and the shape that a mesh must have with ``before`` and ``after`` additional axes."""
    checks.check_tensor("mesh", mesh)
    if mesh.ndim != 3 + batched + before + after:
        names = ["n_systems"] * batched + ["n_channels"] * before + ["n_x", "n_y", "n_z"] + ["3"] * after
        raise ValueError(f"`mesh` must have shape ({', '.join(names)}), got {tuple(mesh.shape)}")
    start = batched + before
    x, y, z = mesh.shape[start : start + 3]
    several = isinstance(cell, torch.Tensor) and cell.ndim == 3 and cell.shape[0] != 1
    return (x, y, z), (*([cell.shape[0] if several else None] * batched), *([None] * before), x, y, z, *([3] * after))


def _positive(name: str, value: Any) -> int:
    number = checks.check_int(name, value)
    if number < 1:
        raise ValueError(f"`{name}` must be positive, got {number}")
    return number


def _spread(atoms: _Atoms, values: Any, channels: tuple[int | None, ...], mesh_dims: Any, n: Any) -> torch.Tensor:
    """Meshes of values (n_atoms, *channels). If cells could not be read, systems with a singular cell get NaN."""
    checks.check_positions(atoms.positions, finite=False)
    _check_values("values", values, atoms.positions, (atoms.positions.shape[0], *channels))
    plan = _plan(atoms, mesh_dims, n_systems=None if n is None else _positive("num_systems", n))
    mesh = mesh_spread(values.reshape(*values.shape, *[1] * (3 - values.ndim)), *plan.atoms, 0)
    volume = plan.lattice.volume.detach()
    if not may_read(volume):
        mesh = mesh * (volume / volume).to(mesh.dtype)[:, None, None, None, None]
    return mesh if atoms.batch_idx is not None else mesh.squeeze(0)


def spline_spread(
    positions: torch.Tensor,
    values: torch.Tensor,
    cell: torch.Tensor,
    mesh_dims: Sequence[int],
    spline_order: int = 4,
    batch_idx: torch.Tensor | None = None,
    cell_inv_t: torch.Tensor | None = None,
    *,
    num_systems: int | None = None,
) -> torch.Tensor:
    """Spread a value of each atom to a mesh.

    Parameters
    ----------
    positions : (n_atoms, 3) tensor, float32 or float64, length
    values : (n_atoms,) tensor
    cell : (3, 3) or (n_systems, 3, 3) tensor, length
        A single cell holds for all systems.
    mesh_dims : (int, int, int)
        Mesh points along each axis, at least ``spline_order``.
    spline_order : int, optional
        1 to 10.
    batch_idx : (n_atoms,) int32 tensor, optional
        System of each atom, in any order.
    cell_inv_t : tensor, optional
        Accepted for callers that have prepared it. Only its shape is used: the values are computed from the cell.
    num_systems : int, optional
        By default the number of cells, or with a single cell, the largest entry of ``batch_idx`` plus one, which waits
        for a GPU once. Where ``batch_idx`` cannot be read, as in ``torch.compile``, a cell (1, 3, 3) means one system.

    Returns
    -------
    (n_x, n_y, n_z) tensor, or (n_systems, n_x, n_y, n_z) with ``batch_idx``
        In the dtype of the positions. It has the same sum as the values.

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message.
    """
    atoms = _Atoms(positions, cell, spline_order, batch_idx, cell_inv_t)
    return _spread(atoms, values, (), mesh_dims, num_systems).squeeze(-4)


def spline_spread_channels(
    positions: torch.Tensor,
    values: torch.Tensor,
    cell: torch.Tensor,
    mesh_dims: Sequence[int],
    spline_order: int = 4,
    batch_idx: torch.Tensor | None = None,
    *,
    num_systems: int | None = None,
) -> torch.Tensor:
    """Spread several values of each atom at once. They share the work that depends on positions.

    Parameters
    ----------
    values : (n_atoms, n_channels) tensor
    positions, cell, mesh_dims, spline_order, batch_idx, num_systems
        As for `spline_spread`.

    Returns
    -------
    (n_channels, n_x, n_y, n_z) tensor, or (n_systems, n_channels, n_x, n_y, n_z) with ``batch_idx``
    """
    return _spread(_Atoms(positions, cell, spline_order, batch_idx), values, (None,), mesh_dims, num_systems)


def _gathered(
    atoms: _Atoms, mesh: torch.Tensor, derivatives: int, before: int = 0, after: int = 0
) -> tuple[torch.Tensor, _Plan]:
    """Moments (n_atoms, n_channels, n_moments) at atoms; the mesh has channels before or after its spatial axes."""
    checks.check_positions(atoms.positions, finite=False)
    batched = atoms.batch_idx is not None
    dimensions, shape = _mesh_shape(mesh, atoms.cell, batched, before, after)
    _check_values("mesh", mesh, atoms.positions, shape)
    plan = _plan(atoms, dimensions, "mesh", mesh.shape[0] if batched else None)
    field = mesh if batched else mesh.unsqueeze(0)
    if after:
        field = field.movedim(-1, 1)
    elif not before:
        field = field.unsqueeze(1)
    return mesh_gather(field, *plan.atoms, derivatives), plan


def spline_gather(
    positions: torch.Tensor,
    mesh: torch.Tensor,
    cell: torch.Tensor,
    spline_order: int = 4,
    batch_idx: torch.Tensor | None = None,
    cell_inv_t: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gather the values of a mesh at atoms, ``Σ_x mesh(x) w(x)``: the transpose of `spline_spread`.

    Parameters
    ----------
    mesh : (n_x, n_y, n_z) tensor, or (n_systems, n_x, n_y, n_z) with ``batch_idx``
    positions, cell, spline_order, batch_idx, cell_inv_t
        As for `spline_spread`.

    Returns
    -------
    (n_atoms,) tensor
    """
    return _gathered(_Atoms(positions, cell, spline_order, batch_idx, cell_inv_t), mesh, 0)[0][:, 0, 0]


def spline_gather_channels(
    positions: torch.Tensor,
    mesh: torch.Tensor,
    cell: torch.Tensor,
    spline_order: int = 4,
    batch_idx: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gather the values of several meshes at atoms.

    Parameters
    ----------
    mesh : (n_channels, n_x, n_y, n_z) tensor, or (n_systems, n_channels, n_x, n_y, n_z) with ``batch_idx``
    positions, cell, spline_order, batch_idx
        As for `spline_spread`.

    Returns
    -------
    (n_atoms, n_channels) tensor
    """
    return _gathered(_Atoms(positions, cell, spline_order, batch_idx), mesh, 0, before=1)[0][..., 0]


def _check_charges(charges: Any, positions: torch.Tensor) -> torch.Tensor:
    checks.check_positions(positions, finite=False)
    charges = checks.as_float_tensor("charges", charges, positions)
    _check_values("charges", charges, positions, (positions.shape[0],))
    return charges


def spline_gather_vec3(
    positions: torch.Tensor,
    charges: torch.Tensor,
    mesh: torch.Tensor,
    cell: torch.Tensor,
    spline_order: int = 4,
    batch_idx: torch.Tensor | None = None,
    cell_inv_t: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gather vectors of a mesh at atoms, times the charges. This gives forces from a mesh of the electric field.

    Parameters
    ----------
    charges : (n_atoms,) tensor
    mesh : (n_x, n_y, n_z, 3) tensor, or (n_systems, n_x, n_y, n_z, 3) with ``batch_idx``
    positions, cell, spline_order, batch_idx, cell_inv_t
        As for `spline_spread`.

    Returns
    -------
    (n_atoms, 3) tensor
    """
    charges = _check_charges(charges, positions)
    gathered, _ = _gathered(_Atoms(positions, cell, spline_order, batch_idx, cell_inv_t), mesh, 0, after=1)
    return charges.unsqueeze(1) * gathered[..., 0]


def spline_gather_with_force(
    positions: torch.Tensor,
    charges: torch.Tensor,
    mesh: torch.Tensor,
    cell: torch.Tensor,
    spline_order: int = 4,
    batch_idx: torch.Tensor | None = None,
    cell_inv_t: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather the potential of a mesh at atoms, and the forces on charges in it.

    Parameters
    ----------
    charges : (n_atoms,) tensor, charge
    mesh : (n_x, n_y, n_z) tensor, or (n_systems, n_x, n_y, n_z) with ``batch_idx``
        A potential.
    positions, cell, spline_order, batch_idx, cell_inv_t
        As for `spline_spread`.

    Returns
    -------
    potential : (n_atoms,) tensor
        Not multiplied by the charges.
    forces : (n_atoms, 3) tensor
        ``-q_i`` times the gradient of the potential with respect to the position of the atom.
    """
    charges = _check_charges(charges, positions)
    gathered, plan = _gathered(_Atoms(positions, cell, spline_order, batch_idx, cell_inv_t), mesh, 1)
    gradient = plan.lattice.cartesian(gathered[:, 0, 1:] * plan.mesh).to(positions.dtype)
    return gathered[:, 0, 0], -charges.unsqueeze(1) * gradient


def spline_gather_gradient(
    positions: torch.Tensor,
    charges: torch.Tensor,
    mesh: torch.Tensor,
    cell: torch.Tensor,
    spline_order: int = 4,
    batch_idx: torch.Tensor | None = None,
    cell_inv_t: torch.Tensor | None = None,
) -> torch.Tensor:
    """The forces (n_atoms, 3) of `spline_gather_with_force`, which has the same arguments."""
    return spline_gather_with_force(positions, charges, mesh, cell, spline_order, batch_idx, cell_inv_t)[1]


def compute_bspline_deconvolution_1d(
    n: int, spline_order: int = 4, device: torch.device | str | None = None
) -> torch.Tensor:
    """Factors in Fourier space that undo spreading and gathering along one axis.

    Parameters
    ----------
    n : int
        Points of the mesh.
    spline_order : int, optional
        1 to 10.
    device : torch.device or str, optional

    Returns
    -------
    (n,) float64 tensor
        ``1 / b(m)²`` with ``b(m) = Σ_j M_p(j + p/2) cos(2π m j / n)``, in the order of ``torch.fft.fft``. For a smooth
        function on the mesh this makes interpolation exact at mesh points (Essmann et al. 1995, here with centred
        splines, for which b has no zeros).
    """
    n = _positive("n", n)
    order = check_spline_order(spline_order, 1)
    place = torch.device("cpu") if device is None else checks.check_device("device", device)
    return spline_transform(n, order, False, place).pow(-2)


def compute_bspline_deconvolution(
    mesh_dims: Sequence[int], spline_order: int = 4, device: torch.device | str | None = None
) -> torch.Tensor:
    """Products (n_x, n_y, n_z) of `compute_bspline_deconvolution_1d` for the three axes, float64."""
    x, y, z = (
        compute_bspline_deconvolution_1d(n, spline_order, device) for n in check_mesh(mesh_dims, name="mesh_dims")
    )
    return x[:, None, None] * y[:, None] * z


__all__ = [
    "bspline_weight",
    "compute_bspline_deconvolution",
    "compute_bspline_deconvolution_1d",
    "spline_gather",
    "spline_gather_channels",
    "spline_gather_gradient",
    "spline_gather_vec3",
    "spline_gather_with_force",
    "spline_spread",
    "spline_spread_channels",
]
