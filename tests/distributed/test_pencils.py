"""Transforms in pencils, with all ranks in one process: a thread for each, and messages through its memory."""

import itertools
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemiops.torch.distributed import transform
from nvalchemiops.torch.distributed.pencils import division_of, told_to

F64 = torch.float64


class Ranks:
    """Threads that stand in for ranks: as `swap_rows`, and as the groups of ranks."""

    def __init__(self, n_ranks: int) -> None:
        self.n, self.barrier, self.here = n_ranks, threading.Barrier(n_ranks, timeout=60.0), threading.local()
        self.sent: list = [None] * n_ranks
        self.sizes: list[list[list[int]]] = [[] for _ in range(n_ranks)]

    def swap_rows(self, values, send, receive, group):
        """What `communication.swap_rows` does; it counts what a rank sends to each."""
        rank = self.here.rank
        self.sent[rank] = values.split(list(send))
        self.sizes[rank].append(list(send))
        self.barrier.wait()
        rows = [self.sent[other][rank] for other in range(self.n)]
        assert [len(part) for part in rows] == list(receive)
        found = torch.cat(rows)
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
    told = [told_to(rank, mesh, starts, sizes, grid) for rank in range(n_ranks)]
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
