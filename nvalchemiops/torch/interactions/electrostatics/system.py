"""Systems of charges as the parts of an Ewald sum want them, and the choice of what the caller left open."""

from typing import Any, NamedTuple

import numpy as np
import torch

from nvalchemiops.interactions.electrostatics import parameters as core
from nvalchemiops.torch.interactions.electrostatics.imbalance import force_of_rows, near_enough
from nvalchemiops.torch.interactions.electrostatics.long_range import LongRangePotential
from nvalchemiops.torch.interactions.electrostatics.parameters import sizes_of
from nvalchemiops.torch.interactions.electrostatics.wave_vectors import per_system
from nvalchemiops.torch.interactions.pair.potential import PairSystem
from nvalchemiops.torch.lattice import check_cells
from nvalchemiops.torch.neighbors import checks
from nvalchemiops.torch.neighbors.rows import Rows, build_rows, inspect_rows
from nvalchemiops.torch.segments import system_sums


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
    checks.check_lattice(cell, positions)
    cell = cell.reshape(-1, 3, 3)
    if cell.shape[0] == 0:
        raise ValueError("`cell` holds no system: it must have shape (3, 3) or (n_systems, 3, 3)")
    check_cells(cell)
    batch_idx = checks.batch_of(batch_idx, positions, cell.shape[0])
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
    if not checks.unread(pbc):
        n_open = 3 - checks.on_host(pbc).sum(axis=1)
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
    if pbc is None or not checks.unread(pbc):
        return alpha
    return torch.where((~pbc).sum(1) <= int(slab_correction), alpha, torch.nan)


def given_alpha(alpha: Any, system: ChargedSystem) -> torch.Tensor:
    """Alpha (n_systems,) in float64, as the dtype of the positions has it."""
    if alpha is None:
        raise ValueError("`alpha` is needed")
    return _rounded(per_system("alpha", alpha, system.n_systems, system.positions.device), system.positions)


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


class Splitting(NamedTuple):
    """How a sum is divided.

    Attributes
    ----------
    alpha : (n_systems,) tensor in float64
    rows : Rows
        Neighbors, which are built if there were none.
    target : Target
        What the smooth part has to meet, in numbers of numpy, or of torch while compiling.
    """

    alpha: torch.Tensor
    rows: Rows
    target: core.Target


class Wish(NamedTuple):
    """What the caller says about the division of a sum, or leaves open.

    Attributes
    ----------
    alpha : float, tensor or None
    cutoff : float or None
        Reach of the list.
    rows : Rows or None
        The list.
    accuracy : float
    typical_forces : bool
        Whether they must not be guessed from the positions.
    """

    alpha: Any
    cutoff: float | None
    rows: Rows | None
    accuracy: float
    typical_forces: bool


def split(system: ChargedSystem, wish: Wish, best: Any) -> Splitting:
    """Alpha, and neighbors to match.

    ``best(n_atoms, volume, target, xp)`` is the alpha that costs least, by numpy or torch. With alpha given it is used.
    Otherwise a list that reaches as far as would be best gets the alpha that meets the accuracy there; a shorter one
    that for which the accuracy is met at its own reach.
    """
    compiling = torch.compiler.is_compiling()
    if wish.alpha is None:
        if compiling and wish.cutoff is None:
            raise ValueError(
                "`alpha` or `cutoff` is needed inside torch.compile, where the neighbor list cannot be measured"
            )
        return (_split_unread if compiling else _split_read)(system, wish, best)
    chosen, target, cutoff = given_alpha(wish.alpha, system), core.Target(wish.accuracy), wish.cutoff
    if wish.rows is not None:
        return Splitting(chosen, wish.rows, target)
    if cutoff is None:
        if compiling:
            raise ValueError("`cutoff` is needed inside torch.compile to build neighbors, or give a list")
        spacing = sizes_of(system.cell, system.batch_idx, system.n_atoms).spacing
        cutoff = float(core.real_cutoff(checks.on_host(chosen.detach()), spacing, target).max(initial=0.0))
    return Splitting(chosen, build_rows(system.positions, cutoff, system.cell, system.batch_idx), target)


def _split_read(system: ChargedSystem, wish: Wish, best: Any) -> Splitting:
    """The choice for what can be read on the host."""
    sizes, device = sizes_of(system.cell, system.batch_idx, system.n_atoms), system.positions.device
    typical, rows = core.Target(wish.accuracy), wish.rows
    r_c = core.real_cutoff(best(sizes.n_atoms, sizes.volume, typical, np), sizes.spacing, typical)
    reach: Any = wish.cutoff
    if reach is None:
        reach = r_c if rows is None else _reach(rows, system)
    if rows is None:
        rows = build_rows(system.positions, float(np.max(reach, initial=0.0)), system.cell, system.batch_idx)
    reach = np.minimum(reach, r_c)
    force: Any = typical.force
    if not (wish.typical_forces or checks.is_mapped(system.positions)):  # slices of vmap have no values to look at
        near = torch.as_tensor(near_enough(reach, sizes.spacing), device=device)
        force = checks.on_host(_force(system, rows, near))
    target = typical._replace(force=force)
    alpha = torch.as_tensor(core.alpha_for_cutoff(reach, sizes.spacing, target), device=device)
    return Splitting(given_alpha(alpha, system), rows, target)


def _split_unread(system: ChargedSystem, wish: Wish, best: Any) -> Splitting:
    """The same for a known cutoff, without reading anything."""
    count, volume = _count_and_volume(system)
    spacing, typical, rows = core.average_distance(count, volume), core.Target(wish.accuracy), wish.rows
    if rows is None:
        assert wish.cutoff is not None
        rows = build_rows(system.positions, wish.cutoff, system.cell, system.batch_idx)
    r_c = core.real_cutoff(best(count, volume, typical, torch), spacing, typical, torch)
    reach = r_c.clamp_max(wish.cutoff)
    target = typical
    if not wish.typical_forces:
        target = typical._replace(force=_force(system, rows, near_enough(reach, spacing, torch)))
    return Splitting(given_alpha(core.alpha_for_cutoff(reach, spacing, target, torch), system), rows, target)


def _force(system: ChargedSystem, rows: Rows, near: torch.Tensor) -> torch.Tensor:
    pairs = PairSystem(system.positions, system.cell, system.batch_idx, system.n_systems, rows)
    return force_of_rows(pairs, near)


def spacing_of(system: ChargedSystem) -> torch.Tensor:
    """Average distance (V/N)^(1/3) of each system, without reading anything."""
    return core.average_distance(*_count_and_volume(system))


def _count_and_volume(system: ChargedSystem) -> tuple[torch.Tensor, torch.Tensor]:
    volume = torch.linalg.det(system.cell.detach().to(torch.float64)).abs()
    ones = torch.ones(system.n_atoms, dtype=torch.float64, device=volume.device)
    return system_sums(ones, system.batch_idx, system.n_systems), volume


def _rounded(alpha: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Alpha as both parts of the sum can have it."""
    return alpha.to(like.dtype).to(torch.float64)


def _reach(rows: Rows, system: ChargedSystem) -> np.ndarray:
    """Largest distance in the list, for each system; infinite where there is no atom."""
    batch_idx = system.batch_idx
    if batch_idx is None:
        batch_idx = torch.zeros(system.n_atoms, dtype=torch.int32, device=system.positions.device)
    farthest = inspect_rows(rows, system.positions, system.cell, batch_idx)
    reach = np.zeros(system.n_systems)
    number = checks.on_host(batch_idx)
    np.maximum.at(reach, number, checks.on_host(farthest))
    empty = np.bincount(number, minlength=system.n_systems) == 0
    if ((reach == 0.0) & ~empty).any():
        raise ValueError(
            "`cutoff` or `alpha` is needed: the neighbor list of a system holds no pair, so its reach is unknown"
        )
    return np.where(empty, np.inf, reach)
