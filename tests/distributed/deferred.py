"""Cases for several ranks that compare later, or when they are asked (``check``). See `ranks.py`."""

import contextlib
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from nvalchemiops.layout import CPU, replaced_layout
from nvalchemiops.torch import System
from nvalchemiops.torch.distributed import Domain, communication, ledger
from nvalchemiops.torch.dynamics import SumOfTerms, nve, simulate
from nvalchemiops.torch.interactions.dispersion import d3_dispersion, damping_parameters
from nvalchemiops.torch.interactions.electrostatics import dsf_coulomb, particle_mesh_ewald
from nvalchemiops.torch.interactions.pair import lennard_jones
from tests.distributed.agreement import messages
from tests.distributed.common import F64, Atoms, assert_equal, case, spare
from tests.distributed.faults import soon
from tests.support.molecules import parameters as d3_parameters

SKIN = 0.5
STATES = d3_parameters().states([1, 6, 8])


class Divided:
    """Atoms of this rank, and sums of them."""

    def __init__(self, group: Any, **options: Any) -> None:
        self.atoms = Atoms(n=3)
        mine = self.atoms.mine(group)
        self.domain = Domain(self.atoms.positions[mine], self.atoms.cell, cutoff=3.0, skin=SKIN, group=group, **options)
        self.x = self.domain.distribute(self.atoms.positions[mine])
        self.q = self.domain.distribute(self.atoms.charges[mine])

    def dsf(self, shift: float = 0.0, alpha: float = 0.2, **options: Any) -> Any:
        return dsf_coulomb(self.x + shift, self.q, 3.0, alpha, self.atoms.cell, domain=self.domain, **options)

    def d3(self) -> Any:
        numbers = self.atoms.numbers[self.domain.global_index]
        options = {"cutoff": 3.0, "compute_forces": True, "domain": self.domain}
        return d3_dispersion(self.x, numbers, damping_parameters("pbe"), STATES, self.atoms.cell, **options)

    def pme(self, x: torch.Tensor, cell: torch.Tensor) -> torch.Tensor:
        return particle_mesh_ewald(x, self.q, cell, 0.7, cutoff=3.0, mesh_dimensions=(8, 9, 10), domain=self.domain)

    def gradients(self, pme: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Two derivatives, in a cell that is strained."""
        x = self.x.clone().requires_grad_()
        cell = (1.01 * self.atoms.cell).requires_grad_()
        first = torch.autograd.grad(self.domain.sum(pme(1.01 * x, cell).square().sum()), (x, cell), create_graph=True)
        size = self.domain.sum(first[0].square().sum()) + first[1].square().sum()
        return *first, *torch.autograd.grad(size, (x, cell))


@case(3)
def results_do_not_depend_on_when_ranks_compare(group: Any) -> None:
    """Results and derivatives have the same bits; only messages are fewer."""
    expected = None
    for check, n_compared in (("each", 3), ("later", 3), (3, 1), ("never", 0)):
        atoms = Divided(group, check=check)
        found = (*atoms.dsf(compute_forces=True), *atoms.gradients(atoms.pme))
        sent = messages(lambda atoms=atoms: [atoms.dsf() for _ in range(3)])
        assert sent.count("batch_isend_irecv") == 3, "ghosts"
        assert sent.count("all_gather") == (3 if check == "each" else 0), sent
        assert sent.count("all_gather") + sent.count("all_reduce") - 3 == n_compared, (check, sent)
        assert atoms.domain.settle().wrong == 0
        expected = expected or found
        assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True)), check


@case(2)
def new_tensors_may_have_another_default_device(group: Any) -> None:
    """One without memory, where a tensor that is made by mistake is an error."""
    here = dist.get_rank(group) == 0
    held = Atoms(n=3).positions[: None if here else 0]
    own = torch.zeros(len(held), dtype=torch.int32) if here else None  # a rank without atoms needs none
    atoms, expected = Divided(group, check="later"), Divided(group).dsf()
    with torch.device("meta"):
        found = atoms.dsf()
        assert atoms.domain.settle().wrong == 0
        assert Domain(held, cutoff=3.0, batch_idx=own, group=group).n_systems == 1
    assert_equal(found[0], expected[0], "energies")


@case(2)
def rows_go_through_the_host(group: Any) -> None:
    """As those of a GPU with gloo, which takes the memory of any tensor for that of the host."""
    places = [torch.device(name) for name in ("cpu", "cuda")]
    assert [communication._goes_through_host(group, place) for place in places] == [False, True]
    direct = Divided(group)
    expected = (*direct.dsf(), *direct.gradients(direct.pme))
    with mock.patch.object(communication, "_goes_through_host", lambda *_: True):
        atoms = Divided(group, check="later")
        for found, same in zip((*atoms.dsf(), *atoms.gradients(atoms.pme)), expected, strict=True):
            assert_equal(found, same, "results")


@case(3)
def atoms_that_have_moved_too_far_are_told_later(group: Any) -> None:
    """By the atoms of one rank, in one call; the error names this call, on all ranks, and calls after it are right."""
    for check, n_calls in (("later", 1), (3, 3)):
        atoms = Divided(group, check=check)
        for _ in range(2 * n_calls - 1):
            atoms.dsf()
        far = 0.3 if dist.get_rank(group) == 1 else 0.0
        atoms.dsf(far)  # in the last call before ranks compare, or in the one after that
        with pytest.raises(ValueError, match=r"moved by 0\.51\d*, .* in call \d+ \(deferred\.py:\d+\), whose results"):
            for _ in range(2 * n_calls):
                atoms.dsf()
        assert atoms.domain.settle().wrong == 0
    with pytest.raises(ValueError, match="moved by inf"):
        atoms.dsf(torch.nan if far else 0.0)
        atoms.domain.settle()
    whole = dsf_coulomb(atoms.atoms.positions, atoms.atoms.charges, 3.0, 0.2, atoms.atoms.cell)[0]
    assert_equal(atoms.dsf()[0], whole, "afterwards")


@case(2)
def ranks_that_never_compare_can_be_asked(group: Any) -> None:
    """How many calls were wrong, and which one first."""
    atoms = Divided(group, check="never")
    far = 0.3 if dist.get_rank(group) == 1 else 0.0
    for shift in (0.0, 0.1, far, 0.0, far, 2.0 * far):
        atoms.dsf(shift)
    found = atoms.domain.settle(raises=False)
    assert found[:3] == (6, 3, 3), found
    assert abs(found.largest - 0.6 * 3.0**0.5) < 1e-12
    assert atoms.domain.settle() == ledger.Found(0, 0, 0, 0.0)
    atoms.dsf(far)
    strained = 1.2 * atoms.atoms.cell  # takes more than the skin
    dsf_coulomb(1.2 * atoms.x, atoms.q, 3.0, 0.2, strained, domain=atoms.domain)
    with pytest.raises(ValueError, match=r"in call \d+ \(deferred\.py:\d+\), and in 1 later ones"):
        atoms.domain.settle()
    # follow reads what is left; the first one, which knows no motion, decides at once
    away = 0.3 if far else 0.0
    atoms.dsf(away)
    with pytest.raises(ValueError, match="whose results are wrong"):
        atoms.domain.follow(atoms.x + away)
    domain = atoms.domain.follow(atoms.x + away)[0]
    assert domain is not atoms.domain


@case(2)
def atoms_that_jump_are_an_error_of_the_next_follow(group: Any) -> None:
    """It expects them to go on as they did; then it names the call with the domain that they had left, and goes on."""
    for check in ("later", "never"):
        atoms = Divided(group, check=check)
        start, domain = atoms.x, atoms.domain
        jump = 0.3 if dist.get_rank(group) == 1 else 0.0
        for shift in (0.0, 0.01, 0.02, 0.02 + jump):
            atoms.x = start + shift
            assert domain.follow(atoms.x)[0] is domain, "nobody can foresee it"
            atoms.dsf()
        with pytest.raises(ValueError, match=r"moved by 0\.5\d*, .* in call \d+ \(deferred\.py:\d+\).*are wrong"):
            domain.follow(atoms.x)
        new, x, q = domain.follow(atoms.x, atoms.q)
        assert new is not domain
        whole, moved = new.collect(new.follow(x, q)[1]), domain.collect(start + 0.02 + jump)
        expected = dsf_coulomb(moved, domain.collect(atoms.q), 3.0, 0.2, atoms.atoms.cell)[0]
        found = dsf_coulomb(x, q, 3.0, 0.2, atoms.atoms.cell, domain=new)[0]
        if dist.get_rank(group) == 0:
            assert_equal(whole, moved, "positions")
            assert_equal(found, expected, "energy")


@case(2, n_spare=1)
def what_ranks_do_differently_is_named_later(group: Any) -> None:
    """Arguments that the host knows by their values, those on the device by their checksum."""
    there = dist.get_rank(group) == 1

    def differs(atoms: Divided, call: Callable[[], Any], text: str) -> None:
        call()
        with pytest.raises(ValueError, match=text):
            atoms.dsf()
            atoms.domain.settle()
        assert_equal(atoms.dsf()[0], expected, "afterwards")

    expected = Divided(group).dsf()[0]
    for check in ("later", 2, "never"):
        atoms = Divided(group, check=check)
        place = r" in call \d+ \(deferred\.py:\d+\) must be the same on all ranks, but is .*on rank 0, and .*on rank 1"
        differs(atoms, lambda atoms=atoms: atoms.dsf(alpha=0.3 if there else 0.2), "`alpha`" + place)
        values = torch.zeros(1, dtype=F64, requires_grad=there)
        differs(atoms, lambda atoms=atoms, values=values: atoms.domain.sum(values), "`values`" + place)
        cell = atoms.atoms.cell + 1e-12 * there
        differs(
            atoms,
            lambda atoms=atoms, cell=cell: dsf_coulomb(atoms.x, atoms.q, 3.0, 0.2, cell, domain=atoms.domain),
            "values of a tensor on the device",
        )
    if dist.get_world_size(group) == 2:  # sizes that differ: two ranks wait for each other, more may add what they get
        atoms = Divided(spare.pop(), check="never")
        soon(lambda: atoms.domain.sum(torch.zeros(1 + there)), "a sum of 1 numbers", "a sum of 2 numbers")
    with pytest.raises(ValueError, match="`check` must be the same on all ranks, but is 'later' on rank 0"):
        Divided(group, check="never" if there else "later")
    for wrong in ("soon", 0, -1):
        with pytest.raises(ValueError, match="`check`"):
            Divided(group, check=wrong)


@case(3, n_spare=2)
def errors_of_one_rank_are_told_although_nobody_asks(group: Any) -> None:
    """In the checks of a call; errors that all ranks have alike leave them in step."""
    for check in ("later", "never"):
        atoms = Divided(spare.pop(), check=check)

        def wrong(here: bool, atoms: Divided = atoms) -> Any:
            return dsf_coulomb(atoms.x, atoms.q[here:], 3.0, 0.2, atoms.atoms.cell, domain=atoms.domain)

        if all(n > 0 for n in told(atoms.domain.n_owned, group)):
            with pytest.raises(ValueError, match="`charges`"):
                wrong(True)
        atoms.dsf()
        assert atoms.domain.settle().wrong == 0
        if dist.get_rank(group) == 1:
            with pytest.raises(ValueError, match="`charges`"):
                wrong(True)
        else:
            soon(partial(wrong, False), "rank 1 failed in call", "ValueError: `charges`")


def told(what: Any, group: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, what, group=group)
    return found


@case(2)
def the_host_reads_nothing_in_a_step(group: Any) -> None:
    """Where it would wait for a device: with "never" nothing, with "later" messages of the call before.

    Whether atoms must be divided again is read from the message of the step before, also in steps of dynamics.
    """
    steps: dict[str, Callable[[Divided], Any]] = {
        "DSF": lambda atoms: atoms.dsf(compute_forces=True),
        "PME with two derivatives": lambda atoms: atoms.gradients(atoms.pme),
        "PME with a backward pass": lambda atoms: atoms.domain.sum(
            atoms.pme(atoms.x.clone().requires_grad_(), atoms.atoms.cell).sum()
        ).backward(),
        "D3": lambda atoms: atoms.d3(),
        "values": lambda atoms: atoms.domain.sum(atoms.domain.with_ghosts(atoms.x).sum()),
    }
    model, states = SumOfTerms(partial(lennard_jones(3.0), sigma=1.4, epsilon=1e-6)), {}

    def dynamics(atoms: Divided) -> None:
        domain, integrator = atoms.domain, nve(1e-4)
        if domain not in states:
            numbers = atoms.atoms.numbers[domain.global_index]
            system = System(atoms.x, cell=atoms.atoms.cell, numbers=numbers, domain=domain)
            states[domain] = integrator.start(system, model, velocities=0.0 * atoms.x)
        states[domain] = integrator.step(states[domain], model)
        assert states[domain].system.domain is domain

    follows = {
        "follow": lambda atoms: atoms.domain.follow(atoms.x, atoms.q, cell=atoms.atoms.cell),
        "a step of dynamics": dynamics,
    }
    with replaced_layout("cpu", CPU._replace(reads=False, serial=False)):
        for check in ("never", "later"):
            atoms = Divided(group, check=check)
            for name, step in (steps | follows).items():
                for _ in range(2):
                    step(atoms)
                with host_reads() as found:
                    step(atoms)
                may_read = check == "later" or name in follows
                elsewhere = [place for place in found if not (may_read and "communication.py" in place[-1])]
                assert not elsewhere, (check, name, elsewhere)
                assert bool(found) == (may_read and name != "values"), (check, name, found)
        with host_reads() as found:
            Divided(group).dsf()
        assert found, "it counts"


READS = ("item", "__float__", "__int__", "__bool__", "__index__", "tolist", "numpy", "__array__", "cpu", "nonzero")
FUNCTIONS = ("equal", "nonzero", "bincount", "allclose", "unique", "masked_select")


@contextlib.contextmanager
def host_reads() -> Iterator[list[list[str]]]:
    """Where the host reads values of tensors in Python."""
    found: list[list[str]] = []

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def read(*given: Any, **options: Any) -> Any:
            found.append(
                [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_stack()[-6:-1]]
            )
            return function(*given, **options)

        return read

    with contextlib.ExitStack() as stack:
        for owner, names in ((torch.Tensor, READS), (torch, FUNCTIONS)):
            for name in names:
                stack.enter_context(mock.patch.object(owner, name, noted(getattr(owner, name))))
        yield found


def follow_is_refused(atoms: Divided) -> None:
    with pytest.raises(ValueError, match=r"`Domain\.follow` reads how far atoms were, so it cannot be recorded"):
        atoms.domain.follow(atoms.x)


@case(2)
def calls_can_be_captured_if_ranks_never_compare(group: Any) -> None:
    """What a replay of a graph does again is all that counts: the same memory; with "later" an error by name."""
    atoms = Divided(group, check="never")
    atoms.dsf()
    assert atoms.domain._ledger is not None
    kept = atoms.domain._ledger._state
    address = kept.data_ptr()
    with mock.patch.object(ledger, "current_recorder", object):
        follow_is_refused(atoms)
    atoms.dsf()  # ranks agree at once in the call after an error, which counts with no others
    with mock.patch.object(ledger, "is_capturing", lambda: True):
        atoms.dsf(0.3)
        follow_is_refused(atoms)
        with pytest.raises(ValueError, match='`check` of the `domain` must be "never"'):
            Divided(group, check="later").dsf()
    assert atoms.domain._ledger._state is kept and kept.data_ptr() == address
    # as by two replays
    for _ in range(2):
        atoms.domain._ledger.add(torch.tensor(0.4, dtype=F64), SKIN)
    found = atoms.domain.settle(raises=False)
    assert found[:3] == (4, 3, 2) and abs(found.largest - 0.3 * 3.0**0.5) < 1e-12, found


@case(2)
def dynamics_with_ranks_that_compare_later(group: Any) -> None:
    """The trajectory of ranks that compare in each step; domains are made before atoms have moved too far."""
    atoms = Atoms(n=4)
    model = SumOfTerms(partial(lennard_jones(3.0), sigma=1.4, epsilon=0.1))
    mine, n_divided = atoms.mine(group), []

    def run(check: Any, dt: float = 0.02) -> Any:
        domain = Domain(atoms.positions[mine], atoms.cell, cutoff=3.0, skin=0.4, group=group, check=check)
        system = domain.distribute(System(atoms.positions[mine], cell=atoms.cell, numbers=atoms.numbers[mine]))
        velocities = domain.distribute(2.0 * atoms.vectors[mine])
        domains = []
        run = simulate(
            system, model, nve(dt), steps=12, velocities=velocities, hooks=[lambda s: domains.append(s.system.domain)]
        )
        n_divided.append(len({id(domain) for domain in domains}))
        found = run.state.system
        assert check == "each" or not found.domain._ledger._sent, "all is read at the end"
        return found.domain.gather(found.positions), run.records["conserved"]

    expected = run("each")
    for check in ("later", "never"):
        for found, known in zip(run(check), expected):
            assert_equal(found, known, check, 1e-11)
    assert n_divided[0] > 1 and n_divided[1] >= n_divided[0], n_divided
    # nobody can foresee that atoms jump
    domain = Domain(atoms.positions[mine], atoms.cell, cutoff=3.0, skin=0.4, group=group, check="later")
    x = domain.distribute(atoms.positions[mine])
    q = domain.distribute(atoms.charges[mine])
    for step in range(3):
        assert domain.follow(x)[0] is domain
        dsf_coulomb(x + 0.3 * (step == 2), q, 3.0, 0.2, atoms.cell, domain=domain)
    with pytest.raises(ValueError, match=r"moved by 0\.51.*whose results are wrong"):
        domain.settle()
