"""Kernels that nvalchemi-toolkit launches itself, by their lists of arguments: Lennard-Jones and reciprocal Ewald sums.

``wp.launch`` takes kernels only, so these cannot be views of the library's operators, which have other arguments and
more threads per atom. They compute in float64, write into arrays of zeros, and are not differentiable; everything else
uses the operators.
"""

import enum
import functools
import math
from typing import Any, NamedTuple

import warp as wp

from nvalchemiops._warp_internals import source_of
from nvalchemiops.kernels.native import defined
from nvalchemiops.launch import kernel_module
from nvalchemiops.neighbors.rows import NOWHERE
from nvalchemiops.types import REAL

EIGHTPI = 8.0 * math.pi
"""Prefactor of 1/(V k²) if k-vectors are half of the sphere, in a sum that is halved afterwards."""

BATCH_BLOCK_SIZE = 1 << 30
"""Atoms of a system that one thread sums for a k-vector: all of them, so that sums have one order."""


@wp.func
def _lj_pair(r: wp.float64, epsilon: wp.float64, sigma: wp.float64, cutoff: wp.float64, width: wp.float64) -> wp.vec2d:
    """Energy of a pair and its derivative, switched off by 1 - 10 x³ + 15 x⁴ - 6 x⁵ over the last ``width``."""
    s6 = wp.pow(sigma / r, wp.float64(6.0))
    u = wp.float64(4.0) * epsilon * (s6 * s6 - s6)
    du = wp.float64(-24.0) * epsilon * (wp.float64(2.0) * s6 * s6 - s6) / r
    x = r - (cutoff - width)
    if width > wp.float64(0.0) and x > wp.float64(0.0):
        x = x / width
        y = wp.float64(1.0) - x
        s = wp.float64(1.0) - x * x * x * (wp.float64(10.0) - x * (wp.float64(15.0) - wp.float64(6.0) * x))
        ds = wp.float64(-30.0) * x * x * y * y / width
        du = du * s + u * ds
        u = u * s
    return wp.vec2d(u, du)


@functools.cache
def lj_kernel(precision: str, with_virial: bool) -> wp.Kernel:
    """Energies and forces of atoms, and virials ``-dE/dstrain`` (n_systems, 9), from a neighbor matrix."""
    real, vec3, mat33 = REAL[precision]

    @wp.func
    def of_atom(
        i: wp.int32,
        positions: wp.array(dtype=vec3),
        cells: wp.array(dtype=mat33),
        matrix: wp.array2d(dtype=wp.int32),
        shifts: wp.array2d(dtype=wp.vec3i),
        counts: wp.array(dtype=wp.int32),
        batch_idx: wp.array(dtype=wp.int32),
        epsilon: wp.array(dtype=real),
        sigma: wp.array(dtype=real),
        cutoff: wp.array(dtype=real),
        width: wp.array(dtype=real),
        half: wp.bool,
        fill_value: wp.int32,
        energies: wp.array(dtype=real),
        forces: wp.array(dtype=vec3),
    ) -> wp.mat33d:
        cell = wp.transpose(wp.mat33d(cells[batch_idx[i]]))
        here = wp.vec3d(positions[i])
        # NaN for an atom without a place, which may have an empty row
        energy = wp.float64(0.0) * (here[0] + here[1] + here[2])
        force = wp.vec3d(energy)
        virial = wp.mat33d(energy)
        for slot in range(wp.min(counts[i], matrix.shape[1])):
            j = matrix[i, slot]
            shift = shifts[i, slot]
            is_itself = j == i and shift == wp.vec3i(0, 0, 0)  # padding, as in all sums over pairs
            if j != fill_value and j >= 0 and j < positions.shape[0] and not is_itself:
                image = wp.vec3d(wp.float64(shift[0]), wp.float64(shift[1]), wp.float64(shift[2]))
                vector = wp.vec3d(positions[j]) - here + cell * image
                r = wp.length(vector)
                if shift[0] == wp.static(NOWHERE):
                    r = wp.float64(wp.nan)
                if not (r >= wp.float64(cutoff[0])):  # also for NaN
                    pair = _lj_pair(
                        r,
                        wp.float64(epsilon[0]),
                        wp.float64(sigma[0]),
                        wp.float64(cutoff[0]),
                        wp.float64(width[0]),
                    )
                    pull = vector * (pair[1] / r)
                    share = wp.float64(0.5)
                    if half:
                        share = wp.float64(1.0)
                        wp.atomic_add(energies, j, real(wp.float64(0.5) * pair[0]))
                        wp.atomic_add(forces, j, vec3(-pull))
                    energy += wp.float64(0.5) * pair[0]
                    force += pull
                    virial -= share * wp.outer(vector, pull)
        wp.atomic_add(energies, i, real(energy))
        wp.atomic_add(forces, i, vec3(force))
        return virial

    @wp.func
    def add_virial(
        i: wp.int32, batch_idx: wp.array(dtype=wp.int32), virial: wp.mat33d, virials: wp.array2d(dtype=real)
    ):
        for a in range(3):
            for b in range(3):
                wp.atomic_add(virials, batch_idx[i], 3 * a + b, real(virial[a, b]))

    # a kernel with the parameters of the function, without or with the virials
    types = dict(source_of(of_atom)[1].__annotations__)
    del types["i"], types["return"]
    text = f"    virial = of_atom(wp.tid(), {', '.join(types)})\n"
    if with_virial:
        types["virials"] = wp.array2d(dtype=real)
        text += "    add_virial(wp.tid(), batch_idx, virial, virials)\n"
    text = f"def lennard_jones({', '.join(types)}):\n{text}"
    kernel = defined("lennard_jones", text, of_atom=of_atom, add_virial=add_virial)
    kernel.__annotations__ = types
    name = "client_lj_virial" if with_virial else "client_lj"
    return wp.kernel(module=kernel_module(f"{name}_{precision}"), enable_backward=False)(kernel)


class ByScalar:
    """Kernels by the Warp scalar type of their arrays."""

    def __init__(self, with_virial: bool) -> None:
        self._with_virial = with_virial

    def __getitem__(self, scalar: Any) -> wp.Kernel:
        return lj_kernel(_precision(scalar), self._with_virial)


_batch_lj_energy_forces_matrix_kernel_overload = ByScalar(False)
_batch_lj_energy_forces_virial_matrix_kernel_overload = ByScalar(True)


class _DerivState(enum.Enum):
    """Which derivatives a kernel computes. These kernels tell it by their arguments."""

    E = "energies"
    E_F = "energies, forces"
    E_F_dQ = "energies, forces, charge gradients"


class EwaldKernels(NamedTuple):
    """Structure factors, what atoms get from them, and virials.

    Attributes
    ----------
    fill : wp.Kernel
        ``S(k) = G(k) Σ_i q_i exp(i k·r_i)`` with ``G = 8π/(V k²) exp(-k²/4α²)``, total charges, cosines and sines.
    compute : wp.Kernel
        Energies, forces and, if their array is not empty, charge gradients, from S.
    virial : wp.Kernel
        ``-dE/dstrain`` from S.
    """

    fill: wp.Kernel
    compute: wp.Kernel
    virial: wp.Kernel


def get_ewald_recip_kernel(
    scalar: Any, batched: bool = False, deriv_state: Any = None, cell_grad: bool = False, order: str = "forward"
) -> EwaldKernels:
    """The kernels for arrays of this scalar type; ``deriv_state`` and ``cell_grad`` change nothing."""
    if order != "forward":
        raise ValueError(f"`order` must be 'forward': these kernels have no adjoints, got {order!r}")
    return ewald_kernels(_precision(scalar), bool(batched))


def alloc_ewald_recip_sentinels(scalar: Any, device: Any) -> dict[str, wp.array]:
    """Arrays without elements, for arguments of the kernels that are not wanted."""
    names = ("charge_gradients", "grad_energy")
    return {name: wp.empty((0,), dtype=wp.float64, device=device) for name in names}


def _precision(scalar: Any) -> str:
    if scalar not in (wp.float32, wp.float64):
        raise ValueError(f"`scalar` must be wp.float32 or wp.float64, got {scalar!r}")
    return "float64" if scalar == wp.float64 else "float32"


@functools.cache
def ewald_kernels(precision: str, batched: bool) -> EwaldKernels:
    """See `EwaldKernels`."""
    real, vec3, mat33 = REAL[precision]
    name = f"client_ewald_{'batch_' if batched else ''}{precision}"

    @wp.func
    def green(k2: wp.float64, volume: wp.float64, alpha: wp.float64) -> wp.float64:
        if k2 < wp.float64(1.0e-10):
            return wp.float64(0.0)
        return wp.float64(8.0) * wp.float64(wp.PI) * wp.exp(-k2 / (wp.float64(4.0) * alpha * alpha)) / (volume * k2)

    @wp.func
    def structure_factor(
        n: wp.int32,
        wave: wp.vec3d,
        cell: mat33,
        alpha: real,
        begin: wp.int32,
        end: wp.int32,
        positions: wp.array(dtype=vec3),
        charges: wp.array(dtype=real),
        cosines: wp.array2d(dtype=wp.float64),
        sines: wp.array2d(dtype=wp.float64),
    ) -> wp.vec3d:
        weight = green(wp.dot(wave, wave), wp.abs(wp.determinant(wp.mat33d(cell))), wp.float64(alpha))
        total = wp.vec3d()
        for i in range(begin, end):
            phase = wp.dot(wave, wp.vec3d(positions[i]))
            q = wp.float64(charges[i])
            c = wp.cos(phase)
            s = wp.sin(phase)
            cosines[n, i] = c
            sines[n, i] = s
            total += wp.vec3d(weight * q * c, weight * q * s, q)
        return total

    @wp.func
    def virial_of(wave: wp.vec3d, alpha: wp.float64, volume: wp.float64, re: wp.float64, im: wp.float64) -> wp.mat33d:
        k2 = wp.dot(wave, wave)
        weight = green(k2, volume, alpha)
        if weight == wp.float64(0.0):
            return wp.mat33d()
        energy = wp.float64(0.5) * (re * re + im * im) / weight
        slope = wp.float64(2.0) * (wp.float64(1.0) / k2 + wp.float64(0.25) / (alpha * alpha))
        return energy * (wp.identity(3, dtype=wp.float64) - slope * wp.outer(wave, wave))

    @wp.kernel(module=kernel_module(f"{name}_compute"), enable_backward=False)
    def compute(
        charges: wp.array(dtype=real),
        batch_idx: wp.array(dtype=wp.int32),
        k_vectors: wp.array2d(dtype=vec3),
        cosines: wp.array2d(dtype=wp.float64),
        sines: wp.array2d(dtype=wp.float64),
        re: wp.array2d(dtype=wp.float64),
        im: wp.array2d(dtype=wp.float64),
        grad_energy: wp.array(dtype=wp.float64),
        energies: wp.array(dtype=wp.float64),
        forces: wp.array(dtype=vec3),
        charge_gradients: wp.array(dtype=wp.float64),
    ):
        i = wp.tid()
        system = wp.int32(0)
        if batch_idx.shape[0] > 0:
            system = batch_idx[i]
        potential = wp.float64(0.0)
        slope = wp.vec3d()
        for n in range(k_vectors.shape[1]):
            c = cosines[n, i]
            s = sines[n, i]
            potential += c * re[system, n] + s * im[system, n]
            slope += wp.vec3d(k_vectors[system, n]) * (c * im[system, n] - s * re[system, n])
        q = wp.float64(charges[i])
        energies[i] = wp.float64(0.5) * q * potential
        forces[i] = vec3(-q * slope)
        if charge_gradients.shape[0] > 0:
            charge_gradients[i] = potential

    if batched:

        @wp.kernel(module=kernel_module(f"{name}_fill"), enable_backward=False)
        def fill_batch(
            positions: wp.array(dtype=vec3),
            charges: wp.array(dtype=real),
            k_vectors: wp.array2d(dtype=vec3),
            cells: wp.array(dtype=mat33),
            alpha: wp.array(dtype=real),
            begin: wp.array(dtype=wp.int32),
            end: wp.array(dtype=wp.int32),
            total_charge: wp.array(dtype=wp.float64),
            cosines: wp.array2d(dtype=wp.float64),
            sines: wp.array2d(dtype=wp.float64),
            re: wp.array2d(dtype=wp.float64),
            im: wp.array2d(dtype=wp.float64),
        ):
            n, system, block = wp.tid()
            if block > 0:  # there is none below BATCH_BLOCK_SIZE atoms
                return
            wave = wp.vec3d(k_vectors[system, n])
            found = structure_factor(
                n, wave, cells[system], alpha[system], begin[system], end[system], positions, charges, cosines, sines
            )
            re[system, n] = found[0]
            im[system, n] = found[1]
            if n == 0:
                total_charge[system] = found[2]

        @wp.kernel(module=kernel_module(f"{name}_virial"), enable_backward=False)
        def virial_batch(
            k_vectors: wp.array2d(dtype=vec3),
            alpha: wp.array(dtype=real),
            volume: wp.array(dtype=wp.float64),
            re: wp.array2d(dtype=wp.float64),
            im: wp.array2d(dtype=wp.float64),
            virial: wp.array(dtype=mat33),
        ):
            n, system = wp.tid()
            found = virial_of(
                wp.vec3d(k_vectors[system, n]), wp.float64(alpha[system]), volume[system], re[system, n], im[system, n]
            )
            wp.atomic_add(virial, system, mat33(found))

        return EwaldKernels(fill_batch, compute, virial_batch)

    @wp.kernel(module=kernel_module(f"{name}_fill"), enable_backward=False)
    def fill(
        positions: wp.array(dtype=vec3),
        charges: wp.array(dtype=real),
        k_vectors: wp.array(dtype=vec3),
        cell: wp.array(dtype=mat33),
        alpha: wp.array(dtype=real),
        total_charge: wp.array(dtype=wp.float64),
        cosines: wp.array2d(dtype=wp.float64),
        sines: wp.array2d(dtype=wp.float64),
        re: wp.array(dtype=wp.float64),
        im: wp.array(dtype=wp.float64),
    ):
        n = wp.tid()
        wave = wp.vec3d(k_vectors[n])
        found = structure_factor(n, wave, cell[0], alpha[0], 0, positions.shape[0], positions, charges, cosines, sines)
        re[n] = found[0]
        im[n] = found[1]
        if n == 0:
            total_charge[0] = found[2]

    @wp.kernel(module=kernel_module(f"{name}_virial"), enable_backward=False)
    def virial(
        k_vectors: wp.array(dtype=vec3),
        alpha: wp.array(dtype=real),
        volume: wp.array(dtype=wp.float64),
        re: wp.array(dtype=wp.float64),
        im: wp.array(dtype=wp.float64),
        virial: wp.array(dtype=mat33),
    ):
        n = wp.tid()
        found = virial_of(wp.vec3d(k_vectors[n]), wp.float64(alpha[0]), volume[0], re[n], im[n])
        wp.atomic_add(virial, 0, mat33(found))

    return EwaldKernels(fill, compute, virial)
