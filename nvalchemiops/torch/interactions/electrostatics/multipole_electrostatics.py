"""Sums of packed moments over k-vectors alone, under the path that clients import."""

from nvalchemiops.torch.interactions.electrostatics.multipoles import multipole_electrostatic_energy

__all__ = ["multipole_electrostatic_energy"]
