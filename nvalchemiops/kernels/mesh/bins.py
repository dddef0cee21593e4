"""Bins of mesh cells by which atoms are sorted: columns along z on a CPU, tiles on a GPU."""

import math
from typing import Any

import warp as wp

from nvalchemiops.kernels.mesh.splines import ORDERS, place
from nvalchemiops.kernels.native import by_device, filled, native_kernel
from nvalchemiops.launch import kernel_variants

TILE = (4, 4, 8)
"""Points of a tile along each axis."""

TILES = f"""
    const int tiles_x = (n_x + {TILE[0] - 1}) / {TILE[0]}, tiles_y = (n_y + {TILE[1] - 1}) / {TILE[1]},
              tiles_z = (n_z + {TILE[2] - 1}) / {TILE[2]};
"""

_COLUMN = "column.data[i] = (known * n_x + x) * n_y + y;"

_TILE_OF_ATOM = f"""
    @tiles@
    const int tile_x = x / {TILE[0]}, tile_y = y / {TILE[1]}, tile_z = place(u[2], n_z, inside) / {TILE[2]};
    column.data[i] = ((known * tiles_x + tile_x) * tiles_y + tile_y) * tiles_z + tile_z;
"""


def bins_of_mesh(n_systems: int, n_x: int, n_y: int, n_z: int, warps: bool) -> int:
    """Number of bins by which atoms are sorted: columns on a CPU, tiles on a GPU."""
    if not warps:
        return n_systems * n_x * n_y
    return n_systems * math.prod(-(-n // size) for n, size in zip((n_x, n_y, n_z), TILE))


@kernel_variants(*((p,) for p in ORDERS))
def find_columns(order: int) -> Any:
    """The kernel that finds the column (on a GPU, the tile) of mesh cells in which the stencil of an atom begins."""
    body = """
        @place@
        double inside;
        const double *const u = coordinates.data + 3LL * i;
        const int system = batch_idx.shape[0] > 0 ? batch_idx.data[i] : 0;
        const int known = system >= 0 && system < n_systems ? system : 0;
        const int x = place(u[0], n_x, inside), y = place(u[1], n_y, inside);
        @bin@
    """
    bin_ = by_device(_COLUMN, filled(_TILE_OF_ATOM, tiles=TILES))

    @native_kernel(f"find_columns_{order}", filled(body, place=place(order), bin=bin_))
    def kernel(
        i: wp.int32,
        coordinates: wp.array2d(dtype=wp.float64),  # (n_atoms, 3)
        batch_idx: wp.array(dtype=wp.int32),  # (n_atoms,), or none
        n_systems: wp.int32,
        n_x: wp.int32,
        n_y: wp.int32,
        n_z: wp.int32,
        column: wp.array(dtype=wp.int32),  # (n_atoms,)
    ):
        """Column or tile of atom i."""

    return kernel
