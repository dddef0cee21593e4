"""The division of a system among ranks: the atoms that a rank owns, and its ghosts.

The cells are cut into bricks of equal work, one for each rank. A rank owns the atoms in its brick, of all systems. Its
*ghosts* are the atoms of other ranks that have an image closer to the brick than cutoff + skin. Atoms keep their owner
until a new domain is made. A cell that changes strains bricks and neighbor lists, which takes a part of the skin, as
for a `VerletList`.

Source of the method: S. Plimpton, J. Comput. Phys. 117, 1 (1995), doi:10.1006/jcph.1995.1039.
"""

import copy
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from nvalchemiops.torch import checks
from nvalchemiops.torch.distributed.agreement import Agreement, described, of_atoms
from nvalchemiops.torch.distributed.bricks import (
    ONE,
    Bricks,
    Frames,
    Shape,
    check_cuts,
    check_grid,
    check_weights,
    closed,
    make_bricks,
    shape_of,
    sums_of_work,
)
from nvalchemiops.torch.distributed.collectives import refuse_slices
from nvalchemiops.torch.distributed.communication import add, maximum, messages_of
from nvalchemiops.torch.distributed.exchange import Exchange, carried, inverse
from nvalchemiops.torch.distributed.faults import as_call, in_call
from nvalchemiops.torch.distributed.ledger import Ledger, interval_of
from nvalchemiops.torch.distributed.movement import Reference
from nvalchemiops.torch.distributed.neighbors import OwnedRows
from nvalchemiops.torch.distributed.owners import Owners
from nvalchemiops.torch.distributed.pairs import OwnedPairs, owned_pairs
from nvalchemiops.torch.neighbors.rows import Rows
from nvalchemiops.torch.neighbors.search import Search
from nvalchemiops.torch.runtime._torch_internals import outside_of_transforms
from nvalchemiops.torch.runtime.acts import decided, never_change, unrecorded
from nvalchemiops.torch.runtime.context import is_mapped
from nvalchemiops.torch.systems import PER_ATOM, System
from nvalchemiops.torch.types import Pbc

OF_ATOM = 40.0
"""The work of an atom without neighbors, in neighbors: its spline takes about as long as that many pairs, a half of the
time of the mesh (`electrostatics/costs.py`)."""

KEPT = 1.1
"""Cuts are kept by `Domain.follow` while the rank with the most work has at most this times what it had before."""


class Domain(Owners):
    """Atoms of one system or of a batch, divided among the ranks of a group. Making one is a collective call.

    Parameters
    ----------
    positions : (n, 3) tensor, float32 or float64, length
        Positions of the atoms that this rank holds. They may be divided among the ranks in any way; one rank may hold
        all atoms. Atoms are numbered in the order of the concatenated tensors of all ranks.
    cell : (3, 3) or (n_systems, 3, 3) tensor, length, optional
        It must be the same on all ranks, and so must all arguments below except ``batch_idx``.
    pbc : (3,) or (n_systems, 3) bool tensor, optional
        Periodicity; True along all axes by default, if there is a cell.
    batch_idx : (n,) int tensor, optional
        System of each atom, in any order.
    cutoff : float, length
        The largest cutoff of the sums over neighbors.
    skin : float, length, optional
        The domain is valid as long as no atom has moved by more than half of the skin, beyond the motion of its cell.
        A cell with the strain E takes ``(cutoff + skin) |E|`` of the skin.
    num_systems : int, optional
        By default the number of cells, or without a batch of cells, one more than the largest entry of ``batch_idx``.
    group : torch.distributed.ProcessGroup, optional
        The ranks. All by default.
    grid : (int, int, int), optional
        Bricks along each axis: slices of equal work along the first axis, each cut on its own along the second, and so
        on. By default each part is cut in two along the axis with the fewest ghosts, but along the third axis only if
        that saves one ghost for each atom: meshes are not cut along it.
    weights : (n,) tensor, optional
        The work that each atom makes, in any unit: positive numbers. Either all ranks give it, or none. By default all
        atoms make the same work, and after that, in domains made by `follow`, as much as their neighbors say.
    cuts : Bricks, optional
        Attribute ``bricks`` of an earlier domain of these ranks, whose cuts are kept while the work is balanced.
    check : {"each", "later", "never"} or int, default="each"
        When ranks compare arguments, and the host learns whether atoms have moved too far: in each call before it goes
        on; "later", in the next call (or every so many calls), so that the host does not wait; or "never" but in
        `settle` and `follow`. A mistake then is an error of a later call, or of `settle`, which names the call that was
        wrong.

    Attributes
    ----------
    n_owned, n_ghosts : int
        Numbers of atoms that this rank owns, and of its ghosts.
    global_index : (n_owned,) int64 tensor
        Numbers of the owned atoms. Atoms are sorted by place, so that neighbors are close together in memory.
    batch_idx : (n_owned,) int32 tensor or None
        System of each owned atom.
    n_systems : int
    weights : (n_owned,) float64 tensor or None
        The work of each owned atom, relative to the largest.
    bricks : Bricks
        The part of space of each rank.

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message, on the rank that has it. Other ranks raise `OtherRankError`.
    """

    @as_call
    def __init__(
        self,
        positions: torch.Tensor,
        cell: torch.Tensor | None = None,
        pbc: Pbc | None = None,
        batch_idx: torch.Tensor | None = None,
        *,
        cutoff: float,
        skin: float = 0.0,
        num_systems: int | None = None,
        group: Any = None,
        grid: tuple[int, int, int] | None = None,
        weights: torch.Tensor | None = None,
        cuts: Bricks | None = None,
        check: Literal["each", "later", "never"] | int = "each",
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError("a Domain needs torch.distributed: start ranks by torchrun, and call init_process_group")
        device = positions.device if isinstance(positions, torch.Tensor) else torch.device("cpu")
        super().__init__(dist.group.WORLD if group is None else group, device)
        self._options: dict[str, Any] = {"cutoff": cutoff, "skin": skin, "group": group, "grid": grid, "check": check}
        for name, value in (("cell", cell), ("pbc", pbc)):
            self._options[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value
        with Agreement(self.group, self.device) as agreement:
            checks.check_positions(positions)
            self.cutoff = checks.check_positive("cutoff", cutoff)
            self.skin = float(skin)
            if not 0.0 <= self.skin < math.inf:
                raise ValueError(f"`skin` must be non-negative, got {skin}")
            cell, pbc, n_systems = checks.check_systems(positions, cell, pbc, batch_idx, None)
            lattice = None if cell is None else cell.detach().double().cpu().reshape(-1, 3, 3).numpy()
            found = 1 if batch_idx is None else int(batch_idx.max()) + 1 if batch_idx.numel() else 0
            if batch_idx is not None and batch_idx.numel() and int(batch_idx.min()) < 0:
                raise ValueError("`batch_idx` must hold non-negative numbers")
            num_systems = None if num_systems is None else checks.check_count("num_systems", num_systems)
            agreement.must_be_same(num_systems=num_systems, weights=weights is None, cuts=cuts is None, check=check)
            every = interval_of(check)
            # shapes that do not tell are those of one system or more
            of_shapes = 1 if n_systems is None else n_systems
            agreement.largest = [of_shapes, num_systems or 0, found, batch_idx is not None]
        of_shapes, of_caller, of_numbers = map(int, agreement.largest[:3])
        self.is_batch = bool(agreement.largest[3])
        by_numbers = self.is_batch and of_shapes <= 1
        self.n_systems = of_caller or (max(of_shapes, of_numbers) if by_numbers else of_shapes)
        self.reach = self.cutoff + self.skin
        self._options["num_systems"] = self.n_systems if self.is_batch else None
        with Agreement(self.group, self.device) as agreement:
            grid = check_grid(grid, self.n_ranks)
            agreement.largest[0] = check_weights(weights, positions)
            if self.is_batch and batch_idx is None and len(positions):
                raise ValueError("`batch_idx` is needed for these atoms: another rank has given it")
            several = 1 if lattice is None else len(lattice)
            if several not in (1, self.n_systems) or (self.n_systems > 1 and not self.is_batch):
                raise ValueError(
                    f"`num_systems` = {num_systems} does not fit: {several} cells, and "
                    f"{'a' if self.is_batch else 'no'} `batch_idx`"
                )
            if found > self.n_systems:
                raise ValueError(f"`batch_idx` must hold numbers in 0 .. {self.n_systems - 1}, got {found - 1}")
            periodic = np.zeros((self.n_systems, 3), dtype=bool)
            if lattice is not None:
                periodic[:] = True if pbc is None else pbc.cpu().numpy()
                lattice = np.broadcast_to(lattice, (self.n_systems, 3, 3))
            self._axes, self._frames = periodic, Frames.of(lattice, closed(lattice, periodic))
            agreement.must_be_same(cell=lattice, pbc=periodic, cutoff=self.cutoff, skin=self.skin)
            agreement.must_be_same(grid=grid, positions=positions.dtype)
            check_cuts(cuts, self.n_ranks)
            if cuts is not None:
                agreement.must_be_same(cuts=(cuts.axis, cuts.cut))
        here = None
        if self.is_batch:  # a rank without atoms may have left `batch_idx` out
            here = torch.zeros(len(positions), device=self.device) if batch_idx is None else batch_idx.detach()
            here = here.to(self.device, torch.int32)
        # tensors made in inference mode could not be used outside of it later
        with torch.inference_mode(False):
            self.pbc, self._is_periodic = torch.as_tensor(periodic, device=self.device), bool(periodic.all())
            self.cell = None if lattice is None else torch.tensor(lattice, device=self.device)
            work = None
            if weights is not None:  # integers, whose sums do not depend on their order
                work = weights.detach().to(self.device).double() * (ONE / agreement.largest[0])
                work.round_().clamp_(min=1.0)
            self._divide(positions.detach(), here, work, shape_of(self.n_ranks, grid), cuts)
        messages_of(self.group).domains += 1
        self._ledger = None if every is None else Ledger(self.group, self.device, self.skin, every)

    # -- making it --------------------------------------------------------------------------------

    def _divide(
        self,
        positions: torch.Tensor,
        batch_idx: torch.Tensor | None,
        work: torch.Tensor | None,
        shape: Shape,
        cuts: Bricks | None,
    ) -> None:
        self._n_held, n_ranks = positions.shape[0], self.n_ranks
        counts = torch.zeros(n_ranks + self.n_systems, dtype=torch.int64, device=self.device)
        counts[self.rank] = self._n_held
        if batch_idx is None:
            counts[n_ranks] = self._n_held
        else:
            counts[n_ranks:] = torch.bincount(batch_idx, minlength=self.n_systems)
        held, of_systems = add(counts, self.group).split([n_ranks, self.n_systems])
        self.n_atoms, self.atoms_in_systems = int(held.sum()), of_systems.double()
        self._first_held = held.cumsum(0) - held
        numbers = torch.arange(self._n_held, device=self.device) + self._first_held[self.rank]
        coordinates = self._frames.coordinates(positions, batch_idx)
        by_neighbors = work is None if cuts is None else cuts.by_neighbors

        def owners(bricks: Bricks) -> torch.Tensor:
            return bricks.ranks_of(bricks.wrapped(coordinates, batch_idx)[0])

        keeps = False
        if cuts is not None:  # they stay if they still balance the work, so that few atoms change ranks
            bricks = cuts._replace(frames=self._frames)
            owner = owners(bricks)
            work_of = torch.ones(len(owner), device=self.device) if work is None else work
            of_ranks = add(sums_of_work(owner, work_of, n_ranks), self.group)
            keeps = float(of_ranks.max()) <= KEPT * cuts.largest * float(of_ranks.mean())
        if not keeps:
            added, largest = (functools.partial(combine, group=self.group) for combine in (add, maximum))
            bricks = make_bricks(self._frames, coordinates, batch_idx, work, self.reach, shape, added, largest)
            owner = owners(bricks)
        self.bricks = bricks._replace(by_neighbors=by_neighbors)
        # to the owners: rows for rank 0 first, in the order in which they are held
        self._to_owners = Exchange.to_ranks(self.group, owner, n_ranks)
        self.n_owned = self._to_owners.n_received
        # all in one message: numbers up to 2^53 are exact
        columns = [positions.double(), *(c.unsqueeze(1) for c in (numbers, batch_idx, work) if c is not None)]
        found = self._to_owners.apply(torch.cat(columns, 1))
        systems = None if batch_idx is None else found[:, 4].int()
        here = self._frames.coordinates(found[:, :3], systems)
        place = self.bricks.order(here, systems, self.reach)
        self._to_owners = self._to_owners.in_order(place)
        found = found.index_select(0, place)
        self.global_index = found[:, 3].long()
        self.batch_idx = None if systems is None else systems.index_select(0, place)
        # whole cells (n_owned, 3) to subtract from the fractional coordinates of owned atoms, so they lie in the brick
        inside, self.cells_left = self.bricks.wrapped(here.index_select(0, place), self.batch_idx)
        self._halo = Exchange.plan(self.group, *self.bricks.seen_by(inside, self.batch_idx, self.reach, self.rank))
        self.n_ghosts = self._halo.n_received
        self.weights = None if work is None else found[:, -1] / ONE
        self._options |= {"weights": self.weights, "cuts": self.bricks}  # for the domains that `follow` makes
        known = self._with_ghosts(found)
        self._known_positions, self._known_numbers = known[:, :3].to(positions.dtype).contiguous(), known[:, 3].long()
        first = self._known_positions[: self.n_owned]
        self._reference = Reference(first, self.cell, self.pbc, self.batch_idx, self.reach)
        self.batch_idx_with_ghosts = None if self.batch_idx is None else known[:, 4].int()
        self._rows: dict[tuple[float, bool], OwnedRows] = {}  # by cutoff, and whether of all axes
        self._to_first: Exchange | None = None  # for `collect`
        self.kept: dict[Any, Any] = {}

    def follow(
        self, positions: torch.Tensor, *values: torch.Tensor, cell: torch.Tensor | None = None
    ) -> tuple[Any, ...]:
        """Return a domain that is valid for these positions, and the positions and values of the atoms owned in it.

        It is a new domain if an atom on any rank has moved by more than half of the skin that the cell leaves. A
        collective call: all ranks make the same choice. Atoms keep their numbers, and `gather` returns values to the
        ranks that held the atoms in the beginning.

        With ``check="each"`` this is found out before the call returns. Otherwise the host reads how far atoms were in
        the `follow` before, and expects them to go on as fast: it divides them early. A domain that atoms have left by
        a jump is returned, too; calls with it are wrong, and the next `follow` or `settle` raises the error of them.

        Parameters
        ----------
        positions : (n_owned, 3) tensor
        *values : (n_owned, ...) tensors
            Other values of the atoms, such as velocities.
        cell : (3, 3) or (n_systems, 3, 3) tensor, optional
            The cell now, by default that with which the domain was made. It must be the same on all ranks.

        Returns
        -------
        domain : Domain
            The same object if no atom has moved that far, and none is expected to.
        positions, *values : tensors
            Positions and values of the atoms that this rank now owns.
        """
        with in_call(self.group):
            new, move = self._followed(positions, values, cell)
            return new, *(move(value) for value in (positions, *values))

    def _followed(
        self, positions: torch.Tensor, values: Sequence[torch.Tensor], cell: torch.Tensor | None
    ) -> tuple["Domain", Callable[[torch.Tensor], torch.Tensor]]:
        """The domain that `follow` returns, and a function that brings values of atoms to their owners in it."""
        with self._barrier(counts=False) as agreement:
            for name, value in (("positions", positions), *((f"values[{k}]", v) for k, v in enumerate(values))):
                if value.shape[:1] != (self.n_owned,):
                    raise ValueError(f"`{name}` must have {self.n_owned} rows, got shape {tuple(value.shape)}")
                agreement.same[f"`{name}`"] = of_atoms(value)
            agreement.note_cell(self._reference, cell)
            if not agreement.is_deferred:
                agreement.note_moved(self._reference, positions, cell)
        if self._ledger is not None and agreement.is_deferred:
            is_far = self._ledger.must_divide(self._reference.moved_on_device(positions, cell))
        else:
            is_far = not 2.0 * agreement.largest[0] <= self.skin
        if not is_far:
            return self, lambda value: value
        self.settle()
        options = self._options if cell is None else {**self._options, "cell": cell.detach().clone()}
        new = Domain(positions, batch_idx=self.batch_idx, **options)
        if self._ledger is not None and new._ledger is not None:
            new._ledger.goes_on(self._ledger)
        move = new._to_owners.apply
        with torch.inference_mode(False):
            new.global_index = move(self.global_index)
            new._known_numbers = new._with_ghosts(new.global_index)
            new._first_held, new._n_held = self._first_held, self._n_held
            new._to_owners = new._from_holders()
        return new, lambda value: carried(move, value)

    def _of_atoms(self, atoms: System, n_systems: int) -> tuple["Domain", Callable[[torch.Tensor], torch.Tensor]]:
        """A domain with the same options of other atoms, those that this rank holds, and how values go to its owners.

        A collective call.
        """
        self.settle()
        same = {name: self._options[name] for name in ("cutoff", "skin", "group", "grid", "check")}
        new = Domain(atoms.positions, atoms.cell, atoms.pbc, atoms.batch_idx, num_systems=n_systems, **same)
        return new, lambda value: carried(new._to_owners.apply, value)

    def _in_units(self, length: float) -> "Domain":
        """The same division for positions in another unit, whose ``length`` is given in the present unit."""
        if ("units", length) not in self.kept:
            other = copy.copy(self)
            with torch.inference_mode(False), outside_of_transforms():
                other.cell = None if self.cell is None else self.cell / length
                other._known_positions = self._known_positions / length
                other._reference = self._reference.in_units(length)
            other.cutoff, other.skin, other.reach = self.cutoff / length, self.skin / length, self.reach / length
            other._frames = self._frames._replace(vectors=self._frames.vectors / length)
            other.bricks = self.bricks._replace(frames=other._frames)
            other._options = {}  # `follow` is never called on it
            other._rows, other.kept, other._agreement = {}, {}, None
            self.kept["units", length] = other
        return self.kept["units", length]

    def _of_lattice(self) -> "Domain":
        """The same division for lattice sums, in which slabs are periodic along their open axis, too.

        From the first such sum on, the vector along this axis counts when atoms are looked at that have moved. That
        suits pairs without images, too: for them, any strain of the other vectors will do (`taken_by_strain`).
        """
        if self._is_periodic or not self._frames.pbc.all():
            return self
        if "lattice" not in self.kept:
            other = copy.copy(self)
            with torch.inference_mode(False), outside_of_transforms(), unrecorded():
                other.pbc = torch.ones_like(self.pbc)
                first = self._reference.positions
                self._reference = Reference(first, self.cell, other.pbc, self.batch_idx, self.reach)
            other._is_periodic, other._reference, other.kept, other._agreement = True, self._reference, {}, None
            self.kept["lattice"] = other
        return self.kept["lattice"]

    # -- arguments of calls -----------------------------------------------------------------------

    def distribute_pairs(self, pairs: torch.Tensor, factors: torch.Tensor | None = None) -> OwnedPairs:
        """Bring pairs of atoms, such as exclusions, to the ranks that own their atoms. A collective call.

        Parameters
        ----------
        pairs : (2, n) int tensor
            Numbers of the atoms. The pairs may be divided among the ranks in any way, and several ranks may give the
            same pair.
        factors : (n,) tensor, optional
            A value of each pair, on all ranks or on none.

        Returns
        -------
        OwnedPairs
            The pairs with an atom that this rank owns, for the argument ``exclusions`` of calls with this domain.
            ``followed(domain)`` brings them to the owners in a later domain.
        """
        with in_call(self.group):
            return owned_pairs(self, pairs, factors)

    def _union(self, numbers: torch.Tensor, size: int) -> list[int]:
        """The numbers from 0 to ``size - 1`` that occur on any rank. A collective call.

        If ranks compare later, these are the numbers of the first call.
        """
        kept = self.kept if self.is_deferred else {}
        if ("union", size) not in kept:
            with unrecorded():
                there = torch.bincount(numbers.long().clamp(0, size), minlength=size + 1)
                add(there, self.group)
                kept["union", size] = there[:size].nonzero().flatten().tolist()
        return list(kept["union", size])

    # -- neighbors --------------------------------------------------------------------------------

    def _check(self, atoms: System) -> None:
        """Raise unless this rank owns these atoms, in the cells of this domain. Must be called inside `_together`."""
        checks.check_positions(atoms.positions, finite=False)
        if any([isinstance(value, torch.Tensor) and is_mapped(value) for value in (atoms.positions, atoms.cell)]):
            refuse_slices()
        if atoms.positions.shape[0] != self.n_owned:
            raise ValueError(
                f"`positions` must be those of the atoms that this rank owns, ({self.n_owned}, 3), got "
                f"{tuple(atoms.positions.shape)}: distribute them by the domain"
            )
        if atoms.batch_idx is not None:
            raise ValueError("`batch_idx` belongs to the `domain`: leave it out")
        if (atoms.cell is None) != (self.cell is None):
            raise ValueError("`cell` must be given with this `domain`, which was made with one, or neither with one")
        with self._together() as agreement:
            same = agreement.same
            for name in PER_ATOM:
                same[f"`{name}`"] = of_atoms(getattr(atoms, name))
            same["`pbc`"] = described(atoms.pbc)
            agreement.note_cell(self._reference, atoms.cell)

    def _alone(self, atoms: System) -> System:
        """The atoms as a system without a domain, for a sum that is periodic along all axes."""
        if not self._is_periodic:
            raise ValueError(
                "`domain` has open axes, but this sum is periodic along all three: make it without `pbc`; for a slab "
                "use a sum that takes `pbc`, and a cell with a volume"
            )
        return atoms._replace(batch_idx=self.batch_idx, domain=None)

    def _agreed(self, weights: torch.Tensor | None, batch_idx: torch.Tensor | None) -> torch.Tensor | None:
        """The weights (n_systems,), if all ranks with atoms of a system have the same weight for it; otherwise None."""
        found = torch.full((2, self.n_systems), -torch.inf, dtype=torch.float64, device=self.device)
        if weights is None and self.n_owned:
            found.fill_(torch.inf)
        elif weights is not None:
            here = slice(None) if batch_idx is None else torch.unique(batch_idx.long())
            ends = torch.stack([weights[here], -weights[here]])
            found[:, here] = ends.where(ends.isfinite(), torch.inf)  # a message may lose NaN
        highest, lowest = maximum(found, self.group) * found.new_tensor([[1.0], [-1.0]])
        empty = highest == -torch.inf
        return torch.where(empty, 0.0, highest) if decided((empty | (highest == lowest)).all()) else None

    def displacement(self, positions: torch.Tensor, cell: torch.Tensor | None = None) -> float:
        """Return the largest displacement of an atom on any rank since the domain was made. A collective call.

        The domain is valid up to half of the skin.

        Parameters
        ----------
        positions : (n_owned, 3) tensor, length
        cell : (3, 3) or (n_systems, 3, 3) tensor, optional
            The cell now, by default that with which the domain was made. With another cell, displacements are those
            beyond the strain, and half of what the strain takes of the skin is added.

        Returns
        -------
        float
            Infinite if a position is NaN.
        """
        with Agreement(self.group, self.device) as agreement:
            agreement.note_moved(self._reference, positions, cell)
        return agreement.largest[0]

    def neighbors(self, positions: torch.Tensor, cutoff: float, cell: torch.Tensor | None = None) -> Rows:
        """Return the neighbors of owned atoms, and the owned neighbors of ghosts, up to ``cutoff`` plus the skin.

        A collective call. Pairs of two ghosts are left out. The list is built from the positions with which the domain
        was made, and is kept for later calls.

        Parameters
        ----------
        positions : (n_owned, 3) tensor, length
        cutoff : float, length
        cell : (3, 3) or (n_systems, 3, 3) tensor, optional
            The cell now, by default that with which the domain was made.

        Returns
        -------
        Rows
            Rows of owned atoms, then of ghosts. Ghosts are numbered after the owned atoms.

        Raises
        ------
        ValueError
            Atoms have moved by more than half of the skin, or the cutoff is longer than the domain's cutoff.
        """
        return self._owned_rows(positions, cutoff, cell).of_both()

    def _owned_rows(self, positions: torch.Tensor, cutoff: float, cell: torch.Tensor | None) -> OwnedRows:
        """The list from which `neighbors` makes its rows. A collective call."""
        with self._together() as agreement:
            agreement.must_be_same(cutoff=cutoff)
            self._must_be_near(positions, cell)
            if cutoff > self.cutoff:
                raise ValueError(f"`cutoff` = {cutoff} is larger than that of the `domain`, {self.cutoff}")
            if (cutoff, self._is_periodic) not in self._rows:
                with torch.inference_mode(False), outside_of_transforms(), unrecorded():
                    self._rows[cutoff, self._is_periodic] = self._search(cutoff + self.skin)
                    self._count_work()
        return self._found_rows(cutoff)

    def _count_work(self) -> None:
        """Let the neighbors of owned atoms be their work when atoms are divided again, unless weights were given."""
        if self.bricks.by_neighbors:
            counts = torch.full((self.n_owned,), OF_ATOM, dtype=torch.float64, device=self.device)
            for rows in self._rows.values():
                counts += rows.counts
            self._options["weights"] = counts

    def _found_rows(self, cutoff: float) -> OwnedRows:
        """The result of `_owned_rows`, which was called before for these positions and this cutoff."""
        found = self._rows[cutoff, self._is_periodic]
        never_change(*found.alone[:3])
        return found

    def _must_be_near(self, positions: torch.Tensor, cell: torch.Tensor | None) -> None:
        """Note how far atoms have moved. At the end of the part in `_together`, all ranks raise if that is too far."""
        with self._together() as agreement:
            agreement.note_moved(self._reference, positions, cell)

    def _search(self, cutoff: float) -> OwnedRows:
        n, system, everywhere = self.n_owned, self.batch_idx_with_ghosts, self._known_positions
        targets = torch.arange(n, device=self.device, dtype=torch.int32)
        order = None
        if system is not None:
            system, order = torch.sort(system, stable=True)
            everywhere = everywhere.index_select(0, order)
            targets = inverse(order)[:n].int()
        search = Search(everywhere, cutoff, self.cell, self.pbc, system, None, targets)
        return OwnedRows(search, order, self._halo.rows)
