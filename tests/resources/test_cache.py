"""Results that are kept by value: the same as computed anew."""

import sys
from types import SimpleNamespace

import pytest
import torch

from nvalchemiops.layout import GPU, replaced_layout
from nvalchemiops.locks import Kept
from nvalchemiops.torch.operators import segments
from nvalchemiops.torch.operators.lattice import lattice_of
from nvalchemiops.torch.runtime import cache, context
from nvalchemiops.torch.runtime.cache import cached_by_identity, cached_by_value, cached_on_device
from tests.support.on_device import GPU as GPU_DEVICE
from tests.support.on_device import capturing, on_gpu, on_stream, pretended_gpu
from tests.support.processes import in_threads


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    """What the tests keep, and what they find kept, is theirs."""
    monkeypatch.setattr(cache, "_kept", Kept(cache.MOST_ENTRIES))
    monkeypatch.setattr(cache, "_captured", {})
    monkeypatch.setattr(cache, "_recognized", Kept(cache.MOST_ENTRIES))


class Counted:
    """``kept(values, others)`` keeps twice the values, and counts how often they are computed."""

    def __init__(self):
        self.times = 0

    def __call__(self, values, others=()):
        def compute():
            self.times += 1
            return (2.0 * values,)

        return cached_by_value("test: twice", (values,), others, compute)[0]


@pytest.fixture
def kept():
    return Counted()


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_equal_values_are_computed_once(kept):
    """Whichever tensor holds them, and however it lies in memory."""
    x = numbers(1.0, 2.0, 3.0, 4.0)
    first = kept(x)
    assert kept(x.clone()) is first and kept(x.repeat_interleave(2)[::2]) is first and kept.times == 1


def test_a_lattice_has_the_same_bits_however_its_cells_lie_in_memory():
    """Otherwise they would depend on which of two equal cells came first."""
    generator = torch.Generator().manual_seed(0)
    cells = torch.eye(3, dtype=torch.float64) + 0.3 * torch.randn(32, 3, 3, generator=generator, dtype=torch.float64)
    for other in (cells.repeat_interleave(2, 0)[::2], cells.mT.contiguous().mT):
        cache._kept.clear()
        found = lattice_of(other, None, 0)
        cache._kept.clear()
        assert all(map(torch.equal, found, lattice_of(cells, None, 0)))


def test_changed_in_place_is_computed_anew(kept):
    x = numbers(1.0, 2.0)
    before = kept(x)
    x[1] = 3.0
    assert torch.equal(kept(x), 2.0 * x) and torch.equal(before, numbers(2.0, 4.0))
    x[1] = 2.0
    assert kept(x) is before and kept.times == 2


def test_results_are_told_apart_by_all_that_they_depend_on(kept):
    """Name, dtype, shape, sign of zero, and the other arguments."""
    x = numbers(0.0, 0.0)
    for values in (x, x.float(), x.float().repeat(2), x.view(1, 2), -x, numbers(0.0)):
        assert (kept(values).dtype, kept(values).shape) == (values.dtype, values.shape)
    assert kept.times == 6
    kept(x, others=(3,)), kept(x, others=(4,)), kept(x, others=(3,))
    assert kept.times == 8
    (other,) = cached_by_value("test: thrice", (x + 1.0,), (), lambda: (3.0 * (x + 1.0),))
    assert not torch.equal(other, kept(x + 1.0))


def test_no_more_entries_than_the_limit_and_the_longest_unused_goes_first(kept):
    inputs = [numbers(float(k)) for k in range(cache.MOST_ENTRIES + 1)]
    for x in inputs[:-1]:
        kept(x)
    kept(inputs[0])  # used again, so the second one is the longest unused
    kept(inputs[-1])
    assert len(cache._kept) == cache.MOST_ENTRIES and kept.times == len(inputs)
    for x in (inputs[0], *inputs[2:]):
        kept(x)
    assert kept.times == len(inputs)
    kept(inputs[1])
    assert kept.times == len(inputs) + 1


def test_no_more_memory_than_the_limit(kept, monkeypatch):
    """Of values and results together; what is larger than the limit alone is not kept, and pushes nothing out."""
    monkeypatch.setattr(cache, "MOST_BYTES", 100 * 8)
    for k in range(4):
        kept(torch.full((16,), float(k), dtype=torch.float64))
        assert sum(size for size, _ in cache._kept.values()) <= cache.MOST_BYTES
    assert len(cache._kept) == 3
    large = torch.zeros(51, dtype=torch.float64)
    assert torch.equal(kept(large), kept(large)) and kept.times == 6 and len(cache._kept) == 3
    kept(torch.zeros(50, dtype=torch.float64))
    assert len(cache._kept) == 1


@pytest.mark.parametrize("way", ["leaf", "no others", "vmap", "meta"])
def test_what_may_not_be_kept_is_computed_each_time(kept, way):
    x = numbers(1.0, 2.0)
    for _ in range(2):
        if way == "leaf":
            leaf = x.clone().requires_grad_()
            assert torch.equal(torch.autograd.grad(kept(leaf).sum(), leaf)[0], numbers(2.0, 2.0))
        elif way == "vmap":
            assert torch.equal(torch.func.vmap(kept)(x), 2.0 * x)
        else:
            kept(x, others=None) if way == "no others" else kept(x.to("meta"))
    assert kept.times == 2 and not cache._kept


def test_kept_in_inference_mode_and_used_outside_of_it(kept):
    x = numbers(1.0, 2.0)
    with torch.inference_mode():
        kept(x)
    leaf = numbers(3.0, 4.0).requires_grad_()
    assert torch.equal(torch.autograd.grad((leaf * kept(x)).sum(), leaf)[0], 2.0 * x) and kept.times == 1


def test_an_error_is_not_kept(kept):
    def fails():
        raise ArithmeticError("on purpose")

    x = numbers(1.0)
    with pytest.raises(ArithmeticError):
        cached_by_value("test: twice", (x,), (), fails)
    assert torch.equal(kept(x), 2.0 * x)


def test_many_threads_get_what_is_theirs(kept):
    """More inputs than are kept, so entries come and go all the time."""
    inputs = [numbers(float(k), -float(k)) for k in range(2 * cache.MOST_ENTRIES)]

    def work(first):
        order = inputs[first:] + inputs[:first]
        return all(torch.equal(kept(x), 2.0 * x) for _ in range(20) for x in order)

    assert all(in_threads(work, range(8)))
    assert len(cache._kept) == cache.MOST_ENTRIES


# -- which values are read ------------------------------------------------------------------------


def negated_by_a_flag():
    """-5, stored as 5."""
    values = torch.complex(torch.ones(3).double(), torch.full((3,), 5.0).double()).conj().imag
    assert values.is_neg()
    return values


def test_lazily_negated_values_are_told_from_those_that_are_not():
    x = negated_by_a_flag()
    for values in (x, -x, x.resolve_neg()):
        (found,) = cached_by_value("test: double", (values,), (), lambda: (2.0 * values,))  # noqa: B023 (called at once)
        assert torch.equal(found, 2.0 * values)


@pytest.mark.parametrize("transformed", [False, True])
def test_lazily_negated_values_on_the_host(transformed):
    x = negated_by_a_flag()
    seen = []
    if transformed:
        torch.func.grad(lambda y: (seen.append(context.on_host(torch._neg_view(y))), y.sum())[1])(-x)
    else:
        seen.append(context.on_host(x))
    assert seen[0].tolist() == [-5.0, -5.0, -5.0]


def test_what_may_be_read_behind_a_graph_break():
    """Functions that Python calls there are compiled by themselves; a question must not be answered for the caller."""

    def doubled(x):
        if not (context.may_read(x) and context.is_eager(x) and context.may_keep(x)):
            raise ValueError("this is taken for compiled code")
        return 2.0 * x

    def broken(x):
        y = x + 1.0
        torch._dynamo.graph_break()
        return doubled(y)

    torch.compiler.reset()
    assert torch.equal(torch.compile(broken, backend="eager")(torch.ones(3)), torch.full((3,), 4.0))

    def asked(x):
        return torch.zeros_like(x) if context.may_read(x) or context.is_eager(x) or context.may_keep(x) else 2.0 * x

    found = torch.compile(asked, backend="eager", fullgraph=True)(torch.ones(3))
    assert torch.equal(found, torch.full((3,), 2.0))


def test_a_result_that_is_the_argument_is_kept_as_a_copy():
    def kept(values):
        return cached_by_value("test: itself", (values,), (), lambda: (values, values[1:]))

    given = numbers(1.0, 2.0)
    kept(given)
    given.mul_(5.0)
    same, rest = kept(numbers(1.0, 2.0))
    assert same.tolist() == [1.0, 2.0] and rest.tolist() == [2.0]


def test_what_a_captured_graph_reads_is_kept_for_good(monkeypatch):
    """A graph replays with the memory that it found, so nothing else may get it; what it computes is its own."""
    kept, made = Counted(), []

    def of_no_values(number):
        def compute():
            made.append(number)
            return (torch.full((3,), float(number)),)

        return cached_on_device("test: of no values", torch.device("cpu"), number, compute)[0]

    before = of_no_values(0)
    with monkeypatch.context() as patch:
        patch.setattr(cache, "is_capturing", lambda: True)
        assert of_no_values(0) is before
        of_no_values(1)
        of_no_values(1)
    assert made == [0, 1, 1]
    for number in range(2 * cache.MOST_ENTRIES):
        kept(numbers(number))
    assert not any(key[0] == "test: of no values" for key in cache._kept)
    monkeypatch.setattr(cache, "is_capturing", lambda: True)
    assert of_no_values(0) is before


def test_a_graph_takes_what_the_call_before_has_used():
    """What another stream computes may not be there when the graph is replayed."""

    def number():
        return cached_on_device("test: on a stream", GPU_DEVICE, (), lambda: (torch.ones(1),))[0]

    with pretended_gpu():
        found = []
        for stream in (1, 2, 1, 2):
            with on_stream(stream):
                found.append(number())
        with capturing(3):
            assert number() is found[3] is found[1] is not found[2]


# -- by identity ----------------------------------------------------------------------------------


class Recognized(Counted):
    """The same for a tensor that is recognized by itself."""

    def __call__(self, values, others=()):
        def compute():
            self.times += 1
            return (2.0 * values,)

        return cached_by_identity("test: twice", values, others, compute)[0]


@pytest.fixture
def recognized():
    return Recognized()


CHANGES = {
    "an operation in place": lambda x: x.add_(1.0),
    "an item": lambda x: x.__setitem__(1, 7.0),
    "a view": lambda x: x[:2].fill_(3.0),
    "a result": lambda x: torch.add(x, 1.0, out=x),
    "in inference mode": torch.inference_mode()(lambda x: x.mul_(3.0)),
    "another memory": lambda x: x.set_(numbers(5.0, 6.0, 7.0)),
    "another memory as data": lambda x: setattr(x, "data", numbers(5.0, 6.0, 7.0)),
    "a detached tensor": lambda x: x.detach().zero_(),
    "another shape": lambda x: x.resize_(2),
    "other strides": lambda x: x.set_(x.untyped_storage(), 0, (3,), (0,)),
}


def test_a_captured_graph_computes_its_own_results(recognized):
    """It would read a kept one after this was dropped; and one of its own has no values until it is replayed."""
    x, other = on_gpu((numbers(1.0, 2.0), numbers(3.0, 4.0)))
    with pretended_gpu():
        before = recognized(x)
        with capturing(0):
            assert recognized(x) is not before and recognized(other) is not recognized(other)
        assert recognized(x) is before and recognized.times == 4
        assert recognized(other) is recognized(other) and recognized.times == 5


@pytest.mark.parametrize("manager", ["in this thread", "of a backward pass", "unknown", None])
def test_compiled_code_takes_back_the_memory_in_which_it_warms_up(manager, recognized, monkeypatch):
    """With mode="reduce-overhead" it does so on a stream of its own, and refuses to go on if others hold some of it."""
    made = SimpleNamespace(stream=SimpleNamespace(cuda_stream=5)) if manager != "unknown" else SimpleNamespace()
    managers = {0: SimpleNamespace(tree_manager=None if manager is None else made)}
    local = SimpleNamespace() if manager == "of a backward pass" else SimpleNamespace(tree_manager_containers=managers)
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", SimpleNamespace(local=local))
    monkeypatch.setattr(torch._C, "_is_key_in_tls", lambda name: name == "tree_manager_containers")
    monkeypatch.setattr(torch._C, "_get_obj_in_tls", lambda name: managers)
    x = on_gpu(numbers(1.0, 2.0))
    with pretended_gpu():
        for stream in (5, 3):
            with on_stream(stream):
                is_kept = recognized(x) is recognized(x)
            assert is_kept == (manager is None or (stream == 3 and manager != "unknown"))


@pytest.mark.parametrize("way", CHANGES)
def test_a_tensor_is_recognized_until_it_changes(recognized, way):
    x = numbers(1.0, 2.0, 3.0)
    first = recognized(x)
    assert recognized(x) is first and recognized.times == 1
    CHANGES[way](x)
    assert torch.equal(recognized(x), 2.0 * x) and recognized.times == 2
    assert torch.equal(first, numbers(2.0, 4.0, 6.0))


def test_equal_tensors_are_not_the_same_one(recognized):
    x = numbers(1.0, 2.0)
    assert recognized(x) is not recognized(x.clone()) and recognized(x, 1) is not recognized(x, 2)
    assert recognized.times == 4


def test_nothing_is_kept_of_a_tensor_that_has_ended(recognized):
    """Also where the next one gets its number and its memory."""
    for value in range(100):
        x = numbers(float(value))
        assert recognized(x).item() == 2.0 * value and len(cache._recognized) == 1
        del x
        assert not cache._recognized


def test_no_more_tensors_than_the_limit(recognized, monkeypatch):
    monkeypatch.setattr(cache, "_recognized", Kept(3))
    tensors = [numbers(float(n)) for n in range(5)]
    for x in tensors:
        recognized(x)
    assert len(cache._recognized) == 3
    recognized(tensors[-1])
    assert recognized.times == 5
    monkeypatch.setattr(cache, "MOST_BYTES", 7)
    assert recognized(numbers(1.0)) == 2.0 and len(cache._recognized) == 3


@pytest.mark.parametrize("way", ["tracked", "inference", "vmap", "mode"])
def test_what_may_change_unseen_is_not_recognized(recognized, way):
    x = numbers(1.0, 2.0).requires_grad_(way == "tracked")
    with torch.inference_mode(way == "inference"):
        x = x.clone() if way == "inference" else x
        for _ in range(2):
            if way == "vmap":
                torch.vmap(recognized)(x.unsqueeze(0))
            elif way == "mode":
                with torch.utils.flop_counter.FlopCounterMode(display=False):
                    recognized(x)
            else:
                recognized(x)
    assert recognized.times == 2 and not cache._recognized


def test_a_batch_is_sorted_once_where_values_are_not_read(monkeypatch):
    """As on a GPU; and again when the batch has changed."""
    sorts = []
    sort = segments.sort_by_system
    monkeypatch.setattr(segments, "sort_by_system", lambda *given: sorts.append(given) or sort(*given))
    batch_idx = torch.tensor([1, 0, 2, 1, 0, 2, 2], dtype=torch.int32)
    with replaced_layout("cpu", GPU):
        first = segments.sorted_by_system(batch_idx, 3)
        assert segments.sorted_by_system(batch_idx, 3) is first and len(sorts) == 1
        assert first[0].tolist() == [1, 4, 0, 3, 2, 5, 6] and first[1].tolist() == [0, 2, 4, 7]
        batch_idx[1] = 2
        order, begin = segments.sorted_by_system(batch_idx, 3)
    assert order.tolist() == [4, 0, 3, 1, 2, 5, 6] and begin.tolist() == [0, 1, 3, 7] and len(sorts) == 2
