"""Stencils: the kernel that tabulates the weights of atoms, sorted by bin, from which they are spread."""

from typing import Any

import warp as wp

from nvalchemiops.kernels import moments
from nvalchemiops.kernels.mesh.bins import TILE, TILES
from nvalchemiops.kernels.mesh.splines import COMMON, values, window
from nvalchemiops.kernels.native import by_device, filled, native_kernel
from nvalchemiops.launch import kernel_variants

_STENCILS_CPU = """
    @number@
    @place@
    @weights@
    const int n_atoms = order.shape[0];
    @stencils@
    int first[@lanes@][3];
    const int from = @lanes@ * row;
    @real@ *const to = reinterpret_cast<@real@ *>(weights.data);
    stencils(from, &first[0][0], to + 1LL * from * @size@, @size@);
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
    const int n_atoms = order.shape[0], n_channels = moments.shape[1];
    const int lane = threadIdx.x & (@warp@ - 1), odd = lane & 1, k = @warp@ * row + lane, even = k & ~1;
    const int of_lane = k < n_atoms ? k : n_atoms - 1;  // lanes without an atom do as the last one, and write nothing
    const double *const u = coordinates.data + 3LL * order.data[of_lane];
    // Two lanes write the weights of both their atoms, so that a write of the warp fills sectors of 32 bytes.
    pair *const to = reinterpret_cast<pair *>(weights.data + 1LL * even * weights.shape[1]) + odd;
    const long long next = weights.shape[1] / 2;
    const auto swapped = [](double x) { return __shfl_xor_sync(0xffffffffu, x, 1); };
    const auto write = [&](int place, pair low, pair high) {
        const pair got = {swapped(odd ? low.first : high.first), swapped(odd ? low.second : high.second)};
        // selected number by number: of two pairs, the compiler makes two writes, of which each fills halves of sectors
        if (even < n_atoms) to[place / 2] = {odd ? got.first : low.first, odd ? got.second : low.second};
        if (even + 1 < n_atoms) to[next + place / 2] = {odd ? high.first : got.first, odd ? high.second : got.second};
    };
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
                for (int j = 0; j < @width@; j += 4)
                    write(((axis - 1) * @powers@ + d) * @width@ + j, {at(d, j), at(d, j + 1)},
                        {at(d, j + 2), at(d, j + 3)});
        else
            for (int channel = 0; channel < n_channels; ++channel) {
                const double *const m = moments.data + (1LL * of_lane * n_channels + channel) * @count@;
                const int along_x = (2 * @powers@ + channel * @tables@) * @width@;
                #pragma unroll
                for (int j = 0; j < @width@; j += 4) {
                    @along_x@
                }
            }
    }
    if (k < n_atoms) in_tile.data[k] = of_atom;
"""


def width(order: int) -> int:
    """Number of stored weights along an axis on a GPU.

    These are all points of the tiles that the stencils of a tile meet; weights of other points are zero.
    """
    size = max(TILE)
    return size * (1 - (1 - order) // size)


def parts(derivatives: int) -> list[tuple[int, int]]:
    """Numbers of derivatives along y and z of moments up to this order."""
    return [(b, c) for b in range(derivatives + 1) for c in range(derivatives + 1 - b)]


def length_of_table(order: int, derivatives: int, n_channels: int, warps: bool, precision: str) -> int:
    """Length of an atom's row of the table, in float64.

    On a CPU: weights along x, y and z, each with all derivatives, in the precision of the mesh. On a GPU, in float64:
    along y and z; then, for each channel and each derivative along y and z, weights along x times moments.
    """
    if not warps:
        return 3 * (derivatives + 1) * window(order) // (2 if precision == "float32" else 1)
    return (2 * (derivatives + 1) + n_channels * len(parts(derivatives))) * width(order)


def table_values(order: int, derivatives: int, warps: bool, precision: str) -> dict[str, object]:
    """Values of the placeholders in the text of kernels that write and read tables, for either type of device."""
    common = values(order, derivatives, warps, precision)
    if not warps:
        return common
    tables, table = parts(derivatives), width(order)
    numbered = list(enumerate(moments.components(derivatives)))

    def along_x(b: int, c: int, point: int) -> str:
        return " + ".join(f"m[{n}] * at({a}, j + {point})" for n, (a, *others) in numbered if others == [b, c])

    def four_along_x(b: int, c: int) -> list[str]:
        return [f"{{{along_x(b, c, point)}, {along_x(b, c, point + 1)}}}" for point in (0, 2)]

    return common | {
        "width": table,
        "tables": len(tables),
        "along_x": "\n".join(
            f"write(along_x + {part * table} + j, {', '.join(four_along_x(b, c))});"
            for part, (b, c) in enumerate(tables)
        ),
        "tiles": TILES,
        "size_x": TILE[0],
        "size_y": TILE[1],
        "size_z": TILE[2],
    }


@kernel_variants(*((p, n, r) for p, r in COMMON for n in (0, 1)))
def spline_stencils(order: int, derivatives: int, precision: str) -> Any:
    """The kernel that tabulates the weights of atoms, sorted by bin, in this precision; a GPU has float64.

    A thread handles `LANES` atoms on a CPU, and a warp of a GPU `WARP`.
    """
    cpu, gpu = (table_values(order, derivatives, warps, precision) for warps in (False, True))
    body = by_device(filled(_STENCILS_CPU, **cpu), filled(_STENCILS_GPU, **gpu))

    @native_kernel(f"spline_stencils_{order}_{derivatives}_{precision}", body, lanes=True)
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
        weights: wp.array2d(dtype=wp.float64),  # (n_atoms, `length_of_table`), or twice as many float32 in this memory
    ):
        """Weights of some atoms."""

    return kernel
