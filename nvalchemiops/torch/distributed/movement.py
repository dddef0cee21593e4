"""How far the atoms of a rank have moved since they were divided, beyond the strain of their cells."""

import torch

from nvalchemiops.torch.neighbors.verlet import displacements, inverse_of_periodic, strain_between, taken_by_strain


class Reference:
    """Positions (n_owned, 3) and cells (n_systems, 3, 3), these in float64, with which a domain was made.

    Its ``reach`` is the cutoff and the skin, which a strain changes.
    """

    def __init__(
        self,
        positions: torch.Tensor,
        cell: torch.Tensor | None,
        pbc: torch.Tensor,
        batch_idx: torch.Tensor | None,
        reach: float,
    ) -> None:
        self.positions, self.cell, self.pbc, self.batch_idx, self.reach = positions, cell, pbc, batch_idx, reach
        self._inverse: torch.Tensor | None = None  # of the cells, once a cell changes

    def in_units(self, length: float) -> "Reference":
        """The same in another unit, whose ``length`` is given in the present unit."""
        cell = None if self.cell is None else self.cell / length
        return Reference(self.positions / length, cell, self.pbc, self.batch_idx, self.reach / length)

    def expanded(self, cell: torch.Tensor) -> torch.Tensor:
        """A cell that a caller gives as (n_systems, 3, 3), in float64, without its graph."""
        assert self.cell is not None
        lattice, n_systems = cell.detach().double().reshape(-1, 3, 3), len(self.pbc)
        if lattice.shape[0] not in (1, n_systems):
            raise ValueError(
                f"`cell` must have shape (3, 3) or (n_systems, 3, 3) = ({n_systems}, 3, 3), got {tuple(cell.shape)}"
            )
        return lattice.expand(n_systems, 3, 3)

    def changed(self, cell: torch.Tensor | None) -> torch.Tensor | None:
        """The cells (n_systems, 3, 3), in float64, if they differ from those here. Reads them."""
        if cell is None or self.cell is None:
            return None
        lattice = self.expanded(cell)
        return None if torch.equal(lattice, self.cell.expand_as(lattice)) else lattice

    def moved(self, positions: torch.Tensor, cell: torch.Tensor | None) -> float:
        """The largest displacement of an atom of this rank, as for `Domain.displacement`; infinite if one is NaN."""
        return float(self.moved_on_device(positions, self.changed(cell)))

    def moved_on_device(self, positions: torch.Tensor, cell: torch.Tensor | None) -> torch.Tensor:
        """The same as a tensor () in float64, without a look at values."""
        if cell is None or self.cell is None:
            x, y, z = (positions.detach() - self.positions).double().square_().unbind(1)
            # a sum along rows of three takes four times as long
            return torch.cat([x + y + z, x.new_zeros(1)]).amax().sqrt_().nan_to_num_(nan=torch.inf)
        return self._strained(positions, self.expanded(cell))

    def _strained(self, positions: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
        """The largest displacement beyond the strain of cells, and of half of what the strain takes of the skin."""
        assert self.cell is not None
        before = self.cell.expand_as(now)
        if self._inverse is None:
            with torch.inference_mode(False):
                self._inverse = inverse_of_periodic(before, self.pbc)
        strain = strain_between(before, now, self.pbc, self._inverse)
        system, taken = self.batch_idx, 0.5 * taken_by_strain(strain, self.reach)
        moved = displacements(positions.detach(), self.positions, strain, system)
        by_atoms = moved + (taken if system is None else taken.index_select(0, system))
        return torch.cat([by_atoms, taken]).amax().nan_to_num(nan=torch.inf)
