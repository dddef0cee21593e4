"""The coefficients of D3 as a torch op (`nvalchemiops.interactions.dispersion.coefficients`)."""

from typing import Any

import torch
import warp as wp

from nvalchemiops.interactions.dispersion import coefficients as kernels
from nvalchemiops.kernels.simd import WARP
from nvalchemiops.torch.autograd import OutputSpec, warp_custom_op
from nvalchemiops.torch.launch import launch


def _pullback(
    inputs: dict[str, Any], gradients: dict[str, torch.Tensor | None], wanted: frozenset[str]
) -> dict[str, torch.Tensor]:
    following = d3_coefficients(**{**inputs, "derivative": inputs["derivative"] + 1})
    parts = [g * d for g, d in zip(gradients.values(), following) if g is not None]
    return {"coordination": sum(parts[1:], parts[0]).sum(1)}


def _fold(info: Any, in_dims: tuple[Any, ...], coordination: Any, row: Any, *others: Any) -> Any:
    """The rule for ``vmap``: slices become more atoms of one call."""
    if any(dim is not None for dim in in_dims[2:]):
        raise NotImplementedError("tables of reference states cannot be mapped over")
    n = info.batch_size
    atoms = [
        t.expand(n, *t.shape) if dim is None else t.movedim(dim, 0) for t, dim in zip((coordination, row), in_dims)
    ]
    found = d3_coefficients(*(t.flatten(0, 1) for t in atoms), *others)
    return tuple(t.unflatten(0, (n, -1)) for t in found), (0, 0)


def _shape(coordination: torch.Tensor, row: Any, references: Any, places: Any, vectors: torch.Tensor, *_: Any) -> Any:
    return coordination.shape[0], vectors.shape[1]


@warp_custom_op(
    "nvalchemiops::d3_coefficients",
    outputs=[OutputSpec("coefficients", wp.float64, _shape), OutputSpec("derivatives", wp.float64, _shape)],
    grad_arrays=["coefficients", "derivatives", "coordination"],
    backward=_pullback,
    vmap=_fold,
    trusted=True,
)
def d3_coefficients(
    coordination: torch.Tensor,
    row: torch.Tensor,
    references: torch.Tensor,
    places: torch.Tensor,
    vectors: torch.Tensor,
    k3: float,
    derivative: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Derivatives ``d^n c_iq / dCN^n`` and ``d^(n+1) c_iq / dCN^(n+1)``, each (n_atoms, n_coefficients) in float64.

    Parameters
    ----------
    coordination : (n_atoms,) float64 tensor
        Coordination numbers.
    row : (n_atoms,) int32 tensor
        Rows of the atoms in ``references`` and ``places``.
    references : (n_rows, n_references) float64 tensor
        Coordination numbers of the reference molecules.
    places : (n_rows, n_references) int32 tensor
        Rows of the reference molecules in ``vectors``; the last row for entries without a molecule.
    vectors : (n_states + 1, n_coefficients) float64 tensor
        ``v_aq``; the last row is zero.
    k3 : float
        Steepness of the weights of reference molecules.
    derivative : int
        The order n >= 0.
    """
    values, derivatives = (coordination.new_empty(coordination.shape[0], vectors.shape[1]) for _ in range(2))
    launch(
        kernels.coefficients(derivative),
        coordination.shape[0],
        [coordination, row, references, places, vectors, k3],
        [values, derivatives],
        lanes=WARP,
        kind=vectors.shape[1].bit_length(),
    )
    return values, derivatives
