"""Weights of cardinal B-splines, and the text of kernels that compute them, for one atom or for several at once."""

import numpy as np

from nvalchemiops.kernels import moments
from nvalchemiops.kernels.native import filled
from nvalchemiops.kernels.simd import LANES, WARP

PLACES = {"x": 0, "z": 1, "y": 2}
"""The order of an atom's weights on a CPU. Windows at the ends of those along z also read x and y, times nothing."""

ORDERS = (4, 5, 6, 7, 8, 10)
COMMON = ((4, "float64"), (5, "float64"), (5, "float32"), (8, "float64"), (8, "float32"), (10, "float64"))
"""Orders and precisions of common meshes: 4 is common in other codes, 5 is the default for a mesh that is given, 8 and
10 are chosen with meshes for an accuracy of 1e-4 and 1e-6 on a CPU."""

_PLACE = """
    // Where the stencil begins, and how far into a cell the atom is. What is NaN is put somewhere, with weights NaN.
    const auto place = [](double u, int n, double &inside) {
        const double shifted = u + @half@, whole = wp::floor(shifted);
        inside = shifted - whole;
        const double first = whole - @before@, turns = wp::floor(first / n);
        const double at = first - turns * n;
        return at >= 0.0 && at < n ? static_cast<int>(at) : 0;
    };
"""

_WEIGHTS = """
    // w[d][j]: derivative d of the weight of point j of the stencil
    const auto weigh = [](number t, number w[@powers@][@order@]) {
        number m[@order@] = {};  // M_n(t + i)
        m[0] = t - t + scalar(1);
        @unrolled@for (int n = 1; n <= @order@; ++n) {
            if (n > 1) {
                @unrolled@for (int i = n - 1; i > 0; --i)
                    m[i] = ((t + scalar(i)) * m[i] + (scalar(n - i) - t) * m[i - 1]) * scalar(1.0 / (n - 1));
                m[0] = t * m[0] * scalar(1.0 / (n - 1));
            }
            const int d = @order@ - n;
            if (d < @powers@) {
                // derivatives are differences of splines of lower order
                number v[@order@] = {};
                @unrolled@for (int i = 0; i < n; ++i) v[i] = m[i];
                @unrolled@for (int k = 0; k < d; ++k)
                    @unrolled@for (int i = @order@ - 1; i > 0; --i) v[i] -= v[i - 1];
                @unrolled@for (int i = 0; i < @order@; ++i) w[d][@order@ - 1 - i] = v[i];
            }
        }
    };
"""

_STENCILS_OF_MANY = """
    // the stencils of @lanes@ atoms at once: where they begin, and weights (axis, derivative, point)
    const auto stencils = [&](int from, int *first, @real@ *to, long long stride) {
        const int n[3] = {n_x, n_y, n_z};
        for (int axis = 0; axis < 3; ++axis) {
            number inside, w[@powers@][@order@];
            for (int l = 0; l < @lanes@; ++l) {
                const int k = from + l < n_atoms ? from + l : n_atoms - 1;
                double part;
                first[3 * l + axis] = place(coordinates.data[3LL * order.data[k] + axis], n[axis], part);
                inside[l] = part;
            }
            weigh(inside, w);
            typedef @real@ rounded __attribute__((ext_vector_type(@lanes@), aligned(4)));
            @real@ plain[@powers@ * @order@ * @lanes@];
            for (int n = 0; n < @powers@ * @order@; ++n)
                *reinterpret_cast<rounded *>(plain + n * @lanes@) =
                    __builtin_convertvector(w[n / @order@][n % @order@], rounded);
            for (int l = 0; l < @lanes@ && from + l < n_atoms; ++l)
                for (int d = 0; d < @powers@; ++d) {
                    @real@ *const at = to + l * stride + (axis == 0 ? 0 : axis == 1 ? @y@ : @z@) + d * @width@;
                    for (int j = 0; j < @order@; ++j) at[j] = plain[(d * @order@ + j) * @lanes@ + l];
                    for (int j = @order@; j < @width@; ++j) at[j] = 0;
                }
        }
    };
"""

_WINDOWS = """
    // The points of a stencil along z are in a window of @width@ points of a row, a vector: from the first point on, or
    // the last points of the row, and then, beyond the boundary, its first ones.
    typedef @real@ reals __attribute__((ext_vector_type(@width@), aligned(4)));
    const auto window_of = [](int first, int n_z) {
        return first + @width@ <= n_z || n_z < @width@ ? first : n_z - @width@;
    };
    // Weights along z in the window, or beyond the boundary; those of points beyond the stencil are zero. Memory before
    // and after them is read.
    const auto in_window = [](const @real@ *weights, int offset, int part) {
        typedef @integer@ lanes __attribute__((ext_vector_type(@width@)));
        const int shift = part * @width@ - offset;
        const lanes point = lanes{@numbered@} + lanes(shift);
        const reals at = *reinterpret_cast<const reals *>(weights + shift);
        return (point >= lanes(0) & point < lanes(@order@)) ? at : reals(0);
    };
"""

_NUMBER_CPU = f"typedef double scalar, number __attribute__((ext_vector_type({LANES})));"


def window(order: int) -> int:
    """Number of stored weights along an axis on a CPU, a vector: those beyond the order are zero.

    For orders 9 and 10, 16 are faster than 10 or 12, which are no whole number of registers.
    """
    return 8 if order <= 8 else 16


def place(order: int) -> str:
    """C++ text of the function that places a stencil of this order."""
    return filled(_PLACE, half=0.5 * (order % 2), before=(order - 1) // 2)


def first_point(u: np.ndarray, order: int) -> np.ndarray:
    """The first mesh points of the stencils of atoms at ``u``, in mesh spacings, as in the kernels."""
    return np.floor(u + 0.5 * (order % 2)).astype(np.int64) - (order - 1) // 2


def values(order: int, derivatives: int, warps: bool, precision: str) -> dict[str, object]:
    """Values of the placeholders that the text of all kernels has, for either type of device.

    On a CPU, weights are computed in float64, and kept in this precision. On a GPU they are also computed in it.
    """
    width = window(order)
    numbers: dict[str, object] = {"order": order, "powers": derivatives + 1, "lanes": LANES, "width": width}
    real, integer = ("float", "int") if precision == "float32" else ("double", "long long")
    numbers |= {"real": real, "integer": integer, "numbered": ", ".join(map(str, range(width)))}
    # loops of so many steps a compiler of a GPU unrolls only if it is told to, and keeps arrays in memory otherwise
    numbers |= {"unrolled": "\n#pragma unroll\n" if warps and order > 8 else ""}
    numbers |= {axis: n * (derivatives + 1) * width for axis, n in PLACES.items()}
    return numbers | {
        "number": f"typedef {real} scalar, number;" if warps else _NUMBER_CPU,
        "place": place(order),
        "weights": filled(_WEIGHTS, **numbers),
        "stencils": filled(_STENCILS_OF_MANY, **numbers),
        "windows": filled(_WINDOWS, **numbers),
        "size": 3 * (derivatives + 1) * width,
        "count": moments.count(derivatives),
        "warp": WARP,
    }
