"""Potentials at atoms from packed moments, under the path that clients import."""

from nvalchemiops.torch.interactions.electrostatics.multipoles import multipole_electrostatic_features

__all__ = ["multipole_electrostatic_features"]
