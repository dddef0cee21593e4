"""Ewald sums in compiled and exported graphs: results, flags and gradients are those of eager mode."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing

from nvalchemiops.torch.interactions.electrostatics import (
    compute_slab_correction,
    ewald_real_space,
    ewald_reciprocal_space,
    ewald_summation,
    generate_k_vectors_ewald_summation,
    generate_k_vectors_pme,
    particle_mesh_ewald,
    pme_reciprocal_space,
    wave_vectors,
)
from nvalchemiops.torch.neighbors import neighbor_list
from nvalchemiops.torch.operators import lattice
from tests.comparing import BACKENDS, close, compiled, leaves_of, random_like, weighted
from tests.systems import ALL, batch, triclinic

CUTOFF, ALPHA, MESH = 4.0, 0.8, (8, 9, 10)

Dict = dict[str, Any]


def ewald(x, q, cell, alpha=ALPHA, **options):
    return ewald_summation(x, q, cell, alpha, **{"k_cutoff": 3.3} | options)


def mesh_ewald(x, q, cell, alpha=ALPHA, **options):
    return particle_mesh_ewald(x, q, cell, alpha, mesh_dimensions=MESH, **options)


SUMS: dict[str, Callable] = {"Ewald": ewald, "PME": mesh_ewald}
EACH_SUM = pytest.mark.parametrize("name", SUMS)


def near(system, form="list"):
    options = {"batch_idx": system.batch_idx, "return_neighbor_list": form == "list"}
    first, second, shifts = neighbor_list(system.positions, CUTOFF, system.cell, **options)
    if form == "list":
        return {"neighbor_list": first, "neighbor_ptr": second, "neighbor_shifts": shifts}
    return {"neighbor_matrix": first, "neighbor_matrix_shifts": shifts, "mask_value": len(system.charges)}


ONE = triclinic(5, charged=True)
TWO = batch(triclinic(5, charged=True), triclinic(3, seed=3))
NEAR = near(ONE)


def assert_compiled_equals_eager(function, inputs, backend="aot_eager", compile_options=None, **tolerance):
    """Results, flags, and gradients of a loss that sees all results."""

    def loss(*inputs):
        results = function(*inputs)
        results = results if isinstance(results, tuple) else (results,)
        return weighted([r.sin() for r in results]), results

    found = []
    for call in (loss, compiled(loss, backend, **compile_options or {})):
        leaves = leaves_of(inputs)
        value, results = call(*leaves)
        slopes = torch.autograd.grad(value, leaves, allow_unused=True)
        flags = [r.requires_grad for r in results], [s is None for s in slopes]
        found.append((flags, [r.detach() for r in results], [s for s in slopes if s is not None]))
    (flags, results, slopes), (compiled_flags, *others) = found
    assert flags == compiled_flags
    close([*others[0], *others[1]], [*results, *slopes], **tolerance)


# -- compiled equals eager ------------------------------------------------------------------------


@EACH_SUM
@BACKENDS
def test_compiled_equals_eager(name, backend):
    """All results of a batch and their gradients by everything, the flag included."""
    given, alpha = near(TWO), torch.tensor([0.7, 0.8], dtype=torch.float64)

    def function(*inputs):
        return SUMS[name](*inputs, batch_idx=TWO.batch_idx, **given, **ALL)

    assert_compiled_equals_eager(function, (*TWO[:3], alpha), backend)
    if backend == "aot_eager":
        with torch.no_grad():
            assert not any(r.requires_grad for r in compiled(function)(*leaves_of((*TWO[:3], alpha))))


PARTS: dict[str, Callable] = {
    "real space": lambda x, q, cell: ewald_real_space(x, q, cell, ALPHA, **NEAR, **ALL),
    "reciprocal space": lambda x, q, cell: ewald_reciprocal_space(x, q, cell, None, ALPHA, k_cutoff=3.3, **ALL),
    "mesh": lambda x, q, cell: pme_reciprocal_space(x, q, cell, ALPHA, MESH, **ALL),
    "slab": lambda x, q, cell: compute_slab_correction(x, q, cell, torch.tensor([True, True, False]), **ALL),
}


@pytest.mark.parametrize("part", PARTS)
def test_compiled_parts_equal_eager(part):
    assert_compiled_equals_eager(PARTS[part], ONE[:3])


OPTIONS: dict[str, Dict] = {
    "energies alone": {},
    "hybrid forces": {"hybrid_forces": True, "compute_forces": True},
    "slab": {"pbc": torch.tensor([True, False, True]), "slab_correction": True},
    "exclusions of systems": {"exclusions": torch.tensor([[0, 1], [2, 4]]), "energy_reduction": "system"},
}


@pytest.mark.parametrize(
    ("name", "options"),
    [("Ewald", "energies alone"), ("Ewald", "hybrid forces"), ("PME", "slab"), ("PME", "exclusions of systems")],
)
def test_options_that_are_absent_or_there(name, options):
    """Each combination is a graph of its own; those that the sums share are tried with one of them."""
    assert_compiled_equals_eager(lambda *i: SUMS[name](*i, **NEAR, **OPTIONS[options]), ONE[:3])


@pytest.mark.parametrize(("name", "form"), [("Ewald", "matrix"), ("PME", "matrix"), ("PME", "no ptr, int64")])
def test_formats_of_neighbors(name, form):
    given = near(ONE, "matrix" if form == "matrix" else "list")
    if form != "matrix":
        given = {key: value.long() for key, value in given.items() if key != "neighbor_ptr"}
    assert_compiled_equals_eager(lambda *i: SUMS[name](*i, **given), ONE[:3])


def test_graph_breaks_before_anything_was_called_eagerly():
    """Neighbors are built inside, which breaks the graph: the host code behind the break is not for a compiler."""
    wave_vectors._within.cache_clear()
    lattice._check_values.cache_clear()
    torch.compiler.reset()

    def function(x, q, cell):
        return ewald(x, q, cell, cutoff=CUTOFF)

    expected = function(*ONE[:3])
    wave_vectors._within.cache_clear()
    lattice._check_values.cache_clear()
    found = torch.compile(function, backend="aot_eager")(*ONE[:3])
    close([found], [expected])


@EACH_SUM
def test_channels(name):
    q = torch.stack([ONE.charges, ONE.charges.flip(0)], 1)
    assert_compiled_equals_eager(lambda *i: SUMS[name](*i, **NEAR), (ONE.positions, q, ONE.cell))


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


@EACH_SUM
def test_inputs_computed_inside_the_graph(name):
    """Positions, charges, cell and alpha are intermediates of one parameter."""
    x, q, cell = ONE[:3]

    def function(parameter):
        strain = 0.02 * torch.outer(parameter[:3], parameter[2:].sin())
        deform = torch.eye(3, dtype=torch.float64) + strain
        moved = (x + 0.1 * torch.outer(parameter, parameter[:3])) @ deform
        return SUMS[name](moved, q * parameter.cos(), cell @ deform, 0.7 + 0.1 * parameter[0].tanh(), **NEAR)

    assert_compiled_equals_eager(function, [torch.linspace(0.2, 1.0, 5, dtype=torch.float64)])


@EACH_SUM
def test_one_tensor_in_two_places(name):
    """A gradient that is halved, or counted twice. Three systems of one atom: charges that are their alphas."""
    x, cell = triclinic(3).positions, torch.eye(3, dtype=torch.float64) * torch.tensor([[[4.0]], [[4.5]], [[5.0]]])
    batch_idx = torch.arange(3, dtype=torch.int32)
    _, _, shifts = found = neighbor_list(x, CUTOFF, cell, batch_idx=batch_idx, return_neighbor_list=True)
    given = {"neighbor_list": found[0], "neighbor_shifts": shifts, "batch_idx": batch_idx}
    s = torch.tensor([0.7, 0.8, 0.9], dtype=torch.float64)

    def function(s):
        return SUMS[name](x, s, cell, s, **given)

    assert_compiled_equals_eager(function, [s])
    leaf, (direction,), step = s.clone().requires_grad_(), random_like([s]), 1e-5
    (slope,) = torch.autograd.grad(function(leaf).sum(), leaf)
    expected = (function(s + step * direction).sum() - function(s - step * direction).sum()) / (2 * step)
    torch.testing.assert_close(slope @ direction, expected, rtol=1e-7, atol=1e-7)


# -- shapes and recompilations --------------------------------------------------------------------


def compilations(function, dynamic):
    """How often a function of positions, charges, cell and a list is compiled for a few systems; 3 is too often."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    call = compiled(function, counter, dynamic=dynamic)
    for n in (5, 4, 7, 6):
        if counter.frame_count > 2:
            break
        system = triclinic(n, charged=True, seed=n)
        found = []
        for which in (function, call):
            leaves = leaves_of(system[:3])
            result = which(*leaves, *near(system).values())
            found.append([result.detach(), *torch.autograd.grad(result.square().sum(), leaves)])
        close(*found)
    return counter.frame_count


@EACH_SUM
def test_dynamic_shapes_compile_at_most_twice(name):
    """Other numbers of atoms and pairs, with the default accuracy."""

    def energies(x, q, cell, pairs, ptr, shifts):
        return SUMS[name](x, q, cell, neighbor_list=pairs, neighbor_ptr=ptr, neighbor_shifts=shifts)

    assert compilations(energies, True) <= 2


@pytest.mark.parametrize("part", ["reciprocal space", "mesh"])
def test_parts_with_dynamic_shapes_compile_at_most_twice(part):
    """Parts that take no ``accuracy``."""

    def energies(x, q, cell, pairs, ptr, shifts):
        if part == "reciprocal space":
            return ewald_reciprocal_space(x, q, cell, None, ALPHA, miller_bounds=(2, 2, 2))
        return pme_reciprocal_space(x, q, cell, ALPHA, MESH)

    assert compilations(energies, True) <= 2


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


# -- training -------------------------------------------------------------------------------------


class Charges(torch.nn.Module):
    """Charges that depend on the geometry."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1, dtype=torch.float64)
        with torch.no_grad():
            self.layer.weight.copy_(torch.tensor([[0.31, -0.17, 0.25]]))
            self.layer.bias.fill_(0.2)

    def forward(self, x):
        return torch.tanh(self.layer(x)).squeeze(1)


@EACH_SUM
def test_a_hundred_steps_of_training_compiled_equal_those_eager(name):
    """Energies and forces fitted by charges from a net, on one curve that goes down."""
    options = {**NEAR, "compute_forces": True}
    target = [r.detach() for r in SUMS[name](*ONE[:3], **options)]

    def train(wrap):
        net = Charges()

        def loss(x):
            results = SUMS[name](x, net(x), ONE.cell, **options)
            return sum((r - t).square().mean() for r, t in zip(results, target))

        step, losses = wrap(loss), []
        optimiser = torch.optim.Adam(net.parameters(), lr=3e-3)
        for _ in range(100):
            optimiser.zero_grad()
            value = step(ONE.positions)
            value.backward()
            optimiser.step()
            losses.append(value.detach())
        return torch.stack(losses), net.layer.weight.detach()

    eager, other = train(lambda f: f), train(compiled)
    assert eager[0][-1] < 0.9 * eager[0][0]
    # rounding grows along a hundred steps
    close(other, eager, 1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("Ewald", "aot_eager"),
        ("PME", "aot_eager"),
        pytest.param("PME", "inductor", marks=pytest.mark.inductor),
    ],
)
@pytest.mark.parametrize("way", ["returned forces", "autograd inside"])
def test_force_training_through_a_compiled_model(name, way, backend):
    """Both documented ways, in one graph; the gradients are those of eager mode."""
    net = Charges()

    def loss(x):
        if way == "autograd inside":
            energies = SUMS[name](x, net(x), ONE.cell, **NEAR)
            forces = -torch.autograd.grad(energies.sum(), x, create_graph=True)[0]
        else:
            energies, forces = SUMS[name](x, net(x), ONE.cell, **NEAR, compute_forces=True)
        return (forces - 0.1).square().sum() + energies.sum().square()

    found = []
    with torch._dynamo.config.patch(trace_autograd_ops=way == "autograd inside"):
        for function in (loss, compiled(loss, backend)):
            value = function(ONE.positions.clone().requires_grad_())
            assert value.requires_grad
            found.append([value.detach(), *torch.autograd.grad(value, net.parameters())])
    close(*found, 1e-10)


@EACH_SUM
def test_second_derivatives_of_a_compiled_energy_are_an_error_or_right(name):
    """The force outside of the graph; never a gradient without history."""
    net = Charges()

    def energy(x):
        return SUMS[name](x, net(x), ONE.cell, **NEAR).sum()

    x = ONE.positions.clone().requires_grad_()
    value = compiled(energy)(x)
    with pytest.raises(RuntimeError, match=r"double backward|donated buffers"):
        (force,) = torch.autograd.grad(value, x, create_graph=True)
        torch.autograd.grad(force.square().sum(), net.layer.weight)


@EACH_SUM
@pytest.mark.parametrize("changed", ["x", "neighbor_shifts"])
def test_inputs_changed_in_place_before_the_backward(name, changed):
    """An error, or the gradients of the original values."""

    def loss(x, q, cell, pairs, shifts):
        return weighted([SUMS[name](x, q, cell, neighbor_list=pairs, neighbor_shifts=shifts)])

    buffers = {key: NEAR[key].clone() for key in ("neighbor_list", "neighbor_shifts")}
    leaves = leaves_of(ONE[:3])
    inputs = dict(zip(("x", "q", "cell"), (1.0 * t for t in leaves))) | buffers
    expected = torch.autograd.grad(loss(*leaves, NEAR["neighbor_list"], NEAR["neighbor_shifts"]), leaves)
    value = compiled(loss)(*inputs.values())
    with torch.no_grad():
        inputs[changed].add_(1) if changed == "neighbor_shifts" else inputs[changed].zero_()
    try:
        found = torch.autograd.grad(value, leaves)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        close(found, expected)


# -- what cannot be measured ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Ewald", {}, "`alpha` or `cutoff` is needed"),
        ("PME", {"mesh_dimensions": MESH}, "`alpha` or `cutoff` is needed"),
        ("Ewald", {"alpha": ALPHA}, "`cutoff` is needed inside torch.compile to build neighbors"),
        ("PME", {"alpha": ALPHA, **NEAR}, "`mesh_dimensions` is needed"),
        ("PME", {"alpha": ALPHA, "mesh_spacing": 0.5, **NEAR}, "`mesh_dimensions` is needed"),
        ("PME", {"cutoff": 5.0}, "`mesh_dimensions` is needed"),
    ],
)
def test_what_cannot_be_measured_inside_a_graph_is_asked_for(name, options, message):
    function = {"Ewald": ewald_summation, "PME": particle_mesh_ewald}[name]
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match=message):
        compiled(lambda x: function(x, ONE.charges, ONE.cell, **options))(ONE.positions)


# -- export ---------------------------------------------------------------------------------------


@EACH_SUM
@pytest.mark.parametrize("strict", [False, True])
def test_export(name, strict):
    """An exported model of all results, for other numbers of atoms."""
    ewald(*ONE[:3], **NEAR)

    class Model(torch.nn.Module):
        def forward(self, x, q, cell, pairs, shifts):
            return SUMS[name](x, q, cell, neighbor_list=pairs, neighbor_shifts=shifts, **ALL)

    def arguments(system):
        given = near(system)
        return (*system[:3], given["neighbor_list"], given["neighbor_shifts"])

    n, m = torch.export.Dim("n", min=2), torch.export.Dim("m", min=2)
    shapes = ({0: n}, {0: n}, None, {1: m}, {0: m})
    program = torch.export.export(Model(), arguments(ONE), dynamic_shapes=shapes, strict=strict)
    for size in (5, 8):
        system = triclinic(size, charged=True)
        close(program.module()(*arguments(system)), Model()(*arguments(system)), 0)


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
