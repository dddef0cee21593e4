"""States of neighbor lists: lists of fixed size that are searched again as atoms move, inside of `jit` and `scan`."""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nvalchemiops.compat.ignored_arguments import OPTIONAL_ELSEWHERE
from nvalchemiops.jax._jax_internals import vary_alike
from nvalchemiops.jax.dtypes import Pbc
from nvalchemiops.jax.neighbors.search import SCRATCH, SYSTEMS, capacity_for, find_neighbors, rooms_of, types_of_list
from nvalchemiops.jax.operators import Shape, as_array, as_number
from nvalchemiops.jax.utils import dataclass, field, is_traced
from nvalchemiops.neighbors import NeighborOverflowError
from nvalchemiops.neighbors.search import NOT_FINITE
from nvalchemiops.notices import NeighborListWarning, notify
from nvalchemiops.torch.checks import check_count, check_not_negative, systems_in_shapes


class _Search(NamedTuple):
    """The static settings of a state."""

    cutoff: float
    cutoff2: float | None
    half_fill: bool
    fill_value: int
    method: str | None
    return_neighbor_list: bool
    return_distances: bool
    return_vectors: bool
    selective: bool
    skin: float | None
    sizes: tuple[int, ...]  # width, or capacity, of each list
    num_atoms: int
    num_systems: int
    has_shifts: bool

    def types(self, room: int = 0, dtype: Any = jnp.float32) -> dict[str, Shape]:
        """The arrays of one list."""
        return types_of_list(self.num_atoms, room, dtype, self.has_shifts, self._asdict())

    @property
    def reaches(self) -> dict[str, float | None]:
        """The distances up to which lists are complete at a search."""
        skin = self.skin or 0.0
        return {"cutoff": self.cutoff + skin, "cutoff2": None if self.cutoff2 is None else self.cutoff2 + skin}


_FIXED = _Search._fields[:8]
"""The fields that are arguments of `neighbor_list`."""


class Reference(NamedTuple):
    """What the lists of a state with a skin were made for."""

    positions: Any
    pbc: Any  # (n_systems, 3)
    lattice: Any  # (n_systems, 3, 3), zero along open axes; None without cells
    inverse: Any  # its pseudo-inverse


@dataclass
class NeighborListState:
    """Sizes of neighbor lists, the lists of the last search, and whether all neighbors fit: a pytree.

    `prepare_neighbor_list` makes a state, and `neighbor_list` returns the next one. The results of the last search are
    attributes, such as ``neighbor_matrix`` and ``neighbor_list_shifts``; with two cutoffs their names end with 1 and 2.
    All settings are attributes, too. Inside of ``jit`` sizes are fixed. Outside of it a call enlarges them as needed,
    and the next state has the new sizes.

    Attributes
    ----------
    cell, pbc, batch_idx, batch_ptr : arrays or None
        Used if a call does not give them.
    initialized : (n_systems,) bool array
        Whether a search was made.
    valid : (n_systems,) bool array
        Whether all neighbors fit in every search so far. Once False, it stays False.
    largest : (n_systems,) int32 array
        The most neighbors of an atom in any search; with a list of pairs, the most pairs.
    rebuilt : (n_systems,) bool array
        Which systems the last call searched. Without a skin these are all, or those with ``rebuild_flags``.
    reference : Reference or None
        The positions and cells of the last search of each system. Only with a skin.
    """

    search: _Search = field(static=True)
    cell: Any
    pbc: Any
    batch_idx: Any
    batch_ptr: Any
    lists: tuple[tuple[Any, ...], ...]
    largest: Any
    initialized: Any
    valid: Any
    rebuilt: Any
    reference: Reference | None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("search", "lists"):
            raise AttributeError(name)
        if name in _Search._fields:
            return getattr(self.search, name)
        number = name[-1] if name[-1] in "12" else ""
        stem = name[: len(name) - len(number)]
        index = int(number or 1) - 1
        names = list(self.search.types())
        if index < len(self.lists) and stem in names:
            return self.lists[index][names.index(stem)]
        raise AttributeError(f"a NeighborListState has no attribute '{name}'")

    def __repr__(self) -> str:
        """Settings and what the state says about the lists, without the lists."""
        given = self.search._asdict().items()
        settings = {name: value for name, value in given if value is not None and value is not False}
        says = {name: getattr(self, name) for name in ("largest", "initialized", "valid", "rebuilt")}
        parts = [f"{name}={value!r}" for name, value in settings.items()] + [f"{n}={x}" for n, x in says.items()]
        return f"{type(self).__name__}({', '.join(parts)})"

    @property
    def format(self) -> str:
        """``"matrix"`` or ``"coo"``."""
        return "coo" if self.search.return_neighbor_list else "matrix"

    @property
    def is_batched(self) -> bool:
        """Whether the state is for a batch."""
        return self.batch_idx is not None or self.batch_ptr is not None


def prepare_neighbor_list(
    positions: jax.Array,
    cutoff: float,
    cell: jax.Array | None = None,
    pbc: Pbc | None = None,
    batch_idx: jax.Array | None = None,
    batch_ptr: jax.Array | None = None,
    cutoff2: float | None = None,
    half_fill: bool = False,
    fill_value: int | None = None,
    return_neighbor_list: bool = False,
    method: str | None = None,
    format: str | None = None,
    wrap_positions: bool = True,
    *,
    max_neighbors: int | None = None,
    max_neighbors1: int | None = None,
    max_neighbors2: int | None = None,
    atomic_density: float | None = None,
    coo_capacity: int | tuple[int, int] | None = None,
    max_tiles_per_group: int | None = None,
    return_vectors: bool = False,
    return_distances: bool = False,
    selective: bool = False,
    skin: float | None = None,
    pair_fn: Any = None,
    span_margin: float = 0.0,
    target_indices: jax.Array | None = None,
    strategy: str = "auto",
    atom_centric_path: str = "auto",
    fixed_cell: bool = False,
    **without_effect: Any,
) -> NeighborListState:
    """Prepare the sizes of neighbor lists for use inside of ``jit``, as the ``state`` of `neighbor_list`.

    Parameters
    ----------
    positions : (n_atoms, 3) array
        Outside of ``jit`` the width of a matrix is chosen for these positions: the longest row and a quarter more.
    cutoff, cell, pbc, batch_idx, batch_ptr, cutoff2, half_fill, fill_value, return_neighbor_list, method
        As for `neighbor_list`. A call with the state may give another cell.
    format : {"matrix", "coo"}, optional
        Alternative to ``return_neighbor_list``.
    max_neighbors, max_neighbors1, max_neighbors2 : int, optional
        Widths of the matrices.
    coo_capacity : int or (int, int), optional
        Capacity of lists of pairs; for a matrix there is a warning. Required with ``return_neighbor_list`` under
        ``jit``; otherwise by default a quarter more than the present pairs.
    return_vectors, return_distances : bool, optional
    selective : bool, optional
        Whether calls give ``rebuild_flags`` and keep the rows of other systems, of a matrix. A system is always
        searched the first time.
    skin : float, length, optional
        Search up to ``cutoff + skin``, and again only when pairs closer than ``cutoff`` might be missing: when
        ``2 d + s (cutoff + skin) > skin``, where d is the largest displacement of an atom since the last search, beyond
        the motion of the cell, and s the norm of the strain of the cell. In a batch each system has its own searches.
        Lists then have pairs beyond the cutoff, which pair operators with a ``cutoff`` leave out. Under ``vmap`` every
        call searches.
    wrap_positions, atomic_density, max_tiles_per_group, span_margin, strategy, atom_centric_path, fixed_cell
        Without effect.
    pair_fn, target_indices : None
        Not supported.
    **without_effect
        Other names of scratch memory that nvalchemi-toolkit-ops takes.

    Returns
    -------
    NeighborListState
        A state without neighbors so far.

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message; missing sizes under ``jit``.
    """
    if pair_fn is not None or target_indices is not None:
        name = "pair_fn" if pair_fn is not None else "target_indices"
        raise NotImplementedError(f"prepare_neighbor_list: `{name}` is not supported")
    for name, value in without_effect.items():
        if name not in SCRATCH or (name in OPTIONAL_ELSEWHERE and value is not None):
            raise TypeError(f"prepare_neighbor_list() got an unexpected keyword argument '{name}'")
    positions = as_array("positions", positions)
    cutoff = check_not_negative("cutoff", as_number("prepare_neighbor_list: `cutoff`", cutoff))
    if cutoff2 is not None:
        cutoff2 = check_not_negative("cutoff2", as_number("prepare_neighbor_list: `cutoff2`", cutoff2))
    if format not in (None, "matrix", "coo", "list"):
        raise ValueError(f"`format` must be 'matrix' or 'coo', got {format!r}")
    return_neighbor_list = return_neighbor_list or format in ("coo", "list")
    if skin is not None:
        skin = check_not_negative("skin", as_number("prepare_neighbor_list: `skin`", skin))
        if return_distances or return_vectors or selective:
            raise ValueError(
                "`skin` goes with none of return_distances, return_vectors and selective: a list that is not searched "
                "again has old distances, and the skin says which systems are searched"
            )
    if selective and return_neighbor_list:
        raise ValueError("`selective` keeps rows of a matrix: it does not go with return_neighbor_list or format='coo'")
    if coo_capacity is not None and not return_neighbor_list:
        notify(
            "`coo_capacity` is the capacity of a list of pairs, but this state has a matrix: give return_neighbor_list="
            "True or format='coo' for a list",
            NeighborListWarning,
        )
    n_lists = 1 if cutoff2 is None else 2
    arrays = {"cell": cell, "pbc": pbc, "batch_idx": batch_idx, "batch_ptr": batch_ptr}
    arrays = {name: as_array(name, value) for name, value in arrays.items() if value is not None}
    rooms = rooms_of(n_lists, return_neighbor_list, coo_capacity, max_neighbors, max_neighbors1, max_neighbors2)
    size = "coo_capacity" if return_neighbor_list else "max_neighbors"
    if None in rooms:
        if is_traced((positions, arrays)):
            raise ValueError(f"`{size}` is needed under jit, where the neighbors of these positions are not known")
        given = {"positions": jnp.asarray(positions), **arrays, "half_fill": half_fill, "method": method}
        given["return_neighbor_list"] = return_neighbor_list
        reaches = [r + (skin or 0.0) for r in (cutoff, cutoff2) if r is not None]
        longest = [find_neighbors("neighbor_list", {**given, "cutoff": r})[0].shape[1] for r in reaches]
        needed = [capacity_for(n) if return_neighbor_list else n for n in longest]
        rooms = tuple(n if room is None else room for n, room in zip(needed, rooms))
    rooms = tuple(check_count(size, room) for room in rooms)
    n_atoms = positions.shape[0]
    search = _Search(
        cutoff,
        cutoff2,
        half_fill,
        n_atoms if fill_value is None else int(fill_value),
        method,
        return_neighbor_list,
        return_distances,
        return_vectors,
        selective,
        skin,
        rooms,
        n_atoms,
        _number_of_systems(arrays),
        cell is not None,
    )
    lists = tuple(_empty(search, room, jnp.asarray(positions).dtype) for room in rooms)
    flags = jnp.zeros(search.num_systems, bool)
    largest = jnp.zeros(search.num_systems, jnp.int32)
    found: dict[str, Any] = {name: _own(arrays.get(name)) for name in SYSTEMS}
    reference = None if skin is None else _reference(search, {"positions": jnp.asarray(positions), **found})
    state = NeighborListState(
        search,
        lists=lists,
        largest=largest,
        initialized=flags,
        valid=~flags,
        rebuilt=_own(flags),
        reference=reference,
        **found,
    )
    # inside of shard_map the next state varies over the mesh axes of the positions, and `scan` needs equal types
    return vary_alike((positions, state))[1]


def _number_of_systems(arrays: Mapping[str, Any]) -> int:
    cell, pbc, pointers, batch_idx = (arrays.get(name) for name in ("cell", "pbc", "batch_ptr", "batch_idx"))
    if pointers is not None:
        return int(pointers.shape[0]) - 1
    if (found := systems_in_shapes((cell, 3), (pbc, 2))) is not None:
        if found > 1 and batch_idx is None:
            raise ValueError(f"`batch_idx` or `batch_ptr` is needed: `cell` or `pbc` is for {found} systems")
        return found
    if batch_idx is None:
        return 1
    if is_traced(batch_idx):
        raise ValueError(
            "`batch_ptr` is needed under jit to know the number of systems, unless each has a cell or `pbc`"
        )
    return int(np.asarray(batch_idx).max(initial=-1)) + 1


def _empty(search: _Search, room: int, dtype: Any) -> tuple[Any, ...]:
    first, *others = search.types(room, dtype).values()
    return (jnp.full(first.shape, search.fill_value, first.dtype), *[jnp.zeros(t.shape, t.dtype) for t in others])


def _own(array: Any) -> Any:
    """A copy, so that a program that takes the memory of a state (``donate_argnums``) takes no array of the caller."""
    return None if array is None else jnp.array(array, copy=True)


def state_after(state: Any, given: Mapping[str, Any]) -> tuple[tuple[Any, ...], NeighborListState]:
    """The lists for a call with ``state`` and the arguments ``given``, and the next state."""
    if not isinstance(state, NeighborListState):
        raise TypeError(f"`state` must be a NeighborListState from prepare_neighbor_list, got {type(state).__name__}")
    search, arrays = state.search, {name: as_array(name, given.get(name)) for name in ("positions", *SYSTEMS)}
    given = {**given, **arrays}
    _check_against(search, given)
    if given["cell"] is not None and not search.has_shifts:
        raise ValueError("`cell` is given, but `state` was prepared without one")
    arguments = {name: getattr(state, name) if given.get(name) is None else given[name] for name in SYSTEMS}
    arguments |= {"positions": given["positions"], **{name: getattr(search, name) for name in _FIXED}}
    two = len(search.sizes) == 2
    if search.return_neighbor_list:
        arguments["coo_capacity"] = search.sizes
    else:
        names = ("max_neighbors1", "max_neighbors2") if two else ("max_neighbors",)
        arguments |= dict(zip(names, search.sizes))
    if search.selective:
        # a system that was never searched has no rows to keep
        flags = as_array("rebuild_flags", given["rebuild_flags"]) | ~state.initialized
        arguments |= {"rebuild_flags": flags, **_memory(state)}
    # a traced state has fixed sizes; outside of `jit` they grow
    declared = is_traced(state)
    reference, rebuilt = state.reference, jnp.ones_like(state.initialized)
    if search.selective:
        rebuilt = jnp.broadcast_to(arguments["rebuild_flags"], rebuilt.shape)
    if reference is None:
        found = find_neighbors("neighbor_list", arguments, declared=declared)
    else:
        arguments |= search.reaches
        found, reference, rebuilt = _searched_if_stale(state, reference, arguments, declared or is_traced(arguments))
    per_list = len(found) // len(search.sizes)
    lists = tuple(found[i * per_list : (i + 1) * per_list] for i in range(len(search.sizes)))
    search = search._replace(sizes=tuple(one[0].shape[1] for one in lists))
    largest, fits = _occupancy(search, lists, arguments)
    used: dict[str, Any] = {
        name: getattr(state, name) if given[name] is None else _shaped_like(getattr(state, name), _own(given[name]))
        for name in SYSTEMS
    }
    after = dataclasses.replace(
        state,
        search=search,
        **used,
        lists=lists,
        largest=jnp.maximum(state.largest, largest),
        initialized=jnp.ones_like(state.initialized),
        valid=state.valid & fits,
        rebuilt=rebuilt,
        reference=reference,
    )
    return found, after


def _memory(state: NeighborListState) -> dict[str, Any]:
    """The lists as arguments of a search that keeps rows of some systems."""
    names, numbers = state.search.types(), "12" if len(state.lists) > 1 else ("",)
    return {f"{name}{k}": array for k, one in zip(numbers, state.lists) for name, array in zip(names, one)}


def _shaped_like(before: Any, now: Any) -> Any:
    """``now``, with the shape of ``before`` if only axes of size 1 differ: a state keeps its types in a loop."""
    if before is None or now is None or jnp.size(now) != jnp.size(before):
        return now
    return jnp.reshape(now, jnp.shape(before))


# -- lists with a skin ----------------------------------------------------------------------------


def _searched_if_stale(
    state: NeighborListState, reference: Reference, arguments: dict[str, Any], traced: bool
) -> tuple[tuple[Any, ...], Reference, Any]:
    """The lists, which are searched for systems that need it, their reference, and flags of these systems."""
    search, before = state.search, tuple(itertools.chain(*state.lists))
    if arguments["positions"].dtype != reference.positions.dtype:
        now, then = arguments["positions"].dtype, reference.positions.dtype
        raise TypeError(f"`positions` have dtype {now}, but `state` was prepared for {then}")
    # neither lists nor the test have derivatives
    arguments = arguments | {name: jax.lax.stop_gradient(arguments[name]) for name in ("positions", "cell")}
    systems = _system_of_atoms(search, arguments)
    stale = ~state.initialized | _is_stale(search, reference, _reference(search, arguments, False), systems)
    for name in ("batch_idx", "batch_ptr"):
        other = getattr(state, name)
        if arguments[name] is not other:
            stale = stale | (True if other is None else jnp.any(arguments[name] != other))
    if not traced:
        # rows that were cut under `jit` are not kept: here they get the room that they need
        may_keep = not bool((stale | ~state.valid).any())
        if may_keep or not bool((stale | ~_occupancy(search, state.lists, arguments)[1]).any()):
            return before, reference, stale
        found = find_neighbors("neighbor_list", arguments)
        return found, _reference(search, arguments), jnp.ones_like(stale)
    in_part = search.num_systems > 1 and not search.return_neighbor_list
    if in_part:
        arguments |= {"rebuild_flags": stale, **_memory(state)}
    else:
        stale = jnp.broadcast_to(stale.any(), stale.shape)

    def searched() -> tuple[tuple[Any, ...], Reference]:
        found = tuple(find_neighbors("neighbor_list", arguments, declared=True))
        new = _reference(search, arguments)
        if not in_part:
            return found, new
        # rows of systems, and of atoms
        kept = [_where(stale, a, b) if a is not None else None for a, b in zip(new[1:], reference[1:])]
        return found, Reference(_where(stale[systems], new.positions, reference.positions), *kept)

    found, latest = jax.lax.cond(stale.any(), searched, lambda: (before, reference))
    return found, latest, stale


def _where(flags: Any, new: Any, old: Any) -> Any:
    """Rows of ``new`` where there are flags, of ``old`` elsewhere."""
    return jnp.where(jnp.reshape(flags, (-1, *[1] * (new.ndim - 1))), new, old)


def _reference(search: _Search, arguments: Mapping[str, Any], kept: bool = True) -> Reference:
    """The reference for a search with these arguments, which has no derivative; an inverse only if it is kept."""
    n_systems, cell, pbc = search.num_systems, arguments["cell"], arguments["pbc"]
    pbc = jnp.broadcast_to(True if pbc is None else pbc, (n_systems, 3))
    lattice = inverse = None
    if cell is not None:
        lattice = jnp.broadcast_to(jnp.reshape(cell, (-1, 3, 3)), (n_systems, 3, 3))
        lattice = jax.lax.stop_gradient(jnp.where(pbc[:, :, None], lattice, 0.0))  # an open axis may be anything
        inverse = jnp.linalg.pinv(lattice) if kept else None
    positions = jax.lax.stop_gradient(arguments["positions"])
    found = Reference(_own(positions) if kept else positions, _own(pbc) if kept else pbc, lattice, inverse)
    return vary_alike(found)  # the branches of `cond` have equal types inside of shard_map


def _is_stale(search: _Search, then: Reference, now: Reference, systems: Any) -> Any:
    """Whether pairs within the cutoff may be missing in each system (n_systems,).

    The strain ``F - 1`` of the cell has norm s, and atoms moved by at most d beyond it. So the separation r of two
    images is now ``r F`` with an error of at most 2 d, and a pair that is now closer than the cutoff was closer than
    ``(cutoff + 2 d) / (1 - s)``.
    """
    expected, strained = then.positions, jnp.zeros(search.num_systems, now.positions.dtype)
    if now.lattice is not None:
        strain = then.inverse @ (now.lattice - then.lattice)  # zero along open axes
        strained = jnp.sqrt(jnp.sum(strain**2, (1, 2)))
        of_atoms = strain[0] if systems is None else strain[systems]
        expected = expected + (expected[:, None] @ of_atoms)[:, 0]
    moved = jnp.sqrt(jnp.sum((now.positions - expected) ** 2, axis=1))
    if systems is None:
        moved = jnp.max(moved, initial=0.0)
    else:
        moved = jnp.maximum(jax.ops.segment_max(moved, systems, search.num_systems), 0.0)
    skin = search.skin or 0.0
    reach = max(search.cutoff, search.cutoff2 or 0.0) + skin
    stale = ~(2.0 * moved + strained * reach <= skin)  # also for NaN
    return stale | jnp.any(then.pbc != now.pbc, axis=1)


_WITH_STATE = frozenset({"positions", "rebuild_flags", *SYSTEMS, *_FIXED})
"""Arguments of `neighbor_list` that may be given with a state."""


def _check_against(search: _Search, given: Mapping[str, Any]) -> None:
    """Raise unless the arguments of a call agree with the settings of the state."""
    if tuple(given["positions"].shape) != (search.num_atoms, 3):
        raise ValueError(
            f"`positions` have shape {tuple(given['positions'].shape)}, but `state` is for ({search.num_atoms}, 3)"
        )
    for name in ("cutoff", "cutoff2", "fill_value", "method"):
        value = given.get(name)
        if value is not None and as_number(f"neighbor_list: `{name}` with `state`", value) != getattr(search, name):
            raise ValueError(f"`{name}` = {value} differs from that of `state`, {getattr(search, name)}")
    for name in ("half_fill", "return_neighbor_list", "return_distances", "return_vectors"):
        if given.get(name) and not getattr(search, name):
            raise ValueError(f"`{name}` is requested, but `state` was prepared without it")
    for name, value in given.items():
        if value is not None and name not in _WITH_STATE and (name not in SCRATCH or name in OPTIONAL_ELSEWHERE):
            raise TypeError(f"neighbor_list: `{name}` cannot be given with `state`, which was prepared without it")
    flags = given.get("rebuild_flags")
    if search.selective != (flags is not None):
        raise ValueError("`rebuild_flags` are needed with a state prepared with selective=True, and only with that")


def _system_of_atoms(search: _Search, arguments: Mapping[str, Any]) -> Any:
    """The system of each atom; None if there is one system."""
    if search.num_systems == 1:
        return None
    if arguments["batch_idx"] is not None:
        return arguments["batch_idx"]
    return jnp.searchsorted(arguments["batch_ptr"][1:], jnp.arange(search.num_atoms), side="right")


def _occupancy(search: _Search, lists: tuple[tuple[Any, ...], ...], arguments: Mapping[str, Any]) -> tuple[Any, Any]:
    """For each system the largest number of neighbors of an atom, or the number of pairs, and whether all fit."""
    n_systems = search.num_systems
    largest, fits = jnp.zeros(n_systems, jnp.int32), jnp.ones(n_systems, bool)
    for room, one in zip(search.sizes, lists):
        counts = one[list(search.types()).index("num_neighbors")]
        if search.return_neighbor_list:
            # pairs of all systems share the capacity
            most = jnp.broadcast_to(jnp.sum(counts), (n_systems,)).astype(jnp.int32)
        elif n_systems == 1:
            most = jnp.max(counts, initial=0)[None]
        else:
            # atoms of systems that do not exist, whose counts say so, must not be left out
            systems = jnp.clip(_system_of_atoms(search, arguments), 0, n_systems - 1)
            most = jnp.maximum(jax.ops.segment_max(counts, systems, n_systems), 0)
        largest, fits = jnp.maximum(largest, most), fits & (most <= room)
    return largest, fits


def check_neighbor_list_state(state: NeighborListState) -> None:
    """Raise if neighbors did not fit in the search of ``state`` or of an earlier state from which it was made.

    Raises
    ------
    NeighborOverflowError
        Neighbors did not fit. The error names the first such system.
    ValueError
        A position or a cell was not finite, or ``batch_idx`` named a system that does not exist.
    TypeError
        ``state`` is not a state, or is traced.
    """
    if not isinstance(state, NeighborListState):
        raise TypeError(f"`state` must be a NeighborListState from prepare_neighbor_list, got {type(state).__name__}")
    if is_traced(state.valid):
        raise TypeError("check_neighbor_list_state reads values: call it outside of jit")
    failed = np.flatnonzero(~np.asarray(state.valid))
    if not len(failed):
        return
    system, room = int(failed[0]), min(state.search.sizes)
    needed = int(np.ravel(state.largest)[system])
    if needed == NOT_FINITE:
        raise ValueError(
            f"a position or the cell of system {system} was not finite, or the cell has no volume, or `batch_idx` "
            "named a system that does not exist"
        )
    error = NeighborOverflowError(room, needed, system)
    if state.search.return_neighbor_list:
        error.args = (f"`coo_capacity` = {room} is too small: there were {needed} pairs",)
    raise error
