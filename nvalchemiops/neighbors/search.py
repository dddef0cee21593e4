"""The search for neighbors among binned atoms: each atom looks through the bins, and images of bins, within reach.

One kernel counts and fills, so that both round alike. The displacement between wrapped atoms is computed as
``(w_j - w_i) + S @ cell``, which changes sign exactly when the pair is looked at from the other side: a full list is
symmetric to the last bit.
"""

from typing import Any

import warp as wp

from nvalchemiops.geometry import lattice_point
from nvalchemiops.launch import gather_only, kernel_module, kernel_variants
from nvalchemiops.neighbors.grid import (
    BAD_TARGET,
    FARTHEST_BIN,
    LANES,
    bin_coordinates,
    slot_on_ring,
)
from nvalchemiops.neighbors.rows import direction

NOT_FINITE = 2**31 - 1
"""Count of an atom whose neighbors cannot be told: its position is not finite or too far away."""

_BAD_TARGET = wp.constant(BAD_TARGET)
_NOT_FINITE = wp.constant(NOT_FINITE)


def _compaction_table() -> str:
    """For each set of lanes, as a bit mask: the numbers of its lanes, packed into the low bytes of an integer."""
    entries = []
    for mask in range(1 << LANES):
        lanes = [lane for lane in range(LANES) if mask >> lane & 1]
        entries.append(f"0x{sum(lane << (8 * n) for n, lane in enumerate(lanes)):x}ULL")
    return ",".join(entries)


# Candidates begin .. end - 1 stand in a row in memory: vectors of LANES on a CPU, one for each lane of a warp on a GPU.
# `found` counts; the first `room` are written, at `row` and on.
_SCAN = f"""
    const double *x = coordinates.data;
    const double *y = x + coordinates.shape[1];
    const double *z = y + coordinates.shape[1];
    const int *atoms = reinterpret_cast<const int *>(entry.data);
    int *out_index = index.data ? index.data + row : nullptr;
    int *out_first = first.data ? first.data + row : nullptr;
    int *out_shift = shifts.data ? reinterpret_cast<int *>(shifts.data) + 3 * static_cast<long long>(row) : nullptr;
#if defined(__CUDA_ARCH__)
    const int lane = threadIdx.x & 31;
    for (int base = begin; base < end; base += 32) {{
        const int k = base + lane;
        bool hit = false;
        if (k < end && k != own && atoms[4 * k] >= lowest) {{
            const double dx = (x[k] - x_i[0]) + image[0];
            const double dy = (y[k] - x_i[1]) + image[1];
            const double dz = (z[k] - x_i[2]) + image[2];
            hit = dx * dx + dy * dy + dz * dz < cutoff_squared;
        }}
        const unsigned hits = __ballot_sync(0xffffffffu, hit);
        const int slot = found + __popc(hits & ((1u << lane) - 1u));
        if (hit && slot < room) {{
            out_index[slot] = atoms[4 * k];
            if (out_first) out_first[slot] = i;
            if (out_shift) {{
                int *at = out_shift + 3 * static_cast<long long>(slot);
                for (int a = 0; a < 3; ++a) at[a] = shift[a] - atoms[4 * k + 1 + a];
            }}
        }}
        found += __popc(hits);
    }}
#else
    static const unsigned long long lanes_of[{1 << LANES}] = {{{_compaction_table()}}};
    typedef double doubles __attribute__((ext_vector_type({LANES}), aligned(8)));
    typedef int ints __attribute__((ext_vector_type({LANES}), aligned(4)));
    typedef bool bools __attribute__((ext_vector_type({LANES})));
    typedef unsigned char bytes __attribute__((ext_vector_type({LANES})));
    const int most = 256;
    int hits[most + {LANES}];
    for (int from = begin; from < end; from += most) {{
        const int to = end - from < most ? end : from + most;
        int n = 0;
        for (int k = from; k < to; k += {LANES}) {{
            const doubles dx = (*(const doubles *)(x + k) - x_i[0]) + image[0];
            const doubles dy = (*(const doubles *)(y + k) - x_i[1]) + image[1];
            const doubles dz = (*(const doubles *)(z + k) - x_i[2]) + image[2];
            bools close = __builtin_convertvector(dx * dx + dy * dy + dz * dz < cutoff_squared, bools);
            unsigned mask = *(unsigned char *)&close;
            if (to - k < {LANES}) mask &= (1u << (to - k)) - 1u;
            if (own >= k && own < k + {LANES}) mask &= ~(1u << (own - k));
            if (lowest > 0)
                for (int lane = 0; lane < {LANES}; ++lane)
                    if ((mask >> lane & 1u) && atoms[4 * (k + lane)] < lowest) mask &= ~(1u << lane);
            if (room > 0) *(ints *)(hits + n) = __builtin_convertvector(*(const bytes *)&lanes_of[mask], ints) + k;
            n += __builtin_popcount(mask);
        }}
        const int write = n < room - found ? n : room - found;
        for (int t = 0; t < write; ++t) out_index[found + t] = atoms[4 * hits[t]];
        if (out_first)
            for (int t = 0; t < write; ++t) out_first[found + t] = i;
        if (out_shift) {{
            int *at = out_shift + 3 * static_cast<long long>(found);
            for (int t = 0; t < write; ++t, at += 3) {{
                const int *m = atoms + 4 * hits[t];
                at[0] = shift[0] - m[1];
                at[1] = shift[1] - m[2];
                at[2] = shift[2] - m[3];
            }}
        }}
        found += n;
    }}
#endif
    return found;
"""


@wp.func_native(_SCAN)
def scan(  # type: ignore[empty-body]
    coordinates: wp.array2d(dtype=wp.float64),
    entry: wp.array(dtype=wp.vec4i),
    begin: wp.int32,
    end: wp.int32,
    own: wp.int32,
    lowest: wp.int32,
    i: wp.int32,
    x_i: wp.vec3d,
    image: wp.vec3d,
    cutoff_squared: wp.float64,
    shift: wp.vec3i,
    row: wp.int32,
    room: wp.int32,
    found: wp.int32,
    index: wp.array(dtype=wp.int32),
    first: wp.array(dtype=wp.int32),
    shifts: wp.array(dtype=wp.vec3i),
) -> wp.int32:
    """Look through candidates for neighbors of atom i, in one image; returns ``found`` with theirs added."""
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
def image_of(number: wp.int32, bins: wp.int32):
    """The image of the cell that bin ``number`` of an endless row of cells lies in."""
    if bins == 0:
        return 0
    image = number / bins
    if image * bins > number:
        image -= 1
    return image


@wp.func
def outermost_bin(u: wp.float64):
    """Bin number of an end of a search, along any axis."""
    end = wp.float64(wp.static(FARTHEST_BIN))
    return wp.int32(wp.clamp(wp.floor(u), -end, end))


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
        lattice: wp.array(dtype=wp.mat33d),  # see grid.describe_systems
        planes: wp.array(dtype=wp.mat33d),
        reach: wp.array(dtype=wp.vec3d),
        bins: wp.array(dtype=wp.vec3i),
        ring: wp.array(dtype=wp.vec4i),
        cutoff: wp.float64,
        half: wp.int32,
        targets: wp.array(dtype=wp.int32),  # (n_rows,), the atom of each row; or none: all atoms
        rank: wp.array(dtype=wp.int32),  # (n_atoms,), where in the order each atom stands; with targets
        active: wp.array(dtype=wp.bool),  # (n_systems,), systems to search; or none: all
        row_begin: wp.array(dtype=wp.int32),  # (n_rows + 1,), or none: rows of equal width
        width: wp.int32,  # -1: count only
        fill_value: wp.int32,
        count: wp.array(dtype=wp.int32),  # (n_rows,), how many there are, also beyond the width; or none
        index: wp.array(dtype=wp.int32),  # flat rows
        first: wp.array(dtype=wp.int32),  # the same length, gets the atom of the row; or none
        shifts: wp.array(dtype=wp.vec3i),  # the same length; or none
        fault: wp.array(dtype=wp.int32),
    ):
        task, lane = wp.tid()
        k = offset + task
        row = k
        if targets.shape[0] > 0:
            target = targets[row]
            if target < 0 or target >= entry.shape[0]:
                # there may be no atom at all to read anything from
                fault[_BAD_TARGET] = 1
                if width > 0:
                    pad(index, shifts, fill_value, row * width, (row + 1) * width)
                if lane == 0 and count.shape[0] > 0:
                    count[row] = _NOT_FINITE
                return
            k = rank[target]
        else:
            row = entry[k][0]
        own = entry[k]
        i = own[0]
        s = int(0)
        if system.shape[0] > 0:
            s = wp.clamp(system[i], 0, lattice.shape[0] - 1)
        if active.shape[0] > 0:  # noqa: SIM102 (Warp evaluates both sides of `and`)
            if not active[s]:
                return
        start = row * width
        room = wp.max(width, wp.int32(0))
        if row_begin.shape[0] > 0:
            start = row_begin[row]
            room = row_begin[row + 1] - start

        x_i = wp.vec3d(coordinates[0, k], coordinates[1, k], coordinates[2, k])
        known = not wp.isnan(x_i[0])
        found = int(0)
        if known:
            box = lattice[s]
            n_bins = bins[s]
            place = ring[s]
            last_slot = place[1] - 1
            u = bin_coordinates(x_i, planes[s], n_bins)
            low_x = outermost_bin(u[0] - reach[s][0])
            high_x = outermost_bin(u[0] + reach[s][0])
            low_y = outermost_bin(u[1] - reach[s][1])
            high_y = outermost_bin(u[1] + reach[s][1])
            low_z = outermost_bin(u[2] - reach[s][2])
            high_z = outermost_bin(u[2] + reach[s][2])
            for z in range(low_z, high_z + 1):
                image_z = image_of(z, n_bins[2])
                for y in range(low_y, high_y + 1):
                    image_y = image_of(y, n_bins[1])
                    line = slot_on_ring(y - image_y * n_bins[1], z - image_z * n_bins[2], place)
                    for image_x in range(image_of(low_x, n_bins[0]), image_of(high_x, n_bins[0]) + 1):
                        from_x = low_x
                        to_x = high_x
                        if n_bins[0] > 0:
                            from_x = wp.max(low_x - image_x * n_bins[0], 0)
                            to_x = wp.min(high_x - image_x * n_bins[0], n_bins[0] - 1)
                        shift = wp.vec3i(image_x, image_y, image_z)
                        sign = direction(i, i, shift)
                        itself = int(-1)
                        if sign == 0:
                            itself = k
                        lowest = int(0)
                        if half != 0:
                            lowest = i
                            if sign <= 0:
                                lowest = i + 1
                        # bins of a line stand side by side on the ring, which may end between them
                        from_slot = (line + from_x) & last_slot
                        to_slot = from_slot + (to_x - from_x)
                        for part in range(2):
                            a = from_slot
                            b = wp.min(to_slot, last_slot)
                            if part == 1:
                                a = 0
                                b = to_slot - last_slot - 1
                            if b >= a:
                                found = scan(
                                    coordinates,
                                    entry,
                                    begin[place[0] + a],
                                    begin[place[0] + b + 1],
                                    itself,
                                    lowest,
                                    i,
                                    x_i,
                                    lattice_point(shift, box),
                                    cutoff * cutoff,
                                    shift + wp.vec3i(own[1], own[2], own[3]),
                                    start,
                                    room,
                                    found,
                                    index,
                                    first,
                                    shifts,
                                )
        if width > 0:
            pad(index, shifts, fill_value, start + wp.min(wp.int32(found), room), start + width)
        if not known:
            found = _NOT_FINITE
        if lane == 0 and count.shape[0] > 0:
            count[row] = found

    return gather_only(search)
