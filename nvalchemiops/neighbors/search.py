"""The search for neighbors among binned atoms: each atom visits the bins, and images of bins, within reach.

One kernel counts and fills, so that both round alike. The displacement between wrapped atoms is computed as
``(w_j - w_i) + S @ cell``, which changes sign exactly when i and j are exchanged: a full list is symmetric to the last
bit.

The body is C++, since Warp's language has neither vectors of candidates nor votes among the lanes of a warp. On a GPU
the lanes of a warp share a row: each looks up a line of bins, and then each tests one candidate at a time. On a CPU the
atoms of a bin, which are adjacent in the order of the search, share their candidates: these are copied once from all
bins within reach to a block of memory, and each atom of the bin tests the block in vectors.
"""

from typing import Any, NamedTuple

import warp as wp

from nvalchemiops.kernels.native import native_kernel, signature
from nvalchemiops.kernels.simd import LANES, lanes_of_masks
from nvalchemiops.launch import kernel_variants
from nvalchemiops.neighbors.grid import FARTHEST_BIN, Grid
from nvalchemiops.neighbors.rows import NOWHERE

NOT_FINITE = 2**31 - 1
"""Count of an atom without known neighbors: its position is not finite or too far away, its cell unusable, or its
system does not exist.

In a search with images its row holds the atom itself in the image `NOWHERE`."""

ROWS_PER_THREAD = 64
"""Number of rows of a task on a CPU: several bins full of atoms that share their candidates."""

BLOCK = 512
"""Number of candidates that are copied at once: as many as stay in the nearest cache."""

SCRATCH_WIDTH, WIDEST_SCRATCH = 128, 496
"""Slots of a row in a small search that writes before it counts, for the most rows and for the fewest rows."""

SCRATCH_ROWS = 2048
"""Number of rows up to which a search writes before it counts."""


def scratch_width(n_rows: int) -> int:
    """Slots of a row in a search of ``n_rows`` rows that writes before it counts; longer rows cause a second search."""
    lines = min(SCRATCH_ROWS * SCRATCH_WIDTH // max(n_rows, 1), WIDEST_SCRATCH) // 16
    # an odd number of cache lines, so that the beginnings of rows do not evict each other
    return max(SCRATCH_WIDTH, 16 * (lines - 1 + lines % 2))


GROUP = 32
"""Largest number of atoms that share candidates, on a CPU."""

MOST_ROWS_OF_WARP, WARPS_OF_MULTIPROCESSOR = 16, 32
"""Largest number of rows of a warp of a GPU, and the number of warps below which they have fewer."""


def rows_of_warp(n_rows: int, multiprocessors: int) -> int:
    """Rows of a warp, a power of two, which share candidates if they are close; 1 if rows are too few for a GPU.

    A CPU that runs the code for GPUs, in tests, has no multiprocessors, and counts as a GPU with one.
    """
    rows = max(1, min(MOST_ROWS_OF_WARP, n_rows // (WARPS_OF_MULTIPROCESSOR * max(multiprocessors, 1))))
    return 1 << (rows.bit_length() - 1)


class Addition(NamedTuple):
    """Text that a kernel adds to the text of the search, which all kernels share (`search_text`).

    Attributes
    ----------
    declarations : str
        Functions and variables of the thread, after those of the search.
    writes : str
        Whether neighbors are processed one by one, because they are written or tested further.
    sharing : int
        On a GPU: most rows that share their candidates.
    chosen, row : str
        On a GPU: after the vote of the lanes on their candidates, some of which are a ``hit``; at the end of a row.
    member : str
        On a CPU: a further member of the block of candidates.
    reach, tested, near, end : str
        On a CPU: the square of the distance that row ``r`` searches; after the ``squared`` distances of a vector of
        candidates; after the near ones are listed; at the end of the rows of a group.
    """

    declarations: str = ""
    writes: str = "width >= 0 || row_begin.shape[0] > 0"
    sharing: int = 4
    chosen: str = ""
    row: str = "if (width > 0) pad(look_up(task + member), found, lane, 32);"
    member: str = ""
    reach: str = "cutoff_squared"
    tested: str = ""
    near: str = ""
    end: str = "finish(group[g], found[g]);"


def search_text(addition: Addition) -> str:
    """The text of a search with the additions of a kernel."""
    return f"""
    const int n_rows = target.shape[0] > 0 ? target.shape[0] : entry.shape[0], first_task = thread * rows_per_thread;
    const int last_task = first_task + rows_per_thread < n_rows ? first_task + rows_per_thread : n_rows;
    const double *x = coordinates.data;
    const double *y = x + coordinates.shape[1];
    const double *z = y + coordinates.shape[1];
    const int *atoms = reinterpret_cast<const int *>(entry.data);  // i, and the whole cells taken off it
    const double cutoff_squared = cutoff * cutoff;
    const bool fill = {addition.writes};

    struct Row {{
        int row, system, room, low[3], high[3];
        long long k, start;
        bool known, wanted;
    }};
    const auto bin_of = [](double u) {{
        const double end = {FARTHEST_BIN};
        u = ::floor(u);
        return static_cast<int>(u < -end ? -end : u > end ? end : u);
    }};
    const auto look_up = [&](int task) {{
        Row r;
        r.k = target.shape[0] > 0 ? target.data[task] : task;
        r.row = task;
        r.system = 0;
        r.known = false;
        r.wanted = true;
        if (r.k >= 0) {{  // -1: there is no such atom
            const int i = atoms[4 * r.k];
            if (target.shape[0] == 0) r.row = i;
            if (system.shape[0] > 0) {{
                const int s = system.data[i], last = grids.shape[0] - 1;
                r.system = s < 0 ? 0 : s > last ? last : s;
            }}
            if (active.shape[0] > 0) r.wanted = active.data[active.shape[0] > 1 ? r.system : 0];
            if (!r.wanted) return r;  // coordinates of its system were not written
            r.known = x[r.k] == x[r.k];
            const auto &grid = grids.data[r.system];
            for (int a = 0; a < 3; ++a) {{
                double u = grid.planes.data[a][0] * x[r.k] + grid.planes.data[a][1] * y[r.k]
                    + grid.planes.data[a][2] * z[r.k];
                if (grid.bins[a] > 0) u *= grid.bins[a];
                r.low[a] = bin_of(u - grid.reach[a]);
                r.high[a] = bin_of(u + grid.reach[a]);
            }}
        }}
        r.start = static_cast<long long>(r.row) * width;
        r.room = width > 0 ? width : 0;
        if (row_begin.shape[0] > 0) {{
            r.start = row_begin.data[r.row];
            r.room = row_begin.data[r.row + 1] - row_begin.data[r.row];
        }}
        return r;
    }};
    const auto pad = [&](const Row &r, int found, int lane, int lanes) {{
        if (width > 0) {{
            int written = found < width ? found : width;
            const auto &bins = grids.data[r.system].bins;
            if (!r.known && r.k >= 0 && shifts.shape[0] > 0 && (bins[0] | bins[1] | bins[2])) {{
                if (lane == 0) {{  // the mark of what is not known
                    index.data[r.start] = atoms[4 * r.k];
                    int *image = reinterpret_cast<int *>(shifts.data) + 3 * r.start;
                    image[0] = image[1] = image[2] = {NOWHERE};
                }}
                written = 1;
            }}
            for (int slot = written + lane; slot < width; slot += lanes) index.data[r.start + slot] = fill_value;
            if (shifts.shape[0] > 0) {{
                int *components = reinterpret_cast<int *>(shifts.data) + 3 * r.start;
                for (long long c = 3LL * written + lane; c < 3LL * width; c += lanes) components[c] = 0;
            }}
        }}
    }};
    const auto tell = [&](const Row &r, int found) {{
        if (count.shape[0] > 0) count.data[r.row] = r.known ? found : {NOT_FINITE};
    }};

    // Bins within reach lie in lines along x, image by image: atoms of one line and image stand in a row in memory, or
    // in two where the ring ends between them.
    const auto image_of = [](int number, int bins) {{
        // most bins lie in the cell itself, and a division takes longer than all the rest
        if (bins == 0 || (number >= 0 && number < bins)) return 0;
        return number >= 0 ? number / bins : -((bins - 1 - number) / bins);
    }};
    struct Line {{
        int image[3], from, to, from_after, to_after;
    }};
    const auto line_at = [&](const auto &grid, int low, int high, int image_x, int bin_y, int bin_z) {{
        const int *slots = begin.data + grid.ring[0];
        const int last_slot = grid.ring[1] - 1, bins = grid.bins[0];
        Line line = {{{{image_x, image_of(bin_y, grid.bins[1]), image_of(bin_z, grid.bins[2])}}, 0, 0, 0, 0}};
        int from = low - image_x * bins, to = high - image_x * bins;
        if (bins > 0) {{
            from = from > 0 ? from : 0;
            to = to < bins - 1 ? to : bins - 1;
        }}
        // as slot_on_ring
        const unsigned offset = static_cast<unsigned>(grid.ring[2]) * (bin_y - line.image[1] * grid.bins[1])
            + static_cast<unsigned>(grid.ring[3]) * (bin_z - line.image[2] * grid.bins[2]);
        const int first_slot = static_cast<int>(offset + from) & last_slot;
        const int end_slot = first_slot + (to - from) + 1;
        line.from = slots[first_slot];
        line.to = slots[end_slot <= last_slot ? end_slot : last_slot + 1];
        if (end_slot > last_slot + 1) {{
            line.from_after = slots[0];
            line.to_after = slots[end_slot - last_slot - 1];
        }}
        return line;
    }};
    const auto move = [](const auto &grid, const int *image, double *moved) {{
        for (int a = 0; a < 3 && (image[0] || image[1] || image[2]); ++a)  // most are in the cell itself
            moved[a] = (image[0] * grid.lattice.data[0][a] + image[1] * grid.lattice.data[1][a])
                + image[2] * grid.lattice.data[2][a];
    }};
{addition.declarations}
#if defined(__CUDA_ARCH__)
    struct alignas(16) Four {{
        int of[4];
    }};
    const Four *fours = reinterpret_cast<const Four *>(atoms);
    const unsigned all = 0xffffffffu;
    const int lane = threadIdx.x & 31;
    for (int task = first_task; task < last_task; task += 32) {{
        // Each lane looks up one row, and keeps its count. Rows with the same bins within reach share their candidates.
        const bool has_row = task + lane < last_task;
        const Row mine = look_up(has_row ? task + lane : task);
        const int mine_at = static_cast<int>(mine.k);
        int count_of_mine = 0;
        unsigned left = __ballot_sync(all, has_row && mine.wanted);
        while (left) {{
            const int leader = __ffs(left) - 1, system = __shfl_sync(all, mine.system, leader);
            const bool known = __shfl_sync(all, static_cast<int>(mine.known), leader);
            bool same = mine.known && mine.system == system;
            int low[3], high[3];
            for (int a = 0; a < 3; ++a) {{
                low[a] = __shfl_sync(all, mine.low[a], leader);
                high[a] = __shfl_sync(all, mine.high[a], leader);
                same = same && mine.low[a] == low[a] && mine.high[a] == high[a];
            }}
            unsigned together = __ballot_sync(all, known ? same : lane == leader) & left;
            // Most candidates are told from neighbors in float32, by places relative to the first atom.
            const int center = __shfl_sync(all, mine_at, leader);
            float own[3] = {{}};
            if (mine.known && known) {{
                own[0] = static_cast<float>(x[mine_at] - x[center]);
                own[1] = static_cast<float>(y[mine_at] - y[center]);
                own[2] = static_cast<float>(z[mine_at] - z[center]);
            }}
            float at[{addition.sharing}][3], apart = 0.0f;
            int n_members = 0;
            unsigned members = 0;  // bits of their lanes
            for (int g = 0; g < {addition.sharing}; ++g) {{
                const bool is_member = together != 0;
                const int source = is_member ? __ffs(together) - 1 : leader;
                members |= together & -together;
                n_members += is_member;
                together &= together - 1;
                float from_first = 0.0f;
                for (int a = 0; a < 3; ++a) {{
                    const float place = __shfl_sync(all, own[a], source);
                    from_first += fabs(place);
                    at[g][a] = is_member ? place : 1e30f;  // far away
                }}
                apart = from_first > apart ? from_first : apart;
            }}
            left &= ~members;
            if (known) {{
                const auto &grid = grids.data[system];
                const float reach = static_cast<float>(cutoff), reach_squared = reach * reach;
                float images = 1.0f;  // or more
                for (int a = 0; a < 3; ++a) images += fabs(1.0f * low[a]) + fabs(1.0f * high[a]);
                const double x_0 = x[center], y_0 = y[center], z_0 = z[center];
                const float largest = 4.0f * (reach + images * static_cast<float>(grid.extent))
                    + static_cast<float>(::fabs(x_0) + ::fabs(y_0) + ::fabs(z_0));
                // More than the error of a squared distance near the cutoff: 2^-20 of the cutoff times the largest
                // place, and what the test in float64 loses itself. All are tested again if the square is no float32,
                // or if the square of the error counts.
                const bool is_float = reach > 1e-15f && reach < 1e15f && apart < 1e7f * reach;
                const float doubt = is_float ? reach * (2e-6f * (reach + apart) + 8e-15f * largest)
                                             : static_cast<float>(1e300);
                const int end_of_ring = begin.data[grid.ring[0] + grid.ring[1]];
                const int atoms_of_ring = end_of_ring - begin.data[grid.ring[0]];
                // lines by image along x, bin along y, bin along z: the digits of a number
                const int first_image = image_of(low[0], grid.bins[0]);
                const unsigned radix[3] = {{
                    static_cast<unsigned>(image_of(high[0], grid.bins[0])) - first_image + 1u,
                    static_cast<unsigned>(high[1]) - low[1] + 1u, static_cast<unsigned>(high[2]) - low[2] + 1u}};
                // Each lane looks up one of 32 lines; then the lanes share the atoms of all of them, since most lines
                // have fewer atoms than there are lanes.
                const long long n_lines = static_cast<long long>(radix[0]) * radix[1] * radix[2];
                unsigned digit[3] = {{static_cast<unsigned>(lane), 0, 0}};
                for (long long line_base = 0; line_base < n_lines; line_base += 32, digit[0] += 32) {{
                    for (int a = 0; a < 2; ++a) {{
                        const unsigned carry = digit[a] / radix[a];
                        digit[a] -= carry * radix[a];
                        digit[a + 1] += carry;
                    }}
                    Line line = {{}};
                    if (digit[2] < radix[2])
                        line = line_at(
                            grid, low[0], high[0], first_image + static_cast<int>(digit[0]),
                            low[1] + static_cast<int>(digit[1]), low[2] + static_cast<int>(digit[2]));
                    const int n_here = (line.to - line.from) + (line.to_after - line.from_after);
                    int end = n_here;
                    for (int step = 1; step < 32; step *= 2) {{
                        const int before = __shfl_up_sync(all, end, step);
                        if (lane >= step) end += before;
                    }}
                    const int n_candidates = __shfl_sync(all, end, 31), from = line.from - (end - n_here);
                    const bool moves = __any_sync(all, line.image[0] || line.image[1] || line.image[2]);
                    unsigned packed = 0;
                    for (int base = 0; base < n_candidates; base += 32) {{
                        const int candidate = base + lane;
                        int source = 0;  // the lane whose line has this candidate
                        for (int step = 16; step > 0; step /= 2) {{
                            const int until = __shfl_sync(all, end, source + step - 1);
                            if (until <= candidate) source += step;
                        }}
                        int k = candidate + __shfl_sync(all, from, source);
                        if (k >= end_of_ring) k -= atoms_of_ring;  // the line goes on at the begin of the ring
                        int image[3] = {{}};
                        double moved[3] = {{}};
                        if (moves) {{
                            for (int a = 0; a < 3; ++a) image[a] = __shfl_sync(all, line.image[a], source);
                            move(grid, image, moved);
                        }}
                        const int sign = image[0] ? image[0] : image[1] ? image[1] : image[2];
                        const auto squared = [&](int i) {{
                            // seldom needed: nothing is kept in registers for it
                            const volatile double *const x_k = x + k, *const y_k = y + k, *const z_k = z + k;
                            double moved[3] = {{}};
                            move(grid, image, moved);
                            const double dx = (*x_k - x[i]) + moved[0], dy = (*y_k - y[i]) + moved[1];
                            const double dz = (*z_k - z[i]) + moved[2];
                            return fma(dz, dz, fma(dy, dy, dx * dx));
                        }};
                        unsigned close = 0;  // a byte for each member
                        float margin = 1e38f;
                        const bool exists = candidate < n_candidates;
                        if (exists) {{
                            const float to_x = static_cast<float>((x[k] - x_0) + moved[0]);
                            const float to_y = static_cast<float>((y[k] - y_0) + moved[1]);
                            const float to_z = static_cast<float>((z[k] - z_0) + moved[2]);
                            for (int g = 0; g < {addition.sharing}; ++g) {{
                                if (g % 2 == 0 && g >= n_members) break;
                                const float dx = to_x - at[g][0], dy = to_y - at[g][1], dz = to_z - at[g][2];
                                const float near = fma(dz, dz, fma(dy, dy, dx * dx)), within = reach_squared - near;
                                if (within > 0.0f) close |= 1u << 8 * g;
                                const float least = near < fabs(within) ? near : fabs(within);
                                margin = least < margin ? least : margin;  // it is in doubt itself, too
                            }}
                        }}
                        const bool in_doubt = exists && !(margin > doubt);
                        if (__any_sync(all, in_doubt)) {{
                            unsigned rest = members;
#pragma unroll 1
                            for (int g = 0; g < n_members; ++g, rest &= rest - 1) {{
                                const int i = __shfl_sync(all, mine_at, __ffs(rest) - 1);
                                if (!in_doubt) continue;
                                close &= ~(1u << 8 * g);
                                if (squared(i) < cutoff_squared && (sign || k != i)) close |= 1u << 8 * g;
                            }}
                        }}
                        if (!half && !fill) {{
                            // each lane counts its own, until the bytes may be full
                            packed += close;
                            if (base + 32 < n_candidates && (base / 32) % 255 != 254) continue;
                            unsigned even = packed & 0xff00ffu, odd = packed >> 8 & 0xff00ffu;
                            packed = 0;
                            for (int bits = 16; bits > 0; bits /= 2) {{
                                even += __shfl_xor_sync(all, even, bits);
                                odd += __shfl_xor_sync(all, odd, bits);
                            }}
                            unsigned rest = members;
#pragma unroll 1
                            for (int g = 0; g < n_members; ++g, rest &= rest - 1)
                                if (lane == __ffs(rest) - 1)
                                    count_of_mine += ((g & 1 ? odd : even) >> 8 * (g & 2)) & 0xffffu;
                            continue;
                        }}
                        const Four other = exists ? fours[k] : Four{{}};
                        unsigned rest = members;
#pragma unroll 1
                        for (int g = 0; g < n_members; ++g, rest &= rest - 1) {{
                            const int member = __ffs(rest) - 1;
                            bool hit = close >> 8 * g & 1;
                            unsigned hits = __ballot_sync(all, hit);
                            if (!hits) continue;
                            const int i = __shfl_sync(all, mine_at, member);
                            const Four own = fours[i];
                            if (half) {{
                                hit = hit && other.of[0] >= own.of[0] + (sign <= 0);
                                hits = __ballot_sync(all, hit);
                            }}{addition.chosen}
                            const int found = __shfl_sync(all, count_of_mine, member);
                            if (lane == member) count_of_mine += __popc(hits);
                            const int slot = found + __popc(hits & ((1u << lane) - 1u));
                            const int row = target.shape[0] > 0 ? task + member : own.of[0];
                            const bool in_list = row_begin.shape[0] > 0;
                            const long long start = in_list ? row_begin.data[row] : static_cast<long long>(row) * width;
                            if (hit && slot < (in_list ? row_begin.data[row + 1] - start : width)) {{
                                index.data[start + slot] = other.of[0];
                                if (first.shape[0] > 0) first.data[start + slot] = own.of[0];
                                if (shifts.shape[0] > 0) {{
                                    int *to = reinterpret_cast<int *>(shifts.data) + 3 * (start + slot);
                                    for (int a = 0; a < 3; ++a) to[a] = (image[a] + own.of[1 + a]) - other.of[1 + a];
                                }}
                            }}
                        }}
                    }}
                }}
            }}
#pragma unroll 1
            for (; members; members &= members - 1) {{
                const int member = __ffs(members) - 1, found = __shfl_sync(all, count_of_mine, member);
                {addition.row}
            }}
        }}
        if (has_row && mine.wanted) tell(mine, count_of_mine);
    }}
#else
    static const unsigned long long lanes_of[{1 << LANES}] = {{{lanes_of_masks()}}};
    typedef double doubles __attribute__((ext_vector_type({LANES}), aligned(8)));
    typedef int ints __attribute__((ext_vector_type({LANES}), aligned(4)));
    typedef bool bools __attribute__((ext_vector_type({LANES})));
    typedef unsigned char bytes __attribute__((ext_vector_type({LANES})));
    typedef int four __attribute__((ext_vector_type(4), aligned(4)));
    struct alignas(64) Block {{
        double x[{BLOCK + LANES}], y[{BLOCK + LANES}], z[{BLOCK + LANES}];
        double moved_x[{BLOCK + LANES}], moved_y[{BLOCK + LANES}], moved_z[{BLOCK + LANES}];
        four pair[{BLOCK}];  // the image less the whole cells of j, and -j
        unsigned key[{BLOCK}];  // 2 j, plus 1 for an image in the direction that half lists keep
        int hits[{BLOCK + LANES}];
        int n;
        bool shifted;  // some candidate is in another image{addition.member}
    }} block;

    // Neighbors of an atom in the block, and their places if asked for. Separate functions, or the loops around
    // them would take the registers.
    const auto test = [](const Block &b, const double *at, double cutoff_squared, int *hits, bool shifted)
        __attribute__((always_inline)) {{
        int n = 0;
        for (int c = 0; c < b.n; c += {LANES}) {{
            doubles dx = *(const doubles *)(b.x + c) - at[0];
            doubles dy = *(const doubles *)(b.y + c) - at[1];
            doubles dz = *(const doubles *)(b.z + c) - at[2];
            if (shifted) {{
                dx += *(const doubles *)(b.moved_x + c);
                dy += *(const doubles *)(b.moved_y + c);
                dz += *(const doubles *)(b.moved_z + c);
            }}
#if defined(__FMA__) || defined(__aarch64__)
            const doubles squared = __builtin_elementwise_fma(dz, dz, __builtin_elementwise_fma(dy, dy, dx * dx));
#else
            const doubles squared = dx * dx + dy * dy + dz * dz;
#endif
{addition.tested}            bools close = __builtin_convertvector(squared < cutoff_squared, bools);
            unsigned mask = *(unsigned char *)&close;
            if (hits) *(ints *)(hits + n) = __builtin_convertvector(*(const bytes *)&lanes_of[mask], ints) + c;
            n += __builtin_popcount(mask);
        }}
        return n;
    }};
    const auto count_near = [test](const Block &b, const double *at, double cutoff_squared) __attribute__((noinline)) {{
        if (b.shifted) return test(b, at, cutoff_squared, nullptr, true);
        return test(b, at, cutoff_squared, nullptr, false);
    }};
    const auto list_near = [test](Block &b, const double *at, double cutoff_squared) __attribute__((noinline)) {{
        if (b.shifted) return test(b, at, cutoff_squared, b.hits, true);
        return test(b, at, cutoff_squared, b.hits, false);
    }};

    const auto finish = [&](const Row &r, int found) {{
        pad(r, found, 0, 1);
        tell(r, found);
    }};
    Row group[{GROUP}];
    int found[{GROUP}], own[{GROUP}];
    for (int task = first_task; task < last_task;) {{
        // atoms that follow each other, in one system and in bins so close that one box of bins is no larger than twice
        // the reach and three, which the slots of the ring are made for
        int members = 0, low[3], high[3];
        for (; task < last_task && members < {GROUP}; ++task) {{
            const Row r = look_up(task);
            if (!r.wanted) continue;
            if (!r.known) {{
                finish(r, 0);
                continue;
            }}
            bool together = members == 0 || r.system == group[0].system;
            for (int a = 0; a < 3 && members > 0; ++a) {{
                const long long apart = (static_cast<long long>(r.low[a]) + r.high[a]) - group[0].low[a]
                    - group[0].high[a];
                together = together && apart >= -1 && apart <= 1;
            }}
            if (!together) break;
            for (int a = 0; a < 3; ++a) {{
                low[a] = members == 0 || r.low[a] < low[a] ? r.low[a] : low[a];
                high[a] = members == 0 || r.high[a] > high[a] ? r.high[a] : high[a];
            }}
            found[members] = 0;
            own[members] = -1;
            group[members++] = r;
        }}
        if (members == 0) continue;

        const auto test_block = [&]() {{
            for (int c = block.n; c < block.n + {LANES}; ++c) block.x[c] = __builtin_nan("");  // near to nothing
            for (int g = 0; g < members; ++g) {{
                const Row &r = group[g];
                const int *atom = atoms + 4 * r.k;
                const double at[3] = {{x[r.k], y[r.k], z[r.k]}};
                double &itself = block.x[own[g] < 0 ? block.n : own[g]];
                const double before = itself;
                itself = __builtin_nan("");
                int n = fill || half ? list_near(block, at, {addition.reach}) : count_near(block, at, cutoff_squared);
                itself = before;
                if (!fill && !half) {{
                    found[g] += n;
                    continue;
                }}
                if (half) {{
                    const unsigned key = 2u * atom[0];
                    int kept = 0;
                    for (int t = 0; t < n; ++t) {{
                        block.hits[kept] = block.hits[t];
                        kept += block.key[block.hits[t]] > key;
                    }}
                    n = kept;
                }}
{addition.near}                const int write = n < r.room - found[g] ? n : r.room - found[g];
                const long long from = r.start + found[g];
                if (write > 0) {{
                    int *const out = index.data + from, i = atom[0];
                    for (int t = 0; t < write; ++t) out[t] = -block.pair[block.hits[t]].w;
                    if (first.shape[0] > 0) {{
                        int *const out = first.data + from;
                        for (int t = 0; t < write; ++t) out[t] = i;
                    }}
                    if (shifts.shape[0] > 0) {{
                        int *at = reinterpret_cast<int *>(shifts.data) + 3 * from;
                        const four cells = ((const four *)atom)->yzwx;
                        // four numbers at once, the last of which the next three overwrite
                        for (int t = 0; t < write - 1; ++t, at += 3) *(four *)at = block.pair[block.hits[t]] + cells;
                        const four last = block.pair[block.hits[write - 1]] + cells;
                        at[0] = last.x;
                        at[1] = last.y;
                        at[2] = last.z;
                    }}
                }}
                found[g] += n;
            }}
            block.n = 0;
            block.shifted = false;
            for (int g = 0; g < members; ++g) own[g] = -1;
        }};
        block.n = 0;
        block.shifted = false;
        const auto &grid = grids.data[group[0].system];
        const auto copy = [&](int from, int to, const int *image, const double *moved) {{
            const int sign = image[0] ? image[0] : image[1] ? image[1] : image[2];
            const four shift = {{image[0], image[1], image[2], 0}};
            while (from < to) {{
                const int n = to - from < {BLOCK} - block.n ? to - from : {BLOCK} - block.n, at = block.n;
                for (int c = 0; c < n; ++c) {{
                    block.x[at + c] = x[from + c];
                    block.y[at + c] = y[from + c];
                    block.z[at + c] = z[from + c];
                    block.moved_x[at + c] = moved[0];
                    block.moved_y[at + c] = moved[1];
                    block.moved_z[at + c] = moved[2];
                }}
                if (fill)
                    for (int c = 0; c < n; ++c) block.pair[at + c] = shift - ((const four *)atoms)[from + c].yzwx;
                if (half)
                    for (int c = 0; c < n; ++c) block.key[at + c] = 2u * atoms[4LL * (from + c)] + (sign > 0);
                if (sign) block.shifted = true;
                else
                    for (int g = 0; g < members; ++g)
                        if (group[g].k >= from && group[g].k < from + n) own[g] = at + group[g].k - from;
                block.n += n;
                from += n;
                if (block.n == {BLOCK}) test_block();
            }}
        }};
        for (int bin_z = low[2]; bin_z <= high[2]; ++bin_z)
        for (int bin_y = low[1]; bin_y <= high[1]; ++bin_y)
        for (int image_x = image_of(low[0], grid.bins[0]); image_x <= image_of(high[0], grid.bins[0]); ++image_x) {{
            const Line line = line_at(grid, low[0], high[0], image_x, bin_y, bin_z);
            double moved[3] = {{}};
            move(grid, line.image, moved);
            copy(line.from, line.to, line.image, moved);
            copy(line.from_after, line.to_after, line.image, moved);
        }}
        if (block.n > 0) test_block();
        for (int g = 0; g < members; ++g) {addition.end}
    }}
#endif
"""


_SEARCH = search_text(Addition())


# parameters of kernels, in the order in which callers give them
BINS: dict[str, Any] = {
    "thread": wp.int32,
    "coordinates": wp.array2d(dtype=wp.float64),  # see grid.place_atoms
    "entry": wp.array(dtype=wp.vec4i),
    "begin": wp.array(dtype=wp.int32),  # (n_slots + 1 or more,), where the atoms of each slot begin
    "system": wp.array(dtype=wp.int32),  # (n_atoms,), or none: one system
    "grids": wp.array(dtype=Grid),  # (n_systems,)
    "cutoff": wp.float64,
    "half": wp.int32,
    "target": wp.array(dtype=wp.int32),  # (n_rows,), place in the order of the atom of each row; or none: all atoms
    "active": wp.array(dtype=wp.bool),  # (n_systems,) or one for all, systems to search; or none: all
}
FORM: dict[str, Any] = {
    "row_begin": wp.array(dtype=wp.int32),  # (n_rows + 1,), or none: rows of equal width
    "width": wp.int32,  # -1: count only
    "fill_value": wp.int32,
}
COUNT: dict[str, Any] = {"count": wp.array(dtype=wp.int32)}  # (n_rows,), also beyond the width; or none
LISTED: dict[str, Any] = {
    "index": wp.array(dtype=wp.int32),  # flat rows
    "first": wp.array(dtype=wp.int32),  # the same length, gets the atom of the row; or none
    "shifts": wp.array(dtype=wp.vec3i),  # the same length; or none
    "rows_per_thread": wp.int32,
}


@kernel_variants(())
def search_neighbors() -> Any:
    """Kernel that counts the neighbors of each atom and, given room, writes them."""
    return native_kernel("neighbor_search", _SEARCH, lanes=True, blocks=10)(
        signature(**BINS, **FORM, **COUNT, **LISTED)
    )


_COPY = """
    const int n_rows = count.shape[0], first_row = thread * rows_per_thread;
    const int last_row = first_row + rows_per_thread < n_rows ? first_row + rows_per_thread : n_rows;
    const bool in_list = row_begin.shape[0] > 0;
    for (int row = first_row; row < last_row; ++row) {
        const int n = count.data[row], i = atom.shape[0] > 0 ? atom.data[row] : row;
        const int *from = scratch.data + static_cast<long long>(row) * scratch_width;
        const long long start = in_list ? row_begin.data[row] : static_cast<long long>(row) * width;
        const int room = in_list ? n : width;
        int *to = index.data + start;
        for (int t = 0; t < n; ++t) to[t] = from[t];
        for (int t = n; t < room; ++t) to[t] = fill_value;
        if (first.shape[0] > 0) {
            int *to = first.data + start;
            for (int t = 0; t < n; ++t) to[t] = i;
        }
        if (shifts.shape[0] > 0) {
            const int *from = reinterpret_cast<const int *>(scratch_shifts.data)
                + 3 * static_cast<long long>(row) * scratch_width;
            int *to = reinterpret_cast<int *>(shifts.data) + 3 * start;
            for (int t = 0; t < 3 * n; ++t) to[t] = from[t];
            for (int t = 3 * n; t < 3 * room; ++t) to[t] = 0;
        }
    }
"""


@kernel_variants(())
def compact_neighbors() -> Any:
    """Kernel for a CPU that moves rows of neighbors from a wide matrix to a list or a matrix of another width."""
    scratch: dict[str, Any] = {
        "scratch": wp.array(dtype=wp.int32),  # flat rows of scratch_width, each filled up to its count
        "scratch_shifts": wp.array(dtype=wp.vec3i),
        "scratch_width": wp.int32,
        "atom": wp.array(dtype=wp.int32),  # (n_rows,), the atom of each row; or none: all atoms in their order
    }
    parameters = signature(thread=wp.int32, **COUNT, **scratch, **FORM, **LISTED)
    return native_kernel("neighbor_compaction", _COPY)(parameters)
