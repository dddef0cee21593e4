"""Neighbor lists of JAX arrays: exact outside of ``jit``, of a declared width inside of it."""

import inspect
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import torch

from nvalchemiops.compat.ignored_arguments import OPTIONAL_ELSEWHERE
from nvalchemiops.jax.bridge import Bridge
from nvalchemiops.jax.neighbors.state import (
    SCRATCH,
    NeighborListState,
    capacity_for,
    rooms_of,
    state_after,
    types_of_list,
)
from nvalchemiops.jax.operators import (
    Shape,
    as_array,
    as_static,
    checked_shapes,
    from_torch_values,
    named,
    to_torch,
)
from nvalchemiops.jax.utils import is_traced
from nvalchemiops.notices import NeighborListWarning, notify
from nvalchemiops.torch import neighbors
from nvalchemiops.torch.checks import check_count

_ARRAYS = ("positions", "cell", "pbc", "batch_idx", "batch_ptr", "rebuild_flags", "target_indices")

_OUTPUTS = ("neighbor_matrix", "num_neighbors", "neighbor_matrix_shifts", "neighbor_distances", "neighbor_vectors")
"""Memory for results in torch; in JAX, where arrays are immutable, results of before: see ``rebuild_flags``."""


def find_neighbors(name: str, given: Mapping[str, Any], declared: bool = False) -> tuple[Any, ...]:
    """The lists that a function of the arguments ``given`` returns, for a caller called ``name``.

    Under ``jit``, or where ``declared`` says so, lists have the declared width or capacity, and counts tell what did
    not fit. Elsewhere they are wide enough.
    """
    arguments: dict[str, Any] = {}
    for key, value in given.items():
        if value is None or key in SCRATCH:
            if value is not None and key in OPTIONAL_ELSEWHERE:
                raise NotImplementedError(
                    f"{name}: `{key}` is not there; `PairPotential` sums over the pairs of a list"
                )
            continue
        is_array = key in _ARRAYS or key.rstrip("12") in _OUTPUTS
        if key.startswith("cutoff") and is_traced(value):
            arguments[key] = jax.lax.stop_gradient(value)  # by which lists do not change, but for whole neighbors
        else:
            arguments[key] = as_array(key, value) if is_array else as_static(f"{name}: `{key}`", value)
    arguments = _with_widths(arguments)
    if "coo_capacity" in arguments:
        _check_capacity(name, arguments)
    if declared or is_traced(arguments):
        if "cutoff2" in arguments and "max_neighbors" in arguments:
            arguments.setdefault("max_neighbors2", arguments["max_neighbors"])
        return tuple(_bridge(**arguments, check=False))
    return tuple(from_torch_values(_search(**{key: to_torch(value) for key, value in arguments.items()})))


def _check_capacity(name: str, arguments: Mapping[str, Any]) -> None:
    if not arguments.get("return_neighbor_list"):
        raise ValueError(f"{name}: `coo_capacity` is the room of a list of pairs: it needs return_neighbor_list=True")
    capacity = arguments["coo_capacity"]
    for room in capacity if isinstance(capacity, tuple) else (capacity,):
        check_count("coo_capacity", room)


def _with_widths(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with the widths of matrices of before; these themselves are needed for rows that stay."""
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
    """The torch function; lists of a declared capacity end with padding, or are cut there without ``check``."""
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
    """Write a matrix, counts and shifts into ``results``; False if these are not all that is asked for."""
    if any(arguments.get(name) is not None and arguments[name] is not False for name in _OTHER_FORMS):
        return False
    for key in ("cutoff", "cutoff1"):
        if isinstance(arguments.get(key), torch.Tensor):
            arguments[key] = arguments[key].item()
    neighbors.neighbor_list(**{**arguments, **dict(zip(_OUTPUTS, results))})
    return True


def _padded(found: list[torch.Tensor], capacity: Any, arguments: dict[str, Any], is_cut: bool) -> list[torch.Tensor]:
    """Lists of pairs filled up to ``capacity``: list, pointers, shifts, ..., counts, whether pairs were cut there."""
    n_lists = 2 if "cutoff2" in arguments else 1
    padding = arguments.get("fill_value", arguments["positions"].shape[0])
    per_list = len(found) // n_lists
    out = []
    for number, room in enumerate(rooms_of(n_lists, True, capacity)):
        pairs, pointers, *others = found[number * per_list : (number + 1) * per_list]
        if pairs.shape[1] > room and not is_cut:
            notify(
                f"`coo_capacity` = {room}, but there are {pairs.shape[1]} pairs: the list returned has room for all",
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
            f"`{needed}` is needed under jit, where shapes must be known; then look for overflow: `num_neighbors` "
            "counts all neighbors, also those without room"
        )
    of_lists = [types_of_list(n, room, positions.dtype, cell is not None, options).values() for room in rooms]
    return list(itertools.chain(*of_lists))


def _checked(**arguments: Any) -> Any:
    declared = _shapes(**arguments)  # first, since it names the sizes that are missing
    return checked_shapes(_search, lambda **_: declared, arguments)


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
    state: NeighborListState | None = None,
    **options: Any,
) -> Any:
    """Find all pairs of atoms closer than ``cutoff``, each with the image of the cell that the neighbor is in.

    Outside of ``jit`` the list is exact: with ``max_neighbors`` or ``coo_capacity`` too small it is larger than that,
    and a `NeighborListWarning` says so. Inside shapes must be known: give ``max_neighbors``, or for a list of pairs
    ``coo_capacity``, and look for overflow afterwards. A `NeighborListState` keeps track of it.

    Parameters
    ----------
    positions : (n_atoms, 3) array, float32 or float64, length
    cutoff : float, length
        Needed without ``state``.
    cell : (3, 3) or (n_systems, 3, 3) array, length, optional
    pbc : (3,) or (n_systems, 3) bool array, optional
        True along all axes by default.
    batch_idx : (n_atoms,) int32 array, optional
        System of each atom, in any order.
    batch_ptr : (n_systems + 1,) int32 array, optional
    cutoff2, half_fill, fill_value, return_neighbor_list, method
        As in `nvalchemiops.torch.neighbors.neighbor_list`, to which all conventions are common.
    wrap_positions, grid_policy
        Without effect.
    state : NeighborListState, optional
        From `prepare_neighbor_list`: sizes, and what is left out of the other arguments.
    **options
        ``max_neighbors`` (``max_neighbors1``, ``max_neighbors2``): width of the matrix, static. ``coo_capacity``: room
        for pairs, static. ``return_distances``, ``return_vectors``: differentiable to any order. ``target_indices``:
        rows for these atoms only. ``rebuild_flags`` (n_systems,) bool: search these systems only, and copy the rows of
        the others from ``neighbor_matrix``, ``num_neighbors``, ``neighbor_matrix_shifts``. What has no effect in torch
        has none here.

    Returns
    -------
    neighbor_matrix : (n_atoms, width) int32 array
        Padded with ``fill_value``. With ``return_neighbor_list`` instead ``neighbor_list`` (2, n_pairs).
    num_neighbors : (n_atoms,) int32 array
        All neighbors are counted, also those without room; 2**31 - 1 where the position or cell is unusable, or the
        system does not exist. Instead ``neighbor_ptr`` (n_atoms + 1,) with a list of pairs.
    shifts : (n_atoms, width, 3) or (n_pairs, 3) int32 array
        With a cell only.
    distances, vectors
        If requested, lists of pairs of ``coo_capacity`` then have ``num_neighbors`` and a bool that says whether pairs
        are missing, for which there was no room. For two cutoffs all of these twice. With ``state`` a pair of this
        tuple and the new state.

    Raises
    ------
    NeighborOverflowError
        Outside of ``jit``: there is no memory for a matrix that is wide enough.
    ValueError, TypeError
        A bad argument, named in the message; sizes that are missing under ``jit``.
    """
    given = {
        "positions": positions,
        "cutoff": cutoff,
        "cell": cell,
        "pbc": pbc,
        "batch_idx": batch_idx,
        "batch_ptr": batch_ptr,
        "cutoff2": cutoff2,
        "half_fill": half_fill,
        "fill_value": fill_value,
        "return_neighbor_list": return_neighbor_list,
        "method": method,
        **options,
    }
    if state is not None:
        return state_after(state, given, find_neighbors)
    if cutoff is None:
        raise ValueError("`cutoff` is needed without `state`")
    return find_neighbors("neighbor_list", given)


# the parameters of nvalchemi-toolkit-ops 0.5.0, in its order; those after the star by keyword only
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
"""Where it is not None."""


def _by_method(name: str, doc: str, parameters: str) -> Any:
    """The function ``name``, which finds neighbors by the method that is in its name."""
    by_position, _, by_keyword = parameters.partition("*")
    kinds = {inspect.Parameter.POSITIONAL_OR_KEYWORD: by_position, inspect.Parameter.KEYWORD_ONLY: by_keyword}
    signature = inspect.Signature(
        [inspect.Parameter(n, kind, default=_DEFAULTS.get(n)) for kind, names in kinds.items() for n in names.split()]
    )

    def call(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        method = "naive" if "naive" in name else "cell_list"
        return find_neighbors(name, {**signature.bind(*args, **kwargs).arguments, "method": method})

    doc = f"{doc}\n\nArguments and results as in `nvalchemiops.jax.neighbors.neighbor_list`."
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
