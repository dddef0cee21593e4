"""All launches of Warp kernels: CPU chunks on threads, GPU lanes, and a tape for each thread.

Warp itself runs a CPU launch on one thread, records on one tape per process, and spends most of a small launch in
Python. This module solves all three problems, and does not depend on any kernel.
"""

import itertools
import operator
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from typing import Any

import warp as wp

from nvalchemiops import threads
from nvalchemiops._warp import ensure_warp
from nvalchemiops._warp_internals import (
    Command,
    descriptor_type,
    has_adjoint,
    load_module,
    loaded_code,
    overload_for,
    unpacked,
)
from nvalchemiops.layout import layout
from nvalchemiops.loading import (
    DEFAULT_BLOCK,
    OFFSET,
    cpu_only,
    gather_only,
    is_gather_only,
    kernel_module,
    kernel_variants,
    lanes_of,
    load,
    loading,
    registered_kernels,
    with_lanes,
)
from nvalchemiops.recording import NotDifferentiableError, active_tape, record, refuse_tracked
from nvalchemiops.threads import Task, enter_as_worker, is_crowded, set_openmp, set_thread_count, thread_count

MINIMUM_CHUNK = 120e-6
"""Least work for each thread, in seconds. A launch with less than twice as much work is not split."""

PIECES = 8
"""Largest number of pieces per thread into which a launch is split. Each has at least `MINIMUM_CHUNK` of work."""


_loaded: set[tuple[wp.Kernel, str]] = set()
"""Kernels, and devices on which they have been launched by ``wp.launch``."""


_captured: dict[int, Any] = {}
"""Code in graphs that others capture, by `id`. Warp drops it when a module gets another kernel, for example one for
another dtype; and the graph would be replayed without it. Commands (`_launch_recorded`) hold that of other launches."""


_row_cost: dict[tuple[wp.Kernel, Hashable], float] = {}
"""Processor time per row in the last CPU launch of a kernel, by kind of launch. It only decides on chunks."""


def launch(
    kernel: wp.Kernel,
    dim: int | Sequence[int],
    inputs: Sequence[Any],
    outputs: Sequence[Any] = (),
    *,
    device: Any,
    stream: wp.Stream | None = None,
    lanes: int = 0,
    record_tape: bool = True,
    kind: Hashable = None,
) -> None:
    """Launch ``kernel`` over ``dim`` threads. A kernel declared `gather_only` is split over CPU threads.

    Parameters
    ----------
    kernel : wp.Kernel
        The ``offset`` argument of a gather-only kernel is added here: leave it out of ``inputs``.
    dim : int or sequence of int
        Number of rows, or launch grid.
    inputs, outputs : sequence
        Arguments in the kernel's order: Warp arrays, array descriptors as bytes (`descriptor_type`) or plain values.
    device : wp.Device or str
    stream : wp.Stream, optional
        Stream to launch on; the device's current one by default.
    lanes : int, optional
        32 if the threads of a warp share each row on a GPU: the kernel reads ``row, lane = wp.tid()``. On the CPU there
        is one lane. A block has several rows, and the last block may have fewer, so lanes cooperate by operations of a
        warp, not of a block. 0 (the default): the kernel has no lane index.
    record_tape : bool, optional
        False keeps the launch off any active tape, which makes it cheaper. Gather-only kernels have no adjoint and are
        never recorded.
    kind : hashable, optional
        Distinguishes launches of one kernel whose rows take different times.
    """
    ensure_warp()
    if not isinstance(device, wp.Device):
        device = wp.get_device(device)
    grid = _grid(dim)
    how = layout("cpu" if device.is_cpu else "cuda")
    block = how.block
    if lanes:
        grid = (*grid, lanes if how.warps else 1)  # a warp for each row
    arguments = [*inputs, *outputs]
    gathers = is_gather_only(kernel)
    if (gathers or not record_tape) and active_tape() is not None:
        refuse_tracked(kernel, arguments)
    if not gathers:
        if record_tape:
            _launch_by_warp(kernel, device, stream, block, grid, arguments, record_tape=True)
        else:
            _launch_recorded(kernel, device, stream, block, grid, arguments)
        return

    rows = grid[0]
    n_threads = min(thread_count(), rows) if device.is_cpu else 1
    if n_threads <= 1 or not threads.may_share():
        _launch_recorded(kernel, device, stream, block, grid, [0, *arguments])
        return
    # a row may take nanoseconds or milliseconds, which the last launch has measured; the first one is not split
    cost = _row_cost.get((kernel, kind), 0.0)
    chunks = rows * cost / MINIMUM_CHUNK
    each = max(1, min(PIECES, int(chunks / n_threads)))
    count = min(rows, int(chunks), each * n_threads)
    if count <= 1 or not threads.crowding.threads_gain():
        start = time.thread_time()
        _launch_recorded(kernel, device, stream, block, grid, [0, *arguments])
        _row_cost[kernel, kind] = (time.thread_time() - start) / rows
        return
    with loading():
        load_module(kernel, device)  # again, in case the module has another kernel since
    # A free thread takes the next piece, since a thread may wake up late, or share its core with a thread that torch
    # left spinning after an operation.
    edges = [rows * piece // count for piece in range(count + 1)]
    pieces = iter(range(count))
    work: list[float] = []

    def take_pieces() -> None:
        """Launch pieces until none is left, and add the processor time of this thread to ``work``."""
        start = time.thread_time()
        for piece in pieces:  # only one thread at a time can advance a range iterator
            first = edges[piece]
            size = edges[piece + 1] - first
            _launch_recorded(kernel, device, stream, block, (size, *grid[1:]), [first, *arguments])
        work.append(time.thread_time() - start)

    start = time.perf_counter()
    threads.run(take_pieces, min(n_threads, count))
    threads.crowding.note(time.perf_counter() - start, sum(work))
    _row_cost[kernel, kind] = sum(work) / rows


MEASURED = 32
"""One of this many launches of `prepared` goes through `launch`, which measures it."""


def prepared(
    kernel: wp.Kernel, dim: Any, *, device: wp.Device, lanes: int, kind: Hashable
) -> Callable[[list[Any]], None]:
    """A function of a kernel's arguments that does the same as `launch` without a tape, but faster if it is not split.

    Parameters
    ----------
    kernel, dim, device, lanes, kind
        As for `launch`.
    """

    def ordinary(arguments: list[Any]) -> None:
        launch(kernel, dim, arguments, device=device, lanes=lanes, record_tape=False, kind=kind)

    how, rows = layout("cpu"), _grid(dim)
    if not device.is_cpu or kernel.is_generic or how.warps or 0 in rows:
        return ordinary
    grid = (*rows, 1) if lanes else rows
    key, cost_key, calls = (kernel, device.alias, how.block), (kernel, kind), itertools.count(1)
    offset = [0] if is_gather_only(kernel) else []

    def whole(arguments: list[Any]) -> None:
        is_short = not offset or grid[0] * _row_cost.get(cost_key, 1.0) < MINIMUM_CHUNK or thread_count() == 1
        if is_short and (not offset or next(calls) % MEASURED) and active_tape() is None:
            command = threads.commands().get(key)
            if command is not None:
                command.launch(grid, [*offset, *arguments], None)
                return
        ordinary(arguments)

    return whole


def launch_adjoint(
    kernel: wp.Kernel,
    dim: int | Sequence[int],
    inputs: Sequence[Any],
    adjoints: Sequence[Any],
    *,
    device: Any,
    stream: wp.Stream | None = None,
) -> None:
    """Run the adjoint that Warp derived for ``kernel``, which adds to the gradients of its inputs. It is never split.

    Parameters
    ----------
    kernel, dim, device, stream
        As for `launch`.
    inputs, adjoints : sequence
        An entry for each kernel parameter, including outputs. None for an adjoint that is not needed.
    """
    ensure_warp()
    if not isinstance(device, wp.Device):
        device = wp.get_device(device)
    block = layout("cpu" if device.is_cpu else "cuda").block  # that of the forward launch: same module
    _launch_by_warp(
        kernel,
        device,
        stream,
        block,
        _grid(dim),
        inputs,
        record_tape=False,
        adjoint=True,
        adj_inputs=unpacked(adjoints),
    )


def _grid(dim: int | Sequence[int]) -> tuple[int, ...]:
    return tuple(dim) if isinstance(dim, Sequence) else (operator.index(dim),)


def _launch_by_warp(
    kernel: wp.Kernel,
    device: Any,
    stream: wp.Stream | None,
    block: int | None,
    grid: tuple[int, ...],
    arguments: Sequence[Any],
    **options: Any,
) -> None:
    """Launch by ``wp.launch``, which records on tapes, runs adjoints, and takes generic kernels."""
    given = unpacked(arguments)
    if kernel.is_generic and 0 not in grid:
        kernel = overload_for(kernel, given)
    first = (kernel, device.alias) not in _loaded and not threads.is_worker()
    with loading() if first else nullcontext():
        if first and not kernel.is_generic:
            load(kernel, device, block, stream)
        wp.launch(kernel, grid, inputs=given, device=device, stream=stream, block_dim=block, **options)
    _loaded.add((kernel, device.alias))
    if not device.is_cpu and (device.stream if stream is None else stream).is_capturing:
        code = loaded_code(kernel, device, block or DEFAULT_BLOCK)
        _captured[id(code)] = code


def _launch_recorded(
    kernel: wp.Kernel,
    device: Any,
    stream: wp.Stream | None,
    block: int | None,
    grid: tuple[int, ...],
    arguments: list[Any],
) -> None:
    """Launch through a command that this thread keeps, which is faster than ``wp.launch``."""
    if 0 in grid:
        return
    if kernel.is_generic:
        _launch_by_warp(kernel, device, stream, block, grid, arguments, record_tape=False)
        return
    commands = threads.commands()
    key = (kernel, device.alias, block)
    command = commands.get(key)
    if command is None:
        # for a worker the kernel is loaded already; the thread that waits for it may hold the lock
        is_worker = threads.is_worker()
        with nullcontext() if is_worker else loading():
            if not is_worker:
                load(kernel, device, block, stream)
            command = commands[key] = Command(kernel, grid, arguments, device, block)
    command.launch(grid, arguments, stream)


__all__ = [
    "MINIMUM_CHUNK",
    "OFFSET",
    "PIECES",
    "NotDifferentiableError",
    "Task",
    "active_tape",
    "cpu_only",
    "descriptor_type",
    "enter_as_worker",
    "gather_only",
    "has_adjoint",
    "is_crowded",
    "is_gather_only",
    "kernel_module",
    "kernel_variants",
    "lanes_of",
    "launch",
    "launch_adjoint",
    "load",
    "loading",
    "prepared",
    "record",
    "registered_kernels",
    "set_openmp",
    "set_thread_count",
    "thread_count",
    "with_lanes",
]
