"""ASE's neighbor list, computed by the search of this library."""

from collections.abc import Callable, Mapping
from typing import Any

import ase
import numpy as np
import torch

from nvalchemiops.ase.elements import OTHERS, number, pair_table
from nvalchemiops.torch import neighbors

QUANTITIES = "ijdDS"


def neighbor_list(
    quantities: str,
    a: ase.Atoms,
    cutoff: float | Mapping[Any, float] | Any,
    self_interaction: bool = False,
    max_nbins: float = 1e6,
) -> Any:
    """Pairs of atoms closer than a cutoff: `ase.neighborlist.neighbor_list`, with a cost linear in the number of atoms.

    Parameters
    ----------
    quantities : str
        The quantities to return, in this order: ``i`` and ``j`` (the atoms of a pair), ``d`` (distance), ``D`` (vector
        ``positions[j] - positions[i] + S @ cell``), ``S`` (image of j, as integers).
    a : ase.Atoms
        Any cell and periodicity, wrapped or not.
    cutoff : float, dict or sequence of float, angstrom
        One distance; distances by pairs of elements, ``{("C", "H"): 1.3, (6, 6): 1.85}``, where pairs without a key are
        not neighbors; or a radius for each atom: two atoms are neighbors if their spheres overlap.
    self_interaction : bool, optional
        Also list each atom as its own neighbor, at distance zero.
    max_nbins : float, optional
        Accepted for compatibility with ASE, without effect: the memory for bins follows from the number of atoms.

    Returns
    -------
    array or tuple of arrays
        One array for each quantity; no tuple for a single quantity: ``i``, ``j`` int (n_pairs,), ``d`` float
        (n_pairs,), ``D`` float (n_pairs, 3), ``S`` int (n_pairs, 3). Each pair is listed in both directions, sorted by
        i.

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message; positions that are not finite; a periodic axis without a cell vector,
        for which ASE takes a vector of length one.
    """
    if not all(hasattr(a, name) for name in ("numbers", "positions", "cell", "pbc")):
        raise TypeError(f"`a` must be an ase.Atoms, got {type(a).__name__}")
    if not isinstance(quantities, str):
        raise TypeError(f"`quantities` must be a string of '{QUANTITIES}', got {type(quantities).__name__}")
    for quantity in quantities:
        if quantity not in QUANTITIES:
            raise ValueError(f"`quantities` may contain '{QUANTITIES}', got {quantity!r}")
    largest, of_pairs = _cutoffs(cutoff, a)
    i, j, shifts = _pairs(a, largest)
    if self_interaction:
        atoms = np.arange(len(a))
        i, j = np.concatenate([atoms, i]), np.concatenate([atoms, j])
        shifts = np.concatenate([np.zeros((len(a), 3), dtype=np.int64), shifts])
        order = np.argsort(i, kind="stable")
        i, j, shifts = i[order], j[order], shifts[order]
    vectors = a.positions.take(j, axis=0) - a.positions.take(i, axis=0) + shifts @ a.cell.array
    distances = np.sqrt(np.einsum("pa,pa->p", vectors, vectors))
    if self_interaction or of_pairs is not None:
        near = distances < (largest if of_pairs is None else of_pairs(i, j))
        i, j, shifts, vectors, distances = (values[near] for values in (i, j, shifts, vectors, distances))
    found = {"i": i, "j": j, "d": distances, "D": vectors, "S": shifts}
    results = tuple(found[quantity] for quantity in quantities)
    return results[0] if len(results) == 1 else results


def _pairs(atoms: ase.Atoms, cutoff: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """i, j and images (n_pairs, 3) of all pairs, as int64."""
    if cutoff <= 0.0 or len(atoms) == 0:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros((0, 3), dtype=np.int64)
    positions, cell = (torch.tensor(a, dtype=torch.float64, device="cpu") for a in (atoms.positions, atoms.cell.array))
    pbc = torch.tensor(atoms.pbc, device="cpu")
    pairs, _, shifts = neighbors.neighbor_list(positions, cutoff, cell, pbc, return_neighbor_list=True)
    i, j = pairs.numpy().astype(np.int64)
    return i, j, shifts.numpy().astype(np.int64)


def _cutoffs(cutoff: Any, atoms: ase.Atoms) -> tuple[float, Callable[[np.ndarray, np.ndarray], np.ndarray] | None]:
    """The largest cutoff; if cutoffs differ, also a function that maps i and j to the cutoffs of pairs (n_pairs,)."""
    numbers = atoms.numbers
    if isinstance(cutoff, Mapping):
        table = pair_table("cutoff", {OTHERS: 0.0, **cutoff})
        present = np.unique(numbers)
        largest = float(table[np.ix_(present, present)].max(initial=0.0))
        return largest, lambda i, j: table[numbers[i], numbers[j]]
    if np.ndim(cutoff) == 0:
        return number("cutoff", cutoff), None
    radii = np.asarray(cutoff, dtype=np.float64)
    if radii.shape != (len(atoms),):
        raise ValueError(f"`cutoff`: radii must have shape ({len(atoms)},), got {radii.shape}")
    return number("cutoff", 2.0 * radii.max(initial=0.0)), lambda i, j: radii[i] + radii[j]
