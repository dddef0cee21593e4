"""Systems of a batch that a model cannot evaluate: which they are, and how a run goes on without them."""

from collections.abc import Callable
from typing import Any

import torch

from nvalchemiops.notices import NvalchemiopsWarning, notify
from nvalchemiops.torch.dynamics.integrators import Integrator
from nvalchemiops.torch.dynamics.model import Evaluation, Model
from nvalchemiops.torch.dynamics.state import State
from nvalchemiops.torch.runtime.context import may_read
from nvalchemiops.torch.runtime.recorder import read_number
from nvalchemiops.torch.systems import System


class ConvergenceWarning(NvalchemiopsWarning):
    """Systems have failed, or have not converged in the number of steps that they were given."""


def may_refuse(error: Exception) -> bool:
    """Whether an error may be that of a system, rather than of the program or of its memory."""
    if isinstance(error, (NotImplementedError, RecursionError, torch.OutOfMemoryError)):
        return False
    return isinstance(error, (ValueError, ArithmeticError, RuntimeError))


def systems_refused(evaluate: Callable[[torch.Tensor], Any], n_systems: int, device: Any) -> torch.Tensor | None:
    """Systems (n_systems,) that cannot move on, found by halves; None if there are none.

    ``evaluate(systems)`` calls the model with the systems (n_systems,) where they are now, and all others where they
    have been evaluated before.
    """
    refused = torch.zeros(n_systems, dtype=torch.bool, device=device)

    def raises(numbers: torch.Tensor) -> bool:
        try:
            evaluate(torch.zeros_like(refused).index_fill_(0, numbers, True))
        except Exception as error:
            if not may_refuse(error):
                raise
            return True
        return False

    everyone = torch.arange(n_systems, device=device)
    parts = [] if raises(everyone[:0]) else [everyone]  # a model that has ceased to work
    while parts:
        part = parts.pop()
        if not raises(part):
            continue
        if len(part) == 1:
            refused[part] = True
        else:
            parts += part.tensor_split(2)
    return refused if read_number(refused.any()) else None


class Survivors:
    """Steps of a batch in which a system that the model refuses stays as it was, and the others go on.

    Nothing is read, and nothing computed, until the model raises an error: until then ``failed`` (n_systems,) is None.
    ``names`` are the variables that flows keep for each atom.
    """

    _before: State  # of the step in which the model is called

    def __init__(self, model: Model, names: tuple[str, ...]) -> None:
        self._model, self._names = model, names
        self.failed: torch.Tensor | None = None

    def step(self, integrator: Integrator, state: State) -> State:
        """The next state; those that have failed keep all that they have."""
        self._before = state
        if self.failed is not None and self.failed.shape[0] != state.extra["dt"].shape[0]:
            self.failed = None  # a hook has changed which systems there are
        after = integrator.step(state, self)
        return after if self.failed is None else self._kept(after, state, self.failed)

    def __call__(self, system: System) -> Evaluation:
        """The model, with systems that have failed where they were before the step."""
        if self.failed is not None:
            system = self._held(system, ~self.failed)
        try:
            return self._model(system)
        except Exception as error:
            if not may_refuse(error):
                raise
            failed = self._failed(system)
            n_step = read_number(self._before.step) + 1
            if failed is None or read_number(failed.all()):
                error.add_note(f"It ended `simulate` in step {n_step}: try a shorter `dt`.")
                raise
            new = failed if self.failed is None else failed & ~self.failed
            text = f"{type(error).__name__} of `model` in step {n_step} for the systems {_numbers(new)} ({error})"
            self.failed = failed
        notify(f"{text}, which stay where they were{_ADVICE}", ConvergenceWarning)
        return self._model(self._held(system, ~failed))

    def _failed(self, system: System) -> torch.Tensor | None:
        """Systems that have failed before or now; None if the error is that of no system."""
        n_systems = self._before.extra["dt"].shape[0]
        if n_systems == 1:
            return None
        refused = systems_refused(
            lambda systems: self._model(self._held(system, systems)), n_systems, system.positions.device
        )
        return refused if refused is None or self.failed is None else self.failed | refused

    def _held(self, system: System, moves: torch.Tensor) -> System:
        """The system, with all but the systems in ``moves`` where they were before the step."""
        before = self._before.system
        positions = torch.where(_rows(moves, system), system.positions, before.positions)
        if system.cell is None or before.cell is None:
            return system._replace(positions=positions)
        return system._replace(positions=positions, cell=torch.where(moves[:, None, None], system.cell, before.cell))

    def _kept(self, after: State, before: State, failed: torch.Tensor) -> State:
        """The state after a step, with what systems that have failed had before."""
        n_systems = failed.shape[0]
        of_atoms = _rows(failed, after.system).squeeze(1)

        def merged(mask: torch.Tensor, now: torch.Tensor, then: torch.Tensor) -> torch.Tensor:
            return torch.where(mask.reshape(-1, *[1] * (now.ndim - 1)), then, now)

        then = before.rows(self._names)
        rows = {
            name: now if now is then[name] else merged(of_atoms, now, then[name])
            for name, now in after.rows(self._names).items()
        }
        state = after.with_rows(rows)
        # variables of systems; constants are the same tensors before and after
        extra = {
            name: merged(failed, now, before.extra[name])
            for name, now in after.extra.items()
            if name not in rows and now is not before.extra.get(name, now) and now.shape[:1] == (n_systems,)
        }
        known = {
            name: merged(failed, now, then)
            for name, now, then in zip(Evaluation._fields, state.evaluation, before.evaluation)
            if now is not None and then is not None and name != "forces"
        }
        system, cell = state.system, before.system.cell
        if system.cell is not None and cell is not None:
            system = system._replace(cell=merged(failed, system.cell, cell))
        evaluation = state.evaluation._replace(**known)
        return state._replace(system=system, evaluation=evaluation, extra={**state.extra, **extra})


def _rows(of_systems: torch.Tensor, system: System) -> torch.Tensor:
    """For each atom the value (n_atoms, 1) of its system."""
    found = of_systems if system.batch_idx is None else of_systems.index_select(0, system.batch_idx)
    return found.unsqueeze(1)


_ADVICE = ": start these again, with a shorter `dt` or from relaxed positions"


def _numbers(systems: torch.Tensor) -> str:
    return ", ".join(map(str, torch.nonzero(systems).squeeze(1).tolist()))


def failures(state: State, failed: torch.Tensor | None) -> torch.Tensor:
    """Systems (n_systems,) that have failed at the end of a run, with a warning for values that are not finite."""
    broken = ~(state.evaluation.energies.isfinite() & state.kinetic_energies.isfinite())
    if failed is None:
        failed = torch.zeros_like(broken)
    new = broken & ~failed
    if may_read(new, wait=True) and read_number(new.any()):
        text = f"the systems {_numbers(new)} have energies or velocities that are not finite{_ADVICE}"
        notify(text, ConvergenceWarning, "not finite")
    return failed | broken
