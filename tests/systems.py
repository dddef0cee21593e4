"""Systems that the tests share: crystals from ASE and random cells, as float64 tensors."""

from typing import NamedTuple

import ase.build
import numpy as np
import torch


class System(NamedTuple):
    positions: torch.Tensor  # (n_atoms, 3)
    charges: torch.Tensor  # (n_atoms,)
    cell: torch.Tensor  # (n_systems, 3, 3)
    batch_idx: torch.Tensor  # (n_atoms,)

    @classmethod
    def of(cls, positions, charges, cell):
        positions, charges, cell = (np.array(a, dtype=np.float64) for a in (positions, charges, cell))
        return cls(
            torch.as_tensor(positions.reshape(-1, 3)),
            torch.as_tensor(charges),
            torch.as_tensor(cell).reshape(1, 3, 3),
            torch.zeros(len(charges), dtype=torch.int32),
        )

    def to(self, target):
        """The system in another dtype or on another device."""
        floats = {name: getattr(self, name).to(target) for name in ("positions", "charges", "cell")}
        on = target if isinstance(target, torch.device) else None
        return self._replace(**floats, batch_idx=self.batch_idx.to(device=on))


# structure, distance of nearest neighbors in units of the lattice constant, Madelung constant
MADELUNG = {
    "rocksalt": (0.5, 1.747564594633182),
    "cesiumchloride": (np.sqrt(0.75), 1.762674773070988),
    "zincblende": (np.sqrt(3.0) / 4.0, 1.638055053388789),
}


def crystal(structure, lattice_constant=1.0, repeat=1, displacement=0.0, seed=0):
    """A crystal of unit charges, primitive, repeated, its atoms displaced at random."""
    atoms = ase.build.bulk("NaCl", structure, a=lattice_constant).repeat(repeat)
    atoms.positions += np.random.default_rng(seed).normal(scale=displacement, size=atoms.positions.shape)
    return System.of(atoms.positions, np.where(atoms.symbols == "Na", 1.0, -1.0), atoms.cell.array)


def triclinic(n_atoms=6, charged=False, seed=1):
    """Atoms in a skewed cell, some of them outside of it."""
    rng = np.random.default_rng(seed)
    cell = np.array([[5.0, 0.0, 0.0], [2.0, 4.5, 0.0], [-1.5, 2.2, 4.0]]) + rng.normal(scale=0.1, size=(3, 3))
    positions = ((np.arange(n_atoms)[:, None] * [0.37, 0.61, 0.83]) % 1.0 + rng.integers(-2, 3, (n_atoms, 3))) @ cell
    charges = rng.normal(size=n_atoms)
    return System.of(positions, charges if charged else charges - charges.mean(), cell)


def one_atom():
    return System.of([[0.3, -0.2, 7.0]], [1.5], np.diag([3.0, 3.5, 4.0]))


def no_atoms():
    return System.of(np.zeros((0, 3)), [], np.eye(3) * 4.0)


SYSTEMS = {
    "rocksalt": lambda: crystal("rocksalt", 5.6, 2, 0.2),
    "cesiumchloride": lambda: crystal("cesiumchloride", 4.1, 2, 0.2),
    "zincblende": lambda: crystal("zincblende", 5.4, 1, 0.1),
    "triclinic": triclinic,
    "charged": lambda: triclinic(5, charged=True, seed=2),
    "one atom": one_atom,
    "no atoms": no_atoms,
}


def batch(*systems):
    """Several systems as one."""
    return System(
        torch.cat([s.positions for s in systems]),
        torch.cat([s.charges for s in systems]),
        torch.cat([s.cell for s in systems]),
        torch.cat([torch.full((len(s.charges),), n, dtype=torch.int32) for n, s in enumerate(systems)]),
    )
