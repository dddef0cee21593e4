"""Cases for several ranks: networks whose layers pass messages between atoms of different ranks. See `ranks.py`."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from nvalchemiops.torch import Graph, System
from nvalchemiops.torch.distributed import Domain, OtherRankError, divide
from nvalchemiops.torch.dynamics import FromEnergies, nve
from nvalchemiops.torch.neighbors import neighbor_list
from tests.distributed.common import F64, Atoms, assert_equal, case, compare
from tests.distributed.dynamics import DT, Held
from tests.dynamics.systems import crystal
from tests.support.examples import example

NETWORKS = ("21_messages_on_ranks", "22_charges_on_ranks")


class Energies(torch.nn.Module):
    """The network of an example as a function of a system, with weights from a fixed seed."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.example = example(name)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.network = self.example.Network().double()

    def forward(self, system: System) -> torch.Tensor:
        with_defaults = torch.get_default_dtype()
        torch.set_default_dtype(F64)  # of the constants that examples make
        try:
            energies: torch.Tensor = self.example.energies_of(self.network, system)
        finally:
            torch.set_default_dtype(with_defaults)
        return energies


def compare_network(group: Any, name: str, atoms: Atoms) -> None:
    """Energies of an example's network, and first and second derivatives by positions, cell and weights."""
    energies = Energies(name)
    names = [n for n, _ in energies.named_parameters()]

    def energies_of(
        positions: torch.Tensor, charges: torch.Tensor, cell: torch.Tensor, *values: torch.Tensor, **where: Any
    ) -> dict[str, torch.Tensor]:
        domain = where.get("domain")
        numbers = atoms.numbers if domain is None else atoms.numbers[domain.global_index]
        system = System(positions, None, cell, numbers=numbers, **where)
        return {"energy": torch.func.functional_call(energies, dict(zip(names, values)), (system,))}

    compare(group, atoms, energies_of, others=tuple(p.detach() for p in energies.parameters()))


@case(2, 3)
def networks_are_those_of_one_process(group: Any) -> None:
    """In a cell so small that atoms are neighbors of themselves; and a batch."""
    compare_network(group, NETWORKS[0], Atoms(n=4))
    compare_network(group, NETWORKS[0], Atoms(True, n=4))
    compare_network(group, NETWORKS[1], Atoms(n=4))


@case(2, 3)
def edges_are_those_of_one_process(group: Any) -> None:
    """Also after atoms have moved within the skin; sums and values of neighbors; ranks without atoms."""
    size = dist.get_world_size(group)
    atoms = Atoms(n=4)
    few = atoms.positions[: size - 1] + 50.0  # in an open system, so one rank has none
    cells, systems = torch.stack([atoms.cell, 0.9 * atoms.cell]), (torch.arange(64) % 2).int()
    for x, cell, pbc, batch_idx in (
        (atoms.positions, atoms.cell, torch.tensor([True, True, False]), None),
        (atoms.positions, cells, torch.tensor([[True, True, True], [False, True, False]]), systems),
        (few, None, None, None),
    ):
        whole = System(x, None, cell, batch_idx, pbc, torch.arange(len(x)))
        own = divide(whole, cutoff=3.0, skin=0.5, group=group)
        domain = own.domain
        assert domain is not None and torch.equal(own.numbers, domain.global_index)
        moved = x + 0.2 * torch.sin(torch.arange(3 * len(x), dtype=F64)).reshape(-1, 3) / 3**0.5
        graph = Graph(own._replace(positions=moved[domain.global_index]), 2.5)
        pairs, _, *shifts = neighbor_list(moved, 2.5, cell, pbc, batch_idx, return_neighbor_list=True)
        expected = sorted(map(tuple, torch.cat([pairs.T, *shifts], 1).tolist()))
        first, second = graph.at_receivers(domain.global_index), graph.at_senders(domain.global_index)
        columns = [first.unsqueeze(1), second.unsqueeze(1)]
        assert_equal(graph.vectors.norm(dim=1), graph.distances, "distances")
        beyond = graph.vectors - (moved[second] - moved[first])
        if cell is None:
            assert_equal(beyond, 0.0 * beyond, "vectors")
        else:
            matrices = cell.expand(len(first), 3, 3) if batch_idx is None else cell[batch_idx[first].long()]
            images = torch.linalg.solve(matrices, beyond.unsqueeze(1), left=False).squeeze(1)
            columns.append(images.round().long())
            assert not len(first) or float((images - images.round()).abs().max()) < 1e-12
        mine = set(domain.global_index.tolist())
        assert sorted(map(tuple, torch.cat(columns, 1).tolist())) == [row for row in expected if row[0] in mine]
        counts = graph.to_receivers(torch.ones_like(graph.distances))
        assert int(graph.sum(counts).sum()) == len(expected)
        assert graph.n_atoms == domain.n_owned
    assert int(domain.sum(torch.tensor(int(graph.n_atoms == 0)))) > 0

    with pytest.raises(ValueError, match="have moved by"):
        Graph(own._replace(positions=own.positions + 10.0), 2.5)
    with pytest.raises(ValueError, match=r"`cutoff` = 4\.0 is larger than that of the `domain`"):
        Graph(own, 4.0)
    with pytest.raises(ValueError, match="`neighbors` of a system with a `domain`"):
        own.neighbors(2.5)


@case(2)
def networks_that_know_no_ranks_exchange_features_by_hooks(group: Any) -> None:
    """A network made for one process, whose layers take edges and features of all atoms, and return new features."""
    torch.manual_seed(2)
    atoms = Atoms(n=4)
    weights = torch.nn.ModuleList(torch.nn.Linear(4, 4, dtype=F64) for _ in range(3))

    class Layer(torch.nn.Module):
        def __init__(self, linear: torch.nn.Linear) -> None:
            super().__init__()
            self.linear = torch.nn.Sequential(linear, linear)  # one module with two names

        def forward(self, h: torch.Tensor, edges: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
            near = (1.0 - r / 3.0).square().unsqueeze(1) * h[edges[1]]
            return h + torch.tanh(self.linear(torch.zeros_like(h).index_add(0, edges[0], near)))

    layers = torch.nn.ModuleList(map(Layer, weights))

    def features(graph: Graph, h: torch.Tensor) -> torch.Tensor:
        edges = torch.stack([graph.receivers, graph.senders])
        for layer in layers:
            h = graph.replicated(layer)(h, edges, graph.distances)
        return h[: graph.n_atoms]

    def loss(system: System, start: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        x = system.positions.detach().requires_grad_()
        graph = Graph(system._replace(positions=x), 3.0)
        hooks = [
            layer.register_forward_hook(lambda *given: graph.with_ghosts(given[2][: graph.n_atoms])) for layer in layers
        ]
        total = graph.sum(features(graph, graph.with_ghosts(start)).square().sum(1))
        for hook in hooks:
            hook.remove()
        return total, torch.autograd.grad(total.sum(), [x, *layers.parameters()])

    whole = System(atoms.positions, None, atoms.cell)
    start = torch.stack([atoms.charges, *atoms.vectors.unbind(1)], 1)
    own = divide(whole, cutoff=3.0, group=group)
    assert own.domain is not None
    expected, found = loss(whole, start), loss(own, start[own.domain.global_index])
    assert_equal(found[0], expected[0], "value")
    assert_equal(found[1][0], expected[1][0][own.domain.global_index], "by positions")
    for ours, theirs in zip(found[1][1:], expected[1][1:], strict=True):
        assert_equal(ours, theirs, "by weights")


@case(2)
def networks_move_atoms_and_train(group: Any) -> None:
    """`FromEnergies` in dynamics with atoms that change ranks, and gradients of a loss of forces and stress."""
    whole = System.from_ase(crystal(a=5.0))._replace(numbers=torch.arange(32) % 3)
    energies = Energies(NETWORKS[0])
    shrunk = whole._replace(positions=0.6 * whole.positions, cell=0.6 * whole.cell)
    held = Held(group, shrunk, cutoff=energies.example.CUTOFF, skin=0.1)
    velocities = 0.05 * torch.randn(32, 3, generator=torch.Generator().manual_seed(1), dtype=F64)
    _, domains = held.run(
        FromEnergies(energies), nve(DT), 15, masses=torch.full((32,), 20.0, dtype=F64), velocities=velocities
    )
    assert len(domains) > 1

    model = FromEnergies(energies, create_graph=True)
    slopes = []
    for system, forces_then in ((shrunk, velocities), (held.own, held.of(velocities))):
        found = model(system)
        assert found.stress is not None
        square = (found.forces - forces_then).square().sum()
        total = square if system.domain is None else system.domain.sum(square)
        loss = total + found.energies.square().sum() + found.stress.square().sum()
        slopes.append(torch.autograd.grad(loss, list(energies.parameters())))
    for ours, theirs in zip(slopes[1], slopes[0], strict=True):
        assert_equal(ours, theirs, "by weights")


@case(2)
def what_all_ranks_have_is_divided(group: Any) -> None:
    """Batches, gradients with respect to what all have, and what is not the same on all ranks."""
    rank, atoms = dist.get_rank(group), Atoms(True, n=4)
    leaves = [t.clone().requires_grad_() for t in (atoms.positions, atoms.charges)]
    cells = torch.stack([atoms.cell, 0.9 * atoms.cell])
    whole = System(*leaves, cells, atoms.batch_idx, torch.ones(2, 3, dtype=torch.bool), atoms.numbers)
    own = divide(whole, cutoff=3.0, group=group)
    assert isinstance(own.domain, Domain) and own.batch_idx is None and own.numbers is not None

    def total(system: System) -> torch.Tensor:
        graph = Graph(system, 3.0)
        assert graph.n_systems == 2 and system.charges is not None
        q = system.charges - graph.at_atoms(graph.sum(system.charges) / graph.sum(torch.ones_like(system.charges)))
        messages = graph.at_receivers(q) * graph.at_senders(q.square()) / graph.distances
        return graph.sum(graph.to_receivers(messages)).square().sum()

    total(own).backward()
    for leaf, expected in zip(leaves, torch.autograd.grad(total(whole), leaves), strict=True):
        assert leaf.grad is not None
        assert_equal(leaf.grad, expected, "complete on each rank")
    everything = own.domain.collect(own)
    if rank == 0:
        assert_equal(everything.positions, whole.positions, "positions")
        assert torch.equal(everything.numbers, atoms.numbers) and torch.equal(everything.batch_idx, atoms.batch_idx)

    size = dist.get_world_size(group)
    weights = torch.arange(1, len(atoms.positions) + 1).to(F64)
    own = divide(whole, cutoff=3.0, group=group, grid=(1, 1, size), weights=weights, check="later")
    assert own.domain is not None and own.domain.is_deferred
    assert own.domain.bricks.cuts_along.tolist() == [0, 0, size - 1]
    assert_equal(own.domain.weights, weights[own.domain.global_index] / len(weights), "weights", 1e-5)

    other = whole._replace(positions=leaves[0].detach() + 0.1 * rank)
    missing_on_others: Any = None if rank else whole
    for call, words in (
        (lambda: divide(other, cutoff=3.0, group=group), "`positions` must be the same on all ranks"),
        (lambda: divide(own, cutoff=3.0, group=group), "have a `domain` already"),
        (lambda: divide(missing_on_others, cutoff=3.0, group=group), "`atoms` must be a System"),
        (lambda: divide(whole, cutoff=-3.0, group=group), "`cutoff` must be positive"),
        (lambda: divide(whole, cutoff=3.0, group=group, check="soon"), "`check`"),
        (lambda: divide(whole, cutoff=3.0, group=group, grid=(size, size, 1)), "`grid`"),
        (lambda: divide(whole, cutoff=3.0, group=group, weights=weights + rank), "`weights` must be the same on all"),
        (lambda: divide(whole, cutoff=3.0, group=group, weights=weights.repeat(2)), "`weights` must be a tensor of"),
    ):
        with pytest.raises((ValueError, TypeError, OtherRankError), match=words):
            call()
