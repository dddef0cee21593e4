"""Wave vectors of Ewald sums and meshes, under the path that clients import."""

from nvalchemiops.torch.interactions.electrostatics.wave_vectors import (
    generate_ewald_miller_indices,
    generate_k_squared_pme,
    generate_k_vectors_ewald_summation,
    generate_k_vectors_pme,
    k_vectors_from_miller_indices,
)

__all__ = [
    "generate_ewald_miller_indices",
    "generate_k_squared_pme",
    "generate_k_vectors_ewald_summation",
    "generate_k_vectors_pme",
    "k_vectors_from_miller_indices",
]
