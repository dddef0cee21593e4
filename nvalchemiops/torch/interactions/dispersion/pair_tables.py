"""C6 of each pair of atoms, for tables of reference molecules that do not factorise into coefficients of atoms.

    C6_ij = Σ_ab w_ab C6(a, b),    w_ab ∝ exp(k3 [(CN_i - CN_ab)² + (CN_j - CN_ba)²])

The sum is over the reference molecules a and b of the two elements. CN_ab is the coordination number of a, which here
may depend on its partner b, and CN_ba that of b. Source: S. Grimme, J. Antony, S. Ehrlich and H. Krieg, J. Chem. Phys.
132, 154104 (2010), doi:10.1063/1.3382344, eq. (16).
"""

import torch

from nvalchemiops.torch.interactions.dispersion.reference_data import ReferenceStates
from nvalchemiops.torch.interactions.pair.system import PairSystem
from nvalchemiops.torch.neighbors.pairs import Pairs, distances_and_vectors
from nvalchemiops.torch.neighbors.rows import Rows, listed_slots, row_indices
from nvalchemiops.torch.runtime.context import may_read

PAIRS_AT_ONCE = 2**16
"""Largest number of pairs whose weights are in memory at the same time; each pair takes 200 bytes or more."""


def pairs_apart(system: PairSystem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, PairSystem]:
    """The pairs of a system, and a system in which the two atoms of each pair are separate atoms.

    Returns
    -------
    first, second : (n_slots,) int64 tensor
        The two atoms of each slot of the rows; for padding, the same atom twice.
    vectors : (n_slots, 3) tensor
        Vectors from the first to the second atom.
    alone : PairSystem
        The first and the second atom of each slot, in turn; they are neighbors unless the slot is padding.
    """
    positions, cell, batch_idx, n_systems, rows, _ = system
    n_atoms = positions.shape[0]
    first = row_indices(rows, n_atoms)
    # an index out of range needs no care here: it has already made the coordination number of its row NaN
    is_pair = listed_slots(rows) & (rows.neighbors >= 0) & (rows.neighbors < n_atoms)
    second = torch.where(is_pair, rows.neighbors, first)
    several = cell is not None and cell.shape[0] > 1
    pairs = Pairs(cell, batch_idx if several else None, None, first, second, rows.shifts)
    _, vectors = distances_and_vectors(positions, pairs)
    apart = torch.stack([torch.zeros_like(vectors), vectors], 1).reshape(-1, 3)
    partner = torch.arange(apart.shape[0], dtype=torch.int32, device=positions.device).view(-1, 2).flip(1)
    partner = torch.where(is_pair.unsqueeze(1), partner, -1).reshape(-1)
    system_of = None if batch_idx is None else batch_idx.index_select(0, first).repeat_interleave(2)
    return first, second, vectors, PairSystem(apart, None, system_of, n_systems, Rows(None, partner, None, 1, -1, None))


def coefficients_of_pairs(
    coordination: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    row: torch.Tensor,
    states: ReferenceStates,
    k3: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """C6 of pairs, and its derivatives with respect to the coordination numbers of the first and the second atom.

    Each of the three results has shape (n_pairs,). ``coordination`` (n_atoms,) is in float64, and ``row`` (n_atoms,)
    holds the rows of the atoms in ``states``.
    """
    at_once = PAIRS_AT_ONCE
    if not may_read() or first.shape[0] <= at_once:
        return _interpolate(coordination, first, second, row, states, k3)
    parts = [
        _interpolate(coordination, i, j, row, states, k3) for i, j in zip(first.split(at_once), second.split(at_once))
    ]
    values, by_first, by_second = (torch.cat(part) for part in zip(*parts))
    return values, by_first, by_second


def _interpolate(
    coordination: torch.Tensor, i: torch.Tensor, j: torch.Tensor, row: torch.Tensor, states: ReferenceStates, k3: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    assert states.pair_c6 is not None and states.pair_coordination is not None
    of_i, of_j = row[i], row[j]
    table = states.pair_c6[of_i, of_j].flatten(1)
    apart_i = coordination[i].unsqueeze(1) - states.pair_coordination[of_i, of_j].flatten(1)
    apart_j = coordination[j].unsqueeze(1) - states.pair_coordination[of_j, of_i].mT.flatten(1)
    is_there = table > 0.0
    # without any reference molecules C6 is zero
    is_left_out = ~is_there & is_there.any(1, keepdim=True)
    exponents = (k3 * (apart_i * apart_i + apart_j * apart_j)).masked_fill(is_left_out, -torch.inf)
    weights = torch.softmax(exponents, 1)
    table = table.clamp(min=0.0)
    mean = (weights * table).sum(1)
    parts = 2.0 * k3 * weights * (table - mean.unsqueeze(1))
    return mean, (parts * apart_i).sum(1), (parts * apart_j).sum(1)
