"""The commands ``nvalchemiops energy``, ``md`` and ``relax``: structures in files, and nothing else is printed."""

import json
import os
import signal
import sys

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
from nvalchemiops.ase import Calculator, Electrostatics, FromASE, Pair, motion
from nvalchemiops.constants import FEMTOSECOND, GIGAPASCAL, KELVIN
from nvalchemiops.torch import System
from nvalchemiops.torch.dynamics import npt, simulate
from tests.support.processes import command

# -- energy ---------------------------------------------------------------------------------------

BUCKINGHAM = ["--potential", "buckingham", "--parameters", "cutoff=8", "A:Na-Cl=1256", "A:*=0", "rho=0.317", "C=0.0"]
SALT = ["--charges", "Na=1,Cl=-1"]


@pytest.fixture
def files(tmp_path):
    """A trajectory of three crystals and a molecule."""
    crystals = [bulk("NaCl", "rocksalt", a=a, cubic=True) for a in (5.4, 5.6, 5.8)]
    for seed, atoms in enumerate(crystals):
        atoms.rattle(0.1, seed=seed)
    ase.io.write(tmp_path / "salt.extxyz", crystals)
    ase.io.write(tmp_path / "water.xyz", molecule("H2O"))
    (tmp_path / "words.txt").write_text("atoms\n")
    return tmp_path


def energy(capsys, *arguments: object, status: int = 0) -> str:
    """What the command prints: to standard output, or to standard error if it fails."""
    assert cli.main(["energy", *map(str, arguments)]) == status
    captured = capsys.readouterr()
    printed, silent = (captured.err, captured.out) if status else (captured.out, captured.err)
    assert silent == ""
    return printed


def test_energies_of_a_trajectory(files, capsys):
    frames = ase.io.read(files / "salt.extxyz", ":")
    calculator = Calculator(
        Pair("buckingham", cutoff=8.0, A={"Na-Cl": 1256.0, "*": 0.0}, rho=0.317, C=0.0),
        Electrostatics("pme", {"Na": 1.0, "Cl": -1.0}, accuracy=1e-5),
    )
    arguments = [files / "salt.extxyz", *BUCKINGHAM, "--electrostatics", "pme", *SALT, "--accuracy", "1e-5"]
    printed = energy(capsys, *arguments, "--json", "--forces")
    report = json.loads(printed)
    lines = [line.strip().rstrip(",") for line in printed.splitlines()]
    assert all(json.dumps(force) in lines for force in report["frames"][2]["forces"]), "an atom for each line"
    assert report["file"] == str(files / "salt.extxyz")
    assert [term.split("(")[0] for term in report["terms"]] == ["Pair", "Electrostatics"]
    assert report["units"]["energy"] == "eV"
    assert [found["frame"] for found in report["frames"]] == [0, 1, 2]
    for found, atoms in zip(report["frames"], frames):
        atoms.calc = calculator
        assert found["formula"] == "Cl4Na4"
        assert found["n_atoms"] == 8
        assert found["energy"] == pytest.approx(atoms.get_potential_energy(), rel=1e-12)
        assert found["energy_per_atom"] == pytest.approx(found["energy"] / 8)
        np.testing.assert_allclose(found["forces"], atoms.get_forces(), atol=1e-10)
        np.testing.assert_allclose(found["stress"], atoms.get_stress(), atol=1e-12)
        assert found["pressure"] == pytest.approx(-atoms.get_stress()[:3].mean())
        assert found["largest_force"] == pytest.approx(np.linalg.norm(atoms.get_forces(), axis=1).max())
        assert found["symbols"] == list(atoms.symbols)

    lines = energy(capsys, *arguments).splitlines()
    assert len(lines) == 4
    assert lines[0].split("  ")[0] == "frame"
    for line, found in zip(lines[1:], report["frames"]):
        number, formula, n_atoms, total, per_atom, largest, pressure = line.split()
        assert (int(number), formula, int(n_atoms)) == (found["frame"], "Cl4Na4", 8)
        expected = [found["energy"], found["energy_per_atom"], found["largest_force"]]
        np.testing.assert_allclose([float(total), float(per_atom), float(largest)], expected, atol=1e-8)
        assert float(pressure) == pytest.approx(160.2176634 * found["pressure"], abs=1e-6)
    columns = {len(line) for line in lines}
    assert len(columns) == 1, "the table is aligned"


def test_energies_of_chosen_frames(files, capsys):
    arguments = [files / "salt.extxyz", "--electrostatics", "ewald", *SALT, "--json"]
    every = json.loads(energy(capsys, *arguments))["frames"]
    assert "forces" not in every[0]
    for index, numbers in (("1", [1]), ("-1", [-1]), ("1:", [1, 2]), ("::2", [0, 2]), ("-2:", [1, 2])):
        frames = json.loads(energy(capsys, *arguments, f"--index={index}"))["frames"]
        assert [frame["frame"] for frame in frames] == numbers
        for frame in frames:
            assert frame["energy"] == pytest.approx(every[frame["frame"]]["energy"], rel=1e-12)


def test_energy_of_a_molecule_with_its_forces(files, capsys):
    options = ["--electrostatics", "coulomb", "--charges", "O=-0.8,H=0.4", "--forces"]
    table, forces = energy(capsys, files / "water.xyz", *options).split("\n\n")
    assert table.splitlines()[1].split()[-1] == "-", "no cell, no pressure"
    head, *lines = forces.splitlines()
    assert head == "forces of frame 0 (eV/Å)"
    assert [line.split()[1] for line in lines] == ["O", "H", "H"]
    values = np.array([line.split()[2:] for line in lines], dtype=float)
    np.testing.assert_allclose(values.sum(axis=0), 0.0, atol=1e-7)
    assert abs(values).max() > 1.0


def test_energy_takes_options_of_potentials(files, capsys):
    def of(*parameters: str) -> float:
        options = ["--potential", "lennard_jones", "--parameters", *parameters, "--json"]
        return json.loads(energy(capsys, files / "salt.extxyz", *options, "--index", 0))["frames"][0]["energy"]

    plain = of("cutoff=6", "sigma=2.4", "epsilon:Na=0.02", "epsilon:Cl=0.01")
    assert of("cutoff=6", "sigma=2.4", "epsilon:Na=0.02", "epsilon:*=0.01") == pytest.approx(plain, rel=1e-12)
    assert of("cutoff=6,sigma=2.4", "epsilon:Na=0.02,epsilon:Cl=0.01") == plain, "as --charges are written"
    assert of("cutoff=6", "sigma=2.4", "epsilon=0.02") < plain
    assert of("cutoff=6", "sigma=2.4", "epsilon=0.02", "mixing=geometric", "shifted=true", "repulsive=9") != plain
    dsf = ["--electrostatics", "dsf", "--electrostatics-parameters", "cutoff=8", "alpha=0.2", *SALT, "--json"]
    found = json.loads(energy(capsys, files / "salt.extxyz", *dsf, "--index", 0))["frames"][0]["energy"]
    exact = json.loads(
        energy(capsys, files / "salt.extxyz", "--electrostatics", "ewald", *SALT, "--json", "--index", 0)
    )["frames"][0]["energy"]
    assert found == pytest.approx(exact, rel=0.04)


def test_energy_of_a_slab_with_charges_from_the_file(tmp_path, capsys):
    atoms = bulk("NaCl", "rocksalt", a=5.6, cubic=True)
    atoms.set_initial_charges(np.where(atoms.symbols == "Na", 1.0, -1.0))
    atoms.center(vacuum=8.0, axis=2)
    ase.io.write(tmp_path / "slab.traj", atoms)
    options = [tmp_path / "slab.traj", "--pbc", "xy", "--electrostatics", "pme"]
    assert "`slab_correction=True` is needed" in energy(capsys, *options, status=2)
    found = json.loads(energy(capsys, *options, "--slab-correction", "--json"))["frames"][0]["energy"]
    atoms.pbc = (True, True, False)
    atoms.calc = Calculator(Electrostatics("ewald", slab_correction=True))
    assert found == pytest.approx(atoms.get_potential_energy(), rel=1e-6)


def test_energies_of_what_comes_through_a_pipe(files, capsys, monkeypatch):
    options = ["--electrostatics", "ewald", *SALT, "--json"]
    expected = json.loads(energy(capsys, files / "salt.extxyz", *options))["frames"]
    with (files / "salt.extxyz").open() as pipe:
        monkeypatch.setattr(sys, "stdin", pipe)
        assert json.loads(energy(capsys, "-", "--format", "extxyz", *options))["frames"] == expected


ENERGY_MISTAKES = {
    "no such file": (["missing.xyz", *SALT, "--electrostatics", "pme"], "cannot read missing.xyz: "),
    "not a structure": ([__file__, *SALT, "--electrostatics", "pme"], f"cannot read {__file__}: "),
    "no format": (
        ["words.txt", *SALT, "--electrostatics", "pme"],
        "words.txt: ASE does not know its format; give it, as in",
    ),
    "no format of a pipe": (["-", *SALT, "--electrostatics", "pme"], "of standard input is needed, as in --format"),
    "another format": (["salt.extxyz", "--format", "x", *SALT, "--electrostatics", "pme"], "not know the format 'x'"),
    "nothing": (
        ["salt.extxyz"],
        "nothing to compute: give --potential, --electrostatics, --dispersion, or several of them",
    ),
    "no such frame": (["salt.extxyz", *SALT, "--electrostatics", "pme", "--index", "7"], "has no frame 7"),
    "no such frames": (["salt.extxyz", *SALT, "--electrostatics", "pme", "--index", "5:"], "has no frame 5:"),
    "index": (["salt.extxyz", *SALT, "--electrostatics", "pme", "--index", "x"], "'x' is neither a number nor a slice"),
    "no such potential": (["salt.extxyz", "--potential", "lennard"], "one of 'lennard_jones', "),
    "no such method": (["salt.extxyz", "--electrostatics", "p3m"], "`method` must be one of 'auto', 'ewald', "),
    "no cutoff": (
        ["salt.extxyz", "--potential", "lennard_jones", "--parameters", "sigma=1", "epsilon=1"],
        "`cutoff` is needed for periodic atoms",
    ),
    "missing parameter": (
        ["salt.extxyz", "--potential", "lennard_jones", "--parameters", "sigma=1", "cutoff=5"],
        "`epsilon` is missing",
    ),
    "unknown parameter": (
        ["salt.extxyz", "--potential", "lennard_jones", "--parameters", "sigma=1", "epsilon=1", "alpha=5"],
        "`alpha` is not a parameter",
    ),
    "no number": (
        ["salt.extxyz", "--potential", "lennard_jones", "--parameters", "sigma=one", "epsilon=1", "cutoff=5"],
        "`sigma` must be a number, got 'one'",
    ),
    "no value": (["salt.extxyz", "--potential", "morse", "--parameters", "r0"], "'r0' is not of the form KEY=VALUE"),
    "no element": (["salt.extxyz", "--potential", "morse", "--parameters", "r0:=1"], "'r0:=1' is not of the form"),
    "twice": (["salt.extxyz", "--potential", "morse", "--parameters", "r0=1", "r0=2"], "'r0' is given twice"),
    "both": (["salt.extxyz", "--potential", "morse", "--parameters", "r0=1", "r0:Na-Cl=2"], "'r0' is given twice"),
    "charges missing": (
        ["salt.extxyz", "--electrostatics", "ewald", "--charges", "Na=1"],
        "`charges` has no value for Cl",
    ),
    "charges of nothing": (
        ["salt.extxyz", "--electrostatics", "ewald"],
        "none are given (in the command by --charges Mg=2,O=-2), and the atoms have no initial charges",
    ),
    "charges of no element": (
        ["salt.extxyz", "--electrostatics", "ewald", "--charges", "Nx=1"],
        "'Nx' is not a chemical",
    ),
    "not periodic": (
        ["water.xyz", "--electrostatics", "pme", "--charges", "O=-1,H=0.5"],
        "'pme' is for periodic atoms; use 'coulomb'",
    ),
    "periodic axes": (
        ["salt.extxyz", *SALT, "--electrostatics", "pme", "--pbc", "TTF"],
        "'TTF' does not name axes",
    ),
    "parameters alone": (["salt.extxyz", "--parameters", "r0=1"], "--parameters is given without --potential"),
    "charges alone": (["salt.extxyz", *SALT], "--charges is given without --electrostatics"),
    "device": (["salt.extxyz", *SALT, "--electrostatics", "pme", "--device", "abacus"], "`device` = 'abacus'"),
}


@pytest.mark.parametrize("name", ENERGY_MISTAKES)
def test_energy_tells_what_is_wrong(name, files, capsys, monkeypatch):
    monkeypatch.chdir(files)
    arguments, message = ENERGY_MISTAKES[name]
    printed = energy(capsys, *arguments, status=2)
    assert printed.startswith("nvalchemiops energy: ")
    assert message in printed
    assert len(printed.splitlines()) == 1


OVERLAPPING_TERMS = [
    ["--potential", "lennard_jones", "--parameters", "cutoff=6", "sigma=2.4", "epsilon=0.02"],
    ["--electrostatics", "coulomb", *SALT],
    ["--electrostatics", "ewald", "--pbc", "xyz", *SALT],
    ["--electrostatics", "pme", "--pbc", "xyz", *SALT],
    ["--electrostatics", "dsf", "--electrostatics-parameters", "cutoff=8", "alpha=0.2", *SALT],
    ["--dispersion", "pbe", "--damping", "zero"],
]


@pytest.mark.parametrize("term", OVERLAPPING_TERMS, ids=lambda term: term[1])
def test_a_frame_with_atoms_at_one_place_is_named_and_the_others_are_printed(term, files, capsys):
    first, second, _ = (atoms.copy() for atoms in ase.io.read(files / "salt.extxyz", ":"))
    second.positions[5] = second.positions[2]
    for atoms in (first, second):
        atoms.pbc = "xyz" in term
    ase.io.write(files / "overlap.traj", [first, second, first])
    arguments = ["energy", str(files / "overlap.traj"), *term]
    names = " and ".join(f"{n} ({second.symbols[n]})" for n in (2, 5))
    reason = f"energies or forces are not finite: atoms {names} are 0 Å apart"
    assert cli.main(arguments) == 1
    captured = capsys.readouterr()
    assert [line.split()[0] for line in captured.out.splitlines()] == ["frame", "0", "2"]
    assert captured.err == f"nvalchemiops energy: frame 1 of {files / 'overlap.traj'}: {reason}\n"
    assert cli.main([*arguments, "--json"]) == 1
    report = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert [found.get("error") for found in report["frames"]] == [None, reason, None]


def test_atoms_whose_energies_are_not_finite_without_an_overlap_are_named(files, capsys):
    options = ["--electrostatics", "coulomb", "--charges", "O=1e200,H=1e200"]
    printed = energy(capsys, files / "water.xyz", *options, status=1)
    assert printed.endswith("water.xyz: energies or forces are not finite: atom 0 (O), atom 1 (H), atom 2 (H)\n")


def test_a_frame_that_is_refused_is_named(files, capsys):
    mixed = [bulk("NaCl", "rocksalt", a=5.6), bulk("LiCl", "rocksalt", a=5.1)]
    ase.io.write(files / "mixed.extxyz", mixed)
    printed = energy(capsys, files / "mixed.extxyz", "--electrostatics", "ewald", *SALT, status=2)
    reason = "`charges` has no value for Li,"
    assert printed.startswith(f"nvalchemiops energy: frame 1 of {files / 'mixed.extxyz'}: {reason}")


def test_energy_as_a_command_is_clean(files):
    finished = command("energy", str(files / "salt.extxyz"), "--electrostatics", "ewald", *SALT, "--index=0", "--json")
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""
    assert json.loads(finished.stdout)["frames"][0]["energy"] < -30.0


# -- md and relax ---------------------------------------------------------------------------------

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
    options = ["--index", 0, "--temperature", 30, 60, 90, "--steps", 4, "--every", 3, "--dt", 2]
    for ensemble in motion.ENSEMBLES:  # argon's compressibility is some 0.4 / GPa
        more = ["--compressibility", 0.4] if ensemble == "stochastic_cell" else []
        rows = records(capsys, "argon.xyz", "--ensemble", ensemble, *options, *more)
        assert len(rows) == 9 and len({row["potential_energy"] for row in rows[:3]}) == 1
        assert len({row["kinetic_energy"] for row in rows[:3]}) == 3
        for before, after in zip(rows[:3], rows[6:]):
            assert after["conserved"] == pytest.approx(before["conserved"], abs=1e-4)


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
    said(capsys, "relax", "mixed.traj", *ARGON, "--optimizer", "lbfgs", "--fmax", 1e-3, "--output", "relaxed.traj")
    found, start = ase.io.read("relaxed.traj"), atoms.positions.copy()
    atoms.calc = argon()
    LBFGS(atoms, logfile=None).run(fmax=1e-3)
    np.testing.assert_allclose(found.positions, atoms.positions, rtol=0.0, atol=1e-9)
    stays = (found.positions == start)[:5]
    assert stays.tolist() == [[1, 1, 1], [1, 0, 0], [0, 0, 1], [0, 1, 0], [1, 1, 1]]
    atoms.set_constraint([FixScaled([1], (True, True, True)), FixCartesian([2], (True, True, True))])
    assert motion._fixed(atoms).tolist() == [False, True, True] + [False] * 5


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

    several = ["--pressure", 0.0, 0.3]
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


def test_molecules_move_and_relax(files, capsys):
    """Without a cell there is no pressure."""
    options = ["--electrostatics", "auto", "--charges", "O=-0.4,H=0.2"]
    table = said(capsys, "md", files / "water.xyz", *options, "--temperature", 300, "--steps", 1)
    assert table.splitlines()[-1].split()[-2:] == ["-", "-"]
    rows = said(capsys, "relax", files / "water.xyz", *options, "--fmax", 100)
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
        ["relax", "argon.xyz", "--cell", "full", "--pressure", "1", "2", "3"],
        "--pressure has 3 values for 2 systems",
    ),
    "dt": (["md", "argon.xyz", "--temperature", "1", "--dt", "0"], "--dt must be positive, got 0"),
    "cold": (["md", "argon.xyz", "--temperature", "-1"], "--temperature must be at least 0 K, got -1"),
    "too long": (["md", "argon.xyz", "--temperature", "90", "--dt", "9000"], "(is --dt = 9000 fs too long?)"),
    "folder": (["md", "argon.xyz", "--temperature", "9", "--trajectory", "no/out.xyz"], "there is no folder no"),
    "format": (["relax", "argon.xyz", "--output", "out.abc"], "the format of out.abc is not known to ASE"),
    "one frame": (["relax", "argon.xyz", "--output", "POSCAR"], "cannot write several frames in the format of POSCAR"),
    "constraint": (["relax", "hooked.traj"], "a constraint Hookean; only those that hold atoms"),
    "bonds": (["relax", "bonds.traj"], "a constraint FixBondLengths; only those that hold atoms"),
    "oblique": (["relax", "oblique.traj"], "a constraint FixedPlane along a direction that is no Cartesian axis"),
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
