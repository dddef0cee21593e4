"""Potentials at atoms, for JAX arrays."""

from typing import Any

from nvalchemiops.jax.operators import Shape, operator
from nvalchemiops.torch.interactions.electrostatics import features


def _shapes(
    positions: Any, charges: Any, receiver_widths: Any = None, derivatives: int = 1, **_: Any
) -> features.Potentials:
    n_receivers = 1 if receiver_widths is None else receiver_widths.shape[0]
    rows = (positions.shape[0], n_receivers, *charges.shape[1:])
    found: Any = (Shape((*rows, *[3] * order), positions.dtype) for order in range(derivatives + 1))
    return features.Potentials(*found)


electrostatic_potential: Any = operator(features.electrostatic_potential, _shapes)
