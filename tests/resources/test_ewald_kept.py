"""What is prepared, or kept from call to call, belongs to the values that it was made from."""

import itertools

import numpy as np
import pytest
import torch
from ase.geometry import minkowski_reduce

from nvalchemiops.torch.interactions.electrostatics import (
    ewald_summation,
    particle_mesh_ewald,
    prepare_mesh,
)
from nvalchemiops.torch.interactions.electrostatics.potentials import COULOMB, power_law
from nvalchemiops.torch.neighbors import neighbor_list
from nvalchemiops.torch.operators.lattice import shortest_vectors
from tests.support.systems import triclinic

F64 = torch.float64
MESH = {"mesh_dimensions": (12, 12, 12)}
SYSTEM = triclinic(6)
X, Q, CELL = SYSTEM.positions, SYSTEM.charges, SYSTEM.cell


def pme(cell, **options):
    return particle_mesh_ewald(X, Q, cell, cutoff=4.0, energy_reduction="system", **options)


# -- prepared meshes and modules ------------------------------------------------------------------


def test_a_prepared_mesh_is_for_one_cell():
    """Also if that tensor is changed afterwards, and where values cannot be read."""
    expected = pme(CELL, alpha=0.6, **MESH)
    cell, alpha = CELL.clone(), torch.tensor([0.6], dtype=F64)
    kept = prepare_mesh(cell, alpha, (12, 12, 12))
    alpha.fill_(0.9)
    torch.testing.assert_close(pme(CELL, prepared=kept), expected, rtol=0.0, atol=0.0)
    cell.mul_(1.1)
    with pytest.raises(ValueError, match="`prepared` is for another `cell`"):
        pme(cell, prepared=kept)

    matrix, _, shifts = neighbor_list(X, 4.0, CELL)
    near = {"neighbor_matrix": matrix, "neighbor_matrix_shifts": shifts}
    compiled = torch.compile(lambda cell: pme(cell, prepared=kept, **near), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(CELL), expected)
    assert compiled(1.1 * CELL).isnan().all()


def test_a_prepared_mesh_has_no_derivative_by_the_cell():
    kept = prepare_mesh(CELL, 0.6, (12, 12, 12))
    with pytest.raises(ValueError, match="`cell` requires a gradient"):
        pme(CELL.clone().requires_grad_(), prepared=kept)
    for transform in (lambda f: torch.func.jvp(f, (CELL,), (CELL,)), lambda f: torch.func.grad(f)(CELL)):
        with pytest.raises(ValueError, match="`cell` requires a gradient"):
            transform(lambda cell: pme(cell, prepared=kept).sum())
    # by something else it has
    slope = torch.func.grad(lambda q: particle_mesh_ewald(X, q, CELL, prepared=kept, cutoff=4.0).sum())(Q)
    found = particle_mesh_ewald(X, Q, CELL, 0.6, **MESH, cutoff=4.0, compute_charge_gradients=True)[1]
    torch.testing.assert_close(slope, found)


# -- what calls keep by themselves ----------------------------------------------------------------


@pytest.mark.parametrize("method", ["ewald", "pme"])
def test_a_potential_of_ones_own_can_be_trained(method):
    """Its tensors may change, and have gradients, though the functions stay the same objects."""
    scale = torch.nn.Parameter(torch.tensor(1.0, dtype=F64))
    potential = COULOMB._replace(reciprocal=lambda k2, a: COULOMB.reciprocal(k2, a) * scale, slope=None)
    options = {"mesh_dimensions": (12, 12, 12)} if method == "pme" else {"k_cutoff": 4.0}
    function = particle_mesh_ewald if method == "pme" else ewald_summation
    x = X.clone().requires_grad_()

    def energy():
        return function(x, Q, CELL, 0.6, cutoff=4.0, potential=potential, **options).sum()

    first = energy()
    (slope,) = torch.autograd.grad(first, scale)
    with torch.no_grad():
        scale.mul_(2.0)
    # the energy is linear in it
    torch.testing.assert_close(energy() - first, slope)
    assert COULOMB.is_constant and power_law(6).is_constant and not potential.is_constant


def test_alpha_must_not_change_before_the_backward_pass():
    alpha, x = torch.tensor([0.6], dtype=F64), X.clone().requires_grad_()
    energies = ewald_summation(x, Q, CELL, alpha, k_cutoff=4.0, cutoff=4.0)
    alpha.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (energies * torch.arange(len(X))).sum().backward()


# -- lattices -------------------------------------------------------------------------------------


def skewed(rng, steps=6):
    """A random cell, and another one of the same lattice."""
    cell, change = rng.normal(size=(3, 3)), np.eye(3)
    for _ in range(steps):
        i, j = rng.permutation(3)[:2]
        change[i] += rng.integers(-5, 6) * change[j]
    return cell, change @ cell


def test_shortest_vectors():
    """As ASE finds them: of the same lattice, and of the same lengths."""
    rng = np.random.default_rng(0)
    cells = np.stack([skewed(rng)[1] for _ in range(200)])
    basis = shortest_vectors(torch.tensor(cells))
    torch.testing.assert_close(torch.linalg.det(basis.double()).abs(), torch.ones(200, dtype=F64))
    found = np.sort(np.linalg.norm(basis.numpy() @ cells, axis=2))
    expected = np.sort([np.linalg.norm(minkowski_reduce(cell)[0], axis=1) for cell in cells])
    np.testing.assert_allclose(found, expected, rtol=1e-8)


def test_exclusions_do_not_depend_on_the_basis_of_the_lattice():
    rng = np.random.default_rng(1)
    for _ in range(4):
        cell, other = skewed(rng, 4)
        scale = 6.0 / abs(np.linalg.det(cell)) ** (1 / 3)
        x, q = torch.tensor(rng.random((6, 3)) @ cell) * scale, torch.tensor(rng.normal(size=6))
        pairs = torch.tensor(list(itertools.combinations(range(6), 2))).T
        found = [
            ewald_summation(x, q, torch.tensor(c) * scale, 0.8, k_cutoff=7.0, cutoff=5.0, exclusions=pairs).sum()
            for c in (cell, other)
        ]
        torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-9)
