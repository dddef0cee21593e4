"""Batches of periodic and open systems: Ewald sums for periodic systems, sums over all pairs for open ones.

Systems that have no periodic axis in ``pbc`` are summed directly: every pair once, without images. Given neighbors are
ignored for them. This is the Ewald sum at ``alpha = 0``, where all other terms vanish. A batch with both kinds is split
into two batches, and their results are merged. `open_system` and `all_pairs` also serve sums without a cell.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from nvalchemiops.torch import checks
from nvalchemiops.torch.interactions.electrostatics.accuracy.choice import check_accuracy
from nvalchemiops.torch.interactions.electrostatics.k_vectors import per_system
from nvalchemiops.torch.interactions.electrostatics.results import EwaldSum, SumOptions
from nvalchemiops.torch.interactions.electrostatics.sources import check_sources
from nvalchemiops.torch.interactions.electrostatics.system import (
    ChargedSystem,
    check_charges,
    check_periodic_cells,
    check_system,
)
from nvalchemiops.torch.interactions.pair import shares
from nvalchemiops.torch.neighbors.rows import GivenNeighbors, Rows, build_rows, is_listed, reach_of_all_pairs, rows_of
from nvalchemiops.torch.runtime.cache import cached_by_identity
from nvalchemiops.torch.runtime.context import ValuesNeededError, is_mapped, may_read, on_host
from nvalchemiops.torch.runtime.recorder import read_number
from nvalchemiops.torch.systems import System

ATOMS = ("positions", "charges", "dipoles", "quadrupoles", "widths")
"""Fields of a system with a value for each atom."""


def periodicity(pbc: Any, wait: bool = True) -> np.ndarray | None:
    """``pbc`` (1 or n_systems, 3) as an array; None if it is not given, of another shape, or cannot be read.

    On a GPU, ``wait`` allows to wait for it, once for each tensor. Later calls with this tensor need not wait. It is an
    array, since tracers follow operations of tensors.
    """
    if pbc is None or torch.compiler.is_compiling():
        return None
    pbc = checks.pbc_tensor(pbc)
    if not pbc.ndim:
        pbc = pbc.expand(3)
    if pbc.ndim not in (1, 2) or pbc.shape[-1] != 3:
        return None

    def read() -> tuple[torch.Tensor]:
        if not may_read(pbc, wait=wait):
            raise ValuesNeededError
        return (torch.from_numpy(on_host(pbc)),)

    try:
        if may_read(pbc):
            return on_host(pbc).reshape(-1, 3)
        return on_host(cached_by_identity("periodicity", pbc, (), read, on_host=True)[0]).reshape(-1, 3)
    except ValuesNeededError:
        return None


def has_slabs(pbc: Any, if_unknown: bool = False) -> bool:
    """Whether a system has open axes and others. The correction of periodic systems is zero."""
    if pbc is None or isinstance(pbc, bool):
        return False
    axes = periodicity(pbc)
    if axes is None:
        return if_unknown
    count = axes.sum(1)
    return bool(((count > 0) & (count < 3)).any())


def open_systems(atoms: System, wait: bool = True) -> torch.Tensor | None:
    """Which systems (n_systems,) have no periodic axis; None if all have one, or values cannot be read."""
    numbers: Any = atoms.batch_idx
    axes = periodicity(atoms.pbc, wait)
    if axes is None or (isinstance(numbers, torch.Tensor) and is_mapped(numbers)):
        return None
    is_open = ~axes.any(axis=1)
    if not is_open.any():
        return None
    cell: Any = atoms.cell
    if cell is None and not is_open.all():
        return None  # a later check raises for the missing cell
    found = torch.from_numpy(is_open)
    if cell is None:
        is_index = isinstance(numbers, torch.Tensor) and numbers.dtype in (torch.int32, torch.int64)
        n_systems = max(1, 1 + read_number(numbers.max())) if is_index and numbers.numel() else 1
        return found if found.shape[0] > 1 else found.expand(n_systems)
    n_systems = cell.shape[0] if isinstance(cell, torch.Tensor) and cell.ndim == 3 else 1
    return found.expand(n_systems) if found.shape[0] in (1, n_systems) else None


class Part(NamedTuple):
    """The systems of one kind."""

    systems: torch.Tensor  # (n,) int64, their indices in the batch
    atoms: torch.Tensor  # those of their atoms
    number: torch.Tensor  # (n_atoms,) int64, for each atom of the batch its index in this part, or -1

    def of_atoms(self, values: Any) -> Any:
        """Values of the atoms in this part; a number, or None, holds for all atoms."""
        return values.index_select(0, self.atoms) if isinstance(values, torch.Tensor) and values.ndim else values

    def of_systems(self, name: str, values: Any, n_systems: int) -> Any:
        """Values of the systems in this part; a number, or None, holds for all systems. ``name`` is for messages."""
        if values is None or type(values) in (int, float):
            return values
        if isinstance(values, torch.Tensor) and checks.has_shape(values, (n_systems, 3)):
            return values.index_select(0, self.systems.to(values.device))
        return per_system(name, values, n_systems, self.systems.device).index_select(0, self.systems)

    def of_exclusions(self, exclusions: Any, factors: Any) -> tuple[Any, Any]:
        """The excluded pairs in this part, with their factors; both are checked."""
        if exclusions is None:
            return None, None
        pairs = self.number[exclusions.to(torch.int64)]
        inside = pairs[0] >= 0
        return pairs[:, inside].to(exclusions.dtype), None if factors is None else factors[inside]

    def of_neighbors(self, given: GivenNeighbors) -> GivenNeighbors:
        """The neighbors of the atoms in this part; shapes and dtypes are checked."""
        pairs, matrix, fill_value = given.neighbor_list, given.neighbor_matrix, given.fill_value
        if pairs is not None:
            inside, pointers = self._rows_inside(pairs, given.neighbor_ptr)
            pairs = pairs[:, : inside.shape[0]][:, inside]
            shifts = None if given.shifts is None else given.shifts[: inside.shape[0]][inside]
            numbered = torch.stack([self._numbered(pairs[0], None), self._numbered(pairs[1], fill_value)])
            padding = None if fill_value is None else self.atoms.shape[0]
            return given._replace(
                neighbor_list=numbered.to(pairs.dtype), neighbor_ptr=pointers, shifts=shifts, fill_value=padding
            )
        if matrix is not None and matrix.shape[0]:
            padding = self.number.shape[0] if fill_value is None else fill_value
            numbered = self._numbered(self.of_atoms(matrix), padding).to(matrix.dtype)
            shifts = self.of_atoms(given.matrix_shifts)
            return given._replace(neighbor_matrix=numbered, matrix_shifts=shifts, fill_value=self.atoms.shape[0])
        return given

    def _rows_inside(self, pairs: torch.Tensor, pointers: Any) -> tuple[torch.Tensor, Any]:
        """Which pairs are in rows of atoms of this part; and the pointers of these rows, if given."""
        n_atoms, n_pairs = self.number.shape[0], pairs.shape[1]
        if pointers is None:
            first = pairs[0].to(torch.int64)
            is_atom = (first >= 0) & (first < n_atoms)
            return is_atom & (self.number[torch.where(is_atom, first, 0)] >= 0), None
        if pointers.shape[0] == 1:
            return torch.zeros(0, dtype=torch.bool, device=pairs.device), pointers
        counts = pointers.diff()
        first, last = read_number(pointers[0]), read_number(pointers[-1])
        if read_number((counts < 0).any()) or not first == 0 <= last <= n_pairs:
            raise ValueError("`neighbor_ptr` must ascend from 0 to the number of pairs in `neighbor_list`")
        inside = (self.number >= 0).repeat_interleave(counts)
        own = self.of_atoms(counts).cumsum(0).to(pointers.dtype)
        return inside, torch.cat([own.new_zeros(1), own])

    def _numbered(self, atoms: torch.Tensor, padding: int | None) -> torch.Tensor:
        """Numbers of these atoms in this part. Padding gets its number of atoms; atoms that do not exist get -1."""
        is_atom = (atoms >= 0) & (atoms < self.number.shape[0])
        if padding is not None:
            is_atom &= atoms != padding
        numbers = self.number[torch.where(is_atom, atoms, 0).to(torch.int64)] if is_atom.numel() else atoms
        if read_number((is_atom & (numbers < 0)).any()):
            raise ValueError("`batch_idx`: the neighbor list joins atoms of different systems")
        numbers = torch.where(is_atom, numbers, -1)
        return numbers if padding is None else torch.where(atoms == padding, self.atoms.shape[0], numbers)


def check_mixed(atoms: System, is_open: torch.Tensor, neighbors: GivenNeighbors, options: SumOptions) -> None:
    """Raise unless the arguments of all systems of a batch fit together, so that the batch can be split.

    Arguments for periodic systems are checked as well, so that the same errors are raised if no system is periodic.
    """
    positions: Any = atoms.positions
    checks.check_positions(positions, finite=False)
    unit: Any = torch.eye(3, dtype=positions.dtype, device=positions.device)
    cell = unit if atoms.cell is None else check_periodic_cells(atoms.cell, positions)
    cell = torch.where(is_open.to(positions.device)[:, None, None], unit, cell)  # cells of open systems are unused
    check_system(atoms._replace(cell=cell, pbc=None), options.exclusions, options.exclusion_factors)
    check_accuracy(options.accuracy, positions)
    checks.check_flag("slab_correction", options.slab_correction)
    if options.cutoff is not None:
        checks.check_positive("cutoff", options.cutoff)
    if options.alpha is not None:
        per_system("alpha", options.alpha, is_open.shape[0], positions.device)
    all_open = read_number(is_open.all())
    own = (options.exclusions,) if all_open else (options.exclusions, *neighbors)
    if any([isinstance(value, torch.Tensor) and is_mapped(value) for value in own]):
        raise ValueError(
            "`pbc` has three open axes in some systems: there `vmap` cannot map over exclusions, and in a batch with "
            "periodic systems not over neighbors"
        )
    if not all_open:
        rows_of(neighbors._replace(half_list=False) if is_listed(neighbors) else neighbors, positions, periodic=True)


def _parts_of(atoms: System, is_open: torch.Tensor) -> tuple[Part, Part]:
    """The periodic systems and the open ones of a batch."""
    positions: Any = atoms.positions
    batch_idx, device = atoms.batch_idx, positions.device
    is_open = is_open.to(device)
    if batch_idx is None:
        of_atoms = is_open.expand(positions.shape[0])
    else:
        of_atoms = is_open[batch_idx.to(torch.int64)]
    found = []
    for systems, chosen in ((~is_open, ~of_atoms), (is_open, of_atoms)):
        numbers = chosen.nonzero().squeeze(1)
        number = torch.full_like(of_atoms, -1, dtype=torch.int64)
        number[numbers] = torch.arange(numbers.shape[0], device=device)
        found.append(Part(systems.nonzero().squeeze(1), numbers, number))
    return found[0], found[1]


def _system_of(part: Part, atoms: System, n_systems: int) -> System:
    """The atoms of a part, with its cells."""
    batch_idx: Any = atoms.batch_idx
    if batch_idx is not None:
        place = torch.zeros(n_systems, dtype=batch_idx.dtype, device=batch_idx.device)
        place[part.systems] = torch.arange(part.systems.shape[0], dtype=batch_idx.dtype, device=batch_idx.device)
        batch_idx = place[part.of_atoms(batch_idx).to(torch.int64)]
    cell, pbc = atoms.cell, atoms.pbc
    if isinstance(cell, torch.Tensor) and cell.ndim == 3:
        cell = cell.index_select(0, part.systems)
    if isinstance(pbc, torch.Tensor) and pbc.ndim == 2 and pbc.shape[0] == n_systems:
        pbc = pbc.index_select(0, part.systems.to(pbc.device))
    elif not isinstance(pbc, torch.Tensor):
        pbc = checks.pbc_tensor(pbc).expand(n_systems, 3)[part.systems.cpu()]
    of_atoms = {name: part.of_atoms(getattr(atoms, name)) for name in ATOMS}
    return atoms._replace(cell=cell, pbc=pbc, batch_idx=batch_idx, **of_atoms)


def periodic_part(atoms: System) -> tuple[System, torch.Tensor | None]:
    """The systems of a batch with periodic axes, and their indices; None for all of them, or if all are open."""
    is_open = open_systems(atoms)
    if is_open is None or read_number(is_open.all()):
        return atoms, None
    checks.check_positions(atoms.positions, finite=False)
    checks.check_batch(atoms.batch_idx, atoms.positions, is_open.shape[0])
    part, _ = _parts_of(atoms, is_open)
    return _system_of(part, atoms, is_open.shape[0]), part.systems


def by_kind(
    asked: EwaldSum,
    is_open: torch.Tensor,
    functions: tuple[Callable[[EwaldSum, int], tuple[torch.Tensor, ...]], ...],
    of_systems: Sequence[bool] = (),
) -> tuple[torch.Tensor, ...]:
    """Results of a batch in which the systems marked by ``is_open`` (n_systems,) are open, the others periodic.

    The first function evaluates the periodic systems, the second the open ones; each is called with the sum and the
    number of systems. ``of_systems`` says which results belong to systems; by default they belong to atoms.
    """
    options, n_systems = asked.options, is_open.shape[0]
    for value in asked.given:
        if hasattr(value, "check_number"):
            value.check_number(n_systems)
    check_mixed(asked.atoms, is_open, asked.neighbors, options)
    found = []
    for part, function, is_periodic in zip(_parts_of(asked.atoms, is_open), functions, (True, False)):
        if part.systems.shape[0] == 0:
            continue
        pairs, factors = part.of_exclusions(options.exclusions, options.exclusion_factors)
        alpha = part.of_systems("alpha", options.alpha, n_systems)
        here = asked._replace(
            atoms=_system_of(part, asked.atoms, n_systems),
            options=options._replace(alpha=alpha, exclusions=pairs, exclusion_factors=factors),
        )
        if is_periodic:
            there = _of_part(asked.method, asked.given, part, n_systems)
            here = here._replace(given=there, neighbors=part.of_neighbors(asked.neighbors))
        found.append((part, function(here, part.systems.shape[0])))
    whole = []
    for number, values in enumerate(zip(*[results for _, results in found])):
        count = sum(value.shape[0] for value in values)
        result = values[0].new_zeros(count, *values[0].shape[1:])
        for (part, _), value in zip(found, values):
            place = part.systems if of_systems and of_systems[number] else part.atoms
            result = result.index_copy(0, place, value)
        whole.append(result)
    return tuple(whole)


def _of_part(method: Any, given: tuple[Any, ...], part: Part, n_systems: int) -> tuple[Any, ...]:
    """Arguments of a long-range part, reduced from all systems to those of a part."""
    found = []
    for name, value in zip(inspect.signature(method.given).parameters, given):
        if name in ("k_cutoff", "mesh_spacing"):
            value = part.of_systems(name, value, n_systems)
        elif name == "k_vectors" and isinstance(value, torch.Tensor) and value.ndim == 3 and value.shape[0] != 1:
            if value.shape[0] != n_systems:
                raise ValueError(f"`k_vectors` must have shape ({n_systems}, n_k, 3), got {tuple(value.shape)}")
            value = value.index_select(0, part.systems)
        elif isinstance(value, tuple) and hasattr(value, "of_systems"):  # data prepared for all systems
            value = value.of_systems(part.systems, n_systems)
        found.append(value)
    return tuple(found)


def open_system(
    atoms: System, exclusions: Any = None, exclusion_factors: Any = None, n_systems: int | None = None
) -> ChargedSystem:
    """Checked systems without cells; by default their number follows from ``batch_idx``."""
    positions, domain = atoms.positions, atoms.domain
    with shares.together(domain):
        checks.check_positions(positions, finite=False)
        charges = check_charges(atoms.charges, positions, channels=True)
        if domain is None:
            batch_idx, n_systems = checks.check_batch(atoms.batch_idx, positions, n_systems)
        else:
            domain._check(atoms)
            batch_idx, n_systems = domain.batch_idx, domain.n_systems
        widths = shares.of_all_atoms(domain, atoms.widths)
        moments, widths = check_sources(charges, atoms.dipoles, atoms.quadrupoles, widths, positions)
    rows = shares.exclusions_of_share(domain, exclusions, exclusion_factors, positions, batch_idx)
    cell = positions.new_zeros(1 if n_systems is None else n_systems, 3, 3)
    system = ChargedSystem(positions, moments, charges.ndim == 2, cell, batch_idx, rows)
    return system._replace(domain=domain, widths=widths, of_points=widths is None and moments.shape[-1] == 1)


def all_pairs(system: ChargedSystem, cutoff: float | None = None) -> Rows:
    """Pairs of each open system, all or up to a cutoff."""
    if cutoff is None:
        cutoff = reach_of_all_pairs(system.positions)
    return build_rows(system.positions, cutoff, None, system.batch_idx)
