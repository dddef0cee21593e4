"""Sizes of systems, the input of error models: cells, numbers of atoms, average distances."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from nvalchemiops.interactions.electrostatics import error_models as core
from nvalchemiops.kernels.lattice import WORTH_CHANGING, is_skewed, shortest_on_host
from nvalchemiops.layout import layout
from nvalchemiops.torch.interactions.electrostatics.system import ChargedSystem
from nvalchemiops.torch.runtime.cache import cached_by_identity
from nvalchemiops.torch.runtime.context import is_eager, may_read, on_host

MOST_SYSTEMS = 512
"""Largest batch for which results of the sizes are kept; for larger ones choices take little of the time of a sum."""


class Sizes(NamedTuple):
    """Cells (n_systems, 3, 3), atoms (n_systems,) and average distance of each system, on the host."""

    cell: np.ndarray
    n_atoms: np.ndarray
    spacing: np.ndarray

    @property
    def volume(self) -> np.ndarray:
        """Volumes (n_systems,)."""
        return np.abs(np.linalg.det(self.cell))

    @property
    def lengths(self) -> np.ndarray:
        """Lengths (n_systems, 3) of lattice vectors."""
        return np.linalg.norm(self.cell, axis=2)

    def with_shorter_vectors(self) -> tuple["Sizes", np.ndarray | None]:
        """The sizes with the shortest lattice vectors in systems where a mesh along them has fewer points.

        Also returns the integer matrices (n_systems, 3, 3) whose products with the cells are the new cells; None if no
        cell changes.
        """
        # numbers of Python take a tenth of the time of arrays with one entry
        skewed = is_skewed(self.cell[0].tolist() if len(self.cell) == 1 else self.cell.transpose(1, 2, 0))
        if not np.any(skewed):
            return self, None
        found = shortest_on_host(self.cell).astype(np.float64)
        shorter = np.linalg.norm(found @ self.cell, axis=2).prod(1) < WORTH_CHANGING * self.lengths.prod(1)
        if not shorter.any():
            return self, None
        basis = np.where(shorter[:, None, None], found, np.eye(3))
        return self._replace(cell=basis @ self.cell), basis

    def along_spacing(self, mesh_spacing: Any) -> tuple["Sizes", np.ndarray | None]:
        """`with_shorter_vectors` for a mesh of one spacing in each system; three are those along the given vectors."""
        several = isinstance(mesh_spacing, torch.Tensor) and mesh_spacing.ndim > 1
        return (self, None) if several else self.with_shorter_vectors()

    def for_mesh(self) -> tuple["Sizes", np.ndarray | None]:
        """The sizes with lattice vectors that make the common mesh smaller, and matrices as `with_shorter_vectors`.

        Boxes of the same shape in different orientations share a mesh if their longest axes come first.
        """
        sizes, basis = self.with_shorter_vectors()
        if len(self.cell) == 1:
            return sizes, basis
        lengths = sizes.lengths
        order = np.argsort(-lengths, axis=1, kind="stable")
        in_order = np.take_along_axis(lengths, order, 1)
        if in_order.max(0).prod() > WORTH_CHANGING * lengths.max(0).prod():
            return sizes, basis
        basis = np.eye(3)[order] @ (np.eye(3) if basis is None else basis)
        return self._replace(cell=basis @ self.cell), basis

    @property
    def skewness(self) -> np.ndarray:
        """Factor (n_systems,) by which errors of derivatives along lattice vectors grow when they become forces."""
        return core.skewness(self.cell, np.linalg.inv(self.cell))

    def mesh_model(self, mesh: Sequence[int], order: int) -> core.Mesh:
        """The model of errors of a mesh."""
        return core.mesh_model(self.cell, np.linalg.inv(self.cell), mesh, order)


def sizes_of(cell: torch.Tensor, count: np.ndarray) -> Sizes:
    """Sizes of systems with cells (n_systems, 3, 3) and numbers of atoms (n_systems,). Reads values on the host."""
    return _sizes(on_host(cell.detach()), count)


def _sizes(cell: np.ndarray, count: np.ndarray) -> Sizes:
    lattice = cell.astype(np.float64)
    return Sizes(lattice, count, core.average_distance(count, np.abs(np.linalg.det(lattice))))


def counted(batch_idx: torch.Tensor | None, n_systems: int, n_atoms: int) -> np.ndarray:
    """Atoms (n_systems,) of each system. Reads values on the host, on a GPU once for a tensor."""
    if batch_idx is None:
        return np.full(1, float(n_atoms))

    def read() -> np.ndarray:
        return np.bincount(on_host(batch_idx), minlength=n_systems)

    if layout(batch_idx.device.type).reads:
        return read().astype(np.float64)
    known = cached_by_identity(
        "atoms in systems", batch_idx, n_systems, lambda: (torch.from_numpy(read()),), on_host=True
    )
    return on_host(known[0]).astype(np.float64)


SizesKey = tuple[bytes, np.dtype[Any], bytes]
"""Values on which sizes depend: cells, their dtype, and numbers of atoms."""


def key_of_sizes(system: ChargedSystem) -> SizesKey | None:
    """The values on which `sizes_of_system` depends, read on the host; None if choices are not to be kept.

    They are kept in plain eager mode, and where reading these values costs less than it saves.
    """
    cell, batch_idx = system.cell, system.batch_idx
    if system.domain is not None or system.n_systems > MOST_SYSTEMS or not may_read(cell, batch_idx, wait=True):
        return None
    # a traced graph would hold what was kept as constants
    if torch.jit.is_tracing() or not is_eager(system.positions, system.moments, cell, batch_idx, system.widths):
        return None
    lattice, count = on_host(cell.detach()), counted(batch_idx, system.n_systems, system.n_atoms)
    return lattice.tobytes(), lattice.dtype, count.tobytes()


def sizes_of_system(system: ChargedSystem, known: SizesKey | None = None) -> Sizes:
    """Sizes of systems, including the atoms of all ranks. Reads values on the host, unless they are ``known``."""
    if known is not None:
        cell, dtype, count = known
        return _sizes(np.frombuffer(cell, dtype).reshape(-1, 3, 3), np.frombuffer(count))
    if system.domain is not None:
        return sizes_of(system.cell, on_host(system.domain.atoms_in_systems))
    return sizes_of(system.cell, counted(system.batch_idx, system.n_systems, system.n_atoms))


def spacing_of(system: ChargedSystem) -> torch.Tensor:
    """Average distance of each system, without reading anything."""
    return core.average_distance(*count_and_volume(system), torch)


def count_and_volume(system: ChargedSystem) -> tuple[torch.Tensor, torch.Tensor]:
    """Number of atoms and volume of each system, without reading anything."""
    return system.atoms_in_systems(), torch.linalg.det(system.cell.detach().to(torch.float64)).abs()
