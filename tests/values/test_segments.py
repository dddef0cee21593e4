"""Sums over the atoms of each system, and their transpose: right, differentiable, and the same bits everywhere."""

import warnings

import pytest
import torch

from nvalchemiops.kernels.segments import BLOCK
from nvalchemiops.torch.operators.segments import FEW, row_pointers, spread_systems, system_sums

SIZES = [5, 0, 3, 2 * BLOCK + 17, 1, BLOCK, 0]


def systems_of(sizes=SIZES, unsorted=False):
    batch_idx = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), torch.tensor(sizes))
    if unsorted:
        batch_idx = batch_idx[torch.randperm(len(batch_idx), generator=torch.Generator().manual_seed(0))]
    return batch_idx


def values_of(n, *shape, dtype=torch.float64, seed=1):
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def equal(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("unsorted", [False, True])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (3, 3), (40,), (2, 50)])
def test_sums_equal_index_add(shape, unsorted, dtype, device):
    batch_idx = systems_of(unsorted=unsorted).to(device)
    values = values_of(len(batch_idx), *shape, dtype=dtype).to(device)
    found = system_sums(values, batch_idx, len(SIZES))
    expected = torch.zeros(len(SIZES), *shape, dtype=torch.float64, device=device)
    expected.index_add_(0, batch_idx, values.double())
    assert found.dtype == dtype and found.shape == expected.shape
    torch.testing.assert_close(found, expected.to(dtype), rtol=1e-6 if dtype == torch.float32 else 1e-13, atol=1e-12)
    assert not found[[1, 6]].any()  # the empty ones


def test_row_pointers_of_slices_without_a_warning():
    rows = torch.tensor([[0, 0, 1, 3], [1, 1, 2, 2], [3, 3, 3, 3]], dtype=torch.int32)
    torch.set_warn_always(True)  # else torch warns only once in a process
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = torch.func.vmap(lambda index: row_pointers(index, 4))(rows)
    finally:
        torch.set_warn_always(False)
    assert torch.equal(found, torch.stack([row_pointers(index, 4) for index in rows]))


def test_float32_is_summed_in_float64():
    values = torch.full((FEW + 5,), 0.1, dtype=torch.float32)
    assert system_sums(values, None, 1).item() == (values.double().sum()).to(torch.float32).item()
    values = torch.tensor([2.0**24, 1.0, 1.0, -(2.0**24)], dtype=torch.float32)
    assert system_sums(values, None, 1).item() == 2.0


def test_one_system_needs_no_indices():
    values = values_of(700, 3)
    found = system_sums(values, None, 1)
    torch.testing.assert_close(found[0], values.sum(0))
    equal(found, system_sums(values, torch.zeros(700, dtype=torch.int32), 1))


@pytest.mark.parametrize("n_systems", [0, 1, 3])
def test_no_atoms(n_systems):
    values = torch.zeros(0, 2, dtype=torch.float64, requires_grad=True)
    batch_idx = torch.zeros(0, dtype=torch.int32)
    found = system_sums(values, batch_idx, n_systems)
    equal(found.detach(), torch.zeros(n_systems, 2, dtype=torch.float64))
    assert torch.autograd.grad(found.sum(), values)[0].shape == (0, 2)
    assert spread_systems(found, batch_idx, 0).shape == (0, 2)


def test_values_need_not_be_contiguous():
    values = values_of(3, len(systems_of())).T
    equal(system_sums(values, systems_of(), len(SIZES)), system_sums(values.contiguous(), systems_of(), len(SIZES)))


def test_infinities_and_nan_stay_in_their_system():
    values = values_of(6)
    values[1], values[2] = float("nan"), float("inf")
    found = system_sums(values, systems_of([2, 2, 2]), 3)
    assert found[0].isnan() and found[1].isinf()
    equal(found[2], values[4] + values[5])


@pytest.mark.parametrize("n_others", [0, 3, FEW])
def test_a_system_sums_alike_alone_and_in_a_batch(n_others, dtype):
    """In any order of the systems, and whether the whole is divided among threads or not."""
    mine = values_of(1000, 3, dtype=dtype)
    others = values_of(n_others, 3, dtype=dtype, seed=2)
    alone = system_sums(mine, None, 1)[0]
    batch_idx = torch.cat([torch.full((1000,), 1), torch.zeros(n_others)]).int()
    equal(system_sums(torch.cat([mine, others]), batch_idx, 2)[1], alone)
    equal(system_sums(torch.cat([others, mine]), batch_idx.flip(0), 3)[1], alone)
    mixed = torch.randperm(1000 + n_others, generator=torch.Generator().manual_seed(3))
    back = torch.sort(batch_idx[mixed] * 10**6 + mixed)[1]  # mixed up, but the atoms of a system in their order
    equal(system_sums(torch.cat([mine, others])[mixed][back], batch_idx[mixed][back], 2)[1], alone)


@pytest.mark.parametrize("sizes", [SIZES, [FEW // 2, 0, FEW, 11], [2 * FEW]], ids=["few", "many", "one"])
@pytest.mark.parametrize("unsorted", [False, True])
def test_any_number_of_threads_gives_the_same_bits(sizes, unsorted, threads, always_split):
    batch_idx = systems_of(sizes, unsorted)
    values = values_of(len(batch_idx), 9, dtype=torch.float32)
    found = []
    for count in (1, 2, 3, 2, 1):
        threads(count)
        found.append(system_sums(values, batch_idx, len(sizes)))
    for other in found[1:]:
        equal(other, found[0])


def test_spread_is_indexing():
    batch_idx = systems_of(unsorted=True)
    per_system = values_of(len(SIZES), 2, 3)
    equal(spread_systems(per_system, batch_idx, len(batch_idx)), per_system[batch_idx.long()])
    equal(spread_systems(per_system[:1], None, 4), per_system[:1].expand(4, 2, 3))


@pytest.mark.parametrize("batch_idx", [systems_of([2, 0, 3]), systems_of([2, 0, 3], True), None])
def test_both_differentiate_twice(batch_idx):
    n_systems = 1 if batch_idx is None else 3
    values, per_system = (values_of(n, 2).requires_grad_() for n in (5, n_systems))

    def sums(values):
        return system_sums(values.sin(), batch_idx, n_systems).cos()

    def spread(per_system):
        return spread_systems(per_system.sin(), batch_idx, 5).cos()

    for function, x in ((sums, values), (spread, per_system)):
        assert torch.autograd.gradcheck(function, (x,))
        assert torch.autograd.gradgradcheck(function, (x,))


@pytest.mark.parametrize("n_systems", [1, 3])
@pytest.mark.parametrize("batch_idx", [[0, 1, 3], [0, -1, 1], [3, 1, 0], [-1, -1, -1], [-1, 0, 0]])
def test_a_system_that_does_not_exist_is_an_error(batch_idx, n_systems):
    with pytest.raises(ValueError, match="`batch_idx`"):
        system_sums(values_of(3), torch.tensor(batch_idx, dtype=torch.int32), n_systems)


def test_several_systems_need_indices():
    with pytest.raises(ValueError, match="`batch_idx`"):
        system_sums(values_of(3), None, 2)
