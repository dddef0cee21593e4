"""DFT-D3 as a module that keeps what does not change between calls."""

from collections.abc import Sequence
from typing import Any

import torch

from nvalchemiops.interactions.dispersion.damping import RationalDamping, ZeroDamping, damping_parameters
from nvalchemiops.torch.interactions.dispersion.d3 import d3_dispersion, ranges_of
from nvalchemiops.torch.interactions.dispersion.parameters import D3Parameters, ReferenceStates, given_or_published
from nvalchemiops.torch.modules import ExactModule

CUTOFF, COORDINATION_CUTOFF, THREE_BODY_CUTOFF, SMOOTHING = 60.0, 40.0, 20.0, 5.0
"""Cutoffs in bohr, the first two those of the program s-dftd3, and a width over which sums go to zero before them."""


class DFTD3(ExactModule):
    """DFT-D3 for some elements and one functional, in atomic units.

    Parameters
    ----------
    damping : str, RationalDamping or ZeroDamping
        A functional, with Becke and Johnson's damping; or parameters, as from `damping_parameters`.
    elements : sequence of int
        Atomic numbers that may occur.
    parameters : D3Parameters, optional
        By default those of `D3Parameters.load`.
    cutoff, coordination_cutoff : float, bohr, optional
        Of the energies of pairs, and of coordination numbers.
    s9 : float, optional
        Factor of the three-body energy, by default without; see `d3_dispersion`.
    three_body_cutoff : float, bohr, optional
        Of the sides of its triangles.
    smoothing : float or None, bohr, optional
        Width over which all sums go to zero before their cutoffs, with two continuous derivatives: then energies and
        forces are smooth when atoms cross a cutoff. None for sharp ends, as other programs have them.
    trainable : bool, optional
        Whether damping parameters are parameters of the module.

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message; an element or functional without parameters.

    Examples
    --------
    >>> model = DFTD3("pbe", [11, 17])
    >>> energies, coordination_numbers = model(positions / 0.529177, numbers)
    """

    def __init__(
        self,
        damping: str | RationalDamping | ZeroDamping,
        elements: Sequence[int],
        parameters: D3Parameters | None = None,
        *,
        cutoff: float = CUTOFF,
        coordination_cutoff: float = COORDINATION_CUTOFF,
        s9: float = 0.0,
        three_body_cutoff: float = THREE_BODY_CUTOFF,
        smoothing: float | None = SMOOTHING,
        trainable: bool = False,
    ) -> None:
        super().__init__()
        if isinstance(damping, str):
            damping = damping_parameters(damping)
        if not isinstance(damping, RationalDamping | ZeroDamping):
            raise TypeError(f"`damping` must be a functional or parameters, got {type(damping).__name__}")
        ranges_of(cutoff, coordination_cutoff, three_body_cutoff, smoothing)  # raises unless they fit
        self.kind = type(damping)
        device = torch.get_default_device()  # as other modules of torch do
        for name, value in damping._asdict().items():
            tensor = torch.as_tensor(value, dtype=torch.float64, device=device).detach().clone()
            if trainable:
                self.register_parameter(name, torch.nn.Parameter(tensor))
            else:
                self.register_buffer(name, tensor)
        states = given_or_published(parameters).states(elements, device)
        self._names = [name for name, value in states._asdict().items() if isinstance(value, torch.Tensor)]
        for name in self._names:
            self.register_buffer(f"_{name}", getattr(states, name), persistent=False)
        self._others = {name: value for name, value in states._asdict().items() if name not in self._names}
        self.cutoff, self.coordination_cutoff, self.smoothing = cutoff, coordination_cutoff, smoothing
        self.s9, self.three_body_cutoff = s9, three_body_cutoff

    @property
    def states(self) -> ReferenceStates:
        """The reference data of the elements, where the module is."""
        return ReferenceStates(**{name: getattr(self, f"_{name}") for name in self._names}, **self._others)

    def forward(
        self,
        positions: torch.Tensor,
        numbers: torch.Tensor,
        cell: torch.Tensor | None = None,
        batch_idx: torch.Tensor | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, ...]:
        """Energies of atoms in hartree, coordination numbers, and what else is asked for.

        Parameters
        ----------
        positions, numbers, cell, batch_idx, **options
            As for `d3_dispersion`: neighbors, ``compute_forces``, ``compute_virial``, ``energy_reduction``, ``pbc`` and
            ``num_systems``.

        Returns
        -------
        energies, forces, coordination_numbers, virial
            As from `d3_dispersion`.
        """
        damping = self.kind(**{name: getattr(self, name).to(positions.dtype) for name in self.kind._fields})
        return d3_dispersion(
            positions,
            numbers,
            damping,
            self.states,
            cell,
            batch_idx,
            cutoff=self.cutoff,
            coordination_cutoff=self.coordination_cutoff,
            smoothing=self.smoothing,
            s9=self.s9,
            three_body_cutoff=self.three_body_cutoff,
            **options,
        )
