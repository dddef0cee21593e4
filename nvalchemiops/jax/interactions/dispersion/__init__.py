"""DFT-D3 dispersion for JAX arrays."""

from nvalchemiops.interactions.dispersion.damping import damping_parameters
from nvalchemiops.jax.interactions.dispersion._dftd3 import D3Parameters, dftd3

__all__ = ["D3Parameters", "damping_parameters", "dftd3"]
