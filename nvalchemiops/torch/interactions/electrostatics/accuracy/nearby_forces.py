"""The magnitude of the forces, to which an accuracy refers: estimated from near neighbors before the sum is known.

The estimate is ``FORCE_PER_NEARBY`` times the RMS of the forces from neighbors within `error_models.NEARBY` average
distances (`error_models.force_of`). One large system may use a sample of its atoms: their sequence is divided into m
intervals of equal length, and one atom is taken from each, at a place that is sufficiently random but does not change
from call to call. The standard error of the mean square follows from the sample itself; if it is too large, all atoms
are used. Compiled graphs, batches, domains and GPUs always use all atoms. So their parameters for a large system may
differ by a step from those of an eager call on a CPU; both meet the accuracy.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from nvalchemiops.interactions.electrostatics import error_models as core
from nvalchemiops.interactions.pair.potentials import coulomb_nearby
from nvalchemiops.layout import layout
from nvalchemiops.torch.interactions.electrostatics.accuracy.sizes import counted
from nvalchemiops.torch.interactions.electrostatics.results import Derivatives
from nvalchemiops.torch.interactions.electrostatics.system import ChargedSystem
from nvalchemiops.torch.interactions.electrostatics.terms.pairs import PairTerm
from nvalchemiops.torch.neighbors.rows import Rows
from nvalchemiops.torch.operators.lattice import lattice_of
from nvalchemiops.torch.runtime import engine
from nvalchemiops.torch.runtime.context import is_eager, on_host

LEAST_SAMPLE, MOST_SAMPLE = 64, 256
"""Smallest and largest number of atoms in a sample. For independent forces with normal components the RMS then has a
standard error of 5 % and 2.5 %. Estimates are rounded by up to 19 % (`error_models.force_of`)."""

MOST_ATOMS_ON_GPU = 2**17
"""Largest number of atoms for which the estimate on a GPU is a graph."""

SAMPLED = 8
"""One of this many atoms is in a sample between these sizes."""

LEAST_SAMPLED = 256
"""Least number of atoms for which a sample is used; with fewer, all pairs take no longer than choosing a sample."""

UNEVEN = 0.2
"""Relative standard error of the mean square force of a sample beyond which all atoms are used; it corresponds to a
tenth of the RMS. It is 0.10 for 64 independent forces with normal components."""

CROWDED = 16.0
"""Density around atoms, relative to the average, beyond which estimates do not search for neighbors."""


def force_of_neighbors(
    system: ChargedSystem, rows: Rows, reach: torch.Tensor, spacing: torch.Tensor, on_mesh: bool = False
) -> torch.Tensor:
    """RMS of the forces (n_systems,) in units of (Σq²/N)/d², from neighbors up to ``reach`` (n_systems,).

    ``spacing`` (n_systems,) is d. Nothing is read on the host, and all atoms are used. For ``on_mesh`` see
    `error_models.force_of`.
    """
    with torch.no_grad():
        return _force_of_sums(_sums_of_system(system, rows, reach), spacing, torch, on_mesh)


def _sums_of_system(system: ChargedSystem, rows: Rows, reach: torch.Tensor) -> torch.Tensor:
    """The sums (n_systems, n) over atoms that `_force_of_sums` takes."""
    forces, charges = _nearby_forces(system, rows, reach), system.moments[..., 0].detach()
    both = torch.cat([forces, charges, torch.ones_like(forces[:, :1])], 1).to(torch.float64).square()
    return system.sums(torch.cat([both, both[:, 3:-1].sum(1, keepdim=True).square()], 1))


def _force_of_sums(sums: Any, spacing: Any, xp: Any, on_mesh: bool) -> Any:
    """The estimate (n_systems,) from sums of the squares of components of forces, of charges, of ones, and of q²."""
    of_fourths = sums[:, -1] if on_mesh else None
    return _force_of(sums[:, :3].sum(1), sums[:, 3:-2].sum(1), of_fourths, sums[:, -2], spacing, xp)


def _force_of(of_forces: Any, of_charges: Any, of_fourths: Any, count: Any, spacing: Any, xp: Any) -> Any:
    """The estimate (n_systems,) from sums of the squares of forces and charges, on a mesh also of those of q²."""
    per_source = None if of_fourths is None else count * of_fourths / xp.square(of_charges)
    # RMS of the forces / (mean square of the charges / d²)
    return core.force_of(xp.sqrt(of_forces * count) / of_charges * xp.square(spacing), count, xp, per_source)


def force_on_host(
    system: ChargedSystem,
    rows: Rows,
    reach: torch.Tensor,
    spacing: np.ndarray,
    sampled: bool = False,
    on_mesh: bool = False,
) -> np.ndarray:
    """`force_of_neighbors` on the host; if ``sampled``, from a sample of the atoms of one large system.

    Must not be called while compiling.
    """
    if system.domain is not None:
        distance = torch.as_tensor(spacing, device=reach.device)
        return on_host(force_of_neighbors(system, rows, reach, distance, on_mesh))
    if not layout(system.positions.device.type).reads:
        with torch.no_grad(), np.errstate(divide="ignore", invalid="ignore"):
            return _force_of_sums(on_host(_by_plan(_sums_of_system, system, rows, reach)), spacing, np, on_mesh)
    of_forces = None
    sample = _sample(system.n_atoms) if sampled and system.n_systems == 1 else None
    with torch.no_grad(), np.errstate(divide="ignore", invalid="ignore"):  # without charges, for infinite positions
        in_sample = None if sample is None else _rows_of(sample, rows, system)
        if in_sample is not None:
            of_forces = _by_sample(_by_plan(_nearby_forces, system, in_sample, reach), sample)
        if of_forces is None:
            forces = _by_plan(_nearby_forces, system, rows, reach)
            if in_sample is None:  # also without rows of a sample, so that the choice does not depend on them
                of_forces = _by_sample(forces, sample)
            if of_forces is None:
                of_forces = _sums_of_squares(on_host(forces), system)
        charges = on_host(system.charges)
        of_charges = _sums_of_squares(charges, system)
        count = counted(system.batch_idx, system.n_systems, system.n_atoms)
        of_fourths = None
        if on_mesh:
            of_fourths = _sums_of_squares(np.square(charges, dtype=np.float64).sum(1, keepdims=True), system)
        return _force_of(of_forces, of_charges, of_fourths, count, spacing, np)


def _nearby_forces(system: ChargedSystem, rows: Rows, reach: torch.Tensor) -> torch.Tensor:
    """Forces (n_atoms, 3) between charges from the neighbors in these rows."""
    values = {"positions": system.positions, "moments": system.moments[..., :1], "cell": system.cell}
    fixed: Any = {name: value.detach() for name, value in values.items()} | {"widths": None, "of_points": True}
    pairs = PairTerm(coulomb_nearby, reach, rows, system.exclusions)
    forces = pairs.evaluate(system._replace(**fixed), Derivatives(forces=True)).forces
    assert forces is not None
    return forces


def _by_plan(
    function: Callable[[ChargedSystem, Rows, torch.Tensor], torch.Tensor],
    system: ChargedSystem,
    rows: Rows,
    reach: torch.Tensor,
) -> torch.Tensor:
    """``function(system, rows, reach)``, with a plan if there is one."""
    if system.exclusions is not None:
        return function(system, rows, reach)

    def evaluate(rows: Rows, /, reach: torch.Tensor, **values: Any) -> tuple[torch.Tensor, ...]:
        return (function(system._replace(**values), rows, reach),)

    rows = rows._replace(first=None)  # it shares memory with the neighbors, and the sum will check it
    system = system._replace(moments=system.moments[..., :1], widths=None, of_points=True)  # only charges matter
    # the cell was checked, and no value of it is read
    moving = {"positions": system.positions, "moments": system.moments, "reach": reach, "cell": system.cell}
    large = system.n_atoms > MOST_ATOMS_ON_GPU and not layout(system.positions.device.type).reads
    ways = "a graph would copy a long list for a single launch" if large else ()
    (found,) = engine.run_function("forces nearby", evaluate, moving, rows, {"batch_idx": system.batch_idx}, ways)
    return found


def _sums_of_squares(vectors: np.ndarray, system: ChargedSystem) -> np.ndarray:
    """Sums (n_systems,) in float64 of the squares of vectors (n_atoms, n)."""
    values = vectors.astype(np.float64, copy=False)
    if system.batch_idx is None:
        return np.square(values).sum().reshape(1)  # np.dot would wake threads, which then spin
    return np.bincount(on_host(system.batch_idx), (values * values).sum(1), system.n_systems)


def _by_sample(forces: torch.Tensor, sample: np.ndarray | None) -> np.ndarray | None:
    """The sum (1,) of the squares of forces (n_atoms, 3), estimated from a sample; None if the sample is uneven."""
    if sample is None:
        return None
    values = on_host(forces)[sample].astype(np.float64, copy=False)
    squares = (values * values).sum(1)
    total, size = squares.sum(keepdims=True), len(sample)
    variance = np.dot(squares, squares) * size / (total * total) - 1.0  # relative to the square of the mean
    return total * (len(forces) / size) if variance <= size * UNEVEN * UNEVEN else None


# -- samples --------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=16)
def _sample(n_atoms: int) -> np.ndarray | None:
    """Atoms in the sample, in ascending order; None if all atoms are used."""
    if n_atoms < LEAST_SAMPLED:
        return None
    size = min(max(LEAST_SAMPLE, n_atoms // SAMPLED), MOST_SAMPLE)
    number = np.arange(size)
    # multiples of the golden ratio are evenly distributed at all scales: they match no period in the order of atoms
    golden = 0.5 * (5.0**0.5 - 1.0)
    found = ((number + number * golden % 1.0) * (n_atoms / size)).astype(np.int64)
    found.flags.writeable = False
    return found


def _rows_of(atoms: np.ndarray, rows: Rows, system: ChargedSystem) -> Rows | None:
    """The rows of these atoms, with empty rows for others; None if they cannot be read, or the pointers are wrong."""
    pointers, neighbors, shifts, width, padding, _ = rows
    tensors = [t for t in (pointers, neighbors, shifts) if t is not None]
    if not is_eager(*tensors):
        return None
    if pointers is None:
        begin = atoms * width
        end = begin + width
    else:
        ends = on_host(pointers)
        begin, end = ends[atoms], ends[atoms + 1]
    bounds = np.stack([begin, end], 1).ravel()
    if bounds[0] < 0 or bounds[-1] > neighbors.shape[0] or (np.diff(bounds) < 0).any():
        return None
    counts = np.zeros(system.n_atoms + 1, np.int32)
    counts[atoms + 1] = end - begin
    before = np.cumsum(end - begin) - (end - begin)
    place = torch.from_numpy(np.arange(counts.sum()) + np.repeat(begin - before, end - begin))
    listed = torch.from_numpy(np.cumsum(counts, dtype=np.int32))
    shifts = None if shifts is None else shifts.index_select(0, place)
    return Rows(listed, neighbors.index_select(0, place), shifts, 0, padding, None)


# -- crowds ---------------------------------------------------------------------------------------


def is_crowded(system: ChargedSystem) -> bool:
    """Whether an atom has far more neighbors than in a system of even density. Reads values on the host."""
    n_atoms, batch_idx = system.n_atoms, system.batch_idx
    coordinates = lattice_of(system.cell.detach(), batch_idx, n_atoms).fractional(system.positions.detach())
    numbers = torch.zeros(n_atoms, dtype=torch.int64, device=coordinates.device)
    if batch_idx is not None:
        numbers += batch_idx
    # each system has as many boxes as atoms
    n_boxes = numbers.bincount().double().pow(1.0 / 3.0).round().clamp_min(1.0).index_select(0, numbers).unsqueeze(1)
    box = (coordinates - coordinates.floor()).nan_to_num().mul(n_boxes).floor().minimum(n_boxes - 1.0).long()
    keys = torch.cat([numbers.unsqueeze(1), box], 1)
    _, of_atom, count = torch.unique(keys, dim=0, return_inverse=True, return_counts=True)
    return float(count.index_select(0, of_atom).double().mean()) > CROWDED
