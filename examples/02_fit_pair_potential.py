"""Fit pair potentials to reference forces and stresses, with torch.optim, in one compiled step.

The reference is the Morse potential that Girifalco and Weizer fitted to copper (Phys. Rev. 114, 687 (1959),
doi:10.1103/PhysRev.114.687), as implemented by ASE: its forces and stresses on crystals that are displaced at random
and strained. To them are fitted a Lennard-Jones potential, whose well has too few parameters, a Buckingham potential,
and a Morse potential, which must find the parameters of the reference. Each is one line of mathematics; forces and
virial come back from the call as differentiable results, so that the loss on them takes one backward, which compiles
without a graph break.

Units: eV, angstrom. Takes a quarter of a minute; nothing is downloaded.
"""

import argparse
import math
import time
from pathlib import Path

import ase.build
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from ase.calculators.morse import MorsePotential

from nvalchemiops._warp import quiet_warp
from nvalchemiops.torch.interactions.pair import PairPotential
from nvalchemiops.torch.neighbors import neighbor_list

MORSE = {"depth": 0.3429, "steepness": 1.3588, "r0": 2.866}  # eV, 1/angstrom, angstrom
CUTOFF, SWITCH = 7.0, 5.5  # angstrom

POTENTIALS = {
    "Lennard-Jones": (
        PairPotential(
            "4*epsilon*((sigma/r)^12 - (sigma/r)^6)",
            global_parameters=("epsilon", "sigma"),
            cutoff=CUTOFF,
            r_switch=SWITCH,
        ),
        {"epsilon": 0.2, "sigma": 2.4},
    ),
    "Buckingham": (
        PairPotential("A*exp(-r/rho) - C/r^6", global_parameters=("A", "rho", "C"), cutoff=CUTOFF, r_switch=SWITCH),
        {"A": 500.0, "rho": 0.4, "C": 150.0},
    ),
    "Morse": (
        PairPotential(
            "depth*x*(x - 2); x = exp(-steepness*(r - r0))",
            global_parameters=("depth", "steepness", "r0"),
            cutoff=CUTOFF,
            r_switch=SWITCH,
        ),
        {"depth": 0.2, "steepness": 1.8, "r0": 2.6},
    ),
}


class Reference:
    """Structures as one batch, with the forces and virials to be reproduced."""

    def __init__(self, n_structures, rng):
        atoms = []
        for _ in range(n_structures):
            crystal = ase.build.bulk("Cu", "fcc", a=3.6 * rng.uniform(0.97, 1.05), cubic=True).repeat(2)
            crystal.set_cell(crystal.cell.array @ (np.eye(3) + rng.normal(scale=0.01, size=(3, 3))), scale_atoms=True)
            crystal.positions += rng.normal(scale=0.08, size=crystal.positions.shape)
            # ASE takes all lengths in units of r0, and switches off with the same polynomial
            depth, steepness, r0 = MORSE.values()
            crystal.calc = MorsePotential(
                epsilon=depth, r0=r0, rho0=steepness * r0, rcut1=SWITCH / r0, rcut2=CUTOFF / r0
            )
            atoms.append(crystal)
        sizes = torch.tensor([len(a) for a in atoms])
        self.positions = torch.as_tensor(np.concatenate([a.positions for a in atoms]))
        self.cell = torch.as_tensor(np.stack([a.cell.array for a in atoms]))
        self.batch_idx = torch.repeat_interleave(torch.arange(len(atoms), dtype=torch.int32), sizes)
        self.volume = torch.linalg.det(self.cell).abs()
        self.forces = torch.as_tensor(np.concatenate([a.get_forces() for a in atoms]))
        self.stress = torch.as_tensor(np.stack([a.get_stress(voigt=False) for a in atoms]))
        matrix, _, shifts = neighbor_list(self.positions, CUTOFF, self.cell, batch_idx=self.batch_idx)
        self.near = {"neighbor_matrix": matrix, "neighbor_matrix_shifts": shifts, "batch_idx": self.batch_idx}


class Model(torch.nn.Module):
    """A potential with positive parameters, trained through their logarithms."""

    def __init__(self, potential, start):
        super().__init__()
        self.potential = potential
        self.logarithms = torch.nn.ParameterDict(
            {name: torch.nn.Parameter(torch.tensor(math.log(v), dtype=torch.float64)) for name, v in start.items()}
        )

    def parameters_now(self):
        return {name: p.exp() for name, p in self.logarithms.items()}

    def forward(self, data):
        _, forces, virial = self.potential(
            data.positions, data.cell, **data.near, **self.parameters_now(), compute_forces=True, compute_virial=True
        )
        return forces, -virial / data.volume[:, None, None]


def errors(model, data):
    """Mean squares of the errors of forces (eV/angstrom) and stresses (eV/angstrom^3)."""
    forces, stress = model(data)
    return (forces - data.forces).square().mean(), (stress - data.stress).square().mean()


def fit(model, data, steps):
    """RMS errors of forces while fitting, and seconds of a step, eager and compiled."""

    def loss(data):
        force, stress = errors(model, data)
        return force + 100.0 * stress

    compiled = torch.compile(loss, fullgraph=True)
    seconds = {}
    for name, function in (("eager", loss), ("compiled", compiled)):
        function(data).backward()  # the first call compiles
        start = time.perf_counter()
        for _ in range(10):
            function(data).backward()
        seconds[name] = (time.perf_counter() - start) / 10
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    curve = []
    for _ in range(steps):
        optimizer.zero_grad()
        compiled(data).backward()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            curve.append(math.sqrt(errors(model, data)[0]))
    return curve, seconds


def draw(results, test, path):
    """Learning curves, force parity and the potentials themselves."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    r = torch.linspace(2.0, CUTOFF, 300, dtype=torch.float64)
    # 300 separate dimers in one call
    positions = torch.zeros(600, 3, dtype=torch.float64)
    positions[1::2, 0] = r
    atom = torch.arange(600, dtype=torch.int32)
    dimers = {"neighbor_list": torch.stack([atom, atom ^ 1]), "neighbor_ptr": torch.arange(601, dtype=torch.int32)}
    for name, (model, curve) in results.items():
        left.semilogy(range(1, len(curve) + 1), curve, label=name)
        with torch.no_grad():
            forces, _ = model(test)
            energies = 2 * model.potential(positions, **dimers, **model.parameters_now())[::2]
        middle.plot(test.forces.flatten(), forces.flatten(), ".", markersize=2, label=name)
        right.plot(r, energies, label=name)
    x = np.exp(-MORSE["steepness"] * (r.numpy() - MORSE["r0"]))
    right.plot(r, MORSE["depth"] * x * (x - 2), "k:", label="reference, uncut")
    span = [float(test.forces.min()), float(test.forces.max())]
    middle.plot(span, span, "k:", linewidth=1)
    left.set(xlabel="step", ylabel="force error (RMS), eV/Å", title="fitting")
    middle.set(xlabel="reference force, eV/Å", ylabel="fitted force, eV/Å", title="structures not fitted to")
    right.set(xlabel="r, Å", ylabel="energy of a pair, eV", ylim=(-0.5, 1.0), title="potentials")
    for axes in (left, middle, right):
        axes.legend()
    figure.savefig(path, dpi=130)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--output", type=Path, default=Path("fit.png"))
    options = parser.parse_args()
    quiet_warp()
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    data, test = Reference(8, rng), Reference(4, rng)
    scale = math.sqrt(test.forces.square().mean())
    print(f"{len(data.positions)} atoms to fit, {len(test.positions)} to test; RMS force {1000 * scale:.0f} meV/Å\n")
    results = {}
    for name, (potential, start) in POTENTIALS.items():
        model = Model(potential, start)
        curve, seconds = fit(model, data, options.steps)
        with torch.no_grad():
            force, stress = (math.sqrt(e) for e in errors(model, test))
        found = ", ".join(f"{key} = {value.item():.4f}" for key, value in model.parameters_now().items())
        print(f"{name}: {found}")
        print(f"  force error (RMS) {1000 * force:.1f} meV/Å, stress error {1000 * stress:.2f} meV/Å³, not fitted to")
        print(f"  a step takes {1e3 * seconds['eager']:.2f} ms eager, {1e3 * seconds['compiled']:.2f} ms compiled\n")
        results[name] = (model, curve)
    draw(results, test, options.output)
    print(f"picture: {options.output}")


if __name__ == "__main__":
    main()
