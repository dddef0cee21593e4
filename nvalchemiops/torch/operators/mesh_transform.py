"""Fourier transforms of meshes by torch, with bits that do not depend on the load of the machine.

For tiny meshes, and for several meshes at once, the rounding of torch's transforms depends on the number of threads.
Tiny meshes therefore take one thread, which is also faster, and several meshes take the number of threads of the
caller. A single larger mesh has the same bits on any number of threads
(`test_a_single_mesh_has_the_same_bits_on_any_number_of_threads`), and takes one thread on a busy machine, as all
operations inside a sum do. Each transform is the derivative of the other one, up to weights of planes.
"""

import functools
import math
from collections.abc import Callable, Sequence

import torch

from nvalchemiops.torch.autograd import OutputSpec, warp_custom_op
from nvalchemiops.torch.autograd.specs import real_of
from nvalchemiops.torch.runtime.openmp import at_fixed_threads
from nvalchemiops.torch.runtime.recorder import current_recorder

AXES = (-3, -2, -1)

TINY = 2**12
"""Total mesh points up to which a transform takes one thread. On two, bits differed up to 2,744 points."""


def weights_of_planes(n: int, like: torch.Tensor) -> torch.Tensor:
    """Multiplicity (n // 2 + 1, 1) of each plane in a sum over the whole mesh, whose other half has the conjugates."""
    plane = torch.arange(n // 2 + 1, device=like.device).unsqueeze(1)
    return torch.where((plane == 0) | (2 * plane == n), 1.0, 2.0).to(like.dtype)


def _spectrum_pullback(values: torch.Tensor, grad_spectrum: torch.Tensor) -> torch.Tensor:
    n = values.shape[-1]
    return mesh_values(grad_spectrum / weights_of_planes(n, grad_spectrum), n)


def _values_pullback(n: int, grad_values: torch.Tensor) -> torch.Tensor:
    return mesh_spectrum(grad_values) * weights_of_planes(n, grad_values)


def _of_slices(op: Callable[[], Callable[..., torch.Tensor]]) -> Callable[..., tuple[torch.Tensor, int]]:
    """The rule for ``vmap``: slices are additional meshes."""
    return lambda info, in_dims, given, *n: (op()(given.movedim(in_dims[0] or 0, 0), *n), 0)


@warp_custom_op(
    "nvalchemiops::mesh_spectrum",
    outputs=[
        OutputSpec("spectrum", real_of, lambda values: (*values.shape[:-1], values.shape[-1] // 2 + 1, 2)),
    ],
    backward=_spectrum_pullback,
    vmap=_of_slices(lambda: mesh_spectrum),
    trusted=True,
)
def mesh_spectrum(values: torch.Tensor) -> torch.Tensor:
    """Fourier transform (..., n_x, n_y, n_z // 2 + 1, 2) of real meshes (..., n_x, n_y, n_z), real and imaginary parts.

    The half of the transform is that of ``torch.fft.rfftn``.
    """
    return _transformed(lambda: torch.view_as_real(torch.fft.rfftn(values, dim=AXES)), values, values.shape[:-3])


@warp_custom_op(
    "nvalchemiops::mesh_values",
    outputs=[OutputSpec("values", real_of, lambda spectrum, n: (*spectrum.shape[:-2], n))],
    backward=_values_pullback,
    vmap=_of_slices(lambda: mesh_values),
    trusted=True,
)
def mesh_values(spectrum: torch.Tensor, n: int) -> torch.Tensor:
    """Real meshes (..., n_x, n_y, n) from half of their Fourier transform, without a division by the number of points.

    Like ``torch.fft.irfftn`` with ``norm="forward"``.
    """
    parts = torch.view_as_complex(spectrum)

    def transform() -> torch.Tensor:
        is_power_of_two = n & (n - 1) == 0
        if parts.device.type != "cpu" or is_power_of_two:
            return torch.fft.irfftn(parts, s=(*parts.shape[-3:-1], n), dim=AXES, norm="forward")
        # On a CPU, irfftn takes the same steps, but reads the last axis with long strides: 8 to 18 % slower for 20 to
        # 80 points. For powers of two the bits of a contiguous last axis depend on the number of threads.
        along_z = torch.fft.ifftn(parts, dim=AXES[:2], norm="forward").contiguous()
        return torch.fft.irfft(along_z, n=n, dim=AXES[2], norm="forward")

    return _transformed(transform, spectrum, spectrum.shape[:-4])


def _transformed(transform: Callable[[], torch.Tensor], given: torch.Tensor, meshes: Sequence[int]) -> torch.Tensor:
    """``transform()`` for a number of meshes that is the product of ``meshes``."""
    is_tiny, threaded = given.numel() <= TINY, transform
    if given.device.type == "cpu" and (is_tiny or math.prod(meshes) > 1):
        threaded = functools.partial(at_fixed_threads, transform, alone=is_tiny)
    recorder = current_recorder()
    return threaded() if recorder is None else recorder.compute(threaded, given)
