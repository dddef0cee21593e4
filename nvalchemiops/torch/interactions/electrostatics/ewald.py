"""The Ewald sum as two tape ops, and the public function that prepares their inputs and adds their results."""

from typing import Any

import numpy as np
import torch
import warp as wp

from nvalchemiops.interactions.electrostatics import ewald as kernels
from nvalchemiops.interactions.electrostatics import parameters
from nvalchemiops.torch.autograd import (
    OutputSpec,
    WarpAutogradContextManager,
    attach_for_backward,
    needs_grad,
    warp_custom_op,
    warp_from_torch,
)
from nvalchemiops.launch import launch
from nvalchemiops.torch.interactions.electrostatics.parameters import EwaldParameters, estimate_ewald_parameters
from nvalchemiops.torch.neighbors import checks, neighbor_list as build_neighbor_list
from nvalchemiops.torch.neighbors.rows import Rows, check_full_list, rows_from_list, rows_from_matrix

_OUTPUTS = [
    OutputSpec("energies", wp.float64, lambda positions, *_: (positions.shape[0],)),
    OutputSpec("forces", wp.vec3d, lambda positions, *_: (positions.shape[0], 3)),
    OutputSpec("charge_gradients", wp.float64, lambda positions, *_: (positions.shape[0],)),
    OutputSpec("virials", wp.mat33d, lambda *inputs: (inputs[0].shape[0] if inputs[-1] else 0, 3, 3)),
]
_DIFFERENTIABLE = [*(spec.name for spec in _OUTPUTS), "positions", "charges", "cell", "alpha"]


@warp_custom_op("nvalchemiops::ewald_real_space", outputs=_OUTPUTS, grad_arrays=_DIFFERENTIABLE)
def _real_space(
    positions: torch.Tensor,
    charges: torch.Tensor,
    cell: torch.Tensor,
    alpha: torch.Tensor,
    batch_idx: torch.Tensor,
    row_begin: torch.Tensor,
    row_end: torch.Tensor,
    index: torch.Tensor,
    shift: torch.Tensor,
    padding: int,
    with_virial: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    track = needs_grad(positions, charges, cell, alpha)
    inputs = _warp_inputs(positions, charges, cell, alpha)
    results, outputs = _new_outputs(positions, with_virial, track)
    integers = [warp_from_torch(t, wp.int32) for t in (batch_idx, row_begin, row_end, index)]
    rows = [*integers, warp_from_torch(shift, wp.vec3i), padding, int(with_virial)]
    with WarpAutogradContextManager(track) as tape:
        _launch(kernels.real_space, track, positions.shape[0], [*inputs.values(), *rows], outputs.values())
    if track:
        attach_for_backward(results[0], tape, **inputs, **outputs)
    return results


@warp_custom_op("nvalchemiops::ewald_reciprocal_space", outputs=_OUTPUTS, grad_arrays=_DIFFERENTIABLE)
def _reciprocal_space(
    positions: torch.Tensor,
    charges: torch.Tensor,
    cell: torch.Tensor,
    alpha: torch.Tensor,
    batch_idx: torch.Tensor,
    atoms: torch.Tensor,
    first_atom: torch.Tensor,
    miller: torch.Tensor,
    k_system: torch.Tensor,
    first_k: torch.Tensor,
    with_virial: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    track = needs_grad(positions, charges, cell, alpha)
    inputs = _warp_inputs(positions, charges, cell, alpha)
    results, outputs = _new_outputs(positions, with_virial, track)
    factors = warp_from_torch(positions.new_empty((miller.shape[0], 2)), wp.vec2d, requires_grad=track)
    system, order, atom_ptr, k_systems, k_ptr = (
        warp_from_torch(t, wp.int32) for t in (batch_idx, atoms, first_atom, k_system, first_k)
    )
    millers = warp_from_torch(miller, wp.vec3i)
    with WarpAutogradContextManager(track) as tape:
        arguments = [*inputs.values(), order, atom_ptr, millers, k_systems]
        _launch(kernels.structure_factors, track, miller.shape[0], arguments, [factors])
        arguments = [*inputs.values(), system, millers, k_ptr, factors, int(with_virial)]
        _launch(kernels.reciprocal_space, track, positions.shape[0], arguments, outputs.values())
    if track:
        attach_for_backward(results[0], tape, **inputs, **outputs)
    return results


def _warp_inputs(
    positions: torch.Tensor, charges: torch.Tensor, cell: torch.Tensor, alpha: torch.Tensor
) -> dict[str, wp.array]:
    return {
        "positions": warp_from_torch(positions, wp.vec3d),
        "charges": warp_from_torch(charges, wp.float64),
        "cell": warp_from_torch(cell, wp.mat33d),
        "alpha": warp_from_torch(alpha, wp.float64),
    }


def _new_outputs(
    positions: torch.Tensor, with_virial: bool, track: bool
) -> tuple[tuple[torch.Tensor, ...], dict[str, wp.array]]:
    n_atoms = positions.shape[0]
    shapes = [(n_atoms,), (n_atoms, 3), (n_atoms,), (n_atoms if with_virial else 0, 3, 3)]
    results = tuple(positions.new_empty(shape, requires_grad=False) for shape in shapes)
    return results, {
        spec.name: warp_from_torch(result, spec.dtype, requires_grad=track)
        for spec, result in zip(_OUTPUTS, results)
    }


def _launch(factory: Any, track: bool, rows: int, inputs: Any, outputs: Any) -> None:
    # a kernel with an adjoint is launched whole, and its offset is ours to give
    offset = [0] if track else []
    arrays = [*offset, *inputs]
    device = next(a for a in arrays if isinstance(a, wp.array)).device
    launch(factory(track), rows, arrays, list(outputs), device=device)
