"""Systems, neighbors and named results: the short calls give what the long ones give, to the last bit."""

import io
import pickle

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule

from nvalchemiops.ase import atoms_to_graph
from nvalchemiops.torch import Neighbors, System
from nvalchemiops.torch.dynamics import Evaluation, Relaxation, Simulation, State, to_ase
from nvalchemiops.torch.interactions.dispersion import DFTD3
from nvalchemiops.torch.interactions.electrostatics import (
    Electrostatics,
    EwaldSummation,
    ParticleMeshEwald,
    ewald_summation,
    particle_mesh_ewald,
)
from nvalchemiops.torch.interactions.pair import PairPotential
from nvalchemiops.torch.neighbors import neighbor_list
from tests.support.systems import batch, triclinic

GIVEN = batch(triclinic(6), triclinic(5, seed=3))
SYSTEM = System(GIVEN.positions, GIVEN.charges, GIVEN.cell, GIVEN.batch_idx, numbers=torch.tensor([8, 1] * 5 + [6]))
ALL = {"compute_forces": True, "compute_virial": True}
PAIR = PairPotential("depth*(x*x - 2*x); x = (r0/r)**6", global_parameters=("depth", "r0"), cutoff=4.0)
PAIR_PARAMETERS = {"depth": 0.3, "r0": 2.0}


def neighbors_as(form):
    """Neighbors of the system up to 4, and the arguments that say the same."""
    if form == "built":
        return None, {}
    found = SYSTEM.neighbors(4.0, as_matrix=form == "matrix", half=form == "half list")
    options = {"half_fill": form == "half list", "return_neighbor_list": form != "matrix"}
    first, second, shifts = neighbor_list(SYSTEM.positions, 4.0, SYSTEM.cell, batch_idx=SYSTEM.batch_idx, **options)
    if form == "matrix":
        return found, {"neighbor_matrix": first, "neighbor_matrix_shifts": shifts}
    arguments = {"neighbor_list": first, "neighbor_ptr": second, "neighbor_shifts": shifts}
    return found, arguments | {"half_list": form == "half list"}


def same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


FORMS = pytest.mark.parametrize("form", ["built", "list", "matrix", "half list"])


@FORMS
@pytest.mark.parametrize("kind", ["Ewald", "PME"])
def test_sums_of_an_accuracy(kind, form):
    neighbors, arguments = neighbors_as(form)
    module, function = {
        "Ewald": (EwaldSummation, ewald_summation),
        "PME": (ParticleMeshEwald, particle_mesh_ewald),
    }[kind]
    found = module(accuracy=1e-5)(SYSTEM, neighbors, compute_charge_gradients=True, **ALL)
    if neighbors is not None:
        arguments["cutoff"] = 4.0
    expected = function(
        *SYSTEM[:3], batch_idx=SYSTEM.batch_idx, accuracy=1e-5, compute_charge_gradients=True, **ALL, **arguments
    )
    same(found, expected)
    same((found.energies, found.forces, found.charge_gradients, found.virial), expected)


@FORMS
def test_pair_potentials(form):
    neighbors, arguments = neighbors_as(form)
    found = PAIR(SYSTEM, neighbors, compute_gradients=("r0", "depth"), **ALL, **PAIR_PARAMETERS)
    options = {"batch_idx": SYSTEM.batch_idx, "compute_gradients": ("r0", "depth")}
    expected = PAIR(SYSTEM.positions, SYSTEM.cell, **options, **ALL, **PAIR_PARAMETERS, **arguments)
    energies, forces, gradients, virial = found
    assert list(gradients) == ["r0", "depth"] and gradients is found.gradients
    same((energies, forces, *gradients.values(), virial), expected)


@FORMS
def test_dispersion(form):
    neighbors, arguments = neighbors_as(form)
    module = DFTD3("pbe", elements=(1, 6, 8), cutoff=4.0, coordination_cutoff=4.0, smoothing=1.0)
    found = module(SYSTEM, neighbors, **ALL)
    expected = module(SYSTEM.positions, SYSTEM.numbers, SYSTEM.cell, SYSTEM.batch_idx, **ALL, **arguments)
    same((found.energies, found.forces, found.coordination_numbers, found.virial), expected)


def test_results_have_what_was_asked_for():
    result = EwaldSummation(accuracy=1e-5)(SYSTEM, compute_virial=True)
    assert result._fields == ("energies", "virial")
    energies, virial = result
    assert energies is result.energies and virial.shape == (2, 3, 3)
    with pytest.raises(AttributeError, match="energies, virial; pass `compute_forces`"):
        _ = result.forces
    with pytest.raises(AttributeError, match=r"no `stress`: the results are energies, virial$"):
        _ = result.stress
    assert not hasattr(result, "charge_gradients")
    assert torch.equal(pickle.loads(pickle.dumps(result)).virial, virial)


def test_gradients_and_compiled():
    module = ParticleMeshEwald.estimate(SYSTEM.positions, SYSTEM.cell, SYSTEM.batch_idx, accuracy=1e-4)
    neighbors = SYSTEM.neighbors(module.cutoff)

    def loss(positions):
        result = module(SYSTEM._replace(positions=positions), neighbors, compute_forces=True)
        return result.energies.sum() + result.forces.square().sum()

    x = SYSTEM.positions.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(x), x)
    (found,) = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(x), x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_settings_of_an_accuracy_are_saved():
    saved = EwaldSummation(accuracy=1e-4, cutoff=4.0).state_dict()
    module = EwaldSummation()
    module.load_state_dict(saved)
    assert (module.accuracy, module.cutoff, module.alpha, module.k_cutoff) == (1e-4, 4.0, None, None)
    assert torch.equal(module(SYSTEM).energies, EwaldSummation(accuracy=1e-4, cutoff=4.0)(SYSTEM).energies)


def test_what_is_missing_is_named():
    with pytest.raises(ValueError, match="`charges` of the system"):
        EwaldSummation()(SYSTEM._replace(charges=None))
    with pytest.raises(ValueError, match="`numbers` of the system"):
        DFTD3("pbe", elements=(1,))(SYSTEM._replace(numbers=None))
    with pytest.raises(TypeError, match=r"`compute_stress`: .*compute_virial=True"):
        EwaldSummation()(SYSTEM, compute_stress=True)
    with pytest.raises(TypeError, match="with a System an interaction takes Neighbors, got Tensor"):
        EwaldSummation()(SYSTEM, SYSTEM.charges)
    near = SYSTEM.neighbors(3.0)
    with pytest.raises(TypeError, match="`neighbors` are given twice"):
        EwaldSummation()(SYSTEM, near, neighbors=near)
    with pytest.raises(TypeError, match="`neighbors` go with a System"):
        EwaldSummation()(*SYSTEM[:3], neighbors=near)
    with pytest.raises(TypeError, match="`neighbors` go with a System"):
        PAIR(SYSTEM.positions, SYSTEM.cell, neighbors=near, **PAIR_PARAMETERS)
    for name, value in (("neighbor_list", near.pairs), ("batch_idx", SYSTEM.batch_idx), ("half_list", True)):
        for interaction in (EwaldSummation(), lambda *system, **options: PAIR(*system, **options, **PAIR_PARAMETERS)):
            with pytest.raises(TypeError, match=f"`{name}` goes with tensors"):
                interaction(SYSTEM, **{name: value})
    with pytest.raises(ValueError, match="`neighbors` must have either pairs or a matrix"):
        EwaldSummation()(SYSTEM, Neighbors(cutoff=4.0))
    for kind, name in ((EwaldSummation, "k_cutoff"), (EwaldSummation, "alpha"), (ParticleMeshEwald, "spline_order")):
        for given in ([SYSTEM], SYSTEM[:3]):
            with pytest.raises(TypeError, match=f"`{name}` is set when a {kind.__name__} is made"):
                kind()(*given, **{name: 2})
    with pytest.raises(TypeError, match="`s9` is set when a DFTD3 is made: leave"):
        DFTD3("pbe", [1, 8])(SYSTEM._replace(numbers=torch.ones(len(SYSTEM.positions)).int()), s9=0.0)
    prepared = EwaldSummation(alpha=0.5, k_cutoff=3.0).prepare(SYSTEM.cell)
    for name, value in (("miller_indices", torch.ones(1, 3)), ("k_cutoff", 5.0)):
        with pytest.raises(TypeError, match=rf"`{name}` is set .* by `prepare`"):
            prepared(SYSTEM, **{name: value})
    with pytest.raises(ValueError, match="`prepare` needs `alpha`"):
        ParticleMeshEwald().prepare(SYSTEM.cell)


def test_neighbors_that_are_too_few_are_an_error():
    near = SYSTEM.neighbors(3.0)
    with pytest.raises(ValueError, match=r"`neighbors` reach to 3.0, but the cutoff of this interaction is 4.0"):
        EwaldSummation(0.9, 6.0, 4.0)(SYSTEM, near)
    with pytest.raises(ValueError, match=r"`neighbors` reach to 3.0, but the cutoff of this interaction is 4.0"):
        EwaldSummation()(SYSTEM, near, cutoff=4.0)
    molecule = System(SYSTEM.positions[:4], charges=SYSTEM.charges[:4])  # all of its pairs are summed
    known = EwaldSummation()(molecule).energies
    for interaction, options in ((EwaldSummation(), {"cutoff": 4.0}), (EwaldSummation(0.9, 6.0, 4.0), {})):
        assert torch.equal(interaction(molecule, molecule.neighbors(0.5), **options).energies, known)
    with pytest.raises(ValueError, match=r"beyond the list's reach"):
        PAIR(SYSTEM, neighbors=near, **PAIR_PARAMETERS)
    with pytest.raises(ValueError, match=r"`neighbors` reach to 3.0, but the cutoff of this interaction is 4.0"):
        DFTD3("pbe", elements=(1, 6, 8), cutoff=4.0, coordination_cutoff=4.0, smoothing=1.0)(SYSTEM, near)
    matrix, counts, shifts = neighbor_list(SYSTEM.positions, 4.0, SYSTEM.cell, batch_idx=SYSTEM.batch_idx)
    with pytest.raises(ValueError, match="`matrix` has 3 columns, but an atom has"):
        Neighbors.from_matrix(matrix[:, :3], shifts[:, :3], counts=counts)
    most = int(counts.max())  # the longest row needs no padding
    assert Neighbors.from_matrix(matrix[:, :most], shifts[:, :most], counts=counts).matrix.shape[1] == most


# -- from ASE ---------------------------------------------------------------------------------------


def test_one_system_of_ase():
    atoms = bulk("NaCl", "rocksalt", a=5.64, cubic=True)
    charges = [1.0 if s == "Na" else -1.0 for s in atoms.symbols]
    system = System.from_ase(atoms, charges)
    torch.testing.assert_close(system.volume, torch.tensor(atoms.get_volume(), dtype=torch.float64))
    assert (system.n_atoms, system.dtype, system.device.type) == (8, torch.float64, "cpu")
    with pytest.raises(ValueError, match=r"`charges` must have shape \(n_atoms,\) = \(8,\), got \(2,\)"):
        System.from_ase(atoms, [1.0, -1.0])
    assert system.cell.shape == (3, 3) and system.batch_idx is None and system.pbc.tolist() == [True] * 3
    energy = EwaldSummation(accuracy=1e-9)(system).energies.sum()
    assert abs(-2.0 * energy.item() / len(atoms) * 2.82 - 1.747564594633) < 1e-8
    atoms.set_initial_charges(charges)
    assert torch.equal(System.from_ase(atoms).charges, system.charges)
    by_element = System.from_ase([atoms, atoms[:3]], {"Na": 1.0, "*": -1.0}).charges
    assert torch.equal(by_element, torch.cat([system.charges, system.charges[:3]]))
    with pytest.raises(ValueError, match="`charges` has no value for Cl"):
        System.from_ase(atoms, {"Na": 1.0})


def test_a_batch_of_ase():
    slab, free = Atoms("H2", [[0, 0, 0], [0, 0, 0.7]], cell=[4, 4, 9], pbc=(True, True, False)), molecule("H2O")
    system = System.from_ase([slab, free], dtype=torch.float32)
    assert system.positions.dtype == torch.float32 and system.charges is None
    assert system.batch_idx.tolist() == [0] * 2 + [1] * 3 and system.numbers.tolist() == [1, 1, 8, 1, 1]
    assert system.pbc.tolist() == [[True, True, False], [False] * 3]
    assert system.neighbors(1.2, half=True).pairs.shape == (2, 3)  # H-H, O-H twice
    alone = System.from_ase(free)
    assert alone.cell is None and alone.pbc is None and alone.neighbors(1.2).shifts is None
    one = System.from_ase([slab])  # as the last batch of an epoch may be
    assert one.batch_idx.tolist() == [0] * 2 and one.cell.shape == (1, 3, 3) and one.pbc.shape == (1, 3)
    assert System.from_ase([free]).batch_idx.tolist() == [0] * 3
    for wrong in ("atoms.traj", [torch.zeros(3, 3)]):
        with pytest.raises(TypeError, match=f"`atoms` must be .*, got {type(wrong[0]).__name__}"):
            System.from_ase(wrong)
    for wrong in ("float32", np.float32):
        with pytest.raises(TypeError, match=r"`dtype` must be a torch.dtype"):
            System.from_ase(free, dtype=wrong)
    assert System.from_ase(free, dtype=float).positions.dtype == torch.float64
    with pytest.raises(ValueError, match="`atoms` holds no system"):
        System.from_ase([])


def test_charges_of_each_structure_of_ase():
    """One sequence for each is that of all in one; rows of single atoms stay channels."""
    structures, learned = [bulk("NaCl", "rocksalt", a=5.64), molecule("H2O")], torch.ones(3, requires_grad=True)
    found = System.from_ase(structures, [np.array([1, -1]), learned]).charges
    assert found.tolist() == [1.0, -1.0, 1.0, 1.0, 1.0] and found.requires_grad
    assert System.from_ase([structures[0], Atoms()], ([1, -1], [])).charges.tolist() == [1.0, -1.0]
    assert System.from_ase([Atoms("H")] * 2, [[1.0], [2.0]]).charges.shape == (2, 1)
    with pytest.raises(ValueError, match=r"`charges` must be those of structures of \[2, 3\] atoms, got \[2, 2\]"):
        System.from_ase(structures, [[1, -1], [1, -1]])


def test_initial_charges_of_ase_that_are_zero():
    """Those of a neutral structure, alone as among charged ones; beside structures of which nothing is known, none."""
    water, argon, unknown = molecule("H2O"), Atoms("Ar", charges=[0.0]), Atoms("Ne")
    water.set_initial_charges([-0.8, 0.4, 0.4])
    systems = [System.from_ase(atoms) for atoms in (water, argon, unknown)]
    assert Electrostatics()(systems[1]).energies.tolist() == [0.0]
    joined = System.concatenate(systems[:2]).charges
    assert torch.equal(joined, System.from_ase([water, argon]).charges) and joined[3] == 0.0
    assert System.concatenate(systems[1:]).charges is None and System.from_ase([argon, unknown]).charges is None
    for charges in (systems[1].charges.requires_grad_(), torch.ones(1).double(), np.zeros(1), [0.0], 0.0):
        with pytest.raises(ValueError, match="`charges` of system number 1 is missing"):
            System.concatenate([systems[1]._replace(charges=charges), systems[2]])
    with pytest.raises(ValueError, match="`dipoles` of system number 1 is missing"):
        System.concatenate([systems[2]._replace(dipoles=torch.zeros(1, 3)), systems[2]])
    assert System.from_ase(Atoms()).charges is None


def test_open_systems_of_ase_of_which_the_last_has_no_atoms():
    system = System.from_ase([molecule("H2O"), Atoms()], {"O": -0.8, "H": 0.4})
    request = {"energy_reduction": "system"}
    for results in (
        PAIR(system, **request, **PAIR_PARAMETERS),
        EwaldSummation()(system, **request),
        DFTD3("pbe", [1, 8])(system, **request),
    ):
        assert results.energies.shape == (2,) and results.energies[0] != 0.0 and results.energies[1] == 0.0
    assert list(map(len, to_ase(system))) == [3, 0]
    assert System.from_ase(Atoms()).pbc is None


def test_neighbors_from_elsewhere():
    where = SYSTEM.positions, 4.0, SYSTEM.cell
    pairs, pointers, shifts = neighbor_list(*where, batch_idx=SYSTEM.batch_idx, return_neighbor_list=True)
    given = Neighbors.from_list(pairs, shifts)
    with_pointers = Neighbors.from_list(pairs, shifts, row_pointers=pointers)
    same(PAIR(SYSTEM, given, **PAIR_PARAMETERS), PAIR(SYSTEM, with_pointers, **PAIR_PARAMETERS))
    matrix, _, images = neighbor_list(*where, batch_idx=SYSTEM.batch_idx, fill_value=-1)
    padded = Neighbors.from_matrix(matrix, images, padding=-1)
    torch.testing.assert_close(PAIR(SYSTEM, padded, **PAIR_PARAMETERS), PAIR(SYSTEM, given, **PAIR_PARAMETERS))


def test_systems_and_neighbors_elsewhere():
    """Real numbers in another precision, integers as they were; on a device without memory, too."""
    single = SYSTEM._replace(widths=0.3, pbc=torch.tensor([True] * 3)).to(torch.float32)
    assert single.positions.dtype is single.cell.dtype is torch.float32 and single.widths == 0.3
    assert single.numbers.dtype is SYSTEM.numbers.dtype and single.pbc.dtype is torch.bool
    same(single.to(dtype=torch.float64)[:3], [t.float().double() for t in SYSTEM[:3]])
    assert SYSTEM.to("meta", torch.float32).batch_idx.device.type == "meta"
    assert all(SYSTEM._replace(pbc=np.array([True] * 3)).to(torch.float32).pbc)  # as given
    moved = SYSTEM.neighbors(4.0).to("meta")
    assert moved.pairs.device.type == "meta" and moved.cutoff == 4.0 and moved.matrix is None
    x = SYSTEM.positions.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(SYSTEM._replace(positions=x).to(torch.float32).positions.sum(), x)
    assert torch.equal(gradient, torch.ones_like(x))
    with pytest.raises(TypeError, match="`dtype` must be float32 or float64"):
        SYSTEM.to(torch.int32)
    with pytest.raises(TypeError, match="`positions` is no torch tensor"):
        System(SYSTEM.positions.numpy()).to("cpu")
    with pytest.raises(ValueError, match="with a `domain`"):
        SYSTEM._replace(domain=object()).to("cpu")


def test_systems_and_neighbors_are_printed_on_one_line():
    """What is given, and of tensors the shape: values of thousands of atoms would hide it."""
    x, cell = torch.rand(3, 3), 9.0 * torch.eye(3)
    system = System(x, cell=cell, widths=0.3)
    assert repr(system) == "System(positions=float32 (3, 3), cell=float32 (3, 3), widths=0.3, device=cpu)"
    pairs = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32)
    assert str(Neighbors.from_list(pairs, half=True)) == "Neighbors(pairs=int32 (2, 2), half=True, device=cpu)"
    matrix = Neighbors.from_matrix(torch.zeros((3, 4)).int(), padding=-1, cutoff=4.0).to("meta")
    assert repr(matrix) == "Neighbors(matrix=int32 (3, 4), padding=-1, cutoff=4.0, half=False, device=meta)"
    found = Evaluation(x.sum(1), -x)
    told = "Evaluation(energies=float32 (3,), forces=float32 (3, 3), device=cpu)"
    run = Simulation(State(system, x, x[0], found, torch.tensor(2), {"dt": x[:1]}), {"kinetic": x}, [0], x[0] < 0.0)
    assert repr(found) == told and repr(run) == (
        f"Simulation(state=State(system={system!r}, velocities=float32 (3, 3), masses=float32 (3,), evaluation={told}, "
        "step=int64 (), extra={'dt': float32 (1, 3)}, device=cpu), records={'kinetic': float32 (3, 3)}, steps=[0], "
        "failed=bool (3,), device=cpu)"
    )
    assert "steps=[0, 1, 2, 3, 4, 5, ...], failed" in repr(run._replace(steps=[*range(1000)]))
    assert "float32 (3, 3)" in repr(Relaxation(system, found, *[x[0]] * 5))
    graph = atoms_to_graph(Atoms("H2", [[0.0, 0.0, 0.0], [0.0, 0.0, 0.7]]), 1.0, dtype=torch.float64)
    assert "pbc=bool (1, 3)" in repr(graph) and "distances=float64 (2,)" in repr(graph)


def test_systems_are_saved_by_torch_as_documented(tmp_path):
    torch.save(SYSTEM, tmp_path / "object.pt")
    torch.save(SYSTEM._asdict(), tmp_path / "fields.pt")
    for system in (torch.load(tmp_path / "object.pt"), System(**torch.load(tmp_path / "fields.pt"))):
        assert isinstance(system, System) and repr(system) == repr(SYSTEM)
        assert torch.equal(system.positions, SYSTEM.positions)


def test_a_program_in_a_file_takes_systems_and_returns_named_results():
    class Model(torch.nn.Module):
        def forward(self, system, neighbors):
            return PAIR(system, neighbors, **PAIR_PARAMETERS, compute_forces=True)

    near, file = SYSTEM.neighbors(4.0), io.BytesIO()
    torch.export.save(torch.export.export(Model(), (SYSTEM, near)), file)
    file.seek(0)
    found, expected = torch.export.load(file).module()(SYSTEM, near), Model()(SYSTEM, near)
    assert type(found) is type(expected)
    assert torch.equal(found.energies, expected.energies) and torch.equal(found.forces, expected.forces)
