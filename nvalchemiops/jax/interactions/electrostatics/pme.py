"""Particle-mesh Ewald sums of JAX arrays; see `nvalchemiops.torch.interactions.electrostatics.pme`."""

from typing import Any

from nvalchemiops.jax.interactions.electrostatics._shapes import SumOperator
from nvalchemiops.jax.operators import operator
from nvalchemiops.torch.interactions.electrostatics import pme
from nvalchemiops.torch.interactions.electrostatics.parameters import compute_bspline_moduli_1d as moduli

particle_mesh_ewald: Any = SumOperator(pme.particle_mesh_ewald, without=("prepared",))
pme_reciprocal_space: Any = SumOperator(pme.pme_reciprocal_space)
compute_bspline_moduli_1d: Any = operator(moduli)
