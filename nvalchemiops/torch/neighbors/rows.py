"""The one form of a neighbor list that kernels read: rows ``begin[i] .. end[i]`` of flat ``index`` and ``shift``."""

from typing import Any, NamedTuple

import torch


class Rows(NamedTuple):
    """Rows of neighbors of all atoms, from either public format.

    Attributes
    ----------
    begin, end : (n_atoms,) int32 tensor
    index : (n_slots,) int32 tensor
    shift : (n_slots, 3) int32 tensor
    padding : int
        Entries of ``index`` that stand for no neighbor, whatever the number.
    """

    begin: torch.Tensor
    end: torch.Tensor
    index: torch.Tensor
    shift: torch.Tensor
    padding: int

    def pairs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Atoms i, neighbors j (int64) and shifts of all slots that are no padding."""
        atoms = torch.arange(self.begin.shape[0], device=self.begin.device)
        i = torch.repeat_interleave(atoms, self.end - self.begin)
        kept = (self.index != self.padding).nonzero().squeeze(1)
        return i[kept], self.index[kept].long(), self.shift[kept]


def rows_from_matrix(
    neighbor_matrix: Any, neighbor_matrix_shifts: Any, fill_value: int | None, n_atoms: int
) -> Rows:
    """Rows of a neighbor matrix (n_atoms, width); padding equals ``fill_value``, n_atoms by default."""
    _check("neighbor_matrix", neighbor_matrix, (n_atoms, None))
    width = neighbor_matrix.shape[1]
    _check("neighbor_matrix_shifts", neighbor_matrix_shifts, (n_atoms, width, 3))
    begin = torch.arange(n_atoms, dtype=torch.int32, device=neighbor_matrix.device) * width
    return Rows(
        begin,
        begin + width,
        _int32(neighbor_matrix).reshape(-1),
        _int32(neighbor_matrix_shifts).reshape(-1, 3),
        n_atoms if fill_value is None else int(fill_value),
    )


def rows_from_list(neighbor_list: Any, neighbor_ptr: Any, neighbor_shifts: Any, n_atoms: int) -> Rows:
    """Rows of a list of pairs (2, n_pairs) sorted by the first atom; ``neighbor_ptr`` is counted if absent."""
    _check("neighbor_list", neighbor_list, (2, None))
    n_pairs = neighbor_list.shape[1]
    _check("neighbor_shifts", neighbor_shifts, (n_pairs, 3))
    first = neighbor_list[0]
    if n_pairs and bool((first.diff() < 0).any()):
        raise ValueError("`neighbor_list` must be sorted by its first row")
    atoms = torch.arange(n_atoms + 1, dtype=first.dtype, device=first.device)
    counted = torch.searchsorted(first.contiguous(), atoms).to(torch.int32)
    if neighbor_ptr is not None:
        _check("neighbor_ptr", neighbor_ptr, (n_atoms + 1,))
        if not torch.equal(_int32(neighbor_ptr), counted):
            raise ValueError("`neighbor_ptr` does not fit the first row of `neighbor_list`")
    return Rows(counted[:-1], counted[1:], _int32(neighbor_list[1]), _int32(neighbor_shifts), -1)


def check_full_list(rows: Rows, n_atoms: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The pairs of the rows; raise if an index is out of range, or if the list holds one direction of pairs only.

    A gather kernel needs both directions of each pair, so a half list would give wrong results. Reads values.
    """
    i, j, shift = rows.pairs()
    if j.numel() and not (0 <= int(j.min()) and int(j.max()) < n_atoms):
        raise ValueError(f"neighbor indices must be in 0 .. {n_atoms - 1}, or equal to the fill value for padding")
    # the code of a pair's direction: by atoms, then by image
    direction = torch.sign(j - i)
    for a in range(3):
        direction = torch.where(direction == 0, torch.sign(shift[:, a]), direction)
    if int(direction.sum()) != 0:
        raise ValueError(
            "the neighbor list is not full: it must hold both (i, j, S) and (j, i, -S) of each pair (half_fill=False)"
        )
    return i, j, shift


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
