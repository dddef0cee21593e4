"""Systems that the tests share: crystals from ASE and random cells, as float64 tensors."""

import functools
from typing import NamedTuple

import ase.build
import ase.spacegroup
import numpy as np
import torch

from nvalchemiops.torch.neighbors import neighbor_list
from nvalchemiops.torch.neighbors.formats import full_to_half, get_neighbor_matrix_from_neighbor_list

# every output of the sums over charges
ALL = {"compute_forces": True, "compute_charge_gradients": True, "compute_virial": True}


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


def neighbors_of(system, cutoff):
    """A list for a batch in any order, sorted by its first atoms: arguments of the sums over pairs."""
    order = torch.sort(system.batch_idx, stable=True)[1]
    pairs, _, shifts = neighbor_list(
        system.positions[order], cutoff, system.cell, batch_idx=system.batch_idx[order], return_neighbor_list=True
    )
    pairs = order[pairs.long()].int()
    by_atom = torch.sort(pairs[0], stable=True)[1]
    return {"neighbor_list": pairs[:, by_atom].contiguous(), "neighbor_shifts": shifts[by_atom].contiguous()}


def csr(system, cutoff, **options):
    """A list with its row pointers: arguments of the sums over pairs."""
    positions, cell = system.positions.detach(), system.cell.detach()
    found = neighbor_list(positions, cutoff, cell, batch_idx=system.batch_idx, return_neighbor_list=True, **options)
    return dict(zip(("neighbor_list", "neighbor_ptr", "neighbor_shifts"), found))


FORMS = ("pointers", "int64", "half list", "matrix", "half matrix", "padding in between")


def in_form(near, n_atoms, form, padding_name="fill_value"):
    """The pairs of a list in another form, as arguments. A half matrix has every other pair as (j, i, -S)."""
    pairs, shifts = near["neighbor_list"], near["neighbor_shifts"]
    if form == "int64":
        return {"neighbor_list": pairs.long(), "neighbor_shifts": shifts.long()}

    def pointers():
        return torch.searchsorted(pairs[0].contiguous(), torch.arange(n_atoms + 1, dtype=torch.int32), out_int32=True)

    ptr = pointers()
    half = {"half_list": True} if "half" in form else {}
    if half:
        pairs, ptr, shifts = full_to_half(pairs, ptr, shifts)
    if form == "half matrix":
        turned = torch.arange(pairs.shape[1], device=pairs.device) % 2 == 0
        pairs, shifts = torch.where(turned, pairs.flip(0), pairs), torch.where(turned[:, None], -shifts, shifts)
        order = torch.sort(pairs[0], stable=True).indices
        pairs, shifts = pairs[:, order], shifts[order]
        ptr = pointers()
    if form in ("pointers", "half list"):
        return {"neighbor_list": pairs, "neighbor_ptr": ptr, "neighbor_shifts": shifts, **half}
    matrix, _, images = get_neighbor_matrix_from_neighbor_list(pairs, ptr, shifts, fill_value=n_atoms)
    if form != "padding in between":
        return {"neighbor_matrix": matrix, "neighbor_matrix_shifts": images, **half}
    places = torch.arange(matrix.shape[1]) * 3
    wide = torch.full((n_atoms, 3 * matrix.shape[1] + 5), -7, dtype=torch.int32)
    far = torch.full((*wide.shape, 3), 99, dtype=torch.int32)
    wide[:, places], far[:, places] = torch.where(matrix == n_atoms, -7, matrix), images
    return {"neighbor_matrix": wide, "neighbor_matrix_shifts": far, padding_name: -7}


def compound(structure):
    """A crystal with more than two ions to a cell: its system, and the charge numbers of its ions."""
    if structure == "fluorite":
        atoms, charge = ase.build.bulk("CaF2", "fluorite", a=1.0), {"Ca": 2.0, "F": -1.0}
    elif structure == "wurtzite":  # with ideal tetrahedra, which is ASE's default
        atoms, charge = ase.build.bulk("ZnS", "wurtzite", a=1.0), {"Zn": 1.0, "S": -1.0}
    else:
        sites = [(0.5, 0.5, 0.5), (0.0, 0.0, 0.0), (0.5, 0.0, 0.0)]
        atoms = ase.spacegroup.crystal(["Ca", "Ti", "O"], sites, spacegroup=221, cellpar=[1.0] * 3 + [90.0] * 3)
        charge = {"Ca": 2.0, "Ti": 4.0, "O": -2.0}
    return System.of(atoms.positions, [charge[s] for s in atoms.get_chemical_symbols()], atoms.cell.array)


# -- a few hundred atoms, to measure errors with ---------------------------------------------------


def scattered(n_atoms, cell, nearest, rng):
    """Random positions in a cell, no two of them (nor their images) closer than ``nearest``."""
    cell = np.asarray(cell, dtype=np.float64)
    near = np.stack(np.meshgrid(*[[-1.0, 0.0, 1.0]] * 3, indexing="ij"), -1).reshape(-1, 3) @ cell
    positions = np.zeros((0, 3))
    while len(positions) < n_atoms:
        new = rng.random(3) @ cell
        apart = positions[:, None, :] - new + near
        if not (np.square(apart).sum(-1) < nearest**2).any():
            positions = np.concatenate([positions, new[None]])
    return positions


def water(n_side=4, seed=0):
    """Rigid TIP3P molecules, turned at random, on a displaced grid at the density of the liquid."""
    rng = np.random.default_rng(seed)
    spacing = 3.104  # (18.015 g/mol / 0.997 g/cm³)^(1/3)
    half_angle, bond = np.radians(104.52 / 2.0), 0.9572
    arms = bond * np.array([[0.0, 0.0, 0.0], [np.sin(half_angle), np.cos(half_angle), 0.0]])
    molecule = np.concatenate([arms, arms[1:] * [-1.0, 1.0, 1.0]])
    grid = np.stack(np.meshgrid(*[np.arange(n_side)] * 3, indexing="ij"), -1).reshape(-1, 3) * spacing
    grid = grid + rng.uniform(-0.2, 0.2, grid.shape)
    turns = np.stack([random_rotation(rng) for _ in grid])
    positions = grid[:, None, :] + molecule @ turns
    return System.of(positions, np.tile([-0.834, 0.417, 0.417], len(grid)), np.eye(3) * n_side * spacing)


def random_rotation(rng):
    """A rotation (3, 3), all of them equally likely."""
    q, r = np.linalg.qr(rng.normal(size=(3, 3)))
    q = q * np.sign(np.diag(r))
    return q * np.linalg.det(q)


SKEWED = ((1.0, 0.0, 0.0), (0.35, 0.9, 0.0), (-0.3, 0.4, 0.85))


@functools.cache
def disordered(name):
    """Systems of 192 to 512 atoms, none of them with symmetry."""
    rng = np.random.default_rng(7)
    if name == "rock salt":  # displaced by a tenth of the distance of neighbors along each axis
        atoms = ase.build.bulk("NaCl", "rocksalt", a=5.64, cubic=True).repeat(4)
        positions = atoms.positions + rng.normal(scale=0.282, size=atoms.positions.shape)
        return System.of(positions, np.where(atoms.symbols == "Na", 1.0, -1.0), atoms.cell.array)
    if name == "water":
        return water()
    if name == "slab of water":  # with three times its thickness of vacuum
        system = water()
        return system._replace(cell=system.cell * torch.tensor([[1.0], [1.0], [4.0]]))
    if name == "skewed basis":  # of the lattice of "triclinic"
        basis = torch.tensor([[1.0, 0.0, 0.0], [3.0, 1.0, 0.0], [-2.0, 2.0, 1.0]], dtype=torch.float64)
        return disordered("triclinic")._replace(cell=basis @ disordered("triclinic").cell)
    length, nearest = {"ionic liquid": (19.0, 2.2), "triclinic": (21.0, 2.2), "dilute": (60.0, 2.5)}[name]
    cell = length * np.array(SKEWED if name == "triclinic" else np.eye(3))
    return System.of(scattered(216, cell, nearest, rng), np.tile([1.0, -1.0], 108), cell)
