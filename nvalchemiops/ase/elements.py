"""Values that are given by element or by pair of elements, as tables over atomic numbers."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import ase
import numpy as np
from ase.data import atomic_numbers, chemical_symbols

OTHERS = "*"
"""The key for all elements, or pairs of elements, without a key."""

N_NUMBERS = len(chemical_symbols)


def is_by_pair(values: Any) -> bool:
    """Whether a mapping has pairs of elements for keys: ``"Mg-O"`` or ``("Mg", "O")``."""
    return isinstance(values, Mapping) and any(isinstance(key, tuple) or "-" in str(key) for key in values)


def atom_values(name: str, values: Any, shape: tuple[int, ...] = ()) -> Callable[[ase.Atoms], np.ndarray]:
    """A function that maps atoms to values (n_atoms, *shape). ``values``: a number, a mapping by element, or an array.

    The function raises for elements without a value and arrays of another shape.
    """
    if isinstance(values, Mapping):
        return functools.partial(_of_elements, name, element_table(name, values, shape))
    if np.ndim(values) == 0:
        return functools.partial(_of_elements, name, np.full((N_NUMBERS, *shape), number(name, values)))
    return functools.partial(of_array, name, np.array(np.asarray(values)), shape=shape)  # a copy, also of a tensor


def element_table(name: str, values: Mapping[str, Any], shape: tuple[int, ...] = ()) -> np.ndarray:
    """Values (n_numbers, *shape) by atomic number, NaN for elements without a value.

    Raises for a key that is not an element, or a value that is not finite or of another shape, with ``name`` and the
    key in the message.
    """
    read = number if not shape else functools.partial(_numbers, shape=shape)
    table = np.full((N_NUMBERS, *shape), read(name, values[OTHERS]) if OTHERS in values else np.nan)
    for key, value in values.items():
        if key != OTHERS:
            table[_atomic_number(name, key)] = read(f"{name}:{key}", value)
    return table


def _numbers(name: str, value: Any, shape: tuple[int, ...]) -> np.ndarray:
    """The value as float64; raise unless it is an array of finite numbers of this shape."""
    array = np.asarray(value)
    if array.shape != shape or array.dtype.kind not in "iuf" or not np.isfinite(array).all():
        raise ValueError(f"`{name}` must hold finite numbers of shape {shape}, got {value!r}")
    return array.astype(np.float64)


def pair_table(name: str, values: float | Mapping[Any, float]) -> np.ndarray:
    """Symmetric table (n_numbers, n_numbers) of values by two atomic numbers, NaN for pairs without a value.

    A number holds for all pairs. Raises as `element_table`, or if a pair has two different values.
    """
    if not isinstance(values, Mapping):
        return np.full((N_NUMBERS, N_NUMBERS), number(name, values))
    table = np.full((N_NUMBERS, N_NUMBERS), number(name, values[OTHERS]) if OTHERS in values else np.nan)
    seen: dict[tuple[int, int], float] = {}
    for key, value in values.items():
        if key == OTHERS:
            continue
        symbols = key if isinstance(key, tuple) else tuple(str(key).split("-"))
        if len(symbols) != 2:
            raise ValueError(f"`{name}`: {key!r} is not a pair of elements, such as ('Mg', 'O') or 'Mg-O'")
        first, second = sorted(_atomic_number(name, symbol) for symbol in symbols)
        value = number(f"{name}:{key}", value)
        if seen.setdefault((first, second), value) != value:
            raise ValueError(f"`{name}` has two different values for {_pair_name(first, second)}")
        table[first, second] = table[second, first] = value
    return table


def of_array(name: str, values: np.ndarray, atoms: ase.Atoms, shape: tuple[int, ...] = ()) -> np.ndarray:
    """The values as float64; raise unless each atom has a finite number, or a finite array of this shape."""
    if values.shape != (len(atoms), *shape):
        names = ", ".join(["n_atoms", *map(str, shape)]) + "," * (not shape)
        raise ValueError(f"`{name}` must have shape ({names}) = {(len(atoms), *shape)}, got {values.shape}")
    if values.dtype.kind not in "iuf":
        raise TypeError(f"`{name}` must hold numbers, got {values.dtype}")
    if not np.isfinite(values).all():
        raise ValueError(f"`{name}` has entries that are NaN or infinite")
    return values.astype(np.float64)


def _of_elements(name: str, table: np.ndarray, atoms: ase.Atoms) -> np.ndarray:
    values = table[atoms.numbers]
    missing = np.isnan(values).any(axis=tuple(range(1, values.ndim)))
    if missing.any():
        symbols = ", ".join(sorted({chemical_symbols[n] for n in atoms.numbers[missing]}))
        raise ValueError(f"`{name}` has no value for {symbols}, which the atoms contain; '{OTHERS}' names all others")
    return values


def of_pairs(name: str, table: np.ndarray, elements: np.ndarray) -> np.ndarray:
    """Values (n_elements, n_elements) for these atomic numbers; raise for pairs that have none."""
    values = table[np.ix_(elements, elements)]
    missing = [(elements[a], elements[b]) for a, b in np.argwhere(np.isnan(values)) if a <= b]
    if missing:
        pairs = ", ".join(_pair_name(first, second) for first, second in missing)
        raise ValueError(f"`{name}` has no value for {pairs}, which the atoms contain; '{OTHERS}' names all others")
    return values


def number(name: str, value: Any) -> float:
    """The value as a float; raise unless it is one finite number."""
    try:
        result = float("text" if isinstance(value, str) else value)
    except (TypeError, ValueError):
        raise TypeError(f"`{name}` must be a number, got {value!r}") from None
    if not math.isfinite(result):
        raise ValueError(f"`{name}` must be finite, got {result}")
    return result


def _atomic_number(name: str, symbol: Any) -> int:
    if isinstance(symbol, (int, np.integer)) and 0 <= symbol < N_NUMBERS:
        return int(symbol)
    if symbol not in atomic_numbers:
        raise ValueError(f"`{name}`: {symbol!r} is not a chemical symbol")
    return atomic_numbers[symbol]


def _pair_name(first: int, second: int) -> str:
    return f"{chemical_symbols[first]}-{chemical_symbols[second]}"
