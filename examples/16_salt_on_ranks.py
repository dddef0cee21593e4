"""A hundred thousand ions of sodium chloride on two processes, started by one command:

    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 examples/16_salt_on_ranks.py

The potential is that of ``09_molten_salt.py`` (F. G. Fumi and M. P. Tosi, J. Phys. Chem. Solids 25, 31 and 45 (1964)),
with Coulomb energies by particle-mesh Ewald. Each rank makes a part of a crystal that is expanded to the density of
the melt, and hot enough to melt; a `Domain` moves the ions to their owners. These move them by the velocity Verlet
method, and `Domain.follow` divides anew when an ion has gone half the skin, on all ranks together.

What to look at: the first step equals that of one process, which rank 0 computes alone; the total energy stays; a
rank owns its share of the ions, and sees some of the others as ghosts. Takes a minute or two, with ``--quick`` (1,728
ions) some seconds; nothing is downloaded.
"""

import argparse
import time

import torch
import torch.distributed as dist

from nvalchemiops._warp import quiet_warp
from nvalchemiops.constants import (
    AVOGADRO_PER_MOL,
    BOLTZMANN_EV_PER_KELVIN,
    COULOMB_EV_ANGSTROM,
    FEMTOSECOND_IN_ASE_TIME,
)
from nvalchemiops.torch.distributed import Domain
from nvalchemiops.torch.interactions.electrostatics import particle_mesh_ewald
from nvalchemiops.torch.interactions.pair import born_mayer_huggins

TEMPERATURE = 3000.0  # K, at the start; half of it goes into the potential energy
DENSITY = 1.516  # g/cm^3, of the melt at 1148 K
STEP = FEMTOSECOND_IN_ASE_TIME  # a femtosecond, where eV, angstrom and atomic masses are units
MASSES = torch.tensor([22.98977, 35.453], dtype=torch.float64)
CUTOFF, SKIN = 9.0, 1.0
ALPHA, ORDER = 0.36, 5  # errors of forces about 1e-4 of their RMS

# exp((sigma - r)/rho) A - C/r^6 - D/r^8, in eV and angstrom, of Na-Na, Na-Cl and Cl-Cl
REPULSION = born_mayer_huggins(CUTOFF, tables=True, r_switch=CUTOFF - 1.0)
TOSI_FUMI = {"A": (0.2637, 0.2110, 0.1582), "sigma": (2.340, 2.755, 3.170), "rho": (0.317, 0.317, 0.317)}
TOSI_FUMI |= {"C": (1.0486, 6.9906, 72.4022), "D": (0.4993, 8.6758, 145.4285)}
TABLES = {name: torch.tensor([[a, b], [b, c]], dtype=torch.float64) for name, (a, b, c) in TOSI_FUMI.items()}


def crystal(repeats: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Positions, velocities and species of the ions that this rank begins with, and the cell."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sites = 2 * repeats  # along each axis, every other one a sodium
    spacing = (float(MASSES.sum()) / (2.0 * DENSITY) * 1e24 / AVOGADRO_PER_MOL) ** (1 / 3)
    planes = torch.arange(sites * rank // size, sites * (rank + 1) // size)
    along = torch.arange(sites)
    site = torch.cartesian_prod(planes, along, along)
    species = site.sum(1) % 2
    generator = torch.Generator().manual_seed(rank)
    velocities = torch.randn(len(site), 3, generator=generator, dtype=torch.float64)
    velocities *= (BOLTZMANN_EV_PER_KELVIN * TEMPERATURE / MASSES[species]).sqrt().unsqueeze(1)
    cell = sites * spacing * torch.eye(3, dtype=torch.float64)
    return site.double() * spacing, velocities, species, cell


def potential(
    positions: torch.Tensor, species: torch.Tensor, cell: torch.Tensor, domain: Domain | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Energies of the ions given, and forces on them."""
    charges = 1.0 - 2.0 * species.to(positions.dtype)
    n = 2 * round(float(cell[0, 0]) / 2.5)
    options = {"mesh_dimensions": (n, n, n), "spline_order": ORDER, "cutoff": CUTOFF, "compute_forces": True}
    coulomb = particle_mesh_ewald(positions, charges, cell, ALPHA, domain=domain, **options)
    repulsion = REPULSION(positions, cell, species=species.int(), compute_forces=True, domain=domain, **TABLES)
    return COULOMB_EV_ANGSTROM * coulomb[0] + repulsion[0], COULOMB_EV_ANGSTROM * coulomb[1] + repulsion[1]


def whole(held: torch.Tensor) -> torch.Tensor | None:
    """What all ranks hold, on rank 0."""
    told: list[torch.Tensor | None] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(held, told)
    return None if told is None else torch.cat([t for t in told if t is not None])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1,728 ions instead of 97,336")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    quiet_warp()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    if torch.cuda.is_available():
        torch.set_default_device(f"cuda:{rank % torch.cuda.device_count()}")

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    held, velocities, species, cell = crystal(6 if options.quick else 23)
    held += 0.1 * velocities / velocities.square().mean().sqrt()  # off their sites, where forces would be zero
    domain = Domain(held, cell, cutoff=CUTOFF, skin=SKIN)
    x, v, kinds = (domain.distribute(t) for t in (held, velocities, species))
    masses = MASSES[kinds].unsqueeze(1)
    energies, forces = potential(x, kinds, cell, domain)

    parts = [whole(t) for t in (held, species, domain.gather(energies), domain.gather(forces))]
    if rank == 0:
        expected = potential(*parts[:2], cell)
        errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(parts[2:], expected)]
        say(f"{domain.n_atoms} ions on {domain.n_ranks} ranks, at most {domain.bricks.largest:.3f} times the mean")
        say(f"rank 0 owns {domain.n_owned} ions and sees {domain.n_ghosts} others")
        say(f"first step beside one process: energies differ by {errors[0]:.1e}, forces by {errors[1]:.1e}")
    del parts
    dist.barrier()

    def total() -> torch.Tensor:
        kinetic = 0.5 * (masses * v.square()).sum()
        return domain.sum(torch.stack([energies.sum(), kinetic])) / domain.n_atoms

    first, divisions, start = total(), 1, time.perf_counter()
    for step in range(1, options.steps + 1):
        v = v + 0.5 * STEP * forces / masses
        x = x + STEP * v
        before = domain
        domain, x, v, kinds = domain.follow(x, v, kinds)
        if domain is not before:
            masses, divisions = MASSES[kinds].unsqueeze(1), divisions + 1
        energies, forces = potential(x, kinds, cell, domain)
        v = v + 0.5 * STEP * forces / masses
        if step % max(options.steps // 5, 1) == 0:
            now = total()
            kelvin = float(now[1]) / (1.5 * BOLTZMANN_EV_PER_KELVIN)
            say(f"{step:6} fs  {kelvin:7.1f} K  energy {float(now.sum()):.6f} eV/ion  divided {divisions} times")
    seconds = (time.perf_counter() - start) / options.steps
    drift = 1e3 * float(total().sum() - first.sum())
    say(f"{1e3 * seconds:.0f} ms a step; the energy has changed by {drift:.4f} meV/ion")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
