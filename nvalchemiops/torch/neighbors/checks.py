"""Checks of arguments that describe atoms, cells and systems, at the public edge. Each message names the argument."""

import math
from typing import Any

import numpy as np
import torch

FLOATS = (torch.float32, torch.float64)


def on_host(tensor: torch.Tensor) -> np.ndarray:
    """The values of a tensor as a numpy array, also under ``torch.func.grad`` and its like."""
    values = tensor.detach().cpu()
    while torch._C._functorch.is_gradtrackingtensor(values):
        values = torch._C._functorch.get_unwrapped(values)
    with torch._C._DisableFuncTorch():
        return values.numpy()


def check_positions(positions: Any) -> None:
    """Raise unless ``positions`` is a finite float32 or float64 tensor (n_atoms, 3). Reads the values."""
    if not isinstance(positions, torch.Tensor):
        raise TypeError(f"`positions` must be a torch.Tensor, got {type(positions).__name__}")
    if positions.dtype not in FLOATS:
        raise TypeError(f"`positions` must be float32 or float64, got {positions.dtype}")
    if positions.ndim != 2 or positions.shape[1] != 3:
        raise ValueError(f"`positions` must have shape (n_atoms, 3), got {tuple(positions.shape)}")
    if not bool(torch.isfinite(positions).all()):
        raise ValueError("`positions` has entries that are NaN or infinite")


def check_positive(name: str, value: Any) -> float:
    """The value as a float; raise unless it is a finite number above zero."""
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"`{name}` must be a number, got {type(value).__name__}") from None
    if not (math.isfinite(number) and number > 0.0):
        raise ValueError(f"`{name}` must be positive and finite, got {number}")
    return number


def check_cell(cell: Any, positions: torch.Tensor, n_systems: int) -> torch.Tensor:
    """The cell as (n_systems, 3, 3); raise unless shape, dtype and device fit."""
    if not isinstance(cell, torch.Tensor):
        raise TypeError(f"`cell` must be a torch.Tensor, got {type(cell).__name__}")
    if cell.dtype != positions.dtype:
        raise TypeError(f"`cell` has dtype {cell.dtype}, but `positions` has {positions.dtype}")
    if cell.device != positions.device:
        raise ValueError(f"`cell` is on {cell.device}, but `positions` is on {positions.device}")
    if cell.shape == (3, 3) and n_systems == 1:
        return cell.unsqueeze(0)
    if cell.shape != (n_systems, 3, 3):
        single = "(3, 3) or " if n_systems == 1 else ""
        raise ValueError(f"`cell` must have shape {single}({n_systems}, 3, 3), got {tuple(cell.shape)}")
    return cell


def check_pbc(pbc: Any, positions: torch.Tensor, n_systems: int) -> np.ndarray:
    """Periodicity as a bool array (n_systems, 3); None stands for periodic along all axes."""
    if pbc is None:
        return np.ones((n_systems, 3), dtype=bool)
    if isinstance(pbc, bool):
        return np.full((n_systems, 3), pbc)
    tensor = torch.as_tensor(pbc)
    if tensor.dtype != torch.bool:
        raise TypeError(f"`pbc` must be bool, got {tensor.dtype}")
    if tuple(tensor.shape) not in ((3,), (n_systems, 3)):
        raise ValueError(f"`pbc` must have shape (3,) or ({n_systems}, 3), got {tuple(tensor.shape)}")
    return np.broadcast_to(on_host(tensor), (n_systems, 3)).copy()


def check_batch_idx(batch_idx: Any, positions: torch.Tensor, n_systems: int | None = None) -> tuple[torch.Tensor, int]:
    """System of each atom as contiguous int32, and the number of systems. Reads the values."""
    if not isinstance(batch_idx, torch.Tensor):
        raise TypeError(f"`batch_idx` must be a torch.Tensor, got {type(batch_idx).__name__}")
    if batch_idx.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"`batch_idx` must be int32 (or int64), got {batch_idx.dtype}")
    n_atoms = positions.shape[0]
    if tuple(batch_idx.shape) != (n_atoms,):
        raise ValueError(f"`batch_idx` must have shape (n_atoms,) = ({n_atoms},), got {tuple(batch_idx.shape)}")
    if batch_idx.device != positions.device:
        raise ValueError(f"`batch_idx` is on {batch_idx.device}, but `positions` is on {positions.device}")
    low, high = (int(batch_idx.min()), int(batch_idx.max())) if n_atoms else (0, -1)
    if low < 0:
        raise ValueError(f"`batch_idx` has the negative entry {low}")
    if n_systems is None:
        n_systems = high + 1
    elif high >= n_systems:
        raise ValueError(f"`batch_idx` has the entry {high}, but there are {n_systems} systems")
    return batch_idx.to(torch.int32).contiguous(), n_systems
