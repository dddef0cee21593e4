"""Compiled and exported graphs: results, flags and gradients are those of eager mode."""

import pytest
import torch
import torch._dynamo.testing
from torch.fx.experimental.proxy_tensor import make_fx

from nvalchemiops.torch import spline
from nvalchemiops.torch.interactions import electrostatics
from nvalchemiops.torch.interactions.lj import lj_energy_forces
from nvalchemiops.torch.neighbors import neighbor_list
from tests.support import cases
from tests.support.cases import (
    CUTOFF,
    D3,
    EACH,
    EACH_OF_ATOMS,
    EACH_WHOLE,
    MIXED,
    ONE,
    PAIRS,
    SUMS,
    Case,
    each,
    spread_out,
)
from tests.support.comparing import (
    assert_compiled_equals_eager,
    close,
    compiled,
    derivative_along,
    leaves_of,
    random_like,
    same_bits,
)
from tests.support.systems import System, batch, csr, in_form


@pytest.mark.later_cases("mesh", "real space")
@EACH
def test_compiled_equals_eager(case):
    """All results of a batch and their gradients by everything, the flag included."""
    near = case.near(MIXED)
    assert_compiled_equals_eager(lambda *i: case.results(*i, near), case.inputs(MIXED))


@each(SUMS[1], PAIRS[0], D3)
def test_without_gradients(case):
    inputs, near = case.inputs(MIXED).leaves(), case.near(MIXED)
    with torch.no_grad():
        found = compiled(lambda *i: case.results(*i, near))(*inputs)
    assert not any(r.requires_grad for r in found)
    close(found, case.results(*inputs, near))


@pytest.mark.everyday_cases("PME")
@EACH_OF_ATOMS
@pytest.mark.inductor
def test_compiled_by_inductor_equals_eager(case):
    near = case.near(MIXED)
    assert_compiled_equals_eager(lambda *i: case.results(*i, near), case.inputs(MIXED), "inductor")


@pytest.mark.everyday_cases(
    "LJ-half list", "LJ-padding in between", "Ewald-padding in between", "PME-int64", "D3-int64", "D3-built inside"
)
@pytest.mark.parametrize(
    ("case", "form"),
    [
        *((case, form) for case in (*SUMS, *PAIRS, D3) for form in ("int64", "padding in between", "half list")),
        *((case, "built inside") for case in (*PAIRS, D3)),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_forms_of_neighbors(case, form):
    near = case.near(ONE)
    if form == "built inside":
        near = {name: value for name, value in near.items() if not name.startswith("neighbor")}
    else:
        near = case.near(ONE, **in_form(near, 5, form, "mask_value" if case in SUMS else "fill_value"))
    assert_compiled_equals_eager(lambda *i: case.results(*i, near), case.inputs(ONE))


@pytest.mark.later_cases("LJ", "DSF")
@EACH_WHOLE
def test_neighbors_built_behind_a_graph_break(case):
    """Host code that reads values there is not for a compiler, which looks at each function that Python calls."""
    near = {name: value for name, value in case.near(ONE).items() if not name.startswith("neighbor")}

    def function(*inputs):
        torch._dynamo.graph_break()
        return case.results(*inputs, near)

    inputs = case.inputs(ONE)
    same_bits(torch.compile(function, backend="aot_eager")(*inputs), function(*inputs))


@pytest.mark.later_cases("Ewald", "DSF")
@EACH_WHOLE
def test_inputs_computed_inside_the_graph(case):
    """Positions, cell and parameters are intermediates of one parameter."""
    inputs, near = case.inputs(ONE), case.near(ONE)

    def function(parameter):
        strain = 0.02 * torch.outer(parameter[:3], parameter[2:].sin())
        deform = torch.eye(3, dtype=torch.float64) + strain
        x = (inputs.x + 0.1 * torch.outer(parameter, parameter[:3])) @ deform
        a, b = inputs.a * parameter[0].cos(), inputs.b * (1.0 + 0.1 * parameter[1].tanh())
        return case.call(x, a, inputs.cell @ deform, b, near)

    assert_compiled_equals_eager(function, [torch.linspace(0.2, 1.0, 5, dtype=torch.float64)])


@pytest.mark.later_cases("Ewald", "DSF")
@EACH_OF_ATOMS
def test_one_tensor_in_two_places(case):
    """A gradient that is halved, or counted twice. Systems of one atom: their parameters may be one tensor."""
    cell = torch.eye(3, dtype=torch.float64) * torch.tensor([[[2.5]], [[2.7]], [[2.9]]])
    system = System(spread_out(3).positions, torch.ones(3).double(), cell, torch.arange(3, dtype=torch.int32))
    near = case.near(system)
    s = torch.tensor([0.7, 0.8, 0.9], dtype=torch.float64)

    def function(s):
        return case.call(system.positions, s, cell, s, near)

    assert_compiled_equals_eager(function, [s])
    (leaf,), (direction,) = leaves_of([s]), random_like([s])
    (slope,) = torch.autograd.grad(function(leaf)[0].sum(), leaf)
    expected = derivative_along(lambda s: function(s)[0].sum(), s, direction)
    torch.testing.assert_close(slope @ direction, expected, rtol=1e-7, atol=1e-7)


# -- shapes and recompilations --------------------------------------------------------------------


@pytest.mark.everyday_cases("PME", "LJ")
@EACH
def test_dynamic_shapes_compile_at_most_twice(case):
    """Other numbers of atoms and pairs."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def energies(x, a, cell, b, near):
        return case.energies(x, a, cell, b, near)

    call = compiled(energies, counter, dynamic=True)
    for n in (7, 5, 3, 6):
        system, found = spread_out(n), []
        for function in (energies, call):
            leaves = case.inputs(system).leaves()
            result = function(*leaves, case.near(system))
            found.append([result.detach(), *leaves.grad(result.square().sum())])
        close(*found)
    assert counter.frame_count <= 2


# -- training -------------------------------------------------------------------------------------


class FromGeometry(torch.nn.Module):
    """Parameters of atoms that depend on the geometry."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1, dtype=torch.float64)
        with torch.no_grad():
            self.layer.weight.copy_(torch.tensor([[0.31, -0.17, 0.25]]))
            self.layer.bias.fill_(0.2)

    def forward(self, x, a):
        return a * (1.0 + 0.1 * torch.tanh(self.layer(x)).squeeze(1))


@pytest.mark.everyday_cases("PME")
@EACH_OF_ATOMS
def test_training_compiled_equals_training_eager(case):
    """Energies and forces fitted by parameters from a net, on one curve that goes down."""
    inputs, near = case.inputs(ONE), case.near(ONE)
    target = [t.detach() for t in case.call(*inputs, near, compute_forces=True)]

    def train(wrap):
        net = FromGeometry()

        def loss(x):
            results = case.call(x, net(x, inputs.a), inputs.cell, inputs.b, near, compute_forces=True)
            return sum((r - t).square().mean() for r, t in zip(results, target))

        step, losses = wrap(loss), []
        optimiser = torch.optim.Adam(net.parameters(), lr=3e-3)
        for _ in range(50):
            optimiser.zero_grad()
            value = step(inputs.x)
            value.backward()
            optimiser.step()
            losses.append(value.detach())
        return torch.stack(losses), net.layer.weight.detach()

    eager, other = train(lambda f: f), train(compiled)
    assert eager[0][-1] < 0.9 * eager[0][0]
    # rounding grows along the steps
    close(other, eager, 1e-9, atol=1e-11)


@pytest.mark.everyday_cases("PME-aot_eager-*", "LJ-aot_eager-*", "LJ-inductor-autograd inside")
@pytest.mark.parametrize("way", ["returned forces", "autograd inside"])
@pytest.mark.parametrize(
    ("case", "backend"),
    [
        *((case, "aot_eager") for case in (*SUMS, *PAIRS)),
        *(pytest.param(case, "inductor", marks=pytest.mark.inductor) for case in (SUMS[1], PAIRS[0])),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_force_training_through_a_compiled_model(case, way, backend):
    """Both documented ways, in one graph; the gradients are those of eager mode."""
    net, inputs, near = FromGeometry(), case.inputs(ONE), case.near(ONE)

    def loss(x):
        energies, forces = case.call(x, net(x, inputs.a), inputs.cell, inputs.b, near, compute_forces=True)
        if way == "autograd inside":
            forces = -torch.autograd.grad(energies.sum(), x, create_graph=True)[0]
        return (forces - 0.1).square().sum() + energies.sum().square()

    found = []
    with torch._dynamo.config.patch(trace_autograd_ops=way == "autograd inside"):
        for function in (loss, compiled(loss, backend)):
            value = function(inputs.x.clone().requires_grad_())
            assert value.requires_grad
            found.append([value.detach(), *torch.autograd.grad(value, net.parameters())])
    close(*found, 1e-10)


@EACH_OF_ATOMS
def test_second_derivatives_of_a_compiled_energy_are_an_error(case):
    """The force outside of the graph; never a gradient without history."""
    net, inputs, near = FromGeometry(), case.inputs(ONE), case.near(ONE)
    x = inputs.x.clone().requires_grad_()
    value = compiled(lambda x: case.energies(x, net(x, inputs.a), inputs.cell, inputs.b, near).sum())(x)
    with pytest.raises(RuntimeError, match=r"double backward|donated buffers"):
        (force,) = torch.autograd.grad(value, x, create_graph=True)
        torch.autograd.grad(force.square().sum(), net.layer.weight)


# -- export ---------------------------------------------------------------------------------------


@pytest.mark.later_cases("True-Ewald", "True-PME")
@each(*SUMS, *PAIRS, D3)
@pytest.mark.parametrize("strict", [False, True])
def test_export(case, strict):
    """An exported model of all results, for other numbers of atoms."""
    case.results(*case.inputs(ONE), case.near(ONE))

    class Model(torch.nn.Module):
        def forward(self, x, a, cell, b, near):
            return case.results(x, a, cell, b, near)

    n, m = torch.export.Dim("n", min=2), torch.export.Dim("m", min=2)
    shapes = [{0: n} if field in case.of_atoms else None for field in case.inputs(ONE)._fields]
    of_near = {"neighbor_list": {1: m}, "neighbor_shifts": {0: m}, "numbers": {0: n}}
    shapes.append({key: of_near[key] for key in case.near(ONE)})
    arguments = (*case.inputs(ONE), case.near(ONE))
    program = torch.export.export(Model(), arguments, dynamic_shapes=tuple(shapes), strict=strict)
    for size in (5, 8):
        system = spread_out(size)
        arguments = (*case.inputs(system), case.near(system))
        same_bits(program.module()(*arguments), Model()(*arguments))


# -- batches of 3, 2 and 1 systems: what a data loader passes at the end of an epoch ---------------


def with_number(case):
    """The number of systems given, too."""

    def function(x, a, cell, b, near, **options):
        return case.function(x, a, cell, b, near | {"num_systems": cell.shape[0]}, **options)

    return case._replace(name=f"{case.name}, number given", function=function)


def plain(name, function):
    return Case(name, function, cases.charged(0.3), outputs=())


def dsf(x, q, cell, alpha, near):
    near = dict(near)
    shifts = near.pop("neighbor_shifts")
    return electrostatics.dsf_coulomb(x, q, CUTOFF, cell=cell, unit_shifts=shifts, compute_virial=True, **near)


def estimated(x, q, cell, alpha, near):
    options = {"compute_forces": True, "compute_virial": True}
    return electrostatics.ewald_summation(x, q, cell, cutoff=CUTOFF, accuracy=1e-3, **near, **options)


def splines(x, q, cell, alpha, near):
    batch_idx = near["batch_idx"]
    return spline.spline_gather(x, spline.spline_spread(x, q, cell, (8, 8, 8), batch_idx=batch_idx), cell, 4, batch_idx)


DSF = plain("dsf_coulomb", dsf)
SPLINES = plain("splines", splines)
BATCHES = [batch(*(spread_out(n, seed=n) for n in sizes)) for sizes in ((5, 3, 4), (5, 3), (5,))]


def model(case):
    class Model(torch.nn.Module):
        def forward(self, x, a, cell, b, near):
            return case.results(x, a, cell, b, near)

    return Model()


def arguments_of(case, system):
    return *case.inputs(system), case.near(system, **csr(system, CUTOFF)) | {"batch_idx": system.batch_idx}


def with_pbc(case, arguments):
    near = arguments[-1]
    if case is not DSF and case is not SPLINES:  # which have no such argument
        near["pbc"] = torch.ones(len(arguments[2]), 3, dtype=torch.bool)
    return arguments


OTHER_CALLS = [
    *(with_number(PAIRS[0]), with_number(D3), DSF, with_number(DSF), SPLINES),
    plain("LJ function", lambda x, q, cell, _, near: lj_energy_forces(x, 2.2, 0.05, CUTOFF, cell, **near)),
    plain("Coulomb", lambda x, q, cell, _, near: electrostatics.coulomb_energy_forces(x, q, cell, CUTOFF, 0.3, **near)),
    plain("Ewald estimated", estimated),
]
SHAPES = [
    *((case, None) for case in (*SUMS, *cases.PARTS, *PAIRS, D3, *OTHER_CALLS)),
    *((case, True) for case in (SUMS[1], D3, OTHER_CALLS[0])),
]


@pytest.mark.everyday_cases("PME-None", "LJ, number given-None", "D3-None", "slab-None")
@pytest.mark.parametrize(("case", "dynamic"), SHAPES, ids=lambda value: getattr(value, "name", value))
def test_one_compiled_function_takes_batches_of_three_two_and_one(case, dynamic):
    """A batch of one may be compiled for itself, but is no error."""
    eager = model(case)
    call = compiled(eager, dynamic=dynamic)
    for system in BATCHES:
        close(call(*arguments_of(case, system)), eager(*arguments_of(case, system)))


@each(with_number(PAIRS[0]), DSF, with_number(D3), SUMS[0], SPLINES)
def test_one_exported_program_takes_batches_of_three_and_two(case):
    """With names for the numbers of atoms, systems and pairs, and with the periodicity of each system."""
    atoms, systems, pairs = (torch.export.Dim(name, min=2) for name in ("atoms", "systems", "pairs"))
    of_inputs = {name: {0: atoms} for name in case.of_atoms} | {name: {0: systems} for name in case.of_systems}
    of_near = {"neighbor_list": {1: pairs}, "neighbor_ptr": {0: atoms + 1}, "neighbor_shifts": {0: pairs}}
    of_near["pbc"] = {0: systems}
    eager, (*inputs, near) = model(case), with_pbc(case, arguments_of(case, BATCHES[0]))
    shapes = (
        *(of_inputs.get(name) for name in case.inputs(ONE)._fields),
        {key: of_near.get(key, {0: atoms}) for key in near},
    )
    program = torch.export.export(eager, (*inputs, near), dynamic_shapes=shapes).module()
    for system in BATCHES[:2]:
        close(program(*with_pbc(case, arguments_of(case, system))), eager(*arguments_of(case, system)))


MODULES = {
    "Ewald": electrostatics.EwaldSummation(0.6, k_cutoff=3.0, cutoff=CUTOFF),
    "PME": electrostatics.ParticleMeshEwald(0.6, (8, 8, 8), cutoff=CUTOFF),
    "chosen": electrostatics.EwaldSummation(cutoff=CUTOFF, accuracy=1e-3),
}


@pytest.mark.later_cases("PME")
@pytest.mark.parametrize("name", MODULES)
def test_forces_that_are_traced_without_data(name):
    """By ``make_fx``, where tensors that a module keeps have values, but not the results of operations on them."""

    def forces(x, q, cell, near):
        x = x.detach().requires_grad_()
        energies = MODULES[name](x, q, cell, **near)
        return torch.autograd.grad(energies.sum(), x)[0]

    four = batch(*(spread_out(n, seed=n) for n in (5, 3, 6, 4)))  # a size of 2 or 3 would become a number
    arguments = [(*s[:3], csr(s, CUTOFF) | {"batch_idx": s.batch_idx}) for s in (four, *BATCHES[:2])]
    traced = make_fx(forces, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*arguments[0])
    for values in arguments:
        close([traced(*values)], [forces(*values)])


def test_lists_that_are_traced_without_data():
    """Their check for faults is left out, as in compiled code."""

    def counts(x, cell, numbers):
        return neighbor_list(x, 3.0, cell, batch_idx=numbers, max_neighbors=40)[1]

    system = BATCHES[0]
    arguments = system.positions, system.cell, system.batch_idx
    traced = make_fx(counts, tracing_mode="symbolic")(*arguments)
    close([traced(*arguments)], [counts(*arguments)])
