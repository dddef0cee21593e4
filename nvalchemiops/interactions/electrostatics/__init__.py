"""Coulomb interactions."""

from nvalchemiops.compat.deprecation import moved

_NAMES = (
    "coulomb_energy",
    "coulomb_energy_forces",
    "coulomb_forces",
    "dsf_coulomb",
    "estimate_ewald_parameters",
    "estimate_pme_parameters",
    "ewald_real_space",
    "ewald_reciprocal_space",
    "ewald_summation",
    "particle_mesh_ewald",
    "pme_reciprocal_space",
)

__getattr__ = moved(__name__, dict.fromkeys(_NAMES, "nvalchemiops.torch.interactions.electrostatics"))
