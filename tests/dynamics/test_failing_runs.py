"""Runs that go wrong: systems that the model refuses, models that fail, and errors of programs and memory."""

import pytest
import torch

from nvalchemiops.torch.dynamics import (
    ConvergenceWarning,
    Evaluation,
    langevin,
    nose_hoover,
    npt,
    nve,
    relax,
    simulate,
    stochastic_cell,
)
from nvalchemiops.torch.systems import System

from .systems import argon, crystal, float64, ideal_gas
from .test_simulate import KT, systems

INTEGRATORS = {
    "nve": lambda: nve(0.2),
    "langevin": lambda: langevin(0.2, KT, friction=0.5),
    "nose_hoover": lambda: nose_hoover(0.2, KT),
    "npt": lambda: npt(0.2, KT, 1e-4),
    "stochastic_cell": lambda: stochastic_cell(0.2, KT, 1e-4, compressibility=1.0),
}


@pytest.mark.parametrize("make", INTEGRATORS.values(), ids=INTEGRATORS)
@pytest.mark.parametrize("step", (1, 7))
def test_systems_that_the_model_refuses_stay_and_others_go_on(make, step):
    """Three of eight, in two steps. All that the others have has the bits of a run in which nothing fails."""
    start, seen = System.from_ase([crystal(1, seed=n) for n in range(8)]), []
    inner, refuses = argon(), {1: step, 4: step, 6: step + 2}

    def model(system):
        last = seen[-1] if seen else start.positions
        for number, at in refuses.items():
            if len(seen) + 1 >= at and not torch.equal(system.positions[4 * number], last[4 * number]):
                raise ValueError("no such place")
        return inner(system)

    # without gradients there is nothing to compute again
    options = {"seed": 3, "gradients": False, "checkpoint_every": 5 if step == 1 else None}
    with pytest.warns(ConvergenceWarning) as warned:
        found = simulate(start, model, make(), 12, hooks=[lambda state: seen.append(state.system.positions)], **options)
    for n, numbers, text in zip((step, step + 2), ("1, 4", "6"), warned, strict=True):
        expected = f"ValueError of `model` in step {n} for the systems {numbers} (no such place)"
        assert str(text.message).startswith(expected)
    expected = simulate(start, argon(), make(), 12, seed=3)
    assert torch.nonzero(found.failed).squeeze(1).tolist() == [*refuses] and not expected.failed.any()
    good = ~found.failed
    for name, values in expected.records.items():
        assert torch.equal(found.records[name][:, good], values[:, good])
        for number, at in refuses.items():  # and what they were before the step that failed
            assert torch.equal(found.records[name][:at, number], values[:at, number])
            assert (found.records[name][at:, number] == values[at - 1, number]).all()
    of_atoms = good[start.batch_idx.long()]
    assert torch.equal(found.state.system.positions[of_atoms], expected.state.system.positions[of_atoms])
    assert torch.equal(found.state.system.cell[good], expected.state.system.cell[good])
    for name, values in expected.state.extra.items():
        mask = good if len(values) == 8 else of_atoms
        assert torch.equal(found.state.extra[name][mask], values[mask]), name


def test_failures_are_named():
    """A model that gives NaN for one system; one that refuses all, or the only one; one that ceases to work."""
    start = systems()

    def with_nan(system):
        found = ideal_gas(system)
        return found._replace(energies=found.energies * torch.tensor([1.0, torch.nan], dtype=float64))

    with pytest.warns(ConvergenceWarning, match="the systems 1 have energies or velocities that are not finite"):
        assert simulate(start, with_nan, nve(0.1), 2).failed.tolist() == [False, True]
    for system in (start, System.from_ase(crystal(1))):
        calls = []

        def refuses(system, calls=calls):
            calls.append(1)
            if len(calls) > 3:
                raise ValueError("no such place")
            return ideal_gas(system)

        with pytest.raises(ValueError, match="no such place") as caught:
            simulate(system, refuses, nve(0.1), 5)
        assert caught.value.__notes__ == ["It ended `simulate` in step 3: try a shorter `dt`."]


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "while systems are searched"])
@pytest.mark.parametrize("error", (NameError, TypeError, torch.OutOfMemoryError, NotImplementedError))
def test_errors_of_programs_and_memory_are_of_no_system(error, at_once):
    start, inner = systems(), argon()

    def model(system):
        if not torch.equal(system.positions[0], start.positions[0]):
            alone = torch.equal(system.positions[-1], start.positions[-1])
            raise error("not of the first system") if at_once or alone else ValueError("no such place")
        return inner(system)

    for call in (lambda: simulate(start, model, nve(0.1), 3), lambda: relax(start, model)):
        with pytest.raises(error, match="not of the first system"):
            call()


def test_a_run_ends_when_the_last_system_has_failed():
    start = systems()
    seen = []

    def one_after_the_other(system):
        last = seen[-1] if seen else start.positions
        for k, at in ((0, 2), (-1, 4)):
            if len(seen) >= at and not torch.equal(system.positions[k], last[k]):
                raise ValueError("no such place")
        return ideal_gas(system)

    hooks = [lambda state: seen.append(state.system.positions)]
    with (
        pytest.warns(ConvergenceWarning, match="in step 3 for the systems 0"),
        pytest.raises(ValueError, match="no such"),
    ):
        simulate(start, one_after_the_other, nve(0.1), 10, hooks=hooks, velocities=torch.ones_like(start.positions))
    assert len(seen) == 4


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("make", [lambda: nve(0.1), lambda: langevin(0.1, 0.3)])
def test_molecules_that_fail_stay_or_leave_the_batch(make, leaves):
    """Systems without cells; and a hook that goes on with the others alone, which keep their numbers."""
    positions = torch.randn(6, 3, dtype=float64, generator=torch.Generator().manual_seed(1))
    start = System(positions, batch_idx=torch.tensor([0, 0, 1, 1, 2, 2], dtype=torch.int32))
    integrator, seen, rest = make(), [positions], [0, 1, 4, 5]

    def springs_of(system):
        energies = 0.5 * system.positions.square().sum(1).reshape(-1, 2).sum(1)
        return Evaluation(energies, -system.positions)

    def model(system):
        if len(seen) > 2 and len(system.positions) == 6 and not torch.equal(system.positions[2], seen[-1][2]):
            raise ValueError("no such place")
        return springs_of(system)

    def hook(state):
        seen.append(state.system.positions)
        if leaves and state.step == 4:
            system = System(state.system.positions[rest], batch_idx=start.batch_idx[:4])
            options = {"velocities": state.velocities[rest], "masses": state.masses[rest], "keys": torch.tensor([0, 2])}
            return integrator.start(system, model, **options)._replace(step=state.step)

    options = {"masses": torch.ones(6), "record": ()}
    with pytest.warns(ConvergenceWarning, match="in step 3 for the systems 1"):
        found = simulate(start, model, integrator, 8, hooks=[hook], **options)
    expected = simulate(start, springs_of, make(), 8, **options).state
    others = found.state.system.positions if leaves else found.state.system.positions[rest]
    assert torch.equal(others, expected.system.positions[rest])
    assert found.failed.tolist() == ([False, False] if leaves else [False, True, False])
    assert leaves or torch.equal(found.state.system.positions[2:4], seen[2][2:4])
