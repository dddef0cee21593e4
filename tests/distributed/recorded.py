"""Cases for several ranks whose steps are recorded (`nvalchemiops.torch.record`). See `ranks.py`."""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from nvalchemiops.torch import RecordingError, record
from nvalchemiops.torch.distributed import Domain, communication, fail_together
from nvalchemiops.torch.distributed.communication import messages_of
from nvalchemiops.torch.interactions.dispersion import d3_dispersion, damping_parameters
from nvalchemiops.torch.interactions.electrostatics import dsf_coulomb, ewald_summation, particle_mesh_ewald
from nvalchemiops.torch.interactions.pair import lennard_jones
from tests.distributed.cases import d3_parameters
from tests.distributed.common import F64, Atoms, case
from tests.distributed.deferred import told
from tests.distributed.faults import soon
from tests.distributed.steps import group_like

CUTOFF, SKIN = 3.0, 0.5


class Divided:
    """Atoms of this rank, which move, and steps that use them."""

    def __init__(self, group: Any, check: Any = "never", owners: Callable[[torch.Tensor], torch.Tensor] | None = None):
        self.atoms, mine = Atoms(n=4), None
        mine = self.atoms.mine(group)
        self.domain = Domain(
            self.atoms.positions[mine], self.atoms.cell, cutoff=CUTOFF, skin=SKIN, group=group, check=check
        )
        self.x, self.q = (self.domain.distribute(v[mine]) for v in (self.atoms.positions, self.atoms.charges))
        self.numbers = self.atoms.numbers[self.domain.global_index]

    def at(self, step: int) -> torch.Tensor:
        """Positions in a step; only atoms of rank 0 stay between the first two steps."""
        number = self.domain.global_index.to(F64).unsqueeze(1)
        return self.x + 0.1 * torch.sin(step * number + torch.arange(3.0, dtype=F64))

    def pair(self, x: torch.Tensor) -> Any:
        where = {"sigma": 1.4, "epsilon": 0.1, "domain": self.domain}
        return lennard_jones(CUTOFF)(x, self.atoms.cell, compute_forces=True, compute_virial=True, **where)

    def ewald(self, x: torch.Tensor) -> Any:
        options = {"k_cutoff": 5.0, "cutoff": CUTOFF, "compute_forces": True, "domain": self.domain}
        return ewald_summation(x, self.q, self.atoms.cell, 0.7, **options)

    def energies(self, x: torch.Tensor) -> torch.Tensor:
        options = {"mesh_dimensions": (8, 9, 10), "cutoff": CUTOFF, "domain": self.domain}
        return particle_mesh_ewald(x, self.q, self.atoms.cell, 0.7, **options)

    def pme(self, x: torch.Tensor) -> Any:
        options = {"mesh_dimensions": (8, 9, 10), "cutoff": CUTOFF, "compute_forces": True, "domain": self.domain}
        return particle_mesh_ewald(x, self.q, self.atoms.cell, 0.7, **options)

    def d3(self, x: torch.Tensor) -> Any:
        options = {"cutoff": CUTOFF, "compute_forces": True, "compute_virial": True, "domain": self.domain}
        return d3_dispersion(x, self.numbers, damping_parameters("pbe"), d3_parameters(), self.atoms.cell, **options)

    def gradients(self, x: torch.Tensor) -> Any:
        """Energies with a backward pass, and a second derivative."""
        x = x.detach().requires_grad_()
        energy = self.domain.sum(self.energies(x).sum())
        (plain,) = torch.autograd.grad(energy, x)
        charges = torch.tanh(self.domain.with_ghosts(x)[: self.domain.n_owned, 0])
        square = self.domain.sum((charges * self.energies(x)).square().sum())
        (first,) = torch.autograd.grad(square, x, create_graph=True)
        return energy.detach(), plain, *torch.autograd.grad(self.domain.sum(first.square().sum()), x)


STEPS = ("pair", "ewald", "pme", "d3", "gradients")


def sent(group: Any, call: Callable[[], Any]) -> tuple[Any, list[Any]]:
    """What a call returns, and what it sends: calls, messages, scopes, and what messages are, by the last of them."""
    here = messages_of(group)
    before = here.calls, here.count, here.scope
    found = call()
    recent = [(kind, calls - before[0]) for number, kind, calls, _ in here._recent if number > before[1]]
    return found, [here.calls - before[0], here.count - before[1], here.scope - before[2], *recent]


def same(found: Any, expected: Any) -> bool:
    return all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


@case(2, 3)
def recorded_steps_have_the_same_bits(group: Any) -> None:
    """And the same messages and counts; ledgers find the same, whether ranks never compare or later."""
    for check in ("never", "later", 3):
        ordinary, divided = Divided(group, check), Divided(group, check)
        for name in STEPS:
            step = record(getattr(divided, name))
            for number in range(5):
                x = divided.at(number // 2)
                expected, messages = sent(group, partial(getattr(ordinary, name), x))
                found, others = sent(group, partial(step, x))
                assert same(found, expected), (check, name, number)
                assert messages == others and messages[1], (check, name, number, messages, others)
            assert "last call: replayed. Calls: 1 recorded, 3 replayed, 1 ordinary" in step.explain(), step.explain()
        assert divided.domain.settle() == ordinary.domain.settle(), check
