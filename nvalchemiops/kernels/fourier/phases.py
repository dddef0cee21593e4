"""Phases of atoms: the kernel that tabulates them for a CPU, and the C++ that spreading and gathering share."""

from typing import Any

import warp as wp

from nvalchemiops.kernels import moments
from nvalchemiops.kernels.native import SYSTEM_OF, by_device, filled, native_kernel
from nvalchemiops.kernels.simd import LANES
from nvalchemiops.launch import kernel_variants

VECTORS = f"""
    typedef double lanes __attribute__((ext_vector_type({LANES})));
    typedef double anywhere __attribute__((ext_vector_type({LANES}), aligned(8)));
"""
"""Types of vectors on a CPU: ``lanes`` in registers, and ``anywhere`` for loads and stores at any address."""

_TABLES = filled(
    """
    @system@
    const int system = system_of(vector_begin, v);
    const int local = @n@ * (v - vector_begin.data[system]);
    const int first = atom_begin.data[system], n_atoms = atom_begin.data[system + 1] - first;
    const long long stride = tables.shape[1];
    const int n_values = values.shape[1], from_values = tables.shape[0] - n_values;
    for (int l = 0; l < @n@ && n_values > 0; ++l) {
        const bool exists = local + l < n_atoms;
        const int atom = !exists ? 0 : order.shape[0] > 0 ? order.data[first + local + l] : first + local + l;
        double *const to = tables.data + from_values * stride + @n@ * v + l;
        for (int c = 0; c < n_values; ++c) to[c * stride] = exists ? values.data[1LL * atom * n_values + c] : 0.0;
    }
    for (int axis = 0; axis < 3; ++axis) {
        const int begin = axis == 0 ? 0 : axis == 1 ? from_y : from_z;
        const int end = axis == 0 ? from_y : axis == 1 ? from_z : from_values;
        double *const table = tables.data + begin * stride + @n@ * v;
        for (int l = 0; l < @n@; ++l) {
            const bool exists = local + l < n_atoms;
            double cosine = 0.0, sine = 0.0;
            if (exists) {
                const int atom = order.shape[0] > 0 ? order.data[first + local + l] : first + local + l;
                double s = coordinates.data[3LL * atom + axis];
                s -= wp::round(s);
                cosine = wp::cos(6.283185307179586 * s);
                sine = wp::sin(6.283185307179586 * s);
            }
            // places that no atom takes are zero
            table[l] = exists;
            table[stride + l] = 0.0;
            if (end - begin > 2) {
                table[2 * stride + l] = cosine;
                table[3 * stride + l] = sine;
            }
        }
        for (int n = 2; n < (end - begin) / 2; ++n) {
            // by halves, so that rounding grows with the logarithm
            const double *const a = table + n / 2 * 2 * stride, *const b = table + (n - n / 2) * 2 * stride;
            const auto at = [](const double *p) { return *reinterpret_cast<const anywhere *>(p); };
            const lanes ac = at(a), as = at(a + stride), bc = at(b), bs = at(b + stride);
            *reinterpret_cast<anywhere *>(table + 2 * n * stride) = ac * bc - as * bs;
            *reinterpret_cast<anywhere *>(table + (2 * n + 1) * stride) = ac * bs + as * bc;
        }
    }
""",
    system=SYSTEM_OF,
    n=LANES,
)


_TABLES_GPU = """
    const int columns = tables.shape[1] / 6, n = v % columns, axis = v / columns % 3, place = v / columns / 3;
    const int atom = order.shape[0] > 0 ? order.data[place] : place;
    double s = coordinates.data[3LL * atom + axis];
    s -= ::rint(s);
    double *const to = tables.data + 2LL * v;
    ::sincospi(2.0 * n * s, to + 1, to);
"""


@kernel_variants(())
def phase_tables() -> Any:
    """The kernel that tabulates cosines and sines of multiples of the phases of atoms.

    On a CPU a row of the table has all atoms, for all multiples that occur; moments follow. On a GPU a row has an atom,
    with the first multiples along each axis: no sum waits for the device to learn how many occur.
    """

    @native_kernel("phase_tables", by_device(VECTORS + _TABLES, _TABLES_GPU))
    def kernel(
        v: wp.int32,  # a vector of atoms; on a GPU a number of the table
        coordinates: wp.array2d(dtype=wp.float64),  # (n_atoms, 3)
        order: wp.array(dtype=wp.int32),  # (n_atoms,), atoms sorted by system; none if they are sorted
        atom_begin: wp.array(dtype=wp.int32),  # (n_systems + 1,), into the order
        vector_begin: wp.array(dtype=wp.int32),  # (n_systems + 1,), first vector of each system
        values: wp.array2d(dtype=wp.float64),  # (n_atoms, n_values), to be sorted into the tables; or none
        from_y: wp.int32,  # rows at which the tables of y and z begin
        from_z: wp.int32,
        tables: wp.array2d(dtype=wp.float64),  # (rows, 8 * vectors): cosine and sine of each multiple, then values;
        # on a GPU (n_atoms, 6 * columns): cosine and sine of each multiple, along x, y and z
    ):
        """Entries of the tables for a vector of atoms; on a GPU for one multiple."""

    return kernel


# -- C++ that spreading and gathering share -------------------------------------------------------

SHARE = """
    // where the part of a slice begins, of n things in all
    const auto share = [&](int n, int slice) { return static_cast<int>(static_cast<long long>(n) * slice / slices); };
"""
"""How a GPU divides long sums among threads, whose results are then added."""


def phase_derivatives(axis: str, number: str, highest: int) -> str:
    """C++ for the derivatives of cosine and sine along an axis, up to the order ``highest``."""
    lines = []
    for d in range(highest):
        lines.append(f"const lanes {axis}c{d + 1} = -(two_pi * {number}) * {axis}s{d};")
        lines.append(f"const lanes {axis}s{d + 1} = (two_pi * {number}) * {axis}c{d};")
    return "\n".join(lines)


def phase_names(axis: str, derivative: int) -> tuple[str, str]:
    """Names in `phase_derivatives` of the derivatives of cosine and sine along an axis."""
    return f"{axis}c{derivative}", f"{axis}s{derivative}"


def filled_by_device(cpu: str, gpu: str, derivatives: int, places: tuple[str, str], **values: object) -> str:
    """The C++ for both types of device, with its placeholders filled in.

    ``places`` is the C++ for the Miller indices n_x and n_y.
    """
    along = (phase_derivatives(axis, f"static_cast<double>({n})", derivatives) for axis, n in zip("xy", places))
    values |= {
        "system": SYSTEM_OF,
        "share": SHARE,
        "lanes": LANES,
        "powers": derivatives + 1,
        "count": moments.count(derivatives),
        "derivatives_xy": "\n".join(along),
    }
    return by_device(VECTORS + filled(cpu, **values), filled(gpu, **values))


def derivatives_yz(derivatives: int) -> dict[tuple[int, int], int]:
    """The orders of derivatives with respect to y and z that occur in moments, numbered."""
    pairs = [(b, c) for c in range(derivatives + 1) for b in range(derivatives + 1 - c)]
    return {pair: number for number, pair in enumerate(pairs)}
