"""The state of a relaxation: the systems that are still in the batch, a record of all, and states to go on from.

Rows of coordinates, of atoms and then of cells, are those of `nvalchemiops.torch.dynamics.chart`.

On ranks, what is known of systems that were taken out stays with the ranks that held their atoms in the beginning. The
order of these atoms does not change, as that of a batch in one process, while the owners of the others do.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from nvalchemiops.torch.dynamics.chart import CellFilter, Chart
from nvalchemiops.torch.dynamics.model import Evaluation
from nvalchemiops.torch.dynamics.optimizers import Form, Optimizer, OptimizerState
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
        return Record(**_selected(self._asdict(), OF_RECORD, index))

    def put_into(self, whole: "Record", places: Places) -> "Record":
        """The record of all systems, with these numbers of these systems."""
        parts = zip(whole, self, (getattr(places, of) for of, _ in OF_RECORD.values()))
        merged: Any = (None if a is None or b is None else a.index_copy(0, at, b) for a, b, at in parts)
        return Record(*merged)

    def moved(self, move: Moves) -> "Record":
        """The record after rows have moved; ``move`` also takes rows of atoms alone."""
        return Record(**_moved(self._asdict(), OF_RECORD, move))


OF_RECORD = {name: ("systems", 0) for name in Record._fields} | {"x": ("rows", 0), "forces": ("atoms", 0)}
"""The form of a record, like that of an optimizer's values, but also with values of atoms."""


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
    optimizer : OptimizerState
        What the optimizer keeps; zeros for systems that are not in the batch.
    form : Form
        Of the optimizer.
    evaluations : int
        Number of evaluations so far.
    arguments : dict from str to value
        Arguments of `relax` that must stay the same.
    """

    system: System
    fixed: torch.Tensor | None
    record: Record
    systems: torch.Tensor
    optimizer: OptimizerState
    form: Form
    evaluations: int
    arguments: dict[str, Any]

    def _at(self, system: System, move: Moves) -> "RelaxationState":
        """The state after atoms have moved; ``move`` takes values of all atoms."""
        n = len(self.system.positions)

        def moved(rows: torch.Tensor) -> torch.Tensor:
            return torch.cat([move(rows[:n]), rows[n:]])

        fixed = None if self.fixed is None else move(self.fixed)
        optimizer = _moved(self.optimizer, self.form, moved)
        return self._replace(system=system, fixed=fixed, record=self.record.moved(moved), optimizer=optimizer)

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


class Batch:
    """The systems that are still evaluated, with what the optimizer knows of them, and the record of all systems.

    ``x`` are the coordinates (n_rows, 3) to evaluate next, and ``forces`` those of the last evaluation; ``is_step`` is
    as in `Move`. ``known`` is None before the first evaluation, ``count`` is the number of evaluations so far.
    ``places`` are those of these systems among all; on ranks, of the atoms that this rank held in the beginning.
    """

    known: Record | None = None
    count = 0
    _results: Record | None = None

    def __init__(
        self,
        system: System,
        optimizer: Optimizer,
        cell: bool | CellFilter,
        fixed: torch.Tensor | np.ndarray | Sequence[Any] | None,
    ):
        self._optimizer = optimizer
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
        self.state = _copied(saved.optimizer, saved.form)
        if len(saved.systems) < self.chart.n_systems:
            self.take_out(saved.systems)

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
        self._results = self.known.put_into(self._results or self.known, self.places)
        self.chart, atoms, rows = self.chart.select(left)
        index = Places(left, atoms, rows)
        self.state = _selected(self.state, self._optimizer.form, index)
        self.known, self.is_step = self.known.select(index), self.is_step[left]
        self.x, self.forces = self.x[rows], self.forces[rows]
        self.places = Places(*(of[at] for of, at in zip(self.places, index)))
        if domain is not None:
            self._move_to(*self.chart.at_owners(domain, self.x))

    def all_systems(self) -> tuple[Chart, Record]:
        """The chart and the record of all systems. On ranks a collective call."""
        return self._of_all({})[:2]

    def saved(self, arguments: dict[str, Any]) -> RelaxationState:
        """What a relaxation can go on from, after an evaluation. On ranks a collective call."""
        form = self._optimizer.form
        chart, record, state = self._of_all(_copied(self.state, form))
        systems = self.places.systems
        return RelaxationState(chart.system, chart.fixed, record, systems, state, form, self.count, arguments)

    def _of_all(self, state: OptimizerState) -> tuple[Chart, Record, OptimizerState]:
        """The chart and the record of all systems, and these values of the optimizer, with zeros for the others."""
        chart, record, form = self.chart, self.known, self._optimizer.form
        domain = chart.system.domain
        assert record is not None
        if self._results is None:
            return chart, record, state
        if domain is not None:
            _, move = chart.at_holders()
            record, state = record.moved(move), _moved(state, form, move)
        chart, record = self._whole, record.put_into(self._results, self.places)
        state = _spread(state, form, self.places, chart)
        if domain is not None:
            chart, move = chart.at_owners(domain, record.x)
            record, state = record.moved(move), _moved(state, form, move)
        return chart, record, state

    def _move_to(self, chart: Chart, move: Moves) -> None:
        """The same systems in another chart, to which rows have moved."""
        self.chart, self.x, self.forces = chart, move(self.x), move(self.forces)
        self.state = _moved(self.state, self._optimizer.form, move)
        self.known = None if self.known is None else self.known.moved(move)


# -- values that belong to systems, their atoms and rows ------------------------------------------------------------


def _changed(
    values: Mapping[str, Any], form: Form, change: Callable[[torch.Tensor, str, int], torch.Tensor]
) -> dict[str, Any]:
    """``change(value, of, axis)`` of values with a place in the form; those whose place is None stay as they are."""

    def new(value: Any, where: tuple[str, int] | None) -> Any:
        return value if value is None or where is None else change(value, *where)

    return {name: new(value, form[name]) for name, value in values.items() if name in form}


def _copied(values: Mapping[str, Any], form: Form) -> dict[str, Any]:
    """A copy that steps of the original do not change."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in values.items()
        if name in form
    }


def _selected(values: Mapping[str, Any], form: Form, index: Places) -> dict[str, Any]:
    """The values of some systems."""
    return _changed(values, form, lambda value, of, axis: value.index_select(axis, getattr(index, of)))


def _moved(values: Mapping[str, Any], form: Form, move: Moves) -> dict[str, Any]:
    """The values after atoms have moved."""

    def change(value: torch.Tensor, of: str, axis: int) -> torch.Tensor:
        return value if of == "systems" else move(value.movedim(axis, 0).contiguous()).movedim(0, axis).contiguous()

    return _changed(values, form, change)


def _spread(values: Mapping[str, Any], form: Form, places: Places, whole: Chart) -> dict[str, Any]:
    """The values of all systems, which are zero for those that are not in these places."""
    sizes = {"systems": whole.n_systems, "rows": len(whole.start)}

    def change(value: torch.Tensor, of: str, axis: int) -> torch.Tensor:
        zeros = value.new_zeros((*value.shape[:axis], sizes[of], *value.shape[axis + 1 :]))
        return zeros.index_copy(axis, getattr(places, of), value)

    return _changed(values, form, change)
