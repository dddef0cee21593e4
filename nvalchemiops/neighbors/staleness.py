"""Which systems of a Verlet list need a new search, in one pass over their atoms on a CPU."""

from typing import Any

import warp as wp

from nvalchemiops.kernels.native import by_device, native_kernel
from nvalchemiops.launch import cpu_only, kernel_variants

_LOOK = """
    const long long *arrays = reinterpret_cast<const long long *>(addresses);
    const int *order = reinterpret_cast<const int *>(arrays[0]), *begin = reinterpret_cast<const int *>(arrays[1]);
    const int first = begin ? begin[thread] : 0, end = begin ? begin[thread + 1] : n_atoms;
    const auto of_this = [&](int array, int count, int size) {
        const char *start = reinterpret_cast<const char *>(arrays[array]);
        return start ? start + (count == 1 ? 0 : (long long)thread * size) : start;
    };
    const bool *pbc_then = reinterpret_cast<const bool *>(of_this(4, n_pbc, 3));
    const bool *pbc_now = reinterpret_cast<const bool *>(of_this(5, n_pbc, 3));
    const double *then = reinterpret_cast<const double *>(of_this(6, n_cells, 72));
    const double *now = reinterpret_cast<const double *>(of_this(7, n_cells, 72));
    const double *inverse = reinterpret_cast<const double *>(of_this(8, n_cells, 72));
    bool valid = true, strained = false;
    double change[9] = {}, strain[9] = {}, limit = 0.5 * skin;
    for (int a = 0; a < 3; ++a) {
        if (pbc_now && pbc_now[a] != pbc_then[a]) valid = false;
        if (!now || (pbc_now && !pbc_now[a])) continue;  // an open axis may hold anything
        for (int k = 3 * a; k < 3 * a + 3; ++k) {
            change[k] = now[k] - then[k];
            strained = strained || now[k] != then[k];
        }
    }
    if (strained) {
        // a cell for all systems is kept once, and would not tell which system was built with which
        if (skin == 0.0 || n_cells != n_systems) valid = false;
        double rows = 0.0, columns = 0.0;
        for (int a = 0; a < 3; ++a)
            for (int b = 0; b < 3; ++b)
                for (int k = 0; k < 3; ++k) strain[3 * a + b] += inverse[3 * a + k] * change[3 * k + b];
        for (int a = 0; a < 3; ++a) {
            const double *e = strain;
            const double row = wp::abs(e[3 * a]) + wp::abs(e[3 * a + 1]) + wp::abs(e[3 * a + 2]);
            const double column = wp::abs(e[a]) + wp::abs(e[3 + a]) + wp::abs(e[6 + a]);
            rows = rows >= row || rows != rows ? rows : row;  // NaN stays
            columns = columns >= column || columns != columns ? columns : column;
        }
        limit = 0.5 * (skin - reach * wp::sqrt(rows * columns));
    }
    const double most = limit < 0.0 ? -1.0 : limit * limit;
    const auto look = [&](const auto *positions_then, const auto *positions_now) {
        for (int from = first; from < end && valid; from += 256) {
            const int to = end - from < 256 ? end : from + 256;
            bool near = true;
            for (int k = from; k < to; ++k) {
                const long long at = 3 * (long long)(order ? order[k] : k);
                const double x = positions_then[at], y = positions_then[at + 1], z = positions_then[at + 2];
                double dx = positions_now[at] - x, dy = positions_now[at + 1] - y, dz = positions_now[at + 2] - z;
                if (strained) {
                    dx -= x * strain[0] + y * strain[3] + z * strain[6];
                    dy -= x * strain[1] + y * strain[4] + z * strain[7];
                    dz -= x * strain[2] + y * strain[5] + z * strain[8];
                }
                // without a skin any change counts, also one whose square would be zero; NaN counts in both
                if (skin == 0.0) near = near && dx == 0.0 && dy == 0.0 && dz == 0.0;
                else near = near && dx * dx + dy * dy + dz * dz <= most;
            }
            valid = near;
        }
    };
    if (is_single) look(reinterpret_cast<const float *>(arrays[2]), reinterpret_cast<const float *>(arrays[3]));
    else look(reinterpret_cast<const double *>(arrays[2]), reinterpret_cast<const double *>(arrays[3]));
    reinterpret_cast<bool *>(arrays[9])[thread] = !valid;
"""


@kernel_variants(())
def stale_kernel() -> Any:
    """The kernel that says for each system whether its list is stale, on a CPU. Addresses are those of host memory."""

    @native_kernel("stale_systems", by_device(_LOOK))
    def kernel(
        thread: wp.int32,
        addresses: wp.uint64,  # address of int64, the addresses of
        #   (n_atoms,) int32, rows sorted by system, or 0 if they are sorted
        #   (n_systems + 1,) int32, where systems begin, or 0 for one system
        #   (n_atoms, 3) float32 or float64, positions then and now
        #   (n_pbc, 3) bool, periodicity then and now, or 0
        #   (n_cells, 3, 3) float64, cells then and now, and the inverse of those then; or 0
        #   (n_systems,) bool, the results
        n_atoms: wp.int32,
        n_systems: wp.int32,
        n_cells: wp.int32,  # n_systems, or 1 if all share it; n_pbc likewise
        n_pbc: wp.int32,
        is_single: wp.int32,
        reach: wp.float64,
        skin: wp.float64,
    ):
        """Look at the atoms of a system."""

    return cpu_only(kernel)
