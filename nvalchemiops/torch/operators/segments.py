"""Sums over the atoms of each system, reproducible to the last bit (`nvalchemiops.kernels.segments`)."""

from contextlib import nullcontext

import torch

from nvalchemiops.arguments import ValuesError
from nvalchemiops.kernels.segments import BLOCK, rows_of_a_block, sum_rows
from nvalchemiops.kernels.simd import WARP
from nvalchemiops.layout import layout
from nvalchemiops.torch import checks
from nvalchemiops.torch.autograd import OutputSpec, warp_custom_op
from nvalchemiops.torch.autograd.specs import precision_of, real_of
from nvalchemiops.torch.launch import launch
from nvalchemiops.torch.runtime._torch_internals import transforms_active
from nvalchemiops.torch.runtime.cache import cached_by_identity, cached_by_value
from nvalchemiops.torch.runtime.context import ValuesNeededError, may_read, values_of
from nvalchemiops.torch.runtime.recorder import current_recorder, differ_in_replays, read_fault, read_number

FEW = 64 * BLOCK
"""Total number of atoms up to which the systems are not divided among threads."""


def add_systems(values: torch.Tensor, batch_idx: torch.Tensor | None, n_systems: int) -> torch.Tensor:
    """Sums (n_systems, n_columns) in float64 of contiguous ``values`` (n_atoms, n_columns); for bodies of ops."""
    n_atoms, n_columns = values.shape
    result = torch.empty((n_systems, n_columns), dtype=torch.float64, device=values.device)
    if n_atoms == 0 or result.numel() == 0:
        return result.zero_()
    order = begin = None
    if n_systems > 1:
        if batch_idx is None:
            raise ValueError(f"`batch_idx` is needed to tell {n_systems} systems apart")
        order, begin = sorted_by_system(batch_idx, n_systems)
    elif batch_idx is not None:
        check_system_numbers(batch_idx, n_systems)
    warps = layout(values.device.type).warps
    # Sum over blocks of rows, on a CPU if there are many atoms; on a GPU also over blocks of these blocks, until the
    # largest possible system is a single block.
    block = rows_of_a_block(n_columns) if warps else BLOCK
    most, n_rows, level = n_atoms, n_atoms, 0
    while most > (block if warps else FEW):
        most = -(-most // block) if warps else 0
        # each system has at most one partial block; block numbers are needed only for several systems
        n_rows = -(-n_rows // block) if begin is None else n_rows // block + n_systems
        first = None
        if begin is not None and not warps:
            first = begin // block + torch.arange(n_systems + 1, dtype=begin.dtype, device=begin.device)
        partial = torch.empty((n_rows, n_columns), dtype=torch.float64, device=values.device)
        inputs = [values, order, begin, first, 1, level, n_atoms]
        launch(sum_rows(precision_of(values)), n_rows, inputs, [partial], lanes=WARP, kind="blocks")
        values, order, level = partial, None, level + 1
        begin = begin if warps else first
    inputs = [values, order, begin, None, 0, level, n_atoms]
    launch(sum_rows(precision_of(values)), n_systems, inputs, [result], lanes=WARP, kind="systems")
    return result


def check_system_numbers(batch_idx: torch.Tensor, n_systems: int) -> None:
    """Raise for numbers of systems out of range, if values can be read without waiting."""
    if not layout(batch_idx.device.type).reads:
        return
    if batch_idx.shape[0] <= FEW and n_systems > 1:
        sorted_by_system(batch_idx, n_systems)  # needed later, and kept
    else:
        _check_entries(batch_idx, n_systems)


def _check_entries(batch_idx: torch.Tensor, n_systems: int) -> None:
    if batch_idx.numel() == 0 or checks.in_range_in_replays(batch_idx, n_systems):
        return
    low, high = torch.stack(torch.aminmax(values_of(batch_idx))).tolist()  # read together, also where torch traces
    if not 0 <= low <= high < n_systems:
        raise ValuesError(f"`batch_idx` must hold numbers in 0 .. {n_systems - 1}, got {low} .. {high}")


def largest_system(batch_idx: torch.Tensor) -> int:
    """The largest entry, read on the host. It waits for a GPU once for a tensor, so that a captured graph can follow.

    A captured graph keeps this number: capture again if systems are added in place. A plan of a repeated call would
    not notice it, so such a call gets none.

    Raises
    ------
    ValuesNeededError
        A graph is being captured, and no call with this tensor came before.
    """

    def read() -> tuple[torch.Tensor]:
        if not may_read(batch_idx, wait=True):
            raise ValuesNeededError("`num_systems` is needed if `batch_idx` cannot be read, as inside torch.compile")
        return (batch_idx.max().cpu(),)

    if may_read(batch_idx):
        return int(read_number(batch_idx.max()))
    if (recorder := current_recorder()) is not None:
        recorder.end("the number of systems is read: give `num_systems`")
    return int(cached_by_identity("largest system", batch_idx, (), read, on_host=True)[0])


def sorted_by_system(batch_idx: torch.Tensor, n_systems: int) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Atoms sorted by system, or None if they are known to be sorted; and row pointers of the systems."""
    if not layout(batch_idx.device.type).reads:
        return cached_by_identity("systems", batch_idx, n_systems, lambda: sort_by_system(batch_idx, n_systems))
    if batch_idx.shape[0] > FEW:
        return _sort(batch_idx, n_systems)
    return cached_by_value("systems", (batch_idx,), n_systems, lambda: _sort(batch_idx, n_systems))


def _sort(batch_idx: torch.Tensor, n_systems: int) -> tuple[torch.Tensor | None, torch.Tensor]:
    _check_entries(batch_idx, n_systems)
    descends = (batch_idx[1:] < batch_idx[:-1]).any()
    recorder = current_recorder()
    with nullcontext() if recorder is None else recorder.pause():
        (descended,) = descends.reshape(1).tolist()  # also where torch traces, which refuses `bool`
    if descended:
        return sort_by_system(batch_idx, n_systems)
    if differ_in_replays(batch_idx):
        read_fault(descends.to(torch.int32), only_in_replays=True)
    return None, row_pointers(batch_idx, n_systems)


def sort_by_system(batch_idx: torch.Tensor, n_systems: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Atoms sorted by system, and row pointers of the systems, without reading values."""
    systems, order = torch.sort(batch_idx, stable=True)
    return order.to(torch.int32), row_pointers(systems, n_systems)


def row_pointers(index: torch.Tensor, n: int) -> torch.Tensor:
    """Row pointers (n + 1,) of an ascending ``index``: the first place of an entry of at least 0, 1, ... n."""
    numbers = torch.arange(n + 1, dtype=index.dtype, device=index.device)
    if transforms_active():  # for each slice of vmap, which would expand them: torch warns of that
        numbers = numbers + index.new_zeros(n + 1)
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


def batch_idx_of(batch_ptr: torch.Tensor, n_atoms: int) -> torch.Tensor:
    """``batch_idx`` from ``batch_ptr``."""
    atoms = torch.arange(n_atoms, dtype=batch_ptr.dtype, device=batch_ptr.device)
    return torch.searchsorted(batch_ptr[1:], atoms, right=True, out_int32=True)


def totals(values: torch.Tensor, batch_idx: torch.Tensor | None, n_systems: int) -> torch.Tensor:
    """`system_sums` at less cost for one system, for which torch chooses the order of the summation."""
    return values.sum(0, keepdim=True) if n_systems == 1 else system_sums(values, batch_idx, n_systems)


@warp_custom_op(
    "nvalchemiops::spread_systems",
    outputs=[OutputSpec("values", real_of, lambda per_system, _, n_atoms: (n_atoms, *per_system.shape[1:]))],
    backward=_spread_pullback,
    trusted=True,
)
def spread_systems(per_system: torch.Tensor, batch_idx: torch.Tensor | None, n_atoms: int) -> torch.Tensor:
    """For each atom the value (n_atoms, ...) of its system in ``per_system`` (n_systems, ...).

    The transpose of `system_sums`. Unlike plain indexing it has a reproducible derivative on a GPU.
    """
    if batch_idx is None:
        return per_system.expand(n_atoms, *per_system.shape[1:]).clone()
    return per_system.index_select(0, batch_idx)
