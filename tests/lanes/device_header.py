"""What CUDA gives to kernels, in C++ for a CPU that runs the threads of a block as fibers.

The text stands before what Warp generates (`tests.lanes.fibers`), and turns the GPU branches on. What is missing here
does not compile. Threads of a warp meet at each operation with a mask: a lane that is not there is written down in
`State`, which lies at a fixed address, so that the text, and with it the compiled kernel, is the same in each process.
"""

from nvalchemiops.kernels.simd import WARP
from nvalchemiops.kernels.special import ARITHMETIC, ERFCX_CENTER

ADDRESS = 0x10_0000_0000
"""Where the state is mapped, in bytes: 64 GiB, which programs leave alone."""

MOST_WARPS = 32
"""Warps of a block."""

FINDINGS = {
    1: "a lane did not take part in an operation of the whole warp, or was at another one",
    2: "an operation of a part of a warp, which is not modelled",
}

_UNARY = ("sqrt", "exp", "log", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "cbrt")
_UNARY += ("erf", "erfc", "fabs", "floor", "rint")

ERFCX = ARITHMETIC["float64"].erfcx
_polynomial = repr(ERFCX[-1])
for _c in reversed(ERFCX[:-1]):
    _polynomial = f"({_polynomial} * t + {_c!r})"

HEADER = f"""
#define __CUDA_ARCH__ 900
#define LANES_HERE static inline __attribute__((always_inline))
#define LANES_LINE int line = __builtin_LINE()

struct lanes_state {{
    int order[{WARP}];  // the lane of each fiber of a warp
    int finding, line, lane, other_line;  // the first one
    struct {{
        unsigned count[{WARP}];  // operations of each lane
        // of the last two operations: a lane may be at the next one before others have read
        struct {{
            unsigned number[{WARP}];
            int line[{WARP}];
            unsigned long long value[{WARP}];
        }} last[2];
    }} warps[{MOST_WARPS}];
}};
#define LANES (*reinterpret_cast<lanes_state *>({ADDRESS}))

LANES_HERE unsigned lanes_thread() {{
    const int fiber = ::wp_cpu_get_thread_idx();
    return (fiber & ~{WARP - 1}) | LANES.order[fiber & {WARP - 1}];
}}

struct lanes_number {{
    operator unsigned() const {{ return lanes_thread(); }}
}};
static const struct {{ lanes_number x; }} threadIdx = {{}};

// All lanes of a warp give a value and meet; each looks at the next one. Returns what they gave.
LANES_HERE const unsigned long long *lanes_meet(unsigned mask, unsigned long long value, int line) {{
    const unsigned thread = lanes_thread(), lane = thread & {WARP - 1}, next = (lane + 1) & {WARP - 1};
    auto &warp = LANES.warps[thread / {WARP}];
    const unsigned number = ++warp.count[lane];
    auto &last = warp.last[number & 1];
    last.number[lane] = number;
    last.line[lane] = line;
    last.value[lane] = value;
    ::wp_cpu_tile_sync();
    const int finding = mask != 0xffffffffu ? 2 : last.number[next] != number || last.line[next] != line;
    if (finding && !LANES.finding) {{
        LANES.finding = finding;
        LANES.line = line;
        LANES.lane = next;
        LANES.other_line = last.number[next] == number ? last.line[next] : 0;
    }}
    return last.value;
}}

template <typename T> LANES_HERE T lanes_exchange(unsigned mask, T value, unsigned from, int line) {{
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move four or eight bytes");
    unsigned long long bits = 0;
    __builtin_memcpy(&bits, &value, sizeof(T));
    bits = lanes_meet(mask, bits, line)[from & {WARP - 1}];
    __builtin_memcpy(&value, &bits, sizeof(T));
    return value;
}}

template <typename T> LANES_HERE T __shfl_sync(unsigned mask, T value, int from, LANES_LINE) {{
    return lanes_exchange(mask, value, from, line);
}}
template <typename T> LANES_HERE T __shfl_xor_sync(unsigned mask, T value, int bits, LANES_LINE) {{
    return lanes_exchange(mask, value, (lanes_thread() & {WARP - 1}) ^ bits, line);
}}
template <typename T> LANES_HERE T __shfl_up_sync(unsigned mask, T value, unsigned by, LANES_LINE) {{
    const unsigned lane = lanes_thread() & {WARP - 1};
    return lanes_exchange(mask, value, lane < by ? lane : lane - by, line);
}}
template <typename T> LANES_HERE T __shfl_down_sync(unsigned mask, T value, unsigned by, LANES_LINE) {{
    const unsigned lane = lanes_thread() & {WARP - 1};
    return lanes_exchange(mask, value, lane + by < {WARP} ? lane + by : lane, line);
}}
LANES_HERE unsigned __ballot_sync(unsigned mask, int vote, LANES_LINE) {{
    const unsigned long long *votes = lanes_meet(mask, vote != 0, line);
    unsigned found = 0;
    for (int lane = 0; lane < {WARP}; ++lane) found |= static_cast<unsigned>(votes[lane]) << lane;
    return found;
}}
LANES_HERE unsigned __reduce_or_sync(unsigned mask, unsigned bits, LANES_LINE) {{
    const unsigned long long *values = lanes_meet(mask, bits, line);
    unsigned found = 0;
    for (int lane = 0; lane < {WARP}; ++lane) found |= static_cast<unsigned>(values[lane]);
    return found;
}}
LANES_HERE int __any_sync(unsigned mask, int vote, LANES_LINE) {{ return __ballot_sync(mask, vote, line) != 0; }}
LANES_HERE int __all_sync(unsigned mask, int vote, LANES_LINE) {{ return __ballot_sync(mask, vote, line) == mask; }}
LANES_HERE void __syncwarp(unsigned mask = 0xffffffffu, LANES_LINE) {{ lanes_meet(mask, 0, line); }}

LANES_HERE int __popc(unsigned bits) {{ return __builtin_popcount(bits); }}
LANES_HERE int __ffs(int bits) {{ return __builtin_ffs(bits); }}
LANES_HERE int __clz(int bits) {{ return bits ? __builtin_clz(static_cast<unsigned>(bits)) : 32; }}
template <typename T> LANES_HERE T __ldg(const T *from) {{ return *from; }}

// as in CUDA, functions of single precision are called by the same names
{"".join(f"LANES_HERE float {name}(float x) {{ return ::{name}f(x); }}{chr(10)}" for name in _UNARY)}
LANES_HERE float pow(float x, float y) {{ return ::powf(x, y); }}
LANES_HERE float fma(float x, float y, float z) {{ return ::fmaf(x, y, z); }}

LANES_HERE void sincospi(double x, double *sine, double *cosine) {{
    const double angle = 3.141592653589793 * (x - 2.0 * ::rint(0.5 * x));
    *sine = ::sin(angle);
    *cosine = ::cos(angle);
}}
static inline double erfcx(double x) {{
    if (x < 0.0) return 2.0 * ::exp(x * x) - erfcx(-x);
    x = x > 1e100 ? 1e100 : x;
    const double t = (x - {ERFCX_CENTER}) / (x + {ERFCX_CENTER});
    return {_polynomial} / (1.0 + 2.0 * x);
}}
LANES_HERE float erfcx(float x) {{ return static_cast<float>(erfcx(static_cast<double>(x))); }}
"""
