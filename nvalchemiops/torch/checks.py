"""Checks of public arguments that describe atoms, cells and systems. Each message names the argument."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from nvalchemiops.arguments import ValuesError, as_bools, as_int
from nvalchemiops.arguments import as_choice as as_choice
from nvalchemiops.arguments import as_float as as_float
from nvalchemiops.arguments import check_not_negative as check_not_negative
from nvalchemiops.arguments import check_positive as check_positive
from nvalchemiops.torch.runtime.calls import int32_of
from nvalchemiops.torch.runtime.context import ValuesNeededError, is_capturing, may_read, on_host
from nvalchemiops.torch.runtime.recorder import current_recorder, differ_in_replays, read_fault

FLOATS = (torch.float32, torch.float64)

DEVICES = ("cpu", "cuda")
"""Types of devices on which kernels run."""


def kind_of(name: str, value: Any) -> str:
    """The type of an argument of this name that is not what it must be, for a message, with advice."""
    advice = ""
    if _is_atoms(value):
        advice = ": use System.from_ase"
    elif hasattr(value, "_fields"):  # a System, or a result of this library, is a tuple
        parts = [part for part in ("state", "system", name) if hasattr(value, part)]
        advice = f": give its `{parts[0]}`" if parts else ""
    elif isinstance(value, (list, tuple)) and value and hasattr(value[0], "batch_idx"):
        advice = ": use System.concatenate"
    elif isinstance(value, (np.ndarray, list, tuple)):
        advice = ": use torch.as_tensor"
    return type(value).__name__ + advice


def _is_atoms(value: Any) -> bool:
    """Whether these are atoms of ASE, which need not be installed, or a sequence of them."""
    if isinstance(value, (list, tuple)) and value:
        value = value[0]
    return hasattr(value, "get_atomic_numbers")


def refuse_atoms(name: str, value: Any) -> None:
    """Raise for atoms of ASE where a system is needed."""
    if _is_atoms(value):
        raise TypeError(f"`{name}` must be a System, got {kind_of(name, value)}")


def check_tensor(name: str, tensor: Any) -> None:
    """Raise unless this is a dense tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"`{name}` must be a torch.Tensor, got {kind_of(name, tensor)}")
    if tensor.layout is not torch.strided:
        raise TypeError(f"`{name}` has layout {tensor.layout}, but kernels need a dense tensor: call .to_dense()")


def check_place(name: str, tensor: torch.Tensor) -> None:
    """Raise if kernels do not run on the device of this tensor."""
    if tensor.device.type not in DEVICES:
        raise ValueError(f"`{name}` is on {tensor.device}, but kernels run on {' and '.join(DEVICES)} only")


def check_device(name: str, device: Any) -> torch.device:
    """The device; raises unless it is one on which kernels run."""
    try:
        found = torch.device(device)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"`{name}` must be a torch.device or its name, got {device!r}") from None
    if found.type not in DEVICES:
        raise ValueError(f"`{name}` is {found}, but kernels run on {' and '.join(DEVICES)} only")
    return found


def check_same_device(device: Any, positions: torch.Tensor) -> None:
    """Raise unless ``device`` names the device of the positions, or is None."""
    if device is None:
        return
    asked = check_device("device", device)
    if asked.type != positions.device.type or asked.index not in (None, positions.device.index):
        raise ValueError(f"`device` is {asked}, but `positions` is on {positions.device}")


def check_flag(name: str, value: Any) -> bool:
    """The value as a bool; raises unless it is True, False, 1 or 0: it may be another argument in the wrong place."""
    if not (isinstance(value, (bool, np.bool_)) or (isinstance(value, (int, np.integer)) and value in (0, 1))):
        raise TypeError(f"`{name}` must be True or False, got {type(value).__name__}")
    return bool(value)


def as_hooks(value: Any) -> Sequence[Any]:
    """Functions that are called again and again: one that is not in a sequence, and those of an iterator, are kept."""
    if not isinstance(value, Iterable):
        value = [value]
    found = value if isinstance(value, Sequence) else list(value)
    for one in found:
        if not callable(one):
            raise TypeError(f"`hooks` must be callables in a sequence, got {type(one).__name__}")
    return found


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Raise unless this is one of the given strings; `as_choice` is for names, which have several spellings."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"`{name}` must be {' or '.join(map(repr, choices))}, got {value!r}")


def _of_autocast(lengths: torch.Tensor) -> str:
    """What to do, if autocast has rounded positions or cells, which have few digits left then."""
    device = lengths.device.type
    if device not in DEVICES or not torch.is_autocast_enabled(device):
        return ""
    if lengths.dtype not in (torch.bfloat16, torch.float16):
        return ""
    return (
        f": products of matrices are rounded under autocast; deform under `torch.autocast({device!r}, enabled=False)`"
    )


def check_positions(positions: Any, finite: bool = True, name: str = "positions") -> None:
    """Raise unless ``positions`` is a float32 or float64 tensor (n_atoms, 3), with finite values if ``finite``."""
    check_tensor(name, positions)
    check_place(name, positions)
    if positions.dtype not in FLOATS:
        raise TypeError(f"`{name}` must be float32 or float64, got {positions.dtype}{_of_autocast(positions)}")
    if positions.ndim != 2 or positions.shape[1] != 3:
        raise ValueError(f"`{name}` must have shape (n_atoms, 3), got {tuple(positions.shape)}")
    if finite and not bool(torch.isfinite(positions).all()):
        raise ValuesError(f"`{name}` has entries that are NaN or infinite")


def check_int(name: str, value: Any, bits: int = 32) -> int:
    """The value, which may be a symbol of a compiler; raises unless it is an integer that fits into so many bits.

    A tensor with one integer, such as ``counts.max()``, is read.
    """
    if isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value]  # it acts like an int
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"`{name}` must be an int, got a tensor {tuple(value.shape)} of {value.dtype}")
        value = int(value)
    return as_int(name, value, bits)


def check_count(name: str, value: Any, least: int = 0) -> int:
    """The value as an int; raises unless it is an integer that is not less than ``least``."""
    number = check_int(name, value)
    if number < least:
        raise ValueError(f"`{name}` must {f'be at least {least}' if least else 'not be negative'}, got {number}")
    return number


def check_like(name: str, memory: Any, values: torch.Tensor) -> None:
    """Raise unless ``memory`` is a tensor of the shape, dtype and device of ``values``."""
    check_tensor(name, memory)
    if memory.dtype != values.dtype:
        raise TypeError(f"`{name}` must be a tensor of {values.dtype}, got {memory.dtype}")
    if memory.requires_grad and memory.is_leaf and torch.is_grad_enabled():
        raise ValueError(f"`{name}` is written in place, so it must not require a gradient")
    if memory.shape != values.shape or memory.device != values.device:
        raise ValueError(
            f"`{name}` must have shape {tuple(values.shape)} on {values.device}, got {tuple(memory.shape)} on "
            f"{memory.device}"
        )


def has_shape(tensor: Any, *shapes: tuple[int, ...]) -> bool:
    """Whether the shape is one of these.

    Only those with as many axes are compared. Python also compares tuples of different lengths from the left, so that a
    number of systems that a traced program leaves open would be compared with the 3 of ``(3,)``, and be no longer open.
    """
    return any(len(shape) == tensor.ndim and tuple(tensor.shape) == shape for shape in shapes)


def check_real(name: str, value: Any, positions: torch.Tensor) -> None:
    """Raise unless ``value`` is a tensor of the dtype and on the device of the positions."""
    check_tensor(name, value)
    if value.dtype != positions.dtype:
        advice = f": use `{name}.to(positions.dtype)`"
        if name == "cell":
            advice = _of_autocast(value) or advice
        raise TypeError(f"`{name}` has dtype {value.dtype}, but `positions` has {positions.dtype}{advice}")
    if value.device != positions.device:
        raise ValueError(f"`{name}` is on {value.device}, but `positions` is on {positions.device}")


def is_real(value: torch.Tensor) -> bool:
    """Whether a tensor holds real numbers, integers among them."""
    return not value.is_complex() and value.dtype is not torch.bool


def as_real(name: str, value: Any, beside: torch.Tensor) -> torch.Tensor:
    """A parameter in the dtype of ``beside``; raises unless it is a tensor of real numbers on the same device.

    Parameters may also come as integers, such as atomic numbers, or in half precision. As in operations of torch, one
    without axes may be on the CPU beside tensors of a GPU.
    """
    check_tensor(name, value)
    if is_real(value):
        value = value.to(beside.dtype)
        is_number_of_host = not value.ndim and value.device.type == "cpu" != beside.device.type
        if is_number_of_host and current_recorder() is None:  # a recorded step would keep its value
            value = torch.zeros((), dtype=beside.dtype, device=beside.device) + value  # nothing waits for a copy
    check_real(name, value, beside)
    return value


def as_float_tensor(name: str, value: Any, positions: torch.Tensor) -> torch.Tensor:
    """``value`` in the dtype of the positions; raises unless it is float32 or float64 and on their device.

    Half precision, as autocast leaves it, has too few digits for cells and charges.
    """
    check_tensor(name, value)
    if value.dtype in FLOATS:
        value = value.to(positions.dtype)
    check_real(name, value, positions)
    return value


def check_lattice(cell: Any, positions: torch.Tensor) -> torch.Tensor:
    """The cell or cells in the dtype of the positions; raises unless shape, dtype and device fit."""
    cell = as_float_tensor("cell", cell, positions)
    if cell.ndim not in (2, 3) or cell.shape[-2:] != (3, 3):
        raise ValueError(f"`cell` must have shape (3, 3) or (n_systems, 3, 3), got {tuple(cell.shape)}")
    # torch 2.13 gets the determinant of a negative view wrong
    return cell.resolve_neg()


def pbc_tensor(pbc: Any, device: torch.device | None = None) -> torch.Tensor:
    """Periodicity as a bool tensor of any shape, on ``device`` if given; also from integers that are 0 or 1.

    Tensors must be bool: not everywhere may be read whether integers are 0 or 1. A few numbers of a CPU are copied, as
    if they were given as a tuple; a GPU is not waited for without being asked.
    """
    wanted, advice = "bool", ": use `pbc != 0`"
    if not isinstance(pbc, torch.Tensor):
        wanted, advice = "bool, or integers 0 and 1", ""
        if isinstance(pbc, (int, list, tuple)) or not torch.compiler.is_compiling():  # where arrays are tensors
            pbc = as_bools(pbc)
        try:
            if device is None or device.type == "cpu":
                pbc = torch.as_tensor(pbc, device="cpu")
            elif not torch.compiler.is_compiling():
                pbc = made_on(device, np.asarray(pbc))
            elif isinstance(pbc, bool):
                pbc = torch.full((), pbc, dtype=torch.bool, device=device)
            elif isinstance(pbc, (list, tuple)) and pbc and all(isinstance(flag, bool) for flag in pbc):
                pbc = torch.cat([torch.full((1,), flag, dtype=torch.bool, device=device) for flag in pbc])
            else:  # a constant of the compiled graph, which is copied in each call
                pbc = torch.as_tensor(pbc, device=device)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"`pbc` must be a bool tensor, got {type(pbc).__name__}") from None
    check_tensor("pbc", pbc)
    check_place("pbc", pbc)
    if pbc.dtype != torch.bool:
        raise TypeError(f"`pbc` must be {wanted}, got {pbc.dtype}{advice}")
    if device is not None and pbc.device != device:
        if pbc.device.type == "cpu":
            return pbc.to(device) if torch.compiler.is_compiling() else made_on(device, pbc.detach().numpy())
        raise ValueError(f"`pbc` is on {pbc.device}, but other arguments are on {device}")
    return pbc


def check_batch(
    batch_idx: Any, positions: torch.Tensor, n_systems: int | None = None, wait: bool = False
) -> tuple[torch.Tensor | None, int | None]:
    """The system of each atom as int32 (None for a single system), and the number of systems (None if unknown).

    Parameters
    ----------
    batch_idx : (n_atoms,) int32 or int64 tensor, or None
        In any order. The entries are checked if they may be read.
    positions : (n_atoms, 3) tensor
    n_systems : int, optional
        The number of systems if other arguments determine it. By default it is the largest entry plus one.
    wait : bool, optional
        Whether to read the entries also on a GPU, which waits for it.

    Raises
    ------
    ValueError, TypeError
        Wrong shape, dtype or device; an entry out of range; several systems, but no ``batch_idx``.
    """
    if batch_idx is None:
        if n_systems not in (None, 1):
            raise ValueError(f"`batch_idx` is needed: other arguments are for {n_systems} systems")
        return None, 1
    check_index("batch_idx", batch_idx, positions, (positions.shape[0],))
    if may_read(batch_idx, wait=wait) and not (n_systems is not None and in_range_in_replays(batch_idx, n_systems)):
        low, high = torch.stack(torch.aminmax(batch_idx)).tolist() if batch_idx.numel() else (0, -1)
        if low < 0:
            raise ValuesError(f"`batch_idx` has the negative entry {low}")
        if n_systems is None:
            n_systems = high + 1
        elif high >= n_systems == 1:
            raise ValuesError(
                f"`batch_idx` has the entry {high}, but there is one system: give a `cell` for each, "
                "(n_systems, 3, 3), or without cells `num_systems`"
            )
        elif high >= n_systems:
            raise ValuesError(f"`batch_idx` has the entry {high}, but there are {n_systems} systems")
    return int32_of(batch_idx).contiguous(), n_systems


def in_range_in_replays(batch_idx: torch.Tensor, n_systems: int) -> bool:
    """Whether numbers of systems differ in replays of this call, each of which looks at its own, and are in range."""
    if not differ_in_replays(batch_idx):
        return False
    return not read_fault(((batch_idx < 0) | (batch_idx >= n_systems)).any().to(torch.int32))


def made_on(device: torch.device, values: np.ndarray) -> torch.Tensor:
    """The values as a tensor.

    Up to three bools are made on the device, and any values while a graph is captured: a copy from the host would wait
    for it.
    """
    if values.dtype == np.bool_ and 1 <= values.size <= 3:
        made = [torch.full((1,), bool(value), dtype=torch.bool, device=device) for value in values.ravel()]
        return torch.cat(made).reshape(values.shape)
    if device.type == "cpu" or not is_capturing() or not values.size:
        return torch.as_tensor(values, device=device)
    flat = np.ascontiguousarray(values).ravel()
    dtype, bits = torch.as_tensor(flat, device="cpu").dtype, flat.view(f"u{flat.itemsize}")
    # equal values that follow each other are made together
    ends = [*(np.flatnonzero(bits[1:] != bits[:-1]) + 1).tolist(), flat.size]
    sizes = np.diff(ends, prepend=0).tolist()
    made = [torch.full((n,), flat[end - 1].item(), dtype=dtype, device=device) for n, end in zip(sizes, ends)]
    return torch.cat(made).reshape(values.shape)


def moved_to(device: torch.device, name: str, value: torch.Tensor) -> torch.Tensor:
    """A parameter of any device on this one, with its graph.

    While a graph is captured, a number of the host is an argument of a kernel, and nothing else can be copied.
    """
    if value.device.type != "cpu" or device.type == "cpu" or not is_capturing():
        return value.to(device)
    if value.ndim:
        raise ValuesNeededError(
            f"`{name}` would be copied from the host while a CUDA graph is captured: give it on {device}, or as numbers"
        )
    return torch.zeros((), dtype=value.dtype, device=device) + value


def systems_in_shapes(*arguments: tuple[Any, int]) -> int | None:
    """The number of systems from the leading size of tensors with the given ndim; a size of 1 means any number."""
    for tensor, ndim in arguments:
        if getattr(tensor, "ndim", None) == ndim and tensor.shape[0] != 1:
            return tensor.shape[0]
    return None


def check_systems(
    positions: torch.Tensor, cell: Any, pbc: Any, batch_idx: Any, batch_ptr: Any
) -> tuple[torch.Tensor | None, torch.Tensor | None, int | None]:
    """Cell and pbc as tensors or None, and the number of systems if shapes determine it, otherwise None.

    Raises unless shapes, dtypes and devices of all four arguments fit together. Values are not read, with one
    exception: without a cell, pbc must be False, and is refused if it cannot be read.
    """
    n_systems = 1 if batch_idx is None and batch_ptr is None else None
    if batch_ptr is not None:
        check_index("batch_ptr", batch_ptr, positions, (None,))
        if batch_ptr.shape[0] < 1:
            raise ValueError("`batch_ptr` must have shape (n_systems + 1,), got (0,)")
        n_systems = batch_ptr.shape[0] - 1
    if batch_idx is not None:
        check_index("batch_idx", batch_idx, positions, (positions.shape[0],))
    if cell is not None:
        cell = check_lattice(cell, positions)
        n_systems = _same_number("cell", cell.shape[0] if cell.ndim == 3 else 1, n_systems)
    if pbc is not None:
        pbc = pbc_tensor(pbc, positions.device)
        if pbc.ndim == 0:
            pbc = pbc.expand(3)
        if pbc.ndim > 2 or pbc.shape[-1] != 3:
            raise ValueError(f"`pbc` must have shape (3,) or (n_systems, 3), got {tuple(pbc.shape)}")
        n_systems = _same_number("pbc", pbc.shape[0] if pbc.ndim == 2 else 1, n_systems)
    if n_systems == 0 and positions.shape[0] > 0:
        raise ValueError(f"`batch_ptr`, `cell` or `pbc` is for zero systems, but there are {positions.shape[0]} atoms")
    if cell is None and pbc is not None:
        readable = may_read(pbc, wait=True)
        if not readable or bool(pbc.any()):
            error = ValueError if readable else ValuesNeededError
            raise error("`pbc` is given without a `cell`: give a cell, or leave `pbc` out")
        pbc = None
    return cell, pbc, n_systems


def _same_number(name: str, number: int, n_systems: int | None) -> int | None:
    """The number of systems; raises unless ``number``, the leading size of an argument, equals it or is one."""
    if n_systems is None:
        return None if number == 1 else number
    if number not in (1, n_systems):
        there = "is one: several need `batch_idx`" if n_systems == 1 else f"are {n_systems}"
        raise ValueError(f"`{name}` is for {number} systems, but there {there}")
    return n_systems


def check_index(
    name: str, tensor: Any, beside: torch.Tensor | None, shape: tuple[int | None, ...], writable: bool = False
) -> None:
    """Raise unless ``tensor`` has integers in this shape (None: any size), on the device of ``beside``.

    A ``writable`` tensor must be int32 and contiguous.
    """
    check_tensor(name, tensor)
    if tensor.dtype != torch.int32 and (writable or tensor.dtype != torch.int64):
        other, advice = ("", "") if writable else (" or int64", f": use `{name}.to(torch.int32)`")
        if name == "batch_idx" and tensor.dtype == torch.bool:
            advice = ": give `pbc` by its name if this is one"
        raise TypeError(f"`{name}` must be int32{other}, got {tensor.dtype}{advice}")
    fits = tensor.ndim == len(shape) and all(n is None or n == m for n, m in zip(shape, tensor.shape))
    if not fits:
        expected = ", ".join("any" if n is None else str(n) for n in shape)
        raise ValueError(f"`{name}` must have shape ({expected}), got {tuple(tensor.shape)}")
    if beside is not None and tensor.device != beside.device:
        raise ValueError(f"`{name}` is on {tensor.device}, but other arguments are on {beside.device}")
    if writable and not tensor.is_contiguous():
        raise ValueError(f"`{name}` is written in place, so it must be contiguous")


def check_pairs(name: str, pairs: Any, n_atoms: int, beside: torch.Tensor) -> None:
    """Raise unless ``pairs`` (2, n) holds pairs of two atoms. If values can be read, each pair must be there once."""
    check_index(name, pairs, beside, (2, None))
    if not pairs.shape[1] or not may_read(pairs):
        return
    i, j = on_host(pairs).astype(np.int64)
    if min(i.min(), j.min()) < 0 or max(i.max(), j.max()) >= n_atoms:
        raise ValuesError(f"`{name}` must hold atoms in 0 .. {n_atoms - 1}")
    if (i == j).any():
        raise ValuesError(f"`{name}` joins an atom with itself")
    keys = np.minimum(i, j) * n_atoms + np.maximum(i, j)
    if np.unique(keys).shape[0] != pairs.shape[1]:
        raise ValuesError(f"`{name}` holds a pair twice")


def check_factors(name: str, factors: Any, n_pairs: int, beside: torch.Tensor) -> None:
    """Raise unless there is a factor without gradient for each pair."""
    check_tensor(name, factors)
    if not factors.is_floating_point():
        raise TypeError(f"`{name}` must be a tensor of floats")
    if factors.requires_grad:
        raise ValueError(f"`{name}` cannot be trained: pass a detached tensor")
    if tuple(factors.shape) != (n_pairs,) or factors.device != beside.device:
        raise ValueError(
            f"`{name}` must have shape ({n_pairs},) on {beside.device}, got {tuple(factors.shape)} on {factors.device}"
        )


def check_flags(rebuild_flags: Any, positions: torch.Tensor, n_systems: int | None) -> torch.Tensor:
    """``rebuild_flags`` as (n_systems,), or as (1,) for all; raises unless there is a bool for each system, or one."""
    check_tensor("rebuild_flags", rebuild_flags)
    if rebuild_flags.dtype != torch.bool:
        raise TypeError("`rebuild_flags` must be a bool tensor")
    if rebuild_flags.numel() == 1 and rebuild_flags.ndim <= 1:
        rebuild_flags = rebuild_flags.reshape(1)
    size = rebuild_flags.shape[0] if rebuild_flags.ndim == 1 else None
    if size is None or (size == 0 and positions.shape[0] > 0) or (size != 1 and n_systems not in (None, size)):
        expected = "n_systems" if n_systems is None else n_systems
        raise ValueError(f"`rebuild_flags` must have shape ({expected},), got {tuple(rebuild_flags.shape)}")
    if rebuild_flags.device != positions.device:
        raise ValueError(f"`rebuild_flags` is on {rebuild_flags.device}, but `positions` is on {positions.device}")
    return rebuild_flags
