"""DFT-D3 as a term of the calculator, and in the command."""

import json

import numpy as np
import pytest
from ase.build import bulk, fcc111, molecule
from ase.calculators.fd import calculate_numerical_forces, calculate_numerical_stress
from dftd3.interface import DispersionModel, RationalDampingParam, ZeroDampingParam

from nvalchemiops.ase import Calculator, Dispersion, Pair
from nvalchemiops.cli import main
from nvalchemiops.constants import BOHR_IN_ANGSTROM, HARTREE_IN_EV
from nvalchemiops.torch.interactions.dispersion import D3Parameters, RationalDamping

SHORT = {"cutoff": 12.0, "coordination_cutoff": 8.0, "smoothing": 2.0}


def shaken(atoms):
    atoms.rattle(0.05, seed=2)
    return atoms


@pytest.mark.parametrize("damping", ["bj", "zero"])
@pytest.mark.parametrize(
    "atoms",
    [shaken(molecule("C6H6")), shaken(bulk("NaCl", "rocksalt", a=5.64)), shaken(fcc111("Cu", (1, 1, 2), vacuum=8.0))],
    ids=["molecule", "crystal", "slab"],
)
def test_equals_s_dftd3(atoms, damping):
    bohr = BOHR_IN_ANGSTROM
    periodic = {} if not atoms.pbc.any() else {"lattice": atoms.cell.array / bohr, "periodic": atoms.pbc}
    model = DispersionModel(atoms.numbers, atoms.positions / bohr, **periodic)
    model.set_realspace_cutoff(20.0 / bohr, 20.0 / bohr, 15.0 / bohr)
    kind = {"bj": RationalDampingParam, "zero": ZeroDampingParam}[damping]
    expected = model.get_dispersion(kind(method="b3lyp", atm=False), grad=True)
    term = Dispersion("B3LYP", damping=damping, cutoff=20.0, coordination_cutoff=15.0, smoothing=None)
    atoms = atoms.copy()
    atoms.calc = Calculator(term)
    assert atoms.get_potential_energy() == pytest.approx(expected["energy"] * HARTREE_IN_EV, abs=1e-8)
    np.testing.assert_allclose(atoms.get_forces(), -expected["gradient"] * HARTREE_IN_EV / bohr, atol=1e-8)
    if atoms.cell.rank == 3 and atoms.pbc.all():
        virial = -expected["virial"] * HARTREE_IN_EV
        np.testing.assert_allclose(atoms.get_stress(voigt=False), -virial / atoms.get_volume(), atol=1e-9)


def test_forces_and_stress_are_derivatives_of_the_energy():
    atoms = shaken(bulk("MgO", "rocksalt", a=4.2, cubic=True))
    atoms.calc = Calculator(Dispersion("pbe", **SHORT), Pair("morse", cutoff=5.0, depth=0.1, steepness=1.2, r0=2.1))
    np.testing.assert_allclose(atoms.get_forces()[:2], calculate_numerical_forces(atoms, 1e-4, [0, 1]), atol=2e-6)
    np.testing.assert_allclose(atoms.get_stress(), calculate_numerical_stress(atoms, 1e-4), atol=2e-6)


def test_own_parameters_and_three_bodies():
    atoms = molecule("C6H6")
    energies = []
    for term in (
        Dispersion(RationalDamping(a1=0.4289, a2=4.4407, s8=0.7875), parameters=D3Parameters.load()),
        Dispersion("pbe"),
        Dispersion("pbe", s9=1.0),
    ):
        atoms.calc = Calculator(term)
        energies.append(atoms.get_potential_energy())
    assert energies[0] == energies[1]
    assert 1e-4 < energies[2] - energies[1] < 1e-3  # 9.4e-6 hartree: triples repel


def test_what_cannot_be_is_said():
    with pytest.raises(ValueError, match="functional"):
        Dispersion("no such functional")
    with pytest.raises(ValueError, match="damping"):
        Dispersion("pbe", damping="none")
    for kind, name, value in (
        (TypeError, "functional", 3),
        (TypeError, "functional", ["pbe"]),
        (TypeError, "parameters", 3),
        (TypeError, "cutoff", None),
        (TypeError, "cutoff", "far"),
        (ValueError, "cutoff", -1.0),
        (ValueError, "coordination_cutoff", 0.0),
        (ValueError, "three_body_cutoff", np.inf),
        (ValueError, "smoothing", 100.0),
        (ValueError, "smoothing", -1.0),
        (TypeError, "s9", "x"),
        (TypeError, "s9", None),
    ):
        with pytest.raises(kind, match=f"`{name}`"):
            Dispersion(**{"functional": "pbe"} | {name: value})
    atoms = molecule("H2O")
    atoms.numbers[0] = 118
    atoms.calc = Calculator(Dispersion("pbe"))
    with pytest.raises(ValueError, match="118"):
        atoms.get_potential_energy()


def test_command(tmp_path, capsys):
    atoms = molecule("C6H6")
    file = tmp_path / "benzene.xyz"
    atoms.write(file)
    for s9 in (0.0, 1.5):
        options = ["--damping", "zero", "--json", *(["--s9", str(s9)] if s9 else [])]
        assert main(["energy", str(file), "--dispersion", "pbe", *options]) == 0
        found = json.loads(capsys.readouterr().out)["frames"][0]["energy"]
        atoms.calc = Calculator(Dispersion("pbe", damping="zero", s9=s9))
        assert found == pytest.approx(atoms.get_potential_energy(), abs=1e-6)
    assert main(["energy", str(file), "--dispersion", "pbx"]) == 2
    assert "pbe" in capsys.readouterr().err
    for option in (["--damping", "zero"], ["--s9", "1"]):
        assert main(["energy", str(file), *option]) == 2
        assert f"{option[0]} is given without --dispersion" in capsys.readouterr().err
