"""Ewald parameters for torch tensors."""

from typing import NamedTuple

import numpy as np
import torch

from nvalchemiops.interactions.electrostatics import parameters
from nvalchemiops.torch.neighbors import checks


class EwaldParameters(NamedTuple):
    """Parameters of an Ewald sum, one of each for every system.

    Attributes
    ----------
    alpha : (n_systems,) tensor, 1/length
        Splitting parameter.
    real_space_cutoff : (n_systems,) tensor, length
    reciprocal_space_cutoff : (n_systems,) tensor, 1/length
        Largest length of a wave vector.
    """

    alpha: torch.Tensor
    real_space_cutoff: torch.Tensor
    reciprocal_space_cutoff: torch.Tensor


def estimate_ewald_parameters(
    positions: torch.Tensor,
    cell: torch.Tensor,
    batch_idx: torch.Tensor | None = None,
    accuracy: float = 1e-6,
) -> EwaldParameters:
    """Splitting parameter and cutoffs that meet ``accuracy`` at about the least cost.

    Parameters
    ----------
    positions : (n_atoms, 3) tensor, length
        Only the number of atoms in each system matters.
    cell : (3, 3) or (n_systems, 3, 3) tensor, length
    batch_idx : (n_atoms,) int32 tensor, optional
        System of each atom, in any order.
    accuracy : float
        RMS error of the forces, relative to the force between two average ions at the average distance.

    Returns
    -------
    EwaldParameters
        Tensors (n_systems,) of the dtype of ``positions``.

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message.

    Notes
    -----
    Sources: Kolafa and Perram (1992) for the errors, Fincham (1994) for the balance; formulas in
    `nvalchemiops.interactions.electrostatics.parameters`. Reads values on the host.
    """
    checks.check_positions(positions)
    accuracy = checks.check_positive("accuracy", accuracy)
    batch_idx, cell = systems_of(positions, cell, batch_idx)
    count, volume, spacing = system_sizes(cell, batch_idx)
    alpha = parameters.optimal_alpha(count, volume)
    r_c = parameters.real_cutoff(alpha, spacing, accuracy)
    k_c = parameters.reciprocal_cutoff(alpha, spacing, accuracy)
    return EwaldParameters(
        *(torch.as_tensor(v, dtype=positions.dtype, device=positions.device) for v in (alpha, r_c, k_c))
    )


def systems_of(
    positions: torch.Tensor, cell: torch.Tensor | None, batch_idx: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """System of each atom, and the cell as (n_systems, 3, 3), periodic along all axes."""
    if cell is None:
        raise ValueError("`cell` is required: the Ewald sum is for systems periodic along three axes")
    declared = cell.shape[0] if isinstance(cell, torch.Tensor) and cell.ndim == 3 else 1
    if batch_idx is None:
        batch_idx = torch.zeros(positions.shape[0], dtype=torch.int32, device=positions.device)
        cell = checks.check_cell(cell, positions, 1)
    else:
        batch_idx, _ = checks.check_batch_idx(batch_idx, positions, declared)
        cell = checks.check_cell(cell, positions, declared)
    return batch_idx, cell


def system_sizes(cell: torch.Tensor, batch_idx: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Atoms, volume and average distance (V/N)^(1/3) of each system, on the host."""
    lattice = checks.on_host(cell.detach().to(torch.float64))
    volume = np.abs(np.linalg.det(lattice))
    count = checks.on_host(torch.bincount(batch_idx, minlength=cell.shape[0])).astype(np.float64)
    return count, volume, np.cbrt(volume / np.maximum(count, 1.0))
