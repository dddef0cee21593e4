"""Kernels whose bodies are C++ text, which Warp's own language cannot express well, and pieces of such text."""

import linecache
import re
from collections.abc import Callable
from typing import Any

import warp as wp

from nvalchemiops._warp_internals import source_of
from nvalchemiops.launch import OFFSET, gather_only, kernel_module

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
    """``text`` with values in the place of ``@name@``."""
    return re.sub(r"@(\w+)@", lambda match: str(values[match[1]]), text)


def by_device(cpu: str, gpu: str = "") -> str:
    """Text that differs between CPU and GPU."""
    return f"\n#if defined(__CUDA_ARCH__)\n{gpu}\n#else\n{cpu}\n#endif\n"


def native_kernel(name: str, body: str, lanes: bool = False) -> Callable[[Callable[..., Any]], wp.Kernel]:
    """Make a gather-only kernel of C++ text and the signature of a function.

    Parameters
    ----------
    name : str
        Name of the kernel and of its module (`kernel_module`): an identifier.
    body : str
        C++ text for one thread. It reads and writes the parameters of the function by name.
    lanes : bool, optional
        Whether the kernel is launched with lanes.

    Returns
    -------
    callable
        Decorator of a function without a body. Its first parameter is the row of the thread; all others are those of
        the kernel, in this order, with their types.

    """

    def decorate(signature: Callable[..., Any]) -> wp.Kernel:
        return row_kernel(name, wp.func_native(body)(signature), kernel_module(name), lanes)

    return decorate


def row_kernel(name: str, function: Any, module: Any, lanes: bool = False) -> wp.Kernel:
    """Make a gather-only kernel that calls a function for each row.

    Parameters
    ----------
    name : str
        An identifier.
    function : wp.Function
        Made by ``wp.func`` or ``wp.func_native``. Its first parameter is the row of the thread; all others are those of
        the kernel.
    module : wp.Module
    lanes : bool, optional
        As for `native_kernel`.

    Notes
    -----
    Warp reads the text of kernels through `inspect`, which finds generated text in `linecache`.
    """
    types = source_of(function)[1].__annotations__
    _, *names = types
    declared = ", ".join(names)
    text = (
        f"def {name}({OFFSET}, {declared}):\n"
        f"    {'_row, _lane' if lanes else '_row'} = wp.tid()\n"
        f"    function({OFFSET} + _row, {declared})\n"
    )
    file = f"<nvalchemiops kernel {name}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    scope: dict[str, Any] = {"wp": wp, "function": function}
    exec(compile(text, file, "exec"), scope)
    scope[name].__annotations__ = {OFFSET: wp.int32, **{n: types[n] for n in names}}
    return gather_only(wp.kernel(module=module, enable_backward=False)(scope[name]))
