"""Ewald sums of JAX arrays; see `nvalchemiops.torch.interactions.electrostatics.ewald`."""

from typing import Any

from nvalchemiops.jax.interactions.electrostatics._shapes import SumOperator
from nvalchemiops.torch.interactions.electrostatics import ewald

_MAX_ATOMS = {"max_atoms_per_system": "batch_idx"}

ewald_summation: Any = SumOperator(ewald.ewald_summation, extra=_MAX_ATOMS)
ewald_real_space: Any = SumOperator(ewald.ewald_real_space)
ewald_reciprocal_space: Any = SumOperator(ewald.ewald_reciprocal_space, extra=_MAX_ATOMS)
