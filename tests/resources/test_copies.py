"""Modules and what is prepared survive copying, pickling and saving, and compute the same to the last bit."""

import copy
import io
import pickle

import pytest
import torch

import nvalchemiops.torch as torch_ops
from nvalchemiops.torch import dynamics
from nvalchemiops.torch.interactions import dispersion, electrostatics
from nvalchemiops.torch.interactions.dispersion import DFTD3, d3_dispersion, damping_parameters
from nvalchemiops.torch.interactions.electrostatics.potentials import COULOMB, power_law
from nvalchemiops.torch.interactions.pair import PairPotential, lennard_jones
from nvalchemiops.torch.neighbors import VerletList
from tests.support.molecules import molecule, parameters
from tests.support.systems import triclinic

SYSTEM = triclinic(8)
X, Q, CELL = SYSTEM.positions, SYSTEM.charges, SYSTEM.cell
MOLECULE = molecule("HCl")


def pickled(thing):
    return pickle.loads(pickle.dumps(thing))


def saved(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


DUPLICATES = pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickled, saved])
POTENTIALS = pytest.mark.parametrize("potential", [COULOMB, power_law(6)], ids=["coulomb", "dispersion"])


def equal(found, expected):
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


@DUPLICATES
@POTENTIALS
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda potential: electrostatics.EwaldSummation(0.6, 4.0, 5.0, potential=potential),
        lambda potential: electrostatics.ParticleMeshEwald(0.6, (12, 12, 12), 5, 5.0, potential=potential),
    ],
    ids=["ewald", "pme"],
)
def test_ewald_modules(make, prepared, potential, duplicate):
    module = make(potential)
    if prepared:
        module.prepare(CELL)
    equal(duplicate(module)(X, Q, CELL, compute_forces=True), module(X, Q, CELL, compute_forces=True))


@DUPLICATES
@POTENTIALS
def test_a_prepared_mesh(potential, duplicate):
    mesh = electrostatics.prepare_mesh(CELL, 0.6, (12, 12, 12), potential=potential)
    options = {"cutoff": 5.0, "potential": potential}
    found = electrostatics.particle_mesh_ewald(X, Q, CELL, prepared=duplicate(mesh), **options)
    equal(found, electrostatics.particle_mesh_ewald(X, Q, CELL, prepared=mesh, **options))


def test_a_prepared_mesh_as_an_argument_of_transforms():
    """They pass on copies of tuples."""

    def energy(x, prepared):
        return electrostatics.particle_mesh_ewald(x, Q, CELL, prepared=prepared, cutoff=5.0).sum()

    mesh = electrostatics.prepare_mesh(CELL, 0.6, (12, 12, 12))
    equal(torch.func.grad(energy)(X, mesh), torch.func.grad(lambda x: energy(x, mesh))(X))


@DUPLICATES
def test_prepared_wave_vectors(duplicate):
    waves = electrostatics.prepare_wave_vectors(CELL, 4.0)
    first, second = (
        electrostatics.ewald_summation(X, Q, CELL, 0.6, miller_indices=these, cutoff=5.0)
        for these in (waves, duplicate(waves))
    )
    equal(second, first)


@DUPLICATES
@POTENTIALS
def test_a_potential_stays_itself(potential, duplicate):
    """Parameters are chosen for Coulomb's alone, and what is prepared is for one potential."""
    assert duplicate(potential) is potential


def without_background(alpha):
    return 0.0 * alpha


@DUPLICATES
def test_a_potential_made_of_another_one_is_not_that_one(duplicate):
    copied = duplicate(COULOMB._replace(at_zero=without_background))
    assert copied.at_zero is without_background and copied.reciprocal is COULOMB.reciprocal


@DUPLICATES
def test_dispersion(duplicate):
    atoms, damping = MOLECULE.arguments(), damping_parameters("pbe")
    module = DFTD3("pbe", [1, 17], parameters())
    equal(duplicate(module)(**atoms), module(**atoms))
    for given in (parameters(), parameters().states([1, 17])):
        first, second = (
            d3_dispersion(**atoms, damping=damping, parameters=these, cutoff=20.0)
            for these in (given, duplicate(given))
        )
        equal(second, first)


@DUPLICATES
@pytest.mark.parametrize("potential", [lennard_jones(4.0, shifted=True), PairPotential("k/r^6", (), ["k"], cutoff=4.0)])
def test_pair_potentials(potential, duplicate):
    values = {"k": 2.0} if potential.formula.global_parameters else {"sigma": 1.2, "epsilon": 0.3}
    equal(duplicate(potential)(X, CELL, **values), potential(X, CELL, **values))


@DUPLICATES
def test_a_verlet_list(duplicate):
    kept = VerletList(3.0, 0.5)
    kept(X, CELL)
    other = duplicate(kept)
    for before, now in zip(kept(X + 0.01, CELL), other(X + 0.01, CELL)):
        assert torch.equal(before, now)


@pytest.mark.parametrize(
    "home, names",
    {
        torch_ops: "System Neighbors",
        dynamics: "Evaluation State Relaxation Simulation",
        dispersion: "ReferenceStates",
        electrostatics: "Potentials WaveVectors InducedMoments EwaldParameters PMEParameters ErrorEstimate "
        "MultipoleEwaldParameters MultipolePMEParameters",
    }.items(),
)
def test_named_tuples_of_tensors_are_loaded_without_running_code(home, names):
    for kind in (getattr(home, name) for name in names.split()):
        file = io.BytesIO()
        torch.save(kind(*X[0].expand(len(kind._fields), 3)), file)
        file.seek(0)
        found = torch.load(file, weights_only=True)
        assert type(found) is kind and torch.equal(found[0], X[0])
