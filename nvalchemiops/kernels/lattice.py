"""Lattice geometry: displacements between images, dual vectors, the shortest vectors of a lattice.

Conventions: ``cell[a]`` is lattice vector a; cells may be left-handed. Image S of atom j is at ``x_j + S @ cell``, so
its displacement from atom i is ``r_ij = x_j - x_i + S @ cell``. Arithmetic is in float64.
"""

import math
from typing import Any

import numpy as np
import warp as wp

from nvalchemiops._warp import ensure_warp
from nvalchemiops.arguments import ValuesError
from nvalchemiops.launch import gather_only, kernel_module, kernel_variants, launch
from nvalchemiops.types import REAL

SMALLEST_VOLUME_RATIO = 1e-10
"""Smallest volume spanned by the periodic lattice vectors, relative to the product of their lengths. Below it, the
positions of images depend on rounding of the cell."""


@wp.func
def lattice_point(shift: wp.vec3i, cell: wp.mat33d):
    """Position ``S @ cell`` of the image with integer coordinates ``shift``."""
    return wp.float64(shift[0]) * cell[0] + wp.float64(shift[1]) * cell[1] + wp.float64(shift[2]) * cell[2]


@wp.func
def separation(x_i: wp.vec3d, x_j: wp.vec3d, shift: wp.vec3i, cell: wp.mat33d):
    """Displacement ``x_j - x_i + S @ cell`` from atom i to atom j in image ``shift``."""
    return x_j - x_i + lattice_point(shift, cell)


def dual_vectors(cell: np.ndarray, pbc: np.ndarray) -> np.ndarray:
    """Dual basis of the periodic lattice vectors within the space that they span.

    Parameters
    ----------
    cell : (n_systems, 3, 3) array
        Rows along open axes are never read.
    pbc : (n_systems, 3) bool array

    Returns
    -------
    (n_systems, 3, 3) float64 array
        Row a is the vector with ``dual[a] . cell[b] = 1 if a == b else 0`` for periodic axes a and b, and zero for an
        open axis a. ``1 / |dual[a]|`` is the distance between lattice planes along a.

    Raises
    ------
    ValueError
        Periodic lattice vectors are zero, not finite, or linearly dependent; the message names ``cell``.
    """
    units, lengths = unit_vectors(cell, pbc)
    dual = np.linalg.pinv(units, rcond=1e-14).transpose(0, 2, 1) / lengths[:, :, None]
    # exactly zero along open axes: rounding errors would look like planes at a large but finite distance
    return np.ascontiguousarray(np.where(pbc[:, :, None], dual, 0.0))


def is_clearly_regular(cell: Any) -> bool:
    """Whether lattice vectors are finite and far from dependent: numbers (3, 3), or an array (3, 3, n_systems).

    A quick test that spares most calls `unit_vectors`, which decides if this is False.
    """
    (ax, ay, az), (bx, by, bz), (cx, cy, cz) = cell
    volume = ax * (by * cz - bz * cy) + ay * (bz * cx - bx * cz) + az * (bx * cy - by * cx)
    # the squares of the area of two vectors, of the product of all lengths, and of the volume
    area = (bx * bx + by * by + bz * bz) * (cx * cx + cy * cy + cz * cz)
    lengths, volume = (ax * ax + ay * ay + az * az) * area, volume * volume
    # products that are too small have few digits, and those that are too large none; False for NaN
    found = (area > 1e-290) & (lengths > 1e-290) & (1e-12 * lengths < volume) & (volume < math.inf)
    return found if isinstance(found, bool) else bool(found.all())


def unit_vectors(cell: np.ndarray, pbc: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Directions (n_systems, 3, 3) and lengths (n_systems, 3) of the periodic lattice vectors.

    Along open axes the direction is a zero vector and the length is one. Arguments and errors are as for
    `dual_vectors`.
    """
    rows = np.where(pbc[:, :, None], np.asarray(cell, dtype=np.float64), 0.0)
    if not np.isfinite(rows).all():
        raise ValuesError("`cell` has entries that are not finite along a periodic axis")
    lengths = np.where(pbc, np.linalg.norm(rows, axis=2), 1.0)
    if (lengths == 0.0).any():
        raise ValuesError("`cell` has a zero lattice vector along a periodic axis")
    units = rows / lengths[:, :, None]
    # The volume spanned by the unit vectors of the periodic axes is the product of the n_periodic largest singular
    # values; those of open axes are zero and come last. A Gram determinant would lose half of the digits.
    values = np.linalg.svd(units, compute_uv=False)
    n_periodic = pbc.sum(1, keepdims=True)
    ratio = np.where(np.arange(3) < n_periodic, values, 1.0).prod(1)
    if (ratio < SMALLEST_VOLUME_RATIO).any():
        system = int(np.argmin(ratio))
        raise ValuesError(f"`cell` is singular: the periodic lattice vectors of system {system} are linearly dependent")
    return units, lengths


MOST_STEPS = 1000
"""Largest number of steps of `shortest_basis`, as a safeguard: each step shortens a vector, so few are needed."""

WORTH_CHANGING = 0.9
"""Ratio of the products of their lengths below which the shortest vectors of a lattice are used instead of the given
ones. Cells with angles of 60 to 120 degrees between vectors of equal length, and those that change a little, keep their
vectors."""

LARGEST_NUMBER = 2.0**30
"""Largest coefficient of a combination of lattice vectors: they are int32."""


@wp.func
def shortest_basis(vectors: wp.mat33d, numbers: wp.mat33d):
    """The three shortest lattice vectors that form a basis, and ``numbers`` in this basis.

    Each vector is shortened by multiples of another vector, as in Lagrange's reduction in two dimensions, and by
    multiples of the sum and the difference of the two others, until no such step shortens any vector. Then the basis is
    Minkowski-reduced. Source: I. Semaev, in Cryptography and Lattices, Lecture Notes in Computer Science 2146, 181
    (2001), doi:10.1007/3-540-44670-2_13.

    Rows of ``numbers`` are combined as the vectors are. For the coefficients of the combinations, begin with an
    identity matrix.
    """
    # a step that shortens a vector only by rounding does not count, or the loop might not end
    enough = wp.float64(1.0 - 1e-9)
    steps = int(0)
    still = int(0)  # consecutive steps that changed nothing
    k = int(0)
    while still < 12 and steps < MOST_STEPS:
        # four steps for each of three vectors: by either of the others, by their difference and by their sum
        row = k % 3
        kind = (k // 3) % 4
        k += 1
        steps += 1
        still += 1
        first = (row + 1) % 3
        second = (row + 2) % 3
        step = vectors[first]
        change = numbers[first]
        if kind == 1:
            step = vectors[second]
            change = numbers[second]
        if kind == 2:
            step = vectors[first] - vectors[second]
            change = numbers[first] - numbers[second]
        if kind == 3:
            step = vectors[first] + vectors[second]
            change = numbers[first] + numbers[second]
        times = -wp.round(wp.dot(vectors[row], step) / wp.dot(step, step))
        shorter = vectors[row] + times * step
        number = numbers[row] + times * change
        is_shorter = wp.dot(shorter, shorter) < enough * wp.dot(vectors[row], vectors[row])
        if is_shorter and wp.max(wp.abs(number)) < wp.float64(LARGEST_NUMBER):
            vectors[row] = shorter
            numbers[row] = number
            still = 0
    return vectors, numbers


@kernel_variants(())
def shortest_vectors() -> Any:
    """The kernel that finds the shortest lattice vectors that form a basis, as integer combinations."""

    @wp.kernel(module=kernel_module("shortest_vectors"), enable_backward=False)
    def kernel(
        offset: wp.int32,
        cell: wp.array(dtype=wp.mat33d),  # (n_systems,)
        basis: wp.array3d(dtype=wp.int32),  # (n_systems, 3, 3), rows
    ):
        n = offset + wp.tid()
        _, numbers = shortest_basis(cell[n], wp.identity(n=3, dtype=wp.float64))
        for a in range(3):
            for b in range(3):
                basis[n, a, b] = wp.int32(numbers[a][b])

    return gather_only(kernel)


@kernel_variants(("float64",), ("float32",))
def usable_cells(precision: str) -> Any:
    """The kernel that tells whether cells are regular: finite, and their vectors independent."""
    real, _, matrix = REAL[precision]

    @wp.kernel(module=kernel_module(f"usable_cells_{precision}"), enable_backward=False)
    def kernel(
        offset: wp.int32,
        cell: wp.array(dtype=matrix),  # (n_systems,)
        may_be_open: wp.int32,  # whether vectors of zeros are open axes
        usable: wp.array(dtype=real),  # (n_systems,), one, or NaN
    ):
        n = offset + wp.tid()
        h = wp.mat33d(cell[n])
        smallest = wp.float64(wp.static(SMALLEST_VOLUME_RATIO**2))
        none = wp.float64(0.0)
        # in any unit products have digits; entries that are not finite become NaN
        for a in range(3):
            largest = wp.max(wp.abs(h[a]))
            if largest > none:
                h[a] = h[a] / largest
        aa = wp.dot(h[0], h[0])
        bb = wp.dot(h[1], h[1])
        cc = wp.dot(h[2], h[2])
        volume = wp.dot(h[0], wp.cross(h[1], h[2]))
        # false for NaN
        found = volume * volume >= smallest * (aa * bb * cc)
        if may_be_open != 0:
            ab = wp.cross(h[0], h[1])
            bc = wp.cross(h[1], h[2])
            ca = wp.cross(h[2], h[0])
            found = found and wp.dot(ab, ab) >= smallest * (aa * bb)
            found = found and wp.dot(bc, bc) >= smallest * (bb * cc)
            found = found and wp.dot(ca, ca) >= smallest * (cc * aa)
        else:
            found = found and aa > none and bb > none and cc > none
        usable[n] = wp.where(found, real(1.0), real(wp.nan))

    return gather_only(kernel)


@kernel_variants(())
def lattice_geometry() -> Any:
    """The kernel that inverts cells. Those that `usable_cells` refuses have no results of use."""

    @wp.kernel(module=kernel_module("lattice_geometry"), enable_backward=False)
    def kernel(
        offset: wp.int32,
        cell: wp.array(dtype=wp.mat33d),  # (n_systems,)
        inverse: wp.array(dtype=wp.mat33d),  # (n_systems,)
        volume: wp.array(dtype=wp.float64),  # (n_systems,)
        metric: wp.array(dtype=wp.mat33d),  # (n_systems,), the products of vectors of the reciprocal lattice
    ):
        n = offset + wp.tid()
        h = cell[n]
        bc = wp.cross(h[1], h[2])
        determinant = wp.dot(h[0], bc)
        dual = wp.matrix_from_rows(bc, wp.cross(h[2], h[0]), wp.cross(h[0], h[1])) / determinant
        inverse[n] = wp.transpose(dual)
        volume[n] = wp.abs(determinant)
        metric[n] = (dual @ wp.transpose(dual)) * wp.float64(wp.static((2.0 * math.pi) ** 2))

    return gather_only(kernel)


@kernel_variants(("float64",), ("float32",))
def transform_vectors(precision: str) -> Any:
    """The kernel that multiplies vectors by matrices, in float64."""
    vector = REAL[precision].vec3

    @wp.kernel(module=kernel_module(f"transform_vectors_{precision}"), enable_backward=False)
    def kernel(
        offset: wp.int32,
        vectors: wp.array(dtype=vector),  # (n,)
        matrices: wp.array(dtype=wp.mat33d),  # (n,), or one for all
        transposed: wp.int32,  # whether to multiply by the transposed matrices
        products: wp.array(dtype=wp.vec3d),  # (n,)
    ):
        n = offset + wp.tid()
        number = n
        if matrices.shape[0] == 1:
            number = 0
        x = wp.vec3d(vectors[n])
        m = matrices[number]
        if transposed != 0:
            m = wp.transpose(m)
        products[n] = x[0] * m[0] + x[1] * m[1] + x[2] * m[2]

    return gather_only(kernel)


def is_skewed(cell: Any) -> Any:
    """Whether one of the steps of `shortest_basis` shortens a vector by more than `LEAST_GAIN`.

    Cells are numbers (3, 3), or an array (3, 3, n_systems). If this is False, the shortest vectors are hardly shorter.
    """
    (ax, ay, az), (bx, by, bz), (cx, cy, cz) = cell
    aa, bb, cc = ax * ax + ay * ay + az * az, bx * bx + by * by + bz * bz, cx * cx + cy * cy + cz * cz
    ab, bc, ca = ax * bx + ay * by + az * bz, bx * cx + by * cy + bz * cz, cx * ax + cy * ay + cz * az
    found = False
    for rr, ff, ss, rf, fs, sr in ((aa, bb, cc, ab, bc, ca), (bb, cc, aa, bc, ca, ab), (cc, aa, bb, ca, ab, bc)):
        both = ff + ss
        for along, square in ((rf, ff), (sr, ss), (rf - sr, both - 2.0 * fs), (rf + sr, both + 2.0 * fs)):
            # the multiple is rounded by at most one half
            found = found | (along * along > square * (0.25 * square + LEAST_GAIN * rr))
    return found


LEAST_GAIN = 0.06
"""Part of the square of its length that a vector of a skewed cell can lose in one step: 3 % of the length."""


def shortest_on_host(cell: np.ndarray) -> np.ndarray:
    """The shortest lattice vectors that form a basis (n_systems, 3, 3), as int32 combinations of cells on the host."""
    basis = np.empty(cell.shape, dtype=np.int32)
    if len(cell):
        ensure_warp()
        cells: Any = wp.array(np.ascontiguousarray(cell), dtype=wp.mat33d, device="cpu", copy=False)
        found: Any = wp.array(basis, dtype=wp.int32, device="cpu", copy=False)
        launch(shortest_vectors(), len(cell), [cells], [found], device="cpu", record_tape=False)
    return basis
