"""The search for neighbors among binned atoms: each atom visits the bins, and images of bins, within reach.

One kernel counts and fills, so that both round alike. The displacement between wrapped atoms is computed as
``(w_j - w_i) + S @ cell``, which changes sign exactly when i and j are exchanged: a full list is symmetric to the last
bit.

The body is C++, since Warp's language has neither vectors of candidates nor votes among the lanes of a warp. On a CPU
the atoms of a bin, which are adjacent in the order of the search, share their candidates: these are copied once from
all bins within reach to a block of memory, and each atom of the bin tests the block in vectors. The part for a GPU is
in `search_in_warps`.
"""

from typing import Any, NamedTuple

import warp as wp

from nvalchemiops.kernels.native import native_kernel, signature
from nvalchemiops.kernels.simd import LANES, lanes_of_masks
from nvalchemiops.launch import cpu_only, kernel_variants
from nvalchemiops.neighbors.grid import FARTHEST_BIN, Grid
from nvalchemiops.neighbors.rows import NOWHERE
from nvalchemiops.neighbors.search_in_warps import text_of_lanes

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


class Addition(NamedTuple):
    """Text that a kernel adds to the text of the search, which all kernels share (`search_text`)."""

    declarations: str = ""  # functions and variables of the thread, after those of the search
    writes: str = "width >= 0 || row_begin.shape[0] > 0"  # whether neighbors are written or tested further, one by one
    # on a GPU
    sharing: int = 4  # most rows that share their candidates
    chosen: str = ""  # after the vote of the lanes on their candidates, some of which are a ``hit``
    row: str = "if (width > 0) pad(look_up(task + member), found, lane, 32);"  # at the end of a row
    # on a CPU
    member: str = ""  # a further member of the block of candidates
    reach: str = "cutoff_squared"  # the square of the distance that row ``r`` searches
    tested: str = ""  # after the ``squared`` distances of a vector of candidates
    near: str = ""  # after the near ones are listed
    end: str = "finish(group[g], found[g]);"  # at the end of the rows of a group


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
        if (grid.is_turned) {{  // from here on the image counts vectors as given
            const int x = line.image[0], y = line.image[1], z = line.image[2];
            for (int a = 0; a < 3; ++a)
                line.image[a] = x * grid.turn.data[0][a] + y * grid.turn.data[1][a] + z * grid.turn.data[2][a];
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
{text_of_lanes(addition.sharing, addition.chosen, addition.row)}#else
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
            const int parts[2][2] = {{{{line.from, line.to}}, {{line.from_after, line.to_after}}}};
#pragma clang loop unroll(disable)  // or `copy` would be compiled twice, for a third of the time of the module
            for (const auto &part : parts) copy(part[0], part[1], line.image, moved);
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
    return cpu_only(native_kernel("neighbor_compaction", _COPY)(parameters))
