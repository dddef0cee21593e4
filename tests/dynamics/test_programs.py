"""Flows run as one program (`nvalchemiops.torch.dynamics.programs`), and give what they give one by one."""

import copy
import dataclasses
import pickle

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nvalchemiops.torch.dynamics import FORCES, Integrator, langevin, nose_hoover, npt
from nvalchemiops.torch.dynamics.flows import Drift, Flow, Kick
from nvalchemiops.torch.dynamics.programs import Program
from nvalchemiops.torch.dynamics.symbols import NoProgram

from .systems import few_atoms, joined, run, wells
from .test_integrators import KT, NAMES, PRESSURE, every, started


class Watched(TorchDispatchMode):
    """A mode that sees each operation, so that flows run one by one."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.fixture
def calls(monkeypatch):
    """How many programs ran to their end."""
    found, call = [], Program.__call__

    def counted(self, state):
        after = call(self, state)
        found.append(self)
        return after

    monkeypatch.setattr(Program, "__call__", counted)
    return found


MORE_THAN_A_BLOCK, IN_ONE_BLOCK = (3, 0, 300), (5, 0, 9, 64, 1, 7, 0, 2, 2, 3, 1, 4, 2, 30, 35, 6)
"""Numbers of atoms of the systems of a batch."""


def mixed(integrator, model, sizes=MORE_THAN_A_BLOCK):
    """A batch of systems whose atoms come in a random order."""
    parts = [few_atoms(n, seed) for seed, n in enumerate(sizes)]
    system, masses, velocities = (
        joined([p[0] for p in parts]),
        torch.cat([p[1] for p in parts]),
        torch.cat([p[2] for p in parts]),
    )
    order = torch.randperm(len(masses), generator=torch.Generator().manual_seed(2))
    system = system._replace(positions=system.positions[order], batch_idx=system.batch_idx[order])
    masses = masses[order]
    masses[5] = torch.inf
    return integrator.start(system, model, masses=masses, velocities=velocities[order], removed=0, seed=3)


def leaves(state):
    return {"r": state.system.positions, "v": state.velocities, "h": state.system.cell, **state.extra}


@pytest.mark.parametrize("name", NAMES)
def test_programs_do_what_their_flows_do(name, calls):
    integrator, model = every(0.1)[name], wells()
    states = [mixed(integrator, model, sizes) for sizes in (MORE_THAN_A_BLOCK, IN_ONE_BLOCK)]
    for state in (*states, started(integrator, model)):
        calls.clear()
        after = leaves(run(integrator, state, model, 5))
        assert len(calls) == 10  # two for each step
        with Watched():
            one_by_one = leaves(run(integrator, state, model, 5))
        assert len(calls) == 10
        for key, value in one_by_one.items():
            assert after[key].shape == value.shape and after[key].dtype == value.dtype
            assert torch.allclose(after[key], value, rtol=1e-12, atol=1e-13), key
        assert (after["v"] - state.velocities).abs().max() > 1e-3


def test_programs_leave_the_state_before_as_it_was():
    integrator, model = npt(0.1, KT, PRESSURE), wells()
    state = started(integrator, model)
    before = {key: value.clone() for key, value in leaves(state).items()}
    integrator.step(state, model)
    assert all(torch.equal(value, before[key]) for key, value in leaves(state).items())


def test_the_layout_of_memory_does_not_matter(calls):
    integrator, model = npt(0.1, KT, PRESSURE, cell="full"), wells()
    state = started(integrator, model)
    other = state.at(state.system.positions.T.contiguous().T, velocities=state.velocities.repeat(1, 2)[:, :3])
    assert not other.system.positions.is_contiguous()
    for one, two in zip(leaves(integrator.step(state, model)).values(), leaves(integrator.step(other, model)).values()):
        assert torch.equal(one, two)
    assert len(calls) == 4
    negative = integrator.step(state._replace(velocities=torch._neg_view(-state.velocities)), model)
    assert torch.allclose(negative.velocities, integrator.step(state, model).velocities, rtol=1e-12)


def test_memory_of_a_batch_may_hold_another_one():
    integrator, fresh, model = *(npt(0.1, KT, PRESSURE) for _ in range(2)), wells()
    state = mixed(integrator, model)
    integrator.step(state, model)
    state.system.batch_idx.copy_(state.system.batch_idx.flip(0))
    assert torch.equal(integrator.step(state, model).velocities, fresh.step(state, model).velocities)


def test_a_missing_tensor_is_named_as_by_the_flows(calls):
    integrator, model = npt(0.1, KT, PRESSURE), wells()
    state = started(integrator, model)
    integrator.step(state, model)
    without = state._replace(evaluation=state.evaluation._replace(stress=None))
    with pytest.raises(ValueError, match="the model gave no stress"):
        integrator.step(without, model)
    assert len(calls) == 2
    integrator, calls[:] = langevin(0.1, KT), ()
    with pytest.raises(KeyError, match="friction"):
        integrator.step(state, model)
    integrator.step(integrator.resume(state, model), model)
    assert len(calls) == 2


OTHER_FORMS = {
    "temperature in float32": {"temperature": torch.full((2, 1), KT, dtype=torch.float32)},
    "temperature without rows": {"temperature": torch.tensor(KT, dtype=torch.float64)},
    "temperature as a number": {"temperature": KT},
    "forces in float32": {"forces": torch.float32},
    "zeros without memory": {"forces": None},
    "places in int64": {"place": torch.int64},
    "seeds in int32": {"seed": torch.int32},
    "step in int32": {"step": torch.int32},
}


@pytest.mark.parametrize("has_program", [False, True])
@pytest.mark.parametrize("form", OTHER_FORMS)
def test_flows_decide_about_values_in_another_form(form, has_program, calls):
    """A model or a hook may give them, before the first step or later."""
    integrator, model = langevin(0.1, KT), wells()
    state = integrator.start(
        joined([few_atoms(n)[0] for n in (2, 3)]), model, masses=torch.ones(5), velocities=torch.ones(5, 3)
    )
    expected = integrator.first_half(state).velocities if has_program else None
    ((name, change),) = OTHER_FORMS[form].items()
    if name == "forces":
        forces = state.evaluation.forces
        forces = torch._efficientzerotensor(forces.shape, dtype=forces.dtype) if change is None else forces.to(change)
        state = state._replace(evaluation=state.evaluation._replace(forces=forces))
    elif name == "step":
        state = state._replace(step=state.step.to(change))
    else:
        value = state.extra[name].to(change) if isinstance(change, torch.dtype) else change
        state = state._replace(extra={**state.extra, name: value})
    calls.clear()
    if form.endswith("in int32") or form.endswith("in int64"):
        with pytest.raises(TypeError, match=f"`{name}s?`: expected dtype"):
            integrator.first_half(state)
    else:
        after = integrator.first_half(state).velocities
        assert expected is None or change is None or (after - expected).abs().max() < 1e-6
        with Watched():
            assert torch.equal(integrator.first_half(state).velocities, after)
    assert not calls


def test_a_chain_that_is_too_long_for_a_program(calls):
    integrator, model = nose_hoover(0.1, KT, chain_length=350), wells()
    state = started(integrator, model)
    after = run(integrator, state, model, 2)
    short = nose_hoover(0.1, KT, chain_length=20)
    expected = run(short, started(short, model), model, 2)
    assert len(calls) == 4  # of the short one
    assert torch.allclose(after.velocities, expected.velocities, rtol=1e-9)


def test_atoms_keep_their_noise_in_another_order(calls):
    integrator, model = langevin(0.1, KT), wells()
    state = mixed(integrator, model)
    order = torch.randperm(len(state.masses), generator=torch.Generator().manual_seed(5))
    rows = {name: value[order] for name, value in state.rows().items()}
    other = state.with_rows(rows, batch_idx=state.system.batch_idx[order])
    after = integrator.step(other, model)
    assert torch.allclose(after.velocities, integrator.step(state, model).velocities[order], rtol=1e-12, atol=1e-15)
    assert len(calls) == 4


def test_numbers_that_all_atoms_share_are_stored_for_each_block():
    integrator, model = npt(0.1, KT, PRESSURE), wells()

    def flow(state):
        rate = state.of_atoms(state.extra["strain_rate"])
        return state.at(2.0 * state.system.positions + rate, velocities=rate)

    state = mixed(integrator, model)
    state = state.having(strain_rate=torch.rand(3, 3, dtype=torch.float64))
    found, expected = Program(flow, state)(state), flow(state)
    assert torch.equal(found.velocities, expected.velocities)
    assert torch.equal(found.system.positions, expected.system.positions)


def costly(numbers):
    """Twice the numbers, by so many operations that results are kept where there is memory."""
    found = numbers
    for _ in range(8):
        found = 0.5 * found + numbers
    return found


@pytest.mark.parametrize("in_turn", [False, True])
def test_memory_of_results_keeps_numbers_of_atoms_until_it_is_needed(in_turn):
    """Once a result is there its memory holds no others, and numbers that a later sum waits for are not overwritten."""

    def flow(state):
        one = costly(state.system.positions)
        two = one + state.of_atoms(state.of_systems(one))
        two = costly(two) if in_turn else two * two
        later = one * state.of_atoms(state.of_systems(two))
        return state._replace(velocities=later * two) if in_turn else state.at(two, velocities=later)

    state = mixed(npt(0.1, KT, PRESSURE), wells())
    found, expected = Program(flow, state)(state), flow(state)
    assert torch.allclose(found.system.positions, expected.system.positions, rtol=1e-12)
    assert torch.allclose(found.velocities, expected.velocities, rtol=1e-12)


def test_a_sum_over_atoms_of_a_number_of_the_system_counts_them():
    def flow(state):
        return state.having(strain_rate=state.of_systems(state.of_atoms(3.0 * state.extra["strain_rate"])))

    state = mixed(npt(0.1, KT, PRESSURE), wells())
    state = state.having(strain_rate=torch.rand(3, 3, dtype=torch.float64))
    counts = torch.tensor([[3.0], [0.0], [300.0]], dtype=torch.float64)
    assert torch.allclose(Program(flow, state)(state).extra["strain_rate"], 3.0 * counts * state.extra["strain_rate"])


REFUSED = {
    "another function": lambda state: torch.sin(state.velocities),
    "another function of several": lambda state: torch.cat([state.velocities, state.velocities]),
    "systems and atoms": lambda state: state.velocities * state.extra["dt"],
    "a number for each system": lambda state: state.extra["dt"] * torch.ones(1, 1, 1),
    "another power": lambda state: state.velocities**3,
    "a decision": lambda state: state.velocities if state.extra["dt"] > 0.05 else -state.velocities,
    "one atom": lambda state: state.velocities[0],
    "the axis of atoms": lambda state: state.velocities.unbind(0)[0],
    "parts of several columns": lambda state: state.velocities.split(2, 1)[0],
    "another precision": lambda state: state.velocities.to(torch.float32),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_a_program_is_refused(what):
    """It would be another number for some states, or for other numbers of atoms."""
    state = mixed(npt(0.1, KT, PRESSURE), wells())
    with pytest.raises(NoProgram):
        Program(lambda state: state._replace(velocities=REFUSED[what](state)), state)


@dataclasses.dataclass
class Stop(Flow):
    """Stop all atoms once one is fast: a decision that depends on values, with a limit that changes."""

    limit: float = 1e9

    def __hash__(self):
        return id(self)

    def __call__(self, state, h):
        return state._replace(velocities=0.0 * state.velocities) if state.velocities.abs().max() > self.limit else state


def test_flows_of_users_run_as_they_are(calls):
    stop, model = Stop(), wells()
    drift = (Drift(), 0.5)
    integrator = Integrator([(Kick(), 0.5), drift, (stop, 1.0), drift, FORCES, (Kick(), 0.5)], {"dt": 0.1})
    state = integrator.step(started(integrator, model), model)
    assert state.velocities.abs().max() > 0.1
    stop.limit = 0.01
    moved = integrator.first_half(state)
    assert moved.velocities.abs().max() == 0.0
    assert len(calls) == 5  # kick and drift, drift, kick; kick and drift, drift


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_integrators_that_ran_can_be_copied(copied):
    integrator, model = npt(0.1, KT, PRESSURE), wells()
    state = started(integrator, model)
    one, two = integrator.step(state, model), copied(integrator).step(state, model)
    assert torch.equal(one.velocities, two.velocities)
