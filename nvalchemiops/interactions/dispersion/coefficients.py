"""The kernel of the coefficients ``c_iq = Σ_a w_a v_aq`` of D3 and their derivatives.

The weights of the reference states of an atom are ``w_a = N_a / Z`` with ``N_a = exp(k3 (CN - CN_a)²)`` and
``Z = Σ_a N_a``, where CN is the coordination number of the atom. Since N_a is the exponential of a quadratic function,
its n-th derivative with respect to CN is ``N_a H_n`` with

    H_0 = 1,  H_{n+1} = s_a H_n + 2 k3 n H_{n-1},  s_a = 2 k3 (CN - CN_a),

and Leibniz' rule for ``N_a = w_a Z`` gives the derivatives of the weights,

    w_a^(n) = w_a H_n - Σ_{k=1}^{n} binomial(n, k) z_k w_a^(n-k),  z_k = Σ_a w_a H_k.

Source of the weights: S. Grimme, J. Antony, S. Ehrlich and H. Krieg, J. Chem. Phys. 132, 154104 (2010),
doi:10.1063/1.3382344, eq. (16).
"""

from typing import Any

import warp as wp

from nvalchemiops.kernels.native import by_device, filled, native_kernel
from nvalchemiops.kernels.simd import LANES, WARP
from nvalchemiops.launch import kernel_variants

MOST_REFERENCES = 32
"""Largest number of reference molecules of an element, one for each lane of a warp; D3 tables have five or seven."""

_COMMON = """
    const int n_references = places.shape[1], n_coefficients = vectors.shape[1], absent = vectors.shape[0] - 1;
    const auto find_h = [&](double s, double *h) {
        h[0] = 1.0;
        for (int n = 0; n < @order@; ++n) h[n + 1] = s * h[n] + (n > 0 ? 2.0 * k3 * n * h[n - 1] : 0.0);
    };
    // derivatives of a normalised weight, which is the first of them already
    const auto find_w = [](const double *h, const double *z, double *w) {
        for (int n = 1; n <= @order@; ++n) {
            double binomial = 1.0;
            w[n] = w[0] * h[n];
            for (int k = 1; k <= n; ++k) {
                binomial = binomial * (n - k + 1) / k;
                w[n] -= binomial * z[k] * w[n - k];
            }
        }
    };
"""

_CPU = """
    typedef double lanes __attribute__((ext_vector_type(@lanes@)));
    const long long first = static_cast<long long>(row.data[i]) * n_references;
    const double *reference = references.data + first, cn = coordination.data[i];
    const int *place = places.data + first;
    double highest = -INFINITY, nothing = 0.0 * cn;
    for (int a = 0; a < n_references; ++a) {
        nothing += 0.0 * reference[a];  // NaN for elements that are not known
        const double x = cn - reference[a], exponent = k3 * x * x;
        if (place[a] != absent && exponent > highest) highest = exponent;
    }
    // of the states that exist: weights, their vectors, and derivatives of the normalised weights
    int n_states = 0, state[@room@];
    double weight[@room@], value[@room@], change[@room@], z[@order@ + 1] = {}, h[@order@ + 1], w[@order@ + 1];
    const double *vector[@room@];
    for (int a = 0; a < n_references; ++a) {
        if (place[a] == absent) continue;
        const double x = cn - reference[a];
        weight[n_states] = exp(k3 * x * x - highest);  // right also where the exponentials themselves would vanish
        vector[n_states] = vectors.data + static_cast<long long>(place[a]) * n_coefficients;
        state[n_states] = a;
        find_h(2.0 * k3 * x, h);
        for (int n = 0; n <= @order@; ++n) z[n] += weight[n_states] * h[n];
        ++n_states;
    }
    for (int n = 1; n <= @order@; ++n) z[n] /= z[0];
    for (int s = 0; s < n_states; ++s) {
        find_h(2.0 * k3 * (cn - reference[state[s]]), h);
        w[0] = weight[s] / z[0];
        find_w(h, z, w);
        value[s] = w[@order@ - 1];
        change[s] = w[@order@];
    }
    double *const own = values.data + static_cast<long long>(i) * n_coefficients;
    double *const own_derivatives = derivatives.data + static_cast<long long>(i) * n_coefficients;
    const auto add = [&](auto start, int q) {
        typedef decltype(start) number;
        struct __attribute__((packed)) Anywhere { number n; };
        number sum = start, derivative = start;
        for (int s = 0; s < n_states; ++s) {
            const number v = reinterpret_cast<const Anywhere *>(vector[s] + q)->n;
            sum += value[s] * v;
            derivative += change[s] * v;
        }
        reinterpret_cast<Anywhere *>(own + q)->n = sum;
        reinterpret_cast<Anywhere *>(own_derivatives + q)->n = derivative;
    };
    // the last vector overlaps with the one before
    if (n_coefficients >= @lanes@)
        for (int q = 0; q < n_coefficients; q += @lanes@)
            add(lanes(nothing), q < n_coefficients - @lanes@ ? q : n_coefficients - @lanes@);
    else
        for (int q = 0; q < n_coefficients; ++q) add(nothing, q);
"""

_GPU = """
    const int lane = threadIdx.x & (@warp@ - 1);
    const auto add_up = [](double sum) {
        for (int step = @warp@ / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        return sum;
    };
    // each lane has one of the reference states, or none
    const long long at = static_cast<long long>(row.data[i]) * n_references + lane;
    const double cn = coordination.data[i], reference = lane < n_references ? references.data[at] : 0.0;
    const int place = lane < n_references ? places.data[at] : absent;
    const double nothing = 0.0 * cn + add_up(0.0 * reference);  // NaN for elements that are not known
    const double x = cn - reference, exponent = k3 * x * x;
    double highest = place == absent ? -INFINITY : exponent;
    for (int step = @warp@ / 2; step > 0; step /= 2) {
        const double other = __shfl_xor_sync(0xffffffffu, highest, step);
        highest = other > highest ? other : highest;
    }
    const double weight = place == absent ? 0.0 : exp(exponent - highest);
    double z[@order@ + 1], h[@order@ + 1], w[@order@ + 1];
    find_h(2.0 * k3 * x, h);
    for (int n = 0; n <= @order@; ++n) z[n] = add_up(weight * h[n]);
    for (int n = 1; n <= @order@; ++n) z[n] /= z[0];
    w[0] = weight / z[0];
    find_w(h, z, w);
    for (int first = 0; first < n_coefficients; first += @warp@) {
        const int q = first + lane;
        double sum = nothing, derivative = nothing;
        for (int state = 0; state < n_references; ++state) {
            const int its_place = __shfl_sync(0xffffffffu, place, state);
            const double value = __shfl_sync(0xffffffffu, w[@order@ - 1], state);
            const double change = __shfl_sync(0xffffffffu, w[@order@], state);
            if (its_place == absent || q >= n_coefficients) continue;
            const double v = vectors.data[static_cast<long long>(its_place) * n_coefficients + q];
            sum += value * v;
            derivative += change * v;
        }
        if (q >= n_coefficients) continue;
        values.data[static_cast<long long>(i) * n_coefficients + q] = sum;
        derivatives.data[static_cast<long long>(i) * n_coefficients + q] = derivative;
    }
"""


@kernel_variants((0,), (1,))
def coefficients(derivative: int) -> Any:
    """The kernel that computes the derivatives of this order and of the next order."""
    numbers = {"order": derivative + 1, "room": MOST_REFERENCES, "lanes": LANES, "warp": WARP}
    body = filled(_COMMON + by_device(_CPU, _GPU), **numbers)

    @native_kernel(f"d3_coefficients_{derivative}", body, lanes=True)
    def kernel(
        i: wp.int32,
        coordination: wp.array(dtype=wp.float64),  # (n_atoms,)
        row: wp.array(dtype=wp.int32),  # (n_atoms,), into the next two
        references: wp.array2d(dtype=wp.float64),  # (n_rows, n_references), coordination numbers
        places: wp.array2d(dtype=wp.int32),  # (n_rows, n_references), rows of vectors; the last one for nothing
        vectors: wp.array2d(dtype=wp.float64),  # (n_states + 1, n_coefficients), the last one zero
        k3: wp.float64,
        values: wp.array2d(dtype=wp.float64),  # (n_atoms, n_coefficients)
        derivatives: wp.array2d(dtype=wp.float64),
    ):
        """Sum over the reference states of an atom."""

    return kernel
