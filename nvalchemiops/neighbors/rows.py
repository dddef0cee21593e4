"""The form of neighbor lists that kernels read, and a kernel that checks a list before it is used.

The neighbors of atom i are ``index[row_begin[i]] .. index[row_begin[i + 1] - 1]`` in a list of pairs. In a matrix,
which has no ``row_begin``, they are ``index[i * width] .. index[(i + 1) * width - 1]``. Their images are in ``shift``,
and entries equal to ``padding`` are skipped.
"""

from typing import Any

import warp as wp

from nvalchemiops.kernels.lattice import separation
from nvalchemiops.launch import gather_only, kernel_module, kernel_variants

NO_PADDING = -(2**31)
"""Padding value that means no padding: no list may hold it."""

HOW_TO_SORT = (
    "; of a list in another order take neighbor_list[:, order] and its shifts[order] with order = "
    "neighbor_list[0].argsort(), without `neighbor_ptr`"
)
"""End of messages about a list that is not sorted."""

NOWHERE = 2**31 - 1
"""Image number, along each axis, that marks an atom whose neighbors cannot be known.

If errors are not raised, a search lists an atom with an invalid position or cell as its own only neighbor in this
image. Sums over pairs give NaN for it. An empty row would instead mean no interaction."""

OUT_OF_RANGE = 1
OTHER_SYSTEM = 2
UNSORTED = 3


@wp.func
def direction(i: wp.int32, j: wp.int32, shift: wp.vec3i):
    """+1 for the direction (i, j, S) of a pair that a half list keeps, -1 for the other one, 0 for an atom itself."""
    if i != j:
        return wp.sign(j - i)
    if shift[0] != 0:
        return wp.sign(shift[0])
    if shift[1] != 0:
        return wp.sign(shift[1])
    if shift[2] != 0:
        return wp.sign(shift[2])
    return 0


@kernel_variants(())
def inspect_rows() -> Any:
    """Kernel that reports, for each atom's row, a fault (0: none), the balance of directions, and the reach.

    Directions, summed over a full list, cancel. The reach is the largest distance.
    """

    @wp.kernel(module=kernel_module("inspect_rows"), enable_backward=False)
    def inspect(
        offset: wp.int32,
        positions: wp.array(dtype=wp.vec3d),  # (n_atoms,)
        cell: wp.array(dtype=wp.mat33d),  # (n_systems,)
        system: wp.array(dtype=wp.int32),  # (n_atoms,)
        row_begin: wp.array(dtype=wp.int32),  # (n_atoms + 1,), or none: a matrix
        index: wp.array(dtype=wp.int32),  # (n_slots,)
        shift: wp.array(dtype=wp.vec3i),
        width: wp.int32,
        padding: wp.int32,
        first: wp.array(dtype=wp.int32),  # (n_slots,), the atom of each slot as the list has it; empty in a matrix
        fault: wp.array(dtype=wp.int32),  # (n_atoms,)
        balance: wp.array(dtype=wp.int32),
        reach: wp.array(dtype=wp.float64),
    ):
        i = offset + wp.tid()
        wrong = int(0)
        sum = int(0)
        longest = wp.float64(0.0)
        low = wp.int64(i) * wp.int64(width)
        high = low + wp.int64(width)
        if row_begin.shape[0] > 0:
            low = wp.int64(row_begin[i])
            high = wp.int64(row_begin[i + 1])
        if low < wp.int64(0) or high < low or high > wp.int64(index.shape[0]):
            wrong = UNSORTED
            low = high
        slot = low
        while slot < high:
            j = index[slot]
            # nested: Warp evaluates both sides of `and`
            if first.shape[0] > 0:  # noqa: SIM102
                if first[slot] != i:
                    wrong = UNSORTED
            if j != padding and shift[slot][0] != NOWHERE and shift[slot][0] != -NOWHERE:
                if j < 0 or j >= system.shape[0]:
                    wrong = OUT_OF_RANGE
                elif system[j] != system[i]:
                    wrong = OTHER_SYSTEM
                else:
                    sum += direction(i, j, shift[slot])
                    d = separation(positions[i], positions[j], shift[slot], cell[system[i]])
                    longest = wp.max(longest, wp.length(d))
            slot += wp.int64(1)
        fault[i] = wrong
        balance[i] = sum
        reach[i] = longest

    return gather_only(inspect)
