"""Searches of small systems that repeat, which are run by a plan: the same bits and errors as without."""

import gc
import threading
import warnings
import weakref

import pytest
import torch

from nvalchemiops import launch
from nvalchemiops.torch import plans
from nvalchemiops.torch.neighbors import neighbor_list
from nvalchemiops.torch.runtime import engine, tables
from tests.support.plans import forget, ordinary

F64 = torch.float64


def system(n_atoms=60, length=8.0, seed=0):
    generator, length = torch.Generator().manual_seed(seed), length * max(n_atoms / 60, 1.0) ** (1 / 3)
    cell = length * torch.eye(3, dtype=F64) + torch.rand((3, 3), generator=generator, dtype=F64) - 0.5
    return (2.0 * torch.rand((n_atoms, 3), generator=generator, dtype=F64) - 0.5) @ cell, cell


def batch(sizes=(30, 1, 0, 12), seed=0):
    """Positions, cells and systems of atoms."""
    found = [system(n_atoms, seed=seed + number) for number, n_atoms in enumerate(sizes)]
    numbers = torch.arange(len(sizes), dtype=torch.int32).repeat_interleave(torch.tensor(sizes))
    return torch.cat([x for x, _ in found]), torch.stack([cell for _, cell in found]), numbers


def same(found, expected):
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, expected, strict=True))


def way():
    """Which way the last search went."""
    return engine.explain().partition("search: ")[2].partition("\n")[0]


REPLAYED = "plan (replayed)"


AXES = [[True, True, True], [True, False, True], [False, True, True], [False, False, False]]
OPTIONS = {
    "periodic": {},
    "matrix": {"return_neighbor_list": False},
    "half": {"half_fill": True},
    "half matrix": {"half_fill": True, "return_neighbor_list": False},
    "naive": {"method": "naive"},
    "binned": {"method": "cell_list"},
    "vectors": {"return_vectors": True, "return_distances": True},
    "cluster": {"cell": None},
    "nearest": {"nearest": 5},
    "nearest by index": {"nearest": 5, "ties": "index"},
    "nearest of both": {"nearest": 5, "symmetric": True, "return_neighbor_list": False},
    "targets": {"target_indices": torch.tensor([3, 0, 4])},
    "axes": {"pbc": torch.tensor(AXES)},
}


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=["float32", "float64"])
@pytest.mark.parametrize("form", ["one", "long", "as a batch", "batch", "int64", "pointers", "unsorted"])
@pytest.mark.parametrize("options", OPTIONS)
def test_lists_are_those_of_the_ordinary_search(options, form, dtype):
    """Atoms, cells, cutoffs and all memory differ in each call; results are the caller's."""
    given, kept, in_batch = OPTIONS[options], [], form in ("batch", "int64", "pointers", "unsorted")
    options = {"return_neighbor_list": True, **given}
    if not in_batch and "pbc" in options:
        options["pbc"] = options["pbc"][1]
    if options.get("method"):
        options["method"] = "batch_" * in_batch + options["method"]
    for step in range(5):
        x, cell, numbers = batch(seed=step) if in_batch else (*system(900 if form == "long" else 60, seed=step), None)
        cell = cell[None] if form == "as a batch" else cell
        here = {"cutoff": 3.0 + 0.5 * (step == 3), "cell": cell.to(dtype), **options}
        if in_batch:
            numbers = numbers.flip(0) if form == "unsorted" else numbers.long() if form == "int64" else numbers
            ptr = torch.tensor([0, 30, 31, 31, 43], dtype=torch.int32)
            here |= {"batch_ptr": ptr} if form == "pointers" else {"batch_idx": numbers}

        def call(x=x, here=here):
            return neighbor_list(
                x.to(dtype), **{key: t.clone() if isinstance(t, torch.Tensor) else t for key, t in here.items()}
            )

        found = call()
        replayed = way() == REPLAYED
        assert replayed == (step in (2, 4)), engine.explain()
        kept.append((found, ordinary(call)))
    for found, expected in kept:
        same(found, expected)


IN_PLACE = {name: options for name, options in OPTIONS.items() if name not in ("axes", "vectors")}


@pytest.mark.parametrize("form", ["one", "batch", "unsorted"])
@pytest.mark.parametrize("options", IN_PLACE)
def test_matrices_in_place_are_those_of_the_ordinary_search(options, form):
    """Memory is another one in each call; all of it is written, and torch sees that it changes."""
    options = {**IN_PLACE[options], "return_neighbor_list": False}
    if form != "one" and options.get("method"):
        options["method"] = "batch_" + options["method"]
    for step in range(5):
        x, cell, numbers = (*system(seed=step), None) if form == "one" else batch(seed=step)
        numbers = numbers.flip(0) if form == "unsorted" else numbers
        here, n = {"cell": cell, "batch_idx": numbers, **options}, len(options.get("target_indices", x))

        def call(x=x, here=here, n=n):
            shapes = {"neighbor_matrix": (n, 60), "num_neighbors": (n,), "neighbor_matrix_shifts": (n, 60, 3)}
            memory = {name: torch.full(shape, -7, dtype=torch.int32) for name, shape in shapes.items()}
            found = neighbor_list(x, 3.0, **here, **memory)
            assert found[0] is memory["neighbor_matrix"] and found[1] is memory["num_neighbors"]
            assert all(t._version > 0 for t in memory.values())
            return found

        found = call()
        assert (way() == REPLAYED) == (step >= 2), engine.explain()
        same(found, ordinary(call))


def test_long_rows_and_faults():
    """Rows that are longer than the memory for them are searched again; a fault is raised each time."""
    x, cell = system()

    def call(x=x, cutoff=16.0, cell=cell, **options):
        return neighbor_list(x, cutoff, cell, return_neighbor_list=True, **options)

    expected = ordinary(call), ordinary(lambda: call(0.9 * x))
    for _ in range(3):
        same(call(), expected[0]), same(call(0.9 * x), expected[1])
    assert way() == REPLAYED
    lost = x.clone()
    lost[3, 1] = float("nan")
    for wrong, what in (((lost,), "NaN"), ((x, 16.0, 0.0 * cell), "singular")) * 2:
        with pytest.raises(ValueError, match=what):
            call(*wrong)
        assert way() == REPLAYED
        same(call(), expected[0])


@pytest.mark.parametrize("cutoff", [3.0, 16.0], ids=["short rows", "long rows"])
def test_systems_of_atoms_that_change(cutoff):
    x, cell, numbers = batch()
    before = numbers.clone()

    def call(numbers=numbers):
        return neighbor_list(x, cutoff, cell, batch_idx=numbers, return_neighbor_list=True)

    first = [call() for _ in range(3)][-1]
    numbers[30:33] = 0
    same(call(before), first)  # its plan has numbers of its own
    assert way() == REPLAYED
    for _ in range(3):
        same(call(), ordinary(call))
    numbers[30:33] = torch.tensor([1, 3, 3], dtype=torch.int32)
    same(call(), first)
    assert way() == REPLAYED
    for wrong in (numbers + 1, numbers - 1):
        for _ in range(3):
            with pytest.raises(ValueError, match="batch_idx"):
                call(wrong)
    same(call(), first)


def test_memory_of_the_caller_is_not_kept():
    x, cell = system()
    expected = neighbor_list(x, 3.0, cell, return_neighbor_list=True)
    for step in range(4):
        here, box = x.clone(), cell.clone()
        found = neighbor_list(here, 3.0, box, return_neighbor_list=True)
        same(found, expected)
        here.zero_(), box.zero_(), [t.zero_() for t in found]
        assert (way() == REPLAYED) == (step > 0)


def test_inference_mode():
    """What was made in inference mode is used outside of it, and the other way round."""
    inputs = [system(seed=seed) for seed in range(3)]
    with torch.inference_mode():
        inputs += [(x.clone(), cell.clone()) for x, cell in inputs]
    for modes in ((True, False), (False, True)):
        forget()
        for count, ((x, cell), inside) in enumerate((pair, inside) for inside in modes for pair in inputs):
            with torch.inference_mode(inside):
                found = neighbor_list(x, 3.0, cell, return_neighbor_list=True)
                assert (way() == REPLAYED) == (count > 1) and found[0].is_inference() == inside
                same(found, ordinary(lambda x=x, cell=cell: neighbor_list(x, 3.0, cell, return_neighbor_list=True)))


def test_plans_keep_nothing_of_the_caller():
    """Neither tensors nor, by views of them, the memory that they are in."""
    x, cell, _ = batch()
    kept = []
    for _ in range(3):
        given = {
            "cell": cell.clone(),
            "pbc": torch.ones(4, 3, dtype=torch.bool),
            "batch_ptr": torch.tensor([0, 30, 31, 31, 43], dtype=torch.int32),
            "target_indices": torch.tensor([3, 0, 40]),
        }
        y = x.clone()
        neighbor_list(y, 3.0, return_neighbor_list=True, **given)
        kept += [weakref.ref(t) for t in (y, *given.values())]
    assert way() == REPLAYED
    del y, given
    gc.collect()
    assert not any(one() is not None for one in kept)


def test_a_tape_sees_launches():
    """A recording of launches on tensors is refused in any case."""
    x, cell = system()
    for _ in range(3):
        neighbor_list(x, 3.0, cell, return_neighbor_list=True)
    assert way() == REPLAYED
    with launch.record(), pytest.raises(launch.NotDifferentiableError):
        neighbor_list(x, 3.0, cell, return_neighbor_list=True)


def test_calls_that_raise_cost_no_credit():
    x, cell = system()
    x[3] = torch.nan
    for _ in range(20):
        with pytest.raises(ValueError, match="finite"):
            neighbor_list(x, 3.0, cell, return_neighbor_list=True)
    assert way() == REPLAYED and tables.everywhere.recorded == 1


def test_threads():
    """One thread at a time has a plan, others do without."""
    inputs = [system(seed=seed) for seed in range(4)]
    with plans.off():
        expected = [neighbor_list(x, 3.0, cell, return_neighbor_list=True) for x, cell in inputs]
    wrong = []

    def work(number):
        x, cell = inputs[number]
        for _ in range(50):
            found = neighbor_list(x, 3.0, cell, return_neighbor_list=True)
            if not all(torch.equal(a, b) for a, b in zip(found, expected[number], strict=True)):
                wrong.append(number)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for worker in workers:
        worker.start()
    work(1)
    for worker in workers:
        worker.join()
    assert not wrong and tables.everywhere.replayed > 50


def spread_out(values):
    """The same values in every second place of memory whose other places hold values that are wrong."""
    wrong = torch.ones_like(values) if values.dtype is torch.bool else torch.full_like(values, 777)
    return torch.stack([values, wrong], -1)[..., 0]


@pytest.mark.parametrize("as_list", [True, False])
@pytest.mark.parametrize("name", ["positions", "cell", "pbc", "batch_idx", "batch_ptr", "target_indices"])
def test_inputs_may_be_views_with_gaps(name, as_list):
    x = torch.rand(30, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 5.0
    given = {
        "positions": x,
        "cell": 5.0 * torch.eye(3, dtype=x.dtype).repeat(2, 1, 1),
        "pbc": torch.tensor([[True, False, True], [False, True, True]]),
        "batch_idx": torch.tensor([0] * 12 + [1] * 18, dtype=torch.int32),
        "batch_ptr": torch.tensor([0, 12, 30], dtype=torch.int32),
        "target_indices": torch.tensor([5, 3, 29, 3, 17], dtype=torch.int32),
    }
    given.pop({"batch_idx": "batch_ptr", "batch_ptr": "batch_idx"}.get(name, ""), None)
    expected = neighbor_list(cutoff=1.7, return_neighbor_list=as_list, **given)
    given[name] = spread_out(given[name])
    assert not given[name].is_contiguous()
    for _ in range(4):
        found = neighbor_list(cutoff=1.7, return_neighbor_list=as_list, **given)
        assert all(map(torch.equal, found, expected))


def test_a_trace_sees_the_operator_and_not_how_calls_run():
    x, cell = system(8)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        traced = torch.jit.trace(lambda y: neighbor_list(y, 2.0, cell, return_neighbor_list=True)[0], (x,))
    assert not [w for w in said if issubclass(w.category, torch.jit.TracerWarning) and "runtime" in w.filename]
    moved = x + 0.3
    assert torch.equal(traced(moved), neighbor_list(moved, 2.0, cell, return_neighbor_list=True)[0])
