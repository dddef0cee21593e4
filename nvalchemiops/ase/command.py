"""The command ``nvalchemiops energy``: energies and forces of the structures in a file.

What it has in common with other commands about structures, in `nvalchemiops.ase.motion`, is here.
"""

import argparse
import json
import math
import re
from typing import Any

import ase
import ase.io.formats
import numpy as np

from nvalchemiops._warp import quiet_warp
from nvalchemiops.ase.calculator import Calculator
from nvalchemiops.ase.electrostatics import Electrostatics
from nvalchemiops.ase.neighbors import neighbor_list
from nvalchemiops.ase.pair import Pair
from nvalchemiops.ase.system import Term
from nvalchemiops.cli import fail
from nvalchemiops.constants import EV_PER_ANGSTROM3_IN_GPA

OVERLAP = 1e-3
"""Atoms closer than this, in angstrom, are named as the reason for values that are not finite."""

UNITS = {
    "energy": "eV",
    "forces": "eV/angstrom",
    "stress": "eV/angstrom^3, in the order xx yy zz yz xz xy",
    "pressure": "eV/angstrom^3",
}


def energy(options: argparse.Namespace) -> int:
    """Print energies according to the options of the command; returns the exit status: 1 if one is not finite."""
    files, given, results, errors = options.file, [], [], []
    for options.file in files:  # messages name it
        frames, calculator = read(options)
        given.append((options.file, frames))
    for options.file, frames in given:
        found = [_evaluate(options, number, atoms, calculator) for number, atoms in frames]
        errors += [f"{_frame(options, one['frame'])}: {one['error']}" for one in found if "error" in one]
        results += found if len(files) == 1 else [{"file": options.file} | one for one in found]
    options.file = files[0] if len(files) == 1 else files
    finite = [result for result in results if "error" not in result]
    if options.json:
        print(as_json(options, calculator, UNITS, frames=results))
    elif finite:
        print_results(finite)
    for error in errors:
        fail("energy", error)
    return 1 if errors else 0


def read(options: argparse.Namespace) -> tuple[list[tuple[int, ase.Atoms]], Calculator]:
    """The frames that the options name, and the calculator that they describe."""
    frames = _frames(options.file, options.index, options.format)
    if options.pbc is not None:
        periodic = (False,) * 3 if options.pbc == "none" else axes_of("--pbc", options.pbc)
        for _, atoms in frames:
            atoms.pbc = periodic
    quiet_warp()
    return frames, Calculator(*_terms(options), device=options.device)


# -- what to compute ------------------------------------------------------------------------------


def _terms(options: argparse.Namespace) -> list[Term]:
    terms = []
    of_charges = ("charges", "accuracy", "electrostatics_parameters", "slab_correction")
    for option, make, others in (
        ("potential", lambda o: Pair(o.potential, **_keywords("--parameters", o.parameters)), ("parameters",)),
        ("electrostatics", _electrostatics, of_charges),
        ("dispersion", _dispersion, ("damping", "s9")),
    ):
        if getattr(options, option) is not None:
            terms.append(make(options))
            continue
        for other in others:
            if getattr(options, other):
                raise ValueError(f"--{other.replace('_', '-')} is given without --{option}")
    if not terms:
        raise ValueError("nothing to compute: give --potential, --electrostatics, --dispersion, or several of them")
    return terms


def _electrostatics(options: argparse.Namespace) -> Term:
    return Electrostatics(
        options.electrostatics,
        None if options.charges is None else _keywords("--charges", [options.charges]),
        accuracy=options.accuracy,
        slab_correction=options.slab_correction or None,
        **_keywords("--electrostatics-parameters", options.electrostatics_parameters),
    )


def _dispersion(options: argparse.Namespace) -> Term:
    from nvalchemiops.ase.dispersion import Dispersion

    return Dispersion(options.dispersion, damping=options.damping or "bj", s9=options.s9 or 0.0)


def _keywords(option: str, entries: list[str] | None) -> dict[str, Any]:
    """``["cutoff=10", "A:Mg-O=821.6"]`` as ``{"cutoff": 10, "A": {"Mg-O": 821.6}}``, also with commas in between."""
    found: dict[str, Any] = {}
    for entry in ",".join(entries).split(",") if entries else []:
        key, equals, value = entry.partition("=")
        name, colon, member = key.partition(":")
        if not (equals and name and value) or (colon and not member):
            raise ValueError(f"{option}: {entry!r} is not of the form KEY=VALUE")
        group, key = (found.setdefault(name, {}), member) if colon else (found, name)
        if not isinstance(group, dict) or key in group:
            raise ValueError(f"{option}: {name!r} is given twice")
        group[key] = _value(value)
    return found


def _value(text: str) -> Any:
    """A number or a bool if the text is one, otherwise the text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def axes_of(flag: str, text: str) -> tuple[bool, ...]:
    """Which of the axes x, y and z are in a text such as ``xy``."""
    if not text or not set(text) <= set("xyz") or len(set(text)) < len(text):
        raise ValueError(f"{flag}: {text!r} does not name axes, such as xy")
    return tuple(axis in text for axis in "xyz")


# -- frames and results ---------------------------------------------------------------------------


def _frames(file: str, index: str, form: str | None) -> list[tuple[int, ase.Atoms]]:
    """The requested frames, each with its number in the file."""
    chosen = ase.io.formats.string2index(index)
    if isinstance(chosen, str):
        raise ValueError(f"--index: {index!r} is neither a number nor a slice such as 0:100:10")
    if file == "-" and form is None:  # ASE looks at names, or at the first bytes of files
        raise ValueError("cannot read -: the format of standard input is needed, as in --format extxyz")
    try:
        number = chosen if isinstance(chosen, int) else ":"
        read: Any = ase.io.read(file, index=number, format=form, do_not_split_by_at_sign=True)
    except (IndexError, StopIteration) as error:
        raise ValueError(f"{file} has no frame {index}") from error
    except ase.io.formats.UnknownFileTypeError as error:  # its text is the end of the name, if that
        unknown = "its format; give it, as in --format extxyz" if form is None else f"the format {form!r}"
        raise ValueError(f"cannot read {file}: ASE does not know {unknown}") from error
    except Exception as error:  # readers raise errors of many types for files of other formats
        raise ValueError(f"cannot read {file}: {str(error) or type(error).__name__}") from error
    if isinstance(chosen, int):
        return [(chosen, read)]
    frames = list(enumerate(read))[chosen]
    if not frames:
        raise ValueError(f"{file} has no frame {index}")
    return frames


def _evaluate(options: argparse.Namespace, number: int, atoms: ase.Atoms, calculator: Calculator) -> dict[str, Any]:
    """The result of a frame, or an ``error`` instead, if its values are not finite: the other frames have theirs."""
    atoms.set_constraint()  # with constraints of the file ASE would change forces and energies
    atoms.calc = calculator
    try:
        result = result_of(number, atoms, options.forces, atoms.cell.rank == 3)
    except ValueError as error:
        raise ValueError(f"{_frame(options, number)}: {error}") from error
    if all(np.isfinite(value).all() for value in calculator.results.values()):
        return result
    return {name: result[name] for name in ("frame", "formula", "n_atoms")} | {"error": _reason(atoms)}


def _frame(options: argparse.Namespace, number: int) -> str:
    return f"frame {number} of {options.file}"


def _reason(atoms: ase.Atoms) -> str:
    """Which atoms have energies or forces that are not finite, or lie so close together that they have none."""
    i, j, distances = neighbor_list("ijd", atoms, OVERLAP)
    names = [f"{n} ({symbol})" for n, symbol in enumerate(atoms.symbols)]
    found = [f"atoms {names[a]} and {names[b]} are {d:.3g} Å apart" for a, b, d in zip(i, j, distances) if a <= b]
    if not found:
        values = np.column_stack([atoms.calc.results["energies"], atoms.calc.results["forces"]])
        found = [f"atom {names[n]}" for n in np.flatnonzero(~np.isfinite(values).all(axis=1))]
    listed = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
    return f"energies or forces are not finite: {listed}" if listed else "the energy or the stress is not finite"


def result_of(number: int, atoms: ase.Atoms, with_forces: bool, with_stress: bool) -> dict[str, Any]:
    """What is printed of a frame, by its calculator."""
    forces = atoms.get_forces()
    energy = atoms.get_potential_energy()
    result = {
        "frame": number,
        "formula": atoms.get_chemical_formula(),
        "n_atoms": len(atoms),
        "energy": energy,
        "energy_per_atom": energy / max(len(atoms), 1),
        "largest_force": float(np.sqrt((forces**2).sum(axis=1)).max(initial=0.0)),
    }
    if with_stress:
        stress = atoms.get_stress()
        result |= {"stress": stress.tolist(), "pressure": -float(stress[:3].mean())}
    if with_forces:
        result |= {"symbols": list(atoms.symbols), "forces": forces.tolist()}
    return result


def as_json(options: argparse.Namespace, calculator: Calculator, units: dict[str, str], **results: Any) -> str:
    """One JSON object, with the file, the terms and the units; a line for each innermost list, such as a force."""
    facts = {"file": options.file, "terms": calculator.parameters["terms"], "units": units, **results}
    text = json.dumps(_finite(facts), indent=2)  # strings in it hold no line breaks
    return re.sub(r"\[\n([^][{}]*)\n\s*\]", lambda found: "[" + re.sub(r",\n\s*", ", ", found[1].strip()) + "]", text)


def _finite(value: Any) -> Any:
    """The value with None in place of numbers that are not finite, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_results(results: list[dict[str, Any]]) -> None:
    """A table, then the forces that were asked for."""
    _print_table(results)
    for result in results:
        if "forces" in result:
            print(f"\nforces of frame {result['frame']}{' of ' + result['file'] if 'file' in result else ''} (eV/Å)")
            for number, (symbol, force) in enumerate(zip(result["symbols"], result["forces"])):
                print(f"{number:7d} {symbol:<3}" + "".join(f" {component:15.8f}" for component in force))


def _print_table(results: list[dict[str, Any]]) -> None:
    """A row for each frame; with a column more if there are several files, and two if the frames were relaxed."""
    width = max(len("formula"), *(len(result["formula"]) for result in results))
    longest = max(len(result.get("file", "")) for result in results)
    files = f"{'file':<{max(longest, 4)}}  " if longest else ""
    relaxed = f"  {'steps':>6}  {'converged':>9}" if "steps" in results[0] else ""
    print(
        f"{files}{'frame':>5}  {'formula':<{width}}  {'atoms':>7}  {'energy (eV)':>18}  {'per atom (eV)':>14}  "
        f"{'max force (eV/Å)':>16}  {'pressure (GPa)':>14}{relaxed}"
    )
    for result in results:
        pressure = f"{EV_PER_ANGSTROM3_IN_GPA * result['pressure']:14.6f}" if "pressure" in result else f"{'-':>14}"
        row = f"{result['file']:<{len(files) - 2}}  " if files else ""
        row += (
            f"{result['frame']:5d}  {result['formula']:<{width}}  {result['n_atoms']:7d}  {result['energy']:18.8f}  "
            f"{result['energy_per_atom']:14.8f}  {result['largest_force']:16.8f}  {pressure}"
        )
        if relaxed:
            row += f"  {result['steps']:6d}  {'yes' if result['converged'] else 'no':>9}"
        print(row)
