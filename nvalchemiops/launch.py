"""The one caller of Warp launches: CPU chunks on threads, GPU lanes, and a tape for each thread.

Warp runs a CPU launch on one thread, records on one tape per process and spends most of a small launch
in Python. This module answers all three, and knows no kernel by name.
"""

import ctypes
import functools
import operator
import os
import shutil
import struct
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import warp as wp

import nvalchemiops.compat.installation  # noqa: F401  # here too, should another `__init__.py` have replaced ours
from nvalchemiops import __version__
from nvalchemiops._warp import ensure_warp
from nvalchemiops.crowding import Crowding

MINIMUM_CHUNK = 120e-6
"""Seconds of work for each thread, at least: a launch of less than twice this stays whole."""

PIECES = 8
"""Pieces for each thread that a launch is cut into, at most; each is `MINIMUM_CHUNK` of work, at least."""

OFFSET = "offset"
"""Name of the first parameter of a gather-only kernel: the row at which its chunk begins."""


# -- kernels: where they live, and a list of all of them ------------------------------------------

_registered: list[tuple[str, Callable[[], wp.Kernel]]] = []


def kernel_module(name: str) -> Any:
    """The Warp module for one kernel: compiled alone, in a cache folder that carries this library's version."""
    release = "".join(c if c.isalnum() else "_" for c in __version__)
    return wp.get_module(f"nvalchemiops_{release}_{name}")


def kernel_variants(
    *variants: tuple[Any, ...],
) -> Callable[[Callable[..., wp.Kernel]], Callable[..., wp.Kernel]]:
    """Cache a kernel factory by its arguments and list ``variants`` for ``nvalchemiops warmup``.

    Parameters
    ----------
    *variants : tuple
        Argument tuples of the specialisations worth compiling ahead.
    """

    def decorate(factory: Callable[..., wp.Kernel]) -> Callable[..., wp.Kernel]:
        kept: dict[tuple[Any, ...], wp.Kernel] = {}

        @functools.wraps(factory)
        def cached(*arguments: Any) -> wp.Kernel:
            if arguments not in kept:
                # two threads that both made it would leave one of them a kernel that its module knows nothing of
                with loading():
                    if arguments not in kept:
                        kept[arguments] = factory(*arguments)
            return kept[arguments]

        cached.cache_clear = kept.clear  # type: ignore[attr-defined]  # a function, which mypy knows no attributes of
        for arguments in variants:
            label = ", ".join(str(a) for a in arguments)
            _registered.append((f"{factory.__name__}({label})", functools.partial(cached, *arguments)))
        return cached

    return decorate


def registered_kernels() -> list[tuple[str, Callable[[], wp.Kernel]]]:
    """Every kernel specialisation that imported modules declared, as ``(name, build)``."""
    return list(_registered)


_GATHER_ONLY = "_nvalchemiops_gather_only"


def is_gather_only(kernel: wp.Kernel) -> bool:
    """Whether `gather_only` was declared for ``kernel``."""
    return getattr(kernel, _GATHER_ONLY, False)


def gather_only(kernel: wp.Kernel) -> wp.Kernel:
    """Declare that each thread of ``kernel`` writes only what no other thread touches.

    Only such kernels are split over CPU threads. Their first parameter must be ``offset: wp.int32``, added to
    ``wp.tid()``; `launch` supplies it. They must have no adjoint (``enable_backward=False``): a Warp adjoint
    scatters, and Warp's CPU atomics are not atomic.

    Raises
    ------
    TypeError
        If the first parameter is not ``offset: wp.int32``, or the kernel has an adjoint.
    """
    first = kernel.adj.args[0] if kernel.adj.args else None
    if first is None or first.label != OFFSET or first.type is not wp.int32:
        raise TypeError(f"gather-only kernel '{kernel.key}' needs `{OFFSET}: wp.int32` as its first parameter")
    if kernel.options.get("enable_backward") is not False:
        raise TypeError(f"gather-only kernel '{kernel.key}' needs enable_backward=False: adjoints scatter")
    setattr(kernel, _GATHER_ONLY, True)
    return kernel


class NotDifferentiableError(RuntimeError):
    """A derivative was asked for that does not exist, or would silently be incomplete."""


# -- tapes: one for each thread -------------------------------------------------------------------

_thread = threading.local()
_recorders_lock = threading.Lock()
_recorders = 0


class _TapeRouter(wp.Tape):
    """Warp's process-wide tape while anything records: hands each launch to the tape of its own thread."""

    def record_launch(
        self, kernel: wp.Kernel, dim: Any, max_blocks: int, inputs: Any, outputs: Any, *args: Any, **kwargs: Any
    ) -> None:
        if (tape := active_tape()) is not None:
            if not has_adjoint(kernel):
                _refuse_tracked(kernel, [*inputs, *outputs])
            tape.record_launch(kernel, dim, max_blocks, inputs, outputs, *args, **kwargs)

    def record_func(self, *args: Any, **kwargs: Any) -> None:
        if (tape := active_tape()) is not None:
            tape.record_func(*args, **kwargs)

    def record_scope_begin(self, *args: Any, **kwargs: Any) -> None:
        if (tape := active_tape()) is not None:
            tape.record_scope_begin(*args, **kwargs)

    def record_scope_end(self, *args: Any, **kwargs: Any) -> None:
        if (tape := active_tape()) is not None:
            tape.record_scope_end(*args, **kwargs)


_router = _TapeRouter()


def active_tape() -> wp.Tape | None:
    """The tape that records this thread's launches, or None."""
    return getattr(_thread, "tape", None)


class record:  # used as a context manager, named like a function
    """Record the launches of this thread, and of no other, on a new tape: ``with record() as tape``.

    Raises
    ------
    RuntimeError
        If this thread records already, or a plain ``with wp.Tape()`` is active: Warp has room for one tape per process.
    """

    def __enter__(self) -> wp.Tape:
        global _recorders
        if active_tape() is not None:
            raise RuntimeError("this thread records on a tape already; launches inside would be lost to it")
        with _recorders_lock:
            if _recorders == 0:
                try:
                    _router.__enter__()
                except RuntimeError as error:
                    raise RuntimeError(
                        "a wp.Tape is active around this torch operation; leave it first: torch's autograd "
                        "differentiates the operation, and Warp has room for one tape per process"
                    ) from error
            _recorders += 1
        tape = _thread.tape = wp.Tape()
        return tape

    def __exit__(self, *error: object) -> None:
        global _recorders
        _thread.tape = None
        with _recorders_lock:
            _recorders -= 1
            if _recorders == 0:
                _router.__exit__(None, None, None)


# -- CPU threads ----------------------------------------------------------------------------------

_pool: ThreadPoolExecutor | None = None
_pool_size = 0
_pool_lock = threading.Lock()


def _available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_threads: Callable[[], int] = _available_cores


def set_thread_count(source: Callable[[], int]) -> None:
    """Ask ``source`` for the number of CPU threads at each launch; the torch layer passes torch's setting."""
    global _threads
    _threads = source


def thread_count() -> int:
    """CPU threads that a gather-only launch may use now."""
    return max(1, _threads())


def _workers(count: int) -> ThreadPoolExecutor:
    global _pool, _pool_size
    with _pool_lock:
        if _pool is None or _pool_size < count:
            # an outgrown pool ends by itself once nobody holds it and its queue is empty
            _pool, _pool_size = ThreadPoolExecutor(count, "nvalchemiops"), count
        return _pool


Task = Callable[[], None]
"""A share of a launch; several threads run the same task, which deals out pieces."""


def _run_in_pool(task: Task, threads: int) -> None:
    """Run ``task`` in this thread and in others of our own."""
    waiting: list[Future[None]] = []
    try:
        pool = _workers(threads - 1)
        for _ in range(threads - 1):
            waiting.append(pool.submit(_work, task))
        task()
        waiting = [worker for worker in waiting if not worker.cancel()]  # who has not begun need not
    finally:
        _wait_for_all(waiting)
    for worker in waiting:
        worker.result()


_openmp: Callable[[Task, int], None] | None = None


def set_openmp(run: Callable[[Task, int], None] | None) -> None:
    """Let ``run(task, threads)`` run the tasks of the main thread, instead of threads of our own.

    Threads of another library that wait for work in a loop keep cores busy that ours would need: better to ask them.
    """
    global _openmp
    _openmp = run


def _run(task: Task, threads: int) -> None:
    if _openmp is not None and threading.current_thread() is threading.main_thread():
        _openmp(task, threads)
    else:
        _run_in_pool(task, threads)


_crowding = Crowding()


def is_crowded() -> bool:
    """Whether other work keeps interrupting this thread, so that threads which wait for each other gain nothing."""
    return _crowding.is_crowded()


def enter_as_worker(commands: dict[Any, Any]) -> None:
    """Make this thread a worker, with launches that it recorded before; for threads that Python forgets in between."""
    _thread.is_worker = True
    _thread.commands = commands


def _forget_threads() -> None:
    """A forked child has only the thread that forked: no workers, no other recorders, and fresh locks."""
    global _load_lock, _pool, _pool_size, _pool_lock, _recorders, _recorders_lock, _openmp
    _pool, _pool_size, _openmp = None, 0, None
    _load_lock, _pool_lock, _recorders_lock = threading.RLock(), threading.Lock(), threading.Lock()
    mine = active_tape() is not None
    if _recorders and not mine:
        _router.__exit__(None, None, None)
    _recorders = int(mine)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


# Warp loads modules without a lock, and threads that build or load the same one at once can crash the process. So
# whatever may be a first launch holds this lock; workers of a split launch find the module loaded.
_load_lock = threading.RLock()
_loaded: set[tuple[wp.Kernel, str]] = set()


def loading() -> AbstractContextManager[Any]:
    """Hold this while launching what may not be compiled and loaded yet."""
    return _load_lock


def load(kernel: wp.Kernel, device: wp.Device, block: int | None = None) -> None:
    """Compile and load ``kernel``, or find it loaded; a damaged file in Warp's cache is removed and made again, once.

    Warp notices a file that is cut off or that is not its own. What it cannot notice, machine code that was
    overwritten, nobody does before it runs.

    Parameters
    ----------
    kernel : wp.Kernel
        Not a generic one, which is nothing to load before its first launch.
    device : wp.Device
    block : int, optional
        Threads of a block, as for a launch.

    Raises
    ------
    RuntimeError
        The damaged files cannot be removed; the message names their folder.
    """
    module = kernel.module
    block_dim = block or 256  # as a launch resolves it
    if device.is_cpu and not (block and wp.config.enable_cpu_blocks):
        block_dim = 1
    with loading():
        folder = Path(str(wp.config.kernel_cache_dir), module.get_module_identifier(block_dim))
        from_before = folder.exists()
        try:
            _find(kernel, device, block_dim)
            return
        except Exception as error:
            if not from_before or module.failed_builds:
                raise
            reason = error
        # moved first, so that no other process finds half of it
        aside = folder.with_name(f"{folder.name}_damaged_p{os.getpid()}")
        try:
            folder.rename(aside)
        except FileNotFoundError:
            pass  # another process was faster
        except OSError as error:
            raise RuntimeError(
                f"the compiled kernels in {folder} cannot be loaded ({reason}), and they cannot be removed "
                f"({error.strerror}): delete that folder, and they are compiled again"
            ) from reason
        shutil.rmtree(aside, ignore_errors=True)
        warnings.warn(
            f"the compiled kernels in {folder} could not be loaded ({reason}) and are compiled again",
            RuntimeWarning,
            stacklevel=2,
        )
        module.unload()
        _find(kernel, device, block_dim)


def _find(kernel: wp.Kernel, device: wp.Device, block_dim: int) -> None:
    """Load the module of ``kernel``; raise unless the kernel is in it."""
    loaded = kernel.module.load(device, block_dim)
    if loaded is None or loaded.get_kernel_hooks(kernel).forward is None:
        raise RuntimeError(f"there is no kernel '{kernel.key}' in module '{kernel.module.name}' on {device}")


_row_cost: dict[tuple[wp.Kernel, Hashable], float] = {}
"""Processor time per row in the last CPU launch of each kind of each gather-only kernel; only decides on chunks."""


# -- launches -------------------------------------------------------------------------------------


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
    """Launch ``kernel`` over ``dim`` threads; split over CPU threads if it is declared `gather_only`.

    Parameters
    ----------
    kernel : wp.Kernel
        A gather-only kernel gets its ``offset`` argument from here; leave it out of ``inputs``.
    dim : int or sequence of int
        Number of rows, or launch grid.
    inputs, outputs : sequence
        Arguments in the kernel's order: Warp arrays, array descriptors as bytes (`descriptor_type`) or plain values.
    device : wp.Device or str
    stream : wp.Stream, optional
        Stream to launch on; the device's current one by default.
    lanes : int, optional
        On a GPU, threads that share each row: the kernel reads ``row, lane = wp.tid()`` and strides by
        ``wp.block_dim()``. One lane on the CPU. 0 (the default): the kernel has no lane index.
    record_tape : bool, optional
        False keeps the launch off any active tape, which makes it cheaper. Gather-only kernels have no
        adjoint and are never recorded.
    kind : hashable, optional
        Tells launches of one kernel apart whose rows take different times.
    """
    ensure_warp()
    if not isinstance(device, wp.Device):
        device = wp.get_device(device)
    grid = tuple(dim) if isinstance(dim, Sequence) else (operator.index(dim),)
    block = lanes or None
    if lanes:
        grid = (*grid, 1 if device.is_cpu else lanes)
    arguments = [*inputs, *outputs]
    gathers = is_gather_only(kernel)
    if (gathers or not record_tape) and active_tape() is not None:
        _refuse_tracked(kernel, arguments)
    if not gathers:
        if record_tape or kernel.is_generic:
            first = (kernel, device.alias) not in _loaded
            with loading() if first else nullcontext():
                if first and not kernel.is_generic:
                    load(kernel, device, block)
                wp.launch(
                    kernel,
                    grid,
                    inputs=_unpacked(arguments),
                    device=device,
                    stream=stream,
                    record_tape=record_tape,
                    block_dim=block,
                )
            _loaded.add((kernel, device.alias))
        else:
            _launch_recorded(kernel, grid, arguments, device, stream, block)
        return

    if not device.is_cpu:
        _launch_recorded(kernel, grid, [0, *arguments], device, stream, block)
        return
    rows = grid[0]
    threads = min(thread_count(), rows)
    if threads <= 1 or getattr(_thread, "is_worker", False):
        _launch_recorded(kernel, grid, [0, *arguments], device, stream, block)
        return
    # a row may cost nanoseconds or milliseconds: the kernel's last launch tells, and a first one stays whole
    cost = _row_cost.get((kernel, kind), 0.0)
    chunks = rows * cost / MINIMUM_CHUNK
    each = max(1, min(PIECES, int(chunks / threads)))
    count = min(rows, int(chunks), each * threads)
    if count <= 1 or not _crowding.threads_gain():
        start = time.thread_time()
        _launch_recorded(kernel, grid, [0, *arguments], device, stream, block)
        _row_cost[kernel, kind] = (time.thread_time() - start) / rows
        return
    with loading():
        wp.load_module(kernel.module, device=device)  # again, if the module has got another kernel since
    # Whoever is free takes the next piece: a thread may wake up late, or share its core with one that torch left
    # spinning after an operation of its own.
    edges = [rows * piece // count for piece in range(count + 1)]
    pieces = iter(range(count))
    work: list[float] = []
    task = functools.partial(_launch_pieces, kernel, edges, pieces, grid[1:], arguments, device, block, work)
    start = time.perf_counter()
    _run(task, min(threads, count))
    _crowding.note(time.perf_counter() - start, sum(work))
    _row_cost[kernel, kind] = sum(work) / rows


def _launch_pieces(
    kernel: wp.Kernel,
    edges: Sequence[int],
    pieces: Iterator[int],
    columns: tuple[int, ...],
    arguments: list[Any],
    device: Any,
    block: int | None,
    work: list[float],
) -> None:
    """Launch pieces until none is left, and add the processor time of this thread to ``work``."""
    start = time.thread_time()
    for piece in pieces:  # one thread at a time can advance an iterator over numbers
        first, size = edges[piece], edges[piece + 1] - edges[piece]
        _launch_recorded(kernel, (size, *columns), [first, *arguments], device, None, block)
    work.append(time.thread_time() - start)


def launch_adjoint(
    kernel: wp.Kernel,
    dim: int | Sequence[int],
    inputs: Sequence[Any],
    adjoints: Sequence[Any],
    *,
    device: Any,
    stream: wp.Stream | None = None,
) -> None:
    """Run the adjoint that Warp derived for ``kernel``: adds to the gradients of its inputs. Never split.

    Parameters
    ----------
    inputs, adjoints : sequence
        One entry for each kernel parameter, outputs included; None for an adjoint that is not wanted.
    """
    ensure_warp()
    wp.launch(
        kernel,
        dim,
        inputs=_unpacked(inputs),
        adj_inputs=_unpacked(adjoints),
        device=device,
        stream=stream,
        adjoint=True,
        record_tape=False,
    )


def _wait_for_all(chunks: Sequence[Future[Any]]) -> None:
    """Wait even through Ctrl-C, which is raised afterwards: the arrays must outlive every chunk that writes to them."""
    interrupt = None
    for chunk in chunks:
        while not chunk.done():
            try:
                chunk.exception()
            except BaseException as error:
                interrupt = error
    if interrupt is not None:
        raise interrupt


def _refuse_tracked(kernel: wp.Kernel, arguments: Sequence[Any]) -> None:
    """Raise if a launch that a tape cannot differentiate gets arrays whose gradients somebody wants."""
    if any(isinstance(a, wp.array) and a.requires_grad for a in arguments):
        raise NotDifferentiableError(
            f"kernel '{kernel.key}' is launched inside a recording, on arrays with gradients, but it has no adjoint "
            "(enable_backward=False), or this launch is not recorded: its part of the gradient would be missing"
        )


def has_adjoint(kernel: wp.Kernel) -> bool:
    """Whether Warp derives an adjoint for ``kernel``."""
    enabled = kernel.options.get("enable_backward")
    return bool(kernel.module.options.get("enable_backward", True) if enabled is None else enabled)


def _work(task: Task) -> None:
    _thread.is_worker = True
    task()


def _launch_recorded(
    kernel: wp.Kernel,
    grid: tuple[int, ...],
    arguments: list[Any],
    device: Any,
    stream: wp.Stream | None,
    block: int | None,
) -> None:
    """Launch through a command kept per thread, a quarter of the cost of ``wp.launch``.

    The command keeps descriptors only (addresses and shapes), so it holds no memory alive between launches.
    """
    if 0 in grid:
        return
    if kernel.is_generic:
        inputs = _unpacked(arguments)
        wp.launch(kernel, grid, inputs=inputs, device=device, stream=stream, record_tape=False, block_dim=block)
        return
    commands = _thread.__dict__.setdefault("commands", {})
    key = (kernel, device.alias, block)
    command = commands.get(key)
    if command is None:
        command = commands[key] = _Command(kernel, grid, arguments, device, block)
    command.launch(grid, arguments, stream)


class _Command:
    """A launch recorded by Warp, whose grid and arguments are replaced each time; for one thread."""

    def __init__(
        self, kernel: wp.Kernel, grid: tuple[int, ...], arguments: list[Any], device: Any, block: int | None
    ) -> None:
        self.kernel = kernel
        self.grid: tuple[int, ...] = ()
        inputs = _unpacked(arguments)
        is_worker = getattr(_thread, "is_worker", False)
        with nullcontext() if is_worker else loading():
            if not is_worker:
                load(kernel, device, block)
            self.recorded = wp.launch(
                kernel, grid, inputs=inputs, device=device, record_tape=False, record_cmd=True, block_dim=block
            )
        self.recorded.fwd_args = None  # or it would keep the arrays of each launch alive until the next one
        self.is_cpu = device.is_cpu
        self.names, self.types = [a.label for a in kernel.adj.args], [a.type for a in kernel.adj.args]
        # what a kernel on the CPU is called with: one structure of all arguments, which Warp would build each time
        fields = [(name, type(value)) for name, value in zip(self.names, self.recorded.params[1:])]
        self.structure = type("Arguments", (ctypes.Structure,), {"_fields_": fields})()
        self.pack = _packer(type(self.structure), self.types)

    def launch(self, grid: tuple[int, ...], arguments: list[Any], stream: wp.Stream | None) -> None:
        recorded = self.recorded
        if len(arguments) != len(self.names):
            raise TypeError(f"kernel '{self.kernel.key}' takes {len(self.names)} arguments, got {len(arguments)}")
        if self.grid != grid:
            recorded.set_dim(grid)
            self.grid = grid
        if not self.is_cpu:
            for index, value in enumerate(arguments):
                self._set(index, value)
            recorded.launch(stream)
            return
        try:
            self.pack(self.structure, 0, *arguments)
        except (struct.error, OverflowError):
            for index, value in enumerate(arguments):
                self._set(index, value)
                setattr(self.structure, self.names[index], recorded.params[index + 1])
        recorded.hooks.forward(ctypes.byref(recorded.params[0]), ctypes.byref(self.structure))

    def _set(self, index: int, value: Any) -> None:
        """Replace an argument by whatever Warp takes for it."""
        if type(value) is bytes:
            self.recorded.set_param_at_index_from_ctype(index, descriptor_type().from_buffer_copy(value))
            return
        if type(value) is int and self.types[index] is wp.int32 and not -(2**31) <= value < 2**31:
            raise ValueError(f"kernel '{self.kernel.key}': `{self.names[index]}` = {value} does not fit into 32 bits")
        self.recorded.set_param_at_index(index, value)


_FORMATS: dict[Any, str] = {wp.int32: "i", wp.float32: "f", wp.float64: "d"}


def _packer(structure: Any, types: Sequence[Any]) -> Callable[..., None]:
    """Write arguments into a structure all at once: numbers, and bytes for arrays; ``struct.error`` for anything else.

    There is also an error, always, if a parameter is of another type.
    """
    layout, at = "=", 0
    for (name, kind), declared in zip(structure._fields_, types):
        field = getattr(structure, name)
        form = f"{field.size}s" if issubclass(kind, descriptor_type()) else _FORMATS.get(declared)
        if form is None:
            return _refuse_to_pack
        layout, at = f"{layout}{field.offset - at}x{form}", field.offset + field.size
    return struct.Struct(layout).pack_into


def _refuse_to_pack(*arguments: Any) -> None:
    raise struct.error("a parameter is no array and no number that is packed")


def _unpacked(arguments: Sequence[Any]) -> list[Any]:
    """Arguments as Warp takes them."""
    return [descriptor_type().from_buffer_copy(a) if type(a) is bytes else a for a in arguments]


@functools.cache
def descriptor_type() -> Any:
    """Warp's array descriptor (address, shape, strides), which it names only through its instances."""
    return type(wp.empty(1, dtype=wp.int32, device="cpu").__ctype__())
