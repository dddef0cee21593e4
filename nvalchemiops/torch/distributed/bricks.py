"""The bricks of a domain: space cut into one brick for each rank, with about equal work in all.

Space is cut in two, and each part again, until there are as many parts as ranks: orthogonal recursive bisection. The
cuts form a binary tree. A cut divides the work of its part in the ratio of the numbers of ranks on its two sides, along
the axis that makes the fewest ghosts, with a preference for axes along which meshes are cut, too. Which atoms are in a
brick, or close to it, is found by descent of the tree.

Coordinates are fractional along periodic axes, and lengths along open axes. All systems of a batch have the same cuts
in these coordinates: only the work in all systems together is balanced. The outer bricks along open axes are unbounded.

Source of the method: M. J. Berger and S. H. Bokhari, IEEE Trans. Comput. C-36, 570 (1987), doi:10.1109/TC.1987.1676942.
"""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from nvalchemiops.arguments import ValuesError
from nvalchemiops.kernels.lattice import unit_vectors

COARSE, FINE = 32, 64
"""Bins of the histograms of a part: along each axis, to choose one, and again in the bin with the cut."""

BOXES = 2**13
"""Boxes along an axis, on either side of the origin, into which the atoms of a rank are sorted."""

SLACK = 1e-9
"""Margin in coordinates that is added to the cutoff when ghosts are selected, for rounding."""

NARROW = 1e-9
"""The smallest width in coordinates of the bins of a part, where all atoms are at one place."""

LATER_AXIS = 0.06
"""By how much fewer ghosts a cut along the next axis must make: a mesh is divided along the first axis first."""

LAST_AXIS = 1.0
"""How many ghosts for each atom a cut along the last axis must save. A mesh is not cut along it, so for bricks that are
cut along it half of the mesh and more is sent twice, the bytes of two to three ghosts for each atom."""

ONE = 2**20
"""The largest weight as an integer. Sums of integers do not depend on which rank holds an atom."""

Grid = tuple[int, int, int]
Reduce = Callable[[torch.Tensor], torch.Tensor]


class Frames(NamedTuple):
    """Cells with unit vectors along open axes, orthogonal to all other vectors."""

    vectors: np.ndarray  # (n_systems, 3, 3)
    pbc: np.ndarray  # (n_systems, 3) bool

    @classmethod
    def of(cls, lattice: np.ndarray | None, pbc: np.ndarray) -> "Frames":
        """The frames of cells (n_systems, 3, 3), or of no cells (None). Vectors along open axes are ignored."""
        frame = np.tile(np.eye(3), (len(pbc), 1, 1))
        if lattice is not None:
            unit_vectors(lattice, pbc)  # raises for an invalid lattice
            for system, periodic in enumerate(pbc):
                vectors = lattice[system][periodic]
                frame[system][periodic] = vectors
                frame[system][~periodic] = np.linalg.svd(vectors)[2][len(vectors) :]
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


def closed(lattice: np.ndarray | None, pbc: np.ndarray) -> np.ndarray:
    """Axes (n_systems, 3) of frames: those of ``pbc``, and the open axis of slabs, if the cells have a volume.

    Lattice sums of slabs are periodic along it, too. Atoms that are close without its images are close with them.
    """
    found = pbc.copy()
    if lattice is not None:
        for system in np.flatnonzero(pbc.sum(1) == 2):
            with contextlib.suppress(ValuesError):
                unit_vectors(lattice[system : system + 1], np.ones((1, 3), dtype=bool))
                found[system] = True
    return found


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


class Shape(NamedTuple):
    """The shape of a tree of cuts: which ranks are on either side of each cut.

    Cuts have the numbers 0 to n_ranks - 2, level by level. Behind them bricks are numbered by rank.
    """

    levels: tuple[slice, ...]  # the cuts of each level
    below: np.ndarray  # (2, 2 n_ranks - 1): cuts or bricks on the lower and the upper side; those of a brick are itself
    share: np.ndarray  # (n_ranks - 1,): the ranks on the lower side, as a share of those on both
    along: np.ndarray  # (n_ranks - 1,): the axis of each cut, or -1 if it is free


@functools.lru_cache(maxsize=16)
def shape_of(n_ranks: int, grid: Grid | None) -> Shape:
    """The shape of the tree for these ranks. With a grid its first axis is cut first, and its last axis last."""
    n_cuts = n_ranks - 1
    levels, below = [], np.tile(np.arange(2 * n_ranks - 1), (2, 1))
    share, along = np.empty(n_cuts), np.full(n_cuts, -1)
    parts: list[tuple[int, Grid]] = [(0, grid or (n_ranks, 1, 1))] if n_cuts else []  # first rank, bricks along axes
    number = 0
    while parts:
        levels.append(slice(number, number + len(parts)))
        left: list[tuple[int, Grid]] = []
        for cut, (first, bricks) in enumerate(parts, number):
            axis = next(axis for axis in range(3) if bricks[axis] > 1)
            half = bricks[axis] // 2
            share[cut], along[cut] = half / bricks[axis], -1 if grid is None else axis
            for side, count in enumerate((half, bricks[axis] - half)):
                x, y, z = (count if a == axis else n for a, n in enumerate(bricks))
                part = (x, y, z)
                n_below = math.prod(part)
                below[side, cut] = n_cuts + first if n_below == 1 else number + len(parts) + len(left)
                if n_below > 1:
                    left.append((first, part))
                first += n_below
        number, parts = number + len(parts), left
    return Shape(tuple(levels), below, share, along)


class Bricks(NamedTuple):
    """The bricks of all ranks, as a tree of cuts."""

    frames: Frames
    shape: Shape
    axis: np.ndarray  # (2 n_ranks - 1,): the axis of each cut; 0 for bricks
    cut: np.ndarray  # (2 n_ranks - 1,): the coordinate of each cut; infinite for bricks
    largest: float  # the work of the rank with the most, over the mean, when the cuts were made
    by_neighbors: bool = False  # whether neighbors, once known, are the work of atoms; else the caller gives it

    @property
    def n_ranks(self) -> int:
        """The number of bricks."""
        return len(self.shape.share) + 1

    @property
    def cuts_along(self) -> np.ndarray:
        """How many cuts (3,) there are along each axis."""
        return np.bincount(self.axis[: self.n_ranks - 1], minlength=3)

    @property
    def wraps(self) -> np.ndarray:
        """Axes (n_systems, 3) that are periodic and divided: atoms are wrapped into the cell along them."""
        return self.frames.pbc & (self.cuts_along > 0)

    def wrapped(self, coordinates: torch.Tensor, batch_idx: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Coordinates wrapped into the cell along divided axes, and the whole cells (n, 3) that were subtracted."""
        if not self.wraps.any():
            return coordinates, torch.zeros_like(coordinates)
        return _taken_off(self.wraps, coordinates, batch_idx)

    def _on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The axes, the coordinates and what is below of all cuts and bricks, as tensors."""
        axis, cut, below = (
            torch.as_tensor(values, device=device) for values in (self.axis, self.cut, self.shape.below)
        )
        return axis, cut, below

    def ranks_of(self, inside: torch.Tensor) -> torch.Tensor:
        """The rank (n,), int32, whose brick holds each atom, from coordinates returned by `wrapped`."""
        axis, cut, below = self._on(inside.device)
        part = torch.zeros(len(inside), dtype=torch.int64, device=inside.device)
        for _ in self.shape.levels:
            upper = _along(inside, axis[part]) >= cut[part]
            part = torch.where(upper, below[1][part], below[0][part])
        return (part - (self.n_ranks - 1)).int()

    def boxes(self) -> tuple[np.ndarray, np.ndarray]:
        """The lower and the upper ends (n_ranks, 3) of the bricks; infinite where nothing is cut."""
        n_cuts = self.n_ranks - 1
        low, high = (np.full((2 * n_cuts + 1, 3), end) for end in (-np.inf, np.inf))
        for level in self.shape.levels:
            lower, upper = self.shape.below[:, level]
            low[lower], low[upper], high[lower], high[upper] = low[level], low[level], high[level], high[level]
            high[lower, self.axis[level]] = low[upper, self.axis[level]] = self.cut[level]
        return low[n_cuts:], high[n_cuts:]

    def seen_by(
        self, inside: torch.Tensor, batch_idx: torch.Tensor | None, reach: float, rank: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The atoms (n_seen,) with an image closer than ``reach`` to the bricks of other ranks, and how many each sees.

        Atoms have coordinates ``inside``, returned by `wrapped`. Those that rank 0 sees come first, then those that
        rank 1 sees, and so on, each in ascending order. Only divided axes count: along other axes all atoms are close.
        """
        n_atoms, n_cuts = len(inside), self.n_ranks - 1
        far = of_atoms(reach / self.frames.heights + SLACK, batch_idx, inside)
        atoms, place = self._images(inside, batch_idx, far, rank)
        far = far.index_select(0, atoms)
        axis, cut, below = self._on(inside.device)
        part, image = torch.zeros_like(atoms), torch.arange(len(atoms), device=inside.device)
        for _ in self.shape.levels:
            along = axis[part]
            from_cut = _along(place.index_select(0, image), along) - cut[part]
            width = _along(far.index_select(0, image), along)
            sides = [near.nonzero().squeeze(1) for near in (from_cut <= width, from_cut >= -width)]
            part = torch.cat([below[side][part.index_select(0, chosen)] for side, chosen in enumerate(sides)])
            image = torch.cat([image.index_select(0, chosen) for chosen in sides])
        seer = part - n_cuts
        keys = torch.unique((seer * n_atoms + atoms.index_select(0, image))[seer != rank])
        seer = keys.div(max(n_atoms, 1), rounding_mode="floor")
        return keys - seer * n_atoms, torch.bincount(seer, minlength=self.n_ranks)

    def _images(
        self, inside: torch.Tensor, batch_idx: torch.Tensor | None, far: torch.Tensor, rank: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The atoms (n_images,) of a rank that are not deep inside of its brick, with their images near the cell.

        Images are coordinates (n_images, 3); ``far`` (n, 3) is how far ranks see, in coordinates.
        """
        ends = np.stack([ends[rank] for ends in self.boxes()])  # (2, 3)
        ends = np.where(self.wraps[:, None], ends.clip(0.0, 1.0), ends)
        low, high = of_atoms(ends, batch_idx, inside).unbind(1)
        atoms = ((inside - low <= far) | (high - inside <= far)).any(1).nonzero().squeeze(1)
        place = inside.index_select(0, atoms)
        for axis in range(3):
            if not self.wraps[:, axis].any():
                continue
            x, width = place[:, axis], far[:, axis].index_select(0, atoms)
            systems = None if batch_idx is None else batch_idx.index_select(0, atoms)
            has_images = of_atoms(self.wraps[:, axis], systems, x)
            # images farther away are never the closest
            near_ends = [(there & has_images).nonzero().squeeze(1) for there in (x <= width, x >= 1.0 - width)]
            copies = [place.index_select(0, chosen) for chosen in near_ends]
            for moved, cells in zip(copies, (1.0, -1.0)):
                moved[:, axis] += cells
            place = torch.cat([place, *copies])
            atoms = torch.cat([atoms, *(atoms.index_select(0, chosen) for chosen in near_ends)])
        return atoms, place

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
        for axis in sorted(range(3), key=lambda axis: -self.cuts_along[axis]):
            place = place * (2 * BOXES) + boxes[:, axis] + BOXES
        return torch.sort(place, stable=True)[1]

    def bounds(self, margin: float) -> tuple[np.ndarray, np.ndarray]:
        """The lower and the upper ends (n_ranks, 3) of all bricks with a margin around them, for periodic systems."""
        low, high = (ends.clip(0.0, 1.0) for ends in self.boxes())
        spread = (margin / self.frames.heights).max(0, initial=0.0)
        return low - spread, high + spread


def _along(values: torch.Tensor, axis: torch.Tensor) -> torch.Tensor:
    """The entry of each row (n,) along the axis for this row."""
    return values.gather(1, axis.unsqueeze(1)).squeeze(1)


# -- making them ----------------------------------------------------------------------------------


def sums_of_work(numbers: torch.Tensor, work: torch.Tensor, size: int) -> torch.Tensor:
    """The work (size,), float64, of all atoms with each number.

    A GPU has no ``bincount`` of weights when ``torch.use_deterministic_algorithms`` is on.
    """
    return work.new_zeros(size, dtype=torch.float64).index_add_(0, numbers, work.double())


def make_bricks(
    frames: Frames,
    coordinates: torch.Tensor,
    batch_idx: torch.Tensor | None,
    weights: torch.Tensor | None,
    reach: float,
    shape: Shape,
    add: Reduce,
    maximum: Reduce,
) -> Bricks:
    """Bricks in which the atoms of all ranks have about equal weights. A collective call.

    For each level of the tree two histograms are summed over the ranks: of `COARSE` bins along each axis of each part,
    and of `FINE` bins around each cut. Everything else is computed on each rank alike.

    Coordinates (n, 3), from `Frames.coordinates`, and weights (n,) are those of the atoms that this rank holds. Weights
    are the work that atoms make, integers up to `ONE`, equal by default. A rank sees as far as ``reach`` beyond its
    brick. ``add`` and ``maximum`` replace a tensor in place by its sum, or its elementwise maximum, over the ranks, and
    return it.
    """
    n_cuts, device = len(shape.share), coordinates.device
    n_parts = 2 * n_cuts + 1
    place, _ = _taken_off(frames.pbc, coordinates, batch_idx)
    ends = torch.full((2, 3), -torch.inf, dtype=torch.float64, device=device)
    if len(place):
        ends = torch.stack([(-place).amax(0), place.amax(0)])
    ends_of_all = maximum(ends).cpu().numpy()
    low, high = np.zeros((n_parts, 3)), np.ones((n_parts, 3))
    if np.isfinite(ends_of_all).all():  # there are atoms
        low[0], high[0] = -ends_of_all[0], ends_of_all[1]
    box = np.stack([np.full((n_parts, 3), end) for end in (-np.inf, np.inf)])  # between cuts
    length = frames.heights.mean(0) if len(frames.pbc) else np.ones(3)
    # the first cut along a periodic axis makes two surfaces: the other is at the end of the cell
    is_round = np.tile(frames.pbc.any(0), (n_parts, 1))
    axis, cut = np.zeros(n_parts, dtype=np.int64), np.full(n_parts, np.inf)
    work = np.zeros(n_parts)
    part = torch.zeros(len(place), dtype=torch.int64, device=device)
    work_of = torch.ones(len(place), device=device) if weights is None else weights  # integers: sums are exact
    work_of = work_of.double()
    below = torch.as_tensor(shape.below, device=device)

    def sums(bins: torch.Tensor, work: torch.Tensor, *sizes: int) -> np.ndarray:
        return add(sums_of_work(bins, work, math.prod(sizes))).cpu().numpy().reshape(sizes)

    for level in shape.levels:
        inside = ((part >= level.start) & (part < level.stop)).nonzero().squeeze(1)
        if len(inside) < len(part):  # some are in bricks already
            place, part, work_of = (values.index_select(0, inside) for values in (place, part, work_of))
        number, n_here = part - level.start, level.stop - level.start
        start, width = low[level], np.maximum(high[level] - low[level], NARROW)
        bins = _bins(place, number, start, width, COARSE)
        rows = (number.unsqueeze(1) * 3 + torch.arange(3, device=device)) * COARSE + bins
        coarse = sums(rows.flatten(), work_of.unsqueeze(1).expand(-1, 3).flatten(), n_here, 3, COARSE)
        up_to = np.concatenate([np.zeros((n_here, 3, 1)), coarse.cumsum(2)], 2)
        whole = up_to[:, 0, -1]
        wanted = shape.share[level] * whole
        occupied = _occupied(coarse)
        far = (reach / length / width, np.stack([start, 1.0 - start]) / width, is_round[level])
        chosen = _axes(up_to, wanted, (occupied[1] - occupied[0]) / COARSE, far)
        chosen = np.where(shape.along[level] < 0, chosen, shape.along[level])

        # the bin with the cut again, in finer bins
        here = np.arange(n_here)
        up_to, start, width = up_to[here, chosen], start[here, chosen], width[here, chosen]
        crossed = _crossed(up_to, wanted)
        at, along = (torch.as_tensor(values, device=device)[number] for values in (crossed, chosen))
        finely = (_along(bins, along) == at).nonzero().squeeze(1)
        x, of_part = _along(place, along), number.index_select(0, finely)
        begin, step = start + width * crossed / COARSE, width / COARSE
        bins = _bins(x.index_select(0, finely), of_part, begin, step, FINE)
        fine = sums(of_part * FINE + bins, work_of.index_select(0, finely), n_here, FINE)
        edges = np.concatenate([_edges(start, width, COARSE), _edges(begin, step, FINE)[:, 1:-1]], 1)
        in_fine = up_to[here, crossed][:, None] + fine.cumsum(1)[:, :-1]
        place_of_cut, lower_work = _places(edges, np.concatenate([up_to, in_fine], 1), wanted)
        cut[level] = np.clip(place_of_cut, *box[:, level][:, here, chosen])  # where the part is narrower than its bins
        axis[level] = chosen

        lower, upper = shape.below[:, level]
        work[lower], work[upper] = lower_work, whole - lower_work
        step_of_all = (high[level] - low[level]) / COARSE
        box[:, lower] = box[:, upper] = box[:, level]
        box[1, lower, chosen] = box[0, upper, chosen] = cut[level]
        for side in (lower, upper):
            low[side], high[side] = (np.clip(low[level] + step_of_all * ends, *box[:, side]) for ends in occupied)
            is_round[side] = is_round[level]
            is_round[side, chosen] = False
        is_upper = x >= torch.as_tensor(cut[level], device=device)[number]
        part = torch.where(is_upper, below[1][part], below[0][part])
    largest = float(work[n_cuts:].max() / max(work[n_cuts:].mean(), 1e-300)) if n_cuts else 1.0
    return Bricks(frames, shape, axis, cut, largest)


def _bins(x: torch.Tensor, number: torch.Tensor, start: np.ndarray, width: np.ndarray, n_bins: int) -> torch.Tensor:
    """The bin of each coordinate, where part ``number`` has bins from ``start`` over a ``width``."""
    first, per_unit = (torch.as_tensor(values, device=x.device)[number] for values in (start, n_bins / width))
    return ((x - first) * per_unit).long().clamp_(0, n_bins - 1)


def _edges(start: np.ndarray, width: np.ndarray, n_bins: int) -> np.ndarray:
    """The edges (n_parts, n_bins + 1) of bins."""
    return start[:, None] + width[:, None] * np.arange(n_bins + 1) / n_bins


def _occupied(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first bin with atoms, and the end of the last one, along the last axis; all bins if there are no atoms."""
    filled, n_bins = counts > 0, counts.shape[-1]
    some = filled.any(-1)
    return np.where(some, filled.argmax(-1), 0), np.where(some, n_bins - filled[..., ::-1].argmax(-1), n_bins)


def _crossed(up_to: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The bin in which sums from the left reach what is wanted (n_parts,)."""
    wanted = wanted.reshape(-1, *[1] * (up_to.ndim - 1))
    return np.minimum((up_to[..., 1:] < wanted).sum(-1), up_to.shape[-1] - 2)


def _axes(up_to: np.ndarray, wanted: np.ndarray, extent: np.ndarray, far: tuple[np.ndarray, ...]) -> np.ndarray:
    """The axis (n_parts,) along which a cut has the fewest atoms near it, or if all are near, the longest axis.

    ``up_to`` (n_parts, 3, n_bins + 1) are sums over the bins from the left, ``wanted`` (n_parts,) is the sum at the
    cut, and ``extent`` (n_parts, 3) the length from the first to the last bin with atoms, in units of that of all bins.
    ``far`` has, in the same units, how far a rank sees (n_parts, 3), and the distances (2, n_parts, 3) of the lower and
    the upper end of the cell from the first bin; and whether (n_parts, 3) the cell goes on there without a cut.
    """
    n_bins = up_to.shape[-1] - 1

    def at(place: np.ndarray) -> np.ndarray:
        place = np.clip(place * n_bins, 0, n_bins)
        k = np.minimum(place.astype(int), n_bins - 1)[..., None]
        before, after = (np.take_along_axis(up_to, index, 2)[..., 0] for index in (k, k + 1))
        return before + (place - k[..., 0]) * (after - before)

    k = _crossed(up_to, wanted)[..., None]
    before, after = (np.take_along_axis(up_to, index, 2)[..., 0] for index in (k, k + 1))
    place = (k[..., 0] + (wanted[:, None] - before) / np.maximum(after - before, 1.0)) / n_bins
    reach, (lower, upper), is_round = far
    whole = up_to[..., -1]

    def ghosts(near: np.ndarray) -> np.ndarray:
        # if all atoms of the part are near, as if it went on with the same density
        share = near / np.maximum(whole, 1.0)
        return np.where(share < 1.0, share, np.maximum(2.0 * reach / extent, 1.0))

    near = ghosts(at(place + reach) - at(place - reach))
    near += is_round * ghosts(at(reach - lower) + whole - at(upper - reach))
    return (near * (1.0 + LATER_AXIS * np.arange(3)) + LAST_AXIS * np.array([0.0, 0.0, 1.0])).argmin(1)


def _places(edges: np.ndarray, up_to: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The cut (n_parts,) at the edge with the sum closest to what is wanted, and the sum there.

    If there is a gap, the cut is in the middle of it, so that atoms at its ends do not change sides by rounding.
    """
    order = edges.argsort(1, kind="stable")
    edges, up_to = np.take_along_axis(edges, order, 1), np.take_along_axis(up_to, order, 1)
    best = np.abs(up_to - wanted[:, None]).argmin(1)[:, None]
    found = np.take_along_axis(up_to, best, 1)
    same = up_to == found
    ends = (same.argmax(1), same.shape[1] - 1 - same[:, ::-1].argmax(1))
    first, last = (np.take_along_axis(edges, end[:, None], 1)[:, 0] for end in ends)
    return 0.5 * (first + last), found[:, 0]


# -- arguments ------------------------------------------------------------------------------------


def check_grid(grid: Any, n_ranks: int) -> Grid | None:
    """Raise unless ``grid`` is None or three numbers of bricks whose product is the number of ranks."""
    if grid is None:
        return None
    numbers = grid.tolist() if isinstance(grid, np.ndarray) else grid
    is_grid = isinstance(numbers, tuple | list) and len(numbers) == 3
    is_grid = is_grid and all(isinstance(n, int | np.integer) and n > 0 for n in numbers)
    if not is_grid or math.prod(numbers) != n_ranks:
        raise ValueError(f"`grid` = {grid} must be three numbers of bricks, for as many as there are ranks, {n_ranks}")
    return (int(numbers[0]), int(numbers[1]), int(numbers[2]))


def check_cuts(cuts: Any, n_ranks: int) -> None:
    """Raise unless ``cuts`` is None or the bricks of this many ranks."""
    if cuts is not None and not isinstance(cuts, Bricks):
        raise TypeError(f"`cuts` must be `bricks` of a Domain, got {type(cuts).__name__}")
    if cuts is not None and cuts.n_ranks != n_ranks:
        raise ValueError(f"`cuts` are those of {cuts.n_ranks} ranks, but there are {n_ranks}")


def check_weights(weights: Any, positions: torch.Tensor) -> float:
    """Raise unless ``weights`` is None or a positive number for each atom; return the largest, or -inf for none."""
    if weights is None:
        return -math.inf
    if not isinstance(weights, torch.Tensor) or weights.shape != positions.shape[:1]:
        raise ValueError(f"`weights` must be a tensor of shape ({len(positions)},), a number for each atom")
    if not weights.numel():
        return -math.inf
    low, high = float(weights.min()), float(weights.max())
    if not 0.0 < low <= high < math.inf:
        raise ValueError(f"`weights` must be positive and finite, got numbers from {low} to {high}")
    return high
