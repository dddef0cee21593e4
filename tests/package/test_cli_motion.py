"""The commands ``nvalchemiops md`` and ``relax``: structures in files, and nothing else is printed."""

import json
import os
import signal
import sys
from pathlib import Path

import ase.io
import ase.units
import numpy as np
import pytest
import torch
from ase.build import bulk, molecule
from ase.constraints import (
    FixAtoms,
    FixBondLength,
    FixBondLengths,
    FixCartesian,
    FixedLine,
    FixedPlane,
    FixScaled,
    Hookean,
)
from ase.md.verlet import VelocityVerlet
from ase.optimize import LBFGS

from nvalchemiops import cli
from nvalchemiops.ase import Calculator, FromASE, Pair, motion
from nvalchemiops.constants import FEMTOSECOND, GIGAPASCAL, KELVIN
from nvalchemiops.torch import System
from nvalchemiops.torch.dynamics import npt, simulate

ARGON = ["--potential", "lennard_jones", "--parameters", "cutoff=6", "r_switch=5", "sigma=3.4", "epsilon=0.0104"]


def argon():
    return Calculator(Pair("lennard_jones", cutoff=6.0, r_switch=5.0, sigma=3.4, epsilon=0.0104))


@pytest.fixture
def crystals(tmp_path, monkeypatch):
    """Files with two crystals of argon, with one that moves, and with constraints, in the current folder."""
    monkeypatch.chdir(tmp_path)
    found = [bulk("Ar", "fcc", a=a, cubic=True).repeat((2, 1, 1)) for a in (5.2, 5.6)]
    for seed, atoms in enumerate(found):
        atoms.rattle(0.1, seed=seed)
    ase.io.write("argon.xyz", found)
    moving, held = found[0].copy(), found[0].copy()
    moving.set_velocities(np.random.default_rng(0).normal(scale=0.01, size=(8, 3)))
    ase.io.write("moving.traj", moving)
    held.set_constraint(FixAtoms([0, 3]))
    ase.io.write("held.traj", held)
    held.set_constraint(FixCartesian([1], (True, False, False)))
    ase.io.write("sliding.traj", held)
    held.set_constraint(Hookean(0, 1, 5.0, rt=1.0))
    ase.io.write("hooked.traj", held)
    held.set_constraint(FixBondLengths([[0, 1]]))
    ase.io.write("bonds.traj", held)
    held.set_constraint(FixedPlane([1], (0.0, 1.0, 1.0)))
    ase.io.write("oblique.traj", held)
    moving.positions[1] = moving.positions[0]
    ase.io.write("overlap.traj", moving)
    return found


def said(capsys, *arguments: object, status: int = 0, note: str = "") -> str:
    """What a command prints: to standard output, or to standard error if it fails."""
    assert cli.main([*map(str, arguments)]) == status
    captured = capsys.readouterr()
    printed, silent = (captured.err, captured.out) if status == 2 else (captured.out, captured.err)
    assert note in silent if note else silent == ""
    return printed


def records(capsys, *arguments, **options):
    return json.loads(said(capsys, "md", *arguments, *ARGON, "--json", **options))["records"]


def test_md_is_the_dynamics_of_ase(crystals, capsys):
    """The velocities of the file, and velocity Verlet: time, energies, temperature and pressure in their units."""
    rows = records(capsys, "moving.traj", "--dt", 4, "--steps", 20, "--every", 10, "--trajectory", "out.traj")
    atoms = ase.io.read("moving.traj")
    atoms.calc = argon()
    dynamics = VelocityVerlet(atoms, 4 * ase.units.fs)
    for row in rows:
        assert (row["step"], row["system"], row["time"]) == (dynamics.nsteps, 0, pytest.approx(0.004 * row["step"]))
        kinetic = atoms.get_kinetic_energy()
        assert row["potential_energy"] == pytest.approx(atoms.get_potential_energy(), rel=1e-7)
        assert row["kinetic_energy"] == pytest.approx(kinetic, rel=1e-6)
        assert row["conserved"] == pytest.approx(row["potential_energy"] + row["kinetic_energy"], rel=1e-12)
        # the centre of mass moves, so that all atoms count
        assert row["temperature"] == pytest.approx(atoms.get_temperature(), rel=1e-6)
        stress = atoms.get_stress(include_ideal_gas=True) / ase.units.GPa
        assert row["pressure"] == pytest.approx(-stress[:3].mean(), rel=1e-6)
        assert row["volume"] == pytest.approx(atoms.get_volume())
        dynamics.run(10)
    assert len(rows) == 3
    frames = ase.io.read("out.traj", ":")
    assert len(frames) == 3
    assert frames[2].get_potential_energy() == pytest.approx(rows[2]["potential_energy"])


def test_md_of_a_batch_at_its_temperatures_and_pressures(crystals, capsys):
    options = [
        "--ensemble",
        "npt",
        "--temperature",
        40,
        80,
        "--pressure",
        0.1,
        "--cell",
        "axes",
        "--dt",
        4,
        "--steps",
        5,
    ]
    rows = records(capsys, "argon.xyz", *options, "--trajectory", "out.xyz", "--seed", 3)
    system = System.from_ase(ase.io.read("argon.xyz", ":"))
    integrator = npt(
        4 * FEMTOSECOND, torch.tensor([40.0, 80.0], dtype=torch.float64) * KELVIN, 0.1 * GIGAPASCAL, cell="axes"
    )
    run = simulate(system, FromASE(argon()), integrator, 5, seed=3, record=("temperature", "volume", "pressure"))
    assert [(row["step"], row["system"]) for row in rows] == [(n, k) for n in range(6) for k in range(2)]
    for row in rows:
        place = row["step"], row["system"]
        assert row["temperature"] == pytest.approx(run.records["temperature"][place].item() / KELVIN, rel=1e-9)
        assert row["volume"] == pytest.approx(run.records["volume"][place].item(), rel=1e-9)
        assert row["pressure"] == pytest.approx(run.records["pressure"][place].item() / GIGAPASCAL, rel=1e-9)
    assert [len(ase.io.read(f"out-{n}.xyz", ":")) for n in range(2)] == [6, 6]
    table = said(capsys, "md", "argon.xyz", *options, "--seed", 3, *ARGON).splitlines()
    assert len(table) == 13 and table[0].split()[:3] == ["step", "time", "(ps)"]
    last = table[-1].split()
    assert float(last[3]) == pytest.approx(rows[-1]["temperature"], abs=0.01)
    assert float(last[6]) == pytest.approx(rows[-1]["volume"], abs=0.01)


def test_md_repeats_one_structure_for_several_temperatures(crystals, capsys):
    options = ["--index", 0, "--temperature", "30,60", 90, "--steps", 4, "--every", 3, "--dt", 2]
    for ensemble in motion.ENSEMBLES:  # argon's compressibility is some 0.4 / GPa
        more = ["--compressibility", 0.4] if ensemble == "stochastic_cell" else []
        rows = records(capsys, "argon.xyz", "--ensemble", ensemble, *options, *more)
        assert len(rows) == 9 and len({row["potential_energy"] for row in rows[:3]}) == 1
        assert len({row["kinetic_energy"] for row in rows[:3]}) == 3
        for before, after in zip(rows[:3], rows[6:]):
            assert after["conserved"] == pytest.approx(before["conserved"], abs=1e-4)


def test_md_goes_on_without_a_system_that_fails(crystals, capsys):
    """It has no more rows or stays where it was, and the other one has those that it has alone."""
    one, other = ase.io.read("argon.xyz", ":")
    close = one.copy()
    one.positions[3] = one.positions[2]
    close.positions[3] = close.positions[2] + [0.05, 0.0, 0.0]
    ase.io.write("overlap.xyz", [other, one, close])
    options = ["--temperature", 50, "--steps", 4, "--every", 2, "--trajectory", "out.xyz"]
    arguments = ["md", "overlap.xyz", *ARGON, "--ensemble", "nvt", *options]
    error = "system 1 has energies or velocities that are not finite at step 0: do atoms overlap?"
    found = json.loads(said(capsys, *arguments, "--json", status=1, note=error), parse_constant=pytest.fail)["records"]
    assert found.pop(1) == {"step": 0, "time": 0.0, "system": 1, "error": error}
    stays = "system 2 has stayed where it was in a step that failed: is --dt = 1 fs too long?"
    assert found.pop() == {"step": 4, "time": pytest.approx(4e-3), "system": 2, "error": stays}
    assert len({row["potential_energy"] for row in found if row["system"] == 2}) == 1
    alone = records(capsys, "overlap.xyz", "--index", 0, "--ensemble", "nvt", *options)
    assert [row for row in found if row["system"] == 0] == alone
    assert len(said(capsys, *arguments, status=1, note=f"{error}\nnvalchemiops md: {stays}").splitlines()) == 7


def test_fixed_atoms_stay(crystals, capsys):
    held = ase.io.read("held.traj")
    records(capsys, "held.traj", "--temperature", 50, "--steps", 5, "--trajectory", "out.traj")
    said(capsys, "relax", "held.traj", *ARGON, "--output", "relaxed.traj")
    for name in ("out.traj", "relaxed.traj"):
        moved = np.abs(ase.io.read(name).positions - held.positions).max(1)
        assert (moved[[0, 3]] == 0.0).all() and (moved[[1, 2, 4, 5, 6, 7]] > 1e-3).all()


@pytest.mark.parametrize("ensemble", ["nve", "npt"])
def test_bonds_that_the_file_fixes_keep_their_lengths(ensemble, crystals, capsys):
    """And take their degrees of freedom; frames without any beside them are as before."""
    free, rigid = crystals[0], crystals[1].copy()
    pairs = [[0, 1], [1, 2], [4, 5]]
    rigid.set_constraint([FixBondLengths(pairs[:2]), FixBondLength(*pairs[2])])
    lengths = [rigid.get_distance(*pair, mic=True) for pair in pairs]
    ase.io.write("rigid.traj", [free, rigid])
    options = ["--ensemble", ensemble, "--temperature", 50, "--dt", 4, "--steps", 10, "--every", 10]
    rows = records(capsys, "rigid.traj", *options, "--trajectory", "out.traj")
    moved = ase.io.read("out-1.traj")
    assert [moved.get_distance(*pair, mic=True) for pair in pairs] == pytest.approx(lengths, rel=1e-12)
    assert [constraint.pairs.tolist() for constraint in moved.constraints] == [pairs]
    assert moved.get_number_of_degrees_of_freedom() == 21 and not ase.io.read("out-0.traj").constraints
    assert Path("out-1.traj").read_bytes().count(b"FixBondLengths") == 1  # of all frames
    assert moved.get_distance(0, 3, mic=True) != pytest.approx(rigid.get_distance(0, 3, mic=True), rel=1e-4)
    for row, degrees in zip(rows, (21, 18)):
        assert 2.0 * row["kinetic_energy"] / row["temperature"] == pytest.approx(degrees * KELVIN)
    for before, after in zip(rows[:2], rows[2:]):
        assert after["conserved"] == pytest.approx(before["conserved"], abs=1e-4)


def test_atoms_that_move_in_some_directions_go_where_they_go_in_ase(crystals, capsys):
    """Along Cartesian axes, whatever names these; a dynamics takes a constraint that leaves no axis."""
    atoms = crystals[0].copy()
    sliding = [FixCartesian([1], (True, False, False)), FixScaled([2], (False, False, True))]
    planes = [FixedPlane([k], (0.0, 2.0, 0.0)) for k in (3, 4)]
    atoms.set_constraint([FixAtoms([0]), *sliding, *planes, FixedLine([4], (0.0, -1.0, 0.0))])
    ase.io.write("mixed.traj", atoms)
    said(capsys, "relax", "mixed.traj", *ARGON, "--optimizer", "L-BFGS", "--fmax", 1e-3, "--output", "relaxed.traj")
    found, start = ase.io.read("relaxed.traj"), atoms.positions.copy()
    atoms.calc = argon()
    LBFGS(atoms, logfile=None).run(fmax=1e-3)
    np.testing.assert_allclose(found.positions, atoms.positions, rtol=0.0, atol=1e-9)
    stays = (found.positions == start)[:5]
    assert stays.tolist() == [[1, 1, 1], [1, 0, 0], [0, 0, 1], [0, 1, 0], [1, 1, 1]]
    atoms.set_constraint([FixScaled([1], (True, True, True)), FixCartesian([2], (True, True, True))])
    assert motion._fixed(atoms).tolist() == [False, True, True] + [False] * 5
    atoms.positions[0] = np.nan  # of which the relaxation tells, not the constraint
    atoms.set_constraint([FixScaled([k], (k > 4, True, False)) for k in range(8)])  # as ASE reads a POSCAR
    assert motion._held(atoms).tolist() == [[k > 4, True, False] for k in range(8)]
    atoms.set_constraint([FixedPlane([1], (0.0, 1.0, 1.0)), FixAtoms([1])])
    assert motion._fixed(atoms).tolist() == [False, True] + [False] * 6


@pytest.mark.parametrize("name", ["held.traj", "sliding.traj", "hooked.traj"])
def test_energies_and_forces_are_those_without_constraints(name, crystals, capsys):
    """Fixed atoms have a force, too; ASE would print zeros, and add the energies of constraints."""
    (found,) = json.loads(said(capsys, "energy", name, *ARGON, "--json", "--forces"))["frames"]
    free = crystals[0].copy()
    free.calc = argon()
    np.testing.assert_allclose(found["forces"], free.get_forces(), rtol=0.0, atol=1e-10)
    assert found["energy"] == pytest.approx(free.get_potential_energy(), abs=1e-10)


@pytest.mark.parametrize("cell", ["isotropic", "axes", "full", None])
def test_relaxed_structures_are_minima_of_the_calculator(cell, crystals, capsys):
    options = [] if cell is None else ["--cell", cell, "--pressure", 0.2]
    printed = said(
        capsys, "relax", "argon.xyz", *ARGON, "--fmax", 1e-3, "--optimizer", "lbfgs", "--output", "out.xyz", *options
    )
    rows = [line.split() for line in printed.splitlines()]
    assert rows[0][-1] == "converged" and [row[-1] for row in rows[1:]] == ["yes", "yes"]
    for atoms, start, row in zip(ase.io.read("out.xyz", ":"), crystals, rows[1:]):
        assert float(row[3]) == pytest.approx(atoms.get_potential_energy(), abs=1e-7)
        assert int(row[-2]) > 2
        atoms.calc = argon()
        assert float(row[5]) == pytest.approx(np.linalg.norm(atoms.get_forces(), axis=1).max(), abs=1e-6)
        # forces of the chart are those in the initial cell, which differs by some percent
        assert np.linalg.norm(atoms.get_forces(), axis=1).max() < (1e-3 if cell is None else 1.1e-3)
        stress = -atoms.get_stress() / ase.units.GPa
        change = np.linalg.solve(start.cell[:], atoms.cell[:])
        if cell is None:
            assert (atoms.cell[:] == start.cell[:]).all()
        elif cell == "isotropic":
            assert np.allclose(change, change[0, 0] * np.eye(3)) and abs(stress[:3].mean() - 0.2) < 5e-3
        elif cell == "axes":
            assert np.allclose(change, np.diag(np.diag(change))) and np.abs(stress[:3] - 0.2).max() < 5e-3
        else:
            assert np.abs(stress - [0.2, 0.2, 0.2, 0, 0, 0]).max() < 5e-3


def test_relaxation_at_several_pressures(crystals, capsys):
    """One for each frame, or of one frame."""
    options = [*ARGON, "--fmax", 1e-3, "--optimizer", "lbfgs", "--cell", "isotropic", "--json"]

    def pressures(*arguments):
        frames = json.loads(said(capsys, "relax", "argon.xyz", *arguments, *options))["frames"]
        return [(frame["frame"], frame["pressure"] / ase.units.GPa) for frame in frames]

    several = ["--pressure", "0,0.3"]
    assert pressures(*several) == [(0, pytest.approx(0.0, abs=5e-3)), (1, pytest.approx(0.3, abs=5e-3))]
    found = pressures("--index", 1, *several, "--output", "out.xyz")
    assert found == [(1, pytest.approx(0.0, abs=5e-3)), (1, pytest.approx(0.3, abs=5e-3))]
    loose, dense = ase.io.read("out.xyz", ":")
    assert loose.get_volume() > 1.02 * dense.get_volume()


def test_frames_that_cannot_be_relaxed_are_json(crystals, capsys):
    """Without numbers in place of values that are not finite; the other frame is relaxed."""
    one, other = ase.io.read("argon.xyz", ":")
    one.positions[3] = one.positions[2]
    ase.io.write("overlap.xyz", [one, other])
    printed = said(capsys, "relax", "overlap.xyz", *ARGON, "--fmax", 0.1, "--json", status=1, note="systems")
    broken, relaxed = json.loads(printed, parse_constant=pytest.fail)["frames"]
    assert broken["energy"] is None and not broken["converged"] and relaxed["converged"]


def test_cells_change_along_the_axes_that_are_named(crystals, capsys):
    options = ["--cell", "full", "--mask", "xz"]
    said(capsys, "relax", "argon.xyz", *ARGON, *options, "--output", "relaxed.xyz")
    options += ["--ensemble", "npt", "--temperature", 90, "--steps", 2, "--trajectory", "out.xyz"]
    records(capsys, "argon.xyz", *options)
    for moved in (ase.io.read("relaxed.xyz", 0), ase.io.read("out-0.xyz")):
        change = np.linalg.solve(crystals[0].cell[:], moved.cell[:]) - np.eye(3)
        assert np.abs(change[1]).max() < 1e-7 and np.abs(change[:, 1]).max() < 1e-7 and np.abs(change).max() > 1e-5


def test_relax_that_does_not_converge(crystals, capsys):
    options = ["--max-steps", 2, "--fmax", 1e-6, "--json", "--forces"]
    printed = said(
        capsys, "relax", "argon.xyz", *ARGON, *options, status=1, note="note: 2 of 2 systems did not converge"
    )
    for frame in json.loads(printed)["frames"]:
        assert (frame["steps"], frame["converged"], len(frame["forces"])) == (2, False, 8)


def test_without_standard_error_notes_are_nowhere(crystals, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    options = ["--max-steps", "2", "--fmax", "1e-6", "--json"]
    assert cli.main(["relax", "argon.xyz", *ARGON, *options]) == 1
    assert len(json.loads(capsys.readouterr().out)["frames"]) == 2


@pytest.mark.parametrize("arguments", (["energy"], ["md", "--temperature", "50", "--steps", "2"]))
def test_a_reader_that_has_enough_ends_a_command(arguments, crystals, capsys, monkeypatch):
    """As ``head`` does. What was not written is not told of at the end of the process."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as gone, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", gone)
        assert cli.main([arguments[0], "argon.xyz", *ARGON, *arguments[1:]]) == 128 + signal.SIGPIPE
    assert capsys.readouterr().err == ""


def test_molecules_move_and_relax(tmp_path, capsys):
    """Without a cell there is no pressure."""
    water = tmp_path / "water.xyz"
    ase.io.write(water, molecule("H2O"))
    options = ["--electrostatics", "auto", "--charges", "O=-0.4,H=0.2"]
    table = said(capsys, "md", water, *options, "--temperature", 300, "--steps", 1)
    assert table.splitlines()[-1].split()[-2:] == ["-", "-"]
    rows = said(capsys, "relax", water, *options, "--fmax", 100)
    assert rows.splitlines()[-1].split()[-3:] == ["-", "0", "yes"]


def test_molecules_beside_crystals_have_no_volume(crystals, capsys):
    alone = crystals[1].copy()
    alone.set_cell(None), alone.set_pbc(False)
    ase.io.write("both.xyz", [crystals[0], alone])
    crystal, molecule = records(capsys, "both.xyz", "--temperature", 50, "--steps", 0)
    assert crystal["volume"] == pytest.approx(crystals[0].get_volume())
    assert set(crystal) - set(molecule) == {"volume", "pressure"}


def test_the_time_of_a_thermostat_is_that_in_which_friction_slows_atoms(crystals, capsys):
    """Without noise and neighbors, velocities decay by e in it."""
    atoms = ase.io.read("moving.traj")
    atoms.set_cell(None), atoms.set_pbc(False)
    atoms.positions *= 10.0
    ase.io.write("apart.traj", atoms)
    options = ["--ensemble", "langevin", "--temperature", 0, "--thermostat-time", 40, "--steps", 20, "--every", 20]
    start, end = records(capsys, "apart.traj", *options)
    assert end["kinetic_energy"] == pytest.approx(start["kinetic_energy"] * np.exp(-2 * 20 / 40), rel=1e-6)


MOTION_MISTAKES = {
    "no velocities": (["md", "argon.xyz"], "--temperature is needed, since argon.xyz has no velocities"),
    "no temperature": (["md", "argon.xyz", "--ensemble", "nvt"], "--temperature is needed for --ensemble nvt"),
    "pressure": (["md", "argon.xyz", "--pressure", "1"], "--pressure does not belong to --ensemble nve"),
    "cell": (["md", "argon.xyz", "--ensemble", "nvt", "--cell", "full"], "--cell does not belong to --ensemble nvt"),
    "compressibility": (
        ["md", "argon.xyz", "--ensemble", "stochastic_cell", "--temperature", "9"],
        "--compressibility is needed for --ensemble stochastic_cell",
    ),
    "no pressure": (["md", "argon.xyz", "--ensemble", "csvr", "--pressure", "1"], "does not belong to --ensemble csvr"),
    "numbers": (["md", "argon.xyz", "--temperature", "1", "2", "3"], "--temperature has 3 values for 2 systems"),
    "pressures": (
        ["relax", "--cell", "full", "--pressure", "1,2,3", "argon.xyz"],
        "--pressure has 3 values for 2 systems",
    ),
    "pressures in words": (
        ["relax", "--cell", "full", "--pressure", "-1,2", "3", "argon.xyz"],
        "--pressure has 3 values for 2 systems",
    ),
    "pressures of an abbreviation": (
        ["relax", "--cell", "full", "--press", "1,2,3", "argon.xyz"],
        "--pressure has 3 values for 2 systems",
    ),
    "numbers before the file": (["md", "--temperature", "1", "2", "3", "argon.xyz"], "--temperature has 3 values for"),
    "dt": (["md", "argon.xyz", "--temperature", "1", "--dt", "0"], "--dt must be positive, got 0"),
    "steps": (["md", "argon.xyz", "--temperature", "1", "--steps", "-1"], "--steps must not be negative, got -1"),
    "cold": (["md", "argon.xyz", "--temperature", "-1"], "--temperature must be at least 0 K, got -1"),
    "too long": (["md", "argon.xyz", "--temperature", "90", "--dt", "9000"], "(is --dt = 9000 fs too long?)"),
    "folder": (["md", "argon.xyz", "--temperature", "9", "--trajectory", "no/out.xyz"], "there is no folder no"),
    "format": (["relax", "argon.xyz", "--output", "out.abc"], "the format of out.abc is not known to ASE"),
    "one frame": (["relax", "argon.xyz", "--output", "POSCAR"], "cannot write several frames in the format of POSCAR"),
    "constraint": (["relax", "hooked.traj"], "a constraint Hookean; only those that hold atoms"),
    "bonds": (["relax", "bonds.traj"], "a constraint FixBondLengths; only those that hold atoms"),
    "oblique": (["relax", "oblique.traj"], "lets atoms move along directions that are no Cartesian axes"),
    "components": (["md", "sliding.traj", "--temperature", "9"], "lets atoms move in some directions only"),
    "mask": (
        ["md", "argon.xyz", "--ensemble", "npt", "--temperature", "9", "--mask", "ab"],
        "--mask: 'ab' does not name",
    ),
    "overlap": (["md", "overlap.traj"], "not finite at step 0: do atoms overlap?"),
    "empty mask": (["relax", "argon.xyz", "--cell", "full", "--mask", ""], "--mask: '' does not name axes"),
    "mask without cell": (["relax", "argon.xyz", "--mask", "xy"], "--mask is given without --cell"),
    "no cell": (["relax", "argon.xyz", "--pressure", "1"], "--pressure is given without --cell"),
    "fmax": (["relax", "argon.xyz", "--fmax", "-1"], "`fmax` must be"),
}


@pytest.mark.parametrize("name", MOTION_MISTAKES)
def test_md_and_relax_tell_what_is_wrong(name, crystals, capsys):
    (command, *arguments), message = MOTION_MISTAKES[name]
    assert cli.main([command, *arguments, *ARGON]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"nvalchemiops {command}: ") and message in printed and printed.count("\n") == 1
