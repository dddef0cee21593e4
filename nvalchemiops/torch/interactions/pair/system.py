"""The atoms, cells, batch and neighbors of a sum over pairs, checked once for all sums."""

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nvalchemiops.arguments import ValuesError
from nvalchemiops.kernels.lattice import is_clearly_regular
from nvalchemiops.torch import checks
from nvalchemiops.torch.interactions.pair import shares
from nvalchemiops.torch.neighbors.rows import (
    FARTHEST,
    NO_PADDING,
    GivenNeighbors,
    Rows,
    build_rows,
    cell_without_images,
    check_reach,
    listed_slots,
    reach_of_all_pairs,
    row_indices,
    rows_of,
)
from nvalchemiops.torch.operators.lattice import check_vectors, nan_if_singular
from nvalchemiops.torch.operators.segments import check_system_numbers, largest_system
from nvalchemiops.torch.runtime.context import ValuesNeededError, is_eager, may_read, values_of
from nvalchemiops.torch.runtime.recorder import differ_in_replays, read_fault, read_number
from nvalchemiops.torch.systems import System

if TYPE_CHECKING:
    from nvalchemiops.torch.distributed.domain import Domain

NO_CUTOFF = sys.float_info.max
"""The cutoff of sums without one. With infinity, AOTInductor packages could not be loaded: JSON cannot express it."""


class PairSystem(NamedTuple):
    """Checked atoms with their neighbors."""

    positions: torch.Tensor
    cell: torch.Tensor | None  # (n_systems, 3, 3)
    batch_idx: torch.Tensor | None  # (n_atoms,) int32; None for one system
    n_systems: int
    rows: Rows
    # if given, the atoms are those that this rank owns; rows of ghosts follow their rows and are empty
    domain: "Domain | None" = None


def pair_system(
    atoms: System,
    given: GivenNeighbors | Rows,
    num_systems: int | None = None,
    *,
    cutoff: float | None,
    by_system: bool,
    neighbor_cutoff: float | None = None,
    check: bool = False,
    is_padding: torch.Tensor | None = None,
) -> PairSystem:
    """Checked atoms with the given neighbors, or those within ``cutoff``; arguments as for `PairPotential.__call__`.

    ``given`` rows are those of an earlier call, from which pairs with padding atoms were removed. ``by_system``:
    results or parameters are per system; if not, and there is no cell, all atoms count as one system. Pairs of padding
    atoms, ``is_padding`` (n_atoms,), are removed, whatever the list says.
    """
    if atoms.domain is not None:
        assert isinstance(given, GivenNeighbors)
        return _of_domain(atoms.domain, atoms, given, cutoff)
    positions, pbc = atoms.positions, atoms.pbc
    checks.check_positions(positions, finite=False)
    checks.check_flag("check", check)
    fits = isinstance(given, GivenNeighbors) and given.fits_cell
    if fits and pbc is not None and checks.has_shape(pbc, (3,), (1, 3)):
        atoms, pbc = atoms._replace(pbc=None), None  # no axis is open
    cell, of_atoms, n_systems = _batch(atoms, num_systems, by_system)
    # the search must distinguish systems even if the sum does not
    searched = atoms.batch_idx if of_atoms is None else of_atoms
    if neighbor_cutoff is not None:
        reach = checks.check_positive("neighbor_cutoff", neighbor_cutoff)
        if cutoff is not None and reach < cutoff:
            raise ValueError(f"`cutoff` = {cutoff} is beyond the list's reach, `neighbor_cutoff` = {reach}")
    rows = given if isinstance(given, Rows) else rows_of(given, positions, cell is not None, check)
    is_own = rows is None or rows is given  # from a search of this library for these atoms
    if rows is None:
        if neighbor_cutoff is not None:
            raise ValueError("`neighbor_cutoff` describes a neighbor list, but none is given")
        if cutoff is None:
            may_look = may_read(cell, wait=True)  # otherwise a search for all images refuses a cell that is periodic
            if cell is not None and may_look and bool(values_of(cell).any()):
                raise ValueError(
                    "`cutoff`, `neighbor_list` or `neighbor_matrix` is needed: without one a periodic system has no "
                    "end (for charges use the Ewald sums 'ewald' and 'pme')"
                )
            cutoff = reach_of_all_pairs(positions) if may_look else FARTHEST
        rows = build_rows(positions, cutoff, cell, searched, pbc if fits else _periodic_axes(cell, pbc))
    elif check and isinstance(given, GivenNeighbors) and cutoff is not None and may_read(positions, wait=True):
        name = "neighbor_matrix" if given.neighbor_list is None else "neighbor_list"
        check_reach(name, rows, positions, cutoff, cell, searched, _periodic_axes(cell, pbc))
    if is_padding is not None and not isinstance(given, Rows):
        rows = _without(is_padding, rows)
    if cell is None:
        cell = cell_without_images(rows, positions, n_systems)
    elif not may_read(cell):
        cell = nan_if_singular(cell, may_be_open=True)
    elif not (rows is given or fits or (is_own and pbc is None)):
        _check_images(rows, is_own, cell, of_atoms, positions)
    return PairSystem(positions, cell, of_atoms, n_systems, rows)


def _of_domain(domain: "Domain", atoms: System, given: GivenNeighbors, cutoff: float | None) -> PairSystem:
    """The atoms that a rank owns, with neighbors from the domain."""
    positions = atoms.positions
    with shares.together(domain):
        domain._check(atoms)
        if atoms.pbc is not None:
            raise ValueError("`pbc` belongs to the `domain`: leave it out")
        if cutoff is None:
            raise ValueError("with a `domain` this potential needs a cutoff, within which neighbors are found")
        cell, _, _ = _batch(atoms._replace(batch_idx=domain.batch_idx, pbc=domain.pbc), domain.n_systems, True, True)
        rows, _, _ = shares.rows_of_domain(domain, positions, atoms.cell, cutoff, given)
    return PairSystem(positions, shares.replicated(domain, cell), domain.batch_idx, domain.n_systems, rows, domain)


def _batch(
    atoms: System, num_systems: int | None, by_system: bool, needs_all_cells: bool = False
) -> tuple[torch.Tensor | None, torch.Tensor | None, int]:
    """Cell (n_systems, 3, 3) or None, system of each atom as int32 or None, and the number of systems.

    Lattice vectors along axes that ``pbc`` declares open are zero.
    """
    positions, cell, batch_idx, pbc = atoms.positions, atoms.cell, atoms.batch_idx, atoms.pbc
    n_atoms = positions.shape[0]
    if num_systems is not None:
        num_systems = checks.check_int("num_systems", num_systems)
        # two comparisons, because torch.compile cannot compare a number with a bool
        if num_systems < 0 or (num_systems == 0 and n_atoms > 0):
            raise ValueError(f"`num_systems` must be positive, got {num_systems}")
    of_one = False
    if cell is not None:
        cell = checks.check_lattice(cell, positions)
        # if values cannot be read, a cell (1, 3, 3) belongs to one system; several systems may share a cell (3, 3)
        of_one = cell.ndim == 3 and cell.shape[0] == 1
        cell = _without_open_axes(cell if cell.ndim == 3 else cell.unsqueeze(0), pbc)
    if batch_idx is None:
        if num_systems not in (None, 1) or (cell is not None and cell.shape[0] != 1):
            raise ValueError("`batch_idx` is needed: `cell`, `pbc` or `num_systems` are not for one system")
        return cell, None, 1
    checks.check_index("batch_idx", batch_idx, positions, (n_atoms,))
    of_caller, batch_idx = batch_idx, checks.int32_of(batch_idx)
    if num_systems is None:
        if cell is not None and cell.shape[0] != 1:
            num_systems = cell.shape[0]
        elif cell is None and not by_system:
            return None, None, 1
        elif (told := checks.systems_in_shapes((pbc, 2))) is not None:
            num_systems = told
        elif not may_read() and of_one:
            num_systems = 1
        elif not may_read():
            raise ValuesNeededError("`num_systems` is needed where `batch_idx` cannot be read, as inside torch.compile")
        else:
            num_systems = largest_system(of_caller) + 1 if n_atoms else 1
    n_usable = num_systems
    if cell is not None and cell.shape[0] != num_systems:
        if cell.shape[0] == 1:
            cell = cell.expand(num_systems, 3, 3)
        elif cell.shape[0] > num_systems or needs_all_cells or not cell.shape[0]:
            raise ValueError(f"`cell` is for {cell.shape[0]} systems, but there are {num_systems}")
        else:  # systems without atoms, at the end of a batch, need no cell
            n_usable = cell.shape[0]
            cell = torch.cat([cell, cell[:1].detach().expand(num_systems - n_usable, 3, 3)])
            if not may_read(batch_idx):  # numbers are not checked below: these do not exist
                batch_idx = torch.where(batch_idx < n_usable, batch_idx, num_systems)
    if n_atoms and may_read(batch_idx):
        check_system_numbers(values_of(batch_idx), n_usable)
    return cell, batch_idx, num_systems


def _without_open_axes(cell: torch.Tensor, pbc: Any) -> torch.Tensor:
    """The cell with zero vectors along open axes, so that the given vectors have no effect there.

    A zero vector along an axis that ``pbc`` declares periodic becomes NaN.
    """
    if pbc is None:
        return cell
    pbc = checks.pbc_tensor(pbc, cell.device)
    fits = checks.has_shape(pbc, (), (3,), (1, 3), (cell.shape[0], 3))
    if not fits and (cell.shape[0] != 1 or pbc.ndim != 2 or pbc.shape[1] != 3):
        raise ValueError(f"`pbc` must have shape (3,) or (n_systems, 3), got {tuple(pbc.shape)}")
    is_nowhere = (cell.detach() == 0.0).all(-1, keepdim=True)
    return torch.where(pbc.unsqueeze(-1), torch.where(is_nowhere, torch.nan, cell), 0.0)


def _without(is_padding: torch.Tensor, rows: Rows) -> Rows:
    """The rows with all pairs of these atoms replaced by padding."""
    last = is_padding.shape[0]
    if not last:  # there may be room for pairs
        return rows
    absent = torch.nn.functional.pad(is_padding, (0, 1))
    listed = torch.where((rows.neighbors < 0) | (rows.neighbors > last), last, rows.neighbors)
    gone = absent.index_select(0, listed) | absent.index_select(0, row_indices(rows, last))
    # a valid padding value if the list has none
    padding = max(rows.padding, NO_PADDING + 1)
    return rows._replace(neighbors=rows.neighbors.masked_fill(gone, padding), padding=padding)


_ALL = [True] * 3, [[True] * 3]
"""Periodicity along all axes of one system."""


def cells_fit_any_list(cell: torch.Tensor | None, pbc: Any) -> bool:
    """Whether there are cells that are known to be regular and periodic along all axes, so that any images fit them.

    Raises for a singular cell. False if values cannot be read, or the shape or dtype is wrong.
    """
    if cell is None or not is_eager(cell, pbc) or not may_read(cell, pbc):
        return False
    if cell.shape[-2:] != (3, 3) or cell.dtype not in checks.FLOATS or cell.layout is not torch.strided:
        return False
    if pbc is not None and differ_in_replays(pbc):
        if read_fault(pbc.logical_not().any().to(torch.int32)):
            return False
    # a list is faster than an operation of torch
    elif pbc is not None and not (pbc.tolist() in _ALL if pbc.numel() == 3 else bool(pbc.all())):
        return False
    if cell.numel() == 9 and cell.ndim <= 3 and not differ_in_replays(cell):  # the usual case
        rows = cell.tolist()
        if is_clearly_regular(rows if cell.ndim == 2 else rows[0]):
            return True
    if not _has_open_axes(cell.reshape(-1, 3, 3), pbc):
        return True
    if pbc is not None:
        raise ValuesError("`cell` has a zero lattice vector, but `pbc` says that all axes are periodic")
    return False


def _has_open_axes(cell: torch.Tensor, pbc: torch.Tensor | None = None) -> bool:
    try:
        return check_vectors(cell)
    except ValuesError as error:
        how = "along an open axis give a vector of zeros" if pbc is None else "`pbc` says that all axes are periodic"
        raise ValuesError(f"{error}; {how}") from None


def _periodic_axes(cell: torch.Tensor | None, pbc: Any) -> Any:
    """``pbc`` for a search; if it is not given, axes with a vector of zeros are open. Raises for a singular cell."""
    if pbc is not None or cell is None or (may_read(cell) and not _has_open_axes(cell)):
        return pbc
    return (cell.detach() != 0.0).any(-1)


def _check_images(
    rows: Rows, is_own: bool, cell: torch.Tensor, batch_idx: torch.Tensor | None, positions: torch.Tensor
) -> None:
    """Raise for a singular cell, and for a zero lattice vector if a given list has images along it."""
    shifts = rows.shifts
    if not _has_open_axes(cell) or is_own or shifts is None or not may_read(*rows, batch_idx) or not len(positions):
        return
    is_open = (values_of(cell) == 0.0).all(-1)
    of_atom = is_open.expand(positions.shape[0], 3) if batch_idx is None else is_open[values_of(batch_idx).long()]
    beyond = (shifts != 0) & of_atom.index_select(0, row_indices(rows, positions.shape[0]))
    if read_number(beyond[listed_slots(rows)].any()):
        raise ValuesError(
            "`cell`: the neighbor list contains images along an axis that is open (a zero lattice vector, or False in "
            "`pbc`)"
        )
