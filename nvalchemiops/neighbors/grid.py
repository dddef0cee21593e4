"""Bins that sort atoms by place, in every system of a batch. Work and memory depend on the atoms, not on the volume.

A system gets three bin coordinates ``u = planes @ x``. Along a periodic axis they count fractions of the cell, which
is cut into ``bins`` equal parts, as many as fit at a thickness of the cutoff; along an open axis they count cutoffs, in
a direction orthogonal to all periodic lattice vectors (on a GPU, half a cutoff along either: `ROUNDED_UP`). A pair
within the cutoff differs in each by at most ``reach = cutoff |planes[a]|`` bins, since
``|planes[a] . d| <= |planes[a]| |d|``.

The bins of a system are mapped to a *ring* of slots, ``(t_x + A t_y + B t_z) mod size``. Its size, a power of two, is
about the number of atoms, however many bins the volume has. Bins that share a slot are far apart, so that the distance
test rejects atoms of the wrong bin. No atom is found twice: all bins that a search visits in one image of the cell are
part of a box of `SEARCHED_BINS` bins along each axis, and A, B and size are such that the bins of a box of this size
have distinct slots. (A small system is one bin on a ring of one slot.)

In a skewed cell bins lie along the shortest vectors of the lattice, ``turn @ cell`` with a matrix of whole numbers, and
so do the images in which they are visited. Where an image or whole cells leave the grid, they are converted to the
vectors as given.

Wrapped atoms lie within the cell along periodic axes. In ``x_i = w_i + m_i @ cell`` the whole cells ``m_i`` that were
subtracted are kept, so that images between wrapped atoms can be converted to images for the positions as given.
"""

import functools
from collections.abc import Callable

import warp as wp

from nvalchemiops.kernels.lattice import SMALLEST_VOLUME_RATIO, WORTH_CHANGING, shortest_basis
from nvalchemiops.kernels.native import by_device, row_kernel
from nvalchemiops.launch import cpu_only, kernel_module, kernel_variants

AUTOMATIC = 0
NAIVE = 1  # all atoms of a system in one bin
BINNED = 2

SEARCHED_BINS = 7
"""Largest number of bins along an axis that a search visits in one image: twice a reach of two, plus three."""

SMALLEST_RING = 64
"""Smallest number of slots of a ring, unless the system is one bin."""

SMALLEST_SHARED_RING = 512
"""Smallest ring in which bins may share a slot: in smaller rings A and B do not keep `SEARCHED_BINS` bins apart."""

ROUNDED_UP = 1.2
"""Largest thickness of bins on a CPU, in cutoffs. Thicker bins are halved, and the reach is then two bins. On a GPU all
are halved: a warp looks up the lines of either at once, and of halves it tests half as many candidates."""

ONE_BIN_OPEN = 256
"""Number of atoms up to which an open axis is not cut into bins: testing all pairs costs no more than visiting bins."""

ONE_BIN_PERIODIC = 32
"""Likewise for periodic axes, where one bin is searched in each image."""

MOST_BINS = 2**20
"""Largest number of bins along a periodic axis; bins get thicker instead."""

MOST_NEIGHBORS = 2.0**31
"""Largest number of atoms, in all images, within reach of one atom: counts are int32."""

MOST_CELLS = 2.0**29
"""Largest distance of an atom from the origin, in cells, so that differences of image numbers fit into int32."""

NEAR_CELLS = 1000.0
"""Distance from the origin, in cells, up to which rounding of quotients is much less than `SLACK`; beyond, atoms are
wrapped twice."""

FARTHEST_BIN = 2.0**30
"""Largest bin coordinate along open axes: atoms beyond are put into the last bin."""

LARGEST_TURN = 2.0**14
"""Largest number in ``turn``: the rounding of products with it is much less than `SLACK`, and images fit into int32."""

SLACK = 1e-9
"""Widening of a search, relative to the size of the numbers, so that rounding does not hide a bin."""

# entries of the array of faults: nonzero for each kind of invalid input
BAD_CUTOFF, BAD_POSITIONS, BAD_CELL, BAD_SYSTEM, FAR_AWAY, BAD_TARGET, N_FAULTS = range(7)

SERIAL = 4096
"""Number of atoms up to which one launch on one CPU thread prepares a search: more launches would not be faster."""


def ring_slots(n_atoms: int, n_systems: int, method: int) -> int:
    """Largest number of slots of the rings of all systems; see `ring_offset`."""
    return 2 * n_atoms + n_systems * (SMALLEST_SHARED_RING if method == BINNED else 1)


whole_matrix = wp.types.matrix(shape=(3, 3), dtype=wp.int32)


@wp.struct
class Grid:
    """The bins of one system; see the top of this file."""

    lattice: wp.mat33d  # as given; zero along open axes
    extent: wp.float64  # sum of the magnitudes of its entries, or of what is added up for those of ``turn @ lattice``
    is_turned: wp.int32
    turn: whole_matrix
    planes: wp.mat33d
    reach: wp.vec3d  # in bins
    bins: wp.vec3i  # 0 along open axes
    ring: wp.vec4i  # first slot, size, A, B; size 0 if the system is not searched


@wp.func
def ring_size(atoms: wp.int32, method: wp.int32):
    """Slots of a system that is not in one bin: a power of two, less than twice the atoms or than `ring_offset` leaves.

    In the automatic choice no system of up to `ONE_BIN_PERIODIC` atoms gets here.
    """
    size = int(wp.static(SMALLEST_RING))
    if method == wp.static(BINNED):
        size = int(wp.static(SMALLEST_SHARED_RING))
    while size < atoms:
        size = 2 * size
    return size


@wp.func
def shared_skips(size: wp.int32):
    """A and B of a ring whose slots are shared: odd, so that a row along any axis goes round the whole ring."""
    power = int(0)
    while (1 << power) < size:
        power += 1
    return wp.vec2i((1 << (power // 3)) + 1, (1 << (2 * power // 3)) + 1)


@wp.func
def ring_offset(first_atom: wp.int32, system: wp.int32, method: wp.int32):
    """First slot of a system: room for twice its atoms, since a power of two above n is less than 2 n."""
    if method == wp.static(BINNED):
        return 2 * first_atom + wp.static(SMALLEST_SHARED_RING) * system
    return 2 * first_atom + system


@wp.func
def orthonormal_completion(rows: wp.mat33d, periodic: wp.vec3i):
    """Rows along periodic axes as they are, orthonormal rows orthogonal to them along the open ones."""
    n_periodic = periodic[0] + periodic[1] + periodic[2]
    if n_periodic == 3:
        return rows
    if n_periodic == 0:
        return wp.identity(n=3, dtype=wp.float64)
    complete = rows
    if n_periodic == 2:
        for a in range(3):
            if periodic[a] == 0:
                complete[a] = wp.normalize(wp.cross(rows[(a + 1) % 3], rows[(a + 2) % 3]))
        return complete
    for a in range(3):
        if periodic[a] != 0:
            axis = rows[a]
            least = wp.argmin(wp.vec3d(wp.abs(axis[0]), wp.abs(axis[1]), wp.abs(axis[2])))
            helper = wp.vec3d()
            helper[wp.int32(least)] = wp.float64(1.0)
            second = wp.normalize(wp.cross(axis, helper))
            complete[(a + 1) % 3] = second
            complete[(a + 2) % 3] = wp.cross(axis, second)
    return complete


@wp.func
def cells_to_vector(cells: wp.vec3d, lattice: wp.mat33d):
    """``cells @ lattice`` for whole cells that may be too many for integers."""
    return cells[0] * lattice[0] + cells[1] * lattice[1] + cells[2] * lattice[2]


@wp.func
def whole_cells(x: wp.vec3d, grid: Grid):
    """The whole cells ``m`` in ``x``, with ``m @ grid.lattice`` off which it lies inside the cell of the bins."""
    u = grid.planes * x
    cells = wp.vec3d()
    for a in range(3):
        if grid.bins[a] > 0:
            cells[a] = wp.floor(u[a])
    if grid.is_turned == 0:
        return cells
    return cells * wp.mat33d(grid.turn)


@wp.func
def fold(x: wp.vec3d, grid: Grid):
    """Whole cells to take off ``x`` so that it lies inside the cell of the bins, as floating-point numbers."""
    cells = whole_cells(x, grid)
    if wp.max(wp.abs(cells)) > wp.float64(wp.static(NEAR_CELLS)):
        rest = x - cells_to_vector(cells, grid.lattice)
        cells = cells + whole_cells(rest, grid)
    return cells


@wp.func
def few(cells: wp.vec3d):
    """Whether whole cells are few enough to be told as integers; not if they overflowed to NaN on the way."""
    most = wp.float64(wp.static(MOST_CELLS))
    return wp.abs(cells[0]) <= most and wp.abs(cells[1]) <= most and wp.abs(cells[2]) <= most


@wp.func
def bin_number(u: wp.float64, bins: wp.int32):
    """The bin of coordinate ``u``, in bins: within the cell along a periodic axis, anywhere along an open one."""
    if bins > 0:
        return wp.clamp(wp.int32(wp.floor(u)), 0, bins - 1)
    end = wp.float64(wp.static(FARTHEST_BIN))
    return wp.int32(wp.clamp(wp.floor(u), -end, end))


@wp.func
def bin_coordinates(x: wp.vec3d, grid: Grid):
    """``planes @ x`` in bins."""
    u = grid.planes * x
    for a in range(3):
        if grid.bins[a] > 0:
            u[a] = u[a] * wp.float64(grid.bins[a])
    return u


@wp.func
def slot_on_ring(bin_y: wp.int32, bin_z: wp.int32, ring: wp.vec4i):
    """The slot of bin (0, bin_y, bin_z), counted from the first one of the ring.

    Unsigned numbers, which may overflow: modulo a power of two that does no harm.
    """
    slot = wp.uint32(ring[2]) * wp.uint32(bin_y) + wp.uint32(ring[3]) * wp.uint32(bin_z)
    return wp.int32(slot & wp.uint32(ring[1] - 1))


@wp.func_native(by_device("return false;", "return true;"))
def halves_bins() -> wp.bool:  # type: ignore[empty-body]  # it is in C++
    """Whether bins are half a cutoff thick, where atoms are not so few that a system is one bin."""


@wp.func
def describe(
    s: wp.int32,
    cell: wp.array(dtype=wp.mat33d),
    pbc: wp.array2d(dtype=wp.bool),
    first_atom: wp.array(dtype=wp.int32),
    n_atoms: wp.int32,
    cutoff: wp.float64,
    method: wp.int32,
    searched: wp.array(dtype=wp.bool),
    grids: wp.array(dtype=Grid),
    fault: wp.array(dtype=wp.int32),
):
    """Find the bins of system s. Where its cell cannot be searched, no atom is found: all counts are `NOT_FINITE`."""
    # clamped, so that pointers which make no sense lead to a fault and not out of bounds
    first = wp.clamp(first_atom[s], 0, n_atoms)
    last = wp.clamp(first_atom[s + 1], first, n_atoms)
    atoms = last - first
    if first_atom[s] != first or first_atom[s + 1] != last:
        fault[BAD_SYSTEM] = 1
    if s == 0 and first != 0:
        fault[BAD_SYSTEM] = 1
    if s == grids.shape[0] - 1 and last != n_atoms:
        fault[BAD_SYSTEM] = 1
    periodic = wp.vec3i(0, 0, 0)
    rows = wp.identity(n=3, dtype=wp.float64)
    lengths = wp.vec3d(wp.float64(1.0), wp.float64(1.0), wp.float64(1.0))
    given = wp.mat33d()
    usable = bool(True)
    if cell.shape[0] > 0:
        box = cell[wp.min(s, cell.shape[0] - 1)]
        for a in range(3):
            is_periodic = bool(True)
            if pbc.shape[0] > 0:
                is_periodic = pbc[wp.min(s, pbc.shape[0] - 1), a]
            if is_periodic:
                periodic[a] = 1
                given[a] = box[a]
                lengths[a] = wp.length(box[a])
                # also False for NaN
                usable = usable and lengths[a] > wp.float64(0.0) and wp.isfinite(lengths[a])
                rows[a] = box[a] / lengths[a]
    complete = orthonormal_completion(rows, periodic)
    determinant = wp.dot(complete[0], wp.cross(complete[1], complete[2]))
    usable = usable and wp.abs(determinant) >= wp.float64(wp.static(SMALLEST_VOLUME_RATIO))
    if not usable:
        fault[BAD_CELL] = 1
        given = wp.mat33d()
        complete = wp.identity(n=3, dtype=wp.float64)
        determinant = wp.float64(1.0)
        periodic = wp.vec3i(0, 0, 0)
        lengths = wp.vec3d(wp.float64(1.0), wp.float64(1.0), wp.float64(1.0))
    vectors = given
    numbers = wp.mat33d()
    is_turned = int(0)
    # the least product of lengths is the volume, here for vectors of length one
    if wp.abs(determinant) < wp.float64(wp.static(WORTH_CHANGING)):
        for a in range(3):
            numbers[a, a] = wp.float64(periodic[a])
        shorter, found = shortest_basis(given, numbers)
        ratio = wp.float64(1.0)
        most = wp.float64(0.0)
        for a in range(3):
            most = wp.max(most, wp.max(wp.abs(found[a])))
            if periodic[a] != 0:
                ratio *= wp.length(shorter[a]) / lengths[a]
        if ratio < wp.float64(wp.static(WORTH_CHANGING)) and most <= wp.float64(wp.static(LARGEST_TURN)):
            is_turned = 1
            vectors = shorter
            numbers = found
            for a in range(3):
                if periodic[a] != 0:
                    lengths[a] = wp.length(shorter[a])
                    rows[a] = shorter[a] / lengths[a]
            complete = orthonormal_completion(rows, periodic)
            determinant = wp.dot(complete[0], wp.cross(complete[1], complete[2]))
    dual = wp.mat33d()
    for a in range(3):
        dual[a] = wp.cross(complete[(a + 1) % 3], complete[(a + 2) % 3]) / (determinant * lengths[a])

    n_bins = wp.vec3i(0, 0, 0)
    far = wp.vec3d()
    in_one = bool(True)
    open_bins = bool(False)
    n_total = wp.float64(1.0)
    n_images = wp.float64(1.0)
    size = ring_size(atoms, method)
    most_bins = wp.float64(wp.static(MOST_BINS))
    if size < wp.static(SMALLEST_SHARED_RING):
        most_bins = wp.floor(wp.cbrt(wp.float64(size) + wp.float64(0.5)))
    halves = halves_bins()
    for a in range(3):
        if periodic[a] != 0:
            fraction = cutoff * wp.length(dual[a])
            n_bins[a] = 1
            if method != NAIVE and (method != AUTOMATIC or atoms > wp.static(ONE_BIN_PERIODIC)):
                # a cell that is a whole number of cutoffs but for rounding is one
                fit = wp.floor(wp.float64(1.0) / fraction + wp.float64(1e-6))
                thick = fit * fraction * wp.float64(wp.static(ROUNDED_UP)) < wp.float64(1.0)
                if fit >= wp.float64(1.0) and (thick or halves):
                    fit = wp.floor(wp.float64(2.0) / fraction + wp.float64(1e-6))
                n_bins[a] = wp.int32(wp.clamp(fit, wp.float64(1.0), most_bins))
            # rounding of the dual vectors, where the cell is nearly flat
            defect = wp.float64(0.0)
            for b in range(3):
                if periodic[b] != 0:
                    expected = wp.where(a == b, wp.float64(1.0), wp.float64(0.0))
                    error = wp.abs(wp.dot(dual[a], vectors[b]) - expected)
                    defect += error * (wp.float64(3.0) + cutoff * wp.length(dual[b]))
            slack = defect + wp.float64(wp.static(SLACK)) * (wp.float64(1.0) + fraction)
            far[a] = (fraction + slack) * wp.float64(n_bins[a])
            in_one = in_one and n_bins[a] == 1
            n_total *= wp.float64(n_bins[a])
            n_images *= wp.float64(2.0) * fraction + wp.float64(1.0)
        else:
            if method != NAIVE and (method != AUTOMATIC or atoms > wp.static(ONE_BIN_OPEN)):
                reach = wp.where(halves, wp.float64(2.0), wp.float64(1.0))
                dual[a] = dual[a] / cutoff * reach
                far[a] = reach + wp.float64(2.0) * reach * wp.float64(wp.static(SLACK))  # literals add in float32
                in_one = False
                open_bins = True
            else:
                dual[a] = wp.vec3d()
    # also for NaN and infinity
    if not (n_images * wp.float64(wp.max(atoms, 1)) < wp.float64(wp.static(MOST_NEIGHBORS))):
        fault[BAD_CUTOFF] = 1
        usable = False
    if not usable:
        # coordinates that are NaN: `fold` takes all atoms of the system for too far away
        for a in range(3):
            dual[a] = wp.vec3d(wp.float64(wp.nan), wp.float64(wp.nan), wp.float64(wp.nan))
        far = wp.vec3d()
        n_bins = wp.vec3i(1, 1, 1)
        in_one = True

    skip_y = int(0)
    skip_z = int(0)
    if in_one:
        size = 1
    elif not open_bins and n_total <= wp.float64(size):
        # each bin has its slot, and neighbors along x and y stand close together
        skip_y = wp.max(n_bins[0], 1)
        skip_z = skip_y * wp.max(n_bins[1], 1)
    else:
        skips = shared_skips(size)
        skip_y = skips[0]
        skip_z = skips[1]
    if searched.shape[0] > 0:  # noqa: SIM102 (Warp evaluates both sides of `and`)
        if not searched[wp.min(s, searched.shape[0] - 1)]:
            size = 0
    grid = Grid()
    grid.lattice = given
    for a in range(3):
        for b in range(3):
            if is_turned == 0:
                grid.extent += wp.abs(given[a, b])
            else:
                row = wp.abs(given[b, 0]) + wp.abs(given[b, 1]) + wp.abs(given[b, 2])
                grid.extent += wp.abs(numbers[a, b]) * row
                grid.turn[a, b] = wp.int32(numbers[a, b])
    grid.is_turned = is_turned
    grid.planes = dual
    grid.reach = far
    grid.bins = n_bins
    grid.ring = wp.vec4i(ring_offset(first, s, method), size, skip_y, skip_z)
    grids[s] = grid


@wp.func
def system_of(i: wp.int32, system: wp.array(dtype=wp.int32), n_systems: wp.int32):
    """System of atom i, clamped to the range of systems; 0 if ``system`` is empty."""
    if system.shape[0] == 0:
        return 0
    return wp.clamp(system[i], 0, n_systems - 1)


@wp.func
def has_systems_in_order(system: wp.array(dtype=wp.int32), first_atom: wp.array(dtype=wp.int32)):
    """Whether the atoms of each system are those that its pointers say."""
    if system.shape[0] > 0:
        for s in range(first_atom.shape[0] - 1):
            for i in range(first_atom[s], first_atom[s + 1]):
                if system[i] != s:
                    return False
    return True


@wp.func
def locate(
    i: wp.int32,
    positions: wp.array(dtype=wp.vec3d),
    system: wp.array(dtype=wp.int32),
    first_atom: wp.array(dtype=wp.int32),
    grids: wp.array(dtype=Grid),
    slot: wp.array(dtype=wp.int32),
    fault: wp.array(dtype=wp.int32),
):
    """Find the slot of atom i."""
    s = system_of(i, system, grids.shape[0])
    if system.shape[0] > 0:  # noqa: SIM102 (Warp evaluates both sides of `and`)
        if system[i] != s or i < first_atom[s] or i >= first_atom[s + 1]:
            fault[BAD_SYSTEM] = 1
    x = positions[i]
    ring = grids[s].ring
    if ring[1] == 0 and wp.isfinite(x):
        slot[i] = ring[0]
        return
    grid = grids[s]
    place = int(0)
    if wp.isfinite(x):
        cells = fold(x, grid)
        if few(cells):
            u = bin_coordinates(x - cells_to_vector(cells, grid.lattice), grid)
            line = slot_on_ring(bin_number(u[1], grid.bins[1]), bin_number(u[2], grid.bins[2]), grid.ring)
            place = (line + bin_number(u[0], grid.bins[0])) & (grid.ring[1] - 1)
        else:
            fault[FAR_AWAY] = 1
    else:
        fault[BAD_POSITIONS] = 1
    slot[i] = grid.ring[0] + place


@wp.func
def sort_by_slot(
    first: wp.int32,
    last: wp.int32,
    low: wp.int32,
    high: wp.int32,
    slot: wp.array(dtype=wp.int32),
    begin: wp.array(dtype=wp.int32),
    order: wp.array(dtype=wp.int32),
):
    """Counting sort of atoms from ``first`` to ``last``, whose slots are from ``low`` to ``high``.

    Counts go two entries ahead into ``begin``, which is zero, for the last pass moves them by one.
    """
    begin[low] = first
    for i in range(first, last):
        s = slot[i] + 2
        if s <= high:
            begin[s] = begin[s] + 1
    begin[low + 1] = first
    for s in range(low + 2, high + 1):
        begin[s] = begin[s] + begin[s - 1]
    for i in range(first, last):
        s = slot[i] + 1
        k = begin[s]
        begin[s] = k + 1
        order[k] = i


# an array of Warp has strides of 32 bits, in bytes: those of 2^28 atoms do not fit
@wp.func_native("for (int a = 0; a < 3; ++a) coordinates.data[1LL * a * coordinates.shape[1] + k] = x[a];")
def write_coordinates(k: wp.int32, x: wp.vec3d, coordinates: wp.array2d(dtype=wp.float64)):
    """Write the coordinates of the k-th atom."""


@wp.func
def put(
    k: wp.int32,
    positions: wp.array(dtype=wp.vec3d),
    system: wp.array(dtype=wp.int32),
    grids: wp.array(dtype=Grid),
    order: wp.array(dtype=wp.int32),
    coordinates: wp.array2d(dtype=wp.float64),
    entry: wp.array(dtype=wp.vec4i),
):
    """Wrap the k-th atom in the order of slots, and write it there."""
    i = order[k]
    s = system_of(i, system, grids.shape[0])
    is_of_system = bool(True)
    if system.shape[0] > 0:
        is_of_system = system[i] == s
    ring = grids[s].ring
    if ring[1] == 0:
        entry[k] = wp.vec4i(i, 0, 0, 0)
        return
    grid = grids[s]
    x = positions[i]
    cells = fold(x, grid)
    m = wp.vec3i()
    if is_of_system and wp.isfinite(x) and few(cells):
        m = wp.vec3i(wp.int32(cells[0]), wp.int32(cells[1]), wp.int32(cells[2]))
        x = x - cells_to_vector(cells, grid.lattice)
    else:
        # neither found nor finds
        x = wp.vec3d(wp.float64(wp.nan), wp.float64(wp.nan), wp.float64(wp.nan))
    write_coordinates(k, x, coordinates)
    entry[k] = wp.vec4i(i, m[0], m[1], m[2])


@functools.cache
def _kernels() -> dict[str, wp.Kernel]:
    """All kernels of this file, in a Warp module for each of the two ways in which they are used together.

    Arrays: cell (n_systems,), or one for all, or empty; pbc (n_systems, 3), or one for all, or empty: all periodic;
    first_atom (n_systems + 1,); system (n_atoms,), or empty: one system; searched (n_systems,), or one for all, or
    empty: all systems are; grids (n_systems,); slot, order (n_atoms,); begin (n_slots + 2,), zeros, then where the
    atoms of each slot begin; coordinates (3, n_atoms + LANES), wrapped, and entry (n_atoms,), each atom and its whole
    cells, both in the order of the slots.
    """
    module, serial = kernel_module("neighbor_grid"), kernel_module("neighbor_grid_serial")
    # the compiler of a CPU unrolls short loops itself where that is worth it, and has half as much to read
    wp.set_module_options({"max_unroll": 0}, module=serial)

    @wp.kernel(module=serial, enable_backward=False)
    def sort(slot: wp.array(dtype=wp.int32), begin: wp.array(dtype=wp.int32), order: wp.array(dtype=wp.int32)):
        sort_by_slot(0, slot.shape[0], 0, begin.shape[0] - 1, slot, begin, order)

    @wp.kernel(module=serial, enable_backward=False)
    def prepare(
        positions: wp.array(dtype=wp.vec3d),
        cell: wp.array(dtype=wp.mat33d),
        pbc: wp.array2d(dtype=wp.bool),
        system: wp.array(dtype=wp.int32),
        first_atom: wp.array(dtype=wp.int32),
        cutoff: wp.float64,
        method: wp.int32,
        searched: wp.array(dtype=wp.bool),
        grids: wp.array(dtype=Grid),
        slot: wp.array(dtype=wp.int32),
        begin: wp.array(dtype=wp.int32),
        order: wp.array(dtype=wp.int32),
        coordinates: wp.array2d(dtype=wp.float64),
        entry: wp.array(dtype=wp.vec4i),
        fault: wp.array(dtype=wp.int32),
    ):
        n_atoms = positions.shape[0]
        for s in range(grids.shape[0]):
            describe(s, cell, pbc, first_atom, n_atoms, cutoff, method, searched, grids, fault)
        in_order = bool(False)
        if fault[BAD_SYSTEM] == 0:  # else pointers may lead anywhere
            in_order = has_systems_in_order(system, first_atom)
        # system by system where that is possible: atoms of systems that are not searched are hardly looked at
        n_parts = wp.where(in_order, grids.shape[0], 1)
        for part in range(n_parts):
            first = int(0)
            last = n_atoms
            low = int(0)
            high = begin.shape[0] - 1
            is_searched = bool(True)
            if in_order:
                ring = grids[part].ring
                first = first_atom[part]
                last = first_atom[part + 1]
                low = ring[0]
                high = ring[0] + ring[1]
                is_searched = ring[1] > 0
            for i in range(first, last):
                if is_searched:
                    locate(i, positions, system, first_atom, grids, slot, fault)
                else:
                    if not wp.isfinite(positions[i]):
                        fault[BAD_POSITIONS] = 1
                    order[i] = i
                    entry[i] = wp.vec4i(i, 0, 0, 0)
            if is_searched:
                sort_by_slot(first, last, low, high, slot, begin, order)
                for k in range(first, last):
                    put(k, positions, system, grids, order, coordinates, entry)

    @wp.kernel(module=serial, enable_backward=False)
    def end(
        count: wp.array(dtype=wp.int32),
        fault: wp.array(dtype=wp.int32),
        pointers: wp.array(dtype=wp.int32),
        found: wp.array(dtype=wp.int64),
    ):
        most = wp.int32(0)
        total = wp.int64(0)
        pointers[0] = wp.int32(0)
        for row in range(count.shape[0]):
            most = wp.max(most, count[row])
            total += wp.int64(count[row])
            pointers[row + 1] = wp.int32(total)
        number = wp.int32(0)
        for k in range(fault.shape[0]):
            number = wp.max(number, fault[k])
        found[0] = wp.int64(most)
        found[1] = total
        found[2] = wp.int64(number)

    return {
        "describe_systems": row_kernel("describe_systems", describe, module),
        "locate_atoms": row_kernel("locate_atoms", locate, module),
        "sort_atoms": cpu_only(sort),
        "place_atoms": row_kernel("place_atoms", put, module),
        "prepare_search": cpu_only(prepare),
        "end_rows": cpu_only(end),
    }


def _factory(name: str) -> Callable[[], wp.Kernel]:
    def factory() -> wp.Kernel:
        return _kernels()[name]

    factory.__name__ = name
    return kernel_variants(())(factory)


describe_systems = _factory("describe_systems")
"""Kernel that lays out the bins of each system."""

locate_atoms = _factory("locate_atoms")
"""Kernel that finds the slot of each atom."""

sort_atoms = _factory("sort_atoms")
"""Kernel for one CPU thread that sorts atoms by slot, and within a slot by number."""

place_atoms = _factory("place_atoms")
"""Kernel that wraps atoms into the cell and writes them in the order of their slots."""

prepare_search = _factory("prepare_search")
"""Kernel for one CPU thread that combines the other four."""

end_rows = _factory("end_rows")
"""Kernel for one CPU thread: pointers to rows (n_rows + 1,) from their counts, and the largest count, the sum of them,
and whether there is a fault (3,)."""
