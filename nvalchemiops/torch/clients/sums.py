"""Sums over segments and tests of neighbor lists on Warp arrays; see `nvalchemiops.torch.segment_ops`."""

from typing import Any

import torch

from nvalchemiops.torch import segment_ops
from nvalchemiops.torch.clients.arrays import on_arrays
from nvalchemiops.torch.neighbors.rebuild_detection import stale_systems


@on_arrays("out")
def segmented_sum(values: torch.Tensor, idx: torch.Tensor, out: torch.Tensor) -> None:
    """Write the sum of each segment into ``out``."""
    if values.is_floating_point():
        out.copy_(segment_ops.segmented_sum(values, idx, out.shape[0]))
    else:
        out.zero_().index_add_(0, idx, values)


@on_arrays("out")
def segmented_mean(
    values: torch.Tensor, idx: torch.Tensor, sums: torch.Tensor, counts: torch.Tensor, out: torch.Tensor
) -> None:
    """Write sums, numbers of values and means of each segment; the mean of an empty one is zero."""
    sums.copy_(segment_ops.segmented_sum(values, idx, out.shape[0]))
    counts.zero_().index_add_(0, idx, counts.new_ones(idx.shape))
    out.copy_(sums / counts.clamp(min=1).reshape(-1, *[1] * (sums.ndim - 1)))


@on_arrays("out")
def segmented_max(values: torch.Tensor, idx: torch.Tensor, out: torch.Tensor) -> None:
    """Raise ``out`` to the largest value of each segment; an empty one leaves it as it is."""
    _extreme(values, idx, out, "amax")


@on_arrays("out")
def segmented_min(values: torch.Tensor, idx: torch.Tensor, out: torch.Tensor) -> None:
    """Lower ``out`` to the smallest value of each segment; an empty one leaves it as it is."""
    _extreme(values, idx, out, "amin")


def _extreme(values: torch.Tensor, idx: torch.Tensor, out: torch.Tensor, reduce: str) -> None:
    places = idx.to(torch.int64).reshape(-1, *[1] * (values.ndim - 1)).expand(values.shape)
    out.scatter_reduce_(0, places, values, reduce)


@on_arrays("rebuild_flags")
def check_batch_neighbor_list_rebuild(
    reference_positions: torch.Tensor,
    current_positions: torch.Tensor,
    batch_idx: torch.Tensor,
    skin_distance_threshold: float,
    rebuild_flags: torch.Tensor,
    wp_dtype: Any = None,
    update_reference_positions: bool = False,
    cell: torch.Tensor | None = None,
    cell_inv: torch.Tensor | None = None,
    pbc: torch.Tensor | None = None,
) -> None:
    """Set the flags (n_systems,) of systems whose list is stale: `batch_neighbor_list_needs_rebuild`. Others keep them.

    ``wp_dtype`` is known from the arrays.
    """
    lattice, batch = (cell, cell_inv, pbc), (batch_idx, rebuild_flags.shape[0])
    stale = stale_systems(
        reference_positions, current_positions, skin_distance_threshold, update_reference_positions, lattice, batch
    )
    rebuild_flags.logical_or_(stale)


__all__ = [
    "check_batch_neighbor_list_rebuild",
    "segmented_max",
    "segmented_mean",
    "segmented_min",
    "segmented_sum",
]
