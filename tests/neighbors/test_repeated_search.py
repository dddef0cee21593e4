"""Searches of small systems that repeat: kept memory and launches give what the ordinary search gives."""

import threading

import pytest
import torch

from nvalchemiops.torch.neighbors import neighbor_list, repeated_search, search

F64 = torch.float64


def system(n_atoms=60, length=8.0, seed=0):
    generator, length = torch.Generator().manual_seed(seed), length * max(n_atoms / 60, 1.0) ** (1 / 3)
    cell = length * torch.eye(3, dtype=F64) + torch.rand((3, 3), generator=generator, dtype=F64) - 0.5
    return (2.0 * torch.rand((n_atoms, 3), generator=generator, dtype=F64) - 0.5) @ cell, cell


def ordinary(call):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "repeated_pairs", lambda *_: None)
        return call()


def same(found, expected):
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, expected, strict=True))


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """Which of the calls were made by kept searches."""
    made = []
    monkeypatch.setattr(repeated_search, "_thread", threading.local())
    original = search.repeated_pairs

    def noted(*arguments):
        found = original(*arguments)
        made.append(found is not None)
        return found

    monkeypatch.setattr(search, "repeated_pairs", noted)
    return made


OPTIONS = {
    "periodic": {},
    "half": {"half_fill": True},
    "open axis": {"pbc": torch.tensor([True, False, True])},
    "naive": {"method": "naive"},
    "binned": {"method": "cell_list"},
    "vectors": {"return_vectors": True, "return_distances": True},
    "one cell of many": {"as_batch": True},
    "cluster": {"cell": None},
}


@pytest.mark.parametrize("n_atoms", [1, 7, 60, 900])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_lists_are_those_of_the_ordinary_search(options, n_atoms, calls):
    """Positions, cells and cutoffs differ in each call; results are the caller's."""
    options = dict(options)
    as_batch, kept = options.pop("as_batch", False), []
    for step in range(6):
        x, cell = system(n_atoms, 8.0 + 0.1 * step, step)
        if as_batch:
            cell = cell.unsqueeze(0)
        given = {"cell": cell, "cutoff": 3.0 + 0.1 * (step % 3), **options}

        def call(x=x, given=given):
            return neighbor_list(x, return_neighbor_list=True, **given)

        kept.append((call(), ordinary(call)))
    assert calls == [False] + [True] * 5
    for found, expected in kept:
        same(found, expected)


def test_long_rows_and_faults_are_left_to_the_ordinary_search(calls):
    x, cell = system()
    for cutoff in (3.0, 3.0, 16.0, 3.0):
        same(*(function() for function in (lambda c=cutoff: neighbor_list(x, c, cell, return_neighbor_list=True),) * 2))
    # once in vain, then not even tried
    assert not any(calls[4:6]) and all(calls[6:]) and repeated_search._thread.searches.popitem()[1].too_long == 16.0
    lost = x.clone()
    lost[3, 1] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        neighbor_list(lost, 3.0, cell, return_neighbor_list=True)
    with pytest.raises(ValueError, match="singular"):
        neighbor_list(x, 3.0, 0.0 * cell, return_neighbor_list=True)
    expected = ordinary(lambda: neighbor_list(x, 3.0, cell, return_neighbor_list=True))
    same(neighbor_list(x, 3.0, cell, return_neighbor_list=True), expected)
    assert calls[-1]


def test_memory_of_the_caller_is_not_kept(calls):
    x, cell = system()
    expected = neighbor_list(x, 3.0, cell, return_neighbor_list=True)
    for _ in range(4):
        here, box = x.clone(), cell.clone()
        found = neighbor_list(here, 3.0, box, return_neighbor_list=True)
        same(found, expected)
        here.zero_(), box.zero_(), [t.zero_() for t in found]
    assert calls[1:] == [True] * 4


def test_inference_mode_and_threads(calls):
    """What was made in inference mode is used outside of it; each thread has a search of its own."""
    inputs = [system(seed=seed) for seed in range(4)]
    expected = [ordinary(lambda x=x, h=h: neighbor_list(x, 3.0, h, return_neighbor_list=True)) for x, h in inputs]
    with torch.inference_mode():
        for _ in range(3):
            same(neighbor_list(inputs[0][0], 3.0, inputs[0][1], return_neighbor_list=True), expected[0])
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
    assert not wrong and calls.count(True) > 200


def test_few_searches_are_kept():
    for n_atoms in range(20, 40):
        x, cell = system(n_atoms)
        for _ in range(2):
            neighbor_list(x, 3.0, cell, return_neighbor_list=True)
    assert len(repeated_search._thread.searches) == repeated_search.MOST_SEARCHES


def batch(sizes=(30, 1, 0, 12), seed=0):
    """Positions, cells and systems of atoms."""
    found = [system(n_atoms, seed=seed + number) for number, n_atoms in enumerate(sizes)]
    numbers = torch.arange(len(sizes), dtype=torch.int32).repeat_interleave(torch.tensor(sizes))
    return torch.cat([x for x, _ in found]), torch.stack([cell for _, cell in found]), numbers


OF_BATCHES = {
    "periodic": {},
    "half": {"half_fill": True},
    "mixed": {
        "pbc": torch.tensor([[True, True, True], [True, False, True], [False, True, True], [False, False, False]])
    },
    "binned": {"method": "batch_cell_list"},
    "one cell": {"cell": system()[1][None]},
    "clusters": {"cell": None},
}


@pytest.mark.parametrize("options", OF_BATCHES.values(), ids=OF_BATCHES)
def test_lists_of_batches_are_those_of_the_ordinary_search(options, calls):
    """Atoms, cells and cutoffs differ in each call, and the memory of all; then which atoms are in which system."""
    _, _, numbers = batch()
    other = numbers.clone()
    other[25:30] = 1
    for composition in (numbers, other, numbers.long()):
        kept = []
        for step in range(4):
            x, cell, _ = batch(seed=step)
            given = {"cell": cell, "cutoff": 3.0 + 0.1 * (step % 3), "batch_idx": composition.clone(), **options}

            def call(x=x, given=given):
                return neighbor_list(x, return_neighbor_list=True, **given)

            kept.append((call(), ordinary(call)))
        for found, expected in kept:
            same(found, expected)
    assert calls[:8] == [False, True, True, True] * 2 and calls[-1]


def test_batches_in_the_same_memory_and_wrong_ones(calls):
    x, cell, numbers = batch()

    def call():
        return neighbor_list(x, 3.0, cell, batch_idx=numbers, return_neighbor_list=True)

    first = [call() for _ in range(3)][-1]
    numbers[30:33] = 0
    for _ in range(3):
        same(call(), ordinary(call))
    numbers[30:33] = torch.tensor([1, 3, 3], dtype=torch.int32)
    same(call(), first)
    other = numbers.flip(0)
    for _ in range(3):
        found = neighbor_list(x, 3.0, cell, batch_idx=other, return_neighbor_list=True)
        same(found, ordinary(lambda: neighbor_list(x, 3.0, cell, batch_idx=other.clone(), return_neighbor_list=True)))
    for wrong in (numbers + 1, numbers - 1):
        for _ in range(3):
            with pytest.raises(ValueError, match="batch_idx"):
                neighbor_list(x, 3.0, cell, batch_idx=wrong, return_neighbor_list=True)
    same(call(), first)
    x[3] = torch.nan
    for _ in range(2):
        with pytest.raises(ValueError, match="finite"):
            call()
    for seed in range(10):
        neighbor_list(x[4:], 3.0, cell, batch_idx=numbers[4:] + 0 * seed, return_neighbor_list=True)
    assert len(repeated_search._thread.searches_of_batches) <= repeated_search.MOST_SEARCHES
