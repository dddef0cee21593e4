"""`FromASE`: ASE calculators as models of dynamics and relaxation."""

from typing import Any

import ase
import torch

from nvalchemiops.ase.calculator import Calculator
from nvalchemiops.ase.system import SharedLists
from nvalchemiops.ase.system import System as AtomsOfTerms
from nvalchemiops.torch import checks
from nvalchemiops.torch.dynamics import Evaluation, SumOfTerms, to_ase
from nvalchemiops.torch.runtime._torch_internals import version_of
from nvalchemiops.torch.systems import System


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
        self._bound: tuple[Any, ...] = ()
        self._sum: SumOfTerms | None = None
        self._charges: torch.Tensor | None = None

    def __call__(self, system: System) -> Evaluation:
        """Energies, forces and stress."""
        if system.numbers is None:
            raise ValueError("`numbers` of the system are needed for ASE")
        if system.domain is not None:
            raise ValueError("`domain`: a calculator computes whole systems, see `nvalchemiops.ase.on_ranks`")
        # on ranks a calculator has terms whose atoms are divided, so only the class itself
        if type(self.calculator) is Calculator and self._bind(system) is not None:
            assert self._sum is not None
            return self._sum(system if self._charges is None else system._replace(charges=self._charges))
        given = (system.positions, system.cell)
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given):
            raise ValueError("`system` requires gradients, which ASE's calculators do not have")
        return self._one_by_one(system)

    # -- all in one call ------------------------------------------------------------------------------

    def _bind(self, system: System) -> SumOfTerms | None:
        """The sum of the terms, with values for these atoms; None if a term is for one system alone."""
        positions, numbers, charges = system.positions, system.numbers, system.charges
        made_for = (numbers, charges), (*map(_version, (numbers, charges)), positions.dtype, positions.device)
        if self._bound and self._bound[1] == made_for[1] and all(a is b for a, b in zip(self._bound[0], made_for[0])):
            return self._sum
        assert numbers is not None
        atoms = ase.Atoms(numbers.cpu().numpy(), charges=None if charges is None else charges.detach().cpu().numpy())
        of_terms = AtomsOfTerms(atoms, positions.detach(), None, True, SharedLists(0.0))
        found = [getattr(term, "for_batches", lambda _: None)(of_terms) for term in self.calculator.terms]
        terms = [term for term in found if term is not None]
        if len(terms) < len(found):
            self._sum = None
        else:
            made = SumOfTerms(
                *(term.interaction for term in terms), skin=self.calculator.parameters["skin"], stress=self.stress
            )
            if self._sum is not None and self._bound[1][2:] == made_for[1][2:]:
                made.neighbors = self._sum.neighbors  # reaches do not depend on the atoms, and it notices other atoms
            self._sum = made
            self._charges = next((term.charges for term in terms if term.charges is not None), None)
        self._bound = made_for
        return self._sum

    # -- system by system -----------------------------------------------------------------------------

    def _one_by_one(self, system: System) -> Evaluation:
        wants_stress = self.stress and system.cell is not None
        energies, forces, stresses = [], [], []
        for atoms in to_ase(system):
            atoms.calc = self.calculator
            forces.append(torch.tensor(atoms.get_forces()))
            energies.append(atoms.get_potential_energy(force_consistent=self._energy))
            if wants_stress:
                has_volume = int(atoms.cell.rank) == 3
                stress = (
                    torch.tensor(atoms.get_stress(voigt=False))
                    if has_volume
                    else torch.zeros(3, 3, dtype=torch.float64)
                )
                stresses.append(stress)
        results = [torch.tensor(energies, dtype=torch.float64), torch.cat([torch.zeros(0, 3), *forces])]
        if wants_stress:
            results.append(torch.stack(stresses))
        return Evaluation(*(result.to(system.positions) for result in results))


def _version(tensor: torch.Tensor | None) -> Any:
    return None if tensor is None else version_of(tensor)
