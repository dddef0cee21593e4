"""Molten sodium chloride: dynamics with ASE, and the structure of the liquid.

Ions with the potential of Tosi and Fumi (F. G. Fumi and M. P. Tosi, J. Phys. Chem. Solids 25, 31 and 45 (1964)), fitted
to crystals: Coulomb energies of charges +1 and -1 by Ewald's sum, and Born-Mayer-Huggins repulsion and dispersion.
`nvalchemiops.ase.Calculator` adds them up for ASE. Its Langevin dynamics melts a crystal at 3000 K, cools it to 1148 K
and goes on for some picoseconds, at the measured density (G. J. Janz, J. Phys. Chem. Ref. Data 17, Suppl. 2 (1988)).

What to look at: ions surround themselves with others of opposite charge. Na and Cl are neighbors at 2.6 angstrom, where
X-ray diffraction finds 2.7, and like ions at 1.5 times that, where it finds 1.4 to 1.5 (S. Urakawa et al., Am. Mineral.
84, 341 (1999), doi:10.2138/am-1999-0317); ions that cannot be polarised keep those of like charge too far apart. The
order of charges decays over 2.5 distances of neighbors (A. Zeidler et al., J. Chem. Phys. 157, 094504 (2022),
doi:10.1063/5.0107620). Takes half a minute; nothing is downloaded.
"""

import argparse
import math
from pathlib import Path

import ase.build
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from ase import Atoms, units
from ase.md.langevin import Langevin
from ase.md.velocitydistribution import thermalize_momenta
from tqdm import tqdm

from nvalchemiops._warp import quiet_warp
from nvalchemiops.ase import Calculator, Electrostatics, Pair, neighbor_list
from nvalchemiops.constants import AVOGADRO_PER_MOL

TEMPERATURE = 1148.0  # K
STEP = 2.0  # fs

# Born-Mayer-Huggins: A exp((sigma - r)/rho) - C/r^6 - D/r^8, in eV and angstrom
TOSI_FUMI = {
    "A": {"Na-Na": 0.2637, "Na-Cl": 0.2110, "Cl-Cl": 0.1582},
    "sigma": {"Na-Na": 2.340, "Na-Cl": 2.755, "Cl-Cl": 3.170},
    "rho": 0.317,
    "C": {"Na-Na": 1.0486, "Na-Cl": 6.9906, "Cl-Cl": 72.4022},
    "D": {"Na-Na": 0.4993, "Na-Cl": 8.6758, "Cl-Cl": 145.4285},
}


def salt(repeats: int) -> Atoms:
    """A crystal, expanded to the density of the melt."""
    atoms = ase.build.bulk("NaCl", "rocksalt", a=5.64, cubic=True).repeat(repeats)
    density = 1.556 - 0.000543 * (TEMPERATURE - 1073.9)  # g/cm^3, from the melting point on
    volume = atoms.get_masses().sum() / density * 1e24 / AVOGADRO_PER_MOL
    atoms.set_cell(np.eye(3) * volume ** (1 / 3), scale_atoms=True)
    atoms.calc = Calculator(
        Pair("born_mayer_huggins", cutoff=9.0, **TOSI_FUMI),
        Electrostatics("ewald", {"Na": 1.0, "Cl": -1.0}, accuracy=1e-4),
    )
    return atoms


# -- dynamics and averages ------------------------------------------------------------------------


class Structure:
    """Histograms of distances between ions, averaged over snapshots."""

    pairs = ("Na-Na", "Na-Cl", "Cl-Cl")

    def __init__(self, reach: float, width: float) -> None:
        self.edges = np.arange(0.0, reach + 0.5 * width, width)
        self.r = 0.5 * (self.edges[1:] + self.edges[:-1])
        self.found = np.zeros((3, len(self.r)))  # neighbors of an ion, from both sides for Na-Cl
        self.snapshots = 0

    def add(self, atoms: Atoms) -> None:
        i, j, distance = neighbor_list("ijd", atoms, self.edges[-1])
        chlorine = (atoms.numbers == 17).astype(int)
        kind = chlorine[i] + chlorine[j]
        for n in range(3):
            self.found[n] += np.histogram(distance[kind == n], self.edges)[0] / len(atoms)
        self.snapshots += 1

    def g(self, density: float) -> dict[str, np.ndarray]:
        """Radial distribution functions: neighbors relative to those in a gas of the same density."""
        shell = 4 / 3 * math.pi * np.diff(self.edges**3) * density
        share = {"Na-Na": 1 / 4, "Na-Cl": 1 / 2, "Cl-Cl": 1 / 4}  # of all pairs
        return {p: n / self.snapshots / shell / share[p] for p, n in zip(self.pairs, self.found)}


def run(atoms: Atoms, steps: dict[str, int], rng: np.random.Generator) -> tuple[Structure, list[float]]:
    """Melt, cool, and sample the structure; temperatures while sampling."""
    structure, temperatures = Structure(reach=0.49 * atoms.cell[0, 0], width=0.05), []
    thermalize_momenta(atoms, temperature_K=3000.0, rng=rng)
    dynamics = Langevin(atoms, STEP * units.fs, temperature_K=3000.0, friction=0.01 / units.fs, fixcm=False, rng=rng)
    with tqdm(total=sum(steps.values()), desc="melting", unit="step") as progress:
        for phase, count in steps.items():
            progress.set_description(phase)
            if phase != "melting":
                dynamics.set_temperature(temperature_K=TEMPERATURE)
            for n in range(count):
                dynamics.run(1)
                progress.update()
                if phase == "sampling":
                    temperatures.append(atoms.get_temperature())
                    if n % 10 == 0:
                        structure.add(atoms)
    return structure, temperatures


def first_peak(r: np.ndarray, g: np.ndarray) -> tuple[float, float]:
    """Where g is largest, and its value there: a parabola through what is close to the largest bin."""
    near = np.abs(r - r[g.argmax()]) < 0.18
    a, b, c = np.polyfit(r[near], g[near], 2)
    return -b / (2 * a), c - b * b / (4 * a)


def charge_order(g: dict[str, np.ndarray]) -> np.ndarray:
    """How much more often ions of unlike charge are found at a distance than ions of like charge."""
    return g["Na-Cl"] - 0.5 * (g["Na-Na"] + g["Cl-Cl"])


def decay_length(r: np.ndarray, order: np.ndarray) -> float:
    """Of r times the order, beyond the first shells: from the heights of its oscillations, between two zeros each."""
    smoothed = np.convolve(r * order, np.full(9, 1 / 9), mode="same")
    zeros = np.flatnonzero((np.sign(smoothed[1:]) != np.sign(smoothed[:-1])) & (r[1:] > 5.0)) + 1
    tops = [first + np.abs(smoothed[first:last]).argmax() for first, last in zip(zeros, zeros[1:])]
    return -1.0 / np.polyfit(r[tops], np.log(np.abs(smoothed[tops])), 1)[0]


# -- report ---------------------------------------------------------------------------------------


def draw(path: Path, structure: Structure, g: dict[str, np.ndarray], temperature: float) -> None:
    figure, (radial, order) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for pair, color in zip(Structure.pairs, ("#d98c1f", "black", "#5a9e4b")):
        radial.plot(structure.r, g[pair], color=color, label=pair)
    radial.axhline(1.0, color="#b0b0b0", lw=0.8)
    radial.set(xlabel="distance (Å)", ylabel="g(r)", title=f"NaCl at {temperature:.0f} K", ylim=(0, None))
    radial.legend(frameon=False)
    order.plot(structure.r, structure.r * charge_order(g), color="#1f6fb4")
    order.axhline(0.0, color="#b0b0b0", lw=0.8)
    order.set(xlabel="distance (Å)", ylabel="r [g(unlike) - g(like)] (Å)", title="Order of charges")
    for axes in (radial, order):
        axes.set(xlim=(1.5, structure.edges[-1]))
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("molten_salt.png"), help="picture (molten_salt.png)")
    parser.add_argument("--quick", action="store_true", help="fewer ions and steps, for tests")
    options = parser.parse_args()
    quiet_warp()

    atoms = salt(3 if options.quick else 4)
    steps = {"melting": 500, "cooling": 500, "sampling": 3000}
    if options.quick:
        steps = {"melting": 400, "cooling": 400, "sampling": 600}
    structure, temperatures = run(atoms, steps, np.random.default_rng(0))
    g, temperature = structure.g(len(atoms) / atoms.get_volume()), float(np.mean(temperatures))

    print(f"{len(atoms)} ions in a cube of {atoms.cell[0, 0]:.2f} Å, {1e-3 * STEP * steps['sampling']:.1f} ps")
    print(f"temperature                       {temperature:6.0f} K")
    print(f"searches for neighbors            {atoms.calc.searches:6d}   in {sum(steps.values())} steps")
    peaks = {pair: first_peak(structure.r, g[pair]) for pair in Structure.pairs}
    for pair, (where, height) in peaks.items():
        print(f"first peak of g(r), {pair}         {height:6.2f}   at {where:.2f} Å")
    unlike, like = peaks["Na-Cl"][0], 0.5 * (peaks["Na-Na"][0] + peaks["Cl-Cl"][0])
    length = decay_length(structure.r, charge_order(g))
    minimum = int(np.argmax(structure.r > unlike)) + g["Na-Cl"][(structure.r > unlike) & (structure.r < 5.0)].argmin()
    around = structure.found[1][: minimum + 1].sum() / structure.snapshots
    print(f"like ions are farther apart by    {like / unlike:6.2f}   (X-rays: 1.4 to 1.5, and 2.7 Å for Na-Cl)")
    print(f"neighbors of opposite charge      {around:6.1f}   up to {structure.r[minimum]:.1f} Å (6 in the crystal)")
    print(f"order of charges decays over      {length:6.1f}   Å, {length / unlike:.1f} distances (Zeidler et al.: 2.5)")
    draw(options.output, structure, g, temperature)
    print(f"\npicture: {options.output}")


if __name__ == "__main__":
    main()
