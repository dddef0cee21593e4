"""`Electrostatics`: charges as a term of the calculator, within a cutoff or over all distances."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import ase
import numpy as np
import torch

from nvalchemiops.arguments import as_choice
from nvalchemiops.ase.elements import atom_values, of_array
from nvalchemiops.ase.pair import Parameters, from_library, refuse_exclusions, shown
from nvalchemiops.ase.system import Contribution, InBatches, System, periodicity
from nvalchemiops.constants import COULOMB_EV_ANGSTROM
from nvalchemiops.interactions.electrostatics.error_models import COSTS, order_of_least_cost, reciprocal_cutoff
from nvalchemiops.notices import NvalchemiopsWarning, notify
from nvalchemiops.torch.checks import check_place, check_positive
from nvalchemiops.torch.interactions import pair
from nvalchemiops.torch.interactions.electrostatics import Electrostatics as AnyElectrostatics
from nvalchemiops.torch.interactions.electrostatics import (
    EwaldSummation,
    ParticleMeshEwald,
    compute_slab_correction,
)
from nvalchemiops.torch.interactions.electrostatics.accuracy.choice import (
    check_accuracy,
    mesh_for,
    optimal_splitting,
    sources_of,
)
from nvalchemiops.torch.interactions.electrostatics.accuracy.methods import method_of_one
from nvalchemiops.torch.interactions.electrostatics.accuracy.sizes import sizes_of_system
from nvalchemiops.torch.interactions.electrostatics.coulomb import coulomb_of_sources
from nvalchemiops.torch.interactions.electrostatics.driver import ewald_sum, sum_of_parts
from nvalchemiops.torch.interactions.electrostatics.k_vectors import WaveVectors, chosen_points
from nvalchemiops.torch.interactions.electrostatics.results import EwaldSum, SumOptions, check_request
from nvalchemiops.torch.interactions.electrostatics.slab_warnings import warn_of_slabs
from nvalchemiops.torch.interactions.electrostatics.system import check_system
from nvalchemiops.torch.interactions.electrostatics.terms.mesh import MeshSum, Precomputed
from nvalchemiops.torch.interactions.electrostatics.terms.reciprocal import KVectorSum
from nvalchemiops.torch.interactions.pair import PairPotential
from nvalchemiops.torch.neighbors.rows import GivenNeighbors
from nvalchemiops.torch.systems import System as ChargedAtoms

LATTICE_SUMS = ("auto", "ewald", "pme")
WITHIN_CUTOFF: dict[str, Callable[..., PairPotential]] = {
    "coulomb": pair.coulomb,
    "dsf": pair.damped_shifted_force,
    "wolf": pair.wolf,
    "reaction_field": pair.reaction_field,
    "yukawa": pair.yukawa,
}

Charges = Mapping[str, float] | np.ndarray | Callable[[System], Any] | None
Moments = Mapping[str, Any] | np.ndarray | Callable[[System], Any] | None
Sources = Mapping[str, np.ndarray]
Tensors = Mapping[str, Any]
"""Sources as tensors, by name."""

SHAPES: dict[str, tuple[int, ...]] = {"charges": (), "dipoles": (3,), "quadrupoles": (3, 3), "widths": ()}
"""Shape of each source of one atom."""


class Electrostatics:
    """Interaction of charges, dipoles and quadrupoles, points or Gaussians, as a term of `Calculator`.

    Parameters
    ----------
    method : str, optional
        "auto": all distances, for an accuracy. Periodic atoms and slabs use the faster of the two lattice sums, "ewald"
        (k-vectors) and "pme" (a mesh); atoms that are not periodic use all pairs. Sums over pairs within a cutoff:
        "coulomb", "dsf" (damped shifted force), "wolf", "reaction_field" or "yukawa". Without a cutoff "coulomb" and
        "yukawa" sum over all pairs of atoms that are not periodic.
    charges : dict, array or function, optional
        Charges in e: by element, ``{"Na": 1.0, "Cl": -1.0}``; an array (n_atoms,); or a function of a `System` that
        returns an array or a tensor (n_atoms,). By default the initial charges of the atoms.
    cutoff : float, angstrom, optional
        Cutoff of sums over pairs. Lattice sums choose it for the accuracy.
    accuracy : float, optional
        For lattice sums: target for the RMS error of the forces, relative to the RMS of the forces; 1e-6 by default.
    slab_correction : bool, optional
        For "ewald" and "pme": False makes an open axis an error. By default atoms with one open axis and vacuum along
        it get the slab correction, as always by "auto".
    dipoles, quadrupoles : dict, array or function, optional
        In the same forms as charges, for lattice sums and "coulomb": dipoles (3,) by element or (n_atoms, 3) in
        e angstrom, and second moments (3, 3) or (n_atoms, 3, 3) in e angstrom², as for `ewald_summation`. Values that
        are not functions stay constant while atoms move.
    widths : float, dict or array, optional
        For the same methods: standard deviations of Gaussians in angstrom; zero for points.
    **parameters
        Further parameters that the method requires (``alpha`` for "dsf" and "wolf", ``dielectric``, ``kappa``) or
        accepts (``shifted``, ``r_switch``), as in `nvalchemiops.torch.interactions.pair`.

    Raises
    ------
    ValueError, TypeError
        An argument that is unknown, missing or does not belong to the method; when atoms are evaluated, elements
        without a charge, or a periodicity that the method does not support.

    Notes
    -----
    *Charges that depend on the geometry*: if a function returns a tensor with a gradient graph to the positions (and
    the cell) of its `System`, forces and virial include the change of the charges. Charges that it returns without a
    graph are constants: forces are then computed at fixed charges.

    The same holds for dipoles and quadrupoles: for rotating molecules give them as functions.
    `Calculator.get_torques` returns the torques on atoms with dipoles or quadrupoles.

    *Charged cells* are neutralised by a uniform background. Lattice sums have conducting boundary conditions.

    *Parameters* of lattice sums follow from the number of atoms and the cell. With dipoles, quadrupoles or widths they
    also depend on the magnitude of these sources; for functions, on the magnitude in the first call. Energies are
    continuous while only the size of the cell changes. When its shape changes, the sets of k-vectors and pairs change,
    and energies jump by a small part of the accuracy. Stress is the derivative at constant parameters.

    Examples
    --------
    >>> term = Electrostatics("auto", {"Na": 1.0, "Cl": -1.0}, accuracy=1e-8)
    >>> term = Electrostatics("dsf", cutoff=12.0, alpha=0.2)
    """

    has_charges = True

    def __init__(
        self,
        method: str = "auto",
        charges: Charges = None,
        *,
        cutoff: float | None = None,
        accuracy: float | None = None,
        slab_correction: bool | None = None,
        dipoles: Moments = None,
        quadrupoles: Moments = None,
        widths: float | Mapping[str, float] | np.ndarray | None = None,
        **parameters: Any,
    ) -> None:
        if isinstance(method, float):
            raise TypeError(f"`method` comes first: give accuracy={method!r}")
        method = as_choice("method", method, (*LATTICE_SUMS, *WITHIN_CUTOFF))
        refuse_exclusions(parameters)
        self.method = method
        of_lattice_sums = {"accuracy": accuracy, "slab_correction": slab_correction or None}
        others: dict[str, Any] = {"dipoles": dipoles, "quadrupoles": quadrupoles, "widths": widths}
        others = {name: values for name, values in others.items() if values is not None}
        slabs = {"slab_correction": slab_correction} if method in LATTICE_SUMS else {}
        self._arguments: dict[str, Any] = {"cutoff": cutoff, "accuracy": accuracy, **slabs, **parameters, **others}
        self._sum: LatticeSum | PairSum | SourceSum
        self._of_open: PairSum | SourceSum | None = None  # instead of it, for atoms without a periodic axis
        if others and method not in (*LATTICE_SUMS, "coulomb"):
            _refuse(others, f"'{method}' is for charges; 'auto', 'ewald', 'pme' and 'coulomb' have them")
        if callable(widths):
            raise TypeError("`widths` must be a number, a dict or an array, got a function")
        if method in LATTICE_SUMS:
            _refuse({"cutoff": cutoff, **parameters}, f"'{method}' chooses its parameters for `accuracy`")
            of_slabs = None if slab_correction is None or method == "auto" else bool(slab_correction)
            self._sum = LatticeSum(method, accuracy, of_slabs, charges is None)
            if method == "auto":
                self._of_open = SourceSum(None) if others else PairSum("coulomb", None, {})
        else:
            _refuse(of_lattice_sums, f"'{method}' is a sum over pairs")
            if others:
                _refuse(parameters, "it is for charges without dipoles, quadrupoles and widths")
                self._sum = SourceSum(cutoff)
            else:
                self._sum = PairSum(method, cutoff, parameters)
        self.charges = charges
        self._functions: dict[str, Callable[[System], Any]] = {}
        self._of_atoms: dict[str, Callable[[ase.Atoms], np.ndarray]] = {}
        for name, values in {"charges": charges, **others}.items():
            if values is None:
                self._of_atoms[name] = functools.partial(_initial_charges, alone=not others.keys() - {"widths"})
            elif callable(values):
                self._functions[name] = values
            else:
                self._of_atoms[name] = atom_values(name, values, SHAPES[name])

    def _sum_of(self, atoms: ase.Atoms) -> "LatticeSum | PairSum | SourceSum":
        return self._sum if self._of_open is None or any(periodicity(atoms.pbc)) else self._of_open

    def reach(self, atoms: ase.Atoms) -> float | None:
        """The distance beyond which pairs do not contribute; known if no source is a function of the geometry."""
        for name in self._functions:
            raise ValueError(f"`{name}`: a function of the geometry is for one process")
        return self._sum_of(atoms).reach(atoms, {name: values(atoms) for name, values in self._of_atoms.items()})

    def evaluate(self, system: System) -> Contribution:
        """Energies, forces, virial and charges of these atoms; see `Term`."""
        whole = {name: values(system.atoms) for name, values in self._of_atoms.items()}
        sources = {name: system.of_atoms(values) for name, values in whole.items()}
        if self._functions:
            leaves = system.with_gradients()
            with torch.enable_grad():
                returned = {name: _returned(name, of(leaves), system) for name, of in self._functions.items()}
            sources |= returned
            if len(sources) > 1:
                whole |= {name: values.detach().cpu().numpy() for name, values in returned.items()}
        fixed = {name: values.detach() for name, values in sources.items()}
        found = self._sum_of(system.atoms)(system, fixed, sources["charges"].requires_grad, whole)
        forces, virial = found.forces, found.virial
        moving = [name for name, values in sources.items() if values.requires_grad]
        if moving:
            of_sources = [sources[name] for name in moving], [found.gradients[name] for name in moving]
            more_forces, more_virial = _response(leaves, *of_sources)
            forces = forces + more_forces
            virial = None if virial is None else virial + more_virial
        k = COULOMB_EV_ANGSTROM
        virial, torques = (None if v is None else k * v for v in (virial, _torques(fixed, found.gradients)))
        return Contribution(k * found.energies, k * forces, virial, fixed["charges"], fixed.get("dipoles"), torques)

    def for_batches(self, system: System) -> InBatches | None:
        """The term for atoms of several systems; None if sources are functions or arrays of one system, or moments."""
        by_element = self.charges is None or isinstance(self.charges, Mapping)
        if self._functions or len(self._of_atoms) > 1 or not by_element or isinstance(self._sum, SourceSum):
            return None
        charges = system.of_atoms(self._of_atoms["charges"](system.atoms))
        return self._sum.for_batches(system, charges)

    def __repr__(self) -> str:
        return f"Electrostatics({', '.join([repr(self.method), *shown({'charges': self.charges, **self._arguments})])})"


class Found(NamedTuple):
    """Results of a sum, in e and angstrom, with gradients for the requested sources, and the virial (3, 3)."""

    energies: torch.Tensor
    forces: torch.Tensor
    gradients: dict[str, torch.Tensor]
    virial: torch.Tensor | None

    @classmethod
    def of(cls, results: tuple[torch.Tensor, ...], names: Iterable[str], has_virial: bool) -> "Found":
        """Results of a function of this library, with gradients for these sources."""
        energies, forces, *more = results
        return cls(energies, forces, dict(zip(names, more)), more[-1][0] if has_virial else None)


class PairSum:
    """A sum over pairs of charges, either all pairs or pairs within a cutoff."""

    def __init__(self, method: str, cutoff: float | None, parameters: Mapping[str, Any]) -> None:
        self.potential, values = from_library(method, WITHIN_CUTOFF[method], cutoff, parameters)
        self.parameters = Parameters(self.potential, values, elsewhere=("q",))

    def reach(self, _: ase.Atoms, __: Sources) -> float | None:
        """The cutoff."""
        return self.potential.cutoff

    def for_batches(self, system: System, charges: torch.Tensor) -> InBatches | None:
        """The sum for atoms of several systems, whose energies are in eV: they are products of two charges."""
        return self.parameters.for_batches(system, q=charges * math.sqrt(COULOMB_EV_ANGSTROM))

    def __call__(self, system: System, sources: Tensors, with_gradients: bool, _: Sources) -> Found:
        """Energies, forces, charge gradients if requested, and virial if wanted; in e²/angstrom."""
        results = self.parameters.sum_over(system, q=sources["charges"], compute_gradients=("q",) * with_gradients)
        return Found.of(results, ["charges"] * with_gradients, system.wants_virial)


class SourceSum:
    """A sum over pairs of dipoles, quadrupoles and Gaussians, either all pairs or pairs within a cutoff."""

    def __init__(self, cutoff: float | None) -> None:
        self.cutoff = None if cutoff is None else check_positive("cutoff", cutoff)

    def reach(self, _: ase.Atoms, __: Sources) -> float | None:
        """The cutoff."""
        return self.cutoff

    def __call__(self, system: System, sources: Tensors, _: bool, __: Sources) -> Found:
        """As for `PairSum`, with gradients for all sources."""
        near = system.neighbors(self.cutoff)
        if "domain" in near:
            raise ValueError("`dipoles`, `quadrupoles` and `widths`: on several ranks by 'ewald' and 'pme'")
        atoms = ChargedAtoms(system.positions, cell=system.cell, **sources)
        results = coulomb_of_sources(atoms, _listed(near), self.cutoff, compute_virial=system.wants_virial)
        return Found.of(results, (name for name in SHAPES if name in sources and name != "widths"), system.wants_virial)


class Chosen(NamedTuple):
    """Parameters of a lattice sum, and the atoms for which they were chosen."""

    made_for: tuple[Any, ...]
    device: torch.device
    alpha: float
    cutoff: float
    long_range: tuple[type, tuple[Any, ...]]  # the first two fields of `EwaldSum`


class LatticeSum:
    """Ewald's sum of charges, dipoles and quadrupoles, with or without a mesh.

    ``slabs``: False makes atoms with an open axis an error; otherwise they get the slab correction.
    ``of_initial_charges``: the charges are the initial charges of the atoms, which may change between calls.
    """

    def __init__(self, method: str, accuracy: float | None, slabs: bool | None, of_initial_charges: bool) -> None:
        self.method = method
        self.of_initial_charges = of_initial_charges
        self.accuracy = check_accuracy(1e-6 if accuracy is None else accuracy)
        self.slabs = slabs
        self._chosen: Chosen | None = None

    def for_batches(self, _: System, charges: torch.Tensor) -> InBatches:
        """The sum for atoms of several systems."""
        if self.method == "auto":
            return InBatches(AnyElectrostatics(self.accuracy), charges)
        made = {"ewald": EwaldSummation, "pme": ParticleMeshEwald}[self.method](accuracy=self.accuracy)
        given = {} if self.slabs is None else {"slab_correction": self.slabs}
        return InBatches(functools.partial(made, **given), charges)

    def __call__(self, system: System, sources: Tensors, with_gradients: bool, whole: Sources) -> Found:
        """As for `PairSum`, with gradients for dipoles and quadrupoles; ``whole`` are the sources of all atoms."""
        self._check_periodicity(system.atoms)
        positions, cell, pbc = system.positions, system.cell, system.atoms.pbc
        assert cell is not None
        options: dict[str, Any] = {
            "compute_forces": True,
            "compute_charge_gradients": with_gradients,
            "compute_virial": system.wants_virial,
        }
        options |= {f"compute_{name[:-1]}_gradients": name in sources for name in ("dipoles", "quadrupoles")}
        names = [name for name in SHAPES if options.get(f"compute_{name[:-1]}_gradients")]
        chosen = self._parameters(system.atoms, positions.device, whole)
        # the sum is periodic along all axes, even if a correction accounts for an open one
        near = system.neighbors(chosen.cutoff, (True, True, True))
        axes = None if pbc.all() else torch.tensor(pbc, device=positions.device)
        asked = EwaldSum(
            *chosen.long_range,
            ChargedAtoms(positions, cell=cell, **sources),
            _listed(near),
            check_request(**options, energy_reduction="atom"),
            SumOptions(chosen.alpha, self.accuracy, chosen.cutoff),
        )
        complete = asked._replace(
            atoms=asked.atoms._replace(domain=near.get("domain"), pbc=axes),
            options=asked.options._replace(slab_correction=axes is not None),
        )
        if "domain" in near:
            found: Any = ewald_sum(complete)
            return Found.of(found, names, system.wants_virial)
        found = sum_of_parts(asked)
        warn_of_slabs(complete, ewald_sum)
        if axes is not None:
            correction = compute_slab_correction(positions, cell=cell, pbc=axes, **sources, **options)
            found = tuple(one + other for one, other in zip(found, correction))
        return Found.of(found, names, system.wants_virial)

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
        if n_open == 1 and self.slabs is False:
            raise ValueError(
                "`slab_correction` is False, but the atoms have an open axis: leave it out, or set `pbc` of the atoms"
            )
        if atoms.cell.rank < 3:
            raise ValueError(
                f"`cell`: '{self.method}' needs three vectors, also along an open axis, with vacuum around the slab"
            )

    def reach(self, atoms: ase.Atoms, whole: Sources) -> float:
        """The cutoff of the sum over pairs."""
        self._check_periodicity(atoms)
        device = torch.device("cpu") if self._chosen is None else self._chosen.device
        return self._parameters(atoms, device, whole).cutoff

    def _parameters(self, atoms: ase.Atoms, device: torch.device, whole: Sources) -> Chosen:
        """The kept parameters, or new ones if the cell has changed, or with dipoles the elements or charges."""
        kept, strengths = self._chosen, None
        if len(whole) > 1:
            strengths = (atoms.numbers.tobytes(), whole["charges"].tobytes() if self.of_initial_charges else None)
        made_for = (len(atoms), atoms.cell.array.tobytes(), device, strengths)
        if kept is None or kept.made_for != made_for:
            self._chosen = kept = self._choose(atoms, device, whole, made_for)
        return kept

    def _choose(self, atoms: ase.Atoms, device: torch.device, whole: Sources, made_for: tuple[Any, ...]) -> Chosen:
        cell = torch.tensor(atoms.cell.array, dtype=torch.float64, device=device)
        positions = cell[:1].expand(len(atoms), 3)  # only their number matters
        check_place("positions", positions)
        method, costs = self.method, COSTS[device.type]  # with a list that is kept
        if method == "auto":
            method = method_of_one(len(atoms), self.accuracy, costs, False)
        by_mesh = method == "pme"
        order = order_of_least_cost(self.accuracy, costs)
        sources: Tensors = {"charges": cell.new_zeros(len(atoms))}  # alone they do not matter
        if len(whole) > 1:
            # strengths are kept, but not those of a call that fails
            for name, values in {"positions": atoms.positions, **whole}.items():
                if not np.isfinite(values).all():
                    raise ValueError(f"`{name}` has entries that are NaN or infinite")
            sources = {name: torch.as_tensor(values, dtype=cell.dtype, device=device) for name, values in whole.items()}
        system = check_system(ChargedAtoms(positions, cell=cell, **sources))
        sizes, known = sizes_of_system(system), sources_of(system)
        open_part = MeshSum(order, None) if by_mesh else KVectorSum()
        alpha, cutoff, target, _ = optimal_splitting(system, open_part, self.accuracy, costs, *known)
        long_range: tuple[type, tuple[Any, ...]]
        if by_mesh:
            mesh = mesh_for(sizes, alpha, target, order, strengths=known[0])
            long_range = (MeshSum, (mesh, None, order, Precomputed(), None))
        else:
            # chosen as in the sums, so that they do not change while the cell changes a little
            length = torch.as_tensor(reciprocal_cutoff(alpha, sizes.spacing, target), device=device)
            k_vectors: Any = WaveVectors(*chosen_points(cell.reshape(1, 3, 3), length))
            long_range = (KVectorSum, (None, None, None, k_vectors))
        return Chosen(made_for, device, alpha.item(), cutoff.item(), long_range)


def _listed(near: Mapping[str, torch.Tensor]) -> GivenNeighbors:
    """Neighbors as terms receive them, as an argument of sums; none on several ranks."""
    shifts = near.get("neighbor_matrix_shifts")
    return GivenNeighbors(neighbor_matrix=near.get("neighbor_matrix"), matrix_shifts=shifts)


def _refuse(arguments: Mapping[str, Any], reason: str) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise TypeError(f"`{name}` does not belong to this method: {reason}")


def _initial_charges(atoms: ase.Atoms, alone: bool) -> np.ndarray:
    """Of the atoms; warn if all are zero, as those of many files are, and there are no other sources."""
    if len(atoms) and not atoms.has("initial_charges"):
        raise ValueError(
            "`charges` are needed: none are given (in the command by --charges Mg=2,O=-2), and the atoms have no "
            "initial charges"
        )
    found = of_array("initial_charges", atoms.get_initial_charges(), atoms)
    if alone and len(atoms) > 1 and not found.any():  # an atom by itself is neutral
        notify("`charges` are not given, and the initial charges of all atoms are zero", NvalchemiopsWarning)
    return found


def _returned(name: str, values: Any, system: System) -> torch.Tensor:
    """The sources returned by a function of the system, checked."""
    shape = SHAPES[name]
    if not isinstance(values, torch.Tensor):
        return system.tensor(of_array(name, np.asarray(values), system.atoms, shape))
    if values.shape != (len(system.atoms), *shape):
        raise ValueError(f"`{name}` must return shape {(len(system.atoms), *shape)}, got {tuple(values.shape)}")
    return values.to(system.positions)


def _response(
    system: System, sources: list[torch.Tensor], gradients: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Forces and virial from the change of sources; ``gradients`` are dE/d(source)."""
    leaves = [system.positions, *([] if system.cell is None else [system.cell])]
    found = torch.autograd.grad(sources, leaves, gradients, allow_unused=True)
    filled = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found)]
    # a strain moves positions and lattice vectors alike
    strained = [leaf.detach().mT @ g for leaf, g in zip(leaves, filled)]
    return -filled[0], -torch.stack(strained).sum(0)


def _torques(sources: Tensors, gradients: Tensors) -> torch.Tensor | None:
    """``-(μ x dE/dμ)_a - 2 Σ_bc ε_abc (Q dE/dQ)_bc`` of each atom; None without dipoles and quadrupoles."""
    parts = []
    if "dipoles" in gradients:
        parts.append(-torch.linalg.cross(sources["dipoles"], gradients["dipoles"]))
    if "quadrupoles" in gradients:
        symmetric = 0.5 * (sources["quadrupoles"] + sources["quadrupoles"].mT)
        product = symmetric @ gradients["quadrupoles"]
        turned = (product - product.mT)[:, [1, 2, 0], [2, 0, 1]]
        parts.append(-2.0 * turned)
    return torch.stack(parts).sum(0) if parts else None
