"""Systems of charges with their exclusions, checked and prepared once for all terms of an Ewald sum."""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nvalchemiops.torch import checks
from nvalchemiops.torch.interactions.electrostatics.k_vectors import per_system
from nvalchemiops.torch.interactions.electrostatics.sources import check_sources
from nvalchemiops.torch.interactions.pair import shares
from nvalchemiops.torch.interactions.pair.exclusions import ExclusionRows, exclusion_rows
from nvalchemiops.torch.neighbors.rows import GivenNeighbors, Rows, build_rows, rows_of
from nvalchemiops.torch.operators.lattice import Lattice, check_cells, lattice_of, nan_if_singular, one_or_nan
from nvalchemiops.torch.operators.segments import system_sums, totals
from nvalchemiops.torch.runtime.context import ValuesNeededError, may_read, on_host
from nvalchemiops.torch.systems import System

if TYPE_CHECKING:
    from nvalchemiops.torch.distributed.domain import Domain


class ChargedSystem(NamedTuple):
    """One or several periodic systems, checked."""

    positions: torch.Tensor
    # (n_atoms, n_channels, 1, 4 or 10), all sources, `nvalchemiops.torch.interactions.electrostatics.sources`: charges
    # are moments of order zero
    moments: torch.Tensor
    has_channels: bool  # whether the caller gave channels; otherwise there is one
    cell: torch.Tensor  # (n_systems, 3, 3)
    batch_idx: torch.Tensor | None  # (n_atoms,) int32; None for one system
    exclusions: ExclusionRows | None = None  # pairs that do not interact, or interact with a factor
    slab_axes: torch.Tensor | None = None  # (n_systems, 3), True for periodic axes; None without the slab correction
    # (n_systems,), if values could not be read: False for systems that are not periodic as the sum requires
    valid: torch.Tensor | None = None
    # the atoms are those that this rank owns, and results of systems are the shares of this rank
    domain: "Domain | None" = None
    widths: torch.Tensor | None = None  # (n_atoms,), standard deviations of Gaussians; None for points
    of_points: bool = False  # point charges, which any potential supports; moments need the Coulomb potential

    @property
    def charges(self) -> torch.Tensor:
        """The charges (n_atoms, n_channels)."""
        return self.moments[..., 0]

    @property
    def n_systems(self) -> int:
        """Number of systems."""
        return self.cell.shape[0]

    @property
    def n_atoms(self) -> int:
        """Total number of atoms."""
        return self.positions.shape[0]

    def along(self, basis: torch.Tensor | None) -> "ChargedSystem":
        """The system with other vectors of the same lattices, in float64: the cells ``basis @ cell``.

        ``basis`` (n_systems, 3, 3) holds whole numbers, with determinants of one or minus one; None for the same cells.
        """
        return self if basis is None else self._replace(cell=basis @ self.cell.to(torch.float64))

    def lattice(self) -> Lattice:
        """The lattice of the cells, differentiable, with a frame for each atom."""
        return lattice_of(self.cell, self.batch_idx, self.n_atoms)

    def atoms_in_systems(self) -> torch.Tensor:
        """Number of atoms of each system (n_systems,), in float64, without reading anything."""
        if self.domain is not None:
            return self.domain.atoms_in_systems
        ones = torch.ones(self.n_atoms, dtype=torch.float64, device=self.positions.device)
        return system_sums(ones, self.batch_idx, self.n_systems)

    def of_atoms(self, values: torch.Tensor, atoms: torch.Tensor) -> torch.Tensor:
        """Values (n, ...) of the systems of these atoms (n,), which may be ghosts, from those of all systems."""
        batch_idx = self.batch_idx if self.domain is None else self.domain.batch_idx_with_ghosts
        if batch_idx is None:
            return values.expand(atoms.shape[0], *values.shape[1:])
        return values.index_select(0, batch_idx.index_select(0, atoms))

    def excluding(self, rows: ExclusionRows | None) -> "ChargedSystem":
        """The system with these exclusions, which then say where its slabs are open."""
        if rows is not None and self.slab_axes is not None:
            rows = rows.with_open_axes(self.of_atoms(self.slab_axes, rows.first))
        return self._replace(exclusions=rows)

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Sums (n_systems, ...) of values (n_atoms, ...) over all atoms of each system, in a fixed order."""
        found = system_sums(values, self.batch_idx, self.n_systems)
        return shares.summed_for_shares(self.domain, found)

    def totals(self, values: torch.Tensor) -> torch.Tensor:
        """`sums` at less cost for one system, for which torch chooses the order of the summation."""
        return shares.summed_for_shares(self.domain, totals(values, self.batch_idx, self.n_systems))

    def rows_within(self, cutoff: float) -> Rows:
        """All neighbors closer than ``cutoff``; with a domain, the neighbors that it found with its arguments."""
        if self.domain is not None:
            return self.domain._found_rows(cutoff).alone
        return build_rows(self.positions, cutoff, self.cell, self.batch_idx)

    def given_rows(
        self, cutoff: float | None, neighbors: GivenNeighbors, alpha: Any
    ) -> tuple[Rows | None, float | None, Any]:
        """Neighbors (None if not given), the cutoff, and alpha. With a domain these are from `rows_of_domain`."""
        if self.domain is None:
            return rows_of(neighbors, self.positions, periodic=True), cutoff, alpha
        return shares.rows_of_domain(self.domain, self.positions, self.cell, cutoff, neighbors, alpha)


def check_charges(charges: Any, positions: torch.Tensor, channels: bool = False) -> torch.Tensor:
    """Charges in the dtype of the positions; raises unless there is one (or several) for each atom, on their device."""
    checks.check_tensor("charges", charges)
    # formatted only for an error: it would fix the number of atoms in a compiled graph
    fits = charges.ndim in (1, 1 + channels) and charges.shape[0] == positions.shape[0]
    if not fits or (charges.ndim == 2 and charges.shape[1] == 0):
        expected = f"(n_atoms,) = ({positions.shape[0]},)" + " or (n_atoms, n_channels)" * channels
        raise ValueError(f"`charges` must have shape {expected}, got {tuple(charges.shape)}")
    return checks.as_float_tensor("charges", charges, positions)


def check_system(
    atoms: System,
    exclusions: Any = None,
    exclusion_factors: Any = None,
    slab_correction: Any = False,
    of_coulomb: bool = True,
) -> ChargedSystem:
    """The system; raise unless its parts fit together. Values are read on a CPU only, and not while compiling.

    ``of_coulomb``: the sum is of the Coulomb potential, the only one with a slab correction.
    """
    domain = atoms.domain
    if domain is not None:
        with shares.together(domain):
            domain._check(atoms)
            atoms = atoms._replace(widths=shares.of_all_atoms(domain, atoms.widths))
            system = check_system(domain._alone(atoms), slab_correction=slab_correction, of_coulomb=of_coulomb)
            excluded = exclusions, exclusion_factors
            rows = shares.exclusions_of_share(domain, *excluded, atoms.positions, at_any_distance=True)
        return system._replace(cell=shares.replicated(domain, system.cell), domain=domain).excluding(rows)
    positions: Any = atoms.positions
    checks.check_positions(positions, finite=False)
    charges = check_charges(atoms.charges, positions, channels=True)
    cell = check_periodic_cells(atoms.cell, positions, atoms.pbc)
    # before the values of the cell: a system with open axes may have vectors of zeros
    slab_axes, valid = _check_periodicity(atoms.pbc, positions, cell.shape[0], slab_correction, of_coulomb)
    check_cells(cell)
    cell = nan_if_singular(cell)
    batch_idx, _ = checks.check_batch(atoms.batch_idx, positions, cell.shape[0])
    rows = exclusion_rows(exclusions, exclusion_factors, positions, batch_idx)
    moments, widths = check_sources(charges, atoms.dipoles, atoms.quadrupoles, atoms.widths, positions)
    system = ChargedSystem(positions, moments, charges.ndim == 2, cell, batch_idx)
    of_points = widths is None and moments.shape[-1] == 1
    system = system._replace(slab_axes=slab_axes, valid=valid, widths=widths, of_points=of_points)
    return system.excluding(rows)


def check_periodic_cells(cell: Any, positions: torch.Tensor, pbc: Any = None) -> torch.Tensor:
    """The cells (n_systems, 3, 3); raise if there are none, or if dtype or device differ from the positions."""
    if cell is None:
        unread = pbc is not None and pbc is not True and not may_read(positions)  # perhaps no axis is periodic
        raise (ValuesNeededError if unread else ValueError)(
            "`cell` is required: an Ewald sum is for periodic systems; for systems that are not periodic give "
            "pbc=False, which sums over all pairs, or use coulomb_energy"
            + "; values cannot be read in exported programs, in compiled graphs on a GPU, or if `vmap` maps over `pbc` "
            "or `batch_idx`; in other compiled graphs virials and energies of several molecules also need cells, whose "
            "values do not matter: they say how many systems there are" * (pbc is not None)
        )
    cell = checks.check_lattice(cell, positions)
    cell = cell if cell.ndim == 3 else cell.unsqueeze(0)
    if cell.shape[0] == 0 < positions.shape[0]:
        raise ValueError("`cell` holds no system, but there are atoms: it must have shape (3, 3) or (n_systems, 3, 3)")
    return cell


def _check_periodicity(
    pbc: Any, positions: torch.Tensor, n_systems: int, slab_correction: Any, of_coulomb: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """``slab_axes`` and ``valid`` of `ChargedSystem`; raise if the sum would be wrong."""
    with_slab = checks.check_flag("slab_correction", slab_correction)
    if pbc is None:
        if with_slab:
            raise ValueError("`pbc` is needed with `slab_correction`: it says which axis is open")
        return None, None
    pbc = checks.pbc_tensor(pbc, positions.device)
    if not pbc.ndim:
        pbc = pbc.expand(3)
    if not checks.has_shape(pbc, (3,), (1, 3), (n_systems, 3)):
        raise ValueError(f"`pbc` must have shape (3,) or ({n_systems}, 3), got {tuple(pbc.shape)}")
    pbc = pbc.reshape(-1, 3).expand(n_systems, 3)
    slab_axes = pbc if with_slab else None
    if not may_read(pbc):
        return slab_axes, (~pbc).sum(1) <= int(with_slab)
    n_open = 3 - on_host(pbc).sum(axis=1)
    if n_open.any() and not of_coulomb:
        raise ValueError(
            "`pbc` has open axes, but this sum is periodic along all three: `slab_correction` is for the Coulomb "
            "potential; with another `potential` leave it and `pbc` out, and leave vacuum in the cell"
        )
    if not with_slab and n_open.any():
        raise ValueError(
            "`pbc` has open axes, but this sum is periodic along all three: give slab_correction=True for a system "
            "with one open axis, or use coulomb_energy or dsf_coulomb with a cutoff"
            + "; if three axes are open, there can be no `domain`, and `vmap` cannot map over `batch_idx`"
            * bool((n_open == 3).any())
        )
    if (n_open > 1).any():
        raise ValueError("`pbc`: the slab correction is for at most one open axis")
    return slab_axes, None


def nan_unless(valid: torch.Tensor | None, alpha: torch.Tensor) -> torch.Tensor:
    """Alpha (n_systems,), NaN for invalid systems whose values could not be read and so did not raise."""
    return alpha if valid is None else torch.where(valid, alpha, torch.nan)


def given_alpha(alpha: Any, system: ChargedSystem) -> torch.Tensor:
    """Alpha (n_systems,) in float64, rounded to the dtype of the positions."""
    if alpha is None:
        raise ValueError("`alpha` is needed")
    found = per_system("alpha", alpha, system.n_systems, system.positions.device)
    if isinstance(alpha, torch.Tensor) and not may_read(alpha):
        found = found * one_or_nan((found > 0.0) & (found * 0.0 == 0.0))  # infinity times zero is NaN
    # rounded, so that both parts of the sum have the same alpha
    return found.to(system.positions.dtype).to(torch.float64)
