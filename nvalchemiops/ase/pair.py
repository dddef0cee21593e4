"""`Pair`: a pair potential as a term of the calculator."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ase
import numpy as np
import torch
from ase.data import atomic_numbers

from nvalchemiops.arguments import as_choice
from nvalchemiops.ase.elements import OTHERS, atom_values, is_by_pair, number, of_pairs, pair_table
from nvalchemiops.ase.system import Contribution, InBatches, System
from nvalchemiops.torch.interactions import pair
from nvalchemiops.torch.interactions.pair import PairPotential

LIBRARY: dict[str, Callable[..., PairPotential]] = {
    make.__name__: make
    for make in (
        pair.lennard_jones,
        pair.soft_core_lennard_jones,
        pair.morse,
        pair.buckingham,
        pair.born_mayer_huggins,
        pair.ziegler_biersack_littmark,
    )
}
"""Potentials between atoms by name; potentials between charges belong to `Electrostatics`."""


class Pair:
    """A pair potential as a term of `Calculator`.

    Parameters
    ----------
    potential : str or PairPotential
        The name of a potential of `nvalchemiops.torch.interactions.pair` ("lennard_jones",
        "soft_core_lennard_jones", "morse", "buckingham", "born_mayer_huggins", "ziegler_biersack_littmark"), or your
        own potential in eV and angstrom.
    cutoff : float, angstrom, optional
        Pairs at this distance or farther are left out. Without a cutoff all pairs are summed; the atoms must not be
        periodic. Your own potential already has its cutoff.
    **parameters
        Each parameter of the potential, and for named potentials their options (``shifted``, ``r_switch``,
        ``mixing`` ...). A parameter is a number; for one that belongs to atoms also a dict by element or an array
        (n_atoms,); for one that belongs to pairs also a dict by pair, ``{"Mg-O": 1.0, "O-O": 2.0}`` with
        ``("Mg", "O")`` as another spelling. The key ``"*"`` holds for all elements or pairs without a key.
        "ziegler_biersack_littmark" takes atomic numbers from the atoms.

    Raises
    ------
    ValueError, TypeError
        A name or a parameter that is unknown, missing, or not of this form; when atoms are evaluated, elements or
        pairs without a value.

    Examples
    --------
    >>> term = Pair("lennard_jones", cutoff=8.5, shifted=True, sigma=3.4, epsilon={"Ar": 0.0104, "Kr": 0.0140})
    >>> term = Pair("morse", cutoff=8.0, depth={"Cu-Cu": 0.34, "*": 0.0}, steepness=1.36, r0=2.87)
    >>> term = Pair(PairPotential("k/r^12", global_parameters=["k"], cutoff=6.0), k=120.0)
    """

    def __init__(self, potential: str | PairPotential, *, cutoff: float | None = None, **parameters: Any) -> None:
        refuse_exclusions(parameters)
        self._arguments = {"cutoff": cutoff, **parameters}
        self.name = potential
        if isinstance(potential, PairPotential):
            if cutoff is not None:
                raise ValueError(f"`cutoff` is part of the potential (it has {potential.cutoff})")
            self.potential, values = potential, parameters
        else:
            try:
                self.name = potential = as_choice("potential", potential, LIBRARY)
            except ValueError as error:
                advice = "or a PairPotential; potentials between charges are methods of Electrostatics"
                raise ValueError(f"{error} ({advice})") from None
            if potential == "ziegler_biersack_littmark":
                parameters = {"z": atomic_numbers, **parameters}
            self.potential, values = from_library(potential, LIBRARY[potential], cutoff, parameters)
        self.parameters = Parameters(self.potential, values)

    def reach(self, _: ase.Atoms) -> float | None:
        """The distance beyond which pairs do not contribute."""
        return self.potential.cutoff

    def evaluate(self, system: System) -> Contribution:
        """Energies, forces and virial of these atoms; see `Term`."""
        energies, forces, *virial = self.parameters.sum_over(system)
        return Contribution(energies, forces, virial[0][0] if virial else None)

    def for_batches(self, system: System) -> InBatches | None:
        """The potential for atoms of several systems; None if values are arrays of one system."""
        return self.parameters.for_batches(system)

    def __repr__(self) -> str:
        return f"Pair({', '.join([repr(self.name), *shown(self._arguments)])})"


def refuse_exclusions(parameters: Mapping[str, Any]) -> None:
    """Raise for arguments that the sums of torch alone have."""
    for name in parameters.keys() & {"exclusions", "exclusion_factors"}:
        raise TypeError(f"`{name}` belong to the sums of nvalchemiops.torch: call one in a `Term` of your own")


def from_library(
    name: str, make: Callable[..., PairPotential], cutoff: float | None, parameters: Mapping[str, Any]
) -> tuple[PairPotential, dict[str, Any]]:
    """A potential of the library, and the parameters that are not options of its function."""
    known = inspect.signature(make).parameters
    if cutoff is None and known["cutoff"].default is inspect.Parameter.empty:
        raise ValueError(f"`cutoff` is needed for '{name}'")
    options = {key: value for key, value in parameters.items() if key in known}
    values = {key: value for key, value in parameters.items() if key not in known}
    if "tables" in known and any(isinstance(value, Mapping) for value in values.values()):
        options.setdefault("tables", True)
    if "mixing" in known and any(is_by_pair(value) for value in values.values()):
        options.setdefault("mixing", None)
    if options.get("mixing", True) is None:
        _check_by_pair(values)
    return make(cutoff, **options), values


def _check_by_pair(values: Mapping[str, Any]) -> None:
    """Raise for values of elements beside those of pairs, which no rule mixes."""
    for name, value in values.items():
        for key in value if isinstance(value, Mapping) else ():
            if key != OTHERS and not is_by_pair({key: 0.0}):
                raise ValueError(
                    f"`{name}`: {key!r} is not a pair of elements: rules of mixing are for values that all belong to "
                    "elements; otherwise give each for all pairs, as {'Ar-Ar': 3.4, 'Ar-Kr': 3.5, 'Kr-Kr': 3.6}"
                )


class Parameters:
    """Values for the parameters of a potential, given by elements, pairs or atoms.

    Those ``elsewhere`` are supplied later by the caller. Raises for a parameter that is unknown or missing, or a value
    of the wrong kind.
    """

    def __init__(self, potential: PairPotential, values: Mapping[str, Any], elsewhere: tuple[str, ...] = ()) -> None:
        self._potential, formula = potential, potential.formula
        known = [
            name for name in (*formula.per_atom, *formula.global_parameters, *formula.per_pair) if name not in elsewhere
        ]
        for name in values:
            if name not in known:
                raise TypeError(f"`{name}` is not a parameter of this potential, which has {names(known) or 'none'}")
        for name in known:
            if name not in values:
                raise ValueError(f"`{name}` is missing: this potential has the parameters {names(known)}")
        self._numbers = {name: number(name, values[name]) for name in formula.global_parameters}
        self._of_atoms = {name: atom_values(name, values[name]) for name in formula.per_atom if name in values}
        self._of_pairs = {name: pair_table(name, values[name]) for name in formula.per_pair}
        self._by_element = all(isinstance(v, Mapping) or np.ndim(v) == 0 for v in values.values())

    def of(self, system: System) -> dict[str, Any]:
        """The values for these atoms by name, as arguments of the potential. Raises if the atoms lack a value."""
        atoms, found = system.atoms, dict[str, Any](self._numbers)
        found |= {name: system.of_atoms(values(atoms)) for name, values in self._of_atoms.items()}
        if self._of_pairs:
            elements = np.flatnonzero(np.bincount(atoms.numbers))
            species = np.searchsorted(elements, atoms.numbers)
            found["species"] = system.of_atoms(species, torch.int32)
            for name, table in self._of_pairs.items():
                found[name] = system.tensor(of_pairs(name, table, elements))
        return found

    def for_batches(self, system: System, **others: Any) -> InBatches | None:
        """The potential with the values for atoms of several systems, and those of parameters elsewhere, or None."""
        return InBatches(functools.partial(self._potential, **others, **self.of(system))) if self._by_element else None

    def sum_over(self, system: System, **options: Any) -> Any:
        """Energies, forces, further results that the options request, and the virial if wanted, for these atoms.

        Raises if the atoms lack a value.
        """
        found = system.neighbors(self._potential.cutoff) | self.of(system)
        found |= {**options, "compute_forces": True, "compute_virial": system.wants_virial}
        return self._potential(system.positions, system.cell, **found)


def names(words: Iterable[str]) -> str:
    """The words in quotes, with commas."""
    return ", ".join(f"'{word}'" for word in words)


def shown(arguments: Mapping[str, Any]) -> list[str]:
    """Keyword arguments as source text, with arrays abbreviated and without those that are None."""
    return [
        f"{name}={f'<array {np.shape(value)}>' if isinstance(value, (np.ndarray, torch.Tensor)) else repr(value)}"
        for name, value in arguments.items()
        if value is not None
    ]
