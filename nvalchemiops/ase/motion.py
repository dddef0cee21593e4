"""The commands ``nvalchemiops md`` and ``nvalchemiops relax``: dynamics and relaxation of the structures in a file."""

import argparse
import importlib
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ase
import ase.io
import numpy as np
import torch
from ase.calculators.singlepoint import SinglePointCalculator
from ase.constraints import FixAtoms, FixBondLengths, FixCartesian, FixedLine, FixedPlane, FixScaled

from nvalchemiops.ase import command
from nvalchemiops.ase.models import FromASE
from nvalchemiops.cli import fail
from nvalchemiops.constants import FEMTOSECOND, GIGAPASCAL, KELVIN
from nvalchemiops.progress import on_terminal
from nvalchemiops.torch import dynamics
from nvalchemiops.torch.dynamics import CellFilter, Constraints, Integrator, State, nose_hoover, nve, simulate
from nvalchemiops.torch.dynamics.simulate import RECORDS, check_format
from nvalchemiops.torch.systems import System

UNITS = {
    "time": "ps",
    "temperature": "K",
    "potential_energy": "eV",
    "kinetic_energy": "eV",
    "conserved": "eV",
    "volume": "angstrom^3",
    "pressure": "GPa",
}

ENSEMBLES: dict[str, Callable[..., Integrator]] = {
    "nve": nve,
    "langevin": dynamics.langevin,
    "nvt": nose_hoover,
    "csvr": dynamics.csvr,
    "nph": dynamics.nph,
    "npt": dynamics.npt,
    "stochastic_cell": dynamics.stochastic_cell,
}

ARGUMENTS = {
    "temperature": KELVIN,
    "pressure": GIGAPASCAL,
    "compressibility": 1.0 / GIGAPASCAL,
    "thermostat_time": FEMTOSECOND,
    "barostat_time": FEMTOSECOND,
}
"""Numbers that ensembles take, with the units of the command."""


# -- dynamics -------------------------------------------------------------------------------------


def md(options: argparse.Namespace) -> int:
    """Run dynamics according to the options of the command; returns the exit status: 1 if a system has failed."""
    for name in ("dt", "thermostat_time", "barostat_time", "compressibility", "steps", "every"):
        value = getattr(options, name)
        if value is not None and not value > (-1 if name == "steps" else 0):
            must = "not be negative" if name == "steps" else "be positive"
            raise ValueError(f"{_flag(name)} must {must}, got {value:g}")
    for value in options.temperature or ():
        if not value >= 0.0:
            raise ValueError(f"--temperature must be at least 0 K, got {value:g}")
    integrator, drawing = _integrators(options)
    found, calculator = command.read(options)
    frames = [atoms for _, atoms in _systems(found, options, "temperature", "pressure")]
    paths = None if options.trajectory is None else _paths(options.trajectory, len(frames))
    has_velocities = all(atoms.has("momenta") for atoms in frames) and drawing is None
    if options.temperature is None and not has_velocities:
        raise ValueError(f"--temperature is needed, since {options.file} has no velocities")
    device, model = calculator.device, FromASE(calculator)
    system = System.from_ase(frames, device=device)

    def of_all(arrays: Sequence[np.ndarray]) -> torch.Tensor:
        return torch.as_tensor(np.concatenate(arrays), device=device)

    bonds = _bonds(frames)
    if len(bonds):
        rigid = Constraints(torch.as_tensor(bonds, device=device))
        integrator, drawing = integrator.constrained(rigid), None if drawing is None else drawing.constrained(rigid)
    masses = of_all([np.where(_fixed(atoms), np.inf, atoms.get_masses()) for atoms in frames])
    velocities = of_all([atoms.get_velocities() for atoms in frames]) if has_velocities else None
    with torch.no_grad():
        state = (drawing or integrator).start(system, model, masses=masses, velocities=velocities, seed=options.seed)
    table = _Table(integrator, options)
    table.add(state)
    try:
        run = simulate(
            state,
            model,
            integrator,
            options.steps,
            record=(),
            hooks=[table.after_step],
            trajectory=paths,
            trajectory_every=table.every,
            progress=on_terminal(),
        )
    except ValueError as error:  # such as positions that are not finite, or far away
        raise ValueError(f"after step {table.step}: {error} (is --dt = {options.dt:g} fs too long?)") from error
    table.end(run.failed)
    if options.json:
        print(command.as_json(options, calculator, UNITS, records=table.rows))
    for reason in table.errors.values():
        fail("md", reason)
    return 1 if table.errors else 0


def _integrators(options: argparse.Namespace) -> tuple[Integrator, Integrator | None]:
    """The integrator, and another that draws velocities for it if it has no temperature itself."""
    make, dt = ENSEMBLES[options.ensemble], options.dt * FEMTOSECOND
    named = {name: getattr(options, name) for name in ARGUMENTS}
    given = {name: _number(value, ARGUMENTS[name]) for name, value in named.items() if value is not None}
    taken = inspect.signature(make).parameters
    drawing = nose_hoover(dt, given.pop("temperature")) if make is nve and "temperature" in given else None
    if "friction" in taken and "thermostat_time" in given:
        given["friction"] = 1.0 / given.pop("thermostat_time")
    if options.cell is not None:
        given["cell"] = options.cell
    if options.mask is not None:
        given["mask"] = command.axes_of("--mask", options.mask)
    for name in given:
        if name not in taken:
            raise ValueError(f"{_flag(name)} does not belong to --ensemble {options.ensemble}")
    if "pressure" in taken:
        given.setdefault("pressure", 0.0)
    for name, parameter in taken.items():
        if parameter.default is parameter.empty and name not in ("dt", *given):
            raise ValueError(f"{_flag(name)} is needed for --ensemble {options.ensemble}")
    return make(dt, **given), drawing


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _number(value: Any, unit: float) -> Any:
    """One number, or a tensor of one for each system."""
    values = torch.as_tensor(value, dtype=torch.float64).reshape(-1) * unit
    return values if len(values) > 1 else float(values)


class _Table:
    """Rows of records, printed as they come, or kept for JSON."""

    def __init__(self, integrator: Integrator, options: argparse.Namespace) -> None:
        self.every = options.every or max(options.steps // 10, 1)
        self.rows: list[dict[str, Any]] = []
        self.errors: dict[int, str] = {}  # of systems, whose last rows they are
        self._integrator, self._dt, self._last, self.step = integrator, options.dt, options.steps, 0
        self._print = not options.json
        self._write = _writer()

    def after_step(self, state: State) -> None:
        """A hook of `simulate`."""
        self.step += 1
        if self.step % self.every == 0 or self.step == self._last:
            self.add(state)

    def add(self, state: State) -> None:
        """A row for each system."""
        columns = [name for name in UNITS if name in RECORDS]
        if state.evaluation.stress is None:
            columns = [name for name in columns if name not in ("volume", "pressure")]
        measured = {name: RECORDS[name](self._integrator, state) for name in columns}
        values = {name: (column / ARGUMENTS.get(name, 1.0)).tolist() for name, column in measured.items()}
        if self._print and self.step == 0:
            self._write(HEAD)
        n_systems = len(values["temperature"])
        for system in range(n_systems):
            if system in self.errors:
                continue
            row = self._place(system) | {name: column[system] for name, column in values.items()}
            if row.get("volume") == 0.0:
                del row["volume"], row["pressure"]
            if not np.isfinite(list(row.values())).all():
                reason = f"is --dt = {self._dt:g} fs too long?" if self.step else "do atoms overlap?"
                self._fail(system, f"has energies or velocities that are not finite at step {self.step}: {reason}")
                if len(self.errors) == n_systems:
                    raise FloatingPointError("; ".join(self.errors.values()))
                continue
            self.rows.append(row)
            if self._print:
                self._write(_line(row))

    def end(self, failed: torch.Tensor) -> None:
        """Errors of the systems that have failed (n_systems,) with numbers that are finite."""
        for system in torch.nonzero(failed).flatten().tolist():
            if system not in self.errors:
                reason = f"is --dt = {self._dt:g} fs too long?"
                self._fail(system, f"has stayed where it was in a step that failed: {reason}")

    def _fail(self, system: int, reason: str) -> None:
        self.errors[system] = f"system {system} {reason}"
        self.rows.append(self._place(system) | {"error": self.errors[system]})

    def _place(self, system: int) -> dict[str, Any]:
        return {"step": self.step, "time": 1e-3 * self._dt * self.step, "system": system}


HEAD = (
    f"{'step':>8}  {'time (ps)':>10}  {'system':>6}  {'T (K)':>9}  {'potential (eV)':>16}  {'conserved (eV)':>16}  "
    f"{'volume (Å³)':>12}  {'pressure (GPa)':>14}"
)


def _line(row: dict[str, Any]) -> str:
    volume, pressure = (
        f"{row[name]:{width}}" if name in row else "-" for name, width in (("volume", ".2f"), ("pressure", ".4f"))
    )
    return (
        f"{row['step']:8d}  {row['time']:10.4f}  {row['system']:6d}  {row['temperature']:9.2f}  "
        f"{row['potential_energy']:16.6f}  {row['conserved']:16.6f}  {volume:>12}  {pressure:>14}"
    )


def _writer() -> Any:
    """``print``, without spoiling a progress bar."""
    try:
        return importlib.import_module("tqdm").tqdm.write
    except ImportError:
        return print


# -- relaxation -----------------------------------------------------------------------------------


def relax(options: argparse.Namespace) -> int:
    """Relax structures according to the options of the command; returns the exit status: 1 if one did not converge."""
    for name in ("pressure", "mask"):
        if getattr(options, name) is not None and options.cell is None:
            raise ValueError(f"--{name} is given without --cell")
    found, calculator = command.read(options)
    numbers, frames = zip(*_systems(found, options, "pressure"))
    if options.output is not None:
        check_format("--output", options.output, len(frames))
    cell: bool | CellFilter = False
    if options.cell is not None:
        pressure = _number(options.pressure or 0.0, GIGAPASCAL)
        axes = command.axes_of("--mask", "xyz" if options.mask is None else options.mask)
        cell = CellFilter.of(options.cell, axes, scalar_pressure=pressure)
    fixed = np.concatenate([_held(atoms) for atoms in frames])
    relaxed = dynamics.relax(
        System.from_ase(frames, device=calculator.device),
        FromASE(calculator),
        options.optimizer,
        fmax=options.fmax,
        cell=cell,
        fixed=fixed if fixed.any() else None,
        max_steps=options.max_steps,
        progress=on_terminal(),
    )
    results = []
    for n, (number, atoms, moved) in enumerate(zip(numbers, frames, dynamics.to_ase(relaxed))):
        atoms.set_cell(moved.cell)
        atoms.set_positions(moved.positions, apply_constraint=False)
        atoms.calc = SinglePointCalculator(atoms, **moved.calc.results)
        result = command.result_of(number, atoms, options.forces, "stress" in moved.calc.results)
        result |= {"steps": int(relaxed.steps[n]), "converged": moved.info["converged"]}
        results.append(result)
    if options.output is not None:
        ase.io.write(options.output, list(frames))
    if options.json:
        print(command.as_json(options, calculator, command.UNITS, frames=results))
    else:
        command.print_results(results)
    return 0 if bool(relaxed.converged.all()) else 1


# -- files ----------------------------------------------------------------------------------------


def _systems(
    frames: list[tuple[int, ase.Atoms]], options: argparse.Namespace, *names: str
) -> list[tuple[int, ase.Atoms]]:
    """The frames, or copies of one for each value of the options with these names; raise for other counts of values."""
    counts = {name: len(getattr(options, name) or ()) for name in names}
    if len(frames) == 1:
        frames = [(number, atoms.copy()) for number, atoms in frames for _ in range(max(1, *counts.values()))]
    for name, count in counts.items():
        if count not in (0, 1, len(frames)):
            raise ValueError(f"--{name} has {count} values for {len(frames)} systems")
    return frames


HOLDING = (FixAtoms, FixCartesian, FixScaled, FixedPlane, FixedLine)
"""Constraints of ASE that hold atoms, or keep them from moving in some directions."""


def _held(atoms: ase.Atoms, besides: tuple[type, ...] = ()) -> np.ndarray:
    """Which components of positions stay (n_atoms, 3), as constraints let forces and steps pass.

    Raise for constraints that do not hold atoms, except those of the given types.
    """
    constraints = [constraint for constraint in atoms.constraints if not isinstance(constraint, besides)]
    for constraint in constraints:
        if not isinstance(constraint, HOLDING):
            name = type(constraint).__name__
            raise ValueError(f"the file has a constraint {name}; only those that hold atoms are supported")
    held = np.zeros((len(atoms), 3), dtype=bool)
    start = ase.Atoms(atoms.numbers, cell=atoms.cell, pbc=atoms.pbc)  # whatever the positions are
    for axis, unit in enumerate(np.eye(3)):
        forces, steps = (np.tile(unit, (len(atoms), 1)) for _ in range(2))
        for constraint in constraints:  # a POSCAR has one for each atom
            constraint.adjust_forces(start, forces)
            constraint.adjust_positions(start, steps)
        for passed in (forces, steps):
            kept = (passed * unit).sum(axis=1)
            if not np.allclose(passed, np.outer(np.round(kept), unit), atol=1e-6):
                raise ValueError("the file lets atoms move along directions that are no Cartesian axes")
            held[:, axis] |= kept < 0.5
    return held


def _fixed(atoms: ase.Atoms) -> np.ndarray:
    """Whether each atom is fixed; raise for atoms that move in some directions only."""
    held = _held(atoms, besides=(FixBondLengths,))
    fixed: np.ndarray = np.all(held, axis=1)
    if (held.any(axis=1) & ~fixed).any():
        raise ValueError("the file lets atoms move in some directions only; in dynamics an atom is fixed or free")
    return fixed


def _bonds(frames: Sequence[ase.Atoms]) -> np.ndarray:
    """Pairs of atoms of all frames whose distances the constraints of the files fix, (n_pairs, 2)."""
    starts = np.cumsum([0, *map(len, frames)])
    found = [
        np.asarray(constraint.pairs) + start
        for start, atoms in zip(starts, frames)
        for constraint in atoms.constraints
        if isinstance(constraint, FixBondLengths)
    ]
    return np.concatenate([np.empty((0, 2), dtype=np.int64), *found])


def _paths(text: str, n_systems: int) -> list[Path]:
    """A file for the trajectory of each system."""
    path = Path(text)
    check_format("--trajectory", path, 2)
    if n_systems == 1:
        return [path]
    return [path.with_name(f"{path.stem}-{n}{path.suffix}") for n in range(n_systems)]
