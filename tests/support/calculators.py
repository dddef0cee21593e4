"""Atoms and comparisons that the tests of the calculator share."""

import numpy as np
from ase.build import bulk

from nvalchemiops.ase import Calculator, Electrostatics, Pair

NACL = {"Na": 1.0, "Cl": -1.0}
REPULSION = {"A": {"Na-Cl": 1256.3, "Na-Na": 487.0, ("Cl", "Cl"): 3485.0}, "rho": {"Na-Cl": 0.317, "*": 0.29}, "C": 0.0}
PROPERTIES = ("energy", "free_energy", "energies", "forces", "stress")


def argon(pbc=True, seed=1, symbols=None):
    """32 atoms in a skewed cell, off their sites, some of them outside of it."""
    rng = np.random.default_rng(seed)
    atoms = bulk("Ar", "fcc", a=5.3, cubic=True).repeat(2)
    atoms.set_cell(atoms.cell.array @ (np.eye(3) + rng.normal(scale=0.03, size=(3, 3))), scale_atoms=True)
    atoms.positions += rng.normal(scale=0.15, size=atoms.positions.shape)
    atoms.positions += rng.integers(-1, 2, (len(atoms), 3)) * atoms.pbc @ atoms.cell.array
    atoms.pbc = pbc
    if symbols is not None:
        atoms.symbols = rng.choice(symbols, len(atoms))
    return atoms


def salt(seed=1, displacement=0.15):
    atoms = bulk("NaCl", "rocksalt", a=5.64, cubic=True)
    rng = np.random.default_rng(seed)
    atoms.set_cell(atoms.cell.array @ (np.eye(3) + rng.normal(scale=0.03, size=(3, 3))), scale_atoms=True)
    atoms.positions += rng.normal(scale=displacement, size=atoms.positions.shape)
    return atoms


def rigid_ions(method="ewald", skin=0.5, **options):
    return Calculator(Pair("buckingham", cutoff=7.0, **REPULSION), Electrostatics(method, NACL, **options), skin=skin)


def assert_same(found, expected, properties=PROPERTIES, tolerance=1e-10):
    """Results of two calculators for their atoms."""
    for name in properties:
        values = [np.asarray(a.calc.get_property(name, a)) for a in (found, expected)]
        assert values[0].shape == values[1].shape, name
        scale = max(1.0, abs(values[1]).max())
        np.testing.assert_allclose(*values, rtol=tolerance, atol=tolerance * scale, err_msg=name)
