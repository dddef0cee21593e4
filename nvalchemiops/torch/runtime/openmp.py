"""Kernels on the threads that torch's own operations run on, and these operations on one thread where that is better.

After an operation, the threads of GNU OpenMP wait for the next one in a loop, for some milliseconds. That is cheap for
torch, but any other thread has to share a core with them meanwhile. So pieces of a launch are given to these threads.
And on a machine that is busy with other work, torch's operations inside ours take one thread, as kernels do there: they
are element by element, matrix products, Fourier transforms and sums along a dimension, whose bits do not depend on it.
"""

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nvalchemiops import launch as core
from nvalchemiops.torch.runtime._torch_internals import BACKWARD_KNOWN, after_backward_pass, in_backward_pass
from nvalchemiops.torch.runtime.context import is_eager

LIBRARY = "libgomp"
"""The OpenMP library whose entry points are used here."""


class OpenMP:
    """Runs a task in the calling thread and in threads of OpenMP, which belong to one calling thread."""

    def __init__(self, library: ctypes.CDLL) -> None:
        kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        self.parallel = library.GOMP_parallel
        self.parallel.argtypes = [kind, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        self.parallel.restype = None
        self.entry = kind(self.enter)
        self.running: dict[int, tuple[core.Task, list[BaseException]]] = {}  # by calling thread

    def __call__(self, task: core.Task, threads: int) -> None:
        """Run ``task`` in as many threads, this one among them."""
        caller, errors = threading.get_ident(), list[BaseException]()
        self.running[caller] = task, errors
        try:
            self.parallel(self.entry, caller, threads, 0)
        finally:
            del self.running[caller]
        if errors:
            raise errors[0]

    def enter(self, caller: int) -> None:
        """Entry point of each thread. Python knows threads of OpenMP only while they are here."""
        found = self.running.get(caller)
        if found is None:
            return
        task, errors = found
        try:
            if threading.get_ident() != caller:
                core.enter_as_worker()
            task()
        except BaseException as error:
            errors.append(error)


def openmp_of_torch() -> OpenMP | None:
    """The threads of the OpenMP library that torch has loaded, if it is GNU's and can be found."""
    try:
        return OpenMP(_loaded(LIBRARY))
    except (OSError, AttributeError):
        return None


def _loaded(name: str) -> ctypes.CDLL:
    """The library of this name that torch has loaded; OSError if that is not known."""
    with open("/proc/self/maps") as maps:
        loaded = {line.split()[-1] for line in maps if name in line}
    # other packages may bring another copy
    mine = [path for path in loaded if "torch" in path] or list(loaded)
    if len(mine) != 1:
        raise OSError(f"{len(mine)} libraries {name}")
    return ctypes.CDLL(mine[0])


class _Before(threading.local):
    """Numbers of threads before the limit of a thread, and whether a backward pass has set it; None without a limit."""

    state: tuple[int, Any, bool] | None = None


_before = _Before()


class _ThreadLimit:
    """The number of threads that the calling thread has for torch's operations; other threads keep theirs."""

    def __init__(self) -> None:
        openmp = _loaded(LIBRARY)
        self.most, self.set = openmp.omp_get_max_threads, openmp.omp_set_num_threads
        # Intel's library, where torch has it, has a number besides
        self.set_products = getattr(_loaded("libtorch_cpu"), "MKL_Set_Num_Threads_Local", None)

    def enter(self, in_backward: bool = False) -> bool:
        """Use one thread from now on; False if it is so already."""
        if _before.state is not None or self.most() == 1:
            return False
        products = self.set_products(1) if self.set_products else None
        _before.state = self.most(), products, in_backward
        self.set(1)
        return True

    def is_in_backward(self) -> bool:
        """Whether the limit was set by a backward pass."""
        state = _before.state
        return state is not None and state[2]

    def leave(self) -> bool:
        """Use as many threads as before; False if it is so already."""
        state = _before.state
        if state is None:
            return False
        threads, products, _ = state
        _before.state = None
        if self.most() == 1:  # otherwise the user has set another number meanwhile
            self.set(threads)
            if self.set_products:
                self.set_products(products)
        return True


def at_fixed_threads(function: Callable[[], torch.Tensor], alone: bool) -> torch.Tensor:
    """``function()`` on a CPU, on one thread or on all of the caller, however busy the machine is."""
    limit = _limit()
    if limit is None:
        return function()
    in_backward = limit.is_in_backward()
    changed = limit.enter() if alone else limit.leave()
    try:
        return function()
    finally:
        if changed and alone:
            limit.leave()
        elif changed:
            limit.enter(in_backward)


@functools.cache
def _limit() -> _ThreadLimit | None:
    try:
        return _ThreadLimit()
    except (OSError, AttributeError):
        return None


def adapt_threads() -> int:
    """Let torch's operations in this thread have one thread while other work keeps the cores busy, and all otherwise.

    Call it now and then, once for each step of a training loop, say: it takes a microsecond. Operators of this library
    do the same by themselves. On a busy machine, threads of torch that wait for each other can take twenty times longer
    than one thread alone.

    Returns
    -------
    int
        Number of threads from now on, as of ``torch.get_num_threads()``. Without GNU's OpenMP it does not change.

    Notes
    -----
    Sums over all elements of a tensor, as of a loss, depend on the number of threads in their last digit.
    """
    limit = _limit()
    if limit is not None:
        if core.is_crowded():
            limit.enter()
        else:
            limit.leave()
    return torch.get_num_threads()


def fairly(function: Callable[..., Any], *tensors: torch.Tensor) -> Any:
    """``function(*tensors)``, a tensor or some; on one thread, as its backward pass, where others need the cores.

    For eager calls on a CPU. All that ``function`` has from elsewhere is a constant.
    """
    if _before.state is None and not core.is_crowded():  # as in most calls
        return function(*tensors)
    limit = _limit() if is_eager() else None
    if limit is None:
        return function(*tensors)
    if limit.is_in_backward() and not in_backward_pass():
        limit.leave()  # of a backward pass that raised before its end
    if not core.is_crowded() or tensors[0].device.type != "cpu" or not limit.enter():
        return function(*tensors)
    try:
        with_graph = torch.is_grad_enabled() and BACKWARD_KNOWN
        aliases = [t.view_as(t) if with_graph and t.requires_grad else t for t in tensors]
        results = function(*aliases)
        if with_graph:
            _limit_backward(limit, [a for a, t in zip(aliases, tensors) if a is not t], results)
        return results
    finally:
        limit.leave()


def _limit_backward(limit: _ThreadLimit, inputs: Sequence[torch.Tensor], results: Any) -> None:
    """One thread from the first result that is differentiated until all inputs are, or the backward pass ends."""
    outputs = [r for r in (results if isinstance(results, tuple) else (results,)) if r.requires_grad]
    waiting: set[int] = set()
    entered = False

    def begin(_: torch.Tensor) -> None:
        nonlocal entered
        waiting.update(range(len(inputs)))
        if limit.enter(in_backward=True):
            entered = True
            after_backward_pass(finish)

    def finish() -> None:
        nonlocal entered
        if entered:  # otherwise another call has entered the limit
            entered = False
            limit.leave()

    def reached(number: int, _: torch.Tensor) -> None:
        waiting.discard(number)
        if not waiting:
            finish()

    for output in outputs:
        output.register_hook(begin)
    for number, tensor in enumerate(inputs):
        tensor.register_hook(functools.partial(reached, number))
