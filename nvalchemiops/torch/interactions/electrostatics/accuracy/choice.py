"""Choose parameters of an Ewald sum that are not given: alpha, the cutoff, the mesh or the k-vectors."""

import functools
import math
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple, Union

import numpy as np
import torch

from nvalchemiops import notices
from nvalchemiops.arguments import ValuesError
from nvalchemiops.interactions.electrostatics import error_models as core
from nvalchemiops.locks import Kept
from nvalchemiops.notices import AccuracyWarning, is_first, notify
from nvalchemiops.torch import checks
from nvalchemiops.torch.interactions.electrostatics.accuracy.nearby_forces import force_of_neighbors, force_on_host
from nvalchemiops.torch.interactions.electrostatics.accuracy.sizes import (
    Sizes,
    SizesKey,
    count_and_volume,
    key_of_sizes,
    sizes_of_system,
)
from nvalchemiops.torch.interactions.electrostatics.accuracy.strengths import (
    Strengths,
    has_known_moments,
    magnitudes_of,
    strengths_of,
    widest_alpha,
)
from nvalchemiops.torch.interactions.electrostatics.system import ChargedSystem, given_alpha
from nvalchemiops.torch.neighbors.lists import neighbor_list
from nvalchemiops.torch.neighbors.rows import Rows, inspect_rows
from nvalchemiops.torch.operators.lattice import check_mesh
from nvalchemiops.torch.runtime.context import ValuesNeededError, all_values_of, may_read, on_host, slices_of
from nvalchemiops.torch.runtime.graphs import place_of
from nvalchemiops.torch.runtime.recorder import differ_in_replays, read_flag, read_number

if TYPE_CHECKING:
    from nvalchemiops.torch.interactions.electrostatics.terms.mesh import MeshSum
    from nvalchemiops.torch.interactions.electrostatics.terms.reciprocal import KVectorSum


LongRange = Union["KVectorSum", "MeshSum"]
"""A method for the long-range part: its given parameters, and how missing ones are chosen, as at `KVectorSum`."""


class EwaldSplitting(NamedTuple):
    """How a sum is divided into a short-range and a long-range part."""

    alpha: torch.Tensor  # (n_systems,) in float64
    rows: Rows  # built if none were given
    # accuracy and forces, which set the allowed errors; numpy arrays, or torch tensors while compiling
    target: core.Target
    cutoff: float | None = None  # of the list, if it was built
    strengths: Strengths | None = None  # those of moments, if they are known
    # (n_systems,), alpha on the host; None if the long-range part is given, while compiling, or for slices of a `vmap`
    values: np.ndarray | None = None
    # what `sizes_of_system` depends on; None if what follows from it is not to be kept
    sizes_known: SizesKey | None = None


def choose_splitting(
    system: ChargedSystem,
    long_range: LongRange,
    alpha: Any,
    cutoff: float | None,
    rows: Rows | None,
    accuracy: float,
    sources: tuple[Strengths | None, Any] | None = None,
) -> EwaldSplitting:
    """Choose alpha and neighbors that match it.

    A given ``alpha`` is used. Otherwise alpha meets the accuracy at the optimal cutoff, or, if the list is shorter, at
    the reach of the list. If a given mesh or sphere of k-vectors is too coarse for this, a smaller alpha is used, as
    far as the reach of the list allows; if the accuracy is then missed, a warning is issued.

    ``cutoff`` is the reach of the list, ``rows``; ``sources`` are what `sources_of` has found, if alpha is not given.
    """
    compiling = not may_read()
    if alpha is None:
        if compiling and cutoff is None:
            raise ValuesNeededError(
                "`alpha` or `cutoff` is needed where the neighbor list cannot be measured, as inside torch.compile"
            )
        return _choose(system, long_range, cutoff, rows, accuracy, sources or sources_of(system))
    chosen, target = given_alpha(alpha, system), core.Target(accuracy)
    limit = widest_alpha(system)
    # a GPU is not asked, nor are cells that differ between slices: the answer would only be a warning
    if limit is not None and may_read(chosen, limit, system.cell) and read_flag((chosen > limit).any()):
        reach: Any = cutoff
        numbers, widest = on_host(chosen.detach()), on_host(limit)
        if reach is None and rows is not None:
            needed = core.real_cutoff(np.minimum(numbers, widest), sizes_of_system(system).spacing, target)
            reach = _reach(rows, system, needed)
        if reach is not None:
            _warn_of_widths(system, numbers, widest, reach, accuracy)
    is_open, strengths = (rows is None and cutoff is None) or not long_range.is_given, None
    if is_open and not compiling and has_known_moments(system):
        strengths = strengths_of(system, np)
        target = strengths.target(accuracy, on_host(chosen.detach()))
        if limit is not None:
            _warn_of_overlap(on_host(limit), strengths.spacing, accuracy)
    values, sizes_known = None, None
    if not long_range.is_given and may_read(chosen, system.cell, system.batch_idx, wait=True):
        # a number is not read back from a GPU
        known = np.full(system.n_systems, alpha) if isinstance(alpha, float) else on_host(chosen.detach())
        values, sizes_known = _rounded(known, system), key_of_sizes(system)
    given, searched = cutoff, None
    if rows is None:
        if cutoff is None:
            if compiling:
                raise ValuesNeededError(
                    "`cutoff`, or a list, is needed where values cannot be read, as inside torch.compile"
                )
            spacing = sizes_of_system(system).spacing
            screened = chosen.detach() if limit is None else torch.minimum(chosen.detach(), limit)
            cutoff = float(core.real_cutoff(on_host(screened), spacing, target).max(initial=0.0))
        rows, searched = system.rows_within(cutoff), cutoff
    # with a given long-range part no accuracy is asked for, and recorded calls say nothing
    differ = differ_in_replays(system.positions, system.moments, *rows)
    if values is not None and searched in (None, given) and not differ:
        _warn_of_cutoff(system, sizes_known, rows, values, given, target)
    return EwaldSplitting(chosen, rows, target, searched, strengths, values, sizes_known)


def _choose(
    system: ChargedSystem,
    long_range: LongRange,
    cutoff: float | None,
    rows: Rows | None,
    accuracy: float,
    sources: tuple[Strengths | None, Any],
) -> EwaldSplitting:
    """Alpha and neighbors. Uses numpy, or torch while compiling: then no values are read, and the cutoff is given.

    Only the reach of the list and the forces depend on positions. What else is found is kept for later calls.
    """
    compiling, device = not may_read(), system.positions.device
    xp: Any = torch if compiling else np
    costs = costs_of_call(system, rows, cutoff)
    strengths, limit = sources
    model = long_range.error_model(system) if long_range.is_given else None
    if model is not None and not compiling:
        model = _on_host(model)
    sizes_known, key = key_of_sizes(system), None
    if sizes_known is not None:
        # all on which a choice depends besides the reach of the list and forces; forces between moments follow from
        # these means and from the sizes
        of_sources = (None, None) if strengths is None else (strengths.squares, strengths.per_source)
        parts = (*of_sources, limit, *(vars(model).values() if model else ()))
        known = tuple([part.tobytes() if isinstance(part, np.ndarray) else part for part in parts])
        method = type(long_range), getattr(long_range, "spline_order", 0), type(model)
        place = place_of(device)  # tensors that were made on another stream may not be there yet
        key = (sizes_known, system.positions.dtype, accuracy, method, known, costs, place)

    # the compiler of torch 2.13 cannot evaluate the annotations of functions here, unless they are quoted
    def optimum() -> "tuple[Any, _Splittings]":
        return optimal_splitting(system, long_range, accuracy, costs, strengths, limit), Kept(MOST_SPLITTINGS)

    # the compiler of torch 2.11 would look at all keys that are kept, and cannot tell whether they have a hash
    made = optimum() if key is None else _kept_or_made(_choices, key, optimum)
    (optimal_alpha, r_c, optimal_target, spacing), splittings = made

    def balanced(reach: Any, model: core.Reciprocal | None, target: core.Target) -> Any:
        """Alpha for a list with this reach."""
        alpha = core.alpha_for_cutoff(r_c.clip(None, reach), spacing, target, xp)
        if limit is not None:
            alpha = xp.minimum(alpha, limit)
        if model is None:
            return alpha
        return core.balanced_alpha(alpha, (core.WIDEST * r_c).clip(None, reach), spacing, model, target, xp)

    reach: Any = cutoff
    if reach is None and rows is not None:
        reach = _reach(rows, system, r_c)
        # in steps from the optimal cutoff: the largest distance in a list with that cutoff is slightly less
        reach = np.where(reach > 0.0, r_c * core.in_steps(reach / r_c), reach)
    if reach is None:
        reach, target = r_c, optimal_target
        if model is not None:
            sufficient = core.alpha_for_reciprocal(core.alpha_for_cutoff(r_c, spacing, target), spacing, model, target)
            reach = core.in_steps(core.real_cutoff(sufficient, spacing, target), "up").clip(r_c, core.WIDEST * r_c)
    longest = None
    if rows is None:
        longest = float(np.max(reach, initial=0.0)) if cutoff is None else cutoff
        rows = system.rows_within(longest)
    of_reach = None if key is None else np.asarray(reach).tobytes()
    force: Any = None
    of_few: Any = None
    by_mesh = hasattr(long_range, "spline_order")
    # values of tensors that vmap maps over cannot be read
    if compiling or may_read(system.positions, system.moments, wait=True):

        def nearest() -> torch.Tensor:
            return torch.as_tensor(xp.minimum(r_c.clip(None, reach), core.NEARBY * spacing), device=device)

        near = _kept_or_made(splittings, of_reach, nearest)
        measure: Any = force_of_neighbors if compiling else functools.partial(force_on_host, sampled=True)
        force = measure(system, rows, near, spacing, on_mesh=by_mesh and strengths is None)
        if strengths is not None and (compiling or strengths.are_few):
            of_few = measure(magnitudes_of(system), rows, near, spacing)

    def settled() -> "tuple[torch.Tensor, np.ndarray | None, core.Target]":
        target, suited = optimal_target, model
        if force is not None:
            target = target._replace(force=force)
        if strengths is not None:
            of_all = strengths if of_few is None else strengths.of_few(of_few, xp)
            of_all = of_all.with_force_of_charges(target.force, xp)
            of_all = of_all.on_mesh(xp) if by_mesh else of_all
            alpha = optimal_alpha
            for _ in range(SETTLED):
                target = of_all.target(accuracy, alpha, xp)
                if isinstance(model, core.Mesh):
                    suited = of_all.mesh_model(model, accuracy, alpha, xp)
                alpha = balanced(reach, suited, target)
            if limit is not None and not compiling:
                _warn_of_widths(system, np.asarray(alpha), limit, float(np.min(reach)), accuracy)
        alpha = balanced(reach, suited, target)
        if suited is not None and not compiling:
            errors = core.expected_errors(alpha, (core.WIDEST * r_c).clip(None, reach), spacing, suited, target)
            warn_of_errors(
                accuracy, np.hypot(*errors), f"the given {long_range.argument} and this reach of the neighbor list"
            )
        if compiling:
            return given_alpha(alpha, system), None, target
        values = _rounded(alpha, system)
        return torch.tensor(values, device=device), values, target

    of_both = None
    if of_reach is not None and force is not None:
        of_both = (of_reach, force.tobytes(), None if of_few is None else of_few.tobytes())
    alpha, values, target = _kept_or_made(splittings, of_both, settled)
    return EwaldSplitting(alpha, rows, target, longest, strengths, values, sizes_known)


def _rounded(alpha: Any, system: ChargedSystem) -> np.ndarray:
    """Alpha (n_systems,) on the host, rounded as by `given_alpha`."""
    precision = np.float32 if system.positions.dtype is torch.float32 else np.float64
    return np.asarray(alpha).astype(precision).astype(np.float64)


def costs_of_call(system: ChargedSystem, rows: Rows | None, cutoff: float | None) -> core.Costs:
    """The costs with which parameters are chosen: those of a search matter only if its reach is chosen, too."""
    finds_neighbors = rows is None and cutoff is None and system.domain is None
    return core.COSTS[system.positions.device.type].of_call(finds_neighbors)


def sources_of(system: ChargedSystem) -> tuple[Strengths | None, Any]:
    """Strengths of moments and the `widest_alpha` of Gaussians, if they are known; on the host, or while compiling."""
    compiling = not may_read()
    if not (has_known_moments(system) or (compiling and not system.of_points)):
        return None, None
    strengths, limit = strengths_of(system, torch if compiling else np), widest_alpha(system)
    return strengths, limit if limit is None or compiling else on_host(limit)


def optimal_splitting(
    system: ChargedSystem,
    long_range: LongRange,
    accuracy: float,
    costs: core.Costs,
    strengths: Strengths | None,
    limit: Any,
) -> tuple[Any, Any, core.Target, Any]:
    """Alpha and cutoff (n_systems,) of least cost, and the target, independent of positions; and the average distance.

    Uses numpy, or torch if values cannot be read. ``strengths`` and ``limit`` are those of `sources_of`.
    """
    compiling = not may_read()
    xp: Any = torch if compiling else np
    count: Any
    volume: Any
    lengths = None
    if compiling:
        count, volume = count_and_volume(system)
    else:
        sizes = sizes_of_system(system)
        count, volume = sizes.n_atoms, sizes.volume
        lengths = None if long_range.is_given or system.n_systems == 1 else sizes.with_shorter_vectors()[0].lengths
    spacing, target = core.average_distance(count, volume, xp), core.Target(accuracy)
    others = (costs, xp, lengths)
    alpha = long_range.optimal_alpha(count, volume, target, *others)
    if strengths is not None:
        if limit is not None and not compiling:
            _warn_of_overlap(limit, spacing, accuracy)
        for _ in range(SETTLED):
            target = strengths.target(accuracy, alpha, xp)
            alpha = long_range.optimal_alpha(count, volume, target, *others)
            alpha = alpha if limit is None else xp.minimum(alpha, limit)
    return alpha, core.real_cutoff(alpha, spacing, target, xp), target, spacing


SETTLED = 4
"""Iterations after which the strength of moments and the splitting parameter, which depend on each other, converge."""

MOST_CHOICES = 16
"""Number of combinations of cells, sizes and accuracies for which choices are kept."""

MOST_SPLITTINGS = 32
"""Number of reaches, and of sets of forces, one for each system of a batch, that are kept for each of these."""

_Splittings = Kept[Any]
"""By the bytes of the reach: the reach of the estimate of forces. By those of reach and forces: alpha and target. One
system has few entries, since both are rounded."""

_choices: Kept[tuple[Any, _Splittings]] = Kept(MOST_CHOICES)
"""Choices that do not depend on positions: the results of `optimal_splitting`; and splittings."""


def _kept_or_made(kept: Kept[Any], key: Hashable, make: Callable[[], Any]) -> Any:
    """What is kept for this key, or else the result of ``make()``. With None as a key nothing is kept."""
    if key is None:
        return make()
    found = kept.get(key)
    if found is None:
        notes = notices.count()
        with torch.inference_mode(False):  # other calls will use its tensors
            found = make()
        if notices.count() == notes:  # choices with warnings must warn in each call
            kept.keep(key, found)
    return found


def _on_host(model: core.Reciprocal) -> core.Reciprocal:
    """The model with numpy arrays."""
    values: Any = {name: on_host(v) if isinstance(v, torch.Tensor) else v for name, v in vars(model).items()}
    return type(model)(**values)


def _reach(rows: Rows, system: ChargedSystem, optimal: np.ndarray) -> np.ndarray:
    """Largest distance in the list, for each system; infinite for systems without atoms.

    The reach of a system without pairs is its shortest distance, or ``optimal`` if that is less. Under a ``vmap`` over
    positions or lists it is the smallest reach of all slices.
    """
    number, of_slices = _farthest(rows, system)
    unknown = of_slices == 0.0
    if unknown.any():
        # no atom is farther from its images, so that the search is small in any case
        nearest = np.fmin(optimal, np.linalg.norm(on_host(system.cell.detach()), axis=2).min(1))
        nearest = _nearest(system, number, nearest, float(nearest[unknown.any(0)].max()), 0.0 * nearest)
        of_slices = np.where(unknown, nearest, of_slices)
    reach: np.ndarray = of_slices.min(0)
    return reach


def _farthest(rows: Rows, system: ChargedSystem) -> tuple[np.ndarray, np.ndarray]:
    """The system of each atom (n_atoms,), and the largest distance in the list (n_slices, n_systems).

    It is infinite for systems without atoms.
    """
    batch_idx = system.batch_idx
    if batch_idx is None:
        batch_idx = torch.zeros(system.n_atoms, dtype=torch.int32, device=system.positions.device)
    farthest = inspect_rows(rows, system.positions, system.cell, batch_idx)
    number = on_host(batch_idx)
    of_slices = np.zeros((farthest.shape[0], system.n_systems))
    for of_slice, distances in zip(of_slices, on_host(farthest)):
        np.maximum.at(of_slice, number, distances)
    of_slices[:, np.bincount(number, minlength=system.n_systems) == 0] = np.inf
    return number, of_slices


def _nearest(
    system: ChargedSystem,
    number: np.ndarray,
    most: np.ndarray,
    searched: float,
    least: np.ndarray,
    atoms: np.ndarray | None = None,
) -> np.ndarray:
    """Shortest distance (n_systems,) up to ``searched`` that is not below ``least``, at most ``most``, both likewise.

    ``number`` (n_atoms,) is the system of each atom. Only pairs of these ``atoms`` are looked at, if they are given.
    """
    nearest, cell = most.copy(), system.cell.detach()
    of_atoms = None if atoms is None else torch.from_numpy(atoms.astype(np.int32)).to(cell.device)
    options: Any = {"target_indices": of_atoms, "return_neighbor_list": True, "return_distances": True}
    for positions in slices_of(system.positions):
        found = neighbor_list(positions, searched, cell, batch_idx=system.batch_idx, **options)
        system_of, distances = number[on_host(found[0][0])], on_host(found[-1])
        is_far = distances >= least[system_of]
        np.minimum.at(nearest, system_of[is_far], distances[is_far])
    return nearest


# -- Gaussians --------------------------------------------------------------------------------------


def _warn_of_cutoff(
    system: ChargedSystem,
    sizes_known: SizesKey | None,
    rows: Rows,
    alpha: np.ndarray,
    cutoff: float | None,
    target: core.Target,
) -> None:
    """Warn if the list, up to this cutoff if it is given, is too short for alpha (n_systems,).

    A line of the caller is told once for each number of atoms, and measures lists without a cutoff once.
    """

    @functools.cache
    def known() -> Sizes:
        return sizes_of_system(system, sizes_known)

    def errors_at(reach: Any) -> np.ndarray:
        with np.errstate(divide="ignore"):  # a list without pairs
            errors: np.ndarray = np.exp(core.log_real_error(alpha, reach, known().spacing)) / target.force
        return errors

    most, of = 10.0 * target.accuracy, "this `alpha` and the reach of the neighbor list"
    if cutoff is None:
        is_known = system.domain is not None  # lists of ranks are not measured
    else:
        is_known = not (errors_at(cutoff) > most).any()
    if is_known:
        return
    # the rest takes as long as a small sum
    if not may_read(*map(all_values_of, (system.positions, rows.neighbors)), wait=True):
        return
    if not is_first(AccuracyWarning, of, cutoff, None if cutoff is None else system.n_atoms):
        return
    sizes = known()
    spacing, needed = sizes.spacing, core.real_cutoff(alpha, sizes.spacing, target)
    reach = _complete_up_to(system, sizes, rows, cutoff or 0.0, needed)
    errors = np.where(reach < needed, errors_at(reach), 0.0)
    if (errors > most).any() and system.of_points and may_read(system.positions, system.moments, *rows, wait=True):
        near = torch.as_tensor(np.minimum(reach, core.NEARBY * spacing), device=system.positions.device)
        errors *= target.force / force_on_host(system, rows, near, spacing)
        has_charges = (on_host(system.sums(system.charges.detach().square())) > 0.0).any(1)  # nor NaN
        errors = np.where(has_charges, errors, 0.0)
    warn_of_errors(target.accuracy, errors, of, least=10.0)


MOST_SOUGHT = 2**17
"""Number of pairs among which the nearest one that a list lacks is sought; in larger systems around a few atoms."""


def _complete_up_to(system: ChargedSystem, sizes: Sizes, rows: Rows, cutoff: float, needed: np.ndarray) -> np.ndarray:
    """The distance (n_systems,), at most ``needed``, up to which a list with at least this cutoff lacks no pair.

    It is longer than the cutoff where all atoms of a molecule are near, but not their images.
    """
    if system.domain is not None:
        return np.full(needed.shape, cutoff)
    longest = float(needed.max(initial=0.0))
    is_finite = slices_of(system.positions).isfinite().all()
    if not (system.n_atoms and np.isfinite(longest) and read_number(is_finite)):
        return needed  # nothing is missing, or the sum is NaN, and a search would raise an error
    number, listed = _farthest(rows, system)
    reach = np.maximum(listed.min(0), cutoff)
    # at most as many as at the density in the list, or as of all atoms and their images
    of_atoms = np.sum(sizes.n_atoms**2 * (1.0 + 4.0 * np.pi / 3.0 * longest**3 / sizes.volume))
    with np.errstate(divide="ignore"):  # a list without pairs
        of_list = max(rows.neighbors.shape[0], system.n_atoms) * (longest / reach.min()) ** 3
    step = math.ceil(min(max(of_list, 1.0), of_atoms) / MOST_SOUGHT)
    # some of all atoms, and one of each system
    atoms = np.union1d(np.arange(0, system.n_atoms, step), np.unique(number, return_index=True)[1])
    return _nearest(system, number, needed, longest, reach * (1.0 + 1e-6), atoms)  # rounding is less than that


def _warn_of_widths(
    system: ChargedSystem, alpha: np.ndarray, limit: np.ndarray, reach: float | np.ndarray, accuracy: float
) -> None:
    """Warn if Gaussians are so wide that pairs beyond the reach of the list are needed."""
    sizes = sizes_of_system(system)
    with np.errstate(divide="ignore"):  # the reach is infinite without atoms
        errors = np.exp(core.log_real_error(limit, reach, sizes.spacing)) / core.TYPICAL_FORCE
    errors = np.where(alpha >= 0.999 * limit, errors, 0.0)  # Gaussians do not limit a smaller alpha
    warn_of_errors(accuracy, errors, "Gaussians of these `widths` and this reach of the neighbor list", least=10.0)


def _warn_of_overlap(limit: np.ndarray, spacing: np.ndarray, accuracy: float) -> None:
    """Warn if Gaussians are wider than half the average distance of atoms; ``limit`` is `widest_alpha` (n_systems,)."""
    widest, distance = 0.5 / limit, np.broadcast_to(spacing, limit.shape)
    if not (widest > 0.5 * distance).any():
        return
    at = int(np.argmax(widest / distance))
    notify(
        f"`accuracy` = {accuracy:g} refers to forces between narrow charges: Gaussians with `widths` up to about "
        f"{widest[at]:.2g}, where atoms are {distance[at]:.2g} apart, overlap, and their forces may be so small that "
        "relative errors are larger by orders of magnitude; ask for a higher accuracy, or sum over k-vectors alone, up "
        "to a length that you choose",
        AccuracyWarning,
        kind="Gaussians that overlap",
    )


# -- meshes ---------------------------------------------------------------------------------------


def mesh_for(
    sizes: Sizes,
    alpha: np.ndarray,
    target: core.Target,
    order: int,
    safety: Any = 1.0,
    padding: Any = 0.25,
    strengths: Strengths | None = None,
) -> tuple[int, int, int]:
    """The mesh for all systems. Warns if splines of this order cannot reach the accuracy."""
    safety = checks.check_positive("mesh_safety_factor", safety)

    def spacing_for(target: core.Target) -> np.ndarray:
        of_derivatives = target._replace(force=target.force / sizes.skewness)
        spacing: np.ndarray = core.mesh_spacing(alpha, sizes.spacing, of_derivatives, order)
        for _ in range(3 * SETTLED):
            if strengths is None:
                break
            # The finer a mesh, the larger its errors for moments relative to its errors for charges. Moments are
            # differentiated more than once, so the heights of lattice vectors count.
            factor = strengths.of_mesh(target.accuracy, alpha, spacing / sizes.skewness)
            spacing = core.mesh_spacing(
                alpha, sizes.spacing, of_derivatives._replace(force=of_derivatives.force / factor), order
            ).clip(core.FINEST / alpha * 0.5, None)
        return spacing

    most = max(core.MOST_POINTS, core.MOST_POINTS_PER_ATOM * sizes.n_atoms.sum())

    def coarser(spacing: np.ndarray) -> np.ndarray:
        """With which a mesh has this many points."""
        points = (sizes.lengths / spacing[:, None]).max(0).prod()
        return spacing * max(1.0, points / most) ** (1.0 / 3.0)

    spacing, limited = spacing_for(target), ""
    if (spacing * alpha < core.FINEST).any():
        spacing, limited = coarser(np.maximum(spacing, core.FINEST / alpha)), f"splines of order {order}"
    elif strengths is not None and ((bounded := coarser(spacing)) > spacing).any():
        # no finer for forces between few moments far from each other; for those that are assumed without looking, it is
        bounded = np.minimum(bounded, spacing_for(strengths.target(target.accuracy, alpha))).clip(spacing, None)
        if (bounded > spacing).any():
            spacing, limited = bounded, f"splines of order {order} on a mesh of {most:.2g} points"
    mesh = mesh_of(sizes.lengths / (spacing / safety)[:, None], order, padding)
    if limited:
        reach = core.real_cutoff(alpha, sizes.spacing, target)
        model = sizes.mesh_model(mesh, order)
        if strengths is not None:
            model = strengths.mesh_model(model, target.accuracy, alpha, np)
        errors = core.expected_errors(alpha, reach, sizes.spacing, model, target)
        better = [p for p in core.MESH_ERROR if p > order]
        advice = (
            f"a higher `spline_order`, up to {max(better)}, goes further" if better else "an Ewald sum goes further"
        )
        warn_of_errors(target.accuracy, np.hypot(*errors), limited, advice, least=0.0)
    return mesh


def warn_of_errors(
    accuracy: float, errors: np.ndarray, of: str, advice: str = "", least: float = core.OUT_OF_REACH
) -> None:
    """Warn if an expected error (n_systems,) exceeds ``least`` times the accuracy; ``of`` names the limitation."""
    worst = float(np.max(errors, initial=0.0))
    if worst <= least * accuracy:
        return
    notify(
        f"`accuracy` = {accuracy:g} is out of reach of {of}: expect a relative error of the forces of about "
        f"{worst:.1g}" + f"; {advice}" * bool(advice),
        AccuracyWarning,
        kind=f"{accuracy:g} is out of reach of {of}",
    )


MOST_MESH_POINTS = 2**31 - 1
"""Largest number of mesh points that kernels can address."""


def mesh_of(points: np.ndarray, order: int, padding: Any) -> tuple[int, int, int]:
    """The mesh for all systems, with at least this many points (n_systems, 3) along each axis."""
    padding = checks.as_float("fft_padding_fraction", padding)
    if not 0.0 <= padding <= 10.0:
        raise ValueError(f"`fft_padding_fraction` must be in 0 .. 10, got {padding}")
    most = points.max(axis=0, initial=1.0)
    if not np.prod(most) < MOST_MESH_POINTS:
        raise ValuesError(
            f"`cell` would need a mesh of {np.prod(most):.1e} points: ask for a lower `accuracy`, a coarser "
            "`mesh_spacing` or a smaller `alpha`; or, if its vectors are skewed, give shorter ones of the same lattice"
        )
    x, y, z = (core.mesh_size(float(n), order, padding) for n in most)
    return check_mesh((x, y, z))


FINEST_ACCURACY = 1e-16
"""Smallest accuracy that is accepted: rounding errors are larger."""


def check_accuracy(accuracy: Any, positions: torch.Tensor | None = None) -> float:
    """The accuracy as a float; warn if positions in float32 cannot give it."""
    accuracy = checks.check_positive("accuracy", accuracy)
    if accuracy < FINEST_ACCURACY:
        raise ValueError(f"`accuracy` = {accuracy:g} is beyond float64; ask for {FINEST_ACCURACY:g} at most")
    if accuracy >= 1.0:
        raise ValueError(f"`accuracy` = {accuracy:g} is a relative error of forces: it must be below 1, as 1e-6 is")
    rounded = positions is not None and positions.dtype is torch.float32
    if rounded and accuracy < core.FLOAT32_FLOOR and may_read():
        notify(
            f"`accuracy` = {accuracy:g} is out of reach of float32: rounding leaves about {core.FLOAT32_FLOOR:g}; "
            "use float64 positions, or ask for less",
            AccuracyWarning,
        )
    return accuracy
