"""A Warp kernel of your own as a torch op: the three-body potential of Stillinger and Weber for silicon.

Pair potentials cannot make diamond: they favour as many neighbors as possible. Stillinger and Weber (Phys. Rev. B 31,
5262 (1985), doi:10.1103/PhysRevB.31.5262) add an energy for each angle between two bonds of an atom, zero at the
tetrahedral angle. With distances in units of sigma and energies in units of epsilon,

    E = sum_{i<j} A (B / r^4 - 1) exp(1 / (r - a)) + sum_i sum_{j<k} L (cos t_jik + 1/3)^2 exp(g/(r_ij-a) + g/(r_ik-a))

Such a sum over triples is not in the library, so it is written here as a kernel of twenty lines: one thread for each
atom, which walks the bonds in its row of a neighbor matrix and writes its own energy. `differentiable_kernel` makes a
torch op of it, with the adjoint that Warp derives. The op runs in eager mode and, together with the neighbor search, in
one compiled graph.

What to look at: energy and elastic constants agree with what follows from the formula by hand, gradients agree with
finite differences, and without the angles (L = 0) crystals of silicon would collapse. Units: eV, angstrom. Takes ten
seconds, the first time a few more for the C++ compiler; nothing is downloaded.
"""

import argparse
import math
from pathlib import Path

import ase.build
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
import warp as wp

from nvalchemiops._warp import quiet_warp
from nvalchemiops.constants import EV_PER_ANGSTROM3_IN_GPA
from nvalchemiops.torch.autograd import OutputSpec
from nvalchemiops.torch.kernel import differentiable_kernel
from nvalchemiops.torch.neighbors import neighbor_list

EPSILON, SIGMA = 2.1682, 2.0951  # eV, angstrom
A, B, REACH = 7.049556277, 0.6022245584, 1.8  # of the pairs; the reach a in units of sigma
ANGLES, GAMMA = 21.0, 1.2  # of the triples: L and g
CUTOFF = REACH * SIGMA  # 3.77 angstrom: everything is smooth there, to all orders

LATTICE = 2 ** (1 / 6) * SIGMA * 4 / math.sqrt(3)  # side of the cube of diamond: bonds of 2^(1/6) sigma, at the minimum

# -- the kernel -----------------------------------------------------------------------------------


@wp.kernel
def stillinger_weber(
    bonds: wp.array2d(dtype=wp.vec3d),  # (n_atoms, width), from an atom to its neighbors, padded with zeros
    angles: wp.float64,  # the strength L
    energies: wp.array(dtype=wp.float64),  # (n_atoms,)
):
    i = wp.tid()
    energy, one = wp.float64(0.0), wp.float64(1.0)
    reach, gamma = wp.float64(REACH), wp.float64(GAMMA)
    for j in range(bonds.shape[1]):
        r = wp.length(bonds[i, j]) / wp.float64(SIGMA)
        if r > wp.float64(0.0) and r < reach:
            # half of a pair belongs to each of its atoms
            energy += wp.float64(0.5 * A) * (wp.float64(B) / (r * r * r * r) - one) * wp.exp(one / (r - reach))
            for k in range(j):
                s = wp.length(bonds[i, k]) / wp.float64(SIGMA)
                if s > wp.float64(0.0) and s < reach:
                    cosine = wp.dot(wp.normalize(bonds[i, j]), wp.normalize(bonds[i, k]))
                    bend = cosine + wp.float64(1.0 / 3.0)
                    energy += angles * bend * bend * wp.exp(gamma / (r - reach) + gamma / (s - reach))
    energies[i] = wp.float64(EPSILON) * energy


# The op: what comes out, and of which shape, as a function of the inputs. Registered once, outside of what is compiled.
atom_energies = differentiable_kernel(stillinger_weber).op(
    [OutputSpec("energies", wp.float64, lambda bonds, angles: bonds.shape[:1])]
)


def energies_of(
    positions: torch.Tensor, cell: torch.Tensor | None = None, angles: float = ANGLES, max_neighbors: int | None = None
) -> torch.Tensor:
    """Energy of each atom (n_atoms,) in eV.

    The search returns bonds that carry gradients to positions and cell, so the kernel need not know of either.
    """
    *_, bonds = neighbor_list(positions, CUTOFF, cell, return_vectors=True, max_neighbors=max_neighbors)
    return atom_energies(bonds, angles)


# -- physics --------------------------------------------------------------------------------------


def silicon(structure: str, a: float = LATTICE, repeats: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and cell of a cubic crystal."""
    atoms = ase.build.bulk("Si", structure, a=a, cubic=True).repeat(repeats)
    return torch.tensor(atoms.positions), torch.tensor(atoms.cell.array)


def stress(strain: torch.Tensor) -> torch.Tensor:
    """dE/dstrain / V (3, 3) of diamond in GPa, by the adjoint of the kernel."""
    positions, cell = silicon("diamond")
    deformation = (torch.eye(3, dtype=torch.float64) + strain).requires_grad_()
    energy = energies_of(positions @ deformation, cell @ deformation).sum()
    (gradient,) = torch.autograd.grad(energy, deformation)
    return EV_PER_ANGSTROM3_IN_GPA * gradient / torch.linalg.det(cell)


def elastic_constants(step: float = 1e-4) -> tuple[float, float]:
    """Bulk modulus and C11 - C12: differences of stresses, because Warp's adjoint is of first order."""
    strain = torch.zeros(3, 3, dtype=torch.float64)
    strain[0, 0] = step
    c11, c12, _ = ((stress(strain) - stress(-strain)) / (2 * step)).diagonal().tolist()
    return (c11 + 2 * c12) / 3, c11 - c12


def by_hand() -> tuple[float, float]:
    """The same from the formula: compression changes bonds and no angle, and the other strain angles and no bond."""
    volume = LATTICE**3 / 8  # per atom
    r = torch.tensor(2 ** (1 / 6), dtype=torch.float64)
    curvature = torch.func.grad(torch.func.grad(lambda r: A * (B / r**4 - 1) * torch.exp(1 / (r - REACH))))(r)
    # two bonds for each atom, with a length that goes as the cube root of the volume
    bulk = 2 * EPSILON * curvature * r**2 / (9 * volume)
    # the strain (e, -e, 0) changes four of six cosines by 4e/3, and costs (C11 - C12) e^2 for each volume
    shear = EPSILON * ANGLES * torch.exp(2 * GAMMA / (r - REACH)) * 4 * (4 / 3) ** 2 / volume
    return EV_PER_ANGSTROM3_IN_GPA * bulk.item(), EV_PER_ANGSTROM3_IN_GPA * shear.item()


def energy_curves(volumes: np.ndarray) -> dict[tuple[str, float], np.ndarray]:
    """Energies per atom (eV) of crystals at volumes per atom, with angles and without."""
    curves = {}
    for structure, atoms_in_cell in {"diamond": 8, "sc": 1, "bcc": 2, "fcc": 4}.items():
        crystals = [silicon(structure, (atoms_in_cell * v) ** (1 / 3)) for v in volumes]
        for angles in (ANGLES, 0.0):
            energies = [energies_of(*crystal, angles=angles).mean().item() for crystal in crystals]
            curves[structure, angles] = np.array(energies)
    return curves


# -- gradients and compiled graphs ----------------------------------------------------------------


def gradient_error(positions: torch.Tensor, cell: torch.Tensor, step: float = 1e-4) -> float:
    """Derivative along a random direction of positions and cell: relative difference from a central difference."""
    inputs = [positions.clone().requires_grad_(), cell.clone().requires_grad_()]
    along = [torch.randn(t.shape, generator=torch.Generator().manual_seed(1), dtype=t.dtype) for t in inputs]
    gradients = torch.autograd.grad(energies_of(*inputs).sum(), inputs)
    derivative = sum((g * v).sum() for g, v in zip(gradients, along)).item()
    ahead, behind = (energies_of(positions + h * along[0], cell + h * along[1]).sum().item() for h in (step, -step))
    return abs((ahead - behind) / (2 * step) - derivative) / abs(derivative)


@torch.compile(fullgraph=True, backend="aot_eager")  # "inductor", the default, for speed
def total_energy(positions: torch.Tensor, cell: torch.Tensor) -> torch.Tensor:
    """The search and the kernel in one graph.

    With `max_neighbors` all shapes are known when it is compiled. Of a row that needs more only the count would tell,
    because a compiled graph cannot raise: docs/neighbors.md shows how to look.
    """
    return energies_of(positions, cell, max_neighbors=24).sum()


def compiled_error(positions: torch.Tensor, cell: torch.Tensor) -> float:
    """Relative difference between gradients of the compiled graph and of eager mode."""
    inputs = [positions.clone().requires_grad_(), cell.clone().requires_grad_()]
    compiled = torch.autograd.grad(total_energy(*inputs), inputs)
    eager = torch.autograd.grad(energies_of(*inputs).sum(), inputs)
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(compiled, eager))


# -- report ---------------------------------------------------------------------------------------


def draw(path: Path, volumes: np.ndarray, curves: dict[tuple[str, float], np.ndarray]) -> None:
    figure, axes = plt.subplots(figsize=(6.5, 4.5), layout="constrained")
    colors = {"diamond": "#1f6fb4", "sc": "#5a9e4b", "bcc": "#d98c1f", "fcc": "#c03a2b"}
    for (structure, angles), energies in curves.items():
        style = {"ls": "-", "label": structure} if angles else {"ls": ":"}
        axes.plot(volumes, energies, color=colors[structure], **style)
    axes.plot([], [], "k:", label="without angles")
    axes.set(xlabel="volume per atom (Å³)", ylabel="energy (eV/atom)", title="Crystals of silicon", ylim=(-12, 0))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("own_kernel.png"), help="picture to write (own_kernel.png)")
    options = parser.parse_args()
    quiet_warp()

    print(f"diamond, a = {LATTICE:.4f} Å      by kernel     by hand")
    print(f"energy (eV/atom)          {energies_of(*silicon('diamond')).mean().item():10.4f}{-2 * EPSILON:12.4f}")
    for name, *values in zip(("bulk modulus (GPa)", "C11 - C12 (GPa)"), elastic_constants(), by_hand()):
        print(f"{name:26s}{values[0]:10.3f}{values[1]:12.3f}")

    volumes = np.linspace(12.0, 26.0, 71)
    curves = energy_curves(volumes)
    print("\ncrystal   lowest energy (eV/atom), at a volume per atom (Å³)")
    for (structure, angles), energies in curves.items():
        if angles:
            print(f"{structure:10s}{energies.min():14.3f}{volumes[energies.argmin()]:26.1f}")

    positions, cell = silicon("diamond", repeats=2)
    positions += 0.1 * torch.randn(positions.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    print(f"\n{len(positions)} displaced atoms, gradients by positions and cell: relative difference")
    print(f"from finite differences   {gradient_error(positions, cell):10.1e}")
    print(f"of the compiled graph     {compiled_error(positions, cell):10.1e}")

    draw(options.output, volumes, curves)
    print(f"\npicture: {options.output}")


if __name__ == "__main__":
    main()
