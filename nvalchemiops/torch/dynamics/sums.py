"""Sums over the atoms of each system, and values of systems for each atom, also where atoms are divided among ranks.

All that dynamics knows of a system comes from these sums. They have the same bits on all ranks, so that each rank
computes the same chains, strain rates and cells from them, and none need to be sent.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch

from nvalchemiops.torch import checks
from nvalchemiops.torch.operators.noise import places_in_systems
from nvalchemiops.torch.operators.segments import spread_systems, system_sums
from nvalchemiops.torch.runtime.context import ValuesNeededError

if TYPE_CHECKING:
    from nvalchemiops.torch.distributed.domain import Domain


class Division(NamedTuple):
    """Which atoms belong to which system, and which of them are on this rank."""

    batch_idx: torch.Tensor | None  # (n_atoms,) int32: system of each atom; None for one system
    n_systems: int
    domain: "Domain | None" = None  # of which the atoms are those that this rank owns

    @classmethod
    def of(
        cls,
        masses: torch.Tensor,
        batch_idx: torch.Tensor | None,
        n_systems: int | None,
        domain: "Domain | None" = None,
    ) -> "Division":
        """The division with the number of systems, which is read from ``batch_idx`` if it is not known otherwise.

        Raises unless ``batch_idx`` fits to this number, and to the atoms with these masses.
        """
        if domain is not None:
            if batch_idx is not None or n_systems not in (None, domain.n_systems):
                raise ValueError("`batch_idx` and `num_systems` belong to the `domain`: leave them out")
            return cls(domain.batch_idx, domain.n_systems, domain)
        checks.check_tensor("masses", masses)
        if n_systems is not None:
            n_systems = checks.check_count("num_systems", n_systems)
        batch_idx, found = checks.check_batch(batch_idx, masses, n_systems, wait=n_systems is None)
        if found is None:
            raise ValuesNeededError("`num_systems` is needed where `batch_idx` cannot be read")
        return cls(batch_idx, found)

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Sums (n_systems, ...) of values (n_atoms, ...) over all atoms of each system. On ranks a collective call."""
        found = system_sums(values, self.batch_idx, self.n_systems)
        return found if self.domain is None else self.domain._sum(found)

    def of_atoms(self, values: torch.Tensor, n_atoms: int) -> torch.Tensor:
        """For each atom the value of its system (n_systems, ...); one row, which broadcasts, for one system.

        On ranks gradients of the values are summed over all atoms in the backward pass.
        """
        if values.requires_grad and self.domain is not None:
            values = self.domain.replicated(values)
        if self.batch_idx is None:
            return values
        if values.requires_grad:
            return spread_systems(values, self.batch_idx, n_atoms)
        return values.index_select(0, self.batch_idx)

    def places(self) -> torch.Tensor | None:
        """Number (n_atoms,) int32 of each atom in its system, the same for any number of ranks.

        None if it is the number of the row.
        """
        if self.domain is not None:
            return self.domain._places_in_systems()
        return None if self.batch_idx is None else places_in_systems(self.batch_idx, self.n_systems)
