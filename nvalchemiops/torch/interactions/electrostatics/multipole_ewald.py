"""Ewald sums of packed moments, under the path that clients import."""

from nvalchemiops.torch.interactions.electrostatics.multipoles import multipole_ewald_summation

__all__ = ["multipole_ewald_summation"]
