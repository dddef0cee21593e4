"""A mesh that is divided among ranks, and its Fourier transform.

Each rank spreads its atoms to a *window*: the part of the mesh around its brick that their splines reach. Windows
overlap. `nvalchemiops.torch.distributed.transform` transforms their sum.

The mesh is cut into slabs along the first or the second axis, where bricks are thinner, so that windows are nearly
slabs. The last axis is never cut, since the real transform runs along it: the frequency of its last plane is n/2 there,
but -n/2 on other axes.
"""

import numpy as np
import torch

from nvalchemiops.kernels.mesh import first_point
from nvalchemiops.torch.distributed.domain import Domain
from nvalchemiops.torch.distributed.transform import division_of, partners_of, window_spectrum, window_values
from nvalchemiops.torch.runtime._torch_internals import outside_of_transforms

SLACK = 1e-6
"""Margin of windows in mesh spacings, for rounding of coordinates."""


class MeshDivision:
    """The division of the mesh of a domain among its ranks.

    Parameters
    ----------
    domain : Domain
    mesh : (int, int, int)
        Points along the lattice vectors of the domain.
    order : int
        Order of the splines.

    Attributes
    ----------
    axes : list of int
        The lattice vectors in the order in which the mesh has them.
    mesh : (int, int, int)
        Points along these axes, in this order.
    window : (int, int, int)
        Points of the window of this rank.
    planes : (int, int)
        First and end of the planes of this rank along the second axis, in Fourier space.
    """

    def __init__(self, domain: Domain, mesh: tuple[int, int, int], order: int) -> None:
        # no reference to the domain, which keeps its divisions: a cycle would delay freeing its lists
        self._n_ranks, self._group = domain.n_ranks, domain.number
        low, high = domain.bricks.bounds(0.0)
        thickness = (high - low).mean(0)
        self.axes = [0, 1, 2] if thickness[0] <= thickness[1] else [1, 0, 2]
        self.mesh = (mesh[self.axes[0]], mesh[self.axes[1]], mesh[2])
        starts, sizes = self._all_windows(domain, order)
        self._windows = partners_of(domain.rank, self.mesh, starts, sizes)
        start, self.window = starts[domain.rank], division_of(self.mesh, self._windows, self._n_ranks).window
        self.planes = division_of(self.mesh, self._windows, self._n_ranks).columns[domain.rank]
        with (
            torch.inference_mode(False),
            outside_of_transforms(),
        ):  # tensors made in inference mode or under transforms could not be differentiated later
            self._first = torch.as_tensor(start, dtype=torch.float64, device=domain.device)
            self._offset = domain.cells_left[:, self.axes] * torch.tensor(self.mesh, device=domain.device)
            self._is_whole = torch.tensor([a == b for a, b in zip(self.window, self.mesh)], device=domain.device)

    def _all_windows(self, domain: Domain, order: int) -> tuple[np.ndarray, np.ndarray]:
        """The first point and the number of points (n_ranks, 3) along each axis, of the windows of all ranks."""
        n = np.array(self.mesh)
        low, high = (ends[:, self.axes] * n for ends in domain.bricks.bounds(0.5 * domain.skin))
        first, last = first_point(low - SLACK, order), first_point(high + SLACK, order)
        size = last + order - first
        is_whole = (size >= n) | (domain.bricks.cuts_along[self.axes] == 0)
        return np.where(is_whole, 0, first), np.where(is_whole, n, size)

    def in_window(self, coordinates: torch.Tensor) -> torch.Tensor:
        """Coordinates (n_owned, 3) in mesh spacings, relative to the first point of the window."""
        return torch.where(self._is_whole, coordinates, coordinates - self._offset - self._first)

    def spectrum(self, values: torch.Tensor) -> torch.Tensor:
        """Half of the Fourier transform of the sum of all windows, for the planes of this rank.

        Parameters
        ----------
        values : (n_systems, n_channels, *window) tensor

        Returns
        -------
        (n_systems, n_channels, n_x, n_planes, n_z // 2 + 1, 2) tensor
        """
        return window_spectrum(values, self.mesh, self._windows, self._n_ranks, self._group)

    def values(self, spectrum: torch.Tensor) -> torch.Tensor:
        """Real values on the window (n_systems, n_channels, *window), not divided by the number of points."""
        return window_values(spectrum, self.mesh, self._windows, self._n_ranks, self._group)
