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

from nvalchemiops.torch.interactions.electrostatics.potentials import LongRangePotential
from nvalchemiops.torch.interactions.electrostatics.results import Parts, WantedParts, at_atoms
from nvalchemiops.torch.interactions.electrostatics.system import ChargedSystem
from nvalchemiops.torch.operators.lattice import Lattice, lattice_of, mesh_frequencies
from nvalchemiops.torch.operators.mesh import mesh_columns, mesh_gather, mesh_spread, spline_transform
from nvalchemiops.torch.operators.mesh_transform import mesh_spectrum, mesh_values
from nvalchemiops.torch.operators.segments import totals
from nvalchemiops.torch.runtime.cache import cached_by_value
from nvalchemiops.torch.runtime.context import is_eager


def _axes_of(mesh: Sequence[int], order: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """What depends on the shape of the mesh alone; see `_axes`."""
    if not is_eager():
        return _axes(mesh, order, device)  # what is made here belongs to the transform
    return _kept_axes(tuple(mesh), order, device)


@functools.lru_cache(maxsize=16)
def _kept_axes(mesh: tuple[int, int, int], order: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    with torch.inference_mode(False), torch.no_grad():
        return _axes(mesh, order, device)


def _axes(mesh: Sequence[int], order: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Functions of one or two frequencies of the half mesh, in float64.

    Products x x, 2 x y, y y, 2 y z, z z, 2 z x, of which k² is made, and ``1 / b²`` for x and y, and for z, shaped to
    broadcast to the half mesh; how often a plane counts in a sum over the whole mesh; and two matrices that turn values
    on the mesh into sums of them with ``n n^T``, n the three frequencies: powers of z by z, for real and imaginary
    parts alike, and the nine products by x, y and power of z. Last the numbers of points, and an identity matrix.
    """
    axes, deconvolution = [], []
    for axis, n in enumerate(mesh):
        shape = [-1 if a == axis else 1 for a in range(3)]
        axes.append(mesh_frequencies(n, axis == 2, device).reshape(shape))
        deconvolution.append(spline_transform(n, order, axis == 2, device).pow(-2).reshape(shape))
    x, y, z = axes
    products = (x * x, 2.0 * x * y, y * y, 2.0 * y * z, z * z, 2.0 * z * x)
    # planes that are their own mirror images
    doubled = torch.where((z == 0) | (2 * z == mesh[2]), 1.0, 2.0).to(torch.float64)
    powers_of_z = torch.stack([torch.ones_like(z), z, z * z], -1).reshape(-1, 3).repeat_interleave(2, 0)
    dyads = torch.zeros((mesh[0], mesh[1], 3, 3, 3), dtype=torch.float64, device=device)
    x, y = x[..., 0], y[..., 0]
    for power, a, b, product in ((0, 0, 0, x * x), (0, 0, 1, x * y), (0, 1, 1, y * y), (1, 0, 2, x), (1, 1, 2, y)):
        dyads[:, :, power, a, b] = dyads[:, :, power, b, a] = product
    dyads[:, :, 2, 2, 2].fill_(1.0)  # no constant of the host, which a graph would have to copy
    deconvolved = (deconvolution[0] * deconvolution[1], deconvolution[2])
    sizes = torch.cat([torch.full((1,), float(n), dtype=torch.float64, device=device) for n in mesh])
    identity = torch.eye(3, dtype=torch.float64, device=device)
    return (*products, *deconvolved, doubled, powers_of_z, dyads.reshape(-1, 9), sizes, identity)


class Influence(NamedTuple):
    """``g(k²) / V`` with deconvolution (n_systems, 1, n_x, n_y, n_z // 2 + 1, 1).

    And, if it is there, the same of g', times how often a plane counts in a sum over the whole mesh.
    """

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
    xx, xy, yy, yz, zz, zx, b_xy, b_z, doubled, *_ = _axes_of(mesh, order, alpha.device)
    m = lattice.metric.reshape(-1, 9, 1, 1, 1).unbind(1)
    # k² as a sum of functions of two indices
    k2 = torch.addcmul(m[0] * xx, m[1], xy) + torch.addcmul(m[4] * yy, m[5], yz) + torch.addcmul(m[8] * zz, m[2], zx)
    origin = k2 == 0.0
    of_system = torch.stack([alpha, potential.at_zero(alpha), lattice.volume], 0)[..., None, None, None]
    k2 = torch.where(origin, 1.0, k2)
    b_xy = b_xy / of_system[2]
    value = potential.reciprocal(k2, of_system[0]) * b_xy * b_z
    value = torch.where(origin, of_system[1] / of_system[2], value)[:, None, ..., None]
    if not with_slope:
        return Influence(value, None)
    slope = potential.slope_of(k2, of_system[0]) * b_xy * (b_z * doubled)
    return Influence(value, torch.where(origin, 0.0, slope)[:, None, ..., None])


def mesh_sum(
    potential: LongRangePotential,
    system: ChargedSystem,
    alpha: torch.Tensor,
    mesh: Sequence[int],
    spline_order: int,
    wanted: WantedParts,
    prepared: Influence | None = None,
) -> Parts:
    """The smooth part with alpha (n_systems,), on a mesh of the dtype of the charges."""
    positions, charges, batch_idx, n_systems = system.positions, system.charges, system.batch_idx, system.n_systems
    *_, powers_of_z, dyads, n, identity = _axes_of(mesh, spline_order, positions.device)
    lattice = lattice_of(system.cell, batch_idx, system.n_atoms)
    in_spacings = lattice._replace(frame=lattice.frame * n)
    coordinates = in_spacings.fractional(positions)
    order, column_begin = mesh_columns(coordinates, batch_idx, n_systems, mesh, spline_order)
    plan = (batch_idx, n_systems, order, column_begin, mesh, spline_order)
    density = mesh_spectrum(mesh_spread(charges.unsqueeze(-1), coordinates, *plan, 0))
    if prepared is None:
        value, slope = cached_by_value(
            "influence",
            (system.cell, alpha),
            (potential, tuple(mesh), spline_order, wanted.virial) if potential.is_constant else None,
            lambda: influence(potential, lattice, alpha, mesh, spline_order, wanted.virial),
        )
    else:
        value, slope = prepared.value, prepared.slope if wanted.virial else None
    power = None if slope is None else density.to(torch.float64).square() * slope
    factor = value.to(charges.dtype)
    # in place where nothing is recorded: fresh memory costs more than the product
    recorded = density.requires_grad or factor.requires_grad or not is_eager()
    product = density * factor if recorded else density.mul_(factor)
    field = mesh_values(product, mesh[2])
    gathered = mesh_gather(field, coordinates, *plan, int(wanted.forces))
    parts = at_atoms(gathered, charges, in_spacings, wanted)
    if power is None:
        return parts
    sums = (power.flatten(4) @ powers_of_z).sum(1).flatten(1) @ dyads
    energy = totals(parts.energies.to(torch.float64).sum(1), batch_idx, n_systems)
    return parts._replace(virial=lattice.dyadic(sums.view(-1, 3, 3)) + energy[:, None, None] * identity)
