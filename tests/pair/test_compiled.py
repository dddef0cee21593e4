"""What users of other libraries met, of torch: compiled graphs, training, transforms, and what one call costs."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nvalchemiops.torch.interactions.electrostatics import dsf_coulomb
from nvalchemiops.torch.interactions.lj import lj_energy
from nvalchemiops.torch.interactions.pair import PairPotential, lennard_jones
from nvalchemiops.torch.neighbors import neighbor_list
from tests.comparing import close, derivative_along, random_like
from tests.pair import users

# -- compiled graphs ------------------------------------------------------------------------------


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
    return users.POTENTIALS[name](x, users.MIXED.cell, net(x), b, **given)[0]


@users.EACH
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("create_graph", [False, True])
def test_parameters_predicted_from_positions(name, training, create_graph):
    """The whole force, chain term counted once; without it if the charges are detached."""
    net = Charges().train(training)
    inputs = users.inputs_of(name, users.MIXED)
    direction = random_like([inputs.x])[0]
    x = inputs.x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(composed(name, net, x, inputs.b, users.NEAR).sum(), x, create_graph=create_graph)
    expected = derivative_along(
        lambda x: composed(name, net, x, inputs.b, users.NEAR).sum(), inputs.x, direction
    ).detach()
    torch.testing.assert_close((slope * direction).sum().detach(), expected, rtol=1e-6, atol=1e-8)

    fixed = net(inputs.x).detach()
    energies, forces, _ = users.POTENTIALS[name](x, users.MIXED.cell, fixed, inputs.b, **users.NEAR)
    close(torch.autograd.grad(energies.sum(), x), [-forces.detach()], 1e-11)


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
    inputs, given = users.inputs_of("LJ", users.ONE), users.near(users.ONE)
    x = inputs.x.clone().requires_grad_(gradients)
    potential = lennard_jones(users.CUTOFF)
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
        first = lj_energy(x, q.abs(), 0.3, users.CUTOFF, neighbor_list=pairs)
        second = dsf_coulomb(x, q, users.CUTOFF, 0.3, neighbor_list=pairs)
        return first, *second, ours(x, q=q, neighbor_list=pairs)

    ours = PairPotential("q1*q2*exp(-r)*1.23456", ("q",), cutoff=users.CUTOFF)  # never called before
    pairs = neighbor_list(users.ONE.positions, users.CUTOFF, return_neighbor_list=True)[0]
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    arguments = users.ONE.positions, users.inputs_of("DSF", users.ONE).a
    close(compiled(*arguments), both(*arguments))
