"""The reciprocal part of the Ewald sum as gather kernels.

With charges q, splitting parameter α, cell volume V and total charge Q, the potential at atom i is

    φ_i = Σ_j q_j erfc(α r_ij) / r_ij                                      real space, over the neighbor row
        + 4π/V Σ_{k≠0} exp(-k²/4α²)/k² Re[S(k) exp(-i k.r_i)]              reciprocal space, S(k) = Σ_j q_j exp(i k.r_j)
        - π Q / (α² V)                                                     uniform neutralising background
        - 2α/√π q_i                                                        self interaction

and the energy of atom i is ``q_i φ_i / 2``. The background is what the k = 0 term of the sum leaves when a uniform
charge -Q/V is added, so it travels as the k vector with Miller indices (0, 0, 0).

Each term comes with all first derivatives of the total energy E = Σ_i q_i φ_i / 2: forces ``-dE/dr_i``, charge
gradients ``dE/dq_i = φ_i`` and virials ``-dE/dstrain``, shared out over the atoms. Warp's adjoints of these kernels
are then second derivatives of the energy. Outputs are plain sums, accumulated in their loops: Warp's adjoint takes a
variable that a loop has changed at its initial value, so nothing may multiply a finished sum.

Sources: P. P. Ewald, Ann. Phys. 369, 253 (1921), doi:10.1002/andp.19213690304; S. W. de Leeuw, J. W. Perram and
E. R. Smith, Proc. R. Soc. A 373, 27 (1980), doi:10.1098/rspa.1980.0135; for the virial S. Nosé and M. L. Klein, Mol.
Phys. 50, 1055 (1983), doi:10.1080/00268978300102851; for the background G. Hummer, L. R. Pratt and A. E. García,
J. Phys. Chem. 100, 1206 (1996), doi:10.1021/jp951011v.
"""

from typing import Any

import warp as wp

from nvalchemiops.geometry import reciprocal_point, volume
from nvalchemiops.launch import gather_only, kernel_module, kernel_variants

PI = wp.constant(wp.float64(3.141592653589793))
TWO_OVER_SQRT_PI = wp.constant(wp.float64(1.1283791670955126))


@wp.func
def is_origin(miller: wp.vec3i):
    """Whether these are the Miller indices of k = 0, which stands for the background."""
    return miller[0] == 0 and miller[1] == 0 and miller[2] == 0


@wp.func
def potential_weight(miller: wp.vec3i, k: wp.vec3d, alpha: wp.float64, volume: wp.float64):
    """Factor of S(k) in the potential, for k and -k together; for the origin that of the background."""
    if is_origin(miller):
        return -PI / (alpha * alpha * volume)
    k2 = wp.dot(k, k)
    return wp.float64(8.0) * PI * wp.exp(-k2 / (wp.float64(4.0) * alpha * alpha)) / (k2 * volume)


@wp.func
def strain_factor(miller: wp.vec3i, k: wp.vec3d, alpha: wp.float64):
    """Minus the logarithmic derivative of `potential_weight` by strain: 1 - 2 k k^T (1/k² + 1/4α²)."""
    unit = wp.identity(n=3, dtype=wp.float64)
    if is_origin(miller):
        return unit
    factor = wp.float64(2.0) / wp.dot(k, k) + wp.float64(0.5) / (alpha * alpha)
    return unit - factor * wp.outer(k, k)


def _finish(kernel: Any, differentiable: bool) -> Any:
    return kernel if differentiable else gather_only(kernel)


def _options(name: str, differentiable: bool) -> dict[str, Any]:
    return {
        "module": kernel_module(f"{name}_differentiable" if differentiable else name),
        "enable_backward": differentiable,
    }


@kernel_variants((False,), (True,))
def structure_factors(differentiable: bool) -> Any:
    """Kernel for k and S(k) times its weight in the potential: one thread sums all atoms of the system for one k.

    The list of k vectors holds one of each pair k, -k (weight 2), and (0, 0, 0) for the background.
    """

    @wp.kernel(**_options("ewald_structure_factors", differentiable))
    def kernel(
        offset: wp.int32,
        positions: wp.array(dtype=wp.vec3d),
        charges: wp.array(dtype=wp.float64),
        cell: wp.array(dtype=wp.mat33d),
        alpha: wp.array(dtype=wp.float64),
        atoms: wp.array(dtype=wp.int32),  # (n_atoms,), sorted by system
        first_atom: wp.array(dtype=wp.int32),  # (n_systems + 1,), into `atoms`
        miller: wp.array(dtype=wp.vec3i),  # (n_k,), sorted by system
        k_system: wp.array(dtype=wp.int32),  # (n_k,)
        k_vectors: wp.array(dtype=wp.vec3d),  # (n_k,)
        weighted: wp.array(dtype=wp.vec2d),  # (n_k,), real and imaginary part
    ):
        t = offset + wp.tid()
        s = k_system[t]
        k = reciprocal_point(miller[t], cell[s])
        weight = potential_weight(miller[t], k, alpha[s], volume(cell[s]))
        real = wp.float64(0.0)
        imaginary = wp.float64(0.0)
        for slot in range(first_atom[s], first_atom[s + 1]):
            i = atoms[slot]
            phase = wp.dot(k, positions[i])
            real += weight * charges[i] * wp.cos(phase)
            imaginary += weight * charges[i] * wp.sin(phase)
        k_vectors[t] = k
        weighted[t] = wp.vec2d(real, imaginary)

    return _finish(kernel, differentiable)


@kernel_variants((False,), (True,))
def reciprocal_space(differentiable: bool) -> Any:
    """Kernel for the reciprocal-space, background and self terms: one thread sums all k for one atom."""

    @wp.kernel(**_options("ewald_reciprocal_space", differentiable))
    def kernel(
        offset: wp.int32,
        positions: wp.array(dtype=wp.vec3d),
        charges: wp.array(dtype=wp.float64),
        alpha: wp.array(dtype=wp.float64),
        system: wp.array(dtype=wp.int32),  # (n_atoms,)
        miller: wp.array(dtype=wp.vec3i),  # (n_k,)
        first_k: wp.array(dtype=wp.int32),  # (n_systems + 1,), into `miller`
        k_vectors: wp.array(dtype=wp.vec3d),  # (n_k,), from `structure_factors`
        weighted: wp.array(dtype=wp.vec2d),  # (n_k,), likewise
        with_virial: wp.int32,
        energy: wp.array(dtype=wp.float64),
        force: wp.array(dtype=wp.vec3d),
        potential: wp.array(dtype=wp.float64),
        virial: wp.array(dtype=wp.mat33d),
    ):
        i = offset + wp.tid()
        s = system[i]
        x = positions[i]
        q = charges[i]
        self_potential = -TWO_OVER_SQRT_PI * alpha[s] * q
        e = wp.float64(0.5) * q * self_potential
        f = wp.vec3d()
        phi = self_potential
        stress = wp.mat33d()
        for t in range(first_k[s], first_k[s + 1]):
            k = k_vectors[t]
            phase = wp.dot(k, x)
            c = wp.cos(phase)
            h = wp.sin(phase)
            part = weighted[t][0] * c + weighted[t][1] * h
            e += wp.float64(0.5) * q * part
            f += q * (weighted[t][0] * h - weighted[t][1] * c) * k
            phi += part
            if with_virial != 0:
                stress += wp.float64(0.5) * q * part * strain_factor(miller[t], k, alpha[s])
        energy[i] = e
        force[i] = f
        potential[i] = phi
        if with_virial != 0:
            virial[i] = stress

    return _finish(kernel, differentiable)
