"""Structures, and slow answers to compare with."""

import numpy as np
from ase import Atoms
from ase.build import bulk, graphene, molecule
from ase.neighborlist import neighbor_list


def structures() -> dict[str, Atoms]:
    """Small cells, sheared and partly periodic ones, molecules; moved off their sites."""
    made = {
        "copper": bulk("Cu", "fcc", a=3.58, cubic=True),
        "one atom": bulk("Cu", "fcc", a=3.58),
        "magnesium": bulk("Mg", "hcp", a=3.17, c=5.14),
        "antimony": bulk("Sb", "rhombohedral", a=4.58, alpha=60),
        "salt": bulk("NaCl", "rocksalt", a=5.64, cubic=True),
        "graphene": graphene(size=(2, 2, 1), vacuum=6.0),
        "ethanol": molecule("CH3CH2OH"),
        "benzene": molecule("C6H6"),
    }
    made["graphene"].pbc = (True, True, False)
    for n, atoms in enumerate(made.values()):
        if atoms.pbc.any():
            shear = np.eye(3) + 0.03 * np.random.default_rng(n).uniform(-1, 1, (3, 3)) * np.outer(atoms.pbc, atoms.pbc)
            atoms.set_cell(atoms.cell.array @ shear, scale_atoms=True)
        atoms.rattle(0.05, seed=n)
    return made


def pairs(atoms: Atoms, cutoff: float) -> set[tuple[int, ...]]:
    """Every pair and shift within the cutoff, both ways, by ASE."""
    i, j, shifts = neighbor_list("ijS", atoms, cutoff)
    return set(zip(i.tolist(), j.tolist(), *shifts.T.tolist()))


def as_set(i, j, shifts) -> set[tuple[int, ...]]:
    """The same of a client's arrays; fails if a pair is there twice."""
    i, j, shifts = (np.asarray(a).astype(int) for a in (i, j, shifts))
    rows = list(zip(i.tolist(), j.tolist(), *shifts.reshape(-1, 3).T.tolist()))
    assert len(set(rows)) == len(rows)
    return set(rows)


def slopes(energy, atoms: Atoms, step: float = 1e-3) -> np.ndarray:
    """Forces on the first two atoms by central differences of ``energy(atoms)``."""
    forces = np.zeros((2, 3))
    for i, axis in np.ndindex(2, 3):
        values = []
        for sign in (1, -1):
            moved = atoms.copy()
            moved.positions[i, axis] += sign * step
            values.append(energy(moved))
        forces[i, axis] = -(values[0] - values[1]) / (2 * step)
    return forces


def stress(energy, atoms: Atoms, step: float = 1e-4) -> np.ndarray:
    """Stress (3, 3) by central differences of ``energy(atoms)``, symmetric strain."""
    found = np.zeros((3, 3))
    for a, b in np.ndindex(3, 3):
        values = []
        for sign in (1, -1):
            strain = np.eye(3)
            strain[a, b] += sign * step / 2
            strain[b, a] += sign * step / 2
            moved = atoms.copy()
            moved.set_cell(atoms.cell.array @ strain, scale_atoms=True)
            values.append(energy(moved))
        found[a, b] = (values[0] - values[1]) / (2 * step * atoms.get_volume())
    return found
