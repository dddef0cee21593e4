"""The launch helper: what a launch costs, and how a gather-only kernel scales over CPU threads.

The kernel sums a function over rows (compute-bound), and copies (bandwidth-bound); beside them the plain
``wp.launch`` on the same arrays, and, for the copy, torch's own ``copy_`` on the same number of threads as the floor.
Run: ``python benchmarks/launch_scaling.py``.
"""

import os
import statistics
import time
from collections.abc import Callable

import torch
import warp as wp

from nvalchemiops._warp import quiet_warp
from nvalchemiops.launch import gather_only
from nvalchemiops.torch.launch import launch

ROWS, COLUMNS = 100_000, 64


@gather_only
@wp.kernel(enable_backward=False)
def row_sums(offset: wp.int32, x: wp.array2d(dtype=wp.float32), y: wp.array(dtype=wp.float64)):
    i = offset + wp.tid()
    total = wp.float64(0.0)
    for k in range(x.shape[1]):
        total += wp.float64(wp.exp(-x[i, k] * x[i, k]))
    y[i] = total


@gather_only
@wp.kernel(enable_backward=False)
def copy(offset: wp.int32, x: wp.array(dtype=wp.vec3d), y: wp.array(dtype=wp.vec3d)):
    i = offset + wp.tid()
    y[i] = x[i]


def milliseconds(function: Callable[[], object], rounds: int = 15) -> float:
    function()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        function()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def main() -> None:
    quiet_warp()
    x, y = torch.rand(ROWS, COLUMNS), torch.empty(ROWS, dtype=torch.float64)
    a = torch.rand(40 * ROWS, 3, dtype=torch.float64)
    b = torch.empty_like(a)
    plain = [wp.from_torch(t) for t in (x, y)]
    print(f"torch {torch.__version__}, warp {wp.config.version}, {os.cpu_count()} cores")
    print(f"\n{'threads':10s}{'row sums':>12s}{'over wp.launch':>16s}{'copy':>12s}{'over torch copy_':>18s}")
    whole = milliseconds(lambda: wp.launch(row_sums, ROWS, [0, *plain], device="cpu"))
    for threads in [1, *range(2, (os.cpu_count() or 1) + 1)]:
        torch.set_num_threads(threads)
        sums = milliseconds(lambda: launch(row_sums, ROWS, [x], [y]))
        copied = milliseconds(lambda: launch(copy, a.shape[0], [a], [b]))
        floor = milliseconds(lambda: b.copy_(a))
        print(f"{threads:<10d}{sums:9.2f} ms{whole / sums:15.2f}x{copied:9.2f} ms{copied / floor:17.2f}x")
    print(f"\nplain wp.launch of the row sums, one thread: {whole:.2f} ms")
    for rows in (256, 511, 512, 1024, 4096):
        few, out = x[:rows, :8].contiguous(), y[:rows]

        def hundred(few: torch.Tensor = few, out: torch.Tensor = out, rows: int = rows) -> None:
            for _ in range(100):
                launch(row_sums, rows, [few], [out])

        each = []
        for threads in (2, 1):
            torch.set_num_threads(threads)
            each.append(1e3 * milliseconds(hundred) / 100)
        print(f"{rows:6d} rows of 8: {each[1]:7.1f} us on 1 thread, {each[0]:7.1f} us on 2")


if __name__ == "__main__":
    main()
