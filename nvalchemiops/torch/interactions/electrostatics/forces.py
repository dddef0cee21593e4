"""How large Coulomb forces are, from near neighbors alone: what an accuracy relative to them means in numbers."""

from typing import Any

import torch

from nvalchemiops.interactions.electrostatics import error_models as core
from nvalchemiops.interactions.pair.potentials import coulomb_nearby
from nvalchemiops.torch.interactions.electrostatics.real_space import pair_part
from nvalchemiops.torch.interactions.electrostatics.results import WantedParts
from nvalchemiops.torch.interactions.electrostatics.system import ChargedSystem
from nvalchemiops.torch.neighbors.rows import Rows
from nvalchemiops.torch.operators.lattice import lattice_of
from nvalchemiops.torch.operators.segments import system_sums

CROWDED = 16.0
"""Density around atoms, in units of the average, at which estimates do not search for so many neighbors."""


def force_of_neighbors(
    system: ChargedSystem,
    rows: Rows,
    reach: torch.Tensor,
    spacing: torch.Tensor,
    exclusions: Any = None,
    exclusion_factors: Any = None,
) -> torch.Tensor:
    """RMS of the forces (n_systems,) in units of (Σq²/N)/d², from neighbors up to ``reach`` (n_systems,).

    ``spacing`` (n_systems,) is d. Nothing is read on the host.
    """
    with torch.no_grad():
        charges = system.charges.detach()
        fixed = system.at_fixed_geometry()._replace(charges=charges)
        excluded = {"exclusions": exclusions, "exclusion_factors": exclusion_factors}
        forces = pair_part(coulomb_nearby, fixed, reach, rows, WantedParts(forces=True), **excluded).forces
        assert forces is not None
        squares = [t.to(torch.float64).square().sum(1) for t in (forces, charges)]
        columns = torch.stack([*squares, torch.ones_like(squares[0])], 1)
        of_forces, of_charges, count = system_sums(columns, system.batch_idx, system.n_systems).unbind(1)
        # RMS of the forces / (mean square of the charges / d²)
        nearby = (of_forces * count).sqrt() / of_charges * spacing.square()
        return core.force_of(nearby, count, torch)


def is_crowded(system: ChargedSystem) -> bool:
    """Whether an atom has far more neighbors than in a system of even density. Reads values on the host."""
    n_atoms, batch_idx = system.n_atoms, system.batch_idx
    if n_atoms == 0:
        return False
    coordinates = lattice_of(system.cell.detach(), batch_idx, n_atoms).fractional(system.positions.detach())
    numbers = torch.zeros(n_atoms, dtype=torch.int64, device=coordinates.device)
    if batch_idx is not None:
        numbers += batch_idx
    # as many boxes as atoms in each system
    n_boxes = numbers.bincount().double().pow(1.0 / 3.0).round().clamp_min(1.0).index_select(0, numbers).unsqueeze(1)
    box = (coordinates - coordinates.floor()).nan_to_num().mul(n_boxes).floor().minimum(n_boxes - 1.0).long()
    keys = torch.cat([numbers.unsqueeze(1), box], 1)
    _, of_atom, count = torch.unique(keys, dim=0, return_inverse=True, return_counts=True)
    return float(count.index_select(0, of_atom).double().mean()) > CROWDED
