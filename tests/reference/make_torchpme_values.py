"""Make torchpme_values.json: potentials, energies and forces by torch-pme, another implementation of Ewald's sum.

Run with torch-pme 0.5.0 and torch 2.13, in an environment of their own: the tests read the numbers only. With the
smearing σ of torch-pme, alpha is 1 / (σ √2). Its potentials are those of this library: dE/dq.
"""

import itertools
import json
import pathlib

import numpy as np
import torch
from torchpme import CoulombPotential, EwaldCalculator, PMECalculator

SMEARING, LR_WAVELENGTH, CUTOFF = 0.7, 0.28, 6.5


def systems():
    rng = np.random.default_rng(11)
    skewed = np.array([[7.0, 0.0, 0.0], [2.4, 6.3, 0.0], [-2.1, 2.8, 6.0]])
    ions = np.repeat([1.0, -1.0], 8)
    yield "ionic liquid", scattered(16, np.eye(3) * 7.2, rng), ions, np.eye(3) * 7.2
    yield "triclinic", scattered(16, skewed, rng), np.where(ions > 0.0, 2.0, -1.0) - 0.5, skewed
    molecule = np.array([[0.0, 0.0, 0.0], [0.7570, 0.5859, 0.0], [-0.7570, 0.5859, 0.0]])
    grid = np.array(list(itertools.product(range(2), repeat=3))) * 3.104 + rng.uniform(-0.2, 0.2, (8, 3))
    turns = np.linalg.qr(rng.normal(size=(8, 3, 3)))[0]
    water = (grid[:, None] + molecule @ turns).reshape(-1, 3)
    yield "water", water, np.tile([-0.834, 0.417, 0.417], 8), np.eye(3) * 6.208


def images(cell, reach):
    return np.array(list(itertools.product(range(-reach, reach + 1), repeat=3))) @ cell


def scattered(n_atoms, cell, rng, nearest=1.9):
    positions = np.zeros((0, 3))
    while len(positions) < n_atoms:
        new = rng.random(3) @ cell
        apart = positions[:, None] - new + images(cell, 1)
        if not (np.square(apart).sum(-1) < nearest**2).any():
            positions = np.concatenate([positions, new[None]])
    return positions


def evaluate(make, positions, charges, cell):
    positions, charges, cell = (torch.tensor(a, dtype=torch.float64) for a in (positions, charges, cell))
    positions.requires_grad_()
    shifts = torch.tensor(images(cell.numpy(), 3))
    vectors = positions[None, :, None] - positions[:, None, None] + shifts
    distances = torch.linalg.norm(vectors, dim=-1)
    i, j, s = torch.nonzero((distances < CUTOFF) & (distances > 1e-9), as_tuple=True)
    near = torch.linalg.norm(vectors[i, j, s], dim=-1)
    calculator = make().to(torch.float64)
    potential = calculator(charges[:, None], cell, positions, torch.stack([i, j], 1), near)[:, 0]
    energy = (charges * potential).sum()
    (slope,) = torch.autograd.grad(energy, positions)
    return 2.0 * potential.detach(), energy.detach(), -slope


def main():
    potential = CoulombPotential(smearing=SMEARING)
    makers = {
        "ewald": lambda: EwaldCalculator(potential, lr_wavelength=LR_WAVELENGTH, full_neighbor_list=True),
        "pme": lambda: PMECalculator(potential, mesh_spacing=0.1, interpolation_nodes=7, full_neighbor_list=True),
    }
    values = {}
    for name, positions, charges, cell in systems():
        values[name] = {"positions": positions.tolist(), "charges": charges.tolist(), "cell": cell.tolist()}
        for method, make in makers.items():
            found = evaluate(make, positions, charges, cell)
            keys = ("potentials", "energy", "forces")
            values[name][method] = {key: value.tolist() for key, value in zip(keys, found)}
    path = pathlib.Path(__file__).with_name("torchpme_values.json")
    path.write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    main()
