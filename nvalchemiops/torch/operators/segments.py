"""Sums over the atoms of each system, reproducible to the last bit (`nvalchemiops.kernels.segments`)."""

import torch

from nvalchemiops.arguments import ValuesError
from nvalchemiops.kernels.segments import BLOCK, rows_of_a_block, sum_rows
from nvalchemiops.kernels.simd import WARP
from nvalchemiops.layout import layout
from nvalchemiops.torch.autograd import OutputSpec, warp_custom_op
from nvalchemiops.torch.autograd.specs import precision_of, real_of
from nvalchemiops.torch.launch import launch
from nvalchemiops.torch.runtime.cache import cached_by_identity, cached_by_value

FEW = 64 * BLOCK
"""Up to this many atoms in all, the systems are not divided among threads."""


def add_systems(values: torch.Tensor, batch_idx: torch.Tensor | None, n_systems: int) -> torch.Tensor:
    """Sums (n_systems, n_columns) in float64 of contiguous ``values`` (n_atoms, n_columns); for bodies of ops."""
    n_atoms, n_columns = values.shape
    result = torch.empty((n_systems, n_columns), dtype=torch.float64, device=values.device)
    if n_atoms == 0 or result.numel() == 0:
        return result.zero_()
    order = begin = block_begin = None
    n_blocks = -(-n_atoms // BLOCK)
    if n_systems > 1:
        if batch_idx is None:
            raise ValueError(f"`batch_idx` is needed to tell {n_systems} systems apart")
        order, begin = sorted_by_system(batch_idx, n_systems)
    elif batch_idx is not None:
        check_system_numbers(batch_idx, n_systems)
    kernel = sum_rows(precision_of(values))
    if layout(values.device.type).warps:
        return _add_by_warps(values, order, begin, result)
    if n_atoms <= FEW:
        launch(kernel, n_systems, [values, order, begin, None, 0, 0, 0], [result], lanes=WARP, kind="systems")
        return result
    if begin is not None:
        # how many blocks there are is not read back; each system has at most one that is not full
        n_blocks += n_systems
        block_begin = torch.zeros_like(begin)
        block_begin[1:] = ((begin.diff() + (BLOCK - 1)) // BLOCK).cumsum(0)
    partial = torch.empty((n_blocks, n_columns), dtype=torch.float64, device=values.device)
    launch(kernel, n_blocks, [values, order, begin, block_begin, 1, 0, 0], [partial], lanes=WARP, kind="blocks")
    blocks = [partial, None, block_begin, None, 0, 0, 0]
    launch(sum_rows("float64"), n_systems, blocks, [result], lanes=WARP, kind="systems")
    return result


def _add_by_warps(
    values: torch.Tensor, order: torch.Tensor | None, begin: torch.Tensor | None, result: torch.Tensor
) -> torch.Tensor:
    """Sums on a GPU: blocks of rows, blocks of these blocks, until the largest system that there may be is one."""
    n_atoms, n_columns = values.shape
    n_systems, block = result.shape[0], rows_of_a_block(n_columns)
    most, n_rows, level = n_atoms, n_atoms, 0
    while most > block:
        most = -(-most // block)
        # each system has at most one block that is not full; one system alone has no numbers without a block
        n_rows = n_rows // block + n_systems if begin is not None else most
        partial = torch.empty((n_rows, n_columns), dtype=torch.float64, device=values.device)
        inputs = [values, order, begin, None, 1, level, n_atoms]
        launch(sum_rows(precision_of(values)), n_rows, inputs, [partial], lanes=WARP)
        values, order, level = partial, None, level + 1
    inputs = [values, order, begin, None, 0, level, n_atoms]
    launch(sum_rows(precision_of(values)), n_systems, inputs, [result], lanes=WARP)
    return result


def check_system_numbers(batch_idx: torch.Tensor, n_systems: int) -> None:
    """Raise unless all these systems are there, if that can be read without waiting."""
    if not layout(batch_idx.device.type).reads:
        return
    if batch_idx.shape[0] <= FEW and n_systems > 1:
        sorted_by_system(batch_idx, n_systems)  # needed later, and kept
    else:
        _check_entries(batch_idx, n_systems)


def _check_entries(batch_idx: torch.Tensor, n_systems: int) -> None:
    if batch_idx.numel() == 0:
        return
    low, high = (int(end) for end in torch.aminmax(batch_idx))
    if not 0 <= low <= high < n_systems:
        raise ValuesError(f"`batch_idx` must hold numbers in 0 .. {n_systems - 1}, got {low} .. {high}")


def sorted_by_system(batch_idx: torch.Tensor, n_systems: int) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Atoms sorted by system, or None if they are known to be sorted; and row pointers of the systems."""
    if not layout(batch_idx.device.type).reads:
        return cached_by_identity("systems", batch_idx, n_systems, lambda: sort_by_system(batch_idx, n_systems))
    if batch_idx.shape[0] > FEW:
        return _sort(batch_idx, n_systems)
    return cached_by_value("systems", (batch_idx,), n_systems, lambda: _sort(batch_idx, n_systems))


def _sort(batch_idx: torch.Tensor, n_systems: int) -> tuple[torch.Tensor | None, torch.Tensor]:
    _check_entries(batch_idx, n_systems)
    if bool((batch_idx[1:] >= batch_idx[:-1]).all()):
        return None, row_pointers(batch_idx, n_systems)
    return sort_by_system(batch_idx, n_systems)


def sort_by_system(batch_idx: torch.Tensor, n_systems: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Atoms sorted by system, and row pointers of the systems, without a look at values."""
    systems, order = torch.sort(batch_idx, stable=True)
    return order.to(torch.int32), row_pointers(systems, n_systems)


def row_pointers(index: torch.Tensor, n: int) -> torch.Tensor:
    """Row pointers (n + 1,) of an ascending ``index``: the first place of each of 0, 1, ... n, or of the next."""
    numbers = torch.arange(n + 1, dtype=index.dtype, device=index.device)
    return torch.searchsorted(index.contiguous(), numbers, out_int32=True)


def _sums_pullback(batch_idx: torch.Tensor | None, values: torch.Tensor, grad_sums: torch.Tensor) -> torch.Tensor:
    return spread_systems(grad_sums, batch_idx, values.shape[0])


def _spread_pullback(
    batch_idx: torch.Tensor | None, per_system: torch.Tensor, grad_values: torch.Tensor
) -> torch.Tensor:
    return system_sums(grad_values, batch_idx, per_system.shape[0])


@warp_custom_op(
    "nvalchemiops::system_sums",
    outputs=[OutputSpec("sums", real_of, lambda values, _, n_systems: (n_systems, *values.shape[1:]))],
    backward=_sums_pullback,
    trusted=True,
)
def system_sums(values: torch.Tensor, batch_idx: torch.Tensor | None, n_systems: int) -> torch.Tensor:
    """Sum of ``values`` (n_atoms, ...) over the atoms of each system (n_systems, ...), in a fixed order.

    Parameters
    ----------
    values : (n_atoms, ...) tensor, float32 or float64
        Summed in float64.
    batch_idx : (n_atoms,) int32 tensor, optional
        System of each atom, in any order; not needed for one system.
    n_systems : int
    """
    shape = (n_systems, *values.shape[1:])
    if values.numel() == 0:
        return values.new_zeros(shape)
    return add_systems(values.reshape(values.shape[0], -1), batch_idx, n_systems).to(values.dtype).reshape(shape)


def totals(values: torch.Tensor, batch_idx: torch.Tensor | None, n_systems: int) -> torch.Tensor:
    """The same as `system_sums`, at less cost for one system, where torch chooses the order of the sum."""
    return values.sum(0, keepdim=True) if n_systems == 1 else system_sums(values, batch_idx, n_systems)


@warp_custom_op(
    "nvalchemiops::spread_systems",
    outputs=[OutputSpec("values", real_of, lambda per_system, _, n_atoms: (n_atoms, *per_system.shape[1:]))],
    backward=_spread_pullback,
)
def spread_systems(per_system: torch.Tensor, batch_idx: torch.Tensor | None, n_atoms: int) -> torch.Tensor:
    """For each atom the value (n_atoms, ...) of its system in ``per_system`` (n_systems, ...).

    The transpose of `system_sums`, and unlike indexing itself with a reproducible derivative on a GPU.
    """
    if batch_idx is None:
        return per_system.expand(n_atoms, *per_system.shape[1:]).clone()
    return per_system.index_select(0, batch_idx)
