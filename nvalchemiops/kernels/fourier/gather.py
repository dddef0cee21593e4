"""The kernels that gather values at k-vectors for atoms."""

from typing import Any

import warp as wp

from nvalchemiops.kernels import moments
from nvalchemiops.kernels.fourier.phases import derivatives_yz, filled_by_device, phase_derivatives, phase_names
from nvalchemiops.kernels.native import filled, native_kernel
from nvalchemiops.launch import kernel_variants

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
"""Sums over a row of points, with derivatives with respect to z."""

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
"""The same with fewer products, for second and higher derivatives: even orders share a sum, and so do odd orders."""

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
    """Number of vectors of atoms that a CPU thread owns: as many as have sums that fit into registers."""
    return {0: 4, 1: 2}.get(derivatives, 1)


def _gather_body(derivatives: int) -> str:
    results_gpu = []
    xy = [(x, y) for x in (0, 1) for y in (0, 1)]
    for k, (a, b, c) in enumerate(moments.components(derivatives)):
        products = [f"{phase_names('x', a)[x]} * {phase_names('y', b)[y]}" for x, y in xy]
        zc, zs = phase_names("z", c)
        terms = [f"{product} * (c[{2 * n}] * {zc} + c[{2 * n + 1}] * {zs})" for n, product in enumerate(products)]
        results_gpu.append(f"result[{k}] += {' + '.join(terms)};")
    values = {"coefficients": _COEFFICIENTS, "vectors": vectors_at_once(derivatives)}
    parts = _results_at_once(derivatives) if derivatives < 2 else _results_by_planes(derivatives)
    along_z = filled(_ALONG_Z if derivatives < 2 else _ALONG_Z_SHARED, powers=derivatives + 1)
    values |= {"results_gpu": "\n".join(results_gpu), "along_z": along_z}
    values |= dict(zip(("planes", "results", "before_row", "after_rows"), parts))
    return filled_by_device(_GATHER_CPU, _GATHER_GPU, derivatives, ("n_x", "n_y"), **values)


_LOAD_X = "const lanes xc0 = load(x + 2LL * n_x * stride), xs0 = load(x + (2LL * n_x + 1) * stride);\n"
_LOAD_Y = "const lanes yc0 = load(y + 2LL * n_y * stride), ys0 = load(y + (2LL * n_y + 1) * stride);\n"


def _results_at_once(derivatives: int) -> tuple[str, ...]:
    """C++ that multiplies the sums along z by functions of x and y after each row; parts as in `_results_by_planes`."""
    cases = []
    for with_x, with_y in ((1, 1), (1, 0), (0, 1), (0, 0)):
        lines = []
        for k, (a, b, c) in enumerate(moments.components(derivatives)):
            if (a and not with_x) or (b and not with_y):
                continue
            terms = [
                f"{phase_names('x', a)[x]} * {phase_names('y', b)[y]} * sum[v][{c}][{2 * x + y}]"
                for x in range(1 + with_x)
                for y in range(1 + with_y)
            ]
            lines.append(f"result[v][{k}] += {' + '.join(terms)};")
        cases.append(f"if constexpr (with_x == {with_x} && with_y == {with_y}) {{ {' '.join(lines)} }}")
    along = (phase_derivatives(axis, f"static_cast<double>(n_{axis})", derivatives) for axis in "xy")
    return "", "\n".join([_LOAD_X + _LOAD_Y, *along, "\nelse ".join(cases)]), "", ""


def _results_by_planes(derivatives: int) -> tuple[str, ...]:
    """C++ that uses functions of y after each row of points, and functions of x after all rows with the same n_x.

    Both multiply the sums along z. The C++ has four parts: before all rows, after each row, before each row, and after
    all rows.
    """
    pairs, by_y, without_y, by_x, without_x = derivatives_yz(derivatives), [], [], [], []
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
        "derivatives_x": phase_derivatives("x", "static_cast<double>(n_x)", derivatives),
        "derivatives_y": phase_derivatives("y", "static_cast<double>(n_y)", derivatives),
        "by_x": "\n".join(by_x),
        "by_y": "\n".join(by_y),
        "without_x": "\n".join(without_x),
        "without_y": "\n".join(without_y),
    }
    before = "if (n[0] != of_plane) {\n if (of_plane >= 0) add_plane(of_plane);\n of_plane = n[0];\n}"
    return filled(planes, **values), filled(results, **values), before, "if (of_plane >= 0) add_plane(of_plane);"


@kernel_variants(())
def fourier_coefficients() -> Any:
    """The kernel for a CPU that converts values at k-vectors to coefficients of the products of cosines and sines."""

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
    """The kernel for sums over k-vectors: a thread of a CPU owns a few vectors of atoms, a warp of a GPU one atom."""

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
