"""Cases for several ranks: rows that go to partners only, and pairs that are kept by owners. See `ranks.py`."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from nvalchemiops.constants import FEMTOSECOND, KELVIN
from nvalchemiops.torch.distributed import Domain, OwnedPairs
from nvalchemiops.torch.distributed.exchange import Exchange, counts_for_this_rank
from nvalchemiops.torch.dynamics import SumOfTerms, langevin, simulate
from nvalchemiops.torch.interactions.electrostatics import EwaldSummation, ewald_summation
from nvalchemiops.torch.interactions.pair import PairPotential
from nvalchemiops.torch.systems import System
from tests.distributed.common import F64, Atoms, assert_equal, case, compare, raises

WITH_CHARGES = PairPotential("q1*q2/r*exp(-r)", per_atom=("q",), cutoff=3.0)


def bonds(atoms: Atoms, length: float = 2.5) -> torch.Tensor:
    """A third of the pairs (2, n) closer than this, over all borders of the cell."""
    inverse = torch.linalg.inv(atoms.cell)
    apart = (atoms.positions[:, None] - atoms.positions[None]) @ inverse
    near = ((apart - apart.round()) @ atoms.cell).norm(dim=2) < length
    return torch.stack(near.triu(1).nonzero()[::3].unbind(1))


def held(values: torch.Tensor, way: str, group: Any) -> torch.Tensor:
    """The part of values (..., n) that this rank holds."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    parts = {"striped": slice(rank, None, size), "last": slice(0, None if rank == size - 1 else 0), "all": slice(None)}
    return values[..., parts[way]]


@contextlib.contextmanager
def counted() -> Iterator[list[list[int]]]:
    """The ranks to which messages go while it is active: a list for each message."""
    sent: list[list[int]] = []
    function = dist.batch_isend_irecv

    def batch(operations: list[Any]) -> Any:
        to = [operation.group_peer for operation in operations if operation.op is dist.isend]
        sent.extend([to] if to else [])
        return function(operations)

    with mock.patch.object(dist, "batch_isend_irecv", batch):
        yield sent


@case(2, 3)
def counts_reach_their_rank(group: Any) -> None:
    """In log2(n) messages, each to one rank."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    table = torch.randint(0, 9, (size, size), generator=torch.Generator().manual_seed(size))
    with counted() as sent:
        assert torch.equal(counts_for_this_rank(table[rank], group), table[:, rank])
    assert len(sent) == (size - 1).bit_length()
    assert all(len(to) == 1 for to in sent), sent


@case(3)
def rows_go_to_partners_only(group: Any) -> None:
    """One message to each, none to a rank that gets no rows; also back, and of ranks that have no partner at all."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    # rank r sends r + 1 rows to the next one and two to itself, but the last one sends nothing
    here = torch.arange(3.0 + rank, dtype=F64, requires_grad=True) + 10 * rank
    to = torch.tensor([rank, rank, *[rank + 1] * (rank + 1)] if rank < size - 1 else [])
    plan = Exchange.to_ranks(group, to, size)
    assert list(plan.partners) == [rank - 1] * (rank > 0) + [rank, rank + 1] * (rank < size - 1)
    with counted() as sent:
        found = plan.apply(here[: len(to)])
        back = plan.transpose(found * 2.0, len(to))
    assert sent == [[rank + 1]] * (rank < size - 1) + [[rank - 1]] * (rank > 0)
    assert_equal(back, 2.0 * here[: len(to)], "each row comes from one rank")
    before = 2.0 + torch.arange(rank) + 10 * (rank - 1)  # from the rank before
    mine = here[:2] if rank < size - 1 else here[:0]
    assert torch.equal(found, torch.cat([before[:rank], mine])), found


@case(2, 3)
def exclusions_of_owners(group: Any) -> None:
    """Results and two orders of derivatives, whoever gives the pairs."""
    for batch, way in ((False, "striped"), (True, "last"), (False, "all")):
        atoms = Atoms(batch)
        pairs = bonds(atoms)
        if batch:
            pairs = pairs[:, atoms.batch_idx[pairs[0]] == atoms.batch_idx[pairs[1]]]
        factors = None if way == "all" else torch.linspace(0.0, 1.0, pairs.shape[1], dtype=F64)

        def energies_of(x, q, cell, pairs=pairs, factors=factors, way=way, **where):
            excluded = {"exclusions": pairs, "exclusion_factors": factors}
            if "domain" in where:
                own = where["domain"].distribute_pairs(
                    held(pairs, way, group), None if factors is None else held(factors, way, group)
                )
                assert own.pairs.shape[1] < pairs.shape[1] or dist.get_world_size(group) == 1
                assert torch.isin(own.pairs, where["domain"].global_index).any(0).all()
                excluded = {"exclusions": own}
            e, f, virial = ewald_summation(
                x, q, cell, 0.7, k_cutoff=2.0, cutoff=3.0, compute_forces=True, compute_virial=True, **excluded, **where
            )
            screened = WITH_CHARGES(x, cell, q=q, energy_reduction="system", **excluded, **where)
            return {"atom e": e, "atom f": f, "virial": virial, "screened": screened}

        compare(group, atoms, energies_of)


@case(2, 3)
def pairs_follow_atoms(group: Any) -> None:
    """To the owners in a new domain; in dynamics by themselves."""
    atoms = Atoms(n=8)
    mine, pairs = atoms.mine(group), bonds(atoms)
    domain = Domain(atoms.positions[mine], atoms.cell, cutoff=3.0, skin=0.2, group=group)
    x, q = domain.distribute(atoms.positions[mine]), domain.distribute(atoms.charges[mine])
    own, moved = domain.distribute_pairs(held(pairs, "striped", group)), atoms.positions
    assert own.followed(domain) is own
    for step in range(2):
        shift = torch.tensor([0.7, 0.0, 0.2], dtype=F64) + 0.05 * atoms.vectors
        moved, before = moved + shift, own
        domain, x, q = domain.follow(x + shift[domain.global_index], q)
        own = own.followed(domain)
        assert own is not before and own is before.followed(domain)
        expected = WITH_CHARGES(moved, atoms.cell, q=atoms.charges, exclusions=pairs)
        found = WITH_CHARGES(x, atoms.cell, q=q, exclusions=own, domain=domain)
        assert_equal(domain.gather(found), expected[mine], step)
        wrong = functools.partial(WITH_CHARGES, x, atoms.cell, q=q, exclusions=before, domain=domain)
        raises(wrong, "another `domain`")
    other = Domain(x, atoms.cell, cutoff=3.0, group=group)  # numbers of atoms are new
    raises(lambda: own.followed(other), "a `domain` of other atoms")

    def run(system: System, excluded: torch.Tensor | OwnedPairs) -> System:
        screened = functools.partial(WITH_CHARGES, q=0.1 * atoms.charges, exclusions=excluded)
        # so large an alpha that pairs of the skin, which only one process sums, are zero
        sums = functools.partial(EwaldSummation(2.2, k_cutoff=2.0, cutoff=3.0), exclusions=excluded)
        thermostat = langevin(4.0 * FEMTOSECOND, 300.0 * KELVIN, friction=0.1 / FEMTOSECOND)
        model = SumOfTerms(screened, sums, skin=0.2)
        return simulate(system, model, thermostat, steps=6, seed=3).state.system

    whole = System(atoms.positions, 0.05 * atoms.charges, atoms.cell, numbers=torch.full((atoms.count,), 1))
    expected = run(whole, pairs)
    domain = Domain(atoms.positions[mine], atoms.cell, cutoff=3.0, skin=0.1, group=group)
    part = System(atoms.positions[mine], whole.charges[mine], atoms.cell, numbers=whole.numbers[mine])
    found = run(domain.distribute(part), domain.distribute_pairs(held(pairs, "striped", group)))
    assert found.domain is not domain, "atoms have changed ranks"
    assert_equal(found.domain.gather(found.positions), expected.positions[mine], "positions")


@case(2)
def pairs_that_have_no_answer(group: Any) -> None:
    """Are an error on all ranks, and so are exclusions beyond the reach of ranks where these count."""
    atoms, here = Atoms(n=10), dist.get_rank(group) == 0
    mine, pairs = atoms.mine(group), bonds(atoms)
    domain = Domain(atoms.positions[mine], atoms.cell, cutoff=3.0, group=group)
    x, q = domain.distribute(atoms.positions[mine]), domain.distribute(atoms.charges[mine])
    ones = torch.ones(pairs.shape[1], dtype=F64)

    def wrong(text: str, pairs: Any, factors: Any = None) -> None:
        raises(lambda: domain.distribute_pairs(pairs, factors), text)

    wrong("holds a pair twice", torch.cat([pairs, pairs[:, :1].flip(0)], 1) if here else pairs)
    wrong("must hold atoms in 0", pairs + (atoms.count - 5) * here)
    wrong("with itself", pairs * (not here) + torch.tensor([[3], [3]]) * here if here else pairs)
    wrong("`pairs`", pairs.tolist() if here else pairs)
    wrong("`factors`", pairs, ones[1:] if here else ones)
    wrong("`factors` must be the same", pairs, ones if here else None)
    wrong("differ between ranks", pairs, ones * (1.0 + here))

    def ewald(exclusions: Any, **more: Any) -> Any:
        return ewald_summation(
            x, q, atoms.cell, 0.7, k_cutoff=2.0, cutoff=3.0, exclusions=exclusions, domain=domain, **more
        )

    own, again = domain.distribute_pairs(pairs), domain.distribute_pairs(pairs)
    raises(lambda: ewald(own, exclusion_factors=ones), "`exclusion_factors`")
    raises(lambda: ewald(own if here else again), "`exclusions` must be the same")
    raises(lambda: ewald(own if here else pairs), "`exclusions` must be the same")
    far = torch.tensor([[222], [777]])  # in the middle of two bricks, along all axes
    for excluded in (far, domain.distribute_pairs(held(far, "last", group))):
        raises(lambda excluded=excluded: ewald(excluded), "farther apart than ranks see")
        # within a cutoff they have no effect
        assert_equal(WITH_CHARGES(x, atoms.cell, q=q, exclusions=excluded, domain=domain),
                     WITH_CHARGES(x, atoms.cell, q=q, domain=domain), "far pairs")  # fmt: skip
    expected = ewald_summation(
        atoms.positions, atoms.charges, atoms.cell, 0.7, k_cutoff=2.0, cutoff=3.0, exclusions=pairs
    )
    for excluded in (own, again, pairs):
        assert_equal(domain.gather(ewald(excluded)), expected[mine], "and then normal work")
