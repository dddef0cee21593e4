"""Ewald sums for JAX arrays; see `nvalchemiops.torch.interactions.electrostatics.ewald`."""

from typing import Any

from nvalchemiops.jax.interactions.electrostatics._shapes import sum_operator
from nvalchemiops.torch.interactions.electrostatics import ewald

_MAX_ATOMS = {"max_atoms_per_system": "batch_idx"}

ewald_summation: Any = sum_operator(ewald.ewald_summation, extra=_MAX_ATOMS)
ewald_real_space: Any = sum_operator(ewald.ewald_real_space, "real")
ewald_reciprocal_space: Any = sum_operator(ewald.ewald_reciprocal_space, "waves", extra=_MAX_ATOMS)
