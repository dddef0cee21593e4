"""Private parts of Warp that the checker uses, named in this file only: the C++ that Warp generates for a kernel."""

import ctypes
import re

import warp as wp

NATIVE = wp.__path__[0] + "/native"
"""Headers that this C++ includes."""


def generated_source(kernel: wp.Kernel) -> str:
    """The C++ of the module of a kernel, as Warp generates it for a CPU with one thread for a block."""
    module = kernel.module
    module.get_module_hash(1)  # finds out what is in the module
    options = module.resolve_options(wp.config, block_dim=1) | {"output_arch": None}
    source, extension, *_ = module._run_codegen(options, True)
    assert extension == "cpp"
    return source


def function_of(kernel: wp.Kernel, source: str) -> tuple[str, str, int]:
    """Names of the function of one thread and of the structure of its arguments, and dimensions of its grid."""
    name = kernel.get_mangled_name()
    function = f"{name}_cpu_kernel_forward"
    declared = rf"static void {re.escape(function)}\(\s*wp::launch_bounds_t<(\d)> dim,\s*size_t task_index,"
    found = re.search(declared, source)
    assert found, f"Warp generates another function for {kernel.key}"
    return function, f"wp_args_{name}", int(found[1])


def bounds(grid: tuple[int, ...]) -> ctypes.Structure:
    """The structure by which a thread finds its place in the grid."""

    class Bounds(ctypes.Structure):
        _fields_ = (("shape", ctypes.c_uint32 * len(grid)), ("size", ctypes.c_size_t), ("share", ctypes.c_size_t))

    size = 1
    for n in grid:
        size *= n
    return Bounds((ctypes.c_uint32 * len(grid))(*grid), size, 1)
