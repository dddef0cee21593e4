"""Neighbor lists in either public format, as the rows that kernels read (`nvalchemiops.neighbors.rows`)."""

from typing import Any, NamedTuple

import torch
import warp as wp

from nvalchemiops.neighbors import rows as core
from nvalchemiops.torch.autograd import OutputSpec, warp_custom_op
from nvalchemiops.torch.launch import launch


class Rows(NamedTuple):
    """Neighbors of all atoms as flat rows.

    Attributes
    ----------
    begin, end : (n_atoms,) int32 tensor
        Where each atom's row begins and ends.
    neighbor : (n_slots,) int32 tensor
    shift : (n_slots, 3) int32 tensor
    padding : int
        Entries of ``neighbor`` that stand for no neighbor, whatever the number.
    """

    begin: torch.Tensor
    end: torch.Tensor
    neighbor: torch.Tensor
    shift: torch.Tensor
    padding: int


def rows_from_matrix(
    neighbor_matrix: Any, neighbor_matrix_shifts: Any, fill_value: int | None, n_atoms: int
) -> tuple[Rows, torch.Tensor]:
    """Rows of a neighbor matrix (n_atoms, width), padded with ``fill_value`` (n_atoms by default), and no claims."""
    _check("neighbor_matrix", neighbor_matrix, (n_atoms, None))
    width = neighbor_matrix.shape[1]
    _check("neighbor_matrix_shifts", neighbor_matrix_shifts, (n_atoms, width, 3))
    begin = torch.arange(n_atoms, dtype=torch.int32, device=neighbor_matrix.device) * width
    index = _int32(neighbor_matrix).reshape(-1)
    padding = n_atoms if fill_value is None else int(fill_value)
    return Rows(begin, begin + width, index, _int32(neighbor_matrix_shifts).reshape(-1, 3), padding), index[:0]


def rows_from_list(
    neighbor_list: Any, neighbor_ptr: Any, neighbor_shifts: Any, n_atoms: int
) -> tuple[Rows, torch.Tensor]:
    """Rows of a list of pairs (2, n_pairs), and the atom that each pair claims to belong to.

    ``neighbor_ptr`` is counted if absent. Whether the claims hold, `inspect_rows` finds out.
    """
    _check("neighbor_list", neighbor_list, (2, None))
    n_pairs = neighbor_list.shape[1]
    _check("neighbor_shifts", neighbor_shifts, (n_pairs, 3))
    first, index = _int32(neighbor_list[0]), _int32(neighbor_list[1])
    if neighbor_ptr is None:
        atoms = torch.arange(n_atoms + 1, dtype=torch.int32, device=first.device)
        ptr = torch.searchsorted(first, atoms, out_int32=True)
    else:
        _check("neighbor_ptr", neighbor_ptr, (n_atoms + 1,))
        ptr = _int32(neighbor_ptr)
    if int(ptr[0]) != 0 or int(ptr[-1]) != n_pairs:
        raise ValueError(
            f"`neighbor_ptr` must rise from 0 to n_pairs = {n_pairs}, and `neighbor_list` hold atoms 0 .. {n_atoms - 1}"
        )
    return Rows(ptr[:-1], ptr[1:], index, _int32(neighbor_shifts), -1), first


@warp_custom_op(
    "nvalchemiops::inspect_rows",
    outputs=[
        OutputSpec("fault", wp.int32, lambda positions, *_: (positions.shape[0],)),
        OutputSpec("balance", wp.int32, lambda positions, *_: (positions.shape[0],)),
        OutputSpec("reach", wp.float64, lambda positions, *_: (positions.shape[0],)),
    ],
    grad_arrays=(),
    backward="none",
)
def _inspect(
    positions: torch.Tensor,
    cell: torch.Tensor,
    batch_idx: torch.Tensor,
    row_begin: torch.Tensor,
    row_end: torch.Tensor,
    index: torch.Tensor,
    shift: torch.Tensor,
    padding: int,
    first: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n_atoms = positions.shape[0]
    report = (batch_idx.new_empty(n_atoms), batch_idx.new_empty(n_atoms), positions.new_empty(n_atoms))
    inputs = [positions, cell, batch_idx, row_begin, row_end, index, shift, padding, first]
    launch(core.inspect_rows(), n_atoms, inputs, report)
    return report


def inspect_rows(
    rows: Rows, first: torch.Tensor, positions: torch.Tensor, cell: torch.Tensor, batch_idx: torch.Tensor
) -> torch.Tensor:
    """Largest distance (n_atoms,) in each row of a full list. Reads values on the host.

    Raises
    ------
    ValueError
        An index is out of range or in another system, pairs are not sorted by atom, or the list does not hold both
        directions of each pair: a gather kernel would give wrong results.
    """
    wide = positions.detach().double(), cell.detach().double()
    fault, balance, reach = _inspect(*wide, batch_idx, *rows, first)
    worst = int(fault.max()) if fault.numel() else 0
    if worst == core.OUT_OF_RANGE:
        raise ValueError(
            f"`neighbor_list` or `neighbor_matrix`: indices must be in 0 .. {batch_idx.shape[0] - 1}, or for padding "
            "of a matrix equal to `mask_value`"
        )
    if worst == core.OTHER_SYSTEM:
        raise ValueError("`batch_idx`: the neighbor list joins atoms of different systems")
    if worst == core.UNSORTED:
        raise ValueError("`neighbor_list` must be sorted by its first row, and `neighbor_ptr` must fit that row")
    if int(balance.sum()) != 0:
        raise ValueError(
            "`neighbor_list` or `neighbor_matrix` is not full: it must hold both (i, j, S) and (j, i, -S) of each pair "
            "(half_fill=False)"
        )
    return reach


def _int32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.int32).contiguous()


def _check(name: str, tensor: Any, shape: tuple[int | None, ...]) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"`{name}` must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"`{name}` must be int32 (or int64), got {tensor.dtype}")
    if tensor.ndim != len(shape) or any(s is not None and s != t for s, t in zip(shape, tensor.shape)):
        wanted = ", ".join("any" if s is None else str(s) for s in shape)
        raise ValueError(f"`{name}` must have shape ({wanted}), got {tuple(tensor.shape)}")
