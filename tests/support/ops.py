"""Small ops with known derivatives, one of each kind, and their plain torch references."""

from collections.abc import Callable

import pytest
import torch
import warp as wp

from nvalchemiops.torch import autograd
from nvalchemiops.torch.launch import launch

real = wp.float64
reals = wp.array(dtype=real)


def like(name: str, position: int = 0) -> autograd.OutputSpec:
    """A float64 output shaped like the input at ``position``."""
    return autograd.OutputSpec(name, wp.float64, lambda *inputs: inputs[position].shape)


def leaf(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(*shape, generator=generator, dtype=torch.float64) + 0.5).requires_grad_()


# -- a tape op with two inputs, a scalar and two outputs: y = s x² w, and z = y x ------------------


@wp.kernel
def weighted_square_kernel(x: reals, w: reals, s: real, y: reals):
    i = wp.tid()
    y[i] = s * x[i] * x[i] * w[i]


@wp.kernel
def times_kernel(y: reals, x: reals, z: reals):
    i = wp.tid()
    z[i] = y[i] * x[i]


def record_weighted_square(x: torch.Tensor, w: torch.Tensor, s: float = 1.0) -> torch.Tensor:
    y = torch.empty_like(x)
    track = autograd.needs_grad(x, w)
    x_array, w_array = autograd.warp_from_torch(x, wp.float64), autograd.warp_from_torch(w, wp.float64)
    y_array = autograd.warp_from_torch(y, wp.float64, requires_grad=track)
    with autograd.WarpAutogradContextManager(track) as tape:
        wp.launch(weighted_square_kernel, x.shape[0], [x_array, w_array, s], [y_array], device=x_array.device)
    if track:
        autograd.attach_for_backward(y, tape, x=x_array, w=w_array, y=y_array)
    return y


weighted_square = autograd.warp_custom_op("tests::weighted_square", outputs=[like("y")])(record_weighted_square)


def weighted_square_reference(x: torch.Tensor, w: torch.Tensor, s: float = 1.0) -> torch.Tensor:
    return s * x * x * w


@autograd.warp_custom_op("tests::square_and_cube", outputs=[like("y"), like("z")])
def square_and_cube(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The second launch reads what the first one wrote: an output that the tape needs again."""
    y, z = torch.empty_like(x), torch.empty_like(x)
    track = autograd.needs_grad(x, w)
    x_array, w_array = autograd.warp_from_torch(x, wp.float64), autograd.warp_from_torch(w, wp.float64)
    y_array = autograd.warp_from_torch(y, wp.float64, requires_grad=track)
    z_array = autograd.warp_from_torch(z, wp.float64, requires_grad=track)
    with autograd.WarpAutogradContextManager(track) as tape:
        wp.launch(weighted_square_kernel, x.shape[0], [x_array, w_array, 1.0], [y_array], device=x_array.device)
        wp.launch(times_kernel, x.shape[0], [y_array, x_array], [z_array], device=x_array.device)
    if track:
        autograd.attach_for_backward(y, tape, x=x_array, w=w_array, y=y_array, z=z_array)
    return y, z


def square_and_cube_reference(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x * x * w
    return y, y * x


# -- an explicit chain, two orders deep: y = x³ w -------------------------------------------------


@wp.kernel(enable_backward=False)
def cube_kernel(x: reals, w: reals, y: reals):
    i = wp.tid()
    y[i] = x[i] * x[i] * x[i] * w[i]


@wp.kernel(enable_backward=False)
def cube_backward_kernel(x: reals, w: reals, c: reals, gx: reals, gw: reals):
    i = wp.tid()
    gx[i] = real(3.0) * x[i] * x[i] * w[i] * c[i]
    gw[i] = x[i] * x[i] * x[i] * c[i]


@wp.kernel(enable_backward=False)
def cube_second_kernel(x: reals, w: reals, c: reals, a: reals, b: reals, hx: reals, hw: reals, hc: reals):
    i = wp.tid()
    hx[i] = real(6.0) * x[i] * w[i] * c[i] * a[i] + real(3.0) * x[i] * x[i] * c[i] * b[i]
    hw[i] = real(3.0) * x[i] * x[i] * c[i] * a[i]
    hc[i] = real(3.0) * x[i] * x[i] * w[i] * a[i] + x[i] * x[i] * x[i] * b[i]


@autograd.warp_custom_op("tests::cube_second", [like("grad_x"), like("grad_w"), like("grad_grad_y")], backward="none")
def cube_second(
    x: torch.Tensor, w: torch.Tensor, grad_y: torch.Tensor, grad_grad_x: torch.Tensor, grad_grad_w: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    found = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)
    launch(cube_second_kernel, x.numel(), [x, w, grad_y, grad_grad_x, grad_grad_w], found)
    return found


@autograd.warp_custom_op("tests::cube_backward", [like("grad_x"), like("grad_w")], backward=cube_second)
def cube_backward(x: torch.Tensor, w: torch.Tensor, grad_y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found = torch.empty_like(x), torch.empty_like(x)
    launch(cube_backward_kernel, x.numel(), [x, w, grad_y], found)
    return found


@autograd.warp_custom_op("tests::cube", [like("y")], backward=cube_backward)
def cube(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    launch(cube_kernel, x.numel(), [x, w], [y])
    return y


def cube_reference(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x**3 * w


# -- an op that writes into a buffer it is given: scratch = x w, y = scratch x ---------------------


@wp.kernel
def product_kernel(x: reals, w: reals, y: reals):
    i = wp.tid()
    y[i] = x[i] * w[i]


@autograd.warp_custom_op("tests::with_scratch", outputs=[like("y")], mutates_args=("scratch",))
def with_scratch(x: torch.Tensor, w: torch.Tensor, scratch: torch.Tensor | None = None) -> torch.Tensor:
    y = torch.empty_like(x)
    scratch = torch.empty_like(x) if scratch is None else scratch
    track = autograd.needs_grad(x, w)
    x_array, w_array = autograd.warp_from_torch(x, wp.float64), autograd.warp_from_torch(w, wp.float64)
    s_array = autograd.warp_from_torch(scratch, wp.float64, requires_grad=track)
    y_array = autograd.warp_from_torch(y, wp.float64, requires_grad=track)
    with autograd.WarpAutogradContextManager(track) as tape:
        wp.launch(product_kernel, x.shape[0], [x_array, w_array], [s_array], device=x_array.device)
        wp.launch(product_kernel, x.shape[0], [s_array, x_array], [y_array], device=x_array.device)
    if track:
        autograd.attach_for_backward(y, tape, x=x_array, w=w_array, y=y_array)
    return y


@autograd.warp_custom_op("tests::fill", outputs=[], mutates_args=("buffer",))
def fill(buffer: torch.Tensor, value: float) -> None:
    buffer.fill_(value)


# -- what several test files share ----------------------------------------------------------------

OPS = pytest.mark.parametrize(
    "op, reference", [(weighted_square, weighted_square_reference), (cube, cube_reference)], ids=["tape", "explicit"]
)


def gradients(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(function(*inputs).sum(), inputs)
