"""Results are where the positions are, whatever ``torch.set_default_device`` says.

The default here is a device without memory, so that a tensor that is made there by mistake is an error.
"""

from functools import partial

import numpy as np
import pytest
import torch
from ase.build import bulk, fcc111
from ase.calculators.emt import EMT

from nvalchemiops.ase import Calculator, Dispersion, Electrostatics, FromASE, Pair, neighbor_list
from nvalchemiops.torch import System, record, spline
from nvalchemiops.torch import neighbors as lists
from nvalchemiops.torch.dynamics import CellFilter, Constraints, SumOfTerms, relax
from nvalchemiops.torch.interactions import electrostatics
from nvalchemiops.torch.interactions.dispersion import (
    DFTD3,
    D3Parameters,
    d3_dispersion,
    damping_parameters,
    dftd3,
)
from nvalchemiops.torch.interactions.pair import lennard_jones
from nvalchemiops.torch.runtime import tables
from tests.support.molecules import molecule
from tests.support.plans import forget
from tests.support.systems import triclinic

SYSTEM = triclinic(8)
X, Q, CELL = SYSTEM.positions, SYSTEM.charges, SYSTEM.cell
TWO = torch.arange(8, dtype=torch.int32) // 4
CELLS = CELL.repeat(2, 1, 1)
NEEDLE = torch.tensor([[6.0, 0.0, 0.0], [17.0, 6.0, 0.0], [0.0, 13.0, 6.0]], dtype=torch.float64)
SYSTEMS = System(X, Q, CELLS, TWO)
MESH = torch.linspace(0.0, 1.0, 216, dtype=torch.float64).view(6, 6, 6)
ALL = {"compute_forces": True, "compute_virial": True}
EACH = ALL | {"compute_charge_gradients": True}
EXCLUDED = torch.tensor([[0, 2], [1, 5]])
MOLECULE = molecule("HCl")
DAMPING = damping_parameters("pbe")


def gradients():
    x = X.clone().requires_grad_()
    energies = electrostatics.particle_mesh_ewald(x, Q, CELL, accuracy=1e-4)
    (first,) = torch.autograd.grad(energies.square().sum(), x, create_graph=True)
    return (first, *torch.autograd.grad(first.square().sum(), x))


def sums(function, *arguments, **options):
    return lambda: function(X, Q, CELL, *arguments, **EACH, **options)


def dispersion(**options):
    near = {"cutoff": 15.0, "parameters": D3Parameters.load(), "damping": DAMPING, "s9": 1.0}
    return d3_dispersion(**MOLECULE.arguments(), **ALL, **near | options)


def old_dispersion():
    x, numbers = MOLECULE.positions, MOLECULE.numbers
    pairs, ptr = lists.neighbor_list(x, 15.0, return_neighbor_list=True)
    near = {"neighbor_list": pairs, "neighbor_ptr": ptr}
    return dftd3(x, numbers, 0.4, 4.0, 0.8, d3_params=D3Parameters.load(), **near)


def verlet():
    kept = lists.VerletList(3.0, 0.5)
    return (*kept(X, CELL), *kept(X + 0.01, CELL))


def verlet_of_a_batch():
    """Of which nothing is searched again, and then one system."""
    kept, found = lists.VerletList(3.0, 0.5), []
    for moved in (X, X + 0.01, X + TWO[:, None]):
        found += [*kept(moved, CELLS, batch_idx=TWO), kept.rebuilt]
    return tuple(found)


CALLS = {
    "sizes of a cell list": lambda: lists.estimate_cell_list_sizes(CELL, [True, True, False], 3.0),
    "list": lambda: lists.neighbor_list(X, 3.0, CELL, return_neighbor_list=True),
    "matrix of a batch": lambda: lists.neighbor_list(X, 3.0, CELLS, pbc=[True, True, False], batch_idx=TWO),
    "kept list": verlet,
    "kept list of a batch": verlet_of_a_batch,
    "pairs": lambda: lennard_jones(4.0)(X, CELL, sigma=1.0, epsilon=0.1, exclusions=EXCLUDED, **ALL),
    "pairs of a batch": lambda: lennard_jones(4.0)(X, CELLS, sigma=1.0, epsilon=0.1, batch_idx=TWO, **ALL),
    "ewald": sums(electrostatics.ewald_summation, exclusions=EXCLUDED),
    "ewald of a batch": lambda: electrostatics.ewald_summation(X, Q, CELLS, batch_idx=TWO, **EACH),
    "pme": sums(electrostatics.particle_mesh_ewald, accuracy=1e-4),
    "mesh of a needle": lambda: electrostatics.particle_mesh_ewald(X, Q, NEEDLE, 0.6, mesh_spacing=0.7, cutoff=4.0),
    "errors of a needle": lambda: (
        electrostatics.estimate_errors(X, NEEDLE, alpha=0.6, real_space_cutoff=4.0, mesh_spacing=0.7).total
    ),
    "a crystal and a molecule": lambda: electrostatics.ewald_summation(
        X, Q, CELLS, batch_idx=TWO, pbc=[[True] * 3, [False] * 3], **ALL
    ),
    "induced dipoles": lambda: (
        electrostatics.induced_moments(
            lambda dipoles, x: electrostatics.ewald_summation(
                x, Q, CELL, 0.6, dipoles=dipoles, k_cutoff=4.0, cutoff=4.0
            ),
            (X,),
            polarizabilities=torch.full_like(Q, 0.01),
        ).dipoles
    ),
    "one batch": lambda: tuple(v for v in System.concatenate([SYSTEMS, SYSTEMS]) if v is not None),
    "pme of a batch": lambda: electrostatics.particle_mesh_ewald(X, Q, CELLS, batch_idx=TWO, **EACH),
    "pme, derivatives": gradients,
    "prepared mesh": lambda: electrostatics.particle_mesh_ewald(
        X, Q, CELL, prepared=electrostatics.prepare_mesh(CELL, 0.6, (12, 12, 12)), cutoff=4.0
    ),
    "prepared waves": lambda: electrostatics.ewald_summation(
        X, Q, CELL, 0.6, miller_indices=electrostatics.prepare_wave_vectors(CELL, 4.0), cutoff=4.0
    ),
    "slab": sums(electrostatics.ewald_summation, pbc=[True, True, False], slab_correction=True),
    "wave vectors": lambda: electrostatics.generate_k_vectors_pme(CELL, (6, 6, 6)),
    "miller indices": lambda: electrostatics.generate_k_vectors_ewald_summation(CELL, 4.0),
    "estimates": lambda: (
        *electrostatics.estimate_ewald_parameters(X, CELL),
        electrostatics.estimate_pme_parameters(X, CELL).alpha,
    ),
    "damped": lambda: electrostatics.coulomb_energy(X, Q, CELL, 4.0, 0.2, **lists_of()),
    "spread": lambda: spline.spline_spread(X, Q, CELL, (6, 6, 6)),
    "gather": lambda: spline.spline_gather_with_force(X, Q, MESH, CELL),
    "deconvolution": lambda: spline.compute_bspline_deconvolution((6, 6, 6)),
    "dispersion": dispersion,
    "dispersion, prepared": lambda: dispersion(parameters=D3Parameters.load().states([1, 17])),
    "dftd3": old_dispersion,
}


def lists_of():
    pairs, ptr, shifts = lists.neighbor_list(X, 4.0, CELL, return_neighbor_list=True)
    return {"neighbor_list": pairs, "neighbor_ptr": ptr, "neighbor_shifts": shifts}


@pytest.mark.parametrize("name", CALLS)
def test_functions(name):
    with torch.device("meta"):
        found = CALLS[name]()
    torch.testing.assert_close(found, CALLS[name](), rtol=0.0, atol=0.0)


def salt():
    atoms = bulk("NaCl", "rocksalt", a=5.64)
    atoms.rattle(0.1, seed=1)
    return atoms


def slab():
    atoms = fcc111("Cu", (1, 1, 2), vacuum=6.0)
    atoms.set_initial_charges([0.3, -0.3])
    return atoms


@pytest.mark.parametrize(
    ("make", "terms"),
    [
        (salt, [lambda: Electrostatics("ewald", {"Na": 1.0, "Cl": -1.0})]),
        (salt, [lambda: Electrostatics("pme", {"Na": 1.0, "Cl": -1.0}, accuracy=1e-4)]),
        (salt, [lambda: Electrostatics("dsf", {"Na": 1.0, "Cl": -1.0}, cutoff=6.0, alpha=0.2)]),
        (slab, [lambda: Electrostatics("ewald", slab_correction=True), lambda: Dispersion("pbe", cutoff=12.0)]),
        (salt, [lambda: Pair("morse", cutoff=5.0, depth=0.1, steepness=1.2, r0={"Na-Cl": 2.1, "*": 3.0})]),
    ],
)
def test_calculators(make, terms):
    found = []
    for device in ("meta", "cpu"):
        atoms = make()
        with torch.device(device):
            atoms.calc = Calculator(*(term() for term in terms))
            found.append((atoms.get_potential_energy(), atoms.get_forces()))
    assert found[0][0] == found[1][0]
    np.testing.assert_array_equal(found[0][1], found[1][1])


def test_calculators_of_ase():
    system, model = System.from_ase([bulk("Cu"), bulk("Au") * (2, 1, 1)]), FromASE(EMT())
    with torch.device("meta"):
        found = model(system)
    torch.testing.assert_close(tuple(found), tuple(model(system)), rtol=0.0, atol=0.0)


@pytest.mark.parametrize("cell", [True, "axes", CellFilter(mask=[1, 1, 0, 0, 0, 1], constant_volume=True)])
def test_relaxation_of_cells(cell):
    model, system = SumOfTerms(partial(lennard_jones(6.0), sigma=2.4, epsilon=0.1)), System.from_ase(salt())
    with torch.device("meta"):
        found = relax(system, model, cell=cell, fmax=0.01)
        relax(system, model, fixed=np.array([True, False]), fmax=1e3)
    here = relax(system, model, cell=cell, fmax=0.01)
    assert here.steps > 0 and torch.equal(found.system.cell, here.system.cell)


def test_neighbor_lists_of_ase():
    with torch.device("meta"):
        found = neighbor_list("ijS", salt(), 4.0)
    for one, other in zip(found, neighbor_list("ijS", salt(), 4.0), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "make",
    [
        lambda: electrostatics.EwaldSummation(0.6, 4.0),
        lambda: electrostatics.ParticleMeshEwald(0.6, (12, 12, 12)),
        lambda: DFTD3("pbe", [1, 17]),
    ],
)
def test_modules_are_made_there(make):
    """As those of torch are."""
    with torch.device("meta"):
        module = make()
    assert {value.device.type for value in module.state_dict().values()} == {"meta"}
    kept = [module.a1, *module.states] if isinstance(module, DFTD3) else [module.alpha]
    assert {value.device.type for value in kept if isinstance(value, torch.Tensor)} == {"meta"}


@pytest.mark.parametrize("charges", [None, {"Na": 1.0, "Cl": -1.0, "Au": 0.5}, [1.0, -1.0, 0.0]])
def test_structures_of_ase_and_lists_of_bonds(charges):
    """They are made there, whatever is read on the way; or where the caller says."""
    structures, pairs = [bulk("NaCl", "rocksalt", a=5.6), bulk("Au"), bulk("Au")[:0]], [[0, 1], [0, 2]]
    structures[0].set_initial_charges([1.0, -1.0])
    expected = System.from_ase(structures, charges)
    with torch.device("meta"):
        there, here = System.from_ase(structures, charges), System.from_ase(structures, charges, device="cpu")
        bonds = Constraints(pairs, [1.0, 2.0])
    assert (expected.charges is not None) and bonds.n_clusters == 1
    assert all(tensor.is_meta for tensor in (*filter(torch.is_tensor, there), bonds.pairs, bonds.lengths))
    for found, same, tensor in zip(there, here, expected):
        assert tensor is None or (found.shape == tensor.shape and torch.equal(same, tensor))


def test_steps_are_recorded():
    """From their second call on, and what cannot be recorded is called, as it was before."""
    weights = torch.ones(3)

    def step(x):
        slopes = torch.autograd.grad((x.sin() * weights).sum(), x)
        return slopes[0] + torch.ones(3), x.detach()

    def trained(x):
        weights.add_(1.0)
        return x.mul_(2.0)

    def graph(x):
        return x.sin() * weights.clone().requires_grad_()

    recorded = {function: record(function) for function in (step, trained, graph)}
    for number in range(5):
        x = torch.full((3,), float(number))
        with torch.device("cpu"):
            found, same = recorded[step](x.requires_grad_())
        assert torch.equal(found, x.cos() + 1.0) and torch.equal(same, x)
        with torch.device("meta"):
            changed = recorded[trained](x := x.detach())
            assert changed is x and recorded[graph](x).grad_fn
        weights.fill_(1.0)
    assert recorded[step]._counts == {"recorded": 1, "replayed": 2, "ordinary": 2}
    with torch.device("meta"), pytest.raises(RuntimeError, match="device"):  # another recording
        recorded[step](x.requires_grad_())
    assert "writes into a tensor" in recorded[trained].explain() and "has a graph" in recorded[graph].explain()


def test_what_is_no_step_is_called(monkeypatch):
    """What `record` refuses elsewhere was called there before: arguments without a hash, and Python that counts."""
    monkeypatch.setattr(tables, "MOST_KINDS", 2)
    calls, counts = record(lambda x, factors: x * factors["x"][0]), []
    counted = record(lambda x: (counts.append(x), x + len(counts))[1])
    reads = record(lambda x: x * float(x.sum()))
    weights = torch.ones(3)  # another recording in each call
    printed = record(lambda x: x * weights * (float(x.sum()) if len(counts) == 4 else 1.0))
    tracked = record(lambda x: x * (weights.clone().requires_grad_() if len(counts) == 4 else weights))
    with torch.device("meta"):
        for number in range(1, 6):
            x = torch.full((3,), float(number), device="cpu")
            assert torch.equal(calls(x, {"x": np.full(3, 2.0)}), 2.0 * x)
            assert torch.equal(counted(x), x + len(counts))
            reads(x[:1].expand(number))
            assert torch.equal(printed(x), x * weights * (float(x.sum()) if len(counts) == 4 else 1.0))
            assert torch.equal(tracked(x), x * weights)
            weights.add_(1.0)
    assert "not hashable" in calls.explain() and "different results" in counted.explain()
    assert counted._counts == {"recorded": 1, "replayed": 0, "ordinary": 4} and len(reads._kinds) <= 2


@pytest.mark.parametrize("name", ["list", "pme", "ewald of a batch", "pme, derivatives", "dispersion, prepared"])
def test_repeated_calls_have_plans(name):
    forget()
    expected = CALLS[name]()
    with torch.device("meta"):
        for _ in range(4):
            torch.testing.assert_close(CALLS[name](), expected, rtol=1e-13, atol=1e-13)
    assert tables.everywhere.replayed
