"""Sums over the pairs of the atoms that a rank owns, as one op: values of ghosts are fetched inside of it.

The rows are those of owned atoms. With values of all neighbors, and the weights of their energies among these, a row
has all that a derivative of the sum over the atoms of all ranks by a value of this atom depends on. So the op is closed
under differentiation as `pair_sum` is: gradients of owned atoms are complete, no gradients of ghosts are computed or
sent back, and there are no rows of ghosts. Results of systems are the shares of this rank: half of each of its pairs.
"""

from collections.abc import Sequence
from typing import Any

import torch

from nvalchemiops.torch.autograd import warp_custom_op
from nvalchemiops.torch.distributed.collectives import group_of, refuse_slices
from nvalchemiops.torch.distributed.communication import swap_rows
from nvalchemiops.torch.interactions.pair.op import GRAD_ARRAYS, SPECS, pullback_by, sum_rows_of


def _with_ghosts(
    values: Sequence[torch.Tensor | None], rows: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: int
) -> list[torch.Tensor | None]:
    """Values of owned atoms and ghosts, from those (n_owned,), (n_owned, n) or (n_directions, n_owned, n), or None."""
    columns = []
    for value in values:
        if value is not None:
            chosen = value.index_select(int(value.ndim == 3), rows)
            flat = chosen.unsqueeze(1) if value.ndim == 1 else chosen
            columns.append(flat if value.ndim < 3 else flat.movedim(1, 0).flatten(1))
    arrived = swap_rows(torch.cat(columns, 1), send, receive, group_of(group)).split([c.shape[1] for c in columns], 1)
    of_ghosts = iter(arrived)
    found: list[torch.Tensor | None] = []
    for value in values:
        if value is None:
            found.append(None)
        elif value.ndim == 3:
            found.append(torch.cat([value, next(of_ghosts).unflatten(1, value.shape[::2]).movedim(0, 1)], 1))
        else:
            found.append(torch.cat([value, next(of_ghosts).reshape(-1, *value.shape[1:])]))
    return found


@warp_custom_op(
    "nvalchemiops::pair_sum_on_ranks",
    outputs=SPECS,
    grad_arrays=GRAD_ARRAYS,
    backward=pullback_by(lambda: pair_sum_on_ranks),
    vmap=refuse_slices,
    trusted=True,
)
def pair_sum_on_ranks(
    formula: str,
    outputs: str,
    directions: str,
    positions: torch.Tensor,
    cell: torch.Tensor | None,
    parameters: torch.Tensor | None,
    global_parameters: torch.Tensor | None,
    weights: torch.Tensor | None,
    direction_positions: torch.Tensor | None,
    direction_cell: torch.Tensor | None,
    direction_parameters: torch.Tensor | None,
    direction_global_parameters: torch.Tensor | None,
    direction_weights: torch.Tensor | None,
    batch_idx: torch.Tensor | None,
    n_systems: int,
    row_begin: torch.Tensor | None,
    neighbors: torch.Tensor,
    shifts: torch.Tensor | None,
    width: int,
    padding: int,
    first: torch.Tensor | None,
    species: torch.Tensor | None,
    n_species: int,
    excluded_begin: torch.Tensor | None,
    excluded: torch.Tensor | None,
    excluded_factors: torch.Tensor | None,
    cutoff: float,
    r_switch: float,
    system_of_all: torch.Tensor | None,
    seen: torch.Tensor,
    send: Sequence[int],
    receive: Sequence[int],
    group: int,
) -> tuple[torch.Tensor, ...]:
    """The results of `pair_sum` for owned atoms; gradients by what is the same on all ranks are shares.

    Parameters
    ----------
    formula, ..., r_switch
        As of `pair_sum`, of owned atoms; but neighbors, excluded atoms and ``species`` are those of owned atoms and
        ghosts. Rows after those of owned atoms are not read.
    system_of_all : (n_owned + n_ghosts,) int32 tensor, optional
    seen : (n_sent,) int64 tensor
        Owned atoms whose values are sent, those for rank 0 first.
    send, receive : sequence of int
        How many of them go to each rank, and how many ghosts come from each.
    group : int
        As of `nvalchemiops.torch.distributed.collectives.number_of`.
    """
    of_atoms = (positions, parameters, weights, direction_positions, direction_parameters, direction_weights)
    if direction_weights is not None:
        of_atoms = (*of_atoms[:5], direction_weights.unsqueeze(2))
    x, p, w, along_x, along_p, along_w = _with_ghosts(of_atoms, seen, send, receive, group)
    along_w = None if along_w is None else along_w.squeeze(2)
    given: tuple[Any, ...] = (x, cell, p, global_parameters, w)
    given += (along_x, direction_cell, along_p, direction_global_parameters, along_w)
    others = (system_of_all, row_begin, neighbors, shifts, first, species, excluded_begin, excluded, excluded_factors)
    of_rows = (positions.shape[0], batch_idx, n_systems)
    return sum_rows_of(
        formula, outputs, directions, given + others, of_rows, n_species, width, padding, cutoff, r_switch
    )
