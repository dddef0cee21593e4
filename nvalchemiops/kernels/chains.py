"""Nosé-Hoover chains: the flow of the thermostats of each system (`nvalchemiops.torch.operators.chains`)."""

from typing import Any

import warp as wp

from nvalchemiops.kernels.native import native_kernel
from nvalchemiops.launch import kernel_variants

_OUTER = 1.0 / (2.0 - 2.0 ** (1.0 / 3.0))
SUZUKI_YOSHIDA = (_OUTER, 1.0 - 2.0 * _OUTER, _OUTER)
"""Three steps of second order that make one of fourth order. Source: H. Yoshida, Phys. Lett. A 150, 262 (1990),
doi:10.1016/0375-9601(90)90092-3."""

_CHAIN = f"""
    const double outer = {SUZUKI_YOSHIDA[0]!r}, inner = {SUZUKI_YOSHIDA[1]!r};
"""
_CHAIN += """
    const int length = velocities.shape[1];
    const long long first = 1LL * thread * length;
    const double wanted = targets.data[thread], kt = temperatures.data[thread], *q = masses.data + first;
    double energy = energies.data[thread], log_scale = 0.0;
    double *x = moved.data + first, *u = pushed.data + first;
    for (int k = 0; k < length; ++k) {
        x[k] = positions.data[first + k];
        u[k] = velocities.data[first + k];
    }
    const auto push = [&](int k, double time) {
        const double force = (k ? q[k - 1] * u[k - 1] * u[k - 1] - kt : energy - wanted) / q[k];
        if (k == length - 1) {
            u[k] += 0.5 * time * force;
        } else {
            const double damping = wp::exp(-0.25 * time * u[k + 1]);
            u[k] = (u[k] * damping + 0.5 * time * force) * damping;
        }
    };
    for (int n = 0; n < 3 * loops; ++n) {
        const double time = times.data[thread] * (n % 3 == 1 ? inner : outer) / loops;
        for (int k = length - 1; k >= 0; --k) push(k, time);
        for (int k = 0; k < length; ++k) x[k] += time * u[k];
        log_scale -= time * u[0];
        energy *= wp::exp(-2.0 * time * u[0]);
        for (int k = 0; k < length; ++k) push(k, time);
    }
    log_scales.data[thread] = log_scale;
"""


@kernel_variants(())
def chain_kernel() -> Any:
    """The kernel that moves the chain of each system."""

    @native_kernel("nose_hoover_chains", _CHAIN)
    def kernel(
        thread: wp.int32,
        positions: wp.array2d(dtype=wp.float64),  # (n_systems, length)
        velocities: wp.array2d(dtype=wp.float64),  # (n_systems, length)
        energies: wp.array(dtype=wp.float64),  # (n_systems,), Σ m v²
        targets: wp.array(dtype=wp.float64),  # (n_systems,), its mean, g kT
        temperatures: wp.array(dtype=wp.float64),  # (n_systems,), kT
        masses: wp.array2d(dtype=wp.float64),  # (n_systems, length)
        times: wp.array(dtype=wp.float64),  # (n_systems,)
        loops: wp.int32,  # repetitions
        moved: wp.array2d(dtype=wp.float64),  # (n_systems, length), positions
        pushed: wp.array2d(dtype=wp.float64),  # (n_systems, length), velocities
        log_scales: wp.array(dtype=wp.float64),  # (n_systems,), logarithm of the factor of v
    ):
        """Move the chain of a system."""

    return kernel
