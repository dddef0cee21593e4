"""Cardinal B-splines on periodic meshes: weights, and spreading and gathering as gather kernels.

A spline of order p (degree p - 1) gives an atom at ``u``, in mesh spacings, the weight ``M_p(x - u + p/2)`` at the mesh
point x, along each axis: p points around the atom carry weights that add up to one. Mesh point j lies at the fractional
coordinate j/n. Source: I. J. Schoenberg, Q. Appl. Math. 4, 45 (1946), doi:10.1090/qam/15914; on meshes of charges
U. Essmann et al., J. Chem. Phys. 103, 8577 (1995), doi:10.1063/1.470117.

    spread:  field(x) = Σ_i m_i w(x; u_i)          gather:  φ_i = Σ_x field(x) w(x; u_i)

are transposes, with derivatives by u as `nvalchemiops.moments` numbers them. A spline of order p has p - 2 continuous
derivatives; the one of order p - 1 is piecewise constant.

When spreading, a thread owns a row of mesh points along z and looks at the atoms whose stencils meet it: those in p x p
columns of mesh cells, by which atoms are sorted. So nothing is added by two threads, and results are reproducible. On a
GPU the lanes of a warp share a row.
"""

from typing import Any

import warp as wp

from nvalchemiops import moments
from nvalchemiops.launch import gather_only, kernel_module, kernel_variants
from nvalchemiops.native import by_device, filled

WIDTH = 8
"""Places for weights along an axis: those beyond the order are zero."""

WARP = 32
"""Threads of a GPU that share a row of the mesh."""

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
    const auto weigh = [](double t, double w[@powers@][@width@]) {
        double m[@order@ + 1] = {1.0};  // M_n(t + i)
        for (int d = 0; d < @powers@; ++d)
            for (int j = 0; j < @width@; ++j) w[d][j] = 0.0;
        for (int n = 1; n <= @order@; ++n) {
            if (n > 1)
                for (int i = n - 1; i >= 0; --i) {
                    const double left = i < n - 1 ? m[i] : 0.0, right = i > 0 ? m[i - 1] : 0.0;
                    m[i] = ((t + i) * left + (n - t - i) * right) * (1.0 / (n - 1));
                }
            const int d = @order@ - n;
            if (d < @powers@) {
                // derivatives are differences of splines of lower order
                double v[@order@ + 1] = {};
                for (int i = 0; i < n; ++i) v[i] = m[i];
                for (int k = 0; k < d; ++k)
                    for (int i = @order@ - 1; i >= 0; --i) v[i] -= i > 0 ? v[i - 1] : 0.0;
                for (int i = 0; i < @order@; ++i) w[d][@order@ - 1 - i] = v[i];
            }
        }
    };
"""


def _place(order: int) -> str:
    return filled(_PLACE, half=0.5 * (order % 2), before=(order - 1) // 2)


def _weights(order: int, derivatives: int) -> str:
    return filled(_WEIGHTS, order=order, powers=derivatives + 1, width=WIDTH)


# -- columns --------------------------------------------------------------------------------------


@kernel_variants((4,), (5,))
def find_columns(order: int) -> Any:
    """Kernel that finds the column of mesh cells in which the stencil of an atom begins."""
    body = """
        @place@
        double inside;
        const double *const u = coordinates.data + 3LL * i;
        const int system = batch_idx.shape[0] > 0 ? batch_idx.data[i] : 0;
        const bool exists = system >= 0 && system < n_systems;
        const int x = place(u[0], n_x, inside), y = place(u[1], n_y, inside);
        column.data[i] = ((exists ? system : 0) * n_x + x) * n_y + y;
    """

    @wp.func_native(filled(body, place=_place(order)))
    def find(
        i: wp.int32,
        coordinates: wp.array2d(dtype=wp.float64),
        batch_idx: wp.array(dtype=wp.int32),
        n_systems: wp.int32,
        n_x: wp.int32,
        n_y: wp.int32,
        column: wp.array(dtype=wp.int32),
    ):
        """Column of atom i; arguments as in the kernel."""
        ...

    @wp.kernel(module=kernel_module(f"find_columns_{order}"), enable_backward=False)
    def kernel(
        offset: wp.int32,
        coordinates: wp.array2d(dtype=wp.float64),  # (n_atoms, 3)
        batch_idx: wp.array(dtype=wp.int32),  # (n_atoms,), or none
        n_systems: wp.int32,
        n_x: wp.int32,
        n_y: wp.int32,
        column: wp.array(dtype=wp.int32),  # (n_atoms,)
    ):
        find(offset + wp.tid(), coordinates, batch_idx, n_systems, n_x, n_y, column)

    return gather_only(kernel)


# -- spreading ------------------------------------------------------------------------------------

_STENCILS = """
    @place@
    @weights@
    const int atom = order.data[k];
    const double *const u = coordinates.data + 3LL * atom;
    const int n[3] = {n_x, n_y, n_z};
    double *const to = weights.data + 1LL * k * @size@;
    for (int axis = 0; axis < 3; ++axis) {
        double inside, w[@powers@][@width@];
        const int first = place(u[axis], n[axis], inside);
        weigh(inside, w);
        for (int d = 0; d < @powers@; ++d)
            for (int j = 0; j < @width@; ++j) to[(axis * @powers@ + d) * @width@ + j] = w[d][j];
        if (axis == 2) first_z.data[k] = first;
    }
"""


@kernel_variants((4, 0), (5, 0), (5, 1))
def spline_stencils(order: int, derivatives: int) -> Any:
    """Kernel that tabulates the weights of atoms, in the order of their columns."""
    body = filled(
        _STENCILS,
        place=_place(order),
        weights=_weights(order, derivatives),
        powers=derivatives + 1,
        width=WIDTH,
        size=3 * (derivatives + 1) * WIDTH,
    )

    @wp.func_native(body)
    def tabulate(
        k: wp.int32,
        coordinates: wp.array2d(dtype=wp.float64),
        order: wp.array(dtype=wp.int32),
        n_x: wp.int32,
        n_y: wp.int32,
        n_z: wp.int32,
        first_z: wp.array(dtype=wp.int32),
        weights: wp.array4d(dtype=wp.float64),
    ):
        """Weights of the k-th atom; arguments as in the kernel."""
        ...

    @wp.kernel(module=kernel_module(f"spline_stencils_{order}_{derivatives}"), enable_backward=False)
    def kernel(
        offset: wp.int32,
        coordinates: wp.array2d(dtype=wp.float64),
        order: wp.array(dtype=wp.int32),  # atoms sorted by column
        n_x: wp.int32,
        n_y: wp.int32,
        n_z: wp.int32,
        first_z: wp.array(dtype=wp.int32),  # (n_atoms,), where the stencil begins along z
        weights: wp.array4d(dtype=wp.float64),  # (n_atoms, 3, derivatives + 1, WIDTH)
    ):
        tabulate(offset + wp.tid(), coordinates, order, n_x, n_y, n_z, first_z, weights)

    return gather_only(kernel)


_SPREAD = """
    const int n_x = field.shape[1], n_y = field.shape[2], n_z = field.shape[3], n_channels = moments.shape[1];
    const int system = row / (n_x * n_y), x = row / n_y % n_x, y = row % n_y;
    const long long of_channel = 1LL * n_x * n_y * n_z;
    @real@ *const line = field.data + system * n_channels * of_channel + (1LL * x * n_y + y) * n_z;
    @begin@
    for (int channel = 0; channel < n_channels; ++channel)
        for (int z = lane; z < n_z; z += @lanes@) line[channel * of_channel + z] = 0;
    @meet@
    for (int i = 0; i < @order@; ++i) {
        const int from_x = x - i < 0 ? x - i + n_x : x - i;
        for (int j = 0; j < @order@; ++j) {
            const int from_y = y - j < 0 ? y - j + n_y : y - j;
            const int column = (system * n_x + from_x) * n_y + from_y;
            for (int k = column_begin.data[column]; k < column_begin.data[column + 1]; ++k) {
                const double *const w = weights.data + 1LL * k * @size@;
                const int first = first_z.data[k];
                for (int channel = 0; channel < n_channels; ++channel) {
                    const @real@ *const m = moments.data + (1LL * order.data[k] * n_channels + channel) * @count@;
                    @amplitudes@
                    @real@ *const to = line + channel * of_channel;
                    @add@
                }
                @meet@
            }
        }
    }
"""

_ADD_CPU = """
    // both row and weights as vectors, if the row is long enough; weights beyond the stencil are zero
    if (first + @width@ <= n_z) {
        typedef @real@ reals __attribute__((ext_vector_type(@width@), aligned(4)));
        typedef double doubles __attribute__((ext_vector_type(@width@), aligned(8)));
        const auto z = [=](int d) { return *reinterpret_cast<const doubles *>(w + (2 * @powers@ + d) * @width@); };
        reals *const at = reinterpret_cast<reals *>(to + first);
        *at += __builtin_convertvector(@products@, reals);
    } else {
        const auto z = [=](int d) { return w + (2 * @powers@ + d) * @width@; };
        for (int l = 0; l < @order@; ++l) to[first + l < n_z ? first + l : first + l - n_z] += @product@;
    }
"""

_ADD_GPU = """
    if (lane < @order@) {
        const auto z = [=](int d) { return w + (2 * @powers@ + d) * @width@; };
        const int l = lane;
        to[first + l < n_z ? first + l : first + l - n_z] += @product@;
    }
"""


def _spread_body(order: int, derivatives: int, precision: str) -> str:
    powers = derivatives + 1
    amplitudes = []
    for power in range(powers):
        terms = [
            f"m[{n}] * w[{a * WIDTH} + i] * w[{(powers + b) * WIDTH} + j]"
            for n, (a, b, c) in enumerate(moments.components(derivatives))
            if c == power
        ]
        amplitudes.append(f"const double a{power} = {' + '.join(terms)};")
    values = {
        "order": order,
        "powers": powers,
        "width": WIDTH,
        "size": 3 * powers * WIDTH,
        "count": moments.count(derivatives),
        "real": "float" if precision == "float32" else "double",
        "amplitudes": "\n".join(amplitudes),
        "products": " + ".join(f"a{power} * z({power})" for power in range(powers)),
        "product": " + ".join(f"a{power} * z({power})[l]" for power in range(powers)),
    }
    cpu = filled(_SPREAD, **values, begin="const int lane = 0;", lanes=1, meet="", add=filled(_ADD_CPU, **values))
    gpu = filled(
        _SPREAD,
        **values,
        begin=f"const int lane = threadIdx.x & {WARP - 1};",
        lanes=WARP,
        meet="__syncwarp();",  # what a lane has added the others must see
        add=filled(_ADD_GPU, **values),
    )
    return by_device(cpu, gpu)


@kernel_variants((4, 0, "float64"), (5, 0, "float64"), (5, 1, "float64"), (5, 0, "float32"), (5, 1, "float32"))
def spline_spread(order: int, derivatives: int, precision: str) -> Any:
    """Kernel that fills a row of the mesh."""
    real = getattr(wp, precision)

    @wp.func_native(_spread_body(order, derivatives, precision))
    def spread(
        row: wp.int32,
        moments: wp.array3d(dtype=real),
        order: wp.array(dtype=wp.int32),
        column_begin: wp.array(dtype=wp.int32),
        first_z: wp.array(dtype=wp.int32),
        weights: wp.array4d(dtype=wp.float64),
        field: wp.array4d(dtype=real),
    ):
        """Fill a row; arguments as in the kernel."""
        ...

    @wp.kernel(module=kernel_module(f"spline_spread_{order}_{derivatives}_{precision}"), enable_backward=False)
    def kernel(
        offset: wp.int32,
        moments: wp.array3d(dtype=real),  # (n_atoms, n_channels, n_moments)
        order: wp.array(dtype=wp.int32),  # as in `spline_stencils`
        column_begin: wp.array(dtype=wp.int32),  # (n_systems * n_x * n_y + 1,)
        first_z: wp.array(dtype=wp.int32),
        weights: wp.array4d(dtype=wp.float64),
        field: wp.array4d(dtype=real),  # (n_systems * n_channels, n_x, n_y, n_z)
    ):
        row, _lane = wp.tid()
        spread(offset + row, moments, order, column_begin, first_z, weights, field)

    return gather_only(kernel)


# -- gathering ------------------------------------------------------------------------------------

_GATHER = """
    @place@
    @weights@
    const int n_x = field.shape[1], n_y = field.shape[2], n_z = field.shape[3], n_channels = moments.shape[1];
    const long long of_channel = 1LL * n_x * n_y * n_z;
    const int atom = order.data[k], system = batch_idx.shape[0] > 0 ? batch_idx.data[atom] : 0;
    const bool exists = system >= 0 && (system + 1) * n_channels <= field.shape[0];
    const double *const u = coordinates.data + 3LL * atom;
    const int n[3] = {n_x, n_y, n_z};
    int first[3];
    double w[3][@powers@][@width@];
    for (int axis = 0; axis < 3; ++axis) {
        double inside;
        first[axis] = place(u[axis], n[axis], inside);
        weigh(inside, w[axis]);
    }
    for (int channel = 0; channel < n_channels; ++channel) {
        const @real@ *const mesh = field.data + ((exists ? system : 0) * n_channels + channel) * of_channel;
        @real@ *const result = moments.data + (1LL * atom * n_channels + channel) * @count@;
        @sums@
        for (int i = 0; i < @order@; ++i) {
            const int x = first[0] + i < n_x ? first[0] + i : first[0] + i - n_x;
            for (int j = 0; j < @order@; ++j) {
                const int y = first[1] + j < n_y ? first[1] + j : first[1] + j - n_y;
                const @real@ *const line = mesh + (1LL * x * n_y + y) * n_z;
                @add@
            }
        }
        @results@
    }
"""

_GATHER_LINE_CPU = """
    doubles values = {};
    if (first[2] + @width@ <= n_z)
        values = __builtin_convertvector(*reinterpret_cast<const reals *>(line + first[2]), doubles);
    else
        for (int l = 0; l < @order@; ++l) values[l] = line[first[2] + l < n_z ? first[2] + l : first[2] + l - n_z];
    // points beyond the stencil have nothing to say, not even NaN
    values = inside_stencil ? values : doubles(0.0);
"""

_GATHER_TYPES = """
    typedef @real@ reals __attribute__((ext_vector_type(@width@), aligned(4)));
    typedef double doubles __attribute__((ext_vector_type(@width@), aligned(8)));
    const auto inside_stencil = doubles{0, 1, 2, 3, 4, 5, 6, 7} < @order@.0;
"""

_GATHER_LINE_GPU = """
    double values[@order@];
    for (int l = 0; l < @order@; ++l) values[l] = line[first[2] + l < n_z ? first[2] + l : first[2] + l - n_z];
"""


def _gather_body(order: int, derivatives: int, precision: str) -> str:
    pairs = [(a, b) for a in range(derivatives + 1) for b in range(derivatives + 1 - a)]
    values = {
        "place": _place(order),
        "weights": _weights(order, derivatives),
        "order": order,
        "powers": derivatives + 1,
        "width": WIDTH,
        "count": moments.count(derivatives),
        "real": "float" if precision == "float32" else "double",
    }
    parts = list(enumerate(moments.components(derivatives)))
    cpu = filled(
        filled(_GATHER_TYPES, **values) + _GATHER,
        **values,
        sums="\n".join(f"doubles sum_{a}{b} = {{}};" for a, b in pairs),
        add=filled(_GATHER_LINE_CPU, **values)
        + "\n".join(f"sum_{a}{b} += w[0][{a}][i] * w[1][{b}][j] * values;" for a, b in pairs),
        results='const double lost = exists ? 0.0 : __builtin_nan("");\n'
        + "\n".join(
            f"{{ double sum = lost; for (int l = 0; l < {order}; ++l) sum += sum_{a}{b}[l] * w[2][{c}][l]; "
            f"result[{n}] = sum; }}"
            for n, (a, b, c) in parts
        ),
    )
    gpu = filled(
        _GATHER,
        **values,
        sums=f"double sum[{len(parts)}] = {{}};",
        add=filled(_GATHER_LINE_GPU, **values)
        + "\n".join(
            f"double line_{c} = 0.0; for (int l = 0; l < {order}; ++l) line_{c} += values[l] * w[2][{c}][l];"
            for c in range(derivatives + 1)
        )
        + "\n".join(f"sum[{n}] += w[0][{a}][i] * w[1][{b}][j] * line_{c};" for n, (a, b, c) in parts),
        results="const double zero = 0.0, lost = exists ? 0.0 : zero / zero;\n"
        f"for (int c = 0; c < {len(parts)}; ++c) result[c] = sum[c] + lost;",
    )
    return by_device(cpu, gpu)


@kernel_variants((4, 0, "float64"), (5, 0, "float64"), (5, 1, "float64"), (5, 0, "float32"), (5, 1, "float32"))
def spline_gather(order: int, derivatives: int, precision: str) -> Any:
    """Kernel that sums the values of the mesh around an atom."""
    real = getattr(wp, precision)

    @wp.func_native(_gather_body(order, derivatives, precision))
    def gather(
        k: wp.int32,
        field: wp.array4d(dtype=real),
        coordinates: wp.array2d(dtype=wp.float64),
        batch_idx: wp.array(dtype=wp.int32),
        order: wp.array(dtype=wp.int32),
        moments: wp.array3d(dtype=real),
    ):
        """Sums of the k-th atom; arguments as in the kernel."""
        ...

    @wp.kernel(module=kernel_module(f"spline_gather_{order}_{derivatives}_{precision}"), enable_backward=False)
    def kernel(
        offset: wp.int32,
        field: wp.array4d(dtype=real),  # (n_systems * n_channels, n_x, n_y, n_z)
        coordinates: wp.array2d(dtype=wp.float64),  # (n_atoms, 3)
        batch_idx: wp.array(dtype=wp.int32),  # (n_atoms,), or none
        order: wp.array(dtype=wp.int32),  # as in `spline_stencils`: neighbors in space are neighbors in time
        moments: wp.array3d(dtype=real),  # (n_atoms, n_channels, n_moments)
    ):
        gather(offset + wp.tid(), field, coordinates, batch_idx, order, moments)

    return gather_only(kernel)
