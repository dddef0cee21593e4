"""Relaxations that go on from a state: the steps of one that was never interrupted."""

from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from nvalchemiops.torch.dynamics import FIRE, FIRE2, LBFGS, CellFilter, RelaxationState, load_state, relax, save_state
from nvalchemiops.torch.dynamics.optimizers import Move
from nvalchemiops.torch.systems import System
from tests.dynamics.relaxation import (
    batch_of_crystals,
    crystal,
    equal,
    lennard_jones_model,
    springs,
    unconverged,
)


def relaxed_with_states(system: System, at: tuple[int, ...], folder: Path, **options: Any) -> tuple[Any, list[Path]]:
    """A relaxation, and files of its states at evaluations of these numbers."""
    paths = [folder / f"{number}.pt" for number in at]

    def hook(now: Any) -> None:
        if now.number in at:
            save_state(paths[at.index(now.number)], now.state())

    return relax(system, hooks=[hook], **options), paths


@unconverged
@pytest.mark.parametrize(
    ("optimizer", "cell"),
    [(FIRE(), True), (FIRE2(), False), (LBFGS(memory=7), CellFilter(scalar_pressure=0.01))],
    ids=["fire", "fire2", "lbfgs"],
)
def test_steps_are_those_without_an_interruption(optimizer: Any, cell: Any, tmp_path: Path) -> None:
    """To the last bit: from the first evaluation, and before and after systems were taken out of the batch."""
    system, steps = System.from_ase(batch_of_crystals()), 26 if isinstance(optimizer, LBFGS) else 45
    fixed = torch.arange(len(system.positions)) % 9 == 4
    options = {"model": lennard_jones_model(), "optimizer": optimizer, "fmax": 0.08, "cell": cell, "max_steps": steps}
    at = (0, 3, steps - 4)
    expected, paths = relaxed_with_states(system, at, tmp_path, fixed=fixed, compact_every=5, **options)
    assert 0 < int(expected.converged.sum()) < 5 and len(load_state(paths[0]).systems) == 5
    assert len(load_state(paths[2]).systems) < 5
    for number, path in zip(at, paths):
        state, seen = load_state(path), []
        assert isinstance(state, RelaxationState) and state.evaluations == number + 1
        assert equal(state.system.positions, system.positions)
        for compact_every in (4, None):  # a state serves several times
            found = relax(
                state, hooks=[lambda now, seen=seen: seen.append(now.number)], compact_every=compact_every, **options
            )
            assert equal(found, expected)
            assert seen[0] == number + 1 and seen == list(range(number + 1, int(expected.evaluations.max())))
            seen.clear()


@pytest.mark.parametrize("optimizer", ["fire", "fire2", LBFGS(memory=3)], ids=["fire", "fire2", "lbfgs"])
def test_states_of_all_evaluations_serve_several_times(optimizer: Any) -> None:
    """What goes on changes no state: neither the relaxation that it is from, nor another one from it."""
    generator = torch.Generator().manual_seed(1)
    for batch_idx in ([0, 0, 1, 2], [0]):
        index = torch.tensor(batch_idx, dtype=torch.int32)
        positions = torch.randn((len(index), 3), generator=generator, dtype=torch.float64)
        system, states = System(positions, batch_idx=index, numbers=torch.arange(1, len(index) + 1)), []
        run = partial(relax, model=springs, optimizer=optimizer, fmax=1e-2, compact_every=3)
        expected = run(system, hooks=[lambda now, states=states: states.append(now.state())])
        assert expected.converged.all() and (optimizer != "fire2" or (expected.evaluations > expected.steps + 1).any())
        for state in states[:: len(states) // 5]:
            assert equal(run(state), expected) and equal(run(state), expected)


@unconverged
@pytest.mark.parametrize("optimizer", ["fire", "lbfgs"])
def test_more_steps_from_the_last_state(optimizer: str, tmp_path: Path) -> None:
    system = System.from_ase([crystal(0), crystal(1, 1)])
    options: Any = {"model": lennard_jones_model(), "optimizer": optimizer, "fmax": 1e-3}
    first, (path,) = relaxed_with_states(system, (6,), tmp_path, max_steps=6, **options)
    assert not first.converged.any() and first.steps.tolist() == [6, 6]
    assert equal(relax(load_state(path), max_steps=6, **options), first)  # there is nothing to do
    assert equal(relax(load_state(path), max_steps=20, **options), relax(system, max_steps=20, **options))


def test_what_cannot_go_on_is_named() -> None:
    positions = torch.randn((3, 3), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    system = System(positions, numbers=torch.tensor([1, 2, 3]))
    kept = []
    relax(system, springs, fmax=1e-4, hooks=[lambda now: kept.append((now, now.state()))])
    (early, _), (_, state) = kept[0], kept[4]
    for options, error, words in (
        ({"fmax": 1e-5}, ValueError, "`fmax` must be that of the state, 0.0001, got 1e-05"),
        ({"optimizer": "lbfgs"}, ValueError, "`optimizer` must be that of the state, FIRE"),
        ({"optimizer": FIRE(maxstep=0.1)}, ValueError, "`optimizer` must be that of the state"),
        ({"cell": CellFilter()}, ValueError, "`cell` must be that of the state, False"),
        ({"fixed": torch.zeros(3, dtype=torch.bool)}, TypeError, "`fixed` goes with a System"),
    ):
        with pytest.raises(error, match=words):
            relax(state, springs, **{"fmax": 1e-4, **options})
    with pytest.raises(RuntimeError, match="is for the hook that it was given to"):
        early.state()


@unconverged
def test_systems_that_stopped_before_others_do_not_go_on() -> None:
    """FIRE2 takes half steps back, so that the others need more evaluations; its state has gone on meanwhile."""
    system, states = System.from_ase([crystal(0), crystal(1, 1)]), []
    run = partial(relax, model=lennard_jones_model(), optimizer="fire2", fmax=1e-8)
    found = run(system, max_steps=40, hooks=[lambda now: states.append(now.state())])
    assert found.evaluations[0] != found.evaluations[1]
    assert equal(run(states[-1], max_steps=40), found)
    with pytest.raises(ValueError, match="`max_steps` must be that of the state"):
        run(states[-1], max_steps=50)


def test_a_model_with_stress_may_go_on_from_one_without() -> None:
    """As one that is computed for positions alone."""
    system, inner, states = System.from_ase(crystal(1)), lennard_jones_model(), []

    def model(now: System) -> Any:
        return inner(now)._replace(stress=None)

    expected = relax(system, model, hooks=[lambda now: states.append(now.state())])
    found = relax(states[3], inner)
    assert torch.equal(found.system.positions, expected.system.positions) and found.evaluation.stress is None


class Descent:
    """Steps along the forces, which an optimizer counts in place."""

    form: ClassVar = {"n": None}

    def start(self, rows: Any, x: torch.Tensor) -> Any:
        return {"n": torch.zeros(())}

    def step(self, rows: Any, state: Any, x: torch.Tensor, forces: torch.Tensor) -> Move:
        state["n"].add_(1)
        return Move(x + 0.01 * forces, state, torch.ones(1, dtype=torch.bool))


@unconverged
def test_a_state_is_a_copy() -> None:
    """Also of values that belong to no system, and for those who go on from it."""
    states: list[RelaxationState] = []
    options = {"model": lennard_jones_model(), "optimizer": Descent(), "fmax": 1e-9}
    system = System.from_ase(batch_of_crystals()[0])
    relax(system, hooks=[lambda now: states.append(now.state())], max_steps=4, **options)
    assert [int(state.optimizer["n"]) for state in states] == list(range(len(states))) and len(states) > 3
    relax(states[1], max_steps=3, **options)
    assert int(states[1].optimizer["n"]) == 1
