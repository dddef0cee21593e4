"""Madelung constants of crystals and surfaces, against values that are known to many digits.

The Coulomb energy of a crystal of point charges is a number, its Madelung constant, over a length: in rock salt a pair
of ions has the energy -1.747564594633... e^2 / d, with d the distance of nearest neighbors. There is no sharper test of
a sum over a lattice. Here: rock salt, cesium chloride, zincblende and wurtzite (energy of a pair of unit charges, in
e^2 / d), fluorite (of CaF2, in e^2 / d) and perovskite (of SrTiO3 with charges of +2, +4 and -2, in e^2 / a).

Sources: rock salt, cesium chloride and zincblende, OEIS A085469, A181152 and A182566; wurtzite, Y. Sakamoto, J. Chem.
Phys. 28, 164 (1958); a simple cubic lattice in a uniform background, and a square lattice of alternating charges,
J. M. Borwein et al., Lattice Sums Then and Now (Cambridge, 2013). The other two follow by superposition: pairs of the
sublattices of fluorite make two zincblendes and one cesium chloride, and those of perovskite make simple cubic
lattices, rock salt and cesium chloride.

Then two slabs, periodic in two directions (`slab_correction`). The layers of NaCl (100) are neutral, and the constant
of an ion falls from that of the bulk to the mean of bulk and single layer at the surface, within a few layers. The
layers of CsCl (100) are charged. Each double layer is a capacitor, which costs pi e^2 / 2a more than in the bulk, where
conducting surroundings allow for no mean field: such surfaces do not exist (P. W. Tasker, J. Phys. C 12, 4977 (1979)).

What to look at: differences from the literature, and errors below the accuracy that was asked for. Takes five seconds;
nothing is downloaded.
"""

import argparse
import math
import warnings
from pathlib import Path

import ase.build
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from ase import Atoms

from nvalchemiops import AccuracyWarning
from nvalchemiops._warp import quiet_warp
from nvalchemiops.torch.interactions.electrostatics import ewald_summation, particle_mesh_ewald

ROCK_SALT, CESIUM_CHLORIDE, ZINCBLENDE = 1.747564594633182, 1.762674773070988, 1.638055053388789
WURTZITE = 1.64132162737  # for the ideal c/a = sqrt(8/3) and u = 3/8
CUBIC, SQUARE = 2.837297479480619, 1.615542626712825
FLUORITE = 2 * ZINCBLENDE + CESIUM_CHLORIDE
PEROVSKITE = 24 * CUBIC + 8 * ROCK_SALT - 16 * 2 / math.sqrt(3) * CESIUM_CHLORIDE

CHARGES = {"Na": 1, "Cs": 1, "Cl": -1, "Zn": 2, "S": -2, "Ca": 2, "F": -1, "Sr": 2, "Ti": 4, "O": -2}


# -- crystals -------------------------------------------------------------------------------------


def crystals() -> dict[str, tuple[Atoms, float, float]]:
    """Crystals with a = 1: atoms, the factor between energies per atom and the constant, and the constant."""
    nearest = math.sqrt(3) / 4  # in zincblende and fluorite
    wurtzite = ase.build.bulk("ZnS", "wurtzite", a=1.0, c=math.sqrt(8 / 3), u=3 / 8)
    faces = 0.5 - 0.5 * np.eye(3)
    perovskite = Atoms("SrTiO3", positions=[(0, 0, 0), (0.5, 0.5, 0.5), *faces], cell=np.eye(3), pbc=True)
    return {
        "rock salt": (ase.build.bulk("NaCl", "rocksalt", a=1.0, cubic=True), 2 * 0.5, ROCK_SALT),
        "cesium chloride": (ase.build.bulk("CsCl", "cesiumchloride", a=1.0), math.sqrt(3), CESIUM_CHLORIDE),
        # a quarter, because the charges are 2 and -2
        "zincblende": (ase.build.bulk("ZnS", "zincblende", a=1.0, cubic=True), 2 * nearest / 4, ZINCBLENDE),
        "wurtzite": (wurtzite, 2 * 3 / 8 * math.sqrt(8 / 3) / 4, WURTZITE),
        "fluorite": (ase.build.bulk("CaF2", "fluorite", a=1.0, cubic=True), 3 * nearest, FLUORITE),
        "perovskite": (perovskite, 5.0, PEROVSKITE),
    }


def tensors(atoms: Atoms) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Positions, charges and cell. All is displaced a little: on points of a mesh PME would be better than it is."""
    charges = torch.tensor([float(CHARGES[s]) for s in atoms.symbols], dtype=torch.float64)
    return torch.tensor(atoms.positions + np.array([0.0123, 0.0234, 0.0345])), charges, torch.tensor(atoms.cell.array)


def errors(accuracies: np.ndarray, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Largest relative error among the six constants, for each method and accuracy that it can be asked for."""
    found: dict[str, list[tuple[float, float]]] = {}
    for name, sum_up, options in (
        ("Ewald", ewald_summation, {}),
        ("PME, order 5", particle_mesh_ewald, {"spline_order": 5}),
        ("PME, order 8", particle_mesh_ewald, {"spline_order": 8}),
    ):
        for accuracy in accuracies:
            worst = 0.0
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("error", AccuracyWarning)
                    for atoms, factor, constant in crystals().values():
                        energies = sum_up(*tensors(atoms.repeat(repeats)), accuracy=accuracy, **options)
                        worst = max(worst, abs(-factor * energies.mean().item() / constant - 1))
            except AccuracyWarning:  # out of reach of splines of this order
                break
            found.setdefault(name, []).append((accuracy, worst))
    return found


# -- slabs ----------------------------------------------------------------------------------------


def neutral_layers(n_layers: int) -> torch.Tensor:
    """Madelung constants of the layers of a slab of NaCl (100), with d = 1."""
    side = math.sqrt(2)
    first, second = (0.0, 0.0), (side / 2, side / 2)
    atoms = Atoms(cell=[side, side, n_layers + 10.0], pbc=(True, True, False))
    for layer in range(n_layers):
        names = "NaCl" if layer % 2 == 0 else "ClNa"
        atoms += Atoms(names, positions=[(*first, layer), (*second, layer)])
    energies = ewald_summation(*tensors(atoms), pbc=torch.tensor(atoms.pbc), slab_correction=True, accuracy=1e-13)
    return -2 * energies[::2]


def charged_layers(n_double_layers: int, vacuum: float, slab_correction: bool = True) -> float:
    """Energy of a slab of CsCl (100) with a = 1, for each ion pair in the cell."""
    pbc = (True, True, not slab_correction)
    atoms = Atoms(cell=[1.0, 1.0, n_double_layers + vacuum], pbc=pbc)
    for layer in range(n_double_layers):
        atoms += Atoms("CsCl", positions=[(0.0, 0.0, layer), (0.5, 0.5, layer + 0.5)])
    options = {"pbc": torch.tensor(pbc), "slab_correction": slab_correction, "energy_reduction": "system"}
    return ewald_summation(*tensors(atoms), **options, accuracy=1e-13).item()


# -- report ---------------------------------------------------------------------------------------


def draw(path: Path, found: dict[str, list[tuple[float, float]]], layers: torch.Tensor) -> None:
    figure, (accuracy, slab) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for (name, rows), color in zip(found.items(), ("black", "#d98c1f", "#1f6fb4")):
        accuracy.loglog(*zip(*rows), "o-", ms=4, color=color, label=name)
    ends = [found["Ewald"][0][0], found["Ewald"][-1][0]]
    accuracy.loglog(ends, ends, ":", color="#808080", label="as asked for")
    accuracy.set(xlabel="accuracy asked for", ylabel="largest relative error", title="Six Madelung constants")
    slab.plot(range(1, len(layers) + 1), layers, "o-", color="#1f6fb4")
    for value, label in (
        (ROCK_SALT, "bulk"),
        (SQUARE, "single layer"),
        (0.5 * (ROCK_SALT + SQUARE), "mean of the two"),
    ):
        slab.axhline(value, color="#808080", lw=0.8, ls=":")
        slab.annotate(
            label, (0.5, value), (0, -3), textcoords="offset points", va="top", xycoords=("axes fraction", "data")
        )
    slab.set(xlabel="layer of the slab", ylabel="Madelung constant of an ion", title="NaCl (100)", ylim=(1.6, 1.765))
    accuracy.legend(frameon=False)
    for axes in (accuracy, slab):
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("madelung.png"), help="picture to write (madelung.png)")
    parser.add_argument("--quick", action="store_true", help="smaller crystals, for tests")
    options = parser.parse_args()
    quiet_warp()
    repeats = 2 if options.quick else 4

    print(f"{'':18s}{'Ewald, primitive':>18s}{'literature':>20s}{'difference':>13s}{'PME, supercell':>17s}")
    for name, (atoms, factor, constant) in crystals().items():
        ewald = -factor * ewald_summation(*tensors(atoms), accuracy=1e-13).mean().item()
        mesh = particle_mesh_ewald(*tensors(atoms.repeat(repeats)), accuracy=1e-8, spline_order=8)
        print(f"{name:18s}{ewald:18.13f}{constant:20.13f}{ewald - constant:13.0e}{-factor * mesh.mean().item():17.9f}")

    layers = neutral_layers(8)
    print("\nNaCl (100), eight layers: constant of an ion in the first four")
    print(f"layers: {'  '.join(f'{value:.10f}' for value in layers[:4])}")
    print(f"bulk: {ROCK_SALT:.10f}, mean of bulk and single layer: {0.5 * (ROCK_SALT + SQUARE):.10f}")

    print("\nCsCl (100): energy of one more double layer (e²/a for each pair), for slabs of 2 to 4")
    print("vacuum   without correction                  with correction")
    for vacuum in (2.0, 4.0, 8.0):
        columns = []
        for corrected in (False, True):
            energies = np.array([charged_layers(n, vacuum, corrected) for n in range(1, 5)])
            columns.append("  ".join(f"{difference:10.6f}" for difference in np.diff(energies)))
        print(f"{vacuum:3.0f} a  {'    '.join(columns)}")
    print(f"in thick slabs, by theory: {math.pi / 2 - 2 / math.sqrt(3) * CESIUM_CHLORIDE:.6f}")

    draw(options.output, errors(10.0 ** -np.arange(2, 12), repeats), layers)
    print(f"\npicture: {options.output}")


if __name__ == "__main__":
    main()
