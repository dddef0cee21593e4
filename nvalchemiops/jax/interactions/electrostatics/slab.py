"""The slab correction for JAX arrays; see `nvalchemiops.torch.interactions.electrostatics.slab`."""

from typing import Any

from nvalchemiops.jax.interactions.electrostatics._shapes import sum_operator
from nvalchemiops.torch.interactions.electrostatics import slab

compute_slab_correction: Any = sum_operator(slab.compute_slab_correction)
