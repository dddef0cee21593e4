"""Sums over the pairs of the atoms that one rank owns, and the data that ranks exchange for them.

A pair of an owned atom and a ghost is in the rows of both atoms, on the ranks of both. Each rank sums only the rows of
its owned atoms, and each owned atom gets half of the energy of its pairs; so the energies of all ranks, and their
derivatives, add up to those of the system.

The ops fetch values of ghosts themselves (`with_ghosts`). If the values of all neighbors are known, including the
weights of their energies, a row contains everything on which the derivative of the total energy with respect to a value
of its atom depends. So the op is closed under differentiation on several ranks, too: gradients of owned atoms are
complete, no gradients of ghosts are computed or sent back, and ghosts need no rows.
"""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from nvalchemiops.interactions.pair.expression import Formula
from nvalchemiops.torch import checks
from nvalchemiops.torch.distributed.agreement import described, of_atoms
from nvalchemiops.torch.distributed.collectives import group_of
from nvalchemiops.torch.distributed.communication import swap_rows
from nvalchemiops.torch.distributed.domain import Domain
from nvalchemiops.torch.distributed.faults import in_call
from nvalchemiops.torch.distributed.pairs import OwnedPairs, among
from nvalchemiops.torch.interactions.pair.exclusions import ExclusionRows, exclusion_rows
from nvalchemiops.torch.neighbors.rows import GivenNeighbors, Rows, is_listed
from nvalchemiops.torch.runtime._torch_internals import outside_of_transforms
from nvalchemiops.torch.runtime.context import may_read


class Ghosts(NamedTuple):
    """The arguments of an op over pairs by which ranks exchange the values of ghosts."""

    system_of_all: torch.Tensor | None = None  # (n_owned + n_ghosts,) int32
    sent: torch.Tensor | None = None  # (n_sent,) int64, owned atoms whose values are sent, for the first partner first
    partners: Sequence[int] = ()  # ranks that see owned atoms, or own ghosts
    send: Sequence[int] = ()  # how many values go to each partner
    receive: Sequence[int] = ()  # how many ghosts come from each partner
    group: int = 0  # of processes, from `nvalchemiops.torch.distributed.collectives.number_of`


NO_GHOSTS = Ghosts()


def ghosts_of(domain: Domain | None, batch_idx: torch.Tensor | None) -> tuple[Any, ...]:
    """The arguments of an op over pairs that describe ghosts; ``batch_idx`` is None if the sum ignores systems."""
    if domain is None:
        return ()
    halo, systems = domain._halo, None if batch_idx is None else domain.batch_idx_with_ghosts
    return Ghosts(systems, halo.rows, halo.partners, halo.send, halo.receive, halo.group)


def with_ghosts(given: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Arguments of an op by name; those called ``names`` get the values of ghosts after those of owned atoms.

    The fields of `Ghosts` are among the arguments.
    """
    # in the arguments `direction_*`, the axis of atoms follows that of directions
    axes = {name: int(name.startswith("direction_")) for name in names if given[name] is not None}
    owned = [given[name].movedim(axis, 0) for name, axis in axes.items()]
    columns = [values.index_select(0, given["sent"]).unsqueeze(-1).flatten(1) for values in owned]
    ranks = group_of(given["group"]), given["partners"]
    arrived = swap_rows(torch.cat(columns, 1), given["send"], given["receive"], *ranks)
    found = {**given, "batch_idx": given["system_of_all"]}
    for (name, axis), values, part in zip(axes.items(), owned, arrived.split([c.shape[1] for c in columns], 1)):
        ghosts = part.reshape(part.shape[0], *values.shape[1:]).movedim(0, axis)
        found[name] = torch.cat([given[name], ghosts], axis)
    return found


def summed(domain: Domain | None, shares: torch.Tensor) -> torch.Tensor:
    """The sum of all ranks' shares of a result, which all of them return."""
    return shares if domain is None else domain._sum(shares)


def summed_for_shares(domain: Domain | None, values: torch.Tensor) -> torch.Tensor:
    """The sum of values of all ranks, from which each computes its own share of a result."""
    return values if domain is None else domain._sum_for_shares(values)


def largest(domain: Domain | None, values: torch.Tensor) -> torch.Tensor:
    """The elementwise maximum of the values of all ranks, without gradients."""
    return values if domain is None else domain._maximum(values)


def replicated(domain: Domain | None, value: Any) -> Any:
    """A value that is the same on all ranks; a tensor with a gradient that is complete on each of them."""
    return domain.replicated(value) if domain is not None and isinstance(value, torch.Tensor) else value


def of_all_atoms(domain: Domain | None, value: Any) -> Any:
    """A value per atom; if it is one scalar tensor for all atoms, its gradient becomes complete on each rank."""
    return replicated(domain, value) if isinstance(value, torch.Tensor) and value.ndim == 0 else value


def beside_ghosts(domain: Domain | None, values: torch.Tensor) -> torch.Tensor:
    """Values of the owned atoms, then of ghosts."""
    return values if domain is None else domain._with_ghosts(values)


def of_lattice(asked: Any) -> Any:
    """The lattice sum; that of a slab with its ``pbc``, and a domain that is periodic along all axes."""
    atoms, domain = asked.atoms, asked.atoms.domain
    if not isinstance(domain, Domain) or (lattice := domain._of_lattice()) is domain:
        return asked
    return asked._replace(atoms=atoms._replace(domain=lattice, pbc=domain.pbc if atoms.pbc is None else atoms.pbc))


def must_be_near(domain: Domain | None, positions: torch.Tensor, cell: torch.Tensor | None) -> None:
    """Raise on all ranks if an atom has moved too far since the domain was made, in a part of a call `together`."""
    if domain is not None:
        domain._must_be_near(positions, cell)


def rows_of_domain(
    domain: Domain,
    positions: torch.Tensor,
    cell: torch.Tensor | None,
    cutoff: float | None,
    neighbors: GivenNeighbors,
    alpha: Any = None,
) -> tuple[Rows, float, Any]:
    """Neighbors of owned atoms, up to the cutoff of the domain by default; the cutoff; and alpha, if any, replicated.

    A collective call. Cutoff and alpha must be the same on all ranks.
    """
    with domain._together() as agreement:
        if is_listed(neighbors):
            raise ValueError("`neighbor_list` or `neighbor_matrix`: a `domain` has its own neighbors")
        cutoff = domain.cutoff if cutoff is None else cutoff
        agreement.must_be_same(alpha=alpha, cutoff=cutoff)
        rows = domain._owned_rows(positions, cutoff, cell).alone
    return rows, cutoff, replicated(domain, alpha)


def together(domain: Domain | None, now: bool = False) -> Any:
    """A context for a part of a call in which one rank may raise: then all ranks raise, at once if ``now`` is set."""
    if domain is None:
        return contextlib.nullcontext()
    if not isinstance(domain, Domain):
        raise TypeError(f"`domain` must be a Domain, got {type(domain).__name__}")
    return domain._together(now)


def whole_call(domain: Domain | None) -> contextlib.AbstractContextManager[Any]:
    """A context for a whole call: if one rank raises between messages, the ranks that wait for it raise, too."""
    return in_call(domain.group) if isinstance(domain, Domain) else contextlib.nullcontext()


def exclusions_of_share(
    domain: Domain | None,
    exclusions: Any,
    factors: Any,
    positions: torch.Tensor,
    batch_idx: torch.Tensor | None = None,
    at_any_distance: bool = False,
) -> ExclusionRows | None:
    """Rows of the excluded pairs; raise unless both atoms of each pair belong to one system.

    With a domain, rows are among owned atoms and ghosts. ``exclusions`` are then `OwnedPairs`, or pairs of indices in
    the whole system, the same on all ranks. Pairs farther apart than a rank sees are left out, which is an error if
    they count ``at_any_distance``.
    """
    if exclusions is None or domain is None:
        return exclusion_rows(exclusions, factors, positions, batch_idx)
    with domain._together() as agreement:
        agreement.must_be_same(exclusions=exclusions, exclusion_factors=factors)
        if isinstance(exclusions, OwnedPairs):
            if factors is not None:
                raise ValueError("`exclusion_factors` of distributed pairs: give them to `domain.distribute_pairs`")
            exclusions.check(domain, "exclusions")
            own, factors = exclusions, exclusions.factors
        else:
            own, chosen = _excluded_here(domain, exclusions, factors)
            factors = None if factors is None else factors.index_select(0, chosen)
        if at_any_distance and len(own.near) < own.pairs.shape[1]:
            raise ValueError(
                f"`exclusions` joins atoms that are farther apart than ranks see, {domain.reach}: make the `domain` "
                "with a larger cutoff"
            )
        factors = None if factors is None else factors.index_select(0, own.near)
        everywhere = positions.new_empty((1, 3)).expand(domain.n_owned + domain.n_ghosts, 3)
        return exclusion_rows(own.local, factors, everywhere, domain.batch_idx_with_ghosts)


def _excluded_here(domain: Domain, exclusions: Any, factors: Any) -> tuple[OwnedPairs, torch.Tensor]:
    """From pairs that are the same on all ranks, those with an owned atom, and their indices.

    They are kept with the domain while the pairs are the same: to find them among the pairs of all atoms, and to check
    these, takes longer than a sum over the pairs of a rank.
    """
    if factors is not None:
        checks.check_tensor("exclusions", exclusions)
        checks.check_factors("exclusion_factors", factors, exclusions.shape[-1], domain.global_index)
    can_compare = isinstance(exclusions, torch.Tensor) and may_read(exclusions)
    if can_compare and (kept := domain.kept.get("exclusions")) is not None:
        given, own, chosen = kept
        if given.dtype is exclusions.dtype and torch.equal(given, exclusions):
            return own, chosen
    checks.check_pairs("exclusions", exclusions, domain.n_atoms, domain.global_index)
    with torch.inference_mode(False), outside_of_transforms():
        pairs = exclusions.long()
        chosen = among(domain, pairs)
        own = OwnedPairs.of(domain, pairs.index_select(1, chosen))
        if can_compare:
            domain.kept["exclusions"] = exclusions.clone(), own, chosen
    return own, chosen


def must_be_same(domain: Domain | None, **values: Any) -> None:
    """Register named values that must be the same on all ranks; called inside of `together`."""
    if domain is not None:
        with domain._together() as agreement:
            agreement.must_be_same(**values)


def parameters_of_share(formula: Formula, parameters: Mapping[str, Any], domain: Domain | None) -> dict[str, Any]:
    """Parameters by name; parameters that are the same on all ranks get gradients that are complete on each rank."""
    found = dict(parameters)
    if domain is None:
        return found
    with domain._together() as agreement:
        agreement.must_be_same(formula=formula)
        for name, value in found.items():
            agreement.same[f"`{name}`"] = of_atoms(value) if name in formula.per_atom else described(value)
        for name in formula.per_atom:
            value = found.get(name)
            if isinstance(value, torch.Tensor) and value.ndim and value.shape[0] != domain.n_owned:
                raise ValueError(
                    f"`{name}` must be a number, a tensor without axes, or a tensor of shape (n_owned,) = "
                    f"({domain.n_owned},), got {tuple(value.shape)}"
                )
    for name in (*formula.per_atom, *formula.global_parameters, *formula.per_pair):
        if name in found:
            found[name] = (of_all_atoms if name in formula.per_atom else replicated)(domain, found[name])
    return found


def complete(
    formula: Formula, results: Sequence[torch.Tensor], request: Any, domain: Domain | None
) -> tuple[torch.Tensor, ...]:
    """The results of `sum_pairs`; results that are not per atom are summed over the ranks."""
    of_atoms = [request.energy_reduction == "atom"] + [True] * request.forces
    of_atoms += [name in formula.per_atom for name in request.gradients] + [False] * request.virial
    return tuple(r if is_own else summed(domain, r) for r, is_own in zip(results, of_atoms, strict=True))
