"""What users of other libraries met: each test names the row of the list of known pains that it is about.

Lennard-Jones stands for potentials of atoms' parameters, damped shifted forces for those with a global parameter and a
self energy. The cell is skewed, the batch has systems of unequal sizes in no order, and cotangents are random.
"""

import copy
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from nvalchemiops.torch.interactions.electrostatics import dsf_coulomb
from nvalchemiops.torch.interactions.lj import lj_energy, lj_energy_forces_virial
from nvalchemiops.torch.interactions.pair import PairPotential, damped_shifted_force, lennard_jones
from nvalchemiops.torch.neighbors import neighbor_list
from tests.systems import System, batch, no_atoms, triclinic

CUTOFF = 3.0
TINY = {"rtol": 1e-12, "atol": 1e-12}


class Inputs(NamedTuple):
    """All that a potential depends on: positions, cell, a parameter of atoms, and another one."""

    x: torch.Tensor
    cell: torch.Tensor | None
    a: torch.Tensor  # of atoms: sigma or charges
    b: torch.Tensor  # epsilon of atoms, or alpha of systems

    def leaves(self):
        return Inputs(*(None if t is None else t.detach().clone().requires_grad_() for t in self))

    def grad(self, value, **options):
        there = [t for t in self if t is not None]
        return torch.autograd.grad(value, there, **options)


LENNARD_JONES = lennard_jones(CUTOFF, r_switch=2.2)
DSF = damped_shifted_force(CUTOFF)


def lennard(x, cell, a, b, energy_reduction="atom", **near):
    return LENNARD_JONES(
        x, cell, sigma=a, epsilon=b, compute_forces=True, compute_virial=True, energy_reduction=energy_reduction, **near
    )


def dsf(x, cell, a, b, energy_reduction="atom", **near):
    return DSF(
        x, cell, q=a, alpha=b, compute_forces=True, compute_virial=True, energy_reduction=energy_reduction, **near
    )


POTENTIALS = {"LJ": lennard, "DSF": dsf}
EACH = pytest.mark.parametrize("name", POTENTIALS)
BACKENDS = pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])


def relaxed(system, seed=0):
    """Positions in the cell on a jittered grid, so that no two atoms are close."""
    n = len(system.charges)
    generator = torch.Generator().manual_seed(seed)
    grid = torch.cartesian_prod(*(torch.arange(2),) * 3)[:n].double() / 2
    jitter = 0.1 * torch.rand(n, 3, generator=generator, dtype=torch.float64)
    return system._replace(positions=(grid + jitter) @ system.cell[0])


def inputs_of(name, system, seed=5):
    n = len(system.charges)
    generator = torch.Generator().manual_seed(seed)
    a = torch.rand(n, generator=generator, dtype=torch.float64)
    if name == "LJ":
        a, b = 1.6 + 0.3 * a, 0.2 + torch.rand(n, generator=generator, dtype=torch.float64)
    else:
        a, b = a - 0.4, 0.25 + 0.05 * torch.arange(system.cell.shape[0], dtype=torch.float64)
    return Inputs(system.positions, system.cell, a, b)


def near(system, cutoff=CUTOFF):
    """A list for a batch in any order."""
    order = torch.sort(system.batch_idx, stable=True)[1]
    pairs, _, shifts = neighbor_list(
        system.positions[order], cutoff, system.cell, batch_idx=system.batch_idx[order], return_neighbor_list=True
    )
    pairs = order[pairs.long()].int()
    by_atom = torch.sort(pairs[0], stable=True)[1]
    return {"neighbor_list": pairs[:, by_atom].contiguous(), "neighbor_shifts": shifts[by_atom].contiguous()}


ONE = relaxed(triclinic(7))
MIXED = batch(relaxed(triclinic(7)), relaxed(triclinic(3, seed=2), 1), relaxed(triclinic(5, seed=3), 2))
SHUFFLE = torch.randperm(15, generator=torch.Generator().manual_seed(8))
MIXED = System(MIXED.positions[SHUFFLE], MIXED.charges[SHUFFLE], MIXED.cell, MIXED.batch_idx[SHUFFLE])
NEAR = near(MIXED) | {"batch_idx": MIXED.batch_idx, "num_systems": 3}


def random_like(tensors, seed=0):
    """Numbers without order, also inside of a compiled graph."""
    return [torch.sin(77.7 * (torch.arange(t.numel(), dtype=t.dtype) + seed + 1.3)).view(t.shape) for t in tensors]


def weighted(results, seed=0):
    """A scalar of all results, with random weights."""
    return sum((r * w).sum() for r, w in zip(results, random_like(results, seed), strict=True))


def close(found, expected, **tolerance):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **(tolerance or TINY))


def same_bits(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def slope_of(function, x, direction, h=1e-4):
    """Central difference of fourth order."""
    at = [function(x + k * h * direction) for k in (-2, -1, 1, 2)]
    return (at[0] - 8 * at[1] + 8 * at[2] - at[3]) / (12 * h)


# -- compiled graphs ------------------------------------------------------------------------------


@EACH
@BACKENDS
def test_compiled_equals_eager(name, backend):
    """A01: all results and all gradients, the flag included."""
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
    """A01: other numbers of atoms and pairs."""
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
    """A01: a gradient that is halved, or counted twice. Here sigma is epsilon, or the charge a function of alpha."""
    potential = POTENTIALS[name]

    def loss(x, s):
        return weighted(potential(x, ONE.cell, s, s if name == "LJ" else s[:1], **given))

    given = near(ONE)
    s = torch.linspace(0.5, 1.1, 7, dtype=torch.float64)
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaf = s.clone().requires_grad_()
        (found,) = torch.autograd.grad(function(ONE.positions, leaf), leaf)
        direction = random_like([s])[0]
        expected = slope_of(lambda v, f=function: f(ONE.positions, v), s, direction)
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
    """A01: twenty steps of fitting parameters to energies and forces, on one curve that goes down."""

    def step(a, b, inputs, given, target):
        energies, forces, _ = POTENTIALS[name](inputs.x, inputs.cell, a, b, **given)
        return (energies - target[0]).square().sum() + (forces - target[1]).square().sum()

    eager = train(step, name)
    compiled = train(torch.compile(step, fullgraph=True, backend="aot_eager"), name)
    assert eager[0][-1] < 0.9 * eager[0][0]
    close([torch.tensor(eager[0]), *eager[1:]], [torch.tensor(compiled[0]), *compiled[1:]], rtol=1e-9, atol=1e-11)


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
    """A02: the whole force, chain term counted once; without it if the charges are detached."""
    net = Charges().train(training)
    inputs = inputs_of(name, MIXED)
    direction = random_like([inputs.x])[0]
    x = inputs.x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(composed(name, net, x, inputs.b, NEAR).sum(), x, create_graph=create_graph)
    expected = slope_of(lambda x: composed(name, net, x, inputs.b, NEAR).sum(), inputs.x, direction).detach()
    torch.testing.assert_close((slope * direction).sum().detach(), expected, rtol=1e-6, atol=1e-8)

    fixed = net(inputs.x).detach()
    energies, forces, _ = POTENTIALS[name](x, MIXED.cell, fixed, inputs.b, **NEAR)
    close(torch.autograd.grad(energies.sum(), x), [-forces.detach()], rtol=1e-11, atol=1e-11)


@EACH
@pytest.mark.parametrize("reduction", ["atom", "system"])
def test_gradients_follow_random_weights_of_energies(name, reduction):
    """A03: the weighted sum of single gradients, in everything."""
    inputs = inputs_of(name, MIXED).leaves()
    energies = POTENTIALS[name](*inputs, energy_reduction=reduction, **NEAR)[0]
    weights = random_like([energies])[0]
    found = inputs.grad(energies, grad_outputs=weights, retain_graph=True)
    singles = [inputs.grad(energy, retain_graph=True) for energy in energies]
    close(found, [sum(w * g for w, g in zip(weights, gs)) for gs in zip(*singles)])


@EACH
def test_backward_twice_gives_the_same_and_leaves_cotangents_alone(name):
    """A04: also for three calls with one and the same `grad_outputs`."""
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
    """A05: an error, or the gradients of the original values."""

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
    """A06: gradgradcheck in positions, cell and both parameters at once."""
    system = relaxed(triclinic(3))
    given = near(system)
    inputs = tuple(inputs_of(name, system).leaves())
    assert torch.autograd.gradcheck(lambda *i: POTENTIALS[name](*i, **given), inputs, atol=1e-6)
    assert torch.autograd.gradgradcheck(lambda *i: POTENTIALS[name](*i, **given)[0], inputs, atol=1e-6)


@EACH
def test_a_force_loss_gives_the_gradients_of_parameters(name):
    """A06: by finite differences of the loss, whether forces are returned or come from autograd."""

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
        expected = slope_of(lambda a, w=by_autograd: loss(a, w), inputs.a, direction).detach()
        torch.testing.assert_close((found * direction).sum(), expected, rtol=1e-6, atol=1e-8)


@EACH
@BACKENDS
@pytest.mark.parametrize("way", ["returned forces", "autograd inside"])
def test_force_training_through_a_compiled_model(name, way, backend):
    """A07: both documented ways, in one graph; the gradients are those of eager mode."""
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
    close(*found, rtol=1e-10, atol=1e-10)


# -- function transforms --------------------------------------------------------------------------


def scalar_energy(name):
    system = relaxed(triclinic(3))
    inputs, given = inputs_of(name, system), near(system)
    return lambda x: POTENTIALS[name](x, inputs.cell, inputs.a, inputs.b, **given)[0].sum(), inputs.x


@EACH
@pytest.mark.parametrize("way", ["vmap of vjp", "batched autograd", "jacrev of grad", "jacrev of jacrev"])
def test_hessians(name, way):
    """A08: equal to the loop over rows, and symmetric; the rows themselves to finite differences."""
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
    close([found.reshape(9, 9), rows], [rows, rows.T], rtol=1e-9, atol=1e-9)
    direction = random_like([x])[0]
    expected = slope_of(lambda x: torch.func.grad(energy)(x), x, direction).reshape(-1)
    torch.testing.assert_close(rows @ direction.reshape(-1), expected, rtol=1e-6, atol=1e-6)


def test_forward_over_reverse_works_or_says_so():
    """A08: `torch.func.hessian`, in a process of its own since it may take forever."""
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
    """A12: a step of Lennard-Jones with a list dispatches the sum and a handful of views."""
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
    """A01: the first call ever may be inside of a graph."""

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
    """A01: an exported model of energies and forces, for other numbers of atoms."""
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
    """A01: recomputed in the backward pass, the same bits."""

    def loss(*inputs):
        return weighted(POTENTIALS[name](*inputs, **NEAR))

    found = []
    for function in (loss, lambda *i: checkpoint(loss, *i, use_reentrant=use_reentrant)):
        inputs = inputs_of(name, MIXED).leaves()
        function(*inputs).backward()
        found.append([t.grad for t in inputs])
    same_bits(*found)


# -- the same bits --------------------------------------------------------------------------------


def all_bits(name, inputs, **given):
    """Results, and first gradients of all inputs."""
    leaves = inputs.leaves()
    results = POTENTIALS[name](*leaves, **given)
    return [*(r.detach() for r in results), *leaves.grad(weighted([r.sin() for r in results]))]


@EACH
def test_runs_and_threads_do_not_change_a_bit(name, threads, always_split):
    inputs = inputs_of(name, MIXED)
    expected = all_bits(name, inputs, **NEAR)
    for count in (1, 2, 3, 2):
        threads(count)
        same_bits(all_bits(name, inputs, **NEAR), expected)


def test_gradients_of_tables_do_not_depend_on_threads(threads, always_split, dtype):
    """Nor lose digits: like all sums they are added in float64."""
    n = 40_000
    generator = torch.Generator().manual_seed(1)
    positions = torch.zeros(n, 3, dtype=dtype)
    positions[:, 0] = 10.0 * torch.arange(n) // 20 + (torch.arange(n) % 2) * (1.0 + torch.rand(n, generator=generator))
    i = torch.arange(n, dtype=torch.int32)
    species = torch.randint(0, 3, (n,), generator=generator)
    table = torch.rand(3, 3, generator=generator).to(dtype)
    potential = PairPotential("A/r", per_pair=("A",), cutoff=5.0)

    def slopes(dtype):
        a = table.to(dtype).requires_grad_()
        options = {"neighbor_list": torch.stack([i, i ^ 1]), "species": species}
        energies, slope = potential(positions.to(dtype), A=a, compute_gradients=("A",), **options)
        return slope.detach(), torch.autograd.grad(energies.sum(), a)[0]

    found = []
    for count in (1, 2, 3, 2):
        threads(count)
        found.append(slopes(dtype))
    for other in found[1:]:
        same_bits(other, found[0])
    close([s.double() for s in found[0]], slopes(torch.float64), rtol=1e-6 if dtype == torch.float32 else 0, atol=0)


@EACH
@pytest.mark.parametrize("member", [0, 1, 2])
def test_a_system_alone_has_the_bits_of_a_member_of_a_batch(name, member):
    """With its own part of the list, or lists built by the call."""
    mine = MIXED.batch_idx == member
    inputs = inputs_of(name, MIXED)
    alone = Inputs(
        inputs.x[mine],
        inputs.cell[member],
        inputs.a[mine],
        inputs.b[mine] if name == "LJ" else inputs.b[member : member + 1],
    )
    number = torch.cumsum(mine, 0).int() - 1
    kept = mine[NEAR["neighbor_list"][0].long()]
    given = {
        "neighbor_list": number[NEAR["neighbor_list"][:, kept].long()],
        "neighbor_shifts": NEAR["neighbor_shifts"][kept],
    }
    together = POTENTIALS[name](*inputs, **NEAR)
    same_bits(POTENTIALS[name](*alone, **given), (together[0][mine], together[1][mine], together[2][member][None]))
    built = POTENTIALS[name](*inputs, batch_idx=MIXED.batch_idx)
    close(built, together)
    close(POTENTIALS[name](*alone), (built[0][mine], built[1][mine], built[2][member][None]))


def test_systems_of_a_batch_without_cell_do_not_interact():
    """Also where nothing but the list needs to know the systems: energies of atoms, lists built by the call."""
    x = torch.cat([ONE.positions, ONE.positions + 0.7])
    batch_idx = torch.arange(2, dtype=torch.int32).repeat_interleave(7)
    alone = [lj_energy(part, 1.5, 0.3, CUTOFF) for part in x.split(7)]
    for options in ({}, {"num_systems": 2}):
        close([lj_energy(x, 1.5, 0.3, CUTOFF, batch_idx=batch_idx, **options)], [torch.cat(alone)])
    mixed = torch.randperm(14, generator=torch.Generator().manual_seed(1))
    close([lj_energy(x[mixed], 1.5, 0.3, CUTOFF, batch_idx=batch_idx[mixed])], [torch.cat(alone)[mixed]])
    charges = torch.linspace(-1, 1, 14, dtype=torch.float64)
    energies, _ = dsf_coulomb(x, charges, CUTOFF, batch_idx=batch_idx)
    parts = [dsf_coulomb(part, q, CUTOFF)[0] for part, q in zip(x.split(7), charges.split(7))]
    close([energies], [torch.cat(parts)])


@EACH
@pytest.mark.parametrize("extra", ["pairs beyond the cutoff", "padding", "padding in between"])
def test_longer_lists_and_padding_change_nothing(name, extra):
    inputs = inputs_of(name, ONE)
    if extra == "pairs beyond the cutoff":
        system = ONE._replace(positions=inputs.x)
        longer, shorter = near(system, 1.4 * CUTOFF), near(system)
        assert longer["neighbor_list"].shape[1] > shorter["neighbor_list"].shape[1]
        # as lists of different reach may have another order
        close(all_bits(name, inputs, **longer), all_bits(name, inputs, **shorter))
        i, j = longer["neighbor_list"].long()
        d = inputs.x[j] - inputs.x[i] + longer["neighbor_shifts"].double() @ inputs.cell[0]
        kept = d.norm(dim=1) < CUTOFF
        shorter = {
            "neighbor_list": longer["neighbor_list"][:, kept],
            "neighbor_shifts": longer["neighbor_shifts"][kept],
        }
        same_bits(all_bits(name, inputs, **longer), all_bits(name, inputs, **shorter))
        return
    matrix, _, shifts = neighbor_list(inputs.x, CUTOFF, inputs.cell)
    expected = all_bits(name, inputs, neighbor_matrix=matrix, neighbor_matrix_shifts=shifts)
    n, width = matrix.shape
    places = torch.arange(width) * 3 if extra == "padding in between" else torch.arange(width)
    wide = torch.full((n, 3 * width + 5), -7, dtype=torch.int32)
    wide_shifts = torch.full((n, 3 * width + 5, 3), 99, dtype=torch.int32)
    wide[:, places], wide_shifts[:, places] = torch.where(matrix == n, -7, matrix), shifts
    given = {"neighbor_matrix": wide, "neighbor_matrix_shifts": wide_shifts, "fill_value": -7}
    same_bits(all_bits(name, inputs, **given), expected)


# -- nothing to do --------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("matrix", [False, True])
@pytest.mark.parametrize("n_atoms", [0, 1, 2])
def test_no_pairs(name, n_atoms, matrix):
    """N21: no atoms, one, or two far apart; forces are zero, and everything differentiates, also twice."""
    system = no_atoms() if n_atoms == 0 else relaxed(triclinic(n_atoms))
    inputs = inputs_of(name, system).leaves()
    if matrix:
        given = {"neighbor_matrix": torch.zeros(n_atoms, 0, dtype=torch.int32)}
        given["neighbor_matrix_shifts"] = torch.zeros(n_atoms, 0, 3, dtype=torch.int32)
    else:
        given = {"neighbor_list": torch.zeros(2, 0, dtype=torch.int32)}
        given["neighbor_shifts"] = torch.zeros(0, 3, dtype=torch.int32)
    energies, forces, virial = POTENTIALS[name](*inputs, **given)
    assert energies.shape == (n_atoms,) and forces.shape == (n_atoms, 3) and virial.shape == (1, 3, 3)
    assert not forces.any() and not virial.any()
    assert not energies.any() if name == "LJ" else energies.isfinite().all()
    slopes = inputs.grad(energies.sum() + forces.sum() + virial.sum(), create_graph=True)
    assert all(s.isfinite().all() for s in slopes)
    again = inputs.grad(sum(s.square().sum() for s in slopes), allow_unused=True, materialize_grads=True)
    assert all(s.isfinite().all() for s in again)


@EACH
@pytest.mark.parametrize("cell", [True, False])
def test_an_empty_system_in_a_batch(name, cell):
    """N21: its energy and virial are zero, and the others are as without it."""
    keep = (MIXED.batch_idx != 1).nonzero().squeeze(1)
    inputs = inputs_of(name, MIXED)
    b = inputs.b[keep] if name == "LJ" else inputs.b
    part = Inputs(inputs.x[keep], inputs.cell if cell else None, inputs.a[keep], b).leaves()
    options = {"batch_idx": MIXED.batch_idx[keep], "num_systems": 3, "energy_reduction": "system"}
    energies, forces, virial = POTENTIALS[name](*part, **options)
    assert energies.shape == (3,) and energies[1] == 0 and not virial[1].any()
    slopes = part.grad(energies.sum() + forces.square().sum() + virial.square().sum())
    assert all(s.isfinite().all() for s in slopes)
    for k in (0, 2):
        mine = options["batch_idx"] == k
        b = part.b[mine] if name == "LJ" else part.b[k : k + 1]
        alone = POTENTIALS[name](
            part.x[mine], part.cell[k] if cell else None, part.a[mine], b, energy_reduction="system"
        )
        close([t.detach() for t in alone], [t.detach() for t in (energies[k : k + 1], forces[mine], virial[k : k + 1])])


@EACH
@pytest.mark.parametrize("where", ["origin", "on an atom"])
def test_padding_atoms(name, where):
    """N22: atoms without neighbors after the real ones: the same bits, and no gradient, at distance zero as well."""
    inputs, n = inputs_of(name, ONE), 7
    matrix, _, shifts = neighbor_list(inputs.x, CUTOFF, inputs.cell)
    place = torch.zeros(3, 3, dtype=torch.float64) if where == "origin" else inputs.x[:1].expand(3, 3)
    fill = torch.zeros(3, dtype=torch.float64)
    more = Inputs(
        torch.cat([inputs.x, place]),
        inputs.cell,
        torch.cat([inputs.a, fill]),
        torch.cat([inputs.b, fill]) if name == "LJ" else inputs.b,
    )
    given = {
        "neighbor_matrix": torch.cat([matrix, torch.full((3, matrix.shape[1]), n, dtype=torch.int32)]),
        "neighbor_matrix_shifts": torch.cat([shifts, torch.zeros(3, *shifts.shape[1:], dtype=torch.int32)]),
        "fill_value": n,
    }
    results = []
    for values, options in ((inputs, {"neighbor_matrix": matrix, "neighbor_matrix_shifts": shifts}), (more, given)):
        leaves = values.leaves()
        energies, forces, virial = POTENTIALS[name](*leaves, **options)
        loss = energies[:n].sum() + forces[:n].square().sum() + virial.square().sum()
        results.append(([energies, forces, virial], leaves.grad(loss)))
    (plain, plain_slopes), (padded, slopes) = results
    same_bits([padded[0][:n], padded[1][:n], padded[2]], plain)
    assert not padded[0][n:].any() and not padded[1][n:].any()
    per_atom = [True, False, True, name == "LJ"]
    same_bits([s[:n] if cut else s for s, cut in zip(slopes, per_atom)], plain_slopes)
    assert not any(s[n:].any() for s, cut in zip(slopes, per_atom) if cut)


# -- conventions ----------------------------------------------------------------------------------


@EACH
def test_signs_of_forces_and_virial(name):
    """E03: W = -dE/dstrain and F = -dE/dR by finite differences, in a cell without symmetry."""
    inputs = inputs_of(name, MIXED)
    _, forces, virial = POTENTIALS[name](*inputs, **NEAR)
    strain, move = random_like([virial, forces])

    def deformed(x, s):
        h = torch.eye(3, dtype=torch.float64) + s * strain
        positions = torch.einsum("ia,iab->ib", x, h[MIXED.batch_idx.long()])
        return POTENTIALS[name](positions, inputs.cell @ h, inputs.a, inputs.b, **NEAR)[0].sum()

    found = -slope_of(lambda s: deformed(inputs.x, s), torch.tensor(0.0), torch.tensor(1.0, dtype=torch.float64))
    torch.testing.assert_close(found, (virial * strain).sum(), rtol=1e-6, atol=1e-8)
    found = -slope_of(lambda x: deformed(x, 0.0), inputs.x, move)
    torch.testing.assert_close(found, (forces * move).sum(), rtol=1e-6, atol=1e-8)


def test_a_compressed_crystal_pushes_outwards():
    """E03: stress = -W/V, so the pressure tr(W)/(3 V) is positive if squeezed, negative if stretched."""
    pressure = {}
    for length in (1.3, 1.7):
        cell = length * torch.eye(3, dtype=torch.float64)
        virial = lj_energy_forces_virial(torch.zeros(1, 3, dtype=torch.float64), 1.3, 1.0, 2.6, cell)[2]
        pressure[length] = virial.diagonal(dim1=1, dim2=2).sum().item() / (3.0 * length**3)
    assert pressure[1.3] > 0.1
    assert pressure[1.7] < -0.1


@EACH
@pytest.mark.parametrize("matrix", [False, True])
def test_half_lists_give_the_same(name, matrix):
    """E13: energies, forces, virial and gradients. (That a contradiction is found: test_bad_input.py.)"""
    inputs = inputs_of(name, ONE)
    expected = all_bits(name, inputs, **near(ONE))
    options = {"half_fill": True, "return_neighbor_list": not matrix}
    found = neighbor_list(inputs.x, CUTOFF, inputs.cell, **options)
    half = (
        {"neighbor_matrix": found[0], "neighbor_matrix_shifts": found[2]}
        if matrix
        else {"neighbor_list": found[0], "neighbor_ptr": found[1], "neighbor_shifts": found[2]}
    )
    close(all_bits(name, inputs, **half, half_list=True), expected)
    close(all_bits(name, inputs, **half, half_list=True, check=True), expected)


EXCLUDED = torch.tensor([[0, 1, 6], [3, 2, 4]])
FACTORS = torch.tensor([0.0, 0.5, 0.0, 1.0], dtype=torch.float64)


@EACH
def test_exclusions_do_not_depend_on_the_image_that_is_stored(name):
    """E14: a partner moved by a lattice vector, with the list of the moved atoms."""
    inputs = inputs_of(name, ONE)
    options = {"exclusions": EXCLUDED, "exclusion_factors": FACTORS[:3]}
    expected = POTENTIALS[name](*inputs, **near(ONE), **options)
    without = POTENTIALS[name](*inputs, **near(ONE))
    assert (expected[0] - without[0]).abs().max() > 1e-4
    for seed in range(3):
        jumps = torch.randint(-2, 3, (7, 3), generator=torch.Generator().manual_seed(seed)).double()
        moved = ONE._replace(positions=ONE.positions + jumps @ ONE.cell[0])
        for given in (near(moved), {}):
            found = POTENTIALS[name](moved.positions, *inputs[1:], **given, **options)
            close(found, expected, rtol=1e-10, atol=1e-10)


def test_factors_scale_energies_and_forces_alike():
    """E14: as for 1-4 pairs."""
    x = torch.tensor([[0.0, 0, 0], [1.0, 0.5, 0]], dtype=torch.float64)
    options = {"neighbor_list": torch.tensor([[0, 1], [1, 0]]), "compute_forces": True, "q": 1.0}
    potential = PairPotential("q1*q2/r", ("q",))
    pair = torch.tensor([[0], [1]])
    full, half = (potential(x, **options, exclusions=pair, exclusion_factors=FACTORS[k : k + 1]) for k in (3, 1))
    close(full, potential(x, **options))
    close(half, [0.5 * r for r in full])


@EACH
def test_exclusions_take_away_the_nearest_pairs(name):
    """E14: the result is the full energy less that of the excluded pairs; forces by finite differences."""
    inputs = inputs_of(name, ONE)
    options = {"exclusions": EXCLUDED, "exclusion_factors": FACTORS[:3]}
    energies, forces, _ = POTENTIALS[name](*inputs, **near(ONE), **options)
    full = POTENTIALS[name](*inputs, **near(ONE))[0]
    images = torch.cartesian_prod(*(torch.arange(-2, 3),) * 3).double() @ inputs.cell[0]
    less = 0.0
    for (i, j), factor in zip(EXCLUDED.T.tolist(), FACTORS.tolist()):
        d = inputs.x[j] - inputs.x[i] + images
        d = d[d.norm(dim=1).argmin()]
        pair = torch.stack([torch.zeros(3, dtype=torch.float64), d])
        ab = inputs.a[[i, j]], inputs.b[[i, j]] if name == "LJ" else inputs.b
        both = {"neighbor_list": torch.tensor([[0, 1], [1, 0]])}
        alone = {"neighbor_list": torch.zeros(2, 0, dtype=torch.int64)}
        energy_of_pair = [POTENTIALS[name](pair, None, *ab, **g)[0].sum() for g in (both, alone)]
        less = less + (1.0 - factor) * (energy_of_pair[0] - energy_of_pair[1])
    torch.testing.assert_close(energies.sum(), full.sum() - less, rtol=1e-11, atol=1e-11)
    move = random_like([forces])[0]
    slope = slope_of(lambda x: POTENTIALS[name](x, *inputs[1:], **near(ONE), **options)[0].sum(), inputs.x, move)
    torch.testing.assert_close(-slope, (forces * move).sum(), rtol=1e-6, atol=1e-8)
