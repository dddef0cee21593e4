"""Sums over the atoms of each system, in an order that depends on nothing but the system.

The atoms of a system are added in blocks of `BLOCK`, one after the other, then the blocks: the same for any number of
threads, on any device, and for a system alone or in a batch.
"""

from typing import Any

import warp as wp

from nvalchemiops.kernels.native import SYSTEM_OF, native_kernel
from nvalchemiops.launch import kernel_variants

BLOCK = 256
"""Atoms that are added one after the other."""

COLUMNS = 32
"""Columns that are added at once, at most."""

_SUM = f"""{SYSTEM_OF}
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


@kernel_variants(("float64",), ("float32",))
def sum_rows(precision: str) -> Any:
    """Kernel that adds the rows of ``values`` that belong to each system, or to each block of one."""
    real = getattr(wp, precision)

    @native_kernel(f"sum_rows_{precision}", _SUM)
    def kernel(
        thread: wp.int32,
        values: wp.array2d(dtype=real),  # (n_atoms, n_columns)
        order: wp.array(dtype=wp.int32),  # (n_atoms,), rows sorted by system; or none: they are
        begin: wp.array(dtype=wp.int32),  # (n_systems + 1,), into the order; or none: one system
        block_begin: wp.array(dtype=wp.int32),  # (n_systems + 1,), numbers of the first blocks; or none
        by_block: wp.int32,  # whether a thread has one block rather than one system
        sums: wp.array2d(dtype=wp.float64),  # a row for each thread
    ):
        """Add the rows of a system or a block."""

    return kernel
