"""fairchem-core: its graphs (periodic, partly, not; limited by the nearest neighbors) and its D3 calculator."""

import types

import numpy as np
import pytest
import torch

pytest.importorskip("fairchem.core.graph.radius_graph_pbc_nvidia")
from ase.build import bulk, molecule
from ase.calculators.lj import LennardJones
from dftd3.interface import DispersionModel, RationalDampingParam
from fairchem.core.calculate.dftd3_calculator import DFTD3Calculator
from fairchem.core.graph.radius_graph_pbc import radius_graph_pbc_v2
from fairchem.core.graph.radius_graph_pbc_nvidia import (
    get_neighbors_nvidia,
    get_neighbors_nvidia_atoms,
    radius_graph_pbc_nvidia,
)

from tests.clients.common import as_set, pairs, slopes, stress, structures

SYSTEMS = structures()


def tensors(atoms):
    return (
        torch.tensor(atoms.positions, dtype=torch.float32),
        torch.tensor(atoms.cell.array, dtype=torch.float32)[None],
        torch.tensor(atoms.pbc)[None],
    )


@pytest.mark.parametrize("method", ["naive", "cell_list"])
@pytest.mark.parametrize("name", SYSTEMS)
def test_graph(name, method):
    i, j, shifts, _ = get_neighbors_nvidia(*tensors(SYSTEMS[name]), 5.0, 300, method=method)
    assert as_set(i, j, shifts) == pairs(SYSTEMS[name], 5.0)


@pytest.mark.parametrize("name", SYSTEMS)
def test_atoms(name):
    i, j, distances, shifts = get_neighbors_nvidia_atoms(SYSTEMS[name], 4.0, 300)
    assert as_set(i, j, shifts) == pairs(SYSTEMS[name], 4.0)
    assert (distances < 4.0 + 1e-5).all()


@pytest.mark.parametrize("names", [["copper", "salt", "antimony"], ["ethanol", "benzene"]])
@pytest.mark.parametrize("most", [300, 12])
def test_graph_of_a_batch_as_by_its_own_code(names, most):
    group = [SYSTEMS[name] for name in names]
    data = types.SimpleNamespace(
        pos=torch.cat([tensors(a)[0] for a in group]),
        cell=torch.cat([tensors(a)[1] if a.pbc.any() else 50 * torch.eye(3)[None] for a in group]),
        pbc=torch.cat([tensors(a)[2] for a in group]),
        natoms=torch.tensor([len(a) for a in group]),
    )
    data.batch = torch.repeat_interleave(torch.arange(len(group)), data.natoms)
    edges, shifts, counts = radius_graph_pbc_nvidia(data, 4.5, most, enforce_max_neighbors_strictly=False)
    expected, of_them, their_counts = radius_graph_pbc_v2(data, 4.5, most, enforce_max_neighbors_strictly=False)
    assert counts.tolist() == their_counts.tolist()
    assert as_set(*edges, shifts) == as_set(*expected, of_them)


def test_a_buffer_that_is_too_narrow():
    """Denser than fairchem expects: its buffer is filled, the counts are true, and a warning says so."""
    atoms = SYSTEMS["copper"].copy()
    atoms.set_cell(0.35 * atoms.cell.array, scale_atoms=True)
    with pytest.warns(UserWarning, match="width|buffer|room|rows"):
        i, _, _, _ = get_neighbors_nvidia(*tensors(atoms), 3.0, 20)
    assert len(i)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """fairchem downloads its table; AIMNet ships the same one."""
    module = pytest.importorskip("aimnet.modules.lr").DFTD3(0.7875, 0.4289, 4.4407)
    path = tmp_path_factory.mktemp("d3") / "parameters.pt"
    torch.save({name: getattr(module, name) for name in ("rcov", "r4r2", "c6ab", "cn_ref")}, path)
    return path


@pytest.mark.parametrize("smoothing", [0.2, 0.0])
def test_dispersion_of_a_molecule(table, smoothing):
    atoms = SYSTEMS["ethanol"]
    calculator = DFTD3Calculator(LennardJones(), "pbe", param_file=table, smoothing_fraction=smoothing, device="cpu")
    part = calculator.dispersion_calculator
    reference = DispersionModel(atoms.numbers, atoms.positions / 0.529177210903)
    damping = RationalDampingParam(s6=1.0, s8=0.7875, a1=0.4289, a2=4.4407, s9=0.0)
    expected = reference.get_dispersion(damping, grad=True)
    part.calculate(atoms)
    np.testing.assert_allclose(part.results["energy"], expected["energy"] * 27.211386245988, rtol=1e-4)
    forces = -expected["gradient"] * 27.211386245988 / 0.529177210903
    np.testing.assert_allclose(part.results["forces"], forces, atol=2e-6)


@pytest.mark.parametrize("name", ["salt", "copper", "graphene"])
def test_dispersion_of_a_crystal_that_moves(table, name):
    """Buffers of the first call come back in later ones, while atoms move closer together and the cell changes."""
    atoms = SYSTEMS[name].repeat((2, 2, 1))

    def make():
        return DFTD3Calculator(LennardJones(), "pbe", param_file=table, cutoff=8.0, device="cpu")

    one = make().dispersion_calculator
    for n in range(4):
        atoms.rattle(0.1, seed=n)
        atoms.set_cell(0.99 * atoms.cell.array, scale_atoms=True)
        one.calculate(atoms)
        fresh = make().dispersion_calculator
        fresh.calculate(atoms)
        np.testing.assert_allclose(one.results["energy"], fresh.results["energy"], rtol=1e-5)
        np.testing.assert_allclose(one.results["forces"], fresh.results["forces"], atol=1e-6)

    def energy(a):
        one.calculate(a)
        return one.results["energy"]

    one.calculate(atoms)
    found = dict(one.results)
    np.testing.assert_allclose(found["forces"][:2], slopes(energy, atoms, 0.005), atol=4e-4)  # in float32
    voigt = stress(energy, atoms, 0.01).flat[[0, 4, 8, 5, 2, 1]]
    np.testing.assert_allclose(found["stress"], voigt, atol=1e-4)


def gas_that_condenses():
    gas = bulk("Ar", "fcc", a=8.0, cubic=True).repeat(2)
    gas.rattle(0.5, seed=1)
    for _ in range(8):
        yield gas
        gas.set_cell(gas.cell.array * 0.25 ** (1 / 21), scale_atoms=True)


def cell_that_shrinks_twice():
    atoms = SYSTEMS["salt"].repeat((2, 1, 1))
    for _ in range(3):
        yield atoms
        atoms.set_cell(0.9 * atoms.cell.array, scale_atoms=True)


def molecules_that_fall_together():
    water = molecule("H2O")
    places = np.array(list(np.ndindex(3, 3, 3)))
    for distance in (9.0, 7.0, 5.5, 4.5, 3.7, 3.0, 6.0):
        atoms = water.copy()
        for place in places[1:]:
            moved = water.copy()
            moved.translate(distance * place)
            atoms += moved
        yield atoms


def many_steps():
    """Of a box that breathes, with a slab of other atoms in between: the memory is handed back each time."""
    atoms = SYSTEMS["copper"].repeat((2, 2, 1))
    cell = atoms.cell.array.copy()
    for n in range(60):
        atoms.rattle(0.02, seed=n)
        atoms.set_cell(cell * (1.0 - 0.15 * np.sin(0.4 * n)), scale_atoms=True)
        yield SYSTEMS["graphene"] if n % 20 == 19 else atoms


SEQUENCES = [gas_that_condenses, cell_that_shrinks_twice, molecules_that_fall_together, many_steps]


@pytest.mark.parametrize("steps", SEQUENCES)
@pytest.mark.filterwarnings("ignore::nvalchemiops.NeighborListWarning")
def test_dispersion_in_a_sequence(table, steps):
    """At each step, energy and forces are those of a calculator that has never seen another one."""

    def make():
        made = DFTD3Calculator(LennardJones(), "pbe", param_file=table, cutoff=9.0, device="cpu")
        return made.dispersion_calculator

    one, energies = make(), []
    for atoms in steps():
        one.calculate(atoms)
        fresh = make()
        fresh.calculate(atoms)
        np.testing.assert_allclose(one.results["energy"], fresh.results["energy"], rtol=1e-6)
        np.testing.assert_allclose(one.results["forces"], fresh.results["forces"], atol=2e-6)
        energies.append(one.results["energy"])
    assert min(energies) < 1.3 * max(energies) < 0.0, "it has to feel the density"
