"""Terms of moments (`nvalchemiops.torch.interactions.electrostatics.sources`), and the frames in which they are summed.

**Frames.** Sums in coordinates ``u = x A`` need moments along u. From ``∂/∂x_a = Σ_j A_aj ∂/∂u_j`` follows
``m' = m T`` with a matrix T of products of A, and derivatives are ``g = g' T^T``. Under strain at fixed Cartesian
moments A changes, which adds to the virial at fixed m'

    W_ab = Σ_i μ_a ∂_b φ + Q_ac ∂_b ∂_c φ

**Self energies.** A sum over all k-vectors contains the self energy of the long-range part
``erf(α r)/r = 2α/√π (1 - α² r²/3 + α⁴ r⁴/10 - ...)``, which does not belong to the energy of points:

    E_self = α/√π q² + 2 α³/(3√π) μ² + 2 α⁵/(5√π) Q:Q

With α = 1/2s this is the energy of a Gaussian of standard deviation s with itself.

**Background.** In a cell of total charge Q = Σ q with a uniform neutralising background, the energy of Gaussian charges
of widths s_i exceeds the energy of points by

    E = 2π/V Q Σ q_i s_i²

since the short-range part ``erf(r/√(2(s_i² + s_j²)))/r - erf(α r)/r`` has the integral ``π/α² - 2π (s_i² + s_j²)`` over
space, and all potentials have the average zero.

**Surface.** A sphere of many cells in a medium of dielectric constant ε' has the additional energy
``E = 2π/((2ε' + 1) V) M²`` with the dipole ``M = Σ q x + μ`` of the cell. It vanishes in a conductor, which is the
boundary condition of the sum without this term. Positions are used as given, without wrapping. For charged cells the
term depends on the origin. Slabs do not fill a sphere: with their own correction the sum needs no such term.

Sources: self energies A. Aguado and P. A. Madden, J. Chem. Phys. 119, 7471 (2003), doi:10.1063/1.1605941; surface
S. W. de Leeuw, J. W. Perram and E. R. Smith, Proc. R. Soc. A 373, 27 (1980), doi:10.1098/rspa.1980.0135.
"""

import math
from typing import NamedTuple

import torch

from nvalchemiops.torch.interactions.electrostatics.results import Contribution, Derivatives
from nvalchemiops.torch.interactions.electrostatics.system import ChargedSystem
from nvalchemiops.torch.operators.lattice import Lattice
from nvalchemiops.torch.operators.moments import derivative_by_coordinates
from nvalchemiops.torch.operators.segments import spread_systems, system_sums, totals
from nvalchemiops.torch.runtime.cache import cached_by_value

HIGHEST = {1: 0, 4: 1, 10: 2}
"""Highest order of derivative for a number of moments."""

_ROWS, _COLUMNS = (0, 0, 0, 1, 1, 2), (0, 1, 2, 1, 2, 2)
"""Axes of second moments."""


class MomentFrames(NamedTuple):
    """Moments in the coordinates of a lattice."""

    lattice: Lattice  # its `frame` maps positions to the coordinates
    # ([n_atoms,] n_moments, n_moments); along the coordinates moments are `moments @ matrix`; None for charges alone
    matrix: torch.Tensor | None
    moments: torch.Tensor  # (n_atoms, n_channels, n_moments), along the coordinates

    @property
    def highest(self) -> int:
        """Highest order of derivative among the moments."""
        return HIGHEST[int(self.moments.shape[-1])]

    def contribution(self, gathered: torch.Tensor, system: ChargedSystem, derivatives: Derivatives) -> Contribution:
        """The contribution of a potential that is linear in the moments.

        ``gathered`` (n_atoms, n_channels, count) holds the potential and its derivatives along the coordinates. The
        virial of the result is only the part from the frames, None for charges, which do not depend on coordinates.
        """
        moments, matrix, n_moments = self.moments, self.matrix, self.moments.shape[-1]
        gathered = gathered.to(moments.dtype)
        of_moments = gathered[..., :n_moments]
        products = moments * of_moments
        energies = 0.5 * (products.squeeze(-1) if matrix is None else products.sum(-1))
        forces = virial = None
        if derivatives.forces:
            forces = -self.lattice.cartesian(derivative_by_coordinates(moments, gathered, may_batch=False))
        gradients = of_moments
        if matrix is not None and (derivatives.charge_gradients or derivatives.virial):
            gradients = of_moments @ matrix.mT
        if matrix is not None and derivatives.virial:
            virial = virial_of_frames(gradients, system)
        return Contribution(energies, forces, gradients if derivatives.charge_gradients else None, virial)


def frames_of(
    system: ChargedSystem, lattice: Lattice, dtype: torch.dtype, n: torch.Tensor | None = None
) -> MomentFrames:
    """The moments of a system along the coordinates of a lattice, optionally in units of mesh points (3,).

    Point charges are in ``dtype``, other moments in float64.
    """
    moments = system.moments.to(dtype if system.of_points else torch.float64)
    n_moments = int(moments.shape[-1])
    if n_moments == 1:
        return MomentFrames(lattice, None, moments)
    frame = lattice.inverse if n is None else lattice.inverse * n
    (matrix,) = cached_by_value(
        "moment frames", (frame,), (n_moments,), lambda: (_matrices(frame, HIGHEST[n_moments]),)
    )
    matrix = matrix[0] if system.batch_idx is None else spread_systems(matrix, system.batch_idx, system.n_atoms)
    return MomentFrames(lattice, matrix, moments @ matrix)


def _matrices(frame: torch.Tensor, highest: int) -> torch.Tensor:
    """The matrices T (n_systems, n_moments, n_moments) of frames (n_systems, 3, 3)."""
    n_systems = frame.shape[0]
    blocks = [torch.ones_like(frame[:, :1, :1])]
    if highest > 0:
        blocks.append(frame)
    if highest > 1:
        entries = []
        for a, b in zip(_ROWS, _COLUMNS):
            for j, k in zip(_ROWS, _COLUMNS):
                entry = frame[:, a, j] * frame[:, b, k]
                entries.append(entry if j == k else entry + frame[:, a, k] * frame[:, b, j])
        blocks.append(torch.stack(entries, -1).view(n_systems, 6, 6))
    rows, n_moments = [], sum(block.shape[1] for block in blocks)
    before = 0
    for block in blocks:
        size = block.shape[1]
        rows.append(torch.nn.functional.pad(block, (before, n_moments - before - size)))
        before += size
    return torch.cat(rows, 1)


def second_moments(packed: torch.Tensor, diagonal: float) -> torch.Tensor:
    """Symmetric matrices (..., 3, 3) from six numbers each; the diagonal is multiplied by a factor."""
    xx, xy, xz, yy, yz, zz = packed.unbind(-1)
    columns = (diagonal * xx, xy, xz, xy, diagonal * yy, yz, xz, yz, diagonal * zz)
    return torch.stack(columns, -1).view(*packed.shape[:-1], 3, 3)


def virial_of_frames(gradients: torch.Tensor, system: ChargedSystem) -> torch.Tensor:
    """``Σ μ_a ∂_b φ + Q_ac ∂_b ∂_c φ`` (n_systems, 3, 3), from gradients for the Cartesian moments."""
    moments, gradients = system.moments.to(torch.float64), gradients.to(torch.float64)
    if moments.shape[-1] == 1:
        return moments.new_zeros((system.n_systems, 3, 3))
    of_atom = moments[..., 1:4].mT @ gradients[..., 1:4]
    if moments.shape[-1] > 4:
        q, h = second_moments(moments[..., 4:], 2.0), second_moments(gradients[..., 4:], 1.0)
        of_atom = of_atom + q.movedim(1, 2).flatten(2) @ h.movedim(1, 2).flatten(2).mT
    return totals(of_atom, system.batch_idx, system.n_systems)


def _self_coefficients(alpha: torch.Tensor, n_moments: int) -> torch.Tensor:
    """Coefficients (..., n_moments) of the squares of moments in the self energy of ``erf(α r)/r``."""
    first = alpha / math.sqrt(math.pi)
    square = alpha.square()
    second = first * square * (2.0 / 3.0)
    third = first * square.square() * (2.0 / 5.0)
    columns = [first, second, second, second]
    columns += [third * (4.0 if a == b else 2.0) for a, b in zip(_ROWS, _COLUMNS)]  # of Q:Q
    return torch.stack(columns[:n_moments], -1)


def self_potentials(moments: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    """Gradients of the self energies of ``erf(α r)/r`` by moments (n_atoms, n_channels, n_moments)."""
    return 2.0 * _self_coefficients(alpha, moments.shape[-1]).unsqueeze(1) * moments


def squared(widths: torch.Tensor) -> torch.Tensor:
    """Squares of widths (n_atoms,) as a column, in float64."""
    return widths.to(torch.float64).square().unsqueeze(1)


def background_potential(system: ChargedSystem, widths: torch.Tensor | None) -> torch.Tensor:
    """``2π/V Σ_j q_j (s² + s_j²)`` (n_atoms, n_channels) for Gaussians of widths s (n_atoms,), or for points."""
    charges = system.charges.to(torch.float64)
    squares = torch.zeros_like(charges) if system.widths is None else charges * squared(system.widths)
    sums = system.totals(torch.stack([charges, squares], -1))
    factor = (2.0 * math.pi) / system.lattice().volume
    found = spread_systems(factor[:, None, None] * sums, system.batch_idx, system.n_atoms)
    return found[..., 1] if widths is None else found[..., 1] + found[..., 0] * squared(widths)


class SelfTerm(NamedTuple):
    """Minus the self energies of the long-range part with alpha (n_systems,), plus kept self energies of Gaussians."""

    alpha: torch.Tensor
    keeps_gaussians: bool = False

    def evaluate(self, system: ChargedSystem, derivatives: Derivatives) -> Contribution:
        """As for `Term`."""
        moments = system.moments.to(torch.float64)
        alpha = self.alpha
        if system.batch_idx is not None:
            alpha = spread_systems(alpha, system.batch_idx, system.n_atoms)
        gradients = -self_potentials(moments, alpha)
        if self.keeps_gaussians:
            assert system.widths is not None
            gradients = gradients + self_potentials(moments, 0.5 / system.widths.to(torch.float64))
        energies = 0.5 * (gradients * moments).sum(-1)
        return Contribution(energies, None, gradients if derivatives.charge_gradients else None)


class BackgroundTerm(NamedTuple):
    """The change of the energy of a charged cell with a uniform background due to Gaussian widths."""

    def evaluate(self, system: ChargedSystem, derivatives: Derivatives) -> Contribution:
        """As for `Term`."""
        potential, n_moments = background_potential(system, system.widths), system.moments.shape[-1]
        energies = 0.5 * system.charges.to(torch.float64) * potential
        gradients = virial = None
        if derivatives.charge_gradients:
            gradients = torch.nn.functional.pad(potential.unsqueeze(-1), (0, n_moments - 1))
        if derivatives.virial:
            virial = on_diagonal(totals(energies.sum(1), system.batch_idx, system.n_systems))
        return Contribution(energies, None, gradients, virial)


class SurfaceTerm(NamedTuple):
    """The energy of the dipole of a cell in a medium of this dielectric constant; zero for slabs."""

    dielectric: float

    def evaluate(self, system: ChargedSystem, derivatives: Derivatives) -> Contribution:
        """As for `Term`."""
        moments, n_systems, batch_idx = system.moments.to(torch.float64), system.n_systems, system.batch_idx
        n_atoms, n_moments = system.n_atoms, moments.shape[-1]
        x = system.positions.to(torch.float64).unsqueeze(1)
        charges = moments[..., :1]
        of_atom = charges * x
        dipole = of_atom + moments[..., 1:4] if n_moments > 1 else of_atom
        dipole = system.totals(dipole)  # (n_systems, n_channels, 3)
        of_volume = 4.0 * math.pi / (2.0 * self.dielectric + 1.0) / system.lattice().volume
        if system.slab_axes is not None:
            of_volume = torch.where(system.slab_axes.all(1), of_volume, 0.0)
        field = spread_systems(of_volume[:, None, None] * dipole, batch_idx, n_atoms)
        potential = (x * field).sum(-1)
        columns = [potential.unsqueeze(-1), field][: 1 + (n_moments > 1)]
        gradients = torch.nn.functional.pad(torch.cat(columns, -1), (0, max(n_moments - 4, 0)))
        energies = 0.5 * (moments * gradients).sum(-1)
        forces = -(charges * field).sum(1) if derivatives.forces else None
        virial = None
        if derivatives.virial:
            of_channel = totals(of_atom, batch_idx, n_systems).mT @ dipole
            energy = system_sums(energies.sum(1), batch_idx, n_systems)
            virial = on_diagonal(energy) - of_volume[:, None, None] * of_channel
        return Contribution(energies, forces, gradients if derivatives.charge_gradients else None, virial)


def on_diagonal(values: torch.Tensor) -> torch.Tensor:
    """Unit matrices times values (n_systems,): the virial of an energy that is inversely proportional to the volume."""
    return values[:, None, None] * torch.eye(3, dtype=torch.float64, device=values.device)
