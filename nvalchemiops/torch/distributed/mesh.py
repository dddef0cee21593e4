"""A mesh that is divided among ranks, and its Fourier transform.

Each rank spreads its atoms to a *window*: the part of the mesh around its brick that their splines reach. Windows
overlap. `nvalchemiops.torch.distributed.transform` transforms their sum.
"""

import numpy as np
import torch

from nvalchemiops.kernels.mesh.splines import first_point
from nvalchemiops.torch.distributed.domain import Domain
from nvalchemiops.torch.distributed.pencils import division_of, numbers_for
from nvalchemiops.torch.distributed.transform import window_spectrum, window_values
from nvalchemiops.torch.runtime._torch_internals import outside_of_transforms

SLACK = 1e-6
"""Margin of windows in mesh spacings, for rounding of coordinates."""


class MeshDivision:
    """The division of the mesh of a domain among its ranks, for splines of this order.

    ``mesh`` and ``window``, that of this rank, are (int, int, int) points, ``grid`` has the rows and the columns of the
    grid of ranks, and ``planes`` the first and the end of the planes of this rank along the second and the third axis,
    in Fourier space.
    """

    def __init__(self, domain: Domain, mesh: tuple[int, int, int], order: int) -> None:
        # no reference to the domain, which keeps its divisions: a cycle would delay freeing its lists
        self._n_ranks, self._group = domain.n_ranks, domain.number
        self.mesh = mesh
        starts, sizes = self._all_windows(domain, order)
        self._numbers = numbers_for(domain.rank, mesh, starts, sizes)
        self.grid = (self._numbers[0], self._numbers[1])
        division = division_of(mesh, self._numbers, self._n_ranks)
        start, self.window, self.planes = starts[domain.rank], division.window, division.planes
        with (
            torch.inference_mode(False),
            outside_of_transforms(),
        ):  # tensors made in inference mode or under transforms could not be differentiated later
            self._first = torch.as_tensor(start, dtype=torch.float64, device=domain.device)
            self._offset = domain.cells_left * torch.tensor(self.mesh, device=domain.device)
            self._is_whole = torch.tensor([a == b for a, b in zip(self.window, self.mesh)], device=domain.device)

    def _all_windows(self, domain: Domain, order: int) -> tuple[np.ndarray, np.ndarray]:
        """The first point and the number of points (n_ranks, 3) along each axis, of the windows of all ranks."""
        n = np.array(self.mesh)
        low, high = (ends * n for ends in domain.bricks.bounds(0.5 * domain.skin))
        first, last = first_point(low - SLACK, order), first_point(high + SLACK, order)
        size = last + order - first
        is_whole = (size >= n) | (domain.bricks.cuts_along == 0)
        return np.where(is_whole, 0, first), np.where(is_whole, n, size)

    def in_window(self, coordinates: torch.Tensor) -> torch.Tensor:
        """Coordinates (n_owned, 3) in mesh spacings, relative to the first point of the window."""
        return torch.where(self._is_whole, coordinates, coordinates - self._offset - self._first)

    def spectrum(self, values: torch.Tensor) -> torch.Tensor:
        """Half of the transform of values (n_systems, n_channels, *window) of all ranks; see `window_spectrum`."""
        return window_spectrum(values, self.mesh, self._numbers, self._n_ranks, self._group)

    def values(self, spectrum: torch.Tensor) -> torch.Tensor:
        """Real values on the window (n_systems, n_channels, *window), not divided by the number of points."""
        return window_values(spectrum, self.mesh, self._numbers, self._n_ranks, self._group)
