"""Values of atoms on their way between the ranks that hold, own and see these atoms."""

from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
import torch

from nvalchemiops.torch import checks
from nvalchemiops.torch.distributed.agreement import Agreement
from nvalchemiops.torch.distributed.bricks import Frames
from nvalchemiops.torch.distributed.communication import add
from nvalchemiops.torch.distributed.exchange import Exchange, inverse
from nvalchemiops.torch.distributed.movement import Reference
from nvalchemiops.torch.distributed.ranks import Ranks
from nvalchemiops.torch.operators.noise import places_in_systems
from nvalchemiops.torch.systems import System, of_each_atom

if TYPE_CHECKING:
    from nvalchemiops.torch.distributed.domain import Domain

OfAtoms = TypeVar("OfAtoms", torch.Tensor, System)


class Owners(Ranks):
    """Ranks that own atoms: what `Domain` does when all of them know which."""

    n_owned: int
    n_ghosts: int
    n_systems: int
    global_index: torch.Tensor
    batch_idx: torch.Tensor | None
    cell: torch.Tensor | None
    pbc: torch.Tensor
    _axes: np.ndarray  # the same as an array
    _frames: Frames
    _reference: Reference
    _to_owners: Exchange
    _halo: Exchange
    _to_first: Exchange | None  # for `collect`
    _n_held: int
    _first_held: torch.Tensor  # the number of the first atom that each rank holds

    def distribute(self, values: OfAtoms) -> OfAtoms:
        """Bring values of atoms to the ranks that own them. A collective call, differentiable to any order.

        Parameters
        ----------
        values : (n, ...) tensor or System
            Values of the atoms that this rank holds, or these atoms as a system with the cell, the periodicity and the
            ``batch_idx`` of the domain.

        Returns
        -------
        (n_owned, ...) tensor or System
            Values of the atoms that this rank owns, or these atoms with ``domain``.
        """
        if isinstance(values, System):
            self._check_held(values)
            own = of_each_atom(values, self.distribute)
            return own._replace(batch_idx=None, pbc=None, domain=cast("Domain", self))
        return self._carried(self._to_owners.apply, values, self._n_held)

    def _check_held(self, atoms: System) -> None:
        """Raise unless these atoms, which this rank holds, are in the systems of the domain. A collective call."""
        numbers = self._batch_idx_held()
        with Agreement(self.group, self.device):
            if atoms.domain is not None:
                raise ValueError("`values`: the system has a `domain` already")
            if (atoms.cell is None) != (self.cell is None):
                raise ValueError("`cell` of the system must be that of the `domain`")
            if atoms.cell is not None:
                pbc = checks.pbc_tensor(True if atoms.pbc is None else atoms.pbc, self.device)
                if self._reference.changed(atoms.cell) is not None or not torch.equal(
                    pbc.expand_as(self.pbc), self.pbc
                ):
                    raise ValueError("`cell` and `pbc` of the system must be those of the `domain`")
            given = atoms.batch_idx
            if given is not None and (numbers is None or not torch.equal(given.to(numbers.dtype), numbers)):
                raise ValueError("`batch_idx` of the system must be that of the `domain`")
            if given is None and numbers is not None and self._n_held:
                raise ValueError("`batch_idx` of the system is missing: the `domain` has one")

    def gather(self, values: OfAtoms) -> OfAtoms:
        """Bring values of atoms back to the ranks that hold them. A collective call, differentiable to any order.

        Parameters
        ----------
        values : (n_owned, ...) tensor or System
            Values of the atoms that this rank owns, or these atoms.

        Returns
        -------
        (n, ...) tensor or System
            Values of the atoms that this rank holds, in the order in which it holds them, or these atoms without
            ``domain``.
        """
        if isinstance(values, System):
            held = of_each_atom(values, self.gather)
            return held._replace(batch_idx=self._batch_idx_held(), pbc=self._pbc_of(values), domain=None)
        return self._carried(self._to_holders, values, self.n_owned)

    def _to_holders(self, values: torch.Tensor) -> torch.Tensor:
        return self._to_owners.transpose(values, self._n_held)

    def collect(self, values: OfAtoms) -> OfAtoms:
        """Bring values of all atoms to the first rank, in the order of their numbers. A collective call.

        Parameters
        ----------
        values : (n_owned, ...) tensor or System
            Values of the atoms that this rank owns, or these atoms.

        Returns
        -------
        (n_atoms, ...) tensor or System
            Values of all atoms, or these without ``domain``, on the first rank; of no atoms on the others.
        """
        if isinstance(values, System):
            whole = of_each_atom(values, self.collect)
            batch_idx = None if self.batch_idx is None else self.collect(self.batch_idx)
            return whole._replace(batch_idx=batch_idx, pbc=self._pbc_of(values), domain=None)
        if self._to_first is None:
            with torch.inference_mode(False):
                here = torch.arange(self.n_owned, device=self.device)
                counts = here.new_zeros(self.n_ranks)
                counts[0] = self.n_owned
                rows = Exchange.plan(self.group, here, counts)
                self._to_first = rows.in_order(torch.argsort(rows.apply(self.global_index)))
        return self._carried(self._to_first.apply, values, self.n_owned)

    def _pbc_of(self, atoms: System) -> torch.Tensor | None:
        """The periodicity of atoms without a domain; (3,) beside one cell, if it is that of all systems."""
        if atoms.cell is None:
            return None
        of_systems = self._axes
        is_one = atoms.cell.ndim == 2 and len(of_systems) > 0 and bool((of_systems == of_systems[:1]).all())
        return self.pbc[0] if is_one else self.pbc

    def _batch_idx_held(self) -> torch.Tensor | None:
        """System (n,) of each atom that this rank holds. A collective call."""
        return None if self.batch_idx is None else self._to_holders(self.batch_idx)

    def _places_in_systems(self) -> torch.Tensor:
        """Number (n_owned,) int32 of each owned atom among all atoms of its system. A collective call."""
        held = self._batch_idx_held()
        if held is None:
            return self.global_index.int()
        counts = torch.zeros(self.n_ranks, self.n_systems, dtype=torch.int64, device=self.device)
        counts[self.rank] = torch.bincount(held.long(), minlength=self.n_systems)
        before = add(counts, self.group)[: self.rank].sum(0)
        return self._to_owners.apply(places_in_systems(held, self.n_systems) + before[held.long()].int())

    def with_ghosts(self, values: torch.Tensor) -> torch.Tensor:
        """Append values of ghosts. A collective call, differentiable to any order: gradients go to the owners.

        Parameters
        ----------
        values : (n_owned, ...) tensor
            Values of owned atoms.

        Returns
        -------
        (n_owned + n_ghosts, ...) tensor
            Values of owned atoms, then of ghosts.
        """
        return self._carried(self._with_ghosts, values, self.n_owned)

    def _with_ghosts(self, values: torch.Tensor) -> torch.Tensor:
        return torch.cat([values, self._halo.apply(values)])

    def add_ghosts(self, values: torch.Tensor) -> torch.Tensor:
        """Add the values of ghosts to their owners: the transpose of `with_ghosts`. A collective call.

        Parameters
        ----------
        values : (n_owned + n_ghosts, ...) tensor
            Values of owned atoms, then of ghosts.

        Returns
        -------
        (n_owned, ...) tensor
            Values of owned atoms, summed over the shares of all ranks.
        """

        def add(values: torch.Tensor) -> torch.Tensor:
            owned, ghosts = values.split([self.n_owned, self.n_ghosts])
            return owned + self._halo.transpose(ghosts, self.n_owned)

        return self._carried(add, values, self.n_owned + self.n_ghosts)

    def _from_holders(self) -> Exchange:
        """The exchange that brings values from the ranks that hold the atoms to the owners, found by atom numbers."""
        holder = torch.searchsorted(self._first_held, self.global_index, right=True) - 1
        to_holders = Exchange.to_ranks(self.group, holder, self.n_ranks)
        rows = to_holders.apply(self.global_index) - self._first_held[self.rank]
        return to_holders.back(rows).in_order(inverse(to_holders.rows))
