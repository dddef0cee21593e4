"""The electrostatic potential at atoms and its derivatives, averaged over Gaussians: features for models.

A receiver of standard deviation s at atom i has the potential ``∫ φ(x) g_s(x - x_i) dx``; derivatives are taken with
respect to x_i. A source of width s_j therefore acts on it through ``erf(a r)/r`` with ``a = 1/√(2 (s² + s_j²))``. This
function is split as in Ewald's sum: the long-range part ``erf(α r)/r`` is the same for all receivers and evaluated
once; the short-range part is a sum over pairs for each receiver.

The long-range part includes the potential of the atom itself, which is subtracted. For moments (q, μ, Q) and with
``b_n = 2a/√π (2a²)^n / (2n + 1)`` at a = α, this potential is ``b_0 q``, its gradient ``b_1 μ``, and its second
derivatives are ``b_2 Q - b_1 q``. In a periodic system the average potential is zero. In a charged cell Gaussians
therefore have a larger potential than points, by ``2π/V Σ_j q_j (s² + s_j²)``
(`nvalchemiops.torch.interactions.electrostatics.terms.moments`).

Exclusions, slabs and surfaces add the gradients of their energies with respect to charges, dipoles and quadrupoles,
which are the potential at a point and its derivatives. The potential of the slab correction is a polynomial of second
order along the normal: its average over a Gaussian is larger by ``s²/2`` times its second derivative.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nvalchemiops.interactions.pair.expression import Formula
from nvalchemiops.interactions.pair.potentials import moment_interaction, moment_short_range
from nvalchemiops.kernels.moments import count
from nvalchemiops.notices import NvalchemiopsWarning, notify
from nvalchemiops.torch import checks
from nvalchemiops.torch.autograd.functorch import is_differentiated
from nvalchemiops.torch.interactions.electrostatics.driver import (
    check_dielectric,
    check_split,
    ewald_sum,
    in_graph,
    long_range_of,
    split,
)
from nvalchemiops.torch.interactions.electrostatics.open_systems import all_pairs, by_kind, open_system, open_systems
from nvalchemiops.torch.interactions.electrostatics.potentials import COULOMB
from nvalchemiops.torch.interactions.electrostatics.results import Derivatives, EwaldSum, SumOptions, SumRequest, Term
from nvalchemiops.torch.interactions.electrostatics.slab_warnings import warn_of_slabs
from nvalchemiops.torch.interactions.electrostatics.sources import nan_unless_allowed
from nvalchemiops.torch.interactions.electrostatics.system import ChargedSystem, check_system, nan_unless
from nvalchemiops.torch.interactions.electrostatics.terms.exclusions import ExclusionTerm
from nvalchemiops.torch.interactions.electrostatics.terms.mesh import MeshSum, Precomputed
from nvalchemiops.torch.interactions.electrostatics.terms.moments import (
    SurfaceTerm,
    background_potential,
    second_moments,
    self_potentials,
    squared,
)
from nvalchemiops.torch.interactions.electrostatics.terms.reciprocal import KVectorSum
from nvalchemiops.torch.interactions.electrostatics.terms.slab import SlabTerm
from nvalchemiops.torch.interactions.pair import shares
from nvalchemiops.torch.interactions.pair.moments import gather_moments
from nvalchemiops.torch.interactions.pair.system import PairSystem
from nvalchemiops.torch.neighbors.rows import GivenNeighbors, Rows, is_listed, rows_of
from nvalchemiops.torch.operators.segments import spread_systems
from nvalchemiops.torch.runtime import compiled, engine
from nvalchemiops.torch.runtime._torch_internals import named_in_files
from nvalchemiops.torch.runtime.context import ValuesNeededError, may_read
from nvalchemiops.torch.runtime.recorder import read_number
from nvalchemiops.torch.systems import System
from nvalchemiops.torch.types import Pbc

if TYPE_CHECKING:
    from nvalchemiops.torch.distributed.domain import Domain
    from nvalchemiops.torch.distributed.pairs import OwnedPairs


@named_in_files
class Potentials(NamedTuple):
    """Potentials at atoms, for each receiver, with channels if the charges have channels.

    Attributes
    ----------
    potential : (n_atoms, n_receivers[, n_channels]) tensor
    gradient : (n_atoms, n_receivers[, n_channels], 3) tensor or None
        Minus the electric field.
    second : (n_atoms, n_receivers[, n_channels], 3, 3) tensor or None
        Second derivatives: minus the gradient of the electric field.
    """

    potential: torch.Tensor
    gradient: torch.Tensor | None = None
    second: torch.Tensor | None = None


def electrostatic_potential(
    positions: torch.Tensor,
    charges: torch.Tensor,
    cell: torch.Tensor | None = None,
    batch_idx: torch.Tensor | None = None,
    *,
    dipoles: torch.Tensor | None = None,
    quadrupoles: torch.Tensor | None = None,
    widths: float | torch.Tensor | None = None,
    receiver_widths: Sequence[float] | torch.Tensor | None = None,
    derivatives: int = 1,
    self_interaction: bool = False,
    method: str = "ewald",
    alpha: float | torch.Tensor | None = None,
    k_cutoff: float | torch.Tensor | None = None,
    mesh_dimensions: Any = None,
    spline_order: int | None = None,
    accuracy: float = 1e-6,
    cutoff: float | None = None,
    neighbor_list: torch.Tensor | None = None,
    neighbor_ptr: torch.Tensor | None = None,
    neighbor_shifts: torch.Tensor | None = None,
    neighbor_matrix: torch.Tensor | None = None,
    neighbor_matrix_shifts: torch.Tensor | None = None,
    mask_value: int | None = None,
    half_list: bool = False,
    pbc: Pbc | None = None,
    slab_correction: bool = False,
    surface_dielectric: float | None = None,
    exclusions: "torch.Tensor | OwnedPairs | None" = None,
    exclusion_factors: torch.Tensor | None = None,
    domain: "Domain | None" = None,
    miller_indices: torch.Tensor | None = None,
) -> Potentials:
    """Potential, gradient and second derivatives at all atoms, averaged over Gaussian receivers.

    Parameters
    ----------
    positions : (n_atoms, 3) tensor, float32 or float64, length
    charges : (n_atoms,) or (n_atoms, n_channels) tensor, charge
    cell : (3, 3) or (n_systems, 3, 3) tensor, length, optional
        Periodic along all vectors. Without a cell the systems are open, and pairs are summed directly.
    batch_idx : (n_atoms,) int32 tensor, optional
        System of each atom, in any order.
    dipoles, quadrupoles, widths
        Other sources, as for `ewald_summation`.
    receiver_widths : sequence of float or (n_receivers,) tensor, length, optional
        Standard deviations of Gaussian receivers, zero for points; tensors in a sequence may be trained. By default
        there is one receiver, with the width of the source of each atom: then ``(q φ + μ·∇φ + Q:∇∇φ/2) / 2`` is the
        energy of the atom.
    derivatives : {0, 1, 2}, optional
        Highest derivative of the potential to return.
    self_interaction : bool, optional
        Include the potential that the source of an atom has at the atom itself. Needs positive widths of sources or
        receivers.
    method : {"ewald", "pme"}, optional
        Method for the long-range part of periodic systems.
    alpha, k_cutoff, mesh_dimensions, spline_order, accuracy
        As for `ewald_summation` and `particle_mesh_ewald`; those of the other method are not used, with a warning. The
        spline order must exceed ``derivatives`` by at least two; for a given mesh it is 6 by default.
    cutoff : float, length, optional
        Reach of the list. Open systems by default have no cutoff: all pairs are summed.
    neighbor_list, neighbor_ptr, neighbor_shifts, neighbor_matrix, neighbor_matrix_shifts, mask_value, half_list
        As for `ewald_summation`.
    pbc, slab_correction, surface_dielectric
        As for `ewald_summation`: the potential is the gradient of the energy with these terms. They need a ``cell``,
        unless no axis is periodic: in systems without a periodic axis all pairs are summed. Exported programs and
        compiled graphs on a GPU give NaN there.
    exclusions, exclusion_factors
        As for `ewald_summation`: pairs of atoms whose nearest images do not interact, or are scaled by a factor.
    domain : Domain, optional
        The system is divided among ranks, as for `ewald_summation`. Open systems then need a ``cutoff``.
    miller_indices : (n_k, 3) int tensor or WaveVectors, optional
        With ``method="ewald"``, instead of ``k_cutoff``: as for `ewald_summation`, also from `prepare_wave_vectors`.

    Returns
    -------
    Potentials
        In the dtype of the positions. Differentiable in positions, sources, widths of receivers, cell and alpha: to any
        order, or on a mesh as often as the splines are.

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message.
    """
    if derivatives not in (0, 1, 2):
        raise ValueError(f"`derivatives` must be 0, 1 or 2, got {derivatives!r}")
    method = checks.as_choice("method", method, ("ewald", "pme"))
    if miller_indices is not None and method == "pme":
        raise ValueError("`miller_indices` are for `method='ewald'`: a mesh has none")
    of_mesh = {"mesh_dimensions": mesh_dimensions, "spline_order": spline_order}
    for name, value in (of_mesh if method == "ewald" else {"k_cutoff": k_cutoff}).items():
        if value is not None and may_read():
            notify(f"`{name}` is not used: it is not for `method={method!r}`", NvalchemiopsWarning)
    near = neighbor_list, neighbor_ptr, neighbor_shifts, neighbor_matrix, neighbor_matrix_shifts, mask_value, half_list
    neighbors = GivenNeighbors(*near, fill_name="mask_value")
    whole = slab_correction, self_interaction, check_dielectric(surface_dielectric)
    options = SumOptions(alpha, accuracy, cutoff, COULOMB, exclusions, exclusion_factors, *whole)
    atoms = System(positions, charges, cell, batch_idx, pbc, None, domain, dipoles, quadrupoles, widths)
    order = ORDER_OF_POTENTIALS if spline_order is None and mesh_dimensions is not None else spline_order
    mesh, vectors = (mesh_dimensions, None, order, Precomputed(), None), (None, k_cutoff, None, miller_indices)
    kind, given = (MeshSum, mesh) if method == "pme" else (KVectorSum, vectors)
    asked = EwaldSum(kind, given, atoms, neighbors, ENERGIES, options)
    found = Potentials(*_of_systems(in_graph(asked), _Seen(_together(receiver_widths), derivatives)))
    warn_of_slabs(asked, ewald_sum)
    return found


ENERGIES = SumRequest(Derivatives(), "atom")

ORDER_OF_POTENTIALS = 6
"""The order of splines on a given mesh, smoother than for energies: second derivatives are interpolated, too."""


class _Seen(NamedTuple):
    """Widths of receivers, and the number of derivatives of the potential."""

    receiver_widths: Any
    derivatives: int


def _shapes(asked: EwaldSum, seen: _Seen) -> list[tuple[Sequence[int], torch.dtype]] | None:
    """Of the results; None where no system can be open, and nothing is to be chosen: such a call is traced."""
    atoms, (widths, derivatives) = asked.atoms, seen
    if atoms.cell is not None and atoms.pbc is None and not _chooses(asked):
        return None
    if isinstance(widths, torch.Tensor) and widths.ndim == 1:
        n_receivers = widths.shape[0]
    elif widths is None or isinstance(widths, tuple):
        n_receivers = 1 if widths is None else len(widths)
    else:
        return None  # the checks raise
    is_open: Any = False
    found = asked._replace(atoms=atoms._replace(pbc=is_open) if atoms.pbc is None else atoms).shapes()
    assert found is not None
    ((n_atoms, *channels), _), *_ = found
    return [((n_atoms, n_receivers, *channels, *(3,) * n), atoms.positions.dtype) for n in range(derivatives + 1)]


def _chooses(asked: EwaldSum) -> bool:
    """Whether the reach of the list, k-vectors or a mesh are chosen, which no graph can do."""
    long_range = asked.given[:1] if asked.method is MeshSum else asked.given
    is_given = any([value is not None for value in long_range])
    is_near = asked.options.alpha is not None and is_listed(asked.neighbors)
    return not is_given or not (is_near or asked.options.cutoff is not None)


@compiled.whole(_shapes)
def _of_systems(asked: EwaldSum, seen: _Seen) -> tuple[torch.Tensor, ...]:
    """The potentials in any systems."""
    asked = shares.of_lattice(asked)
    is_open = None if asked.atoms.domain is not None else open_systems(asked.atoms)
    if is_open is None:
        return _of_one_kind(asked, seen)

    def over_all_pairs(here: EwaldSum, _: int) -> tuple[torch.Tensor, ...]:
        system = here.atoms._replace(cell=None, pbc=None)
        alone = here.options._replace(alpha=None, cutoff=None, slab_correction=None, surface_dielectric=None)
        return _of_one_kind(here._replace(atoms=system, neighbors=GivenNeighbors(), options=alone), seen)

    return by_kind(asked, is_open, (lambda here, _: _of_one_kind(here, seen), over_all_pairs))


def _run(
    name: str,
    evaluate: Callable[..., tuple[torch.Tensor, ...]],
    atoms: System,
    neighbors: Any,
    options: tuple[Any, ...] | str,
    **moving: Any,
) -> tuple[torch.Tensor, ...]:
    """`engine.run_function` for these atoms."""
    moving = {key: getattr(atoms, key) for key in ("positions", "charges", "dipoles", "quadrupoles")} | moving
    fixed = {key: getattr(atoms, key) for key in ("cell", "batch_idx", "pbc", "widths")}
    return engine.run_function(name, evaluate, moving, neighbors, fixed, options)


def _of_one_kind(asked: EwaldSum, seen: _Seen) -> tuple[torch.Tensor, ...]:
    """The potentials in systems that are all periodic, or all without a cell."""
    atoms, options = asked.atoms, asked.options

    def evaluate(near: GivenNeighbors, /, alpha: Any, **values: Any) -> tuple[torch.Tensor, ...]:
        here = asked._replace(atoms=atoms._replace(**values), neighbors=near, options=options._replace(alpha=alpha))
        return _at_atoms(here, *seen)

    known: tuple[Any, ...] | str = (asked.method.__name__, asked.given, options._replace(alpha=None), seen)
    if atoms.domain is not None:
        known = "ranks share it"
    elif not is_listed(asked.neighbors):
        known = "it searches for neighbors"
    with shares.whole_call(atoms.domain):
        return _run("potential at atoms", evaluate, atoms, asked.neighbors, known, alpha=options.alpha)


def _at_atoms(asked: EwaldSum, receiver_widths: Any, derivatives: int) -> tuple[torch.Tensor, ...]:
    """The potentials of `_of_one_kind`, without a plan."""
    atoms, options, domain = asked.atoms, asked.options, asked.atoms.domain
    excluded, dielectric = (options.exclusions, options.exclusion_factors), options.surface_dielectric
    if atoms.cell is None:
        needs_cell = {"slab_correction": options.slab_correction or None, "surface_dielectric": dielectric}
        for name, value in {"pbc": atoms.pbc, **needs_cell}.items():
            if value is not None:
                unread = name == "pbc" and value is not True and not may_read(atoms.positions)  # it might be False
                raise (ValuesNeededError if unread else ValueError)(f"`{name}` needs a `cell`")
        with shares.together(domain):
            system = open_system(atoms, *excluded)._replace(of_points=False)
            shares.must_be_same(domain, derivatives=derivatives)
            receivers = _receivers(receiver_widths, system, options.self_interaction)
            rows, reach = _rows_of_open(asked.neighbors, options.cutoff, system)
        parts = [
            _of_pairs(system, rows, None, receiver, derivatives, reach)
            + _own_part(system, None, receiver, derivatives, options.self_interaction)
            for receiver in receivers
        ]
        return _potentials(parts, system, derivatives)
    with shares.together(domain):
        system = check_system(atoms, *excluded, options.slab_correction)._replace(of_points=False)
        receivers = _receivers(receiver_widths, system, options.self_interaction)
        long_range = long_range_of(asked, system)
        given = check_split(asked, system, method=long_range, derivatives=derivatives)
    long_range, alpha, rows, reach = split(_widest(system, receivers), long_range, *given)
    far = _of_term(long_range.term(_padded(system, derivatives), COULOMB, alpha), system, derivatives)
    if system.exclusions is not None:
        far = far + _of_exclusions(system, alpha, derivatives)
    if dielectric is not None:
        far = far + _of_term(SurfaceTerm(dielectric), system, derivatives)
    parts = []
    for receiver in receivers:
        near = _of_pairs(system, rows, alpha, receiver, derivatives, reach)
        own = _own_part(system, alpha, receiver, derivatives, options.self_interaction)
        own = own + _background(system, receiver, derivatives)
        if system.slab_axes is not None:
            own = own + _of_slab(system, receiver, derivatives)
        parts.append(far + near + own)
    return _potentials(parts, system, derivatives)


def reciprocal_potential(
    positions: torch.Tensor,
    charges: torch.Tensor,
    cell: torch.Tensor,
    batch_idx: torch.Tensor | None = None,
    *,
    dipoles: torch.Tensor | None = None,
    quadrupoles: torch.Tensor | None = None,
    widths: float,
    receiver_widths: Sequence[float],
    k_cutoff: float | torch.Tensor | None = None,
    k_vectors: torch.Tensor | None = None,
    derivatives: int = 1,
    self_interaction: bool = False,
) -> Potentials:
    """`electrostatic_potential` from k-vectors alone, for sources of equal width: each receiver then has one alpha."""
    atoms = System(positions, charges, cell, batch_idx, None, None, None, dipoles, quadrupoles, widths)
    seen = tuple(receiver_widths) if isinstance(receiver_widths, list) else receiver_widths

    def evaluate(_: Any, **values: Any) -> tuple[torch.Tensor, ...]:
        system = check_system(atoms._replace(**values))._replace(of_points=False)
        long_range = KVectorSum.given(k_vectors, k_cutoff, None, None, system)
        if not long_range.is_given:
            raise ValueError("`k_cutoff` or `k_vectors` is needed")
        parts = []
        for receiver, number in zip(_receivers(seen, system, True), seen):
            inverse = 1.0 / math.sqrt(2.0 * (number**2 + widths**2))
            alpha = torch.full((system.n_systems,), inverse, dtype=torch.float64, device=system.positions.device)
            term = long_range.term(_padded(system, derivatives), COULOMB, nan_unless(long_range.valid, alpha))
            found = _of_term(term, system, derivatives) + _background(system, receiver, derivatives)
            if not self_interaction:
                own = spread_systems(alpha, system.batch_idx, system.n_atoms)
                found = found - _own_potential(system, own, derivatives)
            parts.append(found)
        return _potentials(parts, system, derivatives)

    options = (seen, k_cutoff, k_vectors, derivatives, self_interaction)
    return Potentials(*_run("potential by k-vectors", evaluate, atoms, (), options))


# -- arguments -------------------------------------------------------------------------------------


def _together(widths: Any) -> Any:
    """Widths of receivers: a tuple of numbers, or one tensor if some are tensors that are trained or cannot be read."""
    if not isinstance(widths, (list, tuple)):
        return widths
    tensors = [value for value in widths if isinstance(value, torch.Tensor)]
    if all(not is_differentiated(value) and may_read(value, wait=True) for value in tensors):
        return tuple(widths)
    numbers = []
    for value in widths:
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            try:
                number = checks.as_float("receiver_widths", value)
            except TypeError:
                return (value,)  # refused where ranks agree
            value = torch.full((), number, dtype=torch.float64, device=tensors[0].device)
        numbers.append(value.reshape(()))
    return torch.stack(numbers)


def _rows_of_open(neighbors: GivenNeighbors, cutoff: Any, system: ChargedSystem) -> tuple[Rows, float | None]:
    """Neighbors, and the cutoff of their sum if it is shorter than the reach of the list."""
    cutoff = None if cutoff is None else checks.check_positive("cutoff", cutoff)
    if system.domain is not None:
        if cutoff is None:
            raise ValueError("`cutoff` is needed for an open system with a `domain`: it sets the range of the search")
        return shares.rows_of_domain(system.domain, system.positions, None, cutoff, neighbors)[:2]
    rows = rows_of(neighbors, system.positions, periodic=False)
    if rows is not None:
        return rows, None
    return all_pairs(system, cutoff), None


Receiver = torch.Tensor | None
"""Widths (n_atoms,) of receivers; None for points."""


def _receivers(values: Any, system: ChargedSystem, self_interaction: Any) -> list[Receiver]:
    """Receivers; raise if points keep the self interaction."""
    with shares.together(system.domain):
        shares.must_be_same(system.domain, receiver_widths=values, self_interaction=self_interaction)
        values = shares.replicated(system.domain, values)
        keeps = checks.check_flag("self_interaction", self_interaction)
        positions, widths = system.positions, system.widths
        found: list[Receiver] = [widths]
        is_wrong = False
        if isinstance(values, torch.Tensor):
            values = checks.as_real("receiver_widths", values, positions)
            if values.ndim != 1:
                raise ValueError(f"`receiver_widths` must have shape (n_receivers,), got {tuple(values.shape)}")
            if may_read(values):
                is_wrong = not read_number(((values >= 0.0) & (values < torch.inf)).all())
            else:
                values = nan_unless_allowed(values)
            found = [number.expand(system.n_atoms) for number in values.unbind(0)]
        elif values is not None:
            if not isinstance(values, Iterable):
                raise TypeError(f"`receiver_widths` must be a sequence or a tensor, got {type(values).__name__}")
            numbers = [checks.as_float("receiver_widths", value) for value in values]
            is_wrong = any(not 0.0 <= number < math.inf for number in numbers)
            of_points = [number == 0.0 and widths is None for number in numbers]
            found = [None if p else torch.full_like(positions[:, 0], s) for s, p in zip(numbers, of_points)]
        if not found or is_wrong:
            raise ValueError("`receiver_widths` must hold one or more finite, non-negative numbers")
        for receiver in found if keeps else ():
            square = _square(receiver, system)
            if square is None or (may_read(square) and not read_number((square > 0.0).all())):
                raise ValueError(
                    "`self_interaction` is infinite for points: it needs positive widths of sources or receivers"
                )
        return found


def _square(receiver: Receiver, system: ChargedSystem) -> torch.Tensor | None:
    """``s² + s_i²`` (n_atoms,) of a receiver and the source of its atom; None for points."""
    given = [w.to(torch.float64).square() for w in (receiver, system.widths) if w is not None]
    return torch.stack(given).sum(0) if given else None


def _widest(system: ChargedSystem, receivers: list[Receiver]) -> ChargedSystem:
    """The system with the widest Gaussians of each atom, which limit alpha."""
    given = [w for w in (system.widths, *receivers) if w is not None]
    return system._replace(widths=torch.stack(given).detach().amax(0)) if given else system


# -- parts -----------------------------------------------------------------------------------------


def _padded(system: ChargedSystem, derivatives: int) -> ChargedSystem:
    """The system with moments padded to at least this order."""
    missing = max(count(derivatives) - system.moments.shape[-1], 0)
    return system._replace(moments=torch.nn.functional.pad(system.moments, (0, missing)))


def _of_term(term: Term, system: ChargedSystem, derivatives: int) -> torch.Tensor:
    """The potential of a term: gradients of its energy with respect to moments."""
    found = term.evaluate(_padded(system, derivatives), Derivatives(charge_gradients=True))
    assert found.charge_gradients is not None
    return found.charge_gradients[..., : count(derivatives)].to(torch.float64)


def _of_slab(system: ChargedSystem, receiver: Receiver, derivatives: int) -> torch.Tensor:
    """The potential of the slab correction, averaged over Gaussians that may differ in width from the sources."""
    found = _of_term(SlabTerm(), system, 2)
    beyond = torch.zeros_like(found[..., 0])
    for sign, widths in ((0.5, receiver), (-0.5, system.widths)):
        if widths is not None:
            beyond = beyond + sign * squared(widths)
    trace = found[..., 4] + found[..., 7] + found[..., 9]
    return torch.cat([(found[..., 0] + beyond * trace).unsqueeze(-1), found[..., 1 : count(derivatives)]], -1)


def _of_exclusions(system: ChargedSystem, alpha: torch.Tensor, derivatives: int) -> torch.Tensor:
    """Minus the long-range potential of excluded pairs."""
    term = ExclusionTerm(COULOMB, alpha).pairs(system)
    of_points = system._replace(widths=None, exclusions=term.exclusions)
    return _of_pairs(of_points, term.rows, alpha, None, derivatives, None, term.radial)


def _of_pairs(
    system: ChargedSystem,
    rows: Rows,
    alpha: torch.Tensor | None,
    receiver: Receiver,
    derivatives: int,
    cutoff: float | None,
    radial: Callable[[bool], Formula] | None = None,
) -> torch.Tensor:
    """The potential of the pairs; with an alpha, only its short-range part, or that of another radial function."""
    positions, widths = system.positions, system.widths
    gaussians = widths is not None or receiver is not None
    if radial is None:
        radial = moment_interaction if alpha is None else moment_short_range
    of_sources = of_rows = None
    if gaussians:
        of_sources = (torch.zeros_like(positions[:, 0]) if widths is None else widths).unsqueeze(1).contiguous()
        of_rows = (torch.zeros_like(positions[:, 0]) if receiver is None else receiver).unsqueeze(1).contiguous()
    cell = None if alpha is None else system.cell
    pairs = PairSystem(positions, cell, system.batch_idx, system.n_systems, rows, system.domain)
    splitting = None if alpha is None else alpha.to(positions.dtype).unsqueeze(1)
    given = (system.moments.contiguous(), derivatives, of_sources, of_rows, splitting)
    found, _ = gather_moments(radial(gaussians), pairs, *given, cutoff=cutoff, exclusions=system.exclusions)
    return found.to(torch.float64)


def _own_part(
    system: ChargedSystem, alpha: torch.Tensor | None, receiver: Receiver, derivatives: int, keeps: bool
) -> torch.Tensor:
    """The potential of the atom itself, if it is kept, minus its share in the long-range part."""
    found = system.moments.new_zeros((*system.moments.shape[:2], count(derivatives)), dtype=torch.float64)
    if keeps:
        square = _square(receiver, system)
        assert square is not None
        found = found + _own_potential(system, (2.0 * square).rsqrt(), derivatives)
    if alpha is None:
        return found
    return found - _own_potential(system, spread_systems(alpha, system.batch_idx, system.n_atoms), derivatives)


def _own_potential(system: ChargedSystem, a: torch.Tensor, derivatives: int) -> torch.Tensor:
    """Derivatives (n_atoms, n_channels, count) of the potential ``erf(a r)/r`` of an atom at its own position."""
    moments = _padded(system, derivatives).moments[..., : count(derivatives)].to(torch.float64)
    found = self_potentials(moments, a)
    if derivatives < 2:
        return found
    # that of charges has a trace, which does not act on the quadrupoles of a self energy
    unit = torch.eye(3, dtype=torch.float64, device=moments.device)  # a constant of the host would be copied
    diagonal = torch.cat([unit[0], unit[1, 1:], unit[2, 2:]])
    of_charges = (4.0 / (3.0 * math.sqrt(math.pi)) * a**3)[:, None, None] * moments[..., :1] * diagonal
    return torch.cat([found[..., :4], found[..., 4:] - of_charges], -1)


def _background(system: ChargedSystem, receiver: Receiver, derivatives: int) -> torch.Tensor:
    """The `background_potential`, a constant of each system and receiver."""
    potential = background_potential(system, receiver)
    return torch.nn.functional.pad(potential.unsqueeze(-1), (0, count(derivatives) - 1))


# -- results ---------------------------------------------------------------------------------------


def _potentials(parts: list[torch.Tensor], system: ChargedSystem, derivatives: int) -> tuple[torch.Tensor, ...]:
    """The fields of `Potentials` up to this derivative, from results of receivers (n_atoms, n_channels, count).

    They are contiguous, as results of plans and compiled graphs are.
    """
    found = torch.stack(parts, 1).to(system.positions.dtype)
    found = found if system.has_channels else found.squeeze(2)
    results = [found[..., 0].contiguous()]
    if derivatives > 0:
        results.append(found[..., 1:4].contiguous())
    if derivatives > 1:
        results.append(second_moments(found[..., 4:], 1.0))
    return tuple(results)
