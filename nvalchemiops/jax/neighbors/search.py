"""The neighbor search for JAX: torch's search, called through a bridge with declared sizes."""

import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch

from nvalchemiops.compat.ignored_arguments import OPTIONAL_ELSEWHERE, WITHOUT_EFFECT
from nvalchemiops.jax.bridge import Bridge
from nvalchemiops.jax.operators import (
    Shape,
    as_array,
    as_number,
    as_static,
    checked_shapes,
    from_torch_values,
    in_terms_of_jax,
    to_torch,
)
from nvalchemiops.jax.utils import is_traced
from nvalchemiops.neighbors.neighbor_utils import estimate_max_neighbors
from nvalchemiops.notices import NeighborListWarning, notify
from nvalchemiops.torch import neighbors
from nvalchemiops.torch.checks import check_count

SCRATCH = (
    WITHOUT_EFFECT
    | OPTIONAL_ELSEWHERE
    | {"max_total_cells", "inv_cell", "positions_wrapped", "per_atom_cell_offsets", "sorted_atom_periodic_shifts"}
    | {"pair_centric_total_cells", "pair_centric_n_outer", "pair_centric_r_max", "graph_mode", "wrap_positions"}
)
"""Parameters of other libraries that JAX clients may pass. Most have no effect; parameters that would change results
must be None."""

SYSTEMS = ("cell", "pbc", "batch_idx", "batch_ptr")


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
        rooms = coo_capacity if isinstance(coo_capacity, tuple) else (coo_capacity,) * n_lists
        if len(rooms) != n_lists:
            raise ValueError(f"`coo_capacity` must be one int, or one for each cutoff, of which there are {n_lists}")
        return rooms
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
"""Memory for results in torch. In JAX, where arrays are immutable, these are earlier results: see ``rebuild_flags``."""


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
        if key.startswith("cutoff"):
            # lists are piecewise constant in the cutoff
            arguments[key] = jax.lax.stop_gradient(value) if is_traced(value) else as_number(f"{name}: `{key}`", value)
        else:
            arguments[key] = as_array(key, value) if is_array else as_static(f"{name}: `{key}`", value)
    arguments = _with_widths(arguments)
    if "coo_capacity" in arguments:
        if not arguments.get("return_neighbor_list"):
            raise ValueError(
                f"{name}: `coo_capacity` is the capacity of a list of pairs: it needs return_neighbor_list=True"
            )
        for room in rooms_of(2 if "cutoff2" in arguments else 1, True, arguments["coo_capacity"]):
            check_count("coo_capacity", room)
    if declared or is_traced(arguments):
        if "cutoff2" in arguments and "max_neighbors" in arguments:
            arguments.setdefault("max_neighbors2", arguments["max_neighbors"])
        return tuple(_bridge(**_with_estimated_widths(arguments), check=False))
    with in_terms_of_jax():
        return tuple(from_torch_values(_search(**{key: to_torch(value) for key, value in arguments.items()})))


def _columns(name: str, memory: Any) -> int:
    if memory.ndim < 2:
        raise ValueError(f"`{name}` must have a row for each atom and a column for each neighbor, got {memory.shape}")
    return int(memory.shape[1])


def _with_widths(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with what memory for results asks for: widths, distances and vectors.

    The memory is kept only if some rows are reused.
    """
    found = dict(arguments)
    if "cutoff1" in found:
        found["cutoff"] = found.pop("cutoff1")
    for name in ("neighbor_matrix_shifts", "neighbor_matrix"):  # the width of a matrix has precedence, as in torch
        for suffix in ("", "1", "2"):
            before = found.get(f"{name}{suffix}")
            if before is not None:
                found[f"max_neighbors{suffix}"] = _columns(f"{name}{suffix}", before)
    if "max_neighbors1" in found and "max_neighbors1" not in arguments and "max_neighbors" in found:
        found.setdefault("max_neighbors2", found.pop("max_neighbors"))
    for kind in ("distances", "vectors"):
        memory = found.get(f"neighbor_{kind}")
        if memory is not None:
            found[f"return_{kind}"] = True
            if not (found.get("return_neighbor_list") or "cutoff2" in found):
                found.setdefault("max_neighbors", _columns(f"neighbor_{kind}", memory))
    if "rebuild_flags" not in found:
        found = {key: value for key, value in found.items() if key.rstrip("12") not in _OUTPUTS}
    return found


def _with_estimated_widths(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with widths estimated from the cutoffs, as in nvalchemi-toolkit-ops, where none are given."""
    if arguments.get("return_neighbor_list") or "nearest" in arguments:
        return arguments
    names = ("max_neighbors1", "max_neighbors2") if "cutoff2" in arguments else ("max_neighbors",)
    missing = [name for name in names if arguments.get("max_neighbors", arguments.get(name)) is None]
    cutoffs = [arguments[name] for name in ("cutoff", "cutoff2") if name in arguments]
    if not missing or len(cutoffs) < len(names) or is_traced(cutoffs):
        return arguments
    width = estimate_max_neighbors(max(map(float, cutoffs)))
    given = ", ".join(f"`{name}`" for name in missing)
    notify(
        f"{given} not given under jit, where shapes must be known: the matrix has {width} columns, an estimate by "
        f"`estimate_max_neighbors`. Give {given}, or check that `num_neighbors`, which counts all neighbors, is not "
        "larger",
        NeighborListWarning,
        kind="estimated width",
    )
    return arguments | dict.fromkeys(missing, width)


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


def capacity_for(n_pairs: int) -> int:
    """The capacity of a list of this many pairs, with room for some more pairs."""
    return n_pairs + max(n_pairs // 4, 4)


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
        rows = pairs.new_full((2, room), padding)
        rows[:, :n] = pairs[:, :n]
        out += [rows, pointers.clamp(max=room)]
        out += [torch.cat([x[:n], x.new_zeros((room - n, *x.shape[1:]))]) for x in others]
        out += [pointers.diff(), pairs.new_full((), pairs.shape[1] > room, dtype=torch.bool)]
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
