"""Transforms in pencils, with all ranks in one process: a thread for each, and messages through its memory."""

import itertools
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemiops.torch.distributed import transform
from nvalchemiops.torch.distributed.mesh import MeshDivision
from nvalchemiops.torch.distributed.pencils import division_of, grid_for, kept_on, load_of, numbers_for, ranks_on
from tests.distributed.test_bricks import LENGTH, cut, places

F64 = torch.float64


class Ranks:
    """Threads that stand in for ranks: as `swap_rows`, and as the groups of ranks."""

    def __init__(self, n_ranks: int) -> None:
        self.n, self.barrier, self.here = n_ranks, threading.Barrier(n_ranks, timeout=60.0), threading.local()
        self.sent: list[dict] = [{} for _ in range(n_ranks)]

    def swap_rows(self, values, send, receive, group, ranks):
        """What `communication.swap_rows` does."""
        rank = self.here.rank
        self.sent[rank] = dict(zip(ranks, values.split(list(send)), strict=True))
        self.barrier.wait()
        rows = [self.sent[other].get(rank, values[:0]) for other in ranks]
        assert [len(part) for part in rows] == list(receive), "what others send to this rank"
        assert all(rank not in sent or other in ranks for other, sent in enumerate(self.sent))
        found = torch.cat([values[:0], *rows])
        self.barrier.wait()
        return found

    def run(self, call):
        """``call(rank)`` of all ranks."""

        def one(rank):
            self.here.rank = rank
            try:
                return call(rank)
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.n) as pool:
            calls = [pool.submit(one, rank) for rank in range(self.n)]
        errors = [error for error in (done.exception() for done in calls) if error is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [done.result() for done in calls]


@pytest.fixture(scope="module")
def stand_in():
    with pytest.MonkeyPatch.context() as patch:

        def make(n_ranks):
            ranks = Ranks(n_ranks)
            patch.setattr(transform, "swap_rows", ranks.swap_rows)
            patch.setattr(transform, "group_of", lambda number: number)
            return ranks

        yield make


def points_of(start, size, mesh):
    """Indices of the points of a window."""
    axes = (torch.arange(a, a + n) % m for a, n, m in zip(start, size, mesh))
    return (slice(None), slice(None), *torch.meshgrid(*axes, indexing="ij"))


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 10**6), n_ranks=st.integers(1, 13), by_grid=st.booleans(), data=st.data())
def test_windows_are_transformed_as_one_mesh(stand_in, seed, n_ranks, by_grid, data):
    """Any grid, with idle ranks, odd meshes, and meshes smaller than the grid; there and back."""
    mesh = tuple(data.draw(st.integers(1, 12)) for _ in range(3))
    grids = [(r, c) for r, c in itertools.product(range(1, n_ranks + 1), repeat=2) if r * c <= n_ranks]
    grid = data.draw(st.sampled_from(grids)) if by_grid else None
    n_meshes = data.draw(st.sampled_from([(1, 1), (2, 1), (1, 3)]))
    random = np.random.default_rng(seed)
    sizes = random.integers(1, np.array(mesh) + 1, (n_ranks, 3))
    starts = random.integers(-15, 15, (n_ranks, 3))
    windows = [torch.from_numpy(random.standard_normal((*n_meshes, *size))) for size in sizes]
    whole = torch.zeros(*n_meshes, *mesh, dtype=F64)
    places = [points_of(start, size, mesh) for start, size in zip(starts, sizes)]
    for values, place in zip(windows, places):
        whole[place] += values
    expected = torch.view_as_real(torch.fft.rfftn(whole, dim=(-3, -2, -1)))
    factor = torch.from_numpy(random.standard_normal(expected.shape))
    back = torch.view_as_complex(expected * factor)
    expected_back = torch.fft.irfftn(back, s=mesh, dim=(-3, -2, -1), norm="forward")
    told = [numbers_for(rank, mesh, starts, sizes, grid) for rank in range(n_ranks)]
    count = torch.zeros(expected.shape[2:5])

    def one(rank):
        of_y, of_z = (slice(*ends) for ends in division_of(mesh, told[rank], n_ranks).planes)
        spectrum = transform.window_spectrum(windows[rank], mesh, told[rank], n_ranks, 0)
        values = transform.window_values(spectrum * factor[..., of_y, of_z, :], mesh, told[rank], n_ranks, 0)
        return (of_y, of_z), spectrum, values

    for rank, ((of_y, of_z), spectrum, values) in enumerate(stand_in(n_ranks).run(one)):
        count[:, of_y, of_z] += 1
        torch.testing.assert_close(spectrum, expected[..., of_y, of_z, :], rtol=0.0, atol=1e-11 * math.prod(mesh))
        torch.testing.assert_close(values, expected_back[places[rank]], rtol=0.0, atol=1e-11 * math.prod(mesh) ** 2)
    assert count.eq(1.0).all(), "each plane on one rank"


# -- what a rank sends ----------------------------------------------------------------------------


def windows_of(kind, n_ranks, mesh, grid=None):
    """The first points and the sizes (n_ranks, 3) of the windows of all ranks."""
    bricks, _ = cut(places(kind), LENGTH * np.eye(3), n_ranks, reach=6.0, grid=grid)
    given = {"n_ranks": n_ranks, "number": 0, "bricks": bricks, "rank": 0, "skin": 1.0}
    domain = SimpleNamespace(**given, cells_left=torch.zeros(1, 3, dtype=F64), device=torch.device("cpu"))
    return MeshDivision(domain, mesh, 5)._all_windows(domain, 5)


@pytest.mark.parametrize("n_ranks", [5, 13, 64])
@pytest.mark.parametrize("kind", ["bulk", "two clusters"])
def test_what_a_rank_sends_another_one_expects(kind, n_ranks):
    mesh = (96, 90, 100)
    starts, sizes = windows_of(kind, n_ranks, mesh)
    divisions = [division_of(mesh, numbers_for(rank, mesh, starts, sizes), n_ranks) for rank in range(n_ranks)]
    sent, received = np.zeros((2, n_ranks, n_ranks), dtype=int)
    for rank, division in enumerate(divisions):
        for table, overlaps in ((sent, division.of_window), (received, division.of_pencil)):
            for other, overlap in overlaps.items():
                table[rank, other] = math.prod(overlap.shape)
    assert (sent == received.T).all()
    kept = np.array([math.prod(division.here.shape) for division in divisions])
    assert (sent.sum(1) + kept == sizes.prod(1)).all(), "each point of a window once"
    grid = grid_for(mesh, starts, sizes)
    if math.prod(grid) == n_ranks:
        assert kept.mean() == kept_on(grid, mesh, starts, sizes)


@pytest.mark.parametrize(("n_ranks", "grid"), [(2, (2, 1)), (4, (4, 1)), (16, (4, 4)), (64, (8, 8))])
def test_pencils_follow_bricks(n_ranks, grid):
    """Of a bulk, whose bricks are not cut along the last axis: only the margins of windows are sent."""
    mesh = (256, 256, 256)
    starts, sizes = windows_of("bulk", n_ranks, mesh)
    assert grid_for(mesh, starts, sizes) == grid
    assert kept_on(grid, mesh, starts, sizes) > 0.95 * math.prod(mesh) / n_ranks


def test_ranks_are_where_their_bricks_are():
    """Of bricks in a grid of 4 x 4 x 4, the four that are behind each other have the four pencils in their place."""
    mesh = (64, 64, 64)
    starts, sizes = windows_of("bulk", 64, mesh, grid=(4, 4, 4))
    assert kept_on((8, 8), mesh, starts, sizes) > 0.9 * 64**3 / 64 / 4
    ranks = ranks_on((8, 8), starts, sizes)
    assert sorted(ranks.flatten()) == list(range(64))
    assert {
        len(set(ranks[2 * i : 2 * i + 2, 2 * j : 2 * j + 2].flatten() // 4)) for i in range(4) for j in range(4)
    } == {1}


def test_few_partners_among_many_ranks():
    """Partners of the order of the root of the number of ranks, primes too; all but a few ranks have work."""
    for n_ranks, n in ((64, 225), (997, 225), (1000, 450), (4096, 450)):
        side = np.array([n / n_ranks**0.5, n / n_ranks**0.5, n])
        sizes = np.tile(np.ceil(side).astype(int), (n_ranks, 1))
        starts = np.random.default_rng(0).integers(0, n, (n_ranks, 3))
        rows, columns = grid_for((n, n, n), starts, sizes)
        assert rows * columns > 0.95 * n_ranks
        assert rows + columns < 2.2 * n_ranks**0.5
        load = load_of((n, n, n), side.tolist(), n_ranks, np.array([rows, n_ranks]), np.array([columns, 1]))
        assert load.of_messages[0] < load.of_messages[1], "less than slabs"
    # ranks beyond the planes of slabs have work, too
    told = numbers_for(63, (20, 20, 20), np.zeros((64, 3), dtype=int), np.full((64, 3), 20), (8, 8))
    assert math.prod(division_of((20, 20, 20), told, 64).pencil) > 0
