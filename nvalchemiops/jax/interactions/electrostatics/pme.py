"""Particle-mesh Ewald sums for JAX arrays; see `nvalchemiops.torch.interactions.electrostatics.pme`."""

from typing import Any

from nvalchemiops.jax.interactions.electrostatics._shapes import sum_operator
from nvalchemiops.jax.operators import operator
from nvalchemiops.torch.interactions.electrostatics import pme
from nvalchemiops.torch.interactions.electrostatics.parameters import compute_bspline_moduli_1d as moduli

particle_mesh_ewald: Any = sum_operator(pme.particle_mesh_ewald, without=("prepared", "domain"))
pme_reciprocal_space: Any = sum_operator(pme.pme_reciprocal_space, "waves")
compute_bspline_moduli_1d: Any = operator(moduli)
