"""What the host takes to hand a launch to CUDA, on any machine: a function that does nothing is in CUDA's place.

A sum over pairs with 16 arguments, in three ways: ``wp.launch``; Warp's recorded launch, whose arguments are replaced
one by one; and all of them written at once, as the library does it. Grids alternate, as between batches.

Run: ``python benchmarks/packing.py [--json FILE]``. Figures are the least of many short bursts in turns.
"""

import argparse
import ctypes
import json
import math
import time
import types
from collections.abc import Callable
from typing import Any

import warp as wp

from nvalchemiops import _warp_internals as internals
from nvalchemiops._warp import quiet_warp
from nvalchemiops.interactions.pair import sum as pair_kernels  # noqa: F401  # registers kernels
from nvalchemiops.launch import load, registered_kernels

GRIDS, BURST, ROUNDS = ((1000, 32), (1200, 32)), 20, 500


def pretended_gpu(kernel: wp.Kernel) -> Any:
    """A device that Warp takes for a GPU, on which launches of ``kernel`` do nothing."""
    cpu = wp.get_device("cpu")
    load(kernel, cpu)
    device: Any = object.__new__(wp.Device)
    vars(device).update(vars(cpu))
    vars(device).update(alias="cuda:0", ordinal=0, _context=2**32, arch=90)
    device._stream = types.SimpleNamespace(device=device, cuda_stream=1)
    hooks = kernel.module.load(cpu, 1).get_kernel_hooks(kernel)
    executable = types.SimpleNamespace(get_kernel_hooks=lambda _: type(hooks)(1, None))
    kernel.module.load = lambda *_: executable
    core = device.runtime.core
    nothing = ctypes.CDLL(None).abs  # of the first 32 bits of the context: zero, which is success
    nothing.argtypes, nothing.restype = core.wp_cuda_launch_kernel.argtypes, ctypes.c_int
    core.wp_cuda_launch_kernel = nothing
    return device


def ways(kernel: wp.Kernel) -> dict[str, Callable[[], None]]:
    """A launch over each of the grids, in three ways."""
    device, stream = pretended_gpu(kernel), None
    given: list[Any] = []
    for parameter in internals.parameters(kernel):
        ndim = getattr(parameter.type, "ndim", None)
        if ndim is None:
            given.append(1.5 if parameter.type is wp.float64 else 1)
        else:
            given.append(internals.descriptor((10,) * ndim, (8,) * ndim))
    ours = internals.Command(kernel, GRIDS[0], given, device, 32)
    assert ours.pack is not None
    recorded = internals.Command(kernel, GRIDS[0], given, device, 32)
    recorded.pack = None

    def by_warp() -> None:
        for grid in GRIDS:
            wp.launch(kernel, grid, internals.unpacked(given), device=device, record_tape=False, block_dim=32)

    def one_by_one() -> None:
        for grid in GRIDS:
            recorded.launch(grid, given, stream)

    def at_once() -> None:
        for grid in GRIDS:
            ours.launch(grid, given, stream)

    return {"wp.launch": by_warp, "one by one": one_by_one, "at once": at_once}


def measure() -> dict[str, float]:
    """Microseconds of a launch."""
    quiet_warp()
    build = next(build for name, build in registered_kernels() if name.startswith("pair_kernel("))
    calls = ways(build())
    least = dict.fromkeys(calls, math.inf)
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(BURST):
                call()
            least[name] = min(least[name], time.perf_counter() - start)
    return {name: 1e6 * seconds / BURST / len(GRIDS) for name, seconds in least.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    found = measure()
    for name, microseconds in found.items():
        print(f"{name:12s} {microseconds:8.2f} µs")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main()
