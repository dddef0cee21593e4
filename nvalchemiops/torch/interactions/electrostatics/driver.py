"""The driver of all Ewald sums: checks arguments once, chooses missing parameters, makes the terms and adds them up.

The long-range part is an argument: a `LongRange`, made of the arguments of a public function for the checked system.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from nvalchemiops.interactions.pair.expression import Formula
from nvalchemiops.interactions.pair.potentials import EWALD_REAL_SPACE, ewald_short_range
from nvalchemiops.torch import checks
from nvalchemiops.torch.distributed.collectives import has_shares_of_gradients
from nvalchemiops.torch.interactions.electrostatics.choice import (
    LongRange,
    check_accuracy,
    choose_splitting,
)
from nvalchemiops.torch.interactions.electrostatics.k_vectors import per_system
from nvalchemiops.torch.interactions.electrostatics.open_systems import (
    Part,
    all_pairs,
    by_parts,
    check_mixed,
    open_system,
    open_systems,
)
from nvalchemiops.torch.interactions.electrostatics.potentials import COULOMB, LongRangePotential, check_potential
from nvalchemiops.torch.interactions.electrostatics.results import (
    SumRequest,
    Tensors,
    Term,
    check_gradients,
)
from nvalchemiops.torch.interactions.electrostatics.sums import (
    body_of,
    evaluate,
    has_first_derivatives,
    one_or_several,
)
from nvalchemiops.torch.interactions.electrostatics.system import ChargedSystem, check_system, given_alpha, nan_unless
from nvalchemiops.torch.interactions.electrostatics.terms.exclusions import exclusion_term
from nvalchemiops.torch.interactions.electrostatics.terms.moments import BackgroundTerm, SelfTerm, SurfaceTerm
from nvalchemiops.torch.interactions.electrostatics.terms.pairs import PairTerm, self_term
from nvalchemiops.torch.interactions.electrostatics.terms.slab import SlabTerm
from nvalchemiops.torch.interactions.pair.shares import must_be_same, together
from nvalchemiops.torch.neighbors.rows import GivenNeighbors, Rows, rows_of
from nvalchemiops.torch.runtime import compiled, engine
from nvalchemiops.torch.runtime._torch_internals import only_inlined
from nvalchemiops.torch.runtime.context import may_read
from nvalchemiops.torch.systems import System


class SumOptions(NamedTuple):
    """Arguments that all Ewald sums have, as they were given; see `ewald_summation`."""

    alpha: Any
    accuracy: Any
    cutoff: Any
    potential: Any
    exclusions: Any
    exclusion_factors: Any
    slab_correction: Any
    self_interaction: Any = False
    surface_dielectric: Any = None


class EwaldSum(NamedTuple):
    """A sum of all terms, as the arguments of a public function describe it.

    Attributes
    ----------
    method : type
        The long-range part is ``method.given(*given, system)``.
    given : tuple
    atoms : System
    neighbors : GivenNeighbors
    request : SumRequest
    options : SumOptions
    """

    method: Any
    given: tuple[Any, ...]
    atoms: System
    neighbors: GivenNeighbors
    request: SumRequest
    options: SumOptions

    def shapes(self) -> list[Sequence[int]] | None:
        """The shapes of the results; None without a cell, where the sum is over all pairs."""
        atoms, request = self.atoms, self.request
        if atoms.cell is None:
            return None
        system = check_system(atoms._replace(pbc=None))
        check_gradients(request, atoms)
        n_atoms, *channels = atoms.charges.shape  # type: ignore[union-attr]  # it was checked
        forces, charge_gradients, virial = request.derivatives
        shapes: list[Sequence[int]] = [(n_atoms if request.energy_reduction == "atom" else system.n_systems, *channels)]
        shapes += [(n_atoms, 3)] * forces
        if charge_gradients:
            by_source = zip(((), (3,), (3, 3)), request.of_sources)
            shapes += [(n_atoms, *channels, *rest) for rest, is_asked in by_source if is_asked]
        return [*shapes, (system.n_systems, 3, 3)] if virial else shapes

    def along(self) -> Sequence[Any]:
        """By what first derivatives come with the energies."""
        atoms = self.atoms
        inputs = (atoms.positions, atoms.charges, atoms.dipoles, atoms.quadrupoles, atoms.cell)
        return inputs if has_first_derivatives(self.request) else ()


@functools.partial(only_inlined, with_calls=True)
def ewald_sum(asked: EwaldSum) -> Tensors:
    """The sum of all terms; over all pairs if there is no periodic axis."""
    atoms, options = asked.atoms, asked.options
    if torch.compiler.is_compiling() and isinstance(atoms.cell, torch.Tensor):
        if isinstance(options.alpha, float):  # a tensor, since each number would be another graph
            alpha = per_system("alpha", options.alpha, atoms.cell.reshape(-1, 3, 3).shape[0], atoms.cell.device)
            asked = asked._replace(options=options._replace(alpha=alpha))
        if asked.request.hybrid:
            fixed = atoms._replace(positions=atoms.positions.detach(), cell=atoms.cell.detach())
            asked = asked._replace(atoms=fixed)
    return one_or_several(_ewald_sum(asked))


@compiled.whole(EwaldSum.shapes, EwaldSum.along)
def _ewald_sum(asked: EwaldSum) -> tuple[torch.Tensor, ...]:
    method, given, atoms, neighbors, request, options = asked
    if atoms.pbc is not None:
        is_open = open_systems(atoms)
        if is_open is not None:
            return _with_open_systems(asked, is_open)
    is_constant = getattr(options.potential, "is_constant", False)
    if neighbors.neighbor_list is not None or neighbors.neighbor_matrix is not None:

        def terms_of(atoms: System, neighbors: GivenNeighbors) -> Prepared:
            return _terms(asked._replace(atoms=atoms, neighbors=neighbors))[:2]

        constants = (method.given, given, options) if is_constant else None
        return _sum("sum", terms_of, atoms, neighbors, request, constants, is_constant)
    terms, system, rows, chosen = _terms(asked)
    known = ("chosen", *chosen, options, request) if is_constant else engine.UNKNOWN
    return evaluate(terms, system, request, is_constant, rows, known)


Prepared = tuple[Sequence[Term], ChargedSystem]
"""Terms of a sum, and the system that was checked."""


def _sum(
    name: str,
    terms_of: Callable[[System, Any], Prepared],
    atoms: System,
    neighbors: Any,
    request: SumRequest,
    constants: tuple[Any, ...] | None,
    is_constant: bool,
) -> tuple[torch.Tensor, ...]:
    """The sum of terms, by a plan where it repeats; ``terms_of`` checks atoms and neighbors.

    ``constants`` are on what it depends beside these; None where that cannot be told.
    """

    def prepare(atoms: System, neighbors: Any) -> engine.Body:
        return body_of(*terms_of(atoms, neighbors), request, atoms)

    call = _described(name, prepare, atoms, neighbors, request, constants, is_constant)
    if call is not None:
        return engine.run(call)
    return evaluate(*terms_of(atoms, neighbors), request, is_constant)


def _constants(long_range_of: Any, potential: Any, *others: Any) -> tuple[Any, ...] | None:
    """What a plan of a sum depends on beside its system; None where that cannot be told."""
    if not isinstance(long_range_of, functools.partial) or not getattr(potential, "is_constant", False):
        return None
    return (long_range_of.func, long_range_of.args, *others)


SOURCES = ("charges", "dipoles", "quadrupoles")


def _described(
    name: str,
    prepare: Callable[[System, Any], engine.Body],
    atoms: System,
    neighbors: Any,
    request: SumRequest,
    options: tuple[Any, ...] | None,
    is_constant: bool,
) -> engine.Call | None:
    """The call of a sum, whose arguments are checked by ``prepare``; None if they are to be checked before.

    Neighbors are given, or none are needed.
    """
    if atoms.domain is not None or options is None:
        return None
    names: tuple[str, ...] = ("positions", "charges", "cell")
    inputs: Any = (atoms.positions, atoms.charges, atoms.cell)
    if atoms.dipoles is not None or atoms.quadrupoles is not None:
        names = ("positions", *[name for name in SOURCES if getattr(atoms, name) is not None], "cell")
        inputs = tuple([getattr(atoms, name) for name in names])
    for value in inputs:
        # what is wrong raises there
        if not isinstance(value, torch.Tensor) or value.dtype is not inputs[0].dtype or value.ndim == 0:
            return None
        if value is not inputs[-1] and value.shape[0] != inputs[0].shape[0]:
            return None
    cell = inputs[-1]
    if cell.ndim not in (2, 3) or cell.shape[-2:] != (3, 3):
        return None
    if request.hybrid:
        inputs = (inputs[0].detach(), *inputs[1:-1], cell.detach())

    def body(inputs: Sequence[torch.Tensor], near: Any) -> engine.Body:
        return prepare(atoms._replace(**dict(zip(names, inputs))), near)  # type: ignore[arg-type]  # fields by name

    return engine.Call(
        name,
        body,
        inputs,
        len(inputs) - 1,
        () if neighbors is None else neighbors,
        (atoms.batch_idx, atoms.pbc),
        (" ".join(names), request, atoms.widths, *options),
        along=is_constant and has_first_derivatives(request),
        batch_idx=atoms.batch_idx,
        n_systems=1 if cell.ndim == 2 else cell.shape[0],
        by_system=request.energy_reduction == "system",
    )


def _terms(asked: EwaldSum) -> tuple[list[Term], ChargedSystem, Rows, tuple[Any, ...]]:
    """The terms, the system, its neighbors, and what was chosen; raise unless the arguments fit together."""
    method, given, atoms, neighbors, request, options = asked
    alpha, accuracy, cutoff, potential, *others, self_interaction, surface_dielectric = options
    with together(atoms.domain):
        system = check_system(atoms, *others)
        check_gradients(request, atoms)
        keeps_gaussians = _keeps_gaussians(self_interaction, system)
        dielectric = check_dielectric(surface_dielectric)
        accuracy = check_accuracy(accuracy, system.positions)
        cutoff = None if cutoff is None else checks.check_positive("cutoff", cutoff)
        check_potential(potential)
        _check_coulomb(potential, system, dielectric)
        long_range: LongRange = method.given(*given, system)
        for name, is_given in (("`alpha`", alpha is not None), (long_range.argument, long_range.is_given)):
            if potential is not COULOMB and not is_given:
                raise ValueError(f"{name} is needed: parameters are estimated for the Coulomb potential only")
        if request.hybrid:
            system = system.at_fixed_geometry()
            alpha = alpha.detach() if isinstance(alpha, torch.Tensor) else alpha
        rows = None
        if system.domain is None:
            rows = rows_of(neighbors, system.positions, periodic=True)
        else:
            must_be_same(system.domain, request=request, method=long_range, **options._asdict())
            _check_trained(potential, system, alpha)
            alpha, cutoff = system.domain._splitting(system.positions, alpha, cutoff, neighbors)
    splitting = choose_splitting(system, long_range, alpha, cutoff, rows, accuracy)
    alpha = nan_unless(long_range.valid, nan_unless(system.valid, splitting.alpha))
    if not long_range.is_given:
        long_range = long_range.chosen(system, alpha, splitting.target)
    # the list of a domain goes further, by a skin
    pair_cutoff = None if system.domain is None else splitting.cutoff
    terms: list[Term] = [PairTerm(potential.short_range, alpha, splitting.rows, system.exclusions, pair_cutoff)]
    if not system.of_points:
        terms += _own_terms(system, alpha, keeps_gaussians)
    if system.slab_axes is not None:
        terms.append(SlabTerm())
    if dielectric is not None:
        terms.append(SurfaceTerm(dielectric))
    if system.exclusions is not None:
        terms.append(exclusion_term(potential, system, alpha))
    terms.append(long_range.term(system, potential, alpha))
    return terms, system, splitting.rows, (long_range, alpha)


def _with_open_systems(asked: EwaldSum, is_open: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The sum where these systems (n_systems,) are open, and the others periodic."""
    method, given, atoms, neighbors, request, options = asked
    check_gradients(request, atoms)
    n_systems = is_open.shape[0]
    if atoms.domain is not None:
        raise ValueError("`pbc` has three open axes: with a `domain` use coulomb_energy or dsf_coulomb with a cutoff")
    if options.potential is not COULOMB:
        raise ValueError("`pbc` has three open axes: sums over all pairs are for the Coulomb potential")

    excluded = options.exclusions, options.exclusion_factors
    numbers = {"alpha": options.alpha, "accuracy": options.accuracy, "cutoff": options.cutoff}
    check_mixed(atoms, is_open, neighbors, *excluded, **numbers, slab_correction=options.slab_correction)
    check_dielectric(options.surface_dielectric)

    def of(part: Part) -> SumOptions:
        pairs, factors = part.of_exclusions(*excluded)
        alpha = part.of_systems("alpha", options.alpha, n_systems)
        return options._replace(alpha=alpha, exclusions=pairs, exclusion_factors=factors)

    def periodic(part: Part, atoms: System) -> tuple[torch.Tensor, ...]:
        there = _of_systems(method, given, part, n_systems)
        return _ewald_sum(EwaldSum(method, there, atoms, part.of_neighbors(neighbors), request, of(part)))

    def over_all_pairs(part: Part, atoms: System) -> tuple[torch.Tensor, ...]:
        here = of(part)
        system = open_system(atoms, here.exclusions, here.exclusion_factors, part.systems.shape[0])
        keeps_gaussians = _keeps_gaussians(here.self_interaction, system)
        if request.hybrid:
            system = system.at_fixed_geometry()
        rows = all_pairs(system)
        alpha = torch.zeros(system.n_systems, dtype=torch.float64, device=system.positions.device)
        terms: list[Term] = [PairTerm(COULOMB.short_range, alpha, rows, system.exclusions)]
        if not system.of_points:
            terms.append(SelfTerm(alpha, keeps_gaussians))
        return evaluate(terms, system, request, is_constant=True)

    n_gradients = int(request.derivatives.forces) + sum(request.of_sources)
    of_systems = [request.energy_reduction == "system", *[False] * n_gradients, *[True] * request.derivatives.virial]
    results = by_parts((periodic, over_all_pairs), atoms, is_open, of_systems)
    if request.hybrid:
        return results
    energies, *others = results
    for value in (atoms.cell, options.alpha):
        # also where no system is periodic, energies have derivatives by these, of zero
        if isinstance(value, torch.Tensor) and value.requires_grad:
            energies = energies + value.reshape(-1)[:0].sum().to(energies)
    return (energies, *others)


def _of_systems(method: Any, given: tuple[Any, ...], part: Part, n_systems: int) -> tuple[Any, ...]:
    """Arguments of a long-range part of all systems, for those of a part."""
    if part.systems.shape[0] == n_systems:
        return given
    found = []
    for name, value in zip(inspect.signature(method.given).parameters, given):
        if name in ("k_cutoff", "mesh_spacing"):
            value = part.of_systems(name, value, n_systems)
        elif name == "k_vectors" and isinstance(value, torch.Tensor) and value.ndim == 3:
            if value.shape[0] != n_systems:
                raise ValueError(f"`k_vectors` must have shape ({n_systems}, n_k, 3), got {tuple(value.shape)}")
            value = value.index_select(0, part.systems)
        # what is prepared for a batch is a tuple of tensors
        elif isinstance(value, tuple) and any([isinstance(field, torch.Tensor) for field in value]):
            raise ValueError("`pbc` has three open axes: leave out what is prepared for all systems of the batch")
        found.append(value)
    return tuple(found)


def _own_terms(system: ChargedSystem, alpha: torch.Tensor, keeps_gaussians: bool) -> list[Term]:
    """Self energies of moments, and the background of Gaussians."""
    terms: list[Term] = [SelfTerm(alpha, keeps_gaussians)]
    if system.widths is not None:
        terms.append(BackgroundTerm())
    return terms


def _keeps_gaussians(self_interaction: Any, system: ChargedSystem) -> bool:
    """Whether Gaussians keep their self energy; raise for points, where it is infinite."""
    if not checks.check_flag("self_interaction", self_interaction):
        return False
    widths = system.widths
    with together(system.domain):
        if widths is None or (may_read(widths) and not bool((widths > 0.0).all())):
            raise ValueError("`self_interaction` is infinite for points: it needs positive `widths` of all atoms")
    return True


def check_dielectric(surface_dielectric: Any) -> float | None:
    """The dielectric constant of the surroundings; raise unless it is positive."""
    return None if surface_dielectric is None else checks.check_positive("surface_dielectric", surface_dielectric)


def _check_coulomb(potential: LongRangePotential, system: ChargedSystem, dielectric: float | None = None) -> None:
    """Raise for another potential with sources beside charges, or with a surface."""
    if potential is COULOMB:
        return
    if not system.of_points:
        raise ValueError("`dipoles`, `quadrupoles` and `widths` are for the Coulomb potential: leave `potential` out")
    if dielectric is not None:
        raise ValueError("`surface_dielectric` is for the Coulomb potential: leave `potential` out")


def _check_trained(potential: LongRangePotential, system: ChargedSystem, alpha: Any) -> None:
    """Raise if functions of a potential hold tensors by which a rank has its share of the gradient alone."""
    if system.domain is None or potential.is_constant or not torch.is_grad_enabled():
        return
    splitting = given_alpha(alpha, system).detach().unsqueeze(1)
    k2 = splitting.square()
    values = [potential.reciprocal(k2, splitting), potential.at_zero(splitting)]
    values += [] if potential.slope is None else [potential.slope(k2, splitting)]
    if any(map(has_shares_of_gradients, values)):
        raise ValueError(
            "`potential` holds a tensor that requires a gradient, of which each rank would have its share: with a "
            "`domain` let its functions use `domain.replicated(tensor)`, or detach it"
        )


def long_range_part(
    long_range_of: Callable[[ChargedSystem], LongRange],
    atoms: System,
    request: SumRequest,
    alpha: Any,
    potential: Any,
    self_interaction: Any = False,
) -> Tensors:
    """The long-range term and the self energies; arguments as of `ewald_sum`.

    With ``self_interaction`` and without widths, that of the long-range part is kept.
    """
    terms_of = functools.partial(_long_range_terms, long_range_of, request, alpha, potential, self_interaction)
    constants = _constants(long_range_of, potential, alpha, potential, self_interaction)
    is_constant = getattr(potential, "is_constant", False)
    return one_or_several(_sum("long-range part", terms_of, atoms, None, request, constants, is_constant))


def _long_range_terms(
    long_range_of: Callable[[ChargedSystem], LongRange],
    request: SumRequest,
    alpha: Any,
    potential: Any,
    self_interaction: Any,
    atoms: System,
    _: Any,
) -> Prepared:
    with together(atoms.domain):
        system = check_system(atoms)
        check_gradients(request, atoms)
        must_be_same(system.domain, request=request, alpha=alpha, potential=potential)
        if system.domain is not None and isinstance(alpha, torch.Tensor):
            alpha = system.domain.replicated(alpha)
        splitting = given_alpha(alpha, system)
        check_potential(potential)
        _check_coulomb(potential, system)
        _check_trained(potential, system, splitting)
        long_range = long_range_of(system)
        must_be_same(system.domain, method=long_range)
        if not long_range.is_given:
            raise ValueError(f"{long_range.argument} is needed")
        keeps_all = checks.check_flag("self_interaction", self_interaction) and system.widths is None
        has_moments = not system.of_points
        keeps_gaussians = has_moments and not keeps_all and _keeps_gaussians(self_interaction, system)
    if request.hybrid:
        system, splitting = system.at_fixed_geometry(), splitting.detach()
    splitting = nan_unless(long_range.valid, splitting)
    terms = [long_range.term(system, potential, splitting)]
    if has_moments and not keeps_all:
        terms += _own_terms(system, splitting, keeps_gaussians)
    elif not keeps_all:
        terms.append(self_term(potential, system, splitting))
    return terms, system


def short_range_part(atoms: System, neighbors: GivenNeighbors, request: SumRequest, alpha: Any, cutoff: Any) -> Tensors:
    """The sum over neighbors, without self energies; arguments as of `ewald_sum`."""
    terms_of = functools.partial(_short_range_terms, request, alpha, cutoff)
    is_listed = neighbors.neighbor_list is not None or neighbors.neighbor_matrix is not None
    constants = (alpha, cutoff) if is_listed else None
    return one_or_several(_sum("short-range part", terms_of, atoms, neighbors, request, constants, is_constant=False))


def _short_range_terms(
    request: SumRequest, alpha: Any, cutoff: Any, atoms: System, neighbors: GivenNeighbors
) -> Prepared:
    with together(atoms.domain):
        system = check_system(atoms)
        check_gradients(request, atoms)
        cutoff = None if cutoff is None else checks.check_positive("cutoff", cutoff)
        if isinstance(alpha, torch.Tensor):
            checks.check_real("alpha", alpha, system.positions)
        if system.domain is not None:
            must_be_same(system.domain, request=request)
            alpha, cutoff = system.domain._splitting(system.positions, alpha, cutoff, neighbors)
        splitting = given_alpha(alpha, system)
    if request.hybrid:
        system, splitting = system.at_fixed_geometry(), splitting.detach()
    rows = None if system.domain is not None else rows_of(neighbors, system.positions, periodic=True)
    if rows is None:
        if cutoff is None:
            raise ValueError("`neighbor_list` or `neighbor_matrix` is needed: without `cutoff` no list can be built")
        rows = system.rows_within(cutoff)
    return [PairTerm(_pairs_alone, splitting, rows, cutoff=cutoff)], system


def sum_of_parts(
    long_range_of: Callable[[ChargedSystem], LongRange],
    atoms: System,
    neighbors: GivenNeighbors,
    request: SumRequest,
    alpha: float,
    cutoff: float,
) -> tuple[torch.Tensor, ...]:
    """`short_range_part` with a ``cutoff``, plus `long_range_part`, of Coulomb's potential.

    Results do not depend on how far the list reaches beyond the cutoff.
    """
    parts: tuple[Callable[[System, Any], Prepared], ...] = (
        functools.partial(_short_range_terms, request, alpha, cutoff),
        functools.partial(_long_range_terms, long_range_of, request, alpha, COULOMB, False),
    )

    def prepare(atoms: System, neighbors: GivenNeighbors) -> engine.Body:
        near, far = [body_of(*terms_of(atoms, neighbors), request, atoms) for terms_of in parts]
        return lambda at, needed: tuple([one + other for one, other in zip(near(at, needed), far(at, needed))])

    options = _constants(long_range_of, COULOMB, alpha, cutoff)
    call = _described("sum of parts", prepare, atoms, neighbors, request, options, is_constant=False)
    if call is None:
        raise TypeError("positions, charges and cell must be tensors of one dtype")
    return engine.run(call)


def _pairs_alone(n_charges: int) -> Formula:
    """The short-range part without the self energy."""
    return EWALD_REAL_SPACE if n_charges == 1 else ewald_short_range(1, n_charges)._replace(self_energy="")


def given_neighbors(*values: Any) -> GivenNeighbors:
    """List or matrix as the public sums take them: the fields up to ``half_list``, in their order."""
    fields: Any = (*values, "neighbor_shifts", "mask_value")
    return GivenNeighbors(*fields)
