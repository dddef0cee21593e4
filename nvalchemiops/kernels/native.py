"""Kernels whose bodies are C++, for code that Warp's Python dialect cannot express well, and parts of such bodies."""

import hashlib
import linecache
import re
from collections.abc import Callable
from typing import Any

import warp as wp

from nvalchemiops._warp_internals import source_of
from nvalchemiops.kernels.simd import WARP
from nvalchemiops.launch import OFFSET, gather_only, kernel_module, with_lanes
from nvalchemiops.layout import GPU

SYSTEM_OF = """
    // the last system that begins at this place or before
    const auto system_of = [](const wp::array_t<wp::int32> &begin, int place) {
        int low = 0, high = begin.shape[0] - 1;
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (begin.data[middle] <= place) low = middle;
            else high = middle;
        }
        return low;
    };
"""


def filled(text: str, **values: object) -> str:
    """``text`` with each ``@name@`` replaced by the value of that name."""
    return re.sub(r"@(\w+)@", lambda match: str(values[match[1]]), text)


def by_device(cpu: str, gpu: str = "") -> str:
    """C++ that differs between CPU and GPU."""
    return f"\n#if defined(__CUDA_ARCH__)\n{gpu}\n#else\n{cpu}\n#endif\n"


def native_kernel(
    name: str, body: str, lanes: bool = False, blocks: int | None = None
) -> Callable[[Callable[..., Any]], wp.Kernel]:
    """Make a gather-only kernel from C++ text and the signature of a function.

    Parameters
    ----------
    name : str
        Name of the kernel and of its module (`kernel_module`): an identifier.
    body : str
        C++ text for one thread, which reads and writes the parameters of the function by name.
    lanes : bool, optional
        Whether the lanes of a warp share a row; the kernel is then launched with lanes.
    blocks : int, optional
        Blocks that a multiprocessor of a GPU must hold at once, which limits the registers of a thread.

    Returns
    -------
    callable
        Decorator for a function without a body. Its first parameter is the row of the thread; the others are the
        parameters of the kernel, in order, with their types.
    """

    def decorate(function: Callable[..., Any]) -> wp.Kernel:
        return row_kernel(name, wp.func_native(body)(function), kernel_module(name), lanes, blocks)

    return decorate


def signature(**parameters: Any) -> Callable[..., Any]:
    """A function without a body that has these parameters and types, for `native_kernel`."""
    function = defined("row_function", f"def row_function({', '.join(parameters)}): ...\n")
    function.__annotations__ = parameters
    return function


def row_kernel(name: str, function: Any, module: Any, lanes: bool = False, blocks: int | None = None) -> wp.Kernel:
    """Make a gather-only kernel that calls a function for each row.

    Parameters
    ----------
    name : str
        An identifier.
    function : wp.Function
        Made by ``wp.func`` or ``wp.func_native``. Its first parameter is the row of the thread; the others are the
        parameters of the kernel.
    module : wp.Module
    lanes, blocks : optional
        As for `native_kernel`.
    """
    types = source_of(function)[1].__annotations__
    _, *names = types
    declared = ", ".join(names)
    text = (
        f"def {name}({OFFSET}, {declared}):\n"
        f"    {'_row, _lane' if lanes else '_row'} = wp.tid()\n"
        f"    function({OFFSET} + _row, {declared})\n"
    )
    kernel = defined(name, text, function=function)
    kernel.__annotations__ = {OFFSET: wp.int32, **{n: types[n] for n in names}}
    bounds = None if blocks is None else (GPU.block, blocks)
    made = wp.kernel(module=module, enable_backward=False, launch_bounds=bounds)(kernel)
    return with_lanes(gather_only(made), WARP if lanes else 0)


def defined(name: str, text: str, **scope: Any) -> Any:
    """The function ``name`` that ``text`` defines. The text is also put into `linecache`, where Warp looks for it."""
    file = f"<nvalchemiops kernel {hashlib.sha256(text.encode()).hexdigest()[:20]}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    scope["wp"] = wp
    exec(compile(text, file, "exec"), scope)
    return scope[name]
