"""What users of neighbor lists reported of their calls: layouts, compilers, and the ends of numbers."""

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from nvalchemiops.notices import NeighborListWarning
from nvalchemiops.torch.neighbors import neighbor_list
from tests.support.comparing import compiled
from tests.support.processes import python_says
from tests.support.searches import F64, points, two_systems

# -- callers -------------------------------------------------------------------------------------------------


def layouts(x, cell, idx, pbc):
    """The same values, laid out in other ways."""
    n = len(x)
    strided = torch.zeros(2 * n, 3, dtype=x.dtype)
    strided[::2] = x
    offset = torch.cat([x.new_full((5, 3), torch.nan), x])[5:]
    wide = torch.cat([x, x], dim=1)[:, 3:]
    yield "every other row", strided[::2], cell, idx, pbc
    yield "column-major", x.T.contiguous().T, cell.mT.contiguous().mT, idx, pbc
    yield "storage offset", offset, torch.cat([cell, cell])[len(cell) :], torch.cat([idx, idx])[n:], pbc
    yield "columns of a wider tensor", wide, cell, torch.stack([idx, idx], 1)[:, 1], pbc
    yield "expanded", x, cell[:1].expand(len(cell), 3, 3), idx, pbc[:1, :1].expand(len(cell), 3)


@pytest.mark.everyday_cases("*-eager")
@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("method", ["batch_naive", "batch_cell_list"])
def test_layouts_of_the_input_do_not_matter(method, mode):
    """Slices, transposes, offsets and expanded tensors give the same as contiguous copies."""
    x, idx = two_systems()
    cell = torch.as_tensor(np.array([[6.0, 0, 0], [1.5, 5.5, 0], [-1, 2, 6]])).expand(2, 3, 3).contiguous()
    pbc = torch.ones(2, 3, dtype=torch.bool)

    def matrix(x, cell, idx, pbc):
        options = {"max_neighbors": 64, "return_vectors": True, "return_distances": True}
        return neighbor_list(x, 3.0, cell, pbc, idx, method=method, **options)

    def pairs(x, cell, idx, pbc):
        options = {"return_neighbor_list": True, "return_vectors": True, "return_distances": True}
        return neighbor_list(x, 3.0, cell, pbc, idx, method=method, **options)

    expected = [f(x, cell, idx, pbc) for f in (matrix, pairs)]
    for name, *arguments in layouts(x, cell, idx, pbc):
        assert all(torch.equal(a, b) for a, b in zip(arguments, (x, cell, idx, pbc)))
        if mode == "compiled":
            torch.compiler.reset()
        for function, wanted in zip((matrix, pairs), expected):
            function = compiled(function) if mode == "compiled" else function
            found = function(*arguments)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), name


def test_eager_calls_need_no_compiler(tmp_path):
    """No C compiler on the PATH and compilation off: every call runs, gradients too, nothing compiles."""
    counted, heavy, missing = python_says(
        """
        import json, sys, torch
        from nvalchemiops.torch import neighbors
        from nvalchemiops.torch.neighbors import formats, rebuild_detection
        from tests.arguments.test_random_mistakes import CALLS

        called = {"VerletList", "NeighborOverflowError"}
        for name, (function, good) in CALLS.items():
            called.add(name.split(",")[0])
            function(**good)

        def call(name, *arguments):
            called.add(name)
            return getattr(formats, name)(*arguments)

        x, cell = torch.rand(20, 3, dtype=torch.float64).requires_grad_(), torch.eye(3, dtype=torch.float64)
        for as_list in (False, True):
            options = {"return_neighbor_list": as_list, "return_vectors": True, "return_distances": True}
            neighbors.neighbor_list(x, 0.7, cell, **options)[-1].square().sum().backward()
        pairs, ptr, shifts = neighbors.neighbor_list(x, 0.7, cell, return_neighbor_list=True)
        call("half_to_full", *call("full_to_half", pairs, ptr, shifts))
        matrix, count, images = call("get_neighbor_matrix_from_neighbor_list", pairs, ptr, shifts)
        call("get_neighbor_list_from_neighbor_matrix", matrix, count, images)
        call("check_full_list", pairs, ptr, shifts)
        call("transpose_order", pairs, len(x))
        call("list_geometry", x, pairs, shifts, cell)
        call("matrix_geometry", x, matrix, count, images, cell)
        heavy = sorted(name for name in sys.modules if name in ("torch._inductor.compile_fx", "triton"))
        from torch._dynamo.utils import counters  # which imports triton where it is installed

        counted = {name: dict(c) for name, c in counters.items() if c}
        public = {*neighbors.__all__, *formats.__all__, *rebuild_detection.__all__}
        print(json.dumps([counted, heavy, sorted(public - called)]))
        """,
        PATH=tmp_path,
        CC="",
        CXX="",
        TORCH_COMPILE_DISABLE="1",
        TORCHINDUCTOR_CACHE_DIR=tmp_path / "inductor",
    )
    assert counted == {} and heavy == [] and not list(tmp_path.rglob("*.*"))
    assert missing == [], "public functions that this test does not call"


def energy_and_forces(x, cell):
    """A pair energy on a list of unknown length, and forces by gathering over its rows."""
    pairs, _, _, distances, vectors = neighbor_list(
        x, 2.0, cell, return_neighbor_list=True, return_distances=True, return_vectors=True
    )
    energy = 0.5 * (2.0 - distances).square().sum()
    slope = -2.0 * (2.0 - distances) / distances
    return energy, torch.zeros_like(x).index_add(0, pairs[0].long(), slope.unsqueeze(-1) * vectors)


def crowd(n_atoms, seed):
    return points(n_atoms, seed) * 5.0


def test_compiled_dynamics_with_changing_counts():
    """50 steps with other numbers of atoms and pairs, also none at all: at most 2 compilations."""
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(energy_and_forces, backend=counter, fullgraph=True)
    cell = 5.0 * torch.eye(3, dtype=F64)
    rng = np.random.default_rng(9)
    sizes = [37, *rng.integers(2, 120, 47).tolist(), 2, 64]
    for step, n_atoms in enumerate(sizes):
        x = crowd(n_atoms, step) * (1e-3 if step == 20 else 1.0)
        x = x + torch.arange(n_atoms)[:, None] * (2.0 if step == 20 else 0.0)
        box = cell * (1000.0 if step == 20 else 1.0)
        torch._dynamo.mark_dynamic(x, 0)
        found = function(x, box)
        expected = energy_and_forces(x, box)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert counter.frame_count <= 2
    assert float(energy_and_forces(crowd(37, 0), cell)[0]) > 0.0


def test_compiled_gradients_with_changing_counts():
    """The same with the forces by autograd, through a list of unknown length."""
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(lambda x, cell: energy_and_forces(x, cell)[0], backend=counter, fullgraph=True)
    cell = 5.0 * torch.eye(3, dtype=F64)
    for step in range(12):
        x = crowd(20 + 7 * step, step).requires_grad_()
        torch._dynamo.mark_dynamic(x, 0)
        (gradient,) = torch.autograd.grad(function(x, cell), x)
        torch.testing.assert_close(-gradient, energy_and_forces(x.detach(), cell)[1], rtol=1e-10, atol=1e-10)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("method", ["naive", "cell_list", None])
def test_fixed_capacity_traces_whole(method):
    """The matrix with a given width is one static graph with gradients; it says if it is too narrow."""

    def energy(x, cell):
        options = {"max_neighbors": 48, "return_distances": True, "method": method}
        _, count, _, distances = neighbor_list(x, 2.0, cell, **options)
        filled = torch.arange(48) < count.unsqueeze(-1)
        return torch.where(filled, (2.0 - distances).square(), 0.0).sum(), count

    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(energy, backend=counter, fullgraph=True)
    cell = 5.0 * torch.eye(3, dtype=F64)
    for step in range(5):
        x = crowd(60, step).requires_grad_()
        found, count = function(x, cell)
        expected, _ = energy(x, cell)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        gradients = [torch.autograd.grad(e, x)[0] for e in (found, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)
        assert int(count.max()) <= 48
    assert counter.frame_count == 1
    packed = crowd(60, 0) * 0.2
    assert int(function(packed, cell)[1].max()) > 48


# -- what a review found: crashes at the ends of numbers ------------------------------------------


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_atoms_at_opposite_ends_of_the_bins(axis):
    """Bins end at some distance: atoms beyond share the last ones, and search no more than these."""
    x = torch.zeros(2, 3, dtype=torch.float64)
    x[:, axis] = torch.tensor([-1e12, 1e12])
    assert not neighbor_list(x, 1.0, method="cell_list")[1].any()
    x = torch.rand(300, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 10.0
    x[:, axis] += torch.tensor([-1e10] * 150 + [1e10] * 150)
    _, count = neighbor_list(x, 5.0)
    assert torch.equal(count, neighbor_list(x, 5.0, method="naive")[1]) and count.sum() > 0


def test_a_batch_of_no_system_has_no_atoms():
    x, idx = torch.rand(6, 3), torch.zeros(6, dtype=torch.int32)
    rows = {"neighbor_matrix": torch.zeros(6, 9).int(), "num_neighbors": torch.zeros(6).int()}
    for options in (
        {"batch_ptr": torch.tensor([0])},
        {"batch_ptr": torch.tensor([0]), "check": False},
        {"cell": torch.zeros(0, 3, 3), "batch_idx": idx},
        {"cell": torch.eye(3), "pbc": torch.zeros(0, 3, dtype=torch.bool), "batch_idx": idx},
        {"batch_idx": idx, "rebuild_flags": torch.zeros(0, dtype=torch.bool), **rows},
    ):
        with pytest.raises(ValueError, match=r"batch_ptr|rebuild_flags"):
            neighbor_list(x, 1.0, **options)
    pairs, ptr, shifts = neighbor_list(x[:0], 1.0, torch.zeros(0, 3, 3), batch_idx=idx[:0], return_neighbor_list=True)
    assert pairs.shape == (2, 0) and ptr.tolist() == [0] and shifts.shape == (0, 3)


def test_more_neighbors_than_int32_counts_are_refused():
    x, cell, along = torch.zeros(17, 3, dtype=torch.float64), torch.eye(3, dtype=torch.float64), [True, False, False]
    with pytest.raises(ValueError, match="cutoff"):
        neighbor_list(x, 2.0**26 - 1, cell, torch.tensor(along), target_indices=torch.tensor([0]), max_neighbors=4)


@pytest.mark.parametrize("options", [{}, {"max_neighbors": 4}, {"return_neighbor_list": True}])
def test_coordinates_that_overflow_are_named(options):
    for large in (1e308, -1.7e308):
        with pytest.raises(ValueError, match="positions"):
            neighbor_list(torch.tensor([[large, 0.0, 0.0]]).double(), 0.05, 0.1 * torch.eye(3).double(), **options)


def test_lists_under_vmap_are_checked():
    x, cell = torch.rand(2, 20, 3), 2.0 * torch.eye(3)

    def matrix(x, room):
        return neighbor_list(x, 1.0, cell, max_neighbors=room)[0]

    found = torch.vmap(lambda x: matrix(x, 60))(x)
    assert torch.equal(found, torch.stack([matrix(part, 60) for part in x]))
    with pytest.warns(NeighborListWarning, match="`max_neighbors` = 2") as said:
        wide = torch.vmap(lambda x: matrix(x, 2))(x)
    assert len(said) == 1 and 20 < wide.shape[2] <= 60 and torch.equal(wide, found[:, :, : wide.shape[2]])
    x[1, 3] = torch.nan
    with pytest.raises(ValueError, match="positions"):
        torch.vmap(lambda x: matrix(x, 60))(x)


def test_bins_for_more_systems_than_memory_has():
    """Systems that are only numbers take no bins of their own."""
    n = 40_000
    x = torch.rand(n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 100.0
    idx = torch.arange(n, dtype=torch.int32) // 50
    options = {"batch_idx": idx, "max_neighbors": 60}
    tracked = neighbor_list(x, 2.0, method="batch_cell_list", check=False, **options)
    assert all(torch.equal(a, b) for a, b in zip(tracked, neighbor_list(x, 2.0, **options), strict=True))


def test_counts_are_written_to_memory_given_for_them_in_every_form():
    x, cell = torch.rand(20, 3).double() * 4.0, 4.0 * torch.eye(3).double()
    _, expected, _ = neighbor_list(x, 2.0, cell)
    for options in ({}, {"return_neighbor_list": True}, {"return_neighbor_list": True, "max_neighbors": 60}):
        count = torch.full((20,), -7, dtype=torch.int32)
        neighbor_list(x, 2.0, cell, num_neighbors=count, **options)
        assert torch.equal(count, expected)


def test_the_compiler_does_not_follow_a_launch():
    """Without ``fullgraph`` torch keeps sizes that depend on values out of graphs, and Python calls the operator."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    x, cell = torch.as_tensor(np.random.default_rng(0).random((20, 3)) * 6.0), 6.0 * torch.eye(3, dtype=torch.float64)
    found = torch.compile(lambda x: neighbor_list(x, 3.0, cell), backend="eager")(x)
    assert all(map(torch.equal, found, neighbor_list(x, 3.0, cell)))
    reasons = list(torch._dynamo.utils.counters["graph_break"])
    assert reasons and all("Dynamic shape operator" in reason for reason in reasons)
