// A GPU as the C++ texts of kernels know it, in terms of runner.cpp. Included before what Warp generates for a CPU. What
// is missing here does not compile.

#define WP_NO_BFLOAT16
#define WP_TILE_BLOCK_DIM 1
#include <string.h>

#include "builtin.h"
#include "deterministic.h"

#define __CUDA_ARCH__ 900

#define CHECKER static inline __attribute__((no_sanitize("thread"), always_inline))
#define CHECKER_LINE int line = __builtin_LINE()

extern "C" {
int checker_thread();
int checker_block();
int checker_block_size();
int checker_grid_size();
void checker_atomic(void *p, size_t n);
void checker_copy(void *to, const void *from, size_t n);
uint64_t checker_meet(int meeting, unsigned mask, uint64_t value, int argument, int width, int line);
}

struct checker_number {
    int (*value)();
    operator unsigned() const { return static_cast<unsigned>(value()); }
};
struct checker_dimension {
    checker_number x;
};
static const checker_dimension threadIdx = {{checker_thread}}, blockIdx = {{checker_block}};
static const checker_dimension blockDim = {{checker_block_size}}, gridDim = {{checker_grid_size}};
static const int warpSize = 32;

template <typename T>
CHECKER T checker_exchange(int meeting, unsigned mask, T value, int argument, int width, int line) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move four or eight bytes");
    uint64_t bits = 0;
    __builtin_memcpy(&bits, &value, sizeof(T));
    bits = checker_meet(meeting, mask, bits, argument, width, line);
    T result;
    __builtin_memcpy(&result, &bits, sizeof(T));
    return result;
}

template <typename T> CHECKER T __shfl_sync(unsigned mask, T value, int from, int width = 32, CHECKER_LINE) {
    return checker_exchange(1, mask, value, from, width, line);
}
template <typename T> CHECKER T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, CHECKER_LINE) {
    return checker_exchange(2, mask, value, bits, width, line);
}
template <typename T> CHECKER T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32, CHECKER_LINE) {
    return checker_exchange(3, mask, value, static_cast<int>(by), width, line);
}
template <typename T> CHECKER T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32, CHECKER_LINE) {
    return checker_exchange(4, mask, value, static_cast<int>(by), width, line);
}
CHECKER unsigned __ballot_sync(unsigned mask, int vote, CHECKER_LINE) {
    return static_cast<unsigned>(checker_meet(5, mask, vote != 0, 0, 32, line));
}
CHECKER unsigned __reduce_or_sync(unsigned mask, unsigned bits, CHECKER_LINE) {
    for (int step = 16; step > 0; step /= 2) bits |= __shfl_xor_sync(mask, bits, step, 32, line);
    return bits;
}
CHECKER int __any_sync(unsigned mask, int vote, CHECKER_LINE) {
    return checker_meet(5, mask, vote != 0, 0, 32, line) != 0;
}
CHECKER int __all_sync(unsigned mask, int vote, CHECKER_LINE) {
    return checker_meet(5, mask, vote != 0, 0, 32, line) == mask;
}
CHECKER void __syncwarp(unsigned mask = 0xffffffffu, CHECKER_LINE) { checker_meet(0, mask, 0, 0, 32, line); }

CHECKER int __popc(unsigned bits) { return __builtin_popcount(bits); }
CHECKER int __popcll(unsigned long long bits) { return __builtin_popcountll(bits); }
CHECKER int __ffs(int bits) { return __builtin_ffs(bits); }
CHECKER int __clz(int bits) { return bits ? __builtin_clz(static_cast<unsigned>(bits)) : 32; }

template <typename T> CHECKER T __ldg(const T *from) { return *from; }

template <typename T, typename F> CHECKER T checker_change(T *at, const F &change) {
    T before, after;
    checker_atomic(at, sizeof(T));
    checker_copy(&before, at, sizeof(T));
    after = change(before);
    checker_copy(at, &after, sizeof(T));
    return before;
}
template <typename T> CHECKER T atomicAdd(T *at, T value) {
    return checker_change(at, [=](T before) { return before + value; });
}
template <typename T> CHECKER T atomicMax(T *at, T value) {
    return checker_change(at, [=](T before) { return before < value ? value : before; });
}

// -- functions that CUDA has beyond those of C -------------------------------------------------------

CHECKER double rsqrt(double x) { return 1.0 / ::sqrt(x); }
CHECKER float rsqrtf(float x) { return 1.0f / ::sqrtf(x); }
CHECKER float rsqrt(float x) { return rsqrtf(x); }
CHECKER double rcbrt(double x) { return 1.0 / ::cbrt(x); }
CHECKER float rcbrtf(float x) { return 1.0f / ::cbrtf(x); }
CHECKER void sincospi(double x, double *sine, double *cosine) {
    const double turned = 3.14159265358979323846 * (x - 2.0 * ::rint(0.5 * x));
    *sine = ::sin(turned);
    *cosine = ::cos(turned);
}
CHECKER void sincospif(float x, float *sine, float *cosine) {
    double s, c;
    sincospi(x, &s, &c);
    *sine = static_cast<float>(s);
    *cosine = static_cast<float>(c);
}
static inline double erfcx(double x) {
    if (x < 20.0) return ::exp(x * x) * ::erfc(x);
    // the asymptotic series, whose next term is 1e-11 of the last one that is taken
    const double y = 0.5 / (x * x);
    return 0.56418958354775628695 / x * (1.0 - y * (1.0 - 3.0 * y * (1.0 - 5.0 * y)));
}
CHECKER float erfcxf(float x) { return static_cast<float>(erfcx(x)); }
CHECKER float erfcx(float x) { return erfcxf(x); }
