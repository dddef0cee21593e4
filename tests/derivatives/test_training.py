"""Force, stress and energy matching through a network and particle-mesh Ewald, by every way.

The model is that of ``examples/10_force_matching.py``: messages, learned charges, PME. The loss may be right and its
gradient wrong by a factor, so gradients are compared with each other and with finite differences, for the energies,
forces and stresses one by one.
"""

import datetime
import functools
import re

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.parallel import DistributedDataParallel

from tests.support.comparing import derivative_along, random_like
from tests.support.examples import example, said_by

fm = example("10_force_matching")
ROUNDING = 1e-10


@functools.cache
def setting(count=4):
    """Crystals of 8 to 64 atoms, and a reference and a model with the same sum."""
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(1)
    structures = fm.crystals(count, generator)
    coulomb = fm.sum_for(structures)
    return structures, fm.Potential(fm.Reference(), coulomb), fm.Potential(fm.Network(), coulomb)


def labelled(*numbers, **sizes):
    """A batch of some of the crystals, with what the reference says."""
    structures, reference, _ = setting()
    batch = fm.Batch.of([structures[n] for n in numbers], **sizes)
    return batch, fm.Observables(*(t.detach() for t in fm.by_explicit_forces(reference, batch)))


def model(dtype=torch.float64):
    """A model to change, always from the same start."""
    potential = fm.Potential(fm.Network(dtype=dtype), setting()[2].coulomb)
    potential.load_state_dict(setting()[2].state_dict())
    return potential


def positions_from_outside(potential, backend):
    """The forces by `torch.autograd.grad` inside of the graph, by positions that come into it with their flag."""

    def loss(batch, expected, positions, strain):
        energy = potential(batch, positions, strain)
        slopes = torch.autograd.grad(energy.sum(), (positions, strain), create_graph=True)
        return fm.loss_of(fm.Observables.of(batch, energy, *slopes), expected, batch)

    compiled = torch.compile(loss, fullgraph=True, backend=backend)

    def from_leaves(batch, expected):
        leaves = batch.positions.clone().requires_grad_(), torch.zeros_like(batch.cell).requires_grad_()
        return compiled(batch, expected, *leaves)

    return fm.gradients_of(from_leaves, list(potential.parameters()))


def steps(potential, backend="aot_eager"):
    """All ways to a loss and its gradients by the parameters."""
    found = fm.ways(potential, backend) | {"positions from outside": positions_from_outside(potential, backend)}
    eager, explicit, functional, inside, returned, outside = found.values()
    return {
        "eager": eager,
        "explicit forces": explicit,
        "torch.func": functional,
        "compiled, autograd inside": inside,
        "compiled, explicit forces": returned,
        "compiled, positions from outside": outside,
    }


@pytest.fixture
def traced_autograd():
    """`torch.autograd.grad` may be part of a graph."""
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        yield


def assert_same_step(found, expected, tolerance=ROUNDING):
    """Loss, and gradients relative to the largest one of their parameter."""
    assert float(found[0]) == pytest.approx(float(expected[0]), rel=tolerance)
    for a, b in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(a, b, rtol=0.0, atol=tolerance * float(b.abs().max()))


# -- all ways are one -----------------------------------------------------------------------------

NEEDS_LEAVES_INSIDE = pytest.mark.since_torch("2.12", "tensors that require a gradient cannot be made inside a graph")
WAYS = (
    "explicit forces",
    "torch.func",
    pytest.param("compiled, autograd inside", marks=NEEDS_LEAVES_INSIDE),
    "compiled, explicit forces",
)


@pytest.mark.parametrize("way", [*WAYS, "compiled, positions from outside"])
def test_each_way_gives_the_loss_and_the_gradients_of_eager_autograd(way, traced_autograd):
    """To rounding. Each parameter has a gradient."""
    data, each = labelled(0, 1, 2), steps(setting()[2])
    expected = each["eager"](*data)
    assert all(gradient.abs().max() > 1e-6 for gradient in expected[1])
    assert_same_step(each[way](*data), expected)


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize("way", WAYS[2:])
def test_each_way_with_inductor(way, traced_autograd):
    data = labelled(0, 1, 2)
    each = steps(setting()[2], "inductor")
    assert_same_step(each[way](*data), each["eager"](*data))


@pytest.mark.parametrize("fitted", fm.Observables._fields)
@pytest.mark.parametrize("observe", [fm.by_autograd, fm.by_explicit_forces])
def test_gradients_of_a_loss_on_each_observable_equal_finite_differences(observe, fitted):
    """By all parameters at once, in a random direction."""
    potential, (batch, expected) = model(), labelled(0, 2)
    parameters = list(potential.parameters())
    start = [p.detach().clone() for p in parameters]

    def loss():
        return (getattr(observe(potential, batch), fitted) - getattr(expected, fitted)).square().sum()

    gradients = torch.autograd.grad(loss(), parameters, allow_unused=True, materialize_grads=True)
    directions = random_like(parameters)

    def at(amount):
        with torch.no_grad():
            for parameter, value, direction in zip(parameters, start, directions):
                parameter.copy_(value + amount * direction)
        return loss().detach()

    found = float(sum((g * d).sum() for g, d in zip(gradients, directions)))
    assert found == pytest.approx(float(derivative_along(at, 0.0, 1.0)), rel=1e-6)


# -- many batches, one graph ----------------------------------------------------------------------


@pytest.mark.parametrize("observe", [pytest.param(fm.by_autograd, marks=NEEDS_LEAVES_INSIDE), fm.by_explicit_forces])
def test_training_compiles_once_and_goes_as_in_eager_mode(observe, traced_autograd):
    """Batches of other sizes and numbers of crystals, with parameters that change."""
    data = [labelled(0, 1, 2), labelled(3), labelled(3, 2, 1, 0), labelled(0), labelled(1, 3)]
    counter = CompileCounterWithBackend("aot_eager")
    losses = []
    for compiled in (False, True):
        potential = model()
        step = fm.gradients_of(fm.Loss(potential, observe), list(potential.parameters()))
        if compiled:
            step = torch.compile(step, fullgraph=True, backend=counter)
        optimizer = torch.optim.Adam(potential.parameters(), lr=5e-3)
        losses.append([])
        for number in range(15):
            loss, gradients = step(*data[number % len(data)])
            for parameter, gradient in zip(potential.parameters(), gradients):
                parameter.grad = gradient
            optimizer.step()
            losses[-1].append(loss.item())
    assert counter.frame_count == 1
    # rounding grows along the steps
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)
    assert losses[0][-5] < 0.5 * losses[0][0]


@pytest.mark.slow
def test_batches_without_padding_compile_at_most_twice(traced_autograd):
    """Numbers of atoms and crystals are dynamic instead."""
    structures, _, potential = setting()
    counter = CompileCounterWithBackend("aot_eager")
    eager = steps(potential)["eager"]
    step = torch.compile(eager, fullgraph=True, backend=counter, dynamic=True)
    for numbers in ((3, 2, 1), (1, 0, 2, 3), (2, 2, 1, 1, 0)):
        sizes = {"n_atoms": sum(len(structures[n].species) for n in numbers) + 1, "n_systems": len(numbers)}
        data = labelled(*numbers, **sizes)
        assert_same_step(step(*data), eager(*data))
    assert counter.frame_count <= 2


def test_padding_changes_nothing():
    numbers, step = (0, 2, 1), steps(setting()[2])["explicit forces"]
    atoms = sum(len(setting()[0][n].species) for n in numbers)
    tight, loose = labelled(*numbers, n_atoms=atoms, n_systems=3), labelled(*numbers, n_atoms=200, n_systems=7)
    assert_same_step(step(*loose), step(*tight))
    for a, b in zip(loose[1], tight[1]):
        n = atoms if b.shape[0] == atoms else 3
        torch.testing.assert_close(a[:n], b[:n], rtol=1e-12, atol=1e-12)
        assert not a[n:].any()


# -- what is not the right way says so ------------------------------------------------------------


@pytest.mark.later
@NEEDS_LEAVES_INSIDE
def test_autograd_inside_a_graph_needs_its_setting():
    data, step = labelled(0), steps(setting()[2])["compiled, autograd inside"]
    with pytest.raises(torch._dynamo.exc.Unsupported, match="trace_autograd_ops"):
        step(*data)


def test_function_transforms_of_the_sum_inside_a_graph_raise_or_are_right():
    """Torch 2.13 and 2.14 raise, each by another class of error."""
    data, step = labelled(0), steps(setting()[2])["torch.func"]
    try:
        found = torch.compile(step, fullgraph=True, backend="aot_eager")(*data)
    except torch._dynamo.exc.TorchDynamoException as error:
        assert "torch.func transforms of the op work in eager mode only" in str(error)
    else:
        assert_same_step(found, step(*data))


# -- precision ------------------------------------------------------------------------------------


def single(values):
    return type(values)(*(t.float() if t.is_floating_point() else t for t in values))


@pytest.mark.parametrize(
    ("positions", "way"),
    [(torch.float64, "eager"), (torch.float64, "compiled, explicit forces"), (torch.float32, "eager")],
)
def test_a_network_in_single_precision(positions, way):
    """With positions and the sum in double precision, or all of it in single: gradients of the kind of parameters."""
    data = labelled(0, 2)
    _, expected = steps(setting()[2])["eager"](*data)
    if positions is torch.float32:
        data = tuple(single(d) for d in data)
    _, found = steps(model(torch.float32))[way](*data)
    assert {g.dtype for g in found} == {torch.float32}
    for a, b in zip(found, expected):
        assert (a.double() - b).norm() < 2e-4 * b.norm()


@pytest.mark.parametrize("way", ["eager", "explicit forces", "compiled, explicit forces"])
def test_autocast(way):
    """The network multiplies in bfloat16; charges come back to the precision of the positions before the sum."""
    data = labelled(0, 2)
    loss, expected = steps(setting()[2])["eager"](*data)
    step = steps(model(torch.float32))[way]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found_loss, found = step(*data)
    assert float(found_loss) == pytest.approx(float(loss), rel=0.05)
    flat, exact = (torch.cat([g.double().flatten() for g in gradients]) for gradients in (found, expected))
    difference = ((flat - exact).norm() / exact.norm()).item()
    assert 1e-5 < difference < 0.1  # rounded, but the same


def test_charges_of_low_precision_are_refused_and_the_sum_is_not_autocast():
    """Nothing is rounded that the caller did not round."""
    batch, _ = labelled(0, 2)
    coulomb = setting()[2].coulomb
    for data in (batch, single(batch)):
        charges = (fm.FORMAL_CHARGE[data.species] * data.is_atom).to(data.positions.dtype).requires_grad_()

        def results(data=data, charges=charges):
            found = coulomb(data.positions, charges, data.cell, **data.near, compute_forces=True, compute_virial=True)
            return *found, *torch.autograd.grad(sum(f.square().sum() for f in found), charges)

        with torch.autocast("cpu", dtype=torch.bfloat16):
            rounded = results()
        for a, b in zip(rounded, results(), strict=True):
            assert torch.equal(a, b)
        with pytest.raises(TypeError, match=r"`charges` has dtype torch\.bfloat16, but `positions` has"):
            coulomb(data.positions, charges.bfloat16(), data.cell, **data.near)


# -- batches in parts -----------------------------------------------------------------------------


PARTS = ((0, 3), (2,))  # crystals of each process


def one_of_two(rank, folder):
    """One process of a distributed step: the gradients of its part, averaged with those of the other."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=datetime.timedelta(minutes=2)
    )
    torch.save(averaged_gradients(rank), f"{folder}/{rank}.pt")
    # to leave before the other is through may end in waiting for it
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def averaged_gradients(rank):
    potential = model()
    loss = DistributedDataParallel(fm.Loss(potential, fm.by_autograd if rank else fm.by_explicit_forces))
    # the average of the two is a mean over processes, and should be one over crystals
    share = len(PARTS[rank]) * 2 / sum(len(p) for p in PARTS)
    (share * loss(*labelled(*PARTS[rank]))).backward()
    return [p.grad for p in potential.parameters()]


@pytest.mark.later
def test_two_processes_give_the_gradients_of_one(tmp_path):
    """DistributedDataParallel over gloo; the two take different ways to their forces."""
    torch.multiprocessing.start_processes(one_of_two, (str(tmp_path),), nprocs=2, start_method="spawn")
    _, expected = steps(setting()[2])["eager"](*labelled(*PARTS[0], *PARTS[1]))
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for a, b, exact in zip(first, second, expected, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, exact, rtol=0.0, atol=ROUNDING * float(exact.abs().max()))


# -- the example ----------------------------------------------------------------------------------


@pytest.mark.later
@NEEDS_LEAVES_INSIDE
def test_the_example_runs():
    said = said_by("10_force_matching", "--quick")
    rows = re.findall(r"^(.+?) +[\d.]+ +[\d.]+ +(\d\.\de[+-]\d+)$", said, re.MULTILINE)
    assert len(rows) == 5 and all(float(deviation) < 1e-10 for _, deviation in rows)
    before, after = re.search(r"force \(meV/Å\) +([\d.]+) +([\d.]+)", said).groups()
    assert float(after) < 0.7 * float(before)
