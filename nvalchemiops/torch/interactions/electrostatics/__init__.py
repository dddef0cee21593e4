"""Coulomb interactions of torch tensors."""

from nvalchemiops.torch.interactions.electrostatics.coulomb import (
    coulomb_energy,
    coulomb_energy_forces,
    coulomb_forces,
    dsf_coulomb,
    ewald_real_space,
)
from nvalchemiops.torch.interactions.electrostatics.ewald import ewald_summation
from nvalchemiops.torch.interactions.electrostatics.parameters import EwaldParameters, estimate_ewald_parameters

__all__ = [
    "EwaldParameters",
    "coulomb_energy",
    "coulomb_energy_forces",
    "coulomb_forces",
    "dsf_coulomb",
    "estimate_ewald_parameters",
    "ewald_real_space",
    "ewald_summation",
]
