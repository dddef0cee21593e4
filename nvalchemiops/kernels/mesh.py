"""Cardinal B-splines on periodic meshes: weights, spreading and gathering, both as gather kernels.

Along each axis, a spline of order p (degree p - 1) gives an atom at ``u``, in mesh spacings, the weight
``M_p(x - u + p/2)`` at mesh point x. The weights are non-zero at p points around the atom and add up to one. Mesh point
j has the fractional coordinate j/n. Sources: I. J. Schoenberg, Q. Appl. Math. 4, 45 (1946), doi:10.1090/qam/15914; for
meshes of charges, U. Essmann et al., J. Chem. Phys. 103, 8577 (1995), doi:10.1063/1.470117.

    spread:  field(x) = Σ_i m_i w(x; u_i)          gather:  φ_i = Σ_x field(x) w(x; u_i)

The two are transposes of each other, also with derivatives with respect to u, numbered as in
`nvalchemiops.kernels.moments`. A spline of order p has p - 2 continuous derivatives; derivative p - 1 is piecewise
constant.

**Spreading.** A thread owns points of the mesh and loops over the atoms whose stencils meet them. These are in
neighboring bins of mesh cells, by which atoms are sorted. Only one thread adds to a point, so results are reproducible.
On a CPU, bins are columns along z, and a thread owns rows along z of a plane; weights are computed for `LANES` atoms at
a time, and the points of a stencil along z form a vector. On a GPU, bins are tiles (`TILE`), and a warp owns the points
of a tile, each lane two. It visits the atoms of its own tile and of the tiles before it: a stencil of order 5 meets
eight tiles, in each of which it has a quarter of the points. Weights are stored by their distance from the first point
of the atom's tile, which is the same for all atoms of a tile.

**Gathering.** On a CPU, a thread owns `LANES` atoms. On a GPU, four or eight lanes of a warp share an atom, and each
has the points of the stencil with one z: weights are computed once for several atoms, in single precision for meshes
of single precision.
"""

import math
from typing import Any

import numpy as np
import warp as wp

from nvalchemiops.kernels import moments
from nvalchemiops.kernels.native import by_device, filled, native_kernel
from nvalchemiops.kernels.simd import LANES, WARP
from nvalchemiops.launch import kernel_variants

WIDTH = 8
"""Number of stored weights along an axis on a CPU: those beyond the order are zero."""

TILE = (4, 4, 4)
"""Points of a tile along each axis. A lane of a warp of a GPU has `POINTS` of them, next to each other along x."""

POINTS = math.prod(TILE) // WARP
"""More of them share the look-ups of atoms and the products of weights along y and z, but leave fewer warps."""

ROWS = 32
"""Largest number of rows along z that a thread of a CPU owns."""

_ORDERS = (4, 5, 6, 7, 8)
_COMMON = ((4, "float64"), (5, "float64"), (5, "float32"), (8, "float64"))
"""Orders and precisions of common meshes: 4 is common in other codes, 5 is the default here, 8 is for high accuracy."""

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
        for (int n = 1; n <= @order@; ++n) {
            if (n > 1) {
                for (int i = n - 1; i > 0; --i)
                    m[i] = ((t + scalar(i)) * m[i] + (scalar(n - i) - t) * m[i - 1]) * scalar(1.0 / (n - 1));
                m[0] = t * m[0] * scalar(1.0 / (n - 1));
            }
            const int d = @order@ - n;
            if (d < @powers@) {
                // derivatives are differences of splines of lower order
                number v[@order@] = {};
                for (int i = 0; i < n; ++i) v[i] = m[i];
                for (int k = 0; k < d; ++k)
                    for (int i = @order@ - 1; i > 0; --i) v[i] -= v[i - 1];
                for (int i = 0; i < @order@; ++i) w[d][@order@ - 1 - i] = v[i];
            }
        }
    };
"""

_STENCILS_OF_MANY = """
    // the stencils of @lanes@ atoms at once: where they begin, and weights (axis, derivative, point)
    const auto stencils = [&](int from, int *first, double *to, long long stride) {
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
            for (int l = 0; l < @lanes@ && from + l < n_atoms; ++l)
                for (int d = 0; d < @powers@; ++d) {
                    double *const at = to + l * stride + (axis * @powers@ + d) * @width@;
                    for (int j = 0; j < @order@; ++j) at[j] = w[d][j][l];
                    for (int j = @order@; j < @width@; ++j) at[j] = 0.0;
                }
        }
    };
"""

_NUMBER_CPU = f"typedef double scalar, number __attribute__((ext_vector_type({LANES})));"
_NUMBER_GPU = "typedef double scalar, number;"


def _place(order: int) -> str:
    return filled(_PLACE, half=0.5 * (order % 2), before=(order - 1) // 2)


def first_point(u: np.ndarray, order: int) -> np.ndarray:
    """The first mesh points of the stencils of atoms at ``u``, in mesh spacings, as in the kernels."""
    return np.floor(u + 0.5 * (order % 2)).astype(np.int64) - (order - 1) // 2


def width(order: int, warps: bool) -> int:
    """Number of stored weights along an axis.

    On a GPU these are all points of the tiles that the stencils of a tile meet; weights of other points are zero.
    """
    size = max(TILE)
    return size * (1 - (1 - order) // size) if warps else WIDTH


# -- bins -----------------------------------------------------------------------------------------

_TILES = f"""
    const int tiles_x = (n_x + {TILE[0] - 1}) / {TILE[0]}, tiles_y = (n_y + {TILE[1] - 1}) / {TILE[1]},
              tiles_z = (n_z + {TILE[2] - 1}) / {TILE[2]};
"""

_COLUMN = "column.data[i] = (known * n_x + x) * n_y + y;"

_TILE_OF_ATOM = f"""
    @tiles@
    const int tile_x = x / {TILE[0]}, tile_y = y / {TILE[1]}, tile_z = place(u[2], n_z, inside) / {TILE[2]};
    column.data[i] = ((known * tiles_x + tile_x) * tiles_y + tile_y) * tiles_z + tile_z;
"""


def bins_of_mesh(n_systems: int, n_x: int, n_y: int, n_z: int, warps: bool) -> int:
    """Number of bins by which atoms are sorted: columns on a CPU, tiles on a GPU."""
    if not warps:
        return n_systems * n_x * n_y
    return n_systems * math.prod(-(-n // size) for n, size in zip((n_x, n_y, n_z), TILE))


@kernel_variants(*((p,) for p in _ORDERS))
def find_columns(order: int) -> Any:
    """The kernel that finds the column (on a GPU, the tile) of mesh cells in which the stencil of an atom begins."""
    body = """
        @place@
        double inside;
        const double *const u = coordinates.data + 3LL * i;
        const int system = batch_idx.shape[0] > 0 ? batch_idx.data[i] : 0;
        const int known = system >= 0 && system < n_systems ? system : 0;
        const int x = place(u[0], n_x, inside), y = place(u[1], n_y, inside);
        @bin@
    """
    bin_ = by_device(_COLUMN, filled(_TILE_OF_ATOM, tiles=_TILES))

    @native_kernel(f"find_columns_{order}", filled(body, place=_place(order), bin=bin_))
    def kernel(
        i: wp.int32,
        coordinates: wp.array2d(dtype=wp.float64),  # (n_atoms, 3)
        batch_idx: wp.array(dtype=wp.int32),  # (n_atoms,), or none
        n_systems: wp.int32,
        n_x: wp.int32,
        n_y: wp.int32,
        n_z: wp.int32,
        column: wp.array(dtype=wp.int32),  # (n_atoms,)
    ):
        """Column or tile of atom i."""

    return kernel


# -- spreading ------------------------------------------------------------------------------------

_STENCILS_CPU = """
    @number@
    @place@
    @weights@
    const int n_atoms = order.shape[0];
    @stencils@
    int first[@lanes@][3];
    const int from = @lanes@ * row;
    stencils(from, &first[0][0], weights.data + 1LL * from * @size@, @size@);
    for (int l = 0; l < @lanes@ && from + l < n_atoms; ++l) {
        first_y.data[from + l] = first[l][1];
        first_z.data[from + l] = first[l][2];
    }
"""

_STENCILS_GPU = """
    @number@
    @place@
    @weights@
    struct alignas(16) pair {
        double first, second;
    };
    const double *const u = coordinates.data + 3LL * order.data[row];
    const int n_channels = moments.shape[1];
    pair *const to = reinterpret_cast<pair *>(weights.data + 1LL * row * weights.shape[1]);
    int of_atom = 0;
    for (int axis = 0; axis < 3; ++axis) {
        const int n = axis == 0 ? n_x : axis == 1 ? n_y : n_z;
        double inside, w[@powers@][@order@];
        const int first = place(u[axis], n, inside);
        const int offset = first % (axis == 0 ? @size_x@ : axis == 1 ? @size_y@ : @size_z@);
        of_atom |= offset << 8 * axis;
        weigh(inside, w);
        // Derivative d of the weight of a point, counted from the first one of the tile. Loops are unrolled, so that no
        // array is in memory.
        const auto at = [&](int d, int point) {
            const int j = point < offset ? point - offset + n : point - offset;
            double found = 0.0;
            #pragma unroll
            for (int k = 0; k < @order@; ++k) found = j == k ? w[d][k] : found;
            return found;
        };
        if (axis > 0)
            #pragma unroll
            for (int d = 0; d < @powers@; ++d)
                #pragma unroll
                for (int j = 0; j < @width@; j += 2)
                    to[(((axis - 1) * @powers@ + d) * @width@ + j) / 2] = {at(d, j), at(d, j + 1)};
        else
            for (int channel = 0; channel < n_channels; ++channel) {
                const double *const m = moments.data + (1LL * row * n_channels + channel) * @count@;
                pair *const along_x = to + (2 * @powers@ + channel * @tables@) * @width@ / 2;
                #pragma unroll
                for (int j = 0; j < @width@; j += 2) {
                    @along_x@
                }
            }
    }
    in_tile.data[row] = of_atom;
"""


def _parts(derivatives: int) -> list[tuple[int, int]]:
    """Numbers of derivatives along y and z of moments up to this order."""
    return [(b, c) for b in range(derivatives + 1) for c in range(derivatives + 1 - b)]


def length_of_table(order: int, derivatives: int, n_channels: int, warps: bool) -> int:
    """Number of weights of an atom.

    On a CPU: weights along x, y and z, each with all derivatives. On a GPU: along y and z; then, for each channel and
    each derivative along y and z, weights along x times moments.
    """
    if not warps:
        return 3 * (derivatives + 1) * WIDTH
    return (2 * (derivatives + 1) + n_channels * len(_parts(derivatives))) * width(order, warps)


def _values(order: int, derivatives: int, warps: bool) -> dict[str, object]:
    """Values of the placeholders in the text of kernels, for either type of device."""
    numbers = {"order": order, "powers": derivatives + 1, "lanes": LANES, "width": width(order, warps)}
    parts, table = _parts(derivatives), width(order, warps)
    numbered = list(enumerate(moments.components(derivatives)))

    def along_x(b: int, c: int, point: str) -> str:
        return " + ".join(f"m[{n}] * at({a}, {point})" for n, (a, *others) in numbered if others == [b, c])

    return numbers | {
        "number": _NUMBER_GPU if warps else _NUMBER_CPU,
        "place": _place(order),
        "weights": filled(_WEIGHTS, **numbers),
        "stencils": filled(_STENCILS_OF_MANY, **numbers),
        "size": 3 * (derivatives + 1) * WIDTH,
        "count": moments.count(derivatives),
        "tables": len(parts),
        "along_x": "\n".join(
            f"along_x[({part * table} + j) / 2] = {{{along_x(b, c, 'j')}, {along_x(b, c, 'j + 1')}}};"
            for part, (b, c) in enumerate(parts)
        ),
        "warp": WARP,
        "tiles": _TILES,
        "size_x": TILE[0],
        "size_y": TILE[1],
        "size_z": TILE[2],
    }


@kernel_variants(*((p, n) for p in _ORDERS for n in (0, 1)))
def spline_stencils(order: int, derivatives: int) -> Any:
    """The kernel that tabulates the weights of atoms, sorted by bin.

    A thread handles `LANES` atoms on a CPU, and one on a GPU.
    """
    cpu, gpu = (_values(order, derivatives, warps) for warps in (False, True))
    body = by_device(filled(_STENCILS_CPU, **cpu), filled(_STENCILS_GPU, **gpu))

    @native_kernel(f"spline_stencils_{order}_{derivatives}", body)
    def kernel(
        row: wp.int32,
        moments: wp.array3d(dtype=wp.float64),  # (n_atoms, n_channels, n_moments), sorted by bin; none on a CPU
        coordinates: wp.array2d(dtype=wp.float64),
        order: wp.array(dtype=wp.int32),  # atoms sorted by bin
        n_x: wp.int32,
        n_y: wp.int32,
        n_z: wp.int32,
        first_y: wp.array(dtype=wp.int32),  # (n_atoms,), where the stencil begins along y; none on a GPU
        first_z: wp.array(dtype=wp.int32),  # and along z
        in_tile: wp.array(dtype=wp.int32),  # and where in its tile, in bytes for x, y and z; none on a CPU
        weights: wp.array2d(dtype=wp.float64),  # (n_atoms, `length_of_table`)
    ):
        """Weights of some atoms."""

    return kernel


_SPREAD_CPU = """
    const int n_x = field.shape[1], n_y = field.shape[2], n_z = field.shape[3], n_channels = moments.shape[1];
    const int n_parts = (n_y + @rows@ - 1) / @rows@, plane = row / n_parts, system = plane / n_x, x = plane % n_x;
    const int y_from = row % n_parts * n_y / n_parts, y_to = (row % n_parts + 1) * n_y / n_parts;
    const long long of_channel = 1LL * n_x * n_y * n_z;
    @real@ *const rows = field.data + system * n_channels * of_channel + 1LL * x * n_y * n_z;
    for (int channel = 0; channel < n_channels; ++channel)
        for (int z = y_from * n_z; z < y_to * n_z; ++z) rows[channel * of_channel + z] = 0;
    // columns along y stand together, but for those beyond the boundary
    const int low = y_from - @order@ + 1;
    const int ends[2][2] = {{low < 0 ? 0 : low, y_to - 1}, {low + n_y < y_to ? y_to : low + n_y, n_y - 1}};
    for (int i = 0; i < @order@; ++i) {
        const int from_x = x - i < 0 ? x - i + n_x : x - i;
        const int *const begin = column_begin.data + (system * n_x + from_x) * n_y;
        for (int part = 0; part < 1 + (low < 0); ++part)
            for (int k = begin[ends[part][0]]; k < begin[ends[part][1] + 1]; ++k) {
                typedef double doubles __attribute__((ext_vector_type(@width@), aligned(8)));
                const double *const w = weights.data + 1LL * k * @size@;
                const auto along = [=](int axis, int d) {
                    return *reinterpret_cast<const doubles *>(w + (axis * @powers@ + d) * @width@);
                };
                const int first = first_z.data[k];
                for (int channel = 0; channel < n_channels; ++channel) {
                    const @real@ *const m = moments.data + (1LL * k * n_channels + channel) * @count@;
                    double @arrays@;
                    @amplitudes@
                    // rows of the stencil that are among these, before the boundary and beyond
                    for (int turn = 0; turn <= n_y; turn += n_y) {
                        const int first_row = first_y.data[k] - turn;
                        const int j_from = y_from < first_row ? 0 : y_from - first_row;
                        const int j_to = y_to - first_row < @order@ ? y_to - first_row : @order@;
                        for (int j = j_from; j < j_to; ++j) {
                            @real@ *const to = rows + channel * of_channel + (first_row + j) * n_z;
                            @add@
                        }
                    }
                }
            }
    }
"""

_SPREAD_GPU = """
    const int n_x = field.shape[1], n_y = field.shape[2], n_z = field.shape[3], n_channels = moments.shape[1];
    const int lane = threadIdx.x & (@warp@ - 1);
    @tiles@
    const int system = row / (tiles_x * tiles_y * tiles_z);
    // Along an axis: where this tile begins, and the tiles of which atoms meet it, from the first one on, cyclically.
    struct axis {
        int from, first, count;
    };
    const auto axis_of = [](int n, int size, int n_tiles, int tile) {
        const int from = tile * size, low = from - @order@ + 1, first = (low < 0 ? low + n : low) / size;
        const int count = tile - first + 1 + (low < 0 ? n_tiles : 0);
        return axis{from, first, count < n_tiles ? count : n_tiles};
    };
    const axis along_x = axis_of(n_x, @size_x@, tiles_x, row / (tiles_y * tiles_z) % tiles_x);
    const axis along_y = axis_of(n_y, @size_y@, tiles_y, row / tiles_z % tiles_y);
    const axis along_z = axis_of(n_z, @size_z@, tiles_z, row % tiles_z);
    const auto tile_of = [](const axis &along, int i, int n_tiles) {
        return along.first + i < n_tiles ? along.first + i : along.first + i - n_tiles;
    };
    // from the first point of another tile to that of this one
    const auto away_from = [](int from, const axis &along, int n) {
        return along.from < from ? along.from - from + n : along.from - from;
    };
    const int n_bins = along_x.count * along_y.count * along_z.count;
    const int in_z = lane % @size_z@, in_y = lane / @size_z@ % @size_y@, in_x = lane / (@size_z@ * @size_y@) * @points@;
    const int x = along_x.from + in_x, y = along_y.from + in_y, z = along_z.from + in_z;
    for (int channel = 0; channel < n_channels; ++channel) {
        double sum[@points@] = {};
        for (int base = 0; base < n_bins; base += @warp@) {
            // each lane looks up a tile: its atoms, and how far it is, in bytes for x, y and z
            int from = 0, count = 0, away = 0;
            if (base + lane < n_bins) {
                const int i = base + lane, tile_z = tile_of(along_z, i % along_z.count, tiles_z);
                const int tile_y = tile_of(along_y, i / along_z.count % along_y.count, tiles_y);
                const int tile_x = tile_of(along_x, i / (along_z.count * along_y.count), tiles_x);
                const int *const begin =
                    column_begin.data + ((system * tiles_x + tile_x) * tiles_y + tile_y) * tiles_z + tile_z;
                from = begin[0];
                count = begin[1] - from;
                away = away_from(tile_x * @size_x@, along_x, n_x) | away_from(tile_y * @size_y@, along_y, n_y) << 8
                    | away_from(tile_z * @size_z@, along_z, n_z) << 16;
            }
            int up_to = count;  // number of atoms of these tiles up to this one
            #pragma unroll
            for (int step = 1; step < @warp@; step *= 2) {
                const int before = __shfl_up_sync(0xffffffffu, up_to, step);
                up_to += lane >= step ? before : 0;
            }
            const int n_atoms = __shfl_sync(0xffffffffu, up_to, @warp@ - 1);
            const int shift = from - (up_to - count);
            for (int start = 0; start < n_atoms; start += @warp@) {
                // each lane looks up an atom; those that meet the tile go to the first lanes
                int owner = 0;
                #pragma unroll
                for (int step = @warp@ / 2; step > 0; step /= 2)
                    owner += __shfl_sync(0xffffffffu, up_to, owner + step - 1) <= start + lane ? step : 0;
                int atom = start + lane + __shfl_sync(0xffffffffu, shift, owner);
                int place = __shfl_sync(0xffffffffu, away, owner);
                const bool meets = start + lane < n_atoms
                    && ((place - in_tile.data[atom] + 0x10101 * (0x80 - @order@)) & 0x808080) == 0;
                const unsigned votes = __ballot_sync(0xffffffffu, meets);
                int chosen = 0;
                #pragma unroll
                for (int step = @warp@ / 2; step > 0; step /= 2)
                    chosen += __popc(votes & ((1u << (chosen + step)) - 1u)) <= lane ? step : 0;
                atom = __shfl_sync(0xffffffffu, atom, chosen);
                place = __shfl_sync(0xffffffffu, place, chosen);
                const int here = __popc(votes);
                #pragma unroll 4
                for (int other = 0; other < here; ++other) {
                    const int k = __shfl_sync(0xffffffffu, atom, other);
                    const int to = __shfl_sync(0xffffffffu, place, other) + (in_x | in_y << 8 | in_z << 16);
                    const double *const w = weights.data + 1LL * k * weights.shape[1];
                    const double *const w_x = w + (2 * @powers@ + channel * @tables@) * @width@ + (to & 0xff);
                    const double *const w_y = w + (to >> 8 & 0xff), *const w_z = w + @powers@ * @width@ + (to >> 16);
                    if (((to + 0x10101 * (0x80 - @width@)) & 0x808080) != 0) continue;  // all are below the width
                    @products@
                    #pragma unroll
                    for (int p = 0; p < @points@; ++p)
                        if ((to & 0xff) + p < @width@) sum[p] += @product@;
                }
            }
        }
        @real@ *const to = field.data + (1LL * system * n_channels + channel) * n_x * n_y * n_z;
        #pragma unroll
        for (int p = 0; p < @points@; ++p)
            if (x + p < n_x && y < n_y && z < n_z) to[(1LL * (x + p) * n_y + y) * n_z + z] = sum[p];
    }
"""

_ADD_CPU = """
    // both row and weights as vectors, if the row is long enough; weights beyond the stencil are zero
    if (first + @width@ <= n_z) {
        typedef @real@ reals __attribute__((ext_vector_type(@width@), aligned(4)));
        reals *const at = reinterpret_cast<reals *>(to + first);
        *at += __builtin_convertvector(@products@, reals);
    } else {
        const auto z = [=](int d) { return w + (2 * @powers@ + d) * @width@; };
        for (int l = 0; l < @order@; ++l) to[first + l < n_z ? first + l : first + l - n_z] += @product@;
    }
"""


def _spread_body(order: int, derivatives: int, precision: str) -> str:
    powers = derivatives + 1

    def amplitude(power: int) -> str:
        """What a derivative along z is multiplied by."""
        return " + ".join(
            f"m[{n}] * w[{a * WIDTH} + i] * along(1, {b})"
            for n, (a, b, c) in enumerate(moments.components(derivatives))
            if c == power
        )

    real, table = "float" if precision == "float32" else "double", width(order, warps=True)
    on_cpu = _values(order, derivatives, warps=False) | {
        "real": real,
        "rows": ROWS,
        "arrays": ", ".join(f"a{power}[{WIDTH}]" for power in range(powers)),
        "amplitudes": "\n".join(
            f"*reinterpret_cast<doubles *>(a{power}) = {amplitude(power)};" for power in range(powers)
        ),
        "products": " + ".join(f"a{power}[j] * along(2, {power})" for power in range(powers)),
        "product": " + ".join(f"a{power}[j] * z({power})[l]" for power in range(powers)),
    }
    on_gpu = _values(order, derivatives, warps=True) | {
        "real": real,
        "points": POINTS,
        "products": "\n".join(
            f"const double along_{b}{c} = w_y[{b * table}] * w_z[{c * table}];" for b, c in _parts(derivatives)
        ),
        "product": " + ".join(
            f"w_x[{part * table} + p] * along_{b}{c}" for part, (b, c) in enumerate(_parts(derivatives))
        ),
    }
    add = filled(_ADD_CPU, **on_cpu)
    return by_device(filled(_SPREAD_CPU, **on_cpu, add=add), filled(_SPREAD_GPU, **on_gpu))


def threads_of_mesh(n_systems: int, n_x: int, n_y: int, n_z: int, warps: bool) -> int:
    """Number of threads (on a GPU, warps) of `spline_spread`.

    On a CPU, a thread owns up to `ROWS` rows of a plane; on a GPU, a warp owns a tile.
    """
    return bins_of_mesh(n_systems, n_x, n_y, n_z, warps) if warps else n_systems * n_x * -(-n_y // ROWS)


@kernel_variants(*((p, n, r) for p, r in _COMMON for n in (0, 1)))
def spline_spread(order: int, derivatives: int, precision: str) -> Any:
    """The kernel that computes some rows of the mesh, or a tile of it (`threads_of_mesh`)."""
    real = getattr(wp, precision)

    @native_kernel(
        f"spline_spread_{order}_{derivatives}_{precision}", _spread_body(order, derivatives, precision), lanes=True
    )
    def kernel(
        row: wp.int32,
        moments: wp.array3d(dtype=real),  # (n_atoms, n_channels, n_moments), sorted by bin; a GPU reads the shape only
        column_begin: wp.array(dtype=wp.int32),  # (n_bins + 1,), where columns or tiles begin
        first_y: wp.array(dtype=wp.int32),  # as from `spline_stencils`
        first_z: wp.array(dtype=wp.int32),
        in_tile: wp.array(dtype=wp.int32),
        weights: wp.array2d(dtype=wp.float64),
        field: wp.array4d(dtype=real),  # (n_systems * n_channels, n_x, n_y, n_z)
    ):
        """Fill some rows, or a tile."""

    return kernel


# -- gathering ------------------------------------------------------------------------------------

_GATHER_CPU = """
    @number@
    @place@
    @weights@
    typedef @real@ reals __attribute__((ext_vector_type(@width@), aligned(4)));
    typedef double doubles __attribute__((ext_vector_type(@width@), aligned(8)));
    const int n_x = field.shape[1], n_y = field.shape[2], n_z = field.shape[3], n_channels = moments.shape[1];
    const int n_atoms = order.shape[0];
    @stencils@
    int first[@lanes@][3];
    double weights[@lanes@][3][@powers@][@width@];
    stencils(@lanes@ * row, &first[0][0], &weights[0][0][0][0], @size@);
    for (int k = @lanes@ * row; k < @lanes@ * (row + 1) && k < n_atoms; ++k) {
        const int *const begin = first[k - @lanes@ * row];
        const auto w = weights[k - @lanes@ * row];
        @atom@
    }
"""

_GATHER_GPU = """
    @number@
    @place@
    @weights@
    const int n_x = field.shape[1], n_y = field.shape[2], n_z = field.shape[3], n_channels = moments.shape[1];
    const int lane = threadIdx.x & (@warp@ - 1), point = lane % @share@, n_atoms = order.shape[0];
    const int k = row * (@warp@ / @share@) + lane / @share@;
    const bool is_there = k < n_atoms;  // lanes without an atom do as the last one, without its results
    const int atom = order.data[is_there ? k : n_atoms - 1], system = batch_idx.shape[0] > 0 ? batch_idx.data[atom] : 0;
    const double *const u = coordinates.data + 3LL * atom;
    const bool exists = system >= 0 && system < field.shape[0] / n_channels;
    const double zero = 0.0, lost = exists ? 0.0 : zero / zero;
    // A lane has the points of the stencil with one z, and the weight of one y for the others. Loops are unrolled, so
    // that no array is in memory.
    double inside;
    number w[@powers@][@order@], w_y[@powers@], w_z[@powers@];
    int first[3];
    #pragma unroll
    for (int axis = 2; axis >= 0; --axis) {
        first[axis] = place(u[axis], axis == 0 ? n_x : axis == 1 ? n_y : n_z, inside);
        weigh(inside, w);
        if (axis == 0) break;
        #pragma unroll
        for (int d = 0; d < @powers@; ++d) {
            number own = 0;
            #pragma unroll
            for (int i = 0; i < @order@; ++i) own = i == point ? w[d][i] : own;
            (axis == 1 ? w_y : w_z)[d] = own;
        }
    }
    const int z_here = first[2] + (point < @order@ ? point : 0), z = z_here < n_z ? z_here : z_here - n_z;
    const long long plane = 1LL * n_y * n_z;
    for (int channel = 0; channel < n_channels; ++channel) {
        const @real@ *const mesh =
            field.data + ((exists ? system : 0) * n_channels + channel) * (n_x * plane) + first[0] * plane + z;
        @real@ *const result = moments.data + (1LL * atom * n_channels + channel) * @count@;
        number @sums@;
        #pragma unroll 2
        for (int j = 0; j < @order@; ++j) {
            const int y = first[1] + j < n_y ? first[1] + j : first[1] + j - n_y;
            const @real@ *const line = mesh + 1LL * y * n_z;
            number along_x[@powers@] = {};
            #pragma unroll
            for (int i = 0; i < @order@; ++i) {
                const number value = line[(first[0] + i < n_x ? i : i - n_x) * plane];
                for (int d = 0; d < @powers@; ++d) along_x[d] += w[d][i] * value;
            }
            number of_y[@powers@];
            #pragma unroll
            for (int d = 0; d < @powers@; ++d) of_y[d] = __shfl_sync(0xffffffffu, w_y[d], lane - point + j);
            @add@
        }
        number sum[@count@] = {@results@};
        #pragma unroll
        for (int c = 0; c < @count@; ++c) {
            #pragma unroll
            for (int step = @share@ / 2; step > 0; step /= 2) sum[c] += __shfl_xor_sync(0xffffffffu, sum[c], step);
            if (is_there && point == 0) result[c] = sum[c] + lost;
        }
    }
"""

_GATHER_ATOM = """
    const int atom = order.data[k], system = batch_idx.shape[0] > 0 ? batch_idx.data[atom] : 0;
    const bool exists = system >= 0 && system < field.shape[0] / n_channels;
    for (int channel = 0; channel < n_channels; ++channel) {
        const @real@ *const mesh =
            field.data + ((exists ? system : 0) * n_channels + channel) * (1LL * n_x * n_y * n_z);
        @real@ *const result = moments.data + (1LL * atom * n_channels + channel) * @count@;
        const double zero = 0.0, lost = exists ? 0.0 : zero / zero;
        @sums@
        for (int i = 0; i < @order@; ++i) {
            const int x = begin[0] + i < n_x ? begin[0] + i : begin[0] + i - n_x;
            doubles @planes@;
            for (int j = 0; j < @order@; ++j) {
                const int y = begin[1] + j < n_y ? begin[1] + j : begin[1] + j - n_y;
                const @real@ *const line = mesh + (1LL * x * n_y + y) * n_z;
                @values@
                @add_row@
            }
            @add@
        }
        @results@
    }
"""

_VALUES_CPU = """
    doubles values = {};
    if (begin[2] + @width@ <= n_z)
        values = __builtin_convertvector(*reinterpret_cast<const reals *>(line + begin[2]), doubles);
    else
        for (int l = 0; l < @order@; ++l) values[l] = line[begin[2] + l < n_z ? begin[2] + l : begin[2] + l - n_z];
"""


def lanes_of_atom(order: int) -> int:
    """Number of lanes of a warp that share an atom when they gather."""
    return 4 if order <= 4 else 8


def _gather_body(order: int, derivatives: int, precision: str) -> str:
    pairs = [(a, b) for a in range(derivatives + 1) for b in range(derivatives + 1 - a)]
    parts_of = list(enumerate(moments.components(derivatives)))
    real = {"real": "float" if precision == "float32" else "double"}
    values = _values(order, derivatives, warps=False) | real
    on_cpu = {
        "values": filled(_VALUES_CPU, **values),
        "sums": "\n".join(f"doubles sum_{a}{b} = {{}};" for a, b in pairs),
        "planes": ", ".join(f"plane_{b} = {{}}" for b in range(derivatives + 1)),
        "add_row": "\n".join(f"plane_{b} += w[1][{b}][j] * values;" for b in range(derivatives + 1)),
        "add": "\n".join(f"sum_{a}{b} += w[0][{a}][i] * plane_{b};" for a, b in pairs),
        "results": "\n".join(
            f"{{ double sum = lost; for (int l = 0; l < {order}; ++l) sum += sum_{a}{b}[l] * w[2][{c}][l]; "
            f"result[{n}] = sum; }}"
            for n, (a, b, c) in parts_of
        ),
    }
    on_gpu = _values(order, derivatives, warps=True) | real
    on_gpu |= {
        "number": f"typedef {real['real']} number, scalar;",  # single precision only where it was asked for
        "share": lanes_of_atom(order),
        "sums": ", ".join(f"sum_{a}{b} = 0" for a, b in pairs),
        "add": "\n".join(f"sum_{a}{b} += along_x[{a}] * of_y[{b}];" for a, b in pairs),
        "results": ", ".join(f"sum_{a}{b} * w_z[{c}]" for _, (a, b, c) in parts_of),
    }
    cpu = filled(_GATHER_CPU, **values, **on_cpu, atom=filled(_GATHER_ATOM, **values, **on_cpu))
    return by_device(cpu, filled(_GATHER_GPU, **on_gpu))


@kernel_variants(*((p, n, r) for p, r in _COMMON for n in (0, 1, 2)))
def spline_gather(order: int, derivatives: int, precision: str) -> Any:
    """The kernel that gathers mesh values for atoms: `LANES` per thread of a CPU, ``WARP / lanes_of_atom`` per warp."""
    real = getattr(wp, precision)

    @native_kernel(
        f"spline_gather_{order}_{derivatives}_{precision}", _gather_body(order, derivatives, precision), lanes=True
    )
    def kernel(
        row: wp.int32,
        field: wp.array4d(dtype=real),  # (n_systems * n_channels, n_x, n_y, n_z)
        coordinates: wp.array2d(dtype=wp.float64),  # (n_atoms, 3)
        batch_idx: wp.array(dtype=wp.int32),  # (n_atoms,), or none
        order: wp.array(dtype=wp.int32),  # as in `spline_stencils`: neighbors in space are neighbors in time
        moments: wp.array3d(dtype=real),  # (n_atoms, n_channels, n_moments)
    ):
        """Sums of some atoms."""

    return kernel
