"""K-vectors of periodic systems: the choice for a sum, and lists for callers."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import warp as wp

from nvalchemiops.arguments import ValuesError
from nvalchemiops.interactions.electrostatics import k_vectors as core
from nvalchemiops.kernels.lattice import unit_vectors
from nvalchemiops.locks import Kept
from nvalchemiops.notices import AccuracyWarning, notify
from nvalchemiops.torch import checks
from nvalchemiops.torch.autograd import DynamicSize, OutputSpec, warp_custom_op
from nvalchemiops.torch.autograd.functorch import given_slices
from nvalchemiops.torch.operators.lattice import check_cells, check_mesh, lattice_of, mesh_frequencies
from nvalchemiops.torch.runtime._torch_internals import named_in_files
from nvalchemiops.torch.runtime.cache import KeptTensors
from nvalchemiops.torch.runtime.context import eager, is_capturing, may_read, on_host
from nvalchemiops.torch.runtime.recorder import are_all

# -- k-vectors as points ----------------------------------------------------------------------------

_N_POINTS = DynamicSize("n_points")
_POINTS = [
    OutputSpec("points", wp.int32, lambda *_: (_N_POINTS, 3)),
    OutputSpec("point_begin", wp.int32, lambda cell, *_: (cell.shape[0] + 1,)),
    OutputSpec("point_system", wp.int32, lambda *_: (_N_POINTS,)),
    OutputSpec("weights", wp.float64, lambda *_: (_N_POINTS, 4)),
]


@named_in_files
class WaveVectors(NamedTuple):
    """K-vectors of all systems, origin included, in groups of four per point (`nvalchemiops.kernels.fourier`).

    Attributes
    ----------
    points : (n_points, 3) int32 tensor
    point_begin : (n_systems + 1,) int32 tensor
    point_system : (n_points,) int32 tensor
    weights : (n_points, 4) float64 tensor
        Multiplicity of each k-vector in a sum over all k-vectors; k and -k share an entry.
    cell : (n_systems, 3, 3) float64 tensor, length, or None
        The cell for which `prepare_wave_vectors` chose the k-vectors.
    k_cutoff : (n_systems,) float64 tensor, 1/length, or None
        The length up to which it chose them.
    """

    points: torch.Tensor
    point_begin: torch.Tensor
    point_system: torch.Tensor
    weights: torch.Tensor
    cell: torch.Tensor | None = None
    k_cutoff: torch.Tensor | None = None

    def largest_indices(self) -> torch.Tensor:
        """Largest Miller indices (n_systems, 3), in float64."""
        numbers = self.point_system.long().unsqueeze(1).expand(-1, 3)
        largest = self.weights.new_zeros((self.point_begin.shape[0] - 1, 3))
        return largest.scatter_reduce(0, numbers, self.points.to(torch.float64), "amax")

    def complete_up_to(self, cell: torch.Tensor) -> torch.Tensor | None:
        """The length (n_systems,) up to which all k-vectors of this cell are included, if that is known."""
        if self.cell is None or self.k_cutoff is None:
            return None
        change = torch.linalg.inv_ex(self.cell).inverse @ cell
        return self.k_cutoff / torch.linalg.matrix_norm(change, 2)

    def stretch_to(self, cell: torch.Tensor) -> np.ndarray:
        """The largest factor (n_systems,) by which this cell is longer in some direction; 1 if that cannot be read."""
        if self.cell is None or not may_read(cell, self.cell):
            return np.ones(cell.shape[0])
        before, now = on_host(self.cell), on_host(cell)
        if np.array_equal(before, now):
            return np.ones(len(now))
        if not np.isfinite(now).all():
            return np.full(len(now), np.inf)
        # a k-vector shrinks at most by this factor
        return np.linalg.norm(np.linalg.solve(before, now), 2, axis=(1, 2))

    def of_systems(self, systems: torch.Tensor, n_systems: int) -> "WaveVectors":
        """The k-vectors of some systems of a batch, in ascending order."""
        begin = self.point_begin
        if begin.shape[0] != n_systems + 1:
            raise ValueError(f"`miller_indices` are for {begin.shape[0] - 1} systems, but there are {n_systems}")
        number = torch.full_like(begin[1:], -1)
        number[systems] = torch.arange(systems.shape[0], dtype=begin.dtype, device=begin.device)
        of_points = number[self.point_system.long()]
        kept = of_points >= 0
        ends = begin.diff().index_select(0, systems).cumsum(0).to(begin.dtype)
        cell, k_cutoff = (None if t is None else t.index_select(0, systems) for t in (self.cell, self.k_cutoff))
        begins = torch.cat([begin[:1], ends])
        return WaveVectors(self.points[kept], begins, of_points[kept], self.weights[kept], cell, k_cutoff)

    def check(self, cell: torch.Tensor) -> None:
        """Raise if prepared for another number of systems; warn if ``k_cutoff`` is not covered in this cell."""
        n_systems = self.point_begin.shape[0] - 1
        if cell.shape[0] != n_systems:
            raise ValueError(
                f"`miller_indices` are prepared for {n_systems} systems, but there are {cell.shape[0]}. {ELSEWHERE}"
            )
        if self.k_cutoff is None or not may_read(cell):
            return
        stretch = self.stretch_to(cell)
        worst = int(stretch.argmax())
        if stretch[worst] > MOST_STRETCH:
            asked = float(on_host(self.k_cutoff)[worst])
            notify(
                f"the k-vectors were prepared for another cell, which system {worst} exceeds by a factor of "
                f"{stretch[worst]:.3g} in some direction: here they are complete up to {asked / stretch[worst]:.4g} "
                f"instead of {asked:.4g}. Prepare them again for this cell. {ELSEWHERE}",
                AccuracyWarning,
                kind="stretched cell",
            )


MOST_STRETCH = 1.1
"""Stretch of a cell, in any direction, beyond which a warning says that prepared k-vectors are incomplete. At this
stretch the error of a sum at 1e-6 has grown tenfold."""

ELSEWHERE = (
    "If the cell should be the same: prepared data may come from another process, through buffers that "
    "DistributedDataParallel synchronises, or from a state dict"
)
"""The end of messages about data that were prepared for another cell."""


def _equally_many(op: Callable[[], Callable[..., tuple[torch.Tensor, ...]]]) -> Callable[..., Any]:
    """The rule for ``vmap``: each slice has its own k-vectors, and its last system has further ones without weight."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], Any]:
        slices = [op()(*given) for given in given_slices(info.batch_size, in_dims, args)]
        most = max(points.shape[0] for points, *_ in slices)
        padded = []
        for points, begin, system, weights in slices:
            more = most - points.shape[0]
            ends = torch.cat([begin[:-1], begin[-1:] + more])
            last = system.new_full((more,), begin.shape[0] - 2)
            padded.append(
                (
                    torch.cat([points, points.new_zeros(more, 3)]),
                    ends,
                    torch.cat([system, last]),
                    torch.cat([weights, weights.new_zeros(more, 4)]),
                )
            )
        return tuple(torch.stack(parts) for parts in zip(*padded)), (0,) * len(_POINTS)

    return rule


_CHOICE: Any = {"outputs": _POINTS, "grad_arrays": [], "backward": "none", "trusted": True}


@warp_custom_op("nvalchemiops::points_within", **_CHOICE, vmap=_equally_many(lambda: points_within))
def points_within(cell: torch.Tensor, k_cutoff: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """K-vectors of cells (n_systems, 3, 3) up to lengths (n_systems,). Reads both on the host.

    A system with a singular cell, or a length that is not positive, gets weights that are NaN, as its results then are.
    """
    return _points_within(on_host(cell).astype(np.float64), k_cutoff)


@warp_custom_op("nvalchemiops::chosen_points", **_CHOICE, vmap=_equally_many(lambda: chosen_points))
def chosen_points(cell: torch.Tensor, k_cutoff: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`points_within` for cells rounded in steps: the k-vectors stay the same during small changes of the cell."""
    return _points_within(core.in_steps(on_host(cell).astype(np.float64)), k_cutoff)


def points_on_host(cell: np.ndarray, k_cutoff: np.ndarray) -> tuple[torch.Tensor, ...]:
    """`chosen_points` on a CPU. They are kept: copy them before a change."""
    return _kept_within(core.in_steps(cell), k_cutoff.clip(None, _LONGEST))


def points_of_systems(cell: np.ndarray, k_cutoff: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Points and weights of `chosen_points` for each of the systems."""
    lattice = core.in_steps(cell)
    return [points[:2] for points in _within([c.tobytes() for c in lattice], k_cutoff.clip(None, _LONGEST).tolist())]


_LONGEST = 1e60
"""Lengths are clipped so that the number of k-vectors does not overflow before it is checked."""


def _points_within(lattice: np.ndarray, k_cutoff: torch.Tensor) -> tuple[torch.Tensor, ...]:
    found = _kept_within(lattice, on_host(k_cutoff).astype(np.float64).clip(None, _LONGEST))
    # copies: compiled code may write into the results of operators
    return tuple([t.to(k_cutoff.device, copy=True) for t in found])


@warp_custom_op("nvalchemiops::points_of_indices", **_CHOICE, vmap=_equally_many(lambda: points_of_indices))
def points_of_indices(cell: torch.Tensor, miller_indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """K-vectors with these Miller indices, (n, 3) for all systems or (n_systems, n, 3). Reads them on the host."""
    indices = on_host(miller_indices)
    lists = [indices] * cell.shape[0] if indices.ndim == 2 else list(indices)
    return joined([_of_indices(np.ascontiguousarray(n, dtype=np.int64).tobytes()) for n in lists], cell.device)


def box_points(bounds: tuple[int, int, int], n_systems: int, device: torch.device) -> WaveVectors:
    """All k-vectors up to these Miller indices, for each of the systems. Reads nothing."""
    axes = [torch.arange(bound + 1, dtype=torch.int32, device=device) for bound in bounds]
    points = torch.cartesian_prod(*axes).reshape(-1, 3)
    x, y, z = ((points[:, axis] > 0).to(torch.float64) for axis in range(3))
    one = torch.ones_like(x)
    weights = (1.0 + x).unsqueeze(1) * torch.stack([one, z, y, y * z], 1)
    n_points = points.shape[0]
    systems = torch.arange(n_systems + 1, dtype=torch.int32, device=device)
    of_point = systems[:-1].repeat_interleave(n_points)
    return WaveVectors(points.repeat(n_systems, 1), systems * n_points, of_point, weights.repeat(n_systems, 1))


_Points = tuple[np.ndarray, np.ndarray, float, float]
"""Points and weights of a system, and the lengths between which no k-vector is; for these see `core.Points`."""

MOST_KEPT = 256
"""Number of pairs (cell, length) whose k-vectors are kept: some systems of a batch may return in the next call."""

_kept: Kept[_Points] = Kept(MOST_KEPT)


class _Batch(NamedTuple):
    """The k-vectors of a batch: the inverses of the cells for which they were chosen, and tensors on the host."""

    inverse: np.ndarray
    each: list[_Points]
    tensors: tuple[torch.Tensor, ...]

    def unchanged(self, lattice: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Whether each system has the same k-vectors in another cell.

        Lengths of k-vectors change at most by the strain, in relative terms, and there is none near the cutoff.
        """
        longest, next_one = (np.array([points[n] for points in self.each]) for n in (2, 3))
        with np.errstate(invalid="ignore", over="ignore"):
            strain = np.linalg.norm(self.inverse @ lattice - np.eye(3), axis=(1, 2)) + 1e-9
            return (longest <= lengths * (1.0 - strain)) & (next_one > lengths * (1.0 + strain))


_batches: KeptTensors[_Batch] = KeptTensors(16)
"""By the lengths up to which k-vectors were chosen: the latest cells of a run."""


@eager
def _kept_within(lattice: np.ndarray, lengths: np.ndarray) -> tuple[torch.Tensor, ...]:
    """The k-vectors of cells up to these lengths; where cells have changed a little, those of before."""
    key = lengths.tobytes()
    before = _batches.find(key)
    changed = np.ones(len(lattice), dtype=bool) if before is None else ~before.unchanged(lattice, lengths)
    if before is not None and not changed.any():
        return before.tensors
    found = iter(_within([c.tobytes() for c in lattice[changed]], lengths[changed].tolist()))
    if before is None:
        each, inverse = list(found), np.zeros_like(lattice)
    else:
        each = [next(found) if is_new else old for is_new, old in zip(changed, before.each)]
        inverse = before.inverse.copy()
    regular = changed & np.array([next_one > 0.0 for *_, next_one in each], dtype=bool)
    inverse[regular] = np.linalg.inv(lattice[regular])
    with torch.inference_mode(False):  # other calls will use them
        tensors = joined([points[:2] for points in each], torch.device("cpu"), in_steps=True)
    _batches.keep(key, _Batch(inverse, each, tensors))
    return tensors


def _within(cells: Sequence[bytes], lengths: Sequence[float]) -> list[_Points]:
    """Points and weights of each system: kept ones are reused, all others are computed together."""
    keys = list(zip(cells, lengths))
    found: dict[Any, Any] = {key: _kept.find(key) for key in keys}
    new = [key for key, points in found.items() if points is None]
    if new:
        lattice = np.frombuffer(b"".join([cell for cell, _ in new])).reshape(-1, 3, 3)
        for key, points in zip(new, _points_of(lattice, np.array([length for _, length in new]))):
            found[key] = points
            _kept.keep(key, points)
    return [found[key] for key in keys]


def _points_of(lattice: np.ndarray, lengths: np.ndarray) -> list[_Points]:
    """The points of each system; if its cell or length is not valid, a few with which all of its results are NaN."""
    known = lengths > 0.0
    try:
        unit_vectors(lattice, np.ones(lattice.shape[:2], dtype=bool))
    except ValuesError:
        if len(lengths) > 1:
            return [_points_of(lattice[n : n + 1], lengths[n : n + 1])[0] for n in range(len(lengths))]
        known[:] = False
    points, weights, begin, longest, next_one = core.points_within(lattice[known], lengths[known])
    # copies: views would keep the memory of all systems alive
    each = zip(
        (points[i:j].copy() for i, j in itertools.pairwise(begin)),
        (weights[i:j].copy() for i, j in itertools.pairwise(begin)),
        longest.tolist(),
        next_one.tolist(),
    )
    few, used = core.points_of_indices(np.ones((1, 3), np.int64))  # the origin alone would leave forces as they are
    unknown = (few, used * np.nan, np.inf, 0.0)
    return [next(each) if is_known else unknown for is_known in known]


@functools.lru_cache(maxsize=64)
@eager
def _of_indices(indices: bytes) -> tuple[np.ndarray, np.ndarray]:
    return core.points_of_indices(np.frombuffer(indices, dtype=np.int64).reshape(-1, 3))


STEPS_OF_NUMBERS = 16
"""Steps per factor of two in which numbers of chosen points grow, so that calls whose k-vectors differ share a plan."""


def joined(
    lists: Sequence[tuple[np.ndarray, np.ndarray]], device: torch.device, in_steps: bool = False
) -> tuple[torch.Tensor, ...]:
    """The points of all systems; ``in_steps`` with further ones of the last system, whose weights are zero."""
    sizes = np.array([points.shape[0] for points, _ in lists], dtype=np.int64)
    if in_steps and lists:
        count = int(sizes.sum())
        more = -count % max(STEPS_OF_NUMBERS, (1 << (count // STEPS_OF_NUMBERS).bit_length()) // 2)
        lists, sizes[-1] = [*lists, (np.zeros((more, 3), dtype=np.int32), np.zeros((more, 4)))], sizes[-1] + more
    begin = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    system = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    points = np.concatenate([np.zeros((0, 3), dtype=np.int32), *(points for points, _ in lists)])
    weights = np.concatenate([np.zeros((0, 4)), *(weights for _, weights in lists)])
    return tuple(torch.from_numpy(values).to(device) for values in (points, begin, system, weights))


# -- public: lists of k-vectors -------------------------------------------------------------------


def generate_ewald_miller_indices(
    cell: torch.Tensor, k_cutoff: float | torch.Tensor, miller_bounds: Any = None
) -> torch.Tensor:
    """Miller indices of a box that holds all k-vectors up to ``k_cutoff``, one of each pair k and -k.

    Parameters
    ----------
    cell : (3, 3) or (n_systems, 3, 3) tensor, length
    k_cutoff : float or (n_systems,) tensor, 1/length
    miller_bounds : (int, int, int), optional
        Largest index along each axis. By default it follows from ``k_cutoff``, and values are read on the host.

    Returns
    -------
    (n_k, 3) int64 tensor
        The same for all systems of a batch. The first non-zero index of each row is positive; the origin is left out.

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message.
    """
    lattice = check_cells_alone(cell)
    if miller_bounds is None:
        lengths = numbers_of_systems("k_cutoff", k_cutoff, lattice.shape[0], cell.device)
        all_bounds = core.bounds(on_host(lattice.detach()).astype(np.float64), lengths)
        most = all_bounds.max(axis=0)
        _check_number("k_cutoff", most)
        x, y, z = (int(bound) for bound in most)
    else:
        x, y, z = check_bounds(miller_bounds)
    return torch.from_numpy(core.half_box((x, y, z))).to(cell.device)


def k_vectors_from_miller_indices(cell: torch.Tensor, miller_indices: torch.Tensor) -> torch.Tensor:
    """K-vectors of Miller indices, differentiable in the cell.

    Parameters
    ----------
    cell : (3, 3) or (n_systems, 3, 3) tensor, length
    miller_indices : (n_k, 3) int32 or int64 tensor

    Returns
    -------
    (n_k, 3) or (n_systems, n_k, 3) tensor, 1/length
        Rows k with ``k @ cell[a] = 2 π n_a``. There is no leading dimension for one system.

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message.
    """
    lattice = check_cells_alone(cell)
    checks.check_index("miller_indices", miller_indices, cell, (None, 3))
    inverse = lattice_of(lattice, None, 0).inverse
    k_vectors = 2.0 * math.pi * (miller_indices.to(torch.float64) @ inverse.mT)
    return (k_vectors[0] if k_vectors.shape[0] == 1 else k_vectors).to(cell.dtype)


def generate_k_vectors_ewald_summation(
    cell: torch.Tensor, k_cutoff: float | torch.Tensor, miller_bounds: Any = None
) -> torch.Tensor:
    """K-vectors (n_k, 3) or (n_systems, n_k, 3), 1/length, for `ewald_summation`.

    Calls `generate_ewald_miller_indices`, which has the same arguments, then `k_vectors_from_miller_indices`.
    """
    return k_vectors_from_miller_indices(cell, generate_ewald_miller_indices(cell, k_cutoff, miller_bounds))


_SQUARE_AT_ORIGIN = 1e-12
"""Value of k² at the origin, 1/length². Callers divide by k², and 0 would give NaN in values and gradients."""


def generate_k_vectors_pme(
    cell: torch.Tensor, mesh_dimensions: Sequence[int], reciprocal_cell: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """K-vectors of a mesh in the order of ``torch.fft.rfftn``, and their squares.

    Parameters
    ----------
    cell : (3, 3) or (n_systems, 3, 3) tensor, length
    mesh_dimensions : (int, int, int)
    reciprocal_cell : (3, 3) or (n_systems, 3, 3) tensor, 1/length, optional
        ``2 π`` times the inverse of the cell; by default it is computed.

    Returns
    -------
    k_vectors : ([n_systems,] n_x, n_y, n_z // 2 + 1, 3) tensor, 1/length
        An index n/2 of an even axis has one sign of the two that a mesh cannot distinguish. In a skewed cell their
        lengths differ: factors for such entries should be means over both signs, or zero, to be symmetric.
    k_squared : ([n_systems,] n_x, n_y, n_z // 2 + 1) tensor, 1/length²
        At the origin 1e-12 instead of zero, so that callers may divide by it.
    """
    lattice = check_cells_alone(cell)
    dimensions = check_mesh(mesh_dimensions)
    if reciprocal_cell is None:
        reciprocal = 2.0 * math.pi * lattice_of(lattice, None, 0).inverse
    else:
        reciprocal = check_cells_alone(reciprocal_cell, "reciprocal_cell").to(torch.float64)
        if reciprocal.shape != lattice.shape:
            raise ValueError(
                f"`reciprocal_cell` is for {reciprocal.shape[0]} systems, but `cell` is for {lattice.shape[0]}"
            )
    axes = [mesh_frequencies(n, axis == 2, cell.device) for axis, n in enumerate(dimensions)]
    x, y, z = (indices.reshape([-1 if a == axis else 1 for a in range(3)] + [1]) for axis, indices in enumerate(axes))
    of_x, of_y, of_z = (column.reshape(-1, 1, 1, 1, 3) for column in reciprocal.unbind(-1))
    k_vectors = x * of_x + y * of_y + z * of_z
    k_squared = k_vectors.square().sum(-1)
    k_squared = torch.where(k_squared == 0.0, _SQUARE_AT_ORIGIN, k_squared)
    if cell.ndim == 2 or cell.shape[0] == 1:
        k_vectors, k_squared = k_vectors[0], k_squared[0]
    return k_vectors.to(cell.dtype), k_squared.to(cell.dtype)


def generate_k_squared_pme(
    cell: torch.Tensor, mesh_dimensions: Sequence[int], reciprocal_cell: torch.Tensor | None = None
) -> torch.Tensor:
    """The second result of `generate_k_vectors_pme`, which has the same arguments."""
    return generate_k_vectors_pme(cell, mesh_dimensions, reciprocal_cell)[1]


def prepare_wave_vectors(cell: torch.Tensor, k_cutoff: float | torch.Tensor) -> WaveVectors:
    """Choose the k-vectors up to a length once, for repeated calls: ``miller_indices`` of `ewald_summation`.

    They are kept as integers, so that energies are continuous when the cell changes. Reads values on the host. If the
    cell later becomes longer by more than a tenth in some direction, k-vectors up to ``k_cutoff`` are missing: on a CPU
    the sum then issues an `AccuracyWarning`.

    Parameters
    ----------
    cell : (3, 3) or (n_systems, 3, 3) tensor, length
    k_cutoff : float or (n_systems,) tensor, 1/length

    Returns
    -------
    WaveVectors

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message.
    """
    cells = check_cells_alone(cell).detach()
    lengths = per_system("k_cutoff", k_cutoff, cells.shape[0], cell.device).detach()
    # copies, unaffected by changes of the caller's tensors
    cells, lengths = cells.to(torch.float64, copy=True), lengths.clone()
    return WaveVectors(*points_within(cells, lengths))._replace(cell=cells, k_cutoff=lengths)


# -- checks ---------------------------------------------------------------------------------------


def check_cells_alone(cell: Any, name: str = "cell") -> torch.Tensor:
    """The cell as (n_systems, 3, 3), checked without positions."""
    checks.check_tensor(name, cell)
    checks.check_place(name, cell)
    if cell.dtype not in checks.FLOATS:
        raise TypeError(f"`{name}` must be float32 or float64, got {cell.dtype}")
    if cell.ndim not in (2, 3) or cell.shape[-2:] != (3, 3):
        raise ValueError(f"`{name}` must have shape (3, 3) or (n_systems, 3, 3), got {tuple(cell.shape)}")
    if cell.shape[0] == 0:
        raise ValueError(f"`{name}` holds no system: there is nothing to choose or prepare")
    cell = cell.resolve_neg().reshape(-1, 3, 3)
    check_cells(cell)
    return cell


def check_bounds(miller_bounds: Any) -> tuple[int, int, int]:
    """Largest Miller indices as three ints."""
    if isinstance(miller_bounds, torch.Tensor):
        checks.check_tensor("miller_bounds", miller_bounds)
        checks.check_place("miller_bounds", miller_bounds)
        if miller_bounds.numel() != 3 or miller_bounds.is_floating_point():
            raise ValueError(f"`miller_bounds` must be three whole numbers, got shape {tuple(miller_bounds.shape)}")
        miller_bounds = miller_bounds.flatten().tolist()
    try:
        bounds = tuple(checks.check_int("miller_bounds", b) for b in miller_bounds)
    except TypeError:
        raise TypeError(f"`miller_bounds` must be three whole numbers, got {miller_bounds!r}") from None
    if len(bounds) != 3 or min(bounds) < 0:
        raise ValueError(f"`miller_bounds` must be three non-negative integers, got {bounds}")
    _check_number("miller_bounds", bounds)
    return bounds


def _check_number(name: str, bounds: Any) -> None:
    """Raise, naming the argument ``name``, if a box of Miller indices holds more than `MOST_VECTORS` vectors."""
    n_x, n_y, n_z = (2.0 * float(bound) + 1.0 for bound in bounds)
    if not 0.0 <= 0.5 * n_x * n_y * n_z <= core.MOST_VECTORS:
        raise ValuesError(f"`{name}`: this cell has {0.5 * n_x * n_y * n_z:.1e} k-vectors up to it, which is too many")


def numbers_of_systems(name: str, value: Any, n_systems: int, device: torch.device) -> np.ndarray:
    """`per_system` on the host: a tensor is read and checked, also if that has to wait for a GPU."""
    return on_host(per_system(name, value, n_systems, device, wait=True).detach())


def per_system(name: str, value: Any, n_systems: int, device: torch.device, wait: bool = False) -> torch.Tensor:
    """A positive number, or one for each system, as float64 tensor (n_systems,) that keeps its graph."""
    if type(value) is float and 0.0 < value < math.inf:
        return torch.full((n_systems,), value, dtype=torch.float64, device=device)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        number = checks.check_positive(name, value)  # checked even where values of tensors are not read
        return torch.full((n_systems,), number, dtype=torch.float64, device=device)
    if isinstance(value, torch.Tensor):
        checks.check_tensor(name, value)
        checks.check_place(name, value)
        tensor = checks.moved_to(device, name, value)
    else:
        try:
            # through numpy, which keeps Python's float64
            numbers = np.asarray(value)
            tensor = checks.made_on(device, numbers) if is_capturing() else torch.as_tensor(numbers, device=device)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"`{name}` must be a number or a tensor, got {type(value).__name__}") from None
    if tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f"`{name}` must be real numbers, got {tensor.dtype}")
    if tuple(tensor.shape) not in ((), (1,), (n_systems,)):
        raise ValueError(f"`{name}` must be a number or have shape ({n_systems},), got {tuple(tensor.shape)}")
    if may_read(tensor, wait=wait) and not are_all(lambda number: (number > 0.0) & (number < math.inf), tensor):
        raise ValuesError(f"`{name}` must be positive and finite")
    tensor = tensor.to(torch.float64)
    return tensor if tensor.shape == (n_systems,) else tensor.expand(n_systems)
