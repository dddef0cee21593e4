"""Ewald sums as modules that keep their parameters, for repeated calls."""

from typing import Any

import numpy as np
import torch

from nvalchemiops.torch.interactions.electrostatics.ewald import ewald_summation, prepare_wave_vectors
from nvalchemiops.torch.interactions.electrostatics.long_range import COULOMB, LongRangePotential
from nvalchemiops.torch.interactions.electrostatics.mesh_sum import Influence
from nvalchemiops.torch.interactions.electrostatics.parameters import (
    estimate_ewald_parameters,
    estimate_pme_parameters,
)
from nvalchemiops.torch.interactions.electrostatics.pme import PreparedMesh, particle_mesh_ewald, prepare_mesh
from nvalchemiops.torch.interactions.electrostatics.system import check_potential
from nvalchemiops.torch.interactions.electrostatics.wave_vectors import WaveVectors, per_system
from nvalchemiops.torch.lattice import check_spline_order, mesh_and_order
from nvalchemiops.torch.modules import ExactModule
from nvalchemiops.torch.neighbors import checks


def _kept(name: str, value: float | torch.Tensor) -> torch.Tensor:
    """A positive number, or one for each system, as a buffer (1,) or (n_systems,)."""
    if isinstance(value, torch.Tensor):
        return per_system(name, value, max(1, value.numel()), value.device).detach().clone()
    # moved to where other modules of torch are made
    return per_system(name, value, max(1, np.size(value)), torch.device("cpu")).clone().to(torch.get_default_device())


def _reach(cutoff: float | None) -> float | None:
    return None if cutoff is None else checks.check_positive("cutoff", cutoff)


class EwaldSummation(ExactModule):
    """`ewald_summation` with fixed parameters.

    Parameters
    ----------
    alpha : float or (n_systems,) tensor, 1/length
    k_cutoff : float or (n_systems,) tensor, 1/length
    cutoff : float, length, optional
        Reach of the lists in calls, or to which lists are built.
    potential : LongRangePotential, optional

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message.

    Notes
    -----
    The wave vectors of each call follow from its cell, until `prepare` fixes them as integers: then energies are
    continuous when the cell changes, as in dynamics at constant pressure, and nothing is read on the host.

    Examples
    --------
    >>> ewald = EwaldSummation.estimate(positions, cell, accuracy=1e-5).prepare(cell)
    >>> energies, forces = ewald(positions, charges, cell, compute_forces=True)
    """

    alpha: torch.Tensor
    k_cutoff: torch.Tensor

    def __init__(
        self,
        alpha: float | torch.Tensor,
        k_cutoff: float | torch.Tensor,
        cutoff: float | None = None,
        *,
        potential: LongRangePotential = COULOMB,
    ) -> None:
        super().__init__()
        check_potential(potential)
        self.register_buffer("alpha", _kept("alpha", alpha))
        self.register_buffer("k_cutoff", _kept("k_cutoff", k_cutoff))
        self.cutoff = _reach(cutoff)
        self.potential = potential
        for name in WaveVectors._fields:
            self.register_buffer(f"_{name}", None, persistent=False)

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        super()._load_from_state_dict(*arguments, **options)
        for name in WaveVectors._fields:  # prepared for other parameters
            setattr(self, f"_{name}", None)

    @classmethod
    def estimate(
        cls,
        positions: torch.Tensor,
        cell: torch.Tensor,
        batch_idx: torch.Tensor | None = None,
        accuracy: float = 1e-6,
        *,
        charges: torch.Tensor | None = None,
    ) -> "EwaldSummation":
        """The module with parameters from `estimate_ewald_parameters`, which has the same arguments."""
        found = estimate_ewald_parameters(positions, cell, batch_idx, accuracy, charges=charges)
        return cls(found.alpha, found.reciprocal_space_cutoff, float(found.real_space_cutoff.max()))

    def prepare(self, cell: torch.Tensor) -> "EwaldSummation":
        """Fix the wave vectors to those of this cell, (3, 3) or (n_systems, 3, 3); returns the module."""
        for name, value in zip(WaveVectors._fields, prepare_wave_vectors(cell, self.k_cutoff)):
            setattr(self, f"_{name}", value)
        return self

    def forward(
        self, positions: torch.Tensor, charges: torch.Tensor, cell: torch.Tensor, **options: Any
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Evaluate `ewald_summation`; ``options`` are its other arguments."""
        kept = [getattr(self, f"_{name}") for name in WaveVectors._fields]
        chosen = {"k_cutoff": self.k_cutoff} if kept[0] is None else {"miller_indices": WaveVectors(*kept)}
        given = {"cutoff": self.cutoff, "potential": self.potential} | options
        return ewald_summation(positions, charges, cell, self.alpha, **chosen, **given)


_PREPARED = ("_cell", "_splitting", "_influence", "_influence_slope")


class ParticleMeshEwald(ExactModule):
    """`particle_mesh_ewald` with fixed parameters.

    Parameters
    ----------
    alpha : float or (n_systems,) tensor, 1/length
    mesh_dimensions : (int, int, int)
    spline_order : int, optional
    cutoff : float, length, optional
        Reach of the lists in calls, or to which lists are built.
    potential : LongRangePotential, optional

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message.

    Notes
    -----
    `prepare` keeps what depends on the cell, for calls at the same cell.

    Examples
    --------
    >>> pme = ParticleMeshEwald.estimate(positions, cell, accuracy=1e-5, spline_order=8).prepare(cell)
    >>> energies, forces = pme(positions, charges, cell, compute_forces=True)
    """

    alpha: torch.Tensor

    def __init__(
        self,
        alpha: float | torch.Tensor,
        mesh_dimensions: tuple[int, int, int],
        spline_order: int = 5,
        cutoff: float | None = None,
        *,
        potential: LongRangePotential = COULOMB,
    ) -> None:
        super().__init__()
        check_potential(potential)
        self.register_buffer("alpha", _kept("alpha", alpha))
        self.mesh_dimensions, self.spline_order = mesh_and_order(mesh_dimensions, check_spline_order(spline_order))
        self.cutoff = _reach(cutoff)
        self.potential = potential
        for name in _PREPARED:
            self.register_buffer(name, None, persistent=False)

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        super()._load_from_state_dict(*arguments, **options)
        for name in _PREPARED:  # for other parameters
            setattr(self, name, None)

    @classmethod
    def estimate(
        cls,
        positions: torch.Tensor,
        cell: torch.Tensor,
        batch_idx: torch.Tensor | None = None,
        accuracy: float = 1e-6,
        real_space_cutoff: float | torch.Tensor | None = None,
        *,
        spline_order: int = 5,
        charges: torch.Tensor | None = None,
    ) -> "ParticleMeshEwald":
        """The module with parameters from `estimate_pme_parameters`, which has the same arguments."""
        options: Any = {"spline_order": spline_order, "charges": charges}
        found = estimate_pme_parameters(positions, cell, batch_idx, accuracy, real_space_cutoff, **options)
        return cls(found.alpha, found.mesh_dimensions, spline_order, float(found.real_space_cutoff.max()))

    def prepare(self, cell: torch.Tensor) -> "ParticleMeshEwald":
        """Keep what depends on this cell, (3, 3) or (n_systems, 3, 3); returns the module."""
        found = prepare_mesh(cell, self.alpha, self.mesh_dimensions, self.spline_order, potential=self.potential)
        self._cell, self._splitting = found.cell, found.alpha
        self._influence, self._influence_slope = found.influence
        return self

    def forward(
        self, positions: torch.Tensor, charges: torch.Tensor, cell: torch.Tensor, **options: Any
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Evaluate `particle_mesh_ewald`; ``options`` are its other arguments."""
        given = {"cutoff": self.cutoff, "potential": self.potential} | options
        if self._influence is None:
            return particle_mesh_ewald(
                positions,
                charges,
                cell,
                self.alpha,
                mesh_dimensions=self.mesh_dimensions,
                spline_order=self.spline_order,
                **given,
            )
        kept = PreparedMesh(
            self._cell,
            self._splitting,
            self.mesh_dimensions,
            self.spline_order,
            self.potential,
            Influence(self._influence, self._influence_slope),
        )
        return particle_mesh_ewald(positions, charges, cell, prepared=kept, **given)
