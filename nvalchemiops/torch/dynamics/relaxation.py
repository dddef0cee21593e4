"""Relaxation of batches of systems: `relax`."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import is_dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from nvalchemiops.layout import layout
from nvalchemiops.notices import NvalchemiopsWarning, notify
from nvalchemiops.progress import progress_bar
from nvalchemiops.torch import checks
from nvalchemiops.torch.autograd.functorch import is_differentiated
from nvalchemiops.torch.distributed.agreement import described
from nvalchemiops.torch.dynamics.chart import CellFilter, Chart
from nvalchemiops.torch.dynamics.failures import ConvergenceWarning, may_refuse, systems_refused
from nvalchemiops.torch.dynamics.model import (
    Evaluation,
    Model,
    as_evaluation,
    check_model,
    check_same,
    check_shapes,
    holds_atoms,
)
from nvalchemiops.torch.dynamics.optimizers import OPTIMIZERS, Optimizer
from nvalchemiops.torch.dynamics.relaxation_state import Batch, Record, RelaxationState
from nvalchemiops.torch.interactions.pair.shares import must_be_same, together, whole_call
from nvalchemiops.torch.runtime._torch_internals import named_in_files
from nvalchemiops.torch.systems import System, printed_in_short

ASK_EVERY = 10
"""Evaluations between two questions whether all systems are done, where reading the answer waits for a GPU."""


@printed_in_short
@named_in_files
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
    state : callable
        ``state()`` returns the `RelaxationState` from which `relax` goes on with the next step. For use in the hook;
        on ranks a collective call.
    """

    evaluation: Evaluation
    system: System
    systems: torch.Tensor
    steps: torch.Tensor
    fmax: torch.Tensor
    active: torch.Tensor
    number: int
    state: Callable[[], RelaxationState]


def relax(
    system: System | RelaxationState,
    model: Model,
    optimizer: str | Optimizer = "fire",
    *,
    fmax: float = 0.01,
    smax: float | None = None,
    cell: bool | str | CellFilter = False,
    fixed: torch.Tensor | np.ndarray | Sequence[Any] | None = None,
    max_steps: int = 1000,
    compact_every: int | None = 10,
    hooks: Callable[[RelaxationProgress], None] | Iterable[Callable[[RelaxationProgress], None]] = (),
    progress: bool = False,
) -> Relaxation:
    """Move atoms, and cells on request, to a minimum of the energy, each system of a batch on its own.

    A system does in a batch what it does alone, to the last bit, if its evaluation does. It stays where it converged.
    Results have no gradients.

    Parameters
    ----------
    system : System or RelaxationState
        One system, or a batch of any sizes. A state goes on as if there had been no interruption, with the same
        arguments; ``max_steps`` may be larger, and the state has ``fixed``.
    model : Model
        Energies, forces and, if cells relax, stress.
    optimizer : "fire", "fire2", "lbfgs" or Optimizer, optional
        A name, or an optimizer with other parameters, such as ``FIRE(maxstep=0.1)``. All take the steps of ASE's
        optimizers of the same name.
    fmax : float, energy / length, optional
        A system has converged when the norms of all its forces are smaller. As for filters in ASE, forces on the cell
        count: the three rows of the virial, divided by the number of atoms; and in a cell that relaxes, forces on atoms
        are those along coordinates in the initial cell, which differ from ``-dE/dR`` as the cell does.
    smax : float, energy / volume, optional
        With it, components of the stress must be smaller instead of the forces on the cell. The stress contains the
        pressure; components that do not relax are left out.
    cell : bool, {"isotropic", "axes", "full"} or CellFilter, optional
        Whether cells relax, and how: the names are those of `npt`. True lets all lengths and angles relax.
    fixed : (n_atoms,) or (n_atoms, 3) bool, or (n_fixed,) int tensor, array or sequence, optional
        Atoms, or components of their positions, that stay: bools are a mask, integers are indices of atoms, such as
        ``[0, 3]``. In a cell that relaxes they keep their fractional coordinates.
    max_steps : int, optional
        Steps after which a system stops, converged or not.
    compact_every : int, optional
        After each so many evaluations, converged systems are taken out of the batch, so that they are no longer
        evaluated. This changes no result; see below. The model is then called with fewer systems. If it holds values
        for each atom or system of the batch given, or exclusions, choose None: all systems are then evaluated until
        the last one is done. A `SumOfTerms` with such values is recognized, and treated as with None.
    hooks : callable, or sequence of them, optional
        Called with a `RelaxationProgress` after each evaluation.
    progress : bool, optional
        Whether to show a bar of systems that are done, if tqdm is installed.

    Returns
    -------
    Relaxation

    Raises
    ------
    ValueError, TypeError
        A bad argument; a model that gives no stress, or results of a wrong shape; positions, or cells that relax, that
        a transform of torch.func, or forward mode, differentiates.
    FloatingPointError
        Forces, energies or stress are not finite, in all systems. An error that the model raises for all is not caught.

    Warns
    -----
    ConvergenceWarning
        Systems did not converge, or failed.
    NvalchemiopsWarning
        Cells are to relax, but no system has one. A transform of torch.func, or forward mode, differentiates charges,
        or a cell that does not relax.

    Notes
    -----
    Where this text promises the same results, they are the same to the last bit if those of the model depend on the
    system alone. A neighbor list with a skin (`SumOfTerms`) may be built at other steps, which changes rounding, and
    lattice sums within their accuracy; sums that choose their cutoff do so in the first call of a model.

    A system fails if its results are not finite, or if the model raises an error for it, as for a cell that has
    collapsed. The others go on. On ranks an error of the model ends the relaxation, as do errors at the start.

    On a GPU the host asks whether all systems are done once in ``compact_every`` evaluations, by default 10.

    With a ``domain`` this is a collective call, with the same arguments on all ranks, except ``fixed``, for the atoms
    that a rank owns. Atoms move to other ranks with all that the optimizer knows of them. Systems are taken out
    when they have a quarter of the atoms. The others are then divided anew, and their domain has numbers for their
    atoms only. The ``domain`` of the result has all atoms again.

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
    saved = system if isinstance(system, RelaxationState) else None
    given = system.system if isinstance(system, RelaxationState) else system
    domain = given.domain if isinstance(given, System) else None
    with together(domain, now=True):
        kinds: tuple[type[Optimizer], ...] = tuple(OPTIMIZERS.values())
        if isinstance(optimizer, str):
            optimizer = OPTIMIZERS[checks.as_choice("optimizer", optimizer, OPTIMIZERS)]()
        elif isinstance(optimizer, type) and optimizer in kinds:  # a class, as ASE takes it
            optimizer = kinds[kinds.index(optimizer)]()
        elif isinstance(optimizer, type) or not all(hasattr(optimizer, name) for name in ("start", "step", "form")):
            raise TypeError(f"`optimizer` must be a name or an Optimizer, got {optimizer!r}")
        check_model(model)
        hooks, fmax = checks.as_hooks(hooks), checks.check_not_negative("fmax", fmax)
        if smax is not None:
            smax = checks.check_not_negative("smax", smax)
            if cell is False:
                raise ValueError("`smax` is for cells that relax: see `cell`")
        max_steps, progress = checks.check_count("max_steps", max_steps), checks.check_flag("progress", progress)
        if compact_every is not None and checks.check_count("compact_every", compact_every) == 0:
            raise ValueError("`compact_every` must be positive, got 0; choose None to keep all systems in the batch")
        if holds_atoms(model):
            compact_every = None
        cell = CellFilter.of(cell) if isinstance(cell, str) else cell
        if isinstance(given, System):
            _check_transforms(given, cell)
        name = repr(optimizer) if is_dataclass(optimizer) else type(optimizer).__name__
        arguments = {"optimizer": name, "fmax": fmax, "smax": smax, "cell": described(cell)}
        must_be_same(domain, **arguments, max_steps=max_steps, compact_every=compact_every)
        if saved is not None:
            if fixed is not None:
                raise TypeError("`fixed` goes with a System; the state has it")
            for key, value in arguments.items():
                if saved.arguments[key] != value:
                    raise ValueError(f"`{key}` must be that of the state, {saved.arguments[key]}, got {value}")
            fixed = saved.fixed
        batch = Batch(given, optimizer, cell, fixed)
    n = batch.chart.n_systems
    ask_every = 1 if layout(batch.x.device.type).reads else compact_every or ASK_EVERY
    is_first = True

    def state_now(number: int) -> RelaxationState:
        if number != batch.count:
            raise RuntimeError("`state()` is for the hook that it was given to, before the next step")
        return batch.saved(arguments)._replace(evaluations=number + 1)

    shows = progress and (domain is None or domain.rank == 0)
    with whole_call(domain), progress_bar(n, "system", shows, "relax") as show:
        if saved is None:
            batch.start()
        else:
            batch.resume(saved, max_steps)
        while True:
            if not is_first or saved is None:
                batch.follow()
                now = batch.chart.at(batch.x)
                try:
                    found = _evaluated(model, now, batch.chart, n)
                except Exception as error:
                    refused = _refused(model, batch, n) if domain is None and may_refuse(error) else None
                    if batch.known is None or refused is None:
                        raise
                    known = batch.known
                    batch.known = known._replace(fault=known.fault | refused, active=known.active & ~refused)
                    batch.x = torch.where(batch.chart.rows.of_rows(refused)[0], known.x, batch.x)
                    now = batch.chart.at(batch.x)
                    found = _evaluated(model, now, batch.chart, n)
                if is_first:
                    check_same(found, domain)
                with torch.no_grad():
                    batch.forces = batch.chart.forces(batch.x, found)
                    batch.known = known = _judged(batch, found, fmax, smax, max_steps)
                shown = batch.places.systems, known.steps, known.fmax, known.active
                for hook in hooks:
                    hook(RelaxationProgress(found, now, *shown, batch.count, partial(state_now, batch.count)))
                batch.count += 1
            assert batch.known is not None
            is_first, known = False, batch.known
            compacts = compact_every is not None and batch.count % compact_every == 0
            if compacts or batch.count % ask_every == 0:
                n_active = int(known.active.sum())
                show(n - n_active)
                if n_active == 0:
                    if batch.chart.system.domain is not None:
                        batch.chart.system.domain.settle()
                    break
                if compacts and n_active < batch.chart.n_systems:
                    # those that have taken all steps stay, since a state may go on with more
                    left = torch.nonzero(~(known.converged | known.fault)).squeeze(1)
                    if len(left) < batch.chart.n_systems and batch.pays(left):
                        batch.take_out(left)
            with torch.no_grad():
                moved, batch.state, batch.is_step = optimizer.step(batch.chart.rows, batch.state, batch.x, batch.forces)
                # what stays keeps its bits, and what failed is where it was before
                known = batch.known
                batch.x = torch.where(batch.chart.rows.of_rows(known.active)[0], moved, known.x)
                batch.known = known._replace(steps=known.steps + (known.active & batch.is_step))
        whole, results = batch.all_systems()
    failed = torch.nonzero(results.fault).squeeze(1).tolist()
    if failed:
        which = f"for the systems {', '.join(map(str, failed))}"
        text = f"`model` gives an error, or energies, forces or stress that are not finite, {which}"
        if len(failed) == n:
            raise FloatingPointError(text)
        notify(f"{text}, which stay at the last positions that it could evaluate", ConvergenceWarning, "relax failed")
    missing = n - int(results.converged.sum()) - len(failed)
    if missing:
        notify(f"{missing} of {n} systems did not converge in {max_steps} steps", ConvergenceWarning, "relax")
    of_systems = results.converged, results.steps, results.evaluations, results.fmax, results.fault
    return Relaxation(whole.at(results.x), results.evaluation, *of_systems)


def _check_transforms(system: System, cell: bool | str | CellFilter) -> None:
    """Raise for derivatives that would be zero without a word; warn where those by what stays may be meant."""
    for name in ("positions", "cell", "charges", "dipoles", "quadrupoles", "widths"):
        value = getattr(system, name)
        # results without a graph tell of themselves
        if not isinstance(value, torch.Tensor) or not is_differentiated(value, by_own_graph=False):
            continue
        if name == "positions" or (name == "cell" and cell):
            text = f"`{name}` of the system is differentiated, but results of `relax` are constants: detach it"
            raise ValueError(text)
        text = f"`{name}` of the system is differentiated, but of the results of `relax` its `system.{name}` alone"
        notify(f"{text}: positions and `evaluation` are constants", NvalchemiopsWarning)


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
    found = as_evaluation(found)
    check_shapes(found, chart.n_systems, chart.n_atoms)
    # a copy, since optimizers remember forces, and the next call of a model may write into the same memory
    found = found.without_graph()
    return found._replace(forces=found.forces.clone())


def _refused(model: Model, batch: Batch, n_systems: int) -> torch.Tensor | None:
    """Systems for which the model raises an error; None if there are none, or if these are all systems of the call."""
    known, chart, x = batch.known, batch.chart, batch.x
    if known is None:
        return None

    def evaluate(systems: torch.Tensor) -> Evaluation:
        held = torch.where(chart.rows.of_rows(systems)[0], x, known.x)
        return _evaluated(model, chart.at(held), chart, n_systems)

    refused = systems_refused(evaluate, chart.n_systems, x.device)
    return None if refused is None or int(refused.sum()) == n_systems else refused


def _judged(batch: Batch, found: Evaluation, fmax: float, smax: float | None, max_steps: int) -> Record:
    """What is known after an evaluation, and which systems need another step."""
    known, chart, x, forces, is_step = batch.known, batch.chart, batch.x, batch.forces, batch.is_step
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
        known = Record(x, found.forces, energies, found.stress, largest, none, none, all_of_them, zeros, zeros)
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
