"""The command ``nvalchemiops energy``: structures in files, and nothing else is printed."""

import json
import sys

import ase.io
import ase.units
import numpy as np
import pytest
from ase.build import bulk, molecule

from nvalchemiops import cli
from nvalchemiops.ase import Calculator, Electrostatics, Pair
from tests.support.processes import command

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
    assert report["units"]["energy"] == "eV" and report["units"]["pressure"] == "eV/angstrom^3"
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


def test_energies_of_several_files(files, capsys):
    """As those of each, with the name of the file."""
    paths = [files / "salt.extxyz", files / "water.xyz"]
    options = ["--potential", "lennard_jones", "--parameters", "cutoff=3", "sigma=2", "epsilon=0.1", "--index", 0]
    alone = [json.loads(energy(capsys, path, *options, "--json")) for path in paths]
    report = json.loads(energy(capsys, *options, *paths, "--json"))
    assert report["file"] == list(map(str, paths)) and report["units"] == alone[0]["units"]
    assert report["frames"] == [{"file": one["file"]} | one["frames"][0] for one in alone]
    lines = energy(capsys, *paths, *options, "--forces").splitlines()
    assert [line.split()[:3] for line in lines[:3]] == [
        ["file", "frame", "formula"],
        [str(paths[0]), "0", "Cl4Na4"],
        [str(paths[1]), "0", "H2O"],
    ]
    assert f"forces of frame 0 of {paths[1]} (eV/Å)" in lines
    printed = energy(capsys, *paths, files / "words.txt", *options, status=2)
    assert f"cannot read {files / 'words.txt'}" in printed


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
    file = (files / "water.xyz").rename(files / "T=300.xyz")  # is no charge
    large = energy(capsys, *options[:2], "--forces", "--charges", "O=-8000", "H=4000", file)
    assert [len(line.split()) for line in large.splitlines()[-3:]] == [5, 5, 5], "a space before each component"


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
    found = json.loads(energy(capsys, *options, "--json"))["frames"][0]["energy"]
    assert json.loads(energy(capsys, *options, "--slab-correction", "--json"))["frames"][0]["energy"] == found
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
    "missing parameter, file last": (
        ["--potential", "lennard_jones", "--parameters", "sigma=1", "cutoff=5", "salt.extxyz"],
        "`epsilon` is missing",
    ),
    "no such file, last": (["--potential", "morse", "--parameters", "r0=1", "missing.xyz"], "cannot read missing.xyz"),
    "charges in words": (["--electrostatics", "pme", "--charge", "Na=1", "Na=2", "salt.extxyz"], "'Na' is given twice"),
    "no value": (["salt.extxyz", "--potential", "morse", "--parameters", "r0"], "'r0' is not of the form KEY=VALUE"),
    "no second value": (["salt.extxyz", "--potential", "morse", "--parameters", "r0=1", "a"], "'a' is not of the form"),
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
