"""`Electrostatics`: charges as a term of the calculator, within a cutoff or over all distances."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import ase
import numpy as np
import torch

from nvalchemiops.ase.elements import atom_values, of_array
from nvalchemiops.ase.pair import Parameters, from_library, names, shown
from nvalchemiops.ase.system import Contribution, System, periodicity
from nvalchemiops.constants import COULOMB_EV_ANGSTROM
from nvalchemiops.torch.interactions import pair
from nvalchemiops.torch.interactions.electrostatics import (
    compute_slab_correction,
    estimate_ewald_parameters,
    estimate_pme_parameters,
    ewald_summation,
    particle_mesh_ewald,
    prepare_wave_vectors,
)
from nvalchemiops.torch.interactions.electrostatics.choice import LongRange, check_accuracy
from nvalchemiops.torch.interactions.electrostatics.driver import sum_of_parts
from nvalchemiops.torch.interactions.electrostatics.results import check_request
from nvalchemiops.torch.interactions.electrostatics.system import ChargedSystem
from nvalchemiops.torch.interactions.electrostatics.terms.mesh import MeshSum, Precomputed
from nvalchemiops.torch.interactions.electrostatics.terms.reciprocal import KVectorSum
from nvalchemiops.torch.interactions.pair import PairPotential
from nvalchemiops.torch.neighbors.rows import GivenNeighbors
from nvalchemiops.torch.systems import System as ChargedAtoms

LATTICE_SUMS = ("ewald", "pme")
WITHIN_CUTOFF: dict[str, Callable[..., PairPotential]] = {
    "coulomb": pair.coulomb,
    "dsf": pair.damped_shifted_force,
    "wolf": pair.wolf,
    "reaction_field": pair.reaction_field,
    "yukawa": pair.yukawa,
}

Charges = Mapping[str, float] | np.ndarray | Callable[[System], Any] | None
Sums = tuple[torch.Tensor, ...]


class Electrostatics:
    """Interaction of point charges as a term of `Calculator`.

    Parameters
    ----------
    method : str
        Over all distances, for periodic atoms: "ewald" (the faster one up to some thousand atoms) or "pme". Over
        pairs: "coulomb", "dsf" (damped shifted force), "wolf", "reaction_field" or "yukawa", with a cutoff; "coulomb"
        and "yukawa" without a cutoff sum over all pairs of atoms without periodicity.
    charges : dict, array or function, optional
        By element, ``{"Na": 1.0, "Cl": -1.0}``; an array (n_atoms,); or a function of a `System` that returns an
        array or a tensor (n_atoms,). By default the initial charges of the atoms. In e.
    cutoff : float, angstrom, optional
        For pairs; for sums over all distances it follows from the accuracy.
    accuracy : float, optional
        For sums over all distances: RMS error of the forces to reach, relative to their RMS; 1e-6 by default.
    slab_correction : bool, optional
        For sums over all distances: allow one open axis, with vacuum along it.
    **parameters
        What else the method needs (``alpha`` for "dsf" and "wolf", ``dielectric``, ``kappa``) or takes (``shifted``,
        ``r_switch``), as in `nvalchemiops.torch.interactions.pair`.

    Raises
    ------
    ValueError, TypeError
        An argument that is unknown, missing or does not belong to the method; when atoms are evaluated, elements
        without a charge, or periodicity that the method is not for.

    Notes
    -----
    *Charges that depend on the geometry*: if a function returns a tensor with a gradient graph to the positions (and
    the cell) of its `System`, forces and virial include what follows from the change of charges. Charges that it
    returns without a graph are constants: forces are then those at fixed charges.

    *Charged cells* are neutralised by a uniform background. Lattice sums have conducting boundary conditions.

    *Parameters* of lattice sums follow from the number of atoms and the cell. While only the size of a cell changes,
    energies are continuous; when its shape does, the sets of k-vectors and pairs change, and energies jump by a small
    part of the accuracy. Stress is the derivative at constant parameters.

    Examples
    --------
    >>> term = Electrostatics("ewald", {"Na": 1.0, "Cl": -1.0}, accuracy=1e-8)
    >>> term = Electrostatics("dsf", cutoff=12.0, alpha=0.2)
    """

    has_charges = True

    def __init__(
        self,
        method: str,
        charges: Charges = None,
        *,
        cutoff: float | None = None,
        accuracy: float | None = None,
        slab_correction: bool = False,
        **parameters: Any,
    ) -> None:
        if not isinstance(method, str) or method not in (*LATTICE_SUMS, *WITHIN_CUTOFF):
            raise ValueError(f"`method` must be one of {names((*LATTICE_SUMS, *WITHIN_CUTOFF))}, got {method!r}")
        self.method = method
        self._arguments = {"cutoff": cutoff, "accuracy": accuracy, "slab_correction": slab_correction or None}
        self._arguments |= parameters
        self._sum: LatticeSum | PairSum
        if method in LATTICE_SUMS:
            _refuse({"cutoff": cutoff, **parameters}, f"'{method}' chooses its parameters for `accuracy`")
            self._sum = LatticeSum(method, 1e-6 if accuracy is None else accuracy, slab_correction)
        else:
            unfit = {"accuracy": accuracy, "slab_correction": slab_correction or None}
            _refuse(unfit, f"'{method}' is a sum over pairs")
            self._sum = PairSum(method, cutoff, parameters)
        self.charges = charges
        self._of_atoms: Callable[[ase.Atoms], np.ndarray] | None = None
        if charges is None:
            self._of_atoms = _initial_charges
        elif not callable(charges):
            self._of_atoms = atom_values("charges", charges)

    def reach(self, atoms: ase.Atoms) -> float | None:
        """The distance from which on pairs do not matter."""
        return self._sum.reach(atoms)

    def evaluate(self, system: System) -> Contribution:
        """Energies, forces, virial and charges of these atoms; see `Term`."""
        if self._of_atoms is not None:
            charges = system.of_atoms(self._of_atoms(system.atoms))
        else:
            assert callable(self.charges)
            leaves = system.with_gradients()
            with torch.enable_grad():
                charges = _returned(self.charges(leaves), system)
        energies, forces, *more = self._sum(system, charges.detach(), charges.requires_grad)
        virial = more[-1][0] if system.wants_virial else None
        if charges.requires_grad:
            more_forces, more_virial = _response(leaves, charges, more[0])
            forces = forces + more_forces
            virial = None if virial is None else virial + more_virial
        k = COULOMB_EV_ANGSTROM
        return Contribution(k * energies, k * forces, None if virial is None else k * virial, charges.detach())

    def __repr__(self) -> str:
        return f"Electrostatics({', '.join([repr(self.method), *shown({'charges': self.charges, **self._arguments})])})"


class PairSum:
    """A sum over pairs of charges, all or those within a cutoff."""

    def __init__(self, method: str, cutoff: float | None, parameters: Mapping[str, Any]) -> None:
        self.potential, values = from_library(method, WITHIN_CUTOFF[method], cutoff, parameters)
        self.parameters = Parameters(self.potential, values, elsewhere=("q",))

    def reach(self, _: ase.Atoms) -> float | None:
        """The cutoff."""
        return self.potential.cutoff

    def __call__(self, system: System, charges: torch.Tensor, with_gradients: bool) -> Sums:
        """Energies, forces, on request gradients by charges, and virial if wanted; in e²/angstrom."""
        results: Any = self.potential(
            system.positions,
            system.cell,
            **system.neighbors(self.potential.cutoff),
            **self.parameters.of(system),
            q=charges,
            compute_forces=True,
            compute_gradients=("q",) * with_gradients,
            compute_virial=system.wants_virial,
        )
        return results


class Chosen(NamedTuple):
    """Parameters of a lattice sum, and the atoms that they are for."""

    n_atoms: int
    cell: np.ndarray
    device: torch.device
    alpha: float
    cutoff: float
    long_range: Callable[[ChargedSystem], LongRange]  # with its k-vectors or its mesh
    on_ranks: Callable[..., Any]  # the whole sum


class LatticeSum:
    """Ewald's sum of charges, with or without a mesh."""

    LOW_ORDER_ACCURACY = 1e-5
    """Below this splines of high order are faster, which need a coarser mesh."""

    def __init__(self, method: str, accuracy: float, slab_correction: bool) -> None:
        self.method = method
        self.accuracy = check_accuracy(accuracy)
        self.slab_correction = bool(slab_correction)
        self.spline_order = 5 if self.accuracy > self.LOW_ORDER_ACCURACY else 8
        self._chosen: Chosen | None = None

    def __call__(self, system: System, charges: torch.Tensor, with_gradients: bool) -> Sums:
        """Energies, forces, on request gradients by charges, and virial if wanted; in e²/angstrom."""
        self._check_periodicity(system.atoms)
        positions, cell, pbc = system.positions, system.cell, system.atoms.pbc
        assert cell is not None
        options: dict[str, Any] = {
            "compute_forces": True,
            "compute_charge_gradients": with_gradients,
            "compute_virial": system.wants_virial,
        }
        chosen = self._parameters(system.atoms, positions.device)
        # the sum is periodic along all axes, also where a correction makes up for one
        near = system.neighbors(chosen.cutoff, (True, True, True))
        if "domain" in near:
            near["cutoff"] = chosen.cutoff
            whole: Sums = chosen.on_ranks(positions, charges, cell, chosen.alpha, **near, **options)
            return whole
        found = sum_of_parts(
            chosen.long_range,
            ChargedAtoms(positions, charges, cell),
            GivenNeighbors(neighbor_matrix=near["neighbor_matrix"], matrix_shifts=near["neighbor_matrix_shifts"]),
            check_request(**options, energy_reduction="atom"),
            chosen.alpha,
            chosen.cutoff,
        )
        if pbc.all():
            return found
        axes = torch.tensor(pbc, device=positions.device)
        correction = compute_slab_correction(positions, charges, cell, axes, **options)
        return tuple(one + other for one, other in zip(found, correction))

    def _check_periodicity(self, atoms: ase.Atoms) -> None:
        n_open = 3 - sum(periodicity(atoms.pbc))
        if n_open == 3:
            raise ValueError(
                f"`method`: '{self.method}' is for periodic atoms; use 'coulomb' without a cutoff, which sums over all "
                "pairs, or set `pbc` of the atoms"
            )
        if n_open == 2:
            raise ValueError(
                f"`method`: '{self.method}' is for atoms that are periodic along three axes or two, not along one; use "
                "'dsf' with a cutoff, or vacuum and `pbc=True`"
            )
        if n_open == 1 and not self.slab_correction:
            raise ValueError("`slab_correction=True` is needed for atoms with an open axis")
        if atoms.cell.rank < 3:
            raise ValueError(
                f"`cell`: '{self.method}' needs three vectors, also along an open axis, with vacuum around the slab"
            )

    def reach(self, atoms: ase.Atoms) -> float:
        """The cutoff of the sum over pairs."""
        self._check_periodicity(atoms)
        return self._parameters(atoms, torch.device("cpu") if self._chosen is None else self._chosen.device).cutoff

    def _parameters(self, atoms: ase.Atoms, device: torch.device) -> Chosen:
        """Those that are kept, or new ones if the cell has changed."""
        kept = self._chosen
        others = kept is None or (kept.n_atoms, kept.device) != (len(atoms), device)
        if kept is None or others or not np.array_equal(kept.cell, atoms.cell.array):
            self._chosen = kept = self._choose(atoms, device)
        return kept

    def _choose(self, atoms: ase.Atoms, device: torch.device) -> Chosen:
        shape = atoms.cell.array.copy()
        cell = torch.tensor(shape, dtype=torch.float64, device=device)
        positions = cell[:1].expand(len(atoms), 3)  # only how many there are matters
        long_range: Callable[[ChargedSystem], LongRange]
        if self.method == "ewald":
            ewald = estimate_ewald_parameters(positions, cell, accuracy=self.accuracy)
            alpha, cutoff = ewald.alpha, ewald.real_space_cutoff
            k_vectors = prepare_wave_vectors(cell, ewald.reciprocal_space_cutoff)
            long_range = functools.partial(KVectorSum.given, None, None, None, k_vectors)
            whole = functools.partial(ewald_summation, k_cutoff=float(ewald.reciprocal_space_cutoff))
        else:
            order = self.spline_order
            pme = estimate_pme_parameters(positions, cell, accuracy=self.accuracy, spline_order=order)
            alpha, cutoff = pme.alpha, pme.real_space_cutoff
            mesh: dict[str, Any] = {"mesh_dimensions": pme.mesh_dimensions, "spline_order": order}
            long_range = functools.partial(MeshSum.given, pme.mesh_dimensions, None, order, Precomputed(), None)
            whole = functools.partial(particle_mesh_ewald, **mesh)
        return Chosen(len(atoms), shape, device, float(alpha), float(cutoff), long_range, whole)


def _refuse(arguments: Mapping[str, Any], reason: str) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise TypeError(f"`{name}` does not belong to this method: {reason}")


def _initial_charges(atoms: ase.Atoms) -> np.ndarray:
    if not atoms.has("initial_charges"):
        raise ValueError(
            "`charges` are needed: none are given (in the command by --charges Mg=2,O=-2), and the atoms have no "
            "initial charges"
        )
    return of_array("initial_charges", atoms.get_initial_charges(), atoms)


def _returned(charges: Any, system: System) -> torch.Tensor:
    """What a function of the system has returned as charges, checked."""
    if not isinstance(charges, torch.Tensor):
        return system.tensor(of_array("charges", np.asarray(charges), system.atoms))
    if charges.shape != (len(system.atoms),):
        raise ValueError(f"`charges` must return shape ({len(system.atoms)},), got {tuple(charges.shape)}")
    return charges.to(system.positions)


def _response(system: System, charges: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Forces and virial from the change of charges; ``gradient`` is that of the energy by them."""
    leaves = [system.positions, *([] if system.cell is None else [system.cell])]
    gradients = torch.autograd.grad(charges, leaves, gradient, allow_unused=True)
    filled = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, gradients)]
    # a strain moves positions and lattice vectors alike
    strained = [leaf.detach().mT @ g for leaf, g in zip(leaves, filled)]
    return -filled[0], -torch.stack(strained).sum(0)
