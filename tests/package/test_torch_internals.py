"""Private names of torch: each means what is assumed, and without it results are the same or an error says why."""

import importlib.util
import inspect
import json
import logging
import os
import pkgutil
import sys
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch

from nvalchemiops.torch.autograd import arrays
from nvalchemiops.torch.runtime import _torch_internals as internals
from nvalchemiops.torch.runtime.releases import replaced
from nvalchemiops.torch.systems import System
from tests.support.ops import leaf
from tests.support.processes import output_of, run_python

# -- each name means what is assumed --------------------------------------------------------------


def test_every_name_is_there():
    without_cuda = {"_raw_stream", "_pools"} if torch.version.cuda is None else set()
    found = [(name, value) for name, value in vars(internals).items() if name not in without_cuda]
    missing = [name for name, value in found if value is None and not name.startswith("__")]
    assert not missing and internals.EAGER_SHORTCUT and internals.CAN_REDISPATCH and internals.BACKWARD_KNOWN


def test_transforms_and_forward_mode_are_seen():
    seen = []

    def look(x):
        seen.append((internals.transforms_active(), internals.derivative_asked()))
        return x.sum()

    look(leaf(3))
    torch.func.grad(look)(leaf(3).detach())
    torch.func.vmap(look)(leaf(3, 2).detach())
    with torch.autograd.forward_ad.dual_level():
        look(leaf(3))
        with internals.outside_of_transforms():
            look(leaf(3))
    assert seen == [(False, False), (True, True), (True, True), (False, True), (False, False)]


def test_wrappers_are_told_apart():
    seen = []

    def look(x):
        seen.append((internals.is_wrapped(x), internals.is_wrapped_for_gradients(x), internals.is_batched(x)))
        return x.sum()

    plain = leaf(2, 3).detach()
    look(plain)
    torch.func.grad(lambda x: (look(x), look(internals.unwrapped(x)))[0])(plain)
    torch.func.vmap(look)(plain)
    assert seen == [(False,) * 3, (True, True, False), (False,) * 3, (True, False, True)]


@pytest.mark.gpu
def test_the_current_stream_is_that_of_torch():
    device, side = torch.device("cuda", torch.cuda.current_device()), torch.cuda.Stream()
    for stream in (torch.cuda.current_stream(), side):
        with torch.cuda.stream(stream):
            assert internals.stream_handle(device) == stream.cuda_stream
            assert internals.stream_handle(torch.device("cuda")) == stream.cuda_stream


def test_each_device_has_its_own_streams(monkeypatch):
    """A device without a number is the current one."""
    monkeypatch.setattr(internals, "_raw_stream", (lambda index: 100 + index,))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=103))
    monkeypatch.setattr(arrays.wp, "device_from_torch", lambda device: f"device {device.index + 0}")
    monkeypatch.setattr(arrays, "_warp_stream", lambda index, handle: (index, handle))
    arrays.warp_device.cache_clear()
    try:
        assert [arrays.current_stream(torch.device(name)) for name in ("cuda:1", "cuda")] == [(1, 101), (3, 103)]
    finally:
        arrays.warp_device.cache_clear()
    assert internals.stream_handle(torch.device("cuda")) == 103


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_warp_does_not_know_is_named():
    """As with ROCm, or a driver that is too old for Warp."""
    with pytest.raises(ValueError, match=r"a tensor is on 'cuda:0', but Warp finds .*\(found: none\)"):
        arrays.warp_device(torch.device("cuda", 0))


def test_transforms_are_counted():
    seen = []

    def look(x):
        seen.append(internals.count_transforms())
        return x.pow(2).sum()

    torch.func.jacfwd(torch.func.grad(look))(leaf(2).detach())
    assert set(seen) == {(1, 1)}


@pytest.mark.parametrize("make", ["neg", "conj", "zero", "meta", "sparse", "inference", "dual", "grad", "vmap"])
def test_unusual_tensors_are_not_plain(make):
    x = leaf(2, 3).detach()
    found = []

    def look(t):
        found.append(internals.is_unobserved(t))
        return t.sum()

    assert internals.is_unobserved(x, leaf(3), None)
    if make == "inference":
        with torch.inference_mode():
            look(torch.ones(3))
    elif make in ("grad", "vmap"):
        getattr(torch.func, make)(look)(x)
    elif make == "dual":
        with torch.autograd.forward_ad.dual_level():
            assert internals.derivative_asked()  # dual tensors have no key: this tells
        return
    else:
        unusual = {
            "neg": torch._neg_view(x),
            "conj": torch.complex(x, x).conj(),
            "zero": torch._efficientzerotensor((3,)),
            "meta": x.to("meta"),
            "sparse": x.to_sparse(),
        }
        look(unusual[make])
    assert found == [False]


def test_observers_are_seen():
    from torch.utils._python_dispatch import TorchDispatchMode

    x = leaf(3).detach()
    for observer in (TorchDispatchMode(), torch.autocast("cpu"), torch.autograd.profiler.profile()):
        with observer:
            assert not internals.is_unobserved(x)
        assert internals.is_unobserved(x)
    traced = []
    torch.jit.trace(lambda t: (traced.append(internals.is_unobserved(t)), 2 * t)[1], (x,), check_trace=False)
    assert traced == [False]


def test_zero_tensors_have_no_memory():
    zero = torch._efficientzerotensor((3,))
    assert internals.is_zero_tensor(zero) and internals._has_no_memory(zero)
    for other in (leaf(3), leaf(0), leaf(3).to("meta")):
        assert not internals.is_zero_tensor(other) and not internals._has_no_memory(other)


def test_versions_count_changes():
    x = torch.ones(3)
    before = internals.version_of(x)
    assert internals.version_of(x) == before
    x += 1
    assert internals.version_of(x) != before
    with torch.inference_mode():
        unknown = torch.ones(3)
    assert internals.version_of(unknown) != internals.version_of(unknown)


def test_backward_passes_are_seen_and_their_end_is_told():
    events = []
    x = leaf(3)
    y = 2.0 * x

    def hook(_):
        events.append(internals.in_backward_pass())
        internals.after_backward_pass(lambda: events.append("end"))

    y.register_hook(hook)
    x.register_hook(lambda _: events.append("leaf"))
    y.sum().backward()
    assert events == [True, "leaf", "end"] and not internals.in_backward_pass()


def test_marks_and_modules_of_the_compiler():
    import torch._dynamo

    def by_torch():
        return 1

    def ours():
        return 1

    torch.compiler.assume_constant_result(by_torch)
    assert vars(internals.assume_constant(ours)).items() <= vars(by_torch).items()
    assert internals.compiler_loaded()


def test_compiled_code_is_told_from_exported_code():
    """Inside of compiled code torch 2.11 answers its own question by a constant."""

    class Asking(torch.nn.Module):
        def forward(self, x):
            return 2.0 * x if internals.is_exporting() else x

    x = torch.ones(3)
    assert torch.equal(Asking()(x), x)
    assert torch.equal(torch.compile(Asking(), backend="eager", fullgraph=True)(x), x)
    for strict in (False, True):
        assert torch.equal(torch.export.export(Asking(), (x,), strict=strict).module()(x), 2.0 * x)


@pytest.mark.later
def test_streams_of_compiled_graphs_have_the_names_that_are_looked_up():
    trees = importlib.import_module("torch._inductor.cudagraph_trees")
    assert getattr(trees.local, internals._MANAGERS) == {} and torch._C._is_key_in_tls(internals._MANAGERS)
    assert "tree_manager" in vars(trees.TreeManagerContainer(0))
    assert "self.stream = " in inspect.getsource(trees.CUDAGraphTreeManager.__init__)
    assert not internals.belongs_to_compiled_graph(torch.device("cuda", 0))


def test_compiled_code_returns_systems_that_it_has_changed():
    """With torch 2.11 those of the ``_replace`` of named tuples are empty there."""
    system = System(torch.ones(2, 3), cell=torch.eye(3))

    @torch.compile(backend="eager", fullgraph=True)
    def moved(system):
        return system._replace(positions=system.positions + 1.0)

    found = moved(system)
    assert type(found) is System and len(found) == len(system)
    assert torch.equal(found.positions, torch.full((2, 3), 2.0)) and torch.equal(found.cell, system.cell)


def test_what_is_used_in_place_of_replace():
    pair = namedtuple("pair", "first, second")(1, 2)
    for changes in ({}, {"second": None}, {"first": 3, "second": 4}):
        assert replaced(pair, **changes) == pair._replace(**changes)
        assert type(replaced(pair, **changes)) is type(pair)
    with pytest.raises(ValueError, match="'third'"):
        replaced(pair, third=3)


# -- without each name ----------------------------------------------------------------------------


def imported_again():
    spec = importlib.util.spec_from_file_location("copy_of_internals", internals.__file__)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


def test_searches_ask_for_tracers_without_the_names_of_shortcuts(monkeypatch):
    resolve = pkgutil.resolve_name
    without = {"torch:_C._dispatch_keys": None}
    monkeypatch.setattr(pkgutil, "resolve_name", lambda path: without[path] if path in without else resolve(path))
    copy = imported_again()
    assert not copy.EAGER_SHORTCUT and not copy.tracing_state()


def test_nothing_is_off_if_a_function_that_is_traced_imports_the_library():
    """As by ``torch.export``, which makes tensors without data."""
    with internals.without_data():
        copy = imported_again()
        assert copy.EAGER_SHORTCUT and copy.results_have_no_data()
    assert not copy.results_have_no_data()


WITHOUT = """
    import json, logging, os, pkgutil, sys

    import torch
    import warp  # what all cases need, so that each process has it

    torch.compile(lambda x: x + 1, backend="aot_eager")(torch.ones(2))
    cases = json.loads(sys.argv[1])
    resolve = pkgutil.resolve_name

    def check():
        from tests.support import ops

        x, w = ops.leaf(4), ops.leaf(4, seed=1)
        found = {}

        def case(name, ours, plain):
            try:
                torch.testing.assert_close(ours(), plain())
                found[name] = "right"
            except (RuntimeError, AssertionError) as error:
                found[name] = str(error)

        for op, reference in (
            (ops.cube, ops.cube_reference), (ops.weighted_square, ops.weighted_square_reference)
        ):
            def first(f):
                return torch.autograd.grad(f(torch.sin(x), w).sin().sum(), (x, w))

            name, fixed = op.op.name.partition("::")[2], w.detach()
            case(f"{name}: values", lambda: op(x, w), lambda: reference(x, w))
            case(f"{name}: without a graph", lambda: op(x.detach(), fixed), lambda: reference(x, w).detach())
            case(f"{name}: backward", lambda: first(op), lambda: first(reference))
            compiled = torch.compile(op, backend="aot_eager", fullgraph=True)
            case(f"{name}: compiled", lambda: first(compiled), lambda: first(reference))
            for transform in ("grad", "jacfwd", "vmap"):
                def transformed(f):
                    if transform == "vmap":
                        return torch.func.vmap(f, (0, None))(torch.stack([x, w]).detach(), fixed)
                    return getattr(torch.func, transform)(lambda x: f(x, fixed).sum())(x.detach())

                case(f"{name}: {transform}", lambda: transformed(op), lambda: transformed(reference))

        def second(f):
            (g,) = torch.autograd.grad(f(x, w).sum(), x, create_graph=True)
            return torch.autograd.grad(g.square().sum(), (x, w))

        case("cube: second", lambda: second(ops.cube), lambda: second(ops.cube_reference))

        def autocast(f):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return f(x, w)

        case("cube: autocast", lambda: autocast(ops.cube), lambda: ops.cube_reference(x, w))

        def changed(fill):
            buffer = torch.zeros(4, dtype=torch.float64)
            before = buffer._version
            fill(buffer, 2.5)
            return buffer, torch.tensor(buffer._version > before)

        full = torch.full((4,), 2.5, dtype=torch.float64)
        case("fill", lambda: changed(ops.fill), lambda: (full, torch.tensor(True)))
        compiled_fill = torch.compile(ops.fill, backend="aot_eager", fullgraph=True)
        case("fill: compiled", lambda: changed(compiled_fill)[0], lambda: full)
        return found

    for shortcut, names in cases.items():
        sys.stdout.flush()
        if os.fork() == 0:
            lines = []
            handler = logging.Handler()
            handler.emit = lambda record: lines.append(record.getMessage())
            logging.getLogger("nvalchemiops").addHandler(handler)

            def without(path, names=names):
                if path.partition(":")[2] in names:
                    raise AttributeError(f"no {path}")
                return resolve(path)

            pkgutil.resolve_name = without
            try:
                answer = [check(), lines]
            except BaseException as error:
                answer = [{"import": repr(error)}, lines]
            print("ANSWER " + json.dumps([shortcut, *answer]), flush=True)
            os._exit(0)
        os.wait()
"""

CASES = {
    "derivatives": ["_C._are_functorch_transforms_active"],
    "forward mode": ["autograd.forward_ad._current_level"],
    "wrappers": ["_C._functorch.get_unwrapped"],
    "stack": ["_functorch.pyfunctorch.retrieve_all_functorch_interpreters"],
    "eager": ["_C._dispatch_keys"],
    "redispatch": ["_C._after_autograd_keyset"],
    "views": ["Tensor._is_view"],
    "inside": ["_C._ForceDispatchKeyGuard"],
    "versions": ["Tensor._version"],
    "zeros": ["Tensor._is_zerotensor"],
    "frames": ["_C._dynamo.eval_frame.set_code_exec_strategy"],
    "backward": ["autograd.Variable._execution_engine.queue_callback"],
    "files": ["utils._pytree._register_namedtuple"],
    "all of the dispatcher": [
        "_C._dispatch_keys",
        "_C._AutoDispatchBelowAutograd",
        "_C._after_autograd_keyset",
        "Tensor._is_view",
        "_C._len_torch_dispatch_stack",
    ],
}

REFUSED = {"stack": "forward mode through an operator", "inside": "derivative by a recorded tape"}
"""What has no public way: the error."""


@pytest.fixture(scope="module")
def answers(request):
    """What each case gave that is asked for, by the names that were missing; all in one process that forks."""
    if not hasattr(os, "fork"):
        pytest.skip("no fork here")
    asked = {item.callspec.params.get("shortcut") for item in request.session.items if hasattr(item, "callspec")}
    cases = {shortcut: names for shortcut, names in CASES.items() if shortcut in asked}
    said = output_of(run_python(WITHOUT, json.dumps(cases), timeout=600))
    lines = [json.loads(line[7:]) for line in said.splitlines() if line.startswith("ANSWER ")]
    return {shortcut: (found, messages) for shortcut, found, messages in lines}


@pytest.mark.everyday_cases("stack", "all of the dispatcher")
@pytest.mark.skipif(sys.platform != "linux", reason="forks after torch has started")
@pytest.mark.parametrize("shortcut", CASES)
def test_without_a_name_results_are_the_same_or_an_error_says_why(shortcut, answers):
    found, messages = answers[shortcut]
    assert len(found) == 18, found
    wrong = {name: text for name, text in found.items() if text != "right"}
    refused = REFUSED.get(shortcut)
    assert all(refused and refused in text for text in wrong.values()), wrong
    assert bool(wrong) == bool(refused), "an error that is not needed any more"
    assert messages and all(" is off (" in message for message in messages)


def test_a_name_that_has_another_meaning_is_as_good_as_none(caplog):
    with caplog.at_level(logging.WARNING, logger="nvalchemiops"):
        assert internals._find("this", "_C._are_functorch_transforms_active", works=lambda f: f(1, 2)) is None
        assert internals._find("that", "_C._are_functorch_transforms_active", works=lambda f: f() is None) is None
    assert [r.getMessage().split(": ")[1].split(" (")[0] for r in caplog.records] == ["this is off", "that is off"]
