"""What users of other libraries met, of torch: compiled graphs, training, transforms, and what one call costs."""

import copy
import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from nvalchemiops.torch.interactions.electrostatics import dsf_coulomb
from nvalchemiops.torch.interactions.lj import lj_energy
from nvalchemiops.torch.interactions.pair import PairPotential, lennard_jones
from nvalchemiops.torch.neighbors import neighbor_list
from tests.comparing import BACKENDS, close, derivative_along, random_like, same_bits, weighted
from tests.pair.users import (
    CUTOFF,
    EACH,
    MIXED,
    NEAR,
    ONE,
    POTENTIALS,
    Inputs,
    inputs_of,
    near,
    relaxed,
)
from tests.systems import triclinic

# -- compiled graphs ------------------------------------------------------------------------------


@EACH
@BACKENDS
def test_compiled_equals_eager(name, backend):
    """All results and all gradients, the flag included."""
    potential = POTENTIALS[name]

    def loss(x, cell, a, b):
        results = potential(x, cell, a, b, **NEAR)
        return weighted([r.sin() for r in results]), results

    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    found = []
    for function in (loss, compiled):
        inputs = inputs_of(name, MIXED).leaves()
        value, results = function(*inputs)
        assert all(r.requires_grad for r in results)
        found.append([*(r.detach() for r in results), *inputs.grad(value)])
    close(*found)
    with torch.no_grad():
        assert not any(r.requires_grad for r in compiled(*inputs_of(name, MIXED))[1])


@EACH
def test_dynamic_shapes_compile_at_most_twice(name):
    """Other numbers of atoms and pairs."""
    potential = POTENTIALS[name]
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def loss(x, cell, a, b, pairs, shifts):
        energies, forces, virial = potential(x, cell, a, b, neighbor_list=pairs, neighbor_shifts=shifts)
        return energies.square().sum() + forces.square().sum() + virial.square().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=counter)
    for n in (7, 5, 3, 6):
        system = relaxed(triclinic(n))
        found = []
        for function in (loss, compiled):
            inputs = inputs_of(name, system).leaves()
            value = function(*inputs, *near(system).values())
            found.append([value.detach(), *inputs.grad(value)])
        close(*found)
    assert counter.frame_count <= 2


@EACH
def test_one_tensor_in_two_places(name):
    """A gradient that is halved, or counted twice. Here sigma is epsilon, or the charge a function of alpha."""
    potential = POTENTIALS[name]

    def loss(x, s):
        return weighted(potential(x, ONE.cell, s, s if name == "LJ" else s[:1], **given))

    given = near(ONE)
    s = torch.linspace(0.5, 1.1, 7, dtype=torch.float64)
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaf = s.clone().requires_grad_()
        (found,) = torch.autograd.grad(function(ONE.positions, leaf), leaf)
        direction = random_like([s])[0]
        expected = derivative_along(lambda v, f=function: f(ONE.positions, v), s, direction)
        torch.testing.assert_close((found * direction).sum(), expected.detach(), rtol=1e-6, atol=1e-7)


def train(step, name, count=20):
    """Losses while a parameter of atoms and another one are fitted to forces."""
    system = relaxed(triclinic(7))
    inputs = inputs_of(name, system)
    given = near(system)
    target = [r.detach() for r in POTENTIALS[name](*inputs, **given)]
    a, b = (torch.nn.Parameter(1.05 * t) for t in (inputs.a, inputs.b))
    optimiser = torch.optim.Adam([a, b], lr=1e-3)
    losses = []
    for _ in range(count):
        optimiser.zero_grad()
        loss = step(a, b, inputs, given, target)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses, a.detach(), b.detach()


@EACH
def test_training_compiled_equals_training_eager(name):
    """Twenty steps of fitting parameters to energies and forces, on one curve that goes down."""

    def step(a, b, inputs, given, target):
        energies, forces, _ = POTENTIALS[name](inputs.x, inputs.cell, a, b, **given)
        return (energies - target[0]).square().sum() + (forces - target[1]).square().sum()

    eager = train(step, name)
    compiled = train(torch.compile(step, fullgraph=True, backend="aot_eager"), name)
    assert eager[0][-1] < 0.9 * eager[0][0]
    close([torch.tensor(eager[0]), *eager[1:]], [torch.tensor(compiled[0]), *compiled[1:]], 1e-9, atol=1e-11)


class Charges(torch.nn.Module):
    """Parameters of atoms that depend on the geometry."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1, dtype=torch.float64)
        with torch.no_grad():
            self.layer.weight.copy_(torch.tensor([[0.11, -0.07, 0.05]]))
            self.layer.bias.fill_(1.2)

    def forward(self, x):
        return torch.tanh(self.layer(x)).squeeze(1) + 0.7


def composed(name, net, x, b, given):
    return POTENTIALS[name](x, MIXED.cell, net(x), b, **given)[0]


@EACH
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("create_graph", [False, True])
def test_parameters_predicted_from_positions(name, training, create_graph):
    """The whole force, chain term counted once; without it if the charges are detached."""
    net = Charges().train(training)
    inputs = inputs_of(name, MIXED)
    direction = random_like([inputs.x])[0]
    x = inputs.x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(composed(name, net, x, inputs.b, NEAR).sum(), x, create_graph=create_graph)
    expected = derivative_along(lambda x: composed(name, net, x, inputs.b, NEAR).sum(), inputs.x, direction).detach()
    torch.testing.assert_close((slope * direction).sum().detach(), expected, rtol=1e-6, atol=1e-8)

    fixed = net(inputs.x).detach()
    energies, forces, _ = POTENTIALS[name](x, MIXED.cell, fixed, inputs.b, **NEAR)
    close(torch.autograd.grad(energies.sum(), x), [-forces.detach()], 1e-11)


@EACH
@pytest.mark.parametrize("reduction", ["atom", "system"])
def test_gradients_follow_random_weights_of_energies(name, reduction):
    """The weighted sum of single gradients, in everything."""
    inputs = inputs_of(name, MIXED).leaves()
    energies = POTENTIALS[name](*inputs, energy_reduction=reduction, **NEAR)[0]
    weights = random_like([energies])[0]
    found = inputs.grad(energies, grad_outputs=weights, retain_graph=True)
    singles = [inputs.grad(energy, retain_graph=True) for energy in energies]
    close(found, [sum(w * g for w, g in zip(weights, gs)) for gs in zip(*singles)])


@EACH
def test_backward_twice_gives_the_same_and_leaves_cotangents_alone(name):
    """Also for three calls with one and the same `grad_outputs`."""
    weights = None
    for _ in range(3):
        inputs = inputs_of(name, MIXED).leaves()
        results = POTENTIALS[name](*inputs, **NEAR)
        if weights is None:
            weights = random_like(results)
            before = copy.deepcopy(weights)
            expected = inputs.grad(results, grad_outputs=weights, retain_graph=True)
        for _ in range(2):
            same_bits(inputs.grad(results, grad_outputs=weights, retain_graph=True), expected)
        same_bits(weights, before)


@EACH
@pytest.mark.parametrize("changed", ["x", "cell", "a", "b", "neighbor_list", "neighbor_shifts", "batch_idx"])
@pytest.mark.parametrize("compiled", [False, True])
def test_inputs_changed_in_place_before_the_backward(name, changed, compiled):
    """An error, or the gradients of the original values."""

    def loss(x, cell, a, b, given):
        return weighted(POTENTIALS[name](x, cell, a, b, **given))

    function = torch.compile(loss, fullgraph=True, backend="aot_eager") if compiled else loss
    buffers = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in NEAR.items()}
    leaves = inputs_of(name, MIXED).leaves()
    inputs = Inputs(*(1.0 * t for t in leaves))
    expected = leaves.grad(loss(*leaves, NEAR))
    value = function(*inputs, buffers)
    target = buffers[changed] if changed in buffers else getattr(inputs, changed)
    with torch.no_grad():
        target.add_(1) if changed == "neighbor_shifts" else target.zero_()
    try:
        found = leaves.grad(value)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        close(found, expected)


@EACH
def test_second_derivatives(name):
    """Gradgradcheck in positions, cell and both parameters at once."""
    system = relaxed(triclinic(3))
    given = near(system)
    inputs = tuple(inputs_of(name, system).leaves())
    assert torch.autograd.gradcheck(lambda *i: POTENTIALS[name](*i, **given), inputs, atol=1e-6)
    assert torch.autograd.gradgradcheck(lambda *i: POTENTIALS[name](*i, **given)[0], inputs, atol=1e-6)


@EACH
def test_a_force_loss_gives_the_gradients_of_parameters(name):
    """By finite differences of the loss, whether forces are returned or come from autograd."""

    def loss(a, by_autograd):
        x = inputs.x.clone().requires_grad_()
        energies, forces, _ = POTENTIALS[name](x, inputs.cell, a, inputs.b, **NEAR)
        if by_autograd:
            forces = -torch.autograd.grad(energies.sum(), x, create_graph=True)[0]
        return (forces * weights).sin().sum()

    inputs = inputs_of(name, MIXED)
    weights, direction = random_like([inputs.x, inputs.a])
    for by_autograd in (False, True):
        a = inputs.a.clone().requires_grad_()
        (found,) = torch.autograd.grad(loss(a, by_autograd), a)
        expected = derivative_along(lambda a, w=by_autograd: loss(a, w), inputs.a, direction).detach()
        torch.testing.assert_close((found * direction).sum(), expected, rtol=1e-6, atol=1e-8)


@EACH
@BACKENDS
@pytest.mark.parametrize("way", ["returned forces", "autograd inside"])
def test_force_training_through_a_compiled_model(name, way, backend):
    """Both documented ways, in one graph; the gradients are those of eager mode."""
    inputs = inputs_of(name, MIXED)

    def loss(x, a, b):
        energies, forces, _ = POTENTIALS[name](x, inputs.cell, a, b, **NEAR)
        if way == "autograd inside":
            forces = -torch.autograd.grad(energies.sum(), x, create_graph=True)[0]
        return (forces - 0.1).square().sum() + energies.sum().square()

    found = []
    with torch._dynamo.config.patch(trace_autograd_ops=way == "autograd inside"):
        for function in (loss, torch.compile(loss, fullgraph=True, backend=backend)):
            x, a, b = (t.clone().requires_grad_() for t in (inputs.x, inputs.a, inputs.b))
            value = function(x, a, b)
            found.append([value.detach(), *torch.autograd.grad(value, (a, b))])
    close(*found, 1e-10)


# -- function transforms --------------------------------------------------------------------------


def scalar_energy(name):
    system = relaxed(triclinic(3))
    inputs, given = inputs_of(name, system), near(system)
    return lambda x: POTENTIALS[name](x, inputs.cell, inputs.a, inputs.b, **given)[0].sum(), inputs.x


@EACH
@pytest.mark.parametrize("way", ["vmap of vjp", "batched autograd", "jacrev of grad", "jacrev of jacrev"])
def test_hessians(name, way):
    """Equal to the loop over rows, and symmetric; the rows themselves to finite differences."""
    energy, x = scalar_energy(name)
    leaf = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(energy(leaf), leaf, create_graph=True)
    flat = slope.reshape(-1)
    rows = torch.stack([torch.autograd.grad(s, leaf, retain_graph=True)[0] for s in flat]).reshape(9, 9)
    units = torch.eye(9, dtype=torch.float64)
    if way == "vmap of vjp":
        _, pull = torch.func.vjp(torch.func.grad(energy), x)
        found = torch.vmap(lambda v: pull(v)[0])(units.reshape(9, 3, 3))
    elif way == "batched autograd":
        (found,) = torch.autograd.grad(flat, leaf, units, is_grads_batched=True)
    elif way == "jacrev of grad":
        found = torch.func.jacrev(torch.func.grad(energy))(x)
    else:
        found = torch.func.jacrev(torch.func.jacrev(energy))(x)
    close([found.reshape(9, 9), rows], [rows, rows.T], 1e-9)
    direction = random_like([x])[0]
    expected = derivative_along(lambda x: torch.func.grad(energy)(x), x, direction).reshape(-1)
    torch.testing.assert_close(rows @ direction.reshape(-1), expected, rtol=1e-6, atol=1e-6)


def test_forward_over_reverse_works_or_says_so():
    """`torch.func.hessian`, in a process of its own since it may take forever."""
    script = """
import torch
from nvalchemiops.torch.interactions.lj import lj_energy
x = torch.tensor([[0.0, 0, 0], [1.0, 0.2, 0.3]], dtype=torch.float64)
pairs = torch.tensor([[0, 1], [1, 0]])
energy = lambda x: lj_energy(x, 1.0, 1.0, 5.0, neighbor_list=pairs).sum()
expected = torch.func.jacrev(torch.func.jacrev(energy))(x)
try:
    torch.testing.assert_close(torch.func.hessian(energy)(x), expected)
except RuntimeError as error:
    assert "jacrev" in str(error)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 0, run.stderr


# -- cost of a call -------------------------------------------------------------------------------


class Dispatched(TorchDispatchMode):
    """The names of the ops that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.names.append(str(function))
        return function(*arguments, **options or {})


@pytest.mark.parametrize("gradients", [False, True])
def test_one_call_is_one_op(gradients):
    """A step of Lennard-Jones with a list dispatches the sum and a handful of views."""
    inputs, given = inputs_of("LJ", ONE), near(ONE)
    x = inputs.x.clone().requires_grad_(gradients)
    potential = lennard_jones(CUTOFF)
    ptr = torch.searchsorted(given["neighbor_list"][0].contiguous(), torch.arange(8, dtype=torch.int32), out_int32=True)
    with Dispatched() as seen:
        potential(x, inputs.cell[0], sigma=inputs.a, epsilon=inputs.b, neighbor_ptr=ptr, compute_forces=True, **given)
    assert sum("pair_sum" in name for name in seen.names) == 1
    others = [name for name in seen.names if "pair_sum" not in name]
    assert len(others) <= 10, others


# -- tools of torch -------------------------------------------------------------------------------


def test_functions_compile_before_they_were_called():
    """The first call ever may be inside of a graph."""

    def both(x, q):
        first = lj_energy(x, q.abs(), 0.3, CUTOFF, neighbor_list=pairs)
        second = dsf_coulomb(x, q, CUTOFF, 0.3, neighbor_list=pairs)
        return first, *second, ours(x, q=q, neighbor_list=pairs)

    ours = PairPotential("q1*q2*exp(-r)*1.23456", ("q",), cutoff=CUTOFF)  # never called before
    pairs = neighbor_list(ONE.positions, CUTOFF, return_neighbor_list=True)[0]
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    arguments = ONE.positions, inputs_of("DSF", ONE).a
    close(compiled(*arguments), both(*arguments))


@EACH
@pytest.mark.parametrize("strict", [False, True])
def test_export(name, strict):
    """An exported model of energies and forces, for other numbers of atoms."""
    POTENTIALS[name](*inputs_of(name, ONE), **near(ONE))

    class Model(torch.nn.Module):
        def forward(self, x, cell, a, b, pairs, shifts):
            return POTENTIALS[name](x, cell, a, b, neighbor_list=pairs, neighbor_shifts=shifts)

    n, m = torch.export.Dim("n", min=2), torch.export.Dim("m", min=2)
    shapes = ({0: n}, None, {0: n}, {0: n} if name == "LJ" else None, {1: m}, {0: m})
    example = (*inputs_of(name, ONE), *near(ONE).values())
    program = torch.export.export(Model(), example, dynamic_shapes=shapes, strict=strict)
    for size in (7, 4):
        system = relaxed(triclinic(size))
        arguments = (*inputs_of(name, system), *near(system).values())
        same_bits(program.module()(*arguments), Model()(*arguments))


@EACH
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(name, use_reentrant):
    """Recomputed in the backward pass, the same bits."""

    def loss(*inputs):
        return weighted(POTENTIALS[name](*inputs, **NEAR))

    found = []
    for function in (loss, lambda *i: checkpoint(loss, *i, use_reentrant=use_reentrant)):
        inputs = inputs_of(name, MIXED).leaves()
        function(*inputs).backward()
        found.append([t.grad for t in inputs])
    same_bits(*found)
