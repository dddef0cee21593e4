"""Operations on segments: values against loops in numpy, derivatives, compilers, and what clients pass."""

import itertools

import numpy as np
import pytest
import torch

from nvalchemiops.torch.segment_ops import (
    segmented_dot,
    segmented_matvec,
    segmented_max,
    segmented_mean,
    segmented_min,
    segmented_mul,
    segmented_rms_norm,
    segmented_sum,
)
from tests.values.test_segments import values_of

SORTED = torch.tensor([0, 0, 0, 2, 2, 3, 3, 3, 3], dtype=torch.int32)
M = 5  # segments 1 and 4 are empty


def index(unsorted, dtype=torch.int32):
    order = torch.randperm(len(SORTED), generator=torch.Generator().manual_seed(0)) if unsorted else slice(None)
    return SORTED[order].to(dtype)


def rms(rows):
    return np.sqrt((rows**2).reshape(len(rows), -1).sum(1).mean())


REDUCTIONS = {
    "sum": (segmented_sum, lambda rows: rows.sum(0), 0.0),
    "mean": (segmented_mean, lambda rows: rows.mean(0), 0.0),
    "max": (segmented_max, lambda rows: rows.max(0), -np.inf),
    "min": (segmented_min, lambda rows: rows.min(0), np.inf),
    "rms": (segmented_rms_norm, rms, 0.0),
}


def reduce(one, of_none, idx, values):
    rows = [values[idx == s] for s in range(M)]
    shape = one(values).shape
    return np.stack([one(r) if len(r) else np.full(shape, of_none) for r in rows])


def products(shape=(), dtype=torch.float64):
    """Each operation as a function of tensors of floats, and these."""
    idx = index(True)
    n = len(idx)
    x, y, v, m = (values_of(n, *shape), values_of(n, *shape, seed=2), values_of(n, 3), values_of(M, 3, 3, seed=3))
    per_segment, rows = values_of(M, seed=4), values_of(M, *shape, seed=5)
    full = torch.tensor([0, 2, 3])  # not the empty ones
    table = {
        "sum": (lambda x: segmented_sum(x, idx, M), x),
        "mean": (lambda x: segmented_mean(x, idx, M), x),
        "max": (lambda x: segmented_max(x, idx, M)[full], x),
        "min": (lambda x: segmented_min(x, idx, M)[full], x),
        "rms": (lambda x: segmented_rms_norm(x, idx, M), x),
        "dot": (lambda x, y: segmented_dot(x, y, idx, M), x, y),
        "mul": (lambda x, y: segmented_mul(x, y, idx, M), x, per_segment),
        "mul by rows": (lambda x, y: segmented_mul(x, y, idx, M), x, rows),
        "matvec": (lambda v, m: segmented_matvec(v, m, idx, M), v, m),
    }
    return {name: (f, *(t.to(dtype) for t in tensors)) for name, (f, *tensors) in table.items()}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name, dtype, device):
    """Of scalars, vectors and matrices, in order or not."""
    operation, one, of_none = REDUCTIONS[name]
    tolerance = 1e-6 if dtype == torch.float32 else 1e-14
    for shape, unsorted, integers in itertools.product([(), (3,), (2, 4)], [False, True], [torch.int32, torch.int64]):
        idx, x = index(unsorted, integers), values_of(len(SORTED), *shape, dtype=dtype)
        found = operation(x.to(device), idx.to(device), M)
        expected = torch.tensor(reduce(one, of_none, idx.numpy(), x.double().numpy()))
        assert found.dtype == dtype
        torch.testing.assert_close(found.cpu().double(), expected, rtol=tolerance, atol=tolerance)


def test_products(dtype, device):
    idx = index(True).to(device)
    v, w, y, m = (
        values_of(*s, dtype=dtype, seed=n).to(device) for n, s in enumerate([(9, 3), (9, 3), (M,), (M, 3, 3)])
    )
    i = idx.long()
    dots = torch.zeros(M, dtype=dtype, device=device).index_add(0, i, (v * w).sum(1))
    torch.testing.assert_close(segmented_dot(v, w, idx, M), dots)
    torch.testing.assert_close(segmented_dot(v[:, 0], w[:, 0], idx, M), segmented_sum(v[:, 0] * w[:, 0], idx, M))
    large = torch.tensor([[2.0**30, 1.0, -(2.0**30)]], dtype=dtype, device=device)  # summed in float64, too
    assert segmented_dot(large, torch.ones_like(large), idx[:1] * 0, 1).tolist() == [1.0]
    torch.testing.assert_close(segmented_mul(v[:, 0], y, idx, M), v[:, 0] * y[i])
    torch.testing.assert_close(segmented_mul(v, y, idx, M), v * y[i, None])
    torch.testing.assert_close(segmented_mul(v, m[:, 0], idx, M), v * m[i, 0])
    torch.testing.assert_close(segmented_mul(v[:, 0], m[:, 0], idx, M), v[:, :1] * m[i, 0])
    torch.testing.assert_close(segmented_matvec(v, m, idx, M), torch.einsum("ni,nij->nj", v, m[i]))
    torch.testing.assert_close(
        segmented_matvec(v[:, :2], m[:, :2], idx, M), torch.einsum("ni,nij->nj", v[:, :2], m[i, :2])
    )


@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("name", products())
def test_derivatives(name, shape):
    f, *tensors = products(shape)[name]
    leaves = [t.clone().requires_grad_() for t in tensors]
    assert torch.autograd.gradcheck(f, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda *t: f(*t).square(), leaves, fast_mode=True)
    # third order, by the square of second derivatives
    (first,) = torch.autograd.grad(f(*leaves).pow(3).sum(), leaves[0], create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), leaves[0], create_graph=True)
    assert torch.isfinite(torch.autograd.grad(second.square().sum(), leaves[0])[0]).all()


@pytest.mark.parametrize("name", products())
def test_compiled_and_mapped(name):
    f, *tensors = products((3,))[name]
    expected = f(*tensors)
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    leaves = [t.clone().requires_grad_() for t in tensors]
    torch.testing.assert_close(compiled(*leaves), expected)
    gradients = torch.autograd.grad(compiled(*leaves).square().sum(), leaves)
    eager = torch.autograd.grad(f(*leaves).square().sum(), leaves)
    torch.testing.assert_close(gradients, eager)
    several = [torch.stack([t, 2 * t, -t]) for t in tensors]
    mapped = torch.func.vmap(f)(*several)
    for n in range(3):
        torch.testing.assert_close(mapped[n], f(*(t[n] for t in several)))
    slope = torch.func.grad(lambda *t: f(*t).square().sum())(*tensors)
    torch.testing.assert_close(slope, eager[0])


def test_sums_are_the_same_whatever_stands_around():
    """A segment alone and among others, sorted or not, in float32: the same bits."""
    x = values_of(3000, 3, dtype=torch.float32)
    idx = torch.arange(3000, dtype=torch.int32) % 7
    together = segmented_sum(x, idx, 7)
    for s in range(7):
        alone = x[idx == s]
        assert torch.equal(segmented_sum(alone, torch.zeros(len(alone), dtype=torch.int32), 1)[0], together[s])
    order = torch.argsort(idx, stable=True)
    assert torch.equal(segmented_sum(x[order], idx[order], 7), together)


def test_ties_share_the_gradient():
    x = torch.tensor([3.0, 1.0, 3.0, 2.0], dtype=torch.float64, requires_grad=True)
    idx = torch.tensor([0, 0, 0, 1])
    (slope,) = torch.autograd.grad(segmented_max(x, idx, 2).sum(), x)
    assert slope.tolist() == [0.5, 0.0, 0.5, 1.0]
    (slope,) = torch.autograd.grad(segmented_min(-x, idx, 3).sum(), x)
    assert slope.tolist() == [-0.5, 0.0, -0.5, -1.0]


def test_not_a_number_stays():
    x = torch.tensor([1.0, torch.nan, 2.0])
    idx = torch.tensor([0, 0, 1])
    for operation in (segmented_sum, segmented_mean, segmented_max, segmented_min, segmented_rms_norm):
        found = operation(x, idx, 2)
        assert found[0].isnan() and found[1] == 2.0


def test_rms_of_zeros_has_no_gradient():
    x = torch.zeros(3, 3, dtype=torch.float64, requires_grad=True)
    found = segmented_rms_norm(x, torch.tensor([0, 0, 2]), 3)
    assert found.tolist() == [0.0, 0.0, 0.0]
    assert torch.autograd.grad(found.sum(), x)[0].tolist() == [[0.0] * 3] * 3


@pytest.mark.parametrize("num_segments", [0, 3])
def test_no_rows(num_segments):
    x, idx = torch.zeros(0, 3, requires_grad=True), torch.zeros(0, dtype=torch.int32)
    assert segmented_sum(x, idx, num_segments).tolist() == [[0.0] * 3] * num_segments
    assert segmented_mean(x, idx, num_segments).tolist() == [[0.0] * 3] * num_segments
    assert segmented_dot(x, x, idx, num_segments).tolist() == [0.0] * num_segments
    assert segmented_max(x, idx, num_segments).tolist() == [[-torch.inf] * 3] * num_segments
    assert segmented_mul(x, torch.ones(num_segments), idx, num_segments).shape == (0, 3)
    assert segmented_matvec(x, torch.ones(num_segments, 3, 3), idx, num_segments).shape == (0, 3)
    assert torch.autograd.grad(segmented_mean(x, idx, num_segments).sum(), x)[0].shape == (0, 3)


X, IDX = torch.ones(3, 3), torch.tensor([0, 1, 1], dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: segmented_sum(X, torch.tensor([0, 1, 2]), 2), ValueError, r"`idx` must hold numbers in 0 .. 1"),
        (lambda: segmented_mean(X, torch.tensor([0, 1, -1]), 2), ValueError, r"`idx` .* -1 .. 1"),
        (lambda: segmented_max(X, torch.tensor([0, 1, 5]), 2), ValueError, "`idx`"),
        (lambda: segmented_mul(X, torch.ones(2), torch.tensor([0, 1, 5]), 2), ValueError, "`idx`"),
        (lambda: segmented_sum(X, IDX.double(), 2), TypeError, "`idx` must be int32"),
        (lambda: segmented_sum(X, IDX[:2], 2), ValueError, "`x` has 3 rows, but `idx` has 2"),
        (lambda: segmented_sum(X.long(), IDX, 2), TypeError, "`x` must be float32 or float64"),
        (lambda: segmented_sum(X.half(), IDX, 2), TypeError, "`x` must be float32 or float64"),
        (lambda: segmented_sum(X, IDX, -1), ValueError, "`num_segments`"),
        (lambda: segmented_sum(X, IDX, 2.5), TypeError, "`num_segments`"),
        (lambda: segmented_dot(X, X[:, :1], IDX, 2), ValueError, "`y` must have the shape of `x`"),
        (lambda: segmented_mul(X, torch.ones(3), IDX, 2), ValueError, "`y` has 3 rows, but `num_segments` is 2"),
        (lambda: segmented_mul(X, torch.ones(2, 2), IDX, 2), ValueError, "`y`"),
        (lambda: segmented_mul(X, torch.tensor(2.0), IDX, 2), ValueError, "`y` must have one row for each entry"),
        (lambda: segmented_matvec(X, torch.ones(3, 3), IDX, 3), ValueError, "`m`"),
        (lambda: segmented_matvec(X, torch.ones(3, 3, 3), IDX, 2), ValueError, "`m` has 3 rows"),
        (lambda: segmented_sum([1.0], IDX, 2), TypeError, "`x` must be a torch.Tensor"),
    ],
)
def test_bad_arguments(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_an_infinite_extreme_has_its_gradient():
    x = torch.tensor([-torch.inf, 1.0, torch.inf], requires_grad=True)
    idx = torch.tensor([0, 1, 3])
    found = segmented_max(x, idx, 4)
    assert found.tolist() == [-torch.inf, 1.0, -torch.inf, torch.inf]
    assert torch.autograd.grad(found[[0, 1, 3]].sum(), x)[0].tolist() == [1.0, 1.0, 1.0]
