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
    struct alignas(16) pack {
        @real@ of[@pack@];
    };
    const int n_atoms = order.shape[0], n_channels = moments.shape[1];
    const int lane = threadIdx.x & (@warp@ - 1), odd = lane & 1, k = @warp@ * row + lane, even = k & ~1;
    const int of_lane = k < n_atoms ? k : n_atoms - 1;  // lanes without an atom do as the last one, and write nothing
    const double *const u = coordinates.data + 3LL * order.data[of_lane];
    // Two lanes write the weights of both their atoms, so that a write of the warp fills sectors of 32 bytes.
    const long long next = weights.shape[1] * 8 / sizeof(pack);
    pack *const to = reinterpret_cast<pack *>(weights.data) + even * next + odd;
    const auto write = [&](int place, pack low, pack high) {
        pack of_even, of_odd;
        #pragma unroll
        for (int n = 0; n < @pack@; ++n) {
            const @real@ got = __shfl_xor_sync(0xffffffffu, odd ? low.of[n] : high.of[n], 1);
            of_even.of[n] = odd ? got : low.of[n];
            of_odd.of[n] = odd ? high.of[n] : got;
        }
        if (even < n_atoms) to[place / @pack@] = of_even;
        if (even + 1 < n_atoms) to[next + place / @pack@] = of_odd;
    };
    int of_atom = 0;
    for (int axis = 0; axis < 3; ++axis) {
        const int n = axis == 0 ? n_x : axis == 1 ? n_y : n_z;
        double inside;
        number w[@powers@][@order@];
        const int first = place(u[axis], n, inside);
        const int offset = first % (axis == 0 ? @size_x@ : axis == 1 ? @size_y@ : @size_z@);
        of_atom |= offset << 8 * axis;
        weigh(inside, w);
        // Derivative d of the weight of a point, counted from the first one of the tile. Loops are unrolled, so that no
        // array is in memory.
        const auto at = [&](int d, int point) {
            const int j = point < offset ? point - offset + n : point - offset;
            @real@ found = 0;
            #pragma unroll
            for (int k = 0; k < @order@; ++k) found = j == k ? w[d][k] : found;
            return found;
        };
        if (axis == 0)
            for (int channel = 0; channel < n_channels; ++channel) {
                const @real@ *const m = moments.data + (1LL * of_lane * n_channels + channel) * @count@;
                const int along_x = @x@ + channel * @tables@ * @width_x@;
                #pragma unroll
                for (int j = 0; j < @width_x@; j += 2 * @pack@) {
                    @along_x@
                }
            }
        else if (axis == 1)
            #pragma unroll
            for (int j = 0; j < @width_y@; j += 2 * @pack@) {
                @along_y@
            }
        else
            #pragma unroll
            for (int j = 0; j < @width_z@; j += 2 * @pack@) {
                @along_z@
            }
    }
    if (k < n_atoms) in_tile.data[k] = of_atom;
"""

SIZES = {"float32": 4, "float64": 8}
"""Bytes of a number."""


def widths(order: int, precision: str) -> tuple[int, int, int]:
    """Numbers of stored weights along x, y and z on a GPU, which take whole sectors of 32 bytes.

    These are at least all points of the tiles that the stencils of a tile meet; weights of other points are zero.
    """
    sector = 32 // SIZES[precision]
    n_x, n_y, n_z = (-(-size * (1 - (1 - order) // size) // sector) * sector for size in TILE)
    return n_x, n_y, n_z


def parts(derivatives: int) -> list[tuple[int, int]]:
    """Numbers of derivatives along y and z of moments up to this order."""
    return [(b, c) for b in range(derivatives + 1) for c in range(derivatives + 1 - b)]


def length_of_table(order: int, derivatives: int, n_channels: int, warps: bool, precision: str) -> int:
    """Length of an atom's row of the table, in float64.

    Its numbers are in the precision of the mesh. On a CPU: weights along x, y and z, each with all derivatives. On a
    GPU: along y and z; then, for each channel and each derivative along y and z, weights along x times moments.
    """
    if warps:
        along_x, along_y, along_z = widths(order, precision)
        numbers = (derivatives + 1) * (along_y + along_z) + n_channels * len(parts(derivatives)) * along_x
    else:
        numbers = 3 * (derivatives + 1) * window(order)
    return numbers * SIZES[precision] // 8


def table_values(order: int, derivatives: int, warps: bool, precision: str) -> dict[str, object]:
    """Values of the placeholders in the text of kernels that write and read tables, for either type of device."""
    common = values(order, derivatives, warps, precision)
    if not warps:
        return common
    tables, along, pack = parts(derivatives), dict(zip("xyz", widths(order, precision))), 16 // SIZES[precision]
    numbered = list(enumerate(moments.components(derivatives)))

    def of_x(b: int, c: int, point: int) -> str:
        return " + ".join(f"m[{n}] * at({a}, j + {point})" for n, (a, *others) in numbered if others == [b, c])

    def written(place: str, numbers: list[str]) -> str:
        low, high = (f"{{{', '.join(half)}}}" for half in (numbers[:pack], numbers[pack:]))
        return f"write({place} + j, {low}, {high});"

    powers, points = range(derivatives + 1), range(2 * pack)
    first_z, first_x = len(powers) * along["y"], len(powers) * (along["y"] + along["z"])
    return common | {
        "pack": pack,
        "y": 0,
        "z": first_z,
        "x": first_x,
        "tables": len(tables),
        "along_x": "\n".join(
            written(f"along_x + {part * along['x']}", [of_x(b, c, point) for point in points])
            for part, (b, c) in enumerate(tables)
        ),
        **{
            f"along_{axis}": "\n".join(
                written(f"{first + d * along[axis]}", [f"at({d}, j + {point})" for point in points]) for d in powers
            )
            for axis, first in (("y", 0), ("z", first_z))
        },
        **{f"width_{axis}": width for axis, width in along.items()},
        "tiles": TILES,
        "size_x": TILE[0],
        "size_y": TILE[1],
        "size_z": TILE[2],
    }


@kernel_variants(*((p, n, r) for p, r in COMMON for n in (0, 1)))
def spline_stencils(order: int, derivatives: int, precision: str) -> Any:
    """The kernel that tabulates the weights of atoms, sorted by bin, in this precision.

    On a GPU they are also computed in it, as those of `spline_gather` are. A thread handles `LANES` atoms on a CPU, and
    a warp of a GPU `WARP`.
    """
    cpu, gpu = (table_values(order, derivatives, warps, precision) for warps in (False, True))
    body = by_device(filled(_STENCILS_CPU, **cpu), filled(_STENCILS_GPU, **gpu))

    @native_kernel(f"spline_stencils_{order}_{derivatives}_{precision}", body, lanes=True)
    def kernel(
        row: wp.int32,
        moments: wp.array3d(
            dtype=getattr(wp, precision)
        ),  # (n_atoms, n_channels, n_moments), sorted by bin; none on a CPU
        coordinates: wp.array2d(dtype=wp.float64),
        order: wp.array(dtype=wp.int32),  # atoms sorted by bin
        n_x: wp.int32,
        n_y: wp.int32,
        n_z: wp.int32,
        first_y: wp.array(dtype=wp.int32),  # (n_atoms,), where the stencil begins along y; none on a GPU
        first_z: wp.array(dtype=wp.int32),  # and along z
        in_tile: wp.array(dtype=wp.int32),  # and where in its tile, in bytes for x, y and z; none on a CPU
        weights: wp.array2d(dtype=wp.float64),  # (n_atoms, `length_of_table`), numbers of this precision
    ):
        """Weights of some atoms."""

    return kernel
