"""A whole force field as one module: compiled without a graph break, exported, loaded elsewhere, and run.

Magnesium oxide after G. V. Lewis and C. R. A. Catlow (J. Phys. C 18, 1149 (1985), doi:10.1088/0022-3719/18/6/010): ions
of charge +2 and -2 by particle-mesh Ewald, with a Buckingham potential between neighbors. The module searches the
neighbors itself, into a matrix of fixed width, so that positions go in and energy, forces and virial come out, and all
shapes are known beforehand.

Three things are done with it:

- `torch.compile` with ``fullgraph=True``;
- `torch.export`, saved to a file, and loaded in another process, which has nothing but the library and the file;
- a thousand steps of dynamics at constant energy, in eager mode and compiled.

What to look at: all of them have the same energies, and the total energy does not drift. A process that loads the file
without the library is told the name of what it lacks. Units: eV, angstrom, fs. Takes most of a minute, half of it for
the C++ compiler; nothing is downloaded.
"""

import argparse
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nvalchemiops._warp import quiet_warp
from nvalchemiops.constants import (
    BOLTZMANN_EV_PER_KELVIN,
    COULOMB_EV_ANGSTROM,
    EV_PER_ANGSTROM3_IN_GPA,
    FEMTOSECOND_IN_ASE_TIME,
)
from nvalchemiops.torch.interactions.electrostatics import ParticleMeshEwald
from nvalchemiops.torch.interactions.pair import buckingham
from nvalchemiops.torch.neighbors import neighbor_list

Tensor = torch.Tensor
Call = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]  # as `ForceField.forward`

MG, O = 0, 1  # noqa: E741 (the symbol of oxygen)
CHARGE, MASS = (2.0, -2.0), (24.305, 15.999)  # e, dalton
# A exp(-r/rho) - C/r^6, in eV and angstrom; magnesium ions repel each other by their charges alone
A = {(MG, O): 1428.5, (O, O): 22764.3}
RHO = {(MG, O): 0.2945, (O, O): 0.1490}
C = {(O, O): 27.88}
LATTICE = 4.21  # angstrom
CUTOFF = 6.0  # angstrom, of the neighbors
MAX_NEIGHBORS = 128  # a hundred in the crystal
ACCURACY, SPLINE_ORDER = 1e-4, 6

TEMPERATURE, STEP = 600.0, 1.0  # K, fs


# -- the force field ------------------------------------------------------------------------------


def table(values: dict[tuple[int, int], float], default: float) -> Tensor:
    """A symmetric table by species."""
    found = torch.full((2, 2), default, dtype=torch.float64)
    for (a, b), value in values.items():
        found[a, b] = found[b, a] = value
    return found


class ForceField(torch.nn.Module):
    """Energy, forces and virial of ions, neighbors included.

    Everything that decides shapes is fixed when the module is made: alpha, mesh and reach of the sum, and how many
    neighbors an atom may have.
    """

    charges: Tensor
    A: Tensor
    rho: Tensor
    C: Tensor

    def __init__(self, coulomb: ParticleMeshEwald, max_neighbors: int = MAX_NEIGHBORS) -> None:
        super().__init__()
        self.coulomb, self.max_neighbors = coulomb, max_neighbors
        self.short_range = buckingham(CUTOFF, tables=True, r_switch=CUTOFF - 1.0)
        self.register_buffer("charges", torch.tensor(CHARGE, dtype=torch.float64))
        for name, values in (("A", table(A, 0.0)), ("rho", table(RHO, 1.0)), ("C", table(C, 0.0))):
            self.register_buffer(name, values)

    def forward(self, positions: Tensor, species: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Energy (), forces (n_atoms, 3), virial (3, 3), and the largest number of neighbors of an atom.

        If that number is more than ``max_neighbors`` the other results are wrong: look at it, now and then.
        """
        matrix, count, shifts = neighbor_list(positions, CUTOFF, cell, max_neighbors=self.max_neighbors, check=False)
        near = {"neighbor_matrix": matrix, "neighbor_matrix_shifts": shifts}
        return *self.sums(positions, species, cell, near), count.max()

    def sums(
        self, positions: Tensor, species: Tensor, cell: Tensor, near: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Energy, forces and virial for neighbors in any format."""
        options: dict[str, Any] = {"compute_forces": True, "compute_virial": True, "energy_reduction": "system", **near}
        pair = self.short_range(positions, cell, species=species, A=self.A, rho=self.rho, C=self.C, **options)
        coulomb = self.coulomb(positions, self.charges[species], cell, **options)
        energy, forces, virial = (p + COULOMB_EV_ANGSTROM * q for p, q in zip(pair, coulomb))
        return energy[0], forces, virial[0]


def crystal(repeats: int, displacement: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Positions, species and cell of magnesium oxide, displaced at random."""
    grid = torch.cartesian_prod(*(torch.arange(2.0 * repeats, dtype=torch.float64),) * 3)
    generator = torch.Generator().manual_seed(0)
    noise = displacement * torch.randn(grid.shape, generator=generator, dtype=torch.float64)
    cell = repeats * LATTICE * torch.eye(3, dtype=torch.float64)
    return 0.5 * LATTICE * grid + noise, (grid.sum(1) % 2).int(), cell


def force_field_for(positions: Tensor, cell: Tensor) -> ForceField:
    """With parameters of the sum for this cell; they serve cells of about this size."""
    return ForceField(
        ParticleMeshEwald.estimate(
            positions, cell, accuracy=ACCURACY, real_space_cutoff=CUTOFF, spline_order=SPLINE_ORDER
        )
    )


# -- dynamics -------------------------------------------------------------------------------------


def dynamics(call: Call, positions: Tensor, species: Tensor, cell: Tensor, n_steps: int) -> tuple[Tensor, Tensor]:
    """Total energies (n_steps,) along dynamics by the algorithm of Verlet, and the positions at the end."""
    generator = torch.Generator().manual_seed(1)
    mass = torch.tensor(MASS, dtype=torch.float64)[species.long()].unsqueeze(1)
    # all of the energy is kinetic at first; half of it goes into vibrations
    scale = (2.0 * BOLTZMANN_EV_PER_KELVIN * TEMPERATURE / mass).sqrt()
    velocities = scale * torch.randn(positions.shape, generator=generator, dtype=torch.float64)
    velocities = velocities - (mass * velocities).sum(0) / mass.sum()
    dt = STEP * FEMTOSECOND_IN_ASE_TIME
    _, forces, _, most = call(positions, species, cell)
    energies = []
    for _ in range(n_steps):
        velocities = velocities + 0.5 * dt * forces / mass
        positions = positions + dt * velocities
        energy, forces, _, count = call(positions, species, cell)
        velocities = velocities + 0.5 * dt * forces / mass
        energies.append(energy + 0.5 * (mass * velocities.square()).sum())
        most = torch.maximum(most, count)
    if most > MAX_NEIGHBORS:
        raise RuntimeError(f"an atom has {int(most)} neighbors: give ForceField at least that `max_neighbors`")
    return torch.stack(energies), positions


def drift(energies: Tensor, n_atoms: int) -> float:
    """Slope of the total energy, in meV/atom/ps."""
    time = 1e-3 * STEP * torch.arange(len(energies), dtype=torch.float64)
    time = time - time.mean()
    return float(1e3 * (time @ energies) / (time @ time) / n_atoms)


def run(name: str, call: Call, system: tuple[Tensor, Tensor, Tensor], n_steps: int) -> Tensor:
    """Run dynamics, print a row of the table, and return the energy of the start."""
    start = time.perf_counter()
    energy = call(*system)[0]
    first = time.perf_counter() - start
    start = time.perf_counter()
    energies, _ = dynamics(call, *system, n_steps)
    per_step = (time.perf_counter() - start) / n_steps
    print(
        f"{name:22s}{first:11.1f}{1e3 * per_step:11.2f}{energy.item():16.8f}{drift(energies, len(system[0])):+12.4f}",
        flush=True,
    )
    return energy


# -- the program in a file ------------------------------------------------------------------------


def export(force_field: ForceField, system: tuple[Tensor, Tensor, Tensor], path: Path) -> None:
    """Save the force field as a program, for any number of atoms up to a million."""
    n_atoms = torch.export.Dim("n_atoms", min=2, max=1_000_000)
    torch.export.save(torch.export.export(force_field, system, dynamic_shapes=({0: n_atoms}, {0: n_atoms}, None)), path)


def load(path: Path) -> Call:
    """The program. It needs the library's ops, which the import of the electrostatics registers, all of them."""
    return torch.export.load(path).module()


def without_the_library(path: Path) -> str:
    """What torch says about the file in a process that has not imported the library."""
    script = f"import torch; torch.export.load({str(path)!r})"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False).stderr
    found = [line for line in told.splitlines() if "We failed to resolve" in line]
    return found[-1].partition("We failed")[2].partition(". ")[0] if found else ""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="steps of dynamics (1000)")
    parser.add_argument("--quick", action="store_true", help="few steps, and a backend without C++, for tests")
    parser.add_argument("--program", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    quiet_warp()
    torch.set_num_threads(1)  # a second one gains little for so few ions
    # Fourier transforms are library calls, which the compiler leaves as they are
    warnings.filterwarnings("ignore", message="Torchinductor does not support code generation for complex operators")
    n_steps = options.steps or (20 if options.quick else 1000)
    system = crystal(2 if options.quick else 3, displacement=0.02)
    if options.program is not None:
        run("loaded elsewhere", load(options.program), system, n_steps)
        return 0

    ideal = crystal(3)
    force_field = force_field_for(ideal[0], ideal[2])
    with torch.no_grad():
        _, _, virial, most = force_field(*ideal)
        pressure = EV_PER_ANGSTROM3_IN_GPA * virial.trace() / 3.0 / torch.linalg.det(ideal[2])
    print(f"mesh {force_field.coulomb.mesh_dimensions}, {int(most)} neighbors of {MAX_NEIGHBORS}")
    print(f"pressure at the measured lattice constant {pressure.item():+.1f} GPa\n")

    print(f"{len(system[0])} ions, {n_steps} steps of {STEP:g} fs")
    print(f"{'':22s}{'first (s)':>11s}{'step (ms)':>11s}{'energy (eV)':>16s}{'drift (meV/atom/ps)':>21s}")
    backend = "aot_eager" if options.quick else "inductor"
    compiled = torch.compile(force_field, fullgraph=True, backend=backend, dynamic=False)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        energies = [run(name, call, system, n_steps) for name, call in (("eager", force_field), (backend, compiled))]
        path = Path(folder) / "force_field.pt2"
        export(force_field, system, path)
        command = [sys.executable, __file__, "--program", path, *("--quick",) * options.quick, "--steps", str(n_steps)]
        print(subprocess.run(command, capture_output=True, text=True, check=True).stdout, end="")
        print(f"\nwithout the library: failed{without_the_library(path)}")
    if abs(energies[0] - energies[1]) > 1e-10 * abs(energies[0]):
        print("FAILED: energies differ", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
