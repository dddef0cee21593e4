"""Methods and sizes for callers that plan a search themselves; the searches of this library do not need them."""

import inspect
from typing import Any

import numpy as np
import torch

from nvalchemiops.compat.ignored_arguments import ignore
from nvalchemiops.kernels.lattice import dual_vectors
from nvalchemiops.neighbors.grid import BAD_CUTOFF, ONE_BIN_OPEN
from nvalchemiops.torch import checks
from nvalchemiops.torch.neighbors.driver import ZERO_CUTOFF
from nvalchemiops.torch.neighbors.faults import FAULTS, MAX_SLOTS
from nvalchemiops.torch.neighbors.lists import neighbor_list
from nvalchemiops.torch.runtime.context import on_host
from nvalchemiops.torch.types import Pbc

MOST_BINS = 8192
"""In the cell of one system of a batch, by default."""

SEVERAL_CELLS = "`cell` must be one cell; use estimate_batch_cell_list_sizes for several"


def suggest_neighbor_list_method(
    batch_ptr: torch.Tensor,
    cell: torch.Tensor | None = None,
    pbc: Pbc | None = None,
    cutoff: float = 0.0,
    *,
    positions: torch.Tensor | None = None,
    batch_idx: torch.Tensor | None = None,
    cutoff2: float | None = None,
    **options: Any,
) -> str:
    """A method of `neighbor_list` that suits these systems. Its default, None, chooses for each system.

    Parameters
    ----------
    batch_ptr : (n_systems + 1,) int32 tensor
        First atom of each system, then n_atoms, which is read on the host unless ``positions`` are given.
    cell, pbc, cutoff, positions, batch_idx, cutoff2
        As in `neighbor_list`; checked if ``positions`` are given. Small systems with ``cutoff2`` get a method for two
        cutoffs.
    **options
        Ignored: other arguments of `neighbor_list`, including those without effect, and ``positions_dtype``,
        ``optional_outputs`` and ``use_pair_fn``.

    Returns
    -------
    str
        Starts with ``"batch_"`` if there are several systems.
    """
    known = inspect.signature(neighbor_list).parameters
    others = {"positions_dtype", "optional_outputs", "use_pair_fn"}
    ignore("suggest_neighbor_list_method", {k: v for k, v in options.items() if k not in known and k not in others})
    if positions is not None:
        checks.check_positions(positions, finite=False)
    checks.check_index("batch_ptr", batch_ptr, positions, (None,))
    if batch_ptr.shape[0] < 1:
        raise ValueError("`batch_ptr` must have shape (n_systems + 1,), got (0,)")
    checks.check_not_negative("cutoff", cutoff)
    if positions is not None:
        checks.check_systems(positions, cell, pbc, batch_idx, batch_ptr)
    n_systems = batch_ptr.shape[0] - 1
    n_atoms = int(batch_ptr[-1]) if positions is None else positions.shape[0]
    small = n_atoms <= ONE_BIN_OPEN * max(n_systems, 1)
    name = "batch_" if n_systems > 1 else ""
    if small and cutoff2 is not None:
        return name + "naive_dual_cutoff"
    return name + ("naive" if small else "cell_list")


def estimate_cell_list_sizes(
    cell: torch.Tensor, pbc: Pbc, cutoff: float, max_nbins: int = 524288, min_cells_per_dimension: int = 4
) -> tuple[int, torch.Tensor]:
    """The number of bins of a cell list over the whole cell, and the search radius in bins along each direction.

    For callers that plan memory. The lists of this library do not need these numbers, since their bins follow the
    atoms.

    Parameters
    ----------
    cell : (3, 3), (1, 3, 3) or, for a batch without systems, (0, 3, 3) tensor, length
    pbc : (3,), (1, 3) or (0, 3) bool tensor
    cutoff : float, length, non-negative
    max_nbins : int, optional
        Largest total number of bins.
    min_cells_per_dimension : int, optional
        Smallest number of bins along each axis, as far as ``max_nbins`` allows.

    Returns
    -------
    max_total_cells : int
    neighbor_search_radius : (3,) int32 tensor
    """
    if isinstance(cell, torch.Tensor) and cell.ndim == 3 and cell.shape[0] > 1:
        raise ValueError(SEVERAL_CELLS)
    total, radius = estimate_batch_cell_list_sizes(cell, pbc, cutoff, max_nbins, min_cells_per_dimension)
    return total, radius[0] if len(radius) else radius.new_zeros(3)


def estimate_batch_cell_list_sizes(
    cell: torch.Tensor, pbc: Pbc, cutoff: float, max_nbins: int = MOST_BINS, min_cells_per_dimension: int = 4
) -> tuple[int, torch.Tensor]:
    """`estimate_cell_list_sizes` for cells (n_systems, 3, 3): bins of all systems, radii (n_systems, 3)."""
    total, _, radius = bins_of_cells(cell, pbc, cutoff, max_nbins, min_cells_per_dimension)
    return total, radius


def bins_of_cells(
    cell: torch.Tensor, pbc: Pbc, cutoff: float, max_nbins: int = MOST_BINS, min_cells_per_dimension: int = 4
) -> tuple[int, torch.Tensor, torch.Tensor]:
    """The same, and between total and radii the numbers of bins (n_systems, 3) along each axis."""
    cutoff = checks.check_not_negative("cutoff", cutoff)
    for name, value in (("max_nbins", max_nbins), ("min_cells_per_dimension", min_cells_per_dimension)):
        checks.check_count(name, value, 1)
    bins, radius = _bins(*_lattices(cell, pbc), cutoff, max_nbins, min_cells_per_dimension)
    counts, reach = (torch.as_tensor(a, dtype=torch.int32, device=cell.device) for a in (bins, radius))
    return int(bins.prod(axis=1).sum()), counts, reach


def batch_build_cell_list(
    positions: torch.Tensor,
    cutoff: float,
    cell: torch.Tensor,
    pbc: torch.Tensor,
    batch_idx: torch.Tensor,
    cells_per_dimension: torch.Tensor,
    neighbor_search_radius: torch.Tensor,
    atom_periodic_shifts: torch.Tensor,
    atom_to_cell_mapping: torch.Tensor,
    atoms_per_cell_count: torch.Tensor,
    cell_atom_start_indices: torch.Tensor,
    cell_atom_list: torch.Tensor,
    min_cells_per_dimension: int = 4,
    *,
    cell_offsets: torch.Tensor | None = None,
) -> None:
    """Sort the atoms of a batch into bins, for callers with kernels of their own; all results go into given memory.

    The lists of this library do not need them. Cells are read on the host.

    Parameters
    ----------
    positions : (n_atoms, 3) tensor, length
    cutoff : float, length, non-negative
    cell : (n_systems, 3, 3) tensor, length
    pbc : (n_systems, 3) bool tensor
    batch_idx : (n_atoms,) int32 tensor
    cells_per_dimension : (n_systems, 3) int32 tensor
        Receives the number of bins along each axis: those of `estimate_batch_cell_list_sizes`, or fewer where there is
        no memory for them.
    neighbor_search_radius : (n_systems, 3) int32 tensor
        Receives how many bins further partners can be.
    atom_periodic_shifts : (n_atoms, 3) int32 tensor
        Receives the cell S in which each atom is: it is wrapped at ``r - S·cell``.
    atom_to_cell_mapping : (n_atoms, 3) int32 tensor
        Receives the bin (x, y, z) of the wrapped atom.
    atoms_per_cell_count, cell_atom_start_indices : (max_total_cells,) int32 tensor
        Receive how many atoms are in a bin, and where it starts in ``cell_atom_list``. The bins of a system are at
        ``x + n_x (y + n_y z)`` from its first one.
    cell_atom_list : (n_atoms,) int32 tensor
        Receives atoms in the order of bins, in ascending order in each.
    min_cells_per_dimension : int, optional
        As in `estimate_batch_cell_list_sizes`.
    cell_offsets : (n_systems,) int32 tensor, optional
        Receives the first bin of each system.

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message; or less memory than one bin for each system.
    """
    cutoff = checks.check_not_negative("cutoff", cutoff)
    checks.check_positions(positions, finite=False)
    least = checks.check_count("min_cells_per_dimension", min_cells_per_dimension, 1)
    lattices = _lattices(cell, pbc)
    n_systems, room = len(lattices[0]), atoms_per_cell_count.shape[0]
    if room < n_systems:
        raise ValueError(f"`atoms_per_cell_count` must have room for {n_systems} bins, got {room}")
    bins, radius = _bins(*lattices, cutoff, MOST_BINS, least)
    if bins.prod(axis=1).sum() > room:
        bins, radius = _bins(*lattices, cutoff, max(room // max(n_systems, 1), 1), least)
    device, systems = positions.device, batch_idx.to(torch.int64)
    first = np.concatenate([[0], bins.prod(axis=1).cumsum()])
    counts, reach, offsets = (torch.as_tensor(a, device=device, dtype=torch.int64) for a in (bins, radius, first))
    periodic = torch.as_tensor(lattices[1], device=device)
    # an open axis is divided along its vector, whatever the others are; float64, so that a pair is not farther apart
    # in bins than the radius says
    along = np.nan_to_num(lattices[0] / np.linalg.norm(lattices[0], axis=2, keepdims=True).clip(1e-100) ** 2)
    axes = np.where(lattices[1][:, :, None], dual_vectors(*lattices[:2]), along)
    inverse = torch.as_tensor(axes, device=device)
    with torch.no_grad():
        fractional = (inverse[systems] * positions.double().unsqueeze(1)).sum(2)
        shifts = torch.where(periodic[systems], fractional.floor(), 0.0)
        number = counts[systems]
        places = ((fractional - shifts) * number).floor().to(torch.int64).clamp(min=0).minimum(number - 1)
        index = places[:, 0] + number[:, 0] * (places[:, 1] + number[:, 1] * places[:, 2]) + offsets[systems]
        held = torch.zeros(room, dtype=torch.int64, device=device).index_add_(0, index, torch.ones_like(index))
        cells_per_dimension.copy_(counts)
        neighbor_search_radius.copy_(reach)
        atom_periodic_shifts.copy_(shifts)
        atom_to_cell_mapping.copy_(places)
        atoms_per_cell_count.copy_(held)
        cell_atom_start_indices.copy_(held.cumsum(0) - held)
        cell_atom_list.copy_(index.argsort(stable=True))
        if cell_offsets is not None:
            cell_offsets.copy_(offsets[: cell_offsets.shape[0]])


def _bins(
    cells: np.ndarray, periodic: np.ndarray, steepness: np.ndarray, cutoff: float, most: int, least: int
) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of bins (n_systems, 3) along each axis, and how many bins further partners can be."""
    lengths = np.linalg.norm(cells, axis=2)
    heights = np.where(periodic, 1.0 / np.where(periodic, steepness, 1.0), np.where(np.isfinite(lengths), lengths, 0.0))
    fit = np.minimum(np.floor(heights / max(cutoff, ZERO_CUTOFF)), most)
    bins = np.maximum(fit, least)
    # thin out the most divided axes first
    while (over := bins.prod(axis=1) > most).any():
        rows = np.nonzero(over)[0]
        axes = bins[rows].argmax(axis=1)
        others = bins[rows].prod(axis=1) / bins[rows, axes]
        bins[rows, axes] = np.maximum(np.floor(most / others), np.ceil(bins[rows, axes] / 2))
    radius = np.ceil(cutoff * bins / np.maximum(heights, max(cutoff, ZERO_CUTOFF) * 1e-6)).astype(np.int64)
    return bins.astype(np.int64), np.where(periodic, radius, np.minimum(radius, bins.astype(np.int64)))


def compute_naive_num_shifts(cell: torch.Tensor, cutoff: float, pbc: Pbc) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The number of images of the cell that a test of all pairs of wrapped atoms visits.

    For callers that count the images once. The lists of this library accept these numbers, but do not need them.

    Parameters
    ----------
    cell : (3, 3) or (n_systems, 3, 3) tensor, length
    cutoff : float, length, non-negative
    pbc : (3,) or (n_systems, 3) bool tensor

    Returns
    -------
    shift_range_per_dimension : (n_systems, 3) int32 tensor
        Number of images in each direction of each axis, 0 along open axes.
    num_shifts_per_system : (n_systems,) int32 tensor
        Number of images, counting the cell itself and one of each pair S and -S.
    max_shifts_per_system : int
        The largest of these numbers; 0 without systems.

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message; a singular cell, or more images than int32 can count.
    """
    cutoff = checks.check_not_negative("cutoff", cutoff)
    _, periodic, steepness = _lattices(cell, pbc)
    reach = np.where(periodic, np.ceil(cutoff * steepness), 0.0)
    images = ((2.0 * reach + 1.0).prod(axis=1) + 1.0) / 2.0
    if images.size and images.max() > MAX_SLOTS:
        raise ValueError(FAULTS[BAD_CUTOFF])
    most = int(images.max()) if images.size else 0
    ranges, numbers = (torch.as_tensor(t, device=cell.device).to(torch.int32) for t in (reach, images))
    return ranges, numbers, most


def allocate_cell_list(
    total_atoms: int, max_total_cells: int, neighbor_search_radius: torch.Tensor, device: Any
) -> tuple[torch.Tensor, ...]:
    """Memory for `batch_build_cell_list`; the lists of this library need none.

    In the order ``cells_per_dimension``, ``neighbor_search_radius``, ``atom_periodic_shifts``,
    ``atom_to_cell_mapping``, ``atoms_per_cell_count``, ``cell_atom_start_indices`` and ``cell_atom_list``. Only
    the radius, which is returned as it is, has a meaning before.
    """
    n, bins, systems = total_atoms, max_total_cells, neighbor_search_radius.shape[:-1]
    shapes = [(*systems, 3), (n, 3), (n, 3), (bins,), (bins,), (n,)]
    scratch, *others = (torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes)
    return scratch, neighbor_search_radius, *others


def _lattices(cell: Any, pbc: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cells (n_systems, 3, 3), periodicity, and along periodic axes the inverse distance of lattice planes."""
    checks.check_tensor("cell", cell)
    checks.check_place("cell", cell)
    if not cell.is_floating_point() or cell.shape[-2:] != (3, 3):
        raise ValueError("`cell` must be a floating-point tensor of shape (3, 3) or (n_systems, 3, 3)")
    cells = on_host(cell.reshape(-1, 3, 3)).astype(np.float64)
    axes = on_host(checks.pbc_tensor(True if pbc is None else pbc))
    if axes.shape not in ((), (3,), (1, 3), (len(cells), 3)):
        raise ValueError(f"`pbc` must have shape (3,) or ({len(cells)}, 3), got {axes.shape}")
    periodic = np.broadcast_to(axes, (len(cells), 3)).copy()
    return cells, periodic, np.linalg.norm(dual_vectors(cells, periodic), axis=2)
