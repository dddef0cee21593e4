"""The kernel that spreads moments of atoms to k-vectors: structure factors."""

from typing import Any

import warp as wp

from nvalchemiops.kernels import moments
from nvalchemiops.kernels.fourier.phases import derivatives_yz, filled_by_device, phase_derivatives, phase_names
from nvalchemiops.kernels.native import filled, native_kernel
from nvalchemiops.launch import kernel_variants

POINTS = 32
"""Number of points that a CPU thread works on at once."""

CHUNK = 32
"""Number of vectors of atoms that are kept in the fastest cache."""

_SIGNS = """
    // from sums over products of cosine and sine (numbers by bits x, y, z) to the four k-vectors of a point
    const auto write_point = [&](const double *sum, double *to) {
        for (int signs = 0; signs < 4; ++signs) {
            const double y = signs & 2 ? -1.0 : 1.0, z = signs & 1 ? -1.0 : 1.0;
            to[2 * signs] = sum[0] - y * z * sum[3] - z * sum[5] - y * sum[6];
            to[2 * signs + 1] = sum[4] + y * sum[2] + z * sum[1] - y * z * sum[7];
        }
    };
"""

_SPREAD_CPU = """
    @system@
    @signs@
    const int n_points = points.shape[0], n_channels = moments.shape[1], end = (row + 1) * @points@ < n_points
        ? (row + 1) * @points@ : n_points;
    const long long stride = tables.shape[1];
    const double two_pi = 6.283185307179586;
    const auto yes = [] { return true; };
    const auto no = [] { return false; };
    // those of the same n_x and n_y; sines of x and y are left out where they are zero
    const auto spread_row = [&](auto sine_x, auto sine_y, int from, int to, int system) {
        constexpr bool with_x = sine_x(), with_y = sine_y();
        constexpr int n_used = (with_x ? 2 : 1) * (with_y ? 2 : 1), each = with_y ? 1 : 2;  // of products of x and y
        const int *const head = points.data + 3LL * from;
        const int first_vector = vector_begin.data[system], end_vector = vector_begin.data[system + 1];
        const double *const x = tables.data + 2LL * head[0] * stride;
        const double *const y = tables.data + (from_y + 2LL * head[1]) * stride;
        const double *const z = tables.data + from_z * stride;
        for (int channel = 0; channel < n_channels; ++channel) {
            const double *const values = tables.data + (tables.shape[0] - (n_channels - channel) * @count@) * stride;
            // even derivatives by z times cosine and sine, then odd ones
            lanes sums[@points@][@parts@][8];
            for (int p = 0; p < to - from; ++p)
                for (int part = 0; part < @parts@; ++part)
                    for (int a = 0; a < 8; ++a) sums[p][part][a] = 0.0;
            for (int chunk = first_vector; chunk < end_vector; chunk += @chunk@) {
                const int n = end_vector - chunk < @chunk@ ? end_vector - chunk : @chunk@;
                // moments times functions of x and y; the derivatives by z are taken at the end
                lanes amplitude[@powers@][4][@chunk@];
                for (int v = 0; v < n; ++v) {
                    const long long at = @lanes@LL * (chunk + v);
                    const auto load = [=](const double *p) { return *reinterpret_cast<const anywhere *>(p + at); };
                    lanes m[@count@];
                    for (int c = 0; c < @count@; ++c) m[c] = load(values + c * stride);
                    const lanes xc0 = load(x), xs0 = load(x + stride), yc0 = load(y), ys0 = load(y + stride);
                    @derivatives_xy@
                    @amplitudes@
                }
                const auto add_points = [&](auto together, int p) {
                    constexpr int n_together = together();
                    const double *z_p[n_together];
                    double minus_square[n_together];
                    lanes s[n_together][@parts@][n_used][2];
                    for (int q = 0; q < n_together; ++q) {
                        const int n_z = head[3 * (p + q) + 2];
                        z_p[q] = z + 2LL * n_z * stride + @lanes@LL * chunk;
                        minus_square[q] = -(two_pi * n_z) * (two_pi * n_z);
                        for (int part = 0; part < @parts@; ++part)
                            for (int u = 0; u < n_used; ++u)
                                for (int b = 0; b < 2; ++b) s[q][part][u][b] = sums[p + q][part][2 * each * u + b];
                    }
                    for (int v = 0; v < n; ++v) {
                        for (int q = 0; q < n_together; ++q) {
                            const auto load = [=](const double *t) {
                                return *reinterpret_cast<const anywhere *>(t + @lanes@ * v);
                            };
                            const lanes c = load(z_p[q]), d = load(z_p[q] + stride);
                            for (int u = 0; u < n_used; ++u)
                                for (int part = 0; part < @parts@; ++part) {
                                    lanes f = amplitude[@last_even@ + part * @to_odd@][each * u][v];
                                    for (int power = @last_even@ + part * @to_odd@ - 2; power >= 0; power -= 2)
                                        f = __builtin_elementwise_fma(
                                            lanes(minus_square[q]), f, amplitude[power][each * u][v]);
                                    lanes *const to = s[q][part][u];
                                    to[0] = __builtin_elementwise_fma(f, c, to[0]);
                                    to[1] = __builtin_elementwise_fma(f, d, to[1]);
                                }
                        }
                    }
                    for (int q = 0; q < n_together; ++q)
                        for (int part = 0; part < @parts@; ++part)
                            for (int u = 0; u < n_used; ++u)
                                for (int b = 0; b < 2; ++b) sums[p + q][part][2 * each * u + b] = s[q][part][u][b];
                };
                int p = 0;
                if (head[2] == 0) {
                    // one and zero are cosine and sine
                    for (int u = 0; u < n_used; ++u) {
                        lanes s = sums[0][0][2 * each * u];
                        for (int v = 0; v < n; ++v) s += amplitude[0][each * u][v];
                        sums[0][0][2 * each * u] = s;
                    }
                    p = 1;
                }
                constexpr int most = @accumulators@ / (2 * @parts@ * n_used);
                for (; p + most <= to - from; p += most) add_points([] { return most; }, p);
                for (; p < to - from; ++p) add_points([] { return 1; }, p);
            }
            for (int p = 0; p < to - from; ++p) {
                const lanes *const even = sums[p][0];
                lanes s[8];
                for (int a = 0; a < 8; ++a) s[a] = even[a];
                @odd@
                // the transpose of eight vectors, added up
                lanes pairs[4], fours[2];
                for (int a = 0; a < 4; ++a)
                    pairs[a] = __builtin_shufflevector(s[2 * a], s[2 * a + 1], 0, 8, 2, 10, 4, 12, 6, 14)
                        + __builtin_shufflevector(s[2 * a], s[2 * a + 1], 1, 9, 3, 11, 5, 13, 7, 15);
                for (int a = 0; a < 2; ++a)
                    fours[a] = __builtin_shufflevector(pairs[2 * a], pairs[2 * a + 1], 0, 1, 8, 9, 4, 5, 12, 13)
                        + __builtin_shufflevector(pairs[2 * a], pairs[2 * a + 1], 2, 3, 10, 11, 6, 7, 14, 15);
                const lanes all = __builtin_shufflevector(fours[0], fours[1], 0, 1, 2, 3, 8, 9, 10, 11)
                    + __builtin_shufflevector(fours[0], fours[1], 4, 5, 6, 7, 12, 13, 14, 15);
                double total[8];
                for (int a = 0; a < 8; ++a) total[a] = all[a];
                write_point(total, field.data + 8 * (1LL * channel * n_points + from + p));
            }
        }
    };
    for (int from = row * @points@, to; from < end; from = to) {
        const int *const head = points.data + 3LL * from;
        const int system = system_of(point_begin, from), last = point_begin.data[system + 1];
        for (to = from + 1; to < end && to < last; ++to) {
            const int *const next = points.data + 3LL * to;
            if (next[0] != head[0] || next[1] != head[1]) break;
        }
        if (head[0] && head[1]) spread_row(yes, yes, from, to, system);
        else if (head[0]) spread_row(yes, no, from, to, system);
        else if (head[1]) spread_row(no, yes, from, to, system);
        else spread_row(no, no, from, to, system);
    }
"""

_SPREAD_GPU = """
    @system@
    @signs@
    @share@
    struct alignas(16) Phase {
        double cosine, sine;
    };
    typedef double lanes;
    const double two_pi = 6.283185307179586;
    const int n_points = points.shape[0], n_channels = moments.shape[1], columns = tables.shape[1] / 6;
    const int channel = row / n_points % n_channels, slice = row / n_points / n_channels;
    const int *const head = points.data + 3LL * (row % n_points);
    const int system = system_of(point_begin, row % n_points), first = atom_begin.data[system];
    const int n_atoms = atom_begin.data[system + 1] - first, end = first + share(n_atoms, slice + 1);
    // threads of a warp are at the same atom, and most of them have neighboring multiples
    const auto phase = [&](int place, int atom, int axis) {
        if (head[axis] < columns)
            return reinterpret_cast<const Phase *>(tables.data)[(3LL * place + axis) * columns + head[axis]];
        const double s = coordinates.data[3LL * atom + axis];
        Phase found;
        ::sincospi(2.0 * head[axis] * (s - ::rint(s)), &found.sine, &found.cosine);
        return found;
    };
    constexpr bool with_x = true, with_y = true;
    constexpr int v = 0;
    double total[8] = {};
    for (int place = first + share(n_atoms, slice); place < end; ++place) {
        const int atom = order.shape[0] > 0 ? order.data[place] : place;
        const double *const m = moments.data + (1LL * atom * n_channels + channel) * @count@;
        const Phase x = phase(place, atom, 0), y = phase(place, atom, 1), z = phase(place, atom, 2);
        const double xc0 = x.cosine, xs0 = x.sine, yc0 = y.cosine, ys0 = y.sine, zc0 = z.cosine, zs0 = z.sine;
        double amplitude[@powers@][4][1];
        @derivatives_xy@
        @derivatives_z@
        @amplitudes@
        for (int u = 0; u < 4; ++u) {
            @totals@
        }
    }
    write_point(total, field.data + 8LL * row);
"""


def _spread_body(derivatives: int) -> str:
    totals = [
        f"total[2 * u + {part}] = ::fma(amplitude[{c}][u][0], {phase_names('z', c)[part]}, total[2 * u + {part}]);"
        for c in range(derivatives + 1)
        for part in (0, 1)
    ]
    odd = """
        const lanes *const of_odd = sums[p][1];
        const double n_z = two_pi * head[3 * p + 2];
        for (int a = 0; a < 4; ++a) {
            s[2 * a] -= n_z * of_odd[2 * a + 1];
            s[2 * a + 1] += n_z * of_odd[2 * a];
        }
    """
    values = {"signs": _SIGNS, "points": POINTS, "chunk": CHUNK, "accumulators": 16}
    values |= {"parts": min(derivatives, 1) + 1, "odd": odd if derivatives else ""}
    # the highest even power, and the step from it to the highest odd power
    values |= {"last_even": derivatives - derivatives % 2, "to_odd": 1 if derivatives % 2 else -1}
    values["derivatives_z"] = phase_derivatives("z", "static_cast<double>(head[2])", derivatives)
    values |= {"amplitudes": _amplitudes(derivatives), "totals": "\n".join(totals)}
    return filled_by_device(_SPREAD_CPU, _SPREAD_GPU, derivatives, ("head[0]", "head[1]"), **values)


def _amplitudes(derivatives: int) -> str:
    """C++ for moments times functions of x and y, axis after axis.

    Sums over the derivatives with respect to x are computed once for all derivatives with respect to y.
    """
    if derivatives == 0:
        lines = [f"amplitude[0][{2 * x + y}][v] = m[0] * x{'cs'[x]}0 * y{'cs'[y]}0;" for x in (0, 1) for y in (0, 1)]
        return "\n".join(lines)
    number = {component: k for k, component in enumerate(moments.components(derivatives))}
    pairs = derivatives_yz(derivatives)
    with_x, without_x, with_y, without_y = [], [], [], []
    for (b, c), n in pairs.items():
        for x in (0, 1):
            terms = [f"m[{number[a, b, c]}] * x{'cs'[x]}{a}" for a in range(derivatives + 1 - b - c)]
            with_x.append(f"along[{n}][{x}] = {' + '.join(terms)};")
        without_x.append(f"along[{n}][0] = m[{number[0, b, c]}];")
    for c in range(derivatives + 1):
        for y in (0, 1):
            terms = [f"along[{pairs[b, c]}][x] * y{'cs'[y]}{b}" for b in range(derivatives + 1 - c)]
            with_y.append(f"amplitude[{c}][2 * x + {y}][v] = {' + '.join(terms)};")
        without_y.append(f"amplitude[{c}][2 * x][v] = along[{pairs[0, c]}][x];")
    return filled(
        """
        lanes along[@pairs@][2];
        if constexpr (with_x) { @with_x@ } else { @without_x@ }
        for (int x = 0; x < 1 + with_x; ++x) {
            if constexpr (with_y) { @with_y@ } else { @without_y@ }
        }
        """,
        pairs=len(pairs),
        with_x="\n".join(with_x),
        without_x="\n".join(without_x),
        with_y="\n".join(with_y),
        without_y="\n".join(without_y),
    )


@kernel_variants((0,), (1,))
def fourier_spread(derivatives: int) -> Any:
    """The kernel for structure factors: a thread of a CPU owns `POINTS` points, one of a GPU a point and some atoms."""

    @native_kernel(f"fourier_spread_{derivatives}", _spread_body(derivatives))
    def kernel(
        row: wp.int32,
        moments: wp.array3d(dtype=wp.float64),  # (n_atoms, n_channels, n_moments)
        coordinates: wp.array2d(dtype=wp.float64),
        order: wp.array(dtype=wp.int32),  # as in `phase_tables`
        atom_begin: wp.array(dtype=wp.int32),
        vector_begin: wp.array(dtype=wp.int32),
        tables: wp.array2d(dtype=wp.float64),
        from_y: wp.int32,
        from_z: wp.int32,
        points: wp.array2d(dtype=wp.int32),  # (n_points, 3)
        point_begin: wp.array(dtype=wp.int32),  # (n_systems + 1,)
        slices: wp.int32,  # of the atoms of a system, on a GPU
        field: wp.array4d(dtype=wp.float64),  # (slices * n_channels, n_points, 4, 2)
    ):
        """Structure factors of some points."""

    return kernel
