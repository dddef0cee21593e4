"""Spreading: the kernel that adds the weights of atoms at the points of the mesh."""

import math
from typing import Any

import warp as wp

from nvalchemiops.kernels import moments
from nvalchemiops.kernels.mesh.bins import TILE, bins_of_mesh
from nvalchemiops.kernels.mesh.splines import COMMON, window
from nvalchemiops.kernels.mesh.stencils import SIZES, length_of_table, parts, table_values, widths
from nvalchemiops.kernels.native import by_device, filled, native_kernel
from nvalchemiops.kernels.simd import WARP
from nvalchemiops.launch import kernel_variants

POINTS = math.prod(TILE) // WARP
"""Points of a tile that a lane of a warp of a GPU has, next to each other along z.

More of them share the look-ups of atoms and the products of weights along x and y, but leave fewer warps.
"""

AT_ONCE = 2
"""Number of atoms whose weights a warp of a GPU reads at the same time; half as many if these take more registers."""

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
    const axis axis_x = axis_of(n_x, @size_x@, tiles_x, row / (tiles_y * tiles_z) % tiles_x);
    const axis axis_y = axis_of(n_y, @size_y@, tiles_y, row / tiles_z % tiles_y);
    const axis axis_z = axis_of(n_z, @size_z@, tiles_z, row % tiles_z);
    const auto tile_of = [](const axis &along, int i, int n_tiles) {
        return along.first + i < n_tiles ? along.first + i : along.first + i - n_tiles;
    };
    // The points of a lane; weights of them are one vector if all boundaries of tiles are at multiples of their number.
    struct alignas(16) points {
        @real@ of[@points@];
    };
    const auto at_once = [](const @real@ *from, int) { return *reinterpret_cast<const points *>(from); };
    const auto one_by_one = [](const @real@ *from, int number) {
        points found;
        #pragma unroll
        for (int p = 0; p < @points@; ++p) found.of[p] = p < number ? from[p] : 0;
        return found;
    };
    const bool aligned = n_z % @points@ == 0;
    // from the first point of another tile to that of this one
    const auto away_from = [](int from, const axis &along, int n) {
        return along.from < from ? along.from - from + n : along.from - from;
    };
    const int n_bins = axis_x.count * axis_y.count * axis_z.count;
    const @real@ *const table = reinterpret_cast<const @real@ *>(weights.data);
    const long long length = weights.shape[1] * 8 / sizeof(@real@);
    const int in_z = lane % (@size_z@ / @points@) * @points@, in_y = lane / (@size_z@ / @points@) % @size_y@;
    const int in_x = lane / (@size_z@ / @points@ * @size_y@);
    const int here_in = in_x | in_y << 8 | in_z << 16;
    const int x = axis_x.from + in_x, y = axis_y.from + in_y, z = axis_z.from + in_z;
    for (int channel = 0; channel < n_channels; ++channel) {
        points sum = {};
        const int along_x = channel * (@tables@ * @width_x@);
        for (int base = 0; base < n_bins; base += @warp@) {
            // each lane looks up a tile: its atoms, and how far it is, in bytes for x, y and z
            int from = 0, count = 0, away = 0;
            if (base + lane < n_bins) {
                const int i = base + lane, tile_z = tile_of(axis_z, i % axis_z.count, tiles_z);
                const int tile_y = tile_of(axis_y, i / axis_z.count % axis_y.count, tiles_y);
                const int tile_x = tile_of(axis_x, i / (axis_z.count * axis_y.count), tiles_x);
                const int *const begin =
                    column_begin.data + ((system * tiles_x + tile_x) * tiles_y + tile_y) * tiles_z + tile_z;
                from = begin[0];
                count = begin[1] - from;
                away = away_from(tile_x * @size_x@, axis_x, n_x) | away_from(tile_y * @size_y@, axis_y, n_y) << 8
                    | away_from(tile_z * @size_z@, axis_z, n_z) << 16;
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
                const int here = __popc(votes);
                atom = __shfl_sync(0xffffffffu, atom, lane < here ? chosen : 0);
                place = __shfl_sync(0xffffffffu, place, chosen);
                if (lane >= here) place = 0x40;  // beyond the table
                // Weights of several atoms are read at the same time, without branches.
                const auto add_atoms = [&](auto quad_at, auto length, int along_x) {
                    #pragma unroll 1
                    for (int other = 0; other < here; other += @at_once@) {
                        int to[@at_once@];
                        const @real@ *w[@at_once@];
                        @real@ w_x[@at_once@][@tables@], w_y[@at_once@][@powers@];
                        points w_z[@at_once@][@powers@];
                        #pragma unroll
                        for (int i = 0; i < @at_once@; ++i) {
                            to[i] = __shfl_sync(0xffffffffu, place, other + i) + here_in;
                            w[i] = table + 1LL * __shfl_sync(0xffffffffu, atom, other + i) * length;
                        }
                        #pragma unroll
                        for (int i = 0; i < @at_once@; ++i) {
                            const bool stored = ((to[i] + @below@) & 0x808080) == 0;  // all are below the widths
                            const unsigned at = stored ? to[i] : 0, at_z = at >> 16;
                            const @real@ *const from_x = w[i] + ((at & 0xff) + along_x);
                            const @real@ *const from_y = w[i] + (at >> 8 & 0xff);
                            #pragma unroll
                            for (int n = 0; n < @tables@; ++n) w_x[i][n] = from_x[@x@ + n * @width_x@];
                            #pragma unroll
                            for (int d = 0; d < @powers@; ++d) w_y[i][d] = from_y[@y@ + d * @width_y@];
                            #pragma unroll
                            for (int d = 0; d < @powers@; ++d)
                                w_z[i][d] = quad_at(w[i] + at_z + @z@ + d * @width_z@, @width_z@ - at_z);
                        }
                        #pragma unroll
                        for (int i = 0; i < @at_once@; ++i) {
                            const bool stored = ((to[i] + @below@) & 0x808080) == 0;
                            const @real@ @products@;
                            #pragma unroll
                            for (int p = 0; p < @points@; ++p) {
                                const @real@ product = @product@;
                                sum.of[p] = stored ? sum.of[p] + product : sum.of[p];
                            }
                        }
                    }
                };
                if (!aligned)
                    add_atoms(one_by_one, length, along_x);
                else if (n_channels > 1)
                    add_atoms(at_once, length, along_x);
                else
                    add_atoms(at_once, @row_of_one@, 0);
            }
        }
        if (x < n_x && y < n_y && z < n_z) {
            @real@ *const to =
                field.data + (((1LL * system * n_channels + channel) * n_x + x) * n_y + y) * n_z + z;
            if (aligned)
                *reinterpret_cast<points *>(to) = sum;
            else
                #pragma unroll
                for (int p = 0; p < @points@; ++p)
                    if (z + p < n_z) to[p] = sum.of[p];
        }
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

    def in_plane(power: int) -> str:
        """What a derivative along z is multiplied by on a GPU."""
        return " + ".join(f"w_x[i][{n}] * w_y[i][{b}]" for n, (b, c) in enumerate(parts(derivatives)) if c == power)

    common = table_values(order, derivatives, warps=False, precision=precision)
    on_cpu = common | {
        "rows": ROWS,
        "amplitudes": ", ".join(f"of_{power} = {amplitude(power)}" for power in range(powers)),
        "values": " + ".join(f"w[{common['y']} + {power * stored} + j] * of_{power}" for power in range(powers)),
    }
    on_gpu = table_values(order, derivatives, warps=True, precision=precision) | {
        "points": POINTS,
        "row_of_one": length_of_table(order, derivatives, 1, True, precision) * 8 // SIZES[precision],
        "at_once": AT_ONCE if precision == "float32" and not derivatives else AT_ONCE // 2,
        "below": sum((0x80 - width) << 8 * axis for axis, width in enumerate(widths(order, precision))),
        "products": ", ".join(f"along_{c} = {in_plane(c)}" for c in range(powers)),
        "product": " + ".join(f"along_{c} * w_z[i][{c}].of[p]" for c in range(powers)),
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

    # 16 blocks leave 64 registers: without a bound the compiler takes fewer, and reads weights one atom after another
    @native_kernel(
        f"spline_spread_{order}_{derivatives}_{precision}",
        _spread_body(order, derivatives, precision),
        lanes=True,
        blocks=16,
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
