"""Neighbor lists for JAX arrays: exact outside of ``jit``, with a declared size inside of it.

`nvalchemiops.jax.neighbors.states` keeps lists of a fixed size for use inside of ``jit`` and ``scan``.
"""

import contextlib
import inspect
from typing import Any

import jax

from nvalchemiops.jax.dtypes import Pbc
from nvalchemiops.jax.neighbors.search import find_neighbors
from nvalchemiops.jax.neighbors.states import NeighborListState, state_after
from nvalchemiops.jax.operators import bound_arguments, named
from nvalchemiops.jax.utils import is_traced


def neighbor_list(
    positions: jax.Array,
    cutoff: float | None = None,
    cell: jax.Array | None = None,
    pbc: Pbc | None = None,
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
    """Find all pairs of atoms closer than ``cutoff``, each with the periodic image of the neighbor.

    Outside of ``jit`` the list is exact: if ``max_neighbors`` or ``coo_capacity`` is too small, the result is larger,
    with a `NeighborListWarning`. Inside of ``jit`` shapes must be known: give ``max_neighbors``, or for a list of pairs
    ``coo_capacity``, and check for overflow afterwards. A `NeighborListState` keeps track of overflow. Without
    ``max_neighbors`` the width is `estimate_max_neighbors` of the larger cutoff, with a `NeighborListWarning`.

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
        From `prepare_neighbor_list`. It has the sizes, and values for arguments that are not given.
    **options
        ``max_neighbors`` (``max_neighbors1``, ``max_neighbors2``): width of the matrix, static. ``coo_capacity``:
        capacity of a list of pairs, static. ``return_distances``, ``return_vectors``: differentiable to any order.
        ``target_indices``: rows for these atoms only. ``rebuild_flags`` (n_systems,) bool: search only these systems,
        and copy the rows of the others from ``neighbor_matrix``, ``num_neighbors``, ``neighbor_matrix_shifts``. Without
        it memory is not written to, but has the width of the matrix unless that is given, and ``neighbor_distances``
        and ``neighbor_vectors`` request these results. Options without effect in torch have none here.

    Returns
    -------
    neighbor_matrix : (n_atoms, width) int32 array
        Padded with ``fill_value``. With ``return_neighbor_list``, ``neighbor_list`` (2, n_pairs) instead.
    num_neighbors : (n_atoms,) int32 array
        The number of all neighbors, including neighbors that do not fit; 2**31 - 1 if the position or cell is unusable,
        or the system does not exist. With ``return_neighbor_list``, ``neighbor_ptr`` (n_atoms + 1,) instead.
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
        A bad argument, named in the message; under ``jit`` a missing ``coo_capacity``, or a missing ``max_neighbors``
        if the cutoff is traced.
    """
    given = dict(locals())  # all arguments, by name
    given |= given.pop("options")
    del given["state"]
    if state is not None:
        # arrays that are no tracers have values, also in a function that JAX is tracing
        with contextlib.nullcontext() if is_traced((state, given)) else jax.ensure_compile_time_eval():
            return state_after(state, given)
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
        return find_neighbors(name, {**bound_arguments(name, signature, args, kwargs).arguments, "method": method})

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
