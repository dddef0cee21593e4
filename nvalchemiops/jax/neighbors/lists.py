"""Neighbor lists for JAX arrays: exact outside of ``jit``, with a declared size inside of it.

`NeighborListState` holds lists of a fixed size for use inside of ``jit`` and ``scan``.
"""

import dataclasses
import inspect
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from nvalchemiops.compat.ignored_arguments import OPTIONAL_ELSEWHERE, WITHOUT_EFFECT
from nvalchemiops.jax._jax_internals import vary_alike
from nvalchemiops.jax.bridge import Bridge
from nvalchemiops.jax.operators import (
    Shape,
    as_array,
    as_static,
    checked_shapes,
    from_torch_values,
    named,
    to_torch,
)
from nvalchemiops.jax.utils import dataclass, field, is_traced
from nvalchemiops.neighbors import NeighborOverflowError
from nvalchemiops.neighbors.search import NOT_FINITE
from nvalchemiops.notices import NeighborListWarning, notify
from nvalchemiops.torch import neighbors
from nvalchemiops.torch.checks import check_count

SCRATCH = (
    WITHOUT_EFFECT
    | OPTIONAL_ELSEWHERE
    | {"max_total_cells", "inv_cell", "positions_wrapped", "per_atom_cell_offsets", "sorted_atom_periodic_shifts"}
    | {"pair_centric_total_cells", "pair_centric_n_outer", "pair_centric_r_max", "graph_mode", "wrap_positions"}
)
"""Parameters of other libraries that JAX clients may pass. Most have no effect; those that would change results must be
None."""

_SYSTEMS = ("cell", "pbc", "batch_idx", "batch_ptr")


def rooms_of(
    n_lists: int,
    return_neighbor_list: bool = False,
    coo_capacity: Any = None,
    max_neighbors: int | None = None,
    max_neighbors1: int | None = None,
    max_neighbors2: int | None = None,
    **others: Any,
) -> tuple[Any, ...]:
    """The declared width of each matrix, or capacity of each list; None if it is missing."""
    if return_neighbor_list:
        return coo_capacity if isinstance(coo_capacity, tuple) else (coo_capacity,) * n_lists
    return tuple(max_neighbors if room is None else room for room in (max_neighbors1, max_neighbors2)[:n_lists])


def types_of_list(n: int, room: int, dtype: Any, has_shifts: bool, options: Mapping[str, Any]) -> dict[str, Shape]:
    """The arrays of one list of ``n`` atoms with this width or capacity, in the order in which torch returns them."""
    if pairs := bool(options.get("return_neighbor_list")):
        slots: tuple[int, ...] = (room,)
        types = {"neighbor_list": Shape((2, room), jnp.int32), "neighbor_ptr": Shape((n + 1,), jnp.int32)}
    else:
        slots = (n, room)
        types = {"neighbor_matrix": Shape(slots, jnp.int32), "num_neighbors": Shape((n,), jnp.int32)}
    if has_shifts:
        types["neighbor_list_shifts" if pairs else "neighbor_matrix_shifts"] = Shape((*slots, 3), jnp.int32)
    if options.get("return_distances"):
        types["neighbor_distances"] = Shape(slots, dtype)
    if options.get("return_vectors"):
        types["neighbor_vectors"] = Shape((*slots, 3), dtype)
    return {**types, "num_neighbors": Shape((n,), jnp.int32), "overflow": Shape((), jnp.bool_)} if pairs else types


_ARRAYS = ("positions", "cell", "pbc", "batch_idx", "batch_ptr", "rebuild_flags", "target_indices")

_OUTPUTS = ("neighbor_matrix", "num_neighbors", "neighbor_matrix_shifts", "neighbor_distances", "neighbor_vectors")
"""Memory for results in torch. In JAX, where arrays are immutable, earlier results: see ``rebuild_flags``."""


def find_neighbors(name: str, given: Mapping[str, Any], declared: bool = False) -> tuple[Any, ...]:
    """The lists for the arguments ``given`` of the public function ``name``.

    Under ``jit``, or with ``declared``, lists have the declared width or capacity, and counts show what did not fit.
    Otherwise they are large enough.
    """
    arguments: dict[str, Any] = {}
    for key, value in given.items():
        if value is None or key in SCRATCH:
            if value is not None and key in OPTIONAL_ELSEWHERE:
                raise NotImplementedError(
                    f"{name}: `{key}` is not supported; `PairPotential` sums over the pairs of a list"
                )
            continue
        is_array = key in _ARRAYS or key.rstrip("12") in _OUTPUTS
        if key.startswith("cutoff") and is_traced(value):
            arguments[key] = jax.lax.stop_gradient(value)  # lists are piecewise constant in the cutoff
        else:
            arguments[key] = as_array(key, value) if is_array else as_static(f"{name}: `{key}`", value)
    arguments = _with_widths(arguments)
    if "coo_capacity" in arguments:
        if not arguments.get("return_neighbor_list"):
            raise ValueError(
                f"{name}: `coo_capacity` is the capacity of a list of pairs: it needs return_neighbor_list=True"
            )
        for room in rooms_of(1, True, arguments["coo_capacity"]):
            check_count("coo_capacity", room)
    if declared or is_traced(arguments):
        if "cutoff2" in arguments and "max_neighbors" in arguments:
            arguments.setdefault("max_neighbors2", arguments["max_neighbors"])
        return tuple(_bridge(**arguments, check=False))
    return tuple(from_torch_values(_search(**{key: to_torch(value) for key, value in arguments.items()})))


def _with_widths(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with widths taken from earlier matrices. The matrices are kept only if some rows are reused."""
    found = dict(arguments)
    if "cutoff1" in found:
        found["cutoff"] = found.pop("cutoff1")
    for suffix in ("", "1", "2"):
        before = found.get(f"neighbor_matrix{suffix}")
        if before is not None:
            found.setdefault(f"max_neighbors{suffix}", before.shape[1])
    if "rebuild_flags" not in found:
        found = {key: value for key, value in found.items() if key.rstrip("12") not in _OUTPUTS}
    return found


def _search(check: bool = True, coo_capacity: Any = None, **arguments: Any) -> list[torch.Tensor]:
    """Call the torch function. Lists with a declared capacity are padded to it, or without ``check`` also cut to it."""
    for key, value in arguments.items():
        if key.rstrip("12") in _OUTPUTS:
            arguments[key] = value.clone()  # torch fills it in place
        elif key.startswith("cutoff") and isinstance(value, torch.Tensor):
            arguments[key] = value.item()
    is_list = arguments.get("return_neighbor_list", False)
    found = list(neighbors.neighbor_list(**arguments, check=check or is_list))
    return found if coo_capacity is None else _padded(found, coo_capacity, arguments, is_cut=not check)


_OTHER_FORMS = ("return_neighbor_list", "return_distances", "return_vectors", "cutoff2", "rebuild_flags")


def _fill(results: list[torch.Tensor], **arguments: Any) -> bool:
    """Write a matrix, counts and shifts into ``results``. Return False if other results are requested."""
    if any(arguments.get(name) is not None and arguments[name] is not False for name in _OTHER_FORMS):
        return False
    if isinstance(arguments["cutoff"], torch.Tensor):
        arguments["cutoff"] = arguments["cutoff"].item()
    neighbors.neighbor_list(**{**arguments, **dict(zip(_OUTPUTS, results))})
    return True


def _padded(found: list[torch.Tensor], capacity: Any, arguments: dict[str, Any], is_cut: bool) -> list[torch.Tensor]:
    """Lists of pairs padded to ``capacity``: list, pointers, shifts, ..., counts, and whether pairs were cut."""
    n_lists = 2 if "cutoff2" in arguments else 1
    padding = arguments.get("fill_value", arguments["positions"].shape[0])
    per_list = len(found) // n_lists
    out = []
    for number, room in enumerate(rooms_of(n_lists, True, capacity)):
        pairs, pointers, *others = found[number * per_list : (number + 1) * per_list]
        if pairs.shape[1] > room and not is_cut:
            notify(
                f"`coo_capacity` = {room}, but there are {pairs.shape[1]} pairs: the returned list has room for all",
                NeighborListWarning,
                kind=f"short list {number}",
            )
            room = capacity_for(pairs.shape[1])
        n = min(pairs.shape[1], room)
        rows = torch.full((2, room), padding, dtype=pairs.dtype)
        rows[:, :n] = pairs[:, :n]
        out += [rows, pointers.clamp(max=room)]
        out += [torch.cat([x[:n], x.new_zeros((room - n, *x.shape[1:]))]) for x in others]
        out += [pointers.diff(), torch.tensor(pairs.shape[1] > room)]
    return out


def _shapes(
    positions: Any, cell: Any = None, cutoff2: Any = None, target_indices: Any = None, **options: Any
) -> list[Shape]:
    n = (positions if target_indices is None else target_indices).shape[0]
    rooms = rooms_of(1 if cutoff2 is None else 2, **options)
    if None in rooms:
        needed = "coo_capacity" if options.get("return_neighbor_list") else "max_neighbors"
        raise ValueError(
            f"`{needed}` is needed under jit, where shapes must be known. Check for overflow afterwards: "
            "`num_neighbors` counts all neighbors, also those that do not fit"
        )
    of_lists = [types_of_list(n, room, positions.dtype, cell is not None, options).values() for room in rooms]
    return list(itertools.chain(*of_lists))


def _checked(**arguments: Any) -> Any:
    declared = _shapes(**arguments)  # first, since it names the sizes that are missing
    return checked_shapes(_search, lambda **_: declared, **arguments)


_bridge = Bridge(_search, _checked, name="neighbor_list", only_reads=True, fill=_fill)


def neighbor_list(
    positions: jax.Array,
    cutoff: float | None = None,
    cell: jax.Array | None = None,
    pbc: jax.Array | None = None,
    batch_idx: jax.Array | None = None,
    batch_ptr: jax.Array | None = None,
    cutoff2: float | None = None,
    half_fill: bool = False,
    fill_value: int | None = None,
    return_neighbor_list: bool = False,
    method: str | None = None,
    wrap_positions: bool = True,
    *,
    grid_policy: str = "configured",
    state: "NeighborListState | None" = None,
    **options: Any,
) -> Any:
    """Find all pairs of atoms closer than ``cutoff``, each with the image of the cell that the neighbor is in.

    Outside of ``jit`` the list is exact: if ``max_neighbors`` or ``coo_capacity`` is too small, the result is larger,
    with a `NeighborListWarning`. Inside of ``jit`` shapes must be known: give ``max_neighbors``, or for a list of pairs
    ``coo_capacity``, and check for overflow afterwards. A `NeighborListState` keeps track of overflow.

    Parameters
    ----------
    positions : (n_atoms, 3) array, float32 or float64, length
    cutoff : float, length
        Required unless ``state`` is given.
    cell : (3, 3) or (n_systems, 3, 3) array, length, optional
    pbc : (3,) or (n_systems, 3) bool array, optional
        True along all axes by default.
    batch_idx : (n_atoms,) int32 array, optional
        System of each atom, in any order.
    batch_ptr : (n_systems + 1,) int32 array, optional
    cutoff2, half_fill, fill_value, return_neighbor_list, method
        As in `nvalchemiops.torch.neighbors.neighbor_list`, with the same conventions.
    wrap_positions, grid_policy
        Without effect.
    state : NeighborListState, optional
        From `prepare_neighbor_list`. It has the sizes, and replaces arguments that are not given.
    **options
        ``max_neighbors`` (``max_neighbors1``, ``max_neighbors2``): width of the matrix, static. ``coo_capacity``:
        capacity of a list of pairs, static. ``return_distances``, ``return_vectors``: differentiable to any order.
        ``target_indices``: rows for these atoms only. ``rebuild_flags`` (n_systems,) bool: search only these systems,
        and copy the rows of the others from ``neighbor_matrix``, ``num_neighbors``, ``neighbor_matrix_shifts``. Options
        without effect in torch have none here.

    Returns
    -------
    neighbor_matrix : (n_atoms, width) int32 array
        Padded with ``fill_value``. With ``return_neighbor_list``, ``neighbor_list`` (2, n_pairs) instead.
    num_neighbors : (n_atoms,) int32 array
        The number of all neighbors, also of those that do not fit; 2**31 - 1 if the position or cell is unusable, or
        the system does not exist. With ``return_neighbor_list``, ``neighbor_ptr`` (n_atoms + 1,) instead.
    shifts : (n_atoms, width, 3) or (n_pairs, 3) int32 array
        Only with a cell.
    distances, vectors
        If requested. A list of pairs with a ``coo_capacity`` is followed by ``num_neighbors`` and a bool that says
        whether pairs are missing because they did not fit. For two cutoffs all of these come twice. With ``state`` the
        function returns a pair of this tuple and the new state.

    Raises
    ------
    NeighborOverflowError
        Outside of ``jit``: there is not enough memory for a matrix that is wide enough.
    ValueError, TypeError
        A bad argument, named in the message; missing sizes under ``jit``.
    """
    given = dict(locals())  # all arguments, by name
    given |= given.pop("options")
    del given["state"]
    if state is not None:
        return _state_after(state, given)
    if cutoff is None:
        raise ValueError("`cutoff` is needed without `state`")
    return find_neighbors("neighbor_list", given)


# the parameters of nvalchemi-toolkit-ops 0.5.0, in its order; those after the star are keyword-only
_OUT = "neighbor_matrix neighbor_matrix_shifts num_neighbors"
_OUT_TWO = (
    "max_neighbors1 max_neighbors2 half_fill fill_value return_neighbor_list neighbor_matrix1 neighbor_matrix2 "
    "neighbor_matrix_shifts1 neighbor_matrix_shifts2 num_neighbors1 num_neighbors2"
)
_IMAGES = "shift_range_per_dimension num_shifts_per_system max_shifts_per_system"
_SCRATCH = "positions_wrapped_buffer per_atom_cell_offsets_buffer"
_FURTHER = (
    "coo_capacity return_distances return_vectors neighbor_vectors neighbor_distances target_indices pair_fn "
    "pair_params pair_energies pair_forces"
)
_FURTHER_OF_BINS = (
    "target_indices return_vectors return_distances pair_fn pair_params neighbor_vectors neighbor_distances "
    "pair_energies pair_forces coo_capacity"
)
_FLAGS = ("half_fill", "return_neighbor_list", "return_distances", "return_vectors")
_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("positions", "cutoff", "cutoff1", "cutoff2"), inspect.Parameter.empty),
    **dict.fromkeys(_FLAGS, False),
    **{"wrap_positions": True, "strategy": "auto", "atom_centric_path": "auto"},
    **{"graph_mode": "none", "grid_policy": "configured"},
}
"""Defaults other than None."""


def _by_method(name: str, doc: str, parameters: str) -> Any:
    """Make the function ``name``, which finds neighbors by the method in its name."""
    by_position, _, by_keyword = parameters.partition("*")
    kinds = {inspect.Parameter.POSITIONAL_OR_KEYWORD: by_position, inspect.Parameter.KEYWORD_ONLY: by_keyword}
    signature = inspect.Signature(
        [inspect.Parameter(n, kind, default=_DEFAULTS.get(n)) for kind, names in kinds.items() for n in names.split()]
    )

    def call(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        method = "naive" if "naive" in name else "cell_list"
        return find_neighbors(name, {**signature.bind(*args, **kwargs).arguments, "method": method})

    doc = f"{doc}\n\nArguments and results are those of `nvalchemiops.jax.neighbors.neighbor_list`."
    return named(call, name, doc, signature)


naive_neighbor_list = _by_method(
    "naive_neighbor_list",
    "Neighbor list of one system, found by testing all pairs.",
    f"positions cutoff cell pbc max_neighbors half_fill fill_value return_neighbor_list {_OUT} {_IMAGES} "
    f"rebuild_flags wrap_positions inv_cell_buffer {_SCRATCH} strategy * {_FURTHER} inv_cell positions_wrapped "
    "per_atom_cell_offsets graph_mode",
)
batch_naive_neighbor_list = _by_method(
    "batch_naive_neighbor_list",
    "Neighbor list of several systems, found by testing all pairs of each.",
    "positions cutoff batch_idx batch_ptr pbc cell max_neighbors half_fill fill_value return_neighbor_list "
    f"{_OUT} {_IMAGES} max_atoms_per_system rebuild_flags wrap_positions {_SCRATCH} inv_cell_buffer strategy "
    f"* {_FURTHER}",
)
naive_neighbor_list_dual_cutoff = _by_method(
    "naive_neighbor_list_dual_cutoff",
    "Two neighbor lists of one system, found by testing all pairs.",
    f"positions cutoff1 cutoff2 pbc cell {_OUT_TWO} {_IMAGES} rebuild_flags wrap_positions {_SCRATCH} "
    "inv_cell_buffer coo_capacity",
)
batch_naive_neighbor_list_dual_cutoff = _by_method(
    "batch_naive_neighbor_list_dual_cutoff",
    "Two neighbor lists of several systems, found by testing all pairs of each.",
    f"positions cutoff1 cutoff2 batch_idx batch_ptr pbc cell {_OUT_TWO} {_IMAGES} max_atoms_per_system "
    f"rebuild_flags wrap_positions {_SCRATCH} inv_cell_buffer coo_capacity",
)
cell_list = _by_method(
    "cell_list",
    "Neighbor list of one system, its atoms sorted into bins.",
    "positions cutoff cell pbc max_neighbors max_total_cells return_neighbor_list half_fill fill_value strategy "
    "atom_centric_path cells_per_dimension neighbor_search_radius atom_periodic_shifts atom_to_cell_mapping "
    "atoms_per_cell_count cell_atom_start_indices cell_atom_list sorted_positions sorted_atom_periodic_shifts "
    f"{_OUT} graph_mode {_FURTHER_OF_BINS} pair_centric_n_outer * grid_policy",
)
batch_cell_list = _by_method(
    "batch_cell_list",
    "Neighbor list of several systems, their atoms sorted into bins.",
    "positions cutoff cell pbc batch_idx batch_ptr max_neighbors max_total_cells neighbor_matrix_shifts "
    f"return_neighbor_list half_fill fill_value strategy atom_centric_path {_FURTHER_OF_BINS} "
    "pair_centric_total_cells pair_centric_n_outer pair_centric_r_max * grid_policy",
)


# -- states ---------------------------------------------------------------------------------------


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
    sizes: tuple[int, ...]  # width, or capacity, of each list
    num_atoms: int
    num_systems: int
    has_shifts: bool

    def types(self, room: int = 0, dtype: Any = jnp.float32) -> dict[str, Shape]:
        """The arrays of one list."""
        return types_of_list(self.num_atoms, room, dtype, self.has_shifts, self._asdict())


_FIXED = _Search._fields[:8]
"""The fields that are arguments of `neighbor_list`."""


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
    pbc: jax.Array | None = None,
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
    pair_fn: Any = None,
    span_margin: float = 0.0,
    target_indices: jax.Array | None = None,
    strategy: str = "auto",
    atom_centric_path: str = "auto",
    fixed_cell: bool = False,
    **without_effect: Any,
) -> NeighborListState:
    """Prepare sizes of neighbor lists for use inside of ``jit``: the ``state`` of `neighbor_list`.

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
        Capacity of lists of pairs. Required with ``return_neighbor_list`` under ``jit``; otherwise by default a quarter
        more than the present pairs.
    return_vectors, return_distances : bool, optional
    selective : bool, optional
        Whether calls give ``rebuild_flags`` and keep the rows of other systems. A system is always searched the first
        time.
    wrap_positions, atomic_density, max_tiles_per_group, span_margin, strategy, atom_centric_path, fixed_cell
        Without effect.

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
    cutoff = as_static("prepare_neighbor_list: `cutoff`", cutoff)
    cutoff2 = as_static("prepare_neighbor_list: `cutoff2`", cutoff2)
    if format not in (None, "matrix", "coo", "list"):
        raise ValueError(f"`format` must be 'matrix' or 'coo', got {format!r}")
    return_neighbor_list = return_neighbor_list or format in ("coo", "list")
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
        reaches = (cutoff, cutoff2)[:n_lists]
        longest = [find_neighbors("neighbor_list", {**given, "cutoff": r})[0].shape[1] for r in reaches]
        rooms = tuple(capacity_for(n) if return_neighbor_list else n for n in longest)
    rooms = tuple(check_count(size, room) for room in rooms)
    n_atoms = positions.shape[0]
    search = _Search(
        float(cutoff),
        None if cutoff2 is None else float(cutoff2),
        half_fill,
        n_atoms if fill_value is None else int(fill_value),
        method,
        return_neighbor_list,
        return_distances,
        return_vectors,
        selective,
        rooms,
        n_atoms,
        _number_of_systems(arrays),
        cell is not None,
    )
    lists = tuple(_empty(search, room, jnp.asarray(positions).dtype) for room in rooms)
    flags = jnp.zeros(search.num_systems, bool)
    largest = jnp.zeros(search.num_systems, jnp.int32)
    found: dict[str, Any] = {name: arrays.get(name) for name in _SYSTEMS}
    state = NeighborListState(search, lists=lists, largest=largest, initialized=flags, valid=~flags, **found)
    # inside of shard_map the next state varies over the mesh axes of the positions, and `scan` needs equal types
    leaves, tree = jax.tree.flatten(state)
    return jax.tree.unflatten(tree, vary_alike([positions, *leaves])[1:])


def _number_of_systems(arrays: Mapping[str, Any]) -> int:
    cell, pointers, batch_idx = (arrays.get(name) for name in ("cell", "batch_ptr", "batch_idx"))
    if pointers is not None:
        return int(pointers.shape[0]) - 1
    if cell is not None and cell.ndim == 3 and (cell.shape[0] > 1 or batch_idx is None):
        return int(cell.shape[0])
    if batch_idx is None:
        return 1
    if is_traced(batch_idx):
        raise ValueError("`batch_ptr` is needed under jit to know the number of systems, unless each has a cell")
    return int(np.asarray(batch_idx).max(initial=-1)) + 1


def capacity_for(n_pairs: int) -> int:
    """The capacity of a list of this many pairs, with room for some more."""
    return n_pairs + max(n_pairs // 4, 4)


def _empty(search: _Search, room: int, dtype: Any) -> tuple[Any, ...]:
    first, *others = search.types(room, dtype).values()
    return (jnp.full(first.shape, search.fill_value, first.dtype), *[jnp.zeros(t.shape, t.dtype) for t in others])


def _state_after(state: Any, given: Mapping[str, Any]) -> tuple[tuple[Any, ...], NeighborListState]:
    """The lists for a call with ``state`` and the arguments ``given``, and the next state."""
    if not isinstance(state, NeighborListState):
        raise TypeError(f"`state` must be a NeighborListState from prepare_neighbor_list, got {type(state).__name__}")
    search, given = state.search, {**given, "positions": as_array("positions", given["positions"])}
    _check_against(search, given)
    if (given["cell"] is not None) != search.has_shifts and given["cell"] is not None:
        raise ValueError("`cell` is given, but `state` was prepared without one")
    arguments = {name: getattr(state, name) if given.get(name) is None else given[name] for name in _SYSTEMS}
    arguments |= {"positions": given["positions"], **{name: getattr(search, name) for name in _FIXED}}
    two = len(search.sizes) == 2
    if search.return_neighbor_list:
        arguments["coo_capacity"] = search.sizes if two else search.sizes[0]
    else:
        names = ("max_neighbors1", "max_neighbors2") if two else ("max_neighbors",)
        arguments |= dict(zip(names, search.sizes))
    if search.selective:
        # a system that was never searched has no rows to keep
        arguments["rebuild_flags"] = as_array("rebuild_flags", given["rebuild_flags"]) | ~state.initialized
        for number, one in enumerate(state.lists):
            suffix = str(number + 1) if two else ""
            arguments |= {name + suffix: value for name, value in zip(search.types(), one)}
    # a traced state has fixed sizes; outside of `jit` they grow
    found = find_neighbors("neighbor_list", arguments, declared=is_traced(state))
    per_list = len(found) // len(search.sizes)
    lists = tuple(found[i * per_list : (i + 1) * per_list] for i in range(len(search.sizes)))
    search = search._replace(sizes=tuple(one[0].shape[1] for one in lists))
    largest, fits = _occupancy(search, lists, arguments)
    used: dict[str, Any] = {name: arguments[name] for name in _SYSTEMS}
    after = dataclasses.replace(
        state,
        search=search,
        **used,
        lists=lists,
        largest=jnp.maximum(state.largest, largest),
        initialized=jnp.ones_like(state.initialized),
        valid=state.valid & fits,
    )
    return found, after


_WITH_STATE = frozenset({"positions", "rebuild_flags", *_SYSTEMS, *_FIXED})
"""Arguments of `neighbor_list` that may be given with a state."""


def _check_against(search: _Search, given: Mapping[str, Any]) -> None:
    """Raise unless the arguments of a call agree with the settings of the state."""
    if tuple(given["positions"].shape) != (search.num_atoms, 3):
        raise ValueError(
            f"`positions` have shape {tuple(given['positions'].shape)}, but `state` is for ({search.num_atoms}, 3)"
        )
    for name in ("cutoff", "cutoff2", "fill_value", "method"):
        value = given.get(name)
        if value is not None and as_static(f"neighbor_list: `{name}` with `state`", value) != getattr(search, name):
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
            systems = arguments["batch_idx"]
            if systems is None:
                pointers = arguments["batch_ptr"]
                systems = jnp.searchsorted(pointers[1:], jnp.arange(search.num_atoms), side="right")
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
        A position or a cell was not finite.
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
        raise ValueError(f"a position or the cell of system {system} was not finite, or the cell has no volume")
    error = NeighborOverflowError(room, needed, system)
    if state.search.return_neighbor_list:
        error.args = (f"`coo_capacity` = {room} is too small: there were {needed} pairs",)
    raise error
