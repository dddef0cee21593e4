"""Models: functions of a `System` that return energies, forces and stress, for dynamics and relaxation.

Anything with this signature is a model: a function, a torch module, `SumOfTerms` or `FromEnergies`.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from nvalchemiops.constants import BOHR_IN_ANGSTROM, HARTREE_IN_EV
from nvalchemiops.notices import NvalchemiopsWarning, notify
from nvalchemiops.torch import checks
from nvalchemiops.torch.batching import count_systems, told_systems
from nvalchemiops.torch.distributed.pairs import OwnedPairs
from nvalchemiops.torch.dynamics.sums import Division
from nvalchemiops.torch.interactions.dispersion.modules import DFTD3
from nvalchemiops.torch.interactions.electrostatics.automatic import fastest_cutoff
from nvalchemiops.torch.interactions.electrostatics.modules import SOURCES, ConfiguredSum
from nvalchemiops.torch.interactions.electrostatics.open_systems import has_slabs
from nvalchemiops.torch.interactions.pair.potential import PairPotential
from nvalchemiops.torch.interactions.pair.system import cells_fit_any_list
from nvalchemiops.torch.neighbors.rows import GivenNeighbors
from nvalchemiops.torch.neighbors.verlet import VerletList
from nvalchemiops.torch.runtime import engine
from nvalchemiops.torch.runtime._torch_internals import derivative_asked, named_in_files, transforms_active
from nvalchemiops.torch.runtime.context import may_read, ordinary
from nvalchemiops.torch.runtime.releases import replaceable
from nvalchemiops.torch.systems import Neighbors, System, printed_in_short

if TYPE_CHECKING:
    from nvalchemiops.torch.distributed.domain import Domain


@replaceable
@printed_in_short
@named_in_files
class Evaluation(NamedTuple):
    """What a model returns.

    Attributes
    ----------
    energies : (n_systems,) tensor, energy
    forces : (n_atoms, 3) tensor, energy / length
        ``-dE/dR``.
    stress : (n_systems, 3, 3) tensor, energy / volume, or None
        ``dE/dstrain / volume``, symmetric, positive for tension (as in ASE). None without cells; zero for systems
        without a volume.
    """

    energies: torch.Tensor
    forces: torch.Tensor
    stress: torch.Tensor | None = None

    def without_graph(self) -> "Evaluation":
        """The same values without gradients in reverse mode."""
        wrapped = transforms_active()  # what `vmap` wraps does not tell by itself
        tracked = [value is not None and (wrapped or value.requires_grad) for value in self]
        if not any(tracked):
            return self
        with torch.no_grad():  # `detach` would lose tangents of forward mode, too
            values: Any = [value.clone() if ends and value is not None else value for value, ends in zip(self, tracked)]
            return Evaluation(*values)


class Model(Protocol):
    """A potential energy surface: a call takes a `System`, of one or several systems, and returns an `Evaluation`.

    With a ``domain`` the call is collective. Forces are those of the atoms that this rank owns, energies and stress are
    those of whole systems, the same on all ranks.
    """

    def __call__(self, system: System) -> Evaluation:
        """Energies, forces and, for systems with cells, stress."""


def check_model(model: Any) -> None:
    """Raise unless this can be called."""
    if not callable(model):
        advice = ": use nvalchemiops.ase.FromASE" if hasattr(model, "get_potential_energy") else ""
        raise TypeError(f"`model` must be callable with a System, got {type(model).__name__}{advice}")


def as_evaluation(found: Any) -> Evaluation:
    """What a model returned: an Evaluation, or another class with its fields, as TorchScript makes of it."""
    if isinstance(found, Evaluation):
        return found
    if not all(hasattr(found, name) for name in Evaluation._fields):
        advice = ": give interactions of this library to SumOfTerms" if hasattr(found, "energies") else ""
        raise TypeError(f"`model` must return an Evaluation, got {type(found).__name__}{advice}")
    return Evaluation(found.energies, found.forces, found.stress)


def check_shapes(found: Evaluation, n_systems: int, n_atoms: int) -> None:
    """Raise unless energies, forces and, if there is one, the stress have their shapes."""
    shapes = {"energies": (n_systems,), "forces": (n_atoms, 3), "stress": (n_systems, 3, 3)}
    for name, shape in shapes.items():
        value = getattr(found, name)
        if value is not None and value.shape != shape:
            raise ValueError(f"`model`: {name} must have shape {shape}, got {tuple(value.shape)}")


def check_energies(energies: Any, n_systems: int | None) -> None:
    """Warn unless a function returned one energy for each system. Forces and stress are right without that."""
    if n_systems is not None and energies.shape != (n_systems,) and not torch.compiler.is_compiling():
        notify(
            f"`function` returned energies of shape {tuple(energies.shape)}, which is ({n_systems},) for energies of "
            "systems: sum those of the atoms of each system, as with energy_reduction='system'. Forces and stress "
            "belong to the sum of all",
            NvalchemiopsWarning,
            "energies of systems",
        )


def check_same(found: Evaluation, domain: "Domain | None") -> None:
    """Raise on all ranks unless energies and stress are the same on all of them, as those of whole systems are."""
    for name in ("energies", "stress"):
        value = getattr(found, name)
        if domain is not None and value is not None and not domain._is_same(value):
            raise ValueError(
                f"`model`: {name} differ between ranks, but must be those of whole systems: pass the `domain` of the "
                "system to the sums of this library, and sum your own terms by `domain.sum`"
            )


def _volumes(system: System) -> torch.Tensor:
    """Volumes (n_systems, 1, 1) by which virials are divided, infinite without one: a molecule has no stress."""
    volumes = system.volume.reshape(-1, 1, 1)
    return torch.where(volumes == 0.0, torch.inf, volumes)


class SumOfTerms:
    """A model that adds interactions of this library and other models, with a Verlet list.

    All terms with a cutoff share one list. Lattice sums that choose their cutoff, and sums of slabs, share another one:
    with their cutoff, or the one that is fastest for the atoms of the first call (chosen again for another number).
    Sums with an alpha, k-vectors or a mesh, but no cutoff, search in each call: give them the cutoff of their alpha.

    Parameters
    ----------
    *terms : PairPotential, Electrostatics, EwaldSummation, ParticleMeshEwald, DFTD3, functools.partial or Model
        Parameters and options of an interaction are bound by ``functools.partial``: they stay as they are, whatever the
        system has. Lattice sums take charges of the system, or those bound. Everything else is called as a `Model`, and
        finds its own neighbors.
    skin : float, length, optional
        Neighbor lists reach to the largest cutoff plus the skin. Results do not depend on the skin, but those of
        lattice sums do within their accuracy: they also take pairs of the list that are beyond their cutoff.
    stress : bool, optional
        Whether to compute the stress of systems with cells, for some 10 % more time.
    hartree, bohr : float, energy and length, optional
        The atomic units in the units of the system, by default in eV and angstrom. Energies of `Electrostatics` and
        its methods are multiplied by ``hartree * bohr``, the Coulomb constant, but not those of another `power_law`.
        Pair potentials are not multiplied, also if they are of charges; D3 energies are computed in atomic units.

    Attributes
    ----------
    neighbors : VerletList or None
        The shared list; None if no term has a cutoff. It has the numbers of calls and of searches.
    neighbors_of_sums : VerletList or None
        The other list; None until a call needs it.

    Raises
    ------
    ValueError, TypeError
        No terms; a term that cannot be called; a skin that is negative; units that are not positive.

    Examples
    --------
    >>> from functools import partial
    >>> from nvalchemiops.torch.interactions.pair import lennard_jones
    >>> model = SumOfTerms(partial(lennard_jones(8.5), sigma=3.4, epsilon=0.0104), skin=1.0)
    """

    def __init__(
        self,
        *terms: Any,
        skin: float = 0.5,
        stress: bool = True,
        hartree: float = HARTREE_IN_EV,
        bohr: float = BOHR_IN_ANGSTROM,
    ) -> None:
        if not terms:
            raise ValueError("`terms` are missing: give at least one interaction or model")
        for term in terms:
            if not callable(term) or isinstance(term, type):
                raise TypeError(f"`terms`: {term!r} is neither an interaction nor a model")
        self.terms = terms
        self.stress = checks.check_flag("stress", stress)
        self.hartree, self.bohr = checks.check_positive("hartree", hartree), checks.check_positive("bohr", bohr)
        reaches = [self._reach(term) for term in terms]
        skin = checks.check_not_negative("skin", skin)
        reach = max((r for r in reaches if r is not None), default=None)
        self.neighbors = None if reach is None else VerletList(reach, skin)
        self.neighbors_of_sums: VerletList | None = None
        self._skin = skin
        self._suited: Any = None  # the numbers of atoms and systems for which the cutoff of this list was chosen
        self._own: list[Any] = []  # the terms that take it

    def _reach(self, term: Any) -> float | None:
        """The distance up to which the shared list must be complete for this term; None if it takes no list."""
        interaction = _interaction(term)
        if isinstance(interaction, DFTD3):
            return interaction.reach * self.bohr
        if isinstance(interaction, ConfiguredSum):
            bound = getattr(term, "keywords", {}).get("cutoff")
            return interaction.cutoff if bound is None else checks.check_positive("cutoff", bound)
        return interaction.cutoff if isinstance(interaction, PairPotential) else None

    def take_lists(self, other: "SumOfTerms") -> None:
        """Go on with the lists of another model of the same kinds of terms; they notice other atoms."""
        self.neighbors, self.neighbors_of_sums = other.neighbors, other.neighbors_of_sums

    def _list_of_sums(self, system: System, of_slabs: bool) -> VerletList | None:
        """The list of sums that choose their cutoff, and of those of slabs; None if there are none."""
        if not may_read(system.positions, system.cell, system.batch_idx, wait=True):
            return None
        suited = system.positions.shape, system.positions.device, system.cell is None or system.cell.shape, of_slabs
        if suited != self._suited:
            own = []
            for term in self.terms:
                if isinstance(interaction := _interaction(term), ConfiguredSum):
                    given, bound = self._reach(term), getattr(term, "keywords", {})
                    reach = fastest_cutoff(interaction, system, bound) if given is None else given
                    if reach is not None and (of_slabs or given is None):
                        own.append((term, reach))
            reach, now = max([reach for _, reach in own], default=None), self.neighbors_of_sums
            if reach is not None and (now is None or now.cutoff != reach):
                self.neighbors_of_sums = VerletList(reach, self._skin)
            self._suited, self._own = suited, [term for term, _ in own]
        return self.neighbors_of_sums if self._own else None

    @engine.with_own_plans
    def __call__(self, system: System) -> Evaluation:
        """Energies, forces and stress of the sum."""
        checks.refuse_atoms("system", system)
        listed = of_sums = None
        if system.domain is None:
            of_slabs = has_slabs(system.pbc)
            verlet, whole = self._list_of_sums(system, of_slabs), system
            # sums of slabs have another list, and may be all that has a cutoff
            readers = [term for term in self.terms if not any(term is own for own in self._own)]
            if any(self._reach(term) is not None for term in readers):
                listed = _neighbors(self.neighbors, system)
            if of_slabs:  # lattice sums add up images along the open axis of a slab, too
                pbc = checks.pbc_tensor(system.pbc, system.positions.device)
                whole = system._replace(pbc=pbc.any(-1, keepdim=True).expand(pbc.shape))
            of_sums = _neighbors(verlet, whole)
        wants_stress = self.stress and system.cell is not None
        pairs = [term for term in self.terms if isinstance(_interaction(term), PairPotential)]
        others = [term for term in self.terms if not isinstance(_interaction(term), PairPotential)]
        parts = [self._evaluate_pairs(pairs, system, listed, wants_stress)] if pairs else []
        for term in others:
            takes_own = any(term is own for own in self._own)
            parts.append(self._evaluate(term, system, of_sums if takes_own else listed, wants_stress))
        return Evaluation(*_total(parts))

    def _evaluate_pairs(
        self, terms: Sequence[Any], system: System, listed: GivenNeighbors | None, wants_stress: bool
    ) -> tuple[torch.Tensor, ...]:
        """The results of all pair potentials: one call, which has a plan."""

        def evaluate(
            near: GivenNeighbors | None, /, positions: Any, cell: Any, **values: Any
        ) -> tuple[torch.Tensor, ...]:
            here = system._replace(positions=positions, cell=cell)
            given = [{name: values[f"{name} {k}"] for name in named} for k, named in enumerate(names)]
            return _total([self._evaluate(term, here, near, wants_stress, more) for term, more in zip(terms, given)])

        values: dict[str, Any] = {}
        names: list[list[str]] = []
        kinds: list[Any] = []
        for k, term in enumerate(terms):
            potential, bound = _interaction(term), getattr(term, "keywords", {})
            formula = potential.formula
            known = (*formula.per_atom, *formula.global_parameters, *formula.per_pair)
            names.append([name for name in bound if name in known])
            values |= {f"{name} {k}": bound[name] for name in names[-1]}
            rest = tuple([(name, value) for name, value in bound.items() if name not in known])
            kinds.append((formula, potential.cutoff, potential.r_switch, rest))
        fixed: dict[str, Any] = {"batch_idx": system.batch_idx, "pbc": system.pbc}
        moving = {"positions": system.positions, "cell": system.cell, **values}
        if listed is None or any(type(_interaction(term)) is not PairPotential for term in terms):
            return evaluate(listed, **moving)
        if not listed.fits_cell:
            fixed["cell"] = moving.pop("cell")
        return engine.run_function("sum of pair potentials", evaluate, moving, listed, fixed, (wants_stress, *kinds))

    def _evaluate(
        self,
        term: Any,
        system: System,
        near: GivenNeighbors | None,
        wants_stress: bool,
        values: Mapping[str, Any] | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Energies, forces and, if wanted, the stress of a term, in the units of the system."""
        interaction, takes_own = _interaction(term), any(term is own for own in self._own)
        takes_list = near is not None and (takes_own or self._reach(term) is not None)
        if not isinstance(interaction, PairPotential | ConfiguredSum | DFTD3):
            found = term(system)
            if wants_stress and found.stress is None:
                raise ValueError(f"`terms`: {term!r} has no stress, so the sum has none; see `stress`")
            return tuple(found) if wants_stress else tuple(found[:2])
        energy, length = 1.0, 1.0
        if isinstance(interaction, DFTD3):
            energy, length = self.hartree, self.bohr
            cell = None if system.cell is None else system.cell / length
            domain = None if system.domain is None else system.domain._in_units(length)
            system = system._replace(positions=system.positions / length, cell=cell, domain=domain)
        elif isinstance(interaction, ConfiguredSum):
            # strengths of other powers of the distance have units of their own
            potential = getattr(term, "keywords", {}).get("potential", interaction.potential)
            energy = self.hartree * self.bohr if getattr(potential, "exponent", None) in (1, None) else 1.0
            term, system = _with_sources(term, interaction, system)
        listed: tuple[Neighbors, ...] = ()
        if takes_list:
            verlet = self.neighbors_of_sums if takes_own else self.neighbors
            assert near is not None and verlet is not None and near.neighbor_matrix is not None
            kind, reach = _NeighborsOfFittingCells if near.fits_cell else Neighbors, verlet.cutoff / length
            listed = (kind.from_matrix(near.neighbor_matrix, near.matrix_shifts, cutoff=reach),)
        options: Any = {
            **(values or {}),
            "compute_forces": True,
            "compute_virial": wants_stress,
            "energy_reduction": "system",
        }
        if isinstance(interaction, PairPotential) and system.batch_idx is not None:
            options["num_systems"] = count_systems(system)
        if isinstance(interaction, PairPotential) and system.domain is not None:
            options |= _of_owned(term, interaction, system.domain)
        excluded = getattr(term, "keywords", {}).get("exclusions")
        if isinstance(excluded, OwnedPairs) and system.domain is not None:
            options["exclusions"] = excluded.followed(system.domain)
        found = term(system, *listed, **options)
        results = found.energies, found.forces
        if energy != 1.0 or length != 1.0:
            results = found.energies * energy, found.forces * (energy / length)
        if not wants_stress:
            return results
        # a virial is symmetric up to rounding and the error of a mesh
        return *results, (found.virial + found.virial.mT) * (-0.5 * energy / length**3 / _volumes(system))


def holds_atoms(model: Any) -> bool:
    """Whether a model is known to hold values of the atoms or systems of one batch, so that it fits no part of it."""
    for term in model.terms if isinstance(model, SumOfTerms) else ():
        interaction, bound = _interaction(term), getattr(term, "keywords", {})
        if holds_atoms(interaction):
            return True
        if isinstance(interaction, ConfiguredSum | DFTD3):  # such as the alpha of each system, which was estimated
            kept = [value for value in interaction._settings().values() if isinstance(value, torch.Tensor)]
            if any(value.ndim and value.shape[0] > 1 for value in kept):
                return True
        if isinstance(interaction, PairPotential | ConfiguredSum | DFTD3):
            of_kinds = interaction.formula.per_pair if isinstance(interaction, PairPotential) else ()
            if any(getattr(value, "ndim", 0) and name not in of_kinds for name, value in bound.items()):
                return True
            if bound.get("exclusions") is not None:
                return True
    return False


def _neighbors(verlet: VerletList | None, system: System) -> GivenNeighbors | None:
    """The neighbors of a list, which is searched for again if it must be."""
    if verlet is None:
        return None
    matrix, _, *shifts = verlet(system.positions, system.cell, system.pbc, system.batch_idx)
    fits = cells_fit_any_list(system.cell, system.pbc)
    return GivenNeighbors(neighbor_matrix=matrix, matrix_shifts=shifts[0] if shifts else None, fits_cell=fits)


class _NeighborsOfFittingCells(Neighbors):
    """Neighbors in cells that are known to be regular and periodic along all axes, so that they are not read again."""

    def given(self) -> GivenNeighbors:
        """The neighbors as arguments of a function that takes tensors one by one."""
        return super().given()._replace(fits_cell=True)


def _total(parts: Sequence[Sequence[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    """The sums of energies, of forces and so on; raise if torch would broadcast some of them."""
    for part in parts[1:]:
        for value, other in zip(parts[0], part):
            if value.shape != other.shape:
                raise ValueError(
                    f"terms return results of shapes {tuple(value.shape)} and {tuple(other.shape)}: each must return "
                    "energies (n_systems,), forces (n_atoms, 3) and stress (n_systems, 3, 3)"
                )
    return tuple([functools.reduce(torch.add, column) for column in zip(*parts)])


def _interaction(term: Any) -> Any:
    """The interaction to which parameters are bound."""
    while isinstance(term, functools.partial):
        term = term.func
    return term


def _of_owned(term: Any, potential: PairPotential, domain: "Domain") -> dict[str, torch.Tensor]:
    """Parameters bound to a term that have a row for each atom, for the atoms that this rank owns now."""
    names = ("species", *potential.formula.per_atom)
    found: dict[str, Any] = getattr(term, "keywords", {})
    return {name: _rows_of_rank(name, found[name], domain) for name in names if name in found}


def _with_sources(term: Any, interaction: ConfiguredSum, system: System) -> tuple[Any, System]:
    """A lattice sum without the sources that are bound to it, and the system that has them."""
    if not (bound := dict(getattr(term, "keywords", {}))):
        return term, system
    sources: dict[str, Any] = {name: bound.pop(name) for name in ("charges", *SOURCES) if name in bound}
    if system.domain is not None:
        sources = {name: _rows_of_rank(name, value, system.domain) for name, value in sources.items()}
    return functools.partial(interaction, *term.args, **bound), system._replace(**sources)


def _rows_of_rank(name: str, values: Any, domain: "Domain") -> Any:
    """Values bound to a term that have a row for each atom of all ranks, for the atoms that this rank owns now."""
    if not isinstance(values, torch.Tensor) or values.ndim == 0:
        return values
    if values.shape[0] != domain.n_atoms:
        raise ValueError(
            f"`{name}` of a term must have a row for each atom of all ranks, ({domain.n_atoms},), got "
            f"{tuple(values.shape)}"
        )
    return values.index_select(0, domain.global_index)


class FromEnergies:
    """A model from a function that returns energies: forces and stress are its derivatives.

    Parameters
    ----------
    function : callable
        ``function(system)`` returns the energies (n_systems,), or () for one system, computed from
        ``system.positions`` and ``system.cell`` by operations that torch differentiates, or results that have them.
    stress : bool, optional
        Whether to compute the stress of systems with cells.
    create_graph : bool, optional
        Whether results can be differentiated. By default they can if positions or the cell require gradients, and in
        transforms of torch; choose True to differentiate with respect to parameters of the function.

    Examples
    --------
    >>> springs = FromEnergies(lambda system: 0.5 * system.positions.square().sum())
    """

    def __init__(
        self, function: Callable[[System], Any], *, stress: bool = True, create_graph: bool | None = None
    ) -> None:
        if not callable(function):
            raise TypeError(f"`function` must be callable, got {type(function).__name__}")
        self.function = function
        self.stress = checks.check_flag("stress", stress)
        self.create_graph = create_graph if create_graph is None else checks.check_flag("create_graph", create_graph)

    def __call__(self, system: System) -> Evaluation:
        """Energies, forces and stress."""
        checks.refuse_atoms("system", system)
        if torch.is_inference_mode_enabled():
            # no graph is kept in it, so there would be no forces
            with torch.inference_mode(False), torch.no_grad():
                return self(system)
        system = System(*map(ordinary, system))
        positions, cell = system.positions, system.cell
        given = [positions]
        keep = torch.is_grad_enabled() if self.create_graph is None else self.create_graph
        slopes: tuple[torch.Tensor, ...]
        if self.stress and cell is not None:
            given.append(torch.zeros((count_systems(system), 3, 3), dtype=cell.dtype, device=cell.device))
        if not torch.compiler.is_compiling() and derivative_asked():
            # tangents and slices do not pass through a graph that begins here
            by_place = torch.func.grad(functools.partial(self._total, system), tuple(range(len(given))), has_aux=True)
            slopes, energies = by_place(*given)
        else:
            if self.create_graph is None:
                keep = keep and any(tensor is not None and tensor.requires_grad for tensor in (positions, cell))
            with torch.enable_grad():
                if not keep:
                    positions, cell = positions.detach(), None if cell is None else cell.detach()
                if not positions.requires_grad:
                    positions = positions.detach().requires_grad_()
                given = [positions, *(strain.requires_grad_() for strain in given[1:])]
                total, energies = self._total(system._replace(cell=cell), *given)
                if total.requires_grad:
                    slopes = torch.autograd.grad([total], given, create_graph=keep, materialize_grads=True)
                else:
                    slopes = tuple(torch.zeros_like(tensor) for tensor in given)
        stress = slopes[1] / _volumes(system) if len(given) > 1 else None
        found = Evaluation(energies, -slopes[0], stress)
        return found if keep else found.without_graph()

    def _total(
        self, system: System, positions: torch.Tensor, strain: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of the energies at these positions after a strain (n_systems, 3, 3), and the energies."""
        cell = system.cell
        if strain is not None and cell is not None:
            symmetric = 0.5 * (strain + strain.mT)
            batch_idx = system.batch_idx if system.domain is None else system.domain.batch_idx
            of_atoms = Division(batch_idx, len(strain), system.domain).of_atoms(symmetric, positions.shape[0])
            # no products of matrices, which autocast would round
            positions = positions + (positions.unsqueeze(-1) * of_atoms).sum(-2)
            matrices = cell.reshape(-1, 3, 3)
            strained = matrices + (matrices.unsqueeze(-1) * symmetric.unsqueeze(-3)).sum(-2)
            # systems that share a cell are strained one by one
            cell = strained.reshape(cell.shape) if len(strained) == len(matrices) else strained
        found: Any = self.function(system._replace(positions=positions, cell=cell))
        energies: torch.Tensor = getattr(found, "energies", found)  # also of results of this library
        energies = energies.reshape(1) if energies.ndim == 0 else energies
        check_energies(energies, told_systems(system) if strain is None else len(strain))
        total = energies.sum()
        if not total.requires_grad:
            notify(
                "`function`: energies have no graph to positions, so forces are zero. If they depend on positions, "
                "compute them by operations that torch differentiates, without `no_grad` or `detach`",
                NvalchemiopsWarning,
                "no graph",
            )
        return total, energies
