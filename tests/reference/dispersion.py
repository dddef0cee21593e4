"""DFT-D3 straight from the papers, in torch, float64: slow, and differentiable to any order.

Every pair of atoms and every pair of reference molecules is summed as it is written there: no factors of C6, no
softmax. S. Grimme, J. Antony, S. Ehrlich and H. Krieg, J. Chem. Phys. 132, 154104 (2010), doi:10.1063/1.3382344 [1];
S. Grimme, S. Ehrlich and L. Goerigk, J. Comput. Chem. 32, 1456 (2011), doi:10.1002/jcc.21759 [2]; D. G. A. Smith,
L. A. Burns, K. Patkowski and C. D. Sherrill, J. Phys. Chem. Lett. 7, 2197 (2016), doi:10.1021/acs.jpclett.6b00780 [3].
Everything is in bohr and hartree. Pairs are those of `tests.reference.pair.find_pairs`, both ways.
"""

import math
from typing import NamedTuple

import torch

from tests.reference.pair import Pairs, distances_of, smoothstep


class Data(NamedTuple):
    """Tables by atomic number."""

    radii: torch.Tensor  # covalent, times 4/3 (k2 in [1])
    r4r2: torch.Tensor
    c6: torch.Tensor  # [Z_i, Z_j, a, b]
    # [Z, a], negative where there is no reference molecule; or [Z_i, Z_j, a, b], and there is none where C6 is 0
    coordination: torch.Tensor
    pair_radii: torch.Tensor


class Cutoffs(NamedTuple):
    """Of energies and of coordination numbers; both sums go to zero over the last ``smoothing`` if that is given."""

    pairs: float
    counted: float
    smoothing: float | None = None


class Result(NamedTuple):
    energies: torch.Tensor  # of atoms: half of each of their pairs
    coordination: torch.Tensor


def _within(r, cutoff, smoothing):
    ends = 1.0 if smoothing is None else smoothstep(r, cutoff - smoothing, cutoff)
    return torch.where(r < cutoff, ends, torch.zeros_like(r))


def coordination_numbers(numbers, r, pairs: Pairs, data: Data, cutoffs: Cutoffs, k1=16.0):
    """[1], eq. (15)."""
    radii = data.radii[numbers[pairs.i]] + data.radii[numbers[pairs.j]]
    counts = 1.0 / (1.0 + torch.exp(-k1 * (radii / r - 1.0)))
    counts = counts * _within(r, cutoffs.counted, cutoffs.smoothing)
    return torch.zeros(len(numbers), dtype=r.dtype).index_add(0, pairs.i, counts)


def c6_of_pairs(numbers, coordination, pairs: Pairs, data: Data, k3=4.0):
    """[1], eq. (16) and what it refers to: a mean over all pairs of reference molecules."""
    if data.coordination.ndim == 4:
        return _c6_by_partner(numbers, coordination, pairs, data, k3)

    def gaussian(atoms):
        reference = data.coordination[numbers[atoms]]
        weight = torch.exp(-k3 * (coordination[atoms].unsqueeze(1) - reference) ** 2)
        return torch.where(reference >= 0.0, weight, torch.zeros_like(weight))

    both = gaussian(pairs.i).unsqueeze(2) * gaussian(pairs.j).unsqueeze(1)
    table = data.c6[numbers[pairs.i], numbers[pairs.j]]
    return (table * both).sum((1, 2)) / both.sum((1, 2))


def _c6_by_partner(numbers, coordination, pairs: Pairs, data: Data, k3):
    """The same where the reference molecules of an element are others for each partner."""
    z_i, z_j = numbers[pairs.i], numbers[pairs.j]
    above, below = torch.zeros(2, len(z_i), dtype=coordination.dtype)
    for a in range(data.c6.shape[2]):
        for b in range(data.c6.shape[3]):
            c6 = data.c6[z_i, z_j, a, b]
            apart_i = coordination[pairs.i] - data.coordination[z_i, z_j, a, b]
            apart_j = coordination[pairs.j] - data.coordination[z_j, z_i, b, a]
            weight = torch.exp(-k3 * (apart_i**2 + apart_j**2)) * (c6 > 0.0)
            above, below = above + c6 * weight, below + weight
    return above / below


def rational(r, c6, c8, damping, _):
    """[2]: Becke and Johnson's damping, with the length from C8/C6."""
    f = damping.a1 * torch.sqrt(c8 / c6) + damping.a2
    return -(damping.s6 * c6 / (r**6 + f**6) + damping.s8 * c8 / (r**8 + f**8))


def to_zero(r, c6, c8, damping, r0):
    """[1], eq. (3) and (4), with the exponents 14 and 16; ``beta`` is that of [3]."""

    def damped(scale, alpha):
        return 1.0 / (1.0 + 6.0 * (r / (scale * r0) + damping.beta * r0) ** (-alpha))

    return -(damping.s6 * c6 / r**6 * damped(damping.rs6, 14.0) + damping.s8 * c8 / r**8 * damped(damping.rs8, 16.0))


def dispersion(positions, cell, numbers, data: Data, damping, pairs: Pairs, cutoffs: Cutoffs) -> Result:
    """Energies of atoms and coordination numbers; ``damping`` has the fields of the kind that it is."""
    numbers = numbers.long()
    r = distances_of(positions, cell, pairs)
    coordination = coordination_numbers(numbers, r, pairs, data, cutoffs)
    c6 = c6_of_pairs(numbers, coordination, pairs, data)
    c8 = 3.0 * c6 * data.r4r2[numbers[pairs.i]] * data.r4r2[numbers[pairs.j]]
    kind = rational if hasattr(damping, "a1") else to_zero
    u = kind(r, c6, c8, damping, data.pair_radii[numbers[pairs.i], numbers[pairs.j]])
    u = u * _within(r, cutoffs.pairs, cutoffs.smoothing)
    return Result(torch.zeros(len(numbers), dtype=r.dtype).index_add(0, pairs.i, 0.5 * u), coordination)


def reach(cutoffs: Cutoffs) -> float:
    """How far pairs must be looked for."""
    return math.nextafter(max(cutoffs.pairs, cutoffs.counted), math.inf)
