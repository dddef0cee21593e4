"""One structure of a batch has collapsed, or lost its numbers; the other seven never notice.

There is no status beside the results: a system is broken if its energy is not finite, or if the count of neighbors of
one of its atoms is beyond the width, which is 2³¹ - 1 for an atom without a place. (Such an atom is nobody's neighbor,
so a sum over pairs alone may be finite.) Nothing has to be read on the host for either.
"""

from typing import NamedTuple

import pytest
import torch

from nvalchemiops.torch.interactions.electrostatics import ewald_summation, particle_mesh_ewald
from nvalchemiops.torch.interactions.lj import lj_energy_forces
from nvalchemiops.torch.neighbors import neighbor_list
from tests.support.systems import System, batch, crystal

N_SYSTEMS, BROKEN, WIDTH, CUTOFF = 8, 3, 150, 4.0
NO_PLACE = 2**31 - 1
HOWS = ["in one place", "two in one place", "no numbers", "far away"]


def structures() -> list[System]:
    """Of 2 to 16 ions, so that atoms of a system stand elsewhere in the batch than alone."""
    sizes = [(2, 2, 2), (2, 1, 1), (1, 1, 1), (2, 2, 1), (2, 2, 2), (1, 2, 1), (2, 1, 2), (1, 1, 2)]
    return [crystal("rocksalt", 5.6, size, 0.15, seed=n) for n, size in enumerate(sizes)]


def broken(system: System, how: str) -> System:
    x = system.positions.clone()
    if how == "in one place":
        x[:] = x[:1]
    elif how == "two in one place":
        x[1] = x[0]
    elif how == "no numbers":
        x[2] = torch.nan
    else:
        x[2, 0] = 1e300
    return system._replace(positions=x)


class Outcome(NamedTuple):
    positions: torch.Tensor
    energies: torch.Tensor  # of each system
    most: torch.Tensor  # neighbors of an atom, for each system


def energies_and_forces(x: torch.Tensor, system: System, near: dict[str, torch.Tensor], long_range: str):
    """Repulsion of neighbors, and Coulomb energies over all distances."""
    idx, n_systems = system.batch_idx, len(system.cell)
    options = {"batch_idx": idx, "energy_reduction": "system", "compute_forces": True}
    energies, forces = lj_energy_forces(x, 2.2, 0.05, CUTOFF, system.cell, **near, batch_idx=idx)
    energies = torch.zeros(n_systems, dtype=x.dtype).index_add(0, idx, energies)
    if long_range == "Ewald":
        more = ewald_summation(x, system.charges, system.cell, 0.7, k_cutoff=3.0, **near, **options)
    elif long_range == "PME":
        more = particle_mesh_ewald(x, system.charges, system.cell, 0.7, mesh_dimensions=(12, 12, 12), **near, **options)
    else:
        return energies, forces
    return energies + more[0], forces + more[1]


def relax(system: System, long_range: str, steps: int = 6) -> Outcome:
    """Steepest descent with small steps, as a screening code does it, with nothing read on the host."""
    x, idx = system.positions, system.batch_idx
    for _ in range(steps):
        matrix, count, shifts = neighbor_list(x, CUTOFF, system.cell, batch_idx=idx, max_neighbors=WIDTH, check=False)
        near = {"neighbor_matrix": matrix, "neighbor_matrix_shifts": shifts}
        energies, forces = energies_and_forces(x, system, near, long_range)
        x = x + (0.01 * forces).clamp(-0.05, 0.05)
    most = torch.zeros(len(system.cell), dtype=torch.int32).scatter_reduce(0, idx.long(), count, "amax")
    return Outcome(x, energies, most)


@pytest.mark.parametrize("long_range", ["none", "Ewald", "PME"])
@pytest.mark.parametrize("how", HOWS)
def test_a_relaxation_goes_on_for_all_others(how, long_range):
    """They get what they get alone; the broken one is told by its energy and its counts."""
    members = structures()
    alone = [relax(member, long_range) for member in members]
    members[BROKEN] = broken(members[BROKEN], how)
    together = batch(*members)
    found = relax(together, long_range)
    works = found.energies.isfinite() & (found.most <= WIDTH)
    assert works.tolist() == [n != BROKEN for n in range(N_SYSTEMS)]
    for n in range(N_SYSTEMS):
        if n == BROKEN:
            continue
        mine = together.batch_idx == n
        if long_range == "none":  # every sum of an atom and of a system is its own
            assert torch.equal(found.positions[mine], alone[n].positions)
            assert torch.equal(found.energies[n], alone[n].energies[0])
        else:
            torch.testing.assert_close(found.positions[mine], alone[n].positions, rtol=0, atol=1e-12)
            torch.testing.assert_close(found.energies[n], alone[n].energies[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", HOWS)
def test_the_atoms_without_a_place_are_told_by_their_counts(how):
    together = batch(*(broken(s, how) if n == BROKEN else s for n, s in enumerate(structures())))
    _, count, _ = neighbor_list(
        together.positions, CUTOFF, together.cell, batch_idx=together.batch_idx, max_neighbors=WIDTH, check=False
    )
    without = ~together.positions.isfinite().all(1) | (together.positions.abs() > 1e100).any(1)
    assert torch.equal(count == NO_PLACE, without)


@pytest.mark.parametrize("how", ["no numbers", "far away"])
def test_by_default_the_whole_batch_is_refused(how):
    """Which is what ``check=False`` is there to avoid."""
    together = batch(*(broken(s, how) if n == BROKEN else s for n, s in enumerate(structures())))
    with pytest.raises(ValueError, match="`positions`"):
        neighbor_list(together.positions, CUTOFF, together.cell, batch_idx=together.batch_idx)
