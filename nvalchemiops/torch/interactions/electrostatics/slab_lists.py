"""Lists of slabs that a caller gives: a sum that is corrected for slabs needs images across the vacuum as well."""

import torch

from nvalchemiops.notices import NeighborListWarning, notify
from nvalchemiops.torch import checks
from nvalchemiops.torch.interactions.electrostatics.results import EwaldSum
from nvalchemiops.torch.neighbors.rows import build_rows, listed_slots, pair_distances, row_indices, rows_of
from nvalchemiops.torch.runtime.cache import cached_by_identity
from nvalchemiops.torch.runtime.context import is_eager, may_read
from nvalchemiops.torch.runtime.recorder import current_recorder

LOOKED_AT = 4096
"""Pairs of a list that tell how far it reaches."""


def warn_of_missing_images(asked: EwaldSum) -> None:
    """Warn if the list was searched with the open axis of a slab, whose vacuum is narrower than the list reaches.

    The arguments are valid. Values are read once for each list, on a CPU and outside of recordings only.
    """
    atoms, near = asked.atoms, asked.neighbors
    shifts = near.shifts if near.neighbor_list is not None else near.matrix_shifts
    if shifts is None or atoms.domain is not None or not is_eager(shifts) or current_recorder() is not None:
        return  # a plan holds nothing but the sum
    if not may_read(*[t for t in (*near, *atoms[:5]) if isinstance(t, torch.Tensor)]):
        return
    (lacks,) = cached_by_identity("images of a slab", shifts, (), lambda: (_lacks_images(asked),))
    if bool(lacks):
        notify(
            "`neighbor_list` or `neighbor_matrix` of a slab lacks pairs across the vacuum, which is narrower than the "
            "list reaches: the sum is periodic along all axes before it is corrected. Search with pbc=True",
            NeighborListWarning,
        )


def _lacks_images(asked: EwaldSum) -> torch.Tensor:
    """Whether pairs across the vacuum are closer than the farthest of some that are listed."""
    atoms = asked.atoms
    x, cell = atoms.positions.detach().double(), atoms.cell.detach().double().reshape(-1, 3, 3)  # type: ignore[union-attr]
    none, n_systems = x.new_zeros((), dtype=torch.bool), cell.shape[0]
    rows = rows_of(asked.neighbors._replace(half_list=False), x, periodic=True)
    pbc = checks.pbc_tensor(atoms.pbc, x.device).reshape(-1, 3).expand(n_systems, 3)
    of = torch.zeros_like(x[:, 0], dtype=torch.int64) if atoms.batch_idx is None else atoms.batch_idx.long()
    is_slab = (pbc.sum(1, keepdim=True) == 2).expand(n_systems, 3)
    is_open = (~pbc & is_slab)[of]  # (n_atoms, 3)
    cell = torch.where(
        is_slab.unsqueeze(-1), cell, torch.eye(3, dtype=cell.dtype, device=x.device)
    )  # of molecules: may be zeros
    if rows is None or not bool(is_open.any()):
        return none
    is_atom = (rows.neighbors >= 0) & (rows.neighbors < len(x))  # of others the sum is NaN
    listed = (listed_slots(rows) & is_atom).nonzero().squeeze(1)
    first = row_indices(rows, len(x))[listed]
    assert rows.shifts is not None
    if listed.numel() == 0 or bool(((rows.shifts[listed] != 0) & is_open[first]).any()):
        return none
    few = slice(0, LOOKED_AT)
    i, j, shift = first[few], rows.neighbors[listed[few]].long(), rows.shifts[listed[few]].double()
    apart = x[j] - x[i] + (shift.unsqueeze(1) @ cell[of[i]]).squeeze(1)
    reach = float(apart.norm(dim=1)[is_open[i].any(1)].amax()) if bool(is_open[i].any()) else 0.0
    if reach == 0.0 or not _may_see_images(x, cell, of, is_open, reach):
        return none
    batch_idx = None if atoms.batch_idx is None else of.int()
    found = build_rows(x, reach, cell, batch_idx, is_slab)
    first, distances = pair_distances(found, x, cell, batch_idx)
    assert found.shifts is not None
    across = ((found.shifts != 0) & is_open[first.long()]).any(1)
    return (across & (distances < (1.0 - 1e-6) * reach)).any()


def _may_see_images(x: torch.Tensor, cell: torch.Tensor, of: torch.Tensor, is_open: torch.Tensor, reach: float) -> bool:
    """Whether the vacuum of a slab is narrower than this, or atoms are spread over more than the cell."""
    along = (x.unsqueeze(1) @ torch.linalg.inv(cell)[of]).squeeze(1)  # fractional coordinates
    index = of.unsqueeze(1).expand(-1, 3)
    high = along.new_full((len(cell), 3), -torch.inf).scatter_reduce(0, index, along, "amax")
    low = along.new_full((len(cell), 3), torch.inf).scatter_reduce(0, index, along, "amin")
    heights = 1.0 / torch.linalg.inv(cell).norm(dim=1)
    narrow = (1.0 - (high - low)) * heights < reach
    return bool((narrow[of] & is_open).any())
