"""Pairs of atoms that last, such as exclusions, on the ranks that own the atoms.

A pair is kept on the rank of each of its two atoms, as the sums over pairs need it. Owners are found through the ranks
that held the atoms in the beginning: everyone knows these, and each of them knows who owns the atoms that it held.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nvalchemiops.torch import checks
from nvalchemiops.torch.distributed.agreement import Agreement, kind_of
from nvalchemiops.torch.distributed.communication import messages_of
from nvalchemiops.torch.distributed.exchange import Exchange
from nvalchemiops.torch.runtime._torch_internals import outside_of_transforms
from nvalchemiops.torch.runtime.acts import unrecorded

if TYPE_CHECKING:
    from nvalchemiops.torch.distributed.domain import Domain


@dataclass(frozen=True, eq=False)
class OwnedPairs:
    """Pairs with an atom that this rank owns, from `Domain.distribute_pairs`. They belong to one domain.

    Attributes
    ----------
    pairs : (2, n) int64 tensor
        Numbers of the atoms in the whole system, each pair once.
    factors : (n,) float64 tensor or None
        Values of the pairs.
    local : (2, n_near) int64 tensor
        The pairs whose two atoms this rank sees, as indices among its owned atoms and ghosts.
    near : (n_near,) int64 tensor
        Their places among ``pairs``.
    call : int
        The call in which they were distributed, the same on all ranks.
    """

    pairs: torch.Tensor
    factors: torch.Tensor | None
    local: torch.Tensor
    near: torch.Tensor
    call: int
    _numbers: torch.Tensor
    _first_held: torch.Tensor  # an object that domains share whose atoms have the same numbers

    @classmethod
    def of(cls, domain: "Domain", pairs: torch.Tensor, factors: torch.Tensor | None = None) -> "OwnedPairs":
        """From pairs (2, n) of atom numbers, each with an atom that this rank owns."""
        known, order = torch.sort(domain._known_numbers)
        place = torch.searchsorted(known, pairs).clamp_(max=len(known) - 1)
        near = (known[place] == pairs).all(0).nonzero().squeeze(1)
        local = order[place.index_select(1, near)]
        call = messages_of(domain.group).calls
        return cls(pairs, factors, local, near, call, domain._known_numbers, domain._first_held)

    @property
    def __name__(self) -> str:
        """What ranks compare, from `nvalchemiops.torch.distributed.agreement.described`."""
        return f"pairs distributed in call {self.call}"

    def check(self, domain: "Domain", name: str) -> None:
        """Raise unless they belong to this domain."""
        if self._numbers is not domain._known_numbers:
            raise ValueError(f"`{name}` belong to another `domain`: use `{name}.followed(domain)`")

    def followed(self, domain: "Domain") -> "OwnedPairs":
        """Return the same pairs for a domain that `Domain.follow` has made. A collective call if it is new.

        Parameters
        ----------
        domain : Domain

        Returns
        -------
        OwnedPairs
            The same object if they belong to this domain.

        Raises
        ------
        ValueError
            The domain has other atoms.
        """
        if self._numbers is domain._known_numbers:
            return self
        if self._first_held is not domain._first_held:
            raise ValueError("the pairs belong to a `domain` of other atoms, whose numbers differ")
        if self not in domain.kept:
            with unrecorded():
                domain.kept[self] = owned_pairs(domain, self.pairs, self.factors)
        return domain.kept[self]


def among(domain: "Domain", pairs: torch.Tensor) -> torch.Tensor:
    """Indices (n,) of the pairs, by number, with an atom that this rank owns."""
    return torch.isin(pairs, domain.global_index).any(0).nonzero().squeeze(1)


def _owners_of_held(domain: "Domain") -> torch.Tensor:
    """The rank (n,) that owns each atom that this rank holds."""
    there = domain._to_owners
    owners, counts = torch.tensor([there.partners, there.send], dtype=torch.int64, device=domain.device)
    owners = owners.repeat_interleave(counts)
    return torch.empty_like(owners).index_copy_(0, there.rows, owners)


def owned_pairs(domain: "Domain", pairs: torch.Tensor, factors: torch.Tensor | None) -> OwnedPairs:
    """See `Domain.distribute_pairs`."""
    n_atoms, n_ranks, rank = domain.n_atoms, domain.n_ranks, domain.rank
    with Agreement(domain.group, domain.device) as agreement:
        checks.check_pairs("pairs", pairs, n_atoms, domain.global_index)
        if factors is not None:
            checks.check_factors("factors", factors, pairs.shape[1], domain.global_index)
        agreement.same["`factors`"] = "None" if factors is None else kind_of(factors)
    with torch.inference_mode(False), outside_of_transforms():
        # numbers up to 2^53 are exact
        columns = torch.cat([pairs, pairs.flip(0)], 1).double()
        if factors is not None:
            columns = torch.cat([columns, factors.double().repeat(2).unsqueeze(0)])
        held = domain._first_held
        holder = torch.searchsorted(held, columns[0].long(), right=True) - 1
        rows = Exchange.to_ranks(domain.group, holder, n_ranks).apply(columns.T)
        owner = _owners_of_held(domain).index_select(0, rows[:, 0].long() - held[rank])
        rows = Exchange.to_ranks(domain.group, owner, n_ranks).apply(rows)
        # rows of owned atoms: a pair of two of them has arrived twice, and more often if several ranks have given it
        first, second = rows[:, :2].long().unbind(1)
        is_twice = torch.isin(second, domain.global_index) & (second < first)
        keys = torch.where(is_twice, second, first) * n_atoms + torch.where(is_twice, first, second)
        keys, place = torch.unique(keys, return_inverse=True)
        values = rows[:, 2:].new_zeros(len(keys), rows.shape[1] - 2).index_copy_(0, place, rows[:, 2:])
        with Agreement(domain.group, domain.device):
            differ = (values.index_select(0, place) != rows[:, 2:]).any(1).nonzero().squeeze(1)
            if len(differ):
                i, j = rows[differ[0], :2].long().tolist()
                raise ValueError(f"`factors` of the pair ({i}, {j}) differ between ranks")
        found = torch.stack([keys.div(max(n_atoms, 1), rounding_mode="floor"), keys % max(n_atoms, 1)])
        return OwnedPairs.of(domain, found, values[:, 0] if factors is not None else None)
