"""What tests on a GPU share: comparisons with a CPU, calls that must not wait, captured graphs.

Tests with the fixture ``gpu`` run everywhere: where there is no GPU on a CPU with the layout of one (`tests.lanes`).
"""

import contextlib

import torch

from tests.lanes.fibers import ORDERS, gpu_layout


class OnGpu:
    """Calls functions of a device."""

    def __init__(self, kind):
        self.is_real = kind == "cuda"
        self.device = torch.device("cuda" if self.is_real else "cpu")

    def __call__(self, function, order="forward"):
        """The tensors that ``function(device)`` gives, on the CPU."""
        with contextlib.nullcontext() if self.is_real else gpu_layout(order):
            return [result.cpu() for result in function(self.device)]

    def assert_bits_repeat(self, function):
        """In each order of lanes, of what `with_derivatives` gives for three inputs.

        Second derivatives repeat to rounding on a GPU: on an H100 those of pair sums had other bits in the first call
        of a process, while all else had the same. Torch's engine adds up the parts of a gradient in an order that may
        change there, which is the likely cause, but not proved.
        """
        first = self(function)
        for order in ORDERS:
            found = self(function, order)
            n_exact = len(first) - 3 if self.is_real else len(first)
            assert all(torch.equal(a, b) for a, b in zip(found[:n_exact], first[:n_exact], strict=True))
            tolerance = 1e-5 if first[-1].dtype is torch.float32 else 1e-13
            assert_equal(found[n_exact:], first[n_exact:], tolerance)


def assert_equal(found, expected, tolerance, least=1.0):
    """Tensor by tensor, on any device and in any precision, relative to the largest number or to ``least``."""
    for a, b in zip(found, expected, strict=True):
        size = b.double().abs().max().clamp(min=least)
        torch.testing.assert_close(a.double() / size, b.double() / size, rtol=0.0, atol=tolerance, check_device=False)


def with_derivatives(results, inputs):
    """Results, and first and second derivatives of a bounded loss of them, without their graph."""
    loss = sum((r / (1.0 + r.detach().abs())).square().sum() for r in results)
    first = torch.autograd.grad(loss, inputs, create_graph=True)
    second = torch.autograd.grad(sum(s.tanh().sum() for s in first), inputs)
    return [r.detach() for r in (*results, *first, *second)]


@contextlib.contextmanager
def waiting_is_an_error():
    """Of the host for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(step):
    """A graph of ``step()``, which has run once on another stream as capture asks for, and its results."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


def assert_replays(step, x):
    """A captured ``step()`` follows ``x``, a leaf that is changed in place."""
    graph, results = captured(step)
    with torch.no_grad():
        x += 0.01
    graph.replay()
    torch.testing.assert_close(results, step(), rtol=0, atol=0)
