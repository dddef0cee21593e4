"""Interface of the terms of a calculator: the atoms, the contribution of a term, and shared neighbor lists."""

import dataclasses
from typing import Any, NamedTuple, Protocol

import ase
import numpy as np
import torch

from nvalchemiops.torch.neighbors import VerletList

Periodicity = tuple[bool, bool, bool]


class Contribution(NamedTuple):
    """The contribution of one term to the results.

    Attributes
    ----------
    energies : (n_atoms,) tensor, eV
        Or one number for all atoms; ASE then gets no energies of atoms.
    forces : (n_atoms, 3) tensor, eV/angstrom
    virial : (3, 3) tensor, ``-dE/dstrain``, eV, or None
        Needed if `System.wants_virial`.
    charges : (n_atoms,) tensor, e, or None
    dipoles : (n_atoms, 3) tensor, e angstrom, or None
        Dipoles of the atoms, in addition to the dipoles of charges at positions.
    torques : (n_atoms, 3) tensor, eV, or None
        Torques on dipoles and quadrupoles.
    """

    energies: torch.Tensor
    forces: torch.Tensor
    virial: torch.Tensor | None
    charges: torch.Tensor | None = None
    dipoles: torch.Tensor | None = None
    torques: torch.Tensor | None = None


class Term(Protocol):
    """A part of a potential energy: `Pair`, `Electrostatics`, or any class with the method `evaluate`.

    A term whose contributions have charges also has an attribute ``has_charges = True``. A term with a method
    ``for_batches(system)``, which returns an `InBatches` or None, is computed for all systems of a batch in one call of
    `FromASE`.
    """

    def evaluate(self, system: "System") -> Contribution:
        """The contribution for these atoms. Raises ValueError for atoms that the term does not support."""


class InBatches(NamedTuple):
    """A term for the atoms of several systems, whose values depend on elements and initial charges alone.

    Attributes
    ----------
    interaction : callable
        For `nvalchemiops.torch.dynamics.SumOfTerms`.
    charges : (n_atoms,) tensor, e, or None
        Charges of the `nvalchemiops.torch.System` for this term.
    """

    interaction: Any
    charges: torch.Tensor | None = None


class SharedLists:
    """The neighbor lists of a calculator, one for each periodicity that a term requests.

    A list reaches to the largest cutoff requested since the number of atoms last changed, plus the skin. ``searches``
    is the number of searches so far.
    """

    def __init__(self, skin: float) -> None:
        self.skin = skin
        self.searches = 0
        self._n_atoms = 0
        self._lists: dict[Periodicity, VerletList] = {}
        self._current: dict[Periodicity | None, tuple[float, dict[str, Any]]] = {}

    def begin(self, n_atoms: int) -> None:
        """Drop the results for earlier positions."""
        if n_atoms != self._n_atoms:
            self._lists.clear()
            self._n_atoms = n_atoms
        self._current.clear()

    def near(
        self, positions: torch.Tensor, cell: torch.Tensor | None, pbc: Periodicity, cutoff: float
    ) -> dict[str, Any]:
        """Neighbors at least up to ``cutoff``, as arguments of operators. All terms of a call share the list."""
        reach, found = self._current.get(pbc, (0.0, {}))
        if reach >= cutoff:
            return found
        kept = self._lists.get(pbc)
        if kept is None or kept.cutoff < cutoff:
            width = None if kept is None else kept.max_neighbors
            kept = self._lists[pbc] = VerletList(cutoff, self.skin, max_neighbors=width)
        before = kept.num_builds
        axes = None if cell is None else torch.tensor(pbc, device=positions.device)
        matrix, _, *shifts = kept(positions, cell, axes)
        found = dict(zip(("neighbor_matrix", "neighbor_matrix_shifts"), (matrix, *shifts)))
        self.searches += kept.num_builds - before
        self._current[pbc] = kept.cutoff, found
        return found

    def all_pairs(self, positions: torch.Tensor) -> dict[str, Any]:
        """A matrix that lists for each atom all other atoms."""
        if None not in self._current:
            n_atoms, device = positions.shape[0], positions.device
            others = torch.arange(max(n_atoms - 1, 0), dtype=torch.int32, device=device)
            atoms = torch.arange(n_atoms, dtype=torch.int32, device=device).unsqueeze(1)
            self._current[None] = 0.0, {"neighbor_matrix": others + (others >= atoms).to(torch.int32)}
        return self._current[None][1]


@dataclasses.dataclass(frozen=True)
class System:
    """The atoms as terms receive them.

    Attributes
    ----------
    atoms : ase.Atoms
        Must not be changed.
    positions : (n_atoms, 3) float64 tensor, angstrom
    cell : (3, 3) float64 tensor, angstrom, or None
        None if no axis is periodic. Rows of open axes may be zero.
    wants_virial : bool
        Whether the virial will be used.
    """

    atoms: ase.Atoms
    positions: torch.Tensor
    cell: torch.Tensor | None
    wants_virial: bool
    lists: SharedLists = dataclasses.field(repr=False)

    @classmethod
    def of(cls, atoms: ase.Atoms, wants_virial: bool, lists: SharedLists, device: torch.device) -> "System":
        """The system with the tensors of these atoms. Lists of earlier positions are checked again."""
        lists.begin(len(atoms))
        positions, cell = (
            torch.tensor(a, dtype=torch.float64, device=device) for a in (atoms.positions, atoms.cell[:])
        )
        return cls(atoms, positions, cell if atoms.pbc.any() else None, wants_virial, lists)

    def tensor(self, values: Any) -> torch.Tensor:
        """The values with the dtype and on the device of the positions."""
        return torch.as_tensor(values, dtype=self.positions.dtype, device=self.positions.device)

    def of_atoms(self, values: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Values (n_atoms, ...) of all atoms, as a tensor for the atoms of this process (all, except in `on_ranks`)."""
        return torch.as_tensor(values, dtype=dtype or self.positions.dtype, device=self.positions.device)

    def neighbors(self, cutoff: float | None, pbc: Periodicity | None = None) -> dict[str, Any]:
        """Neighbors of all atoms, as keyword arguments for operators of this library.

        Parameters
        ----------
        cutoff : float or None, angstrom
            The list holds all pairs closer than this, and may hold farther pairs, which the term must leave out. None:
            all pairs, for atoms that are not periodic.
        pbc : (bool, bool, bool), optional
            By default the periodicity of the atoms.

        Returns
        -------
        dict
            ``neighbor_matrix`` (n_atoms, width), padded with n_atoms, and for periodic atoms
            ``neighbor_matrix_shifts`` (n_atoms, width, 3), as from `nvalchemiops.torch.neighbors.neighbor_list`.

        Raises
        ------
        ValueError
            The cutoff is None, but the atoms are periodic.
        """
        axes = periodicity(self.atoms.pbc if pbc is None else pbc)
        if cutoff is not None:
            return self.lists.near(self.positions, self.cell, axes, cutoff)
        if any(axes):
            raise ValueError(
                "`cutoff` is needed for periodic atoms, which have infinitely many pairs (for charges use the methods "
                "'ewald' and 'pme')"
            )
        return self.lists.all_pairs(self.positions)

    def pairs(self, cutoff: float | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Pairs closer than the cutoff, each in both directions, with gradients for positions and cell.

        Parameters
        ----------
        cutoff : float or None, angstrom
            As for `neighbors`.

        Returns
        -------
        i, j : (n_pairs,) int64 tensors
        vectors : (n_pairs, 3) tensor, angstrom
            From i to the image of j.
        """
        near = self.neighbors(cutoff)
        matrix, shifts = near["neighbor_matrix"], near.get("neighbor_matrix_shifts")
        i, slot = (matrix < len(self.atoms)).nonzero(as_tuple=True)
        j = matrix[i, slot].to(torch.int64)
        vectors = self.positions[j] - self.positions[i]
        if shifts is not None and self.cell is not None:
            vectors = vectors + shifts[i, slot].to(vectors) @ self.cell
        if cutoff is None:
            return i, j, vectors
        within = vectors.detach().square().sum(1) < cutoff**2
        return i[within], j[within], vectors[within]

    def with_gradients(self) -> "System":
        """The same atoms, with positions and a cell that require gradients."""
        cell = None if self.cell is None else self.cell.detach().requires_grad_()
        return dataclasses.replace(self, positions=self.positions.detach().requires_grad_(), cell=cell)


def periodicity(pbc: Any) -> Periodicity:
    """Three bools."""
    x, y, z = np.asarray(pbc, dtype=bool).tolist()
    return x, y, z
