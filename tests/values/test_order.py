"""The order of splines that nobody gave is chosen by the accuracy."""

import pytest
import torch

from nvalchemiops.interactions.electrostatics.error_models import order_of_least_cost
from nvalchemiops.torch.interactions.electrostatics import ParticleMeshEwald, particle_mesh_ewald
from nvalchemiops.torch.systems import System
from tests.support.sums import exact_forces, relative_error
from tests.support.systems import disordered


def atoms_of(name):
    found = disordered(name)
    return found.positions, found.charges, found.cell


def test_a_higher_accuracy_has_a_higher_order():
    assert [order_of_least_cost(10.0**-n) for n in range(1, 11)] == [5, 5, 6, 8, 8, 8, 8, 8, 8, 8]


@pytest.mark.parametrize("name", ["rock salt", "water", "slab of water"])
@pytest.mark.parametrize("digits", range(2, 7))
def test_the_order_follows_from_the_accuracy_and_errors_are_as_asked(name, digits):
    x, q, cell = atoms_of(name)
    accuracy = 10.0**-digits
    _, forces = particle_mesh_ewald(x, q, cell, accuracy=accuracy, compute_forces=True)
    options = {"accuracy": accuracy, "spline_order": order_of_least_cost(accuracy), "compute_forces": True}
    assert torch.equal(forces, particle_mesh_ewald(x, q, cell, **options)[1])
    assert accuracy / 5.0 < relative_error(forces, exact_forces(name)) < 3.0 * accuracy


def test_a_given_mesh_has_order_5():
    x, q, cell = atoms_of("rock salt")
    for mesh in ({"mesh_dimensions": (24, 24, 24)}, {"mesh_spacing": 0.5}):
        by_default = particle_mesh_ewald(x, q, cell, 0.6, cutoff=6.0, **mesh)
        assert torch.equal(by_default, particle_mesh_ewald(x, q, cell, 0.6, cutoff=6.0, spline_order=5, **mesh))
    assert ParticleMeshEwald(mesh_dimensions=(24, 24, 24)).spline_order == 5
    module = ParticleMeshEwald(0.6, cutoff=6.0)
    module.mesh_dimensions = (24, 24, 24)
    by_default = particle_mesh_ewald(x, q, cell, 0.6, cutoff=6.0, mesh_dimensions=(24, 24, 24))
    assert torch.equal(module.prepare(cell)(x, q, cell), by_default)


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
