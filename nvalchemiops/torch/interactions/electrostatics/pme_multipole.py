"""Particle-mesh Ewald sums of packed moments, under the path that clients import."""

from nvalchemiops.torch.interactions.electrostatics.multipoles import multipole_particle_mesh_ewald

__all__ = ["multipole_particle_mesh_ewald"]
