"""The order of splines that nobody gave is chosen with the mesh, from sizes and accuracy alone."""

import numpy as np
import pytest
import torch

from nvalchemiops.interactions.electrostatics import error_models as core
from nvalchemiops.torch.interactions.electrostatics import ParticleMeshEwald, particle_mesh_ewald
from nvalchemiops.torch.systems import System
from tests.support.sums import exact_forces, relative_error
from tests.support.systems import disordered


def order_of(accuracy, n_atoms=512.0, volume=512.0 * 2.8**3, **reach):
    sizes = np.array([n_atoms]), np.array([volume])
    return core.mesh_order(*sizes, core.Target(accuracy), core.COSTS["cpu"], **reach)


def atoms_of(name):
    found = disordered(name)
    return found.positions, found.charges, found.cell


def test_a_higher_accuracy_never_has_a_lower_order():
    orders = [order_of(10.0**-n) for n in range(1, 10)]
    assert orders == sorted(orders) and orders[0] == 4 and orders[-1] == 8
    assert [order_of(10.0**-n, lowest=6) for n in range(1, 10)] == [max(6, order) for order in orders]
    # the shorter the cutoff, the more is left to the mesh
    assert order_of(1e-3, cutoff=3.0) > order_of(1e-3, cutoff=12.0)
    assert order_of(1e-3, alpha=np.array([1.5])) > order_of(1e-3, alpha=np.array([0.2]))


@pytest.mark.parametrize("name", ["rock salt", "water", "slab of water"])
@pytest.mark.parametrize("digits", range(2, 7))
def test_the_order_is_that_of_sizes_and_accuracy_and_errors_are_as_asked(name, digits):
    x, q, cell = atoms_of(name)
    accuracy = 10.0**-digits
    _, forces = particle_mesh_ewald(x, q, cell, accuracy=accuracy, compute_forces=True)
    order = order_of(accuracy, float(len(x)), float(cell.det().abs()), lowest=5)
    options = {"accuracy": accuracy, "spline_order": order, "compute_forces": True}
    assert torch.equal(forces, particle_mesh_ewald(x, q, cell, **options)[1])
    assert accuracy / 5.0 < relative_error(forces, exact_forces(name)) < 3.0 * accuracy


def test_a_given_mesh_has_order_5():
    x, q, cell = atoms_of("rock salt")
    for mesh in ({"mesh_dimensions": (24, 24, 24)}, {"mesh_spacing": 0.5}):
        by_default = particle_mesh_ewald(x, q, cell, 0.6, cutoff=6.0, **mesh)
        assert torch.equal(by_default, particle_mesh_ewald(x, q, cell, 0.6, cutoff=6.0, spline_order=5, **mesh))
    assert ParticleMeshEwald(mesh_dimensions=(24, 24, 24)).spline_order == 5


def test_modules_choose_in_each_call_or_once():
    x, q, cell = atoms_of("rock salt")
    system, module, loaded = System(x, q, cell), ParticleMeshEwald(accuracy=1e-6), ParticleMeshEwald(spline_order=4)
    assert module.spline_order is None
    assert torch.equal(module(system).energies, particle_mesh_ewald(x, q, cell, accuracy=1e-6))
    loaded.load_state_dict(module.state_dict())
    assert loaded.spline_order is None and torch.equal(loaded(system).energies, module(system).energies)
    once = ParticleMeshEwald.estimate(system, accuracy=1e-6).prepare(system)
    assert once.spline_order == 8
    forces = once(system, compute_forces=True).forces
    assert relative_error(forces, exact_forces("rock salt")) < 3e-6


def test_quadrupoles_have_an_order_that_is_high_enough():
    x, q, cell = atoms_of("rock salt")
    quadrupoles = x.new_tensor([0.1, 0.1, -0.2]).diag().repeat(len(x), 1, 1)
    found = particle_mesh_ewald(x, q, cell, accuracy=0.1, quadrupoles=quadrupoles)
    assert torch.equal(found, particle_mesh_ewald(x, q, cell, accuracy=0.1, quadrupoles=quadrupoles, spline_order=5))
