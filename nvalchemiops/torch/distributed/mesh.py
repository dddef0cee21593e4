"""A mesh that is divided among ranks, and its Fourier transform.

Each rank spreads its atoms to a *window*: the part of the mesh around its brick that their splines reach. Windows
overlap. For the transform the mesh is cut into slabs of planes along the first axis, one for each rank, and after two
of the three transforms into slabs along the second axis, as in every distributed transform. All of it is linear and
differentiable.

Slabs are cut along the first or the second axis, where there are more bricks: then windows are nearly slabs. The last
axis stays, because the transform along it is that of real numbers: frequencies on its last plane have another sign
than on those of the other axes.
"""

import itertools
import math
from typing import NamedTuple

import numpy as np
import torch

from nvalchemiops.torch.distributed.collectives import all_to_all_rows
from nvalchemiops.torch.distributed.domain import Domain


class _Window(NamedTuple):
    """The points of the mesh that a rank spreads to: first point and number of points along each axis."""

    start: tuple[int, ...]
    size: tuple[int, ...]


class MeshDivision:
    """How the mesh of a domain is divided.

    Parameters
    ----------
    domain : Domain
    mesh : (int, int, int)
        Points along the lattice vectors of the domain.
    order : int
        Of the splines.

    Attributes
    ----------
    axes : list of int
        The order of the lattice vectors.
    mesh : (int, int, int)
        Points along them in this order.
    window : (int, int, int)
        Points of the window of this rank.
    planes : (int, int)
        First plane of this rank along the second axis, in Fourier space, and the one after the last.
    """

    def __init__(self, domain: Domain, mesh: tuple[int, int, int], order: int) -> None:
        self.domain = domain
        self.axes = [0, 1, 2] if domain.grid[0] >= domain.grid[1] else [1, 0, 2]
        self.mesh = (mesh[self.axes[0]], mesh[self.axes[1]], mesh[2])
        self._windows = [self._window_of(rank, order) for rank in range(domain.n_ranks)]
        here = self._windows[domain.rank]
        self.window = here.size
        self._slabs, self._columns = (_slabs(n, domain.n_ranks) for n in self.mesh[:2])
        self.planes = self._columns[domain.rank]
        self._first = torch.tensor(here.start, dtype=torch.float64, device=domain.device)
        self._offset = domain._cells_left()[:, self.axes] * torch.tensor(self.mesh, device=domain.device)
        self._is_whole = torch.tensor([a == b for a, b in zip(here.size, self.mesh)], device=domain.device)
        # which planes of a window are in which slab
        self._shared = [[self._planes_in(window, slab) for slab in self._slabs] for window in self._windows]

    def _window_of(self, rank: int, order: int) -> _Window:
        bounds = self.domain.bricks.bounds(rank, 0.5 * self.domain.skin)
        start, size = [], []
        for axis, n in zip(self.axes, self.mesh):
            low, high = bounds[axis]
            first, last = math.floor(low * n) - order, math.ceil(high * n) + order + 1
            whole = self.domain.grid[axis] == 1 or last - first >= n
            start.append(0 if whole else first)
            size.append(n if whole else last - first)
        return _Window(tuple(start), tuple(size))

    def _planes_in(self, window: _Window, slab: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Planes of the window that lie in a slab, and their places there."""
        plane = (window.start[0] + np.arange(window.size[0])) % self.mesh[0]
        inside = np.flatnonzero((plane >= slab[0]) & (plane < slab[1]))
        device = self.domain.device
        return torch.as_tensor(inside, device=device), torch.as_tensor(plane[inside] - slab[0], device=device)

    def in_window(self, coordinates: torch.Tensor) -> torch.Tensor:
        """Coordinates (n_owned, 3) in mesh spacings, from the first point of the window."""
        return torch.where(self._is_whole, coordinates, coordinates - self._offset - self._first)

    # -- windows and slabs ------------------------------------------------------------------------

    def _points(self, window: _Window, axis: int) -> torch.Tensor | None:
        """Points of the mesh along an axis of the window, None for all."""
        if window.size[axis] == self.mesh[axis]:
            return None
        return torch.arange(window.size[axis], device=self.domain.device).add_(window.start[axis]) % self.mesh[axis]

    def _to_slab(self, values: torch.Tensor) -> torch.Tensor:
        """The slab (n_meshes, n_planes, n_y, n_z) of this rank, to which all ranks add values on their windows."""
        rank, n_meshes = self.domain.rank, values.shape[0]
        here = [values.index_select(1, planes).flatten() for planes, _ in self._shared[rank]]
        sizes = [
            n_meshes * len(shared[rank][0]) * math.prod(window.size[1:])
            for shared, window in zip(self._shared, self._windows)
        ]
        blocks = all_to_all_rows(torch.cat(here), [len(h) for h in here], sizes, self.domain.number).split(sizes)
        first, last = self._slabs[rank]
        slab = values.new_zeros((n_meshes, last - first, *self.mesh[1:]))
        for block, shared, window in zip(blocks, self._shared, self._windows):
            if not block.numel():
                continue
            block, planes = block.view(n_meshes, -1, *window.size[1:]), shared[rank][1]
            y, z = (self._points(window, axis) for axis in (1, 2))
            if y is None and z is None:
                slab = slab.index_add(1, planes, block)
                continue
            if z is not None:
                block = block.new_zeros((*block.shape[:3], self.mesh[2])).index_add(3, z, block)
            if y is not None:
                block = block.new_zeros((*block.shape[:2], self.mesh[1], block.shape[3])).index_add(2, y, block)
            slab = slab.index_add(1, planes, block)
        return slab

    def _to_window(self, slab: torch.Tensor) -> torch.Tensor:
        """Values on the window of this rank from those on the slabs of all ranks."""
        rank, n_meshes = self.domain.rank, slab.shape[0]
        pieces = []
        for shared, window in zip(self._shared, self._windows):
            piece = slab.index_select(1, shared[rank][1])
            for axis in (1, 2):
                points = self._points(window, axis)
                piece = piece if points is None else piece.index_select(axis + 1, points)
            pieces.append(piece.flatten())
        here = self._windows[rank].size
        planes = [planes for planes, _ in self._shared[rank]]
        sizes = [n_meshes * len(p) * here[1] * here[2] for p in planes]
        blocks = all_to_all_rows(torch.cat(pieces), [len(p) for p in pieces], sizes, self.domain.number).split(sizes)
        found = torch.cat([block.view(n_meshes, -1, *here[1:]) for block in blocks], 1)
        return found.index_select(1, torch.argsort(torch.cat(planes)))

    # -- the transform ----------------------------------------------------------------------------

    def _swap(self, values: torch.Tensor, to_columns: bool) -> torch.Tensor:
        """Complex slabs (n_meshes, n_x, n_y, n_z) cut along the first axis, then cut along the second, or back."""
        rank = self.domain.rank
        cut, other = (self._columns, self._slabs) if to_columns else (self._slabs, self._columns)
        axis = 2 if to_columns else 1
        pieces = [values.narrow(axis, first, last - first).flatten() for first, last in cut]
        n_meshes, mine = values.shape[0], cut[rank][1] - cut[rank][0]
        shapes = [
            (n_meshes, b - a, mine, values.shape[3]) if to_columns else (n_meshes, mine, b - a, values.shape[3])
            for a, b in other
        ]
        sizes = [math.prod(shape) for shape in shapes]
        sent = torch.view_as_real(torch.cat(pieces))
        found = all_to_all_rows(sent, [len(p) for p in pieces], sizes, self.domain.number)
        blocks = torch.view_as_complex(found).split(sizes)
        return torch.cat([b.view(shape) for b, shape in zip(blocks, shapes)], 3 - axis)

    def spectrum(self, values: torch.Tensor) -> torch.Tensor:
        """Half of the Fourier transform of the sum of all windows, for the planes of this rank.

        Parameters
        ----------
        values : (n_systems, n_channels, *window) tensor

        Returns
        -------
        (n_systems, n_channels, n_x, n_planes, n_z // 2 + 1, 2) tensor
        """
        slab = self._to_slab(values.flatten(0, 1))
        columns = torch.fft.fft(self._swap(torch.fft.rfft2(slab), True), dim=1)
        return torch.view_as_real(columns).unflatten(0, values.shape[:2])

    def values(self, spectrum: torch.Tensor) -> torch.Tensor:
        """Real values on the window (n_systems, n_channels, *window), without a division by the number of points."""
        columns = torch.fft.ifft(torch.view_as_complex(spectrum.flatten(0, 1)), dim=1, norm="forward")
        slab = torch.fft.irfft2(self._swap(columns, False), s=self.mesh[1:], norm="forward")
        return self._to_window(slab).unflatten(0, spectrum.shape[:2])


def _slabs(n: int, count: int) -> list[tuple[int, int]]:
    """The first of each of ``count`` parts of ``n`` planes, and the one after its last."""
    return list(itertools.pairwise(n * part // count for part in range(count + 1)))
