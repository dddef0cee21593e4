"""A network of three message-passing layers, trained on one system that two processes share:

    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 examples/21_messages_on_ranks.py

The layers are made like those of MACE (I. Batatia et al., NeurIPS 35, 11423 (2022)): features of neighbors times
functions of distances and directions are summed (A), and products of two such sums (B) change the features. A `Graph`
brings features of neighbors on other ranks in each layer, so ghosts within one cutoff suffice.

What to look at: energy and forces are those of one process up to rounding, and so are the gradients of a loss of
forces, which are second derivatives, with respect to the weights. Takes some seconds.
"""

import ase.build
import torch
import torch.distributed as dist

from nvalchemiops._warp import quiet_warp
from nvalchemiops.torch import Graph, System
from nvalchemiops.torch.distributed import divide
from nvalchemiops.torch.dynamics import FromEnergies

CUTOFF, CHANNELS, LAYERS, WAVES = 3.8, 8, 3, 6


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.radial = torch.nn.Sequential(torch.nn.Linear(WAVES, 16), torch.nn.SiLU(), torch.nn.Linear(16, CHANNELS))
        self.mix, self.readout = torch.nn.Linear(3 * CHANNELS, CHANNELS), torch.nn.Linear(CHANNELS, 1)

    def forward(self, h: torch.Tensor, graph: Graph) -> tuple[torch.Tensor, torch.Tensor]:
        """Features (n_atoms, CHANNELS) and energies (n_atoms,)."""
        x = graph.distances.unsqueeze(1) / CUTOFF
        waves = torch.sin(torch.pi * torch.arange(1, WAVES + 1) * x) / x
        directions = torch.cat([torch.ones_like(x), graph.vectors / graph.distances.unsqueeze(1)], 1)
        messages = self.radial(waves) * (1.0 - x * x) ** 3 * graph.at_senders(h)
        a = graph.to_receivers(messages.unsqueeze(2) * directions.unsqueeze(1))
        b = torch.cat([a[..., 0], a[..., 0] ** 2, a[..., 1:].square().sum(2)], 1)
        h = h + torch.tanh(self.mix(b))
        return h, self.readout(h).squeeze(1)


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(100, CHANNELS)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, numbers: torch.Tensor, graph: Graph) -> torch.Tensor:
        """Energies (n_atoms,)."""
        h, energies = self.embedding(numbers.long()), torch.zeros(())
        for layer in self.layers:
            h, more = layer(h, graph)
            energies = energies + more
        return energies


def energies_of(network: Network, system: System) -> torch.Tensor:
    """Energies (n_systems,)."""
    graph = Graph(system, CUTOFF)
    return graph.sum(graph.replicated(network)(system.numbers, graph))


def main() -> None:
    quiet_warp()
    dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)  # the same weights on all ranks
    network = Network()
    crystal = ase.build.bulk("NaCl", "rocksalt", a=5.64, cubic=True) * 2
    crystal.rattle(0.2, seed=1)
    alone = System.from_ase(crystal)
    model = FromEnergies(lambda system: energies_of(network, system), create_graph=True)

    found = {}
    for name, system in (("one process", alone), ("ranks", divide(alone, cutoff=CUTOFF))):
        domain, (energies, forces, _) = system.domain, model(system)
        square = (forces - 0.1).square().sum()  # of the difference from some other forces
        loss = energies.square().sum() + (square if domain is None else domain.sum(square))
        slopes = torch.autograd.grad(loss, list(network.parameters()))
        slopes = torch.cat([slope.flatten() for slope in slopes])
        found[name] = energies, forces if domain is None else domain.collect(forces), slopes
    if dist.get_rank() == 0:
        print(f"{len(crystal)} atoms on {dist.get_world_size()} ranks; rank 0 sees {system.domain.n_ghosts} ghosts")
        for what, expected, value in zip(("energy", "forces", "gradients by weights"), *found.values()):
            error = (value - expected).abs().max() / expected.abs().max()
            print(f"{what} differ by {float(error.detach()):.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
