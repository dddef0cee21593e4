"""nvalchemi-toolkit: its imports, lists in hooks, Ewald, PME, D3, Lennard-Jones, dynamics, FIRE, L-BFGS, packing."""

import importlib
import pkgutil
import warnings

import numpy as np
import pytest
import torch

nvalchemi = pytest.importorskip("nvalchemi", exc_type=(ImportError, SyntaxError))
from ase import Atoms, units
from ase.build import bulk, molecule
from ase.calculators.lj import LennardJones
from ase.md.nose_hoover_chain import MTKNPT, NoseHooverChainNVT
from ase.md.verlet import VelocityVerlet
from ase.neighborlist import neighbor_list
from ase.optimize import FIRE as AseFire
from ase.optimize import FIRE2 as AseFire2
from dftd3.interface import DispersionModel, RationalDampingParam
from nvalchemi.csp.packer import _contacts
from nvalchemi.data import AtomicData, Batch
from nvalchemi.data.level_storage import LevelSchema
from nvalchemi.dynamics import (
    FIRE,
    FIRE2,
    LBFGS,
    NPH,
    NPT,
    NVE,
    FIRE2VariableCell,
    LBFGSVariableCell,
    NVTLangevin,
    NVTNoseHoover,
)
from nvalchemi.dynamics.base import DynamicsStage
from nvalchemi.dynamics.hooks import AlignCellHook
from nvalchemi.dynamics.hooks._utils import scatter_reduce_per_graph
from nvalchemi.dynamics.mep.path_ops.torch_paths import path_energy_stats
from nvalchemi.hooks import NeighborListHook, WrapPeriodicHook
from nvalchemi.hooks._context import HookContext
from nvalchemi.models.base import NeighborConfig, NeighborListFormat
from nvalchemi.models.dftd3 import DFTD3ModelWrapper
from nvalchemi.models.ewald import EwaldModelWrapper
from nvalchemi.models.lj import LennardJonesModelWrapper
from nvalchemi.models.pme import PMEModelWrapper
from nvalchemi.neighbors import compute_neighbors

from nvalchemiops.torch.interactions.electrostatics import ewald_summation
from tests.clients.common import as_set, pairs, slopes, stress, structures

SYSTEMS = structures()
ARGON = {"epsilon": 0.0104, "sigma": 3.4, "cutoff": 7.0}
FLOATS = ("positions", "velocities", "atomic_masses", "forces", "charges", "cell", "stress", "energy", "virial")


def batch_of(*systems, charges=None, velocities=False):
    schema = LevelSchema()
    for key in FLOATS:
        if key in schema.attr_to_group:
            schema.set(key, schema.attr_to_group[key], dtype="float64")
    data = []
    for atoms in systems:
        one = AtomicData.from_atoms(atoms, dtype=torch.float64)
        data.append(one)
    batch = Batch.from_data_list(data, attr_map=schema)
    n, m = batch.num_nodes, batch.num_graphs
    batch["forces"] = torch.zeros(n, 3, dtype=torch.float64)
    batch["energy"] = torch.zeros(m, 1, dtype=torch.float64)
    batch["stress"] = torch.zeros(m, 3, 3, dtype=torch.float64)
    if charges is not None:
        batch["charges"] = torch.as_tensor(charges)
    if velocities:
        batch["velocities"] = torch.as_tensor(np.concatenate([a.get_velocities() for a in systems]))
    return batch


def evaluated(model, batch, *outputs):
    model.model_config.active_outputs = set(outputs)
    compute_neighbors(batch, config=model.model_config.neighbor_config)
    return {name: value.detach() for name, value in model(batch).items()}


def test_imports_whole():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        modules = [m.name for m in pkgutil.walk_packages(nvalchemi.__path__, "nvalchemi.")]
        for name in modules:
            importlib.import_module(name)
    assert len(modules) > 150


# -- neighbor lists and sums in hooks -----------------------------------------------------------------


@pytest.mark.parametrize("skin", [0.0, 0.6])
@pytest.mark.parametrize("method", [None, "batch_cell_list_pair_centric", "batch_naive_tile"])
def test_neighbors_of_a_batch_follow_its_atoms(skin, method):
    systems = [a for a in SYSTEMS.values() if a.pbc.any()]
    batch = batch_of(*systems)
    config = NeighborConfig(cutoff=3.5, format=NeighborListFormat.MATRIX)
    hook = NeighborListHook(config, skin=skin, stage=DynamicsStage.BEFORE_COMPUTE, method=method)
    rng = np.random.default_rng(0)
    for step in range(4):
        hook(HookContext(batch=batch), DynamicsStage.BEFORE_COMPUTE)
        matrix, counts = batch.neighbor_matrix, batch.num_neighbors
        first = 0
        for atoms in systems:
            found = set()
            for i in range(len(atoms)):
                row = slice(0, int(counts[first + i]))
                for j, shift in zip(matrix[first + i, row].tolist(), batch.neighbor_matrix_shifts[first + i, row]):
                    found.add((i, j - first, *shift.tolist()))
            exact = pairs(atoms, 3.5)
            assert exact <= found if skin else exact == found
            first += len(atoms)
        move = rng.normal(size=(len(batch.positions), 3)) * (0.05 if step < 2 else 0.6)
        batch.positions.add_(torch.as_tensor(move))
        for atoms, positions in zip(systems, np.split(move, np.cumsum([len(a) for a in systems])[:-1])):
            atoms.positions += positions


def test_list_of_pairs():
    batch = batch_of(SYSTEMS["salt"])
    compute_neighbors(batch, cutoff=4.0, format=NeighborListFormat.COO)
    i, j = batch.neighbor_list.T
    assert as_set(i, j, batch.neighbor_list_shifts) == pairs(SYSTEMS["salt"], 4.0)


def test_wrapping_and_reductions():
    atoms = SYSTEMS["magnesium"].copy()
    atoms.positions += [7.0, -9.0, 4.0]
    batch = batch_of(atoms, SYSTEMS["copper"])
    before = batch.positions.clone()
    WrapPeriodicHook(stage=DynamicsStage.BEFORE_COMPUTE)(HookContext(batch=batch), DynamicsStage.BEFORE_COMPUTE)
    scaled = np.linalg.solve(atoms.cell.array.T, (batch.positions[: len(atoms)]).numpy().T).T
    assert (scaled > -1e-9).all() and (scaled < 1 + 1e-9).all()
    moved = np.linalg.solve(atoms.cell.array.T, (batch.positions - before)[: len(atoms)].numpy().T).T
    np.testing.assert_allclose(moved, moved.round(), atol=1e-9)
    values, idx = batch.positions[:, 0], batch.batch_idx
    by_system = [values[idx == s] for s in range(2)]
    for reduce, each in (("sum", torch.sum), ("mean", torch.mean), ("amax", torch.max), ("amin", torch.min)):
        found = scatter_reduce_per_graph(values, idx, 2, reduce)
        np.testing.assert_allclose(found.numpy(), [float(each(v)) for v in by_system])


# -- models -------------------------------------------------------------------------------------------


def charges_of(atoms):
    q = np.random.default_rng(len(atoms)).normal(size=len(atoms))
    return q - q.mean()


@pytest.mark.parametrize("hybrid", [True, False])
@pytest.mark.parametrize("slab", [False, True])
@pytest.mark.parametrize("kind", [EwaldModelWrapper, PMEModelWrapper])
@pytest.mark.filterwarnings("ignore::nvalchemiops.AccuracyWarning")
def test_electrostatics(kind, slab, hybrid):
    """Against an accurate sum; with charges that depend on a variable, and for two systems in one batch."""
    atoms, other = SYSTEMS["salt"].copy(), SYSTEMS["magnesium"].repeat((2, 2, 1))
    if slab:
        atoms.set_cell(atoms.cell.array @ np.diag([1, 1, 3.0]))
        atoms.pbc = (True, True, False)
    # its own alpha, one for all systems, is for its own cutoff
    options = {"alpha": 0.6, "spline_order": 6, "mesh_spacing": 0.35} if kind is PMEModelWrapper else {}
    model = kind(cutoff=6.0, accuracy=1e-8, slab_correction=slab, hybrid_forces=hybrid, **options)
    charges = [charges_of(a) for a in (atoms, other)]
    batch = batch_of(atoms, other, charges=np.concatenate(charges))
    batch.charges = batch.charges.detach().requires_grad_(True)
    model.model_config.active_outputs = {"energy", "forces", "stress"} if hybrid else {"energy", "forces"}
    compute_neighbors(batch, config=model.model_config.neighbor_config)
    found = model(batch)
    (gradients,) = torch.autograd.grad(found["energy"].sum(), batch.charges)
    first = 0
    for s, (a, q) in enumerate(zip((atoms, other), charges)):
        exact = ewald_summation(
            torch.tensor(a.positions), torch.tensor(q), torch.tensor(a.cell.array), accuracy=1e-11,
            pbc=torch.tensor(a.pbc), slab_correction=slab and not a.pbc.all(), compute_forces=True,
            compute_charge_gradients=True, compute_virial=True, energy_reduction="system",
        )  # fmt: skip
        energy, forces, by_charge, virial = (model.coulomb_constant * t for t in exact)
        mine = slice(first, first + len(a))
        np.testing.assert_allclose(found["energy"][s].item(), energy.item(), rtol=1e-5)
        np.testing.assert_allclose(found["forces"].detach()[mine].numpy(), forces.numpy(), atol=1e-4)
        np.testing.assert_allclose(gradients[mine].numpy(), by_charge.numpy(), atol=1e-4)
        if hybrid:
            np.testing.assert_allclose(
                found["stress"][s].detach().numpy(), (-virial / a.get_volume()).numpy()[0], atol=1e-6
            )
        first += len(a)


def test_lennard_jones():
    """Forces and stress against ASE, energies by their differences; full and half lists, in a batch."""
    atoms, other = bulk("Ar", "fcc", a=5.3, cubic=True), bulk("Ar", "hcp", a=3.7, c=6.1)
    for n, a in enumerate((atoms, other)):
        a.rattle(0.2, seed=n)
        a.calc = LennardJones(sigma=3.4, epsilon=0.0104, rc=7.0)
    for half in (False, True):
        found = evaluated(
            LennardJonesModelWrapper(**ARGON, half_list=half), batch_of(atoms, other), "energy", "forces", "stress"
        )
        np.testing.assert_allclose(
            found["forces"].numpy(), np.concatenate([atoms.get_forces(), other.get_forces()]), atol=1e-10
        )
        for s, a in enumerate((atoms, other)):
            np.testing.assert_allclose(found["stress"][s].numpy(), a.get_stress(voigt=False), atol=1e-10)
    model = LennardJonesModelWrapper(**ARGON, switch_width=1.5)

    def energy(a):
        return float(evaluated(model, batch_of(a), "energy")["energy"])

    found = evaluated(model, batch_of(atoms), "energy", "forces", "stress")
    np.testing.assert_allclose(found["forces"][:2].numpy(), slopes(energy, atoms), atol=1e-6)
    np.testing.assert_allclose(found["stress"][0].numpy(), stress(energy, atoms), atol=1e-8)


def test_dispersion_with_drawn_parameters(tmp_path):
    """Parameters from a file, as it loads them; forces by differences."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return 0.5 + torch.rand(*shape, generator=generator, dtype=torch.float64)

    names = {"rcov": draw(95), "r4r2": draw(95), "c6ab": draw(95, 95, 5, 5), "cn_ref": draw(95, 95, 5, 5)}
    torch.save(names, tmp_path / "parameters.pt")
    model = DFTD3ModelWrapper(a1=0.43, a2=4.44, s8=0.79, cutoff=10.0, param_file=tmp_path / "parameters.pt")
    atoms = molecule("CH3CH2OH")
    atoms.set_cell(np.eye(3) * 30.0)

    def energy(a):
        return float(evaluated(model, batch_of(a), "energy")["energy"])

    found = evaluated(model, batch_of(atoms), "energy", "forces")
    np.testing.assert_allclose(found["forces"][:2].numpy(), slopes(energy, atoms), rtol=1e-3, atol=1e-7)


def test_dispersion_with_published_parameters(tmp_path):
    """Against simple-dftd3."""
    table = pytest.importorskip("aimnet.modules.lr").DFTD3(0.7875, 0.4289, 4.4407)
    names = {name: getattr(table, name) for name in ("rcov", "r4r2", "c6ab", "cn_ref")}
    torch.save(names, tmp_path / "parameters.pt")
    model = DFTD3ModelWrapper(a1=0.4289, a2=4.4407, s8=0.7875, cutoff=20.0, param_file=tmp_path / "parameters.pt")
    atoms = SYSTEMS["benzene"]
    found = evaluated(model, batch_of(atoms), "energy", "forces")
    bohr = 0.529177210903
    damping = RationalDampingParam(s6=1.0, s8=0.7875, a1=0.4289, a2=4.4407, s9=0.0)
    expected = DispersionModel(atoms.numbers, atoms.positions / bohr).get_dispersion(damping, grad=True)
    np.testing.assert_allclose(found["energy"].item(), expected["energy"] * 27.211386245988, rtol=1e-4)
    forces = -expected["gradient"] * 27.211386245988 / bohr
    np.testing.assert_allclose(found["forces"].numpy(), forces, rtol=1e-3, atol=1e-6)


# -- dynamics, step by step against ASE -----------------------------------------------------------------


def argon(seed=0, strain=0.0, kelvin=40.0):
    """A crystal that moves."""
    atoms = bulk("Ar", "fcc", a=5.3, cubic=True)
    atoms.set_cell(atoms.cell.array * (1 + strain), scale_atoms=True)
    atoms.rattle(0.1, seed=seed)
    rng = np.random.default_rng(seed)
    atoms.set_velocities(rng.normal(size=(len(atoms), 3)) * np.sqrt(kelvin * units.kB / 39.948))
    atoms.calc = LennardJones(sigma=3.4, epsilon=0.0104, rc=7.0)
    return atoms


def run(integrator, batch, n_steps):
    """Its steps, with forces for the first one, and a list for each."""
    config = integrator.model.model_config.neighbor_config
    integrator.register_hook(NeighborListHook(config, stage=DynamicsStage.BEFORE_COMPUTE))
    compute_neighbors(batch, config=config)
    for name, value in integrator.model(batch).items():
        if name in ("forces", "stress"):
            batch[name] = value.detach()
    for _ in range(n_steps):
        integrator.step(batch)
    return batch


def model_of_argon(**options):
    model = LennardJonesModelWrapper(**ARGON, **options)
    model.model_config.active_outputs = {"energy", "forces", "stress"}
    return model


def same_steps(batch, systems, atol):
    positions = np.concatenate([a.positions for a in systems])
    np.testing.assert_allclose(batch.positions.numpy(), positions, atol=atol)
    np.testing.assert_allclose(
        batch.velocities.numpy(), np.concatenate([a.get_velocities() for a in systems]), atol=atol
    )


def test_constant_energy():
    systems = [argon(0), argon(1, 0.02)]
    batch = run(NVE(model_of_argon(), dt=2.0), batch_of(*systems, velocities=True), 25)
    for atoms in systems:
        VelocityVerlet(atoms, 2.0 * units.fs).run(25)
    same_steps(batch, systems, 1e-9)


def test_nose_hoover_chain():
    systems = [argon(0), argon(1, 0.02)]
    integrator = NVTNoseHoover(model_of_argon(), dt=2.0, temperature=60.0, thermostat_time=50.0)
    batch = run(integrator, batch_of(*systems, velocities=True), 25)
    for atoms in systems:
        NoseHooverChainNVT(atoms, 2.0 * units.fs, temperature_K=60.0, tdamp=50.0 * units.fs).run(25)
    same_steps(batch, systems, 1e-9)


def test_constant_pressure():
    """Its splitting differs from ASE's by O(dt), so the step is short; the cell changes by a thousand times more.

    Isotropic cells are not compared: it gives their chain three degrees of freedom, where ASE has one.
    """
    atoms, pressure, dt = argon(0, 0.03), 2e-4, 0.1
    target = pressure * torch.eye(3, dtype=torch.float64).unsqueeze(0)
    times = {"barostat_time": 50.0, "thermostat_time": 20.0}
    integrator = NPT(model_of_argon(), dt=dt, temperature=40.0, pressure=target, pressure_coupling="triclinic", **times)
    volume = atoms.get_volume()
    batch = run(integrator, batch_of(atoms, velocities=True), 150)
    damping = {"tdamp": 20.0 * units.fs, "pdamp": 50.0 * units.fs}
    MTKNPT(atoms, dt * units.fs, temperature_K=40.0, pressure_au=pressure, **damping).run(150)
    assert abs(atoms.get_volume() - volume) > 0.005 * volume
    np.testing.assert_allclose(batch.cell[0].numpy(), atoms.cell.array, atol=5e-4)
    np.testing.assert_allclose(batch.positions.numpy(), atoms.positions, atol=1e-3)


def enthalpy(batch, integrator, pressure):
    """With the kinetic energy of the cell."""
    kinetic = 0.5 * (batch.atomic_masses.reshape(-1, 1) * batch.velocities**2).sum()
    compute_neighbors(batch, config=integrator.model.model_config.neighbor_config)
    state = integrator._state
    of_cell = 0.5 * state.W[0] * (state.cell_velocity**2).sum()
    return float(
        integrator.model(batch)["energy"].sum() + kinetic + of_cell + pressure * torch.linalg.det(batch.cell[0])
    )


def test_enthalpy_is_conserved_to_second_order():
    """Half the time step, a quarter of the error."""
    errors = []
    for dt in (8.0, 4.0):
        integrator, pressure = NPH(model_of_argon(switch_width=1.5), dt=dt, pressure=2e-4, barostat_time=100.0), 2e-4
        batch = run(integrator, batch_of(argon(0, 0.03), velocities=True), 1)
        values = []
        for _ in range(int(240 / dt)):
            integrator.step(batch)
            values.append(enthalpy(batch, integrator, pressure))
        errors.append(np.ptp(values))
    assert errors[1] < 0.3 * errors[0] and errors[0] < 2e-3


def test_langevin_samples_the_temperature():
    atoms = argon(0).repeat(4)
    atoms.set_velocities(np.zeros((len(atoms), 3)))
    model = LennardJonesModelWrapper(epsilon=0.0104, sigma=3.4, cutoff=6.0)
    integrator = NVTLangevin(model, dt=4.0, temperature=50.0, friction=0.05, random_seed=3)
    batch = batch_of(atoms, velocities=True)
    run(integrator, batch, 60)
    kelvin = []
    for _ in range(40):
        integrator.step(batch)
        twice = (batch.atomic_masses.reshape(-1, 1) * batch.velocities**2).sum()
        kelvin.append(float(twice) / (3 * len(atoms) * units.kB))
    assert abs(np.mean(kelvin) - 50.0) < 3.0


# -- relaxation -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["FIRE", "FIRE2"])
def test_relaxation(kind):
    """Step by step against ASE, with its masses of one; FIRE 2.0 only downhill, as ASE then evaluates forces twice."""
    systems = [argon(0), argon(1, 0.02)]
    for atoms in systems:
        atoms.set_velocities(np.zeros((len(atoms), 3)))
    batch = batch_of(*systems, velocities=True)
    batch["atomic_masses"] = torch.ones_like(batch.atomic_masses)
    if kind == "FIRE":
        optimizer = FIRE(model_of_argon(), dt=0.1, dt_max=1.0, dt_min=1e-6, maxstep=10.0)
        ase = [AseFire(a, logfile=None, dt=0.1, dtmax=1.0, maxstep=10.0) for a in systems]
    else:
        options = {"dt": 0.1, "maxstep": 10.0}
        optimizer = FIRE2(model_of_argon(), delaystep=5, tmax=1.0, tmin=2e-3, alpha0=0.25, **options)
        ase = [
            AseFire2(
                a, logfile=None, Nmin=5, dtmax=1.0, dtmin=2e-3, finc=1.05, fdec=0.75, fa=0.985, astart=0.25, **options
            )
            for a in systems
        ]
    n_steps = 40 if kind == "FIRE" else 12
    run(optimizer, batch, n_steps)
    for each in ase:
        each.run(fmax=0.0, steps=n_steps)
    positions = np.concatenate([a.positions for a in systems])
    np.testing.assert_allclose(batch.positions.numpy(), positions, atol=1e-9)


def test_lbfgs():
    """To the minimum of each system in a batch, in far fewer steps than there are coordinates."""
    systems = [argon(0), argon(1, 0.02)]
    batch = batch_of(*systems, velocities=True)
    optimizer = LBFGS(model_of_argon())
    run(optimizer, batch, 40)
    assert optimizer.model(batch)["forces"].abs().max() < 1e-6


@pytest.mark.parametrize("kind", [FIRE2VariableCell, LBFGSVariableCell])
def test_relaxation_of_cells(kind):
    """Positions and cell find the lattice without stress, with its shear away, in each system of a batch."""
    cells = []
    for seed in (0, 1):
        atoms = bulk("Ar", "fcc", a=5.4, cubic=True)
        atoms.rattle(0.05, seed=seed)
        shear = np.eye(3)
        shear[1, 0] = 0.05 * (1 + seed)
        atoms.set_cell(atoms.cell.array @ shear, scale_atoms=True)
        cells.append(atoms)
    if kind is FIRE2VariableCell:
        optimizer, n_steps = kind(model_of_argon(), dt=0.1, tmax=1.0, delaystep=5, maxstep=0.1), 400
    else:
        optimizer, n_steps = kind(model_of_argon(), hooks=[AlignCellHook(frequency=1)]), 80
    batch = run(optimizer, batch_of(*cells, velocities=True), n_steps)
    found = optimizer.model(batch)
    assert found["forces"].abs().max() < 2e-4 and found["stress"].abs().max() < 2e-6
    np.testing.assert_allclose(torch.linalg.det(batch.cell).diff().item(), 0.0, atol=0.05)


# -- packing and paths ------------------------------------------------------------------------------------


def test_contacts_of_molecules():
    """Overlaps with all images of a molecule, in cells of one bin and of several, as its kernel finds them in bins."""
    cells = np.array([[[5.0, 0, 0], [1.2, 6.0, 0], [-0.8, 1.1, 7.0]], [[12.0, 0, 0], [3.0, 9.0, 0], [1, -2, 11]]])
    local = np.random.default_rng(0).normal(size=(6, 3)) * 2.5
    centers, n, reach = np.full((2, 1, 3), 0.4), len(local), 3.0
    single, whole = {"dtype": torch.float32}, {"dtype": torch.int32}
    maps = _contacts.make_contact_maps(torch.tensor([0, n]), 1)
    workspace = _contacts.ContactWorkspace.allocate(
        batch_size=2, num_molecules=1, expanded_atom_count=n, device=torch.device("cpu")
    )
    found = _contacts.contact_forces(
        conformer_positions=torch.tensor(local, **single),
        conformer_ptr=torch.tensor([0, n], **whole),
        conformer_ids=torch.zeros(2, 1, **whole),
        centers=torch.tensor(centers, **single),
        rotations=torch.eye(3).expand(2, 1, 3, 3).contiguous(),
        cells=torch.tensor(cells, **single),
        inverse_cells=torch.tensor(np.linalg.inv(cells), **single),
        symmetry_table=torch.tensor([[*np.eye(3).ravel(), 0, 0, 0]], **single),
        selected_symmetry_ops=torch.zeros(2, 1, **whole),
        contact_distances=torch.full((n, n), reach),
        max_contact_distance=reach,
        maps=maps,
        workspace=workspace,
    )
    for cell, center, total in zip(cells, centers[:, 0], found.total_overlap.tolist()):
        atoms = Atoms("H6", positions=local + center @ cell, cell=cell, pbc=True)
        d, shifts = neighbor_list("dS", atoms, reach)
        assert total == pytest.approx(0.5 * (reach - d[shifts.any(1)]).sum(), rel=1e-5)


def test_energies_along_paths():
    energies, first = torch.tensor([0.0, 3.0, 5.0, 1.0, -2.0, 4.0, -1.0]), torch.tensor([0, 4, 7], dtype=torch.int32)
    lowest, highest, where = torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.int32)
    path_energy_stats(energies, first, lowest, highest, where)
    assert lowest.tolist() == [0.0, -2.0] and highest.tolist() == [5.0, 4.0] and where.tolist() == [2, 5]
