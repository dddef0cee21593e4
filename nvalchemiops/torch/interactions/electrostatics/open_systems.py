"""Batches of periodic systems and open ones: Ewald sums of the first, sums over all pairs of the others.

Systems without any periodic axis, as ``pbc`` says, are summed directly, whatever list of neighbors is given: every pair
once, without images. That is the Ewald sum at ``alpha = 0``, all of whose other terms vanish. The systems of each kind
are taken apart as a batch of their own, and results put together again.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from nvalchemiops.torch import checks
from nvalchemiops.torch.interactions.electrostatics.results import SumRequest, Tensors
from nvalchemiops.torch.interactions.electrostatics.sources import check_sources
from nvalchemiops.torch.interactions.electrostatics.system import ChargedSystem, check_charges
from nvalchemiops.torch.interactions.pair.exclusions import check_same_system, exclusion_rows
from nvalchemiops.torch.interactions.pair.shares import exclusions_of_share, of_all_atoms, together
from nvalchemiops.torch.neighbors.rows import GivenNeighbors, Rows, build_rows
from nvalchemiops.torch.runtime.context import is_eager, may_read, on_host
from nvalchemiops.torch.systems import System


def open_systems(atoms: System) -> torch.Tensor | None:
    """Which systems (n_systems,) have no periodic axis; None where there are none, or values cannot be read."""
    pbc: Any = atoms.pbc
    if pbc is None or not is_eager():
        return None
    if not isinstance(pbc, torch.Tensor):
        pbc = checks.pbc_tensor([pbc] * 3 if isinstance(pbc, bool) else pbc, torch.device("cpu"))
    if pbc.dtype != torch.bool or pbc.ndim not in (1, 2) or pbc.shape[-1] != 3 or not may_read(pbc):
        return None
    found = torch.from_numpy(~on_host(pbc).reshape(-1, 3)).all(1)
    if not bool(found.any()):
        return None
    cell: Any = atoms.cell
    n_systems = cell.shape[0] if isinstance(cell, torch.Tensor) and cell.ndim == 3 else 1
    return found.expand(n_systems) if found.shape[0] in (1, n_systems) else None


class Part(NamedTuple):
    """The systems of one kind.

    Attributes
    ----------
    systems, atoms : (n,) int64 tensors
        Their numbers in the batch.
    number : (n_atoms,) int64 tensor
        Number of each atom of the batch in this part, or -1.
    """

    systems: torch.Tensor
    atoms: torch.Tensor
    number: torch.Tensor

    def of_atoms(self, values: Any) -> Any:
        """Values of its atoms; a number, or None, is that of all."""
        return values.index_select(0, self.atoms) if isinstance(values, torch.Tensor) and values.ndim else values

    def of_systems(self, values: Any, n_systems: int) -> Any:
        """Values of its systems; a number, or None, is that of all."""
        one_each = isinstance(values, torch.Tensor) and values.ndim and values.shape[0] == n_systems
        return values.index_select(0, self.systems) if one_each else values

    def of_exclusions(self, exclusions: Any, factors: Any) -> tuple[Any, Any]:
        """The pairs that lie in it, with their factors."""
        if not isinstance(exclusions, torch.Tensor):
            return exclusions, factors
        pairs = self.number[exclusions.to(torch.int64)]
        inside = (pairs >= 0).any(0)
        if bool((pairs[:, inside] < 0).any()):
            raise ValueError("`exclusions` joins atoms of different systems")
        kept = pairs[:, inside].to(exclusions.dtype)
        return kept, factors[inside] if isinstance(factors, torch.Tensor) and factors.ndim else factors

    def of_neighbors(self, given: GivenNeighbors) -> GivenNeighbors:
        """The neighbors of its atoms."""
        pairs: Any = given.neighbor_list
        matrix: Any = given.neighbor_matrix
        if isinstance(pairs, torch.Tensor) and pairs.ndim == 2:
            numbered = self.number[pairs.to(torch.int64)]
            inside = numbered[0] >= 0
            pointers = given.neighbor_ptr
            if pointers is not None:
                counts = self.of_atoms(pointers.diff()).cumsum(0).to(pointers.dtype)
                pointers = torch.cat([counts.new_zeros(1), counts])
            shifts = None if given.shifts is None else given.shifts[inside]
            pairs = numbered[:, inside].to(pairs.dtype)
            return given._replace(neighbor_list=pairs, neighbor_ptr=pointers, shifts=shifts)
        if isinstance(matrix, torch.Tensor) and matrix.ndim == 2:
            n_atoms, rows = self.number.shape[0], self.of_atoms(matrix).to(torch.int64)
            padding = n_atoms if given.fill_value is None else given.fill_value
            last = self.atoms.shape[0]
            is_atom = (rows != padding) & (rows >= 0) & (rows < n_atoms)
            numbered = torch.where(is_atom, self.number[rows.clamp(0, n_atoms - 1)], last)
            shifts = self.of_atoms(given.matrix_shifts)
            return given._replace(neighbor_matrix=numbered.to(matrix.dtype), matrix_shifts=shifts, fill_value=last)
        return given


def parts_of(atoms: System, is_open: torch.Tensor) -> tuple[Part, Part]:
    """The periodic systems and the open ones of a batch."""
    positions: Any = atoms.positions
    batch_idx, device = atoms.batch_idx, positions.device
    is_open = is_open.to(device)
    if batch_idx is None:
        of_atoms = is_open.expand(positions.shape[0])
    else:
        checks.check_batch(batch_idx, positions, is_open.shape[0])
        of_atoms = is_open[batch_idx.to(torch.int64)]
    found = []
    for systems, chosen in ((~is_open, ~of_atoms), (is_open, of_atoms)):
        numbers = chosen.nonzero().squeeze(1)
        number = torch.full_like(of_atoms, -1, dtype=torch.int64)
        number[numbers] = torch.arange(numbers.shape[0], device=device)
        found.append(Part(systems.nonzero().squeeze(1), numbers, number))
    return found[0], found[1]


def system_of(part: Part, atoms: System, n_systems: int) -> System:
    """The atoms of a part, with its cells."""
    batch_idx: Any = atoms.batch_idx
    if batch_idx is not None:
        place = torch.zeros(n_systems, dtype=batch_idx.dtype, device=batch_idx.device)
        place[part.systems] = torch.arange(part.systems.shape[0], dtype=batch_idx.dtype, device=batch_idx.device)
        batch_idx = place[part.of_atoms(batch_idx).to(torch.int64)]
    cell, pbc = atoms.cell, atoms.pbc
    if isinstance(cell, torch.Tensor) and cell.ndim == 3:
        cell = part.of_systems(cell, n_systems)
    if isinstance(pbc, torch.Tensor) and pbc.ndim == 2 and pbc.shape[0] == n_systems:
        pbc = part.of_systems(pbc, n_systems)
    elif not isinstance(pbc, torch.Tensor):
        pbc = torch.as_tensor(pbc).expand(n_systems, 3)[part.systems.cpu()]
    of_atoms = {name: part.of_atoms(getattr(atoms, name)) for name in ATOMS}
    return atoms._replace(cell=cell, pbc=pbc, batch_idx=batch_idx, **of_atoms)


ATOMS = ("positions", "charges", "dipoles", "quadrupoles", "widths")
"""What a system has of each atom."""


def joined(parts: Sequence[Part], values: Sequence[torch.Tensor], of_systems: bool) -> torch.Tensor:
    """Values of all atoms, or systems, from those of the parts."""
    count = sum(value.shape[0] for value in values)
    whole = values[0].new_zeros(count, *values[0].shape[1:])
    for part, value in zip(parts, values):
        whole = whole.index_copy(0, part.systems if of_systems else part.atoms, value)
    return whole


def by_parts(
    functions: tuple[Callable[[Part, System], Tensors], Callable[[Part, System], Tensors]],
    atoms: System,
    is_open: torch.Tensor,
    of_systems: Sequence[bool] = (),
) -> tuple[torch.Tensor | None, ...]:
    """Results for all systems: by the first function for the periodic ones, by the second for the open ones.

    ``of_systems`` says which results belong to systems; by default they belong to atoms.
    """
    parts, n_systems = parts_of(atoms, is_open), is_open.shape[0]
    used = [(part, function) for part, function in zip(parts, functions) if part.systems.shape[0]]
    results = [function(part, system_of(part, atoms, n_systems)) for part, function in used]
    columns = list(zip(*(result if isinstance(result, tuple) else (result,) for result in results)))
    kinds = of_systems or [False] * len(columns)
    return tuple(
        None if values[0] is None else joined([part for part, _ in used], values, kind)
        for values, kind in zip(columns, kinds)
    )


def mixed_sum(
    sums: tuple[Callable[[Part, System], Tensors], Callable[[Part, System], Tensors]],
    atoms: System,
    is_open: torch.Tensor,
    request: SumRequest,
) -> Tensors:
    """Results of the periodic systems, by the first of ``sums``, and of the open ones by the second, in one batch."""
    n_gradients = int(request.derivatives.forces) + sum(request.of_sources)
    of_systems = [request.energy_reduction == "system", *[False] * n_gradients]
    of_systems += [True] * request.derivatives.virial
    found: Any = by_parts(sums, atoms, is_open, of_systems)
    return found if len(found) > 1 else found[0]


def open_system(
    atoms: System, exclusions: Any = None, exclusion_factors: Any = None, n_systems: int | None = None
) -> ChargedSystem:
    """Checked systems without cells, as many as there are in ``batch_idx`` by default."""
    positions, charges, domain = atoms.positions, atoms.charges, atoms.domain
    assert charges is not None
    has_sources = atoms.dipoles is not None or atoms.quadrupoles is not None or atoms.widths is not None
    moments = widths = None
    with together(domain):
        checks.check_positions(positions, finite=False)
        check_charges(charges, positions, channels=True)
        if domain is None:
            batch_idx, n_systems = checks.check_batch(atoms.batch_idx, positions, n_systems)
        else:
            domain._check(atoms)
            batch_idx, n_systems = domain.batch_idx, domain.n_systems
        if has_sources:
            given_widths = of_all_atoms(domain, atoms.widths)
            moments, widths = check_sources(charges, atoms.dipoles, atoms.quadrupoles, given_widths, positions)
    if domain is not None:
        rows = exclusions_of_share(domain, exclusions, exclusion_factors, positions)
    else:
        rows = exclusion_rows(exclusions, exclusion_factors, positions)
        if rows is not None:
            check_same_system(rows, batch_idx)
    columns = charges if charges.ndim == 2 else charges.unsqueeze(1)
    cell = positions.new_zeros(1 if n_systems is None else n_systems, 3, 3)
    system = ChargedSystem(positions, columns, charges.ndim == 2, cell, batch_idx, rows, domain=domain)
    return system._replace(moments=moments, widths=widths)


def all_pairs(system: ChargedSystem, cutoff: float | None = None) -> Rows:
    """Pairs of each open system, all or up to a cutoff."""
    if cutoff is None:
        x = system.positions.detach()
        if not may_read(x):
            raise ValueError("`cutoff` or neighbors are needed where positions cannot be read")
        extent = float((x.amax(0) - x.amin(0)).norm()) if x.shape[0] else 0.0
        cutoff = 1.001 * extent + 1.0
    return build_rows(system.positions, cutoff, None, system.batch_idx)
