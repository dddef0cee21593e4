"""The calculator against ASE's and matscipy's, against finite differences, and its parameters in any form."""

import numpy as np
import pytest
import torch
from ase.build import bulk, molecule
from ase.calculators.calculator import PropertyNotImplementedError
from ase.calculators.fd import calculate_numerical_forces, calculate_numerical_stress
from ase.calculators.lj import LennardJones
from ase.calculators.morse import MorsePotential
from ase.cluster import Octahedron
from matscipy.calculators.pair_potential import LennardJonesCut
from matscipy.calculators.pair_potential import PairPotential as MatscipyPotential

import nvalchemiops.torch.interactions.pair as ready
from nvalchemiops.ase import Calculator, Contribution, Electrostatics, Pair
from nvalchemiops.constants import COULOMB_EV_ANGSTROM
from nvalchemiops.interactions.electrostatics.costs import BUILT_IN, COSTS
from nvalchemiops.torch.interactions.pair import PairPotential
from tests.support.calculators import NACL, PROPERTIES, REPULSION, argon, assert_same, salt
from tests.support.systems import MADELUNG


def slab():
    """Polar and narrow, with less vacuum than the real-space part of the sum reaches."""
    atoms = salt(3)
    atoms.set_cell(atoms.cell.array + np.array([[0, 0, 0], [0, 0, 0], [0.5, 0.0, 4.0]]))
    atoms.positions[:, 2] += 0.3 * (atoms.symbols == "Na")
    atoms.pbc = (True, True, False)
    return atoms


def compare(atoms, calculator, reference, **options):
    found, expected = atoms.copy(), atoms.copy()
    found.calc, expected.calc = calculator, reference
    assert_same(found, expected, **options)


def check_derivatives(atoms, forces_tolerance=1e-6, stress_tolerance=1e-8):
    forces = atoms.get_forces()
    assert abs(forces).max() > 0.01
    np.testing.assert_allclose(forces, calculate_numerical_forces(atoms, eps=1e-4), atol=forces_tolerance)
    if atoms.cell.rank == 3:
        stress = atoms.get_stress()
        assert (abs(stress) > 1e-5).all()
        np.testing.assert_allclose(stress, calculate_numerical_stress(atoms, eps=1e-5), atol=stress_tolerance)


# -- against other codes --------------------------------------------------------------------------


@pytest.mark.parametrize("pbc", [True, (True, True, False), (False, True, False), False])
def test_lennard_jones_of_ase(pbc):
    """ASE shifts the energy to zero at the cutoff, which is `shifted` here."""
    ours = Calculator(Pair("lennard_jones", cutoff=6.0, shifted=True, sigma=3.4, epsilon=0.0104))
    compare(argon(pbc), ours, LennardJones(sigma=3.4, epsilon=0.0104, rc=6.0, smooth=False))


def test_smoothed_lennard_jones_of_ase():
    """ASE smooths with a cubic in r²; `r_switch` is a quintic in r, so this takes an expression."""
    potential = PairPotential(
        "4*epsilon*((sigma/r)^12 - (sigma/r)^6) * select(step(r^2 - b), (c - r^2)^2*(c + 2*r^2 - 3*b)/(c - b)^3, 1); "
        "b = onset^2; c = cutoff^2",
        global_parameters=("epsilon", "sigma", "onset"),
        cutoff=6.5,
    )
    reference = LennardJones(sigma=3.4, epsilon=0.0104, rc=6.5, ro=5.0, smooth=True)
    compare(argon(), Calculator(Pair(potential, epsilon=0.0104, sigma=3.4, onset=5.0)), reference)


def test_morse_of_ase():
    """ASE's exponent is relative to r0, and its smoothing is that of `r_switch`."""
    atoms = bulk("Cu", cubic=True).repeat(2)
    atoms.rattle(0.1, seed=2)
    ours = Pair("morse", cutoff=2.1 * 2.87, r_switch=1.6 * 2.87, depth=0.34, steepness=3.9 / 2.87, r0=2.87)
    reference = MorsePotential(epsilon=0.34, r0=2.87, rho0=3.9, rcut1=1.6, rcut2=2.1)
    compare(atoms, Calculator(ours), reference)


def test_a_cluster_without_a_cell():
    cluster = Octahedron("Ar", 4, latticeconstant=5.2)
    cluster.rattle(0.2, seed=3)
    cluster.cell, cluster.pbc = None, False
    reference = LennardJones(sigma=3.4, epsilon=0.0104, rc=1000.0, smooth=False)
    parameters = {"sigma": 3.4, "epsilon": 0.0104}
    far = Calculator(Pair("lennard_jones", cutoff=1000.0, shifted=True, **parameters))
    compare(cluster, far, reference, properties=("energy", "energies", "forces"))
    everything = Calculator(Pair("lennard_jones", **parameters))
    compare(cluster, everything, reference, properties=("energy", "energies", "forces"), tolerance=1e-12)


def test_tables_by_pair_as_in_matscipy():
    atoms = argon(symbols=["Ar", "Kr"])
    sigma, epsilon = {"Ar-Ar": 3.4, "Ar-Kr": 3.55, "Kr-Kr": 3.65}, {"Ar-Ar": 0.0104, "Kr-Ar": 0.0119, "Kr-Kr": 0.014}
    reference = MatscipyPotential(
        {
            (18, 18): LennardJonesCut(0.0104, 3.4, 6.0),
            (18, 36): LennardJonesCut(0.0119, 3.55, 6.0),
            (36, 36): LennardJonesCut(0.014, 3.65, 6.0),
        }
    )
    ours = Calculator(Pair("lennard_jones", cutoff=6.0, shifted=True, sigma=sigma, epsilon=epsilon))
    compare(atoms, ours, reference, properties=("energy", "forces", "stress"))


@pytest.mark.parametrize("structure", MADELUNG)
@pytest.mark.parametrize("method", ["ewald", "pme"])
def test_madelung_energies(structure, method):
    distance, constant = MADELUNG[structure]
    a = 5.0
    atoms = bulk("NaCl", structure, a=a).repeat(2)
    atoms.calc = Calculator(Electrostatics(method, NACL, accuracy=1e-8))
    energy = -constant * COULOMB_EV_ANGSTROM / (distance * a) * len(atoms) / 2
    assert atoms.get_potential_energy() == pytest.approx(energy, rel=1e-8)
    np.testing.assert_allclose(atoms.get_potential_energies(), energy / len(atoms), rtol=1e-7)
    # a homogeneous function of degree -1: the trace of the virial is the energy
    assert atoms.get_stress()[:3].sum() * atoms.get_volume() == pytest.approx(-energy, rel=1e-6)


def test_coulomb_energy_of_a_molecule():
    atoms = molecule("CH3CH2OH")
    charges = np.random.default_rng(0).normal(size=len(atoms))
    atoms.calc = Calculator(Electrostatics("coulomb", charges))
    distances = atoms.get_all_distances()
    i, j = np.triu_indices(len(atoms), 1)
    expected = COULOMB_EV_ANGSTROM * (charges[i] * charges[j] / distances[i, j]).sum()
    assert atoms.get_potential_energy() == pytest.approx(expected, rel=1e-12)
    check_derivatives(atoms)


def test_a_slab_does_not_depend_on_its_vacuum():
    def energy(height):
        atoms = slab()
        atoms.cell[2, 2] += height
        atoms.calc = Calculator(Electrostatics("ewald", NACL, accuracy=1e-8))
        return atoms.get_potential_energy()

    energies = [energy(height) for height in (10.0, 16.0, 30.0)]
    assert max(energies) - min(energies) < 1e-5


@pytest.mark.parametrize("widths", [None, 0.3])
def test_one_term_for_periodic_atoms_slabs_and_clusters(widths, monkeypatch):
    """By the faster method, which the costs decide, with parameters for each cell."""
    cluster, stretched = salt(2), salt(2)
    cluster.pbc = False
    stretched.set_cell(stretched.cell * [[2.0], [1.0], [1.0]], scale_atoms=True)
    for slow, method in (("call_of_mesh", "ewald"), ("call_of_k_vectors", "pme")):
        monkeypatch.setitem(COSTS, "cpu", BUILT_IN["cpu"]._replace(**{slow: 1e12}))
        calculator = Calculator(Electrostatics("auto", NACL, widths=widths))
        named = [(salt(2), method, {}), (stretched, method, {}), (slab(), method, {"slab_correction": True})]
        for atoms, name, options in (*named, (cluster, "coulomb", {})):
            expected = atoms.copy()
            atoms.calc, expected.calc = calculator, Calculator(Electrostatics(name, NACL, widths=widths, **options))
            assert_same(atoms, expected, PROPERTIES if atoms.cell.rank == 3 else PROPERTIES[:3], tolerance=1e-13)


# -- derivatives ----------------------------------------------------------------------------------

TIGHT = {"accuracy": 1e-8}  # a stress at constant parameters is the derivative but for the error of the sum
DERIVATIVES = {
    "ewald": lambda: (salt(), Electrostatics("ewald", NACL, **TIGHT)),
    "pme": lambda: (salt(), Electrostatics("pme", NACL, **TIGHT)),
    "charged": lambda: (salt(), Electrostatics("ewald", {"Na": 1.0, "Cl": -0.5}, **TIGHT)),
    "slab": lambda: (slab(), Electrostatics("ewald", NACL, slab_correction=True, **TIGHT)),
    "slab by pme": lambda: (slab(), Electrostatics("pme", NACL, slab_correction=True, **TIGHT)),
    "dsf": lambda: (salt(), Electrostatics("dsf", NACL, cutoff=7.0, alpha=0.2)),
    "reaction field": lambda: (salt(), Electrostatics("reaction_field", NACL, cutoff=7.0, dielectric=78.0)),
    "yukawa": lambda: (salt(), Electrostatics("yukawa", NACL, cutoff=9.0, r_switch=7.0, kappa=0.3)),
    "buckingham": lambda: (salt(), Pair("buckingham", cutoff=7.0, r_switch=5.0, **REPULSION)),
    "lennard-jones": lambda: (
        argon((True, False, True), symbols=["Ar", "Kr"]),
        Pair("lennard_jones", cutoff=7.0, r_switch=6.0, sigma={"Ar": 3.4, "Kr": 3.6}, epsilon=0.05),
    ),
    "zbl": lambda: (salt(), Pair("ziegler_biersack_littmark", cutoff=4.0, r_switch=3.0)),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_forces_and_stress_are_derivatives(name):
    atoms, term = DERIVATIVES[name]()
    atoms = atoms[:12] if len(atoms) > 12 else atoms
    atoms.calc = Calculator(term)
    check_derivatives(atoms)


@pytest.mark.parametrize("name", DERIVATIVES)
def test_a_gpu_gives_the_same(name, gpu, monkeypatch):
    # by the same costs the same alpha is chosen, so that results differ by rounding alone
    monkeypatch.setitem(COSTS, "cuda", COSTS["cpu"])
    atoms, term = DERIVATIVES[name]()

    def results(device):
        atoms.calc = Calculator(term, device=str(device))
        return [torch.tensor(values) for values in (atoms.get_forces(), atoms.get_potential_energies())]

    expected = results("cpu")
    torch.testing.assert_close(gpu(results), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", ["ewald", "pme"])
def test_forces_are_derivatives_also_at_low_accuracy(method):
    atoms = salt()
    # at 1e-3 a pair is so close to the cutoff of PME that the differences would let it cross
    atoms.calc = Calculator(Electrostatics(method, NACL, accuracy=2e-3))
    np.testing.assert_allclose(atoms.get_forces(), calculate_numerical_forces(atoms, eps=1e-4), atol=1e-6)
    stress = atoms.get_stress()
    np.testing.assert_allclose(stress, calculate_numerical_stress(atoms, eps=1e-4), atol=1e-2 * abs(stress).max())


def test_charges_that_depend_on_the_geometry():
    """The response of charges is part of forces and stress, and is missing where a function returns plain numbers."""

    def charges(system):
        i, _, vectors = system.pairs(4.0)
        closeness = torch.exp(-vectors.norm(dim=1)) * (1 - vectors.square().sum(1) / 16.0) ** 3
        around = torch.zeros_like(system.positions[:, 0]).index_add(0, i, closeness)
        return system.tensor(np.where(system.atoms.symbols == "Na", 1.0, -1.0)) + 3.0 * (around - around.mean())

    for options in ({"method": "ewald", **TIGHT}, {"method": "dsf", "cutoff": 7.0, "alpha": 0.2}):
        atoms = salt()
        atoms.calc = Calculator(Electrostatics(charges=charges, **options))
        check_derivatives(atoms, stress_tolerance=2e-8)
        found = atoms.get_charges()
        assert np.ptp(found[atoms.symbols == "Na"]) > 0.01
        fixed = atoms.copy()
        fixed.calc = Calculator(Electrostatics(charges=lambda system, c=charges: c(system).detach().numpy(), **options))
        assert fixed.get_potential_energy() == pytest.approx(atoms.get_potential_energy(), rel=1e-12)
        assert abs(fixed.get_forces() - atoms.get_forces()).max() > 0.01
        np.testing.assert_allclose(fixed.get_charges(), found, rtol=1e-12)
        with torch.inference_mode():
            again = atoms.copy()
            again.calc = Calculator(Electrostatics(charges=charges, **options))
            np.testing.assert_allclose(again.get_forces(), atoms.get_forces(), atol=1e-13)


def test_charges_of_a_molecule_that_depend_on_the_geometry():
    def charges(system):
        i, j, vectors = system.pairs(None)
        weights = torch.exp(-vectors.norm(dim=1)) * (i - j)
        return torch.zeros_like(system.positions[:, 0]).index_add(0, i, weights)

    atoms = molecule("H2O")
    atoms.calc = Calculator(Electrostatics("coulomb", charges))
    check_derivatives(atoms)


# -- parameters in any form -----------------------------------------------------------------------


def test_forms_of_parameters():
    atoms = argon(symbols=["Ar", "Kr"])
    sigma = {"Ar": 3.4, "Kr": 3.6}
    by_pair = {"Ar-Ar": 3.4, "Ar-Kr": 3.5, ("Kr", "Kr"): 3.6}
    array = np.where(atoms.symbols == "Ar", 3.4, 3.6)
    forms = [sigma, {"Ar": 3.4, "*": 3.6}, array, list(array), by_pair, {"Ar-Kr": 3.5, "Kr-Kr": 3.6, "*": 3.4}]
    energies = []
    for form in forms:
        atoms.calc = Calculator(Pair("lennard_jones", cutoff=6.0, sigma=form, epsilon=0.0104))
        energies.append(atoms.get_potential_energy())
    np.testing.assert_allclose(energies, energies[0], rtol=1e-13)
    atoms.calc = Calculator(Pair("lennard_jones", cutoff=6.0, sigma=3.4, epsilon=0.0104))
    assert atoms.get_potential_energy() != pytest.approx(energies[0])


def test_a_star_alone_is_a_number():
    values = [{"A": 900.0, "rho": 0.3, "C": C} for C in (2.0, {"*": 2.0})]
    first, second = (Calculator(Pair("buckingham", cutoff=5.0, **given)) for given in values)
    compare(salt(1), first, second)


def test_forms_of_charges():
    atoms = salt()
    array = np.where(atoms.symbols == "Na", 1.0, -1.0)
    atoms.set_initial_charges(array)
    found = []
    for charges in (NACL, array, None, lambda system: array, lambda system: system.tensor(array), torch.tensor(array)):
        atoms.calc = Calculator(Electrostatics("ewald", charges))
        found.append([atoms.get_potential_energy(), *atoms.get_charges()])
    np.testing.assert_array_equal(found, [found[0]] * len(found))


def test_numbers_of_nuclei_are_known():
    atoms = molecule("H2O")
    formula = ready.ziegler_biersack_littmark(5.0)
    energies, forces = formula(
        torch.tensor(atoms.positions), z=torch.tensor([8.0, 1.0, 1.0], dtype=torch.float64), compute_forces=True
    )
    atoms.calc = Calculator(Pair("ziegler_biersack_littmark", cutoff=5.0))
    np.testing.assert_allclose(atoms.get_potential_energies(), energies, rtol=1e-13)
    np.testing.assert_allclose(atoms.get_forces(), forces, rtol=1e-12)


def test_terms_add_up():
    atoms = salt()
    repulsion, coulomb = Pair("buckingham", cutoff=7.0, **REPULSION), Electrostatics("pme", NACL)
    results = []
    for terms in ((repulsion,), (coulomb,), (repulsion, coulomb)):
        atoms.calc = Calculator(*terms)
        results.append([atoms.calc.get_property(name, atoms) for name in PROPERTIES])
    for one, other, both in zip(*results):
        np.testing.assert_allclose(one + other, both, rtol=1e-12, atol=1e-12)


def test_a_term_of_your_own():
    class Field:
        """Charges in a uniform field along x."""

        def __init__(self, strength):
            self.strength = strength

        def evaluate(self, system):
            charges = system.tensor(np.where(system.atoms.symbols == "Na", 1.0, -1.0))
            forces = torch.zeros_like(system.positions)
            forces[:, 0] = self.strength * charges
            return Contribution(-self.strength * charges * system.positions[:, 0], forces, None)

    atoms = salt()
    atoms.calc = Calculator(Electrostatics("ewald", NACL), Field(0.3))
    check = atoms.copy()
    check.calc = Calculator(Electrostatics("ewald", NACL))
    charges = np.where(atoms.symbols == "Na", 1.0, -1.0)
    expected = check.get_potential_energy() - 0.3 * (charges * atoms.positions[:, 0]).sum()
    assert atoms.get_potential_energy() == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(atoms.get_forces()[:, 0], check.get_forces()[:, 0] + 0.3 * charges, rtol=1e-12)
    with pytest.raises(ValueError, match="no virial"):
        atoms.get_stress()


def test_the_shapes_of_a_term_of_your_own():
    """Values of one system are taken as functions of torch return them, and one energy of all atoms counts once."""

    class Own(Pair):
        def evaluate(self, system):
            found = super().evaluate(system)
            virial = None if found.virial is None else found.virial[None]
            return found._replace(energies=self.shaped(found.energies), virial=virial)

    atoms, given, own = salt(), Pair("buckingham", cutoff=7.0, **REPULSION), Own("buckingham", cutoff=7.0, **REPULSION)
    atoms.calc = Calculator(given, given)
    energy, energies, stress = atoms.get_potential_energy(), atoms.get_potential_energies(), atoms.get_stress()
    for shaped in (lambda e: e[None], lambda e: e.numpy(), sum, lambda e: e.sum()[None], lambda e: float(sum(e))):
        own.shaped = shaped
        for terms in ((given, own), (own, own)):
            atoms.calc = Calculator(*terms)
            assert atoms.get_potential_energy() == pytest.approx(energy, rel=1e-14)
            np.testing.assert_allclose(atoms.get_stress(), stress, rtol=1e-12, atol=1e-15)
    with pytest.raises(PropertyNotImplementedError, match="energies"):
        atoms.get_potential_energies()
    own.shaped = lambda energies: energies.numpy()
    np.testing.assert_allclose(Calculator(given, own).get_potential_energies(atoms), energies, rtol=1e-14)
    own.shaped = lambda energies: energies[:, None]
    with pytest.raises(ValueError, match=r"`energies` of shape \(8, 1\), which must be \(8,\)"):
        Calculator(given, own).get_potential_energy(atoms)


def test_a_term_may_keep_what_it_returns():
    class Springs:
        def __init__(self):
            self.energies = torch.zeros(8, dtype=torch.float64, requires_grad=True)
            self.forces = torch.zeros(8, 3, dtype=torch.float64)

        def evaluate(self, system):
            self.energies.data += 1.0
            return Contribution(self.energies, self.forces.fill_(len(system.atoms)), None, self.energies)

    atoms = salt()
    atoms.calc = Calculator(Springs())
    first = atoms.get_potential_energies(), atoms.get_forces()
    kept = dict(atoms.calc.results)
    atoms.positions += 0.1
    assert atoms.get_potential_energy() == 16.0
    np.testing.assert_array_equal(kept["energies"], np.ones(8))
    np.testing.assert_array_equal(first[0], np.ones(8))
