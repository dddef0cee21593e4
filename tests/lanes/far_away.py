"""Launches as if they were of two billion rows: ``python -m tests.lanes.far_away`` (see `tests.lanes.test_far_away`).

A kernel finds its data by products of indices, which need 64 bits in large systems. Here the arrays of a small launch
begin so far before their memory that the numbers of its atoms, slots, points or systems are close to 2³¹: addresses
are moved down by `FAR` rows, and what holds numbers of rows holds those increased by `FAR`. A kernel that computes
addresses right reads and writes the same memory as without, and its results have the same bits. One that does not reads
elsewhere, and most likely crashes, so each launch is made in a process of its own.
"""

import contextlib
import ctypes
import functools
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
import warp as wp

from nvalchemiops import launch as core
from nvalchemiops._warp_internals import descriptor_type, parameters
from nvalchemiops.kernels.mesh.gather import lanes_of_atom
from nvalchemiops.kernels.simd import LANES, WARP
from nvalchemiops.layout import layout

MOST = 2**20
"""More than there are rows."""

FAR = 2**31 - MOST
"""By how much numbers of rows are increased; a multiple of the rows of any thread."""

ABSENT = 2**30
"""Numbers from here on are increased ones."""

# What becomes of an array: its rows are moved (r), or its columns (c; k: those of coordinates, whose rows stay as far
# apart); numbers of rows in it are increased (v), or the first of each four numbers (f); it begins `width` times as far
# before (w). A plain number is increased (v).
_OF_ATOMS = dict.fromkeys(
    (
        *("positions", "parameters", "row_parameters", "weights", "moments", "row_moments", "batch_idx", "system"),
        *("systems", "shifts", "shift", "species", "excluded_begin", "energies", "position_gradients"),
        *("parameter_gradients", "gathered", "sums", "coefficients", "coefficient_gradients", "system_sums"),
        *("balance", "reach", "squares", "vectors"),
    ),
    "r",
)
_PAIRS = _OF_ATOMS | dict.fromkeys(("row_begin", "first", "neighbors", "index", "second"), "rv")
_PAIRS |= {"excluded": "v", "padding": "v"}
_PAIRS |= dict.fromkeys(("direction_positions", "direction_parameters", "direction_weights"), "c")

MOVED: dict[str, dict[str, str]] = {
    "pair_sum": _PAIRS,
    "pair_moments": _PAIRS,
    "three_body": _PAIRS,
    "measure_pairs": _PAIRS,
    "inspect_rows": _PAIRS | {"fault": "r"},
    "d3_coefficients": {"coordination": "r", "row": "rv", "references": "r", "places": "rv", "vectors": "r"}
    | {"values": "r", "derivatives": "r"},
    "neighbor_search": {"coordinates": "k", "entry": "rf", "begin": "v", "system": "r", "target": "rv"}
    | {"row_begin": "rv", "count": "r", "index": "wv", "first": "wv", "shifts": "w", "fill_value": "v"},
    "locate_atoms": {"positions": "r", "system": "r", "first_atom": "v", "slot": "r"},
    "place_atoms": {"positions": "r", "system": "r", "order": "rv", "coordinates": "k", "entry": "rf"},
    "find_columns": {"coordinates": "r", "batch_idx": "r", "column": "r"},
    "spline_stencils": {"coordinates": "r", "order": "rv", "weights": "r"}
    | dict.fromkeys(("first_y", "first_z", "in_tile", "moments"), "r"),
    "spline_spread": {"column_begin": "v"}
    | dict.fromkeys(("moments", "first_y", "first_z", "in_tile", "weights"), "r"),
    "spline_gather": {"coordinates": "r", "batch_idx": "r", "order": "rv", "moments": "r"},
    "sum_rows": {"values": "r", "order": "rv", "begin": "rv", "sums": "r"},
    "normal_numbers": {"systems": "r", "places": "r", "values": "r"},
    "nose_hoover_chains": dict.fromkeys(
        (
            *("positions", "velocities", "energies", "targets", "temperatures", "masses", "times"),
            *("moved", "pushed", "log_scales"),
        ),
        "r",
    ),
    "shortest_vectors": {"cell": "r", "basis": "r"},
    "fourier_spread": {
        "moments": "r",
        "coordinates": "r",
        "order": "v",
        "points": "r",
        "point_begin": "v",
        "field": "c",
    },
    "fourier_gather": {"moments": "r", "coordinates": "r", "order": "v"},
}
"""What is moved in the launches of a kernel, by the beginning of its name and the names of its parameters."""

IN_PLACE = ("spline_spread", "fourier_gather")
"""Kernels whose rows are not those that are far away."""

SPLINE_ORDER = 4
"""That of the launches."""

GROUPED = {"spline_stencils": WARP, "spline_gather": WARP // lanes_of_atom(SPLINE_ORDER)}
"""Kernels with several rows for a thread of a CPU, and so many for a warp."""


def _is_movable(name: str, given: dict[str, Any]) -> bool:
    """Whether what a launch is given can be moved; other launches of this kernel can."""
    n_rows = {label: array.shape[0] for label, array in given.items() if hasattr(array, "shape")}
    if any(n > 1 for label, n in n_rows.items() if MOVED[name].get(label) == "c"):
        return False  # what follows the first row of columns is even farther away
    if name in ("pair_sum", "pair_moments", "three_body", "inspect_rows"):
        return n_rows["row_begin"] > 0  # the slots of a matrix have numbers of 32 bits
    if name == "measure_pairs":
        return not given["width"] and not n_rows["target"]
    if name == "sum_rows":
        return n_rows["begin"] > 0 and not given["by_block"] and not given["level"]
    if name == "normal_numbers":
        return n_rows["places"] > 0 and n_rows["systems"] > 0
    if name.startswith("fourier"):
        return layout("cpu").warps and given.get("slices", 1) == 1 and n_rows["order"] > 0
    return True


def _first_row(name: str, given: dict[str, Any]) -> int:
    """The number that is added to those of threads."""
    if name in IN_PLACE:
        return 0
    each = 1
    if name in GROUPED:
        each = GROUPED[name] if layout("cpu").warps else LANES
    each *= given.get("rows_per_thread", 1) * given.get("slots_per_thread", 1)
    assert FAR % each == 0
    return FAR // each


def _numbers(array: Any, n_rows: int) -> np.ndarray:
    """The int32 numbers in an array without gaps."""
    count = n_rows * array.strides[0] // 4
    return np.ctypeslib.as_array((ctypes.c_int32 * count).from_address(array.data))


def _move(how: str, array: Any, width: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Move an array; returns its numbers and increased ones that a kernel gets instead, if it holds any."""
    n_rows = array.shape[0]
    if n_rows == 0 or not array.data:
        return None
    pair = None
    if "v" in how or "f" in how:
        own = _numbers(array, n_rows)
        other = own.copy()
        part = other[:: 4 if "f" in how else 1]
        part[(part >= 0) & (part < MOST)] += FAR
        array.data = other.ctypes.data
        pair = own, other
    step = array.strides[{"c": 1, "k": 1}.get(how, 0)]
    times = max(width, 1) if "w" in how else 1
    if how != "v" and how != "f":
        array.data = (array.data - times * FAR * step) % 2**64
    if how == "k":
        array.strides[0] = 1  # of so many atoms it does not fit into 32 bits, and is not what it should be
    elif how == "c":
        array.shape[1] += FAR
    elif "r" in how:
        array.shape[0] += FAR
    return pair


@contextlib.contextmanager
def far_away(left: Sequence[str] = ()) -> Iterator[set[str]]:
    """Launches on the CPU have far arrays, if they can be moved. Yields the names of kernels that were launched so.

    The kernels in ``left`` are launched as they are.
    """
    launch = core._launch_recorded
    done: set[str] = set()
    kind = descriptor_type()

    def moved(kernel: wp.Kernel, device: Any, stream: Any, block: Any, grid: Any, arguments: list[Any]) -> None:
        name = next((name for name in MOVED if kernel.key.startswith(name)), "")
        labels = [p.label for p in parameters(kernel)]
        arrays = [kind.from_buffer_copy(a) if type(a) is bytes else a for a in arguments]
        given = dict(zip(labels, arrays, strict=True))
        if not name or name in left or not _is_movable(name, given):
            launch(kernel, device, stream, block, grid, arguments)
            return
        rest: list[Any] = []
        changed: list[tuple[str, np.ndarray, np.ndarray]] = []
        width = given.get("width", 0)
        for label, value in list(given.items())[1:]:
            how = MOVED[name].get(label, "")
            if isinstance(value, kind) and how:
                pair = _move(how, value, width)
                changed += [] if pair is None else [(how, *pair)]
            elif how == "v" and 0 <= value < MOST:
                value += FAR
            rest.append(bytes(value) if isinstance(value, kind) else value)
        launch(kernel, device, stream, block, grid, [arguments[0] + _first_row(name, given), *rest])
        for how, own, other in changed:
            part = other[:: 4 if "f" in how else 1]
            part[part >= ABSENT] -= FAR
            own[:] = other
        done.add(name)

    with mock.patch.object(core, "_launch_recorded", moved):
        yield done


def compared(problem: Callable[[], list[torch.Tensor]], gpu: bool, left: Sequence[str]) -> dict[str, Any]:
    """Which kernels were launched far away, and whether their results are those of launches that were not moved."""
    from tests.lanes.fibers import gpu_layout

    with gpu_layout(margins=False) if gpu else contextlib.nullcontext():
        expected = [result.clone() for result in problem()]
        with far_away(left) as done:
            found = problem()
    same = all(torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5)) for a, b in zip(found, expected, strict=True))
    return {"kernels": sorted(done), "same": same}


def in_a_fork(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``work()`` returns in a process of its own; or by which signal it has ended."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with os.fdopen(writing, "w") as pipe:
            try:
                said = work()
            except BaseException as error:  # told to the parent
                said = {"kernels": [], "same": False, "error": f"{type(error).__name__}: {error}"}
            json.dump(said, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return {"kernels": [], "same": False, "error": signal.Signals(os.WTERMSIG(status)).name}
    return json.loads(text)


def main() -> None:
    """Print what was found for each problem, with both layouts, as one line of JSON."""
    from tests.lanes.test_far_away import GPU_ONLY, LEFT, PROBLEMS

    torch.set_num_threads(1)
    wp.init()  # before the forks
    chosen = sys.argv[1:] or PROBLEMS
    found: dict[str, Any] = {}
    for name, way in itertools.product(chosen, ("gpu", "cpu")):
        if way == "cpu" and name in GPU_ONLY:
            continue
        work = functools.partial(compared, PROBLEMS[name](), way == "gpu", LEFT.get(name, ()))
        found[f"{name} {way}"] = in_a_fork(work)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
