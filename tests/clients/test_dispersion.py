"""The calls of DFT-D3 that existing clients make, word for word as they make them (../shared/clients.md).

They work in atomic units, hold the tables of 94 elements with five reference molecules each, and take what comes back
by its place: energies of systems, forces, coordination numbers, and the virial if they asked for it.
"""

import dataclasses
import importlib
import inspect
import math

import pytest
import torch

from nvalchemiops.constants import BOHR_IN_ANGSTROM
from nvalchemiops.torch.interactions.dispersion import D3Parameters, d3_dispersion, dftd3
from nvalchemiops.torch.neighbors import batch_cell_list, batch_naive_neighbor_list, neighbor_list
from tests.clients.test_signatures import check_signature
from tests.support.comparing import within
from tests.support.molecules import (
    F64,
    PBE,
    PROGRAM,
    Atoms,
    batch,
    find_pairs,
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
    within([energy, forces], expected[:2], 1e-8)
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
    within([part.to(F64) for part in (energy, forces, virial)], expected, 1e-7 if dtype == F64 else 3e-6)
    volume = torch.linalg.det(cell).abs()
    assert bool((-virial / volume[:, None, None]).isfinite().all())


# -- AIMNet ---------------------------------------------------------------------------------------


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
        {"s5_smoothing_on": 0.0},
        {"s5_smoothing_on": math.inf, "s5_smoothing_off": math.inf},
    ):
        within(dftd3(*atoms[:2], **given, **options), expected, 0.0)


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
    within([found[0], found[1], found[3]], expected)


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


# -- fairchem -------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing_fraction", [0.0, 0.2])
@pytest.mark.parametrize("periodic", [True, False])
def test_fairchem_while_atoms_move(periodic, smoothing_fraction):
    """Parameters of a file, moved; then the list of each step in the memory of the first, in inference mode."""
    names = {"covalent_radii": "rcov", "r4r2": "r4r2", "c6_reference": "c6ab", "coord_num_ref": "cn_ref"}
    file = {names[name]: table for name, table in tables().items()}
    d3_params = D3Parameters(**file).to(device=torch.device("cpu"), dtype=torch.float32)
    atoms = solid("dry ice") if periodic else molecule("CH3CH2OH")
    bohr = 1.0 / BOHR_IN_ANGSTROM
    positions = (atoms.positions * BOHR_IN_ANGSTROM).float()
    cell = (atoms.cell * BOHR_IN_ANGSTROM).float() if periodic else None
    cutoff, n, kept = 9.0, len(positions), {}
    for step in range(3):
        positions += 0.01 * step
        positions[0, 0] += 0.02 * step
        found = neighbor_list(
            positions=positions,
            cutoff=cutoff,
            cell=cell,
            pbc=atoms.pbc if periodic else None,
            half_fill=False,
            fill_value=n,
            **kept,
        )
        kept = {"neighbor_matrix": found[0], "num_neighbors": found[1]}
        kept |= {"neighbor_matrix_shifts": found[2]} if periodic else {}
        with torch.inference_mode():
            output = dftd3(
                positions=positions * bohr,
                numbers=atoms.numbers,
                a1=PBE.a1,
                a2=PBE.a2,
                s6=PBE.s6,
                s8=PBE.s8,
                k1=16.0,
                k3=-4.0,
                s5_smoothing_on=cutoff * (1.0 - smoothing_fraction) * bohr,
                s5_smoothing_off=cutoff * bohr,
                fill_value=n,
                d3_params=d3_params,
                cell=cell * bohr if periodic else None,
                neighbor_matrix=found[0],
                neighbor_matrix_shifts=found[2] if periodic else None,
                compute_virial=periodic,
                num_systems=1,
            )
        now = atoms._replace(positions=positions.double() * bohr)
        expected = program(now, PROGRAM["bj"](method="pbe"), cutoff * bohr, cutoff * bohr)
        assert len(output) == 3 + periodic
        if smoothing_fraction:  # less of what attracts, or the same for a molecule within the inner radius
            least = 1.0 if periodic else 1.0 - 1e-6
            assert least < float(expected.energy) / float(output[0]) < 1.2
        else:
            within([part.double() for part in output[:2]], expected[:2], 3e-6)
            if periodic:
                within([output[3].double()], [expected.virial], 1e-5)


def test_equal_ends_of_the_smoothing_cut_sharply():
    """The pair at this distance, and beyond, does not count; the one just before counts fully."""
    numbers, end = torch.tensor([18, 18], dtype=torch.int32), 8.0
    pairs = {"neighbor_list": torch.tensor([[0, 1], [1, 0]], dtype=torch.int32), "d3_params": parameters()}

    def energy(r, **smoothing):
        x = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, r]], dtype=F64)
        return float(dftd3(x, numbers, **NUMBERS, **pairs, **smoothing)[0])

    for r, counts in ((end - 1e-12, True), (end, False), (end + 1e-12, False), (20.0, False), (4.0, True)):
        assert energy(r, s5_smoothing_on=end, s5_smoothing_off=end) == (energy(r) if counts else 0.0)
    assert energy(30.0, s5_smoothing_on=1e10, s5_smoothing_off=1e10) == energy(30.0) != 0.0
    half_way = energy(end / 2, s5_smoothing_on=0.0, s5_smoothing_off=end)
    assert half_way == pytest.approx(0.5 * energy(end / 2), rel=1e-12)
    with pytest.raises(ValueError, match=r"`s5_smoothing_off` = 7.0 must not be smaller"):
        energy(4.0, s5_smoothing_on=end, s5_smoothing_off=7.0)


# -- parameters, shifts, lists and systems in the forms that clients have ---------------------------


@dataclasses.dataclass
class OtherParameters:
    """Of another package."""

    rcov: torch.Tensor
    r4r2: torch.Tensor
    c6ab: torch.Tensor
    cn_ref: torch.Tensor


@pytest.mark.parametrize("form", ["dict", "dict of half the digits", "dataclass", "positional"])
def test_parameters_of_other_packages(form):
    atoms, given = molecule("CH3COOH"), tables(torch.float64)
    near = dict(zip(("neighbor_list", "neighbor_ptr"), neighbor_list(atoms.positions, 40.0, return_neighbor_list=True)))
    expected = dftd3(*atoms[:2], **NUMBERS, **near, **given)
    values = dict(zip(("rcov", "r4r2", "c6ab", "cn_ref"), given.values()))
    if form == "dict of half the digits":
        values["c6ab"] = values["c6ab"].float()
    made = values if "dict" in form else OtherParameters(**values)
    if form == "positional":
        made = D3Parameters(*given.values(), 5)
    for _ in range(2):
        found = dftd3(*atoms[:2], **NUMBERS, **near, d3_params=made)
        within(found, expected, 1e-9 if "digits" in form else 0.0)
    del values["r4r2"]
    with pytest.raises(TypeError, match=r"`d3_params`.*without r4r2"):
        dftd3(*atoms[:2], **NUMBERS, **near, d3_params=values)


@pytest.mark.parametrize("form", ["matrix", "list"])
def test_shifts_without_a_cell(form):
    """Zeros, which lists of molecules have in some clients. Others have no answer."""
    atoms = molecule("CH3COOH")
    given = {**NUMBERS, "d3_params": parameters().states([1, 6, 8])}
    if form == "matrix":
        near = {"neighbor_matrix": neighbor_list(atoms.positions, 40.0, max_neighbors=12)[0]}
        name, shifts = "neighbor_matrix_shifts", torch.zeros((8, 12, 3), dtype=torch.int32)
    else:
        pairs, ptr = neighbor_list(atoms.positions, 40.0, return_neighbor_list=True)
        near, name = {"neighbor_list": pairs, "neighbor_ptr": ptr}, "unit_shifts"
        shifts = torch.zeros((pairs.shape[1], 3), dtype=torch.int32)
    expected = dftd3(*atoms[:2], **given, **near, compute_virial=True)

    def evaluate(shifts):
        return dftd3(*atoms[:2], **given, **near, compute_virial=True, **{name: shifts})

    call = torch.compile(evaluate, backend="aot_eager", fullgraph=True)
    for function in (evaluate, call):
        within(function(shifts), expected, 0.0)
    wrong = shifts.clone()
    wrong.view(-1, 3)[2, 1] = 1
    with pytest.raises(ValueError, match=rf"`cell` is needed with `{name}`"):
        evaluate(wrong)
    assert bool(call(wrong)[0].isnan().all())  # where values cannot be looked at
    if form == "matrix":
        shifts[:, 7:] = 5  # in the padding
        within(evaluate(shifts), expected, 0.0)


def int32(*shape):
    return torch.zeros(shape, dtype=torch.int32)


NOBODY = {
    "list": {"neighbor_list": int32(2, 0)},
    "list and pointers": {"neighbor_list": int32(2, 0), "neighbor_ptr": int32(4)},
    "pointers of nothing": {"neighbor_list": int32(2, 0), "neighbor_ptr": int32(1)},
    "matrix without columns": {"neighbor_matrix": int32(3, 0)},
    "matrix without rows": {"neighbor_matrix": int32(0, 8)},
    "matrix of nothing": {"neighbor_matrix": int32(0, 0)},
    "with shifts": {"neighbor_matrix": int32(0, 8), "neighbor_matrix_shifts": int32(0, 8, 3)},
    "list with shifts": {"neighbor_list": int32(2, 0), "neighbor_ptr": int32(1), "unit_shifts": int32(0, 3)},
}


@pytest.mark.parametrize("form", NOBODY)
@pytest.mark.parametrize("periodic", [False, True])
@pytest.mark.parametrize("n_atoms", [0, 3])
def test_lists_without_pairs(n_atoms, periodic, form, dtype):
    atoms, near = molecule("H2O"), dict(NOBODY[form])
    if n_atoms == 0 and form == "list and pointers":
        near["neighbor_ptr"] = int32(1)
    if n_atoms == 0 and form == "matrix without columns":
        near["neighbor_matrix"] = int32(0, 0)
    if periodic and "shifts" not in form:
        is_list, shape = "neighbor_list" in near, near.get("neighbor_matrix", int32(0)).shape
        near |= {"unit_shifts": int32(0, 3)} if is_list else {"neighbor_matrix_shifts": int32(*shape, 3)}
    cell = 9.0 * torch.eye(3, dtype=dtype).expand(2, 3, 3) if periodic else None
    found = dftd3(
        atoms.positions[:n_atoms].to(dtype),
        atoms.numbers[:n_atoms],
        **NUMBERS,
        d3_params=parameters(),
        batch_idx=int32(n_atoms),
        num_systems=2,
        cell=cell,
        compute_virial=True,
        **near,
    )
    assert [part.shape for part in found] == [(2,), (n_atoms, 3), (n_atoms,), (2, 3, 3)]
    assert all(part.dtype == dtype and not part.any() for part in found)


def test_each_atom_as_a_system():
    """For energies and virials of atoms some clients number systems by atoms, and give each its cell."""
    atoms, n = solid("dry ice"), 12
    matrix, _, shifts = neighbor_list(atoms.positions, 20.0, atoms.cell, fill_value=-1)
    near = {"neighbor_matrix": matrix, "neighbor_matrix_shifts": shifts, "fill_value": -1, "compute_virial": True}
    near |= NUMBERS | {"d3_params": parameters()}
    energy, forces, _, virial = dftd3(*atoms[:2], **near, cell=atoms.cell)
    each = {"batch_idx": torch.arange(n, dtype=torch.int32), "cell": atoms.cell.expand(n, 3, 3), "num_systems": n}
    of_atoms = dftd3(*atoms[:2], **near, **each)
    within([of_atoms[0].sum(0, True), of_atoms[1], of_atoms[3].sum(0, True)], [energy, forces, virial], 1e-15)


@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_dtypes_of_clients(integers, dtype):
    """Atoms of both systems mixed, padding atoms with number 0 among them, a padding index that is an atom's."""
    systems = [molecule("CH3CH2OH"), molecule("H2O")]
    together = batch(*systems)
    n = len(together.numbers)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    # one padding atom in the middle of the others, one at the end, whose number fills the rows
    x = torch.cat([together.positions[order], torch.zeros(2, 3, dtype=F64)])
    numbers = torch.cat([together.numbers[order], int32(2)])
    idx = torch.cat([together.batch_idx[order], int32(2)])
    real = torch.arange(n + 2) < n
    middle = torch.tensor([0, 1, 2, n, *range(3, n), n + 1])
    x, numbers, idx, real = x[middle], numbers[middle], idx[middle], real[middle]
    pairs = find_pairs(Atoms(x, numbers, batch_idx=idx), 40.0)
    matrix = torch.full((n + 2, n + 2), n + 1, dtype=integers)
    for i in range(n + 1):
        row = pairs.j[pairs.i == i].to(integers)
        matrix[i, : len(row)] = row
    energy, forces, coordination, virial = dftd3(
        positions=x.to(dtype),
        numbers=numbers.to(integers),
        **NUMBERS,
        **tables(),
        neighbor_matrix=matrix,
        fill_value=n + 1,
        batch_idx=idx.to(integers),
        compute_virial=True,
        num_systems=2,
        device="cpu",
    )
    expected = program_batch(systems, PROGRAM["bj"](method="pbe"), 40.0, 40.0)
    forces_there = torch.zeros_like(expected.forces).index_copy(0, order, forces[real].to(F64))
    tolerance = 1e-7 if dtype == F64 else 1e-6
    within([energy.to(F64), forces_there, virial.to(F64)], expected, tolerance)
    assert not forces[~real].any() and not coordination[~real].any()


# -- graphs ---------------------------------------------------------------------------------------


def test_one_cell_for_two_systems_in_a_graph_is_seen_by_the_kernel():
    """Where numbers of systems cannot be read."""
    atoms, states = batch(solid("silicon"), solid("silicon")), parameters().states([14])
    found = neighbor_list(*atoms[:1], 15.0, atoms.cell, atoms.pbc, atoms.batch_idx, return_neighbor_list=True)
    near = dict(zip(("neighbor_list", "neighbor_ptr", "unit_shifts"), found))

    def evaluate(cell):
        return dftd3(*atoms[:2], **NUMBERS, d3_params=states, **near, cell=cell, batch_idx=atoms.batch_idx)

    call = torch.compile(evaluate, backend="aot_eager", fullgraph=True)
    within(call(atoms.cell), evaluate(atoms.cell), 1e-15)
    with pytest.raises(ValueError, match="`batch_idx`"):
        call(atoms.cell[:1])


def test_compiled_with_separate_tables():
    """As orb-models calls it: with graph breaks where atomic numbers are read, in inference mode."""
    call, given = torch.compile(dftd3, dynamic=True, backend="eager"), tables()
    for atoms in (solid("dry ice"), solid("silicon")):
        matrix, counts, shifts = neighbor_list(atoms.positions, 15.0, atoms.cell, atoms.pbc, atoms.systems)
        widest = counts.max()
        options = {
            "positions": atoms.positions,
            "numbers": atoms.numbers,
            "cell": atoms.cell,
            "neighbor_matrix": matrix[:, :widest],
            "batch_idx": atoms.systems,
            "neighbor_matrix_shifts": shifts[:, :widest, :],
            **given,
            **NUMBERS,
            "s6": 1.0,
            "k1": 16.0,
            "k3": -4.0,
            "s5_smoothing_on": 1e10 / BOHR_IN_ANGSTROM,
            "s5_smoothing_off": 1e10 / BOHR_IN_ANGSTROM,
            "compute_virial": True,
        }
        with torch.inference_mode():
            within(call(**options), dftd3(**options), 1e-15)


@pytest.mark.parametrize("place", [0.0, torch.nan, torch.inf, -torch.inf])
def test_padding_atoms_may_be_anywhere(place):
    """They have number 0 and are nobody's neighbors: what a client's buffer has there does not matter."""
    atoms = molecule("C2H6")
    n = len(atoms.numbers)
    matrix, _ = neighbor_list(atoms.positions, 20.0)
    expected = dftd3(atoms.positions, atoms.numbers, **NUMBERS, d3_params=parameters(), neighbor_matrix=matrix)
    x = torch.cat([atoms.positions, torch.full((1, 3), place, dtype=F64)]).requires_grad_()
    numbers = torch.cat([atoms.numbers, atoms.numbers.new_zeros(1)])
    padded = torch.cat([matrix, torch.full_like(matrix[:1], n)])
    given = {"d3_params": parameters(), "neighbor_matrix": padded, "fill_value": n, "num_systems": 1}
    energy, forces, coordination = dftd3(x, numbers, **NUMBERS, **given)
    torch.testing.assert_close((energy, forces[:n], coordination[:n]), expected, rtol=1e-12, atol=1e-15)
    (slope,) = torch.autograd.grad(energy.sum(), x)
    assert not forces[n].any() and not coordination[n].any() and not slope[n].any()
    # also where the library searches
    x = x.detach()
    searched = d3_dispersion(x, numbers, PBE, parameters(), cutoff=20.0)[0]
    torch.testing.assert_close(searched.sum().reshape(1), expected[0], rtol=1e-9, atol=0.0)
