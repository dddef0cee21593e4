"""The neighbor search as torch ops, for a list, a matrix with spare columns, or a matrix of given width.

All geometry is computed in float64, for positions of either dtype.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import warp as wp

from nvalchemiops.kernels.simd import LANES
from nvalchemiops.layout import layout
from nvalchemiops.locks import Lent
from nvalchemiops.neighbors import grid
from nvalchemiops.neighbors import nearest as nearest_kernels
from nvalchemiops.neighbors import search as kernels
from nvalchemiops.neighbors.neighbor_utils import matrix_width
from nvalchemiops.neighbors.numbering import number_systems
from nvalchemiops.neighbors.rows import NO_PADDING
from nvalchemiops.neighbors.search_in_warps import rows_of_warp
from nvalchemiops.torch import checks
from nvalchemiops.torch.autograd import DynamicSize, OutputSpec, warp_custom_op
from nvalchemiops.torch.autograd.declaration import with_fields
from nvalchemiops.torch.autograd.functorch import given_slices
from nvalchemiops.torch.launch import RepeatedLaunch, launch, multiprocessors
from nvalchemiops.torch.neighbors import faults
from nvalchemiops.torch.operators.segments import batch_idx_of
from nvalchemiops.torch.operators.sorting import counted_rows, pointers_of_sorted, sort_rows
from nvalchemiops.torch.runtime import engine
from nvalchemiops.torch.runtime._torch_internals import tracing_state
from nvalchemiops.torch.runtime.context import eager, is_eager, refuse_in_capture
from nvalchemiops.torch.runtime.memory import new_empty
from nvalchemiops.torch.runtime.recorder import current_recorder, read_number
from nvalchemiops.torch.runtime.storage import storage_of
from nvalchemiops.types import inner_shape

SEARCH_LANES = 32
"""Threads of a GPU that share a row. The search requires one warp."""

MOST_SPARE_SLOTS = 2**22
"""Largest number of slots, besides a few for each atom, of a cell-list search that is requested by name."""


IN_CAPTURE = "give `neighbor_list` a `max_neighbors` and check=False, and ask for no list of pairs"
"""How to search while a graph is captured."""


class Search(NamedTuple):
    """The first arguments of the ops below, as in `neighbor_list`. All but positions and cutoff may be None."""

    positions: torch.Tensor
    cutoff: float
    cell: torch.Tensor | None = None
    pbc: torch.Tensor | None = None
    batch_idx: torch.Tensor | None = None
    batch_ptr: torch.Tensor | None = None
    target_indices: torch.Tensor | None = None
    half: bool = False
    method: int = grid.AUTOMATIC
    nearest: int = 0  # number of nearest neighbors to list; 0: all
    # a squared length: neighbors are kept up to this far above the last squared distance; negative: exactly
    # ``nearest``, by index
    tie_tolerance: float = 0.0
    symmetric: bool = False

    @property
    def n_rows(self) -> int:
        """Rows of the result."""
        return (self.positions if self.target_indices is None else self.target_indices).shape[0]


class _Destination(NamedTuple):
    """Memory for neighbors, with further arguments of the kernels; empty by default."""

    neighbors: torch.Tensor | None = None
    shifts: torch.Tensor | None = None
    first: torch.Tensor | None = None
    row_begin: torch.Tensor | None = None
    width: int = -1
    fill_value: int = 0


_NOWHERE = _Destination()
_HALF, _TARGET = 6, 7
"""Places of arguments in `_CellList.binned`."""

Scratch = tuple[torch.Tensor, torch.Tensor]

Tensors = tuple[torch.Tensor, ...]


class _CellList:
    """Atoms sorted into bins; one search counts neighbors, another one writes them."""

    def __init__(self, search: Search, may_wait: bool = True, rebuild_flags: torch.Tensor | None = None) -> None:
        self.search = search
        self.rebuild_flags = rebuild_flags
        self.scratch: Scratch | None = None
        self.compaction: RepeatedLaunch | None = None
        self.bounds: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self.device = search.positions.device
        self.layout = layout(self.device.type)
        self.n_rows = search.n_rows
        self.fault = torch.zeros(grid.N_FAULTS, dtype=torch.int32, device=self.device)
        self.binned = self._bin(*self._systems(may_wait))

    def _new(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _systems(self, may_wait: bool) -> tuple[torch.Tensor | None, torch.Tensor]:
        """System of each atom (None for a single system), and the first atom of each system."""
        positions, _, cell, pbc, batch_idx, batch_ptr, *_ = self.search
        n_atoms = positions.shape[0]
        if batch_ptr is not None:
            first_atom = checks.int32_of(batch_ptr).contiguous()
            if batch_idx is None:
                batch_idx = batch_idx_of(first_atom, n_atoms)
            return checks.int32_of(batch_idx).contiguous(), first_atom
        if batch_idx is None:
            return None, torch.arange(2, dtype=torch.int32, device=self.device).mul_(n_atoms)
        n_systems = checks.systems_in_shapes((cell, 3), (pbc, 2), (self.rebuild_flags, 1))
        if n_systems is None and may_wait:
            n_systems = count_systems(batch_idx)
        system = checks.int32_of(batch_idx).contiguous()
        if n_systems is None:
            # renumber: no more systems can have atoms than there are atoms. Negative numbers stay and are detected
            n_systems = max(n_atoms, 1)
            if self.layout.serial or batch_idx.dtype != torch.int32:
                numbers, order = torch.sort(batch_idx)
                steps = torch.diff(numbers, prepend=numbers[:1]).sign().cumsum(0, dtype=torch.int32)
                system = torch.where(batch_idx < 0, -1, steps.scatter(0, order, steps))
            else:  # on a GPU a sort has more launches than all the rest
                given, system = system, self._new(n_atoms)
                falls = (given[1:] < given[:-1]).any(0, keepdim=True)
                launch(number_systems(), n_atoms, [given, falls], [system])
        # if the atoms are not sorted, the pointers still rise from 0 to the number of atoms. Each system then has
        # separate bins, but their number does not fit its atoms
        return system, pointers_of_sorted(system, n_systems)

    def _bin(self, system: torch.Tensor | None, first_atom: torch.Tensor) -> list[Any]:
        """Arguments of the search kernel, up to those for the rows."""
        search = self.search
        positions = search.positions.to(torch.float64).contiguous()
        n_atoms, n_systems = positions.shape[0], first_atom.shape[0] - 1
        cell = None if search.cell is None else search.cell.to(torch.float64).reshape(-1, 3, 3).contiguous()
        pbc = None if search.pbc is None else search.pbc.reshape(-1, 3).contiguous()
        # with many more systems than atoms, bins for every system may exceed the memory
        method = search.method
        if grid.ring_slots(n_atoms, n_systems, method) > 8 * n_atoms + MOST_SPARE_SLOTS:
            method = grid.AUTOMATIC
        n_slots = grid.ring_slots(n_atoms, n_systems, method)
        grids = self._new(n_systems, *inner_shape(grid.Grid), dtype=torch.uint8)
        slot = self._new(n_atoms)
        coordinates = self._new(3, n_atoms + LANES, dtype=torch.float64)
        entry = self._new(n_atoms, 4)
        if self.layout.serial and n_atoms <= grid.SERIAL:
            order, begin = self._new(n_atoms), torch.zeros(n_slots + 2, dtype=torch.int32, device=self.device)
            inputs = [positions, cell, pbc, system, first_atom, search.cutoff, method, self.rebuild_flags]
            launch(grid.prepare_search(), 1, inputs, [grids, slot, begin, order, coordinates, entry, self.fault])
        else:
            described = [cell, pbc, first_atom, n_atoms, search.cutoff, method, self.rebuild_flags]
            launch(grid.describe_systems(), n_systems, described, [grids, self.fault])
            launch(grid.locate_atoms(), n_atoms, [positions, system, first_atom, grids], [slot, self.fault])
            order, begin = sort_rows(slot, n_slots)
            launch(grid.place_atoms(), n_atoms, [positions, system, grids, order], [coordinates, entry])
        target = None if search.target_indices is None else self._places(search.target_indices, order)
        half = int(search.half)
        return [coordinates, entry, begin, system, grids, search.cutoff, half, target, self.rebuild_flags]

    def _places(self, atoms: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        """Positions of the given atoms in ``order``; -1 for numbers without an atom."""
        n_atoms = order.shape[0]
        known = (atoms >= 0) & (atoms < n_atoms)
        self.fault[grid.BAD_TARGET] |= ~known.all()
        rank = self._new(n_atoms + 1)  # one more, so that an entry can be read even without atoms
        rank[order.long()] = torch.arange(n_atoms, dtype=torch.int32, device=self.device)
        return torch.where(known, rank[torch.where(known, atoms, n_atoms).long()], -1)

    @eager  # otherwise, after a graph break, the compiler would trace it up to the numbers of a launch
    def run(self, count: torch.Tensor | None, to: _Destination = _NOWHERE) -> None:
        """Count neighbors, and write them to rows if there are rows."""
        neighbors, shifts, first, *form = to
        find, selection = kernels.search_neighbors, []
        if self.search.nearest:
            self.bounds = self._find_bounds() if self.bounds is None else self.bounds
            find = nearest_kernels.search_nearest
            selection = [0, self._steps, 0.0, int(self.search.symmetric), 0, None, None, *self.bounds]
        inputs, outputs = [*self.binned, *form, *selection], [count, neighbors, first, shifts]
        self._launch(find(), inputs, outputs, lanes=SEARCH_LANES, kind="count" if neighbors is None else "fill")

    @property
    def _steps(self) -> float:
        """Steps per unit of squared distance, in which distances are compared; 0 for an exact comparison."""
        cutoff, by_index = self.search.cutoff, self.search.tie_tolerance < 0.0
        return nearest_kernels.STEPS / max(cutoff * cutoff, 1e-290) if by_index else 0.0

    def _find_bounds(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Level (n_atoms,) of the last neighbor of each atom; if the index breaks ties, also its number and image."""
        search, by_index = self.search, self.search.tie_tolerance < 0.0
        n_atoms = search.positions.shape[0]
        binned = list(self.binned)
        binned[_HALF] = 0
        if search.symmetric:
            binned[_TARGET] = None
        n_rows = n_atoms if search.symmetric else self.n_rows
        rows_per_thread = self.layout.rows_per_thread(nearest_kernels.ROWS_PER_THREAD)
        if self.layout.warps:
            tasks = nearest_kernels.tasks_at_once(multiprocessors(self.device))
            rows_per_thread = max(1, -(-n_rows // tasks))
        n_threads = -(-n_rows // rows_per_thread)
        room = nearest_kernels.room_of_task(search.nearest, self.layout.warps)
        size = n_threads * room
        heap_level = self._new(size, dtype=torch.float64)
        level = self._new(n_atoms, dtype=torch.float64)
        heap_key, key = (self._new(n, 4) if by_index else None for n in (size, n_atoms))
        inputs = [*binned, None, -1, 0, search.nearest, self._steps, max(search.tie_tolerance, 0.0), 0, room]
        outputs = [heap_level, heap_key, level, key, None, None, None, None, rows_per_thread]
        launch(nearest_kernels.search_nearest(), n_threads, inputs, outputs, lanes=SEARCH_LANES, kind="nearest")
        return level, key

    def _threads(self) -> tuple[int, int]:
        """Number of threads, and of rows for each."""
        rows_per_thread = self.layout.rows_per_thread(kernels.ROWS_PER_THREAD)
        if self.layout.warps:
            rows_per_thread = rows_of_warp(self.n_rows, multiprocessors(self.device))
        return -(-self.n_rows // rows_per_thread), rows_per_thread

    def _launch(self, kernel: wp.Kernel, inputs: list[Any], outputs: list[Any], **how: Any) -> None:
        n_threads, rows_per_thread = self._threads()
        launch(kernel, n_threads, inputs, [*outputs, rows_per_thread], **how)

    def count(self, scratch: Callable[[int], Scratch]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Counts of rows, pointers to rows of these lengths, and three numbers: largest count, sum of counts, fault.

        In a small search on a CPU neighbors are written as well, to memory of ``scratch`` that `fill` copies from.
        """
        count = self._new(self.n_rows)
        if self.layout.serial and self.n_rows <= kernels.SCRATCH_ROWS:
            width = kernels.scratch_width(self.n_rows)
            self.scratch = index, shifts = scratch(self.n_rows * width)
            begin = torch.arange(0, (self.n_rows + 1) * width, width, dtype=torch.int32, device=self.device)
            self.run(count, _Destination(index, None if self.search.cell is None else shifts, None, begin))
        else:
            self.run(count)
        return count, *counted_rows(count, self.fault)

    def prepared(self) -> Tensors:
        """All that depends on positions and that a search needs: first the faults."""
        if self.search.nearest:
            self.bounds = self._find_bounds()
        needed = (self.fault, *self.binned, *(self.bounds or ()))
        return tuple([t for t in needed if isinstance(t, torch.Tensor)])

    def fill_matrix(
        self, matrix: torch.Tensor, count: torch.Tensor, shifts: torch.Tensor | None, fill_value: int
    ) -> None:
        """Count neighbors, and write them to rows of this width."""
        images = None if shifts is None else shifts.view(-1, 3)
        self.run(count, _Destination(matrix.view(-1), images, None, None, matrix.shape[1], fill_value))

    def fill(self, count: torch.Tensor, most: int, atoms: torch.Tensor | None, to: _Destination) -> None:
        """Write neighbors to rows of ``atoms``, after `count`, whose largest entry is ``most``."""
        width = kernels.scratch_width(self.n_rows)
        if self.scratch is None or most > width:
            self.run(None, to)
        else:
            neighbors, shifts, first, *form = to
            index, images = self.scratch
            atoms = None if atoms is None else atoms.to(torch.int32).contiguous()
            inputs = [count, index, None if self.search.cell is None else images, width, atoms]
            outputs = [*form, neighbors, first, shifts]
            if atoms is not None or current_recorder() is not None:
                self._launch(kernels.compact_neighbors(), inputs, outputs)
                return
            n_threads, rows_per_thread = self._threads()
            if self.compaction is None or self.compaction.tensors[0] is not count:
                self.compaction = RepeatedLaunch(kernels.compact_neighbors(), n_threads, inputs)
            self.compaction([*outputs, rows_per_thread])


def _new_scratch(size: int = kernels.SCRATCH_ROWS * kernels.SCRATCH_WIDTH) -> Scratch:
    # on the CPU, whatever the default device is
    index = torch.empty(size, dtype=torch.int32, device="cpu")
    return index, torch.empty((size, 3), dtype=torch.int32, device="cpu")


_scratch = Lent(_new_scratch)
"""Indices and shifts of a small search on a CPU, 4 MiB that each thread keeps.

The allocator may take memory of this size from the system at each call. A search of a thousand atoms would then spend a
quarter of its time on page faults.
"""


def count_systems(batch_idx: torch.Tensor) -> int | None:
    """Number of systems from the entries, read on the host; None without entries, or if it far exceeds n_atoms."""
    n_atoms = batch_idx.shape[0]
    n_systems = 1 + (read_number(batch_idx.max()) if n_atoms else 0)
    return n_systems if 1 <= n_systems <= 2 * n_atoms + 1000 else None


_N_PAIRS = DynamicSize("n_pairs")


def _n_rows(*inputs: Any) -> int:
    return (inputs[0] if inputs[6] is None else inputs[6]).shape[0]


def _equally_long(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
    """The rule for ``vmap``: each slice has its own list, and room after its pairs up to the length of the longest."""
    found = [neighbor_pairs(*given) for given in given_slices(info.batch_size, in_dims, args)]
    most = max(pairs.shape[1] for pairs, _, _ in found)
    padded = []
    for pairs, pointers, shifts in found:
        more = most - pairs.shape[1]
        images = torch.nn.functional.pad(shifts, (0, 0, 0, more if args[2] is not None else 0))
        padded.append((torch.nn.functional.pad(pairs, (0, more), value=NO_PADDING), pointers, images))
    return tuple(torch.stack(parts) for parts in zip(*padded, strict=True)), (0, 0, 0)


@warp_custom_op(
    "nvalchemiops::neighbor_pairs",
    outputs=[
        OutputSpec("pairs", wp.int32, lambda *_: (2, _N_PAIRS)),
        OutputSpec("ptr", wp.int32, lambda *inputs: (_n_rows(*inputs) + 1,)),
        OutputSpec("shifts", wp.vec3i, lambda *inputs: (0 if inputs[2] is None else _N_PAIRS, 3)),
    ],
    backward="none",
    vmap=_equally_long,
    trusted=True,
)
@with_fields
def neighbor_pairs(search: Search) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Search, with results in list format. Waits for the device to learn the number of pairs; raises for bad input."""
    return neighbor_rows(search)


def found_pairs(search: Search) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`neighbor_pairs` of this search, in eager mode without the operator if searches repeat."""
    return neighbor_rows(search, op=lambda: neighbor_pairs(*search))


def neighbor_rows(
    search: Search,
    spare: Callable[[torch.Tensor], int] | None = None,
    op: Callable[[], Tensors] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pairs, pointers and shifts of `neighbor_pairs`; or neighbors alone, with room at the end for rows of the caller.

    ``spare`` maps the counts (n_rows,) of neighbors to the number of entries to leave free; ``op`` as in `engine.Call`.
    """

    def filled(bins: _CellList, count: torch.Tensor, pointers: torch.Tensor, most: int, size: int) -> Tensors:
        room = size if spare is None else size + spare(count)
        faults.check_size(room)
        neighbors = new_empty((2, room) if spare is None else (room,), torch.int32, bins.device)
        shifts = new_empty((0 if search.cell is None else room, 3), torch.int32, bins.device)
        first, second = neighbors.unbind() if spare is None else (None, neighbors)
        ptr = pointers.clone()
        bins.fill(count, most, search.target_indices, _Destination(second, shifts, first, ptr))
        return neighbors, ptr, shifts

    return _searched(search, filled, op)


def _searched(search: Search, filled: Callable[..., Tensors], op: Callable[[], Tensors] | None) -> Any:
    """Search for a list or a matrix, with a plan if searches repeat. Waits for the device and raises for bad input.

    ``filled(bins, count, pointers, most, size)`` makes it from the results of `_CellList.count`; ``op`` as in
    `engine.Call`.
    """
    if op is not None and (torch.compiler.is_compiling() or tracing_state()):
        return op()
    refuse_in_capture(search.positions, IN_CAPTURE)
    lent: list[Scratch] = []

    def lend(size: int) -> Scratch:
        if current_recorder() is not None:
            return _new_scratch(size)
        lent.append(_scratch.take())
        return lent[0]

    def end(results: Sequence[torch.Tensor], body: Any) -> Tensors:
        count, pointers, found = results
        most, size, is_faulty = found.tolist()
        if is_faulty:
            faults.raise_faults(body.bins.fault, search)
        made = filled(body.bins, count, pointers, most, size)
        if lent:
            _scratch.give(lent.pop())
        return made

    return _planned(search, lambda bins: bins.count(lend), end, op, True)


def _planned(
    search: Search,
    work: Callable[[_CellList], Tensors],
    end: Callable[[Tensors, Any], Tensors],
    op: Callable[[], Tensors] | None,
    waits: bool,
) -> Any:
    """``end(work(bins), body)``, where ``body.bins`` are those of the search; these and the work can have a plan."""

    def prepare(inputs: Sequence[torch.Tensor], near: Any) -> engine.Body:
        # a plan keeps the bins, which refer to the system of each atom: the caller may change `batch_idx`
        batch_idx = None if search.batch_idx is None else search.batch_idx.clone()
        return _Binning(_at(search._replace(batch_idx=batch_idx), inputs), work, waits)

    inputs = (search.positions,) if search.cell is None else (search.positions, search.cell)
    systems, options = search[3:7], (waits, search.cutoff, *search[7:])
    call = engine.Call("search", prepare, inputs, len(inputs), (), systems, options, end=end, op=op, waits=waits)
    return engine.run(call)


class _Binning:
    """The body of a search, which keeps the bins."""

    def __init__(self, search: Search, work: Callable[[_CellList], Tensors], may_wait: bool) -> None:
        self.search, self.work, self.may_wait = search, work, may_wait

    def __call__(self, at: Sequence[torch.Tensor] | None, needed: Sequence[bool]) -> Tensors:
        """The results of the work."""
        bins = _CellList(self.search if at is None else _at(self.search, at), self.may_wait)
        found = self.work(bins)
        # a plan keeps the bins, but no tensors of the caller
        self.search = bins.search = bins.search._replace(pbc=None, batch_idx=None, batch_ptr=None, target_indices=None)
        self.bins = bins
        return found


def _at(search: Search, inputs: Sequence[torch.Tensor]) -> Search:
    """The search with other positions and cells."""
    return search._replace(**dict(zip(("positions", "cell"), inputs)))  # type: ignore[arg-type]  # by these names


_WIDTH = DynamicSize("width")


def _matrix_width(*inputs: Any) -> int | DynamicSize:
    return _WIDTH if inputs[-1] is None else inputs[-1]


@warp_custom_op(
    "nvalchemiops::neighbor_matrix",
    outputs=[
        OutputSpec("matrix", wp.int32, lambda *inputs: (_n_rows(*inputs), _matrix_width(*inputs))),
        OutputSpec("count", wp.int32, lambda *inputs: (_n_rows(*inputs),)),
        OutputSpec(
            "shifts",
            wp.vec3i,
            lambda *inputs: (0 if inputs[2] is None else _n_rows(*inputs), _matrix_width(*inputs), 3),
        ),
        OutputSpec("fault", wp.int32, (grid.N_FAULTS,)),
    ],
    backward="none",
    trusted=True,
)
@with_fields
def neighbor_matrix(search: Search, fill_value: int, width: int | None) -> Tensors:
    """Search, with results in matrix format.

    With a given width there is no wait: faults are returned, and counts include neighbors that did not fit. Without a
    width the matrix has spare columns; the search then waits for the device, and raises for bad input.
    """
    if width is None:
        return found_matrix(search, fill_value, in_op=True)
    bins = _CellList(search, may_wait=False)
    matrix, shifts, to = _matrix_of(search, width, fill_value)
    count = new_empty((search.n_rows,), torch.int32, bins.device)
    bins.run(count, to)
    return matrix, count, shifts, bins.fault


def found_matrix(search: Search, fill_value: int, in_op: bool = False) -> Tensors:
    """`neighbor_matrix` with spare columns, in eager mode without the operator if searches repeat."""

    def filled(bins: _CellList, count: torch.Tensor, _: Any, most: int, size: int) -> Tensors:
        columns = matrix_width(search.cutoff, most) if search.n_rows else 0
        if search.n_rows * columns > faults.MAX_SLOTS:
            columns = most
        faults.check_size(search.n_rows * columns)
        matrix, shifts, to = _matrix_of(search, columns, fill_value)
        bins.fill(count, most, search.target_indices, to)
        return matrix, count.clone(), shifts, bins.fault.clone()

    return _searched(search, filled, None if in_op else lambda: neighbor_matrix(*search, fill_value, None))


def _matrix_of(search: Search, columns: int, fill_value: int) -> tuple[torch.Tensor, torch.Tensor, _Destination]:
    """Memory for a matrix and its shifts."""
    n_rows, device = search.n_rows, search.positions.device
    matrix = new_empty((n_rows, columns), torch.int32, device)
    shifts = new_empty((0 if search.cell is None else n_rows, columns, 3), torch.int32, device)
    return matrix, shifts, _Destination(matrix.view(-1), shifts.view(-1, 3), None, None, columns, fill_value)


@warp_custom_op(
    "nvalchemiops::fill_neighbor_matrix",
    outputs=[OutputSpec("fault", wp.int32, (grid.N_FAULTS,))],
    mutates_args=("matrix", "count", "shifts"),
    backward="none",
    trusted=True,
)
@with_fields
def fill_neighbor_matrix(
    search: Search,
    rebuild_flags: torch.Tensor | None,
    fill_value: int,
    matrix: torch.Tensor,
    count: torch.Tensor,
    shifts: torch.Tensor | None,
) -> torch.Tensor:
    """Search, with results in matrix format in given memory; see `neighbor_matrix`."""
    bins = _CellList(search, may_wait=False, rebuild_flags=rebuild_flags)
    bins.fill_matrix(matrix, count, shifts, fill_value)
    return bins.fault


def filled_in_place(
    search: Search,
    rebuild_flags: torch.Tensor | None,
    fill_value: int,
    matrix: torch.Tensor,
    count: torch.Tensor,
    shifts: torch.Tensor | None,
) -> torch.Tensor:
    """`fill_neighbor_matrix` of this search, in eager mode without the operator if searches of all systems repeat.

    A plan sorts the atoms; rows are then written to the memory of the caller, which may be another one in each call.
    """
    memory = [matrix, count] if shifts is None else [matrix, count, shifts]

    def op() -> Tensors:
        return (fill_neighbor_matrix(*search, rebuild_flags, fill_value, matrix, count, shifts),)

    def end(results: Sequence[torch.Tensor], body: Any) -> Tensors:
        body.bins.fill_matrix(matrix, count, shifts, fill_value)
        torch.autograd.graph.increment_version(memory)
        return (results[0].clone(),)

    is_plain = not torch.compiler.is_compiling() and not tracing_state() and is_eager(*memory)
    if rebuild_flags is not None or not is_plain or not all([t.is_contiguous() for t in memory]):
        return op()[0]
    others = {storage_of(t) for t in search if isinstance(t, torch.Tensor)}
    if len(others.union(map(storage_of, memory))) < len(others) + len(memory):
        return op()[0]  # which finds out whether they overlap
    fault: torch.Tensor
    (fault,) = _planned(search, _CellList.prepared, end, op, False)
    return fault
