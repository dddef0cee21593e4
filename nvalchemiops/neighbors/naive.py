"""Neighbor search over all pairs: exact for every cell, in O(N²) per system.

For a pair and its displacement ``d = x_j - x_i`` the images within the cutoff satisfy, along each periodic
axis a, ``|d . dual[a] + S[a]| <= cutoff |dual[a]|``: a vector shorter than the cutoff crosses no more lattice
planes than that. The kernel walks this box of S and keeps what is closer than the cutoff, so positions may lie
anywhere and the cell may have any shape, also thinner than the cutoff.
"""

from typing import Any

import warp as wp

from nvalchemiops.geometry import separation
from nvalchemiops.launch import gather_only, kernel_module, kernel_variants
from nvalchemiops.neighbors.rows import direction

BOX_SLACK = 1e-9
"""Widening of the box of images, in cells, relative to the size of the numbers: rounding must not drop one."""

MAX_CELLS_APART = 2**30
"""Cells that two atoms may be apart, so that image numbers fit into int32."""


@kernel_variants(())
def naive_search() -> Any:
    """Kernel that counts the neighbors of each atom, then fills them in: j ascending, S in lexical order.

    One kernel for both passes, so that they round alike and agree on every pair. A pair belongs to the list if its
    distance is less than the cutoff.
    """

    @wp.kernel(module=kernel_module("naive_search"), enable_backward=False)
    def search(
        offset: wp.int32,
        positions: wp.array(dtype=wp.vec3d),  # (n_atoms,)
        cell: wp.array(dtype=wp.mat33d),  # (n_systems,)
        dual: wp.array(dtype=wp.mat33d),  # (n_systems,), see geometry.dual_vectors
        system: wp.array(dtype=wp.int32),  # (n_atoms,)
        first_atom: wp.array(dtype=wp.int32),  # (n_systems + 1,)
        cutoff: wp.float64,
        half: wp.int32,
        fill: wp.int32,  # 0: count pass, 1: fill pass
        begin: wp.array(dtype=wp.int32),  # (n_atoms,), where a row begins; for the fill pass
        count: wp.array(dtype=wp.int32),  # (n_atoms,), written by the count pass
        index: wp.array(dtype=wp.int32),  # flat rows, written by the fill pass
        shifts: wp.array(dtype=wp.vec3i),
    ):
        i = offset + wp.tid()
        s = system[i]
        x_i = positions[i]
        box = cell[s]
        planes = dual[s]
        slot = int(0)
        if fill != 0:
            slot = begin[i]
        start = slot
        reach = cutoff * wp.vec3d(wp.length(planes[0]), wp.length(planes[1]), wp.length(planes[2]))
        for j in range(first_atom[s], first_atom[s + 1]):
            middle = planes * (positions[j] - x_i)
            low = wp.vec3i()
            high = wp.vec3i()
            for a in range(3):
                slack = wp.float64(wp.static(BOX_SLACK)) * (wp.abs(middle[a]) + reach[a])
                low[a] = wp.int32(wp.ceil(-middle[a] - reach[a] - slack))
                high[a] = wp.int32(wp.floor(-middle[a] + reach[a] + slack))
            for a in range(low[0], high[0] + 1):
                for b in range(low[1], high[1] + 1):
                    for c in range(low[2], high[2] + 1):
                        shift = wp.vec3i(a, b, c)
                        is_self = i == j and a == 0 and b == 0 and c == 0
                        # nested: Warp evaluates both sides of `and`
                        if not is_self and (half == 0 or direction(i, j, shift) > 0):  # noqa: SIM102
                            if wp.length(separation(x_i, positions[j], shift, box)) < cutoff:
                                if fill != 0:
                                    index[slot] = j
                                    shifts[slot] = shift
                                slot += 1
        if fill == 0:
            count[i] = slot - start

    return gather_only(search)
