"""The Ewald sum straight from its definition, in torch, for one system: slow, and differentiable to any order."""

import itertools
import math

import torch


def ewald(positions, charges, cell, alpha, real_cutoff, k_cutoff):
    """Potential at each atom, self interaction and neutralising background included; energy is q·φ / 2."""
    inverse = torch.linalg.inv(cell.detach())
    volume = torch.linalg.det(cell).abs()
    displacement = positions[None, :, :] - positions[:, None, :]

    # images: a vector shorter than the cutoff crosses at most `cutoff |dual|` lattice planes
    spread = (displacement.detach() @ inverse).abs().amax(dim=(0, 1))
    bounds = (real_cutoff * inverse.norm(dim=0) + spread).ceil().int().tolist()
    shifts = torch.tensor(list(itertools.product(*(range(-b, b + 1) for b in bounds))), dtype=cell.dtype)
    vectors = displacement[None] + (shifts @ cell)[:, None, None, :]  # (n_shifts, i, j, 3)
    squared = vectors.square().sum(-1)
    near = (squared > 1e-20) & (squared < real_cutoff**2)
    distance = torch.where(near, squared, 1.0).sqrt()
    screened = torch.where(near, torch.erfc(alpha * distance) / distance, 0.0)
    potential = screened.sum(0) @ charges

    bounds = (k_cutoff * cell.detach().norm(dim=1) / (2.0 * math.pi)).ceil().int().tolist()
    miller = torch.tensor(list(itertools.product(*(range(-b, b + 1) for b in bounds))), dtype=cell.dtype)
    k = 2.0 * math.pi * miller @ torch.linalg.inv(cell).T
    length = k.detach().norm(dim=1)
    k = k[(length > 1e-12) & (length <= k_cutoff)]
    k2 = k.square().sum(1)
    phase = k @ positions.T
    weight = 4.0 * math.pi / volume * torch.exp(-k2 / (4.0 * alpha**2)) / k2
    real, imaginary = torch.cos(phase) @ charges, torch.sin(phase) @ charges
    potential = potential + (weight * real) @ torch.cos(phase) + (weight * imaginary) @ torch.sin(phase)

    potential = potential - math.pi * charges.sum() / (alpha**2 * volume)
    return potential - 2.0 * alpha / math.sqrt(math.pi) * charges


def everything(positions, charges, cell, alpha, real_cutoff, k_cutoff, create_graph=False):
    """Energies per atom, forces at fixed charges, dE/dq and virial, the latter three by autograd."""
    strain = torch.zeros(3, 3, dtype=cell.dtype, requires_grad=True)
    deform = torch.eye(3, dtype=cell.dtype) + strain
    x, q = positions, charges
    if not x.requires_grad:
        x, q = x.clone().requires_grad_(), q.clone().requires_grad_()
    energies = 0.5 * q * ewald(x @ deform, q, cell @ deform, alpha, real_cutoff, k_cutoff)
    slopes = torch.autograd.grad(energies.sum(), (x, q, strain), create_graph=create_graph)
    return energies, -slopes[0], slopes[1], -slopes[2]
