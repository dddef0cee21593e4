"""How an Ewald sum is divided between pairs and waves: the choice of what the caller left open."""

from typing import Any, NamedTuple

import numpy as np
import torch

from nvalchemiops.interactions.electrostatics import error_models as core
from nvalchemiops.torch.interactions.electrostatics.forces import force_of_neighbors
from nvalchemiops.torch.interactions.electrostatics.parameters import sizes_of, warn_of_errors
from nvalchemiops.torch.interactions.electrostatics.system import ChargedSystem, given_alpha
from nvalchemiops.torch.neighbors.rows import Rows, build_rows, inspect_rows, pair_distances
from nvalchemiops.torch.operators.segments import system_sums
from nvalchemiops.torch.runtime.context import may_read, on_host


class Splitting(NamedTuple):
    """How a sum is divided.

    Attributes
    ----------
    alpha : (n_systems,) tensor in float64
    rows : Rows
        Neighbors, which are built if there were none.
    target : Target
        What the smooth part has to meet, in numbers of numpy, or of torch while compiling.
    """

    alpha: torch.Tensor
    rows: Rows
    target: core.Target


class Wish(NamedTuple):
    """What the caller says about the division of a sum, or leaves open.

    Attributes
    ----------
    alpha : float, tensor or None
    cutoff : float or None
        Reach of the list.
    rows : Rows or None
        The list.
    accuracy : float
    excluded : (exclusions, exclusion_factors)
    smooth : Smooth or None
        The mesh or the wave vectors, in numbers of torch.
    smooth_name : str
        The argument that says so.
    """

    alpha: Any
    cutoff: float | None
    rows: Rows | None
    accuracy: float
    excluded: tuple[Any, Any]
    smooth: core.Smooth | None = None
    smooth_name: str = ""


def split(system: ChargedSystem, wish: Wish, best: Any) -> Splitting:
    """Alpha, and neighbors to match.

    ``best(n_atoms, volume, target, xp)`` is the alpha that costs least, by numpy or torch. With alpha given it is used.
    Otherwise a list that reaches as far as the best cutoff or farther gets the alpha that meets the accuracy at that
    cutoff; a shorter one that for which the accuracy is met at its own reach. A given mesh or sphere of wave vectors
    that is too coarse for it gets a smaller one, as far as the list reaches; if that does not meet the accuracy, the
    caller is warned.
    """
    compiling = not may_read()
    if wish.alpha is None:
        if compiling and wish.cutoff is None:
            raise ValueError(
                "`alpha` or `cutoff` is needed inside torch.compile, where the neighbor list cannot be measured"
            )
        return _choose(system, wish, best)
    chosen, target, cutoff = given_alpha(wish.alpha, system), core.Target(wish.accuracy), wish.cutoff
    if wish.rows is not None:
        return Splitting(chosen, wish.rows, target)
    if cutoff is None:
        if compiling:
            raise ValueError("`cutoff` is needed inside torch.compile to build neighbors, or give a list")
        spacing = sizes_of(system.cell, system.batch_idx, system.n_atoms).spacing
        cutoff = float(core.real_cutoff(on_host(chosen.detach()), spacing, target).max(initial=0.0))
    return Splitting(chosen, build_rows(system.positions, cutoff, system.cell, system.batch_idx), target)


def _choose(system: ChargedSystem, wish: Wish, best: Any) -> Splitting:
    """Alpha and neighbors: by numpy, or while compiling by torch, where nothing is read and the cutoff is known."""
    compiling, device = not may_read(), system.positions.device
    xp: Any = torch if compiling else np
    count: Any
    volume: Any
    if compiling:
        count, volume = _count_and_volume(system)
    else:
        sizes = sizes_of(system.cell, system.batch_idx, system.n_atoms)
        count, volume = sizes.n_atoms, sizes.volume
    spacing, target, rows = core.average_distance(count, volume), core.Target(wish.accuracy), wish.rows
    r_c = core.real_cutoff(best(count, volume, target, xp), spacing, target, xp)
    smooth = wish.smooth if compiling or wish.smooth is None else _on_host(wish.smooth)

    def balanced(reach: Any) -> Any:
        """Alpha for a list that reaches as far as that."""
        alpha = core.alpha_for_cutoff(r_c.clip(None, reach), spacing, target, xp)
        if smooth is None:
            return alpha
        return core.balanced_alpha(alpha, (core.WIDEST * r_c).clip(None, reach), spacing, smooth, target, xp)

    reach: Any = wish.cutoff
    if reach is None and rows is not None:
        reach = _reach(rows, system, r_c)
    if reach is None:
        reach = r_c
        if smooth is not None:
            sufficient = core.alpha_for_smooth(core.alpha_for_cutoff(r_c, spacing, target), spacing, smooth, target)
            reach = core.real_cutoff(sufficient, spacing, target).clip(r_c, core.WIDEST * r_c)
    if rows is None:
        cutoff = float(np.max(reach, initial=0.0)) if wish.cutoff is None else wish.cutoff
        rows = build_rows(system.positions, cutoff, system.cell, system.batch_idx)
    # slices of vmap have no values to look at
    if compiling or may_read(system.positions, system.charges, wait=True):
        near = xp.minimum(r_c.clip(None, reach), core.NEARBY * spacing)
        near, d = (torch.as_tensor(t, device=device) for t in (near, spacing))
        force = force_of_neighbors(system, rows, near, d, *wish.excluded)
        target = target._replace(force=force if compiling else on_host(force))
    alpha = balanced(reach)
    if smooth is not None and not compiling:
        errors = core.expected_errors(alpha, (core.WIDEST * r_c).clip(None, reach), spacing, smooth, target)
        warn_of_errors(
            wish.accuracy, np.hypot(*errors), f"the given `{wish.smooth_name}` and this reach of the neighbor list"
        )
    return Splitting(given_alpha(torch.as_tensor(alpha, device=device), system), rows, target)


def _on_host(smooth: core.Smooth) -> core.Smooth:
    """The same in numbers of numpy."""
    values: Any = {name: on_host(v) if isinstance(v, torch.Tensor) else v for name, v in vars(smooth).items()}
    return type(smooth)(**values)


def spacing_of(system: ChargedSystem) -> torch.Tensor:
    """Average distance (V/N)^(1/3) of each system, without reading anything."""
    return core.average_distance(*_count_and_volume(system))


def _count_and_volume(system: ChargedSystem) -> tuple[torch.Tensor, torch.Tensor]:
    volume = torch.linalg.det(system.cell.detach().to(torch.float64)).abs()
    ones = torch.ones(system.n_atoms, dtype=torch.float64, device=volume.device)
    return system_sums(ones, system.batch_idx, system.n_systems), volume


def _reach(rows: Rows, system: ChargedSystem, best: np.ndarray) -> np.ndarray:
    """Largest distance in the list, for each system; infinite where there is no atom.

    Where there is no pair, nothing is missing up to the shortest distance in the system, or up to ``best``.
    """
    batch_idx = system.batch_idx
    if batch_idx is None:
        batch_idx = torch.zeros(system.n_atoms, dtype=torch.int32, device=system.positions.device)
    farthest = inspect_rows(rows, system.positions, system.cell, batch_idx)
    reach = np.zeros(system.n_systems)
    number = on_host(batch_idx)
    np.maximum.at(reach, number, on_host(farthest))
    empty = np.bincount(number, minlength=system.n_systems) == 0
    unknown = (reach == 0.0) & ~empty
    if unknown.any():
        found = build_rows(system.positions, float(best[unknown].max()), system.cell, system.batch_idx)
        with torch.no_grad():
            first, distances = pair_distances(found, system.positions, system.cell, batch_idx)
        nearest = best.copy()
        np.minimum.at(nearest, number[on_host(first)], on_host(distances))
        reach = np.where(unknown, nearest, reach)
    return np.where(empty, np.inf, reach)
