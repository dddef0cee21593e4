"""Cases for several ranks of which one fails where nobody asks it: between messages, calls or steps. See `ranks.py`."""

import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import ase.build
import numpy as np
import pytest
import torch
import torch.distributed as dist

from nvalchemiops.ase import Calculator, Contribution, Electrostatics, Pair, on_ranks
from nvalchemiops.torch import System
from nvalchemiops.torch.distributed import (
    Domain,
    OtherRankError,
    communication,
    divide,
    division,
    exchange,
    fail_together,
    ranks,
)
from nvalchemiops.torch.distributed.movement import Reference
from nvalchemiops.torch.dynamics import SumOfTerms, kinetic_energy, nve, relax, remove_momentum, simulate, sums
from nvalchemiops.torch.interactions.electrostatics import coulomb, dsf_coulomb
from nvalchemiops.torch.interactions.pair import lennard_jones, shares
from tests.distributed.common import Atoms, case, spare
from tests.distributed.steps import Steps, raises

CHARGES = {"Na": 1.0, "Cl": -1.0}

WITHIN = 20.0
"""Seconds in which ranks learn that another has failed: three, and more where many processes share a core."""


def soon(call: Callable[[], Any], *texts: str) -> None:
    """Raise unless the call ends soon with an `OtherRankError` with these words."""
    with mock.patch.object(communication, "PATIENCE", 0.2):
        raises(call, *texts)


def fails(at: Any, name: str, error: Any) -> Any:
    """This rank fails where it calls this function."""
    return mock.patch.object(at, name, side_effect=error)


@case(3, n_spare=8)
def no_memory_in_the_middle_of_a_call(group: Any) -> None:
    """The others learn it, whatever the call; then ranks need a new group."""

    def dsf(steps: Steps) -> Any:
        x = steps.positions(1)[steps.domain.global_index]
        return dsf_coulomb(x, steps.charges, 3.0, 0.2, steps.atoms.cell, compute_forces=True, domain=steps.domain)

    def follow(steps: Steps) -> Any:
        return steps.domain.follow(steps.positions(1)[steps.domain.global_index] + 1.0)

    def measure(function: Callable[..., Any], steps: Steps) -> Any:
        x = steps.positions(1)[steps.domain.global_index]
        return function(x, x[:, 0] + 9.0, domain=steps.domain)

    def divided(steps: Steps) -> Any:
        return divide(System(steps.atoms.positions, cell=steps.atoms.cell), cutoff=3.0, group=steps.domain.group)

    def later(steps: Steps) -> Any:
        x = steps.positions(1)[steps.domain.global_index]
        made = Domain(x, steps.atoms.cell, cutoff=3.0, group=steps.domain.group, check="never")
        return made.follow(made.distribute(x))

    calls: tuple[tuple[Any, str, Callable[[Steps], Any]], ...] = (
        (division, "Domain", divided),
        (ranks, "number_of", later),
        (Reference, "moved_on_device", later),
        (shares, "swap_rows", lambda steps: steps(1)),
        (coulomb, "sum_pairs", dsf),
        (exchange, "sort_rows", follow),
        *[(sums, "system_sums", partial(measure, function)) for function in (kinetic_energy, remove_momentum)],
    )
    for at, name, call in calls:
        steps, rank = Steps(spare.pop()), dist.get_rank(group)
        if rank == 1:
            with fails(at, name, torch.OutOfMemoryError("no memory left")), pytest.raises(torch.OutOfMemoryError):
                call(steps)
        else:
            soon(partial(call, steps), "rank 1 failed in call", "OutOfMemoryError: no memory left")
        dist.barrier(group)  # what a rank sends next could be taken for what others wait for
        soon(partial(steps, 2), "out of step", "new_group")


@case(2, n_spare=1)
def others_learn_an_error_within_seconds(group: Any) -> None:
    """With the intervals that users have: all other cases make them shorter."""
    steps, rank = Steps(spare.pop()), dist.get_rank(group)
    begin = time.monotonic()
    if rank == 1:
        with (
            fails(shares, "swap_rows", torch.OutOfMemoryError("no memory left")),
            pytest.raises(torch.OutOfMemoryError),
        ):
            steps(1)
    else:
        with pytest.raises(OtherRankError, match=r"rank 1 failed in call \d+ .*OutOfMemoryError: no memory left"):
            steps(1)
    assert time.monotonic() - begin < WITHIN


@case(2)
def a_message_that_arrives_as_a_wait_ends(group: Any) -> None:
    """By its timeout: this is no failure of the message. It is one if the message fails then."""

    class Late:
        waits = 0

        def __init__(self, fails: bool) -> None:
            self.fails = fails

        def is_completed(self) -> bool:
            return self.waits > 0

        def wait(self, timeout: Any) -> None:
            self.waits += 1
            if self.waits == 1 or self.fails:
                raise RuntimeError("no message in time" if self.waits == 1 else "connection closed")

    tensor, messages = torch.zeros(1), communication.messages_of(group)
    communication._wait(Late(False), tensor, group, messages)
    with pytest.raises(RuntimeError, match="connection closed"):
        communication._wait(Late(True), tensor, group, messages)


@case(2, n_spare=1)
def an_error_between_two_calls(group: Any) -> None:
    """In a block around both of them; errors that all ranks raise alike leave the group in step."""
    steps, rank = Steps(spare.pop()), dist.get_rank(group)

    @fail_together(steps.domain.group)
    def loop(who: Callable[[int], bool]) -> None:
        for step in range(3):
            steps.check(step, steps(step))
            if step == 1 and who(rank):
                raise KeyError("mine")

    for _ in range(2):
        with pytest.raises(KeyError):
            loop(lambda rank: True)
    loop(lambda rank: False)
    if rank == 1:
        with pytest.raises(KeyError):
            loop(lambda rank: rank == 1)
    else:
        soon(lambda: loop(lambda rank: rank == 1), "rank 1 failed in call", "KeyError: 'mine'")


@case(2, n_spare=2)
def an_interrupt_of_dynamics_or_of_a_relaxation(group: Any) -> None:
    """By a signal for rank 0, between two steps."""
    atoms = Atoms(n=3)
    model = SumOfTerms(partial(lennard_jones(3.0), sigma=1.4, epsilon=0.1))

    def interrupt(*_: Any) -> None:
        if dist.get_rank(group) == 0:
            signal.raise_signal(signal.SIGINT)

    for way in (
        lambda system: simulate(system, model, nve(0.01), steps=3, hooks=[interrupt]),
        lambda system: relax(system, model, max_steps=3, fmax=1e-9, hooks=[interrupt]),
    ):
        fresh, mine = spare.pop(), atoms.mine(group)
        divided = Domain(atoms.positions[mine], atoms.cell, cutoff=3.0, skin=0.5, group=fresh)
        system = divided.distribute(System(atoms.positions[mine], cell=atoms.cell, numbers=atoms.numbers[mine]))
        if dist.get_rank(group) == 0:
            with pytest.raises(KeyboardInterrupt):
                way(system)
        else:
            soon(partial(way, system), "rank 0 failed in call", "KeyboardInterrupt")


@case(2, n_spare=1)
def failures_of_a_calculator_on_ranks(group: Any) -> None:
    """An interrupt of rank 0 is an error on the others; an error of these, also between two calls, is one on rank 0."""
    rank, kept = dist.get_rank(group), []
    crystal = ase.build.bulk("NaCl", "rocksalt", a=5.6)

    def energy(calculator: Any, after: Callable[[], None] = lambda: None) -> float:
        atoms = crystal.copy()
        atoms.calc = calculator
        kept.append(atoms)
        atoms.get_potential_energy()
        after()
        atoms.rattle(0.1)
        return atoms.get_potential_energy()

    term = Electrostatics("dsf", CHARGES, cutoff=3.0, alpha=0.2)

    def run(main: Any, group: Any = group) -> Any:
        return on_ranks(main, term, group=group)

    run(energy)
    if rank == 0:  # where it would wait for ranks that do something else
        kept[-1].rattle(0.1, seed=1)
        with pytest.raises(RuntimeError, match="`on_ranks`, which has returned"):
            kept[-1].get_forces()

    def interrupted(calculator: Any) -> Any:
        return energy(calculator, lambda: signal.raise_signal(signal.SIGINT))

    if rank == 0:
        with pytest.raises(KeyboardInterrupt):
            run(interrupted)
    else:
        soon(lambda: run(interrupted), "rank 0 failed: KeyboardInterrupt")
    run(energy)  # they are in step

    fresh = spare.pop()
    if rank == 1:  # after its last message
        with fails(Domain, "gather", None) as gather, pytest.raises(MemoryError):
            gather.side_effect = MemoryError
            run(energy, fresh)
    else:
        soon(lambda: run(energy, fresh), "rank 1 failed in call", "MemoryError")


@case(2)
def terms_that_ranks_cannot_share_are_named(group: Any) -> None:
    """In each calculation, after which the next one is right, also of a slab."""

    def of_all_axes(system: Any) -> Any:
        return system.neighbors(3.0, (True, True, True))

    def one_energy(system: Any) -> Any:
        return Contribution(system.positions.sum(), 0.0 * system.positions, None)

    crystal = ase.build.bulk("NaCl", "rocksalt", a=5.6, cubic=True)
    repulsion = Pair("lennard_jones", sigma=2.5, epsilon=0.1, cutoff=3.0)
    pme = Electrostatics("pme", CHARGES, accuracy=1e-3)
    refused = (
        ((repulsion, Electrostatics("dsf", len, cutoff=3.0, alpha=0.2)), "`charges`: a function"),
        ((Electrostatics("pme", len, accuracy=1e-3), repulsion), "`charges`: a function"),
        ((Pair("lennard_jones", sigma=2.5, epsilon=0.1, cutoff=None), pme), "`cutoff` is needed"),
        ((repulsion, mock.Mock(reach=lambda atoms: 3.0, evaluate=of_all_axes)), "or all axes of a slab"),
        ((repulsion, mock.Mock(reach=lambda atoms: 3.0, evaluate=one_energy)), "a term returned one energy"),
    )
    for terms, text in refused:

        def main(calculator: Any, text: str = text) -> None:
            atoms = crystal.copy()
            atoms.pbc[1:], atoms.calc = "slab" not in text, calculator
            for _ in range(2):
                with pytest.raises(ValueError, match=text):
                    atoms.get_forces()
                atoms.rattle(0.1)

        on_ranks(main, *terms, group=group)

    crystal.rattle(0.1)

    def energies(calculator: Any) -> None:
        atoms, alone = crystal.copy(), crystal.copy()
        atoms.calc, alone.calc = calculator, Calculator(repulsion, pme)
        for height in (5.6, 8.0, 9.0):
            for changed in (atoms, alone):
                changed.cell[2, 2], changed.pbc[2] = height, height == 5.6
            np.testing.assert_allclose(atoms.get_forces(), alone.get_forces(), rtol=0, atol=1e-10)
            assert abs(atoms.get_potential_energy() / alone.get_potential_energy() - 1.0) < 1e-12, height

    on_ranks(energies, repulsion, pme, group=group)
    with pytest.raises(TypeError, match="has no method `reach`"):
        on_ranks(energies, mock.Mock(spec=["evaluate"]), group=group)
