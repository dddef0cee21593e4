"""What a launch on a GPU hands to CUDA, recorded by a function in its place: byte for byte what ``wp.launch`` does."""

import ctypes
import types
from typing import Any

import pytest
import warp as wp

from nvalchemiops import _warp_internals as internals
from nvalchemiops import launch as launches
from nvalchemiops import threads
from nvalchemiops._warp import ensure_warp

FAILED = 7


@wp.kernel(module=wp.get_module("test_launch_on_gpu"), enable_backward=False)
def everything(
    offset: wp.int32,
    x: wp.array(dtype=wp.vec3d),
    half: wp.float32,
    matrix: wp.array2d(dtype=wp.float32),
    whole: wp.float64,
    deep: wp.array(dtype=wp.int32, ndim=4),
    last: wp.int32,
):
    i, j = wp.tid()
    if j == last:
        x[i + offset] = wp.vec3d(whole, wp.float64(half), wp.float64(matrix[i, 0] + wp.float32(deep[0, 0, 0, i])))


@wp.kernel(module=wp.get_module("test_launch_on_gpu"), enable_backward=False)
def with_a_vector(shift: wp.vec3d, x: wp.array(dtype=wp.vec3d)):
    x[wp.tid()] = shift


class Core:
    """Warp's native library, whose launches are kept instead of made."""

    def __init__(self, core, monkeypatch):
        self.calls, self.result = [], 0
        kinds = core.wp_cuda_launch_kernel.argtypes
        self.sizes: list[int] = []

        def launch(context, function, size, *others):
            *numbers, arguments, stream, api = others
            contents = [ctypes.string_at(arguments[k], n) for k, n in enumerate(self.sizes)]
            self.calls.append((context, function, size, *numbers, contents, stream, api))
            return self.result

        function = ctypes.CFUNCTYPE(ctypes.c_size_t, *kinds)(launch)
        function.argtypes, function.restype = kinds, ctypes.c_size_t
        monkeypatch.setattr(core, "wp_cuda_launch_kernel", function)

    def last(self):
        return self.calls[-1]


@pytest.fixture
def gpu():
    """A device that Warp takes for a GPU, and its streams."""
    ensure_warp()
    device = object.__new__(wp.Device)
    vars(device).update(vars(wp.get_device("cpu")))
    vars(device).update(alias="cuda:0", ordinal=0, _context=0x7F00_1234_5678, arch=90)
    device._stream = types.SimpleNamespace(device=device, cuda_stream=0x55)
    assert device.is_cuda and not device.is_cpu
    return device


@pytest.fixture
def core(gpu, monkeypatch):
    loaded = {}
    for kernel in (everything, with_a_vector):
        # a launch asks about the code of the kernel, which is generated here
        hooks = kernel.module.load(wp.get_device("cpu"), 1).get_kernel_hooks(kernel)
        loaded[kernel] = type(hooks)(0x7E00_0000_0000 + len(loaded), None, forward_smem_bytes=16)
    executable = types.SimpleNamespace(get_kernel_hooks=loaded.get)
    monkeypatch.setattr(everything.module, "load", lambda device, block: executable)
    return Core(gpu.runtime.core, monkeypatch)


def stream_of(gpu, handle):
    return types.SimpleNamespace(device=gpu, cuda_stream=handle, is_capturing=False)


def descriptor(address, shape, strides):
    return address.to_bytes(8, "little") + internals.descriptor(shape, strides)[8:]


def arguments(n=0):
    """Of `everything`; all differ with ``n``."""
    x = descriptor(0x7F00_0000_0000 + n, (5 + n,), (24,))
    matrix = descriptor(0x7F01_0000_0000 + n, (9, 4 + n), (4, 36))
    deep = descriptor(0x7F02_0000_0000 + n, (2, 3, 4, 5 + n), (240, 80, 40, 4))
    return [n, x, 0.1 + n, matrix, 1.0 / 3.0 - n, deep, n - 2**31]


def as_warp(gpu, core, kernel, grid, given, stream, block):
    """What ``wp.launch`` itself hands over."""
    wp.launch(kernel, grid, internals.unpacked(given), device=gpu, stream=stream, record_tape=False, block_dim=block)
    return core.last()


def sizes(kernel, gpu, given, core):
    core.sizes = []
    recorded = wp.launch(kernel, (1, 1), internals.unpacked(given), device=gpu, record_tape=False, record_cmd=True)
    return [ctypes.sizeof(p) for p in recorded.params]


def test_all_arguments_are_those_of_warp(gpu, core):
    """In launches that follow each other, with other arguments, grids and streams."""
    core.sizes = sizes(everything, gpu, arguments(), core)
    commands = [internals.Command(everything, (3, 32), arguments(), gpu, 32) for _ in range(2)]
    other_block = internals.Command(everything, (3, 32), arguments(), gpu, None)
    assert core.calls == [] and all(command.pack for command in (*commands, other_block))
    for number, grid in enumerate([(3, 32), (400, 32), (3, 32), (2**20, 32), (1, 1)]):
        given, stream = arguments(number), stream_of(gpu, 0x100 + number)
        for command, block in ((commands[number % 2], 32), (other_block, None)):
            command.launch(grid, given, stream)
            found = core.last()
            assert found == as_warp(gpu, core, everything, grid, given, stream, block)
            assert found[2] == grid[0] * grid[1] and found[4] == (block or 256) and found[-2] == stream.cuda_stream
    commands[0].launch((7, 32), arguments(9), None)  # the stream that Warp has at present
    assert core.last() == as_warp(gpu, core, everything, (7, 32), arguments(9), None, 32)
    assert core.last()[-2] == 0x55


def test_grids_are_forgotten_not_confused(gpu, core, monkeypatch):
    monkeypatch.setattr(internals, "KEPT_GRIDS", 3)
    core.sizes = sizes(everything, gpu, arguments(), core)
    command, stream = internals.Command(everything, (1, 32), arguments(), gpu, 32), stream_of(gpu, 1)
    for n in (1, 2, 3, 4, 5, 1, 5, 2, 2, 9, 1):
        command.launch((n, 32), arguments(), stream)
        assert core.last() == as_warp(gpu, core, everything, (n, 32), arguments(), stream, 32)
    assert len(command.bounds) <= 3


def test_what_is_no_descriptor_and_no_number_is_left_to_warp(gpu, core):
    core.sizes = sizes(everything, gpu, arguments(), core)
    command, stream = internals.Command(everything, (3, 32), arguments(), gpu, 32), stream_of(gpu, 1)
    given = arguments()
    given[2] = wp.float32(2.5)
    command.launch((4, 32), given, stream)
    assert core.last() == as_warp(gpu, core, everything, (4, 32), given, stream, 32)
    with pytest.raises(ValueError, match="`last` = 2147483648 does not fit into 32 bits"):
        command.launch((4, 32), [*given[:-1], 2**31], stream)
    with pytest.raises(TypeError, match="takes 7 arguments, got 6"):
        command.launch((4, 32), given[:-1], stream)


def test_other_kinds_of_parameters_are_left_to_warp(gpu, core):
    given = [wp.vec3d(1.0, 2.0, 3.0), descriptor(0x7F00, (5,), (24,))]
    core.sizes = sizes(with_a_vector, gpu, given, core)
    command = internals.Command(with_a_vector, (5,), given, gpu, None)
    assert command.pack is None
    command.launch((6,), given, stream_of(gpu, 3))
    assert core.last() == as_warp(gpu, core, with_a_vector, (6,), given, stream_of(gpu, 3), None)


def test_a_launch_that_fails_is_reported_by_warp(gpu, core):
    core.sizes = sizes(everything, gpu, arguments(), core)
    command = internals.Command(everything, (3, 32), arguments(), gpu, 32)
    core.result = FAILED
    with pytest.raises(RuntimeError, match="everything"):
        command.launch((3, 32), arguments(), stream_of(gpu, 1))


def test_warp_sees_launches_into_a_graph_that_it_captures(gpu, core, monkeypatch):
    """It must keep the module for the graph."""
    core.sizes = sizes(everything, gpu, arguments(), core)
    command = internals.Command(everything, (3, 32), arguments(), gpu, 32)
    asked = []
    monkeypatch.setattr(gpu.runtime, "captures", {1: None})
    monkeypatch.setattr(gpu.runtime.core, "wp_cuda_stream_is_capturing", lambda stream: asked.append(stream))
    command.launch((3, 32), arguments(5), stream_of(gpu, 0x77))
    assert asked == [0x77]


@pytest.mark.parametrize("change", ["order", "bytes"])
def test_another_form_is_left_to_warp(change, gpu, core, monkeypatch, caplog):
    core.sizes = sizes(everything, gpu, arguments(), core)
    internals._switched_off.cache_clear()
    if change == "order":
        monkeypatch.setattr(internals, "CUDA_CALL", (2, 7, 9, 11))
    else:
        packer = internals._packer

        def another(structure, declared):
            pack = packer(structure, declared)
            return lambda to, at, *values: pack(to, at, values[0], values[1] + 1, *values[2:])

        monkeypatch.setattr(internals, "_packer", another)
    command, stream = internals.Command(everything, (3, 32), arguments(), gpu, 32), stream_of(gpu, 1)
    assert command.pack is None and caplog.text.count("launches that write all arguments at once") == 1
    command.launch((4, 32), arguments(3), stream)
    assert core.last() == as_warp(gpu, core, everything, (4, 32), arguments(3), stream, 32)
    internals._switched_off.cache_clear()


# -- while a graph is captured ---------------------------------------------------------------------


@wp.kernel(module=wp.get_module("test_launch_on_gpu_in_captures"))
def of_any(x: wp.array(dtype=Any)):
    i = wp.tid()
    x[i] = x[i] + x[i]


@pytest.fixture
def capturing(gpu, core, monkeypatch):
    """A stream on which a graph is captured; nothing has been launched or loaded on the device."""
    module = everything.module
    load = module.load

    def noted(device, block):
        loaded = types.SimpleNamespace(module_hash=module.get_module_hash(block))
        monkeypatch.setitem(module.execs, (gpu.context, block), loaded)
        return load(device, block)

    monkeypatch.setattr(module, "load", noted)
    monkeypatch.setattr(launches, "_loaded", set())
    monkeypatch.setattr(threads, "commands", lambda: kept)
    kept = {}
    core.sizes = sizes(everything, gpu, arguments(), core)
    del module.execs[gpu.context, 256]
    return types.SimpleNamespace(device=gpu, cuda_stream=0x77, is_capturing=True)


NOT_LOADED = "kernel '{}' is not loaded on cuda:0, and it cannot be loaded while a CUDA graph is captured: before"


@pytest.mark.parametrize("record_tape", [False, True])
def test_no_kernel_is_loaded_while_a_graph_is_captured(record_tape, gpu, core, capturing, monkeypatch):
    def launch(stream, n=1):
        given = arguments(n)
        launches.launch(everything, 3, given, device=gpu, stream=stream, lanes=32, record_tape=record_tape)

    with pytest.raises(RuntimeError, match=NOT_LOADED.format("everything")):
        launch(capturing)
    assert core.calls == []
    launch(stream_of(gpu, 0x78))  # no graph is captured there
    launch(capturing, 2)
    monkeypatch.setattr(threads, "commands", dict)  # in another thread
    launch(capturing, 3)
    assert [call[-2] for call in core.calls] == [0x78, 0x77, 0x77]
    if not record_tape:
        monkeypatch.setattr(everything.module, "get_module_hash", lambda block: b"has another kernel since")
        with pytest.raises(RuntimeError, match=NOT_LOADED.format("everything")):
            launch(capturing)


@pytest.mark.parametrize("way", ["launch", "launch for tapes", "adjoint"])
def test_no_generic_kernel_is_loaded_while_a_graph_is_captured(way, gpu, capturing):
    """Each dtype is a kernel of its own."""
    given, options = [wp.zeros(3, dtype=wp.float32, device="cpu")], {"device": gpu, "stream": capturing}
    with pytest.raises(RuntimeError, match=NOT_LOADED.format("of_any")):
        if way == "adjoint":
            launches.launch_adjoint(of_any, 3, given, given, **options)
        else:
            launches.launch(of_any, 3, given, record_tape=way == "launch for tapes", **options)


def test_code_in_a_graph_outlives_its_module(gpu, core, capturing, monkeypatch):
    """Warp unloads it when the module gets another kernel, and nothing holds it."""
    monkeypatch.setattr(launches, "_captured", {})

    def launch(stream, n):
        launches.launch(everything, 3, arguments(n), device=gpu, stream=stream, lanes=32)
        return everything.module.execs[gpu.context, launches.layout("cuda").block]

    launch(stream_of(gpu, 0x78), 1)
    assert not launches._captured
    found = [launch(capturing, n) for n in (2, 3)]  # here each launch loads the module anew
    assert list(map(id, launches._captured.values())) == list(map(id, found))
