"""Cases for several ranks that are out of step, because one was interrupted or has left out a call. See `ranks.py`."""

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import ase.build
import pytest
import torch
import torch.distributed as dist

from nvalchemiops.ase import Electrostatics, on_ranks
from nvalchemiops.torch import checks
from nvalchemiops.torch.distributed import Domain, OtherRankError, communication, transform
from nvalchemiops.torch.distributed.agreement import Agreement
from nvalchemiops.torch.distributed.communication import messages_of
from nvalchemiops.torch.interactions.electrostatics import ewald_summation, particle_mesh_ewald
from nvalchemiops.torch.interactions.pair import shares
from tests.distributed.common import F64, Atoms, assert_equal, case, spare

SOON = 60.0
"""Seconds in which ranks learn that they are out of step: some, and more where many processes share a core."""


class Steps:
    """Calls with positions that differ from step to step, on the ranks of a group and on one process."""

    def __init__(self, group: Any) -> None:
        self.atoms = Atoms(n=3)
        mine = self.atoms.mine(group)
        self.domain = Domain(self.atoms.positions[mine], self.atoms.cell, cutoff=3.0, skin=0.5, group=group)
        self.charges = self.domain.distribute(self.atoms.charges[mine])

    def positions(self, step: int) -> torch.Tensor:
        return self.atoms.positions + 0.05 * torch.sin(step + torch.arange(81.0, dtype=F64).reshape(27, 3))

    def call(self, x: torch.Tensor, q: torch.Tensor, **options: Any) -> torch.Tensor:
        return particle_mesh_ewald(x, q, self.atoms.cell, 0.7, cutoff=3.0, mesh_dimensions=(8, 9, 10), **options)

    def __call__(self, step: int) -> torch.Tensor:
        return self.call(self.positions(step)[self.domain.global_index], self.charges, domain=self.domain)

    def check(self, step: int, found: torch.Tensor) -> None:
        expected = self.call(self.positions(step), self.atoms.charges)
        assert_equal(found, expected[self.domain.global_index], step)


@contextlib.contextmanager
def interrupted(at: Any, name: str, first: bool = True) -> Iterator[None]:
    """A rank is interrupted where it calls this function, before or after it, and its program goes on."""
    function = getattr(at, name)

    def interrupt(*given: Any, **options: Any) -> None:
        if not first:
            function(*given, **options)
        raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt), mock.patch.object(at, name, interrupt):
        yield
        raise AssertionError("not interrupted")


class Finished(AssertionError):
    """A call did not raise."""


def raises(call: Callable[[], Any], *texts: str) -> None:
    """Raise unless the call ends soon with an `OtherRankError` with these words."""
    begin = time.monotonic()
    with mock.patch.object(communication, "LOOK", timedelta(seconds=0.1)):
        try:
            call()
        except OtherRankError as error:
            assert all(text in str(error) for text in texts), error
        else:
            raise Finished(texts)
    assert time.monotonic() - begin < SOON


@case(3)
def an_interrupt_while_a_rank_checks_arguments(group: Any) -> None:
    """The others learn it, and all go on in step."""
    steps, rank = Steps(group), dist.get_rank(group)
    if rank == 1:
        with interrupted(checks, "check_positions"):
            steps(1)
    else:
        raises(lambda: steps(1), "rank 1 failed: KeyboardInterrupt")
    steps.check(2, steps(2))


@case(3, n_spare=3)
def an_interrupt_between_two_messages(group: Any) -> None:
    """Ranks that wait for different messages find it, and go on with a new group."""
    for first, name in ((True, "swap_rows"), (False, "swap_rows")):
        steps, rank = Steps(spare.pop()), dist.get_rank(group)
        if rank == 1:
            with interrupted(transform, name, first):
                steps(1)
        else:
            # a rank that needs nothing more of rank 1 finishes this call, and finds out in the next one
            may_finish = dist.get_world_size(group) > 3 and rank not in (0, 2)
            with contextlib.suppress(Finished) if may_finish else contextlib.nullcontext():
                raises(
                    lambda steps=steps: steps.check(1, steps(1)),
                    "out of step",
                    "rank 1 failed in call",
                    "KeyboardInterrupt",
                    "new_group",
                )
        raises(lambda steps=steps: steps(2), "out of step", "rank 1 failed in call", "new_group")
    steps = Steps(spare.pop())
    steps.check(3, steps(3))


@case(2, n_spare=1)
def an_interrupt_of_a_rank_that_waits(group: Any) -> None:
    steps, rank = Steps(spare.pop()), dist.get_rank(group)
    if rank == 1:
        with interrupted(communication, "_wait", False):
            steps(1)
    else:
        raises(lambda: steps(1), "KeyboardInterrupt ended what ranks agree on", "on rank 1")
    raises(lambda: steps(2), "KeyboardInterrupt ended what ranks agree on", "on rank 1")


@case(2, n_spare=1)
def a_backward_pass_that_one_rank_leaves_out(group: Any) -> None:
    steps = Steps(spare.pop())
    x = steps.domain.distribute(steps.atoms.positions[steps.atoms.mine(group)]).requires_grad_()

    def step() -> None:
        loss = steps.domain.sum(steps.call(x, steps.charges, domain=steps.domain).sum())
        if dist.get_rank(group) == 0:
            loss.backward()
        steps.domain.sum(loss.detach())

    raises(step, "out of step", "a maximum of ", "what ranks agree on in call")


@case(2, n_spare=1)
def a_calculation_that_is_interrupted(group: Any) -> None:
    """Ranks that serve a calculator on rank 0 do not wait for it."""
    group = spare.pop()

    def main(calculator: Any) -> None:
        crystal = ase.build.bulk("NaCl", "rocksalt", a=5.6)
        crystal.calc = calculator
        crystal.get_potential_energy()
        with mock.patch.object(shares, "swap_rows", side_effect=KeyboardInterrupt):
            crystal.rattle(0.1)
            crystal.get_potential_energy()

    def call() -> None:
        on_ranks(main, Electrostatics("dsf", {"Na": 1.0, "Cl": -1.0}, cutoff=3.0, alpha=0.2), group=group)

    if dist.get_rank(group) == 0:
        with pytest.raises(KeyboardInterrupt):
            call()
    else:
        raises(call, "out of step", "what a rank tells in call", "on rank 0")


@case(2)
def calls_are_counted(group: Any) -> None:
    """A call that one rank has begun and not told of is an error on the others; it waits for them in its next one."""
    steps = Steps(group)
    with contextlib.ExitStack() as stack:
        if dist.get_rank(group) == 1:
            stack.enter_context(interrupted(Agreement, "__exit__"))
        else:
            stack.enter_context(pytest.raises(OtherRankError, match=r"out of step.*steps\.py.*on rank 0.*on rank 1"))
        steps(1)
    steps.check(2, steps(2))


@case(2)
def messages_are_counted(group: Any) -> None:
    """Those that one rank leaves out in a backward pass are found in the next call at the latest."""
    steps = Steps(group)
    messages_of(group).count += dist.get_rank(group)
    raises(lambda: steps(1), "out of step", "steps.py", "on rank 0", "on rank 1", "From here on they are in step")
    steps.check(2, steps(2))


@case(2)
def a_sum_that_one_rank_leaves_out(group: Any) -> None:
    """Who sums different things by the same call is warned on all ranks, with the lines."""
    domain, rank = Steps(group).domain, dist.get_rank(group)
    found: list[torch.Tensor] = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if rank != 0:
            found.append(domain.sum(torch.tensor(100.0)))
        found.append(domain.sum(torch.tensor(1000.0)))
        if rank == 0:
            found.append(domain.sum(torch.tensor(10000.0)))
    assert len(warned) == 2 and all("different places: steps.py:" in str(one.message) for one in warned)
    assert "on rank 0" in str(warned[0].message) and "on rank 1" in str(warned[0].message)


@case(2)
def calls_from_one_line_or_by_the_library_are_no_mistake(group: Any) -> None:
    steps, rank = Steps(group), dist.get_rank(group)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            assert steps.domain.sum(torch.ones(()) if rank else torch.zeros(())) == dist.get_world_size(group) - 1
        ewald_summation(
            steps.positions(0)[steps.domain.global_index], steps.charges, steps.atoms.cell, 0.7, k_cutoff=2.0,
            domain=steps.domain,
        )  # fmt: skip


@case(3, n_spare=1)
def ranks_that_fail_one_after_the_other_are_named(group: Any) -> None:
    group, rank = spare.pop(), dist.get_rank(group)
    store, numbers = group.get_group_store(), dist.get_process_group_ranks(group)
    dist.barrier(group)  # some ranks have this case in smaller groups before
    # more ranks than cores come later
    with mock.patch.object(communication, "PATIENCE", 0.5 * len(numbers)):
        if rank != len(numbers) - 1:
            assert communication._gone(group) == numbers[-1:]
        if rank == 0:
            assert communication._gone(group) == numbers[1:]
            store.set("done", "yes")
    store.wait(["done"])
