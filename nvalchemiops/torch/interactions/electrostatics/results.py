"""Results of an Ewald sum and of its terms: energies and first derivatives, per atom and per system."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from nvalchemiops.torch import checks
from nvalchemiops.torch.interactions.electrostatics.potentials import COULOMB
from nvalchemiops.torch.interactions.electrostatics.system import ChargedSystem, check_system
from nvalchemiops.torch.interactions.pair.shares import summed
from nvalchemiops.torch.operators.segments import system_sums
from nvalchemiops.torch.runtime import engine
from nvalchemiops.torch.runtime.context import is_eager
from nvalchemiops.torch.systems import System

ENERGY_DTYPE = torch.float64
"""Dtype of energies, also for positions in float32, as clients add them up into float64 tensors."""


class Derivatives(NamedTuple):
    """First derivatives that are computed with the energy."""

    forces: bool = False
    charge_gradients: bool = False
    virial: bool = False


@engine.immutable
class SumRequest(NamedTuple):
    """The results that a call of a sum returns."""

    derivatives: Derivatives  # `charge_gradients` means gradients with respect to all sources
    energy_reduction: str  # "atom" or "system"
    hybrid: bool = False  # results are differentiable in the sources only
    of_sources: tuple[bool, bool, bool] = (False, False, False)  # which gradients: by charges, dipoles, quadrupoles

    @property
    def has_first_derivatives(self) -> bool:
        """Whether a backward pass of the energies may use first derivatives that the terms compute with the results.

        With `hybrid` these are the charge gradients, unless they are results themselves and so in the graph.
        """
        return not any(self.derivatives) or (self.hybrid and not self.derivatives.charge_gradients)


class SumOptions(NamedTuple):
    """Arguments common to all Ewald sums, as given; see `ewald_summation`."""

    alpha: Any
    accuracy: Any = None
    cutoff: Any = None
    potential: Any = COULOMB
    exclusions: Any = None
    exclusion_factors: Any = None
    slab_correction: Any = False
    self_interaction: Any = False
    surface_dielectric: Any = None


def _constant(value: Any) -> Any:
    """The value without derivatives; itself if it has none, since plans recognize large tensors by their identity."""
    is_tracked = isinstance(value, torch.Tensor) and (value.requires_grad or not is_eager(value))
    return value.detach() if is_tracked else value


class EwaldSum(NamedTuple):
    """A sum of all terms, or of some, as the arguments of a public function describe it."""

    method: Any  # a class, whose `given(*given, system)` is the long-range part; None for pairs alone
    given: tuple[Any, ...]
    atoms: System
    neighbors: Any  # GivenNeighbors, or () if none are needed
    request: SumRequest
    options: SumOptions

    @property
    def is_constant(self) -> bool:
        """Whether the potential is known to depend on no tensors."""
        return getattr(self.options.potential, "is_constant", False)

    def of_constants(self) -> "EwaldSum":
        """The sum; with ``hybrid_forces``, of constant positions, cell and alpha."""
        if not self.request.hybrid:
            return self
        atoms, options = self.atoms, self.options
        positions, cell, alpha = map(_constant, (atoms.positions, atoms.cell, options.alpha))
        return self._replace(
            atoms=atoms._replace(positions=positions, cell=cell), options=options._replace(alpha=alpha)
        )

    def shapes(self) -> list[tuple[Sequence[int], torch.dtype]] | None:
        """The shapes and dtypes of the results; None if they depend on the number of systems, and no cells tell it."""
        atoms, request = self.atoms, self.request
        if atoms.cell is None:
            of_systems = request.energy_reduction == "system" or request.derivatives.virial
            if atoms.pbc is None or (of_systems and atoms.batch_idx is not None):
                return None
            checks.check_positions(atoms.positions, finite=False)
            unit = torch.eye(3, dtype=atoms.positions.dtype, device=atoms.positions.device)
            atoms = atoms._replace(cell=unit, batch_idx=None)
        system = check_system(atoms._replace(pbc=None))
        check_gradients(request, atoms)
        n_atoms, *channels = atoms.charges.shape  # type: ignore[union-attr]  # it was checked
        forces, charge_gradients, virial = request.derivatives
        n_energies = n_atoms if request.energy_reduction == "atom" else system.n_systems
        shapes: list[Sequence[int]] = [(n_atoms, 3)] * forces
        if charge_gradients:
            by_source = zip(((), (3,), (3, 3)), request.of_sources)
            shapes += [(n_atoms, *channels, *rest) for rest, is_asked in by_source if is_asked]
        shapes += [(system.n_systems, 3, 3)] * virial
        return [((n_energies, *channels), ENERGY_DTYPE), *[(shape, atoms.positions.dtype) for shape in shapes]]

    def along(self) -> Sequence[Any]:
        """The inputs for which first derivatives are computed with the energies."""
        atoms = self.atoms
        inputs = (atoms.positions, atoms.charges, atoms.dipoles, atoms.quadrupoles, atoms.cell)
        return inputs if self.request.has_first_derivatives else ()


def check_request(
    compute_forces: Any,
    compute_charge_gradients: Any,
    compute_virial: Any,
    energy_reduction: Any,
    hybrid_forces: Any = False,
    compute_dipole_gradients: Any = False,
    compute_quadrupole_gradients: Any = False,
) -> SumRequest:
    """The request described by these arguments of a public function."""
    checks.check_choice("energy_reduction", energy_reduction, ("atom", "system"))
    of_sources = (
        checks.check_flag("compute_charge_gradients", compute_charge_gradients),
        checks.check_flag("compute_dipole_gradients", compute_dipole_gradients),
        checks.check_flag("compute_quadrupole_gradients", compute_quadrupole_gradients),
    )
    forces = checks.check_flag("compute_forces", compute_forces)
    derivatives = Derivatives(forces, True in of_sources, checks.check_flag("compute_virial", compute_virial))
    return SumRequest(derivatives, energy_reduction, checks.check_flag("hybrid_forces", hybrid_forces), of_sources)


def check_gradients(request: SumRequest, atoms: System) -> None:
    """Raise if gradients are requested for sources that the system does not have."""
    _, by_dipoles, by_quadrupoles = request.of_sources
    if by_dipoles and atoms.dipoles is None:
        raise ValueError("`compute_dipole_gradients` needs `dipoles`")
    if by_quadrupoles and atoms.quadrupoles is None:
        raise ValueError("`compute_quadrupole_gradients` needs `quadrupoles`")


class Contribution(NamedTuple):
    """Energies of one term, and the derivatives that were requested. A derivative that is zero is None."""

    energies: torch.Tensor  # (n_atoms, n_channels)
    forces: torch.Tensor | None = None  # (n_atoms, 3)
    charge_gradients: torch.Tensor | None = None  # (n_atoms, n_channels, n_moments), by all moments
    virial: torch.Tensor | None = None  # (n_systems, 3, 3)


class Term(Protocol):
    """A term of an Ewald sum: a named tuple of its parameters."""

    def evaluate(self, system: ChargedSystem, derivatives: Derivatives) -> Contribution:
        """The contribution of this term to the results for a system."""
        ...


def total(contributions: Sequence[Contribution], system: ChargedSystem, energy_reduction: str) -> Contribution:
    """The sum of contributions: energies per atom or per system, and derivatives in the dtype of the positions."""
    results: list[Any] = []
    for name, values in zip(Contribution._fields, zip(*contributions)):
        present = [value for value in values if value is not None]
        result = present[0] if present else None
        for value in present[1:]:
            result = result + value
        if name == "energies" and energy_reduction == "system":
            result = system_sums(result, system.batch_idx, system.n_systems)
        dtype = ENERGY_DTYPE if name == "energies" else system.positions.dtype
        results.append(None if result is None else result.to(dtype))
    return Contribution(*results)


def complete(results: tuple[torch.Tensor, ...], system: ChargedSystem, request: SumRequest) -> tuple[torch.Tensor, ...]:
    """The results of a sum; results per system are added up over the ranks among which the atoms are divided."""
    energies, others = results[0], list(results[1:])  # torch 2.11 makes `energies, *others` a tuple in a graph
    if request.energy_reduction == "system":
        energies = summed(system.domain, energies)
    if request.derivatives.virial:
        others[-1] = summed(system.domain, others[-1])
    return (energies, *others)
