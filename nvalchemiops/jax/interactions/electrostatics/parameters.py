"""Choice of parameters for JAX arrays, outside of ``jit``, since they determine shapes."""

from typing import Any

import jax

from nvalchemiops.jax.operators import eager
from nvalchemiops.jax.utils import dataclass, field
from nvalchemiops.torch.interactions.electrostatics import parameters


@dataclass(frozen=False)
class EwaldParameters:
    """Parameters of an Ewald sum: a pytree.

    Attributes
    ----------
    alpha : (n_systems,) array, 1/length
    real_space_cutoff : (n_systems,) array, length
    reciprocal_space_cutoff : (n_systems,) array, 1/length
    """

    alpha: jax.Array
    real_space_cutoff: jax.Array
    reciprocal_space_cutoff: jax.Array


@dataclass(frozen=False)
class PMEParameters:
    """Parameters of a particle-mesh Ewald sum: a pytree, whose ``mesh_dimensions`` are static.

    Attributes
    ----------
    alpha : (n_systems,) array, 1/length
    mesh_dimensions : (int, int, int)
    mesh_spacing : (n_systems, 3) array, length
    real_space_cutoff : (n_systems,) array, length
    """

    alpha: jax.Array
    mesh_dimensions: tuple[int, int, int] = field(static=True)
    mesh_spacing: jax.Array
    real_space_cutoff: jax.Array


estimate_ewald_parameters: Any = eager(parameters.estimate_ewald_parameters, into=EwaldParameters)
estimate_pme_parameters: Any = eager(parameters.estimate_pme_parameters, into=PMEParameters)
estimate_pme_mesh_dimensions: Any = eager(parameters.estimate_pme_mesh_dimensions)
mesh_spacing_to_dimensions: Any = eager(parameters.mesh_spacing_to_dimensions)
estimate_errors: Any = eager(parameters.estimate_errors)
