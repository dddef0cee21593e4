"""The correction for systems that are periodic along two axes, computed as if along three.

A slab of charges between layers of vacuum differs from the periodic stack of such slabs by the interaction of their
dipoles. With z along the normal of the periodic plane, M = Σ q z, Q = Σ q, and L the height of the cell,

    E = 2π/V (M² - Q Σ q z² - Q² L²/12)

which does not depend on the origin. z is that of the positions as they are given: a slab must not be cut in two by the
boundary of the cell. The direction of the open lattice vector does not matter, only its height above the plane.

Sources: I.-C. Yeh and M. L. Berkowitz, J. Chem. Phys. 111, 3155 (1999), doi:10.1063/1.479595; with net charge
V. Ballenegger, A. Arnold and J. J. Cerdà, J. Chem. Phys. 131, 094107 (2009), doi:10.1063/1.3216473.
"""

import math
from typing import NamedTuple

import torch

from nvalchemiops.torch.interactions.electrostatics.results import Contribution, Derivatives
from nvalchemiops.torch.interactions.electrostatics.system import ChargedSystem
from nvalchemiops.torch.operators.segments import spread_systems, system_sums


class SlabTerm(NamedTuple):
    """The correction for systems with one open axis, zero for those with none; NaN for others."""

    def evaluate(self, system: ChargedSystem, derivatives: Derivatives) -> Contribution:
        """As for `Term`."""
        pbc = system.slab_axes
        assert pbc is not None
        positions, charges, cell = (t.to(torch.float64) for t in (system.positions, system.charges, system.cell))
        batch_idx, n_atoms, n_systems = system.batch_idx, system.n_atoms, system.n_systems
        vectors = [cell[:, a] for a in range(3)]
        planes = torch.stack([torch.linalg.cross(vectors[(a + 1) % 3], vectors[(a + 2) % 3]) for a in range(3)], 1)
        n_open = (~pbc).sum(1)
        is_slab = n_open == 1
        # the normal of the plane of the periodic vectors; for bulk systems any axis will do
        axis = torch.where(is_slab, (~pbc).to(torch.int32).argmax(1), 0)
        chosen = torch.nn.functional.one_hot(axis, 3).to(torch.float64).unsqueeze(-1)
        plane, open_vector = (planes * chosen).sum(1), (cell * chosen).sum(1)
        normal = plane / plane.square().sum(-1, keepdim=True).sqrt()
        height = (open_vector * normal).sum(-1).abs()
        volume = (open_vector * plane).sum(-1).abs()

        of_atom = spread_systems(torch.cat([normal, height[:, None], volume[:, None]], 1), batch_idx, n_atoms)
        z = (positions * of_atom[:, :3]).sum(-1, keepdim=True)
        # relative to the middle of the system, or large numbers would cancel
        ones = torch.ones_like(z)
        middle = system.sums(torch.cat([z.detach(), ones], 1))
        z = z - spread_systems(middle[:, 0] / middle[:, 1].clamp(min=1.0), batch_idx, n_atoms).unsqueeze(1)
        sums = torch.stack([charges, charges * z, charges * z * z], -1)
        of_system = spread_systems(system.sums(sums), batch_idx, n_atoms)
        total, dipole, second = (of_system[..., n] for n in range(3))
        applies = torch.where(n_open > 1, torch.nan, is_slab.to(torch.float64))
        scale = spread_systems(applies, batch_idx, n_atoms) * 4.0 * math.pi / of_atom[:, 4]
        potential = z * dipole - 0.5 * (second + total * z * z) - total * (of_atom[:, 3:4] ** 2 / 12.0)
        potential = scale.unsqueeze(1) * potential
        energies = 0.5 * charges * potential
        forces = virial = None
        if derivatives.forces:
            along = -(scale.unsqueeze(1) * charges * (dipole - total * z)).sum(1, keepdim=True)
            forces = along * of_atom[:, :3]
        if derivatives.virial:
            # lengths along the normal come twice, the volume once
            energy = system_sums(energies.sum(1), batch_idx, n_systems)[:, None, None]
            identity = torch.eye(3, dtype=torch.float64, device=cell.device)
            virial = energy * (identity - 2.0 * normal.unsqueeze(-1) * normal.unsqueeze(-2))
        return Contribution(energies, forces, potential if derivatives.charge_gradients else None, virial)
