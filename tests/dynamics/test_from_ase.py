"""`FromASE`: calculators as models, all systems in one call or one after the other."""

import warnings

import ase.build
import numpy as np
import pytest
import torch
from ase.calculators.calculator import Calculator as CalculatorOfASE
from ase.calculators.emt import EMT

from nvalchemiops.ase import Calculator, Contribution, Dispersion, Electrostatics, FromASE, Pair
from nvalchemiops.notices import NvalchemiopsWarning
from nvalchemiops.torch.dynamics import npt, nve, relax, simulate, to_ase
from nvalchemiops.torch.systems import System, of_each_atom

from .systems import SOFT, crystal

CHARGES = {"Na": 1.0, "Cl": -1.0}
PAIRS = {"sigma": {"Na": 2.4, "Cl": 3.4}, "epsilon": 0.02}


def salts(charged=False):
    """Two sheared crystals of Na and Cl, of different size."""
    found = []
    for seed, repeat in ((1, (2, 1, 1)), (2, 1)):
        atoms = crystal(repeat, a=5.6, rattle=0.1, seed=seed)
        atoms.numbers[:] = [11, 17] * (len(atoms) // 2)
        if charged:
            atoms.set_initial_charges([0.9, -0.9] * (len(atoms) // 2))
        found.append(atoms)
    return found


def slab():
    atoms = crystal((1, 1, 1), a=5.6)
    atoms.numbers[:] = [11, 17, 11, 17]
    atoms.center(vacuum=6.0, axis=2)
    atoms.pbc = (True, True, False)
    return atoms


def molecules():
    return [ase.build.molecule(name) for name in ("NaCl", "CH3CH2OH")]


ALL = CHARGES | {"C": -0.3, "O": -0.5, "H": 0.2}
OWN = {"sigma": {"*": 2.0}, "epsilon": 0.02}
IN_ONE_CALL = {
    "pairs": ([Pair("lennard_jones", cutoff=6.0, r_switch=5.0, **PAIRS)], salts(), 1e-12),
    "pairs by pair": (
        [Pair("buckingham", cutoff=6.0, A={"Na-Cl": 1256.0, "*": 3.0}, rho=0.317, C={"Cl-Cl": 9.0, "*": 0.0})],
        salts(),
        1e-12,
    ),
    "auto": ([Electrostatics("auto", CHARGES)], salts(), 1e-5),
    "ewald": ([Electrostatics("ewald", CHARGES), Pair("lennard_jones", cutoff=6.0, **PAIRS)], salts(), 1e-5),
    "pme": ([Electrostatics("pme", CHARGES)], salts(), 1e-5),
    "initial charges": ([Electrostatics("ewald")], salts(charged=True), 1e-5),
    "within a cutoff": ([Electrostatics("dsf", CHARGES, cutoff=7.0, alpha=0.2)], salts(), 1e-12),
    "dispersion": ([Dispersion("pbe", cutoff=7.0, coordination_cutoff=6.0, smoothing=1.0)], salts(), 1e-12),
    "slab": ([Electrostatics("ewald", CHARGES)], [slab(), *salts()], 1e-5),
    "any": ([Electrostatics("auto", ALL), Pair("lennard_jones", cutoff=6.0, **OWN)], [slab(), *molecules()], 1e-5),
    "molecules": ([Electrostatics(charges=ALL), Pair("lennard_jones", cutoff=6.0, **OWN)], molecules(), 1e-5),
    "no cutoff": ([Electrostatics("coulomb", ALL), Pair("lennard_jones", **OWN)], molecules(), 1e-12),
}


def expected(calculator, frames):
    """By ASE, system by system."""
    found = []
    for atoms in frames:
        atoms.calc = calculator
        stress = atoms.get_stress(voigt=False) if atoms.cell.rank == 3 else np.zeros((3, 3))
        found.append((atoms.get_potential_energy(), atoms.get_forces(), stress))
    energies, forces, stresses = zip(*found)
    return np.array(energies), np.concatenate(forces), np.array(stresses)


@pytest.mark.parametrize("name", IN_ONE_CALL)
def test_terms_of_a_batch_are_those_of_each_system(name):
    terms, frames, tolerance = IN_ONE_CALL[name]
    calculator = Calculator(*terms)
    model = FromASE(calculator)
    found = model(System.from_ase(frames))
    assert calculator.searches == 0 and not calculator.results  # all in one call
    energies, forces, stresses = expected(calculator, frames)
    np.testing.assert_allclose(found.energies, energies, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(found.forces, forces, atol=tolerance)
    if name in ("molecules", "no cutoff"):
        assert found.stress is None
    else:
        np.testing.assert_allclose(found.stress, stresses, atol=tolerance)


class Trap:
    """A term of a user: springs to the origin."""

    def evaluate(self, system):
        x = system.positions
        return Contribution(0.5 * x.square().sum(1), -x, x.mT @ x)


def dipoles(system):
    return 0.1 * torch.tensor([1.0, 0.0, 0.5]).expand(len(system.atoms), 3)


def test_terms_for_one_system_and_other_calculators_go_one_by_one():
    frames = [crystal((2, 1, 1), a=5.6, seed=n) for n in range(2)]
    by_array = Pair(SOFT, sigma=3.4, epsilon=0.0104), Electrostatics("dsf", np.arange(8.0), cutoff=6.0, alpha=0.2)
    copper = [ase.build.bulk("Cu", a=a, cubic=True) for a in (3.5, 3.7)]
    apart = molecules()
    for calculator, structures in (
        (Calculator(*by_array), frames),
        (Calculator(Pair("lennard_jones", cutoff=6.0, sigma=np.linspace(3.0, 3.5, 8), epsilon=0.01)), frames),
        (Calculator(Trap()), frames),
        (Calculator(Electrostatics("coulomb", ALL, widths=0.3)), apart),  # between all atoms
        (Calculator(Electrostatics("ewald", CHARGES, accuracy=1e-4, widths=0.3)), salts()),
        (Calculator(Electrostatics("ewald", CHARGES, accuracy=1e-4, dipoles=dipoles)), salts()),
        (EMT(), copper),
    ):
        found = FromASE(calculator)(System.from_ase(structures))
        energies, forces, stresses = expected(calculator, structures)
        np.testing.assert_allclose(found.energies, energies, rtol=1e-13)
        np.testing.assert_allclose(found.forces, forces, atol=1e-13)
        if structures is not apart:
            np.testing.assert_allclose(found.stress, stresses, atol=1e-13)


def test_forces_one_by_one_are_those_of_their_atoms_in_any_order():
    system = System.from_ase([ase.build.molecule(name) for name in ("H2O", "NH3")])
    order = torch.randperm(len(system.positions), generator=torch.Generator().manual_seed(0))
    shuffled = of_each_atom(system, lambda t: t[order])._replace(batch_idx=system.batch_idx[order])
    model = FromASE(Calculator(Trap()))
    torch.testing.assert_close(model(shuffled).forces, model(system).forces[order])


class InFloat32(CalculatorOfASE):
    """Springs to the origin, as a neural network returns their forces."""

    implemented_properties = ("energy", "forces")

    def calculate(self, atoms=None, *args):
        super().calculate(atoms, *args)
        x = self.atoms.positions.astype(np.float32)
        self.results = {"energy": np.float32(0.5) * (x * x).sum(), "forces": -x}


def test_calculators_may_return_forces_in_float32():
    system = System.from_ase([ase.build.molecule(name) for name in ("H2O", "NH3")])
    torch.testing.assert_close(FromASE(InFloat32())(system).forces, -system.positions, rtol=1e-6, atol=1e-6)


def test_one_list_is_kept_while_atoms_move_and_follows_other_batches():
    calculator = Calculator(Pair("lennard_jones", cutoff=6.0, **PAIRS), skin=0.7)
    model = FromASE(calculator)
    batch = System.from_ase(salts())
    for n in range(3):
        model(batch._replace(positions=batch.positions + 0.05 * n))
    lists = model._bound.sum.neighbors
    assert (lists.skin, lists.num_calls, lists.num_builds) == (0.7, 3, 1)
    other = salts()[1]
    other.numbers[:] = [17, 17, 17, 11]
    found = model(System.from_ase(other))
    assert model._bound.sum.neighbors is lists
    np.testing.assert_allclose(found.forces, expected(calculator, [other])[1], atol=1e-12)
    model(batch)
    batch.numbers.numpy()[:] = 17  # in place, which torch does not count
    frames = salts()
    for atoms in frames:
        atoms.numbers[:] = 17
    np.testing.assert_allclose(model(batch).energies, expected(calculator, frames)[0], rtol=1e-12)


def test_a_call_for_other_atoms_in_between_does_not_change_the_result():
    """As of another thread, right after values were bound to the atoms."""
    calculator = Calculator(Electrostatics("ewald"), Pair("lennard_jones", cutoff=6.0, **PAIRS))
    atoms = salts(charged=True)[1]
    other = atoms.copy()
    other.numbers[:] = 11
    other.set_initial_charges(0.5 * atoms.get_initial_charges())

    class Visited(FromASE):
        visits = 0

        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if name == "_bound" and value and not self.visits:
                self.visits += 1
                self(System.from_ase(other))

    found, alone = [kind(calculator)(System.from_ase(atoms)) for kind in (Visited, FromASE)]
    for value, expected_value in zip(found, alone):
        torch.testing.assert_close(value, expected_value, rtol=1e-10, atol=1e-10)


def test_charges_may_change_from_call_to_call():
    system, model = System.from_ase(salts(charged=True)), FromASE(Calculator(Electrostatics("ewald")))
    before = model(system).energies
    system.charges.mul_(0.5)
    torch.testing.assert_close(model(system).energies, 0.25 * before)


def test_a_calculator_of_ase_relaxes_and_moves_a_batch():
    copper = [ase.build.bulk("Cu", a=a, cubic=True) for a in (3.5, 3.7)]
    for seed, atoms in enumerate(copper):
        atoms.rattle(0.05, seed=seed)
    result = relax(System.from_ase(copper), FromASE(EMT()), "lbfgs", fmax=0.01, cell=True)
    assert result.converged.all()
    for atoms, of_result in zip(to_ase(result.system), to_ase(result)):
        atoms.calc = EMT()
        assert of_result == atoms and of_result.info == {"converged": True, "failed": False}
        for name in ("energy", "forces", "stress"):
            np.testing.assert_allclose(of_result.calc.results[name], atoms.calc.get_property(name, atoms), atol=1e-10)
        assert np.linalg.norm(atoms.get_forces(), axis=1).max() < 0.01 and abs(atoms.get_stress()).max() < 1e-3
        assert abs(atoms.get_volume() / 4 - 3.59**3 / 4) < 0.05  # of copper in EMT
    mixed = relax(System.from_ase([copper[0], ase.build.molecule("H2O")]), FromASE(EMT()), "lbfgs", fmax=1.0, cell=True)
    assert ["stress" in atoms.calc.results for atoms in to_ase(mixed)] == [True, False]
    run = simulate(result.system, FromASE(EMT()), npt(0.2, 0.02, 0.01), 20, record=("conserved", "kinetic_energy"))
    assert run.records["conserved"].std(0).max() < 0.01 * run.records["kinetic_energy"].std(0).min()


class NoStress(CalculatorOfASE):
    implemented_properties = ["energy", "forces"]  # noqa: RUF012

    def calculate(self, atoms, properties, changes):
        self.results = {"energy": float((atoms.positions**2).sum()), "forces": -2.0 * atoms.positions}


def test_what_a_calculator_lacks():
    system, copper = System.from_ase(crystal(1)), System.from_ase(ase.build.bulk("Cu"))
    model = FromASE(NoStress())
    assert model(system).stress is None and FromASE(EMT(), stress=False)(copper).stress is None
    simulate(system, model, nve(0.1), 2)
    with pytest.raises(ValueError, match="no stress"):
        simulate(system, model, npt(0.1, 0.01, 0.0), 2)
    with pytest.raises(ValueError, match="gradients"):
        model(system._replace(positions=system.positions.clone().requires_grad_()))
    with pytest.raises(ValueError, match="tangents"):
        torch.func.jvp(lambda x: model(system._replace(positions=x)).forces, *[(system.positions,)] * 2)
    with pytest.raises(ValueError, match="numbers"):
        model(System(torch.zeros(2, 3)))
    for wrong in (EMT, 3.0):
        with pytest.raises(TypeError, match="calculator"):
            FromASE(wrong)
    single = System.from_ase(ase.build.bulk("Cu"), dtype=torch.float32)
    assert all(value.dtype == torch.float32 for value in FromASE(EMT())(single))


def test_terms_keep_their_gradients():
    """In one call the model is a sum of differentiable operators."""
    model = FromASE(Calculator(Pair("lennard_jones", cutoff=6.0, **PAIRS)))
    system = System.from_ase(salts())
    positions = system.positions.clone().requires_grad_()
    found = model(system._replace(positions=positions))
    (slope,) = torch.autograd.grad(found.energies.sum(), positions)
    assert (slope + found.forces).abs().max() < 1e-12


def test_charges_of_the_system_have_no_gradients():
    system = System.from_ase(salts(charged=True)[0])
    system = system._replace(charges=system.charges.clone().requires_grad_())
    with pytest.warns(NvalchemiopsWarning, match="no gradients"):
        FromASE(Calculator(Electrostatics("dsf", cutoff=5.0, alpha=0.2)))(system)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NvalchemiopsWarning)
        FromASE(Calculator(Electrostatics("dsf", CHARGES, cutoff=5.0, alpha=0.2)))(system)
        other = EMT()
        other.terms = None  # a calculator of another package may mean anything by it
        FromASE(other)(System.from_ase(ase.build.bulk("Cu"))._replace(charges=torch.ones(1, requires_grad=True)))
