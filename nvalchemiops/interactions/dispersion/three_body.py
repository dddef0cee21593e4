"""The kernel of the triple-dipole energy of Axilrod, Teller and Muto, as used in D3.

Let ``s1``, ``s2`` and ``s3`` be the squares of the sides of a triple of atoms, and ``P = s1 s2 s3``. Its energy is

    E = sqrt(C6_ij C6_ik C6_jk) (3/8 X / P + 1) P^(-3/2) / (1 + 6 (R² / P)^(8/3)),
    X = (s1 + s2 - s3)(s1 - s2 + s3)(s2 + s3 - s1),

where X / 8P is the product of the cosines, and R is the product of 4/3 of the radii of the three pairs. A triple counts
if all sides are shorter than the cutoff; optionally, a factor for each side goes to zero smoothly before the cutoff.

The kernel is in gather form: each atom gets a third of the energy of its triples, and sums the derivatives with respect
to its own position and coefficients. For each neighbor j it loops over all other neighbors, `LANES` at a time on a CPU,
so it visits each triple twice. After this loop, the gradient with respect to the displacement of j and the derivative
with respect to ``C6_ij`` are complete.

Sources: B. M. Axilrod and E. Teller, J. Chem. Phys. 11, 299 (1943), doi:10.1063/1.1723844; in D3: S. Grimme,
J. Antony, S. Ehrlich and H. Krieg, J. Chem. Phys. 132, 154104 (2010), doi:10.1063/1.3382344, eq. (11) to (14).
"""

from typing import Any

import warp as wp

from nvalchemiops.kernels.native import by_device, filled, native_kernel
from nvalchemiops.kernels.simd import LANES, WARP
from nvalchemiops.launch import kernel_variants

MOST_COEFFICIENTS = 512
"""Largest number of coefficients ``c_iq``: all 103 published elements at once have 338."""

TILE = 64
"""Number of neighbors that are collected at once on a CPU."""

AT_ONCE = 8
"""Number of sums over coefficients that a lane of a GPU computes at once, for one load of its neighbor's coefficients.
"""

N_SUMS = 18
"""Number of columns of the sums over systems: the gradient with respect to the cell, and the virial."""

_COMMON = """
    typedef @real@ real;
    const int n_atoms = positions.shape[0], n_coefficients = coefficients.shape[1], n_slots = neighbors.shape[0];
    const bool is_list = row_begin.shape[0] > 0, periodic = cell.shape[0] > 0, weighted = weights.shape[0] > 0;
    long long begin = is_list ? row_begin.data[i] : static_cast<long long>(i) * width;
    long long end = is_list ? row_begin.data[i + 1] : begin + width;
    if (begin < 0 || end > n_slots) begin = end = 0;
    const int system = batch_idx.shape[0] > 0 ? batch_idx.data[i] : 0;
    const int n_species = pair_radii.shape[0], own_species = species.data[i];
    const real *own = positions.data + 3LL * i, *c_i = coefficients.data + static_cast<long long>(i) * n_coefficients;
    const one limit = cutoff * cutoff, from = r_switch * r_switch;
    const one per_width = from < limit ? one(1) / (limit - from) : one(0);
    struct Neighbor {
        int j;
        one d[3], square;
    };
    const auto is_close = [&](long long slot, Neighbor &it) {
        it.j = neighbors.data[slot];
        if (it.j == padding || it.j < 0 || it.j >= n_atoms) return false;
        const real *other = positions.data + 3LL * it.j;
        for (int a = 0; a < 3; ++a) {
            it.d[a] = one(other[a]) - one(own[a]);
            if (periodic)
                for (int c = 0; c < 3; ++c)
                    it.d[a] += one(shifts.data[3 * slot + c]) * one(cell.data[9LL * system + 3 * c + a]);
        }
        it.square = it.d[0] * it.d[0] + it.d[1] * it.d[1] + it.d[2] * it.d[2];
        return !(it.square >= limit) && !(it.j == i && it.square == one(0));
    };
    const auto signed_product = [&](const real *a, const real *b) {
        one sum = one(0);
        for (int q = 0; q < n_coefficients; ++q) sum += (q < n_positive ? one(1) : one(-1)) * one(a[q]) * one(b[q]);
        return sum;
    };
    const auto squared_radius = [&](int a, int b) {
        const one radius = one(pair_radii.data[a * n_species + b]) * (one(4) / one(3));
        return radius * radius;
    };
    // the factor by which a side goes to zero, 1 - 10 x^3 + 15 x^4 - 6 x^5 of the square, and its derivative
    const auto switched = [=](auto square, auto &derivative) {
        typedef decltype(square) number;
        const number t = (square - from) * per_width;
        const number x = t > one(0) ? t : number(one(0)), y = one(1) - x;
        derivative = one(-30) * per_width * x * x * y * y;
        return one(1) + x * x * x * (one(-10) + x * (one(15) - one(6) * x));
    };
    // energy, and its derivatives by the squares of two sides (by symmetry the third needs none)
    const auto triple = [=](auto s1, auto s2, auto s3, auto c6, auto radii, auto &e1, auto &e3) {
        typedef decltype(s2) number;
        const number inverse = one(1) / (s1 * s2 * s3), power = inverse * square_root(inverse);
        const number x1 = s2 + s3 - s1, x2 = s1 - s2 + s3, x3 = s1 + s2 - s3, x = x1 * x2 * x3;
        const number cosines = one(0.375) * x * inverse, angle = (cosines + one(1)) * power;
        const number t = cube_root(radii * inverse), t2 = t * t, t4 = t2 * t2, y = one(6) * t4 * t4;
        const number damping = one(1) / (one(1) + y), c9 = square_root(c6 > one(0) ? c6 : -c6);
        number df1, df2, df3;
        const number f1 = switched(number(s1), df1), f2 = switched(s2, df2), f3 = switched(s3, df3);
        const number value = c9 * angle * damping, scale = c9 * damping * f1 * f2 * f3;
        // P times the derivative by P, of all but X
        const number by_product = damping * y * angle * (one(8) / one(3)) - one(1.5) * angle - cosines * power;
        const number by_x = one(0.375) * inverse * power;
        e1 = scale * (by_x * (x2 * x3 * number(-1.0) + x1 * x3 + x1 * x2) + by_product / s1) + value * df1 * f2 * f3;
        e3 = scale * (by_x * (x2 * x3 + x1 * x3 - x1 * x2) + by_product / s3) + value * df3 * f1 * f2;
        return value * f1 * f2 * f3;
    };
"""

_CPU = """
    typedef double one;
    typedef double lanes __attribute__((ext_vector_type(@lanes@)));
    typedef decltype(lanes(0.0) < lanes(0.0)) condition;
    const auto square_root = [](lanes x) { return __builtin_elementwise_sqrt(x); };
    const auto cube_root = [](lanes x) {
        // a third of the bits is right to some percent, and each step cubes the error
        union { condition bits; lanes value; } start = {}, guess;
        start.value = x;
        const lanes third = __builtin_convertvector(start.bits, lanes) * (1.0 / 3.0);
        guess.bits = __builtin_convertvector(third, condition) + 0x2A9F7893782DA1CELL;
        lanes t = guess.value;
        for (int step = 0; step < 3; ++step) {
            const lanes cube = t * t * t;
            t *= (cube + 2.0 * x) / (2.0 * cube + x);
        }
        return t;
    };
    @common@
    const auto add_up = [](lanes values) {
        double sum = values[0];
        for (int l = 1; l < @lanes@; ++l) sum += values[l];
        return sum;
    };
    double energy = 0.0, gradient[3] = {}, sums[@n_sums@] = {}, by_coefficient[@room@] = {};
    struct alignas(64) Tile {
        double d[3][@tile@], square[@tile@], place[@tile@], weight[@tile@], c6[@tile@], radius[@tile@];
        double coefficients[@room@][@tile@];
        int species[@tile@];
    } tile;
    for (long long slot = begin; slot < end;) {
        int n = 0;
        Neighbor k;
        for (; slot < end && n < @tile@; ++slot) {
            if (!is_close(slot, k)) continue;
            const real *c_k = coefficients.data + static_cast<long long>(k.j) * n_coefficients;
            for (int a = 0; a < 3; ++a) tile.d[a][n] = k.d[a];
            for (int q = 0; q < n_coefficients; ++q) tile.coefficients[q][n] = q < n_positive ? c_k[q] : -c_k[q];
            tile.square[n] = k.square;
            tile.place[n] = slot - begin;
            tile.weight[n] = weighted ? weights.data[k.j] : 1.0;
            tile.c6[n] = signed_product(c_i, c_k);
            tile.species[n] = species.data[k.j];
            tile.radius[n] = squared_radius(own_species, tile.species[n]);
            ++n;
        }
        for (int rest = n; rest % @lanes@; ++rest) {
            for (int a = 0; a < 3; ++a) tile.d[a][rest] = 1e9;
            for (int q = 0; q < n_coefficients; ++q) tile.coefficients[q][rest] = 0.0;
            tile.square[rest] = 3e18, tile.place[rest] = -1.0, tile.weight[rest] = 0.0, tile.c6[rest] = 0.0;
            tile.species[rest] = own_species, tile.radius[rest] = 1.0;
        }
        Neighbor it;
        for (long long at = begin; at < end; ++at) {
            if (!is_close(at, it)) continue;
            const real *c_j = coefficients.data + static_cast<long long>(it.j) * n_coefficients;
            const int its_species = species.data[it.j];
            const double c6_ij = signed_product(c_i, c_j), radius_ij = squared_radius(own_species, its_species);
            const double weight_ij = weighted ? (weights.data[i] + weights.data[it.j]) / 3.0 : 2.0 / 3.0;
            lanes total = 0.0, by_c6 = 0.0, g[3] = {lanes(0.0), lanes(0.0), lanes(0.0)};
            for (int m = 0; m < n; m += @lanes@) {
                const auto load = [m](const double *row) { return *reinterpret_cast<const lanes *>(row + m); };
                lanes d[3], s3 = 0.0, c6_jk = 0.0, radius_jk;
                for (int a = 0; a < 3; ++a) {
                    d[a] = load(tile.d[a]) - it.d[a];
                    s3 += d[a] * d[a];
                }
                const lanes place = load(tile.place);
                const condition live = (s3 < limit) & (place != double(at - begin)) & (place >= 0.0);
                for (int q = 0; q < n_coefficients; ++q) c6_jk += double(c_j[q]) * load(tile.coefficients[q]);
                for (int l = 0; l < @lanes@; ++l) radius_jk[l] = squared_radius(its_species, tile.species[m + l]);
                const lanes c6 = c6_ij * load(tile.c6) * c6_jk, radii = radius_ij * load(tile.radius) * radius_jk;
                lanes e1, e3;
                const lanes e = triple(lanes(it.square), load(tile.square), s3, c6, radii, e1, e3);
                const lanes weight = weight_ij + load(tile.weight) * (1.0 / 3.0);
                total += live ? e : lanes(0.0);
                by_c6 += live ? weight * e : lanes(0.0);
                for (int a = 0; a < 3; ++a) g[a] += live ? weight * (e1 * it.d[a] - e3 * d[a]) : lanes(0.0);
            }
            energy += add_up(total);
            const double factor = c6_ij == 0.0 ? 0.0 : 0.5 * add_up(by_c6) / c6_ij;
            for (int q = 0; q < n_coefficients; ++q) by_coefficient[q] += (q < n_positive ? factor : -factor) * c_j[q];
            for (int a = 0; a < 3; ++a) {
                const double of_neighbor = 2.0 * add_up(g[a]);
                gradient[a] -= of_neighbor;
                for (int c = 0; c < 3; ++c) {
                    if (periodic) sums[3 * c + a] += shifts.data[3 * at + c] * of_neighbor / 3.0;
                    sums[9 + 3 * a + c] -= of_neighbor * it.d[c] / 3.0;
                }
            }
        }
    }
    for (int q = 0; q < n_coefficients; ++q)
        coefficient_gradients.data[static_cast<long long>(i) * n_coefficients + q] = by_coefficient[q];
    energies.data[i] = energy / 6.0;
    for (int a = 0; a < 3; ++a) position_gradients.data[3LL * i + a] = gradient[a];
    for (int c = 0; c < @n_sums@; ++c) system_sums.data[@n_sums@LL * i + c] = sums[c];
"""

_GPU = """
    typedef @real@ one;
    const auto square_root = [](one x) { return ::sqrt(x); };
    const auto cube_root = [](one x) { return ::cbrt(x); };
    @common@
    const int lane = threadIdx.x & (@warp@ - 1);
    const auto add_up = [](double sum) {
        for (int step = @warp@ / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        return sum;
    };
    // the lane with this number among those that are set
    const auto lane_of = [](unsigned hits, int number) {
        int found = 0;
        for (int step = @warp@ / 2; step > 0; step /= 2)
            if (__popc(hits & ((1u << (found + step)) - 1u)) <= number) found += step;
        return found;
    };
    // The next neighbors from a slot on, one for each lane, and how many they are. The slot moves on.
    const auto collect = [&](long long &slot, Neighbor &mine, int &place) {
        int n = 0;
        mine = Neighbor{i, {}, one(1)};
        place = -1;
        while (n < @warp@ && slot < end) {
            Neighbor it = mine;
            const unsigned hits = __ballot_sync(0xffffffffu, slot + lane < end && is_close(slot + lane, it));
            const int count = __popc(hits), source = lane_of(hits, lane - n);
            const bool takes = lane >= n && lane - n < count;
            const int j = __shfl_sync(0xffffffffu, it.j, source);
            const one square = __shfl_sync(0xffffffffu, it.square, source);
            if (takes) mine.j = j, mine.square = square, place = static_cast<int>(slot - begin) + source;
            for (int a = 0; a < 3; ++a) {
                const one d = __shfl_sync(0xffffffffu, it.d[a], source);
                if (takes) mine.d[a] = d;
            }
            // what did not fit is looked at again
            slot += count > @warp@ - n ? lane_of(hits, @warp@ - n) : @warp@;
            n = n + count < @warp@ ? n + count : @warp@;
        }
        return n;
    };
    double energy = 0.0, gradient[3] = {}, own_sum = 0.0;
    const auto own_gradients = coefficient_gradients.data + static_cast<long long>(i) * n_coefficients;
    for (int q = lane; q < n_coefficients; q += @warp@) own_gradients[q] = real(0);
    // all lanes take part in each round, with a neighbor or without
    for (long long slot = begin; slot < end;) {
        Neighbor it, k;
        int its_place, place;
        const bool there = lane < collect(slot, it, its_place);
        const real *c_j = coefficients.data + static_cast<long long>(it.j) * n_coefficients;
        const int its_species = species.data[it.j];
        const one c6_ij = signed_product(c_i, c_j), radius_ij = squared_radius(own_species, its_species);
        double total = 0.0, by_c6 = 0.0, g[3] = {};
        for (long long other = begin; other < end;) {
            const int n = collect(other, k, place);
            const real *c_k = coefficients.data + static_cast<long long>(k.j) * n_coefficients;
            const int species_k = species.data[k.j];
            const one c6_ik = signed_product(c_i, c_k), radius_ik = squared_radius(own_species, species_k);
            const one weight_k = weighted ? weights.data[k.j] : one(1);
            for (int first = 0; first < n; first += @at_once@) {
                one c6_jk[@at_once@] = {};
                for (int q = 0; q < n_coefficients; ++q) {
                    const one factor = q < n_positive ? one(c_j[q]) : -one(c_j[q]), its_own = c_k[q];
                    #pragma unroll
                    for (int m = 0; m < @at_once@; ++m)
                        c6_jk[m] += factor * __shfl_sync(0xffffffffu, its_own, first + m);
                }
                #pragma unroll 1
                for (int at = first; at < first + @at_once@; ++at) {
                    const int other_place = __shfl_sync(0xffffffffu, place, at);
                    const one s2 = __shfl_sync(0xffffffffu, k.square, at);
                    one d[3], s3 = one(0), e1, e3;
                    for (int a = 0; a < 3; ++a) {
                        d[a] = __shfl_sync(0xffffffffu, k.d[a], at) - it.d[a];
                        s3 += d[a] * d[a];
                    }
                    const one c6 = c6_ij * __shfl_sync(0xffffffffu, c6_ik, at) * c6_jk[0];
                    const one radius = radius_ij * __shfl_sync(0xffffffffu, radius_ik, at);
                    const int its = __shfl_sync(0xffffffffu, species_k, at);
                    const one other_weight = __shfl_sync(0xffffffffu, weight_k, at);
                    #pragma unroll
                    for (int m = 1; m < @at_once@; ++m) c6_jk[m - 1] = c6_jk[m];  // places are known to the compiler
                    if (!there || at >= n || other_place == its_place || s3 >= limit) continue;
                    const one radii = radius * squared_radius(its_species, its);
                    const one e = triple(it.square, s2, s3, c6, radii, e1, e3);
                    const one weight =
                        weighted ? (weights.data[i] + weights.data[it.j] + other_weight) / one(3) : one(1);
                    total += e;
                    by_c6 += weight * e;
                    for (int a = 0; a < 3; ++a) g[a] += weight * (e1 * it.d[a] - e3 * d[a]);
                }
            }
        }
        energy += total;
        const double factor = c6_ij == one(0) ? 0.0 : 0.5 * by_c6 / c6_ij;
        for (int q = 0; q < n_coefficients; ++q) {
            const double sum = add_up((q < n_positive ? factor : -factor) * c_j[q]);
            if (lane == q % @warp@) own_gradients[q] += sum;
        }
        for (int a = 0; a < 3; ++a) {
            const double of_neighbor = 2.0 * g[a];
            gradient[a] -= of_neighbor;
            // the lane c has the sum of column c
            for (int c = 0; c < 3; ++c) {
                const int shift = periodic && there ? shifts.data[3 * (begin + its_place) + c] : 0;
                const double by_cell = add_up(shift * of_neighbor / 3.0), virial = add_up(of_neighbor * it.d[c] / 3.0);
                if (lane == 3 * c + a) own_sum += by_cell;
                if (lane == 9 + 3 * a + c) own_sum -= virial;
            }
        }
    }
    energy = add_up(energy);
    for (double &part : gradient) part = add_up(part);
    if (lane < @n_sums@) system_sums.data[@n_sums@LL * i + lane] = own_sum;
    if (lane > 0) return;
    energies.data[i] = energy / 6.0;
    for (int a = 0; a < 3; ++a) position_gradients.data[3LL * i + a] = gradient[a];
"""


def _source(precision: str) -> str:
    real = {"float32": "float", "float64": "double"}[precision]
    numbers = {"lanes": LANES, "tile": TILE, "room": MOST_COEFFICIENTS, "warp": WARP, "n_sums": N_SUMS, "real": real}
    numbers |= {"at_once": AT_ONCE}
    common = filled(_COMMON, **numbers)
    return by_device(filled(_CPU, common=common, **numbers), filled(_GPU, common=common, **numbers))


@kernel_variants(("float64",), ("float32",))
def three_body(precision: str) -> Any:
    """The kernel that sums over the triples of an atom."""
    real = getattr(wp, precision)

    @native_kernel(f"three_body_{precision}", _source(precision), lanes=True)
    def kernel(
        i: wp.int32,
        positions: wp.array2d(dtype=real),  # (n_atoms, 3)
        cell: wp.array3d(dtype=real),  # (n_systems, 3, 3), or none
        coefficients: wp.array2d(dtype=real),  # (n_atoms, n_coefficients)
        species: wp.array(dtype=wp.int32),  # (n_atoms,), rows of the radii
        pair_radii: wp.array2d(dtype=real),  # (n_species, n_species)
        weights: wp.array(dtype=real),  # (n_atoms,) of the energies in the sum that is differentiated, or none
        batch_idx: wp.array(dtype=wp.int32),  # (n_atoms,), or none for one system
        row_begin: wp.array(dtype=wp.int32),  # (n_atoms + 1,), or none for rows of equal width
        neighbors: wp.array(dtype=wp.int32),  # (n_slots,)
        shifts: wp.array2d(dtype=wp.int32),  # (n_slots, 3), or none
        width: wp.int32,
        padding: wp.int32,
        n_positive: wp.int32,
        cutoff: wp.float64,
        r_switch: wp.float64,  # sides are switched off from here on, if it is below the cutoff
        energies: wp.array(dtype=real),  # (n_atoms,), without weights
        position_gradients: wp.array2d(dtype=real),  # (n_atoms, 3)
        coefficient_gradients: wp.array2d(dtype=real),  # (n_atoms, n_coefficients)
        system_sums: wp.array2d(dtype=wp.float64),  # (n_atoms, N_SUMS)
    ):
        """Sum over the triples of an atom."""

    return kernel
