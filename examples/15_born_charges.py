"""Born effective charges and the dielectric constant of polarizable ions, by differentiating induced dipoles.

Ions of rock salt have charges Z and polarizabilities alpha; their dipoles are induced by all others, and by an external
field. `induced_moments` solves for them with the energy of `ewald_summation` as the only operator. What follows are
derivatives of the dipole of the cell M = sum_i (q_i x_i + mu_i), by automatic differentiation through the solution:

    Born effective charges  Z*_i = dM/dx_i,      dielectric constant  eps = 1 + 4 pi/V dM/dF

each three solutions for all atoms. In a perfect cubic crystal both are known (Clausius and Mossotti, for Z* B. Szigeti,
Trans. Faraday Soc. 45, 155 (1949), doi:10.1039/TF9494500155, without overlap), with the polarizability a of a volume v:

    (eps - 1)/(eps + 2) = 4 pi a/(3 v),      Z* = Z (eps + 2)/3

What to look at: agreement with these, and how Born charges spread when atoms are displaced. Lengths in angstrom,
charges in e; polarizabilities of NaCl from J. R. Tessman, A. H. Kahn and W. Shockley, Phys. Rev. 92, 890 (1953). Takes
some seconds; nothing is downloaded.
"""

import argparse
import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from ase.build import bulk
from torch import Tensor

from nvalchemiops._warp import quiet_warp
from nvalchemiops.torch.interactions.electrostatics import ewald_summation, induced_moments

ALPHA = {"Na": 0.41, "Cl": 2.96}  # angstrom³
SPLIT = {"alpha": 0.75, "cutoff": 7.5, "k_cutoff": 8.5, "energy_reduction": "system"}


def crystal(lattice_constant: float, displacement: float = 0.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Positions, charges, polarizabilities and cell of eight ions."""
    atoms = bulk("NaCl", "rocksalt", a=lattice_constant, cubic=True)
    atoms.rattle(displacement, seed=1)
    positions, cell = torch.tensor(atoms.positions), torch.tensor(atoms.cell.array)
    charges = torch.tensor([1.0 if s == "Na" else -1.0 for s in atoms.symbols], dtype=torch.float64)
    return positions, charges, torch.tensor([ALPHA[s] for s in atoms.symbols], dtype=torch.float64), cell


def response(positions: Tensor, charges: Tensor, alpha: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, int]:
    """Born charges (n_atoms, 3, 3), the dielectric tensor (3, 3), and iterations of the solver."""
    x, field = positions.clone().requires_grad_(), torch.zeros(3, dtype=torch.float64, requires_grad=True)

    def energy(dipoles: Tensor, x: Tensor) -> Tensor:
        return ewald_summation(x, charges, cell, dipoles=dipoles, **SPLIT)

    found = induced_moments(energy, (x,), polarizabilities=alpha, external_field=field, tolerance=1e-10)
    total = (charges[:, None] * x + found.dipoles).sum(0)
    slopes = [torch.autograd.grad(component, (x, field), retain_graph=True) for component in total]
    born, polarizability = (torch.stack(parts, -1) for parts in zip(*slopes))
    volume = torch.linalg.det(cell).abs()
    return born, torch.eye(3) + 4.0 * math.pi / volume * polarizability, found.iterations


def known(lattice_constant: float) -> tuple[float, float]:
    """Born charge and dielectric constant of the perfect crystal."""
    share = 4.0 * math.pi * sum(ALPHA.values()) / (3.0 * lattice_constant**3 / 4.0)
    eps = (1.0 + 2.0 * share) / (1.0 - share)
    return (eps + 2.0) / 3.0, eps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("born_charges.png"), help="picture (born_charges.png)")
    options = parser.parse_args()
    quiet_warp()

    constants = [5.2, 5.4, 5.64, 5.9, 6.2]
    print("a (angstrom)   Z*          known       eps         known       iterations")
    rows = []
    for a in constants:
        born, eps, iterations = response(*crystal(a))
        rows.append((born[0, 0, 0].item(), eps[0, 0].item()))
        z, e = known(a)
        print(f"{a:6.2f}      {rows[-1][0]:12.8f}{z:12.8f}{rows[-1][1]:12.8f}{e:12.8f}{iterations:8d}")

    displacements = [0.0, 0.05, 0.1, 0.2, 0.3]
    print("\ndisplacement   Z* of Na, smallest and largest   sum over all atoms")
    spread = []
    for displacement in displacements:
        positions, charges, alpha, cell = crystal(5.64, displacement)
        born, _, _ = response(positions, charges, alpha, cell)
        sodium = torch.linalg.eigvalsh(0.5 * (born + born.mT)[charges > 0.0])
        spread.append(sodium.flatten().tolist())
        print(
            f"{displacement:8.2f}{sodium.min().item():18.4f}{sodium.max().item():12.4f}{born.sum(0).abs().max().item():24.1e}"
        )
    draw(options.output, constants, rows, displacements, spread)
    print(f"\npicture: {options.output}")


def draw(
    path: Path,
    constants: list[float],
    rows: list[tuple[float, float]],
    displacements: list[float],
    spread: list[list[float]],
) -> None:
    figure, (perfect, displaced) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    fine = [5.15 + 0.01 * n for n in range(111)]
    for place, (label, color) in enumerate((("Born charge (e)", "#1f6fb4"), ("dielectric constant", "#c1440e"))):
        perfect.plot(fine, [known(a)[place] for a in fine], color=color, lw=1.5)
        perfect.plot(constants, [row[place] for row in rows], "o", color=color, label=label)
    perfect.set(xlabel="lattice constant (Å)", title="Perfect crystal, lines: Clausius-Mossotti")
    perfect.legend(frameon=False)
    for displacement, values in zip(displacements, spread):
        displaced.plot([displacement] * len(values), values, "o", ms=4, alpha=0.6, color="#1f6fb4")
    displaced.set(xlabel="displacement of atoms (Å)", ylabel="eigenvalues of Z* of Na (e)", title="Displaced atoms")
    for axes in (perfect, displaced):
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
