"""The launch helper: the same bits however a launch is split, nothing split that must not be, fork, lanes."""

import os
import textwrap
import threading
import time
from typing import Any

import pytest
import torch
import warp as wp

from nvalchemiops import launch as core
from nvalchemiops import loading
from nvalchemiops import threads as shared
from nvalchemiops.layout import CPU, GPU, layout, replaced_layout
from nvalchemiops.torch.launch import describe, launch, launch_adjoint
from tests.support.mistakes import assert_named
from tests.support.processes import in_threads, output_of, run_python


@core.gather_only
@wp.kernel(enable_backward=False)
def row_sum(
    offset: wp.int32, x: wp.array2d(dtype=wp.float32), y: wp.array(dtype=wp.float64), where: wp.array(dtype=wp.int32)
):
    i = offset + wp.tid()
    total = wp.float64(0.0)
    for k in range(x.shape[1]):
        total += wp.sin(wp.float64(x[i, k])) * wp.float64(i + k)
    y[i] = total
    where[i] = offset


@wp.kernel
def scatter(x: wp.array(dtype=wp.float64), index: wp.array(dtype=wp.int32), total: wp.array(dtype=wp.float64)):
    i = wp.tid()
    wp.atomic_add(total, index[i], x[i] * x[i])


@core.gather_only
@wp.kernel(enable_backward=False)
def lane_sum(offset: wp.int32, x: wp.array2d(dtype=wp.float64), y: wp.array(dtype=wp.float64)):
    row, lane = wp.tid()
    i = offset + row
    total = wp.float64(0.0)
    if lane == 0:
        for k in range(x.shape[1]):
            total += x[i, k]
        y[i] = total


@wp.kernel(enable_backward=False)
def scaled(vectors: wp.array(dtype=wp.vec3d), factor: wp.float64):
    i = wp.tid()
    vectors[i] *= factor


@wp.kernel(enable_backward=False)
def doubled(x: wp.array(dtype=Any), y: wp.array(dtype=Any)):
    i = wp.tid()
    y[i] = x[i] + x[i]


def run_row_sum(x):
    y, where = torch.empty(x.shape[0], dtype=torch.float64), torch.empty(x.shape[0], dtype=torch.int32)
    launch(row_sum, x.shape[0], [x], [y, where])
    return y, where


@pytest.mark.parametrize("rows", [0, 1, 2, 5, 1_000, 5_003])
def test_same_bits_at_any_number_of_threads(rows, threads, always_split):
    x = torch.rand(rows, 7)
    threads(2)
    run_row_sum(torch.rand(100, 7))
    found = {}
    for n in (1, 2, 3, 4):
        threads(n)
        found[n], where = run_row_sum(x)
        assert len(where.unique()) == (min(rows, 1) if n == 1 else min(rows, core.PIECES * n))
    assert all(torch.equal(found[1], y) for y in found.values())
    i = torch.arange(rows)[:, None] + torch.arange(7)
    torch.testing.assert_close(found[1], (torch.sin(x.double()) * i).sum(1))


def test_small_launches_stay_whole_and_large_ones_are_split(threads, not_crowded, monkeypatch):
    threads(2)
    with monkeypatch.context() as patch:
        # compiling the kernel counts for its first launch, and a busy machine may halt any: neither takes so long
        patch.setattr(core, "MINIMUM_CHUNK", 1e3)
        for _ in range(3):
            assert len(run_row_sum(torch.rand(20, 3))[1].unique()) == 1
    large = torch.rand(200_000, 20)  # tens of milliseconds
    run_row_sum(large)
    assert len(run_row_sum(large)[1].unique()) == 2 * core.PIECES


def test_a_prepared_launch_is_the_same_launch(threads, not_crowded, monkeypatch):
    """Whole where it is short; split, and with other arguments, where it has become long."""
    threads(2)
    x = torch.rand(50, 3)
    monkeypatch.setattr(core, "MINIMUM_CHUNK", 1e3)
    for _ in range(3):
        expected = run_row_sum(x)
    y, where = (torch.zeros_like(t) for t in expected)
    arguments = describe(row_sum, [x, y, where])[1]
    run = core.prepared(row_sum, 50, device=wp.get_device("cpu"), lanes=0, kind=None)
    for _ in range(2 * core.MEASURED):
        run(arguments)
        assert torch.equal(y, expected[0]) and len(where.unique()) == 1
        y.zero_()
    other, z = torch.rand(50, 3), torch.zeros_like(y)
    run(describe(row_sum, [other, z, where])[1])
    assert torch.equal(z, run_row_sum(other)[0]) and not y.any()
    monkeypatch.setattr(core, "MINIMUM_CHUNK", 1e-15)
    run(arguments)
    assert torch.equal(y, expected[0]) and len(where.unique()) == 2 * core.PIECES


def test_the_number_of_threads_is_torchs(threads, always_split):
    for n in (1, 2, 3):
        threads(n)
        assert core.thread_count() == n
        run_row_sum(torch.rand(1_000, 3))
        assert len(run_row_sum(torch.rand(1_000, 3))[1].unique()) == (1 if n == 1 else core.PIECES * n)


def test_several_threads_share_the_pieces(threads, always_split, monkeypatch):
    """And a thread that wakes up late gets none, instead of making the others wait."""
    threads(2)
    run_row_sum(torch.rand(100, 3))
    monkeypatch.setattr(shared, "_openmp", None)  # on the pool
    original, takers = core._launch_recorded, []

    def slowly(*arguments):
        takers.append(threading.get_ident())
        time.sleep(0.01)
        original(*arguments)

    monkeypatch.setattr(core, "_launch_recorded", slowly)
    run_row_sum(torch.rand(4_000, 3))
    assert len(takers) == 2 * core.PIECES and len(set(takers)) == 2
    monkeypatch.setattr(core, "_launch_recorded", original)
    pool, awake = shared.pool(1), threading.Event()
    asleep = [pool.submit(awake.wait, 60.0) for _ in range(pool._max_workers)]
    run_row_sum(torch.rand(4_000, 3))
    assert not any(task.done() for task in asleep), "the launch waited for a thread that had not begun"
    awake.set()
    assert all(task.result() for task in asleep)


def test_scattering_kernels_are_never_split(threads):
    threads(4)
    x, index = torch.rand(20_000, dtype=torch.float64), torch.zeros(20_000, dtype=torch.int32)
    for _ in range(5):
        total = torch.zeros(1, dtype=torch.float64)
        launch(scatter, 20_000, [x, index], [total])
        assert total.item() == pytest.approx(x.pow(2).sum().item(), rel=1e-12), "an atomic was lost"


def test_adjoints_are_never_split(threads):
    threads(4)
    x, index = torch.rand(20_000, dtype=torch.float64), torch.zeros(20_000, dtype=torch.int32)
    total, gradient = torch.zeros(1, dtype=torch.float64), torch.zeros_like(x)
    launch_adjoint(scatter, 20_000, [x, index, total], [gradient, None, torch.ones(1, dtype=torch.float64)])
    torch.testing.assert_close(gradient, 2 * x)


def test_launches_under_a_tape_are_whole_and_recorded(threads):
    threads(4)
    x = wp.from_torch(torch.rand(5_000, dtype=torch.float64), requires_grad=True)
    total = wp.zeros(1, dtype=wp.float64, requires_grad=True, device="cpu")
    index = wp.zeros(5_000, dtype=wp.int32, device="cpu")
    with core.record() as tape:
        core.launch(scatter, 5_000, [x, index], [total], device="cpu")
    assert len(tape.launches) == 1
    total.grad.fill_(1.0)
    tape.backward()
    torch.testing.assert_close(wp.to_torch(x.grad), 2 * wp.to_torch(x).detach())


def test_one_lane_on_the_cpu():
    x, y = torch.rand(700, 37, dtype=torch.float64), torch.empty(700, dtype=torch.float64)
    launch(lane_sum, 700, [x], [y], lanes=32)
    torch.testing.assert_close(y, x.sum(1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int16], ids=str)
def test_a_generic_kernel_takes_what_it_is_given(dtype):
    """Also with strides, and without elements."""
    for x in (torch.arange(7).to(dtype), torch.arange(7).to(dtype)[::2], torch.arange(0).to(dtype)):
        y = torch.empty_like(x)
        launch(doubled, x.shape[0], [x], [y])
        assert torch.equal(y, 2 * x)


def test_the_layout_of_a_launch_is_decided_in_one_place_and_can_be_replaced():
    x, y = torch.rand(3, 37, dtype=torch.float64), torch.empty(3, dtype=torch.float64)
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "_launch_recorded", lambda *call: seen.append((call[3], call[4])))
        launch(lane_sum, 3, [x], [y], lanes=32)
        with replaced_layout("cpu", GPU):
            assert layout("cpu") is layout("cuda")
            launch(lane_sum, 3, [x], [y], lanes=32)
            run_row_sum(x.float())
    assert seen == [(None, (3, 1)), (64, (3, 32)), (64, (3,))]
    assert layout("cpu") is CPU


def test_declarations_that_promise_too_much():
    @wp.kernel(enable_backward=False)
    def no_offset(x: wp.array(dtype=wp.float64)):
        x[wp.tid()] = wp.float64(0.0)

    @wp.kernel
    def with_adjoint(offset: wp.int32, x: wp.array(dtype=wp.float64)):
        x[offset + wp.tid()] = wp.float64(0.0)

    with pytest.raises(TypeError, match="offset"):
        core.gather_only(no_offset)
    with pytest.raises(TypeError, match="enable_backward=False"):
        core.gather_only(with_adjoint)


def test_arguments_that_do_not_fit_the_kernel():
    x, index, vectors = torch.ones(6).double(), torch.zeros(6, dtype=torch.int32), torch.ones(2, 3).double()
    mistakes = [
        (scatter, [x, index], TypeError, "takes 3 arguments, got 2"),
        (row_sum, [vectors.float(), x], TypeError, "takes 3 arguments, got 2"),
        (scatter, [x.float(), index, x], TypeError, "`x`: expected dtype torch.float64, got torch.float32"),
        (scatter, [x[:, None], index, x], ValueError, r"`x`: expected 1 array dimensions, got shape \(6, 1\)"),
        (scatter, [x, index, x.to("meta")], ValueError, "`total` is on meta, but other arguments are on cpu"),
        (scatter, [None, None, None], TypeError, "no tensor, so its device is unknown"),
        (scaled, [x, 2.0], ValueError, r"`vectors`: .*must end in \(3,\)"),
        (scaled, [vectors.T.contiguous().T, 2.0], ValueError, r"`vectors`: .*contiguous\(\)"),
        (scaled, [vectors, x], TypeError, "`factor`: the kernel expects a plain value here"),
        (doubled, [x.to(torch.complex128), x], TypeError, "`x`: dtype torch.complex128 has no Warp scalar type"),
    ]
    assert_named(
        (text, lambda k=kernel, a=given: launch(k, 2, a), error, text) for kernel, given, error, text in mistakes
    )


def test_launch_commands_keep_no_memory_alive():
    import gc
    import weakref

    x = torch.rand(2_000, 5)
    run_row_sum(x)
    storage = weakref.ref(x.untyped_storage())
    del x
    gc.collect()
    assert storage() is None


def test_errors_in_a_chunk_reach_the_caller(threads, always_split, monkeypatch):
    threads(2)
    run_row_sum(torch.rand(100, 3))
    original = core._launch_recorded

    def fails(kernel, device, stream, block, grid, arguments):
        if arguments[0] != 0:
            raise ArithmeticError("on purpose")
        original(kernel, device, stream, block, grid, arguments)

    monkeypatch.setattr(core, "_launch_recorded", fails)
    with pytest.raises(ArithmeticError):
        run_row_sum(torch.rand(4_000, 3))


def test_many_threads_launch_at_once(threads, always_split):
    threads(2)
    inputs = [torch.rand(3_000, 5) for _ in range(6)]
    expected = [run_row_sum(x)[0] for x in inputs]

    def work(k):
        return all(torch.equal(run_row_sum(inputs[k])[0], expected[k]) for _ in range(20))

    assert all(in_threads(work, range(6)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_launches_on_threads_of_its_own():
    script = textwrap.dedent(
        """
        import os, sys, threading
        import torch
        from tests.routes.test_launch import run_row_sum
        from nvalchemiops import launch as core
        import warp as wp

        torch.set_num_threads(2)
        core.MINIMUM_CHUNK = 1e-15
        x = torch.rand(5_000, 5)
        run_row_sum(x)
        expected, where = run_row_sum(x)
        assert len(where.unique()) == 2 * core.PIECES
        entered, leave = threading.Event(), threading.Event()

        def recorder():  # another thread records while we fork
            with core.record():
                entered.set()
                leave.wait(60)

        thread = threading.Thread(target=recorder)
        thread.start()
        entered.wait(60)
        child = os.fork()
        if child == 0:
            found, where = run_row_sum(x)
            with core.record() as tape, wp.ScopedDevice("cpu"):
                pass
            with wp.Tape():
                pass
            os._exit(0 if torch.equal(found, expected) and len(where.unique()) == 2 * core.PIECES else 1)
        _, status = os.waitpid(child, 0)
        leave.set()
        thread.join()
        sys.exit(os.waitstatus_to_exitcode(status))
        """
    )
    output_of(run_python(script))


def test_kernel_variants_are_cached_and_listed():
    before = core.registered_kernels()

    @core.kernel_variants(("float32",), ("float64",))
    def factory(precision):
        @wp.kernel(module=core.kernel_module(f"variants_{precision}"))
        def nothing(x: wp.array(dtype=wp.float32)):
            pass

        return nothing

    try:
        assert factory("float32") is factory("float32") is not factory("float64")
        added = core.registered_kernels()[len(before) :]
        assert [name for name, _ in added] == ["factory(float32)", "factory(float64)"]
        assert added[0][1]() is factory("float32")
        assert "1_0_0" in factory("float32").module.name, "the cache folder carries the library's version"
    finally:
        del loading._registered[len(before) :]
