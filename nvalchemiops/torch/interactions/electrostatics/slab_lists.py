"""Lists of slabs that a caller gives: a sum that is corrected for slabs needs images across the vacuum as well."""

import math

import torch

from nvalchemiops.notices import NeighborListWarning, notify
from nvalchemiops.torch import checks
from nvalchemiops.torch.interactions.electrostatics.k_vectors import per_system
from nvalchemiops.torch.interactions.electrostatics.results import EwaldSum
from nvalchemiops.torch.neighbors.rows import Rows, build_rows, listed_slots, pair_distances, row_indices, rows_of
from nvalchemiops.torch.runtime.cache import cached_by_identity
from nvalchemiops.torch.runtime.context import may_read, may_recognize
from nvalchemiops.torch.runtime.recorder import current_recorder, read_number

LOOKED_AT = 64
"""Atoms whose rows tell how far a list reaches."""


def warn_of_missing_images(asked: EwaldSum) -> None:
    """Warn if the list was searched with the open axis of a slab, whose vacuum is narrower than the sum over pairs.

    The arguments are valid. Values are read once for each list, on a CPU and outside of recordings only. A list of
    inference mode would be looked at in each call, and is not.
    """
    near = asked.neighbors
    shifts = near.shifts if near.neighbor_list is not None else near.matrix_shifts
    atoms = asked.atoms
    if atoms.cell is None or isinstance(atoms.pbc, bool):
        return  # all systems are molecules, or crystals
    if shifts is None or atoms.domain is not None or not may_recognize(shifts) or not may_read(shifts):
        return
    if current_recorder() is not None:
        return  # a plan holds nothing but the sum
    (lacks,) = cached_by_identity("images of a slab", shifts, (), lambda: (_lacks_images(asked),))
    if bool(lacks):
        notify(
            "`neighbor_list` or `neighbor_matrix` of a slab lacks pairs across the vacuum, which is narrower than the "
            "list reaches: the sum is periodic along all axes before it is corrected. Search with pbc=True",
            NeighborListWarning,
        )


def _lacks_images(asked: EwaldSum) -> torch.Tensor:
    """Whether pairs across the vacuum count, and are closer than the farthest of some that are listed."""
    atoms = asked.atoms
    none = torch.zeros((), dtype=torch.bool, device="cpu")
    if not may_read(*[t for t in (*asked.neighbors, *atoms[:5]) if isinstance(t, torch.Tensor)]):
        return none
    x, cell = atoms.positions.detach().double(), atoms.cell.detach().double().reshape(-1, 3, 3)  # type: ignore[union-attr]
    n_systems = cell.shape[0]
    rows = rows_of(asked.neighbors._replace(half_list=False), x, periodic=True)
    pbc = checks.pbc_tensor(atoms.pbc, x.device).expand(n_systems, 3)
    of = torch.zeros_like(x[:, 0], dtype=torch.int64) if atoms.batch_idx is None else atoms.batch_idx.long()
    is_slab = (pbc.sum(1, keepdim=True) == 2).expand(n_systems, 3)
    is_open = (~pbc & is_slab)[of]  # (n_atoms, 3)
    in_slabs = is_open.any(1).nonzero().squeeze(1)
    if rows is None or rows.shifts is None or not in_slabs.numel():
        return none
    identity = torch.eye(3, dtype=cell.dtype, device=cell.device)
    cell = torch.where(is_slab.unsqueeze(-1), cell, identity)  # those of molecules may be zeros
    i, slots = _rows_of_atoms(rows, in_slabs[:: -(-in_slabs.numel() // LOOKED_AT)])
    j = rows.neighbors[slots].long().clamp(0, len(x) - 1)  # of atoms that do not exist the sum is NaN
    apart = x[j] - x[i] + (rows.shifts[slots].double().unsqueeze(1) @ cell[of[i]]).squeeze(1)
    reach = min(read_number(apart.norm(dim=1).amax()) if slots.numel() else 0.0, _needed(asked, n_systems))
    if reach == 0.0 or not _may_see_images(x, cell, of, is_open, reach):
        return none
    listed = listed_slots(rows).nonzero().squeeze(1)
    first = row_indices(rows, len(x))[listed]
    if read_number(((rows.shifts[listed] != 0) & is_open[first]).any()):
        return none
    batch_idx = None if atoms.batch_idx is None else of.int()
    found = build_rows(x, reach, cell, batch_idx, is_slab)
    first, distances = pair_distances(found, x, cell, batch_idx)
    assert found.shifts is not None
    across = ((found.shifts != 0) & is_open[first.long()]).any(1)
    return (across & (distances < (1.0 - 1e-6) * reach)).any()


def _needed(asked: EwaldSum, n_systems: int) -> float:
    """The distance from which on pairs add less than the accuracy, so that a list may lack them."""
    options = asked.options
    needed = math.inf if options.cutoff is None else float(options.cutoff)
    if options.alpha is not None:
        alpha = per_system("alpha", options.alpha, n_systems, asked.atoms.positions.device).detach()
        needed = min(needed, math.sqrt(-math.log(options.accuracy)) / float(alpha.amin()))
    return needed


def _rows_of_atoms(rows: Rows, atoms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The pairs (n,) in the rows of some atoms: their first atoms, and their slots."""
    if rows.pointers is None:
        begin, end = atoms * rows.width, (atoms + 1) * rows.width
    else:
        begin, end = rows.pointers[atoms].long(), rows.pointers[atoms + 1].long()
    length = end - begin
    slots = torch.arange(int(length.sum()), device=atoms.device)
    slots = slots + (begin - (length.cumsum(0) - length)).repeat_interleave(length)
    inside = rows.neighbors[slots] != rows.padding
    return atoms.repeat_interleave(length)[inside], slots[inside]


def _may_see_images(x: torch.Tensor, cell: torch.Tensor, of: torch.Tensor, is_open: torch.Tensor, reach: float) -> bool:
    """Whether the vacuum of a slab is narrower than this, or atoms are spread over more than the cell."""
    along = (x.unsqueeze(1) @ torch.linalg.inv(cell)[of]).squeeze(1)  # fractional coordinates
    index = of.unsqueeze(1).expand(-1, 3)
    high = along.new_full((len(cell), 3), -torch.inf).scatter_reduce(0, index, along, "amax")
    low = along.new_full((len(cell), 3), torch.inf).scatter_reduce(0, index, along, "amin")
    heights = 1.0 / torch.linalg.inv(cell).norm(dim=1)
    narrow = (1.0 - (high - low)) * heights < reach
    return bool(read_number((narrow[of] & is_open).any()))
