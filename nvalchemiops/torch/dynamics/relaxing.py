"""The systems of a relaxation while it runs: those that are still in the batch, and what is known of all.

Rows of coordinates, of atoms and then of cells, are those of `nvalchemiops.torch.dynamics.chart`.

On ranks, what is known of systems that were taken out stays with the ranks that held their atoms in the beginning. The
order of these atoms does not change, as that of a batch in one process, while the owners of the others do.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nvalchemiops.torch.dynamics.chart import CellFilter, Chart
from nvalchemiops.torch.dynamics.model import Evaluation
from nvalchemiops.torch.dynamics.optimizers import Optimizer, OptimizerState
from nvalchemiops.torch.systems import System, of_each_atom

if TYPE_CHECKING:
    from nvalchemiops.torch.distributed.domain import Domain

Moves = Callable[[torch.Tensor], torch.Tensor]
"""From values of atoms, or of rows, to those in another order or on other ranks."""

LEAST_OUT = 0.25
"""Part of the atoms that are taken out together on ranks, at least."""


class Places(NamedTuple):
    """Numbers of systems, of their atoms and of their rows."""

    systems: torch.Tensor
    atoms: torch.Tensor
    rows: torch.Tensor


class Record(NamedTuple):
    """What is known of systems from their last evaluation in which they were active."""

    x: torch.Tensor  # of rows
    forces: torch.Tensor  # of atoms
    energies: torch.Tensor  # this and the rest of systems
    stress: torch.Tensor | None
    fmax: torch.Tensor
    converged: torch.Tensor
    fault: torch.Tensor
    active: torch.Tensor
    steps: torch.Tensor
    evaluations: torch.Tensor

    @property
    def evaluation(self) -> Evaluation:
        """The results of the model."""
        return Evaluation(self.energies, self.forces, self.stress)

    def select(self, index: Places) -> "Record":
        """The record of some systems."""
        chosen: Any = (None if value is None else value[at] for value, at in self._with(index))
        return Record(*chosen)

    def put_into(self, whole: "Record | None", places: Places) -> "Record":
        """The record of all systems, with these numbers of these systems; without it these are all systems."""
        if whole is None:
            return self
        parts = zip(whole, self._with(places))
        merged: Any = (None if a is None or b is None else a.index_copy(0, at, b) for a, (b, at) in parts)
        return Record(*merged)

    def moved(self, move: Moves) -> "Record":
        """The record after rows have moved; ``move`` also takes rows of atoms alone."""
        return self._replace(x=move(self.x), forces=move(self.forces))

    def _with(self, index: Places) -> list[tuple[torch.Tensor | None, torch.Tensor]]:
        return list(zip(self, (index.rows, index.atoms, *[index.systems] * (len(self) - 2))))


class RelaxationState(NamedTuple):
    """A relaxation between two steps, from which `relax` goes on: from `RelaxationProgress.state`, or a file.

    Attributes
    ----------
    system : System
        All systems as they were at the start, whose cells are those of the coordinates. With a ``domain`` the atoms
        that this rank owns now.
    fixed : (n_atoms,) or (n_atoms, 3) bool tensor, or None
    record : Record
        What is known of all systems: coordinates, energies, forces, numbers of steps.
    systems : (k,) int64 tensor
        Numbers of the systems that are in the batch.
    rows : list of (n_rows, ...) tensors
        What the optimizer keeps for each row of coordinates; zeros for systems that are not in the batch.
    optimizer : dict from str to value
        What else it keeps, of the systems in the batch.
    evaluations : int
        Number of evaluations so far.
    arguments : dict from str to value
        Arguments of `relax` that must stay the same.
    """

    system: System
    fixed: torch.Tensor | None
    record: Record
    systems: torch.Tensor
    rows: list[torch.Tensor]
    optimizer: OptimizerState
    evaluations: int
    arguments: dict[str, Any]

    def _at(self, system: System, move: Moves) -> "RelaxationState":
        """The state after atoms have moved; ``move`` takes values of all atoms."""
        n = len(self.system.positions)

        def moved(rows: torch.Tensor) -> torch.Tensor:
            return torch.cat([move(rows[:n]), rows[n:]])

        fixed = None if self.fixed is None else move(self.fixed)
        rows = [moved(values) for values in self.rows]
        return self._replace(system=system, fixed=fixed, record=self.record.moved(moved), rows=rows)

    def collected(self) -> "RelaxationState":
        """All atoms, without a domain, on the first rank in the order of their numbers; no atoms on others.

        The same state without a domain. On ranks a collective call.
        """
        domain = self.system.domain
        return self if domain is None else self._at(domain.collect(self.system), domain.collect)

    def divided(self, domain: "Domain", bring: Moves) -> "RelaxationState":
        """The state of all atoms, for those that this rank owns in the domain. A collective call.

        ``bring`` takes values of all atoms, and returns those of the owned ones.
        """
        system = of_each_atom(self.system, bring)._replace(batch_idx=None, pbc=None, domain=domain)
        return self._at(system, bring)


class _RowsAlone:
    """In the place of an optimizer, for a state that is a list of values of rows."""

    def select(self, state: Any, systems: torch.Tensor, rows: torch.Tensor) -> Any:
        """The values of some rows."""
        return [values.index_select(0, rows) for values in state]

    def carried(self, state: Any, move: Moves) -> Any:
        """The values after rows have moved."""
        return [move(values) for values in state]


class Batch:
    """The systems that are still evaluated, with what the optimizer knows of them, and the record of all systems.

    Attributes
    ----------
    chart : Chart
    x, forces : (n_rows, 3) tensors
        Coordinates to evaluate next, and the forces of the last evaluation.
    state : OptimizerState
    is_step : (n_systems,) bool tensor
        As in `Move`.
    known : Record or None
        None before the first evaluation.
    places : Places
        Of these systems among all; on ranks those of the atoms that this rank held in the beginning.
    count : int
        Number of evaluations so far.
    """

    known: Record | None = None
    count = 0
    _results: Record | None = None

    def __init__(self, system: System, optimizer: Optimizer, cell: bool | CellFilter, fixed: torch.Tensor | None):
        self._optimizer: Any = optimizer
        self.chart = self._whole = Chart(system, cell=cell, fixed=fixed)
        self.x = self.forces = self.chart.start
        device, n = self.x.device, self.chart.n_systems
        self.is_step = torch.ones(n, dtype=torch.bool, device=device)
        n_held = self.chart.n_atoms if system.domain is None else system.domain._n_held
        n_rows = n_held + len(self.x) - self.chart.n_atoms
        self.places = Places(*(torch.arange(k, device=device) for k in (n, n_held, n_rows)))

    def start(self) -> None:
        """Begin with the first evaluation."""
        self.state = self._optimizer.start(self.chart.rows, self.x)

    def resume(self, saved: RelaxationState, max_steps: int) -> None:
        """Go on from a state, whose system and fixed atoms this object was made with. On ranks a collective call."""
        record, self.count = saved.record, saved.evaluations
        is_over = record.converged | record.fault | (record.steps >= max_steps)
        if bool((~is_over & (record.evaluations < self.count)).any()):
            # with half steps back of the others
            raise ValueError("`max_steps` must be that of the state, in which systems have stopped before others")
        self.known, self.x = record._replace(active=~is_over), record.x
        self.forces = self.chart.forces(self.x, record.evaluation)
        optimizer, self._optimizer, self.state = self._optimizer, _RowsAlone(), list(saved.rows)
        if len(saved.systems) < self.chart.n_systems:
            self.take_out(saved.systems)
        rows: Iterator[torch.Tensor] = iter(self.state)
        self._optimizer = optimizer
        self.state = optimizer.carried(_copied(saved.optimizer), lambda _: next(rows).clone())

    def follow(self) -> None:
        """Bring atoms to their owners in a domain that is valid for the coordinates. On ranks a collective call."""
        chart, move = self.chart.followed(self.x)
        if move is not None:
            self._move_to(chart, move)

    def pays(self, left: torch.Tensor) -> bool:
        """Whether to take out all others: on ranks this takes as long as some evaluations."""
        domain = self.chart.system.domain
        if domain is None:
            return True
        return float(domain.atoms_in_systems[left].sum()) <= (1.0 - LEAST_OUT) * domain.n_atoms

    def take_out(self, left: torch.Tensor) -> None:
        """Leave only these systems (k,), in ascending order, in the batch. On ranks a collective call."""
        domain = self.chart.system.domain
        if domain is not None:
            self._move_to(*self.chart.at_holders())
        assert self.known is not None
        if self._results is None:
            self._whole = self.chart
        self._results = self.known.put_into(self._results, self.places)
        self.chart, atoms, rows = self.chart.select(left)
        index = Places(left, atoms, rows)
        self.state = self._optimizer.select(self.state, left, rows)
        self.known, self.is_step = self.known.select(index), self.is_step[left]
        self.x, self.forces = self.x[rows], self.forces[rows]
        self.places = Places(*(of[at] for of, at in zip(self.places, index)))
        if domain is not None:
            self._move_to(*self.chart.at_owners(domain, self.x))

    def all_systems(self) -> tuple[Chart, Record]:
        """The chart and the record of all systems. On ranks a collective call."""
        return self._of_all([])[:2]

    def saved(self, arguments: dict[str, Any]) -> RelaxationState:
        """What a relaxation can go on from, after an evaluation. On ranks a collective call."""
        rows: list[torch.Tensor] = []

        def taken(values: torch.Tensor) -> torch.Tensor:
            rows.append(values.clone())
            return values[:0]

        others = _copied(self._optimizer.carried(self.state, taken))
        chart, record, rows = self._of_all(rows)
        of_systems = record, self.places.systems
        return RelaxationState(chart.system, chart.fixed, *of_systems, rows, others, self.count, arguments)

    def _of_all(self, rows: list[torch.Tensor]) -> tuple[Chart, Record, list[torch.Tensor]]:
        """The chart and the record of all systems, and these values of rows, with zeros for the others."""
        chart, record, domain = self.chart, self.known, self.chart.system.domain
        assert record is not None
        if self._results is None:
            return chart, record, rows
        if domain is not None:
            _, move = chart.at_holders()
            record, rows = record.moved(move), [move(values) for values in rows]
        chart, record = self._whole, record.put_into(self._results, self.places)
        n = len(record.x)
        rows = [v.new_zeros((n, *v.shape[1:])).index_copy(0, self.places.rows, v) for v in rows]
        if domain is not None:
            chart, move = chart.at_owners(domain, record.x)
            record, rows = record.moved(move), [move(values) for values in rows]
        return chart, record, rows

    def _move_to(self, chart: Chart, move: Moves) -> None:
        """The same systems in another chart, to which rows have moved."""
        self.chart, self.x, self.forces = chart, move(self.x), move(self.forces)
        self.state = self._optimizer.carried(self.state, move)
        self.known = None if self.known is None else self.known.moved(move)


def _copied(state: OptimizerState) -> OptimizerState:
    """A copy that steps of the original do not change."""
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
