"""Tables of any form: C6 of each pair of atoms as the papers say it, where no coefficients of atoms give the same.

Clients draw tables at random to test themselves, and fit tables of their own: `c6ab` that is not symmetric, reference
molecules that are others for each partner, or that are missing for some partners.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch

from nvalchemiops.locks import Kept
from nvalchemiops.torch.interactions.dispersion import DFTD3, D3Parameters, d3_dispersion, damping_parameters, dftd3
from nvalchemiops.torch.interactions.dispersion import pair_tables as pair_tables_module
from nvalchemiops.torch.interactions.dispersion import reference_data as parameters_module
from nvalchemiops.torch.neighbors import neighbor_list
from tests.reference import dispersion as slow
from tests.support.comparing import within
from tests.support.molecules import F64, PBE, Atoms, as_list, batch, find_pairs, molecule, parameters, solid

ZERO = damping_parameters("b3lyp", "zerom")
DAMPINGS = {"rational": PBE, "zero": ZERO}
BOTH = pytest.mark.parametrize("kind", DAMPINGS)
CUTOFFS = {"cutoff": 12.0, "coordination_cutoff": 9.0, "smoothing": 3.0}
EVERYTHING = {"compute_forces": True, "compute_virial": True}
LAST, MESH = 26, 5


def draw(form="any"):
    """Tables up to iron."""
    generator = torch.Generator().manual_seed(3)

    def rand(*shape):
        return torch.rand(*shape, generator=generator, dtype=F64)

    n = LAST + 1
    tables = {
        "rcov": 1.0 + rand(n),
        "r4r2": 2.0 + 4.0 * rand(n),
        "c6ab": 5.0 + 45.0 * rand(n, n, MESH, MESH),
        "cn_ref": 4.0 * rand(n, n, MESH, MESH),
        "r0ab": 4.0 + 2.0 * rand(n, n),
    }
    tables["r0ab"] = 0.5 * (tables["r0ab"] + tables["r0ab"].mT)
    transposed = tables["c6ab"].permute(1, 0, 3, 2)
    if form != "any":
        tables["c6ab"] = 0.5 * (tables["c6ab"] + transposed)
    if form == "asymmetric":
        tables["c6ab"] = tables["c6ab"] + 0.2 * (5.0 + 45.0 * rand(n, n, MESH, MESH))
    if form in ("asymmetric", "holes"):
        tables["cn_ref"] = 4.0 * rand(n, 1, MESH, 1).expand(n, n, MESH, MESH)
    if form == "holes":  # which are not those of an element, and without coordination numbers
        holes = rand(n, n, MESH, MESH) < 0.4
        holes = (holes | holes.permute(1, 0, 3, 2)) & ~torch.eye(n, dtype=torch.bool)[:, :, None, None]
        tables["c6ab"] = tables["c6ab"].masked_fill(holes, 0.0)
        tables["cn_ref"] = tables["cn_ref"].masked_fill(holes, torch.nan)
    return tables


FORMS = ["any", "by partner", "asymmetric", "holes"]


def reference(atoms, tables, damping, near=13.0, vectors=None):
    """Energies of atoms and coordination numbers, as functions of positions and cell."""
    counts = tables["cn_ref"].nan_to_num()
    data = slow.Data(tables["rcov"], tables["r4r2"], tables["c6ab"], counts, tables["r0ab"])
    x, cell = vectors if vectors is not None else (atoms.positions, atoms.cell)
    cutoffs = slow.Cutoffs(*CUTOFFS.values())
    return slow.dispersion(x, cell, atoms.numbers, data, damping, find_pairs(atoms, near), cutoffs)


def with_slopes(atoms, tables, damping):
    """The same as `d3_dispersion` returns it."""
    x = atoms.positions.clone().requires_grad_()
    n_systems = 1 if atoms.batch_idx is None else int(atoms.batch_idx.max()) + 1
    strain = torch.zeros(n_systems, 3, 3, dtype=F64, requires_grad=True)
    deform = torch.eye(3, dtype=F64) + strain
    moved = (deform[atoms.systems.long()] @ x.unsqueeze(2)).squeeze(2)
    cell = None if atoms.cell is None else atoms.cell @ deform.mT
    found = reference(atoms, tables, damping, vectors=(moved, cell))
    slopes = torch.autograd.grad(found.energies.sum(), (x, strain))
    return found.energies.detach(), -slopes[0], found.coordination.detach(), -slopes[1]


def ice():
    """Two water molecules in a small skewed cell."""
    x = torch.cat([molecule("H2O").positions, molecule("H2O").positions + torch.tensor([3.1, 3.3, 2.9], dtype=F64)])
    x = x + 0.2 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=F64)
    cell = torch.tensor([[[7.5, 0.0, 0.0], [1.5, 7.0, 0.0], [-1.0, 1.2, 6.5]]], dtype=F64)
    return Atoms(x, molecule("H2O").numbers.repeat(2), cell, torch.ones(1, 3, dtype=torch.bool))


def near(atoms):
    return as_list(find_pairs(atoms, 13.0), len(atoms.numbers), atoms.cell is not None)


@pytest.mark.parametrize("form", FORMS)
@BOTH
def test_energies_and_slopes_are_those_of_the_papers(kind, form):
    tables = draw(form)
    for atoms in (molecule("CH3CH2OH"), ice()):
        found = d3_dispersion(
            **atoms.arguments(), damping=DAMPINGS[kind], parameters=D3Parameters(**tables), **CUTOFFS, **EVERYTHING
        )
        expected = with_slopes(atoms, tables, DAMPINGS[kind])
        torch.testing.assert_close(list(found), list(expected), rtol=1e-11, atol=1e-14)


def test_both_orders_of_a_pair_count_half():
    """By the formula of each: the sum is that of the mean table, since C6 is a mean over the same weights."""
    tables, atoms = draw("asymmetric"), molecule("CH3CH2OH")
    mean = 0.5 * (tables["c6ab"] + tables["c6ab"].permute(1, 0, 3, 2))
    energies = [
        d3_dispersion(*atoms[:2], PBE, D3Parameters(**tables | {"c6ab": c6ab}), **CUTOFFS)[0].sum()
        for c6ab in (tables["c6ab"], mean)
    ]
    assert D3Parameters(**tables | {"c6ab": mean}).states([1, 6, 8]).pair_c6 is None
    torch.testing.assert_close(energies[0], energies[1], rtol=1e-13, atol=0.0)


@BOTH
@pytest.mark.parametrize("smoothing", [None, 3.0])
def test_tables_that_factorise_give_the_same_either_way(kind, smoothing, monkeypatch):
    """The published ones, pair by pair, which they need not be."""
    options = CUTOFFS | {"smoothing": smoothing, "damping": DAMPINGS[kind]} | EVERYTHING
    systems = [molecule("CH3CH2OH"), solid("dry ice"), batch(solid("rock salt"), solid("silicon"))]
    expected = [d3_dispersion(**atoms.arguments(), parameters=parameters(), **options) for atoms in systems]
    assert parameters().states([6, 8]).pair_c6 is None
    monkeypatch.setattr(parameters_module, "_factors", lambda *_: None)
    monkeypatch.setattr(parameters_module, "_prepared", Kept(parameters_module.MOST_STATES))
    general = parameters().to(dtype=F64)
    assert general.states([6, 8]).pair_c6 is not None
    for atoms, values in zip(systems, expected):
        within(d3_dispersion(**atoms.arguments(), parameters=general, **options), values, 1e-13)


def test_a_list_of_pairs_that_is_taken_in_parts(monkeypatch):
    """The weights of a few at a time."""
    atoms, p = ice(), D3Parameters(**draw())
    given = {**atoms.arguments(), "damping": PBE, "parameters": p, **CUTOFFS, **EVERYTHING, **near(atoms)}
    expected = d3_dispersion(**given)
    monkeypatch.setattr(pair_tables_module, "PAIRS_AT_ONCE", 7)
    within(d3_dispersion(**given), expected, 0.0)


@BOTH
def test_second_and_third_derivatives(kind):
    """Of the energy by positions and cell at once, against the papers; and of all outputs together."""
    atoms, tables = ice(), draw()
    p, damping, pairs = D3Parameters(**tables), DAMPINGS[kind], near(ice())
    inputs = (atoms.positions, atoms.cell)
    directions = [torch.randn(t.shape, generator=torch.Generator().manual_seed(5), dtype=F64) for t in inputs]

    def ours(*vectors):
        return d3_dispersion(vectors[0], atoms.numbers, damping, p, vectors[1], **pairs, **CUTOFFS)[0].sum()

    def theirs(*vectors):
        return reference(atoms, tables, damping, vectors=vectors).energies.sum()

    results = []
    for energy in (ours, theirs):
        leaves = [t.clone().requires_grad_() for t in inputs]
        slopes = torch.autograd.grad(energy(*leaves), leaves, create_graph=True)
        found = [*slopes]
        for _ in range(2):
            along = sum((s * d).sum() for s, d in zip(slopes, directions))
            slopes = torch.autograd.grad(along, leaves, create_graph=True)
            found += slopes
        results.append([t.detach() for t in found])
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-12)

    def outputs(*vectors):
        given = {"cell": vectors[1], **pairs, **CUTOFFS, **EVERYTHING}
        found = d3_dispersion(vectors[0], atoms.numbers, damping, p, **given)
        return tuple(1e3 * part for part in found)

    leaves = [t.clone().requires_grad_() for t in inputs]
    assert torch.autograd.gradcheck(outputs, leaves, eps=1e-5, atol=1e-6, fast_mode=True)


@pytest.mark.parametrize("form", ["list", "half list", "matrix", "negative padding", "searched"])
def test_any_form_of_neighbors(form):
    atoms = batch(ice(), ice()._replace(cell=1.1 * ice().cell))
    p, system = D3Parameters(**draw()), (atoms.cell, atoms.pbc, atoms.batch_idx)
    half = form == "half list"
    options = {}
    if "list" in form:
        names = ("neighbor_list", "neighbor_ptr", "neighbor_shifts")
        found = neighbor_list(atoms.positions, 14.0, *system, half_fill=half, return_neighbor_list=True)
        options = dict(zip(names, found)) | {"half_list": half}
    elif form != "searched":
        fill = -1 if form == "negative padding" else None
        matrix, _, shifts = neighbor_list(atoms.positions, 14.0, *system, fill_value=fill, max_neighbors=900)
        options = {"neighbor_matrix": matrix, "neighbor_matrix_shifts": shifts, "fill_value": fill}
    found = d3_dispersion(**atoms.arguments(), damping=PBE, parameters=p, **CUTOFFS, **EVERYTHING, **options)
    within(found, with_slopes(atoms, draw(), PBE), 1e-12)


def test_padding_atoms_and_atoms_alone():
    atoms, p = molecule("CH3CH2OH"), D3Parameters(**draw())
    expected = d3_dispersion(*atoms[:2], PBE, p, cutoff=20.0, compute_forces=True)
    far = torch.tensor([[900.0, 0.0, 0.0]], dtype=F64)
    x = torch.cat([atoms.positions[:3], atoms.positions[:1] + 0.5, atoms.positions[3:], far])
    numbers = torch.cat([atoms.numbers[:3], 0 * atoms.numbers[:1], atoms.numbers[3:], atoms.numbers[:1]])
    real = torch.arange(len(x)) != 3
    found = d3_dispersion(x, numbers, PBE, p, cutoff=20.0, compute_forces=True)
    for part, values in zip(found, expected):
        within([part[real][:-1]], [values], 1e-15)
        assert not part[~real].any() and not part[-1].any()


def test_elements_without_reference_molecules():
    """One alone is an error; a pair without any has no dispersion, as the table says."""
    tables = draw()
    tables["c6ab"][6], tables["c6ab"][:, 6] = 0.0, 0.0
    p = D3Parameters(**tables)
    assert p.elements == tuple(z for z in range(1, LAST + 1) if z != 6)
    with pytest.raises(ValueError, match=r"`numbers`.*elements \[6\]"):
        d3_dispersion(*molecule("CO2")[:2], PBE, p, cutoff=20.0)
    tables = draw()
    tables["c6ab"][1, 9], tables["c6ab"][9, 1] = 0.0, 0.0
    energies, forces, _ = d3_dispersion(
        *molecule("HF")[:2], PBE, D3Parameters(**tables), cutoff=20.0, compute_forces=True
    )
    assert not energies.any() and not forces.any()


def test_an_element_that_is_known_from_other_elements_only():
    """What is kept for it depends on the rest of the table."""
    tables = draw()
    tables["c6ab"][6, 6] = 0.0
    D3Parameters(**tables).states([6])
    tables["c6ab"][6], tables["c6ab"][:, 6] = 0.0, 0.0
    with pytest.raises(ValueError, match=r"elements \[6\]"):
        D3Parameters(**tables).states([6])


def test_unlike_atoms_may_attract_each_other_far_more_than_like_ones():
    """Coefficients of atoms would give few digits of the C6 of like ones."""
    c6 = parameters().c6ab.clone()
    c6[1, 9] *= 1e6
    c6[9, 1] *= 1e6
    tables = (parameters(), dataclasses.replace(parameters(), c6ab=c6))
    for name, factor in (("H2", 1.0), ("HF", 1e6)):
        weak, strong = (d3_dispersion(*molecule(name)[:2], PBE, p.states([1, 9]), cutoff=20.0)[0] for p in tables)
        torch.testing.assert_close(strong, factor * weak, rtol=1e-12, atol=0.0)


def test_three_body_terms_need_coefficients_of_atoms():
    with pytest.raises(ValueError, match=r"`s9`.*factorise"):
        d3_dispersion(*molecule("H2O")[:2], PBE, D3Parameters(**draw()), cutoff=20.0, s9=1.0)


# -- graphs, transforms, modules ------------------------------------------------------------------


@pytest.mark.later
def test_compiled_for_several_sizes():
    states = D3Parameters(**draw()).states([1, 6, 8])

    def outputs(x, numbers, idx, pairs):
        options = {"batch_idx": idx, "num_systems": 2, **CUTOFFS, **EVERYTHING}
        return d3_dispersion(x, numbers, PBE, states, neighbor_list=pairs, **options)

    call = torch.compile(outputs, fullgraph=True, backend="aot_eager", dynamic=True)
    for names in (("CH3OH", "H2O"), ("CH3CH2OH", "CH4")):
        atoms = batch(*(molecule(name) for name in names))
        results = []
        for function in (outputs, call):
            x = atoms.positions.clone().requires_grad_()
            found = function(x, atoms.numbers, atoms.batch_idx, near(atoms)["neighbor_list"])
            loss = sum(part.square().sum() for part in found)
            results.append([*(part.detach() for part in found), *torch.autograd.grad(loss, x)])
        torch.testing.assert_close(results[1], results[0], rtol=1e-11, atol=1e-14)


def test_many_structures_by_vmap():
    atoms, states = molecule("H2O"), D3Parameters(**draw()).states([1, 8])
    pairs = near(atoms)
    many = atoms.positions + 0.1 * torch.randn(3, 3, 3, generator=torch.Generator().manual_seed(1), dtype=F64)

    def forces(x):
        return d3_dispersion(x, atoms.numbers, PBE, states, **pairs, compute_forces=True)[1]

    within(torch.func.vmap(forces)(many), [forces(x) for x in many], 1e-15)
    hessian = -torch.func.jacrev(forces)(many[0])

    def energy(x):
        return d3_dispersion(x, atoms.numbers, PBE, states, **pairs)[0].sum()

    within([hessian], [torch.func.hessian(energy)(many[0])], 1e-12)


def test_the_module_takes_such_tables():
    atoms, p = molecule("CH3CH2OH"), D3Parameters(**draw())
    model = DFTD3("pbe", [1, 6, 8], p, trainable=True, **CUTOFFS)
    expected = d3_dispersion(*atoms[:2], PBE, p, **CUTOFFS)
    within(model(*atoms[:2]), expected, 1e-15)
    within(model.float()(*atoms[:2]), expected, 1e-8)  # damping parameters are rounded, tables are not


# -- the class ------------------------------------------------------------------------------------


def test_parameters_as_clients_handle_them():
    """fairchem: made of float32 tensors from a file, moved, asked."""
    given = {name: table.float() for name, table in draw().items() if name != "r0ab"}
    p = D3Parameters(**given).to(device=torch.device("cpu"), dtype=torch.float32)
    assert isinstance(p, D3Parameters) and dataclasses.is_dataclass(p)
    assert p.device == torch.device("cpu") and p.max_z == LAST and p.interp_mesh == MESH
    assert [field.name for field in dataclasses.fields(p)][:5] == ["rcov", "r4r2", "c6ab", "cn_ref", "interp_mesh"]
    for name, table in given.items():
        assert torch.equal(getattr(p, name), table) and getattr(p, name).dtype == torch.float32
    for other in (p.to("cpu", torch.float64), p.to(dtype=F64), D3Parameters(*given.values()).to()):
        assert other.max_z == LAST and other is not p
    assert p.to("meta").device.type == "meta"
    assert p.to(dtype=F64).c6ab.dtype == F64
    other = dataclasses.replace(p, r4r2=2.0 * p.r4r2)
    torch.testing.assert_close(other.r4r2, 2.0 * p.r4r2)
    with pytest.raises(ValueError, match="`c6ab`"):
        D3Parameters(*given.values(), 7)


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda table: table.mul_(2.0),
    "by NumPy": lambda table: np.multiply(table.numpy(), 2.0, out=table.numpy()),
    "as data": lambda table: table.data.mul_(2.0),
    "by dlpack": lambda table: torch.from_dlpack(table).mul_(2.0),
    "other data": lambda table: setattr(table, "data", 2.0 * table),
}
EACH_CHANGE = pytest.mark.parametrize("change", CHANGES)


@EACH_CHANGE
@pytest.mark.parametrize("of", ["parameters", "tables"])
def test_tables_that_are_changed_after_their_use(change, of):
    p, atoms = D3Parameters(**draw()), molecule("H2O")

    def energy():
        given = p if of == "parameters" else {n: getattr(p, n) for n in ("rcov", "r4r2", "c6ab", "cn_ref")}
        return dftd3(*atoms[:2], 0.4289, 4.4407, 0.7875, d3_params=given, cutoff=20.0)[0]

    before = energy()
    assert torch.equal(energy(), before)
    CHANGES[change](p.c6ab)
    within(energy(), 2.0 * before, 1e-15)
    p.c6ab = 0.25 * p.c6ab
    within(energy(), 0.5 * before, 1e-15)


@EACH_CHANGE
@pytest.mark.parametrize("name", ["radii", "z"])
def test_states_that_are_changed_after_their_use(change, name):
    module, atoms = DFTD3("pbe", [1, 6, 8]), molecule("H2O")
    before = module(*atoms[:2])[0]
    table = getattr(module.states, name)
    CHANGES[change](table)
    after = module(*atoms[:2])[0]
    assert not torch.equal(after, before)
    copied = module.states._replace(**{name: table.clone()})
    options = {
        "cutoff": module.cutoff,
        "coordination_cutoff": module.coordination_cutoff,
        "smoothing": module.smoothing,
    }
    assert torch.equal(d3_dispersion(*atoms[:2], damping_parameters("pbe"), copied, **options)[0], after)
    assert torch.equal(DFTD3("pbe", [1, 6, 8])(*atoms[:2])[0], before)
