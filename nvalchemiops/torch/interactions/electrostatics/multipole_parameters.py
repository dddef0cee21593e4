"""Parameters of Ewald sums of Gaussian moments, with the names and conventions of nvalchemi-toolkit-ops 0.5.0."""

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from nvalchemiops.torch import checks
from nvalchemiops.torch.interactions.electrostatics.accuracy.choice import warn_of_errors
from nvalchemiops.torch.interactions.electrostatics.parameters import estimate_pme_mesh_dimensions
from nvalchemiops.torch.neighbors.rows import GivenNeighbors, Rows, build_rows, pair_distances, rows_of
from nvalchemiops.torch.runtime._torch_internals import named_in_files
from nvalchemiops.torch.runtime.context import may_read, on_host
from nvalchemiops.torch.runtime.recorder import read_number


@named_in_files
class MultipoleEwaldParameters(NamedTuple):
    """Parameters of `multipole_ewald_summation`.

    Attributes
    ----------
    alpha : (n_systems,) tensor, 1/length
    sigma : float or tensor, length
    real_space_cutoff : (n_systems,) tensor, length
    reciprocal_space_cutoff : (n_systems,) tensor, 1/length
    """

    alpha: torch.Tensor
    sigma: Any
    real_space_cutoff: torch.Tensor
    reciprocal_space_cutoff: torch.Tensor


@named_in_files
class MultipolePMEParameters(NamedTuple):
    """Parameters of `multipole_particle_mesh_ewald`.

    Attributes
    ----------
    alpha : (n_systems,) tensor, 1/length
    sigma : float or tensor, length
    mesh_dimensions : (int, int, int)
    mesh_spacing : (n_systems, 3) tensor, length
    real_space_cutoff : (n_systems,) tensor, length
    """

    alpha: torch.Tensor
    sigma: Any
    mesh_dimensions: tuple[int, int, int]
    mesh_spacing: torch.Tensor
    real_space_cutoff: torch.Tensor


def estimate_multipole_ewald_parameters(
    positions: torch.Tensor,
    cell: torch.Tensor,
    sigma: float | torch.Tensor,
    batch_idx: torch.Tensor | None = None,
    accuracy: float = 1e-6,
    cost_ratio: float = 1.0,
) -> MultipoleEwaldParameters:
    """Parameters that balance the two parts of Ewald's sum (Kolafa and Perram 1992).

    With ``η = (V² / (N R))^(1/6) / √(2π)`` and the cost ratio R, the cutoffs are ``√(-2 ln accuracy)`` times η and 1/η,
    and ``1/α² = 2 η² - 4 σ²``.

    Parameters
    ----------
    positions, cell, batch_idx, sigma
        As for `multipole_electrostatic_energy`; sigma may be a tensor (n_systems,).
    accuracy : float, optional
        Relative error of the energies.
    cost_ratio : float, optional
        Cost of a pair, relative to the cost of one k-vector for one atom.

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message; or Gaussians too wide, or a cell too small, for a sum in two parts. In
        these cases use `multipole_electrostatic_energy`.
    """
    alpha, eta, reach = _balance(positions, cell, sigma, batch_idx, accuracy, cost_ratio)
    return MultipoleEwaldParameters(alpha, sigma, reach * eta, reach / eta)


def estimate_multipole_pme_parameters(
    positions: torch.Tensor,
    cell: torch.Tensor,
    sigma: float | torch.Tensor,
    batch_idx: torch.Tensor | None = None,
    accuracy: float = 1e-6,
    cost_ratio: float = 1.0,
    *,
    spline_order: int = 5,
    fft_padding_fraction: float = 0.25,
) -> MultipolePMEParameters:
    """Parameters as from `estimate_multipole_ewald_parameters`, with a mesh from `estimate_pme_mesh_dimensions`.

    Parameters
    ----------
    positions, cell, sigma, batch_idx, accuracy, cost_ratio
        As for `estimate_multipole_ewald_parameters`, with the same errors.
    spline_order, fft_padding_fraction : optional
        As for `estimate_pme_mesh_dimensions`.
    """
    alpha, eta, reach = _balance(positions, cell, sigma, batch_idx, accuracy, cost_ratio)
    cells = cell.detach().to(torch.float64).reshape(-1, 3, 3)
    splitting = 1.0 / (math.sqrt(2.0) * eta)
    mesh = estimate_pme_mesh_dimensions(
        cells, splitting, accuracy, spline_order=spline_order, fft_padding_fraction=fft_padding_fraction
    )
    spacing = cells.norm(dim=2) / torch.tensor(mesh, dtype=torch.float64, device=cells.device)
    return MultipolePMEParameters(alpha, sigma, mesh, spacing, reach * eta)


def _balance(
    positions: Any, cell: Any, sigma: Any, batch_idx: Any, accuracy: Any, cost_ratio: Any
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Alpha, η, and the factor ``√(-2 ln accuracy)`` of the cutoffs."""
    checks.check_positions(positions, finite=False)
    cells = checks.check_lattice(cell, positions).detach().to(torch.float64).reshape(-1, 3, 3)
    n_systems = cells.shape[0]
    batch_idx, _ = checks.check_batch(batch_idx, positions, n_systems)
    accuracy, cost_ratio = checks.check_positive("accuracy", accuracy), checks.check_positive("cost_ratio", cost_ratio)
    if accuracy >= 1.0:
        raise ValueError(f"`accuracy` must be below 1, got {accuracy}")
    width = (
        sigma.detach().to(torch.float64) if isinstance(sigma, torch.Tensor) else checks.check_positive("sigma", sigma)
    )
    if batch_idx is None:
        n_atoms = torch.full((1,), float(positions.shape[0]), dtype=torch.float64, device=cells.device)
    else:
        n_atoms = torch.bincount(batch_idx, minlength=n_systems).to(torch.float64)
    n_atoms = n_atoms.clamp(min=1.0)  # a system without atoms counts as one atom, as in other estimates
    volume = torch.linalg.det(cells).abs()
    eta = (volume**2 / (n_atoms * cost_ratio)) ** (1.0 / 6.0) / math.sqrt(2.0 * math.pi)
    left = 2.0 * eta**2 - 4.0 * width**2
    if may_read(left) and read_number((left <= 0.0).any()):
        raise ValueError(
            "`sigma` is too large for these cells, or `cost_ratio` too large: Gaussians are as wide as the splitting. "
            "Sum over k-vectors alone, by multipole_electrostatic_energy"
        )
    return left.rsqrt(), eta, math.sqrt(-2.0 * math.log(accuracy))


def warn_of_short_list(
    place: dict[str, Any], near: dict[str, Any], needed: torch.Tensor | None, accuracy: float
) -> None:
    """Warn if a list ends below ``needed`` (n_systems,), the cutoff for alpha of an estimate; None for a given alpha.

    The list must have been checked. Nothing is said where values cannot be read, nor in replays of a recorded call.
    """
    positions, cell = place["positions"].detach(), place["cell"].detach().reshape(-1, 3, 3)
    batch_idx = place["batch_idx"]
    if needed is None or not may_read(positions, cell, batch_idx, *near.values()):
        return
    if not all(read_number(values.isfinite().all()) for values in (positions, cell)):
        return
    if batch_idx is None:
        batch_idx = torch.zeros(positions.shape[0], dtype=torch.int32, device=positions.device)
    cutoffs, accuracy = on_host(needed), float(accuracy)

    def farthest(rows: Rows | None) -> np.ndarray:
        """The largest distance below the needed cutoff, for each system."""
        assert rows is not None
        first, distances = pair_distances(rows, positions, cell, batch_idx)
        number, length = on_host(batch_idx)[on_host(first)], on_host(distances)
        found, is_near = np.zeros(len(cutoffs)), length < cutoffs[number]
        np.maximum.at(found, number[is_near], length[is_near])
        return found

    reach = farthest(rows_of(GivenNeighbors(*near.values()), positions, periodic=True))
    errors = accuracy ** np.square(reach / cutoffs)
    if (errors > 10.0 * accuracy).any():
        # a small molecule may have no more pairs
        there_is = farthest(build_rows(positions, float(cutoffs.max()), cell, batch_idx))
        errors = np.where(there_is > (1.0 + 1e-6) * reach, errors, 0.0)
        of = "a list that is shorter than `real_space_cutoff` of the estimate"
        warn_of_errors(accuracy, errors, of, f"it must reach {cutoffs.max():.4g}", least=10.0)
