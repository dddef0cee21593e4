"""Recorded steps of functions with dataclasses: containers of tensors, or constants."""

import collections
import dataclasses
import functools
import threading
import types

import numpy as np
import pytest
import torch

from nvalchemiops.torch import RecordingError, record


@dataclasses.dataclass
class Parts:
    x: torch.Tensor
    others: list
    name: str = "parts"

    def __post_init__(self):
        self.twice = 2.0 * self.x


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: object
    scale: float


def test_dataclasses_are_containers():
    """As arguments, where two with tensors cannot be compared, and as results."""
    again = record(lambda parts, frozen: Parts(frozen.scale * parts.x, [parts.others[0] + frozen.x[0], parts.twice]))
    for seed in range(4):
        x, y, z = torch.rand(3, 4, generator=torch.Generator().manual_seed(seed))
        for scale in (1.0, 3.0):
            found = again(Parts(x, [y]), Frozen((z,), scale))
            assert type(found) is Parts and found.name == "parts"
            assert torch.equal(found.x, scale * x) and torch.equal(found.twice, 2.0 * (scale * x))
            assert torch.equal(found.others[0], y + z) and torch.equal(found.others[1], 2.0 * x)
    assert "2 recorded, 4 replayed" in again.explain()


class Named(dict):
    """Results of a model, as many libraries have them: entries are attributes, too."""

    def __init__(self, **entries):
        for name, value in entries.items():
            self[name] = value

    def __setitem__(self, name, value):
        super().__setitem__(name, value)
        setattr(self, name, value)


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x

    def get(self):
        return self.x


class Hidden:
    __slots__ = ("__x",)

    def __init__(self, x):
        self.__x = x


OTHER_CONTAINERS = {
    "mappingproxy": lambda x: types.MappingProxyType({"y": x}),
    "deque in itself": lambda x: (found := collections.deque([x])).append(found) or found,
    "dict_values": lambda x: {"y": x}.values(),
    "generator": lambda x: (number * x for number in range(2)),
    "generator of a list": lambda x: (-one for one in [x]),
    "Slotted": Slotted,
    "Hidden": Hidden,
    "list_iterator": lambda x: iter([x]),
    "map": lambda x: map(torch.sin, [x]),
    "function": lambda x: lambda y: x + y,
    "function with": lambda x: lambda y=x: y,
    "partial": lambda x: functools.partial(torch.add, x),
    "method": lambda x: Slotted(x).get,
    "builtin_function_or_method": lambda x: x.add,
    "ndarray": lambda x: np.array([Slotted(x)], dtype=object),
    "ValueError": lambda x: ValueError(x),
}


@pytest.mark.parametrize("kind", OTHER_CONTAINERS)
def test_other_containers_of_results_are_refused(kind):
    """Not returned with the numbers of the first call."""
    with pytest.raises(RecordingError, match=f"a result is a {kind.split()[0]} with tensors"):
        record(lambda x: OTHER_CONTAINERS[kind](2.0 * x))(torch.ones(3))


def test_constants_of_results_belong_to_the_caller():
    """Who may change them."""

    @record
    def again(x):
        return 2.0 * x, np.zeros(2), {1}, collections.deque([2]), bytearray(3)

    for k in range(4):
        _, array, numbers, queue, memory = again(torch.full((3,), float(k)))
        assert (array == 0.0).all() and numbers == {1} and list(queue) == [2] and memory == bytearray(3)
        array += 1.0
        numbers.add(2)
        queue.append(3)
        memory[0] = 1
    assert "1 recorded, 2 replayed" in again.explain()


@pytest.mark.parametrize("made", [lambda: zip("ab", [1, 2]), lambda: (n for n in range(3))], ids=["zip", "generator"])
def test_results_that_can_be_read_once_are_refused(made):
    """Of replays nothing would be left."""
    with pytest.raises(RecordingError, match=r"a result is a (zip|generator), of which only"):
        record(lambda x: (2.0 * x, made()))(torch.ones(3))


class Constant(dict):
    """Its objects are made whole."""

    def __setitem__(self, name, value):
        raise TypeError("constant")


def test_classes_of_dictionaries_are_kept():
    @record
    def again(found):
        assert type(found) is Named
        both = collections.defaultdict(list, {"c": 2.0 * found["x"]})
        more = Named(e=found.x)
        more.unit = "eV"
        one = Named(y=3.0 * found["x"])
        return one, collections.OrderedDict(b=found["x"] + 1.0), both, Constant(d=-found["x"]), more

    for k in range(4):
        x = torch.full((3,), float(k))
        one, two, three, four, five = again(Named(x=x))
        assert type(one) is Named and type(two) is collections.OrderedDict and three["missing"] == []
        assert torch.equal(one["y"], 3.0 * x) and torch.equal(two["b"], x + 1.0) and torch.equal(three["c"], 2.0 * x)
        assert one.y is one["y"] and isinstance(four, dict) and torch.equal(four["d"], -x)
        assert torch.equal(five["e"], x) and (type(five) is dict or five.unit == "eV"), "nothing is lost in silence"
    assert "1 recorded, 2 replayed" in again.explain()


@pytest.mark.parametrize("options", [{"eq": False}, {"frozen": True}], ids=str)
def test_dataclasses_may_be_models_whose_tensors_are_read(options):
    """Those that are hashable are constants if the function cannot be recorded otherwise."""

    @dataclasses.dataclass(**options)
    class Scaled:
        scale: torch.Tensor
        names: list = dataclasses.field(default_factory=list, compare=False)

        @record
        def times(self, x):
            return x * float(self.scale), self

        @record
        def plus(self, x):
            return x + self.scale

    for one in (Scaled(torch.tensor(2.0)), Scaled(torch.tensor(3.0), [{1}])):
        for k in range(3):
            x = torch.ones(2) + k
            assert torch.equal(one.times(x)[0], one.scale * x) and one.times(x)[1] is one
            assert torch.equal(one.plus(x), one.scale + x)
    with pytest.raises(RecordingError, match="reads values"):  # an error that is the same for constants
        record(lambda one, x: x * float(x[0]))(one, x)
    with pytest.raises(TypeError, match="must be hashable"):
        record(lambda one, names: one.x)(Frozen(x, 1.0), {1})


def test_models_whose_tensors_are_read_leave_other_dataclasses_containers():
    """Those that cannot be hashed, in the same call, too; and plans that are there already keep their results."""

    def plus(x, model=None):
        scale = 1.0 if model is None else float(model.x)
        return Parts(scale * x.x, []) if isinstance(x, Parts) else Frozen(scale * x, scale)

    again, model = record(plus), Frozen(torch.tensor(3.0), 1.0)
    x = torch.rand(4, 3, generator=torch.Generator().manual_seed(1))
    again(x[0])
    for k in range(3):
        assert torch.equal(again(Parts(x[k], []), model).x, 3.0 * x[k])
        assert torch.equal(again(x[1 + k]).x, x[1 + k])
        assert torch.equal(again(Parts(x[k], [])).x, x[k])


def test_two_threads_may_find_that_models_are_constants():
    """The one while the other records."""

    @dataclasses.dataclass(frozen=True)
    class Model:
        scale: torch.Tensor
        names: list = dataclasses.field(default_factory=list, compare=False)

    def times(model, x):
        if not model.names and not found:
            found.append(None)  # the model with a list, which cannot be hashed where it is taken apart
            other = threading.Thread(target=lambda: found.append(again(Model(torch.tensor(2.0), [{1}]), x.detach())))
            other.start()
            other.join()
        return x * float(model.scale)

    again, found, x = record(times), [], torch.ones(3)
    assert torch.equal(again(Model(torch.tensor(3.0)), x), 3.0 * x) and torch.equal(found[1], 2.0 * x)


def test_models_that_are_trained_are_constants():
    """Their tensors are in ``changing``, so they are no arguments."""
    weight = torch.arange(1.0, 5.0).requires_grad_()
    model = Frozen(weight, 2.0)
    again = record(lambda m, x: torch.autograd.grad((m.x * m.x * x).sum(), m.x)[0], changing=[weight])
    for k in range(4):
        x = torch.rand(4, generator=torch.Generator().manual_seed(k))
        assert torch.equal(again(model, x), 2.0 * weight * x)
        weight.data.mul_(1.5)
    assert "2 replayed" in again.explain()


@dataclasses.dataclass(unsafe_hash=True)
class Layer(torch.nn.Module):
    n: int

    def __post_init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(2.0 * torch.ones(self.n))


def test_modules_that_are_dataclasses_are_modules():
    again, layer = record(lambda layer, x: (layer.weight * x).detach()), Layer(2)
    for k in range(3):
        assert torch.equal(again(layer, torch.ones(2) + k), 2.0 * torch.ones(2) + 2.0 * k)


def test_constants_are_any_objects():
    """Also dataclasses without tensors, which may have lists, and objects with tensors that were there before."""
    constants = (Parts, dataclasses.make_dataclass("Options", ["names"])(["a"]), types.SimpleNamespace(x=torch.ones(2)))
    again = record(lambda x: (x.sin(), *constants))
    for k in range(3):
        x = torch.ones(2) + k
        assert torch.equal(again(x)[0], x.sin()) and again(x)[1:] == constants
