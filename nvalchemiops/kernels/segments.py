"""Sums over the atoms of each system, in an order that depends only on the system and the type of device.

On a CPU, the atoms of a system are summed in blocks of `BLOCK` atoms, one after the other, and then the sums of blocks.
On a GPU, a warp sums the rows of a block (`rows_of_a_block`), of which each lane reads at most `READS`; the sums of
blocks are the rows of the next level, until one block is left. So a sum is bitwise the same for any number of threads,
and for a system alone or in a batch.
"""

from typing import Any

import warp as wp

from nvalchemiops.kernels.native import SYSTEM_OF, by_device, filled, native_kernel
from nvalchemiops.kernels.simd import WARP
from nvalchemiops.launch import kernel_variants

BLOCK = 256
"""Number of atoms in a block on a CPU."""

COLUMNS = 32
"""Largest number of columns that are summed at once on a CPU."""

READS = 32
"""Largest number of rows that a lane of a GPU reads for each of its columns; a power of two."""


def rows_of_a_block(n_columns: int) -> int:
    """Number of rows in a block on a GPU.

    As many lanes as there are columns, rounded up to a power of two, read one row together.
    """
    across = 1
    while across < min(n_columns, WARP):
        across *= 2
    return READS * WARP // across


_SUM_CPU = f"""{SYSTEM_OF}
    const int n_columns = values.shape[1];
    // without `begin` there is one system
    int from_row = 0, end_row = values.shape[0], first_block = by_block ? thread : 0;
    if (begin.shape[0] > 0) {{
        const int system = by_block ? system_of(block_begin, thread) : thread;
        if (by_block) {{
            if (thread >= block_begin.data[system + 1]) return;
            first_block -= block_begin.data[system];
        }}
        from_row = begin.data[system];
        end_row = begin.data[system + 1];
    }}
    const int last_block = by_block ? first_block + 1 : (end_row - from_row + {BLOCK} - 1) / {BLOCK};
    for (int column = 0; column < n_columns; column += {COLUMNS}) {{
        const int width = n_columns - column < {COLUMNS} ? n_columns - column : {COLUMNS};
        double total[{COLUMNS}] = {{}};
        for (int block = first_block; block < last_block; ++block) {{
            const int from = from_row + block * {BLOCK};
            double sum[{COLUMNS}] = {{}};
            for (int at = from; at < end_row && at < from + {BLOCK}; ++at) {{
                const int row = order.shape[0] > 0 ? order.data[at] : at;
                const auto *source = values.data + static_cast<long long>(row) * n_columns + column;
                for (int c = 0; c < width; ++c) sum[c] += source[c];
            }}
            for (int c = 0; c < width; ++c) total[c] += sum[c];
        }}
        for (int c = 0; c < width; ++c) sums.data[static_cast<long long>(thread) * n_columns + column + c] = total[c];
    }}
"""

_SUM_GPU = """
    const int lane = threadIdx.x & (@warp@ - 1), n_columns = values.shape[1];
    int across = 1, bits = @bits@;
    for (; across < n_columns && across < @warp@; across *= 2) --bits;
    const int block = 1 << bits;
    // Where the rows of a system begin. The rows of the next level are blocks, numbered by the place of their first
    // row, with one number more for each system before, whose last block may not be full. So numbers need no sums over
    // systems, and some have no block.
    const auto first_row = [&](int system, int levels) {
        int place = begin.shape[0] > 0 ? begin.data[system] : 0;
        for (int k = 0; k < levels; ++k) place = (place >> bits) + system;
        return place;
    };
    int system = thread, first = 0;
    if (by_block) {
        int high = begin.shape[0] - 1;
        for (system = 0; high - system > 1;) {
            const int middle = (system + high) / 2;
            if (first_row(middle, level + 1) <= thread) system = middle;
            else high = middle;
        }
        first = (thread - first_row(system, level + 1)) * block;
    }
    int n_rows = begin.shape[0] > 0 ? begin.data[system + 1] - begin.data[system] : n_atoms;
    for (int k = 0; k < level; ++k) n_rows = (n_rows + block - 1) >> bits;
    if (by_block && (first < 0 || first >= n_rows)) return;
    const int from = first_row(system, level), end = by_block && first + block < n_rows ? first + block : n_rows;
    for (int tile = 0; tile < n_columns; tile += across) {
        const int column = tile + (lane & (across - 1));
        double sum = 0.0;
        if (column < n_columns)
            for (int at = first + lane / across; at < end; at += @warp@ / across) {
                const int row = order.shape[0] > 0 ? order.data[from + at] : from + at;
                sum += values.data[static_cast<long long>(row) * n_columns + column];
            }
        for (int step = @warp@ / 2; step >= across; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        if (lane < across && column < n_columns) sums.data[static_cast<long long>(thread) * n_columns + column] = sum;
    }
"""

_SUM = by_device(_SUM_CPU, filled(_SUM_GPU, warp=WARP, bits=(READS * WARP).bit_length() - 1))


@kernel_variants(("float64",), ("float32",))
def sum_rows(precision: str) -> Any:
    """The kernel that sums the rows of ``values`` over each system, or over each block of a system."""
    real = getattr(wp, precision)

    @native_kernel(f"sum_rows_{precision}", _SUM, lanes=True)
    def kernel(
        thread: wp.int32,
        values: wp.array2d(dtype=real),  # (n_atoms, n_columns)
        order: wp.array(dtype=wp.int32),  # (n_atoms,), rows sorted by system; none if they are sorted
        begin: wp.array(dtype=wp.int32),  # (n_systems + 1,), into the order; or none: one system
        block_begin: wp.array(dtype=wp.int32),  # (n_systems + 1,), numbers of the first blocks; or none
        by_block: wp.int32,  # whether a thread has one block rather than one system
        level: wp.int32,  # on a GPU: how many times rows were summed to blocks already; 0 for atoms
        n_atoms: wp.int32,  # on a GPU: number of atoms of all systems
        sums: wp.array2d(dtype=wp.float64),  # a row for each thread
    ):
        """Add the rows of a system or a block."""

    return kernel
