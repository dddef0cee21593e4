"""The part of the loop over a row of neighbors that a CPU runs (`nvalchemiops.interactions.pair.loop`).

Close neighbors are collected in a block of memory, and evaluated as many at a time as a vector has lanes.
"""

from typing import TYPE_CHECKING, Any

from nvalchemiops.kernels.simd import LANES, lanes_of_masks

if TYPE_CHECKING:
    from nvalchemiops.interactions.pair.loop import Form

BLOCK = 64
"""Largest number of neighbors that are collected before they are evaluated; a multiple of the lanes of a vector."""

TURNS = """\
    @totals@
    // Neighbors collected so far, and the numbers of those that are close. The last vector is filled up with harmless
    // entries, whose values are dropped.
    struct alignas(64) Block {
        one d[3][@room@], factor[@room@];
        int shift[3][@room@], j[@room@], close[@room@];
    } block;
    const condition numbers = {@numbers@};
    const auto halve = [](auto values) { return values.lo + values.hi; };
    const auto add_up = [=](auto values) { return @total@; };
    int m = 0, n = 0;
    for (long long slot = begin; slot < end;) {
        @fast@
        for (; slot < end && m < @block@; ++slot) {
            Neighbor it;
            read(slot, it);
            if (!look_at(slot, it)) continue;
            block.j[m] = it.j;
            for (int a = 0; a < 3; ++a) block.d[a][m] = it.d[a];
            @collect@
            block.close[n] = m++;
            n += it.close;
        }
        const bool all = m == n;
        const int whole = slot < end ? n - n % @lanes@ : n;
        for (int rest = 0; rest < @lanes@; ++rest) {
            block.close[n + rest] = m;
            block.j[m + rest] = i;
            for (int a = 0; a < 3; ++a) block.d[a][m + rest] = 1.0;
            @fill@
        }
        for (int at = 0; at < whole; at += @lanes@) {
            const int *close = block.close + at;
            const condition live = numbers < n - at;
            int j[@lanes@];
            for (int l = 0; l < @lanes@; ++l) j[l] = block.j[close[l]];
            const auto load = [=](const auto *from) {
                lanes values;
                if (all)
                    for (int l = 0; l < @lanes@; ++l) values[l] = from[at + l];
                else
                    for (int l = 0; l < @lanes@; ++l) values[l] = from[close[l]];
                return values;
            };
            const auto take = [&](const real *from, long long stride) {
                lanes values;
                for (int l = 0; l < @lanes@; ++l) values[l] = from[stride * j[l]];
                return values;
            };
            const auto kept = [live](lanes values) {
                return __builtin_convertvector(live ? values : lanes(0.0), doubles);
            };
            @take_both@
            const lanes d0 = load(block.d[0]), d1 = load(block.d[1]), d2 = load(block.d[2]);
            @data@
            @evaluation@
            @tables@
        }
        // Neighbors left over are kept for the next block: vectors hold the same pairs, with or without distant ones.
        for (m = 0; whole + m < n; ++m) {
            const int from = block.close[whole + m];
            block.close[m] = m;
            block.j[m] = block.j[from];
            for (int a = 0; a < 3; ++a) block.d[a][m] = block.d[a][from];
            @keep@
        }
        n = m;
    }
    @sums@
"""

FAST = f"""
// a vector of slots at a time, as long as all that are in use hold neighbors; of the rest nothing is close
static const unsigned long long lanes_of[256] = {{{lanes_of_masks()}}};
typedef int ints __attribute__((ext_vector_type(@lanes@), aligned(4)));
typedef real reals __attribute__((ext_vector_type(@lanes@)));
typedef int eight __attribute__((ext_vector_type({LANES}), aligned(4)));
typedef one ones __attribute__((ext_vector_type(@lanes@), aligned(sizeof(one))));
typedef bool bools __attribute__((ext_vector_type(@lanes@)));
typedef unsigned char bytes __attribute__((ext_vector_type({LANES})));
const auto as_bits = [](bools values) {{ return *reinterpret_cast<const @bits@ *>(&values); }};
const long long from_here = slot, n_slots = neighbors.shape[0];
lanes all_squared = 0.0;
int in_place[@lanes@];
while (slot < end && slot + @lanes@ <= n_slots && m < @block@) {{
    const int here = end - slot < @lanes@ ? static_cast<int>(end - slot) : @lanes@;
    const int *j = neighbors.data + slot;
    ints places = *reinterpret_cast<const ints *>(j);
    ints in_use = ints{{@numbers@}} < here;
    auto unusual = (places < 0) | (places >= n_atoms);
    if (first.shape[0] > 0) unusual |= *reinterpret_cast<const ints *>(first.data + slot) != i;
    if (padding > @no_padding@) in_use &= places != padding;
    if (as_bits(__builtin_convertvector(unusual & in_use, bools))) break;
    const unsigned used = as_bits(__builtin_convertvector(in_use, bools));
    if (used != @all@) {{
        places = in_use ? places : ints(i);
        *reinterpret_cast<ints *>(in_place) = places;
        j = in_place;
    }}
    asm("" : "+r"(j));  // loading a number again is faster than taking it out of a vector
    reals x[3];
    #pragma unroll
    for (int l = 0; l < @lanes@; ++l) {{
        const real *const x_j = positions.data + 3LL * j[l];
        for (int a = 0; a < 3; ++a) x[a][l] = x_j[a];
    }}
    lanes d[3];
    for (int a = 0; a < 3; ++a) d[a] = __builtin_convertvector(x[a], lanes) - one(x_i[a]);
    @image@
    const lanes squared = d[0] * d[0] + d[1] * d[1] + d[2] * d[2];
    all_squared += squared;
    unsigned mask = used & as_bits(__builtin_convertvector(!(squared >= cutoff_squared), bools));
    if (const unsigned at_once = mask & as_bits(__builtin_convertvector(squared == 0, bools)))
        mask &= ~(at_once & as_bits(__builtin_convertvector(places == i, bools)));  // the atom itself is no neighbor
    *reinterpret_cast<ints *>(block.j + m) = places;
    for (int a = 0; a < 3; ++a) *reinterpret_cast<ones *>(block.d[a] + m) = d[a];
    @collect_all@
    for (int part = 0; part < @lanes@; part += {LANES}, mask >>= {LANES}) {{
        const auto hits = *reinterpret_cast<const bytes *>(&lanes_of[mask & 255]);
        *reinterpret_cast<eight *>(block.close + n) = __builtin_convertvector(hits, eight) + (m + part);
        n += __builtin_popcount(mask & 255);
    }}
    slot += here;
    m += here;
}}
if (!(add_up(all_squared) < INFINITY))
    for (long long place = from_here; place < slot; ++place) {{
        const int j = neighbors.data[place];
        if ((j != padding || padding == @no_padding@) && !has_place(j)) broken = @no_number@;
    }}
@open_axes@
"""

IMAGE_OF_ALL = """
const int *shift = shifts.data + 3 * slot;
ints some = *reinterpret_cast<const ints *>(shift) | *reinterpret_cast<const ints *>(shift + @lanes@)
    | *reinterpret_cast<const ints *>(shift + 2 * @lanes@);
if (as_bits(__builtin_convertvector(some != 0, bools))) {
    doubles image[3];
    for (int a = 0; a < 3; ++a)
        for (int l = 0; l < @lanes@; ++l) image[a][l] = shift[3 * l + a];
    for (int a = 0; a < 3; ++a)
        d[a] = __builtin_convertvector((__builtin_convertvector(x[a], doubles) - x_i[a])
            + (image[0] * h[a] + image[1] * h[3 + a] + image[2] * h[6 + a]), lanes);
}
"""

OPEN_AXES = """
for (long long place = from_here; place < slot && any_open; ++place)
    if ((neighbors.data[place] != padding || padding == @no_padding@) && points_nowhere(shifts.data + 3 * place))
        broken = @no_number@;
"""


def numbers_of(lanes: int) -> dict[str, Any]:
    """The placeholders of a line for vectors with this number of lanes."""
    return {
        "block": BLOCK,
        "room": BLOCK + 2 * lanes,
        "lanes": lanes,
        "all": (1 << lanes) - 1,
        "bits": {8: "unsigned char", 16: "unsigned short", 32: "unsigned"}[lanes],
        "numbers": ", ".join(map(str, range(lanes))),
        "total": "halve(" * (lanes.bit_length() - 1) + "values" + ")" * (lanes.bit_length() - 1),
    }


def fast(form: "Form") -> list[str]:
    """Lines that collect a vector of neighbors at a time, for rows without exclusions and tables."""
    if form.excluding or form.n_species:
        return []
    keep = [
        "for (int l = 0; l < @lanes@; ++l)",
        "    for (int a = 0; a < 3; ++a) block.shift[a][m + l] = shift[3 * l + a];",
    ]
    pieces = {
        "image": IMAGE_OF_ALL.strip().splitlines() * form.periodic,
        "open_axes": OPEN_AXES.strip().splitlines() * form.periodic,
        "collect_all": keep * form.keeps_shifts,
    }
    text = FAST.strip()
    for name, lines in pieces.items():
        text = text.replace(f"@{name}@", "\n".join(lines))
    return text.splitlines()


def stored(form: "Form", place: str, factor: str, shift: str) -> list[str]:
    """Lines that store the factor and the shift of a neighbor in the block."""
    lines = [f"block.factor{place} = {factor};"] * form.excluding
    return lines + [f"for (int a = 0; a < 3; ++a) block.shift[a]{place} = {shift};"] * form.keeps_shifts
