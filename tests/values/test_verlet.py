"""A list with a skin holds every pair within the cutoff at every step, and is searched no more often than it must."""

import math

import numpy as np
import pytest
import torch

from nvalchemiops.torch.neighbors import neighbor_list
from nvalchemiops.torch.neighbors import verlet as verlet_module
from nvalchemiops.torch.neighbors.formats import check_full_list, list_geometry, matrix_geometry
from nvalchemiops.torch.neighbors.verlet import VerletList, inverse_of_periodic, taken_by_strain
from tests.support.systems import SYSTEMS, batch

FLOAT64 = torch.float64


def pairs_within(cutoff, positions, result, cell=None, batch_idx=None, as_list=False):
    """Sorted tuples (i, j, S) of what a list of either format holds within the cutoff."""
    shifts = result[2] if len(result) == 3 else None
    geometry = list_geometry if as_list else matrix_geometry
    others = (result[0], shifts) if as_list else (result[0], result[1], shifts)
    distances, _ = geometry(positions, *others, cell if shifts is not None else None, batch_idx)
    if as_list:
        i, j = result[0]
        near = distances < cutoff
    else:
        i = torch.arange(len(positions), device=positions.device).unsqueeze(1).expand_as(distances)
        j = result[0]
        near = (distances < cutoff) & (torch.arange(j.shape[1], device=j.device) < result[1].unsqueeze(1))
    images = torch.zeros(*j.shape, 3, dtype=torch.int32, device=j.device) if shifts is None else shifts
    return sorted(map(tuple, torch.cat([torch.stack([i[near], j[near]], 1), images[near]], 1).tolist()))


def fresh(cutoff, positions, cell=None, pbc=None, batch_idx=None, **options):
    result = neighbor_list(positions, cutoff, cell, pbc, batch_idx, return_neighbor_list=True, **options)
    return pairs_within(cutoff, positions, result, cell, batch_idx, as_list=True)


def random_system(n_atoms=30, length=6.0, seed=0):
    rng = np.random.default_rng(seed)
    cell = np.eye(3) * length + rng.uniform(-0.8, 0.8, (3, 3))
    return torch.as_tensor(rng.uniform(-0.5, 1.5, (n_atoms, 3)) @ cell), torch.as_tensor(cell)


# -- when a list is searched for ----------------------------------------------------------------------


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("half_fill", [False, True])
def test_the_result_is_a_neighbor_list_out_to_the_reach(as_list, half_fill, device, dtype):
    x, cell = (t.to(device, dtype) for t in random_system())
    pbc = torch.tensor([True, False, True], device=device)
    verlet = VerletList(2.0, 0.5, half_fill=half_fill, return_neighbor_list=as_list, fill_value=-3)
    assert verlet.reach == 2.5
    for lattice in ((), (cell,), (cell, pbc), (cell.unsqueeze(0), [True, False, True])):
        result = verlet(x, *lattice)
        options = {} if as_list else {"max_neighbors": verlet.max_neighbors}
        expected = neighbor_list(
            x, 2.5, *lattice, half_fill=half_fill, fill_value=-3, return_neighbor_list=as_list, **options
        )
        assert len(result) == len(expected)
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(result, expected))


def test_a_list_is_kept_until_an_atom_moved_further_than_half_the_skin(dtype):
    x, cell = (t.to(dtype) for t in random_system())
    verlet = VerletList(2.0, 0.75)
    first = verlet(x, cell)
    x = (x * 64).round() / 64  # so that steps are exact
    assert verlet(x, cell) is first, "rounding by 1/128 is no reason"
    verlet.reset()
    first = verlet(x, cell)
    step = torch.tensor([0.25, -0.25, 0.125], dtype=dtype)  # of length 0.375, without rounding
    for share, is_kept in ((0.5, True), (1.0, True), (1.0625, False)):
        there = x.clone()
        there[7] += share * step
        result = verlet(there, cell)
        assert fresh(2.0, there, cell) == pairs_within(2.0, there, result, cell)
        assert (result is first) == is_kept
    assert (verlet.num_calls, verlet.num_builds) == (4, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_look_by_a_kernel_decides_as_torch_does(dtype, monkeypatch):
    """Steps, changed cells and axes, a position that is lost, gradients, another dtype: same searches, same results."""
    generator = torch.Generator().manual_seed(1)
    x, cell = (t.to(dtype).clone() for t in random_system())
    pbc = torch.ones(3, dtype=torch.bool)
    quick, slow = VerletList(2.0, 0.5), VerletList(2.0, 0.5)
    rebuilt = []
    for step in range(30):
        x += 0.025 * torch.randn(x.shape, generator=generator, dtype=dtype)
        if step == 10:
            cell[0] *= 1.01
        if step == 13:
            pbc[2] = False
        given = x.double() if step == 17 else x.clone().requires_grad_(step % 3 == 0)
        box = cell.double() if step == 17 else cell
        results = [quick(given, box, pbc)]
        with monkeypatch.context() as patch:
            patch.setattr(verlet_module, "_look", lambda *_: None)
            results.append(slow(given, box, pbc))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        assert torch.equal(quick.rebuilt, slow.rebuilt) and quick.num_builds == slow.num_builds
        rebuilt.append(bool(quick.rebuilt))
    due = (0, 10, 13) + (17, 18) * (dtype is torch.float32)
    assert all(rebuilt[n] for n in due) and rebuilt.count(False) > 10
    x[0, 0] = float("nan")
    for one in (quick, slow):
        with pytest.raises(ValueError, match="NaN"):
            one(x, cell, pbc)


@pytest.mark.parametrize("n_systems", [1, 3])
def test_the_look_by_a_kernel_takes_the_same_from_a_skin(n_systems, monkeypatch):
    """Strains of skewed cells that take about the whole skin."""
    generator = torch.Generator().manual_seed(2)
    systems = [random_system(12, 5.0, seed) for seed in range(n_systems)]
    x, cell = torch.cat([s[0] for s in systems]), torch.stack([s[1] for s in systems])
    cell = cell + torch.randn(cell.shape, generator=generator, dtype=FLOAT64)
    batch_idx = torch.arange(n_systems, dtype=torch.int32).repeat_interleave(12)
    kept, decided = [], []
    for _ in range(30):
        strain = torch.randn(n_systems, 3, 3, generator=generator, dtype=FLOAT64)
        part = 0.5 + torch.rand(n_systems, 1, 1, generator=generator, dtype=FLOAT64)
        strain = strain * part * 0.4 / taken_by_strain(strain, 2.6).view(-1, 1, 1)
        moved = x + (x.unsqueeze(1) @ strain[batch_idx.long()]).squeeze(1)
        for look in (True, False):
            with monkeypatch.context() as patch:
                if not look:
                    patch.setattr(verlet_module, "_look", lambda *_: None)
                verlet = VerletList(2.2, 0.4)
                verlet(x, cell, None, batch_idx)
                verlet(moved, cell + cell @ strain, None, batch_idx)
                decided.append(verlet.rebuilt.tolist())
        kept += (part.flatten() < 1.0).tolist()
    assert decided[::2] == decided[1::2]
    assert [not was for row in decided[::2] for was in row] == kept
    assert True in kept and False in kept


def test_slow_drift_adds_up_from_the_last_search():
    x, cell = random_system()
    verlet, builds = VerletList(2.0, 0.5), []
    for step in range(9):
        verlet(x + torch.tensor([0.1 * step, 0.0, 0.0], dtype=FLOAT64), cell)
        builds.append(verlet.num_builds)
    assert builds == [1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_without_a_skin_every_move_is_a_search():
    x, cell = random_system()
    verlet = VerletList(2.0, 0.0)
    verlet(x, cell)
    verlet(x.clone(), cell.clone())
    assert verlet.num_builds == 1
    x[3, 1] = math.nextafter(float(x[3, 1]), 9.0)  # in place, as integrators do
    verlet(x, cell)
    assert verlet.num_builds == 2


def test_a_folded_atom_makes_the_list_stale():
    x, cell = random_system()
    verlet = VerletList(2.0, 1.0)
    verlet(x, cell)
    for images in ([1.0, 0.0, 0.0], [0.0, -2.0, 1.0]):
        x[4] += torch.tensor(images, dtype=FLOAT64) @ cell
        result = verlet(x, cell)
        assert pairs_within(2.0, x, result, cell) == fresh(2.0, x, cell)
    assert verlet.num_builds == 3


def test_a_changed_cell_alone_is_a_reason():
    """The box shrinks so far that more images are needed, and rows that no longer fit."""
    x, cell = random_system()
    verlet = VerletList(2.5, 0.5, max_neighbors=64)
    verlet(x, cell)
    # fractional coordinates kept, then positions kept
    for positions, box in ((x * 0.6, cell * 0.6), (x * 0.6, cell * 0.55), (x * 0.6, cell * 0.5)):
        before = verlet.num_builds
        result = verlet(positions, box)
        assert verlet.num_builds == before + 1
        assert pairs_within(2.5, positions, result, box) == fresh(2.5, positions, box)
    assert verlet.max_neighbors > 64 and int(result[2].abs().max()) > 1
    box = box.clone()
    builds = verlet.num_builds
    verlet(x * 0.6, box)
    assert verlet.num_builds == builds
    box[0, 0] += 0.6  # in place, as barostats do
    verlet(x * 0.6, box)
    assert verlet.num_builds == builds + 1


@pytest.mark.parametrize("pbc", [None, (True, True, True), (True, False, True), (False, True, False)])
@pytest.mark.parametrize("half_fill", [False, True])
@pytest.mark.parametrize("quick", [True, False])
def test_a_list_follows_the_cell(pbc, half_fill, quick, monkeypatch):
    """Cells that breathe and shear, with their atoms, as in NPT: complete at every step, with few searches."""
    if not quick:
        monkeypatch.setattr(verlet_module, "_look", lambda *_: None)
    generator = torch.Generator().manual_seed(3)
    x, cell = random_system(length=5.0)
    axes = None if pbc is None else torch.tensor(pbc)
    verlet, rebuilt = VerletList(2.2, 0.6, half_fill=half_fill), []
    for step in range(60):
        result = verlet(x, cell, axes)
        found = pairs_within(2.2, x, result, cell)
        expected = fresh(2.2, x, cell, axes, half_fill=half_fill)
        if half_fill:  # which of the two directions is listed may differ
            ends = [sorted((p, (p[1], p[0], -p[2], -p[3], -p[4]))) for pairs in (found, expected) for p in pairs]
            found, expected = sorted(ends[: len(found)]), sorted(ends[len(found) :])
        assert found == expected
        rebuilt.append(bool(verlet.rebuilt.any()))
        move = torch.eye(3, dtype=FLOAT64) + 0.01 * torch.randn(3, 3, generator=generator, dtype=FLOAT64)
        x, cell = x @ move, cell @ move
        if step < 40:
            x = x + 0.01 * torch.randn(x.shape, generator=generator, dtype=FLOAT64)
    assert rebuilt[0] and 3 <= sum(rebuilt) <= 30


def test_a_strain_beyond_the_skin_is_seen_without_a_move_of_atoms():
    """Two atoms at the origin see their images alone: a shrinking cell brings new ones within the cutoff."""
    x, cell = torch.zeros(1, 3, dtype=FLOAT64), 2.55 * torch.eye(3, dtype=FLOAT64)
    verlet = VerletList(2.0, 0.5)
    for length in (2.55, 2.4, 2.2, 2.05, 1.99, 1.5):
        box = cell * (length / 2.55)
        assert pairs_within(2.0, x, verlet(x, box), box) == fresh(2.0, x, box)


def test_along_open_axes_the_cell_is_no_reason_but_the_axis_is():
    x, cell = random_system()
    pbc = torch.tensor([True, True, False])
    verlet = VerletList(2.0, 0.5)
    cell[2] = torch.nan
    verlet(x, cell, pbc)
    verlet(x, cell, pbc)
    cell[2] = torch.tensor([0.0, 0.0, 5.0])
    verlet(x, cell, pbc)
    assert verlet.num_builds == 1
    pbc[2] = True
    result = verlet(x, cell, pbc)
    assert verlet.num_builds == 2 and pairs_within(2.0, x, result, cell) == fresh(2.0, x, cell, pbc)


def test_another_number_of_atoms_dtype_or_division_is_a_reason():
    together = batch(SYSTEMS["rocksalt"](), SYSTEMS["triclinic"](), SYSTEMS["cesiumchloride"]())
    x, cells, batch_idx = together.positions, together.cell, together.batch_idx
    verlet = VerletList(3.0, 0.5)
    sizes = torch.bincount(batch_idx)
    ptr = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).int()
    other = batch_idx.clone()
    other[int(ptr[1])] = 0  # one atom changes sides, and nothing else
    forms = [
        (x, cells, None, batch_idx),
        (x, cells, None, other),
        (x, cells, torch.ones(3, dtype=torch.bool), batch_idx),
        (x, cells, torch.ones(3, 3, dtype=torch.bool), batch_idx.long()),
        (x.float(), cells.float(), None, batch_idx),
        (x[: ptr[2]], cells[:2], None, batch_idx[: ptr[2]]),
        (x[: ptr[1]], cells[0], None),
        (x[: ptr[1]],),
    ]
    for n, form in enumerate(forms, start=1):
        for _ in range(2):
            result = verlet(*form)
            assert verlet.num_builds == n
        assert pairs_within(3.0, form[0], result, *form[1:2], *form[3:]) == fresh(3.0, *form)
    by_ptr = verlet(x, cells, None, None, ptr)
    assert pairs_within(3.0, x, by_ptr, cells, batch_idx) == fresh(3.0, x, cells, None, batch_idx)
    assert verlet(x, cells, None, None, ptr.clone()) is by_ptr
    both = verlet(x, cells, None, batch_idx, ptr)
    assert all(torch.equal(a, b) for a, b in zip(both, by_ptr))
    with pytest.raises(ValueError, match="must describe the same"):
        verlet(x, cells, None, other, ptr)


# -- batches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_list", [False, True])
def test_in_a_batch_each_system_has_its_own_turn(as_list):
    """A random walk at four speeds, cells breathing in one system, against a new list at each step."""
    rng = np.random.default_rng(7)
    sizes, speeds = (20, 9, 26, 14), (0.05, 0.0, 0.02, 0.11)
    parts = [random_system(n, length, seed) for seed, (n, length) in enumerate(zip(sizes, (5.0, 3.0, 6.0, 4.0)))]
    x, cells = torch.cat([p[0] for p in parts]), torch.stack([p[1] for p in parts])
    pbc = torch.tensor([[True] * 3, [True, False, True], [False] * 3, [True] * 3])
    cells[1, 1] = torch.nan
    batch_idx = torch.repeat_interleave(torch.arange(4, dtype=torch.int32), torch.tensor(sizes))
    speed = torch.tensor(speeds, dtype=FLOAT64)[batch_idx.long()].unsqueeze(1)
    cutoff, skin = 2.2, 0.6
    verlet = VerletList(cutoff, skin, return_neighbor_list=as_list)
    reference, boxes, before, times = x.clone(), cells.clone(), None, torch.zeros(4)
    for step in range(40):
        x += speed * torch.as_tensor(rng.normal(size=x.shape))
        if step % 9 == 8:
            cells[3] *= 0.99
        result = verlet(x, cells, pbc, batch_idx)
        # what had to be searched, found atom by atom and system by system
        far = (x - reference).norm(dim=1) > skin / 2
        changed = ((cells != boxes).any(2) & pbc).any(1)
        due = torch.tensor([step == 0 or bool(far[batch_idx == s].any() | changed[s]) for s in range(4)])
        assert torch.equal(verlet.rebuilt, due)
        times += due
        reference[due[batch_idx.long()]] = x[due[batch_idx.long()]]
        boxes[due] = cells[due]
        assert pairs_within(cutoff, x, result, cells, batch_idx, as_list) == fresh(cutoff, x, cells, pbc, batch_idx)
        if as_list:
            check_full_list(*result)
        elif before is not None and before[0].shape == result[0].shape:
            resting = ~due[batch_idx.long()]
            assert all(torch.equal(a[resting], b[resting]) for a, b in zip(before, result))
        before = result
    assert times[1] == 1 and 1 < times[2] < times[0] < times[3] < 40
    assert verlet.num_calls == 40 and times[3] <= verlet.num_builds < times.sum()


def test_systems_without_atoms_are_part_of_a_batch():
    together = batch(SYSTEMS["no atoms"](), SYSTEMS["rocksalt"](), SYSTEMS["no atoms"](), SYSTEMS["one atom"]())
    x, cells, batch_idx = together.positions, together.cell, together.batch_idx
    verlet = VerletList(3.5, 0.5)
    verlet(x, cells, None, batch_idx)
    x[-1] += 1.0
    cells[2] *= 2.0
    result = verlet(x, cells, None, batch_idx)
    assert verlet.rebuilt.tolist() == [False, False, False, True]
    assert pairs_within(3.5, x, result, cells, batch_idx) == fresh(3.5, x, cells, None, batch_idx)


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("n_atoms", [0, 1])
def test_hardly_any_atoms(n_atoms, as_list):
    verlet = VerletList(1.5, 0.5, return_neighbor_list=as_list)
    cell = torch.eye(3, dtype=FLOAT64) * 5.0
    x = torch.zeros(n_atoms, 3, dtype=FLOAT64)
    for form in ((x,), (x, cell), (x, cell, None, torch.zeros(n_atoms, dtype=torch.int32)), (x + 1.0, cell)):
        result = verlet(*form)
        assert verlet(*form) is result
        assert not pairs_within(1.5, form[0], result, *form[1:2], as_list=as_list)
        assert result[1].shape == (n_atoms + as_list,) and not result[1].any()
    assert len(pairs_within(1.5, x, verlet(x, cell / 5.0), cell / 5.0, as_list=as_list)) == 18 * n_atoms


# -- room -----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error::nvalchemiops.NeighborListWarning")  # its width is a first guess
def test_rows_that_fill_up_widen_the_matrix_and_lose_nothing():
    first, second = random_system(40, 12.0, 1), random_system(40, 12.0, 2)
    x, cells = torch.cat([first[0], second[0]]), torch.stack([first[1], second[1]])
    batch_idx = torch.repeat_interleave(torch.arange(2, dtype=torch.int32), 40)
    verlet = VerletList(3.0, 0.3, max_neighbors=20)
    before = verlet(x, cells, None, batch_idx)
    assert verlet.max_neighbors == 20
    x[40:] *= 0.1  # the second system collapses
    result = verlet(x, cells, None, batch_idx)
    widest = int(result[1].max())
    assert verlet.max_neighbors == result[0].shape[1] == 16 * math.ceil(1.2 * widest / 16) > 20
    assert verlet.rebuilt.tolist() == [False, True] and verlet.num_builds == 2
    assert torch.equal(result[0][:40, :20], before[0][:40]) and bool((result[0][:40, 20:] == 80).all())
    assert pairs_within(3.0, x, result, cells, batch_idx) == fresh(3.0, x, cells, None, batch_idx)


def test_width_and_counters_after_a_reset():
    x, cell = random_system()
    verlet = VerletList(2.5, 0.5)
    assert verlet.max_neighbors is None
    result = verlet(x, cell)
    width = verlet.max_neighbors
    assert width % 16 == 0 and int(result[1].max()) <= width
    verlet.reset()
    assert (verlet.num_calls, verlet.num_builds, verlet.rebuilt, verlet.max_neighbors) == (0, 0, None, width)
    assert verlet(x, cell) is not result and verlet.num_builds == 1


def test_an_atom_that_is_the_fill_value_stays_in_lists_of_pairs():
    x, cell = random_system()
    verlet = VerletList(2.0, 0.5, fill_value=3, return_neighbor_list=True)
    for _ in range(2):
        assert pairs_within(2.0, x, verlet(x, cell), cell, as_list=True) == fresh(2.0, x, cell)
        x = x + 1.0


# -- graphs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_list", [False, True])
def test_a_graph_outlives_the_searches_that_follow(as_list):
    first, second = random_system(12, 5.0, 3), random_system(10, 5.0, 4)
    cells = torch.stack([first[1], second[1]]).requires_grad_()
    batch_idx = torch.repeat_interleave(torch.arange(2, dtype=torch.int32), torch.tensor([12, 10]))
    verlet = VerletList(2.5, 0.4, return_neighbor_list=as_list)

    def energy(x, result):
        geometry, others = (list_geometry, ()) if as_list else (matrix_geometry, (result[1],))
        distances, vectors = geometry(x, result[0], *others, result[2], cells, batch_idx)
        return torch.where(distances < 2.5, (distances - 2.5) ** 2 * (1 + vectors[..., 0]), 0.0).sum()

    x = torch.cat([first[0], second[0]])
    copies, energies, expected = [], [], []
    for _ in range(4):
        x = x.detach().clone().requires_grad_()
        result = verlet(x, cells, None, batch_idx)
        copies.append((result, [t.clone() for t in result]))
        value = energy(x, result)
        energies.append((value, x))
        expected.append(torch.autograd.grad(value, (x, cells), retain_graph=True))
        x = x + torch.where(batch_idx == 1, 0.5, 0.01).unsqueeze(1)  # the second system is searched each time
    assert verlet.num_builds == 4 and verlet.rebuilt.tolist() == [False, True]
    for (value, x), gradients in zip(energies, expected):
        late = torch.autograd.grad(value, (x, cells))
        assert all(torch.equal(a, b) for a, b in zip(late, gradients))
    assert all(torch.equal(a, b) for result, copy in copies for a, b in zip(result, copy))


@pytest.mark.parametrize("as_list", [False, True])
def test_every_mode_of_autograd_can_share_a_list(as_list):
    x, cell = random_system()
    verlet = VerletList(2.0, 0.5, return_neighbor_list=as_list)

    def energy(x):
        index, count, shifts = verlet(x, cell)
        if as_list:
            return list_geometry(x, index, shifts, cell)[0].square().sum()
        return matrix_geometry(x, index, count, shifts, cell)[0].square().sum()

    with torch.inference_mode():
        energy(x.clone())
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(energy(leaf), leaf)
    assert verlet.num_builds == 1
    torch.testing.assert_close(torch.func.grad(energy)(x), expected)
    moved = x + 1.0
    torch.func.grad(energy)(moved)  # a search within the transform
    torch.func.hessian(energy)(moved[:3])
    builds = verlet.num_builds
    with torch.no_grad():
        energy(moved[:3])
    assert verlet.num_builds == builds == 3
    with pytest.raises(ValueError, match="vmap"):
        torch.func.vmap(energy)(torch.stack([x, x]))


def test_a_compiled_energy_meets_few_shapes():
    x, cell = random_system(20, 5.0)
    from torch._dynamo.testing import CompileCounterWithBackend  # imports the compiler

    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True)
    def energy(x, matrix, count, shifts, cell):
        distances, _ = matrix_geometry(x, matrix, count, shifts, cell)
        return torch.where((distances > 0) & (distances < 2.0), (2.0 - distances) ** 2, 0.0).sum()

    rng = np.random.default_rng(3)
    verlet = VerletList(2.0, 0.4, max_neighbors=48)
    for _ in range(50):
        x = (x + 0.05 * torch.as_tensor(rng.normal(size=x.shape))).requires_grad_()
        result = verlet(x, cell)
        value = energy(x, *result, cell)
        (gradient,) = torch.autograd.grad(value, x)
        distances, _ = matrix_geometry(x, *neighbor_list(x, 2.0, cell), cell)
        exact = torch.where(distances > 0, (2.0 - distances) ** 2, 0.0).sum()
        torch.testing.assert_close((value, gradient), (exact, *torch.autograd.grad(exact, x)))
        x = x.detach()
    assert 5 < verlet.num_builds < 50 and counter.frame_count == 1


def test_a_compiled_caller_breaks_its_graph_here():
    x, cell = random_system()
    verlet = VerletList(2.0, 0.5)

    def total(x):
        matrix, count, shifts = verlet(x, cell)
        return matrix_geometry(x, matrix, count, shifts, cell)[0].sum()

    compiled = torch.compile(total, backend="eager")
    for shift in (0.0, 0.1, 1.0):
        torch.testing.assert_close(compiled(x + shift), total(x + shift))
    assert verlet.num_builds == 2
    with pytest.raises(Exception, match="disable"):
        torch.compile(verlet, backend="eager", fullgraph=True)(x)


# -- arguments ------------------------------------------------------------------------------------


def test_bad_settings_are_named():
    """Beside those of tests/arguments/test_checks.py."""
    for argument, value in (("skin", -0.1), ("cutoff", -1.0), ("max_neighbors", -1), ("method", "x"), ("method", 3)):
        with pytest.raises(ValueError, match=argument):
            VerletList(**{"cutoff": 2.0, "skin": 0.5, argument: value})
    with pytest.raises(TypeError, match="half"):
        VerletList(2.0, 0.5, half=True)


def test_a_failed_search_leaves_the_list_as_it_was():
    first, second = random_system(12, 5.0, 3), random_system(10, 5.0, 4)
    x, cells = torch.cat([first[0], second[0]]), torch.stack([first[1], second[1]])
    batch_idx = torch.repeat_interleave(torch.arange(2, dtype=torch.int32), torch.tensor([12, 10]))
    verlet = VerletList(2.0, 0.5)
    result = verlet(x, cells, None, batch_idx)
    before = [t.clone() for t in result]
    lost, flat = x.clone(), cells.clone()
    lost[15, 1] = torch.nan
    flat[1, 2] = 0.0
    for match, form in (
        ("positions", (lost, cells, None, batch_idx)),
        ("positions", (lost.tolist(), cells, None, batch_idx)),
        ("cell", (x, flat, None, batch_idx)),
        ("cell", (x, cells.bfloat16(), None, batch_idx)),
        ("`cell`", (x, cells.numpy(), None, batch_idx)),
        ("`batch_idx`", (x, cells, None, batch_idx.numpy())),
        ("batch_idx", (x, cells, None, batch_idx - 1)),
    ):
        with pytest.raises((ValueError, TypeError), match=match):
            verlet(*form)
    assert verlet.num_builds == 1 and verlet(x, cells, None, batch_idx) is result
    assert all(torch.equal(a, b) for a, b in zip(result, before))


def test_periodicity_in_any_form_that_a_search_takes():
    x, cell = random_system(12, 5.0, 3)
    for pbc in (True, False, [True, True, False], np.array([True, False, True]), torch.ones((), dtype=torch.bool)):
        verlet, expected = VerletList(2.0, 0.5), neighbor_list(x, 2.5, cell, pbc)
        result = verlet(x, cell, pbc)
        assert verlet(x, cell, pbc) is result and torch.equal(result[1], expected[1])
        verlet(x + 1.0, cell, pbc)
        assert verlet.num_builds == 2


def test_a_wild_system_number_is_refused():
    """What is kept for each system would fill the memory; sensible ones may leave some out."""
    x = torch.rand(4, 3, dtype=FLOAT64)
    verlet = VerletList(2.0, 0.5)
    for wild in (2**31 - 2, 2**40):
        with pytest.raises(ValueError, match="`batch_idx`"):
            verlet(x, batch_idx=torch.tensor([0, 0, wild, wild]))
    verlet(x, batch_idx=torch.tensor([0, 0, 7, 7]))
    assert verlet.rebuilt.shape == (8,)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("quick", [True, False])
def test_systems_of_a_batch_follow_their_cells(shared, quick, monkeypatch):
    """Each system has its own strain, and is searched for it alone; a cell for all is a reason for all."""
    if not quick:
        monkeypatch.setattr(verlet_module, "_look", lambda *_: None)
    generator = torch.Generator().manual_seed(5)
    one, two = random_system(20, 5.0, 1), random_system(25, 5.5, 2)
    x, cells = torch.cat([one[0], two[0]]), one[1][None] if shared else torch.stack([one[1], two[1]])
    batch_idx = torch.tensor([0] * 20 + [1] * 25, dtype=torch.int32)
    verlet, rebuilt = VerletList(2.2, 0.6), []
    for _ in range(30):
        box = cells.expand(2, 3, 3) if shared else cells
        result = verlet(x, box, None, batch_idx)
        assert pairs_within(2.2, x, result, box, batch_idx) == fresh(2.2, x, box, None, batch_idx)
        rebuilt.append(verlet.rebuilt.tolist())
        kept = verlet._kept
        assert torch.allclose(kept.inverse_of_cells(), inverse_of_periodic(kept.systems.cell, None), rtol=1e-12)
        size = torch.tensor([0.02, 0.002]).view(2, 1, 1)
        moves = torch.eye(3, dtype=FLOAT64) + size * torch.randn(2, 3, 3, generator=generator, dtype=FLOAT64)
        if shared:
            moves = moves[:1].expand(2, 3, 3)
        x = (x.unsqueeze(1) @ moves[batch_idx.long()]).squeeze(1)
        x = x + 0.005 * torch.randn(x.shape, generator=generator, dtype=FLOAT64)
        cells = cells @ moves[: len(cells)]
    first, second = (sum(column) for column in zip(*rebuilt))
    assert first <= 20 and second <= 20
    if not shared:
        assert second < first


@pytest.mark.parametrize("cell", [None, random_system()[1], random_system()[1][None]], ids=["none", "one", "1"])
@pytest.mark.parametrize("quick", [True, False])
def test_with_one_cell_or_none_a_system_moves_alone(cell, quick, monkeypatch):
    if not quick:
        monkeypatch.setattr(verlet_module, "_look", lambda *_: None)
    x, batch_idx = random_system(12)[0], torch.arange(12, dtype=torch.int32) // 4
    verlet = VerletList(2.5, 0.4)
    for step, due in enumerate(([True] * 3, [False, True, False], [False] * 3, [True, False, True])):
        x = x + 0.15 * torch.tensor(due, dtype=FLOAT64)[batch_idx.long(), None] * (step + x.cos())
        result = verlet(x, cell, None, batch_idx)
        assert verlet.rebuilt.tolist() == due
        assert pairs_within(2.5, x, result, cell, batch_idx) == fresh(2.5, x, cell, None, batch_idx)


@pytest.mark.parametrize("n_systems", [2, 3])
def test_systems_with_axes_of_their_own_follow_one_cell(n_systems):
    """A search for an open system, which moves, is none for those that share its cell, an atom with its images."""
    x, cell = torch.zeros(n_systems, 3, dtype=FLOAT64), 1.8 * torch.eye(3, dtype=FLOAT64)
    pbc = torch.ones(n_systems, 3, dtype=torch.bool)
    pbc[0] = False
    batch_idx, verlet = torch.arange(n_systems, dtype=torch.int32), VerletList(1.5, 0.2)
    for _ in range(25):
        result = verlet(x, cell, pbc, batch_idx)
        box = cell.expand(n_systems, 3, 3)
        assert pairs_within(1.5, x, result, box, batch_idx) == fresh(1.5, x, cell, pbc, batch_idx)
        x[0] += 0.2
        cell = cell * 0.99
    assert verlet.num_builds == 25 and len(pairs_within(1.5, x, result, box, batch_idx)) == 6 * (n_systems - 1)


def test_a_cell_for_all_is_one_cell_in_memory():
    """A cell (1, 3, 3) with axes for each system: the numbers behind it in memory are no cells of other systems."""
    x, pbc = torch.zeros(3, 3, dtype=FLOAT64), torch.ones(3, 3, dtype=torch.bool)
    batch_idx, verlet = torch.arange(3, dtype=torch.int32), VerletList(1.5, 0.2)
    memory = torch.full((3, 3, 3), math.nan, dtype=FLOAT64)
    memory[0] = 1.8 * torch.eye(3, dtype=FLOAT64)
    for _ in range(3):
        verlet(x, memory[:1], pbc, batch_idx)
    assert verlet.num_builds == 1
    memory[0, 0] += memory[0, 1]  # the same lattice, whose images have other numbers
    result, box = verlet(x, memory[:1], pbc, batch_idx), memory[:1].expand(3, 3, 3)
    assert verlet.rebuilt.all()
    assert pairs_within(1.5, x, result, box, batch_idx) == fresh(1.5, x, box, pbc, batch_idx)


def test_a_call_in_between_does_not_change_the_result():
    """As of another thread, right after the list is kept."""
    positions, others = 3.0 * torch.rand(2, 20, 3, generator=torch.Generator().manual_seed(1), dtype=FLOAT64)

    class Visited(VerletList):
        visits = 0

        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if name == "_kept" and value is not None and not self.visits:
                self.visits += 1
                self(others)

    verlet = Visited(1.0, 0.2)
    for found, expected in zip(verlet(positions), VerletList(1.0, 0.2)(positions)):
        assert torch.equal(found, expected)
    assert verlet.num_calls == 2
