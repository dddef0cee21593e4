"""Faults that are put into kernels, to prove that the checker finds each: ``python -m tests.checker.seeded``.

Prints, for each fault, what was found. `CRASHES` end the process, or do not end it; one is put in if it is named.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import warp as wp

from nvalchemiops.interactions.pair import sum as pairs
from nvalchemiops.kernels import native
from nvalchemiops.kernels.fourier import gather
from nvalchemiops.kernels.native import native_kernel
from nvalchemiops.kernels.simd import WARP
from nvalchemiops.neighbors.search import search_neighbors
from nvalchemiops.torch.launch import launch
from nvalchemiops.torch.operators.fourier import fourier_gather
from tests.checker import programs
from tests.checker.launches import Fault
from tests.checker.session import checked
from tests.lanes import problems

TEXT = """
    const int lane = threadIdx.x & 31, n = values.shape[1];
    int count = 0;
    double sum = 0.0;
    for (int c = lane; c < n; c += 32) sum += values.data[row * n + c], ++count;
    for (int step = 16; step > 0; step /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, step);
    lanes.data[row * 32 + lane] = count;
    __syncwarp();
    if (lane == 0)
        sums.data[row] = sum + lanes.data[row * 32 + 31];
"""

SEEDED = {
    # what is replaced, by what; then the kind of fault, its line, the lane (None: any), and a part of the message
    "nothing": ("", "", None),
    "a lane that is not in the mask": (
        "0xffffffffu",
        "0x7fffffffu",
        ("wrong mask", "sum += __shfl_xor_sync(0x7fffffffu, sum, step);", 31, "leaves out"),
    ),
    "a value of a lane that is not in the mask": (
        "__shfl_xor_sync(0xffffffffu, sum, step)",
        "(lane < 16 ? __shfl_xor_sync(0x0000ffffu, sum, step) : 0.0)",
        ("wrong mask", "(lane < 16 ?", 0, "takes the value of lane 16"),
    ),
    "a lane that has returned": (
        "int count = 0;",
        "int count = 0; if (lane == 5) return;",
        ("missing lane", "sum += __shfl_xor_sync(0xffffffffu, sum, step);", 0, "lane 5, which has returned"),
    ),
    "lanes that wait at two places": (
        "__syncwarp();",
        "if (lane == 7) __shfl_sync(0xffffffffu, sum, 0);\n    else __syncwarp();",
        ("divergent lanes", "else __syncwarp();", 0, "lane 7"),
    ),
    "a read beyond the end, by one": (
        "c < n",
        "c <= n",
        ("out of bounds", "values.data[row * n + c]", 1, "reads 8 bytes at byte 1320 of the 1320 of `values`"),
    ),
    "a read before the beginning, by one": (
        "values.data[row * n + c]",
        "values.data[row * n + c - 1]",
        ("out of bounds", "values.data[row * n + c - 1]", 0, "reads 8 bytes at byte -8 of the 1320 of `values`"),
    ),
    "a write beyond the end, by one": (
        "sums.data[row] =",
        "sums.data[row + 1] =",
        ("out of bounds", "sums.data[row + 1]", 0, "writes 8 bytes at byte 40 of the 40 of `sums`"),
    ),
    "a write to an address of no array": (
        "sums.data[row] =",
        "*reinterpret_cast<double *>(64) =",
        ("out of bounds", "reinterpret_cast<double *>(64)", 0, "no array"),
    ),
    "all lanes write the result": (
        "if (lane == 0)",
        "if (lane >= 0)",
        ("race of lanes", "sums.data[row] =", 1, "lane 0"),
    ),
    "no barrier between a write and a read": (
        "    __syncwarp();\n",
        "",
        ("race of lanes", "lanes.data[row * 32 + lane] = count;", 31, "lane 0"),
    ),
    "a barrier of a half that does not suffice": (
        "    __syncwarp();\n",
        "    if (lane < 16) __syncwarp(0x0000ffffu);\n",
        ("race of lanes", "sums.data[row] = sum + lanes.data[row * 32 + 31];", 0, "lane 31"),
    ),
    "a barrier of a half that suffices": (
        "    __syncwarp();\n    if (lane == 0)\n        sums.data[row] = sum + lanes.data[row * 32 + 31];",
        "    if (lane < 16) __syncwarp(0x0000ffffu);\n"
        "    if (lane == 0) sums.data[row] = sum + lanes.data[row * 32 + 15];",
        None,
    ),
    "a shuffle instead of a barrier": (
        "__syncwarp();",
        "sum = __shfl_sync(0xffffffffu, sum, 0);",
        ("race of lanes", "sums.data[row] = sum + lanes.data[row * 32 + 31];", 0, "lane 31"),
    ),
    "two rows write one place": (
        "sums.data[row] =",
        "sums.data[row / 2] =",
        ("race of blocks", "sums.data[row / 2] =", 0, "warp 0, lane 0"),
    ),
    "a row reads what another writes": (
        "lanes.data[row * 32 + 31];",
        "lanes.data[(row + 1) % 5 * 32 + 31];",
        ("race of blocks", "lanes.data[row * 32 + lane] = count;", 31, "warp 0"),
    ),
    "a read of memory that nothing was written to": (
        "lanes.data[row * 32 + lane] = count;",
        "if (lane < 31) lanes.data[row * 32 + lane] = count;",
        ("uninitialised", "sums.data[row] = sum + lanes.data[row * 32 + 31];", 0, "of `lanes`"),
    ),
    "a local variable that is not assigned to": (
        "double sum = 0.0;",
        "double sum; if (n > 100) sum = 0.0;",
        ("uninitialised", "sums.data[row] =", 0, "element 0 of `sums`"),
    ),
    "a sum that depends on the order of lanes": (
        "    if (lane == 0)\n        sums.data[row] = sum + lanes.data[row * 32 + 31];",
        "    if (lane == 0) sums.data[row] = 0.0;\n    __syncwarp();\n"
        "    atomicAdd(sums.data + row, values.data[row * n + lane]);",
        ("order of lanes", "atomicAdd(sums.data", None, "of `sums` depends on the order of lanes"),
    ),
    "a variable that all threads share": (
        "int count = 0;",
        "static int count = 0;",
        ("out of bounds", "++count", 0, "memory that is only read"),
    ),
}

CRASHES = {
    "a trap": "__builtin_trap();",
    "no end": 'while (row >= 0) asm volatile("");',
    "an unknown function": "__nanosleep(1);",
}


def run(name: str, text: str) -> dict[str, Any] | None:
    """What is found in a launch of this kernel over five rows of 33 numbers."""

    @native_kernel(f"seeded_{name}".replace(" ", "_").replace(",", ""), text, lanes=True)
    def kernel(
        row: wp.int32,
        values: wp.array2d(dtype=wp.float64),
        lanes: wp.array(dtype=wp.int32),
        sums: wp.array(dtype=wp.float64),
    ):
        """Sum of a row, and the numbers of terms of its lanes."""

    values = torch.linspace(0.0, 1.0, 5 * 33, dtype=torch.float64).view(5, 33)
    with checked() as done:
        lanes, sums = torch.empty(5 * 32, dtype=torch.int32), torch.empty(5, dtype=torch.float64)
        if "nothing was written" not in name:
            lanes.zero_()  # or what is read too early is found first
        try:
            launch(kernel, 5, [values], [lanes, sums], lanes=WARP)
        except Fault as fault:
            return fault.report()
    assert len(done) == 1
    torch.testing.assert_close(sums, values.sum(1) + 1.0)
    return None


# -- in kernels of the library ----------------------------------------------------------------------


def _pairs(bad: int | None = None) -> None:
    problems.pair_sums(next(v for v in pairs._EWALD if v.request.outputs == "wrv"), bad)()


LIBRARY = {
    # what makes the kernel, what runs it, what is replaced, by what; then the kind of fault, its line, and its lane
    "pairs: a lane that is not in the mask": (
        (pairs.pair_kernel, _pairs, "0xffffffffu, sum, step", "0x7fffffffu, sum, step"),
        ("wrong mask", "__shfl_xor_sync(0x7fffffffu, sum, step)", 31),
    ),
    "pairs: all lanes write results": (
        (pairs.pair_kernel, _pairs, "if (lane > 0) return;", ""),
        ("race of lanes", "energies.data[i] =", 1),
    ),
    "pairs: rows write one place": (
        (pairs.pair_kernel, _pairs, "energies.data[i] =", "energies.data[i / 2] ="),
        ("race of blocks", "energies.data[i / 2] =", 0),
    ),
    "pairs: an atom that does not exist": (
        (pairs.pair_kernel, partial(_pairs, problems.Rows.n_atoms), "it.j >= 0 && it.j < n_atoms", "it.j >= 0"),
        ("out of bounds", "d[a] = exact(x_j[a]) - x_i[a];", None),
    ),
    "search: more neighbors than there is room for": (
        (search_neighbors, partial(programs.rebuilt_search, 9), "if (hit && slot < room)", "if (hit)"),
        ("race of blocks", "index.data[start + slot] =", None),
    ),
    "search: all lanes fill the rest of a row": (
        (search_neighbors, programs.rebuilt_search, "found, lane, 32);", "found, 0, 1);"),
        ("race of lanes", "index.data[r.start + slot] = fill_value;", 1),
    ),
    "Fourier sums: two atoms have one place": (
        (gather.fourier_gather, problems.fourier(fourier_gather, 1), "n_atoms + atom)", "n_atoms + atom / 2)"),
        ("race of lanes", "of_atom[c] =", 1),
    ),
}


def run_in_library(factory: Any, program: Callable[[], None], old: str, new: str) -> dict[str, Any] | None:
    """What is found in a program that launches a kernel whose text was changed."""
    original, changes = wp.func_native, []

    def changed(text: str, *arguments: Any) -> Any:
        changes.append(old in text)
        return original(text.replace(old, new), *arguments)

    factory.cache_clear()
    try:
        with (
            mock.patch.object(wp, "func_native", changed),
            mock.patch.object(native, "kernel_module", lambda name: wp.get_module(f"seeded_{name}_{len(new)}")),
            checked(),
        ):
            program()
    except Fault as fault:
        return fault.report()
    finally:
        factory.cache_clear()
    assert any(changes), f"the text of the kernel no longer has {old!r}"
    return None


def main() -> None:
    """Put one fault after the other, or the one that is named, into the kernel, and print what was found."""
    wp.config.quiet = True
    found = {}
    for name, change in CRASHES.items() if sys.argv[1:] else SEEDED.items():
        if not sys.argv[1:]:
            assert change[0] in TEXT
            found[name] = run(name, TEXT.replace(change[0], change[1]) if change[0] else TEXT)
        elif name == sys.argv[1]:
            run(name, change + TEXT)
    if not sys.argv[1:]:
        found |= {name: run_in_library(*change) for name, (change, _) in LIBRARY.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
