"""The correction for systems that are periodic along two axes but summed as if periodic along three.

An isolated slab of charges differs from a periodic stack of slabs with vacuum between them by the interaction of their
dipoles. With z along the normal of the periodic plane, M = Σ q z, Q = Σ q, and L the height of the cell,

    E = 2π/V (M² - Q Σ q z² - Q² L²/12)

which does not depend on the origin. Positions are used as given: the boundary of the cell must not cut the slab in two.
With dipoles and quadrupoles ``M = Σ q z + μ_z``, and ``Σ q z²`` becomes ``Σ q z² + 2 μ_z z + Q_zz``; Gaussians of width
s add q s² to this sum. The direction of the open lattice vector does not matter, only its height above the plane.

Sources: I.-C. Yeh and M. L. Berkowitz, J. Chem. Phys. 111, 3155 (1999), doi:10.1063/1.479595; with net charge
V. Ballenegger, A. Arnold and J. J. Cerdà, J. Chem. Phys. 131, 094107 (2009), doi:10.1063/1.3216473.
"""

import math
from typing import NamedTuple

import torch

from nvalchemiops.torch.interactions.electrostatics.results import Contribution, Derivatives
from nvalchemiops.torch.interactions.electrostatics.system import ChargedSystem
from nvalchemiops.torch.interactions.electrostatics.terms.moments import second_moments, virial_of_frames
from nvalchemiops.torch.operators.segments import spread_systems, system_sums


class SlabTerm(NamedTuple):
    """The correction for systems with one open axis; zero for fully periodic systems, NaN for all others."""

    def evaluate(self, system: ChargedSystem, derivatives: Derivatives) -> Contribution:
        """As for `Term`."""
        pbc = system.slab_axes
        assert pbc is not None
        sources = None if system.of_points else system.moments.to(torch.float64)
        positions, charges, cell = (t.to(torch.float64) for t in (system.positions, system.charges, system.cell))
        batch_idx, n_atoms, n_systems = system.batch_idx, system.n_atoms, system.n_systems
        vectors = [cell[:, a] for a in range(3)]
        planes = torch.stack([torch.linalg.cross(vectors[(a + 1) % 3], vectors[(a + 2) % 3]) for a in range(3)], 1)
        n_open = (~pbc).sum(1)
        is_slab = n_open == 1
        # the normal of the plane of the periodic vectors; for bulk systems any axis will do
        is_first = torch.arange(3, device=pbc.device) == 0
        chosen = torch.where(is_slab.unsqueeze(1), ~pbc, is_first).to(torch.float64).unsqueeze(-1)
        plane, open_vector = (planes * chosen).sum(1), (cell * chosen).sum(1)
        normal = plane / plane.square().sum(-1, keepdim=True).sqrt()
        height = (open_vector * normal).sum(-1).abs()
        volume = (open_vector * plane).sum(-1).abs()

        of_atom = spread_systems(torch.cat([normal, height[:, None], volume[:, None]], 1), batch_idx, n_atoms)
        z = (positions * of_atom[:, :3]).sum(-1, keepdim=True)
        # relative to the middle of the system, to avoid cancellation of large numbers
        ones = torch.ones_like(z)
        middle = system.sums(torch.cat([z.detach(), ones], 1))
        z = z - spread_systems(middle[:, 0] / middle[:, 1].clamp(min=1.0), batch_idx, n_atoms).unsqueeze(1)
        if sources is None:
            sums = torch.stack([charges, charges * z, charges * z * z], -1)
        else:
            sums, along_normal = _moments_of_slab(sources, z, of_atom[:, :3], system.widths)
        of_system = spread_systems(system.sums(sums), batch_idx, n_atoms)
        total, dipole, second = (of_system[..., n] for n in range(3))
        applies = torch.where(n_open > 1, torch.nan, is_slab.to(torch.float64))
        scale = spread_systems(applies, batch_idx, n_atoms) * 4.0 * math.pi / of_atom[:, 4]
        potential = z * dipole - 0.5 * (second + total * z * z) - total * (of_atom[:, 3:4] ** 2 / 12.0)
        if sources is not None:
            steps = (potential, dipole - total * z, -total)
            return _of_sources(sources, along_normal, steps, scale, of_atom[:, :3], normal, system, derivatives)
        potential = scale.unsqueeze(1) * potential
        energies = 0.5 * charges * potential
        forces = virial = None
        if derivatives.forces:
            along = -(scale.unsqueeze(1) * charges * (dipole - total * z)).sum(1, keepdim=True)
            forces = along * of_atom[:, :3]
        if derivatives.virial:
            # lengths along the normal enter squared, the volume once
            energy = system_sums(energies.sum(1), batch_idx, n_systems)[:, None, None]
            identity = torch.eye(3, dtype=torch.float64, device=cell.device)
            virial = energy * (identity - 2.0 * normal.unsqueeze(-1) * normal.unsqueeze(-2))
        return Contribution(energies, forces, potential.unsqueeze(-1) if derivatives.charge_gradients else None, virial)


def _moments_of_slab(
    sources: torch.Tensor, z: torch.Tensor, normal: torch.Tensor, widths: torch.Tensor | None
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Charge, dipole and second moment along the normal (n_atoms, n_channels, 3), and q and μ_z of the atoms."""
    zero = torch.zeros_like(sources[..., 0])
    charges, dipoles, seconds = sources[..., 0], zero, zero
    if sources.shape[-1] > 1:
        dipoles = (sources[..., 1:4] * normal.unsqueeze(1)).sum(-1)
    if sources.shape[-1] > 4:
        both = (normal.unsqueeze(-1) * normal.unsqueeze(-2)).unsqueeze(1)
        seconds = (second_moments(sources[..., 4:], 2.0) * both).sum((-2, -1))
    second = charges * z * z + 2.0 * dipoles * z + seconds
    if widths is not None:
        second = second + charges * widths.to(torch.float64).square().unsqueeze(1)
    return torch.stack([charges, charges * z + dipoles, second], -1), (charges, dipoles)


def _of_sources(
    sources: torch.Tensor,
    along_normal: tuple[torch.Tensor, ...],
    steps: tuple[torch.Tensor, ...],
    scale: torch.Tensor,
    normals: torch.Tensor,
    normal: torch.Tensor,
    system: ChargedSystem,
    derivatives: Derivatives,
) -> Contribution:
    """The contribution of sources in a potential along the normal whose derivatives are ``steps``."""
    charges, dipoles = along_normal
    widths, n_moments = system.widths, sources.shape[-1]
    potential, field, slope = (scale.unsqueeze(1) * step for step in steps)
    identity = torch.eye(3, dtype=torch.float64, device=sources.device)
    of_widths = None
    if widths is not None:
        squares = widths.to(torch.float64).square().unsqueeze(1)
        of_widths = 0.5 * slope * squares
        potential = potential + of_widths
    columns = [potential.unsqueeze(-1)]
    if n_moments > 1:
        columns.append(field.unsqueeze(-1) * normals.unsqueeze(1))
    if n_moments > 4:
        pairs = [normals[:, a] * normals[:, b] for a in range(3) for b in range(a, 3)]
        columns.append(slope.unsqueeze(-1) * torch.stack(pairs, -1).unsqueeze(1))
    gradients = torch.cat(columns, -1)
    energies = 0.5 * (sources * gradients).sum(-1)
    forces = virial = None
    if derivatives.forces:
        forces = -(charges * field + dipoles * slope).sum(1, keepdim=True) * normals
    if derivatives.virial:
        # lengths along the normal enter squared, the volume once; widths and sizes of moments do not change
        energy = system_sums(energies.sum(1), system.batch_idx, system.n_systems)[:, None, None]
        dyad = normal.unsqueeze(-1) * normal.unsqueeze(-2)
        virial = energy * (identity - 2.0 * dyad) + virial_of_frames(gradients, system)
        if of_widths is not None:
            energy = system_sums((charges * of_widths).sum(1), system.batch_idx, system.n_systems)[:, None, None]
            virial = virial + 2.0 * energy * dyad
    return Contribution(energies, forces, gradients if derivatives.charge_gradients else None, virial)
