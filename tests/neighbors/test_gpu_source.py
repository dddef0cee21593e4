"""What can be told about the GPU code without a GPU: it compiles, and its logic finds the same lists.

The search has one C++ body with a branch for warps of 32 threads. Here that branch is built for the CPU as well, with
warps of one thread, and compared. What a vote among real lanes does is left to the tests marked `gpu`.
"""

import pytest
import torch
import warp as wp

from nvalchemiops.cli import import_all
from nvalchemiops.launch import registered_kernels
from nvalchemiops.neighbors import search as source
from nvalchemiops.torch.neighbors import neighbor_list
from nvalchemiops.torch.neighbors import search as ops
from tests.one_lane import one_lane, use_other_modules
from tests.systems import SYSTEMS, batch, triclinic

FMA = """
    static const auto fma = [](double a, double b, double c) { return __builtin_fma(a, b, c); };
"""
WARPS_OF_ONE = {
    "#if defined(__CUDA_ARCH__)": "#if 1",
    "threadIdx.x & 31": "0",
    "base += 32": "base += 1",
    "finish(r, found, lane, 32)": "finish(r, found, lane, 1)",
}


@pytest.fixture
def gpu_branch(monkeypatch):
    """The search kernel, its GPU branch built for one lane."""
    monkeypatch.setattr(source, "_SEARCH", one_lane(source._SEARCH, WARPS_OF_ONE, FMA))
    use_other_modules(monkeypatch)
    kernel = source.search_neighbors.__wrapped__()
    monkeypatch.setattr(source, "search_neighbors", lambda: kernel)
    return kernel


def lists(system, half):
    options = {"cell": system.cell, "batch_idx": system.batch_idx, "half_fill": half}
    return (
        *neighbor_list(system.positions, 4.5, return_neighbor_list=True, **options),
        *neighbor_list(system.positions, 4.5, max_neighbors=500, **options),
        *neighbor_list(system.positions, 4.5, target_indices=torch.tensor([4, 0, 4]), **options),
    )


def sorted_rows(results):
    """The same results with the neighbors of each atom in one order."""
    pairs, ptr, shifts, matrix, count, images, some, few, others = results
    found = [sorted(map(tuple, torch.cat([pairs.T, shifts], dim=1).tolist())), ptr.tolist()]
    for index, number, image in ((matrix, count, images), (some, few, others)):
        rows = torch.cat([index.unsqueeze(2), image], dim=2).tolist()
        found += [[sorted(map(tuple, row[:n])) for row, n in zip(rows, number.tolist(), strict=True)], number.tolist()]
        found += [[row[n:] for row, n in zip(rows, number.tolist(), strict=True)]]
    return found


def test_the_gpu_branch_finds_the_same_lists(request):
    generator = torch.Generator().manual_seed(0)
    many = triclinic(6)._replace(
        positions=torch.rand(900, 3, dtype=torch.float64, generator=generator) * 22.0 - 3.0,
        charges=torch.zeros(900),
        cell=torch.tensor([[[20.0, 0, 0], [3.0, 21.0, 0], [-2.0, 5.0, 19.0]]], dtype=torch.float64),
        batch_idx=torch.zeros(900, dtype=torch.int32),
    )
    systems = [many, batch(triclinic(5), SYSTEMS["rocksalt"]())]
    expected = [sorted_rows(lists(system, half)) for system in systems for half in (False, True)]
    kernel = request.getfixturevalue("gpu_branch")
    assert ops.kernels.search_neighbors() is kernel
    assert [sorted_rows(lists(system, half)) for system in systems for half in (False, True)] == expected


@pytest.mark.slow  # a second or two for each kernel
def test_every_kernel_compiles_for_a_gpu(tmp_path):
    import nvalchemiops

    list(import_all(nvalchemiops))
    for number, (_, build) in enumerate(registered_kernels()):
        wp.compile_aot_module(build().module, arch=90, module_dir=tmp_path / str(number))
        assert list((tmp_path / str(number)).glob("*.cubin"))
