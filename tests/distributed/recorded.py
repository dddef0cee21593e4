"""Cases for several ranks whose steps are recorded (`nvalchemiops.torch.record`). See `ranks.py`."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from nvalchemiops.layout import CPU, replaced_layout
from nvalchemiops.torch import RecordingError, System, record
from nvalchemiops.torch.distributed import Domain, divide, fail_together, ledger
from nvalchemiops.torch.distributed.communication import messages_of
from nvalchemiops.torch.dynamics import SumOfTerms, nve, simulate
from nvalchemiops.torch.interactions.dispersion import d3_dispersion, damping_parameters
from nvalchemiops.torch.interactions.electrostatics import dsf_coulomb, ewald_summation, particle_mesh_ewald
from nvalchemiops.torch.interactions.pair import lennard_jones
from nvalchemiops.torch.runtime import graphs
from tests.distributed.common import F64, Atoms, case, chosen, spare
from tests.distributed.deferred import told
from tests.distributed.faults import soon
from tests.support.molecules import parameters as d3_parameters

CUTOFF, SKIN = 3.0, 0.5


class Divided:
    """Atoms of this rank, which move, and steps that use them."""

    def __init__(self, group: Any, check: Any = "never") -> None:
        self.atoms = Atoms(n=4)
        mine = self.atoms.mine(group)
        options = {"cutoff": CUTOFF, "skin": SKIN, "group": group, "check": check}
        self.domain = Domain(self.atoms.positions[mine], self.atoms.cell, **options)
        self.x, self.q = (self.domain.distribute(v[mine]) for v in (self.atoms.positions, self.atoms.charges))
        self.numbers = self.atoms.numbers[self.domain.global_index]

    def at(self, step: int) -> torch.Tensor:
        """Positions in a step."""
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

    def d3(self, x: torch.Tensor, tables: Any = None) -> Any:
        options = {"cutoff": CUTOFF, "compute_forces": True, "compute_virial": True, "domain": self.domain}
        tables = tables or d3_parameters()
        return d3_dispersion(x, self.numbers, damping_parameters("pbe"), tables, self.atoms.cell, **options)

    def prepared_d3(self, x: torch.Tensor) -> Any:
        return self.d3(x, STATES)

    def gradients(self, x: torch.Tensor) -> Any:
        """Energies with a backward pass, and a second derivative."""
        x = x.detach().requires_grad_()
        energy = self.domain.sum(self.energies(x).sum())
        (plain,) = torch.autograd.grad(energy, x)
        charges = torch.tanh(self.domain.with_ghosts(x)[: self.domain.n_owned, 0])
        square = self.domain.sum((charges * self.energies(x)).square().sum())
        (first,) = torch.autograd.grad(square, x, create_graph=True)
        return energy.detach(), plain, *torch.autograd.grad(self.domain.sum(first.square().sum()), x)


STATES = d3_parameters().states([1, 6, 8])
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
    for check in ("later",) if chosen["which"] == "few" else ("never", "later", 3):
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


@case(3)
def ranks_that_replay_beside_ranks_that_do_not(group: Any) -> None:
    """Each rank on its own: it may record again, compare with the function, or call it."""
    rank = dist.get_rank(group)
    for check in ("never", 2):
        ordinary, divided = Divided(group, check), Divided(group, check)
        for name in STEPS:
            plain, step = getattr(divided, name), record(getattr(divided, name))
            for number in range(8):
                x = divided.at(number if rank else 0)  # rank 0 never sees other positions: it compares nothing
                ways = (step, plain) if number % 3 != rank else (plain, step)
                if (number + rank) % 4 == 3:
                    step.clear()
                expected = getattr(ordinary, name)(x)
                assert same(ways[0](x), expected), (check, name, number)
            assert step._counts["replayed"] >= 1, step.explain()
        assert divided.domain.settle() == ordinary.domain.settle(), check


@case(3, n_spare=2)
def a_rank_that_fails_in_a_replay_is_named(group: Any) -> None:
    """By lack of memory before a message, while others replay or call the function; then ranks need a new group."""
    rank = dist.get_rank(group)
    for others_replay in (True, False):
        fresh = spare.pop()
        divided = Divided(fresh)
        step = record(divided.pme)
        for number in range(3):
            step(divided.at(number))
        assert "replayed" in step.explain().split(".")[0]
        x = divided.at(3)
        if rank == 1:
            plan = next(iter(step._kinds.values())).recording.plan

            def fail() -> None:
                raise torch.OutOfMemoryError("no memory left")

            plan.steps.insert(len(plan.steps) // 2, fail)
            with pytest.raises(torch.OutOfMemoryError):
                step(x)
        else:
            soon(
                partial(step if others_replay else divided.pme, x), "rank 1 failed in call", "OutOfMemoryError: no mem"
            )
        soon(partial(step, x), "out of step", "new_group")


@case(2)
def ranks_go_on_after_errors_of_all(group: Any) -> None:
    """The call after them agrees as without recordings, and is not recorded; then plans are used again."""
    for n_before in (0, 3):
        ordinary, divided = Divided(group), Divided(group)
        step = record(divided.pme)
        for number in range(n_before):
            step(divided.at(number))
        with pytest.raises(KeyError), fail_together(group):
            raise KeyError("on all ranks")
        assert same(step(divided.at(4)), ordinary.pme(divided.at(4)))
        assert "last call: ordinary" in step.explain() and "after an error" in step.explain(), step.explain()
        for number in range(5, 8):
            assert same(step(divided.at(number)), ordinary.pme(divided.at(number)))
        assert "last call: replayed" in step.explain()


@case(2, n_spare=1)
def faults_of_a_replay_are_errors(group: Any) -> None:
    """Another call cannot repeat the error in place of the plan, which has sent its messages. The others learn it."""
    divided, rank = Divided(spare.pop()), dist.get_rank(group)
    step = record(divided.pair)
    for number in range(3):
        step(divided.at(number))
    if rank == 1:  # its list gets an atom that does not exist
        divided.domain._found_rows(CUTOFF).alone.neighbors[0] = 10**6
        with pytest.raises(ValueError, match="raises or warns for these values"):
            step(divided.at(3))
    else:
        soon(lambda: step(divided.at(3)), "rank 1 failed in call", "raises or warns")


@case(2, 3)
def a_new_division_is_recorded_again(group: Any) -> None:
    """With the domain as an argument, or as a variable of the function, although all sizes are the same."""
    for raises in (False, True):
        divided = Divided(group)

        # B023: functions take the variables of the turn of the loop in which they are called, and are not kept after it
        @record
        def of_argument(x: torch.Tensor, q: torch.Tensor, domain: Domain) -> Any:
            return dsf_coulomb(x, q, CUTOFF, 0.2, divided.atoms.cell, compute_forces=True, domain=domain)  # noqa: B023

        # `domain` is the variable that changes below, which is what this tests
        of_variable = record(lambda x: domain.with_ghosts(x), if_changed="raise" if raises else "record")  # noqa: B023
        domain, x, q = divided.domain, divided.x, divided.q
        for number in range(8):
            new = domain
            if number == 4:  # by half of the cell, so that as many atoms go to a rank as leave it
                new, x, q = domain.follow(x + torch.tensor([3.2, 0.0, 0.0], dtype=F64), q)
            assert (new is domain) == (number != 4)
            assert domain.n_ranks > 2 or (new.n_owned, new.n_ghosts) == (domain.n_owned, domain.n_ghosts)
            domain = new
            expected = dsf_coulomb(x, q, CUTOFF, 0.2, divided.atoms.cell, compute_forces=True, domain=domain)
            assert same(of_argument(x, q, domain), expected), number
            if raises and number >= 4:
                if x.shape == divided.x.shape:
                    with pytest.raises(RecordingError, match="tensors that have changed since"):
                        of_variable(x)
                break
            assert torch.equal(of_variable(x), domain.with_ghosts(x)), number
        else:
            assert of_argument._counts["recorded"] == of_variable._counts["recorded"] == 2
            assert len(of_argument._kinds) == 1, "none of a domain that was left"
            assert of_argument._counts["replayed"] >= 5
            # another domain of the same sizes, in the same variable
            domain = Domain(domain.gather(x), divided.atoms.cell, cutoff=CUTOFF, skin=SKIN, group=group, check="never")
            of_variable(domain.distribute(new.gather(x)))
            assert of_variable._counts["recorded"] == 3


@case(2)
def what_ranks_find_in_replays_is_told(group: Any) -> None:
    """Atoms that have moved too far, a cell that differs, arguments: as of ordinary calls, by the line of the call."""
    there = dist.get_rank(group) == 1
    for check in ("later", "never"):
        divided = Divided(group, check)

        # B023: it is called in this turn of the loop only
        @record
        def step(x: torch.Tensor, cell: torch.Tensor, alpha: float = 0.2) -> Any:
            return dsf_coulomb(x, divided.q, CUTOFF, alpha, cell, domain=divided.domain)  # noqa: B023

        cell = divided.atoms.cell
        for number in range(3):
            step(divided.at(number), cell)
        divided.domain.settle()
        step(divided.x + 0.3 * there, cell)
        with pytest.raises(ValueError, match=r"moved by 0\.51\d*, .* in call \d+ \(recorded\.py:\d+\), whose results"):
            step(divided.x, cell)
            divided.domain.settle()
        step(divided.x, cell)  # they agree
        assert divided.domain.settle().wrong == 0
        step(divided.x, cell + 1e-12 * there)
        with pytest.raises(ValueError, match="values of a tensor on the device"):
            step(divided.x, cell)
            divided.domain.settle()
        step(divided.x, cell)
        step(divided.x, cell, **({"alpha": 0.3} if there else {}))  # recorded on one rank, and replayed on the other
        with pytest.raises(ValueError, match=r"`alpha` in call .* must be the same on all ranks"):
            step(divided.x, cell)
            divided.domain.settle()
    divided = Divided(group)
    step = record(Divided(group, "each").pme)
    with pytest.raises(RecordingError, match=r'ranks compare arguments .* check="later", outside of the function'):
        step(divided.x)
    assert "not recorded: ranks compare" in step.explain()


@case(2)
def dynamics_with_a_recorded_model(group: Any) -> None:
    """The trajectory has the same bits; each division of the atoms is recorded, and replayed while it lasts.

    Excluded pairs are distributed again in the first call with a new division.
    """
    atoms, pairs = Atoms(n=4), torch.arange(64).reshape(2, 32)
    found, domains = [], set()
    for is_recorded in (False, True):
        whole = System(atoms.positions, cell=atoms.cell, numbers=atoms.numbers)
        system = divide(whole, cutoff=CUTOFF, skin=SKIN, group=group, check="later")
        assert system.domain is not None
        velocities, excluded = atoms.vectors[system.domain.global_index], system.domain.distribute_pairs(pairs)
        model = SumOfTerms(partial(lennard_jones(CUTOFF), sigma=1.4, epsilon=0.1, exclusions=excluded))
        step = record(model)
        hooks = [lambda state: domains.add(state.system.domain)] if is_recorded else []
        run = simulate(system, step if is_recorded else model, nve(0.004), steps=60, velocities=velocities, hooks=hooks)
        found.append(run.state.system.positions)
    assert torch.equal(*found)
    assert step._counts["recorded"] == len(domains) > 1, (step.explain(), len(domains))
    assert step._counts["replayed"] > 30, step.explain()


@case(3)
def ranks_without_atoms_send_in_replays(group: Any) -> None:
    """And those whose share never changes: messages do not depend on what a rank has."""
    rank, cell = dist.get_rank(group), 12.0 * torch.eye(3, dtype=F64)
    positions = torch.tensor([[1.0, 2.0, 3.0], [2.1, 2.0, 3.0]], dtype=F64)[: 2 * (rank == 0)]
    domain = Domain(positions, cell, cutoff=CUTOFF, skin=SKIN, group=group, check="never")
    assert 0 in told(domain.n_owned, group) or dist.get_world_size(group) < 3  # two atoms, one each
    own, potential = domain.distribute(positions), lennard_jones(CUTOFF)

    def step(x: torch.Tensor) -> Any:
        found = potential(x, cell, sigma=1.0, epsilon=0.1, compute_forces=True, domain=domain)
        share = torch.full((1,), 1.0 + rank, dtype=F64) if rank else x.sum().reshape(1) + 0.0
        return *found, domain.sum(found[0].sum()), domain.sum(share)

    recorded = record(step)
    for number in range(4):
        x = own + 0.05 * number
        assert same(recorded(x), step(x)), number
    assert recorded._counts["recorded"] == 1


@case(2)
def what_a_captured_step_counts(group: Any) -> None:
    """On a GPU a graph holds the messages, and the host counts them in each replay: with a stand-in for graphs."""
    divided, ordinary = Divided(group), Divided(group)

    class Graph:  # a replay calls the function once more, since these messages are no operations
        n_bytes, reason = 0, ""

        def __init__(self, device: torch.device) -> None:
            self.device = device

        def captured(self, function: Any, memory: Any, may_repeat: bool) -> Any:  # a capture runs nothing on the device
            self.call, self.grad = partial(function, memory), torch.is_grad_enabled()
            state = divided.domain._ledger._state
            before = state.clone()
            self.results = self.call()
            state.copy_(before)
            return self.results

        def replay(self) -> None:
            with torch.set_grad_enabled(self.grad):
                values = self.call()
            with torch.no_grad():
                for result, value in zip(self.results, values):
                    result.copy_(value)

    with (
        replaced_layout("cpu", CPU._replace(reads=False, serial=False)),
        mock.patch.object(graphs, "Graph", Graph),
        mock.patch.object(graphs, "obstacle", lambda device: ""),
    ):
        for name in ("pair", "pme", "prepared_d3", "gradients"):
            step = record(getattr(divided, name))
            getattr(divided, name)(divided.at(0))
            getattr(ordinary, name)(divided.at(0))
            for number in range(4):
                expected, messages = sent(group, partial(getattr(ordinary, name), divided.at(number)))
                found, others = sent(group, partial(step, divided.at(number)))
                assert same(found, expected), (name, number)
                assert messages[:3] == others[:3], (name, number, messages, others)
            assert "last call: replayed. Calls: 1 recorded, 3 replayed, 0 ordinary" in step.explain(), step.explain()
        assert divided.domain.settle() == ordinary.domain.settle()
        later = Divided(group, "later")
        step = record(later.pair)
        with mock.patch.object(ledger, "is_capturing", lambda: True), pytest.raises(ValueError, match="is captured"):
            step(later.at(0))
