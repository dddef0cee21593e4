"""How many systems there are; one batch of several, and of their lists, for the two ``concatenate`` methods."""

from collections.abc import Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from nvalchemiops.neighbors.rows import NO_PADDING
from nvalchemiops.torch import checks
from nvalchemiops.torch.runtime.context import may_read
from nvalchemiops.torch.runtime.recorder import read_number

if TYPE_CHECKING:
    from nvalchemiops.torch.systems import Neighbors, System


def told_systems(system: "System") -> int | None:
    """Number of systems, as the domain or shapes tell; None for a batch whose shapes do not tell."""
    if system.domain is not None:
        return system.domain.n_systems
    return 1 if system.batch_idx is None else checks.systems_in_shapes((system.cell, 3), (system.pbc, 2))


def count_systems(system: "System") -> int:
    """Number of systems. Reads ``batch_idx`` if neither the domain nor the cells nor ``pbc`` tell."""
    if (found := told_systems(system)) is not None:
        return found
    assert system.batch_idx is not None
    if system.batch_idx.numel():
        return 1 + int(read_number(system.batch_idx.max()))
    return int(getattr(system.cell, "ndim", 0) == 3 or getattr(system.pbc, "ndim", 0) == 2)  # one, without atoms


def joined_systems(systems: Sequence["System"]) -> dict[str, Any]:
    """The fields of one batch of all systems; see `System.concatenate`."""
    for number, system in enumerate(systems):
        if system.domain is not None:
            raise ValueError(f"`systems`: number {number} has a `domain`: divide the whole batch")
        checks.check_positions(system.positions, finite=False)
    counts = [count_systems(system) for system in systems]
    fields: dict[str, Any] = {"positions": _joined("positions", [system.positions for system in systems])}
    for name in ("charges", "numbers", "dipoles", "quadrupoles", "widths"):
        fields[name] = _of_atoms(name, systems)
    indices, first = [], 0
    for system, count in zip(systems, counts):
        own, _ = checks.check_batch(system.batch_idx, system.positions, count)
        if own is None:
            own = torch.zeros(system.positions.shape[0], dtype=torch.int32, device=system.positions.device)
        indices.append(own + first)
        first += count
    fields["batch_idx"] = _joined("batch_idx", indices)
    has_cells, says_pbc = ([getattr(s, name) is not None for s in systems] for name in ("cell", "pbc"))
    if any(has_cells):
        cells = [s.positions.new_zeros(3, 3) if s.cell is None else s.cell for s in systems]
        fields["cell"] = torch.cat(list(map(_of_each, repeat("cell"), cells, counts)))
    told = all(has_cells) or (not any(has_cells) and indices[-1].numel() > 0)  # the number of systems
    if any(says_pbc) or not told:
        default = (torch.full((3,), has_cell, device=s.positions.device) for s, has_cell in zip(systems, has_cells))
        flags = [d if s.pbc is None else checks.pbc_tensor(s.pbc, d.device) for s, d in zip(systems, default)]
        fields["pbc"] = torch.cat(list(map(_of_each, repeat("pbc"), flags, counts)))
    return fields


def joined_neighbors(neighbors: Sequence["Neighbors"], systems: Sequence["System"]) -> dict[str, Any]:
    """The fields of the neighbors in one batch of all systems; see `Neighbors.concatenate`."""
    if len(neighbors) != len(systems):
        raise ValueError(f"`neighbors` are those of {len(neighbors)} systems, but there are {len(systems)} `systems`")
    as_matrix = neighbors[0].matrix is not None
    for number, near in enumerate(neighbors):
        if (near.pairs is None) == (near.matrix is None):
            raise ValueError(f"`neighbors`: number {number} must have either pairs or a matrix")
        if (near.matrix is not None) != as_matrix:
            raise ValueError(f"`neighbors`: number {number} and number 0: one is a matrix, the other has pairs")
        if near.half != neighbors[0].half:
            raise ValueError(f"`neighbors`: number {number} has another `half` than number 0")
    cutoffs = [near.cutoff for near in neighbors if near.cutoff is not None]
    fields: dict[str, Any] = {"half": neighbors[0].half}
    fields["cutoff"] = min(cutoffs) if len(cutoffs) == len(neighbors) else None
    sizes = [system.positions.shape[0] for system in systems]
    joined = (_joined_matrices if as_matrix else _joined_lists)(neighbors, sizes)
    for number, (near, system) in enumerate(zip(neighbors, systems)):
        if near.shifts is None and joined["shifts"] is not None and system.cell is not None:
            raise ValueError(f"`neighbors`: number {number} has no `shifts`, which its system needs with `cell`")
    return fields | joined


def _joined_lists(neighbors: Sequence["Neighbors"], sizes: Sequence[int]) -> dict[str, Any]:
    n_atoms, has_padding = sum(sizes), any(near.padding is not None for near in neighbors)
    pairs, shifts, pointers, rooms = [], [], [], []
    first_atom = 0
    first_pair: Any = 0
    for number, (near, size) in enumerate(zip(neighbors, sizes)):
        own, images, ends = near.pairs, near.shifts, near.row_pointers
        assert own is not None
        if ends is not None and ends.shape[0] == 1 and not own.shape[1]:  # no pairs, for any number of atoms
            ends = ends.new_zeros(size + 1)
        if ends is not None and ends.shape[0] != size + 1:
            raise _other_size(number, ends.shape[0] - 1, size)
        # room is left out, or follows behind all pairs; a list that its pointers do not fit stays one. The first entry
        # of room marks it, as in `rows.unused_slots`
        room: Any = None
        if ends is not None and not may_read(own, ends):
            place = torch.arange(own.shape[1], device=own.device)
            room = (place >= ends[-1]) & ((place == ends[-1]) & (own[0] == NO_PADDING)).any()
        elif ends is not None and 0 <= (end := int(ends[-1])) < own.shape[1] and own[0, end] == NO_PADDING:
            own, images = own[:, :end], None if images is None else images[:end]
        moved = _moved(own, first_atom, size)
        if near.padding is not None:  # of second atoms; the first one may have this number
            moved = torch.stack([moved[0], torch.where(own[1] == near.padding, n_atoms, moved[1])])
        pairs.append(moved)
        shifts.append(own.new_zeros(own.shape[1], 3) if images is None else images)
        if ends is not None:
            pointers.append(ends[min(number, 1) :] + first_pair)
        rooms.append(room)
        first_atom, first_pair = first_atom + size, first_pair + own.shape[1]
        if room is not None:
            first_pair = first_pair - room.sum(dtype=torch.int32)
    joined = torch.cat(pairs, 1)
    images = torch.cat(shifts) if any(near.shifts is not None for near in neighbors) else None
    if any(room is not None for room in rooms):
        order = torch.cat([own[0] != own[0] if room is None else room for own, room in zip(pairs, rooms)])
        order = order.to(torch.uint8).argsort(stable=True)
        joined, images = joined[:, order], None if images is None else images[order]
    return {
        "pairs": joined,
        "row_pointers": torch.cat(pointers) if len(pointers) == len(neighbors) else None,
        "shifts": images,
        "padding": n_atoms if has_padding else None,
    }


def _joined_matrices(neighbors: Sequence["Neighbors"], sizes: Sequence[int]) -> dict[str, Any]:
    n_atoms, first_atom = sum(sizes), 0
    width = max(near.matrix.shape[1] for near in neighbors)  # type: ignore[union-attr]  # all have a matrix
    rows, shifts = [], []
    for number, (near, size) in enumerate(zip(neighbors, sizes)):
        own = near.matrix
        assert own is not None
        if own.shape[0] not in (0, size):
            raise _other_size(number, own.shape[0], size)
        padding, images = size if near.padding is None else near.padding, near.shifts
        if not own.shape[0]:  # no neighbors, for any number of atoms
            own, images = own.new_full((size, 0), padding), None
        images = own.new_zeros(*own.shape, 3) if images is None else images
        entries, more = torch.where(own == padding, n_atoms, _moved(own, first_atom, size)), width - own.shape[1]
        rows.append(pad(entries, (0, more), value=n_atoms))
        shifts.append(pad(images, (0, 0, 0, more)))
        first_atom += size
    has_shifts = any(near.shifts is not None for near in neighbors)
    return {"matrix": torch.cat(rows), "shifts": torch.cat(shifts) if has_shifts else None}


def _moved(atoms: torch.Tensor, first_atom: int, size: int) -> torch.Tensor:
    """Atoms of one of the systems as those of the batch; those that the system does not have stay invalid."""
    return torch.where((atoms >= 0) & (atoms < size), atoms + first_atom, atoms.clamp(max=-1))


def _other_size(number: int, found: int, size: int) -> ValueError:
    return ValueError(f"`neighbors`: number {number} is for {found} atoms, but its system has {size}")


def _joined(name: str, values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The values of all systems in one tensor, whose rows must have the same shape."""
    shapes = {tuple(value.shape[1:]) for value in values if value.shape != (0,)}  # charges of no atoms fit all others
    if len(shapes) > 1:
        raise ValueError(f"`{name}` of all systems must have rows of the same shape, got {sorted(shapes)}")
    return torch.cat(list(values))


def _of_atoms(name: str, systems: Sequence["System"]) -> Any:
    """A value of all atoms, or a number that is the same for all; None if no system has it."""
    given = [getattr(system, name) for system in systems]
    if all(value is None for value in given):
        return None
    if all(isinstance(value, (int, float)) and value == given[0] for value in given):
        return given[0]
    found = []
    for number, (system, value) in enumerate(zip(systems, given)):
        n_atoms = system.positions.shape[0]
        if value is None and n_atoms:
            if name == "charges" and _all_zero(given):  # said of some structures, for example in their files
                return None
            raise ValueError(f"`{name}` of system number {number} is missing, but other systems have it")
        if value is not None:
            if not isinstance(value, torch.Tensor):
                value = torch.as_tensor(value, dtype=system.positions.dtype, device=system.positions.device)
            value = value if value.ndim else value.to(system.positions.device).expand(n_atoms)
            if value.shape[0] != n_atoms:
                raise ValueError(f"`{name}` of system number {number} has {value.shape[0]} rows for {n_atoms} atoms")
            found.append(value)
    return _joined(name, found)


def _all_zero(values: Sequence[Any]) -> bool:
    """Whether all values but None are tensors of zeros, which are no variables; False where they may not be read."""
    given = [value for value in values if value is not None]
    return may_read(*given, wait=True) and not any(
        not isinstance(value, torch.Tensor) or value.requires_grad or bool(value.any()) for value in given
    )


def _of_each(name: str, value: torch.Tensor, count: int) -> torch.Tensor:
    """A value of each of the systems in one batch, from that of a single system or of all."""
    ndim = {"cell": 3, "pbc": 2}[name]
    if value.ndim < ndim or value.shape[0] == 1:
        return value.expand(count, *(value.shape[1 - ndim :] or (3,)))  # one flag of `pbc` is that of all axes
    if value.shape[0] != count:
        raise ValueError(f"`{name}` is for {value.shape[0]} systems, but there are {count}")
    return value
