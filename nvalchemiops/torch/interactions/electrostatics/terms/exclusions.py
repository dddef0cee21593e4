"""Excluded pairs: the long-range part of their interaction is subtracted at their nearest image.

Their short-range part is left out of the sum over neighbors.
"""

from typing import NamedTuple

import torch

from nvalchemiops.arguments import ValuesError
from nvalchemiops.interactions.pair.loop import NO_ATOM
from nvalchemiops.interactions.pair.potentials import moment_excluded
from nvalchemiops.torch.interactions.electrostatics.potentials import LongRangePotential
from nvalchemiops.torch.interactions.electrostatics.results import Contribution, Derivatives
from nvalchemiops.torch.interactions.electrostatics.system import ChargedSystem
from nvalchemiops.torch.interactions.electrostatics.terms.pairs import PairTerm
from nvalchemiops.torch.interactions.pair.shares import beside_ghosts
from nvalchemiops.torch.neighbors.rows import NO_PADDING, Rows
from nvalchemiops.torch.operators.lattice import lattice_of, shortest_vectors
from nvalchemiops.torch.runtime.context import all_values_of, is_mapped, may_read


class ExclusionTerm(NamedTuple):
    """The exclusions of a system, with alpha (n_systems,).

    It holds no images: those that are nearest depend on the positions of each evaluation.
    """

    potential: LongRangePotential
    alpha: torch.Tensor

    def pairs(self, system: ChargedSystem) -> PairTerm:
        """The same as a sum over pairs, for the positions of this system."""
        exclusions = system.exclusions
        assert exclusions is not None
        if _is_mapped(exclusions.atoms) and bool((all_values_of(exclusions.atoms) == NO_ATOM).any()):
            # here kernels would tell of a neighbor list
            raise ValuesError("`exclusions` must hold pairs of two atoms of a system, each pair once")
        shifts = nearest_images(system, *exclusions.pairs)
        shifts = torch.cat([shifts, -shifts]).index_select(0, exclusions.order)
        first, second = exclusions.first.to(torch.int32), exclusions.plain_atoms()
        rows = Rows(exclusions.pointers, second, shifts, 0, NO_PADDING, first)
        return PairTerm(self.potential.excluded, self.alpha, rows, exclusions.remainder(), radial=moment_excluded)

    def evaluate(self, system: ChargedSystem, derivatives: Derivatives) -> Contribution:
        """As for `Term`."""
        return self.pairs(system).evaluate(system, derivatives)


def _is_mapped(tensor: torch.Tensor) -> bool:
    """Whether ``vmap`` maps over it, and its values may be read."""
    return may_read() and is_mapped(tensor) and may_read(all_values_of(tensor))


def nearest_images(system: ChargedSystem, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Shifts (n, 3) of the images of the second atoms that are closest to the first ones; none along open axes."""
    with torch.no_grad():
        positions = beside_ghosts(system.domain, system.positions.detach()).to(torch.float64)
        apart = positions.index_select(0, second) - positions.index_select(0, first)
        cell = system.cell.detach().to(torch.float64)
        if system.slab_axes is not None:
            # a vector normal to the others, along which nothing is apart
            normal = torch.linalg.cross(cell.roll(-1, 1), cell.roll(-2, 1))
            normal = normal / normal.norm(dim=2, keepdim=True)
            is_open = ~system.slab_axes.unsqueeze(2)
            cell = torch.where(is_open, normal, cell)
            normal = system.of_atoms((is_open * normal).sum(1), first)
            apart = apart - (apart * normal).sum(1, keepdim=True) * normal
        # along the shortest lattice vectors, where the nearest image differs from the rounded one by at most one
        short = shortest_vectors(cell).to(torch.float64)
        cell = short @ cell
        of_systems = cell, lattice_of(cell, None, 0).inverse, short
        cell, inverse, short = (system.of_atoms(values, first) for values in of_systems)
        rounded = -(apart.unsqueeze(1) @ inverse).squeeze(1).round()
        near = torch.arange(-1, 2, dtype=torch.float64, device=cell.device)
        around = torch.cartesian_prod(near, near, near)
        shifts = rounded.unsqueeze(1) + around
        nearest = (apart.unsqueeze(1) + shifts @ cell).square().sum(-1).argmin(1)
        found = rounded + around.index_select(0, nearest)
        return (found.unsqueeze(1) @ short).squeeze(1).to(torch.int32)
