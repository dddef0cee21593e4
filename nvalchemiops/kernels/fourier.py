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
multiples are tabulated. On a GPU the lanes of a warp share a point or an atom.

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
        order: wp.array(dtype=wp.int32),  # (n_atoms,), atoms sorted by system; or none: they are
        atom_begin: wp.array(dtype=wp.int32),  # (n_systems + 1,), into the order
        vector_begin: wp.array(dtype=wp.int32),  # (n_systems + 1,), first vector of each system
        values: wp.array2d(dtype=wp.float64),  # (n_atoms, n_values), to be arranged as well; or none
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
    for (int from = row * @points@, to; from < end; from = to) {
        const int *const head = points.data + 3LL * from;
        const int system = system_of(point_begin, from), last = point_begin.data[system + 1];
        for (to = from + 1; to < end && to < last; ++to) {
            const int *const next = points.data + 3LL * to;
            if (next[0] != head[0] || next[1] != head[1]) break;
        }
        const int first_vector = vector_begin.data[system], end_vector = vector_begin.data[system + 1];
        const double *const x = tables.data + 2LL * head[0] * stride;
        const double *const y = tables.data + (from_y + 2LL * head[1]) * stride;
        const double *const z = tables.data + from_z * stride;
        for (int channel = 0; channel < n_channels; ++channel) {
            const double *const values = tables.data + (tables.shape[0] - (n_channels - channel) * @count@) * stride;
            lanes sums[@points@][@powers@][8] = {};
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
                for (int p = 0; p < to - from; ++p) {
                    const double *const z_p = z + 2LL * head[3 * p + 2] * stride + @lanes@LL * chunk;
                    for (int power = 0; power < @powers@; ++power) {
                        lanes s[8];
                        for (int a = 0; a < 8; ++a) s[a] = sums[p][power][a];
                        for (int v = 0; v < n; ++v) {
                            const auto load = [=](const double *t) {
                                return *reinterpret_cast<const anywhere *>(t + @lanes@ * v);
                            };
                            const lanes c = load(z_p), d = load(z_p + stride);
                            for (int a = 0; a < 4; ++a) {
                                const lanes f = amplitude[power][a][v];
                                s[2 * a] = __builtin_elementwise_fma(f, c, s[2 * a]);
                                s[2 * a + 1] = __builtin_elementwise_fma(f, d, s[2 * a + 1]);
                            }
                        }
                        for (int a = 0; a < 8; ++a) sums[p][power][a] = s[a];
                    }
                }
            }
            for (int p = 0; p < to - from; ++p) {
                double total[8] = {};
                for (int power = @powers@ - 1; power >= 0; --power) {
                    // one more derivative by z for what is there: of cosine minus sine, of sine cosine
                    const double n_z = two_pi * head[3 * p + 2];
                    for (int a = 0; a < 4; ++a) {
                        const double c = total[2 * a], s = total[2 * a + 1];
                        total[2 * a] = -n_z * s;
                        total[2 * a + 1] = n_z * c;
                    }
                    const lanes *const sum = sums[p][power];
                    lanes s[8];
                    for (int a = 0; a < 8; ++a) s[a] = sum[a];
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
                    for (int a = 0; a < 8; ++a) total[a] += all[a];
                }
                write_point(total, field.data + 8 * (1LL * channel * n_points + from + p));
            }
        }
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
    amplitudes, totals = [], []
    for power in range(derivatives + 1):
        for number, (x, y) in enumerate((x, y) for x in (0, 1) for y in (0, 1)):
            terms = [f"m[{k}] * {_names('x', a)[x]} * {_names('y', b)[y]}" for k, (a, b, c) in parts if c == power]
            amplitudes.append(f"amplitude[{power}][{number}][v] = {' + '.join(terms)};")
    for number, (x, y, z) in enumerate((x, y, z) for x in (0, 1) for y in (0, 1) for z in (0, 1)):
        terms = [f"m[{k}] * {_names('x', a)[x]} * {_names('y', b)[y]} * {_names('z', c)[z]}" for k, (a, b, c) in parts]
        totals.append(f"total[{number}] += {' + '.join(terms)};")
    amplitude, total = "\n".join(amplitudes), "\n".join(totals)
    values = {"signs": _SIGNS, "points": POINTS, "chunk": CHUNK, "amplitudes": amplitude, "totals": total}
    return _filled(_SPREAD_CPU, _SPREAD_GPU, derivatives, ("head[0]", "head[1]"), **values)


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
    for (int channel = 0; channel < n_channels; ++channel) {
        lanes result[@vectors@][@count@] = {};
        const double *const of_channel = coefficients.data + 8LL * channel * n_points;
        for (int p = from; p < point_begin.data[system + 1];) {
            const int n_x = points.data[3LL * p], n_y = points.data[3LL * p + 1];
            lanes sum[@vectors@][@powers@][4] = {};
            for (; p < point_begin.data[system + 1]; ++p) {
                const int *const n = points.data + 3LL * p;
                if (n[0] != n_x || n[1] != n_y) break;
                const double *const c = of_channel + 8LL * p, *const z_p = z + 2LL * n[2] * stride;
                const double n_z = two_pi * n[2];
                for (int v = 0; v < @vectors@; ++v) {
                    lanes zc = *reinterpret_cast<const anywhere *>(z_p + place_of[v]);
                    lanes zs = *reinterpret_cast<const anywhere *>(z_p + stride + place_of[v]);
                    for (int power = 0; power < @powers@; ++power) {
                        for (int a = 0; a < 4; ++a) {
                            lanes &to = sum[v][power][a];
                            to = __builtin_elementwise_fma(lanes(c[2 * a]), zc, to);
                            to = __builtin_elementwise_fma(lanes(c[2 * a + 1]), zs, to);
                        }
                        const lanes old = zc;
                        zc = -n_z * zs;
                        zs = n_z * old;
                    }
                }
            }
            for (int v = 0; v < @vectors@; ++v) {
                const auto load = [=](const double *t) { return *reinterpret_cast<const anywhere *>(t + place_of[v]); };
                const double *const x_n = x + 2LL * n_x * stride, *const y_n = y + 2LL * n_y * stride;
                const lanes xc0 = load(x_n), xs0 = load(x_n + stride), yc0 = load(y_n), ys0 = load(y_n + stride);
                @derivatives_xy@
                @results@
            }
        }
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
    results, results_gpu = [], []
    xy = [(x, y) for x in (0, 1) for y in (0, 1)]
    for k, (a, b, c) in enumerate(moments.components(derivatives)):
        products = [f"{_names('x', a)[x]} * {_names('y', b)[y]}" for x, y in xy]
        terms = [f"{product} * sum[v][{c}][{n}]" for n, product in enumerate(products)]
        results.append(f"result[v][{k}] += {' + '.join(terms)};")
        zc, zs = _names("z", c)
        terms = [f"{product} * (c[{2 * n}] * {zc} + c[{2 * n + 1}] * {zs})" for n, product in enumerate(products)]
        results_gpu.append(f"result[{k}] += {' + '.join(terms)};")
    values = {"coefficients": _COEFFICIENTS, "vectors": vectors_at_once(derivatives)}
    values |= {"results": "\n".join(results), "results_gpu": "\n".join(results_gpu)}
    return _filled(_GATHER_CPU, _GATHER_GPU, derivatives, ("n_x", "n_y"), **values)


@kernel_variants(())
def fourier_coefficients() -> Any:
    """Kernel that turns values at k-vectors into factors of the products of cosines and sines, for a CPU."""

    @native_kernel(
        "fourier_coefficients",
        f"{_COEFFICIENTS}\nread_point(field.data + 8LL * point, coefficients.data + 8LL * point);",
    )
    def kernel(
        point: wp.int32,
        field: wp.array(dtype=wp.float64),  # (8 * channels and points,)
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
