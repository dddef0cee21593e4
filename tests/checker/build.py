"""Compiles the C++ of kernels with hooks at each access to memory, for the runner in ``runner.cpp``."""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import warp as wp

from tests.checker import warp_source

HERE = Path(__file__).parent
COMPILER = shutil.which("g++")
IS_POSSIBLE = bool(COMPILER) and sys.platform == "linux"
NOT_HERE = "the checker needs Linux and g++"
FLAGS = ("-std=c++17", "-g", "-fPIC", "-fsanitize=thread", "-I", warp_source.NATIVE)

BUILDS = {
    "pattern": ("-O0", "-ftrivial-auto-var-init=pattern"),
    "zero": ("-O0", "-ftrivial-auto-var-init=zero"),
    "fast": ("-O1",),
}
"""Ways to compile: by what local variables hold that nothing was assigned to, which an optimiser would choose."""

WRAPPED = [f"-Wl,--wrap={name}" for name in ("memset", "memcpy", "memmove")]


class Module:
    """The compiled code of one kernel.

    Attributes
    ----------
    path : Path
        The shared library.
    text : list of str
        Lines of its source.
    entry
        Address of the function of one thread.
    """

    def __init__(self, path: Path, source: Path) -> None:
        self.path, self.source = path, source
        self.text = source.read_text().splitlines()
        runner()  # the library refers to it
        self.library = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
        self.entry = ctypes.cast(self.library.checker_entry, ctypes.c_void_p).value
        self.low, self.high = _mapped(path)


def _mapped(path: Path) -> tuple[int, int]:
    """Where a loaded library begins and ends."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    places = [line.split()[0].split("-") for line in lines if line.endswith(str(path))]
    return int(places[0][0], 16), int(places[-1][1], 16)


def folder() -> Path:
    """Where compiled modules are kept, beside those of Warp."""
    path = Path(str(wp.config.kernel_cache_dir)) / "nvalchemiops_checker"
    path.mkdir(parents=True, exist_ok=True)
    return path


def _compile(target: Path, *arguments: object) -> None:
    """Write ``target``, at once: other processes may look for it."""
    assert IS_POSSIBLE and COMPILER, NOT_HERE
    made = target.with_name(f"{target.stem}.{os.getpid()}{target.suffix}")
    done = subprocess.run([COMPILER, *map(str, arguments), "-o", str(made)], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"the checker cannot compile {target.name}:\n{done.stderr[:4000]}")
    made.rename(target)


def _write(target: Path, text: str) -> None:
    """The same for text."""
    made = target.with_name(f"{target.name}.{os.getpid()}")
    made.write_text(text)
    made.rename(target)


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


@functools.cache
def runner() -> ctypes.CDLL:
    """The library of ``runner.cpp``."""
    source = HERE / "runner.cpp"
    path = folder() / f"runner_{_digest(source.read_text())}.so"
    if not path.exists():
        # without its check, longjmp goes from one stack to another
        _compile(path, "-std=c++17", "-O2", "-g", "-fPIC", "-shared", "-U_FORTIFY_SOURCE", source)
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


@functools.cache
def _header(build: str) -> Path:
    """``device.h`` in a folder of its own, compiled."""
    text = (HERE / "device.h").read_text()
    place = folder() / f"header_{_digest(text, wp.config.version, *FLAGS, *BUILDS[build])}"
    place.mkdir(exist_ok=True)
    header, compiled = place / "device.h", place / "device.h.gch"
    if not compiled.exists():
        _write(header, text)
        _compile(compiled, *FLAGS, *BUILDS[build], "-x", "c++-header", header)
    return header


_modules: dict[tuple[wp.Kernel, str], Module] = {}


def module_of(kernel: wp.Kernel, build: str) -> Module:
    """The kernel, compiled; kept on disk by its content."""
    if (kernel, build) in _modules:
        return _modules[kernel, build]
    source = warp_source.generated_source(kernel)
    function, arguments, ndim = warp_source.function_of(kernel, source)
    source += (
        f'\nextern "C" void checker_entry(void *dim, size_t task, void *arguments) {{\n'
        f"    {function}<false>(*static_cast<wp::launch_bounds_t<{ndim}> *>(dim), task,\n"
        f"        static_cast<{arguments} *>(arguments));\n}}\n"
    )
    header = _header(build)
    place = folder() / f"{kernel.key}_{_digest(source, str(header))}"
    place.mkdir(exist_ok=True)
    text, compiled = place / "kernel.cpp", place / "kernel.so"
    if not compiled.exists():
        _write(text, source)
        assembled = place / f"kernel_{os.getpid()}.o"
        _compile(assembled, *FLAGS, *BUILDS[build], "-include", header, "-c", text)
        _compile(compiled, "-shared", *WRAPPED, assembled)
        assembled.unlink(missing_ok=True)
    made = _modules[kernel, build] = Module(compiled, text)
    return made
