"""Displacements of pairs and the squares of their lengths, in the precision of the positions."""

from typing import Any

import warp as wp

from nvalchemiops.kernels.native import filled, native_kernel
from nvalchemiops.launch import kernel_module, kernel_variants
from nvalchemiops.neighbors.rows import NOWHERE
from nvalchemiops.neighbors.search import NOT_FINITE
from nvalchemiops.types import REAL

SLOTS_PER_THREAD = 64
"""Slots for each thread on a CPU, where a thread is a call; on a GPU each thread has one slot."""

_MEASURE = """
    const int n_atoms = positions.shape[0], n_cells = cell.shape[0], n_rows = target.shape[0];
    const int n_slots = second.shape[0], begin = thread * slots_per_thread;
    const int end = n_slots - begin < slots_per_thread ? n_slots : begin + slots_per_thread;
    const bool chosen = n_rows > 0, shifted = shift.shape[0] > 0;
    const auto *x = &positions.data[0][0];
    const auto is_nowhere = [](int s) { return s == @nowhere@ || s == -@nowhere@; };
    for (int slot = begin; slot < end; ++slot) {
        const int row = width > 0 ? slot / width : first.data[slot], j = second.data[slot];
        bool known = true, present = j != padding;
        if (present && counts.shape[0] > 0) {
            const int count = counts.data[row];
            present = slot - row * width < count;
            // of a row without known neighbors only the mark
            if (count == @unknown@) present = present && shifted && is_nowhere(shift.data[slot][0]);
        }
        if (!present) {
            vectors.data[slot] = {};
            squares.data[slot] = 0;
            continue;
        }
        int i = row;
        if (chosen) i = row >= 0 && row < n_rows ? target.data[row] : -1;
        known = i >= 0 && i < n_atoms && j >= 0 && j < n_atoms;
        const int system = known && systems.shape[0] > 0 ? systems.data[i] : 0;
        known = known && (!shifted || (system >= 0 && system < n_cells));
        if (!known) {
            for (int c = 0; c < 3; ++c) vectors.data[slot][c] = NAN;
            squares.data[slot] = NAN;
            continue;
        }
        const auto *x_i = x + 3LL * i, *x_j = x + 3LL * j;
        auto a = x_j[0] - x_i[0], b = x_j[1] - x_i[1], c = x_j[2] - x_i[2];
        if (shifted) {
            for (int axis = 0; axis < 3; ++axis) {
                const int s = shift.data[slot][axis];
                if (s == 0) continue;
                const auto *vector = cell.data[system].data[axis];
                const decltype(a) count = is_nowhere(s) ? NAN : s;
                a += count * vector[0];
                b += count * vector[1];
                c += count * vector[2];
            }
        }
        vectors.data[slot] = {a, b, c};
        squares.data[slot] = a * a + b * b + c * c;
    }
"""


@kernel_variants(("float64",), ("float32",))
def measure_pairs(precision: str) -> Any:
    """Kernel that measures the slots of a list or a matrix: zero in padding, NaN for no atom or `NOWHERE`.

    A row with the count `NOT_FINITE` holds the mark of an atom without known neighbors, or nothing but padding.
    Lattice vectors along which a pair is not shifted are not read. Nothing is contracted to fused operations, so that
    the same arithmetic written in torch gives the same bits.
    """
    scalar, vec3, mat33 = REAL[precision]

    name = f"measure_pairs_{precision}"
    wp.set_module_options({"fuse_fp": False}, module=kernel_module(name))

    @native_kernel(name, filled(_MEASURE, nowhere=NOWHERE, unknown=NOT_FINITE))
    def kernel(
        thread: wp.int32,
        positions: wp.array(dtype=vec3),  # (n_atoms,)
        cell: wp.array(dtype=mat33),  # (n_systems,), (1,) for all, or none
        systems: wp.array(dtype=wp.int32),  # (n_atoms,), or none
        target: wp.array(dtype=wp.int32),  # (n_rows,), the atom of each row, or none
        first: wp.array(dtype=wp.int32),  # (n_slots,), the row of each slot, or none: a matrix
        second: wp.array(dtype=wp.int32),  # (n_slots,)
        shift: wp.array(dtype=wp.vec3i),  # (n_slots,), or none
        counts: wp.array(dtype=wp.int32),  # (n_rows,), how many slots of a row of a matrix are no padding; or none
        width: wp.int32,  # of a matrix, or 0
        padding: wp.int32,
        slots_per_thread: wp.int32,
        squares: wp.array(dtype=scalar),  # (n_slots,)
        vectors: wp.array(dtype=vec3),
    ):
        """Measure the slots of a thread."""

    return kernel
