"""Neighbor lists hold every pair once, whatever the cell."""

import numpy as np
import pytest
import torch

from nvalchemiops.neighbors import grid
from nvalchemiops.torch.neighbors import neighbor_list
from tests.support.systems import SYSTEMS, batch, triclinic


def test_a_pair_at_the_cutoff_does_not_belong():
    positions = torch.tensor([[0.0, 0.0, 0.0], [2.0, 0.0, 0.0]], dtype=torch.float64)
    assert not neighbor_list(positions, 2.0)[1].any()
    assert neighbor_list(positions, np.nextafter(2.0, 3.0))[1].tolist() == [1, 1]


@pytest.mark.parametrize("by", ["batch_idx", "batch_ptr", "both"])
def test_batch_equals_singles(by, device):
    systems = [make() for make in SYSTEMS.values()]
    together = batch(*systems)
    sizes = torch.tensor([len(s.charges) for s in systems])
    ptr = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).int()
    described = {"batch_idx": together.batch_idx, "batch_ptr": ptr}
    described = {name: t.to(device) for name, t in described.items() if by in (name, "both")}
    pbc = torch.tensor([[True, True, n % 2 == 0] for n in range(len(systems))])
    pairs, _, shifts = neighbor_list(
        together.positions.to(device),
        4.0,
        together.cell.to(device),
        pbc.to(device),
        return_neighbor_list=True,
        **described,
    )
    expected, expected_shifts = [], []
    for n, system in enumerate(systems):
        alone = neighbor_list(system.positions, 4.0, system.cell, pbc[n], return_neighbor_list=True)
        expected.append(alone[0] + ptr[n])
        expected_shifts.append(alone[2])
    found = torch.cat([pairs.cpu().mT, shifts.cpu()], 1)
    wanted = torch.cat([torch.cat(expected, dim=1).mT, torch.cat(expected_shifts)], 1)
    if device.type == "cuda":
        # atoms on a border of bins are on either side of it by rounding, and neighbors follow the order of the bins
        assert torch.equal(found[:, 0], wanted[:, 0])
        found, wanted = (torch.unique(rows, dim=0) for rows in (found, wanted))
    assert torch.equal(found, wanted)


def test_positions_that_need_gradients_are_welcome():
    system = SYSTEMS["triclinic"]()
    results = neighbor_list(system.positions.requires_grad_(), 3.0, system.cell.requires_grad_())
    assert not any(t.requires_grad for t in results)


@pytest.mark.parametrize("form", ["matrix", "memory", "numbered anew"])
def test_a_given_capacity_reads_no_value(form, monkeypatch):
    """What CUDA graphs and a busy GPU need; every way from a tensor to a number is shut."""
    system = batch(triclinic(5), SYSTEMS["rocksalt"]())
    options = {"batch_idx": system.batch_idx, "max_neighbors": 150}
    if form != "numbered anew":
        options["cell"] = system.cell
    if form == "memory":
        n = len(system.charges)
        shapes = {"neighbor_matrix": (n, 150), "neighbor_matrix_shifts": (n, 150, 3), "num_neighbors": (n,)}
        options |= {name: torch.empty(shape, dtype=torch.int32) for name, shape in shapes.items()}
        options["rebuild_flags"] = torch.ones(2, dtype=torch.bool)
    expected = [t.clone() for t in neighbor_list(system.positions, 4.0, **options)]

    def shut(*_, **__):
        raise AssertionError("a value was read")

    for way in ("item", "tolist", "__int__", "__float__", "__bool__", "__index__", "nonzero", "numpy"):
        monkeypatch.setattr(torch.Tensor, way, shut)
    found = neighbor_list(system.positions, 4.0, **options, check=False)
    monkeypatch.undo()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_bins_that_share_a_slot_are_never_searched_together():
    """Or a pair would be listed twice: no two bins of a box of `SEARCHED_BINS` meet, on a ring of any size."""
    apart = np.arange(1 - grid.SEARCHED_BINS, grid.SEARCHED_BINS)
    x, y, z = np.meshgrid(apart, apart, apart, indexing="ij")
    for power in range(grid.SMALLEST_SHARED_RING.bit_length() - 1, 31):
        size = 1 << power
        skip_y, skip_z = (int(skip) for skip in grid.shared_skips(size))
        assert ((x + skip_y * y + skip_z * z) % size == 0).sum() == 1, f"a ring of {size} slots"
