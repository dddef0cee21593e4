"""The division of a system among ranks: which atoms a rank owns, and which others it needs to see.

The cells are cut into bricks in fractional coordinates, one for each rank. Each rank owns the atoms in its brick, of all
systems of a batch, and knows the *ghosts*: atoms of other ranks, or images of atoms, that are closer to the brick than
the cutoff. Atoms keep their owner until the domain is made anew.

Source of the method: S. Plimpton, J. Comput. Phys. 117, 1 (1995), doi:10.1006/jcph.1995.1039.
"""

import hashlib
import itertools
import math
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from nvalchemiops.kernels.lattice import dual_vectors
from nvalchemiops.torch import checks
from nvalchemiops.torch.distributed.collectives import number_of, replicated, sum_of_shares, sum_on_all_ranks
from nvalchemiops.torch.distributed.exchange import Exchange
from nvalchemiops.torch.distributed.failures import together
from nvalchemiops.torch.neighbors.rows import NO_PADDING, GivenNeighbors, Rows
from nvalchemiops.torch.neighbors.search import Search, neighbor_pairs
from nvalchemiops.torch.operators.segments import row_pointers
from nvalchemiops.torch.systems import System

BINS = 4096
"""Bins of the histograms of coordinates along an axis, by which bricks get equal numbers of atoms."""

SLACK = 1e-9
"""Ghosts lie within the cutoff of a brick, and this much more in fractional coordinates, for rounding."""


class _Images(NamedTuple):
    """Images of atoms around a brick, along the axes that are divided.

    Attributes
    ----------
    atoms : (n,) int64 tensor
        Numbers among owned atoms and ghosts.
    shifts : (n, 3) int32 tensor
    """

    atoms: torch.Tensor
    shifts: torch.Tensor


class Domain:
    """Atoms of one system or of a batch, divided among the ranks of a group. Making one is a collective call.

    Parameters
    ----------
    positions : (n, 3) tensor, float32 or float64, length
        Those that this rank holds, in any division among the ranks; one rank may hold all. The numbers of the atoms are
        their places if the tensors of all ranks follow each other.
    cell : (3, 3) or (n_systems, 3, 3) tensor, length, optional
        The same on all ranks, as are all arguments below but ``batch_idx``.
    pbc : (3,) or (n_systems, 3) bool tensor, optional
        Periodicity; True along all axes by default, if there is a cell.
    batch_idx : (n,) int tensor, optional
        System of each atom, in any order.
    cutoff : float, length
        The largest cutoff of the sums over neighbors.
    skin : float, length, optional
        The domain is valid as long as no atom has moved by more than half of it.
    num_systems : int, optional
        Taken from the cell by default, without one from the largest entry of ``batch_idx``.
    group : torch.distributed.ProcessGroup, optional
        The ranks; all by default.
    grid : (int, int, int), optional
        Bricks along each axis; by default those with the fewest ghosts.

    Attributes
    ----------
    n_owned, n_ghosts : int
        Atoms that this rank owns, and others that it sees.
    global_index : (n_owned,) int64 tensor
        Their numbers, which ascend.
    batch_idx : (n_owned,) int32 tensor or None
        System of each owned atom.
    n_systems : int
    grid : (int, int, int)
        Bricks along each axis.

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message, on the rank that has it; others raise `OtherRankError`.
    """

    def __init__(
        self,
        positions: torch.Tensor,
        cell: torch.Tensor | None = None,
        pbc: torch.Tensor | None = None,
        batch_idx: torch.Tensor | None = None,
        *,
        cutoff: float,
        skin: float = 0.0,
        num_systems: int | None = None,
        group: Any = None,
        grid: tuple[int, int, int] | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError("a Domain needs torch.distributed: start ranks by torchrun, and call init_process_group")
        self.group = dist.group.WORLD if group is None else group
        self.rank, self.n_ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.number = number_of(self.group)
        self.device = positions.device if isinstance(positions, torch.Tensor) else torch.device("cpu")
        with self.together():
            checks.check_positions(positions)
            self.cutoff = checks.check_positive("cutoff", cutoff)
            self.skin = float(skin)
            if not 0.0 <= self.skin < math.inf:
                raise ValueError(f"`skin` must not be negative, got {skin}")
            cell, pbc, n_systems = checks.check_systems(positions, cell, pbc, batch_idx, None)
            lattice = None if cell is None else cell.detach().double().cpu().reshape(-1, 3, 3).numpy()
            found = 1 if batch_idx is None else int(batch_idx.max()) + 1 if batch_idx.numel() else 0
            if batch_idx is not None and batch_idx.numel() and int(batch_idx.min()) < 0:
                raise ValueError("`batch_idx` must hold numbers from 0 on")
        self.n_systems = self._agree_on_systems(n_systems, num_systems, found, batch_idx is not None)
        self.reach = self.cutoff + self.skin
        self._given_grid = None if grid is None else tuple(int(n) for n in grid)
        with self.together():
            if self._given_grid is not None and math.prod(self._given_grid) != self.n_ranks:
                raise ValueError(f"`grid` = {grid} must be for as many bricks as there are ranks, {self.n_ranks}")
            if found > self.n_systems:
                raise ValueError(f"`batch_idx` must hold numbers in 0 .. {self.n_systems - 1}, got {found - 1}")
            self._pbc = np.zeros((self.n_systems, 3), dtype=bool)
            if lattice is not None:
                self._pbc[:] = True if pbc is None else pbc.cpu().numpy()
                lattice = np.broadcast_to(lattice, (self.n_systems, 3, 3))
            self._frame = _completed(lattice, self._pbc)
        self._check_same(lattice)
        self.pbc = torch.as_tensor(self._pbc, device=self.device)
        self.cell = None if lattice is None else torch.tensor(lattice, device=self.device)
        here = None if batch_idx is None else batch_idx.detach().to(torch.int32)
        self._divide(positions.detach(), here)

    # -- making it --------------------------------------------------------------------------------

    def together(self) -> Any:
        """As `nvalchemiops.torch.distributed.failures.together`, for the ranks of this domain."""
        return together(self.group, self.device)

    def _agree_on_systems(self, by_shapes: int | None, given: int | None, found: int, several: bool) -> int:
        """The number of systems, from the cell, the caller or the numbers on all ranks."""
        counts = torch.tensor([by_shapes or 0, given or 0, found, int(several)], device=self.device)
        dist.all_reduce(counts, op=dist.ReduceOp.MAX, group=self.group)
        of_shapes, of_caller, of_atoms, is_batch = counts.tolist()
        self.is_batch = bool(is_batch)
        if of_caller:
            return of_caller
        return of_shapes if of_shapes > 1 or not is_batch else max(of_shapes, of_atoms)

    def _check_same(self, lattice: np.ndarray | None) -> None:
        """Raise unless all ranks have the same cell, periodicity and distances."""
        parts = [b"" if lattice is None else lattice.tobytes(), self._pbc.tobytes(), repr((self.cutoff, self.skin)).encode()]
        digest = hashlib.sha256(b"|".join(parts)).hexdigest()
        told: list[Any] = [None] * self.n_ranks
        dist.all_gather_object(told, digest, group=self.group)
        if len(set(told)) > 1:
            rank = next(r for r, text in enumerate(told) if text != told[0])
            raise ValueError(f"`cell`, `pbc`, `cutoff` or `skin` of rank {rank} are not those of rank 0")

    def _divide(self, positions: torch.Tensor, batch_idx: torch.Tensor | None) -> None:
        numbers = self._numbers(positions.shape[0])
        coordinates = self._fractional(positions, batch_idx)
        self.grid, self._cuts = self._bricks(coordinates, batch_idx)
        self._is_divided = np.array(self.grid) > 1
        wrapped, _ = self._wrapped(coordinates, batch_idx)
        brick = torch.zeros(positions.shape[0], dtype=torch.int64, device=self.device)
        for axis, count in enumerate(self.grid):
            edges = self._of_atoms(self._cuts[axis][:, 1:-1], batch_idx, positions.shape[0])
            brick = brick * count + (wrapped[:, axis : axis + 1] >= edges).sum(1)
        # to the owners: rows for rank 0 first, in the order in which they are held
        owner, order = torch.sort(brick, stable=True)
        counts = torch.bincount(owner, minlength=self.n_ranks).tolist()
        self._n_held = positions.shape[0]
        self._to_owners = Exchange.plan(self.group, order.split(counts))
        self.n_owned = self._to_owners.n_received
        self.global_index = self.distribute(numbers)
        self.batch_idx = self.distribute(batch_idx) if self.is_batch and batch_idx is not None else None
        self._reference = self.distribute(positions)
        self._find_ghosts()

    def _numbers(self, n_atoms: int) -> torch.Tensor:
        """Numbers of the atoms that this rank holds, among those of all ranks."""
        counts = torch.zeros(self.n_ranks, dtype=torch.int64, device=self.device)
        counts[self.rank] = n_atoms
        dist.all_reduce(counts, group=self.group)
        self.n_atoms = int(counts.sum())
        first = int(counts[: self.rank].sum())
        return torch.arange(first, first + n_atoms, device=self.device)

    def _of_atoms(self, values: np.ndarray, batch_idx: torch.Tensor | None, n_atoms: int) -> torch.Tensor:
        """For each atom the value of its system."""
        of_systems = torch.as_tensor(np.ascontiguousarray(values), device=self.device)
        if batch_idx is None:
            return of_systems[:1].expand(n_atoms, *of_systems.shape[1:])
        return of_systems.index_select(0, batch_idx)

    def _fractional(self, positions: torch.Tensor, batch_idx: torch.Tensor | None) -> torch.Tensor:
        """Coordinates (n, 3) along the lattice vectors, along open axes in lengths."""
        inverse = self._of_atoms(np.linalg.inv(self._frame), batch_idx, positions.shape[0])
        return (positions.double().unsqueeze(-1) * inverse).sum(-2)

    def _wrapped(self, coordinates: torch.Tensor, batch_idx: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Coordinates in the cell along axes that are periodic and divided; and the cells (n, 3) that were left."""
        wraps = self._of_atoms(self._pbc & self._is_divided, batch_idx, coordinates.shape[0])
        cells = torch.where(wraps, coordinates.floor(), 0.0)
        return coordinates - cells, cells

    def _bricks(
        self, coordinates: torch.Tensor, batch_idx: torch.Tensor | None
    ) -> tuple[tuple[int, int, int], list[np.ndarray]]:
        """The grid of bricks; and for each axis the edges (n_systems, n_bricks + 1) in coordinates."""
        n_atoms, device = coordinates.shape[0], self.device
        system = torch.zeros(n_atoms, dtype=torch.int64, device=device) if batch_idx is None else batch_idx.long()
        periodic = self._of_atoms(self._pbc, batch_idx, n_atoms)
        inside = torch.where(periodic, coordinates - coordinates.floor(), coordinates)
        low = torch.full((self.n_systems, 3), torch.inf, dtype=torch.float64, device=device)
        high = -low
        index = system.unsqueeze(1).expand(-1, 3)
        low.scatter_reduce_(0, index, inside, "amin")
        high.scatter_reduce_(0, index, inside, "amax")
        ends = torch.cat([-low, high])
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self.group)
        first, last = -ends[: self.n_systems].cpu().numpy(), ends[self.n_systems :].cpu().numpy()
        empty = first > last
        first = np.where(self._pbc | empty, 0.0, first)
        length = np.where(self._pbc | empty, 1.0, np.maximum(last - first, 1e-6))
        place = (inside - self._of_atoms(first, batch_idx, n_atoms)) / self._of_atoms(length, batch_idx, n_atoms)
        bin_of = (place * BINS).long().clamp_(0, BINS - 1)
        counts = torch.stack(
            [torch.bincount(system * BINS + bin_of[:, a], minlength=self.n_systems * BINS) for a in range(3)]
        )
        dist.all_reduce(counts, group=self.group)
        below = counts.reshape(3, self.n_systems, BINS).cumsum(2).cpu().numpy()

        heights = 1.0 / np.linalg.norm(np.linalg.inv(self._frame), axis=1)
        reach = self.reach / (heights * length)
        self.atoms_in_systems = torch.as_tensor(below[0, :, -1].astype(np.float64), device=device)
        weights = below[0, :, -1] / max(below[0, :, -1].sum(), 1)
        grids = _grids(self.n_ranks) if self._given_grid is None else [self._given_grid]
        grid = min(grids, key=lambda grid: _ghost_volume(grid, (weights[:, None] * reach).sum(0)))
        cuts = []
        for axis, count in enumerate(grid):
            # as many atoms in each brick, whatever their density
            wanted = below[axis, :, -1:] * np.arange(1, count) / count
            at = (below[axis, :, :, None] < wanted[:, None]).sum(1) + 1
            inner = first[:, axis, None] + length[:, axis, None] * np.minimum(at, BINS) / BINS
            outside = np.where(self._pbc[:, axis, None], [[0.0, 1.0]], [[-np.inf, np.inf]])
            cuts.append(np.concatenate([outside[:, :1], inner, outside[:, 1:]], 1))
        return grid, cuts

    def _find_ghosts(self) -> None:
        """Which owned atoms other ranks see, and in which images."""
        x, batch_idx, n = self._reference, self.batch_idx, self.n_owned
        wrapped, cells = self._wrapped(self._fractional(x, batch_idx), batch_idx)
        heights = 1.0 / np.linalg.norm(np.linalg.inv(self._frame), axis=1)
        reach = self.reach / heights
        of_axis = []
        for axis, count in enumerate(self.grid):
            if count == 1:
                of_axis.append([(0, 0, None)])  # images along this axis are left to the search
                continue
            most = int(np.floor(np.where(self._pbc[:, axis], reach[:, axis], -1.0).max())) + 1
            low = self._of_atoms(self._cuts[axis][:, :-1] - reach[:, axis, None] - SLACK, batch_idx, n)
            high = self._of_atoms(self._cuts[axis][:, 1:] + reach[:, axis, None] + SLACK, batch_idx, n)
            periodic = self._of_atoms(self._pbc[:, axis], batch_idx, n)
            of_axis.append(
                [
                    (brick, image, (place >= low[:, brick]) & (place <= high[:, brick]) & (periodic | (image == 0)))
                    for image in range(-most, most + 1)
                    for place in (wrapped[:, axis] + image,)
                    for brick in range(count)
                ]
            )
        seen: list[list[tuple[torch.Tensor, tuple[int, int, int]]]] = [[] for _ in range(self.n_ranks)]
        for parts in itertools.product(*of_axis):
            brick = 0
            for (number, _, _), count in zip(parts, self.grid):
                brick = brick * count + number
            image = tuple(part[1] for part in parts)
            if brick == self.rank and image == (0, 0, 0):
                continue
            near = torch.ones(n, dtype=torch.bool, device=self.device)
            for _, _, condition in parts:
                near = near if condition is None else near & condition
            atoms = near.nonzero().squeeze(1)
            if atoms.numel():
                seen[brick].append((atoms, image))

        # each atom goes to a rank once; its images are made there
        rows, places, shifts = [], [], []
        none = torch.zeros(0, dtype=torch.int64, device=self.device)
        for brick in range(self.n_ranks):
            atoms = torch.cat([atoms for atoms, _ in seen[brick]]) if seen[brick] else none
            image = [torch.tensor(image, device=self.device).expand(len(a), 3) for a, image in seen[brick]]
            unique, place = torch.unique(atoms, return_inverse=True)
            if brick == self.rank:  # images of the atoms of this rank
                own = _Images(atoms, torch.cat(image).int() if image else none.int().reshape(0, 1).expand(0, 3))
                unique = place = none
                image = []
            rows.append(unique)
            places.append(place)
            shifts.append(torch.cat(image) if image else none.reshape(0, 1).expand(0, 3))
        self._halo = Exchange.plan(self.group, rows)
        self.n_ghosts = self._halo.n_received
        counts = [len(p) for p in places]
        ends = list(itertools.accumulate(counts, initial=0))
        sent = Exchange.plan(self.group, [torch.arange(a, b, device=self.device) for a, b in itertools.pairwise(ends)])
        told = sent.apply(torch.cat([torch.cat(places).unsqueeze(1), torch.cat(shifts)], 1))
        first = [self.n_owned + begin for begin in itertools.accumulate(self._halo.receive[:-1], initial=0)]
        begin = torch.tensor(first, device=self.device).repeat_interleave(torch.tensor(sent.receive, device=self.device))
        self._images = _Images(torch.cat([own.atoms, begin + told[:, 0]]), torch.cat([own.shifts, told[:, 1:].int()]))
        self._cells = self.with_ghosts(cells)
        self.batch_idx_with_ghosts = None if batch_idx is None else self.with_ghosts(batch_idx)
        self._rows: dict[float, Rows] = {}
        self.kept: dict[Any, Any] = {}

    # -- bricks -----------------------------------------------------------------------------------

    def brick_of(self, rank: int) -> list[tuple[float, float]]:
        """Where atoms of a rank may be along each axis in fractional coordinates, in any system, until they move on."""
        heights = 1.0 / np.linalg.norm(np.linalg.inv(self._frame), axis=1)
        bounds = []
        for axis, number in enumerate(np.unravel_index(rank, self.grid)):
            spread = 0.5 * self.skin / heights[:, axis]
            low, high = self._cuts[axis][:, number] - spread, self._cuts[axis][:, number + 1] + spread
            bounds.append((float(low.min()), float(high.max())))
        return bounds

    def cells_left(self) -> torch.Tensor:
        """Whole cells (n_owned, 3) to take off the fractional coordinates of owned atoms to be in their brick."""
        return self._cells[: self.n_owned]

    # -- values of atoms --------------------------------------------------------------------------

    def distribute(self, values: torch.Tensor) -> torch.Tensor:
        """Values (n_owned, ...) of the atoms that this rank owns, from those (n, ...) of the atoms that it holds."""
        return self._to_owners.apply(values)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Values (n, ...) of the atoms that this rank holds, from those (n_owned, ...) of the atoms that it owns."""
        return self._to_owners.transpose(values, self._n_held)

    def with_ghosts(self, values: torch.Tensor) -> torch.Tensor:
        """Values (n_owned + n_ghosts, ...) of owned atoms, then of ghosts, from those of owned atoms."""
        return torch.cat([values, self._halo.apply(values)])

    def all_with_ghosts(self, *columns: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Several times `with_ghosts` in one message, for matrices and vectors of one dtype, or None."""
        there = [c for c in columns if c is not None]
        wide = self.with_ghosts(torch.cat([c.reshape(self.n_owned, -1) for c in there], 1))
        parts = iter(wide.split([c[0].numel() if c.ndim > 1 else 1 for c in there], 1))
        return tuple(None if c is None else next(parts).reshape(-1, *c.shape[1:]) for c in columns)

    def add_ghosts(self, values: torch.Tensor) -> torch.Tensor:
        """Values (n_owned, ...) to which those that other ranks have for their ghosts are added."""
        owned, ghosts = values.split([self.n_owned, self.n_ghosts])
        return owned + self._halo.transpose(ghosts, self.n_owned)

    def sum(self, shares: torch.Tensor) -> torch.Tensor:
        """The sum over ranks as a replicated result, such as the energy of which each rank has a share."""
        return sum_of_shares(shares, self.number)

    def sum_for_shares(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over ranks as an intermediate value, from which each rank computes its own share of a result."""
        return sum_on_all_ranks(values, self.number)

    def replicated(self, values: torch.Tensor) -> torch.Tensor:
        """A tensor that is the same on all ranks, and whose gradient is complete on each.

        For parameters of a model that each rank applies to its own atoms.
        """
        return replicated(values, self.number)

    def pairs_here(self, pairs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Pairs (2, n) of numbers among owned atoms and ghosts, of those with an owned atom; and which these are.

        Parameters
        ----------
        pairs : (2, n_pairs) int tensor
            Numbers among the atoms of all ranks.
        """
        known, place = torch.sort(self.with_ghosts(self.global_index))
        at = torch.searchsorted(known, pairs.long()).clamp_(max=max(len(known) - 1, 0))
        here = known[at] == pairs if len(known) else torch.zeros_like(pairs, dtype=torch.bool)
        found = place[at] if len(known) else pairs
        owned = here & (found < self.n_owned)
        chosen = (here.all(0) & owned.any(0)).nonzero().squeeze(1)
        return found.index_select(1, chosen), chosen

    # -- neighbors --------------------------------------------------------------------------------

    def check(self, atoms: System) -> None:
        """Raise unless these are the atoms that this rank owns, in the cells of this domain."""
        checks.check_positions(atoms.positions, finite=False)
        if atoms.positions.shape[0] != self.n_owned:
            raise ValueError(
                f"`positions` must be those of the atoms that this rank owns, ({self.n_owned}, 3), got "
                f"{tuple(atoms.positions.shape)}: distribute them by the domain"
            )
        if atoms.batch_idx is not None:
            raise ValueError("`batch_idx` belongs to the `domain`: leave it out")
        lattice = None if atoms.cell is None else atoms.cell.detach().double().reshape(-1, 3, 3)
        if (lattice is None) != (self.cell is None):
            raise ValueError("`cell` must be that of the `domain`")
        if lattice is not None and self.cell is not None and not torch.equal(lattice.expand_as(self.cell), self.cell):
            raise ValueError("`cell` has changed since the `domain` was made: make it anew")

    def alone(self, atoms: System) -> System:
        """The atoms as a system that knows nothing of other ranks, for a sum that is periodic along all axes."""
        if not self._pbc.all():
            raise ValueError(
                "`domain` has open axes, but this sum is periodic along all three: make it without `pbc`; for a slab "
                "give `pbc` to the sum"
            )
        return atoms._replace(batch_idx=self.batch_idx, domain=None)

    def splitting(self, alpha: Any, cutoff: float | None, neighbors: GivenNeighbors) -> tuple[Any, float]:
        """Alpha, a tensor of which has complete gradients, and the cutoff of an Ewald sum."""
        with self.together():
            if neighbors.neighbor_list is not None or neighbors.neighbor_matrix is not None:
                raise ValueError("`neighbor_list` or `neighbor_matrix`: a `domain` has its own neighbors")
        alpha = self.replicated(alpha) if isinstance(alpha, torch.Tensor) else alpha
        return alpha, self.cutoff if cutoff is None else cutoff

    def agreed(self, weights: torch.Tensor | None, batch_idx: torch.Tensor | None) -> torch.Tensor | None:
        """Weights (n_systems,) of the atoms of this rank, if they are the same on all; otherwise None."""
        n, n_systems = self.n_owned, self.n_systems
        found = torch.full((2, n_systems), -torch.inf, dtype=torch.float64, device=self.device)
        if weights is None and n:
            found.fill_(torch.inf)
        elif weights is not None:
            here = slice(None) if batch_idx is None else torch.unique(batch_idx.long())
            found[0, here], found[1, here] = weights[here], -weights[here]
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.group)
        highest, lowest = found[0], -found[1]
        empty = highest == -torch.inf
        if not bool((empty | (highest == lowest)).all()):
            return None
        return torch.where(empty, 0.0, highest)

    def displacement(self, positions: torch.Tensor) -> float:
        """The largest displacement of an atom on any rank since the domain was made. A collective call."""
        moved = (positions.detach() - self._reference).double().square().sum(1).nan_to_num(nan=torch.inf)
        most = moved.amax() if moved.numel() else moved.new_zeros(())
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group)
        return math.sqrt(float(most))

    def neighbors(self, positions: torch.Tensor, cutoff: float) -> Rows:
        """Neighbors of owned atoms among all, and of ghosts among owned atoms, as far as ``cutoff`` and the skin.

        A collective call. Pairs of ghosts are left out. The list is that of the positions with which the domain was
        made, and is kept.

        Raises
        ------
        ValueError
            Atoms have moved by more than half of the skin, or the cutoff is longer than that of the domain.
        """
        moved = self.displacement(positions)
        if cutoff > self.cutoff:
            raise ValueError(f"`cutoff` = {cutoff} is beyond that of the `domain`, {self.cutoff}")
        if not 2.0 * moved <= self.skin:
            raise ValueError(
                f"atoms have moved by {moved:g}, more than half of the skin of the `domain`, {self.skin}: make it anew"
            )
        if cutoff not in self._rows:
            self._rows[cutoff] = self._search(cutoff + self.skin)
        return self._rows[cutoff]

    def _search(self, cutoff: float) -> Rows:
        n, batch_idx, cell = self.n_owned, self.batch_idx_with_ghosts, self.cell
        everywhere = self.with_ghosts(self._reference)
        atoms = torch.cat([torch.arange(n, device=self.device), self._images.atoms])
        shifts = torch.cat([self._images.shifts.new_zeros((n, 3)), self._images.shifts])
        of_image = -self._cells.index_select(0, atoms) + shifts
        placed = everywhere.double().index_select(0, atoms)
        system = None if batch_idx is None else batch_idx.index_select(0, atoms)
        pbc = None
        if cell is not None:
            of_atom = cell[:1] if system is None else cell.index_select(0, system)
            placed = placed + (of_image.unsqueeze(-1) * of_atom).sum(-2)
            pbc = torch.as_tensor(self._pbc & ~self._is_divided, device=self.device)
        order = back = None
        targets = torch.arange(n, device=self.device, dtype=torch.int32)
        if system is not None:
            system, order = torch.sort(system, stable=True)
            placed = placed.index_select(0, order)
            back = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=self.device))
            targets = back[:n].int()
        with self.together():
            search = Search(placed, cutoff, cell, pbc, system, None, targets)
            pairs, pointers, found = neighbor_pairs(*search)
        second = pairs[1].long() if order is None else order.index_select(0, pairs[1].long())
        first = torch.repeat_interleave(pointers.diff(), output_size=second.shape[0])
        neighbors = atoms.index_select(0, second)
        if cell is not None:
            # between atoms as they are, not between their images
            found = found + (of_image.index_select(0, second) - of_image.index_select(0, first)).int()
        # the same pairs from the side of the ghosts
        border = (neighbors >= n).nonzero().squeeze(1)
        ghosts, place = torch.sort(neighbors.index_select(0, border), stable=True)
        border = border.index_select(0, place)
        of_ghosts = row_pointers(ghosts - n, self.n_ghosts)
        rows = torch.cat([neighbors, first.index_select(0, border)]).int()
        if cell is not None:
            found = torch.cat([found, -found.index_select(0, border)])
        pointers = torch.cat([pointers, of_ghosts[1:] + pointers[-1]])
        return Rows(pointers, rows, found if cell is not None else None, 0, NO_PADDING, None)


def _completed(lattice: np.ndarray | None, pbc: np.ndarray) -> np.ndarray:
    """Cells (n_systems, 3, 3) with unit vectors along open axes, at right angles to all others."""
    frame = np.tile(np.eye(3), (len(pbc), 1, 1))
    if lattice is None:
        return frame
    dual_vectors(lattice, pbc)  # raises for what is no lattice
    for system, periodic in enumerate(pbc):
        vectors = lattice[system][periodic]
        others = np.linalg.svd(vectors)[2][len(vectors) :] if len(vectors) else np.eye(3)
        frame[system][periodic] = vectors
        frame[system][~periodic] = others
    return frame


def _grids(n_ranks: int) -> list[tuple[int, int, int]]:
    """All grids of this many bricks, those that divide the first axes before others."""
    sizes = [n for n in range(n_ranks, 0, -1) if n_ranks % n == 0]
    return [(a, b, n_ranks // (a * b)) for a in sizes for b in sizes if n_ranks % (a * b) == 0]


def _ghost_volume(grid: tuple[int, int, int], reach: np.ndarray) -> float:
    """The volume that a rank sees, for a cutoff in fractional coordinates; of equal ones the first grid is taken."""
    return round(math.prod(1.0 / count + (2.0 * r if count > 1 else 0.0) for count, r in zip(grid, reach)), 6)
