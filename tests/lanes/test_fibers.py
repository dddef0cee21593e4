"""The fibers themselves: 32 lanes run, a lane that is missing is reported, and nothing changes for other launches."""

import inspect
import os
import shutil

import pytest
import torch
import warp as wp

from nvalchemiops._warp_internals import compiled_folder
from nvalchemiops.kernels.native import by_device, native_kernel
from nvalchemiops.kernels.simd import WARP
from nvalchemiops.torch.launch import launch
from tests.lanes.fibers import ORDERS, LaneError, Module, gpu_layout

RIGHT, GONE, ELSEWHERE, ONCE_MORE, HALF, BEYOND, BEFORE, READING, OTHERS = range(9)
"""What the lanes of the kernel below do."""

_TEXT = by_device(
    """
    double sum = 0.0;
    for (int k = 0; k < values.shape[1]; ++k) sum += values.data[row * values.shape[1] + k];
    sums.data[row] = sum;
    """,
    """
    const int lane = threadIdx.x & 31;
    double sum = 0.0;
    for (int k = lane; k < values.shape[1]; k += 32) sum += values.data[row * values.shape[1] + k];
    last.data[row] = lane;
    if (fault == 1 && lane == 7) return;
    if (fault == 2 && lane == 7) __syncwarp();
    if (fault == 5 && lane == 31) last.data[row + 1] = lane;
    if (fault == 8 && lane == 7) last.data[row + 1] = 100;
    if (fault == 6) sums.data[-1 - 8 * lane] = sum;
    if (fault == 7) sum += values.data[(row + 1) * values.shape[1] + lane];
    const unsigned all = fault == 4 ? 0xffffu : 0xffffffffu;
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(all, sum, step);
    for (int k = 0; k < (fault == 3 && lane == 31); ++k) __syncwarp();
    if (__popc(__ballot_sync(0xffffffffu, lane < 20)) != 20) sum = NAN;
    if (__shfl_sync(0xffffffffu, lane, 3) != 3 || __shfl_up_sync(0xffffffffu, lane, 2) != (lane < 2 ? lane : lane - 2)
        || __shfl_down_sync(0xffffffffu, lane, 3) != (lane > 28 ? lane : lane + 3)) sum = NAN;
    if (lane == 0) sums.data[row] = sum;
    """,
)


@native_kernel("lanes_of_the_tests", _TEXT, lanes=True)
def sum_of_rows(
    row: wp.int32,
    values: wp.array2d(dtype=wp.float64),
    fault: wp.int32,
    sums: wp.array(dtype=wp.float64),
    last: wp.array(dtype=wp.int32),
):
    """Sum of a row; and the lane that wrote last."""


ROUNDS = by_device(
    """
    double sum = 0.0;
    for (int k = 0; k <= row; ++k) sum += k;
    sums.data[row] = sum;
    """,
    """
    const int lane = threadIdx.x & 31;
    double sum = 0.0;
    for (int k = 0; k <= row; ++k) sum += __shfl_sync(0xffffffffu, lane == k % 32 ? 1.0 * k : 0.0, k % 32);
    if (lane == 0) sums.data[row] = sum;
    """,
)


@native_kernel("lanes_of_the_tests_rounds", ROUNDS, lanes=True)
def rounds(row: wp.int32, sums: wp.array(dtype=wp.float64)):
    """A warp meets once more than the one before."""


def run(fault=RIGHT, columns=65, rows=5):
    values = torch.rand(rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sums, last = torch.zeros(rows, dtype=torch.float64), torch.zeros(rows, dtype=torch.int32)
    launch(sum_of_rows, rows, [values, fault], [sums, last], lanes=WARP)
    return values.sum(1), sums, last


def test_warp_has_what_fibers_need():
    """Private parts, in `tests.lanes.fibers` alone: a method that makes the options of a module, and one of these."""
    parameters = inspect.signature(Module.resolve_options).parameters
    assert list(parameters) == ["self", "config", "block_dim"]
    options = Module("lanes_of_the_tests_options", None).resolve_options(wp.config, block_dim=64)
    assert options["block_dim"] == 64 and options["extra_cpu_preamble"] == ""
    assert wp.config.enable_cpu_blocks is False, "importing the library changes no settings"


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("columns", [0, 1, 31, 32, 33, 64, 65])
def test_lanes_share_a_row(order, columns):
    with gpu_layout(order) as launched:
        expected, found, last = run(columns=columns)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0.0)
    assert launched == {sum_of_rows}
    assert set(last.tolist()) == {ORDERS[order][-1]}, "the lane that ran last"


@pytest.mark.parametrize("block", [32, 64, 128])
def test_warps_of_a_block_are_independent(block):
    """Each meets as often as it likes, and the last block has as many warps as there are rows."""
    for rows in (1, 2, 3, 5, 8):
        sums = torch.zeros(rows, dtype=torch.float64)
        with gpu_layout("mixed", block):
            launch(rounds, rows, [], [sums], lanes=WARP)
        assert sums.tolist() == [row * (row + 1) / 2 for row in range(rows)]


@pytest.mark.parametrize("fault", [GONE, ELSEWHERE, ONCE_MORE, HALF])
@pytest.mark.parametrize("order", ORDERS)
def test_a_lane_that_is_missing_is_reported(fault, order):
    said = "a part of a warp" if fault == HALF else "did not take part"
    text = "__(shfl_xor_sync|syncwarp|ballot_sync)"
    with gpu_layout(order), pytest.raises(LaneError, match=f"lanes_of_the_tests.*{said}.*at line \\d+.*{text}"):
        run(fault)
    with gpu_layout(order):  # and forgotten
        assert torch.equal(run()[1], run()[1])


@pytest.mark.parametrize(("fault", "name"), [(BEYOND, "last"), (BEFORE, "sums")])
def test_a_write_beyond_an_array_is_reported(fault, name):
    """And changes nothing, neither there nor in the array."""
    memory = torch.zeros(3, 300, dtype=torch.float64)
    values, sums, last = torch.rand(5, 65, dtype=torch.float64), memory[1, :5], torch.zeros(6, dtype=torch.int32)
    with gpu_layout(), pytest.raises(LaneError, match=f"lanes_of_the_tests' writes beyond the memory of {name}$"):
        launch(sum_of_rows, 5, [values, fault], [sums, last[:5]], lanes=WARP)
    assert not memory.any() and not last.any()


def test_a_read_beyond_an_array_gives_nan():
    with gpu_layout():
        _, sums, _ = run(READING)
    assert sums[-1].isnan() and sums[:-1].isfinite().all()


def test_arrays_that_share_memory_still_do():
    memory = torch.arange(12, dtype=torch.float64)
    with gpu_layout(block=WARP):  # one warp after the other
        launch(
            sum_of_rows, 2, [memory[:6].view(2, 3), RIGHT], [memory[4:6], torch.zeros(2, dtype=torch.int32)], lanes=WARP
        )
    assert memory[4] == 3.0 and memory[5] == 3.0 + 3.0 + 5.0


def test_other_launches_stay_as_they_are():
    before = compiled_folder(sum_of_rows, 1)
    expected, found, last = run()
    with gpu_layout():
        assert compiled_folder(sum_of_rows, 1) == before
        run()
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0.0)
    assert torch.equal(run()[1], found) and not last.any()


def test_compiled_for_lanes_is_another_kernel():
    """Also from blocks on a CPU without the header, so that neither is taken for the other one in Warp's cache."""

    @native_kernel("lanes_of_the_tests_hashed", _TEXT, lanes=True)
    def plain(row: wp.int32, values: wp.array2d(dtype=wp.float64), fault: wp.int32, sums: wp.array(dtype=wp.float64)):
        """Never compiled."""

    names = {compiled_folder(plain, 64)}
    with gpu_layout():
        names |= {compiled_folder(plain, 32), compiled_folder(plain, 1)}
        assert compiled_folder(sum_of_rows, 32).name != compiled_folder(sum_of_rows, 1).name
    assert len(names) == 3


def test_what_the_header_does_not_know_is_not_built(capfd):
    @native_kernel("lanes_of_the_tests_unknown", by_device("", "__nanosleep(row);"), lanes=True)
    def unknown(row: wp.int32, sums: wp.array(dtype=wp.float64)):
        """Nothing that is known."""

    sums = torch.zeros(3, dtype=torch.float64)
    launch(unknown, 3, [], [sums], lanes=WARP)
    with gpu_layout(), pytest.raises(Exception, match="build failed"):
        launch(unknown, 3, [], [sums], lanes=WARP)
    assert "use of undeclared identifier '__nanosleep'" in capfd.readouterr().err
    for left_over in compiled_folder(unknown, 1).parent.glob(f"*lanes_of_the_tests_unknown_*_p{os.getpid()}_*"):
        shutil.rmtree(left_over)


def test_a_row_that_writes_to_another_is_found_in_backward_order():
    """There the other row comes first."""
    found = {}
    for order in ORDERS:
        with gpu_layout(order):
            last = torch.full((6,), -1, dtype=torch.int32)
            values = torch.ones(5, 65, dtype=torch.float64)
            launch(sum_of_rows, 5, [values, OTHERS], [torch.zeros(5, dtype=torch.float64), last], lanes=WARP)
            found[order] = last.tolist()
    assert found["forward"] != found["backward"] and found["forward"][1:5] != found["backward"][1:5]
