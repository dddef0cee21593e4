"""Bad arguments raise ValueError or TypeError with the name of the argument, in every function that has it.

Values on a GPU are read only where the search waits anyway; with ``check=False`` they are not read at all, and then
nothing may be written or read out of bounds. The functions of `rebuild_detection`, `formats` and `VerletList` have
their own tables in tests/values: test_stale_lists.py, test_neighbor_formats.py and test_verlet.py.
"""

import functools
import inspect

import pytest
import torch

from nvalchemiops.notices import NeighborListWarning
from nvalchemiops.torch import neighbors
from nvalchemiops.torch.neighbors.batch_cell_list import batch_build_cell_list
from nvalchemiops.torch.neighbors.formats import matrix_geometry, pairs_of_matrix
from nvalchemiops.torch.neighbors.neighbor_utils import allocate_cell_list
from nvalchemiops.torch.runtime.context import hidden_values
from tests.support.mistakes import assert_named
from tests.support.processes import output_of, run_python

NAN, INF = float("nan"), float("inf")
X = torch.tensor([[0.0, 0, 0], [0.5, 0, 0], [0, 0.5, 0], [0, 0, 0.5]], dtype=torch.float64)
CELL = 3.0 * torch.eye(3, dtype=torch.float64)
PERIODIC = torch.ones(3, dtype=torch.bool)
IDX = torch.tensor([0, 0, 1, 1], dtype=torch.int32)
PTR = torch.tensor([0, 2, 4], dtype=torch.int32)
ALONE = {"positions": X, "cell": CELL, "pbc": PERIODIC}
TOGETHER = {"positions": X, "cell": CELL.expand(2, 3, 3), "pbc": PERIODIC.expand(2, 3), "batch_idx": IDX}
ONE, TWO = {"cutoff": 1.0}, {"cutoff1": 1.0, "cutoff2": 0.8}


def with_method(method):
    def neighbor_list(*arguments, **options):
        return neighbors.neighbor_list(*arguments, **{"method": method, **options})

    neighbor_list.__signature__ = inspect.signature(neighbors.neighbor_list)
    return neighbor_list


# name: function, arguments that are in order
FUNCTIONS = {
    **{f"neighbor_list, {method}": (with_method(method), ALONE | ONE) for method in ("naive", "cell_list", None)},
    **{
        f"neighbor_list, batch, {method}": (with_method(method), TOGETHER | ONE)
        for method in ("batch_naive", "batch_cell_list", None)
    },
    "neighbor_list, two cutoffs": (neighbors.neighbor_list, ALONE | {"cutoff": 1.0, "cutoff2": 0.8}),
    "neighbor_list, batch, two cutoffs": (neighbors.neighbor_list, TOGETHER | {"cutoff": 1.0, "cutoff2": 0.8}),
    "cell_list": (neighbors.cell_list, ALONE | ONE),
    "naive_neighbor_list": (neighbors.naive_neighbor_list, ALONE | ONE),
    "naive_neighbor_list_dual_cutoff": (neighbors.naive_neighbor_list_dual_cutoff, ALONE | TWO),
    "batch_cell_list": (neighbors.batch_cell_list, TOGETHER | ONE),
    "batch_naive_neighbor_list": (neighbors.batch_naive_neighbor_list, TOGETHER | ONE),
    "batch_naive_neighbor_list_dual_cutoff": (neighbors.batch_naive_neighbor_list_dual_cutoff, TOGETHER | TWO),
}


def ints(*shape, dtype=torch.int32):
    return torch.zeros(shape, dtype=dtype)


def bad_values(batched):
    """(error, name of the argument, the bad value and whatever else must change with it)."""
    systems = 2 if batched else 1
    eye = torch.eye(3, dtype=torch.float64)
    for value in (X.int(), X.tolist(), X.numpy(), X.half(), X.to(torch.complex64), None):
        yield TypeError, "positions", {"positions": value}
    for value in (X[:, :2], X.flatten(), X[None], X * NAN, X + torch.tensor([0, INF, 0]), X - INF):
        yield ValueError, "positions", {"positions": value}
    for value in (-1e-9, -1.0, NAN, INF, -INF):
        yield ValueError, "cutoff", {"cutoff": value}
    for value in ("long", [1.0, 2.0], X, 1j):
        yield TypeError, "cutoff", {"cutoff": value}

    for value in (CELL.half(), CELL.int(), CELL.numpy(), CELL.tolist()):
        yield TypeError, "cell", {"cell": value}
    yield ValueError, "cell", {"cell": CELL.to("meta")}  # any other device
    for value in (CELL[:2], CELL[None, None], CELL.flatten()):
        yield ValueError, "cell", {"cell": value}
    yield ValueError, "cell|pbc", {"cell": CELL.expand(systems + 1, 3, 3)}  # one of them is wrong
    plane = torch.tensor([[1.0, 0, 0], [0, 1.0, 0], [1.0, 1.0, 0]], dtype=torch.float64)
    for value in (0 * eye, torch.ones_like(eye), plane, eye * INF, eye * NAN, eye + torch.diag(eye[0] * NAN)):
        yield ValueError, "cell", {"cell": value.expand(systems, 3, 3)}
    yield ValueError, "cell", {"cell": torch.diag(eye.new_tensor([1.0, 1.0, 0.0])).expand(systems, 3, 3)}
    if batched:
        yield ValueError, "cell", {"cell": torch.stack([CELL, plane])}

    yield ValueError, "pbc", {"cell": None}
    yield ValueError, "pbc", {"cell": None, "pbc": torch.tensor([False, False, True])}
    yield TypeError, "pbc", {"pbc": torch.ones(3)}
    yield TypeError, "pbc", {"pbc": torch.ones(3, dtype=torch.int32)}
    yield ValueError, "pbc", {"pbc": PERIODIC.to("meta")}
    for value in (PERIODIC[:2], PERIODIC.expand(systems + 2, 3), PERIODIC[None, None]):
        yield ValueError, "pbc", {"pbc": value}

    if batched:
        bare = {"cell": None, "pbc": None}
        for system in ({}, bare):
            for value in (-IDX, IDX - 1, IDX[:3], IDX[None]):
                yield ValueError, "batch_idx", {"batch_idx": value.int(), **system}
            for value in (IDX.double(), IDX.bool(), IDX.tolist()):
                yield TypeError, "batch_idx", {"batch_idx": value, **system}
        yield ValueError, "batch_idx", {"batch_idx": IDX.to("meta")}
        for value in (IDX + 1, IDX * 1000, torch.tensor([0, 0, 0, 2**31 - 1])):
            yield ValueError, "batch_idx", {"batch_idx": value.int()}
        yield ValueError, "batch_idx", {"batch_idx": IDX.long() * 2**32}  # not 0 again
        for value in ([0, 2**32, 4], [0, 2**32 + 2, 4], [0, 2, 2**32 + 4], [2**32, 2, 4]):
            yield ValueError, "batch_ptr", {"batch_ptr": torch.tensor(value), "batch_idx": None}
            yield ValueError, "batch_ptr", {"batch_ptr": torch.tensor(value), "batch_idx": None, **bare}
        for value in ([0, 2, 3], [0, 2, 5], [1, 2, 4], [0, 5, 4], [0, -1, 4], [-1, 2, 4]):
            ptr = torch.tensor(value, dtype=torch.int32)
            yield ValueError, "batch_ptr", {"batch_ptr": ptr, "batch_idx": None}
            yield ValueError, "batch_ptr", {"batch_ptr": ptr, "batch_idx": None, **bare}
            yield ValueError, "batch_ptr", {"batch_ptr": ptr}
        yield ValueError, "batch_ptr", {"batch_ptr": torch.tensor([0, 1, 4])}  # not what batch_idx says
        yield ValueError, "batch_ptr|cell", {"batch_ptr": torch.tensor([0, 4]), "batch_idx": None}
        for value in (PTR[None], PTR[:0], PTR.to("meta")):
            yield ValueError, "batch_ptr", {"batch_ptr": value, "batch_idx": None}
        for value in (PTR.double(), PTR.tolist()):
            yield TypeError, "batch_ptr", {"batch_ptr": value, "batch_idx": None}

    for value in ("naively", "batch_", "tree", 3):
        yield ValueError, "method", {"method": value}
    yield ValueError, "max_neighbors", {"max_neighbors": -1}
    yield TypeError, "max_neighbors", {"max_neighbors": 1.5}
    yield TypeError, "max_neighbors", {"max_neighbors": "many"}
    yield TypeError, "fill_value", {"fill_value": "none"}
    yield TypeError, "fill_value", {"fill_value": 0.5}
    yield ValueError, "fill_value", {"fill_value": 2**31}

    for value in ([0, 4], [-1, 0], [10**9]):
        yield ValueError, "target_indices", {"target_indices": torch.tensor(value, dtype=torch.int32)}
    yield ValueError, "target_indices", {"target_indices": ints(1, 2)}
    yield ValueError, "target_indices", {"target_indices": ints(2).to("meta")}
    yield TypeError, "target_indices", {"target_indices": torch.zeros(2)}
    yield TypeError, "target_indices", {"target_indices": [0, 1]}

    rows = {"neighbor_matrix": ints(4, 8), "neighbor_matrix_shifts": ints(4, 8, 3), "num_neighbors": ints(4)}
    for name, wrong in (
        ("neighbor_matrix", (ints(3, 8), ints(4, 8, 1), ints(8, 4).T, ints(4, 8).to("meta"))),
        ("neighbor_matrix_shifts", (ints(3, 8, 3), ints(4, 8, 2), ints(4, 8), ints(4, 3, 8).mT, ints(4, 9, 3))),
        ("num_neighbors", (ints(3), ints(4, 1), ints(8)[::2])),
    ):
        for value in wrong:
            yield ValueError, name, {**rows, name: value}
        for value in (rows[name].long(), rows[name].double(), rows[name].tolist()):
            yield TypeError, name, {**rows, name: value}
    yield ValueError, "rebuild_flags", {"rebuild_flags": torch.ones(systems, dtype=torch.bool)}
    yield ValueError, "rebuild_flags", {**rows, "rebuild_flags": torch.ones(systems + 1, dtype=torch.bool)}
    yield TypeError, "rebuild_flags", {**rows, "rebuild_flags": torch.ones(systems)}
    yield ValueError, "rebuild_flags", {**rows, "rebuild_flags": torch.ones(1, dtype=torch.bool, device="meta")}
    geometry = {"neighbor_vectors": torch.zeros(4, 8, 3).double(), "neighbor_distances": torch.zeros(4, 8).double()}
    for name, value in geometry.items():
        yield ValueError, name, {**rows, name: value[:3]}
        yield ValueError, name, {**rows, name: value[:, :7]}
        yield TypeError, name, {**rows, name: value.float()}
        yield TypeError, name, {**rows, name: value.tolist()}
        yield ValueError, name, {**rows, name: value.clone().requires_grad_()}


def mistakes(function, good):
    known = inspect.signature(function).parameters
    for number, (error, argument, changes) in enumerate(bad_values("batch_idx" in good)):
        changes = dict(changes)
        spellings = [{name: name for name in changes}]
        if "cutoff1" in known:  # two lists: each of cutoff1, cutoff2 and so on in turn
            twice = [n for n in changes if n + "1" in known]
            spellings = [{n: n + str(k) if n in twice else n for n in changes} for k in ((1, 2) if twice else (1,))]
        elif good.get("cutoff2") and "cutoff" in changes:
            spellings.append({"cutoff": "cutoff2"})
        for names in spellings:
            asked = {names[n]: v for n, v in changes.items()}
            one_list = good.get("cutoff2") and "cutoff1" not in known
            if set(asked) <= set(known) and not (one_list and {"neighbor_matrix", "rebuild_flags"} & set(asked)):
                match = "|".join(f"`{names.get(a, a)}`" for a in argument.split("|"))
                given = argument.split("|")[0]
                yield f"{given}-{number}", functools.partial(function, **good | asked), error, match


@pytest.mark.parametrize("name", FUNCTIONS)
def test_bad_arguments_are_named(name):
    assert_named(mistakes(*FUNCTIONS[name]))


def test_one_number_too_few_or_too_many_is_named():
    search, none = neighbors.neighbor_list, ints(0)
    cells, radius = CELL.expand(2, 3, 3), ints(2, 3)
    bins = functools.partial(batch_build_cell_list, X, 1.0, cells, PERIODIC, IDX)
    calls = (
        (lambda: search(X), "`cutoff` is required"),
        (lambda: search(X, 1.0, method="naive_dual_cutoff"), "`cutoff2` is required"),
        (lambda: search(X, 1.0, cutoff2=2.0, max_neighbors=3, max_neighbors1=3), "`max_neighbors1`"),
        (lambda: search(X, 1.0, batch_ptr=none), "`batch_ptr`"),
        (lambda: neighbors.suggest_neighbor_list_method(none, cutoff=1.0), "`batch_ptr`"),
        (lambda: neighbors.suggest_neighbor_list_method(PTR, cells[:, :2], positions=X), "`cell`"),
        (lambda: neighbors.estimate_cell_list_sizes(cells, PERIODIC, 1.0), "`cell` must be one cell"),
        (lambda: bins(*allocate_cell_list(4, 1, radius, "cpu")), "`atoms_per_cell_count`"),
    )
    assert_named((name, call, ValueError, name) for call, name in calls)
    bins(*allocate_cell_list(4, 2, radius, "cpu"))


@pytest.mark.parametrize("as_list", [False, True])
def test_systems_that_there_are_not_are_blamed_on_what_is_given(as_list):
    for idx in ([1, 1, 2, 2], [-1, 0, 0, 1], [2, 1, 0, 0]):
        with pytest.raises(ValueError, match="`batch_idx` must hold numbers of systems, from 0") as caught:
            neighbors.neighbor_list(
                X, 1.0, CELL.expand(2, 3, 3), batch_idx=torch.tensor(idx), return_neighbor_list=as_list
            )
        assert "batch_ptr" not in str(caught.value)
    for number in (-1, -(2**40)):  # where the number of systems is not known
        with pytest.raises(ValueError, match="`batch_idx` must hold numbers of systems"):
            idx = torch.tensor([number, 0, 0, 1])
            neighbors.neighbor_list(X, 1.0, batch_idx=idx, max_neighbors=3, return_neighbor_list=as_list)
    with pytest.raises(ValueError, match=r"^`batch_ptr` must rise from 0 to the number of atoms$"):
        neighbors.neighbor_list(X, 1.0, batch_ptr=torch.tensor([0, 3, 5]), return_neighbor_list=as_list)
    for n_systems in (0, 2):
        with pytest.raises(ValueError, match=f"for {n_systems} systems, but there is one: several need `batch_idx`"):
            neighbors.neighbor_list(X, 1.0, CELL.expand(n_systems, 3, 3), return_neighbor_list=as_list)
    with pytest.raises(ValueError, match="`batch_idx` and `batch_ptr`"):
        neighbors.neighbor_list(X, 1.0, batch_idx=IDX, batch_ptr=torch.tensor([0, 1, 4]), return_neighbor_list=as_list)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("as_list", [False, True])
def test_the_same_arguments_without_the_mistake_are_welcome(name, as_list):
    """Or the table above would test nothing."""
    function, good = FUNCTIONS[name]
    results = function(**good, return_neighbor_list=as_list)
    assert len(results) in (3, 6) and results[0].numel()
    without = {key: value for key, value in good.items() if key not in ("cell", "pbc")}
    bare = function(**without, cell=None, pbc=None, return_neighbor_list=as_list)
    assert len(bare) in (2, 4)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_unknown_keywords_are_errors(name):
    """A misspelling is not ignored, nor what would have an effect elsewhere, unless it is None."""
    function, good = FUNCTIONS[name]
    for unknown in ("half_list", "max_neighbours", "stratgy", "pair_fn", "state"):
        with pytest.raises(TypeError, match=unknown):
            function(**good, **{unknown: 1})
    function(**good, pair_fn=None, state=None)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_too_little_room_is_named_and_widened(name):
    function, good = FUNCTIONS[name]
    x = 0.01 * torch.rand(20, 3, dtype=torch.float64)
    good = {**good, "positions": x}
    if "batch_idx" in good:
        good["batch_idx"] = (torch.arange(20) >= 5).int()
    expected = 14 if "batch_idx" in good else 19
    for room in [n for n in inspect.signature(function).parameters if n.startswith("max_neighbors")]:
        if room in ("max_neighbors1", "max_neighbors2") and not good.get("cutoff2"):
            continue
        number = {"max_neighbors": "1"}.get(room, room[-1]) if good.get("cutoff2") else room[len("max_neighbors") :]
        for as_list in (False, True):
            exact = function(**good, return_neighbor_list=as_list)
            with pytest.warns(NeighborListWarning) as said:
                found = function(**good, return_neighbor_list=as_list, **{room: 3})
            (message,) = (str(warning.message) for warning in said)
            assert message.startswith(f"`max_neighbors{number}` = 3, but an atom has {expected} neighbors: ")
            for a, b in zip(found, exact, strict=True):
                n = expected if not as_list and a.ndim > 1 else None
                assert torch.equal(a[:, :n], b[:, :n]) if n else torch.equal(a, b)


def test_positions_that_are_not_finite_are_found_wherever_they_are():
    """Also at the end of a long list, in one component, in one member of a batch, and through every format."""
    x = torch.rand(3000, 3, dtype=torch.float64) * 30.0
    idx = (torch.arange(3000) // 1000).int()
    for atom, component, value in ((0, 0, NAN), (1500, 1, INF), (2999, 2, -INF)):
        broken = x.clone()
        broken[atom, component] = value
        for positions in (broken, broken.float()):
            for options in ({}, {"return_neighbor_list": True}, {"max_neighbors": 90}, {"half_fill": True}):
                for described in ({}, {"batch_idx": idx}, {"cell": 30.0 * torch.eye(3, dtype=positions.dtype)}):
                    with pytest.raises(ValueError, match="positions"):
                        neighbors.neighbor_list(positions, 2.0, **options, **described)


def test_positions_too_many_cells_apart():
    """Image numbers are int32: never a wrapped number."""
    for distance in (1e10, 1e15, 1e300):
        x = torch.tensor([[0.0, 0, 0], [distance, 0, 0]], dtype=torch.float64)
        for method in ("naive", "cell_list", None):
            with pytest.raises(ValueError, match="positions"):
                neighbors.neighbor_list(x, 1.0, torch.eye(3, dtype=torch.float64), method=method)
            assert not neighbors.neighbor_list(x, 1.0, method=method)[1].any()


def test_a_cutoff_of_a_million_images_is_refused_before_it_fills_the_memory():
    x, cell = X[:1], 1e-3 * torch.eye(3, dtype=torch.float64)
    for method in ("naive", "cell_list", None):
        with pytest.raises(ValueError, match="cutoff"):
            neighbors.neighbor_list(x, 10.0, cell, method=method)


@pytest.mark.parametrize(
    ("error", "argument", "options"),
    [
        (ValueError, "cutoff", {"cutoff": -1.0}),
        (ValueError, "cutoff", {"cutoff": NAN}),
        (TypeError, "cutoff", {"cutoff": "long"}),
        ((ValueError, TypeError), "cell", {"cell": CELL[:2]}),
        ((ValueError, TypeError), "cell", {"cell": CELL.tolist()}),
        (ValueError, "cell", {"cell": 0.0 * CELL}),
        (ValueError, "cell", {"cell": torch.ones_like(CELL)}),
        (TypeError, "pbc", {"pbc": torch.ones(3)}),
        (ValueError, "pbc", {"pbc": PERIODIC[:2]}),
        (ValueError, "max_nbins", {"max_nbins": 0}),
        (ValueError, "min_cells_per_dimension", {"min_cells_per_dimension": 0}),
        (TypeError, "unknown", {"unknown": 0}),
    ],
)
@pytest.mark.parametrize("batched", [False, True])
def test_estimates_of_bins(batched, error, argument, options):
    function = neighbors.estimate_batch_cell_list_sizes if batched else neighbors.estimate_cell_list_sizes
    with pytest.raises(error, match=argument):
        function(**{"cell": CELL, "pbc": PERIODIC, "cutoff": 1.0, **options})


def test_a_wild_system_number_costs_no_memory():
    """Without a cell nothing tells the number of systems but the largest entry: an error, or systems without atoms."""
    code = """
        import resource, torch
        from nvalchemiops.torch.neighbors import neighbor_list
        neighbor_list(torch.zeros(4, 3), 1.0)
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, used + 2**30))
        for wild in (10**7, 2**30, 2**31 - 1):
            for as_list in (False, True):
                try:
                    idx = torch.tensor([0, 0, 0, wild], dtype=torch.int32)
                    found = neighbor_list(torch.zeros(4, 3), 1.0, batch_idx=idx, return_neighbor_list=as_list)
                    assert (found[1].diff() if as_list else found[1]).tolist() == [2, 2, 2, 0]
                except ValueError as error:
                    assert "batch_idx" in str(error)
        print("survived")
    """
    assert output_of(run_python(code)).splitlines()[-1] == "survived"


def test_an_atom_of_no_system_is_lost_where_nobody_looks():
    """It is in no list but its own, where sums make NaN of it, and its count says so."""
    unread = {"max_neighbors": 4, "check": False}
    for idx in ([0, 0, 2, 2], [0, 0, -1, -1]):
        found = neighbors.neighbor_list(X, 1.0, CELL.expand(2, 3, 3), batch_idx=torch.tensor(idx), **unread)
        matrix, count, shifts = found
        assert count.tolist() == [1, 1, 2**31 - 1, 2**31 - 1]
        assert matrix.tolist() == [[1, 4, 4, 4], [0, 4, 4, 4], [2, 4, 4, 4], [3, 4, 4, 4]]
        assert (shifts[2:, 0] == 2**31 - 1).all()


@pytest.mark.parametrize("cell", [None, CELL.expand(3, 3, 3)])
@pytest.mark.parametrize("method", ["naive", "cell_list"])
def test_systems_in_any_order(cell, method):
    """Their lists are those of the same atoms, sorted by system."""
    generator = torch.Generator().manual_seed(0)
    idx = torch.randint(3, (90,), generator=generator) * (1 if cell is not None else 2**33)
    x = 3.0 * torch.rand(90, 3, generator=generator, dtype=CELL.dtype)
    order = torch.argsort(idx, stable=True)

    def pairs(x, idx, numbers, **unread):
        options = {"batch_idx": idx, "method": method, **unread}
        matrix, count, *_ = neighbors.neighbor_list(x, 1.0, cell, max_neighbors=90, **options)
        rows, slots = torch.nonzero(torch.arange(90) < count[:, None], as_tuple=True)
        return sorted(zip(numbers[rows].tolist(), numbers[matrix[rows, slots].long()].tolist()))

    expected = pairs(x[order], idx[order], order)
    assert len(expected) > 90
    for unread in ({}, {"check": False}):
        assert pairs(x, idx, torch.arange(90), **unread) == expected
    found, _, *_ = neighbors.neighbor_list(x, 1.0, cell, batch_idx=idx, method=method, return_neighbor_list=True)
    assert sorted(zip(*found.tolist())) == expected


def test_system_numbers_beyond_32_bits_are_systems_of_their_own():
    """Without a cell any rising numbers will do: two that differ by 2^32 are two systems."""
    for idx in ([0, 0, 2**32, 2**32], [5, 5, 2**40, 2**40], [2**33, 2**33, 2**62, 2**62]):
        expected = neighbors.neighbor_list(X, 1.0, batch_idx=IDX, return_neighbor_list=True)
        found = neighbors.neighbor_list(X, 1.0, batch_idx=torch.tensor(idx), return_neighbor_list=True)
        assert torch.equal(found[0], expected[0]) and found[0].tolist() == [[0, 1, 2, 3], [1, 0, 3, 2]]
        unread = {"max_neighbors": 4, "check": False}
        assert neighbors.neighbor_list(X, 1.0, batch_idx=torch.tensor(idx), **unread)[1].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("compiled", [False, True])
def test_distances_where_an_atom_is_lost_and_nobody_looks(compiled):
    """Its count says so, and its row has only itself, nowhere, at no distance; the other rows are as they were."""
    x = X.clone()
    x[1, 2] = NAN

    def search(x, cell):
        options = {"max_neighbors": 8, "check": False, "return_distances": True, "return_vectors": True}
        return neighbors.neighbor_list(x, 1.0, cell, **options)

    find = torch.compile(search, backend="aot_eager", fullgraph=True) if compiled else search
    matrix, count, shifts, distances, vectors = find(x, CELL)
    assert count.tolist() == [2, 2**31 - 1, 2, 2]
    assert matrix[1].tolist() == [1] + 7 * [4] and shifts[1].sum(1).tolist() == [3 * (2**31 - 1)] + 7 * [0]
    assert distances[1, 0].isnan() and vectors[1, 0].isnan().all() and not distances[1, 1:].any()
    assert distances[0, :2].tolist() == [0.5, 0.5] and int(distances.isfinite().sum()) == 31
    measure = torch.compile(matrix_geometry, backend="aot_eager", fullgraph=True) if compiled else matrix_geometry
    again, _ = measure(x, matrix, count, shifts, CELL)
    torch.testing.assert_close(again, distances, rtol=0.0, atol=0.0, equal_nan=True)
    pairs, _, shifts = pairs_of_matrix(matrix, count, shifts)
    assert pairs[:, pairs[0] == 1].tolist() == [[1], [1]] and (shifts[pairs[0] == 1] == 2**31 - 1).all()
    # a cell of which nobody looked at the volume, with positions and vectors that are finite
    matrix, _, shifts, distances, _ = find(X, torch.ones_like(CELL))
    assert distances[:, 0].isnan().all() and not distances[:, 1:].any()
    reverse, _ = matrix_geometry(X, matrix, None, -shifts, torch.ones_like(CELL))
    assert torch.equal(reverse.isnan(), distances.isnan())


@pytest.mark.parametrize("cells", [None, torch.stack([CELL, CELL])])
@pytest.mark.parametrize("width", [0, 1, 8])
def test_rows_without_a_mark_have_no_distances(cells, width):
    """Of a lost atom in a system without images, or in a matrix without columns."""
    x = torch.cat([X, X])
    x[[1, 5], 2] = NAN
    options = {"batch_idx": torch.arange(2, dtype=torch.int32).repeat_interleave(4), "max_neighbors": width}
    open_and_periodic = None if cells is None else torch.tensor([[False] * 3, [True] * 3])
    with hidden_values():
        matrix, count, *shifts, distances = neighbors.neighbor_list(
            x, 1.0, cells, open_and_periodic, check=False, return_distances=True, **options
        )
    assert distances.shape == (8, width)
    assert distances.isnan().sum(1).tolist() == [*5 * [0], int(cells is not None and width > 0), 0, 0]
    x.requires_grad_()
    again, _ = matrix_geometry(x, matrix, count, *shifts or [None], cells, options["batch_idx"])
    assert torch.equal(again.nan_to_num(9.0), distances.nan_to_num(9.0))
    (gradient,) = torch.autograd.grad(again.sum(), x)
    assert gradient.isnan().any(1).tolist() == distances.isnan().any(1).tolist()


def test_a_list_is_looked_at_even_if_that_is_not_asked_for():
    """It waits for the device in any case, and a count of pairs that are missing would be lost."""
    memory = {"neighbor_matrix": ints(4, 8), "neighbor_matrix_shifts": ints(4, 8, 3)}
    with pytest.raises(ValueError, match="positions"):
        neighbors.neighbor_list(X * NAN, 1.0, CELL, return_neighbor_list=True, check=False, **memory)


def test_unchecked_mistakes_stay_within_their_memory():
    """``check=False`` and faulty values of every kind: no crash, and nothing written beyond the results.

    In a process of its own, since a mistake here would end it.
    """
    code = """
        import itertools, torch
        from nvalchemiops.torch.neighbors import neighbor_list

        n, border = 200, 4096
        good = torch.rand(n, 3, dtype=torch.float64) * 5.0
        nan, inf = float("nan"), float("inf")
        cell = 5.0 * torch.eye(3, dtype=torch.float64).expand(4, 3, 3)
        numbers = torch.arange(n).int() // 50
        positions = [good, good * nan, good + inf, good * 1e300, torch.where(torch.rand(n, 1) < 0.1, nan, good)]
        cells = [cell, cell * 0.0, cell * nan, cell * inf, cell * 1e-9, torch.ones_like(cell), None]
        scattered = torch.randint(-9, 9, (n,)).int()
        batches = [numbers, numbers.flip(0), numbers - 2, numbers * 10**6, numbers + 2**30, scattered]
        pointers = [None, [0, 50, 100, 150, 10**6], [0, 500, -7, 3, 200], [-5, 50, 100, 150, 200], [0, 0, 0, 0, 0]]
        targets = [None, [0, 199], [-1, 10**9], [-(2**31), 2**31 - 1]]

        def canary(*shape):
            size = int(torch.tensor(shape).prod())
            whole = torch.full((size + 2 * border,), -77, dtype=torch.int32)
            return whole, whole[border : border + size].view(shape)

        cases = [(x, cell, numbers, None, None) for x in positions]
        cases += [(good, c, numbers, None, None) for c in cells]
        cases += [(good, c, b, None, None) for b in batches for c in (cell, None)]
        cases += [(good, c, b, p, None) for p in pointers for b in (None, *batches[:3]) for c in (cell, None)]
        cases += [(x, cell, b, None, t) for t in targets for x in positions[:2] for b in batches[:3]]
        for (x, c, idx, ptr, rows), method in itertools.product(cases, ("batch_naive", "batch_cell_list", None)):
            if idx is None and ptr is None:
                continue
            rows = None if rows is None else torch.tensor(rows, dtype=torch.int32)
            ptr = None if ptr is None else torch.tensor(ptr, dtype=torch.int32)
            n_rows = n if rows is None else len(rows)
            kept = [canary(n_rows, 6), canary(n_rows), canary(n_rows, 6, 3)]
            memory = dict(zip(("neighbor_matrix", "num_neighbors", "neighbor_matrix_shifts"), (k[1] for k in kept)))
            if c is None:
                memory.pop("neighbor_matrix_shifts")
            neighbor_list(
                x, 1.0, c, None, idx, ptr, method=method, target_indices=rows, check=False, fill_value=-1, **memory
            )
            assert all((k[0][:border] == -77).all() and (k[0][-border:] == -77).all() for k in kept)
            matrix = kept[0][1]
            assert int(matrix.min()) >= -1 and int(matrix.max()) < n
        print("survived")
    """
    assert output_of(run_python(code, fresh=True, MALLOC_PERTURB_="90")).splitlines()[-1] == "survived"
