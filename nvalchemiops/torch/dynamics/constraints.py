"""Constraints of distances between atoms, solved by Newton's method for each cluster of atoms that they connect.

Unknowns are the multipliers of the constraints of a cluster. Vectors between the atoms of a pair ("bonds") and the
multipliers λ change together, ``s_k = s_k⁰ + Σ_l C_kl λ_l d_l``, where d are the directions along which constraint
forces act and the couplings C are the inverse masses that two pairs share. So a cluster of m pairs is a system of m
equations, and clusters of equal size are one batch. Sums are in float64.

On several ranks the atoms of a cluster may have different owners. The rank that owns the first atom of a cluster solves
its equations: it receives what the others know of its atoms, and sends back by how much they move.
"""

import contextlib
import copy
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from nvalchemiops.torch import checks
from nvalchemiops.torch.distributed.exchange import Exchange
from nvalchemiops.torch.dynamics.state import State
from nvalchemiops.torch.dynamics.sums import Division
from nvalchemiops.torch.interactions.pair.shares import summed, together
from nvalchemiops.torch.neighbors.verlet import inverse_of_periodic
from nvalchemiops.torch.operators.segments import spread_systems, system_sums
from nvalchemiops.torch.runtime.context import may_read, values_of
from nvalchemiops.torch.runtime.recorder import read_number
from nvalchemiops.torch.systems import System

if TYPE_CHECKING:
    from nvalchemiops.torch.distributed.domain import Domain

TOLERANCE = 1e-12
"""Relative error of squared lengths, in float64, up to which Newton's method has converged."""

PREFIX = "constraint "
"""Names in ``State.extra`` of what belongs to constraints."""

STRESS = f"{PREFIX}stress"
"""Name in ``State.extra`` of the stress of constraint forces, which `State.pressures` contain."""

DEPENDENT = 1e-9
"""Smallest eigenvalue of the scaled matrix of a cluster, below which its constraints are not independent."""

DIFFERENTIABLE = 2
"""Steps of Newton's method that are differentiated: from the solution, n steps have right derivatives up to order
2^n - 1, because each step squares the error. The steps before them reach it to rounding if bonds turn by less than some
0.3 radian."""


class Constraints:
    """Distances between pairs of atoms that stay as they are: bonds, rigid molecules.

    Pass it to `Integrator.constrained`. Clusters, the sets of atoms that pairs connect, are found here, once.

    Parameters
    ----------
    pairs : (n_pairs, 2) int tensor or array
        Indices of atoms, in a batch those of the whole batch, with a domain the numbers of atoms. For rigid water these
        are three pairs for each molecule.
    lengths : float or (n_pairs,) tensor, length, optional
        By default the distances at the start.
    iterations : int, optional
        Steps of Newton's method in each projection of positions, at least 2. Each squares the relative error, which is
        about the square of the angle by which bonds turn in a step.

    Raises
    ------
    ValueError, TypeError
        Pairs of wrong shape or dtype, a pair of an atom with itself, or one that is there twice; lengths that are not
        positive.

    Notes
    -----
    Positions are moved along the bonds of the step before, weighted with inverse masses, until the lengths are right
    (SHAKE), and velocities lose their part along the bonds (RATTLE). Instead of iterating over pairs, the equations of
    a cluster are solved together.

    A projection that does not converge, because lengths cannot be met or bonds turn too far in one step, gives NaN
    for the positions of its cluster. In `Integrator.start` it is an error, where values can be read.

    Derivatives are those of the solution (by the implicit function theorem), up to third order.

    References
    ----------
    J.-P. Ryckaert, G. Ciccotti and H. J. C. Berendsen, J. Comput. Phys. 23, 327 (1977),
    doi:10.1016/0021-9991(77)90098-5; H. C. Andersen, J. Comput. Phys. 52, 24 (1983), doi:10.1016/0021-9991(83)90014-1;
    E. Barth, K. Kuczera, B. Leimkuhler and R. D. Skeel, J. Comput. Chem. 16, 1192 (1995), doi:10.1002/jcc.540161003.

    Examples
    --------
    >>> water = torch.arange(6).reshape(2, 3)  # two molecules: O, H, H, O, H, H
    >>> pairs = torch.cat([water[:, [0, 1]], water[:, [0, 2]], water[:, [1, 2]]])
    >>> rigid = Constraints(pairs)
    """

    def __init__(self, pairs: Any, lengths: float | torch.Tensor | None = None, *, iterations: int = 5) -> None:
        device = pairs.device if isinstance(pairs, torch.Tensor) else torch.get_default_device()
        if not isinstance(pairs, torch.Tensor):
            pairs = torch.tensor(pairs, device="cpu")  # where values are read below
        if pairs.ndim != 2 or pairs.shape[1] != 2:
            raise ValueError(f"`pairs` must have shape (n_pairs, 2), got {tuple(pairs.shape)}")
        if pairs.is_floating_point() or pairs.dtype == torch.bool:
            raise TypeError(f"`pairs` must be integers, got {pairs.dtype}")
        self.iterations = checks.check_count("iterations", iterations, DIFFERENTIABLE)
        host = pairs.tolist()
        self.pairs = pairs = pairs.to(device, torch.int64)
        seen = {frozenset(pair) for pair in host}
        if any(i == j for i, j in host) or len(seen) != len(host) or any(i < 0 or j < 0 for i, j in host):
            raise ValueError("`pairs` must be pairs of two atoms, each pair once")
        self.lengths = None
        if lengths is not None:
            lengths = torch.as_tensor(lengths, dtype=torch.float64, device=device)
            if lengths.ndim and lengths.shape != pairs.shape[:1]:
                raise ValueError(f"`lengths` must have shape (n_pairs,) = ({len(pairs)},), got {tuple(lengths.shape)}")
            if may_read(lengths) and not read_number((values_of(lengths) > 0.0).all()):
                raise ValueError("`lengths` must be positive")
            self.lengths = lengths.expand(len(pairs))
        cluster_of, self._levels = _clusters(host, device)
        clusters = [cluster_of[i] for i, _ in host]
        sizes, first = Counter(clusters), {cluster: n for n, cluster in [*enumerate(clusters)][::-1]}
        # pairs sorted by the size of their cluster, then by its first pair, so that a group of clusters is a slice
        order = sorted(range(len(host)), key=lambda n: (sizes[clusters[n]], first[clusters[n]]))
        self.groups = [(count, size) for size, count in sorted(Counter(sizes.values()).items())]
        self._order = torch.tensor(order, dtype=torch.int64, device=device)
        self.first, self.second = pairs[self._order].unbind(1)
        atoms = sorted(cluster_of)
        self.atoms = torch.tensor(atoms, dtype=torch.int64, device=device)
        numbers: dict[int, int] = {}
        rows = [numbers.setdefault(cluster_of[atom], len(numbers)) for atom in atoms]
        self.cluster = torch.tensor(rows, dtype=torch.int32, device=device)
        self.n_clusters = len(numbers)
        # for each atom the pairs that push it, among [pairs, pairs with a minus, zero]
        pushes: dict[int, list[int]] = {atom: [] for atom in atoms}
        for place, n in enumerate(order):
            pushes[host[n][1]].append(place)
            pushes[host[n][0]].append(place + len(order))
        widest = max((len(row) for row in pushes.values()), default=0)
        table = [row + [2 * len(order)] * (widest - len(row)) for row in pushes.values()]
        self._slots = torch.tensor(table, dtype=torch.int64, device=device).reshape(len(atoms), widest).unbind(1)
        # on ranks
        self._exchange: Exchange | None = None  # of the atoms of the clusters that this rank solves
        self._numbers = torch.arange(len(pairs), device=device)  # of the pairs, in the order of all of them
        self._names = self.atoms  # numbers of the atoms
        self._systems: torch.Tensor | None = None  # of the pairs
        self._constants: tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]] | None = None

    # -- clusters of one rank

    def of(self, domain: "Domain | None") -> "Constraints":
        """The constraints that this rank solves; without a domain all. A collective call if the domain is new."""
        if domain is None or self._exchange is not None:
            return self
        if self not in domain.kept:
            domain.kept[self] = self._divided(domain)
        return domain.kept[self]

    def _divided(self, domain: "Domain") -> "Constraints":
        """The clusters whose first atom this rank owns, with atoms in the order of their numbers."""
        device, cluster = domain.device, self.cluster.long()
        # the owner of the first atom of each cluster
        places = torch.arange(len(self.atoms), device=device)
        first = torch.full((self.n_clusters,), len(places), dtype=torch.int64, device=device)
        first = first.scatter_reduce(0, cluster, places, "amin")
        solver = torch.where(torch.isin(self.atoms[first], domain.global_index), domain.rank, 0)
        solver = domain._maximum(solver)
        # owned atoms of clusters, to the ranks that solve these
        own = torch.isin(domain.global_index, self.atoms).nonzero().squeeze(1)
        to = solver[cluster[torch.searchsorted(self.atoms, domain.global_index[own])]]
        rows = own[torch.argsort(to, stable=True)]
        exchange = Exchange.plan(domain.group, rows, torch.bincount(to, minlength=domain.n_ranks))
        exchange = exchange.in_order(torch.argsort(exchange.apply(domain.global_index)))

        found, mine = copy.copy(self), solver == domain.rank
        of_atoms = mine[cluster].nonzero().squeeze(1)
        names = self.atoms[of_atoms]
        is_here = mine[self._cluster_of(self.first)]
        numbers = is_here.nonzero().squeeze(1)
        found._exchange, found._names, found._numbers, found._constants = exchange, names, numbers, None
        found.groups = [(int(is_here[part].sum()) // m, m) for part, m in self._parts()]
        found.first, found.second = (torch.searchsorted(names, end[numbers]) for end in (self.first, self.second))
        found.atoms = torch.arange(len(names), device=device)
        found.cluster = (mine.cumsum(0) - 1)[cluster[of_atoms]].int()
        found.n_clusters = int(mine.sum())
        # places of pairs among those that are here; one with a minus, and zero, follow
        here = torch.zeros_like(self.first).index_copy(0, numbers, torch.arange(len(numbers), device=device))
        signed = torch.cat([here, here + len(numbers), here.new_full((1,), 2 * len(numbers))])
        found._slots = tuple(signed[slot[of_atoms]] for slot in self._slots)
        kept = [(level, mine[self._cluster_of(level[0])]) for level in self._levels]
        found._levels = [(torch.searchsorted(names, a[at]), torch.searchsorted(names, b[at])) for (a, b), at in kept]
        if domain.batch_idx is not None:
            found._systems = exchange.apply(domain.batch_idx)[found.first]
        return found

    def _cluster_of(self, atoms: torch.Tensor) -> torch.Tensor:
        """Clusters of atoms that are in one."""
        return self.cluster.long()[torch.searchsorted(self.atoms, atoms.contiguous())]

    def _here(self, values: torch.Tensor) -> torch.Tensor:
        """Values of the atoms whose clusters are solved here. On ranks a collective call."""
        return values if self._exchange is None else self._exchange.apply(values)

    def _back(self, values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Values of `atoms`, for all atoms of this rank (n_atoms, ...): zero for those without constraints."""
        if self._exchange is None:
            return like.new_zeros(like.shape[0], *values.shape[1:]).index_add(0, self.atoms, values.to(like.dtype))
        return self._exchange.transpose(values.to(like.dtype), like.shape[0])

    def _replaced(self, values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Values of all atoms of this rank, with those of `atoms` in their places."""
        if self._exchange is None:
            return values.index_copy(0, self.atoms, rows.to(values.dtype))
        places = self._exchange.rows
        return values.index_copy(0, places, self._back(rows, values)[places])

    def _of_run(self, extra: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Inverse masses (n, 1), and what else is constant in a run: on ranks found once for each division."""
        inverse = extra["inverse_masses"]
        if self._exchange is None:
            return inverse, extra
        if self._constants is None or self._constants[0] is not inverse:
            here = self._here(inverse)
            self._constants = inverse, here, self._couplings(here)
        return self._constants[1:]

    # -- at the start of a run

    def placed(self, system: System) -> System:
        """The system with whole clusters: atoms moved by lattice vectors, so that each is close to its neighbor.

        Lengths must be less than half the heights of the cell along periodic axes.
        """
        cell, domain = system.cell, system.domain
        batch_idx = system.batch_idx if domain is None else domain.batch_idx
        positions = self._here(system.positions)
        batch_idx = None if batch_idx is None else self._here(batch_idx)
        with together(domain):
            if batch_idx is not None and not torch.equal(batch_idx[self.first], batch_idx[self.second]):
                raise ValueError("`pairs` connect atoms of different systems")
        if cell is None:
            return system
        pbc: Any = system.pbc if domain is None else domain.pbc
        # vectors along open axes may be anything
        inverse = inverse_of_periodic(cell.detach(), pbc)
        cell = (cell if pbc is None else torch.where(pbc.unsqueeze(-1), cell, 0.0)).to(torch.float64)
        # in float64, whose products autocast does not round
        shifts = torch.zeros_like(positions, dtype=torch.float64)
        row = torch.zeros_like(positions[:, 0], dtype=torch.int64) if batch_idx is None else batch_idx.to(torch.int64)
        for children, parents in self._levels:
            bond, of = positions.detach()[children] - positions.detach()[parents], row[children]
            bond = bond.to(torch.float64)
            nearest = -torch.round((bond.unsqueeze(1) @ inverse[of]).squeeze(1))
            shifts = shifts.index_copy(0, children, shifts[parents] + nearest)
        moved = (shifts.unsqueeze(1) @ cell[row]).squeeze(1)
        return system._replace(positions=system.positions + self._back(moved[self.atoms], system.positions))

    def begin(self, system: System, extra: Mapping[str, torch.Tensor]) -> tuple[System, dict[str, torch.Tensor]]:
        """The system with right lengths, and the constants of a run for ``State.extra``. On ranks a collective call."""
        positions, domain = system.positions, system.domain
        n_atoms = len(positions) if domain is None else domain.n_atoms
        if self.pairs.device != positions.device:
            raise ValueError(f"`constraints` are on {self.pairs.device}, positions on {positions.device}")
        if len(self.atoms) and (last := read_number(self.atoms[-1])) >= n_atoms:
            raise ValueError(f"`pairs` name atom {last} of {n_atoms} atoms")
        own = self.of(domain)
        system = own.placed(system)
        found = {"constraint pairs": self.pairs, **self.constants(system, extra)}
        bonds = own.bonds(system.positions)
        lengths = self.lengths
        if lengths is None:
            given = _dot(bonds, bonds).sqrt()
            given = given if domain is None else given.new_zeros(len(self.pairs)).index_copy(0, own._numbers, given)
            given = summed(domain, given)
        else:
            given = lengths[self._order]
        found["constraint lengths"] = given
        inverse, couplings = own._of_run({**extra, **found})
        with together(domain):
            own._check_independent(bonds, couplings)
        if lengths is not None:
            added = own.correction(bonds, system.positions, {**extra, **found}, 10 * self.iterations)
            system = system._replace(positions=system.positions + added)
            bonds = own.bonds(system.positions.detach())
            with together(domain):
                own._check_lengths(bonds, given[own._numbers], system.positions.dtype)
        n_systems = extra["dt"].shape[0]
        batch_idx = system.batch_idx if domain is None else domain.batch_idx
        batch_idx = None if batch_idx is None else own._here(batch_idx)
        found["constraint counts"] = own._counts(inverse, Division(batch_idx, n_systems, domain))
        return system, found

    def constants(self, system: System, extra: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Constants of a run on one process for ``State.extra``; ranks find theirs for each division (`_of_run`)."""
        if system.domain is not None:
            return {}
        found = self._couplings(extra["inverse_masses"])
        if system.batch_idx is not None:
            found["constraint systems"] = system.batch_idx[self.first]
        return found

    def holds(self, extra: Mapping[str, torch.Tensor]) -> bool:
        """Whether a state has these constraints already."""
        pairs = extra.get("constraint pairs")
        return pairs is not None and torch.equal(pairs, self.pairs)

    def _couplings(self, inverse: torch.Tensor) -> dict[str, torch.Tensor]:
        """C (n_clusters, m, m) of each group. A pair of frozen atoms gets a one: it is coupled to nothing."""
        found, inverse = {}, inverse.squeeze(1).to(torch.float64)
        for part, m in self._parts():
            i, j = (end[part].reshape(-1, m) for end in (self.first, self.second))
            total = torch.zeros((), dtype=torch.float64, device=inverse.device)
            for a, b, sign in ((i, i, 1.0), (j, j, 1.0), (i, j, -1.0), (j, i, -1.0)):
                weight = (sign * inverse[a]).unsqueeze(-1)
                total = total + torch.where(a.unsqueeze(-1) == b.unsqueeze(-2), weight, 0.0)
            still = total.diagonal(dim1=-2, dim2=-1) == 0.0
            found[f"constraint couplings of {m}"] = total + torch.diag_embed(still.to(total.dtype))
        return found

    def _counts(self, inverse: torch.Tensor, division: Division) -> torch.Tensor:
        """Constraints (n_systems, 2), and degrees of freedom that atoms of clusters have beyond a common centre.

        A cluster with a frozen atom moves with it alone, so its centre has none.
        """
        moves, batch_idx = (inverse > 0.0).to(torch.float64), division.batch_idx
        of_pairs, of_rows = (
            division._replace(batch_idx=None if batch_idx is None else batch_idx[index])
            for index in (self.first, self.atoms)
        )
        bonds = of_pairs.sums(torch.maximum(moves[self.first], moves[self.second]))
        of_atoms = moves[self.atoms]
        free = 1.0 - self._of_clusters(1.0 - of_atoms).clamp(max=1.0)
        sizes = self._of_clusters(torch.ones_like(of_atoms))
        inside = 3.0 * (of_atoms - free / sizes)
        return torch.cat([bonds, of_rows.sums(inside)], 1)

    def _check_independent(self, bonds: torch.Tensor, couplings: Mapping[str, torch.Tensor]) -> None:
        """Raise if the constraints of a cluster are not independent, where values can be read."""
        if not may_read(bonds):
            return
        for part, m in self._parts():
            matrices = _matrices(
                couplings[f"constraint couplings of {m}"], *[bonds[part].reshape(-1, m, 3)] * 2
            ).detach()
            scale = matrices.diagonal(dim1=-2, dim2=-1).sqrt()
            scaled = matrices / (scale.unsqueeze(-1) * scale.unsqueeze(-2))
            is_finite = read_number(scaled.isfinite().all())
            lowest = torch.linalg.eigvalsh(scaled)[:, 0] if is_finite else scaled[:, 0, 0] * 0.0
            bad = ~(lowest > DEPENDENT)
            if read_number(bad.any()):
                atoms = self._atoms_with(part.start + m * int(bad.nonzero()[0]))
                raise ValueError(f"`constraints` of atoms {atoms} are not independent at these positions")

    def _check_lengths(self, bonds: torch.Tensor, lengths: torch.Tensor, dtype: torch.dtype) -> None:
        """Raise if a length cannot be met, where values can be read."""
        if not may_read(bonds):
            return
        error = (_dot(bonds, bonds).sqrt() / lengths.detach() - 1.0).abs()
        allowed = max(1e-9, 1e3 * torch.finfo(dtype).eps)
        bad = ~(error <= allowed)
        if read_number(bad.any()):
            atoms = self._atoms_with(int(bad.nonzero()[0]))
            raise ValueError(f"`constraints`: lengths of atoms {atoms} cannot be reached from these positions")

    def _atoms_with(self, pair: int) -> list[int]:
        """The numbers of the atoms in the cluster of a pair."""
        return self._names[self.cluster == self.cluster[self.atoms == self.first[pair]]].tolist()

    # -- in a step

    def bonds(self, values: torch.Tensor) -> torch.Tensor:
        """Differences (n_pairs, 3) in float64 of values (n_atoms, 3): second atom less first."""
        values = self._here(values)
        return values[self.second].to(torch.float64) - values[self.first].to(torch.float64)

    def correction(
        self,
        directions: torch.Tensor,
        positions: torch.Tensor,
        extra: Mapping[str, torch.Tensor],
        iterations: int | None = None,
    ) -> torch.Tensor:
        """What must be added to positions (n_atoms, 3), along these directions, for lengths to be right."""
        bonds, squares = self.bonds(positions), extra["constraint lengths"][self._numbers].square()
        _, couplings = self._of_run(extra)
        multipliers = [
            self._newton(
                couplings[f"constraint couplings of {m}"],
                directions[part].reshape(-1, m, 3),
                bonds[part].reshape(-1, m, 3),
                squares[part].reshape(-1, m),
                iterations or self.iterations,
            )
            for part, m in self._parts()
        ]
        return self._pushed(multipliers, directions, extra, positions)

    def tangent(
        self, positions: torch.Tensor, vectors: torch.Tensor, extra: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Velocities (n_atoms, 3) without the part along the bonds: a projection in the metric of the masses."""
        directions = self.bonds(positions)
        multipliers = self._multipliers(directions, -_dot(directions, self.bonds(vectors)), extra)
        return vectors + self._pushed(multipliers, directions, extra, vectors)

    def stress(self, state: State) -> torch.Tensor:
        """What the constraint forces at these positions and velocities add to the stress: (n_systems, 3, 3)."""
        extra, directions = state.extra, self.bonds(state.system.positions)
        relative = self.bonds(state.velocities)
        pulled = self.bonds(state.forces_on_mobile * extra["inverse_masses"])
        # lengths do not change to second order: s'' s + s' s' = 0
        right = -_dot(directions, pulled) - _dot(relative, relative)
        flat = [column.reshape(-1) for column in self._multipliers(directions, right, extra)]
        forces = torch.cat([*flat, right[:0]]).unsqueeze(-1) * directions
        products = forces.unsqueeze(-1) * directions.unsqueeze(-2)
        systems = extra.get("constraint systems") if self._exchange is None else self._systems
        sums = state.division._replace(batch_idx=systems).sums(products)
        return -sums / state.volumes.reshape(-1, 1, 1)

    def with_stress(self, state: State) -> State:
        """The state with `stress` beside that of its model, if there is one."""
        if state.evaluation.stress is None:
            return state
        return state._replace(extra={**state.extra, STRESS: self.of(state.system.domain).stress(state)})

    def _parts(self) -> Sequence[tuple[slice, int]]:
        """The slice of pairs and the number of pairs of a cluster, for each group of clusters of equal size."""
        found, begin = [], 0
        for count, m in self.groups:
            found.append((slice(begin, begin + count * m), m))
            begin += count * m
        return found

    def _multipliers(
        self, directions: torch.Tensor, right: torch.Tensor, extra: Mapping[str, torch.Tensor]
    ) -> list[torch.Tensor]:
        found, (_, couplings) = [], self._of_run(extra)
        for part, m in self._parts():
            own, coupled = directions[part].reshape(-1, m, 3), couplings[f"constraint couplings of {m}"]
            found.append(_solve(_matrices(coupled, own, own), right[part].reshape(-1, m)))
        return found

    def _newton(
        self,
        couplings: torch.Tensor,
        directions: torch.Tensor,
        bonds: torch.Tensor,
        squares: torch.Tensor,
        iterations: int,
    ) -> torch.Tensor:
        """Multipliers (n_clusters, m) that make the squared lengths right; NaN where that has not converged."""
        multipliers = torch.zeros_like(squares)

        def moved(by: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            new = bonds + torch.bmm(couplings * by.unsqueeze(-2), directions)
            return new, 0.5 * (_dot(new, new) - squares)

        for n in range(iterations):
            last = n >= iterations - DIFFERENTIABLE
            with contextlib.nullcontext() if last else torch.no_grad():
                new, excess = moved(multipliers)
                multipliers = multipliers - _solve(_matrices(couplings, new, directions), excess)
        with torch.no_grad():
            new, excess = moved(multipliers)
            # the other solution has a bond turned around
            right = (excess.abs() <= TOLERANCE * squares) & (_dot(new, directions) > 0.0)
        return torch.where(right.all(-1, keepdim=True), multipliers, torch.nan)

    def _pushed(
        self,
        multipliers: Sequence[torch.Tensor],
        directions: torch.Tensor,
        extra: Mapping[str, torch.Tensor],
        like: torch.Tensor,
    ) -> torch.Tensor:
        """Changes (n_atoms, 3) by multipliers along these directions. Each atom adds in the order of pairs."""
        if not multipliers:
            return torch.zeros_like(like)
        pushes = torch.cat([column.reshape(-1) for column in multipliers]).unsqueeze(-1) * directions
        pushes = torch.cat([pushes, -pushes, torch.zeros_like(pushes[:1])])
        total = pushes[self._slots[0]]
        for slot in self._slots[1:]:
            total = total + pushes[slot]
        return self._back(self._of_run(extra)[0][self.atoms] * total, like)

    # -- centres of clusters, for cells that change

    def _of_clusters(self, values: torch.Tensor) -> torch.Tensor:
        """For each atom of `atoms` the sum of values (n, k) over its cluster."""
        sums = system_sums(values.to(torch.float64), self.cluster, self.n_clusters)
        return spread_systems(sums, self.cluster, len(self.atoms))

    def centred(self, state: State) -> State:
        """The state in which atoms are where the centre of their cluster is, and move and are pushed like it.

        Forces are distributed in proportion to masses, and the stress is that of strains that move the centres
        alone. The centre of a cluster with frozen atoms is theirs. Atoms without constraints are as they are.
        """
        if not self.groups:
            return state
        evaluation, positions, velocities = state.evaluation, state.system.positions, state.velocities
        columns = torch.cat([positions, velocities, state.forces_on_mobile, state.extra["inertia"]], 1)
        rows = self._here(columns)[self.atoms]
        inertia = rows[:, 9:].to(torch.float64)
        frozen = (inertia == 0.0).to(torch.float64)
        held = self._of_clusters(frozen) > 0.0
        weights = torch.where(held, frozen, inertia)
        sums = self._of_clusters(torch.cat([weights * rows[:, :6], weights, rows[:, 6:9]], 1))
        shares = torch.where(held, 0.0, inertia * sums[:, 7:] / sums[:, 6:7])
        centres = torch.cat([sums[:, :6] / sums[:, 6:7], shares], 1)
        positions, velocities, forces = self._replaced(columns[:, :9], centres).split(3, 1)
        arms = state.system.positions - positions
        # a frozen atom that is the centre has no arm, and its force, which may be infinite, does not matter
        counts = (state.extra["inverse_masses"] > 0.0) | (arms != 0.0).any(1, keepdim=True)
        pulls = torch.where(counts, evaluation.forces, 0.0)
        products = state.of_systems(pulls.unsqueeze(-1) * arms.unsqueeze(-2))
        stress = state.stress + 0.5 * (products + products.mT) / state.volumes.reshape(-1, 1, 1)
        evaluation = evaluation._replace(forces=forces, stress=stress)
        return state.at(positions, velocities=velocities)._replace(evaluation=evaluation)


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    products = a * b
    return products[..., 0] + products[..., 1] + products[..., 2]


def _matrices(couplings: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """``C_kl left_k · right_l`` (n_clusters, m, m)."""
    return couplings * torch.bmm(left, right.mT)


def _solve(matrices: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Solutions (n, m), without a look at the device; infinite or NaN if a matrix is singular."""
    return torch.linalg.solve_ex(matrices, right.unsqueeze(-1))[0].squeeze(-1)


def _clusters(
    pairs: Sequence[Sequence[int]], device: torch.device
) -> tuple[dict[int, int], list[tuple[torch.Tensor, torch.Tensor]]]:
    """The first atom of the cluster of each atom, and pairs of atoms one step farther from and one closer to that."""
    neighbors: dict[int, list[int]] = {}
    for i, j in pairs:
        neighbors.setdefault(i, []).append(j)
        neighbors.setdefault(j, []).append(i)
    found: dict[int, int] = {}
    levels: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for root in sorted(neighbors):
        if root in found:
            continue
        found[root], front, depth = root, [root], 0
        while front:
            step = []
            for parent in front:
                for child in neighbors[parent]:
                    if child not in found:
                        found[child] = root
                        step.append((child, parent))
            levels[depth] += step
            front, depth = [child for child, _ in step], depth + 1
    tables = [torch.tensor(level, dtype=torch.int64, device=device).unbind(1) for level in levels.values() if level]
    return found, [(children, parents) for children, parents in tables]
