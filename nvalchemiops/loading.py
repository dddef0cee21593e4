"""Warp modules of kernels, the registry of kernels, their declarations, and loading."""

import functools
import os
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import warp as wp

from nvalchemiops import __version__
from nvalchemiops._warp_internals import (
    compile_module,
    compiled_folder,
    failed_to_build,
    find_kernel,
    has_adjoint,
    is_loaded,
    parameters,
    unload_module,
)
from nvalchemiops.kernels.kept_headers import kept_headers
from nvalchemiops.layout import layout
from nvalchemiops.locks import fork_safe

OFFSET = "offset"
"""Name of the first parameter of a gather-only kernel: the row at which its chunk begins."""

DEFAULT_BLOCK = 256
"""Threads per block in Warp's launches."""

_registered: list[tuple[str, Callable[[], wp.Kernel]]] = []


def kernel_module(name: str) -> Any:
    """The Warp module for one kernel, compiled alone, in a cache folder whose name has this library's version."""
    release = "".join(c if c.isalnum() else "_" for c in __version__)
    return wp.get_module(f"nvalchemiops_{release}_{name}")


def kernel_variants(
    *variants: tuple[Any, ...],
) -> Callable[[Callable[..., wp.Kernel]], Callable[..., wp.Kernel]]:
    """Cache a kernel factory by its arguments and list ``variants`` for ``nvalchemiops warmup``.

    Parameters
    ----------
    *variants : tuple
        Argument tuples of the specialisations that ``nvalchemiops warmup`` compiles.
    """

    def decorate(factory: Callable[..., wp.Kernel]) -> Callable[..., wp.Kernel]:
        kept: dict[tuple[Any, ...], wp.Kernel] = {}

        @functools.wraps(factory)
        def cached(*arguments: Any) -> wp.Kernel:
            if arguments not in kept:
                # if two threads made the kernel, the module would know only one of the two
                with loading():
                    if arguments not in kept:
                        kept[arguments] = factory(*arguments)
            return kept[arguments]

        cached.cache_clear = kept.clear  # type: ignore[attr-defined]  # mypy knows no attributes of functions
        for arguments in variants:
            label = ", ".join(str(a) for a in arguments)
            _registered.append((f"{factory.__name__}({label})", functools.partial(cached, *arguments)))
        return cached

    return decorate


def registered_kernels() -> list[tuple[str, Callable[[], wp.Kernel]]]:
    """All kernel specialisations that imported modules have declared, as ``(name, build)``."""
    return list(_registered)


_GATHER_ONLY = "_nvalchemiops_gather_only"


def is_gather_only(kernel: wp.Kernel) -> bool:
    """Whether ``kernel`` was declared `gather_only`."""
    return getattr(kernel, _GATHER_ONLY, False)


def gather_only(kernel: wp.Kernel) -> wp.Kernel:
    """Declare that each thread of ``kernel`` writes only entries that no other thread reads or writes.

    Only gather-only kernels are split over CPU threads. Their first parameter must be ``offset: wp.int32``, which the
    kernel adds to ``wp.tid()``; `launch` supplies it. They must not have an adjoint (``enable_backward=False``): a Warp
    adjoint scatters, and Warp's CPU atomics are not atomic.

    Raises
    ------
    TypeError
        If the first parameter is not ``offset: wp.int32``, or the kernel has an adjoint.
    """
    if parameters(kernel)[:1] != [(OFFSET, wp.int32)]:
        raise TypeError(f"gather-only kernel '{kernel.key}' needs `{OFFSET}: wp.int32` as its first parameter")
    if has_adjoint(kernel):
        raise TypeError(f"gather-only kernel '{kernel.key}' needs enable_backward=False: adjoints scatter")
    setattr(kernel, _GATHER_ONLY, True)
    return kernel


_CPU_ONLY = "_nvalchemiops_cpu_only"


def cpu_only(kernel: wp.Kernel) -> wp.Kernel:
    """Declare that a GPU never runs ``kernel``, so that it need not be compiled for one."""
    setattr(kernel, _CPU_ONLY, True)
    return kernel


def is_cpu_only(kernel: wp.Kernel) -> bool:
    """Whether ``kernel`` was declared `cpu_only`."""
    return getattr(kernel, _CPU_ONLY, False)


_LANES = "_nvalchemiops_lanes"


def with_lanes(kernel: wp.Kernel, lanes: int) -> wp.Kernel:
    """Declare the number of lanes with which ``kernel`` is launched, for loading it without a launch."""
    setattr(kernel, _LANES, lanes)
    return kernel


def lanes_of(kernel: wp.Kernel) -> int:
    """The number of lanes that `with_lanes` has declared for ``kernel``; 0 without a declaration."""
    return getattr(kernel, _LANES, 0)


# Warp loads modules without a lock, and threads that build or load the same module at once can crash the process. So
# each launch that may be the first one holds this lock. For workers of a split launch the module is loaded already.
_lock = fork_safe(threading.RLock())


def loading() -> AbstractContextManager[Any]:
    """The lock to hold during a launch that may have to compile or load its kernel."""
    return _lock


def load(kernel: wp.Kernel, device: wp.Device, block: int | None = None, stream: wp.Stream | None = None) -> None:
    """Compile and load ``kernel``, unless it is loaded. A damaged file in Warp's cache is compiled again, once.

    Warp detects truncated and foreign files. Overwritten machine code is not detected before it runs.

    Parameters
    ----------
    kernel : wp.Kernel
        Must not be generic: a generic kernel has nothing to load before its first launch.
    device : wp.Device
    block : int, optional
        Threads per block, by default as many as in launches of this kernel. Each number has its own module.
    stream : wp.Stream, optional
        The stream of the launch for which the kernel is loaded; on a GPU the device's current one by default.

    Raises
    ------
    RuntimeError
        The kernel is not loaded, and a CUDA graph is being captured on this stream. Or the damaged files cannot be
        removed; the message names their folder.
    """
    if block is None:
        block = layout("cpu" if device.is_cpu else "cuda").block
    block_dim = block or DEFAULT_BLOCK
    if device.is_cpu and not (block and wp.config.enable_cpu_blocks):
        block_dim = 1
    with loading():
        if not device.is_cpu and not is_loaded(kernel, device, block_dim):
            _refuse_in_capture(kernel, device, device.stream if stream is None else stream)
        folder = compiled_folder(kernel, block_dim)
        from_before = folder.exists()
        to_compile = kept_headers() if device.is_cpu and not from_before else nullcontext()
        try:
            with to_compile:
                find_kernel(kernel, device, block_dim)
            return
        except Exception as error:
            if not from_before or failed_to_build(kernel):
                raise
            reason = error
        # renamed first, so that no other process finds half of the folder
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
        unload_module(kernel)
        find_kernel(kernel, device, block_dim)


def compile_for(kernel: wp.Kernel, capability: int, folder: Path | None = None) -> Path:
    """Compile a kernel for GPUs of this compute capability, times ten. No GPU is needed.

    Parameters
    ----------
    kernel : wp.Kernel
        Must not be generic.
    capability : int
        90 for an H100.
    folder : Path, optional
        By default the one in Warp's cache in which a launch looks for the kernel.

    Returns
    -------
    Path
        The compiled file.
    """
    block = layout("cuda").block or DEFAULT_BLOCK
    with loading():
        folder = compiled_folder(kernel, block) if folder is None else folder
        folder.mkdir(parents=True, exist_ok=True)
        # files are moved when they are whole, since other processes may look for them
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}_p{os.getpid()}_") as aside:
            compiled = compile_module(kernel, block, capability, Path(aside))
            for made in Path(aside).iterdir():
                made.replace(folder / made.name)
    return folder / compiled.name


def _refuse_in_capture(kernel: wp.Kernel, device: wp.Device, stream: wp.Stream) -> None:
    """Raise if a CUDA graph is being captured: the driver may wait for the GPU, or end the capture with an error."""
    if stream.is_capturing:
        raise RuntimeError(
            f"kernel '{kernel.key}' is not loaded on {device}, and it cannot be loaded while a CUDA graph is captured: "
            "before the capture, call what is captured once in the same way (dtypes, options, derivatives)"
        )
