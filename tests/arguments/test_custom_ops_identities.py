"""Identities of ops, by which caches of compiled graphs find them: two ops that differ must never share one."""

import collections
import dataclasses
import functools
import math
import sys
import types

import numpy as np
import pytest
import torch
import warp as wp

from nvalchemiops.torch import autograd
from nvalchemiops.torch.autograd.naming import MOST_VALUES, value_identity
from tests.support.ops import cube, like

SPEC = [like("y")]
SCALE = 1.0


def helper(x):
    return 2 * x


def through_globals(x, *, n=3):
    return helper(x) * SCALE * n


def test_identities_follow_globals_defaults_and_closures(monkeypatch):
    start = value_identity(through_globals)
    assert value_identity(through_globals) == start
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 10.0)
    scaled = value_identity(through_globals)
    monkeypatch.setattr(sys.modules[__name__], "helper", lambda x: 7 * x)
    helped = value_identity(through_globals)
    monkeypatch.setattr(through_globals, "__kwdefaults__", {"n": 5})
    assert len({start, scaled, helped, value_identity(through_globals)}) == 4
    vectors = [wp.types.vector(n, wp.float64) for n in (5, 6)]
    assert value_identity(vectors[0]) != value_identity(vectors[1])
    assert value_identity(wp.float64(2.0)) == value_identity(wp.float64(2.0)) != value_identity(wp.float64(3.0))
    tensors = [torch.arange(5_000), torch.arange(5_000).index_fill(0, torch.tensor([2_500]), 0)]
    assert value_identity(tensors[0]) != value_identity(tensors[1])
    assert value_identity(tensors[0].numpy()) != value_identity(tensors[1].numpy())


class Scaled:
    """Its method is known by what it is made of, where that can be seen."""

    def __init__(self, factor):
        self.factor = factor

    def __repr__(self):
        return f"Scaled({self.factor})"

    def of(self, x):
        return self.factor * x


@pytest.mark.parametrize(
    "make",
    [
        lambda n: functools.cache(lambda x: n * x),
        lambda n: functools.partial(helper, n),
        lambda n: functools.partial(torch.nn.functional.softmax, dim=n),
        lambda n: Scaled(n).of,
        lambda n: [{"factor": {n, helper}}],
        lambda n: (torch.empty, torch.zeros, np.linalg.norm, np.sin, math.sin, math.cos)[n],
        lambda n: {torch.nn.functional.silu: (None, n)},
        lambda n: named_as(torch.nn.functional.softplus, lambda x: n * x),
        lambda n: named_as(cube, lambda x: n * x),
        lambda n: [lambda x, y: x - y, lambda y, x: y - x][n - 1],  # backwards are called by these names
        lambda n: [[0, 1], (0, 1)][n - 1],  # which index in other ways
        lambda n: collections.defaultdict(lambda: n),
        lambda n: dataclasses.make_dataclass("Scale", ["of"])(torch.tensor(1 + 1e-6 * n)),
        lambda n: types.SimpleNamespace(table=np.arange(5_000) + (np.arange(5_000) == 2_500) * n),
        lambda n: torch.nn.ParameterList([torch.full((2,), float(n))]),
        lambda n: type("Scale", (), {"of": staticmethod(lambda x: n * x)}),
        lambda n: from_module(n),
        lambda n: wp.func_native(f"return {n}.0 * x;")(in_native_code),
        lambda n: wp.struct(type("Pair", (), {"__annotations__": {"values": wp.types.vector(n, float)}})),
    ],
)
def test_identities_do_not_depend_on_where_objects_are(make):
    found = [value_identity(make(n)) for n in (1, 1, 2)]
    assert found[0] == found[1] != found[2] and " at 0x" not in found[0]


def test_sets_copy_nothing_of_what_came_before():
    """A set took the time of the long list before it for each of its entries."""

    class Uncopied(dict):
        def __iter__(self):
            raise AssertionError("it is copied")

        keys = __iter__

    shared = (1, 2)
    value = [{(shared, n) for n in (3, 4)}, shared]
    assert value_identity(value, Uncopied()) == value_identity(value)


def test_a_value_that_leads_to_too_many_others_has_an_identity_of_its_own():
    """A global of pytest led to all of its run, and each definition of an op took seconds."""
    one, other = ([(n,) for n in range(MOST_VALUES)] for _ in "ab")
    assert value_identity(one) == value_identity(one) != value_identity(other)
    assert value_identity(one[:-9]) == value_identity(other[:-9])


def test_classes_stay_the_same_when_their_objects_are_pickled():
    pair = collections.namedtuple("pair", ["a", "b"])
    before = value_identity(pair)
    pair(1, 2).__reduce_ex__(2)
    assert value_identity(pair) == before


def named_as(function, wrapper):
    return functools.wraps(function)(wrapper)


def in_native_code(x: wp.float64) -> wp.float64: ...


def from_module(n):
    module = types.ModuleType("of_a_user")
    module.helper = lambda x: n * x
    # the name is known in the globals that are given here
    return types.FunctionType((lambda x: of_a_user.helper(x)).__code__, {"__name__": "u", "of_a_user": module})  # noqa: F821


def test_what_a_script_defines_later_is_not_known():
    scope = {"__name__": "a_script", "__builtins__": __builtins__, "given": 1}
    exec("def one(x): return [v for v in x if later(v)]\ndef other(x): return len(x) + given", scope)
    before, copied = value_identity(scope["one"]), types.FunctionType(scope["one"].__code__, scope)
    assert before == value_identity(scope["one"]) != value_identity(copied)
    assert value_identity(scope["other"]) == value_identity(types.FunctionType(scope["other"].__code__, scope))
    scope["later"] = bool
    assert before != value_identity(scope["one"]) == value_identity(copied)


def with_imports(x):
    import math

    from of_a_user import helper

    return helper(x) + math.pi


def test_identities_follow_what_functions_import(monkeypatch):
    unknown, found = value_identity(with_imports), []
    for n in (1, 1, 2):
        module = types.ModuleType("of_a_user")
        module.helper = functools.partial(math.pow, n)
        monkeypatch.setitem(sys.modules, "of_a_user", module)
        found.append(value_identity(with_imports))
    assert unknown != found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    "make",
    [
        lambda n: torch.jit.CompilationUnit(f"def f(x):\n  return {n}\n").f,
        lambda n: np.frompyfunc(max, n, 1),
        lambda n: 10 ** (5_000 + n),  # too long for a `repr`
        lambda n: type("Compared", (type,), {"__eq__": lambda a, b: a is b})("WithoutHash", (), {})(),
    ],
)
def test_what_cannot_be_seen_has_an_identity_of_its_own(make):
    values = [make(n) for n in (1, 1, 2)]
    found = [value_identity(v) for v in values]
    assert len(set(found)) == 3 and found == [value_identity(v) for v in values]


def test_identities_follow_what_is_declared():
    """Not only what is computed: a graph of an op without a gradient would be used for one that has it."""

    def declared(**keywords):
        def body(x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
            return x + z

        return autograd.warp_custom_op("tests::declared", SPEC, backward=lambda grad_y, x: grad_y, **keywords)(body)

    found = [declared(grad_arrays=names).op.identity for names in (["y", "x"], ["y", "x"], ["y", "z"])]
    assert found[0] == found[1] != found[2]
