"""Fourier sums over atoms at the k-vectors of a lattice, as gather kernels.

With fractional coordinates s, a k-vector with Miller indices n has the phase ``2π n.s``, and

    spread:  S(n) = Σ_i m_i exp(2πi n.s_i)                                        real and imaginary part
    gather:  φ_i = Σ_n Re F(n) cos(2π n.s_i) + Im F(n) sin(2π n.s_i)

are transposes of each other, with derivatives by s as `nvalchemiops.kernels.moments` numbers them. Of k and -k one is
enough, so the first index is not negative. A *point* is a triple (|n_x|, |n_y|, |n_z|): four k-vectors,
``(n_x, ±n_y, ±n_z)`` in the order ++, +-, -+, --.

The phases factorise. The eight products of a cosine or sine for each axis give all four k-vectors of a point by
additions, so a pair of atom and point takes 8 multiplications, half as many as complex arithmetic. On a CPU they are
matrix products, over blocks of points and of atoms that fit into registers and caches; cosines and sines of all
multiples are tabulated, and left out where they are one or zero. Derivatives are taken axis after axis: by z for each
point, by y for points with equal n_x and n_y, by x for those with equal n_x. On a GPU the lanes of a warp share a point
or an atom.

Points of a system stand together, and those with equal n_x and n_y should: they share products.
"""

from typing import Any

import warp as wp

from nvalchemiops.kernels import moments
from nvalchemiops.kernels.native import SYSTEM_OF, by_device, filled, native_kernel
from nvalchemiops.kernels.simd import LANES, WARP
from nvalchemiops.launch import kernel_variants

POINTS = 32
"""Points that a CPU thread works on at once."""

CHUNK = 32
"""Vectors of atoms that are kept in the fastest cache."""


_LANES = f"""
    typedef double lanes __attribute__((ext_vector_type({LANES})));
    typedef double anywhere __attribute__((ext_vector_type({LANES}), aligned(8)));
"""

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


@kernel_variants(())
def phase_tables() -> Any:
    """Kernel that tabulates cosine and sine of all multiples of the phases of atoms, and their moments, for a CPU."""

    @native_kernel("phase_tables", by_device(_LANES + _TABLES))
    def kernel(
        v: wp.int32,
        coordinates: wp.array2d(dtype=wp.float64),  # (n_atoms, 3)
        order: wp.array(dtype=wp.int32),  # (n_atoms,), atoms sorted by system; none if they are sorted
        atom_begin: wp.array(dtype=wp.int32),  # (n_systems + 1,), into the order
        vector_begin: wp.array(dtype=wp.int32),  # (n_systems + 1,), first vector of each system
        values: wp.array2d(dtype=wp.float64),  # (n_atoms, n_values), to be sorted into the tables; or none
        from_y: wp.int32,  # rows at which the tables of y and z begin
        from_z: wp.int32,
        tables: wp.array2d(dtype=wp.float64),  # (rows, 8 * vectors): cosine and sine of each multiple, then values
    ):
        """Rows of the tables for a vector of atoms."""

    return kernel


# -- spreading ------------------------------------------------------------------------------------

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
    const int n_points = points.shape[0], n_channels = moments.shape[1], lane = threadIdx.x & @last_lane@;
    const int system = system_of(point_begin, row);
    const int *const n = points.data + 3LL * row;
    const double two_pi = 6.283185307179586;
    for (int channel = 0; channel < n_channels; ++channel) {
        double total[8] = {};
        for (int at = atom_begin.data[system] + lane; at < atom_begin.data[system + 1]; at += @warp@) {
            const int atom = order.shape[0] > 0 ? order.data[at] : at;
            const double *const m = moments.data + (1LL * atom * n_channels + channel) * @count@;
            typedef double lanes;
            @phases@
            @derivatives_xy@
            @derivatives_z@
            @totals@
        }
        for (int a = 0; a < 8; ++a)
            for (int step = @warp@ / 2; step > 0; step /= 2) total[a] += __shfl_xor_sync(0xffffffffu, total[a], step);
        if (lane == 0) write_point(total, field.data + 8 * (1LL * channel * n_points + row));
    }
"""

_PHASES = """
    double xc0, xs0, yc0, ys0, zc0, zs0;
    {
        const double *const s = coordinates.data + 3LL * atom;
        double turns[3];
        for (int axis = 0; axis < 3; ++axis) turns[axis] = 2.0 * n[axis] * (s[axis] - ::rint(s[axis]));
        ::sincospi(turns[0], &xs0, &xc0);
        ::sincospi(turns[1], &ys0, &yc0);
        ::sincospi(turns[2], &zs0, &zc0);
    }
"""


def _derivatives(axis: str, number: str, highest: int) -> str:
    """Derivatives of cosine and sine along an axis, from those without."""
    lines = []
    for d in range(highest):
        lines.append(f"const lanes {axis}c{d + 1} = -(two_pi * {number}) * {axis}s{d};")
        lines.append(f"const lanes {axis}s{d + 1} = (two_pi * {number}) * {axis}c{d};")
    return "\n".join(lines)


def _names(axis: str, derivative: int) -> tuple[str, str]:
    return f"{axis}c{derivative}", f"{axis}s{derivative}"


def _filled(cpu: str, gpu: str, derivatives: int, places: tuple[str, str], **values: object) -> str:
    """Texts for both devices, with the derivatives of phases by x and y; ``places`` are Miller indices there."""
    values |= {
        "system": SYSTEM_OF,
        "lanes": LANES,
        "powers": derivatives + 1,
        "count": moments.count(derivatives),
        "warp": WARP,
        "last_lane": WARP - 1,
        "phases": _PHASES,
        "derivatives_z": _derivatives("z", "static_cast<double>(n[2])", derivatives),
    }
    texts = []
    for text, indices in ((cpu, places), (gpu, ("n[0]", "n[1]"))):
        along = (_derivatives(axis, f"static_cast<double>({n})", derivatives) for axis, n in zip("xy", indices))
        texts.append(filled(text, **values, derivatives_xy="\n".join(along)))
    return by_device(_LANES + texts[0], texts[1])


def _spread_body(derivatives: int) -> str:
    parts = list(enumerate(moments.components(derivatives)))
    totals = []
    for number, (x, y, z) in enumerate((x, y, z) for x in (0, 1) for y in (0, 1) for z in (0, 1)):
        terms = [f"m[{k}] * {_names('x', a)[x]} * {_names('y', b)[y]} * {_names('z', c)[z]}" for k, (a, b, c) in parts]
        totals.append(f"total[{number}] += {' + '.join(terms)};")
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
    # the highest even power, and from there to the highest odd one
    values |= {"last_even": derivatives - derivatives % 2, "to_odd": 1 if derivatives % 2 else -1}
    values |= {"amplitudes": _amplitudes(derivatives), "totals": "\n".join(totals)}
    return _filled(_SPREAD_CPU, _SPREAD_GPU, derivatives, ("head[0]", "head[1]"), **values)


def _along_yz(derivatives: int) -> dict[tuple[int, int], int]:
    """Derivatives by y and z that moments have, numbered."""
    pairs = [(b, c) for c in range(derivatives + 1) for b in range(derivatives + 1 - c)]
    return {pair: number for number, pair in enumerate(pairs)}


def _amplitudes(derivatives: int) -> str:
    """Moments times functions of x and y, axis after axis: a sum over derivatives by x is shared by those by y."""
    if derivatives == 0:
        lines = [f"amplitude[0][{2 * x + y}][v] = m[0] * x{'cs'[x]}0 * y{'cs'[y]}0;" for x in (0, 1) for y in (0, 1)]
        return "\n".join(lines)
    number = {component: k for k, component in enumerate(moments.components(derivatives))}
    pairs = _along_yz(derivatives)
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
    """Kernel for the structure factors: a CPU thread has `POINTS` points, a warp of a GPU has one."""

    @native_kernel(f"fourier_spread_{derivatives}", _spread_body(derivatives), lanes=True)
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
        field: wp.array4d(dtype=wp.float64),  # (n_channels, n_points, 4, 2)
    ):
        """Structure factors of some points."""

    return kernel


# -- gathering ------------------------------------------------------------------------------------

_COEFFICIENTS = """
    // the transpose of what spreading does at the end
    const auto read_point = [&](const double *from, double *to) {
        for (int a = 0; a < 8; ++a) to[a] = 0.0;
        for (int signs = 0; signs < 4; ++signs) {
            const double y = signs & 2 ? -1.0 : 1.0, z = signs & 1 ? -1.0 : 1.0;
            const double re = from[2 * signs], im = from[2 * signs + 1];
            to[0] += re;
            to[1] += z * im;
            to[2] += y * im;
            to[3] -= y * z * re;
            to[4] += im;
            to[5] -= z * re;
            to[6] -= y * re;
            to[7] -= y * z * im;
        }
    };
"""

_GATHER_CPU = """
    @system@
    const int n_points = points.shape[0], n_channels = field.shape[0];
    const long long stride = tables.shape[1];
    const double two_pi = 6.283185307179586;
    const int system = system_of(block_begin, row);
    const int local = @vectors@ * (row - block_begin.data[system]), from = point_begin.data[system];
    const int first = atom_begin.data[system], n_atoms = atom_begin.data[system + 1] - first;
    const int n_vectors = vector_begin.data[system + 1] - vector_begin.data[system];
    const long long at = @lanes@LL * (vector_begin.data[system] + local);
    // the last vector again, if there are no more
    long long place_of[@vectors@];
    for (int v = 0; v < @vectors@; ++v) place_of[v] = @lanes@ * (local + v < n_vectors ? v : n_vectors - 1 - local);
    const double *const x = tables.data + at, *const y = tables.data + from_y * stride + at;
    const double *const z = tables.data + from_z * stride + at;
    const int end = point_begin.data[system + 1];
    const auto yes = [] { return true; };
    const auto no = [] { return false; };
    for (int channel = 0; channel < n_channels; ++channel) {
        lanes result[@vectors@][@count@] = {};
        const double *const of_channel = coefficients.data + 8LL * channel * n_points;
        @planes@
        // points of the same n_x and n_y; sines of x and y are left out where they are zero
        const auto gather_row = [&](auto sine_x, auto sine_y, int p) {
            constexpr bool with_x = sine_x(), with_y = sine_y();
            constexpr int n_used = (with_x ? 2 : 1) * (with_y ? 2 : 1), each = with_y ? 1 : 2;  // of products
            const int n_x = points.data[3LL * p], n_y = points.data[3LL * p + 1];
            lanes sum[@vectors@][@powers@][4] = {};
            if (points.data[3LL * p + 2] == 0) {
                // one and zero are cosine and sine
                for (int u = 0; u < n_used; ++u)
                    for (int v = 0; v < @vectors@; ++v) sum[v][0][each * u] = of_channel[8LL * p + 2 * each * u];
                ++p;
            }
            for (; p < end; ++p) {
                const int *const n = points.data + 3LL * p;
                if (n[0] != n_x || n[1] != n_y) break;
                const double *const c = of_channel + 8LL * p, *const z_p = z + 2LL * n[2] * stride;
                const double n_z = two_pi * n[2];
                for (int v = 0; v < @vectors@; ++v) {
                    lanes zc = *reinterpret_cast<const anywhere *>(z_p + place_of[v]);
                    lanes zs = *reinterpret_cast<const anywhere *>(z_p + stride + place_of[v]);
                    @along_z@
                }
            }
            for (int v = 0; v < @vectors@; ++v) {
                const auto load = [=](const double *t) { return *reinterpret_cast<const anywhere *>(t + place_of[v]); };
                @results@
            }
            return p;
        };
        for (int p = point_begin.data[system]; p < end;) {
            const int *const n = points.data + 3LL * p;
            @before_row@
            if (n[0] && n[1]) p = gather_row(yes, yes, p);
            else if (n[0]) p = gather_row(yes, no, p);
            else if (n[1]) p = gather_row(no, yes, p);
            else p = gather_row(no, no, p);
        }
        @after_rows@
        for (int v = 0; v < @vectors@; ++v)
            for (int l = 0; l < @lanes@; ++l) {
                const int place = @lanes@ * (local + v) + l;
                if (place >= n_atoms) break;
                const int atom = order.shape[0] > 0 ? order.data[first + place] : first + place;
                double *const of_atom = moments.data + (1LL * atom * n_channels + channel) * @count@;
                for (int c = 0; c < @count@; ++c) of_atom[c] = result[v][c][l];
            }
    }
"""

_ALONG_Z = """
    for (int power = 0; power < @powers@; ++power) {
        for (int u = 0; u < n_used; ++u) {
            const int a = each * u;
            lanes &to = sum[v][power][a];
            to = __builtin_elementwise_fma(lanes(c[2 * a]), zc, to);
            to = __builtin_elementwise_fma(lanes(c[2 * a + 1]), zs, to);
        }
        const lanes old = zc;
        zc = -n_z * zs;
        zs = n_z * old;
    }
"""
"""Sums over a row of points, with derivatives by z."""

_ALONG_Z_SHARED = """
    for (int u = 0; u < n_used; ++u) {
        const int a = each * u;
        const lanes of_even = __builtin_elementwise_fma(lanes(c[2 * a]), zc, c[2 * a + 1] * zs);
        const lanes of_odd = __builtin_elementwise_fma(lanes(c[2 * a + 1]), zc, -c[2 * a] * zs);
        double factor = 1.0;
        for (int power = 0; power < @powers@; ++power) {
            lanes &to = sum[v][power][a];
            to = __builtin_elementwise_fma(lanes(factor), power & 1 ? of_odd : of_even, to);
            factor *= power & 1 ? -n_z : n_z;
        }
    }
"""
"""The same with fewer products, from second derivatives on: even ones share a sum, and odd ones."""

_GATHER_GPU = """
    @system@
    @coefficients@
    const int n_points = points.shape[0], n_channels = field.shape[0], lane = threadIdx.x & @last_lane@;
    const int system = system_of(atom_begin, row), atom = order.shape[0] > 0 ? order.data[row] : row;
    const double two_pi = 6.283185307179586;
    typedef double lanes;
    for (int channel = 0; channel < n_channels; ++channel) {
        double result[@count@] = {};
        for (int p = point_begin.data[system] + lane; p < point_begin.data[system + 1]; p += @warp@) {
            const int *const n = points.data + 3LL * p;
            double c[8];
            read_point(field.data + 8 * (1LL * channel * n_points + p), c);
            @phases@
            @derivatives_xy@
            @derivatives_z@
            @results_gpu@
        }
        double *const of_atom = moments.data + (1LL * atom * n_channels + channel) * @count@;
        for (int c = 0; c < @count@; ++c) {
            for (int step = @warp@ / 2; step > 0; step /= 2)
                result[c] += __shfl_xor_sync(0xffffffffu, result[c], step);
            if (lane == 0) of_atom[c] = result[c];
        }
    }
"""


def vectors_at_once(derivatives: int) -> int:
    """Vectors of atoms that a CPU thread gathers for at once: as many as sums fit into registers."""
    return {0: 4, 1: 2}.get(derivatives, 1)


def _gather_body(derivatives: int) -> str:
    results_gpu = []
    xy = [(x, y) for x in (0, 1) for y in (0, 1)]
    for k, (a, b, c) in enumerate(moments.components(derivatives)):
        products = [f"{_names('x', a)[x]} * {_names('y', b)[y]}" for x, y in xy]
        zc, zs = _names("z", c)
        terms = [f"{product} * (c[{2 * n}] * {zc} + c[{2 * n + 1}] * {zs})" for n, product in enumerate(products)]
        results_gpu.append(f"result[{k}] += {' + '.join(terms)};")
    values = {"coefficients": _COEFFICIENTS, "vectors": vectors_at_once(derivatives)}
    parts = _results_at_once(derivatives) if derivatives < 2 else _results_by_planes(derivatives)
    along_z = filled(_ALONG_Z if derivatives < 2 else _ALONG_Z_SHARED, powers=derivatives + 1)
    values |= {"results_gpu": "\n".join(results_gpu), "along_z": along_z}
    values |= dict(zip(("planes", "results", "before_row", "after_rows"), parts))
    return _filled(_GATHER_CPU, _GATHER_GPU, derivatives, ("n_x", "n_y"), **values)


_LOAD_X = "const lanes xc0 = load(x + 2LL * n_x * stride), xs0 = load(x + (2LL * n_x + 1) * stride);\n"
_LOAD_Y = "const lanes yc0 = load(y + 2LL * n_y * stride), ys0 = load(y + (2LL * n_y + 1) * stride);\n"


def _results_at_once(derivatives: int) -> tuple[str, ...]:
    """After each row: products of functions of x and y times sums along z."""
    cases = []
    for with_x, with_y in ((1, 1), (1, 0), (0, 1), (0, 0)):
        lines = []
        for k, (a, b, c) in enumerate(moments.components(derivatives)):
            if (a and not with_x) or (b and not with_y):
                continue
            terms = [
                f"{_names('x', a)[x]} * {_names('y', b)[y]} * sum[v][{c}][{2 * x + y}]"
                for x in range(1 + with_x)
                for y in range(1 + with_y)
            ]
            lines.append(f"result[v][{k}] += {' + '.join(terms)};")
        cases.append(f"if constexpr (with_x == {with_x} && with_y == {with_y}) {{ {' '.join(lines)} }}")
    along = (_derivatives(axis, f"static_cast<double>(n_{axis})", derivatives) for axis in "xy")
    return "", "\n".join([_LOAD_X + _LOAD_Y, *along, "\nelse ".join(cases)]), "", ""


def _results_by_planes(derivatives: int) -> tuple[str, ...]:
    """After each row functions of y times sums along z, and of x where all rows of an n_x are done."""
    pairs, by_y, without_y, by_x, without_x = _along_yz(derivatives), [], [], [], []
    for (b, c), n in pairs.items():
        by_y.append(f"plane[v][{n}][x] += yc{b} * sum[v][{c}][2 * x] + ys{b} * sum[v][{c}][2 * x + 1];")
        if b == 0:
            without_y.append(f"plane[v][{n}][x] += sum[v][{c}][2 * x];")
    for k, (a, b, c) in enumerate(moments.components(derivatives)):
        n = pairs[b, c]
        by_x.append(f"result[v][{k}] += xc{a} * plane[v][{n}][0] + xs{a} * plane[v][{n}][1];")
        if a == 0:
            without_x.append(f"result[v][{k}] += plane[v][{n}][0];")
    planes = """
        lanes plane[@vectors@][@pairs@][2] = {};  // all points of the same n_x
        const auto add_plane = [&](int n_x) {
            for (int v = 0; v < @vectors@; ++v) {
                const auto load = [=](const double *t) { return *reinterpret_cast<const anywhere *>(t + place_of[v]); };
                if (n_x == 0) { @without_x@ }
                else { @load_x@ @derivatives_x@ @by_x@ }
                for (int n = 0; n < @pairs@; ++n) plane[v][n][0] = plane[v][n][1] = 0.0;
            }
        };
        int of_plane = -1;
    """
    results = """
        for (int x = 0; x < 1 + with_x; ++x) {
            if constexpr (with_y) { @load_y@ @derivatives_y@ @by_y@ }
            else { @without_y@ }
        }
    """
    values = {
        "pairs": len(pairs),
        "vectors": vectors_at_once(derivatives),
        "load_x": _LOAD_X,
        "load_y": _LOAD_Y,
        "derivatives_x": _derivatives("x", "static_cast<double>(n_x)", derivatives),
        "derivatives_y": _derivatives("y", "static_cast<double>(n_y)", derivatives),
        "by_x": "\n".join(by_x),
        "by_y": "\n".join(by_y),
        "without_x": "\n".join(without_x),
        "without_y": "\n".join(without_y),
    }
    before = "if (n[0] != of_plane) {\n if (of_plane >= 0) add_plane(of_plane);\n of_plane = n[0];\n}"
    return filled(planes, **values), filled(results, **values), before, "if (of_plane >= 0) add_plane(of_plane);"


@kernel_variants(())
def fourier_coefficients() -> Any:
    """Kernel that turns values at k-vectors into factors of the products of cosines and sines, for a CPU."""

    @native_kernel(
        "fourier_coefficients",
        f"{_COEFFICIENTS}\nread_point(field.data + 8LL * point, coefficients.data + 8LL * point);",
    )
    def kernel(
        point: wp.int32,
        field: wp.array(dtype=wp.float64),  # (8 * n_channels * n_points,)
        coefficients: wp.array(dtype=wp.float64),  # the same
    ):
        """Factors for one point."""

    return kernel


@kernel_variants((0,), (1,), (2,))
def fourier_gather(derivatives: int) -> Any:
    """Kernel for the sums over k-vectors: a CPU thread has a few vectors of atoms, a warp of a GPU has one atom."""

    @native_kernel(f"fourier_gather_{derivatives}", _gather_body(derivatives), lanes=True)
    def kernel(
        row: wp.int32,
        field: wp.array4d(dtype=wp.float64),  # (n_channels, n_points, 4, 2)
        coefficients: wp.array(dtype=wp.float64),  # from `fourier_coefficients`, on a CPU
        coordinates: wp.array2d(dtype=wp.float64),
        order: wp.array(dtype=wp.int32),  # as in `phase_tables`
        atom_begin: wp.array(dtype=wp.int32),
        vector_begin: wp.array(dtype=wp.int32),
        block_begin: wp.array(dtype=wp.int32),  # (n_systems + 1,), first row of each system
        tables: wp.array2d(dtype=wp.float64),
        from_y: wp.int32,
        from_z: wp.int32,
        points: wp.array2d(dtype=wp.int32),
        point_begin: wp.array(dtype=wp.int32),
        moments: wp.array3d(dtype=wp.float64),  # (n_atoms, n_channels, n_moments)
    ):
        """Sums at some atoms."""

    return kernel
