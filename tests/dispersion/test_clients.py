"""The calls of DFT-D3 that existing clients make, word for word as they make them (../shared/clients.md).

They work in atomic units, hold the tables of 94 elements with five reference molecules each, and take what comes back
by its place: energies of systems, forces, coordination numbers, and the virial if they asked for it.
"""

import importlib
import inspect

import pytest
import torch

from nvalchemiops.constants import BOHR_IN_ANGSTROM, HARTREE_IN_EV
from nvalchemiops.torch.interactions.dispersion import D3Parameters, d3_dispersion, dftd3
from nvalchemiops.torch.neighbors import batch_cell_list, batch_naive_neighbor_list, neighbor_list
from tests.contracts.test_clients import AdaptiveList, check_signature
from tests.dispersion.cases import (
    F64,
    PBE,
    PROGRAM,
    Atoms,
    Found,
    batch,
    close,
    molecule,
    parameters,
    program,
    program_batch,
    solid,
)

SIGNATURE = (
    "positions, numbers, a1, a2, s8, k1=16.0, k3=-4.0, s6=1.0, s5_smoothing_on=10000000000.0, "
    "s5_smoothing_off=10000000000.0, fill_value=None, d3_params=None, covalent_radii=None, r4r2=None, "
    "c6_reference=None, coord_num_ref=None, batch_idx=None, cell=None, neighbor_matrix=None, "
    "neighbor_matrix_shifts=None, neighbor_list=None, neighbor_ptr=None, unit_shifts=None, compute_virial=False, "
    "num_systems=None, device=None"
)
NUMBERS = {"a1": PBE.a1, "a2": PBE.a2, "s8": PBE.s8}


def tables(dtype=torch.float32, empty=-1.0):
    """As clients keep them: float32, atomic number 0 in front, some number where there is no reference molecule."""
    p, n, mesh = parameters(), 95, 5
    c6 = p.c6ab[:n, :n, :mesh, :mesh].clone()
    own = p.cn_ref[:n, None, :mesh, None].expand(n, n, mesh, mesh)
    return {
        "covalent_radii": p.rcov[:n].to(dtype),
        "r4r2": p.r4r2[:n].to(dtype),
        "c6_reference": c6.to(dtype),
        "coord_num_ref": torch.where(c6 > 0.0, own, empty).to(dtype),
    }


def test_signature():
    check_signature(dftd3, SIGNATURE)
    assert dftd3 is importlib.import_module("nvalchemiops.torch.interactions.dispersion").dftd3


def test_signature_of_parameters():
    check_signature(D3Parameters.__init__, "self, rcov, r4r2, c6ab, cn_ref, interp_mesh=5")
    assert next(iter(inspect.signature(D3Parameters).parameters)) == "rcov"


@pytest.mark.parametrize("empty", [-1.0, 0.0, 100.0])
@pytest.mark.parametrize("separate", [True, False])
def test_tables_of_clients(separate, empty):
    """One by one, or put together; float32, whose rounding is what remains."""
    atoms, given = molecule("CH3COOH"), tables(empty=empty)
    near = dict(zip(("neighbor_list", "neighbor_ptr"), neighbor_list(atoms.positions, 40.0, return_neighbor_list=True)))
    if not separate:
        names = {"covalent_radii": "rcov", "r4r2": "r4r2", "c6_reference": "c6ab", "coord_num_ref": "cn_ref"}
        given = {"d3_params": D3Parameters(**{names[name]: table for name, table in given.items()})}
    energy, forces, coordination = dftd3(
        positions=atoms.positions, numbers=atoms.numbers, **NUMBERS, **given, **near, num_systems=1
    )
    expected = program(atoms, PROGRAM["bj"](method="pbe"), 40.0, 40.0)
    close([energy, forces], expected[:2], 1e-8)
    assert energy.shape == (1,) and coordination.shape == (8,)


# -- torch-sim ------------------------------------------------------------------------------------


@pytest.mark.parametrize("search", [batch_cell_list, batch_naive_neighbor_list])
def test_torch_sim(search, dtype):
    """A list for a batch of crystals, all arguments by name, results by place; stress is -virial / volume."""
    systems = [solid("dry ice"), solid("silicon"), solid("rock salt")]
    together = batch(*systems)
    positions, cell = together.positions.to(dtype), together.cell.to(dtype)
    cell = cell.mT.contiguous().mT  # stored by columns
    cutoff = 22.0
    res = search(
        positions=positions,
        cutoff=cutoff,
        batch_idx=together.batch_idx,
        cell=cell,
        pbc=together.pbc,
        return_neighbor_list=True,
    )
    out = dftd3(
        positions=positions,
        numbers=together.numbers.to(torch.int32),
        **NUMBERS,
        s6=PBE.s6,
        **tables(),
        neighbor_list=res[0],
        neighbor_ptr=res[1],
        unit_shifts=res[2],
        batch_idx=together.batch_idx,
        cell=cell,
        compute_virial=True,
        num_systems=3,
    )
    energy, forces, coordination, virial = out
    assert len(out) == 4 and all(part.dtype == dtype for part in out)
    assert (energy.shape, virial.shape) == ((3,), (3, 3, 3))
    assert forces.shape == positions.shape and coordination.shape == positions.shape[:1]
    expected = program_batch(systems, PROGRAM["bj"](method="pbe"), cutoff, cutoff)
    # tables in float32; with positions in float32 pairs at the cutoff fall to either side
    close([part.to(F64) for part in (energy, forces, virial)], expected, 1e-7 if dtype == F64 else 3e-6)
    volume = torch.linalg.det(cell).abs()
    assert bool((-virial / volume[:, None, None]).isfinite().all())


def test_torch_sim_in_angstrom_and_electronvolt():
    """D01: the client converts both ways; the result is that of the program, converted."""
    atoms = solid("dry ice")
    x, cell = atoms.positions * BOHR_IN_ANGSTROM, atoms.cell * BOHR_IN_ANGSTROM
    cutoff = 12.0
    res = batch_cell_list(
        positions=x, cutoff=cutoff, batch_idx=atoms.systems, cell=cell, pbc=atoms.pbc, return_neighbor_list=True
    )
    energy, forces, _, virial = dftd3(
        x / BOHR_IN_ANGSTROM,
        atoms.numbers,
        **NUMBERS,
        d3_params=parameters(),
        neighbor_list=res[0],
        neighbor_ptr=res[1],
        unit_shifts=res[2],
        batch_idx=atoms.systems,
        cell=cell / BOHR_IN_ANGSTROM,
        compute_virial=True,
        num_systems=1,
    )
    far = cutoff / BOHR_IN_ANGSTROM
    expected = program(atoms, PROGRAM["bj"](method="pbe"), far, far)
    found = Found(energy * HARTREE_IN_EV, forces * HARTREE_IN_EV / BOHR_IN_ANGSTROM, virial * HARTREE_IN_EV)
    in_ev = Found(
        expected.energy * 27.211386245981, expected.forces * 51.42206750883, expected.virial * 27.211386245981
    )
    close(found, in_ev, 1e-11)


# -- AIMNet ---------------------------------------------------------------------------------------


def test_aimnet_molecules_with_a_padding_atom():
    """Flattened molecules; the padding atom stands last, has number 0, counts to system 0, and fills the rows."""
    systems = [molecule(name) for name in ("CH3COOH", "H2O", "CH3CH2OH")]
    together = batch(*systems)
    n = len(together.numbers)
    padded = Atoms(
        torch.cat([together.positions, torch.zeros(1, 3, dtype=F64)]),
        torch.cat([together.numbers, torch.zeros(1, dtype=torch.int32)]),
        batch_idx=torch.cat([together.batch_idx, torch.zeros(1, dtype=torch.int32)]),
    )
    matrix, _ = AdaptiveList(40.0, 4)(together.positions, batch_idx=together.batch_idx, fill_value=n)
    matrix = torch.cat([matrix, torch.full((1, matrix.shape[1]), n, dtype=torch.int32)])
    positions = padded.positions.clone().requires_grad_()
    energy, forces, coordination = dftd3(
        positions=positions,
        numbers=padded.numbers,
        **NUMBERS,
        s6=PBE.s6,
        d3_params=parameters(),
        neighbor_matrix=matrix,
        fill_value=n,
        batch_idx=padded.batch_idx,
        num_systems=3,
        device="cpu",
    )
    expected = program_batch(systems, PROGRAM["bj"](method="pbe"), 40.0, 40.0)
    close([energy.detach(), forces[:n].detach()], expected[:2])
    assert not forces[n].any() and coordination[n] == 0
    # its model differentiates what it gets
    (slope,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
    close([forces], [-slope], 1e-15)
    (curvature,) = torch.autograd.grad(forces.square().sum(), positions)
    assert curvature[:n].any() and not curvature[n].any()


def test_aimnet_a_crystal_with_smoothing():
    """A matrix with shifts, the energy smoothed, virial last."""
    atoms = solid("dry ice")
    n = len(atoms.numbers)
    matrix, _, shifts = AdaptiveList(20.0, 16)(atoms.positions, atoms.cell, atoms.pbc, atoms.systems, n)
    given = {
        "d3_params": parameters(),
        "neighbor_matrix": matrix,
        "neighbor_matrix_shifts": shifts,
        "fill_value": n,
        "batch_idx": atoms.systems,
        "cell": atoms.cell,
        "compute_virial": True,
        "num_systems": 1,
    }
    energy, forces, coordination, virial = dftd3(
        atoms.positions, atoms.numbers, **NUMBERS, **given, s5_smoothing_on=16.0, s5_smoothing_off=20.0
    )
    sharp = dftd3(atoms.positions, atoms.numbers, **NUMBERS, **given)
    expected = program(atoms, PROGRAM["bj"](method="pbe"), 20.0, 20.0)
    close([sharp[0], sharp[1], sharp[3]], expected)
    # less of what attracts; coordination numbers are not smoothed
    assert float(sharp[0]) < float(energy) < 0.9 * float(sharp[0])
    close([coordination], [sharp[2]], 0.0)
    whole = d3_dispersion(
        **atoms.arguments(),
        damping=PBE,
        parameters=parameters(),
        cutoff=20.0,
        coordination_cutoff=20.0,
        smoothing=4.0,
        compute_forces=True,
        compute_virial=True,
    )
    # that function smooths the coordination numbers as well, which is a small difference
    torch.testing.assert_close(energy[0], whole[0].sum(), rtol=1e-4, atol=0.0)
    torch.testing.assert_close(virial, whole[3], rtol=1e-2, atol=1e-5)
    assert forces.shape == (n, 3)


def test_defaults_of_clients_do_not_smooth():
    """On and off at 1e10, given or not."""
    atoms = molecule("H2O")
    near = dict(zip(("neighbor_list", "neighbor_ptr"), neighbor_list(atoms.positions, 40.0, return_neighbor_list=True)))
    given = {**NUMBERS, **near, "d3_params": parameters()}
    expected = dftd3(*atoms[:2], **given)
    for options in (
        {"s5_smoothing_on": 1e10, "s5_smoothing_off": 1e10},
        {"s5_smoothing_on": 50.0},
        {"s5_smoothing_off": 1e11},
    ):
        close(dftd3(*atoms[:2], **given, **options), expected, 0.0)


def test_positional_arguments():
    """In the order of the signature."""
    atoms = molecule("H2O")
    pairs, ptr = neighbor_list(atoms.positions, 40.0, return_neighbor_list=True)
    d3 = parameters()
    none = [None] * 4
    found = dftd3(
        atoms.positions, atoms.numbers, PBE.a1, PBE.a2, PBE.s8, 16.0, -4.0, 1.0, 1e10, 1e10, None, d3, *none,
        None, None, None, None, pairs, ptr, None, True, 1, "cpu",
    )  # fmt: skip
    expected = program(atoms, PROGRAM["bj"](method="pbe"), 40.0, 40.0)
    close([found[0], found[1], found[3]], expected)


def test_steepness_of_the_counting_is_used():
    """k1 and k3 are arguments, not decoration."""
    atoms = molecule("H2O")
    pairs, ptr = neighbor_list(atoms.positions, 40.0, return_neighbor_list=True)
    given = {**NUMBERS, "d3_params": parameters(), "neighbor_list": pairs, "neighbor_ptr": ptr}
    energy, _, coordination = dftd3(*atoms[:2], **given)
    for name, value in (("k1", 12.0), ("k3", -2.0)):
        other, _, counted = dftd3(*atoms[:2], **given, **{name: value})
        assert abs(float(other - energy)) > 1e-7
        assert (float((counted - coordination).abs().max()) > 1e-3) == (name == "k1")


def test_separate_tables_are_taken_apart_once_until_they_change():
    """Clients pass the four tables in every call; a table that is changed in place is another one."""
    x = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 7.0]], dtype=torch.float64)
    numbers = torch.tensor([18, 36], dtype=torch.int32)
    pairs = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32)
    made = D3Parameters.load()
    tables = {
        "covalent_radii": made.rcov.clone(),
        "r4r2": made.r4r2.clone(),
        "c6_reference": made.c6ab.clone(),
        "coord_num_ref": made.cn_ref.clone(),
    }

    def energy():
        return dftd3(x, numbers, 0.4289, 4.4407, 0.7875, neighbor_list=pairs, **tables)[0]

    first = energy()
    assert torch.equal(energy(), first)
    tables["c6_reference"] *= 2.0
    torch.testing.assert_close(energy(), 2.0 * first)
    with torch.inference_mode():
        tables["covalent_radii"] = tables["covalent_radii"].clone()
    torch.testing.assert_close(energy(), 2.0 * first)
    tables["r4r2"] = tables["r4r2"] * 1.1
    assert not torch.equal(energy(), 2.0 * first)
