"""Molecules and crystals in bohr, what the program s-dftd3 says of them, and how they are put into a batch."""

import functools
from typing import Any, NamedTuple

import ase.build
import ase.spacegroup
import numpy as np
import torch
from ase.collections import g2, s22
from dftd3 import interface

from nvalchemiops.constants import BOHR_IN_ANGSTROM
from nvalchemiops.torch.interactions import dispersion
from tests.reference import dispersion as slow
from tests.reference import pair as pairs_reference

F64 = torch.float64
PBE = dispersion.damping_parameters("pbe")
PROGRAM = {
    "bj": interface.RationalDampingParam,
    "zero": interface.ZeroDampingParam,
    "bjm": interface.ModifiedRationalDampingParam,
    "zerom": interface.ModifiedZeroDampingParam,
}
# of each kind the functional that everybody uses, and some with unusual numbers: s6 of double hybrids, an rs8 that is
# not one, a beta that is not zero
DAMPING = [
    ("pbe", "bj"),
    ("b3lyp", "bj"),
    ("b2plyp", "bj"),
    ("pbe", "zero"),
    ("b2plyp", "zero"),
    ("wb97x", "zero"),
    ("pbe", "bjm"),
    ("b3lyp", "zerom"),
]


class Atoms(NamedTuple):
    """One or more systems; bohr."""

    positions: torch.Tensor  # (n_atoms, 3)
    numbers: torch.Tensor  # (n_atoms,) int32
    cell: torch.Tensor | None = None  # (n_systems, 3, 3)
    pbc: torch.Tensor | None = None  # (n_systems, 3)
    batch_idx: torch.Tensor | None = None

    @classmethod
    def of(cls, atoms):
        """From an ``ase.Atoms``, in angstrom."""
        x, numbers = torch.tensor(atoms.positions) / BOHR_IN_ANGSTROM, torch.tensor(atoms.numbers, dtype=torch.int32)
        if not atoms.pbc.any():
            return cls(x, numbers)
        cell = torch.tensor(atoms.cell.complete().array)[None] / BOHR_IN_ANGSTROM
        return cls(x, numbers, cell, torch.tensor(atoms.pbc)[None])

    def arguments(self) -> dict[str, Any]:
        """For `d3_dispersion`; periodicity is only for a search of neighbors."""
        return {name: value for name, value in self._asdict().items() if name != "pbc" and value is not None}

    @property
    def systems(self) -> torch.Tensor:
        """System of each atom."""
        return torch.zeros(len(self.numbers), dtype=torch.int32) if self.batch_idx is None else self.batch_idx


def batch(*systems: Atoms) -> Atoms:
    """Several systems, all with a cell or all without."""
    periodic = systems[0].cell is not None
    return Atoms(
        torch.cat([s.positions for s in systems]),
        torch.cat([s.numbers for s in systems]),
        torch.cat([s.cell for s in systems]) if periodic else None,
        torch.cat([s.pbc for s in systems]) if periodic else None,
        torch.cat([torch.full((len(s.numbers),), n, dtype=torch.int32) for n, s in enumerate(systems)]),
    )


@functools.cache
def parameters() -> dispersion.D3Parameters:
    return dispersion.D3Parameters.load()


@functools.cache
def data() -> slow.Data:
    """The tables for the slow reference."""
    p = parameters()
    coordination = torch.where(p.has_reference, p.cn_ref, -1.0)
    return slow.Data(p.rcov, p.r4r2, p.c6ab, coordination, p.r0ab)


# -- systems --------------------------------------------------------------------------------------


def molecule(name: str) -> Atoms:
    return Atoms.of(ase.build.molecule(name))


def complexes() -> list[Atoms]:
    """The 22 complexes of P. Jurecka et al., Phys. Chem. Chem. Phys. 8, 1985 (2006)."""
    return [Atoms.of(s22[name]) for name in s22.names]


def molecules() -> list[Atoms]:
    """The 162 molecules and atoms of L. A. Curtiss et al., J. Chem. Phys. 106, 1063 (1997)."""
    return [Atoms.of(g2[name]) for name in g2.names]


def dry_ice():
    """CO2, Pa-3, at 150 K: A. Simon and K. Peters, Acta Cryst. B 36, 2750 (1980)."""
    sites, cellpar = [(0, 0, 0), (0.1185, 0.1185, 0.1185)], [5.624] * 3 + [90] * 3
    return ase.spacegroup.crystal(["C", "O"], sites, spacegroup=205, cellpar=cellpar)


def displaced(atoms, size=0.05, seed=0):
    """Without symmetry, so that no force is zero."""
    atoms.positions += np.random.default_rng(seed).normal(scale=size, size=atoms.positions.shape)
    return atoms


def _with_adsorbate():
    slab = ase.build.fcc111("Al", (2, 2, 3), vacuum=8.0, periodic=False)
    ase.build.add_adsorbate(slab, ase.build.molecule("CO"), 2.5, "ontop")
    return slab


SOLIDS = {
    "rock salt": lambda: ase.build.bulk("NaCl", "rocksalt", a=5.64),
    "silicon": lambda: ase.build.bulk("Si", a=5.431),
    "fcc copper": lambda: ase.build.bulk("Cu", a=3.615),
    "hcp magnesium": lambda: ase.build.bulk("Mg", a=3.21, c=5.21),
    "bcc iron": lambda: ase.build.bulk("Fe", a=2.866),
    "dry ice": dry_ice,
    "slab with an adsorbate": _with_adsorbate,
    "graphene": lambda: ase.build.graphene(vacuum=6.0),
}


def solid(name: str, size: float = 0.03) -> Atoms:
    return Atoms.of(displaced(SOLIDS[name](), size))


# -- what is compared -----------------------------------------------------------------------------


class Found(NamedTuple):
    energy: torch.Tensor  # (n_systems,)
    forces: torch.Tensor
    virial: torch.Tensor


def evaluate(atoms: Atoms, damping, cutoff: float, counted: float, **options) -> Found:
    options |= {} if atoms.pbc is None else {"pbc": atoms.pbc}
    energy, forces, _, virial = dispersion.d3_dispersion(
        **atoms.arguments(),
        damping=damping,
        parameters=parameters(),
        cutoff=cutoff,
        coordination_cutoff=counted,
        compute_forces=True,
        compute_virial=True,
        energy_reduction="system",
        **options,
    )
    return Found(energy, forces, virial)


def program(atoms: Atoms, damping, cutoff: float, counted: float) -> Found:
    """What s-dftd3 gives for one system. Its virial has the other sign."""
    cell = None if atoms.cell is None else atoms.cell[0].numpy()
    pbc = None if atoms.pbc is None else atoms.pbc[0].numpy()
    model = interface.DispersionModel(atoms.numbers.numpy(), atoms.positions.numpy(), cell, pbc)
    model.set_realspace_cutoff(cutoff, counted, counted)
    found = model.get_dispersion(damping, grad=True)
    energy, gradient, virial = (torch.as_tensor(found[name]) for name in ("energy", "gradient", "virial"))
    return Found(energy.reshape(1), -gradient, -virial[None])


def program_batch(systems: list[Atoms], damping, cutoff: float, counted: float) -> Found:
    found = [program(atoms, damping, cutoff, counted) for atoms in systems]
    return Found(*(torch.cat(parts) for parts in zip(*found)))


def with_numbers(damping: dispersion.RationalDamping | dispersion.ZeroDamping) -> interface.DampingParam:
    """The same damping for the program, by its numbers, without three-body term."""
    values = {name: float(value) for name, value in damping._asdict().items()}
    if isinstance(damping, dispersion.RationalDamping):
        return interface.RationalDampingParam(**values, s9=0.0)
    return interface.ModifiedZeroDampingParam(**{"bet": values.pop("beta")}, **values, s9=0.0)


def find_pairs(atoms: Atoms, reach: float) -> pairs_reference.Pairs:
    """All pairs, image by image; all systems of a batch have the same periodicity."""
    pbc = (True, True, True) if atoms.pbc is None else atoms.pbc[0].tolist()
    return pairs_reference.find_pairs(atoms.positions, atoms.cell, atoms.systems, reach, pbc)


def as_list(pairs: pairs_reference.Pairs, n_atoms: int, periodic: bool) -> dict[str, torch.Tensor]:
    """The pairs as arguments of a call."""
    order = torch.argsort(pairs.i, stable=True)
    i, j = pairs.i[order], pairs.j[order]
    ptr = torch.searchsorted(i, torch.arange(n_atoms + 1))
    found = {"neighbor_list": torch.stack([i, j]).to(torch.int32), "neighbor_ptr": ptr.to(torch.int32)}
    return found | ({"neighbor_shifts": pairs.shift[order].to(torch.int32)} if periodic else {})
