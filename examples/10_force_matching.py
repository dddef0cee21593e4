"""Energy, force and stress matching of a message-passing potential whose charges are learned, with PME in the loop.

A network of 3,700 parameters passes messages between the ions of small crystals and ends in two numbers for each atom,
an energy and a charge. The charges are made neutral and go into particle-mesh Ewald (PME). Energies, forces and
stresses of a reference are fitted; its charges are never shown. The reference is made up for this example: ions whose
charge moves to counter-ions nearby, and Born-Mayer repulsion. Nothing is downloaded.

A loss on forces needs second derivatives. There are several ways, which give the same gradients to rounding:

- `by_autograd`: differentiate the energy by positions and strain with ``create_graph=True``;
- `by_explicit_forces`: differentiate the network alone, and take what it needs from the sum, which returns forces,
  virial and charge gradients that are differentiable themselves;
- `by_function_transforms`: `torch.func.grad` of `torch.func.functional_call`.

The first two compile into one graph without a break. Batches are padded to one size, so that no batch compiles again.
What to look at: the deviation of the gradients, the time of a step in each way, and the errors before and after
training. Units: eV, angstrom, e. Takes most of a minute, the greater part of it for the C++ compiler.
"""

import argparse
import itertools
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from nvalchemiops._warp import quiet_warp
from nvalchemiops.constants import COULOMB_EV_ANGSTROM
from nvalchemiops.torch.interactions.electrostatics import ParticleMeshEwald, estimate_pme_parameters
from nvalchemiops.torch.neighbors import neighbor_list

Tensor = torch.Tensor

FORMAL_CHARGE = torch.tensor([1.0, -1.0], dtype=torch.float64)  # of cations, species 0, and anions, species 1
BOND = 2.82  # angstrom, of rock salt before displacements
CUTOFF = 4.5  # angstrom, of messages and of the short-range part of the sum
ACCURACY, SPLINE_ORDER = 1e-3, 6  # of the sum
N_ATOMS, N_SYSTEMS, WIDTH = 128, 4, 32  # room for atoms, crystals and neighbors in each batch
STRESS_WEIGHT = 1e3  # angstrom^6: stresses are a few hundredths of eV/angstrom^3, forces about 1 eV/angstrom


# -- structures and batches -----------------------------------------------------------------------


class Structure(NamedTuple):
    """One crystal."""

    positions: Tensor  # (n_atoms, 3)
    species: Tensor  # (n_atoms,)
    cell: Tensor  # (3, 3)


class Batch(NamedTuple):
    """Crystals as one set of atoms, padded to a size that is the same for all batches.

    The atoms of the padding have no neighbors and no charge, and belong to the last system, which is not a crystal.
    """

    positions: Tensor  # (n_atoms, 3)
    species: Tensor  # (n_atoms,)
    cell: Tensor  # (n_systems + 1, 3, 3)
    batch_idx: Tensor  # (n_atoms,), int32
    sizes: Tensor  # (n_systems + 1,), atoms of each crystal; zero for padding
    neighbor_matrix: Tensor  # (n_atoms, width)
    neighbor_matrix_shifts: Tensor  # (n_atoms, width, 3)

    @classmethod
    def of(cls, structures: list[Structure], n_atoms: int = N_ATOMS, n_systems: int = N_SYSTEMS) -> "Batch":
        positions, species = (torch.cat([s[k] for s in structures]) for k in range(2))
        cell = torch.stack([s.cell for s in structures])
        sizes = torch.tensor([len(s.species) for s in structures])
        batch_idx = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), sizes)
        # an overfull row is an error that says how wide it must be
        matrix, _, shifts = neighbor_list(
            positions, CUTOFF, cell, batch_idx=batch_idx, max_neighbors=WIDTH, fill_value=n_atoms
        )
        more_atoms, more_systems = n_atoms - len(species), n_systems + 1 - len(sizes)
        if more_atoms < 0 or more_systems < 1:
            raise ValueError(f"{len(species)} atoms in {len(sizes)} structures do not fit into {n_atoms}, {n_systems}")

        def padded(values: Tensor, more: int, value: float = 0.0) -> Tensor:
            return torch.cat([values, values.new_full((more, *values.shape[1:]), value)])

        box = 10.0 * torch.eye(3, dtype=cell.dtype)
        return cls(
            padded(positions, more_atoms),
            padded(species, more_atoms),
            torch.cat([cell, box.expand(more_systems, 3, 3)]),
            padded(batch_idx, more_atoms, n_systems),
            padded(sizes, more_systems),
            padded(matrix, more_atoms, n_atoms),
            padded(shifts, more_atoms),
        )

    @property
    def system(self) -> Tensor:
        """System of each atom, as an index."""
        return self.batch_idx.long()

    @property
    def is_atom(self) -> Tensor:
        """1 for atoms, 0 for padding, in the dtype of the positions."""
        return (self.sizes > 0)[self.system].to(self.positions.dtype)

    @property
    def near(self) -> dict[str, Any]:
        """Neighbors and systems as `particle_mesh_ewald` takes them."""
        return {
            "neighbor_matrix": self.neighbor_matrix,
            "neighbor_matrix_shifts": self.neighbor_matrix_shifts,
            "mask_value": self.positions.shape[0],
            "batch_idx": self.batch_idx,
        }

    def sum_systems(self, values: Tensor) -> Tensor:
        """Sums (n_systems + 1,) of values of the atoms."""
        return values.new_zeros(self.sizes.shape[0]).index_add(0, self.system, values)

    def strained(self, positions: Tensor, strain: Tensor) -> tuple[Tensor, Tensor]:
        """Positions and cells, deformed by strains (n_systems + 1, 3, 3)."""
        deformation = torch.eye(3, dtype=strain.dtype) + strain
        return torch.einsum("na,nab->nb", positions, deformation[self.system]), self.cell @ deformation

    def pairs(self, positions: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Neighbors j and distances r, both (n_atoms, width), and a weight that falls smoothly to 0 at the cutoff."""
        there = self.neighbor_matrix < positions.shape[0]
        j = torch.where(there, self.neighbor_matrix, 0).long()
        shifts = self.neighbor_matrix_shifts.to(positions.dtype)
        d = positions[j] - positions[:, None] + torch.einsum("nma,nab->nmb", shifts, cell[self.system])
        # padding is given a length, since the derivative of a length of zero is not a number
        r = torch.linalg.vector_norm(torch.where(there[..., None], d, 1.0), dim=-1)
        return j, r, torch.where(there & (r < CUTOFF), (1.0 - (r / CUTOFF) ** 2) ** 3, 0.0)


def crystals(count: int, generator: torch.Generator) -> list[Structure]:
    """Rock salt with 8 to 64 atoms, strained and displaced at random."""
    found = []
    for repeats in itertools.islice(itertools.cycle([(2, 2, 2), (4, 2, 2), (4, 4, 2), (4, 4, 4)]), count):
        grid = torch.cartesian_prod(*(torch.arange(float(n), dtype=torch.float64) for n in repeats))
        strain = 0.03 * torch.randn(3, 3, generator=generator, dtype=torch.float64)
        deformation = BOND * (torch.eye(3, dtype=torch.float64) + strain)
        noise = 0.15 * torch.randn(len(grid), 3, generator=generator, dtype=torch.float64)
        cell = torch.diag(torch.tensor(repeats, dtype=torch.float64)) @ deformation
        found.append(Structure(grid @ deformation + noise, grid.sum(1).long() % 2, cell))
    return found


def grouped(structures: list[Structure], generator: torch.Generator) -> Iterator[list[Structure]]:
    """The structures in a new order, in groups that fit into a batch."""
    group: list[Structure] = []
    for number in torch.randperm(len(structures), generator=generator).tolist():
        atoms = sum(len(s.species) for s in group) + len(structures[number].species)
        if len(group) == N_SYSTEMS or atoms > N_ATOMS:
            yield group
            group = []
        group.append(structures[number])
    yield group


# -- potentials -----------------------------------------------------------------------------------


class Reference(torch.nn.Module):
    """What is to be learned: energies of atoms without Coulomb part, and charges.

    Each pair of unlike ions takes t(r) = 0.1 exp((2.8 - r) / 0.8) from the charge of both, so that crystals stay
    neutral, and has the energy 1060 exp(-r / 0.32) eV.
    """

    def forward(self, batch: Batch, positions: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        j, r, weight = batch.pairs(positions, cell)
        weight = weight * (batch.species[j] != batch.species[:, None])
        moved = (weight * 0.1 * torch.exp((2.8 - r) / 0.8)).sum(1)
        repulsion = (weight * 530.0 * torch.exp(-r / 0.32)).sum(1)  # half of it for each of the two
        return repulsion, FORMAL_CHARGE[batch.species] * (1.0 - moved) * batch.is_atom


class Network(torch.nn.Module):
    """Two layers of messages, and from each atom's features its energy and its charge.

    The network may have another precision; the results have that of the positions.
    """

    centers: Tensor

    def __init__(self, width: int = 24, n_shells: int = 12, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()

        def two_layers(n_in: int, n_out: int) -> torch.nn.Module:
            first, last = torch.nn.Linear(n_in, width, dtype=dtype), torch.nn.Linear(width, n_out, dtype=dtype)
            return torch.nn.Sequential(first, torch.nn.SiLU(), last)

        self.embedding = torch.nn.Embedding(len(FORMAL_CHARGE), width, dtype=dtype)
        self.filters = torch.nn.ModuleList(torch.nn.Linear(n_shells, width, dtype=dtype) for _ in range(2))
        self.updates = torch.nn.ModuleList(two_layers(width, width) for _ in range(2))
        self.heads = two_layers(width, 2)
        self.register_buffer("centers", torch.linspace(1.8, CUTOFF - 0.2, n_shells, dtype=dtype))

    def forward(self, batch: Batch, positions: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        j, r, weight = batch.pairs(positions, cell)
        features = self.embedding(batch.species)
        shells = torch.exp(-6.0 * (r.to(features.dtype)[..., None] - self.centers) ** 2)
        weight = weight.to(features.dtype)[..., None]
        for messages, update in zip(self.filters, self.updates):
            features = features + update((weight * messages(shells) * features[j]).sum(1))
        # sums over many atoms begin here, so precision does too
        energies, charges = (self.heads(features).to(positions.dtype) * batch.is_atom[:, None]).unbind(1)
        charges = FORMAL_CHARGE.to(charges)[batch.species] * batch.is_atom + charges
        excess = batch.sum_systems(charges) / batch.sizes.clamp(min=1)
        return energies, charges - excess[batch.system] * batch.is_atom


class Potential(torch.nn.Module):
    """Energies and charges of atoms from ``local``, and the Coulomb energy of the charges."""

    def __init__(self, local: torch.nn.Module, coulomb: ParticleMeshEwald) -> None:
        super().__init__()
        self.local, self.coulomb = local, coulomb

    def forward(self, batch: Batch, positions: Tensor, strain: Tensor) -> Tensor:
        """Energies (n_systems + 1,) of the strained crystals."""
        positions, cell = batch.strained(positions, strain)
        energies, charges = self.local(batch, positions, cell)
        return batch.sum_systems(energies + COULOMB_EV_ANGSTROM * self.coulomb(positions, charges, cell, **batch.near))


def sum_for(structures: list[Structure]) -> ParticleMeshEwald:
    """One alpha and one mesh for all, as graphs that are compiled once need it."""
    found = [
        estimate_pme_parameters(
            s.positions, s.cell, accuracy=ACCURACY, real_space_cutoff=CUTOFF, spline_order=SPLINE_ORDER
        )
        for s in structures
    ]
    alpha = max(float(f.alpha.max()) for f in found)
    meshes = zip(*(f.mesh_dimensions for f in found))
    return ParticleMeshEwald(alpha, tuple(max(n) for n in meshes), SPLINE_ORDER, CUTOFF)


# -- energies, forces and stresses ----------------------------------------------------------------


class Observables(NamedTuple):
    """What is fitted."""

    energy: Tensor  # (n_systems + 1,)
    forces: Tensor  # (n_atoms, 3)
    stress: Tensor  # (n_systems + 1, 3, 3)

    @classmethod
    def of(cls, batch: Batch, energy: Tensor, by_positions: Tensor, by_strain: Tensor) -> "Observables":
        volume = torch.linalg.det(batch.cell).abs()
        return cls(energy, -by_positions, by_strain / volume[:, None, None])


def by_autograd(potential: Potential, batch: Batch) -> Observables:
    """The energy differentiated as a whole.

    Inside of `torch.compile` with ``torch._dynamo.config.trace_autograd_ops``; the graph must then be used up inside.
    """
    positions = batch.positions.detach().requires_grad_()
    strain = torch.zeros_like(batch.cell).requires_grad_()
    energy = potential(batch, positions, strain)
    return Observables.of(batch, energy, *torch.autograd.grad(energy.sum(), (positions, strain), create_graph=True))


def by_explicit_forces(potential: Potential, batch: Batch) -> Observables:
    """The sum's own forces, virial and charge gradients, and of the network the vector-Jacobian product.

    Inside of `torch.compile` as it is.
    """

    def local(positions: Tensor, strain: Tensor) -> tuple[Tensor, Tensor]:
        return potential.local(batch, *batch.strained(positions, strain))

    (energies, charges), pull = torch.func.vjp(local, batch.positions, torch.zeros_like(batch.cell))[:2]
    options = {"compute_forces": True, "compute_charge_gradients": True, "compute_virial": True}
    found = potential.coulomb(batch.positions, charges, batch.cell, **batch.near, **options)
    coulomb, forces, potentials, virial = (COULOMB_EV_ANGSTROM * f for f in found)
    by_positions, by_strain = pull((torch.ones_like(energies), potentials))
    energy = batch.sum_systems(energies + coulomb)
    return Observables.of(batch, energy, by_positions - forces, by_strain - virial)


def by_function_transforms(potential: Potential, parameters: dict[str, Tensor], batch: Batch) -> Observables:
    """Of the potential as a function of its parameters, by name. Not inside of `torch.compile`."""

    def total(positions: Tensor, strain: Tensor) -> tuple[Tensor, Tensor]:
        energy = torch.func.functional_call(potential, parameters, (batch, positions, strain))
        return energy.sum(), energy

    derivatives = torch.func.grad(total, argnums=(0, 1), has_aux=True)
    (by_positions, by_strain), energy = derivatives(batch.positions, torch.zeros_like(batch.cell))
    return Observables.of(batch, energy, by_positions, by_strain)


def loss_of(found: Observables, expected: Observables, batch: Batch) -> Tensor:
    """Mean over the crystals; each has the mean squares over its atoms."""
    sizes = batch.sizes.clamp(min=1)
    energy = ((found.energy - expected.energy) / sizes).square()
    forces = batch.sum_systems((found.forces - expected.forces).square().mean(1)) / sizes
    stress = (found.stress - expected.stress).square().mean((1, 2))
    return (energy + forces + STRESS_WEIGHT * stress).sum() / (batch.sizes > 0).sum()


# -- steps of training ----------------------------------------------------------------------------


class Loss(torch.nn.Module):
    """The loss as a module, which can be compiled, and distributed over processes."""

    def __init__(self, potential: Potential, observe: Callable[[Potential, Batch], Observables]) -> None:
        super().__init__()
        self.potential, self.observe = potential, observe

    def forward(self, batch: Batch, expected: Observables) -> Tensor:
        return loss_of(self.observe(self.potential, batch), expected, batch)


Step = Callable[[Batch, Observables], tuple[Tensor, list[Tensor]]]  # to a loss and its gradients by the parameters


def gradients_of(loss: Callable[[Batch, Observables], Tensor], parameters: Sequence[Tensor]) -> Step:
    """A step that differentiates the loss."""

    def step(batch: Batch, expected: Observables) -> tuple[Tensor, list[Tensor]]:
        value = loss(batch, expected)
        return value.detach(), list(torch.autograd.grad(value, parameters))

    return step


def functional_step(potential: Potential) -> Step:
    """The step by function transforms alone."""

    def loss(parameters: dict[str, Tensor], batch: Batch, expected: Observables) -> Tensor:
        return loss_of(by_function_transforms(potential, parameters, batch), expected, batch)

    def step(batch: Batch, expected: Observables) -> tuple[Tensor, list[Tensor]]:
        parameters = {name: p.detach() for name, p in potential.named_parameters()}
        gradients, value = torch.func.grad_and_value(loss)(parameters, batch, expected)
        return value, list(gradients.values())

    return step


def ways(potential: Potential, backend: str) -> dict[str, Step]:
    """All ways to compute a step; the compiled ones are compiled when they are first called."""
    parameters = list(potential.parameters())
    autograd, explicit = Loss(potential, by_autograd), Loss(potential, by_explicit_forces)
    return {
        "eager, autograd": gradients_of(autograd, parameters),
        "eager, explicit forces": gradients_of(explicit, parameters),
        "eager, torch.func": functional_step(potential),
        # loss and gradients in one graph, in which the gradient by positions stays inside
        "aot_eager, autograd": torch.compile(
            gradients_of(autograd, parameters), fullgraph=True, backend="aot_eager", dynamic=False
        ),
        # the loss in one graph, its backward pass in another one
        f"{backend}, explicit forces": gradients_of(
            torch.compile(explicit, fullgraph=True, backend=backend, dynamic=False), parameters
        ),
    }


def compare(steps: dict[str, Step], batch: Batch, expected: Observables, calls: int) -> dict[str, float]:
    """Print the table; returns the deviation of each way from the first one."""
    print(f"{'':28s}{'first call (s)':>15s}{'step (ms)':>11s}{'gradients differ by':>21s}")
    reference: list[Tensor] = []
    deviations = {}
    for name, step in steps.items():
        start = time.perf_counter()
        _, gradients = step(batch, expected)
        first = time.perf_counter() - start
        times = []
        for _ in range(calls):
            start = time.perf_counter()
            step(batch, expected)
            times.append(time.perf_counter() - start)
        reference = reference or gradients
        scale = max(float(g.abs().max()) for g in reference)
        deviations[name] = max(float((g - r).abs().max()) for g, r in zip(gradients, reference)) / scale
        print(f"{name:28s}{first:15.1f}{1e3 * min(times):11.1f}{deviations[name]:21.1e}")
    return deviations


def train(potential: Potential, step: Step, data: list[tuple[Batch, Observables]], n_steps: int) -> None:
    """Fit by Adam. Every batch has the same shapes: to compile again would be an error."""
    parameters = list(potential.parameters())
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=n_steps)
    with torch.compiler.set_stance("fail_on_recompile"):
        for number in range(n_steps):
            _, gradients = step(*data[number % len(data)])
            for parameter, gradient in zip(parameters, gradients):
                parameter.grad = gradient
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()


def errors(potential: Potential, data: list[tuple[Batch, Observables]]) -> dict[str, float]:
    """RMS errors."""
    found: dict[str, list[Tensor]] = {"energy": [], "force": [], "stress": []}
    for batch, expected in data:
        energy, forces, stress = (f - e for f, e in zip(by_explicit_forces(potential, batch), expected))
        atoms, there = batch.is_atom > 0, batch.sizes > 0
        for name, values in zip(found, (energy[there] / batch.sizes[there], forces[atoms], stress[there])):
            found[name].append(values)
    return {name: torch.cat(values).square().mean().sqrt().item() for name, values in found.items()}


def labelled(
    structures: list[Structure], reference: Potential, generator: torch.Generator
) -> list[tuple[Batch, Observables]]:
    """Batches with what the reference says about them."""
    batches = [Batch.of(group) for group in grouped(structures, generator)]
    return [(b, Observables(*(t.detach() for t in by_explicit_forces(reference, b)))) for b in batches]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="steps of training (1000)")
    parser.add_argument("--quick", action="store_true", help="few steps, and a backend without C++, for tests")
    options = parser.parse_args(arguments)
    quiet_warp()
    torch.set_num_threads(1)  # batches of this size gain nothing by more
    # Fourier transforms are library calls, which the compiler leaves as they are
    warnings.filterwarnings("ignore", message="Torchinductor does not support code generation for complex operators")
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)

    structures = crystals(96, generator)
    coulomb = sum_for(structures)
    reference, potential = Potential(Reference(), coulomb), Potential(Network(), coulomb)
    data = labelled(structures[:80], reference, generator)
    held_out = labelled(structures[80:], reference, generator)
    n_parameters = sum(p.numel() for p in potential.parameters())
    print(f"{len(data)} batches of up to {N_SYSTEMS} crystals and {N_ATOMS} atoms; {n_parameters} parameters; mesh "
          f"{coulomb.mesh_dimensions}\n")  # fmt: skip

    steps = ways(potential, "aot_eager" if options.quick else "inductor")
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        deviations = compare(steps, *data[0], calls=2 if options.quick else 5)
    before = errors(potential, held_out)
    n_steps = options.steps or (30 if options.quick else 1000)
    start = time.perf_counter()
    train(potential, list(steps.values())[-1], data, n_steps)
    seconds = time.perf_counter() - start
    after = errors(potential, held_out)

    print(f"\n{n_steps} steps in {seconds:.1f} s, nothing compiled again; RMS errors of crystals not trained on:")
    print(f"{'':28s}{'before':>10s}{'after':>10s}")
    for name, unit in (("energy", "meV/atom"), ("force", "meV/Å"), ("stress", "meV/Å³")):
        print(f"{f'{name} ({unit})':28s}{1e3 * before[name]:10.2f}{1e3 * after[name]:10.2f}")
    if max(deviations.values()) > 1e-10 or after["force"] > 0.7 * before["force"]:
        print("FAILED: gradients differ, or the errors did not shrink as they should", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
