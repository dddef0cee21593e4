"""Comparisons of results, weights for them, and derivatives by differences, as all tests use them."""

import pytest
import torch

BACKENDS = pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])


def close(found, expected, tolerance=1e-12, *, atol=None):
    """Tensor by tensor, relative to each number; ``atol`` where the absolute tolerance is another one."""
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance if atol is None else atol)


def within(found, expected, tolerance=1e-12):
    """Tensor by tensor, to an absolute tolerance."""
    torch.testing.assert_close(list(found), list(expected), rtol=0.0, atol=tolerance)


def close_to_largest(found, expected, tolerance=1e-12, least=0.0):
    """Tensor by tensor, relative to the largest number that is expected in it, or to ``least``."""
    for a, b in zip(found, expected, strict=True):
        largest = float(b.detach().abs().max()) if b.numel() else 0.0
        torch.testing.assert_close(a, b, rtol=0.0, atol=tolerance * max(least, largest))


def same_bits(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def random_like(tensors, seed=0):
    """Numbers without order, also inside of a compiled graph or a transform."""
    orders = [torch.arange(t.numel(), dtype=t.dtype, device=t.device) for t in tensors]
    return [torch.sin(77.7 * (order + seed + 1.3)).view(t.shape) for order, t in zip(orders, tensors)]


def weighted(results, seed=0):
    """A scalar of all results, with random weights."""
    return sum((r * w).sum() for r, w in zip(results, random_like(results, seed), strict=True))


def derivative_along(function, x, direction, step=1e-4):
    """Central difference of fourth order."""
    at = [function(x + k * step * direction) for k in (-2, -1, 1, 2)]
    return (at[0] - 8 * at[1] + 8 * at[2] - at[3]) / (12 * step)


def assert_gradient(function, inputs, tolerance=1e-7):
    """That of all results, with random weights, along one direction in all inputs at once, against differences.

    In a fraction of the time that `gradcheck` takes, which goes through pairs of inputs and results.
    """
    direction, leaves = random_like(inputs, 1), leaves_of(inputs)
    slopes = torch.autograd.grad(weighted(as_tuple(function(*leaves))), leaves, materialize_grads=True)

    def value(step):
        return weighted(as_tuple(function(*leaves_of([t + step * d for t, d in zip(inputs, direction)])))).detach()

    found = sum((slope * d).sum() for slope, d in zip(slopes, direction))
    torch.testing.assert_close(found, derivative_along(value, 0.0, 1.0), rtol=tolerance, atol=tolerance)


def assert_second_gradient(function, inputs, tolerance=1e-7):
    """That of the first one, also by the weights of the results."""

    def slopes(*values):
        inputs, weights = values[:n], values[n:]
        results = as_tuple(function(*inputs))
        return torch.autograd.grad(results, inputs, weights, create_graph=True, materialize_grads=True)

    n, results = len(inputs), as_tuple(function(*leaves_of(inputs)))
    assert_gradient(slopes, (*inputs, *random_like(results)), tolerance)


def as_tuple(results):
    return results if isinstance(results, tuple) else (results,)


def leaves_of(tensors):
    """Copies that require gradients."""
    return [t.detach().clone().requires_grad_() for t in tensors]


def compiled(function, backend="aot_eager", **options):
    """In one graph."""
    return torch.compile(function, backend=backend, fullgraph=True, **options)


def assert_compiled_equals_eager(function, inputs, backend="aot_eager"):
    """Results, flags, and gradients of a loss that sees all results; the same graph then takes other values."""

    def loss(*inputs):
        results = as_tuple(function(*inputs))
        return weighted([r.sin() for r in results]), results

    def evaluated(call, inputs):
        leaves = leaves_of(inputs)
        value, results = call(*leaves)
        slopes = torch.autograd.grad(value, leaves, allow_unused=True)
        flags = [r.requires_grad for r in results], [s is None for s in slopes]
        return flags, [*(r.detach() for r in results), *(s for s in slopes if s is not None)]

    call = compiled(loss, backend)
    first, *others = inputs
    for values in (inputs, [first + 0.02 * random_like([first])[0], *others]):
        (flags, expected), (compiled_flags, found) = evaluated(loss, values), evaluated(call, values)
        assert flags == compiled_flags
        close(found, expected)
