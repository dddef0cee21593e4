"""What an op costs above the launch it makes: 64 float64 numbers on the CPU, beside bare references.

The references make the same Warp launch on the same views, without this library:

- a bare ``torch.library`` op (``Library.define`` and ``impl``) around one launch;
- a bare ``autograd.Function`` with one launch forward and one backward;
- a minimal hand-written ``autograd.Function`` that records a ``wp.Tape`` and replays it.

Run: ``python benchmarks/overhead.py [--json FILE]``. Figures are the medians of interleaved rounds, in one process
with one torch thread.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from functools import partial

import torch
import warp as wp
from common import in_turns

from nvalchemiops._warp import quiet_warp
from nvalchemiops.launch import gather_only
from nvalchemiops.torch import autograd
from nvalchemiops.torch.launch import launch

N = 64
SHAPE = [autograd.OutputSpec("y", wp.float64, lambda x: x.shape)]


@wp.kernel
def square(x: wp.array(dtype=wp.float64), y: wp.array(dtype=wp.float64)):
    i = wp.tid()
    y[i] = x[i] * x[i]


@wp.kernel(enable_backward=False)
def square_derivative(x: wp.array(dtype=wp.float64), c: wp.array(dtype=wp.float64), g: wp.array(dtype=wp.float64)):
    i = wp.tid()
    g[i] = wp.float64(2.0) * x[i] * c[i]


@gather_only
@wp.kernel(enable_backward=False)
def square_fast(offset: wp.int32, x: wp.array(dtype=wp.float64), y: wp.array(dtype=wp.float64)):
    i = offset + wp.tid()
    y[i] = x[i] * x[i]


@gather_only
@wp.kernel(enable_backward=False)
def square_derivative_fast(
    offset: wp.int32, x: wp.array(dtype=wp.float64), c: wp.array(dtype=wp.float64), g: wp.array(dtype=wp.float64)
):
    i = offset + wp.tid()
    g[i] = wp.float64(2.0) * x[i] * c[i]


def plain_launch(kernel: wp.Kernel, inputs: list[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
    wp.launch(
        kernel,
        dim=N,
        inputs=[wp.from_torch(t, dtype=wp.float64, return_ctype=True) for t in inputs],
        outputs=[wp.from_torch(output, dtype=wp.float64, return_ctype=True)],
        device="cpu",
    )
    return output


# -- references -----------------------------------------------------------------------------------

_library = torch.library.Library("overhead_reference", "FRAGMENT")
_library.define("square(Tensor x) -> Tensor")
_library.impl("square", lambda x: plain_launch(square, [x], torch.empty_like(x)), "CompositeExplicitAutograd")
bare_op = torch.ops.overhead_reference.square.default


class BareFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return plain_launch(square, [x.detach()], torch.empty_like(x))

    @staticmethod
    def backward(ctx, cotangent):
        (x,) = ctx.saved_tensors
        return plain_launch(square_derivative, [x.detach(), cotangent], torch.empty_like(x))


class MinimalTape(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x)
        ctx.x = wp.from_torch(x.detach(), requires_grad=True)
        ctx.y = wp.from_torch(y, requires_grad=True)
        ctx.tape = wp.Tape()
        with ctx.tape:
            wp.launch(square, dim=N, inputs=[ctx.x], outputs=[ctx.y], device="cpu")
        return y

    @staticmethod
    def backward(ctx, cotangent):
        ctx.tape.backward(grads={ctx.y: wp.from_torch(cotangent.contiguous())})
        return wp.to_torch(ctx.x.grad).clone()


# -- ours -----------------------------------------------------------------------------------------


@autograd.warp_custom_op("overhead::square_plain", SHAPE, backward="none")
def op_with_plain_launch(x: torch.Tensor) -> torch.Tensor:
    return plain_launch(square, [x], torch.empty_like(x))


@autograd.warp_custom_op(
    "overhead::square_backward", [autograd.OutputSpec("grad_x", wp.float64, lambda x, c: x.shape)], backward="none"
)
def explicit_backward(x: torch.Tensor, grad_y: torch.Tensor) -> torch.Tensor:
    return plain_launch(square_derivative, [x, grad_y], torch.empty_like(x))


@autograd.warp_custom_op("overhead::square", SHAPE, backward=explicit_backward)
def explicit(x: torch.Tensor) -> torch.Tensor:
    return plain_launch(square, [x], torch.empty_like(x))


@autograd.warp_custom_op(
    "overhead::square_fast_backward", [autograd.OutputSpec("grad_x", wp.float64, lambda x, c: x.shape)], backward="none"
)
def explicit_fast_backward(x: torch.Tensor, grad_y: torch.Tensor) -> torch.Tensor:
    g = torch.empty_like(x)
    launch(square_derivative_fast, x.shape[0], [x, grad_y], [g])
    return g


@autograd.warp_custom_op("overhead::square_fast", SHAPE, backward=explicit_fast_backward)
def explicit_fast(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    launch(square_fast, x.shape[0], [x], [y])
    return y


@autograd.warp_custom_op("overhead::square_tape", SHAPE)
def tape(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    track = autograd.needs_grad(x)
    x_array = autograd.warp_from_torch(x, wp.float64)
    y_array = autograd.warp_from_torch(y, wp.float64, requires_grad=track)
    with autograd.WarpAutogradContextManager(track) as recorded:
        wp.launch(square, dim=N, inputs=[x_array], outputs=[y_array], device="cpu")
    if track:
        autograd.attach_for_backward(y, recorded, x=x_array, y=y_array)
    return y


# -- measuring ------------------------------------------------------------------------------------


def measure(functions: dict[str, Callable[[], object]], rounds: int = 30, calls: int = 300) -> dict[str, float]:
    """Median microseconds per call; the functions take turns, so drifts of the machine hit all alike."""

    def microseconds(function: Callable[[], object]) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            function()
        return (time.perf_counter() - start) / calls * 1e6

    times = {name: partial(microseconds, function) for name, function in functions.items()}
    in_turns(times, 1)  # warm-up
    return in_turns(times, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    quiet_warp()
    torch.set_num_threads(1)
    x = torch.rand(N, dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    ones = torch.ones(N, dtype=torch.float64)
    y = torch.empty_like(x)

    def both(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(function(leaf), leaf, ones)

    for function in (BareFunction.apply, MinimalTape.apply, explicit, explicit_fast, tape):
        torch.testing.assert_close(both(function)()[0], 2 * x)

    found = measure(
        {
            "launch alone (wp.launch)": lambda: plain_launch(square, [x], y),
            "launch alone (ours, recorded)": lambda: launch(square_fast, N, [x], [y]),
            "forward: bare torch.library op": lambda: bare_op(x),
            "forward: ours, same launch": lambda: op_with_plain_launch(x),
            "forward: ours, our launch": lambda: explicit_fast(x),
            "forward: tape op, no gradient": lambda: tape(x),
            "both: bare autograd.Function": both(BareFunction.apply),
            "both: explicit op, same launch": both(explicit),
            "both: explicit op, our launch": both(explicit_fast),
            "both: minimal tape Function": both(MinimalTape.apply),
            "both: tape op": both(tape),
        }
    )
    checks = [
        (
            "forward above a bare op, same launch (us)",
            found["forward: ours, same launch"] - found["forward: bare torch.library op"],
            25.0,
        ),
        (
            "explicit, forward + backward, over a bare Function",
            found["both: explicit op, same launch"] / found["both: bare autograd.Function"],
            2.5,
        ),
        (
            "explicit with our launch, over a bare Function",
            found["both: explicit op, our launch"] / found["both: bare autograd.Function"],
            2.5,
        ),
        (
            "tape, forward + backward, over a minimal tape",
            found["both: tape op"] / found["both: minimal tape Function"],
            1.3,
        ),
    ]
    print(f"torch {torch.__version__}, warp {wp.config.version}, {platform.machine()}, 1 thread, {N} float64 numbers\n")
    for name, value in found.items():
        print(f"{name:38s}{value:9.1f} us")
    print()
    for name, value, limit in checks:
        print(f"{name:52s}{value:8.2f}   asked: at most {limit:g}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(
                {"microseconds": found, "checks": [dict(zip(("name", "value", "limit"), c)) for c in checks]},
                file,
                indent=2,
            )


if __name__ == "__main__":
    main()
