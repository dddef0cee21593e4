"""One kernel as a torch function: allocated, launched, registered once, differentiated by kernels."""

import functools

import pytest
import torch
import warp as wp

from nvalchemiops.torch.autograd import NotDifferentiableError, OutputSpec
from nvalchemiops.torch.kernel import (
    any_torch_tensors,
    call_kernel,
    call_kernel_via_torch,
    call_kernel_via_torch_compile,
    differentiable_kernel,
    extract_input_shapes,
    get_or_register_torch_op,
    is_torch_tensor,
)
from nvalchemiops.torch.runtime.releases import CONSTANTS_FROM_OBJECTS
from tests.support.ops import leaf, product_kernel, reals, weighted_square_kernel


def specs():
    return [OutputSpec("out", wp.float64, lambda x, *_: x.shape)]


SPECS = specs()
PRODUCT = [OutputSpec("product", wp.float64, lambda x, w: x.shape)]


@wp.kernel
def norms_kernel(
    v: wp.array(dtype=wp.vec3d),
    m: wp.array(dtype=wp.mat33d),
    n: wp.array(dtype=wp.float64),
    u: wp.array(dtype=wp.vec3d),
):
    i = wp.tid()
    n[i] = wp.dot(v[i], v[i])
    u[i] = m[0] * v[i]


@wp.kernel(enable_backward=False)
def product_backward_kernel(x: reals, w: reals, c: reals, gx: reals, gw: reals):
    i = wp.tid()
    gx[i] = c[i] * w[i]
    gw[i] = c[i] * x[i]


@wp.kernel(enable_backward=False)
def product_backward_first_kernel(w: reals, c: reals, gx: reals):
    i = wp.tid()
    gx[i] = c[i] * w[i]


@wp.kernel
def sum_kernel(x: wp.array(dtype=wp.float64), total: wp.array(dtype=wp.float64)):
    wp.atomic_add(total, 0, x[wp.tid()])


def test_call_kernel_allocates_and_launches():
    x, w = leaf(5).detach(), leaf(5, seed=1).detach()
    torch.testing.assert_close(call_kernel(weighted_square_kernel, x, w, 2.0, outputs=SPECS), 2 * x * x * w)
    v, m = torch.rand(4, 3, dtype=torch.float64), torch.rand(1, 3, 3, dtype=torch.float64)
    n, u = call_kernel(
        norms_kernel,
        v,
        m,
        outputs=[
            OutputSpec("n", wp.float64, lambda v, m: (v.shape[0],)),
            OutputSpec("u", wp.vec3d, lambda v, m: v.shape),
        ],
    )
    torch.testing.assert_close((n, u), (v.pow(2).sum(1), v @ m[0].T))


def test_launch_grid():
    x = torch.ones(6, dtype=torch.float64)
    total = [OutputSpec("total", wp.float64, (1,))]
    assert call_kernel(sum_kernel, x, outputs=total).item() == 1.0, "the elements of the first output by default"
    assert call_kernel(sum_kernel, x, outputs=total, dim=4).item() == 4.0
    assert call_kernel(sum_kernel, x, outputs=total, dim=lambda x: x.shape).item() == 6.0
    assert call_kernel(sum_kernel, x[:0], outputs=total, dim=lambda x: x.shape).item() == 0.0


def test_strided_inputs():
    x, w = leaf(10).detach()[::2], leaf(1).detach().expand(5)
    torch.testing.assert_close(call_kernel(product_kernel, x, w, outputs=SPECS), x * w)


def test_call_kernel_refuses_to_lose_a_gradient():
    with pytest.raises(ValueError, match="differentiable_kernel"):
        call_kernel(product_kernel, leaf(5), leaf(5), outputs=SPECS)
    with torch.no_grad():
        call_kernel(product_kernel, leaf(5), leaf(5), outputs=SPECS)


ONES = torch.ones(3, dtype=torch.float64)


@pytest.mark.parametrize(
    "inputs, error, match",
    [
        ((torch.ones(3), ONES), TypeError, "`x`.*float64.*float32"),
        ((torch.ones(3, 3, dtype=torch.float64), ONES), ValueError, "`x`"),
        ((ONES,), TypeError, "takes 3 arguments, got 2"),
        ((ONES, ONES, 1.0), TypeError, "takes 3 arguments, got 4"),
        ((ONES.to("meta"), ONES), ValueError, "other arguments are on meta"),
    ],
)
def test_arguments_that_do_not_fit(inputs, error, match):
    with pytest.raises(error, match=match):
        call_kernel(product_kernel, *inputs, outputs=[OutputSpec("out", wp.float64, (3,))])


def test_registered_once():
    first = get_or_register_torch_op(product_kernel, specs())
    assert all(get_or_register_torch_op(product_kernel, specs()) is first for _ in range(5))
    others = [
        get_or_register_torch_op(product_kernel, [OutputSpec("out", wp.float64, lambda x, *_: (x.shape[0],))]),
        get_or_register_torch_op(product_kernel, specs(), dim=3),
        get_or_register_torch_op(product_kernel, specs(), differentiable=True),
    ]
    assert len({first, *others}) == 4
    assert len({f.op.name for f in (first, *others)}) == 4

    def scaled(factor):
        return get_or_register_torch_op(product_kernel, [OutputSpec("out", wp.float64, lambda x, w: (factor,))])

    assert scaled(2) is scaled(2) and scaled(2) is not scaled(3), "what a spec closes over counts"


def test_registered_op_in_a_graph():
    op = get_or_register_torch_op(product_kernel, specs())
    x, w = leaf(5).detach(), leaf(5, seed=1).detach()
    torch.library.opcheck(op.op.overload, (x, w))
    compiled = torch.compile(lambda x, w: op(torch.sin(x), w=w) + 1, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, w), torch.sin(x) * w + 1)
    with pytest.raises(NotDifferentiableError, match="no derivative"):
        op(leaf(5), w).sum().backward()


PAIRS = {
    "pair of kernels": (product_kernel, product_backward_kernel),
    "own adjoint": (product_kernel,),
    "one gradient, one saved input": (product_kernel, product_backward_first_kernel, [1], 1),
}


@pytest.mark.parametrize("kernels", PAIRS.values(), ids=PAIRS)
def test_differentiable_kernel(kernels):
    function = differentiable_kernel(*kernels)
    x, w = leaf(5), leaf(5, seed=1)
    wanted = (x,) if len(kernels) == 4 else (x, w)

    def loss(f):
        return lambda x, w: (f(torch.sin(x), w) * torch.cos(x)).sum()

    expected = torch.autograd.grad(loss(torch.mul)(x, w), wanted)
    torch.testing.assert_close(
        torch.autograd.grad(loss(lambda x, w: function(x, w, outputs=PRODUCT))(x, w), wanted), expected
    )
    op = function.op(PRODUCT)
    torch.testing.assert_close(op(x, w), x * w)
    compiled = torch.compile(loss(op), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(x, w), wanted), expected)
    torch.library.opcheck(op.op.overload, (x, w if len(kernels) < 4 else w.detach()))
    first = torch.autograd.grad(loss(op)(x, w), x, create_graph=True)[0]
    with pytest.raises(NotDifferentiableError):
        first.sum().backward()


@pytest.mark.parametrize("kernels", PAIRS.values(), ids=PAIRS)
def test_differentiable_kernel_under_transforms(kernels):
    op = differentiable_kernel(*kernels).op(PRODUCT)
    x, w = leaf(5).detach(), leaf(5, seed=1).detach()
    torch.testing.assert_close(torch.func.jacrev(op)(x, w), torch.diag(w))
    torch.testing.assert_close(torch.func.jvp(lambda x: op(x, w), (x,), (w,))[1], w * w)


def test_inputs_without_a_gradient_in_the_pair_get_none():
    op = differentiable_kernel(product_kernel, product_backward_first_kernel, [1], 1).op(PRODUCT)
    x, w = leaf(5), leaf(5, seed=1)
    assert torch.autograd.grad(op(x, w).sum(), (x, w), allow_unused=True)[1] is None


@pytest.mark.parametrize(
    "arguments, match",
    [
        ((product_kernel, product_backward_first_kernel), "3 parameters.*make 5"),
        ((product_kernel, product_backward_kernel, [0, 7]), "save_for_backward"),
        ((product_kernel, product_backward_kernel, None, 5), "num_grad_inputs"),
        ((weighted_square_kernel, product_backward_kernel), "`s`"),
        ((product_kernel, None, [0]), "not given"),
        ((product_backward_kernel,), "enable_backward"),
    ],
)
def test_kernels_that_do_not_match(arguments, match):
    with pytest.raises(ValueError, match=match):
        differentiable_kernel(*arguments)(leaf(3), leaf(3), outputs=PRODUCT)


def test_kernels_that_are_no_functions_of_tensors():
    @wp.kernel
    def first_of(v: wp.vec3d, y: reals):
        y[wp.tid()] = v[0]

    with pytest.raises(TypeError, match=r"`v`.* neither an array nor a number"):
        get_or_register_torch_op(first_of, PRODUCT)
    with pytest.raises(ValueError, match="too few parameters for 2 `outputs`"):
        get_or_register_torch_op(first_of, [*PRODUCT, *PRODUCT])
    with pytest.raises(TypeError, match="`forward_kernel` must be a Warp kernel"):
        differentiable_kernel(leaf)


@pytest.mark.parametrize("names", [("m", "u"), ("u", "n"), ("n", "n"), ("same", "same")])
def test_outputs_with_the_name_of_another_parameter(names):
    """Above all in another order, which nothing else would notice."""
    outputs = [OutputSpec(name, wp.vec3d, lambda v, m: v.shape) for name in names]
    for entry in (differentiable_kernel(norms_kernel).op, functools.partial(get_or_register_torch_op, norms_kernel)):
        with pytest.raises(ValueError, match=f"`outputs`: '{names[0]}' is in the place of parameter `.` .* are n, u"):
            entry(outputs)


def test_call_kernel_with_outputs_in_another_order():
    """As for ops, or each result would have the name of the other one; further names are free."""
    x = torch.ones(4, 3, dtype=torch.float64)
    u, n = (OutputSpec(name, wp.vec3d, (4, 3)) for name in "un")
    with pytest.raises(ValueError, match=r"`outputs`: 'u' is in the place of parameter `n` .* are n, u"):
        call_kernel(norms_kernel, x, x[None, :3], outputs=[u, n])
    named = [OutputSpec("same", wp.float64, (4,)), OutputSpec("same", wp.vec3d, (4, 3))]
    assert (call_kernel(norms_kernel, x, x[None, :3], outputs=named)[0] == 3.0).all()


def test_adjoint_with_vectors_matrices_and_scalars():
    function = differentiable_kernel(norms_kernel)
    outputs = [
        OutputSpec("norm", wp.float64, lambda v, m: (v.shape[0],)),
        OutputSpec("turned", wp.vec3d, lambda v, m: v.shape),
    ]
    v, m = leaf(4, 3), leaf(1, 3, 3, seed=1)

    def loss(n, u):
        return (n.sin() * u.sum(1)).sum()

    torch.testing.assert_close(
        torch.autograd.grad(loss(*function(v, m, outputs=outputs)), (v, m)),
        torch.autograd.grad(loss(v.pow(2).sum(1), v @ m[0].T), (v, m)),
    )


def test_adjoint_of_a_kernel_with_an_array_of_integers():
    @wp.kernel
    def squares_of_some(x: wp.array(dtype=wp.float64), index: wp.array(dtype=wp.int32), y: wp.array(dtype=wp.float64)):
        y[wp.tid()] = x[index[wp.tid()]] * x[index[wp.tid()]]

    op = differentiable_kernel(squares_of_some).op([OutputSpec("y", wp.float64, lambda x, index: index.shape)])
    x, index = leaf(4), torch.tensor([0, 2, 2], dtype=torch.int32)
    assert torch.autograd.gradcheck(lambda x: op(x, index), x)
    compiled = torch.compile(lambda x: op(x, index).sum(), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(x), x)[0], torch.autograd.grad(op(x, index).sum(), x)[0])


def test_the_two_entries_for_eager_and_compiled_code():
    x, w = leaf(5), leaf(5, seed=1)

    def loss(call):
        return lambda x, w: (call(weighted_square_kernel, torch.sin(x), w, 2.0, outputs=SPECS) * w).sum()

    expected = torch.autograd.grad((2 * torch.sin(x) ** 2 * w * w).sum(), (x, w))
    torch.testing.assert_close(torch.autograd.grad(loss(call_kernel_via_torch)(x, w), (x, w)), expected)
    torch.testing.assert_close(torch.autograd.grad(loss(call_kernel_via_torch_compile)(x, w), (x, w)), expected)
    compiled = torch.compile(loss(call_kernel_via_torch_compile), fullgraph=True, backend="aot_eager")
    if CONSTANTS_FROM_OBJECTS:
        torch.testing.assert_close(torch.autograd.grad(compiled(x, w), (x, w)), expected)


def test_the_entry_for_compiled_code_names_the_torch_that_it_needs(monkeypatch):
    monkeypatch.setattr("nvalchemiops.torch.kernel.CONSTANTS_FROM_OBJECTS", False)

    def call(x, w):
        return call_kernel_via_torch_compile(weighted_square_kernel, x, w, 2.0, outputs=SPECS)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match=r"needs torch 2\.12 .* get_or_register_torch_op"):
        compiled(leaf(5), leaf(5, seed=1))


def test_helpers():
    x = torch.ones(2, 3)
    assert is_torch_tensor(x) and not is_torch_tensor([x]) and not is_torch_tensor(wp.zeros(2, device="cpu"))
    assert any_torch_tensors(1, [None, x]) and not any_torch_tensors(1, [None, "x"])
    assert extract_input_shapes(x, 3.0, wp.zeros((2, 5), device="cpu"), None) == ((2, 3), None, (2, 5), None)
