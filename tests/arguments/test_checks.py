"""Numbers, flags and meshes as callers give them: whatever is no such thing is named, however large or strange."""

import decimal
import fractions
import math

import numpy as np
import pytest
import torch

from nvalchemiops import arguments
from nvalchemiops.neighbors.neighbor_utils import estimate_max_neighbors
from nvalchemiops.torch import checks
from nvalchemiops.torch.interactions.pair import PairPotential
from nvalchemiops.torch.neighbors import VerletList, estimate_cell_list_sizes, neighbor_list
from nvalchemiops.torch.neighbors.formats import (
    get_neighbor_list_from_neighbor_matrix,
    get_neighbor_matrix_from_neighbor_list,
)
from nvalchemiops.torch.neighbors.rebuild_detection import neighbor_list_needs_rebuild
from nvalchemiops.torch.operators.lattice import check_mesh

HUGE = 10**400  # no float is that large
LONG = 10**5000  # and this one Python does not even write out
X = torch.tensor([[0.0, 0, 0], [0.9, 0, 0], [0, 0.8, 0]], dtype=torch.float64)
CELL = 3.0 * torch.eye(3, dtype=torch.float64)
PERIODIC = torch.ones(3, dtype=torch.bool)
PAIRS, PTR = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32), torch.tensor([0, 1, 2, 2], dtype=torch.int32)
MATRIX, COUNT = torch.tensor([[1], [0], [3]], dtype=torch.int32), torch.tensor([1, 1, 0], dtype=torch.int32)

# function and argument: a call with it
FLOATS = {
    "estimate_max_neighbors, cutoff": lambda v: estimate_max_neighbors(v),
    "estimate_max_neighbors, atomic_density": lambda v: estimate_max_neighbors(3.0, v),
    "estimate_max_neighbors, safety_factor": lambda v: estimate_max_neighbors(3.0, safety_factor=v),
    "estimate_cell_list_sizes, cutoff": lambda v: estimate_cell_list_sizes(CELL, PERIODIC, v),
    "neighbor_list, cutoff": lambda v: neighbor_list(X, v),
    "neighbor_list, cutoff2": lambda v: neighbor_list(X, 1.0, cutoff2=v),
    "VerletList, cutoff": lambda v: VerletList(v, 0.1),
    "VerletList, skin": lambda v: VerletList(1.0, v),
    "neighbor_list_needs_rebuild, skin_distance_threshold": lambda v: neighbor_list_needs_rebuild(X, X, v),
}
INTS = {
    "estimate_max_neighbors, max_neighbors_lower_bound": lambda v: estimate_max_neighbors(3.0, 0.1, 1.0, v),
    "estimate_cell_list_sizes, max_nbins": lambda v: estimate_cell_list_sizes(CELL, PERIODIC, 1.0, v),
    "estimate_cell_list_sizes, min_cells_per_dimension": lambda v: estimate_cell_list_sizes(CELL, PERIODIC, 1.0, 9, v),
    "neighbor_list, max_neighbors": lambda v: neighbor_list(X, 1.0, max_neighbors=v),
    "neighbor_list, max_neighbors2": lambda v: neighbor_list(X, 1.0, cutoff2=1.0, max_neighbors2=v),
    "neighbor_list, fill_value": lambda v: neighbor_list(X, 1.0, fill_value=v),
    "VerletList, max_neighbors": lambda v: VerletList(1.0, 0.1, max_neighbors=v),
    "VerletList, fill_value": lambda v: VerletList(1.0, 0.1, fill_value=v),
    "matrix_from_list, max_neighbors": lambda v: get_neighbor_matrix_from_neighbor_list(PAIRS, PTR, None, v),
    "matrix_from_list, fill_value": lambda v: get_neighbor_matrix_from_neighbor_list(PAIRS, PTR, fill_value=v),
    "list_from_matrix, fill_value": lambda v: get_neighbor_list_from_neighbor_matrix(MATRIX, COUNT, None, v),
}
FLAGS = {
    **{
        f"neighbor_list, {name}": lambda v, name=name: neighbor_list(X, 1.0, CELL, **{name: v})
        for name in ("half_fill", "return_neighbor_list", "return_vectors", "return_distances", "check")
    },
    **{
        f"VerletList, {name}": lambda v, name=name: VerletList(1.0, 0.1, **{name: v})(X, CELL)
        for name in ("half_fill", "return_neighbor_list")
    },
    **{
        f"PairPotential, {name}": lambda v, name=name: PairPotential("r^-12", cutoff=0.5)(
            X, CELL, neighbor_list=PAIRS[:, :0], neighbor_shifts=torch.zeros(0, 3, dtype=torch.int32), **{name: v}
        )
        for name in ("compute_forces", "compute_virial", "half_list", "check")
    },
}


def refused(call, name, error, value):
    with pytest.raises(error, match=f"`{name.split(', ')[1]}`"):
        call(value)


@pytest.mark.parametrize("name", FLOATS)
def test_what_is_no_finite_number_is_named(name):
    for value in (HUGE, -HUGE, LONG, math.inf, math.nan, decimal.Decimal("1e400"), fractions.Fraction(HUGE)):
        refused(FLOATS[name], name, ValueError, value)
    for value in (True, np.bool_(True), torch.tensor(True), "1.0", b"1", 1j, [1.0], X):
        if not (isinstance(value, torch.Tensor) and "threshold" in name):  # whose message is that of any tensor
            refused(FLOATS[name], name, TypeError, value)


@pytest.mark.parametrize("name", INTS)
def test_what_is_no_int_of_32_bits_is_named(name):
    for value in (HUGE, -HUGE, LONG, 2**31, -(2**31) - 1, np.int64(2**31)):
        refused(INTS[name], name, ValueError, value)
    for value in (True, np.bool_(True), 2.0, np.float64(2.0), math.inf, math.nan, "2", X):
        refused(INTS[name], name, TypeError, value)


@pytest.mark.parametrize("name", FLAGS)
def test_what_is_no_flag_is_named_and_numpy_has_flags_too(name):
    for value in ("no", 2, -1, 0.0, X, [True]):
        refused(FLAGS[name], name, TypeError, value)
    for value in (False, True):
        expected = FLAGS[name](value)
        for same in (np.bool_(value), int(value), np.int64(value)):
            found = FLAGS[name](same)
            assert type(found) is type(expected) and len(found) == len(expected)
            assert all(torch.equal(a, b) for a, b in zip(found, expected))


def test_numbers_of_any_library_are_numbers():
    for value in (2, 2.0, np.float32(2), np.int8(2), torch.tensor(2.0), decimal.Decimal(2), fractions.Fraction(2)):
        assert checks.check_positive("a", value) == 2.0 and type(checks.check_positive("a", value)) is float
    for value in (2, np.int64(2), np.uint8(2)):
        assert checks.check_int("a", value) == 2 and type(checks.check_int("a", value)) is int
    assert arguments.as_float("a", -HUGE) == -math.inf
    assert checks.check_flag("a", np.bool_(False)) is False
    whole = [estimate_cell_list_sizes(CELL, pbc, 1.0) for pbc in (True, np.bool_(True), PERIODIC, None)]
    assert all(a == whole[0][0] and torch.equal(b, whole[0][1]) for a, b in whole)


def test_integers_0_and_1_are_periodicity_as_in_ase():
    """Not in tensors, whose values cannot be read everywhere."""
    slab = torch.tensor([True, True, False])
    for pbc in ((1, 1, 0), [True, 1, 0], np.array([1, 1, 0], dtype=np.uint8), (np.int64(1), np.True_, 0)):
        assert torch.equal(checks.pbc_tensor(pbc), slab)
    assert checks.pbc_tensor(1).item() is True and checks.pbc_tensor(np.zeros((0, 3), int)).shape == (0, 3)
    for wrong in ((1, 1, 2), [-1, 0, 0], np.array([0, 0, 3]), (1.0, 1.0, 0.0), np.ones(3), 2):
        with pytest.raises(TypeError, match="`pbc` must be bool, or integers 0 and 1, got torch"):
            checks.pbc_tensor(wrong)
    with pytest.raises(TypeError, match=r"`pbc` must be bool, got torch.int64: use `pbc != 0`"):
        checks.pbc_tensor(slab.long())
    x = torch.zeros(3, 3)
    with pytest.raises(TypeError, match=r"`batch_idx` must be .*, got torch.bool: give `pbc` by its name"):
        checks.check_batch(slab, x)


@pytest.mark.parametrize(
    "mesh",
    [
        (8, 9, 10),
        [8, 9, 10],
        torch.Size((8, 9, 10)),
        (np.int64(8), np.uint8(9), 10),
        np.array([8, 9, 10]),
        np.array([8, 9, 10], dtype=np.uint16)[::1],
        np.array([10, 9, 8], dtype=np.int32)[::-1],
        torch.tensor([8, 9, 10]),
        torch.tensor([[8, 9, 10]], dtype=torch.int32),
        torch.tensor([8, 0, 9, 0, 10, 0], dtype=torch.uint8)[::2],
    ],
    ids=repr,
)
def test_three_ints_in_any_container_are_a_mesh(mesh):
    found = check_mesh(mesh)
    assert found == (8, 9, 10) and all(type(n) is int for n in found)


@pytest.mark.parametrize(
    ("error", "mesh"),
    [
        (TypeError, torch.tensor([8.0, 9.0, 10.0])),
        (TypeError, torch.tensor([True, True, True])),
        (TypeError, torch.tensor([8, 9, 10]).to_sparse()),
        (TypeError, torch.tensor([8, 9, 10], dtype=torch.complex64)),
        (ValueError, torch.tensor([8, 9])),
        (ValueError, torch.tensor(8)),
        (ValueError, torch.full((3, 3), 8)),
        (ValueError, torch.zeros(0, dtype=torch.int64)),
        (ValueError, torch.tensor([8, 9, 2**40])),
        (ValueError, torch.tensor([8, 0, 10])),
        (TypeError, np.array([8.0, 9.0, 10.0])),
        (TypeError, np.array([True, True, True])),
        (TypeError, np.array(["8", "9", "10"])),
        (ValueError, np.array([[8], [9], [10]])),
        (ValueError, np.array([8, 9, 10, 11])),
        (TypeError, (8, 9, 10.0)),
        (TypeError, (8, 9, True)),
        (ValueError, (8, 9, HUGE)),
        (ValueError, (8, 9)),
        (TypeError, 8),
        (TypeError, "8 9 10"),
        (TypeError, {8, 9, 10}),
        (TypeError, None),
    ],
    ids=repr,
)
def test_any_other_mesh_is_named(error, mesh):
    with pytest.raises(error, match="`mesh_dims`"):
        check_mesh(mesh, name="mesh_dims")


def test_periodicity_in_code_compiled_for_another_device(monkeypatch):
    """In whatever form; flags are made there, and no constant is copied in each call."""
    monkeypatch.setattr(checks, "DEVICES", ("cpu", "meta"))
    graphs = []

    def flags(x):
        given = (True, [True, False, True], (False,), PERIODIC, [[True] * 3, [False] * 3], 1, (0, 1), np.ones(3, bool))
        return [checks.pbc_tensor(pbc, x.device) for pbc in given]

    def backend(graph, inputs):
        graphs.append(graph.graph)
        return graph

    found = torch.compile(flags, backend=backend, fullgraph=True)(X.to("meta"))
    assert [tuple(flag.shape) for flag in found] == [(), (3,), (1,), (3,), (2, 3), (), (2,), (3,)]
    assert all(flag.is_meta and flag.dtype is torch.bool for flag in found)
    made = [node.args[1] for node in graphs[0].nodes if node.target is torch.full]
    assert made == [True, True, False, True, False, True, False, True]


def test_integers_for_periodicity_may_differ_between_compiled_calls():
    """Which torch compiles for any integer from the second one on."""
    flags = torch.compile(lambda x, pbc: x + checks.pbc_tensor(pbc), backend="eager", fullgraph=True)
    for pbc in (1, 0, (0, 1, 1)):
        assert torch.equal(flags(torch.zeros(3), pbc), torch.as_tensor(pbc).float().expand(3))


def test_lengths_that_autocast_has_rounded_are_not_to_be_cast():
    """They have three digits left, so that casting them would hide a wrong energy."""
    turn = torch.eye(3)
    with torch.autocast("cpu", torch.bfloat16):
        for x, cell in ((X.float() @ turn, CELL.float()), (X.float(), CELL.float() @ turn)):
            with pytest.raises(
                TypeError, match=r"rounded under autocast; deform under `torch\.autocast\('cpu', enabled"
            ):
                neighbor_list(x, 1.0, cell)
    with pytest.raises(TypeError, match=r"`cell\.to\(positions\.dtype\)`"):
        neighbor_list(X.float(), 1.0, CELL.bfloat16())
