"""Equation of state of solid argon: a batch of crystals at constant pressure, each at its own.

Crystals of 108 Lennard-Jones atoms move in one batch, in the ensemble of constant temperature and pressure: chains of
thermostats and a barostat that changes the cube (G. J. Martyna, D. J. Tobias and M. L. Klein, J. Chem. Phys. 101, 4177
(1994), doi:10.1063/1.467468). The barostat samples volumes V with the probability of the ensemble, so two averages give
the same isothermal bulk modulus K:

    K = -V dP/dV  from a curve through the mean volumes,      K = kT <V> / (<V²> - <V>²)  from their fluctuations

What to look at: both agree within the errors of a short run. The barostat's time is a parameter of the algorithm: the
volume of such a stiff crystal oscillates 25 times faster, and a step has to resolve this. Takes half a minute; nothing
is downloaded.
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from ase.build import bulk

from nvalchemiops._warp import quiet_warp
from nvalchemiops.ase import Calculator, FromASE, Pair
from nvalchemiops.constants import FEMTOSECOND, GIGAPASCAL, KELVIN
from nvalchemiops.torch import System
from nvalchemiops.torch.dynamics import npt, simulate

TEMPERATURE = 60.0  # K
STEP = 8.0  # fs
LENNARD_JONES = {"sigma": 3.4, "epsilon": 0.0104}  # angstrom and eV, for argon
PRESSURES = np.array([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7])  # GPa


def volumes(pressures: np.ndarray, warming: int, sampling: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Volumes (n_records, n_systems) after warming up, temperatures in kelvin, and the number of atoms of a system."""
    crystals = [bulk("Ar", "fcc", a=5.4, cubic=True).repeat(3) for _ in pressures]
    # smooth at the cutoff, so that energies are conserved
    model = FromASE(Calculator(Pair("lennard_jones", cutoff=6.5, r_switch=5.5, **LENNARD_JONES), skin=1.0))
    integrator = npt(
        STEP * FEMTOSECOND,
        TEMPERATURE * KELVIN,
        torch.tensor(pressures) * GIGAPASCAL,
        thermostat_time=50 * STEP * FEMTOSECOND,
        barostat_time=100 * STEP * FEMTOSECOND,
    )
    warm = simulate(System.from_ase(crystals), model, integrator, warming, seed=1, record=(), progress=True)
    run = simulate(
        warm.state, model, integrator, sampling, record=("volume", "temperature", "conserved"), every=4, progress=True
    )
    drift = (run.records["conserved"][-1] - run.records["conserved"][0]) / len(crystals[0])
    print(f"conserved energy changes by {1e3 * drift.abs().max():.3f} meV per atom, in {1e-3 * STEP * sampling:.0f} ps")
    return run.records["volume"].numpy(), run.records["temperature"].numpy() / KELVIN, len(crystals[0])


def error_of_mean(values: np.ndarray, n_blocks: int = 8) -> np.ndarray:
    """Standard error of the mean over the first axis, from means of blocks, which hardly depend on each other."""
    blocks = np.stack([block.mean(0) for block in np.array_split(values, n_blocks)])
    return blocks.std(0, ddof=1) / np.sqrt(n_blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("equation_of_state.png"), help="(equation_of_state.png)")
    parser.add_argument("--quick", action="store_true", help="a shorter run, for tests")
    options = parser.parse_args()
    quiet_warp()

    warming, sampling = (300, 1200) if options.quick else (500, 4000)
    volume, temperature, n_atoms = volumes(PRESSURES, warming, sampling)
    mean, error = volume.mean(0) / n_atoms, error_of_mean(volume) / n_atoms
    curve = np.polynomial.Polynomial.fit(mean, PRESSURES, 3)
    from_curve = -mean * curve.deriv()(mean)
    from_fluctuations = TEMPERATURE * KELVIN * volume.mean(0) / volume.var(0) / GIGAPASCAL
    print(f"mean temperature {temperature.mean():.2f} K, of {TEMPERATURE:.0f} K\n")
    print("pressure (GPa)   volume per atom (Å³)    bulk modulus (GPa) from the curve   from fluctuations")
    for row in zip(PRESSURES, mean, error, from_curve, from_fluctuations):
        print("{:10.1f}{:18.3f} ± {:.3f}{:26.2f}{:22.2f}".format(*row))
    print(f"ratio of the two, mean: {(from_fluctuations / from_curve).mean():.3f}")
    draw(options.output, volume / n_atoms, mean, error, curve, from_curve, from_fluctuations)
    print(f"\npicture: {options.output}")


def draw(
    path: Path,
    volume: np.ndarray,
    mean: np.ndarray,
    error: np.ndarray,
    curve: np.polynomial.Polynomial,
    from_curve: np.ndarray,
    from_fluctuations: np.ndarray,
) -> None:
    figure, (state, traces, modulus) = plt.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    fine = np.linspace(mean.min(), mean.max(), 100)
    state.plot(curve(fine), fine, color="#1f6fb4", lw=1.5)
    state.errorbar(PRESSURES, mean, error, fmt="o", ms=5, color="#1f6fb4", capsize=2)
    state.set(xlabel="pressure (GPa)", ylabel="volume per atom (Å³)", title=f"Solid argon at {TEMPERATURE:.0f} K")
    time = 4e-3 * STEP * np.arange(len(volume))
    colors = plt.get_cmap("viridis")(np.linspace(0.0, 0.9, len(PRESSURES)))
    for n, color in enumerate(colors):
        traces.plot(time, volume[:, n], color=color, lw=0.7, label=f"{PRESSURES[n]:.1f} GPa")
    traces.set(xlabel="time (ps)", ylabel="volume per atom (Å³)", title="One batch, a pressure for each system")
    modulus.plot(PRESSURES, from_curve, color="#1f6fb4", label="slope of the curve")
    modulus.plot(PRESSURES, from_fluctuations, "o", color="#c1440e", label="fluctuations of the volume")
    modulus.set(
        xlabel="pressure (GPa)", ylabel="bulk modulus (GPa)", title="The same from two averages", ylim=(0, None)
    )
    modulus.legend(frameon=False)
    for axes in (state, traces, modulus):
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
