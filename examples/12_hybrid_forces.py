"""Hybrid forces: charges that depend on the geometry, explicit forces from the sum, and autograd for the rest.

If charges follow the atoms, q = q(R), the force has two parts,

    F = -dE/dR = F_fixed(R, q) - sum_i dE/dq_i dq_i/dR

Differentiating the energy as a whole gives both, at the price of a backward pass through the sum. But the sum can
return the first part, the force at fixed charges, and the charge gradients dE/dq, while it computes the energy. Then
autograd is needed for the charges alone. With ``hybrid_forces=True`` positions are constants for the sum, so that
nothing is counted twice.

Three ways are compared here, for charges from a small network and particle-mesh Ewald:

- `whole`: the gradient of the energy;
- `by_energy`: explicit forces, and the gradient of an energy that knows positions through the charges alone;
- `by_charge_gradients`: explicit forces, and the vector-Jacobian product of the charges with dE/dq.

What to look at: they agree to rounding, for forces and for the gradient of a loss on forces by the parameters of the
network. In eager mode on a CPU forces take about the same time in all of them, because there `whole` has first
derivatives computed along with the energy, too. Compiled (as on a GPU) it has to go backwards through the sum, and in
training to differentiate that again. Takes half a minute; nothing is downloaded.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from nvalchemiops._warp import quiet_warp
from nvalchemiops.torch.interactions.electrostatics import ParticleMeshEwald
from nvalchemiops.torch.neighbors import neighbor_list

Tensor = torch.Tensor

BOND = 2.8  # angstrom, between ions of a disordered rock salt
SURROUNDINGS = 4.0  # angstrom, how far the charge of an atom looks
ACCURACY = 1e-4  # of the sum


class Ions(torch.nn.Module):
    """Ions whose charges a network predicts from the distances to their neighbors, and their Coulomb energy."""

    def __init__(self, n_side: int, n_shells: int = 8, width: int = 16) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        grid = torch.cartesian_prod(*(torch.arange(float(n_side), dtype=torch.float64),) * 3)
        noise = torch.randn(grid.shape, generator=generator, dtype=torch.float64)
        self.positions, self.cell = BOND * grid + 0.2 * noise, BOND * n_side * torch.eye(3, dtype=torch.float64)
        self.formal = 1.0 - 2.0 * (grid.sum(1) % 2)
        self.coulomb = ParticleMeshEwald.estimate(self.positions, self.cell, accuracy=ACCURACY)
        far = neighbor_list(self.positions, self.coulomb.cutoff, self.cell, return_neighbor_list=True)
        self.near = dict(zip(("neighbor_list", "neighbor_ptr", "neighbor_shifts"), far))
        pairs, _, shifts = neighbor_list(self.positions, SURROUNDINGS, self.cell, return_neighbor_list=True)
        self.pairs, self.images = pairs.long(), shifts.double() @ self.cell
        self.centers = torch.linspace(2.0, SURROUNDINGS, n_shells, dtype=torch.float64)
        self.network = torch.nn.Sequential(
            torch.nn.Linear(n_shells, width), torch.nn.SiLU(), torch.nn.Linear(width, 1, bias=False)
        ).double()

    def charges(self, positions: Tensor) -> Tensor:
        """Charges (n_atoms,), around the formal ones."""
        i, j = self.pairs
        r = torch.linalg.vector_norm(positions[j] - positions[i] + self.images, dim=1)
        shells = torch.exp(-4.0 * (r[:, None] - self.centers) ** 2) * (1.0 - (r / SURROUNDINGS) ** 2)[:, None] ** 3
        around = shells.new_zeros(len(positions), len(self.centers)).index_add(0, i, shells)
        return self.formal * (1.0 + 0.3 * torch.tanh(self.network(around).squeeze(1)))

    def energy(self, positions: Tensor) -> Tensor:
        """Coulomb energy of the charges that belong to the positions."""
        return self.coulomb(positions, self.charges(positions), self.cell, **self.near).sum()


# -- three ways to the force ----------------------------------------------------------------------
#
# Without `training` the force is detached: it would have the graph of its first part only, and a loss on it a gradient
# that lacks the rest.


def whole(ions: Ions, positions: Tensor, training: bool = False) -> Tensor:
    """The gradient of the energy."""
    positions = positions.detach().requires_grad_()
    return -torch.autograd.grad(ions.energy(positions), positions, create_graph=training)[0]


def by_energy(ions: Ions, positions: Tensor, training: bool = False) -> Tensor:
    """Explicit forces, and the gradient of the energy by what is left of its dependence on positions: the charges."""
    positions = positions.detach().requires_grad_()
    options: dict[str, Any] = {"compute_forces": True, "hybrid_forces": True}
    energies, forces = ions.coulomb(positions, ions.charges(positions), ions.cell, **ions.near, **options)
    total = forces - torch.autograd.grad(energies.sum(), positions, create_graph=training)[0]
    return total if training else total.detach()


def by_charge_gradients(ions: Ions, positions: Tensor, training: bool = False) -> Tensor:
    """Explicit forces, and the product of dE/dq with the Jacobian of the charges."""
    positions = positions.detach().requires_grad_()
    charges = ions.charges(positions)
    options: dict[str, Any] = {"compute_forces": True, "compute_charge_gradients": True, "hybrid_forces": True}
    _, forces, gradients = ions.coulomb(positions, charges, ions.cell, **ions.near, **options)
    total = forces - torch.autograd.grad(charges, positions, gradients, create_graph=training)[0]
    return total if training else total.detach()


def by_charge_gradients_in_a_graph(ions: Ions, positions: Tensor) -> Tensor:
    """The same by `torch.func.vjp` of the charges, which `torch.compile` takes as it is."""
    charges, pull = torch.func.vjp(ions.charges, positions)[:2]
    options: dict[str, Any] = {"compute_forces": True, "compute_charge_gradients": True}
    _, forces, gradients = ions.coulomb(positions, charges, ions.cell, **ions.near, **options)
    return forces - pull(gradients)[0]


# -- comparison -----------------------------------------------------------------------------------


def best_time(call: Callable[[], object], calls: int) -> float:
    """Milliseconds; the first call compiles what is to be compiled."""
    call()
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """Largest deviation, relative to the largest number."""
    return max(((f - e).abs().max() / e.abs().max()).item() for f, e in zip(found, expected))


class Way(NamedTuple):
    """Ways to the force: in eager mode, in a compiled graph if there is one, and with a graph for training."""

    eager: Callable[[], Tensor]
    compiled: Callable[[], Tensor] | None
    training: Callable[[], Tensor]


def ways(ions: Ions) -> dict[str, Way]:
    """All ways, for the positions of the ions."""
    x = ions.positions
    energy = torch.compile(ions.energy, fullgraph=True, backend="aot_eager", dynamic=False)
    explicit = torch.compile(by_charge_gradients_in_a_graph, fullgraph=True, backend="aot_eager", dynamic=False)

    def whole_compiled() -> Tensor:
        positions = x.detach().requires_grad_()
        return -torch.autograd.grad(energy(positions), positions)[0]

    def by_charge_gradients_compiled() -> Tensor:
        with torch.no_grad():
            return explicit(ions, x)

    return {
        "whole": Way(lambda: whole(ions, x), whole_compiled, lambda: whole(ions, x, training=True)),
        "by energy": Way(lambda: by_energy(ions, x), None, lambda: by_energy(ions, x, training=True)),
        "by charge gradients": Way(
            lambda: by_charge_gradients(ions, x),
            by_charge_gradients_compiled,
            lambda: by_charge_gradients(ions, x, training=True),
        ),
    }


def compare(n_side: int, calls: int) -> float:
    """Print rows of the table; returns the largest deviation."""
    ions = Ions(n_side)
    parameters = list(ions.network.parameters())

    def step(way: Way) -> list[Tensor]:
        """The gradient of a loss on forces by the parameters, as in training."""
        return list(torch.autograd.grad(way.training().square().sum(), parameters))

    found = ways(ions)
    exact, exact_step = [found["whole"].eager()], step(found["whole"])
    worst = 0.0
    for name, way in found.items():
        errors = [difference([way.eager()], exact), difference(step(way), exact_step)]
        times = [best_time(way.eager, calls), best_time(partial(step, way), calls)]
        row = f"{len(exact[0]):6d}  {name:20s}" + "".join(f"{t:11.2f}{e:10.1e}" for t, e in zip(times, errors))
        if way.compiled is not None:
            errors.append(difference([way.compiled()], exact))
            row += f"{best_time(way.compiled, calls):11.2f}{errors[-1]:10.1e}"
        print(row, flush=True)
        worst = max(worst, *errors)
    torch.compiler.reset()
    return worst


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small system, for tests")
    options = parser.parse_args(arguments)
    quiet_warp()
    torch.manual_seed(0)
    print(f"{'':28s}{'forces':>21s}{'training':>21s}{'forces, compiled':>21s}")
    print(f"{'ions':>6s}{'':22s}" + 3 * f"{'ms':>11s}{'error':>10s}")
    sizes, calls = ((4,), 1) if options.quick else ((4, 8, 16), 10)
    worst = max(compare(n, calls) for n in sizes)
    if worst > 1e-10:
        print(f"FAILED: results differ by {worst:.1e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
