"""Relaxation of batches of systems: `relax`."""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import is_dataclass
from typing import Any, NamedTuple

import torch

from nvalchemiops.layout import layout
from nvalchemiops.notices import NvalchemiopsWarning, notify
from nvalchemiops.torch import checks
from nvalchemiops.torch.dynamics.chart import CellFilter, Chart
from nvalchemiops.torch.dynamics.model import Evaluation, Model, check_same
from nvalchemiops.torch.dynamics.optimizers import OPTIMIZERS, Optimizer
from nvalchemiops.torch.interactions.pair.shares import must_be_same, together, whole_call
from nvalchemiops.torch.systems import System

ASK_EVERY = 10
"""Evaluations between two questions whether all systems are done, where reading the answer waits for a GPU."""


class ConvergenceWarning(NvalchemiopsWarning):
    """Systems have failed, or have not converged in the number of steps that they were given."""


class Relaxation(NamedTuple):
    """Result of `relax`.

    Attributes
    ----------
    system : System
        With relaxed positions and cells, in the order and the precision of the systems given.
    evaluation : Evaluation
        Energies, forces and stress of the model at these positions.
    converged : (n_systems,) bool tensor
    steps : (n_systems,) int64 tensor
        Steps of the optimizer that each system took.
    evaluations : (n_systems,) int64 tensor
        Evaluations that each system took: one more than steps, and one for each half step back of FIRE2.
    fmax : (n_systems,) tensor, energy / length
        The largest force that is left, as compared with the argument ``fmax``.
    failed : (n_systems,) bool tensor
        Systems that the model could not evaluate after their last step. They are where they were before it.
    """

    system: System
    evaluation: Evaluation
    converged: torch.Tensor
    steps: torch.Tensor
    evaluations: torch.Tensor
    fmax: torch.Tensor
    failed: torch.Tensor


class RelaxationProgress(NamedTuple):
    """What hooks of `relax` see after each evaluation.

    Attributes
    ----------
    evaluation : Evaluation
    system : System
        The systems that were evaluated: converged ones are among them until they are taken out.
    systems : (k,) int64 tensor
        Their numbers in the batch that was given.
    steps : (k,) int64 tensor
    fmax : (k,) tensor
    active : (k,) bool tensor
        Systems that will take another step.
    number : int
        Number of evaluations before this one.
    """

    evaluation: Evaluation
    system: System
    systems: torch.Tensor
    steps: torch.Tensor
    fmax: torch.Tensor
    active: torch.Tensor
    number: int


def relax(
    system: System,
    model: Model,
    optimizer: str | Optimizer = "fire",
    *,
    fmax: float = 0.01,
    smax: float | None = None,
    cell: bool | CellFilter = False,
    fixed: torch.Tensor | None = None,
    max_steps: int = 1000,
    compact_every: int | None = 10,
    hooks: Sequence[Callable[[RelaxationProgress], None]] = (),
    progress: bool = False,
) -> Relaxation:
    """Move atoms, and cells on request, to a minimum of the energy, each system of a batch on its own.

    A system does in a batch what it does alone, to the last bit, if its evaluation does. It stays where it converged.
    Results have no gradients.

    Parameters
    ----------
    system : System
        One system, or a batch of any sizes.
    model : Model
        Energies, forces and, if cells relax, stress.
    optimizer : "fire", "fire2", "lbfgs" or Optimizer, optional
        A name, or an optimizer with other parameters, such as ``FIRE(maxstep=0.1)``. All take the steps of ASE's
        optimizers of the same name.
    fmax : float, energy / length, optional
        A system has converged when the norms of all its forces are smaller. As for filters in ASE, forces on the cell
        count: the three rows of the virial, divided by the number of atoms.
    smax : float, energy / volume, optional
        With it, components of the stress must be smaller instead of the forces on the cell. The stress contains the
        pressure; components that do not relax are left out.
    cell : bool or CellFilter, optional
        Whether cells relax, and how.
    fixed : (n_atoms,) or (n_atoms, 3) bool tensor, optional
        Atoms, or components of their positions, that stay. In a cell that relaxes they keep their fractional
        coordinates.
    max_steps : int, optional
        Steps after which a system stops, converged or not.
    compact_every : int, optional
        After each so many evaluations, converged systems are taken out of the batch, so that they are no longer
        evaluated. This changes no result. The model is then called with fewer systems. If it holds values for each
        atom or system of the batch given, choose None: all systems are then evaluated until the last one is done.
    hooks : sequence of callable, optional
        Called with a `RelaxationProgress` after each evaluation.
    progress : bool, optional
        Whether to show a bar of systems that are done, if tqdm is installed.

    Returns
    -------
    Relaxation

    Raises
    ------
    ValueError, TypeError
        A bad argument; a model that gives no stress, or results of a wrong shape.
    FloatingPointError
        Forces, energies or stress are not finite, in all systems.

    Warns
    -----
    ConvergenceWarning
        Systems did not converge, or failed.

    Notes
    -----
    A system fails if its results are not finite, or if the model raises an error for it, as for a cell that has
    collapsed. The others go on. To find the system of an error, each is evaluated alone, so not without
    ``compact_every``: errors of the model then end the relaxation, as do errors at the start.

    On a GPU the host asks whether all systems are done once in ``compact_every`` evaluations, by default 10.

    With a ``domain`` this is a collective call, with the same arguments on all ranks, except ``fixed``, for the atoms
    that a rank owns. Atoms move to other ranks with all that the optimizer knows of them. The result has the last
    ``domain``, and systems that are done stay in the batch.

    Examples
    --------
    >>> from functools import partial
    >>> from nvalchemiops.torch.dynamics import SumOfTerms
    >>> from nvalchemiops.torch.interactions.pair import lennard_jones
    >>> model = SumOfTerms(partial(lennard_jones(6.0), sigma=2.5, epsilon=0.1))
    >>> result = relax(System.from_ase(atoms), model, "lbfgs", cell=CellFilter(scalar_pressure=0.01))
    >>> bool(result.converged)
    True
    """
    if isinstance(optimizer, str):
        checks.check_choice("optimizer", optimizer, OPTIMIZERS)
        optimizer = OPTIMIZERS[optimizer]()
    elif isinstance(optimizer, type) or not all(hasattr(optimizer, name) for name in ("start", "step", "select")):
        raise TypeError(f"`optimizer` must be a name or an Optimizer, got {optimizer!r}")
    fmax = checks.check_not_negative("fmax", fmax)
    if smax is not None:
        smax = checks.check_not_negative("smax", smax)
        if cell is False:
            raise ValueError("`smax` is for cells that relax: see `cell`")
    max_steps = checks.check_count("max_steps", max_steps)
    if compact_every is not None and checks.check_count("compact_every", compact_every) == 0:
        raise ValueError("`compact_every` must be positive, got 0; choose None to keep all systems in the batch")
    domain = system.domain if isinstance(system, System) else None
    with together(domain, now=True):
        name = repr(optimizer) if is_dataclass(optimizer) else type(optimizer).__name__
        must_be_same(domain, optimizer=name, fmax=fmax, smax=smax, max_steps=max_steps, cell=cell)
        if domain is not None:
            compact_every = None
            if not hasattr(optimizer, "carried"):
                raise TypeError(f"`optimizer`: {optimizer!r} has no method `carried`, which ranks need")
        whole = Chart(system, cell=cell, fixed=fixed)
    chart, x = whole, whole.start
    state = optimizer.start(chart.rows, x)
    device, n = x.device, whole.n_systems
    ask_every = 1 if layout(device.type).reads else compact_every or ASK_EVERY
    # numbers of the systems, atoms and rows that are still in the batch
    places = _Places(*(torch.arange(k, device=device) for k in (n, whole.n_atoms, x.shape[0])))
    is_step = torch.ones(n, dtype=torch.bool, device=device)
    known: _Record | None = None
    results: _Record | None = None
    count = 0
    with whole_call(domain), _bar(n, progress and (domain is None or domain.rank == 0)) as show:
        while True:
            chart, move = chart.followed(x)
            if move is not None:
                whole, x, state = chart, move(x), optimizer.carried(state, move)
                known = None if known is None else known._replace(x=move(known.x), forces=move(known.forces))
            now = chart.at(x)
            try:
                found = _evaluated(model, now, chart, n)
            except Exception:
                refused = _refused(model, chart, x, n) if known is not None and compact_every is not None else None
                if known is None or refused is None:
                    raise
                known = known._replace(fault=known.fault | refused, active=known.active & ~refused)
                x = torch.where(chart.rows.of_rows(refused)[0], known.x, x)
                now = chart.at(x)
                found = _evaluated(model, now, chart, n)
            if count == 0:
                check_same(found, domain)
            with torch.no_grad():
                forces = chart.forces(x, found)
                known = _judged(known, chart, x, found, forces, is_step, fmax, smax, max_steps)
            for hook in hooks:
                hook(RelaxationProgress(found, now, places.systems, known.steps, known.fmax, known.active, count))
            count += 1
            compacts = compact_every is not None and count % compact_every == 0
            if compacts or count % ask_every == 0:
                n_active = int(known.active.sum())
                show(n - n_active)
                if n_active == 0:
                    if chart.system.domain is not None:
                        chart.system.domain.settle()
                    break
                if compacts and n_active < chart.n_systems:
                    results = known.put_into(results, places)
                    left = torch.nonzero(known.active).squeeze(1)
                    chart, atoms, rows = chart.select(left)
                    index = _Places(left, atoms, rows)
                    state, known, is_step = optimizer.select(state, left, rows), known.select(index), is_step[left]
                    x, forces, places = x[rows], forces[rows], _Places(*(of[at] for of, at in zip(places, index)))
            with torch.no_grad():
                moved, state, is_step = optimizer.step(chart.rows, state, x, forces)
                # what stays keeps its bits, and what failed is where it was before
                x = torch.where(chart.rows.of_rows(known.active)[0], moved, known.x)
                known = known._replace(steps=known.steps + (known.active & is_step))
    results = known.put_into(results, places)
    failed = torch.nonzero(results.fault).squeeze(1).tolist()
    if failed:
        which = f"for the systems {', '.join(map(str, failed))}"
        if len(failed) == n:
            raise FloatingPointError(f"`model` gives energies, forces or stress that are not finite {which}")
        notify(
            f"`model` gives an error, or energies, forces or stress that are not finite, {which}, which stay at the "
            "last positions that it could evaluate",
            ConvergenceWarning,
            "relax failed",
        )
    missing = n - int(results.converged.sum()) - len(failed)
    if missing:
        notify(f"{missing} of {n} systems did not converge in {max_steps} steps", ConvergenceWarning, "relax")
    evaluation = Evaluation(results.energies, results.forces, results.stress)
    return Relaxation(
        whole.at(results.x),
        evaluation,
        results.converged,
        results.steps,
        results.evaluations,
        results.fmax,
        results.fault,
    )


def _evaluated(model: Model, system: System, chart: Chart, n_systems: int) -> Evaluation:
    """Results of the model, without gradients, after a check of their shapes."""
    try:
        found = model(system)
    except Exception as error:
        if chart.n_systems < n_systems:
            error.add_note(
                f"The model was called with the {chart.n_systems} of {n_systems} systems that have not converged. If "
                "it holds values for each atom or system of the whole batch, give `compact_every=None`."
            )
        raise
    shapes: dict[str, tuple[int, ...]] = {"energies": (chart.n_systems,), "forces": (chart.n_atoms, 3)}
    if found.stress is not None:
        shapes["stress"] = (chart.n_systems, 3, 3)
    for name, shape in shapes.items():
        if getattr(found, name).shape != shape:
            raise ValueError(f"`{name}` of the model must have shape {shape}, got {tuple(getattr(found, name).shape)}")
    stress = None if found.stress is None else found.stress.detach()
    return Evaluation(found.energies.detach(), found.forces.detach(), stress)


def _refused(model: Model, chart: Chart, x: torch.Tensor, n_systems: int) -> torch.Tensor | None:
    """Systems for which the model raises an error if they are alone; None if there are none, or if these are all."""
    refused = torch.zeros(chart.n_systems, dtype=torch.bool, device=x.device)
    for k in range(chart.n_systems):
        alone, _, rows = chart.select(torch.tensor([k], device=x.device))
        try:
            _evaluated(model, alone.at(x[rows]), alone, n_systems)
        except Exception:
            refused[k] = True
    found = int(refused.sum())
    return None if found in (0, n_systems) else refused


class _Places(NamedTuple):
    """Numbers of systems, of their atoms and of their rows."""

    systems: torch.Tensor
    atoms: torch.Tensor
    rows: torch.Tensor


class _Record(NamedTuple):
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

    def select(self, index: _Places) -> "_Record":
        chosen: Any = (None if value is None else value[at] for value, at in self._with(index))
        return _Record(*chosen)

    def put_into(self, whole: "_Record | None", places: _Places) -> "_Record":
        """The record of all systems, with these numbers of these systems; without it these are all systems."""
        if whole is None:
            return self
        parts = zip(whole, self._with(places))
        merged: Any = (None if a is None or b is None else a.index_copy(0, at, b) for a, (b, at) in parts)
        return _Record(*merged)

    def _with(self, index: _Places) -> list[tuple[torch.Tensor | None, torch.Tensor]]:
        return list(zip(self, (index.rows, index.atoms, *[index.systems] * (len(self) - 2))))


def _judged(
    known: _Record | None,
    chart: Chart,
    x: torch.Tensor,
    found: Evaluation,
    forces: torch.Tensor,
    is_step: torch.Tensor,
    fmax: float,
    smax: float | None,
    max_steps: int,
) -> _Record:
    """What is known after an evaluation, and which systems need another step."""
    energies = found.energies
    if smax is None:
        largest = chart.rows.largest(forces)
        near, finite = largest < fmax, torch.isfinite(largest)
    else:
        largest = chart.rows_of_atoms.largest(forces[: chart.n_atoms])
        stress = chart.largest_stress(x, found)
        near, finite = (largest < fmax) & (stress < smax), torch.isfinite(largest) & torch.isfinite(stress)
    # systems without forces are at a minimum, whatever fmax is
    near = near | ((largest == 0.0) if smax is None else (largest == 0.0) & (stress == 0.0))
    finite = finite & torch.isfinite(energies)
    if known is None:
        none, all_of_them = torch.zeros_like(is_step), torch.ones_like(is_step)
        zeros = torch.zeros_like(is_step, dtype=torch.int64)
        known = _Record(x, found.forces, energies, found.stress, largest, none, none, all_of_them, zeros, zeros)
    was = known.active
    good = was & finite

    def latest(new: torch.Tensor, old: torch.Tensor, of: torch.Tensor = good) -> torch.Tensor:
        return torch.where(of.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    return known._replace(
        x=latest(x, known.x, chart.rows.of_rows(good)[0]),
        forces=latest(found.forces, known.forces, chart.rows_of_atoms.of_rows(good)[0]),
        energies=latest(energies, known.energies),
        stress=None if found.stress is None or known.stress is None else latest(found.stress, known.stress),
        fmax=latest(largest, known.fmax),
        converged=known.converged | (was & is_step & near),
        fault=known.fault | (was & ~finite),
        active=good & ~(is_step & (near | (known.steps >= max_steps))),
        evaluations=known.evaluations + was,
    )


@contextlib.contextmanager
def _bar(n_systems: int, progress: bool) -> Iterator[Callable[[int], None]]:
    """A function that shows how many systems are done."""
    tqdm: Any = None
    if checks.check_flag("progress", progress):
        with contextlib.suppress(ImportError):
            tqdm = importlib.import_module("tqdm.auto").tqdm
    if tqdm is None:
        yield lambda _: None
        return
    with tqdm(total=n_systems, desc="relax", unit="system") as bar:
        yield lambda done: bar.update(done - bar.n)
