"""Damped shifted Coulomb forces, under the path that clients import."""

from nvalchemiops.torch.interactions.electrostatics.coulomb import dsf_coulomb

__all__ = ["dsf_coulomb"]
