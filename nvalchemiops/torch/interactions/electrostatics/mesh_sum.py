"""The smooth part of an Ewald sum on a mesh: particle-mesh Ewald.

Charges are spread to a mesh by B-splines, the potential of the mesh follows from a product in Fourier space, and is
gathered at the atoms by the same splines. Both take the exponential ``exp(i k.r)`` for a spline that is right at mesh
points, which a factor ``1 / b`` for each axis makes it: ``b(m) = Σ_j M_p(j) cos(2π m j / n)``, with the spline centred
on zero. Forces are derivatives of the energy as it is computed.

Sources: T. Darden, D. York and L. Pedersen, J. Chem. Phys. 98, 10089 (1993), doi:10.1063/1.464397; U. Essmann et al.,
J. Chem. Phys. 103, 8577 (1995), doi:10.1063/1.470117. A spline of odd order has no zero of b when it is centred.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from nvalchemiops.torch.interactions.electrostatics.long_range import LongRangePotential
from nvalchemiops.torch.interactions.electrostatics.parts import Parts, Wanted, at_atoms
from nvalchemiops.torch.interactions.electrostatics.system import ChargedSystem
from nvalchemiops.torch.lattice import Lattice, lattice_of, mesh_frequencies
from nvalchemiops.torch.mesh import mesh_columns, mesh_gather, mesh_spread, spline_transform


@functools.lru_cache(maxsize=64)
def _kept_axes(mesh: tuple[int, int, int], order: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    with torch.inference_mode(False):
        return _axes(mesh, order, device)


def _axes(mesh: Sequence[int], order: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """For each axis the frequencies and ``1 / b²``, shaped to broadcast to (n_x, n_y, n_z // 2 + 1)."""
    found = []
    for axis, n in enumerate(mesh):
        shape = [-1 if a == axis else 1 for a in range(3)]
        found.append(mesh_frequencies(n, axis == 2, device).reshape(shape))
        found.append(spline_transform(n, order, axis == 2, device).pow(-2).reshape(shape))
    return tuple(found)


class Influence(NamedTuple):
    """``g(k²) / V`` with deconvolution (n_systems, n_x, n_y, n_z // 2 + 1), and the same of g' if it is there."""

    value: torch.Tensor
    slope: torch.Tensor | None


def influence(
    potential: LongRangePotential,
    lattice: Lattice,
    alpha: torch.Tensor,
    mesh: Sequence[int],
    order: int,
    with_slope: bool,
) -> Influence:
    """The influence function of the mesh."""
    compiling = torch.compiler.is_compiling()
    device = alpha.device
    axes = _axes(mesh, order, device) if compiling else _kept_axes(tuple(mesh), order, device)
    x, b_x, y, b_y, z, b_z = axes
    m = [[lattice.metric[:, i, j, None, None, None] for j in range(3)] for i in range(3)]
    # k² is a sum of functions of two indices
    xy = x * (m[0][0] * x + (2.0 * m[0][1]) * y)
    xz = z * (m[2][2] * z + (2.0 * m[0][2]) * x)
    yz = y * (m[1][1] * y + (2.0 * m[1][2]) * z)
    k2 = (xy + yz) + xz
    rate = alpha[:, None, None, None]
    b_xy = b_x * b_y / lattice.volume[:, None, None, None]
    at_zero = (potential.at_zero(alpha) / lattice.volume)[:, None, None, None]
    origin = (x == 0) & (y == 0) & (z == 0)
    value, slope = potential.reciprocal(torch.where(origin, 1.0, k2), rate)
    deconvolution = b_xy * b_z
    value = torch.where(origin, at_zero, value * deconvolution)
    return Influence(value, torch.where(origin, 0.0, slope * deconvolution) if with_slope else None)


def mesh_sum(
    potential: LongRangePotential,
    system: ChargedSystem,
    alpha: torch.Tensor,
    mesh: Sequence[int],
    spline_order: int,
    wanted: Wanted,
    prepared: Influence | None = None,
) -> Parts:
    """The smooth part with alpha (n_systems,), on a mesh of the dtype of the charges."""
    positions, charges, batch_idx, n_systems = system.positions, system.charges, system.batch_idx, system.n_systems
    lattice = lattice_of(system.cell, batch_idx, system.n_atoms)
    n = torch.tensor([float(size) for size in mesh], dtype=torch.float64, device=positions.device)
    coordinates = lattice.fractional(positions) * n
    order, column_begin = mesh_columns(coordinates, batch_idx, n_systems, mesh, spline_order)
    plan = (batch_idx, n_systems, order, column_begin, mesh, spline_order)
    density = torch.fft.rfftn(mesh_spread(charges.unsqueeze(-1), coordinates, *plan, 0), dim=(2, 3, 4))
    if prepared is None:
        value, slope = influence(potential, lattice, alpha, mesh, spline_order, wanted.virial)
    else:
        value, slope = prepared.value, prepared.slope if wanted.virial else None
    value = value.unsqueeze(1)
    # the sum over wave vectors is not divided by their number
    field = torch.fft.irfftn(density * value.to(charges.dtype), s=mesh, dim=(2, 3, 4), norm="forward")
    gathered = mesh_gather(field, coordinates, *plan, int(wanted.forces))
    parts = at_atoms(gathered, charges, lattice, n, wanted)
    if slope is None:
        return parts

    # planes of the half spectrum that are their own mirror images count once
    doubled = torch.full((mesh[2] // 2 + 1,), 2.0, dtype=torch.float64, device=positions.device)
    ends = mesh_frequencies(mesh[2], True, positions.device)
    doubled = torch.where((ends == 0) | (2 * ends == mesh[2]), 1.0, doubled)
    power = torch.view_as_real(density).square().sum((1, 5)).to(torch.float64) * doubled
    isotropic = 0.5 * (power * value[:, 0]).sum((1, 2, 3))
    directed = power * slope
    x, y, z = (mesh_frequencies(size, axis == 2, positions.device) for axis, size in enumerate(mesh))
    xy, xz, yz = directed.sum(3), directed.sum(2), directed.sum(1)
    on_x, on_y, on_z = xy.sum(2), xy.sum(1), xz.sum(1)
    entries = {
        (0, 0): (on_x * x * x).sum(1),
        (1, 1): (on_y * y * y).sum(1),
        (2, 2): (on_z * z * z).sum(1),
        (0, 1): (xy * x[:, None] * y).sum((1, 2)),
        (0, 2): (xz * x[:, None] * z).sum((1, 2)),
        (1, 2): (yz * y[:, None] * z).sum((1, 2)),
    }
    rows = [entries[min(i, j), max(i, j)] for i in range(3) for j in range(3)]
    identity = torch.eye(3, dtype=torch.float64, device=positions.device)
    virial = lattice.dyadic(torch.stack(rows, -1).reshape(-1, 3, 3)) + isotropic[:, None, None] * identity
    return parts._replace(virial=virial)
