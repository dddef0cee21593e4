"""Spreading: the kernel that adds the weights of atoms at the points of the mesh."""

import math
from typing import Any

import warp as wp

from nvalchemiops.kernels import moments
from nvalchemiops.kernels.mesh.bins import TILE, bins_of_mesh
from nvalchemiops.kernels.mesh.splines import COMMON, window
from nvalchemiops.kernels.mesh.stencils import parts, table_values, widths
from nvalchemiops.kernels.native import by_device, filled, native_kernel
from nvalchemiops.kernels.simd import WARP
from nvalchemiops.launch import kernel_variants

POINTS = math.prod(TILE) // WARP
"""Points of a tile that a lane of a warp of a GPU has, next to each other along x.

More of them share the look-ups of atoms and the products of weights along y and z, but leave fewer warps.
"""

ROWS = 64
"""Largest number of rows along z that a thread of a CPU owns."""

_SPREAD_CPU = """
    @windows@
    const int n_x = field.shape[1], n_y = field.shape[2], n_z = field.shape[3], n_channels = moments.shape[1];
    const int n_parts = (n_y + @rows@ - 1) / @rows@, plane = row / n_parts, system = plane / n_x, x = plane % n_x;
    const int y_from = row % n_parts * n_y / n_parts, y_to = (row % n_parts + 1) * n_y / n_parts;
    const long long of_channel = 1LL * n_x * n_y * n_z;
    @real@ *const rows = field.data + system * n_channels * of_channel + 1LL * x * n_y * n_z;
    for (int channel = 0; channel < n_channels; ++channel)
        for (int z = y_from * n_z; z < y_to * n_z; ++z) rows[channel * of_channel + z] = 0;
    // what atoms add; columns along y stand together, but for those whose stencils cross the boundary
    const int low = y_from - @order@ + 1;
    const auto add_atoms = [=](auto add) {
        for (int i = 0; i < @order@; ++i) {
            const int from_x = x - i < 0 ? x - i + n_x : x - i;
            const int *const begin = column_begin.data + (system * n_x + from_x) * n_y;
            for (int turn = 0; turn < 1 + (low < 0); ++turn) {
                const int *const last = begin + (turn == 0 ? y_to : n_y);
                for (int k = begin[turn == 0 ? (low < 0 ? 0 : low) : low + n_y]; k < *last; ++k) {
                    const @real@ *const w = reinterpret_cast<const @real@ *>(weights.data) + 1LL * k * @size@;
                    const int first = first_z.data[k], window = window_of(first, n_z), offset = first - window;
                    // rows of the stencil that are among these
                    const int first_row = first_y.data[k] - turn * n_y;
                    const int j_from = y_from < first_row ? 0 : y_from - first_row;
                    const int j_to = y_to - first_row < @order@ ? y_to - first_row : @order@;
                    for (int channel = 0; channel < n_channels; ++channel) {
                        const @real@ *const m = moments.data + (1LL * k * n_channels + channel) * @count@;
                        for (int part = 0; part < 1 + (offset + @order@ > @width@); ++part) {
                            const auto along_z = [=](int d) { return in_window(w + @z@ + d * @width@, offset, part); };
                            const reals @amplitudes@;
                            @real@ *to = rows + channel * of_channel + (first_row + j_from) * n_z;
                            to += part == 0 ? window : 0;
                            for (int j = j_from; j < j_to; ++j, to += n_z) add(to, first, @values@);
                        }
                    }
                }
            }
        }
    };
    if (n_z >= @width@)
        add_atoms([](@real@ *to, int, reals values) { *reinterpret_cast<reals *>(to) += values; });
    else
        add_atoms([=](@real@ *to, int first, reals values) {
            for (int l = 0; l < @order@; ++l) to[first + l < n_z ? l : l - n_z] += values[l];
        });
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
    const @real@ *const table = reinterpret_cast<const @real@ *>(weights.data);
    const long long length = weights.shape[1] * 8 / sizeof(@real@);
    const int in_z = lane % @size_z@, in_y = lane / @size_z@ % @size_y@, in_x = lane / (@size_z@ * @size_y@) * @points@;
    const int x = along_x.from + in_x, y = along_y.from + in_y, z = along_z.from + in_z;
    for (int channel = 0; channel < n_channels; ++channel) {
        @real@ sum[@points@] = {};
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
                    const @real@ *const w = table + k * length;
                    const @real@ *const w_x = w + @x@ + channel * @tables@ * @width_x@ + (to & 0xff);
                    const @real@ *const w_y = w + @y@ + (to >> 8 & 0xff), *const w_z = w + @z@ + (to >> 16);
                    if (((to + @below@) & 0x808080) != 0) continue;  // all are below the widths
                    @products@
                    #pragma unroll
                    for (int p = 0; p < @points@; ++p)
                        if ((to & 0xff) + p < @width_x@) sum[p] += @product@;
                }
            }
        }
        @real@ *const to = field.data + (1LL * system * n_channels + channel) * n_x * n_y * n_z;
        #pragma unroll
        for (int p = 0; p < @points@; ++p)
            if (x + p < n_x && y < n_y && z < n_z) to[(1LL * (x + p) * n_y + y) * n_z + z] = sum[p];
    }
"""


def _spread_body(order: int, derivatives: int, precision: str) -> str:
    powers, stored = derivatives + 1, window(order)

    def amplitude(power: int) -> str:
        """What a derivative along y is multiplied by."""
        return " + ".join(
            f"m[{n}] * w[{a * stored} + i] * along_z({c})"
            for n, (a, b, c) in enumerate(moments.components(derivatives))
            if b == power
        )

    along_x, along_y, along_z = stored_on_gpu = widths(order, precision)
    common = table_values(order, derivatives, warps=False, precision=precision)
    real = common["real"]
    on_cpu = common | {
        "rows": ROWS,
        "amplitudes": ", ".join(f"of_{power} = {amplitude(power)}" for power in range(powers)),
        "values": " + ".join(f"w[{common['y']} + {power * stored} + j] * of_{power}" for power in range(powers)),
    }
    on_gpu = table_values(order, derivatives, warps=True, precision=precision) | {
        "points": POINTS,
        "below": sum((0x80 - width) << 8 * axis for axis, width in enumerate(stored_on_gpu)),
        "products": "\n".join(
            f"const {real} along_{b}{c} = w_y[{b * along_y}] * w_z[{c * along_z}];" for b, c in parts(derivatives)
        ),
        "product": " + ".join(
            f"w_x[{part * along_x} + p] * along_{b}{c}" for part, (b, c) in enumerate(parts(derivatives))
        ),
    }
    return by_device(filled(_SPREAD_CPU, **on_cpu), filled(_SPREAD_GPU, **on_gpu))


def threads_of_mesh(n_systems: int, n_x: int, n_y: int, n_z: int, warps: bool) -> int:
    """Number of threads (on a GPU, warps) of `spline_spread`.

    On a CPU, a thread owns up to `ROWS` rows of a plane; on a GPU, a warp owns a tile.
    """
    return bins_of_mesh(n_systems, n_x, n_y, n_z, warps) if warps else n_systems * n_x * -(-n_y // ROWS)


@kernel_variants(*((p, n, r) for p, r in COMMON for n in (0, 1)))
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
        weights: wp.array2d(dtype=wp.float64),  # numbers in the precision of the field, in this memory
        field: wp.array4d(dtype=real),  # (n_systems * n_channels, n_x, n_y, n_z)
    ):
        """Fill some rows, or a tile."""

    return kernel
