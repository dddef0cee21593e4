"""`VerletList`: a neighbor list for dynamics and relaxations that is rebuilt only when necessary."""

from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from nvalchemiops.launch import prepared
from nvalchemiops.layout import layout
from nvalchemiops.neighbors.neighbor_utils import ROW_MULTIPLE
from nvalchemiops.neighbors.staleness import stale_kernel
from nvalchemiops.torch import checks
from nvalchemiops.torch.autograd.arrays import warp_device
from nvalchemiops.torch.neighbors.driver import Form, Room, Systems, build, method_number
from nvalchemiops.torch.neighbors.formats import pairs_of_matrix
from nvalchemiops.torch.neighbors.rebuild_detection import any_in_systems, stale_systems
from nvalchemiops.torch.neighbors.search import count_systems
from nvalchemiops.torch.operators.segments import batch_idx_of, sorted_by_system
from nvalchemiops.torch.runtime._torch_internals import has_other_modes, is_unobserved, outside_of_transforms
from nvalchemiops.torch.runtime.context import all_values_of, eager, is_eager, is_mapped, refuse_in_capture, values_of
from nvalchemiops.torch.runtime.recorder import current_recorder, read_number
from nvalchemiops.torch.types import Pbc

__all__ = ["VerletList"]


class _BuiltList(NamedTuple):
    """A list, and the data from which it was built."""

    systems: Systems  # detached copies
    system: torch.Tensor | None  # (n_atoms,) int64, None for a single system
    n_systems: int
    rows: tuple[torch.Tensor, ...]  # matrix, counts, shifts if there is a cell
    result: tuple[torch.Tensor, ...]
    derived: dict[str, Any]  # what is computed from the others when it is asked

    def inverse_of_cells(self) -> torch.Tensor | None:
        """`inverse_of_periodic` of the cells."""
        if self.systems.cell is not None and "inverse" not in self.derived:
            self.derived["inverse"] = inverse_of_periodic(self.systems.cell, self.systems.pbc)
        return self.derived.get("inverse")

    def order(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """`sorted_by_system`, if there are several systems."""
        if self.system is not None and "order" not in self.derived:
            self.derived["order"] = sorted_by_system(self.system.to(torch.int32), self.n_systems)
        return self.derived.get("order", (None, None))


class VerletList:
    """A neighbor list with a skin, which stays valid until an atom has moved by half of the skin.

    The list is built with ``reach = cutoff + skin``. It holds all pairs closer than ``cutoff`` until an atom has moved
    farther than ``skin / 2`` since the last search. The list of its system is then rebuilt; in a batch the other
    systems keep their rows. A cell that changes strains the list, which takes a part of the skin: what counts as a move
    of an atom is then the difference to the strained position. A system is also rebuilt when its pbc changes. All
    systems are rebuilt when the number of atoms or systems, ``batch_idx``, ``batch_ptr``, a dtype or a device
    changes. Positions may be wrapped between calls, but an atom that is moved to another image makes the shifts of its
    pairs stale and causes a search: leave positions unwrapped if you can.

    The list also holds pairs beyond the cutoff. Pair operators with a ``cutoff`` leave them out. Otherwise compare the
    current distances with the cutoff, for example from `nvalchemiops.torch.neighbors.formats.list_geometry` or
    ``matrix_geometry``.

    Parameters
    ----------
    cutoff : float, length, non-negative
    skin : float, length, non-negative
        With zero every change of a coordinate causes a search. Large skins give long lists, small skins many searches;
        0.1 to 0.3 times the cutoff is usual.
    half_fill : bool, optional
        List each pair once, as in `neighbor_list`.
    fill_value : int, optional
        Padding of the matrix; n_atoms by default.
    max_neighbors : int, optional
        Initial width of the matrix. If a row does not fit, the matrix grows to a fifth more than the row needs, rounded
        up to a multiple of 16.
    return_neighbor_list : bool, optional
        Return lists of pairs instead of matrices. Their lengths differ between searches.
    method : str, optional
        As in `neighbor_list`.

    Attributes
    ----------
    reach : float
        ``cutoff + skin``.
    max_neighbors : int or None
        Current width of the matrix; None before the first search if it was not given.
    num_calls, num_builds : int
        Number of calls, and number of calls that rebuilt a system.
    rebuilt : (n_systems,) bool tensor or None
        Which systems the last call rebuilt.

    Raises
    ------
    ValueError, TypeError
        A number that is negative or not finite, or a method unknown to `neighbor_list`; named in the message.

    Notes
    -----
    *Returned tensors are never changed afterwards*: a search writes to new memory. Autograd graphs and stored lists
    stay valid across searches. Calls without a search return the same tensors: do not write to them.

    Each call waits for a GPU once, to learn whether a search is needed. Inside ``torch.compile`` the call is a graph
    break: call it outside, and compile the function that takes the matrix, whose shapes change only when it is widened.

    Examples
    --------
    >>> from nvalchemiops.torch.neighbors.formats import matrix_geometry
    >>> verlet = VerletList(cutoff=5.0, skin=1.0)
    >>> for step in range(10):
    ...     matrix, count, shifts = verlet(positions, cell)
    ...     distances, vectors = matrix_geometry(positions, matrix, count, shifts, cell)
    ...     within = (distances > 0) & (distances < 5.0)  # and move the atoms
    """

    def __init__(
        self,
        cutoff: float,
        skin: float,
        *,
        half_fill: bool = False,
        fill_value: int | None = None,
        max_neighbors: int | None = None,
        return_neighbor_list: bool = False,
        method: str | None = None,
    ) -> None:
        self.cutoff = checks.check_not_negative("cutoff", cutoff)
        self.skin = checks.check_not_negative("skin", skin)
        self.reach = self.cutoff + self.skin
        self.half_fill = checks.check_flag("half_fill", half_fill)
        self.fill_value = None if fill_value is None else checks.check_int("fill_value", fill_value)
        self.max_neighbors = None if max_neighbors is None else checks.check_count("max_neighbors", max_neighbors)
        self.return_neighbor_list = checks.check_flag("return_neighbor_list", return_neighbor_list)
        method_number(method)
        self.method = method
        self.reset()

    def reset(self) -> None:
        """Drop the list, so that the next call rebuilds all systems, and reset the counters. The width is kept."""
        self.num_calls = 0
        self.num_builds = 0
        self.rebuilt: torch.Tensor | None = None
        self._kept: _BuiltList | None = None

    @eager
    def __call__(
        self,
        positions: torch.Tensor,
        cell: torch.Tensor | None = None,
        pbc: Pbc | None = None,
        batch_idx: torch.Tensor | None = None,
        batch_ptr: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """The list for these positions, rebuilt for systems where it is stale.

        Parameters
        ----------
        positions, cell, pbc, batch_idx, batch_ptr
            As in `neighbor_list`. They may require gradients, and may be changed in place between calls.

        Returns
        -------
        tuple of tensors
            The results of `neighbor_list` for the cutoff ``reach``: matrix, counts and, with a cell, shifts, or a list
            of pairs, its pointers and shifts. The pairs are those within reach at the last search.

        Raises
        ------
        ValueError, TypeError
            As in `neighbor_list`; also if entries of ``batch_idx`` imply far more systems than atoms. The kept list
            does not change.
        """
        self.num_calls += 1
        kept, seen = self._kept, None  # a call in another thread or a signal handler may replace the list
        if kept is not None and (look := _look(self, kept)) is not None:
            seen = look(positions, cell, pbc, batch_idx, batch_ptr)
            if seen is not None and 1 not in seen:
                self.rebuilt = torch.zeros(len(seen), dtype=torch.bool, device=positions.device)
                return kept.result
        checks.check_positions(positions, finite=False)
        refuse_in_capture(positions, "call `VerletList` between replays")
        if pbc is not None:
            pbc = checks.pbc_tensor(pbc, positions.device)
            pbc = pbc.expand(3) if pbc.ndim == 0 else pbc
        given = Systems(positions, cell, pbc, batch_idx, batch_ptr)
        given = _each(_plain, given)
        # an inference tensor could not be saved for a backward pass later on
        with torch.no_grad(), torch.inference_mode(False), outside_of_transforms():
            flags = None
            if seen is not None:
                flags = torch.tensor(list(seen), dtype=torch.bool, device=positions.device) if 0 in seen else None
            elif kept is not None and _layout(given) == _layout(kept.systems):
                flags, other_batch = _stale(self, kept, given)
                is_other, some, every = torch.stack([other_batch, flags.any(), flags.all()]).tolist()
                if not (some or is_other):
                    self.rebuilt = flags
                    return kept.result
                # what is written in place into kept rows would be lost by torch.func.linearize, which is such a mode
                if every or is_other or has_other_modes():
                    flags = None
            self._kept = built = self._build(given, flags, kept)
            self.num_builds += 1
            return built.result

    def _build(self, given: Systems, flags: torch.Tensor | None, old: _BuiltList | None) -> _BuiltList:
        """A list in which the flagged systems (all without flags) are rebuilt; the matrix is as wide as needed."""
        padding = given.positions.shape[0] if self.fill_value is None else self.fill_value
        room = Room(ROW_MULTIPLE if self.max_neighbors is None else self.max_neighbors)
        if flags is not None and old is not None:
            matrix, counts, *shifts = (rows.clone() for rows in old.rows)
            room = Room(None, matrix, shifts[0] if shifts else None, counts)
        asked, form = given._replace(rebuild_flags=flags), Form(self.half_fill, padding)
        rows = build(asked, self.reach, form, room, method_number(self.method), silent=True)
        self.max_neighbors = rows[0].shape[1]
        derived: dict[str, Any] = {}
        if flags is None or old is None or old.system is None:  # flags are given for some systems of several
            system, n_systems = _numbering(given)
            flags = torch.ones(n_systems, dtype=torch.bool, device=given.positions.device)
            systems = _each(torch.clone, given)
        else:
            system, n_systems, before = old.system, old.n_systems, old.systems
            moved = flags.index_select(0, system).unsqueeze(-1)
            systems = before._replace(positions=torch.where(moved, given.positions, before.positions))
            cell, pbc = given.cell, None if given.pbc is None else given.pbc.clone()  # that of others is as before
            if cell is not None and before.cell is not None:
                with_own = cell.ndim == 3 and cell.shape[0] == n_systems
                cell = torch.where(flags.view(-1, 1, 1), cell, before.cell) if with_own else cell.clone()
                if with_own and "inverse" in old.derived and layout(cell.device.type).reads:
                    new = torch.nonzero(flags).squeeze(1)
                    inverse = inverse_of_periodic(cell[new], pbc if pbc is None or pbc.numel() == 3 else pbc[new])
                    derived["inverse"] = old.derived["inverse"].index_copy(0, new, inverse)
            systems = systems._replace(cell=cell, pbc=pbc)
            if "order" in old.derived:
                derived["order"] = old.derived["order"]
        self.rebuilt = flags
        result = rows
        if self.return_neighbor_list:
            # only the counts mark padding: the caller's padding value may be the number of an atom
            matrix, counts, *shifts = rows
            result = pairs_of_matrix(matrix, counts, shifts[0] if shifts else None)
        return _BuiltList(systems, system, n_systems, rows, result, derived)


class _Look:
    """Which systems of a list are stale, decided by one kernel for plain tensors on a CPU.

    Elsewhere `_stale` decides the same.
    """

    def __init__(self, kept: _BuiltList, reach: float, skin: float) -> None:
        self.given = kept._replace(derived={}), reach, skin
        n_systems, inverse = kept.n_systems, kept.inverse_of_cells()
        old = _each(torch.Tensor.contiguous, kept.systems)
        positions, cell, pbc, *self.batch = old[:5]
        self.n_systems, n_atoms = n_systems, positions.shape[0]
        order, begin = kept.order()
        n_cells = n_pbc = 1
        if cell is not None and inverse is not None:
            cell, inverse = cell.to(torch.float64), inverse.contiguous()  # an inverse of torch may be transposed
            n_cells = cell.shape[0] if cell.ndim == 3 else 1
        if pbc is not None:
            n_pbc = pbc.shape[0] if pbc.ndim == 2 else 1
        self.fits = inverse is None or n_cells == inverse.shape[0]  # not with axes for each system and one cell
        self.kept = order, begin, positions, None, pbc, None, cell, None, inverse
        self.addresses = [0 if t is None else t.data_ptr() for t in self.kept]
        self.forms = [None if t is None else (t.shape, t.dtype, t.device) for t in old[:5]]
        numbers = n_atoms, n_systems, n_cells, n_pbc, int(positions.dtype == torch.float32)
        self.numbers = [*numbers, reach, skin]
        kind = n_atoms // max(n_systems, 1)
        self.run = prepared(stale_kernel(), n_systems, device=warp_device(positions.device), lanes=0, kind=kind)

    def __reduce__(self) -> Any:  # a copy has memory of its own
        return _Look, self.given

    def __call__(self, *given: Any) -> bytes | None:
        """For each system 1 if it is stale, else 0; None if `_stale` must decide."""
        for now, form in zip(given, self.forms):
            if now is None and form is None:
                continue
            if not isinstance(now, torch.Tensor) or form != (now.shape, now.dtype, now.device):
                return None
        positions, cell, pbc, *batch = given
        if not is_unobserved(*given, of_inference=True):
            return None
        for now, before in zip(batch, self.batch):
            if now is not None and before is not None and not torch.equal(now, before):
                return None
        flags = array("b", bytes(self.n_systems))
        positions = positions.contiguous()
        addresses = array("q", self.addresses)
        addresses[3] = positions.data_ptr()
        if pbc is not None:
            pbc = pbc.contiguous()
            addresses[5] = pbc.data_ptr()
        if cell is not None:
            cell = cell.detach().to(torch.float64).contiguous()
            addresses[7] = cell.data_ptr()
        addresses.append(flags.buffer_info()[0])
        self.run([addresses.buffer_info()[0], *self.numbers])
        return flags.tobytes()


def _look(verlet: VerletList, kept: _BuiltList) -> _Look | None:
    """What looks at a list, made when it is first looked at; None where `_stale` decides."""
    how = layout(kept.systems.positions.device.type)
    if not how.reads or how.warps or not is_eager() or current_recorder() is not None:
        return None
    if "look" not in kept.derived:
        kept.derived["look"] = _Look(kept, verlet.reach, verlet.skin)
    look: _Look = kept.derived["look"]
    return look if look.fits else None


# -- the part of a skin that a change of the cell takes -------------------------------------------


def inverse_of_periodic(cell: torch.Tensor, pbc: torch.Tensor | None) -> torch.Tensor:
    """The pseudo-inverse (n_systems, 3, 3), in float64, of the lattice vectors along periodic axes."""
    rows = _periodic(cell, pbc)
    reads = layout(rows.device.type).reads
    if reads or pbc is None:
        inverse, failed = torch.linalg.inv_ex(rows)  # in a tenth of the time
        if not (reads and read_number(all_values_of(failed).any())):
            return inverse
    return torch.linalg.pinv(rows)


def strain_between(
    before: torch.Tensor, now: torch.Tensor, pbc: torch.Tensor | None, inverse: torch.Tensor
) -> torch.Tensor:
    """The matrices E (n_systems, 3, 3) with ``h = h_0 (1 + E)`` for lattice vectors h along periodic axes.

    ``inverse`` is `inverse_of_periodic` of the cells before.
    """
    return inverse @ (_periodic(now, pbc) - _periodic(before, pbc))


def displacements(
    positions: torch.Tensor, before: torch.Tensor, strain: torch.Tensor, system: torch.Tensor | None
) -> torch.Tensor:
    """How far atoms (n_atoms,) are from where a strain of their system took them: ``|x - x_0 (1 + E)|``."""
    start = before.to(torch.float64)
    if system is None:
        carried = start @ strain[0]
    else:
        carried = (start.unsqueeze(1) @ strain.index_select(0, system)).squeeze(1)
    return (positions.to(torch.float64) - start - carried).square_().sum(1).sqrt_()


def taken_by_strain(strain: torch.Tensor, reach: float) -> torch.Tensor:
    """The part (n_systems,) of a skin that is used up by the strain E of a list with this reach, ``reach |E|``.

    A pair at ``d`` was at ``d_0 (1 + E) = d - (u_j - u_i)`` when the list was built, where u are the displacements
    beyond the strain. So ``|d_0| <= (|d| + 2 |u|) / (1 - |E|)``, which is within the reach for all pairs within the
    cutoff if ``2 |u| + reach |E| <= skin``. The norm of E is bounded by the sums of its rows and columns.
    """
    sizes = strain.abs()
    return reach * (sizes.sum(1).amax(1) * sizes.sum(2).amax(1)).sqrt_()


def _periodic(cell: torch.Tensor, pbc: torch.Tensor | None) -> torch.Tensor:
    """Cells (n_systems, 3, 3) in float64 with zeros for vectors along open axes, which may hold anything."""
    cells = cell.reshape(-1, 3, 3).to(torch.float64)
    return cells if pbc is None else torch.where(pbc.reshape(-1, 3, 1), cells, 0.0)


def _stale(verlet: VerletList, kept: _BuiltList, given: Systems) -> tuple[torch.Tensor, torch.Tensor]:
    """Which systems (n_systems,) need a new list, and whether atoms are assigned to systems differently than before.

    Does not wait for a GPU.
    """
    old = kept.systems
    batch = None if kept.system is None else (kept.system, kept.n_systems)
    flags = stale_systems(old.positions, given.positions, verlet.skin / 2.0, batch=batch)
    if given.cell is not None and old.cell is not None:
        changed = (given.cell != old.cell).any(-1).reshape(-1, 3)
        if given.pbc is not None and old.pbc is not None:
            changed = changed & given.pbc  # an open axis may hold NaN, which differs from itself
        changed = changed.any(-1)
        if verlet.skin == 0.0 or given.cell.reshape(-1, 3, 3).shape[0] != kept.n_systems:
            # a cell for all is kept once, and would not tell which system was built with which
            flags = flags | changed
        elif not layout(changed.device.type).reads or read_number(changed.any()):
            inverse = kept.inverse_of_cells()
            assert inverse is not None
            strain = strain_between(old.cell, given.cell, old.pbc, inverse)
            moved = displacements(given.positions, old.positions, strain, kept.system)
            left = 0.5 * (verlet.skin - taken_by_strain(strain, verlet.reach))
            of_atoms = left if kept.system is None else left.index_select(0, kept.system)
            outgrown = any_in_systems(~(moved <= of_atoms), kept.system, kept.n_systems)
            flags = torch.where(changed, outgrown, flags)
        if given.pbc is not None and old.pbc is not None:
            flags = flags | (given.pbc != old.pbc).reshape(-1, 3).any(-1)
    others = torch.zeros((), dtype=torch.bool, device=given.positions.device)
    for now, before in ((given.batch_idx, old.batch_idx), (given.batch_ptr, old.batch_ptr)):
        if now is not None and before is not None:
            others = others | (now != before).any()
    return flags, others


def _numbering(systems: Systems) -> tuple[torch.Tensor | None, int]:
    """System of each atom, None if there is one, and the number of systems; for checked arguments."""
    positions, cell, pbc, batch_idx, batch_ptr, *_ = systems
    if batch_ptr is not None:
        return batch_idx_of(batch_ptr, positions.shape[0]).to(torch.int64), batch_ptr.shape[0] - 1
    if batch_idx is None:
        return None, 1
    n_systems = checks.systems_in_shapes((cell, 3), (pbc, 2))
    if n_systems is None:
        n_systems = count_systems(batch_idx)
    if n_systems is None:
        raise ValueError(
            f"`batch_idx` has the entry {int(batch_idx.max())}, but there are {len(batch_idx)} atoms: number the "
            "systems 0, 1, 2 ..., since a list is kept for each number"
        )
    return batch_idx.to(torch.int64), n_systems


def _each(function: Callable[[torch.Tensor], torch.Tensor], systems: Systems) -> Systems:
    """The result of ``function`` for each tensor."""
    return Systems(function(systems.positions), *(None if t is None else function(t) for t in systems[1:]))


def _layout(systems: Systems) -> tuple[Any, ...]:
    """Shapes, dtypes and devices: if they change, the list cannot be kept."""
    return tuple((t.shape, t.dtype, t.device) if isinstance(t, torch.Tensor) else type(t) for t in systems)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its graph and without wrappers of transforms such as ``torch.func.grad``."""
    if not isinstance(tensor, torch.Tensor):
        return tensor  # `neighbor_list` raises for it
    if is_mapped(tensor):
        raise ValueError("`VerletList` does not work under torch.func.vmap: give the mapped systems as one batch")
    return values_of(tensor)
