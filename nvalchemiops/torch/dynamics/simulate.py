"""`simulate`: many steps, with records, hooks and trajectories."""

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nvalchemiops.progress import progress_bar
from nvalchemiops.torch import checks
from nvalchemiops.torch.autograd.functorch import keeps_graph
from nvalchemiops.torch.batching import count_systems
from nvalchemiops.torch.dynamics.checkpoints import Parameters, run_segment, tensors_of
from nvalchemiops.torch.dynamics.constraints import STRESS, Constraints
from nvalchemiops.torch.dynamics.failures import Survivors, failures
from nvalchemiops.torch.dynamics.integrators import Integrator
from nvalchemiops.torch.dynamics.model import Evaluation, Model, check_model
from nvalchemiops.torch.dynamics.relaxation import Relaxation
from nvalchemiops.torch.dynamics.state import State
from nvalchemiops.torch.interactions.pair.shares import must_be_same, together, whole_call
from nvalchemiops.torch.runtime._torch_internals import (
    DERIVATIVES_KNOWN,
    derivative_asked,
    named_in_files,
    transforms_active,
)
from nvalchemiops.torch.runtime.context import on_host, ordinary
from nvalchemiops.torch.runtime.recorder import read_number
from nvalchemiops.torch.systems import System, printed_in_short

Hook = Callable[[State], State | None]
AnyPath = str | PathLike[str]

RECORDS: dict[str, Callable[[Integrator, State], torch.Tensor]] = {
    "potential_energy": lambda _, state: state.evaluation.energies,
    "kinetic_energy": lambda _, state: state.kinetic_energies,
    "temperature": lambda _, state: state.temperatures,
    "conserved": lambda integrator, state: integrator.conserved(state),
    "volume": lambda _, state: state.volumes,
    "pressure": lambda _, state: state.pressures,
    "pressure_tensor": lambda _, state: state.pressure_tensors,
}
"""What `simulate` can record by name."""


@printed_in_short
@named_in_files
class Simulation(NamedTuple):
    """What `simulate` returns.

    Attributes
    ----------
    state : State
        The last state, from which another run can start.
    records : dict from str to tensor
        Each (n_records, n_systems, ...); those of your functions (n_records, ...).
    steps : list of int
        The step of each record.
    failed : (n_systems,) bool tensor
        Systems that the model could not evaluate any more, or whose energies or velocities are not finite.
    """

    state: State
    records: dict[str, torch.Tensor]
    steps: list[int]
    failed: torch.Tensor


def simulate(
    start: System | State,
    model: Model,
    integrator: Integrator,
    steps: int,
    *,
    record: str | Sequence[str] | Mapping[str, str | Callable[[State], torch.Tensor]] = (
        "potential_energy",
        "kinetic_energy",
        "temperature",
        "conserved",
    ),
    every: int = 1,
    hooks: Hook | Iterable[Hook] = (),
    trajectory: AnyPath | Sequence[AnyPath] | None = None,
    trajectory_every: int | None = None,
    append_trajectory: bool = False,
    progress: bool = False,
    gradients: bool | None = None,
    checkpoint_every: int | None = None,
    **options: Any,
) -> Simulation:
    """Run molecular dynamics.

    Parameters
    ----------
    start : System or State
        A state goes on as if there had been no interruption, also with noise. It may come from another integrator; see
        `Integrator.resume`.
    model : Model
    integrator : Integrator
    steps : int
    record : str, sequence of str, or mapping from str to str or callable, optional
        Of `RECORDS`, or functions of the state, or both under names of yours: ``{"T": "temperature", "x": function}``.
        Temperatures are kT.
    every : int, optional
        Record the state before the first step, and after every so many steps.
    hooks : callable, or sequence of them, optional
        ``hook(state)`` is called after each step; if it returns a state, the run goes on from that. If this has
        another system, such as moved atoms or other charges, but the same evaluation, the model is called for it; on
        ranks return ``integrator.evaluated(state, model)`` there. Without ``gradients`` hooks are inside of
        ``torch.no_grad()``.
    trajectory : path, or sequence of paths for each system, optional
        Files for ASE to write, in a format to which frames can be added, such as ``.xyz`` or ``.traj``, with energies,
        forces, stress, momenta and, in ``info``, the step; units must be eV, angstrom and u. Frozen atoms, and bonds of
        fixed length in ``.traj``, are constraints of the frames. Existing files are replaced.
    trajectory_every : int, optional
        By default ``every``.
    append_trajectory : bool, optional
        Add to existing files, for a run that goes on: the state at the start, which they have, is left out.
    progress : bool, optional
        Show a progress bar, if tqdm is installed.
    gradients : bool, optional
        Keep the graph of all steps, also to parameters of the model. By default if ``start``, ``options`` or parameters
        of the integrator require gradients, with ``checkpoint_every``, or inside of ``torch.func.grad`` and its like.
        Of no effect in inference mode.
    checkpoint_every : int, optional
        For gradients of long runs, of first order: keep the states after every so many steps alone, and compute the
        steps between them again in the backward pass. Hooks are then called again, too. Of no effect in forward mode,
        inside of transforms of ``torch.func`` and in inference mode.
    **options
        ``masses``, ``velocities``, ``seed``, ``keys``, ``removed``: see `Integrator.start`. Only with a system.

    Returns
    -------
    Simulation

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message.

    Warns
    -----
    ConvergenceWarning
        Systems have failed.

    Notes
    -----
    Records stay on the device; nothing is read before the end, except by hooks and for trajectories.

    If the model raises an error for some systems of a batch, these stay where they were before the step, and the others
    go on with the numbers that they would have without them. Failures are ValueError, ArithmeticError and RuntimeError;
    other errors, and those of memory, end the run. So do all errors on ranks, with gradients, and if no system is left.

    With a ``domain`` (docs/distributed.md) this is a collective call with the same arguments on all ranks; masses and
    velocities are those of the atoms that a rank owns. Records of `RECORDS` are the same on all ranks. The first rank
    writes trajectories, and shows the progress bar. Hooks and functions get the state of their rank, whose atoms may
    change in each step. ``run.state.system.domain`` brings values back to the ranks that hold the atoms.
    """
    if not isinstance(start, System | State):
        raise TypeError(f"`start` must be a System or a State, got {checks.kind_of('start', start)}")
    domain = (start.system if isinstance(start, State) else start).domain
    with together(domain, now=True) as agreement:
        parts = ("start", "resume", "step", "parameters", "constraints", "per_atom")  # also of what wraps an integrator
        if isinstance(integrator, type) or not all(hasattr(integrator, name) for name in parts):
            raise TypeError(f"`integrator` must be an Integrator, such as nve(dt), got {integrator!r}")
        check_model(model)
        steps, every = checks.check_count("steps", steps), checks.check_count("every", every, 1)
        trajectory_every = every if trajectory_every is None else trajectory_every
        appends, hooks = checks.check_flag("append_trajectory", append_trajectory), checks.as_hooks(hooks)
        progress = checks.check_flag("progress", progress)
        lost: set[str] = set()
        hooked = functools.partial(_hooked, integrator, model, lost)
        hooks = [functools.partial(hooked, hook) for hook in hooks]
        writer = _Writer(trajectory, checks.check_count("trajectory_every", trajectory_every, 1), appends, integrator)
        measures = _measures(record, integrator)
        measured: Any = functools.partial(_measured, measures)
        if checkpoint_every is not None:
            checkpoint_every = checks.check_count("checkpoint_every", checkpoint_every, 1)
        if gradients is None:
            gradients = checkpoint_every is not None or _keeps_graph(start, integrator, options)
        gradients = checks.check_flag("gradients", gradients)
        if torch.is_inference_mode_enabled():
            gradients = False  # there is no graph, and what looks as if it had one cannot be saved for one
        if not gradients or (DERIVATIVES_KNOWN and derivative_asked()):
            checkpoint_every = None  # transforms of torch keep a graph of their own, and forward mode needs none
        parameters: Parameters | None = None
        if gradients and checkpoint_every is not None:
            parameters = Parameters()
            measured, hooks = parameters.watched(measured), [parameters.watched(hook) for hook in hooks]
        must_be_same(domain, steps=steps, every=every, trajectory_every=writer.every, has_trajectory=bool(writer.paths))
        must_be_same(domain, checkpoint_every=checkpoint_every, gradients=gradients, record=list(measures))
        if domain is not None:
            agreement.largest[1] = len(hooks)
    kept: list[dict[str, torch.Tensor]] = []
    survivors: Survivors | None = None
    done = -1

    def after(state: State, n: int) -> None:
        """Write and show the n-th step, once."""
        nonlocal done
        if n <= done:
            return  # the step is computed again in a backward pass
        done = n
        writer.write(state, n)
        show(n)

    def run(state: State, first: int, last: int) -> tuple[State, list[dict[str, torch.Tensor]]]:
        found = []
        for n in range(first, last):
            state = integrator.step(state, model) if survivors is None else survivors.step(integrator, state)
            for hook in hooks:
                returned: Any = hook(state)
                if returned is not None and not isinstance(returned, State):
                    raise TypeError(f"`hooks`: a hook must return a State or None, got {type(returned).__name__}")
                state = state if returned is None else returned
            if (n + 1) % every == 0:
                found.append(measured(state))
            after(state, n + 1)
        return state, found

    if domain is not None and integrator.constraints is not None:  # of which each takes part in a message
        hooks += [functools.partial(hooked, lambda _: None)] * (int(agreement.largest[1]) - len(hooks))
    shows = progress and (domain is None or domain.rank == 0)
    grad = torch.enable_grad() if gradients else torch.no_grad()
    with whole_call(domain), grad, progress_bar(steps, "step", shows) as show, writer.files, _needed(lost):
        if gradients:
            start, options = _tracked(start), {name: ordinary(value) for name, value in options.items()}
        if isinstance(start, State):
            if options:
                raise TypeError(f"`{next(iter(options))}` goes with a System; the State has it")
            state = integrator.resume(start, model)
        else:
            state = integrator.start(start, model, **options)
        if domain is None and not gradients:
            survivors = Survivors(model, integrator.per_atom)
        first_step = state.step
        kept.append(measured(state))
        after(state, 0)
        length = checkpoint_every or max(steps, 1)
        if parameters is not None and steps:
            parameters.look(lambda start: integrator.step(start, model), state)
        for first in range(0, steps, length):
            last = min(first + length, steps)
            if parameters is None:
                state, found = run(state, first, last)
            else:
                state, found = run_segment(functools.partial(run, first=first, last=last), state, parameters)
            kept += found
        if state.system.domain is not None:
            state.system.domain.settle()
        records = {name: torch.stack([entry[name] for entry in kept]) for name in measures}
    begin = read_number(first_step)
    with whole_call(state.system.domain), torch.no_grad():
        failed = failures(state, None if survivors is None else survivors.failed)
    return Simulation(state, records, [begin + n * every for n in range(len(kept))], failed)


def _keeps_graph(start: System | State, integrator: Integrator, options: Mapping[str, Any]) -> bool:
    tensors = [*tensors_of(start).values()] if isinstance(start, State) else [*start, *options.values()]
    tensors += integrator.parameters.values()
    if integrator.constraints is not None:
        tensors.append(integrator.constraints.lengths)
    return keeps_graph(*(t for t in tensors if isinstance(t, torch.Tensor)))


def _tracked(start: System | State) -> System | State:
    """The same start, of tensors that can be saved for gradients, whose positions require gradients.

    A model keeps a graph to its own parameters if positions require gradients (`FromEnergies`). Those of later steps
    often do, so without this the first evaluation alone would be missing in gradients.
    """
    system = start.system if isinstance(start, State) else start
    system = System(*map(ordinary, system))
    # transforms refuse tensors that begin a graph
    if not system.positions.requires_grad and not (DERIVATIVES_KNOWN and transforms_active()):
        system = system._replace(positions=system.positions.clone().requires_grad_())  # with its tangents
    if isinstance(start, System):
        return system
    velocities, masses, step = map(ordinary, (start.velocities, start.masses, start.step))
    evaluation = Evaluation(*map(ordinary, start.evaluation))
    return State(system, velocities, masses, evaluation, step, {k: ordinary(value) for k, value in start.extra.items()})


@contextlib.contextmanager
def _needed(lost: set[str]) -> Iterator[None]:
    """Raise with a reason where a variable is missing that states of hooks have lost."""
    try:
        yield
    except KeyError as error:
        name = str(*error.args[:1])  # a key of others may be unhashable
        if name not in lost:
            raise
        raise ValueError(
            f"`hooks`: a State was returned without '{name}', which the integrator needs: return "
            "`integrator.resume(state, model)` of it"
        ) from error


def _hooked(integrator: Integrator, model: Model, lost: set[str], hook: Hook, state: State) -> State | None:
    """What the hook returns; if it has changed the system alone, the model is called for the new one.

    Names of variables that its state lacks are added to ``lost``.
    """
    found, domain = hook(state), state.system.domain
    if isinstance(found, State):
        lost |= state.extra.keys() - found.extra.keys()
    new: Any = found if isinstance(found, State) else state
    same_evaluation = new.evaluation is state.evaluation
    if same_evaluation and new.system.domain is None and any(a is not b for a, b in zip(new.system, state.system)):
        begin: Any = _tracked(new) if torch.is_grad_enabled() else new
        return integrator.resume(begin, model)
    if (rigid := integrator.constraints) is None or STRESS not in state.extra:
        return found
    # constraint forces depend on velocities, too
    stale = new.extra.get(STRESS) is state.extra[STRESS]
    stale = stale and not (same_evaluation and new.velocities is state.velocities)
    if domain is not None:  # a hook may have changed the atoms of one rank alone
        stale = bool(domain._maximum(torch.tensor(float(stale), device=domain.device)))
    return rigid.with_stress(new) if stale else found


def _measures(
    record: str | Sequence[str] | Mapping[str, str | Callable[[State], torch.Tensor]], integrator: Integrator
) -> dict[str, Callable[[State], torch.Tensor]]:
    asked: Mapping[str, Any]
    if isinstance(record, Mapping):
        asked = record
    else:
        names = [record] if isinstance(record, str) else list(record)
        for name in names:
            checks.check_choice("record", name, RECORDS)
        asked = dict(zip(names, names))
    found: dict[str, Callable[[State], torch.Tensor]] = {}
    for name, measure in asked.items():
        if isinstance(measure, str):
            checks.check_choice("record", measure, RECORDS)
            measure = functools.partial(RECORDS[measure], integrator)
        elif not callable(measure):
            kind = type(measure).__name__
            raise TypeError(f"`record`: {name!r} must be a name of a record, or callable with a State, got {kind}")
        found[name] = measure
    return found


def _measured(measures: Mapping[str, Callable[[State], torch.Tensor]], state: State) -> dict[str, torch.Tensor]:
    """A record of the state: copies, since the next call of a model may write into the same memory."""
    found = {name: measure(state) for name, measure in measures.items()}
    for name, value in found.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"`record`: {name!r} must return a tensor, got {type(value).__name__}")
    return {name: value.clone() for name, value in found.items()}


class _Writer:
    """Writes frames of each system by ASE."""

    def __init__(
        self, paths: AnyPath | Sequence[AnyPath] | None, every: int, appends: bool, integrator: Integrator
    ) -> None:
        self.paths: list[Any] = [] if paths is None else [paths] if isinstance(paths, str | PathLike) else list(paths)
        self.every, self.files, self._rigid = every, contextlib.ExitStack(), integrator.constraints
        self._goes_on = [appends and Path(path).exists() for path in self.paths]
        self._writers: list[Any] = []
        self._bonds: tuple[torch.Tensor | None, list[Any]] | None = None  # systems of the atoms, and their constraints

    def write(self, state: State, n: int) -> None:
        """Write the state, if it is its turn."""
        if not self.paths or n % self.every:
            return
        domain, state = state.system.domain, state.collected()
        with together(domain):  # what fails on the first rank ends the others
            if domain is None or domain.rank == 0:
                frames = to_ase(state)
                if self._rigid is not None:
                    self._fix_bonds(frames, state.system.batch_idx, self._rigid)
                self._write(frames, n)

    def _fix_bonds(self, frames: Sequence[Any], batch_idx: torch.Tensor | None, rigid: Constraints) -> None:
        """Add constraints of ASE for the bonds of these frames, so that temperatures have the right number of degrees.

        Files that hold no such constraints have none; those that do have them once if they are the same objects.
        """
        if self._bonds is None or self._bonds[0] is not batch_idx:
            self._bonds = batch_idx, _bonds_of(len(frames), batch_idx, rigid)
        for atoms, bonds in zip(frames, self._bonds[1]):
            if len(bonds.pairs):
                atoms.set_constraint([*atoms.constraints, bonds])

    def _write(self, frames: Sequence[Any], n: int) -> None:
        import ase.io
        from ase.io.trajectory import TrajectoryWriter

        if len(frames) != len(self.paths):
            raise ValueError(f"`trajectory` must have a path for each of {len(frames)} systems, got {len(self.paths)}")
        if n == 0:
            for path in self.paths:
                check_format("trajectory", path, 2)
            for path in {"".join(Path(path).suffixes[-2:]): path for path in self.paths}.values():
                _check_grows(path, max(frames, key=len))
        for place, (path, goes_on, atoms) in enumerate(zip(self.paths, self._goes_on, frames)):
            is_trajectory = str(path).endswith(".traj")
            if n == 0 and is_trajectory:
                self._writers.append(self.files.enter_context(TrajectoryWriter(path, "a" if goes_on else "w")))
            if n == 0 and goes_on:
                continue
            if is_trajectory:
                self._writers[place].write(atoms)
            else:
                ase.io.write(path, atoms, append=n > 0)


def _bonds_of(n_systems: int, batch_idx: torch.Tensor | None, rigid: Constraints) -> list[Any]:
    """For each system the constraint of ASE for its bonds, with the numbers that atoms have in their system."""
    from ase.constraints import FixBondLengths

    pairs = on_host(rigid.pairs)
    if batch_idx is None:
        return [FixBondLengths(pairs)]
    systems, found = on_host(batch_idx), []
    for n in range(n_systems):
        own = systems == n
        found.append(FixBondLengths((own.cumsum() - 1)[pairs[own[pairs[:, 0]]]]))
    return found


def _check_grows(path: AnyPath, atoms: Any) -> None:
    """Raise ValueError unless ASE can add a frame to a file in this format, which it does not tell by itself."""
    import ase.io

    with tempfile.TemporaryDirectory() as folder:
        trial = Path(folder) / Path(path).name
        if trial.suffix == ".traj" or not len(atoms):
            return
        reason: Any = "the second one is lost"
        try:
            for appends in (False, True):
                ase.io.write(trial, atoms, append=appends)
            if len(ase.io.read(trial, ":")) == 2:
                return
        except Exception as error:
            reason = error
    advice = "use .xyz or .traj, which is not compressed"
    raise ValueError(f"`trajectory`: ASE cannot add frames to {trial.name} ({reason}): {advice}")


def check_format(name: str, path: AnyPath, n_frames: int) -> None:
    """Raise ValueError, which begins with the name, unless ASE can write so many frames there."""
    from ase.io.formats import UnknownFileTypeError, filetype, ioformats

    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"`{name}`: there is no folder {path.parent} for {path.name}")
    try:
        form = ioformats[filetype(str(path), read=False)]
    except (UnknownFileTypeError, KeyError):
        raise ValueError(f"`{name}`: the format of {path.name} is not known to ASE") from None
    if not form.can_write or (n_frames > 1 and form.single):
        what = "several frames" if form.can_write else "files"
        raise ValueError(f"`{name}`: ASE cannot write {what} in the format of {path.name}")


def to_ase(state: State | System | Relaxation) -> list[Any]:
    """The systems as a list of ``ase.Atoms``.

    Those of a `State` have momenta, energies, forces and stress as results, and the step in ``info``; units must be eV,
    angstrom and u. Frozen atoms have the mass of their element, and a constraint that fixes them. Those of a
    `Relaxation` have its results, and in ``info`` whether they converged or failed; it does not know which atoms were
    fixed, so they have no constraint. Charges are initial charges. With a ``domain`` this is a collective call: the
    first rank gets all atoms, the others get the systems without atoms.
    """
    if not isinstance(state, State | System | Relaxation):
        raise TypeError(f"`state` must be a State, a System or a Relaxation, got {type(state).__name__}")
    if isinstance(state, State):
        state = state.collected()
    system = state if isinstance(state, System) else state.system
    domain = system.domain
    found = structures_of(system if domain is None else domain.collect(system))
    if isinstance(state, System):
        return [atoms for atoms, _ in found]
    from ase.calculators.singlepoint import SinglePointCalculator
    from ase.constraints import FixAtoms
    from ase.stress import full_3x3_to_voigt_6_stress

    evaluation = state.evaluation
    forces = on_host(evaluation.forces if domain is None else domain.collect(evaluation.forces))
    for n, (atoms, of) in enumerate(found):
        if isinstance(state, State):
            masses = on_host(state.masses)[of].copy()  # not the memory of the state
            frozen = masses == float("inf")
            masses[frozen] = atoms.get_masses()[frozen]
            atoms.set_masses(masses)
            atoms.set_velocities(on_host(state.velocities)[of])
            if frozen.any():
                atoms.set_constraint(FixAtoms(mask=frozen))
            atoms.info["step"] = int(state.step)
        else:
            atoms.info |= {"converged": bool(state.converged[n]), "failed": bool(state.failed[n])}
        energy = on_host(evaluation.energies[n].double())  # NumPy has no bfloat16
        results = {"energy": float(energy), "forces": forces[of]}
        if evaluation.stress is not None and (isinstance(state, State) or atoms.cell.rank == 3):
            results["stress"] = full_3x3_to_voigt_6_stress(on_host(evaluation.stress[n]))
        atoms.calc = SinglePointCalculator(atoms, **results)
    return [atoms for atoms, _ in found]


def structures_of(system: System) -> list[tuple[Any, Any]]:
    """For each system its ``ase.Atoms``, and where its atoms are in the batch."""
    import ase

    if system.numbers is None:
        raise ValueError("`numbers` of the system are needed for ASE")
    n_systems, positions, numbers = count_systems(system), on_host(system.positions), on_host(system.numbers)
    index = None if system.batch_idx is None else on_host(system.batch_idx)
    cells = None if system.cell is None else on_host(system.cell.reshape(-1, 3, 3).expand(n_systems, 3, 3))
    axes = None if system.pbc is None else on_host(checks.pbc_tensor(system.pbc).expand(n_systems, 3))
    charges = None if system.charges is None or system.charges.ndim > 1 else on_host(system.charges)
    found = []
    for n in range(n_systems):
        of = slice(None) if index is None else index == n
        cell, pbc = (None, False) if cells is None else (cells[n], True if axes is None else axes[n])
        of_atoms = None if charges is None else charges[of]
        found.append((ase.Atoms(numbers[of], positions[of], cell=cell, pbc=pbc, charges=of_atoms), of))
    return found
