"""Coulomb interactions of torch tensors."""

from nvalchemiops.torch.interactions.electrostatics.ewald import ewald_summation
from nvalchemiops.torch.interactions.electrostatics.parameters import EwaldParameters, estimate_ewald_parameters

__all__ = ["EwaldParameters", "estimate_ewald_parameters", "ewald_summation"]
