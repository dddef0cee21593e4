"""The bricks of a domain: cells cut along their axes, one brick for each rank, with about equal numbers of atoms.

Coordinates are fractional along periodic axes. Along open axes they are lengths, and the outer bricks are unbounded.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from nvalchemiops.kernels.lattice import unit_vectors
from nvalchemiops.torch.distributed.communication import add, maximum

BINS, FEWEST_BINS, ALL_BINS = 4096, 16, 2**18
"""Numbers of bins in the histograms of coordinates along an axis, with which bricks get equal numbers of atoms: the
largest and the smallest number for one system, and the largest for all systems together."""

BOXES = 2**13
"""Boxes along an axis, on either side of the origin, into which the atoms of a rank are sorted."""

SLACK = 1e-9
"""Margin in coordinates that is added to the cutoff when ghosts are selected, for rounding."""

Grid = tuple[int, int, int]


class Frames(NamedTuple):
    """Cells with unit vectors along open axes, orthogonal to all other vectors.

    Attributes
    ----------
    vectors : (n_systems, 3, 3) array
    pbc : (n_systems, 3) bool array
    """

    vectors: np.ndarray
    pbc: np.ndarray

    @classmethod
    def of(cls, lattice: np.ndarray | None, pbc: np.ndarray) -> "Frames":
        """The frames of cells (n_systems, 3, 3), or of no cells (None). Vectors along open axes are ignored."""
        frame = np.tile(np.eye(3), (len(pbc), 1, 1))
        if lattice is not None:
            unit_vectors(lattice, pbc)  # raises for an invalid lattice
            for system, periodic in enumerate(pbc):
                vectors = lattice[system][periodic]
                frame[system][periodic] = vectors
                frame[system][~periodic] = np.linalg.svd(vectors)[2][len(vectors) :] if len(vectors) else np.eye(3)
        return cls(frame, pbc)

    @property
    def heights(self) -> np.ndarray:
        """Distances (n_systems, 3) between the planes at coordinates 0 and 1 along each axis."""
        return 1.0 / np.linalg.norm(np.linalg.inv(self.vectors), axis=1)

    def coordinates(self, positions: torch.Tensor, batch_idx: torch.Tensor | None) -> torch.Tensor:
        """Coordinates (n, 3) of positions, in float64."""
        inverse = of_atoms(np.linalg.inv(self.vectors), batch_idx, positions)
        x, y, z = positions.double().split(1, dim=1)
        return x * inverse[:, 0] + y * inverse[:, 1] + z * inverse[:, 2]


def of_atoms(values: np.ndarray, batch_idx: torch.Tensor | None, atoms: torch.Tensor) -> torch.Tensor:
    """For each row of ``atoms``, the value of the atom's system."""
    of_systems = torch.as_tensor(np.ascontiguousarray(values), device=atoms.device)
    if batch_idx is None:
        return of_systems[:1].expand(atoms.shape[0], *of_systems.shape[1:])
    return of_systems.index_select(0, batch_idx)


def _taken_off(
    along: np.ndarray, coordinates: torch.Tensor, batch_idx: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Coordinates wrapped into the cell along some axes (n_systems, 3), and the whole cells that were subtracted."""
    cells = coordinates.floor()
    if not along.all():
        cells.mul_(of_atoms(along.astype(np.float64), batch_idx, coordinates))
    return coordinates - cells, cells


class Bricks(NamedTuple):
    """The ends of all bricks.

    Attributes
    ----------
    frames : Frames
    grid : (int, int, int)
        Bricks along each axis. In the order of ranks the last axis varies fastest.
    edges : list of three (n_systems, n_bricks + 1) arrays
        Ends of the bricks along each axis, in coordinates.
    """

    frames: Frames
    grid: Grid
    edges: list[np.ndarray]

    @property
    def wraps(self) -> np.ndarray:
        """Axes (n_systems, 3) that are periodic and divided: atoms are wrapped into the cell along them."""
        return self.frames.pbc & (np.array(self.grid) > 1)

    def wrapped(self, coordinates: torch.Tensor, batch_idx: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Coordinates wrapped into the cell along divided axes, and the whole cells (n, 3) that were subtracted."""
        if not self.wraps.any():
            return coordinates, torch.zeros_like(coordinates)
        return _taken_off(self.wraps, coordinates, batch_idx)

    def ranks_of(self, inside: torch.Tensor, batch_idx: torch.Tensor | None) -> torch.Tensor:
        """The rank (n,), int32, whose brick holds each atom, from coordinates returned by `wrapped`."""
        rank = torch.zeros(inside.shape[0], dtype=torch.int32, device=inside.device)
        for axis, count in enumerate(self.grid):
            if count > 1:
                rank.mul_(count)
                for inner in of_atoms(self.edges[axis][:, 1:-1], batch_idx, inside).unbind(1):
                    rank.add_(inside[:, axis] >= inner)
        return rank

    def seen_by(self, inside: torch.Tensor, batch_idx: torch.Tensor | None, reach: float) -> list[torch.Tensor]:
        """For each rank, the atoms with an image closer than ``reach`` to its brick.

        ``inside`` are coordinates returned by `wrapped`. Only divided axes count: along other axes all atoms are close.
        """
        far = reach / self.frames.heights
        seen = [torch.arange(inside.shape[0], device=inside.device)]
        for axis, count in enumerate(self.grid):
            if count == 1:
                continue
            most = int(np.floor(np.where(self.wraps[:, axis], far[:, axis], -1.0).max())) + 1
            low = of_atoms(self.edges[axis][:, :-1] - far[:, axis, None] - SLACK, batch_idx, inside)
            high = of_atoms(self.edges[axis][:, 1:] + far[:, axis, None] + SLACK, batch_idx, inside)
            periodic = of_atoms(self.wraps[:, axis], batch_idx, inside)
            found = []
            for brick in range(count):
                near = torch.zeros(inside.shape[0], dtype=torch.bool, device=inside.device)
                for image in range(-most, most + 1):
                    place = inside[:, axis] + image
                    is_near = (place >= low[:, brick]) & (place <= high[:, brick])
                    near |= is_near if image == 0 else is_near & periodic
                found.append(near)
            # most bricks are far from all atoms here, and are skipped early
            seen = [atoms[near.index_select(0, atoms)] if len(atoms) else atoms for atoms in seen for near in found]
        return seen

    def order(self, coordinates: torch.Tensor, batch_idx: torch.Tensor | None, width: float) -> torch.Tensor:
        """The order (n,) of the atoms by system, then by place in boxes of about this width.

        A neighbor search is faster if atoms close to each other are adjacent in memory, since they share candidates.
        Atoms close to a border are adjacent, too. Atoms in one box keep their order.
        """
        frames = self.frames
        inside, _ = _taken_off(frames.pbc, coordinates, batch_idx)
        per_unit = np.where(frames.pbc, np.maximum(np.floor(frames.heights / width), 1.0), 1.0 / width)
        boxes = (inside * of_atoms(per_unit, batch_idx, coordinates)).floor().clamp_(-BOXES, BOXES - 1).long()
        place = torch.zeros_like(boxes[:, 0]) if batch_idx is None else batch_idx.long()
        for axis in sorted(range(3), key=lambda axis: -self.grid[axis]):
            place = place * (2 * BOXES) + boxes[:, axis] + BOXES
        return torch.sort(place, stable=True)[1]

    def bounds(self, rank: int, margin: float) -> list[tuple[float, float]]:
        """The ends along each axis of a brick with a margin around it, for all systems together."""
        found = []
        for axis, number in enumerate(np.unravel_index(rank, self.grid)):
            spread = margin / self.frames.heights[:, axis]
            low, high = self.edges[axis][:, number] - spread, self.edges[axis][:, number + 1] + spread
            found.append((float(low.min()), float(high.max())))
        return found


def make_bricks(
    frames: Frames,
    coordinates: torch.Tensor,
    batch_idx: torch.Tensor | None,
    reach: float,
    grid: Grid | None,
    group: Any,
) -> tuple[Bricks, np.ndarray]:
    """Bricks for the atoms of all ranks, and the number of atoms in each system. A collective call.

    Parameters
    ----------
    coordinates : (n, 3) tensor
        Of the atoms that this rank holds, from `Frames.coordinates`.
    reach : float
        How far a rank sees beyond its brick. Without ``grid``, the grid with the fewest ghosts is chosen.
    """
    n_systems, device = len(frames.pbc), coordinates.device
    bins = min(max(ALL_BINS // n_systems, FEWEST_BINS), BINS)
    inside, _ = _taken_off(frames.pbc, coordinates, batch_idx)
    system = torch.zeros(len(coordinates), dtype=torch.int64, device=device) if batch_idx is None else batch_idx.long()
    first, length = np.zeros((n_systems, 3)), np.ones((n_systems, 3))
    place = inside
    if not frames.pbc.all():
        ends = torch.full((2, n_systems, 3), -torch.inf, dtype=torch.float64, device=device)
        index = system.unsqueeze(1).expand(-1, 3)
        ends[0].scatter_reduce_(0, index, -inside, "amax")
        ends[1].scatter_reduce_(0, index, inside, "amax")
        maximum(ends, group)
        low, high = -ends[0].cpu().numpy(), ends[1].cpu().numpy()
        whole = frames.pbc | (low > high)
        first = np.where(whole, 0.0, low)
        length = np.where(whole, 1.0, np.maximum(high - low, 1e-6))
        place = (inside - of_atoms(first, batch_idx, coordinates)) / of_atoms(length, batch_idx, coordinates)
    of_bins = system.unsqueeze(1) * bins + (place * bins).long().clamp_(0, bins - 1)
    counts = torch.stack([torch.bincount(of_bins[:, axis], minlength=n_systems * bins) for axis in range(3)])
    add(counts, group)
    below = counts.reshape(3, n_systems, bins).cumsum(2).cpu().numpy()
    n_atoms = below[0, :, -1]

    if grid is None:
        shares = n_atoms / max(n_atoms.sum(), 1)
        far = (shares[:, None] * (reach / (frames.heights * length))).sum(0)
        grid = min(_grids(dist.get_world_size(group)), key=lambda grid: _ghost_volume(grid, far))
    edges = []
    for axis, count in enumerate(grid):
        wanted = below[axis, :, -1:] * np.arange(1, count) / count
        last_bin = np.minimum((below[axis, :, :, None] < wanted[:, None]).sum(1) + 1, bins)
        inner = first[:, axis, None] + length[:, axis, None] * last_bin / bins
        outer = np.where(frames.pbc[:, axis, None], [[0.0, 1.0]], [[-np.inf, np.inf]])
        edges.append(np.concatenate([outer[:, :1], inner, outer[:, 1:]], 1))
    return Bricks(frames, grid, edges), n_atoms


def check_grid(grid: Any, n_ranks: int) -> None:
    """Raise unless ``grid`` is None or three numbers of bricks whose product is the number of ranks."""
    if grid is None:
        return
    is_grid = isinstance(grid, tuple | list) and len(grid) == 3 and all(isinstance(n, int) and n > 0 for n in grid)
    if not is_grid or math.prod(grid) != n_ranks:
        raise ValueError(f"`grid` = {grid} must be three numbers of bricks, for as many as there are ranks, {n_ranks}")


def _grids(n_ranks: int) -> list[Grid]:
    """All grids of this many bricks. Grids with more bricks along the first axes come first."""
    sizes = [n for n in range(n_ranks, 0, -1) if n_ranks % n == 0]
    return [(a, b, n_ranks // (a * b)) for a in sizes for b in sizes if n_ranks % (a * b) == 0]


def _ghost_volume(grid: Grid, reach: Sequence[float] | np.ndarray) -> float:
    """The volume that a rank sees, for a reach in coordinates. Rounded, so that the first of equal grids is taken."""
    return round(math.prod(1.0 / count + (2.0 * r if count > 1 else 0.0) for count, r in zip(grid, reach)), 6)
