"""What the parts of an Ewald sum have in common: results by atom and system, and how they are put together."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from nvalchemiops.torch import checks
from nvalchemiops.torch.operators.lattice import Lattice
from nvalchemiops.torch.operators.segments import system_sums


class WantedParts(NamedTuple):
    """What a call returns beside the energies."""

    forces: bool = False
    charge_gradients: bool = False
    virial: bool = False


def asked_for(compute_forces: Any, compute_charge_gradients: Any, compute_virial: Any) -> WantedParts:
    """What these arguments of a public function ask for; raise unless they are flags."""
    return WantedParts(
        checks.check_flag("compute_forces", compute_forces),
        checks.check_flag("compute_charge_gradients", compute_charge_gradients),
        checks.check_flag("compute_virial", compute_virial),
    )


class Parts(NamedTuple):
    """Energies (n_atoms, n_channels), and what was asked for.

    Attributes
    ----------
    energies, charge_gradients : (n_atoms, n_channels) tensor
    forces : (n_atoms, 3) tensor
    virial : (n_systems, 3, 3) tensor
    """

    energies: torch.Tensor
    forces: torch.Tensor | None = None
    charge_gradients: torch.Tensor | None = None
    virial: torch.Tensor | None = None


def at_atoms(gathered: torch.Tensor, charges: torch.Tensor, lattice: Lattice, wanted: WantedParts) -> Parts:
    """Results for charges (n_atoms, n_channels) in a potential that is linear in them, but for the virial.

    ``gathered`` (n_atoms, n_channels, 1 or 4) holds the potential and its derivatives by the coordinates that the frame
    of the lattice makes.
    """
    potential = gathered[..., 0]
    energies = 0.5 * charges * potential
    forces = None
    if wanted.forces:
        slopes = charges.unsqueeze(-1) * gathered[..., 1:4]
        forces = -lattice.cartesian(slopes.sum(1) if charges.shape[1] > 1 else slopes.squeeze(1))
    return Parts(energies, forces, potential if wanted.charge_gradients else None)


def together(
    parts: Sequence[Parts],
    like: torch.Tensor,
    has_channels: bool,
    energy_reduction: str,
    batch_idx: torch.Tensor | None,
    n_systems: int,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """The sums of all parts in the dtype of ``like``: energies, then what is there of forces, dE/dq and virial."""
    results = []
    for name, values in zip(Parts._fields, zip(*parts)):
        if values[0] is None:
            continue
        total = values[0]
        for value in values[1:]:
            total = total + value
        if name in ("energies", "charge_gradients") and not has_channels:
            total = total.squeeze(1)
        if name == "energies" and energy_reduction == "system":
            total = system_sums(total, batch_idx, n_systems)
        results.append(total.to(like.dtype))
    return results[0] if len(results) == 1 else tuple(results)
