"""The Ewald sum as gather kernels.

With charges q, splitting parameter α, cell volume V and total charge Q, the potential at atom i is

    φ_i = Σ_j q_j erfc(α r_ij) / r_ij                                      real space, over the neighbor row
        + 4π/V Σ_{k≠0} exp(-k²/4α²)/k² Re[S(k) exp(-i k.r_i)]              reciprocal space, S(k) = Σ_j q_j exp(i k.r_j)
        - π Q / (α² V)                                                     uniform neutralising background
        - 2α/√π q_i                                                        self interaction

and the energy of atom i is ``q_i φ_i / 2``. The background is what the k = 0 term of the sum leaves when a uniform
charge -Q/V is added, so it travels as the k vector with Miller indices (0, 0, 0).

Each term comes with all first derivatives of the total energy E = Σ_i q_i φ_i / 2: forces ``-dE/dr_i``, charge
gradients ``dE/dq_i = φ_i`` and virials ``-dE/dstrain``, shared out over the atoms. Warp's adjoints of these kernels
are then second derivatives of the energy.

Sources: P. P. Ewald, Ann. Phys. 369, 253 (1921), doi:10.1002/andp.19213690304; S. W. de Leeuw, J. W. Perram and
E. R. Smith, Proc. R. Soc. A 373, 27 (1980), doi:10.1098/rspa.1980.0135; for the virial S. Nosé and M. L. Klein, Mol.
Phys. 50, 1055 (1983), doi:10.1080/00268978300102851; for the background G. Hummer, L. R. Pratt and A. E. García,
J. Phys. Chem. 100, 1206 (1996), doi:10.1021/jp951011v.
"""

from typing import Any

import warp as wp

from nvalchemiops.geometry import lattice_point, reciprocal_point, separation, volume
from nvalchemiops.launch import gather_only, kernel_module, kernel_variants

PI = wp.constant(wp.float64(3.141592653589793))
TWO_OVER_SQRT_PI = wp.constant(wp.float64(1.1283791670955126))


@wp.func
def screened_coulomb(r: wp.float64, alpha: wp.float64):
    """Value and slope of erfc(α r) / r."""
    value = wp.erfc(alpha * r) / r
    slope = -(value + TWO_OVER_SQRT_PI * alpha * wp.exp(-alpha * alpha * r * r)) / r
    return value, slope


@wp.func
def is_origin(miller: wp.vec3i):
    return miller[0] == 0 and miller[1] == 0 and miller[2] == 0


def _finish(kernel: Any, differentiable: bool) -> Any:
    return kernel if differentiable else gather_only(kernel)


def _options(name: str, differentiable: bool) -> dict[str, Any]:
    return {
        "module": kernel_module(f"{name}_differentiable" if differentiable else name),
        "enable_backward": differentiable,
    }


@kernel_variants((False,), (True,))
def real_space(differentiable: bool) -> Any:
    """Kernel for the real-space term: one thread walks the neighbor row of one atom (a full list)."""

    @wp.kernel(**_options("ewald_real_space", differentiable))
    def kernel(
        offset: wp.int32,
        positions: wp.array(dtype=wp.vec3d),  # (n_atoms,)
        charges: wp.array(dtype=wp.float64),  # (n_atoms,)
        cell: wp.array(dtype=wp.mat33d),  # (n_systems,)
        alpha: wp.array(dtype=wp.float64),  # (n_systems,)
        system: wp.array(dtype=wp.int32),  # (n_atoms,)
        begin: wp.array(dtype=wp.int32),  # (n_atoms,), where the row begins ...
        end: wp.array(dtype=wp.int32),  # ... and ends
        index: wp.array(dtype=wp.int32),  # flat rows
        shift: wp.array(dtype=wp.vec3i),
        padding: wp.int32,  # entries of `index` to skip
        with_virial: wp.int32,
        energy: wp.array(dtype=wp.float64),
        force: wp.array(dtype=wp.vec3d),
        potential: wp.array(dtype=wp.float64),
        virial: wp.array(dtype=wp.mat33d),  # (n_atoms,), or empty without `with_virial`
    ):
        i = offset + wp.tid()
        s = system[i]
        phi = wp.float64(0.0)
        field = wp.vec3d()
        stress = wp.mat33d()
        for slot in range(begin[i], end[i]):
            j = index[slot]
            if j != padding:
                d = separation(positions[i], positions[j], shift[slot], cell[s])
                r = wp.length(d)
                value, slope = screened_coulomb(r, alpha[s])
                phi += charges[j] * value
                pull = charges[j] * slope / r * d
                field += pull
                if with_virial != 0:
                    stress += wp.outer(pull, d)
        q = charges[i]
        energy[i] = wp.float64(0.5) * q * phi
        force[i] = q * field
        potential[i] = phi
        if with_virial != 0:
            virial[i] = -wp.float64(0.5) * q * stress

    return _finish(kernel, differentiable)


@kernel_variants((False,), (True,))
def structure_factors(differentiable: bool) -> Any:
    """Kernel for S(k) times its weight in the potential: one thread sums all atoms of the system for one k.

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
        weighted: wp.array(dtype=wp.vec2d),  # (n_k,), real and imaginary part
    ):
        t = offset + wp.tid()
        s = k_system[t]
        k = reciprocal_point(miller[t], cell[s])
        real = wp.float64(0.0)
        imaginary = wp.float64(0.0)
        for slot in range(first_atom[s], first_atom[s + 1]):
            i = atoms[slot]
            phase = wp.dot(k, positions[i])
            real += charges[i] * wp.cos(phase)
            imaginary += charges[i] * wp.sin(phase)
        if is_origin(miller[t]):
            weight = -PI / (alpha[s] * alpha[s] * volume(cell[s]))
            weighted[t] = wp.vec2d(weight * real, wp.float64(0.0))
        else:
            k2 = wp.dot(k, k)
            damping = wp.exp(-k2 / (wp.float64(4.0) * alpha[s] * alpha[s]))
            pair_weight = wp.float64(8.0) * PI * damping / (k2 * volume(cell[s]))
            weighted[t] = wp.vec2d(pair_weight * real, pair_weight * imaginary)

    return _finish(kernel, differentiable)


@kernel_variants((False,), (True,))
def reciprocal_space(differentiable: bool) -> Any:
    """Kernel for the reciprocal-space, background and self terms: one thread sums all k for one atom."""

    @wp.kernel(**_options("ewald_reciprocal_space", differentiable))
    def kernel(
        offset: wp.int32,
        positions: wp.array(dtype=wp.vec3d),
        charges: wp.array(dtype=wp.float64),
        cell: wp.array(dtype=wp.mat33d),
        alpha: wp.array(dtype=wp.float64),
        system: wp.array(dtype=wp.int32),  # (n_atoms,)
        miller: wp.array(dtype=wp.vec3i),  # (n_k,)
        first_k: wp.array(dtype=wp.int32),  # (n_systems + 1,), into `miller`
        weighted: wp.array(dtype=wp.vec2d),  # (n_k,), from `structure_factors`
        with_virial: wp.int32,
        energy: wp.array(dtype=wp.float64),
        force: wp.array(dtype=wp.vec3d),
        potential: wp.array(dtype=wp.float64),
        virial: wp.array(dtype=wp.mat33d),
    ):
        i = offset + wp.tid()
        s = system[i]
        a = alpha[s]
        dual = wp.transpose(wp.inverse(cell[s]))
        x = positions[i]
        phi = wp.float64(0.0)
        slope = wp.vec3d()
        stress = wp.mat33d()
        for t in range(first_k[s], first_k[s + 1]):
            m = miller[t]
            k = wp.float64(2.0) * PI * lattice_point(m, dual)
            phase = wp.dot(k, x)
            c = wp.cos(phase)
            h = wp.sin(phase)
            w = weighted[t]
            part = w[0] * c + w[1] * h
            phi += part
            slope += (w[1] * c - w[0] * h) * k
            if with_virial != 0:
                stress += part * wp.identity(n=3, dtype=wp.float64)
                if not is_origin(m):
                    k2 = wp.dot(k, k)
                    factor = wp.float64(2.0) / k2 + wp.float64(0.5) / (a * a)
                    stress += -part * factor * wp.outer(k, k)
        q = charges[i]
        phi += -TWO_OVER_SQRT_PI * a * q
        energy[i] = wp.float64(0.5) * q * phi
        force[i] = -q * slope
        potential[i] = phi
        if with_virial != 0:
            virial[i] = wp.float64(0.5) * q * stress

    return _finish(kernel, differentiable)
