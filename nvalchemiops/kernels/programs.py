"""An interpreter of small programs of numbers: what dozens of operations on a few numbers each do, in one launch.

A program computes numbers of a system and numbers of its atoms, and sums over its atoms. A thread runs it for a system,
and for blocks of `BLOCK` atoms, so that reading an instruction costs little. Small systems share a thread, and blocks.
Atoms are added one after the other in a block, then blocks, so a sum has the same bits for a system alone and in a
batch. Programs are written by `nvalchemiops.torch.dynamics.programs`, for CPUs.
"""

from typing import Any

import warp as wp

from nvalchemiops.kernels.native import by_device, native_kernel
from nvalchemiops.kernels.noise import DRAW
from nvalchemiops.launch import cpu_only, kernel_variants

BLOCK, SYSTEM_REGISTERS, ATOM_REGISTERS = 128, 1024, 64
"""Atoms in a block; registers of a system, and of each atom of a block."""

MOST_TOGETHER, MOST_ATOMS = 16, 1024
"""Largest number of systems that a thread computes together, and of their atoms if there are several."""

# exp(x) - 1: W. Kahan, in N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed. (2002), section 1.14.1
_EXPM1 = "const double u = wp::exp(a[i]); d[i] = u == 1.0 ? a[i] : u == 0.0 ? -1.0 : (u - 1.0) * (a[i] / wp::log(u))"

OPERATIONS = {
    "add": "d[i] = a[i] + b[i]",
    "sub": "d[i] = a[i] - b[i]",
    "mul": "d[i] = a[i] * b[i]",
    "multiply_add": "d[i] = a[i] * b[i] + c[i]",
    "div": "d[i] = a[i] / b[i]",
    "neg": "d[i] = -a[i]",
    "exp": "d[i] = wp::exp(a[i])",
    "expm1": _EXPM1,
    "log": "d[i] = wp::log(a[i])",
    "sqrt": "d[i] = wp::sqrt(a[i])",
    "abs": "d[i] = wp::abs(a[i])",
    "maximum": "d[i] = a[i] < b[i] ? b[i] : a[i]",
    "less": "d[i] = a[i] < b[i]",
    "where": "d[i] = a[i] != 0.0 ? b[i] : c[i]",
    "copysign": "d[i] = wp::copysign(a[i], b[i])",
}
"""What operations do to the number ``d`` with the numbers ``a``, ``b`` and ``c``."""

_OTHERS = ("number", "normal", "chi_square", "load", "store", "spread", "sum", "atoms")
CODES = {name: code for code, name in enumerate((*OPERATIONS, *_OTHERS))}
"""Codes of the operations, and of these instructions ``(code, d, a, b, c)``.

``number``: the constant a. ``normal``: the normal number of stream a and column b. ``chi_square``: a sum of squares of
a normal numbers, of stream b. ``load``: column b of c of array a. ``store``: the number a to column b of c of array d.
``spread``: the number a of the system, for atoms. ``sum``: add the number a of the atoms to the number d of the system.
``atoms``: the next d instructions are for atoms, of which the first a are in `SAME`, and keep their registers.
"""

SAME = ("number", "spread")
"""Instructions with the same result for all blocks of a system, which run for the first block only."""

FIRST_ARRAY = 6
"""Place of the first float64 array among the addresses."""

_ROWS = "for (int i = 0; i < n; ++i)"
# registers are the same or apart, which a compiler cannot know
_VECTORS = f"""
#pragma clang loop vectorize(assume_safety)
            {_ROWS}"""
_CASES = "\n".join(f"        case {CODES[name]}: {_VECTORS} {{ {text}; }} break;" for name, text in OPERATIONS.items())

_RUN = f"""{DRAW}
    const int *code = reinterpret_cast<const int *>(program);
    const double *constants = reinterpret_cast<const double *>(numbers);
    const long long *arrays = reinterpret_cast<const long long *>(addresses);
    const int *order = reinterpret_cast<const int *>(arrays[0]), *begin = reinterpret_cast<const int *>(arrays[1]);
    const auto number = [&](int array, int row) {{
        return arrays[array] ? reinterpret_cast<const long long *>(arrays[array])[row] : 0;
    }};
    const long long step = number(4, 0);
    const int *places = reinterpret_cast<const int *>(arrays[5]);
    double of_systems[{SYSTEM_REGISTERS * MOST_TOGETHER}], of_atoms[{ATOM_REGISTERS * BLOCK}];
    // the first system; the number of a row's system among those of this thread, the row of an atom if not sorted
    const int first = thread * share, together = first + share < n_systems ? share : n_systems - first;
    int member[{BLOCK}], sorted[{BLOCK}];
    // one instruction for n rows, whose registers are `width` apart: rows from `row` on, or those that are listed
    const auto run = [&](const int *at, double *registers, int width, int row, const int *rows, int n) {{
        double *d = registers + at[1] * width;
        const double *a = registers + at[2] * width, *b = registers + at[3] * width, *c = registers + at[4] * width;
        switch (at[0]) {{
{_CASES}
        case {CODES["number"]}: for (int i = 0; i < n; ++i) d[i] = constants[at[2]]; break;
        case {CODES["normal"]}:
            for (int i = 0; i < n; ++i) {{
                const int system = first + (registers == of_atoms ? member[i] : i);
                const int atom = registers != of_atoms ? 0 : rows ? rows[i] : row + i;
                const int place = registers == of_atoms && places ? places[atom] : atom;
                const auto drawn = block_of(number(2, system), number(3, system), step, at[2], word(place), at[3] / 2);
                d[i] = normal(drawn, at[3] % 2);
            }}
            break;
        case {CODES["chi_square"]}:
            for (int i = 0; i < n; ++i)
                d[i] = chi_square(number(2, first + i), number(3, first + i), step, at[3], a[i]);
            break;
        case {CODES["spread"]}: {{
            const double *from = of_systems + at[2] * together;
            if (member[0] == member[n - 1]) for (int i = 0; i < n; ++i) d[i] = from[member[0]];
            else for (int i = 0; i < n; ++i) d[i] = from[member[i]];
            break;
        }}
        case {CODES["sum"]}: {{
            double *to = of_systems + at[1] * together;
            for (int i = 0; i < n;) {{
                const int system = member[i];
                double sum = 0.0;
                for (; i < n && member[i] == system; ++i) sum += a[i];
                to[system] += sum;
            }}
            break;
        }}
        case {CODES["load"]}: {{
            const double *from = reinterpret_cast<const double *>(arrays[at[2]]) + at[3];
            const long long columns = at[4];
            if (rows) {_ROWS} d[i] = from[columns * rows[i]];
            else {_ROWS} d[i] = from[columns * row + columns * i];
            break;
        }}
        case {CODES["store"]}: {{
            double *to = reinterpret_cast<double *>(arrays[at[1]]) + at[3];
            const long long columns = at[4];
            if (rows) {_ROWS} to[columns * rows[i]] = a[i];
            else {_VECTORS} to[columns * row + columns * i] = a[i];
            break;
        }}
        }}
    }};
    const auto start_of = [&](int system) {{ return begin ? begin[system] : system == 0 ? 0 : n_atoms; }};
    for (int k = 0; k < length; ++k) {{
        const int *at = code + 5 * k;
        if (at[0] != {CODES["atoms"]}) {{
            if (together == 1) run(at, of_systems, 1, first, nullptr, 1);  // compiled for one number
            else run(at, of_systems, together, first, nullptr, together);
            continue;
        }}
        // systems from `low` to `high` share a block, or are one system of more atoms
        for (int low = first, high; low < first + together; low = high) {{
            for (high = low + 1; high < first + together; ++high)
                if (start_of(high + 1) - start_of(low) > {BLOCK}) break;
            for (int from = start_of(low), system = low; from < start_of(high); from += {BLOCK}) {{
                const int left = start_of(high) - from, n = left < {BLOCK} ? left : {BLOCK};
                if (high - low == 1) {_ROWS} member[i] = low - first;
                else {_ROWS} {{
                    while (from + i >= begin[system + 1]) ++system;
                    member[i] = system - first;
                }}
                for (int i = 0; order && i < n; ++i) sorted[i] = order[from + i];
                const int *rows = order ? sorted : nullptr;
                const int begun = from > start_of(low) ? at[2] : 0;
                for (int j = 1 + begun; j <= at[1]; ++j) run(at + 5 * j, of_atoms, {BLOCK}, from, rows, n);
            }}
        }}
        k += at[1];
    }}
"""


@kernel_variants(())
def program_kernel() -> Any:
    """The kernel that runs a program for each system, on a CPU. Addresses are those of host memory."""

    @native_kernel("programs", by_device(_RUN))
    def kernel(
        thread: wp.int32,
        program: wp.uint64,  # address of (length, 5) int32, instructions
        length: wp.int32,
        numbers: wp.uint64,  # address of float64, constants
        addresses: wp.uint64,  # address of int64, the addresses of
        #   (n_atoms,) int32, rows sorted by system, or 0 if they are sorted
        #   (n_systems + 1,) int32, where systems begin, or 0 for one system
        #   (n_systems,) int64 seeds and keys, and the step (1,), or 0 without noise
        #   (n_atoms,) int32, number of each atom in its system, or 0 if it is that of the row
        #   contiguous float64 arrays (n_systems or n_atoms, columns)
        n_atoms: wp.int32,
        n_systems: wp.int32,
        share: wp.int32,  # number of systems of a thread
    ):
        """Run the program for some systems."""

    return cpu_only(kernel)
