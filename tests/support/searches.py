"""Every way to ask for one list of one system, and what the tests of users' reports share."""

import numpy as np
import pytest
import torch

from nvalchemiops.torch import neighbors
from nvalchemiops.torch.neighbors import neighbor_list

F64 = torch.float64


def named(method, batched):
    def search(positions, cutoff, cell=None, pbc=None, **options):
        described = {"batch_idx": torch.zeros(len(positions), dtype=torch.int32)} if batched else {}
        return neighbor_list(positions, cutoff, cell, pbc, method=method, **described, **options)

    return search


def single(function):
    return lambda positions, cutoff, cell=None, pbc=None, **options: function(
        positions, cutoff, cell=cell, pbc=pbc, **options
    )


def batched(function):
    def search(positions, cutoff, cell=None, pbc=None, **options):
        idx = torch.zeros(len(positions), dtype=torch.int32)
        return function(positions, cutoff, batch_idx=idx, cell=cell, pbc=pbc, **options)

    return search


# every way to ask for one list of one system
SEARCHES = {
    "automatic": named(None, False),
    "naive": named("naive", False),
    "cell_list": named("cell_list", False),
    "automatic, batch": named(None, True),
    "batch_naive": named("batch_naive", True),
    "batch_cell_list": named("batch_cell_list", True),
    "cell_list()": single(neighbors.cell_list),
    "naive_neighbor_list()": single(neighbors.naive_neighbor_list),
    "batch_cell_list()": batched(neighbors.batch_cell_list),
    "batch_naive_neighbor_list()": batched(neighbors.batch_naive_neighbor_list),
}
every_search = pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)


def rows_of(pairs, shifts=None):
    shifts = torch.zeros(pairs.shape[1], 3, dtype=torch.int32) if shifts is None else shifts
    return torch.cat([pairs.T, shifts], dim=1).numpy().astype(np.int64)


def rows_of_matrix(matrix, count, shifts=None):
    i, slot = (torch.arange(matrix.shape[1])[None] < count[:, None]).nonzero().T
    chosen = torch.zeros(len(i), 3) if shifts is None else shifts[i, slot]
    return torch.cat([i[:, None], matrix[i, slot][:, None], chosen], dim=1).numpy().astype(np.int64)


def points(n, seed=0, low=0.0, high=1.0):
    return torch.as_tensor(np.random.default_rng(seed).uniform(low, high, (n, 3)))


def two_systems(seed=4, spread=(1.0, 1.0)):
    x = [points(30, seed + n) * 6.0 * s for n, s in enumerate(spread)]
    return torch.cat(x), torch.arange(60).int() // 30
