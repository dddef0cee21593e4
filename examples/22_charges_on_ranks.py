"""A network that predicts charges, which attract each other by particle-mesh Ewald, on two processes:

    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 examples/22_charges_on_ranks.py

Passes are made like those of AIMNet2 (D. M. Anstine, R. Zubatyuk and O. Isayev, Chem. Sci. 16, 10228 (2025)): features
and charges of neighbors change features and charges, and after each pass the charges are shifted so that their sum is
the charge of the system. Features, charges and the sum come from all ranks.

What to look at: Langevin dynamics of the network follows that of one process. It goes on from a file on one process,
and from the same file on ranks. Takes some seconds.
"""

import os
import tempfile

import ase.build
import torch
import torch.distributed as dist

from nvalchemiops._warp import quiet_warp
from nvalchemiops.constants import COULOMB_EV_ANGSTROM, FEMTOSECOND, KELVIN
from nvalchemiops.torch import Graph, System
from nvalchemiops.torch.distributed import divide
from nvalchemiops.torch.dynamics import FromEnergies, langevin, load_state, save_state, simulate
from nvalchemiops.torch.interactions.electrostatics import ParticleMeshEwald

CUTOFF, FEATURES, PASSES, SHELLS = 4.0, 8, 2, 6
EWALD = ParticleMeshEwald(0.8, mesh_dimensions=(24, 24, 24), cutoff=CUTOFF)


class Pass(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        inputs = FEATURES + SHELLS * (FEATURES + 1)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(inputs, 32), torch.nn.SiLU(), torch.nn.Linear(32, FEATURES + 2)
        )

    def forward(
        self, a: torch.Tensor, q: torch.Tensor, shells: torch.Tensor, graph: Graph
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Features (n_atoms, FEATURES) and charges (n_atoms, 1)."""
        near = graph.at_senders(torch.cat([a, q], 1))  # in one message
        environment = graph.to_receivers((shells.unsqueeze(2) * near.unsqueeze(1)).flatten(1))
        change, charge, weight = self.layers(torch.cat([a, environment], 1)).split([FEATURES, 1, 1], 1)
        q, weight = q + 0.1 * charge, weight.square()
        excess = graph.sum(q) / graph.sum(weight)  # of neutral systems
        return a + 0.1 * change, q - weight * graph.at_atoms(excess)


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.start = torch.nn.Embedding(100, FEATURES), torch.nn.Embedding(100, 1)
        self.passes, self.energy = torch.nn.ModuleList(Pass() for _ in range(PASSES)), torch.nn.Linear(FEATURES, 1)

    def forward(self, system: System, graph: Graph) -> torch.Tensor:
        """Energies (n_systems,) in eV."""
        numbers, x = system.numbers.long(), graph.distances.unsqueeze(1) / CUTOFF
        shells = torch.exp(-20.0 * (x - torch.linspace(0.4, 1.0, SHELLS)) ** 2) * (1.0 - x * x) ** 3
        a, q = self.embedding(numbers), 0.1 * self.start(numbers)
        for layer in self.passes:
            a, q = layer(a, q, shells, graph)
        coulomb = EWALD(system._replace(charges=q.squeeze(1)), energy_reduction="system").energies
        repulsion = graph.to_receivers((2.2 / graph.distances) ** 10 * (1.0 - x.squeeze(1) ** 2) ** 3)
        return COULOMB_EV_ANGSTROM * coulomb + graph.sum(self.energy(a).squeeze(1) + repulsion)


def energies_of(network: Network, system: System) -> torch.Tensor:
    """Energies (n_systems,)."""
    graph = Graph(system, CUTOFF)
    return graph.replicated(network)(system, graph)


def main() -> None:
    quiet_warp()
    dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)  # the same weights on all ranks
    network = Network()
    crystal = ase.build.bulk("NaCl", "rocksalt", a=5.64, cubic=True) * 2
    alone, model = System.from_ase(crystal), FromEnergies(lambda system: energies_of(network, system))
    thermostat = langevin(2.0 * FEMTOSECOND, 600.0 * KELVIN, friction=0.01 / FEMTOSECOND)
    reach = {"cutoff": CUTOFF, "skin": 0.4}

    first = simulate(divide(alone, **reach), model, thermostat, 20, seed=1).state
    with tempfile.TemporaryDirectory() as folder:
        paths: list[str] = [os.path.join(folder, "run.pt")]
        dist.broadcast_object_list(paths)  # the folder of rank 0
        save_state(paths[0], first)
        saved = load_state(paths[0])
        dist.barrier()
    last = [simulate(start, model, thermostat, 20).state.collected() for start in (saved, divide(saved, **reach))]
    last.append(simulate(alone, model, thermostat, 40, seed=1).state)  # without an interruption
    if dist.get_rank() == 0:
        expected = last.pop().system.positions
        for name, state in zip(("one process", f"{dist.get_world_size()} ranks"), last):
            error = float((state.system.positions - expected).abs().max())
            print(f"step {int(state.step)}, continued on {name}: positions differ by {error:.1e} A")
        print(f"atoms have moved by up to {float((expected - alone.positions).norm(dim=1).max()):.2f} A")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
