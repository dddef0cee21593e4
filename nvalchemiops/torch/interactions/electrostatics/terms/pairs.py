"""Terms that are sums over pairs of neighbors, computed as pair potentials."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from nvalchemiops.interactions.pair.expression import Formula
from nvalchemiops.interactions.pair.potentials import moment_short_range
from nvalchemiops.torch.interactions.electrostatics.potentials import LongRangePotential
from nvalchemiops.torch.interactions.electrostatics.results import Contribution, Derivatives
from nvalchemiops.torch.interactions.electrostatics.system import ChargedSystem
from nvalchemiops.torch.interactions.pair.driver import PairRequest, sum_pairs
from nvalchemiops.torch.interactions.pair.exclusions import ExclusionRows
from nvalchemiops.torch.interactions.pair.moments import sum_moments
from nvalchemiops.torch.interactions.pair.system import PairSystem
from nvalchemiops.torch.neighbors.rows import NO_PADDING, Rows

MOST_CHANNELS = 16
"""Channels that one kernel sums at once: more would take long to compile."""


class PairTerm(NamedTuple):
    """A sum over pairs of charges, with the self energies of its formula; or over pairs of moments, without any.

    Charges have a separate kernel, which supports any potential. For all first derivatives of 1728 ions with 65
    neighbors it takes 9.2 ms; charges as moments of order zero would take 12.0 ms.
    """

    # the pair potential for a number of charges: quadratic in them, with one global parameter
    formula: Callable[[int], Formula]
    parameter: torch.Tensor  # (n_systems,), the global one: alpha, or another length or its inverse
    rows: Rows
    exclusions: ExclusionRows | None = None
    cutoff: float | None = None
    # the radial function for moments, of points or of Gaussians, with the same parameter
    radial: Callable[[bool], Formula] = moment_short_range

    def evaluate(self, system: ChargedSystem, derivatives: Derivatives) -> Contribution:
        """As for `Term`."""
        pairs = PairSystem(system.positions, system.cell, system.batch_idx, system.n_systems, self.rows, system.domain)
        parameter = self.parameter.to(system.positions.dtype)
        if not system.of_points:
            radial, widths = self.radial(system.widths is not None), system.widths
            sums = sum_moments(
                radial,
                pairs,
                system.moments,
                widths.unsqueeze(1) if widths is not None and radial.per_atom else None,
                parameter.unsqueeze(1),
                forces=derivatives.forces,
                gradients=derivatives.charge_gradients,
                virial=derivatives.virial,
                cutoff=self.cutoff,
                exclusions=self.exclusions,
            )
            return Contribution(*sums)
        charges = system.charges
        n_channels = charges.shape[1]
        if n_channels > MOST_CHANNELS:
            blocks = [
                self.evaluate(system._replace(moments=moments), derivatives)
                for moments in system.moments.split(MOST_CHANNELS, 1)
            ]
            columns: list[Any] = list(zip(*blocks))
            return Contribution(
                torch.cat(columns[0], 1),
                sum(columns[1]) if derivatives.forces else None,
                torch.cat(columns[2], 1) if derivatives.charge_gradients else None,
                sum(columns[3]) if derivatives.virial else None,
            )
        of_pair = self.formula(n_channels)
        names = of_pair.per_atom
        gradients = (names,) if n_channels > 1 or derivatives.charge_gradients else ()
        results = sum_pairs(
            of_pair,
            pairs,
            {names: charges, of_pair.global_parameters[0]: parameter},
            PairRequest(derivatives.forces, gradients, derivatives.virial),
            cutoff=self.cutoff,
            exclusions=self.exclusions,
        )
        found = iter(results)
        energies = next(found).unsqueeze(1)
        forces = next(found) if derivatives.forces else None
        by_charges = next(found) if gradients else None
        virial = next(found) if derivatives.virial else None
        if n_channels > 1 and by_charges is not None:
            # the energy is quadratic: in each channel it is half the charge times the derivative
            energies = 0.5 * charges * by_charges
        by_moments = None
        if by_charges is not None and derivatives.charge_gradients:
            by_moments = by_charges.unsqueeze(-1)
        return Contribution(energies, forces, by_moments, virial)


def self_term(potential: LongRangePotential, system: ChargedSystem, alpha: torch.Tensor) -> PairTerm:
    """The self energies alone: the short-range term without pairs."""
    device = system.positions.device
    n_rows = system.n_atoms + (0 if system.domain is None else system.domain.n_ghosts)
    pointers = torch.zeros(n_rows + 1, dtype=torch.int32, device=device)
    no_atoms = torch.zeros(0, dtype=torch.int32, device=device)
    return PairTerm(potential.short_range, alpha, Rows(pointers, no_atoms, no_atoms.reshape(0, 3), 0, NO_PADDING, None))
