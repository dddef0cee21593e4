"""The kernels that gather values at k-vectors for atoms."""

import itertools
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
            to = @fma@(lanes(c[2 * a]), zc, to);
            to = @fma@(lanes(c[2 * a + 1]), zs, to);
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
    @share@
    typedef double lanes;
    constexpr int n_used = 4, each = 1, v = 0;
    const double two_pi = 6.283185307179586;
    const int n_points = points.shape[0], n_channels = field.shape[0], n_atoms = coordinates.shape[0];
    const int place = row % n_atoms, channel = row / n_atoms % n_channels, slice = row / n_atoms / n_channels;
    const int system = system_of(atom_begin, place), atom = order.shape[0] > 0 ? order.data[place] : place;
    const int first = point_begin.data[system], n_own = point_begin.data[system + 1] - first;
    const int end = first + share(n_own, slice + 1);
    struct alignas(16) Pair {
        double of_cosine, of_sine;
    };
    const Pair *const of_channel = reinterpret_cast<const Pair *>(coefficients.data) + 4LL * channel * n_points;
    // Threads of a warp are at the same point. Most points follow on one another, and so do their phases: products with
    // those of n = 1, but every @restart@th is computed anew, so that rounding does not add up.
    double s[3], once_c[3], once_s[3], phase_c[3], phase_s[3];
    int reached[3];
    const auto turn = [&](int axis, int n) {
        double &c = phase_c[axis], &d = phase_s[axis];
        if (n == 0) {
            c = 1.0;
            d = 0.0;
        } else if (n == reached[axis] + 1 && n % @restart@) {
            const double old = c;
            c = ::fma(c, once_c[axis], -d * once_s[axis]);
            d = ::fma(old, once_s[axis], d * once_c[axis]);
        } else if (n != reached[axis]) {
            ::sincospi(2.0 * n * s[axis], &d, &c);
        }
        reached[axis] = n;
    };
    for (int axis = 0; axis < 3; ++axis) {
        s[axis] = coordinates.data[3LL * atom + axis];
        s[axis] -= ::rint(s[axis]);
        ::sincospi(2.0 * s[axis], &once_s[axis], &once_c[axis]);
        reached[axis] = -2;
    }
    double result[1][@count@] = {};
    for (int p = first + share(n_own, slice); p < end;) {
        const int n_x = points.data[3LL * p], n_y = points.data[3LL * p + 1];
        turn(0, n_x);
        turn(1, n_y);
        double sum[1][@powers@][4] = {};
        for (; p < end; ++p) {
            const int *const n = points.data + 3LL * p;
            if (n[0] != n_x || n[1] != n_y) break;
            turn(2, n[2]);
            double c[8];
            for (int u = 0; u < 4; ++u) {
                const Pair pair = of_channel[4LL * p + u];
                c[2 * u] = pair.of_cosine;
                c[2 * u + 1] = pair.of_sine;
            }
            const double n_z = two_pi * n[2];
            double zc = phase_c[2], zs = phase_s[2];
            @along_z_gpu@
        }
        const double xc0 = phase_c[0], xs0 = phase_s[0], yc0 = phase_c[1], ys0 = phase_s[1];
        @derivatives_xy@
        @results_gpu@
    }
    double *const of_atom = moments.data + ((1LL * slice * n_atoms + atom) * n_channels + channel) * @count@;
    for (int c = 0; c < @count@; ++c) of_atom[c] = result[0][c];
"""

RESTART = 16
"""Steps after which phases on a GPU are computed anew: up to there their error is 16 roundings, 2e-15."""


def vectors_at_once(derivatives: int) -> int:
    """Number of vectors of atoms that a CPU thread owns: as many as have sums that fit into registers."""
    return {0: 4, 1: 2}.get(derivatives, 1)


def _gather_body(derivatives: int) -> str:
    values: dict[str, object] = {"vectors": vectors_at_once(derivatives), "restart": RESTART}
    parts = _results_at_once(derivatives) if derivatives < 2 else _results_by_planes(derivatives)
    along_z = _ALONG_Z if derivatives < 2 else _ALONG_Z_SHARED
    values["along_z"] = filled(along_z, powers=derivatives + 1, fma="__builtin_elementwise_fma")
    values["along_z_gpu"] = filled(_ALONG_Z, powers=derivatives + 1, fma="::fma")
    values["results_gpu"] = _row_results(derivatives, True, True)
    values |= dict(zip(("planes", "results", "before_row", "after_rows"), parts))
    return filled_by_device(_GATHER_CPU, _GATHER_GPU, derivatives, ("n_x", "n_y"), **values)


_LOAD_X = "const lanes xc0 = load(x + 2LL * n_x * stride), xs0 = load(x + (2LL * n_x + 1) * stride);\n"
_LOAD_Y = "const lanes yc0 = load(y + 2LL * n_y * stride), ys0 = load(y + (2LL * n_y + 1) * stride);\n"


def _row_results(derivatives: int, with_x: bool, with_y: bool) -> str:
    """C++ that multiplies the sums along z by functions of x and y; without those whose sines are zero."""
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
    return " ".join(lines)


def _results_at_once(derivatives: int) -> tuple[str, ...]:
    """C++ that multiplies the sums along z by functions of x and y after each row; parts as in `_results_by_planes`."""
    cases = []
    for with_x, with_y in itertools.product((True, False), repeat=2):
        lines = _row_results(derivatives, with_x, with_y)
        cases.append(f"if constexpr (with_x == {with_x:d} && with_y == {with_y:d}) {{ {lines} }}")
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
    """The kernel that converts values at k-vectors to coefficients of the products of cosines and sines."""

    @native_kernel(
        "fourier_coefficients",
        f"""{_COEFFICIENTS}
        double c[8];
        read_point(field.data + 8LL * point, c);
        for (int a = 0; a < 8; ++a) coefficients.data[8LL * point + a] = c[a];""",
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
    """The kernel for sums over k-vectors: a thread of a CPU owns a few vectors of atoms, one of a GPU an atom."""

    @native_kernel(f"fourier_gather_{derivatives}", _gather_body(derivatives))
    def kernel(
        row: wp.int32,
        field: wp.array4d(dtype=wp.float64),  # (n_channels, n_points, 4, 2)
        coefficients: wp.array(dtype=wp.float64),  # from `fourier_coefficients`
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
        slices: wp.int32,  # of the points of a system, on a GPU
        moments: wp.array3d(dtype=wp.float64),  # (slices * n_atoms, n_channels, n_moments)
    ):
        """Sums at some atoms."""

    return kernel
