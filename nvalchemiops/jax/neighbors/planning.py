"""Sizes of neighbor lists, and checks whether they must be rebuilt, for JAX arrays."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from nvalchemiops.jax.dtypes import Pbc
from nvalchemiops.jax.operators import Shape, as_array, eager, operator
from nvalchemiops.torch.neighbors import formats, planning, rebuild_detection

neighbor_list_needs_rebuild: Any = operator(
    rebuild_detection.neighbor_list_needs_rebuild,
    lambda **_: Shape((1,), jnp.bool_),  # a threshold that is traced is read
    without=("update_reference_positions",),
)
check_neighbor_list_rebuild_needed: Any = eager(
    rebuild_detection.check_neighbor_list_rebuild_needed, without=("update_reference_positions",)
)
get_neighbor_list_from_neighbor_matrix: Any = eager(formats.get_neighbor_list_from_neighbor_matrix)
suggest_neighbor_list_method: Any = eager(planning.suggest_neighbor_list_method)


@functools.wraps(planning.estimate_batch_cell_list_sizes)  # whose name is in messages
def _bins_of_cells(*args: Any, **kwargs: Any) -> Any:
    return planning.bins_of_cells(*args, **kwargs)


_sizes: Any = eager(_bins_of_cells)


def estimate_cell_list_sizes(
    positions: jax.Array, cell: jax.Array, cutoff: float, pbc: Pbc | None = None, buffer_factor: float = 1.5
) -> tuple[int, jax.Array, jax.Array]:
    """The number of bins of a cell list, in all and along each axis, and how many bins a search visits per direction.

    For callers that plan memory. The lists of this library do not need these numbers.

    Parameters
    ----------
    positions : (n_atoms, 3) array
    cell : (3, 3), (1, 3, 3) or, for a batch without systems, (0, 3, 3) array, length
    cutoff : float, length
    pbc : (3,) bool array, optional
    buffer_factor : float, optional
        Factor by which ``max_total_cells`` exceeds the number of bins.

    Returns
    -------
    max_total_cells : int
    cells_per_dimension, neighbor_search_radius : (3,) int32 array
    """
    total, cells, radius = estimate_batch_cell_list_sizes(
        positions, cell=cell, cutoff=cutoff, pbc=pbc, buffer_factor=buffer_factor
    )
    if len(cells) > 1:
        raise ValueError(planning.SEVERAL_CELLS)
    return total, cells.max(0, initial=0), radius.max(0, initial=0)  # of one system, or none


def estimate_batch_cell_list_sizes(
    positions: jax.Array,
    batch_ptr: jax.Array | None = None,
    batch_idx: jax.Array | None = None,
    cell: jax.Array | None = None,
    cutoff: float = 5.0,
    pbc: Pbc | None = None,
    buffer_factor: float = 1.5,
    *,
    capacity_strategy: str = "volume",
) -> tuple[int, jax.Array, jax.Array]:
    """`estimate_cell_list_sizes` for cells (n_systems, 3, 3): bins of all systems, and numbers (n_systems, 3)."""
    if cell is None:
        raise ValueError("`cell` is needed: without it bins follow the atoms")
    cells = jnp.reshape(jnp.asarray(cell), (-1, 3, 3))
    axes = jnp.ones((len(cells), 3), bool) if pbc is None else jnp.broadcast_to(as_array("pbc", pbc), (len(cells), 3))
    total, per_dimension, radius = _sizes(cells, axes, cutoff)
    return int(total * buffer_factor), per_dimension, radius
