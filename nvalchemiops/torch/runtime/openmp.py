"""Runs kernels on the threads of torch's operations, and torch's operations on one thread on busy machines.

After an operation, the threads of GNU OpenMP wait for the next operation in a busy loop, for some milliseconds. Any
other thread would have to share a core with them. So the pieces of a launch also run on these threads.

On a machine that is busy with other work, kernels run on one thread, and so do torch's operations inside the library's
calls. These are elementwise operations, matrix products, Fourier transforms and sums along a dimension: their bits do
not depend on the number of threads.
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
"""The OpenMP library whose entry points this module calls."""


class OpenMP:
    """Runs a task in the calling thread and in its OpenMP threads: each calling thread has its own team."""

    def __init__(self, library: ctypes.CDLL) -> None:
        kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        self.parallel = library.GOMP_parallel
        self.parallel.argtypes = [kind, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        self.parallel.restype = None
        self.entry = kind(self.enter)
        self.running: dict[int, tuple[core.Task, list[BaseException]]] = {}  # by calling thread

    def __call__(self, task: core.Task, threads: int) -> None:
        """Run ``task`` in this many threads, the calling thread among them."""
        caller, errors = threading.get_ident(), list[BaseException]()
        self.running[caller] = task, errors
        try:
            self.parallel(self.entry, caller, threads, 0)
        finally:
            del self.running[caller]
        if errors:
            raise errors[0]

    def enter(self, caller: int) -> None:
        """Entry point of each thread. Python knows OpenMP threads only while they are inside this function."""
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
    """The threads of the OpenMP library that torch has loaded; None if it is not GNU's or cannot be found."""
    try:
        return OpenMP(_loaded(LIBRARY))
    except (OSError, AttributeError):
        return None


def _loaded(name: str) -> ctypes.CDLL:
    """The library of this name that torch has loaded; OSError unless exactly one is found."""
    with open("/proc/self/maps") as maps:
        loaded = {line.split()[-1] for line in maps if name in line}
    # other packages may bring another copy
    mine = [path for path in loaded if "torch" in path] or list(loaded)
    if len(mine) != 1:
        raise OSError(f"{len(mine)} libraries {name}")
    return ctypes.CDLL(mine[0])


class _Before(threading.local):
    """The thread numbers before the limit of this thread, and whether a backward pass set it; None without a limit."""

    state: tuple[int, Any, bool] | None = None


_before = _Before()


class _ThreadLimit:
    """Limits torch's operations in the calling thread to one thread. Other threads are not affected."""

    def __init__(self) -> None:
        openmp = _loaded(LIBRARY)
        self.most, self.set = openmp.omp_get_max_threads, openmp.omp_set_num_threads
        # MKL, if torch uses it, has a separate number of threads
        self.set_products = getattr(_loaded("libtorch_cpu"), "MKL_Set_Num_Threads_Local", None)

    def enter(self, in_backward: bool = False) -> bool:
        """Use one thread from now on. Return False if the limit was set already."""
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
        """Use as many threads as before the limit. Return False if there was no limit."""
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
    """Run ``function`` on a CPU, on one thread (``alone``) or on all threads, however busy the machine is."""
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
    """Run torch's operations in this thread on one thread while other work keeps the cores busy, and on all otherwise.

    Call it now and then, for example once in each step of a training loop: it takes a microsecond. The operators of
    this library adapt automatically. On a busy machine, threads of torch that wait for each other can take twenty times
    longer than a single thread.

    Returns
    -------
    int
        The number of threads from now on, as from ``torch.get_num_threads()``. Without GNU OpenMP it does not change.

    Notes
    -----
    The last digit of a sum over all elements of a tensor, such as a loss, depends on the number of threads.
    """
    limit = _limit()
    if limit is not None:
        if core.is_crowded():
            limit.enter()
        else:
            limit.leave()
    return torch.get_num_threads()


def fairly(function: Callable[..., Any], *tensors: torch.Tensor) -> Any:
    """Return ``function(*tensors)``. It and its backward pass run on one thread if other work needs the cores.

    Only eager calls on a CPU are limited. The result is a tensor or a tuple of tensors. ``function`` must not depend on
    other tensors that require gradients.
    """
    if _before.state is None and not core.is_crowded():  # the usual case
        return function(*tensors)
    limit = _limit() if is_eager() else None
    if limit is None:
        return function(*tensors)
    if limit.is_in_backward() and not in_backward_pass():
        limit.leave()  # a backward pass raised before its end and left the limit
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
    """Limit the backward pass to one thread, from the first of ``results`` until all ``inputs`` have their gradients.

    The end of the backward pass also lifts the limit.
    """
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
        if entered:  # otherwise another call set the limit
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
