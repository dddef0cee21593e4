"""On a GPU: torch's stream, torch's memory, no synchronisation, graph capture. Skipped where there is none."""

import gc
from typing import Any

import pytest
import torch
import warp as wp

from nvalchemiops.torch.autograd import live_recordings, warp_stream_from_torch
from nvalchemiops.torch.kernel import differentiable_kernel
from nvalchemiops.torch.launch import launch
from nvalchemiops.torch.operators.segments import system_sums
from tests.derivatives.test_kernel_functions import PRODUCT
from tests.support.gpu import captured, waiting_is_an_error
from tests.support.ops import (
    OPS,
    cube,
    cube_reference,
    gradients,
    product_kernel,
    square_and_cube,
    weighted_square,
)

pytestmark = pytest.mark.gpu


def inputs(n=4_096):
    x, w = (torch.rand(n, dtype=torch.float64, device="cuda") + 0.5 for _ in range(2))
    return x.requires_grad_(), w.requires_grad_()


@OPS
def test_equals_the_cpu(op, reference):
    x, w = inputs()
    torch.testing.assert_close(op(x, w).cpu(), op(x.cpu(), w.cpu()))
    torch.testing.assert_close(gradients(op, x, w), gradients(reference, x, w))
    compiled = torch.compile(lambda x, w: op(torch.sin(x), w), fullgraph=True)
    torch.testing.assert_close(gradients(compiled, x, w), gradients(lambda x, w: reference(torch.sin(x), w), x, w))


@OPS
def test_r01_side_stream_with_a_slow_producer_and_memory_used_again(op, reference):
    side = torch.cuda.Stream()
    base = torch.rand(20_000, dtype=torch.float64, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for round in range(200):
            torch.cuda._sleep(200_000)
            x = (base + round).requires_grad_()  # produced late, on this stream
            w = (base * 0.5).requires_grad_()
            gx, gw = gradients(op, x, w)
            expected = gradients(reference, x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_())
            del x, w
            torch.full_like(base, float("nan"))  # takes the memory of the inputs at once
            assert torch.allclose(gx, expected[0]) and torch.allclose(gw, expected[1])


def test_r01_binding_does_not_wait_for_unrelated_warp_work():
    device = torch.device("cuda", 0)
    with warp_stream_from_torch(device) as outer:
        assert outer.cuda_stream == torch.cuda.current_stream().cuda_stream
        side = torch.cuda.Stream()
        with torch.cuda.stream(side), warp_stream_from_torch(device) as inner:
            assert inner.cuda_stream == side.cuda_stream == wp.get_stream("cuda:0").cuda_stream
        assert wp.get_stream("cuda:0").cuda_stream == outer.cuda_stream


@OPS
def test_r02_no_synchronisation(op, reference):
    x, w = inputs()
    gradients(op, x, w)
    with waiting_is_an_error():
        for _ in range(10):
            gradients(op, x, w)
            square_and_cube(x, w)


def test_r03_graph_capture_of_an_explicit_op_and_its_backward():
    x, w = inputs()
    op = differentiable_kernel(product_kernel).op(PRODUCT)

    def step(x, w):
        return torch.autograd.grad((cube(x, w) * op(w, x)).sum(), (x, w))

    graph, found = captured(lambda: step(x, w))
    for round in range(100):
        with torch.no_grad():
            x.copy_(torch.rand_like(x) + round)
        graph.replay()
        torch.testing.assert_close(found, step(x, w))


def test_r03_reduce_overhead_mode_with_integer_indices():
    x, w = inputs()
    index = torch.randperm(x.numel(), device="cuda")

    def loss(x, w, index):
        return cube(x[index], w).sum()

    compiled = torch.compile(loss, fullgraph=True, mode="reduce-overhead")
    for _ in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        found = torch.autograd.grad(compiled(x, w, index), (x, w))
        torch.testing.assert_close(found, torch.autograd.grad(cube_reference(x[index], w).sum(), (x, w)))


def test_r03_reduce_overhead_mode_with_several_systems():
    """Their order is sorted in the body of an op, which keeps it for later calls, but not in memory of the compiler."""
    values, numbers = inputs()[0].detach(), torch.randint(5, (4_096,), dtype=torch.int32, device="cuda")

    def doubled(values):
        return 2.0 * system_sums(values, numbers, 5)

    compiled = torch.compile(doubled, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        found = compiled(values).clone()
        torch.testing.assert_close(found, doubled(values))
        values.add_(1.0)


@wp.kernel(module=wp.get_module("test_custom_ops_on_gpu"))
def doubled_of_any(x: wp.array(dtype=Any), y: wp.array(dtype=Any)):
    i = wp.tid()
    y[i] = x[i] + x[i]


def test_r03_a_graph_has_the_code_of_a_generic_kernel():
    """Warp drops it when the module gets a kernel for another dtype."""
    x = torch.ones(8, device="cuda")
    y = torch.empty_like(x)
    graph, _ = captured(lambda: launch(doubled_of_any, 8, [x], [y]))
    launch(doubled_of_any, 8, [x.double()], [y.double()])
    gc.collect()
    x.fill_(3.0)
    graph.replay()
    assert torch.equal(y, 2.0 * x)


@OPS
def test_r03_launch_caches_keep_no_memory(op, reference):
    gradients(op, *inputs())
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        gradients(op, *inputs(100_000))
    gc.collect()
    assert torch.cuda.memory_allocated() == before


@OPS
def test_r04_all_memory_is_torchs(op, reference):
    x, w = inputs(1_000_000)
    gradients(op, x, w)
    device = wp.get_device("cuda:0")
    pool = wp.get_mempool_used_mem_current(device) if device.is_mempool_supported else 0
    gradients(op, x, w)
    after = wp.get_mempool_used_mem_current(device) if device.is_mempool_supported else 0
    assert after == pool == 0


def test_r04_shortage_is_torchs_own_error():
    free, _ = torch.cuda.mem_get_info()
    filler = torch.empty(free - (64 << 20), dtype=torch.uint8, device="cuda")
    try:
        with pytest.raises(torch.cuda.OutOfMemoryError):
            big = torch.rand(1, dtype=torch.float64, device="cuda").expand(32 << 20)
            weighted_square(big, big)
    finally:
        del filler
        torch.cuda.empty_cache()
    gradients(weighted_square, *inputs())


def test_recordings_are_dropped_on_the_gpu_too():
    start = live_recordings()
    x, w = inputs()
    for _ in range(1_000):
        weighted_square(x, w)
    gradients(weighted_square, x, w)
    assert live_recordings() == start


def test_inputs_on_two_devices_are_refused():
    x, w = inputs()
    with pytest.raises(ValueError, match="`w` is on cpu, but `x` is on cuda"):
        weighted_square(x, w.cpu())
