"""Charges from a network, explicit forces from PME, and autograd for the charges, as users put them together.

The model is that of ``examples/12_hybrid_forces.py``. Each way is compared with the gradient of the whole energy and
with finite differences. (The flag by itself, for all sums and parts: tests/derivatives/test_hybrid_forces.py.)
"""

import collections
import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.comparing import derivative_along, random_like
from tests.support.examples import example, said_by

hybrid = example("12_hybrid_forces")
torch.manual_seed(0)
IONS = hybrid.Ions(4)
X = IONS.positions
PARAMETERS = list(IONS.network.parameters())
WAYS = {"by energy": hybrid.by_energy, "by charge gradients": hybrid.by_charge_gradients}
EACH = pytest.mark.parametrize("way", WAYS)


TARGET = 0.3 * random_like([X], 7)[0]


def relative(found, expected):
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, expected, strict=True))


def loss_gradient(forces):
    return torch.autograd.grad((forces - TARGET).square().sum(), PARAMETERS)


# -- forces ---------------------------------------------------------------------------------------


@EACH
def test_explicit_forces_and_the_part_through_charges_are_the_whole_force(way):
    """To 1e-10; and to finite differences of the energy. Without the part through the charges it is another force."""
    found = WAYS[way](IONS, X)
    assert relative([found], [hybrid.whole(IONS, X)]) < 1e-10
    (direction,) = random_like([X])
    with torch.no_grad():
        slope = float(derivative_along(IONS.energy, X, direction))
        fixed = IONS.coulomb(X, IONS.charges(X), IONS.cell, **IONS.near, compute_forces=True)[1]
    assert -float((found * direction).sum()) == pytest.approx(slope, rel=1e-8)
    assert relative([fixed], [found.detach()]) > 0.05


def test_in_a_compiled_graph():
    compiled = torch.compile(hybrid.by_charge_gradients_in_a_graph, fullgraph=True, backend="aot_eager")
    found = compiled(IONS, X)
    assert relative([found.detach()], [hybrid.whole(IONS, X)]) < 1e-10
    expected = loss_gradient(hybrid.whole(IONS, X, training=True))
    assert relative(loss_gradient(found), expected) < 1e-10


# -- training -------------------------------------------------------------------------------------


@EACH
def test_gradients_of_a_loss_on_forces_are_those_of_the_whole_graph(way):
    found = loss_gradient(WAYS[way](IONS, X, training=True))
    expected = loss_gradient(hybrid.whole(IONS, X, training=True))
    assert relative(found, expected) < 1e-10
    start = [p.detach().clone() for p in PARAMETERS]
    directions = random_like(start, 3)

    def loss(amount):
        with torch.no_grad():
            for parameter, value, direction in zip(PARAMETERS, start, directions):
                parameter.copy_(value + amount * direction)
        return (WAYS[way](IONS, X) - TARGET).square().sum()

    slope = float(derivative_along(loss, 0.0, 1.0))
    loss(0.0)  # back to the start
    assert float(sum((f * d).sum() for f, d in zip(found, directions))) == pytest.approx(slope, rel=1e-7)


@EACH
def test_a_force_whose_graph_lacks_a_part_is_not_handed_out(way):
    """The explicit part alone has a graph: a loss on the sum would have a wrong gradient, with nothing to show it."""
    assert not WAYS[way](IONS, X).requires_grad
    energies, forces = IONS.coulomb(X, IONS.charges(X), IONS.cell, **IONS.near, compute_forces=True, hybrid_forces=True)
    assert energies.requires_grad and forces.requires_grad
    whole = loss_gradient(hybrid.whole(IONS, X, training=True))
    through = hybrid.whole(IONS, X) - forces.detach()
    assert relative(loss_gradient(forces + through), whole) > 0.05


# -- what it costs --------------------------------------------------------------------------------


class Counted(TorchDispatchMode):
    """How often each op of the library runs."""

    def __init__(self):
        super().__init__()
        self.calls = collections.Counter()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function.namespace == "nvalchemiops":
            self.calls[function.overloadpacket.__name__] += 1
        return function(*arguments, **options or {})


def ops_of(call):
    with Counted() as counted:
        call()
    return counted.calls


def test_explicit_forces_need_one_pass_and_no_backward_through_the_sum():
    """Forces: as few sums as the energy alone. Training: fewer than the whole graph."""
    with torch.no_grad():
        energy = ops_of(lambda: IONS.energy(X))
    for way in WAYS.values():
        found = ops_of(lambda way=way: way(IONS, X))
        assert all(found[op] == energy[op] for op in ("pair_sum", "mesh_spread", "mesh_gather")), found
    whole = ops_of(lambda: loss_gradient(hybrid.whole(IONS, X, training=True)))
    slopes = ops_of(lambda: loss_gradient(hybrid.by_charge_gradients(IONS, X, training=True)))
    assert sum(slopes.values()) < sum(whole.values())


# -- the example ----------------------------------------------------------------------------------


@pytest.mark.later
def test_the_example_runs():
    said = said_by("12_hybrid_forces", "--quick")
    rows = re.findall(r"^ +64 +(whole|by energy|by charge gradients)(.*)$", said, re.MULTILINE)
    assert [name for name, _ in rows] == ["whole", *WAYS]
    for _, columns in rows:
        errors = [float(number) for number in columns.split()[1::2]]
        assert len(errors) in (2, 3) and max(errors) < 1e-10
