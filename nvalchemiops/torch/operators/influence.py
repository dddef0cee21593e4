"""The influence function of a mesh as torch ops. Their results have no graph."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import warp as wp

from nvalchemiops.kernels.mesh.influence import tabulate_influence
from nvalchemiops.kernels.simd import WARP
from nvalchemiops.torch.autograd import OutputSpec, warp_custom_op
from nvalchemiops.torch.autograd.declaration import with_fields
from nvalchemiops.torch.autograd.specs import PRECISIONS
from nvalchemiops.torch.launch import launch
from nvalchemiops.torch.runtime.memory import new_empty


class PowerLaw(NamedTuple):
    """What an influence function depends on."""

    metric: torch.Tensor  # (n_systems, 3, 3) float64, of `nvalchemiops.torch.operators.lattice.Lattice`
    volume: torch.Tensor  # (n_systems,) float64
    alpha: torch.Tensor  # (n_systems,) float64
    b_xy: torch.Tensor  # (n_x, n_y, 1) float64, ``1 / b²`` of the splines along x and y, for these planes along y
    b_z: torch.Tensor  # (1, 1, n_z) float64, likewise for these planes along z
    mesh_dimensions: Sequence[int]  # of the whole mesh
    first_planes: Sequence[int]  # the first plane along y, and along z
    exponent: int


def _shape(metric: Any, volume: torch.Tensor, alpha: Any, b_xy: torch.Tensor, b_z: torch.Tensor) -> tuple[int, ...]:
    return (volume.shape[0], 1, b_xy.shape[0], b_xy.shape[1], b_z.shape[-1], 1)


@warp_custom_op(
    "nvalchemiops::mesh_influence",
    outputs=[
        OutputSpec("value", lambda *inputs: wp.float32 if inputs[-1] else wp.float64, lambda *i: _shape(*i[:5])),
        OutputSpec("derivative", wp.float64, lambda *i: _shape(*i[:5]) if i[-2] else (0,)),
    ],
    grad_arrays=(),
    backward="none",
    trusted=True,
)
@with_fields
def mesh_influence(law: PowerLaw, with_derivative: bool, single: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The influence function of a power law on the half mesh, or on some of its planes.

    Parameters
    ----------
    metric, volume, alpha, b_xy, b_z, mesh_dimensions, first_planes, exponent
        The fields of a `PowerLaw`.
    with_derivative : bool
    single : bool
        Whether values are float32.

    Returns
    -------
    value, derivative : (n_systems, 1, n_x, n_y, n_z, 1) tensors
        As of `nvalchemiops.torch.interactions.electrostatics.terms.mesh.Influence`; without ``with_derivative`` the
        second one is empty.
    """
    shape, device = _shape(*law[:5]), law.volume.device
    value = new_empty(shape, torch.float32 if single else torch.float64, device)
    derivative = new_empty(shape if with_derivative else (0,), torch.float64, device)
    _launch(law, 0, value, derivative, None, None)
    return value, derivative


@warp_custom_op(
    "nvalchemiops::multiply_by_influence",
    outputs=[OutputSpec("powers", wp.float64, lambda *i: (i[0].shape[0], *i[0].shape[2:4], 3) if i[-1] else (0,))],
    grad_arrays=(),
    mutates_args=["density"],
    backward="none",
    trusted=True,
)
@with_fields
def multiply_by_influence(density: torch.Tensor, law: PowerLaw, with_powers: bool) -> torch.Tensor:
    """Multiply the transform of meshes by the influence function in place.

    Parameters
    ----------
    density : (n_systems, n_channels, n_x, n_y, n_z, 2) tensor
    metric, volume, alpha, b_xy, b_z, mesh_dimensions, first_planes, exponent
        The fields of a `PowerLaw`.
    with_powers : bool

    Returns
    -------
    (n_systems, n_x, n_y, 3) float64 tensor, empty without ``with_powers``
        For each row the sums over z and channels of ``|density|²`` before the product, times the derivative of
        `mesh_influence`, times 1, z and z².
    """
    shape = (density.shape[0], *density.shape[2:4], 3) if with_powers else (0,)
    powers = torch.empty(shape, dtype=torch.float64, device=density.device)
    _launch(law, density.shape[1], None, None, density, powers)
    return powers


def _launch(law: PowerLaw, n_channels: int, *results: torch.Tensor | None) -> None:
    metric, volume, alpha, b_xy, b_z, mesh, first_planes, exponent = law
    numbers = (*mesh, b_xy.shape[1], *first_planes, exponent, math.pi**1.5 / math.gamma(exponent / 2), n_channels)
    dtype = next(t.dtype for t in (results[0], results[2]) if t is not None)
    inputs = [metric, alpha, volume, b_xy.flatten(), b_z.flatten(), *numbers]
    n_rows, length = volume.shape[0] * b_xy.numel(), b_z.numel()
    # no axis of 2^31 elements, which kernels do not take
    shapes = ((n_rows, length), (n_rows, length), (-1, *b_xy.shape[:2], 2 * length), (n_rows, 3))
    there = [None if t is None or t.numel() == 0 else t.view(shape) for t, shape in zip(results, shapes)]
    launch(tabulate_influence(PRECISIONS[dtype].__name__), n_rows, inputs, there, lanes=WARP, kind=length)
