"""The driver of all Ewald sums: it checks arguments once, chooses missing parameters, and adds up the terms.

The long-range part is a `LongRange`, made from the arguments of a public function and the checked system.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nvalchemiops.interactions.pair.expression import Formula
from nvalchemiops.interactions.pair.potentials import EWALD_REAL_SPACE, ewald_short_range
from nvalchemiops.layout import layout
from nvalchemiops.torch import checks
from nvalchemiops.torch.distributed.collectives import has_shares_of_gradients
from nvalchemiops.torch.interactions.electrostatics.accuracy.choice import (
    LongRange,
    check_accuracy,
    choose_splitting,
    costs_of_call,
    sources_of,
)
from nvalchemiops.torch.interactions.electrostatics.k_vectors import WaveVectors, per_system
from nvalchemiops.torch.interactions.electrostatics.open_systems import all_pairs, by_kind, open_system, open_systems
from nvalchemiops.torch.interactions.electrostatics.potentials import (
    COULOMB,
    LongRangePotential,
    check_potential,
    is_coulomb,
)
from nvalchemiops.torch.interactions.electrostatics.results import EwaldSum, Term, check_gradients
from nvalchemiops.torch.interactions.electrostatics.slab_warnings import warn_of_slabs
from nvalchemiops.torch.interactions.electrostatics.sums import body_of, evaluate, one_or_several
from nvalchemiops.torch.interactions.electrostatics.system import ChargedSystem, check_system, given_alpha, nan_unless
from nvalchemiops.torch.interactions.electrostatics.terms.exclusions import ExclusionTerm
from nvalchemiops.torch.interactions.electrostatics.terms.moments import BackgroundTerm, SelfTerm, SurfaceTerm
from nvalchemiops.torch.interactions.electrostatics.terms.pairs import PairTerm, self_term
from nvalchemiops.torch.interactions.electrostatics.terms.reciprocal import KVectorSum
from nvalchemiops.torch.interactions.electrostatics.terms.slab import SlabTerm
from nvalchemiops.torch.interactions.pair import shares
from nvalchemiops.torch.neighbors.rows import Rows, is_listed, parts_of
from nvalchemiops.torch.runtime import compiled, engine
from nvalchemiops.torch.runtime._torch_internals import only_inlined
from nvalchemiops.torch.runtime.context import is_eager, may_read, on_host
from nvalchemiops.torch.runtime.recorder import read_number
from nvalchemiops.torch.types import Tensors


@functools.partial(only_inlined, with_calls=True)
def ewald_sum(asked: EwaldSum) -> Tensors:
    """The sum of all terms; over all pairs if there is no periodic axis."""
    asked = in_graph(asked.of_constants())
    with shares.whole_call(asked.atoms.domain):
        found = one_or_several(_ewald_sum(asked))
    warn_of_slabs(asked, ewald_sum)
    return found


@functools.partial(only_inlined, with_calls=True)
def in_graph(asked: EwaldSum) -> EwaldSum:
    """The sum with arguments that the op of compiled graphs takes."""
    atoms, options = asked.atoms, asked.options
    if not torch.compiler.is_compiling() or not isinstance(atoms.positions, torch.Tensor):
        return asked
    cell = atoms.cell
    if isinstance(options.alpha, float) and isinstance(cell, torch.Tensor) and cell.shape[-2:] == (3, 3):
        # a tensor: a graph would be compiled again for each number
        alpha = per_system("alpha", options.alpha, cell.reshape(-1, 3, 3).shape[0], cell.device)
        asked = asked._replace(options=options._replace(alpha=alpha))
    # a tensor, since the op of a CPU takes no lists, and the operations of a graph know no open systems
    if isinstance(atoms.pbc, (list, tuple)) and layout(atoms.positions.device.type).reads:
        asked = asked._replace(atoms=atoms._replace(pbc=checks.pbc_tensor(atoms.pbc)))
    return asked


@compiled.whole(EwaldSum.shapes, EwaldSum.along)
def _ewald_sum(asked: EwaldSum) -> tuple[torch.Tensor, ...]:
    asked = shares.of_lattice(asked)
    if asked.atoms.pbc is not None:
        # slabs without a wait for a GPU, where `Electrostatics` has waited if needed
        is_open = open_systems(asked.atoms, wait=asked.options.slab_correction is not True)
        if is_open is not None:
            return _with_open_systems(asked, is_open)
    if is_listed(asked.neighbors) and asked.options.alpha is not None:
        return _sum("sum", _terms, asked, asked.is_constant)
    # neighbors and alpha first, since they depend on positions; then the plan of the rest
    terms, system, rows, long_range, alpha = _terms(asked)
    # the last term holds what was chosen, and none of the tensors that have only led to the choice
    what = terms[-1] if long_range.choice is None else (alpha, long_range.choice)
    known: Any = ("chosen", what, asked.options, asked.request) if asked.is_constant else engine.UNKNOWN
    if _has_made_tensors(system, asked) and not layout(alpha.device.type).reads:
        known = "it depends on tensors that were made for this call, whose values are not read"
    near, first = rows, rows.first
    # of plans alone, as the engine has them: tracers know no places of memory
    has_pairs = is_listed(asked.neighbors) and first is not None and is_eager(first, under_modes=True)
    if has_pairs and parts_of(rows, asked.neighbors):
        # both rows of the list in one tensor, since lists of a plan share no memory; always as `Rows`, since the terms
        # hold these tensors: the plan must use them in place, and no copies of them
        near = rows._replace(neighbors=asked.neighbors.neighbor_list, first=None)
    chosen = (alpha, *long_range.tensors)
    return evaluate(terms, system, asked.request, asked.is_constant, near, known, chosen, long_range.choice)


def _has_made_tensors(system: ChargedSystem, asked: EwaldSum) -> bool:
    """Whether terms depend on more tensors than those given, the neighbors, and those of the long-range part."""
    made = (system.exclusions, system.slab_axes, system.widths)
    return any(part is not None for part in made) or system.batch_idx is not asked.atoms.batch_idx


Terms = Callable[[EwaldSum], tuple[Any, ...]]
"""A function that returns the terms of a sum, the checked system, and possibly more."""


def _sum(name: str, terms_of: Terms, asked: EwaldSum, along: bool) -> tuple[torch.Tensor, ...]:
    """The sum of terms, with a plan if the call repeats; ``along``: first derivatives may come with the energies."""

    def prepare(here: EwaldSum) -> engine.Body:
        terms, system, *_ = terms_of(here)
        return body_of(terms, system, here.request, here.atoms)

    call = _described(name, prepare, asked, along)
    if call is not None:
        return engine.run(call)
    with shares.whole_call(asked.atoms.domain):
        terms, system, *_ = terms_of(asked)
        return evaluate(terms, system, asked.request, along)


SOURCES = ("charges", "dipoles", "quadrupoles")


def _described(
    name: str, prepare: Callable[[EwaldSum], engine.Body], asked: EwaldSum, along: bool
) -> engine.Call | None:
    """The call of a sum whose arguments ``prepare`` checks; None if they must be checked beforehand.

    It is also None if neighbors are needed but not given.
    """
    method, given, atoms, neighbors, request, options = asked
    if atoms.domain is not None or not asked.is_constant or (neighbors and not is_listed(neighbors)):
        return None
    dtype = getattr(atoms.positions, "dtype", None)
    for changing in ("charges", "cell"):  # to one precision, as checks do
        value: Any = getattr(atoms, changing)
        if getattr(value, "dtype", dtype) is not dtype and dtype in checks.FLOATS and value.dtype in checks.FLOATS:
            atoms = atoms._replace(**{changing: value.to(dtype)})
    names: tuple[str, ...] = ("positions", "charges", "cell")
    inputs: Any = (atoms.positions, atoms.charges, atoms.cell)
    if atoms.dipoles is not None or atoms.quadrupoles is not None:
        names = ("positions", *[name for name in SOURCES if getattr(atoms, name) is not None], "cell")
        inputs = tuple([getattr(atoms, name) for name in names])
    for value in inputs:
        # None: the checks of the caller then raise
        if not isinstance(value, torch.Tensor) or value.dtype is not inputs[0].dtype or value.ndim == 0:
            return None
        if value is not inputs[-1] and value.shape[0] != inputs[0].shape[0]:
            return None
    cell = inputs[-1]
    if cell.ndim not in (2, 3) or cell.shape[-2:] != (3, 3):
        return None

    # pairs alone have no other options
    known: Any = options[:3] if method is None else (method.given, *given, *options)
    called = (" ".join(names), request, atoms.widths)

    def body(inputs: Sequence[torch.Tensor], near: Any, *vectors: torch.Tensor) -> engine.Body:
        here: Any = dict(zip(names, inputs))
        changed: Any = {"given": (None, None, None, WaveVectors(*vectors))} if vectors else {}
        return prepare(asked._replace(atoms=atoms._replace(**here), neighbors=near, **changed))

    def in_general(call: engine.Call) -> engine.Call | None:
        cells, call = cell.detach().reshape(-1, 3, 3), call._replace(n_moving=len(inputs))
        if method is None:
            return call
        if (vectors := method.for_all_cells(cells, *given)) is None:
            return None
        return call._replace(options=(*called, method.given, *options), prepared=vectors) if vectors else call

    return engine.Call(
        name,
        body,
        inputs,
        len(inputs) - 1,
        neighbors,
        (atoms.batch_idx, atoms.pbc),
        (*called, *known),
        in_general=in_general,
        along=along and request.has_first_derivatives,
        batch_idx=atoms.batch_idx,
        n_systems=1 if cell.ndim == 2 else cell.shape[0],
        by_system=request.energy_reduction == "system",
    )


def long_range_of(asked: EwaldSum, system: ChargedSystem) -> LongRange:
    """The long-range part that is given, or still to be chosen."""
    if not system.n_systems:  # nothing to choose, and no libraries transform an empty batch of meshes
        return KVectorSum.given(None, 1.0, None, None, system)
    found: LongRange = asked.method.given(*asked.given, system)
    return found


def check_split(asked: EwaldSum, system: ChargedSystem, **same: Any) -> tuple[Any, float | None, Rows | None, float]:
    """The given alpha, cutoff, neighbors and accuracy, checked; with a domain, ``same`` must agree on all ranks."""
    alpha, accuracy, cutoff = asked.options[:3]
    accuracy = check_accuracy(accuracy, system.positions)
    cutoff = None if cutoff is None else checks.check_positive("cutoff", cutoff)
    # exclusions, which may be many, were compared when they were checked
    options = {name: value for name, value in asked.options._asdict().items() if not name.startswith("exclusion")}
    shares.must_be_same(system.domain, **options, **same)
    rows, cutoff, alpha = system.given_rows(cutoff, asked.neighbors, alpha)
    return alpha, cutoff, None if system.domain is not None else rows, accuracy


def split(
    system: ChargedSystem, long_range: LongRange, *given: Any
) -> tuple[LongRange, torch.Tensor, Rows, float | None]:
    """The long-range part with all parameters, alpha, neighbors and cutoff; ``given`` comes from `check_split`."""
    alpha, cutoff, rows, accuracy = given
    if alpha is None and not system.n_systems:
        alpha = torch.zeros(0, dtype=torch.float64, device=system.positions.device)
    sources = sources_of(system) if alpha is None else (None, None)
    long_range = long_range.suited(accuracy, costs_of_call(system, rows, cutoff), sources[0])
    found = choose_splitting(system, long_range, alpha, cutoff, rows, accuracy, sources)
    alpha = nan_unless(long_range.valid, nan_unless(system.valid, found.alpha))
    if not long_range.is_given:
        long_range = long_range.chosen(system, found._replace(alpha=alpha))
    # the list of a domain reaches to cutoff + skin
    return long_range, alpha, found.rows, None if system.domain is None else found.cutoff


def _terms(asked: EwaldSum) -> tuple[list[Term], ChargedSystem, Rows, LongRange, torch.Tensor]:
    """The terms, the system, its neighbors, and the chosen parameters; raise unless the arguments fit together."""
    request, options = asked.request, asked.options
    potential = options.potential
    with shares.together(asked.atoms.domain):
        check_potential(potential)
        excluded = options.exclusions, options.exclusion_factors
        system = check_system(asked.atoms, *excluded, options.slab_correction, is_coulomb(potential))
        check_gradients(request, asked.atoms)
        keeps_gaussians = _keeps_gaussians(options.self_interaction, system)
        dielectric = check_dielectric(options.surface_dielectric)
        system = _check_coulomb(potential, system, dielectric)
        long_range = long_range_of(asked, system)
        for name, is_given in (("`alpha`", options.alpha is not None), (long_range.argument, long_range.is_given)):
            if not is_given and not is_coulomb(potential):
                raise ValueError(f"{name} is needed: parameters are estimated for the Coulomb potential only")
        _check_trained(potential, system, options.alpha)
        given = check_split(asked, system, request=request, method=long_range)
    long_range, alpha, rows, cutoff = split(system, long_range, *given)
    terms: list[Term] = [PairTerm(potential.short_range, alpha, rows, system.exclusions, cutoff)]
    if not system.of_points:
        terms += _own_terms(system, alpha, keeps_gaussians)
    if system.slab_axes is not None:
        terms.append(SlabTerm())
    if dielectric is not None:
        terms.append(SurfaceTerm(dielectric))
    if system.exclusions is not None:
        terms.append(ExclusionTerm(potential, alpha))
    terms.append(long_range.term(system, potential, alpha))
    return terms, system, rows, long_range, alpha


def _with_open_systems(asked: EwaldSum, is_open: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The sum of a batch in which the systems marked by ``is_open`` (n_systems,) are open, the others periodic."""
    atoms, request, options = asked.atoms, asked.request, asked.options
    check_gradients(request, atoms)
    if atoms.domain is not None:
        raise ValueError("`pbc` has three open axes: with a `domain` use coulomb_energy or dsf_coulomb with a cutoff")
    if not is_coulomb(options.potential):
        raise ValueError("`pbc` has three open axes: sums over all pairs are for the Coulomb potential")
    check_dielectric(options.surface_dielectric)
    n_gradients = int(request.derivatives.forces) + sum(request.of_sources)
    of_systems = [request.energy_reduction == "system", *[False] * n_gradients, *[True] * request.derivatives.virial]
    results = by_kind(asked, is_open, (lambda here, _: _ewald_sum(here), _over_all_pairs), of_systems)
    if request.hybrid:
        return results
    energies, *others = results
    for value in (atoms.cell, options.alpha):
        # even if no system is periodic, energies have derivatives with respect to these tensors: zeros
        if isinstance(value, torch.Tensor) and value.requires_grad:
            energies = energies + value.reshape(-1)[:0].sum().to(energies)
    return (energies, *others)


def _over_all_pairs(asked: EwaldSum, n_systems: int) -> tuple[torch.Tensor, ...]:
    """The sum of a batch in which all systems are open."""
    options = asked.options
    system = open_system(asked.atoms, options.exclusions, options.exclusion_factors, n_systems)
    keeps_gaussians = _keeps_gaussians(options.self_interaction, system)
    rows = all_pairs(system)
    alpha = torch.zeros(system.n_systems, dtype=torch.float64, device=system.positions.device)
    terms: list[Term] = [PairTerm(COULOMB.short_range, alpha, rows, system.exclusions)]
    if not system.of_points:
        terms.append(SelfTerm(alpha, keeps_gaussians))
    return evaluate(terms, system, asked.request, is_constant=True)


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
    with shares.together(system.domain):
        if widths is None or (may_read(widths) and not read_number((widths > 0.0).all())):
            raise ValueError(
                "`self_interaction` is infinite for points: it needs positive `widths` of all atoms; with points among "
                "Gaussians leave it out, and add q²/(2 sqrt(pi) width) for these, as a hardness 1/(sqrt(pi) width)"
            )
    return True


def check_dielectric(surface_dielectric: Any) -> float | None:
    """The dielectric constant of the surroundings; raise unless it is positive."""
    return None if surface_dielectric is None else checks.check_positive("surface_dielectric", surface_dielectric)


def _check_coulomb(
    potential: LongRangePotential, system: ChargedSystem, dielectric: float | None = None
) -> ChargedSystem:
    """Raise if a potential other than Coulomb's is combined with sources besides charges, a slab or a surface.

    Return the system, without the correction of slabs if all systems are known to be periodic: it is zero for them.
    """
    if system.slab_axes is not None and may_read(system.slab_axes) and on_host(system.slab_axes).all():
        system = system._replace(slab_axes=None)
    if is_coulomb(potential):
        return system
    if not system.of_points:
        raise ValueError("`dipoles`, `quadrupoles` and `widths` are for the Coulomb potential: leave `potential` out")
    if dielectric is not None:
        raise ValueError("`surface_dielectric` is for the Coulomb potential: leave `potential` out")
    if system.slab_axes is None:
        return system
    return system._replace(slab_axes=None, valid=system.slab_axes.all(1))  # where values can be read, all are periodic


def _check_trained(potential: LongRangePotential, system: ChargedSystem, alpha: Any) -> None:
    """Raise if functions of a potential hold tensors whose gradients on each rank would be incomplete."""
    if system.domain is None or potential.is_constant or not torch.is_grad_enabled():
        return
    splitting = given_alpha(alpha, system).detach().unsqueeze(1)
    k2 = splitting.square()
    values = [potential.reciprocal(k2, splitting), potential.at_zero(splitting)]
    values += [] if potential.slope is None else [potential.slope(k2, splitting)]
    if any(map(has_shares_of_gradients, values)):
        raise ValueError(
            "`potential` holds a tensor that requires a gradient, and each rank would have only a share of this "
            "gradient: with a `domain` let its functions use `domain.replicated(tensor)`, or detach it"
        )


def long_range_part(asked: EwaldSum) -> Tensors:
    """The long-range term and the self energies.

    With ``self_interaction`` and without widths, the self energy of the long-range part is kept.
    """
    return one_or_several(_sum("long-range part", _long_range_terms, asked.of_constants(), asked.is_constant))


def _long_range_terms(asked: EwaldSum) -> tuple[list[Term], ChargedSystem]:
    request, options = asked.request, asked.options
    alpha, potential, self_interaction = options.alpha, options.potential, options.self_interaction
    with shares.together(asked.atoms.domain):
        system = check_system(asked.atoms)
        check_gradients(request, asked.atoms)
        shares.must_be_same(system.domain, request=request, alpha=alpha, potential=potential)
        alpha = shares.replicated(system.domain, alpha)
        splitting = given_alpha(alpha, system)
        check_potential(potential)
        system = _check_coulomb(potential, system)
        _check_trained(potential, system, splitting)
        long_range = long_range_of(asked, system)
        shares.must_be_same(system.domain, method=long_range)
        if not long_range.is_given:
            raise ValueError(f"{long_range.argument} is needed")
        keeps_all = checks.check_flag("self_interaction", self_interaction) and system.widths is None
        keeps_gaussians = not (keeps_all or system.of_points) and _keeps_gaussians(self_interaction, system)
    splitting = nan_unless(long_range.valid, splitting)
    own: list[Term] = []
    if not keeps_all:
        of_points = system.of_points
        own = [self_term(potential, system, splitting)] if of_points else _own_terms(system, splitting, keeps_gaussians)
    return [*own, long_range.term(system, potential, splitting)], system


def short_range_part(asked: EwaldSum) -> Tensors:
    """The sum over neighbors, without self energies."""
    return one_or_several(_sum("short-range part", _short_range_terms, asked.of_constants(), False))


def _short_range_terms(asked: EwaldSum) -> tuple[list[Term], ChargedSystem]:
    request, alpha, cutoff = asked.request, asked.options.alpha, asked.options.cutoff
    with shares.together(asked.atoms.domain):
        system = check_system(asked.atoms)
        check_gradients(request, asked.atoms)
        cutoff = None if cutoff is None else checks.check_positive("cutoff", cutoff)
        shares.must_be_same(system.domain, request=request)
        rows, cutoff, alpha = system.given_rows(cutoff, asked.neighbors, alpha)
        splitting = given_alpha(alpha, system)
    if rows is None:
        if cutoff is None:
            raise ValueError("`neighbor_list` or `neighbor_matrix` is needed: without `cutoff` no list can be built")
        rows = system.rows_within(cutoff)
    return [PairTerm(_pairs_alone, splitting, rows, cutoff=cutoff)], system


def sum_of_parts(asked: EwaldSum) -> tuple[torch.Tensor, ...]:
    """`short_range_part` with a cutoff, plus `long_range_part`.

    Results do not depend on how far the list reaches beyond the cutoff.
    """

    def prepare(here: EwaldSum) -> engine.Body:
        near, far = [body_of(*of(here), here.request, here.atoms) for of in (_short_range_terms, _long_range_terms)]
        return lambda at, needed: tuple([one + other for one, other in zip(near(at, needed), far(at, needed))])

    call = _described("sum of parts", prepare, asked, along=False)
    if call is None:
        raise TypeError("positions, charges and cell must be tensors of one dtype")
    return engine.run(call)


def _pairs_alone(n_charges: int) -> Formula:
    """The short-range part without the self energy."""
    return EWALD_REAL_SPACE if n_charges == 1 else ewald_short_range(1, n_charges)._replace(self_energy="")
