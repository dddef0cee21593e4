"""Calls of pair potentials: their cost, their first use inside of a graph, threads, and batches without a cell."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nvalchemiops.torch.interactions.electrostatics import dsf_coulomb
from nvalchemiops.torch.interactions.lj import lj_energy
from nvalchemiops.torch.interactions.pair import PairPotential, lennard_jones
from nvalchemiops.torch.neighbors import neighbor_list
from tests.support.cases import CUTOFF, ONE
from tests.support.comparing import close, same_bits
from tests.support.systems import csr


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
    close([s.double() for s in found[0]], slopes(torch.float64), 1e-6 if dtype == torch.float32 else 0, atol=0)


def test_systems_of_a_batch_without_cell_do_not_interact():
    """Also where nothing but the list needs to know the systems: energies of atoms, lists built by the call."""
    x = torch.cat([ONE.positions, ONE.positions + 0.7])
    batch_idx = torch.arange(2, dtype=torch.int32).repeat_interleave(5)
    alone = [lj_energy(part, 1.5, 0.3, CUTOFF) for part in x.split(5)]
    for options in ({}, {"num_systems": 2}):
        close([lj_energy(x, 1.5, 0.3, CUTOFF, batch_idx=batch_idx, **options)], [torch.cat(alone)])
    mixed = torch.randperm(10, generator=torch.Generator().manual_seed(1))
    close([lj_energy(x[mixed], 1.5, 0.3, CUTOFF, batch_idx=batch_idx[mixed])], [torch.cat(alone)[mixed]])
    charges = torch.linspace(-1, 1, 10, dtype=torch.float64)
    energies, _ = dsf_coulomb(x, charges, CUTOFF, batch_idx=batch_idx)
    parts = [dsf_coulomb(part, q, CUTOFF)[0] for part, q in zip(x.split(5), charges.split(5))]
    close([energies], [torch.cat(parts)])


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
    x, cell, given = ONE.positions.clone().requires_grad_(gradients), ONE.cell[0], csr(ONE, CUTOFF)
    potential, values = lennard_jones(CUTOFF), {"sigma": ONE.charges.abs(), "epsilon": ONE.charges**2}
    with Dispatched() as seen:
        potential(x, cell, **values, compute_forces=True, **given)
    assert sum("pair_sum" in name for name in seen.names) == 1
    others = [name for name in seen.names if "pair_sum" not in name]
    assert len(others) <= 10, others


def test_functions_compile_before_they_were_called():
    """The first call ever may be inside of a graph."""

    def both(x, q):
        first = lj_energy(x, q.abs(), 0.3, CUTOFF, neighbor_list=pairs)
        second = dsf_coulomb(x, q, CUTOFF, 0.3, neighbor_list=pairs)
        return first, *second, ours(x, q=q, neighbor_list=pairs)

    ours = PairPotential("q1*q2*exp(-r)*1.23456", ("q",), cutoff=CUTOFF)  # never called before
    pairs = neighbor_list(ONE.positions, CUTOFF, return_neighbor_list=True)[0]
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    arguments = ONE.positions, ONE.charges
    close(compiled(*arguments), both(*arguments))
