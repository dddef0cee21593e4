"""Strengths of dipoles, quadrupoles and Gaussians, in the units of the error models for charges."""

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from nvalchemiops.interactions.electrostatics import error_models as core
from nvalchemiops.torch.interactions.electrostatics.accuracy.sizes import spacing_of
from nvalchemiops.torch.interactions.electrostatics.system import ChargedSystem
from nvalchemiops.torch.interactions.pair.shares import largest
from nvalchemiops.torch.runtime import engine
from nvalchemiops.torch.runtime.context import is_mapped, may_read, on_host, slices_of

NEAR_MOMENTS = 4.0
"""Wave number, in units of 1/d, at which the strength of moments gives the forces between neighbors. Measured values:
6.5 for random dipoles, 6.3 for random quadrupoles on a distorted lattice. Underestimated forces cost time,
overestimated forces cost accuracy."""


class Strengths(NamedTuple):
    """Strengths of moments, in the units of the error models; arrays, or tensors.

    In a wave of wave number k a dipole has the amplitude of a charge ``k μ cos``, and a quadrupole has the amplitude of
    a charge ``k² Q cos² / 2``. Moments therefore have the errors of charges with the mean square
    ``q² + k² μ² / 3 + k⁴ Q:Q / 30`` at the wave number that a cutoff leaves out: ``k_c``, or in real space
    ``2 α² r_c``, both about ``2 α √(-ln accuracy)``. A mesh of spacing h confuses a wave with another one whose wave
    number is larger by ``2π/h``, either in spreading or in gathering.
    """

    squares: Any  # (n_systems, 3), means of q², μ² and Q:Q
    spacing: Any  # (n_systems,), d
    force: Any  # (n_systems,), RMS of the forces times d²
    # (n_systems,), atoms for each of the (Σs²)²/Σs⁴ sources, where s² are mean squares of equivalent charges at the
    # wave number of forces between neighbors; 1 if that is not beyond `error_models.ATOMS_PER_SOURCE`, so that choices
    # do not depend on it, and for a source alone, between whose images there are no forces
    per_source: Any

    @property
    def are_few(self) -> bool:
        """Whether few atoms of a system have moments: a mesh for the forces between them depends on how far they are.

        False where values cannot be read.
        """
        return isinstance(self.per_source, np.ndarray) and bool((self.per_source > core.ATOMS_PER_SOURCE).any())

    def at(self, k: Any) -> Any:
        """The mean square of equivalent charges at wave numbers k (n_systems,)."""
        return _at(k, self.squares)

    def left_out(self, accuracy: float, alpha: Any) -> Any:
        """The mean square of equivalent charges at the wave number that cutoffs leave out."""
        return self.at(2.0 * math.sqrt(-math.log(accuracy)) * alpha)

    def target(self, accuracy: float, alpha: Any, xp: Any = np) -> core.Target:
        """The target for a splitting parameter, in units of errors of charges."""
        left_out = self.left_out(accuracy, alpha)
        force = self.force / xp.where(left_out > 0.0, left_out, 1.0)  # NumPy warns of 0 / 0 where all sources are zero
        is_known = (left_out > 0.0) & xp.isfinite(force)
        force = core.in_steps(force, "nearest", core.STEPS_OF_FORCES, xp)
        return core.Target(accuracy, xp.where(is_known, force, core.TYPICAL_FORCE))

    def of_mesh(self, accuracy: float, alpha: Any, spacing: Any) -> Any:
        """Errors (n_systems,) of a mesh of this spacing, in the units of `target`."""
        found = (self.at(2.0 * np.pi / spacing) * self.at(2.0 * alpha)) ** 0.5
        left_out = self.left_out(accuracy, alpha)
        is_zero = left_out <= 0.0  # without sources, errors are as for charges alone
        return (found + is_zero) / (left_out + is_zero)

    def mesh_model(self, model: core.Mesh, accuracy: float, alpha: Any, xp: Any) -> core.Mesh:
        """The model of a given mesh."""
        finest = xp.amin(model.spacings, 1) / model.skewness
        factor = self.of_mesh(accuracy, alpha, finest).clip(1e-300, None)
        return core.Mesh(model.spacings, model.skewness * factor, model.order)

    def with_force_of_charges(self, force: Any, xp: Any) -> "Strengths":
        """The strengths with forces between the charges, given in units of the mean square of the charges."""
        return self._replace(force=xp.maximum(self.force, force * self.squares[:, 0]))

    def of_few(self, nearby: Any, xp: Any) -> "Strengths":
        """The strengths with the forces between few sources, whose distances follow from forces between charges.

        ``nearby`` (n_systems,) is the estimate of forces between charges as large as the moments, `magnitudes_of`. With
        ν atoms for each source, two charges at the distance r have the force ``√ν (d / r)²`` in its unit. Moments are
        taken to be as far from each other: at least d, and at most as far as sources that are evenly distributed,
        d ν^(1/3).
        """
        root = self.per_source**0.5
        nearby = xp.maximum(xp.minimum(nearby, root), root ** (-1.0 / 3.0))
        farther = (root / nearby) ** 0.5  # 1 to ν^(1/3)
        force = core.TYPICAL_FORCE * nearby * self.at(NEAR_MOMENTS / (farther * self.spacing))
        return self._replace(force=xp.where(self.per_source > core.ATOMS_PER_SOURCE, force, self.force))

    def on_mesh(self, xp: Any) -> "Strengths":
        """The strengths with forces reduced by as much as errors of a mesh are larger where few atoms have moments."""
        return self._replace(force=self.force / core.larger_on_mesh(self.per_source, xp))


def _at(k: Any, values: Any) -> Any:
    """What has the values (..., 3) for q², μ² and Q:Q, for equivalent charges at wave numbers k."""
    k2 = k * k
    return values[..., 0] + k2 * (values[..., 1] * (1.0 / 3.0) + k2 * values[..., 2] * (1.0 / 30.0))


def has_known_moments(system: ChargedSystem) -> bool:
    """Whether there are moments whose values may be read; under ``vmap``, the values of all slices."""
    moments = system.moments
    return not system.of_points and (may_read(moments, wait=True) or (may_read() and is_mapped(moments)))


def strengths_of(system: ChargedSystem, xp: Any) -> Strengths:
    """Strengths of the moments of each system, with numpy or torch; forces are estimated without neighbors.

    Rounded in steps, so that choices are the same for dipoles that change a little from call to call.
    """

    def evaluate(_: Any, /, **values: Any) -> tuple[torch.Tensor, ...]:
        here = system._replace(**values)
        return (*_means(here), spacing_of(here), here.atoms_in_systems())

    with torch.no_grad():
        moving = {"positions": system.positions.detach(), "moments": system.moments.detach()}
        fixed = {"cell": system.cell.detach(), "batch_idx": system.batch_idx}
        ways: Any = () if system.domain is None else "ranks share it"
        found: Any = engine.run_function("strengths", evaluate, moving, (), fixed, ways)
        means, roots, spacing, count = map(on_host, found) if xp is np else found
    k = NEAR_MOMENTS / spacing
    squares, is_zero = _at(k, means), means.sum(1) <= 0.0
    per_source = (_at(k, roots) / (squares + is_zero)) ** 2
    rounded = core.in_steps(per_source, "nearest", core.STEPS_OF_FORCES, xp)
    is_few = (rounded > core.ATOMS_PER_SOURCE) & (per_source < (1.0 - LEAST_OTHERS) * count)
    per_source = xp.where(is_few, rounded, 1.0)
    means = xp.where(means > 0.0, core.in_steps(means, "nearest", STEPS_OF_SQUARES, xp), 0.0)
    found = Strengths(means, spacing, spacing, per_source)
    return found._replace(force=core.TYPICAL_FORCE * found.at(k))


LEAST_OTHERS = 1e-6
"""Mean square of all other sources, relative to the largest one, below which that one is alone; far above rounding."""

STEPS_OF_SQUARES = 2 * core.STEPS_OF_FORCES
"""Steps per factor of two to which mean squares are rounded: by up to 9 %, and so forces by up to 4.5 %, a quarter of
what they are rounded to themselves."""


def _means(system: ChargedSystem) -> tuple[torch.Tensor, torch.Tensor]:
    """Means (n_systems, 3) of q², μ² and Q:Q, and roots of the means of their squares."""
    squares = _squares(system)
    count = system.atoms_in_systems().clamp_min(1.0)
    means = system.sums(torch.cat([squares, squares.square()], 1)) / count.unsqueeze(1)
    # NaN in moments makes results NaN, but not the parameters
    means = means.nan_to_num(0.0, 0.0)
    return means[:, :3].contiguous(), means[:, 3:].sqrt()


def _squares(system: ChargedSystem) -> torch.Tensor:
    """q², μ² and Q:Q of each atom (n_atoms, 3), in float64, summed over channels."""
    squares = _largest(system.moments.detach().to(torch.float64).square())
    columns = [squares[..., 0].sum(1), squares[..., 1:4].sum((1, 2))]
    of_quadrupoles = squares[..., 4:]
    if of_quadrupoles.shape[-1]:
        on_diagonal = of_quadrupoles[..., 0] + of_quadrupoles[..., 3] + of_quadrupoles[..., 5]
        columns.append(2.0 * (of_quadrupoles.sum(-1) + on_diagonal).sum(1))
    else:
        columns.append(torch.zeros_like(columns[0]))
    return torch.stack(columns, 1)


def magnitudes_of(system: ChargedSystem) -> ChargedSystem:
    """The system with a charge on each atom that is as large as its moments, at the wave numbers of forces nearby."""
    k = NEAR_MOMENTS / spacing_of(system)
    if system.batch_idx is not None:
        k = k.index_select(0, system.batch_idx)
    charges = _at(k, _squares(system)).sqrt().to(system.positions.dtype)
    return system._replace(moments=charges[:, None, None], widths=None, of_points=True)


def _largest(values: torch.Tensor) -> torch.Tensor:
    """The values; under ``vmap``, the largest of all slices; zeros if there are none."""
    if not may_read() or not is_mapped(values):
        return values
    slices = slices_of(values)
    return slices.amax(0) if len(slices) else slices.new_zeros(slices.shape[1:])


def widest_alpha(system: ChargedSystem) -> torch.Tensor | None:
    """The alpha (n_systems,) that matches the widest Gaussians; a larger one does not shorten their sum over pairs.

    Rounded up in steps.
    """
    if system.widths is None:
        return None
    widths = _largest(system.widths.detach().to(torch.float64))
    numbers = system.batch_idx
    most = torch.zeros(system.n_systems, dtype=torch.float64, device=widths.device)
    if numbers is None:
        most = widths.amax(0, keepdim=True) if widths.shape[0] else most
    else:
        most = most.scatter_reduce(0, numbers.long(), widths, "amax")
    most = largest(system.domain, most)
    limit = 0.5 / most
    return torch.where(most > 0.0, core.in_steps(limit, "up", core.STEPS, torch), limit)
