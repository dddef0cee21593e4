"""Ranks with random faults: ``python -m tests.distributed.soak RANK COUNT FOLDER STEPS [SEED]``.

Each step is a step of training or of dynamics, with a fault of one rank in one of three: after it, all ranks have an
error within seconds, agree whether they need a new group, and go on. Results of steps without faults are those of one
process.
"""

import datetime
import random
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from nvalchemiops.torch import checks
from nvalchemiops.torch.distributed import OtherRankError, collectives, communication, fail_together, ranks, transform
from nvalchemiops.torch.distributed.agreement import Agreement
from nvalchemiops.torch.interactions.electrostatics import sums
from nvalchemiops.torch.interactions.pair import shares
from tests.distributed.common import assert_equal
from tests.distributed.ranks import start
from tests.distributed.steps import SOON, Steps

NO_MEMORY, INTERRUPT, BAD = torch.OutOfMemoryError("no memory left"), KeyboardInterrupt(), ValueError("bad values")
PLACES: tuple[tuple[Any, str], ...] = (
    (checks, "check_positions"),
    (Agreement, "_conclude"),
    (communication, "_wait"),
    (shares, "group_of"),
    (shares, "swap_rows"),
    (transform, "swap_rows"),
    (collectives, "add"),
    (ranks, "carried"),
    (sums, "complete"),
    (torch.Tensor, "backward"),
    (time, "sleep"),
)
"""Where ranks fail: before, in and between messages, in backward passes and in code of the user."""


def failing(at: Any, name: str, error: BaseException, after: int) -> Any:
    """This rank fails where it calls this function, after some calls."""
    function, count = getattr(at, name), [0]

    def called(*given: Any, **options: Any) -> Any:
        count[0] += 1
        if count[0] > after:
            raise error
        return function(*given, **options)

    return mock.patch.object(at, name, called)


def step(steps: Steps, number: int) -> None:
    """Energies and gradients of positions that all ranks know, compared with those of one process."""
    with fail_together(steps.domain.group):
        mine = steps.domain.global_index
        x = steps.positions(number)[mine].requires_grad_()
        found = steps.call(x, steps.charges, domain=steps.domain)
        time.sleep(0.0)
        steps.domain.sum(found.sum()).backward()
        if number % 4 == 0:  # divided twice: there and back
            away, there, charges = steps.domain.follow(x.detach() + 0.3, steps.charges)
            steps.domain, _, steps.charges = away.follow(there - 0.3, charges)
    if number % 10 == 0:
        whole = steps.positions(number).requires_grad_()
        steps.call(whole, steps.atoms.charges).sum().backward()
        assert_equal(x.grad, whole.grad[mine], number)


def run(n_steps: int, seed: int, new_group: Callable[[], Any]) -> dict[str, int]:
    """Make these steps, and count how they ended on this rank."""
    rank, chance = dist.get_rank(), random.Random(seed)
    steps, ends = Steps(new_group()), {"right": 0, "failed": 0, "other failed": 0, "new groups": 0}
    for number in range(n_steps):
        has_fault, victim = chance.random() < 1 / 3, chance.randrange(dist.get_world_size())
        (at, name), after = chance.choice(PLACES), chance.randrange(3)
        error = chance.choice((NO_MEMORY, INTERRUPT, BAD))
        begin, how = time.monotonic(), "right"
        try:
            if has_fault and rank == victim:
                with failing(at, name, error, after):
                    step(steps, number)
            else:
                step(steps, number)
        except OtherRankError:
            how = "other failed"
        except type(error) as found:
            assert found is error and rank == victim, found
            how = "failed"
        assert time.monotonic() - begin < SOON, (number, at, name, time.monotonic() - begin)
        ends[how] += 1
        hows: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(hows, how)
        assert has_fault or set(hows) == {"right"}, (number, hows)
        # of a fault after the last message of a step others know nothing, until here
        if set(hows) != {"right"}:
            ends["new groups"] += 1
            steps = Steps(new_group())
    return ends


if __name__ == "__main__":
    rank, count, folder, n_steps = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    seed = int(sys.argv[5]) if len(sys.argv) > 5 else 1
    torch.set_num_threads(1)
    start(rank, count, folder)
    timeout = datetime.timedelta(seconds=300)
    quick: dict[str, Any] = {"LOOK": datetime.timedelta(seconds=0.05), "PATIENCE": 0.1}
    with mock.patch.multiple(communication, **quick):
        print(run(n_steps, seed, lambda: dist.new_group(range(count), timeout=timeout)))
    dist.destroy_process_group()
