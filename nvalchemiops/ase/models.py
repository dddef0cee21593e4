"""`FromASE`: ASE calculators as models of dynamics and relaxation."""

from typing import Any, NamedTuple

import ase
import numpy as np
import torch

from nvalchemiops.ase.calculator import Calculator
from nvalchemiops.ase.electrostatics import Electrostatics
from nvalchemiops.ase.system import SharedLists
from nvalchemiops.ase.system import System as AtomsOfTerms
from nvalchemiops.layout import layout
from nvalchemiops.notices import NvalchemiopsWarning, notify
from nvalchemiops.torch import checks
from nvalchemiops.torch.autograd.functorch import is_differentiated
from nvalchemiops.torch.dynamics import Evaluation, SumOfTerms
from nvalchemiops.torch.dynamics.simulate import structures_of
from nvalchemiops.torch.runtime._torch_internals import version_of
from nvalchemiops.torch.runtime.context import on_host
from nvalchemiops.torch.systems import System


class _Bound(NamedTuple):
    """The terms of a calculator with values for certain atoms."""

    sum: SumOfTerms | None  # None if a term is for one system alone
    charges: torch.Tensor | None  # of the terms, instead of those of the system
    numbers: torch.Tensor
    initial_charges: torch.Tensor | None
    made_for: tuple[Any, ...]


class FromASE:
    """An ASE calculator as a model for `nvalchemiops.torch.dynamics`.

    Parameters
    ----------
    calculator : ASE calculator
        Of this library or another, in eV and angstrom.
    stress : bool, optional
        Whether to compute the stress of systems with cells, if the calculator has it. It is zero for systems without
        a volume.

    Raises
    ------
    TypeError
        An object that is not a calculator.
    ValueError
        In a call: no ``numbers``; a system that requires gradients, if there would be none; what the calculator raises.

    Warns
    -----
    NvalchemiopsWarning
        Charges of the system require gradients, which a term that takes these charges does not have.

    Notes
    -----
    Atomic numbers, cells, periodicity and initial charges come from the `nvalchemiops.torch.System`; other properties
    of ``ase.Atoms``, such as magnetic moments, are not set.

    A `Calculator` computes the batch in one call, if the values of its terms are given by element or as initial
    charges. Lattice sums then choose their parameters for the batch in each call, so that energies agree with those of
    the calculator within the accuracy. All other calculators compute one system after the other.

    Examples
    --------
    >>> from nvalchemiops.ase import Calculator, Pair
    >>> model = FromASE(Calculator(Pair("lennard_jones", cutoff=8.5, sigma=3.4, epsilon=0.0104)))
    """

    def __init__(self, calculator: Any, *, stress: bool = True) -> None:
        if isinstance(calculator, type) or not hasattr(calculator, "get_potential_energy"):
            raise TypeError(f"`calculator` must be an ASE calculator, got {calculator!r}")
        self.calculator = calculator
        known = getattr(calculator, "implemented_properties", ())
        self.stress = checks.check_flag("stress", stress) and "stress" in known
        self._energy = "free_energy" in known  # the one whose derivatives are the forces
        self._bound: _Bound | None = None

    def __call__(self, system: System) -> Evaluation:
        """Energies, forces and stress."""
        if system.numbers is None:
            raise ValueError("`numbers` of the system are needed for ASE")
        if system.domain is not None:
            raise ValueError("`domain`: a calculator computes whole systems, see `nvalchemiops.ase.on_ranks`")
        if system.charges is not None and is_differentiated(system.charges) and self._takes_charges():
            notify(
                "`charges` of the system are differentiated, but the calculator takes their values alone: results have "
                "no gradients with respect to them",
                NvalchemiopsWarning,
            )
        # on ranks a calculator has terms whose atoms are divided, so only the class itself
        if type(self.calculator) is Calculator:
            bound = self._bind(system, system.numbers)
            if bound.sum is not None:
                return bound.sum(system if bound.charges is None else system._replace(charges=bound.charges))
        given = (system.positions, system.cell)
        if any(t is not None and is_differentiated(t) for t in given):
            raise ValueError("`system` requires gradients, or has tangents, which ASE's calculators do not have")
        return self._one_by_one(system)

    def _takes_charges(self) -> bool:
        """Whether a term is known to be a sum over the initial charges."""
        terms = self.calculator.terms if isinstance(self.calculator, Calculator) else ()
        return any(isinstance(term, Electrostatics) and term.charges is None for term in terms)

    # -- all in one call ------------------------------------------------------------------------------

    def _bind(self, system: System, numbers: torch.Tensor) -> _Bound:
        """The terms, with values for these atoms."""
        positions, charges = system.positions, system.charges
        made_for = (positions.dtype, positions.device, _state(numbers), _state(charges))
        bound = self._bound  # a call in another thread may replace it
        if bound is not None and bound.made_for == made_for:
            same = bound.numbers is numbers and bound.initial_charges is charges
            if same or layout(positions.device.type).reads:
                return bound
        atoms = ase.Atoms(numbers.cpu().numpy(), charges=None if charges is None else charges.detach().cpu().numpy())
        of_terms = AtomsOfTerms(atoms, positions.detach(), None, True, SharedLists(0.0))
        found = [getattr(term, "for_batches", lambda _: None)(of_terms) for term in self.calculator.terms]
        terms = [term for term in found if term is not None]
        made = None
        if len(terms) == len(found):
            made = SumOfTerms(
                *(term.interaction for term in terms), skin=self.calculator.parameters["skin"], stress=self.stress
            )
            if bound is not None and bound.sum is not None and bound.made_for[:2] == made_for[:2]:
                made.take_lists(bound.sum)
        of_sum = next((term.charges for term in terms if term.charges is not None), None)
        self._bound = bound = _Bound(made, of_sum, numbers, charges, made_for)
        return bound

    # -- system by system -----------------------------------------------------------------------------

    def _one_by_one(self, system: System) -> Evaluation:
        wants_stress = self.stress and system.cell is not None
        energies, stresses = [], []
        double: Any = {"dtype": torch.float64, "device": "cpu"}  # whatever the default device is
        forces = torch.zeros(system.positions.shape, **double)
        for atoms, places in structures_of(system):
            atoms.calc = self.calculator
            forces[places] = torch.as_tensor(atoms.get_forces(), **double)
            energies.append(atoms.get_potential_energy(force_consistent=self._energy))
            if wants_stress:
                has_volume = int(atoms.cell.rank) == 3
                stress = atoms.get_stress(voigt=False) if has_volume else np.zeros((3, 3))
                stresses.append(torch.tensor(stress, **double))
        results = [torch.tensor(energies, **double), forces]
        if wants_stress:
            results.append(torch.stack(stresses))
        return Evaluation(*(result.to(system.positions) for result in results))


def _state(tensor: torch.Tensor | None) -> Any:
    """Equal unless a tensor has changed: its values on a CPU, elsewhere how often it was changed in place."""
    if tensor is None:
        return None
    if layout(tensor.device.type).reads:
        return tensor.dtype, tensor.shape, on_host(tensor).tobytes()
    return version_of(tensor)
