"""Bricks of any number of ranks in one process, which holds the atoms of all: balance, ghosts, windows."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from nvalchemiops.torch.distributed.bricks import ONE, Bricks, Frames, check_grid, make_bricks, shape_of

F64 = torch.float64
LENGTH = 70.0


def alone(values):
    """The sum, or the maximum, over one process."""
    return values


def cut(x, cell, n_ranks, *, pbc=True, batch_idx=None, weights=None, reach=8.0, grid=None):
    """The bricks, and the coordinates of the atoms in them."""
    n_systems = 1 if batch_idx is None else int(batch_idx.max()) + 1
    periodic = np.broadcast_to(np.array(pbc), (n_systems, 3))
    lattice = np.broadcast_to(np.array(cell), (n_systems, 3, 3))
    frames = Frames.of(lattice, periodic.copy())
    coordinates = frames.coordinates(x, batch_idx)
    shape = shape_of(n_ranks, grid)
    bricks = make_bricks(frames, coordinates, batch_idx, weights, reach, shape, alone, alone)
    return bricks, bricks.wrapped(coordinates, batch_idx)[0]


def places(kind: str, n: int = 15_000) -> torch.Tensor:
    """Positions in a cubic cell."""
    generator = torch.Generator().manual_seed(n)
    x = torch.rand(n, 3, generator=generator, dtype=F64)
    normal = torch.randn(n, 3, generator=generator, dtype=F64)
    if kind == "two clusters":
        x = torch.where(torch.arange(n).unsqueeze(1) < n // 3, 0.2, 0.7) + 0.03 * normal
    elif kind == "slab":
        x[:, 2] *= 0.1
    elif kind == "tilted slab":
        x[:, 2] = x[:, 0] + x[:, 1] + 0.1 * x[:, 2]
    elif kind == "droplet":
        x = 0.5 + 0.25 * normal / normal.norm(dim=1, keepdim=True) * x[:, :1] ** (1 / 3)
    elif kind == "corner":  # around the origin, in all eight corners
        x = 0.05 * normal
    elif kind == "dense layer":
        x[: n // 2, 1] *= 0.1
    return LENGTH * x


KINDS = ("bulk", "two clusters", "slab", "tilted slab", "droplet", "corner", "dense layer")


@pytest.mark.parametrize("kind", KINDS)
def test_work_is_balanced(kind):
    """For every number of ranks, whether all atoms make the same work or not: to a hundredth, and to two atoms."""
    x = places(kind)
    work = torch.from_numpy(np.random.default_rng(1).integers(ONE // 8, ONE, len(x))).double()
    work[x[:, 0] > 0.3 * LENGTH] *= 0.3
    for n_ranks, weights in itertools.product((2, 7, 64, 512), (None, work)):
        bricks, inside = cut(x, LENGTH * np.eye(3), n_ranks, weights=weights)
        of_ranks = torch.bincount(bricks.ranks_of(inside), weights, minlength=n_ranks).double()
        atom = 1.0 if weights is None else float(weights.max())
        assert float(of_ranks.max()) < 1.01 * float(of_ranks.mean()) + 2.0 * atom, (n_ranks, of_ranks.max())
        assert abs(float(of_ranks.max() / of_ranks.mean()) - bricks.largest) < 1e-9, "as the histograms say"


class Deterministic(TorchDispatchMode):
    """As on a GPU with ``torch.use_deterministic_algorithms(True)``."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.bincount.default and len(args) > 1 and args[1] is not None:
            raise RuntimeError("_bincount_cuda does not have a deterministic implementation")
        return func(*args, **kwargs or {})


def test_work_is_summed_by_what_is_deterministic_on_a_gpu():
    x = places("bulk", 500)
    for weights in (None, torch.arange(500) % 7 + 1):
        with Deterministic():
            found, _ = cut(x, LENGTH * np.eye(3), 5, weights=weights)
        assert np.array_equal(found.cut, cut(x, LENGTH * np.eye(3), 5, weights=weights)[0].cut)


def test_cuts_avoid_atoms_where_they_can():
    """A cut through a gap makes no ghosts; one of a slab, or of a long box, is across it."""
    x = places("two clusters")  # a third of the atoms, and two thirds
    bricks, inside = cut(x, LENGTH * np.eye(3), 3, reach=3.0)
    of_first = bricks.seen_by(inside[bricks.ranks_of(inside) == 0], None, 3.0, 0)[1]
    assert of_first.tolist() == [0, 0, 0]
    assert cut(places("slab"), LENGTH * np.eye(3), 64)[0].cuts_along[2] == 0
    # slabs, until cuts across them make fewer ghosts; then pencils, as a mesh has them, until these are thin
    bulk = [cut(places("bulk"), LENGTH * np.eye(3), n)[0].cuts_along.tolist() for n in (2, 4, 8, 16)]
    assert bulk == [[1, 0, 0], [3, 0, 0], [3, 4, 0], [3, 12, 0]]
    assert cut(places("bulk"), LENGTH * np.eye(3), 512)[0].cuts_along[2] > 0
    long = places("bulk") * torch.tensor([1.0, 10.0, 1.0])
    assert cut(long, np.diag([LENGTH, 10.0 * LENGTH, LENGTH]), 8)[0].cuts_along.tolist() == [0, 7, 0]


def test_planes_of_a_crystal_have_one_owner():
    """Cuts are between the planes, so rounding of positions changes no owner, wherever the origin is."""
    axis = torch.arange(12, dtype=F64)
    sites = torch.cartesian_prod(axis, axis, axis)
    for origin in (0.0, 0.25, 1.0 / 3.0):
        x = sites + origin
        bricks, inside = cut(x, 12.0 * np.eye(3), 8)
        noise = 1e-9 * (torch.rand(inside.shape, dtype=F64) - 0.5)
        assert torch.equal(bricks.ranks_of(inside), bricks.ranks_of(inside + noise))
        assert bricks.largest == 1.0


def test_numbers_of_a_grid_may_be_those_of_numpy():
    for grid in (np.array([2, 3, 1]), list(np.array([2, 3, 1])), (2, 3, 1)):
        assert repr(check_grid(grid, 6)) == "(2, 3, 1)"


def test_a_grid_cuts_slices_of_equal_work():
    x = places("droplet")
    bricks, inside = cut(x, LENGTH * np.eye(3), 24, grid=(2, 3, 4))
    assert bricks.cuts_along.tolist() == [1, 4, 18]
    rank = bricks.ranks_of(inside).long()
    for n_slices, axis in ((2, 0), (6, 1), (24, 2)):
        part = rank * n_slices // 24
        assert int(torch.bincount(part).amax()) < 1.02 * len(x) / n_slices
        # within the slice before, slices along this axis do not overlap
        ends = [(inside[part == k, axis].min(), inside[part == k, axis].max()) for k in range(n_slices)]
        among = {0: 2, 1: 3, 2: 4}[axis]
        for k in range(n_slices - 1):
            assert ends[k][1] < ends[k + 1][0] or (k + 1) % among == 0


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    seed=st.integers(0, 10**6),
    n_ranks=st.integers(1, 20),
    n_atoms=st.one_of(st.integers(0, 8), st.integers(0, 120)),
    several=st.booleans(),
    by_grid=st.booleans(),
    reach=st.floats(0.5, 7.0),
    spread=st.sampled_from([0.3, 1.0, 3.0]),
)
def test_ranks_see_all_atoms_within_reach(seed, n_ranks, n_atoms, several, by_grid, reach, spread):
    """Beside the distances of all images, for random cells, periodicities, weights, numbers of ranks, and batches.

    In angstrom or in nanometres, of which one, the unit of coordinates along open axes, is farther than ranks see.
    """
    random, unit = np.random.default_rng(seed), 0.1 if seed % 3 else 1.0
    reach *= unit
    n_systems = 3 if several and n_atoms else 1
    pbc = random.random((n_systems, 3)) < 0.6
    cells = unit * random.uniform(3.0, 14.0) * (np.eye(3) + 0.3 * (random.random((n_systems, 3, 3)) - 0.5))
    numbers = np.sort(random.integers(0, n_systems, n_atoms)) if n_systems > 1 else np.zeros(n_atoms, int)
    if n_systems > 1:
        numbers[-1] = n_systems - 1
    batch_idx = torch.from_numpy(numbers).int() if n_systems > 1 else None
    x = unit * spread * (random.random((n_atoms, 3)) - 0.5) * 14.0
    weights = torch.from_numpy(random.integers(1, ONE, n_atoms)).double() if seed % 2 else None
    grids = [g for g in itertools.product(range(1, n_ranks + 1), repeat=3) if math.prod(g) == n_ranks]
    bricks, inside = cut(
        torch.from_numpy(x), cells, n_ranks, pbc=pbc, batch_idx=batch_idx, weights=weights, reach=reach,
        grid=grids[seed % len(grids)] if by_grid else None,
    )  # fmt: skip
    rank = bricks.ranks_of(inside).numpy()
    low, high = bricks.boxes()
    assert (low <= high).all()
    assert ((inside.numpy() >= low[rank]) & (inside.numpy() <= high[rank])).all()
    # pairs of atoms of one system with images within reach
    near = np.zeros((n_atoms, n_atoms), dtype=bool)
    images = [range(-4, 5) if any(pbc[:, axis]) else (0,) for axis in range(3)]
    for image in itertools.product(*images):
        shift = np.einsum("sa,sab->sb", np.where(pbc, image, 0), cells)[numbers]
        vectors = x[None, :] + shift[None, :] - x[:, None]
        near |= (vectors**2).sum(2) < reach**2
    near &= numbers[:, None] == numbers[None, :]
    for this in range(n_ranks):
        mine = np.flatnonzero(rank == this)
        systems = None if batch_idx is None else batch_idx[mine]
        seen, counts = bricks.seen_by(inside[mine], systems, reach, this)
        assert len(counts) == n_ranks and counts[this] == 0 and counts.sum() == len(seen)
        for other, atoms in enumerate(seen.split(counts.tolist())):
            assert atoms.diff().gt(0).all(), "each atom once, in order"
            if other != this:
                needed = mine[near[np.ix_(mine, rank == other)].any(1)]
                assert set(needed) <= set(mine[atoms.numpy()])


def test_few_atoms_are_seen_in_vain():
    """Not more than the atoms in the box around a brick."""
    x = places("bulk")
    bricks, inside = cut(x, LENGTH * np.eye(3), 64, reach=5.0)
    rank = bricks.ranks_of(inside)
    for this in (0, 37):
        found = sum(int(bricks.seen_by(inside[rank == r], None, 5.0, r)[1][this]) for r in range(64))
        low, high = (ends[this].clip(0.0, 1.0) for ends in bricks.boxes())
        volume = np.minimum(high - low + 2.0 * 5.0 / LENGTH, 1.0).prod() - (high - low).prod()
        assert abs(found / (volume * len(x)) - 1.0) < 0.1


def test_the_tree_names_each_rank_once():
    for n_ranks, grid in ((1, None), (2, None), (13, None), (12, (2, 3, 2)), (64, None)):
        shape = shape_of(n_ranks, grid)
        below = shape.below[:, : n_ranks - 1]
        assert sorted(below.flatten()) == list(range(1, 2 * n_ranks - 1))
        bricks = Bricks(Frames.of(None, np.zeros((1, 3), bool)), shape, *(np.zeros(2 * n_ranks - 1),) * 2, 1.0)
        assert bricks.n_ranks == n_ranks
        assert len(shape.levels) <= math.ceil(math.log2(n_ranks)) or grid
