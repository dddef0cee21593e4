"""A force field fitted in JAX: charges and a pair potential from energies and forces, with optax.

Reference energies and forces are those of ``08_force_field_parameters.py``: Buckingham's potential for MgO (G. V. Lewis
and C. R. A. Catlow, J. Phys. C 18, 1149 (1985)) in distorted crystals, with noise. The model has the same form and
starts from other parameters. Its energy is a sum of functions of `nvalchemiops.jax`, forces are its ``jax.grad``, and
the loss contains both. L-BFGS of optax follows ``jax.value_and_grad`` of the loss, which takes second derivatives of
the energy by positions and parameters. All structures are one batch with a cell for each: every function is called once
for all.

What to look at: the loss falls to 1, where the errors are those of the noise, the parameters are found again, and the
forces in other structures are better than the noise of the data. Derivatives of the loss agree with finite differences.
Takes some seconds; nothing is downloaded.
"""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import ase.build
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from ase import Atoms

try:
    import jax
    import jax.numpy as jnp
    import optax
except ImportError as error:
    raise SystemExit(f"This example needs JAX and optax ({error}): pip install '.[jax]' optax") from None

from nvalchemiops._warp import quiet_warp
from nvalchemiops.constants import COULOMB_EV_ANGSTROM
from nvalchemiops.jax.interactions.electrostatics import ewald_summation
from nvalchemiops.jax.interactions.pair import PairPotential
from nvalchemiops.jax.neighbors import neighbor_list

CUTOFF = 6.0  # angstrom
DIGITS = np.sqrt(-np.log(1e-5))  # of Ewald's sum
ALPHA, K_CUTOFF = DIGITS / CUTOFF, 2 * DIGITS**2 / CUTOFF
NOISE = {"energy": 5e-3, "force": 3e-2}  # eV/atom, eV/angstrom
# charge (e); repulsion of Mg and O at 2.1 angstrom (eV), and its length (angstrom); dispersion of O-O (eV angstrom^6)
TRUE = {"charge": 2.0, "B": 821.6 * np.exp(-2.1 / 0.3242), "rho": 0.3242, "C": 27.88}
START = {"charge": 1.7, "B": 0.8, "rho": 0.4, "C": 20.0}
OXYGEN = {"A": 22764.0, "rho_O": 0.149}  # not fitted

# s is 1 for oxygen and 0 for magnesium
BUCKINGHAM = PairPotential(
    "mixed*B*exp((2.1 - r)/rho) + both*(A*exp(-r/rho_O) - C/r^6); mixed = s1 + s2 - 2*both; both = s1*s2",
    per_atom=("s",),
    global_parameters=("B", "rho", "C", "A", "rho_O"),
    cutoff=CUTOFF,
    r_switch=CUTOFF - 1.0,
)

Parameters = dict[str, Any]


class Batch(NamedTuple):
    """Systems of different sizes as one set of atoms, with their neighbors, which stay the same."""

    positions: jax.Array  # (n_atoms, 3)
    cells: jax.Array  # (n_systems, 3, 3)
    batch_idx: jax.Array  # (n_atoms,)
    is_oxygen: jax.Array  # (n_atoms,)
    near: dict[str, jax.Array]


class Data(NamedTuple):
    energies: jax.Array  # (n_systems,)
    forces: jax.Array  # (n_atoms, 3)


# -- data -----------------------------------------------------------------------------------------


def structures(count: int, rng: np.random.Generator) -> list[Atoms]:
    """Crystals of several types and sizes, strained by a few percent and with displaced ions."""
    made = []
    for n in range(count):
        kind, a, repeats = (
            ("rocksalt", 4.21, (1, 1, 1)),
            ("rocksalt", 4.21, (2, 2, 1)),
            ("cesiumchloride", 2.61, (3, 2, 2)),
            ("zincblende", 4.60, (2, 1, 1)),
        )[n % 4]
        atoms = ase.build.bulk("MgO", kind, a=a, cubic=True).repeat(repeats)
        strain = np.eye(3) * rng.uniform(0.95, 1.06) + rng.normal(scale=0.015, size=(3, 3))
        atoms.set_cell(atoms.cell.array @ strain, scale_atoms=True)
        atoms.positions += rng.normal(scale=0.1, size=atoms.positions.shape)
        made.append(atoms)
    return made


def batch_of(made: list[Atoms]) -> Batch:
    positions = jnp.asarray(np.concatenate([atoms.positions for atoms in made]))
    cells = jnp.asarray(np.stack([atoms.cell.array for atoms in made]))
    batch_idx = jnp.asarray(np.repeat(np.arange(len(made)), [len(atoms) for atoms in made]), jnp.int32)
    is_oxygen = jnp.asarray(np.concatenate([atoms.numbers == 8 for atoms in made]), positions.dtype)
    names = ("neighbor_list", "neighbor_ptr", "neighbor_shifts")
    found = neighbor_list(positions, CUTOFF, cells, batch_idx=batch_idx, return_neighbor_list=True)
    return Batch(positions, cells, batch_idx, is_oxygen, dict(zip(names, found)))


# -- model ----------------------------------------------------------------------------------------


def energies(x: jax.Array, parameters: Parameters, batch: Batch) -> jax.Array:
    """Of all systems, in eV."""
    charges = parameters["charge"] * (1.0 - 2.0 * batch.is_oxygen)
    options = {**batch.near, "batch_idx": batch.batch_idx, "energy_reduction": "system"}
    coulomb = ewald_summation(x, charges, batch.cells, ALPHA, k_cutoff=K_CUTOFF, **options)
    formula = {name: parameters[name] for name in ("B", "rho", "C")} | OXYGEN
    return COULOMB_EV_ANGSTROM * coulomb + BUCKINGHAM(x, batch.cells, s=batch.is_oxygen, **formula, **options)


@jax.jit
def predict(parameters: Parameters, batch: Batch) -> Data:
    def total(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = energies(x, parameters, batch)
        return jnp.sum(found), found

    gradient, found = jax.grad(total, has_aux=True)(batch.positions)
    return Data(found, -gradient)


def sizes(batch: Batch) -> jax.Array:
    return jnp.bincount(batch.batch_idx, length=len(batch.cells))


def errors(parameters: Parameters, batch: Batch, data: Data) -> tuple[jax.Array, jax.Array]:
    """RMS errors of energies (eV/atom) and of forces (eV/angstrom)."""
    found = predict(parameters, batch)
    by_energy = (found.energies - data.energies) / sizes(batch)
    return jnp.sqrt(jnp.mean(by_energy**2)), jnp.sqrt(jnp.mean((found.forces - data.forces) ** 2))


SCALE = {"charge": 0.1, "B": 1.0, "rho": 1.0, "C": 3.0}
"""Of steps: the charge changes the loss much more than the dispersion does."""


def of_logarithms(logarithms: Parameters) -> Parameters:
    """Parameters are positive and of different sizes: steps are taken in their logarithms."""
    return {name: START[name] * jnp.exp(SCALE[name] * value) for name, value in logarithms.items()}


def loss(logarithms: Parameters, batch: Batch, data: Data) -> jax.Array:
    """Mean squares of errors, each in units of its noise."""
    by_energy, by_force = errors(of_logarithms(logarithms), batch, data)
    return 0.5 * (by_energy / NOISE["energy"]) ** 2 + 0.5 * (by_force / NOISE["force"]) ** 2


def fit(batch: Batch, data: Data, steps: int) -> tuple[Parameters, list[float]]:
    optimizer = optax.lbfgs()

    def objective(logarithms: Parameters) -> jax.Array:
        return loss(logarithms, batch, data)

    @jax.jit
    def update(logarithms: Parameters, state: Any) -> tuple[Parameters, Any, jax.Array]:
        value, gradient = optax.value_and_grad_from_state(objective)(logarithms, state=state)
        changes, state = optimizer.update(gradient, state, logarithms, value=value, grad=gradient, value_fn=objective)
        return optax.apply_updates(logarithms, changes), state, value

    logarithms: Parameters = {name: jnp.array(0.0) for name in START}
    state, history = optimizer.init(logarithms), []
    print("step        loss   " + "  ".join(f"{name:>8s}" for name in START))
    for number in range(steps + 1):
        found = of_logarithms(logarithms)
        logarithms, state, value = update(logarithms, state)
        history.append(float(value))
        if number % 5 == 0:
            print(f"{number:4d} {value:11.2f}   " + "  ".join(f"{float(found[name]):8.4g}" for name in START))
    return of_logarithms(logarithms), history


# -- report ---------------------------------------------------------------------------------------


def draw(path: Path, history: list[float], forces: dict[str, np.ndarray], reference: np.ndarray) -> None:
    figure, (curve, parity) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    curve.semilogy(history, color="#1f6fb4")
    curve.axhline(1.0, color="#b0b0b0", lw=0.8)
    curve.set(xlabel="step", ylabel="loss (1: the noise)", title="Energies and forces")
    for (name, found), color in zip(forces.items(), ("#d98c1f", "#1f6fb4")):
        parity.plot(reference.ravel(), found.ravel(), ".", ms=3, color=color, label=name)
    parity.axline((0.0, 0.0), slope=1.0, color="#b0b0b0", lw=0.8)
    parity.set(
        xlabel="force of the reference (eV/Å)", ylabel="force of the model (eV/Å)", title="Structures not fitted"
    )
    parity.legend(frameon=False)
    for axes in (curve, parity):
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("jax_force_field.png"), help="picture")
    options = parser.parse_args()
    quiet_warp()
    jax.config.update("jax_enable_x64", True)

    rng = np.random.default_rng(0)
    batch, others = batch_of(structures(16, rng)), batch_of(structures(8, rng))
    exact, unseen = predict(TRUE, batch), predict(TRUE, others)
    data = Data(
        exact.energies + NOISE["energy"] * sizes(batch) * rng.normal(size=exact.energies.shape),
        exact.forces + NOISE["force"] * rng.normal(size=exact.forces.shape),
    )
    print(f"{len(data.energies)} structures, {len(data.forces)} atoms")
    found, history = fit(batch, data, steps=50)

    print("\nparameter      start      true     found")
    for name, true in TRUE.items():
        print(f"{name:9s} {START[name]:10.4f} {true:9.4f} {float(found[name]):9.4f}")
    print("\nerrors (RMS), of structures not fitted    start     found")
    before, after = (errors(parameters, others, unseen) for parameters in (START, found))
    print(f"energy (meV/atom)                    {1e3 * before[0]:10.2f} {1e3 * after[0]:9.2f}")
    print(f"force (meV/Å)                        {1e3 * before[1]:10.2f} {1e3 * after[1]:9.2f}")

    print("\nderivatives of the loss at the start     jax.grad   differences")
    origin: Parameters = {name: jnp.array(0.0) for name in START}
    evaluate = jax.jit(loss)
    for name, slope in jax.jit(jax.grad(loss))(origin, batch, data).items():
        h = 1e-4
        up, down = (evaluate(origin | {name: jnp.array(sign * h)}, batch, data) for sign in (1.0, -1.0))
        print(f"by the step of {name:9s} {slope:25.4f} {(up - down) / (2 * h):13.4f}")
    forces = {name: np.asarray(predict(p, others).forces) for name, p in (("start", START), ("found", found))}
    draw(options.output, history, forces, np.asarray(unseen.forces))
    print(f"\npicture: {options.output}")


if __name__ == "__main__":
    main()
