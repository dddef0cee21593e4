"""Parameters of atoms, systems and pairs of species, converted to the arrays that the op reads."""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from nvalchemiops.interactions.pair.expression import Formula
from nvalchemiops.layout import layout
from nvalchemiops.torch import checks
from nvalchemiops.torch.operators.segments import spread_systems
from nvalchemiops.torch.runtime.context import is_eager

Parameters = Mapping[Any, Any]
"""Values by name. Several names that are consecutive in a formula may share a matrix with one column each, whose key is
the tuple of the names."""


def parameter_arrays(
    formula: Formula, parameters: Parameters, positions: torch.Tensor, species: Any, n_systems: int
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, int]:
    """Parameters (n_atoms, n) and global parameters (n_systems, n) for `pair_sum`, the species, and their number."""
    given = {name: key for key in parameters for name in (key if isinstance(key, tuple) else (key,))}
    check_names(formula, given)
    n_atoms = positions.shape[0]
    columns = [
        _column(key, parameters[key], n_atoms, "n_atoms", positions)
        for key in dict.fromkeys(given[name] for name in formula.per_atom)
    ]
    of_systems = _of_systems({n: parameters[n] for n in formula.global_parameters}, n_systems, positions)
    n_species = 0
    if formula.per_pair:
        if species is None:
            raise ValueError("`species` is needed: it holds the row of each atom in the tables (per_pair)")
        checks.check_index("species", species, positions, (n_atoms,))
        species = checks.int32_of(species)
        tables = [parameters[name] for name in formula.per_pair]
        sizes = (max([1, *table.shape]) for table in tables if isinstance(table, torch.Tensor) and table.ndim)
        n_species = next(sizes, 1)
        if not any(isinstance(table, torch.Tensor) and table.ndim for table in tables):
            species = torch.zeros_like(species)  # numbers alone are the same for all species
        for name, table in zip(formula.per_pair, tables):
            table = _table(name, table, n_species, positions)
            # clamped to the table; the kernel reports a species out of range
            columns.append(spread_systems(table, species.clamp(0, n_species - 1), n_atoms))
    elif species is not None:
        raise ValueError("`species` is given, but the potential has no tables (per_pair)")
    return _side_by_side(columns), of_systems, species, n_species


def check_names(formula: Formula, given: Iterable[str]) -> None:
    """Raise unless ``given`` are the names of the parameters of ``formula``."""
    given = list(given)
    known = (*formula.per_atom, *formula.global_parameters, *formula.per_pair)
    # checked first, because a misspelled name also leaves the right one missing
    for name in given:
        if name not in known:
            raise TypeError(
                f"`{name}` is neither an argument nor a parameter of this potential ({', '.join(known) or 'none'})"
            )
    for name in known:
        if name not in given:
            raise ValueError(f"`{name}` is missing: this potential needs {', '.join(known)}")


def _table(name: str, value: Any, n_species: int, positions: torch.Tensor) -> torch.Tensor:
    """A parameter of pairs of species as a table (n_species, n_species)."""
    if not isinstance(value, torch.Tensor):
        number = _number(name, value)
        return torch.full((n_species, n_species), number, dtype=positions.dtype, device=positions.device)
    value = checks.as_real(name, value, positions)
    if value.ndim == 0:
        return value.expand(n_species, n_species)
    if tuple(value.shape) != (n_species, n_species):
        raise ValueError(
            f"`{name}` must be a number or have shape (n_species, n_species) = ({n_species}, {n_species}), got "
            f"{tuple(value.shape)}"
        )
    return value


def _of_systems(values: dict[str, Any], n_systems: int, positions: torch.Tensor) -> torch.Tensor | None:
    """Global parameters (n_systems, n); if all are plain numbers, the tensor is kept for later calls."""
    numbers_alone = not any(isinstance(value, torch.Tensor) for value in values.values())
    # the number of systems is compared last, because the comparison specialises a compiled graph
    may_keep = is_eager(positions) and layout(positions.device.type).reads and n_systems <= MOST_REPEATED
    if values and numbers_alone and may_keep:
        return _repeated(tuple(_number(name, v) for name, v in values.items()), n_systems, positions.dtype)
    return _side_by_side([_column(name, v, n_systems, "n_systems", positions) for name, v in values.items()])


MOST_REPEATED = 4096
"""Largest number of systems for which a tensor of global numbers is kept; for more, making it is relatively cheap."""


@functools.lru_cache(maxsize=64)
def _repeated(numbers: tuple[float, ...], n: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor (n, len(numbers)) with the same numbers for each system."""
    with torch.inference_mode(False):
        return torch.tensor([numbers], dtype=dtype, device="cpu").repeat(n, 1)


def _column(
    name: str | tuple[str, ...], value: Any, size: int, size_name: str, positions: torch.Tensor
) -> torch.Tensor:
    """A parameter as a tensor (size, 1), or several that share a matrix as (size, n)."""
    if isinstance(name, tuple):
        assert tuple(value.shape) == (size, len(name))
        return value
    if not isinstance(value, torch.Tensor):
        return torch.full((size, 1), _number(name, value), dtype=positions.dtype, device=positions.device)
    value = checks.as_real(name, value, positions)
    if value.ndim == 0 or (value.ndim == 1 and value.shape[0] == 1):
        return value.reshape(1, 1).expand(size, 1)
    if value.ndim != 1 or value.shape[0] != size:
        square = value.ndim == 2 and value.shape[0] == value.shape[1]
        tables = "; tables for pairs of species are for parameters in `per_pair` (`tables=True`)" * square
        raise ValueError(
            f"`{name}` must be a number or have shape ({size_name},) = ({size},), got {tuple(value.shape)}{tables}"
        )
    return value.unsqueeze(1)


def _number(name: Any, value: Any) -> float:
    try:
        return checks.as_float(name, value)
    except TypeError:
        raise TypeError(f"`{name}` must be a number or a torch.Tensor, got {checks.kind_of(name, value)}") from None


def _side_by_side(columns: list[torch.Tensor]) -> torch.Tensor | None:
    if len(columns) > 1:
        return torch.cat(columns, dim=1)
    return columns[0] if columns else None
