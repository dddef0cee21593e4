"""Neighbor lists: two formats, batches, coordination shells, and a list that is kept while atoms move.

A neighbor list says which atoms are closer to each other than a cutoff, and in which image of the cell. Here it is
built in one call for a batch of crystals whose coordination shells are known from geometry (12, 6, 24, ... neighbors in
fcc), and for skewed cells with open and periodic axes, where the set of pairs is compared with ASE's list. Then argon
is melted: 864 atoms with the Lennard-Jones potential, density and temperature of A. Rahman, Phys. Rev. 136, A405
(1964), doi:10.1103/PhysRev.136.A405. Its list is a `VerletList`, which searches anew only when an atom has moved by
half of its skin.

What to look at: the counts of the shells, "equal" for all sets of pairs, how few searches the dynamics needs, and a
radial distribution function g(r) without shells, whose first peak is where Rahman found it.
Units: angstrom, eV. Takes ten seconds; nothing is downloaded.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import ase.build
import ase.neighborlist
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from ase import Atoms
from tqdm import tqdm

from nvalchemiops._warp import quiet_warp
from nvalchemiops.constants import AVOGADRO_PER_MOL, BOLTZMANN_EV_PER_KELVIN, FEMTOSECOND_IN_ASE_TIME
from nvalchemiops.torch.interactions.pair import lennard_jones
from nvalchemiops.torch.neighbors import VerletList, neighbor_list
from nvalchemiops.torch.neighbors.formats import get_neighbor_list_from_neighbor_matrix

NEAREST = 2.5  # angstrom, distance of nearest neighbors in all crystals
RAHMAN_PEAK = 3.7  # angstrom

# -- structures -----------------------------------------------------------------------------------


def crystals() -> dict[str, Atoms]:
    """Primitive cells, of one or two atoms, with the same distance of nearest neighbors."""
    a = NEAREST
    return {
        "sc": ase.build.bulk("Po", "sc", a=a),
        "bcc": ase.build.bulk("Fe", "bcc", a=2 * a / np.sqrt(3)),
        "fcc": ase.build.bulk("Cu", "fcc", a=np.sqrt(2) * a),
        "hcp": ase.build.bulk("Mg", "hcp", a=a, c=np.sqrt(8 / 3) * a),
        "diamond": ase.build.bulk("C", "diamond", a=4 * a / np.sqrt(3)),
    }


def tensors(atoms: Atoms) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(atoms.positions), torch.tensor(atoms.cell.array)


def shells(distances: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Distances of the shells around an atom, and how many neighbors are in each."""
    return torch.unique(distances.round(decimals=6), return_counts=True)


# -- batches --------------------------------------------------------------------------------------


def search_batch(structures: list[Atoms], cutoff: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Shells around the first atom of each structure, all structures searched in one call.

    The systems stand one after the other, with a cell for each; `batch_idx` says where an atom belongs.
    """
    positions = torch.cat([torch.tensor(a.positions) for a in structures])
    cell = torch.stack([torch.tensor(a.cell.array) for a in structures])
    sizes = torch.tensor([len(a) for a in structures])
    batch_idx = torch.repeat_interleave(torch.arange(len(structures), dtype=torch.int32), sizes)

    _, ptr, _, distances = neighbor_list(
        positions, cutoff, cell, batch_idx=batch_idx, return_neighbor_list=True, return_distances=True
    )
    first = torch.cumsum(sizes, 0) - sizes
    return [shells(distances[ptr[i] : ptr[i + 1]]) for i in first]  # the pairs of atom i begin at ptr[i]


# -- the same pairs as others find ----------------------------------------------------------------


def as_set(i: torch.Tensor, j: torch.Tensor, shifts: torch.Tensor) -> set[tuple[int, ...]]:
    """Pairs with their images, without the order that they happen to have."""
    return {(*pair, *shift) for *pair, shift in zip(i.tolist(), j.tolist(), map(tuple, shifts.tolist()))}


def compare(atoms: Atoms, cutoff: float) -> tuple[int, bool]:
    """Number of pairs, and whether list, matrix and ASE's list have the same ones."""
    positions, cell = tensors(atoms)
    pbc = torch.tensor(atoms.pbc)
    pairs, _, shifts = neighbor_list(positions, cutoff, cell, pbc, return_neighbor_list=True)
    found = as_set(*pairs, shifts)

    matrix, count, matrix_shifts = neighbor_list(positions, cutoff, cell, pbc)
    converted, _, converted_shifts = get_neighbor_list_from_neighbor_matrix(
        matrix, count, matrix_shifts, fill_value=len(atoms)
    )
    i, j, S = (torch.tensor(t) for t in ase.neighborlist.neighbor_list("ijS", atoms, cutoff))
    return len(found), found == as_set(*converted, converted_shifts) == as_set(i, j, S)


def skewed(rng: np.random.Generator, pbc: tuple[bool, bool, bool]) -> Atoms:
    """Thirty atoms in a skewed cell, some of them far outside."""
    cell = 6.0 * np.eye(3) + rng.normal(scale=1.5, size=(3, 3))
    return Atoms("Ar30", positions=rng.uniform(-9.0, 15.0, size=(30, 3)), cell=cell, pbc=pbc)


# -- dynamics with a list that is kept ------------------------------------------------------------


class Argon:
    """Liquid argon at the state that Rahman simulated, in velocity Verlet with 5 fs a step."""

    temperature, density = 94.4, 1.374  # K, g/cm^3
    sigma, epsilon, mass = 3.405, 119.8 * BOLTZMANN_EV_PER_KELVIN, 39.948  # angstrom, eV, u
    dt = 5.0 * FEMTOSECOND_IN_ASE_TIME

    def __init__(self, n_cubes: int, rng: np.random.Generator) -> None:
        side = (4 * self.mass * 1e24 / AVOGADRO_PER_MOL / self.density) ** (1 / 3)
        self.x, self.cell = tensors(ase.build.bulk("Ar", "fcc", a=side, cubic=True).repeat(n_cubes))
        self.v = torch.tensor(rng.normal(size=self.x.shape))
        self.scale_velocities(8 * self.temperature)  # half of that goes into displacements, and nothing stays a crystal
        self.potential = lennard_jones(cutoff=8.5, r_switch=7.5)
        self.verlet = VerletList(cutoff=8.5, skin=1.0)
        self.energy, self.forces = self.energy_and_forces(*self.verlet(self.x, self.cell))

    def energy_and_forces(self, matrix: torch.Tensor, count: torch.Tensor, shifts: torch.Tensor) -> tuple[float, Any]:
        near = {"neighbor_matrix": matrix, "neighbor_matrix_shifts": shifts}
        parameters = {"sigma": self.sigma, "epsilon": self.epsilon}
        energies, forces = self.potential(self.x, self.cell, **near, **parameters, compute_forces=True)
        return energies.sum().item(), forces

    def step(self) -> None:
        self.v += 0.5 * self.dt / self.mass * self.forces
        self.x = self.x + self.dt * self.v
        # the list holds all pairs up to cutoff + skin; the potential leaves out those beyond its cutoff
        self.energy, self.forces = self.energy_and_forces(*self.verlet(self.x, self.cell))
        self.v += 0.5 * self.dt / self.mass * self.forces

    def kinetic_energy(self) -> float:
        return 0.5 * self.mass * self.v.square().sum().item()

    def scale_velocities(self, temperature: float) -> None:
        self.v -= self.v.mean(0)
        wanted = 1.5 * len(self.v) * BOLTZMANN_EV_PER_KELVIN * temperature
        self.v *= math.sqrt(wanted / self.kinetic_energy())

    def histogram(self, edges: torch.Tensor) -> torch.Tensor:
        """g(r): neighbors at distances between the edges, relative to an ideal gas."""
        *_, distances = neighbor_list(self.x, float(edges[-1]), self.cell, return_distances=True)
        found = torch.histogram(distances[distances > 0], edges).hist / len(self.x)  # zeros are padding
        density = len(self.x) / torch.linalg.det(self.cell)
        return found / (4 / 3 * math.pi * density * (edges[1:] ** 3 - edges[:-1] ** 3))


def simulate(n_cubes: int, steps: int, rng: np.random.Generator) -> tuple[Argon, dict[str, Any]]:
    """Melt a crystal, cool the liquid to Rahman's temperature, and average g(r) at constant energy."""
    argon = Argon(n_cubes, rng)
    edges = torch.linspace(0.0, 11.0, 221, dtype=torch.float64)
    totals, g, temperatures = [], torch.zeros(220, dtype=torch.float64), []
    for step in tqdm(range(3 * steps), desc="melting argon", unit="step"):
        argon.step()
        if steps <= step < 2 * steps and step % 10 == 0:
            argon.scale_velocities(argon.temperature)
        if step >= 2 * steps:
            totals.append((argon.energy + argon.kinetic_energy()) / len(argon.x))
            temperatures.append(argon.kinetic_energy() / (1.5 * len(argon.x) * BOLTZMANN_EV_PER_KELVIN))
            if step % 10 == 0:
                g += 10 * argon.histogram(edges) / steps
    _, forces = argon.energy_and_forces(*neighbor_list(argon.x, argon.verlet.reach, argon.cell))
    return argon, {
        "r": 0.5 * (edges[1:] + edges[:-1]).numpy(),
        "g": g.numpy(),
        "temperature": np.mean(temperatures),
        "wobble": np.ptp(totals),
        "difference": (forces - argon.forces).abs().max().item(),
    }


# -- report ---------------------------------------------------------------------------------------


def draw(path: Path, found: dict[str, tuple[torch.Tensor, torch.Tensor]], liquid: dict[str, Any]) -> None:
    figure, (stairs, radial) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for name, (distances, counts) in found.items():
        stairs.step(distances / NEAREST, counts.cumsum(0), where="post", label=name)
    stairs.set(xlabel="distance / nearest distance", ylabel="neighbors within the distance", title="Crystals")
    stairs.set(xlim=(0.9, 2.5), ylim=(0, 90))
    radial.plot(liquid["r"], liquid["g"], color="#1f6fb4", label="here")
    radial.axvline(RAHMAN_PEAK, color="black", lw=0.8, ls="--", label="first peak, Rahman (1964)")
    radial.axhline(1.0, color="#b0b0b0", lw=0.8)
    title = f"Liquid argon, {liquid['temperature']:.0f} K"
    radial.set(xlabel="distance (Å)", ylabel="g(r)", title=title, xlim=(2.5, 11.0))
    for axes in (stairs, radial):
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("neighbors.png"), help="picture to write (neighbors.png)")
    parser.add_argument("--quick", action="store_true", help="shorter dynamics, for tests")
    options = parser.parse_args()
    quiet_warp()
    rng = np.random.default_rng(0)

    structures = crystals()
    found = dict(zip(structures, search_batch(list(structures.values()), 2.6 * NEAREST)))
    print("crystal   neighbors in shells 1 to 5       at distances / nearest")
    for name, (distances, counts) in found.items():
        near = " ".join(f"{d:.3f}" for d in distances[:5] / NEAREST)
        print(f"{name:10s}{' '.join(f'{c:4d}' for c in counts[:5].tolist())}        {near}")

    print("\nskewed cells, cutoff 7 Å          pairs   list, matrix and ASE")
    for pbc in ((True, True, True), (True, True, False), (False, True, False), (False, False, False)):
        pairs, equal = compare(skewed(rng, pbc), 7.0)
        axes = "".join("p" if p else "-" for p in pbc)
        print(f"periodic axes: {axes:18s}{pairs:7d}   {'equal' if equal else 'DIFFERENT'}")

    argon, liquid = simulate(4 if options.quick else 6, 200 if options.quick else 1000, rng)
    peak = liquid["r"][liquid["g"].argmax()]
    print(f"\nargon, {len(argon.x)} atoms at {liquid['temperature']:.0f} K")
    print(f"searches                         {argon.verlet.num_builds:4d} in {argon.verlet.num_calls} calls")
    print(f"forces against a fresh list      {liquid['difference']:.1e} eV/Å at most")
    print(f"total energy stays within        {1e6 * liquid['wobble']:.1f} µeV/atom")
    print(f"first peak of g(r)               {liquid['g'].max():.2f} at {peak:.2f} Å (Rahman: {RAHMAN_PEAK} Å)")
    draw(options.output, found, liquid)
    print(f"\npicture: {options.output}")


if __name__ == "__main__":
    main()
