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
from nvalchemiops.torch.interactions.electrostatics.terms.moments import (
    on_diagonal,
    second_moments,
    squared,
    virial_of_frames,
)
from nvalchemiops.torch.operators.segments import spread_systems, system_sums


class SlabTerm(NamedTuple):
    """The correction for systems with one open axis; zero for fully periodic systems, NaN for all others."""

    def evaluate(self, system: ChargedSystem, derivatives: Derivatives) -> Contribution:
        """As for `Term`."""
        pbc, widths = system.slab_axes, system.widths
        assert pbc is not None
        positions, moments, cell = (t.to(torch.float64) for t in (system.positions, system.moments, system.cell))
        batch_idx, n_atoms, n_moments = system.batch_idx, system.n_atoms, moments.shape[-1]
        planes = torch.linalg.cross(cell.roll(-1, 1), cell.roll(-2, 1))
        n_open = (~pbc).sum(1)
        is_slab = n_open == 1
        # the normal of the plane of the periodic vectors; for bulk systems any axis will do
        is_first = torch.arange(3, device=pbc.device) == 0
        chosen = torch.where(is_slab.unsqueeze(1), ~pbc, is_first).to(torch.float64).unsqueeze(-1)
        plane = (planes * chosen).sum(1)
        area = torch.linalg.vector_norm(plane, dim=-1, keepdim=True)
        volume = (cell[:, 0] * planes[:, 0]).sum(-1, keepdim=True).abs()
        normal = plane / area

        of_atom = spread_systems(torch.cat([normal, volume / area, volume], 1), batch_idx, n_atoms)
        normals = of_atom[:, :3]
        z = (positions * normals).sum(-1, keepdim=True)
        # relative to the middle of the system, to avoid cancellation of large numbers
        middle = system.sums(torch.cat([z.detach(), torch.ones_like(z)], 1))
        z = z - spread_systems(middle[:, 0] / middle[:, 1].clamp(min=1.0), batch_idx, n_atoms).unsqueeze(1)

        # charge, dipole and second moment along the normal
        charges, dipoles = moments[..., 0], None
        first = charges * z
        second = first * z
        if n_moments > 1:
            dipoles = (moments[..., 1:4] * normals.unsqueeze(1)).sum(-1)
            first, second = first + dipoles, second + 2.0 * dipoles * z
        if n_moments > 4:
            dyads = (normals.unsqueeze(-1) * normals.unsqueeze(-2)).unsqueeze(1)
            second = second + (second_moments(moments[..., 4:], 2.0) * dyads).sum((-2, -1))
        if widths is not None:
            second = second + charges * squared(widths)
        sums = system.sums(torch.stack([charges, first, second], -1))
        total, dipole, second = spread_systems(sums, batch_idx, n_atoms).unbind(-1)

        # the potential, and its first and second derivative along the normal
        applies = torch.where(n_open > 1, torch.nan, is_slab.to(torch.float64))
        scale = (spread_systems(applies, batch_idx, n_atoms) * (4.0 * math.pi) / of_atom[:, 4]).unsqueeze(1)
        at_atom = total * z
        potential = z * dipole - 0.5 * (second + at_atom * z) - total * (of_atom[:, 3:4] ** 2 / 12.0)
        potential, field, slope = scale * potential, scale * (dipole - at_atom), -scale * total
        of_widths = None
        if widths is not None:
            of_widths = 0.5 * slope * squared(widths)
            potential = potential + of_widths
        columns = [potential.unsqueeze(-1)]
        if n_moments > 1:
            columns.append(field.unsqueeze(-1) * normals.unsqueeze(1))
        if n_moments > 4:
            pairs = [normals[:, a] * normals[:, b] for a in range(3) for b in range(a, 3)]
            columns.append(slope.unsqueeze(-1) * torch.stack(pairs, -1).unsqueeze(1))
        gradients = torch.cat(columns, -1) if n_moments > 1 else columns[0]
        energies = 0.5 * (moments * gradients).sum(-1)
        forces = virial = None
        if derivatives.forces:
            along = charges * field if dipoles is None else charges * field + dipoles * slope
            forces = -along.sum(1, keepdim=True) * normals
        if derivatives.virial:
            # lengths along the normal enter squared, the volume once; widths and sizes of moments do not change
            energy = system_sums(energies.sum(1), batch_idx, system.n_systems)
            dyad = normal.unsqueeze(-1) * normal.unsqueeze(-2)
            virial = on_diagonal(energy) - 2.0 * energy[:, None, None] * dyad
            if of_widths is not None:
                energy = system_sums((charges * of_widths).sum(1), batch_idx, system.n_systems)
                virial = virial + 2.0 * energy[:, None, None] * dyad
            if n_moments > 1:
                virial = virial + virial_of_frames(gradients, system)
        return Contribution(energies, forces, gradients if derivatives.charge_gradients else None, virial)
