"""Graphs of many structures for networks: one batch of tensors from ASE's atoms."""

import importlib.util
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import ase
import numpy as np
import torch

from nvalchemiops.progress import on_terminal, progress_bar
from nvalchemiops.torch import checks
from nvalchemiops.torch.neighbors import neighbor_list
from nvalchemiops.torch.systems import printed_in_short

ATOMS_PER_SEARCH = 50_000
"""Number of atoms searched at once: enough for the speed of a batch, and few compared with the whole graph."""

MANY = 1000
"""Least number of structures for which progress is shown by default."""


@printed_in_short
class Graph(NamedTuple):
    """The graph of a batch of structures; the atoms of each structure are contiguous.

    Attributes
    ----------
    positions : (n_atoms, 3) tensor, angstrom
    atomic_numbers : (n_atoms,) int32 tensor
    cell : (n_systems, 3, 3) tensor, angstrom
        Rows are lattice vectors.
    pbc : (n_systems, 3) bool tensor
    batch_idx : (n_atoms,) int32 tensor
        System of each atom.
    batch_ptr : (n_systems + 1,) int32 tensor
        First atom of each system, then n_atoms.
    neighbor_list : (2, n_pairs) int32 tensor
        i and j of each pair, sorted by i.
    neighbor_ptr : (n_atoms + 1,) int32 tensor
        First pair of each atom, then n_pairs.
    shifts : (n_pairs, 3) int32 tensor
        S of each pair: the image of the cell that j is in.
    distances : (n_pairs,) tensor, angstrom
    vectors : (n_pairs, 3) tensor, angstrom
        ``positions[j] - positions[i] + S @ cell``. Distances and vectors have no gradients: if positions require
        gradients, compute both with `nvalchemiops.torch.neighbors.formats.list_geometry`.
    """

    positions: torch.Tensor
    atomic_numbers: torch.Tensor
    cell: torch.Tensor
    pbc: torch.Tensor
    batch_idx: torch.Tensor
    batch_ptr: torch.Tensor
    neighbor_list: torch.Tensor
    neighbor_ptr: torch.Tensor
    shifts: torch.Tensor
    distances: torch.Tensor
    vectors: torch.Tensor

    def to_pyg(self) -> list[Any]:
        """One ``torch_geometric.data.Data`` for each structure.

        Their attributes are ``pos``, ``z``, ``cell`` (1, 3, 3), ``pbc`` (1, 3), ``edge_index`` (2, n_pairs) int64 with
        the neighbor j in its first row and the atom i in its second one (messages go from j to i), ``shifts``,
        ``edge_weight`` (distances) and ``edge_vec`` (vectors). All except ``edge_index`` and ``z``, which is int64,
        are views of this graph.

        Raises
        ------
        ImportError
            PyTorch Geometric is not installed.
        """
        try:
            from torch_geometric.data import Data
        except ImportError as error:
            raise ImportError(f"to_pyg needs PyTorch Geometric ({error}): pip install torch-geometric") from error
        first_atom = self.batch_ptr.tolist()
        first_pair = self.neighbor_ptr[self.batch_ptr.long()].tolist()
        edges = self.neighbor_list.flip(0).long()
        result = []
        for number in range(len(first_atom) - 1):
            atoms = slice(first_atom[number], first_atom[number + 1])
            pairs = slice(first_pair[number], first_pair[number + 1])
            result.append(
                Data(
                    pos=self.positions[atoms],
                    z=self.atomic_numbers[atoms].long(),
                    cell=self.cell[number : number + 1],
                    pbc=self.pbc[number : number + 1],
                    edge_index=edges[:, pairs] - first_atom[number],
                    shifts=self.shifts[pairs],
                    edge_weight=self.distances[pairs],
                    edge_vec=self.vectors[pairs],
                )
            )
        return result


def atoms_to_graph(
    atoms: ase.Atoms | Iterable[ase.Atoms],
    cutoff: float,
    nearest: int | None = None,
    *,
    ties: str = "keep",
    tie_tolerance: float | None = None,
    symmetric: bool = False,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    progress: bool | None = None,
) -> Graph:
    """The pairs of all structures within a cutoff, or the nearest of them, as one batch of tensors.

    Parameters
    ----------
    atoms : ase.Atoms or iterable of ase.Atoms
        Molecules, slabs and crystals, in any order; a structure may have no atoms.
    cutoff : float, angstrom
    nearest, ties, tie_tolerance, symmetric : optional
        As in `nvalchemiops.torch.neighbors.neighbor_list`.
    dtype : torch.dtype, optional
        float32 or float64; torch's default dtype by default. Pairs are searched for positions in this precision.
    device : optional
        Torch's default device by default.
    progress : bool, optional
        Whether to show a progress bar of tqdm. By default for 1,000 structures or more, if tqdm is installed and
        stderr is a terminal.

    Returns
    -------
    Graph

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message; an object in ``atoms`` that is not an ``ase.Atoms``; positions that are
        not finite; a periodic axis without a cell vector.
    ImportError
        ``progress=True`` without tqdm.
    """
    if not isinstance(atoms, Iterable):
        raise TypeError(f"`atoms`: ase.Atoms are needed, or an iterable of them, got {type(atoms).__name__}")
    structures = [atoms] if isinstance(atoms, ase.Atoms) else list(atoms)
    for number, structure in enumerate(structures):
        if not isinstance(structure, ase.Atoms):
            raise TypeError(f"`atoms`: ase.Atoms are needed, but number {number} is {type(structure).__name__}")
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if dtype not in checks.FLOATS:
        raise TypeError(f"`dtype` must be torch.float32 or torch.float64, got {dtype!r}")
    device = checks.check_device("device", torch.get_default_device() if device is None else device)
    progress = progress if progress is None else checks.check_flag("progress", progress)
    sizes = np.array([len(structure) for structure in structures], dtype=np.int64)
    batch_ptr = np.concatenate([[0], sizes.cumsum()])

    def gathered(values: Sequence[np.ndarray], shape: tuple[int, ...], of: torch.dtype) -> torch.Tensor:
        joined = np.concatenate(values) if values else np.zeros(0)
        return torch.tensor(joined.reshape(shape), dtype=of, device=device)

    positions = gathered([s.positions for s in structures], (-1, 3), dtype)
    numbers = gathered([s.numbers for s in structures], (-1,), torch.int32)
    cell = gathered([s.cell.array for s in structures], (-1, 3, 3), dtype)
    pbc = gathered([s.pbc for s in structures], (-1, 3), torch.bool)
    system = np.repeat(np.arange(len(structures), dtype=np.int32), sizes)
    batch_idx = torch.tensor(system, device=device)
    options: dict[str, Any] = {"nearest": nearest, "ties": ties, "tie_tolerance": tie_tolerance, "symmetric": symmetric}
    # each part holds structures with about this number of atoms in total, or a single larger structure
    part_of = (batch_ptr[1:] - 1).clip(0) // ATOMS_PER_SEARCH
    ends = np.flatnonzero(np.diff(part_of, append=-1)) + 1
    options |= {"return_neighbor_list": True, "return_distances": True, "return_vectors": True}

    def search(begin: int, end: int) -> tuple[torch.Tensor, ...]:
        """The pairs of the structures from ``begin`` to ``end``, with numbers of neighbors instead of pointers."""
        first, last = int(batch_ptr[begin]), int(batch_ptr[end])
        of_systems = (cell[begin:end], pbc[begin:end], batch_idx[first:last] - begin)
        pairs, ptr, *others = neighbor_list(positions[first:last], cutoff, *of_systems, **options)
        return (pairs + first, ptr.diff(), *others)

    found: list[tuple[torch.Tensor, ...]] = []
    if progress and importlib.util.find_spec("tqdm") is None:
        raise ImportError("`progress` needs tqdm: pip install tqdm")
    shows = len(structures) >= MANY and on_terminal() if progress is None else progress
    with progress_bar(len(structures), "structure", shows) as show:
        begin = 0
        for end in ends.tolist():
            try:
                found.append(search(begin, end))
            except ValueError:
                search(0, 0)  # without structures this checks all other arguments
                for number in range(begin, end):  # find the first structure that raises, to name it
                    try:
                        search(number, number + 1)
                    except ValueError as error:
                        raise ValueError(f"`atoms`: number {number}: {error}") from None
                raise
            show(end)
            begin = end
    found = found or [search(0, 0)]
    pairs = torch.cat([part[0] for part in found], 1)
    if pairs.shape[1] > torch.iinfo(torch.int32).max:
        raise ValueError(f"`cutoff`: {pairs.shape[1]} pairs are more than int32 can number; make several graphs")
    counts, shifts, distances, vectors = (torch.cat(parts) for parts in list(zip(*found))[1:])
    neighbor_ptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)
    pointers = torch.tensor(batch_ptr, dtype=torch.int32, device=device)
    edges = (pairs, neighbor_ptr, shifts, distances, vectors)
    return Graph(positions, numbers, cell, pbc, batch_idx, pointers, *edges)
