"""Fit a classical force field for ions: charge, repulsion and dispersion of MgO, to energies, forces and stresses.

The force field is that of G. V. Lewis and C. R. A. Catlow, J. Phys. C 18, 1149 (1985), doi:10.1088/0022-3719/18/6/010:
Coulomb energies of the ions, A exp(-r/rho) between Mg and O, and A' exp(-r/rho') - C/r^6 between O and O. It makes the
reference data here, with noise, and the charge, A, rho and C have to be found again (A' and rho' stay, because oxygen
ions do not come so close that they matter).

Structures of 8 to 64 ions, in three crystal types, displaced and strained, make minibatches. A batch is ragged: one set
of atoms with `batch_idx`, a cell for each system, and one call each to `particle_mesh_ewald` and to a pair potential
with tables by species. Forces and virials come back as results that can be differentiated.

Residuals are divided by their noise, so the curvature of the loss tells how uncertain the parameters are. It differs by
orders of magnitude between directions, because attraction and repulsion balance. Adam, with one backward for each
minibatch, soon gets into a valley and hardly moves along it. The method of Levenberg and Marquardt, with derivatives of
all residuals by forward mode (`torch.func.jvp`, a call for each of the four parameters), then finds its lowest point.

What to look at: parameters within a few standard errors of the true ones, and errors on new structures, without noise,
far below the noise. Units: eV, angstrom, e. Takes a quarter of a minute; nothing is downloaded.
"""

import argparse
import math
from pathlib import Path
from typing import NamedTuple

import ase.build
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from ase import Atoms
from torch import Tensor
from tqdm import tqdm

from nvalchemiops._warp import quiet_warp
from nvalchemiops.constants import COULOMB_EV_ANGSTROM, EV_PER_ANGSTROM3_IN_GPA
from nvalchemiops.torch.interactions.electrostatics import ParticleMeshEwald
from nvalchemiops.torch.interactions.pair import buckingham
from nvalchemiops.torch.neighbors import neighbor_list

SPECIES = {"Mg": 0, "O": 1}
REACH = 8.0  # angstrom
NOISE = {"energy": 2e-3, "force": 5e-2, "stress": 2e-3}  # eV/atom, eV/angstrom, eV/angstrom^3
OXYGEN = {"A": 22764.0, "rho": 0.149}  # eV, angstrom: A' and rho'
TRUE = {"charge": 2.0, "A": 821.6, "rho": 0.3242, "C": 27.88}  # e, eV, angstrom, eV angstrom^6
START = {"charge": 1.6, "A": 1500.0, "rho": 0.28, "C": 10.0}

# -- data -----------------------------------------------------------------------------------------


def structures(count: int, rng: np.random.Generator) -> list[Atoms]:
    """Crystals of several types and sizes, strained by a few percent and with displaced ions."""
    made = []
    for n in range(count):
        kind, a, repeats = (
            ("rocksalt", 4.21, (1, 1, 1)),
            ("rocksalt", 4.21, (2, 2, 1)),
            ("rocksalt", 4.21, (2, 2, 2)),
            ("cesiumchloride", 2.61, (3, 2, 2)),
            ("zincblende", 4.60, (2, 1, 1)),
        )[n % 5]
        atoms = ase.build.bulk("MgO", kind, a=a, cubic=True).repeat(repeats)
        strain = np.eye(3) * rng.uniform(0.97, 1.04) + rng.normal(scale=0.015, size=(3, 3))
        atoms.set_cell(atoms.cell.array @ strain, scale_atoms=True)
        atoms.positions += rng.normal(scale=0.1, size=atoms.positions.shape)
        made.append(atoms)
    return made


class Batch(NamedTuple):
    """Systems of different sizes as one set of atoms."""

    positions: Tensor  # (n_atoms, 3)
    cell: Tensor  # (n_systems, 3, 3)
    species: Tensor  # (n_atoms,)
    batch_idx: Tensor  # (n_atoms,)
    sizes: Tensor  # (n_systems,)
    near: dict[str, Tensor]  # neighbors
    ewald: ParticleMeshEwald

    @classmethod
    def of(cls, atoms: list[Atoms]) -> "Batch":
        positions = torch.tensor(np.concatenate([a.positions for a in atoms]))
        cell = torch.tensor(np.stack([a.cell.array for a in atoms]))
        species = torch.tensor([SPECIES[s] for a in atoms for s in a.symbols])
        sizes = torch.tensor([len(a) for a in atoms])
        batch_idx = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), sizes)
        pairs, ptr, shifts = neighbor_list(positions, REACH, cell, batch_idx=batch_idx, return_neighbor_list=True)
        near = {"neighbor_list": pairs, "neighbor_ptr": ptr, "neighbor_shifts": shifts, "batch_idx": batch_idx}
        ewald = ParticleMeshEwald.estimate(positions, cell, batch_idx, accuracy=1e-5, real_space_cutoff=REACH)
        return cls(positions, cell, species, batch_idx, sizes, near, ewald.prepare(cell))


class Labels(NamedTuple):
    """Energies per atom (n_systems,), forces (n_atoms, 3) and stresses (n_systems, 6)."""

    energy: Tensor
    force: Tensor
    stress: Tensor

    def with_noise(self, rng: np.random.Generator) -> "Labels":
        """As if measured."""
        return Labels(*(t + scale * torch.tensor(rng.normal(size=t.shape)) for t, scale in zip(self, NOISE.values())))

    def errors(self, others: "Labels") -> list[float]:
        """RMS differences."""
        return [(t - other).square().mean().sqrt().item() for t, other in zip(self, others)]


# -- the force field ------------------------------------------------------------------------------

SHORT_RANGE = buckingham(cutoff=REACH, tables=True, r_switch=REACH - 1.0)


def evaluate(batch: Batch, charge: Tensor, A: Tensor, rho: Tensor, C: Tensor) -> Labels:
    """Everything from two calls; differentiable by the four parameters."""
    zero, one = torch.zeros_like(A), torch.ones_like(A)
    # rows and columns for Mg and O; Mg and Mg do not repel each other beyond their charges
    tables = {
        "A": torch.stack([zero, A, A, OXYGEN["A"] * one]).reshape(2, 2),
        "rho": torch.stack([one, rho, rho, OXYGEN["rho"] * one]).reshape(2, 2),
        "C": torch.stack([zero, zero, zero, C]).reshape(2, 2),
    }
    wanted = {"compute_forces": True, "compute_virial": True, "energy_reduction": "system"}
    short = SHORT_RANGE(batch.positions, batch.cell, species=batch.species, **batch.near, **tables, **wanted)
    charges = torch.stack([charge, -charge])[batch.species]
    long = batch.ewald(batch.positions, charges, batch.cell, **batch.near, **wanted)
    energy, forces, virial = (near + COULOMB_EV_ANGSTROM * far for near, far in zip(short, long))
    stress = -virial / torch.linalg.det(batch.cell).abs()[:, None, None]
    i, j = torch.triu_indices(3, 3)
    return Labels(energy / batch.sizes, forces, stress[:, i, j])


def residuals(batch: Batch, labels: Labels, *parameters: Tensor) -> Tensor:
    """Differences from the labels in units of their noise, all in one vector."""
    found = evaluate(batch, *parameters)
    return torch.cat([((f - t) / scale).flatten() for f, t, scale in zip(found, labels, NOISE.values())])


# -- training -------------------------------------------------------------------------------------

Data = list[tuple[Batch, Labels]]


def physical(free: Tensor) -> list[Tensor]:
    """Charge, A, rho and C from numbers of order one that do not fight: the repulsion at 2.1 angstrom in place of A."""
    charge, height, log_rho, dispersion = free
    rho = log_rho.exp()
    return [charge, (height + 2.1 / rho).exp(), rho, 20.0 * dispersion]


def begin(charge: float, A: float, rho: float, C: float) -> Tensor:
    """The inverse of `physical`."""
    return torch.tensor([charge, math.log(A) - 2.1 / rho, math.log(rho), C / 20.0], dtype=torch.float64)


def adam(data: Data, free: Tensor, epochs: int, rng: np.random.Generator) -> list[Tensor]:
    """One minibatch a step; where it was after each epoch."""
    free = free.clone().requires_grad_()
    optimizer = torch.optim.Adam([free], lr=0.03)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    path = []
    for _ in tqdm(range(epochs), desc="Adam", unit="epoch"):
        for n in rng.permutation(len(data)):
            optimizer.zero_grad()
            residuals(*data[n], *physical(free)).square().mean().backward()
            optimizer.step()
        schedule.step()
        path.append(free.detach().clone())
    return path


def levenberg_marquardt(data: Data, free: Tensor, steps: int) -> tuple[list[Tensor], Tensor]:
    """Least squares by all residuals and their derivatives; values after each step, and the covariance at the end."""

    def everything(free: Tensor) -> Tensor:
        return torch.cat([residuals(*batch, *physical(free)) for batch in data])

    path, damping = [], 1e-3
    now = everything(free)
    for _ in tqdm(range(steps), desc="Levenberg-Marquardt", unit="step"):
        jacobian = torch.stack([torch.func.jvp(everything, (free,), (along,))[1] for along in torch.eye(4).double()])
        curvature = jacobian @ jacobian.T
        for _ in range(20):  # with more damping shorter steps, until one goes down
            damped = curvature + damping * curvature.diagonal().diag()
            there = free - torch.linalg.solve(damped, jacobian @ now)
            if (then := everything(there)).norm() <= now.norm():
                free, now, damping = there, then, 0.1 * damping
                break
            damping *= 10.0
        path.append(free)
    return path, torch.linalg.inv(curvature)


def standard_errors(free: Tensor, covariance: Tensor) -> Tensor:
    """Of the physical parameters."""
    J = torch.func.jacrev(lambda f: torch.stack(physical(f)))(free)
    return (J @ covariance @ J.T).diagonal().sqrt()


# -- report ---------------------------------------------------------------------------------------


def draw(path: Path, slowly: list[Tensor], quickly: list[Tensor], exact: Labels, before: Labels, after: Labels) -> None:
    figure, (learn, force, stress) = plt.subplots(1, 3, figsize=(12.5, 4.0), layout="constrained")
    for k, name in enumerate(TRUE):
        off = [abs(physical(free)[k].item() / TRUE[name] - 1) for free in slowly + quickly]
        learn.semilogy(range(len(off)), off, label=name)
    learn.axvline(len(slowly) - 1, color="black", lw=0.8, ls=":")
    learn.set(xlabel="epochs of Adam, then least squares", ylabel="relative error", title="Parameters")
    learn.legend(frameon=False)
    gpa = EV_PER_ANGSTROM3_IN_GPA
    for axes, field, unit, factor in ((force, "force", "eV/Å", 1.0), (stress, "stress", "GPa", gpa)):
        truth = factor * getattr(exact, field).flatten()
        for name, labels, color in (("start", before, "#b0b0b0"), ("found", after, "#1f6fb4")):
            axes.plot(truth, factor * getattr(labels, field).flatten(), ".", ms=3, color=color, label=name)
        axes.axline((0, 0), slope=1, color="black", lw=0.8)
        limit = 1.05 * truth.abs().max().item()
        axes.set(xlabel=f"reference {field} ({unit})", ylabel=f"{field} ({unit})", xlim=(-limit, limit))
        axes.set(ylim=(-1.5 * limit, 1.5 * limit), title="Structures not trained on")
        axes.legend(frameon=False, markerscale=3)
    for axes in (learn, force, stress):
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("force_field.png"), help="picture (force_field.png)")
    parser.add_argument("--quick", action="store_true", help="fewer structures, for tests")
    options = parser.parse_args()
    quiet_warp()
    rng = np.random.default_rng(0)
    true, start = ([torch.tensor(v, dtype=torch.float64) for v in values.values()] for values in (TRUE, START))

    data = []
    for _ in range(3 if options.quick else 5):
        batch = Batch.of(structures(5, rng))
        data.append((batch, evaluate(batch, *true).with_noise(rng)))
    slowly = [begin(**START), *adam(data, begin(**START), 30, rng)]
    quickly, covariance = levenberg_marquardt(data, slowly[-1], 6)
    found = [p.item() for p in physical(quickly[-1])]
    errors = standard_errors(quickly[-1], covariance).tolist()

    sizes = torch.cat([batch.sizes for batch, _ in data])
    print(f"{len(sizes)} structures of {sizes.min()} to {sizes.max()} ions in {len(data)} batches")
    print(f"{'':14s}{'start':>10s}{'Adam':>10s}{'found':>12s}{'standard error':>17s}{'true':>10s}{'off by':>16s}")
    for k, (name, unit) in enumerate(zip(TRUE, ("e", "eV", "Å", "eV Å⁶"))):
        then, off = physical(slowly[-1])[k].item(), (found[k] - TRUE[name]) / errors[k]
        print(f"{name + ' (' + unit + ')':14s}{START[name]:10.4f}{then:10.4f}{found[k]:12.4f}{errors[k]:17.2g}", end="")
        print(f"{TRUE[name]:10.4f}{off:+8.1f} errors")

    left = torch.cat([residuals(*batch, *physical(quickly[-1])) for batch in data])
    print(f"residuals, RMS: {left.square().mean().sqrt():.3f} of their noise")

    test = Batch.of(structures(10, rng))
    with torch.no_grad():
        exact, before, after = evaluate(test, *true), evaluate(test, *start), evaluate(test, *physical(quickly[-1]))
    print(f"\nnew structures, without noise: RMS errors\n{'':18s}{'noise':>10s}{'start':>10s}{'found':>12s}")
    rows = (("energy", 1e3, "meV/atom"), ("force", 1e3, "meV/Å"), ("stress", 1e3 * EV_PER_ANGSTROM3_IN_GPA, "MPa"))
    for (name, factor, unit), noise, first, found in zip(
        rows, NOISE.values(), exact.errors(before), exact.errors(after)
    ):
        print(f"{name + ' (' + unit + ')':18s}{factor * noise:10.1f}{factor * first:10.1f}{factor * found:12.3f}")
    draw(options.output, slowly, quickly, exact, before, after)
    print(f"\npicture: {options.output}")


if __name__ == "__main__":
    main()
