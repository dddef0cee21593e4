"""Entries sorted by row, such as atoms by bin or by system, for bodies of ops (`nvalchemiops.kernels.sorting`)."""

import torch

from nvalchemiops.kernels.simd import WARP
from nvalchemiops.kernels.sorting import ROWS, add_counts, begin_rows
from nvalchemiops.layout import layout
from nvalchemiops.neighbors.grid import end_rows, sort_atoms
from nvalchemiops.torch.launch import launch


def sort_rows(rows: torch.Tensor, n_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The stable order of entries by their ``rows`` (int32), and row pointers (n_rows + 2,), the last one twice."""
    if not layout(rows.device.type).serial:
        in_order, order = torch.sort(rows, stable=True)
        return _pointers(in_order, n_rows + 1, order)
    begin = torch.zeros(n_rows + 2, dtype=torch.int32, device=rows.device)
    order = torch.empty_like(rows)
    launch(sort_atoms(), 1, [rows], [begin, order])
    return order, begin


def pointers_of_sorted(rows: torch.Tensor, n_rows: int) -> torch.Tensor:
    """Row pointers (n_rows + 1,) of ascending ``rows`` (int32)."""
    return _pointers(rows, n_rows, None)[1]


def _pointers(rows: torch.Tensor, n_rows: int, order: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    begin = torch.empty(n_rows + 1, dtype=torch.int32, device=rows.device)
    narrow = torch.empty(0 if order is None else len(order), dtype=torch.int32, device=rows.device)
    launch(begin_rows(), max(len(begin), len(narrow)), [rows, order], [begin, narrow])
    return narrow, begin


def counted_rows(count: torch.Tensor, fault: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pointers (n_rows + 1,) to rows of these counts; and the largest count, their sum and the largest fault (3,)."""
    n_rows, device = len(count), count.device
    if layout(device.type).serial:
        pointers = torch.empty(n_rows + 1, dtype=torch.int32, device=device)
        found = torch.empty(3, dtype=torch.int64, device=device)
        launch(end_rows(), 1, [count, fault], [pointers, found])
        return pointers, found
    pointers = torch.zeros(n_rows + 1, dtype=torch.int32, device=device)
    torch.cumsum(count, 0, dtype=torch.int32, out=pointers[1:])
    partial = None
    while True:
        n_threads = max(1, -(-n_rows // ROWS))
        found = torch.empty((n_threads, 3), dtype=torch.int64, device=device)
        launch(add_counts(), n_threads, [count, partial, fault], [found], lanes=WARP)
        if n_threads == 1:
            return pointers, found[0]
        partial, n_rows = found, n_threads
