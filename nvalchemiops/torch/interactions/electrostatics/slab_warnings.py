"""What makes sums of slabs wrong without an error: a narrow vacuum, and lists without images across it."""

import math
from collections.abc import Callable
from typing import Any

import torch

from nvalchemiops.interactions.electrostatics.error_models import TYPICAL_FORCE
from nvalchemiops.notices import AccuracyWarning, NeighborListWarning, is_first, notify, unsaid
from nvalchemiops.torch import checks
from nvalchemiops.torch.interactions.electrostatics.k_vectors import per_system
from nvalchemiops.torch.interactions.electrostatics.results import Derivatives, EwaldSum, SumOptions, SumRequest
from nvalchemiops.torch.interactions.electrostatics.terms.mesh import MeshSum, Precomputed
from nvalchemiops.torch.neighbors.rows import (
    GivenNeighbors,
    Rows,
    build_rows,
    is_listed,
    listed_slots,
    pair_distances,
    row_indices,
    rows_of,
)
from nvalchemiops.torch.runtime.cache import cached_by_identity
from nvalchemiops.torch.runtime.context import is_eager, may_read, may_recognize
from nvalchemiops.torch.runtime.recorder import current_recorder, read_number
from nvalchemiops.torch.systems import System

LOOKED_AT = 64
"""Atoms whose rows tell how far a list reaches."""

MOST = 1e-3
"""Part of the forces on a slab that its copies across the vacuum may have without a warning."""


def warn_of_slabs(asked: EwaldSum, evaluate: Callable[[EwaldSum], Any]) -> None:
    """Warn of a list that lacks images across the vacuum of a slab, and of a narrow vacuum.

    The arguments are valid. Values are read on a CPU and outside of recordings only; ``evaluate`` is `ewald_sum`.
    """
    atoms = asked.atoms
    if asked.options.slab_correction is not True or torch.compiler.is_compiling() or current_recorder() is not None:
        return  # a plan holds nothing but the sum
    if atoms.cell is None or isinstance(atoms.pbc, bool) or atoms.domain is not None:
        return  # all systems are molecules, or crystals
    if is_listed(asked.neighbors):
        _warn_of_missing_images(asked)
    tensors: Any = {name: value for name, value in atoms._asdict().items() if isinstance(value, torch.Tensor)}
    if is_eager(*tensors.values()) and may_read(*tensors.values()) and is_first(AccuracyWarning, "vacuum"):
        plain = atoms._replace(**{name: value.detach() for name, value in tensors.items()})
        with torch.no_grad(), unsaid():
            change = _share_of_copies(plain, asked.options, evaluate)
        if change > MOST:
            notify(
                f"the vacuum of a slab is so narrow, or the cell so placed, that copies across it change the forces "
                f"by {change:.1g} of their size: make the cell taller along this axis, and do not wrap the atoms",
                AccuracyWarning,
                kind="vacuum of a slab",
            )


def _share_of_copies(atoms: System, given: SumOptions, evaluate: Callable[[EwaldSum], Any]) -> float:
    """The relative change of forces on the slab with the narrowest vacuum, for its width, if its cell becomes taller.

    Zero, without a sum, where the vacuum is wider than the cell: copies have some exp(-2π) of the forces at most.
    """
    x, cell, of, is_open = _geometry(atoms)
    widest = torch.where(is_open, 0.0, cell.norm(dim=2)).amax(1, keepdim=True)
    vacuum = (_vacuum(x, cell, of, is_open) / widest).amin(1).nan_to_num(nan=torch.inf)
    if not (vacuum < 1.0).any():
        return 0.0
    number = vacuum.argmin()
    here = (of == number).nonzero().squeeze(1)
    pairs, factors = given.exclusions, given.exclusion_factors
    if pairs is not None:
        pairs = torch.as_tensor(pairs, device=x.device)
        is_here = torch.isin(pairs, here).all(0)
        pairs = torch.searchsorted(here, pairs[:, is_here].to(torch.int64))
        factors = None if factors is None else torch.as_tensor(factors, device=x.device)[is_here]
    of_atoms = {n: t for n, t in atoms._asdict().items() if isinstance(t, torch.Tensor) and t.shape[:1] == x.shape[:1]}
    of_slab: Any = {name: values[here] for name, values in of_atoms.items()}
    slab = atoms._replace(**of_slab)._replace(batch_idx=None, pbc=~is_open[number])
    taller = 1.0 + widest[number] * torch.linalg.inv(cell[number]).norm(dim=0) * is_open[number]
    options = SumOptions(None, 0.1 * MOST, None, given.potential, pairs, factors, True)
    request, mesh = SumRequest(Derivatives(forces=True), "atom"), (None, None, None, Precomputed(), None)
    (_, forces), (energies, right) = (
        evaluate(EwaldSum(MeshSum, mesh, slab._replace(cell=heights), GivenNeighbors(), request, options))
        for heights in (cell[number], cell[number] * taller.unsqueeze(1))
    )
    # the forces of neighbors at the distance that their energies have; in a perfect crystal they cancel
    energy, sources = energies.sum().abs(), ((slab.charges, 1), (slab.dipoles, 3), (slab.quadrupoles, 5))
    apart = [
        (source.double().square().sum() / energy).nan_to_num(nan=0.0) ** (1.0 / power)
        for source, power in sources
        if source is not None
    ]
    typical = TYPICAL_FORCE * energy / len(here) ** 0.5 / torch.stack(apart).amax()
    change, force = (values.double().norm() for values in (right - forces, right))
    return float((change / (force + typical)).nan_to_num(nan=0.0))


def _warn_of_missing_images(asked: EwaldSum) -> None:
    """Warn if the list was searched with the open axis of a slab, whose vacuum is narrower than the sum over pairs.

    Each list is looked at once. One of inference mode would be looked at in each call, and is not.
    """
    near = asked.neighbors
    shifts = near.shifts if near.neighbor_list is not None else near.matrix_shifts
    if shifts is None or not may_recognize(shifts) or not may_read(shifts):
        return
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
    x, cell, of, open_axes = _geometry(atoms)
    n_systems, is_open = len(cell), open_axes[of]
    rows = rows_of(asked.neighbors._replace(half_list=False), x, periodic=True)
    in_slabs = is_open.any(1).nonzero().squeeze(1)
    if rows is None or rows.shifts is None or not in_slabs.numel():
        return none
    i, slots = _rows_of_atoms(rows, in_slabs[:: -(-in_slabs.numel() // LOOKED_AT)])
    j = rows.neighbors[slots].long().clamp(0, len(x) - 1)  # of atoms that do not exist the sum is NaN
    apart = x[j] - x[i] + (rows.shifts[slots].double().unsqueeze(1) @ cell[of[i]]).squeeze(1)
    reach = min(read_number(apart.norm(dim=1).amax()) if slots.numel() else 0.0, _needed(asked, n_systems))
    if reach == 0.0 or not read_number((_vacuum(x, cell, of, open_axes) < reach).any()):
        return none
    listed = listed_slots(rows).nonzero().squeeze(1)
    first = row_indices(rows, len(x))[listed]
    if read_number(((rows.shifts[listed] != 0) & is_open[first]).any()):
        return none
    batch_idx = None if atoms.batch_idx is None else of.int()
    found = build_rows(x, reach, cell, batch_idx, open_axes.any(1, keepdim=True).expand(n_systems, 3))
    first, distances = pair_distances(found, x, cell, batch_idx)
    assert found.shifts is not None
    across = ((found.shifts != 0) & is_open[first.long()]).any(1)
    return (across & (distances < (1.0 - 1e-6) * reach)).any()


def _geometry(atoms: System) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Positions, cells, the system of each atom (n_atoms,), and open axes of slabs (n_systems, 3), as plain tensors."""
    given: Any = atoms.cell  # there is one where there are slabs
    x, cell = atoms.positions.detach().double(), given.detach().double().reshape(-1, 3, 3)
    pbc = checks.pbc_tensor(atoms.pbc, x.device).expand(len(cell), 3)
    of = torch.zeros_like(x[:, 0], dtype=torch.int64) if atoms.batch_idx is None else atoms.batch_idx.long()
    is_slab = pbc.sum(1, keepdim=True) == 2
    identity = torch.eye(3, dtype=cell.dtype, device=cell.device)
    return x, torch.where(is_slab.unsqueeze(-1), cell, identity), of, ~pbc & is_slab  # cells of molecules may be zeros


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


def _vacuum(x: torch.Tensor, cell: torch.Tensor, of: torch.Tensor, is_open: torch.Tensor) -> torch.Tensor:
    """The vacuum (n_systems, 3) of slabs along open axes, negative if atoms take more; infinite elsewhere."""
    inverse = torch.linalg.inv(cell)
    along = (x.unsqueeze(1) @ inverse[of]).squeeze(1)  # fractional coordinates
    index = of.unsqueeze(1).expand(-1, 3)
    high = along.new_full((len(cell), 3), -torch.inf).scatter_reduce(0, index, along, "amax")
    low = along.new_full((len(cell), 3), torch.inf).scatter_reduce(0, index, along, "amin")
    return torch.where(is_open, (1.0 - (high - low)) / inverse.norm(dim=1), torch.inf)
