"""Systems of charges as the parts of an Ewald sum want them."""

from typing import Any, NamedTuple

import torch

from nvalchemiops.torch import checks
from nvalchemiops.torch.interactions.electrostatics.potentials import LongRangePotential
from nvalchemiops.torch.interactions.electrostatics.wave_vectors import per_system
from nvalchemiops.torch.operators.lattice import check_cells, nan_if_singular, one_or_nan
from nvalchemiops.torch.runtime.context import may_read, on_host


class ChargedSystem(NamedTuple):
    """One or several periodic systems.

    Attributes
    ----------
    positions : (n_atoms, 3) tensor
    charges : (n_atoms, n_channels) tensor
    has_channels : bool
        Whether the caller gave channels; otherwise there is one.
    cell : (n_systems, 3, 3) tensor
    batch_idx : (n_atoms,) int32 tensor or None
        None for one system.
    """

    positions: torch.Tensor
    charges: torch.Tensor
    has_channels: bool
    cell: torch.Tensor
    batch_idx: torch.Tensor | None

    @property
    def n_systems(self) -> int:
        """How many systems there are."""
        return self.cell.shape[0]

    @property
    def n_atoms(self) -> int:
        """How many atoms there are in all."""
        return self.positions.shape[0]

    def at_fixed_geometry(self) -> "ChargedSystem":
        """The same without gradients by positions and cell."""
        return self._replace(positions=self.positions.detach(), cell=self.cell.detach())


def check_charges(charges: Any, positions: torch.Tensor, channels: bool = False) -> None:
    """Raise unless there is one charge for each atom (or several), of the dtype and on the device of the positions."""
    checks.check_tensor("charges", charges)
    # nothing is formatted unless it is needed: that would fix the number of atoms in a compiled graph
    fits = charges.ndim in (1, 1 + channels) and charges.shape[0] == positions.shape[0]
    if not fits or (charges.ndim == 2 and charges.shape[1] == 0):
        expected = f"(n_atoms,) = ({positions.shape[0]},)" + " or (n_atoms, n_channels)" * channels
        raise ValueError(f"`charges` must have shape {expected}, got {tuple(charges.shape)}")
    checks.check_real("charges", charges, positions)


def check_system(positions: Any, charges: Any, cell: Any, batch_idx: Any, energy_reduction: str) -> ChargedSystem:
    """The system; raise unless its parts fit together. Values are read on a CPU only, and not while compiling."""
    checks.check_choice("energy_reduction", energy_reduction, ("atom", "system"))
    checks.check_positions(positions, finite=False)
    check_charges(charges, positions, channels=True)
    if cell is None:
        raise ValueError(
            "`cell` is required: an Ewald sum is for periodic systems; without periodicity use coulomb_energy"
        )
    cell = checks.check_lattice(cell, positions).reshape(-1, 3, 3)
    if cell.shape[0] == 0:
        raise ValueError("`cell` holds no system: it must have shape (3, 3) or (n_systems, 3, 3)")
    check_cells(cell)
    cell = nan_if_singular(cell)
    batch_idx, _ = checks.check_batch(batch_idx, positions, cell.shape[0])
    several = charges.ndim == 2
    return ChargedSystem(positions, charges if several else charges.unsqueeze(1), several, cell, batch_idx)


def periodic_axes(pbc: Any, system: ChargedSystem, slab_correction: bool) -> torch.Tensor | None:
    """Periodicity (n_systems, 3) for the slab correction, or None; raise if the sum would be wrong.

    What cannot be read is answered by NaN in `refuse_open_axes`.
    """
    checks.check_flag("slab_correction", slab_correction)
    if pbc is None:
        if slab_correction:
            raise ValueError("`pbc` is needed with `slab_correction`: it says which axis is open")
        return None
    if isinstance(pbc, bool):
        pbc = [pbc] * 3
    pbc = checks.pbc_tensor(pbc, system.positions.device)
    if pbc.device != system.positions.device:
        raise ValueError(f"`pbc` is on {pbc.device}, but `positions` is on {system.positions.device}")
    if tuple(pbc.shape) not in ((3,), (1, 3), (system.n_systems, 3)):
        raise ValueError(f"`pbc` must have shape (3,) or ({system.n_systems}, 3), got {tuple(pbc.shape)}")
    pbc = pbc.reshape(-1, 3).expand(system.n_systems, 3)
    if may_read(pbc):
        n_open = 3 - on_host(pbc).sum(axis=1)
        if not slab_correction and n_open.any():
            raise ValueError(
                "`pbc` has open axes, but this sum is periodic along all three: give slab_correction=True for a system "
                "with one open axis, or use coulomb_energy or dsf_coulomb with a cutoff"
            )
        if (n_open > 1).any():
            raise ValueError("`pbc`: the slab correction is for at most one open axis")
    return pbc


def refuse_open_axes(alpha: torch.Tensor, pbc: torch.Tensor | None, slab_correction: bool) -> torch.Tensor:
    """NaN for alpha where `periodic_axes` would have raised, had it read the values."""
    if pbc is None or may_read(pbc):
        return alpha
    return torch.where((~pbc).sum(1) <= int(slab_correction), alpha, torch.nan)


def given_alpha(alpha: Any, system: ChargedSystem) -> torch.Tensor:
    """Alpha (n_systems,) in float64, as the dtype of the positions has it."""
    if alpha is None:
        raise ValueError("`alpha` is needed")
    found = per_system("alpha", alpha, system.n_systems, system.positions.device)
    if isinstance(alpha, torch.Tensor) and not may_read(alpha):
        found = found * one_or_nan((found > 0.0) & (found * 0.0 == 0.0))  # infinity times zero is NaN
    return _rounded(found, system.positions)


def check_parameters(potential: Any, estimated: Any, **parameters: Any) -> None:
    """Raise if this is no potential, or one for which there are no error models and that lacks parameters."""
    check_potential(potential)
    for name, value in parameters.items():
        if potential is not estimated and value is None:
            raise ValueError(f"`{name}` is needed: parameters are estimated for the Coulomb potential only")


def check_potential(potential: Any) -> None:
    """Raise unless this is a potential that an Ewald sum can split."""
    if not isinstance(potential, LongRangePotential):
        raise TypeError(f"`potential` must be a LongRangePotential, got {type(potential).__name__}")


def _rounded(alpha: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Alpha as both parts of the sum can have it."""
    return alpha.to(like.dtype).to(torch.float64)
