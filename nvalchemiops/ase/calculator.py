"""`Calculator`: a sum of terms as an ASE calculator."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import ase
import numpy as np
import torch
from ase.calculators import calculator as base
from ase.stress import full_3x3_to_voigt_6_stress

from nvalchemiops.ase.elements import number
from nvalchemiops.ase.system import Contribution, SharedLists, System, Term
from nvalchemiops.torch.checks import check_place
from nvalchemiops.torch.runtime import engine


class Calculator(base.Calculator):
    """Energies, forces and stress of a sum of terms, for ASE.

    Parameters
    ----------
    *terms : Pair, Electrostatics or another `Term`
        Their energies add up.
    skin : float, angstrom, optional
        Neighbor lists reach to the largest cutoff plus the skin. They are rebuilt when an atom has moved by half of the
        skin or the cell has changed. Results do not depend on the skin.
    device : str, optional
        Device of the computation, as in ``torch.device``.

    Attributes
    ----------
    terms : tuple
    searches : int
        Number of neighbor searches so far.

    Raises
    ------
    ValueError, TypeError
        No terms, or an object that is not a term; a negative skin; a device that does not exist.

    Notes
    -----
    *Results*: energy, free_energy (the same value), energies, forces; stress for cells with three vectors
    (dE/dstrain/V, positive for tension); charges and dipole if a term has charges. Units are eV, angstrom and e, the
    dtype is float64. The dipole ``Σ q x + μ`` uses positions as given: it depends on the images of periodic atoms, and
    on the origin if the atoms have a net charge.

    *Stress* costs about 10 % more time. After the first request it is computed in every call.

    *Parameters* are fixed: make a new calculator to change them. One calculator may serve several Atoms objects in
    turn, with a neighbor search at each change.
    """

    implemented_properties = ["energy", "free_energy", "energies", "forces", "stress"]  # noqa: RUF012 (ASE's way)
    name = "nvalchemiops"

    def __init__(self, *terms: Term, skin: float = 0.5, device: str = "cpu") -> None:
        if not terms:
            raise ValueError("`terms` are missing: give a Pair, an Electrostatics, or both")
        for term in terms:
            if not callable(getattr(term, "evaluate", None)) or isinstance(term, type):
                raise TypeError(f"`terms`: {term!r} is not a term, as it has no method `evaluate`")
        charged = [term for term in terms if getattr(term, "has_charges", False)]
        if len(charged) > 1:
            raise ValueError("`terms`: at most one may have charges")
        if number("skin", skin) < 0.0:
            raise ValueError(f"`skin` must be non-negative, got {skin}")
        super().__init__()
        self.terms = terms
        self.device = _usable(device)
        self.parameters.update(terms=[repr(term) for term in terms], skin=float(skin), device=str(device))
        self.implemented_properties = [*self.implemented_properties, *(["charges", "dipole"] * len(charged))]
        self._lists = SharedLists(float(skin))
        self._stress_was_asked_for = False
        self._torques: np.ndarray | None = None

    def __repr__(self) -> str:
        terms, skin, device = (self.parameters[name] for name in ("terms", "skin", "device"))
        return f"Calculator({', '.join(terms)}, skin={skin:g}, device={device!r})"

    @property
    def searches(self) -> int:
        """Number of neighbor searches so far."""
        return self._lists.searches

    def set(self, **changes: Any) -> dict[str, Any]:
        """Raise: the parameters of a calculator are fixed."""
        if changes:
            raise TypeError(f"`{next(iter(changes))}` cannot be set: make a new Calculator")
        return {}

    def get_torques(self, atoms: ase.Atoms | None = None) -> np.ndarray:
        """Torques (n_atoms, 3) on dipoles and quadrupoles, eV; PropertyNotImplementedError if no term has any."""
        self.get_property("forces", atoms)
        if self._torques is None:
            raise base.PropertyNotImplementedError("no term has dipoles or quadrupoles, on which torques act")
        return self._torques.copy()

    @engine.with_own_plans
    def _evaluate(self, atoms: ase.Atoms, wants_virial: bool) -> list[Contribution]:
        """The contributions of all terms."""
        system = System.of(atoms, wants_virial, self._lists, self.device)
        return [term.evaluate(system) for term in self.terms]

    def calculate(
        self,
        atoms: ase.Atoms | None = None,
        properties: list[str] | None = None,
        system_changes: list[str] = base.all_changes,
    ) -> None:
        """Compute all results for these atoms, stress only if it has been requested; called by ASE."""
        super().calculate(atoms, properties, system_changes)
        atoms = self.atoms
        if atoms is None:
            raise ValueError("`atoms` are needed")
        self._stress_was_asked_for |= "stress" in (properties or [])
        wants_stress = self._stress_was_asked_for and int(atoms.cell.rank) == 3
        # charges and terms of users may differentiate, which inference mode would silently leave out
        with torch.inference_mode(False), torch.no_grad():
            parts = self._evaluate(atoms, wants_stress)
        n_atoms = len(atoms)
        energies = _of_terms(parts, "energies", (n_atoms,), ())
        energy = math.fsum(itertools.chain.from_iterable(value.ravel().tolist() for value in energies))
        self.results = {
            "energy": energy,
            "free_energy": energy,
            "forces": np.sum(_of_terms(parts, "forces", (n_atoms, 3)), 0),
        }
        if all(value.ndim for value in energies):
            self.results["energies"] = np.sum(energies, 0)
        if wants_stress:
            virial = np.sum(_of_terms(parts, "virial", (3, 3)), 0)
            # a virial is symmetric up to rounding and the error of a mesh
            self.results["stress"] = full_3x3_to_voigt_6_stress(-0.5 * (virial + virial.T) / atoms.get_volume())
        self._torques = None
        for part in parts:
            if part.charges is not None:
                self.results["charges"] = charges = _array(part.charges)
                dipole = charges @ atoms.positions
                self.results["dipole"] = dipole if part.dipoles is None else dipole + _array(part.dipoles).sum(0)
            if part.torques is not None:
                self._torques = _array(part.torques)


def _usable(device: str) -> torch.device:
    try:
        found = torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"`device` = {device!r} cannot be used: {error}") from error
    check_place("device", found)
    return found.device


def _of_terms(parts: Sequence[Contribution], name: str, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    """Copies of the values of all terms, each with one of these shapes: a sum would broadcast others."""
    found = []
    for part in parts:
        value = getattr(part, name)
        if value is None:
            raise ValueError(f"a term returned no {name}")
        value = np.array(_array(value) if isinstance(value, torch.Tensor) else value, np.float64)
        # functions of torch return values of one system with an axis of systems
        bare = value[0] if value.shape not in shapes and value.shape[:1] == (1,) else value
        if bare.shape not in shapes:
            raise ValueError(f"a term returned `{name}` of shape {value.shape}, which must be {shapes[0]}")
        found.append(bare)
    return found


def _array(tensor: torch.Tensor) -> np.ndarray:
    """A copy of the values: a term may keep the tensor that it returned."""
    return tensor.detach().cpu().numpy().copy()
