"""Learn atomic charges from energies and forces, with the long-range Coulomb energy in the training loop.

A small network predicts the charge of each atom from its surroundings. Charges are never shown to it: it sees
total energies and forces only, of perturbed crystals and melts of NaCl and CsCl, and has to find the charges
whose Ewald sum explains them. Then the trained model drives molecular dynamics through ASE.

The force of a model whose charges depend on the geometry has two parts,

    F = F_fixed - sum_i dE/dq_i dq_i/dR

and `ewald_summation` returns what is needed for both: the forces at fixed charges and dE/dq. Both are
differentiable, so the loss on forces needs one ordinary backward, and `create_graph` in the network alone.

The reference potential that makes the data is made up for this example and stated in `ReferenceCharges` and
`REPULSION`. Nothing is downloaded. Units: eV, angstrom, e.
"""

import argparse
import math
import sys
import time
from typing import NamedTuple

import ase
import ase.build
import ase.md
import ase.md.langevin
import ase.md.velocitydistribution
import ase.md.verlet
import ase.units
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from ase.calculators.calculator import Calculator, all_changes
from tqdm import tqdm

from nvalchemiops._warp import quiet_warp
from nvalchemiops.constants import COULOMB_EV_ANGSTROM
from nvalchemiops.torch import adapt_threads
from nvalchemiops.torch.interactions.electrostatics import estimate_ewald_parameters, ewald_summation
from nvalchemiops.torch.neighbors import neighbor_list

SPECIES = {"Na": 0, "Cl": 1, "Cs": 2}
FORMAL_CHARGE = torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64)  # of Na, Cl, Cs
SURROUNDINGS = 5.0  # angstrom, how far the charge of an atom looks
ACCURACY = 1e-4  # of the Ewald sums

# Born-Mayer repulsion A exp(-r / rho) between unlike ions: A in eV, rho in angstrom. Together with charges of
# about 0.8 e they put the crystals close to their measured lattice constants.
REPULSION = {("Na", "Cl"): (725.0, 0.32), ("Cs", "Cl"): (1970.0, 0.34)}
LATTICE = {"NaCl": ("rocksalt", 5.64, 2), "CsCl": ("cesiumchloride", 4.12, 3)}  # structure, angstrom, repeats

MADELUNG = {"NaCl": 1.747564594633182, "CsCl": 1.762674773070988}  # literature


# -- structures and batches -----------------------------------------------------------------------


class Batch(NamedTuple):
    """Several structures as one set of atoms, with everything that stays fixed while a model learns."""

    positions: torch.Tensor  # (n_atoms, 3)
    species: torch.Tensor  # (n_atoms,)
    cell: torch.Tensor  # (n_systems, 3, 3)
    system: torch.Tensor  # (n_atoms,)
    pairs: torch.Tensor  # (2, n_pairs), close pairs for the surroundings
    images: torch.Tensor  # (n_pairs, 3), displacement of the image that the neighbor is in
    coulomb: dict  # neighbors and their reach, for the Ewald sum

    @classmethod
    def of(cls, structures):
        positions = torch.as_tensor(np.concatenate([s.positions for s in structures]))
        species = torch.as_tensor([SPECIES[a] for s in structures for a in s.symbols])
        cell = torch.as_tensor(np.stack([s.cell.array for s in structures]))
        sizes = torch.as_tensor([len(s) for s in structures])
        system = torch.repeat_interleave(torch.arange(len(structures), dtype=torch.int32), sizes)
        pairs, _, shifts = neighbor_list(positions, SURROUNDINGS, cell, batch_idx=system, return_neighbor_list=True)
        images = torch.einsum("pa,pax->px", shifts.double(), cell[system[pairs[0]].long()])
        parameters = estimate_ewald_parameters(positions, cell, system, accuracy=ACCURACY)
        reach = float(parameters.real_space_cutoff.max())
        far, ptr, shifts = neighbor_list(positions, reach, cell, batch_idx=system, return_neighbor_list=True)
        coulomb = {"neighbor_list": far, "neighbor_ptr": ptr, "neighbor_shifts": shifts, "cutoff": reach}
        return cls(positions, species, cell, system.long(), pairs.long(), images, coulomb)

    def sum_systems(self, values):
        return values.new_zeros(self.cell.shape[0]).index_add(0, self.system, values)

    def neutral(self, charges):
        """Take the mean off, so that every structure conserves its total charge of zero."""
        sizes = torch.bincount(self.system)
        return charges - (self.sum_systems(charges) / sizes)[self.system]


def smooth_cutoff(r):
    """Falls from 1 to 0 at `SURROUNDINGS`, with two continuous derivatives."""
    return torch.where(r < SURROUNDINGS, (1.0 - (r / SURROUNDINGS) ** 2) ** 3, 0.0)


# -- potentials -----------------------------------------------------------------------------------


class ReferenceCharges(torch.nn.Module):
    """The charges to be learned: an ion with fewer counter-ions around it is less ionic.

    q_i = z_i (0.8 + 0.2 tanh(c_i - c_0)), c_i = sum over unlike neighbors of exp(-(r / 3 A)^2) smooth_cutoff(r)
    """

    def forward(self, batch, r):
        i, j = batch.pairs
        z = FORMAL_CHARGE[batch.species]
        unlike = (z[i] * z[j] < 0).double()
        around = torch.zeros_like(z).index_add(0, i, unlike * torch.exp(-((r / 3.0) ** 2)) * smooth_cutoff(r))
        return batch.neutral(z * (0.8 + 0.2 * torch.tanh(2.0 * (around - 0.75))))


class LearnedCharges(torch.nn.Module):
    """A small network on the radial surroundings of each atom; before training it gives formal charges."""

    def __init__(self, n_shells=10, width=40):
        super().__init__()
        self.centers = torch.linspace(1.5, SURROUNDINGS - 0.5, n_shells, dtype=torch.float64)
        n_species = len(SPECIES)
        self.network = torch.nn.Sequential(
            torch.nn.Linear(n_species * (n_shells + 1), width, dtype=torch.float64),
            torch.nn.SiLU(),
            torch.nn.Linear(width, width, dtype=torch.float64),
            torch.nn.SiLU(),
            torch.nn.Linear(width, 1, dtype=torch.float64),
        )
        torch.nn.init.zeros_(self.network[-1].weight)
        torch.nn.init.zeros_(self.network[-1].bias)

    def forward(self, batch, r):
        i, j = batch.pairs
        n_species, n_shells = len(SPECIES), len(self.centers)
        shells = torch.exp(-4.0 * (r[:, None] - self.centers) ** 2) * smooth_cutoff(r)[:, None]
        # one row of shells for each atom and species of neighbor
        sums = shells.new_zeros(len(batch.species) * n_species, n_shells)
        sums = sums.index_add(0, i * n_species + batch.species[j], shells)
        own = torch.nn.functional.one_hot(batch.species, n_species).double()
        features = torch.cat([sums.reshape(len(batch.species), -1), own], dim=1)
        z = FORMAL_CHARGE[batch.species]
        return batch.neutral(z * (1.0 + self.network(features).squeeze(1)))


class Potential(torch.nn.Module):
    """Coulomb energy of charges that follow the geometry, and Born-Mayer repulsion between unlike ions."""

    def __init__(self, charges, repulsion):
        super().__init__()
        self.charges = charges
        table = torch.zeros(len(SPECIES), len(SPECIES), dtype=torch.long)
        for number, (a, b) in enumerate(repulsion):
            table[SPECIES[a], SPECIES[b]] = table[SPECIES[b], SPECIES[a]] = number + 1
        self.kind = table  # 0: no repulsion
        # stored as the logarithm of the repulsion at 3 angstrom, and rho: two numbers that do not fight
        rho = torch.tensor([p[1] for p in repulsion.values()], dtype=torch.float64)
        height = torch.log(torch.tensor([p[0] for p in repulsion.values()], dtype=torch.float64)) - 3.0 / rho
        self.height, self.rho = torch.nn.Parameter(height), torch.nn.Parameter(rho)

    def forward(self, batch, training=False):
        """Energies (n_systems,), forces (n_atoms, 3) and charges (n_atoms,)."""
        adapt_threads()  # to what other programs leave of the cores
        x = batch.positions.detach().requires_grad_()
        i, j = batch.pairs
        r = torch.linalg.vector_norm(x[j] - x[i] + batch.images, dim=1)
        q = self.charges(batch, r)

        # the Coulomb part: everything from one call
        energies, fixed, potentials = ewald_summation(
            batch.positions,
            q,
            batch.cell,
            batch_idx=batch.system,
            compute_forces=True,
            compute_charge_gradients=True,
            accuracy=ACCURACY,
            **batch.coulomb,
        )
        (through_charges,) = torch.autograd.grad(
            q, x, grad_outputs=potentials, create_graph=training, retain_graph=True
        )

        kind = self.kind[batch.species[i], batch.species[j]]
        height, rho = (torch.cat([p.new_ones(1), p])[kind] for p in (self.height, self.rho))
        half_pair = 0.5 * (kind > 0) * torch.exp(height - (r - 3.0) / rho) * smooth_cutoff(r)
        (gradient_of_repulsion,) = torch.autograd.grad(half_pair.sum(), x, create_graph=training, retain_graph=True)

        energy = COULOMB_EV_ANGSTROM * batch.sum_systems(energies)
        energy = energy + batch.sum_systems(torch.zeros_like(q).index_add(0, i, half_pair))
        force = COULOMB_EV_ANGSTROM * (fixed - through_charges) - gradient_of_repulsion
        if training:
            return energy, force, q
        return energy.detach(), force.detach(), q.detach()


class TorchCalculator(Calculator):
    """A potential as an ASE calculator."""

    implemented_properties = ("energy", "forces")

    def __init__(self, potential):
        super().__init__()
        self.potential = potential

    def calculate(self, atoms=None, properties=("energy",), system_changes=all_changes):
        super().calculate(atoms, properties, system_changes)
        energy, forces, _ = self.potential(Batch.of([self.atoms]))
        self.results = {"energy": energy.item(), "forces": forces.numpy()}


# -- data -----------------------------------------------------------------------------------------


def crystal(name):
    structure, a, repeats = LATTICE[name]
    return ase.build.bulk(name, structure, a=a, cubic=True).repeat(repeats)


def perturbed_crystals(name, count, rng):
    """Crystals with random strain and displacements of growing size."""
    for n in range(count):
        atoms = crystal(name)
        strain = rng.normal(scale=0.02, size=(3, 3))
        atoms.set_cell(atoms.cell.array @ (np.eye(3) + strain), scale_atoms=True)
        atoms.positions += rng.normal(scale=0.05 + 0.15 * n / count, size=atoms.positions.shape)
        yield atoms


def melt(name, count, calculator, rng, progress, wait, every):
    """Snapshots of dynamics at 3000 K from a loosened, strongly displaced crystal."""
    atoms = crystal(name)
    atoms.set_cell(atoms.cell.array * 1.08, scale_atoms=True)
    atoms.positions += rng.normal(scale=0.25, size=atoms.positions.shape)
    atoms.calc = calculator
    ase.md.velocitydistribution.thermalize_momenta(atoms, temperature_K=3000, rng=rng)
    dynamics = ase.md.langevin.Langevin(
        atoms, 3 * ase.units.fs, temperature_K=3000, friction=0.02 / ase.units.fs, fixcm=False, rng=rng
    )
    for n in range(count):
        for _ in range(every if n else wait):
            dynamics.run(1)
            progress.update()
        snapshot = atoms.copy()
        snapshot.calc = None
        yield snapshot


def make_data(reference, per_kind, wait, every, rng):
    """Shuffled structures, half crystals, half melts."""
    structures = []
    with tqdm(total=len(LATTICE) * (wait + (per_kind - 1) * every), desc="melting", unit="step") as progress:
        for name in LATTICE:
            structures += perturbed_crystals(name, per_kind, rng)
            structures += melt(name, per_kind, TorchCalculator(reference), rng, progress, wait, every)
    return [structures[n] for n in rng.permutation(len(structures))]


def labelled(structures, reference, size):
    """Batches of structures with their reference energies, forces and charges."""
    for start in range(0, len(structures), size):
        batch = Batch.of(structures[start : start + size])
        yield (batch, *reference(batch))


# -- training and evaluation ----------------------------------------------------------------------


def evaluate(model, data):
    """RMS errors of energies (eV/atom) and forces (eV/angstrom), with all forces and charges for the plots."""
    energies, forces, charges = [], [], []
    for batch, energy, force, charge in data:
        predicted = model(batch)
        energies.append((predicted[0] - energy) / torch.bincount(batch.system))
        forces.append(torch.stack([force.reshape(-1), predicted[1].reshape(-1)]))
        charges.append(torch.stack([charge, predicted[2]]))
    force, charge = torch.cat(forces, dim=1), torch.cat(charges, dim=1)
    return {
        "energy": torch.cat(energies).square().mean().sqrt().item(),
        "force": (force[1] - force[0]).square().mean().sqrt().item(),
        "charge": (charge[1] - charge[0]).square().mean().sqrt().item(),
        "all forces": force.numpy(),
        "all charges": charge.numpy(),
    }


def optimizer_of(model):
    return torch.optim.Adam(
        [
            {"params": model.charges.parameters(), "lr": 1.5e-2},
            {"params": [model.height], "lr": 2e-2},
            {"params": [model.rho], "lr": 2e-3},
        ]
    )


def training_step(model, optimizer, batch, energy, force):
    e, f, _ = model(batch, training=True)
    sizes = torch.bincount(batch.system)
    loss = (f - force).square().mean() + ((e - energy) / sizes).square().mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def train(model, data, held_out, steps, rng):
    """Fit energies and forces; returns steps and held-out force errors along the way."""
    optimizer = optimizer_of(model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=[g["lr"] for g in optimizer.param_groups], total_steps=steps, pct_start=0.15
    )
    curve = {"step": [0], "force": [evaluate(model, held_out)["force"]]}
    order = []
    with tqdm(range(1, steps + 1), desc="training", unit="step") as progress:
        for step in progress:
            order = order or list(rng.permutation(len(data)))
            training_step(model, optimizer, *data[order.pop()][:3])
            schedule.step()
            if step % max(1, steps // 20) == 0 or step == steps:
                curve["step"].append(step)
                curve["force"].append(evaluate(model, held_out)["force"])
                progress.set_postfix_str(f"force error {1e3 * curve['force'][-1]:.1f} meV/A")
    return curve


def dynamics(model, steps, rng):
    """Total energy per atom (eV) of NaCl at 600 K along dynamics at constant energy, 2 fs a step."""
    atoms = crystal("NaCl")
    atoms.calc = TorchCalculator(model)
    ase.md.velocitydistribution.thermalize_momenta(atoms, temperature_K=600, rng=rng)
    ase.md.velocitydistribution.Stationary(atoms)
    run = ase.md.verlet.VelocityVerlet(atoms, 2 * ase.units.fs)
    energies = []
    for _ in tqdm(range(steps + steps // 4), desc="dynamics", unit="step"):
        run.run(1)
        energies.append(atoms.get_total_energy() / len(atoms))
    # the first steps bring the atoms from their sites into vibration, which shifts the energy that Verlet conserves
    return np.array(energies[steps // 4 :])


def drift(energies):
    """Slope of the total energy per atom, in meV/atom/ps (steps of 2 fs)."""
    return 1e3 * np.polyfit(2e-3 * np.arange(len(energies)), energies, 1)[0]


def madelung(name):
    """Madelung constant by this library's Ewald sum: minus the energy of an ion pair at unit distance."""
    structure, _, _ = LATTICE[name]
    atoms = ase.build.bulk(name, structure, a=1.0)
    nearest = 0.5 if structure == "rocksalt" else math.sqrt(0.75)
    charges = torch.tensor([1.0, -1.0], dtype=torch.float64)
    energies = ewald_summation(
        torch.as_tensor(atoms.positions), charges, torch.as_tensor(atoms.cell.array), accuracy=1e-13
    )
    return -energies.sum().item() * nearest


# -- report ---------------------------------------------------------------------------------------


def draw(path, curve, before, after, energies):
    blue, grey, red = "#1f6fb4", "#b0b0b0", "#c03a2b"
    figure, ((learn, parity), (charge, md)) = plt.subplots(2, 2, figsize=(10, 8.4), layout="constrained")
    figure.suptitle(
        f"Charges learned from energies and forces: force error {1e3 * before['force']:.0f} → "
        f"{1e3 * after['force']:.1f} meV/Å",
        fontsize=13,
    )
    learn.semilogy(curve["step"], 1e3 * np.array(curve["force"]), "o-", color=blue, ms=4)
    learn.set(xlabel="training step", ylabel="held-out force RMSE (meV/Å)", title="Learning curve")
    limit = np.abs(after["all forces"]).max() * 1.05
    for name, result, color in (("before", before, grey), ("after", after, blue)):
        error = f"{1e3 * result['force']:.1f} meV/Å"
        parity.plot(*result["all forces"], ".", ms=2, color=color, label=f"{name}: RMSE {error}", rasterized=True)
    for axes, low, high in ((parity, -limit, limit), (charge, -1.15, 1.15)):
        axes.plot([low, high], [low, high], color="black", lw=0.8, zorder=0)
        axes.set_aspect("equal")
    parity.set(xlabel="reference force (eV/Å)", ylabel="model force (eV/Å)", title="Forces on held-out structures")
    parity.set(xlim=(-limit, limit), ylim=(-limit, limit))
    for name, result, color in (("before", before, grey), ("after", after, blue)):
        label = f"{name}: RMSE {1e3 * result['charge']:.1f} me"
        charge.plot(*result["all charges"], ".", ms=3, color=color, label=label, rasterized=True)
    charge.set(xlabel="reference charge (e)", ylabel="model charge (e)", title="Charges, never shown in training")
    for axes in (parity, charge):
        axes.legend(loc="upper left", markerscale=4, frameon=False)
    time_ps = 2e-3 * np.arange(len(energies))
    md.plot(time_ps, 1e3 * (energies - energies[0]), color=red, lw=1)
    spread = max(1.0, 1.5e3 * np.abs(energies - energies[0]).max())
    md.set(xlabel="time (ps)", ylabel="change of total energy (meV/atom)", ylim=(-spread, spread))
    md.set_title(f"Dynamics: drift {drift(energies):+.2f} meV/atom/ps")
    for axes in (learn, parity, charge, md):
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=130)


def print_table(before, after, energies):
    line = "-" * 66
    print(f"\n{line}\n{'held-out structures':34s}{'before':>10s}{'after':>10s}  unit\n{line}")
    for label, key, unit in (
        ("energy error (RMS)", "energy", "meV/atom"),
        ("force error (RMS)", "force", "meV/A"),
        ("charge error (RMS, not trained on)", "charge", "me"),
    ):
        print(f"{label:34s}{1e3 * before[key]:10.2f}{1e3 * after[key]:10.2f}  {unit}")
    print(f"{line}\n{'Madelung constants':22s}{'this library':>19s}{'literature':>19s}\n{line}")
    for name, literature in MADELUNG.items():
        print(f"{name:22s}{madelung(name):19.15f}{literature:19.15f}")
    print(f"{line}\n{'dynamics at constant energy':34s}{drift(energies):+10.3f}  meV/atom/ps drift\n{line}")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, help="training steps (1500)")
    parser.add_argument("--output", default="demo.png", help="picture to write (demo.png)")
    parser.add_argument("--quick", action="store_true", help="a few seconds of everything, for tests")
    options = parser.parse_args(arguments)
    if options.steps is not None and options.steps < 10:
        parser.error("--steps must be at least 10")
    steps = options.steps or (40 if options.quick else 1500)

    quiet_warp()
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    start = time.perf_counter()

    reference = Potential(ReferenceCharges(), REPULSION)
    per_kind, wait, every = (4, 20, 5) if options.quick else (20, 120, 12)
    structures = make_data(reference, per_kind, wait, every, rng)
    n_held_out = len(structures) // 4
    held_out = list(labelled(structures[:n_held_out], reference, 4))
    data = list(labelled(structures[n_held_out:], reference, 4))

    # formal charges and a repulsion that is 30 % off
    model = Potential(LearnedCharges(), {pair: (1.3 * a, rho) for pair, (a, rho) in REPULSION.items()})
    before = evaluate(model, held_out)
    curve = train(model, data, held_out, steps, rng)
    after = evaluate(model, held_out)
    energies = dynamics(model, 20 if options.quick else 400, rng)

    print_table(before, after, energies)
    draw(options.output, curve, before, after, energies)
    print(f"picture: {options.output}    total time: {time.perf_counter() - start:.0f} s")

    target = 0.7 if options.quick else 0.2
    if not (after["force"] < target * before["force"] and after["energy"] < target * before["energy"]):
        print("FAILED: the errors did not shrink as they should", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
