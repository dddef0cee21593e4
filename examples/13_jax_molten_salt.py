"""Molten sodium chloride in JAX: dynamics inside of ``jit``, and derivatives of a trajectory.

The ions and the potential are those of ``09_molten_salt.py`` (F. G. Fumi and M. P. Tosi, J. Phys. Chem. Solids 25, 31
and 45 (1964)). All steps of a run are one ``jax.lax.scan`` inside of ``jax.jit``: a step finds the neighbors, adds up
Ewald's sum and the repulsion of the ions, takes forces by ``jax.grad`` and moves the ions. The neighbor matrix has a
fixed width, as all shapes in JAX; a `NeighborListState` goes along, and tells afterwards whether it was wide enough. A
crystal melts at 3000 K and is cooled to 1148 K, by Langevin dynamics.

Then a trajectory without thermostat is differentiated: how far the ions go in the first femtoseconds depends on their
charge and on the hardness of their repulsion. Forward mode (``jax.jvp``) gives the derivative by the charge for all
times, reverse mode (``jax.grad``, with ``jax.checkpoint`` around a step to save memory) the one at the end by all
parameters. Both take second derivatives of the energy.

What to look at: Na and Cl are neighbors at 2.6 angstrom, ions of like charge at 1.5 times that. Both modes agree to the
last digits, and with finite differences to about four: these also see how forces jump where a pair leaves the cutoff.
Takes half a minute; nothing is downloaded.
"""

import argparse
import functools
from pathlib import Path
from typing import Any, NamedTuple

import ase.build
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from ase import units

try:
    import jax
    import jax.numpy as jnp
except ImportError:
    raise SystemExit("This example needs JAX: pip install '.[jax]'") from None

from nvalchemiops._warp import quiet_warp
from nvalchemiops.constants import AVOGADRO_PER_MOL, COULOMB_EV_ANGSTROM
from nvalchemiops.jax.interactions.electrostatics import ewald_summation
from nvalchemiops.jax.interactions.pair import born_mayer_huggins
from nvalchemiops.jax.neighbors import (
    NeighborListState,
    check_neighbor_list_state,
    neighbor_list,
    prepare_neighbor_list,
)

TEMPERATURE = 1148.0  # K
STEP = 2.0  # fs
CUTOFF = 7.0  # angstrom
DIGITS = np.sqrt(-np.log(1e-5))  # of Ewald's sum: its parts are cut off where they have fallen to 1e-5
ALPHA, K_CUTOFF = DIGITS / CUTOFF, 2 * DIGITS**2 / CUTOFF

# exp((sigma - r)/rho) A - C/r^6 - D/r^8, in eV and angstrom, of Na-Na, Na-Cl and Cl-Cl; zero from the cutoff on
REPULSION = born_mayer_huggins(CUTOFF, tables=True, r_switch=CUTOFF - 1.0)
TOSI_FUMI = {"A": (0.2637, 0.2110, 0.1582), "sigma": (2.340, 2.755, 3.170)}
TOSI_FUMI |= {"C": (1.0486, 6.9906, 72.4022), "D": (0.4993, 8.6758, 145.4285)}

Parameters = dict[str, Any]


class Salt(NamedTuple):
    """What does not change while ions move."""

    cell: jax.Array
    species: jax.Array  # 0 for Na, 1 for Cl
    masses: jax.Array  # (n, 1)


class Ions(NamedTuple):
    """What a step changes."""

    positions: jax.Array
    velocities: jax.Array
    forces: jax.Array
    neighbors: NeighborListState


def fumi_tosi() -> Parameters:
    tables = {name: jnp.array([[like, mixed], [mixed, other]]) for name, (like, mixed, other) in TOSI_FUMI.items()}
    return {"charge": jnp.array(1.0), "rho": jnp.array(0.317), **tables}


def crystal(repeats: int) -> tuple[Salt, jax.Array]:
    """Rock salt, expanded to the density of the melt."""
    atoms = ase.build.bulk("NaCl", "rocksalt", a=5.64, cubic=True).repeat(repeats)
    density = 1.556 - 0.000543 * (TEMPERATURE - 1073.9)  # g/cm^3, from the melting point on
    volume = atoms.get_masses().sum() / density * 1e24 / AVOGADRO_PER_MOL
    atoms.set_cell(np.eye(3) * volume ** (1 / 3), scale_atoms=True)
    species = jnp.asarray(atoms.numbers == 17, jnp.int32)
    return Salt(jnp.asarray(atoms.cell.array), species, jnp.asarray(atoms.get_masses()[:, None])), atoms.positions


# -- energy and dynamics --------------------------------------------------------------------------


def energy(x: jax.Array, parameters: Parameters, salt: Salt, near: dict[str, jax.Array]) -> jax.Array:
    """In eV. Energies of systems cost one call of torch with their gradient, energies of ions would cost two."""
    charges = parameters["charge"] * jnp.where(salt.species == 0, 1.0, -1.0)
    repulsion = {name: jnp.broadcast_to(parameters[name], (2, 2)) for name in ("A", "sigma", "rho", "C", "D")}
    options = {**near, "energy_reduction": "system"}
    coulomb = ewald_summation(x, charges, salt.cell, ALPHA, k_cutoff=K_CUTOFF, **options)
    return COULOMB_EV_ANGSTROM * coulomb[0] + REPULSION(x, salt.cell, species=salt.species, **repulsion, **options)[0]


def with_forces(x: jax.Array, v: jax.Array, neighbors: NeighborListState, parameters: Parameters, salt: Salt) -> Ions:
    (matrix, _, shifts), neighbors = neighbor_list(jax.lax.stop_gradient(x), state=neighbors)
    near = {"neighbor_matrix": matrix, "neighbor_matrix_shifts": shifts}
    return Ions(x, v, -jax.grad(energy)(x, parameters, salt, near), neighbors)


def step(
    ions: Ions, temperature: jax.Array, noise: jax.Array, parameters: Parameters, salt: Salt, friction: float = 0.0
) -> Ions:
    """Langevin dynamics in the order BAOAB, friction in 1/fs; Newton's without friction."""
    dt = STEP * units.fs
    x, v = ions.positions, ions.velocities + 0.5 * dt * ions.forces / salt.masses
    x = x + 0.5 * dt * v
    kept = np.exp(-friction * STEP)
    v = kept * v + jnp.sqrt((1 - kept**2) * units.kB * temperature / salt.masses) * noise
    ions = with_forces(x + 0.5 * dt * v, v, ions.neighbors, parameters, salt)
    return ions._replace(velocities=v + 0.5 * dt * ions.forces / salt.masses)


@jax.jit
def langevin(
    ions: Ions, temperatures: jax.Array, key: jax.Array, parameters: Parameters, salt: Salt
) -> tuple[Ions, tuple[jax.Array, jax.Array]]:
    """As many steps as there are temperatures; positions and temperatures on the way."""

    def advance(ions: Ions, given: tuple[jax.Array, jax.Array]) -> tuple[Ions, tuple[jax.Array, jax.Array]]:
        temperature, key = given
        noise = jax.random.normal(key, ions.positions.shape)
        ions = step(ions, temperature, noise, parameters, salt, friction=0.01)
        measured = jnp.mean(salt.masses * ions.velocities**2) / units.kB
        return ions, (ions.positions, measured)

    return jax.lax.scan(advance, ions, (temperatures, jax.random.split(key, len(temperatures))))


@functools.partial(jax.jit, static_argnames="steps")
def distances_gone(parameters: Parameters, start: Ions, salt: Salt, steps: int) -> jax.Array:
    """Mean square displacement (angstrom^2) of the ions after 1, 2, ... ``steps`` steps of Newton's dynamics."""

    @jax.checkpoint
    def advance(ions: Ions, _: None) -> tuple[Ions, jax.Array]:
        ions = step(ions, jnp.array(0.0), jnp.zeros_like(ions.positions), parameters, salt)
        return ions, jnp.mean(jnp.sum((ions.positions - start.positions) ** 2, axis=1))

    ions = with_forces(start.positions, start.velocities, start.neighbors, parameters, salt)
    return jax.lax.scan(advance, ions, None, length=steps)[1]


# -- structure ------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="bins")
def radial_distributions(trajectory: jax.Array, salt: Salt, bins: int) -> tuple[jax.Array, jax.Array]:
    """Distances, and g(r) of Na-Na, Na-Cl and Cl-Cl up to half of the box."""
    n, length = trajectory.shape[1], salt.cell[0, 0]
    width = 0.5 * length / bins

    def counts(x: jax.Array) -> jax.Array:
        between = x[:, None] - x
        distances = jnp.linalg.norm(between - length * jnp.round(between / length), axis=2) + 1e9 * jnp.eye(n)
        kind = salt.species[:, None] + salt.species
        slot = jnp.where(distances < 0.5 * length, (distances / width).astype(jnp.int32), bins)
        return jnp.zeros((3, bins + 1)).at[kind, slot].add(1.0)[:, :bins]

    edges = width * jnp.arange(bins + 1)
    in_gas = 4 / 3 * jnp.pi * jnp.diff(edges**3) / length**3 * n**2 * jnp.array([[0.25], [0.5], [0.25]])
    return edges[1:] - 0.5 * width, jnp.mean(jax.lax.map(counts, trajectory), axis=0) / in_gas


def first_peak(r: np.ndarray, g: np.ndarray) -> tuple[float, float]:
    """Where g is largest, and its value there: a parabola through what is close to the largest bin."""
    near = np.abs(r - r[g.argmax()]) < 0.2
    a, b, c = np.polyfit(r[near], g[near], 2)
    return -b / (2 * a), c - b * b / (4 * a)


# -- report ---------------------------------------------------------------------------------------


def draw(
    path: Path,
    r: np.ndarray,
    g: np.ndarray,
    temperature: float,
    times: np.ndarray,
    slope: np.ndarray,
    differences: np.ndarray,
) -> None:
    figure, (radial, derivative) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for values, pair, color in zip(g, ("Na-Na", "Na-Cl", "Cl-Cl"), ("#d98c1f", "black", "#5a9e4b")):
        radial.plot(r, values, color=color, label=pair)
    radial.set(xlabel="distance (Å)", ylabel="g(r)", xlim=(1.5, r[-1]), title=f"NaCl at {temperature:.0f} K")
    derivative.plot(times, slope, color="#1f6fb4", label="jax.jvp of the trajectory")
    derivative.plot(times, differences, "o", color="black", ms=3.5, label="finite differences")
    derivative.set(xlabel="time (fs)", ylabel="Å²/e", title="Mean square displacement, by the charge of ions")
    for axes in (radial, derivative):
        axes.legend(frameon=False)
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("jax_molten_salt.png"), help="picture")
    parser.add_argument("--quick", action="store_true", help="fewer ions and steps, for tests")
    options = parser.parse_args()
    quiet_warp()
    jax.config.update("jax_enable_x64", True)

    parameters, (salt, x) = fumi_tosi(), crystal(2 if options.quick else 3)
    n, length = len(x), float(salt.cell[0, 0])
    melting, cooling, sampling = (250, 250, 500) if options.quick else (500, 500, 1500)
    temperatures = np.repeat([3000.0, TEMPERATURE], [melting, cooling + sampling])

    v = jax.random.normal(jax.random.key(0), x.shape) * jnp.sqrt(units.kB * 3000.0 / salt.masses)
    neighbors = prepare_neighbor_list(x, CUTOFF, salt.cell, max_neighbors=int(2.0 * n / length**3 * 4 * CUTOFF**3))
    start = jax.jit(with_forces)(jnp.asarray(x), v, neighbors, parameters, salt)
    ions, (trajectory, measured) = langevin(start, jnp.asarray(temperatures), jax.random.key(1), parameters, salt)
    check_neighbor_list_state(ions.neighbors)
    r, g = map(np.asarray, radial_distributions(trajectory[melting + cooling :: 10], salt, bins=100))
    temperature = float(measured[melting + cooling :].mean())
    room, widest = neighbors.neighbor_matrix.shape[1], int(ions.neighbors.largest[0])

    print(f"{n} ions in a cube of {length:.2f} Å, {len(temperatures)} steps of {STEP:.0f} fs in one jax.lax.scan")
    print(f"temperature                       {temperature:6.0f} K")
    print(f"neighbors of an ion, at most      {widest:6d}   where the matrix has room for {room}")
    for pair, values in zip(("Na-Na", "Na-Cl", "Cl-Cl"), g):
        where, height = first_peak(r, values)
        print(f"first peak of g(r), {pair}         {height:6.2f}   at {where:.2f} Å")

    steps = 10 if options.quick else 25
    far = functools.partial(distances_gone, start=ions, salt=salt, steps=steps)
    by_charge = {
        name: jnp.ones_like(value) if name == "charge" else jnp.zeros_like(value) for name, value in parameters.items()
    }
    gone, slope = jax.jvp(far, (parameters,), (by_charge,))
    gradient = jax.grad(lambda parameters: far(parameters)[-1])(parameters)

    def differences(name: str, change: float) -> np.ndarray:
        """Along a change of all entries of a parameter: central, at two distances, extrapolated."""

        def at(h: float) -> jax.Array:
            return far(parameters | {name: parameters[name] + h})

        once, twice = ((at(h) - at(-h)) / (2 * h) for h in (change, 2 * change))
        return np.asarray((4 * once - twice) / 3)

    print(f"\nmean square displacement after {STEP * steps:.0f} fs: {gone[-1]:.4f} Å²; its derivatives")
    print("by                        jax.grad   differences   relative error")
    charge_differences = differences("charge", 1e-3)
    for name, unit, change in (("charge", "Å²/e", 1e-3), ("rho", "Å²/Å", 3e-5), ("A", "Å²/eV", 1e-4)):
        by_grad = float(gradient[name].sum())
        by_difference = (charge_differences if name == "charge" else differences(name, change))[-1]
        print(f"{name:7s} {unit:10s} {by_grad:16.6f} {by_difference:13.6f} {abs(by_grad / by_difference - 1):16.1e}")
    print(f"jax.jvp and jax.grad differ by    {abs(slope[-1] / gradient['charge'] - 1):.0e}")
    times = STEP * np.arange(1, steps + 1)
    draw(options.output, r, g, temperature, times, np.asarray(slope), charge_differences)
    print(f"\npicture: {options.output}")


if __name__ == "__main__":
    main()
