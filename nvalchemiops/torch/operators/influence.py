"""The influence function of a mesh as a torch op without derivatives (`nvalchemiops.kernels.mesh.influence`)."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import warp as wp

from nvalchemiops.kernels.mesh.influence import tabulate_influence
from nvalchemiops.kernels.simd import WARP
from nvalchemiops.torch.autograd import OutputSpec, warp_custom_op
from nvalchemiops.torch.launch import launch
from nvalchemiops.torch.runtime.memory import new_empty


def _shape(volume: torch.Tensor, b_xy: torch.Tensor, b_z: torch.Tensor) -> tuple[int, ...]:
    return (volume.shape[0], 1, b_xy.shape[0], b_xy.shape[1], b_z.shape[-1], 1)


def _value_shape(metric: Any, volume: torch.Tensor, alpha: Any, *rest: Any) -> tuple[int, ...]:
    return _shape(volume, rest[0], rest[1])


def _derivative_shape(metric: Any, volume: torch.Tensor, alpha: Any, *rest: Any) -> tuple[int, ...]:
    return _shape(volume, rest[0], rest[1]) if rest[-2] else (0,)


@warp_custom_op(
    "nvalchemiops::mesh_influence",
    outputs=[
        OutputSpec("value", lambda *inputs: wp.float32 if inputs[-1] else wp.float64, _value_shape),
        OutputSpec("derivative", wp.float64, _derivative_shape),
    ],
    backward="none",
    trusted=True,
)
def mesh_influence(
    metric: torch.Tensor,
    volume: torch.Tensor,
    alpha: torch.Tensor,
    b_xy: torch.Tensor,
    b_z: torch.Tensor,
    mesh_dimensions: Sequence[int],
    first_planes: Sequence[int],
    exponent: int,
    with_derivative: bool,
    single: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The influence function of a power law on the half mesh, or on some of its planes.

    Parameters
    ----------
    metric : (n_systems, 3, 3) float64 tensor
        Of `nvalchemiops.torch.operators.lattice.Lattice`.
    volume, alpha : (n_systems,) float64 tensors
    b_xy : (n_x, n_y, 1) float64 tensor
        ``1 / b²`` of the splines along x and y, for these planes along y.
    b_z : (1, 1, n_z) float64 tensor
        Likewise for these planes along z.
    mesh_dimensions : (int, int, int)
        Of the whole mesh.
    first_planes : (int, int)
        The first plane along y, and along z.
    exponent : int
    with_derivative : bool
    single : bool
        Whether values are float32.

    Returns
    -------
    value, derivative : (n_systems, 1, n_x, n_y, n_z, 1) tensors
        As of `nvalchemiops.torch.interactions.electrostatics.terms.mesh.Influence`; without ``with_derivative`` the
        second one is empty.
    """
    shape = _shape(volume, b_xy, b_z)
    value = new_empty(shape, torch.float32 if single else torch.float64, volume.device)
    derivative = new_empty(shape if with_derivative else (0,), torch.float64, volume.device)
    if value.numel():
        n_rows, scale = math.prod(shape[:4]), math.pi**1.5 / math.gamma(exponent / 2)
        numbers = (*mesh_dimensions, shape[3], *first_planes, exponent, scale)
        given = [metric, alpha, volume, b_xy.flatten(), b_z.flatten(), *numbers]
        kernel = tabulate_influence("float32" if single else "float64")
        launch(kernel, n_rows, given, [value.view(-1), derivative.view(-1)], lanes=WARP, kind=shape[4])
    return value, derivative
