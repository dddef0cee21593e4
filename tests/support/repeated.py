"""Charged systems whose sums are called again and again, moved or not, and comparisons of the results."""

import torch

from nvalchemiops.torch.interactions.electrostatics import ewald_summation, particle_mesh_ewald
from nvalchemiops.torch.neighbors import neighbor_list
from tests.support.comparing import close
from tests.support.plans import ordinary
from tests.support.systems import triclinic

F64 = torch.float64
SYSTEM = triclinic(12, charged=True)
X, Q, CELL = (t.to(F64) for t in (SYSTEM.positions, SYSTEM.charges, SYSTEM.cell))
NEAR = dict(
    zip(("neighbor_list", "neighbor_ptr", "neighbor_shifts"), neighbor_list(X, 3.0, CELL, return_neighbor_list=True))
)
EWALD = {"alpha": 0.8, "k_cutoff": 4.0, **NEAR}


def several(call, count=4):
    for _ in range(count):
        found = call()
    return found


NAMES = {
    False: ("neighbor_list", "neighbor_ptr", "neighbor_shifts"),
    True: ("neighbor_matrix", "", "neighbor_matrix_shifts"),
}
SUMS = {"ewald": (ewald_summation, {"k_cutoff": 6.0}), "mesh": (particle_mesh_ewald, {"mesh_dimensions": (12, 10, 9)})}
REQUESTS = {
    "energies": {},
    "of systems": {"energy_reduction": "system"},
    "forces": {"compute_forces": True},
    "all": {"compute_forces": True, "compute_charge_gradients": True, "compute_virial": True},
}


def arguments(dtype=F64, as_matrix=False, n_atoms=20):
    system = triclinic(n_atoms, charged=True)
    x, q, cell = (t.to(dtype) for t in (system.positions, system.charges, system.cell))
    found = neighbor_list(x, 3.0, cell, return_neighbor_list=not as_matrix)
    return x, q, cell, {name: t for name, t in zip(NAMES[as_matrix], found) if name}


def moved(x, q, near, step):
    """Atoms somewhat elsewhere, other charges, the same neighbors in other memory."""
    generator = torch.Generator().manual_seed(step)
    x = x + 0.01 * torch.randn(x.shape, generator=generator, dtype=x.dtype)
    return x, q * (1.0 + 0.1 * step), {name: t.clone() for name, t in near.items()}


def gradients(energies_of, inputs, weights, order):
    """Energies as a function of these, and derivatives of their weighted sum, up to the first or the second order."""
    leaves = [t.clone().requires_grad_() for t in inputs]
    energies = energies_of(*leaves)
    found = torch.autograd.grad((weights * energies).sum(), leaves, create_graph=order == 2)
    if order == 2:
        found += torch.autograd.grad(sum((g * g).sum() for g in found), leaves)
    return (energies.detach(), *(g.detach() for g in found))


def assert_as_ordinary(function, *arguments, tolerance=1e-12):
    """Without a plan the first result has the same bits, and derivatives are the same to rounding."""
    found, expected = function(*arguments), ordinary(lambda: function(*arguments))
    same_bits(found[0], expected[0])
    close(found, expected, tolerance)


def results(found):
    return found if isinstance(found, tuple) else (found,)


def same_bits(found, expected):
    assert all(torch.equal(a, b) for a, b in zip(results(found), results(expected), strict=True))
