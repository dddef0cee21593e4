"""Ewald sums in compiled and exported graphs: results, flags and gradients are those of eager mode."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing

from nvalchemiops import __version__
from nvalchemiops.torch.interactions.electrostatics import (
    Electrostatics,
    EwaldSummation,
    electrostatic_potential,
    ewald_summation,
    generate_k_vectors_ewald_summation,
    generate_k_vectors_pme,
    multipole_particle_mesh_ewald,
    particle_mesh_ewald,
    power_law,
    prepare_mesh,
    prepare_wave_vectors,
)
from nvalchemiops.torch.interactions.electrostatics.terms import mesh as meshes
from nvalchemiops.torch.neighbors import neighbor_list
from nvalchemiops.torch.runtime.compiled import one_op
from nvalchemiops.torch.runtime.context import ValuesNeededError
from tests.lanes.fibers import gpu_layout
from tests.support.comparing import assert_compiled_equals_eager, close, compiled, leaves_of, weighted
from tests.support.systems import ALL, batch, csr, triclinic

CUTOFF, ALPHA, MESH = 4.0, 0.8, (8, 9, 10)

Dict = dict[str, Any]


def ewald(x, q, cell, alpha=ALPHA, **options):
    return ewald_summation(x, q, cell, alpha, **{"k_cutoff": 3.3} | options)


def mesh_ewald(x, q, cell, alpha=ALPHA, **options):
    return particle_mesh_ewald(x, q, cell, alpha, mesh_dimensions=MESH, **options)


SUMS: dict[str, Callable] = {"Ewald": ewald, "PME": mesh_ewald}
EACH_SUM = pytest.mark.parametrize("name", SUMS)


ONE = triclinic(5, charged=True)
NEAR = csr(ONE, CUTOFF)


# -- compiled equals eager ------------------------------------------------------------------------


OPTIONS: dict[str, Dict] = {
    "hybrid forces": {"hybrid_forces": True, "compute_forces": True},
    "slab": {"pbc": torch.tensor([True, False, True]), "slab_correction": True},
    "exclusions of systems": {"exclusions": torch.tensor([[0, 1], [2, 4]]), "energy_reduction": "system"},
}


@pytest.mark.everyday_cases("PME-exclusions of systems")
@pytest.mark.parametrize(
    ("name", "options"),
    [("Ewald", "hybrid forces"), ("PME", "slab"), ("PME", "exclusions of systems")],
)
def test_options_that_are_absent_or_there(name, options):
    """Each combination is a graph of its own; those that the sums share are tried with one of them."""
    assert_compiled_equals_eager(lambda *i: SUMS[name](*i, **NEAR, **OPTIONS[options]), ONE[:3])


@pytest.mark.later_cases("Ewald")
@EACH_SUM
def test_channels(name):
    q = torch.stack([ONE.charges, ONE.charges.flip(0)], 1)
    assert_compiled_equals_eager(lambda *i: SUMS[name](*i, **NEAR), (ONE.positions, q, ONE.cell))


@pytest.mark.everyday_cases("k_vectors")
@pytest.mark.parametrize("what", ["miller_bounds", "k_vectors", "prepared"])
def test_wave_vectors_given(what):
    k_vectors = generate_k_vectors_ewald_summation(ONE.cell, 3.0)
    options = {
        "miller_bounds": {"miller_bounds": (2, 2, 2)},
        "k_vectors": {"k_vectors": k_vectors},
    }
    if what == "prepared":
        mesh_vectors, squares = generate_k_vectors_pme(ONE.cell, MESH)
        options[what] = {"k_vectors": mesh_vectors, "k_squared": squares}
    call = mesh_ewald if what == "prepared" else ewald_summation
    options = options[what] | ({} if what == "prepared" else {"alpha": ALPHA})
    assert_compiled_equals_eager(lambda *i: call(*i, **NEAR, **options), ONE[:3])


@pytest.mark.parametrize(
    ("name", "cutoff"),
    [
        ("Ewald", 2.0),
        ("PME", 2.0),
        ("Ewald", 5.0),
    ],
)
def test_neighbors_built_inside(name, cutoff):
    """With ``cutoff``, and alpha for it."""
    function = {"Ewald": ewald_summation, "PME": particle_mesh_ewald}[name]
    options = {"mesh_dimensions": MESH} if name == "PME" else {}

    def energies(x):
        return function(x, ONE.charges, ONE.cell, cutoff=cutoff, accuracy=1e-3, **options)

    close([compiled(energies)(ONE.positions)], [energies(ONE.positions)])


# -- shapes and recompilations --------------------------------------------------------------------


@EACH_SUM
def test_cells_in_a_row(name):
    """One graph for cells of different size, and so for different numbers of wave vectors."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def results(x, q, cell):
        return SUMS[name](x, q, cell, **NEAR, compute_virial=True)

    call = compiled(results, counter)
    for scale in (1.0, 1.3, 0.9, 1.0):
        found = []
        for function in (results, call):
            leaves = leaves_of((scale * ONE.positions, ONE.charges, scale * ONE.cell))
            outcome = function(*leaves)
            slopes = torch.autograd.grad(weighted(outcome), leaves)
            found.append([*(t.detach() for t in outcome), *slopes])
        close(*found)
    assert counter.frame_count == 1


@pytest.mark.later
@pytest.mark.inductor
def test_a_mesh_in_single_precision_with_reduced_overhead():
    """Twice in a row with different cells, gradients too."""
    system = ONE.to(torch.float32)

    def loss(x, q, cell):
        return weighted(mesh_ewald(x, q, cell, **NEAR, **ALL))

    call = torch.compile(loss, fullgraph=True, mode="reduce-overhead")
    for scale in (1.0, 1.1, 1.0):
        found = []
        for function in (loss, call):
            leaves = leaves_of((scale * system.positions, system.charges, scale * system.cell))
            value = function(*leaves)
            found.append([value.detach(), *torch.autograd.grad(value, leaves)])
        for a, b in zip(*found):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max()))


# -- what cannot be measured ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Ewald", {}, "`alpha` or `cutoff` is needed"),
        ("PME", {"mesh_dimensions": MESH}, "`alpha` or `cutoff` is needed"),
        ("Ewald", {"alpha": ALPHA}, "`cutoff`, or a list, is needed"),
        ("PME", {"alpha": ALPHA, **NEAR}, "`mesh_dimensions` is needed"),
        ("PME", {"alpha": ALPHA, "mesh_spacing": 0.5, **NEAR}, "`mesh_dimensions` is needed"),
        ("PME", {"cutoff": 5.0}, "`mesh_dimensions` is needed"),
    ],
)
def test_what_cannot_be_measured_inside_a_graph_is_asked_for(name, options, message):
    """In an exported graph, and in a compiled one on a GPU; on a CPU the op reads values when it runs."""
    function = {"Ewald": ewald_summation, "PME": particle_mesh_ewald}[name]

    class Model(torch.nn.Module):
        def forward(self, x):
            return function(x, ONE.charges, ONE.cell, **options)

    with pytest.raises(ValuesNeededError, match=message):
        torch.export.export(Model(), (ONE.positions,), strict=False)


# -- export ---------------------------------------------------------------------------------------


@EACH_SUM
def test_export_of_an_energy_that_depends_on_a_cell_of_any_size(name):
    """The number of wave vectors is not fixed by the example."""

    class Model(torch.nn.Module):
        def forward(self, x, q, cell):
            return SUMS[name](x, q, cell, energy_reduction="system", **NEAR)

    program = torch.export.export(Model(), ONE[:3], strict=False).module()
    for scale in (1.0, 1.4):
        arguments = scale * ONE.positions, ONE.charges, scale * ONE.cell
        close([program(*arguments)], [Model()(*arguments)])


def test_modules_that_were_exported_still_sum_slabs():
    """torch.export leaves a copy of the potential in the module, which is still Coulomb's."""
    x, q, cell = ONE[:3]
    pbc = torch.tensor([True, False, True])

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.coulomb = EwaldSummation(ALPHA, 3.3)

        def forward(self, x, q):
            return self.coulomb(x, q, cell, pbc=pbc, slab_correction=True, **NEAR)

    model = Model()
    before = model(x, q)
    program = torch.export.export(model, (x, q), strict=False).module()
    close([program(x, q), model(x, q)], [before, before])


@pytest.mark.later_cases("True")
@pytest.mark.parametrize("strict", [True, False])
def test_export_of_a_sum_that_chooses_its_parameters(strict):
    """For the reach of a list that is given. So in compiled graphs on a GPU."""

    class Model(torch.nn.Module):
        def forward(self, x, q, cell):
            return ewald_summation(x, q, cell, cutoff=CUTOFF, **NEAR)

    program = torch.export.export(Model(), ONE[:3], strict=strict).module()
    close([program(*ONE[:3])], [Model()(*ONE[:3])])


def test_a_sum_on_a_gpu_chooses_in_compiled_code_as_in_eager_mode_before():
    """What eager calls have kept is nothing that compilers look at; those of torch 2.11 cannot."""

    def energies(*inputs):
        return ewald_summation(*inputs, cutoff=CUTOFF, **NEAR)

    torch.compiler.reset()
    with gpu_layout():
        expected = energies(*ONE[:3])
        close([torch.compile(energies, backend="eager", fullgraph=True)(*ONE[:3])], [expected])


# -- the whole sum as one op ----------------------------------------------------------------------

WAVES = prepare_wave_vectors(ONE.cell, 3.3)
PREPARED = {"alpha": None, "prepared": prepare_mesh(ONE.cell, ALPHA, MESH)}
WHOLE: dict[str, Callable] = {
    "k_cutoff": ewald,
    "k_cutoff of a tensor": lambda *i, **o: ewald(*i, k_cutoff=torch.tensor([3.3], dtype=torch.float64), **o),
    "miller_bounds": lambda *i, **o: ewald_summation(*i, ALPHA, miller_bounds=(2, 2, 2), **o),
    "wave vectors": lambda *i, **o: ewald_summation(*i, ALPHA, miller_indices=WAVES, **o),
    "mesh": mesh_ewald,
    "prepared mesh": lambda *i, **o: particle_mesh_ewald(*i, **PREPARED, **o),
    "alpha of a tensor": lambda *i, **o: mesh_ewald(*i, alpha=torch.tensor([ALPHA], dtype=torch.float64), **o),
}


def ops_of(function, *arguments):
    """Names of the library's ops in the graph that a call is compiled to, but for those whose results are not used."""
    found = []

    def backend(module, _):
        module.graph.eliminate_dead_code()
        found.extend(str(node.target) for node in module.graph.nodes if "nvalchemiops" in str(node.target))
        return module.forward

    result = torch.compile(function, backend=backend, fullgraph=True)(*arguments)
    return [name.removeprefix("nvalchemiops.") for name in found], result


@pytest.mark.parametrize("name", WHOLE)
def test_a_sum_is_one_op_with_the_bits_of_eager_mode(name):
    call = functools.partial(WHOLE[name], **NEAR, **ALL)
    ops, found = ops_of(call, *ONE[:3])
    assert ops == ["call.default"]
    assert all(torch.equal(a, b) for a, b in zip(found, call(*ONE[:3]), strict=True))


@pytest.mark.parametrize(
    ("name", "by", "weights"),
    [
        ("miller_bounds", "positions", "equal"),
        ("miller_bounds", "charges", "different"),
        ("mesh", "both", "equal"),
        ("mesh", "both", "different"),
        ("prepared mesh", "both", "different"),
    ],
)
def test_first_derivatives_come_with_the_energies(name, by, weights):
    x, q, cell = ONE[:3]
    w = torch.linspace(1.0, 1.0 if weights == "equal" else 2.0, len(x), dtype=torch.float64)

    def loss(x, q):
        return (w * WHOLE[name](x, q, cell, **NEAR)).sum()

    found = []
    for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        x, q = x.detach().requires_grad_(by != "charges"), q.detach().requires_grad_(by != "positions")
        found.append(torch.autograd.grad(function(x, q), [t for t in (x, q) if t.requires_grad]))
    close(found[1], found[0])


def op_arguments(function, *arguments):
    """What the op gets from the graph that a call is compiled to."""
    found = []

    class Watch(torch.fx.Interpreter):
        def call_function(self, target, args, kwargs):
            if target is one_op:
                found.append(args)
            return super().call_function(target, args, kwargs)

    torch.compile(function, backend=lambda module, _: Watch(module).run, fullgraph=True)(*arguments)
    return found[-1]


@pytest.mark.parametrize("outputs", [(), ("forces", "virial")])
@pytest.mark.parametrize("name", ["mesh", "miller_bounds"])
def test_derivatives_of_both_orders_of_the_op(name, outputs):
    """The op by itself, for any weights and by any inputs: its derivatives are those of the sum."""
    options = {f"compute_{name}": True for name in outputs}
    (x, q, cell, *rest), *others = op_arguments(
        lambda *i: WHOLE[name](*i, **NEAR, **options), ONE.positions.clone().requires_grad_(), *ONE[1:3]
    )
    assert (others[-2] == [0]) != bool(outputs)

    def op(x, q, cell):
        return one_op([x, q, cell, *rest], *others)[: 1 + len(outputs)]

    def public(x, q, cell):
        found = WHOLE[name](x, q, cell, **NEAR, **options)
        return found if outputs else (found,)

    for with_cell in (False, True):
        found = []
        for function in (op, public):
            x, q, cell = (t.clone().requires_grad_() for t in ONE[:3])
            leaves = (x, q, cell) if with_cell else (x, q)
            results = function(x, q, cell if with_cell else cell.detach())
            slopes = torch.autograd.grad(weighted(results), leaves, create_graph=True)
            second = torch.autograd.grad(weighted(slopes), leaves)
            found.append([t.detach() for t in (*results, *slopes, *second)])
        close(*found)


def test_the_op_fulfils_its_contract():
    """For fake tensors, under autograd, traced; with results, and of a derivative."""
    x, q, cell = ONE[:3]
    args = op_arguments(lambda *i: mesh_ewald(*i, **NEAR), x.clone().requires_grad_(), q, cell)
    torch.library.opcheck(one_op, args)
    (*leaves, _, _, text, _, _), weights = args, torch.linspace(1.0, 2.0, 5, dtype=torch.float64)
    torch.library.opcheck(one_op, (*leaves, [weights], [], text, [], [1, 2, 0, 0, 1]))
    torch.library.opcheck(one_op, (*leaves, [weights], [x.clone()], text, [], [1, 1, 0, 0]))
    with pytest.raises(RuntimeError, match="compile it again"):
        one_op(*leaves, [], [], text.replace(__version__, "0.1"), [], [])


PAIRS = torch.tensor([[0], [1]])
TWO = batch(triclinic(4, charged=True), triclinic(5, charged=True))


@pytest.mark.parametrize(
    "options",
    [
        {"exclusions": PAIRS, "exclusion_factors": torch.tensor([0.5], dtype=torch.float64)},
        {"pbc": torch.tensor([True, True, False]), "slab_correction": True},
        {"dipoles": torch.linspace(-1.0, 1.0, 15, dtype=torch.float64).reshape(5, 3), "widths": 0.3},
        {"hybrid_forces": True},
        {"potential": power_law(6)},
        {"pbc": torch.tensor([False, False, False])},
        {"pbc": [False, False, False]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_other_sums_are_one_op_as_well(options):
    near = {} if torch.equal(torch.as_tensor(options.get("pbc", PAIRS)), torch.tensor([False] * 3)) else NEAR
    call = functools.partial(mesh_ewald, **near, **options, compute_forces=True)
    ops, found = ops_of(call, *ONE[:3])
    assert ops == ["call.default"]
    assert all(torch.equal(a, b) for a, b in zip(found, call(*ONE[:3]), strict=True))


@pytest.mark.parametrize(
    "pbc", [False, [False] * 3, torch.zeros(2, 3, dtype=torch.bool)], ids=["bool", "list", "tensor"]
)
def test_molecules_without_a_cell_are_one_op_as_well(pbc):
    x, q, _, batch_idx = TWO
    call = functools.partial(mesh_ewald, cell=None, batch_idx=batch_idx, pbc=pbc, compute_forces=True)
    ops, found = ops_of(call, x, q)
    assert ops == ["call.default"]
    assert all(torch.equal(a, b) for a, b in zip(found, call(x, q), strict=True))
    of_one = functools.partial(ewald_summation, cell=None, pbc=False, **ALL, energy_reduction="system")
    assert_compiled_equals_eager(of_one, ONE[:2])
    with pytest.raises(Exception, match="several molecules also need cells"):
        compiled(functools.partial(call, energy_reduction="system"))(x, q)


def test_potentials_of_open_systems_are_one_op_as_well():
    """A crystal and a molecule, and molecules without a cell: traced, they were NaN, or needed positions' values."""
    x, q, cell, batch_idx = TWO
    pbc = torch.tensor([[True] * 3, [False] * 3])
    given = {"alpha": ALPHA, "cutoff": CUTOFF, "k_cutoff": 4.0}
    for options in ({"cell": cell, "pbc": pbc, **given}, {"pbc": [False] * 3}, {"receiver_widths": (0.0, 0.3)}):
        call = functools.partial(electrostatic_potential, batch_idx=batch_idx, derivatives=2, **options)
        ops, found = ops_of(call, x, q)
        assert ops == ["call.default"]
        assert all(torch.equal(a, b) for a, b in zip(found, call(x, q), strict=True))
    assert_compiled_equals_eager(call, (x, q))


def test_a_batch_is_one_op():
    x, q, cell, batch_idx = TWO
    pairs, pointers, shifts = neighbor_list(x, CUTOFF, cell, batch_idx=batch_idx, return_neighbor_list=True)
    near = {"neighbor_list": pairs, "neighbor_ptr": pointers, "neighbor_shifts": shifts, "batch_idx": batch_idx}
    call = functools.partial(mesh_ewald, **near, **ALL, energy_reduction="system")
    ops, found = ops_of(call, x, q, cell)
    assert ops == ["call.default"]
    assert all(torch.equal(a, b) for a, b in zip(found, call(x, q, cell), strict=True))
    assert_compiled_equals_eager(call, (x, q, cell))


def test_parameters_and_neighbors_that_are_left_open():
    """They are chosen when the graph runs."""
    for function in (ewald_summation, particle_mesh_ewald):
        assert torch.equal(compiled(function)(*ONE[:3]), function(*ONE[:3]))
    near = {"alpha": ALPHA, **NEAR}
    for given in ({}, {"method": "pme"}, {"k_cutoff": 4.0}, near, {"alpha": ALPHA, "k_cutoff": 4.0}):
        call = functools.partial(electrostatic_potential, **given)
        for ours, theirs in zip(compiled(call)(*ONE[:3])[:2], call(*ONE[:3])[:2], strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("leaf", ["positions of forces", "cell", "alpha"])
def test_derivatives_that_do_not_come_along(leaf):
    def forces(x):
        return mesh_ewald(x, *ONE[1:3], **NEAR, compute_forces=True)[1]

    def of_cell(cell):
        return mesh_ewald(*ONE[:2], cell, **NEAR)

    def of_alpha(alpha):
        return mesh_ewald(*ONE[:3], alpha, **NEAR)

    alpha = torch.tensor([ALPHA], dtype=torch.float64)
    function, leaf = {
        "positions of forces": (forces, ONE.positions),
        "cell": (of_cell, ONE.cell),
        "alpha": (of_alpha, alpha),
    }[leaf]
    ops, _ = ops_of(function, leaf.clone().requires_grad_())
    assert ops == ["call.default"]
    assert_compiled_equals_eager(function, (leaf,))


@pytest.mark.later
def test_functions_of_a_user_are_traced():
    """Their code is part of the graph."""
    potential = power_law(6)._replace(slope=None)
    ops, _ = ops_of(lambda *i: mesh_ewald(*i, **NEAR, potential=potential), *ONE[:3])
    assert "pair_sum.default" in ops and "call.default" not in ops


def test_values_that_do_not_fit_are_nan():
    call = compiled(lambda cell, near: mesh_ewald(*ONE[:2], cell, **near, **ALL))
    wrong = NEAR | {"neighbor_ptr": NEAR["neighbor_ptr"] + 7}
    for cell, near in ((torch.zeros_like(ONE.cell), NEAR), (ONE.cell, wrong)):
        with pytest.raises(ValueError, match=r"cell|neighbor"):
            mesh_ewald(*ONE[:2], cell, **near)
        assert all(t.isnan().all() for t in call(cell, near))
    assert all(t.isfinite().all() for t in call(ONE.cell, NEAR))


def test_gradients_of_values_that_do_not_fit_are_nan():
    """Also where weights differ, so that the sum is differentiated once more."""

    def loss(x, cell, weights):
        return (weights * mesh_ewald(x, ONE.charges, cell, **NEAR)).sum()

    call = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for weights in (torch.ones(5, dtype=torch.float64), torch.linspace(1.0, 2.0, 5, dtype=torch.float64)):
        for cell, is_known in ((torch.zeros_like(ONE.cell), False), (ONE.cell, True)):
            x = ONE.positions.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(call(x, cell, weights), x)
            assert gradient.isfinite().all() if is_known else gradient.isnan().all()


def test_a_bad_system_is_nan_alone_where_neighbors_are_found_inside():
    """The other systems of a batch keep their bits, whatever the order of the atoms."""
    two, order = batch(ONE, triclinic(4)), torch.tensor([5, 0, 1, 6, 2, 7, 3, 8, 4])
    charges, batch_idx = two.charges[order], two.batch_idx[order]

    def call(x, cell):
        return mesh_ewald(x[order], charges, cell, cutoff=CUTOFF, batch_idx=batch_idx, compute_forces=True)

    sum_of_graph, expected = compiled(call), call(two.positions, two.cell)
    for value in (torch.nan, 1e11, None):  # far away is bad, too
        x, cell = two.positions.clone(), two.cell.clone()
        if value is None:
            cell[0] = 1.0
        else:
            x[2, 1] = value
        for found, right in zip(sum_of_graph(x, cell), expected):
            assert found[batch_idx == 0].isnan().all() and torch.equal(found[batch_idx == 1], right[batch_idx == 1])


@pytest.mark.parametrize("function", [ewald_summation, electrostatic_potential])
def test_a_cell_of_another_shape_is_named_as_in_eager_mode(function):
    call = functools.partial(function, alpha=ALPHA, k_cutoff=3.3, cutoff=CUTOFF)
    with pytest.raises(Exception, match="`cell` must have shape"):
        compiled(call)(*ONE[:2], ONE.cell[..., :2])


def test_other_errors_are_not_taken_for_wrong_values(monkeypatch):
    """What fails inside of the library, or of torch, is an error, in the sum and in its gradient."""

    def loss(x, weights):
        return (weights * mesh_ewald(x, *ONE[1:3], **NEAR)).sum()

    def fails(*_):
        raise ValueError("on purpose")

    call = torch.compile(loss, fullgraph=True, backend="aot_eager")
    x, weights = ONE.positions.clone().requires_grad_(), torch.linspace(1.0, 2.0, 5, dtype=torch.float64)
    energy = call(x, weights)
    monkeypatch.setattr(meshes.MeshTerm, "evaluate", fails)
    with pytest.raises(ValueError, match="on purpose"):
        energy.backward()
    with pytest.raises(ValueError, match="on purpose"):
        call(ONE.positions + 0.01, weights)


@pytest.mark.parametrize("form", ["list", "matrix"])
def test_padding_by_a_value_of_the_caller(form):
    """In a list as well, where there is none by default."""
    x, q, cell = ONE[:3]
    matrix, _, shifts = neighbor_list(x, CUTOFF, cell, fill_value=9, max_neighbors=80)
    near = {"neighbor_matrix": matrix, "neighbor_matrix_shifts": shifts}
    if form == "list":
        pointers = torch.arange(0, 401, 80, dtype=torch.int32)
        pairs = torch.stack([torch.arange(5, dtype=torch.int32).repeat_interleave(80), matrix.reshape(-1)])
        near = {"neighbor_list": pairs, "neighbor_ptr": pointers, "neighbor_shifts": shifts.reshape(-1, 3)}
    call = functools.partial(mesh_ewald, **near, mask_value=9, compute_forces=True)
    ops, found = ops_of(call, x, q, cell)
    assert ops == ["call.default"]
    close(found, mesh_ewald(x, q, cell, **NEAR, compute_forces=True))


def test_one_graph_for_any_number_of_atoms_and_any_alpha():
    """An op whose shapes and numbers are symbols."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")

    def energies(x, q, cell, near, alpha):
        return mesh_ewald(x, q, cell, alpha, **near)

    call = torch.compile(energies, fullgraph=True, backend=counter, dynamic=True)
    for n, alpha in ((5, 0.8), (7, 0.9), (9, 0.7)):
        system = triclinic(n, charged=True)
        arguments = (*system[:3], csr(system, CUTOFF), torch.tensor([alpha], dtype=torch.float64))
        assert torch.equal(call(*arguments), energies(*arguments))
    assert counter.frame_count == 1
    for alpha in (0.8, 0.7, 0.6):
        assert torch.equal(call(*ONE[:3], NEAR, alpha), energies(*ONE[:3], NEAR, alpha))


def test_without_sizes_k_vectors_are_used():
    """`Electrostatics` cannot choose where the number of atoms in each system cannot be read."""
    positions, charges, cell, _ = triclinic(12)
    electrostatics = torch.compile(Electrostatics(cutoff=CUTOFF), backend="eager", fullgraph=True)
    close([electrostatics(positions, charges, cell)], [ewald_summation(positions, charges, cell, cutoff=CUTOFF)], 1e-5)


def test_a_mesh_of_multipoles_is_chosen_in_a_graph():
    """As by `particle_mesh_ewald`; also where alpha is given."""
    x, q, cell, _ = triclinic(5, charged=True)
    pairs, pointers, shifts = neighbor_list(x, CUTOFF, cell, return_neighbor_list=True)
    for chosen in ({}, {"alpha": 0.5}):

        def energies(x, chosen=chosen):
            moments = q.unsqueeze(1)
            near = (pairs[1], pointers, shifts)
            return multipole_particle_mesh_ewald(x, moments, cell, *near, sigma=0.3, accuracy=0.01, **chosen)

        assert_compiled_equals_eager(energies, [x])
