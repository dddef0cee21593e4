"""Coulomb interactions for JAX arrays, within a cutoff and over all distances."""

from nvalchemiops.jax.interactions.electrostatics.coulomb import (
    coulomb_energy,
    coulomb_energy_forces,
    coulomb_forces,
    dsf_coulomb,
)
from nvalchemiops.jax.interactions.electrostatics.ewald import (
    ewald_real_space,
    ewald_reciprocal_space,
    ewald_summation,
)
from nvalchemiops.jax.interactions.electrostatics.features import electrostatic_potential
from nvalchemiops.jax.interactions.electrostatics.k_vectors import (
    generate_ewald_miller_indices,
    generate_k_squared_pme,
    generate_k_vectors_ewald_summation,
    generate_k_vectors_pme,
    k_vectors_from_miller_indices,
)
from nvalchemiops.jax.interactions.electrostatics.parameters import (
    EwaldParameters,
    PMEParameters,
    estimate_errors,
    estimate_ewald_parameters,
    estimate_pme_mesh_dimensions,
    estimate_pme_parameters,
    mesh_spacing_to_dimensions,
)
from nvalchemiops.jax.interactions.electrostatics.pme import (
    compute_bspline_moduli_1d,
    particle_mesh_ewald,
    pme_reciprocal_space,
)
from nvalchemiops.jax.interactions.electrostatics.slab import compute_slab_correction

__all__ = [
    "EwaldParameters",
    "PMEParameters",
    "compute_bspline_moduli_1d",
    "compute_slab_correction",
    "coulomb_energy",
    "coulomb_energy_forces",
    "coulomb_forces",
    "dsf_coulomb",
    "electrostatic_potential",
    "estimate_errors",
    "estimate_ewald_parameters",
    "estimate_pme_mesh_dimensions",
    "estimate_pme_parameters",
    "ewald_real_space",
    "ewald_reciprocal_space",
    "ewald_summation",
    "generate_ewald_miller_indices",
    "generate_k_squared_pme",
    "generate_k_vectors_ewald_summation",
    "generate_k_vectors_pme",
    "k_vectors_from_miller_indices",
    "mesh_spacing_to_dimensions",
    "particle_mesh_ewald",
    "pme_reciprocal_space",
]
