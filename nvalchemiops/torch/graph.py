"""`Graph`: atoms and the pairs closer than a cutoff, for networks that pass messages, on one process or on ranks.

On ranks a network of any number of layers needs ghosts within one cutoff only: in each layer the features of ghosts
come from the ranks that own the atoms (`Graph.at_senders`), and in the backward pass their gradients go back. Without
messages, a rank would compute the layers of ghosts again: three layers on a cube two cutoffs wide would need the first
layer within two cutoffs of it, for 27 times the atoms that it owns, and the second for 8 times: 12 times the work.
"""

from collections.abc import Callable
from typing import Any

import torch

from nvalchemiops.torch import checks
from nvalchemiops.torch.batching import count_systems
from nvalchemiops.torch.dynamics.sums import Division
from nvalchemiops.torch.neighbors.pairs import Pairs, distances_and_vectors
from nvalchemiops.torch.systems import System


class Graph:
    """Atoms, and an edge from each neighbor closer than the cutoff to each atom.

    A network that is written with it computes the same on one process and on ranks: energies, forces, and gradients of
    every order with respect to positions, cells and weights. On ranks making a graph and its methods are collective
    calls, and atoms are those that the rank owns.

    Parameters
    ----------
    system : System
        One system or a batch, with a ``domain`` on ranks. Vectors are differentiable in its positions and cell.
    cutoff : float, length
        On ranks at most the cutoff of the ``domain``.

    Attributes
    ----------
    n_atoms, n_systems : int
    receivers : (n_edges,) int64 tensor
        The atom of each edge, in ascending order.
    senders : (n_edges,) int64 tensor
        Its neighbor: a row of what `with_ghosts` returns.
    vectors : (n_edges, 3) tensor, length
        From the receiver to the image of the sender.
    distances : (n_edges,) tensor, length
        Less than the cutoff.

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message; atoms that have moved too far since the ``domain`` was made.

    Examples
    --------
    The number of neighbors of each atom, then the sum of the distances of its neighbors to theirs.

    >>> graph = Graph(System(positions, cell=cell), cutoff=3.0)
    >>> graph.to_receivers(torch.ones_like(graph.distances)).tolist()
    [6.0, 6.0, 6.0, 6.0, 6.0, 6.0, 6.0, 6.0]
    >>> h = graph.to_receivers(graph.distances)
    >>> graph.sum(graph.to_receivers(graph.at_senders(h))) / 36 / 2.82
    tensor([8.], dtype=torch.float64)
    """

    def __init__(self, system: System, cutoff: float) -> None:
        cutoff = checks.check_positive("cutoff", cutoff)
        domain = system.domain
        self.n_atoms, self.n_systems = system.positions.shape[0], count_systems(system)
        batch_idx = system.batch_idx if domain is None else domain.batch_idx
        self._division = Division(batch_idx, self.n_systems, domain)
        positions, cell, systems = system.positions, system.cell, system.batch_idx
        if domain is None:
            found = system.neighbors(cutoff)
            assert found.pairs is not None
            (first, second), shifts = found.pairs, found.shifts
        else:
            with domain._together():
                domain._check(system)
                rows = domain._owned_rows(positions, cutoff, cell).alone
            assert rows.pointers is not None
            first, second, shifts = torch.repeat_interleave(rows.pointers.diff()), rows.neighbors, rows.shifts
            positions, systems = self.with_ghosts(positions), domain.batch_idx_with_ghosts
            cell = None if cell is None else domain.replicated(cell)
        if cell is not None:
            cell = cell.reshape(-1, 3, 3)
            systems = None if cell.shape[0] == 1 else systems
        pairs = Pairs(cell, systems, None, first, second, shifts)
        if domain is not None:  # its list reaches beyond the cutoff, by the skin
            with torch.no_grad():
                near = (distances_and_vectors(positions, pairs)[0] < cutoff).nonzero().squeeze(1)
            shifts = None if shifts is None else shifts.index_select(0, near)
            pairs = pairs._replace(first=first[near], second=second[near], shifts=shifts)
        self.distances, self.vectors = distances_and_vectors(positions, pairs)
        assert pairs.first is not None
        self.receivers, self.senders = pairs.first.long(), pairs.second.long()

    def with_ghosts(self, values: torch.Tensor) -> torch.Tensor:
        """Values (n_atoms, ...) of atoms, and below them on ranks those of ghosts, from their owners."""
        domain = self._division.domain
        return values if domain is None else domain.with_ghosts(values)

    def at_senders(self, values: torch.Tensor) -> torch.Tensor:
        """Values (n_atoms, ...) of atoms, for the sender of each edge (n_edges, ...)."""
        return self.with_ghosts(values).index_select(0, self.senders)

    def at_receivers(self, values: torch.Tensor) -> torch.Tensor:
        """Values (n_atoms, ...) of atoms, for the receiver of each edge (n_edges, ...). No message."""
        return values.index_select(0, self.receivers)

    def to_receivers(self, messages: torch.Tensor) -> torch.Tensor:
        """Sums (n_atoms, ...) of the messages (n_edges, ...) that each atom receives. No message between ranks."""
        return messages.new_zeros((self.n_atoms, *messages.shape[1:])).index_add(0, self.receivers, messages)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sums (n_systems, ...) of values (n_atoms, ...) over all atoms of each system, the same on all ranks."""
        return self._division.sums(values)

    def at_atoms(self, values: torch.Tensor) -> torch.Tensor:
        """Values (n_systems, ...) of systems, for each atom (n_atoms, ...).

        Values that are the same on all ranks, such as results of `sum`, must be brought to atoms in this way: their
        gradients are then those of all atoms.
        """
        found = self._division.of_atoms(values, self.n_atoms)
        return found.expand(self.n_atoms, *values.shape[1:])

    def replicated(self, module: torch.nn.Module) -> Callable[..., Any]:
        """The module as a function, whose parameters get gradients that are complete on each rank.

        Without a domain the module itself. A loss must then be computed from results of `sum`.
        """
        domain = self._division.domain
        return module if domain is None else domain.replicated(module)
