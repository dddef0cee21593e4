"""orb-models: its graphs (`knn_alchemi`), Coulomb module, conservative model with charges, and D3 model."""

import math

import numpy as np
import pytest
import torch

pytest.importorskip("orb_models.forcefield.forcefield_adapter", exc_type=(ImportError, SyntaxError))
from ase.build import bulk
from ase.neighborlist import neighbor_list
from dftd3.interface import DispersionModel, RationalDampingParam
from orb_models.common.atoms.batch.graph_batch import AtomGraphs
from orb_models.forcefield.forcefield_adapter import ForcefieldAtomsAdapter
from orb_models.forcefield.inference.calculator import ORBCalculator
from orb_models.forcefield.inference.d3_model import AlchemiDFTD3, D3SumModel
from orb_models.forcefield.models.coulomb_module import COULOMB_CONSTANT, CoulombModule
from orb_models.forcefield.pretrained import orb_v3_conservative_architecture

from tests.clients.common import as_set, pairs, slopes, stress, structures
from tests.reference.ewald import everything

SYSTEMS = {name: atoms for name, atoms in structures().items() if atoms.pbc.all() or not atoms.pbc.any()}
"""Without the one with two periodic axes, which orb-models itself refuses."""

DOUBLE = {"device": "cpu", "output_dtype": torch.float64, "graph_construction_dtype": torch.float64}


def graph(atoms, radius=6.0, most=-1, **options):
    """Of one system, or of a list of them: in one search, but for molecules and crystals together."""
    adapter = ForcefieldAtomsAdapter(radius=radius, max_num_neighbors=most)
    options = DOUBLE | options
    if not isinstance(atoms, list):
        return adapter.from_ase_atoms(atoms, **options)
    if len({bool(a.pbc.any()) for a in atoms}) > 1:
        return AtomGraphs.batch([adapter.from_ase_atoms(a, **options) for a in atoms])
    return adapter.from_ase_atoms_list(atoms, **options)


def wrapped(atoms):
    atoms = atoms.copy()
    atoms.wrap(eps=0.0)
    return atoms


def edges(made, first=0, count=None):
    """Pairs and shifts of atoms first, first + 1, ... of a graph."""
    here = (made.senders >= first) & (made.senders < first + (count or len(made.positions)))
    return as_set(made.senders[here] - first, made.receivers[here] - first, made.edge_features["unit_shifts"][here])


@pytest.mark.parametrize("name", SYSTEMS)
def test_graph(name):
    atoms = wrapped(SYSTEMS[name])
    made = graph(atoms)
    assert edges(made) == pairs(atoms, 6.0)
    lengths = neighbor_list("d", atoms, 6.0)
    np.testing.assert_allclose(np.sort(made.edge_features["vectors"].norm(dim=1)), np.sort(lengths), atol=1e-10)


@pytest.mark.parametrize("periodic", [True, False])
@pytest.mark.parametrize("most", [-1, 12])
def test_graphs_of_a_batch(most, periodic):
    """The nearest 12 of each atom are those of ASE's list; all distances that are equal are among those of a lattice
    with one atom, which has 12 nearest neighbors."""
    group = [wrapped(atoms) for atoms in SYSTEMS.values() if atoms.pbc.any() == periodic]
    made = graph(group, most=most, output_dtype=torch.float32, graph_construction_dtype=torch.float32)
    first = 0
    for atoms, n_edges in zip(group, made.n_edge.tolist(), strict=True):
        i, j, shifts, lengths = neighbor_list("ijSd", atoms, 6.0)
        order = np.lexsort((lengths, i))
        rank = np.arange(len(i)) - np.searchsorted(i[order], i[order])
        kept = order[rank < most] if most > 0 else order
        found = edges(made, first, len(atoms))
        assert len(found) == n_edges
        assert found == as_set(i[kept], j[kept], shifts[kept])
        first += len(atoms)


@pytest.mark.parametrize("name", ["copper", "salt", "ethanol"])
def test_graphs_while_the_density_grows_by_four(name):
    """Beyond the width that it expects, it reads the counts and asks again for more."""
    atoms = SYSTEMS[name].copy()
    atoms.set_cell(atoms.cell.array * 0.75, scale_atoms=True)
    atoms.positions *= 1.0 if atoms.pbc.any() else 0.3
    most = 0
    for _ in range(5):
        atoms.positions *= 0.25 ** (1 / 12)
        atoms.set_cell(atoms.cell.array * 0.25 ** (1 / 12))
        made = graph(wrapped(atoms))
        assert edges(made) == pairs(wrapped(atoms), 6.0)
        most = max(most, int(made.senders.bincount().max()))
    assert most > 320 or not atoms.pbc.any()


# -- electrostatics -------------------------------------------------------------------------------

CHARGED = [SYSTEMS["salt"], SYSTEMS["magnesium"], SYSTEMS["copper"]]


def charges_of(group, seed=0):
    random = np.random.default_rng(seed)
    drawn = [random.normal(size=len(atoms)) for atoms in group]
    return torch.tensor(np.concatenate([q - q.mean() for q in drawn]))


def test_madelung_constants():
    made, charges = [], []
    expected = []
    for kind, a, distance, constant in (
        ("rocksalt", 5.64, 2.82, 1.747564594633),
        ("cesiumchloride", 4.12, 4.12 * math.sqrt(3) / 2, 1.762674773071),
        ("zincblende", 5.41, 5.41 * math.sqrt(3) / 4, 1.638055053389),
    ):
        atoms = bulk("XY", kind, a=a) if kind != "rocksalt" else bulk("NaCl", kind, a=a)
        made.append(atoms)
        charges += [1.0, -1.0]
        expected.append(-COULOMB_CONSTANT * constant / distance)
    q = torch.tensor(charges, dtype=torch.float64)[:, None].requires_grad_()
    energy, forces, _ = CoulombModule().double()(q, graph(made))
    np.testing.assert_allclose(energy.detach(), expected, rtol=1e-5)
    np.testing.assert_allclose(forces, 0.0, atol=1e-4)


def test_periodic_batch():
    """Energy, explicit forces and virial, and the gradient by charges, against a slow Ewald sum of each."""
    q = charges_of(CHARGED).requires_grad_()
    made = graph(CHARGED)
    energy, forces, virial = CoulombModule().double()(q[:, None], made)
    (slope,) = torch.autograd.grad(energy.sum(), q)
    first = 0
    for n, atoms in enumerate(CHARGED):
        here = slice(first, first + len(atoms))
        first += len(atoms)
        x, cell = made.positions[here], torch.tensor(atoms.cell.array)
        expected = everything(x, q.detach()[here], cell, 0.55, 11.0, 6.0)
        e, f, s, v = (COULOMB_CONSTANT * part for part in expected)
        np.testing.assert_allclose(energy[n].item(), e.sum().item(), rtol=1e-5)
        np.testing.assert_allclose(forces[here], f.detach(), atol=1e-4)
        np.testing.assert_allclose(slope[here], s.detach(), atol=1e-4)
        np.testing.assert_allclose(virial[n], v.detach(), atol=1e-4)


@pytest.mark.parametrize("hybrid", [True, False])
def test_charges_that_follow_the_positions(hybrid):
    """Explicit forces and those of charge equilibration by autograd together are slopes of the energy."""
    atoms = SYSTEMS["salt"]
    weights = charges_of([atoms])
    module = CoulombModule(pme_accuracy=1e-8, pme_spline_order=6).double()
    mesh = {"pme_cutoff": 9.0, "pme_alpha": 0.4, "pme_mesh_dimensions": (36, 36, 36), "pme_hybrid_forces": hybrid}

    def charges(x):
        return weights * (1.0 + 0.1 * torch.sin(x).sum(1)) + 0.05 * torch.cos(x[:, 0])

    def energy(a):
        made = graph(a, wrap=False)
        return module(charges(made.positions)[:, None], made, kwargs=mesh)[0].item()

    made = graph(atoms, wrap=False)
    x = made.positions.requires_grad_()
    found, explicit, _ = module(charges(x)[:, None], made, kwargs=mesh)
    (slope,) = torch.autograd.grad(found.sum(), x)
    forces = explicit - slope if hybrid else -slope
    np.testing.assert_allclose(forces[:2].detach(), slopes(energy, atoms), atol=2e-5)


def test_molecules_and_crystals_together():
    """A batch of both: each as alone, molecules by the sum over pairs."""
    group = [SYSTEMS["benzene"], SYSTEMS["salt"], SYSTEMS["ethanol"]]
    q = charges_of(group)
    together = CoulombModule().double()(q[:, None], graph(group))[0]
    first = 0
    for n, atoms in enumerate(group):
        mine = q[first : first + len(atoms)]
        first += len(atoms)
        if atoms.pbc.any():
            x, cell = torch.tensor(atoms.positions), torch.tensor(atoms.cell.array)
            expected = everything(x, mine, cell, 0.55, 11.0, 6.0)[0].sum().item()
        else:
            distances = torch.tensor(atoms.get_all_distances()).fill_diagonal_(torch.inf)
            expected = 0.5 * (mine[:, None] * mine / distances).sum().item()
        np.testing.assert_allclose(together[n].item(), COULOMB_CONSTANT * expected, rtol=1e-5)


@pytest.fixture(scope="module")
def model():
    """Its own architecture with charges, small, with weights drawn at random."""
    torch.manual_seed(0)
    made = orb_v3_conservative_architecture(
        latent_dim=16,
        base_mlp_hidden_dim=16,
        head_mlp_hidden_dim=16,
        num_message_passing_steps=2,
        has_electrostatics=True,
        device="cpu",
    )
    return made.double().eval()


@pytest.fixture
def double_precision():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("with_dispersion", [False, True])
@pytest.mark.parametrize("name", ["salt", "benzene"])
def test_calculator(model, name, with_dispersion):
    """Forces and stress of its calculator are slopes of its energy."""
    atoms = SYSTEMS[name].copy()
    atoms.info |= {"charge": 0, "spin": 1}
    smooth = {"cutoff": 9.0, "s5_smoothing_on": 6.0, "s5_smoothing_off": 9.0}
    summed = D3SumModel(model, AlchemiDFTD3(**smooth).double()) if with_dispersion else model
    atoms.calc = ORBCalculator(summed, ForcefieldAtomsAdapter(radius=6.0, max_num_neighbors=-1), device="cpu")

    def energy(a):
        a.calc = atoms.calc
        a.info |= atoms.info
        return a.get_potential_energy()

    forces = atoms.get_forces()
    tensor = atoms.get_stress(voigt=False) if atoms.pbc.any() else None
    np.testing.assert_allclose(forces[:2], slopes(energy, atoms), atol=2e-4)
    if tensor is not None:
        np.testing.assert_allclose(tensor, stress(energy, atoms, 1e-3), atol=2e-5)


# -- dispersion -----------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True])
def test_dispersion_of_a_batch(compiled):
    """Energies, forces and stress against simple-dftd3 with the same cutoff; crystals and a molecule."""
    group = [SYSTEMS["salt"], SYSTEMS["benzene"], SYSTEMS["magnesium"]]
    module = AlchemiDFTD3(functional="PBE", cutoff=12.0, compile=compiled).double()
    found = module.predict(graph(group, output_dtype=torch.float64), split=True)
    bohr, hartree = 0.529177210903, 27.211386245988
    damping = RationalDampingParam(s6=1.0, s8=0.7875, a1=0.4289, a2=4.4407, s9=0.0)
    for n, atoms in enumerate(group):
        lattice = {"lattice": atoms.cell.array / bohr, "periodic": atoms.pbc} if atoms.pbc.any() else {}
        reference = DispersionModel(atoms.numbers, wrapped(atoms).positions / bohr, **lattice)
        reference.set_realspace_cutoff(12.0 / bohr, 12.0 / bohr, 12.0 / bohr)
        expected = reference.get_dispersion(damping, grad=True)
        np.testing.assert_allclose(found["energy"][n].item(), expected["energy"] * hartree, rtol=1e-4)
        np.testing.assert_allclose(found["forces"][n], -expected["gradient"] * hartree / bohr, atol=5e-6)
        if atoms.pbc.any():
            tensor = np.asarray(expected["virial"]) * hartree / atoms.get_volume()
            np.testing.assert_allclose(found["stress"][n], tensor.flat[[0, 4, 8, 5, 2, 1]][None], rtol=1e-4, atol=1e-7)


def test_dispersion_while_a_gas_condenses():
    """Its density grows by four; each energy is that of a width that is known to be enough."""
    gas = bulk("Ar", "fcc", a=7.5, cubic=True).repeat(2)
    gas.rattle(0.3, seed=2)
    one = AlchemiDFTD3(cutoff=9.0).double()
    generous = AlchemiDFTD3(cutoff=9.0).double()
    generous.safety_factor = 20.0
    for _ in range(6):
        found, expected = (m.predict(graph(gas))["energy"].item() for m in (one, generous))
        np.testing.assert_allclose(found, expected, rtol=1e-12)
        gas.set_cell(gas.cell.array * 0.25 ** (1 / 15), scale_atoms=True)
