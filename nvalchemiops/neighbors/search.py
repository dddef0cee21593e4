"""The search for neighbors among binned atoms: each atom looks through the bins, and images of bins, within reach.

One kernel counts and fills, so that both round alike. The displacement between wrapped atoms is computed as
``(w_j - w_i) + S @ cell``, which changes sign exactly when the pair is looked at from the other side: a full list is
symmetric to the last bit.
"""

from typing import Any

import warp as wp

from nvalchemiops.launch import gather_only, kernel_module, kernel_variants
from nvalchemiops.neighbors.grid import (
    FARTHEST_BIN,
    LANES,
    Grid,
    bin_coordinates,
    system_of,
)

NOT_FINITE = 2**31 - 1
"""Count of an atom whose neighbors cannot be told: its position is not finite or too far away."""

ROWS_PER_THREAD = 16
"""Rows that one task on a CPU goes through: what Warp does for each task costs as much as a tenth of a row."""

_NOT_FINITE = wp.constant(NOT_FINITE)


def _compaction_table() -> str:
    """For each set of lanes, as a bit mask: the numbers of its lanes, packed into the low bytes of an integer."""
    entries = []
    for mask in range(1 << LANES):
        lanes = [lane for lane in range(LANES) if mask >> lane & 1]
        entries.append(f"0x{sum(lane << (8 * n) for n, lane in enumerate(lanes)):x}ULL")
    return ",".join(entries)


# Bins are looked through in lines along x, image by image. The candidates of one line and image stand in a row in
# memory (or in two, where the ring ends between them): vectors of LANES on a CPU, one for each lane of a warp on a GPU.
# `found` counts; the first `room` are written, at `row` and on.
_SCAN = f"""
    const double *x = coordinates.data;
    const double *y = x + coordinates.shape[1];
    const double *z = y + coordinates.shape[1];
    const int *atoms = reinterpret_cast<const int *>(entry.data);
    const int *slots = begin.data + grid.ring[0];
    const int last_slot = grid.ring[1] - 1;
    const int bins = grid.bins[0];
    const auto image_of = [](int number, int bins) {{
        // most bins lie in the cell itself, and a division takes longer than all the rest
        if (bins == 0 || (number >= 0 && number < bins)) return 0;
        return number >= 0 ? number / bins : -((bins - 1 - number) / bins);
    }};
    int *out_index = index.data ? index.data + row : nullptr;
    int *out_first = first.data ? first.data + row : nullptr;
    int *out_shift = shifts.data ? reinterpret_cast<int *>(shifts.data) + 3 * static_cast<long long>(row) : nullptr;
    const int i = atoms[4 * k_i];
    const double x_i = x[k_i], y_i = y[k_i], z_i = z[k_i];
    int found = 0;
    const double cutoff_squared = cutoff * cutoff;
#if defined(__CUDA_ARCH__)
    const int lane = threadIdx.x & 31;
#else
    static const unsigned long long lanes_of[{1 << LANES}] = {{{_compaction_table()}}};
    typedef double doubles __attribute__((ext_vector_type({LANES}), aligned(8)));
    typedef int ints __attribute__((ext_vector_type({LANES}), aligned(4)));
    typedef bool bools __attribute__((ext_vector_type({LANES})));
    typedef unsigned char bytes __attribute__((ext_vector_type({LANES})));
    const int most = 256;
    int hits[most + {LANES}];
    // `about`: where the atom is, the image that is looked at, the square of the cutoff
    const auto test = [](const double *x, const double *y, const double *z, int n, const double *about, int *hits,
                         bool shifted) __attribute__((always_inline)) {{
        int found = 0;
        for (int k = 0; k < n; k += {LANES}) {{
            doubles dx = *(const doubles *)(x + k) - about[0];
            doubles dy = *(const doubles *)(y + k) - about[1];
            doubles dz = *(const doubles *)(z + k) - about[2];
            if (shifted) dx += about[3], dy += about[4], dz += about[5];
#if defined(__FMA__) || defined(__aarch64__)
            doubles squared = dx * dx;
            squared = __builtin_elementwise_fma(dy, dy, squared);
            squared = __builtin_elementwise_fma(dz, dz, squared);
#else
            const doubles squared = dx * dx + dy * dy + dz * dz;
#endif
            bools close = __builtin_convertvector(squared < about[6], bools);
            unsigned mask = *(unsigned char *)&close;
            if (n - k < {LANES}) mask &= (1u << (n - k)) - 1u;
            if (hits) *(ints *)(hits + found) = __builtin_convertvector(*(const bytes *)&lanes_of[mask], ints) + k;
            found += __builtin_popcount(mask);
        }}
        return found;
    }};
    // functions of their own, or the loops around them would take the registers away
    const auto count_near = [test](const double *x, const double *y, const double *z, int n, const double *about,
                                   bool shifted) __attribute__((noinline)) {{
        return shifted ? test(x, y, z, n, about, nullptr, true) : test(x, y, z, n, about, nullptr, false);
    }};
    const auto list_near = [test](const double *x, const double *y, const double *z, int n, const double *about,
                                  bool shifted, int *hits) __attribute__((noinline)) {{
        return shifted ? test(x, y, z, n, about, hits, true) : test(x, y, z, n, about, hits, false);
    }};
#endif
    for (int bin_z = low[2]; bin_z <= high[2]; ++bin_z)
    for (int bin_y = low[1]; bin_y <= high[1]; ++bin_y)
    for (int image_x = image_of(low[0], bins); image_x <= image_of(high[0], bins); ++image_x) {{
        const int image_y = image_of(bin_y, grid.bins[1]), image_z = image_of(bin_z, grid.bins[2]);
        const auto along = [&](int a) {{
            return (image_y * grid.lattice.data[1][a] + image_z * grid.lattice.data[2][a])
                + image_x * grid.lattice.data[0][a];
        }};
        const double t_x = along(0), t_y = along(1), t_z = along(2);
        const int shift_x = cells[0] + image_x, shift_y = cells[1] + image_y, shift_z = cells[2] + image_z;
        const int sign = image_x ? image_x : image_y ? image_y : image_z;
        const int own = sign ? -1 : k_i;
        const int lowest = half ? i + (sign <= 0) : 0;
        int from_bin = low[0] - image_x * bins, to_bin = high[0] - image_x * bins;
        if (bins > 0) {{
            from_bin = from_bin > 0 ? from_bin : 0;
            to_bin = to_bin < bins - 1 ? to_bin : bins - 1;
        }}
        // as slot_on_ring
        const unsigned line = static_cast<unsigned>(grid.ring[2]) * (bin_y - image_y * grid.bins[1])
            + static_cast<unsigned>(grid.ring[3]) * (bin_z - image_z * grid.bins[2]);
        const int from_slot = static_cast<int>(line + from_bin) & last_slot;
        const int to_slot = from_slot + (to_bin - from_bin);
        for (int part = 0; part <= (to_slot > last_slot); ++part) {{
            const int start = slots[part ? 0 : from_slot];
            const int end = slots[(part ? to_slot - last_slot - 1 : to_slot < last_slot ? to_slot : last_slot) + 1];
#if defined(__CUDA_ARCH__)
            for (int base = start; base < end; base += 32) {{
                const int k = base + lane;
                bool hit = false;
                if (k < end && k != own && atoms[4 * k] >= lowest) {{
                    const double dx = (x[k] - x_i) + t_x, dy = (y[k] - y_i) + t_y, dz = (z[k] - z_i) + t_z;
                    hit = dx * dx + dy * dy + dz * dz < cutoff_squared;
                }}
                const unsigned hits = __ballot_sync(0xffffffffu, hit);
                const int slot = found + __popc(hits & ((1u << lane) - 1u));
                if (hit && slot < room) {{
                    out_index[slot] = atoms[4 * k];
                    if (out_first) out_first[slot] = i;
                    if (out_shift) {{
                        int *at = out_shift + 3 * static_cast<long long>(slot);
                        at[0] = shift_x - atoms[4 * k + 1];
                        at[1] = shift_y - atoms[4 * k + 2];
                        at[2] = shift_z - atoms[4 * k + 3];
                    }}
                }}
                found += __popc(hits);
            }}
#else
            const double about[7] = {{x_i, y_i, z_i, t_x, t_y, t_z, cutoff_squared}};
            for (int from = start; from < end; from += most) {{
                const int length = end - from < most ? end - from : most;
                const bool with_self = own >= from && own < from + length;
                int n;
                if (room <= 0 && !half) {{
                    n = count_near(x + from, y + from, z + from, length, about, sign);
                    found += n - with_self;
                    continue;
                }}
                n = list_near(x + from, y + from, z + from, length, about, sign, hits);
                if (half || with_self) {{
                    int kept = 0;
                    for (int t = 0; t < n; ++t) {{
                        hits[kept] = hits[t];
                        kept += from + hits[t] != own && atoms[4 * (from + hits[t])] >= lowest;
                    }}
                    n = kept;
                }}
                const int write = n < room - found ? n : room - found;
                for (int t = 0; t < write; ++t) out_index[found + t] = atoms[4 * (from + hits[t])];
                if (out_first)
                    for (int t = 0; t < write; ++t) out_first[found + t] = i;
                if (out_shift) {{
                    int *at = out_shift + 3 * static_cast<long long>(found);
                    for (int t = 0; t < write; ++t, at += 3) {{
                        const int *m = atoms + 4 * (from + hits[t]);
                        at[0] = shift_x - m[1];
                        at[1] = shift_y - m[2];
                        at[2] = shift_z - m[3];
                    }}
                }}
                found += n;
            }}
#endif
        }}
    }}
    return found;
"""


@wp.func_native(_SCAN)
def search_around(  # type: ignore[empty-body]
    k_i: wp.int32,
    low: wp.vec3i,
    high: wp.vec3i,
    cells: wp.vec3i,
    grid: Grid,
    coordinates: wp.array2d(dtype=wp.float64),
    entry: wp.array(dtype=wp.vec4i),
    begin: wp.array(dtype=wp.int32),
    cutoff: wp.float64,
    half: wp.int32,
    row: wp.int32,
    room: wp.int32,
    index: wp.array(dtype=wp.int32),
    first: wp.array(dtype=wp.int32),
    shifts: wp.array(dtype=wp.vec3i),
) -> wp.int32:
    """Look through bins ``low .. high`` for neighbors of the atom at ``k_i``, whose whole cells are ``cells``."""
    ...


_PAD = """
#if defined(__CUDA_ARCH__)
    const int lane = threadIdx.x & 31, lanes = 32;
#else
    const int lane = 0, lanes = 1;
#endif
    for (int slot = from_ + lane; slot < to; slot += lanes) index.data[slot] = value;
    if (shifts.data) {
        int *components = reinterpret_cast<int *>(shifts.data);
        for (long long c = 3 * static_cast<long long>(from_) + lane; c < 3 * static_cast<long long>(to); c += lanes)
            components[c] = 0;
    }
"""


@wp.func_native(_PAD)
def pad(
    index: wp.array(dtype=wp.int32), shifts: wp.array(dtype=wp.vec3i), value: wp.int32, from_: wp.int32, to: wp.int32
):
    """Fill the rest of a row of a matrix."""
    ...


@wp.func
def outermost_bins(u: wp.vec3d):
    """Bin numbers of an end of a search."""
    end = wp.float64(wp.static(FARTHEST_BIN))
    return wp.vec3i(
        wp.int32(wp.clamp(wp.floor(u[0]), -end, end)),
        wp.int32(wp.clamp(wp.floor(u[1]), -end, end)),
        wp.int32(wp.clamp(wp.floor(u[2]), -end, end)),
    )


@kernel_variants(())
def search_neighbors() -> Any:
    """Kernel that counts the neighbors of each atom and, given room, writes them."""

    @wp.kernel(module=kernel_module("neighbor_search"), enable_backward=False)
    def search(
        offset: wp.int32,
        coordinates: wp.array2d(dtype=wp.float64),  # see grid.place_atoms
        entry: wp.array(dtype=wp.vec4i),
        begin: wp.array(dtype=wp.int32),  # (n_slots + 1 or more,), where the atoms of each slot begin
        system: wp.array(dtype=wp.int32),  # (n_atoms,), or none: one system
        grids: wp.array(dtype=Grid),  # (n_systems,)
        cutoff: wp.float64,
        half: wp.int32,
        target: wp.array(dtype=wp.int32),  # (n_rows,), place in the order of the atom of each row; or none: all atoms
        active: wp.array(dtype=wp.bool),  # (n_systems,), systems to search; or none: all
        row_begin: wp.array(dtype=wp.int32),  # (n_rows + 1,), or none: rows of equal width
        width: wp.int32,  # -1: count only
        fill_value: wp.int32,
        count: wp.array(dtype=wp.int32),  # (n_rows,), how many there are, also beyond the width; or none
        index: wp.array(dtype=wp.int32),  # flat rows
        first: wp.array(dtype=wp.int32),  # the same length, gets the atom of the row; or none
        shifts: wp.array(dtype=wp.vec3i),  # the same length; or none
        rows_per_thread: wp.int32,
    ):
        thread, lane = wp.tid()
        n_rows = wp.where(target.shape[0] > 0, target.shape[0], entry.shape[0])
        first_row = (offset + thread) * rows_per_thread
        for task in range(first_row, wp.min(first_row + rows_per_thread, n_rows)):
            k = task
            if target.shape[0] > 0:
                k = target[task]
            row = task
            i = int(-1)
            s = int(0)
            known = bool(False)
            wanted = bool(True)
            if k >= 0:  # -1: there is no such atom
                i = entry[k][0]
                if target.shape[0] == 0:
                    row = i
                s = system_of(i, system, grids.shape[0])
                known = not wp.isnan(coordinates[0, k])
                if active.shape[0] > 0:
                    wanted = active[s]
            start = row * width
            room = wp.max(width, wp.int32(0))
            if row_begin.shape[0] > 0:
                start = row_begin[row]
                room = row_begin[row + 1] - start
            found = int(0)
            if known and wanted:
                grid = grids[s]
                u = bin_coordinates(wp.vec3d(coordinates[0, k], coordinates[1, k], coordinates[2, k]), grid)
                low = outermost_bins(u - grid.reach)
                high = outermost_bins(u + grid.reach)
                found = search_around(
                    k,
                    low,
                    high,
                    wp.vec3i(entry[k][1], entry[k][2], entry[k][3]),
                    grid,
                    coordinates,
                    entry,
                    begin,
                    cutoff,
                    half,
                    start,
                    room,
                    index,
                    first,
                    shifts,
                )
            if width > 0 and wanted:
                pad(index, shifts, fill_value, start + wp.min(wp.int32(found), room), start + width)
            if not known:
                found = _NOT_FINITE
            if lane == 0 and wanted and count.shape[0] > 0:
                count[row] = found

    return gather_only(search)
