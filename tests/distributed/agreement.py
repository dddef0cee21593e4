"""Cases for several ranks: what they agree on, in how many messages, and mistakes of one of them. See `ranks.py`."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from nvalchemiops.torch.distributed import Domain, OtherRankError, divide
from nvalchemiops.torch.distributed.communication import messages_of
from nvalchemiops.torch.dynamics import nve, relax, simulate
from nvalchemiops.torch.interactions.dispersion import d3_dispersion, damping_parameters
from nvalchemiops.torch.interactions.electrostatics import (
    LongRangePotential,
    dsf_coulomb,
    ewald_reciprocal_space,
    ewald_summation,
    particle_mesh_ewald,
)
from nvalchemiops.torch.interactions.electrostatics.potentials import COULOMB
from nvalchemiops.torch.interactions.pair import PairPotential
from nvalchemiops.torch.systems import System
from tests.distributed.common import CUTOFF, F64, PAIRS_OF_CHARGES, Atoms, assert_equal, case, raises
from tests.support.molecules import parameters as d3_parameters

WITH_FACTOR = PairPotential("k*q1*q2/r", per_atom=("q",), global_parameters=("k",), cutoff=3.0)
WITH_TABLE = PairPotential("c/r", per_pair=("c",), cutoff=3.0)
SWITCHED = tuple(PairPotential("q1*q2/r", per_atom=("q",), cutoff=3.0, r_switch=r) for r in (2.0, 2.5))


@case(3)
def mistakes_of_one_rank_are_told_to_all(group: Any) -> None:
    atoms, rank = Atoms(n=4), dist.get_rank(group)
    mine = atoms.mine(group)
    x, q = atoms.positions[mine], atoms.charges[mine]
    here = rank == 0

    def raises(call: Callable[[], Any], text: str) -> None:
        try:
            call()
        except ValueError as error:
            assert here and text in str(error), error
        except OtherRankError as error:
            assert not here and "rank 0" in str(error) and text in str(error), error
        else:
            raise AssertionError(text)

    raises(lambda: Domain(x[:, :2] if here else x, atoms.cell, cutoff=3.0, group=group), "`positions`")
    raises(lambda: Domain(x * float("nan") if here else x, atoms.cell, cutoff=3.0, group=group), "NaN")
    domain = Domain(x, atoms.cell, cutoff=3.0, group=group)
    own, charges = domain.distribute(x), domain.distribute(q)
    for call in (
        lambda y, c: ewald_summation(y, c, atoms.cell, 0.7, k_cutoff=2.0, domain=domain),
        lambda y, c: dsf_coulomb(y, c, 3.0, 0.2, atoms.cell, domain=domain),
    ):
        fewer = slice(int(here), None)
        raises(functools.partial(call, own, charges[fewer]), "`charges`")
        raises(functools.partial(call, own[fewer], charges[fewer]), "`positions`")
    # and then normal work
    assert_equal(
        domain.gather(PAIRS_OF_CHARGES(own, atoms.cell, q=charges, domain=domain)),
        PAIRS_OF_CHARGES(atoms.positions, atoms.cell, q=atoms.charges)[mine],
        "afterwards",
    )
    try:
        Domain(x, atoms.cell * (1.0 + 0.1 * here), cutoff=3.0, group=group)
    except ValueError as error:
        assert "rank" in str(error)
    else:
        raise AssertionError("cells that differ are an error on all ranks")
    system = System(own, charges, atoms.cell, domain=domain)
    assert system.domain is domain


@case(2)
def atoms_where_a_group_sends_nothing_are_named(group: Any) -> None:
    """As with NCCL, which sends nothing from a CPU."""
    atoms = Atoms(n=3)
    with mock.patch.object(dist, "get_backend_config", lambda _: "cuda:nccl"):
        for call in (Domain, lambda x, **options: divide(System(x), **options)):
            raises(lambda call=call: call(atoms.positions, cutoff=3.0, group=group), "a backend for cuda only")


@case(2)
def what_ranks_do_differently_is_named(group: Any) -> None:
    """Other parameters, results, gradients or functions on one rank are an error on all, at once, which names them."""
    atoms, rank = Atoms(n=4), dist.get_rank(group)
    mine, there, x_all = atoms.mine(group), rank == 1, atoms.positions
    domain = Domain(atoms.positions[mine], atoms.cell, cutoff=3.0, group=group)
    x, q = domain.distribute(atoms.positions[mine]), domain.distribute(atoms.charges[mine])
    numbers = atoms.numbers[domain.global_index]
    alphas = (torch.tensor(0.7), torch.tensor(0.8 if there else 0.7))

    def tracked(values: torch.Tensor) -> torch.Tensor:
        return values.clone().requires_grad_(there)

    def mesh(*given: Any, mesh_dimensions: Any = (8, 8, 8), **more: Any) -> Any:
        return particle_mesh_ewald(*given, mesh_dimensions=mesh_dimensions, domain=domain, **more)

    def d3(numbers: torch.Tensor, tables: Any = None, **more: Any) -> Any:
        tables = tables or d3_parameters()
        return d3_dispersion(
            x, numbers, damping_parameters("pbe"), tables, atoms.cell, cutoff=2.9, domain=domain, **more
        )

    one = d3_parameters()
    tables = (one, dataclasses.replace(one, c6ab=1.1 * one.c6ab))
    pairs = torch.stack([torch.arange(0, 40), torch.arange(10, 50)])
    table, species = torch.ones(9, 9, dtype=F64), domain.distribute((torch.arange(len(x_all)) % 9).int()[mine])
    WITH_TABLE(x, atoms.cell, c=table, species=species, domain=domain)

    def changed(table: torch.Tensor) -> torch.Tensor:
        """By NumPy, which torch does not count, after the table was used."""
        table.numpy()[0, 1] += there
        return table

    def dsf(*given: Any, **more: Any) -> Any:
        return dsf_coulomb(*given, cell=atoms.cell, domain=domain, **more)

    calls: dict[str, list[Callable[[], Any]]] = {
        "`alpha`": [
            lambda: dsf(x, q, 3.0, 0.2 + there),
            lambda: mesh(x, q, atoms.cell, alphas[1]),
            lambda: mesh(x, q, atoms.cell, np.float32(0.7 + 0.1 * there)),
            lambda: mesh(x, q, atoms.cell, alphas[0].clone().requires_grad_(there)),
        ],
        "`cutoff`": [lambda: dsf(x, q, 3.0 - there), lambda: mesh(x, q, atoms.cell, 0.7, cutoff=3.0 - there)],
        "`request`": [
            lambda: dsf(x, q, 3.0, compute_forces=there),
            lambda: PAIRS_OF_CHARGES(x, atoms.cell, q=q, compute_virial=there, domain=domain),
            lambda: mesh(x, q, atoms.cell, 0.7, compute_charge_gradients=there),
            lambda: d3(numbers, compute_forces=there),
        ],
        "`method`": [lambda: mesh(x, q, atoms.cell, 0.7, mesh_dimensions=(8, 8 + 2 * there, 8))],
        "`k`": [lambda: WITH_FACTOR(x, atoms.cell, q=q, k=1.0 + there, domain=domain)],
        "`r_switch`": [lambda: SWITCHED[there](x, atoms.cell, q=q, domain=domain)],
        "`parameters`": [lambda: d3(numbers, tables=tables[there])],
        "`exclusions`": [
            lambda: mesh(x, q, atoms.cell, 0.7, exclusions=pairs + there),
            lambda: PAIRS_OF_CHARGES(x, atoms.cell, q=q, exclusions=pairs + there, domain=domain),
        ],
        "`c`": [
            lambda: WITH_TABLE(x, atoms.cell, c=table + there, species=species, domain=domain),
            lambda: WITH_TABLE(x, atoms.cell, c=changed(table), species=species, domain=domain),
        ],
        "`positions`": [
            lambda: mesh(tracked(x), q, atoms.cell, 0.7),
            lambda: PAIRS_OF_CHARGES(tracked(x), atoms.cell, q=q, domain=domain),
        ],
        "`charges`": [lambda: mesh(x, tracked(q), atoms.cell, 0.7), lambda: dsf(x, tracked(q), 3.0)],
        "`q`": [lambda: PAIRS_OF_CHARGES(x, atoms.cell, q=tracked(q), domain=domain)],
        "`cell`": [lambda: mesh(x, q, tracked(atoms.cell), 0.7)],
        "different calls": [
            lambda: mesh(x, q, atoms.cell, 0.7) if there else dsf(x, q, 3.0),
            lambda: domain.neighbors(x, 3.0) if there else dsf(x, q, 3.0),
        ],
    }
    for name, several in calls.items():
        for call in several:
            try:
                call()
            except ValueError as error:
                text = str(error)
                assert name in text and "on rank 0" in text and "on rank 1" in text, (name, text)
            else:
                raise AssertionError(name)
    # no gradient is required where none is recorded
    with torch.no_grad():
        found = mesh(tracked(x), q, atoms.cell, 0.7)
    assert torch.equal(found, mesh(x, q, atoms.cell, np.float64(0.7) if there else 0.7)), "and then normal work"
    scopes = [0] * dist.get_world_size(group)
    dist.all_gather_object(scopes, messages_of(group).scope, group)
    assert len(set(scopes)) == 1, "ranks number alike the blocks in which they fail together"


@case(2)
def a_call_agrees_once(group: Any) -> None:
    """One message before the sums, neighbors included; a second list sends nothing more."""
    atoms, mine = Atoms(), Atoms().mine(group)
    domain = Domain(atoms.positions[mine], atoms.cell, cutoff=CUTOFF, skin=0.5, group=group)
    x, q = domain.distribute(atoms.positions[mine]), domain.distribute(atoms.charges[mine])
    pairs = torch.stack([torch.arange(0, 100, 7), torch.arange(0, 100, 7) + 2])
    forces, of_mesh = {"compute_forces": True}, {"mesh_dimensions": (18, 20, 24)}
    calls: dict[str, tuple[Callable[[], Any], list[str]]] = {
        "neighbors": (lambda: domain.neighbors(x, 4.0), ["all_gather"]),
        "DSF": (
            lambda: dsf_coulomb(x, q, 4.4, 0.2, atoms.cell, domain=domain, **forces),
            ["all_gather", "batch_isend_irecv", "all_reduce"],
        ),
        "pairs": (lambda: PAIRS_OF_CHARGES(x, atoms.cell, q=q, domain=domain), ["all_gather", "batch_isend_irecv"]),
        "PME": (
            lambda: particle_mesh_ewald(x, q, atoms.cell, 0.7, cutoff=4.3, domain=domain, **of_mesh, **forces),
            ["all_gather", *["batch_isend_irecv"] * 5],
        ),
        "Ewald": (
            lambda: ewald_summation(x, q, atoms.cell, 0.7, cutoff=4.2, k_cutoff=2.0, domain=domain),
            ["all_gather", "batch_isend_irecv", "all_reduce"],
        ),
        "excluded pairs": (
            lambda: ewald_summation(x, q, atoms.cell, 0.7, k_cutoff=2.0, exclusions=pairs, domain=domain),
            ["all_gather", *["batch_isend_irecv"] * 3, "all_reduce"],
        ),
    }
    for name, (call, expected) in calls.items():
        sent = messages(call)
        if name == "PME" and dist.get_world_size(group) > 2 and len(sent) < len(expected):
            expected = expected[:-2]  # the window of this rank is a part of its pencil, there and back
        assert sent == expected, (name, sent)


@case(2)
def trained_tensors_of_a_potential(group: Any) -> None:
    """Gradients by tensors in the functions of a potential are complete if marked as replicated; else an error."""
    atoms, mine = Atoms(), Atoms().mine(group)
    domain = Domain(atoms.positions[mine], atoms.cell, cutoff=CUTOFF, group=group)
    x, q = domain.distribute(atoms.positions[mine]), domain.distribute(atoms.charges[mine])
    strength, slope_factor = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (1.3, 0.9))

    def potential(shared: Callable[[torch.Tensor], torch.Tensor]) -> LongRangePotential:
        factor, power = shared(strength), shared(slope_factor)
        return COULOMB._replace(
            reciprocal=lambda k2, alpha: factor * COULOMB.reciprocal(k2, alpha),
            at_zero=lambda alpha: power * COULOMB.at_zero(alpha),
            slope=None,
        )

    for call, options in (
        (ewald_summation, {"k_cutoff": 2.0}),
        (particle_mesh_ewald, {"mesh_dimensions": (18, 20, 24)}),
        (ewald_reciprocal_space, {"k_cutoff": 2.0, "k_vectors": None}),
    ):
        options = {**options, "compute_virial": True}

        def loss_of(results: Any, domain: Domain | None = None) -> torch.Tensor:
            energy = results[0].sum()
            return (energy if domain is None else domain.sum(energy)) + (results[-1] * atoms.dyad).sum()

        whole = atoms.positions, atoms.charges, atoms.cell
        of_all = call(*whole, alpha=0.7, potential=potential(torch.clone), **options)
        expected = torch.autograd.grad(loss_of(of_all), [strength, slope_factor])
        given = {"alpha": 0.7, "domain": domain, **options}
        found = call(x, q, atoms.cell, potential=potential(domain.replicated), **given)
        gradients = torch.autograd.grad(loss_of(found, domain), [strength, slope_factor])
        for ours, theirs in zip(gradients, expected):
            assert_equal(ours, theirs, call.__name__)
        try:
            call(x, q, atoms.cell, potential=potential(torch.clone), **given)
        except ValueError as error:
            assert "domain.replicated" in str(error), error
        else:
            raise AssertionError("a share of a gradient")
        with torch.no_grad():
            assert_equal(call(x, q, atoms.cell, potential=potential(torch.clone), **given)[0], found[0], "no gradient")


def messages(call: Callable[[], Any]) -> list[str]:
    """The operations of torch.distributed in a call: those of all ranks, and batches of messages between pairs."""
    sent: list[str] = []
    kept = {name: getattr(dist, name) for name in ("all_reduce", "batch_isend_irecv", "all_gather")}

    def counted(name: str) -> Callable[..., Any]:
        def send(*given: Any, **options: Any) -> Any:
            sent.append(name)
            return kept[name](*given, **options)

        return send

    try:
        for name in kept:
            setattr(dist, name, counted(name))
        call()
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)
    return sent


@case(2)
def mistakes_of_one_rank_are_errors_on_all(group: Any) -> None:
    """Atoms that are not those of a domain, with a cell and without one; what is right goes there and back."""
    atoms = Atoms(batch=True, n=3)
    mine, there = atoms.mine(group), dist.get_rank(group) == dist.get_world_size(group) - 1  # which has atoms
    x, q, of, cells = atoms.positions[mine], atoms.charges[mine], atoms.batch_idx[mine], atoms.cells
    opened, batched, single = System(x, q), System(x, q, batch_idx=of), System(x, q, atoms.cell)
    domains = {
        "open": Domain(x, cutoff=3.0, group=group),
        "batch": Domain(x, batch_idx=of, cutoff=3.0, group=group),
        "slab": Domain(x, atoms.cell, torch.tensor([True, True, False]), cutoff=3.0, group=group),
    }
    for name, system in (("open", opened), ("batch", batched)):
        domain = domains[name]
        own = domain.distribute(system)
        held, whole = domain.gather(own), domain.collect(own)
        parts = (("positions", atoms.positions), ("charges", atoms.charges), ("batch_idx", atoms.batch_idx))
        for part, values in parts[: 2 + (name == "batch")]:
            assert torch.equal(getattr(held, part), values[mine])
            assert torch.equal(getattr(whole, part), values if domain.rank == 0 else values[:0])
        assert held.cell is held.pbc is held.domain is whole.cell is whole.pbc is whole.domain is None
    own = {name: domain.distribute(x) for name, domain in domains.items()}
    charges = domains["slab"].distribute(q)

    def pairs(name: str, cell: Any, **more: Any) -> Any:
        q = torch.ones(len(own[name]), dtype=F64)
        return PAIRS_OF_CHARGES(own[name], cell, q=q, domain=domains[name], **more)

    def wrong(right: Any, value: Any) -> Any:
        return value if there else right

    system_here = System(own["open"], domain=domains["open"])
    mistakes: dict[str, list[Callable[[], Any]]] = {
        "`steps` must not be negative": [lambda: simulate(system_here, len, nve(1.0), wrong(1, -1))],
        "`max_steps` must not be negative": [lambda: relax(system_here, len, max_steps=wrong(1, -1))],
        "`progress` must be": [
            lambda: simulate(system_here, len, nve(1.0), 1, progress=wrong(False, "no")),
            lambda: relax(system_here, len, progress=wrong(False, "no")),
        ],
        "`skin` must be non-negative": [lambda: Domain(x, cutoff=3.0, skin=wrong(0.0, -1.0), group=group)],
        "`batch_idx` must hold": [
            lambda: Domain(x, batch_idx=of - int(there), cutoff=3.0, group=group),
            lambda: Domain(x, batch_idx=of + int(there), num_systems=2, cutoff=3.0, group=group),
        ],
        "`positions` must have": [lambda: domains["open"].follow(own["open"][there:])],
        "has a `domain` already": [lambda: domains["open"].distribute(opened._replace(domain=wrong(None, 1)))],
        "`cell` of the system must be that": [lambda: domains["open"].distribute(wrong(opened, single))],
        "`cell` and `pbc` of the system": [
            lambda: domains["slab"].distribute(single),
            lambda: domains["slab"].distribute(
                single._replace(cell=wrong(1.0, 1.1) * atoms.cell, pbc=torch.tensor([True, True, False]))
            ),
        ],
        "`batch_idx` of the system must be that": [lambda: domains["open"].distribute(wrong(opened, batched))],
        "`batch_idx` of the system is missing": [lambda: domains["batch"].distribute(wrong(batched, opened))],
        "`batch_idx` belongs to the `domain`": [
            lambda: pairs("open", None, batch_idx=wrong(None, torch.zeros(len(own["open"])).int()))
        ],
        "`cell` must be given with this `domain`": [lambda: pairs("open", wrong(None, atoms.cell))],
        "`cell` must have shape": [
            lambda: pairs("slab", wrong(atoms.cell, cells)),
            lambda: domains["slab"].displacement(own["slab"], wrong(atoms.cell, cells)),
        ],
        "has open axes": [
            lambda: ewald_summation(own["slab"], charges, atoms.cell, 0.7, k_cutoff=2.0, domain=domains["slab"])
        ],
    }
    for text, calls in mistakes.items():
        for call in calls:
            raises(call, text)
