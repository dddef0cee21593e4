"""Lennard-Jones energies, forces and virials for torch tensors, differentiable to any order."""

from typing import Any

import torch

from nvalchemiops.torch.interactions.pair.library import lennard_jones
from nvalchemiops.torch.runtime import tables


def lj_energy(
    positions: torch.Tensor,
    sigma: float | torch.Tensor,
    epsilon: float | torch.Tensor,
    cutoff: float,
    cell: torch.Tensor | None = None,
    *,
    mixing: str | None = "lorentz-berthelot",
    shifted: bool = False,
    r_switch: float | None = None,
    **options: Any,
) -> torch.Tensor:
    """Lennard-Jones energy of each atom: half of ``4 epsilon ((sigma/r)¹² - (sigma/r)⁶)`` for each of its pairs.

    Parameters
    ----------
    positions : (n_atoms, 3) tensor, float32 or float64, length
    sigma : number or (n_atoms,) tensor, length
        Distance at which the energy of two equal atoms is zero. With ``mixing=None``, a table (n_species, n_species).
    epsilon : number or (n_atoms,) tensor, energy
        Depth of the potential well. With ``mixing=None``, a table (n_species, n_species).
    cutoff : float, length
    cell : (3, 3) or (n_systems, 3, 3) tensor, length, optional
    mixing, shifted, r_switch
        As for `nvalchemiops.torch.interactions.pair.lennard_jones`.
    **options
        Neighbors, batch, exclusions and the other arguments of `nvalchemiops.torch.interactions.pair.PairPotential`
        when it is called. If no neighbors are given, a neighbor list is built.

    Returns
    -------
    (n_atoms,) tensor, energy
        Differentiable to any order in positions, cell, sigma and epsilon.

    Raises
    ------
    ValueError, TypeError
        An invalid argument, named in the message.
    """
    potential = lennard_jones(cutoff, mixing=mixing, shifted=shifted, r_switch=r_switch)
    vars(potential)[tables.OWN] = tables.everywhere  # the potential exists for this call only
    return potential(positions, cell, sigma=sigma, epsilon=epsilon, **options)


def lj_forces(
    positions: torch.Tensor,
    sigma: float | torch.Tensor,
    epsilon: float | torch.Tensor,
    cutoff: float,
    cell: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Forces (n_atoms, 3); arguments as for `lj_energy`."""
    return lj_energy_forces(positions, sigma, epsilon, cutoff, cell, **options)[1]


def lj_energy_forces(
    positions: torch.Tensor,
    sigma: float | torch.Tensor,
    epsilon: float | torch.Tensor,
    cutoff: float,
    cell: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Energies (n_atoms,) and forces (n_atoms, 3), in one pass; arguments as for `lj_energy`."""
    return lj_energy(positions, sigma, epsilon, cutoff, cell, compute_forces=True, **options)  # type: ignore[return-value]


def lj_energy_forces_virial(
    positions: torch.Tensor,
    sigma: float | torch.Tensor,
    epsilon: float | torch.Tensor,
    cutoff: float,
    cell: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Energies, forces and virial (n_systems, 3, 3) ``-dE/dstrain``, in one pass; arguments as for `lj_energy`."""
    options |= {"compute_forces": True, "compute_virial": True}
    return lj_energy(positions, sigma, epsilon, cutoff, cell, **options)  # type: ignore[return-value]
