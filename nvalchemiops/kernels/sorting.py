"""Rows of sorted entries, such as the atoms of a bin or a system: where they begin; and how many entries rows have."""

from typing import Any

import warp as wp

from nvalchemiops.kernels.native import by_device, filled, native_kernel
from nvalchemiops.kernels.simd import WARP
from nvalchemiops.launch import kernel_variants

ROWS = 32 * WARP
"""Rows whose counts a warp of a GPU adds up."""

_BEGIN = """
    if (k < begin.shape[0]) {
        int low = 0, high = rows.shape[0];
        while (low < high) {
            const int middle = low + (high - low) / 2;
            if (rows.data[middle] < k) low = middle + 1;
            else high = middle;
        }
        begin.data[k] = low;
    }
    if (k < order.shape[0]) order.data[k] = static_cast<int>(sorted.data[k]);
"""


@kernel_variants(())
def begin_rows() -> Any:
    """The kernel that finds where rows begin, and narrows the numbers that torch sorts with."""

    @native_kernel("begin_rows", _BEGIN)
    def kernel(
        k: wp.int32,
        rows: wp.array(dtype=wp.int32),  # (n,), the row of each entry, ascending
        sorted: wp.array(dtype=wp.int64),  # (n,), or none
        begin: wp.array(dtype=wp.int32),  # (n_rows + 1,)
        order: wp.array(dtype=wp.int32),  # (n,), or none
    ):
        """Find the first entry of row k or a later one, and copy the k-th number."""

    return kernel


_ADD = """
    const bool of_rows = partial.shape[0] == 0;
    const int n = of_rows ? count.shape[0] : partial.shape[0];
    @lanes@
    long long most = 0, total = 0, largest_fault = 0;
    for (long long at = 1LL * @rows@ * thread + lane; at < n && at < 1LL * @rows@ * (thread + 1); at += n_lanes) {
        const long long highest = of_rows ? count.data[at] : partial.data[3 * at];
        most = highest > most ? highest : most;
        total += of_rows ? highest : partial.data[3 * at + 1];
    }
    for (int k = lane; k < fault.shape[0]; k += n_lanes)
        largest_fault = fault.data[k] > largest_fault ? fault.data[k] : largest_fault;
    @all_lanes@
    if (lane > 0) return;
    found.data[3LL * thread] = most;
    found.data[3LL * thread + 1] = total;
    found.data[3LL * thread + 2] = largest_fault;
"""

_ALL_LANES = f"""
    for (int step = {WARP} / 2; step > 0; step /= 2) {{
        const long long other = __shfl_xor_sync(0xffffffffu, most, step);
        most = other > most ? other : most;
        total += __shfl_xor_sync(0xffffffffu, total, step);
        const long long its_fault = __shfl_xor_sync(0xffffffffu, largest_fault, step);
        largest_fault = its_fault > largest_fault ? its_fault : largest_fault;
    }}
"""


@kernel_variants(())
def add_counts() -> Any:
    """The kernel with which warps of a GPU add up counts of rows; a CPU has `nvalchemiops.neighbors.grid.end_rows`."""
    lanes = f"const int n_lanes = {WARP}, lane = threadIdx.x & ({WARP} - 1);"
    lanes, all_lanes = by_device("const int n_lanes = 1, lane = 0;", lanes), by_device("", _ALL_LANES)

    @native_kernel("add_counts", filled(_ADD, rows=ROWS, lanes=lanes, all_lanes=all_lanes), lanes=True)
    def kernel(
        thread: wp.int32,
        count: wp.array(dtype=wp.int32),  # (n_rows,)
        partial: wp.array2d(dtype=wp.int64),  # (n, 3), found before; or none
        fault: wp.array(dtype=wp.int32),  # (n_faults,)
        found: wp.array2d(dtype=wp.int64),  # (n_threads, 3)
    ):
        """Largest count, sum of counts and largest fault, of `ROWS` rows or of as many results of this kernel."""

    return kernel
