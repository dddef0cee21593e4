"""Launches on a CPU with the layout, the branches of kernels and the 32 lanes of a GPU. Names private parts of Warp.

Warp runs the threads of a block as fibers (`wp.config.enable_cpu_blocks`), one after the other until they meet at a
barrier. `gpu_layout` gives launches blocks, and kernels that are compiled for blocks the header of
`tests.lanes.device_header`, with which their texts take the branches for a GPU. Other launches, and the compiled
kernels that they use, stay as they are.
"""

import contextlib
import ctypes
import mmap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import warp as wp
from warp._src.context import Module

from nvalchemiops import launch as core
from nvalchemiops._warp_internals import compiled_folder, descriptor_type, parameters
from nvalchemiops.launch import is_gather_only
from nvalchemiops.layout import GPU, replaced_layout
from tests.lanes.device_header import ADDRESS, FINDINGS, HEADER, MOST_WARPS, WARP

ORDERS = {
    "forward": list(range(WARP)),
    "backward": list(range(WARP))[::-1],
    "mixed": [(13 * lane + 5) % WARP for lane in range(WARP)],
}
"""In which order the lanes of a warp run, between two operations of the whole warp."""


class LaneError(AssertionError):
    """What the lanes of a warp did together would not work on a GPU."""


class _Last(ctypes.Structure):
    _fields_ = (
        ("number", ctypes.c_uint32 * WARP),
        ("line", ctypes.c_int32 * WARP),
        ("value", ctypes.c_uint64 * WARP),
    )


class _Warp(ctypes.Structure):
    _fields_ = (("count", ctypes.c_uint32 * WARP), ("last", _Last * 2))


class State(ctypes.Structure):
    """``lanes_state`` of the header."""

    _fields_ = (
        ("order", ctypes.c_int32 * WARP),
        ("finding", ctypes.c_int32),
        ("line", ctypes.c_int32),
        ("lane", ctypes.c_int32),
        ("other_line", ctypes.c_int32),
        ("warps", _Warp * MOST_WARPS),
    )


_mapped: list[State] = []


def state() -> State:
    """The state that kernels write to, mapped at the first call."""
    if not _mapped:
        library = ctypes.CDLL(None, use_errno=True)
        library.mmap.restype = ctypes.c_void_p
        library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
        protection, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        # a hint that is taken where the place is free
        found = library.mmap(ADDRESS, ctypes.sizeof(State), protection, kind, -1, 0)
        if found != ADDRESS:
            raise RuntimeError(f"no memory at {ADDRESS:#x}, but at {found:#x}")
        _mapped.append(State.from_address(ADDRESS))
    return _mapped[0]


def _with_header(original: Any) -> Any:
    def resolve_options(self: Any, config: Any, block_dim: int | None = None) -> dict[str, Any]:
        options = original(self, config, block_dim)
        if options["block_dim"] > 1:
            options["extra_cpu_preamble"] = (options.get("extra_cpu_preamble") or "") + HEADER
        return options

    return resolve_options


def _raise_findings(kernel: wp.Kernel, block: int) -> None:
    seen = state()
    if not seen.finding:
        return
    kind, line, lane, other = seen.finding, seen.line, seen.lane, seen.other_line
    ctypes.memset(ADDRESS + State.finding.offset, 0, ctypes.sizeof(State) - State.finding.offset)
    (file,) = compiled_folder(kernel, block).glob("*.cpp")
    source = ["", *file.read_text().splitlines()]
    where = f"line {other}: {source[other].strip()}" if other else "no operation"
    raise LaneError(
        f"kernel '{kernel.key}': {FINDINGS[kind]}; at line {line}: {source[line].strip()}; lane {lane} at {where}"
    )


MARGIN = 1 << 16
"""Bytes before and behind an array, that nothing may write to. They are -1, or NaN: what reads them has no results."""


@contextlib.contextmanager
def _with_margins(kernel: wp.Kernel, arguments: Sequence[Any]) -> Iterator[list[Any]]:
    """The arguments of a launch with their arrays in other memory, with a margin around each.

    Arrays that share memory still do. Raises `LaneError` if a margin was written to; arrays are then as they were.
    """
    kind = descriptor_type()
    arrays = [kind.from_buffer_copy(a) if type(a) is bytes else a for a in arguments]
    arrays = [a.__ctype__() if isinstance(a, wp.array) else a for a in arrays]
    places = []  # from, to, number of the argument
    for number, (array, parameter) in enumerate(zip(arrays, parameters(kernel), strict=True)):
        if isinstance(array, kind) and array.data and 0 not in (shape := array.shape[: array.ndim]):
            item = wp.types.type_size_in_bytes(parameter.type.dtype)
            last = sum((n - 1) * step for n, step in zip(shape, array.strides))
            places.append((array.data, array.data + last + item, number))
    shared: list[tuple[int, int, list[int]]] = []
    for begin, end, number in sorted(places):
        if shared and begin < shared[-1][1]:
            before, other, numbers = shared[-1]
            shared[-1] = (before, max(end, other), [*numbers, number])
        else:
            shared.append((begin, end, [number]))
    copies = []
    for begin, end, numbers in shared:
        given = np.ctypeslib.as_array((ctypes.c_uint8 * (end - begin)).from_address(begin))
        copy = np.full(end - begin + 2 * MARGIN + 64, 255, dtype=np.uint8)
        shift = MARGIN + (begin - copy.ctypes.data - MARGIN) % 64  # aligned as before
        copy[shift : shift + len(given)] = given
        copies.append((given, copy, shift, numbers))
        for number in numbers:
            arrays[number].data += copy.ctypes.data + shift - begin
    yield [bytes(a) if isinstance(a, kind) else a for a in arrays]
    for given, copy, shift, numbers in copies:
        if (copy[:shift] != 255).any() or (copy[shift + len(given) :] != 255).any():
            names = ", ".join(parameters(kernel)[number].label for number in numbers)
            raise LaneError(f"kernel '{kernel.key}' writes beyond the memory of {names}")
    for given, copy, shift, _ in copies:
        given[:] = copy[shift : shift + len(given)]


PIECES = 64
"""Into how many launches a launch in backward order is divided."""


def _pieces(n_rows: int, order: str) -> list[tuple[int, int]]:
    """First rows and numbers of rows of launches; (0, 0) for the launch as it is.

    On a GPU any block may be the last. So in backward order the last rows are first: what writes to the rows of others
    leaves other results then.
    """
    if order != "backward" or n_rows < 2:
        return [(0, 0)]
    n_pieces = min(n_rows, PIECES)
    edges = [n_rows * k // n_pieces for k in range(n_pieces + 1)]
    return [(begin, end - begin) for begin, end in zip(edges, edges[1:])][::-1]


_with_lanes: dict[int, Any] = {}
"""What has the hashes of modules with the header, for each size of blocks."""


@contextlib.contextmanager
def gpu_layout(order: str = "forward", block: int = GPU.block, margins: bool = True) -> Iterator[set[wp.Kernel]]:
    """Launches on the CPU are those of a GPU: its layout, its branches of kernels, 32 lanes in this order.

    ``block``: threads per block, by default those of the layout.
    Yields the set of kernels that are launched. Raises `LaneError` after a launch in which a lane was missing, or wrote
    to memory close to an array that is not its own (if there are ``margins``).
    """
    launched: set[wp.Kernel] = set()
    seen = state()
    seen.order[:] = ORDERS[order]
    launch = core._launch_recorded

    def checked(kernel: Any, device: Any, stream: Any, block: Any, grid: Any, arguments: Any) -> None:
        assert block and torch.get_num_threads() == 1, "the state has room for one launch at a time"
        hashers = kernel.module.hashers
        for size in [size for size, hasher in hashers.items() if size > 1 and id(hasher) not in _with_lanes]:
            del hashers[size]  # of the module without the header, as another test has asked for it
        if 0 not in grid:
            with _with_margins(kernel, arguments) if margins else contextlib.nullcontext(arguments) as inside:
                for first, n_rows in _pieces(grid[0] if is_gather_only(kernel) else 0, order):
                    rows = (n_rows, *grid[1:]) if n_rows else grid
                    offset = [inside[0] + first] if n_rows else inside[:1]
                    launch(kernel, device, stream, block, rows, [*offset, *inside[1:]])
        _with_lanes.update((id(hasher), hasher) for size, hasher in hashers.items() if size > 1)
        if 0 not in grid:
            launched.add(kernel)
            _raise_findings(kernel, block)

    with replaced_layout("cpu", GPU._replace(block=block)), _patched(core, "_launch_recorded", checked), _blocks():
        yield launched


@contextlib.contextmanager
def _blocks() -> Iterator[None]:
    """Warp launches blocks on the CPU, and compiles them with the header."""
    original = Module.resolve_options
    with (
        _patched(wp.config, "enable_cpu_blocks", True),
        _patched(Module, "resolve_options", _with_header(original)),
    ):
        yield


@contextlib.contextmanager
def _patched(holder: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)
