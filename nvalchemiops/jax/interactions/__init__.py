"""Interactions for JAX arrays."""

from nvalchemiops.submodules import loaded_when_used

__getattr__ = loaded_when_used(__name__, ["dispersion", "electrostatics", "pair"])
