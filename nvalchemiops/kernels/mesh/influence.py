"""The influence function of a mesh: the transform of a power law at the mesh's frequencies.

Formulas and sources are those of `nvalchemiops.torch.interactions.electrostatics.potentials`.
"""

import math
from typing import Any

import warp as wp

from nvalchemiops.kernels.native import by_device, filled, native_kernel
from nvalchemiops.kernels.simd import WARP
from nvalchemiops.launch import kernel_variants

_INFLUENCE = """
    struct alignas(2 * sizeof(@real@)) number {
        @real@ real, imaginary;
    };
    const int length = b_z.shape[0], n_rows = n_x * n_planes, @row@;
    const auto frequency = [](int i, int n) { return static_cast<double>(i < (n + 1) / 2 ? i : i - n); };
    const double m_x = frequency(x, n_x), m_y = frequency(y, n_y);
    const double *const g = metric.data + 9LL * system;
    // the mean over both signs of the frequency n / 2, which the mesh does not tell apart
    const double s_x = 2 * x == n_x ? 0.0 : m_x, s_y = 2 * y == n_y ? 0.0 : m_y;
    const double of_row = (g[0] * m_x * m_x + 2.0 * g[1] * s_x * s_y) + g[4] * m_y * m_y;
    const double along_z = 2.0 * (g[5] * s_y + g[2] * s_x);
    const double v = volume.data[system], a = alpha.data[system], b_row = b_xy.data[row_of_system] / v;
    const double per_square = 0.25 / (a * a);
    @heights@
    double sum_0 = 0.0, sum_1 = 0.0, sum_2 = 0.0;
    @lane@
    for (int k = lane; k < length; k += @step@) {
        const int z = k + first_z;
        const bool has_one_sign = 2 * z != n_z;
        const double k2 = of_row + z * ((has_one_sign ? along_z : 0.0) + @of_z@ * z), b = b_row * b_z.data[k];
        double found, slope;
        if (k2 == 0.0) {
            found = @origin@;
            slope = 0.0;
        } else {
            const double argument = k2 * per_square;
            if (exponent == 1) {
                // in single precision where that was asked for: a GPU would take longer for these two than for all else
                const @real@ inverse = 1 / static_cast<@real@>(k2), decay = ::exp(-static_cast<@real@>(argument));
                found = @four_pi@ * (decay * inverse);
                slope = -found * (per_square + inverse);
            } else {
                // h of 2, 4, ..., the exponent less 2, and the exponent
                const double decay = ::exp(-argument), root = ::sqrt(argument), pole = @root_pi@ * root * ::erfc(root);
                double before = pole / argument, h = 2.0 * (decay - pole);
                for (int p = 6; p <= exponent; p += 2) {
                    before = h;
                    h = (argument * h - decay) * (2.0 / (3 - p));
                }
                found = height * h;
                slope = -per_square * height * before;
            }
            found *= b;
            slope *= b * (z == 0 || 2 * z == n_z ? 1.0 : 2.0);
        }
        @table@const long long place = 1LL * row * length + k;
        if (value.shape[0] > 0) value.data[place] = found;
        if (derivative.shape[0] > 0) derivative.data[place] = slope;@end@
        if (field.shape[0] == 0) continue;
        const @real@ factor = found;  // rounded, as it is in a table
        double square = 0.0;
        @channels@
            const number before = *at;
            *at = {before.real * factor, before.imaginary * factor};
            square += static_cast<double>(before.real) * before.real;
            square += static_cast<double>(before.imaginary) * before.imaginary;
        }
        const double power = square * slope;
        sum_0 += power;
        if (has_one_sign) sum_1 += z * power;
        sum_2 += z * (z * power);
    }
    if (powers.shape[0] == 0) return;
    @add@
    if (lane > 0) return;
    double *const to = powers.data + 3LL * row;
    to[0] = sum_0;
    to[1] = sum_1;
    to[2] = sum_2;
"""

_ADD_LANES = f"""
    for (int step = {WARP // 2}; step > 0; step /= 2) {{
        sum_0 += __shfl_xor_sync(0xffffffffu, sum_0, step);
        sum_1 += __shfl_xor_sync(0xffffffffu, sum_1, step);
        sum_2 += __shfl_xor_sync(0xffffffffu, sum_2, step);
    }}
"""

_CPU = {
    "row": """row_of_system = row % n_rows, system = row / n_rows;
    const int x = row_of_system / n_planes, y = row_of_system % n_planes + first_y""",
    "heights": """const double height = exponent == 1 ? -@pi@ / (a * a) : scale * ::pow(a, exponent - 3.0);
    const double origin = (exponent == 1 ? height : height * (2.0 / (exponent - 3))) / v;""",
    "of_z": "g[8]",
    "table": "",
    "end": "",
    "origin": "origin",
    "channels": """for (int channel = 0; channel < n_channels; ++channel) {
            number *const at = reinterpret_cast<number *>(field.data)
                + ((1LL * system * n_channels + channel) * n_rows + row_of_system) * length + k;""",
    "lane": "const int lane = 0;",
    "step": "1",
    "add": "",
}

_GPU = {
    # a division by an unsigned number takes fifteen instructions, by a signed one thirty
    "row": """system = static_cast<unsigned>(row) / n_rows, row_of_system = row - system * n_rows;
    const int x = static_cast<unsigned>(row_of_system) / n_planes, y = row_of_system - x * n_planes + first_y""",
    # one lane of all needs the value at the origin, and a Coulomb sum needs the height for nothing else: k², which is
    # zero there, keeps the compiler from dividing before the loop
    "heights": """const bool is_table = value.shape[0] > 0 || derivative.shape[0] > 0;
    const double of_z = g[8];
    double height = 0.0;
    if (exponent != 1) height = scale * ::pow(a, exponent - 3.0);
    const long long between = 1LL * n_rows * length;
    number *const first =
        reinterpret_cast<number *>(field.data) + 1LL * system * n_channels * between + 1LL * row_of_system * length;""",
    "of_z": "of_z",
    "table": """if (is_table) {
        """,
    "end": """
        }""",
    "origin": "(exponent == 1 ? -@pi@ / (a * a + k2) : height * (2.0 / (exponent - 3))) / (v + k2)",
    "channels": """number *at = first + k;
        #pragma unroll 1
        for (int channel = 0; channel < n_channels; ++channel, at += between) {""",
    "lane": f"const int lane = threadIdx.x & {WARP - 1};",
    "step": str(WARP),
    "add": _ADD_LANES,
}


@kernel_variants(("float32",), ("float64",))
def tabulate_influence(precision: str) -> Any:
    """The kernel that tabulates the influence function of a power law, or multiplies meshes by it.

    A thread of a CPU, or a warp of a GPU, has a row along z.
    """
    given = {"pi": repr(math.pi), "four_pi": repr(4.0 * math.pi), "root_pi": repr(math.sqrt(math.pi))}
    given["real"] = {"float32": "float", "float64": "double"}[precision]
    cpu, gpu = (
        filled(_INFLUENCE, **given, **{name: filled(text, **given) for name, text in own.items()})
        for own in (_CPU, _GPU)
    )

    real = getattr(wp, precision)

    @native_kernel(f"influence_{precision}", by_device(cpu, gpu), lanes=True)
    def kernel(
        row: wp.int32,  # (system, x, y of the planes)
        metric: wp.array3d(dtype=wp.float64),  # (n_systems, 3, 3), of k²
        alpha: wp.array(dtype=wp.float64),  # (n_systems,)
        volume: wp.array(dtype=wp.float64),
        b_xy: wp.array(dtype=wp.float64),  # (n_x * n_planes,), 1 / b² of both axes
        b_z: wp.array(dtype=wp.float64),  # (length,)
        n_x: wp.int32,  # of the whole mesh
        n_y: wp.int32,
        n_z: wp.int32,
        n_planes: wp.int32,  # along y
        first_y: wp.int32,
        first_z: wp.int32,
        exponent: wp.int32,
        scale: wp.float64,  # π^(3/2) / Γ(exponent / 2)
        n_channels: wp.int32,  # of the field, 0 without one
        value: wp.array2d(dtype=real),  # (n_systems * n_x * n_planes, length), or none
        derivative: wp.array2d(dtype=wp.float64),  # the same shape, or none
        field: wp.array4d(dtype=real),  # (n_systems * n_channels, n_x, n_planes, 2 * length), multiplied; or none
        powers: wp.array2d(dtype=wp.float64),  # (n_systems * n_x * n_planes, 3), of z⁰, z¹, z²; or none
    ):
        """A row along z."""

    return kernel
