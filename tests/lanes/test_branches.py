"""Branches of kernels that only a GPU takes, and sizes and values that lead there."""

import pytest
import torch

from nvalchemiops.interactions.pair.potentials import moment_short_range
from nvalchemiops.torch.interactions.pair import PairPotential
from nvalchemiops.torch.interactions.pair.exclusions import exclusion_rows
from nvalchemiops.torch.interactions.pair.moments import sum_moments
from nvalchemiops.torch.interactions.pair.system import PairSystem
from nvalchemiops.torch.neighbors import neighbor_list
from nvalchemiops.torch.neighbors.formats import check_full_list, half_to_full, transpose_order
from nvalchemiops.torch.neighbors.rows import GivenNeighbors, build_rows, rows_of
from nvalchemiops.torch.operators.mesh import mesh_columns, mesh_gather, mesh_spread
from nvalchemiops.torch.operators.noise import places_in_systems
from nvalchemiops.torch.operators.segments import system_sums
from tests.lanes.fibers import gpu_layout
from tests.support.comparing import close_to_largest, same_bits

F64 = torch.float64
ORDER = 4


def random(*shape, seed=0, dtype=F64):
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def on_both(function):
    """Results on a CPU, and with the lanes of a GPU."""
    expected = function()
    with gpu_layout() as launched:
        found = function()
    assert launched
    return found, expected


# -- meshes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_z", [31, 32, 33, 64, 96])
def test_rows_of_a_mesh_are_divided_among_warps(n_z):
    """A warp has 32 points of a row; most meshes have rows of 32, 64 or 96 points, and no part of a row is left."""
    n, mesh = 60, (4, 5, n_z)
    u, system = 30.0 * random(n, 3), torch.arange(n, dtype=torch.int32) % 2
    values = random(n, 1, 1, seed=1)

    def spread():
        # the memory behind the mesh is its own, and stays as it is
        columns = mesh_columns(u, system, 2, mesh, ORDER)
        field = mesh_spread(values, u, system, 2, *columns, mesh, ORDER, 0)
        return [field, mesh_gather(field, u, system, 2, *columns, mesh, ORDER, 1)]

    found, expected = on_both(spread)
    close_to_largest(found, expected, 1e-13)
    assert (found[0].sum((1, 2, 3, 4)) - torch.stack([values[system == s].sum() for s in (0, 1)])).abs().max() < 1e-12


def test_an_atom_of_no_system_gathers_nan():
    """Not the values of another system, which are numbers like any other; and not what lies behind the mesh."""
    mesh, n = (4, 5, 6), 40
    u, system = 10.0 * random(n, 3), torch.arange(n, dtype=torch.int32) % 5 - 1  # of systems 0, 1, 2
    field = random(3, 2, *mesh)

    def gather():
        return [mesh_gather(field, u, system, 3, *mesh_columns(u, system, 3, mesh, ORDER), mesh, ORDER, 1)]

    (found,), (expected,) = on_both(gather)
    lost = (system < 0) | (system > 2)
    assert found[lost].isnan().all() and expected[lost].isnan().all()
    close_to_largest([found[~lost]], [expected[~lost]], 1e-13)


# -- single precision ------------------------------------------------------------------------------

HUGE = 2.0**27
"""One more than this is the same number in single precision."""


@pytest.mark.parametrize("slots", [(0, 32, 64), (0, 16, 1), (0, 1, 2)], ids=["of a lane", "of lanes", "of neighbors"])
def test_sums_over_pairs_are_in_double_precision(slots):
    """Of numbers in single precision: a small one between two large ones that cancel is not lost."""
    n = 66
    x = torch.zeros(n, 3)
    x[1:, 0] = 1.0  # neighbors of the first atom, all of them at distance one
    q = torch.zeros(n)
    q[[0, *(1 + slot for slot in slots)]] = torch.tensor([2.0, HUGE, 1.0, -HUGE])
    others = torch.arange(1, n)
    pairs = torch.cat([torch.stack([0 * others, others]), torch.stack([others, 0 * others])], 1).int()
    ptr = torch.cat([torch.tensor([0]), n - 1 + torch.arange(n)]).int()
    potential = PairPotential("q1*q2/r", ("q",), (), (), cutoff=2.0)
    options = {"q": q, "neighbor_list": pairs, "neighbor_ptr": ptr, "compute_forces": True}
    for energies, forces in on_both(lambda: potential(x, **options)):
        assert energies[0] == 1.0 and forces[0].tolist() == [-2.0, 0.0, 0.0]


def test_images_are_added_in_double_precision():
    """Of a pair across the boundaries of a long cell, little is left of two long vectors: it has all its digits."""
    cell = torch.tensor([[[1000.1, 0.0, 0.0], [300.3, 900.7, 0.0], [-200.9, 100.3, 800.3]]])
    shift = torch.tensor([[1, -2, 1], [-1, 2, -1]], dtype=torch.int32)
    first = torch.tensor([[0.013, 0.27, 0.11]])
    x = torch.cat([first, first + torch.tensor([[0.05, -0.04, 0.03]]) - shift[:1].float() @ cell[0]])
    near = {"neighbor_list": torch.tensor([[0, 1], [1, 0]]).int(), "neighbor_shifts": shift}
    potential = PairPotential("r", (), (), (), cutoff=2.0)

    def energies(x, cell):
        return potential(x, cell, **near, compute_forces=True)

    exact = energies(x.double(), cell.double())
    for found in on_both(lambda: energies(x, cell)):
        torch.testing.assert_close([t.double() for t in found], list(exact), rtol=3e-7, atol=1e-9)


def test_sums_over_systems_are_in_double_precision_and_those_of_meshes_in_that_of_the_mesh():
    n, mesh = 65, (5, 6, 7)
    u = 2.25 + random(n, 3)
    values = torch.zeros(n, 1, 1)
    values[[0, 32, 64], 0, 0] = torch.tensor([HUGE, 1.0, -HUGE])

    def spread(values):
        return mesh_spread(values, u, None, 1, *mesh_columns(u, None, 1, mesh, 5), mesh, 5, 0)

    exact = spread(values.double())
    for found in on_both(lambda: [spread(values)]):
        torch.testing.assert_close(found[0].double(), exact, rtol=0.0, atol=2e-7 * float(exact.abs().max()))
    with gpu_layout():
        assert system_sums(values[:, :, 0], None, 1).tolist() == [[1.0]]
    # waves of one point in length, of which little is left between points
    signs = (-1.0) ** sum(torch.meshgrid(*[torch.arange(k) for k in (6, 6, 6)], indexing="ij")).float()
    field = (HUGE * signs + random(6, 6, 6, dtype=torch.float32)).view(1, 1, 6, 6, 6)
    at = random(20, 3)
    columns = mesh_columns(at, None, 1, (6, 6, 6), 5)
    found, expected = on_both(lambda: [mesh_gather(field, at, None, 1, *columns, (6, 6, 6), 5, 0)])
    exact = mesh_gather(field.double(), at, None, 1, *columns, (6, 6, 6), 5, 0)
    # gathered in the precision of the mesh, whose values have rounding errors of this size
    for result in (*found, *expected):
        torch.testing.assert_close(result.double(), exact, rtol=1e-7, atol=2e-7 * float(field.abs().max()))


def test_lines_of_bins_that_end_beyond_the_ring():
    """Of open systems with more bins than slots: a line goes on at the beginning, after atoms before the end."""
    generator, n = torch.Generator().manual_seed(2), 600
    places = torch.rand(30, 1, 3, dtype=F64, generator=generator) * 100.0
    x = (places + 16.0 * torch.rand(30, n, 3, dtype=F64, generator=generator)).view(-1, 3)
    batch_idx = torch.arange(30, dtype=torch.int32).repeat_interleave(n)

    def pairs():
        found, _ = neighbor_list(x, 3.0, batch_idx=batch_idx, return_neighbor_list=True)
        return [found[:, (found[0].long() * len(x) + found[1]).argsort()]]

    found, expected = on_both(pairs)
    assert torch.equal(*found, *expected)


# -- Gaussians -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_gaussians_that_overlap(dtype):
    """At the same place and close to it, where the potential is a series; beside others in the same warp."""
    n = 40
    x = 1.3 * random(n, 3)
    x[1] = x[0]
    for k in range(2, 12):
        x[k] = x[0] + 10.0 ** (1 - k) * random(3, seed=k)
    x = x.to(dtype)
    pairs = torch.cartesian_prod(torch.arange(n), torch.arange(n)).T
    pairs = pairs[:, pairs[0] != pairs[1]].int()
    ptr = torch.arange(n + 1, dtype=torch.int32) * (n - 1)
    shifts = torch.zeros(pairs.shape[1], 3, dtype=torch.int32)
    cell = 50.0 * torch.eye(3, dtype=dtype).unsqueeze(0)
    moments, widths = random(n, 1, 4, seed=3, dtype=dtype), 0.6 + 0.2 * random(n, 1, seed=4, dtype=dtype).tanh()

    def energies():
        rows = rows_of(GivenNeighbors(pairs, ptr, shifts), x, periodic=True)
        system = PairSystem(x, cell, None, 1, rows)
        alpha = torch.full((1, 1), 0.4, dtype=dtype)
        found = sum_moments(moment_short_range(True), system, moments, widths, alpha, forces=True, cutoff=20.0)
        return [found.energies, found.forces]

    found, expected = on_both(energies)
    assert all(e.isfinite().all() for e in expected)
    close_to_largest(found, expected, 1e-12 if dtype is F64 else 1e-5)


# -- sorts -----------------------------------------------------------------------------------------

_sort = torch.sort


def sort_with_ties_reversed(values, dim=-1, descending=False, stable=False):
    """As ``torch.sort`` may sort on a GPU where nobody asks for more: of what is equal, the last is the first."""
    if stable:
        return _sort(values, dim=dim, descending=descending, stable=True)
    found, order = _sort(values.flip(dim), dim=dim, descending=descending, stable=True)
    return torch.return_types.sort((found, values.shape[dim] - 1 - order))


def sums_on_a_mesh():
    n = 200
    u, system, mesh = 4.0 * random(n, 3), torch.arange(n, dtype=torch.int32) % 3, (5, 5, 8)
    columns = mesh_columns(u, system, 3, mesh, 5)
    return [*columns, mesh_spread(random(n, 1, 1), u, system, 3, *columns, mesh, 5, 0)]


def sums_over_systems():
    return [system_sums(random(300, 3), torch.arange(300, dtype=torch.int32) % 7, 7)]


def numbers_in_systems():
    return [places_in_systems(torch.arange(50, dtype=torch.int32) % 4, 4)]


ATOMS = 2.0 * random(90, 3)
BATCH = torch.arange(90, dtype=torch.int32) % 3
BOX = 7.0 * torch.eye(3, dtype=F64).expand(3, 3, 3)


def searched():
    options = {"cell": BOX, "batch_idx": BATCH.sort(stable=True).values, "return_neighbor_list": True}
    return [*neighbor_list(ATOMS, 2.0, **options), *neighbor_list(ATOMS, 2.0, **options, nearest=5, ties="index")]


def rows_of_a_batch_in_no_order():
    rows = build_rows(ATOMS, 2.0, BOX, BATCH)
    return [t for t in rows if isinstance(t, torch.Tensor)]


def other_forms_of_lists():
    # a cell as small as the cutoff: most pairs are there in several images
    half = neighbor_list(ATOMS[:20], 3.0, 3.1 * BOX[0] / 7.0, half_fill=True, return_neighbor_list=True)
    rows = rows_of(GivenNeighbors(*half, half_list=True), ATOMS[:20], periodic=True)
    excluded = exclusion_rows(torch.tensor([[0, 3, 0, 5, 9], [7, 0, 1, 0, 5]]), None, ATOMS)
    full = half_to_full(*half)
    check_full_list(*full)
    found = [*full, *transpose_order(full[0], 20), *(t for t in rows if isinstance(t, torch.Tensor))]
    return [*found, *(t for t in excluded if isinstance(t, torch.Tensor))]


@pytest.mark.parametrize(
    "results",
    [
        sums_on_a_mesh,
        sums_over_systems,
        numbers_in_systems,
        searched,
        rows_of_a_batch_in_no_order,
        other_forms_of_lists,
    ],
)
def test_results_do_not_depend_on_how_a_sort_leaves_what_is_equal(results, monkeypatch):
    """The same bits, and lists in the same order, although sorts of torch need not be stable."""
    with gpu_layout():
        expected = results()
        with monkeypatch.context() as patch:
            patch.setattr(torch, "sort", sort_with_ties_reversed)
            patch.setattr(torch.Tensor, "sort", sort_with_ties_reversed)
            patch.setattr(torch, "argsort", lambda *args, **options: sort_with_ties_reversed(*args, **options)[1])
            same_bits(results(), expected)


def test_ties_are_reversed():
    values = torch.tensor([2, 1, 2, 1])
    assert sort_with_ties_reversed(values)[1].tolist() == [3, 1, 2, 0]
    assert sort_with_ties_reversed(values, stable=True)[1].tolist() == [1, 3, 0, 2]
