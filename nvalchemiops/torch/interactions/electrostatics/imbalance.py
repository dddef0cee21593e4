"""A guess at the RMS of Coulomb forces from positions, which turns a relative accuracy into an error of forces."""

from typing import Any

import numpy as np
import torch

from nvalchemiops.interactions.electrostatics import parameters as core
from nvalchemiops.interactions.pair.potentials import IMBALANCE
from nvalchemiops.torch.interactions.pair.potential import PairSystem, Wanted, sum_pairs
from nvalchemiops.torch.lattice import lattice_of
from nvalchemiops.torch.segments import system_sums

CROWDED = 64.0
"""Density around atoms, in units of the average, at which nobody counts their neighbors for a guess."""


def near_enough(reach: Any, spacing: Any, xp: Any = np) -> Any:
    """Distances to which neighbors count, where they are known up to ``reach``; and ``spacing``, stacked."""
    return xp.stack([xp.minimum(reach, core.IMBALANCE_REACH * spacing), spacing])


def force_of_rows(system: PairSystem, near: torch.Tensor) -> torch.Tensor:
    """RMS of the forces (n_systems,) in units of (Σq²/N)/d².

    ``near`` (2, n_systems) holds the distances to which neighbors count, and d.
    """
    reach, spacing = near
    positions, cell = system.positions.detach(), system.cell
    with torch.no_grad():
        _, forces = sum_pairs(
            IMBALANCE,
            system._replace(positions=positions, cell=None if cell is None else cell.detach()),
            {"reach": reach.to(positions)},
            Wanted(forces=True),
            cutoff=None,
        )
        # the mean length rather than the RMS, which a pair in contact would make useless for all others
        lengths = torch.linalg.vector_norm(forces.to(torch.float64), dim=1)
        columns = torch.stack([lengths, torch.ones_like(lengths)], 1)
        total, count = system_sums(columns, system.batch_idx, system.n_systems).unbind(1)
        return core.force_of(total / count.clip(1.0, None) * spacing.square(), count, torch)


def crowding(positions: torch.Tensor, cell: torch.Tensor, batch_idx: torch.Tensor | None) -> float:
    """Average over atoms of the number of atoms in their box, of about as many boxes as there are atoms."""
    n_atoms = positions.shape[0]
    if n_atoms == 0:
        return 0.0
    coordinates = lattice_of(cell, batch_idx, n_atoms).fractional(positions)
    if not bool(coordinates.isfinite().all()):
        return 0.0
    n_boxes = max(1, round((n_atoms / cell.shape[0]) ** (1.0 / 3.0)))
    box = ((coordinates - coordinates.floor()) * n_boxes).long().clamp_max(n_boxes - 1)
    number = (box[:, 0] * n_boxes + box[:, 1]) * n_boxes + box[:, 2]
    if batch_idx is not None:
        number = number + batch_idx * n_boxes**3
    return float(torch.bincount(number).double().square().sum()) / n_atoms
