"""A launch of a kernel on the runner, and what was found."""

import ctypes
import dataclasses
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import warp as wp

from nvalchemiops._warp_internals import descriptor_type, parameters
from nvalchemiops.kernels.simd import WARP
from tests.checker import warp_source
from tests.checker.build import Module, module_of, runner
from tests.checker.memory import Memory, Region

ORDERS = {"forward": 0, "backward": 1, "random": 2}
"""Orders in which lanes, and warps, take their turns."""

_MEETINGS = ("__syncwarp", "__shfl_sync", "__shfl_xor_sync", "__shfl_up_sync", "__shfl_down_sync", "a vote")


class _Finding(ctypes.Structure):
    """As in ``runner.cpp``."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("kind", "lane", "other_lane", "line", "other_line", "region")),
        *((name, ctypes.c_int32) for name in ("is_write", "meeting")),
        *((name, ctypes.c_int64) for name in ("block", "warp", "other_warp", "offset", "size")),
        ("other_place", ctypes.c_uint64),
        ("places", ctypes.c_uint64 * 8),
    )


class _Launch(ctypes.Structure):
    """As in ``runner.cpp``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("entry", "bounds", "arguments")),
        *((name, ctypes.c_uint64) for name in ("argument_bytes", "n_tasks")),
        *((name, ctypes.c_int32) for name in ("block", "order", "seed", "checks")),
        *((name, ctypes.c_uint64) for name in ("arena_low", "arena_high", "module_low", "module_high")),
        ("pages", ctypes.c_void_p),
        ("regions", ctypes.POINTER(Region)),
        *((name, ctypes.c_int32) for name in ("n_regions", "padding")),
        *((name, ctypes.c_uint64) for name in ("longest", "total", "longest_task", "n_meetings")),
        ("of_warps", ctypes.c_void_p),
        ("finding", _Finding),
    )


class Fault(Exception):
    """What was found in a launch.

    Attributes
    ----------
    kernel, kind, message : str
    line : int
        In the generated C++, from 1.
    text : str
        Of this line.
    lane : int
        -1 where no single lane is to blame.
    block : int
    order : str
    """

    def __init__(
        self, kernel: str, kind: str, message: str, line: int, text: str, lane: int, block: int, order: str
    ) -> None:
        self.kernel, self.kind, self.message, self.line = kernel, kind, message, line
        self.text, self.lane, self.block, self.order = text, lane, block, order
        super().__init__(f"{kernel}: {message}; line {line}: {text}; block {block}, lane {lane}, {order} order")

    def report(self) -> dict[str, Any]:
        """What was found, as plain values."""
        names = ("kernel", "kind", "message", "line", "text", "lane", "block", "order")
        return {name: getattr(self, name) for name in names}


@dataclasses.dataclass
class Work:
    """Accesses to arrays in a launch.

    Attributes
    ----------
    kernel : str
    threads : int
    block : int
    longest : int
        Accesses of the thread that has most of them.
    total : int
        Of all threads.
    meetings : int
        Shuffles, votes and barriers.
    of_warps : (n_warps,) uint64 array
        Accesses of the longest lane of each warp, in the order of the launch.
    """

    kernel: str
    threads: int
    block: int
    longest: int
    total: int
    meetings: int
    of_warps: np.ndarray


_SCALARS = {
    wp.bool: ctypes.c_bool,
    wp.int32: ctypes.c_int32,
    wp.int64: ctypes.c_int64,
    wp.float32: ctypes.c_float,
    wp.float64: ctypes.c_double,
}


def check(
    kernel: wp.Kernel, grid: Sequence[int], arguments: Sequence[Any], block: int | None = None, checks: bool = True
) -> Work:
    """Run a launch with all its lanes, in each order, and write its results.

    Parameters
    ----------
    kernel : wp.Kernel
    grid : sequence of int
        Lanes included.
    arguments : sequence
        Warp arrays on the CPU, their descriptors as bytes, and numbers.
    block : int, optional
        Threads of a block. None: one.
    checks : bool, optional
        False: count accesses, in one order, and check only that they are within arrays.

    Raises
    ------
    Fault
        Something was found. Arrays are then as they were.
    """
    declared = parameters(kernel)
    kind = descriptor_type()
    given: list[Any] = []
    arrays = []
    for parameter, value in zip(declared, arguments, strict=True):
        if isinstance(parameter.type, wp.array):
            array = kind.from_buffer_copy(value) if type(value) is bytes else value
            array = array.__ctype__() if isinstance(array, wp.array) else array
            arrays.append((parameter.label, array, parameter.type.dtype))
            given.append(array)
        else:
            given.append(_SCALARS[parameter.type](value))
    fields = [(p.label, type(value)) for p, value in zip(declared, given)]
    structure = type("Arguments", (ctypes.Structure,), {"_fields_": fields})(*given)
    memory = Memory(arrays, checks)
    for name, array, _ in arrays:
        getattr(structure, name).data = memory.address(array.data)
    bounds = warp_source.bounds(tuple(grid))
    size = block or 1
    of_warps = np.zeros(-(-bounds.size // size) * -(-size // WARP), np.uint64)
    launch = _Launch(
        bounds=ctypes.addressof(bounds),
        arguments=ctypes.addressof(structure),
        argument_bytes=ctypes.sizeof(structure),
        n_tasks=bounds.size,
        block=size,
        checks=checks,
        arena_low=memory.low,
        arena_high=memory.low + memory.size,
        pages=memory.pages.ctypes.data,
        regions=memory.regions,
        n_regions=len(memory.places),
        of_warps=of_warps.ctypes.data,
    )
    assert runner().checker_launch_size() == ctypes.sizeof(launch)
    results: list[bytes] = []
    runs = [*((order, "pattern") for order in ORDERS), ("forward", "zero")] if checks else [("forward", "fast")]
    work = None
    for order, build in runs:
        module = module_of(kernel, build)
        launch.entry, launch.module_low, launch.module_high = module.entry, module.low, module.high
        launch.order, launch.seed = ORDERS[order], 1
        memory.restore()
        if not runner().checker_run(ctypes.byref(launch)):
            raise _fault(kernel, module, launch, memory, order)
        found = memory.results()
        if work is None:
            results = found
            counts = (launch.longest, launch.total, launch.n_meetings)
            work = Work(kernel.key, bounds.size, size, *counts, of_warps.copy())
        for number, (first, other) in enumerate(zip(results, found)):
            if first != other:
                raise _difference(kernel, module, launch, memory, order, build, number, first, other)
    memory.write_back(results)
    assert work is not None
    return work


# -- findings ---------------------------------------------------------------------------------------


def _line_at(module: Module, *places: int) -> int:
    """The line of the generated C++ of the first of these places in the code that lies in it."""
    command = ["addr2line", "-i", "-e", str(module.path), *(hex(place) for place in places if place)]
    frames = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    lines = [frame.split(" ")[0].rpartition(":") for frame in frames]
    own = [line for file, _, line in lines if Path(file).name == module.source.name]
    return int(own[0]) if own and own[0].isdigit() else 0


def _text(module: Module, line: int) -> str:
    return module.text[line - 1].strip() if 0 < line <= len(module.text) else "?"


def _fault(kernel: wp.Kernel, module: Module, launch: _Launch, memory: Memory, order: str) -> Fault:
    finding = launch.finding
    line = finding.line or _line_at(module, *finding.places)
    verb = "writes" if finding.is_write else "reads"
    where = f"an address of no array, {finding.size} bytes"
    if finding.region >= 0:
        place = memory.places[finding.region]
        where = f"{finding.size} bytes at byte {finding.offset} of the {place.high - place.low} of {place.name}"
    other_line = finding.other_line or (_line_at(module, finding.other_place) if finding.other_place else 0)
    other = f"lane {finding.other_lane}"
    if other_line:
        other += f" (line {other_line}: {_text(module, other_line)})"
    meeting = _MEETINGS[finding.meeting]
    kind, message = {
        1: ("out of bounds", f"{verb} {where}"),
        2: ("out of bounds", "writes to memory that is only read"),
        3: ("uninitialised", f"reads {where}, which nothing was written to"),
        4: ("race of lanes", f"{verb} {where}, which {other} has touched, with no __syncwarp between"),
        5: ("race of blocks", f"{verb} {where}, which warp {finding.other_warp}, {other}, has touched"),
        6: ("missing lane", f"{meeting} waits for lane {finding.other_lane}, which has returned"),
        7: ("divergent lanes", f"{meeting} waits for a lane that waits elsewhere, {other}"),
        8: ("wrong mask", f"{meeting} by a lane that its mask leaves out"),
        9: ("wrong mask", f"{meeting} takes the value of {other}, which the mask leaves out"),
    }[finding.kind]
    return Fault(kernel.key, kind, message, line, _text(module, line), finding.lane, finding.block, order)


def _difference(
    kernel: wp.Kernel,
    module: Module,
    launch: _Launch,
    memory: Memory,
    order: str,
    build: str,
    number: int,
    first: bytes,
    other: bytes,
) -> Fault:
    """Results that differ between two runs."""
    place, region = memory.places[number], memory.regions[number]
    at = next(n for n, (a, b) in enumerate(zip(first, other)) if a != b)
    writer = (ctypes.c_int64 * 3)()
    runner().checker_writer(ctypes.byref(region), ctypes.c_uint64(at), writer)
    warp, lane, code = writer
    line = _line_at(module, code) if warp >= 0 else 0
    warps = -(-launch.block // 32)
    if build == "zero":
        kind, why = "uninitialised", "what a local variable holds before it is assigned to"
    else:
        kind, why = "order of lanes", "the order of lanes"
    message = f"element {at // place.item} of {place.name} depends on {why}"
    return Fault(kernel.key, kind, message, line, _text(module, line), lane, warp // warps, order)
