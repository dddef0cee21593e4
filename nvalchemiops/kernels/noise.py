"""Random numbers by counters: a number is a function of a seed, a system, an atom, a step and a stream.

So the noise of an atom does not depend on other systems in the batch, on threads, or on where a run was interrupted.

The generator is Philox4x32-10: J. K. Salmon, M. A. Moraes, R. O. Dror and D. E. Shaw, in SC '11 (2011),
doi:10.1145/2063384.2063405. Its key is the seed. Its counter is the number of the atom in its system, the lower 32
bits of the step, then 16 more bits of the step, 8 of the stream and 8 of the block, and the key of the system. A block
is 128 bits, of which two uniform numbers with 53 bits are made, and of these two normal numbers: G. E. P. Box and M. E.
Muller, Ann. Math. Stat. 29, 610 (1958), doi:10.1214/aoms/1177706645.
"""

from typing import Any

import warp as wp

from nvalchemiops.kernels.native import native_kernel
from nvalchemiops.launch import kernel_variants

PHILOX = """
    typedef unsigned int word;
    struct Block { word w[4]; };
    const auto philox = [](word c0, word c1, word c2, word c3, word k0, word k1) {
        for (int round = 0; round < 10; ++round) {
            const unsigned long long a = 0xD2511F53ull * c0, b = 0xCD9E8D57ull * c2;
            const word n0 = word(b >> 32) ^ c1 ^ k0, n2 = word(a >> 32) ^ c3 ^ k1;
            c0 = n0; c1 = word(b); c2 = n2; c3 = word(a);
            k0 += 0x9E3779B9u; k1 += 0xBB67AE85u;
        }
        return Block{{c0, c1, c2, c3}};
    };
"""
"""C++: ten rounds of Philox4x32."""

# Gamma variates by rejection: G. Marsaglia and W. W. Tsang, ACM Trans. Math. Softw. 26, 363 (2000),
# doi:10.1145/358407.358414. More than 95 % of the attempts succeed, so the 126 that have blocks always suffice.
DRAW = f"""{PHILOX}
    const auto uniform = [](word high, word low) {{
        return (double((unsigned long long)(high >> 5) * 67108864ull + (low >> 6)) + 0.5) * 0x1p-53;  // in (0, 1]
    }};
    const auto block_of = [&](long long seed, long long key, long long step, int stream, word atom, int number) {{
        const unsigned long long at = step;
        const word third = word(at >> 32) << 16 | word(stream) << 8 | word(number & 255);
        return philox(atom, word(at), third, word(key), word(seed), word((unsigned long long)seed >> 32));
    }};
    const auto normal = [&](const Block &block, int which) {{
        const double radius = wp::sqrt(-2.0 * wp::log(uniform(block.w[0], block.w[1])));
        const double angle = 6.283185307179586 * uniform(block.w[2], block.w[3]);
        return radius * (which ? wp::sin(angle) : wp::cos(angle));
    }};
    const auto chi_square = [&](long long seed, long long key, long long step, int stream, double degrees_of_freedom) {{
        const double shape = 0.5 * degrees_of_freedom;
        double value = shape > 0.0 ? NAN : 0.0;
        const double d = (shape < 1.0 ? shape + 1.0 : shape) - 1.0 / 3.0, c = 1.0 / wp::sqrt(9.0 * d);
        for (int attempt = 1; shape > 0.0 && attempt < 127; ++attempt) {{
            const double x = normal(block_of(seed, key, step, stream, 0, 2 * attempt), 0);
            const Block other = block_of(seed, key, step, stream, 0, 2 * attempt + 1);
            const double root = 1.0 + c * x, v = root * root * root;
            if (v <= 0.0) continue;
            if (wp::log(uniform(other.w[0], other.w[1])) >= 0.5 * x * x + d - d * v + d * wp::log(v)) continue;
            value = 2.0 * d * v;
            if (shape < 1.0) value *= wp::pow(uniform(other.w[2], other.w[3]), 1.0 / shape);
            break;
        }}
        return value;
    }};
"""
"""C++: normal numbers from blocks, and sums of squares of normal numbers."""

_NORMAL = f"""{DRAW}
    const int system = by_system ? thread : systems.shape[0] > 0 ? systems.data[thread] : 0;
    const int n_columns = values.shape[1], atom = by_system ? 0 : places.shape[0] > 0 ? places.data[thread] : thread;
    const bool exists = system >= 0 && system < seeds.shape[0];
    Block block{{}};
    for (int column = 0; column < n_columns; ++column) {{
        if (exists && column % 2 == 0)
            block = block_of(seeds.data[system], keys.data[system], step.data[0], stream, word(atom), column / 2);
        values.data[(long long)thread * n_columns + column] = exists ? normal(block, column % 2) : NAN;
    }}
"""

_CHI_SQUARE = f"""{DRAW}
    values.data[thread] =
        chi_square(seeds.data[thread], keys.data[thread], step.data[0], stream, degrees_of_freedom.data[thread]);
"""


@kernel_variants(())
def normal_numbers() -> Any:
    """The kernel that draws normal numbers, a row for each atom or each system."""

    @native_kernel("normal_numbers", _NORMAL)
    def kernel(
        thread: wp.int32,
        seeds: wp.array(dtype=wp.int64),  # (n_systems,)
        keys: wp.array(dtype=wp.int64),  # (n_systems,), of which 32 bits count
        step: wp.array(dtype=wp.int64),  # (1,), of which 48 bits count
        systems: wp.array(dtype=wp.int32),  # (n_rows,), system of each atom; or none: one system
        places: wp.array(dtype=wp.int32),  # (n_rows,), number of each atom in its system; or none: the row
        stream: wp.int32,  # 0 .. 255
        by_system: wp.int32,  # whether rows are systems
        values: wp.array2d(dtype=wp.float64),  # (n_rows, n_columns), at most 512 columns
    ):
        """Draw the numbers of a row."""

    return kernel


@kernel_variants(())
def chi_square_numbers() -> Any:
    """The kernel that draws a sum of squares of normal numbers for each system."""

    @native_kernel("chi_square_numbers", _CHI_SQUARE)
    def kernel(
        thread: wp.int32,
        seeds: wp.array(dtype=wp.int64),  # (n_systems,)
        keys: wp.array(dtype=wp.int64),  # (n_systems,)
        step: wp.array(dtype=wp.int64),  # (1,)
        degrees_of_freedom: wp.array(dtype=wp.float64),  # (n_systems,), need not be integers
        stream: wp.int32,  # 0 .. 255
        values: wp.array(dtype=wp.float64),  # (n_systems,)
    ):
        """Draw the number of a system."""

    return kernel
