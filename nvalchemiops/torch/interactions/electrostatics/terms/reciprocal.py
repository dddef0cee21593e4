"""The smooth part of an Ewald sum at the wave vectors of the lattice, exactly.

With the structure factors ``S(k) = Σ_j q_j exp(i k.r_j)`` and the transform g of the smooth part of the interaction,

    φ_i = 1/V Σ_k g(k²) Re[S(k) exp(-i k.r_i)],    E = Σ_i q_i φ_i / 2,    W = Σ_k S S*/2V (g + 2 g' k k^T)

where fractional coordinates, and so S, do not change under strain. Everything between the two Fourier sums, which are
ops, is torch.
"""

import math
from typing import NamedTuple

import torch

from nvalchemiops.torch.interactions.electrostatics.potentials import LongRangePotential
from nvalchemiops.torch.interactions.electrostatics.results import Parts, WantedParts, at_atoms
from nvalchemiops.torch.interactions.electrostatics.system import ChargedSystem
from nvalchemiops.torch.interactions.electrostatics.wave_vectors import WaveVectors
from nvalchemiops.torch.operators.fourier import fourier_gather, fourier_spread
from nvalchemiops.torch.operators.lattice import Lattice, lattice_of
from nvalchemiops.torch.operators.segments import row_pointers, spread_systems, totals
from nvalchemiops.torch.runtime.cache import cached_by_value


def sorted_atoms(
    batch_idx: torch.Tensor | None, n_systems: int, n_atoms: int, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Atoms sorted by system, or None if they are; and where each system begins."""
    if batch_idx is None:
        return None, torch.tensor([0, n_atoms], dtype=torch.int32, device=device)
    systems, order = torch.sort(batch_idx, stable=True)
    return order.to(torch.int32), row_pointers(systems, n_systems)


class Factors(NamedTuple):
    """Factors of |S|² in twice the energy and in the virial.

    Attributes
    ----------
    value : (n_points, 4) tensor
        ``g(k²) / V``, times how often the wave vector counts.
    dyads : (n_points, 4, 9) tensor or None
        The same of ``g' k k^T + g / 2``.
    """

    value: torch.Tensor
    dyads: torch.Tensor | None


def factors(
    potential: LongRangePotential, lattice: Lattice, alpha: torch.Tensor, waves: WaveVectors, with_dyads: bool
) -> Factors:
    """Factors for all wave vectors."""
    points, n_points, device = waves.points, waves.points.shape[0], alpha.device
    at_point = None if alpha.shape[0] == 1 else waves.point_system
    signs = torch.tensor([[1, 1, 1], [1, 1, -1], [1, -1, 1], [1, -1, -1]], dtype=torch.float64, device=device)
    of_system = torch.stack([alpha, potential.at_zero(alpha), lattice.volume], -1)
    of_point = spread_systems(of_system, at_point, n_points).unsqueeze(-1)
    inverse = spread_systems((2.0 * math.pi) * lattice.inverse, at_point, n_points)
    k = (points.unsqueeze(1) * signs) @ inverse.mT
    k2 = k.square().sum(-1)
    origin = (points == 0).all(1).unsqueeze(1)
    k2 = torch.where(origin, 1.0, k2)
    share = waves.weights / of_point[:, 2]
    value = share * torch.where(origin, of_point[:, 1], potential.reciprocal(k2, of_point[:, 0]))
    if not with_dyads:
        return Factors(value, None)
    slope = share * torch.where(origin, 0.0, potential.slope_of(k2, of_point[:, 0]))
    identity = torch.eye(3, dtype=torch.float64, device=device)
    dyads = (slope.unsqueeze(-1) * k).unsqueeze(-1) * k.unsqueeze(-2) + 0.5 * value[..., None, None] * identity
    return Factors(value, dyads.flatten(2))


def reciprocal_sum(
    potential: LongRangePotential,
    system: ChargedSystem,
    alpha: torch.Tensor,
    waves: WaveVectors,
    wanted: WantedParts,
) -> Parts:
    """The smooth part with alpha (n_systems,)."""
    n_atoms, n_systems, batch_idx = system.n_atoms, system.n_systems, system.batch_idx
    lattice = lattice_of(system.cell, batch_idx, n_atoms)
    charges = system.charges.to(torch.float64)
    coordinates = lattice.fractional(system.positions)
    plan = (*sorted_atoms(batch_idx, n_systems, n_atoms, alpha.device), waves.points, waves.point_begin)
    structure = fourier_spread(charges.unsqueeze(-1), coordinates, *plan, 0)
    value, dyads = cached_by_value(
        "factors",
        (system.cell, alpha, waves.points, waves.weights),
        (potential, wanted.virial) if potential.is_constant else None,
        lambda: factors(potential, lattice, alpha, waves, wanted.virial),
    )
    gathered = fourier_gather(value.unsqueeze(-1) * structure, coordinates, *plan, int(wanted.forces))
    parts = at_atoms(gathered, charges, lattice, wanted)
    if dyads is None:
        return parts
    power = structure.square().sum((0, 3))
    at_point = None if n_systems == 1 else waves.point_system
    virial = totals((power.unsqueeze(-1) * dyads).sum(1), at_point, n_systems)
    return parts._replace(virial=virial.view(-1, 3, 3))
