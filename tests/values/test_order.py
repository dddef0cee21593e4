"""The order of splines that nobody gave is chosen by the accuracy, and by the costs of the device and of the list."""

import pytest
import torch

from nvalchemiops.interactions.electrostatics.costs import BUILT_IN, COSTS
from nvalchemiops.interactions.electrostatics.error_models import order_of_least_cost
from nvalchemiops.torch.interactions.electrostatics import (
    Electrostatics,
    ParticleMeshEwald,
    electrostatic_potential,
    particle_mesh_ewald,
)
from nvalchemiops.torch.interactions.electrostatics.accuracy import methods
from nvalchemiops.torch.interactions.electrostatics.automatic import periodic_sizes
from nvalchemiops.torch.systems import System
from tests.support.on_device import on_gpu, pretended_gpu
from tests.support.sums import exact_forces, relative_error
from tests.support.systems import disordered


def atoms_of(name):
    found = disordered(name)
    return found.positions, found.charges, found.cell


ORDERS = {
    ("cpu", False): [5, 5, 6, 8, 8, 10, 10, 10, 10, 10, 10, 10],  # as measured for 216 to 32,768 ions
    ("cpu", True): [5, 5, 7, 8, 8, 10, 10, 10, 10, 10, 10, 10],
    # by the costs of kernels of an H100: at 1e-4 6 and 8 were measured with a given list, 7 was not
    ("cuda", False): [5, 5, 6, 7, 8, 8, 8, 8, 8, 8, 8, 8],
    ("cuda", True): [5, 5, 6, 8, 8, 8, 8, 8, 8, 8, 8, 8],
}


@pytest.mark.parametrize(("device", "searches"), ORDERS)
def test_a_higher_accuracy_has_a_higher_order(device, searches):
    costs = BUILT_IN[device].of_call(searches)
    assert [order_of_least_cost(10.0**-n, costs) for n in range(1, 13)] == ORDERS[device, searches]


def test_on_a_gpu_the_costs_are_its_own_unless_others_were_measured(monkeypatch):
    """Of 262,144 ions, on a pretended GPU: also which parameters follow, from the costs of its kernels."""
    with pretended_gpu():
        n = 2**18
        cell = 180.5 * torch.eye(3, dtype=torch.float64)  # on the host, since values on a pretended GPU are not read
        many = System(on_gpu(torch.zeros(n, 3)), torch.ones(n), cell)
        listed, searched = (
            methods.ways(periodic_sizes(many), 1e-4, COSTS[many.positions.device.type], finds)[0]
            for finds in (False, True)
        )
        assert (listed.method, listed.order, searched.method, searched.order) == ("pme", 7, "pme", 8)
        # the fewer pairs, the more they cost; with a given list 8 took as long as any cutoff that was measured
        assert 5.0 < searched.cutoff < 6.5 < 7.0 < listed.cutoff < 9.0
        # kernels took 1.05 ms on the H100 from which the costs are, with a cutoff of 8 and order 6
        assert 0.8e-3 < listed.time - listed.times["call"] < 1.3e-3
        assert "splines of order 8" in Electrostatics(1e-4).explain(many)
        # tuned costs of this device have precedence, and those of another one have no effect
        monkeypatch.setitem(COSTS, "cpu", BUILT_IN["cpu"]._replace(column=1e6))
        assert "splines of order 8" in Electrostatics(1e-4).explain(many)
        monkeypatch.setitem(COSTS, "cuda", BUILT_IN["cuda"]._replace(column=1.0))
        assert "splines of order 5" in Electrostatics(1e-4).explain(many)


@pytest.mark.parametrize("name", ["rock salt", "water", "slab of water"])
@pytest.mark.parametrize("digits", range(2, 10))
def test_the_order_follows_from_the_accuracy_and_errors_are_as_asked(name, digits):
    x, q, cell = atoms_of(name)
    accuracy, costs = 10.0**-digits, BUILT_IN["cpu"].of_call(True)
    _, forces = particle_mesh_ewald(x, q, cell, accuracy=accuracy, compute_forces=True)
    options = {"accuracy": accuracy, "spline_order": order_of_least_cost(accuracy, costs), "compute_forces": True}
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


@pytest.mark.parametrize("digits", [2, 4, 6, 8])
def test_potentials_have_the_order_of_the_sum_or_on_a_given_mesh_6(digits):
    x, q, cell = atoms_of("water")
    options = {"accuracy": 10.0**-digits, "method": "pme", "derivatives": 2, "self_interaction": False}
    found = electrostatic_potential(x, q, cell, **options)
    order = order_of_least_cost(10.0**-digits, BUILT_IN["cpu"].of_call(True))
    for mine, same in zip(found, electrostatic_potential(x, q, cell, spline_order=order, **options)):
        assert torch.equal(mine, same)
    assert relative_error(-q[:, None] * found[1].view(x.shape), exact_forces("water")) < 3.0 * 10.0**-digits
    mesh = {"alpha": 0.6, "cutoff": 6.0, "mesh_dimensions": (20, 20, 20), **options}
    for mine, same in zip(
        electrostatic_potential(x, q, cell, **mesh), electrostatic_potential(x, q, cell, spline_order=6, **mesh)
    ):
        assert torch.equal(mine, same)


def test_modules_choose_in_each_call_or_once():
    x, q, cell = atoms_of("rock salt")
    system, module, loaded = System(x, q, cell), ParticleMeshEwald(accuracy=1e-6), ParticleMeshEwald(spline_order=4)
    assert module.spline_order is None
    assert torch.equal(module(system).energies, particle_mesh_ewald(x, q, cell, accuracy=1e-6))
    loaded.load_state_dict(module.state_dict())
    assert loaded.spline_order is None and torch.equal(loaded(system).energies, module(system).energies)
    once = ParticleMeshEwald.estimate(system, accuracy=1e-6).prepare(system)
    assert once.spline_order == 10
    forces = once(system, compute_forces=True).forces
    assert relative_error(forces, exact_forces("rock salt")) < 3e-6


def test_quadrupoles_have_an_order_that_is_high_enough():
    x, q, cell = atoms_of("rock salt")
    quadrupoles = x.new_tensor([0.1, 0.1, -0.2]).diag().repeat(len(x), 1, 1)
    found = particle_mesh_ewald(x, q, cell, accuracy=0.1, quadrupoles=quadrupoles)
    assert torch.equal(found, particle_mesh_ewald(x, q, cell, accuracy=0.1, quadrupoles=quadrupoles, spline_order=5))
