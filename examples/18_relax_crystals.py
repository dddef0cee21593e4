"""Relaxation of two hundred perturbed crystals with their cells, in one batch.

Copper with a Morse potential (L. A. Girifalco and V. G. Weizer, Phys. Rev. 114, 687 (1959),
doi:10.1103/PhysRev.114.687), in five structures that are strained, with atoms displaced at random. `relax` moves atoms
and cells of all crystals at once by FIRE, each with its own time step, until no force is larger than 0.01 eV/Å; those
that have converged leave the batch.

What to look at: the close packings, where each atom has 12 neighbors, have the lowest energy. Simple cubic and diamond
crystals are not minima: most of them find a close packing. Many body-centred crystals stay as they are, 22 meV higher;
some others stop in minima that small cells have. The lattice constant of the face-centred crystals is that of copper,
to which the potential was fitted. Takes some seconds; nothing is downloaded.
"""

import argparse
import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from ase import Atoms
from ase.build import bulk

from nvalchemiops._warp import quiet_warp
from nvalchemiops.ase import Calculator, FromASE, Pair, neighbor_list
from nvalchemiops.torch import System
from nvalchemiops.torch.dynamics import relax, to_ase

MORSE = {"depth": 0.3429, "steepness": 1.3588, "r0": 2.866}  # eV, 1/angstrom, angstrom
NEAREST = 2.55  # distance of neighbors in copper, angstrom

MAKE = {
    "face-centred": lambda: bulk("Cu", "fcc", a=np.sqrt(2) * NEAREST, cubic=True),
    "hexagonal": lambda: bulk("Cu", "hcp", a=NEAREST, c=np.sqrt(8 / 3) * NEAREST).repeat((2, 2, 1)),
    "body-centred": lambda: bulk("Cu", "bcc", a=2 / np.sqrt(3) * NEAREST, cubic=True).repeat((2, 2, 1)),
    "simple cubic": lambda: bulk("Cu", "sc", a=NEAREST).repeat((3, 2, 2)),
    "diamond": lambda: bulk("Cu", "diamond", a=4 / np.sqrt(3) * NEAREST, cubic=True),
}


def perturbed(name: str, rng: np.random.Generator) -> Atoms:
    """A crystal with a random strain of some percent, and displaced atoms."""
    atoms = MAKE[name]()
    atoms.set_cell(atoms.cell[:] @ (np.eye(3) + 0.04 * rng.standard_normal((3, 3))), scale_atoms=True)
    atoms.positions += 0.15 * rng.standard_normal((len(atoms), 3))
    return atoms


def neighbors(atoms: Atoms) -> np.ndarray:
    """The number of nearest neighbors of each atom."""
    return np.bincount(neighbor_list("i", atoms, 1.2 * NEAREST), minlength=len(atoms))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("relax_crystals.png"), help="picture (relax_crystals.png)")
    parser.add_argument("--quick", action="store_true", help="fewer crystals, for tests")
    options = parser.parse_args()
    quiet_warp()

    rng = np.random.default_rng(1)
    names = np.array([name for name in MAKE for _ in range(8 if options.quick else 40)])
    crystals = [perturbed(name, rng) for name in names]
    model = FromASE(Calculator(Pair("morse", cutoff=9.0, r_switch=8.0, **MORSE)))
    sizes = np.array([len(atoms) for atoms in crystals])
    before = model(System.from_ase(crystals)).energies.numpy() / sizes

    begin = time.perf_counter()
    result = relax(System.from_ase(crystals), model, "fire", fmax=0.01, cell=True, progress=True)
    seconds = time.perf_counter() - begin
    after = result.evaluation.energies.numpy() / sizes
    relaxed = to_ase(result.system)
    packed = np.array([bool((neighbors(atoms) == 12).all()) for atoms in relaxed])
    steps = result.steps.numpy()

    print(f"{len(crystals)} crystals of {sizes.min()} to {sizes.max()} atoms, in {seconds:.1f} s")
    print(f"converged                     {int(result.converged.sum()):6d}")
    cubic = (names == "face-centred") & packed
    constants = [(4.0 * atoms.get_volume() / len(atoms)) ** (1 / 3) for atoms, of in zip(relaxed, cubic) if of]
    print(f"face-centred lattice constant {np.mean(constants):6.3f} Å (measured: 3.61)\n")
    print("start          energy per atom (eV): before   after, mean   lowest   steps   close packings")
    for name in MAKE:
        of = names == name
        print(
            f"{name:14s}{before[of].mean():30.3f}{after[of].mean():14.3f}{after[of].min():9.3f}{steps[of].mean():8.1f}"
            f"{packed[of].sum():10d} of {of.sum()}"
        )
    draw(options.output, names, before, after, steps)
    print(f"\npicture: {options.output}")


def draw(path: Path, names: np.ndarray, before: np.ndarray, after: np.ndarray, steps: np.ndarray) -> None:
    figure, (energy, count) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    colors = plt.get_cmap("viridis")(np.linspace(0.0, 0.9, len(MAKE)))
    for color, name in zip(colors, MAKE):
        of = names == name
        energy.plot(before[of], after[of], "o", ms=4, alpha=0.6, color=color, label=name)
    energy.set(xlabel="energy per atom before (eV)", ylabel="after (eV)", title="Energies")
    energy.legend(frameon=False)
    count.hist([steps[names == name] for name in MAKE], bins=20, stacked=True, color=list(colors))
    count.set(xlabel="steps of FIRE", ylabel="crystals", title="Each takes the steps that it needs")
    for axes in (energy, count):
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
