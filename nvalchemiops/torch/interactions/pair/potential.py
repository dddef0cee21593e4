"""`PairPotential`: a formula for the energy of a pair, and its sum over neighbors."""

import inspect
import re
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from nvalchemiops.interactions.pair.derivatives import POSITIONS, WEIGHTS, Request
from nvalchemiops.interactions.pair.expression import Formula, pair_energy
from nvalchemiops.interactions.pair.sum import Variant, source
from nvalchemiops.torch import checks
from nvalchemiops.torch.interactions.pair import shares
from nvalchemiops.torch.interactions.pair.driver import PairRequest, check_pair_request, run, sum_pairs
from nvalchemiops.torch.interactions.pair.system import PairSystem, pair_system
from nvalchemiops.torch.neighbors.rows import GivenNeighbors
from nvalchemiops.torch.runtime import engine
from nvalchemiops.torch.systems import BESIDE_TENSORS, Neighbors, Results, System, named, names_beside, neighbors_beside
from nvalchemiops.torch.types import Pbc

if TYPE_CHECKING:
    from nvalchemiops.torch.distributed.domain import Domain
    from nvalchemiops.torch.distributed.pairs import OwnedPairs

engine.immutable(Formula)


class PairPotential:
    """A pair potential: a function of the distance, written as one line of mathematics and summed over pairs.

    ``E = Σ u(r_ij)`` over all pairs closer than the cutoff, each counted once; each of the two atoms gets half of the
    energy of the pair. Energies, forces, virials and gradients with respect to all parameters are computed in one pass
    over the pairs, and are themselves differentiable to any order. The expression is parsed, differentiated and turned
    into a kernel. The kernel for each precision and order is compiled when it is first needed (about half a second) and
    kept on disk.

    Parameters
    ----------
    expression : str
        The energy of a pair as a function of the distance ``r``: arithmetic as in Python (``^`` is ``**``) with the
        functions sqrt, exp, log, sin, cos, tan, asin, acos, atan, sinh, cosh, tanh, erf, erfc, ``erfcx(x)``
        (exp(x^2) erfc(x)), abs, ``min(a, b)``, ``max(a, b)``, ``step(x)`` (1 for x >= 0, otherwise 0) and
        ``select(c, a, b)`` (a where c is not zero, otherwise b). After semicolons, definitions may follow in any order:
        ``"...; sigma = (sigma1 + sigma2)/2"``. ``cutoff``, ``r_switch`` and ``pi`` are predefined. The value must not
        change when the two atoms are exchanged.
    per_atom : sequence of str, optional
        Parameters of each atom. In the expression, 1 and 2 are appended for the two atoms, as in ``q1*q2/r``.
    global_parameters : sequence of str, optional
        Parameters of the system.
    per_pair : sequence of str, optional
        Parameters of each pair of species, given as tables. A pair has the mean of both entries, so fill both halves.
    cutoff : float, length, optional
        Pairs at this distance or beyond are left out. By default all pairs in the list count, or without a list all
        pairs of a system that is not periodic.
    shifted : bool, optional
        Subtract the value at the cutoff, so that the energy is continuous.
    r_switch : float, length, optional
        Switch the energy off between this distance and the cutoff, with two continuous derivatives (see Notes).
    self_energy : str, optional
        Self energy of an atom as a function of its parameters and the global parameters, as in
        ``"-alpha/sqrt(pi)*q**2"``.

    Raises
    ------
    ValueError
        The expression cannot be read (the message shows where), uses an unknown name, does not use a declared name, or
        is not symmetric; ``r_switch >= cutoff``; or ``shifted`` or ``r_switch`` is given without a cutoff.
    TypeError
        The expression is not a string.

    Notes
    -----
    The switching function is ``1 - 10 x³ + 15 x⁴ - 6 x⁵`` with ``x = (r - r_switch)/(cutoff - r_switch)``.

    The expression is simplified by the rules of algebra, which may widen its domain: ``exp(2*log(x))`` becomes ``x²``.

    At the kinks of ``abs``, ``min``, ``max``, ``step`` and ``select``, one of the two one-sided derivatives is taken.
    The names ``step`` and ``select`` and their meaning are those of OpenMM's custom forces.

    Examples
    --------
    >>> potential = PairPotential(
    ...     "4*epsilon*((sigma/r)**12 - (sigma/r)**6); sigma = (sigma1 + sigma2)/2; epsilon = sqrt(epsilon1*epsilon2)",
    ...     per_atom=("sigma", "epsilon"),
    ...     cutoff=8.0,
    ... )
    >>> energies, forces = potential(positions, cell, sigma=3.4, epsilon=0.0104, compute_forces=True)
    """

    def __init__(
        self,
        expression: str,
        per_atom: Sequence[str] = (),
        global_parameters: Sequence[str] = (),
        per_pair: Sequence[str] = (),
        *,
        cutoff: float | None = None,
        shifted: bool = False,
        r_switch: float | None = None,
        self_energy: str = "",
    ) -> None:
        for label, text in (("expression", expression), ("self_energy", self_energy)):
            if not isinstance(text, str):
                raise TypeError(f"`{label}` must be a string, got {type(text).__name__}")
        self.formula = Formula(
            expression,
            _names("per_atom", per_atom),
            _names("global_parameters", global_parameters),
            _names("per_pair", per_pair),
            checks.check_flag("shifted", shifted),
            r_switch is not None,
            self_energy,
        )
        self.cutoff, self.r_switch = check_distances(self.formula, cutoff, r_switch)
        pair_energy(self.formula)  # raises unless both energies are valid

    @engine.with_own_plans
    def __call__(
        self,
        positions: torch.Tensor | System,
        cell: torch.Tensor | Neighbors | None = None,
        *,
        neighbors: Neighbors | None = None,
        neighbor_list: torch.Tensor | None = None,
        neighbor_ptr: torch.Tensor | None = None,
        neighbor_shifts: torch.Tensor | None = None,
        neighbor_matrix: torch.Tensor | None = None,
        neighbor_matrix_shifts: torch.Tensor | None = None,
        fill_value: int | None = None,
        half_list: bool = False,
        neighbor_cutoff: float | None = None,
        batch_idx: torch.Tensor | None = None,
        num_systems: int | None = None,
        pbc: Pbc | None = None,
        species: torch.Tensor | None = None,
        exclusions: "torch.Tensor | OwnedPairs | None" = None,
        exclusion_factors: torch.Tensor | None = None,
        compute_forces: bool = False,
        compute_gradients: str | Sequence[str] = (),
        compute_virial: bool = False,
        energy_reduction: str = "atom",
        check: bool = False,
        domain: "Domain | None" = None,
        **parameters: float | torch.Tensor,
    ) -> Any:
        """Energies and, if requested, forces, gradients with respect to parameters, and virial.

        If a `System` is given instead of the positions, optionally followed by `Neighbors`, the results have names
        (`nvalchemiops.torch.systems.Results`), and ``gradients`` is a dict.

        Parameters
        ----------
        positions : (n_atoms, 3) tensor, float32 or float64, length
            Atoms may be outside of the cell.
        cell : (3, 3) or (n_systems, 3, 3) tensor, length, optional
            Rows are lattice vectors. An axis with a zero vector is open, unless ``pbc`` says otherwise. Without a cell,
            the system is not periodic.
        neighbors : Neighbors, optional
            Only with a `System`.
        neighbor_list, neighbor_ptr, neighbor_shifts : tensors, optional
            Pairs (2, n_pairs) sorted by the first atom, the first pair of each atom (n_atoms + 1,), and images
            (n_pairs, 3), as from `nvalchemiops.torch.neighbors.neighbor_list`. Without a cell, images are left out or
            zero. If no neighbors are given, a list is built.
        neighbor_matrix, neighbor_matrix_shifts : tensors, optional
            The same as matrices (n_atoms, width) and (n_atoms, width, 3).
        fill_value : int, optional
            Value of entries that are padding, even if an atom has this index. By default n_atoms for a matrix, and no
            padding for a list.
        half_list : bool, optional
            The list has each pair once, in either direction. A half list is expanded in each call, so a full list is
            faster.
        neighbor_cutoff : float, length, optional
            Cutoff of the given list. If this is shorter than the cutoff of the potential, the call raises.
        batch_idx : (n_atoms,) int32 tensor, optional
            System of each atom, in any order.
        num_systems : int, optional
            By default the number of cells if there are several; otherwise one more than the largest entry of
            ``batch_idx``, which is read. Inside ``torch.compile`` it cannot be read: a cell (1, 3, 3) then belongs to
            one system, and without a cell, or with a cell (3, 3), ``num_systems`` is needed.
        pbc : bool tensor, optional
            Periodicity; True along all axes by default. Along an open axis the lattice vector has no effect, and the
            list must have no images.
        species : (n_atoms,) int tensor, optional
            Row of each atom in the tables; required with ``per_pair``.
        exclusions : (2, n) int tensor or OwnedPairs, optional
            Pairs of atoms of the same system that do not interact, or whose energy is scaled, such as bonded and 1-4
            pairs. Only the nearest image of a pair in the list is excluded, wherever in the lattice the two atoms are
            stored. With a ``domain`` those from `Domain.distribute_pairs`, or the numbers of atoms in all pairs, the
            same on all ranks.
        exclusion_factors : (n,) tensor, optional
            Factors that scale the energies of these pairs; zero by default.
        compute_forces, compute_virial : bool, optional
            Return the forces ``-dE/dR``, and the virial ``-dE/dstrain``; the stress is ``-virial / volume``.
        compute_gradients : str or sequence of str, optional
            Name or names of the parameters whose gradients ``dE/dp`` to return.
        energy_reduction : {"atom", "system"}, optional
            Energies per atom, or summed over systems.
        check : bool, optional
            For debugging: raise unless the list is full (or half, with ``half_list``) and has every pair within the
            cutoff. This sorts all pairs and, outside of ``torch.compile``, searches for all pairs.
        domain : Domain, optional
            The system is divided among ranks (`nvalchemiops.torch.distributed`): atoms are those that this rank owns,
            and results per system are complete on all ranks.
        **parameters
            Each declared parameter by its name. Per atom: a number or a tensor (n_atoms,). Global: a number or a
            tensor () or (n_systems,). Per pair: a number, or a tensor (n_species, n_species), of which [a, b] and
            [b, a] are averaged. Tensors may require gradients.

        Returns
        -------
        energies : (n_atoms,) or (n_systems,) tensor
        forces : (n_atoms, 3) tensor, if requested
        gradients : tensors in the order of ``compute_gradients``
            Gradients of the sum of all energies: (n_atoms,), (n_systems,) or (n_species, n_species).
        virial : (n_systems, 3, 3) tensor, if requested

        All have the dtype of the positions and are differentiable to any order in positions, cell and parameters.
        Sums are in float64 and do not depend on the number of threads, on padding, or on pairs beyond the cutoff.

        Raises
        ------
        ValueError, TypeError
            An invalid argument, named in the message: a parameter that is missing, unknown, or of a wrong shape, dtype
            or device; distances that do not fit; a list that is not sorted; or neighbors out of range. The last are
            always found on a CPU, and on a GPU with ``check``; without it, their atoms get NaN.

        Notes
        -----
        Two atoms at the same position get the result of the formula: for a potential that diverges, an infinite or NaN
        energy and NaN forces. Other atoms are affected only if they interact with these two. A NaN in a position or
        parameter, or an infinite position, gives NaN for that atom and for all atoms that have it in their neighbor
        list.
        """
        given = GivenNeighbors(
            neighbor_list, neighbor_ptr, neighbor_shifts, neighbor_matrix, neighbor_matrix_shifts, fill_value, half_list
        )
        request = check_pair_request(compute_forces, compute_virial, energy_reduction, compute_gradients)
        if isinstance(positions, System):
            atoms = positions
            tensors = dict(zip(names_beside("fill_value"), (batch_idx, pbc, *given)))
            near = neighbors_beside((cell, neighbors), tensors)
            given, reach = near.given(), near.cutoff if neighbor_cutoff is None else neighbor_cutoff
        else:
            if neighbors is not None:
                raise TypeError(BESIDE_TENSORS)
            reach = neighbor_cutoff
            atoms = System(positions, None, cell, batch_idx, pbc, None, domain)  # type: ignore[arg-type]  # checked there
        domain = atoms.domain
        formula, cutoff = self.formula, self.cutoff
        by_system = request.by_system or formula.global_parameters != ()

        def system_of(here: System, near: GivenNeighbors) -> PairSystem:
            more: Any = {"neighbor_cutoff": reach, "check": check}
            return pair_system(here, near, num_systems, cutoff=cutoff, by_system=by_system, **more)

        def evaluate(near: GivenNeighbors, /, positions: Any, cell: Any, **values: Any) -> tuple[torch.Tensor, ...]:
            # not by `_replace`, whose result torch 2.11 loses at graph breaks
            here = System(positions, atoms.charges, cell, *atoms[3:])
            named = {name: values[name] for name in parameters}
            with shares.together(domain):
                system = system_of(here, near)
                shares.must_be_same(domain, request=request, has_species=species is not None, r_switch=self.r_switch)
                named = shares.parameters_of_share(formula, named, domain)
                excluded = shares.exclusions_of_share(domain, exclusions, exclusion_factors, positions, atoms.batch_idx)
            distances: Any = {"cutoff": cutoff, "r_switch": self.r_switch}
            results = sum_pairs(formula, system, named, request, **distances, species=species, exclusions=excluded)
            return shares.complete(formula, results, request, domain)

        options: Any = (formula, cutoff, self.r_switch, request, num_systems, reach, exclusions, exclusion_factors)
        call = "pair potential", evaluate, atoms, given, system_of
        results = run(*call, parameters, {"species": species}, options, check=check)
        if isinstance(positions, System):
            return _named(results, request)
        return results if len(results) > 1 else results[0]

    def source(self, *, compute_forces: bool = True, precision: str = "float64") -> str:
        """The C++ source of the kernel that sums energies and forces of a periodic system."""
        outputs = WEIGHTS + POSITIONS * compute_forces
        n_species = 2 * bool(self.formula.per_pair)
        return source(Variant(Request(self.formula, (), outputs), precision, True, n_species))

    @classmethod
    def of(
        cls, formula: Formula, *, cutoff: float | None = None, shifted: bool = False, r_switch: float | None = None
    ) -> "PairPotential":
        """A potential from a formula that is known to be valid."""
        potential = cls.__new__(cls)
        formula = formula._replace(shifted=checks.check_flag("shifted", shifted), switched=r_switch is not None)
        potential.formula = formula
        potential.cutoff, potential.r_switch = check_distances(formula, cutoff, r_switch)
        return potential

    def __repr__(self) -> str:
        formula = self.formula
        parts = [repr(formula.expression)]
        parts += [f"{name}={getattr(formula, name)}" for name in ("per_atom", "global_parameters", "per_pair")]
        parts += [f"cutoff={self.cutoff}"] * (self.cutoff is not None) + ["shifted=True"] * formula.shifted
        parts += [f"r_switch={self.r_switch}"] * formula.switched
        parts += [f"self_energy={formula.self_energy!r}"] * bool(formula.self_energy)
        return f"PairPotential({', '.join(parts)})"


def _named(results: tuple[Any, ...], request: PairRequest) -> Results:
    """The results as named `Results`, with the gradients as a dict."""
    names, found = ["energies"] + ["forces"] * request.forces, list(results)
    if request.gradients:
        gradients = slice(len(names), len(names) + len(request.gradients))
        found[gradients] = [dict(zip(request.gradients, found[gradients]))]
        names.append("gradients")
    return named(names + ["virial"] * request.virial, tuple(found))


def _names(kind: str, names: Any) -> tuple[str, ...]:
    """Names of parameters in Python's normal form (NFKC); raise if a name is also an argument of the call."""
    if isinstance(names, str):
        raise TypeError(f"`{kind}` must be a sequence of names, got the string {names!r}")
    taken = inspect.signature(PairPotential.__call__).parameters
    found = []
    for name in names:
        if isinstance(name, str):
            name = unicodedata.normalize("NFKC", name)
            if name in taken:
                raise ValueError(f"`{kind}`: a parameter cannot be called '{name}', which is an argument of the call")
        found.append(name)
    return tuple(found)


def check_distances(formula: Formula, cutoff: Any, r_switch: Any) -> tuple[float | None, float | None]:
    """Both distances as floats or None; raise if they are invalid, or if the formula needs one that is missing."""
    if cutoff is not None:
        cutoff = checks.check_positive("cutoff", cutoff)
    elif formula.shifted or formula.switched:
        raise ValueError("`cutoff` is needed: " + ("`r_switch`" if formula.switched else "`shifted`") + " refers to it")
    if r_switch is not None:
        r_switch = checks.check_positive("r_switch", r_switch)
        if r_switch >= cutoff:
            raise ValueError(f"`r_switch` = {r_switch} must be smaller than `cutoff` = {cutoff}")
    text = f"{formula.expression};{formula.self_energy}"
    for name, value in (("cutoff", cutoff), ("r_switch", r_switch)):
        if value is None and name in text and re.search(rf"\b{name}\b", text):
            raise ValueError(f"`{name}` is needed: the expression uses it")
    return cutoff, r_switch
