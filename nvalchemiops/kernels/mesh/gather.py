"""Gathering: the kernel that sums the values of a mesh around each atom."""

from typing import Any

import warp as wp

from nvalchemiops.kernels import moments
from nvalchemiops.kernels.mesh.splines import COMMON, values, window
from nvalchemiops.kernels.native import by_device, filled, native_kernel
from nvalchemiops.kernels.simd import WARP
from nvalchemiops.launch import kernel_variants

_GATHER_CPU = """
    @number@
    @place@
    @weights@
    @windows@
    const int n_x = field.shape[1], n_y = field.shape[2], n_z = field.shape[3], n_channels = moments.shape[1];
    const int n_atoms = order.shape[0];
    @stencils@
    int first[@lanes@][3];
    @real@ weights[@lanes@][3][@powers@][@width@];
    stencils(@lanes@ * row, &first[0][0], &weights[0][0][0][0], @size@);
    const auto on_line = [](const @real@ *values, const @real@ *weights) {
        double sum = 0;
        for (int l = 0; l < @order@; ++l) sum += values[l] * weights[l];
        return sum;
    };
    const auto gather = [&](auto values_at) {
        for (int k = @lanes@ * row; k < @lanes@ * (row + 1) && k < n_atoms; ++k) {
            const int *const begin = first[k - @lanes@ * row], window = window_of(begin[2], n_z);
            const int offset = begin[2] - window;
            const auto w = weights[k - @lanes@ * row];
            const int atom = order.data[k], system = batch_idx.shape[0] > 0 ? batch_idx.data[atom] : 0;
            const bool exists = system >= 0 && system < field.shape[0] / n_channels;
            for (int channel = 0; channel < n_channels; ++channel) {
                const @real@ *const mesh =
                    field.data + ((exists ? system : 0) * n_channels + channel) * (1LL * n_x * n_y * n_z);
                @real@ *const result = moments.data + (1LL * atom * n_channels + channel) * @count@;
                const double zero = 0.0, lost = exists ? 0.0 : zero / zero;
                @real@ @sums@;
                for (int part = 0; part < 1 + (offset + @order@ > @width@); ++part) {
                    reals @vectors@;
                    int line[@order@];  // where the lines of a plane begin
                    for (int j = 0; j < @order@; ++j) {
                        const int y = begin[1] + j < n_y ? begin[1] + j : begin[1] + j - n_y;
                        line[j] = y * n_z + (part == 0 ? window : 0);
                    }
                    for (int i = 0; i < @order@; ++i) {
                        const int x = begin[0] + i < n_x ? begin[0] + i : begin[0] + i - n_x;
                        const @real@ *const plane = mesh + 1LL * x * n_y * n_z;
                        reals @planes@;
                        for (int j = 0; j < @order@; ++j) {
                            const reals values = values_at(plane + line[j], begin[2]);
                            @add_row@
                        }
                        @add@
                    }
                    @keep@
                }
                @results@
            }
        }
    };
    if (n_z >= @width@)
        gather([](const @real@ *at, int) { return *reinterpret_cast<const reals *>(at); });
    else
        gather([=](const @real@ *at, int z) {
            reals values = {};
            for (int l = 0; l < @order@; ++l) values[l] = at[z + l < n_z ? l : l - n_z];
            return values;
        });
"""

_GATHER_GPU = """
    @number@
    @place@
    const int n_x = field.shape[1], n_y = field.shape[2], n_z = field.shape[3], n_channels = moments.shape[1];
    const int lane = threadIdx.x & (@warp@ - 1), n_atoms = order.shape[0];
    const int group = lane / @share@ < @atoms@ ? lane / @share@ : @atoms@ - 1;  // some lanes may be left over
    const int leader = group * @share@, point = lane - leader, k = row * @atoms@ + group;
    const bool is_there = k < n_atoms;  // lanes without an atom do as the last one, without its results
    const int atom = order.data[is_there ? k : n_atoms - 1], system = batch_idx.shape[0] > 0 ? batch_idx.data[atom] : 0;
    const bool exists = system >= 0 && (system + 1LL) * n_channels <= field.shape[0];
    const number lost = exists ? 0 : NAN;
    // Each of three lanes of an atom places it along an axis. Along each axis, a lane then has one point of the stencil
    // and its weight, M_n(t + i), for which it asks the next lane for M_n(t + i - 1).
    const int axis = point < 3 ? point : 2;
    double inside;
    const int begin = place(coordinates.data[3LL * atom + axis], axis == 0 ? n_x : axis == 1 ? n_y : n_z, inside);
    const number t_of_axis = static_cast<number>(inside), i = @order@ - 1 - point;
    int own[3];
    number w[3][@powers@];
    #pragma unroll
    for (int a = 0; a < 3; ++a) {
        const int n_a = a == 0 ? n_x : a == 1 ? n_y : n_z;
        own[a] = __shfl_sync(0xffffffffu, begin, leader + a) + (point < @order@ ? point : 0);
        own[a] -= own[a] < n_a ? 0 : n_a;
        const number t = __shfl_sync(0xffffffffu, t_of_axis, leader + a);
        const auto of_next = [&](number of_this) {
            const number found = __shfl_down_sync(0xffffffffu, of_this, 1);
            return point < @order@ - 1 ? found : 0;
        };
        number m = t - t + (point == @order@ - 1 ? 1 : 0);
        #pragma unroll
        for (int n = 2; n <= @order@ + 1; ++n) {
            const int d = @order@ + 1 - n;  // derivatives are differences of splines of lower order
            if (d < @powers@) {
                number difference = m;
                #pragma unroll
                for (int k = 0; k < d; ++k) difference -= of_next(difference);
                w[a][d] = difference;
            }
            if (d > 0) m = ((t + i) * m + ((n - i) - t) * of_next(m)) * static_cast<number>(1.0 / (n - 1));
        }
    }
    // A lane sums over the points of the stencil with its z.
    const long long line = 1LL * n_z * sizeof(@real@), plane = n_y * line;
    const long long own_x = own[0] * plane, own_y = own[1] * line;
    long long along_y[@order@];
    number w_y[@powers@][@order@];
    #pragma unroll
    for (int j = 0; j < @order@; ++j) {
        along_y[j] = __shfl_sync(0xffffffffu, own_y, leader + j) + own[2] * sizeof(@real@);
        #pragma unroll
        for (int d = 0; d < @powers@; ++d) w_y[d][j] = __shfl_sync(0xffffffffu, w[1][d], leader + j);
    }
    for (int channel = 0; channel < n_channels; ++channel) {
        const char *const mesh = reinterpret_cast<const char *>(field.data)
            + ((exists ? system : 0) * n_channels + channel) * (n_x * plane);
        @real@ *const result = moments.data + (1LL * atom * n_channels + channel) * @count@;
        number @sums@;
        #pragma unroll 2
        for (int i = 0; i < @order@; ++i) {
            const char *const at = mesh + __shfl_sync(0xffffffffu, own_x, leader + i);
            number value[@order@], of_plane[@powers@] = {}, w_x[@powers@];
            #pragma unroll
            for (int j = 0; j < @order@; ++j) value[j] = *reinterpret_cast<const @real@ *>(at + along_y[j]);
            #pragma unroll
            for (int j = 0; j < @order@; ++j)
                for (int d = 0; d < @powers@; ++d) of_plane[d] += w_y[d][j] * value[j];
            #pragma unroll
            for (int d = 0; d < @powers@; ++d) w_x[d] = __shfl_sync(0xffffffffu, w[0][d], leader + i);
            @add@
        }
        number sum[@count@] = {@results@};
        #pragma unroll
        for (int c = 0; c < @count@; ++c) {
            // of 1, 2, 4, ... lanes from each one on, of which those that make up a group are added
            number total, several = sum[c];
            #pragma unroll
            for (int n = 1, added = 0; n <= @share@; n *= 2) {
                if (@share@ & n) {
                    total = added ? total + __shfl_down_sync(0xffffffffu, several, added) : several;
                    added += n;
                }
                if (2 * n <= @share@) several += __shfl_down_sync(0xffffffffu, several, n);
            }
            if (is_there && point == 0) result[c] = total + lost;
        }
    }
"""


def lanes_of_atom(order: int) -> int:
    """Number of lanes of a warp that share an atom when they gather: one for each point along z, and for each axis."""
    return max(order, 3)


def _gather_body(order: int, derivatives: int, precision: str) -> str:
    pairs = [(a, b) for a in range(derivatives + 1) for b in range(derivatives + 1 - a)]
    parts_of = list(enumerate(moments.components(derivatives)))
    common, width = values(order, derivatives, warps=False, precision=precision), window(order)
    on_cpu = common | {
        "sums": ", ".join(f"sum_{a}{b}[2 * {width}]" for a, b in pairs),
        "vectors": ", ".join(f"vector_{a}{b} = {{}}" for a, b in pairs),
        "planes": ", ".join(f"plane_{b} = {{}}" for b in range(derivatives + 1)),
        "add_row": "\n".join(f"plane_{b} += w[2][{b}][j] * values;" for b in range(derivatives + 1)),
        "add": "\n".join(f"vector_{a}{b} += w[0][{a}][i] * plane_{b};" for a, b in pairs),
        "keep": "\n".join(
            f"*reinterpret_cast<reals *>(sum_{a}{b} + part * {width}) = vector_{a}{b};" for a, b in pairs
        ),
        "results": "\n".join(
            f"result[{n}] = lost + on_line(sum_{a}{b} + offset, w[1][{c}]);" for n, (a, b, c) in parts_of
        ),
    }
    on_gpu = values(order, derivatives, warps=True, precision=precision) | {
        "share": lanes_of_atom(order),
        "atoms": WARP // lanes_of_atom(order),
        "sums": ", ".join(f"sum_{a}{b} = 0" for a, b in pairs),
        "add": "\n".join(f"sum_{a}{b} += w_x[{a}] * of_plane[{b}];" for a, b in pairs),
        "results": ", ".join(f"sum_{a}{b} * w[2][{c}]" for _, (a, b, c) in parts_of),
    }
    return by_device(filled(_GATHER_CPU, **on_cpu), filled(_GATHER_GPU, **on_gpu))


@kernel_variants(*((p, n, r) for p, r in COMMON for n in (0, 1, 2)))
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
