"""Function transforms in eager mode: grad, vjp, jvp, jacobians, Hessians and vmap, alone and nested."""

import pytest
import torch

from nvalchemiops.torch.autograd import NotDifferentiableError, live_recordings, warp_custom_op
from nvalchemiops.torch.interactions.pair import lennard_jones
from nvalchemiops.torch.neighbors import neighbor_list
from tests.support.ops import (
    OPS,
    cube,
    cube_reference,
    leaf,
    like,
    square_and_cube,
    square_and_cube_reference,
    weighted_square,
)

F = torch.func
X = leaf(4).detach()
W = leaf(4, seed=1).detach()
BATCH = torch.stack([X, X + 1.0, 2.0 * X])


def scalar(f):
    return lambda x, w: torch.sin(f(x, w)).sum()


FIRST_ORDER = {
    "grad": lambda f: F.grad(scalar(f), argnums=(0, 1))(X, W),
    "vjp": lambda f: F.vjp(f, X, W)[1](W),
    "jacrev": lambda f: F.jacrev(f, argnums=(0, 1))(X, W),
    "jacfwd": lambda f: F.jacfwd(f, argnums=(0, 1))(X, W),
    "jvp": lambda f: F.jvp(f, (X, W), (W, X)),
    "vmap": lambda f: F.vmap(f, in_dims=(0, None))(BATCH, W),
    "vmap of both, along other dimensions": lambda f: F.vmap(f, in_dims=(1, 0))(BATCH.T, BATCH),
    "vmap of grad": lambda f: F.vmap(F.grad(scalar(f)), in_dims=(0, None))(BATCH, W),
    "grad through vmap": lambda f: F.grad(lambda x: F.vmap(f, in_dims=(0, None))(x, W).pow(2).sum())(BATCH),
    "vmap of vmap": lambda f: F.vmap(F.vmap(f, in_dims=(0, None)), in_dims=(None, 0))(BATCH, BATCH),
}
SECOND_ORDER = {
    "hessian": lambda f: F.hessian(scalar(f), argnums=(0, 1))(X, W),
    "jacrev of jacrev": lambda f: F.jacrev(F.jacrev(scalar(f)))(X, W),
    "jacrev of jacfwd": lambda f: F.jacrev(F.jacfwd(scalar(f)))(X, W),
    "grad of a function of grad": lambda f: F.grad(lambda x: F.grad(scalar(f))(x, W).pow(2).sum())(X),
    "jvp of grad": lambda f: F.jvp(lambda x: F.grad(scalar(f))(x, W), (X,), (W,)),
    "vmap of hessian": lambda f: F.vmap(F.hessian(scalar(f)), in_dims=(0, None))(BATCH, W),
    "vectorised hessian of autograd": lambda f: torch.autograd.functional.hessian(
        lambda x: scalar(f)(x, W), X, vectorize=True
    ),
}


@pytest.mark.parametrize("transform", FIRST_ORDER.values(), ids=FIRST_ORDER)
@OPS
def test_first_order(transform, op, reference):
    torch.testing.assert_close(transform(op), transform(reference))


@pytest.mark.parametrize("transform", SECOND_ORDER.values(), ids=SECOND_ORDER)
def test_second_order_of_an_explicit_chain(transform):
    torch.testing.assert_close(transform(cube), transform(cube_reference))


@pytest.mark.parametrize("transform", [SECOND_ORDER[k] for k in ("hessian", "jacrev of jacrev", "jvp of grad")])
def test_second_order_of_a_tape_raises(transform):
    with pytest.raises(NotDifferentiableError, match="tests::weighted_square"):
        transform(weighted_square)


@pytest.mark.parametrize("op", [weighted_square, cube], ids=["tape", "explicit"])
def test_forward_mode_inside_forward_mode_raises(op):
    """Torch loses the outer tangents of custom functions there: zeros, without a word."""
    with pytest.raises(NotDifferentiableError, match=r"jacfwd\(jacrev"):
        F.jacfwd(F.jacfwd(scalar(op)))(X, W)


@OPS
def test_dual_numbers_without_a_transform(op, reference):
    with torch.autograd.forward_ad.dual_level():
        found, expected = (
            torch.autograd.forward_ad.unpack_dual(f(torch.autograd.forward_ad.make_dual(X, W), W)).tangent
            for f in (op, reference)
        )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("transform", [FIRST_ORDER[k] for k in ("grad", "jacrev", "vmap of grad")])
def test_several_outputs(transform):
    def joined(f):
        return lambda x, w: torch.cat(f(x, w))

    torch.testing.assert_close(transform(joined(square_and_cube)), transform(joined(square_and_cube_reference)))


def test_transforms_leave_no_recording():
    start = live_recordings()
    for transform in FIRST_ORDER.values():
        transform(weighted_square)
    assert live_recordings() == start


def test_ordinary_autograd_through_a_transform():
    w = leaf(4, seed=1)
    (found,) = torch.autograd.grad(F.grad(scalar(cube))(X, w).sum(), w)
    w2 = leaf(4, seed=1)
    (expected,) = torch.autograd.grad(F.grad(scalar(cube_reference))(X, w2).sum(), w2)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dims", [(0, None), (1, 0)])
def test_vmap_over_no_slice(dims):
    nothing = [torch.zeros(0, 3, dtype=X.dtype).movedim(0, d) if d is not None else W[:3] for d in dims]
    for transform in (lambda f: f, lambda f: F.grad(scalar(f))):
        found = F.vmap(transform(cube), dims, out_dims=1)(*nothing)
        assert found.shape == (3, 0) and found.dtype == X.dtype


def test_nothing_is_evaluated_for_no_slice():
    """Zeros in the place of indices and positions would be errors; gradients are zeros, as those of torch."""
    x, cell = torch.zeros(0, 4, 3, dtype=X.dtype, requires_grad=True), 9.0 * torch.eye(3, dtype=X.dtype)
    cell.requires_grad_()
    found = F.vmap(lambda y: lennard_jones(2.0)(y, cell, epsilon=1.0, sigma=1.0))(x)
    assert found.shape == (0, 4)
    gradients = torch.autograd.grad(found.sum(), (x, cell))
    assert gradients[0].shape == x.shape and not gradients[1].any()
    mapped = F.vmap(lambda y: lennard_jones(2.0)(y, epsilon=1.0, sigma=1.0))
    assert F.jacfwd(mapped)(x.detach()).shape == (0, 4, *x.shape)  # no slice, and no direction


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_no_slice_of_neighbors_and_cells(as_list, half):
    """Found with vectors, and given."""
    cell = 9.0 * torch.eye(3, dtype=X.dtype).expand(0, 3, 3)
    options = {"half_fill": half, "return_neighbor_list": as_list}

    def vectors(y, cell):
        return neighbor_list(y, 2.0, cell, return_vectors=True, max_neighbors=5, **options)[-1]

    x = torch.arange(12.0, dtype=X.dtype).view(4, 3)
    assert F.vmap(vectors)(x.expand(0, 4, 3), cell).shape == ((0, 0, 3) if as_list else (0, 4, 5, 3))
    names = (
        ("neighbor_list", "neighbor_ptr", "neighbor_shifts")
        if as_list
        else ("neighbor_matrix", "neighbor_matrix_shifts")
    )
    found = neighbor_list(x, 6.0, 9.0 * torch.eye(3, dtype=X.dtype), **options)
    near = [t.expand(0, *t.shape) for t in (found if as_list else found[::2])]

    def energies(y, cell, *near):
        return lennard_jones(2.0)(y, cell, epsilon=1.0, sigma=1.0, half_list=half, **dict(zip(names, near)))

    assert F.vmap(energies)(x.expand(0, 4, 3), cell, *near).shape == (0, 4)


def test_own_vmap_rule_sees_all_slices_at_once():
    calls = []

    def fold(info, in_dims, x):
        calls.append(info.batch_size)
        moved = x.movedim(in_dims[0], 0)
        return twice(moved.reshape(-1)).reshape(moved.shape), 0

    @warp_custom_op("tests::twice", [like("y")], backward=lambda grad_y: 2.0 * grad_y, vmap=fold)
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2.0 * x

    torch.testing.assert_close(F.vmap(twice, in_dims=1, out_dims=1)(BATCH.T), 2.0 * BATCH.T)
    assert calls == [3]
    torch.testing.assert_close(F.vmap(F.grad(lambda x: twice(x).sum()))(BATCH), torch.full_like(BATCH, 2.0))


@pytest.mark.parametrize("out_dims", [0, (0, None)])
def test_own_vmap_rule_of_no_slice(out_dims):
    """It may give one dimension for all results, or None for one that is the same in all slices."""

    def fold(info, in_dims, x):
        return (2.0 * x, x if out_dims == 0 else x.new_ones(4)), out_dims

    @warp_custom_op("tests::pair", [like("y"), like("z")], backward=lambda grad_y, grad_z: grad_y, vmap=fold)
    def pair(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return 2.0 * x, x.clone()

    assert [t.shape for t in F.vmap(pair)(BATCH[:0])] == [(0, 4), (0, 4)]


def test_linear_op_that_is_its_own_derivative_has_every_order():
    """A backward that refers to the op itself: as spread and gather do."""

    @warp_custom_op("tests::scale", [like("y")], backward=lambda grad_y, factor: scale(grad_y, factor))
    def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
        return factor * x

    def quartic(x):
        return scale(x, 3.0).pow(4).sum()

    derivative, expected = quartic, lambda x: (3.0 * x).pow(4).sum()
    for _ in range(4):
        derivative, expected = (
            (lambda f: lambda x: F.grad(lambda x: f(x))(x).sum())(derivative),
            (lambda f: lambda x: F.grad(lambda x: f(x))(x).sum())(expected),
        )
        torch.testing.assert_close(derivative(X), expected(X))


def test_backward_may_return_gradients_by_name_and_leave_some_out():
    def backward(x, w, y, grad_y):
        return {"w": grad_y * y / w}

    @warp_custom_op("tests::by_name", [like("y")], backward=backward)
    def by_name(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x * w

    x, w = leaf(3), leaf(3, seed=1)
    found = torch.autograd.grad(by_name(x, w).sum(), (x, w), allow_unused=True)
    assert found[0] is None
    torch.testing.assert_close(found[1], x.detach())


def test_no_cotangent_arrives_from_a_constant():
    @warp_custom_op("tests::by_a_constant", [like("z")], grad_arrays=["z", "x"], backward=lambda y, grad_z: grad_z * y)
    def by_a_constant(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y

    def function(x):
        return by_a_constant(x, cube(x, W)).sum()

    expected, x = cube_reference(X, W), X.clone().requires_grad_()
    for found in (F.grad(function)(X), F.jacfwd(function)(X), torch.autograd.grad(function(x), x)[0]):
        torch.testing.assert_close(found, expected)


def test_missing_cotangents_are_zeros_or_none():
    seen = {}

    def backward(x, grad_y, grad_z: torch.Tensor | None):
        seen["z"] = grad_z
        return grad_y if grad_z is None else grad_y + 2 * grad_z

    @warp_custom_op("tests::two_outputs", [like("y"), like("z")], backward=backward)
    def two_outputs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 1, x * 2

    x = leaf(3)
    torch.testing.assert_close(torch.autograd.grad(two_outputs(x)[0].sum(), x)[0], torch.ones_like(x))
    assert seen["z"] is None
    torch.testing.assert_close(torch.autograd.grad(two_outputs(x)[1].sum(), x)[0], torch.full_like(x, 2.0))
