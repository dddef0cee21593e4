"""Distances and displacements of pairs: one kernel, which agrees with the same sums written in torch."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from nvalchemiops.torch.neighbors import neighbor_list
from nvalchemiops.torch.neighbors import pairs as geometry
from nvalchemiops.torch.neighbors.pairs import list_geometry, matrix_geometry
from tests.support.systems import batch, triclinic

CUTOFF = 5.5
SYSTEM = batch(triclinic(6), triclinic(5, seed=3))


def in_torch(monkeypatch):
    """From here on as compilers see it."""
    monkeypatch.setattr(geometry, "is_eager", lambda *tensors: False)


def without_torch(monkeypatch):
    """From here on an error, unless the kernel does it."""
    monkeypatch.delattr(geometry, "_in_torch")


def measured(as_list, dtype=torch.float64, device="cpu", **options):
    """Distances, vectors, and the list or matrix that they belong to, of a batch in skewed cells."""
    system = SYSTEM.to(dtype).to(torch.device(device))
    options = {"batch_idx": system.batch_idx, "return_neighbor_list": as_list, **options}
    *found, distances, vectors = neighbor_list(
        system.positions, CUTOFF, system.cell, return_distances=True, return_vectors=True, **options
    )
    return distances, vectors, *found


@pytest.mark.parametrize("as_list", [True, False])
def test_one_kernel_measures_what_torch_would(as_list, device, dtype, monkeypatch):
    """To the last bit, so that nothing depends on who looks on."""
    with monkeypatch.context() as patch:
        without_torch(patch)
        distances, vectors, *found = measured(as_list, dtype, device)
    in_torch(monkeypatch)
    expected, expected_vectors, *same = measured(as_list, dtype, device)
    assert all(torch.equal(a, b) for a, b in zip(found, same))
    assert distances.dtype == vectors.dtype == dtype and bool(distances.any())
    assert torch.equal(vectors, expected_vectors) and torch.equal(distances, expected)


@pytest.mark.parametrize("target", [None, [7, 0, 7, 2]])
@pytest.mark.parametrize("as_list", [True, False])
def test_derivatives_need_no_other_path(as_list, target, monkeypatch):
    """First and second derivatives by positions and cell of what the kernel measured, also for chosen atoms."""
    without_torch(monkeypatch)
    rows = None if target is None else torch.tensor(target, dtype=torch.int32)
    options = {"batch_idx": SYSTEM.batch_idx, "target_indices": rows, "return_neighbor_list": as_list}
    found = neighbor_list(SYSTEM.positions, 3.3, SYSTEM.cell, **options)

    def function(x, cell):
        if as_list:  # which names atoms already
            return list_geometry(x, found[0], found[2], cell, SYSTEM.batch_idx)
        return matrix_geometry(x, *found, cell, SYSTEM.batch_idx, rows)

    x, cell = SYSTEM.positions.clone().requires_grad_(), SYSTEM.cell.clone().requires_grad_()
    assert function(x, cell)[0].numel() > 8, "there are pairs"
    assert gradcheck(function, (x, cell), fast_mode=True)
    assert gradgradcheck(function, (x, cell), fast_mode=True)


@pytest.mark.parametrize("as_list", [True, False])
def test_the_gradient_is_that_of_torch(as_list, dtype, tolerance, monkeypatch):
    def gradients():
        x, cell = (t.to(dtype).requires_grad_() for t in (SYSTEM.positions, SYSTEM.cell))
        options = {"batch_idx": SYSTEM.batch_idx, "return_neighbor_list": as_list}
        *_, d, v = neighbor_list(x, CUTOFF, cell, return_distances=True, return_vectors=True, **options)
        first = torch.autograd.grad((d.square() + v[..., 0] * d).sum(), (x, cell), create_graph=True)
        return *first, *torch.autograd.grad(sum(g.square().sum() for g in first), (x, cell))

    found = gradients()
    in_torch(monkeypatch)
    for value, expected in zip(found, gradients()):
        scale = float(expected.detach().abs().max())
        torch.testing.assert_close(value / scale, expected / scale, **tolerance)


@pytest.mark.parametrize("wanted", ["distances", "vectors"])
def test_one_of_the_two_has_a_gradient_of_its_own(wanted):
    x = SYSTEM.positions.clone().requires_grad_()
    *_, value = neighbor_list(x, CUTOFF, SYSTEM.cell, batch_idx=SYSTEM.batch_idx, **{f"return_{wanted}": True})
    (gradient,) = torch.autograd.grad(value.square().sum(), x)
    torch.testing.assert_close(gradient.sum(0), torch.zeros(3, dtype=torch.float64))  # nothing moves the whole
    assert bool(gradient.any())


def test_transforms_and_forward_mode_take_the_other_path():
    """What custom functions of torch cannot do: forward mode inside forward mode, and ``vmap`` without a loop."""
    x, cell = SYSTEM.positions[:6], SYSTEM.cell[0]
    pairs, _, shifts = neighbor_list(x, CUTOFF, cell, return_neighbor_list=True)
    matrix, count, images = neighbor_list(x, CUTOFF, cell)
    strain = torch.eye(3, dtype=torch.float64)

    def of_list(strain):
        return torch.exp(-list_geometry(x @ strain, pairs, shifts, cell @ strain)[0]).sum()

    def of_matrix(strain):
        d, _ = matrix_geometry(x @ strain, matrix, count, images, cell @ strain)
        return torch.where(d > 0.0, torch.exp(-d), 0.0).sum()

    for energy in (of_list, of_matrix):
        forward = torch.func.jacfwd(torch.func.jacfwd(energy))(strain)
        torch.testing.assert_close(forward, torch.autograd.functional.hessian(energy, strain))
        strains = torch.stack([strain, 1.1 * strain])
        torch.testing.assert_close(torch.func.vmap(energy)(strains), torch.stack([energy(s) for s in strains]))


class Operations(TorchDispatchMode):
    """The names of all operations, as a tracer or a profiler of memory sees them."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.names.append(str(operation))
        return operation(*args, **(kwargs or {}))


def test_whoever_watches_sees_operations_of_torch():
    with Operations() as seen:
        measured(True)
    assert any("index_select" in name for name in seen.names)
    assert not any("measure_pairs" in name for name in seen.names)


@pytest.mark.parametrize("as_list", [True, False])
def test_what_names_no_atom_is_an_error_and_a_lost_atom_is_not(as_list):
    """A kernel that read on would answer with whatever stands in memory there."""
    system = triclinic(4)
    x, cell, systems = system.positions, system.cell.expand(2, 3, 3), torch.tensor([0, 0, 1, 1])

    def call(j=1, row=0, target=None, batch_idx=systems, x=x):
        if as_list:
            pairs = torch.tensor([[row, 1], [j, 0]])
            return list_geometry(x, pairs, torch.zeros(2, 3, dtype=torch.int64), cell, batch_idx, target)
        matrix = torch.tensor([[j], [0], [3], [2]])[: 4 if target is None else len(target)]
        return matrix_geometry(x, matrix, None, matrix.unsqueeze(2) * torch.zeros(3).int(), cell, batch_idx, target)

    assert bool(torch.isfinite(call()[0]).all())
    far = 2**31
    for j in (-1, 5, far, -far - 1, 1 - far):
        with pytest.raises(IndexError, match="index"):
            call(j=j)
    for place in (-1, 4):
        with pytest.raises(IndexError, match="index"):
            call(target=torch.tensor([0, place]))
    for number in (-1, 2):
        with pytest.raises(IndexError, match="index"):
            call(batch_idx=torch.tensor([number, 0, 1, 1]))
    if as_list:
        near, room = torch.tensor([[0, 1, 0], [1, 0, -far]]), torch.zeros(3, 3).int()  # room at the end of a list
        of_both = [list_geometry(x, near.to(kind), room, cell[0])[0] for kind in (torch.int32, torch.int64)]
        assert torch.equal(*of_both) and of_both[0][2] == 0.0 < of_both[0][0]
        for row in (-1, 4, far):
            with pytest.raises(IndexError, match="index"):
                call(row=row)
        with pytest.raises(IndexError, match="`target_indices` has none"):
            call(target=torch.zeros(0, dtype=torch.int32))
    lost = torch.cat([x[:3], torch.full((1, 3), torch.nan, dtype=torch.float64)])
    distances, _ = call(j=3, x=lost)
    assert bool(distances.flatten()[0].isnan()) and not bool(distances.flatten()[1].isnan())


@pytest.mark.parametrize("as_list", [True, False])
def test_threads_share_the_slots(as_list, always_split, threads):
    """Thousands of slots, on two threads in many pieces: the same as on one."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(500, 3, dtype=torch.float64, generator=generator) * 12.0
    cell = 12.0 * torch.eye(3, dtype=torch.float64)
    results = []
    for number in (1, 2, 2):
        threads(number)
        options = {"return_neighbor_list": as_list, "return_distances": True, "return_vectors": True}
        results.append(neighbor_list(x, 3.0, cell, **options))
    assert results[0][-2].numel() > 10_000
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other))
