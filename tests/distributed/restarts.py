"""Cases for several ranks: runs that go on from files, on other numbers of ranks. See `ranks.py`."""

import dataclasses
import tempfile
import warnings
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from nvalchemiops.constants import GIGAPASCAL, KELVIN
from nvalchemiops.torch import System
from nvalchemiops.torch.distributed import OtherRankError, divide
from nvalchemiops.torch.dynamics import (
    FIRE,
    LBFGS,
    CellFilter,
    Constraints,
    ConvergenceWarning,
    Evaluation,
    Integrator,
    Simulation,
    State,
    langevin,
    load_state,
    relax,
    save_state,
    simulate,
    stochastic_cell,
)
from nvalchemiops.torch.dynamics.flows import Flow, kept
from nvalchemiops.torch.systems import of_each_atom
from tests.distributed.common import F64, assert_equal, case, groups
from tests.distributed.dynamics import ALL, DT, KT, Held
from tests.dynamics.systems import argon, crystal, joined


@dataclasses.dataclass(frozen=True)
class Odometer(Flow):
    """How far each atom has come, as a flow of a user that keeps values of atoms."""

    per_atom: ClassVar[tuple[str, ...]] = ("distance",)

    def __call__(self, state: State, h: torch.Tensor) -> State:
        way = (state.of_atoms(h) * state.velocities).norm(dim=1)
        return state.having(distance=state.extra["distance"] + way)

    def start(self, state: State) -> dict[str, torch.Tensor]:
        return kept(state, "distance", torch.zeros_like(state.masses))


def with_odometer(integrator: Integrator) -> Integrator:
    return dataclasses.replace(integrator, flows=[*integrator.flows, (Odometer(), 1.0)])


def check_rest(start: State, integrator: Integrator, whole: Simulation, names: tuple[str, ...], what: str) -> None:
    """From this state, the second half of the run of one process."""
    steps = whole.steps[-1] // 2
    found = simulate(start, argon(), integrator, steps, record=ALL)
    state, expected = found.state.collected(names), whole.state
    for name, values in found.records.items():
        assert_equal(values, whole.records[name][steps:], (what, name), 1e-9)
    if start.system.domain is None or start.system.domain.rank == 0:
        assert_equal(state.system.positions, expected.system.positions, what)
        assert_equal(state.velocities, expected.velocities, what)
        assert_equal(state.system.cell, expected.system.cell, what)
        for name in names:
            assert_equal(state.extra[name], expected.extra[name], (what, name))


@case(2, 3)
def runs_go_on_with_other_numbers_of_ranks(group: Any) -> None:
    """With noise, cells that change, constraints, batches and values of a user's flow: from P ranks to fewer and
    to one process, and from one process to P. The trajectory is that of a run without an interruption."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    one = System.from_ase(crystal())
    both = joined([one, System.from_ase(crystal((2, 2, 3), a=5.3, seed=2))])
    order = torch.randperm(len(both.positions), generator=torch.Generator().manual_seed(2))
    numbers = torch.full_like(order, 18)
    both = both._replace(positions=both.positions[order], batch_idx=both.batch_idx[order], numbers=numbers)
    bonds = Constraints(torch.tensor([[0, 1], [0, 4], [10, 14], [20, 21]]))
    fast = {"barostat_time": 50.0 * DT, "thermostat_time": 20.0 * DT, "compressibility": 1.0 / GIGAPASCAL}
    reach: Any = {"cutoff": 5.5, "skin": 0.5}
    for integrator, whole, names in (
        (langevin(DT, 300.0 * KELVIN).constrained(bonds), one, ()),
        (langevin(DT, KT), both, ()),
        (with_odometer(stochastic_cell(DT, KT, 0.0, **fast)), both, ("distance",)),
    ):
        expected = simulate(whole, argon(), integrator, 24, seed=4, record=ALL)
        alone = simulate(whole, argon(), integrator, 12, seed=4).state
        divided = simulate(Held(group, whole, cutoff=5.5).own, argon(), integrator, 12, seed=4).state
        with tempfile.TemporaryDirectory() as folder:
            paths = [str(Path(folder, "run.pt"))]
            dist.broadcast_object_list(paths, group_src=0, group=group)
            save_state(paths[0], divided, per_atom=names)
            saved = load_state(paths[0])
            if names:
                with pytest.raises(ValueError, match=r"`extra\['distance'\]` must be the same on all ranks"):
                    save_state(paths[0], divided)
            dist.barrier(group)
        assert int(saved.step) == 12 and saved.system.domain is None
        assert_equal(saved.velocities, alone.velocities, "velocities in the file")
        rest: Any = (integrator, expected, names)
        check_rest(saved, *rest, "from ranks to one process")
        check_rest(divide(alone, group=group, per_atom=names, **reach), *rest, "from one process to ranks")
        fewer = max(n for n in groups if n < max(size, 3))
        if rank < fewer:
            check_rest(divide(saved, group=groups[fewer], per_atom=names, **reach), *rest, "from ranks to fewer")
        dist.barrier(group)


@case(2, 3)
def relaxations_go_on_with_other_numbers_of_ranks(group: Any) -> None:
    """Before and after a system has converged, which is then taken out: fewer atoms are evaluated, all others as in one
    process. States go from P ranks to fewer and to one process, and from one process to P."""
    check_relaxation(group, (4, 33), optimizer=FIRE(), fmax=4e-3, cell=CellFilter(hydrostatic_strain=True))
    check_relaxation(group, (3, 17), optimizer=LBFGS(memory=5), fmax=2e-3)


def check_relaxation(group: Any, saved_at: tuple[int, int], **options: Any) -> None:
    """A relaxation on ranks, and what follows after evaluations with these numbers, are those of one process."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    near, far = crystal(rattle=0.02, sheared=False, a=5.3), crystal((2, 2, 3), a=5.3, rattle=0.4, seed=2)
    whole = System.from_ase([near, far, crystal((1, 2, 2), a=5.3, rattle=0.3, seed=3)])
    order = torch.randperm(len(whole.positions), generator=torch.Generator().manual_seed(2))
    whole = of_each_atom(whole, lambda values: values[order])._replace(batch_idx=whole.batch_idx[order])
    fixed, mine = order % 7 == 0, slice(len(order) * rank // size, len(order) * (rank + 1) // size)
    reach: Any = {"cutoff": 5.5, "skin": 0.5}
    model, numbers = argon(skin=0.0), []

    def counted(system: System) -> Evaluation:
        numbers.append(len(system.positions) if system.domain is None else system.domain.n_atoms)
        return model(system)

    def run(start: Any, states: dict[int, Any], **given: Any) -> tuple[Any, list[int]]:
        def hook(now: Any) -> None:
            if now.number in saved_at:
                states[now.number] = now.state()

        numbers.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            found = relax(start, counted, hooks=[hook], max_steps=40, compact_every=8, **options, **given)
        return found, list(numbers)

    alone: dict[int, Any] = {}
    expected, sizes = run(whole, alone, fixed=fixed)
    assert expected.converged.tolist() == [True, False, False] and sizes[0] > sizes[-1]
    assert [len(alone[number].systems) for number in saved_at] == [3, 2]

    def check(what: str, start: Any, first: int, **given: Any) -> dict[int, Any]:
        states: dict[int, Any] = {}
        found, evaluated = run(start, states, **given)
        assert evaluated == sizes[first:], (what, evaluated)
        domain = found.system.domain
        for name in ("steps", "evaluations", "converged", "failed"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), (what, name)
        assert_equal(found.system.cell, expected.system.cell, what, 1e-12)
        assert_equal(found.evaluation.energies, expected.evaluation.energies, what, 1e-12)
        positions, forces = found.system.positions, found.evaluation.forces
        if domain is not None:
            assert domain.n_atoms == len(order)
            positions, forces = domain.collect(positions), domain.collect(forces)
        if domain is None or domain.rank == 0:
            assert_equal(positions, expected.system.positions, what, 1e-12)
            assert_equal(forces, expected.evaluation.forces, what, 1e-9)
        return states

    own = divide(whole, group=group, **reach)
    of_ranks = check("ranks", own, 0, fixed=own.domain.distribute(fixed[mine]))
    for number in saved_at:
        with tempfile.TemporaryDirectory() as folder:
            paths = [str(Path(folder, "relaxation.pt"))]
            dist.broadcast_object_list(paths, group_src=0, group=group)
            save_state(paths[0], of_ranks[number])
            saved = load_state(paths[0])
            dist.barrier(group)
        assert saved.system.domain is None and torch.equal(saved.systems, alone[number].systems)
        assert_equal(saved.record.x, alone[number].record.x, "coordinates in the file", 1e-12)
        check("from ranks to one process", saved, number + 1)
        if number == saved_at[0]:
            check("from one process to ranks", divide(alone[number], group=group, **reach), number + 1)
        else:
            check("on the same ranks", of_ranks[number], number + 1)
            fewer = max(n for n in groups if n < max(size, 3))
            if rank < fewer:
                check("from ranks to fewer", divide(saved, group=groups[fewer], **reach), number + 1)
        dist.barrier(group)


@case(2)
def files_of_states_are_whole_or_absent(group: Any) -> None:
    """What cannot be written or read is named on all ranks; systems, as those of a relaxation, are saved, too."""
    rank = dist.get_rank(group)
    held = Held(group, System.from_ase(crystal()), cutoff=5.5)
    state = simulate(held.own, argon(), langevin(DT, KT), 2, seed=1).state
    with tempfile.TemporaryDirectory() as folder:
        paths = [folder]
        dist.broadcast_object_list(paths, group_src=0, group=group)
        path = Path(paths[0], "run.pt")
        with pytest.raises((OSError, RuntimeError) if rank == 0 else OtherRankError, match=r"missing|run\.pt"):
            save_state(path.parent / "missing" / "run.pt", state)
        save_state(path, state)
        with (
            mock.patch.object(torch, "save", lambda _, to: Path(to).write_bytes(b"half") and 1 / 0),
            pytest.raises(ZeroDivisionError if rank == 0 else OtherRankError),
        ):
            save_state(path, state)
        save_state(path, load_state(path)) if rank == 0 else None  # as it was
        dist.barrier(group)
        assert [found.name for found in path.parent.iterdir()] == ["run.pt"]
        loaded = load_state(path)
        assert isinstance(loaded, State) and not loaded.velocities.requires_grad

        best = relax(held.own, argon(), "fire", fmax=0.5, max_steps=20)
        save_state(path, best.system)
        system = load_state(path)
        assert isinstance(system, System) and system.domain is None
        assert_equal(best.system.domain.gather(best.system.positions), system.positions[held.mine], "relaxed")
        assert torch.equal(system.numbers, held.whole.numbers) and system.cell.dtype == F64
        dist.barrier(group)
        if rank == 0:
            torch.save({"weights": torch.zeros(3)}, path)
        dist.barrier(group)
        with pytest.raises(ValueError, match="has another format"):
            load_state(path)
        dist.barrier(group)
